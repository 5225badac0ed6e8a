/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu.h: what the host tells the codecs' kernels, and what they tell the host.
 *
 * One launch works on a list of parts: a part is one tensor (K or V) of one layer of one block, in
 * the engine's pages and in a record's payload. The list, the page ids and the results lie in
 * memory that the device reaches; the two tensors' facts travel as kernel parameters. Bytes are
 * those of block_format.h, equal to those of the C codecs.
 *
 * The header is read by C and by CUDA and includes neither CUDA's headers nor its types: device
 * addresses are uint64_t.
 */
#ifndef KVF_CODEC_CODEC_GPU_H
#define KVF_CODEC_CODEC_GPU_H

#include <stdint.h>

#define KVF_GPU_PARTS_MAX 65535 /* of one launch */
#define KVF_GPU_CLIPS_MAX 9     /* KVF_CODEC_CLIPS_MAX */

/* A rotation of tq: struct kvf_codec_rotation. */
struct kvf_gpu_rotation {
    uint16_t n;
    uint16_t order;
    uint16_t code_bytes;
    uint8_t bits;
    uint8_t reserved;
    float root_mean_square;
    float quantize;
    float scale;
    float factor;
    float residual;
    float residual_factor;
};

/* K or V of a kind of layers of a plan: struct kvf_codec_tensor without pointers. */
struct kvf_gpu_tensor {
    uint16_t n_heads;
    uint16_t dim;
    uint16_t group;
    uint16_t n_rows;
    uint16_t code_bytes;
    uint16_t rot_order;
    uint8_t dtype;
    uint8_t element_bytes;
    uint8_t codec;      /* enum kvf_block_codec */
    uint8_t bits;       /* of the descriptor */
    uint8_t flags;      /* enum kvf_block_tensor_flags */
    uint8_t n_clips;    /* ratios that the encoder is to try; 0: clip_ratio alone */
    uint8_t group_axis; /* of kivi: enum kvf_block_axis */
    uint8_t group_size; /* of kivi */
    float sqrt_order;
    float rsqrt_order;
    float clip_ratio;                     /* 1.0: nothing is clipped */
    float clip_ratios[KVF_GPU_CLIPS_MAX]; /* n_clips of them, largest first */
    uint32_t rot_seed;                    /* of tq with a residual */
    uint8_t n_rotations;                  /* of tq */
    uint8_t n_scales;                     /* of tq */
    uint8_t zero_kind;                    /* of saw: enum kvf_block_zero */
    uint8_t is_looped; /* of a plan with deltas: the kernels are those of codec_closed_loop.cu */
    struct kvf_gpu_rotation rotations[2];
    uint8_t sign_bits[128];
    uint8_t order[256];
};

/* How a region's pages are laid out; the formula is that of struct kvf_tensor_view. */
struct kvf_gpu_pages {
    uint64_t page_stride_bytes;
    uint64_t token_stride_bytes;
    uint64_t head_stride_bytes;
};

struct kvf_gpu_part {
    uint64_t base;   /* the layer's first page, any alignment of the element */
    uint64_t stored; /* in the payload: the part's first byte, on 128 bytes */
    uint64_t mean;   /* KVF_TENSOR_CENTER_PROFILE: fp16[heads][dim] */
    union {
        uint64_t split;  /* encode: the profile's lists of channels; 0: it has none */
        uint64_t sums;   /* encode of deltas by single layers: fp32[n_tokens][n_heads * dim] of the
                           block; 0: of all layers at once */
        uint64_t source; /* restore: the base of what was encoded */
    };
    uint32_t first_page; /* index in page_ids of the page that holds view token 0 */
    uint32_t block;      /* index of the block's result */
    union {
        uint32_t n_sinks;    /* encode: leading tokens that become escapes */
        uint32_t part_bytes; /* decode of exact: of the stored part, as the host has checked them;
                                what the part says about itself is not trusted */
        uint32_t n_vectors;  /* patch: in the section */
    };
    uint32_t fixed_bytes; /* encode: that it takes in its strip; 0: of no fixed size */
    uint16_t n_tokens;    /* of the block */
    uint16_t token_first; /* decode: first token that is wanted; it is view token 0 */
    uint16_t n_wanted;    /* decode: tokens wanted */
    uint16_t layer;
    uint8_t is_v;
    uint8_t bits; /* encode: in the layer table, unless it falls back to raw */
    uint8_t loop; /* of plans with deltas: enum kvf_gpu_loop */
    uint8_t reserved[5];
};

enum kvf_gpu_loop {
    KVF_GPU_LOOP_DELTA = 1 << 0, /* the layer is a delta */
    KVF_GPU_LOOP_RAW = 1 << 1,   /* decode: the strip is stored raw */
};

/* What the encoders find out about a block. Written by the last kernel of an encode, zeroed by the
 * host before; in memory that both see. */
struct kvf_gpu_result {
    uint32_t n_escapes;       /* sinks included */
    uint32_t raw_area_offset; /* in units of 128 bytes: where the strips end */
    uint32_t raw_area_bytes;
    uint32_t flags; /* enum kvf_gpu_result_flags */
    uint32_t layer_offsets[512];
    uint8_t layer_bits[512];
};

enum kvf_gpu_result_flags {
    KVF_GPU_DONE = 1 << 0,
    /* The block needs what kernels do not do (a saw part with too many escapes becomes raw, which
     * moves all that follows): the host encodes it from copied pages. */
    KVF_GPU_REDO = 1 << 1,
};

/* Parameters of every kernel, by value. Threads find their part by the block index, in the shape
 * that the kernel's file describes. In an encode parts of one block are consecutive, by layer, K
 * before V. Where a plan has layers of several kinds, each kind has launches of its own, which find
 * their parts by `numbers`; of one layer still K before V. */
struct kvf_gpu_work {
    struct kvf_gpu_tensor tensors[2]; /* K, V; of all parts that a launch is of */
    struct kvf_gpu_pages pages[2];
    uint64_t parts;       /* struct kvf_gpu_part *; written to by kvf_exact_place alone */
    uint64_t numbers;     /* const uint32_t *: encode: which parts a launch is of; 0: all of them */
    uint64_t page_ids;    /* const uint32_t * */
    uint64_t results;     /* struct kvf_gpu_result *, encode */
    uint64_t scratch;     /* device memory of kvf_gpu_encode_scratch_bytes; decode of deltas: see
                             codec_closed_loop_gpu.h */
    uint32_t n_parts;     /* that a launch is of */
    uint32_t n_parts_all; /* encode: of the list */
    uint32_t escape_words; /* encode: in scratch for each part, see codec_gpu_scratch.h; 0: none */
    uint32_t n_blocks;
    uint32_t n_layers; /* of the plan */
    uint32_t tokens_a_page;
    uint32_t has_v;
    uint32_t tokens_max; /* the largest n_tokens (encode) or n_wanted (decode) of the parts */
    /* Of a thread block on this device, at most: the host chooses kernels by it. 0: any. */
    uint32_t shared_bytes_max;
};

#ifndef __CUDACC__
_Static_assert(sizeof(struct kvf_gpu_part) == 64, "an entry of the list has 64 bytes");
_Static_assert(sizeof(struct kvf_gpu_work) <= 4000, "parameters of a kernel");
#endif

#endif /* KVF_CODEC_CODEC_GPU_H */
