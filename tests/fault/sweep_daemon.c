/* SPDX-License-Identifier: Apache-2.0
 *
 * sweep_daemon.c: calls of the daemon fail, while it starts, recovers, serves, answers the admin
 * and drains. It starts or says in one line why not; once it serves it goes on, keeps nothing, and
 * serves the next client right.
 */
#include "tests/fault/sweep.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/daemon.h"

#define BLOCK_BYTES (256u << 10)
#define ARENA_BYTES (16u << 20)
#define SMALL_STORE "nvme.0.bytes=16MiB"
#define LARGE_STORE "nvme.0.bytes=40MiB" /* of more than the arena */
#define N_DURABLE   3
#define N_DEMOTE    (ARENA_BYTES / BLOCK_BYTES + 6) /* enough to push the durable ones out */
#define N_STORED    8                               /* before a recovery */
#define N_FILL      200                             /* blocks, more than the large store holds */
#define N_FILL_WAIT 15
#define N_MOVES     16 /* of two blocks: two segments and more */
#define N_NOTES     4
#define LEFT_MS     500
#define READY_MS    20000
#define END_MS      20000
#define NO_CODE     (-1)

#define ALL                                                                                        \
    (SWEEP_BIT(SWEEP_ALLOC) | SWEEP_BIT(SWEEP_MAP) | SWEEP_BIT(SWEEP_FD) |                         \
     SWEEP_BIT(SWEEP_SOCKET) | SWEEP_BIT(SWEEP_BUSY) | SWEEP_BIT(SWEEP_INTERRUPT) |                \
     SWEEP_BIT(SWEEP_THREAD) | SWEEP_BIT(SWEEP_DRIVE))
#define DRIVES (SWEEP_BIT(SWEEP_DRIVE) | SWEEP_BIT(SWEEP_INTERRUPT))

static struct kvf_test_daemon the_daemon;
static const char *the_engine; /* setting, NULL: the best */
static long the_log_bytes;     /* of earlier starts */
static uint64_t the_number;    /* of the next new block */
static struct sweep_holdings the_holdings;

/* --- the daemon ------------------------------------------------------------------------------- */

static long log_bytes(void)
{
    struct stat st;

    return stat(the_daemon.log_path, &st) == 0 ? (long)st.st_size : 0;
}

static void create(const char *store_set)
{
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_daemon_set(&the_daemon, "dram.bytes=16MiB");
    kvf_test_daemon_set(&the_daemon, store_set);
    kvf_test_daemon_set(&the_daemon, "nvme.0.segment_bytes=2MiB");
    kvf_test_daemon_set(&the_daemon, "put.writeback_share=50");
    if (the_engine != NULL) {
        kvf_test_daemon_set(&the_daemon, the_engine);
    }
    the_daemon.preload = KVF_TEST_SWEEP_PRELOAD;
    the_daemon.extra_env = sweep_page_env();
}

static struct kvf_client *open_client(uint32_t timeout_ms, int *status_out)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;

    kvf_options_init(&options);
    options.socket_path = the_daemon.socket_path;
    options.client_name = "sweep";
    options.staging_bytes = 1 << 20;
    options.ring_entries = 64;
    options.connect_timeout_ms = timeout_ms;
    *status_out = kvf_open(&options, &client);
    return client;
}

/* True: it answers. False: it has ended, with *code_out (NO_CODE: it does neither). */
static bool wait_ready(int *code_out)
{
    uint64_t deadline_ns = kvf_now_ns() + READY_MS * KVF_NS_PER_MS;
    const struct timespec pause = {.tv_nsec = KVF_NS_PER_MS};
    int wait_status = 0;

    *code_out = NO_CODE;
    while (kvf_now_ns() < deadline_ns) {
        uint64_t round_trip_ns;
        int status;
        struct kvf_client *client;
        bool is_ready;

        if (kvf_test_daemon_has_ended(&the_daemon, 0, &wait_status)) {
            *code_out = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status)
                                               : 128 + WTERMSIG(wait_status);
            return false;
        }
        client = open_client(2000, &status);
        is_ready = status == KVF_OK && kvf_ping(client, 2000, &round_trip_ns) == KVF_OK;
        kvf_close(client);
        if (is_ready) {
            return true;
        }
        nanosleep(&pause, NULL);
    }
    return false;
}

/* An exit that is none of a crash, with the reason on one line. */
static void check_exit(struct sweep_case *run, int code)
{
    char *log = kvf_test_file_read(the_daemon.log_path, NULL);
    const char *text = log != NULL && (long)strlen(log) >= the_log_bytes ? log + the_log_bytes : "";

    if (code != 1 && code != 2) {
        sweep_wrong(run, "the daemon ends with %d:\n%s", code, text);
    } else if (strstr(text, "error: ") == NULL && strstr(text, "kvferryd: ") == NULL) {
        sweep_wrong(run, "the daemon ends with %d and does not say why:\n%s", code, text);
    }
    free(log);
}

/* Start what must start. */
static bool start_unharmed(struct sweep_case *run)
{
    int code;

    the_log_bytes = log_bytes();
    kvf_test_daemon_spawn(&the_daemon);
    if (wait_ready(&code)) {
        return true;
    }
    sweep_wrong(run, "the second start fails with %d", code);
    return false;
}

/* Start while calls fail. False: it has ended, as it should then. */
static bool start_armed(struct sweep_case *run)
{
    int code;

    the_log_bytes = log_bytes();
    sweep_arm(run, sweep_daemon_page);
    kvf_test_daemon_spawn(&the_daemon);
    if (wait_ready(&code)) {
        return true;
    }
    sweep_disarm(run);
    if (code == NO_CODE) {
        char *log = kvf_test_file_read(the_daemon.log_path, NULL);

        sweep_wrong(run, "the daemon neither serves nor ends:\n%s",
                    log != NULL ? log + the_log_bytes : "");
        free(log);
        kvf_test_daemon_kill(&the_daemon);
        return false;
    }
    run->is_ended = true;
    check_exit(run, code);
    return false;
}

/* --- work ------------------------------------------------------------------------------------- */

static void judge(struct sweep_case *run, bool is_armed, const char *call, int status)
{
    if (is_armed) {
        sweep_judge(run, call, status);
    } else if (status != KVF_OK && status != KVF_EXISTS) {
        sweep_wrong(run, "%s answers \"%s\" although nothing fails", call, kvf_status_name(status));
    }
}

/* Full of what is still being written is no failure: wait for it. */
static int put_patiently(struct kvf_client *client, uint64_t number, uint32_t flags)
{
    uint64_t deadline_ns = kvf_now_ns() + 5 * KVF_NS_PER_S;
    const struct timespec pause = {.tv_nsec = KVF_NS_PER_MS};
    int status = sweep_put(client, number, BLOCK_BYTES, flags);

    while (status == KVF_ERR_BUSY && kvf_now_ns() < deadline_ns) {
        nanosleep(&pause, NULL);
        status = sweep_put(client, number, BLOCK_BYTES, flags);
    }
    return status;
}

/* Put durable blocks, and others until those are pushed out of the arena. Returns how many of the
 * durable ones are stored. */
static uint32_t store(struct sweep_case *run, bool is_armed, struct kvf_client *client,
                      uint64_t first)
{
    uint32_t n_stored = 0;
    int status;

    for (uint32_t i = 0; i < N_DURABLE; i++) {
        status = put_patiently(client, first + i, KVF_PUT_DURABLE);
        judge(run, is_armed, "durable put", status);
        n_stored += status == KVF_OK;
    }
    for (uint32_t i = 0; i < N_DEMOTE; i++) {
        judge(run, is_armed, "put", put_patiently(client, first + N_DURABLE + i, 0));
    }
    status = sweep_get(client, first + N_DURABLE + N_DEMOTE - 1, BLOCK_BYTES, NULL);
    judge(run, is_armed, "get", status);
    return n_stored;
}

/* Get the durable ones from the drive. */
static void load(struct sweep_case *run, bool is_armed, struct kvf_client *client, uint64_t first,
                 uint32_t n_stored)
{
    uint32_t n_from_drive = 0;

    for (uint32_t i = 0; i < N_DURABLE; i++) {
        uint8_t tier = KVF_TIER_NONE;
        int status = sweep_get(client, first + i, BLOCK_BYTES, &tier);

        n_from_drive += status == KVF_OK && tier == KVF_TIER_NVME;
        judge(run, is_armed, "get from the drive", status);
    }
    if (!is_armed && n_from_drive != n_stored) {
        sweep_wrong(run, "%u of %u blocks came from the drive", n_from_drive, n_stored);
    }
}

/* A handle that lived through the fault works by itself again. */
static void check_handle(struct sweep_case *run, struct kvf_client *client)
{
    uint64_t deadline_ns = kvf_now_ns() + 10 * KVF_NS_PER_S;
    const struct timespec pause = {.tv_nsec = KVF_NS_PER_MS};
    uint64_t number = the_number++;
    int status = put_patiently(client, number, 0);

    while (status != KVF_OK && kvf_now_ns() < deadline_ns) {
        nanosleep(&pause, NULL);
        status = put_patiently(client, number, 0);
    }
    judge(run, false, "put by the same handle", status);
    judge(run, false, "get by the same handle", sweep_get(client, number, BLOCK_BYTES, NULL));
}

/* The next client: new blocks are right, old ones are right or gone. */
static void check_next_client(struct sweep_case *run, uint64_t first, uint32_t n)
{
    bool is_drive = run->class == SWEEP_DRIVE;
    uint64_t number = the_number;
    struct kvf_client *client;
    int status;

    the_number += 2;
    client = open_client(5000, &status);
    judge(run, false, "open", status);
    if (client == NULL) {
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        status = sweep_get(client, first + i, BLOCK_BYTES, NULL);
        if (status == KVF_MISS) {
            run->n_missed++;
        } else {
            judge(run, false, "get of an old block", status);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        /* a drive that has failed may stay off; memory does not */
        status = put_patiently(client, number + i, is_drive ? 0 : KVF_PUT_DURABLE);
        judge(run, false, "put", status);
        judge(run, false, "get", sweep_get(client, number + i, BLOCK_BYTES, NULL));
    }
    kvf_close(client);
}

static void stop(struct sweep_case *run)
{
    int wait_status = 0;

    kvf_test_process_signal(&the_daemon.process, SIGTERM);
    if (!kvf_test_daemon_has_ended(&the_daemon, END_MS, &wait_status)) {
        sweep_wrong(run, "the daemon does not end");
        kvf_test_daemon_kill(&the_daemon);
    } else if (wait_status != 0 && run->class != SWEEP_DRIVE) {
        sweep_wrong(run, "the daemon ends with wait status 0x%x", (unsigned)wait_status);
    } else if (WIFSIGNALED(wait_status)) {
        sweep_wrong(run, "the daemon is killed by signal %d", WTERMSIG(wait_status));
    }
}

/* --- start ------------------------------------------------------------------------------------ */

static void nothing(void)
{
}

static void start_run(struct sweep_case *run)
{
    uint64_t first = the_number;
    uint32_t n_old = 0;
    bool is_up;

    the_number += 1;
    create(SMALL_STORE);
    is_up = start_armed(run);
    if (is_up) {
        int status;
        struct kvf_client *client = open_client(2000, &status);

        judge(run, true, "open", status);
        if (client != NULL) {
            status = sweep_put(client, first, BLOCK_BYTES, KVF_PUT_DURABLE);
            judge(run, true, "put", status);
            n_old = status == KVF_OK;
            judge(run, true, "get", sweep_get(client, first, BLOCK_BYTES, NULL));
        }
        sweep_disarm(run);
        if (client != NULL) {
            check_handle(run, client);
        }
        kvf_close(client);
        is_up = kvf_test_daemon_is_alive(&the_daemon);
        if (!is_up) {
            sweep_wrong(run, "the daemon has ended");
        }
    } else {
        is_up = start_unharmed(run);
    }
    if (is_up) {
        check_next_client(run, first, n_old);
        stop(run);
    }
    kvf_test_daemon_destroy(&the_daemon);
}

/* --- configuration ---------------------------------------------------------------------------- */

/* kvferryd --check of a file that is right. Returns the exit code. */
static int check_file(const char *config_path)
{
    char *argv[] = {(char *)KVF_TEST_KVFERRYD, (char *)"--config", (char *)config_path,
                    (char *)"--check", NULL};
    char preload[KVF_TEST_PATH_BYTES + 32];
    char *env[] = {preload, (char *)sweep_page_env(), NULL};
    struct kvf_test_process process;
    int wait_status = 0;

    snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", KVF_TEST_SWEEP_PRELOAD);
    kvf_test_process_start(&process, argv, env, the_daemon.log_path);
    if (!kvf_test_process_wait(&process, END_MS, &wait_status)) {
        kvf_test_process_stop(&process);
        return NO_CODE;
    }
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

static void config_run(struct sweep_case *run)
{
    char path[KVF_TEST_PATH_BYTES];
    char text[3 * KVF_TEST_PATH_BYTES];
    int code;

    create(SMALL_STORE);
    kvf_test_dir_path(&the_daemon.dir, "kvferryd.yaml", path);
    snprintf(text, sizeof(text),
             "sockets:\n  - path: %s\n    tenant: one\nnvme:\n  - path: %s\n    bytes: 16MiB\n"
             "    segment_bytes: 2MiB\ndram: {bytes: 16MiB}\nlease:\n  max_age: 5s\n",
             the_daemon.socket_path, the_daemon.store_path);
    kvf_test_file_write(path, text, strlen(text));
    the_log_bytes = 0;
    sweep_arm(run, sweep_daemon_page);
    code = check_file(path);
    sweep_disarm(run);
    if (code != 0) {
        run->is_ended = true;
        check_exit(run, code);
    }
    code = check_file(path);
    if (code != 0) {
        sweep_wrong(run, "the second check ends with %d", code);
    }
    kvf_test_daemon_destroy(&the_daemon);
}

/* --- recovery --------------------------------------------------------------------------------- */

static struct {
    char *bytes;
    size_t n;
    uint64_t first;
} the_store;

/* A store as kill -9 leaves it. */
static void recover_begin(void)
{
    struct sweep_case run = {.scenario = "recover", .class = SWEEP_NONE};
    struct kvf_client *client;
    int status;

    create(SMALL_STORE);
    kvf_test_daemon_start(&the_daemon);
    client = open_client(5000, &status);
    the_store.first = the_number;
    the_number += 3 * N_STORED;
    for (uint32_t i = 0; i < 3 * N_STORED && client != NULL; i++) {
        judge(&run, false, "put",
              put_patiently(client, the_store.first + i, i < N_STORED ? KVF_PUT_DURABLE : 0));
    }
    kvf_test_daemon_kill(&the_daemon);
    kvf_close(client);
    the_store.bytes = kvf_test_file_read(the_daemon.store_path, &the_store.n);
    kvf_test_daemon_destroy(&the_daemon);
    if (client == NULL || the_store.bytes == NULL) {
        fprintf(stderr, "sweep: no store to recover\n");
        exit(1);
    }
}

static void recover_end(void)
{
    free(the_store.bytes);
    the_store.bytes = NULL;
}

/* Get what was durable. */
static void get_stored(struct sweep_case *run, bool is_armed)
{
    struct kvf_client *client;
    int status;

    client = open_client(5000, &status);
    judge(run, is_armed, "open", status);
    for (uint32_t i = 0; i < N_STORED && client != NULL; i++) {
        status = sweep_get(client, the_store.first + i, BLOCK_BYTES, NULL);
        if (status == KVF_MISS && run->class == SWEEP_DRIVE) {
            run->n_missed += !is_armed;
        } else {
            judge(run, is_armed, "get of a recovered block", status);
        }
    }
    kvf_close(client);
}

static void recover_run(struct sweep_case *run)
{
    bool is_up;

    create(SMALL_STORE);
    kvf_test_file_write(the_daemon.store_path, the_store.bytes, the_store.n);
    is_up = start_armed(run);
    if (is_up) {
        get_stored(run, true);
        sweep_disarm(run);
        if (!kvf_test_daemon_is_alive(&the_daemon)) {
            sweep_wrong(run, "the daemon has ended");
        } else {
            get_stored(run, false);
            check_next_client(run, 0, 0);
        }
        kvf_test_daemon_kill(&the_daemon);
    }
    if (start_unharmed(run)) {
        get_stored(run, false);
        check_next_client(run, 0, 0);
    }
    kvf_test_daemon_destroy(&the_daemon);
}

/* --- serving ---------------------------------------------------------------------------------- */

static bool is_as_before(void *arg)
{
    const struct sweep_case *run = arg;
    struct sweep_holdings now;

    sweep_holdings_read(the_daemon.process.pid, sweep_daemon_page, &now);
    return now.n_fds == the_holdings.n_fds && now.n_maps == the_holdings.n_maps &&
           (now.n_live == the_holdings.n_live ||
            (run != NULL && run->class == SWEEP_DRIVE)); /* its store is still filling up */
}

/* A segment that is being filled has no table yet, so allocations come and go by one with the place
 * in the store. Move on by a part of a segment. */
static void move_on(struct sweep_case *run)
{
    uint32_t flags = run->class == SWEEP_DRIVE ? 0 : KVF_PUT_DURABLE;
    struct kvf_client *client;
    int status;

    client = open_client(5000, &status);
    judge(run, false, "open", status);
    for (uint32_t i = 0; i < 2 && client != NULL; i++) {
        judge(run, false, "put", put_patiently(client, the_number++, flags));
    }
    kvf_close(client);
    (void)kvf_test_daemon_wait_number(&the_daemon, "clients", 0, 10000);
}

static void check_left(struct sweep_case *run)
{
    struct sweep_holdings now;
    bool is_right = false;

    if (!kvf_test_daemon_wait_number(&the_daemon, "clients", 0, 10000) ||
        kvf_test_daemon_number(&the_daemon, "staging_used_bytes") != 0 ||
        kvf_test_daemon_number(&the_daemon, "metrics.leased_bytes") != 0) {
        sweep_wrong(run, "the daemon has not all back");
    }
    for (uint32_t i = 0; i < N_MOVES && !is_right; i++) {
        is_right = kvf_test_wait_until(is_as_before, run, LEFT_MS);
        if (!is_right) {
            move_on(run);
        }
    }
    if (!is_right && !kvf_test_wait_until(is_as_before, run, 10 * LEFT_MS)) {
        sweep_holdings_read(the_daemon.process.pid, sweep_daemon_page, &now);
        sweep_wrong(run, "left over: %d descriptors, %d mappings, %d allocations",
                    (int)(now.n_fds - the_holdings.n_fds), (int)(now.n_maps - the_holdings.n_maps),
                    (int)(now.n_live - the_holdings.n_live));
    }
}

static void note_once(void)
{
    const struct timespec pause = {.tv_nsec = 50 * KVF_NS_PER_MS};

    (void)kvf_test_daemon_wait_number(&the_daemon, "clients", 0, 10000);
    (void)kvf_test_daemon_wait_number(&the_daemon, "staging_used_bytes", 0, 10000);
    do {
        sweep_holdings_read(the_daemon.process.pid, sweep_daemon_page, &the_holdings);
        nanosleep(&pause, NULL);
    } while (!is_as_before(NULL));
}

/* What the daemon holds when it is at rest. On a busy machine its threads may not run for longer
 * than two looks are apart: one segment is being sealed and the next one open, say, and it holds an
 * allocation less than at any rest. What is right is seen again. */
static void note_holdings(struct sweep_case *run)
{
    bool is_seen_again = false;

    for (uint32_t round = 0; round < N_NOTES && !is_seen_again; round++) {
        note_once();
        for (uint32_t i = 0; i < N_MOVES && !is_seen_again; i++) {
            move_on(run);
            is_seen_again = kvf_test_wait_until(is_as_before, run, LEFT_MS);
        }
    }
    if (!is_seen_again) {
        sweep_wrong(run, "the daemon holds something else after each put");
    }
}

/* Go once around the store: a segment that was never full costs an allocation. Every now and then a
 * put waits for those before it, so that none is left out. */
static void fill_store(struct sweep_case *run, struct kvf_client *client)
{
    for (uint32_t i = 0; i < N_FILL; i++) {
        uint32_t flags = i % (N_FILL_WAIT + 1) == N_FILL_WAIT ? KVF_PUT_DURABLE : 0;

        judge(run, false, "put", put_patiently(client, the_number++, flags));
    }
}

/* A round without a fault, so that everything is there that comes with the first client. */
static void serve_begin_with(bool is_filled)
{
    struct sweep_case run = {.scenario = "serve", .class = SWEEP_NONE};
    struct kvf_client *client;
    int status;

    create(LARGE_STORE);
    kvf_test_daemon_start(&the_daemon);
    client = open_client(5000, &status);
    if (is_filled) {
        fill_store(&run, client);
    }
    load(&run, false, client, the_number, store(&run, false, client, the_number));
    the_number += N_DURABLE + N_DEMOTE;
    kvf_close(client);
    run.class = is_filled ? SWEEP_NONE : SWEEP_DRIVE;
    note_holdings(&run);
}

static void serve_begin(void)
{
    serve_begin_with(true);
}

static void serve_end(void)
{
    kvf_test_daemon_destroy(&the_daemon);
}

/* After every way to fail: the daemon lives, the handle and the next client work, and nothing is
 * left over. */
static void check_served(struct sweep_case *run, struct kvf_client *client, uint64_t first,
                         uint32_t n_old)
{
    if (!kvf_test_daemon_is_alive(&the_daemon)) {
        sweep_wrong(run, "the daemon has ended");
        kvf_close(client);
        return;
    }
    if (client != NULL) {
        check_handle(run, client);
    }
    kvf_close(client);
    check_next_client(run, first, n_old);
    check_left(run);
}

/* Errors of a drive add up to its being switched off: each run has a daemon of its own. */
static void renew(const struct sweep_case *run)
{
    if (run->class == SWEEP_DRIVE) {
        serve_end();
        serve_begin_with(false);
    }
}

static void serve_run(struct sweep_case *run)
{
    struct kvf_client *client;
    uint64_t first;
    int status;

    renew(run);
    first = the_number;
    the_number += N_DURABLE + N_DEMOTE;
    sweep_arm(run, sweep_daemon_page);
    client = open_client(3000, &status);
    judge(run, true, "open", status);
    if (client != NULL) {
        load(run, true, client, first, store(run, true, client, first));
    }
    sweep_disarm(run);
    check_served(run, client, first, client != NULL ? N_DURABLE : 0);
}

/* The way back from the drive alone: what is written meanwhile blurs which call is the Nth. */
static void load_run(struct sweep_case *run)
{
    struct kvf_client *client;
    uint64_t first;
    uint32_t n_stored;
    int status;

    renew(run);
    first = the_number;
    the_number += N_DURABLE + N_DEMOTE;
    client = open_client(3000, &status);
    judge(run, false, "open", status);
    n_stored = client != NULL ? store(run, false, client, first) : 0;
    (void)kvf_test_daemon_wait_number(&the_daemon, "metrics.writeback_bytes", 0, 5000);
    sweep_arm(run, sweep_daemon_page);
    if (client != NULL) {
        load(run, true, client, first, n_stored);
    }
    sweep_disarm(run);
    check_served(run, client, first, N_DURABLE);
}

/* --- the admin socket ------------------------------------------------------------------------- */

/* The answer's status, 0 if there was none. */
static int ask(const char *method, const char *path)
{
    const struct timeval patience = {.tv_sec = 5};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char question[256];
    char answer[4096];
    size_t bytes = 0;
    ssize_t got = 1;
    int code = 0;

    snprintf(address.sun_path, sizeof(address.sun_path), "%.100s", the_daemon.admin_path);
    snprintf(question, sizeof(question),
             "%s %s HTTP/1.0\r\nHost: kvferryd\r\nContent-Length: 0\r\n\r\n", method, path);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0 &&
        send(fd, question, strlen(question), MSG_NOSIGNAL) > 0) {
        while (got > 0) {
            got = recv(fd, answer + (bytes < 64 ? bytes : 64), sizeof(answer) - 65, 0);
            bytes += got > 0 ? (size_t)got : 0;
        }
        answer[bytes < sizeof(answer) ? bytes : sizeof(answer) - 1] = '\0';
        if (got < 0 && errno != ECONNRESET) {
            code = -1; /* it neither answered nor hung up */
        } else if (bytes > 12) {
            code = (int)strtol(answer + 9, NULL, 10);
        }
    }
    close(fd);
    return code;
}

static void ask_all(struct sweep_case *run, bool is_armed)
{
    static const char *const questions[][2] = {
        {"GET", "/v1/stat"}, {"GET", "/metrics"},   {"GET", "/healthz"},
        {"GET", "/readyz"},  {"GET", "/v1/config"}, {"POST", "/v1/purge?namespace=12ab"},
    };

    for (size_t i = 0; i < sizeof(questions) / sizeof(questions[0]); i++) {
        int code = ask(questions[i][0], questions[i][1]);

        if (code < 0 || (!is_armed && code == 0)) {
            sweep_wrong(run, "%s is not answered", questions[i][1]);
        }
        run->n_failed += code != 200 && code != 404 && code != 400;
    }
}

static void admin_run(struct sweep_case *run)
{
    sweep_arm(run, sweep_daemon_page);
    ask_all(run, true);
    sweep_disarm(run);
    if (!kvf_test_daemon_is_alive(&the_daemon)) {
        sweep_wrong(run, "the daemon has ended");
        return;
    }
    ask_all(run, false);
    check_next_client(run, 0, 0);
    check_left(run);
}

/* --- the end ---------------------------------------------------------------------------------- */

/* SIGTERM with writes to be done. */
static void drain_run(struct sweep_case *run)
{
    uint64_t first = the_number;
    struct kvf_client *client;
    int status;

    the_number += N_STORED;
    create(SMALL_STORE);
    kvf_test_daemon_start(&the_daemon);
    client = open_client(5000, &status);
    for (uint32_t i = 0; i < N_STORED; i++) {
        judge(run, false, "put", put_patiently(client, first + i, 0));
    }
    the_log_bytes = log_bytes();
    sweep_arm(run, sweep_daemon_page);
    stop(run);
    sweep_disarm(run);
    kvf_close(client);
    if (start_unharmed(run)) {
        uint32_t missed = run->n_missed;

        check_next_client(run, first, N_STORED);
        if (run->class != SWEEP_DRIVE && run->n_missed != missed) {
            sweep_wrong(run, "%u blocks are missing after a drain", run->n_missed - missed);
        }
    }
    kvf_test_daemon_destroy(&the_daemon);
}

/* --- with threads instead of io_uring --------------------------------------------------------- */

static void threads_engine(void)
{
    the_engine = "nvme.0.engine=threads";
}

static void best_engine(void)
{
    the_engine = NULL;
}

static void recover_threads_begin(void)
{
    threads_engine();
    recover_begin();
}

static void recover_threads_end(void)
{
    recover_end();
    best_engine();
}

static void serve_threads_begin(void)
{
    threads_engine();
    serve_begin();
}

static void serve_threads_end(void)
{
    serve_end();
    best_engine();
}

const struct sweep_scenario sweep_daemon_scenarios[] = {
    {"config", SWEEP_BIT(SWEEP_ALLOC) | SWEEP_BIT(SWEEP_FD) | DRIVES, nothing, config_run, nothing},
    {"start", ALL, nothing, start_run, nothing},
    {"start_threads", ALL & ~DRIVES, threads_engine, start_run, best_engine},
    {"recover", ALL, recover_begin, recover_run, recover_end},
    {"recover_threads", DRIVES, recover_threads_begin, recover_run, recover_threads_end},
    {"serve", ALL & ~SWEEP_BIT(SWEEP_THREAD), serve_begin, serve_run, serve_end},
    {"serve_threads", DRIVES, serve_threads_begin, serve_run, serve_threads_end},
    {"load", ALL & ~SWEEP_BIT(SWEEP_THREAD), serve_begin, load_run, serve_end},
    {"load_threads", DRIVES, serve_threads_begin, load_run, serve_threads_end},
    {"admin", ALL & ~DRIVES & ~SWEEP_BIT(SWEEP_THREAD), serve_begin, admin_run, serve_end},
    {"drain", ALL & ~SWEEP_BIT(SWEEP_THREAD), nothing, drain_run, nothing},
};
const size_t sweep_daemon_scenarios_count = sizeof(sweep_daemon_scenarios) /
                                            sizeof(sweep_daemon_scenarios[0]);
