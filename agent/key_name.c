/* SPDX-License-Identifier: Apache-2.0
 *
 * key_name.c: from an engine's key to the key_id under which a block is known here.
 *
 * A key comes more than once within moments: the scheduler looks it up, then each rank gets it or
 * puts it. Its hash costs more than all the rest of a hit, so the last ones are remembered, in a
 * table whose places overwrite each other. What is remembered is the whole question, and all of it
 * is compared: a place that two keys want costs time and nothing else.
 */
#include "agent/core.h"

#include <string.h>

#include "base/hash.h"

static_assert((KVF_KEY_NAMES & (KVF_KEY_NAMES - 1)) == 0, "a mask finds the place");
static_assert(sizeof(struct kvf_key_name) == 128, "two cache lines");

/* Behind key_bytes a key is zero: that was checked when it came. */
static struct kvf_key_name *place_of(const struct kvf_agent *agent, uint64_t namespace_id,
                                     const struct kvf_shm_key *key)
{
    uint64_t hash = namespace_id ^ key->key_bytes;

    for (uint32_t i = 0; i < key->key_bytes; i += 8) {
        uint64_t word;

        memcpy(&word, &key->key[i], sizeof(word));
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 32;
    }
    return &agent->key_names[hash & (KVF_KEY_NAMES - 1)];
}

void kvf_request_key_id(const struct kvf_session *session, const struct kvf_shm_key *key,
                        uint8_t key_id_out[32])
{
    const struct kvf_agent *agent = session->agent;
    uint64_t namespace_id = agent->namespaces[session->namespace_index].id;
    struct kvf_key_name *name = place_of(agent, namespace_id, key);

    if (name->key_bytes != key->key_bytes || name->namespace_id != namespace_id ||
        name->tenant != session->tenant || memcmp(name->key, key->key, key->key_bytes) != 0) {
        name->namespace_id = namespace_id;
        name->tenant = session->tenant;
        name->key_bytes = key->key_bytes;
        memcpy(name->key, key->key, key->key_bytes);
        kvf_key_id_compute(agent->id_key, agent->tenants[session->tenant].id, namespace_id,
                           (struct kvf_key){.data = key->key, .bytes = key->key_bytes},
                           name->key_id);
    }
    memcpy(key_id_out, name->key_id, sizeof(name->key_id));
}
