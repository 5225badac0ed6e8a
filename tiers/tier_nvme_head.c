/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_head.c: open, format and resize: everything about the first MiB of a store.
 *
 * The rule of this file: nothing is written to a drive before its superblock has been read and is
 * ours, unless the file is empty or format has been asked for. All of it blocks, at start only.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/failpoint.h"
#include "base/fd.h"
#include "base/hash.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SEGMENT_BYTES_LARGE   (256ull << 20)
#define SEGMENT_BYTES_SMALL   (128ull << 20)
#define STORE_BYTES_LARGE     (16ull << 30)
#define CONFIG_BOUNCE_DEFAULT ((16ull << 20) + KVF_NVME_PAGE_BYTES)
#define LOCK_PAUSE_NS         KVF_NS_PER_MS

/* What open, format and resize work on. */
struct head {
    struct kvf_nvme_device device;
    const struct kvf_nvme_config *config;
    const char *path;
    struct kvf_nvme_super *super; /* pages, 4 KiB-aligned */
    struct kvf_nvme_state *state;
    uint8_t *page;       /* for copies and zeroes */
    uint32_t state_good; /* the copy of the state that was read */
    bool is_direct;
    bool is_empty; /* a file without content */
    char *why;
    size_t why_bytes;
};

void kvf_nvme_config_init(struct kvf_nvme_config *config)
{
    *config = (struct kvf_nvme_config){
        .env = kvf_env_system(),
        .stores_max = 64,
        .loads_max = 256,
        .reinsert_percent = 25,
        .bounce_count = 2,
        .bounce_bytes = CONFIG_BOUNCE_DEFAULT,
        .pack_count = 1,
        .pack_bytes = CONFIG_BOUNCE_DEFAULT,
        .unpack_count = 2,
        .errors_writes_off = 8,
        .errors_off = 64,
        .error_decay_ns = 60 * KVF_NS_PER_S,
        .lock_wait_ms = 2000,
    };
    kvf_io_config_init(&config->io_config);
}

struct kvf_nvme_identity kvf_nvme_identity(const struct kvf_nvme_tier *tier)
{
    return (struct kvf_nvme_identity){.uuid = tier->super.uuid,
                                      .mac_key = tier->mac_key,
                                      .segment_bytes = tier->super.segment_bytes};
}

/* --- blocking access -------------------------------------------------------------------------- */

static void blocking_done(struct kvf_io *io)
{
    *(bool *)io->owner = true;
}

static int queue_io(struct kvf_nvme_device *device, struct kvf_io *io)
{
    struct timespec nap = {.tv_nsec = 20000};
    bool finished = false;
    int status;

    io->done = blocking_done;
    io->owner = &finished;
    status = device->io->ops->submit(device->io, io);
    while (status == KVF_OK && !finished) {
        if (device->io->ops->poll(device->io) == 0) {
            if (device->wait != NULL) {
                device->wait(device->wait_ctx);
            } else {
                nanosleep(&nap, NULL);
            }
        }
    }
    return status == KVF_OK ? io->status : status;
}

int kvf_nvme_device_io(struct kvf_nvme_device *device, enum kvf_io_op op, void *buffer,
                       uint64_t offset, uint64_t bytes)
{
    struct kvf_io io = {.op = (uint8_t)op, .buffer = buffer, .offset = offset, .bytes = bytes};
    int status;

    if (op != KVF_IO_SYNC &&
        (offset > device->capacity_bytes || bytes > device->capacity_bytes - offset)) {
        return KVF_ERR_CORRUPT;
    }
    if (device->io != NULL) {
        return queue_io(device, &io);
    }
    switch (op) {
    case KVF_IO_READ:
        return kvf_fd_pread_all(device->fd, buffer, bytes, offset);
    case KVF_IO_WRITE:
        status = kvf_fd_pwrite_all(device->fd, buffer, bytes, offset);
        break;
    default:
        status = fdatasync(device->fd) == 0 ? KVF_OK : KVF_ERR_IO;
        break;
    }
    return status == KVF_OK || status == KVF_ERR_NO_SPACE ? status : KVF_ERR_IO;
}

static int say(struct head *head, int status, const char *what)
{
    snprintf(head->why, head->why_bytes, "%s: %s", head->path, what);
    return status;
}

/* --- sizes ------------------------------------------------------------------------------------ */

/* Whole segments that fit. */
static uint64_t segments_in(uint64_t store_bytes, uint64_t segment_bytes)
{
    uint64_t count = store_bytes < KVF_NVME_SEGMENT_OFFSET
                         ? 0
                         : (store_bytes - KVF_NVME_SEGMENT_OFFSET) / segment_bytes;

    return count > KVF_NVME_SEGMENTS_MAX ? KVF_NVME_SEGMENTS_MAX : count;
}

static int choose_sizes(struct head *head, uint64_t store_bytes)
{
    uint64_t segment_bytes = head->config->segment_bytes;

    if (segment_bytes == 0) {
        segment_bytes = store_bytes < STORE_BYTES_LARGE ? SEGMENT_BYTES_SMALL : SEGMENT_BYTES_LARGE;
    }
    if (segment_bytes < KVF_NVME_SEGMENT_BYTES_MIN || segment_bytes > KVF_NVME_SEGMENT_BYTES_MAX ||
        segment_bytes % KVF_NVME_PAGE_BYTES != 0) {
        return say(head, KVF_ERR_CONFIG,
                   "segment size: 64 KiB to 1 GiB in steps of 4 KiB are possible");
    }
    if (segments_in(store_bytes, segment_bytes) < KVF_NVME_SEGMENTS_MIN) {
        return say(head, KVF_ERR_CONFIG,
                   "a store needs 1 MiB and room for 4 segments (of 128 MiB, unless smaller ones "
                   "are configured): make it larger");
    }
    head->super->store_bytes = store_bytes;
    head->super->segment_bytes = segment_bytes;
    head->super->segment_count = segments_in(store_bytes, segment_bytes);
    return KVF_OK;
}

/* --- superblock ------------------------------------------------------------------------------- */

static int super_write_copy(struct head *head, uint32_t copy)
{
    int status = KVF_FAILPOINT(nvme_superblock_write);

    kvf_nvme_super_seal(head->super, copy);
    if (status == KVF_OK) {
        status = kvf_nvme_device_io(&head->device, KVF_IO_WRITE, head->super,
                                    KVF_NVME_SUPER_OFFSET + (uint64_t)copy * KVF_NVME_COPY_BYTES,
                                    KVF_NVME_PAGE_BYTES);
    }
    if (status == KVF_OK) {
        status = kvf_nvme_device_io(&head->device, KVF_IO_SYNC, NULL, 0, 0);
    }
    return status == KVF_OK ? KVF_OK : say(head, status, "writing the superblock failed");
}

/* Copy 1 first: while it is written, copy 0 still says what was. */
static int super_write(struct head *head)
{
    int status = super_write_copy(head, 1);

    return status == KVF_OK ? super_write_copy(head, 0) : status;
}

/* The better of both copies into head->super. KVF_OK, or what is wrong with both. */
static int super_read(struct head *head)
{
    struct kvf_nvme_super *candidate = (struct kvf_nvme_super *)head->page;
    int best = KVF_ERR_FOREIGN;
    uint64_t best_sequence = 0;

    for (uint32_t copy = 0; copy < KVF_NVME_COPIES; copy++) {
        uint64_t offset = KVF_NVME_SUPER_OFFSET + (uint64_t)copy * KVF_NVME_COPY_BYTES;
        int status = KVF_FAILPOINT(nvme_recover_read);

        if (status == KVF_OK) {
            status = kvf_nvme_device_io(&head->device, KVF_IO_READ, candidate, offset,
                                        KVF_NVME_PAGE_BYTES);
        }
        if (status == KVF_OK) {
            status = kvf_nvme_super_check(candidate, copy);
        } else if (status == KVF_ERR_CORRUPT) {
            status = KVF_ERR_FOREIGN; /* too short for a superblock there */
        }
        if (status == KVF_OK && (best != KVF_OK || candidate->sequence > best_sequence)) {
            memcpy(head->super, candidate, sizeof(*candidate));
            best_sequence = candidate->sequence;
            best = KVF_OK;
        } else if (status != KVF_OK && best != KVF_OK && status != KVF_ERR_FOREIGN) {
            best = status;
        } else if (status == KVF_ERR_FOREIGN && best == KVF_ERR_FOREIGN &&
                   candidate->magic == KVF_NVME_SUPER_MAGIC) {
            head->super->major = candidate->major; /* for the message */
        }
    }
    return best;
}

static int super_refuse(struct head *head, int status)
{
    if (status == KVF_ERR_CORRUPT) {
        return say(head, status,
                   "both superblocks of this store are damaged: restore it, or give it up with "
                   "kvferryd --format");
    }
    if (status == KVF_ERR_IO) {
        return say(head, status, "the superblock cannot be read: look at the drive");
    }
    if (head->super->major > KVF_NVME_MAJOR) {
        return say(head, KVF_ERR_FOREIGN,
                   "this store was written by a newer kvferryd: upgrade, or give it up with "
                   "kvferryd --format");
    }
    return say(head, KVF_ERR_FOREIGN,
               "this is not a kvferry store and not empty: check the path, or claim it with "
               "kvferryd --format");
}

/* --- state ------------------------------------------------------------------------------------ */

static int state_write_copy(struct head *head, uint32_t copy)
{
    int status;

    kvf_nvme_state_seal(head->state, copy);
    status = kvf_nvme_device_io(&head->device, KVF_IO_WRITE, head->state,
                                KVF_NVME_STATE_OFFSET + (uint64_t)copy * KVF_NVME_COPY_BYTES,
                                KVF_NVME_PAGE_BYTES);
    if (status == KVF_OK) {
        status = kvf_nvme_device_io(&head->device, KVF_IO_SYNC, NULL, 0, 0);
    }
    return status == KVF_OK ? KVF_OK : say(head, status, "writing the state page failed");
}

static int state_read(struct head *head)
{
    struct kvf_nvme_state *candidate = (struct kvf_nvme_state *)head->page;
    bool found = false, unreadable = false;

    for (uint32_t copy = 0; copy < KVF_NVME_COPIES; copy++) {
        uint64_t offset = KVF_NVME_STATE_OFFSET + (uint64_t)copy * KVF_NVME_COPY_BYTES;
        int status = KVF_FAILPOINT(nvme_recover_read);

        if (status == KVF_OK) {
            status = kvf_nvme_device_io(&head->device, KVF_IO_READ, candidate, offset,
                                        KVF_NVME_PAGE_BYTES);
        }
        unreadable = unreadable || status == KVF_ERR_IO;
        if (status == KVF_OK && kvf_nvme_state_check(candidate, head->super->uuid, copy) &&
            (!found || candidate->sequence > head->state->sequence)) {
            memcpy(head->state, candidate, sizeof(*candidate));
            head->state_good = copy;
            found = true;
        }
    }
    if (!found && unreadable) {
        return say(head, KVF_ERR_IO, "the state page cannot be read: look at the drive");
    }
    if (!found) {
        return say(head, KVF_ERR_CORRUPT,
                   "both state pages of this store are damaged, so what was purged is unknown: "
                   "restore it, or give it up with kvferryd --format");
    }
    return KVF_OK;
}

/* --- format ----------------------------------------------------------------------------------- */

/* Headers that lie there may be of an earlier life of this store. */
static int invalidate_segments(struct head *head, uint64_t first, uint64_t end)
{
    memset(head->page, 0, KVF_NVME_PAGE_BYTES);
    for (uint64_t i = first; i < end; i++) {
        int status = kvf_nvme_device_io(
            &head->device, KVF_IO_WRITE, head->page,
            kvf_nvme_segment_offset(head->super->segment_bytes, (uint32_t)i), KVF_NVME_PAGE_BYTES);

        if (status != KVF_OK) {
            return say(head, status, "writing to new space failed");
        }
    }
    return KVF_OK;
}

static void new_identity(struct head *head)
{
    const struct kvf_nvme_config *config = head->config;
    struct kvf_nvme_super *super = head->super;
    uint8_t id_key[32], mac_key[32];

    super->major = KVF_NVME_MAJOR;
    super->minor = KVF_NVME_MINOR;
    super->sequence = 1;
    super->created_wall_s = kvf_env_wall_s(&config->env);
    kvf_env_random_fill(&config->env, super->uuid, sizeof(super->uuid));
    if (config->id_key != NULL) {
        super->flags = KVF_NVME_KEY_OUTSIDE;
        memcpy(id_key, config->id_key, sizeof(id_key));
    } else {
        kvf_env_random_fill(&config->env, id_key, sizeof(id_key));
        memcpy(super->id_key, id_key, sizeof(id_key));
    }
    kvf_nvme_keys_derive(id_key, super->uuid, mac_key, super->key_check);
}

static int grow_file(struct head *head, uint64_t store_bytes)
{
    int status;

    if (head->device.io != NULL || head->device.is_device ||
        store_bytes <= head->device.capacity_bytes) {
        return KVF_OK;
    }
    status = kvf_fd_reserve(head->device.fd, 0, store_bytes);
    if (status != KVF_OK) {
        snprintf(head->why, head->why_bytes, "%s: cannot reserve %llu MiB: %s", head->path,
                 (unsigned long long)(store_bytes >> 20), strerror(errno));
        return status;
    }
    head->device.capacity_bytes = store_bytes;
    return KVF_OK;
}

/* While FORMATTING is set, a start begins again: nothing is stored. The superblock goes first, even
 * before the file gets its size, so that a crash leaves a file that is empty or known to be
 * ours. */
static int format_store(struct head *head, uint64_t store_bytes)
{
    bool had_content = !head->is_empty;
    int status;

    memset(head->super, 0, sizeof(*head->super));
    memset(head->state, 0, sizeof(*head->state));
    status = choose_sizes(head, store_bytes);
    if (status != KVF_OK) {
        return status;
    }
    new_identity(head);
    head->super->flags |= KVF_NVME_FORMATTING;
    if (head->device.capacity_bytes < KVF_NVME_PAGE_BYTES) {
        head->device.capacity_bytes = KVF_NVME_PAGE_BYTES;
    }
    status = super_write_copy(head, 0);
    if (status == KVF_OK) {
        status = grow_file(head, store_bytes);
    }
    if (status == KVF_OK && had_content) {
        status = invalidate_segments(head, 0, head->super->segment_count);
    }
    head->state->major = KVF_NVME_MAJOR;
    head->state->minor = KVF_NVME_MINOR;
    head->state->sequence = 1;
    head->state->generation_limit = 1;
    memcpy(head->state->uuid, head->super->uuid, sizeof(head->state->uuid));
    for (uint32_t copy = 0; copy < KVF_NVME_COPIES && status == KVF_OK; copy++) {
        status = state_write_copy(head, copy);
    }
    if (status == KVF_OK) {
        head->super->flags &= ~(uint32_t)KVF_NVME_FORMATTING;
        head->super->sequence++;
        status = super_write(head);
    }
    return status;
}

/* --- resize ----------------------------------------------------------------------------------- */

static uint64_t wanted_bytes(const struct head *head)
{
    uint64_t bytes = head->config->bytes;
    bool is_fixed = head->device.io != NULL || head->device.is_device;

    if (bytes == 0 || (is_fixed && bytes > head->device.capacity_bytes)) {
        bytes = head->device.capacity_bytes;
    }
    return bytes;
}

static int resize_store(struct head *head)
{
    uint64_t store_bytes = wanted_bytes(head);
    uint64_t segment_bytes = head->super->segment_bytes;
    uint64_t before = head->super->segment_count;
    uint64_t after = segments_in(store_bytes, segment_bytes);
    int status;

    if (after < KVF_NVME_SEGMENTS_MIN) {
        return say(head, KVF_ERR_CONFIG,
                   "fewer than 4 segments of this store would be left: configure more bytes");
    }
    status = grow_file(head, store_bytes); /* also one that has been truncated */
    if (status != KVF_OK || (before == after && head->super->store_bytes == store_bytes)) {
        return status;
    }
    if (after > before) {
        status = invalidate_segments(head, before, after);
    }
    if (status != KVF_OK) {
        return status;
    }
    kvf_log(KVF_LOG_INFO, "nvme %s: from %llu to %llu segments", head->path,
            (unsigned long long)before, (unsigned long long)after);
    head->super->store_bytes = store_bytes;
    head->super->segment_count = after;
    head->super->sequence++;
    status = super_write(head);
    if (status == KVF_OK && head->device.io == NULL && !head->device.is_device &&
        store_bytes < head->device.capacity_bytes &&
        ftruncate(head->device.fd, (off_t)store_bytes) == 0) {
        head->device.capacity_bytes = store_bytes; /* the space is free again */
    }
    return status;
}

/* --- opening the file ------------------------------------------------------------------------- */

/* Killed, a daemon's lock outlives it by what the kernel needs to end the I/Os that were in flight,
 * and they must have ended before anybody else writes here: so the lock is waited for a little. */
static int lock_file(struct head *head)
{
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_NS};
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    uint32_t tries = 0;

    while (fcntl(head->device.fd, F_OFD_SETLK, &lock) != 0) {
        if (errno != EAGAIN && errno != EACCES) {
            snprintf(head->why, head->why_bytes, "%s: cannot be locked: %s", head->path,
                     strerror(errno));
            return KVF_ERR_IO;
        }
        if (++tries > head->config->lock_wait_ms) {
            return say(head, KVF_ERR_BUSY, "another kvferryd has this store open: stop it first");
        }
        (void)nanosleep(&pause, NULL);
    }
    return KVF_OK;
}

static int measure_file(struct head *head)
{
    struct stat st;
    uint64_t bytes;

    if (fstat(head->device.fd, &st) != 0) {
        return say(head, KVF_ERR_IO, strerror(errno));
    }
    head->device.is_device = S_ISBLK(st.st_mode);
    bytes = (uint64_t)st.st_size;
    if (head->device.is_device && ioctl(head->device.fd, BLKGETSIZE64, &bytes) != 0) {
        return say(head, KVF_ERR_IO, strerror(errno));
    }
    if (!head->device.is_device && !S_ISREG(st.st_mode)) {
        return say(head, KVF_ERR_CONFIG, "neither a file nor a block device");
    }
    head->device.capacity_bytes = bytes;
    head->is_empty = !head->device.is_device && bytes == 0;
    return KVF_OK;
}

/* Without O_DIRECT where the file system refuses it (tmpfs), which is worth a warning. A device in
 * use by the kernel (mounted) is refused by O_EXCL. */
static int open_file(struct head *head)
{
    struct stat st;
    bool exists = stat(head->path, &st) == 0;
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;

    if (exists && S_ISBLK(st.st_mode)) {
        flags = O_RDWR | O_CLOEXEC | O_EXCL; /* device names are often links */
    } else if (exists) {
        flags = O_RDWR | O_CLOEXEC;
    } else if (head->config->bytes == 0) {
        return say(head, KVF_ERR_CONFIG,
                   "does not exist: say how many bytes a new store shall have");
    } else {
        flags |= O_CREAT;
    }
    head->device.fd = open(head->path, flags | O_DIRECT, 0600);
    head->is_direct = head->device.fd >= 0;
    if (head->device.fd < 0 && errno == EINVAL) {
        head->device.fd = open(head->path, flags, 0600);
        if (head->device.fd >= 0) {
            kvf_log(KVF_LOG_WARNING,
                    "nvme %s: the file system has no O_DIRECT: every record is also kept in the "
                    "page cache",
                    head->path);
        }
    }
    if (head->device.fd < 0) {
        int status = kvf_status_from_errno(errno);

        snprintf(head->why, head->why_bytes, "%s: %s", head->path, strerror(errno));
        return status == KVF_ERR_INVALID ? KVF_ERR_IO : status;
    }
    return KVF_OK;
}

static int head_init(struct head *head, const struct kvf_nvme_config *config, char *why_out,
                     size_t why_bytes)
{
    int status;

    *head = (struct head){
        .config = config,
        .path = config->path == NULL ? "(simulated drive)" : config->path,
        .why = why_out,
        .why_bytes = why_bytes,
        .is_direct = true,
        .device = {.fd = -1, .io = config->io, .wait = config->wait, .wait_ctx = config->wait_ctx}};
    head->super = aligned_alloc(KVF_NVME_PAGE_BYTES, KVF_NVME_PAGE_BYTES);
    head->state = aligned_alloc(KVF_NVME_PAGE_BYTES, KVF_NVME_PAGE_BYTES);
    head->page = aligned_alloc(KVF_NVME_PAGE_BYTES, KVF_NVME_PAGE_BYTES);
    if (head->super == NULL || head->state == NULL || head->page == NULL) {
        return say(head, KVF_ERR_NO_MEMORY, kvf_status_text(KVF_ERR_NO_MEMORY));
    }
    memset(head->super, 0, KVF_NVME_PAGE_BYTES);
    memset(head->state, 0, KVF_NVME_PAGE_BYTES);
    memset(head->page, 0, KVF_NVME_PAGE_BYTES);
    if (config->io != NULL) {
        head->device.capacity_bytes = config->io->capacity_bytes;
        head->device.is_device = config->io->is_device;
        return KVF_OK;
    }
    if (config->path == NULL) {
        return say(head, KVF_ERR_INVALID, "no path");
    }
    status = open_file(head);
    if (status == KVF_OK) {
        status = lock_file(head);
    }
    return status == KVF_OK ? measure_file(head) : status;
}

static void head_fini(struct head *head)
{
    kvf_fd_close(&head->device.fd);
    free(head->super);
    free(head->state);
    free(head->page);
}

int kvf_nvme_format(const struct kvf_nvme_config *config, char *why_out, size_t why_bytes)
{
    struct head head;
    int status = head_init(&head, config, why_out, why_bytes);

    if (status == KVF_OK) {
        status = format_store(&head, wanted_bytes(&head));
    }
    if (status == KVF_OK) {
        snprintf(why_out, why_bytes, "%s: %llu segments of %llu KiB", head.path,
                 (unsigned long long)head.super->segment_count,
                 (unsigned long long)(head.super->segment_bytes >> 10));
    }
    head_fini(&head);
    return status;
}

/* --- open ------------------------------------------------------------------------------------- */

/* The key of the store into the tier, if it is the right one. */
static int take_key(struct kvf_nvme_tier *tier, struct head *head)
{
    uint8_t check[32];

    if (head->config->id_key != NULL) {
        memcpy(tier->id_key, head->config->id_key, sizeof(tier->id_key));
    } else if (head->super->flags & KVF_NVME_KEY_OUTSIDE) {
        return say(head, KVF_ERR_FOREIGN,
                   "this store was made under a cluster_key and none is configured: configure it, "
                   "or give the store up with kvferryd --format");
    } else {
        memcpy(tier->id_key, head->super->id_key, sizeof(tier->id_key));
    }
    kvf_nvme_keys_derive(tier->id_key, head->super->uuid, tier->mac_key, check);
    if (!kvf_mac_equal(check, head->super->key_check)) {
        return say(head, KVF_ERR_FOREIGN,
                   "this store was made under another cluster_key: configure that one, or give the "
                   "store up with kvferryd --format");
    }
    return KVF_OK;
}

/* Generations that this run may use become stable before it starts. */
static int reserve_generations(struct kvf_nvme_tier *tier, struct head *head)
{
    uint32_t stale = 1 - head->state_good;
    int status;

    tier->generation_next = head->state->generation_limit;
    head->state->generation_limit += KVF_NVME_GENERATIONS_AHEAD;
    head->state->sequence++;
    status = state_write_copy(head, stale);
    if (status == KVF_OK) {
        status = state_write_copy(head, head->state_good);
    }
    tier->generation_limit = head->state->generation_limit;
    return status;
}

static int open_head(struct kvf_nvme_tier *tier, struct head *head)
{
    int status = super_read(head);

    if (head->is_empty || (status == KVF_OK && (head->super->flags & KVF_NVME_FORMATTING))) {
        status = format_store(head, wanted_bytes(head));
    } else if (status != KVF_OK) {
        return super_refuse(head, status);
    } else {
        status = take_key(tier, head); /* before anything is written */
        if (status == KVF_OK) {
            status = resize_store(head);
        }
    }
    if (status == KVF_OK) {
        status = take_key(tier, head);
    }
    if (status == KVF_OK) {
        status = state_read(head);
    }
    if (status == KVF_OK) {
        status = reserve_generations(tier, head);
    }
    if (status != KVF_OK) {
        return status;
    }
    memcpy(&tier->super, head->super, sizeof(tier->super));
    memcpy(&tier->state, head->state, sizeof(tier->state));
    return KVF_OK;
}

static void *page_alloc(uint64_t bytes)
{
    void *memory = aligned_alloc(KVF_NVME_PAGE_BYTES, (bytes + KVF_NVME_PAGE_BYTES - 1) /
                                                          KVF_NVME_PAGE_BYTES *
                                                          KVF_NVME_PAGE_BYTES);

    return memory;
}

static int make_slots(struct kvf_nvme_tier *tier)
{
    uint32_t entries = tier->slot_entries_max;
    uint64_t index_bytes = ((uint64_t)kvf_nvme_index_pages(entries) + 1) * KVF_NVME_PAGE_BYTES;

    for (int i = 0; i < 2; i++) {
        struct kvf_nvme_slot *slot = &tier->slots[i];

        slot->tier = tier;
        slot->records = calloc(entries, sizeof(*slot->records));
        slot->index = page_alloc(index_bytes);
        slot->header = page_alloc(KVF_NVME_PAGE_BYTES);
        if (slot->records == NULL || slot->index == NULL || slot->header == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        memset(slot->index, 0, index_bytes);
    }
    return KVF_OK;
}

static int make_pools(struct kvf_nvme_tier *tier)
{
    const struct kvf_nvme_config *config = &tier->config;
    const size_t bytes = sizeof(struct kvf_nvme_op);

    if (kvf_pool_init(&tier->store_ops, "nvme stores", bytes, config->stores_max) ||
        kvf_pool_init(&tier->load_ops, "nvme loads", bytes, config->loads_max) ||
        kvf_pool_init(&tier->copy_ops, "nvme copies", bytes, config->bounce_count) ||
        kvf_pool_init(&tier->purges, "nvme purges", sizeof(struct kvf_nvme_purge),
                      KVF_NVME_PURGES_MAX)) {
        return KVF_ERR_NO_MEMORY;
    }
    tier->bounces = calloc(config->bounce_count, sizeof(*tier->bounces));
    if (tier->bounces == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < config->bounce_count; i++) {
        tier->bounces[i] = page_alloc(config->bounce_bytes);
        if (tier->bounces[i] == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    tier->bounces_free = config->bounce_count;
    return kvf_nvme_packings_init(tier);
}

static int make_tables(struct kvf_nvme_tier *tier)
{
    int status;

    tier->n_segments = (uint32_t)tier->super.segment_count;
    tier->segment_pages = (uint32_t)(tier->super.segment_bytes / KVF_NVME_PAGE_BYTES);
    /* page 0 and the footer off; the smallest record has two pages */
    tier->slot_entries_max = (tier->segment_pages - 2) / 2;
    tier->segments = calloc(tier->n_segments, sizeof(*tier->segments));
    tier->state_writer.page = page_alloc(KVF_NVME_PAGE_BYTES);
    if (tier->segments == NULL || tier->state_writer.page == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    status = make_slots(tier);
    return status == KVF_OK ? make_pools(tier) : status;
}

static void init_lists(struct kvf_nvme_tier *tier)
{
    tier->waiting.end = &tier->waiting.first;
    tier->verify_wait.end = &tier->verify_wait.first;
    tier->finished.end = &tier->finished.first;
    tier->io_wait.end = &tier->io_wait.first;
    tier->io_faults.end = &tier->io_faults.first;
    tier->sync_wait.end = &tier->sync_wait.first;
    tier->sync_running.end = &tier->sync_running.first;
    tier->log_limit = (struct kvf_log_limit){.interval_ns = 10 * KVF_NS_PER_S, .burst_count = 5};
}

static int check_config(const struct kvf_nvme_config *config)
{
    const struct kvf_tier_host *host = &config->host;
    bool sane = config->work != NULL && host->reclaim != NULL && host->moved != NULL &&
                host->recovered != NULL && host->lost != NULL && config->env.clock != NULL &&
                config->env.random != NULL && config->stores_max > 0 &&
                config->stores_max <= KVF_NVME_CALLS_MAX && config->loads_max > 0 &&
                config->loads_max <= KVF_NVME_CALLS_MAX && config->reinsert_percent <= 100 &&
                config->bounce_count > 0 && config->bounce_count <= KVF_NVME_BOUNCE_MAX &&
                config->bounce_bytes >= 2ull * KVF_NVME_PAGE_BYTES &&
                config->bounce_bytes <= KVF_NVME_SEGMENT_BYTES_MAX && config->pack_count > 0 &&
                config->pack_count <= KVF_NVME_PACK_MAX && config->unpack_count > 0 &&
                config->unpack_count <= KVF_NVME_PACK_MAX &&
                config->pack_bytes % KVF_NVME_PAGE_BYTES == 0 && config->errors_writes_off > 0 &&
                config->errors_off > 0 && config->error_decay_ns > 0;

    return sane ? KVF_OK : KVF_ERR_INVALID;
}

/* The queue, for a store that has been opened by path. */
static int open_queue(struct kvf_nvme_tier *tier, struct head *head)
{
    struct kvf_io_config io_config = tier->config.io_config;
    char why[KVF_ERROR_TEXT_BYTES];
    int status;

    if (tier->config.io != NULL) {
        tier->io = tier->config.io;
        snprintf(head->why, head->why_bytes, "%s", tier->io->ops->name);
        return KVF_OK;
    }
    io_config.fd = head->device.fd;
    status = kvf_io_open(&io_config, &tier->io, why, sizeof(why));
    snprintf(head->why, head->why_bytes, "%s%s", why,
             head->is_direct ? "" : ", through the page cache");
    if (status == KVF_OK) {
        tier->fd = head->device.fd;
        head->device.fd = -1;
    }
    return status;
}

static void fill_info(struct kvf_nvme_tier *tier, const struct head *head)
{
    struct kvf_nvme_info *info = &tier->info;
    uint64_t usable_pages = tier->segment_pages - 3; /* header, one page of entries, footer */

    memcpy(info->uuid, tier->super.uuid, sizeof(info->uuid));
    memcpy(info->id_key, tier->id_key, sizeof(info->id_key));
    info->is_device = head->device.is_device;
    info->is_direct = head->is_direct;
    info->engine = tier->io->ops->name;
    info->created_wall_s = tier->super.created_wall_s;
    info->credit_bytes = tier->state.credit_bytes;
    info->store_bytes = tier->super.store_bytes;
    info->segment_bytes = tier->super.segment_bytes;
    info->record_bytes_max = usable_pages * KVF_NVME_PAGE_BYTES;
    if (info->record_bytes_max > KVF_RECORD_PAGE_BYTES + KVF_PAYLOAD_BYTES_MAX) {
        info->record_bytes_max = KVF_RECORD_PAGE_BYTES + KVF_PAYLOAD_BYTES_MAX;
    }
    info->generation = tier->generation_next - 1;
}

int kvf_nvme_open(const struct kvf_nvme_config *config, struct kvf_tier **tier_out, char *why_out,
                  size_t why_bytes)
{
    struct kvf_nvme_tier *tier = calloc(1, sizeof(*tier));
    struct head head = {.device = {.fd = -1}};
    int status = check_config(config);

    if (tier == NULL || status != KVF_OK) {
        status = tier == NULL ? KVF_ERR_NO_MEMORY : status;
        snprintf(why_out, why_bytes, "nvme: %s", kvf_status_text(status));
        free(tier);
        return status;
    }
    tier->base.ops = &kvf_tier_nvme_ops;
    tier->base.host = config->host;
    tier->config = *config;
    tier->fd = -1;
    tier->now_ns = kvf_env_now_ns(&config->env);
    init_lists(tier);
    status = head_init(&head, config, why_out, why_bytes);
    snprintf(tier->path, sizeof(tier->path), "%s", head.path);
    tier->config.path = tier->path;
    tier->config.id_key = NULL; /* borrowed: the tier has its copy */
    if (status == KVF_OK) {
        status = open_head(tier, &head);
    }
    if (status == KVF_OK) {
        status = make_tables(tier);
        if (status != KVF_OK) {
            say(&head, status, kvf_status_text(status));
        }
    }
    if (status == KVF_OK) {
        status = open_queue(tier, &head);
    }
    if (status == KVF_OK) {
        fill_info(tier, &head);
        *tier_out = &tier->base;
    } else {
        kvf_tier_nvme_ops.close(&tier->base);
    }
    head_fini(&head);
    return status;
}
