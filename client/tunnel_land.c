/* SPDX-License-Identifier: Apache-2.0
 *
 * tunnel_land.c: completions of a daemon on another node, and the records of its hits.
 *
 * Completions reach the session in the order in which they came; a hit waits until its record is
 * whole and right.
 */
#include <stdlib.h>
#include <string.h>

#include "client/tunnel_internal.h"
#include "codec/codec.h"

/* ----------------------------------------------------------------------------------------------
 * Leases
 */

/* A free one, or lease_entries. */
static uint32_t lease_take(struct kvf_tunnel *tunnel)
{
    uint32_t entries = tunnel->ring.lease_entries;

    for (uint32_t i = 0; i < entries; i++) {
        uint32_t index = (tunnel->lease_next + i) & (entries - 1);

        if (tunnel->leases[index].state == KVF_TUNNEL_LEASE_FREE) {
            tunnel->lease_next = index + 1;
            tunnel->leases[index].generation++;
            return index;
        }
    }
    return entries;
}

static uint64_t lease_live(struct kvf_tunnel *tunnel, uint32_t index)
{
    struct kvf_tunnel_lease *lease = &tunnel->leases[index];

    kvf_lease_word_store(&tunnel->ring.leases[index], lease->generation, KVF_LEASE_LIVE);
    return kvf_lease_id_pack(lease->generation, index);
}

/* The place of a daemon's lease in lease_of. */
static uint32_t *far_of(struct kvf_tunnel *tunnel, uint64_t far_lease)
{
    return &tunnel->lease_of[kvf_lease_id_index(far_lease) & (tunnel->ring.lease_entries - 1)];
}

static void lease_free(struct kvf_tunnel *tunnel, uint32_t index)
{
    struct kvf_tunnel_lease *lease = &tunnel->leases[index];

    if (lease->state == KVF_TUNNEL_LEASE_LANDS || lease->state == KVF_TUNNEL_LEASE_HIT) {
        kvf_stage_area_give(&tunnel->area, lease->page);
    }
    if (lease->state == KVF_TUNNEL_LEASE_LANDS) {
        *far_of(tunnel, lease->far_lease) = 0;
    }
    lease->state = KVF_TUNNEL_LEASE_FREE;
    kvf_lease_word_store(&tunnel->ring.leases[index], lease->generation, KVF_LEASE_FREE);
}

bool kvf_tunnel_release(struct kvf_tunnel *tunnel, uint64_t *lease)
{
    uint32_t index = kvf_lease_id_index(*lease) & (tunnel->ring.lease_entries - 1);
    struct kvf_tunnel_lease *own = &tunnel->leases[index];
    bool is_far = own->state == KVF_TUNNEL_LEASE_FAR;

    if (own->generation != kvf_lease_id_generation(*lease) ||
        (!is_far && own->state != KVF_TUNNEL_LEASE_HIT)) {
        return false;
    }
    *lease = own->far_lease;
    lease_free(tunnel, index);
    return is_far;
}

/* ----------------------------------------------------------------------------------------------
 * Completions
 */

/* Room for a hit's record. Without any the record is let go by, and the hit is a miss. */
static void land_begin(struct kvf_tunnel *tunnel, struct kvf_tunnel_waiting *waiting)
{
    const struct kvf_shm_cqe *cqe = &waiting->cqe;
    uint32_t pages = (uint32_t)((cqe->record_bytes + KVF_STAGE_PAGE_BYTES - 1) /
                                KVF_STAGE_PAGE_BYTES);
    struct kvf_tunnel_lease *lease;
    uint32_t page;

    waiting->is_landing = true;
    waiting->lease = lease_take(tunnel);
    if (waiting->lease == tunnel->ring.lease_entries ||
        kvf_stage_area_take(&tunnel->area, pages, &page) != KVF_OK) {
        return;
    }
    lease = &tunnel->leases[waiting->lease];
    lease->state = KVF_TUNNEL_LEASE_LANDS;
    lease->far_lease = cqe->lease;
    lease->record_bytes = cqe->record_bytes;
    lease->come_bytes = 0;
    lease->page = page;
    *far_of(tunnel, cqe->lease) = 1 + waiting->lease;
    waiting->has_room = true;
}

static int on_completion(struct kvf_tunnel *tunnel, const struct kvf_shm_cqe *cqe)
{
    uint32_t size = tunnel->ring.cq_entries;
    struct kvf_tunnel_waiting *waiting;
    const char *why;

    if (kvf_shm_cqe_check(cqe, &why) != KVF_OK || tunnel->n_waiting >= tunnel->ring.reserved ||
        cqe->record_bytes > KVF_PROTO_RECORD_MAX) {
        return KVF_ERR_PROTOCOL; /* completions are no more than the requests have */
    }
    waiting = &tunnel->waiting[(tunnel->waiting_first + tunnel->n_waiting) & (size - 1)];
    tunnel->n_waiting++;
    *waiting = (struct kvf_tunnel_waiting){.cqe = *cqe};
    if (cqe->lease == 0) {
        return KVF_OK;
    }
    if (cqe->kind == KVF_CQE_BLOCK) {
        if (cqe->record_bytes <= KVF_RECORD_PAGE_BYTES || *far_of(tunnel, cqe->lease) != 0) {
            return KVF_ERR_PROTOCOL;
        }
        land_begin(tunnel, waiting);
        return KVF_OK;
    }
    waiting->lease = lease_take(tunnel);
    waiting->cqe.lease = 0; /* with none left here its blocks are not held */
    if (waiting->lease < tunnel->ring.lease_entries) {
        tunnel->leases[waiting->lease].state = KVF_TUNNEL_LEASE_FAR;
        tunnel->leases[waiting->lease].far_lease = cqe->lease;
        waiting->cqe.lease = lease_live(tunnel, waiting->lease);
    }
    return KVF_OK;
}

static int on_complete(struct kvf_tunnel *tunnel, const uint8_t *body, uint32_t bytes)
{
    int status = KVF_OK;

    for (uint32_t at = 0; at < bytes && status == KVF_OK; at += sizeof(struct kvf_shm_cqe)) {
        struct kvf_shm_cqe cqe;

        memcpy(&cqe, body + at, sizeof(cqe));
        status = on_completion(tunnel, &cqe);
    }
    return status;
}

/* ----------------------------------------------------------------------------------------------
 * Records
 */
static uint8_t *address_of(const struct kvf_tunnel *tunnel, const struct kvf_tunnel_lease *lease)
{
    return tunnel->landing + (uint64_t)lease->page * KVF_STAGE_PAGE_BYTES;
}

static int on_piece(struct kvf_tunnel *tunnel, const struct kvf_net_head *head, const void *body)
{
    uint32_t index = *far_of(tunnel, head->request);
    struct kvf_tunnel_lease *lease = index != 0 ? &tunnel->leases[index - 1] : NULL;

    if (lease == NULL || lease->far_lease != head->request) {
        return KVF_OK; /* one for which there was no room */
    }
    if (head->offset > lease->record_bytes ||
        head->body_bytes > lease->record_bytes - head->offset) {
        return KVF_ERR_PROTOCOL;
    }
    memcpy(address_of(tunnel, lease) + head->offset, body, head->body_bytes);
    lease->come_bytes += head->body_bytes;
    return KVF_OK;
}

static bool is_right(const struct kvf_tunnel *tunnel, const struct kvf_tunnel_lease *lease)
{
    const uint8_t *record = address_of(tunnel, lease);
    const struct kvf_record_page *page = (const void *)record;

    return lease->come_bytes == lease->record_bytes &&
           kvf_block_check(page, lease->record_bytes) == KVF_OK &&
           page->header.total_bytes == lease->record_bytes &&
           kvf_block_check_payload(page, record + KVF_RECORD_PAGE_BYTES) == KVF_OK;
}

/* Its request has one hit less, too. */
static int make_miss(struct kvf_tunnel *tunnel, struct kvf_shm_cqe *cqe)
{
    struct kvf_tunnel_failed *failed = tunnel->failed;

    while (failed != NULL && failed->request != cqe->request) {
        failed = failed->next;
    }
    if (failed == NULL) {
        failed = calloc(1, sizeof(*failed));
        if (failed == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        failed->request = cqe->request;
        failed->next = tunnel->failed;
        tunnel->failed = failed;
    }
    failed->n_blocks++;
    cqe->status = KVF_MISS;
    cqe->tier = 0;
    cqe->piece = 0;
    cqe->offset = 0;
    cqe->record_bytes = 0;
    cqe->lease = 0;
    return KVF_OK;
}

static int on_landed(struct kvf_tunnel *tunnel, const struct kvf_net_head *head, const void *body)
{
    struct kvf_net_status_body landed;
    uint32_t size = tunnel->ring.cq_entries;

    memcpy(&landed, body, sizeof(landed));
    for (uint32_t i = 0; i < tunnel->n_waiting; i++) {
        struct kvf_tunnel_waiting *waiting =
            &tunnel->waiting[(tunnel->waiting_first + i) & (size - 1)];
        struct kvf_tunnel_lease *lease;

        if (!waiting->is_landing || waiting->cqe.lease != head->request) {
            continue;
        }
        waiting->is_landing = false;
        lease = waiting->has_room ? &tunnel->leases[waiting->lease] : NULL;
        if (lease == NULL || landed.status != KVF_OK || !is_right(tunnel, lease)) {
            if (lease != NULL) {
                lease_free(tunnel, waiting->lease);
            }
            return make_miss(tunnel, &waiting->cqe);
        }
        *far_of(tunnel, head->request) = 0;
        lease->state = KVF_TUNNEL_LEASE_HIT;
        waiting->cqe.piece = KVF_TUNNEL_PIECE;
        waiting->cqe.offset = (uint64_t)lease->page * KVF_STAGE_PAGE_BYTES;
        waiting->cqe.lease = lease_live(tunnel, waiting->lease);
        return KVF_OK;
    }
    return KVF_ERR_PROTOCOL;
}

int kvf_tunnel_land(struct kvf_tunnel *tunnel, const struct kvf_net_head *head, const void *body)
{
    switch (head->type) {
    case KVF_NET_COMPLETE:
        return on_complete(tunnel, body, head->body_bytes);
    case KVF_NET_PIECE:
        return on_piece(tunnel, head, body);
    case KVF_NET_LANDED:
        return on_landed(tunnel, head, body);
    default:
        return KVF_ERR_PROTOCOL;
    }
}

/* ----------------------------------------------------------------------------------------------
 * To the session
 */

/* A request some of whose hits became misses here has fewer of them. */
static void correct(struct kvf_tunnel *tunnel, struct kvf_shm_cqe *cqe)
{
    struct kvf_tunnel_failed **link = &tunnel->failed;
    struct kvf_tunnel_failed *failed;

    while (*link != NULL && (*link)->request != cqe->request) {
        link = &(*link)->next;
    }
    failed = *link;
    if (failed == NULL || cqe->kind != KVF_CQE_REQUEST) {
        return;
    }
    cqe->index -= cqe->index < failed->n_blocks ? cqe->index : failed->n_blocks;
    if (cqe->status == KVF_OK || cqe->status == KVF_PARTIAL) {
        cqe->status = cqe->index > 0 ? KVF_PARTIAL : KVF_MISS;
    }
    *link = failed->next;
    free(failed);
}

unsigned kvf_tunnel_deliver(struct kvf_tunnel *tunnel)
{
    uint32_t size = tunnel->ring.cq_entries;
    unsigned n = 0;

    while (tunnel->n_waiting > 0 && !tunnel->waiting[tunnel->waiting_first].is_landing) {
        struct kvf_tunnel_waiting *waiting = &tunnel->waiting[tunnel->waiting_first];

        correct(tunnel, &waiting->cqe);
        kvf_ring_daemon_complete(&tunnel->ring, &waiting->cqe);
        tunnel->waiting_first = (tunnel->waiting_first + 1) & (size - 1);
        tunnel->n_waiting--;
        n++;
    }
    if (n > 0 && kvf_ring_daemon_publish(&tunnel->ring)) {
        kvf_seqpacket_wake(tunnel->fd);
    }
    return n;
}
