/* SPDX-License-Identifier: Apache-2.0
 *
 * directory_read.c: what other nodes have written into the directory.
 *
 * A node is followed as over a link: first the snapshot that counts, then what has come since, by
 * number. The number is looked up before the snapshot is read, so that what changes meanwhile is
 * said twice at worst; a snapshot that stopped counting while it was read is read anew. A gap in
 * the numbers is for the owner to see, who asks from the beginning then.
 */
#include "agent/directory_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/net_proto.h"

#define MEMBERS_MAX   256 /* of the set of nodes that are looked at */
#define SCANS_A_TURN  16
#define ENTRIES_A_GET 16
#define FIELD_BYTES   34
#define ROOM_A_READ   (ENTRIES_A_GET + 8)

static void refuse(struct kvf_directory *directory)
{
    (void)atomic_fetch_add(&directory->refused, 1);
}

static struct directory_node *find(struct kvf_directory *directory, uint64_t incarnation)
{
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        if (directory->nodes[i].incarnation == incarnation) {
            return &directory->nodes[i];
        }
    }
    return NULL;
}

/* ----------------------------------------------------------------------------------------------
 * Who is there
 */
static uint64_t incarnation_of(const redisReply *member)
{
    char text[17];
    char *end;
    uint64_t incarnation;

    if (member->type != REDIS_REPLY_STRING || member->len != 16) {
        return 0;
    }
    memcpy(text, member->str, 16);
    text[16] = '\0';
    incarnation = strtoull(text, &end, 16);
    return *end == '\0' ? incarnation : 0;
}

static void take_lease(struct kvf_directory *directory, uint64_t incarnation,
                       const redisReply *value)
{
    struct kvf_directory_lease lease;
    struct kvf_net_address address;
    struct directory_node *node;

    if (value->type == REDIS_REPLY_NIL) {
        (void)redisAppendCommand(directory->redis, "SREM %snodes %016llx", directory->prefix,
                                 (unsigned long long)incarnation);
        directory->pipelined++;
        return;
    }
    if (value->type != REDIS_REPLY_STRING ||
        !kvf_directory_lease_read(directory->config.cluster_key, value->str, value->len, &lease,
                                  &address) ||
        lease.incarnation != incarnation) {
        refuse(directory);
        return;
    }
    node = find(directory, incarnation);
    if (node == NULL && (node = find(directory, 0)) != NULL) {
        memset(node, 0, sizeof(*node));
        node->incarnation = incarnation;
        node->address = address;
        memcpy(node->name, lease.name, sizeof(node->name));
    }
    if (node != NULL) {
        node->is_listed = true;
    }
}

static void take_leases(struct kvf_directory *directory, const uint64_t *incarnations, uint32_t n)
{
    char key[KVF_DIRECTORY_KEY_BYTES];

    for (uint32_t i = 0; i < n; i++) {
        directory_key(directory, "lease", incarnations[i], 0, key);
        (void)redisAppendCommand(directory->redis, "GET %s", key);
    }
    directory->pipelined += n;
    for (uint32_t i = 0; i < n; i++) {
        redisReply *value = directory_reply(directory); /* one at a time is kept */

        if (value == NULL) {
            return;
        }
        take_lease(directory, incarnations[i], value);
        freeReplyObject(value);
    }
}

void directory_list(struct kvf_directory *directory)
{
    uint64_t incarnations[MEMBERS_MAX];
    redisReply *members;
    uint32_t n = 0;

    (void)redisAppendCommand(directory->redis, "SMEMBERS %snodes", directory->prefix);
    directory->pipelined++;
    members = directory_reply(directory);
    if (members == NULL) {
        return;
    }
    for (size_t i = 0; members->type == REDIS_REPLY_ARRAY && i < members->elements; i++) {
        uint64_t incarnation = incarnation_of(members->element[i]);

        if (incarnation == 0) {
            refuse(directory);
        } else if (incarnation != directory->config.incarnation && n < MEMBERS_MAX) {
            incarnations[n++] = incarnation;
        }
    }
    freeReplyObject(members);
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        directory->nodes[i].is_listed = false;
    }
    take_leases(directory, incarnations, n);
    (void)directory_drain(directory);
}

void directory_tell_nodes(struct kvf_directory *directory)
{
    bool is_settled = kvf_now_ns() >= directory->settled_ns;

    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        struct directory_node *node = &directory->nodes[i];
        struct kvf_directory_event event = {.incarnation = node->incarnation};

        if (node->incarnation == 0 || node->is_listed == node->is_told ||
            (!node->is_listed && !is_settled)) {
            continue; /* a server that was started anew: others are about to come back */
        }
        event.kind = node->is_listed ? KVF_DIRECTORY_NODE : KVF_DIRECTORY_GONE;
        event.address = node->address;
        memcpy(event.name, node->name, sizeof(event.name));
        if (!directory_push(directory, &event)) {
            return;
        }
        node->is_told = node->is_listed;
        node->incarnation = node->is_listed ? node->incarnation : 0;
    }
}

/* ----------------------------------------------------------------------------------------------
 * What they say
 */
void directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed)
{
    struct directory_node *node = find(directory, incarnation);

    if (node != NULL) {
        node->follow = is_followed ? FOLLOW_START : FOLLOW_NOT;
    }
}

/* A message for the owner, which is judged as one of a link is. False: it is none. */
static bool pass_on(struct kvf_directory *directory, const struct directory_node *node,
                    uint8_t type, const void *body, uint32_t body_bytes)
{
    struct kvf_net_head head = {.type = type, .body_bytes = body_bytes};
    struct kvf_directory_event event = {.kind = KVF_DIRECTORY_MESSAGE,
                                        .type = type,
                                        .body_bytes = body_bytes,
                                        .incarnation = node->incarnation};
    const char *why;

    if (body_bytes < sizeof(struct kvf_net_blocks) || body_bytes > KVF_NET_BODY_BYTES_MAX ||
        kvf_net_body_check(&head, body, &why) != KVF_OK) {
        refuse(directory);
        return false;
    }
    event.body = malloc(body_bytes);
    if (event.body == NULL) {
        return false;
    }
    memcpy(event.body, body, body_bytes);
    if (!directory_push(directory, &event)) {
        free(event.body);
        return false;
    }
    return true;
}

static bool number_of(const redisReply *reply, uint64_t *number_out)
{
    char *end;

    if (reply == NULL || reply->type != REDIS_REPLY_STRING || reply->len == 0) {
        return false;
    }
    *number_out = strtoull(reply->str, &end, 10);
    return *number_out != 0;
}

/* The number behind the last entry of a stream: [[id, [field, value]]]. False: there is none. */
static bool number_after(const redisReply *entries, uint64_t *number_out)
{
    const redisReply *id;
    uint64_t number;
    char *end;

    if (entries == NULL || entries->type != REDIS_REPLY_ARRAY || entries->elements != 1 ||
        entries->element[0]->type != REDIS_REPLY_ARRAY || entries->element[0]->elements < 1) {
        return false;
    }
    id = entries->element[0]->element[0];
    if (id->type != REDIS_REPLY_STRING) {
        return false;
    }
    number = strtoull(id->str, &end, 10);
    if (*end != '-') {
        return false;
    }
    *number_out = number + strtoull(end + 1, &end, 10);
    return true;
}

static redisReply *ask_head(struct kvf_directory *directory, const struct directory_node *node)
{
    char key[KVF_DIRECTORY_KEY_BYTES];

    directory_key(directory, "head", node->incarnation, 0, key);
    (void)redisAppendCommand(directory->redis, "GET %s", key);
    directory->pipelined++;
    return directory_reply(directory);
}

/* Which snapshot counts, and which event follows? */
static void start(struct kvf_directory *directory, struct directory_node *node)
{
    struct kvf_net_blocks first = {.part = KVF_NET_SNAPSHOT_FIRST};
    char key[KVF_DIRECTORY_KEY_BYTES];
    redisReply *head = ask_head(directory, node);
    redisReply *last = NULL;
    uint64_t after = 0;

    if (head != NULL && number_of(head, &node->head)) {
        directory_key(directory, "events", node->incarnation, 0, key);
        (void)redisAppendCommand(directory->redis, "XREVRANGE %s + - COUNT 1", key);
        directory->pipelined++;
        last = directory_reply(directory);
        node->number = node->head;
        if (number_after(last, &after) && after > node->number) {
            node->number = after;
        }
        first.number = node->number;
        if (last != NULL &&
            pass_on(directory, node, KVF_NET_SNAPSHOT, &first, (uint32_t)sizeof(first))) {
            node->parts = 1;
            (void)snprintf(node->cursor, sizeof(node->cursor), "0");
            node->follow = FOLLOW_SCAN;
        }
    }
    freeReplyObject(head);
    freeReplyObject(last);
}

/* Fields and values of a part of the hash, as messages. False: there was no room for one. */
static bool pass_fields(struct kvf_directory *directory, struct directory_node *node,
                        const redisReply *fields)
{
    _Alignas(8) uint8_t body[KVF_NET_BODY_BYTES_MAX];
    struct kvf_net_blocks head = {.number = node->number};

    for (size_t i = 0; i + 1 < fields->elements; i += 2) {
        const redisReply *field = fields->element[i];
        const redisReply *value = fields->element[i + 1];
        struct kvf_net_block block = {.change = KVF_NET_ADDED};

        if (field->type != REDIS_REPLY_STRING || field->len != FIELD_BYTES ||
            value->type != REDIS_REPLY_STRING || value->len != sizeof(block.record_bytes)) {
            refuse(directory);
            continue;
        }
        memcpy(block.key_id, field->str, 32);
        memcpy(&block.shard, field->str + 32, 2);
        memcpy(&block.record_bytes, value->str, sizeof(block.record_bytes));
        memcpy(body + sizeof(head) + head.count++ * sizeof(block), &block, sizeof(block));
        if (head.count < KVF_NET_EVENTS_MAX && i + 3 < fields->elements) {
            continue;
        }
        head.index = node->parts++;
        memcpy(body, &head, sizeof(head));
        if (!pass_on(directory, node, KVF_NET_SNAPSHOT, body,
                     (uint32_t)(sizeof(head) + head.count * sizeof(block)))) {
            return false;
        }
        head.count = 0;
    }
    return true;
}

/* The whole snapshot has been read: does it still count? */
static void end_scan(struct kvf_directory *directory, struct directory_node *node)
{
    struct kvf_net_blocks last = {
        .number = node->number, .part = KVF_NET_SNAPSHOT_LAST, .index = node->parts};
    redisReply *head = ask_head(directory, node);
    uint64_t number;

    if (head != NULL && number_of(head, &number) && number == node->head &&
        pass_on(directory, node, KVF_NET_SNAPSHOT, &last, (uint32_t)sizeof(last))) {
        node->follow = FOLLOW_LIVE;
    } else {
        node->follow = FOLLOW_START;
    }
    freeReplyObject(head);
}

static void scan(struct kvf_directory *directory, struct directory_node *node)
{
    char key[KVF_DIRECTORY_KEY_BYTES];

    directory_key(directory, "blocks", node->incarnation, node->head, key);
    for (unsigned i = 0; i < SCANS_A_TURN && node->follow == FOLLOW_SCAN &&
                         directory_has_room(directory, ROOM_A_READ);
         i++) {
        redisReply *reply;

        (void)redisAppendCommand(directory->redis, "HSCAN %s %s COUNT %d", key, node->cursor,
                                 KVF_NET_EVENTS_MAX);
        directory->pipelined++;
        reply = directory_reply(directory);
        if (reply == NULL || reply->type != REDIS_REPLY_ARRAY || reply->elements != 2 ||
            reply->element[0]->type != REDIS_REPLY_STRING ||
            reply->element[1]->type != REDIS_REPLY_ARRAY ||
            !pass_fields(directory, node, reply->element[1])) {
            node->follow = FOLLOW_START;
        } else {
            (void)snprintf(node->cursor, sizeof(node->cursor), "%.20s", reply->element[0]->str);
        }
        freeReplyObject(reply);
        if (directory->redis != NULL && node->follow == FOLLOW_SCAN &&
            strcmp(node->cursor, "0") == 0) {
            end_scan(directory, node);
        }
    }
}

/* One entry: [id, ["b", body]]. False: no more of this node now. */
static bool take_entry(struct kvf_directory *directory, struct directory_node *node,
                       const redisReply *entry)
{
    const redisReply *fields = entry->type == REDIS_REPLY_ARRAY && entry->elements == 2
                                   ? entry->element[1]
                                   : NULL;
    const redisReply *value = fields != NULL && fields->type == REDIS_REPLY_ARRAY &&
                                      fields->elements == 2
                                  ? fields->element[1]
                                  : NULL;
    struct kvf_net_blocks head;

    if (value == NULL || value->type != REDIS_REPLY_STRING || value->len < sizeof(head) ||
        value->len > KVF_NET_BODY_BYTES_MAX ||
        !pass_on(directory, node, KVF_NET_EVENTS, value->str, (uint32_t)value->len)) {
        node->follow = FOLLOW_START;
        return false;
    }
    memcpy(&head, value->str, sizeof(head));
    node->number = head.number + head.count;
    return true;
}

static void take_entries(struct kvf_directory *directory, struct directory_node *node,
                         const redisReply *streams)
{
    const redisReply *stream;
    const redisReply *entries;

    if (streams == NULL || streams->type != REDIS_REPLY_ARRAY || streams->elements != 1) {
        return; /* nothing new */
    }
    stream = streams->element[0];
    if (stream->type != REDIS_REPLY_ARRAY || stream->elements != 2 ||
        stream->element[1]->type != REDIS_REPLY_ARRAY) {
        refuse(directory);
        return;
    }
    entries = stream->element[1];
    for (size_t i = 0; i < entries->elements; i++) {
        if (!take_entry(directory, node, entries->element[i])) {
            return;
        }
    }
}

void directory_read(struct kvf_directory *directory)
{
    char key[KVF_DIRECTORY_KEY_BYTES];

    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX && directory->redis != NULL; i++) {
        struct directory_node *node = &directory->nodes[i];
        redisReply *streams;

        if (node->incarnation == 0 || node->follow == FOLLOW_NOT ||
            !directory_has_room(directory, ROOM_A_READ)) {
            continue;
        }
        if (node->follow == FOLLOW_START) {
            start(directory, node);
        }
        if (node->follow == FOLLOW_SCAN && directory->redis != NULL) {
            scan(directory, node);
        }
        if (node->follow != FOLLOW_LIVE || directory->redis == NULL) {
            continue;
        }
        /* behind all entries that begin with an earlier event */
        directory_key(directory, "events", node->incarnation, 0, key);
        (void)redisAppendCommand(directory->redis, "XREAD COUNT %d STREAMS %s %llu-%llu",
                                 ENTRIES_A_GET, key, (unsigned long long)(node->number - 1),
                                 (unsigned long long)UINT64_MAX);
        directory->pipelined++;
        streams = directory_reply(directory);
        take_entries(directory, node, streams);
        freeReplyObject(streams);
    }
}
