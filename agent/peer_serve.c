/* SPDX-License-Identifier: Apache-2.0
 *
 * peer_serve.c: records for other nodes. One in memory goes out from where it lies, pinned until
 * the network has done with it; one on a drive is first brought into memory, as for a client. And
 * clients of other nodes, which are sessions like others.
 */
#include "agent/peers.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/fd.h"
#include "base/hash.h"
#include "base/mutant.h"
#include "transport/seqpacket.h"

static_assert((int)KVF_OFFENDERS_TENANTS_MAX >= (int)KVF_TENANTS_MAX,
              "each tenant has places for its offenders");
static_assert((int)KVF_NET_CLIENTS_MAX >= (int)KVF_TENANTS_MAX,
              "each tenant's share is one client");

static void give_up(struct kvf_peers *peers, struct kvf_peer_serve *serve)
{
    if (serve->slot != KVF_LOCATION_NONE && !KVF_MUTANT(peer_serve_unpinned) &&
        (!KVF_MUTANT(peer_serve_leaked) || serve->call.sent_bytes == serve->call.record_bytes)) {
        kvf_dram_unpin(peers->agent->dram_store, serve->slot);
    }
    kvf_pool_put(&peers->serves, serve);
}

void kvf_peers_serve(struct kvf_peers *peers, const struct kvf_net_event *event)
{
    struct kvf_agent *agent = peers->agent;
    struct kvf_peer_serve *serve = kvf_pool_get(&peers->serves);

    if (serve == NULL) {
        return; /* the other side's deadline ends it */
    }
    serve->is_refused = peers->serves.free_count < KVF_PEER_REFUSALS;
    serve->call.link = event->link;
    serve->call.lane = event->lane;
    serve->call.request = event->request;
    serve->call.owner = serve;
    memcpy(serve->key_id, event->key_id, sizeof(serve->key_id));
    serve->record_bytes = event->record_bytes;
    serve->shard = event->shard;
    serve->deadline_ns = agent->now_ns + agent->config->peers_timeout * KVF_NS_PER_S;
    serve->slot = KVF_LOCATION_NONE;
    *peers->waiting_end = serve;
    peers->waiting_end = &serve->next;
}

/* Is there something to say? False: the block is on its way into memory. */
static bool is_decided(struct kvf_peers *peers, struct kvf_peer_serve *serve)
{
    struct kvf_agent *agent = peers->agent;
    struct kvf_entry *entry = kvf_room_find(agent, serve->key_id, serve->shard);

    if (serve->is_refused) {
        serve->call.status = KVF_ERR_BUSY;
        return true;
    }
    serve->call.status = KVF_MISS;
    if (entry == NULL || entry->state == KVF_ENTRY_FILLING ||
        entry->record_bytes != serve->record_bytes) {
        return true;
    }
    if (kvf_entry_in_dram(entry)) {
        serve->slot = kvf_place_slot(agent, entry);
        if (!KVF_MUTANT(peer_serve_unpinned)) {
            kvf_dram_pin(agent->dram_store, serve->slot);
        }
        kvf_dram_touch(agent->dram_store, serve->slot);
        entry->is_hit = 1;
        serve->call.status = KVF_OK;
        serve->call.record = agent->dram->ops->address(agent->dram, serve->slot);
        serve->call.record_bytes = serve->record_bytes;
        return true;
    }
    if (entry->state == KVF_ENTRY_LOADING) {
        /* from another node: two that wait for each other would wait for nothing */
        return !kvf_entry_on_drive(entry) && !kvf_entry_in_hbm(agent, entry);
    }
    if (agent->now_ns >= serve->deadline_ns || agent->is_draining) {
        serve->call.status = KVF_ERR_BUSY;
        return true;
    }
    (void)kvf_place_load_for_peer(agent, entry); /* busy: once more in the next turn */
    return false;
}

/* What it has said is taken first, and nothing more after that: closing over it would overtake the
 * answer. */
static void refuse_client(int fd, const char *tenant)
{
    struct kvf_wire_welcome welcome = {.status = KVF_ERR_REFUSED};
    struct kvf_seqpacket_message received;
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];

    (void)shutdown(fd, SHUT_RD);
    while (kvf_seqpacket_recv(fd, data, sizeof(data), &received) == KVF_OK) {
        kvf_seqpacket_message_close(&received);
    }

    kvf_proto_head_init(&welcome.head, KVF_WIRE_WELCOME);
    (void)snprintf(welcome.text, sizeof(welcome.text),
                   "no socket of this daemon is tenant %s's; use a key of one that it has, or name "
                   "it in sockets",
                   tenant);
    (void)kvf_seqpacket_send(fd, &welcome, sizeof(welcome), NULL, 0);
    kvf_fd_close(&fd);
}

/* n_tenants: no tenant of this daemon. */
static uint16_t tenant_of(const struct kvf_agent *agent, const struct kvf_net_event *event)
{
    uint16_t tenant = 0;

    while (tenant < agent->n_tenants && strcmp(agent->tenants[tenant].name, event->name) != 0) {
        tenant++;
    }
    return tenant;
}

/* Whom the offences of a client are remembered of. Its incarnation is what it says; that it has the
 * tenant's key is what it has proved, and where it has connected from has been seen. Addresses are
 * hashed under a key of ours: nobody can look for one that stands for another. */
static uint64_t offender_of(const struct kvf_agent *agent, uint16_t tenant,
                            const struct kvf_net_event *event)
{
    static const uint8_t unknown[KVF_NET_FROM_BYTES];
    uint8_t hash[KVF_HASH_BYTES];
    uint64_t address = 0;

    if (memcmp(event->from, unknown, sizeof(unknown)) != 0) {
        kvf_mac_compute(agent->id_key, event->from, sizeof(event->from), hash);
        memcpy(&address, hash, sizeof(address));
    }
    return kvf_offence_remote(tenant, address);
}

void kvf_peers_client(struct kvf_peers *peers, const struct kvf_net_event *event)
{
    struct kvf_agent *agent = peers->agent;
    uint16_t tenant = tenant_of(agent, event);

    if (tenant == agent->n_tenants) {
        refuse_client(event->fd, event->name);
        return;
    }
    (void)kvf_session_adopt(agent, tenant, event->fd, offender_of(agent, tenant, event));
}

void kvf_peers_offence(struct kvf_peers *peers, const struct kvf_net_event *event)
{
    struct kvf_agent *agent = peers->agent;
    uint16_t tenant = tenant_of(agent, event);

    if (tenant < agent->n_tenants) {
        kvf_offence_note(&agent->offenders, offender_of(agent, tenant, event), agent->now_ns);
    }
}

unsigned kvf_peers_serve_waiting(struct kvf_peers *peers)
{
    struct kvf_peer_serve **link = &peers->waiting;
    unsigned n = 0;

    while (*link != NULL) {
        struct kvf_peer_serve *serve = *link;

        if (kvf_peer_link_find(peers, serve->call.link) == NULL) {
            *link = serve->next;
            give_up(peers, serve);
            continue;
        }
        if ((serve->slot == KVF_LOCATION_NONE && !is_decided(peers, serve)) ||
            kvf_net_serve(peers->net, &serve->call) != KVF_OK) {
            link = &serve->next;
            continue;
        }
        *link = serve->next;
        n++;
    }
    peers->waiting_end = link;
    return n;
}

void kvf_peers_served(struct kvf_peers *peers, struct kvf_net_serve *call)
{
    struct kvf_peer_serve *serve = call->owner;
    struct kvf_peer_link *link = kvf_peer_link_find(peers, call->link);

    if (call->status == KVF_OK && call->sent_bytes == call->record_bytes) {
        peers->agent->metrics.peer_served_blocks++;
        peers->agent->metrics.peer_served_bytes += call->record_bytes;
        if (link != NULL) {
            link->served_blocks++;
            link->served_bytes += call->record_bytes;
        }
    }
    give_up(peers, serve);
}
