/* SPDX-License-Identifier: Apache-2.0
 *
 * service.c: namespaces that an operator has taken out of service (kvferry disable): their clients
 * get misses, their puts are refused, and what is stored stays. It holds until kvferry enable or
 * the daemon's end.
 */
#include "agent/core.h"

#include <stdio.h>

#include "base/log.h"

static bool is_named(const struct kvf_service *service, uint64_t namespace_id)
{
    for (uint32_t i = 0; i < service->n_off; i++) {
        if (service->off[i] == namespace_id) {
            return true;
        }
    }
    return false;
}

bool kvf_service_has(const struct kvf_agent *agent, uint64_t namespace_id)
{
    return !agent->service.is_all_off && !is_named(&agent->service, namespace_id);
}

/* Tell the namespaces, so that a request need not look through the list. */
static void apply(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < KVF_INDEX_NAMESPACES_MAX; i++) {
        struct kvf_namespace *ns = &agent->namespaces[i];

        ns->is_off = ns->id != 0 && !kvf_service_has(agent, ns->id);
    }
    agent->metrics.disabled = agent->service.is_all_off;
    agent->metrics.disabled_namespaces = agent->service.n_off;
}

static void say(const struct kvf_agent *agent, const char *what, uint64_t namespace_id, char *text,
                size_t bytes)
{
    char name[48] = "all namespaces";

    if (namespace_id != 0) {
        (void)snprintf(name, sizeof(name), "namespace %016llx", (unsigned long long)namespace_id);
    }
    (void)snprintf(text, bytes, "%s %s; out of service now: %s, %u by name", name, what,
                   agent->service.is_all_off ? "all" : "not all", agent->service.n_off);
    kvf_log(KVF_LOG_WARNING, "%s", text);
}

int kvf_service_disable(struct kvf_agent *agent, uint64_t namespace_id, char *text, size_t bytes)
{
    struct kvf_service *service = &agent->service;

    if (namespace_id == 0) {
        service->is_all_off = true;
    } else if (!is_named(service, namespace_id)) {
        if (service->n_off == KVF_SERVICE_OFF_MAX) {
            (void)snprintf(text, bytes,
                           "%d namespaces are disabled already; enable some, or disable all",
                           KVF_SERVICE_OFF_MAX);
            return KVF_ERR_BUSY;
        }
        service->off[service->n_off++] = namespace_id;
    }
    apply(agent);
    say(agent, "disabled", namespace_id, text, bytes);
    return KVF_OK;
}

int kvf_service_enable(struct kvf_agent *agent, uint64_t namespace_id, char *text, size_t bytes)
{
    struct kvf_service *service = &agent->service;
    uint32_t left = 0;

    if (namespace_id != 0 && service->is_all_off) {
        (void)snprintf(text, bytes, "all namespaces are disabled; enable them all first");
        return KVF_ERR_INVALID;
    }
    service->is_all_off = false;
    for (uint32_t i = 0; i < service->n_off; i++) {
        if (namespace_id != 0 && service->off[i] != namespace_id) {
            service->off[left++] = service->off[i];
        }
    }
    service->n_off = left;
    apply(agent);
    say(agent, "enabled", namespace_id, text, bytes);
    return KVF_OK;
}
