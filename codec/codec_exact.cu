/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_exact.cu: the lossless codec. Bytes are those of codec_exact.c; the layout is in
 * codec_exact.h.
 *
 * Where a part begins depends on all parts before it, and how long it is on its most frequent
 * exponents. So elements are read twice: once to count, once to write. What is kept of the first
 * reading is a histogram a chunk, from which, once the exponents are chosen, the number of escapes
 * follows without a third.
 *
 *   kvf_exact_count    warps take chunks: histograms
 *   kvf_exact_choose, _choose_short (parts of few chunks)
 *                      one thread block a part: exponents, where each chunk's escapes begin, size
 *   kvf_exact_place    one thread block a block: where each part begins, layer table
 *   kvf_exact_encode   warps take chunks: the part, or what codec raw writes if it does not pay
 *   kvf_exact_decode   warps take chunks
 */
#include "codec/codec_exact_device.cuh"

namespace
{

using namespace kvf;

/* -------------------------------------------------------------------------------------------------
 * Counting
 */

/* A byte a bin and lane, so that nobody waits for another's addition. */
struct lane_bins {
    uint8_t count[KVF_EXACT_BINS][warp_lanes];
};

template <int element_bytes>
__device__ __forceinline__ uint32_t largest_exponent(const exact_chunk &chunk, uint32_t lane,
                                                     const unit<element_bytes> units[units_a_lane])
{
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        if (has_unit(chunk, k * warp_lanes + lane)) {
#pragma unroll
            for (int i = 0; i < 2 * element_bytes; i++) {
                largest = element_bytes == 2 ? __vmaxu2(largest, units[k].word[i] & 0x7f807f80)
                                             : max(largest, units[k].word[i] & 0x7f800000);
            }
        }
    }
    largest = element_bytes == 2 ? max(largest >> 23, largest >> 7 & 0xff) : largest >> 23;
    return __reduce_max_sync(all_lanes, largest);
}

/* Bin 0 takes zeros and subnormals, and, which is rare, what lies below the window. Returns the
 * chunk's word. */
template <int element_bytes, bool is_wide>
__device__ __forceinline__ uint32_t count_chunk(const work_part &work, const exact_chunk &chunk,
                                                uint32_t lane, struct lane_bins *bins,
                                                uint16_t *bins_out)
{
    unit<element_bytes> units[units_a_lane];
    load_chunk<element_bytes, is_wide>(work, chunk, lane, units);
    uint32_t largest = largest_exponent<element_bytes>(chunk, lane, units);
    /* base and base + 62 are the ends of the window. Neighbours have the same base most times. */
    uint32_t base = largest >= KVF_EXACT_BINS
                        ? align_up(largest - (KVF_EXACT_BINS - 2), KVF_EXACT_BASE_STEP)
                        : 1;
    uint4 *zero = reinterpret_cast<uint4 *>(bins);
#pragma unroll
    for (uint32_t i = 0; i < sizeof(*bins) / sizeof(*zero) / warp_lanes; i++) {
        zero[i * warp_lanes + lane] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    uint8_t *counts = bins->count[0];
    int offset = (int)lane + (1 - (int)base) * (int)warp_lanes; /* of exponent 0 */
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        uint32_t number = k * warp_lanes + lane;
        if (has_unit(chunk, number)) {
            int n = unit_count<is_wide>(chunk, number);
#pragma unroll
            for (int i = 0; i < (int)unit_elements; i++) {
                if (i < n) {
                    int at = max((int)units[k].exponent_times_32(i) + offset, (int)lane);
                    counts[at]++;
                }
            }
        }
    }
    bool is_below = false;
    if (bins->count[0][lane] != 0) {
#pragma unroll
        for (uint32_t k = 0; k < units_a_lane; k++) {
            uint32_t number = k * warp_lanes + lane;
            int n = has_unit(chunk, number) ? unit_count<is_wide>(chunk, number) : 0;
#pragma unroll
            for (int i = 0; i < (int)unit_elements; i++) {
                uint32_t exponent = i < n ? units[k].exponent(i) : 0;
                is_below |= exponent != 0 && exponent < base;
            }
        }
    }
    uint32_t wide = __ballot_sync(all_lanes, is_below) != 0 ? KVF_EXACT_CHUNK_WIDE : 0;
    __syncwarp();
    /* two bins a lane, halves of a bin in an order that spreads over the banks */
#pragma unroll
    for (uint32_t j = 0; j < KVF_EXACT_BINS / warp_lanes; j++) {
        const uint4 *half = reinterpret_cast<const uint4 *>(bins->count[j * warp_lanes + lane]);
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint4 counts = half[i ^ (lane >> 2 & 1)];
            sum = __dp4a(counts.x, 0x01010101u, sum);
            sum = __dp4a(counts.y, 0x01010101u, sum);
            sum = __dp4a(counts.z, 0x01010101u, sum);
            sum = __dp4a(counts.w, 0x01010101u, sum);
        }
        bins_out[j * warp_lanes + lane] = (uint16_t)sum;
    }
    __syncwarp();
    return base | wide;
}

/* Places in scratch. */
struct scratch {
    struct kvf_exact_gpu_part *part;
    uint32_t *chunks;
    uint16_t *bins;

    __device__ __forceinline__ scratch(const struct kvf_gpu_work &work, uint32_t tensors,
                                       uint32_t part_index)
    {
        uint32_t n_chunks = tensors >> KVF_EXACT_CHUNKS_SHIFT;
        struct kvf_gpu_scratch at = kvf_gpu_scratch(work.n_parts_all, work.escape_words, n_chunks);
        uint64_t first = (uint64_t)part_index * n_chunks;
        part = at_address<struct kvf_exact_gpu_part>(work.scratch + at.exact_parts_offset) +
               part_index;
        chunks = at_address<uint32_t>(work.scratch + at.chunks_offset) + first;
        bins = at_address<uint16_t>(work.scratch + at.bins_offset) + first * KVF_EXACT_BINS;
    }
};

/* -------------------------------------------------------------------------------------------------
 * Choosing
 */

/* Exclusive prefix sum over the thread block, and the total. */
__device__ __forceinline__ uint32_t block_scan(uint32_t value, uint32_t *total_out)
{
    __shared__ uint32_t sums[warp_lanes];
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t warp = threadIdx.x / warp_lanes;
    uint32_t sum = value;
    for (uint32_t step = 1; step < warp_lanes; step *= 2) {
        uint32_t other = __shfl_up_sync(all_lanes, sum, step);
        sum += lane >= step ? other : 0;
    }
    __syncthreads();
    if (lane == warp_lanes - 1) {
        sums[warp] = sum;
    }
    __syncthreads();
    uint32_t before = 0;
    uint32_t total = 0;
    for (uint32_t i = 0; i < blockDim.x / warp_lanes; i++) {
        before += i < warp ? sums[i] : 0;
        total += sums[i];
    }
    *total_out = total;
    return before + sum - value;
}

__device__ __forceinline__ uint32_t bin_exponent(uint32_t bin, uint32_t word)
{
    uint32_t base = word & 0xff;
    return bin == 0 ? 0 : base + bin - 1;
}

/* Call visit(exponent) for each element of a chunk that a window does not cover, over a warp. */
template <typename F>
__device__ __forceinline__ void visit_wide(const work_part &work, uint32_t number, uint32_t lane,
                                           F visit)
{
    exact_chunk chunk(work, number);
    for (uint32_t i = lane; i < chunk.n; i += warp_lanes) {
        uint32_t token = work.dim.quotient(i);
        const uint8_t *top = work.where.vector(chunk.row, chunk.token + token) +
                             (i - token * work.dim.by + 1) * work.tensor.element_bytes - 2;
        visit(load_u16(top, work.is_even) >> 7 & 0xff);
    }
}

/* Call visit(number of the chunk, its word, two of its bins: those of this lane) for each chunk of
 * the part, over its warp. Several chunks are on their way at once. */
template <uint32_t batch, typename F>
__device__ __forceinline__ void visit_chunks(const work_part &work, const scratch &scratch, F visit)
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t n_warps = blockDim.x / warp_lanes;
    const uint32_t *bins = reinterpret_cast<const uint32_t *>(scratch.bins);
    for (uint32_t first = threadIdx.x / warp_lanes; first < work.shape.n_chunks;
         first += batch * n_warps) {
        uint32_t two[batch];
        uint32_t word[batch];
#pragma unroll
        for (uint32_t i = 0; i < batch; i++) {
            uint32_t number = first + i * n_warps;
            if (number < work.shape.n_chunks) {
                two[i] = bins[(uint64_t)number * (KVF_EXACT_BINS / 2) + lane];
                word[i] = scratch.chunks[number];
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < batch; i++) {
            uint32_t number = first + i * n_warps;
            if (number < work.shape.n_chunks) {
                visit(number, word[i], two[i]);
            }
        }
    }
}

/* How often each exponent occurs in the part, to counts. Chunks of one window are added up before
 * they are added to what all warps share. */
template <uint32_t batch>
__device__ __forceinline__ void count_part(const work_part &work, const scratch &scratch,
                                           uint32_t counts[256])
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t window = 1;
    uint32_t sums[2] = {0, 0};
    auto flush = [&]() {
        for (uint32_t i = 0; i < 2; i++) {
            if (sums[i] != 0) {
                atomicAdd(&counts[bin_exponent(2 * lane + i, window)], sums[i]);
            }
            sums[i] = 0;
        }
    };
    visit_chunks<batch>(work, scratch, [&](uint32_t number, uint32_t word, uint32_t two) {
        if ((word & KVF_EXACT_CHUNK_WIDE) != 0) {
            visit_wide(work, number, lane,
                       [&](uint32_t exponent) { atomicAdd(&counts[exponent], 1); });
            return;
        }
        if (word != window) {
            flush();
            window = word;
        }
        sums[0] += two & 0xffff;
        sums[1] += two >> 16;
    });
    flush();
}

/* Bytes of escapes of each chunk, bit 31 for uncoded ones, to its word. */
template <uint32_t batch>
__device__ __forceinline__ void count_escapes(const work_part &work, const scratch &scratch,
                                              const uint32_t indices[256])
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t window = 0;
    uint32_t masks = 0; /* of the lane's two bins: those that have no index */
    visit_chunks<batch>(work, scratch, [&](uint32_t number, uint32_t word, uint32_t two) {
        uint32_t escapes = 0;
        if ((word & KVF_EXACT_CHUNK_WIDE) != 0) {
            visit_wide(work, number, lane, [&](uint32_t exponent) {
                escapes += indices[exponent] == KVF_EXACT_EXPONENTS;
            });
        } else {
            if (word != window) {
                bool first = indices[bin_exponent(2 * lane, word)] == KVF_EXACT_EXPONENTS;
                bool second = indices[bin_exponent(2 * lane + 1, word)] == KVF_EXACT_EXPONENTS;
                masks = (first ? 0xffff : 0) | (second ? 0xffff0000 : 0);
                window = word;
            }
            escapes = (two & masks & 0xffff) + ((two & masks) >> 16);
        }
        __syncwarp();
        uint32_t bytes = __reduce_add_sync(all_lanes, escapes) * KVF_EXACT_ESCAPE_BYTES;
        if (lane == 0) {
            uint32_t n = exact_chunk(work, number).n;
            scratch.chunks[number] = bytes > n ? n | KVF_EXACT_CHUNK_UNCODED : bytes;
        }
    });
}

/* An exponent that occurs. */
struct found_exponent {
    uint32_t count;
    uint32_t exponent;
};

/* The most frequent exponents, the smaller one first among equals: an exponent's index is the
 * number of those that come before it. Replaces counts by indices, KVF_EXACT_EXPONENTS where there
 * is none. */
__device__ __forceinline__ void rank_exponents(uint32_t counts[256],
                                               struct kvf_exact_gpu_part *part)
{
    __shared__ struct found_exponent found[256];
    uint32_t exponent = threadIdx.x;
    uint32_t count = exponent < 256 ? counts[exponent] : 0;
    uint32_t n_found;
    uint32_t at = block_scan(count != 0, &n_found);
    if (count != 0) {
        found[at] = {count, exponent};
    }
    if (threadIdx.x < KVF_EXACT_EXPONENTS) {
        part->exponent[threadIdx.x] = 0; /* entries that nothing takes */
    }
    __syncthreads();
    uint32_t rank = 0;
    for (uint32_t i = 0; i < n_found && count != 0; i++) {
        rank += found[i].count > count || (found[i].count == count && i < at);
    }
    if (exponent < 256) {
        bool is_coded = count != 0 && rank < KVF_EXACT_EXPONENTS;
        if (is_coded) {
            part->exponent[rank] = (uint8_t)exponent;
        }
        counts[exponent] = is_coded ? rank : (uint32_t)KVF_EXACT_EXPONENTS;
        part->index[exponent] = (uint8_t)counts[exponent];
    }
    __syncthreads();
}

/* From bytes of escapes of each chunk, bit 31 for uncoded ones, to the directory. */
__device__ __forceinline__ void fill_directory(const work_part &work, const scratch &scratch)
{
    uint32_t at = 0;
    for (uint32_t first = 0; first < work.shape.n_chunks; first += blockDim.x) {
        uint32_t number = first + threadIdx.x;
        uint32_t word = number < work.shape.n_chunks ? scratch.chunks[number] : 0;
        uint32_t total;
        uint32_t before = block_scan(word & ~KVF_EXACT_CHUNK_UNCODED, &total);
        if (number < work.shape.n_chunks) {
            scratch.chunks[number] = (at + before) | (word & KVF_EXACT_CHUNK_UNCODED);
        }
        at += total;
    }
    if (threadIdx.x == 0) {
        bool is_raw = (int64_t)at > kvf_exact_escape_bytes_max(&work.shape);
        scratch.part->escape_bytes = at;
        scratch.part->is_raw = is_raw;
        scratch.part->bytes = is_raw ? work.shape.raw_bytes
                                     : work.shape.meta_bytes +
                                           part_bytes(work.shape.escape_offset + at);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Writing
 */

/* The chunks of a thread block. */
struct piece {
    uint32_t part; /* index in the list */
    uint32_t first;
    uint32_t n;
};

/* Where a part is written. */
struct part_writer {
    uint8_t *strip;
    uint8_t *codes;
    uint8_t *indices;
    uint8_t *escapes;

    __device__ __forceinline__ explicit part_writer(const work_part &work)
        : strip(at_address<uint8_t>(work.part.stored)), codes(strip + work.shape.meta_bytes),
          indices(codes + work.shape.index_offset), escapes(codes + work.shape.escape_offset)
    {
    }
};

/* Sign and mantissa of 8 elements, and back. */
__device__ __forceinline__ void split_rest(const unit<2> &from, uint32_t rest[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t a = from.word[2 * i];
        uint32_t b = from.word[2 * i + 1];
        a = (a & 0x007f007f) | (a >> 8 & 0x00800080);
        b = (b & 0x007f007f) | (b >> 8 & 0x00800080);
        rest[i] = __byte_perm(a, b, 0x6420);
    }
}

__device__ __forceinline__ void split_rest(const unit<4> &from, uint32_t rest[6])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t kept[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t bits = from.word[4 * i + j];
            kept[j] = (bits >> 8 & 0x800000) | (bits & 0x7fffff);
        }
        rest[3 * i] = kept[0] | kept[1] << 24;
        rest[3 * i + 1] = kept[1] >> 8 | kept[2] << 16;
        rest[3 * i + 2] = kept[2] >> 16 | kept[3] << 8;
    }
}

/* Escapes of a row of 32 units, whose lanes have these bits set; at counts what came before. */
template <int element_bytes>
__device__ __forceinline__ uint32_t write_escapes(const unit<element_bytes> &from, uint32_t bits,
                                                  uint32_t number, uint32_t lane, uint32_t at,
                                                  uint8_t *escapes)
{
    uint32_t mine = __popc(bits);
    uint32_t sum = mine;
    for (uint32_t step = 1; step < warp_lanes; step *= 2) {
        uint32_t other = __shfl_up_sync(all_lanes, sum, step);
        sum += lane >= step ? other : 0;
    }
    uint8_t *to = escapes + KVF_EXACT_ESCAPE_BYTES * (at + sum - mine);
#pragma unroll
    for (int i = 0; i < (int)unit_elements; i++) {
        if ((bits >> i & 1) != 0) {
            uint32_t position = number * unit_elements + i;
            to[0] = (uint8_t)position;
            to[1] = (uint8_t)(position >> 8);
            to[2] = (uint8_t)from.exponent(i);
            to += KVF_EXACT_ESCAPE_BYTES;
        }
    }
    return at + __shfl_sync(all_lanes, sum, warp_lanes - 1);
}

/* word: the chunk's entry in the directory; table: no_index, or an index. */
template <int element_bytes, bool is_wide>
__device__ __forceinline__ void write_chunk(const work_part &work, const exact_chunk &chunk,
                                            const part_writer &writer, uint32_t word, uint32_t lane,
                                            const uint32_t table[256])
{
    unit<element_bytes> units[units_a_lane];
    load_chunk<element_bytes, is_wide>(work, chunk, lane, units);
    constexpr uint32_t rest_bytes = element_bytes - 1;
    uint8_t *escapes = writer.escapes + (word & ~KVF_EXACT_CHUNK_UNCODED);
    bool is_uncoded = (word & KVF_EXACT_CHUNK_UNCODED) != 0;
    uint32_t n_escapes = 0;
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        uint32_t number = k * warp_lanes + lane;
        uint32_t indices = 0;
        uint32_t bits = 0;
        if (has_unit(chunk, number)) {
            uint32_t n = (uint32_t)unit_count<is_wide>(chunk, number);
            uint32_t any = 0;
            uint32_t found[unit_elements];
#pragma unroll
            for (int i = 0; i < (int)unit_elements; i++) {
                found[i] = is_wide || i < (int)n ? table[units[k].exponent(i)] : 0;
                any |= found[i];
                indices |= i == 0 ? found[i] & 15 : found[i] << 4 * i; /* no_index is lost */
            }
            if ((any & no_index) != 0) {
#pragma unroll
                for (int i = 0; i < (int)unit_elements; i++) {
                    bits |= found[i] >> 31 << i;
                }
            }
            indices = is_uncoded ? 0 : indices;
            uint32_t rest[2 * rest_bytes];
            split_rest(units[k], rest);
            store_words<2 * rest_bytes, is_wide>(
                writer.codes + (uint64_t)(chunk.element + number * unit_elements) * rest_bytes,
                rest, n * rest_bytes);
            store_words<1, is_wide>(writer.indices + chunk.index_at + 4 * number, &indices,
                                    (n + 1) / 2);
            if (is_uncoded) {
#pragma unroll
                for (int i = 0; i < (int)unit_elements; i++) {
                    if (i < (int)n) {
                        escapes[number * unit_elements + i] = (uint8_t)units[k].exponent(i);
                    }
                }
            }
        }
        if (!is_uncoded && __ballot_sync(all_lanes, bits != 0) != 0) {
            n_escapes = write_escapes<element_bytes>(units[k], bits, number, lane, n_escapes,
                                                     escapes);
        }
    }
}

/* What no chunk owns: the exponents, the last entry of the directory, zeroes. */
__device__ __forceinline__ void write_frame(const work_part &work, const part_writer &writer,
                                            const struct kvf_exact_gpu_part &known, uint32_t lane)
{
    uint32_t directory_end = KVF_EXACT_EXPONENTS + 4 * (work.shape.n_chunks + 1);
    uint32_t codes_end = work.shape.escape_offset + known.escape_bytes;
    if (lane < KVF_EXACT_EXPONENTS) {
        writer.strip[lane] = known.exponent[lane];
    }
    if (lane == 0) {
        *reinterpret_cast<uint32_t *>(writer.strip + directory_end - 4) = known.escape_bytes;
    }
    zero_bytes(writer.strip + directory_end, work.shape.meta_bytes - directory_end, lane,
               warp_lanes);
    zero_bytes(writer.codes + codes_end, part_bytes(codes_end) - codes_end, lane, warp_lanes);
}

/* The chunk as codec raw has it. */
template <int element_bytes, bool is_wide>
__device__ __forceinline__ void write_raw_chunk(const work_part &work, const exact_chunk &chunk,
                                                const part_writer &writer, uint32_t lane)
{
    unit<element_bytes> units[units_a_lane];
    load_chunk<element_bytes, is_wide>(work, chunk, lane, units);
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        uint32_t number = k * warp_lanes + lane;
        if (has_unit(chunk, number)) {
            uint32_t n = (uint32_t)unit_count<is_wide>(chunk, number);
            store_words<2 * element_bytes, is_wide>(
                writer.strip + (uint64_t)(chunk.element + number * unit_elements) * element_bytes,
                units[k].word, n * element_bytes);
        }
    }
}

__device__ __forceinline__ void write_raw_frame(const work_part &work, const part_writer &writer,
                                                uint32_t lane)
{
    uint32_t bytes = work.tensor.n_heads * work.part.n_tokens * work.tensor.dim *
                     work.tensor.element_bytes;
    zero_bytes(writer.strip + bytes, work.shape.raw_bytes - bytes, lane, warp_lanes);
}

template <int element_bytes, bool is_wide>
__device__ __forceinline__ void write_piece(const work_part &work, const scratch &scratch,
                                            const struct piece &piece, const uint32_t table[256])
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t first = piece.first + threadIdx.x / warp_lanes;
    part_writer writer(work);
    bool is_raw = scratch.part->is_raw != 0;
    for (uint32_t i = 0; i < piece.n; i += KVF_EXACT_WARPS) {
        uint32_t number = first + i;
        if (number >= work.shape.n_chunks) {
            break;
        }
        exact_chunk chunk(work, number);
        if (is_raw) {
            write_raw_chunk<element_bytes, is_wide>(work, chunk, writer, lane);
        } else {
            uint32_t word = scratch.chunks[number];
            write_chunk<element_bytes, is_wide>(work, chunk, writer, word, lane, table);
            if (lane == 0) {
                reinterpret_cast<uint32_t *>(writer.strip + KVF_EXACT_EXPONENTS)[number] = word;
            }
        }
    }
    if (first == 0) {
        if (is_raw) {
            write_raw_frame(work, writer, lane);
        } else {
            write_frame(work, writer, *scratch.part, lane);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Reading
 */

/* Tables of exponents, in place: of bf16 for both halves of a byte of indices, of fp32 for one. */
template <int element_bytes>
__device__ __forceinline__ void fill_exponents(const uint8_t *exponent, uint32_t table[256])
{
    for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
        table[i] = element_bytes == 2
                       ? (uint32_t)exponent[i & 15] << 7 | (uint32_t)exponent[i >> 4] << 23
                       : (uint32_t)exponent[i & 15] << 23;
    }
}

__device__ __forceinline__ void join_unit(const uint32_t rest[2], uint32_t indices,
                                          const uint32_t table[256], unit<2> *to)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t two = __byte_perm(rest[i / 2], 0, i % 2 != 0 ? 0x4342 : 0x4140);
        to->word[i] = (two & 0x007f007f) | (two & 0x00800080) << 8 | table[indices >> 8 * i & 0xff];
    }
}

__device__ __forceinline__ void join_unit(const uint32_t rest[6], uint32_t indices,
                                          const uint32_t table[256], unit<4> *to)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t *three = rest + 3 * i;
        uint32_t kept[4] = {three[0], three[0] >> 24 | three[1] << 8,
                            three[1] >> 16 | three[2] << 16, three[2] >> 8};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            to->word[4 * i + j] = (kept[j] & 0x800000) << 8 | (kept[j] & 0x7fffff) |
                                  table[indices >> 4 * (4 * i + j) & 15];
        }
    }
}

/* The exponent of an element whose sign and mantissa are right. */
__device__ __forceinline__ uint32_t with_exponent(uint32_t top, uint32_t exponent)
{
    return (top & 0x807f) | exponent << 7;
}

/* Where a wide unit goes; somewhere in the pages if its token is not wanted. */
template <int element_bytes>
__device__ __forceinline__ uint4 *wide_unit_at(const work_part &work, const exact_chunk &chunk,
                                               uint32_t number, bool *is_wanted_out)
{
    uint32_t first = min(number * unit_elements, chunk.n - unit_elements);
    uint32_t token = work.dim.quotient(first);
    uint32_t within = first - token * work.dim.by;
    uint32_t wanted = chunk.token + token - work.part.token_first; /* wraps if before */
    *is_wanted_out = wanted < work.part.n_wanted && has_unit(chunk, number);
    wanted = min(wanted, work.part.n_wanted - 1u);
    return reinterpret_cast<uint4 *>(work.where.vector(chunk.row, wanted) + within * element_bytes);
}

/* A unit of any alignment to pages, as far as its tokens are wanted. */
template <int element_bytes>
__device__ __forceinline__ void store_unit(const work_part &work, const exact_chunk &chunk,
                                           uint32_t number, const unit<element_bytes> &from)
{
    uint32_t first = number * unit_elements;
    uint32_t token = work.dim.quotient(first);
    uint32_t within = first - token * work.dim.by;
    uint32_t wanted = chunk.token + token - work.part.token_first; /* wraps if before */
#pragma unroll
    for (int i = 0; i < (int)unit_elements; i++) {
        if (first + i < chunk.n && wanted < work.part.n_wanted) {
            uint8_t *to = work.where.vector(chunk.row, wanted) + within * element_bytes;
#pragma unroll
            for (int half = 0; half < element_bytes / 2; half++) {
                int at = i * (element_bytes / 2) + half;
                store_u16(to + 2 * half, from.word[at / 2] >> at % 2 * 16, work.is_even);
            }
        }
        if (++within == work.dim.by) {
            within = 0;
            wanted++;
        }
    }
}

/* The upper 16 bits of one element in its page, to be corrected; NULL if its token is not
 * wanted. */
__device__ __forceinline__ uint8_t *element_top(const work_part &work, const exact_chunk &chunk,
                                                uint32_t position)
{
    uint32_t token = work.dim.quotient(position);
    uint32_t wanted = chunk.token + token - work.part.token_first;
    if (wanted >= work.part.n_wanted) {
        return nullptr;
    }
    return work.where.vector(chunk.row, wanted) +
           (position - token * work.tensor.dim + 1) * work.tensor.element_bytes - 2;
}

/* A chunk's entry in the directory, or none if it cannot be true. */
struct chunk_escapes {
    const uint8_t *at;
    uint32_t bytes;
    bool is_uncoded;
};

__device__ __forceinline__ struct chunk_escapes
find_escapes(const work_part &work, const exact_chunk &chunk, const part_writer &reader)
{
    const uint32_t *directory = reinterpret_cast<const uint32_t *>(reader.strip +
                                                                   KVF_EXACT_EXPONENTS);
    uint32_t word = directory[chunk.number];
    uint32_t first = word & ~KVF_EXACT_CHUNK_UNCODED;
    uint32_t end = directory[chunk.number + 1] & ~KVF_EXACT_CHUNK_UNCODED;
    uint32_t bytes_max = work.part.part_bytes - (work.shape.meta_bytes + work.shape.escape_offset);
    struct chunk_escapes escapes = {reader.escapes + first, end - first,
                                    (word & KVF_EXACT_CHUNK_UNCODED) != 0};
    if (first > end || end > bytes_max || (escapes.is_uncoded && escapes.bytes != chunk.n)) {
        escapes = {reader.escapes, 0, false};
    }
    return escapes;
}

template <int element_bytes, bool is_wide>
__device__ __forceinline__ void join_chunk(const work_part &work, const exact_chunk &chunk,
                                           const part_writer &reader, uint32_t lane,
                                           const uint32_t table[256])
{
    constexpr uint32_t rest_bytes = element_bytes - 1;
    uint32_t rest[units_a_lane][2 * rest_bytes];
    uint32_t indices[units_a_lane];
    uint4 *to[units_a_lane];
    bool is_wanted[units_a_lane];
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        uint32_t number = k * warp_lanes + lane;
        if (is_wide || has_unit(chunk, number)) {
            if (is_wide) {
                to[k] = wide_unit_at<element_bytes>(work, chunk, number, &is_wanted[k]);
                number = min(number, chunk.n / unit_elements - 1);
            }
            uint32_t n = (uint32_t)unit_count<is_wide>(chunk, number);
            load_words<2 * rest_bytes, is_wide>(
                reader.codes + (uint64_t)(chunk.element + number * unit_elements) * rest_bytes,
                rest[k], n * rest_bytes);
            load_words<1, is_wide>(reader.indices + chunk.index_at + 4 * number, &indices[k],
                                   (n + 1) / 2);
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < units_a_lane; k++) {
        unit<element_bytes> joined;
        if constexpr (is_wide) {
            join_unit(rest[k], indices[k], table, &joined);
            if (is_wanted[k]) {
#pragma unroll
                for (int i = 0; i < element_bytes / 2; i++) {
                    to[k][i] = make_uint4(joined.word[4 * i], joined.word[4 * i + 1],
                                          joined.word[4 * i + 2], joined.word[4 * i + 3]);
                }
            }
        } else if (has_unit(chunk, k * warp_lanes + lane)) {
            join_unit(rest[k], indices[k], table, &joined);
            store_unit<element_bytes>(work, chunk, k * warp_lanes + lane, joined);
        }
    }
}

template <int element_bytes, bool is_wide>
__device__ __forceinline__ void read_chunk(const work_part &work, const exact_chunk &chunk,
                                           const part_writer &reader, uint32_t lane,
                                           const uint32_t table[256])
{
    struct chunk_escapes escapes = find_escapes(work, chunk, reader);
    join_chunk<element_bytes, is_wide>(work, chunk, reader, lane, table);
    /* Escapes are corrected in the pages: they are few. */
    __syncwarp();
    uint32_t n_escapes = escapes.is_uncoded ? chunk.n : escapes.bytes / KVF_EXACT_ESCAPE_BYTES;
    for (uint32_t i = lane; i < n_escapes; i += warp_lanes) {
        const uint8_t *at = escapes.at + KVF_EXACT_ESCAPE_BYTES * i;
        uint32_t position = escapes.is_uncoded ? i : at[0] | at[1] << 8;
        uint32_t exponent = escapes.is_uncoded ? escapes.at[i] : at[2];
        uint8_t *top = position < chunk.n ? element_top(work, chunk, position) : nullptr;
        if (top != nullptr) {
            uint32_t bits = with_exponent(load_u16(top, work.is_even), exponent);
            store_u16(top, bits, work.is_even);
        }
    }
}

template <int element_bytes, bool is_wide>
__device__ __forceinline__ void read_piece(const work_part &work, const struct piece &piece,
                                           const uint32_t table[256])
{
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t tokens_a_chunk = work.shape.tokens_a_chunk;
    uint32_t chunk_first = work.part.token_first / tokens_a_chunk;
    uint32_t chunk_end = ceil_div(work.part.token_first + work.part.n_wanted, tokens_a_chunk);
    uint32_t chunks_a_row = chunk_end - chunk_first;
    part_writer reader(work);
    for (uint32_t i = threadIdx.x / warp_lanes; i < piece.n; i += KVF_EXACT_WARPS) {
        uint32_t number = piece.first + i;
        if (number >= chunks_a_row * work.tensor.n_heads) {
            break;
        }
        uint32_t row = number / chunks_a_row;
        exact_chunk chunk(work, row, chunk_first + number - row * chunks_a_row);
        read_chunk<element_bytes, is_wide>(work, chunk, reader, lane, table);
    }
}

/* The part of a thread block, if the launch is for its tensor, and which of its chunks. */
__device__ __forceinline__ bool find_part(const struct kvf_gpu_work &work, uint32_t tensors,
                                          struct piece *piece_out, struct kvf_gpu_part *part_out)
{
    uint32_t n_pieces = gridDim.x / work.n_parts;
    uint32_t i = blockIdx.x / n_pieces;
    piece_out->part = part_number(work, i);
    piece_out->n = ceil_div(tensors >> KVF_EXACT_CHUNKS_SHIFT, n_pieces);
    piece_out->first = (blockIdx.x - i * n_pieces) * piece_out->n;
    *part_out = parts_of(work)[piece_out->part];
    return (tensors >> part_out->is_v & 1) != 0;
}

constexpr uint32_t n_threads = KVF_EXACT_WARPS * warp_lanes;

template <int element_bytes>
__device__ __forceinline__ void count_piece(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ __align__(16) struct lane_bins bins[KVF_EXACT_WARPS];
    struct kvf_gpu_part part;
    struct piece piece;
    if (!find_part(work, tensors, &piece, &part)) {
        return;
    }
    work_part at(work, part);
    scratch scratch(work, tensors, piece.part);
    uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t warp = threadIdx.x / warp_lanes;
    for (uint32_t i = warp; i < piece.n; i += KVF_EXACT_WARPS) {
        uint32_t number = piece.first + i;
        if (number >= at.shape.n_chunks) {
            return;
        }
        exact_chunk chunk(at, number);
        uint16_t *bins_out = scratch.bins + (uint64_t)number * KVF_EXACT_BINS;
        uint32_t word =
            at.is_wide ? count_chunk<element_bytes, true>(at, chunk, lane, &bins[warp], bins_out)
                       : count_chunk<element_bytes, false>(at, chunk, lane, &bins[warp], bins_out);
        if (lane == 0) {
            scratch.chunks[number] = word;
        }
    }
}

template <int element_bytes>
__device__ __forceinline__ void encode_piece(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ uint32_t table[256];
    struct kvf_gpu_part part;
    struct piece piece;
    if (!find_part(work, tensors, &piece, &part)) {
        return;
    }
    work_part at(work, part);
    scratch scratch(work, tensors, piece.part);
    for (uint32_t i = threadIdx.x; i < 256; i += n_threads) {
        uint32_t index = scratch.part->index[i];
        table[i] = index == KVF_EXACT_EXPONENTS ? no_index : index;
    }
    __syncthreads();
    if (at.is_wide) {
        write_piece<element_bytes, true>(at, scratch, piece, table);
    } else {
        write_piece<element_bytes, false>(at, scratch, piece, table);
    }
}

/* Whatever the parts hold, nothing outside of them and of the pages is touched. */
template <int element_bytes>
__device__ __forceinline__ void decode_piece(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ uint32_t table[256];
    struct kvf_gpu_part part;
    struct piece piece;
    if (!find_part(work, tensors, &piece, &part)) {
        return;
    }
    work_part at(work, part);
    if (part.part_bytes < at.shape.meta_bytes + at.shape.escape_offset) {
        return;
    }
    fill_exponents<element_bytes>(at_address<const uint8_t>(part.stored), table);
    __syncthreads();
    if (at.is_wide) {
        read_piece<element_bytes, true>(at, piece, table);
    } else {
        read_piece<element_bytes, false>(at, piece, table);
    }
}

template <uint32_t batch>
__device__ __forceinline__ void choose_part(const struct kvf_gpu_work &work, uint32_t tensors)
{
    __shared__ uint32_t counts[256]; /* then indices */
    struct kvf_gpu_part part;
    struct piece piece;
    if (!find_part(work, tensors, &piece, &part)) {
        return;
    }
    work_part at(work, part);
    scratch scratch(work, tensors, piece.part);
    for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
        counts[i] = 0;
    }
    __syncthreads();
    count_part<batch>(at, scratch, counts);
    __syncthreads();
    rank_exponents(counts, scratch.part);
    count_escapes<batch>(at, scratch, counts);
    __syncthreads();
    fill_directory(at, scratch);
}

} /* namespace */

/* tensors: those of exact, and the chunks of the largest part (KVF_EXACT_CHUNKS_SHIFT). */
#define KVF_EXACT_KERNEL(name, function, blocks_a_processor)                                       \
    extern "C" __global__ void __launch_bounds__(n_threads, blocks_a_processor)                    \
        name(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)                   \
    {                                                                                              \
        function(work, tensors);                                                                   \
    }

KVF_EXACT_KERNEL(kvf_exact_count_bf16, count_piece<2>, 4)
KVF_EXACT_KERNEL(kvf_exact_count_f32, count_piece<4>, 2)
KVF_EXACT_KERNEL(kvf_exact_encode_bf16, encode_piece<2>, 4)
KVF_EXACT_KERNEL(kvf_exact_encode_f32, encode_piece<4>, 2)
KVF_EXACT_KERNEL(kvf_exact_decode_bf16, decode_piece<2>, 4)
KVF_EXACT_KERNEL(kvf_exact_decode_f32, decode_piece<4>, 2)

#define KVF_EXACT_CHOOSE(name, n_threads, blocks_a_processor, batch)                               \
    extern "C" __global__ void __launch_bounds__(n_threads, blocks_a_processor)                    \
        name(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)                   \
    {                                                                                              \
        choose_part<batch>(work, tensors);                                                         \
    }

KVF_EXACT_CHOOSE(kvf_exact_choose, KVF_EXACT_CHOOSE_THREADS, 2, 8)
KVF_EXACT_CHOOSE(kvf_exact_choose_short, KVF_EXACT_CHOOSE_SHORT_THREADS, 6, 2)

/* One thread block a block, one thread a part. */
extern "C" __global__ void __launch_bounds__(KVF_EXACT_PLACE_THREADS)
    kvf_exact_place(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    uint32_t parts_a_layer = work.has_v ? 2 : 1;
    uint32_t n_parts = work.n_layers * parts_a_layer;
    struct kvf_gpu_part *parts = parts_of(work) + blockIdx.x * n_parts;
    uint64_t payload = parts[0].stored;
    bool is_part = threadIdx.x < n_parts;
    uint32_t is_v = is_part ? parts[threadIdx.x].is_v : 0;
    uint32_t bits = is_part ? parts[threadIdx.x].bits : 0;
    uint32_t bytes = is_part ? parts[threadIdx.x].fixed_bytes : 0;
    if (is_part && bytes == 0) {
        scratch scratch(work, tensors, blockIdx.x * n_parts + threadIdx.x);
        bytes = scratch.part->bytes;
        bits = scratch.part->is_raw != 0 ? (uint32_t)KVF_BITS_RAW : bits;
    }
    uint32_t total;
    uint32_t before = block_scan(bytes, &total);
    uint32_t next_bits = __shfl_down_sync(all_lanes, bits, 1); /* V's, to K; both in one warp */
    struct kvf_gpu_result *result = results_of(work) + parts[0].block;
    if (is_part) {
        parts[threadIdx.x].stored = payload + before;
        if (is_v == 0) {
            uint32_t layer = threadIdx.x / parts_a_layer;
            result->layer_offsets[layer] = before / KVF_BLOCK_ALIGN_BYTES;
            result->layer_bits[layer] = (uint8_t)(bits | (work.has_v ? next_bits << 4 : 0));
        }
    }
    if (threadIdx.x == 0) {
        result->raw_area_offset = total / KVF_BLOCK_ALIGN_BYTES;
    }
}
