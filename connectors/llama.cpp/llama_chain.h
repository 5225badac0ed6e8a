/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_chain.h: keys of chunks: each is a SHA-256 of the key before it and the chunk's tokens, so
 * that it names the whole prefix. The first is preceded by a seed that names what wrote the state.
 *
 * Weights, geometry, profile and label are no part of a key: the daemon's namespace has them. Any
 * thread; nothing blocks.
 */
#ifndef KVF_CONNECTORS_LLAMA_CHAIN_H
#define KVF_CONNECTORS_LLAMA_CHAIN_H

#include <stdint.h>

#include "kvferry.h"

/* version: llama_version(). */
void kvf_llama_chain_seed(const char *version, uint8_t seed_out[KVF_DIGEST_BYTES]);

/* The keys of the first n_chunks chunks of tokens, one behind the other. */
void kvf_llama_chain_keys(const uint8_t seed[KVF_DIGEST_BYTES], const int32_t *tokens,
                          uint32_t chunk_tokens, uint32_t n_chunks, uint8_t *keys_out);

/* SHA-256 of a file, which names the weights in it, as `kvferry calibrate --weights` has it.
 * KVF_OK; KVF_ERR_IO, with errno. Blocks. */
int kvf_llama_file_digest(const char *path, uint8_t digest_out[KVF_DIGEST_BYTES]);

#endif /* KVF_CONNECTORS_LLAMA_CHAIN_H */
