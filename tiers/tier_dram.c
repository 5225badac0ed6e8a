/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram.c: the memory tier: open, the ops table, transitions of slots, figures.
 *
 *              reserve            publish           drop, nobody pins it
 *        FREE ---------> FILLING ---------> READY ------------------------> FREE
 *          ^                |                 | drop, pinned                 ^
 *          '----------------+-- drop          v            last unpin        |
 *                           '------------> DOOMED ---------------------------'
 */
#include "tiers/tier_dram_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- plan ------------------------------------------------------------------------------------ */

void kvf_dram_config_init(struct kvf_dram_config *config)
{
    *config = (struct kvf_dram_config){
        .arena_bytes = 1ull << 30,
        .piece_bytes = 1ull << 30,
        .area_bytes = 128ull << 20,
        .hugepages = KVF_HUGEPAGES_OFF,
        .n_tenants = 1,
        .env = kvf_env_system(),
        .memory_allows = kvf_dram_memory_allows,
    };
}

static uint64_t metadata_bytes(const struct dram_plan *plan)
{
    return sizeof(struct dram_tier) + plan->n_pieces * sizeof(struct dram_piece) +
           plan->n_areas * sizeof(struct dram_area) + plan->n_pools * sizeof(struct dram_pool) +
           (uint64_t)plan->n_areas * plan->slots_an_area * sizeof(struct dram_slot);
}

/* From what is asked for to whole areas in pieces of nearly equal size, so that whatever fits one
 * piece fits all. KVF_OK; KVF_ERR_INVALID and the reason. */
static int plan_make(const struct kvf_dram_config *config, struct dram_plan *plan, char *why_out,
                     size_t why_bytes)
{
    uint64_t unit_bytes = config->hugepages == KVF_HUGEPAGES_OFF && config->backing == NULL
                              ? KVF_DRAM_AREA_BYTES_MIN
                              : KVF_HUGE_PAGE_BYTES;
    uint64_t area_bytes = config->area_bytes / unit_bytes * unit_bytes;
    uint64_t piece_bytes = config->piece_bytes < 1ull << 30 ? config->piece_bytes : 1ull << 30;
    uint64_t n_areas, areas_a_piece, n_pieces;

    if (config->n_tenants == 0 || config->n_tenants > KVF_DRAM_TENANTS_MAX) {
        snprintf(why_out, why_bytes, "%u tenants: 1 to %d are possible", config->n_tenants,
                 KVF_DRAM_TENANTS_MAX);
        return KVF_ERR_INVALID;
    }
    piece_bytes = piece_bytes < config->arena_bytes ? piece_bytes : config->arena_bytes;
    if (config->n_tenants > 1 && piece_bytes > config->arena_bytes / (2u * config->n_tenants)) {
        piece_bytes = config->arena_bytes / (2u * config->n_tenants);
    }
    area_bytes = area_bytes < piece_bytes ? area_bytes : piece_bytes / unit_bytes * unit_bytes;
    if (area_bytes == 0) {
        snprintf(
            why_out, why_bytes,
            "an arena of %llu MiB, %u tenant(s), pieces of %llu MiB: each tenant needs two areas "
            "of at least %llu MiB",
            (unsigned long long)(config->arena_bytes >> 20), config->n_tenants,
            (unsigned long long)(config->piece_bytes >> 20),
            (unsigned long long)(unit_bytes >> 20));
        return KVF_ERR_INVALID;
    }
    while (config->arena_bytes / area_bytes < DRAM_AREAS_MIN && area_bytes / 2 >= unit_bytes) {
        area_bytes = area_bytes / 2 / unit_bytes * unit_bytes;
    }
    n_areas = config->arena_bytes / area_bytes;
    areas_a_piece = piece_bytes / area_bytes;
    n_pieces = (n_areas + areas_a_piece - 1) / areas_a_piece;
    if (n_pieces > KVF_DRAM_PIECES_MAX ||
        n_areas * (area_bytes / KVF_DRAM_SLOT_BYTES_MIN) >= UINT32_MAX) {
        snprintf(why_out, why_bytes, "an arena of %llu GiB is too large: %d pieces at most",
                 (unsigned long long)(config->arena_bytes >> 30), KVF_DRAM_PIECES_MAX);
        return KVF_ERR_INVALID;
    }
    *plan = (struct dram_plan){
        .arena_bytes = n_areas * area_bytes,
        .piece_bytes = n_areas / n_pieces * area_bytes,
        .area_bytes = area_bytes,
        .n_areas = (uint32_t)n_areas,
        .areas_a_piece = (uint32_t)(n_areas / n_pieces),
        .n_pieces = (uint32_t)n_pieces,
        .slots_an_area = (uint32_t)(area_bytes / KVF_DRAM_SLOT_BYTES_MIN),
        .n_pools = (uint32_t)config->n_tenants * DRAM_CLASSES_MAX,
    };
    plan->metadata_bytes = metadata_bytes(plan);
    return KVF_OK;
}

uint64_t kvf_dram_metadata_bytes(const struct kvf_dram_config *config)
{
    char why[KVF_ERROR_TEXT_BYTES];
    struct dram_plan plan;

    return plan_make(config, &plan, why, sizeof(why)) == KVF_OK ? plan.metadata_bytes : 0;
}

uint64_t kvf_dram_area_bytes(const struct kvf_dram_config *config)
{
    char why[KVF_ERROR_TEXT_BYTES];
    struct dram_plan plan;

    return plan_make(config, &plan, why, sizeof(why)) == KVF_OK ? plan.area_bytes : 0;
}

/* ---- open and close -------------------------------------------------------------------------- */

static void pieces_init(struct dram_tier *dram)
{
    uint32_t n_larger = dram->plan.n_areas % dram->plan.n_pieces;
    uint32_t area_index = 0;

    for (uint32_t index = 0; index < dram->plan.n_pieces; index++) {
        struct dram_piece *piece = &dram->pieces[index];

        piece->fd = -1;
        piece->tenant = DRAM_TENANT_NONE;
        piece->next_tenant = DRAM_TENANT_NONE;
        piece->next = DRAM_NONE;
        piece->first_area = area_index;
        piece->n_areas = dram->plan.areas_a_piece + (index < n_larger);
        for (uint32_t i = 0; i < piece->n_areas; i++) {
            dram->areas[area_index++].piece_index = index;
        }
    }
    assert(area_index == dram->plan.n_areas);
    for (uint32_t tenant = 0; tenant < KVF_DRAM_TENANTS_MAX; tenant++) {
        dram->tenant_pieces[tenant] = DRAM_NONE;
    }
    for (uint32_t i = 0; i < dram->plan.n_pools; i++) {
        struct dram_pool *pool = &dram->pools[i];

        pool->partial_first = DRAM_NONE;
        for (int segment = 0; segment < 2; segment++) {
            pool->segments[segment].first = DRAM_NONE;
            pool->segments[segment].last = DRAM_NONE;
        }
    }
    dram->n_absent_areas = dram->plan.n_areas;
}

int kvf_dram_open(const struct kvf_dram_config *config, struct kvf_tier **tier_out, char *why_out,
                  size_t why_bytes)
{
    struct dram_tier *dram;
    struct dram_plan plan;
    int status;

    assert(config->host.may_evict != NULL && config->host.evict != NULL);
    assert(config->backing != NULL || (config->work != NULL && config->memory_allows != NULL));
    status = plan_make(config, &plan, why_out, why_bytes);
    if (status != KVF_OK) {
        return status;
    }
    dram = calloc(1, sizeof(*dram));
    if (dram == NULL) {
        snprintf(why_out, why_bytes, "no memory for the tables of the arena");
        return KVF_ERR_NO_MEMORY;
    }
    dram->base.ops = &kvf_tier_dram_ops;
    dram->base.host = config->host;
    dram->config = *config;
    dram->plan = plan;
    dram->population_retry_ns = UINT64_MAX;
    dram->drain_retry_ns = UINT64_MAX;
    dram->making = DRAM_NONE;
    dram->n_claims = 1; /* 0 in a run: no claim found it in use */
    dram->population_log = (struct kvf_log_limit){.interval_ns = 60 * KVF_NS_PER_S,
                                                  .burst_count = 1};
    dram->pieces = calloc(plan.n_pieces, sizeof(*dram->pieces));
    dram->areas = calloc(plan.n_areas, sizeof(*dram->areas));
    dram->pools = calloc(plan.n_pools, sizeof(*dram->pools));
    dram->slots = calloc((size_t)plan.n_areas * plan.slots_an_area, sizeof(*dram->slots));
    if (dram->pieces == NULL || dram->areas == NULL || dram->pools == NULL || dram->slots == NULL) {
        snprintf(why_out, why_bytes, "no memory for the tables of the arena (%llu MiB)",
                 (unsigned long long)(plan.metadata_bytes >> 20));
        status = KVF_ERR_NO_MEMORY;
        goto fail;
    }
    pieces_init(dram);
    dram_classes_init(dram);
    status = dram_pieces_open(dram, why_out, why_bytes);
    if (status != KVF_OK) {
        goto fail;
    }
    if (dram_populate_first(dram) == KVF_OK) {
        dram_populate_next(dram, dram_now_ns(dram));
    }
    *tier_out = &dram->base;
    return KVF_OK;

fail:
    kvf_tier_dram_ops.close(&dram->base);
    return status;
}

static void dram_close(struct kvf_tier *tier)
{
    struct dram_tier *dram = (struct dram_tier *)tier;

    if (dram == NULL) {
        return;
    }
    dram_pieces_close(dram);
    free(dram->slots);
    free(dram->pools);
    free(dram->areas);
    free(dram->pieces);
    free(dram);
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* The slot of a location that must be live. */
static struct dram_slot *slot_of(struct dram_tier *dram, kvf_location location,
                                 uint32_t *slot_index_out)
{
    uint32_t slot_index = (uint32_t)location;
    struct dram_slot *slot;

    assert(slot_index / dram->plan.slots_an_area < dram->plan.n_areas);
    slot = &dram->slots[slot_index];
    assert(slot->generation == location >> 32 && slot->state != KVF_SLOT_FREE);
    *slot_index_out = slot_index;
    return slot;
}

/* A free slot of the pool, whatever has to be opened or evicted for it. */
static uint32_t slot_find(struct dram_tier *dram, uint16_t tenant, uint16_t class_index)
{
    struct dram_pool *pool = dram_pool_at(dram, tenant, class_index);
    uint32_t scan_left = KVF_DRAM_SCAN_MAX;
    bool wants_piece = false;

    for (;;) {
        uint32_t slot_index = dram_slot_take(dram, pool);

        if (slot_index != DRAM_NONE) {
            return slot_index;
        }
        if (dram_run_open(dram, tenant, class_index)) {
            continue;
        }
        if (!wants_piece && dram->n_assigned_pieces == dram->plan.n_pieces &&
            dram->n_tenant_pieces[tenant] < dram->plan.n_pieces / dram->config.n_tenants) {
            wants_piece = true;
            dram_handover_begin(dram, tenant);
        }
        if (dram_wants_areas(dram, tenant, class_index) &&
            dram_claim_areas(dram, tenant, class_index)) {
            continue;
        }
        if (!dram_evict_one(dram, pool, &scan_left) &&
            !dram_claim_areas(dram, tenant, class_index)) {
            return DRAM_NONE;
        }
    }
}

static int dram_reserve(struct kvf_tier *tier, uint16_t tenant, uint64_t record_bytes,
                        kvf_cookie cookie, kvf_location *location_out)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t class_index = dram_class_for(dram, record_bytes);
    struct dram_slot *slot;
    uint32_t slot_index;

    assert(!dram->is_evicting && tenant < dram->config.n_tenants && record_bytes > 0);
    if (class_index == DRAM_NONE) {
        return KVF_ERR_TOO_LARGE;
    }
    slot_index = slot_find(dram, tenant, (uint16_t)class_index);
    if (slot_index == DRAM_NONE) {
        dram->stat.busy++;
        return KVF_ERR_BUSY;
    }
    slot = &dram->slots[slot_index];
    slot->cookie = cookie;
    slot->record_bytes = (uint32_t)record_bytes;
    slot->priority = 0;
    slot->lives = 0;
    dram_head_of_slot(dram, slot_index)->stored_bytes += record_bytes;
    dram->stat.stored_bytes += record_bytes;
    dram->stat.stored_blocks++;
    *location_out = dram_location(dram, slot_index);
    return KVF_OK;
}

/* From the begin of the arena. */
static uint64_t slot_offset(struct dram_tier *dram, uint32_t slot_index)
{
    const struct dram_area *head = dram_head_of_slot(dram, slot_index);
    uint32_t area_index = dram_area_index(dram, head);
    uint32_t place = slot_index - area_index * dram->plan.slots_an_area;

    return area_index * dram->plan.area_bytes + place * dram->classes[head->class_index].slot_bytes;
}

static void *dram_address(struct kvf_tier *tier, kvf_location location)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t slot_index;

    slot_of(dram, location, &slot_index);
    return dram->arena != NULL ? dram->arena + slot_offset(dram, slot_index) : NULL;
}

void kvf_dram_locate(const struct kvf_tier *tier, kvf_location location, uint32_t *piece_id_out,
                     uint64_t *offset_out)
{
    /* only looked at; slot_of is shared with callers that change the slot */
    struct dram_tier *dram = (struct dram_tier *)(uintptr_t)dram_of_const(tier);
    const struct dram_piece *piece;
    uint32_t slot_index;

    slot_of(dram, location, &slot_index);
    piece = &dram->pieces[dram_head_of_slot(dram, slot_index)->piece_index];
    *piece_id_out = piece->id;
    *offset_out = slot_offset(dram, slot_index) - piece->first_area * dram->plan.area_bytes;
}

enum kvf_slot_state kvf_dram_state(const struct kvf_tier *tier, kvf_location location)
{
    const struct dram_tier *dram = dram_of_const(tier);
    uint32_t slot_index = (uint32_t)location;
    const struct dram_slot *slot;

    if (slot_index / dram->plan.slots_an_area >= dram->plan.n_areas) {
        return KVF_SLOT_FREE;
    }
    slot = &dram->slots[slot_index];
    return slot->generation == location >> 32 ? (enum kvf_slot_state)slot->state : KVF_SLOT_FREE;
}

/* Note a use of the slot, for comparing classes and pieces. */
static void slot_stamp(struct dram_tier *dram, struct dram_slot *slot, uint32_t slot_index)
{
    slot->stamp = dram_stamp(dram);
    dram_head_of_slot(dram, slot_index)->stamp = slot->stamp;
}

void kvf_dram_publish(struct kvf_tier *tier, kvf_location location, uint8_t priority)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t slot_index;
    struct dram_slot *slot = slot_of(dram, location, &slot_index);

    assert(slot->state == KVF_SLOT_FILLING);
    slot->state = KVF_SLOT_READY;
    slot->priority = priority < KVF_DRAM_PRIORITY_MAX ? priority : KVF_DRAM_PRIORITY_MAX;
    slot->lives = slot->priority;
    slot->segment = DRAM_PROBATION;
    slot_stamp(dram, slot, slot_index);
    dram->stat.stores++;
    if (slot->pins == 0) {
        dram_head_of_slot(dram, slot_index)->n_held--;
        dram_list_add(dram, slot_index, DRAM_PROBATION);
    }
}

void kvf_dram_touch(struct kvf_tier *tier, kvf_location location)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t slot_index;
    struct dram_slot *slot = slot_of(dram, location, &slot_index);

    assert(slot->state == KVF_SLOT_READY);
    slot->lives = slot->priority;
    slot_stamp(dram, slot, slot_index);
    dram->stat.loads++;
    if (slot->pins == 0) {
        dram_list_remove(dram, slot_index);
        dram_list_add(dram, slot_index, DRAM_PROTECTED);
    } else {
        slot->segment = DRAM_PROTECTED; /* where the last unpin puts it */
    }
}

void kvf_dram_pin(struct kvf_tier *tier, kvf_location location)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t slot_index;
    struct dram_slot *slot = slot_of(dram, location, &slot_index);

    assert(slot->state != KVF_SLOT_DOOMED && slot->pins < UINT32_MAX);
    if (slot->pins++ == 0) {
        dram->pinned_slots++;
        if (slot->state == KVF_SLOT_READY) {
            dram_list_remove(dram, slot_index);
            dram_head_of_slot(dram, slot_index)->n_held++;
        }
    }
}

void kvf_dram_unpin(struct kvf_tier *tier, kvf_location location)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t slot_index;
    struct dram_slot *slot = slot_of(dram, location, &slot_index);

    assert(slot->pins > 0);
    if (--slot->pins > 0) {
        return;
    }
    dram->pinned_slots--;
    if (slot->state == KVF_SLOT_READY) {
        dram_head_of_slot(dram, slot_index)->n_held--;
        dram_list_add(dram, slot_index, slot->segment);
    } else if (slot->state == KVF_SLOT_DOOMED) {
        dram->doomed_slots--;
        dram_head_of_slot(dram, slot_index)->n_held--;
        dram_slot_free(dram, slot_index);
    }
}

uint32_t kvf_dram_pins(const struct kvf_tier *tier, kvf_location location)
{
    struct dram_tier *dram = (struct dram_tier *)(uintptr_t)dram_of_const(tier);
    uint32_t slot_index;

    return slot_of(dram, location, &slot_index)->pins;
}

void kvf_dram_drop(struct kvf_tier *tier, kvf_location location)
{
    struct dram_tier *dram = dram_of(tier);
    uint32_t slot_index;
    struct dram_slot *slot = slot_of(dram, location, &slot_index);

    assert(slot->state != KVF_SLOT_DOOMED);
    dram->stat.drops++;
    if (slot->pins > 0) {
        slot->state = KVF_SLOT_DOOMED; /* held as before */
        dram->doomed_slots++;
        return;
    }
    if (slot->state == KVF_SLOT_READY) {
        dram_list_remove(dram, slot_index);
    } else {
        dram_head_of_slot(dram, slot_index)->n_held--;
    }
    dram_slot_free(dram, slot_index);
}

/* ---- poll and figures ------------------------------------------------------------------------ */

static unsigned dram_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    struct dram_tier *dram = dram_of(tier);
    uint64_t evictions = dram->stat.evictions;

    dram_drain_poll(dram, now_ns);
    dram_backed_poll(dram);
    if (now_ns >= dram->population_retry_ns) {
        dram_populate_next(dram, now_ns);
    }
    return (unsigned)(dram->stat.evictions - evictions);
}

static uint64_t dram_deadline_ns(const struct kvf_tier *tier)
{
    const struct dram_tier *dram = dram_of_const(tier);

    return dram->drain_retry_ns < dram->population_retry_ns ? dram->drain_retry_ns
                                                            : dram->population_retry_ns;
}

static void dram_stat(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out)
{
    const struct dram_tier *dram = dram_of_const(tier);

    *stat_out = dram->stat;
    stat_out->capacity_bytes = dram->plan.arena_bytes;
    for (uint32_t index = 0; index < dram->plan.n_areas; index++) {
        const struct dram_area *head = &dram->areas[index];

        if (head->state == DRAM_AREA_HEAD && head->n_used == head->n_slots) {
            stat_out->area_bytes += head->run_areas * dram->plan.area_bytes;
            stat_out->area_stored_bytes += head->stored_bytes;
        }
    }
}

void kvf_dram_info(const struct kvf_tier *tier, struct kvf_dram_info *info_out)
{
    const struct dram_tier *dram = dram_of_const(tier);

    *info_out = (struct kvf_dram_info){
        .arena_bytes = dram->plan.arena_bytes,
        .piece_bytes = dram->plan.piece_bytes,
        .area_bytes = dram->plan.area_bytes,
        .metadata_bytes = dram->plan.metadata_bytes,
        .populated_bytes = (dram->plan.n_areas - dram->n_absent_areas) * dram->plan.area_bytes,
        .free_area_bytes = dram->n_free_areas * dram->plan.area_bytes,
        .areas = dram->plan.n_areas,
        .pieces = dram->plan.n_pieces,
        .pieces_assigned = dram->n_assigned_pieces,
        .pinned_slots = dram->pinned_slots,
        .doomed_slots = dram->doomed_slots,
        .population_failures = dram->population_failures,
        .memory_refusals = dram->memory_refusals,
        .areas_taken = dram->areas_taken,
        .pieces_reassigned = dram->pieces_reassigned,
    };
    for (uint32_t index = 0; index < dram->plan.n_areas; index++) {
        if (dram->areas[index].state != DRAM_AREA_ABSENT &&
            dram->pieces[dram->areas[index].piece_index].is_huge) {
            info_out->huge_bytes += dram->plan.area_bytes;
        }
    }
}

unsigned kvf_dram_classes(const struct kvf_tier *tier, struct kvf_dram_class *classes_out,
                          unsigned max)
{
    const struct dram_tier *dram = dram_of_const(tier);
    struct kvf_dram_class classes[DRAM_CLASSES_MAX] = {0};
    unsigned n_out = 0;

    for (uint32_t index = 0; index < dram->plan.n_areas; index++) {
        const struct dram_area *head = &dram->areas[index];

        if (head->state == DRAM_AREA_HEAD) {
            struct kvf_dram_class *class = &classes[head->class_index];

            class->areas += head->run_areas;
            class->slots += head->n_slots;
            class->used += head->n_used;
            class->stored_bytes += head->stored_bytes;
        }
    }
    for (uint32_t place = 0; place < dram->n_classes; place++) {
        uint32_t index = dram->classes_by_size[place];

        if (classes[index].areas > 0) {
            if (n_out < max) {
                classes_out[n_out] = classes[index];
                classes_out[n_out].slot_bytes = dram->classes[index].slot_bytes;
                classes_out[n_out].is_exact = dram->classes[index].is_exact;
            }
            n_out++;
        }
    }
    return n_out;
}

const struct kvf_tier_ops kvf_tier_dram_ops = {
    .abi = KVF_TIER_ABI,
    .flags = KVF_TIER_ADDRESSABLE,
    .name = "dram",
    .kind = KVF_TIER_DRAM,
    .reserve = dram_reserve,
    .address = dram_address,
    .drop = kvf_dram_drop,
    .poll = dram_poll,
    .deadline_ns = dram_deadline_ns,
    .stat = dram_stat,
    .close = dram_close,
};
