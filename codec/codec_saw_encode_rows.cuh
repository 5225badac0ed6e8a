/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_encode_rows.cuh: which rows and tiles a warp of the fast encoder has, and how they come
 * to shared memory.
 *
 * Thread blocks stay: each takes unit after unit of the work. A unit is one row for its eight warps
 * or, where blocks have few tokens, a row for each one, two or four of them (codec_saw_shape.h). A
 * warp has up to four tiles of a row, and a ring of tiles in shared memory of its own, which
 * asynchronous copies fill some tiles ahead, across the end of the row: so there is always
 * something on its way.
 *
 * Within a vector in shared memory 64 bytes and the 64 after them change places if the token is
 * odd: so 8 lanes read from 32 banks.
 */
#ifndef KVF_CODEC_CODEC_SAW_ENCODE_ROWS_CUH
#define KVF_CODEC_CODEC_SAW_ENCODE_ROWS_CUH

#include "codec/codec_saw_device.cuh"
#include "codec/codec_saw_shape.h"

namespace kvf
{

constexpr uint32_t encode_warps = SAW_ENCODE_THREADS / warp_lanes;
constexpr uint32_t unit_tiles = 4;  /* of a warp: 256 tokens for eight of them */
constexpr uint32_t swap_bytes = 64; /* see above */

static_assert(encode_warps == KVF_SAW_PARTIAL_SUMS, "a warp has one of the sums");

/* -------------------------------------------------------------------------------------------------
 * Rows
 */

/* Where a warp is in its thread block. */
struct encode_team {
    uint32_t warp;
    uint32_t lane;
    uint32_t row_warps; /* of a row: 1, 2, 4 or 8 */
    uint32_t row_shift; /* log2 of it */
    uint32_t seat;      /* of this warp among them */
    divider by_page;    /* of tokens */

    __device__ __forceinline__ explicit encode_team(const struct kvf_gpu_work &work)
        : warp(uniform_warp()), lane(threadIdx.x % warp_lanes),
          row_warps(saw_encode_row_warps(&work)), row_shift(__popc(row_warps - 1)),
          seat(warp & (row_warps - 1)), by_page(work.tokens_a_page)
    {
    }

    __device__ __forceinline__ uint32_t unit_rows() const
    {
        return encode_warps >> row_shift;
    }
};

/* What there is to know about a row; all zero where there is none. Row r of a thread block's unit
 * u is number u unit_rows + r; a warp makes the entries of 32 rows at a time, one a lane. */
struct __align__(16) encode_row
{
    uint64_t from; /* vector 0 in page 0 */
    uint64_t meta; /* of the row */
    uint64_t codes;
    uint32_t n_tokens;
    uint32_t n_sinks;
    uint32_t n_tiles;
    uint32_t seat_tiles; /* of a warp, at most */
    uint32_t first_page;
    uint32_t is_v;
    uint32_t is_centred;
    uint32_t is_simple; /* a tile lies in one page, vectors on 16 bytes */
    uint32_t row;
    uint32_t signs; /* first word of the row's */
    uint32_t block;
    uint64_t mean; /* the row's, of a profile; 0: a mean is made, and stored, if it is centred */

    __device__ __forceinline__ void fill(const struct kvf_gpu_work &work, const encode_team &team,
                                         const struct kvf_gpu_part &part, uint32_t row_)
    {
        is_v = part.is_v;
        row = row_;
        const struct kvf_gpu_tensor &tensor = work.tensors[is_v];
        const struct kvf_gpu_pages &pages = work.pages[is_v];
        const saw_parts parts(tensor, part);
        uint32_t rows_a_head = tensor.dim / tensor.group;
        uint32_t head = row_ / rows_a_head;
        uint32_t channel = (row_ - head * rows_a_head) * tensor.group;
        from = part.base + head * pages.head_stride_bytes + channel * 2;
        n_tokens = part.n_tokens;
        n_sinks = min(part.n_sinks, n_tokens);
        meta = reinterpret_cast<uint64_t>(parts.meta) + row_ * n_tokens * saw_meta_bytes(tensor);
        codes = reinterpret_cast<uint64_t>(parts.codes) + row_ * n_tokens * tensor.code_bytes;
        first_page = part.first_page;
        block = part.block;
        signs = (is_v ? saw_encode_sign_words(work.tensors[0].dim) : 0) + channel / 2;
        n_tiles = ceil_div(n_tokens, KVF_SAW_TILE_TOKENS);
        seat_tiles = (n_tiles + team.row_warps - 1) >> team.row_shift;
        is_centred = parts.mean != nullptr;
        mean = has_profile_mean(tensor) ? part.mean + row_ * tensor.group * 2 : 0;
        is_simple = work.tokens_a_page % KVF_SAW_TILE_TOKENS == 0 &&
                    ((from | pages.page_stride_bytes | pages.token_stride_bytes) & 15) == 0;
    }
};

constexpr uint32_t rows_kept = 2 * warp_lanes; /* the rows of now and those to come */

/* The rows from `number` on, by a warp. K and V of a row are side by side where they can be, so
 * that both are read at one time; which of them a thread block has then changes from unit to unit.
 */
static __device__ __noinline__ void fill_rows(const struct kvf_gpu_work &work, uint32_t tensors,
                                              uint32_t number, encode_row *rows)
{
    const encode_team team(work);
    number += team.lane;
    uint32_t in_unit = number & (team.unit_rows() - 1);
    uint32_t unit = blockIdx.x + (number << team.row_shift) / encode_warps * gridDim.x;
    uint32_t index = unit * team.unit_rows() + in_unit;
    uint32_t is_v = tensors == 2 ? 1 : 0;
    if (tensors == 3 && work.tensors[0].n_rows == work.tensors[1].n_rows) {
        /* in an even grid; any even number keeps the two together */
        is_v = (index + unit / (gridDim.x + gridDim.x % 2)) % 2;
        index = index / 2;
    } else if (tensors == 3) {
        uint32_t n_k = saw_encode_rows(&work, 1);
        is_v = index >= n_k;
        index = is_v ? index - n_k : index;
    }
    uint32_t n_rows = work.tensors[is_v].n_rows;
    uint32_t part = index / n_rows;
    uint32_t row = index - part * n_rows;
    part = work.has_v != 0 ? 2 * part + is_v : part;
    encode_row entry = {};
    if (part < work.n_parts) {
        entry.fill(work, team, part_of(work, part), row);
    }
    rows[number % rows_kept] = entry;
}

/* The vectors of a row that a lane has a share of: those of its g in its warp's tiles. If eight
 * warps share the row, the first tile is the sample. */
struct lane_tiles {
    uint32_t first;  /* tile */
    uint32_t n;      /* of the warp */
    uint32_t lane_n; /* in which the lane's vector exists */

    __device__ __forceinline__ lane_tiles(const encode_team &team, const encode_row &row)
    {
        first = team.seat * row.seat_tiles;
        n = first < row.n_tiles ? min(row.seat_tiles, row.n_tiles - first) : 0;
        uint32_t lane_all = (row.n_tokens + KVF_SAW_TILE_TOKENS - 1 - team.lane / 4) /
                            KVF_SAW_TILE_TOKENS;
        lane_n = first < lane_all ? min(n, lane_all - first) : 0;
    }
};

/* What lies in shared memory before the rings. Behind it are sign masks, a word for two elements,
 * of K's channels and then of V's. */
template <int dim> struct encode_shared {
    encode_row rows[rows_kept];
    float mean
        [2]
        [dim]; /* rotated, in the order of the lanes' registers; of rows that have one, by turns */
    float partial[encode_warps][dim];
    uint32_t counts[encode_warps]; /* of vectors in the partial sums */
};

/* -------------------------------------------------------------------------------------------------
 * The way in
 */
static __device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}

static __device__ __forceinline__ uint64_t of_lane(uint64_t word, uint32_t lane)
{
    return __shfl_sync(all_lanes, (uint32_t)word, lane) |
           (uint64_t)__shfl_sync(all_lanes, (uint32_t)(word >> 32), lane) << 32;
}

/* A lane's bytes of a vector from any address of an element, at once. */
template <int dim>
static __device__ __noinline__ void copy_halves(uint8_t *even, uint8_t *odd, const uint8_t *from)
{
    for (uint32_t i = 0; i < dim / 32; i++) {
        uint8_t *to = (i % 2 == 0 ? even : odd) + i / 2 * 128;
        for (uint32_t at = 0; at < 16; at += 2) {
            *reinterpret_cast<uint16_t *>(to + at) = *reinterpret_cast<const uint16_t *>(
                from + i * 64 + at);
        }
    }
}

/* A warp's ring, and a lane's places in it. Lane 4 g + t copies, of vector g of a tile, the 16
 * bytes at 64 i + 16 t for each i, which are those that it works on. */
template <int dim> struct encode_ring {
    static constexpr uint32_t tile_bytes = KVF_SAW_TILE_TOKENS * dim * 2;
    static constexpr uint32_t n_slots = saw_encode_slots(dim);

    uint8_t *base;
    uint32_t even; /* the lane's place where i is even, from base */
    uint32_t odd;

    __device__ __forceinline__ encode_ring(uint8_t *rings, const encode_team &team)
        : base(rings + team.warp * (n_slots * tile_bytes))
    {
        uint32_t g = team.lane / 4;
        uint32_t vector = g * (dim * 2) + team.lane % 4 * 16;
        even = vector + g % 2 * swap_bytes;
        odd = vector + (1 - g % 2) * swap_bytes;
        pin(even);
        pin(odd);
    }

    __device__ __forceinline__ uint8_t *slot(uint32_t k) const
    {
        return base + k % n_slots * tile_bytes;
    }

    __device__ __forceinline__ void copy(uint32_t k, const uint8_t *from) const
    {
        uint32_t to = shared_address(slot(k));
#pragma unroll
        for (uint32_t i = 0; i < dim / 32; i++) {
            start_copy<16>(to + (i % 2 == 0 ? even : odd) + i / 2 * 128, from + i * 64);
        }
    }

    __device__ __forceinline__ void copy_slowly(uint32_t k, const uint8_t *from) const
    {
        copy_halves<dim>(slot(k) + even, slot(k) + odd, from);
    }

    __device__ __forceinline__ void load(uint32_t k, uint32_t x[dim / 32][4]) const
    {
#pragma unroll
        for (uint32_t i = 0; i < dim / 32; i++) {
            const uint4 word = *reinterpret_cast<const uint4 *>(
                slot(k) + (i % 2 == 0 ? even : odd) + i / 2 * 128);
            x[i][0] = word.x;
            x[i][1] = word.y;
            x[i][2] = word.z;
            x[i][3] = word.w;
        }
    }
};

/* Where a row's tiles come from. */
template <int dim> struct encode_source {
    uint32_t lane_n;      /* of lane_tiles */
    uint64_t from;        /* lane k: vector 0 of tile k; of a row that is not simple: of page 0 */
    uint64_t lane_offset; /* from there to the lane's bytes */
    bool is_simple;
    /* not simple; the row's entry may have been filled again when they are wanted */
    uint32_t first_page;
    uint32_t first_token;
    uint32_t is_v;

    /* Lane k: the page of tile k; for point_at, later. */
    static __device__ __forceinline__ uint32_t ask_page(const struct kvf_gpu_work &work,
                                                        const encode_team &team,
                                                        const encode_row &row)
    {
        uint32_t token = (team.seat * row.seat_tiles + team.lane % unit_tiles) *
                         KVF_SAW_TILE_TOKENS;
        if (token >= row.n_tokens) {
            return 0;
        }
        uint32_t page = row.first_page + team.by_page.quotient(token);
        return at_address<const uint32_t>(work.page_ids)[page];
    }

    __device__ __forceinline__ void point_at(const struct kvf_gpu_work &work,
                                             const encode_team &team, const encode_row &row,
                                             uint32_t page_id)
    {
        const lane_tiles tiles(team, row);
        lane_n = tiles.lane_n;
        from = row.from;
        is_simple = row.is_simple != 0;
        first_page = row.first_page;
        first_token = tiles.first * KVF_SAW_TILE_TOKENS;
        is_v = row.is_v;
        const struct kvf_gpu_pages &pages = work.pages[is_v];
        if (is_simple) {
            uint32_t token = (tiles.first + team.lane % unit_tiles) * KVF_SAW_TILE_TOKENS;
            uint32_t slot = token - team.by_page.quotient(token) * work.tokens_a_page;
            from += page_id * pages.page_stride_bytes + slot * pages.token_stride_bytes;
            lane_offset = team.lane / 4 * pages.token_stride_bytes + team.lane % 4 * 16;
        }
    }

    /* Ask for tiles k and k + 1, in a group of copies. */
    __device__ __forceinline__ void fetch_pair(const struct kvf_gpu_work &work,
                                               const encode_team &team,
                                               const encode_ring<dim> &ring, uint32_t k) const
    {
        uint64_t first = of_lane(from, k) + lane_offset;
        uint64_t second = of_lane(from, k + 1) + lane_offset;
        if (!is_simple) {
            for (uint32_t i = k; i < k + 2 && i < lane_n; i++) {
                fetch_slowly(work, team, ring, i);
            }
        } else if (k + 1 < lane_n) {
            ring.copy(k, at_address<const uint8_t>(first));
            ring.copy(k + 1, at_address<const uint8_t>(second));
        } else if (k < lane_n) {
            ring.copy(k, at_address<const uint8_t>(first));
        }
        commit_copies();
    }

    /* Ask for tile k, in a group of copies. */
    __device__ __forceinline__ void fetch(const struct kvf_gpu_work &work, const encode_team &team,
                                          const encode_ring<dim> &ring, uint32_t k) const
    {
        uint64_t vector = of_lane(from, k) + lane_offset;
        if (k < lane_n) {
            if (is_simple) {
                ring.copy(k, at_address<const uint8_t>(vector));
            } else {
                fetch_slowly(work, team, ring, k);
            }
        }
        commit_copies();
    }

    /* Pages of any size, vectors on any address of an element. */
    __device__ __forceinline__ void fetch_slowly(const struct kvf_gpu_work &work,
                                                 const encode_team &team,
                                                 const encode_ring<dim> &ring, uint32_t k) const
    {
        uint32_t token = first_token + k * KVF_SAW_TILE_TOKENS + team.lane / 4;
        const struct kvf_gpu_pages &pages = work.pages[is_v];
        uint32_t page = team.by_page.quotient(token);
        uint32_t page_id = at_address<const uint32_t>(work.page_ids)[first_page + page];
        uint64_t vector = from + page_id * pages.page_stride_bytes +
                          (token - page * work.tokens_a_page) * pages.token_stride_bytes;
        ring.copy_slowly(k, at_address<const uint8_t>(vector) + team.lane % 4 * 16);
    }
};

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_ENCODE_ROWS_CUH */
