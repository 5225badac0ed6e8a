/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry.h: the one public header of libkvferry, to be read from top to bottom.
 *
 * kvferry keeps KV cache blocks outside a serving engine. A daemon, kvferryd, owns the memory and
 * the drives of a node; an engine opens a client handle and then puts, looks up and gets blocks by
 * the keys it already has (the hash chain of its prefix cache).
 *
 *   part 1  status values                        what every call returns
 *   part 2  what is stored                       keys, geometry, views of KV pages
 *   part 3  the client handle                    open, close, facts about the connection
 *   part 4  blocking calls                       put, lookup, get, prefetch, evict, stat
 *   part 5  hits and leases                      pointers into the daemon's memory
 *   part 6  staging, encode, decode              the pieces the blocking calls are made of
 *   part 7  asynchronous calls                   submit, poll, cancel
 *   part 8  GPU calls                            pages in device memory: libkvferry_gpu
 *   part 9  X instead of KV                      K and V rebuilt from a layer's input
 *
 * Conventions, stated once:
 * - A handle and everything obtained from it belong to one thread at a time. Open more handles for
 *   more threads; handles are independent of each other.
 * - A call says "blocks" if it can sleep; all others return at once.
 * - Pointers given to a call are borrowed until it returns, unless the call says otherwise.
 *   Asynchronous calls copy keys and options before they return.
 * - Outputs come last, end in _out and are written only if the status is >= 0, unless stated.
 * - Structs that callers fill begin with struct_bytes. Fill it by the *_init call (or sizeof and
 *   zeroes): zero is the default of every other field.
 * - Bytes, tokens, blocks and times carry their unit in the name.
 * - The daemon is a cache: any request may answer KVF_MISS; none may answer with wrong bytes.
 */
#ifndef KVFERRY_H
#define KVFERRY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_VERSION_MAJOR 0
#define KVF_VERSION_MINOR 1
#define KVF_VERSION_PATCH 0

#if defined(__GNUC__)
#define KVF_API __attribute__((visibility("default")))
#else
#define KVF_API
#endif

/* ----------------------------------------------------------------------------------------------
 * Part 1: status values
 *
 * 0 is done. Positive values are outcomes that are no error. Negative values are failures, grouped
 * by how much is lost. The numbers are part of the wire protocol and never change meaning.
 */
enum kvf_status {
    KVF_OK = 0,

    KVF_MISS = 1,    /* not here; compute it */
    KVF_EXISTS = 2,  /* put: the key is already stored with the same payload; nothing was written */
    KVF_COMING = 3,  /* on a slower tier; a prefetch has been started */
    KVF_PARTIAL = 4, /* some blocks of the request succeeded; the block completions say which */
    KVF_TOO_SLOW = 5, /* a miss: fetching was estimated to lose against the caller's budget */
    KVF_EMPTY = 6,    /* poll: nothing has completed within the time given */

    /* the request failed; the handle is fine */
    KVF_ERR_INVALID = -1,   /* an argument is out of its documented range */
    KVF_ERR_BUSY = -2,      /* a bounded resource is used up at the moment; retry later or skip */
    KVF_ERR_NO_MEMORY = -3, /* an allocation in this process failed */
    KVF_ERR_TOO_LARGE = -4, /* exceeds a named limit (kvf_limits) */
    KVF_ERR_CANCELED = -5,  /* canceled by kvf_cancel */
    KVF_ERR_TIMEOUT = -6,   /* the time budget ran out */
    KVF_ERR_LOST = -7, /* lease: the bytes may have changed before release; treat as not loaded */
    KVF_ERR_CORRUPT = -8,   /* a checksum, length or magic number does not fit */
    KVF_ERR_CONFLICT = -9,  /* put: the key is stored with another payload; the first one stands */
    KVF_ERR_MISMATCH = -10, /* model, layout, codec or codebook fingerprint differs */
    KVF_ERR_UNSUPPORTED = -11, /* this build, device or daemon cannot do that; the log says why */
    KVF_ERR_REFUSED = -12,     /* policy: profile not calibrated, quota, no-write namespace */

    /* the session failed; the handle reconnects by itself */
    KVF_ERR_DISCONNECTED = -32, /* the connection broke while the request was in flight */
    KVF_ERR_PROTOCOL = -33,     /* the peer broke the protocol */
    KVF_ERR_VERSION = -34,      /* no protocol version in common */
    KVF_ERR_NO_DAEMON = -35,    /* nobody listens on the socket */

    /* a tier failed */
    KVF_ERR_IO = -64,       /* the drive answered with an error */
    KVF_ERR_TIER_OFF = -65, /* the tier is off (error budget, drain, not configured) */
    KVF_ERR_FOREIGN = -66,  /* a store that is not ours, or newer than this build */
    KVF_ERR_NO_SPACE = -67, /* the drive or memory is full */

    /* the agent failed */
    KVF_ERR_CONFIG = -96,   /* the configuration is wrong; one line says what, where, cure */
    KVF_ERR_INTERNAL = -97, /* a bug in kvferry */
};

/* The name of a status without prefix, in lower case ("miss", "busy"). Static storage, never NULL
 * ("unknown" for other numbers). Any thread. */
KVF_API const char *kvf_status_name(int status);

/* One sentence on a status for people. Static storage, never NULL. Any thread. */
KVF_API const char *kvf_status_text(int status);

/* "0.1.0", of the library that is loaded. Static storage. Any thread. */
KVF_API const char *kvf_version(void);

/* ----------------------------------------------------------------------------------------------
 * Part 2: what is stored
 */

/* Limits of the protocol. A daemon's configuration can only lower them. */
enum kvf_limits {
    KVF_KEY_BYTES_MIN = 16,
    KVF_KEY_BYTES_MAX = 64,
    KVF_REQUEST_KEYS_MAX = 1024, /* keys in one request, tails included */
    KVF_TAIL_KEYS_MAX = 15,      /* tail keys in one lookup */
    KVF_CHUNK_TOKENS_MAX = 256,  /* tokens in one block */
    KVF_LAYERS_MAX = 512,
    KVF_HEADS_MAX = 1024,
    KVF_DIM_MAX = 1024,               /* elements of one head vector */
    KVF_RECORD_PAGE_BYTES = 4096,     /* what precedes each payload, on every tier */
    KVF_PAYLOAD_BYTES_MAX = 64 << 20, /* 64 MiB */
    KVF_SHARDS_MAX = 4095,
    KVF_SHARD_NONE = 0xffff, /* a scheduler's handle: looks up, leases, prefetches, evicts */
    KVF_DIGEST_BYTES = 32,
    KVF_PROFILE_NAME_BYTES = 16,
    KVF_PROFILE_TEXT_BYTES = 256,
};

/* A key: 16..64 opaque bytes chosen by the engine (the hash of a chunk's last block, which covers
 * the prefix before it). Borrowed. */
struct kvf_key {
    const void *data;
    size_t bytes;
};

enum kvf_dtype {
    KVF_DTYPE_NONE = 0,
    KVF_DTYPE_BF16 = 1,
    KVF_DTYPE_F16 = 2,
    KVF_DTYPE_F32 = 3,
    KVF_DTYPE_F8E4M3 = 4,
    KVF_DTYPE_F8E5M2 = 5,
    KVF_DTYPE_U8 = 6, /* opaque bytes: stored losslessly only */
};

/* Bytes of one element of a dtype; 0 for an unknown one. Any thread. */
KVF_API size_t kvf_dtype_bytes(int dtype);

enum kvf_rope_state {
    KVF_ROPE_NONE = 0,         /* the model has no rotary embedding, or the tensor is not K */
    KVF_ROPE_PRE = 1,          /* K is stored before rotation */
    KVF_ROPE_POST = 2,         /* K is stored after rotation (what engines keep in their pages) */
    KVF_ROPE_PRE_UNBIASED = 3, /* before rotation and without the bias of its projection; the caller
                                  took both off and puts them back */
};

enum kvf_tensor_kind {
    KVF_KIND_BYTES = 0, /* opaque bytes, no geometry */
    KVF_KIND_KV = 1,    /* K and V of each layer */
    KVF_KIND_MLA = 2,   /* latent as K, its rotary part as a V that is always stored raw */
    KVF_KIND_STATE = 3, /* recurrent state: lossless only */
    /* Instead of K and V, which follow from it by a product with weights. No V; rope_state NONE;
     * heads are groups of channels (kvf_x_geometry). */
    KVF_KIND_X = 4,  /* input of each layer's projections of K and V, after the layer's norm */
    KVF_KIND_XG = 5, /* the same times the left singular vectors of [W_K|W_V] of the layer */
};

/* The geometry of one shard's KV: what a block holds. All fields take part in the namespace, so two
 * clients with different geometry can never read each other's blocks. Heads are those of this
 * shard. */
struct kvf_geometry {
    uint32_t struct_bytes;
    uint8_t kind;          /* enum kvf_tensor_kind */
    uint8_t dtype;         /* enum kvf_dtype, of K and V in the engine's pages */
    uint8_t rope_state;    /* enum kvf_rope_state */
    uint8_t layout_tag;    /* 0: described by strides; else the engine's number, part of the name */
    uint16_t n_layers;     /* 1..KVF_LAYERS_MAX */
    uint16_t n_heads;      /* KV heads a layer in this shard, 1..KVF_HEADS_MAX */
    uint16_t dim_k;        /* elements of a K vector, 1..KVF_DIM_MAX */
    uint16_t dim_v;        /* elements of a V vector, 0 if there is no V */
    uint16_t chunk_tokens; /* tokens of a full chunk, 1..KVF_CHUNK_TOKENS_MAX */
    uint16_t sink_tokens;  /* first tokens of a sequence kept raw by lossy profiles; at most
                              chunk_tokens */
};

/* Fill in what a geometry of KVF_KIND_X or KVF_KIND_XG has instead of heads, for vectors of width
 * elements a token: kind, rope_state, and n_heads groups of dim_k channels that share a scale, 128
 * where width is a multiple of it, else the most below that can be rotated (96 for 576). KVF_OK;
 * KVF_ERR_INVALID: another kind; KVF_ERR_UNSUPPORTED: width cannot be cut so. Any thread. */
KVF_API int kvf_x_geometry(int kind, uint32_t width, struct kvf_geometry *geometry);

/* One tensor (K or V) in the engine's pages. The address of element e of (layer, head, token) is
 *   layers[layer] + page * page_stride_bytes + (token % tokens_a_page) * token_stride_bytes
 *                 + head * head_stride_bytes + e * dtype_bytes
 * with page = page_table[token / tokens_a_page] (or token / tokens_a_page without a table). This
 * covers (2,B,N,H,D), (B,2,N,H,D), (B,H,N,2D), (B,N,H,2D), slot layouts and padded strides. */
struct kvf_tensor_view {
    void *const *layers; /* n_layers base addresses; need not be aligned */
    size_t page_stride_bytes;
    size_t token_stride_bytes;
    size_t head_stride_bytes;
};

/* K and V of one chunk in host memory. For encode the memory is only read. */
struct kvf_kv_view {
    uint32_t struct_bytes;
    uint32_t tokens_a_page;     /* >= 1 */
    const uint32_t *page_table; /* NULL: pages are consecutive from 0 */
    struct kvf_tensor_view k;
    struct kvf_tensor_view v; /* ignored if the geometry has dim_v 0 */
};

/* ----------------------------------------------------------------------------------------------
 * Part 3: the client handle
 */
struct kvf_client;

enum kvf_attach_flags {
    KVF_ATTACH_ALLOW_UNCALIBRATED = 1 << 0, /* use a lossy profile without a passed calibration */
    KVF_ATTACH_NO_RECONNECT = 1 << 1,       /* a broken connection stays broken */
    KVF_ATTACH_SPIN = 1 << 2, /* poll spins instead of sleeping: lower latency, one busy core */
};

/* Severity is 0 error, 1 warning, 2 information, 3 debug. text is one line without newline,
 * borrowed for the call. Called on the handle's thread, from inside library calls. */
typedef void (*kvf_log_fn)(void *arg, int severity, const char *text);

struct kvf_options {
    uint32_t struct_bytes;
    uint32_t flags;          /* enum kvf_attach_flags */
    const char *socket_path; /* NULL: $KVFERRY_SOCKET, else /run/kvferry/kvferryd.sock; of a daemon
                                on another node: tcp://host:port?key=FILE (docs/operations.md) */
    const char *client_name; /* for lists and logs, at most 63 bytes; NULL: process name */
    const char *profile;     /* "bytes", "raw", "exact", "safe", "balanced", "saw4-paper", ..., or
                                one of a file that the daemon has; NULL: "exact", or "bytes" if
                                geometry is NULL */
    const struct kvf_geometry *geometry;      /* NULL: opaque bytes (profile "bytes") */
    uint8_t weights_digest[KVF_DIGEST_BYTES]; /* of safetensors headers and sampled tensor bytes */
    uint8_t adapter_digest[KVF_DIGEST_BYTES]; /* of the LoRA adapter; zeroes: none */
    const char *namespace_label; /* separates applications; at most 63 bytes; NULL: "" */
    uint16_t shard;         /* over (KV group, pipeline rank, tensor rank), or KVF_SHARD_NONE */
    uint16_t shard_count;   /* 0 means 1 */
    uint32_t ring_entries;  /* requests and completions in flight; 0: 1024 */
    uint64_t staging_bytes; /* memory for puts; 0: the daemon's default */
    uint32_t connect_timeout_ms; /* 0: 5000 */
    uint32_t reserved;
    kvf_log_fn log; /* NULL: the library says nothing */
    void *log_arg;
    /* Kind XG: of the factors that the latents are made by (kvf_x_factors_read); else zeroes. */
    uint8_t factors_digest[KVF_DIGEST_BYTES];
};

/* Fill *options with defaults and its size. Any thread. */
KVF_API void kvf_options_init(struct kvf_options *options);

/* Connect, agree on a protocol version, map rings, staging and arena. Strings and geometry are
 * copied. What a block is made of or with takes part in the namespace: digests, geometry, profile,
 * label, shard_count; blocks of another one are never found. X and latents need a weights_digest,
 * latents a factors_digest: else refused. Blocks up to connect_timeout_ms. *client_out is owned by
 * the caller, see kvf_close.
 * A handle that has lost its daemon connects again inside of later calls, which do not block for
 * that: what takes time (the name of another node's host, its answer) goes on between them. Only to
 * start UCX for a daemon on another node takes such a call some milliseconds a try.
 * KVF_OK; KVF_ERR_INVALID, _NO_DAEMON, _VERSION, _BUSY (no staging left: retry), _TOO_LARGE (the
 * log names the chunk size that would fit), _REFUSED (profile not allowed), _TIMEOUT, _NO_MEMORY,
 * _PROTOCOL. */
KVF_API int kvf_open(const struct kvf_options *options, struct kvf_client **client_out);

/* Close: leases are given up, requests in flight are forgotten, every pointer obtained from the
 * handle is invalid. Accepts NULL. Does not block: the link to a daemon on another node is closed
 * by a thread of its own, within a second, for which exit() waits (2 s at most). Returns NULL, so
 * that `c = kvf_close(c)` leaves nothing behind. */
KVF_API struct kvf_client *kvf_close(struct kvf_client *client);

/* A descriptor that becomes readable when kvf_poll has something to do. Owned by the handle; only
 * to be given to poll/epoll. It stays the same over reconnects. */
KVF_API int kvf_fd(const struct kvf_client *client);

/* Facts about the connection. The caller sets struct_bytes; so for struct kvf_stat. A caller that
 * knows only the fields up to record_bytes_max says 80, and gets those. */
struct kvf_info {
    uint32_t struct_bytes;
    uint16_t protocol_version;
    uint8_t connected;                    /* 0 while the daemon is away */
    uint8_t lossless;                     /* the profile in force gives back every bit */
    char profile[KVF_PROFILE_NAME_BYTES]; /* in force; differs from the one asked for if that was
                                             refused */
    uint64_t incarnation;                 /* of the daemon: changes with each start */
    uint64_t namespace_id;
    uint64_t connection_id;
    uint64_t arena_bytes; /* mapped read-only */
    uint64_t staging_bytes;
    uint32_t credits; /* completions that may be in flight */
    uint32_t reconnects;
    uint64_t record_bytes_max; /* of a full chunk: record page and largest payload */
    /* Where the profile comes from: the file by which it has passed calibration and the workload of
     * its samples, or why another one was refused. "": nothing to say. */
    char profile_text[KVF_PROFILE_TEXT_BYTES];
};

/* KVF_OK; KVF_ERR_INVALID. */
KVF_API int kvf_client_info(struct kvf_client *client, struct kvf_info *info_out);

/* A round trip through the rings and the daemon's loop. Blocks up to timeout_ms.
 * KVF_OK; KVF_ERR_TIMEOUT, _DISCONNECTED, _NO_DAEMON, _BUSY. */
KVF_API int kvf_ping(struct kvf_client *client, uint32_t timeout_ms, uint64_t *round_trip_ns_out);

/* ----------------------------------------------------------------------------------------------
 * Part 4: blocking calls
 *
 * Each is the asynchronous call of part 7 plus waiting; mixing both on one handle is fine:
 * completions of other requests are kept for kvf_poll.
 */
enum kvf_put_flags {
    KVF_PUT_DURABLE = 1 << 0,  /* complete after the NVMe write instead of when READY in DRAM */
    KVF_PUT_NO_WRITE = 1 << 1, /* never write this block to NVMe */
};

enum kvf_source {
    KVF_SOURCE_VIEW = 0,   /* encode kv (host pages) with the handle's profile */
    KVF_SOURCE_BYTES = 1,  /* store bytes/size as they are (profile "bytes") */
    KVF_SOURCE_STAGED = 2, /* a slot from kvf_stage_acquire, already encoded */
};

struct kvf_put_item {
    uint32_t struct_bytes;
    uint8_t source; /* enum kvf_source */
    uint8_t reserved[3];
    struct kvf_key key;
    struct kvf_key supersedes; /* data NULL: none; else evicted once this block is READY */
    uint32_t token_start;      /* position of the chunk's first token in its sequence */
    uint32_t n_tokens;         /* 0: a full chunk */
    const struct kvf_kv_view *kv;
    const void *data;
    size_t data_bytes;
    uint64_t stage; /* KVF_SOURCE_STAGED: handle of the slot; given up if the call queues the put */
};

struct kvf_put_options {
    uint32_t struct_bytes;
    uint32_t flags; /* enum kvf_put_flags */
    struct kvf_key
        parent;       /* key of the chunk before items[0]; data NULL: items[0] starts a chain */
    uint32_t depth;   /* chunks before items[0] in its chain */
    uint32_t ttl_s;   /* 0: no limit */
    uint8_t priority; /* 0 normal, 1 keep longer, 2 keep longest */
    uint8_t reserved[3];
    uint32_t budget_ms; /* 0: 30000 */
};

/* Put blocks, in chain order. Encoding runs on the calling thread. Blocks until every block is
 * READY (or durable) or budget_ms ends. statuses_out (n entries, may be NULL) gets KVF_OK,
 * KVF_EXISTS or a failure per block and is written even on failure. options may be NULL. KVF_OK:
 * all stored or present; KVF_PARTIAL: some; else the first failure. */
KVF_API int kvf_put(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                    const struct kvf_put_options *options, int32_t *statuses_out);

enum kvf_lookup_flags {
    KVF_LOOKUP_LEASE = 1 << 0,    /* lease the ready part of the run, whole sets */
    KVF_LOOKUP_PREFETCH = 1 << 1, /* start bringing the rest of the run into DRAM */
};

struct kvf_lookup_options {
    uint32_t struct_bytes;
    uint32_t flags;       /* enum kvf_lookup_flags */
    uint32_t budget_ms;   /* wait at most this long for blocks on slower tiers; 0: do not wait */
    uint32_t n_tail_keys; /* the last n_tail_keys of the keys are tails, longest first; 0..15 */
};

struct kvf_lookup_result {
    uint32_t run_chunks;    /* leading chunks whose whole set is on some tier of this node */
    uint32_t ready_chunks;  /* leading chunks whose whole set is in DRAM (leased if asked) */
    int32_t tail_index;     /* 0-based among the tail keys, -1: none extends the run; one that does
                               counts as one more chunk in the other fields */
    uint32_t coming_chunks; /* chunks behind ready_chunks for which a prefetch runs */
    uint64_t lease;         /* 0: none; release by kvf_lease_release */
};

/* How long is the leading run of these keys? Counts whole sets only. Blocks up to budget_ms.
 * KVF_OK: result written (run_chunks may be 0); KVF_COMING: result written, a prefetch is running;
 * KVF_ERR_INVALID, _BUSY, _DISCONNECTED, _NO_DAEMON. */
KVF_API int kvf_lookup(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                       const struct kvf_lookup_options *options,
                       struct kvf_lookup_result *result_out);

struct kvf_get_options {
    uint32_t struct_bytes;
    uint32_t flags;     /* 0 */
    uint32_t budget_ms; /* blocks not ready by then are KVF_MISS; 0: 10000 */
    uint32_t reserved;
};

/* Where a hit was found. */
enum kvf_tier_kind {
    KVF_TIER_NONE = 0,
    KVF_TIER_HBM = 1,
    KVF_TIER_DRAM = 2,
    KVF_TIER_NVME = 3,
    KVF_TIER_REMOTE = 4,
};

/* One block in the daemon's memory, leased. record points at the record page; the payload follows
 * it. The memory is read-only and shared; see part 5 for how long it holds. */
struct kvf_hit {
    int32_t status; /* KVF_OK, KVF_MISS, KVF_TOO_SLOW, or a failure; the rest is valid only for
                       KVF_OK */
    uint8_t tier;   /* enum kvf_tier_kind: where it was when the request arrived */
    uint8_t reserved[3];
    const void *record;
    uint64_t record_bytes; /* record page and payload */
    const void *payload;   /* record + KVF_RECORD_PAGE_BYTES */
    uint64_t payload_bytes;
    uint64_t lease; /* release by kvf_lease_release */
};

/* Get blocks, keys in chain order. Blocks until all are answered or the budget ends. hits_out has n
 * entries, all written whatever the status. options may be NULL. KVF_OK: all hit; KVF_PARTIAL:
 * hits_out[0] hit, a later one did not; KVF_MISS: the first did not; KVF_ERR_INVALID, _BUSY,
 * _DISCONNECTED, _NO_DAEMON. */
KVF_API int kvf_get(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                    const struct kvf_get_options *options, struct kvf_hit *hits_out);

/* Bring blocks into DRAM in the background, keys in chain order; returns without waiting for them.
 * *accepted_out (may be NULL): blocks that are in DRAM or on their way. KVF_OK, KVF_MISS, or a
 * failure. */
KVF_API int kvf_prefetch(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                         uint32_t *accepted_out);

/* Forget whole sets by key, on every tier of this node. Leased bytes stay until released. After a
 * crash an evicted block may come back from NVMe; purge a namespace (kvferry purge) to forget for
 * good. *evicted_out (may be NULL): sets that were there. KVF_OK, KVF_MISS, or a failure. */
KVF_API int kvf_evict(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                      uint32_t *evicted_out);

/* Counters of this client and its namespace, since attach. */
struct kvf_stat {
    uint32_t struct_bytes;
    uint32_t reserved;
    uint64_t namespace_blocks;
    uint64_t namespace_dram_bytes;
    uint64_t namespace_nvme_bytes;
    uint64_t arena_bytes;
    uint64_t arena_stored_bytes;
    uint64_t hits;
    uint64_t misses;
    uint64_t puts;
    uint64_t leased_bytes; /* of this client */
    uint64_t lost_leases;  /* of this client */
    uint64_t x_refused;    /* of this handle: weights, factors or x that were refused, and blocks of
                              X that were made with others */
};

/* Blocks for a round trip. KVF_OK, or a failure as kvf_ping. */
KVF_API int kvf_stat(struct kvf_client *client, struct kvf_stat *stat_out);

/* What only an engine knows, for the daemon's metrics (kvferry_engine_*). */
enum kvf_report_kind {
    KVF_REPORT_LOAD_FAILED = 1,     /* blocks that were found, and could not be used */
    KVF_REPORT_TAINT_REFUSED = 2,   /* blocks not put: they follow from lossy ones */
    KVF_REPORT_CORRUPT = 3,         /* records that did not decode: kvf_decode reports them */
    KVF_REPORT_TOKENS_COMPUTED = 4, /* tokens of prompts, by source: computed ... */
    KVF_REPORT_TOKENS_ENGINE = 5,   /* ... found in the engine's own cache ... */
    KVF_REPORT_TOKENS_LOADED = 6,   /* ... or loaded from the daemon */
    KVF_REPORT_SAVED_US = 7,        /* time of the prefill that loads stand for ... */
    KVF_REPORT_SPENT_US = 8,        /* ... and that they, lookups and puts made requests wait */
    KVF_REPORT_GPU_US = 9,          /* of encoding and decoding: kvf_gpu_put and _get report it */
    KVF_REPORT_DRIFT_CHUNKS = 10,   /* computed again and compared with what is stored ... */
    KVF_REPORT_DRIFT_PPM = 11,      /* ... sum of the relative errors of these, in millionths */
    KVF_REPORT_GPU_DECODE_US = 12,  /* of KVF_REPORT_GPU_US, decoding */
};

/* Count amount (at most 2^40). Never blocks; sent with what comes next, and kept while the daemon
 * is away. A daemon of an older release hears nothing of it. KVF_OK; KVF_ERR_INVALID. */
KVF_API int kvf_report(struct kvf_client *client, int kind, uint64_t amount);

/* Compare a view with what is stored under its key, both as the profile gives them back, and
 * report it: *error_out is relative, 0 the same. kvf_put does so for one in 16 of its conflicts.
 * Blocks, up to 100 ms. KVF_OK; KVF_MISS; KVF_ERR_INVALID, _NO_MEMORY; as kvf_get, kvf_decode. */
KVF_API int kvf_drift(struct kvf_client *client, const struct kvf_put_item *item,
                      double *error_out);

/* ----------------------------------------------------------------------------------------------
 * Part 5: hits and leases
 *
 * A lease keeps the daemon from reusing a block's memory. It ends by kvf_lease_release, by the
 * handle's close, or, against the client's will, when the daemon's maximum lease age passes, on
 * drain, purge or death of the daemon. The memory stays mapped and readable in every case (a read
 * never faults), but its bytes are to be believed only if the release, called after the last read
 * or DMA, says KVF_OK.
 */

/* KVF_OK: every byte read under the lease was the block's. KVF_ERR_LOST: it may not have been;
 * treat the block as not loaded. KVF_ERR_INVALID: no such lease. Does not block. */
KVF_API int kvf_lease_release(struct kvf_client *client, uint64_t lease);

/* As release, without giving the lease up: is it still good at this moment? */
KVF_API int kvf_lease_check(struct kvf_client *client, uint64_t lease);

/* ----------------------------------------------------------------------------------------------
 * Part 6: staging, encode, decode
 */

/* A writable piece of this handle's staging memory: record page (4 KiB, filled by kvf_encode, or by
 * kvf_put for opaque bytes) and room for a payload. 4 KiB-aligned, pinned by the daemon. */
struct kvf_stage {
    uint64_t stage; /* for kvf_put_item.stage or kvf_stage_release */
    void *record;
    void *payload;        /* record + KVF_RECORD_PAGE_BYTES */
    size_t payload_bytes; /* capacity */
};

/* Take a slot for a payload of up to payload_bytes. KVF_OK; KVF_ERR_BUSY: staging is full of puts
 * in flight, poll and retry; KVF_ERR_TOO_LARGE. Does not block. */
KVF_API int kvf_stage_acquire(struct kvf_client *client, size_t payload_bytes,
                              struct kvf_stage *stage_out);

/* Describe opaque payload_bytes written to stage->payload, so that the slot can be put.
 * KVF_OK; KVF_ERR_INVALID (handle has a geometry), _TOO_LARGE. */
KVF_API int kvf_stage_seal(struct kvf_client *client, struct kvf_stage *stage,
                           size_t payload_bytes);

/* Give a slot back unused. KVF_OK; KVF_ERR_INVALID. */
KVF_API int kvf_stage_release(struct kvf_client *client, uint64_t stage);

/* Encode one chunk from host pages into a slot with the handle's profile. *record_bytes_out: record
 * page and payload. Runs on the calling thread; no lock, no allocation. KVF_OK; KVF_ERR_INVALID,
 * _TOO_LARGE (slot too small). */
KVF_API int kvf_encode(struct kvf_client *client, struct kvf_stage *stage, uint32_t token_start,
                       uint32_t n_tokens, const struct kvf_kv_view *kv, size_t *record_bytes_out);

/* Decode layers [layer_first, layer_first + n_layers) and tokens [token_first, token_first +
 * n_tokens) of a record into host pages; view tokens count from token_first. n_layers or n_tokens
 * 0: all that follow. The header is checked against the handle's geometry before a byte is written.
 * Runs on the calling thread. KVF_OK; KVF_ERR_MISMATCH, _CORRUPT, _INVALID. */
KVF_API int kvf_decode(struct kvf_client *client, const void *record, size_t record_bytes,
                       uint32_t layer_first, uint32_t n_layers, uint32_t token_first,
                       uint32_t n_tokens, const struct kvf_kv_view *kv);

/* ----------------------------------------------------------------------------------------------
 * Part 7: asynchronous calls
 *
 * A submit call queues one request and returns its id (never 0). Completions come by kvf_poll: one
 * event a block, in any order between blocks, then exactly one event for the request, also after
 * cancel; a lookup has only its request's event. Each event needs one credit (kvf_info.credits);
 * without enough, submit answers KVF_ERR_BUSY and queues nothing, and KVF_ERR_TOO_LARGE if all
 * credits would not suffice. A credit returns when its event has been polled.
 */
enum kvf_event_kind {
    KVF_EVENT_BLOCK = 1,
    KVF_EVENT_REQUEST = 2,
};

struct kvf_event {
    uint64_t request; /* id from submit */
    uint64_t user;    /* as given to submit */
    uint8_t kind;     /* enum kvf_event_kind */
    uint8_t reserved[3];
    uint32_t index; /* block: position among the request's keys. request: blocks that succeeded */
    struct kvf_hit hit;              /* block: of a get; for other requests only status and tier.
                           request: only status */
    struct kvf_lookup_result lookup; /* request event of a lookup, else zero */
};

KVF_API int kvf_submit_put(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                           const struct kvf_put_options *options, uint64_t user,
                           uint64_t *request_out);
KVF_API int kvf_submit_get(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                           const struct kvf_get_options *options, uint64_t user,
                           uint64_t *request_out);
KVF_API int kvf_submit_lookup(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                              const struct kvf_lookup_options *options, uint64_t user,
                              uint64_t *request_out);
KVF_API int kvf_submit_prefetch(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                                uint64_t user, uint64_t *request_out);
KVF_API int kvf_submit_evict(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                             uint64_t user, uint64_t *request_out);

/* Take up to max completions; waits up to timeout_ms for the first (0: does not block). *n_out:
 * taken. KVF_OK; KVF_EMPTY; KVF_ERR_DISCONNECTED: the connection broke; every request that was in
 * flight has been completed with KVF_ERR_DISCONNECTED and the handle reconnects within later calls.
 */
KVF_API int kvf_poll(struct kvf_client *client, struct kvf_event *events_out, uint32_t max,
                     uint32_t timeout_ms, uint32_t *n_out);

/* Ask to end a request early. Its events still come: blocks that had not finished with
 * KVF_ERR_CANCELED, then the request's. KVF_OK; KVF_ERR_INVALID: no such request in flight. Does
 * not block. */
KVF_API int kvf_cancel(struct kvf_client *client, uint64_t request);

/* ----------------------------------------------------------------------------------------------
 * Part 8: GPU calls (libkvferry_gpu)
 *
 * Blocks between pages in device memory and the daemon: KV is encoded on the GPU before it crosses
 * the link, and decoded on the GPU behind it. The bytes are those of part 6: what was put from a
 * GPU can be decoded on a processor, and the other way round.
 *
 *   put:  wait_event -> encode into a device ring -> copy to staging -> daemon
 *                              |                                          |
 *                         PAGES_FREE                                 BLOCK, REQUEST
 *   get:  daemon -> copy to device memory -> wait_event -> decode into pages -> BLOCK, REQUEST
 *
 * Streams and events are CUstream and CUevent of the driver (cudaStream_t, cudaEvent_t), as void *.
 * NULL is none, and so not CUDA's default stream: that is CU_STREAM_LEGACY, (void *)1. The engine's
 * context is used: the one that is current in the thread that opens the handle, else the primary
 * one. The library links nothing of CUDA and needs no GPU to be loaded; without driver, GPU or
 * kernels kvf_gpu_open says so in the client's log; calls with gpu NULL: KVF_ERR_UNSUPPORTED.
 *
 * Conventions beyond those of part 1: a GPU handle belongs to the thread of its client, and is
 * closed before it. Nothing is ever waited for on a stream of the caller's but what the caller
 * names.
 */
struct kvf_gpu;
struct kvf_gpu_region;

/* How the GPU reads hits. */
enum kvf_gpu_pinning {
    KVF_GPU_PIN_LAZY = 0,   /* pin a piece of the arena (at most 1 GiB) when it has the first hit:
                               that one waits for it, 30 to 80 ms a GiB */
    KVF_GPU_PIN_EAGER = 1,  /* pin every piece, one a call of kvf_gpu_poll */
    KVF_GPU_PIN_WINDOW = 2, /* pin load_window_bytes; the calling thread copies hits into it, at the
                               rate of one core: for hosts that limit pinned memory */
};

/* Who encodes and decodes. */
enum kvf_gpu_path {
    KVF_GPU_PATH_AUTO = 0,   /* ENGINE */
    KVF_GPU_PATH_ENGINE = 1, /* this process, in its own context */
    KVF_GPU_PATH_AGENT = 2,  /* a worker of the daemon, which opens the pages (gpu.devices) */
};

#define KVF_GPU_NO_TIMES 1 /* do not measure what KVF_REPORT_GPU_US counts */

struct kvf_gpu_options {
    uint32_t struct_bytes;
    uint32_t device_number;     /* 1 + ordinal; 0: the GPU of the current context, else the first */
    const char *device_uuid;    /* "GPU-...", goes before device_number; NULL: not given */
    uint64_t ring_bytes;        /* device memory for encoded blocks on their way out; 0: 4 bursts */
    uint64_t burst_bytes;       /* of KV, encoded by one set of launches; 0: 64 MiB */
    uint64_t load_window_bytes; /* device memory, and pinned memory in mode WINDOW, for blocks on
                                   their way in; 0: 64 MiB, as much as is ever in flight */
    uint64_t load_group_bytes;  /* of one copy on the way in, or half as much again where a block
                                   ends there: more is nearer to the link's rate, and later with
                                   a layer while others are under way; at most an eighth of the
                                   window; 0: 8 MiB */
    uint32_t pinning;           /* enum kvf_gpu_pinning */
    uint32_t flags;             /* KVF_GPU_NO_TIMES, or 0 */
    uint32_t path;              /* enum kvf_gpu_path */
    uint32_t reserved;          /* 0 */
};

/* Find the GPU, load kernels, allocate. client has a geometry and stays the caller's. Blocks (the
 * driver starts). KVF_OK; KVF_ERR_INVALID: also too small a ring; KVF_ERR_UNSUPPORTED: no driver,
 * GPU or kernels; KVF_ERR_NO_MEMORY, _IO; KVF_ERR_VERSION: libkvferry is of another version. */
KVF_API int kvf_gpu_open(struct kvf_client *client, const struct kvf_gpu_options *options,
                         struct kvf_gpu **gpu_out);

/* Close: copies in flight are waited for, requests in flight forgotten, regions gone. Blocks up to
 * some milliseconds, with path AGENT up to 20 s if the worker does not answer. Accepts NULL.
 * Returns NULL. */
KVF_API struct kvf_gpu *kvf_gpu_close(struct kvf_gpu *gpu);

/* Pages in device memory, by ids 0..n_pages - 1. The formula is that of struct kvf_tensor_view,
 * with device addresses as layers and the id as page: one region covers all layers, K and V. */
struct kvf_gpu_region_options {
    uint32_t struct_bytes;
    uint32_t n_pages;
    uint32_t tokens_a_page; /* >= 1 */
    uint32_t reserved;
    struct kvf_tensor_view k;
    struct kvf_tensor_view v; /* ignored if the geometry has dim_v 0 */
};

/* Make pages known. All is copied. Path AGENT: blocks until the worker has opened them, up to 10 s;
 * while there is no worker, pages are shared when there is one. KVF_OK; KVF_ERR_INVALID,
 * _NO_MEMORY; path AGENT: KVF_ERR_UNSUPPORTED, _TOO_LARGE, _REFUSED, _BUSY: the log says what to
 * do; KVF_ERR_DISCONNECTED: the worker has gone or does not answer. */
KVF_API int kvf_gpu_register(struct kvf_gpu *gpu, const struct kvf_gpu_region_options *options,
                             struct kvf_gpu_region **region_out);

/* KVF_OK; KVF_ERR_BUSY: requests still use it, poll. Path AGENT: blocks until the worker has let go
 * of the pages, up to 10 s. */
KVF_API int kvf_gpu_unregister(struct kvf_gpu *gpu, struct kvf_gpu_region *region);

struct kvf_gpu_put_item {
    uint32_t struct_bytes;
    uint32_t n_pages;
    struct kvf_key key;
    struct kvf_key supersedes; /* data NULL: none; else evicted once this block is READY */
    uint32_t token_start;      /* position of the chunk's first token in its sequence */
    uint32_t n_tokens;         /* 0: a full chunk */
    const uint32_t *pages;     /* ids; token t is in pages[t / tokens_a_page] */
};

/* Put blocks, in chain order. The encode is queued before the call returns, on stream (NULL: one of
 * the library's, of low priority), behind wait_event (NULL: nothing): the last step that wrote the
 * pages. The pages may be rewritten after the PAGES_FREE event, not before. As many leading items
 * are taken as there is room for, *taken_out says how many; with taken_out NULL all or none.
 * KVF_OK; KVF_ERR_BUSY: no room in ring, staging or queues for one, or asleep: poll and retry, or
 * skip; KVF_ERR_TOO_LARGE: never any room for so much; KVF_ERR_INVALID: a page id is out of range
 * or occurs twice, or another argument is; KVF_ERR_DISCONNECTED, _NO_DAEMON, _NO_MEMORY, _IO. */
KVF_API int kvf_gpu_put(struct kvf_gpu *gpu, struct kvf_gpu_region *region,
                        const struct kvf_gpu_put_item *items, uint32_t n,
                        const struct kvf_put_options *options, void *wait_event, void *stream,
                        uint64_t user, uint32_t *taken_out, uint64_t *request_out);

struct kvf_gpu_get_item {
    uint32_t struct_bytes;
    uint32_t n_pages;
    struct kvf_key key;
    uint32_t token_first;  /* of the block: earlier ones are left alone */
    uint32_t n_tokens;     /* wanted; 0: all that follow in a full chunk */
    const uint32_t *pages; /* ids; token token_first + t goes to pages[t / tokens_a_page] */
};

/* Get blocks, keys in chain order, into pages. Each block that hits is written on stream (NULL: one
 * of the library's), behind wait_event (NULL: nothing): the last step that read the target pages.
 * Its BLOCK event comes when all is written and the lease has been given up with KVF_OK; if the
 * event says anything else, its pages hold nothing. A block with fewer tokens than are wanted is
 * KVF_ERR_MISMATCH; one beyond the share of the arena that a client may hold leased is
 * KVF_ERR_BUSY. The stream lives until the request has ended. options may be NULL. KVF_OK;
 * KVF_ERR_BUSY, _TOO_LARGE, _INVALID (as for put), _DISCONNECTED, _NO_DAEMON, _NO_MEMORY, _IO. */
KVF_API int kvf_gpu_get(struct kvf_gpu *gpu, struct kvf_gpu_region *region,
                        const struct kvf_gpu_get_item *items, uint32_t n,
                        const struct kvf_get_options *options, void *wait_event, void *stream,
                        uint64_t user, uint64_t *request_out);

enum kvf_gpu_event_kind {
    KVF_GPU_EVENT_PAGES_FREE = 1, /* put: encoded; also of a put that fails */
    KVF_GPU_EVENT_BLOCK = 2,      /* put: stored. get: written to the pages */
    KVF_GPU_EVENT_REQUEST = 3,    /* the last event of its request */
};

struct kvf_gpu_event {
    uint64_t request; /* id from put or get */
    uint64_t user;
    uint8_t kind; /* enum kvf_gpu_event_kind */
    uint8_t tier; /* block: enum kvf_tier_kind */
    uint16_t reserved;
    int32_t status; /* as in struct kvf_event */
    uint32_t index; /* block: position among the items. request: blocks that succeeded */
    uint32_t reserved2;
};

/* Move requests along and take up to max events; waits up to timeout_ms for the first (0: does not
 * block). Requests move only inside calls: poll until all have ended. *n_out: taken.
 * KVF_OK; KVF_EMPTY; KVF_ERR_IO: the GPU has failed; every request has been ended. */
KVF_API int kvf_gpu_poll(struct kvf_gpu *gpu, struct kvf_gpu_event *events_out, uint32_t max,
                         uint32_t timeout_ms, uint32_t *n_out);

/* Ask to end a request early. Its events still come, and each of them once, the last one last: the
 * request keeps pages, stream and region until then.
 *
 *   put  What is queued on the stream runs: PAGES_FREE comes behind it as ever, and the pages are
 *        free whether it says KVF_OK or KVF_ERR_CANCELED. Nothing more is handed to the daemon.
 *        What it has it stores or does not: each block's event says KVF_OK or KVF_EXISTS, or
 *        KVF_ERR_CANCELED, which promises nothing about it.
 *   get  No more blocks are read. One whose copy or decode is queued ends behind that, with
 *        KVF_ERR_CANCELED, and its pages hold nothing; one that has said KVF_OK keeps its pages.
 *        No page is written once its block's event has come.
 *
 * KVF_OK, also the second time; KVF_ERR_INVALID: no such request in flight. Does not block. */
KVF_API int kvf_gpu_cancel(struct kvf_gpu *gpu, uint64_t request);

/* Give device memory and pinned memory back, before the engine sleeps; regions stay registered.
 * With path AGENT this and kvf_gpu_wake block until the worker has done its part, up to 10 s a
 * region. KVF_OK; KVF_ERR_BUSY: requests are in flight, poll. */
KVF_API int kvf_gpu_sleep(struct kvf_gpu *gpu);

/* Take them again. KVF_OK; KVF_ERR_NO_MEMORY: still asleep. */
KVF_API int kvf_gpu_wake(struct kvf_gpu *gpu);

/* ----------------------------------------------------------------------------------------------
 * Part 9: X instead of KV
 *
 * X is the input of a layer's K and V projections, behind its norm. It can be stored in place of K
 * and V, and then they are computed again when a request fetches it:
 *
 *   K = rope(knorm(X W_K^T + b_K)),  V = X W_V^T + b_V
 *
 * once a request and layer, over all its tokens, by one product with [W_K | W_V]. That takes a BLAS
 * (OpenBLAS, opened at the first kvf_x_open; $KVFERRY_BLAS names another library). Arithmetic is
 * fp32; what is written to the pages is rounded once.
 *
 * No serving engine hands X to a plug-in today: hooks of a framework can, and an engine of one's
 * own.
 */
struct kvf_x;

/* Which elements of a K vector turn together, with r = rope_dims. */
enum kvf_rope_style {
    KVF_ROPE_STYLE_NONE = 0,        /* K is wanted before rotation, or the model has none */
    KVF_ROPE_STYLE_HALF = 1,        /* i and i + r / 2: as in the checkpoints of Hugging Face */
    KVF_ROPE_STYLE_INTERLEAVED = 2, /* 2 i and 2 i + 1: as in Llama's own, and GGUF of Llama */
};

/* What K and V are rebuilt with. All arrays are in host memory, stay the caller's and must not
 * change until kvf_x_close. Matrices are as in checkpoints: a row an output, [outputs][d_model].
 * Heads are those of this shard: ranks of a tensor-parallel group give their rows of W_K and W_V
 * and share one stored X. */
struct kvf_x_weights {
    uint32_t struct_bytes;
    uint32_t d_model;          /* elements of X a token */
    uint32_t stored_width;     /* elements stored a token and layer; 0: d_model, X itself */
    uint16_t n_layers;         /* 1..KVF_LAYERS_MAX */
    uint16_t n_heads;          /* KV heads of this shard, 1..KVF_HEADS_MAX */
    uint16_t model_heads;      /* KV heads of the model; 0: n_heads */
    uint16_t dim_k;            /* 1..KVF_DIM_MAX */
    uint16_t dim_v;            /* 0..KVF_DIM_MAX; 0: no V */
    uint16_t rope_dims;        /* leading elements of a K vector that turn; 0: dim_k */
    uint8_t dtype;             /* of matrices, biases and gains: BF16, F16 or F32 */
    uint8_t kv_dtype;          /* of the pages: BF16, F16 or F32 */
    uint8_t rope_style;        /* enum kvf_rope_style */
    uint8_t reserved;          /* 0 */
    uint32_t rope_positions;   /* rows of the tables */
    float k_norm_eps;          /* with k_norm */
    const void *const *w_k;    /* a layer: [n_heads * dim_k][d_model] */
    const void *const *w_v;    /* a layer: [n_heads * dim_v][d_model] */
    const void *const *b_k;    /* a layer: [n_heads * dim_k]; NULL: the model has none */
    const void *const *b_v;    /* a layer: [n_heads * dim_v]; NULL: the model has none */
    const void *const *k_norm; /* a layer: [dim_k], gain of the RMS norm of each K vector; NULL */
    const float *rope_cos;     /* [rope_positions][rope_dims / 2] */
    const float *rope_sin;
    uint8_t weights_digest[KVF_DIGEST_BYTES]; /* as at attach; zeroes are refused */
    uint8_t adapter_digest[KVF_DIGEST_BYTES]; /* of the adapter that is in W_K and W_V */
    kvf_log_fn log;                           /* NULL: that of the client, if one is given */
    void *log_arg;
    const char *svd_file; /* kind XG: what `kvferry svd` wrote of these weights; else NULL */
};

/* Register weights. client: whose blocks will be rebuilt: it has to have attached with the same
 * digests and a geometry of X, or latents, of these layers; NULL: no such check, and no latents.
 * What is refused is said in one line of the log. *x_out is the caller's, see kvf_x_close, and
 * independent of client afterwards; of latents it is for the profile that the client has now. One
 * thread at a time. Blocks while the BLAS starts. The file stays open, and is read a layer at a
 * time.
 * KVF_OK; KVF_ERR_INVALID: a field is out of its range, or a table or matrix is missing;
 * KVF_ERR_REFUSED: no digest, no svd_file for latents, or stored_width is more than the model's K
 * and V have: storing those is less; KVF_ERR_MISMATCH: other digests, layers, kind or width than
 * the client's, or the file is of other weights; KVF_ERR_UNSUPPORTED: no BLAS here;
 * KVF_ERR_IO, _FOREIGN, _CORRUPT: of the file; KVF_ERR_NO_MEMORY. */
KVF_API int kvf_x_open(struct kvf_client *client, const struct kvf_x_weights *weights,
                       struct kvf_x **x_out);

/* Accepts NULL. Returns NULL. */
KVF_API struct kvf_x *kvf_x_close(struct kvf_x *x);

/* What a file of `kvferry svd` holds: the singular vectors of [W_K | W_V] of each layer. */
struct kvf_x_factors {
    uint32_t struct_bytes;
    uint32_t d_model; /* elements of X */
    uint32_t rank;    /* elements of a latent: for kvf_x_geometry, and stored_width */
    uint16_t n_layers;
    uint16_t n_heads; /* of K and V of the whole model */
    uint16_t dim_k;
    uint16_t dim_v;
    uint8_t weights_digest[KVF_DIGEST_BYTES]; /* of the weights they are of */
    uint8_t digest[KVF_DIGEST_BYTES];         /* SHA-256 of shape and factors, by kvferry svd */
};

/* Read the header of such a file; what is wrong is said in one line of the log (NULL: nowhere).
 * KVF_OK; KVF_ERR_INVALID, _IO, _FOREIGN, _CORRUPT, _NO_MEMORY. Any thread. */
KVF_API int kvf_x_factors_read(const char *path, struct kvf_x_factors *factors_out, kvf_log_fn log,
                               void *log_arg);

/* X of one layer. */
struct kvf_x_input {
    uint32_t struct_bytes;
    uint32_t n_tokens;
    uint32_t position_first;   /* of token 0 in its sequence */
    uint8_t dtype;             /* BF16, F16 or F32 */
    uint8_t reserved[3];       /* 0 */
    const uint32_t *positions; /* of each token; NULL: they follow each other */
    const void *data;          /* [n_tokens][d_model]; of latents [n_tokens][stored_width] */
    size_t token_stride_bytes; /* 0: tokens lie side by side */
    /* Of latents: [n_tokens][d_model], the caller's from the first layer of a request to the last:
     * X of the layer comes to stand in it, and is added to in the next one where the profile stores
     * differences (xgcl*); what is in it before the first layer does not matter. NULL otherwise, or
     * where each layer is stored by itself and all heads of the model are rebuilt. */
    float *sums;
};

/* Write K and V of one layer into pages: kv->k.layers[layer] and kv->v.layers[layer], tokens of the
 * view as those of the input. Layers of latents that are differences go in order, from 0 on. The
 * sums of who has put and of who reads differ by roundings only: docs/x-cache.md has the bound.
 * Blocks: it computes, on the threads of the BLAS. KVF_OK; KVF_ERR_INVALID: also where sums are
 * missing; KVF_ERR_MISMATCH: the tables have no row for a position; KVF_ERR_IO, _CORRUPT: of the
 * factors. Nothing is written then. */
KVF_API int kvf_x_rebuild(struct kvf_x *x, uint32_t layer, const struct kvf_x_input *input,
                          const struct kvf_kv_view *kv);

/* X of a request whose layers are there one after the other, as hooks see them: chunks of all its
 * tokens are encoded layer by layer, by the client's profile, and put together at the end. What is
 * stored is what kvf_put of the whole would store; it is read by kvf_get and kvf_decode, as any
 * block, and kvf_x_rebuild for each layer.
 *
 * Of KVF_KIND_XG the latents are made here: X U of a layer, or, where the profile stores
 * differences, (X - S) U, where S is the sum that a reader has of the layer before and grows by
 * decoded U^T. They are rounded to the geometry's dtype before they are coded. */
struct kvf_x_put;

struct kvf_x_put_options {
    uint32_t struct_bytes;
    uint32_t token_start;  /* position of the first token; a multiple of chunk_tokens */
    uint32_t n_tokens;     /* the last chunk may be shorter */
    uint32_t reserved;     /* 0 */
    uint64_t memory_bytes; /* that this may take until the end, at most; 0: no bound */
    struct kvf_x *x; /* of this client; stays open, and is used by this alone, until the end. Kind
                        XG: required. Kind X: NULL, or for its check of the weights' shape */
};

/* client is of KVF_KIND_X or KVF_KIND_XG and stays open until the end. KVF_OK; KVF_ERR_INVALID;
 * KVF_ERR_REFUSED: latents, and no x; KVF_ERR_MISMATCH: x is of another client, or profile;
 * KVF_ERR_TOO_LARGE: memory_bytes is not enough, the log says what is; KVF_ERR_NO_MEMORY. */
KVF_API int kvf_x_put_begin(struct kvf_client *client, const struct kvf_x_put_options *options,
                            struct kvf_x_put **put_out);

/* X of the next layer, [n_tokens][d_model] in the geometry's dtype, tokens token_stride_bytes apart
 * (0: side by side); only read. decoded_out NULL, or fp32[n_tokens][d_model]: what a reader will
 * have of it. Encodes on the calling thread. KVF_OK, also where a chunk has failed: the end says
 * that; KVF_ERR_INVALID: another layer is next; KVF_ERR_IO, _CORRUPT: of the factors, nothing has
 * been taken. */
KVF_API int kvf_x_put_layer(struct kvf_x_put *put, uint32_t layer, const void *data,
                            size_t token_stride_bytes, float *decoded_out);

/* Put all blocks in chain order, a key each, after the last layer. options and statuses_out as of
 * kvf_put, budget_ms for each block. Blocks. put is gone afterwards, whatever the status, but for
 * KVF_ERR_INVALID: layers are missing, n is not the number of chunks. Else as kvf_put;
 * KVF_ERR_MISMATCH: the client has been given another profile meanwhile. */
KVF_API int kvf_x_put_end(struct kvf_x_put *put, const struct kvf_key *keys, uint32_t n,
                          const struct kvf_put_options *options, int32_t *statuses_out);

/* Put nothing. Accepts NULL. Returns NULL. */
KVF_API struct kvf_x_put *kvf_x_put_cancel(struct kvf_x_put *put);

/* What pays: to fetch K and V, to fetch X and rebuild them, or to compute them again. By the
 * formulas of `kvferry plan` (docs/x-cache.md), from the model's shape and the rates of link and
 * products; the way of the call before stays until another one is faster by a margin. */
enum kvf_x_way {
    KVF_X_WAY_RECOMPUTE = 0,
    KVF_X_WAY_KV = 1,
    KVF_X_WAY_X = 2,
    KVF_X_WAYS = 3,
};

struct kvf_x_gate;

struct kvf_x_gate_options {
    uint32_t struct_bytes;
    uint32_t query_heads;        /* of the model, not of the shard */
    uint32_t ffn_width;          /* of what one token goes through */
    uint32_t margin_percent;     /* by which another way has to be faster; 0: 10 */
    const char *x_profile;       /* NULL: that of the client that x was opened with */
    const char *kv_profile;      /* by which K and V are or would be stored; NULL: "exact" */
    double link_bytes_per_s;     /* from the daemon to the pages; 0: a copy in memory is timed */
    double flop_per_s;           /* of the rebuild; 0: products of x are timed */
    double recompute_flop_per_s; /* of the engine's own prefill; 0: as flop_per_s */
    double fixed_s;              /* of a fetch before its first byte */
    kvf_log_fn log;              /* NULL: that of x. Changes of the way are said, severity 2 */
    void *log_arg;
};

struct kvf_x_choice {
    uint32_t struct_bytes;
    uint8_t way; /* enum kvf_x_way */
    uint8_t reserved[3];
    double seconds[KVF_X_WAYS];   /* of each way */
    uint64_t choices[KVF_X_WAYS]; /* since the gate was opened, this one included */
    double link_bytes_per_s;      /* in force */
    double flop_per_s;
    char why[192]; /* one line: the figures, and whether the margin decided */
};

/* x: whose weights and rates these are; stays open for longer. Rates that are not given are timed
 * here, some 100 ms. *gate_out is the caller's, see kvf_x_gate_close. KVF_OK; KVF_ERR_INVALID: a
 * field is out of its range, or a profile has no form for the model, the log says which;
 * KVF_ERR_NO_MEMORY. */
KVF_API int kvf_x_gate_open(struct kvf_x *x, const struct kvf_x_gate_options *options,
                            struct kvf_x_gate **gate_out);

/* The way for a request of n_tokens that are all stored. Never blocks, no allocation. KVF_OK;
 * KVF_ERR_INVALID. */
KVF_API int kvf_x_gate_choose(struct kvf_x_gate *gate, uint32_t n_tokens,
                              struct kvf_x_choice *choice_out);

/* A fetch of so many bytes took so long: the link's rate follows, by an eighth of the difference.
 * KVF_OK; KVF_ERR_INVALID. */
KVF_API int kvf_x_gate_note(struct kvf_x_gate *gate, uint64_t bytes, double seconds);

/* Accepts NULL. Returns NULL. */
KVF_API struct kvf_x_gate *kvf_x_gate_close(struct kvf_x_gate *gate);

/* The same on a GPU: kvferry_gpu_x.h. */

#ifdef __cplusplus
}
#endif

#endif /* KVFERRY_H */
