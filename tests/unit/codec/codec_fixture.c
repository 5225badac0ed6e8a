/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_fixture.c: see codec_fixture.h.
 */
#include "tests/unit/codec/codec_fixture.h"

#include "codec/codec_fp.h"
#include "codec/simd.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    PAGE_TOKENS = 16
};

struct kvf_geometry fixture_geometry(int dtype, uint32_t n_layers, uint32_t n_heads, uint32_t dim_k,
                                     uint32_t dim_v, uint32_t chunk_tokens)
{
    return (struct kvf_geometry){
        .struct_bytes = sizeof(struct kvf_geometry),
        .kind = KVF_KIND_KV,
        .dtype = (uint8_t)dtype,
        .rope_state = KVF_ROPE_POST,
        .n_layers = (uint16_t)n_layers,
        .n_heads = (uint16_t)n_heads,
        .dim_k = (uint16_t)dim_k,
        .dim_v = (uint16_t)dim_v,
        .chunk_tokens = (uint16_t)chunk_tokens,
    };
}

void fixture_geometry_suit(struct kvf_geometry *geometry, const char *profile)
{
    const struct kvf_profile *found = kvf_profile_find(profile);
    assert_non_null(found);
    if (!kvf_profile_takes(found, geometry->kind)) {
        geometry->kind = kvf_profile_takes(found, KVF_KIND_X) ? KVF_KIND_X : KVF_KIND_XG;
        geometry->rope_state = KVF_ROPE_NONE;
        geometry->dim_v = 0;
    }
}

static struct kvf_tensor_view tensor_view(const struct kvf_geometry *geometry, uint32_t dim,
                                          void *const *layers)
{
    size_t head_bytes = dim * kvf_dtype_bytes(geometry->dtype);
    return (struct kvf_tensor_view){
        .layers = layers,
        .page_stride_bytes = PAGE_TOKENS * geometry->n_heads * head_bytes,
        .token_stride_bytes = geometry->n_heads * head_bytes,
        .head_stride_bytes = head_bytes,
    };
}

void fixture_kv_init(struct fixture_kv *kv, const struct kvf_geometry *geometry, uint32_t n_tokens)
{
    *kv = (struct fixture_kv){.geometry = *geometry, .n_tokens = n_tokens};
    size_t pages = (n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
    size_t head_bytes = kvf_dtype_bytes(geometry->dtype);
    kv->k_bytes = pages * PAGE_TOKENS * geometry->n_heads * geometry->dim_k * head_bytes;
    kv->v_bytes = pages * PAGE_TOKENS * geometry->n_heads * geometry->dim_v * head_bytes;
    kv->memory_bytes = geometry->n_layers * (kv->k_bytes + kv->v_bytes);
    kv->memory = calloc(1, kv->memory_bytes);
    assert_non_null(kv->memory);
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        kv->k_layers[layer] = kv->memory + layer * (kv->k_bytes + kv->v_bytes);
        kv->v_layers[layer] = kv->memory + layer * (kv->k_bytes + kv->v_bytes) + kv->k_bytes;
    }
    kv->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(kv->view),
        .tokens_a_page = PAGE_TOKENS,
        .k = tensor_view(geometry, geometry->dim_k, kv->k_layers),
        .v = tensor_view(geometry, geometry->dim_v, kv->v_layers),
    };
}

void fixture_kv_fini(struct fixture_kv *kv)
{
    free(kv->memory);
    kv->memory = NULL;
}

uint8_t *fixture_kv_vector(const struct fixture_kv *kv, int is_v, uint32_t layer, uint32_t head,
                           uint32_t token)
{
    const struct kvf_tensor_view *tensor = is_v ? &kv->view.v : &kv->view.k;
    return (uint8_t *)tensor->layers[layer] + token * tensor->token_stride_bytes +
           head * tensor->head_stride_bytes;
}

/* What a plan needs. */
static void codec_alloc(struct fixture_codec *codec)
{
    codec->page = malloc(codec->plan.record_bytes_max);
    size_t aligned = (codec->plan.workspace_bytes + KVF_CODEC_WORKSPACE_ALIGN - 1) /
                     KVF_CODEC_WORKSPACE_ALIGN * KVF_CODEC_WORKSPACE_ALIGN;
    codec->workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN, aligned);
    assert_non_null(codec->page);
    assert_non_null(codec->workspace);
    codec->payload = (uint8_t *)codec->page + KVF_BLOCK_PAGE_BYTES;
    codec->payload_capacity = codec->plan.record_bytes_max - KVF_BLOCK_PAGE_BYTES;
}

void fixture_codec_init(struct fixture_codec *codec, const struct kvf_geometry *geometry,
                        const char *profile)
{
    *codec = (struct fixture_codec){.record_bytes = 0};
    assert_int_equal(kvf_codec_plan_init(&codec->plan, geometry, profile), KVF_OK);
    codec_alloc(codec);
}

void fixture_codec_init_table(struct fixture_codec *codec, const struct kvf_geometry *geometry,
                              const struct kvf_profile_table *table, uint32_t head_first)
{
    *codec = (struct fixture_codec){.record_bytes = 0};
    assert_int_equal(kvf_codec_plan_init_table(&codec->plan, geometry, table, head_first), KVF_OK);
    codec_alloc(codec);
}

void fixture_codec_fini(struct fixture_codec *codec)
{
    free(codec->page);
    free(codec->workspace);
    *codec = (struct fixture_codec){.record_bytes = 0};
}

void fixture_encode(struct fixture_codec *codec, const struct fixture_kv *kv, uint32_t token_start)
{
    /* Stale bytes must not show: gaps are written, and workspaces start with anything. */
    memset(codec->page, 0xa5, codec->plan.record_bytes_max);
    memset(codec->workspace, 0x5a, codec->plan.workspace_bytes);
    size_t payload_bytes = 0;
    int status = kvf_block_encode(&codec->plan, &kv->view, token_start, kv->n_tokens, codec->page,
                                  codec->payload, codec->payload_capacity, codec->workspace,
                                  &payload_bytes);
    assert_int_equal(status, KVF_OK);
    codec->record_bytes = KVF_BLOCK_PAGE_BYTES + payload_bytes;
    assert_true(payload_bytes <= kvf_codec_plan_payload_bytes_max(&codec->plan, kv->n_tokens));
    assert_int_equal(kvf_block_check(codec->page, codec->record_bytes), KVF_OK);
    assert_int_equal(kvf_block_check_payload(codec->page, codec->payload), KVF_OK);
    assert_int_equal(kvf_block_matches_plan(codec->page, &codec->plan), KVF_OK);
}

void fixture_decode(struct fixture_codec *codec, struct fixture_kv *kv)
{
    memset(codec->workspace, 0xc3, codec->plan.workspace_bytes);
    int status = kvf_block_decode(&codec->plan, codec->page, codec->record_bytes, 0, 0, 0, 0,
                                  &kv->view, codec->workspace);
    assert_int_equal(status, KVF_OK);
}

void fixture_trip_init(struct fixture_trip *trip, const struct kvf_geometry *geometry,
                       const char *profile, uint32_t n_tokens)
{
    fixture_kv_init(&trip->kv, geometry, n_tokens);
    fixture_kv_init(&trip->back, geometry, n_tokens);
    fixture_codec_init(&trip->codec, geometry, profile);
}

void fixture_trip_run(struct fixture_trip *trip)
{
    fixture_encode(&trip->codec, &trip->kv, 0);
    fixture_decode(&trip->codec, &trip->back);
}

void fixture_trip_fini(struct fixture_trip *trip)
{
    fixture_codec_fini(&trip->codec);
    fixture_kv_fini(&trip->back);
    fixture_kv_fini(&trip->kv);
}

bool fixture_use_level(int level)
{
    if (level >= KVF_SIMD_LEVELS || kvf_codec_simd_set((enum kvf_simd_level)level) != KVF_OK) {
        return false;
    }
    printf("level: %s\n", kvf_codec_simd_name((enum kvf_simd_level)level));
    return true;
}

float fixture_load(int dtype, const uint8_t *vector, uint32_t i)
{
    uint16_t half;
    float value;
    switch (dtype) {
    case KVF_DTYPE_BF16:
        memcpy(&half, vector + 2 * i, sizeof(half));
        return kvf_f32_from_bf16(half);
    case KVF_DTYPE_F16:
        memcpy(&half, vector + 2 * i, sizeof(half));
        return kvf_f32_from_f16(half);
    case KVF_DTYPE_F8E4M3:
        return kvf_f32_from_f8e4m3(vector[i]);
    case KVF_DTYPE_F8E5M2:
        return kvf_f32_from_f8e5m2(vector[i]);
    default:
        memcpy(&value, vector + 4 * i, sizeof(value));
        return value;
    }
}

void fixture_store(int dtype, uint8_t *vector, uint32_t i, float value)
{
    uint16_t half;
    switch (dtype) {
    case KVF_DTYPE_BF16:
        half = kvf_bf16_from_f32(value);
        memcpy(vector + 2 * i, &half, sizeof(half));
        break;
    case KVF_DTYPE_F16:
        half = kvf_f16_from_f32(value);
        memcpy(vector + 2 * i, &half, sizeof(half));
        break;
    case KVF_DTYPE_F8E4M3:
        vector[i] = kvf_f8e4m3_from_f32(value);
        break;
    case KVF_DTYPE_F8E5M2:
        vector[i] = kvf_f8e5m2_from_f32(value);
        break;
    default:
        memcpy(vector + 4 * i, &value, sizeof(value));
        break;
    }
}

void fixture_load_vector(int dtype, const uint8_t *vector, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++) {
        out[i] = fixture_load(dtype, vector, i);
    }
}

void fixture_assert_vector(int dtype, const uint8_t *vector, uint32_t n, const float *want)
{
    uint8_t expected[KVF_DIM_MAX * 4];
    for (uint32_t i = 0; i < n; i++) {
        fixture_store(dtype, expected, i, want[i]);
    }
    assert_memory_equal(vector, expected, n * kvf_dtype_bytes(dtype));
}

void fixture_load_means(const uint8_t *stored, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, stored + 2 * i, sizeof(half));
        out[i] = kvf_f32_from_f16(half);
    }
}

uint8_t fixture_stored_code(const uint8_t **at, uint32_t n, uint32_t bits, uint32_t position)
{
    static const uint8_t planes[9][2] = {
        [1] = {1}, [2] = {2}, [3] = {2, 1}, [4] = {4}, [5] = {4, 1}, [6] = {4, 2}, [8] = {8}};
    uint32_t code = 0;
    for (int i = 0; i < 2 && planes[bits][i] != 0; i++) {
        uint32_t width = planes[bits][i];
        for (uint32_t bit = width; bit-- > 0;) { /* the highest one first */
            uint32_t where = position * width + bit;
            code = code << 1 | ((*at)[where / 8] >> where % 8 & 1);
        }
        *at += (n * width + 7) / 8;
    }
    return (uint8_t)code;
}

float fixture_uniform(struct kvf_random_seeded *random)
{
    return (float)(kvf_random_seeded_next(random) >> 40) * 0x1p-24f;
}

float fixture_normal_like(struct kvf_random_seeded *random)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) {
        sum += fixture_uniform(random);
    }
    return sum;
}

float fixture_normal(struct kvf_random_seeded *random)
{
    double u = ((double)(kvf_random_seeded_next(random) >> 11) + 0.5) * 0x1p-53;
    double v = (double)(kvf_random_seeded_next(random) >> 11) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

void fixture_fill_bits(struct fixture_kv *kv, struct kvf_random_seeded *random)
{
    kvf_random_seeded_ops.fill(random, kv->memory, kv->memory_bytes);
}

void fixture_fill_normal(struct fixture_kv *kv, struct kvf_random_seeded *random)
{
    size_t element_bytes = kvf_dtype_bytes(kv->geometry.dtype);
    for (size_t at = 0; at < kv->memory_bytes; at += element_bytes) {
        fixture_store(kv->geometry.dtype, kv->memory + at, 0, fixture_normal(random));
    }
}

/* 2^exponent, for exponents of normal fp32. */
static float power_of_two(int exponent)
{
    return kvf_f32_from_bits((uint32_t)(exponent + 127) << 23);
}

static void fill_hard_vector(int dtype, uint8_t *vector, uint32_t dim, uint32_t number,
                             struct kvf_random_seeded *random)
{
    float constant = fixture_normal_like(random);
    uint32_t chosen = (uint32_t)(fixture_uniform(random) * (float)dim);
    float grid = number % 16 < 8 ? 15.0f : 255.0f;
    for (uint32_t i = 0; i < dim; i++) {
        float value = fixture_normal_like(random);
        float uniform = fixture_uniform(random);
        switch (number % 8) {
        case 0: /* as most vectors are */
            break;
        case 1: /* 24 binades; fp8 has fewer and saturates or rounds to 0 */
            value *= power_of_two((int)(uniform * 24.0f) - 16);
            break;
        case 2:
            value = value < 0 ? -0.0f : 0.0f;
            break;
        case 3:
            value = constant;
            break;
        case 4: /* one channel 300 times the others; 30 times where 300 would overflow */
            value *= i == chosen ? (dtype == KVF_DTYPE_F8E4M3 ? 30.0f : 300.0f) : 1.0f;
            break;
        case 5: /* midpoints of a grid over [0, 1] */
            value = i == 0 ? 0.0f : i == 1 ? 1.0f : ((float)(int)(uniform * grid) + 0.5f) / grid;
            break;
        case 6:
            value = number % 64 == 6 ? value * power_of_two(-126) : value * 0x1p-8f;
            break;
        default: /* integers, whose rotation has exact ties */
            value = (float)(int)(value * 4.0f);
            break;
        }
        fixture_store(dtype, vector, i, value);
    }
    if (number % 32 == 31) {
        /* all exponent bits set: a NaN, or an infinity where the mantissa is 0 */
        size_t bytes = kvf_dtype_bytes(dtype);
        memset(vector + chosen * bytes, 0, bytes);
        uint8_t *top = vector + chosen * bytes + bytes - 1;
        *top = constant < 0 ? 0xff : 0x7f;
        if (bytes > 1) {
            top[-1] = dtype == KVF_DTYPE_F16 ? 0x01 : 0x80;
        }
    }
}

void fixture_fill_hard(struct fixture_kv *kv, struct kvf_random_seeded *random)
{
    uint32_t number = 0;
    for (uint32_t layer = 0; layer < kv->geometry.n_layers; layer++) {
        for (int is_v = 0; is_v < 2; is_v++) {
            uint32_t dim = is_v ? kv->geometry.dim_v : kv->geometry.dim_k;
            for (uint32_t head = 0; head < kv->geometry.n_heads && dim != 0; head++) {
                for (uint32_t token = 0; token < kv->n_tokens; token++) {
                    fill_hard_vector(kv->geometry.dtype,
                                     fixture_kv_vector(kv, is_v, layer, head, token), dim, number++,
                                     random);
                }
            }
        }
    }
}

void fixture_fill_biased(struct fixture_kv *kv, struct kvf_random_seeded *random)
{
    float bias[KVF_DIM_MAX];
    for (uint32_t layer = 0; layer < kv->geometry.n_layers; layer++) {
        for (int is_v = 0; is_v < 2; is_v++) {
            uint32_t dim = is_v ? kv->geometry.dim_v : kv->geometry.dim_k;
            for (uint32_t head = 0; head < kv->geometry.n_heads; head++) {
                for (uint32_t i = 0; i < dim; i++) {
                    bias[i] = 5000.0f * fixture_normal_like(random);
                }
                for (uint32_t token = 0; token < kv->n_tokens; token++) {
                    uint8_t *vector = fixture_kv_vector(kv, is_v, layer, head, token);
                    for (uint32_t i = 0; i < dim; i++) {
                        float signal = 0.02f * fixture_normal_like(random);
                        fixture_store(kv->geometry.dtype, vector, i, bias[i] + signal);
                    }
                }
            }
        }
    }
}

void fixture_fill_halfway(struct fixture_kv *kv, struct kvf_random_seeded *random)
{
    const struct kvf_geometry *geometry = &kv->geometry;
    uint32_t n_vectors = geometry->n_layers * geometry->n_heads * kv->n_tokens;
    for (uint32_t v = 0; v < 2 * n_vectors; v++) {
        uint32_t layer = v / 2 / kv->n_tokens / geometry->n_heads;
        uint32_t head = v / 2 / kv->n_tokens % geometry->n_heads;
        uint32_t dim = v % 2 ? geometry->dim_v : geometry->dim_k;
        uint8_t *vector = fixture_kv_vector(kv, v % 2, layer, head, v / 2 % kv->n_tokens);
        float values[KVF_DIM_MAX];
        double power = 0.0;
        for (uint32_t i = 0; i < dim; i++) {
            values[i] = fixture_normal_like(random);
            power += (double)values[i] * (double)values[i] / dim;
        }
        double half = 1.0 + ((double)(kvf_random_seeded_next(random) % 1024) + 0.5) / 1024.0;
        for (uint32_t i = 0; i < dim; i++) {
            fixture_store(geometry->dtype, vector, i,
                          (float)((double)values[i] * half / sqrt(power)));
        }
    }
}

double fixture_distortion(const struct fixture_kv *original, const struct fixture_kv *decoded,
                          int is_v, uint32_t token_first)
{
    const struct kvf_geometry *geometry = &original->geometry;
    uint32_t dim = is_v ? geometry->dim_v : geometry->dim_k;
    double error = 0.0;
    double signal = 0.0;
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        for (uint32_t head = 0; head < geometry->n_heads; head++) {
            for (uint32_t token = token_first; token < original->n_tokens; token++) {
                const uint8_t *a = fixture_kv_vector(original, is_v, layer, head, token);
                const uint8_t *b = fixture_kv_vector(decoded, is_v, layer, head, token);
                for (uint32_t i = 0; i < dim; i++) {
                    double x = fixture_load(geometry->dtype, a, i);
                    double y = fixture_load(geometry->dtype, b, i);
                    error += (x - y) * (x - y);
                    signal += x * x;
                }
            }
        }
    }
    return error / signal;
}
