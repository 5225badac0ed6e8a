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
    uint64_t arena_bytes; /* of it; 0 in mode observe, which takes none */
    uint32_t n_gpus;      /* that it was summed for */
};

/* GPUs that gpu.devices names; "all": as many as the driver says there are, but one. root: as of
 * kvf_machine_memory_read. */
uint32_t kvf_check_gpus(const struct kvf_config *config, const char *root);

/* Everything that the daemon reserves for a finished configuration and so many GPUs, largest blame
 * first: arena, staging, then tables. Reads nothing of the machine. */
void kvf_check_sum(const struct kvf_config *config, uint32_t n_gpus, struct kvf_check *check_out);

/* Huge pages are no ordinary memory: neither the machine's other processes nor a cgroup's limit of
 * memory have a part in them. */
struct kvf_machine_memory {
    uint64_t total_bytes;      /* of the machine, or of the tightest cgroup limit */
    uint64_t available_bytes;  /* now, by MemAvailable and by what the cgroups have left */
    uint64_t huge_total_bytes; /* in pages of 2 MiB, that are set aside for whoever asks */
    uint64_t huge_free_bytes;
    char limit[256];      /* what total_bytes is: "memory of the machine", or a cgroup's file */
    char huge_limit[256]; /* the same of huge_total_bytes: "vm.nr_hugepages", or a file */
};

/* What memory this process may have. root: put before /proc and /sys, "" for the real ones. Limits
 * that cannot be read count as absent. KVF_OK; KVF_ERR_UNSUPPORTED: no /proc/meminfo. */
int kvf_machine_memory_read(const char *root, struct kvf_machine_memory *memory_out);

/* Can the sum ever fit (now false), or does it fit at this moment (now true)? A daemon that starts
 * asks the first: its predecessor's arena may still be mapped by clients, and memory is populated
 * only when it is free. With dram.hugepages the arena is of huge pages, try: as far as there are
 * some. KVF_OK; KVF_ERR_CONFIG: error names the option to change. */
int kvf_check_memory(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, bool now,
                     struct kvf_config_error *error);

/* The table that --check prints. */
void kvf_check_print(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, FILE *out);

#endif /* KVF_AGENT_CHECK_H */
