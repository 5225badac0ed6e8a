/* SPDX-License-Identifier: Apache-2.0
 *
 * test_x_order.c: who waits for whom where K and V are made of stored X, and where X is put.
 *
 * W_K is the unit matrix, times a power of two that each layer has for itself, and W_V the same
 * from right to left: K and V are X to the bit, and a product that another one has overwritten, a
 * window that holds the blocks of the next, pages that a step still reads, all show as wrong bytes.
 * A round gets blocks into pages that a stream reads until then, by two calls on two streams, and
 * rebuilds X of device memory on these and a third. Everything the host does is one call behind
 * what allows it. And it puts X layer by layer, behind what makes it, each layer in the place of
 * the one before: the daemon has to have what the C codec makes of it.
 *
 * All rounds must be right. Then each wait of gpu_x.c and gpu_x_put.c, which list them, is taken
 * out, in a process of its own, and some round has to go wrong: on the fake driver, which runs what
 * is queued in any order that is allowed. On a GPU this is reported and not required.
 */
#include "base/mutant.h"
#include "kvferry_gpu_x.h"
#include "tests/gpu/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "codec/codec_fp.h"

const char *kvf_mutant_chosen;

static const char *const mutants[] = {
    "x_blocks_wait", "x_window_wait", "x_product_wait",
    "x_reader_wait", "x_return_wait", "x_put_encode_wait",
};

enum {
    LAYERS = 2,
    WIDTH = 128, /* of X, K and V */
    HEADS = 2,
    DIM = WIDTH / HEADS,
    CHUNK = 16,
    PAGE = 8,
    CHUNK_PAGES = CHUNK / PAGE,
    WINDOW = 4 * CHUNK,
    BLOCKS = 10, /* stored */
    GOT = 7,     /* by a call: windows of 1, 4 and 2 */
    CALLS = 2,
    OWN = 6, /* rebuilt from X of device memory: of blocks 0, 1, ... */
    PAGES = (CALLS * GOT + OWN) * CHUNK_PAGES,
    PUT = 2, /* blocks put layer by layer */
    ROUNDS = 24,
    ROUNDS_MIN = 5,
    MUTANT_ROUNDS = 1000,
    GARBAGE = 0x3c,
    DELAY_BYTES = 64 << 20, /* some 30 us of a GPU */
};

typedef uint16_t page_set[LAYERS][PAGES][PAGE][HEADS][2][DIM];

static struct calls calls;
static struct kvf_random_seeded random_bits;
static uint64_t first_key; /* of this process: the daemon outlives it */

static struct kvf_client *client;
static struct kvf_gpu *gpu;
static struct kvf_gpu_x *x;
static uint16_t stored[BLOCKS][LAYERS][CHUNK][WIDTH];
static uint16_t matrices[LAYERS][2 * WIDTH][WIDTH];
static char keys[BLOCKS][24];
static uint64_t device_x; /* all that is stored */
static uint64_t device_matrices;
static uint64_t pages;
static uint64_t snapshot;
static uint64_t delay;
static size_t delay_bytes;
static page_set *have; /* pinned */
static void *reader;
static void *streams[CALLS + 1];
static void *read_done;

/* Of what is put layer by layer, by a client of its own. */
static struct kvf_client *putter;
static struct kvf_gpu *putter_gpu;
static void *put_workspace;
static uint8_t *put_record;
static uint64_t put_x;
static uint16_t *put_layers; /* pinned: [LAYERS][PUT * CHUNK][WIDTH] */
static uint64_t n_put;

/* --- the engine ------------------------------------------------------------------------------- */

static void client_open(const char *profile, struct kvf_client **client_out,
                        struct kvf_gpu **gpu_out)
{
    struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                    .dtype = KVF_DTYPE_BF16,
                                    .n_layers = LAYERS,
                                    .chunk_tokens = CHUNK};
    struct kvf_gpu_options gpu_options = {.struct_bytes = sizeof(gpu_options),
                                          .load_window_bytes = 1 << 20};
    struct kvf_options options;

    assert_int_equal(kvf_x_geometry(KVF_KIND_X, WIDTH, &geometry), KVF_OK);
    kvf_test_client_options(&calls.daemon, &options);
    options.geometry = &geometry;
    options.profile = profile;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = 8 << 20;
    memset(options.weights_digest, 7, sizeof(options.weights_digest));
    assert_int_equal(kvf_open(&options, client_out), KVF_OK);
    assert_int_equal(kvf_gpu_open(*client_out, &gpu_options, gpu_out), KVF_OK);
}

static void putter_open(void)
{
    const struct kvf_codec_plan *plan;

    client_open("xcl3", &putter, &putter_gpu);
    plan = &putter->plan;
    put_workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                                  (plan->workspace_bytes / KVF_CODEC_WORKSPACE_ALIGN + 1) *
                                      KVF_CODEC_WORKSPACE_ALIGN);
    put_record = calloc(1, plan->record_bytes_max);
    assert_non_null(put_workspace);
    assert_non_null(put_record);
    put_x = calls_alloc((size_t)PUT * CHUNK * WIDTH * 2);
    put_layers = calls_pinned((size_t)LAYERS * PUT * CHUNK * WIDTH * 2);
}

static void putter_close(void)
{
    putter_gpu = kvf_gpu_close(putter_gpu);
    putter = kvf_close(putter);
    free(put_workspace);
    free(put_record);
}

static void blocks_put(void)
{
    void *layers[LAYERS];

    for (uint32_t b = 0; b < BLOCKS; b++) {
        struct kvf_kv_view view = {
            .struct_bytes = sizeof(view),
            .tokens_a_page = CHUNK,
            .k = {layers, sizeof(stored[0][0]), WIDTH * 2, client->geometry.dim_k * 2u}};
        struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                    .source = KVF_SOURCE_VIEW,
                                    .key = calls_key(first_key + b, keys[b]),
                                    .token_start = b * CHUNK,
                                    .kv = &view};

        for (uint32_t l = 0; l < LAYERS; l++) {
            layers[l] = stored[b][l];
            for (uint32_t i = 0; i < CHUNK * WIDTH; i++) {
                float value = (float)(int16_t)kvf_random_seeded_next(&random_bits);

                (&stored[b][l][0][0])[i] = kvf_bf16_from_f32(value);
            }
        }
        assert_int_equal(kvf_put(client, &item, 1, NULL, NULL), KVF_OK);
    }
}

static void x_open(void)
{
    const void *lists[2][LAYERS];
    void *layers[2][LAYERS];
    struct kvf_x_weights weights = {.struct_bytes = sizeof(weights),
                                    .d_model = WIDTH,
                                    .n_layers = LAYERS,
                                    .n_heads = HEADS,
                                    .dim_k = DIM,
                                    .dim_v = DIM,
                                    .dtype = KVF_DTYPE_BF16,
                                    .kv_dtype = KVF_DTYPE_BF16,
                                    .rope_style = KVF_ROPE_STYLE_NONE,
                                    .w_k = lists[0],
                                    .w_v = lists[1]};
    struct kvf_gpu_x_options options = {
        .struct_bytes = sizeof(options),
        .window_tokens = WINDOW,
        .pages = {.struct_bytes = sizeof(options.pages),
                  .n_pages = PAGES,
                  .tokens_a_page = PAGE,
                  .k = {layers[0], sizeof((*have)[0][0]), sizeof((*have)[0][0][0]),
                        sizeof((*have)[0][0][0][0])},
                  .v = {layers[1], sizeof((*have)[0][0]), sizeof((*have)[0][0][0]),
                        sizeof((*have)[0][0][0][0])}},
    };

    memset(weights.weights_digest, 7, sizeof(weights.weights_digest));
    for (uint32_t l = 0; l < LAYERS; l++) {
        lists[0][l] = (const uint8_t *)(uintptr_t)device_matrices + l * sizeof(matrices[0]);
        lists[1][l] = (const uint8_t *)lists[0][l] + sizeof(matrices[0]) / 2;
        layers[0][l] = (uint8_t *)(uintptr_t)pages + l * sizeof((*have)[0]);
        layers[1][l] = (uint8_t *)layers[0][l] + sizeof((*have)[0][0][0][0][0]);
    }
    assert_int_equal(kvf_gpu_x_open(gpu, &weights, &options, &x), KVF_OK);
}

static void engine_open(void)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t i = 0; i < WIDTH; i++) {
            matrices[l][i][i] = kvf_bf16_from_f32((float)(1 << l));
            matrices[l][WIDTH + i][WIDTH - 1 - i] = matrices[l][i][i];
        }
    }
    client_open("raw", &client, &gpu);
    blocks_put();
    putter_open();
    device_matrices = calls_alloc(sizeof(matrices));
    calls_write(device_matrices, matrices, sizeof(matrices));
    device_x = calls_alloc(sizeof(stored));
    calls_write(device_x, stored, sizeof(stored));
    pages = calls_alloc(sizeof(page_set));
    snapshot = calls_alloc(sizeof(page_set));
    have = calls_pinned(sizeof(page_set));
    delay_bytes = calls_fake.fake_cuda_seed != NULL ? 4096 : DELAY_BYTES;
    delay = calls_alloc(delay_bytes);
    reader = calls_stream();
    read_done = calls_event();
    for (uint32_t i = 0; i < CALLS + 1; i++) {
        streams[i] = calls_stream();
    }
    x_open();
}

static void engine_close(void)
{
    x = kvf_gpu_x_close(x);
    gpu = kvf_gpu_close(gpu);
    client = kvf_close(client);
    putter_close();
}

/* --- rounds ----------------------------------------------------------------------------------- */

/* What a call asks for: other blocks each time, into pages of its own. */
struct wanted {
    uint32_t blocks[GOT];
    uint32_t ids[GOT][CHUNK_PAGES];
    struct kvf_gpu_x_item items[GOT];
};

static void wanted_make(struct wanted *wanted, uint32_t set)
{
    uint32_t first = (uint32_t)kvf_random_seeded_next(&random_bits) % BLOCKS;
    uint32_t step = kvf_random_seeded_next(&random_bits) % 2 != 0 ? 3 : 7;

    for (uint32_t i = 0; i < GOT; i++) {
        uint32_t b = (first + i * step) % BLOCKS;

        for (uint32_t p = 0; p < CHUNK_PAGES; p++) {
            wanted->ids[i][p] = (set * GOT + i) * CHUNK_PAGES + p;
        }
        wanted->blocks[i] = b;
        wanted->items[i] = (struct kvf_gpu_x_item){.struct_bytes = sizeof(wanted->items[i]),
                                                   .n_pages = CHUNK_PAGES,
                                                   .key = {keys[b], sizeof(keys[b]) - 1},
                                                   .pages = wanted->ids[i]};
    }
}

/* Are K and V of a block there, or, of a block that is none, what was there before? */
static bool is_block(uint32_t layer, uint32_t first_page, const uint16_t from[CHUNK][WIDTH])
{
    for (uint32_t t = 0; t < CHUNK; t++) {
        uint16_t(*slot)[2][DIM] = (*have)[layer][first_page + t / PAGE][t % PAGE];

        for (uint32_t i = 0; i < WIDTH; i++) {
            float factor = (float)(1 << layer);
            uint16_t k = kvf_bf16_from_f32(kvf_f32_from_bf16(from[t][i]) * factor);
            uint16_t v = kvf_bf16_from_f32(kvf_f32_from_bf16(from[t][WIDTH - 1 - i]) * factor);

            if (slot[i / DIM][0][i % DIM] != k || slot[i / DIM][1][i % DIM] != v) {
                return false;
            }
        }
    }
    return true;
}

static void read_back(uint64_t from, void *stream)
{
    calls_check(calls_device->driver.cuMemcpyDtoHAsync(have, from, sizeof(page_set), stream));
    calls_check(calls_device->driver.cuStreamSynchronize(stream));
}

static bool is_wanted_there(const struct wanted *wanted)
{
    for (uint32_t i = 0; i < GOT; i++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            if (!is_block(l, wanted->ids[i][0], stored[wanted->blocks[i]][l])) {
                return false;
            }
        }
    }
    return true;
}

/* The step that reads the pages: they hold garbage until it has. */
static void step_queue(uint32_t n_delays)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;

    calls_check(driver->cuMemsetD8Async(pages, GARBAGE, sizeof(page_set), reader));
    for (uint32_t i = 0; i < n_delays; i++) {
        calls_check(driver->cuMemsetD8Async(delay, (unsigned char)i, delay_bytes, reader));
    }
    calls_check(driver->cuMemcpyDtoDAsync(snapshot, pages, sizeof(page_set), reader));
    calls_check(driver->cuEventRecord(read_done, reader));
}

static bool is_garbage(void)
{
    const uint8_t *bytes = (const uint8_t *)have;

    for (size_t i = 0; i < sizeof(page_set); i++) {
        if (bytes[i] != GARBAGE) {
            return false;
        }
    }
    return true;
}

/* X of device memory, on one stream after the other, behind the step. */
static bool own_queue(void)
{
    bool is_good = true;

    for (uint32_t i = 0; i < OWN; i++) {
        uint32_t first = (CALLS * GOT + i) * CHUNK_PAGES;
        uint32_t ids[CHUNK_PAGES] = {first, first + 1};
        const void *from = (const void *)(uintptr_t)(device_x + i * sizeof(stored[0]));
        void *stream = streams[i % (CALLS + 1)];

        calls_check(calls_device->driver.cuStreamWaitEvent(stream, read_done, 0));
        is_good = is_good &&
                  kvf_gpu_x_rebuild(x, 0, from, CHUNK, 0, ids, CHUNK_PAGES, stream) == KVF_OK;
    }
    return is_good;
}

static bool is_all_there(const struct wanted wanted[CALLS])
{
    bool is_right = true;

    for (uint32_t c = 0; c < CALLS && is_right; c++) {
        is_right = is_wanted_there(&wanted[c]);
    }
    for (uint32_t i = 0; i < OWN && is_right; i++) {
        is_right = is_block(0, (CALLS * GOT + i) * CHUNK_PAGES, stored[i][0]);
    }
    return is_right;
}

/* Has the daemon what the C codec makes of a block that was put? */
static bool is_put(uint32_t block, const struct kvf_key *key)
{
    const struct kvf_codec_plan *plan = &putter->plan;
    void *layers[LAYERS];
    struct kvf_kv_view view = {
        .struct_bytes = sizeof(view),
        .tokens_a_page = CHUNK,
        .k = {layers, CHUNK * WIDTH * 2, WIDTH * 2, putter->geometry.dim_k * 2u}};
    struct kvf_hit hit;
    size_t bytes;
    bool is_right;

    for (uint32_t l = 0; l < LAYERS; l++) {
        layers[l] = put_layers + (size_t)(l * PUT + block) * CHUNK * WIDTH;
    }
    assert_int_equal(kvf_block_encode(plan, &view, block * CHUNK, CHUNK, (void *)put_record,
                                      put_record + KVF_RECORD_PAGE_BYTES,
                                      plan->record_bytes_max - KVF_RECORD_PAGE_BYTES, put_workspace,
                                      &bytes),
                     KVF_OK);
    if (kvf_get(putter, key, 1, NULL, &hit) != KVF_OK) {
        return false;
    }
    is_right = hit.record_bytes == KVF_RECORD_PAGE_BYTES + bytes &&
               memcmp((const uint8_t *)hit.record + KVF_RECORD_PAGE_BYTES,
                      put_record + KVF_RECORD_PAGE_BYTES, bytes) == 0;
    return kvf_lease_release(putter, hit.lease) == KVF_OK && is_right;
}

/* X of some blocks, layer by layer on one stream, behind what delays it. */
static bool put_run(uint32_t n_delays, void *stream)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;
    const size_t bytes = (size_t)PUT * CHUNK * WIDTH * 2;
    struct kvf_gpu_x_put_options options = {.struct_bytes = sizeof(options),
                                            .n_tokens = PUT * CHUNK};
    struct kvf_key names[PUT];
    char texts[PUT][24];
    struct kvf_gpu_x_put *put;
    bool is_right;

    for (uint32_t i = 0; i < LAYERS * PUT * CHUNK * WIDTH; i++) {
        float value = (float)(int16_t)kvf_random_seeded_next(&random_bits);

        put_layers[i] = kvf_bf16_from_f32(value);
    }
    assert_int_equal(kvf_gpu_x_put_begin(putter_gpu, &options, &put), KVF_OK);
    for (uint32_t i = 0; i < n_delays; i++) {
        calls_check(driver->cuMemsetD8Async(delay, (unsigned char)i, delay_bytes, stream));
    }
    for (uint32_t l = 0; l < LAYERS; l++) {
        calls_check(driver->cuMemcpyHtoDAsync(put_x, put_layers + l * bytes / 2, bytes, stream));
        assert_int_equal(kvf_gpu_x_put_layer(put, l, (const void *)(uintptr_t)put_x, stream),
                         KVF_OK);
    }
    for (uint32_t b = 0; b < PUT; b++) {
        names[b] = calls_key(first_key + BLOCKS + n_put++, texts[b]);
    }
    is_right = kvf_gpu_x_put_end(put, names, PUT, NULL, NULL) == KVF_OK;
    for (uint32_t b = 0; b < PUT && is_right; b++) {
        is_right = is_put(b, &names[b]);
    }
    return is_right;
}

/* True: every byte was right. */
static bool round_run(uint32_t number)
{
    struct wanted wanted[CALLS];
    int32_t statuses[GOT];
    bool is_right = true;

    step_queue(number % 4);
    for (uint32_t c = 0; c < CALLS && is_right; c++) {
        /* on a stream of the library's all is there at once */
        void *stream = (number + c) % 3 == 0 ? NULL : streams[c];

        wanted_make(&wanted[c], c);
        is_right = kvf_gpu_x_get(x, wanted[c].items, GOT, NULL, read_done, stream, statuses) ==
                   KVF_OK;
        if (is_right && stream == NULL) {
            read_back(pages, streams[CALLS]);
            is_right = is_wanted_there(&wanted[c]);
        }
    }
    is_right = is_right && own_queue();
    for (uint32_t i = 0; i < CALLS + 1; i++) {
        calls_check(calls_device->driver.cuStreamSynchronize(streams[i]));
    }
    read_back(pages, streams[0]);
    is_right = is_right && is_all_there(wanted);
    read_back(snapshot, reader);
    return is_right && is_garbage() && put_run(number % 4, streams[number % CALLS]);
}

static void test_rounds(void **state)
{
    uint32_t n = kvf_test_scaled(ROUNDS);

    (void)state;
    engine_open();
    for (uint32_t i = 0; i < (n < ROUNDS_MIN ? ROUNDS_MIN : n); i++) {
        if (!round_run(i)) {
            fail_msg("round %u", i);
        }
    }
    engine_close();
}

/* --- mutants ---------------------------------------------------------------------------------- */

/* In a child: exit code 1 says that a round went wrong, a signal as well. */
static void mutant_run(const char *mutant)
{
    uint32_t n = calls_fake.fake_cuda_seed != NULL ? MUTANT_ROUNDS : kvf_test_scaled(MUTANT_ROUNDS);

    kvf_mutant_chosen = mutant;
    engine_open();
    for (uint32_t i = 0; i < n; i++) {
        if (!round_run(i)) {
            printf("%s: caught in round %u\n", mutant, i);
            (void)fflush(stdout);
            _exit(1);
        }
    }
    _exit(0);
}

static void test_each_removed_wait_is_caught(void **state)
{
    char program[KVF_TEST_PATH_BYTES];

    (void)state;
    calls_own_program(program);
    for (size_t i = 0; i < sizeof(mutants) / sizeof(mutants[0]); i++) {
        calls_assert_caught(mutants[i],
                            calls_run_alone(&calls, program, mutants[i], 1000000 * (i + 1)));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounds),
        cmocka_unit_test(test_each_removed_wait_is_caught),
    };
    uint64_t seed;
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    kvf_random_seeded_init(&random_bits, seed);
    if (argc == 4) {
        (void)snprintf(calls.daemon.socket_path, sizeof(calls.daemon.socket_path), "%s", argv[2]);
        first_key = strtoull(argv[3], NULL, 10);
        mutant_run(argv[1]);
    }
    calls_daemon_start(&calls, NULL);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    return failed;
}
