/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_get.c: hits to pages, in groups.
 *
 *   hits, in the order in which they came:     A (9 MiB)        B (9 MiB)      C D E ... (small)
 *   groups of about 8 MiB:                  | 1 |    2     |        3        |      4       |
 *   copy:    H2D of a group                   1      2               3              4
 *   decode:  behind that copy                        1               2              3 ...
 *
 * A group is a place in device memory, and a list of parts that are copied and decoded together:
 * layers of one large block, or several small ones. Each copy costs the link some microseconds in
 * which nothing moves, so there are few: payloads run one behind the other on one stream, with
 * nothing between them, and a group ends with a block where it can; lists go on another stream.
 * Decodes follow on a third. A block is complete when the group that holds its end has been
 * decoded. In mode WINDOW its bytes leave the daemon's memory by this thread's hands, and the lease
 * ends there; else it ends behind the copy.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/gpu_internal.h"
#include "codec/codec_layout.h"

static uint64_t align_up(uint64_t bytes, uint64_t align)
{
    return (bytes + align - 1) / align * align;
}

/* ----------------------------------------------------------------------------------------------
 * Memory
 */

/* A part or a section of one tensor, whichever is larger. */
static uint64_t tensor_bytes_max(const struct kvf_codec_plan *plan,
                                 const struct kvf_codec_tensor *tensor)
{
    uint32_t n_tokens = plan->geometry.chunk_tokens;
    struct kvf_codec_sizes sizes;
    uint64_t section;

    if (tensor->dim == 0) {
        return 0;
    }
    tensor->ops->sizes(tensor, n_tokens, &sizes);
    section = kvf_raw_section_bytes(tensor, (size_t)tensor->n_rows * n_tokens);
    return kvf_sizes_total(&sizes) > section ? kvf_sizes_total(&sizes) : section;
}

/* The largest unit that a group has to hold. */
static uint64_t unit_bytes_max(const struct kvf_codec_plan *plan)
{
    uint64_t most = tensor_bytes_max(plan, &plan->raw_k);
    uint64_t bytes = tensor_bytes_max(plan, &plan->raw_v);

    most = bytes > most ? bytes : most;
    for (uint32_t i = 0; i < 2 * plan->n_kinds; i++) {
        bytes = tensor_bytes_max(plan, i % 2 ? &plan->kinds[i / 2].v : &plan->kinds[i / 2].k);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static uint64_t lists_bytes(const struct kvf_gpu *gpu)
{
    return align_up(KVF_GPU_GROUP_PARTS * sizeof(struct kvf_gpu_part) +
                        (uint64_t)KVF_GPU_GROUP_ITEMS * gpu->plan.geometry.chunk_tokens *
                            sizeof(uint32_t),
                    KVF_GPU_ALIGN_BYTES);
}

static void groups_size(struct kvf_gpu *gpu)
{
    uint64_t window = gpu->options.load_window_bytes != 0 ? gpu->options.load_window_bytes
                                                          : KVF_GPU_WINDOW_BYTES;
    uint64_t unit = align_up(unit_bytes_max(&gpu->plan), KVF_GPU_ALIGN_BYTES);
    uint64_t most = gpu->options.load_group_bytes != 0 ? gpu->options.load_group_bytes
                                                       : KVF_GPU_GROUP_BYTES;
    uint64_t n;

    gpu->group_target_bytes = window / 8 < most ? window / 8 : most;
    if (gpu->group_target_bytes < unit) {
        gpu->group_target_bytes = unit;
    }
    gpu->group_bytes = align_up(gpu->group_target_bytes / 2 * 3, KVF_GPU_ALIGN_BYTES);
    n = window / gpu->group_bytes;
    n = n < KVF_GPU_GROUPS_MIN ? KVF_GPU_GROUPS_MIN : n;
    gpu->n_groups = (uint32_t)(n < KVF_GPU_GROUPS_MAX ? n : KVF_GPU_GROUPS_MAX);
}

static int device_memory_take(struct kvf_gpu *gpu)
{
    uint64_t one = gpu->group_bytes + lists_bytes(gpu);
    void *memory = NULL;
    uint64_t address;
    int status = kvf_gpu_device_result(
        gpu->device, gpu->device->driver.cuMemAlloc(&gpu->group_memory, gpu->n_groups * one),
        "cuMemAlloc for blocks on their way in");

    if (status == KVF_OK) {
        status = kvf_gpu_host_alloc(gpu->device, gpu->n_groups * lists_bytes(gpu), &memory,
                                    &address);
        gpu->group_lists = memory;
        memory = NULL;
    }
    if (status == KVF_OK && gpu->options.pinning == KVF_GPU_PIN_WINDOW) {
        status = kvf_gpu_host_alloc(gpu->device, gpu->n_groups * gpu->group_bytes, &memory,
                                    &address);
        gpu->group_window = memory;
    }
    for (uint32_t i = 0; i < gpu->n_groups && status == KVF_OK; i++) {
        struct kvf_gpu_group *group = &gpu->groups[i];

        group->address = gpu->group_memory + i * one;
        group->lists_address = group->address + gpu->group_bytes;
        group->lists = gpu->group_lists + i * lists_bytes(gpu);
        if (gpu->group_window != NULL) {
            group->window = gpu->group_window + i * gpu->group_bytes;
        }
        status = kvf_gpu_event_create(gpu->device, &group->uploaded);
        if (status == KVF_OK) {
            status = kvf_gpu_event_create(gpu->device, &group->copied);
        }
        if (status == KVF_OK) {
            status = kvf_gpu_event_create(gpu->device, &group->decoded);
        }
        kvf_gpu_times_make(gpu, &group->times);
    }
    return status;
}

int kvf_gpu_get_wake(struct kvf_gpu *gpu)
{
    bool is_ok;
    int status;

    groups_size(gpu);
    gpu->groups = calloc(gpu->n_groups, sizeof(*gpu->groups));
    gpu->cut_page_ids = calloc((size_t)KVF_GPU_GROUP_ITEMS * gpu->plan.geometry.chunk_tokens,
                               sizeof(*gpu->cut_page_ids));
    gpu->cut_parts = calloc(KVF_GPU_GROUP_PARTS, sizeof(*gpu->cut_parts));
    gpu->cut_lists = calloc(KVF_GPU_GROUP_PARTS, sizeof(*gpu->cut_lists));
    is_ok = gpu->groups != NULL && gpu->cut_page_ids != NULL && gpu->cut_parts != NULL &&
            gpu->cut_lists != NULL;
    if (!is_ok) {
        return KVF_ERR_NO_MEMORY;
    }
    status = device_memory_take(gpu);
    return status == KVF_OK ? kvf_gpu_loop_wake(gpu) : status;
}

void kvf_gpu_get_sleep(struct kvf_gpu *gpu)
{
    const struct kvf_gpu_driver *driver = &gpu->device->driver;

    for (uint32_t i = 0; gpu->groups != NULL && i < gpu->n_groups; i++) {
        kvf_gpu_event_drop(gpu, gpu->groups[i].uploaded);
        kvf_gpu_event_drop(gpu, gpu->groups[i].copied);
        kvf_gpu_event_drop(gpu, gpu->groups[i].decoded);
        kvf_gpu_times_drop(gpu, &gpu->groups[i].times);
    }
    free(gpu->groups);
    gpu->groups = NULL;
    gpu->groups_in_flight = gpu->group_first = 0;
    kvf_gpu_peeks_sleep(gpu);
    kvf_gpu_loop_sleep(gpu);
    free(gpu->cut_parts);
    free(gpu->cut_lists);
    free(gpu->cut_page_ids);
    gpu->cut_parts = NULL;
    gpu->cut_lists = NULL;
    gpu->cut_page_ids = NULL;
    kvf_gpu_host_free(gpu->device, gpu->group_window);
    kvf_gpu_host_free(gpu->device, gpu->group_lists);
    gpu->group_window = gpu->group_lists = NULL;
    (void)driver->cuMemFree(gpu->group_memory);
    gpu->group_memory = 0;
}

/* ----------------------------------------------------------------------------------------------
 * Hits, and their end
 */

/* Give the lease up. What was read under it counts only if that says so. */
static void lease_end(struct kvf_gpu *gpu, struct kvf_gpu_item *item)
{
    int status;

    if (!item->is_leased) {
        return;
    }
    item->is_leased = false;
    status = kvf_lease_release(gpu->client, item->hit.lease);
    if (item->status == KVF_OK) {
        item->status = status;
    }
}

static void item_end(struct kvf_gpu *gpu, struct kvf_gpu_item *item)
{
    lease_end(gpu, item);
    kvf_gpu_peek_give(gpu, item);
    kvf_gpu_loop_give(gpu, item);
    if (item->pin != NULL) {
        item->pin->n_uses--;
        item->pin = NULL;
    }
    kvf_gpu_item_done(gpu, item, item->status, item->hit.tier);
}

/* Runs while completions are taken: only notes. */
static void on_block(struct kvf_client_sink *sink, const struct kvf_event *event, uint64_t value)
{
    struct kvf_gpu *gpu = sink->arg;
    struct kvf_gpu_request *request =
        (struct kvf_gpu_request *)((char *)sink - offsetof(struct kvf_gpu_request, sink));
    struct kvf_gpu_item *item = &request->items[event->index];

    item->hit = event->hit;
    item->is_device = event->hit.tier == KVF_TIER_HBM;
    item->device_offset = value;
    if (event->hit.status != KVF_OK) {
        kvf_gpu_item_done(gpu, item, event->hit.status, event->hit.tier);
        return;
    }
    item->is_leased = true;
    gpu->has_canceled_hits = gpu->has_canceled_hits || request->is_canceled;
    item->next = NULL;
    *gpu->hits_tail = item;
    gpu->hits_tail = &item->next;
}

/* End the hits of which nothing is queued and nobody wants anything any longer. */
static void canceled_hits_end(struct kvf_gpu *gpu)
{
    struct kvf_gpu_item **link = &gpu->hits;

    if (!gpu->has_canceled_hits) {
        return;
    }
    gpu->has_canceled_hits = false;
    while (*link != NULL) {
        struct kvf_gpu_item *item = *link;

        if (item->status == KVF_ERR_CANCELED) {
            *link = item->next;
            item_end(gpu, item);
        } else {
            link = &item->next;
        }
    }
    gpu->hits_tail = link;
}

/* ----------------------------------------------------------------------------------------------
 * Cutting
 */

/* Begin with the next hit. False: there is none. */
static bool cut_begin(struct kvf_gpu *gpu)
{
    struct kvf_gpu_cut *cut = &gpu->cut;
    struct kvf_gpu_item *item = gpu->hits;
    struct kvf_block_ranges ranges = {0};

    if (item == NULL) {
        return false;
    }
    if (item->is_device && item->status == KVF_OK) {
        int status = kvf_gpu_peek_query(gpu, item);

        if (status == KVF_EMPTY) {
            return false;
        }
        item->status = status;
    }
    gpu->hits = item->next;
    if (gpu->hits == NULL) {
        gpu->hits_tail = &gpu->hits;
    }
    cut->item = item;
    cut->has_unit = false;
    cut->is_section = false;
    ranges.token_first = item->token_first;
    ranges.n_tokens = item->n_tokens;
    if (item->status != KVF_OK) {
        return true; /* canceled, or the GPU has failed */
    }
    item->status = item->is_device ? kvf_gpu_peek_open(gpu, item, &ranges, &cut->reader)
                                   : kvf_block_open(&gpu->plan, item->hit.record,
                                                    item->hit.record_bytes, &ranges, &cut->reader);
    if (item->status == KVF_ERR_INVALID) {
        item->status = KVF_ERR_MISMATCH; /* other tokens than are wanted */
    }
    if (item->status == KVF_OK && !item->is_device) {
        item->pin = kvf_gpu_pin_hit(gpu, item->hit.lease);
        if (item->pin != NULL) {
            item->pin->n_uses++;
        }
    }
    return true;
}

/* The next part or section of the block being cut. KVF_OK; KVF_EMPTY: it is at its end, perhaps
 * because it is corrupt, which item->status says. */
static int cut_peek(struct kvf_gpu_cut *cut)
{
    int status = cut->item->status == KVF_OK ? KVF_OK : KVF_EMPTY;

    if (cut->has_unit || status == KVF_EMPTY) {
        return status;
    }
    if (!cut->is_section) {
        status = kvf_block_next_part(&cut->reader, &cut->part);
        cut->is_section = status == KVF_EMPTY;
    }
    if (cut->is_section) {
        status = kvf_block_next_section(&cut->reader, &cut->section);
    }
    cut->has_unit = status == KVF_OK;
    if (status != KVF_OK && status != KVF_EMPTY) {
        cut->item->status = status;
        status = KVF_EMPTY;
    }
    return status;
}

static struct kvf_gpu_list list_of(const struct kvf_gpu *gpu)
{
    const struct kvf_gpu_cut *cut = &gpu->cut;
    uint32_t layer = cut->is_section ? cut->section.layer : cut->part.layer;
    uint8_t codec = cut->is_section ? (uint8_t)KVF_CODEC_NONE : cut->part.tensor->ops->id;
    uint8_t kind = codec != KVF_CODEC_RAW ? gpu->kinds.layer_kinds[layer] : 0;

    if (!cut->is_section && kvf_gpu_is_looped(gpu)) {
        return (struct kvf_gpu_list){KVF_CODEC_SAW, 0}; /* layers of a block stay together */
    }
    return (struct kvf_gpu_list){codec, kind};
}

/* Page ids of an item, once a group. Returns the index of the first. */
static uint32_t group_page_ids(struct kvf_gpu *gpu, struct kvf_gpu_group *group,
                               struct kvf_gpu_item *item)
{
    if (group->last_item != item) {
        group->first_item = group->first_item != NULL ? group->first_item : item;
        group->last_item = item;
        group->last_first_page = group->n_page_ids;
        memcpy(gpu->cut_page_ids + group->n_page_ids, item->pages,
               item->n_pages * sizeof(*item->pages));
        group->n_page_ids += item->n_pages;
        group->n_items++;
    }
    return group->last_first_page;
}

/* Does what is to be decoded next fit into this group? */
static bool group_takes(const struct kvf_gpu *gpu, const struct kvf_gpu_group *group)
{
    const struct kvf_gpu_cut *cut = &gpu->cut;
    const struct kvf_gpu_request *request = cut->item->request;
    uint64_t bytes = cut->is_section ? cut->section.bytes : cut->part.bytes;

    if (group->request != NULL &&
        (group->request->region != request->region || group->request->stream != request->stream)) {
        return false;
    }
    return (cut->item->is_device || /* nothing of it is copied */
            (align_up(group->used_bytes, KVF_BLOCK_ALIGN_BYTES) + bytes <= gpu->group_bytes &&
             group->n_spans < KVF_GPU_GROUP_SPANS)) &&
           group->n_parts < KVF_GPU_GROUP_PARTS &&
           (group->last_item == cut->item || group->n_items < KVF_GPU_GROUP_ITEMS);
}

/* Append the bytes of a unit. Returns where they will be in the group's memory. */
static uint64_t group_append(struct kvf_gpu_group *group, const struct kvf_gpu_item *item,
                             uint64_t offset, uint64_t bytes)
{
    const uint8_t *from = (const uint8_t *)item->hit.payload + offset;
    struct kvf_gpu_span *last = group->n_spans > 0 ? &group->spans[group->n_spans - 1] : NULL;
    uint64_t at;

    if (last != NULL && last->from + last->bytes == from && last->pin == item->pin) {
        at = last->offset + last->bytes;
        last->bytes += bytes;
    } else {
        at = align_up(group->used_bytes, KVF_BLOCK_ALIGN_BYTES);
        group->spans[group->n_spans++] = (struct kvf_gpu_span){from, at, bytes, item->pin};
    }
    group->used_bytes = at + bytes;
    return at;
}

static void group_add(struct kvf_gpu *gpu, struct kvf_gpu_group *group)
{
    struct kvf_gpu_cut *cut = &gpu->cut;
    struct kvf_gpu_item *item = cut->item;
    const struct kvf_gpu_region *region = item->request->region;
    uint32_t layer = cut->is_section ? cut->section.layer : cut->part.layer;
    bool is_v = cut->is_section ? cut->section.is_v : cut->part.is_v;
    uint64_t offset = cut->is_section ? cut->section.offset : cut->part.offset;
    uint64_t bytes = cut->is_section ? cut->section.bytes : cut->part.bytes;
    uint64_t stored = item->is_device ? kvf_gpu_item_payload(item) + offset
                                      : group->address + group_append(group, item, offset, bytes);
    struct kvf_gpu_part *part = &gpu->cut_parts[group->n_parts];

    gpu->cut_lists[group->n_parts++] = list_of(gpu);
    group->request = item->request;
    *part = (struct kvf_gpu_part){
        .base = region->layers[is_v][layer],
        .stored = stored,
        .first_page = group_page_ids(gpu, group, item),
        .n_tokens = cut->reader.page.header.n_tokens,
        .token_first = (uint16_t)cut->reader.ranges.token_first,
        .n_wanted = (uint16_t)cut->reader.ranges.n_tokens,
        .layer = (uint16_t)layer,
        .is_v = is_v,
    };
    part->block = group->n_items - 1;
    kvf_gpu_part_given(gpu, part);
    if (cut->is_section) {
        part->n_vectors = cut->section.count;
    } else {
        part->part_bytes = (uint32_t)cut->part.bytes;
        part->loop = kvf_gpu_part_loop(&gpu->plan, layer, cut->part.tensor);
    }
    if (part->n_wanted > group->tokens_max) {
        group->tokens_max = part->n_wanted;
    }
    cut->has_unit = false;
}

/* How far a group may be filled by the block that is being cut: to its end if that fits, since each
 * piece of a block is a copy of its own; else it begins here only if this group is short so far. */
static uint64_t fill_limit(const struct kvf_gpu *gpu, const struct kvf_gpu_group *group,
                           uint64_t target_bytes, uint64_t bytes_max)
{
    const struct kvf_gpu_cut *cut = &gpu->cut;
    uint64_t offset = cut->is_section ? cut->section.offset : cut->part.offset;
    uint64_t rest = cut->item->hit.payload_bytes - offset;

    if (group->used_bytes + rest + KVF_BLOCK_ALIGN_BYTES <= bytes_max) {
        return bytes_max;
    }
    return group->used_bytes <= target_bytes / 2 ? target_bytes : 0;
}

/* Fill a group with what there is to decode, up to a size or to the end of a block that lies up to
 * half of that behind it. False: nothing. */
static bool group_fill(struct kvf_gpu *gpu, struct kvf_gpu_group *group, uint64_t target_bytes)
{
    uint64_t bytes_max = target_bytes < gpu->group_target_bytes ? target_bytes : gpu->group_bytes;
    struct kvf_gpu_cut *cut = &gpu->cut;
    const struct kvf_gpu_item *item = NULL;
    uint64_t limit = target_bytes;

    while (group->used_bytes < limit && group->n_ends < KVF_GPU_GROUP_ITEMS) {
        if (cut->item == NULL && (group->used_bytes >= target_bytes || !cut_begin(gpu))) {
            break;
        }
        if (cut_peek(cut) == KVF_EMPTY) {
            group->ends[group->n_ends++] = cut->item;
            cut->item = NULL;
            continue;
        }
        if (cut->item != item) {
            item = cut->item;
            limit = fill_limit(gpu, group, target_bytes, bytes_max);
        }
        if (group->used_bytes >= limit || !group_takes(gpu, group)) {
            break;
        }
        group_add(gpu, group);
    }
    /* a block that ends here is complete with this group, not with the next one */
    if (cut->item != NULL && group->n_ends < KVF_GPU_GROUP_ITEMS && cut_peek(cut) == KVF_EMPTY) {
        group->ends[group->n_ends++] = cut->item;
        cut->item = NULL;
    }
    return group->n_parts > 0 || group->n_ends > 0;
}

/* ----------------------------------------------------------------------------------------------
 * Queueing
 */

/* Lists in the order in which they are decoded: what is patched is there. */
enum {
    LISTS_MAX = (KVF_CODEC_KIVI + 1) * KVF_CODEC_KINDS_MAX,
};

static struct kvf_gpu_list list_at(uint32_t i)
{
    return (struct kvf_gpu_list){(uint8_t)((i / KVF_CODEC_KINDS_MAX + 1) % (KVF_CODEC_KIVI + 1)),
                                 (uint8_t)(i % KVF_CODEC_KINDS_MAX)};
}

static uint32_t list_index(struct kvf_gpu_list list)
{
    return (list.codec + (uint32_t)KVF_CODEC_KIVI) % (KVF_CODEC_KIVI + 1) * KVF_CODEC_KINDS_MAX +
           list.kind;
}

/* Where each list begins among the parts, and at LISTS_MAX their end. */
static void lists_begin(const struct kvf_gpu *gpu, const struct kvf_gpu_group *group,
                        uint32_t first_out[LISTS_MAX + 1])
{
    memset(first_out, 0, (LISTS_MAX + 1) * sizeof(*first_out));
    for (uint32_t p = 0; p < group->n_parts; p++) {
        first_out[list_index(gpu->cut_lists[p]) + 1]++;
    }
    for (uint32_t i = 0; i < LISTS_MAX; i++) {
        first_out[i + 1] += first_out[i];
    }
}

/* Parts and page ids into pinned memory. Returns their bytes. */
static uint64_t lists_pack(struct kvf_gpu *gpu, struct kvf_gpu_group *group)
{
    struct kvf_gpu_part *parts = (struct kvf_gpu_part *)group->lists;
    uint8_t *to = (uint8_t *)(parts + group->n_parts);
    uint32_t next[LISTS_MAX + 1];

    lists_begin(gpu, group, next);
    for (uint32_t p = 0; p < group->n_parts; p++) {
        parts[next[list_index(gpu->cut_lists[p])]++] = gpu->cut_parts[p];
    }
    memcpy(to, gpu->cut_page_ids, group->n_page_ids * sizeof(uint32_t));
    to += group->n_page_ids * sizeof(uint32_t);
    return (uint64_t)(to - group->lists);
}

static int copy_in(struct kvf_gpu *gpu, uint64_t to, const void *from, uint64_t bytes, void *stream)
{
    return kvf_gpu_device_result(gpu->device,
                                 gpu->device->driver.cuMemcpyHtoDAsync(to, from, bytes, stream),
                                 "cuMemcpyHtoDAsync");
}

/* The group's parts and page ids to the device. */
static int lists_copy(struct kvf_gpu *gpu, struct kvf_gpu_group *group)
{
    uint64_t bytes = lists_pack(gpu, group);
    int status = bytes != 0
                     ? copy_in(gpu, group->lists_address, group->lists, bytes, gpu->up_stream)
                     : KVF_OK;

    return status == KVF_OK ? kvf_gpu_record(gpu, group->uploaded, gpu->up_stream) : status;
}

/* The group's bytes to the device. */
static int group_copy(struct kvf_gpu *gpu, struct kvf_gpu_group *group)
{
    int status = KVF_OK;

    for (uint32_t i = 0; i < group->n_spans && status == KVF_OK; i++) {
        const struct kvf_gpu_span *span = &group->spans[i];

        if (group->window != NULL) {
            memcpy(group->window + span->offset, span->from, span->bytes);
        } else {
            status = copy_in(gpu, group->address + span->offset, span->from, span->bytes,
                             gpu->in_stream);
        }
    }
    if (group->window != NULL && status == KVF_OK && group->used_bytes > 0) {
        status = copy_in(gpu, group->address, group->window, group->used_bytes, gpu->in_stream);
    }
    if (group->window != NULL || KVF_MUTANT(gpu_release_wait)) {
        for (uint32_t i = 0; i < group->n_ends; i++) {
            if (!group->ends[i]->is_device || KVF_MUTANT(gpu_release_wait)) {
                lease_end(gpu, group->ends[i]);
            }
        }
    }
    return status == KVF_OK ? kvf_gpu_record(gpu, group->copied, gpu->in_stream) : status;
}

static int group_decode(struct kvf_gpu *gpu, struct kvf_gpu_group *group, void *stream)
{
    const struct kvf_gpu_region *region = group->request->region;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t first[LISTS_MAX + 1];
    struct kvf_gpu_work work = {
        .pages = {region->strides[0], region->strides[1]},
        .page_ids = group->lists_address + group->n_parts * sizeof(struct kvf_gpu_part),
        .n_blocks = group->n_items,
        .n_layers = gpu->plan.geometry.n_layers,
        .tokens_a_page = region->tokens_a_page,
        .has_v = kvf_plan_has_v(&gpu->plan),
        .tokens_max = group->tokens_max,
    };
    int status = KVF_OK;

    lists_begin(gpu, group, first);
    for (uint32_t i = 0; i < LISTS_MAX && status == KVF_OK; i++) {
        struct kvf_gpu_list list = list_at(i);
        const struct kvf_gpu_kinds *kinds = list.codec == KVF_CODEC_RAW ? &gpu->raw_kinds
                                                                        : &gpu->kinds;
        uint32_t n;

        work.n_parts = first[i + 1] - first[i];
        if (work.n_parts == 0) {
            continue;
        }
        work.parts = group->lists_address + first[i] * sizeof(struct kvf_gpu_part);
        if (list.codec == KVF_CODEC_SAW && kvf_gpu_is_looped(gpu)) {
            status = kvf_gpu_loop_decode(gpu, group, &work, first[i], stream);
            continue;
        }
        memcpy(work.tensors, kinds->tensors[list.kind], sizeof(work.tensors));
        n = list.codec == KVF_CODEC_NONE ? kvf_gpu_patch(&work, launches)
                                         : kvf_gpu_decode(&work, list.codec, launches);
        if (n == 0) {
            snprintf(gpu->device->text, sizeof(gpu->device->text),
                     "no kernel decodes this profile");
            return KVF_ERR_UNSUPPORTED;
        }
        status = kvf_gpu_launch_all(gpu, &work, NULL, launches, n, stream);
    }
    return status;
}

static int group_queue(struct kvf_gpu *gpu, struct kvf_gpu_group *group)
{
    void *stream = group->request != NULL ? group->request->stream : gpu->get_stream;
    int status = lists_copy(gpu, group);

    if (status == KVF_OK) {
        status = group_copy(gpu, group);
    }
    if (status == KVF_OK && !KVF_MUTANT(gpu_lists_wait)) {
        status = kvf_gpu_wait(gpu, stream, group->uploaded);
    }
    if (status == KVF_OK && !KVF_MUTANT(gpu_copy_wait)) {
        status = kvf_gpu_wait(gpu, stream, group->copied);
    }
    if (status == KVF_OK && group->request != NULL) {
        kvf_gpu_times_begin(gpu, &group->times, stream);
        status = group_decode(gpu, group, stream);
        if (status == KVF_OK) {
            kvf_gpu_times_end(gpu, &group->times, stream);
        } else {
            group->times.is_begun = false; /* what has failed is what is to be told */
        }
    }
    return status == KVF_OK ? kvf_gpu_record(gpu, group->decoded, stream) : status;
}

/* Forget what a group held; memory and events stay. */
static void group_clear(struct kvf_gpu_group *group)
{
    group->request = NULL;
    group->used_bytes = 0;
    group->n_spans = group->n_items = group->n_page_ids = group->n_ends = group->tokens_max = 0;
    group->n_parts = 0;
    group->times.is_begun = false;
    group->first_item = group->last_item = NULL;
}

static struct kvf_gpu_group *group_at(struct kvf_gpu *gpu, uint32_t i)
{
    return &gpu->groups[(gpu->group_first + i) % gpu->n_groups];
}

/* End groups that have been decoded. */
static int groups_end(struct kvf_gpu *gpu)
{
    while (gpu->groups_in_flight > 0) {
        struct kvf_gpu_group *group = group_at(gpu, 0);
        int status = KVF_OK;

        if (!KVF_MUTANT(gpu_complete_wait)) {
            status = kvf_gpu_event_query(gpu->device, group->decoded);
        }
        if (status != KVF_OK) {
            return status == KVF_EMPTY ? KVF_OK : status;
        }
        kvf_gpu_times_take(gpu, &group->times, true);
        for (uint32_t i = 0; i < group->n_ends; i++) {
            item_end(gpu, group->ends[i]);
        }
        gpu->group_first = (gpu->group_first + 1) % gpu->n_groups;
        gpu->groups_in_flight--;
    }
    return KVF_OK;
}

int kvf_gpu_get_advance(struct kvf_gpu *gpu)
{
    int status = groups_end(gpu);

    canceled_hits_end(gpu);
    if (status == KVF_OK) {
        status = kvf_gpu_peeks_advance(gpu);
    }
    for (uint32_t n = 0;
         status == KVF_OK && n < KVF_GPU_GROUPS_A_CALL && gpu->groups_in_flight < gpu->n_groups;
         n++) {
        struct kvf_gpu_group *group = group_at(gpu, gpu->groups_in_flight);
        uint64_t target = gpu->groups_in_flight == 0 &&
                                  gpu->group_target_bytes > KVF_GPU_FIRST_GROUP_BYTES
                              ? KVF_GPU_FIRST_GROUP_BYTES
                              : gpu->group_target_bytes;

        group_clear(group);
        if (!group_fill(gpu, group, target)) {
            break;
        }
        gpu->groups_in_flight++;
        status = group_queue(gpu, group);
        if (status == KVF_OK) {
            status = groups_end(gpu);
        }
    }
    return status;
}

void kvf_gpu_get_fail(struct kvf_gpu *gpu, int status)
{
    for (struct kvf_gpu_request *request = gpu->requests; request != NULL;
         request = request->next) {
        if (request->is_put) {
            continue;
        }
        if (request->sink.is_used) {
            kvf_client_enter(gpu->client);
            kvf_request_abandon(gpu->client, request->daemon_request);
            kvf_client_leave(gpu->client);
            request->sink.is_used = false;
        }
        for (uint32_t i = 0; i < request->n; i++) {
            if (!request->items[i].is_done) {
                request->items[i].status = status;
                item_end(gpu, &request->items[i]);
            }
        }
    }
    gpu->hits = NULL;
    gpu->hits_tail = &gpu->hits;
    gpu->cut.item = NULL;
    gpu->groups_in_flight = 0;
}

void kvf_gpu_get_cancel(struct kvf_gpu *gpu, struct kvf_gpu_request *request)
{
    if (request->sink.is_used) {
        kvf_client_enter(gpu->client);
        kvf_request_cancel(gpu->client, request->daemon_request);
        kvf_client_leave(gpu->client);
    }
    /* A block that groups hold parts of ends with the last of these, or with the next one if it is
     * being cut: what is queued for it writes its pages. */
    for (uint32_t i = 0; i < request->n; i++) {
        request->items[i].status = KVF_ERR_CANCELED;
    }
    gpu->has_canceled_hits = true;
}

/* ----------------------------------------------------------------------------------------------
 * The call
 */
static uint32_t wanted_tokens(const struct kvf_gpu *gpu, const struct kvf_gpu_get_item *item)
{
    return item->n_tokens != 0 ? item->n_tokens
                               : gpu->plan.geometry.chunk_tokens - item->token_first;
}

/* Pages of all items; 0: an item is wrong. */
static uint32_t get_pages(const struct kvf_gpu *gpu, const struct kvf_gpu_region *region,
                          const struct kvf_gpu_get_item *items, uint32_t n)
{
    uint32_t chunk_tokens = gpu->plan.geometry.chunk_tokens;
    uint32_t n_pages = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t pages;

        if (items[i].struct_bytes != sizeof(items[i]) || !kvf_gpu_key_ok(&items[i].key) ||
            items[i].token_first >= chunk_tokens ||
            items[i].n_tokens > chunk_tokens - items[i].token_first || items[i].pages == NULL) {
            return 0;
        }
        pages = (wanted_tokens(gpu, &items[i]) + region->tokens_a_page - 1) / region->tokens_a_page;
        if (items[i].n_pages < pages) {
            return 0;
        }
        n_pages += pages;
    }
    return n_pages;
}

static int items_take(const struct kvf_gpu *gpu, struct kvf_gpu_request *request,
                      const struct kvf_gpu_get_item *items)
{
    uint32_t *ids = (uint32_t *)(request->items + request->n);
    uint32_t *next = ids;
    uint32_t tokens_a_page = request->region->tokens_a_page;

    for (uint32_t i = 0; i < request->n; i++) {
        struct kvf_gpu_item *item = &request->items[i];

        item->token_first = items[i].token_first;
        item->n_tokens = wanted_tokens(gpu, &items[i]);
        item->n_pages = (item->n_tokens + tokens_a_page - 1) / tokens_a_page;
        item->pages = next;
        memcpy(next, items[i].pages, item->n_pages * sizeof(*next));
        next += item->n_pages;
    }
    if (!kvf_gpu_pages_mark(request->region, ids, (uint32_t)(next - ids))) {
        return KVF_ERR_INVALID;
    }
    kvf_gpu_pages_unmark(request->region, ids, (uint32_t)(next - ids));
    return KVF_OK;
}

static int get_begin(struct kvf_gpu *gpu, struct kvf_gpu_request *request,
                     const struct kvf_gpu_get_item *items, struct kvf_shm_sqe *sqe,
                     void *wait_event)
{
    struct kvf_key *keys = calloc(request->n, sizeof(*keys));
    int status = KVF_OK;

    if (keys == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < request->n; i++) {
        keys[i] = items[i].key;
    }
    if (wait_event != NULL && !KVF_MUTANT(gpu_reader_wait)) {
        /* whatever is decoded on this stream from here on comes behind it */
        status = kvf_gpu_device_result(
            gpu->device, gpu->device->driver.cuStreamWaitEvent(request->stream, wait_event, 0),
            "cuStreamWaitEvent");
    }
    if (kvf_session_is_live(gpu->client) && gpu->client->session->is_device_asked) {
        sqe->flags |= KVF_SQE_DEVICE;
    }
    if (status == KVF_OK) {
        request->sink = (struct kvf_client_sink){.on_block = on_block, .arg = gpu};
        kvf_client_enter(gpu->client);
        status = kvf_request_keys(gpu->client, KVF_OP_GET, keys, request->n, sqe, &request->sink, 0,
                                  &request->daemon_request);
        kvf_client_leave(gpu->client);
    }
    free(keys);
    return status;
}

int kvf_gpu_get(struct kvf_gpu *gpu, struct kvf_gpu_region *region,
                const struct kvf_gpu_get_item *items, uint32_t n,
                const struct kvf_get_options *options, void *wait_event, void *stream,
                uint64_t user, uint64_t *request_out)
{
    struct kvf_gpu_request *request = NULL;
    struct kvf_shm_sqe sqe = {0};
    uint32_t n_pages = 0;
    int status;

    if (gpu == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    if (region == NULL || items == NULL || n == 0 || n > KVF_REQUEST_KEYS_MAX ||
        request_out == NULL || !kvf_get_sqe(gpu->client, options, &sqe)) {
        return KVF_ERR_INVALID;
    }
    if (kvf_gpu_device_enter(gpu->device) != KVF_OK) {
        return KVF_ERR_IO;
    }
    status = kvf_gpu_begin(gpu);
    if (status == KVF_OK) {
        n_pages = get_pages(gpu, region, items, n);
        status = n_pages != 0 ? KVF_OK : KVF_ERR_INVALID;
    }
    if (status == KVF_OK) {
        request = kvf_gpu_request_new(gpu, region, n, n_pages, user);
        status = request != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
    }
    if (request != NULL) {
        request->stream = stream != NULL ? stream : gpu->get_stream;
        *request_out = request->id;
        status = items_take(gpu, request, items);
        if (status == KVF_OK) {
            status = gpu->agent != NULL ? kvf_gpu_remote_get(gpu, request, items, sqe.budget_ms,
                                                             wait_event, stream)
                                        : get_begin(gpu, request, items, &sqe, wait_event);
        }
        if (status != KVF_OK) {
            kvf_gpu_request_drop(gpu, request);
        }
    }
    kvf_gpu_device_leave(gpu->device);
    return status;
}
