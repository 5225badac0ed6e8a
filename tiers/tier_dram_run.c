/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_run.c: areas into runs, slots out of runs, and the lists that order slots for eviction.
 *
 * A run's slots use the metadata of its first areas: slot k of the run that begins at area a is
 * number a * slots_an_area + k. There is always enough, because no slot is smaller than the one
 * that slots_an_area was computed for.
 */
#include "tiers/tier_dram_internal.h"

/* ---- runs with a free slot ------------------------------------------------------------------- */

static void partial_add(struct dram_tier *dram, struct dram_area *head)
{
    struct dram_pool *pool = dram_pool_of(dram, head);

    assert(!head->is_partial);
    head->is_partial = true;
    head->previous = DRAM_NONE;
    head->next = pool->partial_first;
    if (head->next != DRAM_NONE) {
        dram->areas[head->next].previous = dram_area_index(dram, head);
    }
    pool->partial_first = dram_area_index(dram, head);
}

static void partial_remove(struct dram_tier *dram, struct dram_area *head)
{
    assert(head->is_partial);
    head->is_partial = false;
    if (head->next != DRAM_NONE) {
        dram->areas[head->next].previous = head->previous;
    }
    if (head->previous != DRAM_NONE) {
        dram->areas[head->previous].next = head->next;
    } else {
        dram_pool_of(dram, head)->partial_first = head->next;
    }
}

/* ---- areas into runs ------------------------------------------------------------------------- */

struct run_choice {
    uint32_t first_area, n_areas;
    uint32_t left_areas; /* free neighbours that would be cut off from these */
    uint64_t tail_bytes;
    bool is_good; /* the tail is as small as promised */
};

static bool choice_is_better(const struct run_choice *a, const struct run_choice *b)
{
    if (a->n_areas == 0 || b->n_areas == 0) {
        return b->n_areas == 0 && a->n_areas != 0;
    }
    if (a->is_good != b->is_good) {
        return a->is_good;
    }
    if (a->is_good) {
        return a->left_areas < b->left_areas;
    }
    return a->tail_bytes * b->n_areas < b->tail_bytes * a->n_areas;
}

static bool run_is_good(const struct dram_tier *dram, const struct dram_class *class,
                        uint32_t n_areas)
{
    uint64_t run_bytes = n_areas * dram->plan.area_bytes;

    return run_bytes >= class->slot_bytes &&
           dram_run_tail_bytes(dram, class, n_areas) * 16 <= run_bytes;
}

/* A run out of n_free neighbours. What it leaves of them shall be of use to its own class. */
static struct run_choice choose(const struct dram_tier *dram, const struct dram_class *class,
                                bool is_first, uint32_t first_area, uint32_t n_free)
{
    struct run_choice choice = {
        .first_area = first_area,
        .n_areas = dram_run_areas(dram, class, n_free, is_first),
    };

    if (!is_first && choice.n_areas < n_free &&
        !run_is_good(dram, class, n_free - choice.n_areas) && run_is_good(dram, class, n_free)) {
        choice.n_areas = n_free;
    }
    choice.left_areas = n_free - choice.n_areas;
    choice.tail_bytes = dram_run_tail_bytes(dram, class, choice.n_areas);
    choice.is_good = choice.n_areas > 0 && run_is_good(dram, class, choice.n_areas);
    return choice;
}

/* The best place in one piece. */
static void choose_in_piece(const struct dram_tier *dram, const struct dram_piece *piece,
                            const struct dram_class *class, bool is_first, struct run_choice *best)
{
    uint32_t end = piece->first_area + piece->n_areas;
    uint32_t n_free = 0;

    for (uint32_t area = piece->first_area; area <= end; area++) {
        struct run_choice choice;

        if (area < end && dram->areas[area].state == DRAM_AREA_FREE &&
            !dram_area_is_claimed(dram, area)) {
            n_free++;
            continue;
        }
        if (n_free > 0) {
            choice = choose(dram, class, is_first, area - n_free, n_free);
            if (choice_is_better(&choice, best)) {
                *best = choice;
            }
            n_free = 0;
        }
    }
}

bool dram_run_open(struct dram_tier *dram, uint16_t tenant, uint16_t class_index)
{
    const struct dram_class *class = &dram->classes[class_index];
    bool is_first = dram_pool_at(dram, tenant, class_index)->n_runs == 0;
    struct run_choice best = {0};
    uint32_t index;

    if (dram->n_free_areas == 0) {
        return false;
    }
    for (index = dram->tenant_pieces[tenant]; index != DRAM_NONE;
         index = dram->pieces[index].next) {
        if (!dram->pieces[index].is_lost &&
            (!dram->handover.is_active || dram->handover.piece_index != index)) {
            choose_in_piece(dram, &dram->pieces[index], class, is_first, &best);
        }
    }
    for (index = 0; index < dram->plan.n_pieces && !best.is_good; index++) {
        if (dram->pieces[index].id != 0 && dram->pieces[index].tenant == DRAM_TENANT_NONE) {
            choose_in_piece(dram, &dram->pieces[index], class, is_first, &best);
        }
    }
    if (best.n_areas == 0) {
        return false;
    }
    index = dram->areas[best.first_area].piece_index;
    if (dram->pieces[index].tenant == DRAM_TENANT_NONE) {
        dram_piece_assign(dram, &dram->pieces[index], tenant);
    }
    dram_run_make(dram, best.first_area, best.n_areas, class_index);
    return true;
}

void dram_run_make(struct dram_tier *dram, uint32_t first_area, uint32_t n_areas,
                   uint16_t class_index)
{
    struct dram_area *head = &dram->areas[first_area];

    assert(n_areas > 0 && n_areas <= dram->n_free_areas);
    for (uint32_t i = 0; i < n_areas; i++) {
        struct dram_area *area = head + i;

        assert(area->state == DRAM_AREA_FREE && area->piece_index == head->piece_index);
        area->state = i == 0 ? DRAM_AREA_HEAD : DRAM_AREA_MEMBER;
        area->head = first_area;
    }
    dram->n_free_areas -= n_areas;
    head->class_index = class_index;
    head->run_areas = n_areas;
    head->n_slots = (uint32_t)(n_areas * dram->plan.area_bytes /
                               dram->classes[class_index].slot_bytes);
    assert(head->n_slots > 0 && head->n_slots <= n_areas * dram->plan.slots_an_area);
    head->n_begun = 0;
    head->n_used = 0;
    head->n_held = 0;
    head->free_first = DRAM_NONE;
    head->stamp = dram_stamp(dram);
    head->refused_by = 0;
    head->stored_bytes = 0;
    head->is_draining = false;
    dram_pool_of(dram, head)->n_runs++;
    partial_add(dram, head);
}

static void run_close(struct dram_tier *dram, struct dram_area *head)
{
    uint32_t n_areas = head->run_areas;

    assert(head->n_used == 0 && head->n_held == 0 && head->stored_bytes == 0);
    if (head->is_partial) {
        partial_remove(dram, head);
    }
    dram_pool_of(dram, head)->n_runs--;
    head->is_draining = false;
    for (uint32_t i = 0; i < n_areas; i++) {
        head[i].state = DRAM_AREA_FREE;
    }
    dram->n_free_areas += n_areas;
}

void dram_run_set_draining(struct dram_tier *dram, struct dram_area *head, bool is_draining)
{
    assert(head->state == DRAM_AREA_HEAD);
    if (head->is_draining == is_draining) {
        return;
    }
    head->is_draining = is_draining;
    if (is_draining && head->is_partial) {
        partial_remove(dram, head);
    } else if (!is_draining && head->n_used < head->n_slots) {
        partial_add(dram, head);
    }
}

/* ---- slots out of runs ----------------------------------------------------------------------- */

uint32_t dram_slot_take(struct dram_tier *dram, struct dram_pool *pool)
{
    struct dram_area *head;
    struct dram_slot *slot;
    uint32_t slot_index;

    if (pool->partial_first == DRAM_NONE) {
        return DRAM_NONE;
    }
    head = &dram->areas[pool->partial_first];
    slot_index = head->free_first;
    if (slot_index != DRAM_NONE) {
        head->free_first = dram->slots[slot_index].next;
    } else {
        slot_index = dram_area_index(dram, head) * dram->plan.slots_an_area + head->n_begun;
        head->n_begun++;
    }
    slot = &dram->slots[slot_index];
    assert(slot->state == KVF_SLOT_FREE && slot->pins == 0);
    slot->state = KVF_SLOT_FILLING;
    slot->generation++;
    if (slot->generation == 0) {
        slot->generation = 1;
    }
    head->n_used++;
    head->n_held++;
    if (head->n_used == head->n_slots) {
        partial_remove(dram, head);
    }
    return slot_index;
}

void dram_slot_free(struct dram_tier *dram, uint32_t slot_index)
{
    struct dram_slot *slot = &dram->slots[slot_index];
    struct dram_area *head = dram_head_of_slot(dram, slot_index);

    assert(slot->state != KVF_SLOT_FREE && slot->pins == 0 && head->n_used > 0);
    slot->state = KVF_SLOT_FREE;
    slot->next = head->free_first;
    head->free_first = slot_index;
    head->n_used--;
    head->stored_bytes -= slot->record_bytes;
    dram->stat.stored_bytes -= slot->record_bytes;
    dram->stat.stored_blocks--;
    if (head->n_used == 0) {
        run_close(dram, head);
    } else if (!head->is_partial && !head->is_draining) {
        partial_add(dram, head);
    }
}

/* ---- order of eviction ----------------------------------------------------------------------- */

static struct dram_list *list_of(struct dram_tier *dram, uint32_t slot_index)
{
    struct dram_pool *pool = dram_pool_of(dram, dram_head_of_slot(dram, slot_index));

    return &pool->segments[dram->slots[slot_index].segment];
}

static void list_push(struct dram_tier *dram, struct dram_list *list, uint32_t slot_index)
{
    struct dram_slot *slot = &dram->slots[slot_index];

    slot->previous = DRAM_NONE;
    slot->next = list->first;
    if (list->first != DRAM_NONE) {
        dram->slots[list->first].previous = slot_index;
    } else {
        list->last = slot_index;
    }
    list->first = slot_index;
    list->count++;
}

void dram_list_remove(struct dram_tier *dram, uint32_t slot_index)
{
    struct dram_list *list = list_of(dram, slot_index);
    struct dram_slot *slot = &dram->slots[slot_index];

    assert(list->count > 0);
    if (slot->next != DRAM_NONE) {
        dram->slots[slot->next].previous = slot->previous;
    } else {
        list->last = slot->previous;
    }
    if (slot->previous != DRAM_NONE) {
        dram->slots[slot->previous].next = slot->next;
    } else {
        list->first = slot->next;
    }
    list->count--;
}

void dram_list_add(struct dram_tier *dram, uint32_t slot_index, uint8_t segment)
{
    struct dram_pool *pool = dram_pool_of(dram, dram_head_of_slot(dram, slot_index));
    struct dram_list *probation = &pool->segments[DRAM_PROBATION];
    struct dram_list *protected = &pool->segments[DRAM_PROTECTED];

    dram->slots[slot_index].segment = segment;
    list_push(dram, &pool->segments[segment], slot_index);
    /* at most a fifth, rounded up, is protected; what drops out gets a second life in probation */
    while (segment == DRAM_PROTECTED &&
           protected->count > (protected->count + probation->count + 4) / 5) {
        uint32_t demoted = protected->last;

        dram_list_remove(dram, demoted);
        dram->slots[demoted].segment = DRAM_PROBATION;
        list_push(dram, probation, demoted);
    }
}
