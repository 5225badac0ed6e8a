/* SPDX-License-Identifier: Apache-2.0
 *
 * test_end_to_end.c: a prompt's KV from one process's GPU memory, through the daemon, into other
 * pages of another process, in the geometry of Llama-3.1-8B. The first process is gone before the
 * second one starts. Prints times beside what the link allows.
 *
 *   test_end_to_end [put|get PROFILE SOCKET PID]     no arguments: the whole test, by itself
 *
 * PID is the daemon's, whose time on processors is a part of what a put costs.
 */
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    LAYERS = 32,
    HEADS = 8,
    DIM = 128,
    CHUNK_TOKENS = 256,
    PAGE_TOKENS = 16,
    CHUNK_PAGES = CHUNK_TOKENS / PAGE_TOKENS,
    CHUNKS_MAX = 32, /* 8192 tokens */
    PAGE_BYTES = HEADS * PAGE_TOKENS * 2 * DIM * 2,
    CHUNK_BYTES = LAYERS * CHUNK_PAGES * PAGE_BYTES,
};

#define LINK_BYTES_A_S 55.3e9 /* pinned copies over PCIe 5.0 x16 */

static const char *const profiles[] = {"balanced", "exact", "raw", "max-edges"};

struct engine {
    uint32_t n_chunks;
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_region *region;
    uint64_t memory;
    uint8_t *host; /* one chunk */
    void *layers[2][LAYERS];
    uint32_t ids[CHUNKS_MAX][CHUNK_PAGES];
    char keys[CHUNKS_MAX][24];
    uint64_t encoded_bytes;
    clockid_t daemon_clock; /* of its time on processors */
};

/* A driver without a GPU does less of it. */
static uint32_t chunks_wanted(void)
{
    return calls_fake.fake_cuda_seed != NULL ? 2 : CHUNKS_MAX;
}

static void engine_client(struct engine *engine, const char *profile, const char *socket_path,
                          uint32_t pinning)
{
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = LAYERS,
        .n_heads = HEADS,
        .dim_k = DIM,
        .dim_v = DIM,
        .chunk_tokens = CHUNK_TOKENS,
        .sink_tokens = 4,
    };
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options), .pinning = pinning};
    struct kvf_options options;

    kvf_options_init(&options);
    options.socket_path = socket_path;
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = engine->n_chunks * UINT64_C(36) << 20;
    assert_int_equal(kvf_open(&options, &engine->client), KVF_OK);
    assert_int_equal(kvf_gpu_open(engine->client, &gpu_options, &engine->gpu), KVF_OK);
}

/* Names of the engine's chunks from here on. */
static void keys_fill(struct engine *engine, uint64_t first)
{
    for (uint32_t c = 0; c < engine->n_chunks; c++) {
        (void)calls_key(first + c, engine->keys[c]);
    }
}

/* step: chunk c's page p is page (c * CHUNK_PAGES + p) * step of the pool; odd, so each once. */
static void engine_open(struct engine *engine, const char *profile, const char *socket_path,
                        uint32_t pinning, uint32_t step)
{
    uint32_t n_pages = engine->n_chunks * CHUNK_PAGES;
    struct kvf_gpu_region_options region = {
        .struct_bytes = sizeof(region), .n_pages = n_pages, .tokens_a_page = PAGE_TOKENS};

    engine_client(engine, profile, socket_path, pinning);
    engine->memory = calls_alloc((size_t)engine->n_chunks * CHUNK_BYTES);
    engine->host = calls_pinned(CHUNK_BYTES);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        engine->layers[0][layer] = (void *)(uintptr_t)(engine->memory +
                                                       (uint64_t)layer * n_pages * PAGE_BYTES);
        engine->layers[1][layer] = (uint8_t *)engine->layers[0][layer] + DIM * 2;
    }
    region.k = (struct kvf_tensor_view){engine->layers[0], PAGE_BYTES, 2 * DIM * 2,
                                        PAGE_TOKENS * 2 * DIM * 2};
    region.v = region.k;
    region.v.layers = engine->layers[1];
    assert_int_equal(kvf_gpu_register(engine->gpu, &region, &engine->region), KVF_OK);
    for (uint32_t c = 0; c < engine->n_chunks; c++) {
        for (uint32_t p = 0; p < CHUNK_PAGES; p++) {
            engine->ids[c][p] = (c * CHUNK_PAGES + p) * step % n_pages;
        }
    }
    keys_fill(engine, 1);
}

static void engine_close(struct engine *engine)
{
    engine->gpu = kvf_gpu_close(engine->gpu);
    engine->client = kvf_close(engine->client);
    calls_free(engine->memory);
    kvf_gpu_host_free(calls_device, engine->host);
}

/* One chunk between its pages in device memory and host, where its pages lie in order. */
static void chunk_move(struct engine *engine, uint32_t chunk, bool to_device)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;
    static void *stream;

    if (stream == NULL) {
        stream = calls_stream();
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t p = 0; p < CHUNK_PAGES; p++) {
            uint64_t page = (uint64_t)(uintptr_t)engine->layers[0][layer] +
                            (uint64_t)engine->ids[chunk][p] * PAGE_BYTES;
            uint8_t *host = engine->host + ((size_t)layer * CHUNK_PAGES + p) * PAGE_BYTES;

            calls_check(to_device ? driver->cuMemcpyHtoDAsync(page, host, PAGE_BYTES, stream)
                                  : driver->cuMemcpyDtoHAsync(host, page, PAGE_BYTES, stream));
        }
    }
    calls_check(driver->cuStreamSynchronize(stream));
}

static void chunk_fill(struct engine *engine, uint32_t chunk)
{
    struct kvf_random_seeded random;
    uint64_t *words = (uint64_t *)engine->host;

    kvf_random_seeded_init(&random, 1000 + chunk);
    for (size_t i = 0; i < CHUNK_BYTES / 8; i++) {
        /* bf16 between 1/8 and 2, of both signs */
        words[i] = (kvf_random_seeded_next(&random) & 0x81ff81ff81ff81ffU) + 0x3e003e003e003e00U;
    }
}

static struct kvf_kv_view host_view(uint8_t *host, void *layers[2][LAYERS])
{
    struct kvf_kv_view view = {.struct_bytes = sizeof(view), .tokens_a_page = PAGE_TOKENS};

    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        layers[0][layer] = host + (size_t)layer * CHUNK_PAGES * PAGE_BYTES;
        layers[1][layer] = (uint8_t *)layers[0][layer] + DIM * 2;
    }
    view.k = (struct kvf_tensor_view){layers[0], PAGE_BYTES, 2 * DIM * 2,
                                      PAGE_TOKENS * 2 * DIM * 2};
    view.v = view.k;
    view.v.layers = layers[1];
    return view;
}

static void say(const char *what, uint64_t bytes, uint64_t ns)
{
    printf("  %-28s %8.2f MiB in %7.3f ms, %6.1f GB/s; the link's floor %7.3f ms\n", what,
           (double)bytes / 1048576, (double)ns / 1e6, (double)bytes / (double)ns,
           (double)bytes / LINK_BYTES_A_S * 1e3);
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now = {0};

    assert_int_equal(clock_gettime(clock, &now), 0);
    return (uint64_t)now.tv_sec * KVF_NS_PER_S + (uint64_t)now.tv_nsec;
}

/* Take one event. Returns how many requests have ended by it. */
static uint32_t take_event(struct engine *engine, uint64_t *free_ns_out)
{
    struct kvf_gpu_event event;
    uint32_t n;

    assert_int_equal(kvf_gpu_poll(engine->gpu, &event, 1, 20000, &n), KVF_OK);
    if (event.status != KVF_OK) {
        fail_msg("event %u of block %u: %s", event.kind, event.index,
                 kvf_status_name(event.status));
    }
    if (event.kind == KVF_GPU_EVENT_PAGES_FREE && free_ns_out != NULL) {
        *free_ns_out = kvf_now_ns();
    }
    return event.kind == KVF_GPU_EVENT_REQUEST;
}

/* Chunks [0, n) under the keys that the engine has, as fast as ring and staging take them. */
static void put_chunks(struct engine *engine, uint32_t n, uint64_t *free_ns_out)
{
    struct kvf_gpu_put_item items[CHUNKS_MAX];
    uint32_t in_flight = 0;
    uint32_t at = 0;
    uint64_t request;

    for (uint32_t c = 0; c < n; c++) {
        items[c] = (struct kvf_gpu_put_item){.struct_bytes = sizeof(items[c]),
                                             .n_pages = CHUNK_PAGES,
                                             .key = {engine->keys[c], 23},
                                             .token_start = c * CHUNK_TOKENS,
                                             .pages = engine->ids[c]};
    }
    while (at < n || in_flight > 0) {
        struct kvf_put_options options = {.struct_bytes = sizeof(options), .depth = at};
        uint32_t taken = 0;
        int status = KVF_ERR_BUSY;

        if (at > 0) {
            options.parent = items[at - 1].key;
        }
        if (at < n) {
            status = kvf_gpu_put(engine->gpu, engine->region, items + at, n - at, &options, NULL,
                                 NULL, 0, &taken, &request);
        }
        if (status == KVF_OK) {
            at += taken;
            in_flight++;
        } else if (status == KVF_ERR_BUSY && in_flight > 0) {
            in_flight -= take_event(engine, free_ns_out);
        } else {
            fail_msg("put: %s", kvf_status_name(status));
        }
    }
}

/* From the GPU to where a get finds it, and the processors that took. */
static void put_measure(struct engine *engine, const char *what)
{
    uint64_t bytes = (uint64_t)engine->n_chunks * CHUNK_BYTES;
    uint64_t client_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    uint64_t daemon_ns = clock_ns(engine->daemon_clock);
    uint64_t start_ns = kvf_now_ns();
    uint64_t free_ns = 0;
    uint64_t ns;

    put_chunks(engine, engine->n_chunks, &free_ns);
    ns = kvf_now_ns() - start_ns;
    client_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - client_ns;
    daemon_ns = clock_ns(engine->daemon_clock) - daemon_ns;
    printf("  %s\n", what);
    say("put: pages free, of KV", bytes, free_ns - start_ns);
    say("put: stored, of KV", bytes, ns);
    printf("  %-28s %8.2f of the client, %.2f of the daemon\n", "put: processors used",
           (double)client_ns / (double)ns, (double)daemon_ns / (double)ns);
}

static void put_prompt(struct engine *engine)
{
    uint64_t start_ns;

    /* pins staging and loads the kernels, once a process */
    keys_fill(engine, 1000);
    start_ns = kvf_now_ns();
    put_chunks(engine, 1, NULL);
    say("put: first block, of KV", CHUNK_BYTES, kvf_now_ns() - start_ns);
    keys_fill(engine, 1);
    put_measure(engine, "once");
    keys_fill(engine, 2000);
    put_measure(engine, "again, under other names");
    keys_fill(engine, 1);
}

/* The stored record of a chunk; the caller releases. */
static void record_get(struct engine *engine, uint32_t chunk, struct kvf_hit *hit)
{
    struct kvf_key key = {engine->keys[chunk], 23};

    assert_int_equal(kvf_get(engine->client, &key, 1, NULL, hit), KVF_OK);
    engine->encoded_bytes += hit->record_bytes;
}

static void put_process(const char *profile, const char *socket_path, pid_t daemon)
{
    struct engine engine = {.n_chunks = chunks_wanted()};
    void *layers[2][LAYERS];
    struct kvf_kv_view view;
    size_t payload_bytes;
    uint8_t *record;
    void *workspace;
    struct kvf_hit hit;

    assert_int_equal(clock_getcpuclockid(daemon, &engine.daemon_clock), 0);
    engine_open(&engine, profile, socket_path, KVF_GPU_PIN_WINDOW, 7);
    for (uint32_t c = 0; c < engine.n_chunks; c++) {
        chunk_fill(&engine, c);
        chunk_move(&engine, c, true);
    }
    put_prompt(&engine);
    /* the first chunk, which has sinks, and the last one equal what the C codecs make */
    record = malloc(engine.client->plan.record_bytes_max);
    workspace = aligned_alloc(64, (engine.client->plan.workspace_bytes + 63) / 64 * 64);
    assert_non_null(record);
    assert_non_null(workspace);
    for (uint32_t c = 0; c < engine.n_chunks; c += engine.n_chunks - 1) {
        chunk_fill(&engine, c);
        view = host_view(engine.host, layers);
        assert_int_equal(kvf_block_encode(&engine.client->plan, &view, c * CHUNK_TOKENS,
                                          CHUNK_TOKENS, (void *)record, record + 4096,
                                          engine.client->plan.record_bytes_max - 4096, workspace,
                                          &payload_bytes),
                         KVF_OK);
        record_get(&engine, c, &hit);
        assert_int_equal(hit.payload_bytes, payload_bytes);
        assert_memory_equal(hit.payload, record + 4096, payload_bytes);
        assert_int_equal(kvf_lease_release(engine.client, hit.lease), KVF_OK);
    }
    free(record);
    free(workspace);
    engine_close(&engine);
}

static void get_prompt(struct engine *engine, const char *what)
{
    struct kvf_gpu_get_item items[CHUNKS_MAX];
    uint64_t start_ns;
    uint64_t request;

    for (uint32_t c = 0; c < engine->n_chunks; c++) {
        items[c] = (struct kvf_gpu_get_item){.struct_bytes = sizeof(items[c]),
                                             .n_pages = CHUNK_PAGES,
                                             .key = {engine->keys[c], 23},
                                             .pages = engine->ids[c]};
    }
    start_ns = kvf_now_ns();
    assert_int_equal(kvf_gpu_get(engine->gpu, engine->region, items, engine->n_chunks, NULL, NULL,
                                 NULL, 0, &request),
                     KVF_OK);
    while (take_event(engine, NULL) == 0) {
    }
    say(what, engine->encoded_bytes, kvf_now_ns() - start_ns);
}

static void get_all(const char *profile, const char *socket_path, uint32_t pinning)
{
    struct engine engine = {.n_chunks = chunks_wanted()};
    void *layers[2][LAYERS];
    uint8_t *want = malloc(CHUNK_BYTES);
    void *workspace;
    struct kvf_hit hit;

    assert_non_null(want);
    engine_open(&engine, profile, socket_path, pinning, 11);
    for (uint32_t c = 0; c < engine.n_chunks; c++) {
        record_get(&engine, c, &hit);
        assert_int_equal(kvf_lease_release(engine.client, hit.lease), KVF_OK);
    }
    get_prompt(&engine, pinning == KVF_GPU_PIN_LAZY ? "get: first, pins the arena"
                                                    : "get: first, by the window");
    get_prompt(&engine, "get: again");
    get_prompt(&engine, "get: and again");
    workspace = aligned_alloc(64, (engine.client->plan.workspace_bytes + 63) / 64 * 64);
    assert_non_null(workspace);
    for (uint32_t c = 0; c < engine.n_chunks; c++) {
        struct kvf_kv_view view = host_view(want, layers);

        record_get(&engine, c, &hit);
        assert_int_equal(kvf_block_decode(&engine.client->plan, hit.record, hit.record_bytes, 0, 0,
                                          0, 0, &view, workspace),
                         KVF_OK);
        assert_int_equal(kvf_lease_release(engine.client, hit.lease), KVF_OK);
        chunk_move(&engine, c, false);
        assert_memory_equal(engine.host, want, CHUNK_BYTES);
    }
    free(workspace);
    free(want);
    engine_close(&engine);
}

static void get_process(const char *profile, const char *socket_path)
{
    get_all(profile, socket_path, KVF_GPU_PIN_LAZY);
    get_all(profile, socket_path, KVF_GPU_PIN_WINDOW);
}

static void run_process(const char *what, const char *profile, const struct kvf_test_daemon *daemon)
{
    char program[KVF_TEST_PATH_BYTES];
    char number[16];
    ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 1);
    int wait_status = 0;
    pid_t pid;

    assert_true(n > 0);
    program[n] = 0;
    (void)snprintf(number, sizeof(number), "%d", (int)daemon->process.pid);
    (void)fflush(stdout);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl(program, program, what, profile, daemon->socket_path, number, (char *)NULL);
        _exit(127);
    }
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    assert_true(WIFEXITED(wait_status));
    assert_int_equal(WEXITSTATUS(wait_status), 0);
}

static void test_a_prompt_goes_and_comes_back(void **state)
{
    bool is_fake = calls_fake.fake_cuda_seed != NULL;
    const char *const sets[] = {
        is_fake ? "dram.bytes=256MiB" : "dram.bytes=4GiB",
        "dram.area_bytes=128MiB",
        "staging.total=4GiB",
        "workers=4",
        "lease.client_share=75",
        "allow_uncalibrated=true",
        NULL,
    };
    size_t n_profiles = is_fake ? 1 : sizeof(profiles) / sizeof(profiles[0]);
    struct kvf_test_daemon daemon;

    (void)state;
    for (size_t i = 0; i < n_profiles; i++) {
        kvf_test_daemon_create(&daemon, sets);
        kvf_test_daemon_start(&daemon);
        printf("profile %s, %u tokens\n", profiles[i], chunks_wanted() * CHUNK_TOKENS);
        run_process("put", profiles[i], &daemon);
        run_process("get", profiles[i], &daemon);
        kvf_test_daemon_destroy(&daemon);
    }
}

static char **arguments;

static void test_as_a_process(void **state)
{
    (void)state;
    if (strcmp(arguments[1], "put") == 0) {
        put_process(arguments[2], arguments[3], (pid_t)strtol(arguments[4], NULL, 10));
    } else {
        get_process(arguments[2], arguments[3]);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest whole[] = {cmocka_unit_test(test_a_prompt_goes_and_comes_back)};
    const struct CMUnitTest one[] = {cmocka_unit_test(test_as_a_process)};
    int failed;

    if (!calls_device_open()) {
        return 77;
    }
    arguments = argv;
    failed = argc == 5 ? cmocka_run_group_tests(one, NULL, NULL)
                       : cmocka_run_group_tests(whole, NULL, NULL);
    return failed;
}
