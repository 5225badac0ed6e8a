/* SPDX-License-Identifier: Apache-2.0
 *
 * transport_ucx_link.c: links between daemons: connect, accept, handshake, liveness, close.
 *
 *   FREE -> CONNECTING --WELCOME--> UP -> CLOSING -> FREE          initiator
 *   FREE -> ACCEPTED --HELLO--> WELCOMED --CONFIRM--> UP -> ...    acceptor
 *
 * What a stranger can do: make a link that ends after HANDSHAKE_NS. A message whose MAC is wrong is
 * dropped and counted, and the link it claims to belong to does not notice; only whoever has the
 * session's key can end a link by breaking the protocol.
 */
#include "transport/transport_ucx_internal.h"

#include <arpa/inet.h>
#include <assert.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/proto.h"

#define HANDSHAKE_NS (5 * KVF_NS_PER_S)
#define LINGER_NS    (300 * KVF_NS_PER_MS) /* for a refusal to arrive */
#define RETRY_SHIFT  4                     /* the pause doubles so often */

/* ----------------------------------------------------------------------------------------------
 * Small things
 */
struct kvf_link *kvf_link_find(struct kvf_net *net, kvf_net_link id)
{
    struct kvf_link *link = &net->links[(id & 0xff) % (KVF_NET_LINKS_MAX + KVF_NET_LANES_MAX)];

    return link->state == KVF_LINK_UP && !link->is_broken && kvf_link_id(link) == id ? link : NULL;
}

/* Who is at the other end, for people. */
static const char *label(const struct kvf_link *link)
{
    if (link->is_initiator) {
        return link->net->peers[link->peer].text;
    }
    return link->name[0] != '\0' ? link->name : "a node that connected";
}

void kvf_link_break(struct kvf_link *link, int status, const char *fmt, ...)
{
    va_list args;

    if (link->is_broken || link->state == KVF_LINK_CLOSING) {
        return;
    }
    link->is_broken = true;
    link->status = status;
    va_start(args, fmt);
    (void)vsnprintf(link->why, sizeof(link->why), fmt, args);
    va_end(args);
}

/* Of a client: what speaks for it to the daemon knows nothing of it. With no room for the event it
 * is not said: so many links have come and gone since the owner looked last. */
static void tell_offence(const struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    struct kvf_net_event event = {.kind = KVF_NET_EVENT_OFFENCE, .link = kvf_link_id(link)};

    if (atomic_load(&net->link_events) >= KVF_NET_LINK_EVENTS_MAX) {
        return;
    }
    memcpy(event.name, link->tenant, sizeof(event.name));
    memcpy(event.from, link->from, sizeof(event.from));
    atomic_fetch_add(&net->link_events, 1);
    kvf_net_emit(net, &event);
}

void kvf_link_offend(struct kvf_link *link, const char *why)
{
    if (!link->is_broken) {
        atomic_fetch_add(&link->net->protocol_errors, 1);
        if (link->is_client && !link->is_initiator) {
            tell_offence(link);
        }
    }
    kvf_link_break(link, KVF_ERR_PROTOCOL, "it broke the protocol: %s", why);
}

void kvf_link_log(const struct kvf_link *link, int level, const char *fmt, ...)
{
    char line[KVF_LOG_LINE_BYTES];
    va_list args;

    if (link->net->config.tenant[0] != '\0') {
        return; /* what a client has to say, it says itself */
    }
    va_start(args, fmt);
    (void)vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    kvf_log(level, "%s", line);
}

struct kvf_link *kvf_link_new(struct kvf_net *net, bool is_lane)
{
    uint32_t end = is_lane ? KVF_NET_LINKS_MAX + KVF_NET_LANES_MAX : KVF_NET_LINKS_MAX;

    for (uint32_t i = is_lane ? KVF_NET_LINKS_MAX : 0; i < end; i++) {
        struct kvf_link *link = &net->links[i];

        if (link->state == KVF_LINK_FREE) {
            memset(link, 0, sizeof(*link));
            link->net = net;
            memcpy(link->greet_key, net->peer_key, sizeof(link->greet_key));
            link->generation = ++net->generations;
            link->begun_ns = net->now_ns;
            link->came_ns = net->now_ns;
            link->sent_ns = net->now_ns;
            link->credit_bytes = KVF_NET_WINDOW_BYTES;
            link->version = KVF_NET_VERSION_MIN;
            net->links_end = net->links_end > i ? net->links_end : i + 1;
            return link;
        }
    }
    return NULL;
}

/* ----------------------------------------------------------------------------------------------
 * Sending
 */
static void send_over(struct kvf_link_send *send, ucs_status_t status)
{
    struct kvf_link *link = send->link;

    link->sends--;
    link->piece_sends -= send->head.type == KVF_NET_PIECE || send->head.type == KVF_NET_STAGE;
    if (status != UCS_OK) {
        kvf_link_break(link, KVF_ERR_DISCONNECTED, "%s", link->net->ucx.ucs_status_string(status));
    }
    kvf_flow_sent(send);
    free(send->owned);
    kvf_pool_put(&link->net->sends, send);
}

static void on_sent(void *request, ucs_status_t status, void *arg)
{
    struct kvf_link_send *send = arg;
    struct kvf_net *net = send->link->net;

    send_over(send, status);
    net->ucx.ucp_request_free(request);
}

struct kvf_link_send *kvf_link_send_new(struct kvf_link *link)
{
    bool is_served = link->is_client && !link->is_initiator;

    /* a client that takes nothing takes no room that others need */
    if (is_served && link->sends >= KVF_NET_CLIENT_SENDS_MAX) {
        return NULL;
    }
    return kvf_pool_get(&link->net->sends);
}

bool kvf_link_send_body(struct kvf_link *link, struct kvf_link_send *send, enum kvf_net_type type,
                        uint64_t request, uint32_t offset, const void *body, uint32_t body_bytes)
{
    struct kvf_net *net = link->net;
    bool greets = type == KVF_NET_HELLO || type == KVF_NET_ENDPOINT || type == KVF_NET_CLIENT ||
                  type == KVF_NET_WELCOME;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS |
                        UCP_OP_ATTR_FIELD_USER_DATA,
        /* eager: nothing is fetched from our memory, and the peer needs no room for it first */
        .flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .user_data = send,
    };
    ucs_status_ptr_t sent;

    send->link = link;
    send->head = (struct kvf_net_head){
        .magic = KVF_NET_MAGIC,
        .version = greets ? KVF_NET_VERSION_MIN : link->version,
        .type = (uint8_t)type,
        .flags = link->is_initiator ? 0 : KVF_NET_FROM_ACCEPTOR,
        .incarnation = net->config.incarnation,
        .sequence = ++link->sequence,
        .request = request,
        .body_bytes = body_bytes,
        .offset = offset,
    };
    kvf_net_seal(greets ? link->greet_key : link->key, &send->head, body);
    link->sends++;
    link->piece_sends += type == KVF_NET_PIECE || type == KVF_NET_STAGE;
    link->sent_ns = net->now_ns;
    sent = net->ucx.ucp_am_send_nbx(link->ep, KVF_NET_AM_ID, &send->head, sizeof(send->head), body,
                                    body_bytes, &param);
    if (!UCS_PTR_IS_PTR(sent)) { /* over already, well or not */
        send_over(send, UCS_PTR_RAW_STATUS(sent));
    }
    return !link->is_broken;
}

bool kvf_link_send(struct kvf_link *link, enum kvf_net_type type, uint64_t request, uint32_t offset,
                   const void *body, uint32_t body_bytes)
{
    struct kvf_link_send *send;

    assert(body_bytes <= sizeof(send->body));
    if (link->is_broken || link->ep == NULL) {
        return false;
    }
    send = kvf_link_send_new(link);
    if (send == NULL) {
        kvf_link_break(link, KVF_ERR_BUSY, "too many messages wait to be sent");
        return false;
    }
    if (body_bytes > 0) {
        memcpy(send->body, body, body_bytes);
    }
    return kvf_link_send_body(link, send, type, request, offset, send->body, body_bytes);
}

bool kvf_link_send_copy(struct kvf_link *link, enum kvf_net_type type, uint64_t request,
                        uint32_t offset, const void *body, uint32_t body_bytes)
{
    struct kvf_link_send *send;

    if (body_bytes <= sizeof(send->body)) {
        return kvf_link_send(link, type, request, offset, body, body_bytes);
    }
    if (link->is_broken || link->ep == NULL) {
        return false;
    }
    send = kvf_link_send_new(link);
    if (send != NULL) {
        send->owned = malloc(body_bytes);
    }
    if (send == NULL || send->owned == NULL) {
        if (send != NULL) {
            kvf_pool_put(&link->net->sends, send);
        }
        kvf_link_break(link, KVF_ERR_BUSY, "too many messages wait to be sent");
        return false;
    }
    memcpy(send->owned, body, body_bytes);
    return kvf_link_send_body(link, send, type, request, offset, send->owned, body_bytes);
}

/* ----------------------------------------------------------------------------------------------
 * Handshake
 */
/* Tell the owner of a link that came or went. */
static void tell(struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    struct kvf_net_event event = {.link = kvf_link_id(link),
                                  .is_initiator = link->is_initiator,
                                  .incarnation = link->incarnation};

    if (atomic_load(&net->link_events) >= KVF_NET_LINK_EVENTS_MAX) {
        return; /* once more in the next turn */
    }
    atomic_fetch_add(&net->link_events, 1);
    event.kind = link->owes_up ? KVF_NET_EVENT_LINK_UP : KVF_NET_EVENT_LINK_DOWN;
    memcpy(event.name, link->name, sizeof(event.name));
    if (link->is_initiator) {
        (void)snprintf(event.address, sizeof(event.address), "%s", net->peers[link->peer].text);
    }
    if (link->owes_up) {
        link->owes_up = false;
    } else {
        link->owes_down = false;
    }
    kvf_net_emit(net, &event);
}

/* Is there no room for this client? NULL: there is; else what is full. Of the node's those count,
 * too, that have been welcomed and have not confirmed it, which strangers cannot have many of; of a
 * tenant's only those that have, since who welcomes cannot tell a message that is said again. So it
 * is asked twice. Not counted: those whose key was wrong, and wait for the answer to arrive. */
static const char *full_of_clients(const struct kvf_link *link)
{
    const struct kvf_net *net = link->net;
    uint32_t max = net->config.tenant_clients_max;
    uint32_t n = 0, n_tenant = 0;

    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        const struct kvf_link *other = &net->links[i];

        if (other->state != KVF_LINK_FREE && other->is_client && !other->is_refused) {
            n++;
            n_tenant += (other->state == KVF_LINK_UP || other == link) &&
                        memcmp(other->tenant, link->tenant, sizeof(link->tenant)) == 0;
        }
    }
    if (max != 0 && n_tenant > max) {
        return "its tenant has as many clients of other nodes here as peers.tenant_clients allows; "
               "use another node";
    }
    return n > KVF_NET_CLIENTS_MAX
               ? "this node has as many clients of other nodes as it takes; use another node"
               : NULL;
}

/* Nobody but the client's own calls, or what speaks for it, hears of such a link. */
static void client_up(struct kvf_link *link)
{
    struct kvf_net *net = link->net;

    link->sequence_come = 1; /* HELLO or WELCOME */
    if (link->is_initiator) {
        net->config.tunnel->up(net->config.tunnel_ctx);
    } else if (full_of_clients(link) != NULL) {
        kvf_link_break(link, KVF_ERR_BUSY, full_of_clients(link));
    } else if (kvf_relay_open(link, link->tenant) != KVF_OK) {
        kvf_link_break(link, KVF_ERR_BUSY, "no memory or descriptors for one more client");
    } else {
        kvf_log(KVF_LOG_INFO, "peers: client %s of tenant %s has linked with this node", link->name,
                link->tenant);
    }
}

static void become_up(struct kvf_link *link)
{
    link->state = KVF_LINK_UP;
    if (link->is_client) {
        client_up(link);
        return;
    }
    atomic_fetch_add(&link->net->endpoints, 1);
    if (link->of != 0) {
        kvf_lane_up(link);
        return;
    }
    link->owes_up = true;
    if (link->is_initiator) {
        struct kvf_link_peer *peer = &link->net->peers[link->peer];

        peer->failures = 0;
        peer->said = KVF_OK;
    }
    tell(link); /* now: messages may follow in this very turn */
    if (link->is_initiator) {
        kvf_log(KVF_LOG_INFO, "peers: %s: linked with %s", label(link), link->name);
    } else {
        kvf_log(KVF_LOG_INFO, "peers: %s has linked with this node", link->name);
    }
}

static void send_hello(struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    struct kvf_net_client client = {0};
    struct kvf_net_hello hello = {.version_min = KVF_NET_VERSION_MIN,
                                  .version_max = KVF_NET_VERSION_MAX,
                                  .ucx_version = net->ucx.major << 16 | net->ucx.minor << 8 |
                                                 net->ucx.release,
                                  .layout_fp = net->layout_fp};

    kvf_env_random_fill(&net->env, link->nonce, sizeof(link->nonce));
    memcpy(hello.nonce, link->nonce, sizeof(hello.nonce));
    memcpy(hello.name, net->config.name, sizeof(hello.name));
    if (!link->is_client) {
        (void)kvf_link_send(link, link->of != 0 ? KVF_NET_ENDPOINT : KVF_NET_HELLO, 0, 0, &hello,
                            sizeof(hello));
        return;
    }
    client.hello = hello;
    memcpy(client.tenant, net->config.tenant, sizeof(client.tenant));
    (void)kvf_link_send(link, KVF_NET_CLIENT, 0, 0, &client, sizeof(client));
}

/* Answer a HELLO. status KVF_OK: the link goes on with CONFIRM; else it ends when that has gone. */
static void send_welcome(struct kvf_link *link, const struct kvf_net_hello *hello, int status,
                         const char *text)
{
    struct kvf_net *net = link->net;
    struct kvf_net_welcome welcome = {.status = status,
                                      .version = status == KVF_OK ? link->version : 0,
                                      .ucx_version = net->ucx.major << 16 | net->ucx.minor << 8 |
                                                     net->ucx.release,
                                      .layout_fp = net->layout_fp};

    kvf_env_random_fill(&net->env, welcome.nonce, sizeof(welcome.nonce));
    memcpy(welcome.hello_nonce, hello->nonce, sizeof(welcome.hello_nonce));
    memcpy(welcome.name, net->config.name, sizeof(welcome.name));
    (void)snprintf(welcome.text, sizeof(welcome.text), "%s", text);
    kvf_net_session_key(link->greet_key, hello->nonce, welcome.nonce, link->incarnation,
                        net->config.incarnation, link->key);
    if (status == KVF_OK) {
        link->state = KVF_LINK_WELCOMED;
    } else {
        link->is_refused = true;
        link->end_ns = net->now_ns + LINGER_NS;
        atomic_fetch_add(&net->refused, status < 0);
    }
    (void)kvf_link_send(link, KVF_NET_WELCOME, 0, 0, &welcome, sizeof(welcome));
}

/* is_sealed: the whole message, of which hello is the beginning. */
static void on_hello(struct kvf_link *link, const struct kvf_net_head *head,
                     const struct kvf_net_hello *hello, bool is_sealed)
{
    struct kvf_net *net = link->net;
    struct kvf_link *lane = NULL;
    uint64_t suppressed;
    const char *text = "";
    int status = KVF_OK;

    if (!is_sealed && link->is_client) {
        status = KVF_ERR_REFUSED;
        text = "its key is not of this cluster and tenant; make one by kvferry client-key";
    } else if (!is_sealed) {
        status = KVF_ERR_REFUSED;
        text = "it has another cluster key; give all nodes the same cluster_key file";
    } else if (link->is_client && full_of_clients(link) != NULL) {
        status = KVF_ERR_BUSY;
        text = full_of_clients(link);
    } else if (head->incarnation == net->config.incarnation) {
        status = KVF_EXISTS;
        text = "this is the node itself";
    } else if (hello->version_min > KVF_NET_VERSION_MAX ||
               hello->version_max < KVF_NET_VERSION_MIN) {
        status = KVF_ERR_VERSION;
        text = "no version of the protocol in common; run releases next to each other";
    } else if (hello->layout_fp != net->layout_fp) {
        status = KVF_ERR_MISMATCH;
        text = "its blocks have another layout; run the same release on all nodes";
    } else if (head->type == KVF_NET_ENDPOINT &&
               (lane = kvf_lane_take(link, head->incarnation)) == NULL) {
        status = KVF_MISS; /* it may come before the link is up: it is tried again */
        text = "no link of its daemon is here, or no room for one more endpoint";
    } else {
        link = lane != NULL ? lane : link;
        memcpy(link->name, hello->name, sizeof(link->name));
        link->incarnation = head->incarnation;
        link->version = hello->version_max < KVF_NET_VERSION_MAX ? (uint8_t)hello->version_max
                                                                 : KVF_NET_VERSION_MAX;
    }
    if (status < 0 && kvf_log_limit_allow(&net->stranger_log, net->now_ns, &suppressed)) {
        kvf_log(KVF_LOG_WARNING, "peers: a %s that calls itself '%s' is refused: %s",
                link->is_client ? "client" : "node", hello->name, text);
    }
    send_welcome(link, hello, status, text);
}

/* Another link of ours leads to the same daemon. */
static bool is_double(const struct kvf_link *link, uint64_t incarnation)
{
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        const struct kvf_link *other = &link->net->links[i];

        if (other != link && other->is_initiator && other->state == KVF_LINK_UP &&
            other->incarnation == incarnation) {
            return true;
        }
    }
    return false;
}

static void on_welcome(struct kvf_link *link, const struct kvf_net_head *head,
                       const struct kvf_net_welcome *welcome)
{
    struct kvf_net *net = link->net;

    if (!kvf_net_is_sealed(link->greet_key, head, welcome)) {
        /* whoever answers, it is nobody to talk with */
        atomic_fetch_add(&net->refused, 1);
        kvf_link_break(link, KVF_ERR_REFUSED, "%s",
                       link->is_client
                           ? "the key file is not of its cluster and tenant; make one by kvferry "
                             "client-key"
                           : "it has another cluster key; give all nodes the same cluster_key "
                             "file");
        return;
    }
    if (memcmp(welcome->hello_nonce, link->nonce, sizeof(link->nonce)) != 0) {
        kvf_link_offend(link, "an old WELCOME");
        return;
    }
    if (welcome->status != KVF_OK) {
        atomic_fetch_add(&net->refused, welcome->status < 0);
        kvf_link_break(link, welcome->status, "it refuses: %s", welcome->text);
        return;
    }
    if (welcome->version < KVF_NET_VERSION_MIN || welcome->version > KVF_NET_VERSION_MAX ||
        welcome->layout_fp != net->layout_fp) {
        kvf_link_break(link, KVF_ERR_VERSION,
                       "it chose a version or layout that this node does not know");
        return;
    }
    if (!link->is_client && link->of == 0 && is_double(link, head->incarnation)) {
        kvf_link_break(link, KVF_EXISTS, "another address leads there, too");
        return;
    }
    link->incarnation = head->incarnation;
    link->version = (uint8_t)welcome->version;
    memcpy(link->name, welcome->name, sizeof(link->name));
    kvf_net_session_key(link->greet_key, link->nonce, welcome->nonce, net->config.incarnation,
                        link->incarnation, link->key);
    if (kvf_link_send(link, KVF_NET_CONFIRM, 0, 0, NULL, 0)) {
        become_up(link);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Receiving
 */
static bool is_at(const struct kvf_link *link, ucp_ep_h ep)
{
    return link->ep == ep && link->state != KVF_LINK_FREE && link->state != KVF_LINK_CLOSING;
}

static struct kvf_link *link_of_ep(struct kvf_net *net, ucp_ep_h ep)
{
    if (net->last_link != NULL && is_at(net->last_link, ep)) {
        return net->last_link; /* it is often the same for some messages */
    }
    for (uint32_t i = 0; i < net->links_end; i++) {
        if (is_at(&net->links[i], ep)) {
            net->last_link = &net->links[i];
            return net->last_link;
        }
    }
    return NULL;
}

static void greet(struct kvf_link *link, const struct kvf_net_head *head, const void *body)
{
    struct kvf_net *net = link->net;
    union {
        struct kvf_net_hello hello;
        struct kvf_net_client client;
        struct kvf_net_welcome welcome;
    } copy;

    memcpy(&copy, body, head->body_bytes);
    link->came_ns = net->now_ns;
    if (head->type == KVF_NET_HELLO || head->type == KVF_NET_ENDPOINT) {
        on_hello(link, head, &copy.hello, kvf_net_is_sealed(link->greet_key, head, body));
    } else if (head->type == KVF_NET_CLIENT) {
        link->is_client = true;
        memcpy(link->tenant, copy.client.tenant, sizeof(link->tenant));
        kvf_net_client_key(net->config.cluster_key, link->tenant, link->greet_key);
        on_hello(link, head, &copy.client.hello, kvf_net_is_sealed(link->greet_key, head, body));
    } else {
        on_welcome(link, head, &copy.welcome);
    }
}

/* A message of a link in a state that allows it. False: it is nobody's. */
static bool take_message(struct kvf_link *link, const struct kvf_net_head *head, const void *body,
                         size_t bytes)
{
    bool is_session = link->state == KVF_LINK_WELCOMED || link->state == KVF_LINK_UP;
    const char *why;

    if (link->is_broken || link->is_refused) {
        return true; /* it is on its way out */
    }
    if (kvf_net_head_check(head, bytes, link->is_initiator, &why) != KVF_OK) {
        return false;
    }
    if ((link->state == KVF_LINK_ACCEPTED &&
         (head->type == KVF_NET_HELLO || head->type == KVF_NET_ENDPOINT ||
          head->type == KVF_NET_CLIENT)) ||
        (link->state == KVF_LINK_CONNECTING && head->type == KVF_NET_WELCOME)) {
        if (kvf_net_body_check(head, body, &why) != KVF_OK) {
            return false;
        }
        greet(link, head, body);
        return true;
    }
    if (!is_session || head->type == KVF_NET_HELLO || head->type == KVF_NET_WELCOME ||
        head->type == KVF_NET_ENDPOINT || head->type == KVF_NET_CLIENT ||
        head->version != link->version || head->incarnation != link->incarnation ||
        !kvf_net_is_sealed(link->key, head, body) ||
        !kvf_net_replay_accept(&link->replay, head->sequence)) {
        return false;
    }
    if (kvf_net_body_check(head, body, &why) != KVF_OK) {
        kvf_link_offend(link, why);
        return true;
    }
    link->came_ns = link->net->now_ns;
    if (link->state == KVF_LINK_WELCOMED) {
        become_up(link); /* any message under the session's key confirms it */
        if (link->is_broken) {
            return true; /* nothing speaks for this client here */
        }
    }
    kvf_flow_message(link, head, body);
    return true;
}

ucs_status_t kvf_link_message(void *arg, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param)
{
    struct kvf_net *net = arg;
    struct kvf_link *link = NULL;
    struct kvf_net_head head;

    if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0) {
        link = link_of_ep(net, param->reply_ep);
    }
    /* a rendezvous is nothing that we send: its data stays where it is */
    if (link == NULL || header_bytes != sizeof(head) ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
        atomic_fetch_add(&net->strangers, 1);
        return UCS_OK;
    }
    memcpy(&head, header, sizeof(head));
    if (!take_message(link, &head, data, bytes)) {
        atomic_fetch_add(&net->strangers, 1);
    }
    return UCS_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Connecting and accepting
 */
static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct kvf_net *net = arg;
    struct kvf_link *link = link_of_ep(net, ep);

    if (link != NULL) {
        kvf_link_break(link, KVF_ERR_DISCONNECTED, "%s", net->ucx.ucs_status_string(status));
    }
}

/* Give a link its endpoint. */
static void open_endpoint(struct kvf_link *link, ucp_ep_params_t *params)
{
    struct kvf_net *net = link->net;
    ucs_status_t status;

    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_error;
    params->err_handler.arg = net; /* a link may get another place */
    status = net->ucx.ucp_ep_create(net->worker, params, &link->ep);
    if (status != UCS_OK) {
        link->ep = NULL;
        kvf_link_break(link, KVF_ERR_DISCONNECTED, "%s", net->ucx.ucs_status_string(status));
    }
}

void kvf_link_arrive(ucp_conn_request_h request, void *arg)
{
    struct kvf_net *net = arg;

    if (net->n_arrivals == KVF_NET_REQUESTS_MAX) {
        (void)net->ucx.ucp_listener_reject(net->listener, request);
        return;
    }
    net->arrivals[net->n_arrivals++] = request;
}

/* The longest of those that have come and have not said under a key who they are goes, once there
 * are too many of them: whoever is slow to speak keeps nobody else out. */
static void make_way(struct kvf_net *net)
{
    struct kvf_link *oldest = NULL;
    uint32_t n = 0;

    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct kvf_link *link = &net->links[i];
        /* also one whose HELLO is right: it may be another's, said again */
        bool is_stranger = !link->is_broken && !link->is_initiator &&
                           (link->state == KVF_LINK_ACCEPTED || link->state == KVF_LINK_WELCOMED ||
                            link->is_refused);

        n += is_stranger;
        if (is_stranger && (oldest == NULL || link->begun_ns < oldest->begun_ns)) {
            oldest = link;
        }
    }
    if (n >= KVF_NET_STRANGERS_MAX) {
        kvf_link_break(oldest, KVF_ERR_BUSY, "others came while it had not said who it is");
    }
}

/* Where a connection comes from. */
static void read_from(struct kvf_link *link, ucp_conn_request_h request)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff}; /* IPv4 as IPv6 */
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
    const struct sockaddr_in *in = (const void *)&attr.client_address;
    const struct sockaddr_in6 *in6 = (const void *)&attr.client_address;

    if (link->net->ucx.ucp_conn_request_query(request, &attr) != UCS_OK) {
        return;
    }
    link->at = (struct kvf_net_address){.address = attr.client_address,
                                        .bytes = sizeof(attr.client_address)};
    if (attr.client_address.ss_family == AF_INET) {
        memcpy(link->from, &in->sin_addr, sizeof(in->sin_addr));
    } else if (attr.client_address.ss_family == AF_INET6 &&
               memcmp(&in6->sin6_addr, mapped, sizeof(mapped)) == 0) {
        memcpy(link->from, in6->sin6_addr.s6_addr + sizeof(mapped), 4);
    } else if (attr.client_address.ss_family == AF_INET6) {
        memcpy(link->from, &in6->sin6_addr, sizeof(link->from));
    }
}

static void accept_one(struct kvf_net *net, ucp_conn_request_h request)
{
    struct kvf_link *link;
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
                              .conn_request = request};

    make_way(net);
    link = kvf_link_new(net, false);
    if (link == NULL) {
        atomic_fetch_add(&net->refused, 1);
        (void)net->ucx.ucp_listener_reject(net->listener, request);
        return;
    }
    link->state = KVF_LINK_ACCEPTED;
    read_from(link, request);
    open_endpoint(link, &params);
}

void kvf_link_begin(struct kvf_link *link)
{
    const struct kvf_link_peer *peer = &link->net->peers[link->peer];
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
                              .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
                              .sockaddr = {.addr = (const struct sockaddr *)&peer->address.address,
                                           .addrlen = peer->address.bytes}};

    link->state = KVF_LINK_CONNECTING;
    open_endpoint(link, &params);
    if (!link->is_broken) {
        send_hello(link);
    }
}

static void connect_peer(struct kvf_net *net, uint32_t number)
{
    struct kvf_link *link = kvf_link_new(net, false);

    if (link == NULL) {
        return;
    }
    net->peers[number].link = 1 + (uint32_t)(link - net->links);
    link->is_initiator = true;
    link->is_client = net->config.tenant[0] != '\0';
    link->peer = number;
    kvf_link_begin(link);
}

static bool is_same_address(const struct kvf_net_address *a, const struct kvf_net_address *b)
{
    return a->bytes == b->bytes && memcmp(&a->address, &b->address, a->bytes) == 0;
}

static void peer_init(struct kvf_link_peer *peer, const struct kvf_net_address *address)
{
    char host[48] = "?";
    char port[8] = "?";

    memset(peer, 0, sizeof(*peer));
    peer->address = *address;
    (void)getnameinfo((const struct sockaddr *)&address->address, address->bytes, host,
                      sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
    (void)snprintf(peer->text, sizeof(peer->text),
                   address->address.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

/* Addresses keep their places: links name them by number. */
void kvf_link_connect(struct kvf_net *net, struct kvf_net_address *addresses, uint32_t n)
{
    bool known[KVF_NET_PEERS_MAX] = {false};

    for (uint32_t p = 0; p < net->n_peers; p++) {
        net->peers[p].is_wanted = false;
        for (uint32_t i = 0; i < n; i++) {
            if (is_same_address(&net->peers[p].address, &addresses[i])) {
                net->peers[p].is_wanted = true;
                known[i] = true;
            }
        }
        if (!net->peers[p].is_wanted && net->peers[p].link != 0) {
            kvf_link_break(&net->links[net->peers[p].link - 1], KVF_ERR_CANCELED,
                           "its address is not a peer's any more");
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t p = 0;

        while (p < net->n_peers && (net->peers[p].is_wanted || net->peers[p].link != 0)) {
            p++;
        }
        if (!known[i] && p < KVF_NET_PEERS_MAX) {
            peer_init(&net->peers[p], &addresses[i]);
            net->peers[p].is_wanted = true;
            net->n_peers = p == net->n_peers ? p + 1 : net->n_peers;
        }
    }
}

/* ----------------------------------------------------------------------------------------------
 * The end of a link
 */
static void say_broken(struct kvf_link *link, bool was_up)
{
    struct kvf_link_peer *peer = link->is_initiator ? &link->net->peers[link->peer] : NULL;
    bool is_usual = link->status == KVF_ERR_CANCELED || link->status == KVF_EXISTS ||
                    (link->is_client && link->status == KVF_ERR_DISCONNECTED);
    int level = is_usual ? KVF_LOG_INFO : KVF_LOG_WARNING;
    uint64_t suppressed;

    if (link->of != 0) {
        if (was_up && kvf_link_find(link->net, link->of) != NULL) { /* it ended alone */
            kvf_link_log(link, level, "peers: %s: one of its endpoints ended: %s", label(link),
                         link->why);
        }
    } else if (was_up) {
        kvf_link_log(link, level, "peers: %s%s%s: link ended: %s", label(link),
                     peer != NULL ? ", " : "", peer != NULL ? link->name : "", link->why);
    } else if (peer != NULL && peer->said != link->status) {
        peer->said = link->status; /* once, however often it is tried */
        kvf_link_log(link, level, "peers: %s: no link: %s", peer->text, link->why);
    } else if (peer == NULL && !link->is_refused &&
               kvf_log_limit_allow(&link->net->stranger_log, link->net->now_ns, &suppressed)) {
        kvf_log(level, "peers: a node connected and made no link: %s", link->why);
    }
}

static void begin_close(struct kvf_link *link)
{
    struct kvf_net *net = link->net;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    bool was_up = link->state == KVF_LINK_UP;

    say_broken(link, was_up);
    link->state = KVF_LINK_CLOSING;
    link->owes_down = was_up && !link->owes_up && !link->is_client && link->of == 0;
    link->owes_up = false;
    if (was_up && !link->is_client) {
        atomic_fetch_sub(&net->endpoints, 1);
        kvf_lane_end(link);
    }
    kvf_flow_end(link);
    if (link->is_client && link->is_initiator) {
        net->config.tunnel->down(net->config.tunnel_ctx, link->status, link->why);
        kvf_link_connect(net, NULL, 0); /* the client tries again in its own time */
    } else if (link->relay != NULL) {
        kvf_relay_end(link);
    }
    if (link->ep != NULL) {
        link->closing = net->ucx.ucp_ep_close_nbx(link->ep, &param);
    }
}

/* True: the place is free again. */
static bool finish_close(struct kvf_link *link)
{
    struct kvf_net *net = link->net;

    if (link->closing != NULL && UCS_PTR_IS_PTR(link->closing)) {
        if (net->ucx.ucp_request_check_status(link->closing) == UCS_INPROGRESS) {
            return false;
        }
        net->ucx.ucp_request_free(link->closing);
    }
    link->closing = NULL;
    link->ep = NULL;
    if (link->sends != 0 || link->owes_down) {
        return false;
    }
    kvf_relay_free(link);
    if (link->of != 0) {
        kvf_lane_closed(link);
    } else if (link->is_initiator) {
        struct kvf_link_peer *peer = &net->peers[link->peer];
        uint32_t shift = peer->failures < RETRY_SHIFT ? peer->failures : RETRY_SHIFT;
        uint64_t pause_ns = net->config.retry_ns << shift;

        if (link->status == KVF_EXISTS || link->status == KVF_ERR_REFUSED ||
            link->status == KVF_ERR_VERSION || link->status == KVF_ERR_MISMATCH) {
            pause_ns = net->config.retry_ns << RETRY_SHIFT; /* nothing changes soon */
        }
        peer->failures++;
        /* by lot, so that nodes that lost each other do not meet in step */
        peer->next_try_ns = net->now_ns + pause_ns / 2 +
                            kvf_env_random_u64(&net->env) % (pause_ns / 2 + 1);
        peer->link = 0;
    }
    link->state = KVF_LINK_FREE;
    while (net->links_end > 0 && net->links[net->links_end - 1].state == KVF_LINK_FREE) {
        net->links_end--;
    }
    return true;
}

bool kvf_link_close_all(struct kvf_net *net)
{
    bool all = true;

    for (uint32_t i = 0; i < net->n_arrivals; i++) {
        (void)net->ucx.ucp_listener_reject(net->listener, net->arrivals[i]);
    }
    net->n_arrivals = 0;
    for (uint32_t i = 0; i < net->links_end; i++) {
        struct kvf_link *link = &net->links[i];

        if (link->state == KVF_LINK_UP && !link->is_broken && !link->is_refused) {
            struct kvf_net_status_body body = {.status = KVF_ERR_TIER_OFF};

            link->is_refused = true; /* nothing is taken from it any more */
            link->end_ns = net->now_ns + LINGER_NS;
            (void)kvf_link_send(link, KVF_NET_BYE, 0, 0, &body, sizeof(body));
        }
        if (link->state != KVF_LINK_FREE && link->state != KVF_LINK_CLOSING &&
            (link->is_broken || link->sends == 0 || net->now_ns > link->end_ns)) {
            kvf_link_break(link, KVF_ERR_CANCELED, "this node ends");
            begin_close(link);
        }
        link->owes_down = false;
        all &= link->state == KVF_LINK_FREE || finish_close(link);
    }
    return all;
}

/* ----------------------------------------------------------------------------------------------
 * The turn
 */

static void check_time(struct kvf_link *link)
{
    struct kvf_net *net = link->net;

    if (link->is_refused) {
        if (net->now_ns >= link->end_ns) {
            kvf_link_break(link, KVF_ERR_REFUSED, "it was refused");
        }
    } else if (link->state != KVF_LINK_UP) {
        if (net->now_ns - link->begun_ns > HANDSHAKE_NS) {
            kvf_link_break(link, KVF_ERR_TIMEOUT, "no answer");
        }
    } else if (net->now_ns > link->came_ns + net->config.silence_ns) {
        kvf_link_break(link, KVF_ERR_TIMEOUT, "nothing was heard from it");
    } else if (link->relay == NULL && link->serves != NULL &&
               net->now_ns > link->moved_ns + net->config.silence_ns) {
        /* a client's memory may be full for as long as its engine likes; a node has asked with a
         * place ready, and what it does not take stays pinned here */
        kvf_link_break(link, KVF_ERR_TIMEOUT, "it takes nothing of what it has asked for");
    } else if (net->now_ns >= link->sent_ns + net->config.heartbeat_ns) {
        (void)kvf_link_send(link, KVF_NET_HEARTBEAT, 0, 0, NULL, 0);
    }
}

unsigned kvf_link_turn(struct kvf_net *net)
{
    unsigned n = net->n_arrivals;

    for (uint32_t i = 0; i < net->n_arrivals; i++) {
        accept_one(net, net->arrivals[i]);
    }
    net->n_arrivals = 0;
    for (uint32_t i = 0; i < net->links_end; i++) {
        struct kvf_link *link = &net->links[i];

        if (link->state == KVF_LINK_FREE) {
            continue;
        }
        if (link->relay != NULL && link->state == KVF_LINK_UP && !link->is_broken) {
            n += kvf_relay_turn(link, net->has_slept);
        }
        if (link->owes_up || link->owes_down) {
            tell(link);
            n++;
        }
        if (link->state == KVF_LINK_CLOSING) {
            n += finish_close(link);
            continue;
        }
        check_time(link);
        if (link->is_broken) {
            begin_close(link);
            n++;
        }
    }
    for (uint32_t p = 0; p < net->n_peers; p++) {
        if (net->peers[p].is_wanted && net->peers[p].link == 0 &&
            net->now_ns >= net->peers[p].next_try_ns) {
            connect_peer(net, p);
            n++;
        }
    }
    return n + kvf_lane_turn(net);
}
