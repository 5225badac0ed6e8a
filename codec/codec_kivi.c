/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_kivi.c: the kivi codec but for its arithmetic: shapes, parts, and the walk over rows,
 * tokens and groups. codec_kivi_scalar.c is the reference of the arithmetic, codec_kivi_lanes.h the
 * same in AVX2 and AVX-512. Numbers in comments are steps of codec_kivi.h.
 */
#include "codec/codec_kivi.h"

#include "codec/codec_fp.h"
#include "codec/codec_kivi_row.h"
#include "codec/simd.h"

#include <math.h>

/* -------------------------------------------------------------------------------------------------
 * Shape
 */
static int kivi_resolve(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings)
{
    uint32_t group = settings->group_size;
    bool known = group >= KVF_KIVI_GROUP_MIN && group <= KVF_KIVI_GROUP_MAX &&
                 (group & (group - 1)) == 0;
    if (!known || (settings->bits != 4 && settings->bits != 2) || tensor->dtype == KVF_DTYPE_U8) {
        return KVF_ERR_UNSUPPORTED;
    }
    tensor->group = tensor->dim;
    tensor->n_rows = tensor->n_heads;
    tensor->code_bytes = (uint16_t)kvf_kivi_code_bytes(tensor->dim, settings->bits);
    tensor->descriptor = (struct kvf_block_tensor){
        .codec = KVF_CODEC_KIVI,
        .bits = settings->bits,
        .clip_q15 = KVF_BLOCK_CLIP_ONE,
        .scale_dtype = KVF_DTYPE_F16,
        .zero_kind = KVF_ZERO_F16_LO,
        .group_axis = settings->group_axis,
        .group_size = settings->group_size,
        .layout = KVF_LAYOUT_NATURAL,
    };
    return KVF_OK;
}

static bool is_by_channel(const struct kvf_codec_tensor *tensor)
{
    return tensor->descriptor.group_axis == KVF_AXIS_CHANNEL;
}

/* Words of meta of one row. */
static size_t row_words(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    uint32_t group_size = tensor->descriptor.group_size;
    return is_by_channel(tensor) ? (size_t)kvf_kivi_groups(n_tokens, group_size) * tensor->dim
                                 : (size_t)n_tokens * kvf_kivi_groups(tensor->dim, group_size);
}

static void kivi_sizes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                       struct kvf_codec_sizes *sizes_out)
{
    size_t words = tensor->n_rows * row_words(tensor, n_tokens);
    size_t code_bytes = (size_t)tensor->n_rows * n_tokens * tensor->code_bytes;
    *sizes_out = (struct kvf_codec_sizes){
        .meta_bytes = kvf_part_bytes(words * KVF_KIVI_META_BYTES),
        .codes_bytes = kvf_part_bytes(code_bytes),
    };
}

static size_t kivi_workspace_bytes(const struct kvf_codec_tensor *tensor)
{
    (void)tensor;
    return sizeof(struct kvf_kivi_work);
}

static const struct kvf_kivi_kernels *const kernels[KVF_SIMD_LEVELS] = {
    [KVF_SIMD_SCALAR] = &kvf_kivi_kernels_scalar,
#if defined(__x86_64__)
    [KVF_SIMD_AVX2] = &kvf_kivi_kernels_avx2,
    [KVF_SIMD_AVX512] = &kvf_kivi_kernels_avx512,
#endif
};

/* A tensor at work. */
struct kivi_pass {
    const struct kvf_codec_tensor *tensor;
    const struct kvf_codec_job *job;
    const struct kvf_kivi_kernels *use;
    struct kvf_kivi_work *work;
    struct kvf_codec_escapes *escapes; /* encode */
    uint32_t row;
    uint32_t n; /* elements of a vector */
    uint32_t bits;
    uint32_t group_size;
    uint32_t shift;        /* of the kernels */
    uint32_t vector_bytes; /* in pages */
    ptrdiff_t to_next;     /* from a vector of this row to the same token's in the next row */
};

enum {
    CACHE_LINE = 64
};

static struct kivi_pass pass_of(const struct kvf_codec_tensor *tensor,
                                const struct kvf_codec_job *job, void *workspace)
{
    return (struct kivi_pass){
        .tensor = tensor,
        .job = job,
        .use = kernels[kvf_codec_simd_level()],
        .work = workspace,
        .n = tensor->dim,
        .bits = tensor->descriptor.bits,
        .group_size = tensor->descriptor.group_size,
        .shift = is_by_channel(tensor) ? 0 : (uint32_t)__builtin_ctz(tensor->descriptor.group_size),
        .vector_bytes = (uint32_t)tensor->dim * tensor->element_bytes,
    };
}

/* Before a row's first vector. */
static void find_next_row(struct kivi_pass *pass)
{
    const struct kvf_codec_job *job = pass->job;
    const uint8_t *here = kvf_pages_vector(pass->tensor, job, pass->row, 0);
    pass->to_next = 0;
    if (pass->row + 1 < pass->tensor->n_rows) {
        pass->to_next = kvf_pages_vector(pass->tensor, job, pass->row + 1, 0) - here;
    } else if (job->next_base != NULL) {
        pass->to_next = (intptr_t)job->next_base - (intptr_t)job->base -
                        (here - kvf_pages_vector(pass->tensor, job, 0, 0));
    }
}

/* Have the next row's vector come into the cache, to be read or to be written. Pages have all heads
 * of a token side by side, which is not an order that processors foresee. Nothing may be there. */
static inline void fetch_next(const struct kivi_pass *pass, const uint8_t *vector, bool to_write)
{
    uintptr_t next = (uintptr_t)vector + (uintptr_t)pass->to_next;
    for (uint32_t at = 0; at < pass->vector_bytes; at += CACHE_LINE) {
        if (to_write) {
            __builtin_prefetch((const void *)(next + at), 1, 2);
        } else {
            __builtin_prefetch((const void *)(next + at), 0, 2);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* (1) A vector to work->x; false if it is an escape. is_first: the row has not had it
 * before. */
static bool load_vector(const struct kivi_pass *pass, uint32_t token, bool is_first)
{
    const struct kvf_codec_tensor *tensor = pass->tensor;
    const uint8_t *vector = kvf_pages_vector(tensor, pass->job, pass->row, token);
    if (token < pass->job->n_sinks) {
        return false;
    }
    if (is_first) {
        fetch_next(pass, vector, false);
    }
    uint32_t peak = pass->use->load(tensor->dtype, vector, pass->n, pass->work->x);
    return peak == 0 || (peak >= kvf_f32_bits(KVF_KIVI_PEAK_MIN) &&
                         peak <= kvf_f32_bits(KVF_KIVI_MAGNITUDE_MAX));
}

/* False if there are too many. */
static bool add_escape(const struct kivi_pass *pass, uint32_t token)
{
    struct kvf_codec_escapes *escapes = pass->escapes;
    if (escapes->n == escapes->max) {
        return false;
    }
    escapes->index[escapes->n++] = pass->row * pass->job->n_tokens + token;
    return true;
}

static void fill_empty(uint8_t *meta, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        kvf_store_u32(meta + i * KVF_KIVI_META_BYTES, (uint32_t)KVF_KIVI_EMPTY_SCALE << 16);
    }
}

/* (1, 2) Ranges of the channels over n_tokens tokens; how many of them are no escapes goes to
 * n_coded_out. False if there are too many escapes. */
static bool measure_channels(const struct kivi_pass *pass, uint32_t token_first, uint32_t n_tokens,
                             uint32_t *n_coded_out)
{
    struct kvf_kivi_work *work = pass->work;
    uint32_t n_coded = 0;
    for (uint32_t i = 0; i < pass->n; i++) {
        work->min[i] = INFINITY;
        work->max[i] = -INFINITY;
    }
    for (uint32_t t = 0; t < n_tokens; t++) {
        work->escaped[t] = !load_vector(pass, token_first + t, true);
        if (!work->escaped[t]) {
            pass->use->widen_ranges(work->x, pass->n, work->min, work->max);
            n_coded++;
        } else if (!add_escape(pass, token_first + t)) {
            return false;
        }
    }
    *n_coded_out = n_coded;
    return true;
}

/* A row by channel; meta and codes are those of the row. */
static int encode_channels(const struct kivi_pass *pass, uint8_t *meta, uint8_t *codes)
{
    struct kvf_kivi_work *work = pass->work;
    size_t meta_bytes = (size_t)pass->n * KVF_KIVI_META_BYTES;
    uint32_t left = pass->job->n_tokens;
    for (uint32_t token = 0; left > 0;) {
        uint32_t n_tokens = left < pass->group_size ? left : pass->group_size;
        uint32_t n_coded;
        if (!measure_channels(pass, token, n_tokens, &n_coded)) {
            return KVF_ERR_NO_SPACE;
        }
        if (n_coded != 0) {
            pass->use->choose(work->min, work->max, pass->n, pass->bits, work->meta, work->lo,
                              work->scale);
            memcpy(meta, work->meta, meta_bytes);
        } else {
            fill_empty(meta, pass->n);
        }
        for (uint32_t t = 0; t < n_tokens; t++) {
            if (work->escaped[t]) {
                memset(codes, 0, pass->tensor->code_bytes);
            } else {
                (void)load_vector(pass, token + t, false);
                pass->use->quantize(work->x, work->lo, work->scale, pass->shift, pass->n,
                                    pass->bits, codes);
            }
            codes += pass->tensor->code_bytes;
        }
        meta += meta_bytes;
        token += n_tokens;
        left -= n_tokens;
    }
    return KVF_OK;
}

/* A row by token. */
static int encode_tokens(const struct kivi_pass *pass, uint8_t *meta, uint8_t *codes)
{
    struct kvf_kivi_work *work = pass->work;
    uint32_t n_groups = kvf_kivi_groups(pass->n, pass->group_size);
    size_t meta_bytes = (size_t)n_groups * KVF_KIVI_META_BYTES;
    for (uint32_t token = 0; token < pass->job->n_tokens; token++) {
        if (load_vector(pass, token, true)) {
            pass->use->find_ranges(work->x, pass->n, pass->group_size, work->min, work->max);
            pass->use->choose(work->min, work->max, n_groups, pass->bits, work->meta, work->lo,
                              work->scale);
            memcpy(meta, work->meta, meta_bytes);
            pass->use->quantize(work->x, work->lo, work->scale, pass->shift, pass->n, pass->bits,
                                codes);
        } else {
            fill_empty(meta, n_groups);
            memset(codes, 0, pass->tensor->code_bytes);
            if (!add_escape(pass, token)) {
                return KVF_ERR_NO_SPACE;
            }
        }
        meta += meta_bytes;
        codes += pass->tensor->code_bytes;
    }
    return KVF_OK;
}

static int kivi_encode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                       uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                       struct kvf_codec_sizes *sizes_out)
{
    size_t n_vectors = (size_t)tensor->n_rows * job->n_tokens;
    kivi_sizes(tensor, job->n_tokens, sizes_out);
    if (kvf_sizes_total(sizes_out) >=
        kvf_part_bytes(n_vectors * tensor->dim * tensor->element_bytes)) {
        return KVF_ERR_NO_SPACE;
    }
    struct kivi_pass pass = pass_of(tensor, job, workspace);
    pass.escapes = escapes;
    uint8_t *meta = strip;
    uint8_t *codes = strip + sizes_out->meta_bytes;
    size_t meta_bytes = row_words(tensor, job->n_tokens) * KVF_KIVI_META_BYTES;
    size_t code_bytes = (size_t)job->n_tokens * tensor->code_bytes;
    for (; pass.row < tensor->n_rows; pass.row++) {
        find_next_row(&pass);
        int status = is_by_channel(tensor) ? encode_channels(&pass, meta, codes)
                                           : encode_tokens(&pass, meta, codes);
        if (status != KVF_OK) {
            return status;
        }
        meta += meta_bytes;
        codes += code_bytes;
    }
    memset(meta, 0, (size_t)(strip + sizes_out->meta_bytes - meta));
    memset(codes, 0, (size_t)(strip + kvf_sizes_total(sizes_out) - codes));
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* With lo and scale of its groups, to the t-th of the wanted tokens. */
static void decode_vector(const struct kivi_pass *pass, const uint8_t *codes, uint32_t t)
{
    const struct kvf_kivi_work *work = pass->work;
    uint8_t *vector = kvf_pages_vector(pass->tensor, pass->job, pass->row, t);
    fetch_next(pass, vector, true);
    pass->use->decode(codes, work->lo, work->scale, pass->shift, pass->n, pass->bits,
                      pass->tensor->dtype, vector);
}

/* The wanted tokens of a row; meta and codes are those of the row. */
static void decode_channels(const struct kivi_pass *pass, const uint8_t *meta, const uint8_t *codes)
{
    struct kvf_kivi_work *work = pass->work;
    const struct kvf_codec_job *job = pass->job;
    size_t meta_bytes = (size_t)pass->n * KVF_KIVI_META_BYTES;
    uint32_t group = UINT32_MAX; /* that lo and scale are of */
    for (uint32_t t = 0; t < job->n_wanted; t++) {
        uint32_t token = job->token_first + t;
        if (token / pass->group_size != group) {
            group = token / pass->group_size;
            memcpy(work->meta, meta + group * meta_bytes, meta_bytes);
            pass->use->split(work->meta, pass->n, work->lo, work->scale);
        }
        decode_vector(pass, codes + (size_t)token * pass->tensor->code_bytes, t);
    }
}

static void decode_tokens(const struct kivi_pass *pass, const uint8_t *meta, const uint8_t *codes)
{
    struct kvf_kivi_work *work = pass->work;
    const struct kvf_codec_job *job = pass->job;
    uint32_t n_groups = kvf_kivi_groups(pass->n, pass->group_size);
    size_t meta_bytes = (size_t)n_groups * KVF_KIVI_META_BYTES;
    for (uint32_t t = 0; t < job->n_wanted; t++) {
        uint32_t token = job->token_first + t;
        memcpy(work->meta, meta + token * meta_bytes, meta_bytes);
        pass->use->split(work->meta, n_groups, work->lo, work->scale);
        decode_vector(pass, codes + (size_t)token * pass->tensor->code_bytes, t);
    }
}

static int kivi_decode(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                       const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace)
{
    struct kivi_pass pass = pass_of(tensor, job, workspace);
    const uint8_t *meta = strip;
    const uint8_t *codes = strip + sizes->meta_bytes;
    for (; pass.row < tensor->n_rows; pass.row++) {
        find_next_row(&pass);
        if (is_by_channel(tensor)) {
            decode_channels(&pass, meta, codes);
        } else {
            decode_tokens(&pass, meta, codes);
        }
        meta += row_words(tensor, job->n_tokens) * KVF_KIVI_META_BYTES;
        codes += (size_t)job->n_tokens * tensor->code_bytes;
    }
    return KVF_OK;
}

const struct kvf_codec_ops kvf_codec_kivi = {
    .name = "kivi",
    .id = KVF_CODEC_KIVI,
    .abi_version = KVF_CODEC_ABI,
    .capabilities = KVF_CODEC_FIXED_RATE | KVF_CODEC_ESCAPES | KVF_CODEC_FLOAT,
    .resolve = kivi_resolve,
    .sizes = kivi_sizes,
    .workspace_bytes = kivi_workspace_bytes,
    .encode = kivi_encode,
    .decode = kivi_decode,
};
