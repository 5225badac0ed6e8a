/* SPDX-License-Identifier: Apache-2.0
 *
 * test_weights_file.c: tensors out of safetensors and GGUF, and files that are not what they say.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/weights_file.h"
#include "codec/codec_fp.h"
#include "tests/support/support.h"

enum {
    LAYERS = 2,
    D_MODEL = 32,
    HEADS = 2,
    DIM = 8,
    K_ROWS = HEADS * DIM,
    FILE_BYTES = 64 << 10,
};

static const char config[] =
    "{\"model_type\": \"llama\", \"hidden_size\": 32, \"num_hidden_layers\": 2,"
    " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 96}";

/* A file in the making. */
struct bytes {
    uint8_t data[FILE_BYTES];
    size_t n;
};

static void add(struct bytes *b, const void *data, size_t n)
{
    assert_true(b->n + n <= sizeof(b->data));
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

static void add_number(struct bytes *b, uint64_t value, size_t n)
{
    uint8_t little[8];

    for (size_t i = 0; i < 8; i++) {
        little[i] = (uint8_t)(value >> (8 * i));
    }
    add(b, little, n);
}

static void add_text(struct bytes *b, const char *text)
{
    add_number(b, strlen(text), 8);
    add(b, text, strlen(text));
}

/* The value that element i of a tensor has, exact in each type: those of Q8_0 have scale 1/4. */
static float value_of(uint32_t seed, size_t i)
{
    return (float)((int)((i * 37 + seed * 11) % 255) - 127) * 0.25f;
}

static void add_values(struct bytes *b, uint32_t type, uint32_t seed, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float value = value_of(seed, i);

        if (type == KVF_WEIGHTS_F32) {
            add_number(b, kvf_f32_bits(value), 4);
        } else if (type == KVF_WEIGHTS_Q8_0) {
            if (i % 32 == 0) {
                add_number(b, kvf_f16_from_f32(0.25f), 2);
            }
            add_number(b, (uint8_t)(int8_t)(value * 4), 1);
        } else {
            add_number(
                b, type == KVF_WEIGHTS_BF16 ? kvf_bf16_from_f32(value) : kvf_f16_from_f32(value),
                2);
        }
    }
}

/* --- safetensors --- */

struct tensor {
    const char *name; /* of the layer */
    uint32_t type;
    uint32_t rows;
    uint32_t columns; /* 0: a vector */
};

static const struct tensor tensors[] = {
    {"self_attn.k_proj.weight", KVF_WEIGHTS_BF16, K_ROWS, D_MODEL},
    {"self_attn.v_proj.weight", KVF_WEIGHTS_F16, K_ROWS, D_MODEL},
    {"self_attn.k_proj.bias", KVF_WEIGHTS_F32, K_ROWS, 0},
    {"self_attn.k_norm.weight", KVF_WEIGHTS_BF16, DIM, 0},
    {"mlp.up_proj.weight", KVF_WEIGHTS_BF16, 3, D_MODEL},
};
#define TENSORS (sizeof(tensors) / sizeof(tensors[0]))

static const char *type_name(uint32_t type)
{
    return type == KVF_WEIGHTS_F32 ? "F32" : type == KVF_WEIGHTS_F16 ? "F16" : "BF16";
}

/* Layers [first, last) as one file. The values of tensor t of layer l have seed 10 l + t. */
static void build_safetensors(struct bytes *b, uint32_t first, uint32_t last)
{
    static char header[FILE_BYTES];
    size_t at = (size_t)snprintf(header, sizeof(header), "{\"__metadata__\": {\"format\": \"pt\"}");
    size_t offset = 0;

    b->n = 0;
    for (uint32_t layer = first; layer < last; layer++) {
        for (size_t i = 0; i < TENSORS; i++) {
            const struct tensor *t = &tensors[i];
            size_t n = (size_t)t->rows * (t->columns != 0 ? t->columns : 1);
            size_t bytes = n * (t->type == KVF_WEIGHTS_F32 ? 4 : 2);
            char shape[32];

            snprintf(shape, sizeof(shape), t->columns != 0 ? "%u, %u" : "%u", t->rows, t->columns);
            at += (size_t)snprintf(header + at, sizeof(header) - at,
                                   ", \"model.layers.%u.%s\": {\"dtype\": \"%s\", \"shape\": [%s], "
                                   "\"data_offsets\": [%zu, %zu]}",
                                   layer, t->name, type_name(t->type), shape, offset,
                                   offset + bytes);
            offset += bytes;
        }
    }
    at += (size_t)snprintf(header + at, sizeof(header) - at, "}");
    add_number(b, at, 8);
    add(b, header, at);
    for (uint32_t layer = first; layer < last; layer++) {
        for (size_t i = 0; i < TENSORS; i++) {
            const struct tensor *t = &tensors[i];

            add_values(b, t->type, 10 * layer + (uint32_t)i,
                       (size_t)t->rows * (t->columns != 0 ? t->columns : 1));
        }
    }
}

static void write_at(const struct kvf_test_dir *dir, const char *name, const void *data, size_t n)
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(dir, name, path);
    kvf_test_file_write(path, data, n);
}

static void check_tensor(const struct kvf_weights *w, const struct kvf_weights_tensor *t,
                         uint32_t seed)
{
    char why[KVF_WEIGHTS_WHY_BYTES];
    size_t n = t->rows * t->columns;
    float *values = malloc(n * sizeof(*values));

    assert_non_null(values);
    assert_int_equal(kvf_weights_load(w, t, values, why), KVF_OK);
    for (size_t i = 0; i < n; i++) {
        assert_true(values[i] == value_of(seed, i));
    }
    free(values);
}

static void check_model(const struct kvf_weights_model *m)
{
    assert_string_equal(m->family, "llama");
    assert_int_equal(m->n_layers, LAYERS);
    assert_int_equal(m->d_model, D_MODEL);
    assert_int_equal(m->n_query_heads, 4);
    assert_int_equal(m->n_heads, HEADS);
    assert_int_equal(m->dim_k, DIM);
    assert_int_equal(m->dim_v, DIM);
    assert_int_equal(m->ffn_width, 96);
}

static void check_open(const char *path)
{
    char why[KVF_WEIGHTS_WHY_BYTES] = "";
    struct kvf_weights *w = NULL;

    if (kvf_weights_open(path, &w, why) != KVF_OK) {
        fail_msg("%s: %s", path, why);
    }
    check_model(&w->model);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        check_tensor(w, &w->layers[layer].k, 10 * layer);
        check_tensor(w, &w->layers[layer].v, 10 * layer + 1);
        check_tensor(w, &w->layers[layer].k_bias, 10 * layer + 2);
        check_tensor(w, &w->layers[layer].k_norm, 10 * layer + 3);
        assert_int_equal(w->layers[layer].v_bias.rows, 0);
    }
    kvf_weights_close(w);
}

static void safetensors_come_by_file_folder_and_index(void **state)
{
    static const char index[] = "{\"weight_map\": {\"b\": \"part-2.safetensors\", "
                                "\"a\": \"part-1.safetensors\", \"c\": \"part-2.safetensors\"}}";
    static struct bytes b;
    uint8_t digests[2][KVF_DIGEST_BYTES];
    uint8_t both[KVF_DIGEST_BYTES];
    uint8_t digest[KVF_DIGEST_BYTES];
    char why[KVF_WEIGHTS_WHY_BYTES];
    char path[KVF_TEST_PATH_BYTES];
    struct kvf_test_dir dir;
    struct kvf_weights *w;

    (void)state;
    kvf_test_dir_create(&dir);
    write_at(&dir, "config.json", config, strlen(config));
    build_safetensors(&b, 0, LAYERS);
    write_at(&dir, "model.safetensors", b.data, b.n);
    check_open(dir.path);
    kvf_test_dir_path(&dir, "model.safetensors", path);
    check_open(path);
    assert_int_equal(kvf_weights_open(path, &w, why), KVF_OK);
    assert_int_equal(kvf_weights_digest(w, digest, why), KVF_OK);
    crypto_hash_sha256(both, b.data, b.n);
    assert_memory_equal(digest, both, sizeof(both));
    kvf_weights_close(w);

    for (uint32_t i = 0; i < 2; i++) {
        build_safetensors(&b, i, i + 1);
        write_at(&dir, i == 0 ? "part-1.safetensors" : "part-2.safetensors", b.data, b.n);
        crypto_hash_sha256(digests[i], b.data, b.n);
    }
    write_at(&dir, "model.safetensors.index.json", index, strlen(index));
    check_open(dir.path);
    assert_int_equal(kvf_weights_open(dir.path, &w, why), KVF_OK);
    assert_int_equal(kvf_weights_digest(w, digest, why), KVF_OK);
    crypto_hash_sha256(both, digests[0], sizeof(digests));
    assert_memory_equal(digest, both, sizeof(both));
    kvf_weights_close(w);
    kvf_test_dir_remove(&dir);
}

/* --- GGUF --- */

/* Values as in build_safetensors. */
static void build_gguf(struct bytes *b, uint32_t version)
{
    static const struct {
        const char *name;
        uint32_t gguf_type;
        uint32_t type;
        uint32_t rows;
        uint32_t columns;
    } parts[] = {
        {"attn_k.weight", 30, KVF_WEIGHTS_BF16, K_ROWS, D_MODEL},
        {"attn_v.weight", 8, KVF_WEIGHTS_Q8_0, K_ROWS, D_MODEL},
        {"attn_k.bias", 1, KVF_WEIGHTS_F16, K_ROWS, 0},
        {"attn_k_norm.weight", 0, KVF_WEIGHTS_F32, DIM, 0},
    };
    static const struct {
        const char *key;
        uint32_t value;
    } pairs[] = {
        {"llama.block_count", LAYERS},       {"llama.embedding_length", D_MODEL},
        {"llama.attention.head_count", 4},   {"llama.attention.head_count_kv", HEADS},
        {"llama.feed_forward_length", 96},   {"general.alignment", 64},
        {"llama.rope.dimension_count", DIM},
    };
    size_t offset = 0;

    b->n = 0;
    add(b, "GGUF", 4);
    add_number(b, version, 4);
    add_number(b, LAYERS * 4, 8);
    add_number(b, 9, 8);
    for (size_t i = 0; i < 7; i++) {
        add_text(b, pairs[i].key);
        add_number(b, 4, 4);
        add_number(b, pairs[i].value, 4);
    }
    add_text(b, "general.architecture"); /* behind what it is the prefix of */
    add_number(b, 8, 4);
    add_text(b, "llama");
    add_text(b, "tokenizer.ggml.tokens");
    add_number(b, 9, 4);
    add_number(b, 8, 4);
    add_number(b, 2, 8);
    add_text(b, "one");
    add_text(b, "");
    for (uint32_t i = 0; i < LAYERS * 4; i++) {
        char name[64];
        size_t n = (size_t)parts[i % 4].rows *
                   (parts[i % 4].columns != 0 ? parts[i % 4].columns : 1);

        snprintf(name, sizeof(name), "blk.%u.%s", i / 4, parts[i % 4].name);
        add_text(b, name);
        add_number(b, parts[i % 4].columns != 0 ? 2 : 1, 4);
        if (parts[i % 4].columns != 0) {
            add_number(b, parts[i % 4].columns, 8);
        }
        add_number(b, parts[i % 4].rows, 8);
        add_number(b, parts[i % 4].gguf_type, 4);
        add_number(b, offset, 8);
        offset += (kvf_weights_type_bytes(parts[i % 4].type, 1, n) + 63) / 64 * 64;
    }
    add(b, (const uint8_t[64]){0}, (64 - b->n % 64) % 64);
    for (uint32_t i = 0; i < LAYERS * 4; i++) {
        add_values(b, parts[i % 4].type, 10 * (i / 4) + i % 4,
                   (size_t)parts[i % 4].rows *
                       (parts[i % 4].columns != 0 ? parts[i % 4].columns : 1));
        add(b, (const uint8_t[64]){0}, (64 - b->n % 64) % 64);
    }
}

static void gguf_has_the_same_values(void **state)
{
    static struct bytes b;
    char path[KVF_TEST_PATH_BYTES];
    struct kvf_test_dir dir;

    (void)state;
    kvf_test_dir_create(&dir);
    for (uint32_t version = 2; version <= 3; version++) {
        build_gguf(&b, version);
        write_at(&dir, "m.gguf", b.data, b.n);
        kvf_test_dir_path(&dir, "m.gguf", path);
        check_open(path);
    }
    kvf_test_dir_remove(&dir);
}

/* Each type of blocks, one block: scale 1/2, least value -3, codes 0, 1, ... in order, so that the
 * fifth bit and both halves of a byte matter. */
static void blocks_widen_as_gguf_has_them(void **state)
{
    static const struct {
        uint32_t type;
        uint32_t levels;
        bool has_least;
        float least;
    } types[] = {
        {KVF_WEIGHTS_Q4_0, 16, false, -4.0f},
        {KVF_WEIGHTS_Q4_1, 16, true, -3.0f},
        {KVF_WEIGHTS_Q5_0, 32, false, -8.0f},
        {KVF_WEIGHTS_Q5_1, 32, true, -3.0f},
    };
    char why[KVF_WEIGHTS_WHY_BYTES];
    char path[KVF_TEST_PATH_BYTES];
    struct kvf_test_dir dir;

    (void)state;
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "block", path);
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        static struct bytes b;
        struct kvf_weights w = {.n_files = 1};
        struct kvf_weights_tensor t = {.rows = 1, .columns = 32, .type = types[i].type};
        float values[32];
        FILE *file;

        b.n = 0;
        add_number(&b, kvf_f16_from_f32(0.5f), 2);
        if (types[i].has_least) {
            add_number(&b, kvf_f16_from_f32(-3.0f), 2);
        }
        if (types[i].levels == 32) {
            add_number(&b, 0xffff0000, 4); /* codes 16 to 31 have it */
        }
        for (uint32_t k = 0; k < 16; k++) {
            add_number(&b, k | k << 4, 1);
        }
        assert_int_equal(kvf_weights_type_bytes(types[i].type, 1, 32), b.n);
        kvf_test_file_write(path, b.data, b.n);
        file = fopen(path, "rb");
        assert_non_null(file);
        w.fds[0] = fileno(file);
        assert_int_equal(kvf_weights_load(&w, &t, values, why), KVF_OK);
        for (uint32_t k = 0; k < 32; k++) {
            assert_true(values[k] == types[i].least + 0.5f * (float)(k % types[i].levels));
        }
        assert_int_equal(fclose(file), 0);
    }
    kvf_test_dir_remove(&dir);
}

/* --- files that are not what they say --- */

static void refuse(const struct kvf_test_dir *dir, const char *name, const char *words)
{
    char path[KVF_TEST_PATH_BYTES];
    char why[KVF_WEIGHTS_WHY_BYTES] = "";
    struct kvf_weights *w = NULL;
    int status;

    kvf_test_dir_path(dir, name, path);
    status = kvf_weights_open(path, &w, why);
    if (status >= 0 || w != NULL || strstr(why, words) == NULL || strchr(why, '\n') != NULL) {
        fail_msg("status %d, '%s' instead of '%s'", status, why, words);
    }
}

/* Replace the first `from` in b by `to`, of the same length. */
static void replace(struct bytes *b, const char *from, const char *to)
{
    uint8_t *at = memmem(b->data, b->n, from, strlen(from));

    assert_int_equal(strlen(from), strlen(to));
    assert_non_null(at);
    memcpy(at, to, strlen(to));
}

static void wrong_safetensors_are_refused(void **state)
{
    static const struct {
        const char *from;
        const char *to;
        const char *words;
    } changes[] = {
        {"BF16\", \"shape\": [16, 32]", "I8\"  , \"shape\": [16, 32]", "is of type I8"},
        {"[16, 32]", "[17, 32]", "1024 bytes do not fit its shape"},
        {"[16, 32]", "[32, 16]", "the weight of K is 32 x 16, not 16 x 32"},
        {"[16, 32]", "[-1, 32]", "no shape of a matrix"},
        {"[16, 32]", "[4e0,32]", "no shape of a matrix"},
        {"[0, 1024]", "[9, 1024]", "1015 bytes do not fit"},
        {"[0, 1024]", "[0, 9024]", "does not lie within"},
        {"[0, 1024]", "[1024, 0]", "does not lie within"},
        {"layers.0.self_attn.v", "layers.7.self_attn.v", "layer 0 has no weight of V"},
        {"layers.1.self_attn.k_proj.w", "layers.0.self_attn.k_proj.w", "header: duplicate"},
        {"\"model.layers.1.self_attn.k_proj.w", "      \"layers.0.self_attn.k_proj.w",
         "there are two"},
        {"{\"__meta", "[\"__meta", "header:"},
    };
    static struct bytes b;
    struct kvf_test_dir dir;

    (void)state;
    kvf_test_dir_create(&dir);
    write_at(&dir, "config.json", config, strlen(config));
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        char padded[64];

        build_safetensors(&b, 0, LAYERS);
        snprintf(padded, sizeof(padded), "%-*s", (int)strlen(changes[i].from), changes[i].to);
        replace(&b, changes[i].from, padded);
        write_at(&dir, "m.safetensors", b.data, b.n);
        refuse(&dir, "m.safetensors", changes[i].words);
    }
    build_safetensors(&b, 0, LAYERS);
    b.data[6] = 1;
    write_at(&dir, "m.safetensors", b.data, b.n);
    refuse(&dir, "m.safetensors", "no safetensors");
    build_safetensors(&b, 0, LAYERS);
    for (size_t n = 0; n < b.n; n += n < 16 ? 1 : 61) {
        write_at(&dir, "m.safetensors", b.data, n);
        refuse(&dir, "m.safetensors", "");
    }
    kvf_test_dir_remove(&dir);
}

static void wrong_configs_and_indexes_are_refused(void **state)
{
    static const struct {
        const char *text;
        const char *words;
    } configs[] = {
        {"{", "config:"},
        {"[]", "not an object"},
        {"{\"hidden_size\": 8}", "layers (--layers): 0"},
        {"{\"num_hidden_layers\": 513, \"hidden_size\": 8}",
         "layers (--layers): 513, and 1 to 512"},
        {"{\"num_hidden_layers\": 2.5}", "num_hidden_layers is no whole number"},
        {"{\"num_hidden_layers\": 2, \"hidden_size\": -4}", "hidden_size is no whole number"},
        {"{\"num_hidden_layers\": 2, \"hidden_size\": 64}", "query heads (--query-heads): 0"},
        {"{\"num_hidden_layers\": 2, \"hidden_size\": 8192, \"num_attention_heads\": 1}",
         "elements of a K vector: 8192"},
        {"{\"num_hidden_layers\": 2, \"hidden_size\": 64, \"num_attention_heads\": 3, "
         "\"num_key_value_heads\": 2, \"head_dim\": 16}",
         "3 query heads are no multiple of 2 K/V heads"},
        {"{\"kv_lora_rank\": 512, \"model_type\": \"deepseek_v3\"}", "deepseek_v3 keeps a latent"},
        {"{\"intermediate_size\": 70000, \"num_experts_per_tok\": 70000}", "70000 experts"},
    };
    static const struct {
        const char *text;
        const char *words;
    } indexes[] = {
        {"{\"weight_map\": {\"a\": \"../m.safetensors\"}}", "'a' has no name of a file"},
        {"{\"weight_map\": {\"a\": 7}}", "'a' has no name of a file"},
        {"{\"weight_map\": {}}", "layer 0 has no weight of K"},
        {"{}", "no weight_map"},
        {"{\"weight_map\": {\"a\": \"missing.safetensors\"}}", "No such file"},
    };
    struct kvf_test_dir dir;

    (void)state;
    kvf_test_dir_create(&dir);
    refuse(&dir, "", "config.json: No such file");
    refuse(&dir, "m.bin", "neither a folder nor a file that ends in");
    for (size_t i = 0; i < sizeof(configs) / sizeof(configs[0]); i++) {
        write_at(&dir, "config.json", configs[i].text, strlen(configs[i].text));
        refuse(&dir, "", configs[i].words);
    }
    write_at(&dir, "config.json", config, strlen(config));
    for (size_t i = 0; i < sizeof(indexes) / sizeof(indexes[0]); i++) {
        write_at(&dir, "model.safetensors.index.json", indexes[i].text, strlen(indexes[i].text));
        refuse(&dir, "", indexes[i].words);
    }
    kvf_test_dir_remove(&dir);
}

static void wrong_ggufs_are_refused(void **state)
{
    static struct bytes b;
    static struct bytes whole;
    struct kvf_test_dir dir;
    uint8_t *at;

    (void)state;
    kvf_test_dir_create(&dir);
    build_gguf(&whole, 3);
    for (size_t n = 0; n < whole.n - 32; n += n < 1200 ? 7 : 509) {
        write_at(&dir, "m.gguf", whole.data, n);
        refuse(&dir, "m.gguf", "");
    }
    b = whole;
    b.data[4] = 4;
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "no GGUF of version 2 or 3");
    b = whole;
    at = (uint8_t *)memmem(b.data, b.n, "blk.1.attn_v.weight", 19) + 19;
    at[4 + 16] = 12; /* behind two dimensions: Q4_K */
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "blk.1.attn_v.weight is of GGUF type 12; F32, F16, BF16, Q8_0, Q5_1");
    at[4 + 16] = 8;
    at[4] = 33; /* no whole number of blocks */
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "layer 1: a tensor does not lie within");
    at[4] = 32;
    at[0] = 5;
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "has 5 dimensions");
    at[0] = 2;
    memset(at + 4 + 8, 0xff, 8); /* rows: their bytes would wrap */
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "layer 1: a tensor does not lie within");
    b = whole;
    replace(&b, "blk.1.attn_k.weight", "blk.0.attn_k.weight");
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "there are two");
    b = whole;
    replace(&b, "general.alignment", "llama.block_count");
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "layer 2 has no weight of K");
    b = whole;
    replace(&b, "llama.rope.dimension_count", "llama.attention.key_length");
    at = (uint8_t *)memmem(b.data, b.n, "llama.attention.key_length", 26) + 26;
    at[0] = 5; /* i32 */
    at[7] = 0x80;
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "llama.attention.key_length is not one whole number");
    at[0] = 13;
    write_at(&dir, "m.gguf", b.data, b.n);
    refuse(&dir, "m.gguf", "a value of type 13");
    kvf_test_dir_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors_come_by_file_folder_and_index),
        cmocka_unit_test(gguf_has_the_same_values),
        cmocka_unit_test(blocks_widen_as_gguf_has_them),
        cmocka_unit_test(wrong_safetensors_are_refused),
        cmocka_unit_test(wrong_configs_and_indexes_are_refused),
        cmocka_unit_test(wrong_ggufs_are_refused),
    };

    return sodium_init() >= 0 ? cmocka_run_group_tests(tests, NULL, NULL) : 1;
}
