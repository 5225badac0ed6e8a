/* SPDX-License-Identifier: Apache-2.0
 *
 * admin.c: the HTTP server. libmicrohttpd parses; one thread of ours drives it on both sockets.
 *
 * An answer is made while the thread waits for the reactor, so one slow question delays the others;
 * that bounds what the admin side can ask of the reactor at a time.
 */
#include "agent/admin.h"

#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/activation.h"
#include "agent/admin_internal.h"
#include "base/fd.h"
#include "base/log.h"

/* The servers are run at least this often. */
#define RUN_AGAIN_MS 500

struct server {
    struct kvf_admin *admin;
    bool is_public; /* the TCP one: health and metrics only */
    struct kvf_admin_socket socket;
    struct MHD_Daemon *mhd;
};

/* Owner: the admin thread, but for start and stop and the api's atomic flag. */
struct kvf_admin {
    struct kvf_admin_api api;
    struct server servers[2];
    int stop_fd;
    pthread_t thread;
    bool has_thread;
};

/* What a connection's request has sent so far. */
struct exchange {
    size_t body_bytes;
};

static const char *query_argument(const struct kvf_admin_request *request, const char *name)
{
    return MHD_lookup_connection_value(request->ctx, MHD_GET_ARGUMENT_KIND, name);
}

static enum MHD_Result send_reply(struct MHD_Connection *connection, struct kvf_admin_reply *reply)
{
    struct MHD_Response *response;
    enum MHD_Result result;

    if (reply->text == NULL) {
        return MHD_NO; /* no memory: the connection is closed */
    }
    response = MHD_create_response_from_buffer(reply->text_bytes, reply->text,
                                               MHD_RESPMEM_MUST_FREE);
    if (response == NULL) {
        free(reply->text);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, reply->content_type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    result = MHD_queue_response(connection, reply->http_status, response);
    MHD_destroy_response(response);
    return result;
}

static void route(struct server *server, const char *method, const char *path,
                  const struct kvf_admin_request *request, struct kvf_admin_reply *reply)
{
    bool path_exists = false;

    for (const struct kvf_admin_route *r = kvf_admin_routes; r->path != NULL; r++) {
        if (strcmp(r->path, path) != 0 || (server->is_public && !r->is_public)) {
            continue;
        }
        path_exists = true;
        if (strcmp(r->method, method) == 0) {
            r->answer(&server->admin->api, request, reply);
            return;
        }
    }
    kvf_admin_reply_status(reply, path_exists ? MHD_HTTP_METHOD_NOT_ALLOWED : MHD_HTTP_NOT_FOUND,
                           "invalid",
                           path_exists ? "this path takes another method" : "no such path");
}

/* Called for the head, for each piece of the body, and once more at the end: only then a reply. */
static enum MHD_Result on_request(void *ctx, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload_data,
                                  size_t *upload_bytes, void **exchange_inout)
{
    struct exchange *exchange = *exchange_inout;
    struct kvf_admin_request request = {.argument = query_argument, .ctx = connection};
    struct kvf_admin_reply reply = {0};

    (void)version;
    (void)upload_data;
    if (exchange == NULL) {
        exchange = calloc(1, sizeof(*exchange));
        *exchange_inout = exchange;
        return exchange != NULL ? MHD_YES : MHD_NO;
    }
    if (*upload_bytes != 0) {
        exchange->body_bytes += *upload_bytes;
        *upload_bytes = 0;
        return exchange->body_bytes <= KVF_ADMIN_BODY_BYTES_MAX ? MHD_YES : MHD_NO;
    }
    route(ctx, method, url, &request, &reply);
    return send_reply(connection, &reply);
}

static void on_completed(void *ctx, struct MHD_Connection *connection, void **exchange_inout,
                         enum MHD_RequestTerminationCode code)
{
    (void)ctx;
    (void)connection;
    (void)code;
    free(*exchange_inout);
    *exchange_inout = NULL;
}

static void on_log(void *ctx, const char *fmt, va_list args)
{
    char text[256];
    size_t length;

    (void)ctx;
    vsnprintf(text, sizeof(text), fmt, args);
    length = strlen(text);
    while (length > 0 && text[length - 1] == '\n') {
        text[--length] = '\0';
    }
    kvf_log(KVF_LOG_DEBUG, "admin: %s", text);
}

/* Do both descriptors mean one socket, and is the second one open at all? */
static bool is_same(int fd, int other_fd)
{
    struct stat st;
    struct stat other;

    return fstat(fd, &st) == 0 && fstat(other_fd, &other) == 0 && st.st_dev == other.st_dev &&
           st.st_ino == other.st_ino;
}

static int server_start(struct server *server)
{
    /* its own: some of its failures close the descriptor that it was given, and some do not */
    int fd = fcntl(server->socket.fd, F_DUPFD_CLOEXEC, 0);

    if (fd < 0) {
        kvf_log(KVF_LOG_ERROR, "admin: a second descriptor: %s", strerror(errno));
        return KVF_ERR_NO_MEMORY;
    }
    server->mhd = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_USE_ERROR_LOG, 0, NULL, NULL, on_request, server,
        MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET, fd,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)KVF_ADMIN_CONNECTIONS_MAX,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)KVF_ADMIN_CONNECTION_BYTES,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)KVF_ADMIN_IDLE_S, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, NULL, MHD_OPTION_END);
    if (server->mhd == NULL) {
        kvf_log(KVF_LOG_ERROR, "admin: the HTTP server does not start: %s", strerror(errno));
        if (is_same(server->socket.fd, fd)) {
            kvf_fd_close(&fd);
        }
        return KVF_ERR_NO_MEMORY;
    }
    return KVF_OK;
}

/* Milliseconds until one of the servers has a timer to run. At its limit of connections,
 * libmicrohttpd stops to watch its listening socket, and takes it up again only when it is run once
 * more after some of them have ended: nothing would wake us for that. */
static int poll_timeout_ms(const struct kvf_admin *admin)
{
    unsigned long long least = RUN_AGAIN_MS;
    unsigned long long ms;

    for (unsigned i = 0; i < 2; i++) {
        if (admin->servers[i].mhd != NULL &&
            MHD_get_timeout(admin->servers[i].mhd, &ms) == MHD_YES && ms < least) {
            least = ms;
        }
    }
    return (int)least;
}

static void *admin_thread(void *arg)
{
    struct kvf_admin *admin = arg;
    struct pollfd fds[3] = {{.fd = admin->stop_fd, .events = POLLIN}};

    for (unsigned i = 0; i < 2; i++) {
        struct server *server = &admin->servers[i];
        const union MHD_DaemonInfo *info =
            server->mhd != NULL ? MHD_get_daemon_info(server->mhd, MHD_DAEMON_INFO_EPOLL_FD) : NULL;

        fds[1 + i] = (struct pollfd){.fd = info != NULL ? info->epoll_fd : -1, .events = POLLIN};
    }
    while (!atomic_load_explicit(&admin->api.is_stopping, memory_order_acquire)) {
        if (poll(fds, 3, poll_timeout_ms(admin)) < 0 && errno != EINTR) {
            kvf_log(KVF_LOG_ERROR, "admin: poll: %s", strerror(errno));
            break;
        }
        for (unsigned i = 0; i < 2; i++) {
            if (admin->servers[i].mhd != NULL) {
                MHD_run(admin->servers[i].mhd);
            }
        }
    }
    return NULL;
}

/* The thread must take none of the process's signals: the reactor's thread handles them. */
static int thread_start(struct kvf_admin *admin)
{
    sigset_t all;
    sigset_t before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&admin->thread, NULL, admin_thread, admin);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        kvf_log(KVF_LOG_ERROR, "admin: no thread: %s", strerror(error));
        return KVF_ERR_NO_MEMORY;
    }
    pthread_setname_np(admin->thread, "kvf-admin");
    admin->has_thread = true;
    return KVF_OK;
}

/* The service manager's socket, if it has passed one, which then stays at its path; else ours. */
static int listen_unix(const struct kvf_config *config, struct kvf_admin_socket *socket_out)
{
    int64_t gid;
    int status;

    *socket_out = (struct kvf_admin_socket){.fd = kvf_activation_take(config->admin_socket)};
    if (socket_out->fd >= 0) {
        return KVF_OK;
    }
    status = kvf_config_group(config->sockets[0].group, &gid);
    return status != KVF_OK ? status
                            : kvf_admin_listen_unix(config->admin_socket,
                                                    (mode_t)config->admin_mode, gid, socket_out);
}

int kvf_admin_start(const struct kvf_config *config, struct kvf_agent *agent,
                    struct kvf_admin **admin_out)
{
    struct kvf_admin *admin = calloc(1, sizeof(*admin));
    int status = KVF_ERR_NO_MEMORY;

    if (admin == NULL) {
        kvf_log(KVF_LOG_ERROR, "admin: out of memory");
        return KVF_ERR_NO_MEMORY;
    }
    admin->api.config = config;
    admin->api.agent = agent;
    admin->servers[0] = (struct server){.admin = admin, .socket.fd = -1};
    admin->servers[1] = (struct server){.admin = admin, .socket.fd = -1, .is_public = true};
    admin->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (admin->stop_fd < 0) {
        kvf_log(KVF_LOG_ERROR, "admin: eventfd: %s", strerror(errno));
        goto fail;
    }
    status = listen_unix(config, &admin->servers[0].socket);
    if (status == KVF_OK && config->admin_listen[0] != '\0') {
        status = kvf_admin_listen_tcp(config->admin_listen, &admin->servers[1].socket);
    }
    for (unsigned i = 0; i < 2 && status == KVF_OK; i++) {
        if (admin->servers[i].socket.fd >= 0) {
            status = server_start(&admin->servers[i]);
        }
    }
    if (status == KVF_OK) {
        status = thread_start(admin);
    }
    if (status != KVF_OK) {
        goto fail;
    }
    *admin_out = admin;
    return KVF_OK;
fail:
    kvf_admin_stop(admin);
    return status;
}

void kvf_admin_stop(struct kvf_admin *admin)
{
    if (admin == NULL) {
        return;
    }
    atomic_store_explicit(&admin->api.is_stopping, true, memory_order_release);
    if (admin->has_thread) {
        eventfd_write(admin->stop_fd, 1);
        pthread_join(admin->thread, NULL);
    }
    for (unsigned i = 0; i < 2; i++) {
        struct server *server = &admin->servers[i];

        if (server->mhd != NULL) {
            /* not left to its end, which may shut down a socket that a service manager keeps */
            int fd = MHD_quiesce_daemon(server->mhd);

            MHD_stop_daemon(server->mhd);
            kvf_fd_close(&fd);
        }
        kvf_admin_socket_close(&server->socket);
    }
    kvf_fd_close(&admin->stop_fd);
    free(admin);
}
