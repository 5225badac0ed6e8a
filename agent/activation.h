/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.h: listening sockets that the service manager has made and keeps (systemd's
 * LISTEN_FDS), so that clients which connect while there is no daemon wait for the next one.
 */
#ifndef KVF_AGENT_ACTIVATION_H
#define KVF_AGENT_ACTIVATION_H

#include <stddef.h>

#include "agent/config.h"

/* Take what $LISTEN_FDS says was passed to this process, and check that each descriptor listens at
 * one of the configuration's sockets, in the way that this socket is used. Nothing passed is fine.
 * Once, at start, before there are threads. Takes the variables out of the environment.
 * KVF_OK; KVF_ERR_CONFIG: text_out says which descriptor is wrong, why, and the cure. */
int kvf_activation_init(const struct kvf_config *config, char *text_out, size_t text_bytes);

/* The descriptor that listens at this path, non-blocking and close-on-exec; -1: none was passed, or
 * it has been taken. It is the caller's to close; the path stays the service manager's, who removes
 * it. At start only. */
int kvf_activation_take(const char *path);

#endif /* KVF_AGENT_ACTIVATION_H */
