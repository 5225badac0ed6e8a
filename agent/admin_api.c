/* SPDX-License-Identifier: Apache-2.0
 *
 * admin_api.c: paths of the admin server, from query arguments to a question for the reactor to
 * JSON. Numbers of 64 bits that name something (namespaces, incarnations, cursors) travel as
 * hexadecimal strings, because JSON readers lose bits of large numbers.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "agent/admin_internal.h"
#include "agent/calibration.h"
#include "agent/index.h"
#include "agent/metrics.h"
#include "agent/observe.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/parse.h"
#include "transport/transport_ucx.h"

enum http {
    HTTP_OK = 200,
    HTTP_BAD_REQUEST = 400,
    HTTP_NOT_FOUND = 404,
    HTTP_CONFLICT = 409,
    HTTP_INTERNAL = 500,
    HTTP_UNAVAILABLE = 503,
};

/* Of a recording in one answer: about 600 KiB of JSON. */
#define TRACE_WORDS 32768

/* After so long without a question, a recording's reader is taken for dead. */
#define TRACE_READER_S 10

/* How often a wait looks whether the daemon stops. */
#define WAIT_SLICE_MS 100

/* --- questions -------------------------------------------------------------------------------- */

/* One question on its way to the reactor. If the answer is late, the asker leaves and the reactor's
 * done frees it: the rows it writes to must live until then. */
struct question {
    struct kvf_control control; /* owner: the asker, but from post to done the reactor */
    pthread_mutex_t lock;       /* protects the two flags; nothing else is taken under it */
    pthread_cond_t changed;
    bool is_answered;
    bool is_abandoned;
};

static void question_free(struct question *question)
{
    if (question == NULL) {
        return;
    }
    free(question->control.rows);
    free(question->control.stat);
    kvf_calibrations_release(question->control.calibrations);
    pthread_cond_destroy(&question->changed);
    pthread_mutex_destroy(&question->lock);
    free(question);
}

static void on_answer(struct kvf_control *control)
{
    struct question *question = control->owner;
    bool is_abandoned;

    pthread_mutex_lock(&question->lock);
    question->is_answered = true;
    is_abandoned = question->is_abandoned;
    pthread_cond_signal(&question->changed);
    pthread_mutex_unlock(&question->lock);
    if (is_abandoned) {
        question_free(question);
    }
}

/* row_bytes 0: no rows. NULL: no memory. */
static struct question *question_new(enum kvf_control_op op, uint32_t max_rows, size_t row_bytes)
{
    struct question *question = calloc(1, sizeof(*question));
    pthread_condattr_t attributes;

    if (question == NULL) {
        return NULL;
    }
    pthread_mutex_init(&question->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&question->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    question->control.op = (uint8_t)op;
    question->control.max_rows = max_rows;
    question->control.done = on_answer;
    question->control.owner = question;
    if (row_bytes != 0) {
        question->control.rows = calloc(max_rows, row_bytes);
    }
    if (op == KVF_CONTROL_STAT) {
        question->control.stat = calloc(1, sizeof(*question->control.stat));
    }
    if ((row_bytes != 0 && question->control.rows == NULL) ||
        (op == KVF_CONTROL_STAT && question->control.stat == NULL)) {
        question_free(question);
        return NULL;
    }
    return question;
}

static struct timespec after_ms(uint64_t ms)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += (time_t)(ms / 1000);
    at.tv_nsec += (long)(ms % 1000) * 1000000;
    if (at.tv_nsec >= 1000000000) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000;
    }
    return at;
}

/* Has the reactor answered within timeout_ms? If not, the question is no longer ours. */
static bool question_wait(struct kvf_admin_api *api, struct question *question, uint64_t timeout_ms)
{
    uint64_t end_ns = kvf_now_ns() + timeout_ms * KVF_NS_PER_MS;
    bool is_answered;

    pthread_mutex_lock(&question->lock);
    while (!question->is_answered && kvf_now_ns() < end_ns &&
           !atomic_load_explicit(&api->is_stopping, memory_order_acquire)) {
        struct timespec slice = after_ms(WAIT_SLICE_MS);

        pthread_cond_timedwait(&question->changed, &question->lock, &slice);
    }
    is_answered = question->is_answered;
    question->is_abandoned = !is_answered;
    pthread_mutex_unlock(&question->lock);
    return is_answered;
}

/* --- replies ---------------------------------------------------------------------------------- */

/* Text from clients may not be UTF-8, which JSON must be: other bytes become '?'. */
static json_t *text_json(const char *text)
{
    json_t *string = json_string(text);
    char clean[512];
    size_t i;

    if (string != NULL) {
        return string;
    }
    for (i = 0; text[i] != '\0' && i < sizeof(clean) - 1; i++) {
        clean[i] = (unsigned char)text[i] < 0x80 ? text[i] : '?';
    }
    clean[i] = '\0';
    return json_string(clean);
}

static json_t *hex64_json(uint64_t value)
{
    return json_sprintf("%016" PRIx64, value);
}

static json_t *u64_json(uint64_t value)
{
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

/* Takes the reference. */
static void reply_json(struct kvf_admin_reply *reply, unsigned http_status, json_t *json)
{
    reply->http_status = http_status;
    reply->content_type = "application/json";
    reply->text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;
    reply->text_bytes = reply->text != NULL ? strlen(reply->text) : 0;
    json_decref(json);
}

void kvf_admin_reply_status(struct kvf_admin_reply *reply, unsigned http_status, const char *status,
                            const char *text)
{
    reply_json(reply, http_status,
               json_pack("{s:s, s:o}", "status", status, "text", text_json(text)));
}

static unsigned http_of(int status)
{
    switch (status) {
    case KVF_ERR_INVALID:
        return HTTP_BAD_REQUEST;
    case KVF_MISS:
        return HTTP_NOT_FOUND;
    case KVF_ERR_BUSY:
    case KVF_ERR_TIMEOUT:
        return HTTP_UNAVAILABLE;
    case KVF_ERR_REFUSED:
    case KVF_ERR_TIER_OFF:
        return HTTP_CONFLICT;
    default:
        return HTTP_INTERNAL;
    }
}

/* Post a question and wait. True: answered with success, *question_inout is to be read and freed.
 * False: the reply says why, the question is gone. */
static bool ask(struct kvf_admin_api *api, struct question **question_inout, uint64_t timeout_ms,
                struct kvf_admin_reply *reply)
{
    struct question *question = *question_inout;
    int status;

    *question_inout = NULL;
    if (question == NULL) {
        return false; /* no text: the server closes the connection */
    }
    if (kvf_admin_is_starting(api, reply)) {
        question_free(question);
        return false;
    }
    status = kvf_agent_post(api->agent, &question->control);
    if (status != KVF_OK) {
        question_free(question);
        kvf_admin_reply_status(reply, HTTP_UNAVAILABLE, kvf_status_name(status),
                               "too many questions are waiting for the daemon");
        return false;
    }
    if (!question_wait(api, question, timeout_ms)) {
        kvf_admin_reply_status(reply, HTTP_UNAVAILABLE, kvf_status_name(KVF_ERR_TIMEOUT),
                               "the daemon's loop did not answer in time");
        return false;
    }
    status = question->control.status;
    if (status != KVF_OK) {
        kvf_admin_reply_status(reply, http_of(status), kvf_status_name(status),
                               question->control.text[0] != '\0' ? question->control.text
                                                                 : kvf_status_text(status));
        question_free(question);
        return false;
    }
    *question_inout = question;
    return true;
}

/* --- arguments -------------------------------------------------------------------------------- */

/* "0123abcd" to bytes; exactly n_bytes of them. */
static bool hex_parse(const char *text, uint8_t *out, size_t n_bytes)
{
    if (strlen(text) != 2 * n_bytes || strspn(text, "0123456789abcdefABCDEF") != 2 * n_bytes) {
        return false;
    }
    for (size_t i = 0; i < n_bytes; i++) {
        char pair[3] = {text[2 * i], text[2 * i + 1], '\0'};

        out[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    return true;
}

/* A hexadecimal number of up to 16 digits. Absent: *value_out stays. False: the reply says why. */
static bool hex64_argument(const struct kvf_admin_request *request, const char *name,
                           uint64_t *value_out, struct kvf_admin_reply *reply)
{
    const char *text = request->argument(request, name);
    char why[128];

    if (text == NULL) {
        return true;
    }
    if (text[0] == '\0' || strlen(text) > 16 ||
        strspn(text, "0123456789abcdefABCDEF") != strlen(text)) {
        snprintf(why, sizeof(why), "%s is no hexadecimal number of up to 16 digits", name);
        kvf_admin_reply_status(reply, HTTP_BAD_REQUEST, kvf_status_name(KVF_ERR_INVALID), why);
        return false;
    }
    *value_out = strtoull(text, NULL, 16);
    return true;
}

/* A number from 1 to most. Absent: *value_out stays. */
static bool count_argument(const struct kvf_admin_request *request, const char *name, uint32_t most,
                           uint32_t *value_out, struct kvf_admin_reply *reply)
{
    const char *text = request->argument(request, name);
    char why[KVF_CONFIG_ERROR_TEXT_BYTES];
    char detail[256];
    uint64_t value;

    if (text == NULL) {
        return true;
    }
    if (kvf_parse_u64(text, &value, detail, sizeof(detail)) != KVF_OK || value == 0 ||
        value > most) {
        snprintf(why, sizeof(why), "%s is no number from 1 to %" PRIu32, name, most);
        kvf_admin_reply_status(reply, HTTP_BAD_REQUEST, kvf_status_name(KVF_ERR_INVALID), why);
        return false;
    }
    *value_out = (uint32_t)value;
    return true;
}

/* --- health and metrics ----------------------------------------------------------------------- */

static void answer_health(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                          struct kvf_admin_reply *reply)
{
    struct question *question;
    struct kvf_agent_start start;

    (void)request;
    if (kvf_agent_starting(api->agent, &start)) {
        /* its loop waits for drives, which a restart would not make faster */
        kvf_admin_reply_status(reply, HTTP_OK, "ok", start.text);
        return;
    }
    question = question_new(KVF_CONTROL_STAT, 0, 0);
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        kvf_admin_reply_status(reply, HTTP_OK, "ok", "the daemon's loop answers");
    }
    question_free(question);
}

static void answer_ready(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                         struct kvf_admin_reply *reply)
{
    (void)request;
    if (kvf_admin_is_starting(api, reply)) {
        return;
    }
    if (kvf_agent_is_ready(api->agent)) {
        kvf_admin_reply_status(reply, HTTP_OK, "ok", "requests are served");
    } else {
        kvf_admin_reply_status(reply, HTTP_UNAVAILABLE, "busy", "starting or draining");
    }
}

static void answer_metrics(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                           struct kvf_admin_reply *reply)
{
    struct question *question = question_new(KVF_CONTROL_STAT, 0, 0);

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply) &&
        kvf_metrics_render_text(question->control.stat, &reply->text, &reply->text_bytes) ==
            KVF_OK) {
        reply->http_status = HTTP_OK;
        reply->content_type = "text/plain; version=0.0.4; charset=utf-8";
    }
    question_free(question);
}

/* --- stat ------------------------------------------------------------------------------------- */

static void set_tier(json_t *object, const struct kvf_tier_stat *tier)
{
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"capacity_bytes", tier->capacity_bytes},
        {"stored_bytes", tier->stored_bytes},
        {"stored_blocks", tier->stored_blocks},
        {"full_area_bytes", tier->area_bytes},
        {"full_area_stored_bytes", tier->area_stored_bytes},
        {"stores", tier->stores},
        {"loads", tier->loads},
        {"drops", tier->drops},
        {"evictions", tier->evictions},
        {"reinsertions", tier->reinsertions},
        {"busy", tier->busy},
        {"errors_io", tier->errors_io},
        {"errors_corrupt", tier->errors_corrupt},
        {"errors_mac", tier->errors_mac},
        {"bytes_written", tier->bytes_written},
        {"bytes_read", tier->bytes_read},
        {"queue_depth", tier->queue_depth},
    };

    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        json_object_set_new(object, numbers[i].name, u64_json(numbers[i].value));
    }
    json_object_set_new(object, "writes_off", json_boolean(tier->writes_off));
    json_object_set_new(object, "off", json_boolean(tier->off));
}

/* The word of an ENUM option. */
static json_t *word_json(const struct kvf_config *config, enum kvf_config_option_id id)
{
    char word[32];

    kvf_config_value_text(&kvf_config_options[id], config, word, sizeof(word));
    return json_string(word);
}

static json_t *dram_json(const struct kvf_control_stat *stat, const struct kvf_config *config)
{
    json_t *dram = json_object();
    json_t *classes = json_array();

    set_tier(dram, &stat->dram);
    json_object_set_new(dram, "fill", json_real(stat->dram_fill));
    json_object_set_new(dram, "arena_bytes", u64_json(stat->dram_arena_bytes));
    json_object_set_new(dram, "populated_bytes", u64_json(stat->dram_populated_bytes));
    json_object_set_new(dram, "huge_bytes", u64_json(stat->dram_huge_bytes));
    json_object_set_new(dram, "memory_refusals", u64_json(stat->dram_memory_refusals));
    json_object_set_new(dram, "hugepages", word_json(config, KVF_CONFIG_ID_dram_hugepages));
    for (uint32_t i = 0; i < stat->n_classes; i++) {
        const struct kvf_control_class *c = &stat->classes[i];

        json_array_append_new(classes, json_pack("{s:o, s:i, s:i, s:i, s:b}", "slot_bytes",
                                                 u64_json(c->slot_bytes), "areas", (int)c->areas,
                                                 "slots", (int)c->slots, "used_slots",
                                                 (int)c->used_slots, "exact", (int)c->exact));
    }
    json_object_set_new(dram, "classes", classes);
    return dram;
}

static json_t *drives_json(const struct kvf_control_stat *stat)
{
    json_t *drives = json_array();

    for (uint32_t i = 0; i < stat->n_drives; i++) {
        const struct kvf_control_drive *d = &stat->drives[i];
        json_t *drive = json_pack("{s:o, s:o, s:o}", "path", text_json(d->path), "engine",
                                  text_json(d->engine), "why", text_json(d->why));

        set_tier(drive, &d->tier);
        json_array_append_new(drives, drive);
    }
    return drives;
}

static json_t *hbm_json(const struct kvf_control_stat *stat)
{
    json_t *gpus = json_array();

    for (uint32_t i = 0; i < stat->n_hbm; i++) {
        json_t *gpu = json_pack("{s:o}", "uuid", text_json(stat->hbm[i].uuid));

        set_tier(gpu, &stat->hbm[i].tier);
        json_array_append_new(gpus, gpu);
    }
    return gpus;
}

static json_t *stat_json(const struct kvf_control_stat *stat, const struct kvf_config *config)
{
    json_t *object = json_pack(
        "{s:o, s:o, s:o, s:b, s:b, s:b, s:i, s:i, s:o, s:o, s:o, s:o}", "version",
        text_json(stat->version), "incarnation", hex64_json(stat->incarnation), "uptime_s",
        u64_json(stat->uptime_s), "ready", (int)stat->ready, "draining", (int)stat->draining,
        "disabled", (int)stat->disabled, "clients", (int)stat->clients, "clients_max",
        (int)stat->clients_max, "index_entries", u64_json(stat->index_entries), "index_capacity",
        u64_json(stat->index_capacity), "staging_used_bytes", u64_json(stat->staging_used_bytes),
        "staging_total_bytes", u64_json(stat->staging_total_bytes));

    if (object == NULL) {
        return NULL;
    }
    json_object_set_new(object, "mode", word_json(config, KVF_CONFIG_ID_mode));
    json_object_set_new(object, "hbm", hbm_json(stat));
    json_object_set_new(object, "dram", dram_json(stat, config));
    json_object_set_new(object, "nvme", drives_json(stat));
    json_object_set_new(object, "metrics", kvf_metrics_json(&stat->metrics));
    return object;
}

static void answer_stat(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                        struct kvf_admin_reply *reply)
{
    struct question *question;
    struct kvf_agent_start start;

    (void)request;
    if (kvf_agent_starting(api->agent, &start)) {
        reply_json(reply, HTTP_OK, kvf_admin_start_json(&start, text_json(start.text)));
        return;
    }
    question = question_new(KVF_CONTROL_STAT, 0, 0);
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_json(reply, HTTP_OK, stat_json(question->control.stat, api->config));
    }
    question_free(question);
}

/* --- lists ------------------------------------------------------------------------------------ */

static json_t *client_json(const void *row)
{
    const struct kvf_control_client *c = row;
    json_t *object = json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:i, s:I, s:i, s:i, s:i, s:I}", "connection_id",
        hex64_json(c->connection_id), "namespace_id", hex64_json(c->namespace_id), "name",
        text_json(c->name), "profile", text_json(c->profile), "tenant", text_json(c->tenant),
        "state", text_json(c->state), "pid", (int)c->pid, "uid", (json_int_t)c->uid, "shard",
        (int)c->shard, "shard_count", (int)c->shard_count, "protocol_version",
        (int)c->protocol_version, "inflight_requests", (json_int_t)c->inflight_requests);

    if (object != NULL) {
        json_object_set_new(object, "profile_text", text_json(c->profile_text));
        json_object_set_new(object, "gpu_path", text_json(c->gpu_path));
        json_object_set_new(object, "gpu_uuid", text_json(c->gpu_uuid));
        json_object_set_new(object, "leased_bytes", u64_json(c->leased_bytes));
        json_object_set_new(object, "staging_bytes", u64_json(c->staging_bytes));
        json_object_set_new(object, "puts", u64_json(c->puts));
        json_object_set_new(object, "gets", u64_json(c->gets));
        json_object_set_new(object, "hits", u64_json(c->hits));
        json_object_set_new(object, "misses", u64_json(c->misses));
        json_object_set_new(object, "attached_s", u64_json(c->attached_s));
    }
    return object;
}

static json_t *block_json(const void *row)
{
    const struct kvf_control_block *b = row;
    char key_id[65];

    for (unsigned i = 0; i < sizeof(b->key_id); i++) {
        snprintf(key_id + 2 * i, 3, "%02x", b->key_id[i]);
    }
    return json_pack(
        "{s:s, s:o, s:o, s:i, s:i, s:b, s:b, s:s, s:i, s:b, s:o}", "key_id", key_id, "namespace_id",
        hex64_json(b->namespace_id), "record_bytes", u64_json(b->record_bytes), "shard",
        (int)b->shard, "shard_count", (int)b->shard_count, "in_hbm", (int)b->in_hbm, "in_dram",
        (int)b->in_dram, "nvme",
        b->in_nvme == 0   ? "no"
        : b->in_nvme == 1 ? "stored"
                          : "queued",
        "drive", (int)b->drive, "pinned", (int)b->pinned, "state", text_json(b->state));
}

static json_t *namespace_json(const void *row)
{
    const struct kvf_control_namespace *n = row;

    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:b, s:b, s:i, s:o, s:o, s:o, s:o, s:o}",
                     "namespace_id", hex64_json(n->namespace_id), "epoch", u64_json(n->epoch),
                     "tenant", text_json(n->tenant), "label", text_json(n->label), "profile",
                     text_json(n->profile), "lossless", (int)n->lossless, "disabled",
                     (int)n->disabled, "clients", (int)n->clients, "blocks", u64_json(n->blocks),
                     "dram_bytes", u64_json(n->dram_bytes), "nvme_bytes", u64_json(n->nvme_bytes),
                     "gpu_ns", u64_json(n->gpu_ns), "gpu_decode_ns", u64_json(n->gpu_decode_ns));
}

/* Rows of an answered question as {"<name>": [...], "next_cursor": "..."}. */
static void reply_rows(struct kvf_admin_reply *reply, const struct question *question,
                       const char *name, size_t row_bytes, json_t *(*row_json)(const void *row))
{
    const struct kvf_control *control = &question->control;
    json_t *rows = json_array();
    json_t *object = json_object();
    int failed = 0;

    for (uint32_t i = 0; i < control->n_rows; i++) {
        failed |= json_array_append_new(
            rows, row_json((const char *)control->rows + (size_t)i * row_bytes));
    }
    failed |= json_object_set_new(object, name, rows);
    failed |= json_object_set_new(object, "next_cursor",
                                  control->next_cursor != 0 ? hex64_json(control->next_cursor)
                                                            : json_null());
    if (failed) {
        json_decref(object);
        object = NULL;
    }
    reply_json(reply, HTTP_OK, object);
}

static void answer_clients(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                           struct kvf_admin_reply *reply)
{
    struct question *question = question_new(
        KVF_CONTROL_CLIENTS, (uint32_t)api->config->clients_max, sizeof(struct kvf_control_client));

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_rows(reply, question, "clients", sizeof(struct kvf_control_client), client_json);
    }
    question_free(question);
}

static json_t *peer_json(const void *row)
{
    const struct kvf_control_peer *p = row;

    return json_pack(
        "{s:o, s:o, s:o, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "name", text_json(p->name),
        "address", text_json(p->address), "state", text_json(p->state), "asked", (int)p->is_asked,
        "incarnation", hex64_json(p->incarnation), "linked_s", u64_json(p->linked_s), "blocks",
        u64_json(p->blocks), "fetched_blocks", u64_json(p->fetched_blocks), "fetched_bytes",
        u64_json(p->fetched_bytes), "failed_blocks", u64_json(p->failed_blocks), "served_blocks",
        u64_json(p->served_blocks), "served_bytes", u64_json(p->served_bytes));
}

static void answer_peers(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                         struct kvf_admin_reply *reply)
{
    struct question *question = question_new(KVF_CONTROL_PEERS, KVF_NET_LINKS_MAX,
                                             sizeof(struct kvf_control_peer));

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_rows(reply, question, "peers", sizeof(struct kvf_control_peer), peer_json);
    }
    question_free(question);
}

static void answer_events(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                          struct kvf_admin_reply *reply)
{
    struct question *question;
    uint64_t cursor = 0;
    uint64_t number = 0;
    uint32_t max = KVF_ADMIN_BLOCKS_MAX;

    if (!hex64_argument(request, "number", &number, reply) ||
        !hex64_argument(request, "cursor", &cursor, reply) ||
        !count_argument(request, "max", KVF_ADMIN_BLOCKS_MAX, &max, reply)) {
        return;
    }
    question = question_new(KVF_CONTROL_EVENTS, max, sizeof(struct kvf_control_event));
    if (question != NULL) {
        question->control.number = number;
        question->control.cursor = cursor;
    }
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_json(reply, HTTP_OK,
                   kvf_admin_events_json(&question->control, number == 0 && cursor == 0));
    }
    question_free(question);
}

static void answer_namespaces(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                              struct kvf_admin_reply *reply)
{
    struct question *question = question_new(KVF_CONTROL_NAMESPACES, KVF_INDEX_NAMESPACES_MAX,
                                             sizeof(struct kvf_control_namespace));

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_rows(reply, question, "namespaces", sizeof(struct kvf_control_namespace),
                   namespace_json);
    }
    question_free(question);
}

static void answer_blocks(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                          struct kvf_admin_reply *reply)
{
    struct question *question;
    uint64_t namespace_id = 0;
    uint64_t cursor = 0;
    uint32_t max = 100;

    if (!hex64_argument(request, "namespace", &namespace_id, reply) ||
        !hex64_argument(request, "cursor", &cursor, reply) ||
        !count_argument(request, "max", KVF_ADMIN_BLOCKS_MAX, &max, reply)) {
        return;
    }
    question = question_new(KVF_CONTROL_BLOCKS, max, sizeof(struct kvf_control_block));
    if (question != NULL) {
        question->control.namespace_id = namespace_id;
        question->control.cursor = cursor;
    }
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_rows(reply, question, "blocks", sizeof(struct kvf_control_block), block_json);
    }
    question_free(question);
}

static json_t *digest_json(const uint8_t digest[KVF_DIGEST_BYTES])
{
    char text[2 * KVF_DIGEST_BYTES + 1];

    for (unsigned i = 0; i < KVF_DIGEST_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    }
    return json_string(text);
}

static json_t *calibration_json(const struct kvf_calibration *calibration)
{
    const struct kvf_profile_table *table = calibration->table;
    json_t *workloads = json_array();

    for (uint32_t i = 0; kvf_profile_workloads[i] != NULL; i++) {
        if ((table->workloads >> i & 1) != 0) {
            json_array_append_new(workloads, json_string(kvf_profile_workloads[i]));
        }
    }
    return json_pack("{s:o, s:s, s:o, s:o, s:o, s:i, s:i}", "file", text_json(calibration->file),
                     "profile", table->name, "weights_digest", digest_json(table->weights_digest),
                     "adapter_digest", digest_json(table->adapter_digest), "workload", workloads,
                     "kinds", (int)table->n_kinds, "layers", (int)table->n_layers);
}

static json_t *calibrations_json(const struct kvf_calibrations *calibrations)
{
    json_t *rows = json_array();
    int failed = 0;

    for (uint32_t i = 0; calibrations != NULL && i < calibrations->n; i++) {
        failed |= json_array_append_new(rows, calibration_json(&calibrations->list[i]));
    }
    if (failed) {
        json_decref(rows);
        rows = NULL;
    }
    return rows != NULL ? json_pack("{s:o}", "calibrated", rows) : NULL;
}

/* What has passed for which model. */
static void answer_profiles(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                            struct kvf_admin_reply *reply)
{
    struct question *question = question_new(KVF_CONTROL_CALIBRATIONS, 0, 0);

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        reply_json(reply, HTTP_OK, calibrations_json(question->control.calibrations));
    }
    question_free(question);
}

/* The prompts of a recording, from words to objects. NULL: no memory. */
static json_t *prompts_json(const uint64_t *words, uint32_t n_words)
{
    json_t *prompts = json_array();
    int failed = 0;

    for (uint32_t at = 0; at < n_words;) {
        uint32_t n = (uint32_t)words[at + 1];
        json_t *ids = json_array();

        for (uint32_t i = 0; i < n; i++) {
            failed |= json_array_append_new(ids, u64_json(words[at + KVF_OBSERVE_TRACE_HEAD + i]));
        }
        failed |= json_array_append_new(
            prompts, json_pack("{s:f, s:o, s:I, s:o}", "timestamp",
                               (double)words[at] / (double)KVF_NS_PER_MS, "namespace",
                               hex64_json(words[at + 2]), "block_tokens",
                               (json_int_t)(words[at + 1] >> 32), "hash_ids", ids));
        at += KVF_OBSERVE_TRACE_HEAD + n;
    }
    if (failed) {
        json_decref(prompts);
        return NULL;
    }
    return prompts;
}

/* What has been looked up since this was asked last; the first time begins a recording. */
static void answer_trace(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                         struct kvf_admin_reply *reply)
{
    struct question *question;
    uint64_t reader = 0;
    uint32_t is_last = 0;

    if (!hex64_argument(request, "reader", &reader, reply) ||
        !count_argument(request, "last", 1, &is_last, reply)) {
        return;
    }
    /* an answer takes its prompts out of the recording: two readers would get half each */
    if (api->trace_ns != 0 && api->trace_reader != reader &&
        kvf_now_ns() - api->trace_ns < TRACE_READER_S * KVF_NS_PER_S) {
        kvf_admin_reply_status(reply, HTTP_CONFLICT, kvf_status_name(KVF_ERR_REFUSED),
                               "another recording is under way: wait for it, or 10 s if it died");
        return;
    }
    question = question_new(KVF_CONTROL_TRACE, TRACE_WORDS, sizeof(uint64_t));
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        const struct kvf_control *control = &question->control;
        json_t *prompts = prompts_json(control->rows, control->n_rows);

        api->trace_reader = reader;
        api->trace_ns = is_last != 0 ? 0 : kvf_now_ns();
        reply_json(reply, HTTP_OK,
                   prompts != NULL
                       ? json_pack("{s:o, s:o}", "lost", u64_json(control->bad), "prompts", prompts)
                       : NULL);
    }
    question_free(question);
}

/* --- commands --------------------------------------------------------------------------------- */

static void answer_verify(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                          struct kvf_admin_reply *reply)
{
    struct question *question;
    uint64_t cursor = 0;
    uint32_t max = 64;

    if (!hex64_argument(request, "cursor", &cursor, reply) ||
        !count_argument(request, "max", KVF_ADMIN_VERIFY_MAX, &max, reply)) {
        return;
    }
    question = question_new(KVF_CONTROL_VERIFY, max, 0);
    if (question != NULL) {
        question->control.cursor = cursor;
    }
    if (ask(api, &question, KVF_ADMIN_ANSWER_SLOW_MS, reply)) {
        const struct kvf_control *control = &question->control;

        reply_json(
            reply, HTTP_OK,
            json_pack("{s:o, s:o, s:o, s:o}", "verified", u64_json(control->verified), "bad",
                      u64_json(control->bad), "places", u64_json(control->places), "next_cursor",
                      control->next_cursor != 0 ? hex64_json(control->next_cursor) : json_null()));
    }
    question_free(question);
}

static void reply_evicted(struct kvf_admin_reply *reply, const struct question *question)
{
    reply_json(
        reply, HTTP_OK,
        json_pack("{s:s, s:o}", "status", "ok", "evicted", u64_json(question->control.evicted)));
}

static void answer_evict(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                         struct kvf_admin_reply *reply)
{
    const char *key_id = request->argument(request, "key_id");
    struct question *question;
    uint64_t namespace_id = 0;
    uint8_t bytes[32] = {0};

    if (!hex64_argument(request, "namespace", &namespace_id, reply)) {
        return;
    }
    if ((key_id == NULL) == (namespace_id == 0) ||
        (key_id != NULL && !hex_parse(key_id, bytes, sizeof(bytes)))) {
        kvf_admin_reply_status(reply, HTTP_BAD_REQUEST, kvf_status_name(KVF_ERR_INVALID),
                               "give either key_id (64 hexadecimal digits) or namespace");
        return;
    }
    question = question_new(KVF_CONTROL_EVICT, 0, 0);
    if (question != NULL) {
        question->control.has_key_id = key_id != NULL;
        question->control.namespace_id = namespace_id;
        memcpy(question->control.key_id, bytes, sizeof(bytes));
    }
    if (ask(api, &question, KVF_ADMIN_ANSWER_SLOW_MS, reply)) {
        reply_evicted(reply, question);
    }
    question_free(question);
}

static void answer_purge(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                         struct kvf_admin_reply *reply)
{
    struct question *question;
    uint64_t namespace_id = 0;

    if (!hex64_argument(request, "namespace", &namespace_id, reply)) {
        return;
    }
    if (namespace_id == 0) {
        kvf_admin_reply_status(reply, HTTP_BAD_REQUEST, kvf_status_name(KVF_ERR_INVALID),
                               "namespace is missing");
        return;
    }
    question = question_new(KVF_CONTROL_PURGE, 0, 0);
    if (question != NULL) {
        question->control.namespace_id = namespace_id;
    }
    if (ask(api, &question, KVF_ADMIN_ANSWER_SLOW_MS, reply)) {
        reply_evicted(reply, question);
    }
    question_free(question);
}

/* disable and enable: of a namespace, or of all. */
static void answer_service(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                           struct kvf_admin_reply *reply, enum kvf_control_op op)
{
    struct question *question;
    uint64_t namespace_id = 0;

    if (!hex64_argument(request, "namespace", &namespace_id, reply)) {
        return;
    }
    question = question_new(op, 0, 0);
    if (question != NULL) {
        question->control.namespace_id = namespace_id;
    }
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        kvf_admin_reply_status(reply, HTTP_OK, "ok", question->control.text);
    }
    question_free(question);
}

static void answer_disable(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                           struct kvf_admin_reply *reply)
{
    answer_service(api, request, reply, KVF_CONTROL_DISABLE);
}

static void answer_enable(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                          struct kvf_admin_reply *reply)
{
    answer_service(api, request, reply, KVF_CONTROL_ENABLE);
}

static void answer_drain(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                         struct kvf_admin_reply *reply)
{
    struct question *question = question_new(KVF_CONTROL_DRAIN, 0, 0);

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_MS, reply)) {
        kvf_admin_reply_status(reply, HTTP_OK, "ok", "draining has begun");
    }
    question_free(question);
}

static void answer_reload(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                          struct kvf_admin_reply *reply)
{
    struct question *question = question_new(KVF_CONTROL_RELOAD, 0, 0);

    (void)request;
    if (ask(api, &question, KVF_ADMIN_ANSWER_SLOW_MS, reply)) {
        kvf_admin_reply_status(reply, HTTP_OK, "ok", question->control.text);
    }
    question_free(question);
}

static void reply_log_level(struct kvf_admin_reply *reply)
{
    reply_json(reply, HTTP_OK,
               json_pack("{s:s}", "log_level", kvf_log_level_name(kvf_log_level_get())));
}

static void answer_log_level(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                             struct kvf_admin_reply *reply)
{
    (void)api;
    (void)request;
    reply_log_level(reply);
}

/* Until the daemon ends or is told otherwise; the configuration stays as it is. Its GPU workers
 * have the level that they were started with. */
static void answer_log_level_set(struct kvf_admin_api *api, const struct kvf_admin_request *request,
                                 struct kvf_admin_reply *reply)
{
    const char *name = request->argument(request, "level");
    int before = kvf_log_level_get();
    int level;

    (void)api;
    if (name == NULL || kvf_log_level_parse(name, &level) != KVF_OK) {
        kvf_admin_reply_status(reply, HTTP_BAD_REQUEST, kvf_status_name(KVF_ERR_INVALID),
                               "level has to be error, warning, info or debug");
        return;
    }
    kvf_log_level_set(KVF_LOG_INFO); /* that it was changed is said at any level */
    kvf_log(KVF_LOG_INFO, "log level %s in place of %s, by the admin socket",
            kvf_log_level_name(level), kvf_log_level_name(before));
    kvf_log_level_set(level);
    reply_log_level(reply);
}

const struct kvf_admin_route kvf_admin_routes[] = {
    {"GET", "/healthz", true, answer_health},
    {"GET", "/livez", true, answer_health},
    {"GET", "/readyz", true, answer_ready},
    {"GET", "/metrics", true, answer_metrics},
    {"GET", "/v1/stat", false, answer_stat},
    {"GET", "/v1/clients", false, answer_clients},
    {"GET", "/v1/peers", false, answer_peers},
    {"GET", "/v1/blocks", false, answer_blocks},
    {"GET", "/v1/namespaces", false, answer_namespaces},
    {"GET", "/v1/profiles", false, answer_profiles},
    {"GET", "/v1/events", false, answer_events},
    {"GET", "/v1/trace", false, answer_trace},
    {"POST", "/v1/verify", false, answer_verify},
    {"POST", "/v1/evict", false, answer_evict},
    {"POST", "/v1/purge", false, answer_purge},
    {"POST", "/v1/drain", false, answer_drain},
    {"POST", "/v1/disable", false, answer_disable},
    {"POST", "/v1/enable", false, answer_enable},
    {"POST", "/v1/reload", false, answer_reload},
    {"GET", "/v1/log-level", false, answer_log_level},
    {"POST", "/v1/log-level", false, answer_log_level_set},
    {NULL, NULL, false, NULL},
};
