/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_proto.c: what may stand in a message between nodes, byte by byte; MACs; numbers that
 * come again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/hash.h"
#include "transport/net_proto.h"
#include "transport/proto.h"

static struct kvf_net_head head_of(uint8_t type, uint32_t body_bytes)
{
    bool is_acceptors = type == KVF_NET_WELCOME || type == KVF_NET_ANSWER ||
                        type == KVF_NET_PIECE || type == KVF_NET_SNAPSHOT || type == KVF_NET_EVENTS;
    bool is_of_request = type == KVF_NET_FETCH || type == KVF_NET_ANSWER || type == KVF_NET_PIECE ||
                         type == KVF_NET_CANCEL;

    return (struct kvf_net_head){.magic = KVF_NET_MAGIC,
                                 .version = 1,
                                 .type = type,
                                 .flags = is_acceptors ? KVF_NET_FROM_ACCEPTOR : 0,
                                 .incarnation = 1,
                                 .sequence = 1,
                                 .request = is_of_request ? 9 : 0,
                                 .body_bytes = body_bytes};
}

static int check_head(const struct kvf_net_head *head, size_t bytes)
{
    const char *why = NULL;
    int status = kvf_net_head_check(head, bytes, (head->flags & KVF_NET_FROM_ACCEPTOR) != 0, &why);

    assert_true((status == KVF_OK) == (why == NULL));
    return status;
}

static void test_heads(void **state)
{
    static const struct {
        uint8_t type;
        uint32_t bytes;
    } types[] = {
        {KVF_NET_HELLO, sizeof(struct kvf_net_hello)},
        {KVF_NET_WELCOME, sizeof(struct kvf_net_welcome)},
        {KVF_NET_CONFIRM, 0},
        {KVF_NET_HEARTBEAT, 0},
        {KVF_NET_BYE, sizeof(struct kvf_net_status_body)},
        {KVF_NET_FETCH, sizeof(struct kvf_net_fetch_body)},
        {KVF_NET_ANSWER, sizeof(struct kvf_net_status_body)},
        {KVF_NET_PIECE, KVF_NET_PIECE_BYTES},
        {KVF_NET_CREDIT, 0},
        {KVF_NET_CANCEL, 0},
        {KVF_NET_SNAPSHOT, sizeof(struct kvf_net_blocks)},
        {KVF_NET_EVENTS, KVF_NET_BODY_BYTES_MAX},
        {KVF_NET_RESYNC, 0},
        {KVF_NET_ENDPOINT, sizeof(struct kvf_net_hello)},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        const struct kvf_net_head right = head_of(types[i].type, types[i].bytes);
        struct kvf_net_head head = right;

        assert_int_equal(check_head(&head, types[i].bytes), KVF_OK);
        assert_int_equal(check_head(&head, types[i].bytes + 1), KVF_ERR_PROTOCOL);
        head.body_bytes = types[i].bytes + KVF_NET_PIECE_BYTES + 1;
        assert_int_equal(check_head(&head, head.body_bytes), KVF_ERR_PROTOCOL);
        head = right;
        head.magic++;
        assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        head = right;
        head.flags |= 2;
        assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        head = right;
        head.request = right.request == 0;
        assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        head = right;
        head.sequence = 0;
        assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        head = right;
        head.incarnation = 0;
        assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        if (types[i].type != KVF_NET_PIECE && types[i].type != KVF_NET_CREDIT) {
            head = right;
            head.offset = 1;
            assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        }
        if (types[i].type != KVF_NET_HEARTBEAT && types[i].type != KVF_NET_BYE) {
            head = right; /* from the wrong side */
            head.flags ^= KVF_NET_FROM_ACCEPTOR;
            assert_int_equal(check_head(&head, types[i].bytes), KVF_ERR_PROTOCOL);
        }
    }
    for (unsigned type = 0; type < 256; type++) {
        struct kvf_net_head head = head_of((uint8_t)type, 0);

        if (type < KVF_NET_HELLO || type > KVF_NET_RESYNC) {
            assert_int_equal(check_head(&head, 0), KVF_ERR_PROTOCOL);
        }
    }
}

static int check_body(uint8_t type, const void *body, uint32_t bytes)
{
    struct kvf_net_head head = head_of(type, bytes);
    const char *why = NULL;

    return kvf_net_body_check(&head, body, &why);
}

static void test_greetings(void **state)
{
    struct kvf_net_hello hello = {.version_min = 1, .version_max = 3, .name = "a"};
    struct kvf_net_welcome welcome = {.status = KVF_OK, .version = 1, .name = "b"};

    (void)state;
    assert_int_equal(check_body(KVF_NET_HELLO, &hello, sizeof(hello)), KVF_OK);
    hello.version_min = 4;
    assert_int_equal(check_body(KVF_NET_HELLO, &hello, sizeof(hello)), KVF_ERR_PROTOCOL);
    hello.version_min = 1;
    memset(hello.name, 'x', sizeof(hello.name)); /* it does not end */
    assert_int_equal(check_body(KVF_NET_HELLO, &hello, sizeof(hello)), KVF_ERR_PROTOCOL);
    memset(hello.name, 0, sizeof(hello.name));
    hello.name[0] = '\n'; /* it would go into a log */
    assert_int_equal(check_body(KVF_NET_HELLO, &hello, sizeof(hello)), KVF_ERR_PROTOCOL);

    assert_int_equal(check_body(KVF_NET_WELCOME, &welcome, sizeof(welcome)), KVF_OK);
    welcome.status = KVF_ERR_REFUSED; /* and yet a version */
    assert_int_equal(check_body(KVF_NET_WELCOME, &welcome, sizeof(welcome)), KVF_ERR_PROTOCOL);
    welcome.version = 0;
    assert_int_equal(check_body(KVF_NET_WELCOME, &welcome, sizeof(welcome)), KVF_OK);
    welcome.status = -4711;
    assert_int_equal(check_body(KVF_NET_WELCOME, &welcome, sizeof(welcome)), KVF_ERR_PROTOCOL);
}

static void test_fetches(void **state)
{
    struct kvf_net_fetch_body fetch = {.record_bytes = KVF_RECORD_PAGE_BYTES + 1};
    struct kvf_net_status_body answer = {.status = KVF_MISS};

    (void)state;
    assert_int_equal(check_body(KVF_NET_FETCH, &fetch, sizeof(fetch)), KVF_OK);
    fetch.record_bytes = KVF_RECORD_PAGE_BYTES;
    assert_int_equal(check_body(KVF_NET_FETCH, &fetch, sizeof(fetch)), KVF_ERR_PROTOCOL);
    fetch.record_bytes = (uint32_t)KVF_PROTO_RECORD_MAX + 1;
    assert_int_equal(check_body(KVF_NET_FETCH, &fetch, sizeof(fetch)), KVF_ERR_PROTOCOL);
    fetch.record_bytes = (uint32_t)KVF_PROTO_RECORD_MAX;
    fetch.shard = KVF_SHARDS_MAX;
    assert_int_equal(check_body(KVF_NET_FETCH, &fetch, sizeof(fetch)), KVF_ERR_PROTOCOL);
    assert_int_equal(check_body(KVF_NET_ANSWER, &answer, sizeof(answer)), KVF_OK);
    answer.status = KVF_OK; /* pieces say so */
    assert_int_equal(check_body(KVF_NET_ANSWER, &answer, sizeof(answer)), KVF_ERR_PROTOCOL);
}

static void test_blocks(void **state)
{
    struct {
        struct kvf_net_blocks head;
        struct kvf_net_block block[2];
    } body = {.head = {.number = 1, .count = 2},
              .block = {{.record_bytes = 5000, .change = KVF_NET_ADDED},
                        {.shard = 5, .change = KVF_NET_REMOVED}}};

    (void)state;
    assert_int_equal(check_body(KVF_NET_EVENTS, &body, sizeof(body)), KVF_OK);
    assert_int_equal(check_body(KVF_NET_SNAPSHOT, &body, sizeof(body)), KVF_ERR_PROTOCOL);
    body.head.count = 1;
    assert_int_equal(check_body(KVF_NET_EVENTS, &body, sizeof(body)), KVF_ERR_PROTOCOL);
    assert_int_equal(check_body(KVF_NET_SNAPSHOT, &body, sizeof(body.head) + sizeof(body.block[0])),
                     KVF_OK);
    body.head.count = UINT32_MAX; /* their bytes would wrap */
    assert_int_equal(check_body(KVF_NET_EVENTS, &body, sizeof(body)), KVF_ERR_PROTOCOL);
    body.head.count = 2;
    body.head.part = KVF_NET_SNAPSHOT_LAST;
    assert_int_equal(check_body(KVF_NET_EVENTS, &body, sizeof(body)), KVF_ERR_PROTOCOL);
    body.head.part = 0;
    body.block[1].record_bytes = 5000; /* of one that is gone */
    assert_int_equal(check_body(KVF_NET_EVENTS, &body, sizeof(body)), KVF_ERR_PROTOCOL);
    body.block[1].change = 3;
    assert_int_equal(check_body(KVF_NET_EVENTS, &body, sizeof(body)), KVF_ERR_PROTOCOL);
}

static void test_macs(void **state)
{
    struct kvf_net_status_body body = {.status = KVF_MISS};
    struct kvf_net_head head = head_of(KVF_NET_ANSWER, sizeof(body));
    const size_t length_at = offsetof(struct kvf_net_head, body_bytes);
    uint8_t cluster[32] = {1};
    uint8_t key[32];
    uint8_t one[32] = {1};
    uint8_t two[32] = {2};
    uint8_t session[32];
    uint8_t other[32];

    (void)state;
    kvf_net_peer_key(cluster, key);
    kvf_net_session_key(key, one, two, 11, 22, session);
    kvf_net_session_key(key, two, one, 11, 22, other);
    assert_memory_not_equal(session, other, sizeof(session));
    kvf_net_session_key(key, one, two, 11, 23, other);
    assert_memory_not_equal(session, other, sizeof(session));
    kvf_net_seal(session, &head, &body);
    assert_true(kvf_net_is_sealed(session, &head, &body));
    assert_false(kvf_net_is_sealed(other, &head, &body));
    for (size_t i = 0; i < sizeof(head); i++) { /* no byte of it can be changed */
        if (i < length_at || i >= length_at + sizeof(head.body_bytes)) { /* checked before */
            ((uint8_t *)&head)[i] ^= 0x10;
            assert_false(kvf_net_is_sealed(session, &head, &body));
            ((uint8_t *)&head)[i] ^= 0x10;
        }
    }
    for (size_t i = 0; i < sizeof(body); i++) {
        ((uint8_t *)&body)[i] ^= 0x10;
        assert_false(kvf_net_is_sealed(session, &head, &body));
        ((uint8_t *)&body)[i] ^= 0x10;
    }
}

static void test_replay(void **state)
{
    struct kvf_net_replay replay = {0};
    uint64_t size = 64 * KVF_NET_REPLAY_WORDS;

    (void)state;
    for (uint64_t n = 1; n <= 3 * size; n++) {
        assert_true(kvf_net_replay_accept(&replay, n));
        assert_false(kvf_net_replay_accept(&replay, n));
    }
    /* a gap, filled later, each once */
    assert_true(kvf_net_replay_accept(&replay, 3 * size + 10));
    for (uint64_t n = 3 * size + 1; n < 3 * size + 10; n++) {
        assert_true(kvf_net_replay_accept(&replay, n));
        assert_false(kvf_net_replay_accept(&replay, n));
    }
    /* too old to tell */
    assert_true(kvf_net_replay_accept(&replay, 10 * size));
    assert_false(kvf_net_replay_accept(&replay, 9 * size));
    assert_true(kvf_net_replay_accept(&replay, 9 * size + 1));
    assert_false(kvf_net_replay_accept(&replay, 9 * size + 1));
    assert_false(kvf_net_replay_accept(&replay, 3 * size));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heads),   cmocka_unit_test(test_greetings),
        cmocka_unit_test(test_fetches), cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_macs),    cmocka_unit_test(test_replay),
    };

    if (kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
