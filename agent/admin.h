/* SPDX-License-Identifier: Apache-2.0
 *
 * admin.h: the HTTP side of the daemon: health, metrics and the questions of the kvferry command,
 * on a Unix socket and (health and metrics only) on an optional TCP address. One thread serves
 * both; it knows nothing of the reactor but what answers to kvf_agent_post say.
 */
#ifndef KVF_AGENT_ADMIN_H
#define KVF_AGENT_ADMIN_H

#include "agent/agent.h"
#include "agent/config.h"

enum kvf_admin_limits {
    KVF_ADMIN_CONNECTIONS_MAX = 32, /* on each of the two sockets */
    KVF_ADMIN_CONNECTION_BYTES = 16 << 10,
    KVF_ADMIN_BODY_BYTES_MAX = 4096,  /* bodies carry nothing and are thrown away */
    KVF_ADMIN_IDLE_S = 10,            /* a connection that says nothing is closed */
    KVF_ADMIN_BLOCKS_MAX = 1000,      /* rows of /v1/blocks in one answer */
    KVF_ADMIN_VERIFY_MAX = 256,       /* blocks that one /v1/verify checks */
    KVF_ADMIN_ANSWER_MS = 3000,       /* the reactor's time for a question */
    KVF_ADMIN_ANSWER_SLOW_MS = 30000, /* the same where drives have to be waited for */
};

struct kvf_admin;

/* Listen and start the thread. config and agent are borrowed until stop. Logs its own failures.
 * KVF_OK; KVF_ERR_BUSY: a daemon listens on that socket; KVF_ERR_CONFIG: the socket or the address
 * cannot be used; KVF_ERR_NO_MEMORY. */
int kvf_admin_start(const struct kvf_config *config, struct kvf_agent *agent,
                    struct kvf_admin **admin_out);

/* End the thread, answers in progress included, and close the sockets. Accepts NULL. Call before
 * the agent is destroyed; the reactor may have ended already. */
void kvf_admin_stop(struct kvf_admin *admin);

#endif /* KVF_AGENT_ADMIN_H */
