/* SPDX-License-Identifier: Apache-2.0
 *
 * session.c: one attached client, from accept to the last byte of its memory. The handshake's order
 * is in transport/proto_wire.h; what the client may read is decided by the socket it came through.
 */
#include "agent/core.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "agent/calibration.h"
#include "agent/observe.h"
#include "base/fd.h"
#include "base/mutant.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"

#define HELLO_TIMEOUT_NS (5 * KVF_NS_PER_S)
#define HELD_MAX         16 /* sockets of offenders that wait */
#define HELD_OF_ONE_MAX  4
#define ANNOUNCE_MAX     8192u /* pieces that may wait for the socket, twice what an arena has */
#define ANNOUNCE_DROPPED 0x80000000u

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* from Linux 6.5 on */
#endif
#define PIDFS_TYPE 0x50494446

static_assert(ANNOUNCE_MAX >= 2 * KVF_DRAM_PIECES_MAX, "an arena can be replaced");

uint64_t kvf_session_table_bytes(uint32_t ring_entries)
{
    return KVF_SHM_REQUEST_ENTRIES_MAX * sizeof(struct kvf_shm_key) +
           KVF_REQUEST_KEYS_MAX * sizeof(kvf_location) + ANNOUNCE_MAX * sizeof(uint32_t) +
           2ull * ring_entries * sizeof(struct kvf_lease);
}

/* ----------------------------------------------------------------------------------------------
 * Messages
 */
static void send_welcome_refusal(int fd, int status, const char *text)
{
    struct kvf_wire_welcome welcome = {0};

    kvf_proto_head_init(&welcome.head, KVF_WIRE_WELCOME);
    welcome.status = status;
    (void)snprintf(welcome.text, sizeof(welcome.text), "%s", text);
    (void)kvf_seqpacket_send(fd, &welcome, sizeof(welcome), NULL, 0);
}

/* Clients that come and go in a loop must not fill the log. */
static bool may_log(struct kvf_agent *agent)
{
    uint64_t suppressed = 0;

    if (!kvf_log_limit_allow(&agent->session_log, agent->now_ns, &suppressed)) {
        return false;
    }
    if (suppressed > 0) {
        kvf_log(KVF_LOG_INFO, "%llu more lines about clients were left out",
                (unsigned long long)suppressed);
    }
    return true;
}

static void refuse(struct kvf_session *session, int status, const char *text)
{
    if (may_log(session->agent)) {
        kvf_log(KVF_LOG_WARNING, "client %s (pid %d) refused: %s", session->name, session->pid,
                text);
    }
    session->agent->metrics.attach_refused++;
    send_welcome_refusal(session->fd, status, text);
    kvf_session_end(session, NULL);
}

/* Say that a piece came or went. KVF_OK; KVF_ERR_BUSY: the socket is full. */
static int send_piece(struct kvf_session *session, uint32_t piece_id, bool is_dropped)
{
    struct kvf_wire_piece message = {.piece = piece_id};
    struct kvf_dram_piece piece;

    kvf_proto_head_init(&message.head, is_dropped ? KVF_WIRE_PIECE_DROP : KVF_WIRE_PIECE);
    if (is_dropped) {
        return kvf_seqpacket_send(session->fd, &message, sizeof(message), NULL, 0);
    }
    if (kvf_dram_piece_get(session->agent->dram_store, piece_id, &piece) != KVF_OK) {
        return KVF_OK; /* cannot be: its drop has taken it out of the queue */
    }
    message.bytes = piece.bytes;
    return kvf_seqpacket_send(session->fd, &message, sizeof(message), &piece.fd, 1);
}

static int send_note(struct kvf_session *session, enum kvf_wire_type type, int status)
{
    struct kvf_wire_note note = {0};

    kvf_proto_head_init(&note.head, type);
    note.status = status;
    note.connection_id = session->connection_id;
    return kvf_seqpacket_send(session->fd, &note, sizeof(note), NULL, 0);
}

static bool knows_pieces(const struct kvf_session *session)
{
    return session->state == KVF_SESSION_MAPPING || session->state == KVF_SESSION_SEALING ||
           session->state == KVF_SESSION_READY;
}

/* Pieces go through a queue, because a socket holds only some hundred messages. */
static void announce(struct kvf_session *session, uint32_t word)
{
    uint32_t at = session->announce_tail & (ANNOUNCE_MAX - 1);

    for (uint32_t i = session->announce_head;
         (word & ANNOUNCE_DROPPED) != 0 && i != session->announce_tail; i++) {
        uint32_t *waiting = &session->announce[i & (ANNOUNCE_MAX - 1)];

        if (*waiting == (word & ~ANNOUNCE_DROPPED)) {
            *waiting = 0; /* it never knew of it */
            return;
        }
    }
    if (session->announce_tail - session->announce_head == ANNOUNCE_MAX) {
        session->is_broken = true; /* it has not read its socket for a whole arena's worth */
        return;
    }
    session->announce[at] = word;
    session->announce_tail++;
}

void kvf_session_flush(struct kvf_session *session)
{
    bool was_waiting = session->is_writing;
    int status = KVF_OK;

    if (session->owes_ready) {
        status = send_note(session, KVF_WIRE_READY, KVF_OK);
        session->owes_ready = status != KVF_OK;
    }
    while (status == KVF_OK && session->announce_head != session->announce_tail) {
        uint32_t word = session->announce[session->announce_head & (ANNOUNCE_MAX - 1)];

        if (word != 0) {
            status = send_piece(session, word & ~ANNOUNCE_DROPPED, (word & ANNOUNCE_DROPPED) != 0);
        }
        session->announce_head += status == KVF_OK;
    }
    if (status == KVF_OK && session->state == KVF_SESSION_READY) {
        status = kvf_hbm_announce(session);
        session->owes_device = status == KVF_ERR_BUSY;
    }
    if (status != KVF_OK && status != KVF_ERR_BUSY) {
        session->is_broken = true;
        return;
    }
    session->is_writing = session->owes_ready || session->owes_device ||
                          session->announce_head != session->announce_tail;
    if (session->is_writing != was_waiting) {
        kvf_loop_change(session->agent, session->fd,
                        EPOLLIN | EPOLLRDHUP | (session->is_writing ? EPOLLOUT : 0u),
                        &session->socket_source);
    }
}

static void announce_all(struct kvf_agent *agent, uint32_t piece_id, uint32_t flag)
{
    struct kvf_dram_piece piece;

    if (agent->sessions == NULL ||
        kvf_dram_piece_get(agent->dram_store, piece_id, &piece) != KVF_OK) {
        return;
    }
    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (knows_pieces(session) &&
            (session->tenant == piece.tenant || KVF_MUTANT(tenants_mixed))) {
            announce(session, piece_id | flag);
            kvf_session_flush(session);
        }
    }
}

void kvf_session_piece_added(struct kvf_agent *agent, uint32_t piece_id)
{
    announce_all(agent, piece_id, 0);
}

void kvf_session_piece_dropped(struct kvf_agent *agent, uint32_t piece_id)
{
    announce_all(agent, piece_id, ANNOUNCE_DROPPED);
}

void kvf_session_say_bye(struct kvf_session *session, int status)
{
    session->is_draining = true;
    (void)send_note(session, KVF_WIRE_BYE, status);
}

/* ----------------------------------------------------------------------------------------------
 * Accept
 */
static struct kvf_session *free_session(struct kvf_agent *agent)
{
    for (uint32_t i = 0; i < agent->sessions_capacity; i++) {
        if (agent->sessions[i].state == KVF_SESSION_FREE) {
            return &agent->sessions[i];
        }
    }
    return NULL;
}

static void credentials_of(struct kvf_session *session)
{
    struct ucred peer = {0};
    socklen_t bytes = sizeof(peer);

    if (getsockopt(session->fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
        peer.pid != getpid()) {
        session->pid = peer.pid;
        session->uid = peer.uid;
    }
}

/* A number of the process that has connected. From Linux 6.9 on a pidfd's inode is its own, also
 * where its pid cannot be seen from here, and is not used again; before, the pid has to do. 0: of
 * another container, it cannot be told from others. */
static uint64_t peer_of(int fd)
{
    struct ucred peer = {0};
    socklen_t bytes = sizeof(peer);
    uint64_t number = 0;
    int pidfd = -1;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &(socklen_t){sizeof(pidfd)}) == 0) {
        struct statfs kind;
        struct stat st;

        if (fstatfs(pidfd, &kind) == 0 && kind.f_type == PIDFS_TYPE && fstat(pidfd, &st) == 0) {
            number = st.st_ino;
        }
        kvf_fd_close(&pidfd);
    }
    if (number == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0) {
        number = (uint32_t)peer.pid;
    }
    return number;
}

/* Before its HELLO. One that has come is read first: closing over it would reach the client before
 * the answer does. */
void kvf_session_refuse_socket(int fd, const char *text)
{
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message received;

    if (kvf_seqpacket_recv(fd, data, sizeof(data), &received) == KVF_OK) {
        kvf_seqpacket_message_close(&received);
    }
    send_welcome_refusal(fd, KVF_ERR_BUSY, text);
    kvf_fd_close(&fd);
}

static bool is_held(const struct kvf_session *session)
{
    return session->state == KVF_SESSION_HELLO && session->held_until_ns != 0;
}

/* Has the client closed it meanwhile? Nobody watches it. */
static bool is_given_up(const struct kvf_session *session)
{
    struct pollfd poll_fd = {.fd = session->fd, .events = POLLRDHUP};

    return poll(&poll_fd, 1, 0) == 1;
}

/* May one more socket of an offender wait? */
static bool may_hold(struct kvf_agent *agent, uint64_t peer)
{
    uint32_t n_held = 0, n_own = 0;

    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        struct kvf_session *session = &agent->sessions[i];

        if (is_held(session) && is_given_up(session)) {
            kvf_session_end(session, NULL);
        }
        n_held += is_held(session);
        n_own += is_held(session) && session->peer == peer;
    }
    return n_own < HELD_OF_ONE_MAX && n_held < HELD_MAX;
}

static int watch_socket(struct kvf_session *session)
{
    int status = kvf_loop_add(session->agent, session->fd, EPOLLIN | EPOLLRDHUP,
                              &session->socket_source);

    if (status != KVF_OK) {
        kvf_session_end(session, "cannot be watched");
    }
    return status == KVF_OK ? KVF_OK : KVF_ERR_BUSY;
}

void kvf_session_unhold(struct kvf_session *session)
{
    struct kvf_agent *agent = session->agent;

    session->held_until_ns = 0;
    kvf_offence_attach(&agent->offenders, session->peer, agent->now_ns);
    (void)watch_socket(session);
}

int kvf_session_adopt(struct kvf_agent *agent, uint16_t tenant, int fd, uint64_t peer)
{
    uint64_t until_ns = kvf_offence_until_ns(&agent->offenders, peer, agent->now_ns);
    struct kvf_session *session;
    const char *why = NULL;

    if (until_ns != 0 && !may_hold(agent, peer)) {
        why = kvf_offence_text(peer);
    }
    session = agent->is_draining ? NULL : free_session(agent);
    if (why == NULL && session == NULL) {
        why = agent->is_draining ? "the daemon is stopping" : "too many clients are connecting";
    }
    if (why != NULL) {
        kvf_session_refuse_socket(fd, why);
        agent->metrics.attach_refused++;
        return KVF_ERR_BUSY;
    }
    memset(session, 0, sizeof(*session));
    session->agent = agent;
    session->state = KVF_SESSION_HELLO;
    session->fd = fd;
    session->eventfd = -1;
    session->ring_fd = -1;
    session->staging_fd = -1;
    session->tenant = tenant;
    session->namespace_index = KVF_INDEX_NAMESPACES_MAX;
    session->lease_oldest = KVF_INDEX_NONE;
    session->lease_newest = KVF_INDEX_NONE;
    session->connection_id = ++agent->next_connection_id;
    session->hello_deadline_ns = agent->now_ns + HELLO_TIMEOUT_NS;
    session->socket_source.kind = KVF_SOURCE_SESSION_SOCKET;
    session->socket_source.owner = session;
    session->eventfd_source.kind = KVF_SOURCE_SESSION_EVENTFD;
    session->eventfd_source.owner = session;
    (void)snprintf(session->name, sizeof(session->name), "unnamed");
    session->peer = peer;
    credentials_of(session);
    agent->sessions_count++;
    if (agent->sessions_high <= (uint32_t)(session - agent->sessions)) {
        agent->sessions_high = (uint32_t)(session - agent->sessions) + 1;
    }
    if (until_ns != 0) {
        session->held_until_ns = until_ns;
        session->hello_deadline_ns = until_ns + HELLO_TIMEOUT_NS;
        agent->metrics.attach_delayed++;
        return KVF_OK;
    }
    kvf_offence_attach(&agent->offenders, peer, agent->now_ns);
    return watch_socket(session);
}

void kvf_session_accept(struct kvf_agent *agent, struct kvf_listener *listener)
{
    int fd;
    int status = kvf_seqpacket_accept(&listener->listener, &fd);

    if (status == KVF_ERR_BUSY && agent->reserve_fd >= 0) {
        /* out of descriptors: give one up to tell the client, or it would wait for ever */
        kvf_fd_close(&agent->reserve_fd);
        if (kvf_seqpacket_accept(&listener->listener, &fd) == KVF_OK) {
            send_welcome_refusal(fd, KVF_ERR_BUSY, "the daemon has no file descriptors left");
            kvf_fd_close(&fd);
        }
        agent->reserve_fd = eventfd(0, EFD_CLOEXEC);
        return;
    }
    if (status != KVF_OK) {
        return;
    }
    (void)kvf_session_adopt(agent, listener->tenant, fd, peer_of(fd));
}

/* ----------------------------------------------------------------------------------------------
 * HELLO
 */

static uint32_t power_of_two(uint64_t value, uint32_t max)
{
    uint32_t power = 64;

    while (power < value && power < max) {
        power *= 2;
    }
    return power;
}

/* Sizes of its memory, charged against staging.total. */
static int choose_sizes(struct kvf_session *session, char *text, size_t bytes)
{
    struct kvf_agent *agent = session->agent;
    const struct kvf_config *config = agent->config;
    const struct kvf_wire_hello *hello = &session->hello;
    uint64_t record = session->plan.record_bytes_max;
    uint64_t asked = hello->ring_entries == 0 ? 1024 : hello->ring_entries;
    uint32_t max = power_of_two(config->clients_ring_entries, 16384);
    uint32_t sq = power_of_two(asked, max);
    uint64_t staging = hello->staging_bytes == 0 ? config->staging_client : hello->staging_bytes;

    if (session->plan.profile->opaque) {
        record = 2 * KVF_RECORD_PAGE_BYTES; /* clients of bytes know what they put */
    }
    if (!kvf_dram_fits(agent->dram_store, record)) {
        (void)snprintf(text, bytes,
                       "a block can have %llu bytes, more than the arena can hold (%llu); use "
                       "fewer chunk_tokens, or raise dram.bytes",
                       (unsigned long long)record,
                       (unsigned long long)kvf_dram_record_bytes_max(agent->dram_store));
        return KVF_ERR_TOO_LARGE;
    }
    staging = staging < 2 * record ? 2 * record : staging;
    staging = (staging + 4095) & ~UINT64_C(4095);
    if (kvf_shm_layout_init(&session->layout, sq, 2 * sq,
                            4 * sq < KVF_SHM_KEY_ENTRIES_MIN ? KVF_SHM_KEY_ENTRIES_MIN : 4 * sq,
                            2 * sq) != KVF_OK) {
        (void)snprintf(text, bytes, "ring_entries %u is out of range", hello->ring_entries);
        return KVF_ERR_INVALID;
    }
    session->layout.connection_id = session->connection_id;
    session->layout.incarnation = agent->incarnation;
    session->ring_bytes = session->layout.segment_bytes;
    session->staging_bytes = staging;
    session->credits = session->layout.cq_entries;
    session->charged_bytes = staging + session->ring_bytes;
    if (agent->staging_used_bytes + session->charged_bytes > config->staging_total) {
        (void)snprintf(text, bytes,
                       "staging.total is used up: %llu of %llu MiB, %llu more asked; retry, ask "
                       "for less, or raise it",
                       (unsigned long long)(agent->staging_used_bytes >> 20),
                       (unsigned long long)(config->staging_total >> 20),
                       (unsigned long long)(session->charged_bytes >> 20));
        session->charged_bytes = 0;
        return KVF_ERR_BUSY;
    }
    agent->staging_used_bytes += session->charged_bytes;
    return KVF_OK;
}

static int join_namespace(struct kvf_session *session, char *text, size_t bytes)
{
    struct kvf_agent *agent = session->agent;
    const struct kvf_wire_hello *hello = &session->hello;
    uint64_t sizes[KVF_CODEC_FIXED_SIZES_MAX];
    struct kvf_namespace *ns;
    uint16_t index;
    uint32_t n_sizes;
    int status = kvf_namespace_join(agent, session->tenant,
                                    kvf_namespace_id(agent, session->tenant, hello, &session->plan),
                                    session->shard_count, &index);

    if (status == KVF_ERR_REFUSED) {
        (void)snprintf(text, bytes,
                       "tenant %s has blocks in as many namespaces as quota.namespaces allows; "
                       "purge one of them or raise it",
                       agent->tenants[session->tenant].name);
    } else if (status != KVF_OK) {
        (void)snprintf(text, bytes, "%d namespaces are in use; purge one of them",
                       KVF_INDEX_NAMESPACES_MAX);
    }
    if (status != KVF_OK) {
        return status;
    }
    session->namespace_index = index;
    ns = &agent->namespaces[index];
    ns->tenant = session->tenant;
    ns->is_known = true;
    ns->is_lossless = session->plan.lossless;
    ns->clients++;
    memcpy(ns->label, hello->label, sizeof(ns->label));
    memcpy(ns->profile, session->profile, sizeof(ns->profile));
    n_sizes = kvf_codec_plan_fixed_sizes(&session->plan, sizes);
    for (uint32_t i = 0; i < n_sizes; i++) {
        /* a full table only costs the unused part of an octave slot */
        (void)kvf_dram_register_format(agent->dram_store, sizes[i]);
    }
    return KVF_OK;
}

/* One memory object that the client will map. Its size is sealed before the client has it: cut by
 * the client before MAPPED, it would kill the daemon with SIGBUS at its first look. */
static int make_shared(const char *name, uint64_t bytes, int *fd_out, void **base_out)
{
    struct kvf_memfd memfd;
    char text[KVF_ERROR_TEXT_BYTES];
    int status = kvf_memfd_create(name, bytes, KVF_HUGEPAGES_OFF, &memfd);

    if (status != KVF_OK) {
        return status;
    }
    *fd_out = memfd.fd;
    status = kvf_memfd_seal(memfd.fd, F_SEAL_SHRINK | F_SEAL_GROW);
    if (status == KVF_OK) {
        status = kvf_segment_map(memfd.fd, bytes, true, base_out, text, sizeof(text));
    }
    return status;
}

/* How much of its memory is there. More than there should be counts as that: huge pages can reach
 * beyond the end, and are cut when memory is short. */
static uint64_t present_bytes(const struct kvf_session *session)
{
    uint64_t ring_bytes = kvf_fd_present_bytes(session->ring_fd);
    uint64_t staging_bytes = kvf_fd_present_bytes(session->staging_fd);

    return (ring_bytes < session->ring_bytes ? ring_bytes : session->ring_bytes) +
           (staging_bytes < session->staging_bytes ? staging_bytes : session->staging_bytes);
}

/* On a worker: memory objects, populated and mapped, and the tables beside them. */
static void prepare_run(struct kvf_work *work)
{
    struct kvf_session *session = work->owner;
    void *base;
    int status = make_shared("kvferry-ring", session->ring_bytes, &session->ring_fd,
                             &session->ring_map);

    if (status == KVF_OK) {
        memcpy(session->ring_map, &session->layout, sizeof(session->layout));
        status = make_shared("kvferry-staging", session->staging_bytes, &session->staging_fd,
                             &base);
    }
    if (status == KVF_OK) {
        session->staging_map = base;
        session->present_bytes = present_bytes(session);
        session->keys = calloc(KVF_SHM_REQUEST_ENTRIES_MAX, sizeof(*session->keys));
        session->touched = calloc(KVF_REQUEST_KEYS_MAX, sizeof(*session->touched));
        session->announce = calloc(ANNOUNCE_MAX, sizeof(*session->announce));
        session->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        status = kvf_lease_table_init(session, session->layout.lease_entries);
        if (session->keys == NULL || session->touched == NULL || session->announce == NULL ||
            session->eventfd < 0) {
            status = KVF_ERR_NO_MEMORY;
        }
    }
    session->work_status = status;
}

static void prepare_done(struct kvf_work *work);

/* Clients beyond clients.max are refused here and not when they connect: a HELLO that was never
 * read would reset the connection, and the client would not see why. */
static uint32_t attached_count(const struct kvf_agent *agent)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < agent->sessions_high; i++) {
        uint8_t state = agent->sessions[i].state;

        n += state == KVF_SESSION_PREPARING || state == KVF_SESSION_MAPPING ||
             state == KVF_SESSION_SEALING || state == KVF_SESSION_READY;
    }
    return n;
}

static void hello_received(struct kvf_session *session)
{
    struct kvf_agent *agent = session->agent;
    const struct kvf_wire_hello *hello = &session->hello;
    char text[KVF_WIRE_TEXT_BYTES] = "";
    int status;

    memcpy(session->name, hello->client_name, sizeof(session->name));
    session->shard = hello->shard;
    session->shard_count = hello->shard_count == 0 ? 1 : hello->shard_count;
    status = kvf_proto_version_choose(hello->version_min, hello->version_max, &session->version);
    if (status != KVF_OK) {
        kvf_attach_say_version(hello->version_min, hello->version_max, text, sizeof(text));
    }
    if (status == KVF_OK && attached_count(agent) >= agent->config->clients_max) {
        (void)snprintf(text, sizeof(text), "clients.max clients are attached");
        status = KVF_ERR_BUSY;
    }
    if (status == KVF_OK) {
        status = kvf_attach_profile(session, text, sizeof(text));
    }
    if (status == KVF_OK) {
        status = choose_sizes(session, text, sizeof(text));
    }
    if (status == KVF_OK) {
        status = join_namespace(session, text, sizeof(text));
    }
    if (status == KVF_OK) {
        session->work.owner = session;
        session->work.run = prepare_run;
        session->work.done = prepare_done;
        status = agent->setup->ops->submit(agent->setup, &session->work);
    }
    if (status != KVF_OK) {
        refuse(session, status, text[0] != '\0' ? text : kvf_status_text(status));
        return;
    }
    (void)snprintf(session->profile_text, sizeof(session->profile_text), "%s", text);
    if (text[0] != '\0' && may_log(agent)) {
        kvf_log(session->is_replaced ? KVF_LOG_WARNING : KVF_LOG_INFO, "client %s: %s",
                session->name, text);
    }
    session->jobs++;
    session->state = KVF_SESSION_PREPARING;
}

/* A profile that the client cannot know precedes WELCOME. */
static int send_profile(const struct kvf_session *session)
{
    const struct kvf_calibration *calibration = session->calibration;
    struct kvf_wire_profile message = {0};

    if (calibration == NULL) {
        return KVF_OK;
    }
    kvf_proto_head_init(&message.head, KVF_WIRE_PROFILE);
    message.bytes = calibration->blob_bytes;
    message.profile_fp = session->plan.profile_fp;
    return kvf_seqpacket_send(session->fd, &message, sizeof(message), &calibration->blob_fd, 1);
}

static int send_welcome(struct kvf_session *session)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_wire_welcome welcome = {0};
    int fds[3] = {session->ring_fd, session->staging_fd, session->eventfd};
    int status;

    kvf_proto_head_init(&welcome.head, KVF_WIRE_WELCOME);
    welcome.status = KVF_OK;
    welcome.version = session->version;
    welcome.lossless = session->plan.lossless;
    welcome.incarnation = agent->incarnation;
    welcome.connection_id = session->connection_id;
    welcome.namespace_id = agent->namespaces[session->namespace_index].id;
    welcome.ring_bytes = session->ring_bytes;
    welcome.staging_bytes = session->staging_bytes;
    welcome.arena_bytes = agent->arena_bytes;
    welcome.profile_fp = session->plan.profile_fp;
    welcome.credits = session->credits;
    memcpy(welcome.profile, session->profile, sizeof(welcome.profile));
    /* clients of before take any text for a warning */
    if (session->is_replaced || session->version >= KVF_WIRE_VERSION_PROFILES) {
        memcpy(welcome.text, session->profile_text, sizeof(welcome.text));
    }
    for (uint32_t piece = kvf_dram_piece_next(agent->dram_store, session->tenant, 0); piece != 0;
         piece = kvf_dram_piece_next(agent->dram_store, session->tenant, piece)) {
        welcome.n_pieces++;
    }
    status = send_profile(session);
    if (status == KVF_OK) {
        status = kvf_seqpacket_send(session->fd, &welcome, sizeof(welcome), fds, 3);
    }
    for (uint32_t piece = kvf_dram_piece_next(agent->dram_store, session->tenant, 0);
         status == KVF_OK && piece != 0;
         piece = kvf_dram_piece_next(agent->dram_store, session->tenant, piece)) {
        announce(session, piece);
    }
    if (status == KVF_OK) {
        kvf_session_flush(session);
    }
    return status;
}

static void prepare_done(struct kvf_work *work)
{
    struct kvf_session *session = work->owner;

    if (session->state == KVF_SESSION_DEAD) {
        kvf_session_job_done(session);
        return;
    }
    session->jobs--;
    if (session->work_status != KVF_OK) {
        refuse(session, session->work_status, "no memory for rings and staging");
        return;
    }
    kvf_ring_daemon_init(&session->ring, session->ring_map, &session->layout);
    session->state = KVF_SESSION_MAPPING;
    session->hello_deadline_ns = session->agent->now_ns + HELLO_TIMEOUT_NS;
    if (send_welcome(session) != KVF_OK) {
        kvf_session_end(session, "does not read its socket");
    }
}

/* ----------------------------------------------------------------------------------------------
 * MAPPED and after
 */

/* On a worker, behind the making of other clients' memory. */
static void seal_run(struct kvf_work *work)
{
    struct kvf_session *session = work->owner;
    int status;

    /* From here on nobody can map these writable again, truncate them or punch holes. */
    status = kvf_memfd_seal(session->ring_fd, KVF_SEGMENT_SEALS);
    if (status == KVF_OK) {
        status = kvf_memfd_seal(session->staging_fd, KVF_SEGMENT_SEALS);
    }
    /* An access of ours to a hole that it punched before could fail for want of memory. Whoever
     * does that gets no memory a second time: it would take a CPU as often as it likes. */
    if (status == KVF_OK && present_bytes(session) < session->present_bytes) {
        status = KVF_ERR_PROTOCOL;
    }
    session->work_status = status;
}

static void seal_done(struct kvf_work *work)
{
    struct kvf_session *session = work->owner;
    struct kvf_agent *agent = session->agent;
    int status = session->work_status;

    if (session->state == KVF_SESSION_DEAD) {
        kvf_session_job_done(session);
        return;
    }
    session->jobs--;
    if (status == KVF_OK) {
        status = kvf_loop_add(agent, session->eventfd, EPOLLIN | EPOLLET, &session->eventfd_source);
    }
    if (status != KVF_OK) {
        kvf_session_end(session, status == KVF_ERR_PROTOCOL ? "has punched holes into its memory"
                                                            : "its memory cannot be sealed");
        return;
    }
    session->state = KVF_SESSION_READY;
    session->attached_ns = agent->now_ns;
    session->hello_deadline_ns = agent->now_ns + HELLO_TIMEOUT_NS;
    agent->metrics.attaches++;
    /* pieces that came meanwhile may have filled the socket of a client that is well, but not
     * inside a call */
    session->owes_ready = true;
    kvf_session_flush(session);
    if (may_log(agent)) {
        kvf_log(KVF_LOG_INFO, "client %s (pid %d, tenant %s, profile %s) attached as %llu",
                session->name, session->pid, agent->tenants[session->tenant].name, session->profile,
                (unsigned long long)session->connection_id);
    }
}

static void mapped_received(struct kvf_session *session)
{
    struct kvf_work_queue *setup = session->agent->setup;

    session->work.owner = session;
    session->work.run = seal_run;
    session->work.done = seal_done;
    session->jobs++;
    session->state = KVF_SESSION_SEALING;
    if (setup->ops->submit(setup, &session->work) != KVF_OK) {
        seal_run(&session->work);
        seal_done(&session->work);
    }
}

static bool message_received(struct kvf_session *session, const union kvf_proto_message *message)
{
    switch (message->head.type) {
    case KVF_WIRE_HELLO:
        if (session->state != KVF_SESSION_HELLO) {
            return false;
        }
        session->hello = message->hello;
        hello_received(session);
        return true;
    case KVF_WIRE_MAPPED:
        if (session->state != KVF_SESSION_MAPPING ||
            message->note.connection_id != session->connection_id) {
            return false;
        }
        mapped_received(session);
        return true;
    case KVF_WIRE_GPU:
        return session->state == KVF_SESSION_READY && session->version >= KVF_WIRE_VERSION_GPU &&
               kvf_gpu_host_asked(session, &message->gpu) == KVF_OK;
    case KVF_WIRE_DEVICE:
        if (session->state != KVF_SESSION_READY || session->version < KVF_WIRE_VERSION_GPU ||
            session->device_uuid[0] != '\0') {
            return false;
        }
        kvf_hbm_attach(session, message->device.uuid);
        kvf_session_flush(session);
        return true;
    case KVF_WIRE_DEVICE_MAPPED:
        return kvf_hbm_mapped(session, message->piece.piece);
    case KVF_WIRE_BYE:
        kvf_session_end(session, NULL);
        return true;
    default:
        return false;
    }
}

void kvf_session_socket_ready(struct kvf_session *session, uint32_t events)
{
    union kvf_proto_message message;
    struct kvf_seqpacket_message received;
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];
    char text[KVF_WIRE_TEXT_BYTES];
    const char *why = "unexpected message";
    int status;

    if ((events & EPOLLOUT) != 0 && session->is_writing) {
        kvf_session_flush(session);
    }
    /* a hang-up shows as the end of the stream, after what was sent before it */
    while (session->state != KVF_SESSION_FREE && session->state != KVF_SESSION_DEAD) {
        status = kvf_seqpacket_recv(session->fd, data, sizeof(data), &received);
        if (status == KVF_EMPTY) {
            return;
        }
        if (status != KVF_OK) {
            kvf_session_end(session, status == KVF_ERR_DISCONNECTED ? NULL : "malformed message");
            return;
        }
        status = kvf_proto_decode(KVF_PROTO_CLIENT, data, received.bytes, received.n_fds, &message,
                                  &why);
        kvf_seqpacket_message_close(&received); /* clients have no descriptors to give */
        if (status == KVF_ERR_VERSION) {
            kvf_attach_say_version(message.head.version, UINT16_MAX, text, sizeof(text));
            refuse(session, KVF_ERR_VERSION, text);
            return;
        }
        if (status != KVF_OK || !message_received(session, &message)) {
            kvf_session_end(session, why);
            return;
        }
    }
}

/* ----------------------------------------------------------------------------------------------
 * The end
 */
/* On a worker: giving back a client's last pages takes the kernel a while. */
static void release_run(struct kvf_work *work)
{
    struct kvf_session *session = work->owner;

    kvf_segment_unmap(session->ring_map, session->ring_bytes);
    session->ring_map = NULL;
    kvf_segment_unmap(session->staging_map, session->staging_bytes);
    session->staging_map = NULL;
    kvf_fd_close(&session->ring_fd);
    kvf_fd_close(&session->staging_fd);
    kvf_fd_close(&session->eventfd);
    kvf_lease_table_fini(session);
    free(session->keys);
    session->keys = NULL;
    kvf_observe_forget(session);
    free(session->touched);
    session->touched = NULL;
    free(session->announce);
    session->announce = NULL;
    free(session->device_pieces);
    session->device_pieces = NULL;
    kvf_calibrations_release(session->calibrations);
}

static void release_done(struct kvf_work *work)
{
    struct kvf_session *session = work->owner;
    struct kvf_agent *agent = session->agent;

    agent->staging_used_bytes -= session->charged_bytes;
    if (session->namespace_index < KVF_INDEX_NAMESPACES_MAX) {
        agent->namespaces[session->namespace_index].clients--;
    }
    agent->sessions_count--;
    session->state = KVF_SESSION_FREE;
    while (agent->sessions_high > 0 &&
           agent->sessions[agent->sessions_high - 1].state == KVF_SESSION_FREE) {
        agent->sessions_high--;
    }
}

/* Nobody uses the session's memory any more. */
static void free_memory(struct kvf_session *session)
{
    struct kvf_agent *agent = session->agent;

    session->work.owner = session;
    session->work.run = release_run;
    session->work.done = release_done;
    /* before its HELLO there is no memory to give back, and no work for others */
    if (session->ring_fd < 0 || agent->setup == NULL ||
        agent->setup->ops->submit(agent->setup, &session->work) != KVF_OK) {
        release_run(&session->work);
        release_done(&session->work);
    }
}

void kvf_session_end(struct kvf_session *session, const char *why)
{
    struct kvf_agent *agent = session->agent;
    uint64_t suppressed;

    if (session->state == KVF_SESSION_FREE || session->state == KVF_SESSION_DEAD) {
        return;
    }
    if (why != NULL) {
        agent->metrics.protocol_errors++;
        kvf_offence_note(&agent->offenders, session->peer, agent->now_ns);
        if (kvf_log_limit_allow(&agent->protocol_log, agent->now_ns, &suppressed)) {
            kvf_log(KVF_LOG_WARNING, "client %s (pid %d) disconnected: %s (%llu more like this)",
                    session->name, session->pid, why, (unsigned long long)suppressed);
        }
    }
    if (session->state == KVF_SESSION_READY) {
        agent->metrics.disconnects++;
        if (may_log(agent)) {
            kvf_log(KVF_LOG_INFO, "client %s (pid %d) detached: %llu", session->name, session->pid,
                    (unsigned long long)session->connection_id);
        }
    }
    kvf_gpu_host_session_ended(agent->gpu_host, session);
    kvf_loop_remove(agent, session->fd);
    kvf_request_drop_all(session);
    if (session->state == KVF_SESSION_READY || session->state == KVF_SESSION_SEALING) {
        /* the client has it, too: closing ours would not end the watch */
        kvf_loop_remove(agent, session->eventfd);
    }
    if (session->state == KVF_SESSION_READY) {
        kvf_lease_lose_all(session); /* it may still read: a broken client is not a dead one */
        kvf_lease_end_all(session);
    }
    kvf_fd_close(&session->fd);
    session->wants_wake = false;
    session->active = NULL;
    session->state = KVF_SESSION_DEAD;
    if (session->jobs == 0) {
        free_memory(session);
    }
}

void kvf_session_destroy(struct kvf_session *session)
{
    if (session->state == KVF_SESSION_FREE) {
        return;
    }
    kvf_session_end(session, NULL);
    if (session->state == KVF_SESSION_DEAD) {
        free_memory(session); /* its jobs have run, but nobody will say so */
    }
}

void kvf_session_job_done(struct kvf_session *session)
{
    assert(session->jobs > 0);
    session->jobs--;
    if (session->state == KVF_SESSION_DEAD && session->jobs == 0) {
        free_memory(session);
    }
}

void kvf_session_wake(struct kvf_session *session)
{
    session->wants_wake = false;
    if (session->state == KVF_SESSION_READY && kvf_ring_daemon_publish(&session->ring)) {
        if (!KVF_MUTANT(wake_lost)) {
            kvf_seqpacket_wake(session->fd);
        }
    }
}

void kvf_session_tick(struct kvf_session *session)
{
    struct kvf_agent *agent = session->agent;

    if (session->state == KVF_SESSION_READY) {
        kvf_ring_daemon_beat(&session->ring);
        if (session->owes_ready && agent->now_ns > session->hello_deadline_ns) {
            kvf_session_end(session, "did not finish the handshake in time");
        } else if (kvf_lease_oldest_age_ns(session) > agent->config->lease_max_age * KVF_NS_PER_S) {
            kvf_session_end(session, "held a lease longer than lease.max_age");
        }
    } else if (session->state != KVF_SESSION_FREE && session->state != KVF_SESSION_DEAD &&
               session->state != KVF_SESSION_PREPARING && session->state != KVF_SESSION_SEALING &&
               agent->now_ns > session->hello_deadline_ns) {
        kvf_session_end(session, "did not finish the handshake in time");
    }
}
