/* SPDX-License-Identifier: Apache-2.0
 *
 * local_put.c: puts beside memcpy.
 *
 * Every put has a new key, so each one pushes an old block out of the arena, as in a cache that has
 * been running for a while. Both sides take the blocks of the working set in the same order.
 */
#include "tests/bench/local.h"

#include "base/clock.h"

#include <pthread.h>
#include <string.h>

#define SLOT_BYTES (LOCAL_BLOCK_BYTES + KVF_RECORD_PAGE_BYTES)

struct slots {
    struct local *local;
    struct kvf_client *staged; /* its staging memory holds the working set */
    struct kvf_stage *stages;  /* by position in the order */
};

static struct slots slots;

/* --- memcpy ----------------------------------------------------------------------------------- */

static void copy_block(struct local *local, uint64_t block)
{
    uint8_t *target = local->target + block * LOCAL_BLOCK_BYTES;

    memcpy(target, local->source + block * LOCAL_BLOCK_BYTES, LOCAL_BLOCK_BYTES);
    bench_keep(target);
}

static double copy_one(void *ctx, double seconds)
{
    struct local *local = ctx;
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    local_order_restart(local);
    do {
        for (uint64_t i = 0; i < local->n_blocks; i++) {
            copy_block(local, local->order[i]);
        }
        n += local->n_blocks;
        local_order_next(local);
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, kvf_now_ns() - start_ns);
}

static void *copy_half(void *arg)
{
    struct local *local = arg;

    for (uint64_t i = 1; i < local->n_blocks; i += 2) {
        copy_block(local, local->order[i]);
    }
    return NULL;
}

/* What the memory of this machine gives to two threads: a put is two copies on two of them. */
static double copy_two(void *ctx, double seconds)
{
    struct local *local = ctx;
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    local_order_restart(local);
    do {
        pthread_t thread;

        if (pthread_create(&thread, NULL, copy_half, local) != 0) {
            bench_die("no second thread");
        }
        for (uint64_t i = 0; i < local->n_blocks; i += 2) {
            copy_block(local, local->order[i]);
        }
        pthread_join(thread, NULL);
        n += local->n_blocks;
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, kvf_now_ns() - start_ns);
}

/* --- from a caller's buffer ------------------------------------------------------------------- */

static int submit_put(struct local *local, uint64_t position, uint64_t *request_out)
{
    struct local_key bytes;
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_BYTES,
        .key = local_key(local->next_key, &bytes),
        .data = local->source + (uint64_t)local->order[position] * LOCAL_BLOCK_BYTES,
        .data_bytes = LOCAL_BLOCK_BYTES,
    };
    int status = kvf_submit_put(local->client, &item, 1, NULL, 0, request_out);

    local->next_key += status == KVF_OK;
    return status;
}

static double put(void *ctx, double seconds)
{
    struct local *local = ctx;
    struct local_pipe pipe = {local->client, submit_put, NULL, 1};
    uint64_t elapsed_ns;
    uint64_t n;

    local_order_restart(local);
    n = local_pipe_run(local, &pipe, seconds, &elapsed_ns);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, elapsed_ns);
}

/* --- from staging ----------------------------------------------------------------------------- */

static void seal(uint64_t position)
{
    if (kvf_stage_seal(slots.staged, &slots.stages[position], LOCAL_BLOCK_BYTES) != KVF_OK) {
        bench_die("a slot cannot be sealed");
    }
}

/* Fill a slot for each block of the order. */
static void fill_slots(struct local *local, bool and_seal)
{
    for (uint64_t i = 0; i < local->n_blocks; i++) {
        int status = kvf_stage_acquire(slots.staged, LOCAL_BLOCK_BYTES, &slots.stages[i]);

        if (status != KVF_OK) {
            bench_die("no slot for block %u of the working set: %s", (unsigned)i,
                      kvf_status_text(status));
        }
        memcpy(slots.stages[i].payload,
               local->source + (uint64_t)local->order[i] * LOCAL_BLOCK_BYTES, LOCAL_BLOCK_BYTES);
        if (and_seal) {
            seal(i);
        }
    }
}

static int submit_sealed(struct local *local, uint64_t position, uint64_t *request_out)
{
    struct local_key bytes;
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_STAGED,
        .key = local_key(local->next_key, &bytes),
        .stage = slots.stages[position].stage,
    };
    int status = kvf_submit_put(slots.staged, &item, 1, NULL, 0, request_out);

    local->next_key += status == KVF_OK;
    return status;
}

static int submit_filled(struct local *local, uint64_t position, uint64_t *request_out)
{
    seal(position);
    return submit_sealed(local, position, request_out);
}

/* Only putting counts, not filling: rounds of the working set until `seconds` of that are over. */
static double put_slots(struct local *local, double seconds, bool is_sealed)
{
    struct local_pipe pipe = {slots.staged, is_sealed ? submit_sealed : submit_filled, NULL, 1};
    uint64_t total_ns = 0;
    uint64_t n = 0;

    local_order_restart(local);
    do {
        uint64_t elapsed_ns;

        fill_slots(local, is_sealed);
        n += local_pipe_run(local, &pipe, 0, &elapsed_ns);
        total_ns += elapsed_ns;
        local_order_next(local);
    } while ((double)total_ns < seconds * 1e9);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, total_ns);
}

static double put_sealed(void *ctx, double seconds)
{
    return put_slots(ctx, seconds, true);
}

static double put_filled(void *ctx, double seconds)
{
    return put_slots(ctx, seconds, false);
}

/* --- all of it -------------------------------------------------------------------------------- */

void local_puts(struct local *local)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    uint64_t elapsed_ns;
    struct local_pipe pipe = {local->client, submit_put, NULL, 1};
    size_t stages_bytes = local->n_blocks * sizeof(*slots.stages);

    if (kvf_client_info(local->client, &info) != KVF_OK) {
        bench_die("no facts about the connection");
    }
    /* Every page of the arena is written once before time counts. */
    local_order_restart(local);
    for (uint64_t bytes = 0; bytes < info.arena_bytes; bytes += local->n_blocks * SLOT_BYTES) {
        local_pipe_run(local, &pipe, 0, &elapsed_ns);
    }
    slots = (struct slots){.local = local};
    slots.staged = local_open(local, 0, (local->n_blocks + 1) * SLOT_BYTES);
    slots.stages = bench_memory(stages_bytes, 0);

    bench_pairs(&local->run, "put_vs_memcpy", put, copy_one, local);
    bench_pairs(&local->run, "put_staged_vs_memcpy", put_sealed, copy_one, local);
    bench_pairs(&local->run, "put_filled_vs_memcpy", put_filled, copy_one, local);
    bench_values(&local->run, "memcpy_two_threads", copy_two, local);

    kvf_close(slots.staged);
    bench_memory_free(slots.stages, stages_bytes);
}
