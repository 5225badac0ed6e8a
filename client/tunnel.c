/* SPDX-License-Identifier: Apache-2.0
 *
 * tunnel.c: a daemon on another node, as a daemon of this one looks to the session.
 *
 * Open and close belong to the handle's thread, everything else to the tunnel's, which also frees
 * all of it when the link is closed: no call of the handle's waits for that. A record that came
 * is checked by its own checksums before the session hears of it; one that is not right, or for
 * which there was no room, is a miss.
 */
#include "client/tunnel.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/fd.h"
#include "base/hash.h"
#include "base/limits.h"
#include "base/random.h"
#include "client/tunnel_internal.h"
#include "codec/codec.h"

#define HEARTBEAT_NS KVF_NS_PER_S
#define SILENCE_NS   (5 * HEARTBEAT_NS)
#define BEAT_NS      (KVF_NS_PER_S / 4)
#define LOOK_NS      KVF_NS_PER_MS
#define MESSAGES_MAX 16
#define SUBMITS_MAX  64 /* taken a turn */
#define LANDING_MIN  (UINT64_C(16) << 20)
#define CLOSING_MAX  32 /* tunnels that no handle has any more, and whose threads have not ended */
#define EXIT_STEP_NS (KVF_NS_PER_MS)
#define EXIT_STEPS   2000

static _Atomic uint32_t n_closing; /* in this process */

/* ----------------------------------------------------------------------------------------------
 * To the session
 */
static void say(struct kvf_tunnel *tunnel, const union kvf_proto_message *message, const int *fds,
                uint32_t n_fds)
{
    (void)kvf_seqpacket_send(tunnel->fd, message, message->head.bytes, fds, n_fds);
}

static void say_note(struct kvf_tunnel *tunnel, enum kvf_wire_type type, int status)
{
    union kvf_proto_message message = {
        .note = {.status = status, .connection_id = tunnel->welcome.connection_id}};

    kvf_proto_head_init(&message.head, type);
    say(tunnel, &message, NULL, 0);
}

/* Nothing more comes: the session is told why if it does not live so far, and hung up on. Closing
 * the socket over what the session has said would reach it before the answer does. */
static void hang_up(struct kvf_tunnel *tunnel, int status, const char *why)
{
    union kvf_proto_message message = {.welcome = {.status = status}};

    if (tunnel->state == KVF_TUNNEL_OVER) {
        return;
    }
    (void)snprintf(tunnel->why, sizeof(tunnel->why), "%.80s:%s: %.160s", tunnel->address.host,
                   tunnel->address.port, why);
    if (tunnel->state == KVF_TUNNEL_CONNECTS || tunnel->state == KVF_TUNNEL_GREETS) {
        kvf_proto_head_init(&message.head, KVF_WIRE_WELCOME);
        (void)snprintf(message.welcome.text, sizeof(message.welcome.text), "%s", tunnel->why);
        say(tunnel, &message, NULL, 0);
    }
    tunnel->state = KVF_TUNNEL_OVER;
    atomic_store_explicit(&tunnel->has_hung_up, true, memory_order_release);
    kvf_net_unwatch(tunnel->net, tunnel->fd);
    (void)shutdown(tunnel->fd, SHUT_RDWR);
}

static void end(struct kvf_tunnel *tunnel, int status, const char *why)
{
    kvf_net_tunnel_break(tunnel->net, status, why);
    hang_up(tunnel, status, why);
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */
static int make_memory(const char *name, uint64_t bytes, int *fd_out, void **base_out)
{
    struct kvf_memfd memfd;
    char text[KVF_ERROR_TEXT_BYTES];
    int status = kvf_memfd_create(name, bytes, KVF_HUGEPAGES_OFF, &memfd);

    if (status != KVF_OK) {
        return status;
    }
    *fd_out = memfd.fd;
    return kvf_segment_map(memfd.fd, bytes, true, base_out, text, sizeof(text));
}

/* The rings and tables of as many credits as the daemon gives. */
static int make_rings(struct kvf_tunnel *tunnel)
{
    uint32_t sq = tunnel->welcome.credits / 2;
    int status = kvf_shm_layout_init(
        &tunnel->layout, sq, 2 * sq,
        4 * sq < KVF_SHM_KEY_ENTRIES_MIN ? KVF_SHM_KEY_ENTRIES_MIN : 4 * sq, 2 * sq);

    if (status != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    tunnel->layout.connection_id = tunnel->welcome.connection_id;
    tunnel->layout.incarnation = tunnel->welcome.incarnation;
    status = make_memory("kvferry-ring", tunnel->layout.segment_bytes, &tunnel->ring_fd,
                         &tunnel->ring_base);
    if (status != KVF_OK) {
        return status;
    }
    memcpy(tunnel->ring_base, &tunnel->layout, sizeof(tunnel->layout));
    kvf_ring_daemon_init(&tunnel->ring, tunnel->ring_base, &tunnel->layout);
    tunnel->leases = calloc(2 * sq, sizeof(*tunnel->leases));
    tunnel->lease_of = calloc(2 * sq, sizeof(*tunnel->lease_of));
    tunnel->waiting = calloc(2 * sq, sizeof(*tunnel->waiting));
    tunnel->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (tunnel->leases == NULL || tunnel->lease_of == NULL || tunnel->waiting == NULL ||
        tunnel->event_fd < 0) {
        return KVF_ERR_NO_MEMORY;
    }
    return kvf_net_watch(tunnel->net, tunnel->event_fd, true);
}

static int make_all(struct kvf_tunnel *tunnel)
{
    uint64_t staging = tunnel->welcome.staging_bytes;
    uint64_t landing = tunnel->address.landing_bytes;
    void *base;
    int status;

    if (landing == 0) {
        landing = 2 * staging < LANDING_MIN ? LANDING_MIN : 2 * staging;
        landing = landing > KVF_PROTO_PIECE_MAX ? KVF_PROTO_PIECE_MAX : landing;
    }
    landing = (landing + KVF_PROTO_PAGE_BYTES - 1) / KVF_PROTO_PAGE_BYTES * KVF_PROTO_PAGE_BYTES;
    status = make_rings(tunnel);
    if (status == KVF_OK) {
        status = make_memory("kvferry-staging", staging, &tunnel->staging_fd, &base);
    }
    if (status == KVF_OK) {
        tunnel->staging = base;
        status = make_memory("kvferry-landing", landing, &tunnel->landing_fd, &base);
    }
    if (status == KVF_OK) {
        tunnel->landing = base;
        tunnel->landing_bytes = landing;
        status = kvf_memfd_seal(tunnel->landing_fd, KVF_SEGMENT_SEALS);
    }
    return status == KVF_OK ? kvf_stage_area_init(&tunnel->area, landing) : status;
}

/* ----------------------------------------------------------------------------------------------
 * Attaching
 */
static void on_welcome(struct kvf_tunnel *tunnel, union kvf_proto_message *message)
{
    struct kvf_wire_welcome *welcome = &message->welcome;
    union kvf_proto_message piece = {.piece = {.piece = KVF_TUNNEL_PIECE}};
    int status;

    if (welcome->status != KVF_OK) {
        end(tunnel, welcome->status, welcome->text);
        return;
    }
    if (welcome->staging_bytes > KVF_NET_STAGING_MAX) {
        end(tunnel, KVF_ERR_TOO_LARGE,
            "it gives more than 4 GiB of staging memory; ask for less by staging_bytes");
        return;
    }
    tunnel->welcome = *welcome;
    status = make_all(tunnel);
    if (status != KVF_OK) {
        end(tunnel, status, "no memory for rings, staging and hits here");
        return;
    }
    welcome->ring_bytes = tunnel->layout.segment_bytes;
    welcome->arena_bytes = tunnel->landing_bytes;
    welcome->n_pieces = 1;
    say(tunnel, message, (int[]){tunnel->ring_fd, tunnel->staging_fd, tunnel->event_fd}, 3);
    kvf_proto_head_init(&piece.head, KVF_WIRE_PIECE);
    piece.piece.bytes = tunnel->landing_bytes;
    say(tunnel, &piece, &tunnel->landing_fd, 1);
    tunnel->state = KVF_TUNNEL_MAPS;
}

/* Both ends are ready. */
static void become_live(struct kvf_tunnel *tunnel)
{
    if (!tunnel->is_mapped || !tunnel->is_daemon_ready) {
        return;
    }
    tunnel->state = KVF_TUNNEL_LIVES;
    kvf_ring_daemon_beat(&tunnel->ring);
    say_note(tunnel, KVF_WIRE_READY, KVF_OK);
}

static void on_mapped(struct kvf_tunnel *tunnel)
{
    int status = kvf_memfd_seal(tunnel->ring_fd, KVF_SEGMENT_SEALS);

    if (status == KVF_OK) {
        status = kvf_memfd_seal(tunnel->staging_fd, KVF_SEGMENT_SEALS);
    }
    if (status != KVF_OK) {
        end(tunnel, status, "memory cannot be sealed here");
        return;
    }
    tunnel->is_mapped = true;
    become_live(tunnel);
}

/* A profile's memory comes next, in pieces. */
static void on_profile(struct kvf_tunnel *tunnel, const struct kvf_wire_profile *message)
{
    void *base;

    if (tunnel->profile_fd >= 0 || message->bytes > KVF_PROTO_PROFILE_MAX ||
        make_memory("kvferry-profile", message->bytes, &tunnel->profile_fd, &base) != KVF_OK) {
        end(tunnel, KVF_ERR_PROTOCOL, "a profile out of order, or no memory for it");
        return;
    }
    tunnel->profile = base;
    tunnel->profile_message = *message;
    tunnel->profile_come_bytes = 0;
}

static void on_profile_piece(struct kvf_tunnel *tunnel, const struct kvf_net_head *head,
                             const void *body)
{
    uint64_t bytes = tunnel->profile_message.bytes;
    union kvf_proto_message message = {.profile = tunnel->profile_message};

    if (tunnel->profile == NULL || head->offset > bytes ||
        head->body_bytes > bytes - head->offset) {
        end(tunnel, KVF_ERR_PROTOCOL, "a piece outside of its profile");
        return;
    }
    memcpy(tunnel->profile + head->offset, body, head->body_bytes);
    tunnel->profile_come_bytes += head->body_bytes;
    if (tunnel->profile_come_bytes == bytes) {
        (void)kvf_memfd_seal(tunnel->profile_fd, KVF_SEGMENT_SEALS);
        say(tunnel, &message, &tunnel->profile_fd, 1);
        kvf_segment_unmap(tunnel->profile, bytes);
        tunnel->profile = NULL;
    }
}

/* The daemon's. */
static void on_control(struct kvf_tunnel *tunnel, const void *body, uint32_t bytes)
{
    union kvf_proto_message message;
    const char *why = "control message";
    struct kvf_wire_head head;
    uint32_t n_fds;
    int32_t status;

    memcpy(&head, body, sizeof(head)); /* net_proto.c has seen to its being there */
    /* what comes with descriptors there comes without them here */
    n_fds = head.type == KVF_WIRE_PROFILE ? 1 : 0;
    if (head.type == KVF_WIRE_WELCOME && bytes == sizeof(struct kvf_wire_welcome)) {
        memcpy(&status, (const uint8_t *)body + offsetof(struct kvf_wire_welcome, status),
               sizeof(status));
        n_fds = status == KVF_OK ? 3 : 0;
    }
    if (kvf_proto_decode(KVF_PROTO_DAEMON, body, bytes, n_fds, &message, &why) != KVF_OK) {
        end(tunnel, KVF_ERR_PROTOCOL, why);
        return;
    }
    if (message.head.type == KVF_WIRE_WELCOME && tunnel->state == KVF_TUNNEL_GREETS) {
        on_welcome(tunnel, &message);
    } else if (message.head.type == KVF_WIRE_PROFILE && tunnel->state == KVF_TUNNEL_GREETS) {
        on_profile(tunnel, &message.profile);
    } else if (message.head.type == KVF_WIRE_READY && tunnel->state == KVF_TUNNEL_MAPS) {
        tunnel->is_daemon_ready = true;
        become_live(tunnel);
    } else if (message.head.type == KVF_WIRE_BYE) {
        say(tunnel, &message, NULL, 0);
        end(tunnel, KVF_ERR_DISCONNECTED, "the daemon said goodbye");
    } else {
        end(tunnel, KVF_ERR_PROTOCOL, "the daemon sent a control message out of order");
    }
}

/* The session's. */
static void on_session_message(struct kvf_tunnel *tunnel, const union kvf_proto_message *message)
{
    union kvf_proto_message answer = {.gpu_channel = {.status = KVF_ERR_UNSUPPORTED}};

    switch (message->head.type) {
    case KVF_WIRE_HELLO:
    case KVF_WIRE_BYE:
        (void)kvf_net_tunnel_send(tunnel->net, KVF_NET_CONTROL, 0, 0, message, message->head.bytes,
                                  false);
        break;
    case KVF_WIRE_MAPPED:
        on_mapped(tunnel);
        break;
    case KVF_WIRE_GPU:
        if (message->gpu.path == KVF_GPU_PATH_AGENT) {
            kvf_proto_head_init(&answer.head, KVF_WIRE_GPU_CHANNEL);
            (void)snprintf(answer.gpu_channel.text, sizeof(answer.gpu_channel.text),
                           "the daemon is on another node: its GPU worker cannot reach this GPU");
            say(tunnel, &answer, NULL, 0);
        }
        break;
    default: /* of a GPU's memory: no piece of it is ever announced */
        break;
    }
}

static unsigned receive(struct kvf_tunnel *tunnel)
{
    uint8_t buffer[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message datagram;
    union kvf_proto_message message;
    const char *why;
    unsigned n = 0;

    while (n < MESSAGES_MAX && tunnel->state != KVF_TUNNEL_OVER) {
        int status = kvf_seqpacket_recv(tunnel->fd, buffer, sizeof(buffer), &datagram);

        if (status == KVF_EMPTY) {
            break;
        }
        n++;
        if (status == KVF_OK) {
            status = kvf_proto_decode(KVF_PROTO_CLIENT, buffer, datagram.bytes, datagram.n_fds,
                                      &message, &why);
            kvf_seqpacket_message_close(&datagram);
        }
        if (status != KVF_OK) {
            end(tunnel, KVF_ERR_CANCELED, "the session has ended");
            break;
        }
        on_session_message(tunnel, &message);
    }
    return n;
}

/* ----------------------------------------------------------------------------------------------
 * Submissions, in order; of a put its bytes first
 */
static int queue(struct kvf_tunnel *tunnel, const struct kvf_shm_sqe *sqe)
{
    size_t keys_bytes = sqe->n_entries * sizeof(struct kvf_shm_key);
    struct kvf_tunnel_submit *submit = calloc(1, sizeof(*submit) + keys_bytes);

    if (submit == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    submit->sqe = *sqe;
    memcpy(submit->keys, tunnel->keys, keys_bytes);
    *tunnel->submits_end = submit;
    tunnel->submits_end = &submit->next;
    return KVF_OK;
}

static void send_submit(struct kvf_tunnel *tunnel, const struct kvf_shm_sqe *sqe,
                        const struct kvf_shm_key *keys)
{
    size_t keys_bytes = sqe->n_entries * sizeof(*keys);

    memcpy(tunnel->scratch, sqe, sizeof(*sqe));
    memcpy(tunnel->scratch + sizeof(*sqe), keys, keys_bytes);
    (void)kvf_net_tunnel_send(tunnel->net, KVF_NET_SUBMIT, 0, 0, tunnel->scratch,
                              (uint32_t)(sizeof(*sqe) + keys_bytes), false);
}

/* Send one piece of the record that is next. */
static void send_piece(struct kvf_tunnel *tunnel, struct kvf_tunnel_submit *submit)
{
    const struct kvf_shm_key *key = &submit->keys[submit->key];
    uint64_t left = key->record_bytes - submit->offset;
    uint32_t bytes = left < KVF_NET_PIECE_BYTES ? (uint32_t)left : KVF_NET_PIECE_BYTES;
    uint64_t at = key->stage_offset + submit->offset;

    (void)kvf_net_tunnel_send(tunnel->net, KVF_NET_STAGE, 0, (uint32_t)at, tunnel->staging + at,
                              bytes, true);
    submit->offset += bytes;
    if (submit->offset == key->record_bytes) {
        submit->offset = 0;
        submit->key++;
    }
}

static unsigned send_queued(struct kvf_tunnel *tunnel)
{
    unsigned n = 0;

    while (tunnel->submits != NULL && kvf_net_tunnel_room(tunnel->net)) {
        struct kvf_tunnel_submit *first = tunnel->submits;

        n++;
        if (first->sqe.opcode == KVF_OP_PUT && first->key < first->sqe.n_keys) {
            send_piece(tunnel, first);
            continue;
        }
        send_submit(tunnel, &first->sqe, first->keys);
        tunnel->submits = first->next;
        if (tunnel->submits == NULL) {
            tunnel->submits_end = &tunnel->submits;
        }
        free(first);
    }
    return n;
}

/* Sum what pages do not know yet. A daemon that is to sum what came to it would take for right
 * whatever the way has made of it: bytes of records carry no MAC. A page that is wrong stays so,
 * for the daemon to find. */
static void sum_records(struct kvf_tunnel *tunnel, struct kvf_shm_sqe *sqe)
{
    for (uint32_t i = 0; i < sqe->n_keys; i++) {
        const struct kvf_shm_key *key = &tunnel->keys[i];
        uint8_t *record = tunnel->staging + key->stage_offset;
        struct kvf_record_page page;

        memcpy(&page, record, sizeof(page));
        if (kvf_block_check(&page, key->record_bytes) == KVF_OK &&
            page.header.total_bytes == key->record_bytes) {
            page.header.payload_crc32c = kvf_crc32c(0, record + sizeof(page),
                                                    key->record_bytes - sizeof(page));
            kvf_block_seal_header(&page);
            memcpy(record, &page, sizeof(page));
        }
    }
    sqe->flags &= (uint8_t)~KVF_SQE_UNSUMMED;
}

static unsigned take_submissions(struct kvf_tunnel *tunnel)
{
    struct kvf_shm_limits limits = {.staging_bytes = tunnel->welcome.staging_bytes,
                                    .scheduler = tunnel->is_scheduler,
                                    .version = tunnel->welcome.version};
    struct kvf_shm_sqe sqe;
    const char *why;
    unsigned n = 0;

    while (n < SUBMITS_MAX && tunnel->state == KVF_TUNNEL_LIVES &&
           kvf_net_tunnel_room(tunnel->net)) {
        int status = kvf_ring_daemon_take(&tunnel->ring, &limits, &sqe, tunnel->keys, &why);

        if (status == KVF_EMPTY) {
            break;
        }
        n++;
        if (status == KVF_OK && (sqe.flags & KVF_SQE_UNSUMMED) != 0) {
            sum_records(tunnel, &sqe);
        }
        if (status == KVF_OK &&
            (sqe.opcode != KVF_OP_RELEASE || kvf_tunnel_release(tunnel, &sqe.arg))) {
            status = queue(tunnel, &sqe);
        }
        if (status != KVF_OK) {
            end(tunnel, status, "a submission is impossible, or there is no memory for it");
        }
    }
    return n;
}

/* ----------------------------------------------------------------------------------------------
 * Calls of the network's thread
 */
static void connect_to(struct kvf_tunnel *tunnel, const struct kvf_net_address *address)
{
    if (kvf_net_connect(tunnel->net, address, 1) != KVF_OK) {
        hang_up(tunnel, KVF_ERR_NO_MEMORY, "no memory or descriptors here");
    }
}

static void tunnel_begin(void *ctx, struct kvf_net *net)
{
    struct kvf_tunnel *tunnel = ctx;
    struct kvf_net_address address;
    int status;

    tunnel->net = net;
    if (kvf_resolve_numeric(tunnel->address.host, tunnel->address.port, &address) == KVF_OK) {
        connect_to(tunnel, &address);
        return;
    }
    status = kvf_resolve_begin(tunnel->address.host, tunnel->address.port, &tunnel->resolve);
    if (status == KVF_ERR_BUSY) {
        hang_up(tunnel, KVF_ERR_NO_DAEMON,
                "its name is not looked up: no name server has answered as many look-ups of this "
                "process as it may have; give an address");
    } else if (status != KVF_OK ||
               kvf_net_watch(net, kvf_resolve_fd(tunnel->resolve), true) != KVF_OK) {
        hang_up(tunnel, KVF_ERR_NO_MEMORY, "no memory or descriptors here");
    } else {
        atomic_store(&tunnel->is_resolving, true);
    }
}

/* Has the name server answered? */
static unsigned take_address(struct kvf_tunnel *tunnel)
{
    struct kvf_net_address address;
    const char *why = "";
    int status = kvf_resolve_take(tunnel->resolve, tunnel->try_number, &address, &why);

    if (status == KVF_EMPTY) {
        return 0;
    }
    atomic_store(&tunnel->is_resolving, false);
    kvf_net_unwatch(tunnel->net, kvf_resolve_fd(tunnel->resolve));
    kvf_resolve_end(tunnel->resolve);
    tunnel->resolve = NULL;
    if (status == KVF_OK) {
        connect_to(tunnel, &address);
    } else {
        hang_up(tunnel, KVF_ERR_NO_DAEMON, why);
    }
    return 1;
}

/* The session's socket is not watched before that: what has been said there waits for the link. */
static void tunnel_up(void *ctx)
{
    struct kvf_tunnel *tunnel = ctx;

    tunnel->state = KVF_TUNNEL_GREETS;
    if (kvf_net_watch(tunnel->net, tunnel->fd, false) != KVF_OK) {
        end(tunnel, KVF_ERR_NO_MEMORY, "no memory or descriptors here");
    }
}

static void tunnel_message(void *ctx, const struct kvf_net_head *head, const void *body)
{
    struct kvf_tunnel *tunnel = ctx;

    if (tunnel->state == KVF_TUNNEL_OVER) {
        return;
    }
    if (head->type == KVF_NET_CONTROL) {
        on_control(tunnel, body, head->body_bytes);
    } else if (head->type == KVF_NET_PIECE && head->request == KVF_NET_PROFILE_REQUEST) {
        on_profile_piece(tunnel, head, body);
    } else if (tunnel->state != KVF_TUNNEL_LIVES) {
        end(tunnel, KVF_ERR_PROTOCOL, "the daemon sent completions before READY");
    } else {
        int status = kvf_tunnel_land(tunnel, head, body);

        if (status != KVF_OK) {
            end(tunnel, status, "the daemon's completion is impossible, or no memory for it here");
        }
    }
}

static void tunnel_down(void *ctx, int status, const char *why)
{
    struct kvf_tunnel *tunnel = ctx;

    if (tunnel->state == KVF_TUNNEL_CONNECTS &&
        (status == KVF_ERR_DISCONNECTED || status == KVF_ERR_TIMEOUT)) {
        char text[KVF_WIRE_TEXT_BYTES];

        (void)snprintf(text, sizeof(text),
                       "%.80s: is kvferryd there, with peers.listen at this address?", why);
        hang_up(tunnel, KVF_ERR_NO_DAEMON, text);
        return;
    }
    hang_up(tunnel, status < 0 ? status : KVF_ERR_DISCONNECTED, why);
}

static unsigned tunnel_turn(void *ctx, uint64_t now_ns, bool has_slept)
{
    struct kvf_tunnel *tunnel = ctx;
    unsigned n = 0;

    if (tunnel->resolve != NULL && tunnel->state == KVF_TUNNEL_CONNECTS) {
        return take_address(tunnel);
    }
    if (tunnel->state == KVF_TUNNEL_CONNECTS || tunnel->state == KVF_TUNNEL_OVER) {
        return 0;
    }
    if (has_slept || now_ns >= tunnel->look_ns) {
        tunnel->look_ns = now_ns + LOOK_NS;
        n += receive(tunnel);
    }
    if (tunnel->state != KVF_TUNNEL_LIVES) {
        return n;
    }
    if (now_ns >= tunnel->beat_ns) {
        tunnel->beat_ns = now_ns + BEAT_NS;
        kvf_ring_daemon_beat(&tunnel->ring);
    }
    n += take_submissions(tunnel);
    n += send_queued(tunnel);
    n += kvf_tunnel_deliver(tunnel);
    return n;
}

static bool tunnel_sleep(void *ctx)
{
    struct kvf_tunnel *tunnel = ctx;

    return tunnel->state != KVF_TUNNEL_LIVES || !kvf_net_tunnel_room(tunnel->net) ||
           kvf_ring_daemon_sleep(&tunnel->ring);
}

static void tunnel_awake(void *ctx)
{
    struct kvf_tunnel *tunnel = ctx;

    if (tunnel->state == KVF_TUNNEL_LIVES) {
        kvf_ring_daemon_awake(&tunnel->ring);
    }
}

static const struct kvf_net_tunnel_ops ops = {
    .begin = tunnel_begin,
    .up = tunnel_up,
    .message = tunnel_message,
    .down = tunnel_down,
    .turn = tunnel_turn,
    .sleep = tunnel_sleep,
    .awake = tunnel_awake,
};

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
static struct kvf_tunnel *tunnel_new(void)
{
    struct kvf_tunnel *tunnel = calloc(1, sizeof(*tunnel));

    if (tunnel == NULL) {
        return NULL;
    }
    tunnel->fd = tunnel->ring_fd = tunnel->staging_fd = tunnel->landing_fd = -1;
    tunnel->event_fd = tunnel->profile_fd = -1;
    tunnel->submits_end = &tunnel->submits;
    tunnel->keys = calloc(KVF_SHM_REQUEST_ENTRIES_MAX, sizeof(*tunnel->keys));
    tunnel->scratch = malloc(KVF_NET_SUBMIT_BYTES_MAX);
    if (tunnel->keys == NULL || tunnel->scratch == NULL) {
        kvf_tunnel_close(tunnel);
        return NULL;
    }
    return tunnel;
}

static int open_net(struct kvf_tunnel *tunnel, const char *client_name, char *why_out,
                    size_t why_bytes)
{
    struct kvf_net_config config = {.heartbeat_ns = HEARTBEAT_NS,
                                    .silence_ns = SILENCE_NS,
                                    .retry_ns = KVF_NS_PER_S,
                                    .tunnel = &ops,
                                    .tunnel_ctx = tunnel};
    int status = kvf_tunnel_key_read(tunnel->address.key_path, config.tenant, config.cluster_key,
                                     why_out, why_bytes);

    if (status != KVF_OK) {
        return status;
    }
    do {
        kvf_random_system.fill(NULL, &config.incarnation, sizeof(config.incarnation));
    } while (config.incarnation == 0);
    (void)snprintf(config.name, sizeof(config.name), "%s", client_name);
    return kvf_net_open(&config, &tunnel->opened, why_out, why_bytes);
}

bool kvf_tunnel_is_resolving(const struct kvf_tunnel *tunnel)
{
    return atomic_load(&tunnel->is_resolving);
}

const char *kvf_tunnel_why(const struct kvf_tunnel *tunnel)
{
    return atomic_load_explicit(&tunnel->has_hung_up, memory_order_acquire) ? tunnel->why : "";
}

int kvf_tunnel_open(const char *address, const struct kvf_wire_hello *hello, uint32_t try_number,
                    struct kvf_tunnel **tunnel_out, int *socket_fd_out, char *why_out,
                    size_t why_bytes)
{
    struct kvf_tunnel *tunnel;
    int fds[2];
    int status;

    if (atomic_load(&n_closing) >= CLOSING_MAX) {
        return KVF_ERR_BUSY;
    }
    tunnel = tunnel_new();
    if (tunnel == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    status = kvf_tunnel_address_parse(address, &tunnel->address, why_out, why_bytes);
    if (status == KVF_OK && hello->staging_bytes > KVF_NET_STAGING_MAX) {
        (void)snprintf(why_out, why_bytes,
                       "staging memory of a daemon on another node is 4 GiB at most; set "
                       "staging_bytes to less");
        status = KVF_ERR_INVALID;
    }
    if (status == KVF_OK && kvf_hash_init_library() != KVF_OK) {
        (void)snprintf(why_out, why_bytes,
                       "libsodium.so.23 cannot be loaded, which daemons of other nodes need; "
                       "install libsodium23");
        status = KVF_ERR_UNSUPPORTED;
    }
    if (status == KVF_OK &&
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
        (void)snprintf(why_out, why_bytes, "socketpair: %s", strerror(errno));
        status = KVF_ERR_NO_MEMORY;
    }
    if (status != KVF_OK) {
        kvf_tunnel_close(tunnel);
        return status;
    }
    tunnel->fd = fds[0];
    tunnel->try_number = try_number;
    tunnel->is_scheduler = hello->shard == KVF_SHARD_NONE;
    status = open_net(tunnel, hello->client_name, why_out, why_bytes);
    if (status != KVF_OK) {
        kvf_fd_close(&fds[1]);
        kvf_tunnel_close(tunnel);
        return status;
    }
    *socket_fd_out = fds[1];
    *tunnel_out = tunnel;
    return KVF_OK;
}

/* Nobody else knows it any more. */
static void tunnel_free(struct kvf_tunnel *tunnel)
{
    kvf_resolve_end(tunnel->resolve);
    kvf_fd_close(&tunnel->fd);
    kvf_fd_close(&tunnel->event_fd);
    kvf_fd_close(&tunnel->ring_fd);
    kvf_fd_close(&tunnel->staging_fd);
    kvf_fd_close(&tunnel->landing_fd);
    kvf_fd_close(&tunnel->profile_fd);
    kvf_segment_unmap(tunnel->ring_base, tunnel->layout.segment_bytes);
    kvf_segment_unmap(tunnel->staging, tunnel->welcome.staging_bytes);
    kvf_segment_unmap(tunnel->landing, tunnel->landing_bytes);
    kvf_segment_unmap(tunnel->profile, tunnel->profile_message.bytes);
    kvf_stage_area_fini(&tunnel->area);
    while (tunnel->submits != NULL) {
        struct kvf_tunnel_submit *first = tunnel->submits;

        tunnel->submits = first->next;
        free(first);
    }
    while (tunnel->failed != NULL) {
        struct kvf_tunnel_failed *failed = tunnel->failed;

        tunnel->failed = failed->next;
        free(failed);
    }
    free(tunnel->leases);
    free(tunnel->lease_of);
    free(tunnel->waiting);
    free(tunnel->keys);
    free(tunnel->scratch);
    free(tunnel);
}

static void tunnel_closed(void *ctx)
{
    tunnel_free(ctx);
    atomic_fetch_sub(&n_closing, 1);
}

/* A process that ends waits for links that are being closed: UCX must not be taken apart under
 * their threads. */
static void wait_for_closing(void)
{
    for (uint32_t i = 0; i < EXIT_STEPS && atomic_load(&n_closing) > 0; i++) {
        (void)nanosleep(&(struct timespec){.tv_nsec = EXIT_STEP_NS}, NULL);
    }
}

/* A child has none of its parent's threads, and waits for none. */
static void forked(void)
{
    atomic_store(&n_closing, 0);
}

static void wait_at_exit(void)
{
    (void)pthread_atfork(NULL, NULL, forked);
    (void)atexit(wait_for_closing); /* behind UCX's own: it runs before them */
}

void kvf_tunnel_close(struct kvf_tunnel *tunnel)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    if (tunnel == NULL) {
        return;
    }
    if (tunnel->opened == NULL) {
        tunnel_free(tunnel);
        return;
    }
    (void)pthread_once(&once, wait_at_exit);
    atomic_fetch_add(&n_closing, 1);
    kvf_net_close_later(tunnel->opened, tunnel_closed, tunnel);
}
