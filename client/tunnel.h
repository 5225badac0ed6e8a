/* SPDX-License-Identifier: Apache-2.0
 *
 * tunnel.h: a daemon on another node. Towards the session (client_session.c) a tunnel is a daemon
 * of this node: it has the other end of the socket and makes rings, staging memory and one arena
 * piece, into which hits come. What happens there goes over a link of its own
 * (transport/net_wire.h), by a thread of its own.
 *
 *   session                tunnel's thread                      daemon of the other node
 *   socket     <---------> CONTROL <------------------------->  its session's socket
 *   staging    ----------> STAGE  --------------------------->  staging
 *   submissions ---------> SUBMIT --------------------------->  submissions
 *   completions <--------- COMPLETE <-------------------------  completions
 *   piece      <---------- PIECE, checked at LANDED <---------  arena
 *
 * Addresses look like tcp://host:port?key=FILE&landing=256MiB. The key file is one line: the
 * tenant's name, a space, 64 hexadecimal digits (`kvferry client-key` makes it); without key=,
 * $KVFERRY_KEY names it. landing: memory for hits; without it twice the staging memory, at least
 * 16 MiB.
 */
#ifndef KVF_CLIENT_TUNNEL_H
#define KVF_CLIENT_TUNNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/net_wire.h"
#include "transport/proto_wire.h"

struct kvf_tunnel;

struct kvf_tunnel_address {
    char host[256];
    char port[8];
    char key_path[512];
    uint64_t landing_bytes; /* 0: by the staging memory's */
};

/* Is it the address of a daemon on another node, and not a socket's path? */
bool kvf_tunnel_is_address(const char *text);

/* KVF_OK; KVF_ERR_INVALID: why_out says what is wrong with it. */
int kvf_tunnel_address_parse(const char *text, struct kvf_tunnel_address *address_out,
                             char *why_out, size_t why_bytes);

/* What a key file says. KVF_OK; KVF_ERR_CONFIG: it cannot be read, or is none. */
int kvf_tunnel_key_read(const char *path, char tenant_out[KVF_NET_NAME_BYTES], uint8_t key_out[32],
                        char *why_out, size_t why_bytes);

/* Begin to connect, for a client that is going to say this HELLO. *socket_fd_out: as if a daemon's
 * socket had been connected to; what goes wrong later is a WELCOME that refuses, or a hang-up.
 * try_number: of this client, so that a name with several addresses is tried at each of them.
 * Blocks for what UCX takes to start here, some milliseconds. KVF_OK; KVF_ERR_BUSY: too many are
 * being closed; KVF_ERR_INVALID, _CONFIG, _UNSUPPORTED (no UCX or no libsodium), _NO_MEMORY. */
int kvf_tunnel_open(const char *address, const struct kvf_wire_hello *hello, uint32_t try_number,
                    struct kvf_tunnel **tunnel_out, int *socket_fd_out, char *why_out,
                    size_t why_bytes);

/* Why it has hung up: to be asked after that has been seen. */
const char *kvf_tunnel_why(const struct kvf_tunnel *tunnel);

/* Is the name of its host still being looked up? Any time. */
bool kvf_tunnel_is_resolving(const struct kvf_tunnel *tunnel);

/* Give it up: its thread closes the link and frees it, which takes a second at most. Never blocks;
 * exit() waits for that, 2 s at most. NULL is fine. */
void kvf_tunnel_close(struct kvf_tunnel *tunnel);

#endif /* KVF_CLIENT_TUNNEL_H */
