/* SPDX-License-Identifier: Apache-2.0
 *
 * directory_lease.c: how a node says where it is, and what else needs no server.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agent/directory.h"
#include "base/fd.h"
#include "base/hash.h"
#include "transport/proto.h"

static void mac_of(const uint8_t cluster_key[32], const struct kvf_directory_lease *lease,
                   uint8_t mac_out[32])
{
    uint8_t key[KVF_HASH_KEY_BYTES];

    kvf_key_derive(cluster_key, "directory", NULL, 0, key);
    kvf_mac_compute(key, lease, offsetof(struct kvf_directory_lease, mac), mac_out);
}

void kvf_directory_lease_write(const struct kvf_directory_config *config,
                               struct kvf_directory_lease *lease_out)
{
    const struct sockaddr_in *v4 = (const void *)&config->listen.address;
    const struct sockaddr_in6 *v6 = (const void *)&config->listen.address;

    memset(lease_out, 0, sizeof(*lease_out));
    lease_out->magic = KVF_DIRECTORY_MAGIC;
    lease_out->incarnation = config->incarnation;
    memcpy(lease_out->name, config->name, sizeof(lease_out->name));
    if (config->listen.address.ss_family == AF_INET6) {
        lease_out->family = 6;
        lease_out->port = v6->sin6_port;
        memcpy(lease_out->ip, &v6->sin6_addr, 16);
    } else {
        lease_out->family = 4;
        lease_out->port = v4->sin_port;
        memcpy(lease_out->ip, &v4->sin_addr, 4);
    }
    mac_of(config->cluster_key, lease_out, lease_out->mac);
}

bool kvf_directory_lease_read(const uint8_t cluster_key[32], const void *data, size_t bytes,
                              struct kvf_directory_lease *lease_out,
                              struct kvf_net_address *address_out)
{
    struct sockaddr_in *v4 = (void *)&address_out->address;
    struct sockaddr_in6 *v6 = (void *)&address_out->address;
    uint8_t mac[32];

    if (bytes != sizeof(*lease_out)) {
        return false;
    }
    memcpy(lease_out, data, sizeof(*lease_out));
    mac_of(cluster_key, lease_out, mac);
    if (!kvf_mac_equal(mac, lease_out->mac) || lease_out->magic != KVF_DIRECTORY_MAGIC ||
        lease_out->incarnation == 0 || lease_out->port == 0 ||
        (lease_out->family != 4 && lease_out->family != 6) ||
        !kvf_proto_text_ok(lease_out->name, sizeof(lease_out->name))) {
        return false;
    }
    memset(address_out, 0, sizeof(*address_out));
    if (lease_out->family == 6) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = lease_out->port;
        memcpy(&v6->sin6_addr, lease_out->ip, 16);
        address_out->bytes = sizeof(*v6);
    } else {
        v4->sin_family = AF_INET;
        v4->sin_port = lease_out->port;
        memcpy(&v4->sin_addr, lease_out->ip, 4);
        address_out->bytes = sizeof(*v4);
    }
    return true;
}

int kvf_directory_password_read(const char *path, char secret_out[KVF_DIRECTORY_SECRET_BYTES],
                                char *why, size_t why_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, secret_out, KVF_DIRECTORY_SECRET_BYTES - 1);
    int error = errno;

    kvf_fd_close(&fd);
    if (n < 0) {
        (void)snprintf(why, why_bytes,
                       "password file %.150s cannot be read: %s; check the path and its "
                       "permissions",
                       path, strerror(error));
        return KVF_ERR_CONFIG;
    }
    secret_out[n] = '\0';
    secret_out[strcspn(secret_out, "\r\n")] = '\0';
    if (secret_out[0] == '\0' || (size_t)n == KVF_DIRECTORY_SECRET_BYTES - 1) {
        (void)snprintf(why, why_bytes,
                       "password file %.150s holds no line of 1 to 250 bytes; write one", path);
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}
