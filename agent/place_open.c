/* SPDX-License-Identifier: Apache-2.0
 *
 * place_open.c: memory, drives and tables at start, and their end.
 */
#include "agent/core.h"

#include <stdlib.h>
#include <string.h>

#include "agent/peers.h"
#include "base/hash.h"
#include "tiers/tier_delay.h"
#include "tiers/tier_fault.h"

#define WORK_ENTRIES 16384 /* jobs that wait for a worker; more are answered busy */

static uint64_t index_entries(const struct kvf_config *config)
{
    /* One entry for 32 KiB of memory and of the first 32 GiB of drives, one for 1 MiB beyond: small
     * blocks live in small stores. index.entries says otherwise where they do not. */
    uint64_t entries = config->dram_bytes >> 15;
    uint64_t drives = 0;

    if (config->index_entries != 0) {
        return config->index_entries;
    }
    for (uint32_t i = 0; i < config->n_nvme; i++) {
        drives += config->nvme[i].bytes;
    }
    entries += drives >> 15 < 1u << 20 ? drives >> 15 : 1u << 20;
    entries += drives >> 20;
    entries = entries < 1u << 16 ? 1u << 16 : entries;
    return entries > 1u << 31 ? 1u << 31 : entries;
}

static uint64_t clients_limit(const struct kvf_config *config, uint64_t each)
{
    return (config->clients_max + 1) * each;
}

static uint64_t flights_limit(const struct kvf_config *config)
{
    uint64_t hbm = config->gpu_hbm_bytes != 0
                       ? (KVF_PROMOTES_MAX + KVF_DEMOTES_MAX) * KVF_HBM_DEVICES_MAX
                       : 0;

    return clients_limit(config, KVF_FLIGHTS_A_CLIENT) + KVF_WRITES_MAX + hbm;
}

void kvf_agent_memory(const struct kvf_config *config, struct kvf_agent_memory *memory_out)
{
    memory_out->index_entries = index_entries(config);
    memory_out->index_bytes = kvf_index_bytes((uint32_t)memory_out->index_entries);
    memory_out->request_bytes = clients_limit(config, KVF_REQUESTS_A_CLIENT) *
                                    sizeof(struct kvf_request) +
                                clients_limit(config, KVF_OPS_A_CLIENT) * sizeof(struct kvf_op) +
                                clients_limit(config, KVF_PINS_A_CLIENT) * sizeof(struct kvf_pin) +
                                flights_limit(config) * sizeof(struct kvf_flight);
    memory_out->session_bytes =
        (config->clients_max + KVF_SESSIONS_TO_REFUSE) * sizeof(struct kvf_session) +
        config->clients_max * kvf_session_table_bytes((uint32_t)config->clients_ring_entries);
    memory_out->slot_bytes = config->dram_bytes / KVF_DRAM_SLOT_BYTES_MIN *
                             sizeof(struct kvf_slot_side);
    memory_out->ghost_bytes = KVF_GHOST_ENTRIES * sizeof(uint32_t) +
                              KVF_INCOMPLETE_MAX * sizeof(struct kvf_incomplete) +
                              KVF_KEY_NAMES * sizeof(struct kvf_key_name);
    memory_out->hbm_bytes = kvf_hbm_table_bytes(config, memory_out->index_entries);
    memory_out->peers_bytes = kvf_peers_table_bytes(config, memory_out->index_entries);
}

static int open_tables(struct kvf_agent *agent)
{
    const struct kvf_config *config = agent->config;
    int status = kvf_index_open(&agent->index, (uint32_t)index_entries(config));

    if (status == KVF_OK) {
        status = kvf_pool_init(&agent->requests, "requests", sizeof(struct kvf_request),
                               (uint32_t)clients_limit(config, KVF_REQUESTS_A_CLIENT));
    }
    if (status == KVF_OK) {
        status = kvf_pool_init(&agent->ops, "ops", sizeof(struct kvf_op),
                               (uint32_t)clients_limit(config, KVF_OPS_A_CLIENT));
    }
    if (status == KVF_OK) {
        status = kvf_pool_init(&agent->pins, "pins", sizeof(struct kvf_pin),
                               (uint32_t)clients_limit(config, KVF_PINS_A_CLIENT));
    }
    if (status == KVF_OK) {
        status = kvf_pool_init(&agent->flights, "flights", sizeof(struct kvf_flight),
                               (uint32_t)flights_limit(config));
    }
    if (status != KVF_OK) {
        return status;
    }
    agent->namespaces = calloc(KVF_INDEX_NAMESPACES_MAX, sizeof(*agent->namespaces));
    agent->ghosts = calloc(KVF_GHOST_ENTRIES, sizeof(*agent->ghosts));
    agent->key_names = aligned_alloc(64, KVF_KEY_NAMES * sizeof(*agent->key_names));
    agent->incomplete = calloc(KVF_INCOMPLETE_MAX, sizeof(*agent->incomplete));
    agent->n_sides = config->dram_bytes / KVF_DRAM_SLOT_BYTES_MIN + 1;
    agent->sides = calloc(agent->n_sides, sizeof(*agent->sides));
    if (agent->namespaces == NULL || agent->ghosts == NULL || agent->incomplete == NULL ||
        agent->sides == NULL || agent->key_names == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    memset(agent->key_names, 0, KVF_KEY_NAMES * sizeof(*agent->key_names));
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
static void area_ready(void *ctx, void *base, uint64_t bytes)
{
    struct kvf_agent *agent = ctx;

    for (uint32_t i = 0; i < agent->n_drives; i++) {
        /* a speed-up only: without it the kernel pins the pages of each I/O anew */
        (void)kvf_nvme_register_memory(agent->drives[i].store, base, bytes);
    }
}

static void piece_added(void *ctx, uint32_t piece_id)
{
    kvf_session_piece_added(ctx, piece_id);
}

static void piece_dropped(void *ctx, uint32_t piece_id)
{
    kvf_session_piece_dropped(ctx, piece_id);
}

static bool no_memory(void *ctx, uint64_t bytes)
{
    (void)ctx;
    (void)bytes;
    return false;
}

static int open_dram(struct kvf_agent *agent)
{
    const struct kvf_config *config = agent->config;
    struct kvf_dram_config dram;
    struct kvf_dram_info info;
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    kvf_config_dram(config, &dram);
    dram.env = agent->env;
    dram.work = agent->work;
    dram.memory_allows = kvf_predecessor_allows;
    dram.memory_ctx = agent;
    if (agent->ports.memory_allows != NULL) {
        dram.memory_allows = agent->ports.memory_allows;
        dram.memory_ctx = agent->ports.ctx;
    }
    if (config->mode == KVF_MODE_OBSERVE) {
        dram.memory_allows = no_memory; /* nothing is stored: memory is not taken */
    }
    dram.host = kvf_place_dram_host(agent);
    dram.events.ctx = agent;
    dram.events.area_ready = area_ready;
    dram.events.piece_added = piece_added;
    dram.events.piece_dropped = piece_dropped;
    status = kvf_dram_open(&dram, &agent->dram_store, why, sizeof(why));
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "dram: %s", why);
        return status;
    }
    kvf_dram_info(agent->dram_store, &info);
    agent->arena_bytes = info.arena_bytes;
    agent->writeback_max_bytes = info.arena_bytes / 100 * config->put_writeback_share;
    kvf_log(KVF_LOG_INFO, "dram: %llu MiB in areas of %llu MiB, %s",
            (unsigned long long)(info.arena_bytes >> 20),
            (unsigned long long)(info.area_bytes >> 20), why);
    agent->dram = agent->dram_store;
    if (config->test_fault_dram[0] != '\0') {
        status = kvf_fault_open(agent->dram_store, config->test_fault_dram, &agent->dram, why,
                                sizeof(why));
        if (status != KVF_OK) {
            kvf_log(KVF_LOG_ERROR, "test.fault_dram: %s", why);
        }
    }
    return status;
}

/* ----------------------------------------------------------------------------------------------
 * Drives
 */
static bool may_reinsert(void *ctx, uint64_t bytes)
{
    (void)bytes;
    return kvf_admit_allows_reinsertion(ctx);
}

static int64_t credit_bytes(void *ctx)
{
    return (int64_t)kvf_admit_credit(ctx);
}

/* Put what the configuration injects around the store. */
static int wrap_drive(struct kvf_agent *agent, struct kvf_drive *drive)
{
    const struct kvf_config *config = agent->config;
    struct kvf_tier *wrapped;
    char why[KVF_ERROR_TEXT_BYTES];
    int status = KVF_OK;

    drive->tier = drive->store;
    if (config->test_fault_nvme[0] != '\0') {
        status = kvf_fault_open(drive->tier, config->test_fault_nvme, &wrapped, why, sizeof(why));
        if (status != KVF_OK) {
            kvf_log(KVF_LOG_ERROR, "test.fault_nvme: %s", why);
            return status;
        }
        drive->tier = wrapped;
    }
    if (config->test_delay_nvme[0] != '\0') {
        status = kvf_delay_open(drive->tier, config->test_delay_nvme, &agent->env, &wrapped, why,
                                sizeof(why));
        if (status != KVF_OK) {
            kvf_log(KVF_LOG_ERROR, "test.delay_nvme: %s", why);
            return status;
        }
        drive->tier = wrapped;
    }
    return KVF_OK;
}

static int open_drive(struct kvf_agent *agent, uint32_t number, const uint8_t *cluster_key)
{
    struct kvf_drive *drive = &agent->drives[number];
    struct kvf_nvme_config nvme;
    struct kvf_nvme_info info;
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    drive->agent = agent;
    drive->config = &agent->config->nvme[number];
    drive->read_ns_per_mib = 500 * KVF_NS_PER_US; /* until reads have been seen: 2 GB/s */
    kvf_nvme_config_init(&nvme);
    nvme.path = drive->config->path;
    nvme.bytes = drive->config->bytes;
    nvme.segment_bytes = drive->config->segment_bytes;
    nvme.io_config.engine = (uint8_t)drive->config->engine;
    nvme.io_config.depth = (uint32_t)drive->config->depth;
    nvme.io_config.waker.wake = kvf_agent_wake;
    nvme.io_config.waker.ctx = agent;
    nvme.env = agent->env;
    if (agent->ports.open_drive != NULL) {
        nvme.io = agent->ports.open_drive(agent->ports.ctx, number);
        nvme.wait = agent->ports.wait;
        nvme.wait_ctx = agent->ports.ctx;
    }
    nvme.work = agent->work;
    kvf_config_nvme_pack(agent->config, number, &nvme);
    nvme.host = kvf_place_drive_host(drive);
    /* all drives of a node share the first one's key, so that a block has one name */
    nvme.id_key = cluster_key;
    nvme.budget.ctx = drive;
    nvme.budget.may_reinsert = may_reinsert;
    nvme.budget.credit_bytes = credit_bytes;
    status = kvf_nvme_open(&nvme, &drive->store, why, sizeof(why));
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "nvme: %s", why);
        if (nvme.io != NULL) {
            nvme.io->ops->close(nvme.io); /* nobody has taken it over */
        }
        return status;
    }
    kvf_nvme_info(drive->store, &info);
    if (number == 0) {
        memcpy(agent->id_key, info.id_key, sizeof(agent->id_key));
    }
    agent->n_drives = number + 1;
    (void)snprintf(drive->why, sizeof(drive->why), "%.*s", (int)sizeof(drive->why) - 1, why);
    kvf_admit_init(drive, drive->config->write_budget,
                   info.credit_bytes > 0 ? (uint64_t)info.credit_bytes : 0);
    if (info.generation == 0) { /* a new store starts with what a minute would have saved */
        drive->bucket.tokens_bytes = drive->bucket.capacity_bytes;
    }
    kvf_log(KVF_LOG_INFO, "nvme: %s: %llu MiB, %s", drive->config->path,
            (unsigned long long)(info.store_bytes >> 20), why);
    return wrap_drive(agent, drive);
}

static int open_drives(struct kvf_agent *agent)
{
    uint8_t cluster_key[32];
    const uint8_t *key = NULL;
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    if (agent->config->cluster_key[0] != '\0') {
        status = kvf_config_cluster_key_read(agent->config->cluster_key, cluster_key, why,
                                             sizeof(why));
        if (status != KVF_OK) {
            kvf_log(KVF_LOG_ERROR, "cluster_key: %s", why);
            return status;
        }
        key = cluster_key;
        memcpy(agent->id_key, cluster_key, sizeof(agent->id_key));
    } else {
        kvf_env_random_fill(&agent->env, agent->id_key, sizeof(agent->id_key));
    }
    if (agent->config->mode == KVF_MODE_OBSERVE) {
        return KVF_OK; /* stores are left as they are */
    }
    for (uint32_t i = 0; i < agent->config->n_nvme; i++) {
        status = open_drive(agent, i, key);
        if (status != KVF_OK) {
            return status;
        }
        key = agent->id_key;
    }
    return KVF_OK;
}

static int recover_drives(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        struct kvf_drive *drive = &agent->drives[i];
        uint64_t before = agent->metrics.nvme_recovered_blocks;
        uint64_t begin_ns = kvf_env_now_ns(&agent->env);
        int status;

        kvf_start_drive(agent, i);
        status = drive->store->ops->recover(drive->store);
        if (status != KVF_OK) {
            kvf_log(KVF_LOG_ERROR, "nvme: %s: recovery failed: %s; see the lines before",
                    drive->config->path, kvf_status_text(status));
            return status;
        }
        kvf_log(KVF_LOG_INFO, "nvme: %s: %llu blocks recovered in %llu ms", drive->config->path,
                (unsigned long long)(agent->metrics.nvme_recovered_blocks - before),
                (unsigned long long)((kvf_env_now_ns(&agent->env) - begin_ns) / KVF_NS_PER_MS));
    }
    return KVF_OK;
}

int kvf_place_open(struct kvf_agent *agent)
{
    struct kvf_waker waker = {.wake = kvf_agent_wake, .ctx = agent};
    int status = open_tables(agent);

    if (status == KVF_OK && agent->work == NULL) {
        status = kvf_work_open((uint32_t)agent->config->workers, WORK_ENTRIES, waker, &agent->work);
    }
    if (status == KVF_OK && agent->setup == NULL) {
        status = kvf_work_open_background(1, WORK_ENTRIES, waker, &agent->setup);
    }
    if (status == KVF_OK && agent->names == NULL && agent->config->peers_nodes[0] != '\0') {
        status = kvf_work_open_background(1, WORK_ENTRIES, waker, &agent->names);
    }
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "tables: %s; lower index.entries or clients.max",
                kvf_status_text(status));
        return status;
    }
    status = open_drives(agent);
    if (status == KVF_OK) {
        status = recover_drives(agent);
    }
    kvf_start_phase(agent, KVF_START_MEMORY);
    if (status == KVF_OK) {
        status = open_dram(agent);
    }
    if (status == KVF_OK) {
        status = kvf_hbm_open_all(agent);
    }
    return status;
}

void kvf_place_stop(struct kvf_agent *agent)
{
    if (agent->setup != NULL && agent->setup != agent->work) {
        agent->setup->ops->close(agent->setup);
    }
    agent->setup = NULL;
    if (agent->names != NULL && agent->names != agent->work) {
        agent->names->ops->close(agent->names);
    }
    agent->names = NULL;
    if (agent->work != NULL) {
        agent->work->ops->close(agent->work);
        agent->work = NULL;
    }
}

void kvf_place_close(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < KVF_DRIVES_MAX; i++) {
        struct kvf_drive *drive = &agent->drives[i];
        struct kvf_tier *tier = drive->tier != NULL ? drive->tier : drive->store;

        if (tier != NULL) {
            tier->ops->close(tier); /* a wrapper closes what is in it */
        }
    }
    kvf_hbm_close_all(agent);
    if (agent->dram != NULL) {
        agent->dram->ops->close(agent->dram);
    } else if (agent->dram_store != NULL) {
        agent->dram_store->ops->close(agent->dram_store);
    }
    kvf_index_close(&agent->index);
    (void)kvf_pool_fini(&agent->requests, NULL);
    (void)kvf_pool_fini(&agent->ops, NULL);
    (void)kvf_pool_fini(&agent->pins, NULL);
    (void)kvf_pool_fini(&agent->flights, NULL);
    free(agent->namespaces);
    free(agent->ghosts);
    free(agent->key_names);
    free(agent->incomplete);
    free(agent->sides);
}
