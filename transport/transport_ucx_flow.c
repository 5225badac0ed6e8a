/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_flow.c: what goes over links that are up: records in pieces, their credit, and the
 * stream of blocks.
 *
 * Pieces may come in any order: each has its place, none comes twice (net_proto.c sees to that),
 * and a record is there when as many bytes have come as it has. Whether they are the right ones is
 * for its checksums to say.
 */
#include "transport/transport_ucx_internal.h"

#include <stdlib.h>
#include <string.h>

#include "transport/net_piece.h"

/* Messages of a client that wait for an earlier one. */
#define HELD_MAX       1024u
#define HELD_BYTES_MAX (2u * KVF_NET_WINDOW_BYTES)
#define EXPIRE_NS      KVF_NS_PER_MS /* deadlines are not looked at more often */

/* ----------------------------------------------------------------------------------------------
 * Fetching
 */
static struct kvf_net_fetch *fetch_find(struct kvf_net *net, uint64_t request, kvf_net_link link)
{
    struct kvf_net_fetch *fetch = net->fetches[request % KVF_NET_FETCHES_MAX];

    return fetch != NULL && fetch->request == request && fetch->lane == link ? fetch : NULL;
}

static void fetch_over(struct kvf_net *net, struct kvf_net_fetch *fetch, int status)
{
    struct kvf_net_event event = {
        .kind = KVF_NET_EVENT_FETCH_DONE, .link = fetch->link, .fetch = fetch};

    if (fetch->request != 0) {
        net->fetches[fetch->request % KVF_NET_FETCHES_MAX] = NULL;
        net->n_fetches--;
    }
    fetch->status = status;
    kvf_net_emit(net, &event);
}

void kvf_flow_fetch(struct kvf_net *net, struct kvf_net_fetch *fetch)
{
    struct kvf_link *link = kvf_link_find(net, fetch->link);
    struct kvf_net_fetch_body body = {.record_bytes = fetch->record_bytes, .shard = fetch->shard};

    fetch->request = 0;
    kvf_net_piece_begin(fetch);
    if (link == NULL || !link->is_initiator) {
        fetch_over(net, fetch, KVF_ERR_DISCONNECTED);
        return;
    }
    /* the owner gives no more than there are places, so one is free */
    do {
        fetch->request = ++net->requests_serial;
    } while (net->fetches[fetch->request % KVF_NET_FETCHES_MAX] != NULL);
    net->fetches[fetch->request % KVF_NET_FETCHES_MAX] = fetch;
    net->n_fetches++;
    link = kvf_lane_choose(link, fetch->request);
    fetch->lane = kvf_link_id(link);
    memcpy(body.key_id, fetch->key_id, sizeof(body.key_id));
    (void)kvf_link_send(link, KVF_NET_FETCH, fetch->request, 0, &body, sizeof(body));
}

bool kvf_flow_owe(struct kvf_link *link, uint32_t bytes)
{
    link->owed_bytes += bytes;
    if (link->owed_bytes > KVF_NET_WINDOW_BYTES) {
        kvf_link_offend(link, "pieces without credit");
        return false;
    }
    if (link->owed_bytes >= KVF_NET_WINDOW_BYTES / 4) {
        uint32_t owed = link->owed_bytes;

        link->owed_bytes = 0;
        (void)kvf_link_send(link, KVF_NET_CREDIT, 0, owed, NULL, 0);
    }
    return true;
}

static void on_piece(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_net *net = link->net;
    struct kvf_net_fetch *fetch = fetch_find(net, head->request, kvf_link_id(link));

    if (!kvf_flow_owe(link, head->body_bytes) || fetch == NULL) {
        return; /* nobody waits for it any more */
    }
    if (kvf_net_piece_take(fetch, head->offset, body, head->body_bytes) != KVF_OK) {
        kvf_link_offend(link, "a piece outside of its record");
        return;
    }
    atomic_fetch_add(&net->received_bytes, head->body_bytes);
    if (fetch->come_bytes == fetch->record_bytes) {
        fetch_over(net, fetch, KVF_OK);
    }
}

static void on_answer(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_net_fetch *fetch = fetch_find(link->net, head->request, kvf_link_id(link));
    struct kvf_net_status_body answer;

    memcpy(&answer, body, sizeof(answer));
    if (fetch != NULL) {
        fetch_over(link->net, fetch, answer.status == KVF_MISS ? KVF_MISS : KVF_ERR_BUSY);
    }
}

static unsigned expire_fetches(struct kvf_net *net)
{
    unsigned n = 0;

    if (net->now_ns < net->expire_ns) {
        return 0;
    }
    net->expire_ns = net->now_ns + EXPIRE_NS;
    for (uint32_t i = 0; net->n_fetches > 0 && i < KVF_NET_FETCHES_MAX; i++) {
        struct kvf_net_fetch *fetch = net->fetches[i];
        struct kvf_link *link;

        if (fetch == NULL || fetch->deadline_ns > net->now_ns) {
            continue;
        }
        link = kvf_link_find(net, fetch->lane);
        if (link != NULL) {
            (void)kvf_link_send(link, KVF_NET_CANCEL, fetch->request, 0, NULL, 0);
        }
        fetch_over(net, fetch, KVF_ERR_TIMEOUT);
        n++;
    }
    return n;
}

/* ----------------------------------------------------------------------------------------------
 * Serving
 */
static void serve_over(struct kvf_net *net, struct kvf_net_serve *serve)
{
    struct kvf_net_event event = {
        .kind = KVF_NET_EVENT_SERVE_DONE, .link = serve->link, .serve = serve};

    if (serve->is_relayed) {
        kvf_relay_served(serve);
        return;
    }
    kvf_net_emit(net, &event);
}

static void answer(struct kvf_link *link, uint64_t request, int status)
{
    struct kvf_net_status_body body = {.status = status};

    (void)kvf_link_send(link, KVF_NET_ANSWER, request, 0, &body, sizeof(body));
}

static void on_fetch(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_net_event event = {
        .kind = KVF_NET_EVENT_SERVE, .lane = kvf_link_id(link), .request = head->request};
    struct kvf_net_fetch_body fetch;

    memcpy(&fetch, body, sizeof(fetch));
    event.link = link->of != 0 ? link->of : event.lane;
    memcpy(event.key_id, fetch.key_id, sizeof(event.key_id));
    event.shard = fetch.shard;
    event.record_bytes = fetch.record_bytes;
    if (!kvf_net_emit_upcall(link->net, &event)) {
        answer(link, head->request, KVF_ERR_BUSY);
    }
}

void kvf_flow_serve_begin(struct kvf_link *link, struct kvf_net_serve *serve)
{
    serve->sent_bytes = 0;
    serve->sends = 0;
    serve->is_over = false;
    serve->next = NULL;
    if (link->serves == NULL) {
        link->moved_ns = link->net->now_ns;
        link->serves = serve;
    } else {
        link->serves_tail->next = serve;
    }
    link->serves_tail = serve;
}

void kvf_flow_serve(struct kvf_net *net, struct kvf_net_serve *serve)
{
    struct kvf_link *link = kvf_link_find(net, serve->lane);

    serve->is_relayed = false;
    if (link == NULL || serve->status != KVF_OK) {
        if (link != NULL) {
            answer(link, serve->request, serve->status);
        }
        serve_over(net, serve);
        return;
    }
    kvf_flow_serve_begin(link, serve);
}

/* Take it off the link's list; its memory is free when the last send is over. */
static void serve_leave(struct kvf_link *link, struct kvf_net_serve *serve)
{
    struct kvf_net_serve *before = NULL;

    for (struct kvf_net_serve *s = link->serves; s != serve; s = s->next) {
        before = s;
    }
    if (before != NULL) {
        before->next = serve->next;
    } else {
        link->serves = serve->next;
    }
    link->serves_tail = link->serves_tail == serve ? before : link->serves_tail;
    serve->is_over = true;
    if (serve->sends == 0) {
        serve_over(link->net, serve);
    }
}

static void on_cancel(struct kvf_link *link, const struct kvf_net_head *head)
{
    struct kvf_net_serve *serve = link->serves;

    while (serve != NULL && serve->request != head->request) {
        serve = serve->next;
    }
    if (serve != NULL) {
        serve_leave(link, serve);
    }
}

static void on_credit(struct kvf_link *link, const struct kvf_net_head *head)
{
    if (head->offset > KVF_NET_WINDOW_BYTES - link->credit_bytes) {
        kvf_link_offend(link, "credit for more than was sent");
        return;
    }
    link->credit_bytes += head->offset;
}

static unsigned send_pieces(struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    unsigned n = 0;

    while (link->serves != NULL && link->piece_sends < KVF_NET_LINK_SENDS_MAX && !link->is_broken) {
        struct kvf_net_serve *serve = link->serves;
        uint32_t offset = serve->sent_bytes;
        uint32_t bytes = serve->record_bytes - offset;
        struct kvf_link_send *send;

        bytes = bytes < KVF_NET_PIECE_BYTES ? bytes : KVF_NET_PIECE_BYTES;
        if (bytes > link->credit_bytes) {
            break;
        }
        send = kvf_link_send_new(link);
        if (send == NULL) {
            break;
        }
        send->serve = serve;
        serve->sends++;
        serve->sent_bytes += bytes;
        link->credit_bytes -= bytes;
        link->moved_ns = net->now_ns;
        atomic_fetch_add(&net->sent_bytes, bytes);
        (void)kvf_link_send_body(link, send, KVF_NET_PIECE, serve->request, offset,
                                 (const uint8_t *)serve->record + offset, bytes);
        n++;
        if (serve->sent_bytes == serve->record_bytes) {
            serve_leave(link, serve);
        }
    }
    return n;
}

void kvf_flow_sent(struct kvf_link_send *send)
{
    struct kvf_net *net = send->link->net;

    if (send->is_stream) {
        atomic_fetch_sub(&net->stream_sends[send->link - net->links], 1);
    }
    if (send->serve != NULL) {
        send->serve->sends--;
        if (send->serve->is_over && send->serve->sends == 0) {
            serve_over(net, send->serve);
        }
    }
}

/* ----------------------------------------------------------------------------------------------
 * The stream
 */
void kvf_flow_stream(struct kvf_net *net, const struct kvf_net_command *command)
{
    struct kvf_link *link = kvf_link_find(net, command->link);
    struct kvf_link_send *send = link != NULL ? kvf_link_send_new(link) : NULL;

    if (send == NULL) { /* a gap, which the other side will see */
        atomic_fetch_sub(&net->stream_sends[(command->link & 0xff) % KVF_NET_LINKS_MAX], 1);
        free(command->data);
        return;
    }
    send->owned = command->data;
    send->is_stream = true;
    (void)kvf_link_send_body(link, send, command->type, 0, 0, command->data, command->n);
}

static void on_stream(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_net_event event = {.kind = KVF_NET_EVENT_MESSAGE,
                                  .link = kvf_link_id(link),
                                  .type = head->type,
                                  .body_bytes = head->body_bytes};

    event.body = malloc(head->body_bytes + 1);
    if (event.body == NULL) {
        return; /* a gap: there will be a new snapshot */
    }
    if (head->body_bytes > 0) {
        memcpy(event.body, body, head->body_bytes);
    }
    if (!kvf_net_emit_upcall(link->net, &event)) {
        free(event.body);
    }
}

/* ----------------------------------------------------------------------------------------------
 * All of it
 */

/* Of a client, at either end, in its turn. */
static void client_message(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    const struct kvf_net_config *config = &link->net->config;

    switch (head->type) {
    case KVF_NET_CONTROL:
    case KVF_NET_SUBMIT:
    case KVF_NET_STAGE:
    case KVF_NET_COMPLETE:
    case KVF_NET_LANDED:
        break;
    case KVF_NET_PIECE:
        if (!kvf_flow_owe(link, head->body_bytes)) {
            return;
        }
        atomic_fetch_add(&link->net->received_bytes, head->body_bytes);
        break;
    case KVF_NET_CREDIT:
        on_credit(link, head);
        return;
    case KVF_NET_BYE:
        kvf_link_break(link, KVF_ERR_DISCONNECTED, "it says goodbye");
        return;
    case KVF_NET_HEARTBEAT:
    case KVF_NET_CONFIRM:
        return;
    default:
        kvf_link_offend(link, "a message between nodes on a client's link");
        return;
    }
    if (link->is_initiator) {
        config->tunnel->message(config->tunnel_ctx, head, body);
    } else {
        kvf_relay_message(link, head, body);
    }
}

/* UCX delivers every message once, but one may overtake others that were sent in pieces. */
static void hold(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_link_held **at = &link->held;
    struct kvf_link_held *held;

    if (link->held_bytes + head->body_bytes > HELD_BYTES_MAX || link->n_held == HELD_MAX) {
        kvf_link_offend(link, "too many messages before an earlier one");
        return;
    }
    held = malloc(sizeof(*held) + head->body_bytes);
    if (held == NULL) {
        kvf_link_break(link, KVF_ERR_NO_MEMORY, "no memory for messages that came early");
        return;
    }
    held->head = *head;
    if (head->body_bytes > 0) {
        memcpy(held->body, body, head->body_bytes);
    }
    while (*at != NULL && (*at)->head.sequence < head->sequence) {
        at = &(*at)->next;
    }
    held->next = *at;
    *at = held;
    link->n_held++;
    link->held_bytes += head->body_bytes;
}

static void unhold(struct kvf_link *link)
{
    struct kvf_link_held *held = link->held;

    link->held = held->next;
    link->n_held--;
    link->held_bytes -= held->head.body_bytes;
    free(held);
}

static void client_order(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    if (head->sequence != link->sequence_come + 1) {
        hold(link, head, body);
        return;
    }
    link->sequence_come++;
    client_message(link, head, body);
    while (link->held != NULL && link->held->head.sequence == link->sequence_come + 1 &&
           !link->is_broken) {
        link->sequence_come++;
        client_message(link, &link->held->head, link->held->body);
        unhold(link);
    }
}

void kvf_flow_message(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    if (link->is_client) {
        client_order(link, head, body);
        return;
    }
    switch (head->type) {
    case KVF_NET_FETCH:
        on_fetch(link, head, body);
        break;
    case KVF_NET_ANSWER:
        on_answer(link, head, body);
        break;
    case KVF_NET_PIECE:
        on_piece(link, head, body);
        break;
    case KVF_NET_CREDIT:
        on_credit(link, head);
        break;
    case KVF_NET_CANCEL:
        on_cancel(link, head);
        break;
    case KVF_NET_SNAPSHOT:
    case KVF_NET_EVENTS:
    case KVF_NET_RESYNC:
        if (link->of != 0) {
            kvf_link_offend(link, "a part of the stream on an endpoint for records");
        } else {
            on_stream(link, head, body);
        }
        break;
    case KVF_NET_BYE:
        kvf_link_break(link, KVF_ERR_DISCONNECTED, "it says goodbye");
        break;
    case KVF_NET_HEARTBEAT:
    case KVF_NET_CONFIRM:
        break; /* that they came is all they say */
    default:
        kvf_link_offend(link, "a message of a client on a link between nodes");
        break;
    }
}

void kvf_flow_end(struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    kvf_net_link id = kvf_link_id(link);

    for (uint32_t i = 0; net->n_fetches > 0 && i < KVF_NET_FETCHES_MAX; i++) {
        if (net->fetches[i] != NULL && net->fetches[i]->lane == id) {
            fetch_over(net, net->fetches[i], KVF_ERR_DISCONNECTED);
        }
    }
    while (link->serves != NULL) {
        serve_leave(link, link->serves);
    }
    while (link->held != NULL) {
        unhold(link);
    }
}

bool kvf_flow_is_busy(const struct kvf_net *net)
{
    for (uint32_t i = 0; net->n_fetches == 0 && i < net->links_end; i++) {
        if (net->links[i].state == KVF_LINK_UP &&
            (net->links[i].serves != NULL || net->links[i].piece_sends > 0)) {
            return true;
        }
    }
    return net->n_fetches > 0;
}

unsigned kvf_flow_turn(struct kvf_net *net)
{
    unsigned n = expire_fetches(net);

    for (uint32_t i = 0; i < net->links_end; i++) {
        if (net->links[i].state == KVF_LINK_UP && net->links[i].serves != NULL) {
            n += send_pieces(&net->links[i]);
        }
    }
    return n;
}
