/* SPDX-License-Identifier: Apache-2.0
 *
 * client_session.c: attach, notice death, attach again.
 *
 *            connect     (PROFILE) WELCOME     last PIECE         READY
 *   CONNECT ---------> HELLO ---------> PIECES ----------> MAPPED ------> LIVE ---> LOST
 *      |                 |                 |                  |             hang-up, BYE, broken
 *      +-----------------+-----------------+------------------+             protocol, heart stopped
 *                        | any failure: wait, try again
 *
 * Attaching never blocks: each step takes the messages that are there. kvf_open is this machine and
 * a wait; a reconnect is the same machine moved along by whatever call comes next. Nothing is read
 * from a shared segment before the daemon has sealed it, since until then it could be truncated
 * under our hands.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "client/client_internal.h"
#include "transport/held.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"

enum log_severity {
    LOG_ERROR = 0,
    LOG_WARNING = 1,
    LOG_INFO = 2,
};

/* ----------------------------------------------------------------------------------------------
 * Pieces
 */
static void piece_free(struct kvf_client_piece *piece)
{
    if (piece != NULL) {
        kvf_segment_unmap(piece->base, piece->bytes);
        free(piece);
    }
}

struct kvf_client_piece *kvf_session_piece(const struct kvf_session *session, uint32_t id)
{
    uint32_t index = id % KVF_PROTO_PIECES_MAX;
    struct kvf_client_piece *piece = index < session->pieces_size ? session->pieces[index] : NULL;

    return piece != NULL && piece->id == id ? piece : NULL;
}

/* The piece at an index is no longer the daemon's: unmap it, or keep it for those who read it. */
static void piece_drop(struct kvf_session *session, uint32_t index)
{
    struct kvf_client_piece *piece = session->pieces[index];

    session->pieces[index] = NULL;
    session->n_pieces--;
    session->arena_bytes -= piece->bytes;
    if (piece->n_leases == 0) {
        piece_free(piece);
        return;
    }
    piece->is_dropped = true;
    piece->drop_ns = kvf_now_ns();
    piece->next = session->dropped;
    session->dropped = piece;
}

static int piece_add(struct kvf_session *session, const struct kvf_wire_piece *message, int fd,
                     char *text, size_t text_bytes)
{
    struct kvf_client_piece *piece;
    uint32_t index = message->piece % KVF_PROTO_PIECES_MAX;
    int status;

    if (index >= session->pieces_size) {
        uint32_t size = index + 16;
        struct kvf_client_piece **pieces = realloc(session->pieces, size * sizeof(*pieces));

        if (pieces == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        memset(pieces + session->pieces_size, 0, (size - session->pieces_size) * sizeof(*pieces));
        session->pieces = pieces;
        session->pieces_size = size;
    }
    if (session->pieces[index] != NULL) {
        snprintf(text, text_bytes, "the daemon announced arena piece %u before it dropped %u",
                 message->piece, session->pieces[index]->id);
        return KVF_ERR_PROTOCOL;
    }
    status = kvf_segment_check(fd, message->bytes, true, text, text_bytes);
    if (status != KVF_OK) {
        return status;
    }
    piece = calloc(1, sizeof(*piece));
    if (piece == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    piece->id = message->piece;
    piece->bytes = message->bytes;
    piece->fd = -1;
    status = kvf_segment_map(fd, message->bytes, false, &piece->base, text, text_bytes);
    if (status != KVF_OK) {
        free(piece);
        return status;
    }
    session->pieces[index] = piece;
    session->n_pieces++;
    session->arena_bytes += piece->bytes;
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * The end of sessions
 */
static void session_close_fds(struct kvf_session *session)
{
    kvf_fd_close(&session->socket_fd);
    kvf_tunnel_close(session->tunnel); /* whose end of the socket has hung up */
    session->tunnel = NULL;
    kvf_fd_close(&session->wake_fd);
    kvf_fd_close(&session->ring_fd);
    kvf_fd_close(&session->staging_fd);
}

static void session_free_ring(struct kvf_session *session)
{
    kvf_segment_unmap(session->ring_base, session->welcome.ring_bytes);
    session->ring_base = NULL;
    free(session->deferred);
    session->deferred = NULL;
    session->n_deferred = 0;
}

static void session_free_staging(struct kvf_session *session)
{
    kvf_segment_unmap(session->staging, session->welcome.staging_bytes);
    session->staging = NULL;
    kvf_stage_area_fini(&session->area);
}

struct kvf_client_piece *kvf_session_device_piece(const struct kvf_session *session, uint32_t id)
{
    struct kvf_client_piece *piece = session->device_pieces;

    while (piece != NULL && (piece->id != id || piece->is_dropped)) {
        piece = piece->next;
    }
    return piece;
}

void kvf_session_say_device(struct kvf_session *session, const char *uuid)
{
    struct kvf_wire_device message = {0};

    if (session->is_device_asked || session->is_device_over ||
        session->welcome.version < KVF_WIRE_VERSION_GPU) {
        return;
    }
    session->is_device_asked = true;
    kvf_proto_head_init(&message.head, KVF_WIRE_DEVICE);
    (void)snprintf(message.uuid, sizeof(message.uuid), "%s", uuid);
    /* a socket that is full of ours is one that the daemon will end */
    (void)kvf_seqpacket_send(session->socket_fd, &message, sizeof(message), NULL, 0);
}

void kvf_session_say_device_mapped(struct kvf_session *session, uint32_t piece_id)
{
    struct kvf_wire_piece message = {.piece = piece_id};

    kvf_proto_head_init(&message.head, KVF_WIRE_DEVICE_MAPPED);
    (void)kvf_seqpacket_send(session->socket_fd, &message, sizeof(message), NULL, 0);
}

/* Takes the descriptor: the memory is mapped by who can. */
static int device_piece_add(struct kvf_session *session, const struct kvf_wire_piece *message,
                            int *fd, char *text, size_t text_bytes)
{
    struct kvf_client_piece *piece;

    if (session->state != KVF_SESSION_LIVE || !session->is_device_asked ||
        kvf_session_device_piece(session, message->piece) != NULL) {
        snprintf(text, text_bytes, "the daemon sent a piece of a GPU out of order");
        return KVF_ERR_PROTOCOL;
    }
    piece = calloc(1, sizeof(*piece));
    if (piece == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    piece->id = message->piece;
    piece->bytes = message->bytes;
    piece->fd = *fd;
    *fd = -1;
    piece->next = session->device_pieces;
    session->device_pieces = piece;
    return KVF_OK;
}

/* Free pieces of a GPU that are dropped, or all, as far as nobody uses them. */
static void device_pieces_trim(struct kvf_session *session, bool all)
{
    struct kvf_client_piece **link = &session->device_pieces;

    while (*link != NULL) {
        struct kvf_client_piece *piece = *link;

        if ((piece->is_dropped || all) && piece->n_leases == 0) {
            *link = piece->next;
            kvf_fd_close(&piece->fd);
            free(piece);
        } else {
            link = &piece->next;
        }
    }
}

static void dropped_trim(struct kvf_session *session)
{
    device_pieces_trim(session, false);
    struct kvf_client_piece **link = &session->dropped;

    while (*link != NULL) {
        struct kvf_client_piece *piece = *link;

        if (piece->n_leases == 0) {
            *link = piece->next;
            piece_free(piece);
        } else {
            link = &piece->next;
        }
    }
}

/* Accepts NULL and half-built sessions. */
static void session_destroy(struct kvf_session *session)
{
    if (session == NULL) {
        return;
    }
    session_close_fds(session);
    session_free_ring(session);
    session_free_staging(session);
    for (uint32_t i = 0; i < session->pieces_size; i++) {
        piece_free(session->pieces[i]);
    }
    while (session->dropped != NULL) {
        struct kvf_client_piece *piece = session->dropped;

        session->dropped = piece->next;
        piece_free(piece);
    }
    for (struct kvf_client_piece *piece = session->device_pieces; piece != NULL;
         piece = piece->next) {
        piece->n_leases = 0;
    }
    device_pieces_trim(session, true);
    kvf_fd_close(&session->held_fd); /* now that nothing is mapped any more */
    free(session->pieces);
    free(session->leases);
    free(session);
}

void kvf_session_trim(struct kvf_client *client, struct kvf_session *session)
{
    dropped_trim(session);
    if (session->state != KVF_SESSION_LOST || session->n_leases != 0 || session->n_slots != 0) {
        return;
    }
    for (struct kvf_session **link = &client->lost; *link != NULL; link = &(*link)->next) {
        if (*link == session) {
            *link = session->next;
            client->n_lost--;
            session_destroy(session);
            return;
        }
    }
}

static void pieces_blank(struct kvf_session *session, uint64_t now_ns)
{
    for (struct kvf_client_piece *piece = session->dropped; piece != NULL; piece = piece->next) {
        if (!piece->is_blank && now_ns >= piece->drop_ns + KVF_CLIENT_KEEP_NS) {
            piece->is_blank = kvf_segment_blank(piece->base, piece->bytes, false) == KVF_OK;
        }
    }
}

/* Give up shared memory that nobody may hold any longer; addresses stay readable. */
static void memory_expire(struct kvf_client *client, uint64_t now_ns)
{
    if (client->session != NULL) {
        pieces_blank(client->session, now_ns);
    }
    for (struct kvf_session *session = client->lost; session != NULL; session = session->next) {
        pieces_blank(session, now_ns);
        if (session->staging != NULL && !session->is_staging_blank &&
            now_ns >= session->deadline_ns) {
            session->is_staging_blank =
                kvf_segment_blank(session->staging, session->welcome.staging_bytes, true) == KVF_OK;
        }
        if (now_ns >= session->deadline_ns) {
            kvf_fd_close(&session->held_fd);
        }
    }
}

static void schedule_attach(struct kvf_client *client)
{
    uint64_t wait_ms = KVF_CLIENT_BACKOFF_MIN_MS;

    for (uint32_t i = 1; i < client->attach_tries && wait_ms < KVF_CLIENT_BACKOFF_MAX_MS; i++) {
        wait_ms *= 2;
    }
    if (wait_ms > KVF_CLIENT_BACKOFF_MAX_MS) {
        wait_ms = KVF_CLIENT_BACKOFF_MAX_MS;
    }
    /* half of it is random, so that the clients of a restarted daemon do not come in step */
    wait_ms = wait_ms / 2 + kvf_random_seeded_next(&client->jitter) % (wait_ms / 2 + 1);
    client->attach_next_ns = kvf_now_ns() + wait_ms * KVF_NS_PER_MS;
}

static void attach_fail(struct kvf_client *client, int status, const char *text)
{
    session_destroy(client->session);
    client->session = NULL;
    /* a daemon that is away for an hour is one line, not one a try */
    if (client->attach_tries == 0 || client->attach_status != status) {
        kvf_client_log(client, LOG_WARNING, "attach failed (%s): %s", kvf_status_name(status),
                       text[0] != 0 ? text : kvf_status_text(status));
    }
    client->attach_status = status;
    client->attach_tries++;
    schedule_attach(client);
}

void kvf_session_break(struct kvf_client *client, int severity, const char *why)
{
    struct kvf_session *session = client->session;

    if (session == NULL || session->state != KVF_SESSION_LIVE) {
        return;
    }
    kvf_client_log(client, severity, "connection lost: %s", why);
    session->state = KVF_SESSION_LOST;
    /* what the daemon had finished before it went is finished */
    kvf_requests_drain(client, true);
    kvf_requests_fail(client);
    client->session = NULL;
    client->is_break_unreported = true;
    client->attach_status = KVF_ERR_DISCONNECTED;
    client->attach_tries = 0;
    schedule_attach(client);

    session_close_fds(session);
    session_free_ring(session);
    for (uint32_t i = 0; i < session->pieces_size; i++) {
        if (session->pieces[i] != NULL) {
            piece_drop(session, i);
        }
    }
    if (session->n_slots == 0) {
        session_free_staging(session);
    }
    for (struct kvf_client_piece *piece = session->device_pieces; piece != NULL;
         piece = piece->next) {
        piece->is_dropped = true;
    }
    session->deadline_ns = kvf_now_ns() + KVF_CLIENT_KEEP_NS;
    session->next = client->lost;
    client->lost = session;
    client->n_lost++;
    kvf_session_trim(client, session);
}

/* ----------------------------------------------------------------------------------------------
 * Attach
 */

/* All pieces that WELCOME announced are mapped: say so. */
static int say_mapped(struct kvf_session *session)
{
    struct kvf_wire_note note = {.connection_id = session->welcome.connection_id};

    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    session->state = KVF_SESSION_MAPPED;
    return kvf_seqpacket_send(session->socket_fd, &note, sizeof(note), NULL, 0);
}

/* Takes the three descriptors. */
static int on_welcome(struct kvf_client *client, struct kvf_session *session,
                      const struct kvf_wire_welcome *welcome, int *fds, char *text,
                      size_t text_bytes)
{
    void *base;
    int status;

    if (session->state != KVF_SESSION_HELLO) {
        snprintf(text, text_bytes, "the daemon sent a second WELCOME");
        return KVF_ERR_PROTOCOL;
    }
    if (welcome->status != KVF_OK) {
        snprintf(text, text_bytes, "%s", welcome->text);
        return welcome->status;
    }
    session->welcome = *welcome;
    session->ring_fd = fds[0];
    session->staging_fd = fds[1];
    session->wake_fd = fds[2];
    fds[0] = fds[1] = fds[2] = -1;
    session->held_fd = kvf_held_lock(client->socket_path, welcome->incarnation);
    status = kvf_profile_follow(client, session, welcome, text, text_bytes);
    if (status != KVF_OK) {
        return status;
    }
    status = kvf_segment_check(session->ring_fd, welcome->ring_bytes, false, text, text_bytes);
    if (status == KVF_OK) {
        status = kvf_segment_map(session->ring_fd, welcome->ring_bytes, true, &session->ring_base,
                                 text, text_bytes);
    }
    if (status == KVF_OK) {
        status = kvf_segment_check(session->staging_fd, welcome->staging_bytes, false, text,
                                   text_bytes);
    }
    if (status == KVF_OK) {
        status = kvf_segment_map(session->staging_fd, welcome->staging_bytes, true, &base, text,
                                 text_bytes);
    }
    if (status != KVF_OK) {
        return status;
    }
    session->staging = base;
    session->state = KVF_SESSION_PIECES;
    return welcome->n_pieces == 0 ? say_mapped(session) : KVF_OK;
}

static int live_tables(struct kvf_client *client, struct kvf_session *session)
{
    int status = kvf_stage_area_init(&session->area, session->welcome.staging_bytes);

    if (status == KVF_OK) {
        status = kvf_requests_resize(client, session->welcome.credits);
    }
    if (status != KVF_OK) {
        return status;
    }
    session->deferred_size = session->ring.lease_entries + client->requests_size;
    session->deferred = calloc(session->deferred_size, sizeof(*session->deferred));
    session->leases = calloc(session->ring.lease_entries, sizeof(*session->leases));
    return session->deferred != NULL && session->leases != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
}

static int on_ready(struct kvf_client *client, struct kvf_session *session,
                    const struct kvf_wire_note *note, char *text, size_t text_bytes)
{
    const struct kvf_wire_welcome *welcome = &session->welcome;
    struct kvf_shm_header header;
    const char *why = NULL;
    int status;

    if (session->state != KVF_SESSION_MAPPED || note->status != KVF_OK ||
        note->connection_id != welcome->connection_id) {
        snprintf(text, text_bytes, "the daemon sent READY out of order");
        return KVF_ERR_PROTOCOL;
    }
    status = kvf_segment_check(session->ring_fd, welcome->ring_bytes, true, text, text_bytes);
    if (status == KVF_OK) {
        status = kvf_segment_check(session->staging_fd, welcome->staging_bytes, true, text,
                                   text_bytes);
    }
    if (status != KVF_OK) {
        return status;
    }
    memcpy(&header, session->ring_base, sizeof(header));
    status = kvf_shm_header_check(&header, welcome->ring_bytes, &why);
    if (status == KVF_OK &&
        (header.cq_entries != welcome->credits || header.connection_id != welcome->connection_id ||
         header.incarnation != welcome->incarnation)) {
        why = "ring segment: not the one that WELCOME describes";
        status = KVF_ERR_PROTOCOL;
    }
    if (status != KVF_OK) {
        snprintf(text, text_bytes, "%s", why);
        return status;
    }
    kvf_ring_client_init(&session->ring, session->ring_base, &header);
    status = live_tables(client, session);
    if (status != KVF_OK) {
        return status;
    }
    kvf_fd_close(&session->ring_fd);
    kvf_fd_close(&session->staging_fd);
    session->heartbeat = kvf_ring_client_heartbeat(&session->ring);
    session->heartbeat_ns = kvf_now_ns();
    session->state = KVF_SESSION_LIVE;
    if (welcome->text[0] != 0) {
        bool is_as_asked = strcmp(welcome->profile, client->hello.profile) == 0;

        kvf_client_log(client, is_as_asked ? LOG_INFO : LOG_WARNING, "%s", welcome->text);
    }
    client->facts = *welcome;
    client->credits = welcome->credits;
    client->reconnects += client->was_live;
    client->was_live = true;
    client->attach_tries = 0;
    client->attach_status = KVF_OK;
    kvf_client_log(client, LOG_INFO, "attached: profile \"%s\", %u credits, %u arena pieces",
                   welcome->profile, welcome->credits, session->n_pieces);
    return KVF_OK;
}

/* Takes the descriptor into a mapping and leaves closing it to the caller. */
static int on_piece(struct kvf_session *session, const struct kvf_wire_piece *piece, int fd,
                    char *text, size_t text_bytes)
{
    int status;

    if (session->state != KVF_SESSION_PIECES && session->state != KVF_SESSION_MAPPED &&
        session->state != KVF_SESSION_LIVE) {
        snprintf(text, text_bytes, "the daemon sent a piece before WELCOME");
        return KVF_ERR_PROTOCOL;
    }
    status = piece_add(session, piece, fd, text, text_bytes);
    if (status == KVF_OK && session->state == KVF_SESSION_PIECES &&
        session->n_pieces == session->welcome.n_pieces) {
        status = say_mapped(session);
    }
    return status;
}

static void channel_close(struct kvf_client *client)
{
    kvf_fd_close(&client->channel.fd);
    kvf_fd_close(&client->channel.pid_fd);
}

/* Takes the descriptors. */
static void on_channel(struct kvf_client *client, const struct kvf_wire_gpu_channel *message,
                       int *fds)
{
    struct kvf_client_channel *channel = &client->channel;

    channel_close(client);
    channel->is_answered = true;
    channel->status = message->status;
    memcpy(channel->text, message->text, sizeof(channel->text));
    if (message->status == KVF_OK) {
        channel->fd = fds[0];
        channel->pid_fd = fds[1];
        fds[0] = fds[1] = -1;
    }
}

int kvf_session_say_gpu(struct kvf_client *client, uint32_t path, const char *uuid)
{
    struct kvf_wire_gpu message = {.path = path};

    if (!kvf_session_is_live(client)) {
        return KVF_ERR_DISCONNECTED;
    }
    if (client->facts.version < KVF_WIRE_VERSION_GPU) {
        return KVF_ERR_UNSUPPORTED;
    }
    channel_close(client);
    client->channel.is_answered = false;
    kvf_proto_head_init(&message.head, KVF_WIRE_GPU);
    snprintf(message.uuid, sizeof(message.uuid), "%s", uuid);
    return kvf_seqpacket_send(client->session->socket_fd, &message, sizeof(message), NULL, 0);
}

static int on_message(struct kvf_client *client, struct kvf_session *session,
                      const union kvf_proto_message *message, int *fds, char *text,
                      size_t text_bytes)
{
    switch (message->head.type) {
    case KVF_WIRE_WELCOME:
        return on_welcome(client, session, &message->welcome, fds, text, text_bytes);
    case KVF_WIRE_PROFILE:
        return kvf_profile_receive(client, session, &message->profile, fds[0], text, text_bytes);
    case KVF_WIRE_PIECE:
        return on_piece(session, &message->piece, fds[0], text, text_bytes);
    case KVF_WIRE_PIECE_DROP:
        if (kvf_session_piece(session, message->piece.piece) == NULL) {
            snprintf(text, text_bytes, "the daemon dropped a piece that it had not announced");
            return KVF_ERR_PROTOCOL;
        }
        piece_drop(session, message->piece.piece % KVF_PROTO_PIECES_MAX);
        return KVF_OK;
    case KVF_WIRE_DEVICE_PIECE:
        return device_piece_add(session, &message->piece, &fds[0], text, text_bytes);
    case KVF_WIRE_DEVICE_PIECE_DROP: {
        struct kvf_client_piece *piece = kvf_session_device_piece(session, message->piece.piece);

        if (piece == NULL) {
            snprintf(text, text_bytes, "the daemon dropped a piece that it had not announced");
            return KVF_ERR_PROTOCOL;
        }
        piece->is_dropped = true;
        device_pieces_trim(session, false);
        return KVF_OK;
    }
    case KVF_WIRE_READY:
        return on_ready(client, session, &message->note, text, text_bytes);
    case KVF_WIRE_GPU_CHANNEL:
        on_channel(client, &message->gpu_channel, fds);
        return KVF_OK;
    default: /* BYE */
        snprintf(text, text_bytes, "the daemon said goodbye (%s)",
                 kvf_status_name(message->note.status));
        return KVF_ERR_DISCONNECTED;
    }
}

/* Take control messages that are there, so many at most. KVF_OK, or why the session must end. */
static int session_receive(struct kvf_client *client, struct kvf_session *session, uint32_t max,
                           char *text, size_t text_bytes)
{
    uint8_t buffer[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message datagram;
    union kvf_proto_message message;
    const char *why = "";

    for (uint32_t i = 0; i < max; i++) {
        int status = kvf_seqpacket_recv(session->socket_fd, buffer, sizeof(buffer), &datagram);

        if (status == KVF_EMPTY) {
            return KVF_OK;
        }
        if (status == KVF_ERR_DISCONNECTED && session->tunnel != NULL) {
            snprintf(text, text_bytes, "%s", kvf_tunnel_why(session->tunnel));
            return status;
        }
        if (status != KVF_OK) {
            snprintf(text, text_bytes, "%s",
                     status == KVF_ERR_DISCONNECTED
                         ? "the daemon hung up"
                         : "a message too long, or with descriptors that cannot be received");
            return status;
        }
        if (datagram.bytes == 1 && datagram.n_fds == 0) {
            continue; /* a wake-up */
        }
        status = kvf_proto_decode(KVF_PROTO_DAEMON, buffer, datagram.bytes, datagram.n_fds,
                                  &message, &why);
        if (status == KVF_OK) {
            status = on_message(client, session, &message, datagram.fds, text, text_bytes);
        } else {
            snprintf(text, text_bytes, "%s", why);
        }
        for (uint32_t f = 0; f < datagram.n_fds; f++) {
            kvf_fd_close(&datagram.fds[f]);
        }
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

/* To the daemon of this node by its socket, or to another node's by its address. */
static int connect_daemon(struct kvf_client *client, char *text, size_t text_bytes)
{
    struct kvf_session *session = client->session;

    if (!kvf_tunnel_is_address(client->socket_path)) {
        return kvf_seqpacket_connect(client->socket_path, 0, &session->socket_fd, text, text_bytes);
    }
    return kvf_tunnel_open(client->socket_path, &client->hello, client->attach_tries,
                           &session->tunnel, &session->socket_fd, text, text_bytes);
}

static void attach_connect(struct kvf_client *client)
{
    struct kvf_session *session = client->session;
    struct epoll_event event = {.events = EPOLLIN};
    char text[KVF_ERROR_TEXT_BYTES] = "";
    int status = connect_daemon(client, text, sizeof(text));

    if (status == KVF_ERR_BUSY) {
        return; /* the deadline of the attach bounds these tries */
    }
    if (status == KVF_OK) {
        status = kvf_seqpacket_send(session->socket_fd, &client->hello, sizeof(client->hello), NULL,
                                    0);
        if (status == KVF_ERR_DISCONNECTED) {
            status = KVF_OK; /* it may have said why */
        }
    }
    if (status == KVF_OK &&
        epoll_ctl(client->wait->epoll_fd, EPOLL_CTL_ADD, session->socket_fd, &event) != 0) {
        status = KVF_ERR_NO_MEMORY;
    }
    if (status != KVF_OK) {
        attach_fail(client, status, text);
        return;
    }
    session->state = KVF_SESSION_HELLO;
}

static void attach_start(struct kvf_client *client, uint64_t now_ns)
{
    struct kvf_session *session = calloc(1, sizeof(*session));

    if (session == NULL) {
        client->attach_status = KVF_ERR_NO_MEMORY;
        client->attach_tries++;
        schedule_attach(client);
        return;
    }
    session->socket_fd = session->wake_fd = session->ring_fd = session->staging_fd = -1;
    session->held_fd = -1;
    do {
        client->epoch++;
    } while (client->epoch == 0 || kvf_session_find(client, client->epoch) != NULL);
    session->epoch = client->epoch;
    session->state = KVF_SESSION_CONNECT;
    session->deadline_ns = now_ns + client->connect_timeout_ms * KVF_NS_PER_MS;
    client->session = session;
    attach_connect(client);
}

static void attach_step(struct kvf_client *client, uint64_t now_ns)
{
    struct kvf_session *session = client->session;
    char text[KVF_ERROR_TEXT_BYTES] = "";
    int status = KVF_OK;

    if (session->state == KVF_SESSION_CONNECT) {
        attach_connect(client);
        session = client->session;
    } else {
        status = session_receive(client, session, KVF_CLIENT_MESSAGES_MAX, text, sizeof(text));
    }
    if (status != KVF_OK) {
        attach_fail(client, status, text);
    } else if (session != NULL && session->state != KVF_SESSION_LIVE &&
               now_ns >= session->deadline_ns) {
        attach_fail(client, KVF_ERR_TIMEOUT,
                    session->tunnel != NULL && kvf_tunnel_is_resolving(session->tunnel)
                        ? "no name server has told the address of its host in time; look at "
                          "/etc/resolv.conf, or give an address in the place of the name"
                    : session->tunnel != NULL
                        ? "nobody there has answered as a daemon in time: is this the address of "
                          "its peers.listen?"
                        : "the daemon did not finish the attach in time");
    }
}

/* ----------------------------------------------------------------------------------------------
 * Life
 */
static void live_step(struct kvf_client *client, uint32_t messages_max, uint64_t now_ns)
{
    struct kvf_session *session = client->session;
    char text[KVF_ERROR_TEXT_BYTES] = "";
    uint32_t heartbeat;
    int status = session_receive(client, session, messages_max, text, sizeof(text));

    if (status != KVF_OK) {
        kvf_session_break(client, status == KVF_ERR_PROTOCOL ? LOG_ERROR : LOG_WARNING,
                          text[0] != 0 ? text : kvf_status_text(status));
        return;
    }
    kvf_lease_flush(session);
    kvf_reports_send(client);
    heartbeat = kvf_ring_client_heartbeat(&session->ring);
    if (heartbeat != session->heartbeat) {
        session->heartbeat = heartbeat;
        session->heartbeat_ns = now_ns;
        session->suspect_ns = 0;
    } else if (now_ns - session->heartbeat_ns >= KVF_CLIENT_STALE_NS) {
        /* Twice, because this process may have been the one that stood still: after both were
         * stopped together, the daemon needs a moment to move its word. */
        if (session->suspect_ns == 0) {
            session->suspect_ns = now_ns;
        } else if (now_ns - session->suspect_ns >= KVF_CLIENT_DEAD_NS) {
            kvf_session_break(client, LOG_WARNING, "the daemon's heartbeat has stopped");
        }
    }
}

bool kvf_session_is_live(const struct kvf_client *client)
{
    return client->session != NULL && client->session->state == KVF_SESSION_LIVE;
}

int kvf_session_down_status(const struct kvf_client *client)
{
    bool will_try = (client->flags & KVF_ATTACH_NO_RECONNECT) == 0 || !client->was_live;

    return will_try && client->attach_status == KVF_ERR_NO_DAEMON ? KVF_ERR_NO_DAEMON
                                                                  : KVF_ERR_DISCONNECTED;
}

static void tend(struct kvf_client *client, uint32_t messages_max, uint64_t now_ns)
{
    client->tend_ns = now_ns;
    if (kvf_session_is_live(client)) {
        live_step(client, messages_max, now_ns);
    } else if (client->session != NULL) {
        attach_step(client, now_ns);
    } else if (now_ns >= client->attach_next_ns && client->n_lost < KVF_CLIENT_LOST_MAX &&
               ((client->flags & KVF_ATTACH_NO_RECONNECT) == 0 || !client->was_live)) {
        attach_start(client, now_ns);
    }
    memory_expire(client, now_ns);
}

void kvf_session_tend(struct kvf_client *client, bool now)
{
    uint64_t now_ns = kvf_now_ns();

    if (now || now_ns - client->tend_ns >= KVF_CLIENT_TEND_MS * KVF_NS_PER_MS) {
        tend(client, KVF_CLIENT_MESSAGES_MAX, now_ns);
    }
}

/* Wait for a descriptor (-1: none) until deadline_ns. */
static void sleep_on(int fd, uint64_t deadline_ns)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    uint64_t now_ns = kvf_now_ns();
    uint64_t wait_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    struct timespec wait = {.tv_sec = (time_t)(wait_ns / KVF_NS_PER_S),
                            .tv_nsec = (long)(wait_ns % KVF_NS_PER_S)};

    (void)ppoll(&one, 1, &wait, NULL);
}

static void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* How often to look at the ring before sleeping. A daemon that had to be woken takes longer than
 * the longest look. One that does not come in time again and again may be waiting for this very
 * CPU. */
static uint32_t looks(const struct kvf_session *session, bool is_asked)
{
    if (is_asked) {
        return KVF_CLIENT_SPINS;
    }
    if (session->is_daemon_waking) {
        return 1;
    }
    return session->n_vain >= KVF_CLIENT_VAIN_MAX && session->n_vain % KVF_CLIENT_VAIN_TRY != 0
               ? KVF_CLIENT_SPINS_FEW
               : KVF_CLIENT_SPINS;
}

/* Look at the ring for a while. True: there is something. */
static bool spin(struct kvf_session *session, bool is_asked)
{
    uint32_t n = looks(session, is_asked);

    session->is_daemon_waking = false;
    for (uint32_t i = 0; i < n; i++) {
        if (kvf_ring_client_ready(&session->ring)) {
            session->n_vain = 0;
            return true;
        }
        cpu_pause();
    }
    session->n_vain += n > 1;
    return false;
}

void kvf_session_sleep(struct kvf_client *client, uint64_t deadline_ns)
{
    struct kvf_session *session = client->session;
    bool is_spinning = (client->flags & KVF_ATTACH_SPIN) != 0;
    bool is_live = kvf_session_is_live(client);
    uint64_t look_ns;

    if (is_live && spin(session, is_spinning)) {
        return;
    }
    if (is_live && is_spinning) {
        kvf_session_tend(client, false);
        return;
    }
    look_ns = kvf_now_ns() + KVF_CLIENT_LOOK_MS * KVF_NS_PER_MS;
    deadline_ns = deadline_ns < look_ns ? deadline_ns : look_ns;
    if (!is_live) {
        uint64_t retry_ns = session == NULL ? client->attach_next_ns
                                            : kvf_now_ns() + 2 * KVF_CLIENT_TEND_MS * KVF_NS_PER_MS;
        bool is_attaching = session != NULL && session->state != KVF_SESSION_CONNECT;

        if (!is_attaching && retry_ns < deadline_ns && retry_ns > kvf_now_ns()) {
            deadline_ns = retry_ns;
        }
        sleep_on(is_attaching ? session->socket_fd : -1, deadline_ns);
        kvf_session_tend(client, true);
        return;
    }
    if (kvf_ring_client_sleep(&session->ring)) {
        sleep_on(session->socket_fd, deadline_ns);
        kvf_ring_client_awake(&session->ring);
        /* A completion came with one wake-up, and asking for more would be a system call for
         * nothing: what lies behind it ends the next wait at once, or is found by the next look at
         * the socket. */
        tend(client, kvf_ring_client_ready(&session->ring) ? 1 : KVF_CLIENT_MESSAGES_MAX,
             kvf_now_ns());
    }
}

static void signal_set(struct kvf_client_wait *wait, bool on)
{
    uint64_t count = 1;

    if (on && !wait->is_signaled) {
        wait->is_signaled = write(wait->event_fd, &count, sizeof(count)) == sizeof(count);
    } else if (!on && wait->is_signaled) {
        wait->is_signaled = read(wait->event_fd, &count, sizeof(count)) != sizeof(count);
    }
}

void kvf_session_arm(const struct kvf_client *client)
{
    bool has_events;

    if (!client->wait->is_asked) {
        return;
    }
    has_events = client->n_pending > 0 || client->is_break_unreported;
    if (!has_events && kvf_session_is_live(client)) {
        has_events = !kvf_ring_client_sleep(&client->session->ring);
    }
    signal_set(client->wait, has_events);
}

struct kvf_session *kvf_session_find(const struct kvf_client *client, uint16_t epoch)
{
    struct kvf_session *session = client->session;

    if (session != NULL && session->epoch == epoch) {
        return session;
    }
    for (session = client->lost; session != NULL && session->epoch != epoch;
         session = session->next) {
    }
    return session;
}

void kvf_session_close_all(struct kvf_client *client)
{
    if (kvf_session_is_live(client)) {
        struct kvf_wire_note note = {.connection_id = client->session->welcome.connection_id};

        kvf_proto_head_init(&note.head, KVF_WIRE_BYE);
        (void)kvf_seqpacket_send(client->session->socket_fd, &note, sizeof(note), NULL, 0);
    }
    channel_close(client);
    session_destroy(client->session);
    client->session = NULL;
    while (client->lost != NULL) {
        struct kvf_session *session = client->lost;

        client->lost = session->next;
        session_destroy(session);
    }
}

void kvf_session_wake_daemon(struct kvf_session *session)
{
    uint64_t count = 1;

    session->is_daemon_waking = true;
    /* fails only when the counter is full, and then the daemon is awake */
    (void)!write(session->wake_fd, &count, sizeof(count));
}
