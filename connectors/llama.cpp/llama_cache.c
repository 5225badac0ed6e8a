/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_cache.c: see llama_cache.h. Blocks are decoded to where their rows lie in the state that is
 * then given to llama.cpp, and encoded from where they lie in the state that it gave: nothing of
 * ours copies a row.
 */
#include "connectors/llama.cpp/llama_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "connectors/llama.cpp/llama_chain.h"
#include "connectors/llama.cpp/llama_say.h"

enum {
    GROUP_CHUNKS = 16, /* of one get or put: their leases are held together */
    ATTACH_MS = 200,
    PUT_MS = 30000,  /* for a group; behind the answer, so that only the next request waits */
    RETRY_MS = 1000, /* between attempts to connect, or to ask a daemon that has not answered */
    RETRY_MAX_MS = 60000,
};

struct kvf_llama_cache {
    struct kvf_llama_cache_options options;
    char *socket_path;
    char *profile;
    char *label;
    struct kvf_geometry geometry;

    struct kvf_client *client; /* NULL: none so far */
    int64_t next_try_ms;
    uint32_t retry_ms;
    int said_status; /* the last that a line was written of */
    char profile_in_force[KVF_PROFILE_NAME_BYTES];
    bool lossless;

    /* grown as needed */
    uint8_t *state;
    size_t state_room;
    uint8_t *keys; /* of the tokens of the last call */
    size_t keys_room;

    /* of a view: as many layers as the shape has */
    void **k_layers;
    void **v_layers;
    struct kvf_llama_cache_counts counts;
};

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* --- life ------------------------------------------------------------------------------------- */

static int geometry_fill(const struct kvf_llama_cache_options *o, struct kvf_geometry *geometry,
                         char *why)
{
    int dtype = kvf_llama_type_dtype(o->shape.type);
    uint32_t head_bytes = o->n_heads * (uint32_t)kvf_dtype_bytes(dtype);

    if (head_bytes == 0 || o->shape.k_row_bytes % head_bytes != 0 ||
        o->shape.v_row_bytes % head_bytes != 0 || o->n_heads > KVF_HEADS_MAX ||
        o->shape.k_row_bytes / head_bytes > KVF_DIM_MAX ||
        o->shape.v_row_bytes / head_bytes > KVF_DIM_MAX) {
        snprintf(why, KVF_LLAMA_WHY_BYTES,
                 "rows of %u and %u bytes are not those of %u heads: only models whose layers have "
                 "the same heads are served",
                 o->shape.k_row_bytes, o->shape.v_row_bytes, o->n_heads);
        return KVF_ERR_UNSUPPORTED;
    }
    *geometry = (struct kvf_geometry){
        .struct_bytes = sizeof(*geometry),
        .kind = KVF_KIND_KV,
        .dtype = (uint8_t)dtype,
        .rope_state = (uint8_t)o->rope_state,
        .n_layers = (uint16_t)o->shape.n_layers,
        .n_heads = (uint16_t)o->n_heads,
        .dim_k = (uint16_t)(o->shape.k_row_bytes / head_bytes),
        .dim_v = (uint16_t)(o->shape.v_row_bytes / head_bytes),
        .chunk_tokens = (uint16_t)o->chunk_tokens,
    };
    return KVF_OK;
}

int kvf_llama_cache_create(const struct kvf_llama_cache_options *options,
                           struct kvf_llama_cache **cache_out, char why[KVF_LLAMA_WHY_BYTES])
{
    struct kvf_llama_cache *cache = calloc(1, sizeof(*cache));
    int status = KVF_ERR_NO_MEMORY;

    snprintf(why, KVF_LLAMA_WHY_BYTES, "no memory");
    if (cache == NULL) {
        return status;
    }
    cache->options = *options;
    cache->retry_ms = RETRY_MS;
    cache->profile = strdup(options->profile);
    cache->label = strdup(options->label);
    cache->socket_path = options->socket_path != NULL ? strdup(options->socket_path) : NULL;
    cache->k_layers = calloc(options->shape.n_layers, sizeof(void *));
    cache->v_layers = calloc(options->shape.n_layers, sizeof(void *));
    if (cache->profile == NULL || cache->label == NULL || cache->k_layers == NULL ||
        cache->v_layers == NULL || (options->socket_path != NULL && cache->socket_path == NULL)) {
        goto fail;
    }
    status = geometry_fill(options, &cache->geometry, why);
    if (status != KVF_OK) {
        goto fail;
    }
    *cache_out = cache;
    return KVF_OK;
fail:
    kvf_llama_cache_destroy(cache);
    return status;
}

void kvf_llama_cache_destroy(struct kvf_llama_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    kvf_close(cache->client);
    free(cache->profile);
    free(cache->label);
    free(cache->socket_path);
    free(cache->k_layers);
    free(cache->v_layers);
    free(cache->state);
    free(cache->keys);
    free(cache);
}

/* --- the connection --------------------------------------------------------------------------- */

static void on_log(void *arg, int severity, const char *text)
{
    (void)arg;
    kvf_llama_say(severity, "%s", text);
}

/* What is in force may change with every connection. */
static void profile_note(struct kvf_llama_cache *cache)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};

    if (kvf_client_info(cache->client, &info) != KVF_OK || !info.connected ||
        strcmp(cache->profile_in_force, info.profile) == 0) {
        return;
    }
    snprintf(cache->profile_in_force, sizeof(cache->profile_in_force), "%s", info.profile);
    cache->lossless = info.lossless != 0;
    if (strcmp(info.profile, cache->profile) != 0) {
        kvf_llama_say(1, "profile %s in place of %s: %s", info.profile, cache->profile,
                      info.profile_text);
    }
}

/* The daemon does not do it at the moment: ask again later, and later still where it takes time to
 * find out. */
static void back_off(struct kvf_llama_cache *cache, int status)
{
    bool is_slow = status == KVF_ERR_TIMEOUT;

    cache->retry_ms = is_slow ? cache->retry_ms * 2 : RETRY_MS;
    if (cache->retry_ms > RETRY_MAX_MS) {
        cache->retry_ms = RETRY_MAX_MS;
    }
    cache->next_try_ms = now_ms() + cache->retry_ms;
    if (cache->said_status != status) {
        cache->said_status = status;
        kvf_llama_say(1, "kvferryd: %s; requests are computed meanwhile", kvf_status_text(status));
    }
}

static int connect_now(struct kvf_llama_cache *cache, uint32_t budget_ms)
{
    struct kvf_options options;

    kvf_options_init(&options);
    options.flags = cache->options.allow_uncalibrated ? KVF_ATTACH_ALLOW_UNCALIBRATED : 0;
    options.socket_path = cache->socket_path;
    options.client_name = "llama.cpp";
    options.profile = cache->profile;
    options.geometry = &cache->geometry;
    memcpy(options.weights_digest, cache->options.weights_digest, KVF_DIGEST_BYTES);
    options.namespace_label = cache->label;
    options.connect_timeout_ms = budget_ms > 0 ? budget_ms : 1; /* 0 would be the default */
    options.log = on_log;
    return kvf_open(&options, &cache->client);
}

bool kvf_llama_cache_is_open(struct kvf_llama_cache *cache, uint32_t budget_ms)
{
    struct kvf_info info = {.struct_bytes = sizeof(info)};
    uint64_t round_trip_ns;
    int status = KVF_OK;

    if (now_ms() < cache->next_try_ms) {
        return false;
    }
    if (cache->client == NULL) {
        status = connect_now(cache, budget_ms);
    } else if (kvf_client_info(cache->client, &info) != KVF_OK || !info.connected) {
        /* A ping attaches to a daemon that has come back, and goes on where the last one was; it
         * waits as well where nobody listens. */
        status = kvf_ping(cache->client, budget_ms < ATTACH_MS ? budget_ms : ATTACH_MS,
                          &round_trip_ns);
        status = status == KVF_ERR_TIMEOUT ? KVF_ERR_NO_DAEMON : status;
    }
    if (status != KVF_OK) {
        back_off(cache, status);
        return false;
    }
    if (cache->said_status != KVF_OK) {
        cache->said_status = KVF_OK;
        kvf_llama_say(2, "kvferryd is there");
    }
    profile_note(cache);
    return true;
}

const char *kvf_llama_cache_profile(const struct kvf_llama_cache *cache)
{
    return cache->profile_in_force;
}

void kvf_llama_cache_counts(const struct kvf_llama_cache *cache,
                            struct kvf_llama_cache_counts *counts_out)
{
    *counts_out = cache->counts;
}

static void report(struct kvf_llama_cache *cache, int kind, uint64_t amount)
{
    if (cache->client != NULL && amount > 0) {
        kvf_report(cache->client, kind, amount);
    }
}

void kvf_llama_cache_report(struct kvf_llama_cache *cache, uint32_t n_computed, uint32_t n_local,
                            uint32_t n_hit)
{
    report(cache, KVF_REPORT_TOKENS_COMPUTED, n_computed);
    report(cache, KVF_REPORT_TOKENS_ENGINE, n_local);
    report(cache, KVF_REPORT_TOKENS_LOADED, n_hit);
}

void kvf_llama_cache_tick(struct kvf_llama_cache *cache)
{
    struct kvf_event event;
    uint32_t n;

    /* nothing is in flight between calls: an event would be of none of ours */
    if (cache->client != NULL) {
        kvf_poll(cache->client, &event, 1, 0, &n);
    }
}

/* --- chunks ----------------------------------------------------------------------------------- */

static bool room(uint8_t **buffer, size_t *room_bytes, size_t bytes)
{
    if (*room_bytes < bytes) {
        free(*buffer);
        *buffer = malloc(bytes);
        *room_bytes = *buffer != NULL ? bytes : 0;
    }
    return *buffer != NULL;
}

/* Keys of all whole chunks; how many that are, 0 without memory. */
static uint32_t keys_make(struct kvf_llama_cache *cache, const int32_t *tokens, uint32_t n_tokens)
{
    uint32_t n_chunks = n_tokens / cache->options.chunk_tokens;

    if (n_chunks > KVF_REQUEST_KEYS_MAX) {
        n_chunks = KVF_REQUEST_KEYS_MAX;
    }
    if (n_chunks == 0 ||
        !room(&cache->keys, &cache->keys_room, (size_t)n_chunks * KVF_DIGEST_BYTES)) {
        return 0;
    }
    kvf_llama_chain_keys(cache->options.seed, tokens, cache->options.chunk_tokens, n_chunks,
                         cache->keys);
    return n_chunks;
}

static struct kvf_key key_at(const struct kvf_llama_cache *cache, uint32_t chunk)
{
    return (struct kvf_key){cache->keys + (size_t)chunk * KVF_DIGEST_BYTES, KVF_DIGEST_BYTES};
}

/* Where the rows from a token on lie in a state of n_tokens, layer by layer. */
static void layers_point(uint8_t *state, const struct kvf_llama_shape *shape, uint32_t n_tokens,
                         uint32_t token, void **k_layers, void **v_layers)
{
    for (uint32_t layer = 0; layer < shape->n_layers; layer++) {
        k_layers[layer] = state + kvf_llama_state_k(shape, n_tokens, layer, token);
        v_layers[layer] = state + kvf_llama_state_v(shape, n_tokens, layer, token);
    }
}

/* One chunk of a state, whose layers are pointed to. */
static struct kvf_kv_view view_of(const struct kvf_llama_cache *cache, void **k_layers,
                                  void **v_layers)
{
    const struct kvf_llama_shape *shape = &cache->options.shape;
    uint32_t chunk_tokens = cache->options.chunk_tokens;

    return (struct kvf_kv_view){
        .struct_bytes = sizeof(struct kvf_kv_view),
        .tokens_a_page = chunk_tokens,
        .k = {.layers = k_layers,
              .page_stride_bytes = (size_t)chunk_tokens * shape->k_row_bytes,
              .token_stride_bytes = shape->k_row_bytes,
              .head_stride_bytes = shape->k_row_bytes / cache->options.n_heads},
        .v = {.layers = v_layers,
              .page_stride_bytes = (size_t)chunk_tokens * shape->v_row_bytes,
              .token_stride_bytes = shape->v_row_bytes,
              .head_stride_bytes = shape->v_row_bytes / cache->options.n_heads},
    };
}

/* --- load ------------------------------------------------------------------------------------- */

/* Decode one hit, if it is one and wanted, and give its lease back. True: its rows are good. */
static bool take_hit(struct kvf_llama_cache *cache, const struct kvf_hit *hit, bool is_wanted,
                     uint32_t n_tokens, uint32_t token)
{
    bool good = false;

    if (hit->status != KVF_OK) {
        return false;
    }
    if (is_wanted) {
        struct kvf_kv_view view = view_of(cache, cache->k_layers, cache->v_layers);
        int status;

        layers_point(cache->state, &cache->options.shape, n_tokens, token, cache->k_layers,
                     cache->v_layers);
        status = kvf_decode(cache->client, hit->record, hit->record_bytes, 0, 0, 0, 0, &view);
        good = status == KVF_OK;
        if (!good) {
            kvf_llama_say(1, "a chunk is not what it should be, and is computed: %s",
                          kvf_status_text(status));
        }
    }
    /* only now are the bytes known to have been the block's */
    return kvf_lease_release(cache->client, hit->lease) == KVF_OK && good;
}

/* Get chunks [first, end) of a state of n_tokens. How many leading ones are good. */
static uint32_t load_group(struct kvf_llama_cache *cache, uint32_t first, uint32_t end,
                           uint32_t n_tokens, uint32_t budget_ms, struct kvf_llama_loaded *loaded)
{
    const struct kvf_get_options options = {.struct_bytes = sizeof(options),
                                            .budget_ms = budget_ms};
    struct kvf_key keys[GROUP_CHUNKS] = {{0}};
    struct kvf_hit hits[GROUP_CHUNKS] = {{0}};
    uint32_t n = end - first;
    uint32_t n_good = 0;
    bool is_run = true;
    int status;

    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key_at(cache, first + i);
    }
    status = kvf_get(cache->client, keys, n, &options, hits);
    if (status < KVF_OK) {
        back_off(cache, status);
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        is_run = take_hit(cache, &hits[i], is_run, n_tokens,
                          (first + i) * cache->options.chunk_tokens) &&
                 is_run;
        n_good += is_run;
        if (is_run && hits[i].tier > loaded->tier) {
            loaded->tier = hits[i].tier;
        }
    }
    return n_good;
}

/* How many leading chunks are there or on their way? Starts to bring them. */
static uint32_t look(struct kvf_llama_cache *cache, uint32_t n_chunks)
{
    const struct kvf_lookup_options options = {.struct_bytes = sizeof(options),
                                               .flags = KVF_LOOKUP_PREFETCH};
    struct kvf_lookup_result result = {0};
    struct kvf_key keys[KVF_REQUEST_KEYS_MAX];
    uint32_t run;
    int status;

    for (uint32_t i = 0; i < n_chunks; i++) {
        keys[i] = key_at(cache, i);
    }
    status = kvf_lookup(cache->client, keys, n_chunks, &options, &result);
    if (status < KVF_OK) {
        back_off(cache, status);
        return 0;
    }
    /* blocks of other nodes are no part of the run, and may be coming */
    run = result.ready_chunks + result.coming_chunks;
    run = run > result.run_chunks ? run : result.run_chunks;
    return run < n_chunks ? run : n_chunks;
}

void kvf_llama_cache_load(struct kvf_llama_cache *cache, const int32_t *tokens, uint32_t n_tokens,
                          uint32_t n_have, uint32_t budget_ms, struct kvf_llama_loaded *loaded_out)
{
    const struct kvf_llama_shape *shape = &cache->options.shape;
    uint32_t chunk_tokens = cache->options.chunk_tokens;
    int64_t deadline_ms = now_ms() + budget_ms;
    uint32_t n_chunks;
    uint32_t run;
    uint32_t n_good = 0;
    bool lossless;

    *loaded_out = (struct kvf_llama_loaded){0};
    if (!kvf_llama_cache_is_open(cache, budget_ms)) {
        return;
    }
    lossless = cache->lossless;
    n_chunks = keys_make(cache, tokens, n_tokens);
    run = n_chunks > 0 ? look(cache, n_chunks) : 0;
    loaded_out->run_tokens = run * chunk_tokens;
    if (run * chunk_tokens <= n_have || !room(&cache->state, &cache->state_room,
                                              kvf_llama_state_bytes(shape, run * chunk_tokens))) {
        return;
    }
    while (n_good < run) {
        uint32_t end = n_good + GROUP_CHUNKS < run ? n_good + GROUP_CHUNKS : run;
        int64_t left_ms = deadline_ms - now_ms();
        uint32_t n = left_ms > 0 ? load_group(cache, n_good, end, run * chunk_tokens,
                                              (uint32_t)left_ms, loaded_out)
                                 : 0;
        bool is_whole = n_good + n == end;

        n_good += n;
        if (!is_whole) {
            break;
        }
    }
    report(cache, KVF_REPORT_LOAD_FAILED, run - n_good);
    if (n_good * chunk_tokens <= n_have) {
        return;
    }
    loaded_out->n_tokens = n_good * chunk_tokens;
    /* a daemon that has come in between may have another profile */
    profile_note(cache);
    loaded_out->lossless = lossless && cache->lossless;
    loaded_out->state = cache->state;
    loaded_out->state_bytes = kvf_llama_state_bytes(shape, loaded_out->n_tokens);
    /* rows that have not come are cut off; without any this writes what is around the rows */
    kvf_llama_state_cut(shape, run * chunk_tokens, loaded_out->n_tokens, cache->state);
    cache->counts.loaded_tokens += loaded_out->n_tokens;
}

/* --- store ------------------------------------------------------------------------------------ */

/* Put chunks [first, first + n) of a state. False: the rest is left out. */
static bool store_group(struct kvf_llama_cache *cache, uint32_t first, uint32_t n,
                        uint32_t n_tokens, uint8_t *state)
{
    const struct kvf_llama_shape *shape = &cache->options.shape;
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options), .depth = first, .budget_ms = PUT_MS};
    struct kvf_put_item items[GROUP_CHUNKS];
    struct kvf_kv_view views[GROUP_CHUNKS];
    int32_t statuses[GROUP_CHUNKS];
    void **layers = calloc((size_t)n * shape->n_layers * 2, sizeof(*layers));
    bool is_good = true;
    int status;

    if (layers == NULL) {
        return false;
    }
    if (first > 0) {
        options.parent = key_at(cache, first - 1);
    }
    for (uint32_t i = 0; i < n; i++) {
        void **k = layers + (size_t)i * shape->n_layers * 2;
        uint32_t token = (first + i) * cache->options.chunk_tokens;

        layers_point(state, shape, n_tokens, token, k, k + shape->n_layers);
        views[i] = view_of(cache, k, k + shape->n_layers);
        items[i] = (struct kvf_put_item){.struct_bytes = sizeof(items[i]),
                                         .source = KVF_SOURCE_VIEW,
                                         .key = key_at(cache, first + i),
                                         .token_start = token,
                                         .kv = &views[i]};
    }
    status = kvf_put(cache->client, items, n, &options, statuses);
    free(layers);
    for (uint32_t i = 0; i < n; i++) {
        cache->counts.stored_chunks += statuses[i] == KVF_OK;
        /* sums in another order give other last bits: what is there is as good */
        if (statuses[i] == KVF_EXISTS || statuses[i] == KVF_ERR_CONFLICT) {
            cache->counts.present_chunks++;
        } else if (statuses[i] != KVF_OK) {
            cache->counts.refused_chunks++;
            is_good = false;
        }
    }
    if (status == KVF_ERR_TIMEOUT || status <= KVF_ERR_DISCONNECTED) {
        back_off(cache, status);
    }
    return is_good;
}

void kvf_llama_cache_store(struct kvf_llama_cache *cache, const int32_t *tokens, uint32_t n_tokens,
                           uint32_t n_end, uint32_t n_first, bool is_tainted, uint8_t *state)
{
    uint32_t n_chunks;
    uint32_t chunk = n_first / cache->options.chunk_tokens;

    if (!kvf_llama_cache_is_open(cache, PUT_MS)) {
        return;
    }
    n_chunks = keys_make(cache, tokens, n_end);
    if (is_tainted && cache->lossless) {
        report(cache, KVF_REPORT_TAINT_REFUSED, n_chunks > chunk ? n_chunks - chunk : 0);
        return;
    }
    while (chunk < n_chunks) {
        uint32_t n = n_chunks - chunk < GROUP_CHUNKS ? n_chunks - chunk : GROUP_CHUNKS;

        if (!store_group(cache, chunk, n, n_tokens, state)) {
            return;
        }
        chunk += n;
    }
}
