/* SPDX-License-Identifier: Apache-2.0
 *
 * directory.c: the directory's queues, thread and connection.
 */
#include "agent/directory_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/parse.h"

#define ANSWER_S     1
#define TURN_NS      (100 * KVF_NS_PER_MS) /* between two looks at what others say */
#define LIST_NS      KVF_NS_PER_S          /* between two looks at who is there */
#define PAUSE_NS     (KVF_NS_PER_S / 2)
#define PAUSE_MAX_NS (30 * KVF_NS_PER_S)
#define CALLS_A_TURN 64
#define REPLY_NS     (2 * KVF_NS_PER_S) /* the whole of one */
#define LEAVE_NS     (2 * KVF_NS_PER_S) /* everything that is under way at the end */

/* One reply at most; whoever sends more is none of ours. */
#define REPLY_BYTES_MAX    (4u << 20)
#define REPLY_ELEMENTS_MAX (1 << 16)

#if HIREDIS_MAJOR >= 1
typedef size_t elements_count;
#else
typedef int elements_count;
#endif

/* ----------------------------------------------------------------------------------------------
 * Queues
 */
static int call(struct kvf_directory *directory, const struct directory_call *what)
{
    if (!kvf_ring_push(&directory->calls, what)) {
        return KVF_ERR_BUSY;
    }
    (void)pthread_mutex_lock(&directory->lock);
    directory->has_calls = true;
    (void)pthread_cond_signal(&directory->changed);
    (void)pthread_mutex_unlock(&directory->lock);
    return KVF_OK;
}

int kvf_directory_tell(struct kvf_directory *directory, enum kvf_net_type type, const void *body,
                       uint32_t body_bytes)
{
    struct directory_call what = {.type = (uint8_t)type, .body_bytes = body_bytes};
    int status;

    what.body = malloc(body_bytes);
    if (what.body == NULL) {
        return KVF_ERR_BUSY;
    }
    memcpy(what.body, body, body_bytes);
    status = call(directory, &what);
    if (status != KVF_OK) {
        free(what.body);
    }
    return status;
}

int kvf_directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed)
{
    return call(directory,
                &(struct directory_call){.incarnation = incarnation, .is_followed = is_followed});
}

bool kvf_directory_poll(struct kvf_directory *directory, struct kvf_directory_event *event_out)
{
    return kvf_ring_pop(&directory->events, event_out);
}

void kvf_directory_stat(const struct kvf_directory *directory, struct kvf_directory_stat *stat_out)
{
    stat_out->is_up = atomic_load(&directory->is_up);
    stat_out->failures = atomic_load(&directory->failures);
    stat_out->refused = atomic_load(&directory->refused);
}

bool directory_has_room(const struct kvf_directory *directory, uint32_t events)
{
    return kvf_ring_count(&directory->events) + events <= kvf_ring_capacity(&directory->events);
}

bool directory_push(struct kvf_directory *directory, const struct kvf_directory_event *event)
{
    if (!kvf_ring_push(&directory->events, event)) {
        return false;
    }
    directory->config.wake(directory->config.wake_ctx);
    return true;
}

void directory_key(const struct kvf_directory *directory, const char *kind, uint64_t incarnation,
                   uint64_t number, char key_out[KVF_DIRECTORY_KEY_BYTES])
{
    int n = snprintf(key_out, KVF_DIRECTORY_KEY_BYTES, "%s%s:%016llx", directory->prefix, kind,
                     (unsigned long long)incarnation);

    if (number != 0) {
        (void)snprintf(key_out + n, KVF_DIRECTORY_KEY_BYTES - (size_t)n, ":%llu",
                       (unsigned long long)number);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Connection
 */
void directory_fail(struct kvf_directory *directory, const char *why)
{
    if (directory->redis == NULL) {
        return;
    }
    (void)snprintf(directory->why, sizeof(directory->why), "%s", why);
    redisFree(directory->redis);
    directory->redis = NULL;
    directory->pipelined = 0;
}

/* hiredis makes room for all elements once it has read how many there are to be. */
static void *make_array(const redisReadTask *task, elements_count n)
{
    const struct kvf_directory *directory = task->privdata;

    return n > REPLY_ELEMENTS_MAX ? NULL : directory->theirs->createArray(task, n);
}

static void bound_replies(struct kvf_directory *directory)
{
    redisReader *reader = directory->redis->reader;

    directory->theirs = reader->fn;
    directory->makers = *reader->fn;
    directory->makers.createArray = make_array;
    reader->fn = &directory->makers;
    reader->privdata = directory;
}

static const char *why_failed(const struct kvf_directory *directory)
{
    const redisContext *redis = directory->redis;

    if (redis->err == REDIS_ERR_OOM) {
        return "out of memory, or an answer of too many parts";
    }
    if (redis->err != REDIS_ERR_IO) {
        return redis->errstr;
    }
    return errno == EAGAIN ? "no answer in a second" : strerror(errno);
}

/* What hiredis would wait for as long as something comes now and then, and store whatever its size.
 * NULL: the connection has failed. */
static void *await_reply(struct kvf_directory *directory)
{
    redisContext *redis = directory->redis;
    uint64_t until_ns = kvf_now_ns() + REPLY_NS;
    size_t come_bytes = 0;
    void *reply = NULL;
    int is_sent = 0;

    while (redisGetReplyFromReader(redis, &reply) == REDIS_OK && reply == NULL) {
        uint64_t now_ns = kvf_now_ns();
        uint64_t end_ns = atomic_load(&directory->end_ns);
        size_t before_bytes = redis->reader->len;

        if (now_ns >= until_ns || (end_ns != 0 && now_ns >= end_ns)) {
            directory_fail(directory, "no whole answer in two seconds");
            return NULL;
        }
        if (come_bytes > REPLY_BYTES_MAX) {
            directory_fail(directory, "an answer without an end");
            return NULL;
        }
        if ((is_sent ? redisBufferRead(redis) : redisBufferWrite(redis, &is_sent)) != REDIS_OK) {
            break;
        }
        come_bytes += redis->reader->len - before_bytes;
    }
    if (reply == NULL) {
        directory_fail(directory, why_failed(directory));
    }
    return reply;
}

redisReply *directory_reply(struct kvf_directory *directory)
{
    redisReply *reply;

    if (directory->redis == NULL) {
        return NULL;
    }
    directory->pipelined -= directory->pipelined > 0;
    reply = await_reply(directory);
    if (reply != NULL && reply->type == REDIS_REPLY_ERROR) {
        directory_fail(directory, reply->str);
        freeReplyObject(reply);
        return NULL;
    }
    return reply;
}

bool directory_drain(struct kvf_directory *directory)
{
    while (directory->pipelined > 0) {
        redisReply *reply = directory_reply(directory);

        if (reply == NULL) {
            return false;
        }
        freeReplyObject(reply);
    }
    return directory->redis != NULL;
}

/* "host:port" or "/path". False: neither. */
static bool split(const char *address, char host_out[256], int *port_out)
{
    const char *colon = strrchr(address, ':');
    char detail[KVF_ERROR_TEXT_BYTES];
    uint64_t port;
    size_t n;

    *port_out = 0;
    if (address[0] == '/') {
        (void)snprintf(host_out, 256, "%s", address);
        return true;
    }
    n = colon != NULL ? (size_t)(colon - address) : 0;
    if (n > 2 && address[0] == '[' && address[n - 1] == ']') {
        address++;
        n -= 2;
    }
    if (n == 0 || n >= 256 || kvf_parse_u64(colon + 1, &port, detail, sizeof(detail)) != KVF_OK ||
        port == 0 || port > UINT16_MAX) {
        return false;
    }
    memcpy(host_out, address, n);
    host_out[n] = '\0';
    *port_out = (int)port;
    return true;
}

static bool greet(struct kvf_directory *directory)
{
    const struct kvf_directory_config *config = &directory->config;
    char secret[KVF_DIRECTORY_SECRET_BYTES];
    char why[KVF_ERROR_TEXT_BYTES];

    if (config->password_file[0] != '\0') {
        if (kvf_directory_password_read(config->password_file, secret, why, sizeof(why)) !=
            KVF_OK) {
            directory_fail(directory, why);
            return false;
        }
        if (config->user[0] != '\0') {
            (void)redisAppendCommand(directory->redis, "AUTH %s %s", config->user, secret);
        } else {
            (void)redisAppendCommand(directory->redis, "AUTH %s", secret);
        }
        explicit_bzero(secret, sizeof(secret));
        directory->pipelined++;
    }
    (void)redisAppendCommand(directory->redis, "PING");
    directory->pipelined++;
    return directory_drain(directory);
}

static void connect_now(struct kvf_directory *directory, uint64_t now_ns)
{
    struct timeval answer = {.tv_sec = ANSWER_S};
    char host[256];
    int port;

    (void)split(directory->config.address, host, &port); /* judged by open */
    directory->redis = port == 0 ? redisConnectUnixWithTimeout(host, answer)
                                 : redisConnectWithTimeout(host, port, answer);
    if (directory->redis != NULL && directory->redis->err != 0) {
        directory_fail(directory, directory->redis->errstr);
    } else if (directory->redis != NULL) {
        (void)fcntl(directory->redis->fd, F_SETFD, FD_CLOEXEC);
        (void)redisSetTimeout(directory->redis, answer);
        bound_replies(directory);
        (void)greet(directory);
    }
    if (directory->redis == NULL) {
        if (atomic_fetch_add(&directory->failures, 1) == 0 || directory->pause_ns == 0) {
            kvf_log(KVF_LOG_WARNING,
                    "directory: %.100s: %.150s: tried again and again; until then only linked "
                    "nodes say what they have",
                    directory->config.address, directory->why);
        }
        directory->pause_ns = directory->pause_ns == 0 ? PAUSE_NS : 2 * directory->pause_ns;
        directory->pause_ns = directory->pause_ns > PAUSE_MAX_NS ? PAUSE_MAX_NS
                                                                 : directory->pause_ns;
        directory->retry_ns = now_ns + directory->pause_ns;
        return;
    }
    kvf_log(KVF_LOG_INFO, "directory: %s: connected", directory->config.address);
    directory->pause_ns = 0;
    directory->is_listed = false;
    directory->renew_ns = now_ns;
    directory->list_ns = now_ns;
    directory->settled_ns = now_ns + directory->config.lease_s * KVF_NS_PER_S + PAUSE_MAX_NS;
    atomic_store(&directory->is_up, true);
}

/* What others have said is read anew once the server is there again. */
static void went_down(struct kvf_directory *directory, uint64_t now_ns)
{
    atomic_store(&directory->is_up, false);
    (void)atomic_fetch_add(&directory->failures, 1);
    kvf_log(KVF_LOG_WARNING, "directory: %.100s: connection lost: %.150s",
            directory->config.address, directory->why);
    for (uint32_t i = 0; i < KVF_DIRECTORY_NODES_MAX; i++) {
        if (directory->nodes[i].follow != FOLLOW_NOT) {
            directory->nodes[i].follow = FOLLOW_START;
        }
    }
    directory->is_telling = false;
    directory->told = 0;
    directory->pause_ns = PAUSE_NS;
    directory->retry_ns = now_ns + PAUSE_NS;
    directory->owes_down = true;
}

/* ----------------------------------------------------------------------------------------------
 * The thread
 */
static void take_calls(struct kvf_directory *directory)
{
    struct directory_call what;

    for (unsigned i = 0; i < CALLS_A_TURN && kvf_ring_pop(&directory->calls, &what); i++) {
        if (directory->redis != NULL && what.type != 0) {
            directory_tell(directory, &what);
        } else if (what.type == 0) {
            directory_follow(directory, what.incarnation, what.is_followed);
        }
        free(what.body);
    }
    if (directory->redis != NULL) {
        (void)directory_drain(directory);
    }
}

static void turn(struct kvf_directory *directory)
{
    uint64_t now_ns = kvf_now_ns();

    if (directory->owes_down) {
        directory->owes_down = !directory_push(
            directory, &(struct kvf_directory_event){.kind = KVF_DIRECTORY_DOWN});
    }
    if (directory->redis == NULL && !directory->owes_down && now_ns >= directory->retry_ns) {
        connect_now(directory, now_ns);
    }
    if (directory->redis != NULL && now_ns >= directory->renew_ns) {
        directory_renew(directory);
        directory->renew_ns = now_ns + directory->config.lease_s * KVF_NS_PER_S / 3;
    }
    if (directory->redis != NULL && now_ns >= directory->list_ns) {
        directory_list(directory);
        directory->list_ns = now_ns + LIST_NS;
    }
    take_calls(directory);
    if (directory->redis != NULL) {
        directory_tell_nodes(directory);
        directory_read(directory);
    }
    if (directory->redis == NULL && atomic_load(&directory->is_up)) {
        went_down(directory, now_ns);
    }
}

/* Until there is something to do. False: the end. */
static bool wait_a_turn(struct kvf_directory *directory)
{
    struct timespec until;
    bool is_ending;

    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)TURN_NS;
    until.tv_sec += until.tv_nsec / (long)KVF_NS_PER_S;
    until.tv_nsec %= (long)KVF_NS_PER_S;
    (void)pthread_mutex_lock(&directory->lock);
    while (!directory->has_calls && !directory->is_ending &&
           pthread_cond_timedwait(&directory->changed, &directory->lock, &until) == 0) {
    }
    directory->has_calls = false;
    is_ending = directory->is_ending;
    (void)pthread_mutex_unlock(&directory->lock);
    return !is_ending;
}

static void *run(void *ctx)
{
    struct kvf_directory *directory = ctx;

    do {
        turn(directory);
    } while (wait_a_turn(directory));
    if (directory->redis != NULL) {
        directory_leave(directory);
    }
    directory_fail(directory, "end");
    return NULL;
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
static int start(struct kvf_directory *directory)
{
    sigset_t all, before;
    int error;

    (void)sigfillset(&all); /* signals are the main thread's */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&directory->thread, NULL, run, directory);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    directory->has_thread = error == 0;
    return error == 0 ? KVF_OK : KVF_ERR_NO_MEMORY;
}

static int init(struct kvf_directory *directory)
{
    uint8_t id[KVF_HASH_KEY_BYTES];
    pthread_condattr_t attributes;
    uint64_t name;
    int status;

    kvf_key_derive(directory->config.cluster_key, "directory name", NULL, 0, id);
    memcpy(&name, id, sizeof(name));
    (void)snprintf(directory->prefix, sizeof(directory->prefix),
                   "kvferry:%016llx:", (unsigned long long)name);
    (void)pthread_mutex_init(&directory->lock, NULL);
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&directory->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    status = kvf_ring_init(&directory->calls, sizeof(struct directory_call), KVF_DIRECTORY_QUEUE);
    return status != KVF_OK ? status
                            : kvf_ring_init(&directory->events, sizeof(struct kvf_directory_event),
                                            KVF_DIRECTORY_QUEUE);
}

int kvf_directory_open(const struct kvf_directory_config *config,
                       struct kvf_directory **directory_out, char *why, size_t why_bytes)
{
    struct kvf_directory *directory;
    char secret[KVF_DIRECTORY_SECRET_BYTES];
    char host[256];
    int status;
    int port;

    if (!split(config->address, host, &port)) {
        (void)snprintf(why, why_bytes, "it is neither host:port nor the path of a Unix socket");
        return KVF_ERR_CONFIG;
    }
    if (config->password_file[0] != '\0' &&
        kvf_directory_password_read(config->password_file, secret, why, why_bytes) != KVF_OK) {
        return KVF_ERR_CONFIG;
    }
    explicit_bzero(secret, sizeof(secret));
    directory = calloc(1, sizeof(*directory));
    if (directory == NULL) {
        (void)snprintf(why, why_bytes, "out of memory");
        return KVF_ERR_NO_MEMORY;
    }
    directory->config = *config;
    status = init(directory);
    if (status == KVF_OK) {
        status = start(directory);
    }
    if (status != KVF_OK) {
        (void)snprintf(why, why_bytes, "no memory for a thread and its queues");
        kvf_directory_close(directory);
        return status;
    }
    *directory_out = directory;
    return KVF_OK;
}

void kvf_directory_close(struct kvf_directory *directory)
{
    struct kvf_directory_event event;
    struct directory_call what;

    if (directory == NULL) {
        return;
    }
    if (directory->has_thread) {
        atomic_store(&directory->end_ns, kvf_now_ns() + LEAVE_NS);
        (void)pthread_mutex_lock(&directory->lock);
        directory->is_ending = true;
        (void)pthread_cond_signal(&directory->changed);
        (void)pthread_mutex_unlock(&directory->lock);
        (void)pthread_join(directory->thread, NULL);
    }
    while (directory->calls.entries != NULL && kvf_ring_pop(&directory->calls, &what)) {
        free(what.body);
    }
    while (directory->events.entries != NULL && kvf_ring_pop(&directory->events, &event)) {
        free(event.body);
    }
    kvf_ring_fini(&directory->calls);
    kvf_ring_fini(&directory->events);
    (void)pthread_mutex_destroy(&directory->lock);
    (void)pthread_cond_destroy(&directory->changed);
    explicit_bzero(directory->config.cluster_key, sizeof(directory->config.cluster_key));
    free(directory);
}
