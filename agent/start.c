/* SPDX-License-Identifier: Apache-2.0
 *
 * start.c: see start.h. The thread that opens the agent is busy with drives, so another one, which
 * knows the listening sockets and nothing else of the agent, answers clients until the reactor can.
 */
#include "agent/start.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agent/core.h"
#include "agent/notify.h"
#include "base/fd.h"

#define PATIENCE_MS 1000 /* a start that takes no longer makes clients wait, and refuses nobody */
#define BUSY_MS     100  /* until it is looked again whether there is a descriptor */
#define HELLO_MS    20   /* for a client's first message, which follows its connect at once */

/* ----------------------------------------------------------------------------------------------
 * How far
 */
#define RECOVERING "recovering %s: %llu of %llu MiB looked at, %llu blocks so far"

/* The words that RECOVERING wants. */
struct recovering {
    const char *path;
    unsigned long long looked_mib, total_mib, blocks;
};

static struct recovering recovering_of(const struct kvf_agent *agent)
{
    const struct kvf_start *start = &agent->start;
    uint32_t drive = atomic_load_explicit(&start->drive, memory_order_relaxed);

    return (struct recovering){
        .path = agent->config->nvme[drive].path,
        .looked_mib = atomic_load_explicit(&start->looked_bytes, memory_order_relaxed) >> 20,
        .total_mib = atomic_load_explicit(&start->total_bytes, memory_order_relaxed) >> 20,
        .blocks = atomic_load_explicit(&start->blocks, memory_order_relaxed),
    };
}

static const char *phase_text(uint8_t phase)
{
    return phase == KVF_START_MEMORY ? "taking memory for the arena" : "opening tables and stores";
}

bool kvf_agent_starting(const struct kvf_agent *agent, struct kvf_agent_start *start_out)
{
    uint8_t phase = atomic_load_explicit(&agent->start.phase, memory_order_relaxed);

    *start_out = (struct kvf_agent_start){
        .incarnation = agent->incarnation,
        .uptime_s = (kvf_env_now_ns(&agent->env) - agent->started_ns) / KVF_NS_PER_S,
    };
    if (phase == KVF_START_RECOVERING) {
        struct recovering r = recovering_of(agent);

        start_out->looked_bytes = r.looked_mib << 20;
        start_out->total_bytes = r.total_mib << 20;
        start_out->blocks = r.blocks;
        (void)snprintf(start_out->text, sizeof(start_out->text), RECOVERING, r.path, r.looked_mib,
                       r.total_mib, r.blocks);
    } else {
        (void)snprintf(start_out->text, sizeof(start_out->text), "%s", phase_text(phase));
    }
    return phase != KVF_START_OVER;
}

static void tell_manager(const struct kvf_agent *agent)
{
    struct recovering r = recovering_of(agent);

    kvf_notify_progress(RECOVERING, r.path, r.looked_mib, r.total_mib, r.blocks);
}

/* Most starts are over before anybody would ask how far they are. */
static bool is_long(const struct kvf_agent *agent)
{
    return kvf_env_now_ns(&agent->env) - agent->started_ns > PATIENCE_MS * KVF_NS_PER_MS;
}

void kvf_start_phase(struct kvf_agent *agent, enum kvf_start_phase phase)
{
    atomic_store_explicit(&agent->start.phase, (uint8_t)phase, memory_order_relaxed);
    if (phase == KVF_START_MEMORY && is_long(agent)) {
        kvf_notify_progress("%s", phase_text(KVF_START_MEMORY)); /* takes its time, too */
    }
}

void kvf_start_drive(struct kvf_agent *agent, uint32_t drive)
{
    struct kvf_start *start = &agent->start;

    atomic_store_explicit(&start->drive, drive, memory_order_relaxed);
    atomic_store_explicit(&start->looked_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&start->total_bytes, 0, memory_order_relaxed);
    kvf_start_phase(agent, KVF_START_RECOVERING);
}

void kvf_start_looked(struct kvf_agent *agent, uint64_t looked_bytes, uint64_t total_bytes)
{
    atomic_store_explicit(&agent->start.looked_bytes, looked_bytes, memory_order_relaxed);
    atomic_store_explicit(&agent->start.total_bytes, total_bytes, memory_order_relaxed);
    if (is_long(agent) || atomic_load_explicit(&agent->start.blocks, memory_order_relaxed) != 0) {
        tell_manager(agent);
    }
}

void kvf_start_found(struct kvf_agent *agent, uint64_t blocks)
{
    atomic_store_explicit(&agent->start.blocks, blocks, memory_order_relaxed);
    tell_manager(agent);
}

/* ----------------------------------------------------------------------------------------------
 * Clients meanwhile
 */
static int refuse_one(struct kvf_agent *agent, const struct kvf_listener *listener)
{
    struct kvf_agent_start start;
    struct pollfd hello = {.events = POLLIN};
    char text[KVF_WIRE_TEXT_BYTES];
    int status = kvf_seqpacket_accept(&listener->listener, &hello.fd);

    if (status != KVF_OK) {
        return status;
    }
    (void)poll(&hello, 1, HELLO_MS);
    (void)kvf_agent_starting(agent, &start);
    (void)snprintf(text, sizeof(text), "the daemon starts: %.200s; try again later", start.text);
    kvf_session_refuse_socket(hello.fd, text);
    agent->start.refused++;
    return KVF_OK;
}

static void *refuse_main(void *arg)
{
    struct kvf_agent *agent = arg;
    struct pollfd fds[1 + KVF_CONFIG_SOCKETS_MAX] = {
        {.fd = agent->start.stop_fd, .events = POLLIN}};

    for (uint32_t i = 0; i < agent->n_listeners; i++) {
        fds[1 + i] = (struct pollfd){.fd = agent->listeners[i].listener.fd, .events = POLLIN};
    }
    if (poll(fds, 1, PATIENCE_MS) != 0) {
        return NULL;
    }
    for (;;) {
        if (poll(fds, 1 + agent->n_listeners, -1) < 0) {
            return NULL; /* out of memory: they wait */
        }
        if (fds[0].revents != 0) {
            return NULL;
        }
        for (uint32_t i = 0; i < agent->n_listeners; i++) {
            if (fds[1 + i].revents != 0 &&
                refuse_one(agent, &agent->listeners[i]) == KVF_ERR_BUSY &&
                poll(fds, 1, BUSY_MS) != 0) { /* no descriptor: it is readable all the time */
                return NULL;
            }
        }
    }
}

void kvf_start_begin_refusing(struct kvf_agent *agent)
{
    struct kvf_start *start = &agent->start;
    sigset_t all;
    sigset_t before;
    int error;

    if (agent->n_listeners == 0) {
        return;
    }
    start->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (start->stop_fd < 0) {
        kvf_log(KVF_LOG_WARNING, "start: eventfd: %s; clients wait until it is over",
                strerror(errno));
        return;
    }
    /* the process's signals are the opener's, which becomes the reactor */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&start->thread, NULL, refuse_main, agent);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        kvf_log(KVF_LOG_WARNING, "start: no thread: %s; clients wait until it is over",
                strerror(error));
        kvf_fd_close(&start->stop_fd);
        return;
    }
    pthread_setname_np(start->thread, "kvf-start");
    start->has_thread = true;
}

void kvf_start_end_refusing(struct kvf_agent *agent)
{
    struct kvf_start *start = &agent->start;

    if (!start->has_thread) {
        return;
    }
    eventfd_write(start->stop_fd, 1);
    pthread_join(start->thread, NULL);
    start->has_thread = false;
    kvf_fd_close(&start->stop_fd);
    agent->metrics.attach_refused += start->refused;
}
