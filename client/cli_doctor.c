/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_doctor.c: kvferry doctor: looks at what has to be right, in the order in which one thing
 * rests on another, and ends at the first that is wrong: what it is, and the cure.
 *
 * What the daemon knows it is asked for (GET /v1/stat, /v1/clients); of the machine only what an
 * engine beside it sees is looked at.
 */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/cli.h"
#include "client/tunnel.h"

enum {
    TEXT_BYTES = 600,
    ROWS_MAX = 32,
    GPUS_MAX = 64,
    UUID_BYTES = 48,
    PINGS = 20,
    PING_MS = 2000,
};

/* Shares from which on something is wrong. */
#define DROPPED_SHARE_MAX  0.01 /* of blocks given to drives */
#define TOO_SLOW_SHARE_MAX 0.10 /* of gets */
#define BLOCKS_MIN         1000 /* before shares are believed */

enum state {
    STATE_OK,
    STATE_NOTE,  /* worth knowing, not wrong */
    STATE_WRONG, /* the last row */
};

struct row {
    const char *name;
    enum state state;
    char text[TEXT_BYTES];
};

struct doctor {
    const struct cli *cli;
    struct row rows[ROWS_MAX];
    uint32_t n_rows;
    json_t *stat;
    json_t *clients;
    json_t *peers;
};

static void say(struct doctor *doctor, const char *name, enum state state, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static void say(struct doctor *doctor, const char *name, enum state state, const char *fmt, ...)
{
    struct row *row = &doctor->rows[doctor->n_rows];
    va_list args;

    if (doctor->n_rows == ROWS_MAX) {
        return;
    }
    doctor->n_rows++;
    row->name = name;
    row->state = state;
    va_start(args, fmt);
    (void)vsnprintf(row->text, sizeof(row->text), fmt, args);
    va_end(args);
}

static bool is_set(const json_t *object, const char *name)
{
    return json_is_true(json_object_get(object, name));
}

static bool is_wrong(const struct doctor *doctor)
{
    return doctor->n_rows > 0 && doctor->rows[doctor->n_rows - 1].state == STATE_WRONG;
}

/* --- the sockets ------------------------------------------------------------------------------ */

static void look_at_socket(struct doctor *doctor)
{
    const char *path = doctor->cli->socket;
    struct stat st;

    if (kvf_tunnel_is_address(path)) {
        say(doctor, "socket", STATE_OK, "%s", path);
    } else if (stat(path, &st) != 0) {
        say(doctor, "socket", STATE_WRONG, "%s: %s; start kvferryd, or name its socket by --socket",
            path, strerror(errno));
    } else if (!S_ISSOCK(st.st_mode)) {
        say(doctor, "socket", STATE_WRONG, "%s is no socket; name kvferryd's by --socket", path);
    } else if (access(path, W_OK) != 0) {
        say(doctor, "socket", STATE_WRONG,
            "%s: %s; add this user to the socket's group, or widen sockets.mode", path,
            strerror(errno));
    } else {
        say(doctor, "socket", STATE_OK, "%s", path);
    }
}

static void on_log(void *arg, int severity, const char *text)
{
    if (severity <= 1) {
        (void)snprintf(arg, TEXT_BYTES / 2, "%s", text);
    }
}

static void look_at_attach(struct doctor *doctor)
{
    char said[TEXT_BYTES / 2] = "";
    struct kvf_client *client = NULL;
    struct kvf_options options;
    uint64_t best_ns = UINT64_MAX;
    int status;

    kvf_options_init(&options);
    options.socket_path = doctor->cli->socket;
    options.client_name = "kvferry doctor";
    options.profile = "bytes";
    options.flags = KVF_ATTACH_NO_RECONNECT;
    options.log = on_log;
    options.log_arg = said;
    status = kvf_open(&options, &client);
    if (status != KVF_OK) {
        say(doctor, "attach", STATE_WRONG, "%s: %s%s", kvf_status_name(status),
            said[0] != '\0' ? said : kvf_status_text(status),
            status == KVF_ERR_NO_DAEMON && !kvf_tunnel_is_address(doctor->cli->socket)
                ? "; the socket is left from a kvferryd that has ended: "
                  "start it"
                : "");
        return;
    }
    for (int i = 0; i < PINGS && status == KVF_OK; i++) {
        uint64_t ns = UINT64_MAX;

        status = kvf_ping(client, PING_MS, &ns);
        best_ns = ns < best_ns ? ns : best_ns;
    }
    kvf_close(client);
    if (status != KVF_OK) {
        say(doctor, "attach", STATE_WRONG,
            "no answer within %d s: %s; the daemon's loop hangs or gets no CPU", PING_MS / 1000,
            kvf_status_name(status));
    } else {
        say(doctor, "attach", STATE_OK, "a round trip takes %.1f us", (double)best_ns / 1e3);
    }
}

static void look_at_admin(struct doctor *doctor)
{
    char why[CLI_WHY_BYTES] = "";
    int code;

    if (doctor->cli->admin_socket[0] == '\0') {
        say(doctor, "admin", STATE_NOTE,
            "the daemon is on another node: run kvferry doctor there for what it says of itself");
        return;
    }
    code = cli_http_try(doctor->cli, "GET", "/v1/stat", &doctor->stat, why);
    if (code == CLI_OK) {
        code = cli_http_try(doctor->cli, "GET", "/v1/clients", &doctor->clients, why);
    }
    if (code == CLI_OK) {
        code = cli_http_try(doctor->cli, "GET", "/v1/peers", &doctor->peers, why);
    }
    if (code != CLI_OK) {
        say(doctor, "admin", STATE_WRONG, "%s", why);
    } else {
        say(doctor, "admin", STATE_OK, "%s", doctor->cli->admin_socket);
    }
}

/* --- the daemon ------------------------------------------------------------------------------- */

static void look_at_version(struct doctor *doctor)
{
    const char *version = cli_string(doctor->stat, "version");

    if (strcmp(version, kvf_version()) != 0) {
        say(doctor, "version", STATE_WRONG,
            "the daemon is %s, this command and its library %s; restart what is older", version,
            kvf_version());
    } else {
        say(doctor, "version", STATE_OK, "%s", version);
    }
}

static void look_at_service(struct doctor *doctor)
{
    uint64_t clients = cli_number(doctor->stat, "clients");
    uint64_t clients_max = cli_number(doctor->stat, "clients_max");
    uint64_t n_off = cli_number(json_object_get(doctor->stat, "metrics"), "disabled_namespaces");

    if (is_set(doctor->stat, "draining")) {
        say(doctor, "service", STATE_WRONG, "the daemon ends; start it again");
    } else if (is_set(doctor->stat, "disabled")) {
        say(doctor, "service", STATE_WRONG, "an operator has disabled it; kvferry enable");
    } else if (n_off > 0) {
        say(doctor, "service", STATE_WRONG,
            "an operator has disabled %" PRIu64
            " namespace(s): kvferry ls shows which, kvferry enable "
            "--namespace NAME puts one back",
            n_off);
    } else if (!is_set(doctor->stat, "ready")) {
        say(doctor, "service", STATE_WRONG, "it is not ready; its log says what it waits for");
    } else if (clients >= clients_max) {
        say(doctor, "service", STATE_WRONG,
            "all %" PRIu64 " places for clients are taken; raise clients.max", clients_max);
    } else {
        say(doctor, "service", STATE_OK, "%" PRIu64 " of %" PRIu64 " clients", clients,
            clients_max);
    }
}

/* Memory: is the arena there, and of the pages that were asked for? */
static void look_at_memory(struct doctor *doctor)
{
    const json_t *dram = json_object_get(doctor->stat, "dram");
    const char *hugepages = cli_string(dram, "hugepages");
    uint64_t arena = cli_number(dram, "arena_bytes");
    uint64_t populated = cli_number(dram, "populated_bytes");
    uint64_t huge = cli_number(dram, "huge_bytes");

    if (strcmp(cli_string(doctor->stat, "mode"), "observe") == 0) {
        say(doctor, "memory", STATE_NOTE,
            "mode observe: nothing is stored, all answers are misses");
    } else if (cli_number(dram, "memory_refusals") > 0 && populated < arena) {
        say(doctor, "memory", STATE_WRONG,
            "%" PRIu64 " of %" PRIu64 " MiB of the arena are there: the machine, or the daemon's "
            "cgroup, has no more; lower dram.bytes or raise the limit",
            populated >> 20, arena >> 20);
    } else if (strcmp(hugepages, "try") == 0 && huge < populated) {
        say(doctor, "memory", STATE_WRONG,
            "%" PRIu64 " of %" PRIu64 " MiB are huge pages; raise vm.nr_hugepages by %" PRIu64
            " and restart, or set dram.hugepages to off",
            huge >> 20, populated >> 20, (populated - huge + (2 << 20) - 1) >> 21);
    } else {
        say(doctor, "memory", STATE_OK, "%" PRIu64 " of %" PRIu64 " MiB, huge pages %s",
            populated >> 20, arena >> 20, hugepages);
    }
}

/* --- drives ----------------------------------------------------------------------------------- */

static double mean_ms(const json_t *metrics, const char *name)
{
    const json_t *histogram = json_object_get(metrics, name);
    uint64_t count = cli_number(histogram, "count");

    return count != 0 ? (double)cli_number(histogram, "sum_ns") / (double)count / 1e6 : 0;
}

static void look_at_drive(struct doctor *doctor, const json_t *drive)
{
    const char *path = cli_string(drive, "path");
    const char *engine = cli_string(drive, "engine");
    const char *why = cli_string(drive, "why");

    if (is_set(drive, "off") || is_set(drive, "writes_off")) {
        say(doctor, "drive", STATE_WRONG,
            "%s is %s after %" PRIu64 " failed and %" PRIu64 " corrupt I/Os; look at the kernel's "
            "log, replace it, or restart to try again",
            path, is_set(drive, "off") ? "off" : "read-only", cli_number(drive, "errors_io"),
            cli_number(drive, "errors_corrupt"));
    } else if (strcmp(engine, "threads") == 0 && strstr(why, "as configured") == NULL) {
        /* the forms before it were tried, and why says what was in the way */
        say(doctor, "drive", STATE_WRONG,
            "%s: io_uring is not allowed: %s; allow it (seccomp profile, kernel.io_uring_disabled, "
            "memlock), or set nvme.engine to threads, which says that they are meant",
            path, why);
    } else {
        say(doctor, "drive", STATE_OK, "%s by %s", path, engine);
    }
}

/* Does what is written go through, and is what is read fast enough for who waits? */
static void look_at_speed(struct doctor *doctor)
{
    const json_t *metrics = json_object_get(doctor->stat, "metrics");
    uint64_t admitted = cli_number(metrics, "nvme_admitted_blocks");
    uint64_t dropped = cli_number(metrics, "nvme_dropped_blocks");
    uint64_t too_slow = cli_number(metrics, "get_too_slow");
    uint64_t gets = cli_number(metrics, "get_hits_dram") + cli_number(metrics, "get_hits_nvme") +
                    cli_number(metrics, "get_misses") + too_slow;

    if (admitted + dropped >= BLOCKS_MIN &&
        (double)dropped > DROPPED_SHARE_MAX * (double)(admitted + dropped)) {
        say(doctor, "speed", STATE_WRONG,
            "%" PRIu64 " of %" PRIu64
            " blocks were not written because the drive was behind; lower "
            "nvme.write_budget to what it writes, or take a faster one",
            dropped, admitted + dropped);
    } else if (gets >= BLOCKS_MIN && (double)too_slow > TOO_SLOW_SHARE_MAX * (double)gets) {
        say(doctor, "speed", STATE_WRONG,
            "%" PRIu64 " of %" PRIu64
            " gets were too slow for their budget (a read takes %.1f ms); "
            "raise the engine's budget, or take a faster drive",
            too_slow, gets, mean_ms(metrics, "nvme_read_ns"));
    } else {
        say(doctor, "speed", STATE_OK, "a read takes %.1f ms, a write %.1f ms",
            mean_ms(metrics, "nvme_read_ns"), mean_ms(metrics, "nvme_write_ns"));
    }
}

static void look_at_drives(struct doctor *doctor)
{
    const json_t *drives = json_object_get(doctor->stat, "nvme");
    const json_t *drive;
    size_t i;

    json_array_foreach(drives, i, drive)
    {
        if (!is_wrong(doctor)) {
            look_at_drive(doctor, drive);
        }
    }
    if (json_array_size(drives) == 0) {
        say(doctor, "drive", STATE_NOTE, "none: nothing survives a restart");
    } else if (!is_wrong(doctor)) {
        look_at_speed(doctor);
    }
}

/* --- GPUs ------------------------------------------------------------------------------------- */

/* UUIDs that the driver shows here. Returns how many. */
static uint32_t find_gpus(char uuids[GPUS_MAX][UUID_BYTES])
{
    static const char folder[] = "/proc/driver/nvidia/gpus";
    char path[400], line[256];
    DIR *dir = opendir(folder);
    struct dirent *entry;
    uint32_t n = 0;

    while (dir != NULL && n < GPUS_MAX && (entry = readdir(dir)) != NULL) {
        FILE *file;

        (void)snprintf(path, sizeof(path), "%s/%.255s/information", folder, entry->d_name);
        file = entry->d_name[0] != '.' ? fopen(path, "re") : NULL;
        while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
            if (sscanf(line, "GPU UUID: %47s", uuids[n]) == 1) {
                n++;
                break;
            }
        }
        if (file != NULL) {
            (void)fclose(file);
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return n;
}

static bool has_gpu(char uuids[GPUS_MAX][UUID_BYTES], uint32_t n, const char *uuid)
{
    for (uint32_t i = 0; i < n; i++) {
        if (strcmp(uuids[i], uuid) == 0) {
            return true;
        }
    }
    return false;
}

static void look_at_gpus(struct doctor *doctor)
{
    const json_t *metrics = json_object_get(doctor->stat, "metrics");
    char uuids[GPUS_MAX][UUID_BYTES];
    uint32_t n = find_gpus(uuids);
    const json_t *client;
    size_t i;

    json_array_foreach(json_object_get(doctor->clients, "clients"), i, client)
    {
        const char *uuid = cli_string(client, "gpu_uuid");

        if (n > 0 && uuid[0] != '\0' && !has_gpu(uuids, n, uuid)) {
            say(doctor, "gpu", STATE_WRONG,
                "client '%s' uses %s, which is none of the %u GPUs of this machine; name one of "
                "nvidia-smi -L",
                cli_string(client, "name"), uuid, n);
            return;
        }
    }
    if (cli_number(metrics, "gpu_worker_starts") > 1 && cli_number(metrics, "gpu_workers") == 0) {
        say(doctor, "gpu", STATE_WRONG,
            "GPU workers have been started %" PRIu64 " times, and none is up: the daemon's log has "
            "what they said; mend that, or set gpu.devices to none",
            cli_number(metrics, "gpu_worker_starts"));
    } else if (cli_number(metrics, "gpu_worker_hangs") > 0) {
        say(doctor, "gpu", STATE_WRONG,
            "a GPU worker has hung %" PRIu64 " times; the daemon's log has its last words",
            cli_number(metrics, "gpu_worker_hangs"));
    } else if (n == 0) {
        say(doctor, "gpu", STATE_NOTE, "no NVIDIA driver here: engines encode on the CPU");
    } else {
        say(doctor, "gpu", STATE_OK, "%u, %" PRIu64 " workers of the daemon", n,
            cli_number(metrics, "gpu_workers"));
    }
}

/* Blocks of other nodes are a gain, and no link is no failure: it is worth a note. */
static void look_at_peers(struct doctor *doctor)
{
    const json_t *metrics = json_object_get(doctor->stat, "metrics");
    uint64_t refused = cli_number(metrics, "peer_refused");
    const json_t *peer;
    uint32_t linked = 0;
    size_t i;

    json_array_foreach(json_object_get(doctor->peers, "peers"), i, peer)
    {
        if (strcmp(cli_string(peer, "state"), "resting") == 0) {
            say(doctor, "peers", STATE_NOTE,
                "%s answered too late, and is not asked for a while: is its node, or the network, "
                "busy?",
                cli_string(peer, "address"));
            return;
        }
        linked += is_set(peer, "asked");
    }
    if (refused > 0) {
        say(doctor, "peers", STATE_NOTE,
            "linked to %u; %" PRIu64 " links were refused since the start: do all nodes have one "
            "cluster_key and one version? The log names them",
            linked, refused);
    } else if (cli_number(metrics, "directory_failures") > 0 &&
               cli_number(metrics, "directory_up") == 0) {
        say(doctor, "peers", STATE_NOTE,
            "the directory's server does not answer, and nodes that come now are not heard of: is "
            "directory.address right, and does it run?");
    } else if (linked > 0) {
        say(doctor, "peers", STATE_OK, "linked to %u", linked);
    }
}

/* --- what has gone wrong so far --------------------------------------------------------------- */

static void look_at_counters(struct doctor *doctor)
{
    static const struct {
        const char *field, *what, *cure;
    } counters[] = {
        {"nvme_corrupt_blocks", "blocks were corrupt on a drive, and dropped",
         "look at the drive's health (smartctl), and run kvferry verify"},
        {"put_corrupt", "puts had a wrong checksum or page",
         "a client writes to staging while it is stored, or memory is bad"},
        {"put_conflict", "puts had other bytes than the block of that name",
         "two models, or two settings of one, share a namespace: give each its label or digest"},
        {"put_mismatch", "puts were not of the geometry of their attach",
         "the engine's layout differs from what it says: see kvferry clients"},
        {"protocol_errors", "clients broke the protocol", "the daemon's log names them"},
    };
    const json_t *metrics = json_object_get(doctor->stat, "metrics");

    for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
        uint64_t n = cli_number(metrics, counters[i].field);

        if (n > 0) {
            say(doctor, "counters", STATE_WRONG, "%" PRIu64 " %s since the start; %s", n,
                counters[i].what, counters[i].cure);
            return;
        }
    }
    say(doctor, "counters", STATE_OK, "nothing corrupt, no conflict, no broken protocol");
}

/* --- the command ------------------------------------------------------------------------------ */

static void print(const struct doctor *doctor)
{
    static const char *const words[] = {"ok", "note", "WRONG"};
    json_t *rows = doctor->cli->is_json ? json_array() : NULL;

    for (uint32_t i = 0; i < doctor->n_rows; i++) {
        const struct row *row = &doctor->rows[i];

        if (rows != NULL) {
            json_array_append_new(rows, json_pack("{s:s, s:s, s:s}", "name", row->name, "state",
                                                  words[row->state], "text", row->text));
        } else {
            printf("%-9s %-6s %s\n", row->name, words[row->state], row->text);
        }
    }
    if (rows != NULL) {
        cli_print_json(json_pack("{s:b, s:o}", "ok", !is_wrong(doctor), "checks", rows));
    }
}

#define LOOKS_REMOTE 3 /* as far as what the admin socket says */

int cli_doctor(const struct cli *cli)
{
    static void (*const looks[])(struct doctor * doctor) = {
        look_at_socket, look_at_attach, look_at_admin, look_at_version, look_at_service,
        look_at_memory, look_at_drives, look_at_gpus,  look_at_peers,   look_at_counters,
    };
    const size_t n = cli->admin_socket[0] != '\0' ? sizeof(looks) / sizeof(looks[0]) : LOOKS_REMOTE;
    struct doctor doctor = {.cli = cli};

    for (size_t i = 0; i < n && !is_wrong(&doctor); i++) {
        looks[i](&doctor);
    }
    print(&doctor);
    json_decref(doctor.stat);
    json_decref(doctor.clients);
    json_decref(doctor.peers);
    return is_wrong(&doctor) ? CLI_FAILED : CLI_OK;
}
