/* SPDX-License-Identifier: Apache-2.0
 *
 * predecessor.c: memory of the daemon before, which its clients map until they notice that it has
 * gone. While they do, this one's arena does not grow beyond its first area: node memory would hold
 * two arenas. A client notices with its next call, and unmaps when it has given its leases back, or
 * after ten seconds. It is waited for for dram.restart_wait, and then no longer: memory that is
 * free counts alone.
 */
#include "agent/core.h"

#include <errno.h>
#include <string.h>

#include "transport/held.h"

static bool is_held(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->config->n_sockets; i++) {
        if (kvf_held_by_others(agent->config->sockets[i].path, agent->incarnation)) {
            return true;
        }
    }
    return false;
}

void kvf_predecessor_make(const char *socket_path, mode_t mode, int64_t gid)
{
    if (kvf_held_make(socket_path, mode, gid >= 0, (gid_t)gid) != KVF_OK) {
        kvf_log(KVF_LOG_WARNING,
                "%s.held cannot be made: %s; after a restart there may be two arenas in memory "
                "until clients have left the first one",
                socket_path, strerror(errno));
    }
}

bool kvf_predecessor_allows(void *ctx, uint64_t bytes)
{
    struct kvf_agent *agent = ctx;
    struct kvf_predecessor *predecessor = &agent->predecessor;
    uint64_t now_ns = kvf_env_now_ns(&agent->env);
    uint64_t waited_ns = now_ns - agent->started_ns;

    if (!predecessor->is_over && !is_held(agent)) {
        predecessor->is_over = true;
        if (predecessor->is_said) {
            kvf_log(KVF_LOG_INFO, "clients have left the daemon before after %llu ms",
                    (unsigned long long)(waited_ns / KVF_NS_PER_MS));
        }
    } else if (!predecessor->is_over &&
               waited_ns >= agent->config->dram_restart_wait * KVF_NS_PER_S) {
        predecessor->is_over = true;
        kvf_log(KVF_LOG_WARNING, "clients still map memory of the daemon before, after "
                                 "dram.restart_wait: the arena grows beside it as far as memory is "
                                 "free; engines that make no call keep it");
    } else if (!predecessor->is_over && predecessor->has_first) {
        if (!predecessor->is_said) {
            kvf_log(KVF_LOG_INFO, "clients still map memory of the daemon before: the arena grows "
                                  "when they have left it");
            predecessor->is_said = true;
        }
        return false;
    }
    predecessor->has_first = true;
    return kvf_dram_memory_allows(NULL, bytes);
}
