/* SPDX-License-Identifier: Apache-2.0
 *
 * answer.c: the admin thread's questions, answered by the reactor between two turns. Most are
 * answered at once; verify and purge go on while requests are served, one of each at a time.
 */
#include "agent/core.h"
#include "agent/observe.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "agent/calibration.h"
#include "agent/notify.h"
#include "agent/peers.h"

/* Entries that one turn looks at for one question; longer ones go on in the next turn or call. */
#define SWEEP_STEPS 4096
#define LIST_STEPS  65536

/* ----------------------------------------------------------------------------------------------
 * The mailbox
 */
int kvf_agent_post(struct kvf_agent *agent, struct kvf_control *control)
{
    int status = KVF_ERR_BUSY;

    (void)pthread_mutex_lock(&agent->control_lock);
    if (atomic_load(&agent->n_controls) < KVF_CONTROLS_MAX && !agent->is_closed) {
        agent->controls[atomic_fetch_add(&agent->n_controls, 1)] = control;
        status = KVF_OK;
    }
    (void)pthread_mutex_unlock(&agent->control_lock);
    if (status == KVF_OK) {
        kvf_agent_wake(agent);
    }
    return status;
}

void kvf_answer_finish(struct kvf_control *control, int status)
{
    if (control == NULL) {
        return;
    }
    control->status = status;
    if (status < 0 && control->text[0] == '\0') {
        (void)snprintf(control->text, sizeof(control->text), "%s", kvf_status_text(status));
    }
    control->done(control);
}

/* ----------------------------------------------------------------------------------------------
 * Figures and lists
 */
static void gpu_metrics(struct kvf_agent *agent)
{
    struct kvf_metrics *metrics = &agent->metrics;
    struct kvf_gpu_host_counts counts;

    kvf_gpu_host_counts(agent->gpu_host, &counts);
    metrics->gpu_put_blocks = counts.put_blocks;
    metrics->gpu_put_bytes = counts.put_bytes;
    metrics->gpu_get_blocks = counts.get_blocks;
    metrics->gpu_get_bytes = counts.get_bytes;
    metrics->gpu_refused = counts.refused;
    metrics->gpu_cut_off = counts.cut_off;
    metrics->gpu_delayed_ns = counts.delayed_ns;
    metrics->gpu_worker_starts = counts.starts;
    metrics->gpu_worker_hangs = counts.hangs;
    metrics->gpu_workers = counts.workers;
    metrics->gpu_engines = counts.engines;
    metrics->gpu_free_bytes = counts.free_bytes;
    metrics->gpu_clients_engine = metrics->gpu_clients_agent = 0;
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        const struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY) {
            metrics->gpu_clients_engine += session->gpu_path == KVF_GPU_PATH_ENGINE;
            metrics->gpu_clients_agent += session->gpu_path == KVF_GPU_PATH_AGENT;
        }
    }
}

/* Count a client under its profile; beyond KVF_CONTROL_PROFILES_MAX of them under the last. */
static void count_profile(struct kvf_control_stat *stat, const struct kvf_session *session)
{
    const char *name = session->profile;
    bool is_calibrated = session->calibration != NULL;
    uint32_t i = 0;

    while (i < stat->n_profiles && (strcmp(stat->profiles[i].name, name) != 0 ||
                                    stat->profiles[i].is_calibrated != is_calibrated)) {
        i++;
    }
    if (i == KVF_CONTROL_PROFILES_MAX) {
        i--;
    } else if (i == stat->n_profiles) {
        stat->n_profiles++;
        (void)snprintf(stat->profiles[i].name, sizeof(stat->profiles[i].name), "%s", name);
        stat->profiles[i].is_calibrated = is_calibrated;
    }
    stat->profiles[i].clients++;
}

/* What is known of clients only by looking at each. */
static void client_metrics(struct kvf_agent *agent, struct kvf_control_stat *stat)
{
    agent->metrics.lease_oldest_ns = 0;
    agent->metrics.incomplete_sets = kvf_room_count_incomplete(agent);
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        const struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY) {
            uint64_t age_ns = kvf_lease_oldest_age_ns(session);

            if (age_ns > agent->metrics.lease_oldest_ns) {
                agent->metrics.lease_oldest_ns = age_ns;
            }
            count_profile(stat, session);
        }
    }
}

static void answer_stat(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_control_stat *stat = control->stat;
    struct kvf_dram_class classes[KVF_CONTROL_CLASSES_MAX];
    struct kvf_dram_info info;
    unsigned n;

    memset(stat, 0, sizeof(*stat));
    stat->incarnation = agent->incarnation;
    stat->uptime_s = kvf_agent_second(agent) - 1;
    (void)snprintf(stat->version, sizeof(stat->version), "%d.%d.%d", KVF_VERSION_MAJOR,
                   KVF_VERSION_MINOR, KVF_VERSION_PATCH);
    stat->ready = kvf_agent_is_ready(agent);
    stat->draining = agent->is_draining;
    stat->disabled = agent->service.is_all_off;
    stat->clients = agent->sessions_count;
    stat->clients_max = (uint32_t)agent->config->clients_max;
    stat->index_entries = agent->index.count;
    stat->index_capacity = agent->index.capacity;
    stat->staging_used_bytes = agent->staging_used_bytes;
    stat->staging_total_bytes = agent->config->staging_total;
    agent->dram->ops->stat(agent->dram, &stat->dram);
    if (stat->dram.area_bytes != 0) {
        stat->dram_fill = (double)stat->dram.area_stored_bytes / (double)stat->dram.area_bytes;
    }
    kvf_dram_info(agent->dram_store, &info);
    stat->dram_arena_bytes = info.arena_bytes;
    stat->dram_populated_bytes = info.populated_bytes;
    stat->dram_huge_bytes = info.huge_bytes;
    stat->dram_memory_refusals = info.memory_refusals;
    stat->n_hbm = agent->n_hbm;
    for (uint32_t i = 0; i < agent->n_hbm; i++) {
        const struct kvf_drive *source = &agent->hbm[i].source;

        source->tier->ops->stat(source->tier, &stat->hbm[i].tier);
        (void)snprintf(stat->hbm[i].uuid, sizeof(stat->hbm[i].uuid), "%s",
                       kvf_hbm_uuid(source->store));
    }
    stat->n_drives = agent->n_drives;
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        struct kvf_nvme_info drive;

        kvf_nvme_info(agent->drives[i].store, &drive);
        agent->drives[i].tier->ops->stat(agent->drives[i].tier, &stat->drives[i].tier);
        (void)snprintf(stat->drives[i].path, sizeof(stat->drives[i].path), "%.255s",
                       agent->drives[i].config->path);
        (void)snprintf(stat->drives[i].engine, sizeof(stat->drives[i].engine), "%s", drive.engine);
        memcpy(stat->drives[i].why, agent->drives[i].why, sizeof(stat->drives[i].why));
    }
    n = kvf_dram_classes(agent->dram_store, classes, KVF_CONTROL_CLASSES_MAX);
    stat->n_classes = n < KVF_CONTROL_CLASSES_MAX ? n : KVF_CONTROL_CLASSES_MAX;
    for (uint32_t i = 0; i < stat->n_classes; i++) {
        stat->classes[i] = (struct kvf_control_class){.slot_bytes = classes[i].slot_bytes,
                                                      .areas = classes[i].areas,
                                                      .slots = classes[i].slots,
                                                      .used_slots = classes[i].used,
                                                      .exact = classes[i].is_exact};
    }
    gpu_metrics(agent);
    kvf_peers_metrics(agent);
    agent->metrics.clients = agent->sessions_count;
    agent->metrics.index_entries = agent->index.count;
    agent->metrics.leased_bytes = agent->leased_bytes;
    agent->metrics.observing = agent->config->mode == KVF_MODE_OBSERVE;
    client_metrics(agent, stat);
    agent->metrics.writeback_bytes = agent->writeback_bytes;
    stat->metrics = agent->metrics;
    kvf_answer_finish(control, KVF_OK);
}

static void client_row(struct kvf_session *session, struct kvf_control_client *row)
{
    struct kvf_agent *agent = session->agent;

    memset(row, 0, sizeof(*row));
    row->connection_id = session->connection_id;
    if (session->namespace_index < KVF_INDEX_NAMESPACES_MAX) {
        row->namespace_id = agent->namespaces[session->namespace_index].id;
    }
    memcpy(row->name, session->name, sizeof(row->name));
    memcpy(row->profile, session->profile, sizeof(row->profile));
    memcpy(row->profile_text, session->profile_text, sizeof(row->profile_text));
    (void)snprintf(row->tenant, sizeof(row->tenant), "%s", agent->tenants[session->tenant].name);
    (void)snprintf(row->state, sizeof(row->state), "%s",
                   session->is_draining                  ? "draining"
                   : session->state == KVF_SESSION_READY ? "ready"
                                                         : "attaching");
    (void)snprintf(row->gpu_path, sizeof(row->gpu_path), "%s",
                   session->gpu_path == KVF_GPU_PATH_AGENT    ? "agent"
                   : session->gpu_path == KVF_GPU_PATH_ENGINE ? "engine"
                                                              : "");
    memcpy(row->gpu_uuid, session->gpu_uuid, sizeof(row->gpu_uuid));
    row->pid = session->pid;
    row->uid = session->uid;
    row->shard = session->shard;
    row->shard_count = session->shard_count;
    row->protocol_version = session->version;
    for (const struct kvf_request *r = session->requests; r != NULL; r = r->next) {
        row->inflight_requests++;
    }
    row->leased_bytes = session->leased_bytes;
    row->staging_bytes = session->staging_bytes;
    row->puts = session->puts;
    row->gets = session->gets;
    row->hits = session->hits;
    row->misses = session->misses;
    row->attached_s = (agent->now_ns - session->attached_ns) / KVF_NS_PER_S;
}

static void answer_clients(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_control_client *rows = control->rows;

    for (uint64_t i = control->cursor; i < agent->sessions_capacity; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_FREE || session->state == KVF_SESSION_DEAD) {
            continue;
        }
        if (control->n_rows == control->max_rows) {
            control->next_cursor = i;
            break;
        }
        client_row(session, &rows[control->n_rows++]);
    }
    kvf_answer_finish(control, KVF_OK);
}

static bool is_block_of(const struct kvf_agent *agent, const struct kvf_entry *entry,
                        uint64_t namespace_id)
{
    return entry->state != KVF_ENTRY_FREE && !entry->is_set &&
           (namespace_id == 0 || agent->namespaces[entry->namespace_index].id == namespace_id);
}

static void block_row(struct kvf_agent *agent, const struct kvf_entry *entry,
                      struct kvf_control_block *row)
{
    static const char *const states[] = {"free", "filling", "loading", "ready"};

    memset(row, 0, sizeof(*row));
    memcpy(row->key_id, entry->key_id, sizeof(row->key_id));
    row->namespace_id = agent->namespaces[entry->namespace_index].id;
    row->record_bytes = entry->record_bytes;
    row->shard = (uint16_t)entry->shard;
    row->shard_count = agent->namespaces[entry->namespace_index].shard_count;
    row->in_dram = kvf_entry_in_dram(entry);
    row->in_hbm = kvf_entry_in_hbm(agent, entry);
    row->in_nvme = kvf_entry_on_drive(entry) ? 1 : entry->nvme == KVF_NVME_QUEUED ? 2 : 0;
    row->drive = (uint8_t)entry->drive;
    row->pinned = !kvf_hbm_is_idle(agent, entry) ||
                  (row->in_dram &&
                   kvf_dram_pins(agent->dram_store, kvf_place_slot(agent, entry)) > 0);
    (void)snprintf(row->state, sizeof(row->state), "%s", states[entry->state]);
}

static void answer_blocks(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_control_block *rows = control->rows;

    for (uint64_t i = control->cursor; i < agent->index.fresh; i++) {
        const struct kvf_entry *entry = &agent->index.entries[i];

        if (i - control->cursor == LIST_STEPS || control->n_rows == control->max_rows) {
            control->next_cursor = i;
            break;
        }
        if (!is_block_of(agent, entry, control->namespace_id)) {
            continue;
        }
        block_row(agent, entry, &rows[control->n_rows++]);
    }
    kvf_answer_finish(control, KVF_OK);
}

static void answer_namespaces(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_control_namespace *rows = control->rows;

    for (uint64_t i = control->cursor; i < KVF_INDEX_NAMESPACES_MAX; i++) {
        const struct kvf_namespace *ns = &agent->namespaces[i];
        struct kvf_control_namespace *row;

        if (ns->id == 0) {
            continue;
        }
        if (control->n_rows == control->max_rows) {
            control->next_cursor = i;
            break;
        }
        row = &rows[control->n_rows++];
        memset(row, 0, sizeof(*row));
        row->namespace_id = ns->id;
        row->disabled = ns->is_off;
        row->epoch = agent->n_drives > 0 ? kvf_nvme_namespace_epoch(agent->drives[0].store, ns->id)
                                         : 0;
        if (ns->is_known) {
            (void)snprintf(row->tenant, sizeof(row->tenant), "%s", agent->tenants[ns->tenant].name);
        }
        memcpy(row->label, ns->label, sizeof(row->label));
        memcpy(row->profile, ns->profile, sizeof(row->profile));
        row->lossless = ns->is_lossless;
        row->clients = ns->clients;
        row->blocks = ns->blocks;
        row->dram_bytes = ns->dram_bytes;
        row->nvme_bytes = ns->nvme_bytes;
        row->gpu_ns = ns->gpu_ns;
        row->gpu_decode_ns = ns->gpu_decode_ns;
    }
    kvf_answer_finish(control, KVF_OK);
}

/* ----------------------------------------------------------------------------------------------
 * Evict and purge
 */
/* Does a client hold this block? A write to a drive pins it too, once, and so does a promotion. */
static bool is_leased(struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return !kvf_hbm_is_idle(agent, entry) ||
           (kvf_entry_in_dram(entry) &&
            kvf_dram_pins(agent->dram_store, kvf_place_slot(agent, entry)) >
                (kvf_place_writer(agent, entry) != NULL ? 1u : 0u) +
                    (kvf_hbm_is_promoted(agent, entry) ? 1u : 0u));
}

/* Does a client hold any block of this set? lose: take them from it. */
static bool is_set_leased(struct kvf_agent *agent, const struct kvf_entry *entry, bool lose)
{
    uint16_t shard_count = agent->namespaces[entry->namespace_index].shard_count;
    bool leased = false;

    for (uint32_t shard = 0; shard < shard_count; shard++) {
        const struct kvf_entry *block = shard_count <= 1
                                            ? entry
                                            : kvf_index_find(&agent->index, entry->key_id, shard);

        if (block != NULL && is_leased(agent, block)) {
            leased = true;
            if (lose && kvf_entry_in_dram(block)) {
                kvf_lease_lose_slot(agent, kvf_place_slot(agent, block));
            }
            if (lose && kvf_entry_in_hbm(agent, block)) {
                kvf_lease_lose_hbm(agent, kvf_hbm_place(agent, block)->device,
                                   kvf_hbm_place(agent, block)->slot);
            }
        }
    }
    return leased;
}

static void purge_persist(struct kvf_agent *agent);

static void sweep_finish(struct kvf_agent *agent)
{
    struct kvf_control *control = agent->sweep.control;

    if (control->op == KVF_CONTROL_PURGE) {
        purge_persist(agent);
        return;
    }
    agent->sweep.control = NULL;
    kvf_answer_finish(control, KVF_OK);
}

/* Some entries of the running evict or purge; the rest in later turns. */
static void sweep_step(struct kvf_agent *agent)
{
    struct kvf_sweep *sweep = &agent->sweep;
    bool is_purge = sweep->control->op == KVF_CONTROL_PURGE;

    for (uint32_t i = 0; i < SWEEP_STEPS && sweep->cursor < sweep->end; i++) {
        struct kvf_entry *entry = &agent->index.entries[sweep->cursor++];

        if (!is_block_of(agent, entry, sweep->control->namespace_id) ||
            (is_set_leased(agent, entry, is_purge) && !is_purge)) {
            continue;
        }
        sweep->control->evicted++;
        agent->metrics.purged_blocks++;
        kvf_place_forget_set(agent, entry);
    }
    if (sweep->cursor == sweep->end) {
        sweep->end = 0;
        sweep_finish(agent);
    }
}

static void sweep_begin(struct kvf_agent *agent, struct kvf_control *control)
{
    if (agent->sweep.control != NULL) {
        (void)snprintf(control->text, sizeof(control->text),
                       "another evict or purge is running, ask again");
        kvf_answer_finish(control, KVF_ERR_BUSY);
        return;
    }
    agent->sweep.control = control;
    agent->sweep.cursor = 0;
    agent->sweep.end = agent->index.fresh;
    sweep_step(agent);
}

static void answer_evict(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_entry *entry = NULL;

    if (!control->has_key_id) {
        sweep_begin(agent, control);
        return;
    }
    for (uint32_t shard = 0; entry == NULL && shard < KVF_SHARDS_MAX; shard++) {
        entry = kvf_index_find(&agent->index, control->key_id, shard);
    }
    if (entry != NULL) {
        control->evicted = 1;
        agent->metrics.purged_blocks++;
        kvf_place_forget_set(agent, entry);
    }
    kvf_answer_finish(control, entry != NULL ? KVF_OK : KVF_MISS);
}

static void purge_confirmed(void *ctx, uint64_t namespace_id, int status)
{
    struct kvf_agent *agent = ctx;
    struct kvf_sweep *sweep = &agent->sweep;
    struct kvf_control *control = sweep->control;

    (void)namespace_id;
    if (status != KVF_OK) {
        sweep->status = status;
    }
    if (--sweep->waiting == 0) {
        sweep->control = NULL;
        if (sweep->status != KVF_OK) {
            (void)snprintf(control->text, sizeof(control->text),
                           "forgotten here, but a drive could not record it (%s): ask again, or "
                           "the blocks may come back after a restart",
                           kvf_status_text(sweep->status));
        }
        kvf_answer_finish(control, sweep->status);
    }
}

/* After everything has been forgotten: what a write still brings to a drive is under the old
 * epoch. */
static void purge_persist(struct kvf_agent *agent)
{
    struct kvf_sweep *sweep = &agent->sweep;
    uint64_t namespace_id = sweep->control->namespace_id;

    sweep->status = KVF_OK;
    sweep->waiting = 1; /* this function itself */
    for (uint32_t i = 0; i < agent->n_drives; i++) {
        int status = kvf_nvme_namespace_purge(agent->drives[i].store, namespace_id, purge_confirmed,
                                              agent);

        if (status == KVF_OK) {
            sweep->waiting++;
        } else {
            sweep->status = status;
        }
    }
    purge_confirmed(agent, namespace_id, KVF_OK);
}

static void answer_purge(struct kvf_agent *agent, struct kvf_control *control)
{
    if (control->namespace_id == 0) {
        (void)snprintf(control->text, sizeof(control->text), "name the namespace to purge");
        kvf_answer_finish(control, KVF_ERR_INVALID);
        return;
    }
    sweep_begin(agent, control);
}

/* ----------------------------------------------------------------------------------------------
 * Verify: read every byte of a block again, where it is. One block at a time.
 */
struct kvf_verify {
    struct kvf_agent *agent;
    struct kvf_control *control;
    struct kvf_work work;
    struct kvf_tier_io io;
    void *scratch; /* records are read from drives into this, not into the arena */
    uint32_t cursor;
    kvf_cookie cookie;
    kvf_location slot;
    const struct kvf_record_page *record;
    uint64_t record_bytes;
    int32_t status;
    bool is_stalled;
};

#define SCRATCH_BYTES ((size_t)KVF_PROTO_RECORD_MAX + KVF_RECORD_PAGE_BYTES)

static void verify_next(struct kvf_verify *verify);

static void verify_finish(struct kvf_verify *verify, int status)
{
    struct kvf_control *control = verify->control;

    verify->agent->verify = NULL;
    if (control->next_cursor != 0) {
        kvf_notify_progress("serving; verifying: %" PRIu32 " of %" PRIu32 " places looked at",
                            verify->cursor, verify->agent->index.fresh);
    } else {
        kvf_notify("STATUS=serving");
    }
    (void)munmap(verify->scratch, SCRATCH_BYTES);
    free(verify);
    kvf_answer_finish(control, status);
}

static void verify_count(struct kvf_verify *verify, int status)
{
    verify->control->verified++;
    verify->control->bad += status == KVF_ERR_CORRUPT || status == KVF_ERR_IO;
}

static void verify_loaded(struct kvf_tier_io *io)
{
    struct kvf_verify *verify = io->owner;

    if (io->status != KVF_MISS) { /* a miss has been reused meanwhile */
        verify_count(verify, io->status);
    }
    verify_next(verify);
}

/* The drive's copy of the block at cursor. False: it has none, or the drive is busy: then the same
 * block is tried again in the next turn. */
static bool verify_drive(struct kvf_verify *verify, const struct kvf_entry *entry)
{
    int status;

    struct kvf_agent *agent = verify->agent;
    struct kvf_drive *drive = &agent->drives[entry->drive];
    const struct kvf_namespace *ns = &agent->namespaces[entry->namespace_index];

    if (entry->state == KVF_ENTRY_FREE || !kvf_entry_on_drive(entry)) {
        return false;
    }
    memset(&verify->io, 0, sizeof(verify->io));
    memcpy(verify->io.name.key_id, entry->key_id, sizeof(verify->io.name.key_id));
    verify->io.name.namespace_id = ns->id;
    verify->io.name.namespace_epoch = kvf_nvme_namespace_epoch(drive->store, ns->id);
    verify->io.name.shard = (uint16_t)entry->shard;
    verify->io.name.shard_count = ns->shard_count;
    verify->io.cookie = verify->cookie;
    verify->io.record = verify->scratch;
    verify->io.record_bytes = entry->record_bytes;
    verify->io.location = kvf_entry_nvme_location(entry);
    verify->io.done = verify_loaded;
    verify->io.owner = verify;
    status = drive->tier->ops->load(drive->tier, &verify->io);
    verify->is_stalled = status == KVF_ERR_BUSY;
    return status == KVF_OK || verify->is_stalled;
}

static void verify_sum(struct kvf_work *work)
{
    struct kvf_verify *verify = work->owner;
    const uint8_t *payload = (const uint8_t *)verify->record + KVF_RECORD_PAGE_BYTES;

    verify->status = kvf_block_check(verify->record, verify->record_bytes);
    if (verify->status == KVF_OK && verify->record->header.total_bytes != verify->record_bytes) {
        verify->status = KVF_ERR_CORRUPT;
    }
    if (verify->status == KVF_OK) {
        verify->status = kvf_block_check_payload(verify->record, payload);
    }
}

static void verify_summed(struct kvf_work *work)
{
    struct kvf_verify *verify = work->owner;
    struct kvf_agent *agent = verify->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, verify->cookie);
    bool is_same = kvf_entry_in_dram(entry) && kvf_place_slot(agent, entry) == verify->slot;

    kvf_dram_unpin(agent->dram_store, verify->slot);
    verify_count(verify, verify->status);
    if (verify->status != KVF_OK && is_same) {
        agent->metrics.dram_corrupt_blocks++;
        kvf_log(KVF_LOG_ERROR, "verify: a block in memory does not have its checksum: dropped; "
                               "check the machine's memory");
        kvf_place_forget_set(agent, entry);
    } else if (is_same && verify_drive(verify, entry)) {
        return;
    }
    verify_next(verify);
}

static void verify_next(struct kvf_verify *verify)
{
    struct kvf_agent *agent = verify->agent;
    struct kvf_control *control = verify->control;

    while (verify->cursor < agent->index.fresh && control->n_rows < control->max_rows &&
           !agent->is_draining) {
        const struct kvf_entry *entry = &agent->index.entries[verify->cursor];

        verify->cookie = verify->cursor++;
        if (!is_block_of(agent, entry, control->namespace_id) || entry->state != KVF_ENTRY_READY) {
            continue;
        }
        control->n_rows++;
        if (!kvf_entry_in_dram(entry)) {
            if (verify_drive(verify, entry)) {
                return;
            }
            continue;
        }
        verify->slot = kvf_place_slot(agent, entry);
        verify->record = agent->dram->ops->address(agent->dram, verify->slot);
        verify->record_bytes = entry->record_bytes;
        verify->work.run = verify_sum;
        verify->work.done = verify_summed;
        verify->work.owner = verify;
        kvf_dram_pin(agent->dram_store, verify->slot);
        if (agent->work->ops->submit(agent->work, &verify->work) == KVF_OK) {
            return;
        }
        kvf_dram_unpin(agent->dram_store, verify->slot);
    }
    control->next_cursor = verify->cursor < agent->index.fresh ? verify->cursor : 0;
    control->places = agent->index.fresh;
    verify_finish(verify, KVF_OK);
}

/* Try the drive's copy of the same block again. */
static void verify_resume(struct kvf_verify *verify)
{
    verify->is_stalled = false;
    if (!verify_drive(verify, kvf_index_at(&verify->agent->index, verify->cookie))) {
        verify_next(verify);
    }
}

static void answer_verify(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_verify *verify = NULL;

    if (agent->verify != NULL || agent->is_draining) {
        (void)snprintf(control->text, sizeof(control->text),
                       "another verify is running, ask again");
        kvf_answer_finish(control, KVF_ERR_BUSY);
        return;
    }
    verify = calloc(1, sizeof(*verify));
    if (verify == NULL) {
        kvf_answer_finish(control, KVF_ERR_NO_MEMORY);
        return;
    }
    verify->scratch = mmap(NULL, SCRATCH_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (verify->scratch == MAP_FAILED) {
        free(verify);
        kvf_answer_finish(control, KVF_ERR_NO_MEMORY);
        return;
    }
    verify->agent = agent;
    verify->control = control;
    verify->cursor = (uint32_t)control->cursor;
    agent->verify = verify;
    verify_next(verify);
}

/* ----------------------------------------------------------------------------------------------
 * The turn
 */
static void answer(struct kvf_agent *agent, struct kvf_control *control)
{
    control->n_rows = 0;
    control->next_cursor = 0;
    switch ((enum kvf_control_op)control->op) {
    case KVF_CONTROL_STAT:
        answer_stat(agent, control);
        return;
    case KVF_CONTROL_CLIENTS:
        answer_clients(agent, control);
        return;
    case KVF_CONTROL_BLOCKS:
        answer_blocks(agent, control);
        return;
    case KVF_CONTROL_NAMESPACES:
        answer_namespaces(agent, control);
        return;
    case KVF_CONTROL_VERIFY:
        answer_verify(agent, control);
        return;
    case KVF_CONTROL_EVICT:
        answer_evict(agent, control);
        return;
    case KVF_CONTROL_PURGE:
        answer_purge(agent, control);
        return;
    case KVF_CONTROL_DRAIN:
        kvf_agent_stop(agent);
        kvf_answer_finish(control, KVF_OK);
        return;
    case KVF_CONTROL_DISABLE:
        kvf_answer_finish(control, kvf_service_disable(agent, control->namespace_id, control->text,
                                                       sizeof(control->text)));
        return;
    case KVF_CONTROL_ENABLE:
        kvf_answer_finish(control, kvf_service_enable(agent, control->namespace_id, control->text,
                                                      sizeof(control->text)));
        return;
    case KVF_CONTROL_CALIBRATIONS:
        control->calibrations = agent->calibrations != NULL
                                    ? kvf_calibrations_hold(agent->calibrations)
                                    : NULL;
        kvf_answer_finish(control, KVF_OK);
        return;
    case KVF_CONTROL_TRACE:
        kvf_observe_take(agent, control);
        kvf_answer_finish(control, control->status);
        return;
    case KVF_CONTROL_RELOAD:
        kvf_reload_start(agent, control);
        return;
    case KVF_CONTROL_EVENTS:
        kvf_peers_events(agent, control);
        return;
    case KVF_CONTROL_PEERS:
        control->n_rows = kvf_peers_rows(agent, control->rows, control->max_rows);
        kvf_answer_finish(control, KVF_OK);
        return;
    }
    kvf_answer_finish(control, KVF_ERR_INVALID);
}

static uint32_t take_all(struct kvf_agent *agent, struct kvf_control *out[KVF_CONTROLS_MAX])
{
    uint32_t n;

    (void)pthread_mutex_lock(&agent->control_lock);
    n = atomic_exchange(&agent->n_controls, 0);
    memcpy(out, agent->controls, n * sizeof(out[0]));
    (void)pthread_mutex_unlock(&agent->control_lock);
    return n;
}

void kvf_answer_poll(struct kvf_agent *agent)
{
    struct kvf_control *controls[KVF_CONTROLS_MAX];
    uint32_t n = atomic_load(&agent->n_controls) == 0 ? 0 : take_all(agent, controls);

    for (uint32_t i = 0; i < n; i++) {
        answer(agent, controls[i]);
    }
    if (agent->sweep.control != NULL && agent->sweep.end != 0) {
        sweep_step(agent);
    }
    if (agent->verify != NULL && agent->verify->is_stalled) {
        verify_resume(agent->verify);
    }
}

void kvf_answer_fail_all(struct kvf_agent *agent)
{
    struct kvf_control *controls[KVF_CONTROLS_MAX];
    uint32_t n;

    (void)pthread_mutex_lock(&agent->control_lock);
    agent->is_closed = true;
    (void)pthread_mutex_unlock(&agent->control_lock);
    n = take_all(agent, controls);
    for (uint32_t i = 0; i < n; i++) {
        kvf_answer_finish(controls[i], KVF_ERR_TIER_OFF);
    }
    kvf_reload_abandon(agent);
    if (agent->sweep.control != NULL) {
        kvf_answer_finish(agent->sweep.control, KVF_ERR_TIER_OFF);
        agent->sweep.control = NULL;
    }
    if (agent->verify != NULL) {
        /* only after a drain that timed out: the drive may still write to the scratch memory, so it
         * stays */
        kvf_answer_finish(agent->verify->control, KVF_ERR_TIER_OFF);
        agent->verify = NULL;
    }
}
