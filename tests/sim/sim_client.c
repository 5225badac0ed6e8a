/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_client.c: a client's life. It speaks the protocol by the library's own end of sockets and
 * rings, but nothing here sleeps: each call does what can be done now.
 */
#include "tests/sim/sim.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/fd.h"
#include "transport/segment.h"
#include "transport/shm_lease.h"

#define HANDSHAKE_NS (5 * KVF_NS_PER_S) /* the daemon's patience */

/* ---- arena pieces ---------------------------------------------------------------------------- */

const struct sim_piece *sim_piece_find(const struct sim *sim, uint32_t id)
{
    for (uint32_t i = sim->n_pieces; i-- > 0;) {
        if (sim->pieces[i].id == id) {
            return &sim->pieces[i];
        }
    }
    return NULL;
}

void sim_pieces_forget(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->n_pieces; i++) {
        kvf_segment_unmap(sim->pieces[i].map, sim->pieces[i].bytes);
    }
    sim->n_pieces = 0;
}

/* One mapping serves all clients of a tenant; each must have been given the same memory, and nobody
 * of another tenant. */
static void learn_piece(struct sim *sim, const struct sim_client *client,
                        const struct kvf_wire_piece *message, int fd)
{
    uint16_t tenant = sim->namespaces[client->ns].tenant;
    bool is_device = message->head.type == KVF_WIRE_DEVICE_PIECE;
    uint32_t id = message->piece | (is_device ? SIM_ON_GPU : 0);
    const struct sim_piece *known = sim_piece_find(sim, id);
    struct sim_piece *piece = &sim->pieces[sim->n_pieces];
    char text[KVF_ERROR_TEXT_BYTES];
    struct stat st;
    void *map;

    if (fstat(fd, &st) != 0 ||
        kvf_segment_check(fd, message->bytes, !is_device, text, sizeof(text))) {
        sim_fail(sim, "piece %u is no sealed memory of its size", message->piece);
    }
    if (known != NULL) {
        if (known->inode != st.st_ino || known->tenant != tenant ||
            known->bytes != message->bytes) {
            sim_fail(sim, "piece %u given to tenant %u is other memory than given before",
                     message->piece, tenant);
        }
        return;
    }
    for (uint32_t i = 0; i < sim->n_pieces; i++) {
        if (sim->pieces[i].inode == st.st_ino) {
            sim_fail(sim, "piece %u given to tenant %u is piece %u of tenant %u", message->piece,
                     tenant, sim->pieces[i].id, sim->pieces[i].tenant);
        }
    }
    if (sim->n_pieces == SIM_PIECES ||
        kvf_segment_map(fd, message->bytes, false, &map, text, sizeof(text)) != KVF_OK) {
        sim_fail(sim, "piece %u cannot be mapped", message->piece);
    }
    *piece = (struct sim_piece){
        .id = id, .tenant = tenant, .inode = st.st_ino, .bytes = message->bytes, .map = map};
    sim->n_pieces++;
}

/* ---- birth and death ------------------------------------------------------------------------- */

static void choose_role(struct sim *sim, struct sim_client *client)
{
    client->is_hostile = sim->shape.has_hostile && client->number >= sim->shape.n_clients - 2;
    client->is_scheduler = !client->is_hostile && sim_one_in(sim, 8);
    client->ns = (uint16_t)(client->is_hostile
                                ? SIM_NAMESPACES_HONEST +
                                      sim_below(sim, SIM_NAMESPACES - SIM_NAMESPACES_HONEST)
                                : sim_below(sim, SIM_NAMESPACES_HONEST));
    client->shard = client->is_scheduler
                        ? KVF_SHARD_NONE
                        : (uint16_t)sim_below(sim, sim->namespaces[client->ns].shard_count);
}

void sim_client_spawn(struct sim *sim, struct sim_client *client)
{
    uint8_t number = client->number;
    int fds[2];

    memset(client, 0, sizeof(*client));
    client->number = number;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
        sim_fail(sim, "no socket for a client");
    }
    choose_role(sim, client);
    client->fd = fds[0];
    client->state = SIM_CONNECTED;
    client->since_ns = sim->now_ns;
    client->said_ns = sim->now_ns;
    client->next_request = 1;
    client->is_slow = sim_one_in(sim, 40);
    sim_trace(sim, "client %u connects: namespace %u shard %u%s", number, client->ns, client->shard,
              client->is_hostile ? ", hostile" : "");
    if (kvf_agent_adopt(sim->agent, sim->namespaces[client->ns].tenant, fds[1], number + 1u) !=
        KVF_OK) {
        sim_client_detach(sim, client);
    }
}

static void forget_requests(struct sim *sim, struct sim_client *client)
{
    bool was_putting = false;

    for (uint32_t r = 0; r < SIM_REQUESTS; r++) {
        const struct sim_request *request = &client->requests[r];

        for (uint32_t i = 0; request->id != 0 && request->opcode == KVF_OP_PUT &&
                             !client->is_hostile && i < request->n_keys;
             i++) {
            if (!request->keys[i].is_seen) {
                was_putting = true;
                sim_model_zombie(sim,
                                 sim_block(sim, client->ns, request->chain, request->keys[i].chunk,
                                           client->shard),
                                 request->keys[i].version);
            }
        }
    }
    if (was_putting) {
        sim_cover(sim, SIM_COVER_client_died_putting);
    }
}

static void forget_promises(struct sim *sim, struct sim_client *client, struct sim_lease *lease)
{
    uint32_t n_shards = sim->namespaces[client->ns].shard_count;

    for (uint32_t i = 0; lease->is_lookup && i < lease->n_chunks * n_shards; i++) {
        struct sim_block *block = sim_block(sim, client->ns, lease->chain, i / n_shards,
                                            i % n_shards);

        if (block->promise_serial == lease->serials[i] && block->promises > 0) {
            block->promises--;
        }
    }
}

void sim_client_detach(struct sim *sim, struct sim_client *client)
{
    if (client->state == SIM_DETACHED) {
        return;
    }
    sim_trace(sim, "client %u leaves", client->number);
    forget_requests(sim, client);
    for (uint32_t i = 0; i < client->n_leases; i++) {
        forget_promises(sim, client, &client->leases[i]);
    }
    client->n_leases = 0;
    kvf_segment_unmap(client->ring_map, client->ring_bytes);
    kvf_segment_unmap(client->staging, client->staging_bytes);
    client->ring_map = NULL;
    client->staging = NULL;
    kvf_fd_close(&client->fd);
    client->state = SIM_DETACHED;
    client->respawn_ns = sim->now_ns + sim_below(sim, 40 * sim->shape.tick_ns);
}

bool sim_client_is_stalled(const struct sim *sim, const struct sim_client *client)
{
    return sim->now_ns < client->stalled_until_ns;
}

/* The daemon has hung up. It must have had a reason. */
static void hung_up(struct sim *sim, struct sim_client *client)
{
    uint64_t oldest_ns = sim->now_ns;

    sim_trace(sim, "client %u was disconnected", client->number);
    for (uint32_t i = 0; i < client->n_leases; i++) {
        if (client->leases[i].since_ns < oldest_ns) {
            oldest_ns = client->leases[i].since_ns;
        }
    }
    if (client->is_hostile || sim->is_draining || client->has_bye) {
        /* whatever it did */
    } else if (client->state != SIM_READY && sim->now_ns - client->said_ns >= HANDSHAKE_NS) {
        sim_cover(sim, SIM_COVER_hello_timeout);
    } else if (client->was_too_old ||
               sim->now_ns - oldest_ns >= sim->config.lease_max_age * KVF_NS_PER_S) {
        sim_cover(sim, SIM_COVER_lease_age);
    } else {
        sim_fail(sim, "client %u disconnected without a reason (oldest lease %llu ns)",
                 client->number, (unsigned long long)(sim->now_ns - oldest_ns));
    }
    sim_client_detach(sim, client);
}

/* ---- handshake ------------------------------------------------------------------------------- */

static void send_hello(struct sim *sim, struct sim_client *client)
{
    const struct sim_namespace *ns = &sim->namespaces[client->ns];
    struct kvf_wire_hello hello = {0};
    struct kvf_codec_plan plan;

    kvf_proto_head_init(&hello.head, KVF_WIRE_HELLO);
    hello.head.version = 1;
    hello.version_min = 1;
    hello.version_max = (uint16_t)(1 + sim_below(sim, sim->shape.n_hbm != 0 ? 8 : 2));
    hello.shard = client->shard;
    hello.shard_count = ns->shard_count;
    hello.ring_entries = 64u << sim_below(sim, 3);
    hello.staging_bytes = sim->shape.staging_bytes;
    hello.weights_digest[0] = 7;
    (void)kvf_codec_plan_init(&plan, NULL, "bytes");
    hello.profile_fp = plan.profile_fp;
    (void)snprintf(hello.profile, sizeof(hello.profile), "bytes");
    (void)snprintf(hello.label, sizeof(hello.label), "%s", ns->label);
    (void)snprintf(hello.client_name, sizeof(hello.client_name), "sim %u", client->number);
    if (kvf_seqpacket_send(client->fd, &hello, sizeof(hello), NULL, 0) == KVF_OK) {
        client->state = SIM_HELLO;
        client->said_ns = sim->now_ns;
    }
}

static void check_namespace(struct sim *sim, struct sim_client *client, uint64_t id)
{
    for (uint32_t i = 0; i < SIM_NAMESPACES; i++) {
        if (i != client->ns && sim->namespaces[i].id == id) {
            sim_fail(sim, "namespaces %u and %u have one id", i, client->ns);
        }
    }
    if (sim->namespaces[client->ns].id != 0 && sim->namespaces[client->ns].id != id) {
        sim_fail(sim, "namespace %u has changed its id", client->ns);
    }
    sim->namespaces[client->ns].id = id;
}

static void welcome(struct sim *sim, struct sim_client *client,
                    const struct kvf_wire_welcome *message, struct kvf_seqpacket_message *received)
{
    struct kvf_shm_header header;
    char text[KVF_ERROR_TEXT_BYTES];
    const char *why = "";
    void *staging;

    if (message->status < 0) {
        sim_trace(sim, "client %u refused: %s", client->number, message->text);
        if (message->status != KVF_ERR_BUSY && !client->is_hostile) {
            sim_fail(sim, "honest client refused: %d %s", message->status, message->text);
        }
        sim_cover(sim, SIM_COVER_attach_refused);
        sim->cover[SIM_COVER_staging_full] += strstr(message->text, "staging") != NULL;
        sim_client_detach(sim, client);
        return;
    }
    if (kvf_segment_map(received->fds[0], message->ring_bytes, true, &client->ring_map, text,
                        sizeof(text)) != KVF_OK ||
        kvf_segment_map(received->fds[1], message->staging_bytes, true, &staging, text,
                        sizeof(text)) != KVF_OK) {
        sim_fail(sim, "client memory cannot be mapped: %s", text);
    }
    client->ring_bytes = message->ring_bytes;
    client->staging = staging;
    client->staging_bytes = message->staging_bytes;
    client->connection_id = message->connection_id;
    client->version = message->version;
    client->wants_device = sim->shape.n_hbm != 0 && !client->is_scheduler && !client->is_hostile &&
                           message->version >= KVF_WIRE_VERSION_GPU && !sim_one_in(sim, 5);
    client->pieces_expected = message->n_pieces;
    memcpy(&header, client->ring_map, sizeof(header));
    if (kvf_shm_header_check(&header, message->ring_bytes, &why) != KVF_OK ||
        message->credits != header.cq_entries) {
        sim_fail(sim, "ring segment: %s", why);
    }
    kvf_ring_client_init(&client->ring, client->ring_map, &header);
    check_namespace(sim, client, message->namespace_id);
    client->state = SIM_WELCOMED;
    client->said_ns = sim->now_ns;
}

static void send_mapped(struct sim *sim, struct sim_client *client)
{
    struct kvf_wire_note note = {0};

    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    note.connection_id = client->connection_id;
    if (kvf_seqpacket_send(client->fd, &note, sizeof(note), NULL, 0) == KVF_OK) {
        client->state = SIM_MAPPED;
        client->said_ns = sim->now_ns;
    }
}

static void piece_dropped(struct sim *sim, struct sim_client *client, uint32_t id)
{
    for (uint32_t i = 0; i < client->n_leases; i++) {
        struct sim_lease *lease = &client->leases[i];

        if (!lease->is_lookup && lease->piece == id &&
            kvf_lease_word_live(&client->ring.leases[kvf_lease_id_index(lease->id)],
                                kvf_lease_id_generation(lease->id))) {
            sim_fail(sim, "piece %u taken back under a lease", id);
        }
    }
}

/* Sooner or later; some never do. */
static void say_device_mapped(struct sim *sim, struct sim_client *client, uint32_t id)
{
    struct kvf_wire_piece message = {.piece = id};

    kvf_proto_head_init(&message.head, KVF_WIRE_DEVICE_MAPPED);
    if (!sim_one_in(sim, 10)) {
        (void)kvf_seqpacket_send(client->fd, &message, sizeof(message), NULL, 0);
    }
}

static void say_device(struct sim *sim, struct sim_client *client)
{
    struct kvf_wire_device message = {.uuid = SIM_GPU_UUID};

    (void)sim;
    kvf_proto_head_init(&message.head, KVF_WIRE_DEVICE);
    client->has_device = kvf_seqpacket_send(client->fd, &message, sizeof(message), NULL, 0) ==
                         KVF_OK;
}

static void message_received(struct sim *sim, struct sim_client *client,
                             const union kvf_proto_message *message,
                             struct kvf_seqpacket_message *received)
{
    sim_hash(sim, message->head.type);
    switch (message->head.type) {
    case KVF_WIRE_WELCOME:
        welcome(sim, client, &message->welcome, received);
        break;
    case KVF_WIRE_PIECE:
        learn_piece(sim, client, &message->piece, received->fds[0]);
        client->pieces_seen++;
        break;
    case KVF_WIRE_PIECE_DROP:
        piece_dropped(sim, client, message->piece.piece);
        break;
    case KVF_WIRE_DEVICE_PIECE:
        if (!client->has_device) {
            sim_fail(sim, "client %u is given memory of a GPU", client->number);
        }
        learn_piece(sim, client, &message->piece, received->fds[0]);
        say_device_mapped(sim, client, message->piece.piece);
        break;
    case KVF_WIRE_DEVICE_PIECE_DROP:
        piece_dropped(sim, client, message->piece.piece | SIM_ON_GPU);
        break;
    case KVF_WIRE_READY:
        client->state = SIM_READY;
        sim->cover[SIM_COVER_client_hostile] += client->is_hostile;
        break;
    case KVF_WIRE_BYE:
        client->has_bye = true;
        break;
    default:
        sim_fail(sim, "message of type %u from the daemon", message->head.type);
    }
}

/* Take what has come on the socket. */
static void receive(struct sim *sim, struct sim_client *client)
{
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message received;
    union kvf_proto_message message;
    const char *why = "";

    while (client->state != SIM_DETACHED) {
        int status = kvf_seqpacket_recv(client->fd, data, sizeof(data), &received);

        if (status == KVF_EMPTY) {
            return;
        }
        if (status != KVF_OK) {
            hung_up(sim, client);
            return;
        }
        if (received.bytes == 1) {
            if (client->is_sleeping) {
                client->is_sleeping = false;
                kvf_ring_client_awake(&client->ring);
                sim_cover(sim, SIM_COVER_woken);
            }
            continue;
        }
        if (kvf_proto_decode(KVF_PROTO_DAEMON, data, received.bytes, received.n_fds, &message,
                             &why) != KVF_OK) {
            sim_fail(sim, "message from the daemon: %s", why);
        }
        message_received(sim, client, &message, &received);
        kvf_seqpacket_message_close(&received);
    }
}

static void die_attaching(struct sim *sim, struct sim_client *client)
{
    sim_cover(sim, SIM_COVER_client_died_attaching);
    sim_client_detach(sim, client);
}

void sim_client_poll(struct sim *sim, struct sim_client *client)
{
    if (client->state != SIM_READY && client->state != SIM_DETACHED && !client->is_slow &&
        sim_one_in(sim, 200)) {
        die_attaching(sim, client);
        return;
    }
    if (client->is_hostile && client->state != SIM_DETACHED) {
        sim_hostile_handshake(sim, client);
    }
    if (client->state == SIM_CONNECTED && !client->is_slow) {
        send_hello(sim, client);
    }
    if (client->state != SIM_DETACHED) {
        receive(sim, client);
    }
    if (client->state == SIM_WELCOMED && client->pieces_seen >= client->pieces_expected &&
        !client->is_slow) {
        send_mapped(sim, client);
    }
    if (client->state == SIM_READY && client->wants_device && !client->has_device &&
        sim_one_in(sim, 4)) {
        say_device(sim, client);
    }
    if (client->state == SIM_READY && client->is_sleeping && kvf_ring_client_ready(&client->ring)) {
        sim_fail(sim, "client %u sleeps beside completions", client->number);
    }
}

/* ---- completions and leases ------------------------------------------------------------------ */

void sim_client_sleep(struct sim *sim, struct sim_client *client)
{
    (void)sim;
    if (!client->is_sleeping && kvf_ring_client_sleep(&client->ring)) {
        client->is_sleeping = true;
    }
}

void sim_client_take(struct sim *sim, struct sim_client *client, uint32_t max)
{
    struct kvf_shm_cqe cqe;

    while (max-- > 0 && kvf_ring_client_take(&client->ring, &cqe) == KVF_OK) {
        if (!client->is_hostile && client->credits_taken == 0) {
            sim_fail(sim, "client %u: more completions than credits", client->number);
        }
        client->credits_taken -= client->credits_taken > 0;
    }
}

static bool word_is(const struct sim_client *client, const struct sim_lease *lease,
                    enum kvf_shm_lease_state state)
{
    return client->ring.leases[kvf_lease_id_index(lease->id)] ==
           kvf_lease_word_pack(kvf_lease_id_generation(lease->id), state);
}

static void check_loss(struct sim *sim, struct sim_client *client, struct sim_lease *lease)
{
    const struct sim_namespace *ns = &sim->namespaces[client->ns];

    if (!word_is(client, lease, KVF_LEASE_LOST)) {
        sim_fail(sim, "lease %llx of client %u: its word is neither live nor lost",
                 (unsigned long long)lease->id, client->number);
    }
    sim_cover(sim, SIM_COVER_lease_lost);
    client->was_too_old |= sim->now_ns - lease->since_ns >=
                           sim->config.lease_max_age * KVF_NS_PER_S;
    if (ns->purge_turn >= lease->since_turn) {
        sim_cover(sim, SIM_COVER_purged_in_use);
    } else if ((lease->is_lookup || (lease->piece & SIM_ON_GPU) != 0) &&
               sim->hbm_died_turn >= lease->since_turn) {
        sim_cover(sim, SIM_COVER_hbm_lease_lost);
    } else if (!client->was_too_old && !sim->is_draining && !client->has_bye) {
        /* it may be a lease beside the one that was too old: look whether we are connected */
        receive(sim, client);
        if (client->state != SIM_DETACHED) {
            sim_fail(sim, "lease %llx of client %u lost without a reason",
                     (unsigned long long)lease->id, client->number);
        }
    }
}

bool sim_lease_check(struct sim *sim, struct sim_client *client, struct sim_lease *lease)
{
    const struct sim_piece *piece;
    const struct kvf_record_page *page;
    uint32_t crc;
    bool is_same;

    if (lease->is_lookup) {
        return word_is(client, lease, KVF_LEASE_LIVE);
    }
    piece = sim_piece_find(sim, lease->piece);
    if (piece == NULL) {
        sim_fail(sim, "hit in piece %u, which nobody was given", lease->piece);
    }
    page = (const struct kvf_record_page *)(piece->map + lease->offset);
    crc = kvf_crc32c(0, page, KVF_BLOCK_HEADER_BYTES);
    is_same = (lease->page_crc == 0 || lease->page_crc == crc) &&
              sim_payload_is(sim, lease->block, lease->version, (const uint8_t *)(page + 1));
    if (!kvf_lease_word_live(&client->ring.leases[kvf_lease_id_index(lease->id)],
                             kvf_lease_id_generation(lease->id))) {
        return false;
    }
    lease->page_crc = crc;
    if (!is_same) {
        char text[200];

        sim_describe(sim, lease->block, text, sizeof(text));
        sim_fail(sim, "bytes changed under a live lease: %s version %u", text, lease->version);
    }
    return true;
}

void sim_lease_release(struct sim *sim, struct sim_client *client, struct sim_lease *lease)
{
    struct kvf_shm_sqe sqe = {.opcode = KVF_OP_RELEASE, .arg = lease->id};

    if (kvf_ring_client_room(&client->ring, 0) != KVF_OK) {
        sim_cover(sim, SIM_COVER_ring_full);
        return;
    }
    forget_promises(sim, client, lease);
    if (!sim_lease_check(sim, client, lease)) {
        check_loss(sim, client, lease);
        if (client->state == SIM_DETACHED) {
            return;
        }
    }
    sim_trace(sim, "client %u releases %llx", client->number, (unsigned long long)lease->id);
    *lease = client->leases[--client->n_leases];
    kvf_ring_client_push(&client->ring, &sqe);
    (void)kvf_ring_client_publish(&client->ring);
}

void sim_lease_release_due(struct sim *sim, struct sim_client *client, bool all)
{
    for (uint32_t i = client->n_leases; i-- > 0 && client->state == SIM_READY;) {
        struct sim_lease *lease = &client->leases[i];

        if ((int32_t)(client->ring.cq_head - lease->cq_index) <= 0) {
            continue; /* the client does not know of it yet */
        }
        if (all || lease->release_ns <= sim->now_ns) {
            sim_lease_release(sim, client, lease);
        }
    }
}
