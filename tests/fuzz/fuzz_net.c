/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_net.c: what another node sends, judged before it is believed: heads and bodies of messages
 * of both sides, the numbers that must not come again, and whole streams of blocks into the table
 * of hints.
 *
 * Byte 0 of an input says what the rest is. What passes must hold what its users rely on: that is
 * checked here a second time, in other words than those of net_proto.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/peers.h"
#include "base/clock.h"
#include "tests/fuzz/fuzz.h"
#include "transport/net_proto.h"

enum {
    HINTS = 1024,
    NUMBERS = 200, /* of messages, at most 1143 apart */
};

static uint32_t resyncs;

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "finding: %s\n", what);
        abort();
    }
}

/* ---- what the stream calls ------------------------------------------------------------------- */

int kvf_net_send(struct kvf_net *net, kvf_net_link link, enum kvf_net_type type, const void *body,
                 uint32_t body_bytes)
{
    (void)net;
    must(link == 1 && type == KVF_NET_RESYNC && body == NULL && body_bytes == 0,
         "a listener says nothing but that it wants a snapshot");
    resyncs++;
    return KVF_OK;
}

int kvf_directory_tell(struct kvf_directory *directory, enum kvf_net_type type, const void *body,
                       uint32_t body_bytes)
{
    (void)directory;
    (void)type;
    (void)body;
    (void)body_bytes;
    must(0, "nothing here goes by way of a directory");
    return KVF_ERR_INTERNAL;
}

int kvf_directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed)
{
    (void)directory;
    (void)incarnation;
    (void)is_followed;
    must(0, "nothing here comes by way of a directory");
    return KVF_ERR_INTERNAL;
}

/* ---- messages -------------------------------------------------------------------------------- */

static void check_blocks(const struct kvf_net_head *head, const uint8_t *body)
{
    struct kvf_net_blocks blocks;

    memcpy(&blocks, body, sizeof(blocks));
    must(blocks.count <= KVF_NET_EVENTS_MAX &&
             head->body_bytes == sizeof(blocks) + blocks.count * sizeof(struct kvf_net_block),
         "as many blocks as it says");
    for (uint32_t i = 0; i < blocks.count; i++) {
        struct kvf_net_block block;

        memcpy(&block, body + sizeof(blocks) + i * sizeof(block), sizeof(block));
        must(block.shard < 4095, "no shard that stands for a set");
        must(block.change == KVF_NET_ADDED ? block.record_bytes > KVF_RECORD_PAGE_BYTES
                                           : block.record_bytes == 0,
             "what has come has a size, what has gone has none");
        must(block.change == KVF_NET_ADDED || head->type == KVF_NET_EVENTS,
             "a snapshot holds what is there");
        must(block.record_bytes <= KVF_RECORD_PAGE_BYTES + (64u << 20), "a size that records have");
    }
}

/* What a client of another node asks for, as what speaks for it here judges it. */
static void check_submission(const struct kvf_net_head *head, const uint8_t *body)
{
    struct kvf_shm_limits limits = {.staging_bytes = UINT64_C(1) << 32,
                                    .key_entries = KVF_SHM_REQUEST_ENTRIES_MAX,
                                    .version = KVF_WIRE_VERSION_MAX};
    struct kvf_shm_sqe sqe;
    const char *why = NULL;

    memcpy(&sqe, body, sizeof(sqe));
    must(head->body_bytes == sizeof(sqe) + sqe.n_entries * sizeof(struct kvf_shm_key),
         "as many keys as it says");
    limits.key_head = sqe.key_first;
    if (kvf_shm_sqe_check(&sqe, &limits, &why) == KVF_OK) {
        must(sqe.n_keys <= sqe.n_entries && sqe.n_entries <= KVF_SHM_REQUEST_ENTRIES_MAX,
             "keys that have entries");
    } else {
        must(why != NULL, "a refusal says why");
    }
}

/* One of the protocol of clients of the node itself. */
static void check_control(const struct kvf_net_head *head, bool from_acceptor, const uint8_t *body)
{
    for (uint32_t n_fds = 0; n_fds <= 3; n_fds++) {
        union kvf_proto_message message;
        const char *why = NULL;

        if (kvf_proto_decode(from_acceptor ? KVF_PROTO_DAEMON : KVF_PROTO_CLIENT, body,
                             head->body_bytes, n_fds, &message, &why) == KVF_OK) {
            must(message.head.bytes == head->body_bytes, "a message that fills its body");
        } else {
            must(why != NULL, "a refusal says why");
        }
    }
}

static void check_client(bool from_acceptor, const uint8_t *body)
{
    const struct kvf_net_client *client = (const void *)body;

    must(!from_acceptor && client->tenant[0] != '\0' &&
             memchr(client->tenant, 0, KVF_NET_NAME_BYTES) != NULL &&
             memchr(client->hello.name, 0, KVF_NET_NAME_BYTES) != NULL,
         "a tenant and a name that end");
    must(client->hello.version_min <= client->hello.version_max, "versions in order");
}

static void check_landed(const struct kvf_net_head *head, bool from_acceptor, const uint8_t *body)
{
    struct kvf_net_status_body landed;

    memcpy(&landed, body, sizeof(landed));
    must(from_acceptor && head->request != 0 &&
             strcmp(kvf_status_name(landed.status), "unknown") != 0,
         "a lease, and what became of it");
}

static void fuzz_message(bool from_acceptor, const uint8_t *data, size_t bytes)
{
    _Alignas(8) uint8_t body[KVF_NET_PIECE_BYTES];
    struct kvf_net_head head;
    const char *why = NULL;

    if (bytes < sizeof(head) || bytes - sizeof(head) > sizeof(body)) {
        return;
    }
    memcpy(&head, data, sizeof(head));
    bytes -= sizeof(head);
    memcpy(body, data + sizeof(head), bytes);
    if (kvf_net_head_check(&head, bytes, from_acceptor, &why) != KVF_OK ||
        kvf_net_body_check(&head, body, &why) != KVF_OK) {
        must(why != NULL, "a refusal says why");
        return;
    }
    must(head.body_bytes == bytes && head.sequence != 0 && head.incarnation != 0, "a whole head");
    switch (head.type) {
    case KVF_NET_SNAPSHOT:
    case KVF_NET_EVENTS:
        must(from_acceptor, "who listens does not tell");
        check_blocks(&head, body);
        break;
    case KVF_NET_FETCH: {
        struct kvf_net_fetch_body fetch;

        memcpy(&fetch, body, sizeof(fetch));
        must(!from_acceptor && head.request != 0 && fetch.shard < 4095 &&
                 fetch.record_bytes > KVF_RECORD_PAGE_BYTES,
             "a question that has an answer");
        break;
    }
    case KVF_NET_HELLO:
    case KVF_NET_ENDPOINT:
        must(memchr(((struct kvf_net_hello *)(void *)body)->name, 0, KVF_NET_NAME_BYTES) != NULL,
             "name ends");
        break;
    case KVF_NET_WELCOME:
        must(memchr(((struct kvf_net_welcome *)(void *)body)->text, 0, KVF_NET_TEXT_BYTES) != NULL,
             "text ends");
        break;
    case KVF_NET_CLIENT:
        check_client(from_acceptor, body);
        break;
    case KVF_NET_CONTROL:
        check_control(&head, from_acceptor, body);
        break;
    case KVF_NET_SUBMIT:
        must(!from_acceptor, "only a client asks");
        check_submission(&head, body);
        break;
    case KVF_NET_COMPLETE:
        must(from_acceptor && bytes % sizeof(struct kvf_shm_cqe) == 0 &&
                 bytes <= KVF_NET_CQES_MAX * sizeof(struct kvf_shm_cqe),
             "whole completions");
        break;
    case KVF_NET_STAGE:
        must(!from_acceptor && bytes >= 1, "bytes of a client");
        break;
    case KVF_NET_LANDED:
        check_landed(&head, from_acceptor, body);
        break;
    default:
        break;
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Each input byte is a step from the last number: no number is taken twice. */
static void fuzz_replay(const uint8_t *data, size_t bytes)
{
    static uint8_t seen[NUMBERS * 1152];
    struct kvf_net_replay replay = {0};
    uint64_t number = 1;
    uint64_t highest = 0;

    memset(seen, 0, sizeof(seen));
    for (size_t i = 0; i < bytes && i < NUMBERS; i++) {
        int64_t step = (int8_t)data[i];

        number = (int64_t)number + step * 9 < 1 ? 1 : number + (uint64_t)(step * 9);
        if (kvf_net_replay_accept(&replay, number)) {
            must(!seen[number % sizeof(seen)], "a number is taken once");
            must(number + 64 * KVF_NET_REPLAY_WORDS > highest, "an old number is not taken");
            seen[number % sizeof(seen)] = 1;
            highest = number > highest ? number : highest;
        } else {
            must(seen[number % sizeof(seen)] || number + 64 * KVF_NET_REPLAY_WORDS <= highest,
                 "a new number is taken");
        }
    }
}

/* ---- the stream ------------------------------------------------------------------------------ */

static void check_link(const struct kvf_peers *peers)
{
    const struct kvf_peer_link *link = &peers->links[0];
    const struct kvf_hints *hints = &peers->hints;

    must((link->learn == KVF_LEARN_WAITS) == (link->source == KVF_HINT_NONE),
         "who has begun to learn has a source, and nobody else");
    must(link->source == KVF_HINT_NONE || (hints->open_sources >> link->source & 1) != 0,
         "a source that is open");
    must(hints->count <= hints->capacity, "as many hints as there is room for");
}

/* Messages one behind the other: type, two bytes of length, the body. */
static void fuzz_stream(const uint8_t *data, size_t bytes)
{
    static struct kvf_agent agent;
    static struct kvf_peers peers;
    size_t at = 0;

    memset(&agent, 0, sizeof(agent));
    memset(&peers, 0, sizeof(peers));
    agent.peers = &peers;
    agent.now_ns = KVF_NS_PER_S;
    peers.agent = &agent;
    peers.links[0] = (struct kvf_peer_link){
        .link = 1, .is_initiator = true, .source = KVF_HINT_NONE};
    must(kvf_hints_open(&peers.hints, HINTS) == KVF_OK, "memory");
    while (at + 3 <= bytes) {
        uint8_t type = data[at] % 2 == 0 ? KVF_NET_SNAPSHOT : KVF_NET_EVENTS;
        size_t length = data[at + 1] | (size_t)data[at + 2] << 8;
        struct kvf_net_head head = {.type = type};
        _Alignas(8) uint8_t body[KVF_NET_BODY_BYTES_MAX];
        const char *why = NULL;

        agent.now_ns += (uint64_t)(data[at] / 2) * 20 * KVF_NS_PER_MS;
        at += 3;
        length = length < bytes - at ? length : bytes - at;
        if (length >= sizeof(struct kvf_net_blocks) && length <= sizeof(body)) {
            memcpy(body, data + at, length);
            head.body_bytes = (uint32_t)length;
            if (kvf_net_body_check(&head, body, &why) == KVF_OK) {
                kvf_peers_told(&peers, &peers.links[0], type, body);
            }
        }
        at += length;
        kvf_peers_ask_again(&peers);
        (void)kvf_hints_sweep(&peers.hints);
        check_link(&peers);
    }
    kvf_peers_unlearn(&peers, &peers.links[0]);
    for (int i = 0; i < 2 * HINTS && kvf_hints_sweep(&peers.hints); i++) {
    }
    must(peers.hints.count == 0, "a link that is gone has left no hint behind");
    kvf_hints_close(&peers.hints);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    switch (data[0]) {
    case 'i':
        fuzz_message(false, data + 1, bytes - 1);
        break;
    case 'a':
        fuzz_message(true, data + 1, bytes - 1);
        break;
    case 'r':
        fuzz_replay(data + 1, bytes - 1);
        break;
    default:
        fuzz_stream(data + 1, bytes - 1);
        break;
    }
    return 0;
}
