/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx.c: the network's thread and the queues between it and its owner.
 */
#include "transport/transport_ucx.h"

#include <assert.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/limits.h"
#include "base/thread.h"
#include "transport/transport_ucx_internal.h"

#define COMMANDS 4096
#define EVENTS                                                                                     \
    (KVF_NET_FETCHES_MAX + KVF_NET_SERVES_MAX + KVF_NET_UPCALLS_MAX + KVF_NET_LINK_EVENTS_MAX)
#define PROGRESS_MAX   256                  /* before other things are looked at */
#define SPIN_NS        (20 * KVF_NS_PER_US) /* what follows soon is cheaper without a sleep */
#define SPIN_RECORD_NS (50 * KVF_NS_PER_US) /* the same while records are on their way */
#define SLEEP_MS       200                  /* timers need no more ... */
#define SLEEP_FETCH_MS 10                   /* ... than this while something is on its way */
#define SLEEP_ROOM_MS  1                    /* while submissions wait: nobody wakes for room */
#define CLOSE_NS       KVF_NS_PER_S

/* ----------------------------------------------------------------------------------------------
 * Queues
 */
static void wake_thread(struct kvf_net *net)
{
    uint64_t one = 1;

    if (atomic_exchange(&net->is_sleeping, false)) {
        ssize_t written = write(net->waker_fd, &one, sizeof(one));

        (void)written; /* never read, and full only after 2^64 wake-ups */
    }
}

static int give(struct kvf_net *net, const struct kvf_net_command *command)
{
    if (!kvf_ring_push(&net->commands, command)) {
        return KVF_ERR_BUSY;
    }
    wake_thread(net);
    return KVF_OK;
}

int kvf_net_connect(struct kvf_net *net, const struct kvf_net_address *addresses, uint32_t n)
{
    struct kvf_net_command command = {.kind = KVF_NET_COMMAND_CONNECT, .n = n};
    int status;

    assert(n <= KVF_NET_PEERS_MAX);
    command.data = calloc(n + 1, sizeof(*addresses));
    if (command.data == NULL) {
        return KVF_ERR_BUSY;
    }
    if (n > 0) {
        memcpy(command.data, addresses, n * sizeof(*addresses));
    }
    status = give(net, &command);
    if (status != KVF_OK) {
        free(command.data);
    }
    return status;
}

int kvf_net_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch)
{
    struct kvf_net_command command = {.kind = KVF_NET_COMMAND_FETCH, .data = fetch};
    int status = net->fetches_count < KVF_NET_FETCHES_MAX ? give(net, &command) : KVF_ERR_BUSY;

    net->fetches_count += status == KVF_OK;
    return status;
}

int kvf_net_serve(struct kvf_net *net, struct kvf_net_serve *serve)
{
    struct kvf_net_command command = {.kind = KVF_NET_COMMAND_SERVE, .data = serve};
    int status = net->serves_count < KVF_NET_SERVES_MAX ? give(net, &command) : KVF_ERR_BUSY;

    net->serves_count += status == KVF_OK;
    return status;
}

int kvf_net_send(struct kvf_net *net, kvf_net_link link, enum kvf_net_type type, const void *body,
                 uint32_t body_bytes)
{
    struct kvf_net_command command = {
        .kind = KVF_NET_COMMAND_SEND, .type = (uint8_t)type, .n = body_bytes, .link = link};
    _Atomic uint32_t *sends = &net->stream_sends[(link & 0xff) % KVF_NET_LINKS_MAX];

    if (atomic_load(sends) >= KVF_NET_STREAM_SENDS_MAX) {
        return KVF_ERR_BUSY;
    }
    command.data = malloc(body_bytes + 1);
    if (command.data == NULL) {
        return KVF_ERR_BUSY;
    }
    if (body_bytes > 0) {
        memcpy(command.data, body, body_bytes);
    }
    atomic_fetch_add(sends, 1);
    if (give(net, &command) != KVF_OK) {
        atomic_fetch_sub(sends, 1);
        free(command.data);
        return KVF_ERR_BUSY;
    }
    return KVF_OK;
}

int kvf_net_hang_up(struct kvf_net *net, kvf_net_link link)
{
    struct kvf_net_command command = {.kind = KVF_NET_COMMAND_HANG_UP, .link = link};

    return give(net, &command);
}

void kvf_net_emit(struct kvf_net *net, const struct kvf_net_event *event)
{
    bool fits = kvf_ring_push(&net->events, event);

    assert(fits); /* every kind of event has its share of the ring */
    (void)fits;
    net->has_news = true;
}

bool kvf_net_emit_upcall(struct kvf_net *net, const struct kvf_net_event *event)
{
    if (atomic_load(&net->upcalls) >= KVF_NET_UPCALLS_MAX) {
        return false;
    }
    atomic_fetch_add(&net->upcalls, 1);
    kvf_net_emit(net, event);
    return true;
}

bool kvf_net_poll(struct kvf_net *net, struct kvf_net_event *event_out)
{
    if (!kvf_ring_pop(&net->events, event_out)) {
        return false;
    }
    switch ((enum kvf_net_event_kind)event_out->kind) {
    case KVF_NET_EVENT_FETCH_DONE:
        net->fetches_count--;
        break;
    case KVF_NET_EVENT_SERVE_DONE:
        net->serves_count--;
        break;
    case KVF_NET_EVENT_SERVE:
    case KVF_NET_EVENT_MESSAGE:
        atomic_fetch_sub(&net->upcalls, 1);
        break;
    case KVF_NET_EVENT_LINK_UP:
    case KVF_NET_EVENT_LINK_DOWN:
    case KVF_NET_EVENT_CLIENT:
    case KVF_NET_EVENT_OFFENCE:
        atomic_fetch_sub(&net->link_events, 1);
        break;
    }
    return true;
}

static unsigned take_commands(struct kvf_net *net)
{
    struct kvf_net_command command;
    unsigned n = 0;

    while (n < PROGRESS_MAX && kvf_ring_pop(&net->commands, &command)) {
        struct kvf_link *link;

        n++;
        switch ((enum kvf_net_command_kind)command.kind) {
        case KVF_NET_COMMAND_CONNECT:
            kvf_link_connect(net, command.data, command.n);
            free(command.data);
            break;
        case KVF_NET_COMMAND_FETCH:
            kvf_flow_fetch(net, command.data);
            break;
        case KVF_NET_COMMAND_SERVE:
            kvf_flow_serve(net, command.data);
            break;
        case KVF_NET_COMMAND_SEND:
            kvf_flow_stream(net, &command);
            break;
        case KVF_NET_COMMAND_HANG_UP:
            link = kvf_link_find(net, command.link);
            if (link != NULL) {
                kvf_link_break(link, KVF_ERR_TIMEOUT, "it does not answer in time");
            }
            break;
        }
    }
    return n;
}

/* ----------------------------------------------------------------------------------------------
 * The thread
 */
static unsigned progress(struct kvf_net *net)
{
    unsigned n = 0;

    while (n < PROGRESS_MAX && net->ucx.ucp_worker_progress(net->worker) != 0) {
        n++;
    }
    return n;
}

static void tell_owner(struct kvf_net *net)
{
    if (net->has_news && net->config.wake != NULL) {
        net->has_news = false;
        net->config.wake(net->config.wake_ctx);
    }
}

/* Whoever puts something into a client's rings from now on wakes this thread. False: somebody has.
 */
static bool clients_sleep(struct kvf_net *net)
{
    bool is_quiet = true;

    if (net->config.tunnel != NULL) {
        return net->config.tunnel->sleep(net->config.tunnel_ctx);
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX && is_quiet; i++) {
        is_quiet = net->links[i].relay == NULL || kvf_relay_sleep(&net->links[i]);
    }
    return is_quiet;
}

static void clients_awake(struct kvf_net *net)
{
    if (net->config.tunnel != NULL) {
        net->config.tunnel->awake(net->config.tunnel_ctx);
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        if (net->links[i].relay != NULL) {
            kvf_relay_awake(&net->links[i]);
        }
    }
}

static void wait_for_something(struct kvf_net *net)
{
    struct epoll_event events[2];
    ucs_status_t armed;

    (void)atomic_exchange(&net->is_sleeping, true);
    net->has_waiting = false;
    if (kvf_ring_is_empty(&net->commands) && !atomic_load(&net->stop) && clients_sleep(net)) {
        armed = net->ucx.ucp_worker_arm(net->worker);
        if (armed == UCS_OK) {
            (void)epoll_wait(net->epoll_fd, events, 2,
                             net->has_waiting     ? SLEEP_ROOM_MS
                             : net->n_fetches > 0 ? SLEEP_FETCH_MS
                                                  : SLEEP_MS);
        }
    }
    atomic_store(&net->is_sleeping, false);
    clients_awake(net);
    net->has_slept = true;
}

/* What was given and not taken, taken and not given. */
static void drop_queues(struct kvf_net *net)
{
    struct kvf_net_command command;
    struct kvf_net_event event;

    while (net->commands.entries != NULL && kvf_ring_pop(&net->commands, &command)) {
        if (command.kind == KVF_NET_COMMAND_CONNECT || command.kind == KVF_NET_COMMAND_SEND) {
            free(command.data);
        }
    }
    while (net->events.entries != NULL && kvf_ring_pop(&net->events, &event)) {
        free(event.body);
        if (event.kind == KVF_NET_EVENT_CLIENT) {
            kvf_fd_close(&event.fd);
        }
    }
    for (uint32_t i = 0; i < net->sends.count; i++) {
        struct kvf_link_send *send = kvf_pool_at(&net->sends, i);

        if (send != NULL) {
            free(send->owned);
            kvf_pool_put(&net->sends, send);
        }
    }
}

/* The thread has ended, or is at its end. */
static void net_free(struct kvf_net *net)
{
    if (net->listener != NULL) {
        net->ucx.ucp_listener_destroy(net->listener);
    }
    if (net->worker != NULL) {
        net->ucx.ucp_worker_destroy(net->worker);
    }
    if (net->context != NULL) {
        net->ucx.ucp_cleanup(net->context);
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        kvf_relay_free(&net->links[i]); /* of links that UCX had not closed in time */
    }
    drop_queues(net);
    kvf_doors_close(&net->doors);
    kvf_fd_close(&net->epoll_fd);
    kvf_fd_close(&net->waker_fd);
    kvf_ring_fini(&net->commands);
    kvf_ring_fini(&net->events);
    (void)kvf_pool_fini(&net->sends, NULL);
    (void)pthread_mutex_destroy(&net->handover);
    free(net);
}

/* Whoever closes waits for the thread and does the rest, or has left that to the thread. */
static void leave(struct kvf_net *net)
{
    void (*closed)(void *ctx);
    void *ctx;

    (void)pthread_mutex_lock(&net->handover);
    closed = net->closed;
    ctx = net->closed_ctx;
    (void)pthread_mutex_unlock(&net->handover);
    if (closed != NULL) {
        net_free(net);
        closed(ctx);
    }
}

static void *run(void *arg)
{
    struct kvf_net *net = arg;
    uint64_t busy_ns = 0;

    kvf_thread_run_soon();
    if (net->config.tunnel != NULL) {
        net->config.tunnel->begin(net->config.tunnel_ctx, net);
    }
    while (!atomic_load(&net->stop)) {
        unsigned n = progress(net);

        net->now_ns = kvf_now_ns();
        n += take_commands(net);
        n += kvf_link_turn(net);
        n += kvf_flow_turn(net);
        kvf_doors_turn(net);
        if (net->config.tunnel != NULL) {
            n += net->config.tunnel->turn(net->config.tunnel_ctx, net->now_ns, net->has_slept);
        }
        net->has_slept = false;
        tell_owner(net);
        if (n != 0) {
            busy_ns = net->now_ns;
        } else if (net->now_ns - busy_ns > (kvf_flow_is_busy(net) ? SPIN_RECORD_NS : SPIN_NS)) {
            wait_for_something(net);
        }
    }
    busy_ns = kvf_now_ns();
    while (!kvf_link_close_all(net) && kvf_now_ns() - busy_ns < CLOSE_NS) {
        (void)progress(net);
        net->now_ns = kvf_now_ns();
    }
    leave(net);
    return NULL;
}

/* ----------------------------------------------------------------------------------------------
 * Opening and closing
 */

/* The network device that has an address. False: none. */
static bool device_of(const struct kvf_net_address *address, char *name, size_t bytes)
{
    struct ifaddrs *all;
    bool found = false;

    if (getifaddrs(&all) != 0) {
        return false;
    }
    for (const struct ifaddrs *i = all; i != NULL && !found; i = i->ifa_next) {
        if (i->ifa_addr == NULL || i->ifa_addr->sa_family != address->address.ss_family) {
            continue;
        }
        if (i->ifa_addr->sa_family == AF_INET) {
            const struct sockaddr_in *a = (const void *)i->ifa_addr;
            const struct sockaddr_in *b = (const void *)&address->address;

            found = a->sin_addr.s_addr == b->sin_addr.s_addr;
        } else if (i->ifa_addr->sa_family == AF_INET6) {
            const struct sockaddr_in6 *a = (const void *)i->ifa_addr;
            const struct sockaddr_in6 *b = (const void *)&address->address;

            found = memcmp(&a->sin6_addr, &b->sin6_addr, sizeof(a->sin6_addr)) == 0;
        }
        if (found) {
            (void)snprintf(name, bytes, "%s", i->ifa_name);
        }
    }
    freeifaddrs(all);
    return found;
}

/* UCX listens for data on every device that it may use, so it is given one: that of the address,
 * unless the environment says which. */
static int open_context(struct kvf_net *net, char *why, size_t why_bytes)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_config_t *config;
    char device[64] = "";
    ucs_status_t status = net->ucx.ucp_config_read(NULL, NULL, &config);

    if (status != UCS_OK) {
        (void)snprintf(why, why_bytes, "UCX does not start: %s; look at variables UCX_*",
                       net->ucx.ucs_status_string(status));
        return KVF_ERR_CONFIG;
    }
    if (net->config.listen.bytes != 0 && getenv("UCX_NET_DEVICES") == NULL) {
        if (!device_of(&net->config.listen, device, sizeof(device))) {
            net->ucx.ucp_config_release(config);
            (void)snprintf(why, why_bytes,
                           "no network device has this address; give one of this node");
            return KVF_ERR_CONFIG;
        }
        (void)net->ucx.ucp_config_modify(config, "NET_DEVICES", device);
    }
    status = net->ucx.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config,
                                       &net->context);
    net->ucx.ucp_config_release(config);
    if (status == UCS_ERR_NO_DEVICE && device[0] != '\0') {
        net->context = NULL;
        (void)snprintf(why, why_bytes,
                       "UCX cannot use the network device %s: is it up, and does UCX_TLS name a "
                       "transport that it has?",
                       device);
        return KVF_ERR_CONFIG;
    }
    if (status != UCS_OK) {
        net->context = NULL;
        (void)snprintf(why, why_bytes, "UCX does not start: %s; look at variables UCX_*",
                       net->ucx.ucs_status_string(status));
        return KVF_ERR_CONFIG;
    }
    return KVF_OK;
}

static int open_worker(struct kvf_net *net, char *why, size_t why_bytes)
{
    /* made here, used by the thread only from then on */
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                    UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                    UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                      .id = KVF_NET_AM_ID,
                                      .cb = kvf_link_message,
                                      .arg = net};
    struct epoll_event event = {.events = EPOLLIN};
    ucs_status_t status = net->ucx.ucp_worker_create(net->context, &params, &net->worker);

    if (status != UCS_OK) {
        net->worker = NULL;
    } else {
        status = net->ucx.ucp_worker_set_am_recv_handler(net->worker, &handler);
    }
    if (status == UCS_OK) {
        status = net->ucx.ucp_worker_get_efd(net->worker, &net->worker_fd);
    }
    if (status != UCS_OK) {
        (void)snprintf(why, why_bytes, "UCX has no transport to use: %s; look at variables UCX_*",
                       net->ucx.ucs_status_string(status));
        return KVF_ERR_CONFIG;
    }
    net->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    net->waker_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (net->epoll_fd < 0 || net->waker_fd < 0 ||
        epoll_ctl(net->epoll_fd, EPOLL_CTL_ADD, net->worker_fd, &event) != 0) {
        (void)snprintf(why, why_bytes, "poll set: %s; raise the limit of open files",
                       strerror(errno));
        return KVF_ERR_NO_MEMORY;
    }
    event.events = EPOLLIN | EPOLLET;
    if (epoll_ctl(net->epoll_fd, EPOLL_CTL_ADD, net->waker_fd, &event) != 0) {
        (void)snprintf(why, why_bytes, "poll set: %s", strerror(errno));
        return KVF_ERR_NO_MEMORY;
    }
    return KVF_OK;
}

static int open_listener(struct kvf_net *net, char *why, size_t why_bytes)
{
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (const struct sockaddr *)&net->config.listen.address,
                     .addrlen = net->config.listen.bytes},
        .conn_handler = {.cb = kvf_link_arrive, .arg = net}};
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucs_status_t status;

    if (net->config.listen.bytes == 0) {
        return KVF_OK;
    }
    status = net->ucx.ucp_listener_create(net->worker, &params, &net->listener);
    if (status != UCS_OK) {
        net->listener = NULL;
        (void)snprintf(why, why_bytes, "cannot be listened on: %s; give a free port of this node",
                       net->ucx.ucs_status_string(status));
        return KVF_ERR_CONFIG;
    }
    if (net->ucx.ucp_listener_query(net->listener, &attr) == UCS_OK) {
        const struct sockaddr_in *in = (const void *)&attr.sockaddr;

        net->port = ntohs(in->sin_port); /* at the same place for IPv6 */
    }
    return KVF_OK;
}

static int open_tables(struct kvf_net *net)
{
    bool is_client = net->config.tenant[0] != '\0';
    int status = kvf_pool_init(&net->sends, "sends", sizeof(struct kvf_link_send),
                               is_client ? KVF_NET_PEER_SENDS_MAX : KVF_NET_SENDS_MAX);

    if (status == KVF_OK) {
        status = kvf_ring_init(&net->commands, sizeof(struct kvf_net_command), COMMANDS);
    }
    if (status == KVF_OK) {
        status = kvf_ring_init(&net->events, sizeof(struct kvf_net_event), EVENTS);
    }
    return status;
}

static int open_all(struct kvf_net *net, char *why, size_t why_bytes)
{
    int status = kvf_ucx_api_open(&net->ucx, why, why_bytes);

    if (status == KVF_OK) {
        status = open_tables(net);
    }
    /* a client is in a process of which it knows nothing */
    if (status == KVF_OK && net->config.tenant[0] == '\0') {
        status = kvf_doors_open(&net->doors);
    }
    if (status == KVF_OK) {
        status = open_context(net, why, why_bytes);
    }
    if (status == KVF_OK) {
        status = open_worker(net, why, why_bytes);
    }
    if (status == KVF_OK) {
        status = open_listener(net, why, why_bytes);
    }
    if (net->doors.folder != NULL) {
        kvf_doors_note(&net->doors);
    }
    if (status == KVF_OK && pthread_create(&net->thread, NULL, run, net) != 0) {
        (void)snprintf(why, why_bytes, "no thread can be started");
        status = KVF_ERR_NO_MEMORY;
    }
    return status;
}

int kvf_net_open(const struct kvf_net_config *config, struct kvf_net **net_out, char *why,
                 size_t why_bytes)
{
    struct kvf_net *net = calloc(1, sizeof(*net));
    sigset_t all, before;
    int status = KVF_ERR_NO_MEMORY;

    (void)snprintf(why, why_bytes, "out of memory");
    if (net == NULL) {
        return status;
    }
    net->config = *config;
    (void)pthread_mutex_init(&net->handover, NULL);
    net->env = kvf_env_system();
    net->epoll_fd = -1;
    net->waker_fd = -1;
    net->doors.spare_fd = -1;
    net->stranger_log = (struct kvf_log_limit){.interval_ns = 10 * KVF_NS_PER_S, .burst_count = 3};
    net->layout_fp = kvf_net_layout_fp();
    net->now_ns = kvf_now_ns();
    if (config->tenant[0] != '\0') {
        memcpy(net->peer_key, config->cluster_key, sizeof(net->peer_key));
    } else {
        kvf_net_peer_key(config->cluster_key, net->peer_key);
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX + KVF_NET_LANES_MAX; i++) {
        net->links[i].net = net;
    }
    /* signals are for the threads that were there before ours and UCX's */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    status = open_all(net, why, why_bytes);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != KVF_OK) {
        kvf_net_close(net);
        return status;
    }
    net->has_thread = true;
    (void)snprintf(net->about, sizeof(net->about), "UCX %u.%u.%u", net->ucx.major, net->ucx.minor,
                   net->ucx.release);
    *net_out = net;
    return KVF_OK;
}

void kvf_net_close(struct kvf_net *net)
{
    if (net == NULL) {
        return;
    }
    if (net->has_thread) {
        atomic_store(&net->stop, true);
        wake_thread(net);
        (void)pthread_join(net->thread, NULL);
    }
    net_free(net);
}

void kvf_net_close_later(struct kvf_net *net, void (*closed)(void *ctx), void *closed_ctx)
{
    (void)pthread_mutex_lock(&net->handover);
    net->closed = closed;
    net->closed_ctx = closed_ctx;
    (void)pthread_detach(net->thread);
    atomic_store(&net->stop, true);
    wake_thread(net);
    (void)pthread_mutex_unlock(&net->handover);
}

uint16_t kvf_net_port(const struct kvf_net *net)
{
    return net->port;
}

const char *kvf_net_about(const struct kvf_net *net)
{
    return net->about;
}

void kvf_net_stat(const struct kvf_net *net, struct kvf_net_stat *stat_out)
{
    stat_out->endpoints = atomic_load(&net->endpoints);
    stat_out->protocol_errors = atomic_load(&net->protocol_errors);
    stat_out->refused = atomic_load(&net->refused);
    stat_out->strangers = atomic_load(&net->strangers);
    stat_out->sent_bytes = atomic_load(&net->sent_bytes);
    stat_out->received_bytes = atomic_load(&net->received_bytes);
}
