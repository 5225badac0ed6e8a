/* SPDX-License-Identifier: Apache-2.0
 *
 * core_bed.c: as much of an agent as leases and admission need.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/agent/core_bed.h"

#include <stdlib.h>
#include <string.h>

#include "tiers/work_inline.h"

#define BLOCKS_MAX 256

static bool memory_allows(void *ctx, uint64_t bytes)
{
    (void)ctx;
    (void)bytes;
    return true;
}

static void open_memory(struct core_bed *bed)
{
    struct kvf_agent *agent = &bed->agent;
    struct kvf_dram_config dram;
    struct kvf_dram_info info;
    char why[KVF_ERROR_TEXT_BYTES];

    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_SUBMIT, 64, &agent->work), KVF_OK);
    kvf_dram_config_init(&dram);
    dram.arena_bytes = BED_ARENA_BYTES;
    dram.area_bytes = 1 << 20;
    dram.env = kvf_env_system();
    dram.work = agent->work;
    dram.host = kvf_place_dram_host(agent);
    dram.memory_allows = memory_allows;
    assert_int_equal(kvf_dram_open(&dram, &agent->dram_store, why, sizeof(why)), KVF_OK);
    agent->dram = agent->dram_store;
    do {
        agent->work->ops->poll(agent->work);
        agent->dram->ops->poll(agent->dram, 0);
        kvf_dram_info(agent->dram_store, &info);
    } while (info.populated_bytes < info.arena_bytes);
    agent->arena_bytes = info.arena_bytes;
    agent->writeback_max_bytes = info.arena_bytes;
}

static void open_session(struct core_bed *bed, uint32_t number)
{
    struct kvf_session *session = &bed->sessions[number];

    session->agent = &bed->agent;
    session->state = KVF_SESSION_READY;
    session->lease_oldest = KVF_INDEX_NONE;
    session->lease_newest = KVF_INDEX_NONE;
    session->ring.leases = bed->words[number];
    session->ring.lease_entries = BED_LEASES;
    assert_int_equal(kvf_lease_table_init(session, BED_LEASES), KVF_OK);
}

struct core_bed *core_bed_create(void)
{
    struct core_bed *bed = calloc(1, sizeof(*bed));
    struct kvf_agent *agent;

    assert_non_null(bed);
    agent = &bed->agent;
    agent->config = &bed->config;
    agent->env = kvf_env_system();
    agent->now_ns = agent->started_ns = kvf_env_now_ns(&agent->env);
    kvf_config_init(&bed->config);
    assert_int_equal(kvf_index_open(&agent->index, BLOCKS_MAX), KVF_OK);
    assert_int_equal(kvf_pool_init(&agent->pins, "pins", sizeof(struct kvf_pin), BLOCKS_MAX),
                     KVF_OK);
    assert_int_equal(
        kvf_pool_init(&agent->flights, "flights", sizeof(struct kvf_flight), BLOCKS_MAX), KVF_OK);
    agent->n_sides = BED_ARENA_BYTES / KVF_DRAM_SLOT_BYTES_MIN + 1;
    agent->sides = calloc(agent->n_sides, sizeof(*agent->sides));
    agent->namespaces = calloc(KVF_INDEX_NAMESPACES_MAX, sizeof(*agent->namespaces));
    agent->ghosts = calloc(KVF_GHOST_ENTRIES, sizeof(*agent->ghosts));
    agent->key_names = aligned_alloc(64, KVF_KEY_NAMES * sizeof(*agent->key_names));
    assert_true(agent->sides != NULL && agent->namespaces != NULL && agent->ghosts != NULL &&
                agent->key_names != NULL);
    memset(agent->key_names, 0, KVF_KEY_NAMES * sizeof(*agent->key_names));
    agent->namespaces[0].id = 1;
    agent->namespaces[0].shard_count = 1;
    agent->n_tenants = 1;
    agent->n_drives = 1;
    agent->drives[0].agent = agent;
    agent->drives[0].config = &bed->config.nvme[0];
    agent->sessions = bed->sessions;
    agent->sessions_capacity = 2;
    open_memory(bed);
    open_session(bed, 0);
    open_session(bed, 1);
    return bed;
}

void core_bed_destroy(struct core_bed *bed)
{
    struct kvf_agent *agent = &bed->agent;

    kvf_lease_table_fini(&bed->sessions[0]);
    kvf_lease_table_fini(&bed->sessions[1]);
    agent->work->ops->close(agent->work);
    agent->dram->ops->close(agent->dram);
    (void)kvf_pool_fini(&agent->pins, NULL);
    (void)kvf_pool_fini(&agent->flights, NULL);
    kvf_index_close(&agent->index);
    free(agent->sides);
    free(agent->namespaces);
    free(agent->ghosts);
    free(agent->key_names);
    free(bed);
}

struct kvf_entry *core_bed_block(struct core_bed *bed)
{
    struct kvf_agent *agent = &bed->agent;
    uint8_t key_id[32];
    struct kvf_entry *entry;
    kvf_location slot;

    memset(key_id, ++bed->next_key, sizeof(key_id));
    entry = kvf_index_insert(&agent->index, key_id, 0, 0);
    assert_non_null(entry);
    assert_int_equal(agent->dram->ops->reserve(agent->dram, 0, BED_RECORD_BYTES,
                                               kvf_index_cookie(&agent->index, entry), &slot),
                     KVF_OK);
    entry->state = KVF_ENTRY_READY;
    entry->record_bytes = BED_RECORD_BYTES;
    entry->dram_slot = (uint32_t)slot;
    agent->sides[(uint32_t)slot].generation = (uint32_t)(slot >> 32);
    agent->sides[(uint32_t)slot].writer = KVF_INDEX_NONE;
    agent->sides[(uint32_t)slot].cookie = kvf_index_cookie(&agent->index, entry);
    kvf_dram_publish(agent->dram_store, slot, 0);
    return entry;
}
