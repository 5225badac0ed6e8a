/* SPDX-License-Identifier: Apache-2.0
 *
 * peers.c: links to daemons of other nodes, where to fetch a block from, and which nodes there are.
 *
 * A peer that lets three fetches in a row run out of time rests: its hints count for nothing until
 * the pause is over, which doubles each time. One that does not answer even then is hung up on.
 */
#include "agent/peers.h"

#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EVENTS_A_TURN 256
#define RETRY_NS      (2 * KVF_NS_PER_MS)
#define RESOLVE_NS    (10 * KVF_NS_PER_S)
#define CONNECT_NS    KVF_NS_PER_S /* first pause before a node is tried again */
#define SILENCE_BEATS 5            /* heartbeats that may be missing */
#define HEARTBEAT_NS  KVF_NS_PER_S /* whatever this node bears: others may be set to bear less */
#define FAILURES_MAX  3
#define FAILURES_END  8
#define REST_NS       KVF_NS_PER_S

/* ----------------------------------------------------------------------------------------------
 * Links
 */
struct kvf_peer_link *kvf_peer_link_find(struct kvf_peers *peers, kvf_net_link id)
{
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        if (peers->links[i].link == id) {
            return id != 0 ? &peers->links[i] : NULL;
        }
    }
    return NULL;
}

static void link_up(struct kvf_peers *peers, const struct kvf_net_event *event)
{
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct kvf_peer_link *link = &peers->links[i];

        if (link->link == 0) {
            memset(link, 0, sizeof(*link));
            link->link = event->link;
            link->is_initiator = event->is_initiator;
            link->incarnation = event->incarnation;
            link->since_ns = peers->agent->now_ns;
            link->source = KVF_HINT_NONE;
            memcpy(link->name, event->name, sizeof(link->name));
            memcpy(link->address, event->address, sizeof(link->address));
            kvf_far_link_up(peers, link);
            return;
        }
    }
}

static void link_down(struct kvf_peers *peers, kvf_net_link id)
{
    struct kvf_peer_link *link = kvf_peer_link_find(peers, id);

    if (link != NULL) {
        kvf_peers_unlearn(peers, link);
        kvf_far_link_down(peers, link);
        link->link = 0;
    }
}

static void take_event(struct kvf_peers *peers, struct kvf_net_event *event)
{
    struct kvf_peer_link *link;

    switch ((enum kvf_net_event_kind)event->kind) {
    case KVF_NET_EVENT_LINK_UP:
        link_up(peers, event);
        break;
    case KVF_NET_EVENT_LINK_DOWN:
        link_down(peers, event->link);
        break;
    case KVF_NET_EVENT_FETCH_DONE:
        kvf_remote_fetched(peers->source.tier, event->fetch);
        break;
    case KVF_NET_EVENT_SERVE:
        kvf_peers_serve(peers, event);
        break;
    case KVF_NET_EVENT_SERVE_DONE:
        kvf_peers_served(peers, event->serve);
        break;
    case KVF_NET_EVENT_MESSAGE:
        link = kvf_peer_link_find(peers, event->link);
        if (link != NULL) {
            kvf_peers_told(peers, link, event->type, event->body);
        }
        free(event->body);
        break;
    case KVF_NET_EVENT_CLIENT:
        kvf_peers_client(peers, event);
        break;
    case KVF_NET_EVENT_OFFENCE:
        kvf_peers_offence(peers, event);
        break;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Fetching
 */

static bool is_said_to_have(const struct kvf_peer_link *link, uint64_t sources)
{
    return (link->source != KVF_HINT_NONE && (sources >> link->source & 1) != 0) ||
           kvf_far_says(link, sources);
}

/* The least busy of those that have it and answer, but for those whose bits are set. */
static struct kvf_peer_link *least_busy(struct kvf_peers *peers, uint64_t sources, uint64_t but)
{
    struct kvf_peer_link *best = NULL;

    for (uint32_t i = 0; sources != 0 && i < KVF_NET_LINKS_MAX; i++) {
        struct kvf_peer_link *link = &peers->links[i];

        if (link->link != 0 && (but >> i & 1) == 0 && is_said_to_have(link, sources) &&
            link->rests_until_ns <= peers->agent->now_ns &&
            (best == NULL || link->inflight < best->inflight)) {
            best = link;
        }
    }
    return best;
}

/* The same of all; NULL: none, and those that could be linked with are. */
static struct kvf_peer_link *choose(struct kvf_peers *peers, uint64_t sources)
{
    struct kvf_peer_link *best = least_busy(peers, sources, 0);

    if (best == NULL && sources != 0) {
        kvf_far_want(peers, sources);
    } else if (best != NULL && best->far != NULL) {
        best->far->wanted_ns = peers->agent->now_ns;
    }
    return best;
}

bool kvf_peers_have(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard)
{
    uint32_t record_bytes;

    return agent->peers != NULL && !agent->is_draining &&
           choose(agent->peers,
                  kvf_hints_find(&agent->peers->hints, key_id, shard, &record_bytes)) != NULL;
}

int kvf_peers_load(struct kvf_session *session, const uint8_t key_id[32], uint32_t shard,
                   struct kvf_flight **flight_out)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_peers *peers = agent->peers;
    struct kvf_peer_link *link = NULL;
    struct kvf_entry *entry;
    uint32_t record_bytes;
    int status;

    if (peers != NULL && !agent->is_draining &&
        !agent->namespaces[session->namespace_index].is_off) {
        link = choose(peers, kvf_hints_find(&peers->hints, key_id, shard, &record_bytes));
    }
    if (link == NULL) {
        return KVF_MISS;
    }
    entry = kvf_room_insert(agent, key_id, shard, session->namespace_index);
    if (entry == NULL) {
        return KVF_MISS;
    }
    entry->record_bytes = record_bytes & 0x7ffffffu;
    entry->is_crc_unknown = 1;
    if (session->shard_count > 1) {
        kvf_room_for_entry(agent); /* for the set's */
    }
    if (kvf_place_set_add(agent, entry, session->shard_count) != KVF_OK) {
        kvf_index_remove(&agent->index, entry);
        return KVF_MISS;
    }
    status = kvf_place_load_remote(agent, entry, session, link->link, flight_out);
    if (status != KVF_OK) {
        entry->state = KVF_ENTRY_READY; /* nowhere */
        kvf_place_forget_block(agent, entry);
        return KVF_MISS;
    }
    link->inflight++;
    return KVF_OK;
}

/* Three times out of time: leave it alone for a while. */
static void count_failure(struct kvf_peers *peers, struct kvf_peer_link *link)
{
    struct kvf_agent *agent = peers->agent;

    link->failures++;
    if (link->failures >= FAILURES_END) {
        (void)kvf_net_hang_up(peers->net, link->link);
    } else if (link->failures >= FAILURES_MAX) {
        uint64_t rest_ns = REST_NS << (link->failures - FAILURES_MAX);

        link->rests_until_ns = agent->now_ns + rest_ns;
        kvf_log(KVF_LOG_WARNING,
                "peers: %s: %u fetches in a row got no answer: not asked for %llu s", link->name,
                link->failures, (unsigned long long)(rest_ns / KVF_NS_PER_S));
    }
}

bool kvf_peers_too_slow(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard,
                        uint64_t deadline_ns)
{
    uint32_t record_bytes;

    return deadline_ns != UINT64_MAX && agent->peers != NULL &&
           kvf_hints_find(&agent->peers->hints, key_id, shard, &record_bytes) != 0 &&
           agent->now_ns + kvf_place_remote_estimate_ns(agent, record_bytes) > deadline_ns;
}

/* Another peer that has the record of a load, as long as that one is; NULL: none. */
static struct kvf_peer_link *find_other(struct kvf_agent *agent, const struct kvf_flight *flight)
{
    struct kvf_peers *peers = agent->peers;
    const struct kvf_peer_link *asked = kvf_peer_link_find(peers, flight->io.location);
    uint64_t but = flight->asked_links;
    uint32_t record_bytes = 0;
    uint64_t sources = kvf_hints_find(&peers->hints, flight->io.name.key_id, flight->io.name.shard,
                                      &record_bytes);

    if (asked != NULL) {
        but |= UINT64_C(1) << (asked - peers->links);
    }
    return (record_bytes & 0x7ffffffu) == flight->record_bytes ? least_busy(peers, sources, but)
                                                               : NULL;
}

static uint64_t timeout_ns(const struct kvf_agent *agent)
{
    return agent->config->peers_timeout * KVF_NS_PER_S;
}

int kvf_peers_fetch_begin(struct kvf_agent *agent, struct kvf_flight *flight)
{
    uint64_t end_ns = flight->fetch_end_ns != 0 ? flight->fetch_end_ns
                                                : agent->now_ns + timeout_ns(agent);

    if (agent->now_ns >= end_ns) {
        return KVF_MISS; /* memory or the network were busy until then: no fault of a peer */
    }
    flight->io.deadline_ns = find_other(agent, flight) == NULL
                                 ? end_ns
                                 : agent->now_ns + (end_ns - agent->now_ns) / 2;
    return KVF_OK;
}

bool kvf_peers_other(struct kvf_agent *agent, struct kvf_flight *flight)
{
    struct kvf_peers *peers = agent->peers;
    const struct kvf_peer_link *asked = kvf_peer_link_find(peers, flight->io.location);
    struct kvf_peer_link *other = find_other(agent, flight);

    if (flight->fetch_end_ns == 0) {
        flight->fetch_end_ns = flight->started_ns + timeout_ns(agent);
    }
    if (other == NULL || agent->is_draining || agent->now_ns >= flight->fetch_end_ns) {
        return false;
    }
    if (asked != NULL) {
        flight->asked_links |= UINT64_C(1) << (asked - peers->links);
    }
    kvf_peers_left(agent, flight->io.location);
    flight->io.location = other->link;
    other->inflight++;
    agent->metrics.peer_second_asks++;
    return true;
}

void kvf_peers_left(struct kvf_agent *agent, kvf_net_link id)
{
    struct kvf_peer_link *link = kvf_peer_link_find(agent->peers, id);

    if (link != NULL) {
        link->inflight--;
    }
}

void kvf_peers_loaded(struct kvf_agent *agent, const struct kvf_tier_io *io)
{
    struct kvf_peers *peers = agent->peers;
    struct kvf_peer_link *link = kvf_peer_link_find(peers, io->location);

    agent->metrics.peer_corrupt_blocks += io->status == KVF_ERR_CORRUPT;
    agent->metrics.peer_stale_hints += io->status == KVF_MISS;
    agent->metrics.peer_failed_fetches += io->status == KVF_ERR_TIMEOUT ||
                                          io->status == KVF_ERR_DISCONNECTED ||
                                          io->status == KVF_ERR_BUSY;
    if (io->status == KVF_OK) {
        agent->metrics.peer_fetched_blocks++;
        agent->metrics.peer_fetched_bytes += io->record_bytes;
    }
    if (link == NULL) {
        return;
    }
    link->failed_blocks += io->status != KVF_OK;
    switch (io->status) {
    case KVF_OK:
        link->failures = 0;
        link->fetched_blocks++;
        link->fetched_bytes += io->record_bytes;
        break;
    case KVF_MISS:
    case KVF_ERR_CORRUPT:
        link->failures = 0;
        if (link->source != KVF_HINT_NONE) {
            kvf_hints_remove(&peers->hints, link->source, io->name.key_id, io->name.shard);
        }
        if (link->far != NULL && link->far->said.source != KVF_HINT_NONE) {
            kvf_hints_remove(&peers->hints, link->far->said.source, io->name.key_id,
                             io->name.shard);
        }
        break;
    case KVF_ERR_TIMEOUT:
        count_failure(peers, link);
        break;
    default:
        break;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Which nodes there are
 */

/* On a thread of its own: it takes as long as name servers do. */
static void resolve_run(struct kvf_work *work)
{
    struct kvf_peers *peers = work->owner;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};

    for (uint32_t i = 0; i < peers->n_nodes; i++) {
        struct kvf_peer_node *node = &peers->nodes[i];
        struct addrinfo *all;

        node->error = getaddrinfo(node->host, node->port, &hints, &all);
        if (node->error != 0) {
            continue; /* what was known of it stays */
        }
        node->n = 0;
        for (const struct addrinfo *a = all; a != NULL; a = a->ai_next) {
            if (node->n < KVF_PEER_ADDRESSES_MAX &&
                a->ai_addrlen <= sizeof(node->addresses[0].address)) {
                memset(&node->addresses[node->n], 0, sizeof(node->addresses[0]));
                memcpy(&node->addresses[node->n].address, a->ai_addr, a->ai_addrlen);
                node->addresses[node->n++].bytes = a->ai_addrlen;
            }
        }
        freeaddrinfo(all);
    }
}

static void resolve_done(struct kvf_work *work)
{
    struct kvf_peers *peers = work->owner;

    peers->n_named = 0;
    for (uint32_t i = 0; i < peers->n_nodes; i++) {
        struct kvf_peer_node *node = &peers->nodes[i];

        if (node->error != node->said) {
            node->said = node->error;
            if (node->error != 0) {
                kvf_log(KVF_LOG_WARNING, "peers: %s has no address: %s; tried again every 10 s",
                        node->host, gai_strerror(node->error));
            }
        }
        for (uint32_t k = 0; k < node->n && peers->n_named < KVF_NET_PEERS_MAX; k++) {
            peers->named[peers->n_named++] = node->addresses[k];
        }
    }
    peers->is_resolving = false;
    peers->resolve_ns = peers->agent->now_ns + RESOLVE_NS;
    kvf_far_connect(peers);
}

static void resolve(struct kvf_peers *peers)
{
    struct kvf_agent *agent = peers->agent;

    if (agent->names != NULL && agent->names != agent->work) {
        (void)agent->names->ops->poll(agent->names);
    }
    if (peers->n_nodes == 0 || peers->is_resolving || agent->now_ns < peers->resolve_ns) {
        return;
    }
    peers->resolve = (struct kvf_work){.run = resolve_run, .done = resolve_done, .owner = peers};
    peers->is_resolving = agent->names != NULL &&
                          agent->names->ops->submit(agent->names, &peers->resolve) == KVF_OK;
}

/* The names of peers.nodes, which the configuration's rules have judged. */
static void take_nodes(struct kvf_peers *peers)
{
    const char *at = peers->agent->config->peers_nodes;
    struct kvf_config_node node;

    while (peers->n_nodes < KVF_PEER_NODES_MAX && kvf_config_node_next(&at, &node) == KVF_OK) {
        struct kvf_peer_node *taken = &peers->nodes[peers->n_nodes++];

        memcpy(taken->host, node.host, sizeof(taken->host));
        memcpy(taken->port, node.port, sizeof(taken->port));
    }
}

/* ----------------------------------------------------------------------------------------------
 * The turn
 */
unsigned kvf_peers_poll(struct kvf_agent *agent)
{
    struct kvf_peers *peers = agent->peers;
    struct kvf_net_event event;
    unsigned n = 0;

    if (peers == NULL || peers->net == NULL) {
        return 0;
    }
    while (n < EVENTS_A_TURN && kvf_net_poll(peers->net, &event)) {
        take_event(peers, &event);
        n++;
    }
    n += peers->source.tier->ops->poll(peers->source.tier, agent->now_ns);
    n += kvf_peers_serve_waiting(peers);
    n += kvf_far_poll(peers);
    n += kvf_peers_tell(peers);
    n += kvf_hints_sweep(&peers->hints);
    kvf_peers_ask_again(peers);
    resolve(peers);
    return n;
}

uint64_t kvf_peers_deadline_ns(const struct kvf_agent *agent)
{
    const struct kvf_peers *peers = agent->peers;

    if (peers == NULL || peers->net == NULL) {
        return UINT64_MAX;
    }
    if (peers->owes || peers->waiting != NULL || peers->source.loads.head != NULL ||
        peers->source.tier->ops->deadline_ns(peers->source.tier) == 0) {
        return agent->now_ns + RETRY_NS;
    }
    return peers->is_connect_due && peers->connect_ns < peers->confirm_ns ? peers->connect_ns
                                                                          : peers->confirm_ns;
}

/* ----------------------------------------------------------------------------------------------
 * For people
 */
static const char *state_of(const struct kvf_peers *peers, const struct kvf_peer_link *link)
{
    if (!link->is_initiator) {
        return link->tell == KVF_TELL_EVENTS ? "told" : "telling";
    }
    if (link->rests_until_ns > peers->agent->now_ns) {
        return "resting";
    }
    return link->learn == KVF_LEARN_LIVE       ? "ready"
           : link->learn == KVF_LEARN_SNAPSHOT ? "snapshot"
                                               : "waiting";
}

static void fill_row(const struct kvf_peers *peers, const struct kvf_peer_link *link,
                     const char *state, struct kvf_control_peer *row)
{
    memcpy(row->name, link->name, sizeof(row->name));
    memcpy(row->address, link->address, sizeof(row->address));
    (void)snprintf(row->state, sizeof(row->state), "%s", state);
    row->is_asked = link->is_initiator;
    row->incarnation = link->incarnation;
    row->linked_s = (peers->agent->now_ns - link->since_ns) / KVF_NS_PER_S;
    row->blocks = link->blocks;
    row->fetched_blocks = link->fetched_blocks;
    row->fetched_bytes = link->fetched_bytes;
    row->failed_blocks = link->failed_blocks;
    row->served_blocks = link->served_blocks;
    row->served_bytes = link->served_bytes;
}

uint32_t kvf_peers_rows(const struct kvf_agent *agent, struct kvf_control_peer *rows,
                        uint32_t max_rows)
{
    const struct kvf_peers *peers = agent->peers;
    uint32_t n = 0;

    for (uint32_t i = 0; peers != NULL && i < KVF_NET_LINKS_MAX && n < max_rows; i++) {
        if (peers->links[i].link != 0) {
            fill_row(peers, &peers->links[i], state_of(peers, &peers->links[i]), &rows[n++]);
        }
    }
    for (uint32_t i = 0; peers != NULL && i < KVF_DIRECTORY_NODES_MAX && n < max_rows; i++) {
        if (peers->far[i].said.link != 0 && peers->far[i].link == 0) {
            fill_row(peers, &peers->far[i].said, "listed", &rows[n++]);
        }
    }
    return n;
}

void kvf_peers_metrics(struct kvf_agent *agent)
{
    struct kvf_metrics *metrics = &agent->metrics;
    const struct kvf_peers *peers = agent->peers;
    struct kvf_net_stat stat;

    if (peers == NULL) {
        return;
    }
    kvf_net_stat(peers->net, &stat);
    metrics->peer_refused = stat.refused;
    metrics->peer_protocol_errors = stat.protocol_errors;
    metrics->peer_strangers = stat.strangers;
    metrics->peer_hints = peers->hints.count;
    metrics->peer_dropped_hints = peers->hints.dropped_count;
    metrics->peer_endpoints = stat.endpoints;
    metrics->peers = 0;
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        metrics->peers += peers->links[i].link != 0 && peers->links[i].is_initiator;
    }
    kvf_far_metrics(peers);
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
static uint32_t hints_capacity(const struct kvf_config *config, uint64_t index_entries)
{
    uint64_t entries = config->peers_entries != 0 ? config->peers_entries : index_entries;

    return entries > 1u << 30 ? 1u << 30 : (uint32_t)entries;
}

static bool has_peers(const struct kvf_config *config)
{
    return config->peers_listen[0] != '\0' || config->peers_nodes[0] != '\0' ||
           config->directory_address[0] != '\0';
}

uint64_t kvf_peers_table_bytes(const struct kvf_config *config, uint64_t index_entries)
{
    if (!has_peers(config)) {
        return 0;
    }
    return sizeof(struct kvf_peers) + kvf_hints_bytes(hints_capacity(config, index_entries)) +
           KVF_PEER_LOG_EVENTS * sizeof(struct kvf_net_block) +
           KVF_NET_SERVES_MAX * sizeof(struct kvf_peer_serve) + kvf_remote_table_bytes();
}

static void describe(struct kvf_agent *agent, struct kvf_net_config *net_out)
{
    const struct kvf_config *config = agent->config;
    int status;

    *net_out = (struct kvf_net_config){.incarnation = agent->incarnation,
                                       .endpoints = (uint32_t)config->peers_endpoints,
                                       .heartbeat_ns = HEARTBEAT_NS,
                                       .retry_ns = CONNECT_NS,
                                       .wake = kvf_agent_wake};
    net_out->wake_ctx = agent;
    net_out->tenant_clients_max = (uint32_t)config->peers_tenant_clients;
    if (net_out->tenant_clients_max == 0 && agent->n_tenants > 1) {
        net_out->tenant_clients_max = KVF_NET_CLIENTS_MAX / agent->n_tenants;
    }
    net_out->silence_ns = SILENCE_BEATS * config->peers_heartbeat * KVF_NS_PER_S;
    memcpy(net_out->cluster_key, agent->id_key, sizeof(net_out->cluster_key));
    if (gethostname(net_out->name, sizeof(net_out->name) - 1) != 0) {
        (void)snprintf(net_out->name, sizeof(net_out->name), "node");
    }
    if (config->peers_listen[0] != '\0') {
        status = kvf_config_listen_parse(config->peers_listen, &net_out->listen.address,
                                         &net_out->listen.bytes);
        assert(status == KVF_OK); /* the configuration's rules have seen to that */
    }
}

static int open_net(struct kvf_peers *peers, const struct kvf_net_config *net)
{
    const struct kvf_config *config = peers->agent->config;
    char why[KVF_ERROR_TEXT_BYTES];
    int status = kvf_net_open(net, &peers->net, why, sizeof(why));

    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "peers: %s: %s",
                config->peers_listen[0] != '\0' ? config->peers_listen : "network", why);
        return status;
    }
    if (config->peers_listen[0] != '\0') {
        kvf_log(KVF_LOG_INFO,
                "peers: listening on %s, port %u, %s: whoever has the cluster key can read all "
                "blocks",
                config->peers_listen, kvf_net_port(peers->net), kvf_net_about(peers->net));
    } else {
        kvf_log(KVF_LOG_INFO, "peers: %s; no node can link with this one",
                kvf_net_about(peers->net));
    }
    return KVF_OK;
}

static int open_tables(struct kvf_peers *peers)
{
    struct kvf_agent *agent = peers->agent;
    int status = kvf_hints_open(&peers->hints,
                                hints_capacity(agent->config, agent->index.capacity));

    if (status == KVF_OK) {
        status = kvf_pool_init(&peers->serves, "serves", sizeof(struct kvf_peer_serve),
                               KVF_NET_SERVES_MAX + KVF_PEER_REFUSALS);
    }
    peers->log = calloc(KVF_PEER_LOG_EVENTS, sizeof(*peers->log));
    peers->log_next = 1;
    peers->waiting_end = &peers->waiting;
    return peers->log != NULL ? status : KVF_ERR_NO_MEMORY;
}

int kvf_peers_open(struct kvf_agent *agent)
{
    struct kvf_net_config net;
    struct kvf_peers *peers;
    int status;

    if (!has_peers(agent->config) ||
        (agent->ports.open_drive != NULL && !agent->ports.has_network)) {
        return KVF_OK;
    }
    peers = calloc(1, sizeof(*peers));
    if (peers == NULL) {
        kvf_log(KVF_LOG_ERROR, "peers: out of memory");
        return KVF_ERR_NO_MEMORY;
    }
    agent->peers = peers;
    peers->agent = agent;
    status = open_tables(peers);
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "peers: no memory for tables; lower peers.entries");
        return status;
    }
    describe(agent, &net);
    status = open_net(peers, &net);
    if (status != KVF_OK) {
        return status;
    }
    peers->source.agent = agent;
    peers->source.read_ns_per_mib = KVF_NS_PER_MS; /* until records have come: 1 GB/s */
    status = kvf_remote_open(
        &(struct kvf_remote_config){.net = peers->net,
                                    .env = agent->env,
                                    .work = agent->work,
                                    .timeout_ns = agent->config->peers_timeout * KVF_NS_PER_S,
                                    .inflight_bytes = agent->config->peers_inflight_bytes},
        &peers->source.store);
    peers->source.tier = peers->source.store;
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_ERROR, "peers: no memory for fetches");
        return status;
    }
    take_nodes(peers);
    return kvf_far_open(peers, &net);
}

void kvf_peers_stop(struct kvf_agent *agent)
{
    if (agent->peers != NULL) {
        kvf_far_close(agent->peers);
        kvf_net_close(agent->peers->net);
        agent->peers->net = NULL;
    }
}

void kvf_peers_close(struct kvf_agent *agent)
{
    struct kvf_peers *peers = agent->peers;

    if (peers == NULL) {
        return;
    }
    kvf_peers_stop(agent);
    if (peers->source.store != NULL) {
        peers->source.store->ops->close(peers->source.store);
    }
    for (uint32_t i = 0; i < peers->serves.count; i++) {
        struct kvf_peer_serve *serve = kvf_pool_at(&peers->serves, i);

        if (serve != NULL) { /* with the network gone nobody reads it */
            kvf_pool_put(&peers->serves, serve);
        }
    }
    (void)kvf_pool_fini(&peers->serves, NULL);
    kvf_hints_close(&peers->hints);
    free(peers->log);
    free(peers);
    agent->peers = NULL;
}
