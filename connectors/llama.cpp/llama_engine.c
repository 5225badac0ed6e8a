/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_engine.c: see llama_engine.h. llama.cpp and the handle of the daemon belong to the thread;
 * other threads put a job into the queue and wait for its end.
 */
#include "connectors/llama.cpp/llama_engine.h"

#include <llama.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "connectors/llama.cpp/llama_cache.h"
#include "connectors/llama.cpp/llama_chain.h"
#include "connectors/llama.cpp/llama_say.h"

enum {
    CONNECT_MS = 5000, /* where no request waits */
};

/* What one sequence of llama.cpp has. */
struct slot {
    int32_t *tokens; /* [context_tokens] */
    uint32_t n_tokens;
    uint32_t lossy_tokens; /* leading ones loaded with loss: all behind is computed from that */
    uint64_t used;         /* number of the request that used it last */
};

/* A request on its way. Its submitter's stack. */
struct job {
    const struct kvf_llama_request *request;
    struct kvf_llama_answer *answer;
    char *why;
    double begin_s;
    int status;
    bool is_done;
    struct job *next;
};

struct kvf_llama_engine {
    struct kvf_llama_model model;
    struct kvf_llama_cache *cache;
    enum kvf_llama_store store;
    uint32_t chunk_tokens;
    uint32_t n_slots;
    struct slot slots[KVF_LLAMA_SLOTS_MAX];
    uint8_t *state; /* what llama.cpp writes */
    size_t state_room;
    uint64_t n_requests;

    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t wake;  /* the thread: a job, or stop */
    pthread_cond_t done;  /* submitters */
    struct job *first;
    struct job **last;
    uint32_t n_waiting;
    bool is_stopping;
    struct kvf_llama_engine_facts facts;
};

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static const char *tier_name(enum kvf_tier_kind tier)
{
    static const char *const names[] = {"", "hbm", "dram", "nvme", "remote"};

    return (size_t)tier < sizeof(names) / sizeof(names[0]) ? names[tier] : "";
}

static bool is_stopping(struct kvf_llama_engine *engine)
{
    bool is;

    pthread_mutex_lock(&engine->lock);
    is = engine->is_stopping;
    pthread_mutex_unlock(&engine->lock);
    return is;
}

static int stopped(char *why)
{
    snprintf(why, KVF_LLAMA_WHY_BYTES, "the server ends");
    return KVF_ERR_CANCELED;
}

/* --- slots ------------------------------------------------------------------------------------ */

static uint32_t common_tokens(const struct slot *slot, const int32_t *tokens, uint32_t n_tokens)
{
    uint32_t n = slot->n_tokens < n_tokens ? slot->n_tokens : n_tokens;
    uint32_t i = 0;

    while (i < n && slot->tokens[i] == tokens[i]) {
        i++;
    }
    return i;
}

/* The slot that has most of the prompt, if that is a chunk or more; else the one that has not been
 * used for longest. */
static uint32_t slot_choose(const struct kvf_llama_engine *engine, const int32_t *tokens,
                            uint32_t n_tokens)
{
    uint32_t oldest = 0;
    uint32_t best = 0;
    uint32_t best_tokens = 0;

    for (uint32_t i = 0; i < engine->n_slots; i++) {
        uint32_t common = common_tokens(&engine->slots[i], tokens, n_tokens);

        if (common > best_tokens) {
            best = i;
            best_tokens = common;
        }
        if (engine->slots[i].used < engine->slots[oldest].used) {
            oldest = i;
        }
    }
    return best_tokens >= engine->chunk_tokens ? best : oldest;
}

/* Leave the first n_tokens. */
static void slot_cut(struct kvf_llama_engine *engine, uint32_t index, uint32_t n_tokens)
{
    struct slot *slot = &engine->slots[index];

    llama_memory_seq_rm(llama_get_memory(engine->model.context), (int32_t)index,
                        (llama_pos)n_tokens, -1);
    slot->n_tokens = n_tokens;
    slot->lossy_tokens = slot->lossy_tokens < n_tokens ? slot->lossy_tokens : n_tokens;
}

static int slot_decode(struct kvf_llama_engine *engine, uint32_t index, const int32_t *tokens,
                       uint32_t n_tokens, bool wants_logits, char *why)
{
    struct slot *slot = &engine->slots[index];
    int code;
    int status = kvf_llama_model_decode(&engine->model, (int32_t)index, tokens, slot->n_tokens,
                                        n_tokens, wants_logits, &code);

    if (status != KVF_OK) {
        snprintf(why, KVF_LLAMA_WHY_BYTES, "llama_decode answers %d at token %u", code,
                 slot->n_tokens);
        slot_cut(engine, index, 0);
        return status;
    }
    memcpy(slot->tokens + slot->n_tokens, tokens, n_tokens * sizeof(*tokens));
    slot->n_tokens += n_tokens;
    return KVF_OK;
}

/* --- a request -------------------------------------------------------------------------------- */

/* Have as much of the prompt in the slot as can be had without computing. *known_out: leading
 * tokens that the daemon has. */
static void prefix_take(struct kvf_llama_engine *engine, uint32_t index,
                        const struct kvf_llama_request *request, struct kvf_llama_answer *answer,
                        uint32_t *known_out)
{
    struct slot *slot = &engine->slots[index];
    uint32_t local = common_tokens(slot, request->prompt, request->n_prompt);
    struct kvf_llama_loaded loaded = {0};

    /* logits come of a token that is computed */
    local = local < request->n_prompt ? local : request->n_prompt - 1;
    if (local < slot->lossy_tokens) {
        /* a chunk of both what was loaded and what is computed could not be stored */
        local -= local % engine->chunk_tokens;
    }
    if (request->load) {
        kvf_llama_cache_load(engine->cache, request->prompt, request->n_prompt, local,
                             request->budget_ms, &loaded);
    }
    *known_out = loaded.run_tokens;
    answer->local_tokens = local;
    if (loaded.n_tokens > 0) {
        size_t read = llama_state_seq_set_data(engine->model.context, loaded.state,
                                               loaded.state_bytes, (int32_t)index);

        answer->local_tokens = 0;
        if (read == loaded.state_bytes) {
            memcpy(slot->tokens, request->prompt, loaded.n_tokens * sizeof(*slot->tokens));
            slot->n_tokens = loaded.n_tokens;
            slot->lossy_tokens = loaded.lossless ? 0 : loaded.n_tokens;
            answer->hit_tokens = loaded.n_tokens < request->n_prompt ? loaded.n_tokens
                                                                     : request->n_prompt - 1;
            answer->tier = tier_name(loaded.tier);
        } else {
            slot_cut(engine, index, 0); /* llama.cpp has said why */
        }
    }
    slot_cut(engine, index, answer->local_tokens + answer->hit_tokens);
}

/* Compute the rest of the prompt, in batches that end where chunks do. */
static int prompt_compute(struct kvf_llama_engine *engine, uint32_t index,
                          const struct kvf_llama_request *request, char *why)
{
    struct slot *slot = &engine->slots[index];

    while (slot->n_tokens < request->n_prompt) {
        uint32_t left = request->n_prompt - slot->n_tokens;
        uint32_t n = engine->chunk_tokens - slot->n_tokens % engine->chunk_tokens;
        int status;

        if (is_stopping(engine)) {
            return stopped(why);
        }
        n = n < left ? n : left;
        status = slot_decode(engine, index, request->prompt + slot->n_tokens, n,
                             n == left && request->n_predict > 0, why);
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

/* The token of the largest logit, and its logprob. */
static int32_t choose(const float *logits, uint32_t n_vocab, float *logprob_out)
{
    uint32_t best = 0;
    double sum = 0;

    for (uint32_t i = 1; i < n_vocab; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    for (uint32_t i = 0; i < n_vocab; i++) {
        sum += exp((double)logits[i] - (double)logits[best]);
    }
    *logprob_out = (float)-log(sum);
    return (int32_t)best;
}

static int answer_compute(struct kvf_llama_engine *engine, uint32_t index, const struct job *job,
                          char *why)
{
    const struct kvf_llama_request *request = job->request;
    struct kvf_llama_answer *answer = job->answer;

    while (answer->n_tokens < request->n_predict) {
        const float *logits = llama_get_logits_ith(engine->model.context, -1);
        int32_t token;
        int status;

        if (logits == NULL) {
            snprintf(why, KVF_LLAMA_WHY_BYTES, "llama.cpp gives no logits");
            return KVF_ERR_IO;
        }
        token = choose(logits, engine->model.n_vocab, &answer->logprobs[answer->n_tokens]);
        answer->tokens[answer->n_tokens++] = token;
        if (answer->n_tokens == 1) {
            answer->first_token_s = now_s() - job->begin_s;
        }
        answer->is_ended = llama_vocab_is_eog(engine->model.vocab, token);
        if (answer->is_ended || answer->n_tokens == request->n_predict) {
            break;
        }
        if (is_stopping(engine)) {
            return stopped(why);
        }
        status = slot_decode(engine, index, &token, 1, true, why);
        if (status != KVF_OK) {
            return status;
        }
    }
    return KVF_OK;
}

/* Give the daemon what it does not have, but nothing that was loaded with loss: it would lose more
 * each time. Behind the answer: only the next request waits. */
static void store(struct kvf_llama_engine *engine, uint32_t index, uint32_t n_prompt,
                  uint32_t n_known)
{
    struct slot *slot = &engine->slots[index];
    uint32_t n_stored = engine->store == KVF_LLAMA_STORE_ALL ? slot->n_tokens : n_prompt;
    uint32_t n_lossy = slot->lossy_tokens + engine->chunk_tokens - 1;
    uint32_t n_first;
    struct kvf_llama_found found;
    char why[KVF_LLAMA_WHY_BYTES];
    size_t bytes;

    n_stored = n_stored < slot->n_tokens ? n_stored : slot->n_tokens;
    n_stored -= n_stored % engine->chunk_tokens;
    n_lossy -= n_lossy % engine->chunk_tokens;
    n_first = n_known > n_lossy ? n_known : n_lossy;
    if (n_stored <= n_first || !kvf_llama_cache_is_open(engine->cache, CONNECT_MS)) {
        return;
    }
    bytes = llama_state_seq_get_size(engine->model.context, (int32_t)index);
    if (engine->state_room < bytes) {
        free(engine->state);
        engine->state = malloc(bytes);
        engine->state_room = engine->state != NULL ? bytes : 0;
    }
    if (engine->state == NULL) {
        return;
    }
    bytes = llama_state_seq_get_data(engine->model.context, engine->state, bytes, (int32_t)index);
    /* what the trial has seen is what it still has to be */
    if (kvf_llama_state_parse(engine->state, bytes, &found, why) != KVF_OK) {
        kvf_llama_say(1, "a prompt is not stored: %s", why);
    } else if (memcmp(&found.shape, &engine->model.shape, sizeof(found.shape)) != 0 ||
               found.n_tokens != slot->n_tokens) {
        kvf_llama_say(1, "a prompt is not stored: its state has %u tokens, %u have been computed",
                      found.n_tokens, slot->n_tokens);
    } else {
        kvf_llama_cache_store(engine->cache, slot->tokens, found.n_tokens, n_stored, n_first,
                              slot->lossy_tokens > 0, engine->state + found.shift_bytes);
    }
}

static int job_run(struct kvf_llama_engine *engine, const struct job *job, uint32_t *index_out,
                   uint32_t *known_out)
{
    const struct kvf_llama_request *request = job->request;
    struct kvf_llama_answer *answer = job->answer;
    uint32_t index = slot_choose(engine, request->prompt, request->n_prompt);
    int status;

    *index_out = index;
    *known_out = 0;
    if (is_stopping(engine)) {
        return stopped(job->why);
    }
    engine->slots[index].used = ++engine->n_requests;
    prefix_take(engine, index, request, answer, known_out);
    snprintf(answer->profile, sizeof(answer->profile), "%s",
             kvf_llama_cache_profile(engine->cache));
    status = prompt_compute(engine, index, request, job->why);
    return status != KVF_OK ? status : answer_compute(engine, index, job, job->why);
}

/* --- the thread ------------------------------------------------------------------------------- */

static void facts_note(struct kvf_llama_engine *engine, const struct job *job)
{
    struct kvf_llama_cache_counts counts;

    kvf_llama_cache_counts(engine->cache, &counts);
    engine->facts.requests = engine->n_requests;
    engine->facts.stored_chunks = counts.stored_chunks;
    engine->facts.present_chunks = counts.present_chunks;
    engine->facts.refused_chunks = counts.refused_chunks;
    if (job != NULL) {
        engine->facts.prompt_tokens += job->request->n_prompt;
        engine->facts.hit_tokens += job->answer->hit_tokens;
        engine->facts.local_tokens += job->answer->local_tokens;
    }
}

static void job_end(struct kvf_llama_engine *engine, struct job *job, int status)
{
    job->answer->total_s = now_s() - job->begin_s;
    pthread_mutex_lock(&engine->lock);
    facts_note(engine, job);
    job->status = status;
    job->is_done = true;
    pthread_cond_broadcast(&engine->done);
    pthread_mutex_unlock(&engine->lock);
}

/* Wait for a job, or the end, for a second. Locked. */
static void job_wait(struct kvf_llama_engine *engine)
{
    struct timespec end;

    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec++;
    pthread_cond_timedwait(&engine->wake, &engine->lock, &end);
}

/* The next job, or NULL: the end. */
static struct job *job_take(struct kvf_llama_engine *engine)
{
    struct job *job = NULL;

    pthread_mutex_lock(&engine->lock);
    while (engine->first == NULL && !engine->is_stopping) {
        job_wait(engine);
        if (engine->first == NULL) {
            pthread_mutex_unlock(&engine->lock);
            kvf_llama_cache_tick(engine->cache);
            pthread_mutex_lock(&engine->lock);
        }
    }
    if (engine->first != NULL) {
        job = engine->first;
        engine->first = job->next;
        engine->last = engine->first != NULL ? engine->last : &engine->first;
        engine->n_waiting--;
    }
    pthread_mutex_unlock(&engine->lock);
    return job;
}

static void *run(void *arg)
{
    struct kvf_llama_engine *engine = arg;
    struct job *job;

    while ((job = job_take(engine)) != NULL) {
        /* the job is gone when its submitter knows that it is done */
        bool is_stored = job->request->store && engine->store != KVF_LLAMA_STORE_NONE;
        uint32_t n_prompt = job->request->n_prompt;
        uint32_t index;
        uint32_t n_known;
        int status = job_run(engine, job, &index, &n_known);
        uint32_t n_had = job->answer->local_tokens + job->answer->hit_tokens;

        if (status == KVF_OK) {
            kvf_llama_cache_report(engine->cache, n_prompt - n_had, job->answer->local_tokens,
                                   job->answer->hit_tokens);
        }
        job_end(engine, job, status);
        if (status == KVF_OK && is_stored && !is_stopping(engine)) {
            store(engine, index, n_prompt, n_known);
            pthread_mutex_lock(&engine->lock);
            facts_note(engine, NULL);
            pthread_mutex_unlock(&engine->lock);
        }
    }
    return NULL;
}

/* --- other threads ---------------------------------------------------------------------------- */

static int request_check(const struct kvf_llama_engine *engine,
                         const struct kvf_llama_request *request, char *why)
{
    if (request->n_prompt == 0) {
        snprintf(why, KVF_LLAMA_WHY_BYTES, "the prompt has no tokens");
        return KVF_ERR_INVALID;
    }
    if ((uint64_t)request->n_prompt + request->n_predict > engine->model.context_tokens) {
        snprintf(why, KVF_LLAMA_WHY_BYTES,
                 "a prompt of %u tokens and %u to be predicted are more than the %u of a slot",
                 request->n_prompt, request->n_predict, engine->model.context_tokens);
        return KVF_ERR_INVALID;
    }
    for (uint32_t i = 0; i < request->n_prompt; i++) {
        if (request->prompt[i] < 0 || (uint32_t)request->prompt[i] >= engine->model.n_vocab) {
            snprintf(why, KVF_LLAMA_WHY_BYTES, "token %u of the prompt is %d, not 0 to %u", i,
                     request->prompt[i], engine->model.n_vocab - 1);
            return KVF_ERR_INVALID;
        }
    }
    return KVF_OK;
}

int kvf_llama_engine_submit(struct kvf_llama_engine *engine,
                            const struct kvf_llama_request *request,
                            struct kvf_llama_answer *answer_out, char why[KVF_LLAMA_WHY_BYTES])
{
    struct job job = {.request = request, .answer = answer_out, .why = why, .begin_s = now_s()};
    int status = request_check(engine, request, why);

    *answer_out = (struct kvf_llama_answer){.tier = ""};
    if (status != KVF_OK) {
        return status;
    }
    answer_out->tokens = calloc(request->n_predict + 1, sizeof(*answer_out->tokens));
    answer_out->logprobs = calloc(request->n_predict + 1, sizeof(*answer_out->logprobs));
    if (answer_out->tokens == NULL || answer_out->logprobs == NULL) {
        snprintf(why, KVF_LLAMA_WHY_BYTES, "no memory");
        kvf_llama_answer_free(answer_out);
        return KVF_ERR_NO_MEMORY;
    }
    pthread_mutex_lock(&engine->lock);
    if (engine->is_stopping) {
        job.status = stopped(why);
    } else if (engine->n_waiting == KVF_LLAMA_QUEUE_MAX) {
        snprintf(why, KVF_LLAMA_WHY_BYTES, "%d requests wait already", KVF_LLAMA_QUEUE_MAX);
        job.status = KVF_ERR_BUSY;
    } else {
        *engine->last = &job;
        engine->last = &job.next;
        engine->n_waiting++;
        pthread_cond_signal(&engine->wake);
        while (!job.is_done) {
            pthread_cond_wait(&engine->done, &engine->lock);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    if (job.status != KVF_OK) {
        kvf_llama_answer_free(answer_out);
    }
    return job.status;
}

void kvf_llama_answer_free(struct kvf_llama_answer *answer)
{
    free(answer->tokens);
    free(answer->logprobs);
    answer->tokens = NULL;
    answer->logprobs = NULL;
}

int kvf_llama_engine_tokens(const struct kvf_llama_engine *engine, const char *text, size_t bytes,
                            int32_t **tokens_out, uint32_t *n_tokens_out)
{
    /* no token is less than a byte; some stand at the beginning and the end */
    int32_t room = bytes < KVF_LLAMA_TOKENS_MAX ? (int32_t)bytes + 8 : 0;
    int32_t *tokens = room > 0 ? calloc((size_t)room, sizeof(*tokens)) : NULL;
    int32_t n;

    if (room == 0) {
        return KVF_ERR_INVALID;
    }
    if (tokens == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    n = llama_tokenize(engine->model.vocab, text, (int32_t)bytes, tokens, room, true, true);
    if (n < 0) {
        free(tokens);
        return KVF_ERR_INVALID;
    }
    *tokens_out = tokens;
    *n_tokens_out = (uint32_t)n;
    return KVF_OK;
}

char *kvf_llama_engine_text(const struct kvf_llama_engine *engine, const int32_t *tokens,
                            uint32_t n_tokens, size_t *bytes_out)
{
    int32_t room = 64;
    char *text = NULL;
    int32_t n = -room;

    while (n < 0) {
        char *grown = realloc(text, (size_t)room);

        if (grown == NULL) {
            free(text);
            return NULL;
        }
        text = grown;
        n = llama_detokenize(engine->model.vocab, tokens, (int32_t)n_tokens, text, room, false,
                             true);
        room = n < 0 ? -n : room;
    }
    *bytes_out = (size_t)n;
    return text;
}

void kvf_llama_engine_facts(struct kvf_llama_engine *engine,
                            struct kvf_llama_engine_facts *facts_out)
{
    pthread_mutex_lock(&engine->lock);
    *facts_out = engine->facts;
    facts_out->waiting = engine->n_waiting;
    pthread_mutex_unlock(&engine->lock);
}

/* --- life ------------------------------------------------------------------------------------- */

static int cache_open(struct kvf_llama_engine *engine,
                      const struct kvf_llama_engine_options *options, char *why)
{
    struct kvf_llama_cache_options cache = {
        .socket_path = options->socket_path,
        .profile = options->profile,
        .label = options->label,
        .allow_uncalibrated = options->allow_uncalibrated,
        .chunk_tokens = options->model.chunk_tokens,
        .n_heads = engine->model.n_heads,
        .rope_state = engine->model.rope_state,
        .shape = engine->model.shape,
    };
    int status = kvf_llama_file_digest(options->model.path, cache.weights_digest);

    if (status != KVF_OK) {
        snprintf(why, KVF_LLAMA_WHY_BYTES, "%s: reading it for its digest failed",
                 options->model.path);
        return status;
    }
    kvf_llama_chain_seed(llama_version(), cache.seed);
    return kvf_llama_cache_create(&cache, &engine->cache, why);
}

int kvf_llama_engine_create(const struct kvf_llama_engine_options *options,
                            struct kvf_llama_engine **engine_out, char why[KVF_LLAMA_WHY_BYTES])
{
    struct kvf_llama_engine *engine = calloc(1, sizeof(*engine));
    int status = KVF_ERR_NO_MEMORY;

    snprintf(why, KVF_LLAMA_WHY_BYTES, "no memory");
    if (engine == NULL) {
        return status;
    }
    engine->store = options->store;
    engine->chunk_tokens = options->model.chunk_tokens;
    engine->n_slots = options->model.n_slots;
    engine->last = &engine->first;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->wake, NULL);
    pthread_cond_init(&engine->done, NULL);
    status = kvf_llama_model_open(&options->model, &engine->model, why);
    status = status != KVF_OK ? status : cache_open(engine, options, why);
    if (status != KVF_OK) {
        goto fail;
    }
    snprintf(engine->facts.model, sizeof(engine->facts.model), "%s", engine->model.name);
    engine->facts.n_vocab = engine->model.n_vocab;
    engine->facts.context_tokens = engine->model.context_tokens;
    engine->facts.chunk_tokens = engine->chunk_tokens;
    snprintf(why, KVF_LLAMA_WHY_BYTES, "no memory");
    status = KVF_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < engine->n_slots; i++) {
        engine->slots[i].tokens = calloc(engine->model.context_tokens,
                                         sizeof(*engine->slots[i].tokens));
        if (engine->slots[i].tokens == NULL) {
            goto fail;
        }
    }
    kvf_llama_cache_is_open(engine->cache, CONNECT_MS); /* now, since it may take a moment */
    if (pthread_create(&engine->thread, NULL, run, engine) != 0) {
        goto fail;
    }
    engine->has_thread = true;
    *engine_out = engine;
    return KVF_OK;
fail:
    kvf_llama_engine_destroy(engine);
    return status;
}

void kvf_llama_engine_stop(struct kvf_llama_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->is_stopping = true;
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->lock);
}

void kvf_llama_engine_destroy(struct kvf_llama_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    if (engine->has_thread) {
        pthread_join(engine->thread, NULL);
    }
    kvf_llama_cache_destroy(engine->cache);
    kvf_llama_model_close(&engine->model);
    for (uint32_t i = 0; i < engine->n_slots; i++) {
        free(engine->slots[i].tokens);
    }
    free(engine->state);
    pthread_cond_destroy(&engine->done);
    pthread_cond_destroy(&engine->wake);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}
