/* SPDX-License-Identifier: Apache-2.0
 *
 * format_store.h: kvferryd --format: the only way by which a device or a file with content becomes
 * a store.
 */
#ifndef KVF_AGENT_FORMAT_STORE_H
#define KVF_AGENT_FORMAT_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "agent/config.h"

/* Say what path holds and what becomes of it, ask for "yes" on the terminal unless is_confirmed,
 * and format. Size, segment size and key come from the configuration if it has the path; bytes 0:
 * from there, or all of a device. Prints to stdout and stderr. Returns the exit code: 0 done, 1 it
 * failed or was not confirmed, 2 it cannot be done like this. */
int kvf_format_store(const struct kvf_config *config, const char *path, uint64_t bytes,
                     bool is_confirmed);

#endif /* KVF_AGENT_FORMAT_STORE_H */
