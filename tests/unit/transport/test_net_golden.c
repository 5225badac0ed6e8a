/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_golden.c: the bytes of each message between nodes, with its MAC, are those of
 * tests/data/proto/net; and so are the keys that the MACs are made with. Where these differ, two
 * builds do not understand each other any more: another version is needed, not new golden bytes.
 * `test_net_golden --write` writes the files, for a new kind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tests/support/support.h"
#include "tests/unit/transport/samples.h"
#include "transport/net_proto.h"

#define MESSAGES_MAX 24
#define BODY_MAX     1024

struct message {
    const char *name;
    struct kvf_net_head head;
    uint32_t bytes;
    uint8_t body[BODY_MAX];
};

struct keys {
    uint8_t peer[32], client[32], session[32];
    uint64_t layout_fp;
};

static struct message messages[MESSAGES_MAX];
static uint32_t n_messages;
static struct keys keys;

static void count_up(uint8_t *out, uint32_t bytes, uint8_t first)
{
    for (uint32_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(first + i);
    }
}

static void keys_fill(void)
{
    uint8_t cluster[32], mine[32], other[32];

    count_up(cluster, 32, 1);
    count_up(mine, 32, 0x40);
    count_up(other, 32, 0x80);
    kvf_net_peer_key(cluster, keys.peer);
    kvf_net_client_key(cluster, "default", keys.client);
    kvf_net_session_key(keys.peer, mine, other, 0x0102030405060708, 0x1112131415161718,
                        keys.session);
    keys.layout_fp = kvf_net_layout_fp();
}

static void add(const char *name, uint8_t type, bool from_acceptor, uint64_t request,
                uint32_t offset, const void *body, uint32_t bytes)
{
    struct message *message = &messages[n_messages++];
    bool is_greeting = type == KVF_NET_HELLO || type == KVF_NET_WELCOME || type == KVF_NET_CLIENT;

    assert_true(n_messages <= MESSAGES_MAX && bytes <= BODY_MAX);
    message->name = name;
    message->bytes = bytes;
    if (bytes > 0) {
        memcpy(message->body, body, bytes);
    }
    message->head = (struct kvf_net_head){.magic = KVF_NET_MAGIC,
                                          .version = 1,
                                          .type = type,
                                          .flags = from_acceptor ? KVF_NET_FROM_ACCEPTOR : 0,
                                          .incarnation = from_acceptor ? 0x1112131415161718
                                                                       : 0x0102030405060708,
                                          .sequence = 0x21 + n_messages,
                                          .request = request,
                                          .body_bytes = bytes,
                                          .offset = offset};
    kvf_net_seal(type == KVF_NET_CLIENT ? keys.client
                 : is_greeting          ? keys.peer
                                        : keys.session,
                 &message->head, message->body);
}

static void add_greetings(void)
{
    struct kvf_net_hello hello = {.version_min = 1,
                                  .version_max = 1,
                                  .ucx_version = 1 << 16 | 13 << 8 | 1,
                                  .layout_fp = keys.layout_fp,
                                  .name = "node-a"};
    struct kvf_net_client client = {.tenant = "default"};
    struct kvf_net_welcome welcome = {.status = KVF_OK,
                                      .version = 1,
                                      .ucx_version = 1 << 16 | 16 << 8,
                                      .layout_fp = keys.layout_fp,
                                      .name = "node-b"};
    struct kvf_net_welcome refusal = {
        .status = KVF_ERR_REFUSED, .name = "node-b", .text = "another layout"};

    count_up(hello.nonce, 32, 0x40);
    count_up(welcome.nonce, 32, 0x80);
    count_up(welcome.hello_nonce, 32, 0x40);
    client.hello = hello;
    add("hello", KVF_NET_HELLO, false, 0, 0, &hello, sizeof(hello));
    add("client", KVF_NET_CLIENT, false, 0, 0, &client, sizeof(client));
    add("welcome", KVF_NET_WELCOME, true, 0, 0, &welcome, sizeof(welcome));
    add("refusal", KVF_NET_WELCOME, true, 0, 0, &refusal, sizeof(refusal));
    add("confirm", KVF_NET_CONFIRM, false, 0, 0, NULL, 0);
}

static void add_stream(void)
{
    struct {
        struct kvf_net_blocks head;
        struct kvf_net_block blocks[2];
    } body = {.head = {.number = 0x3132333435363738,
                       .count = 2,
                       .part = KVF_NET_SNAPSHOT_LAST,
                       .index = 7},
              .blocks = {{.record_bytes = 4096 + 100000, .shard = 3, .change = KVF_NET_ADDED},
                         {.record_bytes = 4096 + 64, .shard = 0, .change = KVF_NET_ADDED}}};

    count_up(body.blocks[0].key_id, 32, 0x51);
    count_up(body.blocks[1].key_id, 32, 0x71);
    add("snapshot", KVF_NET_SNAPSHOT, true, 0, 0, &body, sizeof(body));
    body.head.part = 0;
    body.head.index = 0;
    body.blocks[1].change = KVF_NET_REMOVED;
    body.blocks[1].record_bytes = 0;
    add("events", KVF_NET_EVENTS, true, 0, 0, &body, sizeof(body));
    body.head.count = 0;
    add("events_none", KVF_NET_EVENTS, true, 0, 0, &body.head, sizeof(body.head));
    add("resync", KVF_NET_RESYNC, false, 0, 0, NULL, 0);
}

static void add_records(void)
{
    struct kvf_net_fetch_body fetch = {.record_bytes = 4096 + 100000, .shard = 3};
    struct kvf_net_status_body miss = {.status = KVF_MISS};
    struct kvf_net_status_body ok = {.status = KVF_OK};
    uint8_t piece[100];

    count_up(fetch.key_id, 32, 0x51);
    count_up(piece, sizeof(piece), 0x91);
    add("fetch", KVF_NET_FETCH, false, 0x4142434445464748, 0, &fetch, sizeof(fetch));
    add("answer", KVF_NET_ANSWER, true, 0x4142434445464748, 0, &miss, sizeof(miss));
    add("piece", KVF_NET_PIECE, true, 0x4142434445464748, 262144, piece, sizeof(piece));
    add("credit", KVF_NET_CREDIT, false, 0, 2097152, NULL, 0);
    add("cancel", KVF_NET_CANCEL, false, 0x4142434445464748, 0, NULL, 0);
    add("heartbeat", KVF_NET_HEARTBEAT, true, 0, 0, NULL, 0);
    add("bye", KVF_NET_BYE, false, 0, 0, &ok, sizeof(ok));
}

static void add_clients(void)
{
    struct kvf_wire_note bye = sample_note(KVF_WIRE_BYE);
    struct kvf_shm_sqe submission = {.request = 9, .opcode = KVF_OP_NOP};
    struct kvf_shm_cqe completion = sample_cqe();
    struct kvf_net_status_body whole = {.status = KVF_OK};
    uint8_t staged[60];

    count_up(staged, sizeof(staged), 0xa1);
    add("control", KVF_NET_CONTROL, true, 0, 0, &bye, sizeof(bye));
    add("submit", KVF_NET_SUBMIT, false, 0, 0, &submission, sizeof(submission));
    add("complete", KVF_NET_COMPLETE, true, 0, 0, &completion, sizeof(completion));
    add("stage", KVF_NET_STAGE, false, 0, 65536, staged, sizeof(staged));
    add("landed", KVF_NET_LANDED, true, 0x0000000300000007, 0, &whole, sizeof(whole));
}

static void messages_fill(void)
{
    n_messages = 0;
    memset(messages, 0, sizeof(messages));
    keys_fill();
    add_greetings();
    add_stream();
    add_records();
    add_clients();
}

static void path_of(const char *name, char path_out[KVF_TEST_PATH_BYTES])
{
    (void)snprintf(path_out, KVF_TEST_PATH_BYTES, "%s/tests/data/proto/net/%s.bin", KVF_SOURCE_DIR,
                   name);
}

static void assert_file(const char *name, const void *head, size_t head_bytes, const void *body,
                        size_t body_bytes)
{
    char path[KVF_TEST_PATH_BYTES];
    size_t bytes = 0;
    char *want;

    path_of(name, path);
    want = kvf_test_file_read(path, &bytes);
    assert_non_null(want);
    if (bytes != head_bytes + body_bytes || memcmp(want, head, head_bytes) != 0 ||
        memcmp(want + head_bytes, body, body_bytes) != 0) {
        fail_msg("%s differs", path);
    }
    free(want);
}

static void test_bytes(void **state)
{
    (void)state;
    messages_fill();
    assert_file("keys", &keys, sizeof(keys), "", 0);
    for (uint32_t i = 0; i < n_messages; i++) {
        const struct message *message = &messages[i];

        assert_file(message->name, &message->head, sizeof(message->head), message->body,
                    message->bytes);
    }
}

/* Each is a right one, and under no other key, with no other bit, from no other side. */
static void test_right(void **state)
{
    (void)state;
    messages_fill();
    for (uint32_t i = 0; i < n_messages; i++) {
        struct message message = messages[i];
        bool from_acceptor = (message.head.flags & KVF_NET_FROM_ACCEPTOR) != 0;
        const uint8_t *key = message.head.type == KVF_NET_CLIENT ? keys.client
                             : message.head.type == KVF_NET_HELLO ||
                                     message.head.type == KVF_NET_WELCOME
                                 ? keys.peer
                                 : keys.session;
        const char *why = NULL;

        if (kvf_net_head_check(&message.head, message.bytes, from_acceptor, &why) != KVF_OK ||
            kvf_net_body_check(&message.head, message.body, &why) != KVF_OK) {
            fail_msg("%s breaks the rule of %s", message.name, why);
        }
        assert_true(kvf_net_is_sealed(key, &message.head, message.body));
        assert_false(kvf_net_is_sealed(key == keys.peer ? keys.session : keys.peer, &message.head,
                                       message.body));
        for (uint32_t bit = 0; bit < 8 * sizeof(message.head); bit++) {
            ((uint8_t *)&message.head)[bit / 8] ^= (uint8_t)(1u << bit % 8);
            assert_false(message.head.body_bytes == message.bytes &&
                         kvf_net_is_sealed(key, &message.head, message.body));
            ((uint8_t *)&message.head)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
    }
}

static int write_all(void)
{
    uint8_t bytes[sizeof(struct kvf_net_head) + BODY_MAX];
    char path[KVF_TEST_PATH_BYTES];

    messages_fill();
    path_of("keys", path);
    kvf_test_file_write(path, &keys, sizeof(keys));
    for (uint32_t i = 0; i < n_messages; i++) {
        memcpy(bytes, &messages[i].head, sizeof(messages[i].head));
        memcpy(bytes + sizeof(messages[i].head), messages[i].body, messages[i].bytes);
        path_of(messages[i].name, path);
        kvf_test_file_write(path, bytes, sizeof(messages[i].head) + messages[i].bytes);
        printf("%s: %zu bytes\n", path, sizeof(messages[i].head) + messages[i].bytes);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_right),
    };

    if (argc == 2 && strcmp(argv[1], "--write") == 0) {
        return write_all();
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
