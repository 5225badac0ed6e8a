/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.h: from KV pages to records and back.
 *
 *   part 1  profiles             names that users choose: which codec for K, which for V
 *   part 2  the ops table        what a codec is; start here to write one (docs/writing-a-codec.md)
 *   part 3  the plan             geometry and profile, worked out once at attach
 *   part 4  records              encode, decode, check, seal: what client and daemon call
 *
 * Nothing here allocates, locks, blocks or logs, and every function may be called from any thread;
 * a plan is read-only after its init and may be shared, a workspace belongs to one call at a time.
 * The bytes are laid out in block_format.h.
 *
 * Words: a vector is the dim elements of one head and token. Codecs that limit the size of what
 * shares a scale cut wide heads into sub-heads; a row is one sub-head's vectors, and rows are
 * numbered head * (dim / group) + sub-head. Vectors of a tensor are numbered row * n_tokens +
 * token.
 */
#ifndef KVF_CODEC_CODEC_H
#define KVF_CODEC_CODEC_H

#include "base/status.h"
#include "codec/block_format.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVF_CODEC_ABI 1

struct kvf_gpu_result;

enum kvf_codec_limits {
    KVF_CODEC_GROUP_MAX = 256,         /* elements that share a scale, at most */
    KVF_CODEC_CENTER_TOKENS_MIN = 128, /* shorter blocks are stored without mean */
    KVF_CODEC_ESCAPE_SHARE = 16,       /* at most 1/16 of a tensor's vectors may be escapes */
    KVF_CODEC_FIXED_SIZES_MAX = 4,
    KVF_CODEC_CLIPS_MAX = 9,  /* ratios that an encoder tries for a vector */
    KVF_CODEC_KINDS_MAX = 16, /* kinds of layers of a plan */
    KVF_CODEC_WORKSPACE_ALIGN = 64,
};

/* -------------------------------------------------------------------------------------------------
 * Part 1: profiles
 */

/* How an encoder chooses what share of a vector's range to keep. */
enum kvf_profile_clip {
    KVF_CLIP_NONE = 0,   /* the whole range */
    KVF_CLIP_FIXED = 1,  /* the ratio that codec_saw.h has for bits and dim */
    KVF_CLIP_SEARCH = 2, /* of its three ratios, the one with the least error */
    KVF_CLIP_WIDE = 3,   /* of its nine ratios */
};

/* What a profile says about K or V. */
struct kvf_profile_tensor {
    uint8_t codec;  /* enum kvf_block_codec */
    uint8_t bits;   /* width of the codes; 0 for codecs without codes */
    uint8_t flags;  /* enum kvf_block_tensor_flags */
    uint8_t rotate; /* 0: as it is, 1: rotate by the largest order that fits */
    uint8_t clip;   /* saw: enum kvf_profile_clip */
    uint32_t rot_seed;
    uint16_t group_size; /* kivi: elements that share a scale */
    uint8_t group_axis;  /* kivi: enum kvf_block_axis */
    uint8_t zero_kind;   /* saw: enum kvf_block_zero; 0: fp16 lo */
};

struct kvf_profile {
    const char *name; /* shorter than KVF_PROFILE_NAME_BYTES */
    const char *use;  /* one line for lists: what it is for, bits a value */
    bool lossless;
    bool opaque;         /* no geometry: bytes in, the same bytes out */
    uint8_t edge_layers; /* this many layers at each end are stored as edge_k and edge_v say */
    uint8_t sink_tokens; /* at least so many are kept raw, whatever the geometry says */
    uint8_t x_kinds;     /* lossy: bit k: for enum kvf_tensor_kind k; 0: for KV and MLA */
    /* Of profiles for X whose layers are deltas, else 0: so many layers, and those of a re-base,
     * are stored as edge_k says; base_layer and rebase_layers of the header. XG: the caller makes
     * the deltas (kvf_block_encode_layer). */
    uint8_t first_layers;
    uint8_t base_layer;
    uint8_t rebase_layers;
    struct kvf_profile_tensor k;
    struct kvf_profile_tensor v;
    struct kvf_profile_tensor edge_k;
    struct kvf_profile_tensor edge_v;
};

/* The profiles in a fixed order, NULL-terminated by name. */
extern const struct kvf_profile kvf_profiles[];

/* The profile of this name, or NULL. */
const struct kvf_profile *kvf_profile_find(const char *name);

/* Can what is of this kind (enum kvf_tensor_kind, not BYTES) be stored by a profile? */
bool kvf_profile_takes(const struct kvf_profile *profile, uint8_t kind);

/* The kinds that it takes, for people: "KV and MLA". */
const char *kvf_profile_kinds(const struct kvf_profile *profile);

/* The seed of all rotations: any constant will do, as long as it never changes: it is part of every
 * namespace's fingerprint. */
#define KVF_PROFILE_ROTATION_SEED 0x6b766672U

struct kvf_profile_table;

/* -------------------------------------------------------------------------------------------------
 * Part 2: the ops table
 */
enum kvf_codec_capabilities {
    KVF_CODEC_LOSSLESS = 1 << 0,   /* every bit pattern comes back */
    KVF_CODEC_FIXED_RATE = 1 << 1, /* sizes() is exact, not a bound */
    KVF_CODEC_ESCAPES = 1 << 2,    /* puts vectors that it cannot code into the raw area */
    KVF_CODEC_FLOAT = 1 << 3,      /* computes in floating point: the caller sets MXCSR */
};

struct kvf_codec_ops;

/* A rotation of tq; the constants are codec_tq.h's. */
struct kvf_codec_rotation {
    uint16_t n; /* elements */
    uint16_t order;
    uint16_t code_bytes;
    uint8_t bits;
    float root_mean_square; /* R */
    float quantize;         /* F */
    float scale;            /* C */
    float factor;           /* U */
    float residual;         /* sqrt(k) unit */
    float residual_factor;  /* V */
};

/* One tensor, K or V, of a plan: all that a codec needs to know. */
struct kvf_codec_tensor {
    const struct kvf_codec_ops *ops;
    struct kvf_block_tensor descriptor; /* as in headers of blocks that are long enough to centre */
    uint16_t n_heads;
    uint16_t dim;          /* 0: the tensor does not exist */
    uint16_t group;        /* elements of a row's vector; divides dim */
    uint16_t n_rows;       /* n_heads * dim / group */
    uint8_t dtype;         /* enum kvf_dtype */
    uint8_t element_bytes; /* of dtype */
    uint16_t code_bytes;   /* saw, tq, kivi: bytes of one vector's codes */
    uint16_t rot_order;    /* saw, tq: 1 is no rotation */
    float sqrt_order;      /* saw: sqrt(rot_order), correctly rounded */
    float rsqrt_order;     /* saw: 1 / sqrt(rot_order), correctly rounded */
    uint8_t n_clips;       /* saw: ratios that are tried, largest first; 0: descriptor.clip_q15 */
    uint16_t clips_q15[KVF_CODEC_CLIPS_MAX];
    uint8_t n_rotations; /* tq: 1, or 2 where channels are split */
    uint8_t n_scales;    /* tq: numbers of the meta part a vector */
    struct kvf_codec_rotation rotations[2];
    uint8_t order[256];     /* saw: stored position -> coefficient; tq: of each rotation */
    uint8_t sign_bits[128]; /* saw, tq: bit i: channel i is flipped */
};

/* Bytes of the three parts that a codec writes for one tensor of one layer; each a multiple of
 * KVF_BLOCK_ALIGN_BYTES, and 0 for a part that it does not have. */
struct kvf_codec_sizes {
    size_t mean_bytes;
    size_t meta_bytes;
    size_t codes_bytes;
};

/* One tensor of one layer in the engine's pages, and what to do with it. */
struct kvf_codec_job {
    const struct kvf_kv_view *view;
    const struct kvf_tensor_view *tensor; /* &view->k or &view->v */
    uint8_t *base;                        /* tensor->layers[layer] */
    const uint8_t *next_base;             /* the same of the tensor that follows, to be fetched
                                             into the cache; NULL: unknown */
    uint32_t n_tokens;                    /* of the block */
    uint32_t n_sinks;                     /* encode: leading tokens that become escapes */
    uint32_t token_first;                 /* decode: first token that is wanted */
    uint32_t n_wanted; /* decode: tokens wanted; the view's token 0 is the first */
    /* Of the profile, for this layer; NULL: it has none. */
    const uint8_t *mean; /* fp16[heads][dim], for KVF_TENSOR_CENTER_PROFILE */
    const uint8_t
        *split; /* encode: u8[heads][(dim + 7) / 8], for KVF_TENSOR_SPLIT: the list of each
                             row (codec_tq.h) */
};

/* Vectors that go to the raw area, by number, ascending. */
struct kvf_codec_escapes {
    uint32_t *index;
    uint32_t n;
    uint32_t max;
};

struct kvf_codec_ops {
    const char *name;
    uint8_t id;            /* enum kvf_block_codec */
    uint16_t abi_version;  /* KVF_CODEC_ABI */
    uint32_t capabilities; /* enum kvf_codec_capabilities */

    /* Required. Fill in the rest of a tensor whose ops, n_heads, dim, dtype and element_bytes are
     * set. KVF_OK; KVF_ERR_UNSUPPORTED: this codec has no form for that dtype, dim or width. */
    int (*resolve)(struct kvf_codec_tensor *tensor, const struct kvf_profile_tensor *settings);

    /* Required. Arithmetic only: what encode writes for n_tokens (a bound unless FIXED_RATE).
     * Escapes are not in it. */
    void (*sizes)(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                  struct kvf_codec_sizes *sizes_out);

    /* Required unless FIXED_RATE, then NULL. The sizes of what is stored at strip, of which
     * strip_bytes may be read. The bytes are not trusted. KVF_OK; KVF_ERR_CORRUPT. */
    int (*stored_sizes)(const struct kvf_codec_tensor *tensor, uint32_t n_tokens,
                        const uint8_t *strip, size_t strip_bytes,
                        struct kvf_codec_sizes *sizes_out);

    /* Required. Bytes of workspace that encode or decode use, whichever is more. */
    size_t (*workspace_bytes)(const struct kvf_codec_tensor *tensor);

    /* Required. Write the parts one after the other to strip, which has room for sizes(); gaps are
     * zeroed. Appends to escapes if the codec has them. KVF_OK: sizes_out says what was written;
     * KVF_ERR_NO_SPACE: does not pay, or too many escapes: store this one raw (what was written to
     * strip and escapes is discarded). */
    int (*encode)(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                  uint8_t *strip, struct kvf_codec_escapes *escapes, void *workspace,
                  struct kvf_codec_sizes *sizes_out);

    /* Required. Write the wanted tokens to the pages. sizes are those of the stored parts and lie
     * within the record; the content is not trusted: whatever it is, no access outside strip, pages
     * and workspace. Escaped vectors may be written with anything: the caller patches them.
     * KVF_OK; KVF_ERR_CORRUPT. */
    int (*decode)(const struct kvf_codec_tensor *tensor, const struct kvf_codec_job *job,
                  const uint8_t *strip, const struct kvf_codec_sizes *sizes, void *workspace);
};

/* Every codec, in order of id, NULL-terminated. */
extern const struct kvf_codec_ops *const kvf_codecs[];

/* The codec of this id, or NULL. */
const struct kvf_codec_ops *kvf_codec_find(uint8_t id);

/* -------------------------------------------------------------------------------------------------
 * Part 3: the plan
 */

/* What a profile has for each layer beside its kind: that of the plan's heads. Borrowed from the
 * profile's table; NULL: nothing. */
struct kvf_plan_array {
    const uint8_t *first; /* of layer 0 */
    size_t layer_bytes;   /* from layer to layer */
};

/* How the layers of one kind are coded. */
struct kvf_codec_kind {
    struct kvf_codec_tensor k;
    struct kvf_codec_tensor v; /* dim 0 in all kinds, or in none */
};

struct kvf_codec_plan {
    const struct kvf_profile *profile;
    struct kvf_geometry geometry; /* all zero for opaque bytes */
    bool lossless;
    uint8_t block_flags;    /* of headers: enum kvf_block_flags */
    uint16_t base_layer;    /* of headers */
    uint16_t rebase_layers; /* of headers */
    uint64_t model_fp; /* 0 after init; the owner may set it: written to and compared in headers */
    uint64_t weights_fp;       /* likewise, of kinds X and XG alone: what they are rebuilt with */
    uint64_t profile_fp;       /* fingerprint of the codecs, for the namespace; never 0 */
    uint64_t record_bytes_max; /* of any block of up to chunk_tokens, record page included */
    size_t workspace_bytes;    /* for encode and decode, at KVF_CODEC_WORKSPACE_ALIGN */
    size_t escapes_offset;     /* in the workspace: numbers of escaped vectors */
    size_t sections_offset;    /* in the workspace: the raw area's sections */
    size_t loop_offset;        /* in the workspace: of layers that are deltas */
    struct kvf_codec_tensor raw_k; /* for strips that are stored raw */
    struct kvf_codec_tensor raw_v;
    struct kvf_plan_array means[2];      /* K, V: fp16[heads][dim] a layer */
    struct kvf_plan_array splits[2];     /* K, V: u8[heads][(dim + 7) / 8] a layer */
    uint8_t layer_kinds[KVF_LAYERS_MAX]; /* of each layer; kvf_plan_tensor looks up here */
    uint32_t n_kinds;                    /* 1..KVF_CODEC_KINDS_MAX; 0 for opaque bytes */
    struct kvf_codec_kind kinds[KVF_CODEC_KINDS_MAX]; /* headers describe the first one */
};

/* Work out a plan. geometry NULL, or of kind KVF_KIND_BYTES: profile "bytes" only; else any other
 * one. KVF_OK; KVF_ERR_INVALID: a field is out of range, or the profile has no such name;
 * KVF_ERR_REFUSED: a lossy profile for state, opaque bytes or another kind than it is for;
 * KVF_ERR_UNSUPPORTED: the codec has no
 * form for these dims; KVF_ERR_TOO_LARGE: a full chunk can exceed KVF_PAYLOAD_BYTES_MAX. */
int kvf_codec_plan_init(struct kvf_codec_plan *plan, const struct kvf_geometry *geometry,
                        const char *profile_name);

/* The same by a profile that has a file, of more than a name (table->builtin is NULL). table is
 * borrowed: it stays where it is until the last use of plan. head_first: of the model's heads, the
 * first that geometry has. What kvf_profile_table_fits is to have said yes to. */
int kvf_codec_plan_init_table(struct kvf_codec_plan *plan, const struct kvf_geometry *geometry,
                              const struct kvf_profile_table *table, uint32_t head_first);

/* The largest chunk_tokens with which geometry fits a payload; 0 if not even one token does, or if
 * the plan fails for another reason. For the message after KVF_ERR_TOO_LARGE. */
uint32_t kvf_codec_fitting_tokens(const struct kvf_geometry *geometry, const char *profile_name);

/* Payload bytes of a block of n_tokens (0..chunk_tokens; 0 gives 0) without escapes and sinks:
 * exact for fixed-rate profiles, else a bound. 0 for opaque bytes. */
uint64_t kvf_codec_plan_payload_bytes(const struct kvf_codec_plan *plan, uint32_t n_tokens);

/* The largest payload that a block of n_tokens can have, whatever its content and position. */
uint64_t kvf_codec_plan_payload_bytes_max(const struct kvf_codec_plan *plan, uint32_t n_tokens);

/* Are all strips of a size that only the number of tokens decides (unless one falls back to raw)?
 */
bool kvf_codec_plan_is_fixed(const struct kvf_codec_plan *plan);

/* The record sizes that nearly all blocks of a full chunk have, for exact slot classes: the size
 * without escapes and, if it differs, that of a chunk with sinks. Writes up to
 * KVF_CODEC_FIXED_SIZES_MAX, returns how many: 0 if the sizes vary. */
uint32_t kvf_codec_plan_fixed_sizes(const struct kvf_codec_plan *plan,
                                    uint64_t record_bytes_out[KVF_CODEC_FIXED_SIZES_MAX]);

/* -------------------------------------------------------------------------------------------------
 * Part 4: records
 */

/* Encode n_tokens (1..chunk_tokens) from kv. Writes the whole page, with key_id and shard zero and
 * header_crc32c set, and the payload of *payload_bytes_out bytes. payload_capacity must be at least
 * kvf_codec_plan_payload_bytes(); with payload_bytes_max() it always suffices. page and payload
 * need no alignment beyond 8. KVF_OK; KVF_ERR_INVALID; KVF_ERR_TOO_LARGE: payload_capacity is too
 * small. */
int kvf_block_encode(const struct kvf_codec_plan *plan, const struct kvf_kv_view *kv,
                     uint32_t token_start, uint32_t n_tokens, struct kvf_record_page *page,
                     void *payload, size_t payload_capacity, void *workspace,
                     size_t *payload_bytes_out);

/* The same layer by layer, for inputs that are there one after the other. Private to
 * block_encode.c. */
struct kvf_block_encoder {
    const struct kvf_codec_plan *plan;
    struct kvf_record_page *page;
    uint8_t *payload;
    size_t capacity;
    size_t at; /* payload bytes written */
    void *workspace;
    uint32_t n_tokens;
    uint32_t n_sinks;
    uint32_t layer; /* the next one */
    uint32_t n_escapes;
    size_t sections_bytes; /* in the workspace */
    uint32_t crc;          /* of the payload so far */
    int status;            /* of the first layer that failed */
};

/* Begin a block, as kvf_block_encode: page, payload and workspace are lent until the end. KVF_OK;
 * KVF_ERR_INVALID; KVF_ERR_TOO_LARGE. */
int kvf_block_encode_begin(struct kvf_block_encoder *encoder, const struct kvf_codec_plan *plan,
                           uint32_t token_start, uint32_t n_tokens, struct kvf_record_page *page,
                           void *payload, size_t payload_capacity, void *workspace);

/* The next layer: entry 0 of the view's layers, which is not needed afterwards. decoded_out NULL,
 * or fp32[n_tokens][n_heads * dim_k]: its K as a reader will have it, of the plan's type, widened.
 * So a caller can make the next layer of what is left of this one. KVF_OK; KVF_ERR_INVALID: there
 * are no more layers; KVF_ERR_TOO_LARGE. */
int kvf_block_encode_layer(struct kvf_block_encoder *encoder, const struct kvf_kv_view *kv,
                           float *decoded_out);

/* The end, after all layers. KVF_OK; KVF_ERR_INVALID: layers are missing; what a layer failed with;
 * KVF_ERR_TOO_LARGE. */
int kvf_block_encode_end(struct kvf_block_encoder *encoder, size_t *payload_bytes_out);

/* Decode layers [layer_first, layer_first + n_layers) and tokens [token_first, token_first +
 * n_tokens) into kv; 0 for either count means all that follow. kv->k.layers is indexed by layer,
 * view tokens count from token_first. The record may be changed by others meanwhile: the page is
 * copied before it is checked, and wrong bytes give wrong values or KVF_ERR_CORRUPT, never an
 * access outside record and pages. The payload's checksum is not verified here. KVF_OK;
 * KVF_ERR_INVALID: a range is outside the block; KVF_ERR_MISMATCH: not a block of this plan;
 * KVF_ERR_CORRUPT. Before a failure of the last kind some pages may have been written. */
int kvf_block_decode(const struct kvf_codec_plan *plan, const void *record, size_t record_bytes,
                     uint32_t layer_first, uint32_t n_layers, uint32_t token_first,
                     uint32_t n_tokens, const struct kvf_kv_view *kv, void *workspace);

/* A part of a block; 0 for a count means all that follow. */
struct kvf_block_ranges {
    uint32_t layer_first;
    uint32_t n_layers;
    uint32_t token_first;
    uint32_t n_tokens;
};

/* A record on its way to pages, by whatever decodes it. Private to block.c but for page and ranges,
 * which hold resolved counts after open. */
struct kvf_block_reader {
    const struct kvf_codec_plan *plan;
    const uint8_t *payload;  /* NULL: out of reach, the outline holds instead */
    const uint32_t *outline; /* behind its checksum */
    struct kvf_block_ranges ranges;
    uint32_t layer;              /* of the next part */
    uint32_t section;            /* next entry of the raw area's table of counts */
    size_t at;                   /* of the next part in the payload */
    size_t section_at;           /* of the next section in the raw area */
    bool is_v;                   /* the next part is V's */
    struct kvf_record_page page; /* a copy */
};

/* One tensor of one layer as it is stored. */
struct kvf_block_part {
    const struct kvf_codec_tensor *tensor; /* that of raw if the strip fell back to it */
    uint16_t layer;
    bool is_v;
    size_t offset; /* in the payload; a multiple of KVF_BLOCK_ALIGN_BYTES */
    size_t bytes;
    struct kvf_codec_sizes sizes;
};

/* Vectors of one tensor of one layer in the raw area (codec_layout.h). */
struct kvf_block_section {
    const struct kvf_codec_tensor *tensor;
    uint16_t layer;
    bool is_v;
    uint32_t count; /* vectors; their numbers are not checked */
    size_t offset;  /* in the payload; a multiple of KVF_RAW_AREA_ALIGN_BYTES */
    size_t bytes;
};

/* Read a record that others may change meanwhile: each byte of page and tables is read once, and
 * what parts and sections say lies within record_bytes, whatever the content is. record stays
 * readable until the last call on reader. KVF_OK; KVF_ERR_INVALID: a range is outside the block;
 * KVF_ERR_MISMATCH: not a block of this plan; KVF_ERR_CORRUPT. */
int kvf_block_open(const struct kvf_codec_plan *plan, const void *record, size_t record_bytes,
                   const struct kvf_block_ranges *ranges, struct kvf_block_reader *reader);

/* The next part, by layer, K before V. KVF_OK; KVF_EMPTY: that was the last; KVF_ERR_CORRUPT. */
int kvf_block_next_part(struct kvf_block_reader *reader, struct kvf_block_part *part_out);

/* The next section of the layers wanted, in the same order, to be applied after their parts.
 * KVF_OK; KVF_EMPTY; KVF_ERR_CORRUPT. */
int kvf_block_next_section(struct kvf_block_reader *reader, struct kvf_block_section *section_out);

/* What a reader reads in a payload, for one that cannot: u32 checksum of what follows, the size of
 * each layer's K in units of KVF_BLOCK_ALIGN_BYTES, and the raw area's table of counts (zero
 * without a raw area). */
enum {
    KVF_BLOCK_OUTLINE_WORDS = 1 + 3 * KVF_BLOCK_LAYERS,
};
static inline size_t kvf_block_outline_bytes(uint32_t n_layers)
{
    return (1 + 3 * (size_t)n_layers) * sizeof(uint32_t);
}

/* Write the outline of a record of this plan. KVF_OK; else as kvf_block_open. */
int kvf_block_outline(const struct kvf_codec_plan *plan, const void *record, size_t record_bytes,
                      uint32_t outline_out[KVF_BLOCK_OUTLINE_WORDS]);

/* As kvf_block_open with the outline in place of the payload: record is only the page. The outline
 * stays as it is until the last call on reader. KVF_ERR_CORRUPT also for what is no outline. */
int kvf_block_open_outlined(const struct kvf_codec_plan *plan, const void *page,
                            size_t record_bytes, const uint32_t *outline,
                            const struct kvf_block_ranges *ranges, struct kvf_block_reader *reader);

/* The page of a block whose payload kernels wrote: what kvf_block_encode would have written.
 * payload_crc32c is 0 where the daemon is to sum. KVF_OK; KVF_ERR_INVALID; KVF_ERR_CORRUPT: the
 * result is not one of a finished encode. */
int kvf_block_describe_gpu(const struct kvf_codec_plan *plan, uint32_t token_start,
                           uint32_t n_tokens, const struct kvf_gpu_result *result,
                           uint32_t payload_crc32c, struct kvf_record_page *page);

/* Is this a well-formed record page for a record of which record_bytes_available bytes are there?
 * For pages from a client, a drive or a peer: magic, version, checksum, lengths, offsets, reserved
 * bytes. The page must not change during the call: copy it first if another process can write to
 * it. KVF_OK; KVF_ERR_MISMATCH: a version or codec of a newer build; KVF_ERR_CORRUPT. */
int kvf_block_check(const struct kvf_record_page *page, uint64_t record_bytes_available);

/* Does the payload of a checked page have the checksum that the page says? payload has
 * header.total_bytes - KVF_BLOCK_PAGE_BYTES bytes. KVF_OK; KVF_ERR_CORRUPT. */
int kvf_block_check_payload(const struct kvf_record_page *page, const void *payload);

/* Can plan decode the block of a checked page? KVF_OK; KVF_ERR_MISMATCH. */
int kvf_block_matches_plan(const struct kvf_record_page *page, const struct kvf_codec_plan *plan);

/* Set header_crc32c, after key_id or shard have been filled in. */
void kvf_block_seal_header(struct kvf_record_page *page);

/* Write the page of an opaque block: bytes of payload, 0..KVF_PAYLOAD_BYTES_MAX.
 * KVF_OK; KVF_ERR_TOO_LARGE. */
int kvf_block_describe_bytes(struct kvf_record_page *page, const void *payload, size_t bytes);

/* The same from the payload's checksum, for who has copied and summed it in one pass. */
int kvf_block_describe_summed(struct kvf_record_page *page, uint32_t payload_crc32c, size_t bytes);

#endif /* KVF_CODEC_CODEC_H */
