/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_saw_decode.cuh: decode to bf16 of rows whose rotation is Sylvester's of 64, 128 or 256, the
 * whole vector. Who has which element is in codec_saw_device.cuh; z and x are codec_saw.h's.
 *
 * Levels of tq come the same way, but for their codes, which are looked up two at a time: (L, L) as
 * fp16.
 *
 * A code q is fp16 as it is: the bits of a subnormal number, q 2^-24, which tensor cores take like
 * any other; the vector's factor is 2^24 times as large instead. All sums are of integers below
 * 2^24 in this unit, hence exact.
 *
 * Signs are applied to the rounded result, g x = g fma(scale c, z, g mu), which differs for zeroes
 * only: the fused operation gives -0 where all its terms are -0, and that is where g and mu are
 * negative, mu is zero, and z is. Adding `zeroes` puts that right: -0 + -0 is -0, -0 + 0 is 0.
 */
#ifndef KVF_CODEC_CODEC_SAW_DECODE_CUH
#define KVF_CODEC_CODEC_SAW_DECODE_CUH

#include "codec/codec_saw_device.cuh"
#include "codec/codec_saw_shape.h"

#include <type_traits>

namespace kvf
{

constexpr float code_unit = 0x1p-24f; /* of a code as fp16 */

/* Whose codes they are. */
enum class decode_codec {
    saw,
    zeros, /* of saw, with zeros in place of lo */
    tq,
};

template <int dim> struct decode_shared {
    float means[dim];         /* g mu, in the order of the lanes' registers */
    uint32_t signs[dim / 2];  /* g of two elements each, as bf16 */
    uint32_t zeroes[dim / 2]; /* what is added to two elements each */
    row_pages pages;          /* for tiles that lie in more than one page */
};

template <int dim> struct decode_row {
    const struct kvf_gpu_tensor &tensor;
    const struct kvf_gpu_part &part;
    saw_parts parts;
    row_pages pages;
    uint32_t row;
    decode_shared<dim> *shared;
};

/* Where there are zeros, of each wanted token: lo d and the factor of its codes, in their unit. */
struct decode_zeros {
    float2 of[KVF_CHUNK_TOKENS_MAX];

    template <int dim> __device__ __forceinline__ void fill(const decode_row<dim> &at)
    {
        const struct kvf_gpu_part &part = at.part;
        const uint16_t *scales = at.parts.scales() + at.row * part.n_tokens;
        const uint8_t *zeros = at.parts.zeros(at.tensor, at.row, part.n_tokens);
        for (uint32_t i = threadIdx.x; i < part.n_wanted; i += blockDim.x) {
            uint32_t token = part.token_first + i;
            float scale = f32_of_half_bits(scales[token]);
            float w = (float)zero_at(zeros, part.n_tokens, at.tensor.bits, token) +
                      saw_zero_shift(at.tensor);
            of[i] = make_float2(lo_of_zero(scale, w) * at.tensor.sqrt_order,
                                scale * (at.tensor.rsqrt_order * (1.0f / code_unit)));
        }
    }
};

/* Means, signs and zeroes of the row, by all threads. */
template <int dim> static __device__ __forceinline__ void fill_row(const decode_row<dim> &at)
{
    if (threadIdx.x == 0) {
        at.shared->pages = at.pages;
    }
    uint16_t *zeroes = reinterpret_cast<uint16_t *>(at.shared->zeroes);
    uint16_t *signs = reinterpret_cast<uint16_t *>(at.shared->signs);
    for (uint32_t e = threadIdx.x; e < dim; e += blockDim.x) {
        bool flipped = is_flipped(at.tensor, at.row, e);
        uint32_t mean = 0;
        if (at.parts.mean != nullptr) {
            mean = reinterpret_cast<const uint16_t *>(at.parts.mean)[at.row * dim + e];
        }
        uint32_t group = e / 32 * 2 + (e >> 1 & 1);
        uint32_t sign = flipped ? 0x80000000 : 0;
        at.shared->means[(group * 4 + (e >> 3 & 3)) * 4 + (e >> 2 & 1) * 2 + (e & 1)] =
            __uint_as_float(__float_as_uint(f32_of_half_bits(mean)) ^ sign);
        signs[e] = flipped ? 0xbf80 : 0x3f80;
        zeroes[e] = mean == 0x8000 ? 0x8000 : 0;
    }
}

/* -------------------------------------------------------------------------------------------------
 * Codes to fragments
 */

/* n 32-bit words, from an address on as many bytes as they are, at most 16. */
template <uint32_t n>
static __device__ __forceinline__ void load_codes(const uint8_t *from, uint32_t *words)
{
    if constexpr (n % 4 == 0) {
#pragma unroll
        for (uint32_t w = 0; w < n; w += 4) {
            const uint4 word = *reinterpret_cast<const uint4 *>(from + w * 4);
            words[w] = word.x;
            words[w + 1] = word.y;
            words[w + 2] = word.z;
            words[w + 3] = word.w;
        }
    } else {
        static_assert(n == 2, "two words, or four at a time");
        const uint2 word = *reinterpret_cast<const uint2 *>(from);
        words[0] = word.x;
        words[1] = word.y;
    }
}

/* Four fields of a byte, or eight of two, as nibbles. */
template <uint32_t plane_bits>
static __device__ __forceinline__ uint32_t nibbles_of(uint32_t fields)
{
    if constexpr (plane_bits == 2) {
        fields = (fields | fields << 8) & 0x00ff00ff;
        fields = (fields | fields << 4) & 0x0f0f0f0f;
        return (fields | fields << 2) & 0x33333333;
    } else {
        fields = (fields | fields << 12) & 0x000f000f;
        fields = (fields | fields << 6) & 0x03030303;
        return (fields | fields << 3) & 0x11111111;
    }
}

/* A lane's part of a plane, as nibbles. */
template <uint32_t n_words, uint32_t plane_bits>
static __device__ __forceinline__ void load_nibbles(const uint8_t *from, uint32_t *nibbles)
{
    if constexpr (plane_bits == 4) {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w += 2) {
            load_codes<2>(from + w * 4, nibbles + w); /* vectors may begin on 8 bytes */
        }
    } else if constexpr (plane_bits == 2) {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w++) {
            nibbles[w] = nibbles_of<2>(reinterpret_cast<const uint16_t *>(from)[w]);
        }
    } else {
#pragma unroll
        for (uint32_t w = 0; w < n_words; w++) {
            nibbles[w] = nibbles_of<1>(from[w]);
        }
    }
}

/* What a lane has of a vector's codes: planes as nibbles, or bytes. */
template <int dim, int bits> struct lane_codes {
    static constexpr uint32_t n_words = bits == 8 ? dim / 16 : dim / 32;
    static constexpr uint32_t low_bits = saw_low_bits(bits);
    uint32_t words[n_words];
    uint32_t low[low_bits != 0 ? n_words : 1];

    __device__ __forceinline__ void load(const uint8_t *vector)
    {
        constexpr uint32_t high_bits = bits - low_bits;
        uint32_t t = threadIdx.x % 4;
        const uint8_t *from = vector + t * (dim / 32 * high_bits);
        if constexpr (low_bits == 0 && bits >= 4) {
            load_codes<n_words>(from, words);
        } else {
            load_nibbles<n_words, high_bits>(from, words);
        }
        if constexpr (low_bits != 0) {
            load_nibbles<n_words, low_bits>(
                vector + dim / 8 * high_bits + t * (dim / 32 * low_bits), low);
        }
    }

    /* Two codes as fp16: those of bit 0 clear and set. At 4 bits, those of products with bit 2 set
     * (odd ones) come 16-fold. */
    __device__ __forceinline__ uint32_t pair(uint32_t bit_1, uint32_t product) const
    {
        constexpr uint32_t products = dim / 16;
        uint32_t clear = bit_1 * products + product;
        uint32_t set = clear + 2 * products;
        if constexpr (bits == 8) {
            uint32_t both = permute_bytes(words[clear / 4], words[set / 4],
                                          clear % 4 < 2 ? 0x5410 : 0x7632);
            return both >> clear % 2 * 8 & 0x00ff00ff;
        }
        uint32_t selector = clear % 8 < 4 ? 0x5410 : 0x7632;
        uint32_t both = permute_bytes(words[clear / 8], words[set / 8], selector);
        if constexpr (bits == 4) {
            uint32_t byte = both >> clear % 4 / 2 * 8;
            return byte & (product % 2 != 0 ? 0x00f000f0 : 0x000f000f);
        }
        uint32_t shift = clear % 4 * 4;
        uint32_t codes = (both >> shift & 0x000f000f) << low_bits;
        if constexpr (low_bits != 0) {
            uint32_t lower = permute_bytes(low[clear / 8], low[set / 8], selector);
            codes |= lower >> shift & 0x000f000f;
        }
        return codes;
    }
};

/* -------------------------------------------------------------------------------------------------
 * Tiles and rows
 */

/* Bits 2, 5, 6 and 7 of the rotation; what has bit 2 set comes in another unit. */
template <int dim>
static __device__ __forceinline__ void rotate_sums(float z[dim / 32][2][4], float unit)
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) { /* bit 2 */
            float &u = z[i][k / 2][k % 2];
            float &v = z[i][k / 2][k % 2 + 2];
            float sum = __fmaf_rn(v, unit, u);
            v = __fmaf_rn(v, -unit, u);
            u = sum;
        }
    }
#pragma unroll
    for (uint32_t stride = 1; stride < dim / 32; stride *= 2) { /* bits 5, 6, 7 */
#pragma unroll
        for (uint32_t i = 0; i < dim / 32; i++) {
            if ((i & stride) == 0) {
#pragma unroll
                for (uint32_t k = 0; k < 8; k++) {
                    butterfly(z[i][k / 4][k % 4], z[i | stride][k / 4][k % 4]);
                }
            }
        }
    }
}

/* z = H^T q, in this unit. */
template <int dim, int bits>
static __device__ __forceinline__ void
rotate_codes(const lane_codes<dim, bits> &codes, const hadamard_pair &h16, float z[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        uint32_t a0 = codes.pair(0, 2 * i);
        uint32_t a1 = codes.pair(0, 2 * i + 1);
        uint32_t a2 = codes.pair(1, 2 * i);
        uint32_t a3 = codes.pair(1, 2 * i + 1);
        mma_f16(z[i][0], a0, a1, a2, a3, h16.b[0], h16.b[1]);
        mma_f16(z[i][1], a0, a1, a2, a3, h16.b[2], h16.b[3]);
    }
    rotate_sums<dim>(z, bits == 4 ? 0.0625f : 1.0f);
}

/* What a lane has of a vector's codes of tq, two in a byte: those of bit 0 clear and set. */
template <int dim, int bits> struct lane_levels {
    static constexpr uint32_t n_words = dim / 64;
    uint32_t even[n_words]; /* of products with bit 2 clear */
    uint32_t odd[n_words];

    __device__ __forceinline__ void load(const uint8_t *vector)
    {
        constexpr uint32_t low_bits = saw_low_bits(bits);
        lane_codes<dim, bits> codes;
        codes.load(vector);
#pragma unroll
        for (uint32_t w = 0; w < n_words; w++) {
            uint32_t clear = codes.words[w];
            uint32_t set = codes.words[w + n_words];
            if constexpr (low_bits != 0) {
                clear = clear << low_bits | codes.low[w];
                set = set << low_bits | codes.low[w + n_words];
            }
            even[w] = (clear & 0x0f0f0f0f) | (set << 4 & 0xf0f0f0f0);
            odd[w] = (clear >> 4 & 0x0f0f0f0f) | (set & 0xf0f0f0f0);
        }
    }

    __device__ __forceinline__ uint32_t pair(const uint32_t *table, uint32_t bit_1,
                                             uint32_t product) const
    {
        uint32_t clear = bit_1 * (dim / 16) + product;
        uint32_t word = clear % 2 != 0 ? odd[clear / 8] : even[clear / 8];
        return table[word >> clear % 8 / 2 * 8 & 0xff];
    }
};

/* z = H^T L */
template <int dim, int bits>
static __device__ __forceinline__ void
rotate_levels(const lane_levels<dim, bits> &levels, const uint32_t *table, const hadamard_pair &h16,
              float z[dim / 32][2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        uint32_t a0 = levels.pair(table, 0, 2 * i);
        uint32_t a1 = levels.pair(table, 0, 2 * i + 1);
        uint32_t a2 = levels.pair(table, 1, 2 * i);
        uint32_t a3 = levels.pair(table, 1, 2 * i + 1);
        mma_f16(z[i][0], a0, a1, a2, a3, h16.b[0], h16.b[1]);
        mma_f16(z[i][1], a0, a1, a2, a3, h16.b[2], h16.b[3]);
    }
    rotate_sums<dim>(z, 1.0f);
}

/* b in the upper half, a in the lower one; to nearest even. */
static __device__ __forceinline__ uint32_t pack_bf16(float a, float b)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&both);
}

/* A lane's pieces of a vector. */
template <int dim>
static __device__ __forceinline__ void store_pieces(uint8_t *to, const uint32_t words[dim / 32][4],
                                                    bool is_aligned)
{
    if (is_aligned) {
#pragma unroll
        for (uint32_t i = 0; i < dim / 32; i++) {
            __stcs(reinterpret_cast<uint4 *>(to + i * 64),
                   make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]));
        }
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        uint16_t *halves = reinterpret_cast<uint16_t *>(to + i * 64);
#pragma unroll
        for (uint32_t k = 0; k < 8; k++) {
            halves[k] = (uint16_t)(words[i][k / 2] >> k % 2 * 16);
        }
    }
}

/* The lane's elements, as bf16. offset: of element 0; tq has none, nor the sum with it. */
template <int dim, bool centred, decode_codec codec>
static __device__ __forceinline__ void make_words(const decode_row<dim> &at,
                                                  const float z[dim / 32][2][4], float factor,
                                                  float offset, uint32_t words[dim / 32][4])
{
    uint32_t t = threadIdx.x % 4;
    float sign = __uint_as_float(at.shared->signs[0] << 16);
#pragma unroll
    for (uint32_t i = 0; i < dim / 32; i++) {
        float x[2][4];
#pragma unroll
        for (uint32_t bit_1 = 0; bit_1 < 2; bit_1++) {
            float4 mean = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if constexpr (centred) {
                mean = *reinterpret_cast<const float4 *>(
                    &at.shared->means[((i * 2 + bit_1) * 4 + t) * 4]);
            }
            float add = mean.x;
            if (codec != decode_codec::tq && i == 0 && bit_1 == 0 && t == 0) {
                add = sign * (sign * mean.x + offset * sign);
            }
            x[bit_1][0] = __fmaf_rn(factor, z[i][bit_1][0], add);
            x[bit_1][1] = __fmaf_rn(factor, z[i][bit_1][1], mean.y);
            x[bit_1][2] = __fmaf_rn(factor, z[i][bit_1][2], mean.z);
            x[bit_1][3] = __fmaf_rn(factor, z[i][bit_1][3], mean.w);
        }
        const uint4 signs = *reinterpret_cast<const uint4 *>(&at.shared->signs[i * 16 + t * 4]);
        uint4 zeroes = make_uint4(0, 0, 0, 0);
        if constexpr (centred) {
            zeroes = *reinterpret_cast<const uint4 *>(&at.shared->zeroes[i * 16 + t * 4]);
        }
        words[i][0] = fma_bf16x2(pack_bf16(x[0][0], x[0][1]), signs.x, zeroes.x);
        words[i][1] = fma_bf16x2(pack_bf16(x[1][0], x[1][1]), signs.y, zeroes.y);
        words[i][2] = fma_bf16x2(pack_bf16(x[0][2], x[0][3]), signs.z, zeroes.z);
        words[i][3] = fma_bf16x2(pack_bf16(x[1][2], x[1][3]), signs.w, zeroes.w);
    }
}

/* Vectors change lanes by way of shared memory: then a store is of whole vectors, not of 64 bytes
 * of each of eight, with which memory is slower. Within a vector there 64 bytes and the 64 after
 * them change places if its number is odd: so 8 lanes have 32 banks. Where codes take many
 * instructions (planes, tables) what this adds is more than what it saves. */
template <int dim, int bits, decode_codec codec> struct decode_stage {
    static constexpr bool is_used = dim == 128 && (bits == 4 || bits == 2) &&
                                    codec != decode_codec::tq;
    static constexpr uint32_t vector_bytes = dim * 2;
    static constexpr uint32_t tile_bytes = is_used ? 8 * vector_bytes : 16;
    static constexpr uint32_t vector_lanes = vector_bytes / 16;
    static constexpr uint32_t n_vectors = warp_lanes / vector_lanes; /* of a store */

    uint8_t *base;
    uint32_t piece_at;    /* in it, of the lane's piece of vector 0 */
    uint32_t vector;      /* the lane's of the first store */
    uint32_t column;      /* of its piece of that */
    uint64_t lane_offset; /* of this piece, from a tile's first vector */

    __device__ __forceinline__ decode_stage(uint8_t *base_, uint64_t token_stride) : base(base_)
    {
        uint32_t lane = threadIdx.x % warp_lanes;
        uint32_t g = lane / 4;
        piece_at = g * vector_bytes + g % 2 * 64 + lane % 4 * 16;
        vector = lane / vector_lanes;
        column = lane % vector_lanes * 16 ^ vector % 2 * 64;
        lane_offset = vector * token_stride + lane % vector_lanes * 16;
    }

    /* The first n vectors of a tile, to `to` and so far from each other. */
    __device__ __forceinline__ void store(const uint32_t words[dim / 32][4], uint64_t to,
                                          uint64_t token_stride, uint32_t n) const
    {
        static_assert(!is_used || n_vectors % 2 == 0, "a lane's vectors are all odd or all even");
        __syncwarp(); /* the tile before has been read */
#pragma unroll
        for (uint32_t i = 0; i < dim / 32; i++) {
            *reinterpret_cast<uint4 *>(base + (piece_at ^ i % 2 * 64) + i / 2 * 128) = make_uint4(
                words[i][0], words[i][1], words[i][2], words[i][3]);
        }
        __syncwarp();
        to += lane_offset;
#pragma unroll
        for (uint32_t k = 0; k < 8; k += n_vectors) {
            const uint4 piece = *reinterpret_cast<const uint4 *>(
                base + (vector + k) * vector_bytes + column);
            if (vector + k < n) {
                __stcs(at_address<uint4>(to), piece);
            }
            to += n_vectors * token_stride;
        }
    }
};

/* A warp's tiles, every eighth one of the row, on their way from memory, some at a time: while much
 * is written reads take long, and it takes many of them not to wait. They come to shared memory by
 * asynchronous copies, for which no registers are needed. */
template <int dim, int bits, decode_codec codec> struct decode_ring {
    using lane_part = std::conditional_t<codec == decode_codec::tq, lane_levels<dim, bits>,
                                         lane_codes<dim, bits>>;
    static constexpr uint32_t n_warps = saw_decode_threads(bits) / warp_lanes;
    static constexpr uint32_t vector_bytes = dim / 8 * bits;
    static constexpr uint32_t codes_bytes = 8 * vector_bytes;
    static constexpr uint32_t slot_bytes = codes_bytes + 8 * KVF_SAW_META_BYTES;
    static constexpr uint32_t n_slots = n_warps * slot_bytes > 11264 ? 2
                                        : n_warps *slot_bytes > 3072 ? 4
                                                                     : 8;
    static constexpr uint32_t unit_bytes = vector_bytes % 16 == 0 ? 16 : 8; /* of a copy */

    uint8_t *base;
    uint64_t *tiles_at; /* [32] first vectors of its tiles, where a tile lies in one page */

    /* Tile k of the warp, in a group of copies. */
    __device__ __forceinline__ void ask(const decode_row<dim> &at, uint32_t warp, uint32_t k) const
    {
        uint32_t lane = threadIdx.x % warp_lanes;
        uint32_t token = (warp + k * n_warps) * 8;
        if (token >= at.part.n_wanted) { /* as a rule for all but the first tiles */
            commit_copies();
            return;
        }
        uint32_t n = min(8u, at.part.n_wanted - token);
        uint32_t vector = at.row * at.part.n_tokens + at.part.token_first + token;
        const uint8_t *codes = at.parts.codes + vector * vector_bytes;
        uint32_t to = (uint32_t)__cvta_generic_to_shared(base + k % n_slots * slot_bytes);
#pragma unroll
        for (uint32_t unit = 0; unit < codes_bytes; unit += warp_lanes * unit_bytes) {
            uint32_t offset = unit + lane * unit_bytes;
            if (offset < n * vector_bytes) {
                start_copy<unit_bytes>(to + offset, codes + offset);
            }
        }
        if constexpr (codec == decode_codec::zeros) {
            commit_copies();
            return;
        }
        const uint32_t *meta = at.parts.meta + vector + lane;
        uint32_t n_words = n;
        if constexpr (codec == decode_codec::tq) { /* scales of two tokens in a word */
            meta = at.parts.meta + vector / 2 + lane;
            n_words = (n + vector % 2 + 1) / 2;
        }
        if (lane < n_words) {
            start_copy<4>(to + codes_bytes + lane * KVF_SAW_META_BYTES,
                          reinterpret_cast<const uint8_t *>(meta));
        }
        commit_copies();
    }

    /* The lane's codes and meta word, or scale, of tile k, asked for n_slots tiles ago. is_odd: so
     * is the number of the row's first wanted vector. */
    __device__ __forceinline__ uint32_t take(uint32_t k, lane_part *codes, uint32_t is_odd) const
    {
        uint32_t g = threadIdx.x % warp_lanes / 4;
        const uint8_t *slot = base + k % n_slots * slot_bytes;
        await_copies<n_slots - 1>();
        __syncwarp();
        codes->load(slot + g * vector_bytes);
        uint32_t meta = reinterpret_cast<const uint32_t *>(slot + codes_bytes)[g];
        if constexpr (codec == decode_codec::tq) {
            meta = reinterpret_cast<const uint16_t *>(slot + codes_bytes)[g + is_odd];
        }
        __syncwarp(); /* then the slot may be filled again */
        return meta;
    }
};

/* A warp's tiles. */
template <int dim, int bits, decode_codec codec, bool centred>
static __device__ __forceinline__ void
decode_tiles(const decode_row<dim> &at, uint32_t warp, const decode_ring<dim, bits, codec> &ring,
             uint8_t *stage_bytes, const hadamard_pair &h16, const uint32_t *table,
             const decode_zeros *zeros)
{
    constexpr uint32_t n_warps = decode_ring<dim, bits, codec>::n_warps;
    uint32_t g = threadIdx.x % warp_lanes / 4;
    uint32_t is_odd = (at.row * at.part.n_tokens + at.part.token_first) % 2;
    float unit = at.tensor.rotations[0].factor;
    float rsqrt_order = at.tensor.rsqrt_order * (1.0f / code_unit);
    bool is_aligned = at.pages.is_aligned();
    bool has_whole_tiles = at.pages.has_whole_tiles();
    uint64_t token_stride = at.pages.token_stride_bytes;
    const decode_stage<dim, bits, codec> stage(stage_bytes, token_stride);
#pragma unroll 1
    for (uint32_t k = 0; (warp + k * n_warps) * 8 < at.part.n_wanted; k++) {
        typename decode_ring<dim, bits, codec>::lane_part codes;
        uint32_t meta = ring.take(k, &codes, is_odd);
        ring.ask(at, warp, k + ring.n_slots);
        float offset = 0.0f;
        float factor;
        float z[dim / 32][2][4];
        if constexpr (codec == decode_codec::tq) {
            factor = f32_of_half_bits(meta) * unit;
            rotate_levels<dim, bits>(codes, table, h16, z);
        } else {
            offset = f32_of_half_bits(meta & 0xffff) * at.tensor.sqrt_order;
            factor = f32_of_half_bits(meta >> 16) * rsqrt_order;
            rotate_codes<dim, bits>(codes, h16, z);
        }
        uint32_t token = (warp + k * n_warps) * 8 + g;
        if constexpr (codec == decode_codec::zeros) {
            const float2 of = zeros->of[token < at.part.n_wanted ? token : 0];
            offset = of.x;
            factor = of.y;
        }
        uint32_t words[dim / 32][4];
        make_words<dim, centred, codec>(at, z, factor, offset, words);
        if (stage.is_used && is_aligned && has_whole_tiles) {
            stage.store(words, ring.tiles_at[k], token_stride, at.part.n_wanted - (token - g));
        } else if (token < at.part.n_wanted) {
            uint8_t *vector = has_whole_tiles
                                  ? at_address<uint8_t>(ring.tiles_at[k] + g * token_stride)
                                  : at.shared->pages.vector(token);
            store_pieces<dim>(vector + threadIdx.x % 4 * 16, words, is_aligned);
        }
    }
}

/* A thread block has a row: rows, then parts. table, of tq, and zeros are in shared memory. */
template <int dim, int bits, decode_codec codec>
static __device__ __forceinline__ void decode_row_of(const struct kvf_gpu_work &work,
                                                     uint32_t tensors, const uint32_t *table,
                                                     decode_zeros *zeros)
{
    using ring_of = decode_ring<dim, bits, codec>;
    __shared__ __align__(16) decode_shared<dim> shared;
    __shared__ __align__(16)
        uint8_t rings[ring_of::n_warps][ring_of::n_slots * ring_of::slot_bytes];
    __shared__ __align__(16)
        uint8_t stages[ring_of::n_warps][decode_stage<dim, bits, codec>::tile_bytes];
    __shared__ uint64_t tiles_at[ring_of::n_warps][warp_lanes];
    uint32_t n_rows = saw_rows_max(&work, tensors);
    uint32_t index = blockIdx.x / n_rows;
    uint32_t row = blockIdx.x - index * n_rows;
    const struct kvf_gpu_part part = parts_of(work)[index];
    const struct kvf_gpu_tensor &tensor = work.tensors[part.is_v];
    if ((tensors >> part.is_v & 1) == 0 || row >= tensor.n_rows) {
        return;
    }
    const decode_row<dim> at = {
        tensor, part, saw_parts(tensor, part), row_pages(work, part, tensor, row), row, &shared};
    uint32_t warp = uniform_warp();
    ring_of ring = {rings[warp], tiles_at[warp]};
    for (uint32_t k = 0; k < ring.n_slots; k++) {
        ring.ask(at, warp, k);
    }
    uint32_t token = (warp + threadIdx.x % warp_lanes * ring.n_warps) * 8;
    uint32_t page_id = 0;
    if (token < part.n_wanted) {
        page_id = at.pages.page_ids[at.pages.page_of(token)];
    }
    fill_row<dim>(at);
    if constexpr (codec == decode_codec::zeros) {
        zeros->fill(at);
    }
    __syncthreads();
    /* behind the barrier: only this warp waits for its pages' numbers */
    ring.tiles_at[threadIdx.x % warp_lanes] = reinterpret_cast<uint64_t>(
        at.pages.vector(token, page_id));
    __syncwarp();
    const hadamard_pair h16(0x3c00, tensors >> 2);
    if (at.parts.mean != nullptr) {
        decode_tiles<dim, bits, codec, true>(at, warp, ring, stages[warp], h16, table, zeros);
    } else {
        decode_tiles<dim, bits, codec, false>(at, warp, ring, stages[warp], h16, table, zeros);
    }
}

template <int dim, int bits>
static __device__ __forceinline__ void decode_row_fast(const struct kvf_gpu_work &work,
                                                       uint32_t tensors)
{
    decode_row_of<dim, bits, decode_codec::saw>(work, tensors, nullptr, nullptr);
}

template <int dim, int bits>
static __device__ __forceinline__ void decode_row_zeros(const struct kvf_gpu_work &work,
                                                        uint32_t tensors)
{
    __shared__ decode_zeros zeros;
    decode_row_of<dim, bits, decode_codec::zeros>(work, tensors, nullptr, &zeros);
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_SAW_DECODE_CUH */
