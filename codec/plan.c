/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c: geometry and profile, worked out once at attach so that encode and decode only look up.
 */
#include "codec/closed_loop.h"
#include "codec/codec.h"
#include "codec/profile_table.h"

#include "codec/rotate.h"

#include <assert.h>
#include <string.h>

enum {
    X_GROUP_MAX = 128,
    X_GROUP_MIN = 32, /* below, scales and zeros are a bit a value and more */
};

static bool geometry_is_valid(const struct kvf_geometry *geometry)
{
    return geometry->struct_bytes >= sizeof(*geometry) && geometry->kind >= KVF_KIND_KV &&
           geometry->kind <= KVF_KIND_XG && kvf_dtype_bytes(geometry->dtype) != 0 &&
           geometry->rope_state <= KVF_ROPE_PRE_UNBIASED && geometry->n_layers >= 1 &&
           geometry->n_layers <= KVF_LAYERS_MAX && geometry->n_heads >= 1 &&
           geometry->n_heads <= KVF_HEADS_MAX && geometry->dim_k >= 1 &&
           geometry->dim_k <= KVF_DIM_MAX && geometry->dim_v <= KVF_DIM_MAX &&
           geometry->chunk_tokens >= 1 && geometry->chunk_tokens <= KVF_CHUNK_TOKENS_MAX &&
           geometry->sink_tokens <= geometry->chunk_tokens &&
           (geometry->kind < KVF_KIND_X ||
            (geometry->dim_v == 0 && geometry->rope_state == KVF_ROPE_NONE));
}

int kvf_x_geometry(int kind, uint32_t width, struct kvf_geometry *geometry)
{
    if ((kind != KVF_KIND_X && kind != KVF_KIND_XG) || geometry == NULL) {
        return KVF_ERR_INVALID;
    }
    uint32_t dim = X_GROUP_MAX;
    while (dim >= X_GROUP_MIN && (width % dim != 0 || kvf_rotate_order(dim) != dim)) {
        dim--;
    }
    if (width == 0 || dim < X_GROUP_MIN || width / dim > KVF_HEADS_MAX) {
        return KVF_ERR_UNSUPPORTED;
    }
    geometry->kind = (uint8_t)kind;
    geometry->rope_state = KVF_ROPE_NONE;
    geometry->n_heads = (uint16_t)(width / dim);
    geometry->dim_k = (uint16_t)dim;
    geometry->dim_v = 0;
    return KVF_OK;
}

/* Fill in one tensor. A lossless codec without a form for this dtype is replaced by raw: the
 * promise is the bits, not the size. */
static int tensor_init(struct kvf_codec_tensor *tensor, const struct kvf_geometry *geometry,
                       uint16_t dim, const struct kvf_profile_tensor *settings)
{
    const struct kvf_codec_ops *ops = kvf_codec_find(settings->codec);
    if (ops == NULL) {
        return KVF_ERR_UNSUPPORTED;
    }
    *tensor = (struct kvf_codec_tensor){
        .ops = ops,
        .n_heads = geometry->n_heads,
        .dim = dim,
        .dtype = geometry->dtype,
        .element_bytes = (uint8_t)kvf_dtype_bytes(geometry->dtype),
    };
    int status = ops->resolve(tensor, settings);
    if (status == KVF_ERR_UNSUPPORTED && (ops->capabilities & KVF_CODEC_LOSSLESS) != 0) {
        static const struct kvf_profile_tensor raw = {.codec = KVF_CODEC_RAW};
        return tensor_init(tensor, geometry, dim, &raw);
    }
    return status;
}

/* A reader of the block, without the plan, is to know that there are two widths. */
static void mark_edges(struct kvf_codec_tensor *tensor, const struct kvf_codec_tensor *edge)
{
    if (edge->descriptor.bits != tensor->descriptor.bits) {
        assert(edge->descriptor.bits == KVF_BITS_EDGE && edge->descriptor.codec == KVF_CODEC_SAW);
        tensor->descriptor.flags |= KVF_TENSOR_EDGES;
    }
}

/* The next kind of a plan. A missing V has dim 0 and no ops. */
static int kind_add(struct kvf_codec_plan *plan, const struct kvf_profile_tensor *k,
                    const struct kvf_profile_tensor *v)
{
    static const struct kvf_profile_tensor raw = {.codec = KVF_CODEC_RAW};
    const struct kvf_geometry *geometry = &plan->geometry;
    struct kvf_codec_kind *kind = &plan->kinds[plan->n_kinds++];
    int status = tensor_init(&kind->k, geometry, geometry->dim_k, k);
    if (status == KVF_OK && geometry->dim_v != 0) {
        /* MLA: V is the rotary part of K, which is small and does not take coding. */
        status = tensor_init(&kind->v, geometry, geometry->dim_v,
                             geometry->kind == KVF_KIND_MLA ? &raw : v);
    }
    return status;
}

/* The kinds of a profile for X with deltas: deltas, then layers by themselves. */
static int delta_kinds_init(struct kvf_codec_plan *plan)
{
    const struct kvf_profile *profile = plan->profile;
    uint32_t base = profile->base_layer;
    uint32_t rebase = profile->rebase_layers;
    int status = kind_add(plan, &profile->k, &profile->v);
    if (status == KVF_OK) {
        status = kind_add(plan, &profile->edge_k, &profile->edge_v);
    }
    for (uint32_t layer = 0; layer < plan->geometry.n_layers; layer++) {
        bool is_rebased = rebase != 0 && layer > base && (layer - base) % rebase == 0;
        plan->layer_kinds[layer] = layer < profile->first_layers || is_rebased;
    }
    plan->base_layer = profile->base_layer;
    plan->rebase_layers = profile->rebase_layers;
    plan->block_flags = KVF_BLOCK_KINDS;
    if (plan->geometry.kind == KVF_KIND_X) {
        plan->block_flags |= KVF_BLOCK_DELTAS;
    }
    return status;
}

/* The kinds of a built-in profile: layers between the ends, then, if it has such, those at the
 * ends. */
static int kinds_init(struct kvf_codec_plan *plan)
{
    const struct kvf_profile *profile = plan->profile;
    uint32_t n_layers = plan->geometry.n_layers;
    uint32_t edges = profile->edge_layers;
    if (profile->first_layers != 0) {
        return delta_kinds_init(plan);
    }
    int status = kind_add(plan, &profile->k, &profile->v);
    if (status != KVF_OK || edges == 0) {
        return status;
    }
    status = kind_add(plan, &profile->edge_k, &profile->edge_v);
    if (status == KVF_OK) {
        mark_edges(&plan->kinds[0].k, &plan->kinds[1].k);
    }
    if (status == KVF_OK && kvf_plan_has_v(plan)) {
        mark_edges(&plan->kinds[0].v, &plan->kinds[1].v);
    }
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        plan->layer_kinds[layer] = layer < edges || layer + edges >= n_layers;
    }
    return status;
}

/* The kinds of a profile that has a file, and what it has beside them. */
static int table_init(struct kvf_codec_plan *plan, const struct kvf_profile_table *table,
                      uint32_t head_first)
{
    int status = KVF_OK;
    for (uint32_t i = 0; status == KVF_OK && i < table->n_kinds; i++) {
        status = kind_add(plan, &table->kinds[i].k, &table->kinds[i].v);
    }
    memcpy(plan->layer_kinds, table->layer_kinds, plan->geometry.n_layers);
    plan->block_flags = plan->n_kinds > 1 ? KVF_BLOCK_KINDS : 0;
    for (uint32_t is_v = 0; is_v < 2; is_v++) {
        plan->means[is_v] = kvf_profile_table_means(table, is_v, head_first);
        plan->splits[is_v] = kvf_profile_table_splits(table, is_v, head_first);
    }
    return status;
}

/* How K and V are stored where their codec gives up. */
static int raw_init(struct kvf_codec_plan *plan)
{
    static const struct kvf_profile_tensor raw = {.codec = KVF_CODEC_RAW};
    const struct kvf_geometry *geometry = &plan->geometry;
    int status = tensor_init(&plan->raw_k, geometry, geometry->dim_k, &raw);
    if (status == KVF_OK && kvf_plan_has_v(plan)) {
        status = tensor_init(&plan->raw_v, geometry, geometry->dim_v, &raw);
    }
    return status;
}

#define FINGERPRINT_INIT 0xcbf29ce484222325U

static uint64_t fingerprint_add(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ at[i]) * 0x100000001b3U; /* FNV-1a */
    }
    return hash;
}

/* Over all that decides the bytes of a block beside geometry, which the namespace covers by
 * itself. */
static uint64_t fingerprint(const struct kvf_codec_plan *plan)
{
    uint16_t version = KVF_BLOCK_VERSION;
    uint64_t hash = fingerprint_add(FINGERPRINT_INIT, &version, sizeof(version));
    const bool opaque = false;
    hash = fingerprint_add(hash, &opaque, 1);
    const struct kvf_codec_kind *kind = &plan->kinds[0];
    hash = fingerprint_add(hash, &kind->k.descriptor, sizeof(kind->k.descriptor));
    hash = fingerprint_add(hash, &kind->v.descriptor, sizeof(kind->v.descriptor));
    if (plan->profile->edge_layers != 0) {
        uint16_t edge_layers = plan->profile->edge_layers;
        kind = &plan->kinds[1];
        hash = fingerprint_add(hash, &edge_layers, sizeof(edge_layers));
        hash = fingerprint_add(hash, &kind->k.descriptor, sizeof(kind->k.descriptor));
        hash = fingerprint_add(hash, &kind->v.descriptor, sizeof(kind->v.descriptor));
    }
    if (plan->profile->first_layers != 0) {
        const uint8_t layers[4] = {plan->profile->first_layers, plan->profile->base_layer,
                                   plan->profile->rebase_layers, plan->block_flags};
        hash = fingerprint_add(hash, layers, sizeof(layers));
        hash = fingerprint_add(hash, &plan->kinds[1].k.descriptor,
                               sizeof(plan->kinds[1].k.descriptor));
    }
    if (plan->profile->sink_tokens != 0) {
        hash = fingerprint_add(hash, &plan->profile->sink_tokens, 1);
    }
    return hash != 0 ? hash : 1; /* 0 means "none" */
}

/* The same for a profile that has a file: all kinds, which layers they have, and means and lists of
 * the whole model, so that shards agree. */
static uint64_t table_fingerprint(const struct kvf_codec_plan *plan,
                                  const struct kvf_profile_table *table)
{
    static const char name[] = "profile file";
    uint16_t version = KVF_BLOCK_VERSION;
    uint64_t hash = fingerprint_add(FINGERPRINT_INIT, &version, sizeof(version));
    hash = fingerprint_add(hash, name, sizeof(name));
    for (uint32_t i = 0; i < plan->n_kinds; i++) {
        const struct kvf_codec_kind *kind = &plan->kinds[i];
        hash = fingerprint_add(hash, &kind->k.descriptor, sizeof(kind->k.descriptor));
        hash = fingerprint_add(hash, &kind->v.descriptor, sizeof(kind->v.descriptor));
    }
    hash = fingerprint_add(hash, plan->layer_kinds, plan->geometry.n_layers);
    hash = fingerprint_add(hash, &table->sink_tokens, sizeof(table->sink_tokens));
    for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
        if (table->arrays[i] != NULL) {
            hash = fingerprint_add(hash, &i, sizeof(i));
            hash = fingerprint_add(hash, table->arrays[i], kvf_profile_array_bytes(table, i));
        }
    }
    return hash != 0 ? hash : 1;
}

uint64_t kvf_plan_bytes_fp(void)
{
    uint16_t version = KVF_BLOCK_VERSION;
    const bool opaque = true;
    const struct kvf_block_tensor none[2] = {0};
    uint64_t hash = fingerprint_add(FINGERPRINT_INIT, &version, sizeof(version));
    hash = fingerprint_add(hash, &opaque, 1);
    return fingerprint_add(hash, none, sizeof(none));
}

/* A tensor, and in how many layers it is. */
struct use {
    const struct kvf_codec_tensor *tensor;
    const struct kvf_codec_tensor *raw;
    uint32_t n_layers;
};

enum {
    USES_MAX = 2 * KVF_CODEC_KINDS_MAX
};

/* What the layers of a plan are made of; tensors that are nowhere are left out. */
static uint32_t find_uses(const struct kvf_codec_plan *plan, struct use uses_out[USES_MAX])
{
    uint32_t counts[KVF_CODEC_KINDS_MAX] = {0};
    uint32_t n = 0;
    for (uint32_t layer = 0; layer < plan->geometry.n_layers; layer++) {
        counts[plan->layer_kinds[layer]]++;
    }
    for (uint32_t i = 0; i < plan->n_kinds; i++) {
        if (counts[i] != 0) {
            uses_out[n++] = (struct use){&plan->kinds[i].k, &plan->raw_k, counts[i]};
        }
        if (counts[i] != 0 && kvf_plan_has_v(plan)) {
            uses_out[n++] = (struct use){&plan->kinds[i].v, &plan->raw_v, counts[i]};
        }
    }
    return n;
}

static void workspace_init(struct kvf_codec_plan *plan)
{
    struct use uses[USES_MAX];
    uint32_t n_uses = find_uses(plan, uses);
    uint32_t n_tokens = plan->geometry.chunk_tokens;
    size_t scratch = 0;
    size_t escapes = 0;
    size_t sections = 0;
    for (uint32_t i = 0; i < n_uses; i++) {
        size_t bytes = uses[i].tensor->ops->workspace_bytes(uses[i].tensor);
        scratch = bytes > scratch ? bytes : scratch;
        uint32_t most = kvf_plan_escapes_max(plan, uses[i].tensor, n_tokens);
        escapes = most > escapes ? most : escapes;
        sections += uses[i].n_layers * kvf_raw_section_bytes(uses[i].tensor, most);
    }
    /* The raw area's table of counts, the list of one tensor, and all sections, which wait here
     * until the last strip is written. */
    plan->escapes_offset = kvf_align_up(scratch, KVF_CODEC_WORKSPACE_ALIGN);
    size_t lists = (2 * (size_t)plan->geometry.n_layers + escapes) * sizeof(uint32_t);
    plan->sections_offset = plan->escapes_offset + kvf_align_up(lists, KVF_CODEC_WORKSPACE_ALIGN);
    plan->loop_offset = plan->sections_offset + kvf_align_up(sections, KVF_CODEC_WORKSPACE_ALIGN);
    plan->workspace_bytes = plan->loop_offset + kvf_loop_bytes(plan);
}

/* What follows from kinds and geometry. */
static int plan_finish(struct kvf_codec_plan *plan)
{
    int status = raw_init(plan);
    if (status != KVF_OK) {
        return status;
    }
    workspace_init(plan);
    uint64_t payload_max = kvf_codec_plan_payload_bytes_max(plan, plan->geometry.chunk_tokens);
    plan->record_bytes_max = KVF_RECORD_PAGE_BYTES + payload_max;
    return payload_max <= KVF_PAYLOAD_BYTES_MAX ? KVF_OK : KVF_ERR_TOO_LARGE;
}

/* May what a geometry describes come back as changed as a profile changes it? */
static bool takes_loss(const struct kvf_geometry *geometry, const struct kvf_profile *profile)
{
    return kvf_profile_takes(profile, geometry->kind) &&
           (profile->lossless || geometry->dtype != KVF_DTYPE_U8);
}

int kvf_codec_plan_init(struct kvf_codec_plan *plan, const struct kvf_geometry *geometry,
                        const char *profile_name)
{
    const struct kvf_profile *profile = profile_name != NULL ? kvf_profile_find(profile_name)
                                                             : NULL;
    bool opaque = geometry == NULL || geometry->kind == KVF_KIND_BYTES;
    if (plan == NULL || profile == NULL || profile->opaque != opaque) {
        return KVF_ERR_INVALID;
    }
    if (!opaque && !geometry_is_valid(geometry)) {
        return KVF_ERR_INVALID;
    }
    *plan = (struct kvf_codec_plan){.profile = profile, .lossless = profile->lossless};
    if (opaque) {
        plan->profile_fp = kvf_plan_bytes_fp();
        plan->record_bytes_max = KVF_RECORD_PAGE_BYTES + (uint64_t)KVF_PAYLOAD_BYTES_MAX;
        return KVF_OK;
    }
    plan->geometry = *geometry;
    plan->geometry.struct_bytes = sizeof(plan->geometry);
    if (!takes_loss(geometry, profile)) {
        return KVF_ERR_REFUSED;
    }
    int status = kinds_init(plan);
    if (status == KVF_OK) {
        plan->profile_fp = fingerprint(plan);
        status = plan_finish(plan);
    }
    return status;
}

int kvf_codec_plan_init_table(struct kvf_codec_plan *plan, const struct kvf_geometry *geometry,
                              const struct kvf_profile_table *table, uint32_t head_first)
{
    assert(table->builtin == NULL);
    if (geometry->kind == KVF_KIND_BYTES || !geometry_is_valid(geometry) ||
        geometry->n_layers != table->n_layers || geometry->dim_k != table->dim_k ||
        geometry->dim_v != table->dim_v || head_first + geometry->n_heads > table->n_heads) {
        return KVF_ERR_INVALID;
    }
    if (!takes_loss(geometry, &table->profile)) {
        return KVF_ERR_REFUSED;
    }
    *plan = (struct kvf_codec_plan){.profile = &table->profile, .geometry = *geometry};
    plan->geometry.struct_bytes = sizeof(plan->geometry);
    int status = table_init(plan, table, head_first);
    if (status == KVF_OK) {
        plan->profile_fp = table_fingerprint(plan, table);
        status = plan_finish(plan);
    }
    return status;
}

uint32_t kvf_codec_fitting_tokens(const struct kvf_geometry *geometry, const char *profile_name)
{
    struct kvf_codec_plan plan;
    struct kvf_geometry shorter = *geometry;
    for (uint32_t n_tokens = KVF_CHUNK_TOKENS_MAX; n_tokens > 0; n_tokens--) {
        shorter.chunk_tokens = (uint16_t)n_tokens;
        if (shorter.sink_tokens > n_tokens) {
            shorter.sink_tokens = (uint16_t)n_tokens;
        }
        int status = kvf_codec_plan_init(&plan, &shorter, profile_name);
        if (status != KVF_ERR_TOO_LARGE) {
            return status == KVF_OK ? n_tokens : 0;
        }
    }
    return 0;
}

/* Bytes of a tensor's parts in one strip. */
static size_t tensor_bytes(const struct kvf_codec_tensor *tensor, uint32_t n_tokens)
{
    struct kvf_codec_sizes sizes;
    tensor->ops->sizes(tensor, n_tokens, &sizes);
    return kvf_sizes_total(&sizes);
}

uint64_t kvf_codec_plan_payload_bytes(const struct kvf_codec_plan *plan, uint32_t n_tokens)
{
    struct use uses[USES_MAX];
    uint32_t n_uses = plan->profile->opaque ? 0 : find_uses(plan, uses);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n_uses; i++) {
        bytes += (uint64_t)uses[i].n_layers * tensor_bytes(uses[i].tensor, n_tokens);
    }
    return bytes;
}

uint64_t kvf_codec_plan_payload_bytes_max(const struct kvf_codec_plan *plan, uint32_t n_tokens)
{
    if (plan->profile->opaque) {
        return KVF_PAYLOAD_BYTES_MAX;
    }
    struct use uses[USES_MAX];
    uint32_t n_uses = find_uses(plan, uses);
    uint64_t bytes = 0;
    bool has_area = false;
    for (uint32_t i = 0; i < n_uses; i++) {
        uint32_t escapes = kvf_plan_escapes_max(plan, uses[i].tensor, n_tokens);
        uint64_t coded = tensor_bytes(uses[i].tensor, n_tokens);
        if (escapes != 0) {
            coded += kvf_raw_section_bytes(uses[i].tensor, escapes);
            has_area = true;
        }
        uint64_t uncoded = tensor_bytes(uses[i].raw, n_tokens);
        bytes += uses[i].n_layers * (coded > uncoded ? coded : uncoded);
    }
    if (has_area) {
        bytes += kvf_raw_table_bytes(plan->geometry.n_layers);
    }
    return kvf_part_bytes(bytes);
}

bool kvf_codec_plan_is_fixed(const struct kvf_codec_plan *plan)
{
    struct use uses[USES_MAX];
    uint32_t n_uses = plan->profile->opaque ? 0 : find_uses(plan, uses);
    bool is_fixed = n_uses != 0;
    for (uint32_t i = 0; i < n_uses; i++) {
        is_fixed = is_fixed && (uses[i].tensor->ops->capabilities & KVF_CODEC_FIXED_RATE) != 0;
    }
    return is_fixed;
}

uint32_t kvf_codec_plan_fixed_sizes(const struct kvf_codec_plan *plan,
                                    uint64_t record_bytes_out[KVF_CODEC_FIXED_SIZES_MAX])
{
    if (!kvf_codec_plan_is_fixed(plan)) {
        return 0;
    }
    uint32_t n_tokens = plan->geometry.chunk_tokens;
    uint64_t bytes = KVF_RECORD_PAGE_BYTES +
                     kvf_codec_plan_payload_bytes(plan, plan->geometry.chunk_tokens);
    record_bytes_out[0] = bytes;
    uint32_t sinks = kvf_plan_sinks(plan, 0, n_tokens);
    if (sinks == 0) {
        return 1;
    }
    struct use uses[USES_MAX];
    uint32_t n_uses = find_uses(plan, uses);
    size_t sections = 0;
    for (uint32_t i = 0; i < n_uses; i++) {
        const struct kvf_codec_tensor *tensor = uses[i].tensor;
        if (kvf_plan_escapes_max(plan, tensor, n_tokens) != 0) {
            sections += uses[i].n_layers *
                        kvf_raw_section_bytes(tensor, (size_t)sinks * tensor->n_rows);
        }
    }
    record_bytes_out[1] = bytes +
                          kvf_part_bytes(kvf_raw_table_bytes(plan->geometry.n_layers) + sections);
    return 2;
}
