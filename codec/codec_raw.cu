/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_raw.cu: vectors as they are: parts of codec raw, and the raw area that block.c writes
 * behind the strips. Bytes are those of codec_raw.c and block.c.
 *
 *   kvf_raw_encode, kvf_raw_decode   thread blocks: n_parts times a number of pieces
 *   kvf_escapes_count                one thread block a part
 *   kvf_escapes_write, _write_fixed  one thread block a part: the raw area, then results
 *   kvf_escapes_patch                one thread block a part
 *   kvf_escapes_restore              one thread block a part
 */
#include "codec/codec_gpu.cuh"
#include "codec/codec_gpu_scratch.h"

namespace
{

using namespace kvf;

/* -------------------------------------------------------------------------------------------------
 * Parts
 */

/* One piece of a part, in accesses of T. */
template <typename T, bool decode>
__device__ __forceinline__ void move_piece(const pages &where, const struct kvf_gpu_tensor &tensor,
                                           const struct kvf_gpu_part &part, uint32_t piece)
{
    constexpr uint32_t n_units = KVF_RAW_PIECE_BYTES / sizeof(T);
    constexpr uint32_t batch = 4; /* accesses of a thread on their way at once */
    uint32_t units_a_vector = tensor.dim * tensor.element_bytes / (uint32_t)sizeof(T);
    uint32_t n_tokens = decode ? part.n_wanted : part.n_tokens;
    uint32_t end = tensor.n_heads * n_tokens * units_a_vector;
    T *stored = at_address<T>(part.stored);
    for (uint32_t i = 0; i < n_units; i += batch * KVF_RAW_THREADS) {
        T value[batch];
        T *to[batch];
#pragma unroll
        for (uint32_t j = 0; j < batch; j++) {
            uint32_t unit = piece * n_units + i + j * KVF_RAW_THREADS + threadIdx.x;
            if (unit < end) {
                uint32_t vector = unit / units_a_vector;
                uint32_t head = vector / n_tokens;
                uint32_t token = vector - head * n_tokens;
                uint32_t within = unit - vector * units_a_vector;
                T *paged = reinterpret_cast<T *>(where.vector(head, token)) + within;
                T *packed = stored + unit;
                if (decode) {
                    packed = stored +
                             (uint64_t)(head * part.n_tokens + part.token_first + token) *
                                 units_a_vector +
                             within;
                }
                value[j] = decode ? *packed : *paged;
                to[j] = decode ? paged : packed;
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < batch; j++) {
            if (piece * n_units + i + j * KVF_RAW_THREADS + threadIdx.x < end) {
                *to[j] = value[j];
            }
        }
    }
}

template <bool decode>
__device__ __forceinline__ void move_part(const struct kvf_gpu_work &work, uint32_t tensors)
{
    uint32_t n_pieces = gridDim.x / work.n_parts;
    const struct kvf_gpu_part part = part_of(work, blockIdx.x / n_pieces);
    uint32_t piece = blockIdx.x % n_pieces;
    if ((tensors >> part.is_v & 1) == 0) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    pages where(work, part);
    uint32_t vector_bytes = tensor.dim * tensor.element_bytes;
    uint32_t align = (where.align() | vector_bytes) & (0u - (where.align() | vector_bytes));
    if (align == 16) {
        move_piece<uint4, decode>(where, tensor, part, piece);
    } else if (align >= 4) {
        move_piece<uint32_t, decode>(where, tensor, part, piece);
    } else if (align == 2) {
        move_piece<uint16_t, decode>(where, tensor, part, piece);
    } else {
        move_piece<uint8_t, decode>(where, tensor, part, piece);
    }
    if (!decode && piece == 0) {
        uint32_t bytes = tensor.n_heads * part.n_tokens * vector_bytes;
        zero_bytes(at_address<uint8_t>(part.stored) + bytes, part_bytes(bytes) - bytes, threadIdx.x,
                   KVF_RAW_THREADS);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Escapes
 */
__device__ __forceinline__ struct kvf_gpu_escapes *escapes_of(const struct kvf_gpu_work &work)
{
    return at_address<struct kvf_gpu_escapes>(work.scratch);
}

/* Which vectors of a part are escapes, as its codec's encoder has left it. */
struct escape_marks {
    uint8_t codec;
    uint32_t vector_bytes; /* from one vector's number to the next one's */
    const uint8_t *scales; /* of fp16; NaN: an escape */
    const uint32_t *words;
    uint32_t n_tokens;

    __device__ __forceinline__ escape_marks(const struct kvf_gpu_work &work,
                                            const struct kvf_gpu_tensor &tensor,
                                            const struct kvf_gpu_part &part, uint32_t number)
        : codec(tensor.codec), n_tokens(part.n_tokens)
    {
        words = escape_words_of(work, number);
        if (codec == KVF_CODEC_TQ) {
            vector_bytes = 2u * tensor.n_scales;
            scales = at_address<const uint8_t>(part.stored + tq_mean_bytes(tensor, part.n_tokens));
        } else {
            bool has_lo = tensor.zero_kind <= KVF_ZERO_F16_LO; /* before each scale */
            vector_bytes = has_lo ? 4 : 2;
            scales = at_address<const uint8_t>(part.stored + saw_mean_bytes(tensor, part.n_tokens) +
                                               (has_lo ? 2 : 0));
        }
    }

    __device__ __forceinline__ bool has(uint32_t vector) const
    {
        if (codec == KVF_CODEC_KIVI) {
            uint32_t row = vector / n_tokens;
            uint32_t token = vector - row * n_tokens;
            return (words[row * ceil_div(n_tokens, 32) + token / 32] >> token % 32 & 1) != 0;
        }
        return *reinterpret_cast<const uint16_t *>(scales + vector * vector_bytes) == escape_scale;
    }
};

/* Sums over a thread block of KVF_ESCAPES_THREADS; everyone gets them. */
__device__ __forceinline__ uint32_t block_sum(uint32_t value)
{
    __shared__ uint32_t sums[KVF_ESCAPES_THREADS / warp_lanes];
    for (uint32_t step = warp_lanes / 2; step != 0; step /= 2) {
        value += __shfl_xor_sync(all_lanes, value, step);
    }
    __syncthreads();
    if (threadIdx.x % warp_lanes == 0) {
        sums[threadIdx.x / warp_lanes] = value;
    }
    __syncthreads();
    uint32_t sum = 0;
    for (uint32_t i = 0; i < KVF_ESCAPES_THREADS / warp_lanes; i++) {
        sum += sums[i];
    }
    return sum;
}

/* Numbers of a part's escapes, ascending, to index. */
__device__ void list_escapes(const escape_marks &marks, uint32_t n_vectors, uint32_t *index)
{
    __shared__ uint32_t sums[KVF_ESCAPES_THREADS / warp_lanes];
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t warp = threadIdx.x / warp_lanes;
    uint32_t at = 0;
    for (uint32_t first = 0; first < n_vectors; first += KVF_ESCAPES_THREADS) {
        uint32_t vector = first + threadIdx.x;
        bool is_escape = vector < n_vectors && marks.has(vector);
        uint32_t escapes = __ballot_sync(all_lanes, is_escape);
        if (lane == 0) {
            sums[warp] = __popc(escapes);
        }
        __syncthreads();
        uint32_t before = at + __popc(escapes & ((1u << lane) - 1));
        for (uint32_t i = 0; i < KVF_ESCAPES_THREADS / warp_lanes; i++) {
            before += i < warp ? sums[i] : 0;
            at += sums[i];
        }
        __syncthreads();
        if (is_escape) {
            index[before] = vector;
        }
    }
}

/* Address of a vector by its number (codec.h). */
__device__ __forceinline__ uint8_t *numbered_vector(const pages &where,
                                                    const struct kvf_gpu_tensor &tensor,
                                                    uint32_t row, uint32_t token)
{
    uint32_t rows_a_head = tensor.dim / tensor.group;
    uint32_t head = row / rows_a_head;
    return where.vector(head, token) +
           (row - head * rows_a_head) * tensor.group * tensor.element_bytes;
}

__device__ __forceinline__ uint32_t section_bytes(const struct kvf_gpu_tensor &tensor,
                                                  uint32_t count)
{
    return align_up(count * (4 + tensor.group * tensor.element_bytes), 16);
}

/* The section of one part: index list, vectors, zeroes. */
__device__ void write_section(const struct kvf_gpu_work &work, const struct kvf_gpu_part &part,
                              uint32_t number, uint32_t count, uint8_t *section)
{
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    uint32_t *index = reinterpret_cast<uint32_t *>(section);
    list_escapes(escape_marks(work, tensor, part, number), tensor.n_rows * part.n_tokens, index);
    __syncthreads();
    pages where(work, part);
    uint32_t vector_bytes = tensor.group * tensor.element_bytes;
    uint8_t *vectors = section + 4 * count;
    for (uint32_t i = threadIdx.x / warp_lanes; i < count; i += blockDim.x / warp_lanes) {
        uint32_t row = index[i] / part.n_tokens;
        copy_any(vectors + i * vector_bytes,
                 numbered_vector(where, tensor, row, index[i] - row * part.n_tokens), vector_bytes,
                 threadIdx.x % warp_lanes, warp_lanes);
    }
    uint32_t written = count * (4 + vector_bytes);
    zero_bytes(section + written, section_bytes(tensor, count) - written, threadIdx.x, blockDim.x);
}

/* What a part needs to know of the others of its block. */
struct block_escapes {
    uint32_t n;         /* of the block */
    uint32_t bytes;     /* of all sections */
    uint32_t my_offset; /* of this part's section among them */
    bool too_many;      /* in any part */
};

__device__ struct block_escapes sum_escapes(const struct kvf_gpu_work &work, uint32_t first,
                                            uint32_t within, uint32_t n_parts)
{
    struct block_escapes mine = {0, 0, 0, false};
    for (uint32_t i = threadIdx.x; i < n_parts; i += blockDim.x) {
        const struct kvf_gpu_escapes part = escapes_of(work)[first + i];
        bool too_many = part.section_bytes == KVF_ESCAPES_TOO_MANY;
        uint32_t bytes = too_many ? 0 : part.section_bytes;
        mine.n += part.n;
        mine.bytes += bytes;
        mine.my_offset += i < within ? bytes : 0;
        mine.too_many |= too_many;
    }
    struct block_escapes sum;
    sum.n = block_sum(mine.n);
    sum.bytes = block_sum(mine.bytes);
    sum.my_offset = block_sum(mine.my_offset);
    sum.too_many = block_sum(mine.too_many) != 0;
    return sum;
}

/* Counts of this part, and what no part owns: zeroes behind the table and behind the sections. */
__device__ void write_table(const struct kvf_gpu_work &work, const struct kvf_gpu_part &part,
                            uint32_t count, bool is_last, uint32_t area_bytes, uint8_t *area)
{
    uint32_t *table = reinterpret_cast<uint32_t *>(area);
    if (threadIdx.x == 0) {
        table[2 * part.layer + part.is_v] = count;
        if (!work.has_v) {
            table[2 * part.layer + 1] = 0;
        }
    }
    if (is_last) {
        uint32_t table_bytes = 8 * work.n_layers;
        zero_bytes(area + table_bytes, align_up(table_bytes, 16) - table_bytes, threadIdx.x,
                   blockDim.x);
        zero_bytes(area + area_bytes, part_bytes(area_bytes) - area_bytes, threadIdx.x, blockDim.x);
    }
}

/* Where the strips of a block of fixed rate end, from where its payload begins. */
__device__ __forceinline__ uint32_t fixed_strips_bytes(const struct kvf_gpu_part *parts,
                                                       uint32_t n_parts)
{
    const struct kvf_gpu_part &last = parts[n_parts - 1];
    return (uint32_t)(last.stored - parts[0].stored) + last.fixed_bytes;
}

/* The raw area, each thread block its part; the first of a block writes the result. Where layers
 * are encoded one at a time the sections of those to come count as empty, and when all have been
 * there another launch, for which sections are written, has the table and the result right. */
template <bool fixed>
__device__ __forceinline__ void finish_part(const struct kvf_gpu_work &work, uint32_t tensors)
{
    uint32_t number = part_number(work, blockIdx.x);
    const struct kvf_gpu_part part = parts_of(work)[number];
    uint32_t parts_a_layer = work.has_v ? 2 : 1;
    uint32_t n_parts = work.n_layers * parts_a_layer;
    uint32_t within = part.layer * parts_a_layer + part.is_v;
    uint32_t first = number - within;
    const struct kvf_gpu_part *parts = parts_of(work) + first;
    struct kvf_gpu_result *result = results_of(work) + part.block;
    uint32_t strips_bytes = fixed ? fixed_strips_bytes(parts, n_parts)
                                  : result->raw_area_offset * KVF_BLOCK_ALIGN_BYTES;
    struct block_escapes escapes = {0, 0, 0, false};
    uint32_t raw_area_bytes = 0;
    if (tensors != 0 && result->n_escapes != 0) {
        escapes = sum_escapes(work, first, within, n_parts);
        uint32_t table_bytes = align_up(8 * work.n_layers, 16);
        raw_area_bytes = part_bytes(table_bytes + escapes.bytes);
        uint8_t *area = at_address<uint8_t>(parts[0].stored) + strips_bytes;
        uint32_t count = escapes_of(work)[number].n;
        if (!escapes.too_many) {
            write_table(work, part, count, within == n_parts - 1, table_bytes + escapes.bytes,
                        area);
            if (count != 0 && (tensors & KVF_ESCAPES_WRITTEN) == 0) {
                write_section(work, part, number, count, area + table_bytes + escapes.my_offset);
            }
        }
    }
    if (within == 0 && threadIdx.x == 0) {
        if (fixed) {
            result->raw_area_offset = strips_bytes / KVF_BLOCK_ALIGN_BYTES;
        }
        /* Others of the block may still ask whether there are escapes; whatever is written here
         * is not 0 if it was not before. */
        result->n_escapes = escapes.too_many ? result->n_escapes : escapes.n;
        result->raw_area_bytes = escapes.too_many ? 0 : raw_area_bytes;
        result->flags |= KVF_GPU_DONE | (escapes.too_many ? KVF_GPU_REDO : 0);
    }
}

} /* namespace */

extern "C" __global__ void __launch_bounds__(KVF_RAW_THREADS)
    kvf_raw_encode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    move_part<false>(work, tensors);
}

extern "C" __global__ void __launch_bounds__(KVF_RAW_THREADS)
    kvf_raw_decode(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    move_part<true>(work, tensors);
}

/* tensors: those with codes. Counts go to scratch, by part; nothing is written for blocks without
 * escapes. */
extern "C" __global__ void __launch_bounds__(KVF_ESCAPES_THREADS)
    kvf_escapes_count(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    uint32_t number = part_number(work, blockIdx.x);
    const struct kvf_gpu_part part = parts_of(work)[number];
    if (results_of(work)[part.block].n_escapes == 0) {
        return;
    }
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    uint32_t n_vectors = tensor.n_rows * part.n_tokens;
    uint32_t count = 0;
    if ((tensors >> part.is_v & 1) != 0) {
        const escape_marks marks(work, tensor, part, number);
        for (uint32_t i = threadIdx.x; i < n_vectors; i += blockDim.x) {
            count += marks.has(i);
        }
    }
    count = block_sum(count);
    if (threadIdx.x == 0) {
        uint32_t allowed = part.n_sinks * tensor.n_rows + ceil_div(n_vectors, KVF_ESCAPES_SHARE);
        escapes_of(work)[number].n = count;
        escapes_of(work)[number].section_bytes = count > allowed ? KVF_ESCAPES_TOO_MANY
                                                                 : section_bytes(tensor, count);
    }
}

/* After kvf_escapes_count of all parts; the layer tables are there. */
extern "C" __global__ void __launch_bounds__(KVF_ESCAPES_THREADS)
    kvf_escapes_write(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    finish_part<false>(work, tensors);
}

/* The same for plans of fixed rate, whose layer tables follow from the plan; tensors 0: no part of
 * the list has codes, and nothing was counted. */
extern "C" __global__ void __launch_bounds__(KVF_ESCAPES_THREADS)
    kvf_escapes_write_fixed(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    finish_part<true>(work, tensors);
}

extern "C" __global__ void __launch_bounds__(KVF_ESCAPES_THREADS)
    kvf_escapes_patch(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    const struct kvf_gpu_part part = parts_of(work)[blockIdx.x];
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    if ((tensors >> part.is_v & 1) == 0 || tensor.dim == 0) {
        return;
    }
    pages where(work, part);
    const uint32_t *index = at_address<const uint32_t>(part.stored);
    const uint8_t *vectors = reinterpret_cast<const uint8_t *>(index + part.n_vectors);
    uint32_t vector_bytes = tensor.group * tensor.element_bytes;
    for (uint32_t i = threadIdx.x / warp_lanes; i < part.n_vectors; i += blockDim.x / warp_lanes) {
        uint32_t number = index[i];
        uint32_t row = number / part.n_tokens;
        uint32_t token = number - row * part.n_tokens - part.token_first; /* wraps if before */
        if (row < tensor.n_rows && token < part.n_wanted) {
            copy_any(numbered_vector(where, tensor, row, token),
                     vectors + (uint64_t)i * vector_bytes, vector_bytes, threadIdx.x % warp_lanes,
                     warp_lanes);
        }
    }
}

/* Behind the decode of parts that have just been encoded, and counted: escapes from where they were
 * encoded from, which lies as the pages do. */
extern "C" __global__ void __launch_bounds__(KVF_ESCAPES_THREADS)
    kvf_escapes_restore(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    const struct kvf_gpu_part part = parts_of(work)[blockIdx.x];
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    if ((tensors >> part.is_v & 1) == 0 || results_of(work)[part.block].n_escapes == 0) {
        return;
    }
    const escape_marks marks(work, tensor, part, blockIdx.x);
    struct kvf_gpu_part encoded = part;
    encoded.base = part.source;
    pages from(work, encoded);
    pages to(work, part);
    uint32_t n_vectors = tensor.n_rows * part.n_tokens;
    for (uint32_t i = threadIdx.x / warp_lanes; i < n_vectors; i += blockDim.x / warp_lanes) {
        if (marks.has(i)) {
            uint32_t row = i / part.n_tokens;
            uint32_t token = i - row * part.n_tokens;
            copy_any(numbered_vector(to, tensor, row, token),
                     numbered_vector(from, tensor, row, token), tensor.group * tensor.element_bytes,
                     threadIdx.x % warp_lanes, warp_lanes);
        }
    }
}
