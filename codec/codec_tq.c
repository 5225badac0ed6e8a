/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq.c: the tq codec but for its arithmetic: codebooks, shapes, parts, rows.
 * codec_tq_scalar.c is the reference of the arithmetic, codec_tq_tile.h the same in AVX2 and
 * AVX-512.
 */
#include "codec/codec_tq.h"

#include "base/crc32c.h"
#include "codec/codec_fp.h"
#include "codec/codec_tq_row.h"
#include "codec/rotate.h"
#include "codec/simd.h"

#include <assert.h>

/* -------------------------------------------------------------------------------------------------
 * Codebooks
 */
static const struct kvf_tq_codebook codebooks[] = {
    {
        .levels = {KVF_TQ_LEVELS_1},
        .unit = KVF_TQ_UNIT_1,
        .step = KVF_TQ_STEP_1,
        .crc32c = KVF_TQ_CRC_1,
    },
    {
        .levels = {KVF_TQ_LEVELS_2},
        .thresholds = {KVF_TQ_THRESHOLDS_2},
        .unit = KVF_TQ_UNIT_2,
        .step = KVF_TQ_STEP_2,
        .crc32c = KVF_TQ_CRC_2,
    },
    {
        .levels = {KVF_TQ_LEVELS_3},
        .thresholds = {KVF_TQ_THRESHOLDS_3},
        .unit = KVF_TQ_UNIT_3,
        .step = KVF_TQ_STEP_3,
        .crc32c = KVF_TQ_CRC_3,
    },
    {
        .levels = {KVF_TQ_LEVELS_4},
        .thresholds = {KVF_TQ_THRESHOLDS_4},
        .unit = KVF_TQ_UNIT_4,
        .step = KVF_TQ_STEP_4,
        .crc32c = KVF_TQ_CRC_4,
    },
};

const struct kvf_tq_codebook *kvf_tq_codebook(uint32_t bits)
{
    assert(bits >= 1 && bits <= sizeof(codebooks) / sizeof(codebooks[0]));
    return &codebooks[bits - 1];
}

/* Of the codebooks of a tensor: a split one has two. */
static uint32_t codebook_crc(const struct kvf_codec_tensor *tensor)
{
    uint32_t crcs[2];
    for (uint32_t r = 0; r < tensor->n_rotations; r++) {
        crcs[r] = kvf_tq_codebook(tensor->rotations[r].bits)->crc32c;
    }
    return tensor->n_rotations == 1 ? crcs[0] : kvf_crc32c(0, crcs, sizeof(crcs));
}

/* -------------------------------------------------------------------------------------------------
 * Shape
 */
static bool has_flag(const struct kvf_codec_tensor *tensor, uint8_t flag)
{
    return (tensor->descriptor.flags & flag) != 0;
}

/* Not inlined, so that it computes between the calls that set the floating-point environment. */
static void __attribute__((noinline)) fill_constants(struct kvf_codec_rotation *rotation)
{
    const struct kvf_tq_codebook *codebook = kvf_tq_codebook(rotation->bits);
    float rsqrt_order = kvf_rotate_rsqrt(rotation->order);
    rotation->root_mean_square = 1.0f /
                                 kvf_sqrt_f32((float)((uint32_t)rotation->n * rotation->order));
    rotation->quantize = kvf_sqrt_f32((float)rotation->n) / ((float)KVF_TQ_GRID * codebook->step);
    rotation->scale = rsqrt_order / codebook->unit;
    rotation->factor = codebook->unit * rsqrt_order;
    rotation->residual = kvf_rotate_sqrt(rotation->order) * codebook->unit;
    rotation->residual_factor = KVF_TQ_SQRT_HALF_PI * rotation->root_mean_square;
}

static void add_rotation(struct kvf_codec_tensor *tensor, uint32_t n, uint32_t bits, bool rotate)
{
    struct kvf_codec_rotation *rotation = &tensor->rotations[tensor->n_rotations];
    uint32_t first = tensor->n_rotations == 0 ? 0 : tensor->rotations[0].n;
    tensor->n_rotations++;
    rotation->n = (uint16_t)n;
    rotation->order = rotate ? kvf_rotate_order(n) : 1;
    rotation->bits = (uint8_t)bits;
    rotation->code_bytes = (uint16_t)kvf_saw_code_bytes(n, bits);
    tensor->code_bytes = (uint16_t)(tensor->code_bytes + rotation->code_bytes);
    kvf_saw_fill_order(tensor->order + first, n);
    struct kvf_fp_state state = kvf_fp_enter();
    fill_constants(rotation);
    kvf_fp_leave(state);
}

/* Channels of the first rotation of a split group, 0 if there are none; see codec_tq.h. */
static uint32_t split_off(uint32_t group)
{
    uint32_t wanted = group / KVF_TQ_SPLIT_SHARE;
    for (uint32_t away = 0; away < wanted; away++) {
        for (int side = -1; side <= 1; side += 2) {
            uint32_t n = side < 0 ? wanted - away : wanted + away;
            if (kvf_rotate_order(n) == n && kvf_rotate_order(group - n) == group - n) {
                return n;
            }
        }
    }
    return 0;
}

/* The rotations of a tensor, and what else a vector has. False: there is no such form. */
static bool add_rotations(struct kvf_codec_tensor *tensor, uint8_t flags, uint32_t bits,
                          bool rotate)
{
    uint32_t group = tensor->group;
    if (bits < 2 || bits > 4) {
        return false;
    }
    if ((flags & KVF_TENSOR_SPLIT) != 0) {
        uint32_t n = split_off(group);
        if (n == 0 || bits == 4 || (flags & KVF_TENSOR_RESIDUAL) != 0) {
            return false;
        }
        add_rotation(tensor, n, bits + 1, rotate);
        add_rotation(tensor, group - n, bits, rotate);
        tensor->rot_order = (uint16_t)n;
        tensor->n_scales = 2;
        return true;
    }
    bool residual = (flags & KVF_TENSOR_RESIDUAL) != 0;
    add_rotation(tensor, group, residual ? bits - 1 : bits, rotate);
    if (residual) {
        tensor->code_bytes = (uint16_t)(tensor->code_bytes + kvf_saw_plane_bytes(group, 1));
    }
    tensor->rot_order = tensor->rotations[0].order;
    tensor->n_scales = residual ? 2 : 1;
    return true;
}

static int tq_resolve(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings)
{
    uint8_t flags = settings->flags;
    tensor->group = kvf_saw_group(tensor->dim);
    if (tensor->group == 0 || tensor->dtype == KVF_DTYPE_U8 ||
        !add_rotations(tensor, flags, settings->bits, settings->rotate != 0)) {
        return KVF_ERR_UNSUPPORTED;
    }
    tensor->n_rows = (uint16_t)(tensor->n_heads * (tensor->dim / tensor->group));
    if (tensor->rot_order == 1) {
        flags &= (uint8_t)~KVF_TENSOR_SIGNS; /* without a rotation they would do nothing */
    }
    if ((flags & KVF_TENSOR_SIGNS) != 0) {
        kvf_saw_fill_signs(tensor, settings->rot_seed);
    }
    bool seeded = (flags & (KVF_TENSOR_SIGNS | KVF_TENSOR_RESIDUAL)) != 0;
    tensor->descriptor = (struct kvf_block_tensor){
        .codec = KVF_CODEC_TQ,
        .bits = settings->bits,
        .flags = flags,
        .rot_kind = tensor->n_rotations == 2 ? KVF_ROT_SPLIT
                                             : kvf_saw_rot_kind(tensor->rot_order, tensor->group),
        .rot_order = tensor->rot_order,
        .rot_seed = seeded ? settings->rot_seed : 0,
        .codebook_crc32c = codebook_crc(tensor),
        .codebook_id = KVF_CODEBOOK_GAUSS,
        .scale_dtype = KVF_DTYPE_F16,
        .group_axis = KVF_AXIS_TOKEN,
        .group_size = tensor->group,
        .layout = KVF_LAYOUT_MMA,
    };
    return KVF_OK;
}

/* Bytes of a row's list of channels. */
static size_t list_bytes(const struct kvf_codec_tensor *tensor)
{
    return has_flag(tensor, KVF_TENSOR_SPLIT) ? (tensor->group + 7u) / 8 : 0;
}

/* Bytes of the two halves of the mean part. */
static size_t mean_bytes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    return kvf_saw_has_mean(tensor, n_tokens)
               ? (size_t)tensor->n_heads * tensor->dim * sizeof(uint16_t)
               : 0;
}

static size_t split_bytes(const struct kvf_codec_tensor *tensor)
{
    return tensor->n_rows * list_bytes(tensor);
}

static size_t meta_bytes(const struct kvf_codec_tensor *tensor)
{
    return (size_t)tensor->n_scales * KVF_TQ_SCALE_BYTES; /* of a vector */
}

static void tq_sizes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                     struct kvf_codec_sizes *sizes_out)
{
    size_t n_vectors = (size_t)tensor->n_rows * n_tokens;
    *sizes_out = (struct kvf_codec_sizes){
        .mean_bytes = kvf_part_bytes(mean_bytes(tensor, n_tokens) + split_bytes(tensor)),
        .meta_bytes = kvf_part_bytes(n_vectors * meta_bytes(tensor)),
        .codes_bytes = kvf_part_bytes(n_vectors * tensor->code_bytes),
    };
}

/* -------------------------------------------------------------------------------------------------
 * Channels
 */
void kvf_tq_all_channels(const struct kvf_codec_tensor *tensor,
                         uint8_t channels_out[KVF_CODEC_GROUP_MAX])
{
    for (uint32_t i = 0; i < tensor->group; i++) {
        channels_out[i] = (uint8_t)i;
    }
}

bool kvf_tq_read_channels(const struct kvf_codec_tensor *tensor, const uint8_t *split,
                          uint8_t channels_out[KVF_CODEC_GROUP_MAX])
{
    uint32_t n[2] = {0, 0};
    uint32_t first = tensor->rotations[0].n;
    uint8_t others[KVF_CODEC_GROUP_MAX];
    uint8_t listed[KVF_CODEC_GROUP_MAX];
    for (uint32_t i = 0; i < tensor->group; i++) {
        uint8_t is_listed = split[i / 8] >> (i % 8) & 1;
        uint8_t *list = is_listed ? listed : others;
        list[n[is_listed]++] = (uint8_t)i;
    }
    if (n[1] != first) {
        return false;
    }
    memcpy(channels_out, listed, first);
    memcpy(channels_out + first, others, n[0]);
    return true;
}

void kvf_tq_split_channels(const struct kvf_codec_tensor *tensor, float *energy, uint8_t *split,
                           uint8_t channels_out[KVF_CODEC_GROUP_MAX])
{
    memset(split, 0, list_bytes(tensor));
    for (uint32_t n = 0; n < tensor->rotations[0].n; n++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < tensor->group; i++) {
            best = energy[i] > energy[best] ? i : best;
        }
        energy[best] = -1.0f;
        split[best / 8] = (uint8_t)(split[best / 8] | 1u << best % 8);
    }
    bool is_list = kvf_tq_read_channels(tensor, split, channels_out);
    assert(is_list);
    (void)is_list;
}

/* -------------------------------------------------------------------------------------------------
 * Rows
 */
static const struct kvf_tq_kernels *const kernels[KVF_SIMD_LEVELS] = {
    [KVF_SIMD_SCALAR] = &kvf_tq_kernels_scalar,
#if defined(__x86_64__)
    [KVF_SIMD_AVX2] = &kvf_tq_kernels_avx2,
    [KVF_SIMD_AVX512] = &kvf_tq_kernels_avx512,
#endif
};

/* Projecting the residual costs n products an element, and who asks for it does not ask for speed:
 * the reference does it at every level. */
static const struct kvf_tq_kernels *kernels_of(const struct kvf_codec_tensor *tensor)
{
    return has_flag(tensor, KVF_TENSOR_RESIDUAL) ? &kvf_tq_kernels_scalar
                                                 : kernels[kvf_codec_simd_level()];
}

/* The level may change after a plan is made. */
static size_t tq_workspace_bytes(const struct kvf_codec_tensor *tensor)
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
    kvf_saw_zero_gaps(sizes, mean_bytes(tensor, n_tokens) + split_bytes(tensor),
                      n_vectors * meta_bytes(tensor), n_vectors * tensor->code_bytes, strip);
}

static int tq_encode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                     uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                     struct kvf_codec_sizes *sizes_out)
{
    tq_sizes(tensor, job->n_tokens, sizes_out);
    const struct kvf_tq_kernels *use = kernels_of(tensor);
    struct kvf_tq_strip at = {
        .mean = kvf_saw_has_mean(tensor, job->n_tokens) ? strip : NULL,
        .meta = strip + sizes_out->mean_bytes,
        .codes = strip + sizes_out->mean_bytes + sizes_out->meta_bytes,
    };
    if (has_flag(tensor, KVF_TENSOR_SPLIT)) {
        at.split = strip + mean_bytes(tensor, job->n_tokens);
    }
    uint8_t given[KVF_CODEC_GROUP_MAX * sizeof(uint16_t)];
    struct kvf_saw_row row = {.tensor = tensor, .job = job, .work = workspace};
    row.has_mean = kvf_saw_has_profile_mean(tensor);
    row.has_split = at.split != NULL && job->split != NULL;
    for (row.row = 0; row.row < tensor->n_rows; row.row++) {
        if (row.has_mean) {
            at.mean = memcpy(given, kvf_saw_profile_mean(&row), tensor->group * sizeof(uint16_t));
        }
        if (row.has_split) {
            memcpy(at.split, job->split + row.row * list_bytes(tensor), list_bytes(tensor));
        }
        int status = use->encode_row(&row, &at, escapes);
        if (status != KVF_OK) {
            return status;
        }
        at.mean += at.mean != NULL ? tensor->group * sizeof(uint16_t) : 0;
        at.split += at.split != NULL ? list_bytes(tensor) : 0;
        at.meta += job->n_tokens * meta_bytes(tensor);
        at.codes += (size_t)job->n_tokens * tensor->code_bytes;
    }
    zero_gaps(tensor, job->n_tokens, sizes_out, strip);
    return KVF_OK;
}

static int tq_decode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                     const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace)
{
    const struct kvf_tq_kernels *use = kernels_of(tensor);
    const uint8_t *mean = kvf_saw_has_mean(tensor, job->n_tokens) ? strip : NULL;
    const uint8_t *split = strip + mean_bytes(tensor, job->n_tokens);
    const uint8_t *meta = strip + sizes->mean_bytes;
    const uint8_t *codes = meta + sizes->meta_bytes;
    if (kvf_saw_has_profile_mean(tensor)) {
        mean = job->mean;
    }
    uint8_t channels[KVF_CODEC_GROUP_MAX];
    kvf_tq_all_channels(tensor, channels);
    struct kvf_saw_row row = {.tensor = tensor, .job = job, .work = workspace};
    for (row.row = 0; row.row < tensor->n_rows; row.row++) {
        size_t vector = (size_t)row.row * job->n_tokens + job->token_first;
        struct kvf_tq_stored stored = {
            .mean = mean != NULL ? mean + (size_t)row.row * tensor->group * sizeof(uint16_t) : NULL,
            .meta = meta + vector * meta_bytes(tensor),
            .codes = codes + vector * tensor->code_bytes,
        };
        if (has_flag(tensor, KVF_TENSOR_SPLIT) &&
            !kvf_tq_read_channels(tensor, split + row.row * list_bytes(tensor), channels)) {
            return KVF_ERR_CORRUPT;
        }
        use->decode_row(&row, &stored, channels);
    }
    return KVF_OK;
}

const struct kvf_codec_ops kvf_codec_tq = {
    .name = "tq",
    .id = KVF_CODEC_TQ,
    .abi_version = KVF_CODEC_ABI,
    .capabilities = KVF_CODEC_FIXED_RATE | KVF_CODEC_ESCAPES | KVF_CODEC_FLOAT,
    .resolve = tq_resolve,
    .sizes = tq_sizes,
    .workspace_bytes = tq_workspace_bytes,
    .encode = tq_encode,
    .decode = tq_decode,
};
