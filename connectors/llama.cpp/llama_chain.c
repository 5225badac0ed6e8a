/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_chain.c: see llama_chain.h.
 */
#include "connectors/llama.cpp/llama_chain.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIECE_BYTES (1 << 20)

/* Changes with what is hashed, and with what a chunk's bytes mean. */
static const char form[] = "kvferry llama.cpp state 1";

void kvf_llama_chain_seed(const char *version, uint8_t seed_out[KVF_DIGEST_BYTES])
{
    crypto_hash_sha256_state state;

    crypto_hash_sha256_init(&state);
    crypto_hash_sha256_update(&state, (const uint8_t *)form, sizeof(form));
    crypto_hash_sha256_update(&state, (const uint8_t *)version, strlen(version));
    crypto_hash_sha256_final(&state, seed_out);
}

void kvf_llama_chain_keys(const uint8_t seed[KVF_DIGEST_BYTES], const int32_t *tokens,
                          uint32_t chunk_tokens, uint32_t n_chunks, uint8_t *keys_out)
{
    const uint8_t *parent = seed;

    for (uint32_t i = 0; i < n_chunks; i++) {
        const int32_t *chunk = tokens + (size_t)i * chunk_tokens;
        uint8_t *key = keys_out + (size_t)i * KVF_DIGEST_BYTES;
        crypto_hash_sha256_state state;

        crypto_hash_sha256_init(&state);
        crypto_hash_sha256_update(&state, parent, KVF_DIGEST_BYTES);
        crypto_hash_sha256_update(&state, (const uint8_t *)chunk, chunk_tokens * sizeof(*chunk));
        crypto_hash_sha256_final(&state, key);
        parent = key;
    }
}

int kvf_llama_file_digest(const char *path, uint8_t digest_out[KVF_DIGEST_BYTES])
{
    crypto_hash_sha256_state state;
    uint8_t *piece = malloc(PIECE_BYTES);
    int fd = piece != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n = -1;
    int saved;

    crypto_hash_sha256_init(&state);
    while (fd >= 0) {
        n = read(fd, piece, PIECE_BYTES);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        crypto_hash_sha256_update(&state, piece, (unsigned long long)n);
    }
    saved = errno;
    if (fd >= 0) {
        close(fd);
    }
    free(piece);
    crypto_hash_sha256_final(&state, digest_out);
    errno = saved;
    return n == 0 ? KVF_OK : KVF_ERR_IO;
}
