/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_backed.c: pieces whose memory another process has: made on demand one at a time, and
 * gone all at once when that process dies.
 */
#include "tiers/tier_dram_internal.h"

#define MAKE_RETRY_NS (250 * KVF_NS_PER_MS)

int dram_backed_make(struct dram_tier *dram, uint64_t now_ns)
{
    const struct kvf_dram_backing *backing = dram->config.backing;
    uint32_t area_index = dram_area_absent(dram);
    struct dram_piece *piece;
    int status;

    dram->population_retry_ns = UINT64_MAX;
    if (area_index == DRAM_NONE || dram->making != DRAM_NONE) {
        return KVF_MISS;
    }
    piece = &dram->pieces[dram->areas[area_index].piece_index];
    assert(piece->id == 0 && piece->tenant == DRAM_TENANT_NONE);
    piece->incarnation++;
    piece->id = piece->incarnation * KVF_DRAM_PIECES_MAX + (uint32_t)(piece - dram->pieces);
    status = backing->make(backing->ctx, piece->id, piece->n_areas * dram->plan.area_bytes);
    if (status != KVF_OK) {
        piece->id = 0;
        dram->population_retry_ns = now_ns + MAKE_RETRY_NS;
        return KVF_ERR_BUSY;
    }
    dram->making = (uint32_t)(piece - dram->pieces);
    return KVF_OK;
}

void kvf_dram_piece_made(struct kvf_tier *tier, uint32_t piece_id, int fd, int status)
{
    struct dram_tier *dram = dram_of(tier);
    struct dram_piece *piece;
    uint16_t tenant;

    if (dram->making == DRAM_NONE || dram->pieces[dram->making].id != piece_id) {
        kvf_fd_close(&fd);
        return;
    }
    piece = &dram->pieces[dram->making];
    dram->making = DRAM_NONE;
    if (status != KVF_OK) {
        kvf_fd_close(&fd);
        piece->id = 0;
        dram->population_failures++;
        dram->population_retry_ns = dram_now_ns(dram) + 4 * MAKE_RETRY_NS;
        return;
    }
    piece->fd = fd;
    for (uint32_t i = 0; i < piece->n_areas; i++) {
        assert(dram->areas[piece->first_area + i].state == DRAM_AREA_ABSENT);
        dram->areas[piece->first_area + i].state = DRAM_AREA_FREE;
    }
    dram->n_absent_areas -= piece->n_areas;
    dram->n_free_areas += piece->n_areas;
    tenant = piece->next_tenant;
    piece->next_tenant = DRAM_TENANT_NONE;
    if (tenant != DRAM_TENANT_NONE) {
        dram_piece_assign(dram, piece, tenant);
    }
    dram_populate_next(dram, dram_now_ns(dram));
}

/* What is free is not to be used again; what is held is given up when that ends. */
static void piece_lose(struct dram_tier *dram, struct dram_piece *piece)
{
    for (uint32_t i = 0; i < piece->n_areas; i++) {
        struct dram_area *area = &dram->areas[piece->first_area + i];

        if (area->state == DRAM_AREA_HEAD || area->state == DRAM_AREA_MEMBER) {
            dram_run_set_draining(dram, &dram->areas[area->head], true);
        }
    }
    piece->is_lost = true;
    dram->n_lost_pieces++;
}

void kvf_dram_pieces_lost(struct kvf_tier *tier)
{
    struct dram_tier *dram = dram_of(tier);

    dram_drains_stop(dram);
    if (dram->making != DRAM_NONE) {
        dram->pieces[dram->making].id = 0;
        dram->making = DRAM_NONE;
    }
    for (uint32_t index = 0; index < dram->plan.n_pieces; index++) {
        struct dram_piece *piece = &dram->pieces[index];

        piece->next_tenant = DRAM_TENANT_NONE;
        if (piece->id != 0 && !piece->is_lost) {
            piece_lose(dram, piece);
        }
    }
    dram->population_retry_ns = dram_now_ns(dram) + MAKE_RETRY_NS;
    dram_backed_poll(dram);
}

static bool piece_is_held(const struct dram_tier *dram, const struct dram_piece *piece)
{
    for (uint32_t i = 0; i < piece->n_areas; i++) {
        uint8_t state = dram->areas[piece->first_area + i].state;

        if (state == DRAM_AREA_HEAD || state == DRAM_AREA_MEMBER) {
            return true;
        }
    }
    return false;
}

void dram_backed_poll(struct dram_tier *dram)
{
    for (uint32_t index = 0; dram->n_lost_pieces > 0 && index < dram->plan.n_pieces; index++) {
        struct dram_piece *piece = &dram->pieces[index];

        if (piece->is_lost && !piece_is_held(dram, piece)) {
            dram_piece_forget(dram, piece);
            piece->is_lost = false;
            dram->n_lost_pieces--;
        }
    }
}

void kvf_dram_visit(struct kvf_tier *tier,
                    void (*visit)(void *ctx, kvf_location location, kvf_cookie cookie), void *ctx)
{
    struct dram_tier *dram = dram_of(tier);

    for (uint32_t index = 0; index < dram->plan.n_areas; index++) {
        const struct dram_area *head = &dram->areas[index];

        /* a visit may free any slot, and with the last one of it the run */
        for (uint32_t i = 0; head->state == DRAM_AREA_HEAD && i < head->n_begun; i++) {
            uint32_t slot_index = index * dram->plan.slots_an_area + i;

            if (dram->slots[slot_index].state == KVF_SLOT_READY) {
                visit(ctx, dram_location(dram, slot_index), dram->slots[slot_index].cookie);
            }
        }
    }
}
