/* SPDX-License-Identifier: Apache-2.0
 *
 * status.c: names and texts of the status values, and the sizes of element types.
 *
 * These are public symbols that daemon, tools and library all need, so they live below all of them.
 */
#include "base/status.h"

#include <errno.h>

struct status_entry {
    int status;
    const char *name;
    const char *text;
};

static const struct status_entry entries[] = {
    {KVF_OK, "ok", "done"},
    {KVF_MISS, "miss", "not here; compute it"},
    {KVF_EXISTS, "exists", "already stored with the same payload; nothing was written"},
    {KVF_COMING, "coming", "on a slower tier; a prefetch has been started"},
    {KVF_PARTIAL, "partial", "some blocks of the request succeeded"},
    {KVF_TOO_SLOW, "too_slow", "fetching was estimated to take longer than the budget allows"},
    {KVF_EMPTY, "empty", "nothing has completed within the time given"},
    {KVF_ERR_INVALID, "invalid", "an argument is out of its documented range"},
    {KVF_ERR_BUSY, "busy", "a bounded resource is used up at the moment; retry later"},
    {KVF_ERR_NO_MEMORY, "no_memory", "an allocation failed"},
    {KVF_ERR_TOO_LARGE, "too_large", "a size exceeds a named limit"},
    {KVF_ERR_CANCELED, "canceled", "canceled by the caller"},
    {KVF_ERR_TIMEOUT, "timeout", "the time budget ran out"},
    {KVF_ERR_LOST, "lost", "the lease ended early; treat the bytes as not loaded"},
    {KVF_ERR_CORRUPT, "corrupt", "a checksum, length or magic number does not fit"},
    {KVF_ERR_CONFLICT, "conflict", "the key is stored with another payload; the first one stands"},
    {KVF_ERR_MISMATCH, "mismatch", "model, layout, codec or codebook fingerprint differs"},
    {KVF_ERR_UNSUPPORTED, "unsupported", "this build, device or daemon cannot do that"},
    {KVF_ERR_REFUSED, "refused", "refused by policy: profile, quota or permission"},
    {KVF_ERR_DISCONNECTED, "disconnected", "the connection broke while the request was in flight"},
    {KVF_ERR_PROTOCOL, "protocol", "the peer broke the protocol"},
    {KVF_ERR_VERSION, "version", "no protocol version in common"},
    {KVF_ERR_NO_DAEMON, "no_daemon", "nobody listens on the socket"},
    {KVF_ERR_IO, "io", "the drive answered with an error"},
    {KVF_ERR_TIER_OFF, "tier_off", "the tier is off: error budget, drain or not configured"},
    {KVF_ERR_FOREIGN, "foreign", "a store that is not ours, or newer than this build"},
    {KVF_ERR_NO_SPACE, "no_space", "the drive or memory is full"},
    {KVF_ERR_CONFIG, "config", "the configuration is wrong"},
    {KVF_ERR_INTERNAL, "internal", "a bug in kvferry"},
};

static const struct status_entry *find(int status)
{
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        if (entries[i].status == status) {
            return &entries[i];
        }
    }
    return NULL;
}

const char *kvf_status_name(int status)
{
    const struct status_entry *entry = find(status);

    return entry != NULL ? entry->name : "unknown";
}

const char *kvf_status_text(int status)
{
    const struct status_entry *entry = find(status);

    return entry != NULL ? entry->text : "a status this version does not know";
}

int kvf_status_from_errno(int error_number)
{
    switch (error_number) {
    case 0:
        return KVF_OK;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return KVF_ERR_NO_SPACE;
    case ENOMEM:
        return KVF_ERR_NO_MEMORY;
    case EAGAIN:
    case EBUSY:
    case EMFILE:
    case ENFILE:
        return KVF_ERR_BUSY;
    case EPERM:
    case EACCES:
        return KVF_ERR_REFUSED;
    case ENOSYS:
    case EOPNOTSUPP:
        return KVF_ERR_UNSUPPORTED;
    case EINVAL:
        return KVF_ERR_INVALID;
    default:
        return KVF_ERR_IO;
    }
}

size_t kvf_dtype_bytes(int dtype)
{
    switch (dtype) {
    case KVF_DTYPE_BF16:
    case KVF_DTYPE_F16:
        return 2;
    case KVF_DTYPE_F32:
        return 4;
    case KVF_DTYPE_F8E4M3:
    case KVF_DTYPE_F8E5M2:
    case KVF_DTYPE_U8:
        return 1;
    default:
        return 0;
    }
}
