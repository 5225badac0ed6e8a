/* SPDX-License-Identifier: Apache-2.0
 *
 * test_llama_chain.c: keys of chunks name the whole prefix and what wrote it, and stay what they
 * are: stored blocks are found by them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "connectors/llama.cpp/llama_chain.h"
#include "tests/support/support.h"

enum {
    CHUNK = 4,
    CHUNKS = 3
};

static void hex(const uint8_t digest[KVF_DIGEST_BYTES], char out[2 * KVF_DIGEST_BYTES + 1])
{
    for (size_t i = 0; i < KVF_DIGEST_BYTES; i++) {
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
    }
}

/* By another program: SHA-256 of the text, a zero byte and the version; then of the key before and
 * four tokens as 32-bit numbers, little-endian. */
static void test_known(void **state)
{
    const int32_t tokens[] = {7, 8, 9, 10, 11, 12, 13, 14};
    uint8_t seed[KVF_DIGEST_BYTES];
    uint8_t keys[2 * KVF_DIGEST_BYTES];
    char text[2 * KVF_DIGEST_BYTES + 1];

    (void)state;
    kvf_llama_chain_seed("0.5.0-dev", seed);
    hex(seed, text);
    assert_string_equal(text, "92b16acb74a3e8dc5cc7eb57fe4fc69abc27766a53d283177b9a9407b1a4c4f9");
    kvf_llama_chain_keys(seed, tokens, CHUNK, 2, keys);
    hex(keys, text);
    assert_string_equal(text, "e2eb8e52b1d5578a56014234310dfe696b10ef47564f17568d75fc430e71c640");
    hex(keys + KVF_DIGEST_BYTES, text);
    assert_string_equal(text, "6f81d95e82f504548767e211db45fac6682ab6c94cacf71f048e1b7c435e45db");
}

static void test_prefix(void **state)
{
    int32_t tokens[CHUNKS * CHUNK];
    uint8_t seed[KVF_DIGEST_BYTES];
    uint8_t other_seed[KVF_DIGEST_BYTES];
    uint8_t keys[CHUNKS * KVF_DIGEST_BYTES];
    uint8_t others[CHUNKS * KVF_DIGEST_BYTES];

    (void)state;
    for (int32_t i = 0; i < CHUNKS * CHUNK; i++) {
        tokens[i] = 100 + i;
    }
    kvf_llama_chain_seed("1", seed);
    kvf_llama_chain_seed("2", other_seed);
    kvf_llama_chain_keys(seed, tokens, CHUNK, CHUNKS, keys);
    for (uint32_t changed = 0; changed < CHUNKS * CHUNK; changed++) {
        tokens[changed]++;
        kvf_llama_chain_keys(seed, tokens, CHUNK, CHUNKS, others);
        tokens[changed]--;
        for (uint32_t i = 0; i < CHUNKS; i++) {
            int differs = memcmp(keys + i * KVF_DIGEST_BYTES, others + i * KVF_DIGEST_BYTES,
                                 KVF_DIGEST_BYTES) != 0;

            assert_int_equal(differs, i >= changed / CHUNK);
        }
    }
    kvf_llama_chain_keys(other_seed, tokens, CHUNK, CHUNKS, others);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        assert_memory_not_equal(keys + i * KVF_DIGEST_BYTES, others + i * KVF_DIGEST_BYTES,
                                KVF_DIGEST_BYTES);
    }
}

static void test_file(void **state)
{
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES];
    uint8_t digest[KVF_DIGEST_BYTES];
    char text[2 * KVF_DIGEST_BYTES + 1];

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "m.gguf", path);
    kvf_test_file_write(path, "abc", 3);
    assert_int_equal(kvf_llama_file_digest(path, digest), KVF_OK);
    hex(digest, text);
    assert_string_equal(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    kvf_test_dir_path(&dir, "none", path);
    assert_int_equal(kvf_llama_file_digest(path, digest), KVF_ERR_IO);
    assert_int_equal(errno, ENOENT);
    assert_int_equal(kvf_llama_file_digest(dir.path, digest), KVF_ERR_IO);
    assert_int_equal(errno, EISDIR);
    kvf_test_dir_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known),
        cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_file),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
