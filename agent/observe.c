/* SPDX-License-Identifier: Apache-2.0
 *
 * observe.c: prompts of clients into words, for replays and for recordings.
 *
 *   lookup -> the session's list of hashes -> sample -> filling | working -> job -> replays
 *                                          \-> trace -> control (kvferry trace record)
 *
 * A sample is one block in so many, by its name, so that a block is in it always or never, and the
 * blocks of a prompt that are in it are a shorter prompt. Stores of the replays are smaller by the
 * same factor, and a hit counts for as many as it stands for.
 *
 * A block that many prompts begin with, as a system prompt, would count for nothing or for far too
 * much: blocks of more than one prompt in HOT_ONE_IN are kept out of the sample. Every store has
 * them, and they count as what they are.
 */
#include "agent/observe.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#include "agent/replay.h"
#include "base/log.h"

#define SAMPLE_HEAD      4 /* words of a sampled prompt: time, n | tokens << 32, bytes, blocks */
#define REPEAT_NS        KVF_NS_PER_S
#define HASH_MASK        ((UINT64_C(1) << 53) - 1) /* what numbers of JSON hold */
#define HOT_PLACES       (1u << 15)
#define HOT_ONE_IN       64u
#define HOT_COUNT_MIN    16u
#define HOT_PROMPTS      8192u /* after so many, counts are halved */
#define OPAQUE_TOKENS    256   /* that a block of opaque bytes counts as */
#define RECORD_BYTES_MIN (8ull << 10)
#define RECORD_BYTES_MAX (64ull << 20)

/* How often a name has come lately; names of one place fight for it. */
struct hot {
    uint32_t tag;
    uint32_t count;
};

struct shadow {
    struct kvf_replay *replay;
    bool is_off; /* too small for its sample, or failed */
    uint64_t tokens, bytes;
};

struct kvf_observer {
    struct kvf_agent *agent;
    uint64_t opaque_bytes; /* of the last opaque record put */

    /* observing */
    uint32_t one_in; /* of the sample; 0: nothing has been sampled yet */
    struct hot *hots;
    uint32_t n_prompts; /* that their counts are of */
    uint64_t hot_tokens, hot_bytes;
    uint64_t *filling, *working;
    uint32_t n_filling, n_working;
    uint32_t n_prompts_filling; /* prompts in filling */
    bool is_working;
    struct kvf_work work;
    bool has_shadows; /* this and they are the job's while it runs */
    struct shadow shadows[KVF_OBSERVE_SIZES];

    /* recording; trace NULL: nobody does */
    uint64_t *trace;
    uint32_t n_trace;
    uint64_t lost;
    uint64_t taken_ns;
    uint8_t salt[crypto_shorthash_KEYBYTES];
};

static const double sizes[KVF_OBSERVE_SIZES] = {0.25, 0.5, 1, 2, 4, 8};

/* ----------------------------------------------------------------------------------------------
 * Replays: on a worker
 */
static uint64_t drive_bytes(const struct kvf_config *config)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < config->n_nvme; i++) {
        bytes += config->nvme[i].bytes;
    }
    return bytes;
}

static uint64_t drive_budget(const struct kvf_config *config)
{
    uint64_t budget = 0;

    for (uint32_t i = 0; i < config->n_nvme; i++) {
        if (config->nvme[i].write_budget == 0) {
            return 0;
        }
        budget += config->nvme[i].write_budget;
    }
    return budget;
}

/* So few blocks that eight times as many are no burden, and so many that a quarter is a store. */
static uint32_t choose_sample(const struct kvf_replay_config *config)
{
    uint64_t dram = kvf_replay_dram_blocks(config);
    uint64_t nvme = kvf_replay_nvme_blocks(config);
    uint64_t one_in = dram / KVF_OBSERVE_SLOTS;

    if (nvme / KVF_OBSERVE_DRIVE_SLOTS > one_in) {
        one_in = nvme / KVF_OBSERVE_DRIVE_SLOTS;
    }
    if (one_in > dram / (4 * KVF_REPLAY_SLOTS_MIN)) {
        one_in = dram / (4 * KVF_REPLAY_SLOTS_MIN);
    }
    return one_in == 0 ? 1 : one_in > 1u << 20 ? 1u << 20 : (uint32_t)one_in;
}

static struct kvf_replay_config store_of(const struct kvf_config *config, uint64_t record_bytes)
{
    return (struct kvf_replay_config){
        .record_bytes = record_bytes,
        .dram_bytes = config->dram_bytes,
        .nvme_bytes = drive_bytes(config),
        .write_budget = drive_budget(config),
        .admission = config->n_nvme != 0 ? (uint8_t)config->nvme[0].admission : 0,
    };
}

/* What stores of this size times sizes[number] are replayed as. */
static struct kvf_replay_config shadow_of(const struct kvf_replay_config *store, uint32_t number)
{
    struct kvf_replay_config sized = *store;

    sized.dram_bytes = (uint64_t)((double)store->dram_bytes * sizes[number]);
    sized.nvme_bytes = (uint64_t)((double)store->nvme_bytes * sizes[number]);
    return sized;
}

static void open_shadows(struct kvf_observer *observer, uint64_t record_bytes)
{
    struct kvf_replay_config replay = store_of(observer->agent->config, record_bytes);

    observer->has_shadows = true;
    replay.one_in = observer->one_in;
    for (uint32_t i = 0; i < KVF_OBSERVE_SIZES; i++) {
        struct shadow *shadow = &observer->shadows[i];
        struct kvf_replay_config sized = shadow_of(&replay, i);
        char why[KVF_ERROR_TEXT_BYTES] = "";

        shadow->is_off = kvf_replay_open(&sized, &shadow->replay, why, sizeof(why)) != KVF_OK;
    }
}

static void replay_one(struct kvf_observer *observer, struct shadow *shadow, const uint64_t *words)
{
    uint32_t n = (uint32_t)words[3];
    struct kvf_replay_hits hits = {0};
    uint64_t blocks;

    if (shadow->is_off) {
        return;
    }
    if (kvf_replay_request(shadow->replay, words[0], words + SAMPLE_HEAD, n, &hits) != KVF_OK) {
        shadow->is_off = true;
        return;
    }
    blocks = (uint64_t)(hits.dram + hits.nvme) * observer->one_in;
    shadow->tokens += blocks * (words[1] >> 32);
    shadow->bytes += blocks * words[2];
}

static void run_replays(struct kvf_work *work)
{
    struct kvf_observer *observer = work->owner;

    kvf_log_hush(true); /* clients of replays are nobody's news */
    for (uint32_t at = 0; at < observer->n_working;) {
        const uint64_t *words = observer->working + at;

        if (!observer->has_shadows) {
            open_shadows(observer, words[2]);
        }
        for (uint32_t i = 0; i < KVF_OBSERVE_SIZES; i++) {
            replay_one(observer, &observer->shadows[i], words);
        }
        at += SAMPLE_HEAD + (uint32_t)words[3];
    }
    kvf_log_hush(false);
}

/* ----------------------------------------------------------------------------------------------
 * Back on the reactor
 */
static void start_replays(struct kvf_observer *observer);

static void take_results(struct kvf_observer *observer)
{
    struct kvf_metrics *metrics = &observer->agent->metrics;
    uint64_t *const tokens[KVF_OBSERVE_SIZES] = {
        &metrics->observe_hit_tokens_quarter,  &metrics->observe_hit_tokens_half,
        &metrics->observe_hit_tokens_full,     &metrics->observe_hit_tokens_double,
        &metrics->observe_hit_tokens_fourfold, &metrics->observe_hit_tokens_eightfold};
    uint64_t *const bytes[KVF_OBSERVE_SIZES] = {
        &metrics->observe_hit_bytes_quarter,  &metrics->observe_hit_bytes_half,
        &metrics->observe_hit_bytes_full,     &metrics->observe_hit_bytes_double,
        &metrics->observe_hit_bytes_fourfold, &metrics->observe_hit_bytes_eightfold};

    for (uint32_t i = 0; i < KVF_OBSERVE_SIZES; i++) {
        if (!observer->shadows[i].is_off) {
            *tokens[i] = observer->shadows[i].tokens + observer->hot_tokens;
            *bytes[i] = observer->shadows[i].bytes + observer->hot_bytes;
        }
    }
}

static void replays_done(struct kvf_work *work)
{
    struct kvf_observer *observer = work->owner;

    observer->is_working = false;
    take_results(observer);
    start_replays(observer);
}

static void start_replays(struct kvf_observer *observer)
{
    uint64_t *words = observer->filling;

    if (observer->is_working || observer->n_filling == 0) {
        return;
    }
    observer->filling = observer->working;
    observer->working = words;
    observer->n_working = observer->n_filling;
    observer->n_filling = 0;
    observer->work.run = run_replays;
    observer->work.done = replays_done;
    observer->work.owner = observer;
    observer->is_working = observer->agent->setup->ops->submit(observer->agent->setup,
                                                               &observer->work) == KVF_OK;
    if (!observer->is_working) {
        observer->agent->metrics.observe_lost_prompts += observer->n_prompts_filling;
    }
    observer->n_prompts_filling = 0;
}

/* ----------------------------------------------------------------------------------------------
 * Prompts
 */
static bool is_observing(const struct kvf_agent *agent)
{
    return agent->config->mode == KVF_MODE_OBSERVE;
}

bool kvf_observe_answers_nothing(const struct kvf_session *session)
{
    return is_observing(session->agent);
}

static uint32_t chunk_tokens(const struct kvf_session *session)
{
    uint32_t tokens = session->hello.geometry.chunk_tokens;

    return tokens != 0 ? tokens : OPAQUE_TOKENS;
}

/* Of a chunk, all shards; 0: not known yet. */
static uint64_t chunk_bytes(const struct kvf_session *session)
{
    const struct kvf_codec_plan *plan = &session->plan;
    uint32_t tokens = session->hello.geometry.chunk_tokens;
    uint64_t bytes = session->agent->observer->opaque_bytes;

    if (tokens != 0) {
        bytes = KVF_RECORD_PAGE_BYTES + kvf_codec_plan_payload_bytes(plan, tokens);
    }
    return bytes * session->shard_count;
}

void kvf_observe_key(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;
    const struct kvf_observer *observer = session->agent->observer;
    uint8_t key_id[32];

    if (!is_observing(session->agent) && observer->trace == NULL) {
        return;
    }
    if (request->next_key == 0) {
        session->n_observed = 0;
    }
    if (session->observed == NULL) {
        session->observed = calloc(KVF_REQUEST_KEYS_MAX, sizeof(*session->observed));
    }
    if (session->observed == NULL || session->n_observed != request->next_key) {
        return; /* no memory; or a recording that has begun amid a request */
    }
    kvf_request_key_id(session, key, key_id);
    memcpy(&session->observed[session->n_observed++], key_id, sizeof(uint64_t));
}

void kvf_observe_forget(struct kvf_session *session)
{
    free(session->observed);
    session->observed = NULL;
    session->n_observed = 0;
}

/* Count this name, and tell whether it is in more than one prompt in HOT_ONE_IN. */
static bool is_hot(struct kvf_observer *observer, uint64_t hash)
{
    struct hot *hot = &observer->hots[hash % HOT_PLACES];
    uint32_t tag = (uint32_t)(hash >> 24);

    if (hot->tag == tag) {
        hot->count++;
    } else if (hot->count > 0) {
        hot->count--;
        return false;
    } else {
        *hot = (struct hot){.tag = tag, .count = 1};
    }
    return observer->n_prompts > HOT_ONE_IN && hot->count >= HOT_COUNT_MIN &&
           hot->count > observer->n_prompts / HOT_ONE_IN;
}

static void age_hots(struct kvf_observer *observer)
{
    if (++observer->n_prompts < HOT_PROMPTS) {
        return;
    }
    observer->n_prompts /= 2;
    for (uint32_t i = 0; i < HOT_PLACES; i++) {
        observer->hots[i].count /= 2;
    }
}

/* The blocks of the prompt that are in the sample, to out; hot ones at its beginning are counted.
 * Returns how many. */
static uint32_t choose_blocks(struct kvf_session *session, uint32_t n, uint64_t bytes,
                              uint64_t *out)
{
    struct kvf_observer *observer = session->agent->observer;
    bool is_beginning = true;
    uint32_t kept = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t hash = session->observed[i];

        if (is_hot(observer, hash)) {
            observer->hot_tokens += is_beginning ? chunk_tokens(session) : 0;
            observer->hot_bytes += is_beginning ? bytes : 0;
            continue;
        }
        is_beginning = false;
        if ((hash >> 32) % observer->one_in == 0) {
            out[kept++] = hash;
        }
    }
    age_hots(observer);
    return kept;
}

static void sample(struct kvf_session *session, uint32_t n)
{
    struct kvf_observer *observer = session->agent->observer;
    struct kvf_metrics *metrics = &session->agent->metrics;
    uint64_t bytes = chunk_bytes(session);
    uint64_t *words = observer->filling + observer->n_filling;
    uint32_t kept;

    metrics->observe_lookup_tokens += (uint64_t)n * chunk_tokens(session);
    if (bytes == 0) {
        return;
    }
    if (observer->one_in == 0) {
        struct kvf_replay_config store = store_of(session->agent->config, bytes);

        observer->one_in = choose_sample(&store);
    }
    if (observer->n_filling + SAMPLE_HEAD + n > KVF_OBSERVE_WORDS) {
        metrics->observe_lost_prompts++;
        return;
    }
    kept = choose_blocks(session, n, bytes, words + SAMPLE_HEAD);
    if (kept > 0) {
        words[0] = session->agent->now_ns - session->agent->started_ns;
        words[1] = (uint64_t)chunk_tokens(session) << 32;
        words[2] = bytes;
        words[3] = kept;
        observer->n_filling += SAMPLE_HEAD + kept;
        observer->n_prompts_filling++;
        start_replays(observer);
    }
}

static void record(struct kvf_session *session, uint32_t n)
{
    struct kvf_observer *observer = session->agent->observer;
    uint64_t *words = observer->trace + observer->n_trace;

    if (observer->n_trace + KVF_OBSERVE_TRACE_HEAD + n > KVF_OBSERVE_TRACE_WORDS) {
        observer->lost++;
        return;
    }
    *words++ = session->agent->now_ns - session->agent->started_ns;
    *words++ = (uint64_t)chunk_tokens(session) << 32 | n;
    *words++ = session->agent->namespaces[session->namespace_index].id;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t hash[crypto_shorthash_BYTES];

        (void)crypto_shorthash(hash, (const uint8_t *)&session->observed[i],
                               sizeof(session->observed[i]), observer->salt);
        memcpy(words, hash, sizeof(*words));
        *words++ &= HASH_MASK;
    }
    observer->n_trace += KVF_OBSERVE_TRACE_HEAD + n;
}

/* An engine that waits for a prefetch asks again and again. */
static bool is_repeated(struct kvf_session *session, uint32_t n)
{
    uint64_t last = session->observed[n - 1];
    uint64_t now_ns = session->agent->now_ns;
    bool is_same = session->observed_last == last && session->observed_count == n &&
                   now_ns - session->observed_ns < REPEAT_NS;

    session->observed_last = last;
    session->observed_count = n;
    session->observed_ns = now_ns;
    return is_same;
}

void kvf_observe_lookup(struct kvf_request *request)
{
    struct kvf_session *session = request->session;
    uint32_t n = (uint32_t)request->sqe.n_keys - request->sqe.n_tails;

    if (session->observed == NULL || session->n_observed != n || n == 0 ||
        is_repeated(session, n)) {
        return;
    }
    if (is_observing(session->agent)) {
        sample(session, n);
    }
    if (session->agent->observer->trace != NULL) {
        record(session, n);
    }
    session->n_observed = 0;
}

/* ----------------------------------------------------------------------------------------------
 * Answers of an empty daemon
 */
void kvf_observe_answer(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;

    (void)key;
    if (request->sqe.opcode == KVF_OP_LOOKUP) {
        request->run_ended = true;
        return;
    }
    if (request->sqe.opcode == KVF_OP_GET) {
        session->gets++;
        session->misses++;
        session->agent->metrics.get_misses++;
    }
    kvf_request_block(request, request->next_key, KVF_MISS, KVF_TIER_NONE);
}

void kvf_observe_put(struct kvf_request *request, const struct kvf_shm_key *key)
{
    struct kvf_session *session = request->session;
    bool is_durable = (request->sqe.flags & KVF_SQE_DURABLE) != 0;

    session->agent->metrics.observe_put_blocks++;
    session->agent->metrics.observe_put_bytes += key->record_bytes;
    session->agent->observer->opaque_bytes = key->record_bytes;
    /* a block that is evicted at once is what a put may come to; one on a drive is not */
    kvf_request_block(request, request->next_key, is_durable ? KVF_ERR_TIER_OFF : KVF_OK,
                      KVF_TIER_NONE);
}

/* ----------------------------------------------------------------------------------------------
 * Recordings
 */
static int begin_trace(struct kvf_observer *observer)
{
    if (observer->trace != NULL) {
        return KVF_OK;
    }
    observer->trace = calloc(KVF_OBSERVE_TRACE_WORDS, sizeof(*observer->trace));
    if (observer->trace == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    observer->n_trace = 0;
    observer->lost = 0;
    kvf_env_random_fill(&observer->agent->env, observer->salt, sizeof(observer->salt));
    return KVF_OK;
}

void kvf_observe_take(struct kvf_agent *agent, struct kvf_control *control)
{
    struct kvf_observer *observer = agent->observer;
    uint32_t n = 0;

    control->status = begin_trace(observer);
    if (control->status != KVF_OK) {
        return;
    }
    while (n < observer->n_trace) {
        uint32_t next = n + KVF_OBSERVE_TRACE_HEAD + (uint32_t)observer->trace[n + 1];

        if (next > control->max_rows) {
            break;
        }
        n = next;
    }
    memcpy(control->rows, observer->trace, n * sizeof(*observer->trace));
    memmove(observer->trace, observer->trace + n,
            (observer->n_trace - n) * sizeof(*observer->trace));
    observer->n_trace -= n;
    observer->taken_ns = agent->now_ns;
    control->n_rows = n;
    control->bad = observer->lost;
}

void kvf_observe_tick(struct kvf_agent *agent)
{
    struct kvf_observer *observer = agent->observer;

    if (observer->trace != NULL &&
        agent->now_ns - observer->taken_ns > KVF_OBSERVE_IDLE_S * KVF_NS_PER_S) {
        free(observer->trace);
        observer->trace = NULL;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
uint64_t kvf_observe_bytes(const struct kvf_config *config)
{
    uint64_t most = 0;

    if (config->mode != KVF_MODE_OBSERVE) {
        return 0;
    }
    /* how large blocks will be is not known yet, and decides on the sample */
    for (uint64_t record = RECORD_BYTES_MIN; record <= RECORD_BYTES_MAX; record += record / 64) {
        struct kvf_replay_config store = store_of(config, record);
        uint64_t bytes = 0;

        store.one_in = choose_sample(&store);
        for (uint32_t i = 0; i < KVF_OBSERVE_SIZES; i++) {
            struct kvf_replay_config sized = shadow_of(&store, i);

            bytes += kvf_replay_bytes(&sized);
        }
        most = bytes > most ? bytes : most;
    }
    return most + 2ull * KVF_OBSERVE_WORDS * sizeof(uint64_t) + HOT_PLACES * sizeof(struct hot);
}

int kvf_observe_open(struct kvf_agent *agent)
{
    struct kvf_observer *observer = calloc(1, sizeof(*observer));

    agent->observer = observer;
    if (observer == NULL) {
        kvf_log(KVF_LOG_ERROR, "recordings of prompts: out of memory");
        return KVF_ERR_NO_MEMORY;
    }
    observer->agent = agent;
    if (!is_observing(agent)) {
        return KVF_OK;
    }
    kvf_log(KVF_LOG_INFO, "mode observe: nothing is stored, every answer is a miss");
    observer->filling = calloc(KVF_OBSERVE_WORDS, sizeof(*observer->filling));
    observer->working = calloc(KVF_OBSERVE_WORDS, sizeof(*observer->working));
    observer->hots = calloc(HOT_PLACES, sizeof(*observer->hots));
    if (observer->filling == NULL || observer->working == NULL || observer->hots == NULL) {
        kvf_log(KVF_LOG_ERROR, "mode observe: no memory for a sample of prompts");
        return KVF_ERR_NO_MEMORY;
    }
    return KVF_OK;
}

void kvf_observe_close(struct kvf_agent *agent)
{
    struct kvf_observer *observer = agent->observer;

    if (observer == NULL) {
        return;
    }
    kvf_log_hush(true);
    for (uint32_t i = 0; i < KVF_OBSERVE_SIZES; i++) {
        kvf_replay_close(observer->shadows[i].replay);
    }
    kvf_log_hush(false);
    free(observer->filling);
    free(observer->working);
    free(observer->hots);
    free(observer->trace);
    free(observer);
    agent->observer = NULL;
}
