/* SPDX-License-Identifier: Apache-2.0
 *
 * config_peers.c: what the options of peers may say.
 */
#include <arpa/inet.h>
#include <string.h>

#include "agent/config.h"
#include "agent/config_internal.h"
#include "base/parse.h"
#include "transport/transport_ucx.h"

int kvf_config_node_next(const char **at, struct kvf_config_node *node_out)
{
    const char *text = *at + strspn(*at, " ,");
    size_t length = strcspn(text, " ,");
    const char *colon = memrchr(text, ':', length);
    const char *host = text;
    size_t host_bytes = colon != NULL ? (size_t)(colon - text) : 0;
    size_t port_bytes = colon != NULL ? length - host_bytes - 1 : 0;
    char detail[256];
    uint64_t port;

    *at = text + length;
    if (length == 0) {
        return KVF_EMPTY;
    }
    if (host_bytes > 2 && host[0] == '[' && host[host_bytes - 1] == ']') {
        host++; /* an IPv6 address */
        host_bytes -= 2;
    } else if (memchr(host, ':', host_bytes) != NULL) {
        return KVF_ERR_INVALID;
    }
    if (host_bytes == 0 || host_bytes >= sizeof(node_out->host) || port_bytes == 0 ||
        port_bytes >= sizeof(node_out->port)) {
        return KVF_ERR_INVALID;
    }
    memset(node_out, 0, sizeof(*node_out));
    memcpy(node_out->host, host, host_bytes);
    memcpy(node_out->port, colon + 1, port_bytes);
    if (kvf_parse_u64(node_out->port, &port, detail, sizeof(detail)) != KVF_OK || port == 0 ||
        port > UINT16_MAX) {
        return KVF_ERR_INVALID;
    }
    return KVF_OK;
}

/* Is it of a range that routers do not carry to strangers? What stands for all addresses is not. */
static bool is_private(const struct sockaddr_storage *address)
{
    const struct sockaddr_in *v4 = (const void *)address;
    const struct sockaddr_in6 *v6 = (const void *)address;
    uint32_t ip;

    if (address->ss_family == AF_INET6) {
        const uint8_t *b = v6->sin6_addr.s6_addr;

        return (b[0] & 0xfe) == 0xfc || (b[0] == 0xfe && (b[1] & 0xc0) == 0x80) ||
               IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
    }
    ip = ntohl(v4->sin_addr.s_addr);
    return ip >> 24 == 10 || ip >> 24 == 127 || ip >> 20 == 0xac1 || ip >> 16 == 0xc0a8 ||
           ip >> 16 == 0xa9fe || ip >> 22 == 0x191;
}

static int fail(const struct kvf_config *config, enum kvf_config_option_id id, const char *name,
                struct kvf_config_error *error, const char *text)
{
    kvf_config_fail_at(config, config->lines[id], name, error, "%s", text);
    return KVF_ERR_CONFIG;
}

static int check_nodes(const struct kvf_config *config, struct kvf_config_error *error)
{
    const char *at = config->peers_nodes;
    struct kvf_config_node node;
    uint32_t n = 0;
    int status;

    while ((status = kvf_config_node_next(&at, &node)) == KVF_OK) {
        n++;
    }
    if (status != KVF_EMPTY) {
        return fail(config, KVF_CONFIG_ID_peers_nodes, "peers.nodes", error,
                    "it is no list of host:port; write it as 10.0.0.7:7171,[fd00::7]:7171");
    }
    if (n == 0 && config->peers_nodes[0] != '\0') {
        return fail(config, KVF_CONFIG_ID_peers_nodes, "peers.nodes", error,
                    "there is no node in it; write it as 10.0.0.7:7171,[fd00::7]:7171, or leave "
                    "it empty");
    }
    if (n > KVF_NET_PEERS_MAX) {
        return fail(config, KVF_CONFIG_ID_peers_nodes, "peers.nodes", error,
                    "it names more than 32 nodes; give one DNS name that has all their addresses");
    }
    return KVF_OK;
}

/* Who this node is to the directory: options that would go unused are a mistake. */
static int check_login(const struct kvf_config *config, struct kvf_config_error *error)
{
    bool has_address = config->directory_address[0] != '\0';
    bool has_user = config->directory_user[0] != '\0';
    bool has_password = config->directory_password_file[0] != '\0';

    if (has_user && !has_address) {
        return fail(config, KVF_CONFIG_ID_directory_user, "directory.user", error,
                    "it is set, but directory.address is not; set that too, or remove this");
    }
    if (has_password && !has_address) {
        return fail(config, KVF_CONFIG_ID_directory_password_file, "directory.password_file", error,
                    "it is set, but directory.address is not; set that too, or remove this");
    }
    if (has_user && !has_password) {
        return fail(config, KVF_CONFIG_ID_directory_user, "directory.user", error,
                    "a user logs in with a password, and directory.password_file is not set; set "
                    "it too, or remove this");
    }
    return KVF_OK;
}

static int check_directory(const struct kvf_config *config, struct kvf_config_error *error)
{
    const char *at = config->directory_address;
    struct kvf_config_node node;

    if (check_login(config, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    if (at[0] == '\0') {
        return KVF_OK;
    }
    if (!KVF_HAVE_HIREDIS) {
        return fail(config, KVF_CONFIG_ID_directory_address, "directory.address", error,
                    "this kvferryd was built without hiredis; build it with libhiredis-dev, or "
                    "leave the option out");
    }
    if (at[0] != '/' && (kvf_config_node_next(&at, &node) != KVF_OK || at[0] != '\0')) {
        return fail(config, KVF_CONFIG_ID_directory_address, "directory.address", error,
                    "it is neither host:port nor the path of a Unix socket; write it as "
                    "10.0.0.9:6379 or /run/valkey/valkey.sock");
    }
    return KVF_OK;
}

int kvf_config_check_peers(const struct kvf_config *config, struct kvf_config_error *error)
{
    struct sockaddr_storage address;
    socklen_t bytes;
    bool listens = config->peers_listen[0] != '\0';
    bool has_directory = config->directory_address[0] != '\0';

    if (check_directory(config, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    if (!listens && !has_directory && config->peers_nodes[0] == '\0') {
        return KVF_OK;
    }
    if (listens && kvf_config_listen_parse(config->peers_listen, &address, &bytes) != KVF_OK) {
        return fail(config, KVF_CONFIG_ID_peers_listen, "peers.listen", error,
                    "it is no numeric address and port; write it as 10.0.0.7:7171 or "
                    "[fd00::7]:7171");
    }
    if (listens && !is_private(&address)) {
        return fail(config, KVF_CONFIG_ID_peers_listen, "peers.listen", error,
                    "blocks go over the wire in the clear, and this is no private address of one "
                    "interface; give such a one (10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, "
                    "100.64.0.0/10, fc00::/7)");
    }
    if (check_nodes(config, error) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    if (config->cluster_key[0] == '\0') {
        return fail(config,
                    listens         ? KVF_CONFIG_ID_peers_listen
                    : has_directory ? KVF_CONFIG_ID_directory_address
                                    : KVF_CONFIG_ID_peers_nodes,
                    listens         ? "peers.listen"
                    : has_directory ? "directory.address"
                                    : "peers.nodes",
                    error,
                    "nodes know each other by cluster_key, which is not set; give all of them the "
                    "same file of 32 bytes");
    }
    return KVF_OK;
}
