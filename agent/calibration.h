/* SPDX-License-Identifier: Apache-2.0
 *
 * calibration.h: which profiles have passed for which model: the files of calibration.dir.
 *
 * A list is read-only from its reading on. The reactor replaces it when it is told to (reload.c),
 * and whoever uses a list holds it meanwhile.
 */
#ifndef KVF_AGENT_CALIBRATION_H
#define KVF_AGENT_CALIBRATION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "codec/profile_table.h"

#define KVF_CALIBRATIONS_MAX 64 /* files; each can take a descriptor */

struct kvf_calibration {
    char file[256]; /* without the folder */
    struct kvf_profile_table *table;
    int blob_fd;         /* sealed memory with the table's blob; -1 for profiles of the build */
    uint64_t blob_bytes; /* whole pages; the blob knows its own */
};

struct kvf_calibrations {
    struct kvf_calibration list[KVF_CALIBRATIONS_MAX]; /* by file name */
    uint32_t n;
    atomic_uint holders;
};

/* Read every *.json of a folder; "" is no folder, NULL its list. What cannot be read is logged, by
 * name, and left out. KVF_OK; KVF_ERR_IO: the folder cannot be read, the list is empty;
 * KVF_ERR_NO_MEMORY: there is none for a list. The caller holds *out in any case. Blocks. */
int kvf_calibrations_read(const char *dir, struct kvf_calibrations **out);

/* One holder more. The reactor, or a holder. */
struct kvf_calibrations *kvf_calibrations_hold(struct kvf_calibrations *calibrations);

/* One holder less; the last one frees it. Any thread. Accepts NULL. */
void kvf_calibrations_release(struct kvf_calibrations *calibrations);

/* The file by which a profile has passed for a model, or NULL. calibrations may be NULL. */
const struct kvf_calibration *kvf_calibrations_find(const struct kvf_calibrations *calibrations,
                                                    const char *name,
                                                    const uint8_t weights_digest[KVF_DIGEST_BYTES],
                                                    const uint8_t adapter_digest[KVF_DIGEST_BYTES]);

/* Is there a file with a profile of this name for any model? */
bool kvf_calibrations_have(const struct kvf_calibrations *calibrations, const char *name);

#endif /* KVF_AGENT_CALIBRATION_H */
