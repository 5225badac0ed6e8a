/* SPDX-License-Identifier: Apache-2.0
 *
 * tunnel_address.c: addresses of daemons on other nodes, and the keys for them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/limits.h"
#include "base/parse.h"
#include "client/tunnel.h"
#include "kvferry.h"
#include "transport/proto.h"

#define SCHEME        "tcp://"
#define KEY_HEX_BYTES 64
#define LANDING_MAX   KVF_PROTO_PIECE_MAX

bool kvf_tunnel_is_address(const char *text)
{
    return strncmp(text, SCHEME, sizeof(SCHEME) - 1) == 0;
}

static bool port_ok(const char *digits, size_t n)
{
    unsigned long port = strtoul(digits, NULL, 10);

    return n > 0 && strspn(digits, "0123456789") >= n && port >= 1 && port <= UINT16_MAX;
}

/* host:port or [address]:port, up to end. */
static int parse_host(const char *text, const char *end, struct kvf_tunnel_address *address)
{
    const char *colon = end;
    size_t host_bytes;

    while (colon > text && *colon != ':') {
        colon--;
    }
    host_bytes = (size_t)(colon - text);
    if (host_bytes > 2 && text[0] == '[' && colon[-1] == ']') {
        text++;
        host_bytes -= 2;
    } else if (memchr(text, ':', host_bytes) != NULL) {
        return KVF_ERR_INVALID;
    }
    if (host_bytes == 0 || host_bytes >= sizeof(address->host) || end == colon ||
        (size_t)(end - colon - 1) >= sizeof(address->port) ||
        !port_ok(colon + 1, (size_t)(end - colon - 1))) {
        return KVF_ERR_INVALID;
    }
    memcpy(address->host, text, host_bytes);
    memcpy(address->port, colon + 1, (size_t)(end - colon - 1));
    return KVF_OK;
}

/* One of the parameters behind the question mark, up to end. */
static int parse_parameter(const char *text, const char *end, struct kvf_tunnel_address *address,
                           char *why_out, size_t why_bytes)
{
    char value[sizeof(address->key_path)] = "";
    const char *equals = memchr(text, '=', (size_t)(end - text));
    size_t name_bytes = equals != NULL ? (size_t)(equals - text) : 0;

    if (equals == NULL || (size_t)(end - equals - 1) >= sizeof(value)) {
        (void)snprintf(why_out, why_bytes, "%.*s: no NAME=VALUE", (int)(end - text), text);
        return KVF_ERR_INVALID;
    }
    memcpy(value, equals + 1, (size_t)(end - equals - 1));
    if (name_bytes == 3 && memcmp(text, "key", 3) == 0 && value[0] != '\0') {
        memcpy(address->key_path, value, sizeof(value));
        return KVF_OK;
    }
    if (name_bytes == 7 && memcmp(text, "landing", 7) == 0) {
        char why[KVF_ERROR_TEXT_BYTES];
        int status = kvf_parse_size(value, &address->landing_bytes, why, sizeof(why));

        if (status == KVF_OK &&
            (address->landing_bytes == 0 || address->landing_bytes > LANDING_MAX)) {
            (void)snprintf(why, sizeof(why), "1 byte to 1 GiB");
            status = KVF_ERR_INVALID;
        }
        if (status != KVF_OK) {
            (void)snprintf(why_out, why_bytes, "landing=%.40s: %.150s", value, why);
        }
        return status;
    }
    (void)snprintf(why_out, why_bytes, "%.*s: the parameters are key=FILE and landing=SIZE",
                   (int)(end - text), text);
    return KVF_ERR_INVALID;
}

int kvf_tunnel_address_parse(const char *text, struct kvf_tunnel_address *address_out,
                             char *why_out, size_t why_bytes)
{
    struct kvf_tunnel_address address = {0};
    const char *host = text + sizeof(SCHEME) - 1;
    const char *end = host + strcspn(host, "?");
    int status = KVF_OK;

    if (!kvf_tunnel_is_address(text) || parse_host(host, end, &address) != KVF_OK) {
        (void)snprintf(why_out, why_bytes,
                       "%.100s: no address; write tcp://host:port, with [] around an IPv6 one "
                       "and a port from 1 to 65535",
                       text);
        return KVF_ERR_INVALID;
    }
    while (*end != '\0' && status == KVF_OK) {
        const char *parameter = end + 1;

        end = parameter + strcspn(parameter, "&");
        status = parse_parameter(parameter, end, &address, why_out, why_bytes);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (address.key_path[0] == '\0' && getenv("KVFERRY_KEY") != NULL) {
        (void)snprintf(address.key_path, sizeof(address.key_path), "%s", getenv("KVFERRY_KEY"));
    }
    if (address.key_path[0] == '\0') {
        (void)snprintf(why_out, why_bytes,
                       "%.100s: no key; add ?key=FILE, or set KVFERRY_KEY (kvferry client-key "
                       "makes one)",
                       text);
        return KVF_ERR_INVALID;
    }
    *address_out = address;
    return KVF_OK;
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "NAME HEX\n" */
static int parse_key(const char *text, char tenant_out[KVF_NET_NAME_BYTES], uint8_t key_out[32])
{
    size_t name_bytes = strcspn(text, " ");
    const char *hex = text + name_bytes + 1;

    if (name_bytes == 0 || name_bytes >= KVF_NET_NAME_BYTES || text[name_bytes] != ' ') {
        return KVF_ERR_CONFIG;
    }
    for (uint32_t i = 0; i < KEY_HEX_BYTES; i++) {
        int value = hex_value(hex[i]);

        if (value < 0) {
            return KVF_ERR_CONFIG;
        }
        key_out[i / 2] = (uint8_t)(i % 2 == 0 ? value << 4 : key_out[i / 2] | value);
    }
    if (hex[KEY_HEX_BYTES] != '\n' && hex[KEY_HEX_BYTES] != '\0') {
        return KVF_ERR_CONFIG;
    }
    memset(tenant_out, 0, KVF_NET_NAME_BYTES);
    memcpy(tenant_out, text, name_bytes);
    return kvf_proto_text_ok(tenant_out, KVF_NET_NAME_BYTES) ? KVF_OK : KVF_ERR_CONFIG;
}

int kvf_tunnel_key_read(const char *path, char tenant_out[KVF_NET_NAME_BYTES], uint8_t key_out[32],
                        char *why_out, size_t why_bytes)
{
    char text[KVF_NET_NAME_BYTES + KEY_HEX_BYTES + 3] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    int error_number = errno;
    int status;

    kvf_fd_close(&fd);
    if (bytes < 0) {
        (void)snprintf(why_out, why_bytes, "key file %.150s: %s", path, strerror(error_number));
        return KVF_ERR_CONFIG;
    }
    status = parse_key(text, tenant_out, key_out);
    if (status != KVF_OK) {
        (void)snprintf(why_out, why_bytes,
                       "key file %.150s: no key of a client; make one by kvferry client-key", path);
    }
    return status;
}
