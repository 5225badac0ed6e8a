/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_table.c: what may stand in a profile that a calibration made.
 */
#include "codec/profile_table.h"

#include "codec/codec_layout.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const kvf_profile_workloads[] = {
    "chat", "long-retrieval", "reasoning", "tool-calls", "code", "other", NULL,
};

static const uint8_t no_digest[KVF_DIGEST_BYTES];

/* A failure and its reason. */
static int __attribute__((format(printf, 2, 3)))
fail(char why_out[KVF_PROFILE_WHY_BYTES], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(why_out, KVF_PROFILE_WHY_BYTES, format, arguments);
    va_end(arguments);
    return KVF_ERR_INVALID;
}

/* -------------------------------------------------------------------------------------------------
 * Arrays
 */
struct kvf_profile_table *kvf_profile_table_create(void)
{
    return calloc(1, sizeof(struct kvf_profile_table));
}

void kvf_profile_table_destroy(struct kvf_profile_table *table)
{
    if (table != NULL) {
        for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
            free(table->arrays[i]);
        }
        free(table);
    }
}

/* Bytes of one head of one layer. */
static size_t head_bytes(const struct kvf_profile_table *table, enum kvf_profile_array array)
{
    bool is_v = array == KVF_PROFILE_MEANS_V || array == KVF_PROFILE_SPLITS_V;
    size_t dim = is_v ? table->dim_v : table->dim_k;
    return array <= KVF_PROFILE_MEANS_V ? dim * sizeof(uint16_t) : (dim + 7) / 8;
}

size_t kvf_profile_array_layer_bytes(const struct kvf_profile_table *table,
                                     enum kvf_profile_array array)
{
    return table->n_heads * head_bytes(table, array);
}

size_t kvf_profile_array_bytes(const struct kvf_profile_table *table, enum kvf_profile_array array)
{
    return table->n_layers * kvf_profile_array_layer_bytes(table, array);
}

int kvf_profile_table_add_array(struct kvf_profile_table *table, enum kvf_profile_array array)
{
    size_t bytes = kvf_profile_array_bytes(table, array);
    size_t total = bytes;
    for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
        total += table->arrays[i] != NULL ? kvf_profile_array_bytes(table, i) : 0;
    }
    if (total > KVF_PROFILE_ARRAYS_BYTES_MAX || bytes == 0) {
        return KVF_ERR_TOO_LARGE;
    }
    assert(table->arrays[array] == NULL);
    table->arrays[array] = calloc(1, bytes);
    return table->arrays[array] != NULL ? KVF_OK : KVF_ERR_NO_MEMORY;
}

static struct kvf_plan_array array_from(const struct kvf_profile_table *table,
                                        enum kvf_profile_array array, uint32_t head_first)
{
    const uint8_t *bytes = table->arrays[array];
    return (struct kvf_plan_array){
        .first = bytes != NULL ? bytes + head_first * head_bytes(table, array) : NULL,
        .layer_bytes = kvf_profile_array_layer_bytes(table, array),
    };
}

struct kvf_plan_array kvf_profile_table_means(const struct kvf_profile_table *table, bool is_v,
                                              uint32_t head_first)
{
    return array_from(table, is_v ? KVF_PROFILE_MEANS_V : KVF_PROFILE_MEANS_K, head_first);
}

struct kvf_plan_array kvf_profile_table_splits(const struct kvf_profile_table *table, bool is_v,
                                               uint32_t head_first)
{
    return array_from(table, is_v ? KVF_PROFILE_SPLITS_V : KVF_PROFILE_SPLITS_K, head_first);
}

/* -------------------------------------------------------------------------------------------------
 * What it says of itself
 */
bool kvf_profile_name_is_valid(const char name[KVF_PROFILE_NAME_BYTES])
{
    static const char set[] = "abcdefghijklmnopqrstuvwxyz0123456789.-";
    size_t n = strnlen(name, KVF_PROFILE_NAME_BYTES);

    return n != 0 && n != KVF_PROFILE_NAME_BYTES && strspn(name, set) == n &&
           strchr(".-", name[0]) == NULL;
}

static int check_name(const struct kvf_profile_table *table, char why_out[KVF_PROFILE_WHY_BYTES])
{
    if (!kvf_profile_name_is_valid(table->name)) {
        return fail(why_out,
                    "name: 1 to %d of a-z, 0-9, '.' and '-' that begin with a letter or a digit",
                    KVF_PROFILE_NAME_BYTES - 1);
    }
    return KVF_OK;
}

static int check_binding(const struct kvf_profile_table *table, char why_out[KVF_PROFILE_WHY_BYTES])
{
    if (memcmp(table->weights_digest, no_digest, sizeof(no_digest)) == 0) {
        return fail(why_out, "weights_digest: is all zero; a profile is for one model's weights");
    }
    if (table->workloads == 0 || table->workloads >= 2 * KVF_WORKLOAD_OTHER) {
        return fail(why_out, "workload: names none; say what the samples were, or \"other\"");
    }
    return KVF_OK;
}

static int check_geometry(const struct kvf_profile_table *table,
                          char why_out[KVF_PROFILE_WHY_BYTES])
{
    const struct {
        const char *name;
        uint32_t value;
        uint32_t min;
        uint32_t max;
    } fields[] = {
        {"n_layers", table->n_layers, 1, KVF_LAYERS_MAX},
        {"n_heads", table->n_heads, 1, KVF_HEADS_MAX},
        {"dim_k", table->dim_k, 1, KVF_DIM_MAX},
        {"dim_v", table->dim_v, 0, KVF_DIM_MAX},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value < fields[i].min || fields[i].value > fields[i].max) {
            return fail(why_out, "geometry.%s: %u is out of range; it may be %u to %u",
                        fields[i].name, fields[i].value, fields[i].min, fields[i].max);
        }
    }
    if (table->rope_state > KVF_ROPE_PRE_UNBIASED) {
        return fail(why_out, "geometry.rope_state: %u is unknown", table->rope_state);
    }
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Kinds
 */

/* One tensor of a kind, "kinds[3].k" say, and all it may have. */
struct place {
    const struct kvf_profile_table *table;
    const struct kvf_profile_tensor *settings;
    uint32_t kind;
    bool is_v;
    char *why; /* KVF_PROFILE_WHY_BYTES of it */
};

static int __attribute__((format(printf, 2, 3)))
fail_at(const struct place *place, const char *format, ...)
{
    int n = snprintf(place->why, KVF_PROFILE_WHY_BYTES, "kinds[%u].%s%s", place->kind,
                     place->is_v ? "v" : "k", format[0] == ':' ? "" : ".");
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(place->why + n, KVF_PROFILE_WHY_BYTES - (size_t)n, format, arguments);
    va_end(arguments);
    return KVF_ERR_INVALID;
}

/* What a codec takes beside its number and bits. */
struct takes {
    uint8_t flags;
    bool rotation;
    bool clip;
    bool groups;
};

static struct takes codec_takes(uint8_t codec)
{
    const uint8_t common = KVF_TENSOR_CENTER | KVF_TENSOR_CENTER_PROFILE | KVF_TENSOR_SIGNS;
    switch (codec) {
    case KVF_CODEC_SAW:
        return (struct takes){.flags = common, .rotation = true, .clip = true};
    case KVF_CODEC_TQ:
        return (struct takes){.flags = common | KVF_TENSOR_SPLIT | KVF_TENSOR_RESIDUAL |
                                       KVF_TENSOR_SCALE_MASK,
                              .rotation = true};
    case KVF_CODEC_KIVI:
        return (struct takes){.groups = true};
    default:
        return (struct takes){0};
    }
}

/* Does the codec have a form with these settings? */
static bool resolves(const struct place *place, struct kvf_codec_tensor *tensor)
{
    const struct kvf_profile_tensor *settings = place->settings;
    *tensor = (struct kvf_codec_tensor){
        .ops = kvf_codec_find(settings->codec),
        .n_heads = place->table->n_heads,
        .dim = place->is_v ? place->table->dim_v : place->table->dim_k,
        .dtype = KVF_DTYPE_BF16,
        .element_bytes = 2,
    };
    return tensor->ops != NULL && tensor->ops->resolve(tensor, settings) == KVF_OK;
}

static int check_tensor(const struct place *place)
{
    const struct kvf_profile_tensor *settings = place->settings;
    struct takes takes = codec_takes(settings->codec);
    const uint8_t both = KVF_TENSOR_CENTER | KVF_TENSOR_CENTER_PROFILE;
    struct kvf_codec_tensor tensor;
    if (kvf_codec_find(settings->codec) == NULL) {
        return fail_at(place, "codec: %u is unknown to this build", settings->codec);
    }
    if ((settings->flags & ~takes.flags) != 0 || (settings->flags & both) == both) {
        return fail_at(place, ": codec %s does not take that centring, split, scale or residual",
                       kvf_codec_find(settings->codec)->name);
    }
    if (settings->rotate > takes.rotation || settings->clip > (takes.clip ? KVF_CLIP_WIDE : 0) ||
        settings->rot_seed != (takes.rotation ? KVF_PROFILE_ROTATION_SEED : 0)) {
        return fail_at(place, ": codec %s does not take that rotation or clip",
                       kvf_codec_find(settings->codec)->name);
    }
    if (takes.groups
            ? settings->group_axis != KVF_AXIS_TOKEN && settings->group_axis != KVF_AXIS_CHANNEL
            : settings->group_axis != 0 || settings->group_size != 0) {
        return fail_at(place, ": codec %s does not take that axis or size of groups",
                       kvf_codec_find(settings->codec)->name);
    }
    if (!resolves(place, &tensor) || tensor.descriptor.bits != settings->bits) {
        return fail_at(place,
                       ": codec %s has no form of %u bits with these settings for vectors of %u; "
                       "choose other bits, no split, or another codec",
                       tensor.ops->name, settings->bits, tensor.dim);
    }
    return KVF_OK;
}

/* All zero, whatever its padding is. */
static bool is_none(const struct kvf_profile_tensor *settings)
{
    return settings->codec == 0 && settings->bits == 0 && settings->flags == 0 &&
           settings->rotate == 0 && settings->clip == 0 && settings->rot_seed == 0 &&
           settings->group_size == 0 && settings->group_axis == 0;
}

static int check_kinds(const struct kvf_profile_table *table, char why_out[KVF_PROFILE_WHY_BYTES])
{
    if (table->n_kinds < 1 || table->n_kinds > KVF_CODEC_KINDS_MAX) {
        return fail(why_out, "kinds: there are %u, and 1 to %d may be", table->n_kinds,
                    KVF_CODEC_KINDS_MAX);
    }
    for (uint32_t i = 0; i < table->n_kinds; i++) {
        const struct kvf_profile_kind *kind = &table->kinds[i];
        struct place place = {.table = table, .settings = &kind->k, .kind = i, .why = why_out};
        int status = check_tensor(&place);
        place.settings = &kind->v;
        place.is_v = true;
        if (status == KVF_OK && table->dim_v != 0) {
            status = check_tensor(&place);
        } else if (status == KVF_OK && !is_none(&kind->v)) {
            status = fail_at(&place, ": is there although geometry.dim_v is 0");
        }
        if (status != KVF_OK) {
            return status;
        }
    }
    for (uint32_t layer = 0; layer < KVF_LAYERS_MAX; layer++) {
        if (table->layer_kinds[layer] >= (layer < table->n_layers ? table->n_kinds : 1)) {
            return fail(why_out, "layers[%u]: there is no kind %u", layer,
                        table->layer_kinds[layer]);
        }
    }
    return KVF_OK;
}

/* -------------------------------------------------------------------------------------------------
 * Means and lists of channels
 */
static const struct kvf_profile_tensor *settings_of(const struct kvf_profile_table *table,
                                                    uint32_t layer, bool is_v)
{
    const struct kvf_profile_kind *kind = &table->kinds[table->layer_kinds[layer]];
    return is_v ? &kind->v : &kind->k;
}

/* Does a layer have a row in an array? */
static bool is_wanted(const struct kvf_profile_table *table, enum kvf_profile_array array,
                      uint32_t layer)
{
    bool is_v = array == KVF_PROFILE_MEANS_V || array == KVF_PROFILE_SPLITS_V;
    uint8_t flag = array <= KVF_PROFILE_MEANS_V ? KVF_TENSOR_CENTER_PROFILE : KVF_TENSOR_SPLIT;
    return (settings_of(table, layer, is_v)->flags & flag) != 0;
}

static bool is_zero(const uint8_t *bytes, size_t n)
{
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++) {
        any |= bytes[i];
    }
    return any == 0;
}

static bool means_are_finite(const uint8_t *means, size_t bytes)
{
    bool finite = true;
    for (size_t i = 0; i < bytes; i += sizeof(uint16_t)) {
        uint16_t half;
        memcpy(&half, means + i, sizeof(half));
        finite = finite && (half & 0x7c00) != 0x7c00;
    }
    return finite;
}

/* Has each head as many channels as the first rotation takes? */
static bool lists_hold(const struct kvf_profile_table *table, bool is_v, uint32_t layer,
                       const uint8_t *lists)
{
    struct place place = {
        .table = table, .settings = settings_of(table, layer, is_v), .is_v = is_v};
    struct kvf_codec_tensor tensor;
    bool holds = resolves(&place, &tensor);
    size_t row_bytes = (tensor.group + 7u) / 8;
    for (uint32_t row = 0; holds && row < tensor.n_rows; row++) {
        uint32_t n = 0;
        for (size_t i = 0; i < row_bytes; i++) {
            uint32_t bits = lists[row * row_bytes + i];
            n += (uint32_t)__builtin_popcount(bits);
            if (i + 1 == row_bytes && tensor.group % 8 != 0 && bits >> tensor.group % 8 != 0) {
                return false;
            }
        }
        holds = n == tensor.rotations[0].n;
    }
    return holds;
}

static const char *array_name(enum kvf_profile_array array)
{
    static const char *const names[KVF_PROFILE_ARRAYS] = {"means.k", "means.v", "splits.k",
                                                          "splits.v"};
    return names[array];
}

static int check_array(const struct kvf_profile_table *table, enum kvf_profile_array array,
                       char why_out[KVF_PROFILE_WHY_BYTES])
{
    size_t layer_bytes = kvf_profile_array_layer_bytes(table, array);
    bool is_means = array <= KVF_PROFILE_MEANS_V;
    bool is_v = array == KVF_PROFILE_MEANS_V || array == KVF_PROFILE_SPLITS_V;
    uint32_t n_wanted = 0;
    for (uint32_t layer = 0; layer < table->n_layers; layer++) {
        bool wanted = is_wanted(table, array, layer);
        n_wanted += wanted;
        if (table->arrays[array] == NULL) {
            continue;
        }
        const uint8_t *at = table->arrays[array] + layer * layer_bytes;
        if (!wanted && !is_zero(at, layer_bytes)) {
            return fail(why_out, "%s[%u]: is given, but the kind of this layer does not use it",
                        array_name(array), layer);
        }
        if (wanted && is_means && !means_are_finite(at, layer_bytes)) {
            return fail(why_out, "%s[%u]: a mean is not a number", array_name(array), layer);
        }
        if (wanted && !is_means && !lists_hold(table, is_v, layer, at)) {
            return fail(why_out, "%s[%u]: a head has not as many channels as its codec takes",
                        array_name(array), layer);
        }
    }
    if (is_means && n_wanted != 0 && table->arrays[array] == NULL) {
        return fail(why_out, "%s: is missing, and a kind is centred by it", array_name(array));
    }
    if (n_wanted == 0 && table->arrays[array] != NULL) {
        return fail(why_out, "%s: is given, and no kind uses it", array_name(array));
    }
    return KVF_OK;
}

static int check_builtin(const struct kvf_profile_table *table, char why_out[KVF_PROFILE_WHY_BYTES])
{
    bool has_arrays = false;
    for (uint32_t i = 0; i < KVF_PROFILE_ARRAYS; i++) {
        has_arrays = has_arrays || table->arrays[i] != NULL;
    }
    if (table->builtin->lossless) {
        return fail(why_out, "name: \"%s\" is lossless and needs no calibration", table->name);
    }
    if (table->n_kinds != 0 || has_arrays) {
        return fail(why_out,
                    "kinds: \"%s\" is a profile of the build, which has its own; leave them out, "
                    "or choose another name",
                    table->name);
    }
    return KVF_OK;
}

int kvf_profile_table_validate(struct kvf_profile_table *table, char why_out[KVF_PROFILE_WHY_BYTES])
{
    int status = check_name(table, why_out);
    if (status == KVF_OK) {
        status = check_binding(table, why_out);
    }
    if (status == KVF_OK) {
        status = check_geometry(table, why_out);
    }
    if (status != KVF_OK) {
        return status;
    }
    table->builtin = kvf_profile_find(table->name);
    if (table->builtin != NULL) {
        return check_builtin(table, why_out);
    }
    status = check_kinds(table, why_out);
    for (uint32_t i = 0; status == KVF_OK && i < KVF_PROFILE_ARRAYS; i++) {
        status = check_array(table, i, why_out);
    }
    table->profile = (struct kvf_profile){
        .name = table->name,
        .use = "made by a calibration",
        .sink_tokens = table->sink_tokens,
    };
    return status;
}

/* -------------------------------------------------------------------------------------------------
 * What it is for
 */
bool kvf_profile_table_is_for(const struct kvf_profile_table *table,
                              const uint8_t weights_digest[KVF_DIGEST_BYTES],
                              const uint8_t adapter_digest[KVF_DIGEST_BYTES])
{
    return memcmp(table->weights_digest, weights_digest, KVF_DIGEST_BYTES) == 0 &&
           memcmp(table->adapter_digest, adapter_digest, KVF_DIGEST_BYTES) == 0;
}

int kvf_profile_table_fits(const struct kvf_profile_table *table,
                           const struct kvf_geometry *geometry, uint16_t shard,
                           uint16_t shard_count, uint32_t *head_first_out,
                           char why_out[KVF_PROFILE_WHY_BYTES])
{
    uint32_t heads = (uint32_t)geometry->n_heads * (shard_count == 0 ? 1 : shard_count);
    const struct {
        const char *name;
        uint32_t have;
        uint32_t want;
    } fields[] = {
        {"layers", geometry->n_layers, table->n_layers},
        {"elements of a K vector", geometry->dim_k, table->dim_k},
        {"elements of a V vector", geometry->dim_v, table->dim_v},
        {"as rope_state", geometry->rope_state, table->rope_state},
    };
    /* what is said of no layer and no head holds for any share of them */
    size_t first = table->builtin != NULL ? 1 : 0;
    for (size_t i = first; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].have != fields[i].want) {
            (void)fail(why_out, "it was calibrated with %u %s, the client has %u", fields[i].want,
                       fields[i].name, fields[i].have);
            return KVF_ERR_MISMATCH;
        }
    }
    *head_first_out = 0;
    if (table->builtin != NULL) {
        return KVF_OK;
    }
    /* Shards share the heads; where there are more shards than heads, neighbours have the same. */
    if (heads == 0 || heads % table->n_heads != 0 || geometry->n_heads > table->n_heads) {
        (void)fail(why_out,
                   "it was calibrated with %u KV heads, and %u shards of %u do not make them",
                   table->n_heads, shard_count, geometry->n_heads);
        return KVF_ERR_MISMATCH;
    }
    uint32_t copies = heads / table->n_heads;
    *head_first_out = shard == KVF_SHARD_NONE ? 0 : shard / copies * geometry->n_heads;
    if (*head_first_out + geometry->n_heads > table->n_heads) {
        (void)fail(why_out, "shard %u of %u is beyond its %u KV heads", shard, shard_count,
                   table->n_heads);
        return KVF_ERR_MISMATCH;
    }
    return KVF_OK;
}

void kvf_profile_workloads_text(uint32_t workloads, char *text_out, size_t text_bytes)
{
    size_t at = 0;
    text_out[0] = '\0';
    for (uint32_t i = 0; kvf_profile_workloads[i] != NULL; i++) {
        if ((workloads >> i & 1) != 0 && at < text_bytes) {
            at += (size_t)snprintf(text_out + at, text_bytes - at, "%s%s", at != 0 ? ", " : "",
                                   kvf_profile_workloads[i]);
        }
    }
}
