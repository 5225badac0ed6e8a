/* SPDX-License-Identifier: Apache-2.0
 *
 * client.c: the handle, and the blocking calls (each an asynchronous one and a wait).
 *
 * The library writes nothing to the host's files and terminals, installs no signal handler, starts
 * no thread and has no mutable global: all it knows hangs on the handle.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/fd.h"
#include "client/client_internal.h"
#include "transport/proto_check.h"

#define DEFAULT_SOCKET_PATH        "/run/kvferry/kvferryd.sock"
#define DEFAULT_RING_ENTRIES       1024
#define DEFAULT_CONNECT_TIMEOUT_MS 5000

#define TEXT_OF(number)          TEXT_OF_EXPANDED(number)
#define TEXT_OF_EXPANDED(number) #number

const char *kvf_version(void)
{
    return TEXT_OF(KVF_VERSION_MAJOR) "." TEXT_OF(KVF_VERSION_MINOR) "." TEXT_OF(KVF_VERSION_PATCH);
}

void kvf_client_enter(struct kvf_client *client)
{
    kvf_owner_check(&client->owner);
    kvf_owner_bind(&client->owner);
}

void kvf_client_leave(struct kvf_client *client)
{
    kvf_owner_release(&client->owner);
}

void kvf_client_log(struct kvf_client *client, int severity, const char *format, ...)
{
    char line[KVF_LOG_LINE_BYTES];
    va_list args;

    if (client->log == NULL) {
        return;
    }
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    client->log(client->log_arg, severity, line);
}

/* ----------------------------------------------------------------------------------------------
 * Open and close
 */
void kvf_options_init(struct kvf_options *options)
{
    *options = (struct kvf_options){
        .struct_bytes = sizeof(*options),
        .shard_count = 1,
        .ring_entries = DEFAULT_RING_ENTRIES,
        .connect_timeout_ms = DEFAULT_CONNECT_TIMEOUT_MS,
    };
}

/* Copy a name into a text field of the wire. False: too long, or with control characters. */
static bool text_fill(char *field, size_t field_bytes, const char *text)
{
    size_t bytes = strnlen(text, field_bytes);

    if (bytes == field_bytes) {
        return false;
    }
    memcpy(field, text, bytes);
    return kvf_proto_text_ok(field, field_bytes);
}

/* The name that the system gives this process; cut and cleaned, since nobody chose it for us. */
static void name_default(char *field, size_t field_bytes)
{
    snprintf(field, field_bytes, "%s", program_invocation_short_name);
    for (char *c = field; *c != 0; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
}

static bool is_bytes(const struct kvf_geometry *geometry)
{
    return geometry == NULL || geometry->kind == KVF_KIND_BYTES;
}

static bool options_ok(const struct kvf_options *options)
{
    const uint32_t flags = KVF_ATTACH_ALLOW_UNCALIBRATED | KVF_ATTACH_NO_RECONNECT |
                           KVF_ATTACH_SPIN;

    return options != NULL && options->struct_bytes == sizeof(*options) &&
           (options->flags & ~flags) == 0 && options->reserved == 0 &&
           (kvf_proto_all_zero(options->factors_digest, sizeof(options->factors_digest)) ||
            (options->geometry != NULL && options->geometry->kind == KVF_KIND_XG)) &&
           (options->geometry == NULL ||
            options->geometry->struct_bytes == sizeof(*options->geometry));
}

/* What users choose: the log says what is wrong with it. */
static int choices_check(struct kvf_client *client, const struct kvf_options *options)
{
    uint32_t shard_count = options->shard_count != 0 ? options->shard_count : 1;

    if (shard_count > KVF_SHARDS_MAX ||
        (options->shard != KVF_SHARD_NONE && options->shard >= shard_count)) {
        kvf_client_log(client, 0, "shard %u of %u: the first is 0, and there are at most %u",
                       options->shard, shard_count, KVF_SHARDS_MAX);
        return KVF_ERR_INVALID;
    }
    if (options->ring_entries > KVF_SHM_RING_ENTRIES_MAX) {
        kvf_client_log(client, 0, "ring_entries is %u, and %u is the most", options->ring_entries,
                       KVF_SHM_RING_ENTRIES_MAX);
        return KVF_ERR_INVALID;
    }
    if (options->staging_bytes > KVF_PROTO_STAGING_MAX) {
        kvf_client_log(client, 0, "staging_bytes is %llu, and %llu (64 GiB) is the most",
                       (unsigned long long)options->staging_bytes,
                       (unsigned long long)KVF_PROTO_STAGING_MAX);
        return KVF_ERR_INVALID;
    }
    return KVF_OK;
}

/* The plan of the profile asked for; of "exact" where that may be one of a file, which comes when
 * the daemon is there. */
static int plan_init(struct kvf_client *client, const char *profile)
{
    const struct kvf_geometry *geometry = client->has_geometry ? &client->geometry : NULL;
    bool is_of_file = geometry != NULL && kvf_profile_find(profile) == NULL;
    int status = kvf_codec_plan_init(&client->plan, geometry, is_of_file ? "exact" : profile);

    if (status == KVF_ERR_TOO_LARGE) {
        kvf_client_log(client, 0,
                       "a chunk of %u tokens can exceed a record: chunk_tokens up to %u would fit",
                       client->geometry.chunk_tokens, kvf_codec_fitting_tokens(geometry, profile));
    } else if (status == KVF_ERR_REFUSED && kvf_profile_find(profile) != NULL) {
        kvf_client_log(client, 0, "profile \"%s\" is not for what this geometry is of, but for %s",
                       profile, kvf_profile_kinds(kvf_profile_find(profile)));
    } else if (status != KVF_OK) {
        kvf_client_log(client, 0, "profile \"%s\" does not fit this geometry (%s)", profile,
                       kvf_status_name(status));
    }
    return status;
}

/* Fixed record sizes of the plan, as the daemon's exact slot classes: whole pages, each once. */
static void formats_fill(struct kvf_wire_hello *hello, const struct kvf_codec_plan *plan)
{
    uint64_t sizes[KVF_CODEC_FIXED_SIZES_MAX];
    uint32_t n = kvf_codec_plan_fixed_sizes(plan, sizes);
    uint32_t used = 0;

    static_assert(KVF_CODEC_FIXED_SIZES_MAX <= KVF_WIRE_FORMATS_MAX, "all of them fit");
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = (sizes[i] + KVF_PROTO_PAGE_BYTES - 1) / KVF_PROTO_PAGE_BYTES *
                         KVF_PROTO_PAGE_BYTES;
        bool is_new = true;

        for (uint32_t k = 0; k < used; k++) {
            is_new = is_new && hello->format_record_bytes[k] != bytes;
        }
        if (is_new) {
            hello->format_record_bytes[used++] = bytes;
        }
    }
}

/* Whose blocks these are. Latents are named by their weights and factors together, and by nothing
 * if either is not said: the daemon refuses that. Both are hashes already, so that their bytes,
 * shifted against each other, need no other one (nor a library for it in the engine's process); i
 * is among them for those who make up digests of equal bytes. */
static void digests_fill(struct kvf_client *client, const struct kvf_options *options)
{
    struct kvf_wire_hello *hello = &client->hello;
    const uint8_t *weights = options->weights_digest;
    const uint8_t *factors = options->factors_digest;

    memcpy(client->weights_digest, weights, KVF_DIGEST_BYTES);
    memcpy(client->factors_digest, factors, KVF_DIGEST_BYTES);
    memcpy(hello->adapter_digest, options->adapter_digest, sizeof(hello->adapter_digest));
    if (!client->has_geometry || client->geometry.kind != KVF_KIND_XG) {
        memcpy(hello->weights_digest, weights, KVF_DIGEST_BYTES);
    } else if (!kvf_proto_all_zero(weights, KVF_DIGEST_BYTES) &&
               !kvf_proto_all_zero(factors, KVF_DIGEST_BYTES)) {
        for (uint32_t i = 0; i < KVF_DIGEST_BYTES; i++) {
            hello->weights_digest[i] = weights[i] ^ factors[(i + 1) % KVF_DIGEST_BYTES] ^
                                       (uint8_t)(i + 1);
        }
    }
}

/* A name that a user chose, as a field of the wire. */
static int choice_fill(struct kvf_client *client, char *field, size_t field_bytes, const char *text,
                       const char *what)
{
    if (text_fill(field, field_bytes, text)) {
        return KVF_OK;
    }
    kvf_client_log(client, 0, "the %s has more than %zu bytes, or control characters", what,
                   field_bytes - 1);
    return KVF_ERR_INVALID;
}

static int hello_fill(struct kvf_client *client, const struct kvf_options *options,
                      const char *profile)
{
    struct kvf_wire_hello *hello = &client->hello;
    const char *label = options->namespace_label != NULL ? options->namespace_label : "";
    const struct kvf_geometry *g = &client->geometry;
    int status = KVF_OK;

    kvf_proto_head_init(&hello->head, KVF_WIRE_HELLO);
    hello->version_min = KVF_WIRE_VERSION_MIN;
    hello->version_max = KVF_WIRE_VERSION_MAX;
    hello->flags = options->flags;
    hello->shard = options->shard;
    hello->shard_count = options->shard_count != 0 ? options->shard_count : 1;
    hello->ring_entries = options->ring_entries != 0 ? options->ring_entries : DEFAULT_RING_ENTRIES;
    hello->staging_bytes = options->staging_bytes;
    hello->profile_fp = kvf_profile_find(profile) != NULL ? client->plan.profile_fp : 0;
    digests_fill(client, options);
    if (client->has_geometry) {
        hello->record_bytes_max = client->plan.record_bytes_max;
        hello->geometry = (struct kvf_wire_geometry){
            .kind = g->kind,
            .dtype = g->dtype,
            .rope_state = g->rope_state,
            .layout_tag = g->layout_tag,
            .n_layers = g->n_layers,
            .n_heads = g->n_heads,
            .dim_k = g->dim_k,
            .dim_v = g->dim_v,
            .chunk_tokens = g->chunk_tokens,
            .sink_tokens = g->sink_tokens,
        };
    }
    formats_fill(hello, &client->plan);
    if (options->client_name == NULL) {
        name_default(hello->client_name, sizeof(hello->client_name));
    } else {
        status = choice_fill(client, hello->client_name, sizeof(hello->client_name),
                             options->client_name, "client's name");
    }
    if (status == KVF_OK) {
        status = choice_fill(client, hello->label, sizeof(hello->label), label,
                             "namespace's label");
    }
    return status != KVF_OK ? status
                            : choice_fill(client, hello->profile, sizeof(hello->profile), profile,
                                          "profile's name");
}

static struct kvf_client_wait *wait_create(void)
{
    struct kvf_client_wait *wait = calloc(1, sizeof(*wait));
    struct epoll_event event = {.events = EPOLLIN};

    if (wait == NULL) {
        return NULL;
    }
    wait->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    wait->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wait->epoll_fd < 0 || wait->event_fd < 0 ||
        epoll_ctl(wait->epoll_fd, EPOLL_CTL_ADD, wait->event_fd, &event) != 0) {
        kvf_fd_close(&wait->epoll_fd);
        kvf_fd_close(&wait->event_fd);
        free(wait);
        return NULL;
    }
    return wait;
}

/* The handle without a connection. Accepted half-built by kvf_close. */
static int client_init(struct kvf_client *client, const struct kvf_options *options)
{
    const char *profile = options->profile;
    const char *path = options->socket_path;
    int status;

    client->channel.fd = client->channel.pid_fd = -1;
    client->flags = options->flags;
    client->log = options->log;
    client->log_arg = options->log_arg;
    client->connect_timeout_ms = options->connect_timeout_ms != 0 ? options->connect_timeout_ms
                                                                  : DEFAULT_CONNECT_TIMEOUT_MS;
    client->has_geometry = !is_bytes(options->geometry);
    if (client->has_geometry) {
        client->geometry = *options->geometry;
    }
    if (profile == NULL) {
        profile = client->has_geometry ? "exact" : "bytes";
    }
    status = choices_check(client, options);
    if (status == KVF_OK) {
        status = plan_init(client, profile);
    }
    if (status == KVF_OK) {
        client->is_lossless_asked = client->plan.lossless && kvf_profile_find(profile) != NULL;
        status = hello_fill(client, options, profile);
        client->plan.model_fp = kvf_proto_model_fp(&client->hello);
        client->plan.weights_fp = kvf_proto_weights_fp(&client->hello);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (path == NULL) {
        path = getenv("KVFERRY_SOCKET");
    }
    client->socket_path = strdup(path != NULL && path[0] != 0 ? path : DEFAULT_SOCKET_PATH);
    client->wait = wait_create();
    client->keys = calloc(KVF_SHM_REQUEST_ENTRIES_MAX, sizeof(*client->keys));
    if (client->socket_path == NULL || client->wait == NULL || client->keys == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    kvf_random_seeded_init(&client->jitter, kvf_now_ns() ^ (uint64_t)getpid() << 32);
    return KVF_OK;
}

/* One whole attach, with sleep. */
static int attach_wait(struct kvf_client *client)
{
    kvf_session_tend(client, true);
    while (client->session != NULL && !kvf_session_is_live(client)) {
        kvf_session_sleep(client, UINT64_MAX); /* the attach has a deadline of its own */
    }
    return kvf_session_is_live(client) ? KVF_OK : client->attach_status;
}

int kvf_open(const struct kvf_options *options, struct kvf_client **client_out)
{
    struct kvf_client *client;
    int status;

    if (client_out == NULL || !options_ok(options)) {
        return KVF_ERR_INVALID;
    }
    client = calloc(1, sizeof(*client));
    if (client == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    status = client_init(client, options);
    if (status == KVF_OK) {
        status = attach_wait(client);
    }
    if (status != KVF_OK) {
        kvf_close(client);
        return status;
    }
    *client_out = client;
    return KVF_OK;
}

struct kvf_client *kvf_close(struct kvf_client *client)
{
    if (client == NULL) {
        return NULL;
    }
    kvf_client_enter(client);
    kvf_session_close_all(client);
    if (client->wait != NULL) {
        kvf_fd_close(&client->wait->epoll_fd);
        kvf_fd_close(&client->wait->event_fd);
    }
    free(client->wait);
    free(client->socket_path);
    free(client->keys);
    free(client->requests);
    free(client->groups);
    free(client->pending);
    free(client->workspace);
    kvf_profiles_free(client);
    free(client);
    return NULL;
}

int kvf_fd(const struct kvf_client *client)
{
    if (client == NULL) {
        return -1;
    }
    client->wait->is_asked = true;
    kvf_session_arm(client);
    return client->wait->epoll_fd;
}

int kvf_client_info(struct kvf_client *client, struct kvf_info *info_out)
{
    const struct kvf_wire_welcome *facts;
    struct kvf_info info = {0};

    if (client == NULL || info_out == NULL ||
        (info_out->struct_bytes != sizeof(info) &&
         info_out->struct_bytes != offsetof(struct kvf_info, profile_text))) {
        return KVF_ERR_INVALID;
    }
    info.struct_bytes = info_out->struct_bytes;
    kvf_client_enter(client);
    kvf_session_tend(client, false);
    facts = &client->facts;
    info.protocol_version = facts->version;
    info.connected = kvf_session_is_live(client);
    info.lossless = facts->lossless;
    memcpy(info.profile, facts->profile, sizeof(info.profile));
    info.incarnation = facts->incarnation;
    info.namespace_id = facts->namespace_id;
    info.connection_id = facts->connection_id;
    info.arena_bytes = info.connected ? client->session->arena_bytes : 0;
    info.staging_bytes = facts->staging_bytes;
    info.credits = facts->credits;
    info.reconnects = client->reconnects;
    info.record_bytes_max = client->has_geometry ? client->plan.record_bytes_max
                            : facts->staging_bytes < KVF_PROTO_RECORD_MAX ? facts->staging_bytes
                                                                          : KVF_PROTO_RECORD_MAX;
    static_assert(sizeof(info.profile_text) == sizeof(facts->text), "one is a copy of the other");
    memcpy(info.profile_text, facts->text, sizeof(info.profile_text));
    memcpy(info_out, &info, info.struct_bytes);
    kvf_session_arm(client);
    kvf_client_leave(client);
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * Blocking calls
 */

/* Wait for a request's end. KVF_ERR_TIMEOUT: it has been canceled and nobody waits for it now. */
static int sink_wait(struct kvf_client *client, struct kvf_client_sink *sink, uint64_t request,
                     uint64_t timeout_ms)
{
    uint64_t deadline_ns = kvf_now_ns() + timeout_ms * KVF_NS_PER_MS;

    for (;;) {
        kvf_requests_drain(client, true);
        if (sink->is_done) {
            return sink->status;
        }
        if (kvf_now_ns() >= deadline_ns) {
            kvf_request_abandon(client, request);
            return KVF_ERR_TIMEOUT;
        }
        kvf_session_sleep(client, deadline_ns);
    }
}

/* Every blocking call begins here. Releases that found the submission ring full go before its
 * request, and so does one free slot: the daemon hands slots back without a word, within
 * microseconds, so this looks again and again. */
static void call_begin(struct kvf_client *client)
{
    const struct timespec pause = {.tv_nsec = 50 * KVF_NS_PER_US};
    uint64_t deadline_ns = kvf_now_ns() + KVF_CLIENT_GRACE_MS * KVF_NS_PER_MS;

    kvf_client_enter(client);
    while (kvf_session_is_live(client)) {
        struct kvf_session *session = client->session;

        kvf_lease_flush(session);
        if ((session->n_deferred == 0 && kvf_ring_client_room(&session->ring, 0) != KVF_ERR_BUSY) ||
            kvf_now_ns() >= deadline_ns) {
            return;
        }
        (void)nanosleep(&pause, NULL);
        kvf_session_tend(client, false);
    }
}

/* Every blocking call ends here. */
static int call_end(struct kvf_client *client, int status)
{
    kvf_session_arm(client);
    kvf_client_leave(client);
    return status;
}

int kvf_ping(struct kvf_client *client, uint32_t timeout_ms, uint64_t *round_trip_ns_out)
{
    struct kvf_client_sink sink = {0};
    uint64_t start_ns = kvf_now_ns();
    uint64_t deadline_ns = start_ns + timeout_ms * KVF_NS_PER_MS;
    uint64_t request;
    int status;

    if (client == NULL || round_trip_ns_out == NULL) {
        return KVF_ERR_INVALID;
    }
    call_begin(client);
    kvf_session_tend(client, true);
    /* a ping is also how a caller waits for a daemon that is starting again */
    while (!kvf_session_is_live(client) && kvf_now_ns() < deadline_ns &&
           (client->flags & KVF_ATTACH_NO_RECONNECT) == 0) {
        kvf_session_sleep(client, deadline_ns);
    }
    start_ns = kvf_now_ns();
    status = kvf_request_plain(client, KVF_OP_NOP, &sink, &request);
    if (status == KVF_OK) {
        uint64_t left_ms = deadline_ns > start_ns ? (deadline_ns - start_ns) / KVF_NS_PER_MS + 1
                                                  : 0;

        status = sink_wait(client, &sink, request, left_ms);
    }
    if (status == KVF_OK) {
        *round_trip_ns_out = kvf_now_ns() - start_ns;
    }
    return call_end(client, status);
}

/* --- put -------------------------------------------------------------------------------------- */

/* Batches of one put that may be in flight together. */
#define PUT_BATCHES 4

struct put_call {
    const struct kvf_put_item *items;
    const struct kvf_put_options *options;
    int32_t *statuses; /* may be NULL */
    uint32_t n;
    uint32_t n_submitted;
    uint32_t n_good;
    uint32_t failed_index;               /* lowest failed item */
    int32_t failed_status;               /* KVF_OK: none so far */
    const struct kvf_put_item *conflict; /* the last view of which something else is stored */
    struct kvf_client_sink sinks[PUT_BATCHES];
    uint64_t requests[PUT_BATCHES];
};

static void put_note(struct put_call *call, uint32_t index, int32_t status)
{
    if (call->statuses != NULL) {
        call->statuses[index] = status;
    }
    if (status == KVF_ERR_CONFLICT && call->items[index].source == KVF_SOURCE_VIEW) {
        call->conflict = &call->items[index];
    }
    if (status == KVF_OK || status == KVF_EXISTS) {
        call->n_good++;
    } else if (call->failed_status == KVF_OK || index < call->failed_index) {
        call->failed_index = index;
        call->failed_status = status;
    }
}

static void put_on_block(struct kvf_client_sink *sink, const struct kvf_event *event,
                         uint64_t value)
{
    (void)value;
    put_note(sink->arg, sink->first + event->index, event->hit.status);
}

/* Submit what fits now. KVF_OK: all is submitted, or all batches are in flight; else why the rest
 * is not. */
static int put_fill(struct kvf_client *client, struct put_call *call)
{
    for (uint32_t b = 0; b < PUT_BATCHES && call->n_submitted < call->n; b++) {
        struct kvf_put_options options = {.struct_bytes = sizeof(options)};
        struct kvf_client_sink *sink = &call->sinks[b];
        uint32_t first = call->n_submitted;
        uint32_t taken = 0;
        int status;

        if (sink->is_used) {
            continue;
        }
        if (call->options != NULL) {
            options = *call->options;
        }
        if (first > 0) {
            options.parent = call->items[first - 1].key;
            options.depth += first;
        }
        *sink = (struct kvf_client_sink){.on_block = put_on_block, .arg = call, .first = first};
        status = kvf_request_put(client, call->items + first, call->n - first, &options, sink, 0,
                                 &taken, &call->requests[b]);
        if (status != KVF_OK) {
            return status;
        }
        call->n_submitted += taken;
    }
    return KVF_OK;
}

static bool put_in_flight(const struct put_call *call)
{
    for (uint32_t b = 0; b < PUT_BATCHES; b++) {
        if (call->sinks[b].is_used) {
            return true;
        }
    }
    return false;
}

static bool put_is_full(const struct put_call *call)
{
    for (uint32_t b = 0; b < PUT_BATCHES; b++) {
        if (!call->sinks[b].is_used) {
            return false;
        }
    }
    return true;
}

/* The call is over: abandon what still runs; what was never submitted fails with status, and its
 * slots are given up. */
static void put_stop(struct kvf_client *client, struct put_call *call, int status)
{
    for (uint32_t b = 0; b < PUT_BATCHES; b++) {
        if (call->sinks[b].is_used) {
            kvf_request_abandon(client, call->requests[b]);
        }
    }
    for (uint32_t i = call->n_submitted; i < call->n; i++) {
        put_note(call, i, status);
        if (call->items[i].source == KVF_SOURCE_STAGED) {
            kvf_stage_give_up(client, call->items[i].stage);
        }
    }
}

static void put_run(struct kvf_client *client, struct put_call *call, uint64_t deadline_ns)
{
    for (;;) {
        /* Busy passes when something in flight ends, ours or not; if nothing was and nothing has
         * been submitted either, it stays. */
        bool was_idle = client->credits_in_use == 0;
        uint32_t n_before = call->n_submitted;
        int status = put_fill(client, call);
        bool is_stuck = status == KVF_ERR_BUSY && was_idle && call->n_submitted == n_before;
        bool is_waiting;

        kvf_requests_drain(client, true);
        is_waiting = put_in_flight(call);
        if (!is_waiting && call->n_submitted == call->n) {
            return;
        }
        if (!is_waiting && status != KVF_OK && (status != KVF_ERR_BUSY || is_stuck)) {
            put_stop(client, call, status);
            return;
        }
        if (kvf_now_ns() >= deadline_ns) {
            put_stop(client, call, KVF_ERR_TIMEOUT);
            return;
        }
        if (client->credits_in_use > 0 &&
            (status != KVF_OK || call->n_submitted == call->n || put_is_full(call))) {
            kvf_session_sleep(client, deadline_ns);
        }
    }
}

int kvf_put(struct kvf_client *client, const struct kvf_put_item *items, uint32_t n,
            const struct kvf_put_options *options, int32_t *statuses_out)
{
    struct put_call call = {.items = items, .options = options, .statuses = statuses_out, .n = n};
    uint64_t budget_ms = KVF_CLIENT_PUT_MS;
    int status;

    if (client == NULL || items == NULL || n == 0 || n > KVF_REQUEST_KEYS_MAX) {
        return KVF_ERR_INVALID;
    }
    if (options != NULL && options->struct_bytes == sizeof(*options) && options->budget_ms != 0) {
        budget_ms = options->budget_ms;
    }
    for (uint32_t i = 0; statuses_out != NULL && i < n; i++) {
        statuses_out[i] = KVF_ERR_TIMEOUT; /* of a block that is never answered */
    }
    call_begin(client);
    put_run(client, &call, kvf_now_ns() + (budget_ms + KVF_CLIENT_GRACE_MS) * KVF_NS_PER_MS);
    if (call.n_good == n) {
        status = KVF_OK;
    } else if (call.n_good > 0) {
        status = KVF_PARTIAL;
    } else {
        status = call.failed_status != KVF_OK ? call.failed_status : KVF_ERR_TIMEOUT;
    }
    status = call_end(client, status);
    if (call.conflict != NULL) {
        kvf_drift_look(client, call.conflict);
    }
    return status;
}

/* --- lookup, get, prefetch, evict ------------------------------------------------------------- */
int kvf_lookup(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
               const struct kvf_lookup_options *options, struct kvf_lookup_result *result_out)
{
    struct kvf_client_sink sink = {0};
    struct kvf_shm_sqe sqe = {0};
    uint64_t request;
    int status;

    if (client == NULL || result_out == NULL || !kvf_lookup_sqe(n, options, &sqe)) {
        return KVF_ERR_INVALID;
    }
    call_begin(client);
    status = kvf_request_keys(client, KVF_OP_LOOKUP, keys, n, &sqe, &sink, 0, &request);
    if (status == KVF_OK) {
        status = sink_wait(client, &sink, request, (uint64_t)sqe.budget_ms + KVF_CLIENT_GRACE_MS);
    }
    if (status >= KVF_OK) {
        *result_out = sink.lookup;
    }
    return call_end(client, status);
}

static void get_on_block(struct kvf_client_sink *sink, const struct kvf_event *event,
                         uint64_t value)
{
    struct kvf_hit *hits = sink->arg;

    (void)value;
    hits[event->index] = event->hit;
}

/* What a get answers, from its hits. */
static int get_result(const struct kvf_hit *hits, uint32_t n)
{
    if (hits[0].status != KVF_OK) {
        return KVF_MISS;
    }
    for (uint32_t i = 1; i < n; i++) {
        if (hits[i].status != KVF_OK) {
            return KVF_PARTIAL;
        }
    }
    return KVF_OK;
}

static void hits_fill(struct kvf_hit *hits, uint32_t n, int status)
{
    for (uint32_t i = 0; i < n; i++) {
        hits[i] = (struct kvf_hit){.status = status};
    }
}

int kvf_get(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
            const struct kvf_get_options *options, struct kvf_hit *hits_out)
{
    struct kvf_client_sink sink = {.on_block = get_on_block, .arg = hits_out};
    struct kvf_shm_sqe sqe = {0};
    uint64_t request;
    int status = KVF_ERR_INVALID;

    if (hits_out == NULL || n == 0 || n > KVF_REQUEST_KEYS_MAX) {
        return KVF_ERR_INVALID;
    }
    hits_fill(hits_out, n, KVF_MISS); /* also of a block that is never answered */
    if (client == NULL || !kvf_get_sqe(client, options, &sqe)) {
        hits_fill(hits_out, n, KVF_ERR_INVALID);
        return KVF_ERR_INVALID;
    }
    call_begin(client);
    status = kvf_request_keys(client, KVF_OP_GET, keys, n, &sqe, &sink, 0, &request);
    if (status != KVF_OK) {
        hits_fill(hits_out, n, status);
        return call_end(client, status);
    }
    status = sink_wait(client, &sink, request, (uint64_t)sqe.budget_ms + KVF_CLIENT_GRACE_MS);
    if (status >= KVF_OK || status == KVF_ERR_TIMEOUT || hits_out[0].status == KVF_OK) {
        status = get_result(hits_out, n);
    }
    return call_end(client, status);
}

/* A prefetch or an evict: how many blocks it was good for. */
static int call_count(struct kvf_client *client, uint8_t opcode, const struct kvf_key *keys,
                      uint32_t n, uint32_t *count_out)
{
    struct kvf_client_sink sink = {0};
    struct kvf_shm_sqe sqe = {0};
    uint64_t request;
    int status;

    if (client == NULL) {
        return KVF_ERR_INVALID;
    }
    call_begin(client);
    status = kvf_request_keys(client, opcode, keys, n, &sqe, &sink, 0, &request);
    if (status == KVF_OK) {
        status = sink_wait(client, &sink, request, KVF_CLIENT_CALL_MS);
    }
    if (status >= KVF_OK) {
        status = sink.succeeded > 0 ? KVF_OK : KVF_MISS;
        if (count_out != NULL) {
            *count_out = sink.succeeded;
        }
    }
    return call_end(client, status);
}

int kvf_prefetch(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
                 uint32_t *accepted_out)
{
    return call_count(client, KVF_OP_PREFETCH, keys, n, accepted_out);
}

int kvf_evict(struct kvf_client *client, const struct kvf_key *keys, uint32_t n,
              uint32_t *evicted_out)
{
    return call_count(client, KVF_OP_EVICT, keys, n, evicted_out);
}

/* --- stat ------------------------------------------------------------------------------------- */
static void stat_on_block(struct kvf_client_sink *sink, const struct kvf_event *event,
                          uint64_t value)
{
    uint64_t *values = sink->arg;

    values[event->index] = value;
}

int kvf_stat(struct kvf_client *client, struct kvf_stat *stat_out)
{
    uint64_t values[KVF_STAT_COUNT] = {0};
    struct kvf_client_sink sink = {.on_block = stat_on_block, .arg = values};
    uint64_t request;
    int status;

    if (client == NULL || stat_out == NULL || stat_out->struct_bytes != sizeof(*stat_out)) {
        return KVF_ERR_INVALID;
    }
    call_begin(client);
    status = kvf_request_plain(client, KVF_OP_STAT, &sink, &request);
    if (status == KVF_OK) {
        status = sink_wait(client, &sink, request, KVF_CLIENT_CALL_MS);
    }
    if (status == KVF_OK) {
        *stat_out = (struct kvf_stat){
            .struct_bytes = sizeof(*stat_out),
            .namespace_blocks = values[KVF_STAT_NAMESPACE_BLOCKS],
            .namespace_dram_bytes = values[KVF_STAT_NAMESPACE_DRAM_BYTES],
            .namespace_nvme_bytes = values[KVF_STAT_NAMESPACE_NVME_BYTES],
            .arena_bytes = values[KVF_STAT_ARENA_BYTES],
            .arena_stored_bytes = values[KVF_STAT_ARENA_STORED_BYTES],
            .hits = values[KVF_STAT_HITS],
            .misses = values[KVF_STAT_MISSES],
            .puts = values[KVF_STAT_PUTS],
            .leased_bytes = values[KVF_STAT_LEASED_BYTES],
            .lost_leases = values[KVF_STAT_LOST_LEASES],
            .x_refused = client->x_refused,
        };
    }
    return call_end(client, status);
}
