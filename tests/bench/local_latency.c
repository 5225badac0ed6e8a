/* SPDX-License-Identifier: Apache-2.0
 *
 * local_latency.c: how long one get takes, beside the least that a round trip costs.
 *
 * Client and daemon have a CPU each, and so have the two ends of what they are compared with. A get
 * is timed from the call to its return; giving the lease back comes after that.
 *
 *   spinning   both ends look at memory until something is there. The daemon does so for a while
 *              after each request.
 *   sleeping   between two round trips this side computes for a while, so that the other one has
 *              gone to sleep: each round trip wakes the other side, then this one.
 */
#include "tests/bench/local.h"

#include "base/clock.h"
#include "base/ring.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SAMPLES_MAX (1u << 20)
#define ASLEEP_NS   (200 * KVF_NS_PER_US) /* well above the time for which the daemon spins */
#define ENTRY_BYTES 64

struct latency {
    struct local *local;
    struct kvf_client *spinning;
    uint64_t *samples_ns;
    struct kvf_ring there, back;
    _Atomic bool is_over;
    pid_t sleeper_pid;
    int there_fd; /* eventfd */
    int back_fd;  /* our end of a socket */
};

static struct latency latency;

/* Round trips for some seconds: the median in microseconds. A round trip says how long it took. */
static double median_us(uint64_t (*round_trip)(void), double seconds, uint64_t pause_ns)
{
    uint64_t end_ns = kvf_now_ns() + (uint64_t)(seconds * 1e9);
    uint64_t n = 0;

    while (n < SAMPLES_MAX && (n == 0 || kvf_now_ns() < end_ns)) {
        uint64_t paused_ns = kvf_now_ns() + pause_ns;

        while (kvf_now_ns() < paused_ns) {
        }
        latency.samples_ns[n++] = round_trip();
    }
    return (double)bench_median(latency.samples_ns, n) / 1e3;
}

/* --- gets ------------------------------------------------------------------------------------- */

static uint64_t get_by(struct kvf_client *client)
{
    static uint64_t serial;
    struct local_key bytes;
    struct kvf_key key = local_key(latency.local->order[serial++ % latency.local->n_blocks],
                                   &bytes);
    struct kvf_hit hit;
    uint64_t begin_ns = kvf_now_ns();
    int status = kvf_get(client, &key, 1, NULL, &hit);
    uint64_t elapsed_ns = kvf_now_ns() - begin_ns;

    if (status != KVF_OK) {
        bench_die("get: %s", kvf_status_text(status));
    }
    if (kvf_lease_release(client, hit.lease) != KVF_OK) {
        bench_die("a lease was lost");
    }
    return elapsed_ns;
}

static uint64_t get_spinning(void)
{
    return get_by(latency.spinning);
}

static uint64_t get_sleeping(void)
{
    return get_by(latency.local->client);
}

static double p50_spin(void *ctx, double seconds)
{
    (void)ctx;
    return median_us(get_spinning, seconds, 0);
}

static double p50_sleep(void *ctx, double seconds)
{
    (void)ctx;
    return median_us(get_sleeping, seconds, ASLEEP_NS);
}

/* --- two rings and two threads ---------------------------------------------------------------- */

static void *echo_ring(void *arg)
{
    unsigned char entry[ENTRY_BYTES];

    (void)arg;
    bench_pin(0, bench_cpu(1));
    while (!atomic_load_explicit(&latency.is_over, memory_order_relaxed)) {
        if (kvf_ring_pop(&latency.there, entry)) {
            (void)kvf_ring_push(&latency.back, entry); /* one is under way: there is room */
        }
    }
    return NULL;
}

static uint64_t ring_round_trip(void)
{
    unsigned char entry[ENTRY_BYTES] = {0};
    uint64_t begin_ns = kvf_now_ns();

    (void)kvf_ring_push(&latency.there, entry);
    while (!kvf_ring_pop(&latency.back, entry)) {
    }
    return kvf_now_ns() - begin_ns;
}

static double p50_ring(void *ctx, double seconds)
{
    pthread_t thread;
    double result_us;

    (void)ctx;
    atomic_store(&latency.is_over, false);
    if (pthread_create(&thread, NULL, echo_ring, NULL) != 0) {
        bench_die("no second thread");
    }
    (void)ring_round_trip(); /* the thread runs */
    result_us = median_us(ring_round_trip, seconds, 0);
    atomic_store(&latency.is_over, true);
    pthread_join(thread, NULL);
    return result_us;
}

/* --- an eventfd, a socket and two processes --------------------------------------------------- */

static void echo_asleep(int there_fd, int back_fd)
{
    uint64_t count;
    char byte = 0;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    bench_pin(0, bench_cpu(1));
    while (read(there_fd, &count, sizeof(count)) == sizeof(count)) {
        if (write(back_fd, &byte, 1) != 1) {
            break;
        }
    }
}

static void start_sleeper(void)
{
    int sockets[2];

    latency.there_fd = eventfd(0, EFD_CLOEXEC);
    if (latency.there_fd < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
        bench_die("eventfd or socketpair: %s", strerror(errno));
    }
    latency.sleeper_pid = fork();
    if (latency.sleeper_pid < 0) {
        bench_die("fork: %s", strerror(errno));
    }
    if (latency.sleeper_pid == 0) {
        echo_asleep(latency.there_fd, sockets[1]);
        _exit(0);
    }
    close(sockets[1]);
    latency.back_fd = sockets[0];
}

static void stop_sleeper(void)
{
    (void)kill(latency.sleeper_pid, SIGKILL);
    (void)waitpid(latency.sleeper_pid, NULL, 0);
    close(latency.there_fd);
    close(latency.back_fd);
}

static uint64_t wake_round_trip(void)
{
    uint64_t one = 1;
    char byte;
    uint64_t begin_ns = kvf_now_ns();

    if (write(latency.there_fd, &one, sizeof(one)) != sizeof(one) ||
        read(latency.back_fd, &byte, 1) != 1) {
        bench_die("the other side of the wake-up is gone");
    }
    return kvf_now_ns() - begin_ns;
}

static double p50_wake(void *ctx, double seconds)
{
    (void)ctx;
    return median_us(wake_round_trip, seconds, ASLEEP_NS);
}

/* --- all of it -------------------------------------------------------------------------------- */

void local_latency(struct local *local)
{
    static const char why[] = "one CPU: each round trip is a change of threads on it";

    if (!local_place(local, true)) {
        bench_print_skip("get_p50_spin_vs_ring", why);
        bench_print_skip("get_p50_vs_wake", why);
        return;
    }
    latency.local = local;
    latency.samples_ns = bench_memory(SAMPLES_MAX * sizeof(*latency.samples_ns), 0);
    latency.spinning = local_open(local, KVF_ATTACH_SPIN, 0);
    local_order_restart(local);
    if (kvf_ring_init(&latency.there, ENTRY_BYTES, 16) != KVF_OK ||
        kvf_ring_init(&latency.back, ENTRY_BYTES, 16) != KVF_OK) {
        bench_die("no memory for rings");
    }
    bench_pairs(&local->run, "get_p50_spin_vs_ring", p50_spin, p50_ring, NULL);
    start_sleeper();
    bench_pairs(&local->run, "get_p50_vs_wake", p50_sleep, p50_wake, NULL);
    stop_sleeper();

    kvf_ring_fini(&latency.there);
    kvf_ring_fini(&latency.back);
    kvf_close(latency.spinning);
    bench_memory_free(latency.samples_ns, SAMPLES_MAX * sizeof(*latency.samples_ns));
    (void)local_place(local, false);
}
