/* The yardstick of bench/handoff.py: the runs of a handoff, copied by memcpy. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void copy_runs(size_t count, const uint64_t *sources, const uint64_t *targets,
               const uint64_t *lengths, uint64_t source_offset, uint64_t target_offset) {
    for (size_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)(targets[i] + target_offset),
               (const void *)(uintptr_t)(sources[i] + source_offset), lengths[i]);
}
