/* SPDX-License-Identifier: Apache-2.0
 *
 * test_agent_lies.c: path AGENT among those that do not keep to the rules: engines that lie to a
 * worker, workers that lie to the daemon, a device that fails. Who is well goes on.
 */
#include "client/gpu_remote.h"
#include "tests/gpu/calls.h"
#include "transport/seqpacket.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define PATIENCE_NS (60 * KVF_NS_PER_S)

enum {
    WORKER_FD = 3,
};

static struct calls calls;
static uint64_t seed;
static char fail_path[64];

static void engine_open(void)
{
    calls.options = (struct kvf_gpu_options){.path = KVF_GPU_PATH_AGENT};
    calls_open(&calls, "balanced", seed);
}

static void pause_briefly(void)
{
    const struct timespec pause = {.tv_nsec = 2 * KVF_NS_PER_MS};

    (void)nanosleep(&pause, NULL);
}

/* Put until that works again. */
static void put_until_it_works(void)
{
    struct calls_chain chain;
    int32_t last = KVF_ERR_DISCONNECTED;

    while (last != KVF_OK) {
        struct calls_outcome outcome = {0};
        uint64_t request = 0;

        calls_chain_init(&chain, 4, 0);
        last = kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL, NULL, NULL, 7,
                           NULL, &request);
        if (last == KVF_OK) {
            calls_wait(&calls, request, &outcome);
            last = outcome.status;
        } else {
            pause_briefly();
        }
    }
}

static uint64_t worker_starts(void)
{
    return kvf_test_daemon_number(&calls.daemon, "metrics.gpu_worker_starts");
}

/* ----------------------------------------------------------------------------------------------
 * Engines
 */

/* A piece of device memory that others can open. */
static int piece_make(size_t *bytes_out)
{
    const struct kvf_gpu_driver *driver = &calls_device->driver;
    const struct kvf_cuda_allocation allocation = {
        .type = KVF_CUDA_ALLOCATION_PINNED,
        .handle_types = KVF_CUDA_HANDLE_POSIX_FD,
        .location = {KVF_CUDA_LOCATION_DEVICE, calls_device->device},
    };
    uint64_t handle = 0;
    int fd = -1;

    calls_check(driver->cuMemGetAllocationGranularity(bytes_out, &allocation,
                                                      KVF_CUDA_GRANULARITY_MINIMUM));
    calls_check(driver->cuMemCreate(&handle, *bytes_out, &allocation, 0));
    calls_check(driver->cuMemExportToShareableHandle(&fd, handle, KVF_CUDA_HANDLE_POSIX_FD, 0));
    calls_check(driver->cuMemRelease(handle));
    return fd;
}

/* One of two pieces of a memory. */
static int memory_call(uint32_t number, uint32_t piece_index, size_t bytes, size_t piece_bytes,
                       int fd)
{
    struct kvf_gpud_memory *message = &calls.gpu->agent->message.memory;

    *message = (struct kvf_gpud_memory){
        .kind = KVF_GPUD_MEMORY_FD,
        .n_pieces = 2,
        .piece_index = piece_index,
        .bytes = bytes,
        .piece_bytes = piece_bytes,
    };
    kvf_gpud_head_init(&message->head, KVF_GPUD_MEMORY, sizeof(*message));
    message->head.number = number;
    return kvf_gpu_remote_call(calls.gpu, fd);
}

/* Memory that is whole, with a region in it, gets another piece: the worker must not give it up. */
static void test_memory_beyond_its_end(void **state)
{
    uint64_t starts = worker_starts();
    size_t bytes = 0;
    int fd = piece_make(&bytes);

    (void)state;
    engine_open();
    assert_int_equal(memory_call(900, 0, bytes, bytes, fd), KVF_OK);
    assert_int_equal(memory_call(900, 1, bytes, bytes, fd), KVF_ERR_DISCONNECTED);
    (void)close(fd);
    put_until_it_works();
    assert_int_equal(worker_starts(), starts);
    calls_close(&calls);
}

/* No more addresses than the GPU has memory: they are everybody's. */
static void test_memory_beyond_the_gpu(void **state)
{
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    size_t bytes = 0;
    size_t most_bytes;
    int fd = piece_make(&bytes);

    (void)state;
    engine_open();
    calls_check(calls_device->driver.cuMemGetInfo(&free_bytes, &total_bytes));
    /* twice this is too much, whatever else is mapped */
    most_bytes = total_bytes / 4 * 3 / bytes * bytes;
    assert_int_equal(memory_call(900, 0, (size_t)1 << 46, bytes, fd), KVF_ERR_TOO_LARGE);
    assert_int_equal(memory_call(901, 0, most_bytes, bytes, fd), KVF_OK);
    assert_int_equal(memory_call(902, 0, most_bytes, bytes, fd), KVF_ERR_TOO_LARGE);
    assert_int_equal(kvf_gpu_remote_call_plain(calls.gpu, KVF_GPUD_FORGET, 901), KVF_OK);
    assert_int_equal(memory_call(902, 0, most_bytes, bytes, fd), KVF_OK);
    (void)close(fd);
    put_until_it_works();
    calls_close(&calls);
}

/* How often the worker's thread has gone to sleep, ever. */
static uint64_t worker_sleeps(void)
{
    pid_t pid = calls_worker_pid(&calls, NULL);
    const char *word = "\nvoluntary_ctxt_switches:";
    uint64_t sleeps;
    const char *line;
    char path[64];
    char *text;

    (void)snprintf(path, sizeof(path), "/proc/%d/task/%d/status", (int)pid, (int)pid);
    text = kvf_test_file_read(path, NULL);
    assert_non_null(text);
    line = strstr(text, word);
    assert_non_null(line);
    sleeps = strtoull(line + strlen(word), NULL, 10);
    free(text);
    return sleeps;
}

/* Does it sleep no more often than so many times a second? Being slow makes that no more. */
static void sleeps_are_few(uint64_t most_a_second)
{
    const struct timespec while_ = {.tv_nsec = 500 * KVF_NS_PER_MS};
    uint64_t began_ns = kvf_now_ns();
    uint64_t before = worker_sleeps();

    (void)nanosleep(&while_, NULL);
    assert_in_range(worker_sleeps() - before, 0,
                    100 + most_a_second * (kvf_now_ns() - began_ns) / KVF_NS_PER_S);
}

/* Requests that do not come to be, and those whose flag does not come up, are no work. */
static void test_waiting_is_no_work(void **state)
{
    struct kvf_gpud_request request = {.request = 1000, .n_items = 1, .n_pages = 1};
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    uint64_t number = 0;
    void *stream;
    void *event;

    (void)state;
    engine_open();
    kvf_gpud_head_init(&request.head, KVF_GPUD_GET, sizeof(request));
    request.head.number = calls.pages.region->number;
    assert_int_equal(kvf_seqpacket_send(calls.gpu->agent->fd, &request, sizeof(request), NULL, 0),
                     KVF_OK);
    sleeps_are_few(400);
    calls_close(&calls);
    if (calls_fake.fake_cuda_hold == NULL) {
        return; /* a device that stands still can only be had from the fake driver */
    }
    engine_open();
    stream = calls_stream();
    event = calls_event();
    calls_fake.fake_cuda_hold(true);
    calls_check(calls_device->driver.cuEventRecord(event, stream));
    calls_chain_init(&chain, 4, 0);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL, event,
                                 NULL, 7, NULL, &number),
                     KVF_OK);
    sleeps_are_few(2500);
    calls_fake.fake_cuda_hold(false);
    calls_wait(&calls, number, &outcome);
    assert_int_equal(outcome.status, KVF_OK);
    calls_check(calls_device->driver.cuStreamDestroy(stream));
    calls_check(calls_device->driver.cuEventDestroy(event));
    calls_close(&calls);
}

/* Send when there is room. False: the worker has hung up. */
static bool send_all(int fd, const void *data, size_t bytes)
{
    int status;

    while ((status = kvf_seqpacket_send(fd, data, bytes, NULL, 0)) == KVF_ERR_BUSY) {
        struct pollfd one = {.fd = fd, .events = POLLOUT};

        (void)poll(&one, 1, 100);
    }
    return status == KVF_OK;
}

/* A get of as many blocks as there can be, none of which is right. */
static bool wrong_get_send(int fd, uint32_t region, uint64_t request)
{
    static union kvf_gpud_message message;
    uint32_t sent = 0;
    bool is_up;

    memset(&message, 0, sizeof(message));
    kvf_gpud_head_init(&message.head, KVF_GPUD_GET, sizeof(message.request));
    message.head.number = region;
    message.request.request = request;
    message.request.flag = 1;
    message.request.n_items = message.request.n_pages = KVF_REQUEST_KEYS_MAX;
    is_up = send_all(fd, &message, sizeof(message.request));
    while (is_up && sent < KVF_REQUEST_KEYS_MAX) {
        memset(&message, 0, sizeof(message));
        kvf_gpud_head_init(&message.head, KVF_GPUD_ITEMS, sizeof(message.items));
        message.items.request = request;
        while (sent < KVF_REQUEST_KEYS_MAX &&
               message.head.bytes + kvf_gpud_item_bytes(1) <= KVF_GPUD_MESSAGE_BYTES_MAX) {
            struct kvf_gpud_item *item = (void *)(message.bytes + message.head.bytes);

            item->key_bytes = KVF_KEY_BYTES_MIN;
            item->n_pages = 1; /* a chunk has more */
            message.head.bytes += (uint32_t)kvf_gpud_item_bytes(1);
            message.items.n_items++;
            sent++;
        }
        is_up = send_all(fd, &message, message.head.bytes);
    }
    return is_up;
}

/* Read until the worker hangs up. Returns the type of the last message. */
static uint16_t last_type(int fd)
{
    static union kvf_gpud_message message;
    struct kvf_seqpacket_message received;
    uint16_t last = 0;
    int status;

    do {
        struct pollfd one = {.fd = fd, .events = POLLIN};

        (void)poll(&one, 1, 100);
        status = kvf_seqpacket_recv(fd, message.bytes, sizeof(message.bytes), &received);
        if (status == KVF_OK) {
            last = message.head.type;
            kvf_seqpacket_message_close(&received);
        }
    } while (status == KVF_OK || status == KVF_EMPTY);
    return last;
}

/* It asks, and never reads the answers: what the worker owes it has an end, and when it reads at
 * last it learns that its pages are its own again. */
static void test_engine_does_not_listen(void **state)
{
    uint64_t n = 0;
    int fd;

    (void)state;
    engine_open();
    fd = calls.gpu->agent->fd;
    while (wrong_get_send(fd, calls.pages.region->number, 1000 + n)) {
        n++;
        assert_true(n < 4 * KVF_GPUD_REQUESTS_MAX);
    }
    assert_true(kvf_test_daemon_wait_number(&calls.daemon, "metrics.gpu_engines", 0, 60000));
    assert_int_equal(last_type(fd), KVF_GPUD_GONE);
    put_until_it_works();
    calls_close(&calls);
}

/* The engine finds that the worker lies: what else is in flight comes to an end, too. */
static void test_worker_lies_to_the_engine(void **state)
{
    uint64_t deadline_ns = kvf_now_ns() + PATIENCE_NS;
    struct calls_outcome outcomes[2] = {0};
    struct calls_chain chain;
    uint64_t requests[2];
    void *stream;
    void *event;

    (void)state;
    if (calls_fake.fake_cuda_hold == NULL) {
        return; /* a device that stands still can only be had from the fake driver */
    }
    engine_open();
    stream = calls_stream();
    event = calls_event();
    calls_chain_init(&chain, 4, 0);
    calls_fake.fake_cuda_hold(true);
    calls_check(calls_device->driver.cuEventRecord(event, stream));
    assert_int_equal(kvf_gpu_get(calls.gpu, calls.pages.region, chain.gets, chain.n, NULL, event,
                                 NULL, 8, &requests[0]),
                     KVF_OK);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL, NULL,
                                 NULL, 7, NULL, &requests[1]),
                     KVF_OK);
    calls.gpu->requests->n_encoding = 0; /* so that "pages are free" is nothing that can be */
    while (!outcomes[0].is_over || !outcomes[1].is_over) {
        assert_true(kvf_now_ns() < deadline_ns);
        (void)calls_take(&calls, requests, outcomes, 2, 10);
    }
    assert_int_equal(outcomes[0].status, KVF_ERR_DISCONNECTED);
    calls_fake.fake_cuda_hold(false);
    calls_check(calls_device->driver.cuStreamDestroy(stream));
    calls_check(calls_device->driver.cuEventDestroy(event));
    put_until_it_works();
    calls_close(&calls);
}

/* With two tenants a handle, which opens any memory whose number one guesses, is none to take;
 * descriptors are. */
static void test_handles_are_of_one_tenant(void **state)
{
    static const char *const sets[] = {"gpu.devices=all",
#ifdef KVF_TEST_WORKER
                                       "gpu.worker=" KVF_TEST_WORKER,
#endif
                                       "allow_uncalibrated=true",
                                       "sockets.0.tenant=first",
                                       "sockets.1.tenant=second",
                                       NULL};
    struct kvf_test_daemon kept = calls.daemon;
    char paths[2][2 * KVF_TEST_PATH_BYTES];
    struct kvf_gpu_region_options region = {
        .struct_bytes = sizeof(region), .n_pages = 1, .tokens_a_page = 1};
    struct kvf_gpu_region *unused = NULL;
    void *layers[CALLS_LAYERS];
    uint64_t address = calls_alloc(1 << 16);

    (void)state;
    kvf_test_daemon_create(&calls.daemon, sets);
    (void)snprintf(paths[0], sizeof(paths[0]), "sockets.0.path=%s", calls.daemon.socket_path);
    (void)snprintf(paths[1], sizeof(paths[1]), "sockets.1.path=%s2", calls.daemon.socket_path);
    kvf_test_daemon_set(&calls.daemon, paths[0]);
    kvf_test_daemon_set(&calls.daemon, paths[1]);
    kvf_test_daemon_start(&calls.daemon);
    calls_maps = true;
    engine_open();
    put_until_it_works();
    calls_maps = false;
    for (uint32_t i = 0; i < CALLS_LAYERS; i++) {
        layers[i] = (void *)(uintptr_t)address;
    }
    region.k.layers = region.v.layers = layers;
    assert_int_equal(kvf_gpu_register(calls.gpu, &region, &unused), KVF_ERR_REFUSED);
    assert_non_null(strstr(calls.log_text, "several tenants"));
    calls_close(&calls);
    calls_free(address);
    calls_daemon_stop(&calls);
    calls.daemon = kept;
}

/* ----------------------------------------------------------------------------------------------
 * An engine that comes while the daemon is slow
 */

/* A channel to the worker, by a client of its own. */
static int channel_take(struct kvf_client *client)
{
    int fd = -1;

    while (fd < 0) {
        uint64_t ns = 0;

        client->channel.is_answered = false;
        assert_int_equal(kvf_session_say_gpu(client, KVF_GPU_PATH_AGENT, calls_device->uuid),
                         KVF_OK);
        while (!client->channel.is_answered) {
            assert_int_equal(kvf_ping(client, 60000, &ns), KVF_OK);
        }
        if (client->channel.status == KVF_OK) {
            fd = client->channel.fd;
            client->channel.fd = -1;
        } else {
            assert_int_equal(client->channel.status, KVF_ERR_BUSY);
            pause_briefly();
        }
    }
    return fd;
}

/* A HELLO as it has to be, by a client of its own. */
static struct kvf_gpud_hello hello_of(const struct kvf_client *client)
{
    struct kvf_gpud_hello hello = {.hello = client->hello, .pinning = KVF_GPU_PIN_LAZY};

    kvf_gpud_head_init(&hello.head, KVF_GPUD_HELLO, sizeof(hello));
    (void)snprintf(hello.uuid, sizeof(hello.uuid), "%s", calls_device->uuid);
    return hello;
}

/* With the daemon stopped one engine comes, and another one's pages are encoded. Is that one done
 * before the first has an answer? */
static bool goes_on_meanwhile(void)
{
    struct kvf_gpud_hello hello;
    struct kvf_seqpacket_message received;
    union kvf_gpud_message message;
    struct calls_outcome outcome = {0};
    struct calls_chain chain;
    struct calls other = {.daemon = calls.daemon};
    uint64_t request = 0;
    bool is_first;
    int fd;

    calls_client_open(&other, "balanced", seed);
    fd = channel_take(other.client);
    hello = hello_of(other.client);
    assert_int_equal(kill(calls.daemon.process.pid, SIGSTOP), 0);
    assert_int_equal(kvf_seqpacket_send(fd, &hello, sizeof(hello), NULL, 0), KVF_OK);
    pause_briefly(); /* the worker finds that first, or both */
    calls_chain_init(&chain, 2, 0);
    assert_int_equal(kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL, NULL,
                                 NULL, 7, NULL, &request),
                     KVF_OK);
    while (!outcome.pages_free) {
        (void)calls_take(&calls, &request, &outcome, 1, 10);
    }
    is_first = kvf_seqpacket_recv(fd, message.bytes, sizeof(message.bytes), &received) == KVF_EMPTY;
    assert_int_equal(kill(calls.daemon.process.pid, SIGCONT), 0);
    while (!outcome.is_over) {
        (void)calls_take(&calls, &request, &outcome, 1, 10);
    }
    (void)close(fd); /* perhaps while it still attaches */
    other.client = kvf_close(other.client);
    return is_first;
}

static void test_nobody_waits_for_an_attach(void **state)
{
    bool is_first = false;

    (void)state;
    engine_open();
    /* an attach is given up after 5 s, which may have passed on a machine that is that slow */
    for (int i = 0; i < 4 && !is_first; i++) {
        is_first = goes_on_meanwhile();
    }
    assert_true(is_first);
    put_until_it_works();
    calls_close(&calls);
    assert_true(kvf_test_daemon_wait_number(&calls.daemon, "clients", 0, 60000));
}

/* As many channels as a worker has places for, on which nobody says anything: engines come in. */
static void test_silent_channels(void **state)
{
    static struct kvf_client *silent[KVF_GPUD_ENGINES_MAX];
    int fds[KVF_GPUD_ENGINES_MAX];

    (void)state;
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        silent[i] = kvf_test_client_open(&calls.daemon, NULL);
        fds[i] = channel_take(silent[i]);
    }
    engine_open();
    put_until_it_works();
    calls_close(&calls);
    for (uint32_t i = 0; i < KVF_GPUD_ENGINES_MAX; i++) {
        (void)close(fds[i]);
        silent[i] = kvf_close(silent[i]);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Who says nothing
 */

/* Engines that do not finish their greeting are let go of, and counted: one that says nothing, one
 * that says half of it, one that never says MAPPED. */
static void half_greetings_end(void)
{
    struct calls others[3];
    int fds[3];

    for (uint32_t i = 0; i < 3; i++) {
        struct kvf_gpud_hello hello;

        others[i] = (struct calls){.daemon = calls.daemon};
        calls_client_open(&others[i], "balanced", seed);
        hello = hello_of(others[i].client);
        fds[i] = channel_take(others[i].client);
        if (i > 0) {
            (void)kvf_seqpacket_send(fds[i], &hello, i == 1 ? 100 : sizeof(hello), NULL, 0);
        }
    }
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(last_type(fds[i]), KVF_GPUD_GONE);
        (void)close(fds[i]);
        others[i].client = kvf_close(others[i].client);
    }
    while (kvf_test_daemon_number(&calls.daemon, "metrics.gpu_cut_off") < 3) {
        pause_briefly();
    }
    assert_true(kvf_test_daemon_log_has(&calls.daemon, "it did not greet in time"));
}

/* A worker that stands still is killed and another one started, which serves the engine. */
static void hung_worker_ends(void)
{
    uint64_t starts = worker_starts();

    engine_open();
    put_until_it_works();
    (void)calls_worker_stop(&calls);
    while (worker_starts() == starts) {
        pause_briefly();
    }
    put_until_it_works();
    assert_true(kvf_test_daemon_number(&calls.daemon, "metrics.gpu_worker_hangs") >= 1);
    assert_true(kvf_test_daemon_log_has(&calls.daemon, "has said nothing for"));
    calls_close(&calls);
}

static void test_silence_has_an_end(void **state)
{
    static const char *const sets[] = {"gpu.devices=all", "gpu.timeout=2s",
#ifdef KVF_TEST_WORKER
                                       "gpu.worker=" KVF_TEST_WORKER,
#endif
                                       NULL};
    struct kvf_test_daemon kept = calls.daemon;

    (void)state;
    calls_daemon_start(&calls, sets);
    half_greetings_end();
    hung_worker_ends();
    calls_daemon_stop(&calls);
    calls.daemon = kept;
}

/* ----------------------------------------------------------------------------------------------
 * Who wants all of the memory
 */

/* Greet with a ring of so many bytes, and say what the worker says. */
static int greet(struct kvf_client *client, int fd, uint64_t ring_bytes)
{
    static union kvf_gpud_message message;
    struct kvf_gpud_hello hello = hello_of(client);
    struct kvf_seqpacket_message received;
    int status = KVF_EMPTY;

    hello.ring_bytes = ring_bytes;
    hello.burst_bytes = hello.load_window_bytes = 1 << 19;
    assert_int_equal(kvf_seqpacket_send(fd, &hello, sizeof(hello), NULL, 0), KVF_OK);
    while (status == KVF_EMPTY) {
        struct pollfd one = {.fd = fd, .events = POLLIN};

        (void)poll(&one, 1, 100);
        status = kvf_seqpacket_recv(fd, message.bytes, sizeof(message.bytes), &received);
    }
    assert_int_equal(status, KVF_OK);
    assert_int_equal(message.head.type, KVF_GPUD_WELCOME);
    kvf_seqpacket_message_close(&received);
    if (message.welcome.status != KVF_OK) {
        assert_non_null(strstr(message.welcome.text, "gpu.scratch_total"));
    }
    return message.welcome.status;
}

static void test_rings_have_a_sum(void **state)
{
    static const char *const sets[] = {"gpu.devices=all", "gpu.scratch_total=128MiB",
#ifdef KVF_TEST_WORKER
                                       "gpu.worker=" KVF_TEST_WORKER,
#endif
                                       NULL};
    static const uint64_t rings[] = {UINT64_C(1) << 36, 80 << 20, 80 << 20, 80 << 20};
    static const int want[] = {KVF_ERR_BUSY, KVF_OK, KVF_ERR_BUSY, KVF_OK};
    struct kvf_test_daemon kept = calls.daemon;
    struct calls others[4];
    int fds[4];

    (void)state;
    calls_daemon_start(&calls, sets);
    for (uint32_t i = 0; i < 4; i++) {
        others[i] = (struct calls){.daemon = calls.daemon};
        calls_client_open(&others[i], "balanced", seed);
        fds[i] = channel_take(others[i].client);
        assert_int_equal(greet(others[i].client, fds[i], rings[i]), want[i]);
        if (i == 2) { /* the one that has a ring goes */
            (void)shutdown(fds[1], SHUT_WR);
            assert_int_equal(last_type(fds[1]), KVF_GPUD_GONE);
        }
    }
    for (uint32_t i = 0; i < 4; i++) {
        (void)close(fds[i]);
        others[i].client = kvf_close(others[i].client);
    }
    engine_open();
    put_until_it_works();
    calls_close(&calls);
    calls_daemon_stop(&calls);
    calls.daemon = kept;
}

/* ----------------------------------------------------------------------------------------------
 * A device that fails
 */
static void test_device_fails(void **state)
{
    uint64_t starts = worker_starts();
    int fd;

    (void)state;
    if (calls_fake.fake_cuda_seed == NULL) {
        return; /* real ones do not break on demand */
    }
    engine_open();
    put_until_it_works();
    fd = open(fail_path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    (void)close(fd);
    /* the one at work fails, and perhaps the next one, from its start */
    while (worker_starts() == starts) {
        struct kvf_gpu_event event;
        struct calls_chain chain;
        uint64_t request;
        uint32_t n;

        calls_chain_init(&chain, 4, 0);
        (void)kvf_gpu_put(calls.gpu, calls.pages.region, chain.puts, chain.n, NULL, NULL, NULL, 7,
                          NULL, &request);
        (void)kvf_gpu_poll(calls.gpu, &event, 1, 10, &n);
    }
    assert_int_equal(unlink(fail_path), 0);
    calls_close(&calls); /* the daemon answers as ever */
    assert_true(kvf_test_daemon_is_alive(&calls.daemon));
    assert_true(kvf_test_daemon_log_has(&calls.daemon, "GPU worker: it has failed"));
    assert_true(kvf_test_daemon_wait_number(&calls.daemon, "metrics.gpu_workers", 1, 60000));
    engine_open();
    put_until_it_works();
    calls_close(&calls);
}

/* ----------------------------------------------------------------------------------------------
 * Workers
 */

/* From here on in the place of kvferryd-gpu. */
static void say(const void *message, size_t bytes, int fd)
{
    int status;

    do {
        status = kvf_seqpacket_send(WORKER_FD, message, bytes, &fd, fd >= 0 ? 1 : 0);
    } while (status == KVF_ERR_BUSY);
    if (status != KVF_OK) {
        exit(0);
    }
}

static void say_ready(const char *uuid)
{
    struct kvf_gpud_ready ready = {.n_devices = 1, .total_bytes = 1 << 30, .free_bytes = 1 << 30};

    kvf_gpud_head_init(&ready.head, KVF_GPUD_READY, sizeof(ready));
    (void)snprintf(ready.uuid, sizeof(ready.uuid), "%s", uuid);
    (void)snprintf(ready.name, sizeof(ready.name), "liar");
    say(&ready, sizeof(ready), -1);
}

/* What nobody asked for, about the tier. */
static void say_mad_things(void)
{
    struct kvf_gpud_made made = {.status = KVF_OK};
    struct kvf_gpud_copied copied = {.copy = 1};
    struct kvf_gpud_note note = {.status = KVF_OK};

    for (uint32_t i = 0; i < 100; i++) {
        int fd = memfd_create("lie", MFD_CLOEXEC);

        kvf_gpud_head_init(&made.head, KVF_GPUD_ARENA_MADE, sizeof(made));
        made.head.number = i * 4096 + i % 2;
        say(&made, sizeof(made), i % 3 == 0 ? fd : -1);
        (void)close(fd);
        kvf_gpud_head_init(&copied.head, KVF_GPUD_COPIED, sizeof(copied));
        copied.copy = i;
        copied.status = (int32_t)i - 50;
        say(&copied, sizeof(copied), -1);
        kvf_gpud_head_init(&copied.head, (enum kvf_gpud_type)(64 + i), sizeof(copied));
        say(&copied, sizeof(copied) - i % 16, -1);
        kvf_gpud_head_init(&note.head, KVF_GPUD_ENGINE, sizeof(note));
        note.connection_id = i;
        say(&note, sizeof(note), -1);
    }
    say("no message", 10, -1);
}

static void liar(const char *lie)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    say_ready("GPU-11111111-1111-1111-1111-111111111111");
    if (strcmp(lie, "twice") == 0) {
        say_ready("GPU-11111111-1111-1111-1111-111111111111");
    } else if (strcmp(lie, "mad") == 0) {
        say_mad_things();
    } else {
        struct kvf_gpud_counts counts = {0};

        (void)fork(); /* both of them keep the socket full */
        kvf_gpud_head_init(&counts.head, KVF_GPUD_COUNTS, sizeof(counts));
        for (;;) {
            say(&counts, sizeof(counts), -1);
        }
    }
    for (;;) {
        (void)pause();
    }
}

static void test_worker_lies_to_the_daemon(void **state)
{
    static const char *const lies[] = {"twice", "mad", "flood"};

    (void)state;
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        static const char *const sets[] = {"gpu.devices=all", "gpu.hbm_bytes=32MiB", NULL};
        char program[KVF_TEST_PATH_BYTES] = "gpu.worker=";
        char lie[32];
        struct kvf_test_daemon daemon;
        struct kvf_client *client;
        size_t at = strlen(program);
        ssize_t n = readlink("/proc/self/exe", program + at, sizeof(program) - at - 1);

        assert_true(n > 0);
        (void)snprintf(lie, sizeof(lie), "KVF_TEST_LIE=%s", lies[i]);
        kvf_test_daemon_create(&daemon, sets);
        kvf_test_daemon_set(&daemon, program);
        daemon.extra_env = lie;
        kvf_test_daemon_start(&daemon);
        client = kvf_test_client_open(&daemon, NULL);
        for (int ping = 0; ping < 20; ping++) {
            uint64_t ns;

            assert_int_equal(kvf_ping(client, 60000, &ns), KVF_OK);
        }
        client = kvf_close(client);
        while (i < 2 && kvf_test_daemon_number(&daemon, "metrics.gpu_worker_starts") < 2) {
            pause_briefly(); /* it is ended, and started again */
        }
        assert_true(kvf_test_daemon_is_alive(&daemon));
        assert_int_equal(kvf_test_daemon_stop(&daemon), 0);
        kvf_test_daemon_destroy(&daemon);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_beyond_its_end),
        cmocka_unit_test(test_memory_beyond_the_gpu),
        cmocka_unit_test(test_waiting_is_no_work),
        cmocka_unit_test(test_engine_does_not_listen),
        cmocka_unit_test(test_worker_lies_to_the_engine),
        cmocka_unit_test(test_handles_are_of_one_tenant),
        cmocka_unit_test(test_nobody_waits_for_an_attach),
        cmocka_unit_test(test_silent_channels),
        cmocka_unit_test(test_silence_has_an_end),
        cmocka_unit_test(test_rings_have_a_sum),
        cmocka_unit_test(test_device_fails),
        cmocka_unit_test(test_worker_lies_to_the_daemon),
    };
    static const char *const sets[] = {"gpu.devices=all", "staging.total=400MiB", "clients.max=128",
#ifdef KVF_TEST_WORKER
                                       "gpu.worker=" KVF_TEST_WORKER,
#endif
                                       NULL};
    int failed;

    (void)argc;
    (void)argv;
    if (getenv("KVF_TEST_LIE") != NULL) { /* started as a worker, by a daemon of this test */
        liar(getenv("KVF_TEST_LIE"));
    }
    if (!calls_begin(&seed)) {
        return 77;
    }
    (void)snprintf(fail_path, sizeof(fail_path), "/tmp/kvferry-no-gpu-%d", (int)getpid());
    (void)setenv("FAKE_CUDA_FAIL_FILE", fail_path, 1); /* of processes that are started from here */
    calls_daemon_start(&calls, sets);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    calls_daemon_stop(&calls);
    (void)unlink(fail_path);
    return failed;
}
