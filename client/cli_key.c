/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_key.c: kvferry client-key: what a client on another node attaches with.
 */
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "client/cli.h"
#include "transport/net_proto.h"

static int read_cluster_key(const char *path, uint8_t key_out[32])
{
    uint8_t bytes[33];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, bytes, sizeof(bytes)) : -1;
    int error_number = errno;

    kvf_fd_close(&fd);
    if (n < 0) {
        return cli_fail(CLI_FAILED, "client-key: %s: %s", path, strerror(error_number));
    }
    if (n != 32) {
        return cli_fail(CLI_FAILED,
                        "client-key: %s does not hold exactly 32 bytes; name the daemons' "
                        "cluster_key file",
                        path);
    }
    memcpy(key_out, bytes, 32);
    return CLI_OK;
}

int cli_client_key(const struct cli *cli)
{
    const char *tenant = cli->tenant != NULL ? cli->tenant : "default";
    char name[KVF_NET_NAME_BYTES] = "";
    uint8_t cluster_key[32];
    uint8_t key[32];
    char hex[2 * sizeof(key) + 1];
    int code;

    if (cli->file == NULL) {
        return cli_fail(CLI_USAGE, "client-key: name the cluster's key, the file of cluster_key");
    }
    if (strlen(tenant) >= sizeof(name) || tenant[0] == '\0' || strchr(tenant, ' ') != NULL) {
        return cli_fail(CLI_USAGE, "--tenant: 1 to 63 characters without spaces, as in sockets");
    }
    memcpy(name, tenant, strlen(tenant));
    if (!kvf_proto_text_ok(name, sizeof(name))) {
        return cli_fail(CLI_USAGE, "--tenant: no control characters");
    }
    code = read_cluster_key(cli->file, cluster_key);
    if (code != CLI_OK) {
        return code;
    }
    kvf_net_client_key(cluster_key, name, key);
    sodium_bin2hex(hex, sizeof(hex), key, sizeof(key));
    printf("%s %s\n", name, hex);
    sodium_memzero(cluster_key, sizeof(cluster_key));
    return CLI_OK;
}
