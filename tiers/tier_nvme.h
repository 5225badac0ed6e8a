/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme.h: the drive tier: records in a log of segments on one file or block device.
 *
 *   head          superblock and state page, two copies each; the first 1 MiB
 *   segment       page 0, records in the order they came, footer; segment_bytes each
 *   open          the segment that records are appended to
 *   sealing       full; waits for its last writes, a sync and its footer
 *   sealed        read only, until it is the oldest and its turn to be reused comes
 *   free          no record of any worth
 *
 * The bytes are in nvme_format.h and docs/disk-format.md. One append stream, at most two segments
 * without footer, first in first out; a record that the host still wants when its segment is about
 * to be reused is read, verified and appended again, within limits.
 *
 * A location packs segment, page and the low bits of the segment's generation, so that a location
 * of a segment that has been reused is a KVF_MISS and never other bytes.
 *
 * A record may be stored packed: the host names it by its plain size all the same, and load gives
 * the plain record. A packed one is read to the end of the memory that it is unpacked in.
 *
 * Owner of everything: the reactor. After open and recover nothing here blocks, and nothing
 * allocates but the table of a segment when it is sealed (12 bytes a live record). Reads are
 * verified by the I/O queue, or, where it does not, by jobs of the work queue, whose poll therefore
 * completes some loads. The digest of footers is a job, too. Close the work queue (which waits for
 * its jobs) before the tier.
 */
#ifndef KVF_TIERS_TIER_NVME_H
#define KVF_TIERS_TIER_NVME_H

#include "base/env.h"
#include "tiers/io.h"
#include "tiers/tier.h"
#include "tiers/work.h"

enum kvf_nvme_limits {
    KVF_NVME_SEGMENTS_MIN = 4,
    KVF_NVME_SEGMENTS_MAX = 1 << 20,
    KVF_NVME_SEGMENT_BYTES_MIN = 64 << 10,
    KVF_NVME_SEGMENT_BYTES_MAX = 1 << 30,
    KVF_NVME_CALLS_MAX = 4096, /* of stores_max, loads_max */
    KVF_NVME_BOUNCE_MAX = 16,
    KVF_NVME_PACK_MAX = 64,   /* of pack_count and unpack_count */
    KVF_NVME_PURGES_MAX = 64, /* that wait for the disk at one time */
};

/* What the tier asks the owner of the write budget. Both members are optional. Reactor. */
struct kvf_nvme_budget {
    void *ctx;
    /* May bytes more be written to keep old records? NULL: yes. */
    bool (*may_reinsert)(void *ctx, uint64_t bytes);
    /* The credit to keep over a restart; asked when a segment is sealed and on drain. NULL: 0. */
    int64_t (*credit_bytes)(void *ctx);
};

struct kvf_nvme_config {
    const char *path; /* file or block device; for messages only if io is given. Copied. */
    /* Size of the store. 0: a device is used whole, a file keeps its size (a new one is refused).
     * A store that is smaller is extended, one that is larger loses its last segments. */
    uint64_t bytes;
    uint64_t segment_bytes; /* for a new store; 0: 256 MiB, 128 MiB in stores under 16 GiB */

    /* The queue to use, for simulations; taken over by the tier on KVF_OK. NULL: path is opened,
     * locked against a second daemon, and io_config (fd is ignored) says how. */
    struct kvf_io_queue *io;
    struct kvf_io_config io_config;

    struct kvf_env env;
    struct kvf_work_queue *work; /* required; borrowed until close */
    struct kvf_tier_host host;   /* reclaim, moved, recovered, lost are required */
    const uint8_t *id_key;       /* cluster.key, 32 bytes, or NULL: the store's own. Copied. */

    uint32_t stores_max; /* stores between call and done; more: KVF_ERR_BUSY */
    uint32_t loads_max;
    uint32_t reinsert_percent; /* of a segment's bytes, at most, to be kept when it is reused */
    uint32_t bounce_count;     /* buffers for that */
    uint64_t bounce_bytes;     /* of each; a larger record is not kept */

    /* Write records packed (codec/entropy.h), where that pays: jobs of the work queue pack and
     * unpack them, at most so many of each at a time. Packed records are read in any case. */
    bool packs;
    uint32_t pack_count;
    uint64_t pack_bytes; /* a larger record is written as it is */
    uint32_t unpack_count;
    struct kvf_nvme_budget budget;

    /* Failed I/Os and corrupt records within a few error_decay_ns: from the first number on nothing
     * is written, from the second on the tier is off, until it is opened again. */
    uint32_t errors_writes_off;
    uint32_t errors_off;
    uint64_t error_decay_ns; /* one error is forgiven after each */

    /* Tries, one a millisecond, to lock a file that another process has locked: the kernel lets go
     * of the files of a killed process only when its I/Os have ended. Default 2000. */
    uint32_t lock_wait_ms;

    /* Called by open, recover and close while they wait for the queue. NULL: sleep a little. */
    void (*wait)(void *ctx);
    void *wait_ctx;
};

/* Defaults: automatic engine, the system's clock and random bytes, 64 stores, 256 loads, 25 %, two
 * buffers of 16 MiB and a page, no packing, one such buffer for it, two unpackers, 8 and 64 errors,
 * a minute. */
void kvf_nvme_config_init(struct kvf_nvme_config *config);

/* Bytes that open takes for packing and unpacking. */
uint64_t kvf_nvme_pack_memory(const struct kvf_nvme_config *config);

/* Open a store; a missing or empty file becomes one. why_out (KVF_ERROR_TEXT_BYTES) says which
 * engine runs and why not a better one, or in one line what is wrong, where, and the cure. Nothing
 * that is not ours is ever written to. Blocks. KVF_OK; KVF_ERR_FOREIGN: not a store of ours, of a
 * newer version, or under another key; KVF_ERR_CORRUPT: ours, but both copies of the head are
 * broken; KVF_ERR_BUSY: another process has it open; KVF_ERR_CONFIG: sizes do not fit;
 * KVF_ERR_NO_SPACE, _IO, _NO_MEMORY, _UNSUPPORTED (engine), _REFUSED (permissions), _INVALID. */
int kvf_nvme_open(const struct kvf_nvme_config *config, struct kvf_tier **tier_out, char *why_out,
                  size_t why_bytes);

/* What kvferryd --format does: make path (a file of any content, or a block device) an empty store
 * with a new uuid, whatever was there. Of config, path, bytes, segment_bytes, io (borrowed), env
 * and id_key count. Blocks. Statuses as kvf_nvme_open. */
int kvf_nvme_format(const struct kvf_nvme_config *config, char *why_out, size_t why_bytes);

/* As the queue's: memory that records will be stored from or loaded to. Registering a range that
 * overlaps an earlier one replaces that; bytes 0 forgets the range that holds base. Call again
 * whenever other memory has been mapped there. */
int kvf_nvme_register_memory(struct kvf_tier *tier, void *base, uint64_t bytes);

/* ----------------------------------------------------------------------------------------------
 * Namespaces. A purge raises the namespace's epoch: records under an older one are dead from then
 * on, here and after every restart. The host forgets its own entries by drop.
 */

/* The epoch for new records; 0 for a namespace that was never purged. A store under an older one
 * completes with KVF_ERR_REFUSED, a load of such a record with KVF_MISS. */
uint64_t kvf_nvme_namespace_epoch(const struct kvf_tier *tier, uint64_t namespace_id);

/* Raise the epoch, at once in memory, and call done from inside poll when both copies are on stable
 * storage (KVF_OK) or cannot be (KVF_ERR_IO: the purge may be forgotten at the next start; ask
 * again). KVF_OK; KVF_ERR_BUSY: the table of 64 namespaces is full until the oldest records of one
 * of them are overwritten, or too many purges are waiting; KVF_ERR_TIER_OFF. */
int kvf_nvme_namespace_purge(struct kvf_tier *tier, uint64_t namespace_id,
                             void (*done)(void *ctx, uint64_t namespace_id, int status), void *ctx);

/* ----------------------------------------------------------------------------------------------
 * Facts
 */
struct kvf_nvme_info {
    uint8_t uuid[16];
    uint8_t id_key[32]; /* for kvf_key_id_compute: cluster.key, or the store's own */
    bool is_device;
    bool is_direct;     /* O_DIRECT; false: the page cache is in between */
    const char *engine; /* name of the I/O queue */
    uint64_t created_wall_s;
    int64_t credit_bytes; /* as it was kept when the store was last written */
    uint64_t store_bytes, segment_bytes;
    uint64_t record_bytes_max; /* that fits into a segment */
    uint32_t segments, segments_sealed, segments_free, segments_unsealed;
    uint32_t purged_namespaces;
    uint64_t generation; /* of the segment opened last */
    /* since open */
    uint64_t seals, syncs, sync_failures, retries_read, reinserted_bytes, discarded_records;
    uint64_t packed_records, packed_saved_bytes, unpacked_records;
    /* by recover */
    uint64_t recovered_records, recovered_scanned, recovery_ns;
};

void kvf_nvme_info(const struct kvf_tier *tier, struct kvf_nvme_info *info_out);

/* Bytes of the drive that the record at this location takes; 0: there is none. */
uint64_t kvf_nvme_stored_bytes(const struct kvf_tier *tier, kvf_location location);

extern const struct kvf_tier_ops kvf_tier_nvme_ops;

#endif /* KVF_TIERS_TIER_NVME_H */
