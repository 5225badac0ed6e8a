/* SPDX-License-Identifier: Apache-2.0
 *
 * test_agent_path.c: puts and gets by a worker of the daemon, in another process, over pages that
 * it opens by a handle or by descriptors: the bytes are those of the C codecs. And the ends: of the
 * worker, of the daemon, of the engine.
 */
#include "client/gpu_remote.h"
#include "tests/gpu/calls.h"
#include "transport/seqpacket.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static struct calls calls;
static uint64_t seed;

static void engine_open(const char *profile)
{
    calls.options = (struct kvf_gpu_options){.path = KVF_GPU_PATH_AGENT};
    calls_open(&calls, profile, seed);
}

static void test_bytes_are_the_same(void **state)
{
    static const char *const profiles[] = {"exact", "balanced"};
    struct calls_chain chain;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        engine_open(profiles[i]);
        calls_chain_init(&chain, 8, 19);
        calls_chain_put_and_check(&calls, &chain);
        calls_chain_get_and_check(&calls, &chain);
        calls_close(&calls);
    }
}

static void test_mapped_pieces(void **state)
{
    calls_maps = true;
    test_bytes_are_the_same(state);
    calls_maps = false;
}

/* ----------------------------------------------------------------------------------------------
 * The end of one of three processes
 */

/* Put until that works again; what comes between may fail, but has to come. */
static void put_until_it_works(struct calls_chain *chain)
{
    struct calls_outcome outcome = {.status = KVF_ERR_DISCONNECTED};

    while (outcome.status != KVF_OK) {
        const struct timespec pause = {.tv_nsec = 2000000};
        uint64_t request = 0;
        int status = kvf_gpu_put(calls.gpu, calls.pages.region, chain->puts, chain->n, NULL, NULL,
                                 NULL, 7, NULL, &request);

        outcome = (struct calls_outcome){.status = status};
        if (status == KVF_OK) {
            calls_wait(&calls, request, &outcome);
            assert_true(outcome.pages_free);
        } else {
            assert_true(status == KVF_ERR_DISCONNECTED || status == KVF_ERR_NO_DAEMON ||
                        status == KVF_ERR_BUSY);
            (void)nanosleep(&pause, NULL);
        }
    }
}

/* A process is killed while puts and gets are under way: all of them end, the pages are the
 * engine's, and later everything works again, with the pages as they were registered. */
static void kill_amid(void (*end)(void))
{
    struct calls_chain chain;
    struct calls_chain old;
    uint64_t requests[8];
    struct calls_outcome outcomes[8] = {0};

    engine_open("balanced");
    calls_chain_init(&old, 4, 0);
    calls_chain_put_and_check(&calls, &old);
    for (uint32_t i = 0; i < 8; i++) {
        calls_chain_init(&chain, 4, 0);
        if (i % 2 == 0) {
            assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL,
                                         NULL, NULL, 7, NULL, &requests[i]),
                             KVF_OK);
        } else {
            assert_int_equal(kvf_gpu_get(calls.gpu, calls.pages.region, old.gets, old.n, NULL, NULL,
                                         NULL, 8, &requests[i]),
                             KVF_OK);
        }
    }
    end();
    for (uint32_t over = 0; over < 8;) {
        (void)calls_take(&calls, requests, outcomes, 8, 100);
        over = 0;
        for (uint32_t i = 0; i < 8; i++) {
            over += outcomes[i].is_over;
        }
    }
    calls_chain_init(&chain, 4, 0);
    put_until_it_works(&chain);
    calls_fill(&calls);
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

static void worker_kill(void)
{
    pid_t pid = calls_worker_pid(&calls, NULL);

    assert_true(pid > 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
}

static void test_worker_is_killed(void **state)
{
    (void)state;
    kill_amid(worker_kill);
}

static void daemon_kill(void)
{
    kvf_test_daemon_kill(&calls.daemon);
    kvf_test_daemon_start(&calls.daemon);
}

static void test_daemon_is_killed(void **state)
{
    (void)state;
    kill_amid(daemon_kill);
}

/* Share so much memory with the worker: one page in it, and it opens the whole allocation. */
static void ballast_share(size_t bytes)
{
    struct kvf_gpu_region_options options = {
        .struct_bytes = sizeof(options), .n_pages = 1, .tokens_a_page = 1};
    struct kvf_gpu_region *region = NULL;
    void *layers[CALLS_LAYERS];
    uint64_t address = calls_alloc(bytes);

    for (uint32_t i = 0; i < CALLS_LAYERS; i++) {
        layers[i] = (void *)(uintptr_t)address;
    }
    options.k = options.v = (struct kvf_tensor_view){.layers = layers};
    assert_int_equal(kvf_gpu_register(calls.gpu, &options, &region), KVF_OK);
}

/* In a process of its own: puts and gets until it is killed. */
static void victim(const char *socket_path, const char *first_key, const char *ballast_bytes)
{
    struct calls_chain chain;
    uint64_t request;

    (void)snprintf(calls.daemon.socket_path, sizeof(calls.daemon.socket_path), "%s", socket_path);
    calls_key_first(strtoull(first_key, NULL, 10));
    engine_open("balanced");
    ballast_share(strtoull(ballast_bytes, NULL, 10));
    for (;;) {
        struct kvf_gpu_event events[64];
        uint32_t n;

        calls_chain_init(&chain, 8, 0);
        (void)kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL, NULL, NULL, 7,
                          NULL, &request);
        (void)kvf_gpu_get(calls.gpu, calls.pages.region, chain.gets, chain.n, NULL, NULL, NULL, 8,
                          &request);
        (void)kvf_gpu_poll(calls.gpu, events, 64, 0, &n);
        (void)putchar('.');
        (void)fflush(stdout);
    }
}

/* Free device memory: on a GPU anybody's call says it, the fake driver has one of each process, and
 * the worker's is the one that matters. */
static uint64_t free_bytes_now(void)
{
    size_t free_bytes = 0;
    size_t total_bytes = 0;

    if (calls_fake.fake_cuda_seed != NULL) {
        return kvf_test_daemon_number(&calls.daemon, "metrics.gpu_free_bytes");
    }
    calls_check(calls_device->driver.cuMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

/* Is all back that victims had? */
static void free_bytes_wait(uint64_t wanted)
{
    uint64_t began_ns = kvf_now_ns();
    uint64_t found;

    while ((found = free_bytes_now()) != wanted) {
        const struct timespec pause = {.tv_nsec = 2000000};

        if (kvf_now_ns() - began_ns > 60 * KVF_NS_PER_S) {
            fail_msg("%llu bytes free, there were %llu", (unsigned long long)found,
                     (unsigned long long)wanted);
        }
        (void)nanosleep(&pause, NULL);
    }
}

/* What is free after the first victim, when nothing of it is left. */
static uint64_t free_bytes_settle(void)
{
    const struct timespec pause = {.tv_sec = calls_fake.fake_cuda_seed != NULL ? 0 : 3};

    (void)nanosleep(&pause, NULL);
    return free_bytes_now();
}

/* The largest number behind a text in a log, and how often the text is there. */
static unsigned long long log_most(const char *log, const char *text, uint32_t *n_out)
{
    unsigned long long most = 0;

    *n_out = 0;
    for (const char *at = strstr(log, text); at != NULL; at = strstr(at + 1, text)) {
        unsigned long long number = strtoull(at + strlen(text), NULL, 10);

        most = number > most ? number : most;
        ++*n_out;
    }
    return most;
}

/* How long the worker took to drain and unmap, by its log. */
static void gone_print(void)
{
    char *log = kvf_test_file_read(calls.daemon.log_path, NULL);
    unsigned long long drained_us;
    unsigned long long unmapped_us;
    uint32_t n_drained;
    uint32_t n_unmapped;

    assert_non_null(log);
    drained_us = log_most(log, " has gone: drained in ", &n_drained);
    unmapped_us = log_most(log, " MiB unmapped in ", &n_unmapped);
    free(log);
    assert_true(n_drained > 0);
    assert_int_equal(n_drained, n_unmapped);
    print_message("%u times: drained in at most %llu us, unmapped in at most %llu us\n", n_drained,
                  drained_us, unmapped_us);
}

enum {
    VICTIMS = 4, /* at a time */
};

/* Has a victim puts and gets under way? */
static bool is_at_work(const char *output)
{
    char *said = kvf_test_file_read(output, NULL);
    bool is = said != NULL && strchr(said, '.') != NULL;

    free(said);
    return is;
}

/* Start victims, and kill them when puts and gets of all of them are under way. Returns when the
 * last process had gone. */
static uint64_t victims_run(const char *program, uint32_t number, uint64_t ballast_bytes)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    struct kvf_test_process processes[VICTIMS];
    char outputs[VICTIMS][KVF_TEST_PATH_BYTES];
    char ballast[24];
    uint64_t gone_ns;

    (void)snprintf(ballast, sizeof(ballast), "%llu", (unsigned long long)ballast_bytes);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        char key[24];
        char name[24];
        char *argv[] = {(char *)program, calls.daemon.socket_path, key, ballast, NULL};

        (void)snprintf(key, sizeof(key), "%u", 1000000 * (number + i + 1));
        (void)snprintf(name, sizeof(name), "victim-%u", number + i);
        kvf_test_dir_path(&calls.daemon.dir, name, outputs[i]);
        kvf_test_process_start(&processes[i], argv, NULL, outputs[i]);
    }
    for (uint32_t i = 0; i < VICTIMS; i++) {
        while (!is_at_work(outputs[i])) {
            (void)nanosleep(&pause, NULL);
        }
    }
    for (uint32_t i = 0; i < VICTIMS; i++) {
        kvf_test_process_signal(&processes[i], SIGKILL);
    }
    for (uint32_t i = 0; i < VICTIMS; i++) {
        kvf_test_process_stop(&processes[i]);
    }
    gone_ns = kvf_now_ns();
    assert_true(kvf_test_daemon_wait_number(&calls.daemon, "metrics.gpu_engines", 0, 60000));
    return gone_ns;
}

/* Engines die with copies in flight: each time the worker unmaps their pages, and others are
 * served. On a GPU they have more than half of the free memory together, so that the next ones get
 * it only if the worker let go of those before. Device memory stays as it was. */
static void test_engines_are_killed(void **state)
{
    bool is_fake = calls_fake.fake_cuda_seed != NULL;
    uint32_t n = kvf_test_scaled(is_fake ? 16 : 100);
    uint64_t ballast_bytes = is_fake ? 1 << 20 : free_bytes_now() / 8 * 5 / VICTIMS;
    char program[KVF_TEST_PATH_BYTES];
    uint64_t free_bytes = 0;
    uint64_t most_ns = 0;
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);

    (void)state;
    assert_true(length > 0);
    program[length] = 0;
    for (uint32_t i = 0; i < n; i += VICTIMS) {
        uint64_t gone_ns = victims_run(program, i, ballast_bytes);

        if (i == 0) {
            free_bytes = free_bytes_settle();
        } else {
            free_bytes_wait(free_bytes);
            gone_ns = kvf_now_ns() - gone_ns;
            most_ns = gone_ns > most_ns ? gone_ns : most_ns;
        }
    }
    gone_print();
    print_message(
        "%u engines killed, each with %llu MiB shared; then %llu bytes free each time, at "
        "most %llu ms after the last process\n",
        (n + VICTIMS - 1) / VICTIMS * VICTIMS, (unsigned long long)(ballast_bytes >> 20),
        (unsigned long long)free_bytes, (unsigned long long)(most_ns / KVF_NS_PER_MS));
}

static void test_sleep_gives_pages_back(void **state)
{
    struct calls_chain chain;
    uint64_t asleep;

    (void)state;
    engine_open("balanced");
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    assert_int_equal(kvf_gpu_sleep(calls.gpu), KVF_OK);
    asleep = calls.pages.address;
    /* other memory at the same place, as an engine's sleep mode makes it */
    calls_pages_replace(&calls);
    assert_int_equal(calls.pages.address, asleep);
    assert_int_equal(kvf_gpu_wake(calls.gpu), KVF_OK);
    calls_fill(&calls);
    calls_chain_init(&chain, 4, 0);
    calls_chain_put_and_check(&calls, &chain);
    calls_chain_get_and_check(&calls, &chain);
    calls_close(&calls);
}

static void test_sleep_of_mapped_pages(void **state)
{
    calls_maps = true;
    test_sleep_gives_pages_back(state);
    calls_maps = false;
}

/* What cannot be shared is refused with what to do about it. */
static void test_refusals_name_the_cure(void **state)
{
    struct kvf_gpu_options options = {.struct_bytes = sizeof(options), .path = KVF_GPU_PATH_AGENT};
    struct kvf_gpu_region_options region = {
        .struct_bytes = sizeof(region), .n_pages = 1, .tokens_a_page = 1};
    struct kvf_test_daemon kept = calls.daemon;
    struct kvf_gpu_region *unused = NULL;
    void *layers[CALLS_LAYERS];

    (void)state;
    engine_open("exact");
    for (uint32_t i = 0; i < CALLS_LAYERS; i++) {
        layers[i] = calls.pages.host; /* no memory of the device */
    }
    region.k.layers = region.v.layers = layers;
    if (calls_fake.fake_cuda_seed != NULL) {
        assert_int_equal(kvf_gpu_register(calls.gpu, &region, &unused), KVF_ERR_INVALID);
        assert_non_null(strstr(calls.log_text, "register what"));
    }
    calls_close(&calls);

    calls_daemon_start(&calls, NULL); /* without workers */
    calls_client_open(&calls, "exact", seed);
    assert_int_equal(kvf_gpu_open(calls.client, &options, &calls.gpu), KVF_ERR_UNSUPPORTED);
    assert_non_null(strstr(calls.log_text, "set gpu.devices"));
    calls.client = kvf_close(calls.client);
    calls_daemon_stop(&calls);
    calls.daemon = kept;
}

/* ----------------------------------------------------------------------------------------------
 * An engine that lies
 */

/* Pages that reach beyond what was opened, by all ways: each is refused, and the device never sees
 * an address of them. */
static void refuse_regions(struct kvf_gpu_remote *remote)
{
    const struct kvf_gpu_region *honest = calls.pages.region;
    const uint64_t wrong[][3] = {
        /* n_pages, page stride, offset */
        {CALLS_PAGES, calls.pages.page_bytes, remote->memories[0].bytes},
        {CALLS_PAGES, calls.pages.page_bytes, UINT64_MAX - 1},
        {1u << 24, calls.pages.page_bytes, 0},
        {UINT32_MAX, 2, 0},
        {CALLS_PAGES, UINT64_MAX / 2 + 1, 0},
        {CALLS_PAGES, calls.pages.page_bytes, 1}, /* not aligned */
        {CALLS_PAGES, 0, 0},
    };

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct kvf_gpud_register *message = &remote->message.region;
        size_t bytes = sizeof(*message) + 2 * CALLS_LAYERS * sizeof(message->places[0]);

        *message = (struct kvf_gpud_register){
            .n_pages = (uint32_t)wrong[i][0],
            .tokens_a_page = CALLS_PAGE_TOKENS,
            .n_places = 2 * CALLS_LAYERS,
            .page_stride_bytes = {wrong[i][1], wrong[i][1]},
            .token_stride_bytes = {honest->strides[0].token_stride_bytes,
                                   honest->strides[1].token_stride_bytes},
            .head_stride_bytes = {honest->strides[0].head_stride_bytes,
                                  honest->strides[1].head_stride_bytes},
        };
        for (uint32_t p = 0; p < 2 * CALLS_LAYERS; p++) {
            message->places[p] = (struct kvf_gpud_place){.memory = remote->memories[0].number,
                                                         .offset = wrong[i][2]};
        }
        kvf_gpud_head_init(&message->head, KVF_GPUD_REGISTER, bytes);
        message->head.number = 1000 + (uint32_t)i;
        assert_int_equal(kvf_gpu_remote_call(calls.gpu, -1), KVF_ERR_INVALID);
    }
}

/* Messages that end the connection, and nothing else. */
static void test_lies_end_in_a_status_or_a_hang_up(void **state)
{
    static const uint16_t types[] = {KVF_GPUD_ITEMS, KVF_GPUD_HELLO, KVF_GPUD_QUIT, 77};
    struct calls_chain chain;

    (void)state;
    engine_open("balanced");
    refuse_regions(calls.gpu->agent);
    for (uint32_t i = 0; i < 4; i++) {
        union kvf_gpud_message *message = calloc(1, sizeof(*message));
        size_t bytes = i == 0 ? sizeof(message->items) : sizeof(message->plain);

        assert_non_null(message);
        kvf_gpud_head_init(&message->head, (enum kvf_gpud_type)types[i], bytes);
        assert_int_equal(kvf_seqpacket_send(calls.gpu->agent->fd, message->bytes, bytes, NULL, 0),
                         KVF_OK);
        free(message);
        while (kvf_gpu_remote_is_up(calls.gpu)) {
            struct kvf_gpu_event event;
            uint32_t n;

            assert_int_equal(kvf_gpu_poll(calls.gpu, &event, 1, 10, &n), KVF_EMPTY);
        }
        calls_chain_init(&chain, 4, 0);
        put_until_it_works(&chain); /* the worker lives, and serves it again */
    }
    calls_close(&calls);
}

/* ----------------------------------------------------------------------------------------------
 * A worker that stands still
 */

/* End the link by what no engine says; the worker lives on. */
static void link_cut(void)
{
    union kvf_gpud_message *message = calloc(1, sizeof(*message));

    assert_non_null(message);
    kvf_gpud_head_init(&message->head, KVF_GPUD_QUIT, sizeof(message->plain));
    assert_int_equal(
        kvf_seqpacket_send(calls.gpu->agent->fd, message->bytes, sizeof(message->plain), NULL, 0),
        KVF_OK);
    free(message);
}

static void poll_once(void)
{
    struct kvf_gpu_event event;
    uint32_t n = 0;

    assert_int_equal(kvf_gpu_poll(calls.gpu, &event, 1, 0, &n), KVF_EMPTY);
}

/* The worker stands still when it is to take the pages of an engine that comes back. Do polls
 * return before the engine gives it up? */
static bool polls_return_meanwhile(void)
{
    const struct kvf_gpu_remote *remote = calls.gpu->agent;
    struct pollfd one = {.events = POLLIN};
    bool is_sharing;
    pid_t pid;

    link_cut();
    while (remote->state == LINK_UP || remote->state == LINK_ENDING ||
           remote->state < LINK_GREETING) {
        poll_once();
    }
    one.fd = remote->fd;
    (void)poll(&one, 1, 10000); /* WELCOME */
    pid = calls_worker_stop(&calls);
    for (uint32_t i = 0; i < 20; i++) {
        poll_once();
    }
    is_sharing = remote->state == LINK_SHARING;
    assert_int_equal(kill(pid, SIGCONT), 0);
    return is_sharing;
}

static void test_poll_waits_for_no_worker(void **state)
{
    struct calls_chain chain;
    bool is_sharing = false;

    (void)state;
    engine_open("balanced");
    /* a worker is given up after some seconds, for which this process may have stood still itself;
     * and one may have answered before it was stopped */
    for (uint32_t i = 0; i < 20 && !is_sharing; i++) {
        is_sharing = polls_return_meanwhile();
        calls_chain_init(&chain, 4, 0);
        put_until_it_works(&chain);
    }
    assert_true(is_sharing);
    calls_close(&calls);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_are_the_same),
        cmocka_unit_test(test_mapped_pieces),
        cmocka_unit_test(test_sleep_of_mapped_pages),
        cmocka_unit_test(test_refusals_name_the_cure),
        cmocka_unit_test(test_lies_end_in_a_status_or_a_hang_up),
        cmocka_unit_test(test_poll_waits_for_no_worker),
        cmocka_unit_test(test_engines_are_killed),
        cmocka_unit_test(test_worker_is_killed),
        cmocka_unit_test(test_daemon_is_killed),
    };
    static const char *const sets[] = {"gpu.devices=all",
#ifdef KVF_TEST_WORKER
                                       "gpu.worker=" KVF_TEST_WORKER,
#endif
                                       NULL};
    int failed;

    if (!calls_begin(&seed)) {
        return 77;
    }
    if (argc == 4) {
        victim(argv[1], argv[2], argv[3]);
    }
    calls_daemon_start(&calls, sets);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    return failed;
}
