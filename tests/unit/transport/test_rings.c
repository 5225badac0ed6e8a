/* SPDX-License-Identifier: Apache-2.0
 *
 * test_rings.c: both ends of the rings, alone, against each other in two threads, across the wrap
 * of the 32-bit indices, and against a peer that writes what cannot be.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "tests/support/support.h"
#include "transport/shm_ring.h"

struct pair {
    void *memory;
    struct kvf_shm_header header;
    struct kvf_ring_client client;
    struct kvf_ring_daemon daemon;
    struct kvf_shm_limits limits;
    struct kvf_shm_key keys[KVF_SHM_REQUEST_ENTRIES_MAX];
};

static void pair_init(struct pair *pair, uint32_t sq, uint32_t cq)
{
    memset(pair, 0, sizeof(*pair));
    assert_int_equal(kvf_shm_layout_init(&pair->header, sq, cq, 4096, 64), KVF_OK);
    pair->memory = aligned_alloc(4096, pair->header.segment_bytes);
    assert_non_null(pair->memory);
    memset(pair->memory, 0, pair->header.segment_bytes);
    kvf_ring_client_init(&pair->client, pair->memory, &pair->header);
    kvf_ring_daemon_init(&pair->daemon, pair->memory, &pair->header);
    pair->limits.staging_bytes = 1 << 20;
}

static void pair_fini(struct pair *pair)
{
    free(pair->memory);
}

/* All indices as after 2^32 - 3 entries. */
static void pair_age(struct pair *pair)
{
    uint32_t old = (uint32_t)-3;

    pair->client.sq_tail = pair->client.sq_head_seen = pair->daemon.sq_head = old;
    pair->client.key_tail = pair->client.key_head_seen = pair->daemon.key_head = old;
    pair->client.cq_head = pair->client.cq_tail_seen = old;
    pair->daemon.cq_tail = pair->daemon.cq_head_seen = pair->daemon.sq_tail_seen = old;
    pair->client.indices->sq_tail.value = pair->client.indices->sq_head.value = old;
    pair->client.indices->cq_tail.value = pair->client.indices->cq_head.value = old;
    pair->client.indices->key_head.value = old;
}

static int take(struct pair *pair, struct kvf_shm_sqe *sqe_out)
{
    const char *why = NULL;

    return kvf_ring_daemon_take(&pair->daemon, &pair->limits, sqe_out, pair->keys, &why);
}

static struct kvf_shm_key key_of(uint64_t number)
{
    struct kvf_shm_key key = {.key_bytes = 16};

    memcpy(key.key, &number, sizeof(number));
    return key;
}

static void push_get(struct pair *pair, uint64_t request, uint32_t n_keys)
{
    struct kvf_shm_sqe sqe = {
        .request = request,
        .opcode = KVF_OP_GET,
        .n_keys = (uint16_t)n_keys,
        .n_entries = (uint16_t)n_keys,
    };

    for (uint32_t i = 0; i < n_keys; i++) {
        struct kvf_shm_key key = key_of(request * 1000 + i);

        kvf_ring_client_key_put(&pair->client, i, &key);
    }
    kvf_ring_client_push(&pair->client, &sqe);
    kvf_ring_client_publish(&pair->client);
}

static void full_and_empty_are_told_apart(void **state)
{
    static struct pair pair;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe = {.request = 1, .kind = KVF_CQE_REQUEST};

    (void)state;
    for (uint32_t aged = 0; aged < 2; aged++) {
        pair_init(&pair, 4, 8);
        if (aged) {
            pair_age(&pair);
        }
        assert_int_equal(take(&pair, &sqe), KVF_EMPTY);
        assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_EMPTY);
        for (uint64_t round = 0; round < 3; round++) {
            for (uint64_t i = 1; i <= 4; i++) {
                assert_int_equal(kvf_ring_client_room(&pair.client, 1), KVF_OK);
                push_get(&pair, round * 10 + i, 1);
            }
            assert_int_equal(kvf_ring_client_room(&pair.client, 0), KVF_ERR_BUSY);
            for (uint64_t i = 1; i <= 4; i++) {
                assert_int_equal(take(&pair, &sqe), KVF_OK);
                assert_int_equal(sqe.request, round * 10 + i);
                assert_memory_equal(&pair.keys[0].key, &(uint64_t){sqe.request * 1000}, 8);
            }
            assert_int_equal(take(&pair, &sqe), KVF_EMPTY);
            assert_int_equal(pair.daemon.reserved, 8);
            for (uint64_t i = 0; i < 8; i++) {
                cqe.request = i + 1;
                kvf_ring_daemon_complete(&pair.daemon, &cqe);
            }
            assert_false(kvf_ring_client_ready(&pair.client)); /* not before it is published */
            kvf_ring_daemon_publish(&pair.daemon);
            for (uint64_t i = 0; i < 8; i++) {
                assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_OK);
                assert_int_equal(cqe.request, i + 1);
            }
            assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_EMPTY);
        }
        pair_fini(&pair);
    }
}

static void the_key_area_bounds_requests(void **state)
{
    static struct pair pair;
    struct kvf_shm_sqe sqe;

    (void)state;
    pair_init(&pair, 16, 8192);
    for (uint64_t i = 0; i < 4; i++) {
        assert_int_equal(kvf_ring_client_room(&pair.client, 1024), KVF_OK);
        push_get(&pair, i + 1, 1024);
    }
    assert_int_equal(kvf_ring_client_room(&pair.client, 1), KVF_ERR_BUSY);
    assert_int_equal(kvf_ring_client_room(&pair.client, 0), KVF_OK);
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    assert_int_equal(kvf_ring_client_room(&pair.client, 1024), KVF_OK);
    assert_int_equal(kvf_ring_client_room(&pair.client, 1025), KVF_ERR_BUSY);
    pair_fini(&pair);
}

static void impossible_indices_are_refused(void **state)
{
    static struct pair pair;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe;

    (void)state;
    pair_init(&pair, 4, 8);
    pair.client.indices->sq_tail.value = 5;
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL);
    pair.client.indices->sq_tail.value = UINT32_MAX;
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL);
    pair.client.indices->sq_tail.value = 0;
    pair.client.indices->cq_tail.value = 9;
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_ERR_PROTOCOL);
    pair.client.indices->cq_tail.value = 0;
    for (uint64_t i = 1; i <= 4; i++) {
        push_get(&pair, i, 1);
    }
    pair.client.indices->sq_head.value = 5; /* more than were ever there */
    assert_int_equal(kvf_ring_client_room(&pair.client, 1), KVF_ERR_PROTOCOL);
    pair_fini(&pair);
}

/* What has been found possible is taken as it was found; what comes next is judged again. */
static void an_index_is_judged_when_it_is_loaded(void **state)
{
    static struct pair pair;
    struct kvf_shm_cqe cqe = {.request = 1, .kind = KVF_CQE_REQUEST};
    struct kvf_shm_sqe sqe;

    (void)state;
    pair_init(&pair, 4, 8);
    push_get(&pair, 1, 1);
    push_get(&pair, 2, 1);
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    pair.client.indices->sq_tail.value = 7;
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    assert_int_equal(sqe.request, 2);
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL);
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL);
    for (uint32_t i = 0; i < 2; i++) {
        kvf_ring_daemon_complete(&pair.daemon, &cqe);
    }
    kvf_ring_daemon_publish(&pair.daemon);
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_OK);
    pair.daemon.indices->cq_tail.value = 11;
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_OK);
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_ERR_PROTOCOL);
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_ERR_PROTOCOL);
    pair_fini(&pair);
}

static void credits_are_enforced(void **state)
{
    static struct pair pair;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe = {.request = 1, .kind = KVF_CQE_BLOCK};

    (void)state;
    pair_init(&pair, 4, 8);
    push_get(&pair, 1, 7);
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    push_get(&pair, 2, 1);
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL); /* without credit */
    for (uint32_t i = 0; i < 8; i++) {
        kvf_ring_daemon_complete(&pair.daemon, &cqe);
    }
    kvf_ring_daemon_publish(&pair.daemon);
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL); /* written, but not consumed */
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_OK);
    assert_int_equal(kvf_ring_client_take(&pair.client, &cqe), KVF_OK);
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    push_get(&pair, 3, 4);
    pair.client.indices->cq_head.value = 9; /* claims to have read what was never written */
    assert_int_equal(take(&pair, &sqe), KVF_ERR_PROTOCOL);
    pair_fini(&pair);
}

static void breaches_are_not_consumed(void **state)
{
    static struct pair pair;
    struct kvf_shm_sqe sqe = {.request = 1, .opcode = KVF_OP_GET, .n_keys = 1, .n_entries = 1};
    const char *why = NULL;

    (void)state;
    pair_init(&pair, 4, 8);
    push_get(&pair, 1, 1);
    pair.client.keys[0].key_bytes = 3;
    assert_int_equal(kvf_ring_daemon_take(&pair.daemon, &pair.limits, &sqe, pair.keys, &why),
                     KVF_ERR_PROTOCOL);
    assert_string_equal(why, "key: key_bytes is out of range");
    pair.client.sq[0].key_first = 1;
    assert_int_equal(kvf_ring_daemon_take(&pair.daemon, &pair.limits, &sqe, pair.keys, &why),
                     KVF_ERR_PROTOCOL);
    assert_int_equal(pair.daemon.indices->sq_head.value, 0);
    assert_int_equal(pair.daemon.indices->key_head.value, 0);
    pair_fini(&pair);
}

static void sleepers_are_woken_once(void **state)
{
    static struct pair pair;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_sqe nop = {.request = 1, .opcode = KVF_OP_NOP};

    (void)state;
    pair_init(&pair, 16, 32);
    kvf_ring_client_push(&pair.client, &nop);
    assert_false(kvf_ring_client_publish(&pair.client)); /* it is awake */
    assert_false(kvf_ring_daemon_sleep(&pair.daemon));   /* there is work */
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    assert_true(kvf_ring_daemon_sleep(&pair.daemon));
    kvf_ring_client_push(&pair.client, &nop);
    assert_true(kvf_ring_client_publish(&pair.client));
    kvf_ring_client_push(&pair.client, &nop);
    assert_false(kvf_ring_client_publish(&pair.client)); /* a burst costs one wake-up */
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    kvf_ring_client_push(&pair.client, &nop);
    assert_false(kvf_ring_client_publish_calmly(&pair.client)); /* it is awake */
    assert_int_equal(take(&pair, &sqe), KVF_OK);
    assert_true(kvf_ring_daemon_sleep(&pair.daemon));
    kvf_ring_client_push(&pair.client, &nop);
    assert_true(kvf_ring_client_publish_calmly(&pair.client));
    kvf_ring_client_push(&pair.client, &nop);
    assert_false(kvf_ring_client_publish_calmly(&pair.client));
    assert_true(kvf_ring_client_sleep(&pair.client));
    kvf_ring_client_awake(&pair.client);
    assert_false(kvf_ring_daemon_publish(&pair.daemon));
    pair_fini(&pair);
}

/* ----------------------------------------------------------------------------------------------
 * Two threads
 */
#define STRESS_REQUESTS 60000

struct stress {
    struct pair pair;
    int daemon_event;
    int client_event;
    uint64_t seed;
    uint32_t lost_wakeups;
};

/* Sleep until woken. A wake-up that never comes is what the protocol must exclude, so the timeout
 * is far above anything a slow machine needs. */
static void wait_for(struct stress *stress, int event)
{
    struct pollfd one = {.fd = event, .events = POLLIN};
    uint64_t count;

    if (poll(&one, 1, 20000) != 1) {
        __atomic_fetch_add(&stress->lost_wakeups, 1, __ATOMIC_RELAXED);
    } else {
        (void)!read(event, &count, sizeof(count));
    }
}

static void wake(int event)
{
    uint64_t count = 1;

    (void)!write(event, &count, sizeof(count));
}

static void *stress_daemon(void *arg)
{
    struct stress *stress = arg;
    struct pair *pair = &stress->pair;
    uint64_t next = 1;

    while (next <= STRESS_REQUESTS && stress->lost_wakeups == 0) {
        struct kvf_shm_sqe sqe;
        const char *why = "";
        int status = kvf_ring_daemon_take(&pair->daemon, &pair->limits, &sqe, pair->keys, &why);

        if (status == KVF_EMPTY) {
            if (kvf_ring_daemon_sleep(&pair->daemon)) {
                wait_for(stress, stress->daemon_event);
                kvf_ring_daemon_awake(&pair->daemon);
            }
            continue;
        }
        if (status != KVF_OK || sqe.request != next) {
            return (void *)"a submission is wrong";
        }
        for (uint32_t i = 0; i < sqe.n_keys; i++) {
            struct kvf_shm_key want = key_of(next * 1000 + i);
            struct kvf_shm_cqe cqe = {
                .request = next, .kind = KVF_CQE_BLOCK, .index = i, .offset = next * 7 + i};

            if (memcmp(&want, &pair->keys[i], sizeof(want)) != 0) {
                return (void *)"a key is wrong";
            }
            kvf_ring_daemon_complete(&pair->daemon, &cqe);
        }
        kvf_ring_daemon_complete(&pair->daemon,
                                 &(struct kvf_shm_cqe){.request = next, .kind = KVF_CQE_REQUEST});
        if (kvf_ring_daemon_publish(&pair->daemon)) {
            wake(stress->client_event);
        }
        next++;
    }
    return NULL;
}

/* Take all completions. Returns how many; wrong ones fail the test. */
static uint32_t stress_reap(struct pair *pair, uint64_t *request, uint32_t *index)
{
    struct kvf_shm_cqe cqe;
    uint32_t n = 0;

    while (kvf_ring_client_take(&pair->client, &cqe) == KVF_OK) {
        assert_int_equal(cqe.request, *request);
        if (cqe.kind == KVF_CQE_BLOCK) {
            assert_int_equal(cqe.index, *index);
            assert_int_equal(cqe.offset, *request * 7 + *index);
            (*index)++;
        } else {
            (*request)++;
            *index = 0;
        }
        n++;
    }
    return n;
}

/* Small rings, random request sizes, both sides sleeping whenever they can, across the wrap. */
static void two_threads_lose_nothing(void **state)
{
    static struct stress stress;
    struct kvf_random_seeded random;
    pthread_t thread;
    uint64_t request = 1;
    uint32_t index = 0;
    uint32_t in_flight = 0;
    void *complaint = NULL;

    (void)state;
    stress.seed = kvf_test_seed();
    kvf_random_seeded_init(&random, stress.seed);
    pair_init(&stress.pair, 8, 32);
    pair_age(&stress.pair);
    stress.daemon_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    stress.client_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(pthread_create(&thread, NULL, stress_daemon, &stress), 0);
    for (uint64_t next = 1; request <= STRESS_REQUESTS && stress.lost_wakeups == 0;) {
        uint32_t n_keys = 1 + (uint32_t)(kvf_random_seeded_next(&random) % 12);

        while (next <= STRESS_REQUESTS && in_flight + n_keys + 1 <= 32 &&
               kvf_ring_client_room(&stress.pair.client, n_keys) == KVF_OK) {
            struct kvf_shm_sqe sqe = {.request = next,
                                      .opcode = KVF_OP_GET,
                                      .n_keys = (uint16_t)n_keys,
                                      .n_entries = (uint16_t)n_keys};

            for (uint32_t i = 0; i < n_keys; i++) {
                struct kvf_shm_key key = key_of(next * 1000 + i);

                kvf_ring_client_key_put(&stress.pair.client, i, &key);
            }
            kvf_ring_client_push(&stress.pair.client, &sqe);
            if (kvf_ring_client_publish(&stress.pair.client)) {
                wake(stress.daemon_event);
            }
            in_flight += n_keys + 1;
            next++;
        }
        in_flight -= stress_reap(&stress.pair, &request, &index);
        if (request <= STRESS_REQUESTS && in_flight > 0 &&
            kvf_ring_client_sleep(&stress.pair.client)) {
            wait_for(&stress, stress.client_event);
            kvf_ring_client_awake(&stress.pair.client);
        }
    }
    pthread_join(thread, &complaint);
    if (complaint != NULL) {
        fail_msg("%s", (const char *)complaint);
    }
    assert_int_equal(stress.lost_wakeups, 0);
    close(stress.daemon_event);
    close(stress.client_event);
    pair_fini(&stress.pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_and_empty_are_told_apart),
        cmocka_unit_test(the_key_area_bounds_requests),
        cmocka_unit_test(impossible_indices_are_refused),
        cmocka_unit_test(an_index_is_judged_when_it_is_loaded),
        cmocka_unit_test(credits_are_enforced),
        cmocka_unit_test(breaches_are_not_consumed),
        cmocka_unit_test(sleepers_are_woken_once),
        cmocka_unit_test(two_threads_lose_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
