/* Stands before the driver where UCX maps and unmaps a peer's memory for each message that it reads. What a session keeps mapped
   is answered from a table; everything else goes to the driver. See peer_mappings.py. */

#include <pthread.h>
#include <string.h>

typedef struct { char reserved[64]; } Handle;
typedef unsigned long long Address;
typedef int (*Open)(Address *, Handle, unsigned);
typedef int (*Close)(Address);

enum { SUCCESS = 0, NOT_INITIALIZED = 3, AT_MOST = 4096 };

/* `lent`: how often it was answered and not closed since. What UCX had from the driver, before it was kept, it gives back there. */
static struct { Handle handle; Address address; int lent; } kept[AT_MOST];
static int count;
static long long answered;
static Open driver_open;
static Close driver_close;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void mappings_stand_before(Open open, Close close)
{
    driver_open = open;
    driver_close = close;
}

/* 0: there is no room. */
int mappings_keep(const Handle *handle, Address address)
{
    pthread_mutex_lock(&lock);
    int fits = count < AT_MOST;
    if (fits) {
        kept[count].handle = *handle;
        kept[count].lent = 0;
        kept[count++].address = address;
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

/* One entry, however often the address was kept. */
void mappings_drop(Address address)
{
    pthread_mutex_lock(&lock);
    for (int index = 0; index < count; index++)
        if (kept[index].address == address) {
            int lent = kept[index].lent;
            kept[index] = kept[--count];
            for (int other = 0; other < count; other++)
                if (kept[other].address == address) {
                    kept[other].lent += lent;
                    break;
                }
            break;
        }
    pthread_mutex_unlock(&lock);
}

long long mappings_answered(void)
{
    pthread_mutex_lock(&lock);
    long long seen = answered;
    pthread_mutex_unlock(&lock);
    return seen;
}

int cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int index = 0; index < count && !found; index++)
        if (!memcmp(&kept[index].handle, &handle, sizeof handle)) {
            *address = kept[index].address;
            kept[index].lent++;
            found = 1;
            answered++;
        }
    pthread_mutex_unlock(&lock);
    if (found)
        return SUCCESS;
    return driver_open ? driver_open(address, handle, flags) : NOT_INITIALIZED;
}

int cuIpcCloseMemHandle(Address address)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int index = 0; index < count && !found; index++)
        if (kept[index].address == address && kept[index].lent) {
            kept[index].lent--;
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    if (found)
        return SUCCESS;
    return driver_close ? driver_close(address) : NOT_INITIALIZED;
}
