/* Posts a batch of one-sided puts. libucp's functions come as addresses: no UCX header is needed. */
#include <stddef.h>
#include <stdint.h>

#define IS_ERROR(pointer) ((uintptr_t)(pointer) >= (uintptr_t)-100)
#define OP_ATTR_MEMH (1u << 8)
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
};

struct batch {
    const uint64_t *sources, *targets, *lengths;
    const int64_t *source_regions, *target_regions;
    void *const *memory_handles; /* by source region */
    void *const *rkeys;          /* by target region */
    uint64_t source_offset, target_offset;
};

/* 0, or the negative status of the put that failed: those before it are posted. A put that is still
 * in progress is released: the endpoint's next flush waits for it all the same. */
int baton_post_puts(const struct api *api, void *worker, void *endpoint, const struct batch *batch,
                    size_t count) {
    struct request_params params = {.op_attr_mask = OP_ATTR_MEMH};
    size_t in_progress = 0;
    for (size_t i = 0; i < count; i++) {
        params.memory_handle = batch->memory_handles[batch->source_regions[i]];
        void *request =
            api->put(endpoint, (const void *)(uintptr_t)(batch->sources[i] + batch->source_offset),
                     batch->lengths[i], batch->targets[i] + batch->target_offset,
                     batch->rkeys[batch->target_regions[i]], &params);
        if (IS_ERROR(request)) return (int)(intptr_t)request;
        if (request) {
            api->release(request);
            if (++in_progress % PROGRESS_EVERY == 0) api->progress(worker);
        }
    }
    return 0;
}
