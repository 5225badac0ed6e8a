/* SPDX-License-Identifier: Apache-2.0
 *
 * admin_start.c: what the admin server says before the daemon's loop answers questions: that it
 * lives, that it is not ready, and how far it is.
 */
#include <inttypes.h>

#include "agent/admin_internal.h"
#include "agent/usage.h"

#define HTTP_UNAVAILABLE 503

bool kvf_admin_is_starting(const struct kvf_admin_api *api, struct kvf_admin_reply *reply)
{
    struct kvf_agent_start start;

    if (!kvf_agent_starting(api->agent, &start)) {
        return false;
    }
    kvf_admin_reply_status(reply, HTTP_UNAVAILABLE, kvf_status_name(KVF_ERR_BUSY), start.text);
    return true;
}

struct json_t *kvf_admin_start_json(const struct kvf_agent_start *start, struct json_t *text)
{
    json_t *progress = json_pack(
        "{s:o, s:I, s:I, s:I}", "text", text, "looked_bytes", (json_int_t)start->looked_bytes,
        "total_bytes", (json_int_t)start->total_bytes, "blocks", (json_int_t)start->blocks);

    return json_pack("{s:s, s:o, s:I, s:b, s:b, s:o}", "version", KVF_AGENT_VERSION, "incarnation",
                     json_sprintf("%016" PRIx64, start->incarnation), "uptime_s",
                     (json_int_t)start->uptime_s, "ready", 0, "draining", 0, "starting", progress);
}
