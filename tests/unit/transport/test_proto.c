/* SPDX-License-Identifier: Apache-2.0
 *
 * test_proto.c: every field of every message and ring entry out of range is refused, and every
 * right one passes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "tests/unit/transport/samples.h"
#include "transport/proto.h"
#include "transport/shm_lease.h"

/* One change that makes a message wrong. */
struct change {
    size_t offset;
    uint8_t bytes;
    uint64_t value;
};

#define CHANGE(type, field, wrong)                                                                 \
    {                                                                                              \
        offsetof(struct type, field), sizeof(((struct type *)NULL)->field), (wrong)                \
    }

static int decode(enum kvf_proto_side sender, const void *data, size_t bytes, uint32_t n_fds)
{
    union kvf_proto_message out;
    const char *why = NULL;
    int status = kvf_proto_decode(sender, data, bytes, n_fds, &out, &why);

    if (status == KVF_OK) {
        assert_memory_equal(&out, data, bytes);
    } else {
        assert_non_null(why);
    }
    return status;
}

/* Each change alone must be refused. */
static void refuse_all(enum kvf_proto_side sender, const void *good, size_t bytes, uint32_t n_fds,
                       const struct change *changes, size_t n)
{
    uint8_t copy[KVF_WIRE_MESSAGE_BYTES_MAX];

    assert_int_equal(decode(sender, good, bytes, n_fds), KVF_OK);
    for (size_t i = 0; i < n; i++) {
        memcpy(copy, good, bytes);
        memcpy(copy + changes[i].offset, &changes[i].value, changes[i].bytes);
        if (decode(sender, copy, bytes, n_fds) != KVF_ERR_PROTOCOL) {
            fail_msg("accepted: offset %zu, value %llx", changes[i].offset,
                     (unsigned long long)changes[i].value);
        }
    }
}

#define REFUSE_ALL(sender, good, n_fds, changes)                                                   \
    refuse_all((sender), &(good), sizeof(good), (n_fds), (changes),                                \
               sizeof(changes) / sizeof((changes)[0]))

static void heads_are_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_wire_note, head.magic, 0),
        CHANGE(kvf_wire_note, head.type, 0),
        CHANGE(kvf_wire_note, head.type, 8),
        CHANGE(kvf_wire_note, head.type, KVF_WIRE_READY), /* a daemon's */
        CHANGE(kvf_wire_note, head.type, KVF_WIRE_HELLO), /* another length */
        CHANGE(kvf_wire_note, head.bytes, sizeof(struct kvf_wire_note) - 1),
        CHANGE(kvf_wire_note, head.bytes, UINT32_MAX),
        CHANGE(kvf_wire_note, head.reserved, 1),
        CHANGE(kvf_wire_note, status, (uint32_t)-500),
        CHANGE(kvf_wire_note, status, 7),
        CHANGE(kvf_wire_note, reserved, 1),
    };
    struct kvf_wire_note note = sample_note(KVF_WIRE_MAPPED);
    uint8_t longer[sizeof(note) + 1] = {0};
    const char *why;
    union kvf_proto_message out;

    (void)state;
    REFUSE_ALL(KVF_PROTO_CLIENT, note, 0, changes);
    assert_int_equal(decode(KVF_PROTO_CLIENT, &note, sizeof(note), 1), KVF_ERR_PROTOCOL);
    assert_int_equal(decode(KVF_PROTO_CLIENT, &note, sizeof(note.head) - 1, 0), KVF_ERR_PROTOCOL);
    memcpy(longer, &note, sizeof(note));
    assert_int_equal(decode(KVF_PROTO_CLIENT, longer, sizeof(longer), 0), KVF_ERR_PROTOCOL);
    ((struct kvf_wire_head *)longer)->bytes = sizeof(longer);
    assert_int_equal(decode(KVF_PROTO_CLIENT, longer, sizeof(longer), 0), KVF_ERR_PROTOCOL);

    note.head.version = KVF_WIRE_VERSION_MAX + 1;
    assert_int_equal(kvf_proto_decode(KVF_PROTO_CLIENT, &note, sizeof(note), 0, &out, &why),
                     KVF_ERR_VERSION);
    assert_int_equal(out.head.version, KVF_WIRE_VERSION_MAX + 1);
    note = sample_note(KVF_WIRE_BYE); /* the one that both send */
    assert_int_equal(decode(KVF_PROTO_CLIENT, &note, sizeof(note), 0), KVF_OK);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &note, sizeof(note), 0), KVF_OK);
}

static void hello_is_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_wire_hello, version_min, 0),
        CHANGE(kvf_wire_hello, version_min, 2),
        CHANGE(kvf_wire_hello, version_max, 0),
        CHANGE(kvf_wire_hello, flags, 8),
        CHANGE(kvf_wire_hello, shard, 4),
        CHANGE(kvf_wire_hello, shard_count, 0),
        CHANGE(kvf_wire_hello, shard_count, KVF_SHARDS_MAX + 1),
        CHANGE(kvf_wire_hello, ring_entries, 0),
        CHANGE(kvf_wire_hello, ring_entries, KVF_SHM_RING_ENTRIES_MAX + 1),
        CHANGE(kvf_wire_hello, staging_bytes, KVF_PROTO_STAGING_MAX + 1),
        CHANGE(kvf_wire_hello, record_bytes_max, 0),
        CHANGE(kvf_wire_hello, record_bytes_max, KVF_PROTO_RECORD_MAX + 1),
        CHANGE(kvf_wire_hello, geometry.kind, 0),
        CHANGE(kvf_wire_hello, geometry.kind, KVF_KIND_X), /* which has no V and no rotation */
        CHANGE(kvf_wire_hello, geometry.kind, KVF_KIND_XG + 1),
        CHANGE(kvf_wire_hello, geometry.dtype, 0),
        CHANGE(kvf_wire_hello, geometry.dtype, 7),
        CHANGE(kvf_wire_hello, geometry.rope_state, 4),
        CHANGE(kvf_wire_hello, geometry.n_layers, 0),
        CHANGE(kvf_wire_hello, geometry.n_layers, KVF_LAYERS_MAX + 1),
        CHANGE(kvf_wire_hello, geometry.n_heads, 0),
        CHANGE(kvf_wire_hello, geometry.n_heads, KVF_HEADS_MAX + 1),
        CHANGE(kvf_wire_hello, geometry.dim_k, 0),
        CHANGE(kvf_wire_hello, geometry.dim_k, KVF_DIM_MAX + 1),
        CHANGE(kvf_wire_hello, geometry.dim_v, KVF_DIM_MAX + 1),
        CHANGE(kvf_wire_hello, geometry.chunk_tokens, 0),
        CHANGE(kvf_wire_hello, geometry.chunk_tokens, KVF_CHUNK_TOKENS_MAX + 1),
        CHANGE(kvf_wire_hello, geometry.sink_tokens, 257),
        CHANGE(kvf_wire_hello, profile[0], 0),
        CHANGE(kvf_wire_hello, profile[1], '\n'),
        CHANGE(kvf_wire_hello, profile[15], 'x'),
        CHANGE(kvf_wire_hello, label[63], 'x'),
        CHANGE(kvf_wire_hello, label[2], 0x7f),
        CHANGE(kvf_wire_hello, client_name[63], 'x'),
        CHANGE(kvf_wire_hello, client_name[1], 0x1b),
        CHANGE(kvf_wire_hello, format_record_bytes[3], 4096),
        CHANGE(kvf_wire_hello, format_record_bytes[3], 8193),
        CHANGE(kvf_wire_hello, format_record_bytes[0], KVF_PROTO_RECORD_MAX + 4096),
    };
    struct kvf_wire_hello hello = sample_hello();

    (void)state;
    REFUSE_ALL(KVF_PROTO_CLIENT, hello, 0, changes);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &hello, sizeof(hello), 0), KVF_ERR_PROTOCOL);
    hello.shard = KVF_SHARD_NONE;
    assert_int_equal(decode(KVF_PROTO_CLIENT, &hello, sizeof(hello), 0), KVF_OK);
    hello.geometry.kind = KVF_KIND_XG;
    hello.geometry.dim_v = 0;
    assert_int_equal(decode(KVF_PROTO_CLIENT, &hello, sizeof(hello), 0), KVF_ERR_PROTOCOL);
    hello.geometry.rope_state = KVF_ROPE_NONE;
    assert_int_equal(decode(KVF_PROTO_CLIENT, &hello, sizeof(hello), 0), KVF_OK);
    memset(&hello.geometry, 0, sizeof(hello.geometry));
    hello.record_bytes_max = 0;
    assert_int_equal(decode(KVF_PROTO_CLIENT, &hello, sizeof(hello), 0), KVF_OK);
}

static void welcome_is_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_wire_welcome, status, KVF_MISS),
        CHANGE(kvf_wire_welcome, status, (uint32_t)-14),
        CHANGE(kvf_wire_welcome, version, 0),
        CHANGE(kvf_wire_welcome, version, KVF_WIRE_VERSION_MAX + 1),
        CHANGE(kvf_wire_welcome, lossless, 2),
        CHANGE(kvf_wire_welcome, reserved0, 1),
        CHANGE(kvf_wire_welcome, incarnation, 0),
        CHANGE(kvf_wire_welcome, connection_id, 0),
        CHANGE(kvf_wire_welcome, ring_bytes, 0),
        CHANGE(kvf_wire_welcome, ring_bytes, 8193),
        CHANGE(kvf_wire_welcome, staging_bytes, 0),
        CHANGE(kvf_wire_welcome, staging_bytes, 5000),
        CHANGE(kvf_wire_welcome, staging_bytes, KVF_PROTO_STAGING_MAX + 4096),
        CHANGE(kvf_wire_welcome, arena_bytes, UINT64_MAX),
        CHANGE(kvf_wire_welcome, credits, 0),
        CHANGE(kvf_wire_welcome, credits, 1000),
        CHANGE(kvf_wire_welcome, credits, 1u << 17),
        CHANGE(kvf_wire_welcome, n_pieces, KVF_PROTO_PIECES_MAX + 1),
        CHANGE(kvf_wire_welcome, profile[0], 0),
        CHANGE(kvf_wire_welcome, profile[15], 'x'),
        CHANGE(kvf_wire_welcome, text[255], 'x'),
    };
    struct kvf_wire_welcome welcome = sample_welcome();
    struct kvf_wire_welcome refusal = {.status = KVF_ERR_BUSY, .text = "no staging left"};

    (void)state;
    REFUSE_ALL(KVF_PROTO_DAEMON, welcome, 3, changes);
    for (uint32_t n = 0; n < 5; n++) {
        assert_int_equal(decode(KVF_PROTO_DAEMON, &welcome, sizeof(welcome), n),
                         n == 3 ? KVF_OK : KVF_ERR_PROTOCOL);
    }
    kvf_proto_head_init(&refusal.head, KVF_WIRE_WELCOME);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &refusal, sizeof(refusal), 0), KVF_OK);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &refusal, sizeof(refusal), 3), KVF_ERR_PROTOCOL);
}

static void pieces_are_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_wire_piece, piece, KVF_PROTO_PIECE_ID_MAX + 1),
        CHANGE(kvf_wire_piece, reserved, 1),
        CHANGE(kvf_wire_piece, bytes, 0),
        CHANGE(kvf_wire_piece, bytes, 4097),
        CHANGE(kvf_wire_piece, bytes, KVF_PROTO_PIECE_MAX + 4096),
    };
    static const struct change drop_changes[] = {
        CHANGE(kvf_wire_piece, piece, KVF_PROTO_PIECE_ID_MAX + 1),
        CHANGE(kvf_wire_piece, bytes, 4096),
    };
    struct kvf_wire_piece piece = sample_piece(KVF_WIRE_PIECE);
    struct kvf_wire_piece drop = sample_piece(KVF_WIRE_PIECE_DROP);

    (void)state;
    REFUSE_ALL(KVF_PROTO_DAEMON, piece, 1, changes);
    REFUSE_ALL(KVF_PROTO_DAEMON, drop, 0, drop_changes);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &piece, sizeof(piece), 0), KVF_ERR_PROTOCOL);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &drop, sizeof(drop), 1), KVF_ERR_PROTOCOL);
    assert_int_equal(decode(KVF_PROTO_CLIENT, &piece, sizeof(piece), 1), KVF_ERR_PROTOCOL);
}

static void profiles_are_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_wire_profile, bytes, 0),
        CHANGE(kvf_wire_profile, bytes, 4097),
        CHANGE(kvf_wire_profile, bytes, KVF_PROTO_PROFILE_MAX + 4096),
        CHANGE(kvf_wire_profile, profile_fp, 0),
    };
    struct kvf_wire_profile profile = sample_profile();

    (void)state;
    REFUSE_ALL(KVF_PROTO_DAEMON, profile, 1, changes);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &profile, sizeof(profile), 0), KVF_ERR_PROTOCOL);
    assert_int_equal(decode(KVF_PROTO_DAEMON, &profile, sizeof(profile), 2), KVF_ERR_PROTOCOL);
    assert_int_equal(decode(KVF_PROTO_CLIENT, &profile, sizeof(profile), 1), KVF_ERR_PROTOCOL);
}

static void gpu_is_checked(void **state)
{
    struct kvf_wire_gpu gpu = sample_gpu();
    struct kvf_wire_gpu_channel channel = sample_gpu_channel();
    const struct change gpu_changes[] = {
        CHANGE(kvf_wire_gpu, path, 0),     CHANGE(kvf_wire_gpu, path, 3),
        CHANGE(kvf_wire_gpu, reserved, 1), CHANGE(kvf_wire_gpu, uuid[0], 0),
        CHANGE(kvf_wire_gpu, uuid[47], 1), CHANGE(kvf_wire_gpu, uuid[3], 10),
    };
    const struct change channel_changes[] = {
        CHANGE(kvf_wire_gpu_channel, status, KVF_EXISTS),
        CHANGE(kvf_wire_gpu_channel, status, 0), /* without descriptors */
        CHANGE(kvf_wire_gpu_channel, reserved, 1),
        CHANGE(kvf_wire_gpu_channel, text[0], 7),
    };

    (void)state;
    refuse_all(KVF_PROTO_CLIENT, &gpu, sizeof(gpu), 0, gpu_changes,
               sizeof(gpu_changes) / sizeof(gpu_changes[0]));
    refuse_all(KVF_PROTO_DAEMON, &channel, sizeof(channel), 0, channel_changes,
               sizeof(channel_changes) / sizeof(channel_changes[0]));
    channel.status = KVF_OK;
    assert_int_equal(decode(KVF_PROTO_DAEMON, &channel, sizeof(channel), 2), KVF_OK);
    assert_int_equal(decode(KVF_PROTO_CLIENT, &channel, sizeof(channel), 2), KVF_ERR_PROTOCOL);
}

static void versions_are_chosen(void **state)
{
    uint16_t version = 0;

    (void)state;
    assert_int_equal(kvf_proto_version_choose(1, 1, &version), KVF_OK);
    assert_int_equal(version, 1);
    assert_int_equal(kvf_proto_version_choose(1, 9, &version), KVF_OK);
    assert_int_equal(version, KVF_WIRE_VERSION_MAX);
    assert_int_equal(kvf_proto_version_choose(KVF_WIRE_VERSION_MAX + 1, 9, &version),
                     KVF_ERR_VERSION);
    assert_int_equal(kvf_proto_version_choose(0, 0, &version), KVF_ERR_VERSION);
}

/* --- submissions --- */
static const struct kvf_shm_limits limits = {
    .staging_bytes = 1 << 20,
    .key_entries = 4096,
    .key_head = 4090, /* the sample's keys wrap in the area */
};

static int sqe_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_limits *with)
{
    const char *why = NULL;
    int status = kvf_shm_sqe_check(sqe, with, &why);

    assert_true(status == KVF_OK || why != NULL);
    return status;
}

static void sqe_refuse(struct kvf_shm_sqe sqe, const struct change *changes, size_t n)
{
    assert_int_equal(sqe_check(&sqe, &limits), KVF_OK);
    for (size_t i = 0; i < n; i++) {
        struct kvf_shm_sqe copy = sqe;

        memcpy((uint8_t *)&copy + changes[i].offset, &changes[i].value, changes[i].bytes);
        if (sqe_check(&copy, &limits) != KVF_ERR_PROTOCOL) {
            fail_msg("accepted: opcode %u, offset %zu, value %llx", sqe.opcode, changes[i].offset,
                     (unsigned long long)changes[i].value);
        }
    }
}

static void unsummed_puts_are_of_version_2(void **state)
{
    struct kvf_shm_limits with = limits;
    struct kvf_shm_sqe sqe = sample_put();

    (void)state;
    sqe.flags |= KVF_SQE_UNSUMMED;
    assert_int_equal(sqe_check(&sqe, &with), KVF_ERR_PROTOCOL);
    with.version = KVF_WIRE_VERSION_UNSUMMED;
    assert_int_equal(sqe_check(&sqe, &with), KVF_OK);
    sqe = sample_keyed(KVF_OP_GET);
    sqe.flags |= KVF_SQE_UNSUMMED;
    assert_int_equal(sqe_check(&sqe, &with), KVF_ERR_PROTOCOL);
}

#define SQE_REFUSE(sqe, changes)                                                                   \
    sqe_refuse((sqe), (changes), sizeof(changes) / sizeof((changes)[0]))

static void submissions_are_checked(void **state)
{
    static const struct change all[] = {
        CHANGE(kvf_shm_sqe, request, 0),
        CHANGE(kvf_shm_sqe, opcode, 0),
        CHANGE(kvf_shm_sqe, opcode, 10),
        CHANGE(kvf_shm_sqe, opcode, 255),
        CHANGE(kvf_shm_sqe, flags, 32),
        CHANGE(kvf_shm_sqe, arg, 1),
        CHANGE(kvf_shm_sqe, reserved0[6], 1),
        CHANGE(kvf_shm_sqe, reserved1[15], 1),
        CHANGE(kvf_shm_sqe, flags, KVF_SQE_LEASE),
        CHANGE(kvf_shm_sqe, n_tails, 1),
    };
    static const struct change keyed[] = {
        CHANGE(kvf_shm_sqe, n_keys, 0),       CHANGE(kvf_shm_sqe, n_keys, 1025),
        CHANGE(kvf_shm_sqe, key_first, 4089), CHANGE(kvf_shm_sqe, key_first, UINT32_MAX),
        CHANGE(kvf_shm_sqe, n_entries, 0),    CHANGE(kvf_shm_sqe, n_entries, UINT16_MAX),
    };
    static const struct change put[] = {
        CHANGE(kvf_shm_sqe, flags, KVF_SQE_DURABLE | KVF_SQE_NO_WRITE | KVF_SQE_HAS_PARENT),
        CHANGE(kvf_shm_sqe, priority, 3),
        CHANGE(kvf_shm_sqe, n_entries, 3), /* 3 keys and a parent */
        CHANGE(kvf_shm_sqe, n_entries, 8),
    };
    static const struct change get[] = {
        CHANGE(kvf_shm_sqe, depth, 1),
        CHANGE(kvf_shm_sqe, ttl_s, 1),
        CHANGE(kvf_shm_sqe, priority, 1),
        CHANGE(kvf_shm_sqe, n_entries, 4),
        CHANGE(kvf_shm_sqe, flags, KVF_SQE_HAS_PARENT),
    };
    static const struct change nop[] = {
        CHANGE(kvf_shm_sqe, n_keys, 1),
        CHANGE(kvf_shm_sqe, n_entries, 1),
        CHANGE(kvf_shm_sqe, key_first, 1),
        CHANGE(kvf_shm_sqe, budget_ms, 1),
    };
    struct kvf_shm_sqe sqe = {.request = 1, .opcode = KVF_OP_NOP};
    struct kvf_shm_limits scheduler = limits;

    (void)state;
    SQE_REFUSE(sample_put(), all);
    SQE_REFUSE(sample_put(), keyed);
    SQE_REFUSE(sample_put(), put);
    SQE_REFUSE(sample_keyed(KVF_OP_GET), all);
    SQE_REFUSE(sample_keyed(KVF_OP_GET), keyed);
    SQE_REFUSE(sample_keyed(KVF_OP_GET), get);
    SQE_REFUSE(sample_keyed(KVF_OP_PREFETCH), keyed);
    SQE_REFUSE(sample_keyed(KVF_OP_EVICT), get);
    SQE_REFUSE(sqe, all);
    SQE_REFUSE(sqe, nop);
    sqe.opcode = KVF_OP_STAT;
    SQE_REFUSE(sqe, nop);

    scheduler.scheduler = true;
    sqe = sample_put();
    assert_int_equal(sqe_check(&sqe, &scheduler), KVF_ERR_PROTOCOL);
    sqe = sample_keyed(KVF_OP_GET);
    assert_int_equal(sqe_check(&sqe, &scheduler), KVF_ERR_PROTOCOL);
    sqe = sample_keyed(KVF_OP_LOOKUP);
    assert_int_equal(sqe_check(&sqe, &scheduler), KVF_OK);
    sqe.n_tails = 4; /* of 3 keys */
    assert_int_equal(sqe_check(&sqe, &limits), KVF_ERR_PROTOCOL);
    sqe = (struct kvf_shm_sqe){.opcode = KVF_OP_RELEASE, .arg = 1 << 16};
    assert_int_equal(sqe_check(&sqe, &limits), KVF_OK);
    sqe.request = 1;
    assert_int_equal(sqe_check(&sqe, &limits), KVF_ERR_PROTOCOL);
    sqe = (struct kvf_shm_sqe){.opcode = KVF_OP_CANCEL};
    assert_int_equal(sqe_check(&sqe, &limits), KVF_ERR_PROTOCOL);
}

static void reports_are_checked(void **state)
{
    struct kvf_shm_limits with = limits;
    struct kvf_shm_sqe sqe = {.opcode = KVF_OP_REPORT};

    (void)state;
    with.version = KVF_WIRE_VERSION_DECODE;
    sqe.arg = UINT64_C(7) << KVF_REPORT_KIND_BITS | KVF_REPORT_GPU_DECODE_US;
    assert_int_equal(sqe_check(&sqe, &with), KVF_OK);
    sqe.arg++;
    assert_int_equal(sqe_check(&sqe, &with), KVF_ERR_PROTOCOL);
    with.version = KVF_WIRE_VERSION_REPORT;
    for (uint64_t kind = 0; kind <= 255; kind++) {
        bool is_known = kind >= 1 && kind <= KVF_REPORT_DRIFT_PPM;

        sqe.arg = UINT64_C(7) << KVF_REPORT_KIND_BITS | kind;
        assert_int_equal(sqe_check(&sqe, &with), is_known ? KVF_OK : KVF_ERR_PROTOCOL);
        sqe.arg = kind; /* of nothing */
        assert_int_equal(sqe_check(&sqe, &with), KVF_ERR_PROTOCOL);
        sqe.arg = (KVF_REPORT_MAX + 1) << KVF_REPORT_KIND_BITS | kind;
        assert_int_equal(sqe_check(&sqe, &with), KVF_ERR_PROTOCOL);
    }
    sqe.arg = KVF_REPORT_MAX << KVF_REPORT_KIND_BITS | KVF_REPORT_CORRUPT;
    assert_int_equal(sqe_check(&sqe, &with), KVF_OK);
    assert_int_equal(kvf_shm_sqe_credits(&sqe), 0);
    with.version--;
    assert_int_equal(sqe_check(&sqe, &with), KVF_ERR_PROTOCOL);
}

static void credits_follow_the_opcode(void **state)
{
    struct kvf_shm_sqe sqe = sample_put();

    (void)state;
    assert_int_equal(kvf_shm_sqe_credits(&sqe), 4);
    sqe.opcode = KVF_OP_LOOKUP;
    assert_int_equal(kvf_shm_sqe_credits(&sqe), 1);
    sqe.opcode = KVF_OP_STAT;
    assert_int_equal(kvf_shm_sqe_credits(&sqe), KVF_STAT_COUNT + 1);
    sqe.opcode = KVF_OP_RELEASE;
    assert_int_equal(kvf_shm_sqe_credits(&sqe), 0);
    sqe.opcode = KVF_OP_CANCEL;
    assert_int_equal(kvf_shm_sqe_credits(&sqe), 0);
    sqe.opcode = KVF_OP_NOP;
    assert_int_equal(kvf_shm_sqe_credits(&sqe), 1);
}

static void keys_are_checked(void **state)
{
    static const struct change with_record[] = {
        CHANGE(kvf_shm_key, key_bytes, 15),
        CHANGE(kvf_shm_key, key_bytes, 65),
        CHANGE(kvf_shm_key, key[63], 1), /* behind the key */
        CHANGE(kvf_shm_key, reserved[39], 1),
        CHANGE(kvf_shm_key, supersedes, 4), /* the parent */
        CHANGE(kvf_shm_key, supersedes, 6), /* behind the entries */
        CHANGE(kvf_shm_key, stage_offset, 1),
        CHANGE(kvf_shm_key, stage_offset, 1 << 20),
        CHANGE(kvf_shm_key, stage_offset, UINT64_MAX - 4095),
        CHANGE(kvf_shm_key, record_bytes, 0),
        CHANGE(kvf_shm_key, record_bytes, 4096),
        CHANGE(kvf_shm_key, record_bytes, (1 << 20) + 1),
        CHANGE(kvf_shm_key, record_bytes, UINT64_MAX),
        CHANGE(kvf_shm_key, record_bytes, KVF_PROTO_RECORD_MAX + 1),
    };
    static const struct change name_only[] = {
        CHANGE(kvf_shm_key, supersedes, 1),
        CHANGE(kvf_shm_key, token_start, 1),
        CHANGE(kvf_shm_key, stage_offset, 4096),
        CHANGE(kvf_shm_key, record_bytes, 8192),
    };
    struct kvf_shm_sqe sqe = sample_put();
    struct kvf_shm_key keys[5];
    struct kvf_shm_key key;
    const char *why;

    (void)state;
    sample_keys(keys);
    assert_int_equal(kvf_shm_keys_check(&sqe, keys, &limits, &why), KVF_OK);
    for (size_t i = 0; i < sizeof(with_record) / sizeof(with_record[0]); i++) {
        key = keys[0];
        memcpy((uint8_t *)&key + with_record[i].offset, &with_record[i].value,
               with_record[i].bytes);
        if (kvf_shm_key_check(&sqe, &key, true, &limits, &why) != KVF_ERR_PROTOCOL) {
            fail_msg("accepted: key change %zu", i);
        }
    }
    for (size_t i = 0; i < sizeof(name_only) / sizeof(name_only[0]); i++) {
        key = keys[3];
        memcpy((uint8_t *)&key + name_only[i].offset, &name_only[i].value, name_only[i].bytes);
        if (kvf_shm_key_check(&sqe, &key, false, &limits, &why) != KVF_ERR_PROTOCOL) {
            fail_msg("accepted: name change %zu", i);
        }
    }
    /* the last byte of staging is the last byte of a record */
    key = keys[0];
    key.stage_offset = (1 << 20) - 8192;
    key.record_bytes = 8192;
    assert_int_equal(kvf_shm_key_check(&sqe, &key, true, &limits, &why), KVF_OK);
    key.record_bytes++;
    assert_int_equal(kvf_shm_key_check(&sqe, &key, true, &limits, &why), KVF_ERR_PROTOCOL);
    keys[4].token_start = 1; /* of a named entry, found by the whole check */
    assert_int_equal(kvf_shm_keys_check(&sqe, keys, &limits, &why), KVF_ERR_PROTOCOL);
}

static void completions_are_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_shm_cqe, request, 0),   CHANGE(kvf_shm_cqe, kind, 0),
        CHANGE(kvf_shm_cqe, kind, 3),      CHANGE(kvf_shm_cqe, tier, 5),
        CHANGE(kvf_shm_cqe, status, 7),    CHANGE(kvf_shm_cqe, status, (uint32_t)-95),
        CHANGE(kvf_shm_cqe, reserved0, 1), CHANGE(kvf_shm_cqe, lease, 5), /* no generation */
    };
    struct kvf_shm_cqe cqe = sample_cqe();
    const char *why;

    (void)state;
    assert_int_equal(kvf_shm_cqe_check(&cqe, &why), KVF_OK);
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        struct kvf_shm_cqe copy = cqe;

        memcpy((uint8_t *)&copy + changes[i].offset, &changes[i].value, changes[i].bytes);
        assert_int_equal(kvf_shm_cqe_check(&copy, &why), KVF_ERR_PROTOCOL);
    }
}

/* --- the segment --- */
static void layouts_pass_their_own_check(void **state)
{
    struct kvf_shm_header header;
    const char *why;

    (void)state;
    for (uint32_t sq = 1; sq <= KVF_SHM_RING_ENTRIES_MAX; sq *= 2) {
        assert_int_equal(kvf_shm_layout_init(&header, sq, 2 * sq, 4096, sq), KVF_OK);
        assert_int_equal(kvf_shm_header_check(&header, header.segment_bytes, &why), KVF_OK);
        assert_int_equal(header.segment_bytes % 4096, 0);
    }
    assert_int_equal(kvf_shm_layout_init(&header, 32768, 65536, 1 << 20, 65536), KVF_OK);
    assert_int_equal(kvf_shm_header_check(&header, header.segment_bytes, &why), KVF_OK);
    assert_int_equal(kvf_shm_layout_init(&header, 3, 8, 4096, 8), KVF_ERR_INVALID);
    assert_int_equal(kvf_shm_layout_init(&header, 4, 0, 4096, 8), KVF_ERR_INVALID);
    assert_int_equal(kvf_shm_layout_init(&header, 4, 8, 2048, 8), KVF_ERR_INVALID);
    assert_int_equal(kvf_shm_layout_init(&header, 4, 8, 4096, 1 << 17), KVF_ERR_INVALID);
    assert_int_equal(kvf_shm_layout_init(&header, 65536, 8, 4096, 8), KVF_ERR_INVALID);
}

static void segment_headers_are_checked(void **state)
{
    static const struct change changes[] = {
        CHANGE(kvf_shm_header, magic, 0),
        CHANGE(kvf_shm_header, version, 2),
        CHANGE(kvf_shm_header, header_bytes, 4095),
        CHANGE(kvf_shm_header, reserved0, 1),
        CHANGE(kvf_shm_header, reserved1, 1),
        CHANGE(kvf_shm_header, reserved[4015], 1),
        CHANGE(kvf_shm_header, segment_bytes, 4096),
        CHANGE(kvf_shm_header, indices_offset, 0),
        CHANGE(kvf_shm_header, indices_offset, 4097),
        CHANGE(kvf_shm_header, indices_offset, UINT32_MAX & ~63u),
        CHANGE(kvf_shm_header, sq_offset, 4096),
        CHANGE(kvf_shm_header, sq_entries, 0),
        CHANGE(kvf_shm_header, sq_entries, 12),
        CHANGE(kvf_shm_header, sq_entries, 32768), /* into the completions */
        CHANGE(kvf_shm_header, cq_offset, 4608),
        CHANGE(kvf_shm_header, cq_entries, 1u << 31),
        CHANGE(kvf_shm_header, keys_offset, 4608),
        CHANGE(kvf_shm_header, key_entries, 1u << 20), /* into the leases */
        CHANGE(kvf_shm_header, key_entries, 2048),
        CHANGE(kvf_shm_header, leases_offset, UINT32_MAX & ~63u),
        CHANGE(kvf_shm_header, lease_entries, 65536), /* behind the end */
        CHANGE(kvf_shm_header, lease_entries, 0),
    };
    struct kvf_shm_header header;
    struct kvf_shm_header copy;
    const char *why;

    (void)state;
    assert_int_equal(kvf_shm_layout_init(&header, 16, 32, 4096, 64), KVF_OK);
    assert_int_equal(kvf_shm_header_check(&header, header.segment_bytes, &why), KVF_OK);
    assert_int_equal(kvf_shm_header_check(&header, header.segment_bytes - 4096, &why),
                     KVF_ERR_PROTOCOL);
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        copy = header;
        memcpy((uint8_t *)&copy + changes[i].offset, &changes[i].value, changes[i].bytes);
        if (kvf_shm_header_check(&copy, header.segment_bytes, &why) != KVF_ERR_PROTOCOL) {
            fail_msg("accepted: header change %zu", i);
        }
    }
}

static void leases_pack_and_unpack(void **state)
{
    uint64_t id = kvf_lease_id_pack(KVF_LEASE_GENERATION_MAX, 65535);
    uint64_t word = kvf_lease_word_pack(KVF_LEASE_GENERATION_MAX, KVF_LEASE_LOST);

    (void)state;
    assert_int_equal(kvf_lease_id_generation(id), KVF_LEASE_GENERATION_MAX);
    assert_int_equal(kvf_lease_id_index(id), 65535);
    assert_int_equal(kvf_lease_word_generation(word), KVF_LEASE_GENERATION_MAX);
    assert_int_equal(kvf_lease_word_state(word), KVF_LEASE_LOST);
    kvf_lease_word_store(&word, 7, KVF_LEASE_LIVE);
    assert_true(kvf_lease_word_live(&word, 7));
    assert_false(kvf_lease_word_live(&word, 6));
    kvf_lease_word_store(&word, 7, KVF_LEASE_LOST);
    assert_false(kvf_lease_word_live(&word, 7));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpu_is_checked),
        cmocka_unit_test(heads_are_checked),
        cmocka_unit_test(hello_is_checked),
        cmocka_unit_test(welcome_is_checked),
        cmocka_unit_test(pieces_are_checked),
        cmocka_unit_test(profiles_are_checked),
        cmocka_unit_test(versions_are_chosen),
        cmocka_unit_test(submissions_are_checked),
        cmocka_unit_test(unsummed_puts_are_of_version_2),
        cmocka_unit_test(reports_are_checked),
        cmocka_unit_test(credits_follow_the_opcode),
        cmocka_unit_test(keys_are_checked),
        cmocka_unit_test(completions_are_checked),
        cmocka_unit_test(layouts_pass_their_own_check),
        cmocka_unit_test(segment_headers_are_checked),
        cmocka_unit_test(leases_pack_and_unpack),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
