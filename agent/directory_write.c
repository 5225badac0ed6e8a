/* SPDX-License-Identifier: Apache-2.0
 *
 * directory_write.c: what this node writes into the directory: that it is there, and what it has.
 *
 * A snapshot goes into a hash of its own, which counts for others once its last part is there; the
 * one before it is removed then. What comes later changes that hash and goes into the stream.
 */
#include "agent/directory_internal.h"

#include <stdio.h>
#include <string.h>

#define EVENTS_KEPT 1024 /* entries of a stream; who is further behind reads the snapshot */
#define FIELD_BYTES 34   /* key id, shard */

static uint64_t self(const struct kvf_directory *directory)
{
    return directory->config.incarnation;
}

static void append_block(struct kvf_directory *directory, const char *key,
                         const struct kvf_net_block *block)
{
    uint8_t field[FIELD_BYTES];

    memcpy(field, block->key_id, 32);
    memcpy(field + 32, &block->shard, 2);
    if (block->change == KVF_NET_ADDED) {
        (void)redisAppendCommand(directory->redis, "HSET %s %b %b", key, field, sizeof(field),
                                 &block->record_bytes, sizeof(block->record_bytes));
    } else {
        (void)redisAppendCommand(directory->redis, "HDEL %s %b", key, field, sizeof(field));
    }
    directory->pipelined++;
}

static void append_blocks(struct kvf_directory *directory, const char *key,
                          const struct kvf_net_blocks *head, const uint8_t *blocks)
{
    for (uint32_t i = 0; i < head->count; i++) {
        struct kvf_net_block block;

        memcpy(&block, blocks + i * sizeof(block), sizeof(block));
        append_block(directory, key, &block);
    }
    (void)redisAppendCommand(directory->redis, "EXPIRE %s %u", key, directory->config.lease_s);
    directory->pipelined++;
}

static void tell_part(struct kvf_directory *directory, const struct kvf_net_blocks *head,
                      const uint8_t *blocks)
{
    char key[KVF_DIRECTORY_KEY_BYTES];

    if ((head->part & KVF_NET_SNAPSHOT_FIRST) != 0) {
        directory->is_telling = true;
        directory->telling = head->number;
        directory_key(directory, "blocks", self(directory), directory->telling, key);
        (void)redisAppendCommand(directory->redis, "DEL %s", key);
        directory->pipelined++;
    }
    if (!directory->is_telling) {
        return; /* begun on a connection that broke */
    }
    directory_key(directory, "blocks", self(directory), directory->telling, key);
    append_blocks(directory, key, head, blocks);
    if ((head->part & KVF_NET_SNAPSHOT_LAST) == 0) {
        return;
    }
    directory_key(directory, "head", self(directory), 0, key);
    (void)redisAppendCommand(directory->redis, "SET %s %llu EX %u", key,
                             (unsigned long long)directory->telling, directory->config.lease_s);
    directory->pipelined++;
    if (directory->told != 0 && directory->told != directory->telling) {
        directory_key(directory, "blocks", self(directory), directory->told, key);
        (void)redisAppendCommand(directory->redis, "UNLINK %s", key);
        directory->pipelined++;
    }
    directory->told = directory->telling;
    directory->is_telling = false;
}

void directory_tell(struct kvf_directory *directory, const struct directory_call *call)
{
    struct kvf_net_blocks head;
    const uint8_t *blocks = (const uint8_t *)call->body + sizeof(head);
    char key[KVF_DIRECTORY_KEY_BYTES];

    memcpy(&head, call->body, sizeof(head));
    if (call->type == KVF_NET_SNAPSHOT) {
        tell_part(directory, &head, blocks);
    } else if (directory->told != 0 && !directory->is_telling && head.count > 0) {
        directory_key(directory, "blocks", self(directory), directory->told, key);
        append_blocks(directory, key, &head, blocks);
        directory_key(directory, "events", self(directory), 0, key);
        (void)redisAppendCommand(directory->redis, "XADD %s MAXLEN ~ %u %llu-%u b %b", key,
                                 EVENTS_KEPT, (unsigned long long)head.number, head.count,
                                 call->body, (size_t)call->body_bytes);
        directory->pipelined++;
    }
    (void)directory_drain(directory);
}

/* Others are told once more of everything: the server has forgotten, or never knew. */
static void begin_anew(struct kvf_directory *directory)
{
    directory->told = 0;
    directory->is_telling = false;
    directory->is_listed = directory_push(directory,
                                          &(struct kvf_directory_event){.kind = KVF_DIRECTORY_UP});
}

/* Let the blocks of this node live on. False: they are not there. */
static bool renew_blocks(struct kvf_directory *directory)
{
    static const char *const kinds[] = {"blocks", "events", "head"};
    char key[KVF_DIRECTORY_KEY_BYTES];
    redisReply *reply;
    bool is_there;

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        directory_key(directory, kinds[i], self(directory), i == 0 ? directory->told : 0, key);
        (void)redisAppendCommand(directory->redis, "EXPIRE %s %u", key, directory->config.lease_s);
        directory->pipelined++;
    }
    while (directory->pipelined > 1) {
        reply = directory_reply(directory);
        freeReplyObject(reply);
    }
    reply = directory_reply(directory);
    is_there = reply != NULL && reply->type == REDIS_REPLY_INTEGER && reply->integer == 1;
    freeReplyObject(reply);
    return is_there;
}

void directory_renew(struct kvf_directory *directory)
{
    struct kvf_directory_lease lease;
    char key[KVF_DIRECTORY_KEY_BYTES];
    bool is_there = directory->is_listed; /* the first snapshot is on its way */

    if (directory->config.listen.bytes == 0) {
        return; /* nobody can come for its blocks */
    }
    if (directory->told != 0) {
        is_there = renew_blocks(directory);
    }
    if (directory->redis == NULL) {
        return;
    }
    kvf_directory_lease_write(&directory->config, &lease);
    directory_key(directory, "lease", self(directory), 0, key);
    (void)redisAppendCommand(directory->redis, "SET %s %b EX %u", key, &lease, sizeof(lease),
                             directory->config.lease_s);
    (void)redisAppendCommand(directory->redis, "SADD %snodes %016llx", directory->prefix,
                             (unsigned long long)self(directory));
    directory->pipelined += 2;
    if (directory_drain(directory) && !is_there) {
        begin_anew(directory);
    }
}

void directory_leave(struct kvf_directory *directory)
{
    static const char *const kinds[] = {"lease", "head", "events"};
    char key[KVF_DIRECTORY_KEY_BYTES];

    if (directory->config.listen.bytes == 0) {
        return;
    }
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        directory_key(directory, kinds[i], self(directory), 0, key);
        (void)redisAppendCommand(directory->redis, "DEL %s", key);
    }
    directory_key(directory, "blocks", self(directory), directory->told, key);
    (void)redisAppendCommand(directory->redis, "UNLINK %s", key);
    (void)redisAppendCommand(directory->redis, "SREM %snodes %016llx", directory->prefix,
                             (unsigned long long)self(directory));
    directory->pipelined += 5;
    (void)directory_drain(directory);
}
