/* SPDX-License-Identifier: Apache-2.0
 *
 * client_async.c: requests in flight, submissions, completions.
 *
 * Accounting: a request takes one credit for each block and one for itself, and every credit stands
 * for exactly one event that is still to come. A credit is free again when its event has reached
 * the caller (kvf_poll), a blocking call, or nobody (an abandoned request). Events in flight and
 * events that wait for kvf_poll together never exceed the credits, which bounds the event queue.
 *
 *   request id   63                        16 15       0
 *               +----------------------------+----------+
 *               |           serial           | 1 + slot |      never 0, never used twice
 *               +----------------------------+----------+
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/client_internal.h"

/* ----------------------------------------------------------------------------------------------
 * Tables
 */
static void tables_link(struct kvf_client *client)
{
    for (uint32_t i = 0; i < client->requests_size; i++) {
        client->requests[i].next_free = i + 1;
    }
    for (uint32_t i = 0; i < client->groups_size; i++) {
        client->groups[i].next_free = i + 1;
    }
    client->request_free = 0;
    client->group_free = 0;
}

/* The event queue for `size` events, in a new array. */
static int pending_resize(struct kvf_client *client, uint32_t size)
{
    struct kvf_event *pending = calloc(size, sizeof(*pending));

    if (pending == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < client->n_pending; i++) {
        pending[i] = client->pending[(client->pending_first + i) % client->pending_size];
    }
    free(client->pending);
    client->pending = pending;
    client->pending_size = size;
    client->pending_first = 0;
    return KVF_OK;
}

int kvf_requests_resize(struct kvf_client *client, uint32_t credits)
{
    /* every request in flight has at least one credit, and a group if it has blocks */
    uint32_t n_requests = credits < UINT16_MAX ? credits : UINT16_MAX;
    uint32_t n_groups = n_requests / 2 + credits / KVF_CLIENT_GROUP_BLOCKS + 1;

    assert(client->credits_in_use == 0);
    if (client->pending_size < client->n_pending + credits &&
        pending_resize(client, client->n_pending + credits) != KVF_OK) {
        return KVF_ERR_NO_MEMORY;
    }
    if (client->requests_size != n_requests) {
        struct kvf_client_request *requests = calloc(n_requests, sizeof(*requests));
        struct kvf_client_group *groups = calloc(n_groups, sizeof(*groups));

        if (requests == NULL || groups == NULL) {
            free(requests);
            free(groups);
            return KVF_ERR_NO_MEMORY;
        }
        free(client->requests);
        free(client->groups);
        client->requests = requests;
        client->groups = groups;
        client->requests_size = n_requests;
        client->groups_size = n_groups;
        tables_link(client);
    }
    return KVF_OK;
}

/* A free request slot with groups for n_blocks. The caller has checked the credits, which bound
 * both tables. */
static struct kvf_client_request *request_take(struct kvf_client *client, uint32_t n_blocks)
{
    struct kvf_client_request *request = &client->requests[client->request_free];
    uint32_t slot = client->request_free;

    assert(slot < client->requests_size);
    client->request_free = request->next_free;
    *request = (struct kvf_client_request){
        .id = ++client->request_serial << 16 | (slot + 1),
        .n_blocks = n_blocks,
    };
    for (uint32_t i = 0; i * KVF_CLIENT_GROUP_BLOCKS < n_blocks; i++) {
        struct kvf_client_group *group = &client->groups[client->group_free];

        assert(client->group_free < client->groups_size);
        request->groups[i] = (uint16_t)client->group_free;
        client->group_free = group->next_free;
        group->done = 0;
    }
    client->credits_in_use += n_blocks + 1;
    return request;
}

static void request_give(struct kvf_client *client, struct kvf_client_request *request)
{
    for (uint32_t i = 0; i * KVF_CLIENT_GROUP_BLOCKS < request->n_blocks; i++) {
        client->groups[request->groups[i]].next_free = client->group_free;
        client->group_free = request->groups[i];
    }
    request->id = 0;
    request->next_free = client->request_free;
    client->request_free = (uint32_t)(request - client->requests);
}

static struct kvf_client_request *request_find(const struct kvf_client *client, uint64_t id)
{
    uint32_t slot = (uint32_t)(id & UINT16_MAX) - 1;

    if (id == 0 || slot >= client->requests_size || client->requests[slot].id != id) {
        return NULL;
    }
    return &client->requests[slot];
}

static struct kvf_client_group *group_of(const struct kvf_client *client,
                                         const struct kvf_client_request *request, uint32_t block)
{
    return &client->groups[request->groups[block / KVF_CLIENT_GROUP_BLOCKS]];
}

/* ----------------------------------------------------------------------------------------------
 * Completions
 */

/* Hand an event to the poll that runs, or keep it. */
static void event_deliver(struct kvf_client *client, const struct kvf_event *event)
{
    if (client->n_pending == 0 && client->n_out < client->out_max) {
        client->out[client->n_out++] = *event;
        return;
    }
    assert(client->n_pending < client->pending_size);
    client->pending[(client->pending_first + client->n_pending) % client->pending_size] = *event;
    client->n_pending++;
}

/* A block has ended; value: what a stat counter says. */
static void block_done(struct kvf_client *client, struct kvf_client_request *request,
                       struct kvf_event *event, uint64_t value)
{
    struct kvf_client_group *group = group_of(client, request, event->index);
    uint32_t bit = event->index % KVF_CLIENT_GROUP_BLOCKS;

    group->done |= UINT64_C(1) << bit;
    request->n_done++;
    client->credits_in_use--;
    if (request->opcode == KVF_OP_PUT) {
        kvf_stage_area_give(&client->session->area, group->slots[bit]);
    }
    if (request->is_orphan) {
        return;
    }
    event->request = request->id;
    event->user = request->user;
    event->kind = KVF_EVENT_BLOCK;
    if (request->sink != NULL) {
        if (request->sink->on_block != NULL) {
            request->sink->on_block(request->sink, event, value);
        }
        return;
    }
    event_deliver(client, event);
}

/* The request has ended, all its blocks before it. */
static void request_done(struct kvf_client *client, struct kvf_client_request *request,
                         struct kvf_event *event)
{
    struct kvf_client_sink *sink = request->sink;

    client->credits_in_use--;
    event->request = request->id;
    event->user = request->user;
    event->kind = KVF_EVENT_REQUEST;
    if (!request->is_orphan && sink != NULL) {
        sink->is_used = false;
        sink->is_done = true;
        sink->status = event->hit.status;
        sink->succeeded = event->index;
        sink->lookup = event->lookup;
    } else if (!request->is_orphan) {
        event_deliver(client, event);
    }
    request_give(client, request);
}

/* Where a get's record lies. KVF_OK; KVF_ERR_PROTOCOL: not inside a mapped piece. */
static int hit_locate(struct kvf_client *client, const struct kvf_shm_cqe *cqe,
                      struct kvf_client_piece **piece_out)
{
    struct kvf_session *session = client->session;
    struct kvf_client_piece *piece = kvf_session_piece(session, cqe->piece);

    if (piece == NULL && session->state == KVF_SESSION_LIVE) {
        /* its announcement may still wait in the socket: it was sent first */
        kvf_session_tend(client, true);
        session = client->session;
        if (session == NULL || session->state != KVF_SESSION_LIVE) {
            return KVF_ERR_DISCONNECTED;
        }
        piece = kvf_session_piece(session, cqe->piece);
    }
    if (piece == NULL || cqe->offset % KVF_PROTO_PAGE_BYTES != 0 ||
        cqe->record_bytes <= KVF_RECORD_PAGE_BYTES || cqe->record_bytes > KVF_PROTO_RECORD_MAX ||
        cqe->offset >= piece->bytes || cqe->record_bytes > piece->bytes - cqe->offset) {
        return KVF_ERR_PROTOCOL;
    }
    *piece_out = piece;
    return KVF_OK;
}

/* The same in the memory of the client's GPU: the daemon knows that it is mapped. */
static int hit_locate_device(const struct kvf_client *client,
                             const struct kvf_client_request *request,
                             const struct kvf_shm_cqe *cqe, struct kvf_client_piece **piece_out)
{
    struct kvf_client_piece *piece = kvf_session_device_piece(client->session, cqe->piece);

    if (!request->takes_device || piece == NULL || cqe->offset % KVF_PROTO_PAGE_BYTES != 0 ||
        cqe->record_bytes <= KVF_RECORD_PAGE_BYTES || cqe->record_bytes > KVF_PROTO_RECORD_MAX ||
        cqe->offset >= piece->bytes ||
        KVF_SHM_DEVICE_HEAD_BYTES + cqe->record_bytes > piece->bytes - cqe->offset) {
        return KVF_ERR_PROTOCOL;
    }
    *piece_out = piece;
    return KVF_OK;
}

/* The completion of one block. KVF_OK, or why the session must end. */
static int on_block(struct kvf_client *client, struct kvf_client_request *request,
                    const struct kvf_shm_cqe *cqe)
{
    struct kvf_event event = {.index = cqe->index};
    struct kvf_client_piece *piece = NULL;
    uint64_t handle;
    bool is_hit = request->opcode == KVF_OP_GET && cqe->status == KVF_OK;
    int status;

    if (cqe->index >= request->n_blocks || (cqe->lease != 0) != is_hit ||
        (group_of(client, request, cqe->index)->done >> cqe->index % KVF_CLIENT_GROUP_BLOCKS & 1)) {
        return KVF_ERR_PROTOCOL;
    }
    event.hit.status = cqe->status;
    event.hit.tier = cqe->tier;
    if (is_hit && request->is_orphan) {
        kvf_lease_give_up(client->session, cqe->lease);
    } else if (is_hit) {
        bool is_device = cqe->tier == KVF_TIER_HBM;

        status = is_device ? hit_locate_device(client, request, cqe, &piece)
                           : hit_locate(client, cqe, &piece);
        if (status == KVF_OK) {
            status = kvf_lease_note(client->session, cqe->lease, piece, &handle);
        }
        if (status != KVF_OK) {
            return status;
        }
        if (!is_device) { /* else nothing of it has an address on the host */
            event.hit.record = (const uint8_t *)piece->base + cqe->offset;
            event.hit.payload = (const uint8_t *)event.hit.record + KVF_RECORD_PAGE_BYTES;
        }
        event.hit.record_bytes = cqe->record_bytes;
        event.hit.payload_bytes = cqe->record_bytes - KVF_RECORD_PAGE_BYTES;
        event.hit.lease = handle;
    }
    block_done(client, request, &event, cqe->offset);
    return KVF_OK;
}

static int on_request(struct kvf_client *client, struct kvf_client_request *request,
                      const struct kvf_shm_cqe *cqe)
{
    struct kvf_event event = {.index = cqe->index};
    bool is_lookup = request->opcode == KVF_OP_LOOKUP;
    int status = KVF_OK;

    if (request->n_done != request->n_blocks || (cqe->lease != 0 && !is_lookup) ||
        (!is_lookup && cqe->index > request->n_blocks)) {
        return KVF_ERR_PROTOCOL;
    }
    event.hit.status = cqe->status;
    if (is_lookup) {
        uint32_t longest = request->n_chain + (cqe->values[3] != 0); /* a tail is a chunk, too */

        if (cqe->values[0] > longest || cqe->values[1] > cqe->values[0] ||
            cqe->values[2] > longest || cqe->values[3] > request->n_tails) {
            return KVF_ERR_PROTOCOL;
        }
        event.lookup.run_chunks = cqe->values[0];
        event.lookup.ready_chunks = cqe->values[1];
        event.lookup.coming_chunks = cqe->values[2];
        event.lookup.tail_index = (int32_t)cqe->values[3] - 1;
        if (cqe->lease != 0 && request->is_orphan) {
            kvf_lease_give_up(client->session, cqe->lease);
        } else if (cqe->lease != 0) {
            status = kvf_lease_note(client->session, cqe->lease, NULL, &event.lookup.lease);
        }
    }
    if (status == KVF_OK) {
        request_done(client, request, &event);
    }
    return status;
}

void kvf_requests_drain(struct kvf_client *client, bool all)
{
    struct kvf_shm_cqe cqe;
    const char *why = "the daemon's completion is impossible";

    while (client->session != NULL && client->session->state >= KVF_SESSION_LIVE &&
           (all || client->n_out < client->out_max)) {
        struct kvf_client_request *request;
        int status = kvf_ring_client_take(&client->session->ring, &cqe);

        if (status == KVF_EMPTY) {
            return;
        }
        if (status == KVF_OK) {
            status = kvf_shm_cqe_check(&cqe, &why);
        }
        request = status == KVF_OK ? request_find(client, cqe.request) : NULL;
        if (request == NULL) {
            status = KVF_ERR_PROTOCOL;
        } else if (cqe.kind == KVF_CQE_BLOCK) {
            status = on_block(client, request, &cqe);
        } else {
            status = on_request(client, request, &cqe);
        }
        if (status != KVF_OK) {
            /* a lost session is being emptied already: what is wrong there is not worth more */
            kvf_session_break(client, 0, why);
            return;
        }
    }
}

void kvf_requests_fail(struct kvf_client *client)
{
    for (uint32_t i = 0; i < client->requests_size; i++) {
        struct kvf_client_request *request = &client->requests[i];
        struct kvf_event event;

        if (request->id == 0) {
            continue;
        }
        for (uint32_t b = 0; b < request->n_blocks; b++) {
            if ((group_of(client, request, b)->done >> b % KVF_CLIENT_GROUP_BLOCKS & 1) == 0) {
                event = (struct kvf_event){.index = b, .hit.status = KVF_ERR_DISCONNECTED};
                block_done(client, request, &event, 0);
            }
        }
        event = (struct kvf_event){.hit.status = KVF_ERR_DISCONNECTED};
        event.lookup.tail_index = request->opcode == KVF_OP_LOOKUP ? -1 : 0;
        request_done(client, request, &event);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Submissions
 */

/* Can a request of so many blocks and key entries be queued now? */
static int submit_room(struct kvf_client *client, uint32_t n_blocks, uint32_t n_entries)
{
    struct kvf_session *session;
    uint32_t used;
    int status;

    kvf_session_tend(client, false);
    if (!kvf_session_is_live(client)) {
        return kvf_session_down_status(client);
    }
    session = client->session;
    if (n_blocks + 1 > client->credits) {
        return KVF_ERR_TOO_LARGE;
    }
    used = client->credits_in_use + client->n_pending;
    if (used > client->credits || n_blocks + 1 > client->credits - used) {
        return KVF_ERR_BUSY;
    }
    if (client->request_free == client->requests_size) {
        return KVF_ERR_BUSY;
    }
    kvf_lease_flush(session);
    if (session->n_deferred > 0) {
        return KVF_ERR_BUSY;
    }
    status = kvf_ring_client_room(&session->ring, n_entries);
    if (status == KVF_ERR_PROTOCOL) {
        kvf_session_break(client, 0, "the daemon's ring indices are impossible");
        status = KVF_ERR_DISCONNECTED;
    }
    return status;
}

/* Queue a submission whose keys are put already. */
static void submit(struct kvf_client *client, struct kvf_client_request *request,
                   struct kvf_shm_sqe *sqe, struct kvf_client_sink *sink, uint64_t user,
                   uint64_t *request_out)
{
    request->opcode = sqe->opcode;
    request->user = user;
    request->sink = sink;
    if (sink != NULL) {
        sink->is_used = true;
        sink->is_done = false;
    }
    sqe->request = request->id;
    kvf_ring_client_push(&client->session->ring, sqe);
    if (kvf_ring_client_publish(&client->session->ring)) {
        kvf_session_wake_daemon(client->session);
    }
    *request_out = request->id;
}

static bool key_ok(const struct kvf_key *key)
{
    return key->data != NULL && key->bytes >= KVF_KEY_BYTES_MIN && key->bytes <= KVF_KEY_BYTES_MAX;
}

static void key_fill(struct kvf_shm_key *entry, const struct kvf_key *key)
{
    *entry = (struct kvf_shm_key){.key_bytes = (uint16_t)key->bytes};
    memcpy(entry->key, key->data, key->bytes);
}

int kvf_request_plain(struct kvf_client *client, uint8_t opcode, struct kvf_client_sink *sink,
                      uint64_t *request_out)
{
    struct kvf_shm_sqe sqe = {.opcode = opcode};
    uint32_t n_blocks = kvf_shm_sqe_blocks(&sqe);
    int status = submit_room(client, n_blocks, 0);

    if (status == KVF_OK) {
        submit(client, request_take(client, n_blocks), &sqe, sink, 0, request_out);
    }
    return status;
}

int kvf_request_keys(struct kvf_client *client, uint8_t opcode, const struct kvf_key *keys,
                     uint32_t n, struct kvf_shm_sqe *sqe, struct kvf_client_sink *sink,
                     uint64_t user, uint64_t *request_out)
{
    struct kvf_client_request *request;
    int status;

    if (keys == NULL || n == 0 || n > KVF_REQUEST_KEYS_MAX) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (!key_ok(&keys[i])) {
            return KVF_ERR_INVALID;
        }
    }
    sqe->opcode = opcode;
    sqe->n_keys = (uint16_t)n;
    sqe->n_entries = (uint16_t)n;
    status = submit_room(client, kvf_shm_sqe_blocks(sqe), n);
    if (status != KVF_OK) {
        return status;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct kvf_shm_key entry;

        key_fill(&entry, &keys[i]);
        kvf_ring_client_key_put(&client->session->ring, i, &entry);
    }
    request = request_take(client, kvf_shm_sqe_blocks(sqe));
    request->n_tails = sqe->n_tails;
    request->n_chain = n - sqe->n_tails;
    request->takes_device = opcode == KVF_OP_GET && (sqe->flags & KVF_SQE_DEVICE) != 0;
    submit(client, request, sqe, sink, user, request_out);
    return KVF_OK;
}

/* --- put -------------------------------------------------------------------------------------- */
static bool item_ok(const struct kvf_client *client, const struct kvf_put_item *item)
{
    if (item->struct_bytes != sizeof(*item) || !key_ok(&item->key) ||
        (item->supersedes.data != NULL && !key_ok(&item->supersedes))) {
        return false;
    }
    switch (item->source) {
    case KVF_SOURCE_VIEW:
        return client->has_geometry && item->kv != NULL &&
               item->kv->struct_bytes == sizeof(*item->kv) && item->kv->tokens_a_page != 0 &&
               item->n_tokens <= client->geometry.chunk_tokens;
    case KVF_SOURCE_BYTES:
        return !client->has_geometry && item->data != NULL && item->data_bytes != 0;
    default:
        return item->source == KVF_SOURCE_STAGED;
    }
}

static int put_check(const struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                     const struct kvf_put_options *options)
{
    const uint32_t either = KVF_PUT_DURABLE | KVF_PUT_NO_WRITE;

    if (items == NULL || n == 0 || n > KVF_REQUEST_KEYS_MAX ||
        client->hello.shard == KVF_SHARD_NONE) {
        return KVF_ERR_INVALID;
    }
    if (options != NULL &&
        (options->struct_bytes != sizeof(*options) || (options->flags & ~either) != 0 ||
         options->flags == either || options->priority > 2 ||
         (options->parent.data != NULL && !key_ok(&options->parent)))) {
        return KVF_ERR_INVALID;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (!item_ok(client, &items[i])) {
            return KVF_ERR_INVALID;
        }
    }
    return KVF_OK;
}

/* Give back what was staged for items [0, n) of a put that is not going to be queued. Slots of the
 * caller's stay the caller's. */
static void put_unstage(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n)
{
    struct kvf_stage_area *area = &client->session->area;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = (uint32_t)(client->keys[i].stage_offset / KVF_STAGE_PAGE_BYTES);

        if (items[i].source == KVF_SOURCE_STAGED) {
            area->entries[page].is_in_flight = false;
            client->session->n_slots++;
        } else {
            kvf_stage_area_give(area, page);
        }
    }
}

/* Stage items in order into client->keys until one does not fit, or the batch has used max_pages of
 * staging. Returns how many; *status_out says why the next one is not among them. */
static uint32_t put_stage(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                          uint32_t max_pages, int *status_out)
{
    struct kvf_stage_area *area = &client->session->area;
    uint32_t used = 0;
    uint32_t i;

    *status_out = KVF_OK;
    for (i = 0; i < n && (i == 0 || used < max_pages); i++) {
        struct kvf_shm_key *entry = &client->keys[i];
        uint32_t record_bytes = 0;
        uint32_t page = 0;

        *status_out = kvf_stage_item(client, &items[i], &page, &record_bytes);
        if (*status_out != KVF_OK) {
            return i;
        }
        key_fill(entry, &items[i].key);
        entry->token_start = items[i].token_start;
        entry->stage_offset = (uint64_t)page * KVF_STAGE_PAGE_BYTES;
        entry->record_bytes = record_bytes;
        used += area->entries[page].pages;
        /* at once, so that an item that names the same slot again is refused */
        area->entries[page].is_in_flight = true;
        client->session->n_slots -= items[i].source == KVF_SOURCE_STAGED;
    }
    return i;
}

/* Entries behind the keys: the parent, then one for each superseded key. Returns how many entries
 * there are in all. */
static uint32_t put_name(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                         const struct kvf_key *parent)
{
    uint32_t n_entries = n;

    if (parent != NULL && parent->data != NULL) {
        key_fill(&client->keys[n_entries++], parent);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].supersedes.data != NULL) {
            key_fill(&client->keys[n_entries++], &items[i].supersedes);
            client->keys[i].supersedes = (uint16_t)n_entries;
        }
    }
    return n_entries;
}

int kvf_request_put(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                    const struct kvf_put_options *options, struct kvf_client_sink *sink,
                    uint64_t user, uint32_t *taken_out, uint64_t *request_out)
{
    struct kvf_put_options none = {0};
    const struct kvf_put_options *o = options != NULL ? options : &none;
    struct kvf_client_request *request;
    struct kvf_shm_sqe sqe = {.opcode = KVF_OP_PUT};
    uint32_t max_pages = UINT32_MAX;
    uint32_t n_entries;
    uint32_t n_staged;
    int status = put_check(client, items, n, options);

    if (status != KVF_OK) {
        return status;
    }
    /* room for the worst case of entries, asked before any encoding work is done */
    status = submit_room(client, taken_out != NULL ? 1 : n, 2 * n + 1);
    if (status != KVF_OK) {
        return status;
    }
    if (taken_out != NULL) {
        uint32_t credits = client->credits - client->credits_in_use - client->n_pending;

        n = n < credits - 1 ? n : credits - 1;
        /* Half of staging a batch: the other half is encoded into while this one is stored. */
        max_pages = client->session->area.n_pages / 2;
    }
    n_staged = put_stage(client, items, n, max_pages, &status);
    if (n_staged == 0 || (taken_out == NULL && n_staged < n)) {
        put_unstage(client, items, n_staged);
        return status;
    }
    n = n_staged;
    n_entries = put_name(client, items, n, &o->parent);
    request = request_take(client, n);
    for (uint32_t i = 0; i < n_entries; i++) {
        kvf_ring_client_key_put(&client->session->ring, i, &client->keys[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        group_of(client, request, i)->slots[i % KVF_CLIENT_GROUP_BLOCKS] =
            (uint32_t)(client->keys[i].stage_offset / KVF_STAGE_PAGE_BYTES);
    }
    sqe.n_keys = (uint16_t)n;
    sqe.n_entries = (uint16_t)n_entries;
    sqe.flags = (uint8_t)(((o->flags & KVF_PUT_DURABLE) != 0 ? KVF_SQE_DURABLE : 0) |
                          ((o->flags & KVF_PUT_NO_WRITE) != 0 ? KVF_SQE_NO_WRITE : 0) |
                          (o->parent.data != NULL ? KVF_SQE_HAS_PARENT : 0) |
                          (sink != NULL && sink->is_unsummed ? KVF_SQE_UNSUMMED : 0));
    sqe.budget_ms = o->budget_ms != 0 ? o->budget_ms : KVF_CLIENT_PUT_MS;
    sqe.depth = o->depth;
    sqe.ttl_s = o->ttl_s;
    sqe.priority = o->priority;
    submit(client, request, &sqe, sink, user, request_out);
    if (taken_out != NULL) {
        *taken_out = n;
    }
    return KVF_OK;
}

bool kvf_get_sqe(const struct kvf_client *client, const struct kvf_get_options *options,
                 struct kvf_shm_sqe *sqe)
{
    if (client->hello.shard == KVF_SHARD_NONE ||
        (options != NULL && (options->struct_bytes != sizeof(*options) || options->flags != 0))) {
        return false;
    }
    sqe->budget_ms = options != NULL && options->budget_ms != 0 ? options->budget_ms
                                                                : KVF_CLIENT_GET_MS;
    return true;
}

bool kvf_lookup_sqe(uint32_t n, const struct kvf_lookup_options *options, struct kvf_shm_sqe *sqe)
{
    if (options == NULL) {
        return true;
    }
    if (options->struct_bytes != sizeof(*options) ||
        (options->flags & ~(uint32_t)(KVF_LOOKUP_LEASE | KVF_LOOKUP_PREFETCH)) != 0 ||
        options->n_tail_keys > KVF_TAIL_KEYS_MAX || options->n_tail_keys > n) {
        return false;
    }
    sqe->flags = (uint8_t)(((options->flags & KVF_LOOKUP_LEASE) != 0 ? KVF_SQE_LEASE : 0) |
                           ((options->flags & KVF_LOOKUP_PREFETCH) != 0 ? KVF_SQE_PREFETCH : 0));
    sqe->budget_ms = options->budget_ms;
    sqe->n_tails = (uint16_t)options->n_tail_keys;
    return true;
}

void kvf_request_cancel(struct kvf_client *client, uint64_t id)
{
    struct kvf_client_request *request = request_find(client, id);

    if (request != NULL && !request->is_canceled) {
        request->is_canceled = true;
        kvf_lease_send(client->session, KVF_OP_CANCEL, id);
    }
}

void kvf_request_abandon(struct kvf_client *client, uint64_t id)
{
    struct kvf_client_request *request = request_find(client, id);

    if (request != NULL) {
        request->is_orphan = true;
        kvf_request_cancel(client, id);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Public calls
 */

/* Every submit call ends here. */
static int submit_end(struct kvf_client *client, int status)
{
    kvf_client_leave(client);
    return status;
}

int kvf_submit_put(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
                   const struct kvf_put_options *options, uint64_t user, uint64_t *request_out)
{
    if (client == NULL || request_out == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    return submit_end(client,
                      kvf_request_put(client, items, n, options, NULL, user, NULL, request_out));
}

int kvf_submit_get(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                   const struct kvf_get_options *options, uint64_t user, uint64_t *request_out)
{
    struct kvf_shm_sqe sqe = {0};

    if (client == NULL || request_out == NULL || !kvf_get_sqe(client, options, &sqe)) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    return submit_end(client,
                      kvf_request_keys(client, KVF_OP_GET, keys, n, &sqe, NULL, user, request_out));
}

int kvf_submit_lookup(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                      const struct kvf_lookup_options *options, uint64_t user,
                      uint64_t *request_out)
{
    struct kvf_shm_sqe sqe = {0};

    if (client == NULL || request_out == NULL || !kvf_lookup_sqe(n, options, &sqe)) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    return submit_end(
        client, kvf_request_keys(client, KVF_OP_LOOKUP, keys, n, &sqe, NULL, user, request_out));
}

int kvf_submit_prefetch(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                        uint64_t user, uint64_t *request_out)
{
    struct kvf_shm_sqe sqe = {0};

    if (client == NULL || request_out == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    return submit_end(
        client, kvf_request_keys(client, KVF_OP_PREFETCH, keys, n, &sqe, NULL, user, request_out));
}

int kvf_submit_evict(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                     uint64_t user, uint64_t *request_out)
{
    struct kvf_shm_sqe sqe = {0};

    if (client == NULL || request_out == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    return submit_end(
        client, kvf_request_keys(client, KVF_OP_EVICT, keys, n, &sqe, NULL, user, request_out));
}

static void pending_take(struct kvf_client *client)
{
    while (client->n_pending > 0 && client->n_out < client->out_max) {
        client->out[client->n_out++] = client->pending[client->pending_first];
        client->pending_first = (client->pending_first + 1) % client->pending_size;
        client->n_pending--;
    }
}

/* What a poll answers now; KVF_EMPTY: nothing so far. */
static int poll_once(struct kvf_client *client)
{
    bool is_over;

    pending_take(client);
    kvf_requests_drain(client, false);
    if (client->n_out > 0) {
        return KVF_OK;
    }
    is_over = client->session == NULL && (client->flags & KVF_ATTACH_NO_RECONNECT) != 0;
    if (client->is_break_unreported || is_over) {
        client->is_break_unreported = false;
        return KVF_ERR_DISCONNECTED;
    }
    return KVF_EMPTY;
}

int kvf_poll(struct kvf_client *client, struct kvf_event *events_out, uint32_t max,
             uint32_t timeout_ms, uint32_t *n_out)
{
    uint64_t deadline_ns;
    int status;

    if (client == NULL || events_out == NULL || max == 0 || n_out == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    client->out = events_out;
    client->out_max = max;
    client->n_out = 0;
    /* who waits on kvf_fd is here because of the socket, perhaps */
    kvf_session_tend(client, client->wait->is_asked);
    status = poll_once(client);
    if (status == KVF_EMPTY && timeout_ms != 0) {
        deadline_ns = kvf_now_ns() + timeout_ms * KVF_NS_PER_MS;
        do {
            kvf_session_sleep(client, deadline_ns);
            status = poll_once(client);
        } while (status == KVF_EMPTY && kvf_now_ns() < deadline_ns);
    }
    *n_out = client->n_out;
    client->out = NULL;
    client->out_max = client->n_out = 0;
    kvf_session_arm(client);
    kvf_client_leave(client);
    return status;
}

int kvf_cancel(struct kvf_client *client, uint64_t request)
{
    struct kvf_client_request *found;
    int status = KVF_ERR_INVALID;

    if (client == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    found = request_find(client, request);
    if (found != NULL && found->sink == NULL && !found->is_orphan) {
        kvf_request_cancel(client, request);
        status = KVF_OK;
    }
    kvf_client_leave(client);
    return status;
}
