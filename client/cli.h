/* SPDX-License-Identifier: Apache-2.0
 *
 * cli.h: the parts of the kvferry command. kvferry.c reads the arguments and finds the subcommand;
 * cli_data.c speaks to the daemon through libkvferry, cli_admin.c through the admin socket.
 */
#ifndef KVF_CLIENT_CLI_H
#define KVF_CLIENT_CLI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

enum cli_exit {
    CLI_OK = 0,
    CLI_FAILED = 1,
    CLI_USAGE = 2,
    CLI_NO_DAEMON = 3,
};

/* Everything that can be said on the command line. */
struct cli {
    const char *socket;     /* of clients */
    char admin_socket[108]; /* of the admin server */
    bool is_json;           /* -o json */
    const char *file;       /* NULL or "-": standard input or output */
    struct kvf_key key;     /* data NULL: none given */
    uint8_t key_bytes[KVF_KEY_BYTES_MAX];
    const char *label;
    const char *namespace_name; /* id in hexadecimal, or label */
    bool is_durable;
    bool is_no_write;
    bool is_kept; /* bench: leave the blocks */
    uint32_t ttl_s;
    uint32_t budget_ms;
    uint64_t count;
    uint64_t size_bytes;
    uint32_t depth;
};

/* Say what went wrong on stderr, "kvferry: ...", and return code. */
int cli_fail(enum cli_exit code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The exit code for a status, after saying what failed. */
int cli_fail_status(const struct cli *cli, const char *what, int status);

/* Print a JSON value on one line and drop the reference. */
void cli_print_json(json_t *json);

/* "12.3 MiB", for people. Returns out. */
const char *cli_bytes_text(uint64_t bytes, char *out, size_t out_bytes);

/* --- subcommands: all return an exit code ----------------------------------------------------- */

int cli_ping(const struct cli *cli);
int cli_put(const struct cli *cli);
int cli_get(const struct cli *cli);
int cli_bench(const struct cli *cli);
int cli_stat(const struct cli *cli);
int cli_ls(const struct cli *cli);
int cli_clients(const struct cli *cli);
int cli_verify(const struct cli *cli);
int cli_evict(const struct cli *cli); /* by key: through the library; by namespace: admin */
int cli_purge(const struct cli *cli);
int cli_profiles(const struct cli *cli); /* asks nobody */

/* Evict one key of a label through the library. */
int cli_evict_key(const struct cli *cli);

/* A handle for opaque bytes under the label. staging_bytes 0: the daemon's default. CLI_OK, or an
 * exit code after saying why. */
int cli_open(const struct cli *cli, const char *label, uint64_t staging_bytes,
             struct kvf_client **client_out);

/* --- admin socket ----------------------------------------------------------------------------- */

/* One request. *json_out: the answer, owned by the caller. CLI_OK; otherwise an exit code, after
 * saying why. */
int cli_http(const struct cli *cli, const char *method, const char *path, json_t **json_out);

#endif /* KVF_CLIENT_CLI_H */
