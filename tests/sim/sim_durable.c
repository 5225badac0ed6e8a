/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_durable.c: what must come back. Before the daemon ends, the blocks that its drives must bring
 * back are remembered; between its lives the bytes on the drives are looked at; afterwards each of
 * them must be in the index again.
 *
 *   power lost     blocks whose durable put has completed
 *   killed         every block whose write has completed: a process does not take the drive along
 *   drained        every block that is on a drive
 *
 * A drive that has been made to lie is believed nothing.
 */
#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "tiers/tier_nvme_internal.h"

struct item {
    const struct sim_block *block; /* NULL: not asked of the model */
    uint8_t key_id[32];
    uint32_t shard, drive;
    kvf_location location;
    uint64_t record_bytes;
    const char *why; /* what is wrong with its bytes, or NULL */
};

struct sim_durable {
    uint32_t n_items;
    struct item items[];
};

static void remember(struct sim *sim, struct sim_durable *durable, const struct kvf_entry *entry,
                     const struct sim_block *block)
{
    if (entry == NULL || entry->state == KVF_ENTRY_FREE || entry->is_set ||
        !kvf_entry_on_drive(entry) || sim->drives[entry->drive].has_silent_faults) {
        return;
    }
    struct item *item = &durable->items[durable->n_items++];

    item->block = block;
    memcpy(item->key_id, entry->key_id, sizeof(item->key_id));
    item->shard = entry->shard;
    item->drive = entry->drive;
    item->location = kvf_entry_nvme_location(entry);
    item->record_bytes = entry->record_bytes;
}

static uint32_t block_count(void)
{
    return SIM_NAMESPACES_HONEST * SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX;
}

struct sim_durable *sim_durable_remember(struct sim *sim, enum sim_end end, bool is_clean)
{
    const struct kvf_index *index = &sim->agent->index;
    struct sim_durable *durable = calloc(1, sizeof(*durable) +
                                                (size_t)index->count * sizeof(durable->items[0]));
    bool is_all = end == SIM_END_KILL || (end == SIM_END_DRAIN && is_clean);

    if (durable == NULL) {
        abort();
    }
    if (is_all) {
        for (uint32_t i = 0; i < index->fresh; i++) {
            remember(sim, durable, &index->entries[i], NULL);
        }
        return durable;
    }
    for (uint32_t i = 0; i < block_count(); i++) {
        struct sim_block *block = &sim->blocks[i];

        if (block->is_durable) {
            const struct kvf_entry *entry = kvf_index_find(index, sim_block_key_id(sim, block),
                                                           i % SIM_SHARDS_MAX);

            /* it may have been reclaimed, and written once more since, without a sync */
            remember(sim, durable, entry != NULL && entry->nvme == KVF_NVME_SYNCED ? entry : NULL,
                     block);
        }
    }
    return durable;
}

/* Is the record where the daemon believed it to be? */
static const char *what_is_wrong(const struct sim *sim, const uint8_t *image,
                                 const struct item *item)
{
    uint64_t at = kvf_nvme_segment_offset(sim->config.nvme[item->drive].segment_bytes,
                                          kvf_nvme_location_segment(item->location));
    const struct kvf_nvme_segment *segment = (const void *)(image + at);
    const struct kvf_record_page *page =
        (const void *)(image + at +
                       (uint64_t)kvf_nvme_location_page(item->location) * KVF_NVME_PAGE_BYTES);

    uint64_t stored_bytes = page->header.total_bytes;
    uint64_t plain_bytes = page->header.plain_bytes;

    if (segment->magic != KVF_NVME_SEGMENT_MAGIC ||
        kvf_nvme_location_pack(segment->generation, kvf_nvme_location_segment(item->location),
                               kvf_nvme_location_page(item->location)) != item->location) {
        return "its segment has another generation";
    }
    if (page->header.magic != KVF_BLOCK_MAGIC || page->store.generation != segment->generation ||
        memcmp(page->header.key_id, item->key_id, sizeof(item->key_id)) != 0 ||
        stored_bytes > item->record_bytes ||
        (plain_bytes == 0 ? stored_bytes : plain_bytes) != item->record_bytes) {
        return "its record page is not there";
    }
    return kvf_crc32c(0, page + 1, stored_bytes - KVF_RECORD_PAGE_BYTES) ==
                   page->header.payload_crc32c
               ? NULL
               : "its payload is not there";
}

static void __attribute__((noreturn))
lost(struct sim *sim, const struct item *item, const char *why)
{
    char text[200] = "block";

    if (item->block != NULL) {
        sim_describe(sim, item->block, text, sizeof(text));
    }
    sim_fail(sim, "durable %s, key id %02x%02x%02x%02x shard %u at %llx of drive %u: %s", text,
             item->key_id[0], item->key_id[1], item->key_id[2], item->key_id[3], item->shard,
             (unsigned long long)item->location, item->drive, why);
}

/* A record that is being kept when its segment is reused has two places for a moment, and the newer
 * one may go with the power; so wrong bytes alone are no failure, only an explanation. */
void sim_durable_inspect(struct sim *sim, struct sim_durable *durable)
{
    for (uint32_t drive = 0; drive < sim->shape.n_drives; drive++) {
        const uint8_t *image = kvf_io_sim_bytes(sim->drives[drive].disk);

        for (uint32_t i = 0; i < durable->n_items; i++) {
            struct item *item = &durable->items[i];

            if (item->drive == drive) {
                item->why = what_is_wrong(sim, image, item);
            }
        }
    }
}

void sim_durable_check(struct sim *sim, struct sim_durable *durable)
{
    const struct kvf_index *index = &sim->agent->index;

    for (uint32_t i = 0; i < durable->n_items; i++) {
        const struct item *item = &durable->items[i];
        const struct kvf_entry *entry = kvf_index_find(index, item->key_id, item->shard);

        /* damaged while the daemon was down, or no room for all that came back: the first shard of
         * a set takes two entries */
        if (sim->drives[item->drive].has_silent_faults || index->count + 2 > index->capacity) {
            continue;
        }
        if (entry == NULL || !kvf_entry_on_drive(entry)) {
            lost(sim, item, item->why != NULL ? item->why : "it is there, but did not come back");
        }
        sim_cover(sim, SIM_COVER_durable_checked);
    }
}

void sim_durable_free(struct sim_durable *durable)
{
    free(durable);
}

/* First in, first out: a record goes only after all segments behind its own have been opened. */
static bool may_be_reclaimed(const struct sim *sim, const struct kvf_drive *drive,
                             kvf_location location)
{
    struct kvf_nvme_info info;
    uint64_t generation = location >> (KVF_NVME_SEGMENT_BITS + KVF_NVME_PAGE_BITS);

    (void)sim;
    kvf_nvme_info(drive->store, &info);
    return info.generation + 2 >= generation + info.segments;
}

void sim_durable_audit(struct sim *sim)
{
    const struct kvf_index *index = &sim->agent->index;

    for (uint32_t i = 0; i < block_count(); i++) {
        struct sim_block *block = &sim->blocks[i];
        uint32_t ns = i / (SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX);
        const struct kvf_entry *entry;

        if (!block->is_durable || sim->namespaces[ns].id == 0) {
            continue;
        }
        entry = kvf_index_find(index, sim_block_key_id(sim, block), i % SIM_SHARDS_MAX);
        if (entry != NULL && entry->nvme == KVF_NVME_SYNCED) {
            block->location = kvf_entry_nvme_location(entry);
            block->location_drive = entry->drive & 7u;
            continue;
        }
        if (!sim->is_life_damaged && !sim->was_index_full && block->location != 0 &&
            !sim->drives[block->location_drive].has_silent_faults &&
            sim->namespaces[ns].shard_count == 1 &&
            block->pending[0] + block->pending[1] + block->pending[2] + block->pending[3] == 0 &&
            !may_be_reclaimed(sim, &sim->agent->drives[block->location_drive], block->location)) {
            char text[200];

            sim_describe(sim, block, text, sizeof(text));
            sim_fail(sim, "durable %s left its drive (from %llx) before its turn: %s", text,
                     (unsigned long long)block->location,
                     entry == NULL ? "forgotten" : "only in memory");
        }
        block->is_durable = false;
        block->location = 0;
    }
}
