/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_doors.c: strangers that connect to the ports of a network and say nothing, or half of
 * something: they are hung up on, and a link that is up does not notice.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "tests/support/support.h"
#include "transport/transport_ucx.h"

#define WAIT_MS   60000u
#define PORTS_MAX 8
#define STRANGERS 60

struct node {
    struct kvf_net *net;
    uint32_t ups, downs;
};

static struct node a, b; /* a listens, b connects */

static void nobody(void *ctx)
{
    (void)ctx; /* the test polls */
}

static void node_open(struct node *node, uint64_t incarnation, bool listens)
{
    struct kvf_net_config config = {.incarnation = incarnation,
                                    .name = "node",
                                    .heartbeat_ns = 100 * KVF_NS_PER_MS,
                                    .silence_ns = 60 * KVF_NS_PER_S,
                                    .retry_ns = 50 * KVF_NS_PER_MS,
                                    .wake = nobody};
    struct sockaddr_in *in = (void *)&config.listen.address;
    char why[256];

    memset(node, 0, sizeof(*node));
    memset(config.cluster_key, 7, sizeof(config.cluster_key));
    if (listens) {
        config.silence_ns = 2 * KVF_NS_PER_S; /* the other side's heartbeats are 20 in it */
        in->sin_family = AF_INET;
        in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        config.listen.bytes = sizeof(*in);
    }
    if (kvf_net_open(&config, &node->net, why, sizeof(why)) != KVF_OK) {
        fail_msg("%s", why);
    }
}

static void node_poll(struct node *node)
{
    struct kvf_net_event event;

    while (kvf_net_poll(node->net, &event)) {
        node->ups += event.kind == KVF_NET_EVENT_LINK_UP;
        node->downs += event.kind == KVF_NET_EVENT_LINK_DOWN;
        free(event.body);
    }
}

static bool are_up(void *arg)
{
    (void)arg;
    node_poll(&a);
    node_poll(&b);
    return a.ups > a.downs && b.ups > b.downs;
}

/* All ports of loopback on which this process listens. */
static uint32_t listened(uint16_t ports[PORTS_MAX])
{
    uint32_t n = 0;

    for (int fd = 0; fd < 512 && n < PORTS_MAX; fd++) {
        struct sockaddr_in at;
        socklen_t bytes = sizeof(at);
        int is = 0;

        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is, &(socklen_t){sizeof(is)}) == 0 && is &&
            getsockname(fd, (struct sockaddr *)&at, &bytes) == 0 && at.sin_family == AF_INET &&
            (at.sin_addr.s_addr == htonl(INADDR_LOOPBACK) || at.sin_addr.s_addr == 0)) {
            ports[n++] = ntohs(at.sin_port);
        }
    }
    return n;
}

/* Connections that have been taken at these ports. */
static uint32_t n_taken(const uint16_t *ports, uint32_t n_ports)
{
    uint32_t n = 0;

    for (int fd = 0; fd < 512; fd++) {
        struct sockaddr_in at;
        socklen_t bytes = sizeof(at);
        int is = 0;

        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is, &(socklen_t){sizeof(is)}) == 0 && !is &&
            getsockname(fd, (struct sockaddr *)&at, &bytes) == 0 && at.sin_family == AF_INET) {
            for (uint32_t i = 0; i < n_ports; i++) {
                n += ntohs(at.sin_port) == ports[i];
            }
        }
    }
    return n;
}

struct taken {
    uint16_t ports[PORTS_MAX];
    uint32_t n_ports, n_max;
};

static bool is_left(void *arg)
{
    const struct taken *taken = arg;

    node_poll(&a);
    node_poll(&b);
    return n_taken(taken->ports, taken->n_ports) <= taken->n_max;
}

static bool is_hung_up(void *arg)
{
    struct pollfd one = {.fd = *(int *)arg, .events = POLLIN | POLLRDHUP};

    node_poll(&a);
    node_poll(&b);
    return poll(&one, 1, 0) == 1 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

static _Atomic uint32_t n_said; /* connections that were hung up on */

static void hear_log(void *arg, int severity, const char *text)
{
    static const char end[] = " connections that say nothing";
    const char *at = strstr(text, end);

    (void)arg;
    (void)severity;
    if (at != NULL) {
        while (at > text && at[-1] >= '0' && at[-1] <= '9') {
            at--;
        }
        n_said += (uint32_t)strtoul(at, NULL, 10);
    }
}

static void test_silent_ones(void **state)
{
    static const uint64_t words[] = {0xcafebabe12345678, 40}; /* UCX's first, and a length */
    struct taken taken;
    uint16_t *ports = taken.ports;
    struct kvf_net_address to = {.bytes = sizeof(struct sockaddr_in)};
    struct sockaddr_in *in = (void *)&to.address;
    int fds[STRANGERS];
    uint32_t n_ports;

    (void)state;
    kvf_log_init(hear_log, NULL, KVF_LOG_INFO);
    node_open(&a, 1, true);
    n_ports = listened(ports);
    assert_true(n_ports >= 2); /* the listener's and one for data */
    node_open(&b, 2, false);
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    in->sin_port = htons(kvf_net_port(a.net));
    assert_int_equal(kvf_net_connect(b.net, &to, 1), KVF_OK);
    assert_true(kvf_test_wait_until(are_up, NULL, WAIT_MS));
    taken.n_ports = n_ports;
    taken.n_max = n_taken(ports, n_ports) + 2; /* the link's, some of which may be to come */
    for (uint32_t i = 0; i < STRANGERS; i++) {
        in->sin_port = htons(ports[i % n_ports]);
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(connect(fds[i], (const struct sockaddr *)in, sizeof(*in)), 0);
        if (i % 3 == 1) {
            (void)send(fds[i], &words[0], sizeof(words[0]), MSG_NOSIGNAL);
        } else if (i % 3 == 2) {
            (void)send(fds[i], &words[1], 3, MSG_NOSIGNAL);
        }
    }
    for (uint32_t i = 0; i < STRANGERS; i++) {
        if (!kvf_test_wait_until(is_hung_up, &fds[i], WAIT_MS)) {
            fail_msg("stranger %u, port %u, is still there", i, ports[i % n_ports]);
        }
    }
    /* their descriptors are given back, although they keep their ends */
    assert_true(kvf_test_wait_until(is_left, &taken, WAIT_MS));
    for (uint32_t i = 0; i < STRANGERS; i++) {
        close(fds[i]);
    }
    /* nothing of the link's was among them; a slow machine can have broken it, and it comes back */
    assert_in_range(n_said, 1, STRANGERS);
    assert_true(kvf_test_wait_until(are_up, NULL, WAIT_MS));
    kvf_net_close(b.net);
    kvf_net_close(a.net);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_silent_ones),
    };

    if (kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    (void)setenv("UCX_TLS", "tcp", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
