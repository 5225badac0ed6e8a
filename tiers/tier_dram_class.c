/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_dram_class.c: slot classes of the memory tier.
 *
 * Eight sizes an octave lose at most a ninth inside a slot, and formats of a fixed size, which get
 * a class of their own, lose less than 4 KiB. What does not divide an area is lost at its end; runs
 * of several areas keep that small for large slots.
 */
#include "tiers/tier_dram_internal.h"

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

uint64_t dram_run_tail_bytes(const struct dram_tier *dram, const struct dram_class *class,
                             uint32_t n_areas)
{
    return n_areas * dram->plan.area_bytes % class->slot_bytes;
}

uint32_t dram_run_areas(const struct dram_tier *dram, const struct dram_class *class,
                        uint32_t max_areas, bool is_first)
{
    /* Tails of 1/16, 1/32 and 1/64 of a run. The first run of a class stays small, as it may serve
     * a single record. Later ones serve many, and where records vary in size, and so leave a part
     * of their slots unused too, it pays to lose less at the end. */
    uint32_t n_wanted = is_first || class->is_exact ? 1 : 3;
    uint32_t good[3] = {0};
    uint32_t best = 0;
    uint64_t best_tail_bytes = 0;

    for (uint32_t n = 1; n <= max_areas; n++) {
        uint64_t run_bytes = n * dram->plan.area_bytes;
        uint64_t tail_bytes = dram_run_tail_bytes(dram, class, n);

        if (run_bytes < class->slot_bytes) {
            continue;
        }
        for (uint32_t i = 0; i < n_wanted; i++) {
            if (good[i] == 0 && tail_bytes * (16u << i) <= run_bytes) {
                good[i] = n;
            }
        }
        if (good[n_wanted - 1] != 0) {
            return n;
        }
        /* the smaller share of tail, compared without division */
        if (best == 0 || tail_bytes * best < best_tail_bytes * n) {
            best = n;
            best_tail_bytes = tail_bytes;
        }
    }
    return good[1] != 0 ? good[1] : good[0] != 0 ? good[0] : best;
}

static uint32_t class_add(struct dram_tier *dram, uint64_t slot_bytes, bool is_exact)
{
    uint32_t index = dram->n_classes;
    struct dram_class *class = &dram->classes[index];
    uint32_t place = index;

    assert(index < DRAM_CLASSES_MAX);
    class->slot_bytes = slot_bytes;
    class->is_exact = is_exact;
    class->fits = dram_run_areas(dram, class, dram->plan.areas_a_piece, true) != 0;
    dram->n_classes++;
    while (place > 0 && dram->classes[dram->classes_by_size[place - 1]].slot_bytes > slot_bytes) {
        dram->classes_by_size[place] = dram->classes_by_size[place - 1];
        place--;
    }
    dram->classes_by_size[place] = (uint16_t)index;
    return index;
}

void dram_classes_init(struct dram_tier *dram)
{
    uint64_t largest_bytes = KVF_RECORD_PAGE_BYTES + (uint64_t)KVF_PAYLOAD_BYTES_MAX;
    uint64_t previous_bytes = 0;

    for (uint32_t octave = 0; octave < DRAM_OCTAVES; octave++) {
        for (uint32_t step = 0; step < DRAM_STEPS; step++) {
            uint64_t base_bytes = (uint64_t)KVF_DRAM_SLOT_BYTES_MIN << octave;
            uint64_t slot_bytes = round_up(base_bytes + base_bytes * step / DRAM_STEPS,
                                           KVF_PAGE_BYTES);

            /* the smallest octaves have fewer than eight sizes that are whole pages */
            if (slot_bytes != previous_bytes) {
                class_add(dram, slot_bytes, false);
            }
            previous_bytes = slot_bytes;
        }
    }
    class_add(dram, KVF_PAYLOAD_BYTES_MAX, false);
    class_add(dram, largest_bytes, false);
}

/* The place in classes_by_size of the smallest slots that hold record_bytes; n_classes: none do. */
static uint32_t place_for(const struct dram_tier *dram, uint64_t record_bytes)
{
    uint32_t low = 0, high = dram->n_classes;

    while (low < high) {
        uint32_t middle = (low + high) / 2;

        if (dram->classes[dram->classes_by_size[middle]].slot_bytes >= record_bytes) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

uint32_t dram_class_for(const struct dram_tier *dram, uint64_t record_bytes)
{
    uint32_t place = place_for(dram, record_bytes);

    if (place == dram->n_classes || !dram->classes[dram->classes_by_size[place]].fits) {
        return DRAM_NONE;
    }
    return dram->classes_by_size[place];
}

int kvf_dram_register_format(struct kvf_tier *tier, uint64_t record_bytes)
{
    struct dram_tier *dram = dram_of(tier);
    uint64_t slot_bytes = round_up(record_bytes, KVF_PAGE_BYTES);
    uint32_t place;

    if (slot_bytes < KVF_DRAM_SLOT_BYTES_MIN) {
        slot_bytes = KVF_DRAM_SLOT_BYTES_MIN;
    }
    place = place_for(dram, slot_bytes);
    if (place == dram->n_classes || slot_bytes > dram->plan.areas_a_piece * dram->plan.area_bytes) {
        return KVF_ERR_TOO_LARGE;
    }
    if (dram->classes[dram->classes_by_size[place]].slot_bytes == slot_bytes) {
        return KVF_OK;
    }
    if (dram->n_formats == KVF_DRAM_FORMATS_MAX) {
        return KVF_ERR_BUSY;
    }
    class_add(dram, slot_bytes, true);
    dram->n_formats++;
    return KVF_OK;
}

bool kvf_dram_fits(const struct kvf_tier *tier, uint64_t record_bytes)
{
    return record_bytes > 0 && dram_class_for(dram_of_const(tier), record_bytes) != DRAM_NONE;
}

uint64_t kvf_dram_record_bytes_max(const struct kvf_tier *tier)
{
    const struct dram_tier *dram = dram_of_const(tier);

    for (uint32_t place = dram->n_classes; place > 0; place--) {
        const struct dram_class *class = &dram->classes[dram->classes_by_size[place - 1]];

        if (class->fits) {
            return class->slot_bytes;
        }
    }
    return 0;
}
