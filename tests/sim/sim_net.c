/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_net.c: the network between simulated nodes. One thread, one list of packets under way.
 */
#include "tests/sim/sim_net.h"

#include <assert.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "transport/net_piece.h"

#define EVENTS_MAX  8192
#define UPCALLS_MAX 96 /* smaller than the real one: its end is to be seen */
#define SENDS_MAX   64 /* packets of one stream under way */
#define PACKETS_MAX 16384
#define PIECE_BYTES 16384u
#define PIECE_NS    (20 * KVF_NS_PER_US)

enum packet_kind {
    PACKET_CONNECT = 1,
    PACKET_ACCEPT,
    PACKET_STREAM,
    PACKET_FETCH,
    PACKET_ANSWER,
    PACKET_PIECE,
    PACKET_BEAT,
    PACKET_END,
};

/* One end of a connection. */
struct side {
    kvf_net_link id; /* 0: none */
    kvf_net_link far_id;
    uint32_t far_node;
    uint64_t far_epoch;
    bool is_initiator;
    uint64_t heard_ns, said_ns;
    uint64_t ordered_ns; /* when the last packet of its stream arrives */
    uint32_t sends;
};

struct packet {
    uint64_t at_ns, serial;
    uint32_t from, to; /* nodes */
    uint64_t to_epoch;
    kvf_net_link link;     /* the receiver's; CONNECT: 0 */
    kvf_net_link far_link; /* the sender's */
    uint64_t from_epoch, incarnation, request;
    uint8_t kind, type;
    uint16_t shard;
    int32_t status;
    uint32_t bytes, offset;
    uint8_t key_id[32];
    void *data;
};

struct kvf_net {
    struct kvf_net_config config;
    uint32_t node;
    uint64_t epoch;
    struct side sides[KVF_NET_LINKS_MAX];
    struct kvf_net_event *events; /* ring */
    uint32_t head, tail, upcalls;
    uint32_t n_targets;
    struct {
        uint32_t node;
        uint64_t retry_ns;
    } targets[KVF_NET_PEERS_MAX];
    struct kvf_net_fetch *fetches[KVF_NET_FETCHES_MAX];
    struct kvf_net_serve *serves[KVF_NET_SERVES_MAX];
    uint64_t serve_ns[KVF_NET_SERVES_MAX]; /* when the next piece goes */
    uint64_t next_request;
};

static struct {
    struct kvf_random_seeded random;
    uint64_t now_ns, serial, next_link, next_epoch;
    struct kvf_net *nets[SIM_NET_NODES];
    uint64_t cut_until_ns[SIM_NET_NODES][SIM_NET_NODES];
    bool is_silent[SIM_NET_NODES];
    struct packet packets[PACKETS_MAX]; /* a heap, the earliest first */
    uint32_t n_packets;
    struct sim_net_faults faults;
    struct sim_net_counts counts;
} fabric;

static uint64_t below(uint64_t end)
{
    return kvf_random_seeded_next(&fabric.random) % end;
}

static bool one_in(uint32_t n)
{
    return n != 0 && below(n) == 0;
}

/* ---- packets --------------------------------------------------------------------------------- */

static bool is_before(const struct packet *a, const struct packet *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->serial < b->serial);
}

static void push(const struct packet *packet)
{
    uint32_t at = fabric.n_packets++;

    while (at > 0 && is_before(packet, &fabric.packets[(at - 1) / 2])) {
        fabric.packets[at] = fabric.packets[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    fabric.packets[at] = *packet;
}

static struct packet pop(void)
{
    struct packet first = fabric.packets[0];
    struct packet last = fabric.packets[--fabric.n_packets];
    uint32_t at = 0;

    for (uint32_t child; (child = 2 * at + 1) < fabric.n_packets; at = child) {
        if (child + 1 < fabric.n_packets &&
            is_before(&fabric.packets[child + 1], &fabric.packets[child])) {
            child++;
        }
        if (!is_before(&fabric.packets[child], &last)) {
            break;
        }
        fabric.packets[at] = fabric.packets[child];
    }
    fabric.packets[at] = last;
    return first;
}

/* On its way, or lost. Takes the data over. */
static void post(struct kvf_net *net, struct side *side, struct packet packet)
{
    packet.from = net->node;
    packet.from_epoch = net->epoch;
    packet.serial = fabric.serial++;
    packet.at_ns = fabric.now_ns + 20 * KVF_NS_PER_US + below(200 * KVF_NS_PER_US);
    if (side != NULL) {
        packet.to = side->far_node;
        packet.to_epoch = side->far_epoch;
        packet.link = side->far_id;
        packet.far_link = side->id;
        side->said_ns = fabric.now_ns;
    }
    if (one_in(fabric.faults.late_in)) {
        packet.at_ns += below(400 * KVF_NS_PER_MS);
        fabric.counts.late++;
    }
    if (packet.kind == PACKET_STREAM) {
        if (one_in(fabric.faults.swap_in)) {
            fabric.counts.swapped++; /* it may overtake */
        } else if (packet.at_ns < side->ordered_ns) {
            packet.at_ns = side->ordered_ns;
        }
        side->ordered_ns = packet.at_ns > side->ordered_ns ? packet.at_ns : side->ordered_ns;
    }
    if (packet.kind != PACKET_CONNECT && packet.kind != PACKET_ACCEPT &&
        one_in(fabric.faults.lose_in)) {
        fabric.counts.lost++;
        free(packet.data);
        return;
    }
    if (fabric.n_packets == PACKETS_MAX) {
        fabric.counts.lost++;
        free(packet.data);
        return;
    }
    push(&packet);
}

/* ---- events ---------------------------------------------------------------------------------- */

static void emit(struct kvf_net *net, const struct kvf_net_event *event)
{
    assert(net->tail - net->head < EVENTS_MAX);
    net->events[net->tail++ % EVENTS_MAX] = *event;
}

/* False: nobody takes them, and this one is lost. */
static bool emit_upcall(struct kvf_net *net, const struct kvf_net_event *event)
{
    if (net->upcalls == UPCALLS_MAX) {
        fabric.counts.full++;
        return false;
    }
    net->upcalls++;
    emit(net, event);
    return true;
}

static void fetch_done(struct kvf_net *net, uint32_t i, int status)
{
    struct kvf_net_fetch *fetch = net->fetches[i];

    net->fetches[i] = NULL;
    fetch->status = status;
    emit(net, &(struct kvf_net_event){.kind = KVF_NET_EVENT_FETCH_DONE, .fetch = fetch});
}

static void serve_done(struct kvf_net *net, uint32_t i)
{
    struct kvf_net_serve *serve = net->serves[i];

    net->serves[i] = NULL;
    emit(net, &(struct kvf_net_event){.kind = KVF_NET_EVENT_SERVE_DONE, .serve = serve});
}

/* ---- links ----------------------------------------------------------------------------------- */

static struct side *side_of(struct kvf_net *net, kvf_net_link id)
{
    for (uint32_t i = 0; id != 0 && i < KVF_NET_LINKS_MAX; i++) {
        if (net->sides[i].id == id) {
            return &net->sides[i];
        }
    }
    return NULL;
}

static void go_down(struct kvf_net *net, struct side *side)
{
    kvf_net_link id = side->id;

    for (uint32_t i = 0; i < KVF_NET_FETCHES_MAX; i++) {
        if (net->fetches[i] != NULL && net->fetches[i]->link == id) {
            fetch_done(net, i, KVF_ERR_DISCONNECTED);
        }
    }
    for (uint32_t i = 0; i < KVF_NET_SERVES_MAX; i++) {
        if (net->serves[i] != NULL && net->serves[i]->link == id) {
            serve_done(net, i);
        }
    }
    fabric.counts.downs++;
    side->id = 0;
    emit(net, &(struct kvf_net_event){.kind = KVF_NET_EVENT_LINK_DOWN, .link = id});
}

static struct side *come_up(struct kvf_net *net, const struct packet *packet, bool is_initiator,
                            kvf_net_link id)
{
    struct kvf_net_event event = {.kind = KVF_NET_EVENT_LINK_UP,
                                  .is_initiator = is_initiator,
                                  .link = id,
                                  .incarnation = packet->incarnation};

    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct side *side = &net->sides[i];

        if (side->id == 0) {
            *side = (struct side){.id = id,
                                  .far_id = packet->far_link,
                                  .far_node = packet->from,
                                  .far_epoch = packet->from_epoch,
                                  .is_initiator = is_initiator,
                                  .heard_ns = fabric.now_ns,
                                  .said_ns = fabric.now_ns};
            (void)snprintf(event.name, sizeof(event.name), "node%u", packet->from);
            emit(net, &event);
            return side;
        }
    }
    return NULL;
}

static void on_connect(struct kvf_net *net, const struct packet *packet)
{
    struct side *side;

    if (packet->from == net->node) {
        return; /* its own address */
    }
    side = come_up(net, packet, false, ++fabric.next_link);
    if (side != NULL) {
        post(net, side,
             (struct packet){.kind = PACKET_ACCEPT, .incarnation = net->config.incarnation});
    }
}

static void on_accept(struct kvf_net *net, const struct packet *packet)
{
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        if (net->sides[i].id != 0 && net->sides[i].is_initiator &&
            net->sides[i].far_node == packet->from) {
            return; /* an earlier one; the other side hears nothing on this one, and drops it */
        }
    }
    (void)come_up(net, packet, true, packet->link);
}

/* ---- what comes ------------------------------------------------------------------------------ */

static void on_piece(struct kvf_net *net, const struct packet *packet)
{
    for (uint32_t i = 0; i < KVF_NET_FETCHES_MAX; i++) {
        struct kvf_net_fetch *fetch = net->fetches[i];

        if (fetch == NULL || fetch->request != packet->request) {
            continue;
        }
        if (packet->kind == PACKET_ANSWER) {
            fetch_done(net, i, packet->status);
        } else if (kvf_net_piece_take(fetch, packet->offset, packet->data, packet->bytes) ==
                   KVF_OK) {
            fabric.counts.pieces++;
            if (fetch->come_bytes == fetch->record_bytes) {
                fetch_done(net, i, KVF_OK);
            }
        }
        return;
    }
}

static void arrive(struct packet *packet)
{
    struct kvf_net *net = fabric.nets[packet->to];
    struct kvf_net_event event = {.link = packet->link};
    struct side *side;

    if (packet->from != packet->to &&
        fabric.cut_until_ns[packet->from][packet->to] > fabric.now_ns) {
        fabric.counts.cut++;
        return;
    }
    if (net == NULL || (packet->to_epoch != 0 && packet->to_epoch != net->epoch)) {
        return; /* it has died */
    }
    if (packet->kind == PACKET_CONNECT) {
        on_connect(net, packet);
        return;
    }
    if (packet->kind == PACKET_ACCEPT) {
        on_accept(net, packet);
        return;
    }
    side = side_of(net, packet->link);
    if (side == NULL) {
        return;
    }
    side->heard_ns = fabric.now_ns;
    switch ((enum packet_kind)packet->kind) {
    case PACKET_STREAM:
        event.kind = KVF_NET_EVENT_MESSAGE;
        event.type = packet->type;
        event.body_bytes = packet->bytes;
        event.body = packet->data;
        if (emit_upcall(net, &event)) {
            packet->data = NULL;
        }
        break;
    case PACKET_FETCH:
        event.kind = KVF_NET_EVENT_SERVE;
        event.request = packet->request;
        event.shard = packet->shard;
        event.record_bytes = packet->bytes;
        memcpy(event.key_id, packet->key_id, sizeof(event.key_id));
        (void)emit_upcall(net, &event);
        break;
    case PACKET_ANSWER:
    case PACKET_PIECE:
        on_piece(net, packet);
        break;
    case PACKET_END:
        go_down(net, side);
        break;
    default:
        break;
    }
}

/* ---- time ------------------------------------------------------------------------------------ */

static void connect_all(struct kvf_net *net)
{
    for (uint32_t i = 0; i < net->n_targets; i++) {
        bool is_linked = false;

        for (uint32_t k = 0; k < KVF_NET_LINKS_MAX; k++) {
            is_linked |= net->sides[k].id != 0 && net->sides[k].is_initiator &&
                         net->sides[k].far_node == net->targets[i].node;
        }
        if (is_linked || net->targets[i].retry_ns > fabric.now_ns) {
            continue;
        }
        net->targets[i].retry_ns = fabric.now_ns + net->config.retry_ns;
        post(net, NULL,
             (struct packet){.kind = PACKET_CONNECT,
                             .to = net->targets[i].node,
                             .far_link = ++fabric.next_link,
                             .incarnation = net->config.incarnation});
    }
}

/* The next piece of a record, as it lies there now. */
static void send_piece(struct kvf_net *net, uint32_t i)
{
    struct kvf_net_serve *serve = net->serves[i];
    struct side *side = side_of(net, serve->link);
    uint32_t left = serve->record_bytes - serve->sent_bytes;
    uint32_t bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
    uint8_t *copy;

    if (left == 0 || side == NULL) {
        serve_done(net, i);
        return;
    }
    copy = malloc(bytes);
    if (copy == NULL) {
        abort();
    }
    memcpy(copy, (const uint8_t *)serve->record + serve->sent_bytes, bytes);
    if (one_in(fabric.faults.flip_in)) {
        copy[below(bytes)] ^= (uint8_t)(1u << below(8));
        fabric.counts.flipped++;
    }
    post(net, side,
         (struct packet){.kind = PACKET_PIECE,
                         .request = serve->request,
                         .offset = serve->sent_bytes,
                         .bytes = bytes,
                         .data = copy});
    serve->sent_bytes += bytes;
    net->serve_ns[i] = fabric.now_ns + PIECE_NS + below(40 * KVF_NS_PER_US);
}

static void tick(struct kvf_net *net)
{
    connect_all(net);
    for (uint32_t i = 0; i < KVF_NET_SERVES_MAX; i++) {
        while (net->serves[i] != NULL && net->serve_ns[i] <= fabric.now_ns) {
            send_piece(net, i);
        }
    }
    for (uint32_t i = 0; i < KVF_NET_FETCHES_MAX; i++) {
        if (net->fetches[i] != NULL && net->fetches[i]->deadline_ns <= fabric.now_ns) {
            fabric.counts.timeouts++;
            fetch_done(net, i, KVF_ERR_TIMEOUT);
        }
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct side *side = &net->sides[i];

        if (side->id != 0 && fabric.now_ns - side->heard_ns >= net->config.silence_ns) {
            go_down(net, side);
        } else if (side->id != 0 && fabric.now_ns - side->said_ns >= net->config.heartbeat_ns) {
            post(net, side, (struct packet){.kind = PACKET_BEAT});
        }
    }
}

static uint64_t net_next_ns(const struct kvf_net *net)
{
    uint64_t next_ns = UINT64_MAX;

#define AT(at_ns)                                                                                  \
    do {                                                                                           \
        next_ns = (at_ns) < next_ns ? (at_ns) : next_ns;                                           \
    } while (0)
    for (uint32_t i = 0; i < net->n_targets; i++) {
        if (net->targets[i].retry_ns > fabric.now_ns) {
            AT(net->targets[i].retry_ns);
        }
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        if (net->sides[i].id != 0) {
            AT(net->sides[i].heard_ns + net->config.silence_ns);
            AT(net->sides[i].said_ns + net->config.heartbeat_ns);
        }
    }
    for (uint32_t i = 0; i < KVF_NET_SERVES_MAX; i++) {
        if (net->serves[i] != NULL) {
            AT(net->serve_ns[i]);
        }
    }
    for (uint32_t i = 0; i < KVF_NET_FETCHES_MAX; i++) {
        if (net->fetches[i] != NULL) {
            AT(net->fetches[i]->deadline_ns);
        }
    }
    if (net->head != net->tail) {
        AT(fabric.now_ns);
    }
#undef AT
    return next_ns;
}

uint64_t sim_net_next_ns(void)
{
    uint64_t next_ns = fabric.n_packets > 0 ? fabric.packets[0].at_ns : UINT64_MAX;

    for (uint32_t i = 0; i < SIM_NET_NODES; i++) {
        uint64_t net_ns = fabric.nets[i] != NULL ? net_next_ns(fabric.nets[i]) : UINT64_MAX;

        next_ns = net_ns < next_ns ? net_ns : next_ns;
    }
    return next_ns;
}

void sim_net_advance(uint64_t now_ns)
{
    fabric.now_ns = now_ns > fabric.now_ns ? now_ns : fabric.now_ns;
    while (fabric.n_packets > 0 && fabric.packets[0].at_ns <= fabric.now_ns) {
        struct packet packet = pop();

        arrive(&packet);
        free(packet.data);
    }
    for (uint32_t i = 0; i < SIM_NET_NODES; i++) {
        if (fabric.nets[i] != NULL) {
            tick(fabric.nets[i]);
        }
    }
}

/* ---- the harness ----------------------------------------------------------------------------- */

void sim_net_begin(uint64_t seed)
{
    memset(&fabric, 0, sizeof(fabric));
    kvf_random_seeded_init(&fabric.random, seed);
}

void sim_net_end(void)
{
    while (fabric.n_packets > 0) {
        free(pop().data);
    }
}

void sim_net_faults_set(const struct sim_net_faults *faults)
{
    fabric.faults = *faults;
}

void sim_net_cut(uint32_t a, uint32_t b, bool both, uint64_t until_ns)
{
    fabric.cut_until_ns[a][b] = until_ns;
    if (both) {
        fabric.cut_until_ns[b][a] = until_ns;
    }
}

const struct sim_net_counts *sim_net_counts(void)
{
    return &fabric.counts;
}

void sim_net_die_silently(uint32_t node)
{
    fabric.is_silent[node] = true;
}

/* ---- transport_ucx.h ------------------------------------------------------------------------- */

static uint32_t node_of(const struct kvf_net_address *address)
{
    const struct sockaddr_in *v4 = (const void *)&address->address;
    uint32_t node = (uint32_t)ntohs(v4->sin_port) - SIM_NET_PORT;

    assert(address->address.ss_family == AF_INET && node < SIM_NET_NODES);
    return node;
}

int kvf_net_open(const struct kvf_net_config *config, struct kvf_net **net_out, char *why,
                 size_t why_bytes)
{
    struct kvf_net *net = calloc(1, sizeof(*net));

    (void)why;
    (void)why_bytes;
    if (net == NULL || (net->events = calloc(EVENTS_MAX, sizeof(*net->events))) == NULL) {
        abort();
    }
    net->config = *config;
    net->node = node_of(&config->listen);
    net->epoch = ++fabric.next_epoch;
    net->next_request = net->epoch << 32;
    assert(fabric.nets[net->node] == NULL);
    fabric.nets[net->node] = net;
    *net_out = net;
    return KVF_OK;
}

void kvf_net_close(struct kvf_net *net)
{
    if (net == NULL) {
        return;
    }
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        if (net->sides[i].id != 0 && !fabric.is_silent[net->node]) {
            post(net, &net->sides[i], (struct packet){.kind = PACKET_END});
        }
    }
    for (; net->head != net->tail; net->head++) {
        free(net->events[net->head % EVENTS_MAX].body);
    }
    fabric.is_silent[net->node] = false;
    fabric.nets[net->node] = NULL;
    free(net->events);
    free(net);
}

uint16_t kvf_net_port(const struct kvf_net *net)
{
    return (uint16_t)(SIM_NET_PORT + net->node);
}

const char *kvf_net_about(const struct kvf_net *net)
{
    (void)net;
    return "simulated";
}

void kvf_net_stat(const struct kvf_net *net, struct kvf_net_stat *stat_out)
{
    (void)net;
    memset(stat_out, 0, sizeof(*stat_out));
}

int kvf_net_connect(struct kvf_net *net, const struct kvf_net_address *addresses, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        net->targets[i].node = node_of(&addresses[i]);
        net->targets[i].retry_ns = fabric.now_ns;
    }
    net->n_targets = n;
    return KVF_OK;
}

int kvf_net_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch)
{
    struct side *side = side_of(net, fetch->link);
    struct packet packet = {
        .kind = PACKET_FETCH, .shard = fetch->shard, .bytes = fetch->record_bytes};
    uint32_t i = 0;

    while (i < KVF_NET_FETCHES_MAX && net->fetches[i] != NULL) {
        i++;
    }
    if (i == KVF_NET_FETCHES_MAX) {
        return KVF_ERR_BUSY;
    }
    net->fetches[i] = fetch;
    fetch->request = ++net->next_request;
    kvf_net_piece_begin(fetch);
    if (side == NULL) {
        fetch_done(net, i, KVF_ERR_DISCONNECTED);
        return KVF_OK;
    }
    packet.request = fetch->request;
    memcpy(packet.key_id, fetch->key_id, sizeof(packet.key_id));
    post(net, side, packet);
    return KVF_OK;
}

/* Now and then an answer is to a question that is not its own, if such a one waits. */
static void mix_up(const struct kvf_net *net, struct kvf_net_serve *serve, const struct side *side)
{
    const struct kvf_net *far = fabric.nets[side->far_node];

    for (uint32_t i = 0; far != NULL && net != far && i < KVF_NET_FETCHES_MAX; i++) {
        const struct kvf_net_fetch *fetch = far->fetches[i];

        if (fetch != NULL && fetch->request != serve->request &&
            fetch->record_bytes == serve->record_bytes) {
            serve->request = fetch->request;
            fabric.counts.mixed_up++;
            return;
        }
    }
}

int kvf_net_serve(struct kvf_net *net, struct kvf_net_serve *serve)
{
    struct side *side = side_of(net, serve->link);
    uint32_t i = 0;

    while (i < KVF_NET_SERVES_MAX && net->serves[i] != NULL) {
        i++;
    }
    if (i == KVF_NET_SERVES_MAX) {
        return KVF_ERR_BUSY;
    }
    net->serves[i] = serve;
    net->serve_ns[i] = fabric.now_ns;
    serve->sent_bytes = 0;
    if (side != NULL && serve->status == KVF_OK && one_in(fabric.faults.mix_up_in)) {
        mix_up(net, serve, side);
    }
    if (side != NULL && serve->status != KVF_OK) {
        post(net, side,
             (struct packet){
                 .kind = PACKET_ANSWER, .request = serve->request, .status = serve->status});
    }
    if (side == NULL || serve->status != KVF_OK) {
        serve_done(net, i);
    }
    return KVF_OK;
}

int kvf_net_send(struct kvf_net *net, kvf_net_link link, enum kvf_net_type type, const void *body,
                 uint32_t body_bytes)
{
    struct side *side = side_of(net, link);
    void *copy;

    if (side == NULL) {
        return KVF_OK; /* lost */
    }
    if (fabric.n_packets > PACKETS_MAX / 2 || one_in(SENDS_MAX)) {
        return KVF_ERR_BUSY;
    }
    copy = malloc(body_bytes + 1);
    if (copy == NULL) {
        abort();
    }
    if (body_bytes > 0) {
        memcpy(copy, body, body_bytes);
    }
    post(net, side,
         (struct packet){
             .kind = PACKET_STREAM, .type = (uint8_t)type, .bytes = body_bytes, .data = copy});
    return KVF_OK;
}

int kvf_net_hang_up(struct kvf_net *net, kvf_net_link link)
{
    struct side *side = side_of(net, link);

    if (side != NULL) {
        post(net, side, (struct packet){.kind = PACKET_END});
        go_down(net, side);
    }
    return KVF_OK;
}

bool kvf_net_poll(struct kvf_net *net, struct kvf_net_event *event_out)
{
    if (net->head == net->tail) {
        return false;
    }
    *event_out = net->events[net->head++ % EVENTS_MAX];
    net->upcalls -= event_out->kind == KVF_NET_EVENT_SERVE ||
                    event_out->kind == KVF_NET_EVENT_MESSAGE;
    return true;
}
