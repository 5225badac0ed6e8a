/* SPDX-License-Identifier: Apache-2.0
 *
 * test_offence.c: processes that break the protocol wait before they attach again, and nobody else
 * does. The clock is the test's, the reactor is turned by it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "agent/core.h"
#include "agent/peers.h"
#include "tests/fault/raw_client.h"
#include "tests/support/support.h"

#define MS KVF_NS_PER_MS

/* ---- the table ------------------------------------------------------------------------------- */

static void test_delay_doubles_and_halves(void **state)
{
    static const uint64_t delays_ms[] = {50, 100, 200, 400, 800, 1000, 1000};
    struct kvf_offenders offenders = {.delay_max_ns = 1000 * MS};
    uint64_t now_ns = 5000 * MS;

    (void)state;
    assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), 0);
    for (size_t i = 0; i < sizeof(delays_ms) / sizeof(delays_ms[0]); i++) {
        kvf_offence_note(&offenders, 7, now_ns);
        assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), now_ns + delays_ms[i] * MS);
        assert_int_equal(kvf_offence_until_ns(&offenders, 8, now_ns), 0);
        now_ns += delays_ms[i] * MS;
        assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), 0);
    }
    now_ns += 2000 * MS; /* clean for two seconds: 250 ms are left of its delay */
    kvf_offence_note(&offenders, 7, now_ns);
    assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), now_ns + 500 * MS);
    now_ns += (500 + 4000) * MS; /* nothing */
    kvf_offence_attach(&offenders, 7, now_ns);
    assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), 0);
    kvf_offence_note(&offenders, 7, now_ns);
    assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), now_ns + 50 * MS);
}

/* Several clients of an offender come one after the other. */
static void test_attach_is_paced(void **state)
{
    struct kvf_offenders offenders = {.delay_max_ns = 1000 * MS};
    uint64_t now_ns = 5000 * MS;

    (void)state;
    kvf_offence_attach(&offenders, 7, now_ns); /* no offender: no pace */
    assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), 0);
    kvf_offence_note(&offenders, 7, now_ns);
    for (int i = 0; i < 3; i++) {
        now_ns += 50 * MS;
        assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), 0);
        kvf_offence_attach(&offenders, 7, now_ns);
        assert_int_equal(kvf_offence_until_ns(&offenders, 7, now_ns), now_ns + 50 * MS);
    }
}

static void test_nobody_else(void **state)
{
    struct kvf_offenders offenders = {.delay_max_ns = 1000 * MS};
    struct kvf_offenders off = {.delay_max_ns = 0};
    uint64_t now_ns = 5000 * MS;

    (void)state;
    kvf_offence_note(&offenders, 0, now_ns); /* cannot be told from others */
    assert_int_equal(kvf_offence_until_ns(&offenders, 0, now_ns), 0);
    kvf_offence_note(&off, 7, now_ns);
    assert_int_equal(kvf_offence_until_ns(&off, 7, now_ns), 0);
    /* one more than there is room for: the one that has been clean for longest is forgotten */
    for (uint64_t peer = 1; peer <= KVF_OFFENDERS_LOCAL_MAX + 1; peer++) {
        kvf_offence_note(&offenders, peer, now_ns + peer);
    }
    now_ns += KVF_OFFENDERS_LOCAL_MAX + 1;
    for (uint64_t peer = 1; peer <= KVF_OFFENDERS_LOCAL_MAX + 1; peer++) {
        assert_int_equal(kvf_offence_until_ns(&offenders, peer, now_ns) != 0, peer != 1);
    }
}

/* Clients of other nodes are remembered by tenant, and push no process of this node out. */
static void test_remote_ones_apart(void **state)
{
    struct kvf_offenders offenders = {.delay_max_ns = 1000 * MS};
    uint64_t now_ns = 5000 * MS;

    (void)state;
    kvf_offence_note(&offenders, 1, now_ns);
    for (uint32_t tenant = 0; tenant < KVF_OFFENDERS_TENANTS_MAX; tenant++) {
        kvf_offence_note(&offenders, kvf_offence_remote(tenant, 0), now_ns + 1);
    }
    for (uint64_t peer = 2; peer <= KVF_OFFENDERS_LOCAL_MAX; peer++) {
        kvf_offence_note(&offenders, peer, now_ns + 2);
    }
    for (uint64_t peer = 1; peer <= KVF_OFFENDERS_LOCAL_MAX; peer++) {
        assert_int_not_equal(kvf_offence_until_ns(&offenders, peer, now_ns + 2), 0);
    }
    for (uint32_t tenant = 0; tenant < KVF_OFFENDERS_TENANTS_MAX; tenant++) {
        assert_int_not_equal(
            kvf_offence_until_ns(&offenders, kvf_offence_remote(tenant, 0), now_ns + 2), 0);
    }
}

/* Those of one address wait, others of the tenant do not, until too many addresses have offended;
 * another tenant never does. */
static void test_remote_addresses(void **state)
{
    struct kvf_offenders offenders = {.delay_max_ns = 1000 * MS};
    uint64_t now_ns = 5000 * MS;

    (void)state;
    for (uint64_t address = 1; address <= KVF_OFFENDERS_ADDRESSES_MAX; address++) {
        assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, address), now_ns),
                         0);
        kvf_offence_note(&offenders, kvf_offence_remote(3, address), now_ns);
        assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, address), now_ns),
                         now_ns + KVF_OFFENCE_DELAY_MS * MS);
        assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 77), now_ns), 0);
        assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(4, address), now_ns),
                         0);
    }
    kvf_offence_note(&offenders, kvf_offence_remote(3, 66), now_ns);
    assert_int_not_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 77), now_ns), 0);
    assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(2, 77), now_ns), 0);
    assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(4, 77), now_ns), 0);
    /* all of them make one attach a delay */
    now_ns += KVF_OFFENCE_DELAY_MS * MS;
    assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 77), now_ns), 0);
    kvf_offence_attach(&offenders, kvf_offence_remote(3, 77), now_ns);
    assert_int_not_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 78), now_ns), 0);
    /* later, places are free again */
    now_ns += 60000 * MS;
    kvf_offence_attach(&offenders, kvf_offence_remote(3, 77), now_ns);
    assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 78), now_ns), 0);
    kvf_offence_note(&offenders, kvf_offence_remote(3, 66), now_ns);
    assert_int_not_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 66), now_ns), 0);
    assert_int_equal(kvf_offence_until_ns(&offenders, kvf_offence_remote(3, 78), now_ns), 0);
    /* an address is no tenant, however large */
    kvf_offence_note(&offenders, kvf_offence_remote(15, UINT64_MAX), now_ns);
    assert_int_not_equal(
        kvf_offence_until_ns(&offenders, kvf_offence_remote(15, UINT64_MAX), now_ns), 0);
    assert_int_equal(kvf_offence_until_ns(&offenders, UINT64_MAX >> 1, now_ns), 0);
}

/* ---- sockets --------------------------------------------------------------------------------- */

static struct {
    struct kvf_test_dir dir;
    struct kvf_test_clock clock;
    struct kvf_random_seeded random;
    struct kvf_config config;
    struct kvf_agent *agent;
} bed;

static int bed_open(void **state)
{
    struct kvf_config_error error = {{0}};
    struct kvf_agent_ports ports;
    char yaml[KVF_TEST_PATH_BYTES + 100];

    (void)state;
    kvf_test_dir_create(&bed.dir);
    bed.clock = (struct kvf_test_clock){.now_ns = KVF_NS_PER_S, .wall_s = 1};
    kvf_random_seeded_init(&bed.random, 1);
    ports = (struct kvf_agent_ports){.env = kvf_test_env(&bed.clock, &bed.random)};
    snprintf(yaml, sizeof(yaml), "sockets: [{path: %s/socket}]\ndram: {bytes: 16MiB}\n",
             bed.dir.path);
    kvf_config_init(&bed.config);
    assert_int_equal(kvf_config_parse(&bed.config, "test", yaml, strlen(yaml), &error), KVF_OK);
    assert_int_equal(kvf_config_finish(&bed.config, &error), KVF_OK);
    return kvf_agent_create_ported(&bed.config, &ports, &bed.agent);
}

static int bed_close(void **state)
{
    (void)state;
    kvf_agent_destroy(bed.agent);
    kvf_test_dir_remove(&bed.dir);
    return 0;
}

static void turn(void)
{
    int status;

    assert_true(kvf_agent_turn(bed.agent, &status));
}

static void pass_ms(uint64_t ms)
{
    bed.clock.now_ns += ms * MS;
    turn();
    turn(); /* what the first one has begun to look at */
}

/* A client of a process that has said HELLO. */
static int client_open(uint64_t peer)
{
    struct kvf_wire_hello hello;
    int fds[2];

    raw_hello(&hello);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(kvf_seqpacket_send(fds[1], &hello, sizeof(hello), NULL, 0), KVF_OK);
    (void)kvf_agent_adopt(bed.agent, 0, fds[0], peer);
    return fds[1];
}

/* What the daemon has answered: a status, or KVF_EMPTY. */
static int answer_of(int fd)
{
    struct kvf_wire_welcome welcome;
    struct kvf_seqpacket_message message;
    int status = kvf_seqpacket_recv(fd, &welcome, sizeof(welcome), &message);

    if (status != KVF_OK) {
        return status;
    }
    kvf_seqpacket_message_close(&message);
    assert_int_equal(welcome.head.type, KVF_WIRE_WELCOME);
    return welcome.status;
}

/* Until a worker has made its memory. */
static void assert_welcome(int fd)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    int status;

    while ((status = answer_of(fd)) == KVF_EMPTY) {
        turn();
        nanosleep(&pause, NULL);
    }
    assert_int_equal(status, KVF_OK);
}

static bool is_untouched(int fd)
{
    return answer_of(fd) == KVF_EMPTY && bed.agent->sessions_count > 0;
}

/* One of another node, which says that it is this process. */
static int remote_open(uint64_t incarnation)
{
    struct kvf_peers *peers = calloc(1, sizeof(*peers));
    struct kvf_net_event event = {.kind = KVF_NET_EVENT_CLIENT, .incarnation = incarnation};
    struct kvf_wire_hello hello;
    int fds[2];

    assert_non_null(peers);
    peers->agent = bed.agent;
    raw_hello(&hello);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(kvf_seqpacket_send(fds[1], &hello, sizeof(hello), NULL, 0), KVF_OK);
    event.fd = fds[0];
    snprintf(event.name, sizeof(event.name), "%s", bed.agent->tenants[0].name);
    kvf_peers_client(peers, &event);
    free(peers);
    return fds[1];
}

static void break_protocol(int fd)
{
    uint64_t before = bed.agent->metrics.protocol_errors;

    (void)kvf_seqpacket_send(fd, "xx", 2, NULL, 0);
    while (bed.agent->metrics.protocol_errors == before) {
        turn();
    }
    close(fd);
}

static void offend(uint64_t peer)
{
    break_protocol(client_open(peer));
}

static uint32_t held_sockets(void)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < bed.agent->sessions_high; i++) {
        n += bed.agent->sessions[i].state == KVF_SESSION_HELLO &&
             bed.agent->sessions[i].held_until_ns != 0;
    }
    return n;
}

static uint32_t clients_making_memory(void)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < bed.agent->sessions_high; i++) {
        n += bed.agent->sessions[i].state == KVF_SESSION_PREPARING ||
             bed.agent->sessions[i].state == KVF_SESSION_MAPPING;
    }
    return n;
}

static void test_offender_waits(void **state)
{
    int held, other;

    (void)state;
    offend(5);
    held = client_open(5);
    pass_ms(49);
    assert_true(is_untouched(held));
    assert_int_equal(clients_making_memory(), 0);
    other = client_open(6); /* another process, at the same moment */
    assert_welcome(other);
    assert_true(is_untouched(held));
    close(other);
    other = client_open(0); /* and one that cannot be told from others */
    assert_welcome(other);
    close(other);
    assert_int_equal(bed.agent->metrics.attach_delayed, 1);
    pass_ms(1);
    assert_welcome(held);
    close(held);
}

/* Another name of its process helps a client of another node nothing, and touches no other one. */
static void test_remote_offender_waits(void **state)
{
    int held, other;

    (void)state;
    offend(5);
    for (uint64_t i = 0; i < 40; i++) {
        break_protocol(remote_open(1000 + i));
        pass_ms(1000);
    }
    break_protocol(remote_open(2000));
    held = remote_open(2001);
    pass_ms(49);
    assert_true(is_untouched(held));
    other = client_open(6);
    assert_welcome(other);
    close(other);
    assert_int_equal(bed.agent->metrics.attach_delayed, 1);
    assert_int_equal(bed.agent->offenders.offenders[0].peer, 5);
    pass_ms(1000);
    assert_welcome(held);
    close(held);
}

/* Sockets that wait are few, of one process and of all; those whose clients have gone make room. */
static void test_few_sockets_wait(void **state)
{
    int fds[4][4];
    int fd;

    (void)state;
    for (uint32_t peer = 0; peer < 4; peer++) {
        offend(5 + peer);
        for (int i = 0; i < 4; i++) {
            fds[peer][i] = client_open(5 + peer);
            assert_int_equal(answer_of(fds[peer][i]), KVF_EMPTY);
        }
        fd = client_open(5 + peer);
        assert_int_equal(answer_of(fd), KVF_ERR_BUSY);
        close(fd);
    }
    assert_int_equal(held_sockets(), 16);
    offend(9);
    fd = client_open(9);
    assert_int_equal(answer_of(fd), KVF_ERR_BUSY);
    close(fd);
    close(fds[0][0]);
    fds[0][0] = client_open(5);
    assert_int_equal(answer_of(fds[0][0]), KVF_EMPTY);
    close(fds[1][0]);
    fds[1][0] = client_open(9); /* in the place of another's */
    assert_int_equal(answer_of(fds[1][0]), KVF_EMPTY);
    assert_int_equal(held_sockets(), 16);
    for (uint32_t peer = 0; peer < 4; peer++) {
        for (int i = 0; i < 4; i++) {
            close(fds[peer][i]);
        }
    }
}

/* Nobody who waits is a second offence, however long the delay. */
static void test_waiting_is_no_offence(void **state)
{
    uint64_t errors;
    int held;

    (void)state;
    for (int i = 0; i < 8; i++) {
        offend(5);
        pass_ms(1000);
    }
    errors = bed.agent->metrics.protocol_errors;
    offend(5);
    held = client_open(5);
    pass_ms(999);
    assert_true(is_untouched(held));
    pass_ms(1);
    assert_welcome(held);
    assert_int_equal(bed.agent->metrics.protocol_errors, errors + 1);
    close(held);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_delay_doubles_and_halves),
        cmocka_unit_test(test_attach_is_paced),
        cmocka_unit_test(test_nobody_else),
        cmocka_unit_test(test_remote_ones_apart),
        cmocka_unit_test(test_remote_addresses),
        cmocka_unit_test_setup_teardown(test_offender_waits, bed_open, bed_close),
        cmocka_unit_test_setup_teardown(test_remote_offender_waits, bed_open, bed_close),
        cmocka_unit_test_setup_teardown(test_few_sockets_wait, bed_open, bed_close),
        cmocka_unit_test_setup_teardown(test_waiting_is_no_offence, bed_open, bed_close),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
