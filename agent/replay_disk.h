/* SPDX-License-Identifier: Apache-2.0
 *
 * replay_disk.h: a drive that takes no time and keeps of each page only what is before its trailing
 * zeros: payloads of zeros cost nothing, record pages some hundred bytes.
 */
#ifndef KVF_AGENT_REPLAY_DISK_H
#define KVF_AGENT_REPLAY_DISK_H

#include <stdbool.h>

#include "tiers/io.h"

/* An empty drive; bytes: a multiple of 4 KiB. NULL: out of memory. */
struct kvf_io_queue *kvf_replay_disk_open(uint64_t bytes);

/* Does an I/O wait for the next poll? */
bool kvf_replay_disk_is_busy(const struct kvf_io_queue *queue);

#endif /* KVF_AGENT_REPLAY_DISK_H */
