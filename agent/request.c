/* SPDX-License-Identifier: Apache-2.0
 *
 * request.c: from submissions to completions. A client's requests are taken in order, one at a
 * time, their keys in slices, so that a request of a thousand keys does not hold up other clients.
 * A key either completes at once or leaves an op that waits for a flight; the request's own
 * completion follows the last of its blocks.
 */
#include "agent/core.h"
#include "agent/observe.h"

#include <string.h>

#include "base/mutant.h"

/* ----------------------------------------------------------------------------------------------
 * Completions
 */
static void push(struct kvf_session *session, const struct kvf_shm_cqe *cqe)
{
    kvf_ring_daemon_complete(&session->ring, cqe);
    session->wants_wake = true;
}

void kvf_request_block(struct kvf_request *request, uint32_t index, int status, uint8_t tier)
{
    struct kvf_shm_cqe cqe = {.request = request->sqe.request,
                              .kind = KVF_CQE_BLOCK,
                              .tier = tier,
                              .status = status,
                              .index = index};

    if (status == KVF_OK || status == KVF_EXISTS || status == KVF_COMING) {
        request->succeeded++;
    } else if (index < request->first_failed_index) {
        request->first_failed_index = index;
        request->first_failure = status;
    }
    request->session->agent->metrics.requests_busy += status == KVF_ERR_BUSY;
    push(request->session, &cqe);
}

void kvf_request_block_hit(struct kvf_request *request, uint32_t index, uint8_t tier,
                           struct kvf_entry *entry)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    kvf_location slot = kvf_place_slot(agent, entry);
    struct kvf_shm_cqe cqe = {.request = request->sqe.request,
                              .kind = KVF_CQE_BLOCK,
                              .tier = tier,
                              .status = KVF_OK,
                              .index = index,
                              .record_bytes = entry->record_bytes};
    int status = KVF_ERR_BUSY;

    if (session->announce_head == session->announce_tail) { /* it knows all pieces */
        status = kvf_lease_begin(session, &cqe.lease);
    }
    if (status == KVF_OK) {
        status = kvf_lease_add(session, cqe.lease, slot, entry->record_bytes, 0);
        if (status != KVF_OK) {
            (void)kvf_lease_end(session, cqe.lease);
        }
    }
    if (status != KVF_OK) {
        kvf_request_block(request, index, status, tier);
        return;
    }
    (void)kvf_lease_publish(session, cqe.lease);
    kvf_dram_locate(agent->dram_store, slot, &cqe.piece, &cqe.offset);
    entry->is_hit = 1;
    request->succeeded++;
    session->hits++;
    agent->metrics.get_bytes += entry->record_bytes;
    if (tier == KVF_TIER_HBM) {
        cqe.tier = KVF_TIER_DRAM; /* where it is for this client, by now */
        agent->metrics.get_hits_hbm_copied++;
    } else if (tier == KVF_TIER_DRAM) {
        agent->metrics.get_hits_dram++;
        kvf_histogram_add(&agent->metrics.get_dram_ns, agent->now_ns - request->accepted_ns);
    } else if (tier == KVF_TIER_REMOTE) {
        agent->metrics.get_hits_remote++;
        kvf_histogram_add(&agent->metrics.get_remote_ns, agent->now_ns - request->accepted_ns);
    } else {
        agent->metrics.get_hits_nvme++;
        kvf_histogram_add(&agent->metrics.get_nvme_ns, agent->now_ns - request->accepted_ns);
    }
    push(session, &cqe);
}

bool kvf_request_block_hit_hbm(struct kvf_request *request, uint32_t index, struct kvf_entry *entry)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    const struct kvf_hbm_place *place = kvf_hbm_place(agent, entry);
    struct kvf_tier *slots = agent->hbm[place->device].slots;
    struct kvf_shm_cqe cqe = {.request = request->sqe.request,
                              .kind = KVF_CQE_BLOCK,
                              .tier = KVF_TIER_HBM,
                              .status = KVF_OK,
                              .index = index,
                              .record_bytes = entry->record_bytes};

    if (kvf_lease_begin(session, &cqe.lease) != KVF_OK) {
        return false;
    }
    if (kvf_lease_add_hbm(session, cqe.lease, place->device, place->slot, entry->record_bytes, 0) !=
        KVF_OK) {
        (void)kvf_lease_end(session, cqe.lease);
        return false;
    }
    (void)kvf_lease_publish(session, cqe.lease);
    kvf_dram_locate(slots, place->slot, &cqe.piece, &cqe.offset);
    kvf_dram_touch(slots, place->slot);
    entry->is_hit = 1;
    request->succeeded++;
    session->hits++;
    agent->metrics.get_bytes += entry->record_bytes;
    agent->metrics.get_hits_hbm++;
    kvf_histogram_add(&agent->metrics.get_hbm_ns, agent->now_ns - request->accepted_ns);
    push(session, &cqe);
    return true;
}

/* The status of the whole, from its blocks. */
static int overall_status(const struct kvf_request *request)
{
    if (request->is_canceled) {
        return KVF_ERR_CANCELED;
    }
    if (request->first_failed_index == UINT32_MAX) {
        return KVF_OK;
    }
    if (request->sqe.opcode == KVF_OP_GET) {
        return request->first_failed_index > 0 ? KVF_PARTIAL : request->first_failure;
    }
    return request->succeeded > 0 ? KVF_PARTIAL : request->first_failure;
}

static void free_request(struct kvf_request *request)
{
    struct kvf_session *session = request->session;

    *request->link = request->next;
    if (request->next != NULL) {
        request->next->link = request->link;
    }
    if (session->active == request) {
        session->active = NULL;
    }
    session->requests_count--;
    kvf_pool_put(&session->agent->requests, request);
}

/* The last completion, if nothing is left to wait for. */
static void finish_if_over(struct kvf_request *request)
{
    struct kvf_shm_cqe cqe = {.request = request->sqe.request, .kind = KVF_CQE_REQUEST};

    if (!request->is_started || request->waiting > 0) {
        return;
    }
    if (request->sqe.opcode == KVF_OP_LOOKUP) {
        kvf_request_settle_lookup(request);
        cqe.status = request->is_canceled  ? KVF_ERR_CANCELED
                     : request->coming > 0 ? KVF_COMING
                                           : KVF_OK;
        cqe.values[0] = request->run;
        cqe.values[1] = request->ready;
        cqe.values[2] = request->coming;
        cqe.values[3] = request->tail;
        cqe.lease = request->lease;
        cqe.index = request->ready;
    } else {
        cqe.status = overall_status(request);
        cqe.index = request->succeeded;
    }
    push(request->session, &cqe);
    free_request(request);
}

/* ----------------------------------------------------------------------------------------------
 * Waiting for flights
 */
int kvf_request_wait(struct kvf_request *request, uint32_t index, enum kvf_op_want want,
                     uint8_t tier, struct kvf_flight *flight, struct kvf_op **op_out)
{
    struct kvf_op *op = NULL;

    if (request->session->ops_count < KVF_OPS_A_CLIENT) {
        op = kvf_pool_get(&request->session->agent->ops);
    }
    if (op == NULL) {
        return KVF_ERR_BUSY;
    }
    request->session->ops_count++;
    op->request = request;
    op->index = index;
    op->want = (uint8_t)want;
    op->tier = tier;
    op->flight = flight;
    op->next = flight->waiters;
    flight->waiters = op;
    op->request_next = request->ops;
    op->request_link = &request->ops;
    if (op->request_next != NULL) {
        op->request_next->request_link = &op->request_next;
    }
    request->ops = op;
    request->waiting++;
    if (op_out != NULL) {
        *op_out = op;
    }
    return KVF_OK;
}

/* Take an op out of its request. Its flight must have forgotten it. */
static void free_op(struct kvf_op *op)
{
    struct kvf_request *request = op->request;

    *op->request_link = op->request_next;
    if (op->request_next != NULL) {
        op->request_next->request_link = op->request_link;
    }
    request->waiting--;
    request->session->ops_count--;
    kvf_pool_put(&request->session->agent->ops, op);
}

static void leave_flight(struct kvf_op *op)
{
    struct kvf_op **link;

    if (op->flight == NULL) {
        return;
    }
    link = &op->flight->waiters;
    while (*link != op) {
        link = &(*link)->next;
    }
    *link = op->next;
    op->flight = NULL;
}

static void count_miss(struct kvf_request *request)
{
    request->session->misses++;
    request->session->agent->metrics.get_misses++;
}

void kvf_request_op_done(struct kvf_op *op, int status, struct kvf_entry *entry)
{
    struct kvf_request *request = op->request;
    uint32_t index = op->index;
    uint8_t tier = op->tier;

    switch ((enum kvf_op_want)op->want) {
    case KVF_WANT_LEASE:
        if (entry != NULL && kvf_entry_in_dram(entry)) {
            kvf_request_block_hit(request, index, tier, entry);
        } else {
            count_miss(request);
            if (!KVF_MUTANT(completion_lost)) {
                kvf_request_block(request, index, status == KVF_ERR_BUSY ? status : KVF_MISS, tier);
            }
        }
        free_op(op);
        break;
    case KVF_WANT_LOADED:
        if (entry == NULL) {
            request->run = index < request->run ? index : request->run;
        } else if (request->lease != 0 && kvf_entry_in_dram(entry) &&
                   kvf_lease_add(request->session, request->lease,
                                 kvf_place_slot(request->session->agent, entry),
                                 entry->record_bytes, index) != KVF_OK) {
            request->run = index < request->run ? index : request->run;
        }
        free_op(op);
        break;
    case KVF_WANT_STORED:
    case KVF_WANT_DURABLE:
    case KVF_WANT_RELOAD:
        if (kvf_request_put_done(op, status, entry)) {
            return; /* it waits for the write now */
        }
        free_op(op);
        break;
    }
    finish_if_over(request);
}

/* ----------------------------------------------------------------------------------------------
 * Ending early
 */

/* Complete what has not been started or is waiting. Puts that are being copied are left to end:
 * their staging is in use until then. */
static void end_blocks(struct kvf_request *request, int status)
{
    struct kvf_op *op = request->ops;
    struct kvf_metrics *metrics = &request->session->agent->metrics;
    bool is_lookup = request->sqe.opcode == KVF_OP_LOOKUP;

    while (op != NULL) {
        struct kvf_op *next = op->request_next;

        if (op->want != KVF_WANT_STORED && !(op->want == KVF_WANT_DURABLE && op->flight != NULL &&
                                             op->flight->kind == KVF_FLIGHT_FILL)) {
            metrics->get_late += op->want == KVF_WANT_LEASE && status == KVF_MISS;
            leave_flight(op);
            request->cut_at = op->index < request->cut_at ? op->index : request->cut_at;
            if (!is_lookup) {
                kvf_request_block(request, op->index, status, op->tier);
                if (KVF_MUTANT(block_twice)) {
                    kvf_request_block(request, op->index, status, op->tier);
                }
            }
            free_op(op);
        }
        op = next;
    }
    while (!request->is_started) {
        if (request->next_key == request->sqe.n_keys) {
            request->is_started = true;
        } else if (!is_lookup) {
            kvf_request_block(request, request->next_key, status, KVF_TIER_NONE);
            request->next_key++;
        } else {
            request->run_ended = true;
            request->next_key = request->sqe.n_keys;
        }
    }
    if (request->session->active == request) {
        request->session->active = NULL;
    }
}

static void cancel(struct kvf_session *session, uint64_t id)
{
    struct kvf_request *request = session->requests;

    while (request != NULL && request->sqe.request != id) {
        request = request->next;
    }
    if (request == NULL) {
        return; /* it has completed: the client will see that first */
    }
    request->is_canceled = true;
    session->agent->metrics.requests_canceled++;
    end_blocks(request, KVF_ERR_CANCELED);
    finish_if_over(request);
}

void kvf_request_expire(struct kvf_session *session)
{
    struct kvf_request *request = session->requests;

    while (request != NULL) {
        struct kvf_request *next = request->next;

        if (request->deadline_ns <= session->agent->now_ns && !KVF_MUTANT(budget_ignored)) {
            request->deadline_ns = UINT64_MAX;
            request->is_expired = true;
            end_blocks(request, request->sqe.opcode == KVF_OP_PUT ? KVF_ERR_TIMEOUT : KVF_MISS);
            finish_if_over(request);
        }
        request = next;
    }
}

uint64_t kvf_request_deadline_ns(const struct kvf_session *session)
{
    uint64_t deadline_ns = UINT64_MAX;

    for (const struct kvf_request *r = session->requests; r != NULL; r = r->next) {
        deadline_ns = r->deadline_ns < deadline_ns ? r->deadline_ns : deadline_ns;
    }
    return deadline_ns;
}

void kvf_request_drop_all(struct kvf_session *session)
{
    while (session->requests != NULL) {
        struct kvf_request *request = session->requests;

        while (request->ops != NULL) {
            leave_flight(request->ops);
            free_op(request->ops);
        }
        free_request(request);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Taking submissions
 */
static void stat_values(struct kvf_request *request)
{
    struct kvf_session *session = request->session;
    struct kvf_agent *agent = session->agent;
    const struct kvf_namespace *ns = &agent->namespaces[session->namespace_index];
    struct kvf_tier_stat dram;
    uint64_t values[KVF_STAT_COUNT] = {0};

    agent->dram->ops->stat(agent->dram, &dram);
    values[KVF_STAT_NAMESPACE_BLOCKS] = ns->blocks;
    values[KVF_STAT_NAMESPACE_DRAM_BYTES] = ns->dram_bytes;
    values[KVF_STAT_NAMESPACE_NVME_BYTES] = ns->nvme_bytes;
    values[KVF_STAT_ARENA_BYTES] = agent->arena_bytes;
    values[KVF_STAT_ARENA_STORED_BYTES] = dram.stored_bytes;
    values[KVF_STAT_HITS] = session->hits;
    values[KVF_STAT_MISSES] = session->misses;
    values[KVF_STAT_PUTS] = session->puts;
    values[KVF_STAT_LEASED_BYTES] = session->leased_bytes;
    values[KVF_STAT_LOST_LEASES] = session->lost_leases;
    for (uint32_t i = 0; i < KVF_STAT_COUNT; i++) {
        struct kvf_shm_cqe cqe = {.request = request->sqe.request,
                                  .kind = KVF_CQE_BLOCK,
                                  .index = i,
                                  .offset = values[i]};

        request->succeeded++;
        push(session, &cqe);
    }
}

static void begin(struct kvf_request *request)
{
    struct kvf_session *session = request->session;
    const struct kvf_shm_sqe *sqe = &request->sqe;

    switch (sqe->opcode) {
    case KVF_OP_STAT:
        stat_values(request);
        break;
    case KVF_OP_PUT:
        if ((sqe->flags & KVF_SQE_HAS_PARENT) != 0) {
            kvf_request_key_id(session, &session->keys[sqe->n_keys], request->chain_key_id);
            request->has_chain_key = true;
        }
        break;
    case KVF_OP_LOOKUP:
        if ((sqe->flags & KVF_SQE_LEASE) != 0 &&
            kvf_lease_begin(session, &request->lease) != KVF_OK) {
            request->run_ended = true; /* without a lease nothing can be promised */
        }
        session->agent->metrics.lookup_chunks += (uint64_t)sqe->n_keys - sqe->n_tails;
        break;
    default:
        break;
    }
}

static void start_key(struct kvf_request *request)
{
    const struct kvf_shm_key *key = &request->session->keys[request->next_key];

    if (request->sqe.opcode == KVF_OP_LOOKUP &&
        request->next_key < (uint32_t)request->sqe.n_keys - request->sqe.n_tails) {
        kvf_observe_key(request, key);
    }
    if (request->sqe.opcode != KVF_OP_PUT && kvf_observe_answers_nothing(request->session)) {
        kvf_observe_answer(request, key);
        request->next_key++;
        return;
    }
    switch (request->sqe.opcode) {
    case KVF_OP_PUT:
        kvf_request_start_put(request, key);
        break;
    case KVF_OP_GET:
        kvf_request_start_get(request, key);
        break;
    case KVF_OP_LOOKUP:
        kvf_request_start_lookup(request, key);
        break;
    case KVF_OP_PREFETCH:
        kvf_request_start_prefetch(request, key);
        break;
    case KVF_OP_EVICT:
        kvf_request_start_evict(request, key);
        break;
    default:
        break;
    }
    request->next_key++;
}

/* A request that finds no object is answered at once. */
static void refuse(struct kvf_session *session, const struct kvf_shm_sqe *sqe)
{
    struct kvf_shm_cqe cqe = {.request = sqe->request, .status = KVF_ERR_BUSY};
    uint32_t blocks = kvf_shm_sqe_blocks(sqe);

    for (cqe.index = 0; cqe.index < blocks; cqe.index++) {
        cqe.kind = KVF_CQE_BLOCK;
        push(session, &cqe);
    }
    cqe.kind = KVF_CQE_REQUEST;
    cqe.index = 0;
    push(session, &cqe);
    session->agent->metrics.requests_busy++;
}

/* What an engine has seen. It is believed: its tenant's figures are all that it can spoil. */
static void count_report(struct kvf_session *session, uint64_t arg)
{
    struct kvf_metrics *metrics = &session->agent->metrics;
    struct kvf_namespace *ns = &session->agent->namespaces[session->namespace_index];
    uint64_t *const counters[KVF_REPORT_KIND_MAX + 1] = {
        [KVF_REPORT_LOAD_FAILED] = &metrics->engine_load_failures,
        [KVF_REPORT_TAINT_REFUSED] = &metrics->engine_taint_refusals,
        [KVF_REPORT_CORRUPT] = &metrics->engine_corrupt_blocks,
        [KVF_REPORT_TOKENS_COMPUTED] = &metrics->engine_prompt_tokens_computed,
        [KVF_REPORT_TOKENS_ENGINE] = &metrics->engine_prompt_tokens_cached,
        [KVF_REPORT_TOKENS_LOADED] = &metrics->engine_prompt_tokens_loaded,
        [KVF_REPORT_SAVED_US] = &metrics->engine_saved_ns,
        [KVF_REPORT_SPENT_US] = &metrics->engine_spent_ns,
        [KVF_REPORT_GPU_US] = &metrics->engine_gpu_ns,
        [KVF_REPORT_DRIFT_CHUNKS] = &metrics->engine_drift_chunks,
        [KVF_REPORT_DRIFT_PPM] = &metrics->engine_drift_error_ppm,
        [KVF_REPORT_GPU_DECODE_US] = &metrics->engine_gpu_decode_ns,
    };
    uint64_t kind = arg & ((1u << KVF_REPORT_KIND_BITS) - 1);
    uint64_t amount = arg >> KVF_REPORT_KIND_BITS;
    bool is_time = (kind >= KVF_REPORT_SAVED_US && kind <= KVF_REPORT_GPU_US) ||
                   kind == KVF_REPORT_GPU_DECODE_US;

    amount = is_time ? amount * 1000 : amount;
    *counters[kind] += amount;
    ns->gpu_ns += kind == KVF_REPORT_GPU_US ? amount : 0;
    ns->gpu_decode_ns += kind == KVF_REPORT_GPU_DECODE_US ? amount : 0;
}

static void accept_sqe(struct kvf_session *session, const struct kvf_shm_sqe *sqe)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_request *request;

    if (sqe->opcode == KVF_OP_CANCEL) {
        cancel(session, sqe->arg);
        return;
    }
    if (sqe->opcode == KVF_OP_RELEASE) {
        (void)kvf_lease_end(session, sqe->arg); /* LOST ones may be gone already: no error */
        return;
    }
    if (sqe->opcode == KVF_OP_REPORT) {
        count_report(session, sqe->arg);
        return;
    }
    agent->metrics.requests++;
    request = session->requests_count < KVF_REQUESTS_A_CLIENT ? kvf_pool_get(&agent->requests)
                                                              : NULL;
    if (request == NULL) {
        refuse(session, sqe);
        return;
    }
    session->requests_count++;
    request->session = session;
    request->sqe = *sqe;
    request->accepted_ns = agent->now_ns;
    request->deadline_ns = sqe->budget_ms == 0
                               ? UINT64_MAX
                               : agent->now_ns + (uint64_t)sqe->budget_ms * KVF_NS_PER_MS;
    request->first_failed_index = UINT32_MAX;
    request->cut_at = UINT32_MAX;
    request->next = session->requests;
    request->link = &session->requests;
    if (request->next != NULL) {
        request->next->link = &request->next;
    }
    session->requests = request;
    session->active = request;
    session->n_touched = 0;
    begin(request);
}

/* Touch hits in reverse: the end of a chain goes first when room is needed, since it is of no use
 * without its beginning. */
static void touch_tail_first(struct kvf_session *session)
{
    struct kvf_tier *dram = session->agent->dram_store;

    while (session->n_touched > 0) {
        kvf_location slot = session->touched[--session->n_touched];

        if (kvf_dram_state(dram, slot) == KVF_SLOT_READY) {
            kvf_dram_touch(dram, slot);
        }
    }
}

/* What a key costs of a turn: whole sets are looked at shard by shard. */
static uint32_t key_cost(const struct kvf_request *request)
{
    uint8_t op = request->sqe.opcode;

    return op == KVF_OP_PUT || op == KVF_OP_GET ? 1 : 1 + request->session->shard_count / 4u;
}

/* Can a key start, or must it wait until one of the client's own has landed? */
static bool has_share(const struct kvf_session *session)
{
    return session->ops_count < KVF_OPS_A_CLIENT && session->flights < KVF_FLIGHTS_A_CLIENT;
}

static bool may_start_key(const struct kvf_request *request, int32_t keys_left, int64_t bytes_left)
{
    uint16_t n_keys = request->sqe.opcode == KVF_OP_STAT ? 0 : request->sqe.n_keys;

    return request->next_key < n_keys && keys_left > 0 && bytes_left > 0 &&
           has_share(request->session);
}

/* Start keys of the active request within what is left of the turn. */
static void continue_active(struct kvf_session *session, int32_t *keys_left, int64_t *bytes_left)
{
    struct kvf_request *request = session->active;
    uint16_t n_keys = request->sqe.opcode == KVF_OP_STAT ? 0 : request->sqe.n_keys;

    while (may_start_key(request, *keys_left, *bytes_left)) {
        if (request->sqe.opcode == KVF_OP_PUT) {
            *bytes_left -= (int64_t)session->keys[request->next_key].record_bytes;
        }
        *keys_left -= (int32_t)key_cost(request);
        start_key(request);
    }
    if (request->next_key == n_keys) {
        request->is_started = true;
        session->active = NULL;
        touch_tail_first(session);
        if (request->sqe.opcode == KVF_OP_LOOKUP) {
            kvf_observe_lookup(request);
        }
        if (request->sqe.opcode == KVF_OP_LOOKUP && request->sqe.budget_ms == 0) {
            end_blocks(request, KVF_COMING); /* it does not wait: what is coming is counted */
        }
        finish_if_over(request);
    }
}

bool kvf_request_turn(struct kvf_session *session)
{
    struct kvf_shm_limits limits = {.staging_bytes = session->staging_bytes,
                                    .scheduler = session->shard == KVF_SHARD_NONE,
                                    .version = session->version};
    uint32_t entries_left = KVF_TURN_ENTRIES;
    int32_t keys_left = KVF_TURN_KEYS;
    int64_t bytes_left = KVF_TURN_BYTES;

    while (entries_left > 0 && keys_left > 0 && bytes_left > 0) {
        struct kvf_shm_sqe sqe;
        const char *why = NULL;
        int status;

        if (session->active != NULL) {
            if (!has_share(session)) {
                return false; /* what it waits for will wake the loop */
            }
            continue_active(session, &keys_left, &bytes_left);
            continue;
        }
        status = kvf_ring_daemon_take(&session->ring, &limits, &sqe, session->keys, &why);
        if (status == KVF_EMPTY) {
            return false;
        }
        if (status != KVF_OK) {
            kvf_session_end(session, why);
            return false;
        }
        entries_left--;
        accept_sqe(session, &sqe);
    }
    return true;
}
