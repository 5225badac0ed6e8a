/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h: how much memory a configuration takes, part by part, and does the machine have it.
 */
#ifndef KVF_AGENT_CHECK_H
#define KVF_AGENT_CHECK_H

#include <stdint.h>
#include <stdio.h>

#include "agent/config.h"

#define KVF_CHECK_PARTS_MAX 16

struct kvf_check_part {
    const char *name; /* static */
    uint64_t bytes;
    char how[96]; /* what makes it so large */
};

struct kvf_check {
    struct kvf_check_part parts[KVF_CHECK_PARTS_MAX];
    unsigned n_parts;
    uint64_t total_bytes;
};

/* Everything that the daemon reserves for a finished configuration, largest blame first: arena,
 * staging, then tables. Reads nothing of the machine. */
void kvf_check_sum(const struct kvf_config *config, struct kvf_check *check_out);

struct kvf_machine_memory {
    uint64_t total_bytes;     /* of the machine, or of the tightest cgroup limit */
    uint64_t available_bytes; /* now, by MemAvailable and by what the cgroups have left */
    char limit[256];          /* what total_bytes is: "memory of the machine", or a cgroup's file */
};

/* What memory this process may have. root: put before /proc and /sys, "" for the real ones. Limits
 * that cannot be read count as absent. KVF_OK; KVF_ERR_UNSUPPORTED: no /proc/meminfo. */
int kvf_machine_memory_read(const char *root, struct kvf_machine_memory *memory_out);

/* Can the sum ever fit (now false), or does it fit at this moment (now true)? A daemon that starts
 * asks the first: its predecessor's arena may still be mapped by clients, and memory is populated
 * only when it is free. KVF_OK; KVF_ERR_CONFIG: error names the option to change. */
int kvf_check_memory(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, bool now,
                     struct kvf_config_error *error);

/* The table that --check prints. */
void kvf_check_print(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, FILE *out);

#endif /* KVF_AGENT_CHECK_H */
