/* SPDX-License-Identifier: Apache-2.0
 *
 * test_llama_state.c: states of llama.cpp, put together here byte by byte: what is served is found
 * where it lies, written and cut to the same bytes; what is not is refused in words; and whatever
 * the bytes are, nothing outside them is touched.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "connectors/llama.cpp/llama_state.h"
#include "tests/support/support.h"

#define MAGIC 0xaf143cd8u

enum {
    F32 = 0,
    F16 = 1,
    Q8_0 = 8,
    BF16 = 30
};

/* What a state is to be like; zero is as most are. */
struct form {
    uint32_t magic, n_streams, stream; /* which of the streams has the cells */
    uint32_t n_tokens, n_layers, v_layers;
    int32_t type, odd_type; /* that of odd_layer's V, where odd_layer is not 0 */
    uint64_t k_row, v_row, odd_row;
    uint32_t odd_layer, transposed;
    int32_t first_position, n_sequences;
    uint32_t n_behind;     /* bytes behind all */
    bool is_second_filled; /* a second stream has cells, too */
};

static const struct form usual = {.magic = MAGIC,
                                  .n_streams = 1,
                                  .n_tokens = 7,
                                  .n_layers = 3,
                                  .v_layers = 3,
                                  .type = F16,
                                  .k_row = 64,
                                  .v_row = 32,
                                  .n_sequences = 1};

struct bytes {
    uint8_t *data;
    size_t n;
};

static void add(struct bytes *b, const void *data, size_t n)
{
    b->data = realloc(b->data, b->n + n + 1);
    assert_non_null(b->data);
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

static void add_u32(struct bytes *b, uint32_t value)
{
    add(b, &value, sizeof(value));
}

static uint8_t row_byte(char tensor, uint32_t layer, uint32_t token, uint64_t byte)
{
    return (uint8_t)((uint32_t)tensor * 7 + layer * 31 + token * 5 + byte * 3 + (byte >> 3));
}

static void add_section(struct bytes *b, const struct form *f, char tensor, uint32_t layer)
{
    bool is_odd = tensor == 'V' && f->odd_layer != 0 && layer == f->odd_layer;
    int32_t type = is_odd ? f->odd_type : f->type;
    uint64_t row = tensor == 'K' ? f->k_row : is_odd && f->odd_row != 0 ? f->odd_row : f->v_row;

    add(b, &type, sizeof(type));
    add(b, &row, sizeof(row));
    for (uint32_t token = 0; token < f->n_tokens; token++) {
        for (uint64_t byte = 0; byte < row && byte < 4096; byte++) {
            uint8_t value = row_byte(tensor, layer, token, byte);

            add(b, &value, 1);
        }
    }
}

static void add_cells(struct bytes *b, const struct form *f)
{
    add_u32(b, f->n_tokens);
    for (uint32_t i = 0; i < f->n_tokens; i++) {
        add_u32(b, (uint32_t)f->first_position + i);
        add_u32(b, (uint32_t)f->n_sequences);
        add_u32(b, 0);
    }
    add_u32(b, f->transposed);
    add_u32(b, f->n_layers);
    for (uint32_t layer = 0; layer < f->n_layers && layer < 8; layer++) {
        add_section(b, f, 'K', layer);
    }
    for (uint32_t layer = 0; layer < f->v_layers; layer++) {
        add_section(b, f, 'V', layer);
    }
}

static struct bytes make(const struct form *f)
{
    struct bytes b = {0};

    add_u32(&b, f->magic);
    add_u32(&b, 0);
    add_u32(&b, f->n_streams);
    for (uint32_t stream = 0; stream < f->n_streams && stream < 8; stream++) {
        if (stream == f->stream || (f->is_second_filled && stream == f->stream + 1)) {
            add_cells(&b, f);
        } else {
            add_u32(&b, 0);
        }
    }
    for (uint32_t i = 0; i < f->n_behind; i++) {
        add(&b, "", 1);
    }
    return b;
}

/* Parse from memory of exactly these bytes, so that a sanitizer sees a read behind them. */
static int parse_exact(const uint8_t *data, size_t n, struct kvf_llama_found *found, char *why)
{
    uint8_t *exact = malloc(n > 0 ? n : 1);
    int status;

    assert_non_null(exact);
    memcpy(exact, data, n);
    why[0] = '\0';
    status = kvf_llama_state_parse(exact, n, found, why);
    free(exact);
    return status;
}

static void refuse(struct form f, int wanted, const char *words)
{
    struct bytes b = make(&f);
    struct kvf_llama_found found;
    char why[KVF_LLAMA_WHY_BYTES];

    assert_int_equal(parse_exact(b.data, b.n, &found, why), wanted);
    if (strstr(why, words) == NULL) {
        fail_msg("'%s' is not in '%s'", words, why);
    }
    free(b.data);
}

static void test_served(void **state)
{
    static const int32_t types[] = {F32, F16, BF16};
    struct kvf_llama_found found;
    char why[KVF_LLAMA_WHY_BYTES];

    (void)state;
    for (uint32_t i = 0; i < 12; i++) {
        struct form f = usual;
        struct bytes b;

        f.type = types[i % 3];
        f.n_streams = 1 + i % 4;
        f.stream = i % f.n_streams;
        f.n_tokens = 1 + i;
        b = make(&f);
        assert_int_equal(parse_exact(b.data, b.n, &found, why), KVF_OK);
        assert_int_equal(found.n_tokens, f.n_tokens);
        assert_int_equal(found.shape.n_streams, f.n_streams);
        assert_int_equal(found.shape.n_layers, 3);
        assert_int_equal(found.shape.type, f.type);
        assert_int_equal(found.shape.k_row_bytes, 64);
        assert_int_equal(found.shape.v_row_bytes, 32);
        assert_int_equal(kvf_llama_state_bytes(&found.shape, found.n_tokens), b.n);
        for (uint32_t layer = 0; layer < 3; layer++) {
            uint32_t token = f.n_tokens - 1;
            const uint8_t *rows = b.data + found.shift_bytes;

            assert_int_equal(rows[kvf_llama_state_k(&found.shape, f.n_tokens, layer, token)],
                             row_byte('K', layer, token, 0));
            assert_int_equal(rows[kvf_llama_state_v(&found.shape, f.n_tokens, layer, token)],
                             row_byte('V', layer, token, 0));
        }
        free(b.data);
    }
}

/* Rows are where they are said to be; a frame with rows is the state; a cut one is a shorter
 * one. */
static void test_written(void **state)
{
    (void)state;
    for (uint32_t n_streams = 1; n_streams <= 3; n_streams++) {
        struct form f = usual;
        struct bytes whole;
        struct kvf_llama_found found;
        char why[KVF_LLAMA_WHY_BYTES];

        f.n_streams = n_streams;
        whole = make(&f);
        assert_int_equal(parse_exact(whole.data, whole.n, &found, why), KVF_OK);
        for (uint32_t left = 1; left <= f.n_tokens; left++) {
            struct form shorter = f;
            struct bytes wanted;
            uint8_t *made = malloc(whole.n);
            uint8_t *written;

            shorter.n_tokens = left;
            wanted = make(&shorter);
            assert_int_equal(kvf_llama_state_bytes(&found.shape, left), wanted.n);
            assert_non_null(made);
            memcpy(made, whole.data, whole.n);
            kvf_llama_state_cut(&found.shape, found.n_tokens, left, made);
            assert_memory_equal(made, wanted.data, wanted.n);
            free(made);

            written = malloc(wanted.n);
            assert_non_null(written);
            memset(written, 0xee, wanted.n);
            kvf_llama_state_frame(&found.shape, left, written);
            for (uint32_t layer = 0; layer < found.shape.n_layers; layer++) {
                for (uint32_t token = 0; token < left; token++) {
                    uint8_t *k = written + kvf_llama_state_k(&found.shape, left, layer, token);
                    uint8_t *v = written + kvf_llama_state_v(&found.shape, left, layer, token);

                    for (uint32_t byte = 0; byte < found.shape.k_row_bytes; byte++) {
                        k[byte] = row_byte('K', layer, token, byte);
                    }
                    for (uint32_t byte = 0; byte < found.shape.v_row_bytes; byte++) {
                        v[byte] = row_byte('V', layer, token, byte);
                    }
                }
            }
            assert_memory_equal(written, wanted.data, wanted.n);
            free(written);
            free(wanted.data);
        }
        free(whole.data);
    }
}

#define FORM(...)                                                                                  \
    ({                                                                                             \
        struct form f_ = usual;                                                                    \
        struct form *f = &f_;                                                                      \
        __VA_ARGS__;                                                                               \
        f_;                                                                                        \
    })

static void test_not_served(void **state)
{
    (void)state;
    refuse(FORM(f->magic = 1), KVF_ERR_UNSUPPORTED, "another form of llama.cpp's");
    refuse(FORM(f->transposed = 1), KVF_ERR_UNSUPPORTED, "turn flash attention on");
    refuse(FORM(f->type = Q8_0), KVF_ERR_UNSUPPORTED, "K of layer 0 is of ggml's type 8");
    refuse(FORM(f->type = -1), KVF_ERR_UNSUPPORTED, "K of layer 0 is of ggml's type -1");
    refuse(FORM(f->odd_layer = 2, f->odd_type = Q8_0), KVF_ERR_UNSUPPORTED, "V of layer 2");
    refuse(FORM(f->odd_layer = 2, f->odd_type = F32), KVF_ERR_UNSUPPORTED,
           "V of layer 2 is f32, others are f16");
    refuse(FORM(f->odd_layer = 1, f->odd_type = F16, f->odd_row = 48), KVF_ERR_UNSUPPORTED,
           "V of layer 1 has rows of 48 bytes, others of 32");
    refuse(FORM(f->v_layers = 0), KVF_ERR_UNSUPPORTED, "no V: MLA is not served");
    refuse(FORM(f->first_position = 1), KVF_ERR_UNSUPPORTED, "cell 0 has position 1");
    refuse(FORM(f->first_position = -1), KVF_ERR_UNSUPPORTED, "cell 0 has position -1");
    refuse(FORM(f->n_sequences = 2), KVF_ERR_UNSUPPORTED, "belongs to 2 sequences");
    refuse(FORM(f->n_behind = 5), KVF_ERR_UNSUPPORTED, "5 bytes follow K and V");
}

static void test_contradictions(void **state)
{
    (void)state;
    refuse(FORM(f->n_streams = 0), KVF_ERR_CORRUPT, "0 streams");
    refuse(FORM(f->n_streams = 257), KVF_ERR_CORRUPT, "257 streams");
    refuse(FORM(f->n_layers = 0), KVF_ERR_CORRUPT, "0 layers");
    refuse(FORM(f->n_layers = KVF_LAYERS_MAX + 1), KVF_ERR_CORRUPT, "513 layers");
    refuse(FORM(f->n_streams = 2, f->stream = 9), KVF_ERR_CORRUPT, "no tokens");
    refuse(FORM(f->n_streams = 2, f->is_second_filled = true), KVF_ERR_CORRUPT, "another one");
    refuse(FORM(f->k_row = 0), KVF_ERR_CORRUPT, "rows of 0 bytes");
    refuse(FORM(f->k_row = (uint64_t)1 << 63), KVF_ERR_CORRUPT, "rows of 9223372036854775808");
    refuse(FORM(f->k_row = UINT64_MAX / 7 + 10), KVF_ERR_CORRUPT, "rows of");
    refuse(FORM(f->k_row = 1 << 22), KVF_ERR_CORRUPT, "ends within rows");
    refuse(FORM(f->v_layers = 2), KVF_ERR_CORRUPT, "ends within");
}

/* A state says that it has more cells than could be there. */
static void test_wild_counts(void **state)
{
    static const uint32_t counts[] = {KVF_LLAMA_TOKENS_MAX, KVF_LLAMA_TOKENS_MAX + 1, UINT32_MAX};
    struct bytes b = make(&usual);
    struct kvf_llama_found found;
    char why[KVF_LLAMA_WHY_BYTES];

    (void)state;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        memcpy(b.data + 12, &counts[i], sizeof(counts[i]));
        assert_int_not_equal(parse_exact(b.data, b.n, &found, why), KVF_OK);
        assert_string_not_equal(why, "");
    }
    free(b.data);
}

static void test_truncated(void **state)
{
    struct bytes b = make(&usual);
    struct kvf_llama_found found;
    char why[KVF_LLAMA_WHY_BYTES];

    (void)state;
    for (size_t n = 0; n < b.n; n++) {
        int status = parse_exact(b.data, n, &found, why);

        assert_true(status == KVF_ERR_CORRUPT || status == KVF_ERR_UNSUPPORTED);
        assert_string_not_equal(why, "");
    }
    free(b.data);
}

enum {
    ROUNDS = 20000,
    FORMS = 15
};

/* One to four changes of a bit or a word, most of them where there are no rows. */
static void mutate(struct kvf_random_seeded *random, uint8_t *data, size_t n, size_t heads)
{
    static const uint32_t words[] = {0, 1, 2, 7, 30, 64, 1 << 24, 0x7fffffff, UINT32_MAX};
    uint32_t n_changes = 1 + (uint32_t)(kvf_random_seeded_next(random) % 4);

    for (uint32_t i = 0; i < n_changes; i++) {
        uint64_t r = kvf_random_seeded_next(random);
        size_t at = (r & 1) != 0 ? (r >> 8) % heads : (r >> 8) % (n - 4);

        if ((r & 2) != 0) {
            memcpy(data + at / 4 * 4, &words[(r >> 40) % 9], 4);
        } else {
            data[at] ^= (uint8_t)(1u << ((r >> 40) % 8));
        }
    }
}

/* Either it is refused, or it is wholly inside. */
static void test_mutated(void **state)
{
    struct kvf_random_seeded random;
    struct bytes forms[FORMS];
    uint32_t n_served = 0;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    for (uint32_t i = 0; i < FORMS; i++) {
        struct form f = usual;

        f.n_streams = 1 + i % 3;
        f.n_tokens = 1 + i / 3;
        forms[i] = make(&f);
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const struct bytes *form = &forms[round % FORMS];
        uint8_t *data = malloc(form->n);
        struct kvf_llama_found found;
        char why[KVF_LLAMA_WHY_BYTES] = "";

        assert_non_null(data);
        memcpy(data, form->data, form->n);
        mutate(&random, data, form->n, 16 + 12 * (1 + round % FORMS / 3) + 24);
        if (kvf_llama_state_parse(data, form->n, &found, why) == KVF_OK) {
            n_served++;
            assert_int_equal(kvf_llama_state_bytes(&found.shape, found.n_tokens), form->n);
            kvf_llama_state_cut(&found.shape, found.n_tokens, 1 + round % found.n_tokens, data);
        } else {
            assert_string_not_equal(why, "");
        }
        free(data);
    }
    /* changes of rows alone are no fault of the form */
    assert_true(n_served > 0);
    assert_true(n_served < ROUNDS);
    for (uint32_t i = 0; i < FORMS; i++) {
        free(forms[i].data);
    }
}

static void test_types(void **state)
{
    (void)state;
    assert_int_equal(kvf_llama_type_find("f16"), F16);
    assert_int_equal(kvf_llama_type_find("bf16"), BF16);
    assert_int_equal(kvf_llama_type_find("f32"), F32);
    assert_int_equal(kvf_llama_type_find("q8_0"), -1);
    assert_string_equal(kvf_llama_type_name(BF16), "bf16");
    assert_null(kvf_llama_type_name(Q8_0));
    assert_int_equal(kvf_llama_type_dtype(F16), KVF_DTYPE_F16);
    assert_int_equal(kvf_llama_type_dtype(BF16), KVF_DTYPE_BF16);
    assert_int_equal(kvf_llama_type_dtype(F32), KVF_DTYPE_F32);
    assert_int_equal(kvf_llama_type_dtype(Q8_0), KVF_DTYPE_NONE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_served),      cmocka_unit_test(test_written),
        cmocka_unit_test(test_not_served),  cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_wild_counts), cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_mutated),     cmocka_unit_test(test_types),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
