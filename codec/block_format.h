/* SPDX-License-Identifier: Apache-2.0
 *
 * block_format.h: the bytes of a record, and nothing else.
 *
 * A record is a record page of 4096 bytes and a payload; it is the same in DRAM, on NVMe and on the
 * wire. docs/block-format.md is this header in prose; golden bytes are in tests/data/codec.
 *
 *   record page                           payload (multiple of 128 bytes unless opaque)
 *      0  struct kvf_block_header           strip of layer 0
 *    256  struct kvf_block_store              [K mean][K meta][K codes][V mean][V meta][V codes]
 *    384  u8  layer_bits[512]               strip of layer 1
 *    896  u32 layer_offsets[512]            ...
 *   2944  zero                              raw area, if n_escapes is not 0
 *
 * All numbers are little endian. header_crc32c covers bytes 0-255, with the field itself taken as
 * zero, and bytes 384-4095: the store part is rewritten by the drive that holds the record.
 */
#ifndef KVF_CODEC_BLOCK_FORMAT_H
#define KVF_CODEC_BLOCK_FORMAT_H

#include <stddef.h>
#include <stdint.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "records are little endian and are read in place");

#define KVF_BLOCK_MAGIC        0x4243564bU /* "KVCB" */
#define KVF_BLOCK_VERSION      1
#define KVF_BLOCK_HEADER_BYTES 256
#define KVF_BLOCK_PAGE_BYTES   4096
#define KVF_BLOCK_ALIGN_BYTES  128 /* parts of a strip, strips, and the unit of layer_offsets */
#define KVF_BLOCK_LAYERS       512
#define KVF_BLOCK_CLIP_ONE     32768 /* clip_q15 of ratio 1.0: nothing is clipped */

/* kvf_block_tensor.codec. A number never changes meaning. */
enum kvf_block_codec {
    KVF_CODEC_NONE = 0, /* no such tensor (d_v 0, or opaque bytes) */
    KVF_CODEC_RAW = 1,
    KVF_CODEC_EXACT = 2,
    KVF_CODEC_SAW = 3,
    KVF_CODEC_TQ = 4,
    KVF_CODEC_KIVI = 5,
};

/* A nibble of layer_bits: how one tensor of one layer is stored. K in bits 0-3, V in bits 4-7. */
enum kvf_block_bits {
    KVF_BITS_RAW = 0,    /* as by codec raw, whatever the descriptor says: absent, or did not pay */
    KVF_BITS_EXACT = 12, /* exponents recoded to 4 bits */
    KVF_BITS_EDGE = 8,   /* with KVF_TENSOR_EDGES: by saw at 8 bits, centred if the tensor is */
    /* 1..8: width of the codes */
};

/* kvf_block_tensor.flags */
enum kvf_block_tensor_flags {
    KVF_TENSOR_CENTER = 1 << 0,   /* the mean part is there and is added by the decoder */
    KVF_TENSOR_SIGNS = 1 << 1,    /* channels are flipped by rot_seed before the rotation */
    KVF_TENSOR_RESIDUAL = 1 << 2, /* tq: a bit a value is signs of the projected residual */
    KVF_TENSOR_SPLIT = 1 << 3,    /* tq: listed channels have a rotation of their own, a bit more */
    /* tq: how the encoder chose scales; 0: the norm, as published */
    KVF_TENSOR_SCALE_MATCHED = 1 << 4,
    KVF_TENSOR_SCALE_LEAST_SQUARES = 2 << 4,
    KVF_TENSOR_SCALE_UNBIASED = 3 << 4,
    KVF_TENSOR_SCALE_MASK = 3 << 4,
    KVF_TENSOR_EDGES = 1 << 6,          /* some layers are KVF_BITS_EDGE */
    KVF_TENSOR_CENTER_PROFILE = 1 << 7, /* the decoder adds the mean that the profile has; there is
                                           no mean part */
};

/* kvf_block_header.block_flags */
enum kvf_block_flags {
    KVF_BLOCK_KINDS = 1 << 0,  /* layers are of several kinds: what stands at profile_fp says which;
                                  k and v describe the first kind */
    KVF_BLOCK_DELTAS = 1 << 1, /* layers after base_layer are deltas, but for each
                                  rebase_layers-th (closed_loop.h) */
};

/* kvf_block_tensor.rot_kind */
enum kvf_block_rotation {
    KVF_ROT_NONE = 0,
    KVF_ROT_SYLVESTER = 1, /* order 2^n equals the group */
    KVF_ROT_KRONECKER = 2, /* order 12, 20 or 28 times 2^n equals the group */
    KVF_ROT_BLOCKS = 3,    /* Sylvester of order rot_order, repeated along the group */
    KVF_ROT_SPLIT = 4,     /* one of rot_order listed channels, one of the others */
};

/* kvf_block_tensor.zero_kind, .group_axis, .layout */
enum kvf_block_zero {
    KVF_ZERO_NONE = 0,
    KVF_ZERO_F16_LO = 1, /* the value of code 0, in fp16 */
    KVF_ZERO_INT = 2,    /* the code of value 0, an integer of the codes' width */
    KVF_ZERO_HALF = 3,   /* value 0 lies in the middle between that code and the next */
};
enum kvf_block_axis {
    KVF_AXIS_NONE = 0,
    KVF_AXIS_TOKEN = 1,   /* a scale a token and group of channels */
    KVF_AXIS_CHANNEL = 2, /* a scale a channel and group of tokens */
};
enum kvf_block_layout {
    KVF_LAYOUT_NATURAL = 0, /* elements in channel order */
    KVF_LAYOUT_MMA = 1,     /* the order of codec_saw.h */
    KVF_LAYOUT_SPLIT = 2,   /* planes of codec_exact.h */
};

/* kvf_block_tensor.codebook_id */
enum kvf_block_codebook {
    KVF_CODEBOOK_UNIFORM = 0,
    KVF_CODEBOOK_GAUSS = 1, /* codec_tq_codebook.h */
};

/* How K, or V, is stored. Codec fields appear here and nowhere else. */
struct kvf_block_tensor {
    uint8_t codec;    /* enum kvf_block_codec */
    uint8_t bits;     /* the nibble that layer_bits has unless a strip fell back to raw */
    uint8_t flags;    /* enum kvf_block_tensor_flags */
    uint8_t rot_kind; /* enum kvf_block_rotation */
    uint16_t rot_order;
    uint16_t clip_q15; /* share of the range that is kept, times 32768; 0: not a quantizer; 3 or 9:
                          the best of so many ratios, vector by vector */
    uint32_t rot_seed;
    uint32_t codebook_crc32c; /* 0: uniform levels */
    uint8_t codebook_id;      /* 0: uniform levels */
    uint8_t scale_dtype;      /* enum kvf_dtype; 0: no scale */
    uint8_t zero_kind;        /* enum kvf_block_zero */
    uint8_t group_axis;       /* enum kvf_block_axis */
    uint16_t group_size;      /* elements that share a scale, at most */
    uint8_t layout;           /* enum kvf_block_layout */
    uint8_t reserved;
};

/* Bytes 0-255 of the record page. */
struct kvf_block_header {
    uint32_t magic;
    uint16_t version;
    uint16_t header_bytes; /* KVF_BLOCK_HEADER_BYTES */
    uint32_t header_crc32c;
    uint32_t payload_crc32c; /* of the bytes from 4096 to total_bytes */
    uint64_t total_bytes;    /* record page and payload */
    uint64_t raw_bytes;      /* what the block decodes to */
    uint64_t decoded_hash;   /* of the decoded bytes; 0: not computed */
    uint64_t model_fp;       /* 0: not given */
    uint64_t weights_fp;     /* kinds X and XG: of the weights, adapter and factors that make K and
                                V of them; 0: not given, or another kind */
    uint8_t key_id[32];      /* filled in by the daemon */
    uint16_t shard;          /* filled in by the daemon */
    uint16_t shard_count;    /* filled in by the daemon */
    uint8_t tensor_kind;     /* enum kvf_tensor_kind */
    uint8_t src_dtype;       /* enum kvf_dtype the block was made from; 0 for opaque bytes */
    uint8_t dst_dtype;       /* enum kvf_dtype it decodes to */
    uint8_t rope_state;      /* enum kvf_rope_state */
    uint32_t rope_fp;        /* of the rotary table, for codecs that apply it; else 0 */
    uint32_t token_start;
    uint16_t n_tokens;
    uint16_t n_sink_raw; /* leading tokens that are in the raw area */
    uint16_t n_tail_raw; /* trailing tokens that are in the raw area; 0 */
    uint16_t layer_first;
    uint16_t n_layers;
    uint16_t base_layer;    /* cross-layer codecs; else 0 */
    uint16_t rebase_layers; /* cross-layer codecs; else 0 */
    uint16_t n_heads;
    uint16_t head_first;
    uint16_t d_k;
    uint16_t d_v;
    uint16_t n_streams;  /* packed records: streams; else 0 */
    uint8_t entropy_id;  /* enum kvf_entropy_id; 0: a plain record, as all but drives see them */
    uint8_t block_flags; /* enum kvf_block_flags */
    uint16_t chunk_tokens;
    uint32_t n_escapes;       /* vectors in the raw area, sinks included */
    uint32_t raw_area_offset; /* in units of 128 bytes from the start of the payload: the end of the
                                 last strip, also when there is no raw area */
    uint32_t raw_area_bytes;  /* multiple of 128; 0 if n_escapes is 0 */
    uint32_t plain_bytes;     /* packed records (entropy_format.h): total_bytes of the plain one */
    uint32_t plain_crc32c;    /* packed records: payload_crc32c of the plain one */
    uint64_t profile_fp;      /* kvf_codec_plan.profile_fp of the encoder */
    struct kvf_block_tensor k;
    struct kvf_block_tensor v;
    uint8_t reserved[48];
};

/* Bytes 256-383: where a drive keeps its own account of the record. Zero elsewhere. */
struct kvf_block_store {
    uint8_t store_uuid[16];
    uint64_t generation; /* of the segment; never reused */
    uint64_t sequence;   /* of the record; a later one is larger, store-wide */
    uint64_t record_bytes;
    uint64_t namespace_epoch;
    uint8_t mac[32];
    uint64_t namespace_id; /* whose epoch namespace_epoch is */
    uint8_t reserved[40];
};

/* What precedes every payload. */
struct kvf_record_page {
    struct kvf_block_header header;
    struct kvf_block_store store;
    uint8_t layer_bits[KVF_BLOCK_LAYERS];     /* low nibble K, high nibble V: enum kvf_block_bits */
    uint32_t layer_offsets[KVF_BLOCK_LAYERS]; /* of each strip in the payload, in 128 bytes */
    uint8_t reserved[1152];
};

#define KVF_AT(type, field, offset)                                                                \
    _Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")

KVF_AT(kvf_block_tensor, codec, 0);
KVF_AT(kvf_block_tensor, bits, 1);
KVF_AT(kvf_block_tensor, flags, 2);
KVF_AT(kvf_block_tensor, rot_kind, 3);
KVF_AT(kvf_block_tensor, rot_order, 4);
KVF_AT(kvf_block_tensor, clip_q15, 6);
KVF_AT(kvf_block_tensor, rot_seed, 8);
KVF_AT(kvf_block_tensor, codebook_crc32c, 12);
KVF_AT(kvf_block_tensor, codebook_id, 16);
KVF_AT(kvf_block_tensor, scale_dtype, 17);
KVF_AT(kvf_block_tensor, zero_kind, 18);
KVF_AT(kvf_block_tensor, group_axis, 19);
KVF_AT(kvf_block_tensor, group_size, 20);
KVF_AT(kvf_block_tensor, layout, 22);
KVF_AT(kvf_block_tensor, reserved, 23);
_Static_assert(sizeof(struct kvf_block_tensor) == 24, "a tensor descriptor has 24 bytes");

KVF_AT(kvf_block_header, magic, 0);
KVF_AT(kvf_block_header, version, 4);
KVF_AT(kvf_block_header, header_bytes, 6);
KVF_AT(kvf_block_header, header_crc32c, 8);
KVF_AT(kvf_block_header, payload_crc32c, 12);
KVF_AT(kvf_block_header, total_bytes, 16);
KVF_AT(kvf_block_header, raw_bytes, 24);
KVF_AT(kvf_block_header, decoded_hash, 32);
KVF_AT(kvf_block_header, model_fp, 40);
KVF_AT(kvf_block_header, weights_fp, 48);
KVF_AT(kvf_block_header, key_id, 56);
KVF_AT(kvf_block_header, shard, 88);
KVF_AT(kvf_block_header, shard_count, 90);
KVF_AT(kvf_block_header, tensor_kind, 92);
KVF_AT(kvf_block_header, src_dtype, 93);
KVF_AT(kvf_block_header, dst_dtype, 94);
KVF_AT(kvf_block_header, rope_state, 95);
KVF_AT(kvf_block_header, rope_fp, 96);
KVF_AT(kvf_block_header, token_start, 100);
KVF_AT(kvf_block_header, n_tokens, 104);
KVF_AT(kvf_block_header, n_sink_raw, 106);
KVF_AT(kvf_block_header, n_tail_raw, 108);
KVF_AT(kvf_block_header, layer_first, 110);
KVF_AT(kvf_block_header, n_layers, 112);
KVF_AT(kvf_block_header, base_layer, 114);
KVF_AT(kvf_block_header, rebase_layers, 116);
KVF_AT(kvf_block_header, n_heads, 118);
KVF_AT(kvf_block_header, head_first, 120);
KVF_AT(kvf_block_header, d_k, 122);
KVF_AT(kvf_block_header, d_v, 124);
KVF_AT(kvf_block_header, n_streams, 126);
KVF_AT(kvf_block_header, entropy_id, 128);
KVF_AT(kvf_block_header, block_flags, 129);
KVF_AT(kvf_block_header, chunk_tokens, 130);
KVF_AT(kvf_block_header, n_escapes, 132);
KVF_AT(kvf_block_header, raw_area_offset, 136);
KVF_AT(kvf_block_header, raw_area_bytes, 140);
KVF_AT(kvf_block_header, plain_bytes, 144);
KVF_AT(kvf_block_header, plain_crc32c, 148);
KVF_AT(kvf_block_header, profile_fp, 152);
KVF_AT(kvf_block_header, k, 160);
KVF_AT(kvf_block_header, v, 184);
KVF_AT(kvf_block_header, reserved, 208);
_Static_assert(sizeof(struct kvf_block_header) == KVF_BLOCK_HEADER_BYTES,
               "the block header has 256 bytes");

KVF_AT(kvf_block_store, store_uuid, 0);
KVF_AT(kvf_block_store, generation, 16);
KVF_AT(kvf_block_store, sequence, 24);
KVF_AT(kvf_block_store, record_bytes, 32);
KVF_AT(kvf_block_store, namespace_epoch, 40);
KVF_AT(kvf_block_store, mac, 48);
KVF_AT(kvf_block_store, namespace_id, 80);
KVF_AT(kvf_block_store, reserved, 88);
_Static_assert(sizeof(struct kvf_block_store) == 128, "the store part has 128 bytes");

KVF_AT(kvf_record_page, header, 0);
KVF_AT(kvf_record_page, store, 256);
KVF_AT(kvf_record_page, layer_bits, 384);
KVF_AT(kvf_record_page, layer_offsets, 896);
KVF_AT(kvf_record_page, reserved, 2944);
_Static_assert(sizeof(struct kvf_record_page) == KVF_BLOCK_PAGE_BYTES,
               "the record page has 4096 bytes");

#undef KVF_AT

#endif /* KVF_CODEC_BLOCK_FORMAT_H */
