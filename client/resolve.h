/* SPDX-License-Identifier: Apache-2.0
 *
 * resolve.h: the addresses of a host's name, without waiting. A name server that does not answer
 * can keep getaddrinfo for minutes, and nothing can end that; so each look-up has a thread that is
 * left behind when nobody waits for it any more. There are KVF_RESOLVES_MAX of them in a process.
 *
 *   begin -> fd is readable -> take -> end
 *              end at any time
 */
#ifndef KVF_CLIENT_RESOLVE_H
#define KVF_CLIENT_RESOLVE_H

#include <stdint.h>

#include "transport/transport_ucx.h"

enum {
    KVF_RESOLVES_MAX = 16,
    KVF_RESOLVE_ADDRESSES_MAX = 32, /* of a name, the first ones */
};

struct kvf_resolve;

/* The address of a host that is given by its number, not its name. KVF_OK;
 * KVF_MISS: it is a name, to be looked up. Never blocks. */
int kvf_resolve_numeric(const char *host, const char *port, struct kvf_net_address *address_out);

/* Begin to look up a name. Any thread; the result is its caller's. KVF_OK; KVF_ERR_BUSY: too many
 * earlier ones have got no answer; KVF_ERR_NO_MEMORY: no memory, descriptor or thread. */
int kvf_resolve_begin(const char *host, const char *port, struct kvf_resolve **resolve_out);

/* Readable once there is an answer, and from then on. */
int kvf_resolve_fd(const struct kvf_resolve *resolve);

/* Its address, of several the number'th (modulo how many there are). KVF_OK; KVF_EMPTY: no answer
 * so far; KVF_ERR_NO_DAEMON: it has none, *why_out says why (static). */
int kvf_resolve_take(const struct kvf_resolve *resolve, uint32_t number,
                     struct kvf_net_address *address_out, const char **why_out);

/* Forget it, answered or not. NULL is fine. */
void kvf_resolve_end(struct kvf_resolve *resolve);

#endif /* KVF_CLIENT_RESOLVE_H */
