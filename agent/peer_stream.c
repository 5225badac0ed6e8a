/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_stream.c: the numbered stream of blocks that each node tells whoever has linked with it.
 *
 * Changes get numbers and go into a ring. A new listener is first told what is here, in parts, as
 * the index is walked, and then all changes from the number on that the walk began with: a block
 * that came or went meanwhile is said twice, which changes nothing. A listener that has fallen
 * behind the ring starts anew. One that sees a gap in the numbers asks for that; for the last
 * message there is to be seen, it is told the number from time to time while nothing changes.
 */
#include "agent/peers.h"

#include <string.h>

#include "base/mutant.h"

#define MESSAGES_A_TURN 4
#define WALK_A_MESSAGE  4096 /* entries looked at */
#define RESYNC_NS       KVF_NS_PER_S
#define CONFIRM_NS      (5 * KVF_NS_PER_S)
#define SNAPSHOT_NS     (5 * KVF_NS_PER_S) /* without the beginning of one: it is asked for */

/* ----------------------------------------------------------------------------------------------
 * What has changed here
 */
static void note(struct kvf_agent *agent, const struct kvf_entry *entry, uint8_t change)
{
    struct kvf_peers *peers = agent->peers;
    struct kvf_net_block *block;

    if (peers == NULL) {
        return;
    }
    block = &peers->log[peers->log_next % KVF_PEER_LOG_EVENTS];
    memcpy(block->key_id, entry->key_id, sizeof(block->key_id));
    block->record_bytes = change == KVF_NET_ADDED ? entry->record_bytes : 0;
    block->shard = (uint16_t)entry->shard;
    block->change = change;
    peers->log_next++;
}

void kvf_peers_added(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    note(agent, entry, KVF_NET_ADDED);
}

void kvf_peers_removed(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    note(agent, entry, KVF_NET_REMOVED);
}

/* ----------------------------------------------------------------------------------------------
 * Telling
 */
static bool send_body(struct kvf_peers *peers, const struct kvf_peer_link *link, uint8_t type,
                      const struct kvf_net_blocks *head)
{
    uint32_t bytes = (uint32_t)(sizeof(*head) + head->count * sizeof(struct kvf_net_block));

    memcpy(peers->body, head, sizeof(*head));
    return (link->is_directory
                ? kvf_directory_tell(peers->directory, type, peers->body, bytes)
                : kvf_net_send(peers->net, link->link, type, peers->body, bytes)) == KVF_OK;
}

static struct kvf_net_block *block_at(struct kvf_peers *peers, uint32_t i)
{
    return (struct kvf_net_block *)(void *)(peers->body + sizeof(struct kvf_net_blocks) +
                                            i * sizeof(struct kvf_net_block));
}

bool kvf_peers_is_here(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return !entry->is_set && (entry->state == KVF_ENTRY_READY ||
                              (entry->state == KVF_ENTRY_LOADING &&
                               (kvf_entry_on_drive(entry) || kvf_entry_in_hbm(agent, entry))));
}

/* The next part of a snapshot. False: it could not be sent. */
static bool tell_part(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    const struct kvf_index *index = &peers->agent->index;
    bool is_first = link->tell == KVF_TELL_FIRST;
    uint32_t cursor = is_first ? 0 : link->cursor;
    uint64_t told = is_first ? peers->log_next : link->told;
    struct kvf_net_blocks head = {.number = told,
                                  .part = is_first ? KVF_NET_SNAPSHOT_FIRST : 0,
                                  .index = is_first ? 0 : link->parts};

    for (uint32_t steps = 0;
         steps < WALK_A_MESSAGE && cursor < index->fresh && head.count < KVF_NET_EVENTS_MAX;
         steps++, cursor++) {
        const struct kvf_entry *entry = &index->entries[cursor];

        if (kvf_peers_is_here(peers->agent, entry)) {
            struct kvf_net_block *block = block_at(peers, head.count++);

            memset(block, 0, sizeof(*block));
            memcpy(block->key_id, entry->key_id, sizeof(block->key_id));
            block->record_bytes = entry->record_bytes;
            block->shard = (uint16_t)entry->shard;
            block->change = KVF_NET_ADDED;
        }
    }
    head.part |= cursor >= index->fresh ? KVF_NET_SNAPSHOT_LAST : 0;
    if (!send_body(peers, link, KVF_NET_SNAPSHOT, &head)) {
        return false;
    }
    link->parts = (uint16_t)(head.index + 1);
    link->cursor = cursor;
    link->told = told;
    link->tell = (head.part & KVF_NET_SNAPSHOT_LAST) != 0 ? KVF_TELL_EVENTS : KVF_TELL_SNAPSHOT;
    return true;
}

static bool tell_events(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    struct kvf_net_blocks head = {.number = link->told};

    while (head.count < KVF_NET_EVENTS_MAX && link->told + head.count < peers->log_next) {
        *block_at(peers, head.count) = peers->log[(link->told + head.count) % KVF_PEER_LOG_EVENTS];
        head.count++;
    }
    if (!send_body(peers, link, KVF_NET_EVENTS, &head)) {
        return false;
    }
    link->told += head.count;
    return true;
}

/* Returns how many messages went out. */
static unsigned tell_link(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    bool is_first, sent = true;
    unsigned n = 0;

    if (link->link == 0 || link->is_initiator) {
        return 0;
    }
    for (uint32_t k = 0; sent && k < MESSAGES_A_TURN; k++) {
        if (link->tell != KVF_TELL_FIRST && peers->log_next - link->told > KVF_PEER_LOG_EVENTS) {
            link->tell = KVF_TELL_FIRST;
        }
        if (link->tell == KVF_TELL_EVENTS && link->told == peers->log_next &&
            (link->is_directory || peers->agent->now_ns - link->told_ns < CONFIRM_NS)) {
            break;
        }
        is_first = link->tell == KVF_TELL_FIRST;
        sent = link->tell == KVF_TELL_EVENTS ? tell_events(peers, link) : tell_part(peers, link);
        peers->agent->metrics.peer_snapshots_sent += is_first && sent;
        link->told_ns = sent ? peers->agent->now_ns : link->told_ns;
        n += sent;
    }
    if (!link->is_directory && link->told_ns + CONFIRM_NS < peers->confirm_ns) {
        peers->confirm_ns = link->told_ns + CONFIRM_NS;
    }
    peers->owes |= link->tell != KVF_TELL_EVENTS || link->told != peers->log_next;
    return n;
}

unsigned kvf_peers_tell(struct kvf_peers *peers)
{
    unsigned n = 0;

    peers->owes = false;
    peers->confirm_ns = UINT64_MAX;
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        n += tell_link(peers, &peers->links[i]);
    }
    return n + tell_link(peers, &peers->written);
}

/* ----------------------------------------------------------------------------------------------
 * Being told
 */
void kvf_peers_unlearn(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    if (link->source != KVF_HINT_NONE) {
        kvf_hints_source_close(&peers->hints, link->source);
        link->source = KVF_HINT_NONE;
    }
    link->learn = KVF_LEARN_WAITS;
    link->blocks = 0;
}

/* What was told does not fit what was told before. */
static void resync(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    struct kvf_agent *agent = peers->agent;

    kvf_peers_unlearn(peers, link);
    if (link->resync_ns != 0 && agent->now_ns - link->resync_ns < RESYNC_NS) {
        return; /* asked a moment ago; what comes in between is dropped */
    }
    if ((link->is_directory
             ? kvf_directory_follow(peers->directory, link->incarnation, true)
             : kvf_net_send(peers->net, link->link, KVF_NET_RESYNC, NULL, 0)) == KVF_OK) {
        link->resync_ns = agent->now_ns;
        agent->metrics.peer_gaps++;
    }
}

static void apply(struct kvf_peers *peers, struct kvf_peer_link *link,
                  const struct kvf_net_blocks *head, const uint8_t *blocks)
{
    for (uint32_t i = 0; i < head->count; i++) {
        struct kvf_net_block block;

        memcpy(&block, blocks + i * sizeof(block), sizeof(block));
        if (block.change == KVF_NET_ADDED) {
            kvf_hints_add(&peers->hints, link->source, block.key_id, block.shard,
                          block.record_bytes);
            link->blocks++;
        } else {
            kvf_hints_remove(&peers->hints, link->source, block.key_id, block.shard);
            link->blocks -= link->blocks > 0;
        }
    }
}

static void told_part(struct kvf_peers *peers, struct kvf_peer_link *link,
                      const struct kvf_net_blocks *head, const uint8_t *blocks)
{
    if ((head->part & KVF_NET_SNAPSHOT_FIRST) != 0) {
        kvf_peers_unlearn(peers, link);
        link->source = kvf_hints_source_open(&peers->hints);
        if (link->source == KVF_HINT_NONE) {
            resync(peers, link); /* once some old ones have been swept */
            return;
        }
        link->learn = KVF_LEARN_SNAPSHOT;
        link->number = head->number;
        link->part = 0;
        peers->agent->metrics.peer_snapshots++;
    }
    if (link->learn != KVF_LEARN_SNAPSHOT || link->number != head->number ||
        (link->part != head->index && !KVF_MUTANT(peer_part_missed))) {
        resync(peers, link);
        return;
    }
    link->part++;
    apply(peers, link, head, blocks);
    if ((head->part & KVF_NET_SNAPSHOT_LAST) != 0) {
        link->learn = KVF_LEARN_LIVE;
        peers->is_far_due = true;
        kvf_log(KVF_LOG_INFO, "peers: %s has %llu blocks", link->name,
                (unsigned long long)link->blocks);
    }
}

void kvf_peers_told(struct kvf_peers *peers, struct kvf_peer_link *link, uint8_t type,
                    const void *body)
{
    struct kvf_net_blocks head;
    const uint8_t *blocks;

    if (type == KVF_NET_RESYNC) {
        link->tell = KVF_TELL_FIRST; /* it has no body */
        return;
    }
    memcpy(&head, body, sizeof(head));
    blocks = (const uint8_t *)body + sizeof(head);
    if (type == KVF_NET_SNAPSHOT) {
        told_part(peers, link, &head, blocks);
    } else if (link->learn != KVF_LEARN_LIVE ||
               (link->number != head.number && !KVF_MUTANT(peer_gap_missed))) {
        resync(peers, link);
    } else {
        apply(peers, link, &head, blocks);
        link->number = head.number + head.count;
    }
}

void kvf_peers_ask_again(struct kvf_peers *peers)
{
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct kvf_peer_link *link = &peers->links[i];
        uint64_t asked_ns = link->resync_ns != 0 ? link->resync_ns : link->since_ns;

        if (link->link != 0 && link->is_initiator && link->learn == KVF_LEARN_WAITS &&
            peers->agent->now_ns - asked_ns > SNAPSHOT_NS) {
            resync(peers, link);
        }
    }
}
