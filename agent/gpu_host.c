/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_host.c: start GPU workers, notice their end, hand channels over.
 */
#include "agent/gpu_host.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/core.h"
#include "base/fd.h"
#include "transport/gpu_proto.h"

#define PAUSE_NS_MIN KVF_NS_PER_S
#define PAUSE_NS_MAX (30 * KVF_NS_PER_S)
#define STEADY_NS    (60 * KVF_NS_PER_S) /* up so long: the next pause is a short one */
#define END_NS       (3 * KVF_NS_PER_S)  /* for all workers together */
#define KILL_MS      500
#define WORKER_FD    3 /* in the worker: its end of the socket pair */

enum {
    MESSAGES_A_CALL = 256,  /* of one worker: the loop has other work */
    START_TICKS_MAX = 1200, /* kernels may have to be compiled first */
};

extern char **environ;

enum worker_state {
    WORKER_OFF, /* to be started at start_ns */
    WORKER_STARTING,
    WORKER_UP,
    WORKER_ENDING, /* hung up; its exit is awaited, which ends what it had queued on the GPU */
};

struct kvf_gpu_worker {
    struct kvf_fd_source socket_source;
    struct kvf_fd_source exit_source;
    struct kvf_gpu_host *host;
    enum worker_state state;
    uint32_t number;
    int ordinal;                    /* -1: by UUID */
    char uuid[KVF_GPUD_UUID_BYTES]; /* "" until the first READY of one by ordinal */
    char name[KVF_WIRE_NAME_BYTES];
    char why[KVF_WIRE_TEXT_BYTES]; /* it did not start */
    int fd;
    int pid_fd;
    pid_t pid;
    uint64_t start_ns;
    uint64_t up_ns;
    uint64_t pause_ns;
    uint32_t quiet_ticks; /* since it has said something: a daemon that is stopped counts none */
    struct kvf_gpud_counts counts;
};

struct kvf_gpu_host {
    struct kvf_agent *agent;
    struct kvf_gpu_host_listener listener;
    char program[4096];
    bool takes_all;
    uint64_t starts;
    uint64_t hangs;
    uint32_t n_workers;
    struct kvf_gpu_worker workers[KVF_GPU_DEVICES_MAX];
};

/* ----------------------------------------------------------------------------------------------
 * Start
 */
static int spawn(struct kvf_gpu_worker *worker, int fd)
{
    const struct kvf_config *config = worker->host->agent->config;
    char device[KVF_GPUD_UUID_BYTES];
    char burst[32];
    char rate[32];
    char level[16];
    char parent[16];
    char format[4];
    char *argv[] = {worker->host->program, device, burst, rate, level, format, parent, NULL};
    posix_spawn_file_actions_t actions;
    int result;

    /* a number may mean another GPU the next time */
    (void)snprintf(device, sizeof(device), "%s", worker->uuid);
    if (worker->uuid[0] == '\0') {
        (void)snprintf(device, sizeof(device), "%d", worker->ordinal);
    }
    (void)snprintf(burst, sizeof(burst), "%llu", (unsigned long long)config->gpu_burst_bytes);
    (void)snprintf(rate, sizeof(rate), "%llu", (unsigned long long)config->gpu_rate);
    (void)snprintf(level, sizeof(level), "%llu", (unsigned long long)config->log_level);
    (void)snprintf(format, sizeof(format), "%u", config->log_format != 0);
    (void)snprintf(parent, sizeof(parent), "%ld", (long)getpid());
    if (posix_spawn_file_actions_init(&actions) != 0) {
        return KVF_ERR_NO_MEMORY;
    }
    result = posix_spawn_file_actions_adddup2(&actions, fd, WORKER_FD);
    if (result == 0) {
        result = posix_spawn(&worker->pid, worker->host->program, &actions, NULL, argv, environ);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    if (result != 0) {
        kvf_log(KVF_LOG_ERROR, "GPU worker %s: %s", worker->host->program, strerror(result));
        return KVF_ERR_IO;
    }
    return KVF_OK;
}

/* Kill and reap what could not be watched. */
static void worker_reap(struct kvf_gpu_worker *worker)
{
    if (worker->pid > 0) {
        (void)kill(worker->pid, SIGKILL);
        (void)waitpid(worker->pid, NULL, 0);
        worker->pid = 0;
    }
    kvf_fd_close(&worker->fd);
    kvf_fd_close(&worker->pid_fd);
}

static void worker_pause(struct kvf_gpu_worker *worker)
{
    uint64_t now_ns = worker->host->agent->now_ns;

    if (worker->up_ns != 0 && now_ns - worker->up_ns >= STEADY_NS) {
        worker->pause_ns = 0;
    }
    worker->pause_ns = worker->pause_ns == 0 ? PAUSE_NS_MIN : 2 * worker->pause_ns;
    worker->pause_ns = worker->pause_ns < PAUSE_NS_MAX ? worker->pause_ns : PAUSE_NS_MAX;
    worker->start_ns = now_ns + worker->pause_ns;
    worker->up_ns = 0;
    worker->state = WORKER_OFF;
}

static void worker_start(struct kvf_gpu_worker *worker)
{
    struct kvf_agent *agent = worker->host->agent;
    int pair[2] = {-1, -1};
    int status = KVF_ERR_BUSY;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0) {
        worker->fd = pair[0];
        status = spawn(worker, pair[1]);
    }
    if (status == KVF_OK) {
        worker->host->starts++;
        worker->pid_fd = (int)syscall(SYS_pidfd_open, worker->pid, 0);
        status = worker->pid_fd >= 0 ? KVF_OK : KVF_ERR_UNSUPPORTED;
    }
    if (status == KVF_OK) {
        status = kvf_loop_add(agent, worker->fd, EPOLLIN, &worker->socket_source);
    }
    if (status == KVF_OK) {
        status = kvf_loop_add(agent, worker->pid_fd, EPOLLIN, &worker->exit_source);
    }
    kvf_fd_close(&pair[1]);
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "GPU worker of device %s cannot be started (%s)",
                worker->uuid[0] != '\0' ? worker->uuid : "of gpu.devices: all",
                kvf_status_text(status));
        worker_reap(worker);
        worker_pause(worker);
        return;
    }
    worker->state = WORKER_STARTING;
    worker->quiet_ticks = 0;
}

/* Its engines have no worker any more, and may ask for one. */
static void engines_forget(struct kvf_gpu_worker *worker)
{
    struct kvf_agent *agent = worker->host->agent;

    for (uint32_t i = 0; agent->sessions != NULL && i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (session->is_gpu_asked && strcasecmp(session->gpu_uuid, worker->uuid) == 0) {
            session->is_gpu_asked = false;
            session->gpu_path = 0;
        }
    }
}

/* The socket is over; what the worker has queued on the GPU is over when it has exited. */
static void worker_hang_up(struct kvf_gpu_worker *worker)
{
    if (worker->state == WORKER_UP && worker->host->listener.down != NULL) {
        worker->host->listener.down(worker->host->listener.ctx, worker->number);
    }
    if (worker->fd >= 0) {
        kvf_loop_remove(worker->host->agent, worker->fd);
        kvf_fd_close(&worker->fd);
    }
    engines_forget(worker);
    memset(&worker->counts, 0, sizeof(worker->counts));
    worker->state = WORKER_ENDING;
}

void kvf_gpu_host_exit_ready(struct kvf_gpu_worker *worker)
{
    int wait_status = 0;

    if (worker->pid <= 0 || waitpid(worker->pid, &wait_status, WNOHANG) != worker->pid) {
        return;
    }
    worker->pid = 0;
    worker_hang_up(worker);
    kvf_loop_remove(worker->host->agent, worker->pid_fd);
    kvf_fd_close(&worker->pid_fd);
    worker_pause(worker);
    kvf_log(KVF_LOG_WARNING, "GPU worker of %s ended (%s %d); the next one starts in %llu s",
            worker->uuid[0] != '\0' ? worker->uuid : "gpu.devices: all",
            WIFSIGNALED(wait_status) ? "signal" : "exit code",
            WIFSIGNALED(wait_status) ? WTERMSIG(wait_status) : WEXITSTATUS(wait_status),
            (unsigned long long)(worker->pause_ns / KVF_NS_PER_S));
}

/* ----------------------------------------------------------------------------------------------
 * Messages of workers
 */
static struct kvf_gpu_worker *worker_new(struct kvf_gpu_host *host, int ordinal, const char *uuid)
{
    struct kvf_gpu_worker *worker = &host->workers[host->n_workers];

    *worker = (struct kvf_gpu_worker){
        .host = host, .number = host->n_workers, .ordinal = ordinal, .fd = -1, .pid_fd = -1};
    worker->socket_source = (struct kvf_fd_source){KVF_SOURCE_GPU_SOCKET, worker};
    worker->exit_source = (struct kvf_fd_source){KVF_SOURCE_GPU_EXIT, worker};
    (void)snprintf(worker->uuid, sizeof(worker->uuid), "%.*s", (int)sizeof(worker->uuid) - 1, uuid);
    host->n_workers++;
    return worker;
}

static int on_ready(struct kvf_gpu_worker *worker, const struct kvf_gpud_ready *ready)
{
    struct kvf_gpu_host *host = worker->host;
    bool has_been = worker->name[0] != '\0'; /* and said which GPU it has */

    if (worker->state != WORKER_STARTING ||
        (ready->status == KVF_OK && has_been && strcasecmp(worker->uuid, ready->uuid) != 0)) {
        kvf_log(KVF_LOG_ERROR, "GPU worker of %s: it says to be that of %s", worker->uuid,
                ready->uuid);
        return KVF_ERR_PROTOCOL;
    }
    if (ready->status != KVF_OK) {
        memcpy(worker->why, ready->text, sizeof(worker->why));
        kvf_log(KVF_LOG_WARNING, "GPU worker: %s", ready->text);
        return KVF_OK; /* it ends by itself */
    }
    worker->why[0] = '\0';
    memcpy(worker->uuid, ready->uuid, sizeof(worker->uuid));
    memcpy(worker->name, ready->name, sizeof(worker->name));
    worker->state = WORKER_UP;
    worker->up_ns = host->agent->now_ns;
    kvf_log(KVF_LOG_INFO, "GPU worker of %s %s is up: %llu of %llu MiB free", ready->name,
            ready->uuid, (unsigned long long)(ready->free_bytes >> 20),
            (unsigned long long)(ready->total_bytes >> 20));
    for (uint32_t i = host->n_workers;
         host->takes_all && i < ready->n_devices && i < KVF_GPU_DEVICES_MAX; i++) {
        worker_start(worker_new(host, (int)i, ""));
    }
    if (host->listener.up != NULL) {
        host->listener.up(host->listener.ctx, worker->number, ready);
    }
    return KVF_OK;
}

static void on_engine(struct kvf_gpu_worker *worker, const struct kvf_gpud_note *note)
{
    struct kvf_agent *agent = worker->host->agent;

    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY && session->connection_id == note->connection_id &&
            strcasecmp(session->gpu_uuid, worker->uuid) == 0) {
            session->gpu_path = note->status == KVF_OK ? KVF_GPU_PATH_AGENT : 0;
            session->is_gpu_asked = note->status == KVF_OK;
        }
    }
}

/* KVF_OK, or the worker has lost its mind. */
static int on_message(struct kvf_gpu_worker *worker, union kvf_gpud_message *message, size_t bytes,
                      struct kvf_seqpacket_message *received)
{
    const struct kvf_gpu_host_listener *listener = &worker->host->listener;
    const char *why = "";

    worker->quiet_ticks = 0;
    if (bytes >= sizeof(message->head) && message->head.type >= KVF_GPUD_TIER_FIRST) {
        if (listener->message != NULL && worker->state == WORKER_UP) {
            listener->message(listener->ctx, worker->number, message->bytes, bytes, received->fds,
                              received->n_fds);
        }
        return KVF_OK;
    }
    if (kvf_gpud_check(KVF_GPUD_FROM_WORKER, message, bytes, received->n_fds, &why) != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "GPU worker of %s: %s", worker->uuid, why);
        return KVF_ERR_PROTOCOL;
    }
    switch (message->head.type) {
    case KVF_GPUD_READY:
        return on_ready(worker, &message->ready);
    case KVF_GPUD_ENGINE:
        on_engine(worker, &message->note);
        break;
    default: /* COUNTS */
        worker->counts = message->counts;
        break;
    }
    return KVF_OK;
}

void kvf_gpu_host_socket_ready(struct kvf_gpu_worker *worker)
{
    static union kvf_gpud_message message;
    struct kvf_seqpacket_message received;
    int status = KVF_OK;

    for (uint32_t n = 0; n < MESSAGES_A_CALL && status == KVF_OK && worker->fd >= 0; n++) {
        status = kvf_seqpacket_recv(worker->fd, message.bytes, sizeof(message.bytes), &received);
        if (status == KVF_OK) {
            status = on_message(worker, &message, received.bytes, &received);
            for (uint32_t i = 0; i < received.n_fds; i++) {
                kvf_fd_close(&received.fds[i]);
            }
        }
    }
    if (status < KVF_OK && worker->fd >= 0) {
        worker_hang_up(worker);
        (void)kill(worker->pid, SIGKILL); /* it has gone, or is to go */
    }
}

/* ----------------------------------------------------------------------------------------------
 * Channels
 */
bool kvf_gpu_host_find(const struct kvf_gpu_host *host, const char *uuid, uint32_t *device_out)
{
    for (uint32_t i = 0; host != NULL && i < host->n_workers; i++) {
        if (strcasecmp(host->workers[i].uuid, uuid) == 0) {
            *device_out = i;
            return true;
        }
    }
    return false;
}

int kvf_gpu_host_send(struct kvf_gpu_host *host, uint32_t device, const void *data, size_t bytes,
                      const int *fds, uint32_t n_fds)
{
    if (host == NULL || device >= host->n_workers || host->workers[device].state != WORKER_UP) {
        return KVF_ERR_TIER_OFF;
    }
    return kvf_seqpacket_send(host->workers[device].fd, data, bytes, fds, n_fds);
}

void kvf_gpu_host_restart(struct kvf_gpu_host *host, uint32_t device)
{
    if (host != NULL && device < host->n_workers && host->workers[device].fd >= 0) {
        /* the loop finds the hang-up, and so does the worker */
        (void)shutdown(host->workers[device].fd, SHUT_RDWR);
    }
}

/* A path by which the worker can be a client of the same tenant. */
static const char *path_of(const struct kvf_session *session)
{
    const struct kvf_agent *agent = session->agent;
    uint32_t i = 0;

    while (agent->tenant_of_socket[i] != session->tenant) {
        i++;
    }
    return agent->config->sockets[i].path;
}

/* Hand both ends over. KVF_OK: sent; else why not. */
static int channel_open(struct kvf_session *session, struct kvf_gpu_worker *worker)
{
    struct kvf_gpud_attach attach = {
        .connection_id = session->connection_id,
        .greet_ms = (uint32_t)session->agent->config->gpu_timeout * 1000,
        .scratch_bytes = session->agent->config->gpu_scratch_total,
    };
    struct kvf_wire_gpu_channel answer = {0};
    int pair[2] = {-1, -1};
    int fds[2];
    int status;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        return KVF_ERR_BUSY;
    }
    kvf_gpud_head_init(&attach.head, KVF_GPUD_ATTACH, sizeof(attach));
    (void)snprintf(attach.socket_path, sizeof(attach.socket_path), "%s", path_of(session));
    if (session->agent->n_tenants > 1) {
        attach.flags = KVF_GPUD_ATTACH_NO_HANDLES; /* it might open another tenant's pages */
    }
    status = kvf_seqpacket_send(worker->fd, &attach, sizeof(attach), &pair[0], 1);
    if (status == KVF_OK) {
        kvf_proto_head_init(&answer.head, KVF_WIRE_GPU_CHANNEL);
        fds[0] = pair[1];
        fds[1] = worker->pid_fd;
        status = kvf_seqpacket_send(session->fd, &answer, sizeof(answer), fds, 2);
    }
    kvf_fd_close(&pair[0]);
    kvf_fd_close(&pair[1]);
    return status;
}

static int refuse(struct kvf_session *session, int status, const char *text)
{
    struct kvf_wire_gpu_channel answer = {.status = status};

    kvf_proto_head_init(&answer.head, KVF_WIRE_GPU_CHANNEL);
    (void)snprintf(answer.text, sizeof(answer.text), "%s", text);
    return kvf_seqpacket_send(session->fd, &answer, sizeof(answer), NULL, 0);
}

/* A worker that is starting and has yet to say which GPU it has. */
static bool has_nameless(const struct kvf_gpu_host *host)
{
    for (uint32_t i = 0; i < host->n_workers; i++) {
        if (host->workers[i].uuid[0] == '\0' && host->workers[i].why[0] == '\0') {
            return true;
        }
    }
    return false;
}

int kvf_gpu_host_asked(struct kvf_session *session, const struct kvf_wire_gpu *message)
{
    struct kvf_gpu_host *host = session->agent->gpu_host;
    char text[KVF_WIRE_TEXT_BYTES];
    uint32_t device = 0;
    int status;

    memcpy(session->gpu_uuid, message->uuid, sizeof(session->gpu_uuid));
    session->gpu_path = message->path == KVF_GPU_PATH_ENGINE ? KVF_GPU_PATH_ENGINE : 0;
    if (message->path == KVF_GPU_PATH_ENGINE) {
        return KVF_OK; /* only to be known */
    }
    if (session->is_gpu_asked) {
        return refuse(session, KVF_ERR_BUSY, "this client has a worker, or is about to");
    }
    if (host == NULL) {
        return refuse(session, KVF_ERR_UNSUPPORTED,
                      "the daemon has no GPU worker: set gpu.devices, or use path ENGINE");
    }
    if (!kvf_gpu_host_find(host, message->uuid, &device)) {
        if (has_nameless(host)) {
            return refuse(session, KVF_ERR_BUSY, "the GPU workers are starting");
        }
        (void)snprintf(text, sizeof(text),
                       "no GPU worker of the daemon is on %.47s: name it in gpu.devices, and let "
                       "the daemon's container see the same GPUs; or use path ENGINE",
                       message->uuid);
        return refuse(session, KVF_ERR_UNSUPPORTED, text);
    }
    if (host->workers[device].state != WORKER_UP) {
        (void)snprintf(text, sizeof(text), "the GPU worker of %.47s is starting%s%.100s",
                       message->uuid, host->workers[device].why[0] != '\0' ? ": " : "",
                       host->workers[device].why);
        return refuse(session, KVF_ERR_BUSY, text);
    }
    status = channel_open(session, &host->workers[device]);
    if (status == KVF_ERR_BUSY) {
        return refuse(session, status, "no room for a channel: try again");
    }
    session->is_gpu_asked = status == KVF_OK;
    return status;
}

void kvf_gpu_host_session_ended(struct kvf_gpu_host *host, const struct kvf_session *session)
{
    struct kvf_gpud_note note = {.connection_id = session->connection_id};
    uint32_t device;

    if (session->is_gpu_asked && kvf_gpu_host_find(host, session->gpu_uuid, &device)) {
        kvf_gpud_head_init(&note.head, KVF_GPUD_DETACH, sizeof(note));
        /* a full socket: the engine's own hang-up ends the channel as well */
        (void)kvf_gpu_host_send(host, device, &note, sizeof(note), NULL, 0);
    }
}

/* ----------------------------------------------------------------------------------------------
 * The whole
 */
static int find_program(struct kvf_gpu_host *host)
{
    const struct kvf_config *config = host->agent->config;
    ssize_t n;
    char *slash;

    if (config->gpu_worker[0] != '\0') {
        (void)snprintf(host->program, sizeof(host->program), "%s", config->gpu_worker);
    } else {
        n = readlink("/proc/self/exe", host->program, sizeof(host->program) - 32);
        if (n <= 0) {
            return KVF_ERR_CONFIG;
        }
        host->program[n] = '\0';
        slash = strrchr(host->program, '/');
        (void)snprintf(slash + 1, 16, "kvferryd-gpu");
    }
    if (access(host->program, X_OK) != 0) {
        kvf_log(KVF_LOG_ERROR, "gpu.devices: %s: %s; install it, or set gpu.worker", host->program,
                strerror(errno));
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

int kvf_gpu_host_open(struct kvf_agent *agent, struct kvf_gpu_host **host_out)
{
    const char *devices = agent->config->gpu_devices;
    struct kvf_gpu_host *host;

    *host_out = NULL;
    if (devices[0] == '\0') {
        return KVF_OK;
    }
    host = calloc(1, sizeof(*host));
    if (host == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    host->agent = agent;
    if (find_program(host) != KVF_OK) {
        free(host);
        return KVF_ERR_CONFIG;
    }
    host->takes_all = strcmp(devices, "all") == 0;
    if (host->takes_all) {
        worker_start(worker_new(host, 0, ""));
    }
    while (!host->takes_all && *devices != '\0' && host->n_workers < KVF_GPU_DEVICES_MAX) {
        size_t length = strcspn(devices, ", ");
        char uuid[KVF_GPUD_UUID_BYTES];

        if (length > 0) {
            (void)snprintf(uuid, sizeof(uuid), "%.*s", (int)(length < 47 ? length : 47), devices);
            worker_start(worker_new(host, -1, uuid));
        }
        devices += length;
        devices += strspn(devices, ", ");
    }
    *host_out = host;
    return KVF_OK;
}

/* Does the process end within so many milliseconds? */
static bool ends_soon(const struct kvf_gpu_worker *worker, int timeout_ms)
{
    struct pollfd one = {.fd = worker->pid_fd, .events = POLLIN};

    return poll(&one, 1, timeout_ms) == 1;
}

/* Kill it unless it has gone, and wait a little: one that the driver holds is left to init. */
static void worker_finish(struct kvf_gpu_worker *worker, uint64_t deadline_ns)
{
    uint64_t now_ns = kvf_now_ns();
    uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;

    if (worker->pid > 0 && !ends_soon(worker, (int)(left_ns / KVF_NS_PER_MS))) {
        kvf_log(KVF_LOG_WARNING, "GPU worker of %s does not end: it is killed", worker->uuid);
        (void)kill(worker->pid, SIGKILL);
        (void)ends_soon(worker, KILL_MS);
    }
    if (worker->pid > 0) {
        (void)waitpid(worker->pid, NULL, WNOHANG);
    }
    kvf_fd_close(&worker->fd);
    kvf_fd_close(&worker->pid_fd);
}

struct kvf_gpu_host *kvf_gpu_host_close(struct kvf_gpu_host *host)
{
    uint64_t deadline_ns = kvf_now_ns() + END_NS;
    struct kvf_gpud_note quit = {0};

    kvf_gpud_head_init(&quit.head, KVF_GPUD_QUIT, sizeof(quit));
    for (uint32_t i = 0; host != NULL && i < host->n_workers; i++) {
        if (host->workers[i].fd >= 0) {
            (void)kvf_seqpacket_send(host->workers[i].fd, &quit, sizeof(quit), NULL, 0);
        }
    }
    for (uint32_t i = 0; host != NULL && i < host->n_workers; i++) {
        worker_finish(&host->workers[i], deadline_ns);
    }
    free(host);
    return NULL;
}

void kvf_gpu_host_listen(struct kvf_gpu_host *host, const struct kvf_gpu_host_listener *listener)
{
    if (host != NULL) {
        host->listener = *listener; /* before the first turn of the loop: none is up */
    }
}

void kvf_gpu_host_tick(struct kvf_gpu_host *host)
{
    for (uint32_t i = 0; host != NULL && i < host->n_workers; i++) {
        struct kvf_gpu_worker *worker = &host->workers[i];

        if (worker->state == WORKER_OFF && !host->agent->is_draining &&
            host->agent->now_ns >= worker->start_ns) {
            worker_start(worker);
        }
        /* one that is well says something each second */
        if ((worker->state == WORKER_UP &&
             ++worker->quiet_ticks == 2 * host->agent->config->gpu_timeout) ||
            (worker->state == WORKER_STARTING && ++worker->quiet_ticks == START_TICKS_MAX)) {
            kvf_log(KVF_LOG_ERROR, "GPU worker of %s has said nothing for %u s: it is killed",
                    worker->uuid, worker->quiet_ticks / 2);
            (void)kill(worker->pid, SIGKILL);
            host->hangs++;
        }
    }
}

void kvf_gpu_host_counts(const struct kvf_gpu_host *host, struct kvf_gpu_host_counts *counts_out)
{
    *counts_out = (struct kvf_gpu_host_counts){
        .starts = host != NULL ? host->starts : 0,
        .hangs = host != NULL ? host->hangs : 0,
    };
    for (uint32_t i = 0; host != NULL && i < host->n_workers; i++) {
        const struct kvf_gpud_counts *counts = &host->workers[i].counts;

        counts_out->workers += host->workers[i].state == WORKER_UP;
        counts_out->engines += counts->engines;
        counts_out->free_bytes += counts->free_bytes;
        counts_out->put_blocks += counts->put_blocks;
        counts_out->put_bytes += counts->put_bytes;
        counts_out->get_blocks += counts->get_blocks;
        counts_out->get_bytes += counts->get_bytes;
        counts_out->refused += counts->refused;
        counts_out->cut_off += counts->cut_off;
        counts_out->delayed_ns += counts->delayed_ns;
    }
}
