/* SPDX-License-Identifier: Apache-2.0
 *
 * admin_events.c: blocks that came and went, for routers: by the names and in the form of vLLM's KV
 * events (a KVEventBatch as msgspec reads it from JSON, bytes in base64).
 */
#include <jansson.h>
#include <sodium.h>
#include <stdio.h>
#include <time.h>

#include "agent/admin_internal.h"
#include "agent/control.h"

static const char *medium_of(uint8_t tier)
{
    switch (tier) {
    case KVF_TIER_HBM:
        return "GPU";
    case KVF_TIER_DRAM:
        return "CPU";
    case KVF_TIER_NVME:
        return "STORAGE";
    default:
        return NULL; /* it has gone since */
    }
}

static json_t *event_json(const struct kvf_control_event *event)
{
    char hash[sodium_base64_ENCODED_LEN(32, sodium_base64_VARIANT_ORIGINAL)];

    (void)sodium_bin2base64(hash, sizeof(hash), event->key_id, sizeof(event->key_id),
                            sodium_base64_VARIANT_ORIGINAL);
    if (event->is_removed) {
        return json_pack("{s:s, s:[s], s:n, s:i, s:s}", "type", "BlockRemoved", "block_hashes",
                         hash, "medium", "group_idx", (int)event->shard, "locality", "LOCAL");
    }
    return json_pack("{s:s, s:[s], s:n, s:[], s:i, s:n, s:s?, s:n, s:i, s:s, s:I}", "type",
                     "BlockStored", "block_hashes", hash, "parent_block_hash", "token_ids",
                     "block_size", 0, "lora_id", "medium", medium_of(event->tier), "lora_name",
                     "group_idx", (int)event->shard, "locality", "LOCAL", "record_bytes",
                     (json_int_t)event->record_bytes);
}

static json_t *hex_json(uint64_t value)
{
    char text[17];

    (void)snprintf(text, sizeof(text), "%llx", (unsigned long long)value);
    return json_string(text);
}

struct json_t *kvf_admin_events_json(const struct kvf_control *control, bool is_first)
{
    const struct kvf_control_event *rows = control->rows;
    json_t *events = json_array();
    struct timespec now;
    int failed = 0;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (is_first) { /* whatever was known of this node */
        failed |= json_array_append_new(events, json_pack("{s:s}", "type", "AllBlocksCleared"));
    }
    for (uint32_t i = 0; i < control->n_rows; i++) {
        failed |= json_array_append_new(events, event_json(&rows[i]));
    }
    if (failed) {
        json_decref(events);
        return NULL;
    }
    return json_pack("{s:o, s:o, s:o, s:[f, o, n]}", "incarnation", hex_json(control->incarnation),
                     "number", hex_json(control->number), "next_cursor",
                     control->next_cursor != 0 ? hex_json(control->next_cursor) : json_null(),
                     "batch", (double)now.tv_sec + (double)now.tv_nsec / 1e9, events);
}
