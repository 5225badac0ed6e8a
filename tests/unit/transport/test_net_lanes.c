/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_lanes.c: links of more than one endpoint: who uses which, what the loss of one costs,
 * sides that want different numbers of them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/random.h"
#include "tests/support/support.h"
#include "tests/unit/transport/net_pair.h"

#define NEVER   (3600 * KVF_NS_PER_S)
#define RECORDS 8
#define BYTES   (KVF_NET_PIECE_BYTES + 5000u)

static uint32_t endpoints_of(const struct node *node)
{
    struct kvf_net_stat stat;

    kvf_net_stat(node->net, &stat);
    return stat.endpoints;
}

static bool have_four(struct pair *pair)
{
    return endpoints_of(&pair->a) == 4 && endpoints_of(&pair->b) == 4;
}

static bool have_six(struct pair *pair)
{
    return endpoints_of(&pair->a) == 6 && endpoints_of(&pair->b) == 6;
}

static bool have_none(struct pair *pair)
{
    return endpoints_of(&pair->a) == 0 && endpoints_of(&pair->b) == 0;
}

static bool are_all_asked(struct pair *pair)
{
    return pair->a.n_serves == RECORDS;
}

static bool are_all_fetched(struct pair *pair)
{
    return pair->b.fetches_done == RECORDS;
}

static bool are_all_served(struct pair *pair)
{
    return pair->a.serves_done == RECORDS;
}

/* Records that b has asked for, all at once. */
struct crowd {
    uint8_t *from, *to;
    struct kvf_net_fetch fetches[RECORDS];
    struct kvf_net_serve serves[RECORDS];
};

static void crowd_ask(struct pair *pair, struct crowd *crowd)
{
    struct kvf_random_seeded random;

    memset(crowd, 0, sizeof(*crowd));
    crowd->from = malloc((size_t)RECORDS * BYTES);
    crowd->to = calloc(RECORDS, BYTES);
    assert_non_null(crowd->from);
    assert_non_null(crowd->to);
    kvf_random_seeded_init(&random, kvf_test_seed());
    kvf_random_seeded_ops.fill(&random, crowd->from, (size_t)RECORDS * BYTES);
    pair->a.n_serves = 0;
    pair->a.serves_done = 0;
    pair->b.fetches_done = 0;
    for (uint32_t i = 0; i < RECORDS; i++) {
        struct kvf_net_fetch *fetch = &crowd->fetches[i];

        *fetch = (struct kvf_net_fetch){.link = pair->b.link,
                                        .record = crowd->to + (size_t)i * BYTES,
                                        .record_bytes = BYTES,
                                        .deadline_ns = kvf_now_ns() + NEVER};
        fetch->key_id[0] = (uint8_t)i;
        assert_int_equal(kvf_net_fetch(pair->b.net, fetch), KVF_OK);
    }
    wait_for(pair, are_all_asked);
}

/* a answers; returns how many came: those have the right bytes. */
static uint32_t crowd_answer(struct pair *pair, struct crowd *crowd)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < RECORDS; i++) {
        const struct kvf_net_event *event = &pair->a.serves[i];

        crowd->serves[i] = (struct kvf_net_serve){
            .link = event->link,
            .lane = event->lane,
            .request = event->request,
            .status = KVF_OK,
            .record = crowd->from + (size_t)event->key_id[0] * BYTES,
            .record_bytes = BYTES,
        };
        assert_int_equal(kvf_net_serve(pair->a.net, &crowd->serves[i]), KVF_OK);
    }
    wait_for(pair, are_all_fetched);
    wait_for(pair, are_all_served);
    for (uint32_t i = 0; i < RECORDS; i++) {
        if (crowd->fetches[i].status == KVF_OK) {
            assert_memory_equal(crowd->to + (size_t)i * BYTES, crowd->from + (size_t)i * BYTES,
                                BYTES);
            n++;
        } else {
            assert_int_equal(crowd->fetches[i].status, KVF_ERR_DISCONNECTED);
        }
    }
    free(crowd->from);
    free(crowd->to);
    return n;
}

static uint32_t count_lanes(const struct node *node)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < RECORDS; i++) {
        bool is_new = true;

        for (uint32_t k = 0; k < i; k++) {
            is_new = is_new && node->serves[k].lane != node->serves[i].lane;
        }
        assert_true(node->serves[i].link == node->link); /* the owner knows of one link */
        n += is_new;
    }
    return n;
}

/* Requests go over all endpoints of a link, of which each side has as many as it wants. */
static void test_endpoints(void **state)
{
    struct pair pair;
    struct crowd crowd;

    (void)state;
    memset(&pair, 0, sizeof(pair));
    node_open_with(&pair.a, 1, 7, true, 2);
    node_open_with(&pair.b, 2, 7, true, 4);
    assert_int_equal(kvf_net_connect(pair.b.net, &pair.a.at, 1), KVF_OK);
    wait_for(&pair, have_four);
    assert_int_equal(pair.a.ups, 1);
    assert_int_equal(pair.b.ups, 1);
    crowd_ask(&pair, &crowd);
    assert_int_equal(count_lanes(&pair.a), 4);
    assert_int_equal(crowd_answer(&pair, &crowd), RECORDS);
    assert_int_equal(kvf_net_connect(pair.a.net, &pair.b.at, 1), KVF_OK);
    wait_for(&pair, have_six);
    /* none of them outlives the link */
    assert_int_equal(kvf_net_connect(pair.b.net, NULL, 0), KVF_OK);
    assert_int_equal(kvf_net_connect(pair.a.net, NULL, 0), KVF_OK);
    wait_for(&pair, have_none);
    pair_close(&pair);
}

/* Shut one of the connections over which UCX moves data; both ends are in this process. */
static void cut_one(const struct pair *pair, uint32_t which)
{
    uint16_t listens = kvf_net_port(pair->a.net);
    int fds[64];
    uint32_t n = 0;

    for (int fd = 0; fd < 1024 && n < 64; fd++) {
        struct sockaddr_in here = {0}, there = {0};
        socklen_t here_bytes = sizeof(here), there_bytes = sizeof(there);
        struct tcp_info info;

        if (getsockname(fd, (struct sockaddr *)&here, &here_bytes) == 0 &&
            getpeername(fd, (struct sockaddr *)&there, &there_bytes) == 0 &&
            here.sin_family == AF_INET && ntohs(here.sin_port) != listens &&
            ntohs(there.sin_port) != listens &&
            getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof(info)}) == 0 &&
            info.tcpi_state == TCP_ESTABLISHED) { /* not one that was shut before */
            fds[n++] = fd;
        }
    }
    assert_true(n >= 4);
    assert_int_equal(shutdown(fds[which % n], SHUT_RDWR), 0);
}

/* One connection breaks: what was asked over it fails, all else goes on, and it is made again. */
static void test_endpoint_loss(void **state)
{
    struct pair pair;
    struct crowd crowd;
    uint32_t n, n_alone = 0;

    (void)state;
    memset(&pair, 0, sizeof(pair));
    node_open_with(&pair.a, 1, 7, true, 1);
    node_open_with(&pair.b, 2, 7, false, 4);
    assert_int_equal(kvf_net_connect(pair.b.net, &pair.a.at, 1), KVF_OK);
    for (uint32_t round = 0; round < 6; round++) {
        wait_for(&pair, have_four);
        crowd_ask(&pair, &crowd);
        assert_int_equal(count_lanes(&pair.a), 4);
        cut_one(&pair, round);
        wait_for(&pair, has_fetched);
        n = crowd_answer(&pair, &crowd);
        assert_true(n == RECORDS / 4 * 3 || n == 0); /* 0: it was the link's first */
        n_alone += n > 0;
    }
    assert_true(n_alone > 0);
    pair_close(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_endpoints),
        cmocka_unit_test(test_endpoint_loss),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
