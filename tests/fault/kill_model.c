/* SPDX-License-Identifier: Apache-2.0
 *
 * kill_model.c: what may be missing from a store after a kill.
 */
#include "tests/fault/kill_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvferry.h"

#define HEAD_BYTES  (1u << 20)
#define SPARE       4    /* segments that are open, being opened, or being reclaimed */
#define KEPT_FACTOR 1.34 /* a quarter of each segment may go to records that are kept */
#define FILL_FACTOR 0.95 /* of a segment; the rest: page 0, footer, what no record fits into */
#define HOLE_SLACK  2    /* segments: puts in flight together may be written in any order */

void kill_model_init(struct kill_model *model, uint64_t store_bytes, uint64_t segment_bytes)
{
    memset(model, 0, sizeof(*model));
    model->store_bytes = store_bytes;
    model->segment_bytes = segment_bytes;
    model->n_segments = (uint32_t)((store_bytes - HEAD_BYTES) / segment_bytes);
    model->life = 1;
}

void kill_model_fini(struct kill_model *model)
{
    free(model->blocks);
    model->blocks = NULL;
}

static double opened_now(const struct kill_model *model)
{
    return model->opened +
           (double)model->life_bytes * KEPT_FACTOR / ((double)model->segment_bytes * FILL_FACTOR);
}

uint32_t kill_model_put(struct kill_model *model, uint32_t payload_bytes)
{
    uint64_t record_bytes = KVF_RECORD_PAGE_BYTES + ((payload_bytes + 4095u) & ~4095u);
    struct kill_block *block;

    if (model->n_blocks == model->blocks_size) {
        model->blocks_size = model->blocks_size == 0 ? 4096 : 2 * model->blocks_size;
        model->blocks = realloc(model->blocks, model->blocks_size * sizeof(*model->blocks));
        if (model->blocks == NULL) {
            abort();
        }
    }
    model->put_bytes += record_bytes;
    model->life_bytes += record_bytes;
    block = &model->blocks[model->n_blocks];
    *block = (struct kill_block){.number = model->n_blocks,
                                 .payload_bytes = payload_bytes,
                                 .opened = opened_now(model),
                                 .end_bytes = model->put_bytes};
    return model->n_blocks++;
}

void kill_model_log(struct kill_model *model, uint32_t index)
{
    model->blocks[index].is_logged = true;
    model->n_logged++;
}

static double age(const struct kill_model *model, const struct kill_block *block)
{
    return opened_now(model) - block->opened;
}

void kill_model_life_ends(struct kill_model *model)
{
    for (uint32_t i = 0; i < model->n_blocks; i++) {
        struct kill_block *block = &model->blocks[i];

        block->may_have_moved |= block->hit_life == model->life &&
                                 age(model, block) > model->n_segments / 2.0;
    }
    model->opened = opened_now(model) + 2;
    model->life_bytes = 0;
    model->life++;
}

bool kill_model_is_due(const struct kill_model *model, const struct kill_block *block)
{
    return block->is_logged && age(model, block) < (double)model->n_segments - SPARE;
}

uint32_t kill_model_first(const struct kill_model *model)
{
    uint32_t i = model->n_blocks;

    /* kept records can be older than the store is large, but not for long */
    while (i > 0 && model->put_bytes - model->blocks[i - 1].end_bytes < 2 * model->store_bytes) {
        i--;
    }
    return i;
}

static void print_block(const struct kill_model *model, const struct kill_block *block,
                        const char *what)
{
    fprintf(stderr,
            "block %" PRIu64 " (%u bytes, at most %.1f of %u segments ago, %" PRIu64
            " bytes before the newest): %s\n",
            block->number, block->payload_bytes, age(model, block), model->n_segments,
            model->put_bytes - block->end_bytes, what);
}

uint32_t kill_model_lost(const struct kill_model *model)
{
    uint32_t n = 0;

    for (uint32_t i = kill_model_first(model); i < model->n_blocks; i++) {
        const struct kill_block *block = &model->blocks[i];

        if (!block->is_here && kill_model_is_due(model, block)) {
            n++;
            print_block(model, block, "logged as durable, and lost");
        }
    }
    return n;
}

uint32_t kill_model_holes(const struct kill_model *model)
{
    const struct kill_block *youngest = NULL;
    uint32_t n = 0;

    for (uint32_t i = kill_model_first(model); i < model->n_blocks; i++) {
        if (model->blocks[i].is_logged && !model->blocks[i].is_here) {
            youngest = &model->blocks[i];
        }
    }
    for (uint32_t i = kill_model_first(model); youngest != NULL && i < model->n_blocks; i++) {
        const struct kill_block *block = &model->blocks[i];

        if (block->is_here && !block->may_have_moved &&
            block->end_bytes + HOLE_SLACK * model->segment_bytes < youngest->end_bytes) {
            n++;
            print_block(model, block, "there");
            print_block(model, youngest, "is younger, and missing");
        }
    }
    return n;
}
