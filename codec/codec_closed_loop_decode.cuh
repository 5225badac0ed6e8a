/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_closed_loop_decode.cuh: codes of differences to layers of X.
 */
#ifndef KVF_CODEC_CODEC_CLOSED_LOOP_DECODE_CUH
#define KVF_CODEC_CODEC_CLOSED_LOOP_DECODE_CUH

#include "codec/codec_closed_loop_encode.cuh"

namespace kvf
{

/* A field of so many bits of a plane: its byte, from the strip's beginning on, and first bit. */
struct loop_field {
    uint32_t byte;
    uint32_t shift;
    uint32_t mask;

    loop_field() = default; /* in shared memory */

    __device__ __forceinline__ loop_field(uint32_t plane, uint32_t plane_bits, uint32_t i)
        : byte(plane + i * plane_bits / 8), shift(i * plane_bits % 8), mask((1u << plane_bits) - 1)
    {
    }

    __device__ __forceinline__ uint32_t of(uint32_t value) const
    {
        return value >> shift & mask;
    }
};

/* Where a vector lies in the strips of a kind of layers, from their beginning on. */
struct loop_strip {
    uint32_t scale; /* or of the word with lo */
    uint32_t codes;
    loop_field zero; /* of its zero, in both planes */
    loop_field low_zero;

    loop_strip() = default; /* in shared memory */

    __device__ __forceinline__ loop_strip(const struct kvf_gpu_tensor &tensor, uint32_t row,
                                          uint32_t token, uint32_t n_tokens)
        : scale((row * n_tokens + token) * saw_meta_bytes(tensor)), codes(0),
          zero(zeros_of(tensor, row, n_tokens), tensor.bits - saw_low_bits(tensor.bits), token),
          low_zero(zeros_of(tensor, row, n_tokens) +
                       (n_tokens * (tensor.bits - saw_low_bits(tensor.bits)) + 7) / 8,
                   saw_low_bits(tensor.bits), token)
    {
        const saw_parts parts(tensor, 0, n_tokens);
        codes = (uint32_t) reinterpret_cast<uint64_t>(parts.codes) +
                (row * n_tokens + token) * tensor.code_bytes;
    }

    static __device__ __forceinline__ uint32_t zeros_of(const struct kvf_gpu_tensor &tensor,
                                                        uint32_t row, uint32_t n_tokens)
    {
        const saw_parts parts(tensor, 0, n_tokens);
        return (uint32_t) reinterpret_cast<uint64_t>(parts.zeros(tensor, row, n_tokens));
    }
};

/* What is read of a block's parts before anything else is. */
template <bool fast> struct loop_decode_shared {
    loop_room<fast> rooms[loop_warps];
    loop_strip strips[loop_warps][2]; /* in layers by themselves, in deltas */
    uint64_t stored[KVF_BLOCK_LAYERS];
    uint64_t base[KVF_BLOCK_LAYERS];
    uint8_t loop[KVF_BLOCK_LAYERS];
};

/* A warp's vector of a block. */
struct loop_vector_place {
    uint32_t row;
    uint32_t token;    /* of the block */
    uint32_t n_tokens; /* of the block */
    uint64_t offset;   /* in a layer's pages */
    const loop_strip *strips;
};

/* Of a vector of a layer, what is read of its strip, as it is stored: whoever waits for it waits
 * where it is used, a layer later. */
struct loop_stored_vector {
    uint32_t meta;
    uint32_t zero;
    uint32_t low_zero;
    loop_words words; /* fast */
};

template <bool fast>
static __device__ __forceinline__ loop_stored_vector loop_read(const struct kvf_gpu_work &work,
                                                               const loop_vector_place &at,
                                                               uint64_t stored, bool is_delta)
{
    const struct kvf_gpu_tensor &tensor = work.tensors[is_delta];
    const loop_strip &strip = at.strips[is_delta];
    const uint8_t *from = at_address<const uint8_t>(stored);
    loop_stored_vector read = {0, 0, 0, {0, 0}};
    if (has_zeros(tensor)) {
        read.meta = *reinterpret_cast<const uint16_t *>(from + strip.scale);
        read.zero = from[strip.zero.byte];
        if (saw_low_bits(tensor.bits) != 0) {
            read.low_zero = from[strip.low_zero.byte];
        }
    } else {
        read.meta = *reinterpret_cast<const uint32_t *>(from + strip.scale);
    }
    if constexpr (fast) {
        read.words = loop_load_words(tensor.bits, from + strip.codes);
    }
    return read;
}

static __device__ __forceinline__ generic_stored loop_begin(const struct kvf_gpu_tensor &tensor,
                                                            const loop_strip &strip,
                                                            const loop_stored_vector &read)
{
    if (!has_zeros(tensor)) {
        return loop_stored(tensor, read.meta >> 16, read.meta & 0xffff);
    }
    uint32_t zero = strip.zero.of(read.zero) << saw_low_bits(tensor.bits);
    return loop_stored(tensor, read.meta, zero | strip.low_zero.of(read.low_zero));
}

template <bool fast>
static __device__ __forceinline__ void
loop_codes(const struct kvf_gpu_tensor &tensor, const loop_stored_vector &read,
           const uint8_t *codes_at, loop_room<fast> &room, int32_t codes[loop_lanes<fast>::n])
{
    if constexpr (fast) {
        loop_codes_of(tensor.bits, read.words, room, codes);
    } else {
        unpack_codes(codes_at, tensor.order, tensor.group, tensor.bits, room.integers.now);
        for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
            bool is_there = loop_lanes<fast>::has(tensor, j);
            codes[j] = is_there ? room.integers.now[loop_lanes<fast>::index(j)] : 0;
        }
        __syncwarp();
    }
}

/* A strip that is stored raw: the vector as it is, and the state after it. */
template <bool fast>
static __device__ void loop_take_raw(const struct kvf_gpu_tensor &tensor, const uint8_t *from,
                                     uint8_t *to, float state[loop_lanes<fast>::n])
{
    loop_load<fast>(tensor, from, state);
    for (uint32_t j = 0; j < loop_lanes<fast>::n; j++) {
        bool counts = (__float_as_uint(state[j]) & 0x7fffffff) < loop_limit_bits;
        state[j] = 0.0f + (counts ? state[j] : 0.0f);
        for (uint32_t i = 0; i < tensor.element_bytes && loop_lanes<fast>::has(tensor, j); i++) {
            uint32_t at = loop_lanes<fast>::index(j) * tensor.element_bytes + i;
            to[at] = from[at];
        }
    }
}

/* Where a vector lies in strips that are stored raw. */
static __device__ uint64_t loop_raw_offset(const struct kvf_gpu_tensor &tensor,
                                           const loop_vector_place &at)
{
    uint32_t rows_a_head = tensor.dim / tensor.group;
    uint32_t head = at.row / rows_a_head;
    uint64_t vector = (uint64_t)head * at.n_tokens + at.token;
    return (vector * tensor.dim + (at.row - head * rows_a_head) * tensor.group) *
           tensor.element_bytes;
}

template <bool fast>
static __device__ __forceinline__ void
loop_decode_layers(const struct kvf_gpu_work &work, const loop_decode_shared<fast> &shared,
                   loop_room<fast> &room, const loop_vector_place &at, uint32_t n_layers,
                   float state[loop_lanes<fast>::n])
{
    uint32_t flips_own = loop_flips<fast>(work.tensors[0], at.row);
    uint32_t flips_delta = loop_flips<fast>(work.tensors[1], at.row);
    uint32_t loop = shared.loop[0];
    loop_stored_vector next = {0, 0, 0, {0, 0}};
    if ((loop & KVF_GPU_LOOP_RAW) == 0) {
        next = loop_read<fast>(work, at, shared.stored[0], (loop & KVF_GPU_LOOP_DELTA) != 0);
    }
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        const loop_stored_vector read = next;
        bool is_delta = (loop & KVF_GPU_LOOP_DELTA) != 0;
        bool is_raw = (loop & KVF_GPU_LOOP_RAW) != 0;
        const struct kvf_gpu_tensor &tensor = work.tensors[is_delta];
        uint64_t stored = shared.stored[layer];
        uint8_t *to = at_address<uint8_t>(shared.base[layer] + at.offset);
        if (layer + 1 < n_layers) {
            loop = shared.loop[layer + 1];
            if ((loop & KVF_GPU_LOOP_RAW) == 0) { /* on its way while this one is decoded */
                next = loop_read<fast>(work, at, shared.stored[layer + 1],
                                       (loop & KVF_GPU_LOOP_DELTA) != 0);
            }
        }
        if (is_raw) {
            loop_take_raw<fast>(
                tensor, at_address<const uint8_t>(stored + loop_raw_offset(tensor, at)), to, state);
            continue;
        }
        int32_t codes[loop_lanes<fast>::n];
        loop_codes<fast>(tensor, read,
                         at_address<const uint8_t>(stored + at.strips[is_delta].codes), room,
                         codes);
        loop_inverse<fast>(tensor, room, codes);
        loop_take<fast>(tensor, loop_begin(tensor, at.strips[is_delta], read),
                        is_delta ? flips_delta : flips_own, is_delta, codes, state);
        loop_store<fast>(tensor, to, state);
    }
}

template <bool fast> static __device__ void loop_decode(const struct kvf_gpu_work &work)
{
    __shared__ loop_decode_shared<fast> shared;
    const loop_place place(work);
    const struct kvf_gpu_part *parts = parts_of(work) + place.block * place.n_layers;
    const struct kvf_gpu_part first = parts[0];
    uint32_t token = place.tile * LOOP_TILE_TOKENS + warp_id();
    for (uint32_t i = threadIdx.x; i < place.n_layers; i += LOOP_THREADS) {
        shared.stored[i] = parts[i].stored;
        shared.base[i] = parts[i].base;
        shared.loop[i] = parts[i].loop;
    }
    __syncthreads();
    if (token >= first.n_wanted) {
        return;
    }
    uint32_t stored_token = first.token_first + token;
    loop_strip *strips = shared.strips[warp_id()];
    if (lane_id() < 2) {
        strips[lane_id()] = loop_strip(work.tensors[lane_id()], place.row, stored_token,
                                       first.n_tokens);
    }
    __syncwarp();
    const loop_vector_place at = {place.row, stored_token, first.n_tokens,
                                  loop_offset(work, first, place.row, token), strips};
    float state[loop_lanes<fast>::n] = {0.0f};
    if ((shared.loop[0] & KVF_GPU_LOOP_DELTA) != 0) {
        loop_get<fast>(work.tensors[0], work.scratch, place.row, token, state);
    }
    loop_decode_layers<fast>(work, shared, shared.rooms[warp_id()], at, place.n_layers, state);
    if (work.scratch != 0 && first.layer + place.n_layers < work.n_layers) {
        loop_keep<fast>(work.tensors[0], work.scratch, place.row, token, state);
    }
}

} /* namespace kvf */

#endif /* KVF_CODEC_CODEC_CLOSED_LOOP_DECODE_CUH */
