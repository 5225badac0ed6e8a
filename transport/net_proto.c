/* SPDX-License-Identifier: Apache-2.0
 *
 * net_proto.c: the judge of messages between nodes, and their keys.
 */
#include "transport/net_proto.h"

#include <string.h>

#include "base/hash.h"
#include "transport/proto.h"
#include "transport/proto_check.h"

#define SEQUENCES (64u * KVF_NET_REPLAY_WORDS)

/* ----------------------------------------------------------------------------------------------
 * Keys
 */
uint64_t kvf_net_layout_fp(void)
{
    /* the record page's version is part of docs/block-format.md, the rest of this protocol */
    static const uint64_t parts[] = {KVF_NET_MAGIC,
                                     KVF_RECORD_PAGE_BYTES,
                                     KVF_PAYLOAD_BYTES_MAX,
                                     sizeof(struct kvf_net_head),
                                     sizeof(struct kvf_net_block),
                                     1 /* KVF_BLOCK_VERSION: asserted by tier_remote.c */};
    struct kvf_hasher hasher;
    uint8_t hash[KVF_HASH_BYTES];
    uint64_t fp;

    kvf_hasher_init(&hasher, NULL);
    kvf_hash_field(&hasher, "kvferry layout 1", 16);
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        kvf_hash_field_u64(&hasher, parts[i]);
    }
    kvf_hasher_final(&hasher, hash);
    memcpy(&fp, hash, sizeof(fp));
    return fp;
}

void kvf_net_peer_key(const uint8_t cluster_key[32], uint8_t key_out[32])
{
    kvf_key_derive(cluster_key, "peers", NULL, 0, key_out);
}

void kvf_net_client_key(const uint8_t cluster_key[32], const char *tenant, uint8_t key_out[32])
{
    kvf_key_derive(cluster_key, "remote client", tenant, strlen(tenant), key_out);
}

void kvf_net_session_key(const uint8_t greet_key[32], const uint8_t initiator_nonce[32],
                         const uint8_t acceptor_nonce[32], uint64_t initiator_incarnation,
                         uint64_t acceptor_incarnation, uint8_t key_out[32])
{
    uint8_t context[2 * KVF_NET_NONCE_BYTES + 2 * sizeof(uint64_t)];

    memcpy(context, initiator_nonce, KVF_NET_NONCE_BYTES);
    memcpy(context + 32, acceptor_nonce, KVF_NET_NONCE_BYTES);
    memcpy(context + 64, &initiator_incarnation, sizeof(uint64_t));
    memcpy(context + 72, &acceptor_incarnation, sizeof(uint64_t));
    kvf_key_derive(greet_key, "link", context, sizeof(context), key_out);
}

static void mac_of(const uint8_t key[32], const struct kvf_net_head *head, const void *body,
                   uint8_t mac_out[KVF_HASH_BYTES])
{
    struct kvf_net_head plain = *head;
    struct kvf_hasher hasher;

    memset(plain.mac, 0, sizeof(plain.mac));
    kvf_hasher_init(&hasher, key);
    kvf_hash_field(&hasher, &plain, sizeof(plain));
    if (head->type != KVF_NET_PIECE && head->type != KVF_NET_STAGE) {
        kvf_hash_field(&hasher, body, head->body_bytes);
    }
    kvf_hasher_final(&hasher, mac_out);
}

void kvf_net_seal(const uint8_t key[32], struct kvf_net_head *head, const void *body)
{
    uint8_t mac[KVF_HASH_BYTES];

    mac_of(key, head, body, mac);
    memcpy(head->mac, mac, sizeof(head->mac));
}

bool kvf_net_is_sealed(const uint8_t key[32], const struct kvf_net_head *head, const void *body)
{
    uint8_t mac[KVF_HASH_BYTES];
    uint8_t claimed[KVF_HASH_BYTES];

    mac_of(key, head, body, mac);
    memcpy(claimed, mac, sizeof(claimed));
    memcpy(claimed, head->mac, sizeof(head->mac));
    return kvf_mac_equal(mac, claimed);
}

/* ----------------------------------------------------------------------------------------------
 * Heads
 */
enum sender {
    FROM_INITIATOR = 1,
    FROM_ACCEPTOR = 2,
    FROM_BOTH = 3,
};

struct rule {
    uint8_t senders;  /* enum sender */
    bool has_request; /* request is not 0 */
    bool has_offset;  /* offset may be other than 0 */
    uint32_t body_min, body_max;
};

static const struct rule rules[] = {
    [KVF_NET_HELLO] = {FROM_INITIATOR, false, false, sizeof(struct kvf_net_hello),
                       sizeof(struct kvf_net_hello)},
    [KVF_NET_ENDPOINT] = {FROM_INITIATOR, false, false, sizeof(struct kvf_net_hello),
                          sizeof(struct kvf_net_hello)},
    [KVF_NET_WELCOME] = {FROM_ACCEPTOR, false, false, sizeof(struct kvf_net_welcome),
                         sizeof(struct kvf_net_welcome)},
    [KVF_NET_CONFIRM] = {FROM_INITIATOR, false, false, 0, 0},
    [KVF_NET_HEARTBEAT] = {FROM_BOTH, false, false, 0, 0},
    [KVF_NET_BYE] = {FROM_BOTH, false, false, sizeof(struct kvf_net_status_body),
                     sizeof(struct kvf_net_status_body)},
    [KVF_NET_FETCH] = {FROM_INITIATOR, true, false, sizeof(struct kvf_net_fetch_body),
                       sizeof(struct kvf_net_fetch_body)},
    [KVF_NET_ANSWER] = {FROM_ACCEPTOR, true, false, sizeof(struct kvf_net_status_body),
                        sizeof(struct kvf_net_status_body)},
    [KVF_NET_PIECE] = {FROM_ACCEPTOR, true, true, 1, KVF_NET_PIECE_BYTES},
    [KVF_NET_CREDIT] = {FROM_INITIATOR, false, true, 0, 0},
    [KVF_NET_CANCEL] = {FROM_INITIATOR, true, false, 0, 0},
    [KVF_NET_SNAPSHOT] = {FROM_ACCEPTOR, false, false, sizeof(struct kvf_net_blocks),
                          KVF_NET_BODY_BYTES_MAX},
    [KVF_NET_EVENTS] = {FROM_ACCEPTOR, false, false, sizeof(struct kvf_net_blocks),
                        KVF_NET_BODY_BYTES_MAX},
    [KVF_NET_RESYNC] = {FROM_INITIATOR, false, false, 0, 0},
    [KVF_NET_CLIENT] = {FROM_INITIATOR, false, false, sizeof(struct kvf_net_client),
                        sizeof(struct kvf_net_client)},
    [KVF_NET_CONTROL] = {FROM_BOTH, false, false, sizeof(struct kvf_wire_head),
                         KVF_WIRE_MESSAGE_BYTES_MAX},
    [KVF_NET_SUBMIT] = {FROM_INITIATOR, false, false, sizeof(struct kvf_shm_sqe),
                        KVF_NET_SUBMIT_BYTES_MAX},
    [KVF_NET_COMPLETE] = {FROM_ACCEPTOR, false, false, sizeof(struct kvf_shm_cqe),
                          KVF_NET_CQES_MAX * sizeof(struct kvf_shm_cqe)},
    [KVF_NET_STAGE] = {FROM_INITIATOR, false, true, 1, KVF_NET_PIECE_BYTES},
    [KVF_NET_LANDED] = {FROM_ACCEPTOR, true, false, sizeof(struct kvf_net_status_body),
                        sizeof(struct kvf_net_status_body)},
};

int kvf_net_head_check(const struct kvf_net_head *head, size_t data_bytes, bool from_acceptor,
                       const char **why_out)
{
    const struct rule *rule;

    if (head->magic != KVF_NET_MAGIC) {
        return kvf_proto_bad(why_out, "magic");
    }
    if (head->type >= sizeof(rules) / sizeof(rules[0]) || rules[head->type].senders == 0) {
        return kvf_proto_bad(why_out, "type");
    }
    rule = &rules[head->type];
    if (head->flags != (from_acceptor ? KVF_NET_FROM_ACCEPTOR : 0) ||
        (rule->senders & (from_acceptor ? FROM_ACCEPTOR : FROM_INITIATOR)) == 0) {
        return kvf_proto_bad(why_out, "direction");
    }
    if (head->body_bytes != data_bytes || data_bytes < rule->body_min ||
        data_bytes > rule->body_max) {
        return kvf_proto_bad(why_out, "body_bytes");
    }
    if ((head->request != 0) != rule->has_request) {
        return kvf_proto_bad(why_out, "request");
    }
    if (head->offset != 0 && !rule->has_offset) {
        return kvf_proto_bad(why_out, "offset");
    }
    if (head->sequence == 0 || head->incarnation == 0) {
        return kvf_proto_bad(why_out, "sequence or incarnation");
    }
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Bodies
 */
static int check_blocks(const struct kvf_net_head *head, const void *body, const char **why_out)
{
    struct kvf_net_blocks blocks;
    const uint8_t *at = (const uint8_t *)body + sizeof(blocks);
    uint16_t parts = KVF_NET_SNAPSHOT_FIRST | KVF_NET_SNAPSHOT_LAST;

    memcpy(&blocks, body, sizeof(blocks));
    if (blocks.count > KVF_NET_EVENTS_MAX ||
        head->body_bytes != sizeof(blocks) + blocks.count * sizeof(struct kvf_net_block)) {
        return kvf_proto_bad(why_out, "count of blocks");
    }
    if ((blocks.part & ~(head->type == KVF_NET_SNAPSHOT ? parts : 0)) != 0 ||
        (blocks.index != 0 &&
         (head->type == KVF_NET_EVENTS || (blocks.part & KVF_NET_SNAPSHOT_FIRST) != 0))) {
        return kvf_proto_bad(why_out, "part");
    }
    for (uint32_t i = 0; i < blocks.count; i++) {
        struct kvf_net_block block;

        memcpy(&block, at + i * sizeof(block), sizeof(block));
        if (block.change != KVF_NET_ADDED &&
            (block.change != KVF_NET_REMOVED || head->type == KVF_NET_SNAPSHOT)) {
            return kvf_proto_bad(why_out, "change of a block");
        }
        if (block.shard >= KVF_SHARDS_MAX || block.reserved != 0 ||
            (block.change == KVF_NET_ADDED ? block.record_bytes <= KVF_RECORD_PAGE_BYTES
                                           : block.record_bytes != 0) ||
            block.record_bytes > KVF_PROTO_RECORD_MAX) {
            return kvf_proto_bad(why_out, "block");
        }
    }
    return KVF_OK;
}

static int check_hello(const struct kvf_net_hello *hello, const char **why_out)
{
    if (hello->version_min == 0 || hello->version_min > hello->version_max) {
        return kvf_proto_bad(why_out, "versions");
    }
    if (!kvf_proto_text_ok(hello->name, sizeof(hello->name))) {
        return kvf_proto_bad(why_out, "name");
    }
    return KVF_OK;
}

static int check_client(const struct kvf_net_client *client, const char **why_out)
{
    if (client->tenant[0] == '\0' || !kvf_proto_text_ok(client->tenant, sizeof(client->tenant))) {
        return kvf_proto_bad(why_out, "tenant");
    }
    return check_hello(&client->hello, why_out);
}

/* Sizes; what a submission says is judged by whoever takes it from the ring. */
static int check_submit(const struct kvf_net_head *head, const void *body, const char **why_out)
{
    struct kvf_shm_sqe sqe;

    memcpy(&sqe, body, sizeof(sqe));
    if (head->body_bytes != sizeof(sqe) + sqe.n_entries * sizeof(struct kvf_shm_key)) {
        return kvf_proto_bad(why_out, "count of keys");
    }
    return KVF_OK;
}

static int check_welcome(const struct kvf_net_welcome *welcome, const char **why_out)
{
    if (!kvf_proto_status_known(welcome->status) || welcome->reserved != 0 ||
        welcome->reserved2 != 0 || (welcome->status == KVF_OK) != (welcome->version != 0)) {
        return kvf_proto_bad(why_out, "status");
    }
    if (!kvf_proto_text_ok(welcome->name, sizeof(welcome->name)) ||
        !kvf_proto_text_ok(welcome->text, sizeof(welcome->text))) {
        return kvf_proto_bad(why_out, "name or text");
    }
    return KVF_OK;
}

int kvf_net_body_check(const struct kvf_net_head *head, const void *body, const char **why_out)
{
    union {
        struct kvf_net_hello hello;
        struct kvf_net_client client;
        struct kvf_net_welcome welcome;
        struct kvf_net_fetch_body fetch;
        struct kvf_net_status_body status;
    } copy;

    switch (head->type) {
    case KVF_NET_HELLO:
    case KVF_NET_ENDPOINT:
        memcpy(&copy.hello, body, sizeof(copy.hello));
        return check_hello(&copy.hello, why_out);
    case KVF_NET_CLIENT:
        memcpy(&copy.client, body, sizeof(copy.client));
        return check_client(&copy.client, why_out);
    case KVF_NET_SUBMIT:
        return check_submit(head, body, why_out);
    case KVF_NET_COMPLETE:
        return head->body_bytes % sizeof(struct kvf_shm_cqe) == 0
                   ? KVF_OK
                   : kvf_proto_bad(why_out, "count of completions");
    case KVF_NET_WELCOME:
        memcpy(&copy.welcome, body, sizeof(copy.welcome));
        return check_welcome(&copy.welcome, why_out);
    case KVF_NET_FETCH:
        memcpy(&copy.fetch, body, sizeof(copy.fetch));
        if (copy.fetch.shard >= KVF_SHARDS_MAX || copy.fetch.reserved != 0 ||
            copy.fetch.record_bytes <= KVF_RECORD_PAGE_BYTES ||
            copy.fetch.record_bytes > KVF_PROTO_RECORD_MAX) {
            return kvf_proto_bad(why_out, "fetch");
        }
        return KVF_OK;
    case KVF_NET_ANSWER:
    case KVF_NET_BYE:
    case KVF_NET_LANDED:
        memcpy(&copy.status, body, sizeof(copy.status));
        if (!kvf_proto_status_known(copy.status.status) || copy.status.reserved != 0 ||
            (head->type == KVF_NET_ANSWER && copy.status.status == KVF_OK)) {
            return kvf_proto_bad(why_out, "status");
        }
        return KVF_OK;
    case KVF_NET_SNAPSHOT:
    case KVF_NET_EVENTS:
        return check_blocks(head, body, why_out);
    default:
        return KVF_OK;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Replay
 */
bool kvf_net_replay_accept(struct kvf_net_replay *replay, uint64_t sequence)
{
    uint64_t *word = &replay->seen[sequence % SEQUENCES / 64];
    uint64_t bit = UINT64_C(1) << (sequence % 64);

    if (sequence > replay->highest) {
        uint64_t from = replay->highest + 1;

        if (sequence - replay->highest >= SEQUENCES) {
            from = sequence - SEQUENCES + 1;
        }
        for (uint64_t n = from; n <= sequence; n++) {
            replay->seen[n % SEQUENCES / 64] &= ~(UINT64_C(1) << (n % 64));
        }
        replay->highest = sequence;
    } else if (replay->highest - sequence >= SEQUENCES || (*word & bit) != 0) {
        return false;
    }
    *word |= bit;
    return true;
}
