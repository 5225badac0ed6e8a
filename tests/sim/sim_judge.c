/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_judge.c: every completion of honest clients, judged in the turn in which the daemon shows it,
 * whether the client takes it then or not.
 */
#include "tests/sim/sim.h"

#include <string.h>

#include "transport/shm_lease.h"

static void wrong(struct sim *sim, const struct sim_client *client,
                  const struct sim_request *request, const struct kvf_shm_cqe *cqe,
                  const char *what)
{
    sim_fail(sim,
             "%s: client %u request %llu op %u ns %u chain %u, completion kind %u index %u status "
             "%d tier %u values %u %u %u %u",
             what, client->number, (unsigned long long)cqe->request,
             request == NULL ? 0 : request->opcode, client->ns,
             request == NULL ? 0 : request->chain, cqe->kind, cqe->index, cqe->status, cqe->tier,
             cqe->values[0], cqe->values[1], cqe->values[2], cqe->values[3]);
}

static struct sim_block *block_of(struct sim *sim, const struct sim_client *client,
                                  const struct sim_request *request, uint32_t index)
{
    return sim_block(sim, client->ns, request->chain, request->keys[index].chunk, client->shard);
}

static bool is_success(int status)
{
    return status == KVF_OK || status == KVF_EXISTS || status == KVF_COMING;
}

/* ---- get ------------------------------------------------------------------------------------- */

/* Records on a GPU have a head before them. */
static uint64_t record_offset(const struct kvf_shm_cqe *cqe)
{
    return cqe->offset + (cqe->tier == KVF_TIER_HBM ? KVF_SHM_DEVICE_HEAD_BYTES : 0);
}

static uint32_t piece_id(const struct kvf_shm_cqe *cqe)
{
    return cqe->piece | (cqe->tier == KVF_TIER_HBM ? SIM_ON_GPU : 0);
}

static void lease_new(struct sim *sim, struct sim_client *client, struct sim_request *request,
                      const struct kvf_shm_cqe *cqe, const struct sim_piece *piece)
{
    struct sim_block *block = block_of(sim, client, request, cqe->index);
    struct sim_lease *lease = &client->leases[client->n_leases++];
    uint64_t offset = record_offset(cqe);
    const struct kvf_record_page *page = (const void *)(piece->map + offset);

    if (client->n_leases > SIM_LEASES) {
        wrong(sim, client, request, cqe, "more leases than asked for");
    }
    *lease = (struct sim_lease){
        .id = cqe->lease,
        .version = (uint8_t)sim_payload_version(sim, block, (const uint8_t *)(page + 1),
                                                cqe->record_bytes - KVF_RECORD_PAGE_BYTES),
        .piece = piece_id(cqe),
        .offset = offset,
        .bytes = cqe->record_bytes,
        .block = block,
        .cq_index = client->observed,
        .since_ns = sim->now_ns,
        .since_turn = sim->turn,
        .release_ns = sim->now_ns + sim_below(sim, 20 * sim->shape.tick_ns),
    };
    sim->cover[SIM_COVER_lease_reused] += kvf_lease_id_generation(cqe->lease) > 1;
    if (sim_one_in(sim, 30)) {
        lease->release_ns += 400 * sim->shape.tick_ns;
    }
}

static void judge_hit(struct sim *sim, struct sim_client *client, struct sim_request *request,
                      const struct kvf_shm_cqe *cqe)
{
    struct sim_block *block = block_of(sim, client, request, cqe->index);
    const struct sim_piece *piece = sim_piece_find(sim, piece_id(cqe));
    const struct kvf_record_page *page;
    const struct sim_lease *lease;

    if (piece == NULL) {
        sim_client_poll(sim, client); /* a piece is announced before its first record */
        piece = sim_piece_find(sim, piece_id(cqe));
    }
    if (client->state != SIM_READY) {
        return; /* disconnected meanwhile, for a reason */
    }
    if (cqe->tier == KVF_TIER_HBM && (request->flags & KVF_SQE_DEVICE) == 0) {
        wrong(sim, client, request, cqe, "hit on a GPU that was not asked for");
    }
    if (piece == NULL || piece->tenant != sim->namespaces[client->ns].tenant ||
        cqe->offset % KVF_PROTO_PAGE_BYTES != 0 || cqe->record_bytes <= KVF_RECORD_PAGE_BYTES ||
        record_offset(cqe) + cqe->record_bytes > piece->bytes) {
        wrong(sim, client, request, cqe, "hit outside of the tenant's memory");
    }
    lease_new(sim, client, request, cqe, piece);
    lease = &client->leases[client->n_leases - 1];
    if (!kvf_lease_word_live(&client->ring.leases[kvf_lease_id_index(lease->id)],
                             kvf_lease_id_generation(lease->id))) {
        return; /* lost in the same turn; release finds out why */
    }
    page = (const struct kvf_record_page *)(piece->map + record_offset(cqe));
    if (page->header.total_bytes != cqe->record_bytes || page->header.shard != client->shard ||
        page->header.shard_count != sim->namespaces[client->ns].shard_count ||
        memcmp(page->header.key_id, sim_block_key_id(sim, block), 32) != 0) {
        wrong(sim, client, request, cqe, "hit with a record page of another block");
    }
    sim_model_hit(sim, block, lease->version);
    (void)sim_lease_check(sim, client, &client->leases[client->n_leases - 1]);
    sim->cover[SIM_COVER_hit_dram] += cqe->tier == KVF_TIER_DRAM;
    sim->cover[SIM_COVER_hit_hbm] += cqe->tier == KVF_TIER_HBM;
    if (cqe->tier == KVF_TIER_NVME) {
        sim_cover(sim, SIM_COVER_hit_nvme);
        sim->cover[SIM_COVER_load_coalesced] += block->loaded_turn == sim->turn;
        block->loaded_turn = sim->turn;
    }
}

static void judge_get(struct sim *sim, struct sim_client *client, struct sim_request *request,
                      const struct kvf_shm_cqe *cqe)
{
    const struct sim_block *block = block_of(sim, client, request, cqe->index);
    bool has_budget = request->budget_ms != 0;

    switch (cqe->status) {
    case KVF_OK:
        judge_hit(sim, client, request, cqe);
        break;
    case KVF_MISS:
        if (!has_budget && !request->is_canceled && block->promises > 0 &&
            block->gone_turn < request->submitted_turn && block->expires_ns == 0) {
            sim->suspect = block; /* an evict in this very turn may come to light yet */
            sim->suspect_client = client->number;
            sim->suspect_request = request->id;
        }
        sim->cover[SIM_COVER_get_expired] += has_budget &&
                                             sim->now_ns >= request->submitted_ns +
                                                                request->budget_ms * KVF_NS_PER_MS;
        break;
    case KVF_TOO_SLOW:
        if (!has_budget) {
            wrong(sim, client, request, cqe, "too slow without a budget");
        }
        sim_cover(sim, SIM_COVER_too_slow);
        break;
    case KVF_ERR_BUSY:
        sim_cover(sim, SIM_COVER_lease_busy);
        break;
    case KVF_ERR_CANCELED:
        break; /* judged for all */
    default:
        wrong(sim, client, request, cqe, "status that a get cannot have");
    }
}

/* ---- put ------------------------------------------------------------------------------------- */

static bool put_status_is_known(const struct sim_request *request, int status)
{
    bool is_durable = (request->flags & KVF_SQE_DURABLE) != 0;

    switch (status) {
    case KVF_OK:
    case KVF_EXISTS:
    case KVF_ERR_CONFLICT:
    case KVF_ERR_BUSY:
    case KVF_ERR_REFUSED:
    case KVF_ERR_TOO_LARGE:
    case KVF_ERR_CORRUPT:
    case KVF_ERR_CANCELED: /* also when its key is evicted meanwhile */
        return true;
    case KVF_ERR_TIMEOUT:
        return request->budget_ms != 0;
    case KVF_ERR_IO:
    case KVF_ERR_NO_SPACE:
    case KVF_ERR_TIER_OFF:
        return is_durable;
    default:
        return false;
    }
}

static void judge_put(struct sim *sim, struct sim_client *client, struct sim_request *request,
                      const struct kvf_shm_cqe *cqe)
{
    struct sim_key *key = &request->keys[cqe->index];

    if (!put_status_is_known(request, cqe->status)) {
        wrong(sim, client, request, cqe, "status that a put cannot have");
    }
    sim_model_put_end(sim, client, request, cqe->index, cqe->status);
    /* its staging is free now: whoever still reads it, reads something else */
    memset(client->staging + key->stage_offset, 0xee, 512);
    client->staging[key->stage_offset + key->stage_bytes - 1] ^= 0xff;
    sim_stage_free(client, key->stage_offset);
    sim->cover[SIM_COVER_put_corrupt] += cqe->status == KVF_ERR_CORRUPT;
    sim->cover[SIM_COVER_put_conflict] += cqe->status == KVF_ERR_CONFLICT;
    sim->cover[SIM_COVER_put_exists] += cqe->status == KVF_EXISTS;
    sim->cover[SIM_COVER_put_quota] += cqe->status == KVF_ERR_REFUSED;
    sim->cover[SIM_COVER_put_timeout] += cqe->status == KVF_ERR_TIMEOUT;
    sim->cover[SIM_COVER_put_durable] += cqe->status == KVF_OK &&
                                         (request->flags & KVF_SQE_DURABLE) != 0;
}

/* ---- lookup ---------------------------------------------------------------------------------- */

static void judge_whole(struct sim *sim, struct sim_client *client, struct sim_request *request,
                        const struct kvf_shm_cqe *cqe, uint32_t position)
{
    uint32_t shard_count = sim->namespaces[client->ns].shard_count;

    for (uint32_t shard = 0; shard < shard_count; shard++) {
        const struct sim_block *block = sim_block(sim, client->ns, request->chain,
                                                  request->keys[position].chunk, shard);

        if (!sim_model_may_exist(sim, block, request->submitted_turn)) {
            wrong(sim, client, request, cqe, "run with a chunk that is not whole");
        }
    }
    sim->cover[SIM_COVER_set_whole] += shard_count > 1;
}

/* A leased run stays: from now on gets of it must hit. */
static void promise(struct sim *sim, struct sim_client *client, struct sim_request *request,
                    const struct kvf_shm_cqe *cqe)
{
    uint32_t shard_count = sim->namespaces[client->ns].shard_count;
    uint32_t n_chunks = (uint32_t)request->n_keys - request->n_tails;
    uint32_t ready = cqe->values[1] < n_chunks ? cqe->values[1] : n_chunks;
    struct sim_lease *lease = &client->leases[client->n_leases++];

    if (client->n_leases > SIM_LEASES) {
        wrong(sim, client, request, cqe, "more leases than asked for");
    }
    *lease = (struct sim_lease){
        .id = cqe->lease,
        .is_lookup = true,
        .chain = request->chain,
        .n_chunks = (uint16_t)ready,
        .cq_index = client->observed,
        .since_ns = sim->now_ns,
        .since_turn = sim->turn,
        .release_ns = sim->now_ns + sim_below(sim, 30 * sim->shape.tick_ns),
    };
    for (uint32_t i = 0; i < ready * shard_count; i++) {
        struct sim_block *block = sim_block(sim, client->ns, request->chain, i / shard_count,
                                            i % shard_count);

        lease->serials[i] = (uint16_t)(block->promise_serial - 1); /* none */
        if (block->gone_turn < request->submitted_turn) {
            lease->serials[i] = block->promise_serial;
            block->promises++;
        }
    }
    sim_cover(sim, SIM_COVER_lookup_leased);
}

static void judge_lookup(struct sim *sim, struct sim_client *client, struct sim_request *request,
                         const struct kvf_shm_cqe *cqe)
{
    uint32_t n_chunks = (uint32_t)request->n_keys - request->n_tails;
    uint32_t run = cqe->values[0], ready = cqe->values[1], coming = cqe->values[2];
    uint32_t tail = cqe->values[3];
    bool fetches = (request->flags & KVF_SQE_PREFETCH) != 0 || request->budget_ms != 0;

    bool is_exact = (request->flags & KVF_SQE_LEASE) == 0 || cqe->lease != 0;

    /* a lease that could not be had takes what was ready along */
    if (ready > run || coming > (fetches ? run - ready : 0) ||
        (is_exact && fetches && coming != run - ready) || tail > request->n_tails ||
        run > n_chunks + (tail != 0) ||
        (cqe->lease != 0 && ((request->flags & KVF_SQE_LEASE) == 0 || ready == 0))) {
        wrong(sim, client, request, cqe, "numbers that a lookup cannot have");
    }
    for (uint32_t i = 0; i < run && i < n_chunks; i++) {
        judge_whole(sim, client, request, cqe, i);
    }
    if (tail != 0) {
        judge_whole(sim, client, request, cqe, n_chunks + tail - 1);
        sim_cover(sim, SIM_COVER_lookup_tail);
    }
    sim->cover[SIM_COVER_lookup_waited] += request->budget_ms != 0 && ready > 0 &&
                                           sim->turn > request->submitted_turn + 1;
    if (cqe->lease != 0) {
        promise(sim, client, request, cqe);
    }
}

/* ---- all ------------------------------------------------------------------------------------- */

static struct sim_request *find(struct sim_client *client, uint64_t id)
{
    for (uint32_t i = 0; i < SIM_REQUESTS; i++) {
        if (client->requests[i].id == id) {
            return &client->requests[i];
        }
    }
    return NULL;
}

static void judge_block(struct sim *sim, struct sim_client *client, struct sim_request *request,
                        const struct kvf_shm_cqe *cqe)
{
    bool *seen = request->opcode == KVF_OP_STAT ? &request->stat_seen[cqe->index]
                                                : &request->keys[cqe->index].is_seen;

    if (cqe->index >= request->n_blocks || *seen) {
        wrong(sim, client, request, cqe, "block completed twice, or none of the request");
    }
    *seen = true;
    request->seen++;
    if (is_success(cqe->status)) {
        request->succeeded++;
    } else if (cqe->index < request->first_failed) {
        request->first_failed = cqe->index;
        request->first_failure = cqe->status;
    }
    if (cqe->status == KVF_ERR_CANCELED && !request->is_canceled && request->opcode != KVF_OP_PUT) {
        wrong(sim, client, request, cqe, "canceled, which nobody asked for");
    }
    switch (request->opcode) {
    case KVF_OP_GET:
        judge_get(sim, client, request, cqe);
        break;
    case KVF_OP_PUT:
        judge_put(sim, client, request, cqe);
        break;
    case KVF_OP_EVICT:
        if (cqe->status == KVF_OK) {
            sim_cover(sim, SIM_COVER_evicted_key);
            sim_audit_abandoned(sim);
        }
        if (cqe->status != KVF_OK && cqe->status != KVF_MISS && cqe->status != KVF_ERR_BUSY &&
            cqe->status != KVF_ERR_CANCELED) {
            wrong(sim, client, request, cqe, "status that an evict cannot have");
        }
        if (cqe->status == KVF_OK || cqe->status == KVF_MISS) {
            sim_model_gone_set(sim, client->ns, request->chain, request->keys[cqe->index].chunk);
        }
        break;
    case KVF_OP_PREFETCH:
        if (cqe->status != KVF_OK && cqe->status != KVF_MISS && cqe->status != KVF_COMING &&
            cqe->status != KVF_ERR_BUSY && cqe->status != KVF_ERR_CANCELED) {
            wrong(sim, client, request, cqe, "status that a prefetch cannot have");
        }
        sim->cover[SIM_COVER_prefetched] += cqe->status == KVF_COMING;
        break;
    case KVF_OP_STAT:
        if (cqe->status != KVF_OK ||
            (cqe->index == KVF_STAT_ARENA_BYTES && cqe->offset != sim->agent->arena_bytes)) {
            wrong(sim, client, request, cqe, "figure that cannot be");
        }
        break;
    default:
        break;
    }
}

static void judge_request(struct sim *sim, struct sim_client *client, struct sim_request *request,
                          const struct kvf_shm_cqe *cqe)
{
    if (request->seen != request->n_blocks) {
        wrong(sim, client, request, cqe, "request completed before all its blocks");
    }
    if (cqe->status == KVF_ERR_CANCELED) {
        sim_cover(sim, SIM_COVER_canceled);
        /* a request that was refused or canceled as a whole */
        if (!request->is_canceled && request->opcode != KVF_OP_PUT) {
            wrong(sim, client, request, cqe, "canceled, which nobody asked for");
        }
    }
    if (request->opcode == KVF_OP_LOOKUP) {
        judge_lookup(sim, client, request, cqe);
    } else if (cqe->index != request->succeeded) {
        wrong(sim, client, request, cqe, "request with a wrong count");
    } else if (cqe->status == KVF_OK && request->succeeded != request->n_blocks) {
        wrong(sim, client, request, cqe, "request ok, its blocks are not");
    } else if (cqe->status == KVF_PARTIAL && request->succeeded == 0) {
        wrong(sim, client, request, cqe, "request partial without a block");
    }
    if (request->opcode == KVF_OP_GET || request->opcode == KVF_OP_LOOKUP) {
        client->n_expected -= request->n_keys;
    }
    request->id = 0;
    client->n_requests--;
}

void sim_judge(struct sim *sim, struct sim_client *client)
{
    uint32_t tail = __atomic_load_n(&client->ring.indices->cq_tail.value, __ATOMIC_ACQUIRE);

    if (tail - client->ring.cq_head > client->ring.cq_entries) {
        sim_fail(sim, "client %u: more completions than its ring holds", client->number);
    }
    while (client->state == SIM_READY && client->observed != tail) {
        struct kvf_shm_cqe cqe = client->ring.cq[client->observed & (client->ring.cq_entries - 1)];
        struct sim_request *request = find(client, cqe.request);
        const char *why = "";

        if (kvf_shm_cqe_check(&cqe, &why) != KVF_OK || request == NULL) {
            wrong(sim, client, request, &cqe, "completion of no request");
        }
        sim_hash(sim, cqe.request ^ (uint64_t)cqe.kind << 56 ^ (uint64_t)cqe.tier << 52);
        sim_hash(sim, (uint64_t)(uint32_t)cqe.status << 32 | cqe.index);
        sim_hash(sim, cqe.offset ^ (uint64_t)cqe.piece << 40 ^ cqe.lease);
        sim_hash(sim, cqe.values[0] ^ cqe.values[1] << 8 ^ cqe.values[2] << 16);
        sim_trace(sim,
                  "client %u: completion of %llu kind %u index %u status %d tier %u lease %llx",
                  client->number, (unsigned long long)cqe.request, cqe.kind, cqe.index, cqe.status,
                  cqe.tier, (unsigned long long)cqe.lease);
        if (cqe.kind == KVF_CQE_BLOCK) {
            judge_block(sim, client, request, &cqe);
        } else {
            judge_request(sim, client, request, &cqe);
        }
        client->observed++;
    }
}

/* Does this client hold the block by a lookup's lease, and does the lease still say so? */
static bool is_promised_by(struct sim *sim, const struct sim_client *client,
                           const struct sim_block *block)
{
    uint32_t shard_count = sim->namespaces[client->ns].shard_count;

    for (uint32_t i = 0; client->state == SIM_READY && i < client->n_leases; i++) {
        const struct sim_lease *lease = &client->leases[i];

        for (uint32_t k = 0; lease->is_lookup && k < lease->n_chunks * shard_count; k++) {
            if (sim_block(sim, client->ns, lease->chain, k / shard_count, k % shard_count) ==
                    block &&
                lease->serials[k] == block->promise_serial &&
                kvf_lease_word_live(&client->ring.leases[kvf_lease_id_index(lease->id)],
                                    kvf_lease_id_generation(lease->id))) {
                return true;
            }
        }
    }
    return false;
}

void sim_judge_suspect(struct sim *sim)
{
    bool is_promised = false;

    for (uint32_t i = 0; sim->suspect != NULL && i < sim->shape.n_clients; i++) {
        is_promised |= is_promised_by(sim, &sim->clients[i], sim->suspect);
    }
    if (is_promised && sim->suspect->gone_turn != sim->turn) {
        char text[200];

        sim_describe(sim, sim->suspect, text, sizeof(text));
        sim_fail(sim, "client %u request %llu: miss of a block under a lookup's lease: %s",
                 sim->suspect_client, (unsigned long long)sim->suspect_request, text);
    }
    sim->suspect = NULL;
}

/* What a budget may be exceeded by: the copies that a put waits for, and the turns until it is
 * taken. A client that has not taken all its completions may have the answer. */
void sim_judge_deadlines(struct sim *sim, struct sim_client *client)
{
    uint64_t slack_ns = 4 * sim->shape.work_max_ns + 200 * sim->shape.tick_ns + 2 * KVF_NS_PER_MS;

    if (kvf_ring_client_ready(&client->ring)) {
        return;
    }
    for (uint32_t i = 0; client->n_requests > 0 && i < SIM_REQUESTS; i++) {
        const struct sim_request *request = &client->requests[i];
        uint64_t limit_ns = request->budget_ms == 0 ? SIM_FOREVER_NS
                                                    : request->budget_ms * KVF_NS_PER_MS + slack_ns;

        if (request->id != 0 && sim->now_ns > request->submitted_ns + limit_ns) {
            sim_fail(
                sim,
                "client %u request %llu op %u (budget %u ms, %u of %u blocks) should have ended "
                "%llu us ago",
                client->number, (unsigned long long)request->id, request->opcode,
                request->budget_ms, request->seen, request->n_blocks,
                (unsigned long long)((sim->now_ns - request->submitted_ns - limit_ns) / 1000));
        }
    }
}
