/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw.c: the saw codec but for its arithmetic: shapes, parts, rows. codec_saw_scalar.c is the
 * reference of the arithmetic, codec_saw_tile.h the same in AVX2 and AVX-512.
 */
#include "codec/codec_saw.h"

#include "base/random.h"
#include "codec/codec_saw_row.h"
#include "codec/rotate.h"
#include "codec/simd.h"

/* -------------------------------------------------------------------------------------------------
 * Shape
 */
bool kvf_saw_has_mean(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    return (tensor->descriptor.flags & KVF_TENSOR_CENTER) != 0 &&
           n_tokens >= KVF_CODEC_CENTER_TOKENS_MIN;
}

void kvf_saw_fill_order(uint8_t *order, uint32_t n)
{
    static const uint8_t position_bits[8] = KVF_SAW_POSITION_BITS;
    uint32_t base = 0;
    while (base < n) {
        uint32_t width = 0;
        while ((2u << width) <= n - base) {
            width++;
        }
        for (uint32_t position = 0; position < 1u << width; position++) {
            uint32_t coefficient = 0;
            uint32_t left = width;
            for (uint32_t i = 0; i < sizeof(position_bits); i++) {
                if (position_bits[i] < width) {
                    left--;
                    coefficient |= (position >> left & 1) << position_bits[i];
                }
            }
            order[base + position] = (uint8_t)(base + coefficient);
        }
        base += 1u << width;
    }
}

void kvf_saw_fill_signs(struct kvf_codec_tensor *tensor, uint32_t seed)
{
    struct kvf_random_seeded random;
    kvf_random_seeded_init(&random, seed);
    kvf_random_seeded_ops.fill(&random, tensor->sign_bits, sizeof(tensor->sign_bits));
}

uint16_t kvf_saw_group(uint16_t dim)
{
    if (dim <= KVF_CODEC_GROUP_MAX) {
        return dim;
    }
    return dim % 128 == 0 ? 128 : dim % 64 == 0 ? 64 : 0;
}

uint8_t kvf_saw_rot_kind(uint32_t order, uint32_t n)
{
    return order == 1                       ? KVF_ROT_NONE
           : order != n                     ? KVF_ROT_BLOCKS
           : kvf_rotate_is_kronecker(order) ? KVF_ROT_KRONECKER
                                            : KVF_ROT_SYLVESTER;
}

/* The ratio for a width of codes, whatever the profile says of search. */
static uint16_t fixed_clip_q15(const struct kvf_profile_tensor *settings, bool narrow)
{
    switch (settings->clip != KVF_CLIP_NONE ? settings->bits : 0) {
    case 4:
        return narrow ? KVF_SAW_CLIP_4_NARROW : KVF_SAW_CLIP_4;
    case 3:
        return narrow ? KVF_SAW_CLIP_3_NARROW : KVF_SAW_CLIP_3;
    case 2:
        return narrow ? KVF_SAW_CLIP_2_NARROW : KVF_SAW_CLIP_2;
    default:
        return KVF_BLOCK_CLIP_ONE;
    }
}

/* (S) The ratios that a profile has tried, and their number in the descriptor. At widths that have
 * no list the ratio is fixed: with 5 bits and more there is nothing to gain. */
static void fill_clips(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings)
{
    static const uint16_t search[2][2][3] = {{KVF_SAW_SEARCH_2, KVF_SAW_SEARCH_2_NARROW},
                                             {KVF_SAW_SEARCH_3, KVF_SAW_SEARCH_3_NARROW}};
    static const uint16_t wide[3][KVF_CODEC_CLIPS_MAX] = {KVF_SAW_WIDE_2, KVF_SAW_WIDE_3,
                                                          KVF_SAW_WIDE_4};
    bool narrow = tensor->group <= 64;
    uint8_t bits = settings->bits;
    if (settings->clip == KVF_CLIP_SEARCH && (bits == 2 || bits == 3)) {
        tensor->n_clips = 3;
        memcpy(tensor->clips_q15, search[bits - 2][narrow], sizeof(search[0][0]));
    } else if (settings->clip == KVF_CLIP_WIDE && bits >= 2 && bits <= 4) {
        tensor->n_clips = KVF_CODEC_CLIPS_MAX;
        memcpy(tensor->clips_q15, wide[bits - 2], sizeof(wide[0]));
    }
    tensor->descriptor.clip_q15 = tensor->n_clips != 0 ? tensor->n_clips
                                                       : fixed_clip_q15(settings, narrow);
}

/* 7 would take three planes, and nothing asks for it; 1 bit would not be worth its scale. */
static bool has_width(uint8_t bits)
{
    return bits == 8 || (bits >= 2 && bits <= 6);
}

static int saw_resolve(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings)
{
    tensor->group = kvf_saw_group(tensor->dim);
    if (tensor->group == 0 || tensor->dtype == KVF_DTYPE_U8 || !has_width(settings->bits)) {
        return KVF_ERR_UNSUPPORTED;
    }
    tensor->n_rows = (uint16_t)(tensor->n_heads * (tensor->dim / tensor->group));
    tensor->code_bytes = (uint16_t)kvf_saw_code_bytes(tensor->group, settings->bits);
    tensor->rot_order = settings->rotate ? kvf_rotate_order(tensor->group) : 1;
    tensor->sqrt_order = kvf_rotate_sqrt(tensor->rot_order);
    tensor->rsqrt_order = kvf_rotate_rsqrt(tensor->rot_order);
    kvf_saw_fill_order(tensor->order, tensor->group);
    uint8_t flags = settings->flags;
    if (tensor->rot_order == 1) {
        flags &= (uint8_t)~KVF_TENSOR_SIGNS; /* without a rotation they would do nothing */
    }
    if ((flags & KVF_TENSOR_SIGNS) != 0) {
        kvf_saw_fill_signs(tensor, settings->rot_seed);
    }
    tensor->descriptor = (struct kvf_block_tensor){
        .codec = KVF_CODEC_SAW,
        .bits = settings->bits,
        .flags = flags,
        .rot_kind = kvf_saw_rot_kind(tensor->rot_order, tensor->group),
        .rot_order = tensor->rot_order,
        .rot_seed = (flags & KVF_TENSOR_SIGNS) != 0 ? settings->rot_seed : 0,
        .scale_dtype = KVF_DTYPE_F16,
        .zero_kind = settings->zero_kind != KVF_ZERO_NONE ? settings->zero_kind : KVF_ZERO_F16_LO,
        .group_axis = KVF_AXIS_TOKEN,
        .group_size = tensor->group,
        .layout = KVF_LAYOUT_MMA,
    };
    fill_clips(tensor, settings);
    return KVF_OK;
}

/* Bytes of the zeros of a row; 0: there is lo instead. */
static uint32_t zero_bytes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    return kvf_saw_has_zeros(tensor) ? kvf_saw_code_bytes(n_tokens, tensor->descriptor.bits) : 0;
}

/* Bytes of meta of a vector, zeros apart. */
static uint32_t meta_stride(const struct kvf_codec_tensor *tensor)
{
    return kvf_saw_has_zeros(tensor) ? KVF_SAW_SCALE_BYTES : KVF_SAW_META_BYTES;
}

static size_t meta_bytes_used(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    size_t n_vectors = (size_t)tensor->n_rows * n_tokens;
    return n_vectors * meta_stride(tensor) + (size_t)tensor->n_rows * zero_bytes(tensor, n_tokens);
}

static void saw_sizes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                      struct kvf_codec_sizes *sizes_out)
{
    size_t n_vectors = (size_t)tensor->n_rows * n_tokens;
    size_t mean_bytes = (size_t)tensor->n_heads * tensor->dim * sizeof(uint16_t);
    *sizes_out = (struct kvf_codec_sizes){
        .mean_bytes = kvf_saw_has_mean(tensor, n_tokens) ? kvf_part_bytes(mean_bytes) : 0,
        .meta_bytes = kvf_part_bytes(meta_bytes_used(tensor, n_tokens)),
        .codes_bytes = kvf_part_bytes(n_vectors * tensor->code_bytes),
    };
}

/* -------------------------------------------------------------------------------------------------
 * Rows
 */
static const struct kvf_saw_kernels *const kernels[KVF_SIMD_LEVELS] = {
    [KVF_SIMD_SCALAR] = &kvf_saw_kernels_scalar,
#if defined(__x86_64__)
    [KVF_SIMD_AVX2] = &kvf_saw_kernels_avx2,
    [KVF_SIMD_AVX512] = &kvf_saw_kernels_avx512,
#endif
};

/* The level may change after a plan is made. */
static size_t saw_workspace_bytes(const struct kvf_codec_tensor *tensor)
{
    (void)tensor;
    size_t bytes = 0;
    for (int level = 0; level < KVF_SIMD_LEVELS; level++) {
        if (kernels[level] != NULL && kernels[level]->workspace_bytes > bytes) {
            bytes = kernels[level]->workspace_bytes;
        }
    }
    return bytes;
}

/* What the parts do not fill. */
static void zero_gaps(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                      const struct kvf_codec_sizes *sizes, uint8_t *strip)
{
    size_t n_vectors = (size_t)tensor->n_rows * n_tokens;
    size_t mean_bytes = (size_t)tensor->n_heads * tensor->dim * sizeof(uint16_t);
    kvf_saw_zero_gaps(sizes, sizes->mean_bytes != 0 ? mean_bytes : 0,
                      meta_bytes_used(tensor, n_tokens), n_vectors * tensor->code_bytes, strip);
}

/* -------------------------------------------------------------------------------------------------
 * Zeros in planes. Kernels have a word a vector whatever is stored, u in the place of lo.
 */
static void put_plane(const uint32_t *words, uint32_t n, uint32_t plane_bits, uint32_t shift,
                      uint8_t *to)
{
    uint32_t mask = (1u << plane_bits) - 1;
    memset(to, 0, kvf_saw_plane_bytes(n, plane_bits));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bit = i * plane_bits;
        to[bit / 8] = (uint8_t)(to[bit / 8] | (words[i] >> shift & mask) << bit % 8);
    }
}

static uint32_t get_plane(const uint8_t *from, uint32_t i, uint32_t plane_bits)
{
    uint32_t bit = i * plane_bits;
    return from[bit / 8] >> bit % 8 & ((1u << plane_bits) - 1);
}

/* Words of a row's n vectors to its scales and zeros. */
static void put_words(const uint32_t *words, uint32_t n, uint32_t bits, uint8_t *scales,
                      uint8_t *zeros)
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    for (uint32_t i = 0; i < n; i++) {
        uint16_t scale = (uint16_t)(words[i] >> 16);
        memcpy(scales + (size_t)i * KVF_SAW_SCALE_BYTES, &scale, sizeof(scale));
    }
    put_plane(words, n, bits - low_bits, low_bits, zeros);
    if (low_bits != 0) {
        put_plane(words, n, low_bits, 0, zeros + kvf_saw_plane_bytes(n, bits - low_bits));
    }
}

/* Words of the vectors that are wanted of a row. */
static void get_words(const struct kvf_codec_job *job, uint32_t bits, const uint8_t *scales,
                      const uint8_t *zeros, uint32_t *words)
{
    uint32_t low_bits = kvf_saw_low_bits(bits);
    const uint8_t *low = zeros + kvf_saw_plane_bytes(job->n_tokens, bits - low_bits);
    for (uint32_t i = 0; i < job->n_wanted; i++) {
        uint32_t token = job->token_first + i;
        uint16_t scale;
        memcpy(&scale, scales + (size_t)token * KVF_SAW_SCALE_BYTES, sizeof(scale));
        uint32_t zero = get_plane(zeros, token, bits - low_bits) << low_bits;
        zero |= low_bits != 0 ? get_plane(low, token, low_bits) : 0;
        words[i] = zero | (uint32_t)scale << 16;
    }
}

static int saw_encode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                      uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                      struct kvf_codec_sizes *sizes_out)
{
    saw_sizes(tensor, job->n_tokens, sizes_out);
    const struct kvf_saw_kernels *use = kernels[kvf_codec_simd_level()];
    uint8_t *mean = kvf_saw_has_mean(tensor, job->n_tokens) ? strip : NULL;
    uint8_t *meta = strip + sizes_out->mean_bytes;
    uint8_t *zeros = meta + (size_t)tensor->n_rows * job->n_tokens * KVF_SAW_SCALE_BYTES;
    uint8_t *codes = meta + sizes_out->meta_bytes;
    uint32_t words[KVF_CHUNK_TOKENS_MAX];
    bool has_zeros = kvf_saw_has_zeros(tensor);
    uint8_t given[KVF_CODEC_GROUP_MAX * sizeof(uint16_t)];
    struct kvf_saw_row row = {.tensor = tensor, .job = job, .work = workspace};
    row.has_mean = kvf_saw_has_profile_mean(tensor);
    for (row.row = 0; row.row < tensor->n_rows; row.row++) {
        if (row.has_mean) {
            memcpy(given, kvf_saw_profile_mean(&row), tensor->group * sizeof(uint16_t));
        }
        int status = use->encode_row(&row, row.has_mean ? given : mean,
                                     has_zeros ? (uint8_t *)words : meta, codes, escapes);
        if (status != KVF_OK) {
            return status;
        }
        if (has_zeros) {
            put_words(words, job->n_tokens, tensor->descriptor.bits, meta, zeros);
            zeros += zero_bytes(tensor, job->n_tokens);
        }
        if (mean != NULL) {
            mean += tensor->group * sizeof(uint16_t);
        }
        meta += (size_t)job->n_tokens * meta_stride(tensor);
        codes += (size_t)job->n_tokens * tensor->code_bytes;
    }
    zero_gaps(tensor, job->n_tokens, sizes_out, strip);
    return KVF_OK;
}

static int saw_decode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                      const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace)
{
    const struct kvf_saw_kernels *use = kernels[kvf_codec_simd_level()];
    const uint8_t *mean = kvf_saw_has_mean(tensor, job->n_tokens) ? strip : NULL;
    const uint8_t *meta = strip + sizes->mean_bytes;
    const uint8_t *zeros = meta + (size_t)tensor->n_rows * job->n_tokens * KVF_SAW_SCALE_BYTES;
    const uint8_t *codes = meta + sizes->meta_bytes;
    uint32_t words[KVF_CHUNK_TOKENS_MAX];
    struct kvf_saw_row row = {.tensor = tensor, .job = job, .work = workspace};
    if (kvf_saw_has_profile_mean(tensor)) {
        mean = job->mean;
    }
    for (row.row = 0; row.row < tensor->n_rows; row.row++) {
        size_t first = (size_t)row.row * job->n_tokens;
        size_t vector = first + job->token_first;
        const uint8_t *row_meta = meta + vector * KVF_SAW_META_BYTES;
        if (kvf_saw_has_zeros(tensor)) {
            get_words(job, tensor->descriptor.bits, meta + first * KVF_SAW_SCALE_BYTES,
                      zeros + (size_t)row.row * zero_bytes(tensor, job->n_tokens), words);
            row_meta = (const uint8_t *)words;
        }
        use->decode_row(&row, mean, row_meta, codes + vector * tensor->code_bytes);
        if (mean != NULL) {
            mean += tensor->group * sizeof(uint16_t);
        }
    }
    return KVF_OK;
}

const struct kvf_codec_ops kvf_codec_saw = {
    .name = "saw",
    .id = KVF_CODEC_SAW,
    .abi_version = KVF_CODEC_ABI,
    .capabilities = KVF_CODEC_FIXED_RATE | KVF_CODEC_ESCAPES | KVF_CODEC_FLOAT,
    .resolve = saw_resolve,
    .sizes = saw_sizes,
    .workspace_bytes = saw_workspace_bytes,
    .encode = saw_encode,
    .decode = saw_decode,
};
