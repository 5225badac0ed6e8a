/* SPDX-License-Identifier: Apache-2.0
 *
 * calls.c: an engine in small (calls.h).
 */
#include "tests/gpu/calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "codec/codec_gpu_image.h"

struct kvf_gpu_device *calls_device;
struct fake_cuda calls_fake;
bool calls_maps;

/* ----------------------------------------------------------------------------------------------
 * The device
 */
bool calls_device_open(void)
{
    static const struct kvf_gpu_choice any = {.ordinal = -1};
    const char *path = getenv("KVFERRY_CUDA_DRIVER");
    void *fake = path != NULL ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    char text[KVF_GPU_TEXT_BYTES];

    if (kvf_gpu_images[0].name == NULL) {
        printf("skipped: built without nvcc\n");
        return false;
    }
    if (kvf_gpu_device_open(&any, &calls_device, text, sizeof(text)) != KVF_OK) {
        printf("skipped: %s\n", text);
        return false;
    }
    if (fake == NULL && path != NULL) {
        fake = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    }
    if (fake != NULL) {
#define CONTROL(name, result, parameters) *(void **)&calls_fake.name = dlsym(fake, #name);
        FAKE_CUDA_CONTROLS(CONTROL)
#undef CONTROL
    }
    calls_check(calls_device->driver.cuCtxPushCurrent(calls_device->context));
    printf("device: %s\n", calls_device->name);
    return true;
}

bool calls_begin(uint64_t *seed_out)
{
    if (!calls_device_open()) {
        return false;
    }
    *seed_out = kvf_test_seed();
    if (calls_fake.fake_cuda_seed != NULL) {
        calls_fake.fake_cuda_seed(*seed_out);
    }
    return true;
}

void calls_device_close(void)
{
    void *context;

    (void)calls_device->driver.cuCtxPopCurrent(&context);
    calls_device = kvf_gpu_device_close(calls_device);
}

void calls_check(int result)
{
    if (kvf_gpu_device_result(calls_device, result, "the test's own call") != KVF_OK) {
        fail_msg("%s", calls_device->text);
    }
}

/* What calls_alloc has mapped. */
static struct {
    uint64_t base;
    size_t bytes;
} mapped[16];

static const struct kvf_cuda_allocation *piece_kind(size_t *unit_out)
{
    static struct kvf_cuda_allocation allocation;

    allocation = (struct kvf_cuda_allocation){
        .type = KVF_CUDA_ALLOCATION_PINNED,
        .handle_types = KVF_CUDA_HANDLE_POSIX_FD,
        .location = {KVF_CUDA_LOCATION_DEVICE, calls_device->device},
    };
    calls_check(calls_device->driver.cuMemGetAllocationGranularity(unit_out, &allocation,
                                                                   KVF_CUDA_GRANULARITY_MINIMUM));
    return &allocation;
}

/* Pieces of the least size, each of its own, one behind the other. */
static void pieces_make(uint64_t base, size_t bytes)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;
    size_t unit = 0;
    const struct kvf_cuda_allocation *allocation = piece_kind(&unit);
    const struct kvf_cuda_access access = {allocation->location, KVF_CUDA_ACCESS_READ_WRITE};

    for (size_t at = 0; at < bytes; at += unit) {
        uint64_t handle = 0;

        calls_check(driver->cuMemCreate(&handle, unit, allocation, 0));
        calls_check(driver->cuMemMap(base + at, unit, 0, handle, 0));
        calls_check(driver->cuMemRelease(handle));
    }
    calls_check(driver->cuMemSetAccess(base, bytes, &access, 1));
}

static uint64_t map_pieces(size_t bytes)
{
    size_t unit = 0;
    uint64_t base = 0;
    uint32_t slot = 0;

    (void)piece_kind(&unit);
    bytes = (bytes + unit / 2 + unit - 1) / unit * unit;
    calls_check(calls_device->driver.cuMemAddressReserve(&base, bytes, 0, 0, 0));
    pieces_make(base, bytes);
    while (mapped[slot].base != 0) {
        slot++;
    }
    mapped[slot].base = base;
    mapped[slot].bytes = bytes;
    return base + unit / 2;
}

void calls_pages_replace(struct calls *calls)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;

    for (size_t i = 0; i < sizeof(mapped) / sizeof(mapped[0]); i++) {
        if (mapped[i].base != 0 && calls->pages.address - mapped[i].base < mapped[i].bytes) {
            calls_check(driver->cuMemUnmap(mapped[i].base, mapped[i].bytes));
            pieces_make(mapped[i].base, mapped[i].bytes);
        }
    }
}

static bool unmap_pieces(uint64_t address)
{
    for (size_t i = 0; i < sizeof(mapped) / sizeof(mapped[0]); i++) {
        if (mapped[i].base != 0 && address - mapped[i].base < mapped[i].bytes) {
            calls_check(calls_device->driver.cuMemUnmap(mapped[i].base, mapped[i].bytes));
            calls_check(calls_device->driver.cuMemAddressFree(mapped[i].base, mapped[i].bytes));
            mapped[i].base = 0;
            return true;
        }
    }
    return false;
}

uint64_t calls_alloc(size_t bytes)
{
    uint64_t address = 0;

    if (calls_maps) {
        return map_pieces(bytes);
    }
    calls_check(calls_device->driver.cuMemAlloc(&address, bytes));
    return address;
}

void calls_free(uint64_t address)
{
    if (!unmap_pieces(address)) {
        calls_check(calls_device->driver.cuMemFree(address));
    }
}

void *calls_pinned(size_t bytes)
{
    void *memory = NULL;
    uint64_t address;

    assert_int_equal(kvf_gpu_host_alloc(calls_device, bytes, &memory, &address), KVF_OK);
    return memory;
}

static void *own_stream(void)
{
    static void *stream;

    if (stream == NULL) {
        stream = calls_stream();
    }
    return stream;
}

void calls_write(uint64_t to, const void *from, size_t bytes)
{
    calls_check(calls_device->driver.cuMemcpyHtoDAsync(to, from, bytes, own_stream()));
    calls_check(calls_device->driver.cuStreamSynchronize(own_stream()));
}

void calls_read(void *to, uint64_t from, size_t bytes)
{
    calls_check(calls_device->driver.cuMemcpyDtoHAsync(to, from, bytes, own_stream()));
    calls_check(calls_device->driver.cuStreamSynchronize(own_stream()));
}

void *calls_stream(void)
{
    void *stream = NULL;

    assert_int_equal(kvf_gpu_stream_create(calls_device, KVF_GPU_PRIORITY_HIGH, &stream), KVF_OK);
    return stream;
}

void *calls_event(void)
{
    void *event = NULL;

    assert_int_equal(kvf_gpu_event_create(calls_device, &event), KVF_OK);
    return event;
}

/* ----------------------------------------------------------------------------------------------
 * Pages
 */
void calls_pages_init(struct calls *calls, struct calls_pages *pages)
{
    size_t vector = (CALLS_DIM_K + CALLS_DIM_V) * 2;
    size_t layer_bytes;
    struct kvf_gpu_region_options options = {
        .struct_bytes = sizeof(options),
        .n_pages = CALLS_PAGES,
        .tokens_a_page = CALLS_PAGE_TOKENS,
    };

    pages->page_bytes = CALLS_HEADS * CALLS_PAGE_TOKENS * vector;
    layer_bytes = CALLS_PAGES * pages->page_bytes;
    pages->bytes = CALLS_LAYERS * layer_bytes;
    pages->address = calls_alloc(pages->bytes);
    pages->host = calls_pinned(pages->bytes);
    for (uint32_t t = 0; t < 2; t++) {
        size_t within = t != 0 ? CALLS_DIM_K * 2 : 0;

        for (uint32_t layer = 0; layer < CALLS_LAYERS; layer++) {
            pages->layers[t][layer] = (void *)(uintptr_t)(pages->address + layer * layer_bytes +
                                                          within);
            pages->host_layers[t][layer] = pages->host + layer * layer_bytes + within;
        }
    }
    options.k = (struct kvf_tensor_view){.layers = pages->layers[0],
                                         .page_stride_bytes = pages->page_bytes,
                                         .token_stride_bytes = vector,
                                         .head_stride_bytes = CALLS_PAGE_TOKENS * vector};
    options.v = options.k;
    options.v.layers = pages->layers[1];
    assert_int_equal(kvf_gpu_register(calls->gpu, &options, &pages->region), KVF_OK);
}

void calls_pages_fini(struct calls_pages *pages)
{
    calls_free(pages->address);
    kvf_gpu_host_free(calls_device, pages->host);
    memset(pages, 0, sizeof(*pages));
}

/* bf16 values around 1, which every codec can code. */
static void pages_randomize(struct calls *calls, struct calls_pages *pages)
{
    uint16_t *values = (uint16_t *)pages->host;

    for (size_t i = 0; i < pages->bytes / 2; i++) {
        uint64_t bits = kvf_random_seeded_next(&calls->random);

        values[i] = (uint16_t)((bits & 0x8000u) | (0x3e00u + (bits >> 16 & 0x1ffu)));
    }
}

void calls_fill(struct calls *calls)
{
    pages_randomize(calls, &calls->pages);
    calls_write(calls->pages.address, calls->pages.host, calls->pages.bytes);
}

struct kvf_kv_view calls_view(struct calls_pages *pages, const uint32_t *ids)
{
    size_t vector = (CALLS_DIM_K + CALLS_DIM_V) * 2;
    struct kvf_kv_view view = {
        .struct_bytes = sizeof(view), .tokens_a_page = CALLS_PAGE_TOKENS, .page_table = ids};

    view.k = (struct kvf_tensor_view){.layers = pages->host_layers[0],
                                      .page_stride_bytes = pages->page_bytes,
                                      .token_stride_bytes = vector,
                                      .head_stride_bytes = CALLS_PAGE_TOKENS * vector};
    view.v = view.k;
    view.v.layers = pages->host_layers[1];
    return view;
}

bool calls_pages_are_equal(struct calls_pages *pages)
{
    static uint8_t *copy;
    static size_t copy_bytes;

    if (copy_bytes < pages->bytes) {
        copy = calls_pinned(pages->bytes);
        copy_bytes = pages->bytes;
    }
    calls_read(copy, pages->address, pages->bytes);
    return memcmp(copy, pages->host, pages->bytes) == 0;
}

void calls_assert_pages_equal(struct calls *calls)
{
    assert_true(calls_pages_are_equal(&calls->pages));
}

/* ----------------------------------------------------------------------------------------------
 * The engine
 */
static void on_log(void *arg, int severity, const char *text)
{
    struct calls *calls = arg;

    if (severity <= 1) {
        calls->n_log_errors++;
        (void)snprintf(calls->log_text, sizeof(calls->log_text), "%s", text);
    }
}

void calls_daemon_start(struct calls *calls, const char *const *sets)
{
    kvf_test_daemon_create(&calls->daemon, sets);
    kvf_test_daemon_set(&calls->daemon, "allow_uncalibrated=true");
    kvf_test_daemon_start(&calls->daemon);
}

void calls_daemon_stop(struct calls *calls)
{
    kvf_test_daemon_destroy(&calls->daemon);
}

pid_t calls_worker_pid(const struct calls *calls, char *state_out)
{
    DIR *proc = opendir("/proc");
    const struct dirent *entry;
    pid_t found = 0;

    assert_non_null(proc);
    while ((entry = readdir(proc)) != NULL) {
        char path[300];
        char state;
        int parent = 0;
        FILE *stat;

        (void)snprintf(path, sizeof(path), "/proc/%s/stat", entry->d_name);
        stat = entry->d_name[0] >= '1' && entry->d_name[0] <= '9' ? fopen(path, "re") : NULL;
        if (stat != NULL) {
            if (fscanf(stat, "%*d (%*[^)]) %c %d", &state, &parent) == 2 && state != 'Z' &&
                parent == calls->daemon.process.pid) {
                found = (pid_t)strtol(entry->d_name, NULL, 10);
                if (state_out != NULL) {
                    *state_out = state;
                }
            }
            (void)fclose(stat);
        }
    }
    (void)closedir(proc);
    return found;
}

pid_t calls_worker_stop(const struct calls *calls)
{
    pid_t pid = calls_worker_pid(calls, NULL);
    char state = 0;

    assert_true(pid > 0);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    while (calls_worker_pid(calls, &state) == pid && state != 'T') {
    }
    return pid;
}

int calls_run_tests(struct calls *calls, const struct CMUnitTest *tests, size_t n)
{
    int failed;

    calls_daemon_start(calls, NULL);
    failed = _cmocka_run_group_tests("tests", tests, n, NULL, NULL);
    calls_daemon_stop(calls);
    return failed;
}

static struct kvf_geometry geometry_of(void)
{
    return (struct kvf_geometry){
        .struct_bytes = sizeof(struct kvf_geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = CALLS_LAYERS,
        .n_heads = CALLS_HEADS,
        .dim_k = CALLS_DIM_K,
        .dim_v = CALLS_DIM_V,
        .chunk_tokens = CALLS_CHUNK_TOKENS,
        .sink_tokens = 3,
    };
}

void calls_client_open(struct calls *calls, const char *profile, uint64_t seed)
{
    struct kvf_geometry geometry = geometry_of();
    struct kvf_options options;

    kvf_random_seeded_init(&calls->random, seed);
    kvf_test_client_options(&calls->daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = calls->staging_bytes != 0 ? calls->staging_bytes : 4 << 20;
    memset(options.weights_digest, calls->model, sizeof(options.weights_digest));
    options.log = on_log;
    options.log_arg = calls;
    assert_int_equal(kvf_open(&options, &calls->client), KVF_OK);
    calls->options.struct_bytes = sizeof(calls->options);
    if (calls->options.burst_bytes == 0) {
        calls->options.burst_bytes = 1 << 19;
    }
    if (calls->options.load_window_bytes == 0) {
        calls->options.load_window_bytes = 1 << 19;
    }
}

void calls_open(struct calls *calls, const char *profile, uint64_t seed)
{
    const struct kvf_codec_plan *plan;

    calls_client_open(calls, profile, seed);
    assert_int_equal(kvf_gpu_open(calls->client, &calls->options, &calls->gpu), KVF_OK);
    plan = &calls->client->plan;
    assert_string_equal(plan->profile->name, profile);
    calls->workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                                     (plan->workspace_bytes / KVF_CODEC_WORKSPACE_ALIGN + 1) *
                                         KVF_CODEC_WORKSPACE_ALIGN);
    calls->record = malloc(plan->record_bytes_max);
    assert_non_null(calls->workspace);
    assert_non_null(calls->record);
    calls_pages_init(calls, &calls->pages);
    calls_fill(calls);
}

void calls_close(struct calls *calls)
{
    calls->gpu = kvf_gpu_close(calls->gpu);
    calls->client = kvf_close(calls->client);
    calls_pages_fini(&calls->pages);
    free(calls->workspace);
    free(calls->record);
    calls->workspace = calls->record = NULL;
    memset(&calls->options, 0, sizeof(calls->options));
    calls->staging_bytes = 0;
}

void calls_encode(struct calls *calls, const uint32_t *ids, uint32_t token_start, uint32_t n_tokens)
{
    const struct kvf_codec_plan *plan = &calls->client->plan;
    struct kvf_kv_view view = calls_view(&calls->pages, ids);
    size_t payload_bytes = 0;

    assert_int_equal(kvf_block_encode(plan, &view, token_start, n_tokens, (void *)calls->record,
                                      calls->record + KVF_RECORD_PAGE_BYTES,
                                      plan->record_bytes_max - KVF_RECORD_PAGE_BYTES,
                                      calls->workspace, &payload_bytes),
                     KVF_OK);
    calls->record_bytes = KVF_RECORD_PAGE_BYTES + payload_bytes;
}

void calls_assert_stored(struct calls *calls, const struct kvf_key *key)
{
    struct kvf_record_page want;
    struct kvf_record_page page;
    struct kvf_hit hit;

    assert_int_equal(kvf_get(calls->client, key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(hit.record_bytes, calls->record_bytes);
    memcpy(&page, hit.record, sizeof(page));
    memcpy(&want, calls->record, sizeof(want));
    /* what the daemon fills in */
    memcpy(want.header.key_id, page.header.key_id, sizeof(want.header.key_id));
    want.header.shard_count = page.header.shard_count;
    want.store = page.store;
    kvf_block_seal_header(&want);
    assert_memory_equal(&page, &want, sizeof(page));
    assert_memory_equal(hit.payload, calls->record + KVF_RECORD_PAGE_BYTES,
                        calls->record_bytes - KVF_RECORD_PAGE_BYTES);
    assert_int_equal(kvf_lease_release(calls->client, hit.lease), KVF_OK);
}

void calls_decode(struct calls *calls, const void *record, size_t record_bytes,
                  uint32_t token_first, uint32_t n_tokens, const uint32_t *ids)
{
    struct kvf_kv_view view = calls_view(&calls->pages, ids);

    assert_int_equal(kvf_block_decode(&calls->client->plan, record, record_bytes, 0, 0, token_first,
                                      n_tokens, &view, calls->workspace),
                     KVF_OK);
}

struct kvf_key calls_key(uint64_t number, char text[24])
{
    (void)snprintf(text, 24, "gpu-block-%013llu", (unsigned long long)number);
    return (struct kvf_key){text, 23};
}

static void outcome_note(struct calls_outcome *outcome, const struct kvf_gpu_event *event)
{
    assert_false(outcome->is_over);
    switch (event->kind) {
    case KVF_GPU_EVENT_PAGES_FREE:
        assert_false(outcome->pages_free);
        outcome->pages_free = true;
        outcome->free_status = event->status;
        break;
    case KVF_GPU_EVENT_BLOCK:
        assert_false(outcome->has_block[event->index]);
        outcome->has_block[event->index] = true;
        outcome->blocks[event->index] = event->status;
        outcome->tiers[event->index] = event->tier;
        break;
    default:
        outcome->is_over = true;
        outcome->status = event->status;
        outcome->n_good = event->index;
        break;
    }
}

uint32_t calls_take(struct calls *calls, const uint64_t *requests, struct calls_outcome *outcomes,
                    uint32_t n, uint32_t timeout_ms)
{
    struct kvf_gpu_event events[8];
    uint32_t n_events = 0;
    int status = kvf_gpu_poll(calls->gpu, events, 8, timeout_ms, &n_events);

    assert_true(status == KVF_OK || status == KVF_EMPTY || status == KVF_ERR_IO);
    for (uint32_t i = 0; i < n_events; i++) {
        uint32_t at = 0;

        while (at < n && requests[at] != events[i].request) {
            at++;
        }
        assert_true(at < n);
        outcome_note(&outcomes[at], &events[i]);
    }
    return n_events;
}

void calls_wait(struct calls *calls, uint64_t request, struct calls_outcome *outcome)
{
    uint64_t deadline_ns = kvf_now_ns() + 20 * KVF_NS_PER_S;

    while (!outcome->is_over) {
        (void)calls_take(calls, &request, outcome, 1, 100);
        assert_true(kvf_now_ns() < deadline_ns);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Chains
 */
static uint64_t next_key = 1;

void calls_key_first(uint64_t number)
{
    next_key = number;
}

void calls_chain_ids(uint32_t i, uint32_t ids[CALLS_CHUNK_PAGES])
{
    for (uint32_t p = 0; p < CALLS_CHUNK_PAGES; p++) {
        ids[p] = (i * CALLS_CHUNK_PAGES + p) * 37 % CALLS_PAGES;
    }
}

void calls_chain_rename(struct calls_chain *chain, uint32_t i)
{
    (void)calls_key(next_key++, chain->keys[i]);
}

void calls_chain_init(struct calls_chain *chain, uint32_t n, uint32_t n_tail)
{
    chain->n = n;
    for (uint32_t i = 0; i < n; i++) {
        struct kvf_key key = calls_key(next_key++, chain->keys[i]);

        calls_chain_ids(i, chain->ids[i]);
        chain->puts[i] = (struct kvf_gpu_put_item){
            .struct_bytes = sizeof(chain->puts[i]),
            .n_pages = CALLS_CHUNK_PAGES,
            .key = key,
            .token_start = i * CALLS_CHUNK_TOKENS,
            .n_tokens = i + 1 == n ? n_tail : 0,
            .pages = chain->ids[i],
        };
        chain->gets[i] = (struct kvf_gpu_get_item){
            .struct_bytes = sizeof(chain->gets[i]),
            .n_pages = CALLS_CHUNK_PAGES,
            .key = key,
            .n_tokens = i + 1 == n ? n_tail : 0,
            .pages = chain->ids[i],
        };
    }
}

static uint32_t chain_tokens(const struct calls_chain *chain, uint32_t i)
{
    return chain->puts[i].n_tokens != 0 ? chain->puts[i].n_tokens : CALLS_CHUNK_TOKENS;
}

void calls_chain_put(struct calls *calls, const struct calls_chain *chain,
                     struct calls_outcome *outcome)
{
    uint64_t request;

    assert_int_equal(kvf_gpu_put(calls->gpu, calls->pages.region, chain->puts, chain->n, NULL, NULL,
                                 NULL, 7, NULL, &request),
                     KVF_OK);
    calls_wait(calls, request, outcome);
}

void calls_chain_get(struct calls *calls, const struct calls_chain *chain,
                     struct calls_outcome *outcome)
{
    uint64_t request;

    assert_int_equal(kvf_gpu_get(calls->gpu, calls->pages.region, chain->gets, chain->n, NULL, NULL,
                                 NULL, 8, &request),
                     KVF_OK);
    calls_wait(calls, request, outcome);
}

void calls_chain_put_and_check(struct calls *calls, const struct calls_chain *chain)
{
    struct calls_outcome outcome = {0};

    calls_chain_put(calls, chain, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(outcome.n_good, chain->n);
    assert_true(outcome.pages_free);
    assert_int_equal(outcome.free_status, KVF_OK);
    for (uint32_t i = 0; i < chain->n; i++) {
        calls_encode(calls, chain->ids[i], chain->puts[i].token_start, chain_tokens(chain, i));
        calls_assert_stored(calls, &chain->puts[i].key);
    }
}

void calls_chain_get_and_check(struct calls *calls, const struct calls_chain *chain)
{
    struct calls_outcome outcome = {0};

    for (uint32_t i = 0; i < chain->n; i++) {
        struct kvf_hit hit;

        if (i == 0) {
            calls_fill(calls);
        }
        assert_int_equal(kvf_get(calls->client, &chain->gets[i].key, 1, NULL, &hit), KVF_OK);
        calls_decode(calls, hit.record, hit.record_bytes, chain->gets[i].token_first, 0,
                     chain->gets[i].pages);
        assert_int_equal(kvf_lease_release(calls->client, hit.lease), KVF_OK);
    }
    calls_chain_get(calls, chain, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    assert_int_equal(outcome.n_good, chain->n);
    calls_assert_pages_equal(calls);
}

int calls_run_alone(const struct calls *calls, const char *program, const char *mutant,
                    uint64_t first_key)
{
    char key[24];
    int wait_status = 0;
    pid_t pid;

    (void)snprintf(key, sizeof(key), "%llu", (unsigned long long)first_key);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl(program, program, mutant, calls->daemon.socket_path, key, (char *)NULL);
        _exit(127);
    }
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    return wait_status;
}

void calls_own_program(char program_out[KVF_TEST_PATH_BYTES])
{
    ssize_t n = readlink("/proc/self/exe", program_out, KVF_TEST_PATH_BYTES - 1);

    assert_true(n > 0);
    program_out[n] = 0;
}

void calls_assert_caught(const char *mutant, int wait_status)
{
    bool is_caught = WIFSIGNALED(wait_status) || WEXITSTATUS(wait_status) == 1;

    print_message("%s: %s\n", mutant, is_caught ? "caught" : "not caught");
    assert_false(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) > 1);
    if (calls_fake.fake_cuda_seed != NULL) {
        assert_true(is_caught);
    }
}
