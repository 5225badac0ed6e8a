/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_evict.c: who has to go.
 *
 * One slot makes room for another of its class. When a class has nothing to give, or another class
 * of the tenant is far colder, a window of areas is emptied for it (a claim). When a tenant has
 * less than its share of the pieces, one is emptied for it (a handover). Emptying can mean
 * thousands of slots and must wait for pins, so that both go on in small portions from poll.
 *
 * Every host->evict drops a whole set: any slot may become free under our hands, areas may leave
 * their run. So nothing is remembered across it but indexes, which are looked at anew.
 */
#include "tiers/tier_dram_internal.h"

enum evict_limits {
    /* A look at all areas, whether other classes are colder, is made after so many evictions of a
     * class, and so many more that it costs an eviction no more than a few areas. */
    EVICTIONS_A_LOOK = 16,
    AREAS_AN_EVICTION = 16,
    /* "Far colder": not used for four times as long, and at least a second longer. */
    COLDER_FACTOR = 4,
    COLDER_STAMPS = 60,
    /* Windows that may turn out to be in use before a claim is given up. */
    CLAIM_TRIES = 4,
};

/* A claim whose slots are still pinned after so long is given up, so that the areas do useful work
 * again; handovers wait until leases end, which the agent bounds. */
#define CLAIM_NS      (1 * KVF_NS_PER_S)
#define DRAIN_WAIT_NS (10 * KVF_NS_PER_MS)

/* ---- one slot -------------------------------------------------------------------------------- */

static bool may_evict(const struct dram_tier *dram, uint32_t slot_index)
{
    const struct kvf_tier_host *host = &dram->base.host;

    return host->may_evict(host->ctx, dram_location(dram, slot_index),
                           dram->slots[slot_index].cookie);
}

static void evict(struct dram_tier *dram, uint32_t slot_index)
{
    const struct kvf_tier_host *host = &dram->base.host;
    uint32_t generation = dram->slots[slot_index].generation;

    dram->stat.evictions++;
    dram->is_evicting = true;
    host->evict(host->ctx, dram_location(dram, slot_index), dram->slots[slot_index].cookie);
    dram->is_evicting = false;
    assert(dram->slots[slot_index].generation == generation &&
           dram->slots[slot_index].state == KVF_SLOT_FREE);
}

bool dram_evict_one(struct dram_tier *dram, struct dram_pool *pool, uint32_t *scan_left)
{
    struct dram_list *segments = pool->segments;

    while (*scan_left > 0) {
        uint8_t segment = segments[DRAM_PROBATION].count > 0 ? DRAM_PROBATION : DRAM_PROTECTED;
        uint32_t slot_index = segments[segment].last;
        struct dram_slot *slot;

        if (slot_index == DRAM_NONE) {
            return false;
        }
        (*scan_left)--;
        slot = &dram->slots[slot_index];
        if (slot->lives > 0) {
            slot->lives--;
            dram->stat.reinsertions++;
        } else if (may_evict(dram, slot_index)) {
            pool->n_evictions++;
            evict(dram, slot_index);
            return true;
        }
        /* spared or in use: neither is cold, and the next call shall not meet it again at once */
        dram_list_remove(dram, slot_index);
        dram_list_add(dram, slot_index, segment);
    }
    return false;
}

/* ---- emptying a range of areas --------------------------------------------------------------- */

static void drain_start(struct dram_tier *dram, struct dram_drain *drain)
{
    for (uint32_t i = 0; i < drain->n_areas; i++) {
        struct dram_area *area = &dram->areas[drain->first_area + i];

        if (area->state == DRAM_AREA_HEAD || area->state == DRAM_AREA_MEMBER) {
            dram_run_set_draining(dram, &dram->areas[area->head], true);
        }
    }
    drain->is_active = true;
    drain->area = drain->first_area;
    drain->slot = 0;
}

static void drain_stop(struct dram_tier *dram, struct dram_drain *drain)
{
    drain->is_active = false;
    for (uint32_t i = 0; i < drain->n_areas; i++) {
        struct dram_area *area = &dram->areas[drain->first_area + i];

        if (area->state == DRAM_AREA_HEAD || area->state == DRAM_AREA_MEMBER) {
            dram_run_set_draining(dram, &dram->areas[area->head], false);
        }
    }
}

/* Evict from where the last call stopped, at most *budget slots. Returns whether it came to the end
 * of the range. */
static bool drain_some(struct dram_tier *dram, struct dram_drain *drain, uint32_t *budget)
{
    while (drain->area < drain->first_area + drain->n_areas) {
        struct dram_area *area = &dram->areas[drain->area];
        struct dram_area *head = &dram->areas[area->head];
        uint32_t slot_index;

        if ((area->state != DRAM_AREA_HEAD && area->state != DRAM_AREA_MEMBER) ||
            drain->slot >= head->n_begun) {
            drain->area++;
            drain->slot = 0;
            continue;
        }
        slot_index = area->head * dram->plan.slots_an_area + drain->slot;
        if (dram->slots[slot_index].state == KVF_SLOT_READY && dram->slots[slot_index].pins == 0) {
            if (*budget == 0) {
                return false;
            }
            (*budget)--;
            if (may_evict(dram, slot_index)) {
                evict(dram, slot_index);
            }
        }
        drain->slot++;
    }
    drain->area = drain->first_area;
    return true;
}

static bool drain_is_empty(const struct dram_tier *dram, const struct dram_drain *drain)
{
    for (uint32_t i = 0; i < drain->n_areas; i++) {
        uint8_t state = dram->areas[drain->first_area + i].state;

        if (state == DRAM_AREA_HEAD || state == DRAM_AREA_MEMBER) {
            return false;
        }
    }
    return true;
}

/* ---- claims: areas of another class ---------------------------------------------------------- */

bool dram_area_is_claimed(const struct dram_tier *dram, uint32_t area_index)
{
    const struct dram_drain *claim = &dram->claim;

    return claim->is_active && area_index - claim->first_area < claim->n_areas;
}

/* For how long an area has not been used. False: it cannot be taken for this class. */
static bool area_age(const struct dram_tier *dram, uint32_t area_index, uint16_t class_index,
                     uint32_t stamp, uint32_t *age_out)
{
    const struct dram_area *area = &dram->areas[area_index];
    const struct dram_area *head;

    if (area->state == DRAM_AREA_FREE) {
        *age_out = UINT32_MAX;
        return true;
    }
    if (area->state == DRAM_AREA_ABSENT) {
        return false;
    }
    head = &dram->areas[area->head];
    *age_out = stamp - head->stamp;
    return head->n_held == 0 && !head->is_draining && head->class_index != class_index &&
           head->refused_by != dram->n_claims;
}

struct window {
    uint32_t first_area, n_areas;
    uint32_t age; /* of its hottest area */
};

static void find_window_in_piece(const struct dram_tier *dram, const struct dram_piece *piece,
                                 uint16_t class_index, uint32_t n_areas, struct window *best)
{
    uint32_t stamp = dram_stamp(dram);
    uint32_t end = piece->first_area + piece->n_areas;
    uint32_t first = piece->first_area;

    while (n_areas > 0 && first + n_areas <= end) {
        uint32_t window_age = UINT32_MAX;
        uint32_t i;

        for (i = 0; i < n_areas; i++) {
            uint32_t age;

            if (!area_age(dram, first + i, class_index, stamp, &age)) {
                break;
            }
            window_age = age < window_age ? age : window_age;
        }
        if (i < n_areas) {
            first += i + 1; /* no window contains this area */
            continue;
        }
        if (best->n_areas == 0 || window_age > best->age) {
            *best = (struct window){.first_area = first, .n_areas = n_areas, .age = window_age};
        }
        first++;
    }
}

/* The coldest window of the tenant that makes a good run of the class or, if there is none, the
 * coldest that holds one slot. n_areas is 0 if there is neither. */
static struct window find_window(struct dram_tier *dram, uint16_t tenant, uint16_t class_index)
{
    const struct dram_class *class = &dram->classes[class_index];
    bool is_first = dram_pool_at(dram, tenant, class_index)->n_runs == 0;
    uint32_t least_areas = (uint32_t)((class->slot_bytes + dram->plan.area_bytes - 1) /
                                      dram->plan.area_bytes);
    struct window best = {0};

    for (int pass = 0; pass < 2 && best.n_areas == 0; pass++) {
        for (uint32_t index = dram->tenant_pieces[tenant]; index != DRAM_NONE;
             index = dram->pieces[index].next) {
            const struct dram_piece *piece = &dram->pieces[index];
            uint32_t n_areas = pass == 0 ? dram_run_areas(dram, class, piece->n_areas, is_first)
                                         : least_areas;

            if (!piece->is_lost &&
                (!dram->handover.is_active || dram->handover.piece_index != index)) {
                find_window_in_piece(dram, piece, class_index, n_areas, &best);
            }
        }
    }
    return best;
}

bool dram_wants_areas(struct dram_tier *dram, uint16_t tenant, uint16_t class_index)
{
    struct dram_pool *pool = dram_pool_at(dram, tenant, class_index);
    const struct dram_list *segments = pool->segments;
    uint32_t coldest = segments[DRAM_PROBATION].count > 0 ? segments[DRAM_PROBATION].last
                                                          : segments[DRAM_PROTECTED].last;
    struct window window;
    uint64_t own_age;

    if (pool->n_evictions < EVICTIONS_A_LOOK + dram->plan.n_areas / AREAS_AN_EVICTION ||
        coldest == DRAM_NONE || dram->claim.is_active) {
        return false;
    }
    pool->n_evictions = 0;
    window = find_window(dram, tenant, class_index);
    own_age = dram_stamp(dram) - dram->slots[coldest].stamp;
    return window.n_areas > 0 && window.age >= COLDER_FACTOR * own_age + COLDER_STAMPS;
}

/* Would the host let go of the runs in this window? Looks at a portion; the rest is asked when its
 * turn comes. A run that is in use counts as just used, and this claim does not ask it again. */
static bool window_is_evictable(struct dram_tier *dram, const struct window *window)
{
    uint32_t budget = KVF_DRAM_DRAIN_MAX;

    for (uint32_t i = 0; i < window->n_areas; i++) {
        struct dram_area *area = &dram->areas[window->first_area + i];
        struct dram_area *head = &dram->areas[area->head];
        uint32_t first_slot = area->head * dram->plan.slots_an_area;

        if (area->state == DRAM_AREA_FREE ||
            (i > 0 && area->head == area[-1].head && area[-1].state != DRAM_AREA_FREE)) {
            continue;
        }
        for (uint32_t slot = 0; slot < head->n_begun && budget > 0; slot++) {
            if (dram->slots[first_slot + slot].state != KVF_SLOT_READY) {
                continue;
            }
            budget--;
            if (!may_evict(dram, first_slot + slot)) {
                head->stamp = dram_stamp(dram);
                head->refused_by = dram->n_claims;
                return false;
            }
        }
    }
    return true;
}

/* Go on with the claim. True: its areas are now a run of the class. */
static bool claim_continue(struct dram_tier *dram, uint64_t now_ns)
{
    struct dram_drain *claim = &dram->claim;
    uint32_t budget = KVF_DRAM_DRAIN_MAX;
    bool is_at_end = drain_some(dram, claim, &budget);

    if (drain_is_empty(dram, claim)) {
        claim->is_active = false;
        dram_run_make(dram, claim->first_area, claim->n_areas, claim->class_index);
        dram->areas_taken += claim->n_areas;
        return true;
    }
    if (now_ns >= claim->give_up_ns) {
        drain_stop(dram, claim);
        return false;
    }
    dram->drain_retry_ns = is_at_end ? now_ns + DRAIN_WAIT_NS : now_ns;
    return false;
}

bool dram_claim_areas(struct dram_tier *dram, uint16_t tenant, uint16_t class_index)
{
    struct dram_drain *claim = &dram->claim;

    if (claim->is_active) {
        return false;
    }
    dram->n_claims++;
    for (int attempt = 0; attempt < CLAIM_TRIES; attempt++) {
        struct window window = find_window(dram, tenant, class_index);

        if (window.n_areas == 0) {
            return false;
        }
        if (window_is_evictable(dram, &window)) {
            uint64_t now_ns = dram_now_ns(dram);

            *claim = (struct dram_drain){
                .tenant = tenant,
                .class_index = class_index,
                .piece_index = dram->areas[window.first_area].piece_index,
                .first_area = window.first_area,
                .n_areas = window.n_areas,
                .give_up_ns = now_ns + CLAIM_NS,
            };
            drain_start(dram, claim);
            return claim_continue(dram, now_ns);
        }
    }
    return false;
}

/* ---- handovers: pieces of another tenant ----------------------------------------------------- */

/* For how long no slot of a piece has been used. */
static uint32_t piece_age(const struct dram_tier *dram, const struct dram_piece *piece)
{
    uint32_t stamp = dram_stamp(dram);
    uint32_t age = UINT32_MAX;

    for (uint32_t i = 0; i < piece->n_areas; i++) {
        const struct dram_area *area = &dram->areas[piece->first_area + i];

        if (area->state == DRAM_AREA_HEAD && stamp - area->stamp < age) {
            age = stamp - area->stamp;
        }
    }
    return age;
}

static bool piece_is_populating(const struct dram_tier *dram, uint32_t piece_index)
{
    return dram->population.is_running &&
           dram->areas[dram->population.area_index].piece_index == piece_index;
}

int dram_handover_begin(struct dram_tier *dram, uint16_t tenant)
{
    uint32_t share = dram->plan.n_pieces / dram->config.n_tenants;
    struct dram_drain *handover = &dram->handover;
    uint32_t coldest = DRAM_NONE, coldest_age = 0;

    if (handover->is_active) {
        return KVF_ERR_BUSY;
    }
    for (uint32_t index = 0; index < dram->plan.n_pieces; index++) {
        const struct dram_piece *piece = &dram->pieces[index];

        if (piece->id == 0 || piece->tenant == DRAM_TENANT_NONE || piece->tenant == tenant ||
            dram->n_tenant_pieces[piece->tenant] <= share) {
            continue;
        }
        if (coldest == DRAM_NONE || piece_age(dram, piece) > coldest_age) {
            coldest = index;
            coldest_age = piece_age(dram, piece);
        }
    }
    if (coldest == DRAM_NONE) {
        return KVF_ERR_BUSY;
    }
    if (dram->claim.is_active && dram->claim.piece_index == coldest) {
        drain_stop(dram, &dram->claim);
    }
    *handover = (struct dram_drain){
        .tenant = tenant,
        .piece_index = coldest,
        .first_area = dram->pieces[coldest].first_area,
        .n_areas = dram->pieces[coldest].n_areas,
    };
    drain_start(dram, handover);
    dram->drain_retry_ns = dram_now_ns(dram);
    return KVF_OK;
}

static void handover_continue(struct dram_tier *dram, uint64_t now_ns)
{
    struct dram_drain *handover = &dram->handover;
    uint32_t budget = KVF_DRAM_DRAIN_MAX;
    bool is_at_end = drain_some(dram, handover, &budget);

    if (drain_is_empty(dram, handover) && !piece_is_populating(dram, handover->piece_index)) {
        handover->is_active = false;
        dram_piece_replace(dram, &dram->pieces[handover->piece_index], handover->tenant);
        return;
    }
    dram->drain_retry_ns = is_at_end ? now_ns + DRAIN_WAIT_NS : now_ns;
}

void dram_drains_stop(struct dram_tier *dram)
{
    if (dram->claim.is_active) {
        drain_stop(dram, &dram->claim);
    }
    if (dram->handover.is_active) {
        drain_stop(dram, &dram->handover);
    }
    dram->drain_retry_ns = UINT64_MAX;
}

void dram_drain_poll(struct dram_tier *dram, uint64_t now_ns)
{
    if (now_ns < dram->drain_retry_ns) {
        return;
    }
    dram->drain_retry_ns = UINT64_MAX;
    if (dram->claim.is_active) {
        claim_continue(dram, now_ns);
    }
    if (dram->handover.is_active) {
        uint64_t claim_retry_ns = dram->drain_retry_ns;

        handover_continue(dram, now_ns);
        if (claim_retry_ns < dram->drain_retry_ns) {
            dram->drain_retry_ns = claim_retry_ns;
        }
    }
}
