/* SPDX-License-Identifier: Apache-2.0
 *
 * loop.c: the reactor. One thread, one poll set; open kvf_agent_run to see a turn of it.
 */
#include "agent/core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/activation.h"
#include "agent/calibration.h"
#include "agent/notify.h"
#include "agent/observe.h"
#include "agent/peers.h"
#include "base/failpoint.h"
#include "base/fd.h"
#include "base/hash.h"
#include "base/thread.h"

#define EVENTS_MAX 64
/* Looking again is cheaper than a sleep and a wake-up if the next submission is near: after each
 * one the reactor looks for about twice the recent distance between them, at least SPIN_NS_MIN, and
 * for SPIN_NS_MIN only when they have become rarer than SPIN_NS_MAX. */
#define SPIN_NS_MIN (10 * KVF_NS_PER_US)
#define SPIN_NS_MAX (150 * KVF_NS_PER_US)
/* On a CPU that others want, perhaps a client, looking takes the time in which something could be
 * submitted. Once the reactor has lost its CPU it looks for SPIN_NS_RIVALS only, for a while that
 * doubles each time. Not at all would be worse: each submission of a batch would wake it. */
#define SPIN_NS_RIVALS (2 * KVF_NS_PER_US)
#define MODEST_NS_MIN  (250 * KVF_NS_PER_US)
#define MODEST_NS_MAX  (16 * KVF_NS_PER_MS)
#define CHECK_NS       (5 * KVF_NS_PER_US)   /* below, nobody else had the CPU in between */
#define ASK_NS         (100 * KVF_NS_PER_US) /* the kernel counts losses, and asking it costs */
#define POLL_NS        (50 * KVF_NS_PER_US)  /* descriptors need no more while rings are busy */
#define SLEEP_NS_MAX   (KVF_SHM_LOOK_MS * KVF_NS_PER_MS) /* timers need no more than this */
#define DRAIN_GRACE_NS (200 * KVF_NS_PER_MS)

/* ----------------------------------------------------------------------------------------------
 * Waking and watching
 */
void kvf_agent_wake(void *ctx)
{
    struct kvf_agent *agent = ctx;
    uint64_t one = 1;

    /* Both sides exchange, and exchanges of one word have one order: either the reactor's comes
     * later and its last look sees what was queued before ours, or ours finds it asleep. */
    if (atomic_exchange(&agent->is_sleeping, false)) {
        ssize_t written = write(agent->waker_fd, &one, sizeof(one));

        (void)written; /* it is never read, and full only after 2^64 wake-ups */
    }
}

int kvf_loop_add(struct kvf_agent *agent, int fd, uint32_t events, struct kvf_fd_source *source)
{
    struct epoll_event event = {.events = events, .data.ptr = source};

    return epoll_ctl(agent->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0
               ? KVF_OK
               : kvf_status_from_errno(errno);
}

void kvf_loop_change(struct kvf_agent *agent, int fd, uint32_t events, struct kvf_fd_source *source)
{
    struct epoll_event event = {.events = events, .data.ptr = source};

    (void)epoll_ctl(agent->epoll_fd, EPOLL_CTL_MOD, fd, &event);
}

void kvf_loop_remove(struct kvf_agent *agent, int fd)
{
    (void)epoll_ctl(agent->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

static void dispatch(struct kvf_agent *agent, const struct epoll_event *event)
{
    struct kvf_fd_source *source = event->data.ptr;

    switch ((enum kvf_source_kind)source->kind) {
    case KVF_SOURCE_LISTENER:
        for (int i = 0; i < KVF_ACCEPTS_A_TURN; i++) {
            kvf_session_accept(agent, source->owner);
        }
        break;
    case KVF_SOURCE_SESSION_SOCKET:
        kvf_session_socket_ready(source->owner, event->events);
        break;
    case KVF_SOURCE_GPU_SOCKET:
        kvf_gpu_host_socket_ready(source->owner);
        break;
    case KVF_SOURCE_GPU_EXIT:
        kvf_gpu_host_exit_ready(source->owner);
        break;
    case KVF_SOURCE_SESSION_EVENTFD:
    case KVF_SOURCE_WAKER:
        break; /* never read: edges are enough, and everything is looked at in any case */
    }
}

/* ----------------------------------------------------------------------------------------------
 * Parts of a turn
 */

/* One turn for each client, beginning where the last one ended. */
static bool serve_rings(struct kvf_agent *agent)
{
    bool any = false;

    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        uint32_t at = (agent->session_turn + i) % agent->sessions_high;
        struct kvf_session *session = &agent->sessions[at];

        if (session->is_broken) {
            kvf_session_end(session, "does not read its socket");
        } else if (session->state == KVF_SESSION_READY) {
            any |= kvf_request_turn(session);
        }
    }
    agent->session_turn++;
    return any;
}

static bool wake_clients(struct kvf_agent *agent)
{
    bool any = false;

    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        if (agent->sessions[i].wants_wake) {
            kvf_session_wake(&agent->sessions[i]);
            any = true;
        }
    }
    return any;
}

static void run_timers(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY &&
            kvf_request_deadline_ns(session) <= agent->now_ns) {
            kvf_request_expire(session);
        } else if (session->state == KVF_SESSION_HELLO && session->held_until_ns != 0 &&
                   session->held_until_ns <= agent->now_ns) {
            kvf_session_unhold(session);
        }
    }
    if (agent->now_ns < agent->second_ns) {
        return;
    }
    agent->second_ns = agent->now_ns + KVF_NS_PER_S / 2;
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        kvf_session_tick(&agent->sessions[i]);
    }
    kvf_room_tick(agent);
    kvf_observe_tick(agent);
    kvf_gpu_host_tick(agent->gpu_host);
}

static uint64_t next_deadline_ns(struct kvf_agent *agent)
{
    uint64_t deadline_ns = agent->now_ns + SLEEP_NS_MAX;
    uint64_t place_ns = kvf_place_deadline_ns(agent);

    deadline_ns = place_ns < deadline_ns ? place_ns : deadline_ns;
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        const struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY) {
            uint64_t request_ns = kvf_request_deadline_ns(session);

            deadline_ns = request_ns < deadline_ns ? request_ns : deadline_ns;
        } else if (session->state == KVF_SESSION_HELLO && session->held_until_ns != 0 &&
                   session->held_until_ns < deadline_ns) {
            deadline_ns = session->held_until_ns;
        }
    }
    return deadline_ns;
}

/* Tell clients and workers that they have to wake us, then look once more. False: there is work. */
static bool prepare_sleep(struct kvf_agent *agent)
{
    bool may_sleep = true;

    (void)atomic_exchange(&agent->is_sleeping, true);
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY) {
            /* one that waits for its own flights takes no more submissions until they land */
            may_sleep &= kvf_ring_daemon_sleep(&session->ring) || session->active != NULL;
        }
    }
    if (kvf_place_poll(agent) || agent->sweep.end != 0 || atomic_load(&agent->n_controls) > 0 ||
        (atomic_load(&agent->reload_asked) && agent->reload == NULL) ||
        atomic_load(&agent->stop_asked) != agent->is_draining) {
        may_sleep = false;
    }
    return may_sleep;
}

static void end_sleep(struct kvf_agent *agent)
{
    atomic_store(&agent->is_sleeping, false);
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        if (agent->sessions[i].state == KVF_SESSION_READY) {
            kvf_ring_daemon_awake(&agent->sessions[i].ring);
        }
    }
}

/* Take descriptors that are ready; sleep first if nothing else is to be done. */
static int wait_events(struct kvf_agent *agent, bool idle)
{
    struct epoll_event events[EVENTS_MAX];
    uint64_t begin_ns = kvf_env_now_ns(&agent->env);
    int timeout_ms = 0;
    int n;

    if (idle && prepare_sleep(agent)) {
        uint64_t deadline_ns = next_deadline_ns(agent);

        timeout_ms = deadline_ns <= begin_ns
                         ? 0
                         : (int)((deadline_ns - begin_ns + KVF_NS_PER_MS - 1) / KVF_NS_PER_MS);
    }
    n = epoll_wait(agent->epoll_fd, events, EVENTS_MAX, timeout_ms);
    if (idle) {
        end_sleep(agent);
    }
    agent->now_ns = kvf_env_now_ns(&agent->env);
    agent->polled_ns = agent->now_ns;
    *(timeout_ms > 0 ? &agent->metrics.loop_idle_ns
                     : &agent->metrics.loop_busy_ns) += agent->now_ns - begin_ns;
    if (n < 0 && errno != EINTR) {
        kvf_log(KVF_LOG_ERROR, "poll set: %s", strerror(errno));
        return KVF_ERR_INTERNAL;
    }
    for (int i = 0; i < n; i++) {
        dispatch(agent, &events[i]);
    }
    return KVF_OK;
}

/* The same while there is work: descriptors are looked at from time to time only. */
static int glance_events(struct kvf_agent *agent)
{
    uint64_t now_ns = kvf_env_now_ns(&agent->env);

    if (now_ns - agent->polled_ns >= POLL_NS) {
        return wait_events(agent, false);
    }
    agent->metrics.loop_busy_ns += now_ns - agent->now_ns;
    agent->now_ns = now_ns;
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Draining
 */
static void begin_drain(struct kvf_agent *agent)
{
    agent->is_draining = true;
    agent->drain_deadline_ns = agent->now_ns + agent->config->drain_timeout * KVF_NS_PER_S;
    atomic_store(&agent->is_ready, false);
    kvf_log(KVF_LOG_INFO, "draining: %u clients, %llu MiB to write", agent->sessions_count,
            (unsigned long long)(agent->writeback_bytes >> 20));
    for (uint32_t i = 0; i < agent->n_listeners; i++) {
        kvf_loop_remove(agent, agent->listeners[i].listener.fd);
        kvf_seqpacket_listener_close(&agent->listeners[i].listener);
    }
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        if (agent->sessions[i].state == KVF_SESSION_READY) {
            kvf_session_say_bye(&agent->sessions[i], KVF_ERR_TIER_OFF);
        }
    }
}

/* Everything that can be kept is on its drive, and nobody waits for anything? */
static bool is_drained(struct kvf_agent *agent)
{
    bool drained = kvf_place_is_quiet(agent);

    for (uint32_t i = 0; drained && i < agent->n_drives; i++) {
        struct kvf_tier *tier = agent->drives[i].tier;

        drained = tier->ops->drained == NULL || tier->ops->drained(tier);
    }
    return drained;
}

/* After a grace for what clients hold, they are ended, whatever they do; then only writes count. */
static void end_sessions(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        kvf_session_end(&agent->sessions[i], NULL); /* leases are published as lost in here */
    }
}

/* True: run returns *status_out. */
static bool drain_step(struct kvf_agent *agent, int *status_out)
{
    uint64_t timeout_ns = agent->config->drain_timeout * KVF_NS_PER_S;
    uint64_t grace_ns = timeout_ns < DRAIN_GRACE_NS ? timeout_ns : DRAIN_GRACE_NS;
    uint64_t began_ns = agent->drain_deadline_ns - timeout_ns;

    if (agent->now_ns >= began_ns + grace_ns) {
        end_sessions(agent);
    }
    if (agent->sessions_count == 0 && is_drained(agent)) {
        *status_out = KVF_OK;
        return true;
    }
    kvf_notify_progress("draining: %u clients, %llu MiB to write", agent->sessions_count,
                        (unsigned long long)(agent->writeback_bytes >> 20));
    *status_out = KVF_ERR_TIMEOUT;
    return agent->now_ns >= agent->drain_deadline_ns;
}

/* ----------------------------------------------------------------------------------------------
 * The reactor
 */
/* Everything but waiting. True: something was done. */
static bool serve(struct kvf_agent *agent)
{
    /* rings before tiers, so that what they start can complete in this very turn */
    bool any = serve_rings(agent);

    any |= kvf_place_poll(agent);
    /* the admin's questions see a state between requests */
    kvf_answer_poll(agent);
    kvf_reload_poll(agent);
    run_timers(agent);
    kvf_hbm_tell(agent);
    /* completions of all steps go out together: one wake-up a client and turn */
    any |= wake_clients(agent);
    return any;
}

/* What follows the descriptors. False: the reactor is to end with *status_out. */
static bool turn(struct kvf_agent *agent, bool *busy_out, int *status_out)
{
    *busy_out = serve(agent);
    if (atomic_load(&agent->stop_asked) && !agent->is_draining) {
        begin_drain(agent);
    }
    if (*status_out != KVF_OK) {
        return false;
    }
    return !agent->is_draining || !drain_step(agent, status_out);
}

bool kvf_agent_turn(struct kvf_agent *agent, int *status_out)
{
    bool busy;

    *status_out = wait_events(agent, false);
    return turn(agent, &busy, status_out);
}

/* Who else wants the CPU of kvf_agent_run. */
struct rivals {
    long losses_count; /* how often the thread has lost its CPU */
    uint64_t asked_ns;
    uint64_t modest_until_ns;
    uint64_t modest_ns; /* how long the last time was */
};

static void look_for_rivals(struct rivals *rivals, uint64_t now_ns)
{
    struct rusage usage;

    if (now_ns - rivals->asked_ns < ASK_NS || getrusage(RUSAGE_THREAD, &usage) != 0) {
        return;
    }
    rivals->asked_ns = now_ns;
    if (usage.ru_nivcsw != rivals->losses_count) {
        rivals->losses_count = usage.ru_nivcsw;
        rivals->modest_ns = 2 * rivals->modest_ns + MODEST_NS_MIN;
        rivals->modest_ns = rivals->modest_ns < MODEST_NS_MAX ? rivals->modest_ns : MODEST_NS_MAX;
        rivals->modest_until_ns = now_ns + rivals->modest_ns;
    } else if (now_ns >= rivals->modest_until_ns) {
        rivals->modest_ns /= 2;
    }
}

/* How long to look for the next submission, from the distances of the last ones. */
static uint64_t spin_ns(struct kvf_agent *agent, struct rivals *rivals)
{
    uint64_t gap_ns = agent->now_ns - agent->busy_ns;

    agent->busy_ns = agent->now_ns;
    if (gap_ns >= CHECK_NS) {
        look_for_rivals(rivals, agent->now_ns);
    }
    gap_ns = gap_ns > 2 * SPIN_NS_MAX ? 2 * SPIN_NS_MAX : gap_ns;
    agent->gap_ns = (agent->gap_ns * 7 + gap_ns) / 8;
    if (agent->now_ns < rivals->modest_until_ns) {
        return SPIN_NS_RIVALS;
    }
    if (agent->gap_ns > SPIN_NS_MAX) {
        return SPIN_NS_MIN;
    }
    return 2 * agent->gap_ns > SPIN_NS_MIN ? 2 * agent->gap_ns : SPIN_NS_MIN;
}

int kvf_agent_run(struct kvf_agent *agent)
{
    struct rivals rivals = {0};
    uint64_t busy_until_ns = 0;
    bool busy;
    int status;

    kvf_owner_bind(&agent->owner);
    kvf_thread_run_soon();
    agent->now_ns = kvf_env_now_ns(&agent->env);
    atomic_store(&agent->is_ready, true);
    do {
        /* descriptors first: a hang-up seen now keeps the rest from serving a dead client */
        status = agent->now_ns >= busy_until_ns ? wait_events(agent, true) : glance_events(agent);
        if (!turn(agent, &busy, &status)) {
            break;
        }
        if (busy) {
            busy_until_ns = agent->now_ns + spin_ns(agent, &rivals);
        }
    } while (true);
    atomic_store(&agent->is_ready, false);
    return status;
}

/* From a signal handler: always the system call, it interrupts a sleep that is just beginning. */
static void wake_from_anywhere(struct kvf_agent *agent)
{
    uint64_t one = 1;
    ssize_t written = write(agent->waker_fd, &one, sizeof(one));

    (void)written;
}

void kvf_agent_stop(struct kvf_agent *agent)
{
    atomic_store(&agent->stop_asked, true);
    wake_from_anywhere(agent);
}

bool kvf_agent_is_ready(const struct kvf_agent *agent)
{
    return atomic_load(&agent->is_ready);
}

/* ----------------------------------------------------------------------------------------------
 * Birth and death
 */
/* Watch a descriptor of the daemon's own. A start that fails here says so. */
static int watch(struct kvf_agent *agent, int fd, uint32_t events, struct kvf_fd_source *source)
{
    int status = kvf_loop_add(agent, fd, events, source);

    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "poll set: cannot watch a descriptor: %s", kvf_status_text(status));
    }
    return status;
}

/* Make the socket of a listener. *group_out: whose its file is, or -1: as the daemon's. */
static int make_listener(struct kvf_listener *listener, int64_t *group_out)
{
    const struct kvf_config_socket *config = listener->config;
    struct kvf_seqpacket_listen_options options = {.path = config->path,
                                                   .mode = (mode_t)config->mode};
    char text[KVF_ERROR_TEXT_BYTES];
    int status;

    if (kvf_config_group(config->group, group_out) != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "sockets: group %s does not exist; create it or name another",
                config->group);
        return KVF_ERR_CONFIG;
    }
    if (*group_out >= 0) {
        options.set_gid = 1;
        options.gid = (gid_t)*group_out;
    }
    status = kvf_seqpacket_listen(&options, &listener->listener, text, sizeof(text));
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "%s", text);
    }
    return status;
}

static int open_listener(struct kvf_agent *agent, const struct kvf_config_socket *config,
                         uint16_t tenant)
{
    struct kvf_listener *listener = &agent->listeners[agent->n_listeners];
    int fd = kvf_activation_take(config->path);
    mode_t mode = (mode_t)config->mode;
    struct stat st;
    int64_t gid = -1;
    int status = KVF_OK;

    listener->source.kind = KVF_SOURCE_LISTENER;
    listener->source.owner = listener;
    listener->tenant = tenant;
    listener->config = config;
    if (fd >= 0) {
        /* without a path: its file stays when we end, and so does who waits there */
        listener->listener = (struct kvf_seqpacket_listener){.fd = fd};
    } else {
        status = make_listener(listener, &gid);
    }
    if (status != KVF_OK) {
        return status;
    }
    agent->n_listeners++;
    if (fd >= 0 && lstat(config->path, &st) == 0) {
        mode = st.st_mode & 0777;
        gid = st.st_gid;
    }
    kvf_predecessor_make(config->path, mode, gid);
    kvf_log(KVF_LOG_INFO,
            "listening on %s%s: all its clients are tenant %s and can read each "
            "other's blocks",
            config->path, fd >= 0 ? ", which the service manager keeps" : "", config->tenant);
    return watch(agent, listener->listener.fd, EPOLLIN, &listener->source);
}

/* Sockets that name the same tenant share it. */
static void name_tenants(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->config->n_sockets; i++) {
        const char *name = agent->config->sockets[i].tenant;
        uint32_t t = 0;

        while (t < agent->n_tenants && strcmp(agent->tenants[t].name, name) != 0) {
            t++;
        }
        if (t == agent->n_tenants) {
            agent->tenants[t].name = name;
            agent->n_tenants++;
        }
        agent->tenant_of_socket[i] = (uint16_t)t;
    }
}

static void tenant_ids(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->n_tenants; i++) {
        struct kvf_hasher hasher;
        uint8_t hash[KVF_HASH_BYTES];

        kvf_hasher_init(&hasher, agent->id_key);
        kvf_hash_field(&hasher, "kvferry tenant 1", 16);
        kvf_hash_field(&hasher, agent->tenants[i].name, strlen(agent->tenants[i].name));
        kvf_hasher_final(&hasher, hash);
        memcpy(&agent->tenants[i].id, hash, sizeof(agent->tenants[i].id));
    }
}

static int open_poll_set(struct kvf_agent *agent)
{
    agent->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    agent->waker_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    agent->reserve_fd = eventfd(0, EFD_CLOEXEC);
    if (agent->epoll_fd < 0 || agent->waker_fd < 0 || agent->reserve_fd < 0) {
        kvf_log(KVF_LOG_ERROR, "poll set: %s; raise the limit of open files", strerror(errno));
        return KVF_ERR_NO_MEMORY;
    }
    agent->waker_source.kind = KVF_SOURCE_WAKER;
    agent->waker_source.owner = agent;
    return watch(agent, agent->waker_fd, EPOLLIN | EPOLLET, &agent->waker_source);
}

/* Sockets, so that clients and operators can be told how far the rest is. */
static int open_sockets(struct kvf_agent *agent)
{
    const struct kvf_config *config = agent->config;
    int status = kvf_hash_init_library();

    name_tenants(agent);
    if (status == KVF_OK) {
        status = open_poll_set(agent);
    }
    for (uint32_t i = 0; i < config->n_sockets && status == KVF_OK; i++) {
        if (agent->ports.open_drive == NULL) {
            status = open_listener(agent, &config->sockets[i], agent->tenant_of_socket[i]);
        }
    }
    return status;
}

static int open_all(struct kvf_agent *agent)
{
    const struct kvf_config *config = agent->config;
    int status = kvf_calibrations_read(config->calibration_dir, &agent->calibrations);

    status = status == KVF_ERR_IO ? KVF_OK : status; /* logged; no reason not to start */
    if (status == KVF_OK) {
        status = kvf_observe_open(agent);
    }
    if (status == KVF_OK) {
        status = kvf_place_open(agent);
    }
    if (status != KVF_OK) {
        return status;
    }
    tenant_ids(agent);
    agent->sessions = calloc(config->clients_max + KVF_SESSIONS_TO_REFUSE,
                             sizeof(*agent->sessions));
    if (agent->sessions == NULL) {
        kvf_log(KVF_LOG_ERROR, "tables: no memory for clients; lower clients.max");
        return KVF_ERR_NO_MEMORY;
    }
    agent->sessions_capacity = (uint32_t)config->clients_max + KVF_SESSIONS_TO_REFUSE;
    status = kvf_gpu_host_open(agent, &agent->gpu_host);
    if (status == KVF_OK) {
        kvf_gpu_hbm_listen(agent);
        status = kvf_peers_open(agent); /* last: from now on others see what is here */
    }
    return status;
}

int kvf_agent_open(struct kvf_agent *agent)
{
    int status;

    kvf_start_begin_refusing(agent);
    status = open_all(agent);
    kvf_start_end_refusing(agent);
    if (status == KVF_OK) {
        kvf_start_phase(agent, KVF_START_OVER);
    }
    return status;
}

static int create(const struct kvf_config *config, const struct kvf_agent_ports *ports,
                  struct kvf_agent **agent_out)
{
    struct kvf_agent *agent = calloc(1, sizeof(*agent));
    int status;

    if (agent == NULL) {
        kvf_log(KVF_LOG_ERROR, "out of memory");
        return KVF_ERR_NO_MEMORY;
    }
    agent->epoll_fd = -1;
    agent->waker_fd = -1;
    agent->reserve_fd = -1;
    agent->config = config;
    agent->ports = *ports;
    agent->env = ports->env;
    agent->work = ports->work;
    agent->setup = ports->work;
    agent->names = ports->work;
    agent->protocol_log.interval_ns = KVF_NS_PER_S;
    agent->protocol_log.burst_count = 5;
    agent->session_log.interval_ns = KVF_NS_PER_S;
    agent->session_log.burst_count = 20;
    agent->offenders.delay_max_ns = config->clients_offence_delay * KVF_NS_PER_S;
    (void)pthread_mutex_init(&agent->control_lock, NULL);
    agent->started_ns = kvf_env_now_ns(&agent->env);
    agent->now_ns = agent->started_ns;
    agent->incarnation = kvf_env_random_u64(&agent->env) | 1;
    status = open_sockets(agent);
    if (status != KVF_OK) {
        kvf_agent_destroy(agent);
        return status;
    }
    *agent_out = agent;
    return KVF_OK;
}

int kvf_agent_create(const struct kvf_config *config, struct kvf_agent **agent_out)
{
    struct kvf_agent_ports ports = {.env = kvf_env_system()};

    return create(config, &ports, agent_out);
}

int kvf_agent_create_ported(const struct kvf_config *config, const struct kvf_agent_ports *ports,
                            struct kvf_agent **agent_out)
{
    struct kvf_agent *agent;
    int status = create(config, ports, &agent);

    if (status == KVF_OK) {
        status = kvf_agent_open(agent);
        if (status != KVF_OK) {
            kvf_agent_destroy(agent);
            return status;
        }
        *agent_out = agent;
    }
    return status;
}

void kvf_agent_reload(struct kvf_agent *agent)
{
    atomic_store(&agent->reload_asked, true);
    wake_from_anywhere(agent);
}

int kvf_agent_adopt(struct kvf_agent *agent, uint32_t socket_index, int fd, uint64_t peer)
{
    assert(socket_index < agent->config->n_sockets);
    return kvf_session_adopt(agent, agent->tenant_of_socket[socket_index], fd, peer);
}

void kvf_agent_destroy(struct kvf_agent *agent)
{
    if (agent == NULL) {
        return;
    }
    for (uint32_t i = 0; i < agent->n_listeners; i++) {
        kvf_seqpacket_listener_close(&agent->listeners[i].listener);
    }
    agent->gpu_host = kvf_gpu_host_close(agent->gpu_host);
    kvf_peers_stop(agent); /* before memory that it reads and writes goes */
    kvf_place_stop(agent);
    kvf_observe_close(agent);
    kvf_answer_fail_all(agent);
    for (uint32_t i = 0; agent->sessions != NULL && i < agent->sessions_capacity; i++) {
        kvf_session_destroy(&agent->sessions[i]);
    }
    kvf_peers_close(agent);
    kvf_place_close(agent);
    free(agent->sessions);
    kvf_reload_free(agent);
    kvf_calibrations_release(agent->calibrations);
    kvf_fd_close(&agent->epoll_fd);
    kvf_fd_close(&agent->waker_fd);
    kvf_fd_close(&agent->reserve_fd);
    (void)pthread_mutex_destroy(&agent->control_lock);
    free(agent);
}
