/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c: the memory of a configuration, and of the machine.
 */
#include "agent/check.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent/observe.h"
#include "base/fd.h"
#include "tiers/tier_dram.h"
#include "tiers/tier_nvme.h"

#define MIB        (1ull << 20)
#define HUGE_BYTES (2 * MIB)

/* Resident size of code, libraries and small allocations, seen with all libraries loaded. */
#define PROGRAM_BYTES (16 * MIB)

/* What a thread touches of its stack. */
#define THREAD_BYTES (256ull << 10)

/* Reactor, set-up and admin thread; workers and drives come on top. */
#define FIXED_THREADS 3

/* A sealed segment's table keeps so many bytes for each live record (tiers/tier_nvme.h). */
#define SEGMENT_ENTRY_BYTES 12

/* --- the sum ---------------------------------------------------------------------------------- */

static void add(struct kvf_check *check, const char *name, uint64_t bytes, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static void add(struct kvf_check *check, const char *name, uint64_t bytes, const char *fmt, ...)
{
    struct kvf_check_part *part = &check->parts[check->n_parts];
    va_list args;

    assert(check->n_parts < KVF_CHECK_PARTS_MAX);
    check->n_parts++;
    part->name = name;
    part->bytes = bytes;
    va_start(args, fmt);
    vsnprintf(part->how, sizeof(part->how), fmt, args);
    va_end(args);
    /* Sizes are the user's and may be absurd: the sum must not wrap to something that fits. */
    check->total_bytes = check->total_bytes > UINT64_MAX - bytes ? UINT64_MAX
                                                                 : check->total_bytes + bytes;
}

static uint64_t dram_metadata_bytes(const struct kvf_config *config)
{
    struct kvf_dram_config dram;

    kvf_config_dram(config, &dram);
    return kvf_dram_metadata_bytes(&dram);
}

static uint64_t pack_bytes(const struct kvf_config *config)
{
    struct kvf_nvme_config nvme;
    uint64_t bytes = 0;

    kvf_nvme_config_init(&nvme);
    for (uint32_t i = 0; i < config->n_nvme; i++) {
        kvf_config_nvme_pack(config, i, &nvme);
        bytes += kvf_nvme_pack_memory(&nvme);
    }
    return bytes;
}

uint32_t kvf_check_gpus(const struct kvf_config *config, const char *root)
{
    const char *at = config->gpu_devices;
    const struct dirent *entry;
    uint32_t n = 0;
    char path[4096];
    DIR *gpus;

    if (strcmp(at, "all") != 0) {
        while (*(at += strspn(at, ", ")) != '\0') {
            n++;
            at += strcspn(at, ", ");
        }
        return n;
    }
    snprintf(path, sizeof(path), "%.4000s/proc/driver/nvidia/gpus", root);
    gpus = opendir(path);
    while (gpus != NULL && (entry = readdir(gpus)) != NULL) {
        n += entry->d_name[0] != '.';
    }
    if (gpus != NULL) {
        (void)closedir(gpus);
    }
    return n != 0 ? n : 1;
}

/* Blocks in the memory of GPUs. */
static void add_hbm(struct kvf_check *check, const struct kvf_config *config, uint32_t n_gpus,
                    uint64_t table_bytes)
{
    struct kvf_hbm_config hbm;
    uint64_t bytes;

    kvf_hbm_config_init(&hbm, config->gpu_hbm_bytes);
    hbm.n_tenants = (uint16_t)config->n_sockets;
    bytes = kvf_hbm_metadata_bytes(&hbm);
    add(check, "blocks on GPUs", table_bytes, "16 bytes an entry of the index");
    add(check, "windows, slots of GPUs", bytes > UINT64_MAX / n_gpus ? UINT64_MAX : bytes * n_gpus,
        "by gpu.hbm_bytes, for %" PRIu32 " GPU(s) (gpu.devices)", n_gpus);
}

void kvf_check_sum(const struct kvf_config *config, uint32_t n_gpus, struct kvf_check *check_out)
{
    struct kvf_agent_memory agent;
    struct kvf_nvme_config nvme;
    bool has_directory = config->directory_address[0] != '\0';
    bool has_peers = config->peers_listen[0] != '\0' || config->peers_nodes[0] != '\0' ||
                     has_directory;
    bool observes = config->mode == KVF_MODE_OBSERVE; /* and opens no drive */
    uint32_t n_drives = observes ? 0 : config->n_nvme;
    /* the network has a thread, and UCX one of its own */
    uint64_t threads = FIXED_THREADS + config->workers + n_drives + (has_peers ? 2 : 0) +
                       has_directory;

    memset(check_out, 0, sizeof(*check_out));
    kvf_agent_memory(config, &agent);
    kvf_nvme_config_init(&nvme);
    check_out->n_gpus = n_gpus;
    check_out->arena_bytes = observes ? 0 : config->dram_bytes;
    add(check_out, "arena", check_out->arena_bytes, "%s",
        check_out->arena_bytes != 0 ? "dram.bytes"
                                    : "mode observe takes no dram.bytes, mode serve would");
    add(check_out, "staging and rings", config->staging_total, "staging.total");
    add(check_out, "slots of the arena", dram_metadata_bytes(config),
        "by dram.bytes, for slots of 8 KiB");
    add(check_out, "slots of the agent", agent.slot_bytes, "by dram.bytes, for slots of 8 KiB");
    add(check_out, "index", agent.index_bytes, "%" PRIu64 " entries of 64 bytes (index.entries)",
        agent.index_entries);
    if (config->gpu_hbm_bytes > 0 && n_gpus > 0) {
        add_hbm(check_out, config, n_gpus, agent.hbm_bytes);
    }
    if (agent.peers_bytes > 0) {
        add(check_out, "blocks of other nodes", agent.peers_bytes,
            "28 bytes a block (peers.entries), and what has changed here");
    }
    add(check_out, "ghosts, sets and names", agent.ghost_bytes, "fixed");
    add(check_out, "requests", agent.request_bytes, "by clients.max %" PRIu64, config->clients_max);
    add(check_out, "sessions", agent.session_bytes, "by clients.max %" PRIu64, config->clients_max);
    if (observes) {
        add(check_out, "replays", kvf_observe_bytes(config),
            "of stores of 0.25 to 8 times the size, with blocks of any size");
    }
    if (n_drives > 0) {
        add(check_out, "drive buffers", n_drives * nvme.bounce_count * nvme.bounce_bytes,
            "%" PRIu32 " drives, %" PRIu32 " buffers of %" PRIu64 " KiB", n_drives,
            nvme.bounce_count, nvme.bounce_bytes >> 10);
        add(check_out, "drive packing", pack_bytes(config),
            "nvme.recompress, and what is needed to read what it has written");
        add(check_out, "drive tables", agent.index_entries * SEGMENT_ENTRY_BYTES,
            "12 bytes a block on a drive");
    }
    add(check_out, "threads", threads * THREAD_BYTES, "%" PRIu64 " of 256 KiB", threads);
    add(check_out, "program", PROGRAM_BYTES, "code and libraries");
}

/* --- the machine ------------------------------------------------------------------------------ */

/* The beginning of a kernel file as text. */
static bool read_text(const char *path, char *text_out, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    ssize_t got = 1;

    if (fd < 0) {
        return false;
    }
    while (used < bytes - 1 && got > 0) {
        got = read(fd, text_out + used, bytes - 1 - used);
        used += got > 0 ? (size_t)got : 0;
    }
    kvf_fd_close(&fd);
    text_out[used] = '\0';
    return used > 0;
}

/* The number behind a word at the start of a line. */
static bool number_after(const char *text, const char *word, uint64_t *number_out)
{
    const char *line = text;

    while (line != NULL) {
        if (strncmp(line, word, strlen(word)) == 0) {
            char *end;
            const char *number = line + strlen(word);

            *number_out = strtoull(number, &end, 10);
            return end != number;
        }
        line = strchr(line, '\n');
        line = line != NULL ? line + 1 : NULL;
    }
    return false;
}

/* A file with a number in it. */
static bool read_number(const char *folder, const char *name, uint64_t *number_out)
{
    char path[4352];
    char text[64];

    snprintf(path, sizeof(path), "%.4000s/%s", folder, name);
    return read_text(path, text, sizeof(text)) && number_after(text, "", number_out);
}

/* Pages of 2 MiB, which have a pool and a limit of their own. */
static void read_huge(const char *root, struct kvf_machine_memory *memory)
{
    char folder[4096];
    uint64_t total = 0;
    uint64_t free = 0;
    uint64_t promised = 0;

    snprintf(folder, sizeof(folder), "%.3900s/sys/kernel/mm/hugepages/hugepages-2048kB", root);
    if (read_number(folder, "nr_hugepages", &total) &&
        read_number(folder, "free_hugepages", &free) &&
        read_number(folder, "resv_hugepages", &promised)) {
        memory->huge_total_bytes = total * HUGE_BYTES;
        memory->huge_free_bytes = (free - (promised < free ? promised : free)) * HUGE_BYTES;
    }
    snprintf(memory->huge_limit, sizeof(memory->huge_limit), "vm.nr_hugepages");
}

static void apply_huge_cgroup(const char *folder, struct kvf_machine_memory *memory)
{
    uint64_t limit;
    uint64_t used = 0;

    if (!read_number(folder, "hugetlb.2MB.max", &limit)) {
        return; /* "max", or no controller of them here */
    }
    if (limit < memory->huge_total_bytes) {
        memory->huge_total_bytes = limit;
        snprintf(memory->huge_limit, sizeof(memory->huge_limit), "%.230s/hugetlb.2MB.max", folder);
    }
    (void)read_number(folder, "hugetlb.2MB.current", &used);
    limit -= used < limit ? used : limit;
    if (limit < memory->huge_free_bytes) {
        memory->huge_free_bytes = limit;
    }
}

/* One cgroup folder: lower what the process may have. */
static void apply_cgroup(const char *folder, struct kvf_machine_memory *memory)
{
    char path[4352];
    char text[8192];
    uint64_t limit;
    uint64_t used;
    uint64_t cache = 0;

    snprintf(path, sizeof(path), "%s/memory.max", folder);
    if (!read_text(path, text, sizeof(text)) || !number_after(text, "", &limit)) {
        return; /* "max", or no memory controller here */
    }
    if (limit < memory->total_bytes) {
        memory->total_bytes = limit;
        snprintf(memory->limit, sizeof(memory->limit), "%.240s", path);
    }
    snprintf(path, sizeof(path), "%s/memory.current", folder);
    if (!read_text(path, text, sizeof(text)) || !number_after(text, "", &used)) {
        return;
    }
    snprintf(path, sizeof(path), "%s/memory.stat", folder);
    if (read_text(path, text, sizeof(text)) && number_after(text, "inactive_file ", &cache)) {
        used -= cache < used ? cache : used; /* page cache that the kernel drops when asked */
    }
    limit -= used < limit ? used : limit;
    if (limit < memory->available_bytes) {
        memory->available_bytes = limit;
    }
}

int kvf_machine_memory_read(const char *root, struct kvf_machine_memory *memory_out)
{
    char path[4096];
    char text[8192];
    char *cgroup;
    uint64_t total_kib;
    uint64_t available_kib;
    uint64_t huge_kib = 0;

    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    if (!read_text(path, text, sizeof(text)) || !number_after(text, "MemTotal:", &total_kib) ||
        !number_after(text, "MemAvailable:", &available_kib)) {
        return KVF_ERR_UNSUPPORTED;
    }
    (void)number_after(text, "Hugetlb:", &huge_kib); /* of all sizes */
    *memory_out = (struct kvf_machine_memory){
        .total_bytes = (total_kib - (huge_kib < total_kib ? huge_kib : total_kib)) << 10,
        .available_bytes = available_kib << 10,
        .limit = "memory of the machine",
    };
    read_huge(root, memory_out);
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    if (!read_text(path, text, sizeof(text)) || (cgroup = strstr(text, "0::/")) == NULL) {
        return KVF_OK;
    }
    cgroup += strlen("0::");
    cgroup[strcspn(cgroup, "\n")] = '\0';
    /* Limits of all folders on the way up hold. */
    for (;;) {
        char *slash = strrchr(cgroup, '/');

        snprintf(path, sizeof(path), "%.1024s/sys/fs/cgroup%.2048s", root,
                 strcmp(cgroup, "/") == 0 ? "" : cgroup);
        apply_cgroup(path, memory_out);
        apply_huge_cgroup(path, memory_out);
        if (slash == NULL || strcmp(cgroup, "/") == 0) {
            return KVF_OK;
        }
        slash[slash == cgroup ? 1 : 0] = '\0';
    }
}

/* What of the arena is of huge pages. KVF_OK; KVF_ERR_CONFIG: there are not so many. */
static int huge_part(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, bool now, uint64_t *bytes_out,
                     struct kvf_config_error *error)
{
    uint64_t have = now ? memory->huge_free_bytes : memory->huge_total_bytes;

    *bytes_out = 0;
    if (config->dram_hugepages == KVF_HUGEPAGES_REQUIRE) {
        *bytes_out = check->arena_bytes;
    } else if (config->dram_hugepages == KVF_HUGEPAGES_TRY) {
        *bytes_out = check->arena_bytes < have ? check->arena_bytes : have;
    }
    if (*bytes_out <= have) {
        return KVF_OK;
    }
    kvf_config_fail_at(config, config->lines[KVF_CONFIG_ID_dram_hugepages], "dram.hugepages", error,
                       "the arena would take %" PRIu64 " MiB of huge pages, and %" PRIu64
                       " MiB are %s (%s); set more aside, lower dram.bytes, or say try",
                       *bytes_out >> 20, have >> 20, now ? "free" : "all there is",
                       memory->huge_limit);
    return KVF_ERR_CONFIG;
}

/* Ordinary memory and huge pages both. */
static bool fits(const struct kvf_config *config, uint32_t n_gpus,
                 const struct kvf_machine_memory *memory, bool now)
{
    struct kvf_config_error error;
    struct kvf_check check;
    uint64_t huge;

    kvf_check_sum(config, n_gpus, &check);
    return huge_part(config, &check, memory, now, &huge, &error) == KVF_OK &&
           check.total_bytes - huge <= (now ? memory->available_bytes : memory->total_bytes);
}

/* The most MiB under what it is now that an option of bytes may have. Searched for with the sum
 * itself, because tables grow with the option. 0: none would do. */
static uint64_t most_mib(const struct kvf_config *config, enum kvf_config_option_id id,
                         uint32_t n_gpus, const struct kvf_machine_memory *memory, bool now)
{
    const struct kvf_config_option *option = &kvf_config_options[id];
    struct kvf_config *tried = malloc(sizeof(*tried)); /* too large for a stack */
    uint64_t good = 0;
    uint64_t bad;

    if (tried == NULL) {
        return 0;
    }
    *tried = *config;
    memcpy(&bad, (const char *)config + option->offset, sizeof(bad));
    bad = (bad + MIB - 1) / MIB;
    while (bad > good + 1) {
        uint64_t middle = good + (bad - good) / 2;
        uint64_t bytes = middle * MIB;

        memcpy((char *)tried + option->offset, &bytes, sizeof(bytes));
        if (fits(tried, n_gpus, memory, now)) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    free(tried);
    return good * MIB < option->min ? 0 : good;
}

int kvf_check_memory(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, bool now,
                     struct kvf_config_error *error)
{
    uint64_t have = now ? memory->available_bytes : memory->total_bytes;
    uint64_t huge;
    uint64_t total; /* of ordinary memory */
    uint64_t most;
    enum kvf_config_option_id id = KVF_CONFIG_ID_dram_bytes;
    const char *name = "dram.bytes";

    if (huge_part(config, check, memory, now, &huge, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    total = check->total_bytes - huge;
    if (total <= have) {
        return KVF_OK;
    }
    if (config->staging_total > check->arena_bytes - huge) {
        id = KVF_CONFIG_ID_staging_total;
        name = "staging.total";
    }
    most = most_mib(config, id, check->n_gpus, memory, now);
    if (most != 0) {
        kvf_config_fail_at(config, config->lines[id], name, error,
                           "the daemon would take %" PRIu64 " MiB, and %" PRIu64
                           " MiB are %s (%s); lower it to at most %" PRIu64 "MiB",
                           total >> 20, have >> 20, now ? "available" : "all there is",
                           memory->limit, most);
    } else {
        kvf_config_fail_at(config, config->lines[id], name, error,
                           "the daemon would take %" PRIu64 " MiB, and %" PRIu64
                           " MiB are %s (%s); see --check for the parts and lower them",
                           total >> 20, have >> 20, now ? "available" : "all there is",
                           memory->limit);
    }
    return KVF_ERR_CONFIG;
}

/* --- printing --------------------------------------------------------------------------------- */

void kvf_check_print(const struct kvf_config *config, const struct kvf_check *check,
                     const struct kvf_machine_memory *memory, FILE *out)
{
    fprintf(out, "%-22s %14s  %s\n", "memory", "MiB", "from");
    for (unsigned i = 0; i < check->n_parts; i++) {
        fprintf(out, "%-22s %14.2f  %s\n", check->parts[i].name,
                (double)check->parts[i].bytes / (double)MIB, check->parts[i].how);
    }
    fprintf(out, "%-22s %14.2f\n", "total", (double)check->total_bytes / (double)MIB);
    fprintf(out, "%-22s %14.2f  now\n", "available", (double)memory->available_bytes / (double)MIB);
    fprintf(out, "%-22s %14.2f  %s\n", "limit", (double)memory->total_bytes / (double)MIB,
            memory->limit);
    if (config->dram_hugepages != KVF_HUGEPAGES_OFF) {
        fprintf(out, "%-22s %14.2f  free now, for the arena\n", "huge pages",
                (double)memory->huge_free_bytes / (double)MIB);
        fprintf(out, "%-22s %14.2f  %s\n", "limit of huge pages",
                (double)memory->huge_total_bytes / (double)MIB, memory->huge_limit);
    }
    for (uint32_t i = 0; i < config->n_nvme; i++) {
        fprintf(out, "%-22s %14.2f  %s%s\n", i == 0 ? "drives" : "",
                (double)config->nvme[i].bytes / (double)MIB, config->nvme[i].path,
                config->mode == KVF_MODE_OBSERVE ? ", which mode observe leaves alone" : "");
    }
}
