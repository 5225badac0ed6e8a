/* SPDX-License-Identifier: Apache-2.0
 *
 * client_lease.c: leases, and the small submissions that must never get lost.
 *
 *   public handle   63      48 47            16 15        0
 *                  +----------+----------------+-----------+
 *                  |  epoch   | generation low |   index   |
 *                  +----------+----------------+-----------+
 *
 * A release or cancel that finds the submission ring full waits in a queue that has room for every
 * lease and request there can be; requests are refused while it is not empty, so that it drains.
 */
#include <assert.h>

#include "client/client_internal.h"
#include "transport/shm_lease.h"

#define GENERATION_LOW 0xffffffffull

static uint64_t handle_pack(const struct kvf_session *session, uint64_t generation, uint32_t index)
{
    return (uint64_t)session->epoch << 48 | (generation & GENERATION_LOW) << KVF_LEASE_INDEX_BITS |
           index;
}

/* The lease of a handle and its session. KVF_OK; KVF_ERR_INVALID: there is none. */
static int handle_find(struct kvf_client *client, uint64_t handle, struct kvf_session **session_out,
                       uint32_t *index_out)
{
    struct kvf_session *session = kvf_session_find(client, (uint16_t)(handle >> 48));
    uint32_t index = kvf_lease_id_index(handle);
    uint64_t generation;

    if (session == NULL || session->leases == NULL || index >= session->ring.lease_entries) {
        return KVF_ERR_INVALID;
    }
    generation = session->leases[index].generation;
    if (generation == 0 || handle != handle_pack(session, generation, index)) {
        return KVF_ERR_INVALID;
    }
    *session_out = session;
    *index_out = index;
    return KVF_OK;
}

static bool is_good(const struct kvf_session *session, uint32_t index)
{
    return session->state == KVF_SESSION_LIVE &&
           kvf_lease_word_live(&session->ring.leases[index], session->leases[index].generation);
}

int kvf_lease_note(struct kvf_session *session, uint64_t id, struct kvf_client_piece *piece,
                   uint64_t *handle_out)
{
    uint32_t index = kvf_lease_id_index(id);

    if (index >= session->ring.lease_entries || session->leases[index].generation != 0) {
        return KVF_ERR_PROTOCOL;
    }
    __builtin_prefetch(&session->ring.leases[index]); /* for the release */
    session->leases[index].generation = kvf_lease_id_generation(id);
    session->leases[index].piece = piece;
    session->n_leases++;
    if (piece != NULL) {
        piece->n_leases++;
    }
    *handle_out = handle_pack(session, session->leases[index].generation, index);
    return KVF_OK;
}

void kvf_lease_give_up(struct kvf_session *session, uint64_t id)
{
    kvf_lease_send(session, KVF_OP_RELEASE, id);
}

static bool send_now(struct kvf_session *session, uint8_t opcode, uint64_t arg)
{
    struct kvf_shm_sqe sqe = {.opcode = opcode, .arg = arg};

    if (kvf_ring_client_room(&session->ring, 0) != KVF_OK) {
        return false; /* full; an impossible index is found by the next request */
    }
    kvf_ring_client_push(&session->ring, &sqe);
    /* nobody waits for a release or a report to be seen */
    if (opcode != KVF_OP_CANCEL ? kvf_ring_client_publish_calmly(&session->ring)
                                : kvf_ring_client_publish(&session->ring)) {
        kvf_session_wake_daemon(session);
    }
    return true;
}

void kvf_lease_send(struct kvf_session *session, uint8_t opcode, uint64_t arg)
{
    uint32_t slot;

    if (session->state != KVF_SESSION_LIVE ||
        (session->n_deferred == 0 && send_now(session, opcode, arg))) {
        return;
    }
    assert(session->n_deferred < session->deferred_size);
    slot = (session->deferred_first + session->n_deferred) % session->deferred_size;
    session->deferred[slot] = (struct kvf_client_deferred){.opcode = opcode, .arg = arg};
    session->n_deferred++;
}

bool kvf_lease_send_if_room(struct kvf_session *session, uint8_t opcode, uint64_t arg)
{
    return session->n_deferred == 0 && send_now(session, opcode, arg);
}

void kvf_lease_flush(struct kvf_session *session)
{
    while (session->n_deferred > 0) {
        const struct kvf_client_deferred *first = &session->deferred[session->deferred_first];

        if (!send_now(session, first->opcode, first->arg)) {
            return;
        }
        session->deferred_first = (session->deferred_first + 1) % session->deferred_size;
        session->n_deferred--;
    }
}

int kvf_lease_release(struct kvf_client *client, uint64_t lease)
{
    struct kvf_client_lease *entry;
    struct kvf_session *session;
    uint64_t id;
    uint32_t index;
    int status;

    if (client == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    status = handle_find(client, lease, &session, &index);
    if (status == KVF_OK) {
        entry = &session->leases[index];
        status = is_good(session, index) ? KVF_OK : KVF_ERR_LOST;
        id = kvf_lease_id_pack(entry->generation, index);
        session->n_leases--;
        if (entry->piece != NULL) {
            entry->piece->n_leases--;
        }
        *entry = (struct kvf_client_lease){0};
        kvf_lease_send(session, KVF_OP_RELEASE, id);
        kvf_session_trim(client, session);
    }
    kvf_client_leave(client);
    return status;
}

int kvf_lease_check(struct kvf_client *client, uint64_t lease)
{
    struct kvf_session *session;
    uint32_t index;
    int status;

    if (client == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    status = handle_find(client, lease, &session, &index);
    if (status == KVF_OK && !is_good(session, index)) {
        status = KVF_ERR_LOST;
    }
    kvf_client_leave(client);
    return status;
}
