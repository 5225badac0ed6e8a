/* SPDX-License-Identifier: Apache-2.0
 *
 * cli.h: the parts of the kvferry command. kvferry.c reads the arguments and finds the subcommand;
 * cli_data.c speaks to the daemon through libkvferry, cli_admin.c through the admin socket;
 * cli_inspect.c and cli_calibrate.c ask nobody, they read captures; cli_svd.c and cli_plan.c read
 * models, cli_replay.c traces.
 */
#ifndef KVF_CLIENT_CLI_H
#define KVF_CLIENT_CLI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

enum {
    CLI_FOLDERS_MAX = 64,
    CLI_WHY_BYTES = 512,
};

enum cli_exit {
    CLI_OK = 0,
    CLI_FAILED = 1,
    CLI_USAGE = 2,
    CLI_NO_DAEMON = 3,
};

/* Folders of captures. */
struct cli_folders {
    const char *items[CLI_FOLDERS_MAX];
    uint32_t n;
};

/* Everything that can be said on the command line. */
struct cli {
    const char *socket;     /* of clients, or the address of a daemon on another node */
    char admin_socket[108]; /* of the admin server; "": the daemon is on another node */
    bool is_json;           /* -o json */
    const char *file;       /* NULL or "-": standard input or output */
    struct kvf_key key;     /* data NULL: none given */
    uint8_t key_bytes[KVF_KEY_BYTES_MAX];
    const char *label;
    const char *tenant;         /* NULL: not said */
    const char *namespace_name; /* id in hexadecimal, or label */
    bool is_durable;
    bool is_no_write;
    bool is_kept; /* bench: leave the blocks */
    uint32_t ttl_s;
    uint32_t budget_ms;
    uint64_t count;
    uint64_t size_bytes;
    uint32_t depth;
    uint32_t duration_s;  /* trace; 0: until a signal */
    uint32_t interval_ms; /* top; 0: not said */
    /* inspect, calibrate; 0 and NULL: not said */
    struct cli_folders captures;
    struct cli_folders heldout;
    const char *profile;
    const char *svg_file;
    const char *write_file;
    const char *name;
    const char *workload;
    const char *weights_digest;
    const char *weights_file;
    const char *adapter_digest;
    const char *codecs;
    const char *rope_state;
    double sigma_median;
    double sigma_p99;
    double output_error;
    double top1;
    double target_bits;
    uint64_t sinks;
    bool has_sinks;
    uint64_t queries;
    uint64_t threads;
    uint64_t rank; /* svd */
    /* replay and plan; 0 and NULL: not said */
    const char *trace;
    const char *model;
    const char *dram; /* lists of sizes */
    const char *nvme;
    double bytes_a_token;
    double drive_gbs;
    double dwpd;
    uint64_t write_budget;
    uint64_t block_tokens;
    uint8_t admission; /* enum kvf_config_admission */
    /* plan; 0 and NULL: not said */
    const char *profiles;
    double link_gbs;
    double tflops;
    double fixed_ms;
    uint64_t tokens;
    struct {
        uint64_t layers;
        uint64_t d_model;
        uint64_t heads; /* of K and V */
        uint64_t query_heads;
        uint64_t dim;
        uint64_t ffn_width;
    } shape;
};

/* Say what went wrong on stderr, "kvferry: ...", and return code. */
int cli_fail(enum cli_exit code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The exit code for a status, after saying what failed. */
int cli_fail_status(const struct cli *cli, const char *what, int status);

/* Print a JSON value on one line and drop the reference. */
void cli_print_json(json_t *json);

/* "12.3 MiB", for people. Returns out. */
const char *cli_bytes_text(uint64_t bytes, char *out, size_t out_bytes);

/* Of GET /v1/stat, to be put after "ready": what is disabled, that the daemon observes, or "". */
const char *cli_service_text(const json_t *stat, char *out, size_t bytes);

/* One line on a daemon that recovers its drives, and is not to be asked for more. False: it does
 * not, and nothing is printed. */
bool cli_print_start(const json_t *stat);

/* --- subcommands: all return an exit code ----------------------------------------------------- */

int cli_ping(const struct cli *cli);
int cli_put(const struct cli *cli);
int cli_get(const struct cli *cli);
int cli_bench(const struct cli *cli);
int cli_stat(const struct cli *cli);
int cli_ls(const struct cli *cli);
int cli_clients(const struct cli *cli);
int cli_peers(const struct cli *cli);
int cli_client_key(const struct cli *cli); /* asks nobody */
int cli_verify(const struct cli *cli);
int cli_evict(const struct cli *cli); /* by key: through the library; by namespace: admin */
int cli_purge(const struct cli *cli);
int cli_top(const struct cli *cli);
int cli_disable(const struct cli *cli);
int cli_enable(const struct cli *cli);
int cli_reload(const struct cli *cli);
int cli_log_level(const struct cli *cli);
int cli_drain(const struct cli *cli);
int cli_profiles(const struct cli *cli); /* asks nobody, as do those below */
int cli_inspect(const struct cli *cli);
int cli_calibrate(const struct cli *cli);
int cli_svd(const struct cli *cli);
int cli_plan(const struct cli *cli);
int cli_replay(const struct cli *cli);
int cli_trace(const struct cli *cli);
int cli_doctor(const struct cli *cli);

/* The id of the namespace that was named, in hexadecimal. CLI_OK, or an exit code after saying
 * why. */
int cli_find_namespace(const struct cli *cli, char id_out[17]);

/* Evict one key of a label through the library. */
int cli_evict_key(const struct cli *cli);

/* A handle for opaque bytes under the label. staging_bytes 0: the daemon's default. CLI_OK, or an
 * exit code after saying why. */
int cli_open(const struct cli *cli, const char *label, uint64_t staging_bytes,
             struct kvf_client **client_out);

/* Read every folder that was named. what: for the message. CLI_OK, or an exit code after saying
 * why; the set is the caller's in any case. */
struct kvf_capture_set;
int cli_open_captures(const struct cli_folders *folders, const char *what,
                      struct kvf_capture_set *set);

/* Can what captures hold, K and V, be coded by this profile? CLI_OK, also where there is no such;
 * CLI_USAGE: it is for X, and that is said. */
int cli_check_profile(const char *name);

/* Threads to use: --threads, or as many as this process may run on. */
uint32_t cli_threads(const struct cli *cli);

/* --- admin socket ----------------------------------------------------------------------------- */

/* One request. *json_out: the answer, owned by the caller. CLI_OK; otherwise an exit code, after
 * saying why. */
int cli_http(const struct cli *cli, const char *method, const char *path, json_t **json_out);

/* The same, but why it failed goes to why. */
int cli_http_try(const struct cli *cli, const char *method, const char *path, json_t **json_out,
                 char why[CLI_WHY_BYTES]);

/* A field of an answer; 0, "" and false if it is not there or of another type. */
uint64_t cli_number(const json_t *object, const char *name);
const char *cli_string(const json_t *object, const char *name);
bool cli_flag(const json_t *object, const char *name);

#endif /* KVF_CLIENT_CLI_H */
