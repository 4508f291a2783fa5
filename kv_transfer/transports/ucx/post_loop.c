/* The progress thread's queue, and the posting of its one-sided puts. Nothing here needs the GIL, so
 * a Python thread that holds it for long does not delay a put. libucp's functions come as addresses,
 * so no UCX header is needed. */
#define _POSIX_C_SOURCE 199309L
#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define IS_ERROR(pointer) ((uintptr_t)(pointer) >= (uintptr_t)-100)
#define OP_ATTR_MEMH (1u << 8)
#define BUSY (-15)
#define PROGRESS_EVERY 64

struct request_params { /* ucp_request_param_t */
    uint32_t op_attr_mask;
    uint32_t flags;
    uint64_t unused[7];
    void *memory_handle;
};

struct api {
    void *(*put)(void *endpoint, const void *source, size_t length, uint64_t target, void *rkey,
                 const struct request_params *params);
    unsigned (*progress)(void *worker);
    void (*release)(void *request);
    int8_t (*arm)(void *worker);
    void *worker;
    int descriptor; /* the worker's, readable when it has work */
};

struct target { /* where puts go; the endpoint is NULL before it opens and after it closes */
    void *endpoint;
    void *const *memory_handles; /* by source region */
    void *const *rkeys;          /* by target region */
    uint64_t busy_ns;
};

/* block b of tensor t: bases[b / num_blocks] + offsets[t] + b % num_blocks * strides[t] */
struct block_addresses {
    const uint64_t *bases; /* by region */
    uint64_t num_blocks;   /* of a region */
    const uint64_t *offsets, *strides; /* by tensor */
};

struct copy_path {
    struct block_addresses source, target;
    const uint64_t *lengths; /* by tensor */
    uint64_t num_tensors;
};

struct entry {
    _Atomic(struct entry *) next;
    struct target *target; /* NULL: not a put but a Python call */
    const struct copy_path *path;
    const uint64_t *sources, *targets; /* blocks, [num_blocks] */
    uint64_t source_offset, target_offset;
    size_t num_blocks;
};

/* Many threads add, one takes. `before` is the entry taken last: its `next` is the first of the
 * queue, so it must live until another entry is taken. */
struct queue {
    struct entry *before;
    _Atomic(struct entry *) last;
    atomic_int asleep; /* or about to be: whoever adds must signal */
    int status;        /* of the failed put, whose entry is the first; 0: none */
    uint64_t num_posted;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t region_of(const struct block_addresses *blocks, uint64_t block) {
    return block / blocks->num_blocks;
}

static uint64_t address_of(const struct block_addresses *blocks, size_t tensor, uint64_t block) {
    return blocks->bases[region_of(blocks, block)] + blocks->offsets[tensor] +
           block % blocks->num_blocks * blocks->strides[tensor];
}

/* Whether the tensor's block lies in this region, at this address. */
static int follows(const struct block_addresses *blocks, size_t tensor, uint64_t block,
                   uint64_t region, uint64_t address) {
    return region_of(blocks, block) == region && address_of(blocks, tensor, block) == address;
}

/* A put still in progress is released: the endpoint's next flush waits for it anyway. */
static int post_entry(const struct api *api, const struct entry *entry) {
    const struct target *target = entry->target;
    const struct block_addresses *here = &entry->path->source, *there = &entry->path->target;
    struct request_params params = {.op_attr_mask = OP_ATTR_MEMH};
    size_t in_progress = 0;
    for (size_t tensor = 0; tensor < entry->path->num_tensors; tensor++) {
        uint64_t length = entry->path->lengths[tensor];
        for (size_t i = 0; i < entry->num_blocks;) {
            uint64_t from = region_of(here, entry->sources[i]);
            uint64_t to = region_of(there, entry->targets[i]);
            uint64_t source = address_of(here, tensor, entry->sources[i]);
            uint64_t target_address = address_of(there, tensor, entry->targets[i]);
            size_t count = 1; /* neighbours at both ends are one put */
            while (++i < entry->num_blocks &&
                   follows(here, tensor, entry->sources[i], from, source + count * length) &&
                   follows(there, tensor, entry->targets[i], to, target_address + count * length))
                count++;
            params.memory_handle = target->memory_handles[from];
            void *request = api->put(
                target->endpoint, (const void *)(uintptr_t)(source + entry->source_offset),
                count * length, target_address + entry->target_offset, target->rkeys[to], &params);
            if (IS_ERROR(request)) return (int)(intptr_t)request;
            if (request) {
                api->release(request);
                if (++in_progress % PROGRESS_EVERY == 0) api->progress(api->worker);
            }
        }
    }
    return 0;
}

/* Append an entry. True: the thread sleeps, and this caller must wake it. */
int baton_add(struct queue *queue, struct entry *entry) {
    struct entry *previous = atomic_exchange(&queue->last, entry);
    atomic_store(&previous->next, entry);
    return atomic_load(&queue->asleep) && atomic_exchange(&queue->asleep, 0);
}

void baton_take(struct queue *queue) {
    queue->before = atomic_load(&queue->before->next);
    queue->status = 0;
}

/* Post puts from the front, up to one that fails or whose target is not open. */
void baton_post(struct queue *queue, const struct api *api) {
    struct entry *first;
    while (!queue->status && (first = atomic_load(&queue->before->next)) && first->target &&
           first->target->endpoint) {
        uint64_t start_ns = now_ns();
        queue->status = post_entry(api, first);
        first->target->busy_ns += now_ns() - start_ns;
        if (queue->status) return;
        queue->before = first;
        queue->num_posted++;
    }
}

/* As ucp_worker_wait, for two workers: returns at once if one has work. */
static int8_t wait_for_either(const struct api *api, void *inlet, int inlet_descriptor) {
    struct pollfd events[] = {{api->descriptor, POLLIN, 0}, {inlet_descriptor, POLLIN, 0}};
    int8_t status = api->arm(api->worker);
    if (!status) status = api->arm(inlet);
    if (!status) poll(events, 2, -1);
    return status == BUSY ? 0 : status;
}

/* Wait for a peer's event or a signal unless there is an entry, then post; returns the wait's status.
 * The thread sets `asleep` before it looks. So a caller that adds an entry later sends a signal, and
 * a signal that arrives before the wait makes the wait return at once. */
int8_t baton_sleep(struct queue *queue, const struct api *api, void *inlet, int descriptor) {
    int8_t status = 0;
    atomic_store(&queue->asleep, 1);
    if (!atomic_load(&queue->before->next)) status = wait_for_either(api, inlet, descriptor);
    atomic_store(&queue->asleep, 0);
    baton_post(queue, api);
    return status;
}
