/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_bench.c: puts and gets of opaque blocks with a number of requests in flight, beside a memcpy
 * of the same bytes on the same core in the same run.
 *
 * What is timed: a put from submit to its completion, the copy into staging included; a get from
 * submit until the bytes are in this process's memory and the lease is given back. Every block that
 * comes back is compared at both ends, outside of the latencies but inside the elapsed time.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "client/cli.h"

#define EVENTS      64
#define STAMP_BYTES 64 /* compared at both ends of a block */
#define POLL_MS     10000
#define DEPTH_MAX   256

/* Blocks are cut out of this much, so that sources do not stay in a cache. */
#define SOURCE_BYTES_MIN (256u << 20)

struct bench {
    const struct cli *cli;
    struct kvf_client *client;
    uint64_t count;
    uint64_t size_bytes;
    uint32_t depth;
    uint64_t run; /* random: keys of this run are of no other one */

    uint8_t *source; /* source_blocks blocks, random bytes */
    uint64_t source_blocks;
    uint8_t *target; /* as large; where gets and memcpy copy to */

    uint64_t *submitted_ns; /* by block number */
    uint64_t *latency_ns;
    uint64_t failed; /* in this phase: not stored, or not there any more */
    uint64_t from_nvme, wrong;
};

struct result {
    const char *name;
    double seconds;
    uint64_t bytes;                  /* that arrived */
    uint64_t failed;                 /* blocks that did not */
    uint64_t p50_ns, p99_ns, max_ns; /* 0: not measured */
};

static void make_key(const struct bench *bench, uint64_t block, uint8_t key_out[32])
{
    memset(key_out, 0, 32);
    memcpy(key_out, "kvferry-bench", 13);
    memcpy(key_out + 16, &bench->run, sizeof(bench->run));
    memcpy(key_out + 24, &block, sizeof(block));
}

static uint8_t *source_of(const struct bench *bench, uint64_t block)
{
    return bench->source + block % bench->source_blocks * bench->size_bytes;
}

static uint8_t *target_of(const struct bench *bench, uint64_t block)
{
    return bench->target + block % bench->source_blocks * bench->size_bytes;
}

/* --- one block -------------------------------------------------------------------------------- */

static int submit_put(struct bench *bench, uint64_t block)
{
    uint8_t key[32];
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item),
        .source = KVF_SOURCE_BYTES,
        .key = {.data = key, .bytes = sizeof(key)},
        .data = source_of(bench, block),
        .data_bytes = bench->size_bytes,
    };
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options),
        .flags = (bench->cli->is_durable ? KVF_PUT_DURABLE : 0u) |
                 (bench->cli->is_no_write ? KVF_PUT_NO_WRITE : 0u),
    };
    uint64_t request;

    make_key(bench, block, key);
    return kvf_submit_put(bench->client, &item, 1, &options, block, &request);
}

static int submit_get(struct bench *bench, uint64_t block)
{
    uint8_t bytes[32];
    struct kvf_key key = {.data = bytes, .bytes = sizeof(bytes)};
    uint64_t request;

    make_key(bench, block, bytes);
    return kvf_submit_get(bench->client, &key, 1, NULL, block, &request);
}

static void finish_put(struct bench *bench, const struct kvf_event *event)
{
    bench->failed += event->hit.status != KVF_OK && event->hit.status != KVF_EXISTS;
}

static void finish_get(struct bench *bench, const struct kvf_event *event)
{
    uint8_t *target = target_of(bench, event->user);
    const uint8_t *source = source_of(bench, event->user);
    size_t end = bench->size_bytes > STAMP_BYTES ? bench->size_bytes - STAMP_BYTES : 0;

    if (event->hit.status != KVF_OK) {
        bench->failed++;
        return;
    }
    if (event->hit.payload_bytes == bench->size_bytes) {
        memcpy(target, event->hit.payload, bench->size_bytes);
    }
    if (kvf_lease_release(bench->client, event->hit.lease) != KVF_OK) {
        bench->failed++;
        return;
    }
    bench->latency_ns[event->user] = kvf_now_ns() - bench->submitted_ns[event->user];
    bench->from_nvme += event->hit.tier == KVF_TIER_NVME;
    bench->wrong += event->hit.payload_bytes != bench->size_bytes ||
                    memcmp(target, source, bench->size_bytes - end) != 0 ||
                    memcmp(target + end, source + end, bench->size_bytes - end) != 0;
}

/* --- one phase -------------------------------------------------------------------------------- */

struct phase {
    const char *name;
    int (*submit)(struct bench *bench, uint64_t block);
    void (*finish)(struct bench *bench, const struct kvf_event *event);
};

/* Take what has completed. *inflight counts requests. */
static int take_events(struct bench *bench, const struct phase *phase, uint64_t *inflight)
{
    struct kvf_event events[EVENTS];
    uint32_t n = 0;
    int status = kvf_poll(bench->client, events, EVENTS, POLL_MS, &n);

    if (status != KVF_OK) {
        return status == KVF_EMPTY ? KVF_ERR_TIMEOUT : status;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (events[i].kind == KVF_EVENT_REQUEST) {
            *inflight -= 1;
            continue;
        }
        bench->latency_ns[events[i].user] = kvf_now_ns() - bench->submitted_ns[events[i].user];
        phase->finish(bench, &events[i]);
    }
    return KVF_OK;
}

static int compare_u64(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;

    return (*x > *y) - (*x < *y);
}

static int run_phase(struct bench *bench, const struct phase *phase, struct result *result_out)
{
    uint64_t start_ns = kvf_now_ns();
    uint64_t next = 0;
    uint64_t inflight = 0;
    int status = KVF_OK;

    bench->failed = 0;
    while (next < bench->count || inflight > 0) {
        while (next < bench->count && inflight < bench->depth) {
            bench->submitted_ns[next] = kvf_now_ns();
            status = phase->submit(bench, next);
            if (status != KVF_OK) {
                break;
            }
            next++;
            inflight++;
        }
        /* Busy: staging or credits are used up by what is in flight, which poll gives back. */
        if (status != KVF_OK && (status != KVF_ERR_BUSY || inflight == 0)) {
            return status;
        }
        status = take_events(bench, phase, &inflight);
        if (status != KVF_OK) {
            return status;
        }
    }
    result_out->name = phase->name;
    result_out->seconds = (double)(kvf_now_ns() - start_ns) / 1e9;
    result_out->bytes = (bench->count - bench->failed) * bench->size_bytes;
    result_out->failed = bench->failed;
    qsort(bench->latency_ns, bench->count, sizeof(*bench->latency_ns), compare_u64);
    result_out->p50_ns = bench->latency_ns[bench->count / 2];
    result_out->p99_ns = bench->latency_ns[bench->count - 1 - bench->count / 100];
    result_out->max_ns = bench->latency_ns[bench->count - 1];
    return KVF_OK;
}

/* The bound: the same blocks from the same source, once, by one core. */
static void run_memcpy(struct bench *bench, struct result *result_out)
{
    uint64_t start_ns = kvf_now_ns();

    for (uint64_t block = 0; block < bench->count; block++) {
        memcpy(target_of(bench, block), source_of(bench, block), bench->size_bytes);
        __asm__ volatile("" : : "r"(bench->target) : "memory"); /* the copy must happen */
    }
    *result_out = (struct result){
        .name = "memcpy",
        .seconds = (double)(kvf_now_ns() - start_ns) / 1e9,
        .bytes = bench->count * bench->size_bytes,
    };
}

static int forget_blocks(struct bench *bench)
{
    int status = KVF_OK;

    for (uint64_t block = 0; block < bench->count && status >= 0; block++) {
        uint8_t bytes[32];
        struct kvf_key key = {.data = bytes, .bytes = sizeof(bytes)};

        make_key(bench, block, bytes);
        status = kvf_evict(bench->client, &key, 1, NULL);
    }
    return status < 0 ? status : KVF_OK;
}

/* --- report ----------------------------------------------------------------------------------- */

static double gb_s(const struct result *result)
{
    return result->seconds > 0 ? (double)result->bytes / result->seconds / 1e9 : 0;
}

static void print_text(const struct bench *bench, const struct result *results, unsigned n)
{
    printf("%" PRIu64 " blocks of %" PRIu64 " bytes, %" PRIu32 " in flight\n", bench->count,
           bench->size_bytes, bench->depth);
    printf("%-8s %10s %10s %10s %10s %10s\n", "", "GB/s", "p50 us", "p99 us", "max us", "missing");
    for (unsigned i = 0; i < n; i++) {
        const struct result *r = &results[i];

        printf("%-8s %10.3f", r->name, gb_s(r));
        if (r->max_ns != 0) {
            printf(" %10.1f %10.1f %10.1f %10" PRIu64, (double)r->p50_ns / 1e3,
                   (double)r->p99_ns / 1e3, (double)r->max_ns / 1e3, r->failed);
        }
        printf("\n");
    }
    printf("bound: one core's memcpy. A put copies twice (into staging here, into the arena with a "
           "checksum in the daemon%s), a get once, out of the arena.\n",
           bench->cli->is_durable ? ", then to a drive" : "");
    printf("gets from nvme %" PRIu64 ", wrong bytes %" PRIu64 "\n", bench->from_nvme, bench->wrong);
}

static void print_json(const struct bench *bench, const struct result *results, unsigned n)
{
    json_t *object = json_pack("{s:I, s:I, s:i, s:I, s:I, s:I}", "blocks", (json_int_t)bench->count,
                               "block_bytes", (json_int_t)bench->size_bytes, "depth",
                               (int)bench->depth, "from_nvme", (json_int_t)bench->from_nvme,
                               "failed", (json_int_t)bench->failed, "wrong",
                               (json_int_t)bench->wrong);

    for (unsigned i = 0; i < n; i++) {
        const struct result *r = &results[i];

        json_object_set_new(object, r->name,
                            json_pack("{s:f, s:I, s:f, s:I, s:I, s:I}", "seconds", r->seconds,
                                      "missing", (json_int_t)r->failed, "gb_s", gb_s(r), "p50_ns",
                                      (json_int_t)r->p50_ns, "p99_ns", (json_int_t)r->p99_ns,
                                      "max_ns", (json_int_t)r->max_ns));
    }
    cli_print_json(object);
}

/* --- set-up ----------------------------------------------------------------------------------- */

static int bench_alloc(struct bench *bench)
{
    struct kvf_random_seeded random;
    uint64_t words;

    bench->source_blocks = (SOURCE_BYTES_MIN + bench->size_bytes - 1) / bench->size_bytes;
    if (bench->source_blocks > bench->count) {
        bench->source_blocks = bench->count;
    }
    words = bench->source_blocks * bench->size_bytes / 8;
    bench->source = malloc(bench->source_blocks * bench->size_bytes);
    bench->target = malloc(bench->source_blocks * bench->size_bytes);
    bench->submitted_ns = calloc(bench->count, sizeof(*bench->submitted_ns));
    bench->latency_ns = calloc(bench->count, sizeof(*bench->latency_ns));
    if (bench->source == NULL || bench->target == NULL || bench->submitted_ns == NULL ||
        bench->latency_ns == NULL) {
        return cli_fail(CLI_FAILED, "out of memory: lower --size or --count");
    }
    kvf_random_seeded_init(&random, bench->run);
    for (uint64_t i = 0; i < words; i++) {
        uint64_t word = kvf_random_seeded_next(&random);

        memcpy(bench->source + 8 * i, &word, sizeof(word));
    }
    /* Touched once, so that no phase pays for the kernel's zeroing. */
    memset(bench->target, 1, bench->source_blocks * bench->size_bytes);
    return CLI_OK;
}

static void bench_free(struct bench *bench)
{
    kvf_close(bench->client);
    free(bench->source);
    free(bench->target);
    free(bench->submitted_ns);
    free(bench->latency_ns);
}

int cli_bench(const struct cli *cli)
{
    static const struct phase put = {"put", submit_put, finish_put};
    static const struct phase get = {"get", submit_get, finish_get};
    struct result results[3] = {{0}};
    struct bench bench = {
        .cli = cli,
        .count = cli->count != 0 ? cli->count : 256,
        .size_bytes = cli->size_bytes != 0 ? cli->size_bytes : 1 << 20,
        .depth = cli->depth != 0 ? cli->depth : 8,
    };
    int status;
    int code;

    if (bench.size_bytes % 8 != 0 || bench.size_bytes > KVF_PAYLOAD_BYTES_MAX ||
        bench.depth > DEPTH_MAX) {
        return cli_fail(CLI_USAGE,
                        "bench: --size is a multiple of 8 up to 64MiB, --depth at most "
                        "%d",
                        DEPTH_MAX);
    }
    kvf_random_system.fill(NULL, &bench.run, sizeof(bench.run));
    code = cli_open(cli, "kvferry-bench", 0, &bench.client);
    if (code == CLI_OK) {
        code = bench_alloc(&bench);
    }
    if (code != CLI_OK) {
        bench_free(&bench);
        return code;
    }
    status = run_phase(&bench, &put, &results[0]);
    if (status == KVF_OK) {
        status = run_phase(&bench, &get, &results[1]);
    }
    if (status == KVF_OK) {
        run_memcpy(&bench, &results[2]);
    }
    if (status == KVF_OK && !cli->is_kept) {
        status = forget_blocks(&bench);
    }
    if (status != KVF_OK) {
        code = cli_fail_status(cli, "bench", status);
    } else {
        (cli->is_json ? print_json : print_text)(&bench, results, 3);
        code = bench.wrong != 0 ? CLI_FAILED : CLI_OK;
    }
    bench_free(&bench);
    return code;
}
