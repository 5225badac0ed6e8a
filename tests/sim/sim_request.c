/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_request.c: what honest clients ask for. Requests walk along chains, as engines do; now and
 * then something in them is wrong on purpose, in ways that an honest client can be wrong.
 */
#include "tests/sim/sim.h"

#include <string.h>

/* ---- staging --------------------------------------------------------------------------------- */

/* First fit among the ranges in use. UINT32_MAX: no room. */
static uint32_t stage_take(struct sim_client *client, uint32_t bytes)
{
    uint32_t offset = 0;
    uint32_t at = 0;

    bytes = (bytes + 4095) & ~4095u;
    if (client->n_stages == SIM_STAGES) {
        return UINT32_MAX;
    }
    while (at < client->n_stages && client->stages[at].offset - offset < bytes) {
        offset = client->stages[at].offset + client->stages[at].bytes;
        at++;
    }
    if (offset + (uint64_t)bytes > client->staging_bytes) {
        return UINT32_MAX;
    }
    memmove(&client->stages[at + 1], &client->stages[at],
            (client->n_stages - at) * sizeof(client->stages[0]));
    client->stages[at] = (struct sim_stage){.offset = offset, .bytes = bytes};
    client->n_stages++;
    return offset;
}

void sim_stage_free(struct sim_client *client, uint32_t offset)
{
    uint32_t at = 0;

    while (client->stages[at].offset != offset) {
        at++;
    }
    client->n_stages--;
    memmove(&client->stages[at], &client->stages[at + 1],
            (client->n_stages - at) * sizeof(client->stages[0]));
}

/* ---- submission ------------------------------------------------------------------------------ */

bool sim_request_has_room(struct sim *sim, struct sim_client *client, uint32_t n_entries,
                          uint32_t credits)
{
    if (client->credits_taken + credits > client->ring.cq_entries) {
        sim_cover(sim, SIM_COVER_credits_busy);
        return false;
    }
    if (kvf_ring_client_room(&client->ring, n_entries) != KVF_OK) {
        sim_cover(sim, SIM_COVER_ring_full);
        return false;
    }
    return true;
}

static struct sim_request *request_new(struct sim *sim, struct sim_client *client, uint8_t opcode)
{
    struct sim_request *request = client->requests;

    while (request < client->requests + SIM_REQUESTS && request->id != 0) {
        request++;
    }
    if (request == client->requests + SIM_REQUESTS) {
        return NULL;
    }
    memset(request, 0, sizeof(*request));
    request->opcode = opcode;
    request->first_failed = UINT32_MAX;
    request->submitted_ns = sim->now_ns;
    request->submitted_turn = sim->turn + 1;
    return request;
}

static void put_key_entry(const struct sim_request *request, struct sim_client *client,
                          uint32_t position, uint32_t chunk, const struct sim_key *put)
{
    struct kvf_shm_key entry = {0};

    entry.key_bytes = (uint16_t)sim_key(request->chain, chunk, entry.key).bytes;
    if (put != NULL) {
        entry.stage_offset = put->stage_offset;
        entry.record_bytes = put->stage_bytes;
        entry.token_start = chunk * 256;
    }
    kvf_ring_client_key_put(&client->ring, position, &entry);
}

/* Push what has room, and let the daemon see it now or with what follows. */
static void submit(struct sim *sim, struct sim_client *client, struct sim_request *request,
                   struct kvf_shm_sqe *sqe)
{
    request->id = client->next_request++;
    sqe->request = request->id;
    sqe->opcode = request->opcode;
    sqe->flags = request->flags;
    sqe->n_keys = request->n_keys;
    sqe->n_tails = request->n_tails;
    sqe->budget_ms = request->budget_ms;
    sqe->ttl_s = request->ttl_s;
    request->n_blocks = (uint16_t)kvf_shm_sqe_blocks(sqe);
    client->credits_taken += kvf_shm_sqe_credits(sqe);
    kvf_ring_client_push(&client->ring, sqe);
    (void)kvf_ring_client_publish(&client->ring);
    client->n_requests++;
    sim->requests++;
    sim_hash(sim, request->id ^ (uint64_t)client->number << 56 ^ (uint64_t)request->opcode << 48);
    sim_trace(sim,
              "client %u: request %llu op %u ns %u chain %u first %u keys %u flags %x budget %u",
              client->number, (unsigned long long)request->id, request->opcode, client->ns,
              request->chain, request->keys[0].chunk, request->n_keys, request->flags,
              request->budget_ms);
}

/* Hot chains move along as time goes by, and with them the sizes that are asked for. */
static uint16_t choose_chain(struct sim *sim)
{
    uint64_t phase = sim->requests * 2 * SIM_CHAINS / (sim->requests_wanted + 1);
    uint64_t far = sim_below(sim, sim->shape.hot_chains);

    if (sim_one_in(sim, 4)) {
        far = sim_below(sim, SIM_CHAINS);
    } else if (sim_one_in(sim, 2)) {
        far = sim_below(sim, far + 1);
    }
    return (uint16_t)((phase + far) % SIM_CHAINS);
}

/* ---- puts ------------------------------------------------------------------------------------ */

/* Write the record into staging. */
static bool stage_record(struct sim *sim, struct sim_client *client, struct sim_request *request,
                         struct sim_key *key)
{
    struct sim_block *block = sim_block(sim, client->ns, request->chain, key->chunk, client->shard);
    uint32_t payload_bytes = sim_payload_bytes(sim, block, key->version);
    struct kvf_record_page page;
    uint8_t *at;

    key->stage_bytes = KVF_RECORD_PAGE_BYTES + payload_bytes;
    key->stage_offset = stage_take(client, key->stage_bytes);
    if (key->stage_offset == UINT32_MAX) {
        return false;
    }
    at = client->staging + key->stage_offset;
    sim_payload_fill(sim, block, key->version, at + sizeof(page));
    (void)kvf_block_describe_bytes(&page, at + sizeof(page), payload_bytes);
    if ((request->flags & KVF_SQE_UNSUMMED) != 0) {
        page.header.payload_crc32c = ~page.header.payload_crc32c; /* means nothing */
        kvf_block_seal_header(&page);
    }
    if (key->is_corrupt) {
        at[sizeof(page) + sim_below(sim, payload_bytes)] ^= 1;
    }
    memcpy(at, &page, sizeof(page));
    return true;
}

static void choose_put(struct sim *sim, const struct sim_client *client,
                       struct sim_request *request)
{
    uint32_t first = (uint32_t)sim_below(sim, SIM_CHAIN_CHUNKS);
    uint32_t n = 1 + (uint32_t)sim_below(sim, sim_one_in(sim, 6) ? 8 : 3);
    bool is_tail = sim_one_in(sim, 10);

    if (sim_one_in(sim, 3)) {
        first = 0; /* a chain that begins */
    }
    if (is_tail) {
        first = SIM_CHAIN_CHUNKS + (uint32_t)sim_below(sim, SIM_TAILS);
        n = 1;
    } else if (first + n > SIM_CHAIN_CHUNKS) {
        n = SIM_CHAIN_CHUNKS - first;
    }
    if (sim_one_in(sim, sim->shape.durable_in)) {
        request->flags |= KVF_SQE_DURABLE;
    } else if (sim_one_in(sim, 12)) {
        request->flags |= KVF_SQE_NO_WRITE;
    }
    if ((request->flags & KVF_SQE_DURABLE) == 0 && sim_one_in(sim, sim->shape.ttl_in)) {
        request->ttl_s = 1 + (uint32_t)sim_below(sim, 4);
    }
    if (first > 0 && !sim_one_in(sim, 8)) {
        request->flags |= KVF_SQE_HAS_PARENT;
    }
    if (sim_one_in(sim, sim->shape.budget_in)) {
        request->budget_ms = 1 + (uint32_t)sim_below(sim, 5);
    }
    if (client->version >= KVF_WIRE_VERSION_UNSUMMED && sim_one_in(sim, 3)) {
        request->flags |= KVF_SQE_UNSUMMED;
        sim_cover(sim, SIM_COVER_put_unsummed);
    }
    request->n_keys = (uint16_t)n;
    for (uint32_t i = 0; i < n; i++) {
        struct sim_key *key = &request->keys[i];

        /* one random number a statement: compilers differ in the order inside of one */
        *key = (struct sim_key){.chunk = (uint16_t)(first + i), .supersedes = -1};
        if (sim_one_in(sim, sim->shape.version_in)) {
            key->version = (uint8_t)(1 + sim_below(sim, SIM_VERSIONS - 1));
        }
        key->is_corrupt = sim_one_in(sim, 150) && (request->flags & KVF_SQE_UNSUMMED) == 0;
    }
    if (is_tail && sim_one_in(sim, 2) && first + 1 < SIM_CHUNKS) {
        request->keys[0].supersedes = (int16_t)(first + 1); /* a longer tail takes its place */
    }
}

/* All key entries: the blocks, the parent, what is superseded. Returns how many. */
static uint32_t put_key_entries(struct sim *sim, struct sim_client *client,
                                struct sim_request *request)
{
    uint32_t n = request->n_keys;

    for (uint32_t i = 0; i < request->n_keys; i++) {
        put_key_entry(request, client, i, request->keys[i].chunk, &request->keys[i]);
    }
    if ((request->flags & KVF_SQE_HAS_PARENT) != 0) {
        uint32_t parent = request->keys[0].chunk < SIM_CHAIN_CHUNKS ? request->keys[0].chunk - 1u
                                                                    : SIM_CHAIN_CHUNKS - 1u;

        put_key_entry(request, client, n++, parent, NULL);
    }
    if (request->keys[0].supersedes >= 0) {
        struct kvf_shm_key entry = {0};

        for (uint32_t shard = 0; shard < SIM_SHARDS_MAX; shard++) { /* gone at any moment now */
            sim_block(sim, client->ns, request->chain, (uint32_t)request->keys[0].supersedes, shard)
                ->is_durable = false;
        }
        put_key_entry(request, client, n++, (uint32_t)request->keys[0].supersedes, NULL);
        entry.key_bytes =
            (uint16_t)sim_key(request->chain, request->keys[0].chunk, entry.key).bytes;
        entry.stage_offset = request->keys[0].stage_offset;
        entry.record_bytes = request->keys[0].stage_bytes;
        entry.supersedes = (uint16_t)n;
        kvf_ring_client_key_put(&client->ring, 0, &entry);
    }
    return n;
}

void sim_request_put(struct sim *sim, struct sim_client *client)
{
    struct sim_request *request = request_new(sim, client, KVF_OP_PUT);
    struct kvf_shm_sqe sqe = {0};

    if (request == NULL) {
        return;
    }
    request->chain = choose_chain(sim);
    choose_put(sim, client, request);
    if (!sim_request_has_room(sim, client, request->n_keys + 2u, request->n_keys + 1u)) {
        return;
    }
    for (uint32_t i = 0; i < request->n_keys; i++) {
        if (!stage_record(sim, client, request, &request->keys[i])) {
            request->n_keys = (uint16_t)i; /* staging is full: what fits */
            request->keys[0].supersedes = -1;
        }
    }
    if (request->n_keys == 0) {
        return;
    }
    sqe.n_entries = (uint16_t)put_key_entries(sim, client, request);
    sqe.depth = request->keys[0].chunk;
    sqe.priority = (uint8_t)sim_below(sim, 3);
    for (uint32_t i = 0; i < request->n_keys; i++) {
        const struct sim_key *key = &request->keys[i];
        struct sim_block *block = sim_block(sim, client->ns, request->chain, key->chunk,
                                            client->shard);

        sim_model_put_begin(block, key->version);
    }
    submit(sim, client, request, &sqe);
}

/* Change the payload of a put that is on its way: what is stored must still be what was promised,
 * or nothing. */
void sim_request_scribble(struct sim *sim, struct sim_client *client)
{
    struct sim_request *request = &client->requests[sim_below(sim, SIM_REQUESTS)];
    struct sim_key *key;

    if (request->id == 0 || request->opcode != KVF_OP_PUT ||
        (request->flags & KVF_SQE_UNSUMMED) != 0) { /* nothing was promised */
        return;
    }
    key = &request->keys[sim_below(sim, request->n_keys)];
    if (!key->is_seen) {
        uint32_t payload_bytes = key->stage_bytes - KVF_RECORD_PAGE_BYTES;

        client->staging[key->stage_offset + KVF_RECORD_PAGE_BYTES +
                        sim_below(sim, payload_bytes)] ^= 0x10;
        key->is_scribbled = true;
        sim_cover(sim, SIM_COVER_scribble_staging);
    }
}

/* ---- everything else ------------------------------------------------------------------------- */

static void choose_keys(struct sim *sim, struct sim_request *request)
{
    uint32_t first = sim_one_in(sim, 3) ? (uint32_t)sim_below(sim, SIM_CHAIN_CHUNKS) : 0;
    uint32_t n = 1 + (uint32_t)sim_below(sim, sim_one_in(sim, 5) ? SIM_CHAIN_CHUNKS : 4);

    if (request->opcode == KVF_OP_LOOKUP) {
        first = 0;
        n += (uint32_t)sim_below(sim, 6);
    } else if (request->opcode == KVF_OP_EVICT) {
        n = 1;
    }
    if (first + n > SIM_CHAIN_CHUNKS) {
        n = SIM_CHAIN_CHUNKS - first;
    }
    for (uint32_t i = 0; i < n; i++) {
        request->keys[i].chunk = (uint16_t)(first + i);
    }
    if ((request->opcode == KVF_OP_LOOKUP || request->opcode == KVF_OP_GET) && sim_one_in(sim, 4)) {
        uint32_t n_tails = request->opcode == KVF_OP_LOOKUP ? 1 + (uint32_t)sim_below(sim, 4) : 1;

        for (uint32_t i = 0; i < n_tails; i++) {
            request->keys[n + i].chunk = (uint16_t)(SIM_CHAIN_CHUNKS + i);
        }
        request->n_tails = request->opcode == KVF_OP_LOOKUP ? (uint16_t)n_tails : 0;
        n += n_tails;
    }
    request->n_keys = (uint16_t)n;
}

void sim_request_read(struct sim *sim, struct sim_client *client, uint8_t opcode)
{
    struct sim_request *request = request_new(sim, client, opcode);
    struct kvf_shm_sqe sqe = {0};

    if (request == NULL) {
        return;
    }
    request->chain = choose_chain(sim);
    choose_keys(sim, request);
    if (opcode == KVF_OP_LOOKUP) {
        request->flags |= sim_one_in(sim, 2) && client->n_leases < SIM_LEASES / 2 ? KVF_SQE_LEASE
                                                                                  : 0;
        request->flags |= sim_one_in(sim, 3) ? KVF_SQE_PREFETCH : 0;
    }
    if (opcode == KVF_OP_GET && client->has_device && !sim_one_in(sim, 6)) {
        request->flags |= KVF_SQE_DEVICE;
    }
    if (opcode != KVF_OP_EVICT && opcode != KVF_OP_PREFETCH &&
        sim_one_in(sim, sim->shape.budget_in)) {
        request->budget_ms = 1 + (uint32_t)sim_below(sim, 4);
    }
    if ((opcode == KVF_OP_GET || opcode == KVF_OP_LOOKUP) &&
        client->n_leases + client->n_expected + request->n_keys > SIM_LEASES) {
        return;
    }
    if (!sim_request_has_room(sim, client, request->n_keys, request->n_keys + 1u)) {
        return;
    }
    client->n_expected += opcode == KVF_OP_GET || opcode == KVF_OP_LOOKUP ? request->n_keys : 0u;
    for (uint32_t i = 0; i < request->n_keys; i++) {
        put_key_entry(request, client, i, request->keys[i].chunk, NULL);
    }
    sqe.n_entries = request->n_keys;
    submit(sim, client, request, &sqe);
}

void sim_request_plain(struct sim *sim, struct sim_client *client, uint8_t opcode)
{
    struct sim_request *request = request_new(sim, client, opcode);
    struct kvf_shm_sqe sqe = {.opcode = opcode};

    if (request != NULL && sim_request_has_room(sim, client, 0, kvf_shm_sqe_credits(&sqe))) {
        submit(sim, client, request, &sqe);
    }
}

void sim_request_cancel(struct sim *sim, struct sim_client *client)
{
    struct sim_request *request = &client->requests[sim_below(sim, SIM_REQUESTS)];
    struct kvf_shm_sqe sqe = {.opcode = KVF_OP_CANCEL, .arg = request->id};

    if (request->id == 0 || kvf_ring_client_room(&client->ring, 0) != KVF_OK) {
        return;
    }
    request->is_canceled = true;
    kvf_ring_client_push(&client->ring, &sqe);
    (void)kvf_ring_client_publish(&client->ring);
}
