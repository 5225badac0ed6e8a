/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_relay.c: clients of other nodes. Towards the daemon each is an ordinary client: a
 * relay has the client's end of the socket, the rings and the memory, and moves what lies there to
 * and from the link's messages. So a client of another node can do what one of this node can, and
 * is judged and bounded by the same code.
 *
 *   link                                          daemon's session
 *   CONTROL  ---------------- as it is ------------>  socket
 *            <- without descriptors; what they are <-
 *               of is mapped here
 *   STAGE    ---------------- bytes -------------->  staging
 *   SUBMIT   -------- when there is room --------->  submission ring
 *   COMPLETE <-------------------------------------  completion ring
 *   PIECE    <---- of a hit, read under its lease --  arena pieces
 *   LANDED   <---- the lease was alive behind it; it is released
 */
#include "transport/transport_ucx_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"
#include "transport/shm_lease.h"
#include "transport/shm_ring.h"

#define LOOK_NS       KVF_NS_PER_MS /* a socket is looked at this often while there is other work */
#define MESSAGES_MAX  64            /* of the socket, a turn */
#define LINGER_NS     (300 * KVF_NS_PER_MS) /* for the last message to arrive */
#define PIECES_A_STEP 16

/* Of submissions that wait: as much as a client can have on the way of the longest. */
#define SUBMITS_BYTES_MAX (KVF_NET_LINK_SENDS_MAX * KVF_NET_SUBMIT_BYTES_MAX)

struct relay_piece {
    void *base;
    uint64_t bytes;
    uint32_t id;
    uint32_t n_hits; /* being sent */
    bool is_dropped;
};

/* A submission for which there was no room. */
struct relay_submit {
    struct relay_submit *next;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_key keys[];
};

/* A record on its way to the client. */
struct relay_hit {
    struct kvf_net_serve serve;
    struct kvf_relay *relay;
    struct relay_piece *piece; /* NULL: of a profile */
    uint64_t lease;
};

struct kvf_relay {
    struct kvf_link *link;
    int fd;       /* the client's end */
    int event_fd; /* wakes the daemon; -1: no WELCOME so far */
    bool is_live, is_ended;
    bool is_profile_going; /* nothing else is taken from the socket meanwhile */
    uint64_t look_ns;
    struct kvf_wire_welcome welcome;
    void *ring_base;
    uint8_t *staging;
    uint8_t *profile;
    struct kvf_ring_client ring;
    struct relay_piece **pieces;
    uint32_t n_pieces, pieces_size;
    uint32_t n_hits; /* being sent, or waiting for credit */
    struct relay_submit *submits, **submits_end;
    uint32_t n_submits;
    uint64_t submits_bytes;
};

static struct relay_hit *hit_of(struct kvf_net_serve *serve)
{
    return (struct relay_hit *)((uint8_t *)serve - offsetof(struct relay_hit, serve));
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
static void piece_free(struct kvf_relay *relay, uint32_t i)
{
    struct relay_piece *piece = relay->pieces[i];

    kvf_segment_unmap(piece->base, piece->bytes);
    free(piece);
    relay->pieces[i] = relay->pieces[--relay->n_pieces];
}

static struct relay_piece *piece_find(const struct kvf_relay *relay, uint32_t id)
{
    for (uint32_t i = 0; i < relay->n_pieces; i++) {
        if (relay->pieces[i]->id == id && !relay->pieces[i]->is_dropped) {
            return relay->pieces[i];
        }
    }
    return NULL;
}

static int piece_add(struct kvf_relay *relay, const struct kvf_wire_piece *message, int fd)
{
    char text[KVF_ERROR_TEXT_BYTES];
    struct relay_piece *piece;
    int status;

    if (relay->n_pieces == relay->pieces_size) {
        uint32_t size = relay->pieces_size + PIECES_A_STEP;
        struct relay_piece **pieces = realloc(relay->pieces, size * sizeof(struct relay_piece *));

        if (pieces == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        relay->pieces = pieces;
        relay->pieces_size = size;
    }
    piece = calloc(1, sizeof(*piece));
    if (piece == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    piece->id = message->piece;
    piece->bytes = message->bytes;
    status = kvf_segment_map(fd, message->bytes, false, &piece->base, text, sizeof(text));
    if (status != KVF_OK) {
        free(piece);
        return status;
    }
    relay->pieces[relay->n_pieces++] = piece;
    return KVF_OK;
}

static void piece_drop(struct kvf_relay *relay, uint32_t id)
{
    struct relay_piece *piece = piece_find(relay, id);

    for (uint32_t i = 0; piece != NULL && i < relay->n_pieces; i++) {
        if (relay->pieces[i] == piece) {
            piece->is_dropped = true;
            if (piece->n_hits == 0) {
                piece_free(relay, i);
            }
            return;
        }
    }
}

/* ----------------------------------------------------------------------------------------------
 * The daemon's messages
 */
static void send_control(struct kvf_relay *relay, const union kvf_proto_message *message)
{
    (void)kvf_link_send_copy(relay->link, KVF_NET_CONTROL, 0, 0, message, message->head.bytes);
}

/* The memory of a profile goes as a record would. */
static int on_profile(struct kvf_relay *relay, const struct kvf_wire_profile *message, int fd)
{
    struct relay_hit *hit = calloc(1, sizeof(*hit));

    relay->profile = hit != NULL ? malloc(message->bytes) : NULL;
    if (relay->profile == NULL ||
        kvf_fd_pread_all(fd, relay->profile, message->bytes, 0) != KVF_OK) {
        free(hit);
        return KVF_ERR_NO_MEMORY;
    }
    hit->relay = relay;
    hit->serve.is_relayed = true;
    hit->serve.request = KVF_NET_PROFILE_REQUEST;
    hit->serve.record = relay->profile;
    hit->serve.record_bytes = (uint32_t)message->bytes;
    relay->is_profile_going = true;
    kvf_net_unwatch(relay->link->net, relay->fd); /* what lies there would keep the thread awake */
    kvf_flow_serve_begin(relay->link, &hit->serve);
    return KVF_OK;
}

static int say_mapped(struct kvf_relay *relay)
{
    struct kvf_wire_note note = {.connection_id = relay->welcome.connection_id};

    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    return kvf_seqpacket_send(relay->fd, &note, sizeof(note), NULL, 0);
}

/* Takes the descriptors. */
static int on_welcome(struct kvf_relay *relay, const struct kvf_wire_welcome *welcome, int *fds)
{
    char text[KVF_ERROR_TEXT_BYTES];
    void *base;
    int status;

    if (welcome->status != KVF_OK) {
        return KVF_OK;
    }
    relay->welcome = *welcome;
    relay->event_fd = fds[2];
    fds[2] = -1;
    status = kvf_segment_map(fds[0], welcome->ring_bytes, true, &relay->ring_base, text,
                             sizeof(text));
    if (status == KVF_OK) {
        status = kvf_segment_map(fds[1], welcome->staging_bytes, true, &base, text, sizeof(text));
    }
    if (status != KVF_OK) {
        return status;
    }
    relay->staging = base;
    return welcome->n_pieces == 0 ? say_mapped(relay) : KVF_OK;
}

static int on_ready(struct kvf_relay *relay)
{
    struct kvf_shm_header header;
    const char *why;

    memcpy(&header, relay->ring_base, sizeof(header));
    if (kvf_shm_header_check(&header, relay->welcome.ring_bytes, &why) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    kvf_ring_client_init(&relay->ring, relay->ring_base, &header);
    relay->is_live = true;
    return KVF_OK;
}

static int on_message(struct kvf_relay *relay, const union kvf_proto_message *message, int *fds)
{
    int status = KVF_OK;

    switch (message->head.type) {
    case KVF_WIRE_PIECE:
        status = piece_add(relay, &message->piece, fds[0]);
        if (status == KVF_OK && !relay->is_live && relay->n_pieces == relay->welcome.n_pieces) {
            status = say_mapped(relay);
        }
        return status;
    case KVF_WIRE_PIECE_DROP:
        piece_drop(relay, message->piece.piece);
        return KVF_OK;
    case KVF_WIRE_PROFILE:
        send_control(relay, message);
        return on_profile(relay, &message->profile, fds[0]);
    case KVF_WIRE_WELCOME:
        status = on_welcome(relay, &message->welcome, fds);
        break;
    case KVF_WIRE_READY:
        status = on_ready(relay);
        break;
    default: /* BYE; a GPU's messages answer what a relay does not pass on */
        break;
    }
    if (status == KVF_OK) {
        send_control(relay, message);
    }
    return status;
}

/* The daemon has ended the session: what it said before is on its way to the client. */
static void session_ended(struct kvf_relay *relay)
{
    struct kvf_link *link = relay->link;

    kvf_fd_close(&relay->fd);
    relay->is_live = false;
    if (!link->is_refused) {
        link->is_refused = true;
        link->end_ns = link->net->now_ns + LINGER_NS;
    }
}

static unsigned receive(struct kvf_relay *relay)
{
    uint8_t buffer[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message datagram;
    union kvf_proto_message message;
    const char *why;
    unsigned n = 0;

    relay->look_ns = relay->link->net->now_ns + LOOK_NS;
    while (n < MESSAGES_MAX && relay->fd >= 0 && !relay->is_profile_going) {
        int status = kvf_seqpacket_recv(relay->fd, buffer, sizeof(buffer), &datagram);

        if (status == KVF_EMPTY) {
            break;
        }
        n++;
        if (status != KVF_OK) {
            session_ended(relay);
            break;
        }
        if (datagram.bytes == 1 && datagram.n_fds == 0) {
            continue; /* a wake-up */
        }
        status = kvf_proto_decode(KVF_PROTO_DAEMON, buffer, datagram.bytes, datagram.n_fds,
                                  &message, &why);
        if (status == KVF_OK) {
            status = on_message(relay, &message, datagram.fds);
        }
        for (uint32_t f = 0; f < datagram.n_fds; f++) {
            kvf_fd_close(&datagram.fds[f]);
        }
        if (status != KVF_OK) {
            kvf_link_break(relay->link, status, "no memory or descriptors for this client");
            break;
        }
    }
    return n;
}

/* ----------------------------------------------------------------------------------------------
 * Submissions
 */
static void wake_daemon(const struct kvf_relay *relay)
{
    uint64_t one = 1;

    (void)!write(relay->event_fd, &one, sizeof(one));
}

/* Into the ring. False: there is no room. */
static bool push(struct kvf_relay *relay, struct kvf_shm_sqe *sqe, const struct kvf_shm_key *keys)
{
    if (kvf_ring_client_room(&relay->ring, sqe->n_entries) != KVF_OK) {
        return false;
    }
    for (uint32_t i = 0; i < sqe->n_entries; i++) {
        kvf_ring_client_key_put(&relay->ring, i, &keys[i]);
    }
    kvf_ring_client_push(&relay->ring, sqe);
    if (kvf_ring_client_publish(&relay->ring)) {
        wake_daemon(relay);
    }
    return true;
}

static size_t submit_bytes(const struct kvf_shm_sqe *sqe)
{
    return sizeof(struct relay_submit) + sqe->n_entries * sizeof(struct kvf_shm_key);
}

static struct relay_submit *submit_new(const struct kvf_shm_sqe *sqe, const void *keys)
{
    struct relay_submit *submit = calloc(1, submit_bytes(sqe));

    if (submit != NULL) {
        submit->sqe = *sqe;
        if (keys != NULL) {
            memcpy(submit->keys, keys, sqe->n_entries * sizeof(struct kvf_shm_key));
        }
    }
    return submit;
}

/* In order, as there is room. keys need not be aligned. */
static void submit(struct kvf_relay *relay, const struct kvf_shm_sqe *sqe, const void *keys)
{
    struct relay_submit *later = submit_new(sqe, keys);

    if (later == NULL) {
        kvf_link_break(relay->link, KVF_ERR_NO_MEMORY, "no memory for a submission");
    } else if (relay->n_submits == 0 && push(relay, &later->sqe, later->keys)) {
        free(later);
    } else {
        *relay->submits_end = later;
        relay->submits_end = &later->next;
        relay->n_submits++;
        relay->submits_bytes += submit_bytes(sqe);
    }
}

static unsigned submit_waiting(struct kvf_relay *relay)
{
    unsigned n = 0;

    while (relay->submits != NULL && push(relay, &relay->submits->sqe, relay->submits->keys)) {
        struct relay_submit *first = relay->submits;

        relay->submits = first->next;
        if (relay->submits == NULL) {
            relay->submits_end = &relay->submits;
        }
        relay->n_submits--;
        relay->submits_bytes -= submit_bytes(&first->sqe);
        free(first);
        n++;
    }
    return n;
}

static void on_submit(struct kvf_relay *relay, const void *body)
{
    struct kvf_shm_limits limits = {.staging_bytes = relay->welcome.staging_bytes,
                                    .key_entries = relay->ring.key_entries,
                                    .version = relay->welcome.version};
    struct kvf_shm_sqe sqe;
    const char *why;

    /* what has no credits is bounded by what has: cancels and leases of look-ups */
    if (relay->n_submits > 2 * relay->ring.cq_entries) {
        kvf_link_offend(relay->link, "more submissions than it has credits for");
        return;
    }
    memcpy(&sqe, body, sizeof(sqe));
    limits.key_head = sqe.key_first; /* this end has a key area of its own */
    if (kvf_shm_sqe_check(&sqe, &limits, &why) != KVF_OK) {
        kvf_link_offend(relay->link, why);
        return;
    }
    if ((sqe.flags & KVF_SQE_UNSUMMED) != 0) {
        kvf_link_offend(relay->link, "a put over the wire without the sums of its records");
        return;
    }
    if (relay->submits_bytes + submit_bytes(&sqe) > SUBMITS_BYTES_MAX) {
        kvf_link_break(relay->link, KVF_ERR_BUSY,
                       "its submissions come faster than they are taken");
        return;
    }
    submit(relay, &sqe, (const uint8_t *)body + sizeof(sqe));
}

static void on_control(struct kvf_relay *relay, const void *body, uint32_t bytes)
{
    union kvf_proto_message message;
    const char *why = "control message";

    if (kvf_proto_decode(KVF_PROTO_CLIENT, body, bytes, 0, &message, &why) == KVF_ERR_PROTOCOL) {
        kvf_link_offend(relay->link, why);
        return;
    }
    /* MAPPED is the relay's to say; a GPU of another node is nothing to this daemon */
    if (message.head.type != KVF_WIRE_HELLO && message.head.type != KVF_WIRE_BYE) {
        kvf_link_offend(relay->link, "a control message for daemons of its own node");
        return;
    }
    if (message.head.type == KVF_WIRE_HELLO && message.hello.staging_bytes > KVF_NET_STAGING_MAX) {
        kvf_link_offend(relay->link, "staging memory that no offset reaches the end of");
        return;
    }
    if (kvf_seqpacket_send(relay->fd, body, bytes, NULL, 0) == KVF_ERR_BUSY) {
        kvf_link_offend(relay->link, "more control messages than a client has");
    }
}

void kvf_relay_message(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_relay *relay = link->relay;

    if (relay->fd < 0) {
        return; /* it does not know yet */
    }
    if (head->type == KVF_NET_CONTROL) {
        on_control(relay, body, head->body_bytes);
    } else if (!relay->is_live) {
        kvf_link_offend(link, "a request before READY");
    } else if (head->type == KVF_NET_SUBMIT) {
        on_submit(relay, body);
    } else if (head->offset > relay->welcome.staging_bytes ||
               head->body_bytes > relay->welcome.staging_bytes - head->offset) {
        kvf_link_offend(link, "bytes outside of its staging memory");
    } else {
        memcpy(relay->staging + head->offset, body, head->body_bytes);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Completions
 */
static void release(struct kvf_relay *relay, uint64_t lease)
{
    submit(relay, &(struct kvf_shm_sqe){.opcode = KVF_OP_RELEASE, .arg = lease}, NULL);
}

/* Send a hit's record. False: it cannot be sent, the client has to do without. */
static bool hit_begin(struct kvf_relay *relay, const struct kvf_shm_cqe *cqe)
{
    struct relay_piece *piece = piece_find(relay, cqe->piece);
    struct relay_hit *hit;

    /* each holds its lease until it has landed: with more of them the client has released some
     * without having taken their records */
    if (relay->n_hits >= relay->ring.lease_entries) {
        kvf_link_offend(relay->link, "it asks for hits and takes none");
        return false;
    }
    if (piece == NULL) {
        (void)receive(relay); /* its announcement may still wait in the socket */
        piece = piece_find(relay, cqe->piece);
    }
    if (piece == NULL || cqe->offset > piece->bytes ||
        cqe->record_bytes > piece->bytes - cqe->offset) {
        return false;
    }
    hit = calloc(1, sizeof(*hit));
    if (hit == NULL) {
        return false;
    }
    hit->relay = relay;
    hit->piece = piece;
    hit->lease = cqe->lease;
    hit->serve.is_relayed = true;
    hit->serve.request = cqe->lease;
    hit->serve.record = (const uint8_t *)piece->base + cqe->offset;
    hit->serve.record_bytes = (uint32_t)cqe->record_bytes;
    piece->n_hits++;
    relay->n_hits++;
    kvf_flow_serve_begin(relay->link, &hit->serve);
    return true;
}

static void send_landed(struct kvf_relay *relay, uint64_t lease, int status)
{
    struct kvf_net_status_body body = {.status = status};

    (void)kvf_link_send(relay->link, KVF_NET_LANDED, lease, 0, &body, sizeof(body));
    release(relay, lease);
}

/* All that has been read of the record has been read: was it the record? */
void kvf_relay_served(struct kvf_net_serve *serve)
{
    struct relay_hit *hit = hit_of(serve);
    struct kvf_relay *relay = hit->relay;
    struct relay_piece *piece = hit->piece;

    if (piece == NULL) {
        relay->is_profile_going = false;
        if (relay->fd >= 0 && kvf_net_watch(relay->link->net, relay->fd, false) != KVF_OK) {
            kvf_link_break(relay->link, KVF_ERR_NO_MEMORY, "no memory to wait for its session");
        }
        free(relay->profile);
        relay->profile = NULL;
    } else if (!relay->is_ended && relay->is_live) {
        uint32_t index = kvf_lease_id_index(hit->lease) & (relay->ring.lease_entries - 1);
        bool is_live = kvf_lease_word_live(&relay->ring.leases[index],
                                           kvf_lease_id_generation(hit->lease));

        send_landed(relay, hit->lease, is_live ? KVF_OK : KVF_ERR_LOST);
    }
    free(hit);
    relay->n_hits -= piece != NULL;
    if (piece != NULL && --piece->n_hits == 0 && piece->is_dropped) {
        for (uint32_t i = 0; i < relay->n_pieces; i++) {
            if (relay->pieces[i] == piece) {
                piece_free(relay, i);
                return;
            }
        }
    }
}

/* Hand on completions that are there, and the records of the hits among them. */
static unsigned complete(struct kvf_relay *relay)
{
    struct kvf_shm_cqe cqes[KVF_NET_CQES_MAX];
    struct kvf_link *link = relay->link;
    uint32_t n = 0;

    while (n < KVF_NET_CQES_MAX) {
        int status = kvf_ring_client_take(&relay->ring, &cqes[n]);

        if (status != KVF_OK) {
            break;
        }
        n++;
    }
    if (n == 0 ||
        !kvf_link_send_copy(link, KVF_NET_COMPLETE, 0, 0, cqes, n * (uint32_t)sizeof(cqes[0]))) {
        return n;
    }
    for (uint32_t i = 0; i < n && !link->is_broken; i++) {
        if (cqes[i].kind == KVF_CQE_BLOCK && cqes[i].lease != 0 && !hit_begin(relay, &cqes[i])) {
            send_landed(relay, cqes[i].lease, KVF_ERR_NO_MEMORY);
        }
    }
    return n;
}

/* ----------------------------------------------------------------------------------------------
 * Life
 */
unsigned kvf_relay_turn(struct kvf_link *link, bool has_slept)
{
    struct kvf_relay *relay = link->relay;
    unsigned n = 0;

    if (relay->fd < 0) {
        return 0;
    }
    if (has_slept || link->net->now_ns >= relay->look_ns) {
        n += receive(relay);
    }
    if (relay->is_live && !link->is_broken) {
        n += submit_waiting(relay);
        if (link->sends < KVF_NET_RELAY_SENDS_MAX) {
            n += complete(relay);
        }
    }
    return n;
}

bool kvf_relay_sleep(struct kvf_link *link)
{
    struct kvf_relay *relay = link->relay;

    link->net->has_waiting |= relay->is_live && relay->submits != NULL;
    /* without room for more it is a send's end that goes on, and UCX wakes for that */
    return !relay->is_live || link->sends >= KVF_NET_RELAY_SENDS_MAX ||
           kvf_ring_client_sleep(&relay->ring);
}

void kvf_relay_awake(struct kvf_link *link)
{
    if (link->relay->is_live) {
        kvf_ring_client_awake(&link->relay->ring);
    }
}

int kvf_relay_open(struct kvf_link *link, const char *tenant)
{
    struct kvf_net *net = link->net;
    struct kvf_net_event event = {
        .kind = KVF_NET_EVENT_CLIENT, .link = kvf_link_id(link), .incarnation = link->incarnation};
    struct epoll_event watch = {.events = EPOLLIN};
    struct kvf_relay *relay = calloc(1, sizeof(*relay));
    int fds[2];

    if (relay == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    if (atomic_load(&net->link_events) >= KVF_NET_LINK_EVENTS_MAX ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
        free(relay);
        return KVF_ERR_BUSY;
    }
    relay->link = link;
    relay->fd = fds[0];
    relay->event_fd = -1;
    relay->submits_end = &relay->submits;
    link->relay = relay;
    if (epoll_ctl(net->epoll_fd, EPOLL_CTL_ADD, relay->fd, &watch) != 0) {
        kvf_fd_close(&fds[1]);
        return KVF_ERR_BUSY;
    }
    (void)snprintf(event.name, sizeof(event.name), "%s", tenant);
    memcpy(event.from, link->from, sizeof(event.from));
    event.fd = fds[1];
    atomic_fetch_add(&net->link_events, 1);
    kvf_net_emit(net, &event);
    return KVF_OK;
}

void kvf_relay_end(struct kvf_link *link)
{
    struct kvf_relay *relay = link->relay;

    relay->is_ended = true;
    relay->is_live = false;
    kvf_fd_close(&relay->fd); /* the session ends by it */
}

void kvf_relay_free(struct kvf_link *link)
{
    struct kvf_relay *relay = link->relay;

    if (relay == NULL) {
        return;
    }
    link->relay = NULL;
    kvf_fd_close(&relay->fd);
    kvf_fd_close(&relay->event_fd);
    kvf_segment_unmap(relay->ring_base, relay->welcome.ring_bytes);
    kvf_segment_unmap(relay->staging, relay->welcome.staging_bytes);
    while (relay->n_pieces > 0) {
        piece_free(relay, relay->n_pieces - 1);
    }
    free(relay->pieces);
    while (relay->submits != NULL) {
        struct relay_submit *first = relay->submits;

        relay->submits = first->next;
        free(first);
    }
    free(relay->profile);
    free(relay);
}
