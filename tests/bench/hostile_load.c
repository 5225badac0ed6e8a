/* SPDX-License-Identifier: Apache-2.0
 *
 * hostile_load.c: the well-behaved neighbour and the bad one.
 *
 * What is compared is what the daemon makes of a neighbour, not how busy the machine is. So each is
 * a process with two threads that compute for the first ON_NS of each PHASE_NS: one writes words at
 * random, the other attacks, or puts and gets and looks for its answers without sleeping. An attack
 * waits for the daemon now and then, and takes less of a CPU while it does; if the daemon lets it
 * wait for long, the next attack follows. The well-behaved neighbour leaves out a phase now and
 * then, as many as it takes to have used as much.
 */
#include "tests/bench/hostile_load.h"

#include "base/clock.h"
#include "base/random.h"
#include "kvferry.h"
#include "tests/bench/bench.h"
#include "tests/fault/raw_client.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PHASE_NS         (5300 * KVF_NS_PER_US) /* in no step with the kernel's ticks */
#define ON_NS            (1800 * KVF_NS_PER_US)
#define NAP_NS           (200 * KVF_NS_PER_US)
#define IDLE_NAP_NS      (2 * KVF_NS_PER_MS)
#define GOOD_BYTES       (64u << 10)
#define GOOD_KEYS        256
#define LARGE_STAGING    (96u << 20)
#define HANG_UP_MS       20
#define SCRIBBLES_A_LOCK 256
#define STAGING_WORDS    (KEYS_A_PUT * RECORD_BYTES / 8)
#define RECORD_BYTES     8192
#define KEYS_A_PUT       8
#define STORM            24
#define WILD_PER_STEP    4

static const char *the_socket;
static struct hostile_control *the_control;
static struct kvf_random_seeded the_random;

/* --- phases and the same CPU ------------------------------------------------------------------ */

static bool is_on(void)
{
    return kvf_now_ns() % PHASE_NS < ON_NS;
}

static void wait_for_phase(void)
{
    uint64_t at_ns = (kvf_now_ns() / PHASE_NS + 1) * PHASE_NS;
    struct timespec at = {.tv_sec = (time_t)(at_ns / KVF_NS_PER_S),
                          .tv_nsec = (long)(at_ns % KVF_NS_PER_S)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
    }
}

static uint64_t thread_cpu_ns(void)
{
    struct timespec cpu;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    return (uint64_t)cpu.tv_sec * KVF_NS_PER_S + (uint64_t)cpu.tv_nsec;
}

/* When this process began to work the last time. */
static struct {
    uint64_t ns, cpu_ns;
} began;

static void account_begin(void)
{
    began.ns = kvf_now_ns();
    began.cpu_ns = thread_cpu_ns();
}

static void account_end(struct hostile_account *account)
{
    atomic_fetch_add(&account->elapsed_ns, kvf_now_ns() - began.ns);
    atomic_fetch_add(&account->cpu_ns, thread_cpu_ns() - began.cpu_ns);
}

/* Has the well-behaved one used less than the bad one would have? */
static bool is_due(void)
{
    struct hostile_account *good = &the_control->accounts[HOSTILE_GOOD];
    struct hostile_account *bad = &the_control->accounts[HOSTILE_BAD];
    uint64_t elapsed_ns = atomic_load(&good->elapsed_ns) + kvf_now_ns() - began.ns;
    uint64_t used_ns = atomic_load(&good->cpu_ns) + thread_cpu_ns() - began.cpu_ns;
    uint64_t bad_elapsed_ns = atomic_load(&bad->elapsed_ns);

    return bad_elapsed_ns == 0 || (double)used_ns / (double)elapsed_ns <
                                      (double)atomic_load(&bad->cpu_ns) / (double)bad_elapsed_ns;
}

/* --- the second thread ------------------------------------------------------------------------ */

/* Writes words at random while it is on: over memory of its own, or over what an attack shares with
 * the daemon. */
static struct {
    pthread_mutex_t lock; /* guards raw and what it has mapped */
    const struct raw_client *raw;
    _Atomic bool is_on;
} scribbler = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void scribble_words(struct kvf_random_seeded *random)
{
    static uint64_t own[STAGING_WORDS];
    const struct raw_client *raw = scribbler.raw;
    uint64_t *staging = raw != NULL ? (uint64_t *)(void *)raw->staging : own;
    size_t first = sizeof(struct kvf_shm_header) / 8;

    for (uint32_t i = 0; i < SCRIBBLES_A_LOCK; i++) {
        uint64_t word = kvf_random_seeded_next(random);

        __atomic_store_n(&staging[word % STAGING_WORDS], word, __ATOMIC_RELAXED);
        if (raw != NULL && word % 16 == 0) {
            uint64_t *ring = (uint64_t *)(void *)raw->ring_base;
            size_t n = raw->welcome.ring_bytes / 8 - first;

            __atomic_store_n(&ring[first + word / 16 % n], word >> 40, __ATOMIC_RELAXED);
        }
    }
}

static void *scribble(void *arg)
{
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, 3);
    for (;;) {
        if (!atomic_load(&scribbler.is_on) || !is_on()) {
            wait_for_phase();
            continue;
        }
        pthread_mutex_lock(&scribbler.lock);
        scribble_words(&random);
        pthread_mutex_unlock(&scribbler.lock);
    }
    return arg;
}

/* NULL: back to its own memory; the client's is not written to when this returns. */
static void scribbler_aim(const struct raw_client *raw)
{
    pthread_mutex_lock(&scribbler.lock);
    scribbler.raw = raw;
    pthread_mutex_unlock(&scribbler.lock);
}

/* --- the well-behaved one --------------------------------------------------------------------- */

static struct kvf_client *good_open(void)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    int status;

    kvf_options_init(&options);
    options.socket_path = the_socket;
    options.client_name = "neighbour";
    options.flags = KVF_ATTACH_SPIN;
    options.namespace_label = "neighbour";
    options.staging_bytes = 4 << 20;
    options.connect_timeout_ms = 60000; /* not part of what is measured */
    status = kvf_open(&options, &client);
    if (status != KVF_OK) {
        bench_die("the neighbour cannot attach: %s", kvf_status_text(status));
    }
    return client;
}

static void good_step(struct kvf_client *client, uint64_t n)
{
    static uint64_t payload[GOOD_BYTES / 8];
    uint64_t words[4] = {n % GOOD_KEYS, n / GOOD_KEYS, 0, 1};
    struct kvf_put_item item = {.struct_bytes = sizeof(item),
                                .source = KVF_SOURCE_BYTES,
                                .key = {words, sizeof(words)},
                                .data = payload,
                                .data_bytes = sizeof(payload)};
    struct kvf_hit hit = {.status = KVF_MISS};

    payload[n % (GOOD_BYTES / 8)] = n;
    (void)kvf_put(client, &item, 1, NULL, NULL);
    (void)kvf_get(client, &item.key, 1, NULL, &hit);
    if (hit.status == KVF_OK) {
        bench_keep((void *)(uintptr_t)bench_sum(hit.payload, GOOD_BYTES));
        (void)kvf_lease_release(client, hit.lease);
    }
}

/* --- the bad one ------------------------------------------------------------------------------ */

/* As far as WELCOME. False: the daemon refused, or lets it wait, which is its right: the next
 * attack follows. */
static bool say_hello(struct raw_client *raw, const struct kvf_wire_hello *hello)
{
    raw_connect(raw, the_socket);
    raw_send(raw, hello, sizeof(*hello), NULL, 0);
    if (raw_is_answered(raw, HANG_UP_MS) && raw_welcomed(raw)) {
        return true;
    }
    raw_close(raw);
    return false;
}

static bool begin(struct raw_client *raw, uint64_t staging_bytes)
{
    struct kvf_wire_hello hello;

    raw_hello(&hello);
    hello.staging_bytes = staging_bytes;
    return say_hello(raw, &hello);
}

static bool attach(struct raw_client *raw, uint64_t staging_bytes)
{
    if (!begin(raw, staging_bytes)) {
        return false;
    }
    if (raw_mapped(raw)) {
        return true;
    }
    raw_close(raw);
    return false;
}

static void submit_puts(struct raw_client *raw, uint64_t number)
{
    struct kvf_shm_key keys[KEYS_A_PUT];
    struct kvf_shm_sqe sqe;

    raw_sqe(raw, &sqe, KVF_OP_PUT, KEYS_A_PUT);
    for (uint32_t k = 0; k < KEYS_A_PUT; k++) {
        raw_key(&keys[k], number * KEYS_A_PUT + k);
        keys[k].stage_offset = k * RECORD_BYTES;
        keys[k].record_bytes = RECORD_BYTES;
    }
    raw_submit(raw, &sqe, keys, KEYS_A_PUT);
}

/* Its rings, key area and staging change while it puts. */
static void attack_scribble(void)
{
    struct raw_client raw;
    struct kvf_shm_cqe cqe;

    if (!attach(&raw, 1 << 20)) {
        return;
    }
    scribbler_aim(&raw);
    for (uint64_t i = 0; is_on() && !raw_is_hung_up(&raw, 0); i++) {
        if (kvf_ring_client_room(&raw.ring, KEYS_A_PUT) == KVF_OK) {
            submit_puts(&raw, i);
        }
        (void)kvf_ring_client_take(&raw.ring, &cqe);
    }
    scribbler_aim(NULL);
    raw_close(&raw);
}

/* Submissions and keys of random words that look like a request. */
static void attack_wild(void)
{
    for (uint32_t i = 0; i < WILD_PER_STEP; i++) {
        struct raw_client raw;
        struct kvf_shm_sqe sqe;
        struct kvf_shm_key key;
        uint64_t word = kvf_random_seeded_next(&the_random);

        if (!attach(&raw, 1 << 20)) {
            return;
        }
        raw_sqe(&raw, &sqe, (uint8_t)(word % 12), 1);
        raw_key(&key, word);
        key.record_bytes = word >> 20;
        key.stage_offset = word >> 8;
        sqe.n_keys = (uint16_t)(word >> 16);
        sqe.key_first = (uint32_t)(word >> 32);
        raw_submit(&raw, &sqe, &key, 1);
        __atomic_store_n(&raw.ring.indices->sq_tail.value, (uint32_t)word, __ATOMIC_RELEASE);
        raw_wake(&raw);
        (void)raw_is_hung_up(&raw, HANG_UP_MS);
        raw_close(&raw);
    }
}

/* A new namespace each time, descriptors where none are expected, messages cut short. */
static void attack_hello(void)
{
    int fds[4];

    for (int i = 0; i < 4; i++) {
        fds[i] = eventfd(0, EFD_CLOEXEC);
    }
    for (uint32_t i = 0; i < WILD_PER_STEP; i++) {
        uint64_t word = kvf_random_seeded_next(&the_random);
        struct kvf_wire_hello hello;
        struct raw_client raw;

        raw_hello(&hello);
        memcpy(hello.label, "n", 1);
        hello.label[1] = (char)('a' + word % 26);
        hello.label[2] = (char)('a' + word / 26 % 26);
        memcpy(hello.weights_digest, &word, sizeof(word));
        if (i % 2 == 0) {
            raw_connect(&raw, the_socket);
            raw_send(&raw, &hello, sizeof(hello) - word % 2, fds, (uint32_t)(1 + word % 4));
            (void)raw_is_hung_up(&raw, HANG_UP_MS);
            raw_close(&raw);
        } else if (say_hello(&raw, &hello)) {
            (void)raw_mapped(&raw);
            raw_close(&raw);
        }
    }
    for (int i = 0; i < 4; i++) {
        close(fds[i]);
    }
}

/* All memory that it can have, with holes in it when the daemon comes to use it. */
static void attack_holes(void)
{
    struct raw_client raw;

    if (!begin(&raw, LARGE_STAGING)) {
        return;
    }
    (void)fallocate(raw.staging_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, LARGE_STAGING);
    (void)fallocate(raw.ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096,
                    (off_t)raw.welcome.ring_bytes - 4096);
    if (raw_mapped(&raw)) {
        submit_puts(&raw, 1);
        (void)raw_is_hung_up(&raw, 1);
    }
    raw_close(&raw);
}

/* An eventfd that is blocking and full, and a socket that is never read. */
static void attack_eventfd(void)
{
    uint64_t most = UINT64_MAX - 1;
    struct raw_client raw;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe;

    if (!attach(&raw, 1 << 20)) {
        return;
    }
    if (write(raw.wake_fd, &most, sizeof(most)) != sizeof(most) ||
        fcntl(raw.wake_fd, F_SETFL, 0) != 0) {
        bench_die("an eventfd cannot be filled: %s", strerror(errno));
    }
    for (uint32_t i = 0; i < 64; i++) {
        __atomic_store_n(&raw.ring.indices->client_sleeping.value, 1, __ATOMIC_SEQ_CST);
        raw_sqe(&raw, &sqe, KVF_OP_STAT, 0);
        raw.ring.sq[raw.ring.sq_tail % raw.ring.sq_entries] = sqe;
        __atomic_store_n(&raw.ring.indices->sq_tail.value, ++raw.ring.sq_tail, __ATOMIC_RELEASE);
        (void)kvf_ring_client_take(&raw.ring, &cqe);
    }
    raw_close(&raw);
}

/* The most work that a right entry can ask for, again and again. */
static void attack_flood(void)
{
    static struct kvf_shm_key keys[KVF_REQUEST_KEYS_MAX];
    struct raw_client raw;
    struct kvf_shm_cqe cqe;
    uint16_t n;

    if (!attach(&raw, 1 << 20)) {
        return;
    }
    n = (uint16_t)(raw.ring.key_entries / 4 < KVF_REQUEST_KEYS_MAX ? raw.ring.key_entries / 4
                                                                   : KVF_REQUEST_KEYS_MAX);
    for (uint32_t k = 0; k < n; k++) {
        raw_key(&keys[k], k);
    }
    while (is_on() && !raw_is_hung_up(&raw, 0)) {
        struct kvf_shm_sqe sqe;

        raw_sqe(&raw, &sqe, KVF_OP_LOOKUP, n);
        if (kvf_ring_client_room(&raw.ring, n) == KVF_OK) {
            raw_submit(&raw, &sqe, keys, n);
        }
        (void)kvf_ring_client_take(&raw.ring, &cqe);
    }
    raw_close(&raw);
}

static void attack_storm(void)
{
    static struct raw_client raws[STORM];

    for (uint32_t i = 0; i < STORM; i++) {
        raw_connect(&raws[i], the_socket);
    }
    for (uint32_t i = 0; i < STORM; i++) {
        raw_close(&raws[i]);
    }
}

static void (*const attacks[])(void) = {
    attack_scribble, attack_wild,  attack_hello, attack_holes,
    attack_eventfd,  attack_flood, attack_storm,
};

/* --- the process ------------------------------------------------------------------------------ */

static void be_good(void)
{
    struct kvf_client *client = good_open();
    static uint64_t n_requests;

    while (atomic_load(&the_control->wanted) == HOSTILE_GOOD) {
        wait_for_phase();
        /* once begun to the end of the phase, as an attack */
        for (bool goes_on = is_due(); goes_on; goes_on = is_on()) {
            good_step(client, n_requests++);
        }
    }
    kvf_close(client);
}

/* One kind of attack again and again during a phase. */
static void be_bad(void)
{
    static uint64_t serial;

    while (atomic_load(&the_control->wanted) == HOSTILE_BAD) {
        wait_for_phase();
        do {
            atomic_fetch_add(&the_control->n_attacks, 1);
            attacks[serial % (sizeof(attacks) / sizeof(attacks[0]))]();
        } while (is_on());
        serial++;
    }
}

static void be(enum hostile_mode mode)
{
    atomic_store(&the_control->is_busy[mode], true);
    account_begin();
    atomic_store(&scribbler.is_on, true);
    if (mode == HOSTILE_GOOD) {
        be_good();
    } else {
        be_bad();
    }
    atomic_store(&scribbler.is_on, false);
    account_end(&the_control->accounts[mode]);
    atomic_store(&the_control->is_busy[mode], false);
}

static void run(enum hostile_mode mode)
{
    const struct timespec nap = {.tv_nsec = IDLE_NAP_NS};
    pthread_t thread;

    if (pthread_create(&thread, NULL, scribble, NULL) != 0) {
        bench_die("no thread: %s", strerror(errno));
    }
    for (;;) {
        uint32_t wanted = atomic_load(&the_control->wanted);

        if (wanted == HOSTILE_GONE) {
            return;
        }
        if (wanted == mode) {
            be(mode);
        } else {
            nanosleep(&nap, NULL);
        }
    }
}

pid_t hostile_load_start(const char *socket_path, struct hostile_control *control,
                         enum hostile_mode mode)
{
    pid_t parent = getpid();
    pid_t pid = fork();

    if (pid < 0) {
        bench_die("fork: %s", strerror(errno));
    }
    if (pid != 0) {
        return pid;
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(0);
    }
    the_socket = socket_path;
    the_control = control;
    kvf_random_seeded_init(&the_random, 1);
    run(mode);
    _exit(0);
}

static void wait_busy(struct hostile_control *control, enum hostile_mode mode, bool is_busy)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    uint64_t deadline_ns = kvf_now_ns() + 30 * KVF_NS_PER_S;

    while (atomic_load(&control->is_busy[mode]) != is_busy) {
        if (kvf_now_ns() > deadline_ns) {
            bench_die("the neighbour is gone");
        }
        nanosleep(&nap, NULL);
    }
}

void hostile_load_set(struct hostile_control *control, enum hostile_mode mode)
{
    atomic_store(&control->wanted, mode);
    for (enum hostile_mode other = HOSTILE_GOOD; other <= HOSTILE_BAD; other++) {
        wait_busy(control, other, other == mode);
    }
}

void hostile_load_end(pid_t pid, struct hostile_control *control)
{
    int wait_status;

    atomic_store(&control->wanted, HOSTILE_GONE);
    if (waitpid(pid, &wait_status, 0) != pid || wait_status != 0) {
        bench_die("the neighbour has failed");
    }
}
