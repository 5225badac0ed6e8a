/* SPDX-License-Identifier: Apache-2.0
 *
 * test_order.c: who waits for whom.
 *
 * A round writes pages on one stream, puts them, overwrites them the moment they are free, gets
 * them into pages that another stream still reads, and looks at the result the moment it is
 * complete. Everything the host does is one call behind the event that allows it. Delays in front
 * of the streams of the "engine" give the library every chance to be early.
 *
 * A thousand rounds must give the right bytes. Then each wait of the library (gpu_internal.h lists
 * them) is taken out, in a process of its own, and some round has to go wrong: on the fake driver,
 * which runs what is queued in any order that is allowed. On a GPU the orders are those of its
 * scheduler, so there this is reported and not required.
 */
#include "client/gpu_internal.h"
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

const char *kvf_mutant_chosen;

#ifdef KVF_TEST_AGENT
/* Between processes: the first two are of this one, the others of the worker. */
static const char *const mutants[] = {
    "agent_writer_wait", "agent_reader_wait", "gpud_writer_wait", "gpud_reader_wait",
    "gpu_free_wait",     "gpu_complete_wait", "gpu_peek_wait",
};
#else
static const char *const mutants[] = {
    "gpu_writer_wait", "gpu_upload_wait",   "gpu_free_wait",  "gpu_encode_wait",
    "gpu_submit_wait", "gpu_ring_wait",     "gpu_copy_wait",  "gpu_release_wait",
    "gpu_reader_wait", "gpu_complete_wait", "gpu_lists_wait",
};
#endif

enum {
#ifdef KVF_TEST_AGENT
    ROUNDS = 100,
    PATH = KVF_GPU_PATH_AGENT,
    OWN_MUTANTS = 2,
#else
    ROUNDS = 1000,
    PATH = KVF_GPU_PATH_AUTO,
    OWN_MUTANTS = sizeof(mutants) / sizeof(mutants[0]),
#endif
    ROUNDS_MIN = 5,
    MUTANT_ROUNDS = 1000,
    HBM_GETS = 4,
    CHUNKS = 3,
    DELAY_BYTES = 64 << 20, /* some 30 us of a GPU */
};

static struct calls calls;
static uint64_t seed;
static uint64_t first_key; /* of this process and mode: the daemon outlives them */

/* Gets of each round: with several, all but the first find blocks in the GPU's memory, if the
 * daemon has a tier there. */
static uint32_t n_gets = 1;

/* The engine's side. */
static void *writer;
static void *reader;
static void *other;
static void *written;
static void *read_done;
static uint64_t snapshot; /* what the reader reads */
static uint8_t *snapshot_host;
static uint8_t *content; /* pinned: what the writer writes */
static uint8_t *garbage;
static uint64_t delay;
static size_t delay_bytes;

/* Is memory of a hit still being read when its lease ends? */
static bool was_released_early;

int __real_kvf_lease_release(struct kvf_client *client, uint64_t lease);
int __wrap_kvf_lease_release(struct kvf_client *client, uint64_t lease);

int __wrap_kvf_lease_release(struct kvf_client *client, uint64_t lease)
{
    const struct kvf_gpu_request *request = calls.gpu != NULL ? calls.gpu->requests : NULL;

    for (; request != NULL && calls_fake.fake_cuda_is_pending != NULL; request = request->next) {
        for (uint32_t i = 0; i < request->n; i++) {
            const struct kvf_hit *hit = &request->items[i].hit;

            if (hit->record != NULL && hit->lease == lease &&
                calls_fake.fake_cuda_is_pending(hit->record, hit->record_bytes)) {
                was_released_early = true;
            }
        }
    }
    return __real_kvf_lease_release(client, lease);
}

static void engine_open(uint32_t pinning)
{
    calls.options.pinning = pinning;
    calls.options.path = PATH;
    calls.options.burst_bytes = 1 << 17;
    /* one block of profile balanced: each one waits for the one before */
    calls.options.ring_bytes = n_gets > 1 ? 0 : 48 << 10;
    /* blocks of several sizes: what one is read by fits no other */
    calls_open(&calls, n_gets > 1 ? "exact" : "balanced", seed);
    writer = calls_stream();
    reader = calls_stream();
    other = calls_stream();
    written = calls_event();
    read_done = calls_event();
    snapshot = calls_alloc(calls.pages.bytes);
    snapshot_host = calls_pinned(calls.pages.bytes);
    content = calls_pinned(calls.pages.bytes);
    garbage = calls_pinned(calls.pages.bytes);
    memset(garbage, 0x3c, calls.pages.bytes);
    delay_bytes = calls_fake.fake_cuda_seed != NULL ? 4096 : DELAY_BYTES;
    delay = calls_alloc(delay_bytes);
}

static void engine_close(void)
{
    calls_check(calls_device->driver.cuEventDestroy(written));
    calls_check(calls_device->driver.cuEventDestroy(read_done));
    calls_check(calls_device->driver.cuStreamDestroy(writer));
    calls_check(calls_device->driver.cuStreamDestroy(reader));
    calls_check(calls_device->driver.cuStreamDestroy(other));
    calls_close(&calls);
}

static void delay_queue(void *stream, uint32_t times)
{
    for (uint32_t i = 0; i < times; i++) {
        calls_check(
            calls_device->driver.cuMemsetD8Async(delay, (unsigned char)i, delay_bytes, stream));
    }
}

static void all_pages_write(const void *from, void *stream)
{
    calls_check(calls_device->driver.cuMemcpyHtoDAsync(calls.pages.address, from, calls.pages.bytes,
                                                       stream));
}

/* Poll until the request says so. False: it says something else. */
static bool wait_for(uint64_t request, uint8_t kind)
{
    for (;;) {
        struct kvf_gpu_event event;
        uint32_t n;

        if (kvf_gpu_poll(calls.gpu, &event, 1, 1000, &n) != KVF_OK) {
            return false;
        }
        if (event.request == request && event.kind == kind) {
            return event.status == KVF_OK;
        }
        if (event.kind == KVF_GPU_EVENT_REQUEST) {
            return false;
        }
    }
}

struct round {
    uint32_t ids[2][CHUNKS][CALLS_CHUNK_PAGES]; /* pages that are put, and got into */
    char keys[CHUNKS][24];
    struct kvf_gpu_put_item puts[CHUNKS];
    struct kvf_gpu_get_item gets[CHUNKS];
};

static void round_init(struct round *round, uint32_t number)
{
    for (uint32_t c = 0; c < CHUNKS; c++) {
        struct kvf_key key = calls_key(first_key + (uint64_t)number * CHUNKS + c, round->keys[c]);

        for (uint32_t p = 0; p < CALLS_CHUNK_PAGES; p++) {
            uint32_t at = c * CALLS_CHUNK_PAGES + p;

            round->ids[0][c][p] = (at * 7 + number) % (CALLS_PAGES / 2);
            round->ids[1][c][p] = CALLS_PAGES / 2 + (at * 11 + number) % (CALLS_PAGES / 2);
        }
        round->puts[c] = (struct kvf_gpu_put_item){.struct_bytes = sizeof(round->puts[c]),
                                                   .n_pages = CALLS_CHUNK_PAGES,
                                                   .key = key,
                                                   .token_start = c * CALLS_CHUNK_TOKENS,
                                                   .pages = round->ids[0][c]};
        round->gets[c] = (struct kvf_gpu_get_item){.struct_bytes = sizeof(round->gets[c]),
                                                   .n_pages = CALLS_CHUNK_PAGES,
                                                   .key = key,
                                                   .pages = round->ids[1][c]};
    }
}

/* What the pages that are got into must hold, into calls.pages.host, whose other pages hold
 * garbage. */
static void expect(struct round *round)
{
    memcpy(calls.pages.host, content, calls.pages.bytes);
    for (uint32_t c = 0; c < CHUNKS; c++) {
        uint8_t *record;

        calls_encode(&calls, round->ids[0][c], c * CALLS_CHUNK_TOKENS, CALLS_CHUNK_TOKENS);
        record = malloc(calls.record_bytes);
        assert_non_null(record);
        memcpy(record, calls.record, calls.record_bytes);
        calls_decode(&calls, record, calls.record_bytes, 0, 0, round->ids[1][c]);
        free(record);
    }
    /* pages that were put have been overwritten since, and so have those that nobody uses */
    for (uint32_t page = 0; page < CALLS_PAGES; page++) {
        bool is_got = false;

        for (uint32_t c = 0; c < CHUNKS * CALLS_CHUNK_PAGES; c++) {
            is_got = is_got || (&round->ids[1][0][0])[c] == page;
        }
        for (uint32_t layer = 0; layer < CALLS_LAYERS && !is_got; layer++) {
            size_t at = ((size_t)layer * CALLS_PAGES + page) * calls.pages.page_bytes;

            memcpy(calls.pages.host + at, garbage + at, calls.pages.page_bytes);
        }
    }
}

/* Write, put, overwrite, in chain pieces as the ring takes them. */
static bool round_put(const struct round *round, void *stream)
{
    uint64_t requests[CHUNKS];
    uint32_t n_requests = 0;
    uint32_t at = 0;

    while (at < CHUNKS) {
        struct kvf_put_options options = {.struct_bytes = sizeof(options), .depth = at};
        uint32_t taken = 0;
        int status;

        if (at > 0) {
            options.parent = round->puts[at - 1].key;
        }
        status = kvf_gpu_put(calls.gpu, calls.pages.region, round->puts + at, CHUNKS - at, &options,
                             written, stream, 0, &taken, &requests[n_requests]);
        if (status == KVF_OK) {
            at += taken;
            n_requests++;
        } else if (status != KVF_ERR_BUSY) {
            return false;
        }
    }
    /* events come in order for one request; of several, the last PAGES_FREE counts */
    for (uint32_t free_events = 0, over = 0; over < n_requests;) {
        struct kvf_gpu_event event;
        uint32_t n;

        if (kvf_gpu_poll(calls.gpu, &event, 1, 5000, &n) != KVF_OK || event.status != KVF_OK) {
            return false;
        }
        free_events += event.kind == KVF_GPU_EVENT_PAGES_FREE;
        over += event.kind == KVF_GPU_EVENT_REQUEST;
        if (event.kind == KVF_GPU_EVENT_PAGES_FREE && free_events == n_requests) {
            all_pages_write(garbage, other);
        }
    }
    return true;
}

/* Get into pages that a step still reads. True: what it read and what came are right. */
static bool round_get(const struct round *round, uint32_t number)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;
    size_t bytes = calls.pages.bytes;
    uint64_t request;

    /* the step that reads the pages which are to be loaded into */
    calls_check(driver->cuStreamSynchronize(other));
    delay_queue(reader, 1 + number / 3 % 3);
    calls_check(driver->cuMemcpyDtoDAsync(snapshot, calls.pages.address, bytes, reader));
    calls_check(driver->cuEventRecord(read_done, reader));
    if (kvf_gpu_get(calls.gpu, calls.pages.region, round->gets, CHUNKS, NULL, read_done,
                    number % 2 != 0 ? other : NULL, 0, &request) != KVF_OK ||
        !wait_for(request, KVF_GPU_EVENT_REQUEST) || !calls_pages_are_equal(&calls.pages)) {
        return false;
    }
    calls_read(snapshot_host, snapshot, bytes);
    return memcmp(snapshot_host, garbage, bytes) == 0 && !was_released_early;
}

/* True: every byte was right. */
static bool round_run(uint32_t number)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;
    void *streams[2] = {NULL, reader};
    struct round round;
    size_t bytes = calls.pages.bytes;
    uint64_t mask = n_gets > 1 ? 0xfffu >> number % 6 : 0x1ffu;
    bool is_right = true;

    round_init(&round, number);
    for (size_t i = 0; i < bytes / 2; i++) {
        uint64_t bits = kvf_random_seeded_next(&calls.random);

        ((uint16_t *)content)[i] = (uint16_t)((bits & 0x8000u) | (0x3e00u + (bits >> 16 & mask)));
    }
    /* the step that writes the pages */
    delay_queue(writer, 1 + number % 3);
    all_pages_write(content, writer);
    calls_check(driver->cuEventRecord(written, writer));
    if (!round_put(&round, streams[number % 2])) {
        return false;
    }
    expect(&round);
    for (uint32_t i = 0; i < n_gets && is_right; i++) {
        if (i > 0) {
            all_pages_write(garbage, other);
        }
        is_right = round_get(&round, number + i);
    }
    return is_right;
}

static void rounds_are_right(uint32_t pinning, uint32_t n)
{
    n = n < ROUNDS_MIN ? ROUNDS_MIN : n;
    first_key = 1000000 * (uint64_t)pinning;
    engine_open(pinning);
    for (uint32_t i = 0; i < n; i++) {
        if (!round_run(i)) {
            fail_msg("round %u of %u, pinning %u", i, n, pinning);
        }
    }
    engine_close();
}

static void test_a_thousand_rounds(void **state)
{
    (void)state;
    rounds_are_right(KVF_GPU_PIN_WINDOW, kvf_test_scaled(ROUNDS) / 2);
    rounds_are_right(KVF_GPU_PIN_LAZY, kvf_test_scaled(ROUNDS) / 2);
}

static bool is_of_hbm(const char *mutant)
{
    return strcmp(mutant, "gpu_peek_wait") == 0;
}

/* In a child: exit code 1 says that a round went wrong, a signal as well. */
static void mutant_run(const char *mutant)
{
    /* on a GPU no round has to go wrong, and a sanitizer makes them slow */
    uint32_t n = calls_fake.fake_cuda_seed != NULL ? MUTANT_ROUNDS : kvf_test_scaled(MUTANT_ROUNDS);

    kvf_mutant_chosen = mutant;
    n_gets = is_of_hbm(mutant) ? HBM_GETS : 1;
    engine_open(KVF_GPU_PIN_LAZY);
    for (uint32_t i = 0; i < n; i++) {
        if (!round_run(i)) {
            printf("%s: caught in round %u\n", mutant, i);
            (void)fflush(stdout);
            _exit(1);
        }
    }
    _exit(0);
}

static void daemon_start(bool has_hbm)
{
#ifdef KVF_TEST_AGENT
    const char *const sets[] = {"gpu.devices=all",
                                has_hbm ? "gpu.hbm_bytes=32MiB" : "gpu.hbm_bytes=0",
                                "gpu.promote_hits=1",
#ifdef KVF_TEST_WORKER
                                "gpu.worker=" KVF_TEST_WORKER,
#endif
                                NULL};

    calls_daemon_start(&calls, sets);
#else
    (void)has_hbm;
    calls_daemon_start(&calls, NULL);
#endif
}

#ifdef KVF_TEST_AGENT
/* The same with blocks that the worker decodes from where they lie in the GPU's memory. */
static void test_rounds_of_the_gpus_memory(void **state)
{
    struct kvf_test_daemon kept = calls.daemon;

    (void)state;
    daemon_start(true);
    n_gets = HBM_GETS;
    rounds_are_right(KVF_GPU_PIN_LAZY, kvf_test_scaled(ROUNDS) / 8);
    n_gets = 1;
    assert_true(kvf_test_daemon_number(&calls.daemon, "metrics.get_hits_hbm") > 0);
    calls_daemon_stop(&calls);
    calls.daemon = kept;
}
#endif

/* A mutant of the worker has a daemon of its own, whose environment names it. */
static int run_mutant(const char *program, uint32_t i)
{
    struct kvf_test_daemon kept = calls.daemon;
    int wait_status;

    if (i < OWN_MUTANTS) {
        return calls_run_alone(&calls, program, mutants[i], 1000000 * (i + 10));
    }
    assert_int_equal(setenv("KVF_TEST_MUTANT", mutants[i], 1), 0);
    daemon_start(is_of_hbm(mutants[i]));
    wait_status = calls_run_alone(&calls, program, mutants[i], 1000000 * (i + 10));
    calls_daemon_stop(&calls);
    assert_int_equal(unsetenv("KVF_TEST_MUTANT"), 0);
    calls.daemon = kept;
    return wait_status;
}

static void test_each_removed_wait_is_caught(void **state)
{
    char program[KVF_TEST_PATH_BYTES];
    size_t n_mutants = sizeof(mutants) / sizeof(mutants[0]);

    (void)state;
    calls_own_program(program);
#if defined(KVF_TEST_AGENT) && !defined(KVF_TEST_WORKER)
    n_mutants = OWN_MUTANTS; /* the worker is the one that is installed, which has none */
#endif
    for (size_t i = 0; i < n_mutants; i++) {
        calls_assert_caught(mutants[i], run_mutant(program, (uint32_t)i));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_thousand_rounds),
#ifdef KVF_TEST_AGENT
        cmocka_unit_test(test_rounds_of_the_gpus_memory),
#endif
        cmocka_unit_test(test_each_removed_wait_is_caught),
    };
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    if (argc == 4) {
        (void)snprintf(calls.daemon.socket_path, sizeof(calls.daemon.socket_path), "%s", argv[2]);
        first_key = strtoull(argv[3], NULL, 10);
        mutant_run(argv[1]);
    }
    daemon_start(false);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    return failed;
}
