/* SPDX-License-Identifier: Apache-2.0
 *
 * samples.h: one right message or entry of each kind, with every field set that may be. Tests break
 * copies of them; their bytes are the golden ones of tests/data/proto.
 */
#ifndef KVF_TESTS_TRANSPORT_SAMPLES_H
#define KVF_TESTS_TRANSPORT_SAMPLES_H

#include <string.h>

#include "transport/proto.h"
#include "transport/shm_lease.h"

static inline struct kvf_wire_hello sample_hello(void)
{
    struct kvf_wire_hello hello = {
        .version_min = 1,
        .version_max = 1,
        .flags = KVF_ATTACH_ALLOW_UNCALIBRATED | KVF_ATTACH_SPIN,
        .shard = 3,
        .shard_count = 4,
        .ring_entries = 1024,
        .staging_bytes = 64 << 20,
        .profile_fp = 0x1122334455667788,
        .record_bytes_max = 4096 + (8 << 20),
        .geometry = {.kind = KVF_KIND_KV,
                     .dtype = KVF_DTYPE_BF16,
                     .rope_state = KVF_ROPE_POST,
                     .layout_tag = 9,
                     .n_layers = 32,
                     .n_heads = 8,
                     .dim_k = 128,
                     .dim_v = 64,
                     .chunk_tokens = 256,
                     .sink_tokens = 4},
        .profile = "balanced",
        .label = "prod",
        .client_name = "engine-0",
        .format_record_bytes = {2232320, 2240512},
    };

    kvf_proto_head_init(&hello.head, KVF_WIRE_HELLO);
    for (uint8_t i = 0; i < 32; i++) {
        hello.weights_digest[i] = i;
        hello.adapter_digest[i] = (uint8_t)(0xf0 - i);
    }
    return hello;
}

static inline struct kvf_wire_welcome sample_welcome(void)
{
    struct kvf_wire_welcome welcome = {
        .version = 1,
        .lossless = 1,
        .incarnation = 0x0102030405060708,
        .connection_id = 17,
        .namespace_id = 0x8877665544332211,
        .ring_bytes = 1 << 20,
        .staging_bytes = 64 << 20,
        .arena_bytes = 3ull << 30,
        .profile_fp = 0x99aabbccddeeff00,
        .credits = 2048,
        .n_pieces = 3,
        .profile = "exact",
    };

    kvf_proto_head_init(&welcome.head, KVF_WIRE_WELCOME);
    return welcome;
}

static inline struct kvf_wire_profile sample_profile(void)
{
    struct kvf_wire_profile profile = {.bytes = 8192, .profile_fp = 0x1122334455667788};

    kvf_proto_head_init(&profile.head, KVF_WIRE_PROFILE);
    return profile;
}

static inline struct kvf_wire_piece sample_piece(enum kvf_wire_type type)
{
    struct kvf_wire_piece piece = {
        .piece = 5,
        .bytes = type == KVF_WIRE_PIECE ? 1 << 30 : 0,
    };

    kvf_proto_head_init(&piece.head, type);
    return piece;
}

static inline struct kvf_wire_note sample_note(enum kvf_wire_type type)
{
    struct kvf_wire_note note = {
        .status = type == KVF_WIRE_BYE ? KVF_ERR_TIER_OFF : KVF_OK,
        .connection_id = 17,
    };

    kvf_proto_head_init(&note.head, type);
    return note;
}

static inline struct kvf_wire_gpu sample_gpu(void)
{
    struct kvf_wire_gpu gpu = {.path = KVF_GPU_PATH_AGENT,
                               .uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"};

    kvf_proto_head_init(&gpu.head, KVF_WIRE_GPU);
    return gpu;
}

static inline struct kvf_wire_gpu_channel sample_gpu_channel(void)
{
    struct kvf_wire_gpu_channel channel = {.status = KVF_ERR_UNSUPPORTED, .text = "why"};

    kvf_proto_head_init(&channel.head, KVF_WIRE_GPU_CHANNEL);
    return channel;
}

/* 3 keys, a parent and one superseded key; key_first for a key_head of 4090. */
static inline struct kvf_shm_sqe sample_put(void)
{
    return (struct kvf_shm_sqe){
        .request = 0x0000000000050001,
        .opcode = KVF_OP_PUT,
        .flags = KVF_SQE_DURABLE | KVF_SQE_HAS_PARENT,
        .n_keys = 3,
        .n_entries = 5,
        .key_first = 4090,
        .budget_ms = 30000,
        .depth = 12,
        .ttl_s = 3600,
        .priority = 2,
    };
}

static inline struct kvf_shm_sqe sample_keyed(enum kvf_shm_opcode opcode)
{
    return (struct kvf_shm_sqe){
        .request = 0x0000000000060002,
        .opcode = (uint8_t)opcode,
        .flags = opcode == KVF_OP_LOOKUP ? KVF_SQE_LEASE | KVF_SQE_PREFETCH : 0,
        .n_keys = 3,
        .n_entries = 3,
        .n_tails = opcode == KVF_OP_LOOKUP ? 1 : 0,
        .key_first = 4090,
        .budget_ms = opcode == KVF_OP_EVICT ? 0 : 250,
    };
}

/* The entries of sample_put. */
static inline void sample_keys(struct kvf_shm_key keys[5])
{
    memset(keys, 0, 5 * sizeof(keys[0]));
    for (uint32_t i = 0; i < 5; i++) {
        keys[i].key_bytes = (uint16_t)(16 + i * 8);
        memset(keys[i].key, 0xa0 + (int)i, keys[i].key_bytes);
        if (i < 3) {
            keys[i].token_start = 3072 + i * 256;
            keys[i].stage_offset = i * 65536;
            keys[i].record_bytes = 4096 + 50000 + i;
        }
    }
    keys[1].supersedes = 5; /* 1 + the last entry's position */
}

static inline struct kvf_shm_cqe sample_cqe(void)
{
    return (struct kvf_shm_cqe){
        .request = 0x0000000000060002,
        .kind = KVF_CQE_BLOCK,
        .tier = KVF_TIER_NVME,
        .status = KVF_OK,
        .index = 2,
        .piece = 5,
        .offset = 0x12345000,
        .record_bytes = 54097,
        .lease = kvf_lease_id_pack(9, 33),
    };
}

/* The request's completion of a lookup. */
static inline struct kvf_shm_cqe sample_cqe_lookup(void)
{
    return (struct kvf_shm_cqe){
        .request = 0x0000000000060002,
        .kind = KVF_CQE_REQUEST,
        .status = KVF_COMING,
        .lease = kvf_lease_id_pack(10, 34),
        .values = {2, 1, 1, 0},
    };
}

#endif /* KVF_TESTS_TRANSPORT_SAMPLES_H */
