/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_cache.h: the engine's side of kvferry: the longest stored prefix of a prompt as a state for
 * llama_state_seq_set_data, and a state's chunks to the daemon.
 *
 * Whatever becomes of the daemon is a shorter prefix or a store that is left out: nothing here
 * fails a request. One thread.
 */
#ifndef KVF_CONNECTORS_LLAMA_CACHE_H
#define KVF_CONNECTORS_LLAMA_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "connectors/llama.cpp/llama_state.h"

struct kvf_llama_cache;

struct kvf_llama_cache_options {
    const char *socket_path; /* NULL: the library's default */
    const char *profile;
    const char *label;
    bool allow_uncalibrated;
    uint32_t chunk_tokens;
    uint32_t n_heads; /* of K and V */
    int rope_state;   /* enum kvf_rope_state */
    struct kvf_llama_shape shape;
    uint8_t weights_digest[KVF_DIGEST_BYTES];
    uint8_t seed[KVF_DIGEST_BYTES]; /* kvf_llama_chain_seed */
};

/* What a load has found. */
struct kvf_llama_loaded {
    uint32_t n_tokens;       /* of the state; 0: none */
    uint32_t run_tokens;     /* leading tokens that the daemon has said to have */
    enum kvf_tier_kind tier; /* the farthest that a chunk came from */
    bool lossless;
    uint8_t *state; /* the cache's, until the next call */
    size_t state_bytes;
};

/* What has been done since the start. */
struct kvf_llama_cache_counts {
    uint64_t loaded_tokens;
    uint64_t stored_chunks;
    uint64_t present_chunks; /* handed over, and found there already */
    uint64_t refused_chunks; /* handed over, and not stored */
};

/* Strings are copied. Does not connect. KVF_OK; KVF_ERR_UNSUPPORTED: the shape is no geometry, why
 * says it; KVF_ERR_NO_MEMORY. */
int kvf_llama_cache_create(const struct kvf_llama_cache_options *options,
                           struct kvf_llama_cache **cache_out, char why[KVF_LLAMA_WHY_BYTES]);

/* Accepts NULL. */
void kvf_llama_cache_destroy(struct kvf_llama_cache *cache);

/* Is there a daemon? Connects where it is time to. Blocks up to budget_ms. */
bool kvf_llama_cache_is_open(struct kvf_llama_cache *cache, uint32_t budget_ms);

/* The profile in force, "" before the first connection. Borrowed. */
const char *kvf_llama_cache_profile(const struct kvf_llama_cache *cache);

/* The longest prefix of tokens that is stored, in whole chunks, where it is longer than n_have
 * tokens; what does not come within budget_ms is left out. Blocks. */
void kvf_llama_cache_load(struct kvf_llama_cache *cache, const int32_t *tokens, uint32_t n_tokens,
                          uint32_t n_have, uint32_t budget_ms, struct kvf_llama_loaded *loaded_out);

/* Store whole chunks of a state of n_tokens, whose rows lie as kvf_llama_state_k says: those in
 * tokens [n_first, n_end), from a multiple of the chunk on. is_tainted: computed behind a prefix
 * that was loaded with loss, which a profile without loss does not take. Blocks while it encodes
 * and until the daemon has them, up to some seconds. */
void kvf_llama_cache_store(struct kvf_llama_cache *cache, const int32_t *tokens, uint32_t n_tokens,
                           uint32_t n_end, uint32_t n_first, bool is_tainted, uint8_t *state);

/* Tell the daemon where the tokens of a prompt came from. Does not block. */
void kvf_llama_cache_report(struct kvf_llama_cache *cache, uint32_t n_computed, uint32_t n_local,
                            uint32_t n_hit);

/* Once a second where nothing else is asked: memory of a daemon that is gone is let go. Does not
 * block. */
void kvf_llama_cache_tick(struct kvf_llama_cache *cache);

void kvf_llama_cache_counts(const struct kvf_llama_cache *cache,
                            struct kvf_llama_cache_counts *counts_out);

#endif /* KVF_CONNECTORS_LLAMA_CACHE_H */
