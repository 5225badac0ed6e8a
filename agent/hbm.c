/* SPDX-License-Identifier: Apache-2.0
 *
 * hbm.c: blocks in the memory of GPUs.
 *
 *   hit in DRAM gpu.promote_hits times, by clients of the GPU --> copied up (a promotion)
 *   DRAM needs the room: its copy goes, the GPU's stays
 *   the GPU needs the room: its copy goes if DRAM or a drive has the block too; else the block is
 *   copied down first (a demotion: a load that nobody asked for), and goes the next time
 *   the GPU's worker dies: its copies are gone, leases on them are lost
 *
 * A block is in the memory of one GPU at most. Only clients that have mapped the very piece of that
 * GPU read it there, by requests that say so; for all others it is loaded as from a drive.
 */
#include "agent/core.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/mutant.h"
#include "transport/seqpacket.h"

/* ----------------------------------------------------------------------------------------------
 * What the tier asks
 */
static bool may_evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct kvf_hbm_device *device = ctx;
    struct kvf_agent *agent = device->source.agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, cookie);
    struct kvf_flight *flight;

    (void)location;
    if (entry->state != KVF_ENTRY_READY) {
        return false;
    }
    if (entry->dram_slot != KVF_INDEX_NONE || kvf_entry_on_drive(entry)) {
        return true;
    }
    if (KVF_MUTANT(hbm_sole_evicted)) {
        return true;
    }
    /* the only copy: down with it, and it can be taken when it has arrived */
    if (device->demotes < KVF_DEMOTES_MAX && !agent->is_draining &&
        kvf_place_load(agent, entry, NULL, &flight) == KVF_OK) {
        device->demotes++;
    }
    return false;
}

static void evict(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct kvf_hbm_device *device = ctx;
    struct kvf_agent *agent = device->source.agent;

    (void)location;
    agent->metrics.hbm_evicted_blocks++;
    kvf_hbm_leave(agent, kvf_index_at(&agent->index, cookie));
}

static void lost_one(void *ctx, kvf_location location, kvf_cookie cookie)
{
    struct kvf_hbm_device *device = ctx;
    struct kvf_agent *agent = device->source.agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, cookie);

    (void)location;
    agent->metrics.hbm_lost_blocks++;
    kvf_hbm_leave(agent, entry);
    if (entry->state == KVF_ENTRY_READY && entry->dram_slot == KVF_INDEX_NONE &&
        !kvf_entry_on_drive(entry)) {
        kvf_place_forget_set(agent, entry);
    }
}

static void lost(void *ctx)
{
    struct kvf_hbm_device *device = ctx;
    struct kvf_agent *agent = device->source.agent;

    if (!KVF_MUTANT(hbm_loss_unpublished)) {
        kvf_lease_lose_hbm(agent, (uint32_t)(device - agent->hbm), KVF_LOCATION_NONE);
    }
    kvf_dram_visit(device->slots, lost_one, device);
}

/* Said at the end of the turn. */
static void piece_added(void *ctx, uint32_t piece_id)
{
    struct kvf_hbm_device *device = ctx;

    (void)piece_id;
    device->source.agent->hbm_news = true;
}

/* Nobody is given anything in there any more. */
static void piece_dropped(void *ctx, uint32_t piece_id)
{
    struct kvf_hbm_device *device = ctx;
    struct kvf_agent *agent = device->source.agent;

    for (uint32_t i = 0; agent->sessions != NULL && i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];
        uint32_t at = piece_id % KVF_DRAM_PIECES_MAX;

        if (session->state == KVF_SESSION_READY &&
            session->device == 1 + (uint32_t)(device - agent->hbm) &&
            at < session->n_device_pieces) {
            session->device_pieces[at].is_mapped = false;
        }
    }
    agent->hbm_news = true;
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
int kvf_hbm_open_device(struct kvf_agent *agent, struct kvf_hbm_port *port)
{
    uint32_t number = agent->n_hbm;
    struct kvf_hbm_device *device = &agent->hbm[number];
    struct kvf_hbm_config config;
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    kvf_hbm_config_init(&config, agent->config->gpu_hbm_bytes);
    config.n_tenants = (uint16_t)agent->n_tenants;
    config.env = agent->env;
    config.work = agent->work;
    config.port = port;
    config.host = (struct kvf_tier_host){.ctx = device, .may_evict = may_evict, .evict = evict};
    config.events = (struct kvf_hbm_events){
        .ctx = device, .piece_added = piece_added, .piece_dropped = piece_dropped, .lost = lost};
    device->source.agent = agent;
    device->source.read_ns_per_mib = 100 * KVF_NS_PER_US; /* until copies have been seen */
    status = kvf_hbm_open(&config, &device->source.store, why, sizeof(why));
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "hbm: %s", why);
        return status;
    }
    device->source.tier = device->source.store;
    device->slots = kvf_hbm_slots(device->source.store);
    device->bytes = agent->config->gpu_hbm_bytes;
    agent->n_hbm++;
    agent->hbm_news = true;
    for (uint32_t i = 0; agent->sessions != NULL && i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY && session->device == 0 &&
            session->device_uuid[0] != '\0') {
            kvf_hbm_attach(session, session->device_uuid); /* it was there first */
        }
    }
    kvf_log(KVF_LOG_INFO, "hbm: %llu MiB on GPU %s, %s", (unsigned long long)(device->bytes >> 20),
            kvf_hbm_uuid(device->source.store), why);
    return KVF_OK;
}

uint64_t kvf_hbm_table_bytes(const struct kvf_config *config, uint64_t index_entries)
{
    return config->gpu_hbm_bytes != 0 ? index_entries * sizeof(struct kvf_hbm_place) : 0;
}

int kvf_hbm_open_all(struct kvf_agent *agent)
{
    bool is_ported = agent->ports.open_hbm != NULL;
    int status = KVF_OK;

    if (agent->config->gpu_hbm_bytes == 0 ||
        (!is_ported && agent->config->gpu_devices[0] == '\0')) {
        return KVF_OK;
    }
    assert(agent->ports.n_hbm <= KVF_HBM_DEVICES_MAX);
    agent->hbm = calloc(KVF_HBM_DEVICES_MAX, sizeof(*agent->hbm));
    agent->hbm_places = calloc(agent->index.capacity, sizeof(*agent->hbm_places));
    if (agent->hbm == NULL || agent->hbm_places == NULL) {
        kvf_log(KVF_LOG_ERROR, "hbm: no memory for its tables; lower index.entries");
        return KVF_ERR_NO_MEMORY;
    }
    /* workers' come when they are up: none is waited for */
    while (status == KVF_OK && is_ported && agent->n_hbm < agent->ports.n_hbm) {
        status = kvf_hbm_open_device(agent, agent->ports.open_hbm(agent->ports.ctx, agent->n_hbm));
    }
    return status;
}

void kvf_hbm_close_all(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->n_hbm; i++) {
        struct kvf_tier *tier = agent->hbm[i].source.tier;

        tier->ops->close(tier);
    }
    free(agent->hbm);
    free(agent->hbm_places);
}

/* ----------------------------------------------------------------------------------------------
 * Promotion
 */
static void promote_done(struct kvf_tier_io *io)
{
    struct kvf_flight *flight = io->owner;
    struct kvf_agent *agent = flight->agent;
    struct kvf_entry *entry = kvf_index_at(&agent->index, flight->cookie);
    struct kvf_hbm_device *device = flight->owner;
    struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);
    bool is_here = io->status == KVF_OK && !flight->is_abandoned;

    device->promotes--;
    kvf_dram_unpin(agent->dram_store, flight->slot);
    if (is_here) {
        place->slot = flight->hbm_slot;
        place->device = (uint8_t)(device - agent->hbm);
        kvf_dram_publish(device->slots, flight->hbm_slot, 0);
        agent->metrics.hbm_promoted_blocks++;
    } else {
        kvf_dram_drop(device->slots, flight->hbm_slot);
    }
    if (flight->is_abandoned) {
        kvf_place_number_free(flight);
    } else {
        place->promotion = 0;
        place->hits = 0;
        if (io->status == KVF_ERR_CORRUPT) {
            kvf_log(KVF_LOG_ERROR, "hbm: a block in memory does not have its checksum: dropped; "
                                   "check the machine's memory");
            kvf_place_forget_set(agent, entry);
        }
    }
    kvf_place_flight_free(flight);
}

static void promote(struct kvf_session *session, struct kvf_entry *entry)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_hbm_device *device = &agent->hbm[session->device - 1];
    struct kvf_tier *tier = device->source.tier;
    kvf_location slot = kvf_place_slot(agent, entry);
    void *record = agent->dram->ops->address(agent->dram, slot);
    const struct kvf_namespace *ns = &agent->namespaces[entry->namespace_index];
    size_t head_bytes = 0;
    struct kvf_flight *flight;

    if (!session->plan.profile->opaque) { /* else there is nothing to know of a payload */
        head_bytes = kvf_block_outline_bytes(session->plan.geometry.n_layers);
        if (kvf_block_outline(&session->plan, record, entry->record_bytes, agent->outline) !=
            KVF_OK) {
            return;
        }
    }
    flight = kvf_place_flight_new(agent, KVF_FLIGHT_PROMOTE, entry, NULL);
    if (flight == NULL) {
        return;
    }
    if (tier->ops->reserve(tier, ns->tenant, entry->record_bytes, flight->cookie,
                           &flight->hbm_slot) != KVF_OK) {
        kvf_place_flight_free(flight);
        return;
    }
    flight->slot = slot;
    flight->owner = device;
    flight->io.record = record;
    flight->io.record_bytes = entry->record_bytes;
    flight->io.cookie = flight->cookie;
    flight->io.location = flight->hbm_slot;
    flight->io.done = promote_done;
    if (kvf_hbm_store(tier, &flight->io, agent->outline, head_bytes) != KVF_OK) {
        kvf_dram_drop(device->slots, flight->hbm_slot);
        kvf_place_flight_free(flight);
        return;
    }
    kvf_dram_pin(agent->dram_store, slot);
    device->promotes++;
    kvf_hbm_place(agent, entry)->promotion = 1 + kvf_pool_index(&agent->flights, flight);
}

void kvf_hbm_consider(struct kvf_session *session, struct kvf_entry *entry)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);
    const struct kvf_hbm_device *device;

    if (session->device == 0 || place->slot != 0 || place->promotion != 0 || agent->is_draining) {
        return;
    }
    device = &agent->hbm[session->device - 1];
    place->hits += place->hits < UINT8_MAX;
    if (place->hits < agent->config->gpu_promote_hits || device->promotes == KVF_PROMOTES_MAX ||
        !kvf_hbm_is_up(device->source.store) ||
        !kvf_hbm_fits(device->source.store, entry->record_bytes) ||
        agent->sides[entry->dram_slot].expires_s != 0) { /* times to live are kept in DRAM */
        return;
    }
    promote(session, entry);
}

/* ----------------------------------------------------------------------------------------------
 * Entries
 */
void kvf_hbm_leave(struct kvf_agent *agent, struct kvf_entry *entry)
{
    struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);

    kvf_dram_drop(agent->hbm[place->device].slots, place->slot);
    place->slot = 0;
    place->hits = 0;
}

struct kvf_flight *kvf_hbm_forget(struct kvf_agent *agent, struct kvf_entry *entry)
{
    struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);
    struct kvf_flight *flight = NULL;

    if (place == NULL) {
        return NULL;
    }
    if (place->promotion != 0) {
        flight = kvf_pool_at(&agent->flights, place->promotion - 1);
        place->promotion = 0;
    }
    if (place->slot != 0) {
        kvf_hbm_leave(agent, entry);
    }
    place->hits = 0;
    return flight;
}

bool kvf_hbm_is_idle(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    const struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);

    return place == NULL || place->slot == 0 ||
           kvf_dram_pins(agent->hbm[place->device].slots, place->slot) == 0;
}

/* ----------------------------------------------------------------------------------------------
 * Clients
 */
bool kvf_hbm_promises(const struct kvf_session *session, const struct kvf_entry *entry)
{
    const struct kvf_agent *agent = session->agent;

    return kvf_entry_in_hbm(agent, entry) &&
           (session->shard == KVF_SHARD_NONE ||
            session->device == 1u + kvf_hbm_place(agent, entry)->device);
}

bool kvf_hbm_serves(const struct kvf_session *session, const struct kvf_entry *entry)
{
    const struct kvf_agent *agent = session->agent;
    const struct kvf_hbm_place *place;
    uint32_t piece_id;
    uint64_t offset;

    if (session->device == 0 || !kvf_entry_in_hbm(agent, entry)) {
        return false;
    }
    place = kvf_hbm_place(agent, entry);
    if (session->device != 1u + place->device) {
        return false;
    }
    kvf_dram_locate(agent->hbm[place->device].slots, place->slot, &piece_id, &offset);
    return session->device_pieces[piece_id % KVF_DRAM_PIECES_MAX].sent == piece_id &&
           session->device_pieces[piece_id % KVF_DRAM_PIECES_MAX].is_mapped;
}

void kvf_hbm_attach(struct kvf_session *session, const char *uuid)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_dram_info info;

    memmove(session->device_uuid, uuid, sizeof(session->device_uuid));
    for (uint32_t i = 0; i < agent->n_hbm && session->device == 0; i++) {
        if (strcasecmp(kvf_hbm_uuid(agent->hbm[i].source.store), uuid) == 0) {
            kvf_dram_info(agent->hbm[i].slots, &info);
            session->device_pieces = calloc(info.pieces, sizeof(*session->device_pieces));
            if (session->device_pieces != NULL) {
                session->n_device_pieces = info.pieces;
                session->device = 1 + i;
            }
        }
    }
}

bool kvf_hbm_mapped(struct kvf_session *session, uint32_t piece_id)
{
    uint32_t at = piece_id % KVF_DRAM_PIECES_MAX;

    if (piece_id == 0 || at >= session->n_device_pieces) {
        return false;
    }
    /* one that has been dropped meanwhile is no mistake */
    session->device_pieces[at].is_mapped = session->device_pieces[at].sent == piece_id;
    return true;
}

void kvf_hbm_tell(struct kvf_agent *agent)
{
    if (!agent->hbm_news) {
        return;
    }
    agent->hbm_news = false;
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        if (agent->sessions[i].state == KVF_SESSION_READY && agent->sessions[i].device != 0) {
            kvf_session_flush(&agent->sessions[i]);
        }
    }
}

static int send_piece(struct kvf_session *session, uint32_t piece_id, uint64_t bytes, const int *fd)
{
    struct kvf_wire_piece message = {.piece = piece_id, .bytes = bytes};

    kvf_proto_head_init(&message.head,
                        fd != NULL ? KVF_WIRE_DEVICE_PIECE : KVF_WIRE_DEVICE_PIECE_DROP);
    return kvf_seqpacket_send(session->fd, &message, sizeof(message), fd, fd != NULL ? 1 : 0);
}

int kvf_hbm_announce(struct kvf_session *session)
{
    const struct kvf_agent *agent = session->agent;
    const struct kvf_tier *slots;
    int status = KVF_OK;

    if (session->device == 0) {
        return KVF_OK;
    }
    slots = agent->hbm[session->device - 1].slots;
    for (uint32_t i = 0; i < session->n_device_pieces && status == KVF_OK; i++) {
        struct kvf_device_piece *known = &session->device_pieces[i];
        struct kvf_dram_piece piece = {0};

        if (known->sent != 0 && kvf_dram_piece_get(slots, known->sent, &piece) != KVF_OK) {
            status = send_piece(session, known->sent, 0, NULL);
            if (status == KVF_OK) {
                *known = (struct kvf_device_piece){0};
            }
        }
    }
    for (uint32_t id = kvf_dram_piece_next(slots, session->tenant, 0); status == KVF_OK && id != 0;
         id = kvf_dram_piece_next(slots, session->tenant, id)) {
        struct kvf_device_piece *known = &session->device_pieces[id % KVF_DRAM_PIECES_MAX];
        struct kvf_dram_piece piece;

        if (known->sent == 0 && kvf_dram_piece_get(slots, id, &piece) == KVF_OK) {
            status = send_piece(session, id, piece.bytes, &piece.fd);
            known->sent = status == KVF_OK ? id : 0;
        }
    }
    return status;
}
