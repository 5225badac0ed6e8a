/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_events.c: the numbered changes of blocks, for routers that ask by the admin socket.
 */
#include "agent/peers.h"

#include <stdio.h>
#include <string.h>

#define WALK_AN_ANSWER 4096 /* entries looked at */

static uint8_t tier_of(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return entry == NULL                    ? 0
           : kvf_entry_in_hbm(agent, entry) ? KVF_TIER_HBM
           : kvf_entry_in_dram(entry)       ? KVF_TIER_DRAM
                                            : KVF_TIER_NVME;
}

static void list_changes(struct kvf_agent *agent, struct kvf_control *control)
{
    const struct kvf_peers *peers = agent->peers;
    struct kvf_control_event *rows = control->rows;

    for (; control->n_rows < control->max_rows && control->number < peers->log_next;
         control->number++) {
        const struct kvf_net_block *block = &peers->log[control->number % KVF_PEER_LOG_EVENTS];
        struct kvf_control_event *row = &rows[control->n_rows++];

        memcpy(row->key_id, block->key_id, sizeof(row->key_id));
        row->record_bytes = block->record_bytes;
        row->shard = block->shard;
        row->is_removed = block->change == KVF_NET_REMOVED;
        row->tier = tier_of(agent, kvf_index_find(&agent->index, block->key_id, block->shard));
    }
}

static void list_all(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_control_event *rows = control->rows;
    uint64_t end = control->cursor + WALK_AN_ANSWER;
    uint64_t at = control->cursor;

    control->number = agent->peers->log_next;
    for (; at < agent->index.fresh && at < end && control->n_rows < control->max_rows; at++) {
        const struct kvf_entry *entry = &agent->index.entries[at];

        if (kvf_peers_is_here(agent, entry)) {
            struct kvf_control_event *row = &rows[control->n_rows++];

            memcpy(row->key_id, entry->key_id, sizeof(row->key_id));
            row->record_bytes = entry->record_bytes;
            row->shard = (uint16_t)entry->shard;
            row->tier = tier_of(agent, entry);
        }
    }
    control->next_cursor = at < agent->index.fresh ? at : 0;
}

void kvf_peers_events(struct kvf_agent *agent, struct kvf_control *control)
{
    const struct kvf_peers *peers = agent->peers;
    int status = KVF_OK;

    control->incarnation = agent->incarnation;
    if (peers == NULL) {
        status = KVF_ERR_REFUSED;
        (void)snprintf(control->text, sizeof(control->text),
                       "changes are numbered where peers.listen, peers.nodes or directory.address "
                       "is set");
    } else if (control->number == 0) {
        list_all(agent, control);
    } else if (control->number > peers->log_next ||
               peers->log_next - control->number > KVF_PEER_LOG_EVENTS) {
        status = KVF_MISS;
        (void)snprintf(control->text, sizeof(control->text),
                       "event %llx (hexadecimal) is not kept: begin anew, without a number",
                       (unsigned long long)control->number);
    } else {
        list_changes(agent, control);
    }
    kvf_answer_finish(control, status);
}
