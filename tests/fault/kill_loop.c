/* SPDX-License-Identifier: Apache-2.0
 *
 * kill_loop.c: kill the daemon at chosen places of its store, again and again, and look each time
 * at what comes back.
 *
 *   fill the store three times over
 *   round: start, first hit, is everything there that must be, read much of it, write until it dies
 *
 * Half of the bytes are in records of 64 KiB, half in larger ones. Only durable puts count as
 * logged. Every block that comes back is compared with what was put. What may be missing is in
 * kill_model.h. The last line of the output is the result as JSON.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/limits.h"
#include "base/parse.h"
#include "tests/fault/kill_model.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"

#define SMALL_PAYLOAD ((64u << 10) - KVF_RECORD_PAGE_BYTES)
#define WINDOW        16   /* puts in flight */
#define BATCH         8    /* blocks of one get */
#define ROUNDS_MAX    1000 /* restarts that are timed */
#define TRIES_MAX     5    /* to make the daemon die at a place */

enum kind {
    RECORD,
    SEAL,
    FOOTER,
    REUSE,
    RECOVERY,
    N_KINDS
};

static const char *const kind_names[N_KINDS] = {"record_write", "seal", "footer", "reuse",
                                                "recovery"};

/* Where it dies. most_hits: it dies at a hit drawn from 1 to this; 0: from a segment's records. */
static const struct point {
    enum kind kind;
    const char *name;
    uint32_t most_hits;
} points[] = {
    {RECORD, "nvme.record_write", 0},
    {SEAL, "nvme.seal", 2},
    {FOOTER, "nvme.footer", 2},
    {REUSE, "nvme.reuse_before", 3},
    {RECOVERY, "nvme.recover_scan", 2},
    {RECORD, "nvme.record_done", 0},
    {SEAL, "nvme.seal", 1},
    {FOOTER, "nvme.footer", 1},
    {REUSE, "nvme.reuse_after", 3},
    {RECOVERY, "nvme.recover_seal", 1},
    {RECORD, "nvme.record_write", 0},
    {SEAL, "nvme.seal", 2},
    {FOOTER, "nvme.footer", 2},
    {REUSE, "nvme.segment_header", 3},
    {RECOVERY, "nvme.recover_read", 12},
};

struct loop {
    struct kill_model model;
    struct kvf_test_daemon daemon;
    struct kvf_client *client;
    struct kvf_random_seeded random;
    uint8_t *payload;
    uint32_t large_payload;
    uint32_t n_small; /* small records that are as large as one large one */
    uint64_t n_put;
    uint32_t kills[N_KINDS];
    uint32_t n_other_kills;
    double restart_ms[ROUNDS_MAX];
    uint32_t n_restarts;
    uint64_t n_checked, n_due_checked, n_wrong, n_lost, n_holes, n_refused;
    double live_share, fill;
};

static void die(struct loop *loop, const char *what, int status)
{
    char *log = kvf_test_file_read(loop->daemon.log_path, NULL);
    size_t bytes = log != NULL ? strlen(log) : 0;

    fprintf(stderr, "kill loop: %s: %s\n--- end of the daemon's log:\n%s---\n", what,
            kvf_status_text(status), log != NULL ? log + (bytes > 4000 ? bytes - 4000 : 0) : "");
    free(log);
    exit(1);
}

static uint64_t draw(struct loop *loop, uint64_t n)
{
    return kvf_random_seeded_next(&loop->random) % n;
}

/* --- writing ------------------------------------------------------------------------------------
 */

static int submit_one(struct loop *loop, uint32_t index)
{
    struct kvf_put_options options = {.struct_bytes = sizeof(options), .flags = KVF_PUT_DURABLE};
    const struct kill_block *block = &loop->model.blocks[index];
    struct kvf_test_key key;
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = kvf_test_key(block->number, &key),
                                .data = loop->payload,
                                .data_bytes = block->payload_bytes};
    uint64_t request;

    kvf_test_payload_fill(block->number, loop->payload, block->payload_bytes);
    return kvf_submit_put(loop->client, &item, 1, &options, index, &request);
}

/* Take completions of puts. False: the daemon has died. */
static bool take_puts(struct loop *loop, uint32_t *n_flying)
{
    struct kvf_event events[2 * WINDOW];
    uint32_t n = 0;
    int status = kvf_poll(loop->client, events, 2 * WINDOW, 100, &n);
    bool is_dead = status == KVF_ERR_DISCONNECTED;

    for (uint32_t i = 0; i < n; i++) {
        if (events[i].kind == KVF_EVENT_REQUEST) {
            (*n_flying)--;
            continue;
        }
        switch (events[i].hit.status) {
        case KVF_OK:
            kill_model_log(&loop->model, (uint32_t)events[i].user);
            break;
        case KVF_ERR_DISCONNECTED:
            is_dead = true;
            break;
        case KVF_ERR_BUSY:
            loop->n_refused++; /* it may be there or not, as one in flight at a kill */
            break;
        default:
            die(loop, "a durable put failed", events[i].hit.status);
        }
    }
    return !is_dead;
}

/* Put durable blocks until so many bytes have been put or the daemon dies. True: it died. */
static bool write_blocks(struct loop *loop, uint64_t bytes)
{
    uint64_t until = loop->model.put_bytes + bytes;
    uint32_t n_flying = 0;

    while (loop->model.put_bytes < until || n_flying > 0) {
        if (loop->model.put_bytes < until && n_flying < WINDOW) {
            bool is_large = loop->n_put % (loop->n_small + 1) == 0;
            uint32_t index = kill_model_put(&loop->model,
                                            is_large ? loop->large_payload : SMALL_PAYLOAD);
            int status;

            loop->n_put++;
            do {
                status = submit_one(loop, index);
            } while (status == KVF_ERR_BUSY && take_puts(loop, &n_flying));
            if (status == KVF_OK) {
                n_flying++;
                continue;
            }
            if (status != KVF_ERR_BUSY && status != KVF_ERR_DISCONNECTED) {
                die(loop, "a put was not accepted", status);
            }
            return true;
        }
        if (!take_puts(loop, &n_flying)) {
            return true;
        }
    }
    return false;
}

/* --- looking ------------------------------------------------------------------------------------
 */

/* Is it there? For all blocks that can be; without reading any. */
static void look(struct loop *loop)
{
    struct kvf_event events[64];
    uint32_t i = kill_model_first(&loop->model);
    uint32_t n_flying = 0;

    while (i < loop->model.n_blocks || n_flying > 0) {
        struct kvf_test_key bytes;
        struct kvf_key key;
        uint64_t request;
        uint32_t n = 0;
        int status = KVF_ERR_BUSY;

        if (i < loop->model.n_blocks) {
            key = kvf_test_key(loop->model.blocks[i].number, &bytes);
            status = kvf_submit_lookup(loop->client, &key, 1, NULL, i, &request);
            i += status == KVF_OK;
            n_flying += status == KVF_OK;
        }
        if (status == KVF_OK && n_flying < 64) {
            continue;
        }
        if (status != KVF_OK && status != KVF_ERR_BUSY) {
            die(loop, "a lookup was not accepted", status);
        }
        status = kvf_poll(loop->client, events, 64, 1000, &n);
        if (status != KVF_OK && status != KVF_EMPTY) {
            die(loop, "the daemon died while it was looked at", status);
        }
        for (uint32_t e = 0; e < n; e++) {
            loop->model.blocks[events[e].user].is_here = events[e].lookup.run_chunks == 1;
        }
        n_flying -= n;
    }
}

static void check_hit(struct loop *loop, struct kill_block *block, const struct kvf_hit *hit)
{
    bool is_due = kill_model_is_due(&loop->model, block);
    int status = kvf_test_hit_check(loop->client, hit, block->number, block->payload_bytes);

    block->hit_life = loop->model.life;
    loop->n_checked += status == KVF_OK;
    loop->n_due_checked += status == KVF_OK && is_due;
    if (status == KVF_ERR_INTERNAL) {
        loop->n_wrong++;
    } else if (status != KVF_OK && is_due) {
        fprintf(stderr, "block %" PRIu64 ": found, but read as: %s\n", block->number,
                kvf_status_text(status));
        loop->n_lost++;
    }
}

/* Read blocks first .. first + n - 1 as far as they are here, and compare every byte. */
static void read_blocks(struct loop *loop, uint32_t first, uint32_t n)
{
    struct kvf_test_key bytes[BATCH];
    struct kvf_key keys[BATCH];
    struct kill_block *blocks[BATCH];
    struct kvf_hit hits[BATCH];
    uint32_t n_keys = 0;

    for (uint32_t i = first; i < first + n; i++) {
        struct kill_block *block = &loop->model.blocks[i];

        if (block->is_here) {
            blocks[n_keys] = block;
            keys[n_keys] = kvf_test_key(block->number, &bytes[n_keys]);
            n_keys++;
        }
        if (n_keys == BATCH || (n_keys > 0 && i + 1 == first + n)) {
            int status = kvf_get(loop->client, keys, n_keys, NULL, hits);

            if (status < 0) {
                die(loop, "a get failed", status);
            }
            for (uint32_t k = 0; k < n_keys; k++) {
                check_hit(loop, blocks[k], &hits[k]);
            }
            n_keys = 0;
        }
    }
}

/* The newest two segments, the open ones among them, or all; and some of the rest. */
static void check_store(struct loop *loop, bool all)
{
    uint32_t first = kill_model_first(&loop->model);
    uint32_t tail = loop->model.n_blocks;

    look(loop);
    loop->n_lost += kill_model_lost(&loop->model);
    loop->n_holes += kill_model_holes(&loop->model);
    while (tail > first && loop->model.put_bytes - loop->model.blocks[tail - 1].end_bytes <
                               2 * loop->model.segment_bytes) {
        tail--;
    }
    for (uint32_t i = 0; !all && i < 64 && tail > first; i++) {
        read_blocks(loop, first + (uint32_t)draw(loop, tail - first), 1);
    }
    tail = all ? first : tail;
    read_blocks(loop, tail, loop->model.n_blocks - tail);
}

/* --- lives --------------------------------------------------------------------------------------
 */

/* False: the daemon has died instead. */
static bool attach(struct loop *loop)
{
    struct kvf_options options;
    int status;

    kvf_test_client_options(&loop->daemon, &options);
    options.flags = KVF_ATTACH_NO_RECONNECT;
    options.staging_bytes = 32 << 20;
    options.log = NULL;
    do {
        status = kvf_open(&options, &loop->client);
    } while (status == KVF_ERR_NO_DAEMON && kvf_test_daemon_is_alive(&loop->daemon));
    if (status != KVF_OK && kvf_test_daemon_is_alive(&loop->daemon)) {
        die(loop, "cannot attach", status);
    }
    return status == KVF_OK;
}

/* A random block that must be there, or NULL before there is one. */
static struct kill_block *random_due(struct loop *loop)
{
    for (uint32_t tries = 0; tries < 10000 && loop->model.n_blocks > 0; tries++) {
        struct kill_block *block = &loop->model.blocks[draw(loop, loop->model.n_blocks)];

        if (kill_model_is_due(&loop->model, block)) {
            return block;
        }
    }
    return NULL;
}

/* Start; time it to the first hit of a random block that must be there. False: it died before it
 * was ready. */
static bool start(struct loop *loop, const char *failpoints)
{
    struct kill_block *block = random_due(loop);
    uint64_t start_ns = kvf_now_ns();

    loop->daemon.failpoints = failpoints;
    kvf_test_daemon_spawn(&loop->daemon);
    if (!attach(loop)) {
        return false;
    }
    if (block != NULL) {
        int status = kvf_test_block_get(loop->client, block->number, block->payload_bytes, NULL);

        if (status != KVF_OK) {
            fprintf(stderr, "first hit, block %" PRIu64 ": %s\n", block->number,
                    kvf_status_text(status));
            loop->n_wrong += status == KVF_ERR_INTERNAL;
            loop->n_lost += status != KVF_ERR_INTERNAL;
        } else if (loop->n_restarts < ROUNDS_MAX) {
            loop->restart_ms[loop->n_restarts++] = (double)(kvf_now_ns() - start_ns) / 1e6;
        }
        block->hit_life = loop->model.life;
    }
    return true;
}

static void start_whole(struct loop *loop)
{
    if (!start(loop, NULL)) {
        die(loop, "the daemon does not start", KVF_ERR_NO_DAEMON);
    }
}

static void life_over(struct loop *loop)
{
    loop->client = kvf_close(loop->client);
    kvf_test_daemon_kill(&loop->daemon); /* also waits for one that is dead */
    kill_model_life_ends(&loop->model);
}

/* It dies at a place in its running work. False: it did not come there. */
static bool die_at_work(struct loop *loop, const struct point *point, bool first_try)
{
    uint32_t record_bytes = SMALL_PAYLOAD + KVF_RECORD_PAGE_BYTES;
    uint64_t most = point->most_hits != 0 ? point->most_hits
                                          : loop->model.segment_bytes / record_bytes;
    char failpoint[64];
    bool died;

    snprintf(failpoint, sizeof(failpoint), "%s=kill@%" PRIu64, point->name,
             first_try ? 1 + draw(loop, most) : 1);
    died = !start(loop, failpoint);
    if (!died) {
        check_store(loop, false);
        died = write_blocks(loop, 4 * loop->model.segment_bytes);
    }
    life_over(loop);
    return died;
}

/* It is killed while it writes, and dies again while it recovers. */
static bool die_in_recovery(struct loop *loop, const struct point *point, bool first_try)
{
    char failpoint[64];
    bool died;

    start_whole(loop);
    check_store(loop, false);
    (void)write_blocks(loop, loop->model.segment_bytes / 8 + draw(loop, loop->model.segment_bytes));
    life_over(loop);
    loop->n_other_kills++;
    snprintf(failpoint, sizeof(failpoint), "%s=kill@%" PRIu64, point->name,
             first_try ? 1 + draw(loop, point->most_hits) : 1);
    loop->daemon.failpoints = failpoint;
    kvf_test_daemon_spawn(&loop->daemon);
    died = !kvf_test_daemon_wait_ready(&loop->daemon, NULL);
    kvf_test_daemon_kill(&loop->daemon);
    kill_model_life_ends(&loop->model);
    return died;
}

static void kill_once(struct loop *loop, const struct point *point)
{
    for (uint32_t tries = 0; tries < TRIES_MAX; tries++) {
        bool died = point->kind == RECOVERY ? die_in_recovery(loop, point, tries == 0)
                                            : die_at_work(loop, point, tries == 0);

        if (died) {
            loop->kills[point->kind]++;
            return;
        }
        loop->n_other_kills++;
    }
    fprintf(stderr, "the daemon never came to %s\n", point->name);
    exit(1);
}

/* --- the whole ----------------------------------------------------------------------------------
 */

/* Three times the store, so that its oldest record has been overwritten at least twice. */
static void fill(struct loop *loop)
{
    uint64_t stored, area_stored, area;

    start_whole(loop);
    if (write_blocks(loop, 3 * loop->model.store_bytes + loop->model.store_bytes / 8)) {
        die(loop, "the daemon died while the store was filled", KVF_ERR_DISCONNECTED);
    }
    stored = kvf_test_daemon_number(&loop->daemon, "nvme.0.stored_bytes");
    area_stored = kvf_test_daemon_number(&loop->daemon, "nvme.0.full_area_stored_bytes");
    area = kvf_test_daemon_number(&loop->daemon, "nvme.0.full_area_bytes");
    /* the open segment's live bytes are no sealed ones: at most a segment of them */
    loop->live_share = (double)(stored - loop->model.segment_bytes) / (double)area_stored;
    loop->fill = (double)area_stored / (double)area;
    life_over(loop);
    loop->n_other_kills++;
}

static int by_size(const void *a, const void *b)
{
    const double *x = a;
    const double *y = b;

    return (*x > *y) - (*x < *y);
}

static double quantile(const struct loop *loop, double q)
{
    return loop->n_restarts == 0
               ? 0
               : loop->restart_ms[(uint32_t)((double)(loop->n_restarts - 1) * q + 0.5)];
}

static int report(struct loop *loop, uint32_t n_kills)
{
    bool is_good = loop->n_wrong == 0 && loop->n_lost == 0 && loop->n_holes == 0 &&
                   loop->live_share >= 0.9 && loop->fill >= 0.9;

    for (int i = 0; i < N_KINDS; i++) {
        is_good = is_good && loop->kills[i] >= n_kills / 10;
    }
    qsort(loop->restart_ms, loop->n_restarts, sizeof(loop->restart_ms[0]), by_size);
    printf("{\"test\": \"kill_loop\", \"store_bytes\": %" PRIu64 ", \"segment_bytes\": %" PRIu64
           ", \"live_share\": %.3f, \"fill\": %.3f, \"kills\": {",
           loop->model.store_bytes, loop->model.segment_bytes, loop->live_share, loop->fill);
    for (int i = 0; i < N_KINDS; i++) {
        printf("\"%s\": %u, ", kind_names[i], loop->kills[i]);
    }
    printf("\"other\": %u}, \"blocks_put\": %u, \"blocks_logged\": %" PRIu64
           ", \"bytes_put\": %" PRIu64 ", \"puts_busy\": %" PRIu64 ", \"blocks_read\": %" PRIu64
           ", \"blocks_read_due\": %" PRIu64 ", \"wrong\": %" PRIu64 ", \"lost\": %" PRIu64
           ", \"holes\": %" PRIu64 ", \"restarts\": %u, \"restart_to_hit_ms\": {\"p50\": %.1f, "
           "\"p95\": %.1f, \"max\": %.1f}, \"ok\": %s}\n",
           loop->n_other_kills, loop->model.n_blocks, loop->model.n_logged, loop->model.put_bytes,
           loop->n_refused, loop->n_checked, loop->n_due_checked, loop->n_wrong, loop->n_lost,
           loop->n_holes, loop->n_restarts, quantile(loop, 0.5), quantile(loop, 0.95),
           quantile(loop, 1), is_good ? "true" : "false");
    return is_good ? 0 : 1;
}

struct arguments {
    uint64_t store_bytes, segment_bytes, dram_bytes, large_bytes, kills;
};

static void parse(int argc, char **argv, struct arguments *arguments)
{
    static const struct option options[] = {
        {"store", required_argument, NULL, 's'}, {"segment", required_argument, NULL, 'g'},
        {"dram", required_argument, NULL, 'd'},  {"large", required_argument, NULL, 'l'},
        {"kills", required_argument, NULL, 'k'}, {NULL, 0, NULL, 0},
    };
    char error[KVF_ERROR_TEXT_BYTES] = "unknown option";
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        uint64_t *value = option == 's'   ? &arguments->store_bytes
                          : option == 'g' ? &arguments->segment_bytes
                          : option == 'd' ? &arguments->dram_bytes
                          : option == 'l' ? &arguments->large_bytes
                          : option == 'k' ? &arguments->kills
                                          : NULL;

        if (value == NULL || kvf_parse_size(optarg, value, error, sizeof(error)) != KVF_OK) {
            fprintf(stderr,
                    "kill_loop: %s\nkill_loop [--store SIZE] [--segment SIZE] [--dram SIZE] "
                    "[--large SIZE] [--kills N]\n",
                    error);
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    struct arguments arguments = {.store_bytes = UINT64_C(2) << 30,
                                  .segment_bytes = 128 << 20,
                                  .dram_bytes = 256 << 20,
                                  .large_bytes = 1 << 20,
                                  .kills = 50};
    static struct loop loop;
    char store_set[64], segment_set[64], dram_set[64];
    int code;

    parse(argc, argv, &arguments);
    kvf_random_seeded_init(&loop.random, kvf_test_seed());
    kill_model_init(&loop.model, arguments.store_bytes, arguments.segment_bytes);
    loop.large_payload = (uint32_t)arguments.large_bytes - KVF_RECORD_PAGE_BYTES;
    loop.n_small = (uint32_t)(arguments.large_bytes >> 16);
    loop.payload = malloc(arguments.large_bytes);
    if (loop.payload == NULL) {
        abort();
    }
    kvf_test_daemon_create(&loop.daemon, NULL);
    snprintf(store_set, sizeof(store_set), "nvme.0.bytes=%" PRIu64, arguments.store_bytes);
    snprintf(segment_set, sizeof(segment_set), "nvme.0.segment_bytes=%" PRIu64,
             arguments.segment_bytes);
    snprintf(dram_set, sizeof(dram_set), "dram.bytes=%" PRIu64, arguments.dram_bytes);
    kvf_test_daemon_set(&loop.daemon, store_set);
    kvf_test_daemon_set(&loop.daemon, segment_set);
    kvf_test_daemon_set(&loop.daemon, dram_set);
    kvf_test_daemon_set(&loop.daemon, "dram.area_bytes=4MiB");

    fill(&loop);
    for (uint32_t k = 0; k < arguments.kills; k++) {
        kill_once(&loop, &points[k % (sizeof(points) / sizeof(points[0]))]);
    }
    start_whole(&loop);
    check_store(&loop, true);
    loop.client = kvf_close(loop.client);
    code = report(&loop, (uint32_t)arguments.kills);
    kvf_test_daemon_destroy(&loop.daemon);
    kill_model_fini(&loop.model);
    free(loop.payload);
    return code;
}
