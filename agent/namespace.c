/* SPDX-License-Identifier: Apache-2.0
 *
 * namespace.c: namespaces. A namespace is everything that must be equal for two clients
 * to read each other's blocks: tenant, weights, adapter, geometry, shard count, codec, label. Its
 * id is a keyed hash over all of them, so that a block can never be found under another one.
 */
#include "agent/core.h"

#include <string.h>

#include "base/hash.h"
#include "base/mutant.h"

uint64_t kvf_namespace_id(const struct kvf_agent *agent, uint16_t tenant,
                          const struct kvf_wire_hello *hello, const struct kvf_codec_plan *plan)
{
    struct kvf_hasher hasher;
    uint8_t hash[KVF_HASH_BYTES];
    uint64_t id;

    kvf_hasher_init(&hasher, agent->id_key);
    kvf_hash_field(&hasher, "kvferry namespace 1", 19);
    kvf_hash_field(&hasher, agent->tenants[tenant].name, strlen(agent->tenants[tenant].name));
    kvf_hash_field(&hasher, hello->weights_digest, sizeof(hello->weights_digest));
    kvf_hash_field(&hasher, hello->adapter_digest, sizeof(hello->adapter_digest));
    kvf_hash_field(&hasher, &hello->geometry, sizeof(hello->geometry));
    kvf_hash_field_u64(&hasher, hello->shard_count);
    kvf_hash_field_u64(&hasher, plan->profile_fp);
    kvf_hash_field_u64(&hasher, plan->lossless);
    kvf_hash_field(&hasher, hello->label, KVF_MUTANT(namespaces_mixed) ? 0 : strlen(hello->label));
    kvf_hasher_final(&hasher, hash);
    memcpy(&id, hash, sizeof(id));
    return id == 0 ? 1 : id;
}

/* Its place may be reused. */
static bool is_idle(const struct kvf_namespace *ns)
{
    return ns->clients == 0 && ns->blocks == 0 && ns->dram_bytes == 0 && ns->writeback_bytes == 0;
}

/* Of the table, so that no tenant takes another one's places: names cost nothing to invent, and
 * each with a block in it takes a place until the block goes. */
static uint32_t quota(const struct kvf_agent *agent)
{
    uint32_t share = KVF_INDEX_NAMESPACES_MAX / agent->n_tenants;

    if (agent->config->quota_namespaces != 0) {
        return (uint32_t)agent->config->quota_namespaces;
    }
    return share < KVF_INDEX_NAMESPACES_MAX / 4 ? share : KVF_INDEX_NAMESPACES_MAX / 4;
}

int kvf_namespace_join(struct kvf_agent *agent, uint16_t tenant, uint64_t id, uint16_t shard_count,
                       uint16_t *index_out)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < KVF_INDEX_NAMESPACES_MAX; i++) {
        const struct kvf_namespace *ns = &agent->namespaces[i];

        if (ns->id == id && !is_idle(ns)) {
            *index_out = (uint16_t)i;
            return KVF_OK;
        }
        n += ns->id != 0 && ns->is_known && ns->tenant == tenant && !is_idle(ns);
    }
    if (n >= quota(agent)) {
        agent->metrics.namespaces_refused++;
        return KVF_ERR_REFUSED;
    }
    return kvf_namespace_get(agent, id, shard_count, index_out);
}

int kvf_namespace_get(struct kvf_agent *agent, uint64_t id, uint16_t shard_count,
                      uint16_t *index_out)
{
    struct kvf_namespace *place = NULL;

    for (uint32_t i = 0; i < KVF_INDEX_NAMESPACES_MAX; i++) {
        struct kvf_namespace *ns = &agent->namespaces[i];

        if (ns->id == id) {
            *index_out = (uint16_t)i;
            return KVF_OK;
        }
        if (place == NULL && (ns->id == 0 || is_idle(ns))) {
            place = ns;
        }
    }
    if (place == NULL) {
        return KVF_ERR_BUSY;
    }
    memset(place, 0, sizeof(*place));
    place->id = id;
    place->shard_count = shard_count;
    place->is_off = !kvf_service_has(agent, id);
    *index_out = (uint16_t)(place - agent->namespaces);
    return KVF_OK;
}
