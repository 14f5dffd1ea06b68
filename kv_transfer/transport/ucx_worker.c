/* One UCX worker and the one thread that touches it. Orders come in through a queue, outcomes go out through another and an
   eventfd, so that whoever orders never waits for UCX, and UCX never for an interpreter. See ucx_worker.py.

   A thread that `polls` never sleeps and never asks to be woken; else it sleeps until an order or UCX wakes it. */

#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum kind { CONNECT, RECEIVE, SEND, CANCEL, DESTROY, DESCRIBE, DROP_STRAYS, STOP };
enum { STRAYS_AT_ONCE = 1024, STRAY_LIMIT_BYTES = 64 * 1024 };

/* `number` names an order, and its outcome; that of CONNECT names the endpoint too. CONNECT's `buffer` is the peer's address, of
   which the queue has a copy; RECEIVE's and SEND's belongs to UCX until the outcome. CANCEL's `tag` is the number of what is cancelled,
   DROP_STRAYS' `length` a mask over tags. */
struct order {
    enum kind kind;
    uint64_t number;
    struct endpoint *endpoint;
    void *buffer;
    size_t length;
    uint64_t tag;
};

/* `value`: CONNECT's endpoint, DESCRIBE's text (to be freed), DROP_STRAYS' count. An endpoint that fails has one more outcome. */
struct outcome {
    uint64_t number;
    uint64_t value;
    int64_t status;
};

struct queue {
    void *items;
    size_t count, room;
};

struct worker {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *address;
    size_t address_length;
    int polls, stopped, event_fd;
    int (*enter)(void *);
    void *enter_argument;
    ucs_status_t status; /* of the start */
    sem_t started;
    pthread_t thread;
    struct endpoint *failed;
    size_t open;

    pthread_mutex_t lock;
    struct queue orders, outcomes;
    int told;
    atomic_int ordered, asleep;
    int order_fd, outcome_fd;
};

struct operation {
    struct endpoint *endpoint;
    uint64_t number;
    void *request;
    int over; /* before `request` is known */
    ucs_status_t status;
    struct operation **link, *next;
};

struct endpoint {
    struct worker *worker;
    ucp_ep_h ep;
    uint64_t number;
    struct operation *open;
    struct endpoint *next_failed;
    ucs_status_t status; /* why it has failed */
    int closed;
};

static void *must(void *memory)
{
    if (memory == NULL) {
        fputs("ucx_worker: out of memory\n", stderr);
        abort();
    }
    return memory;
}

static void *append(struct queue *queue, size_t size)
{
    if (queue->count == queue->room) {
        queue->room = queue->room ? 2 * queue->room : 64;
        queue->items = must(realloc(queue->items, queue->room * size));
    }
    return (char *)queue->items + size * queue->count++;
}

static void wake(int fd)
{
    uint64_t one = 1;
    if (write(fd, &one, sizeof one) < 0)
        return; /* it is awake: the counter is full */
}

static void tell(struct worker *w, uint64_t number, int64_t status, uint64_t value)
{
    pthread_mutex_lock(&w->lock);
    *(struct outcome *)append(&w->outcomes, sizeof(struct outcome)) = (struct outcome){number, value, status};
    int unknown = !w->told;
    w->told = 1;
    pthread_mutex_unlock(&w->lock);
    if (unknown)
        wake(w->outcome_fd);
}

/* Messages. */

static struct operation *begin(struct endpoint *endpoint, uint64_t number)
{
    struct operation *operation = must(calloc(1, sizeof *operation));
    operation->endpoint = endpoint;
    operation->number = number;
    operation->next = endpoint->open;
    operation->link = &endpoint->open;
    if (operation->next != NULL)
        operation->next->link = &operation->next;
    endpoint->open = operation;
    endpoint->worker->open++;
    return operation;
}

static void forget_if_over(struct endpoint *endpoint)
{
    if (endpoint->closed && endpoint->open == NULL)
        free(endpoint);
}

static void end(struct operation *operation, ucs_status_t status)
{
    struct endpoint *endpoint = operation->endpoint;
    *operation->link = operation->next;
    if (operation->next != NULL)
        operation->next->link = operation->link;
    endpoint->worker->open--;
    tell(endpoint->worker, operation->number, status, 0);
    free(operation);
    forget_if_over(endpoint);
}

/* Not every UCX waits with its call until the function that began the operation has returned: then `note` ends it. */
static void ended(void *request, ucs_status_t status, struct operation *operation)
{
    if (operation->request != NULL)
        end(operation, status);
    else {
        operation->over = 1;
        operation->status = status;
    }
    ucp_request_free(request);
}

static void sent(void *request, ucs_status_t status, void *operation)
{
    ended(request, status, operation);
}

static void received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *operation)
{
    ended(request, status, operation);
}

/* `request`: what UCX answered. NULL is done, without a call. */
static void note(struct operation *operation, ucs_status_ptr_t request)
{
    if (operation->over)
        end(operation, operation->status);
    else if (UCS_PTR_IS_PTR(request))
        operation->request = request;
    else
        end(operation, UCS_PTR_STATUS(request));
}

static void send_message(struct worker *w, const struct order *order)
{
    struct operation *operation = begin(order->endpoint, order->number);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = sent,
        .user_data = operation,
    };
    note(operation, ucp_tag_send_nbx(order->endpoint->ep, order->buffer, order->length, order->tag, &param));
}

static void receive_message(struct worker *w, const struct order *order)
{
    struct operation *operation = begin(order->endpoint, order->number);
    if (order->endpoint->status != UCS_OK) {
        end(operation, order->endpoint->status);
        return;
    }
    ucp_tag_recv_info_t info;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO,
        .cb.recv = received,
        .user_data = operation,
        .recv_info.tag_info = &info,
    };
    note(operation, ucp_tag_recv_nbx(w->worker, order->buffer, order->length, order->tag, UINT64_MAX, &param));
}

static void cancel(struct worker *w, struct operation *operation)
{
    if (operation->request != NULL)
        ucp_request_cancel(w->worker, operation->request); /* it may end within */
}

static void cancel_all(struct worker *w, struct endpoint *endpoint)
{
    for (struct operation *operation = endpoint->open, *next; operation != NULL; operation = next) {
        next = operation->next;
        cancel(w, operation);
    }
}

static void cancel_one(struct worker *w, const struct order *order)
{
    for (struct operation *operation = order->endpoint->open; operation != NULL; operation = operation->next)
        if (operation->number == order->tag) {
            cancel(w, operation);
            return;
        }
}

static void dropped(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *scratch)
{
    free(scratch);
    ucp_request_free(request);
}

/* Small messages that nobody posted for. Large ones hold no memory here and end with their endpoint. */
static uint64_t drop_strays(struct worker *w, uint64_t tag, uint64_t mask)
{
    for (uint64_t count = 0; count < STRAYS_AT_ONCE; count++) {
        ucp_tag_recv_info_t info;
        if (ucp_tag_probe_nb(w->worker, tag, mask, 0, &info) == NULL || info.length > STRAY_LIMIT_BYTES)
            return count;
        void *scratch = must(malloc(info.length + 1));
        ucp_request_param_t param = {
            .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO,
            .cb.recv = dropped,
            .user_data = scratch,
            .recv_info.tag_info = &info,
        };
        ucp_tag_message_h message = ucp_tag_probe_nb(w->worker, tag, mask, 1, &info);
        if (!UCS_PTR_IS_PTR(ucp_tag_msg_recv_nbx(w->worker, scratch, info.length, message, &param)))
            free(scratch);
    }
    return STRAYS_AT_ONCE;
}

/* Endpoints. */

static void endpoint_failed(void *argument, ucp_ep_h ep, ucs_status_t status)
{
    struct endpoint *endpoint = argument;
    endpoint->status = status;
    endpoint->next_failed = endpoint->worker->failed;
    endpoint->worker->failed = endpoint;
    tell(endpoint->worker, endpoint->number, status, 0);
}

/* UCX ends what a failed endpoint sends; what waits to be received from it belongs to the worker. */
static int cancel_of_failed(struct worker *w)
{
    int any = w->failed != NULL;
    for (struct endpoint *endpoint; (endpoint = w->failed) != NULL;) {
        w->failed = endpoint->next_failed;
        cancel_all(w, endpoint);
    }
    return any;
}

static void connect_endpoint(struct worker *w, const struct order *order)
{
    struct endpoint *endpoint = must(calloc(1, sizeof *endpoint));
    endpoint->worker = w;
    endpoint->number = order->number;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = order->buffer,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = endpoint_failed, .arg = endpoint},
    };
    ucs_status_t status = ucp_ep_create(w->worker, &params, &endpoint->ep);
    free(order->buffer);
    tell(w, order->number, status, status == UCS_OK ? (uintptr_t)endpoint : 0);
    if (status != UCS_OK)
        free(endpoint);
}

struct destruction {
    struct endpoint *endpoint;
    uint64_t number;
};

static void finish_destruction(struct destruction *destruction)
{
    struct endpoint *endpoint = destruction->endpoint;
    tell(endpoint->worker, destruction->number, UCS_OK, 0);
    endpoint->worker->open--;
    endpoint->closed = 1;
    forget_if_over(endpoint);
    free(destruction);
}

static void endpoint_closed(void *request, ucs_status_t status, void *destruction)
{
    finish_destruction(destruction);
    ucp_request_free(request);
}

static void destroy_endpoint(struct worker *w, const struct order *order)
{
    struct destruction *destruction = must(malloc(sizeof *destruction));
    *destruction = (struct destruction){order->endpoint, order->number};
    w->open++;
    cancel_of_failed(w);
    cancel_all(w, order->endpoint);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = endpoint_closed,
        .user_data = destruction,
    };
    if (!UCS_PTR_IS_PTR(ucp_ep_close_nbx(order->endpoint->ep, &param)))
        finish_destruction(destruction);
}

static char *described(ucp_ep_h ep)
{
    char *text = NULL;
    size_t size;
    FILE *stream = must(open_memstream(&text, &size));
    ucp_ep_print_info(ep, stream);
    fclose(stream);
    return text;
}

/* The thread. */

static int obey(struct worker *w)
{
    if (!atomic_load(&w->ordered))
        return 0;
    pthread_mutex_lock(&w->lock);
    struct queue orders = w->orders;
    w->orders = (struct queue){0};
    atomic_store(&w->ordered, 0);
    pthread_mutex_unlock(&w->lock);
    for (size_t index = 0; index < orders.count; index++) {
        const struct order *order = (struct order *)orders.items + index;
        switch (order->kind) {
        case CONNECT: connect_endpoint(w, order); break;
        case RECEIVE: receive_message(w, order); break;
        case SEND: send_message(w, order); break;
        case CANCEL: cancel_one(w, order); break;
        case DESTROY: destroy_endpoint(w, order); break;
        case DESCRIBE: tell(w, order->number, UCS_OK, (uintptr_t)described(order->endpoint->ep)); break;
        case DROP_STRAYS: tell(w, order->number, UCS_OK, drop_strays(w, order->tag, order->length)); break;
        case STOP: w->stopped = 1; break;
        }
    }
    free(orders.items);
    return 1;
}

static void sleep_until_woken(struct worker *w)
{
    struct pollfd fds[2] = {{.fd = w->event_fd, .events = POLLIN}, {.fd = w->order_fd, .events = POLLIN}};
    uint64_t times;
    atomic_store(&w->asleep, 1);
    if (!atomic_load(&w->ordered) && ucp_worker_arm(w->worker) == UCS_OK)
        poll(fds, 2, -1);
    atomic_store(&w->asleep, 0);
    if (read(w->order_fd, &times, sizeof times) < 0)
        return; /* nothing was there */
}

static ucs_status_t start(struct worker *w)
{
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK)
        return status;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_TAG | (w->polls ? 0 : UCP_FEATURE_WAKEUP),
    };
    status = ucp_init(&params, config, &w->context);
    ucp_config_release(config);
    if (status != UCS_OK)
        return status;
    ucp_worker_params_t worker_params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    status = ucp_worker_create(w->context, &worker_params, &w->worker);
    if (status == UCS_OK) {
        if (!w->polls)
            status = ucp_worker_get_efd(w->worker, &w->event_fd);
        if (status == UCS_OK)
            status = ucp_worker_get_address(w->worker, &w->address, &w->address_length);
        if (status == UCS_OK)
            return UCS_OK;
        ucp_worker_destroy(w->worker);
    }
    ucp_cleanup(w->context);
    return status;
}

static void *run(void *argument)
{
    struct worker *w = argument;
    pthread_setname_np(pthread_self(), "ucx-worker");
    w->status = w->enter != NULL && w->enter(w->enter_argument) ? UCS_ERR_NO_DEVICE : start(w);
    int runs = w->status == UCS_OK;
    sem_post(&w->started);
    if (!runs)
        return NULL;
    while (!w->stopped) {
        int busy = obey(w);
        busy |= ucp_worker_progress(w->worker) != 0;
        busy |= cancel_of_failed(w);
        if (!busy && !w->polls)
            sleep_until_woken(w);
    }
    ucp_worker_release_address(w->worker, w->address);
    if (w->open == 0) { /* else UCX may still copy: that ends with the process */
        ucp_worker_destroy(w->worker);
        ucp_cleanup(w->context);
    }
    return NULL;
}

/* For other threads. */

static void release(struct worker *w)
{
    close(w->order_fd);
    close(w->outcome_fd);
    free(w->orders.items);
    free(w->outcomes.items);
    free(w);
}

/* `enter(enter_argument)` is the first that the thread does; not 0 is a failure. NULL: `status` says why. Waits until UCX has
   started. */
struct worker *ucx_worker_open(int polls, int (*enter)(void *), void *enter_argument, int *status)
{
    struct worker *w = must(calloc(1, sizeof *w));
    w->polls = polls;
    w->enter = enter;
    w->enter_argument = enter_argument;
    pthread_mutex_init(&w->lock, NULL);
    sem_init(&w->started, 0, 0);
    w->order_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->outcome_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->status = UCS_ERR_NO_RESOURCE;
    int failed = w->order_fd < 0 || w->outcome_fd < 0 || pthread_create(&w->thread, NULL, run, w) != 0;
    if (!failed) {
        while (sem_wait(&w->started) != 0)
            ; /* a signal */
        if (w->status == UCS_OK)
            return w;
        pthread_join(w->thread, NULL);
    }
    *status = w->status;
    release(w);
    return NULL;
}

const void *ucx_worker_address(const struct worker *w, size_t *length)
{
    *length = w->address_length;
    return w->address;
}

/* Readable while there are outcomes. */
int ucx_worker_outcome_fd(const struct worker *w)
{
    return w->outcome_fd;
}

void ucx_worker_order(struct worker *w, int kind, uint64_t number, struct endpoint *endpoint, void *buffer, size_t length,
                      uint64_t tag)
{
    if (kind == CONNECT)
        buffer = memcpy(must(malloc(length)), buffer, length);
    pthread_mutex_lock(&w->lock);
    *(struct order *)append(&w->orders, sizeof(struct order)) =
        (struct order){kind, number, endpoint, buffer, length, tag};
    atomic_store(&w->ordered, 1);
    pthread_mutex_unlock(&w->lock);
    if (!w->polls && atomic_load(&w->asleep))
        wake(w->order_fd);
}

/* The oldest outcomes, at most so many; how many there were. */
int ucx_worker_take(struct worker *w, struct outcome *into, int most)
{
    uint64_t times;
    pthread_mutex_lock(&w->lock);
    struct outcome *items = w->outcomes.items;
    size_t taken = w->outcomes.count < (size_t)most ? w->outcomes.count : (size_t)most;
    if (taken > 0) {
        memcpy(into, items, taken * sizeof *items);
        w->outcomes.count -= taken;
        memmove(items, items + taken, w->outcomes.count * sizeof *items);
    }
    if (w->outcomes.count == 0) {
        w->told = 0;
        if (read(w->outcome_fd, &times, sizeof times) < 0)
            times = 0; /* nothing was there */
    }
    pthread_mutex_unlock(&w->lock);
    return (int)taken;
}

/* Every endpoint must have been destroyed. Waits for the thread. */
void ucx_worker_close(struct worker *w)
{
    ucx_worker_order(w, STOP, 0, NULL, NULL, 0, 0);
    pthread_join(w->thread, NULL);
    release(w);
}

/* What ucp_context_print_info says of this machine, to be freed; NULL where UCX does not start. */
char *ucx_context_described(void)
{
    char *text = NULL;
    size_t size;
    ucp_config_t *config;
    ucp_context_h context;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    if (ucp_config_read(NULL, NULL, &config) != UCS_OK)
        return NULL;
    ucs_status_t status = ucp_init(&params, config, &context);
    ucp_config_release(config);
    if (status != UCS_OK)
        return NULL;
    FILE *stream = must(open_memstream(&text, &size));
    ucp_context_print_info(context, stream);
    fclose(stream);
    ucp_cleanup(context);
    return text;
}
