/* SPDX-License-Identifier: Apache-2.0
 *
 * reload.c: read the files of calibration.dir again while clients are served, because of SIGHUP or
 * the admin thread. A thread that may wait reads; the reactor takes the new list, and a session
 * keeps the one that its plan is of until it ends.
 */
#include "agent/core.h"

#include <stdio.h>
#include <stdlib.h>

#include "agent/calibration.h"
#include "base/log.h"

/* Owner: the reactor, but calibrations and status until done: the thread that reads. */
struct kvf_reload {
    struct kvf_work work;
    struct kvf_agent *agent;
    struct kvf_control *control; /* who asked; NULL: a signal, or nobody waits any more */
    struct kvf_calibrations *calibrations;
    int status;
};

static void reload_run(struct kvf_work *work)
{
    struct kvf_reload *reload = work->owner;

    reload->status = kvf_calibrations_read(reload->agent->config->calibration_dir,
                                           &reload->calibrations);
}

/* Clients whose profile was replaced, and for whose model it has passed now. */
static uint32_t clients_behind(const struct kvf_agent *agent)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        const struct kvf_session *session = &agent->sessions[i];

        n += session->state == KVF_SESSION_READY && session->is_replaced &&
             kvf_calibrations_find(agent->calibrations, session->hello.profile,
                                   session->hello.weights_digest,
                                   session->hello.adapter_digest) != NULL;
    }
    return n;
}

static void reload_done(struct kvf_work *work)
{
    struct kvf_reload *reload = work->owner;
    struct kvf_agent *agent = reload->agent;
    struct kvf_control *control = reload->control;
    int status = reload->status;

    agent->reload = NULL;
    if (status == KVF_OK) {
        uint32_t before = agent->calibrations->n;
        uint32_t behind;
        char text[sizeof(control->text)];

        kvf_calibrations_release(agent->calibrations);
        agent->calibrations = reload->calibrations;
        behind = clients_behind(agent);
        (void)snprintf(text, sizeof(text),
                       "%u profiles have passed, %u before; %u clients have another profile in "
                       "place of one of them until they attach again",
                       agent->calibrations->n, before, behind);
        kvf_log(KVF_LOG_INFO, "calibration.dir read again: %s", text);
        if (control != NULL) {
            (void)snprintf(control->text, sizeof(control->text), "%s", text);
        }
    } else {
        kvf_calibrations_release(reload->calibrations);
        kvf_log(KVF_LOG_WARNING, "calibration.dir: what was read before stays in use");
        if (control != NULL) {
            (void)snprintf(control->text, sizeof(control->text),
                           "calibration.dir %.120s cannot be read (see the log); what was read "
                           "before stays in use",
                           agent->config->calibration_dir);
        }
    }
    free(reload);
    kvf_answer_finish(control, status);
}

void kvf_reload_start(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_work_queue *queue = agent->setup != NULL ? agent->setup : agent->work;
    struct kvf_reload *reload;

    if (agent->calibrations == NULL) {
        kvf_log(KVF_LOG_INFO, "nothing to read again: calibration.dir is not set");
        if (control != NULL) {
            (void)snprintf(control->text, sizeof(control->text),
                           "calibration.dir is not set, and it is what is read again; other "
                           "options need a restart");
        }
        kvf_answer_finish(control, KVF_ERR_REFUSED);
        return;
    }
    if (agent->reload != NULL) {
        if (control != NULL) {
            (void)snprintf(control->text, sizeof(control->text),
                           "calibration.dir is being read again already; try again");
        }
        kvf_answer_finish(control, KVF_ERR_BUSY);
        return;
    }
    reload = calloc(1, sizeof(*reload));
    if (reload == NULL) {
        kvf_answer_finish(control, KVF_ERR_NO_MEMORY);
        return;
    }
    *reload = (struct kvf_reload){
        .work = {.run = reload_run, .done = reload_done, .owner = reload},
        .agent = agent,
        .control = control,
    };
    if (queue->ops->submit(queue, &reload->work) != KVF_OK) {
        free(reload);
        kvf_answer_finish(control, KVF_ERR_BUSY);
        return;
    }
    agent->reload = reload;
}

void kvf_reload_poll(struct kvf_agent *agent)
{
    if (atomic_load(&agent->reload_asked) && agent->reload == NULL) {
        atomic_store(&agent->reload_asked, false);
        kvf_reload_start(agent, NULL);
    }
}

void kvf_reload_abandon(struct kvf_agent *agent)
{
    if (agent->reload != NULL && agent->reload->control != NULL) {
        kvf_answer_finish(agent->reload->control, KVF_ERR_TIER_OFF);
        agent->reload->control = NULL;
    }
}

void kvf_reload_free(struct kvf_agent *agent)
{
    if (agent->reload != NULL) {
        kvf_calibrations_release(agent->reload->calibrations);
        free(agent->reload);
        agent->reload = NULL;
    }
}
