/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_kernels.cu: what the kernels of saw are measured against: the same traffic without maths, and
 * the encoder without its rotation. 4 bits, heads of 128, pages of a power of two of tokens.
 */
#include "codec/codec_saw_encode.cuh"

using namespace kvf;

namespace
{

constexpr uint32_t dim = 128;
constexpr uint32_t tile_tokens = 8;
constexpr uint32_t piece_tiles = 16; /* of a thread block of 8 warps */

/* The 16 tiles of a thread block: pieces, then rows, then parts; K and V have as many rows. */
struct place {
    const struct kvf_gpu_part part;
    uint32_t row;
    uint32_t first_tile;

    __device__ explicit place(const struct kvf_gpu_work &work)
        : part(parts_of(work)[blockIdx.x / n_pieces(work) / work.tensors[0].n_rows]),
          row(blockIdx.x / n_pieces(work) % work.tensors[0].n_rows),
          first_tile(blockIdx.x % n_pieces(work) * piece_tiles)
    {
    }

    __device__ static uint32_t n_pieces(const struct kvf_gpu_work &work)
    {
        return work.tokens_max / (piece_tiles * tile_tokens);
    }
};

} /* namespace */

extern "C" __global__ void __launch_bounds__(256)
    kvf_bench_encode_traffic(const __grid_constant__ struct kvf_gpu_work work)
{
    const place at(work);
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    const row_pages pages(work, at.part, tensor, at.row);
    const saw_parts parts(tensor, at.part);
    uint32_t lane = threadIdx.x % warp_lanes;
    for (uint32_t i = threadIdx.x / warp_lanes; i < piece_tiles; i += 8) {
        uint32_t tile = at.first_tile + i;
        const uint8_t *lane_from = pages.vector(tile * tile_tokens + lane / 4) + lane % 4 * 16;
        const uint4 *from = reinterpret_cast<const uint4 *>(lane_from);
        uint4 all = from[0];
        for (uint32_t k = 1; k < dim / 32; k++) {
            uint4 more = from[k * 4];
            all.x ^= more.x;
            all.y ^= more.y;
            all.z ^= more.z;
            all.w ^= more.w;
        }
        uint32_t vector = at.row * at.part.n_tokens + tile * tile_tokens + lane / 4;
        store_global(parts.codes + vector * (dim / 2) + lane % 4 * 16, all.x, all.y, all.z, all.w);
        if (lane % 4 == 0) {
            store_global(reinterpret_cast<uint8_t *>(parts.meta + vector), all.x);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    kvf_bench_decode_traffic(const __grid_constant__ struct kvf_gpu_work work)
{
    const place at(work);
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    const row_pages pages(work, at.part, tensor, at.row);
    const saw_parts parts(tensor, at.part);
    uint32_t lane = threadIdx.x % warp_lanes;
    uint4 codes[piece_tiles / 8];
    uint32_t metas[piece_tiles / 8];
    /* all reads first: it takes many on their way while much is written */
    for (uint32_t i = 0; i < piece_tiles / 8; i++) {
        uint32_t tile = at.first_tile + threadIdx.x / warp_lanes + i * 8;
        uint32_t vector = at.row * at.part.n_tokens + tile * tile_tokens + lane / 4;
        codes[i] = __ldcs(
            reinterpret_cast<const uint4 *>(parts.codes + vector * (dim / 2) + lane % 4 * 16));
        metas[i] = __ldcs(parts.meta + vector);
    }
    for (uint32_t i = 0; i < piece_tiles / 8; i++) {
        uint32_t tile = at.first_tile + threadIdx.x / warp_lanes + i * 8;
        const uint4 code = codes[i];
        for (uint32_t k = 0; k < dim / 32; k++) {
            uint8_t *to = pages.vector(tile * 8 + k * 2 + lane / 16) + lane % 16 * 16;
            __stcs(reinterpret_cast<uint4 *>(to),
                   make_uint4(code.x + k, code.y ^ metas[i], code.z, code.w));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    kvf_bench_decode_linear(const __grid_constant__ struct kvf_gpu_work work)
{
    const place at(work);
    const struct kvf_gpu_tensor &tensor = work.tensors[at.part.is_v];
    const row_pages pages(work, at.part, tensor, at.row);
    const saw_parts parts(tensor, at.part);
    uint32_t lane = threadIdx.x % warp_lanes;
    for (uint32_t i = threadIdx.x / warp_lanes; i < piece_tiles; i += 8) {
        uint32_t tile = at.first_tile + i;
        uint32_t vector = at.row * at.part.n_tokens + tile * tile_tokens + lane / 4;
        const uint4 code = *reinterpret_cast<const uint4 *>(parts.codes + vector * (dim / 2) +
                                                            lane % 4 * 16);
        uint32_t meta = parts.meta[vector];
        for (uint32_t k = 0; k < dim / 32; k++) {
            uint8_t *to = pages.vector(tile * 8 + k * 2 + lane / 16) + lane % 16 * 16;
            store_global(to, code.x + k, code.y ^ meta, code.z, code.w);
        }
    }
}

extern "C" __global__ void __launch_bounds__(SAW_ENCODE_THREADS, saw_encode_blocks_a_processor(dim))
    kvf_bench_encode_unrotated(const __grid_constant__ struct kvf_gpu_work work, uint32_t tensors)
{
    encode_rows_fast<dim, 4, encode_variant::unrotated>(work, tensors);
}
