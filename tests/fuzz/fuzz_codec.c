/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_codec.c: records from someone who can write what he likes, checksums included.
 *
 * Input: byte 0 chooses the plan, byte 1 the range to decode, the rest is a packed record: the
 * block header, the used part of the layer tables, the payload (as in tests/data/codec). The header
 * is repaired where a check would end the run at once (magic, version, lengths, checksum) and the
 * record is checked, matched and decoded. Nothing may crash, and nothing outside the pages may be
 * written.
 */
#include "codec/codec.h"
#include "codec/profile_table.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 2, /* of most plans */
    LAYERS_MAX = 11,
    TOKENS = 9,
    N_PLANS = 25,
};

/* A plan, and pages for what it decodes. */
struct target {
    struct kvf_codec_plan plan;
    void *workspace;
    uint8_t *pages;
    size_t pages_bytes;
    void *k_layers[LAYERS_MAX];
    void *v_layers[LAYERS_MAX];
    struct kvf_kv_view view;
};

static const struct {
    const char *profile; /* NULL: that of own_create */
    uint8_t dtype;
    uint16_t dim_k;
    uint16_t dim_v;
    uint16_t n_tokens;
} plans[N_PLANS] = {
    {"balanced", KVF_DTYPE_BF16, 64, 64, TOKENS}, {"saw8", KVF_DTYPE_BF16, 80, 80, TOKENS},
    {"exact", KVF_DTYPE_BF16, 64, 64, 20},        {"exact", KVF_DTYPE_F32, 64, 64, 20},
    {"raw", KVF_DTYPE_BF16, 64, 32, TOKENS},      {"balanced", KVF_DTYPE_BF16, 128, 64, 130},
    {"saw6", KVF_DTYPE_BF16, 80, 80, TOKENS},     {"saw5", KVF_DTYPE_BF16, 128, 128, TOKENS},
    {"saw3", KVF_DTYPE_BF16, 64, 12, 130},        {"saw2", KVF_DTYPE_F32, 128, 7, TOKENS},
    {"kivi4-g32", KVF_DTYPE_BF16, 64, 64, 20},    {"kivi2-g128", KVF_DTYPE_F32, 128, 33, 20},
    {"kivi4-g64", KVF_DTYPE_BF16, 80, 80, 130},   {"tq4", KVF_DTYPE_BF16, 64, 12, 130},
    {"tq3.5", KVF_DTYPE_BF16, 64, 16, TOKENS},    {"tq2", KVF_DTYPE_BF16, 128, 80, TOKENS},
    {"tq3-qjl", KVF_DTYPE_BF16, 16, 12, TOKENS},  {"max-edges", KVF_DTYPE_BF16, 64, 64, TOKENS},
    {NULL, KVF_DTYPE_BF16, 64, 64, TOKENS},       {"x4", KVF_DTYPE_BF16, 64, 0, TOKENS},
    {"x3", KVF_DTYPE_BF16, 96, 0, 130},           {"x2", KVF_DTYPE_BF16, 128, 0, 33},
    {"xcl3", KVF_DTYPE_BF16, 64, 0, TOKENS},      {"xcl2-g4", KVF_DTYPE_BF16, 64, 0, TOKENS},
    {"xgcl2", KVF_DTYPE_BF16, 64, 0, TOKENS},
};

/* Differences need layers to be differences of. */
static uint32_t layers_of(int which)
{
    const struct kvf_profile *profile = plans[which].profile != NULL
                                            ? kvf_profile_find(plans[which].profile)
                                            : NULL;
    if (profile == NULL || profile->first_layers == 0) {
        return LAYERS;
    }
    return profile->rebase_layers != 0 ? LAYERS_MAX : 5;
}

/* A profile of a model's own: two kinds of layers, four codecs, means that blocks do not have. */
static struct kvf_profile_table *own_create(void)
{
    const struct kvf_profile_tensor saw = {.codec = KVF_CODEC_SAW,
                                           .bits = 4,
                                           .flags = KVF_TENSOR_SIGNS | KVF_TENSOR_CENTER_PROFILE,
                                           .rotate = 1,
                                           .rot_seed = KVF_PROFILE_ROTATION_SEED};
    struct kvf_profile_table *table = kvf_profile_table_create();
    char why[KVF_PROFILE_WHY_BYTES];
    if (table == NULL) {
        abort();
    }
    memcpy(table->name, "own", 4);
    table->weights_digest[0] = 1;
    table->workloads = KVF_WORKLOAD_OTHER;
    table->n_layers = LAYERS;
    table->n_heads = 1;
    table->dim_k = table->dim_v = 64;
    table->rope_state = KVF_ROPE_POST;
    table->n_kinds = 2;
    table->layer_kinds[1] = 1;
    table->kinds[0].k = table->kinds[1].k = table->kinds[0].v = saw;
    table->kinds[0].v.codec = table->kinds[1].k.codec = KVF_CODEC_TQ;
    table->kinds[0].v.bits = 3;
    table->kinds[0].v.flags = KVF_TENSOR_SIGNS | KVF_TENSOR_SPLIT;
    table->kinds[1].v = (struct kvf_profile_tensor){
        .codec = KVF_CODEC_KIVI, .bits = 2, .group_size = 32, .group_axis = KVF_AXIS_TOKEN};
    if (kvf_profile_table_add_array(table, KVF_PROFILE_MEANS_K) != KVF_OK) {
        abort();
    }
    memset(table->arrays[KVF_PROFILE_MEANS_K], 0x3c, LAYERS * 64 * sizeof(uint16_t));
    if (kvf_profile_table_validate(table, why) != KVF_OK) {
        abort();
    }
    return table;
}

static int plan_init(struct kvf_codec_plan *plan, const struct kvf_geometry *geometry, int which)
{
    static struct kvf_profile_table *own; /* as long as its plan */
    if (plans[which].profile != NULL) {
        return kvf_codec_plan_init(plan, geometry, plans[which].profile);
    }
    own = own_create();
    return kvf_codec_plan_init_table(plan, geometry, own, 0);
}

static uint8_t kind_of(int which)
{
    const struct kvf_profile *profile = plans[which].profile != NULL
                                            ? kvf_profile_find(plans[which].profile)
                                            : NULL;
    if (profile == NULL || kvf_profile_takes(profile, KVF_KIND_KV)) {
        return KVF_KIND_KV;
    }
    return kvf_profile_takes(profile, KVF_KIND_X) ? KVF_KIND_X : KVF_KIND_XG;
}

static void target_init(struct target *target, int which)
{
    uint8_t kind = kind_of(which);
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = kind,
        .dtype = plans[which].dtype,
        .rope_state = kind < KVF_KIND_X ? KVF_ROPE_POST : KVF_ROPE_NONE,
        .n_layers = (uint16_t)layers_of(which),
        .n_heads = 1,
        .dim_k = plans[which].dim_k,
        .dim_v = plans[which].dim_v,
        .chunk_tokens = plans[which].n_tokens,
        .sink_tokens = 1,
    };
    if (plan_init(&target->plan, &geometry, which) != KVF_OK) {
        abort();
    }
    size_t k_bytes = kvf_dtype_bytes(geometry.dtype) * geometry.dim_k;
    size_t v_bytes = kvf_dtype_bytes(geometry.dtype) * geometry.dim_v;
    size_t layer_bytes = (k_bytes + v_bytes) * geometry.chunk_tokens;
    target->pages_bytes = geometry.n_layers * layer_bytes;
    target->pages = malloc(target->pages_bytes);
    target->workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                                      target->plan.workspace_bytes); /* a multiple */
    if (target->pages == NULL || target->workspace == NULL) {
        abort();
    }
    for (int layer = 0; layer < geometry.n_layers; layer++) {
        target->k_layers[layer] = target->pages + (size_t)layer * layer_bytes;
        target->v_layers[layer] = (uint8_t *)target->k_layers[layer] +
                                  k_bytes * geometry.chunk_tokens;
    }
    target->view = (struct kvf_kv_view){
        .struct_bytes = sizeof(target->view),
        .tokens_a_page = 1,
        .k = {target->k_layers, k_bytes, 0, 0},
        .v = {target->v_layers, v_bytes, 0, 0},
    };
}

/* The record that the input packs, in memory of just its size; NULL if the input is too short. */
static uint8_t *unpack(const struct target *target, const uint8_t *data, size_t bytes,
                       size_t *record_bytes_out)
{
    const size_t n_layers = target->plan.geometry.n_layers;
    const size_t packed_bytes = KVF_BLOCK_HEADER_BYTES + 5 * n_layers;
    if (bytes < packed_bytes) {
        return NULL;
    }
    size_t payload_bytes = bytes - packed_bytes;
    size_t record_bytes = KVF_BLOCK_PAGE_BYTES + payload_bytes;
    uint8_t *record = calloc(1, record_bytes);
    if (record == NULL) {
        abort();
    }
    struct kvf_record_page *page = (struct kvf_record_page *)(void *)record;
    memcpy(&page->header, data, KVF_BLOCK_HEADER_BYTES);
    memcpy(page->layer_bits, data + KVF_BLOCK_HEADER_BYTES, n_layers);
    memcpy(page->layer_offsets, data + KVF_BLOCK_HEADER_BYTES + n_layers, 4 * n_layers);
    memcpy(record + KVF_BLOCK_PAGE_BYTES, data + packed_bytes, payload_bytes);
    /* what a generator cannot be expected to find */
    page->header.magic = KVF_BLOCK_MAGIC;
    page->header.version = KVF_BLOCK_VERSION;
    page->header.total_bytes = record_bytes;
    page->header.profile_fp = target->plan.profile_fp;
    kvf_block_seal_header(page);
    *record_bytes_out = record_bytes;
    return record;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct target targets[N_PLANS];
    if (bytes < 2) {
        return 0;
    }
    struct target *target = &targets[data[0] % N_PLANS];
    if (target->pages == NULL) {
        target_init(target, data[0] % N_PLANS);
    }
    uint32_t n_tokens = target->plan.geometry.chunk_tokens;
    uint32_t token_first = data[1] / 2 % n_tokens;
    size_t record_bytes = 0;
    uint8_t *record = unpack(target, data + 2, bytes - 2, &record_bytes);
    if (record == NULL) {
        return 0;
    }
    struct kvf_record_page *page = (struct kvf_record_page *)(void *)record;
    if (kvf_block_check(page, record_bytes) == KVF_OK) {
        (void)kvf_block_check_payload(page, record + KVF_BLOCK_PAGE_BYTES);
    }
    int status = kvf_block_decode(&target->plan, record, record_bytes,
                                  data[1] % target->plan.geometry.n_layers, 0, token_first, 0,
                                  &target->view, target->workspace);
    if (status != KVF_OK && status != KVF_ERR_CORRUPT && status != KVF_ERR_MISMATCH &&
        status != KVF_ERR_INVALID) {
        abort();
    }
    free(record);
    return 0;
}
