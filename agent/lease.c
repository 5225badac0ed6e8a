/* SPDX-License-Identifier: Apache-2.0
 *
 * lease.c: what a client holds. A lease pins slots; its truth is here, in private memory, and one
 * word of the ring segment tells the client whether it is still good. Whatever takes memory away
 * from under a lease first stores LOST there (lose), and only then unpins.
 */
#include "agent/core.h"

#include <stdlib.h>
#include <string.h>

#include "base/mutant.h"
#include "transport/shm_lease.h"

#define NONE         KVF_INDEX_NONE
#define WORDS_A_LINE 8

/* The k-th lease to be given out first: neighbours in time have their words on different cache
 * lines, or the client's look at one would wait for what the daemon writes to the others. */
static uint32_t index_of(uint32_t k, uint32_t capacity)
{
    uint32_t n_lines = capacity / WORDS_A_LINE;

    return n_lines == 0 ? k : k % n_lines * WORDS_A_LINE + k / n_lines;
}

int kvf_lease_table_init(struct kvf_session *session, uint32_t capacity)
{
    assert(capacity > 0 && (capacity & (capacity - 1)) == 0);
    session->leases = calloc(capacity, sizeof(*session->leases));
    if (session->leases == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    session->lease_capacity = capacity;
    session->lease_free = NONE;
    for (uint32_t k = capacity; k-- > 0;) {
        uint32_t index = index_of(k, capacity);

        session->leases[index].newer = session->lease_free;
        session->lease_free = index;
    }
    session->lease_oldest = NONE;
    session->lease_newest = NONE;
    return KVF_OK;
}

void kvf_lease_table_fini(struct kvf_session *session)
{
    free(session->leases);
    session->leases = NULL;
    session->lease_capacity = 0;
}

static struct kvf_lease *find(struct kvf_session *session, uint64_t id)
{
    uint32_t index = kvf_lease_id_index(id);
    struct kvf_lease *lease;

    if (index >= session->lease_capacity) {
        return NULL;
    }
    lease = &session->leases[index];
    if (lease->state == KVF_LEASE_FREE || lease->generation != kvf_lease_id_generation(id)) {
        return NULL;
    }
    return lease;
}

int kvf_lease_begin(struct kvf_session *session, uint64_t *lease_out)
{
    uint32_t index = session->lease_free;
    struct kvf_lease *lease;

    if (index == NONE) {
        return KVF_ERR_BUSY;
    }
    lease = &session->leases[index];
    session->lease_free = lease->newer;
    lease->generation++;
    lease->created_ns = session->agent->now_ns;
    lease->pins = NULL;
    lease->bytes = 0;
    lease->state = KVF_LEASE_LIVE;
    lease->newer = NONE;
    lease->older = session->lease_newest;
    if (session->lease_newest != NONE) {
        session->leases[session->lease_newest].newer = index;
    } else {
        session->lease_oldest = index;
    }
    session->lease_newest = index;
    *lease_out = kvf_lease_id_pack(lease->generation, index);
    return KVF_OK;
}

/* May the client lease bytes more, of DRAM or of a GPU's memory? */
static bool has_share(const struct kvf_session *session, uint32_t device, uint64_t bytes)
{
    const struct kvf_agent *agent = session->agent;
    const struct kvf_tenant *tenant = &agent->tenants[session->tenant];
    uint64_t percent = (device != 0 ? agent->hbm[device - 1].bytes : agent->arena_bytes) / 100;
    uint64_t client_bytes = device != 0 ? session->hbm_leased_bytes : session->leased_bytes;
    uint64_t tenant_bytes = device != 0 ? tenant->hbm_leased_bytes : tenant->leased_bytes;

    return session->pins_count < KVF_PINS_A_CLIENT &&
           (client_bytes + bytes <= percent * agent->config->lease_client_share ||
            KVF_MUTANT(lease_share_ignored)) &&
           tenant_bytes + bytes <= percent * agent->config->lease_tenant_share;
}

static void count(struct kvf_session *session, const struct kvf_pin *pin, int64_t bytes)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_tenant *tenant = &agent->tenants[session->tenant];

    *(pin->device != 0 ? &session->hbm_leased_bytes : &session->leased_bytes) += (uint64_t)bytes;
    *(pin->device != 0 ? &tenant->hbm_leased_bytes : &tenant->leased_bytes) += (uint64_t)bytes;
    agent->leased_bytes += pin->device != 0 ? 0 : (uint64_t)bytes;
}

static struct kvf_tier *slots_of(const struct kvf_agent *agent, const struct kvf_pin *pin)
{
    return pin->device != 0 ? agent->hbm[pin->device - 1].slots : agent->dram_store;
}

/* device: 1 + GPU, or 0. */
static int add(struct kvf_session *session, uint64_t id, uint32_t device, kvf_location slot,
               uint64_t record_bytes, uint32_t order)
{
    struct kvf_agent *agent = session->agent;
    struct kvf_lease *lease = find(session, id);
    struct kvf_pin *pin;

    assert(lease != NULL);
    if (lease->state != KVF_LEASE_LIVE) {
        return KVF_ERR_LOST;
    }
    if (!has_share(session, device, record_bytes)) {
        return KVF_ERR_BUSY;
    }
    pin = kvf_pool_get(&agent->pins);
    if (pin == NULL) {
        return KVF_ERR_BUSY;
    }
    pin->slot = slot;
    pin->device = device;
    pin->bytes = record_bytes;
    pin->order = order;
    pin->next = lease->pins;
    if (!KVF_MUTANT(lease_unpinned)) {
        kvf_dram_pin(slots_of(agent, pin), slot);
    }
    session->pins_count++;
    lease->pins = pin;
    lease->bytes += record_bytes;
    count(session, pin, (int64_t)record_bytes);
    return KVF_OK;
}

int kvf_lease_add(struct kvf_session *session, uint64_t id, kvf_location slot,
                  uint64_t record_bytes, uint32_t order)
{
    return add(session, id, 0, slot, record_bytes, order);
}

int kvf_lease_add_hbm(struct kvf_session *session, uint64_t id, uint32_t device, kvf_location slot,
                      uint64_t record_bytes, uint32_t order)
{
    return add(session, id, 1 + device, slot, record_bytes, order);
}

static void unpin(struct kvf_session *session, struct kvf_lease *lease, struct kvf_pin *pin)
{
    struct kvf_agent *agent = session->agent;

    if (!KVF_MUTANT(lease_unpinned)) {
        kvf_dram_unpin(slots_of(agent, pin), pin->slot);
    }
    lease->bytes -= pin->bytes;
    count(session, pin, -(int64_t)pin->bytes);
    session->pins_count--;
    kvf_pool_put(&agent->pins, pin);
}

void kvf_lease_trim(struct kvf_session *session, uint64_t id, uint32_t order)
{
    struct kvf_lease *lease = find(session, id);
    struct kvf_pin **link = &lease->pins;

    while (*link != NULL) {
        struct kvf_pin *pin = *link;

        if (pin->order >= order) {
            *link = pin->next;
            unpin(session, lease, pin);
        } else {
            link = &pin->next;
        }
    }
}

bool kvf_lease_publish(struct kvf_session *session, uint64_t id)
{
    struct kvf_lease *lease = find(session, id);

    if (lease->state != KVF_LEASE_LIVE) {
        return false;
    }
    kvf_lease_word_store(&session->ring.leases[kvf_lease_id_index(id)], lease->generation,
                         KVF_LEASE_LIVE);
    return true;
}

static void end(struct kvf_session *session, struct kvf_lease *lease)
{
    uint32_t index = (uint32_t)(lease - session->leases);

    while (lease->pins != NULL) {
        struct kvf_pin *pin = lease->pins;

        lease->pins = pin->next;
        unpin(session, lease, pin);
    }
    if (lease->older != NONE) {
        session->leases[lease->older].newer = lease->newer;
    } else {
        session->lease_oldest = lease->newer;
    }
    if (lease->newer != NONE) {
        session->leases[lease->newer].older = lease->older;
    } else {
        session->lease_newest = lease->older;
    }
    lease->state = KVF_LEASE_FREE;
    lease->newer = session->lease_free;
    session->lease_free = index;
}

bool kvf_lease_end(struct kvf_session *session, uint64_t id)
{
    struct kvf_lease *lease = find(session, id);

    if (lease == NULL) {
        return false;
    }
    kvf_lease_word_store(&session->ring.leases[kvf_lease_id_index(id)], lease->generation,
                         KVF_LEASE_FREE);
    end(session, lease);
    return true;
}

/* Say LOST, then let the memory go. The lease itself stays until the client releases it. */
static void lose(struct kvf_session *session, struct kvf_lease *lease)
{
    uint32_t index = (uint32_t)(lease - session->leases);

    if (lease->state != KVF_LEASE_LIVE) {
        return;
    }
    if (!KVF_MUTANT(loss_unpublished)) {
        kvf_lease_word_store(&session->ring.leases[index], lease->generation, KVF_LEASE_LOST);
    }
    lease->state = KVF_LEASE_LOST;
    session->lost_leases++;
    session->agent->metrics.leases_lost++;
    while (lease->pins != NULL) {
        struct kvf_pin *pin = lease->pins;

        lease->pins = pin->next;
        unpin(session, lease, pin);
    }
}

void kvf_lease_lose_all(struct kvf_session *session)
{
    for (uint32_t i = session->lease_oldest; i != NONE; i = session->leases[i].newer) {
        lose(session, &session->leases[i]);
    }
}

/* device: as in a pin; slot KVF_LOCATION_NONE: any. */
static void lose_pinned(struct kvf_agent *agent, uint32_t device, kvf_location slot)
{
    for (uint32_t s = 0; s < agent->sessions_capacity; s++) {
        struct kvf_session *session = &agent->sessions[s];

        if (session->state != KVF_SESSION_READY) {
            continue;
        }
        for (uint32_t i = session->lease_oldest; i != NONE; i = session->leases[i].newer) {
            const struct kvf_pin *pin = session->leases[i].pins;

            while (pin != NULL &&
                   (pin->device != device || (pin->slot != slot && slot != KVF_LOCATION_NONE))) {
                pin = pin->next;
            }
            if (pin != NULL) {
                lose(session, &session->leases[i]);
            }
        }
    }
}

void kvf_lease_lose_slot(struct kvf_agent *agent, kvf_location slot)
{
    lose_pinned(agent, 0, slot);
}

void kvf_lease_lose_hbm(struct kvf_agent *agent, uint32_t device, kvf_location slot)
{
    lose_pinned(agent, 1 + device, slot);
}

void kvf_lease_end_all(struct kvf_session *session)
{
    while (session->lease_oldest != NONE) {
        end(session, &session->leases[session->lease_oldest]);
    }
}

uint64_t kvf_lease_oldest_age_ns(const struct kvf_session *session)
{
    if (session->lease_oldest == NONE) {
        return 0;
    }
    return session->agent->now_ns - session->leases[session->lease_oldest].created_ns;
}
