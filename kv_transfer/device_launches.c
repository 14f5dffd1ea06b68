/* A thread that launches kernels on one stream of a GPU, in the order asked for, and says when each has ended: whoever asks waits
   neither for the driver nor for an interpreter. See device_launches.py, which says what AT_ONCE and ARGUMENT_BYTES are. */

#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* The driver's functions and numbers, as cuda.h has them. */
struct driver {
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*create_event)(void **, unsigned);
    int (*destroy_event)(void *);
    int (*record)(void *, void *);
    int (*query)(void *);
};
enum { SUCCESS = 0, NOT_READY = 600, DISABLE_TIMING = 2 };
static void *const NO_MORE = (void *)0, *const ARGUMENTS = (void *)1, *const ARGUMENTS_SIZE = (void *)2;

/* What has just been launched ends within microseconds, so it is looked at often; what has not ended soon waits for others' work.
   A look takes a lock of the driver that the engine's launches want too. */
enum { LOOK_NS = 4000, SOON_NS = 400000, NAP_NS = 20000 };

/* Without a function: the last. */
struct launch {
    void *function;
    unsigned programs, threads, shared_bytes;
    size_t size;
    _Alignas(16) char arguments[ARGUMENT_BYTES];
};

enum { ROOM = AT_ONCE + 1 };

struct launches {
    struct driver driver;
    int (*enter)(void *);
    void *context, *stream, *events[AT_ONCE];
    struct launch asked[ROOM];
    uint64_t count; /* of what was asked for; the thread goes by the semaphore */
    sem_t unseen;
    int told; /* an eventfd: counts what has ended; above that, in the upper half, the error that ended the thread */
    pthread_t thread;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void tell(struct launches *l, uint64_t count)
{
    if (write(l->told, &count, sizeof count) < 0)
        abort(); /* the counter cannot be full, nor closed while this thread lives */
}

static int launch(struct launches *l, struct launch *it, void *event)
{
    void *how[] = {ARGUMENTS, it->arguments, ARGUMENTS_SIZE, &it->size, NO_MORE};
    int failed = l->driver.launch(
        it->function, it->programs, 1, 1, it->threads, 1, 1, it->shared_bytes, l->stream, NULL, how);
    return failed ? failed : l->driver.record(event, l->stream);
}

static void pause_until_next_look(int64_t since_ns)
{
    int64_t begin_ns = now_ns();
    if (begin_ns - since_ns > SOON_NS)
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    else
        while (now_ns() - begin_ns < LOOK_NS)
            ;
}

/* Whether one more is asked for. Waits for it when there is nothing else to do. */
static int one_more(struct launches *l, int idle)
{
    if (!idle)
        return !sem_trywait(&l->unseen);
    while (sem_wait(&l->unseen)) /* a signal */
        ;
    return 1;
}

static int serve(struct launches *l)
{
    uint64_t launched = 0, ended = 0;
    int64_t since_ns = 0;
    for (int last = 0; !last || ended < launched;) {
        if (!last && one_more(l, ended == launched)) {
            struct launch *it = &l->asked[launched % ROOM];
            last = it->function == NULL;
            int failed = last ? SUCCESS : launch(l, it, l->events[launched++ % AT_ONCE]);
            if (failed)
                return failed;
            since_ns = now_ns();
            continue;
        }
        int state = l->driver.query(l->events[ended % AT_ONCE]);
        if (state == SUCCESS) {
            ended++;
            tell(l, 1);
            since_ns = now_ns();
        } else if (state == NOT_READY)
            pause_until_next_look(since_ns);
        else
            return state;
    }
    return SUCCESS;
}

static void *run(void *argument)
{
    struct launches *l = argument;
    int failed = l->enter(l->context);
    for (int place = 0; place < AT_ONCE && !failed; place++)
        failed = l->driver.create_event(&l->events[place], DISABLE_TIMING);
    if (!failed)
        failed = serve(l);
    if (failed)
        tell(l, (uint64_t)failed << 32);
    for (int place = 0; place < AT_ONCE && l->events[place]; place++)
        l->driver.destroy_event(l->events[place]);
    return NULL;
}

/* `enter(context)` makes the GPU the thread's. NULL: there is no thread, no memory or no descriptor to be had. */
struct launches *launches_begin(const struct driver *driver, int (*enter)(void *), void *context, void *stream)
{
    struct launches *l = calloc(1, sizeof *l);
    if (l == NULL)
        return NULL;
    l->driver = *driver;
    l->enter = enter;
    l->context = context;
    l->stream = stream;
    l->told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->told >= 0 && !sem_init(&l->unseen, 0, 0) && !pthread_create(&l->thread, NULL, run, l)) {
        pthread_setname_np(l->thread, "kv-launches");
        return l;
    }
    if (l->told >= 0)
        close(l->told);
    free(l);
    return NULL;
}

int launches_descriptor(const struct launches *l)
{
    return l->told;
}

/* At most AT_ONCE that have not been told. */
void launches_ask(
    struct launches *l, void *function, unsigned programs, unsigned threads, unsigned shared_bytes, const char *arguments,
    size_t size)
{
    struct launch *it = &l->asked[l->count++ % ROOM];
    it->function = function;
    it->programs = programs;
    it->threads = threads;
    it->shared_bytes = shared_bytes;
    it->size = size;
    memcpy(it->arguments, arguments, size);
    sem_post(&l->unseen);
}

/* How many more have ended, and above that, in the upper half, the error that ended the thread. Does not wait. */
uint64_t launches_told(struct launches *l)
{
    uint64_t count;
    return read(l->told, &count, sizeof count) == sizeof count ? count : 0;
}

/* Waits until all that was asked for has ended, and the thread. */
void launches_finish(struct launches *l)
{
    launches_ask(l, NULL, 0, 0, 0, "", 0);
    pthread_join(l->thread, NULL);
}

void launches_free(struct launches *l)
{
    sem_destroy(&l->unseen);
    close(l->told);
    free(l);
}
