/* SPDX-License-Identifier: Apache-2.0
 *
 * sodium_late.c: what base/hash.c calls of libsodium, opened at run time. Of the shared library
 * only: an engine that never speaks with a daemon of another node needs no libsodium.
 */
#include <dlfcn.h>
#include <sodium.h>
#include <stdbool.h>
#include <string.h>

static struct {
    __typeof__(&sodium_init) init;
    __typeof__(&sodium_memcmp) memcmp;
    __typeof__(&crypto_generichash_init) hash_init;
    __typeof__(&crypto_generichash_update) hash_update;
    __typeof__(&crypto_generichash_final) hash_final;
} late;

static bool find(void *library, const char *name, void *function_out)
{
    void *address = dlsym(library, name);

    memcpy(function_out, &address, sizeof(address));
    return address != NULL;
}

/* Less than 0: there is none. Doing it twice, or at the same time, gives the same. */
int sodium_init(void)
{
    void *library = dlopen("libsodium.so.23", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    bool is_whole = library != NULL && find(library, "sodium_init", &late.init) &&
                    find(library, "sodium_memcmp", &late.memcmp) &&
                    find(library, "crypto_generichash_init", &late.hash_init) &&
                    find(library, "crypto_generichash_update", &late.hash_update) &&
                    find(library, "crypto_generichash_final", &late.hash_final);

    if (library != NULL) {
        (void)dlclose(library); /* it stays, by RTLD_NODELETE */
    }
    return is_whole ? late.init() : -1;
}

int sodium_memcmp(const void *const a, const void *const b, size_t bytes)
{
    return late.memcmp(a, b, bytes);
}

int crypto_generichash_init(crypto_generichash_state *state, const unsigned char *key,
                            const size_t key_bytes, const size_t hash_bytes)
{
    return late.hash_init(state, key, key_bytes, hash_bytes);
}

int crypto_generichash_update(crypto_generichash_state *state, const unsigned char *in,
                              unsigned long long bytes)
{
    return late.hash_update(state, in, bytes);
}

int crypto_generichash_final(crypto_generichash_state *state, unsigned char *hash,
                             const size_t hash_bytes)
{
    return late.hash_final(state, hash, hash_bytes);
}
