/* SPDX-License-Identifier: Apache-2.0
 *
 * client_report.c: what only the engine knows, summed up until the ring has room for it.
 */
#include "client/client_internal.h"

#include <assert.h>

#include "transport/proto_shm.h"

static_assert(KVF_REPORT_GPU_DECODE_US == KVF_REPORT_KIND_MAX, "the last kind that there is");

int kvf_report(struct kvf_client *client, int kind, uint64_t amount)
{
    if (client == NULL || kind < 1 || kind > KVF_REPORT_KIND_MAX || amount > KVF_REPORT_MAX) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    client->reports[kind] += amount;
    kvf_reports_send(client);
    kvf_client_leave(client);
    return KVF_OK;
}

void kvf_reports_send(struct kvf_client *client)
{
    struct kvf_session *session = client->session;
    uint64_t kind_max;

    if (!kvf_session_is_live(client)) {
        return;
    }
    kind_max = kvf_shm_report_kind_max(session->welcome.version);
    for (uint64_t kind = 1; kind <= kind_max; kind++) {
        uint64_t amount = client->reports[kind] < KVF_REPORT_MAX ? client->reports[kind]
                                                                 : KVF_REPORT_MAX;

        if (amount != 0) {
            if (!kvf_lease_send_if_room(session, KVF_OP_REPORT,
                                        amount << KVF_REPORT_KIND_BITS | kind)) {
                return; /* with the next one, or the next look at the daemon */
            }
            client->reports[kind] -= amount;
        }
    }
}
