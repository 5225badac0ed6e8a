/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_model.c: what each block may be. A block is a name and four payloads (versions) that follow
 * from it; the model keeps, as sets of versions, what the daemon may hold and what a drive may
 * bring back. What the daemon answers narrows the sets, and must lie inside them.
 *
 * Completions of one turn come in no known order across clients. So a set is judged together with
 * what it was when the turn began, and with the puts that are on their way.
 */
#include "tests/sim/sim.h"

#include <string.h>

#include "base/hash.h"

/* A time to live is kept to within a few seconds. */
#define TTL_SLACK_NS (4 * KVF_NS_PER_S)

/* ---- names and content ----------------------------------------------------------------------- */

static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

struct sim_block *sim_block(struct sim *sim, uint32_t ns, uint32_t chain, uint32_t chunk,
                            uint32_t shard)
{
    return &sim->blocks[((ns * SIM_CHAINS + chain) * SIM_CHUNKS + chunk) * SIM_SHARDS_MAX + shard];
}

static uint32_t number_of(const struct sim *sim, const struct sim_block *block)
{
    return (uint32_t)(block - sim->blocks);
}

static uint32_t ns_of(const struct sim *sim, const struct sim_block *block)
{
    return number_of(sim, block) / (SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX);
}

/* All namespaces use the same keys: only the daemon keeps them apart. */
struct kvf_key sim_key(uint32_t chain, uint32_t chunk, uint8_t bytes_out[KVF_KEY_BYTES_MAX])
{
    uint64_t word = mix(chain * SIM_CHUNKS + chunk + 1);
    uint32_t bytes = KVF_KEY_BYTES_MIN +
                     (uint32_t)(word % (KVF_KEY_BYTES_MAX - KVF_KEY_BYTES_MIN + 1));

    memset(bytes_out, 0, KVF_KEY_BYTES_MAX);
    for (uint32_t i = 0; i < bytes; i++) {
        bytes_out[i] = (uint8_t)(word >> (i % 8 * 8)) ^ (uint8_t)i;
    }
    return (struct kvf_key){.data = bytes_out, .bytes = (uint16_t)bytes};
}

const uint8_t *sim_block_key_id(struct sim *sim, struct sim_block *block)
{
    uint32_t number = number_of(sim, block);
    const struct sim_namespace *ns = &sim->namespaces[ns_of(sim, block)];
    uint8_t bytes[KVF_KEY_BYTES_MAX];

    if (!block->has_key_id) {
        uint32_t chunk = number / SIM_SHARDS_MAX % SIM_CHUNKS;
        uint32_t chain = number / SIM_SHARDS_MAX / SIM_CHUNKS % SIM_CHAINS;

        kvf_key_id_compute(sim->agent->id_key, sim->agent->tenants[ns->tenant].id, ns->id,
                           sim_key(chain, chunk, bytes), block->key_id);
        block->has_key_id = true;
    }
    return block->key_id;
}

void sim_describe(const struct sim *sim, const struct sim_block *block, char *text_out,
                  size_t bytes)
{
    uint32_t number = number_of(sim, block);

    (void)snprintf(
        text_out, bytes,
        "block ns %u chain %u chunk %u shard %u (mask %x disk %x pending %u%u%u%u zombies "
        "%x gone %llu)",
        ns_of(sim, block), number / SIM_SHARDS_MAX / SIM_CHUNKS % SIM_CHAINS,
        number / SIM_SHARDS_MAX % SIM_CHUNKS, number % SIM_SHARDS_MAX, block->mask,
        block->disk_mask, block->pending[0], block->pending[1], block->pending[2],
        block->pending[3], block->zombies, (unsigned long long)block->gone_turn);
}

static uint64_t content_seed(const struct sim *sim, const struct sim_block *block, uint32_t version)
{
    return mix(sim->seed * 0x9e3779b97f4a7c15ull + number_of(sim, block) * 8ull + version + 1);
}

/* Noise, or bytes that say little, so that a drive can pack them; the first word is noise always:
 * it tells versions apart. */
static uint64_t content_mask(const struct sim *sim, uint64_t seed)
{
    return sim->shape.has_soft && seed % 8 != 0 ? 0x0303030303030303u : UINT64_MAX;
}

static uint64_t content_word(uint64_t seed, uint64_t mask, uint64_t i)
{
    uint64_t word = seed + i * 0x9e3779b97f4a7c15ull;

    return (word ^ (word >> 31)) & (i == 0 ? UINT64_MAX : mask);
}

uint32_t sim_payload_bytes(const struct sim *sim, const struct sim_block *block, uint32_t version)
{
    uint32_t number = number_of(sim, block);
    uint32_t chain = number / SIM_SHARDS_MAX / SIM_CHUNKS % SIM_CHAINS;
    uint32_t group = chain / 8 % sim->shape.size_groups;
    uint64_t word = mix(number * 2ull + (version == 3)); /* the last version has another size */
    uint32_t span = sim->shape.size_max[group] - sim->shape.size_min[group] + 1;

    return sim->shape.size_min[group] + (uint32_t)(word % span);
}

void sim_payload_fill(const struct sim *sim, const struct sim_block *block, uint32_t version,
                      uint8_t *payload_out)
{
    uint64_t seed = content_seed(sim, block, version);
    uint64_t mask = content_mask(sim, seed);
    uint32_t bytes = sim_payload_bytes(sim, block, version);
    uint64_t word;
    uint32_t i = 0;

    for (; i + 8 <= bytes; i += 8) {
        word = content_word(seed, mask, i / 8);
        memcpy(payload_out + i, &word, 8);
    }
    word = content_word(seed, mask, i / 8);
    memcpy(payload_out + i, &word, bytes - i);
}

bool sim_payload_is(const struct sim *sim, const struct sim_block *block, uint32_t version,
                    const uint8_t *payload)
{
    uint64_t seed = content_seed(sim, block, version);
    uint64_t mask = content_mask(sim, seed);
    uint32_t bytes = sim_payload_bytes(sim, block, version);
    uint64_t wrong = 0;
    uint64_t word;
    uint32_t i = 0;

    for (; i + 8 <= bytes; i += 8) {
        memcpy(&word, payload + i, 8);
        wrong |= word ^ content_word(seed, mask, i / 8);
    }
    word = content_word(seed, mask, i / 8);
    return wrong == 0 && memcmp(payload + i, &word, bytes - i) == 0;
}

uint32_t sim_payload_version(const struct sim *sim, const struct sim_block *block,
                             const uint8_t *payload, uint64_t payload_bytes)
{
    uint64_t word;
    uint32_t version = 0;

    memcpy(&word, payload, sizeof(word)); /* no payload is shorter */
    while (version < SIM_VERSIONS &&
           (word != content_word(content_seed(sim, block, version), 0, 0) ||
            payload_bytes != sim_payload_bytes(sim, block, version))) {
        version++;
    }
    return version;
}

/* ---- what may be there ----------------------------------------------------------------------- */

static void set_mask(const struct sim *sim, struct sim_block *block, uint8_t mask)
{
    if (block->mask_turn != sim->turn) {
        block->mask_before = block->mask;
        block->mask_turn = sim->turn;
    }
    block->mask = mask;
}

/* On their way: puts of clients that live, and those of dead ones that may still land. */
static uint8_t coming(const struct sim *sim, const struct sim_block *block)
{
    uint8_t mask = sim->now_ns <= block->zombies_ns ? block->zombies : 0;

    for (uint32_t version = 0; version < SIM_VERSIONS; version++) {
        mask |= (uint8_t)((block->pending[version] > 0) << version);
    }
    return mask;
}

static uint8_t possible(const struct sim *sim, const struct sim_block *block)
{
    uint8_t mask = block->mask | coming(sim, block) | sim_nodes_ever(sim, block);

    return block->mask_turn == sim->turn ? mask | block->mask_before : mask;
}

bool sim_model_may_exist(const struct sim *sim, const struct sim_block *block, uint64_t since_turn)
{
    return possible(sim, block) != 0 || block->gone_turn >= since_turn;
}

static void void_promises(struct sim_block *block)
{
    block->promises = 0;
    block->promise_serial++;
}

static void wrong(struct sim *sim, const struct sim_block *block, const char *what,
                  uint32_t version)
{
    char text[200];

    sim_describe(sim, block, text, sizeof(text));
    sim_fail(sim, "%s: version %u of %s", what, version, text);
}

void sim_model_hit(struct sim *sim, struct sim_block *block, uint32_t version)
{
    if (version >= SIM_VERSIONS || (possible(sim, block) & 1u << version) == 0) {
        wrong(sim, block, "hit with a payload that cannot be there", version);
    }
    if (block->expires_ns != 0 && coming(sim, block) == 0 && sim->world == NULL &&
        sim->now_ns > block->expires_ns + TTL_SLACK_NS) {
        wrong(sim, block, "hit long after the end of its time to live", version);
    }
    set_mask(sim, block, (uint8_t)(1u << version));
    if (block->is_unread) {
        block->is_unread = false;
        block->read_turn = sim->turn; /* puts of this very turn may have come before */
    }
}

/* ---- puts ------------------------------------------------------------------------------------ */

void sim_model_put_begin(struct sim_block *block, uint32_t version)
{
    block->pending[version]++;
    block->ever |= (uint8_t)(1u << version);
}

static void put_stored(struct sim *sim, struct sim_client *client,
                       const struct sim_request *request, uint32_t index)
{
    const struct sim_key *key = &request->keys[index];
    struct sim_block *block = sim_block(sim, client->ns, request->chain, key->chunk, client->shard);
    bool is_memory_only = (request->flags & KVF_SQE_NO_WRITE) != 0 || request->ttl_s != 0 ||
                          sim->shape.n_drives == 0;
    bool is_durable = (request->flags & KVF_SQE_DURABLE) != 0;
    bool is_unsummed = (request->flags & KVF_SQE_UNSUMMED) != 0;
    bool is_joined = block->put_turn == sim->turn;
    uint8_t mask = (uint8_t)(1u << key->version);
    uint64_t expires_ns = request->ttl_s == 0
                              ? 0
                              : sim->now_ns + (request->ttl_s + 1ull) * KVF_NS_PER_S;

    if (is_unsummed) {
        mask |= possible(sim, block); /* it may have joined the put of another payload */
    }
    set_mask(sim, block, mask);
    block->put_turn = sim->turn;
    block->is_unread = false;
    if (is_joined && (expires_ns == 0 || block->expires_ns == 0)) {
        block->expires_ns = 0; /* one of them said how long it lives, nobody knows which */
    } else if (!is_joined || expires_ns > block->expires_ns) {
        block->expires_ns = expires_ns;
    }
    if (!is_memory_only) {
        block->disk_mask |= mask;
    }
    block->is_durable = is_durable && !is_unsummed; /* it is, but which payload? */
    block->location = 0;
    block->durable_version = key->version;
    if (key->supersedes >= 0) {
        sim_cover(sim, SIM_COVER_put_superseding);
        /* a set supersedes when it is whole, a durable put already when it is in memory */
        if (!is_durable && sim->namespaces[client->ns].shard_count == 1) {
            sim_model_gone(sim, sim_block(sim, client->ns, request->chain,
                                          (uint32_t)key->supersedes, client->shard));
        }
    }
}

/* The daemon compared checksums, with what it has or with what is being put, if it knew both. */
static void put_compared(struct sim *sim, struct sim_block *block,
                         const struct sim_request *request, uint32_t version, bool is_same)
{
    uint8_t bit = (uint8_t)(1u << version);
    uint8_t mask = possible(sim, block);
    bool is_durable = (request->flags & KVF_SQE_DURABLE) != 0;
    bool is_unread = block->is_unread || block->read_turn == sim->turn || sim->world != NULL ||
                     (request->flags & KVF_SQE_UNSUMMED) != 0;

    if (is_same && !is_unread && (mask & bit) == 0) {
        wrong(sim, block, "put of another payload answered exists", version);
    }
    if (!is_same && (request->flags & KVF_SQE_UNSUMMED) != 0) {
        wrong(sim, block, "put without a sum answered conflict", version);
    }
    if (!is_same && (mask & ~bit) == 0 && block->pending[version] == 0) {
        wrong(sim, block, "put of the same payload answered conflict", version);
    }
    if (is_same && !is_unread) {
        set_mask(sim, block, bit);
    }
    if (is_same && is_durable && !is_unread) {
        block->is_durable = true;
        block->durable_version = (uint8_t)version;
        block->disk_mask |= bit;
    }
}

void sim_model_put_end(struct sim *sim, struct sim_client *client,
                       const struct sim_request *request, uint32_t index, int status)
{
    const struct sim_key *key = &request->keys[index];
    struct sim_block *block = sim_block(sim, client->ns, request->chain, key->chunk, client->shard);
    bool is_durable = (request->flags & KVF_SQE_DURABLE) != 0;

    /* a wrong one may still succeed: it joins a right put of the same payload that is on its way */
    if (status == KVF_ERR_CORRUPT && !key->is_corrupt && !key->is_scribbled) {
        wrong(sim, block, "right put answered corrupt", key->version);
    }
    block->pending[key->version]--;
    switch (status) {
    case KVF_OK:
        put_stored(sim, client, request, index);
        break;
    case KVF_EXISTS:
    case KVF_ERR_CONFLICT:
        put_compared(sim, block, request, key->version, status == KVF_EXISTS);
        break;
    default:
        if (is_durable && !key->is_corrupt) { /* it may be in memory, or even on the drive */
            set_mask(sim, block, block->mask | (uint8_t)(1u << key->version));
            block->disk_mask |= (uint8_t)(1u << key->version);
            block->expires_ns = 0;
        }
        break;
    }
}

void sim_model_zombie(struct sim *sim, struct sim_block *block, uint32_t version)
{
    uint8_t bit = (uint8_t)(1u << version);

    block->pending[version]--;
    block->zombies = sim->now_ns <= block->zombies_ns ? block->zombies | bit : bit;
    block->zombies_ns = sim->now_ns + 2 * sim->shape.work_max_ns + KVF_NS_PER_S;
    set_mask(sim, block, block->mask | bit);
    block->disk_mask |= bit;
    block->expires_ns = 0; /* whatever it was, the put may have replaced it */
}

/* ---- forgetting ------------------------------------------------------------------------------ */

void sim_model_gone(struct sim *sim, struct sim_block *block)
{
    block->gone_turn = sim->turn;
    block->is_durable = false;
    block->location = 0;
    void_promises(block);
    if (block->put_turn != sim->turn) {
        /* puts on their way may have been abandoned, or may come after */
        set_mask(sim, block, 0);
        if (coming(sim, block) == 0) {
            block->expires_ns = 0;
        }
    }
}

void sim_model_gone_all(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_NAMESPACES * SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX; i++) {
        void_promises(&sim->blocks[i]);
        sim->blocks[i].gone_turn = sim->turn;
    }
}

void sim_model_gone_set(struct sim *sim, uint32_t ns, uint32_t chain, uint32_t chunk)
{
    for (uint32_t shard = 0; shard < sim->namespaces[ns].shard_count; shard++) {
        sim_model_gone(sim, sim_block(sim, ns, chain, chunk, shard));
    }
}

static struct sim_block *first_of(struct sim *sim, uint32_t ns)
{
    return sim_block(sim, ns, 0, 0, 0);
}

#define BLOCKS_A_NAMESPACE (SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX)

void sim_model_purge(struct sim *sim, uint32_t ns)
{
    struct sim_block *block = first_of(sim, ns);

    sim->namespaces[ns].purge_turn = sim->turn;
    for (uint32_t i = 0; i < BLOCKS_A_NAMESPACE; i++, block++) {
        block->put_turn = 0; /* the daemon purges at the end of a turn */
        sim_model_gone(sim, block);
        block->purging = block->disk_mask;
        block->disk_mask = coming(sim, block);
        block->is_unread = false;
    }
}

void sim_model_purged(struct sim *sim, uint32_t ns, bool is_recorded)
{
    struct sim_block *block = first_of(sim, ns);

    for (uint32_t i = 0; i < BLOCKS_A_NAMESPACE; i++, block++) {
        if (!is_recorded) {
            block->disk_mask |= block->purging;
        }
        block->purging = 0;
    }
}

/* One drive that never failed brings back the newest record of a name: a durable one, unless it was
 * told to be forgotten, when an older one may come. */
static uint8_t mask_after_restart(const struct sim *sim, const struct sim_block *block)
{
    bool is_exact = block->is_durable && sim->shape.n_drives == 1 &&
                    !sim->drives[0].has_silent_faults &&
                    kvf_io_sim_fault_count(sim->drives[0].disk) == 0;

    return is_exact ? (uint8_t)(1u << block->durable_version) : block->disk_mask;
}

void sim_model_restart(struct sim *sim, bool is_reformatted)
{
    for (uint32_t i = 0; i < SIM_NAMESPACES * BLOCKS_A_NAMESPACE; i++) {
        struct sim_block *block = &sim->blocks[i];

        assert(coming(sim, block) == 0 || block->zombies != 0);
        if (is_reformatted) {
            block->disk_mask = 0;
            block->has_key_id = false;
        }
        block->is_durable &= !is_reformatted;
        block->mask = mask_after_restart(sim, block);
        block->mask_before = block->mask;
        block->zombies = 0;
        block->is_unread = block->mask != 0;
        block->expires_ns = 0;
        block->gone_turn = 0;
        block->read_turn = 0;
        block->put_turn = 0;
        void_promises(block);
    }
}
