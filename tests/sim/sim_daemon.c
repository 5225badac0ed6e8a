/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_daemon.c: the daemon's birth, death and return, and what differs from seed to seed.
 */
#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "tiers/nvme_format.h"

#define MIB (1ull << 20)
#define KIB (1ull << 10)

/* ---- ports ----------------------------------------------------------------------------------- */

static uint64_t clock_now_ns(void *arg)
{
    const struct sim *sim = arg;

    return sim->now_ns;
}

static uint64_t clock_wall_s(void *arg)
{
    const struct sim *sim = arg;

    return 1700000000 + sim->now_ns / KVF_NS_PER_S;
}

static const struct kvf_clock_ops sim_clock = {.now_ns = clock_now_ns, .wall_s = clock_wall_s};

static struct kvf_io_queue *open_drive(void *ctx, uint32_t index)
{
    struct sim *sim = ctx;
    struct kvf_io_queue *queue;

    if (kvf_io_sim_open(sim->drives[index].disk, &queue) != KVF_OK) {
        sim_fail(sim, "drive %u is still open", index);
    }
    return queue;
}

static void wait_for_drive(void *ctx)
{
    sim_wait(ctx);
}

static bool memory_allows(void *ctx, uint64_t bytes)
{
    struct sim *sim = ctx;

    (void)bytes;
    sim->cover[SIM_COVER_fault_memory] += sim->memory_denied;
    return !sim->memory_denied;
}

static struct kvf_env env_of(struct sim *sim)
{
    return (struct kvf_env){.clock = &sim_clock,
                            .clock_arg = sim,
                            .random = &kvf_random_seeded_ops,
                            .random_arg = &sim->agent_random};
}

/* ---- shape ----------------------------------------------------------------------------------- */

static void choose_sizes(struct sim *sim, struct sim_shape *shape, uint32_t largest)
{
    static const uint32_t edges[][2] = {{40, 4000},    {4096, 12000},  {6000, 6000},
                                        {9000, 30000}, {20000, 70000}, {8192, 8192},
                                        {500, 9000},   {70000, 200000}};

    shape->size_groups = (uint32_t)sim_between(sim, 2, 4);
    for (uint32_t i = 0; i < shape->size_groups; i++) {
        uint64_t at = sim_below(sim, sim_one_in(sim, 4) ? 8 : 7);

        shape->size_min[i] = edges[at][0] < largest ? edges[at][0] : largest;
        shape->size_max[i] = edges[at][1] < largest ? edges[at][1] : largest;
    }
}

static void choose_shape(struct sim *sim)
{
    struct sim_shape *shape = &sim->shape;

    shape->n_tenants = (uint32_t)sim_between(sim, 1, SIM_TENANTS);
    shape->n_drives = sim_one_in(sim, 16) ? 0 : sim_one_in(sim, 4) ? 2 : 1;
    shape->n_clients = (uint32_t)sim_between(sim, 4, SIM_CLIENTS);
    shape->has_hostile = sim_one_in(sim, 2);
    shape->shard_count = (uint32_t)sim_between(sim, 2, SIM_SHARDS_MAX);
    shape->work_min_ns = sim_below(sim, 5) * KVF_NS_PER_US;
    shape->work_max_ns = shape->work_min_ns + sim_between(sim, 1, 200) * KVF_NS_PER_US;
    shape->tick_ns = sim_between(sim, 2, 40) * KVF_NS_PER_US;
    shape->hot_chains = (uint32_t)sim_between(sim, 3, 14);
    shape->staging_bytes = sim_between(sim, 8, 32) * 32 * KIB;
    shape->durable_in = (uint32_t)sim_between(sim, 4, 30);
    shape->budget_in = (uint32_t)sim_between(sim, 3, 12);
    shape->ttl_in = (uint32_t)sim_between(sim, 8, 80);
    shape->version_in = (uint32_t)sim_between(sim, 10, 60);
    shape->fault_in = sim_one_in(sim, 4) ? 0 : (uint32_t)sim_between(sim, 800, 4000);
    shape->has_silent_faults = sim_one_in(sim, 2);
    shape->crash_in = (uint32_t)sim_between(sim, 1500, 8000);
    choose_sizes(sim, shape, 200000);
    shape->has_soft = sim->seed % 2 != 0;
    shape->n_hbm = sim->seed % 2 == 0;
    if (sim->world != NULL) {
        shape->n_drives = shape->n_drives == 0 ? 1 : shape->n_drives; /* they keep the names' key */
    }
    if (sim->node != 0) { /* what a block looks like, all nodes must agree on */
        const struct sim_shape *first = &sim->world->nodes[0]->shape;

        shape->n_tenants = first->n_tenants;
        shape->shard_count = first->shard_count;
        shape->size_groups = first->size_groups;
        memcpy(shape->size_min, first->size_min, sizeof(shape->size_min));
        memcpy(shape->size_max, first->size_max, sizeof(shape->size_max));
    }
}

static void choose_peers(struct sim *sim, struct kvf_config *config)
{
    size_t n = 0;

    (void)snprintf(config->peers_listen, sizeof(config->peers_listen), "127.0.0.1:%u",
                   SIM_NET_PORT + sim->node);
    for (uint32_t i = 0; i < sim->world->n; i++) { /* itself as well, as a name may say */
        n += (size_t)snprintf(config->peers_nodes + n, sizeof(config->peers_nodes) - n,
                              "127.0.0.1:%u,", SIM_NET_PORT + i);
    }
    (void)snprintf(config->cluster_key, sizeof(config->cluster_key), "/proc/self/fd/%d",
                   sim->world->key_fd);
    config->peers_timeout = sim_between(sim, 1, 2);
    config->peers_heartbeat = 1;
    config->peers_inflight_bytes = MIB << sim_below(sim, 4);
    config->peers_entries = sim_one_in(sim, 4) ? 1024 : 0;
}

static void choose_config(struct sim *sim)
{
    struct kvf_config *config = &sim->config;

    kvf_config_init(config);
    config->dram_bytes = sim_between(sim, 6, 10) * MIB;
    config->dram_area_bytes = MIB;
    config->dram_piece_bytes = sim_between(sim, 2, 10) * MIB;
    config->index_entries = sim_one_in(sim, 5) ? 256 : 4096;
    config->staging_total = sim_between(sim, 4, 16) * MIB;
    config->staging_client = MIB;
    config->clients_max = sim_between(sim, 3, SIM_CLIENTS);
    config->clients_ring_entries = 256;
    config->lease_max_age = sim_between(sim, 1, 3);
    config->lease_client_share = sim_between(sim, 2, 25);
    config->lease_tenant_share = sim_between(sim, 4, 75);
    config->put_set_timeout = sim_between(sim, 1, 3);
    config->put_writeback_share = sim_between(sim, 1, 25);
    config->quota_tenant_share = sim_one_in(sim, 3) ? sim_between(sim, 30, 60) : 100;
    config->quota_namespace_share = sim_one_in(sim, 3) ? sim_between(sim, 15, 40) : 100;
    config->prefetch_inflight = sim_between(sim, 1, 32);
    config->drain_timeout = sim_one_in(sim, 4) ? 0 : 20;
    if (sim->shape.n_hbm != 0) {
        config->gpu_hbm_bytes = sim_between(sim, 4, 10) * 2 * MIB;
        config->gpu_promote_hits = sim_between(sim, 1, 3);
    }
    if (sim->world != NULL) {
        choose_peers(sim, config);
    }
    config->n_sockets = sim->shape.n_tenants;
    for (uint32_t i = 0; i < config->n_sockets; i++) {
        (void)snprintf(config->sockets[i].tenant, sizeof(config->sockets[i].tenant), "tenant%u", i);
    }
    config->n_nvme = sim->shape.n_drives;
    for (uint32_t i = 0; i < config->n_nvme; i++) {
        (void)snprintf(config->nvme[i].path, sizeof(config->nvme[i].path), "drive%u", i);
        config->nvme[i].segment_bytes = 256 * KIB << sim_below(sim, 2);
        config->nvme[i].depth = 64;
        config->nvme[i].write_budget = sim_one_in(sim, 3) ? 64 * KIB << sim_below(sim, 8) : 0;
    }
}

static void choose_namespaces(struct sim *sim)
{
    uint16_t last = (uint16_t)(sim->shape.n_tenants - 1);

    for (uint32_t i = 0; i < SIM_NAMESPACES; i++) {
        struct sim_namespace *ns = &sim->namespaces[i];

        ns->tenant = i == 2 || i == 5 ? last : 0;
        ns->shard_count = 1;
        ns->is_hostile = i >= SIM_NAMESPACES_HONEST;
        (void)snprintf(ns->label, sizeof(ns->label), "label%u", i);
    }
    sim->namespaces[3].shard_count = (uint16_t)sim->shape.shard_count;
}

/* ---- drives ---------------------------------------------------------------------------------- */

static void disk_create(struct sim *sim, uint32_t index)
{
    struct sim_drive *drive = &sim->drives[index];
    struct kvf_io_sim_config config;
    struct kvf_nvme_config nvme;
    char why[KVF_ERROR_TEXT_BYTES];

    kvf_io_sim_config_init(&config);
    config.capacity_bytes = MIB + sim_between(sim, 6, 24) * sim->config.nvme[index].segment_bytes;
    config.seed = kvf_random_seeded_next(&sim->random);
    config.latency_min_ns = sim_between(sim, 5, 50) * KVF_NS_PER_US;
    config.latency_max_ns = config.latency_min_ns + sim_between(sim, 1, 300) * KVF_NS_PER_US;
    config.queue_entries = sim_one_in(sim, 4) ? 40 : 256;
    *drive = (struct sim_drive){0};
    if (kvf_io_sim_disk_create(&config, &drive->disk) != KVF_OK) {
        abort();
    }
    kvf_io_sim_advance(drive->disk, sim->now_ns);
    kvf_nvme_config_init(&nvme);
    nvme.path = sim->config.nvme[index].path;
    nvme.segment_bytes = sim->config.nvme[index].segment_bytes;
    nvme.io = open_drive(sim, index);
    nvme.env = env_of(sim);
    nvme.wait = wait_for_drive;
    nvme.wait_ctx = sim;
    if (sim->world != NULL) { /* and of all nodes */
        nvme.id_key = sim->world->id_key;
    } else if (index > 0) { /* all drives of a node name blocks alike: by the first one's key */
        const struct kvf_nvme_super *first = (const void *)kvf_io_sim_bytes(sim->drives[0].disk);

        nvme.id_key = first->id_key;
    }
    if (kvf_nvme_format(&nvme, why, sizeof(why)) != KVF_OK) {
        sim_fail(sim, "a new drive cannot be formatted: %s", why);
    }
    nvme.io->ops->close(nvme.io);
}

static void rot(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        struct sim_drive *drive = &sim->drives[i];
        uint64_t bytes = MIB; /* the image is at least as large as the head and four segments */

        if (!sim->shape.has_silent_faults || !sim_one_in(sim, 4)) {
            continue;
        }
        bytes += 4 * sim->config.nvme[i].segment_bytes;
        if (sim_one_in(sim, 6)) { /* both superblocks: the store is lost */
            kvf_io_sim_bytes(drive->disk)[64] ^= 0x40;
            kvf_io_sim_bytes(drive->disk)[KVF_NVME_COPY_BYTES + 64] ^= 0x40;
        }
        for (uint64_t n = sim_between(sim, 1, 6); n > 0; n--) {
            kvf_io_sim_bytes(
                drive->disk)[sim_one_in(sim, 4) ? sim_below(sim, 16384) : sim_below(sim, bytes)] ^=
                0x40;
        }
        drive->has_silent_faults = true;
        sim_cover(sim, SIM_COVER_fault_rot);
    }
}

/* ---- birth ----------------------------------------------------------------------------------- */

static int try_start(struct sim *sim)
{
    struct kvf_agent_ports ports = {.env = env_of(sim),
                                    .open_drive = open_drive,
                                    .wait = wait_for_drive,
                                    .memory_allows = memory_allows,
                                    .open_hbm = sim->shape.n_hbm != 0 ? sim_hbm_open : NULL,
                                    .n_hbm = sim->shape.n_hbm,
                                    .has_network = sim->world != NULL,
                                    .ctx = sim};
    struct sim_work_config work = {.now_ns = &sim->now_ns,
                                   .random = &sim->work_random,
                                   .delay_min_ns = sim->shape.work_min_ns,
                                   .delay_max_ns = sim->shape.work_max_ns,
                                   .max_jobs = sim->work_jobs};

    for (uint32_t i = 0; i < sim->config.n_nvme; i++) {
        bool packs = sim->shape.has_soft && sim->now_ns / 1024 % 4 != 0;

        sim->config.nvme[i].recompress = packs ? KVF_RECOMPRESS_ENTROPY : KVF_RECOMPRESS_OFF;
    }
    ports.work = sim_work_open(&work);
    sim->work = ports.work;
    sim->agent = NULL;
    return kvf_agent_create_ported(&sim->config, &ports, &sim->agent);
}

bool sim_drives_may_lie(const struct sim *sim)
{
    return sim->drives[0].has_silent_faults || sim->drives[1].has_silent_faults;
}

/* True: on new drives, with nothing from before. */
static bool daemon_start(struct sim *sim)
{
    int status = try_start(sim);
    bool is_reformatted = false;

    if (status != KVF_OK) {
        if (!sim_drives_may_lie(sim)) {
            sim_fail(sim, "the daemon does not start: %d", status);
        }
        sim_cover(sim, SIM_COVER_store_reformatted);
        for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
            kvf_io_sim_disk_destroy(sim->drives[i].disk);
            disk_create(sim, i);
        }
        is_reformatted = true;
        status = try_start(sim);
    }
    if (status != KVF_OK) {
        sim_fail(sim, "the daemon does not start on new drives: %d", status);
    }
    sim->lives++;
    sim->is_draining = false;
    sim->is_life_damaged = false;
    sim->was_index_full = false;
    memset(&sim->metrics_before, 0, sizeof(sim->metrics_before));
    is_reformatted |= sim->shape.n_drives == 0; /* another key, other names */
    for (uint32_t i = 0; i < SIM_NAMESPACES; i++) {
        sim->namespaces[i].id = is_reformatted ? 0 : sim->namespaces[i].id;
        sim->namespaces[i].purge_turn = 0;
    }
    sim_model_restart(sim, is_reformatted);
    sim_trace(sim, "the daemon runs, %u blocks recovered", sim->agent->index.count);
    return is_reformatted;
}

/* ---- coverage -------------------------------------------------------------------------------- */

void sim_daemon_count(struct sim *sim)
{
    const struct kvf_metrics *now = &sim->agent->metrics;
    const struct kvf_metrics *before = &sim->metrics_before;

#define COUNT(cover_name, metric)                                                                  \
    (sim->cover[SIM_COVER_##cover_name] += now->metric - before->metric)
    COUNT(evicted_dram, evicted_blocks);
    COUNT(set_dropped, evicted_sets_incomplete);
    COUNT(attach_delayed, attach_delayed);
    COUNT(ttl_expired, expired_blocks);
    COUNT(write_behind_drop, nvme_dropped_blocks);
    COUNT(second_sight, nvme_rejected_blocks);
    COUNT(reinserted, nvme_reinserted_blocks);
    COUNT(reclaimed, nvme_reclaimed_blocks);
    COUNT(hbm_promoted, hbm_promoted_blocks);
    COUNT(hbm_demoted, hbm_demoted_blocks);
    COUNT(hbm_evicted, hbm_evicted_blocks);
    COUNT(hbm_copied, get_hits_hbm_copied);
    COUNT(hit_remote, get_hits_remote);
    COUNT(served, peer_served_blocks);
    COUNT(stale_hint, peer_stale_hints);
    COUNT(peer_corrupt, peer_corrupt_blocks);
    COUNT(peer_busy, peer_failed_fetches);
    COUNT(snapshot, peer_snapshots);
    COUNT(stream_gap, peer_gaps);
#undef COUNT
    sim->metrics_before = *now;
    sim->cover[SIM_COVER_index_full] += sim->was_index_full;
}

/* What is only known as a sum over a life. */
static void count_life(struct sim *sim)
{
    struct kvf_dram_info dram;

    sim_daemon_count(sim);
    kvf_dram_info(sim->agent->dram_store, &dram);
    sim->cover[SIM_COVER_area_taken] += dram.areas_taken;
    sim->cover[SIM_COVER_piece_reassigned] += dram.pieces_reassigned;
    for (uint32_t i = 0; i < sim->agent->n_drives; i++) {
        const struct kvf_tier *store = sim->agent->drives[i].store;
        struct kvf_nvme_info info;
        struct kvf_tier_stat stat;

        kvf_nvme_info(store, &info);
        store->ops->stat(store, &stat);
        sim->cover[SIM_COVER_segment_reused] += info.seals > info.segments;
        sim->cover[SIM_COVER_segment_scanned] += info.recovered_scanned;
        sim->cover[SIM_COVER_segment_discarded] += info.discarded_records;
        sim->cover[SIM_COVER_packed] += info.packed_records;
        sim->cover[SIM_COVER_unpacked] += info.unpacked_records;
        sim->cover[SIM_COVER_unpacked_plainly] += sim->config.nvme[i].recompress ==
                                                      KVF_RECOMPRESS_OFF &&
                                                  info.unpacked_records != 0;
        sim->cover[SIM_COVER_writes_off] += stat.writes_off;
        sim->cover[SIM_COVER_drive_off] += stat.off;
        sim_hash(sim, stat.bytes_written);
        sim_hash(sim, info.generation);
    }
    sim_hash(sim, sim->agent->index.count);
    sim_hash(sim, sim->agent->metrics.get_bytes);
}

/* ---- death ----------------------------------------------------------------------------------- */

/* Until the reactor says that it has ended. True: all that was to be kept is on its drive. */
static bool drain(struct sim *sim)
{
    uint64_t limit_ns = sim->now_ns + (sim->config.drain_timeout + 2) * KVF_NS_PER_S;

    sim->is_draining = true;
    kvf_agent_stop(sim->agent);
    while (sim_advance(sim, 20 * sim->shape.tick_ns)) {
        if (sim->now_ns > limit_ns) {
            sim_fail(sim, "the drain does not end");
        }
    }
    sim_cover(sim, sim->end_status == KVF_OK ? SIM_COVER_daemon_drained : SIM_COVER_drain_timeout);
    return sim->end_status == KVF_OK && !sim->is_life_damaged;
}

/* What clients hold when the daemon dies stays as it is: nobody writes to it any more. */
static void last_look(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_clients; i++) {
        struct sim_client *client = &sim->clients[i];

        for (uint32_t k = 0;
             client->state == SIM_READY && !client->is_hostile && k < client->n_leases; k++) {
            (void)sim_lease_check(sim, client, &client->leases[k]);
        }
    }
}

static void destroy_agent(struct sim *sim)
{
    uint32_t pending = sim->purge_running;

    count_life(sim);
    sim->is_draining = true;
    kvf_agent_destroy(sim->agent);
    sim->agent = NULL;
    sim->work = NULL;
    if (pending && sim->purge_running) {
        if (!sim->purge_seen) {
            sim_model_purge(sim, sim->purge_ns);
        }
        sim_model_purged(sim, sim->purge_ns, false);
        sim->cover[SIM_COVER_purge_forgotten] += sim->purge_seen;
        sim->purge_running = false;
    }
    sim->question_running = false;
    for (uint32_t i = 0; i < sim->shape.n_clients; i++) {
        sim_client_detach(sim, &sim->clients[i]);
    }
    sim_pieces_forget(sim);
}

static void hash_images(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        sim_hash(sim, kvf_crc32c(0, kvf_io_sim_bytes(sim->drives[i].disk),
                                 MIB + 4 * sim->config.nvme[i].segment_bytes));
    }
}

void sim_daemon_restart(struct sim *sim, enum sim_end end)
{
    struct sim_durable *durable;
    bool is_clean = false;

    sim_trace(sim, "the daemon ends: %d", end);
    sim_faults_end(sim);
    if (end == SIM_END_DRAIN) {
        is_clean = drain(sim);
    } else {
        sim_cover(sim, end == SIM_END_KILL ? SIM_COVER_daemon_killed : SIM_COVER_power_loss);
        sim_audit(sim);
    }
    last_look(sim);
    durable = sim_durable_remember(sim, end, is_clean);
    if (sim->world != NULL && end != SIM_END_DRAIN && sim_one_in(sim, 2)) {
        sim_net_die_silently(sim->node);
    }
    for (uint32_t i = 0; i < sim->shape.n_drives && end == SIM_END_POWER; i++) {
        kvf_io_sim_crash(sim->drives[i].disk);
    }
    destroy_agent(sim);
    sim_durable_inspect(sim, durable);
    hash_images(sim);
    rot(sim);
    if (!daemon_start(sim)) {
        sim_durable_check(sim, durable);
    }
    sim_durable_free(durable);
    sim_audit(sim);
}

/* ---- the whole ------------------------------------------------------------------------------- */

void sim_open(struct sim *sim)
{
    uint64_t seed = sim->seed + ((uint64_t)sim->node << 48);

    kvf_random_seeded_init(&sim->random, seed);
    kvf_random_seeded_init(&sim->agent_random, seed + (1ull << 40));
    kvf_random_seeded_init(&sim->work_random, seed + (2ull << 40));
    sim->now_ns = KVF_NS_PER_S;
    choose_shape(sim);
    choose_config(sim);
    choose_namespaces(sim);
    sim->work_jobs = sim_one_in(sim, 8) ? 12 : 1024;
    sim->blocks = calloc((size_t)SIM_NAMESPACES * SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX,
                         sizeof(*sim->blocks));
    sim->clients = calloc(SIM_CLIENTS, sizeof(*sim->clients));
    sim->rows = calloc(SIM_ROWS, sizeof(struct kvf_control_client) +
                                     sizeof(struct kvf_control_block) +
                                     sizeof(struct kvf_control_namespace));
    sim->stat = calloc(1, sizeof(*sim->stat));
    if (sim->blocks == NULL || sim->clients == NULL || sim->rows == NULL || sim->stat == NULL) {
        abort();
    }
    for (uint32_t i = 0; i < SIM_CLIENTS; i++) {
        sim->clients[i].number = (uint8_t)i;
    }
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        disk_create(sim, i);
    }
    (void)daemon_start(sim);
}

/* Settle, then drain, then look once more at what comes back. */
void sim_close(struct sim *sim)
{
    sim_settle(sim);
    sim_daemon_restart(sim, SIM_END_DRAIN);
    sim_settle(sim);
    sim_free(sim);
}

void sim_free(struct sim *sim)
{
    destroy_agent(sim);
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        kvf_io_sim_disk_destroy(sim->drives[i].disk);
    }
    free(sim->blocks);
    free(sim->clients);
    free(sim->rows);
    free(sim->stat);
}
