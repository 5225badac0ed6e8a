/* SPDX-License-Identifier: Apache-2.0
 *
 * proto.c: checks of control messages, submissions, keys, completions and segment headers.
 *
 * The host is little-endian (asserted), so a message is copied and not swapped.
 */
#include "transport/proto.h"

#include <string.h>

#include "transport/proto_check.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");
static_assert(sizeof(union kvf_proto_message) <= KVF_WIRE_MESSAGE_BYTES_MAX, "fits the buffer");

bool kvf_proto_status_known(int32_t status)
{
    return (status >= KVF_OK && status <= KVF_EMPTY) ||
           (status <= KVF_ERR_INVALID && status >= KVF_ERR_REFUSED) ||
           (status <= KVF_ERR_DISCONNECTED && status >= KVF_ERR_NO_DAEMON) ||
           (status <= KVF_ERR_IO && status >= KVF_ERR_NO_SPACE) || status == KVF_ERR_CONFIG ||
           status == KVF_ERR_INTERNAL;
}

bool kvf_proto_text_ok(const char *text, size_t field_bytes)
{
    size_t bytes = strnlen(text, field_bytes);

    if (bytes == field_bytes || !kvf_proto_all_zero(text + bytes, field_bytes - bytes)) {
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];

        if (c < 0x20 || c == 0x7f) {
            return false;
        }
    }
    return true;
}

uint64_t kvf_proto_model_fp(const struct kvf_wire_hello *hello)
{
    uint64_t weights;
    uint64_t adapter;

    memcpy(&weights, hello->weights_digest, sizeof(weights));
    memcpy(&adapter, hello->adapter_digest, sizeof(adapter));
    return weights ^ (adapter << 1 | adapter >> 63);
}

static uint64_t fnv1a(uint64_t hash, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3U;
    }
    return hash;
}

uint64_t kvf_proto_weights_fp(const struct kvf_wire_hello *hello)
{
    uint64_t fp;

    if (hello->geometry.kind < KVF_KIND_X ||
        kvf_proto_all_zero(hello->weights_digest, sizeof(hello->weights_digest))) {
        return 0;
    }
    fp = fnv1a(0xcbf29ce484222325U, hello->weights_digest, sizeof(hello->weights_digest));
    fp = fnv1a(fp, hello->adapter_digest, sizeof(hello->adapter_digest));
    return fp != 0 ? fp : 1;
}

size_t kvf_proto_type_bytes(unsigned type)
{
    switch (type) {
    case KVF_WIRE_HELLO:
        return sizeof(struct kvf_wire_hello);
    case KVF_WIRE_WELCOME:
        return sizeof(struct kvf_wire_welcome);
    case KVF_WIRE_PROFILE:
        return sizeof(struct kvf_wire_profile);
    case KVF_WIRE_DEVICE:
        return sizeof(struct kvf_wire_device);
    case KVF_WIRE_PIECE:
    case KVF_WIRE_PIECE_DROP:
    case KVF_WIRE_DEVICE_PIECE:
    case KVF_WIRE_DEVICE_PIECE_DROP:
    case KVF_WIRE_DEVICE_MAPPED:
        return sizeof(struct kvf_wire_piece);
    case KVF_WIRE_GPU:
        return sizeof(struct kvf_wire_gpu);
    case KVF_WIRE_GPU_CHANNEL:
        return sizeof(struct kvf_wire_gpu_channel);
    case KVF_WIRE_MAPPED:
    case KVF_WIRE_READY:
    case KVF_WIRE_BYE:
        return sizeof(struct kvf_wire_note);
    default:
        return 0;
    }
}

void kvf_proto_head_init(struct kvf_wire_head *head, enum kvf_wire_type type)
{
    *head = (struct kvf_wire_head){
        .magic = KVF_WIRE_MAGIC,
        .type = (uint16_t)type,
        .version = KVF_WIRE_VERSION_MIN, /* of the layouts, which all versions have in common */
        .bytes = (uint32_t)kvf_proto_type_bytes(type),
    };
}

int kvf_proto_version_choose(uint16_t version_min, uint16_t version_max, uint16_t *version_out)
{
    uint16_t version = version_max < KVF_WIRE_VERSION_MAX ? version_max : KVF_WIRE_VERSION_MAX;

    if (version < version_min || version < KVF_WIRE_VERSION_MIN) {
        return KVF_ERR_VERSION;
    }
    *version_out = version;
    return KVF_OK;
}

int kvf_proto_geometry_check(const struct kvf_wire_geometry *geometry, const char **why_out)
{
    const struct kvf_wire_geometry *g = geometry;

    if (g->kind > KVF_KIND_XG) {
        return kvf_proto_bad(why_out, "geometry: kind is unknown");
    }
    if (g->kind == KVF_KIND_BYTES) {
        /* the kind is the only field of opaque bytes, and it is 0 */
        return kvf_proto_all_zero(g, sizeof(*g))
                   ? KVF_OK
                   : kvf_proto_bad(why_out, "geometry: opaque bytes, but fields are set");
    }
    if (g->dtype == KVF_DTYPE_NONE || g->dtype > KVF_DTYPE_U8) {
        return kvf_proto_bad(why_out, "geometry: dtype is unknown");
    }
    if (g->rope_state > KVF_ROPE_PRE_UNBIASED) {
        return kvf_proto_bad(why_out, "geometry: rope_state is unknown");
    }
    if (g->n_layers == 0 || g->n_layers > KVF_LAYERS_MAX) {
        return kvf_proto_bad(why_out, "geometry: n_layers is out of range");
    }
    if (g->n_heads == 0 || g->n_heads > KVF_HEADS_MAX) {
        return kvf_proto_bad(why_out, "geometry: n_heads is out of range");
    }
    if (g->dim_k == 0 || g->dim_k > KVF_DIM_MAX) {
        return kvf_proto_bad(why_out, "geometry: dim_k is out of range");
    }
    if (g->dim_v > KVF_DIM_MAX) {
        return kvf_proto_bad(why_out, "geometry: dim_v is out of range");
    }
    if (g->chunk_tokens == 0 || g->chunk_tokens > KVF_CHUNK_TOKENS_MAX) {
        return kvf_proto_bad(why_out, "geometry: chunk_tokens is out of range");
    }
    if (g->sink_tokens > g->chunk_tokens) {
        return kvf_proto_bad(why_out, "geometry: sink_tokens exceeds chunk_tokens");
    }
    if (g->kind >= KVF_KIND_X && (g->dim_v != 0 || g->rope_state != KVF_ROPE_NONE)) {
        return kvf_proto_bad(why_out, "geometry: X has no V and no rotation");
    }
    return KVF_OK;
}

static bool record_bytes_ok(uint64_t bytes)
{
    return bytes > KVF_RECORD_PAGE_BYTES && bytes <= KVF_PROTO_RECORD_MAX;
}

static int hello_check(const struct kvf_wire_hello *hello, const char **why_out)
{
    const uint32_t flags = KVF_ATTACH_ALLOW_UNCALIBRATED | KVF_ATTACH_NO_RECONNECT |
                           KVF_ATTACH_SPIN;

    if (hello->version_min == 0 || hello->version_min > hello->version_max) {
        return kvf_proto_bad(why_out, "hello: version_min and version_max are no range");
    }
    if (hello->version_min != hello->head.version) {
        return kvf_proto_bad(why_out, "hello: the head's version is not version_min");
    }
    if ((hello->flags & ~flags) != 0) {
        return kvf_proto_bad(why_out, "hello: flags has unknown bits");
    }
    if (hello->shard_count == 0 || hello->shard_count > KVF_SHARDS_MAX) {
        return kvf_proto_bad(why_out, "hello: shard_count is out of range");
    }
    if (hello->shard != KVF_SHARD_NONE && hello->shard >= hello->shard_count) {
        return kvf_proto_bad(why_out, "hello: shard is not below shard_count");
    }
    if (hello->ring_entries == 0 || hello->ring_entries > KVF_SHM_RING_ENTRIES_MAX) {
        return kvf_proto_bad(why_out, "hello: ring_entries is out of range");
    }
    if (hello->staging_bytes > KVF_PROTO_STAGING_MAX) {
        return kvf_proto_bad(why_out, "hello: staging_bytes is out of range");
    }
    if (kvf_proto_geometry_check(&hello->geometry, why_out) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    if (!record_bytes_ok(hello->record_bytes_max) &&
        !(hello->geometry.kind == KVF_KIND_BYTES && hello->record_bytes_max == 0)) {
        return kvf_proto_bad(why_out, "hello: record_bytes_max is out of range");
    }
    if (!kvf_proto_text_ok(hello->profile, sizeof(hello->profile)) || hello->profile[0] == 0) {
        return kvf_proto_bad(why_out, "hello: profile is no name");
    }
    if (!kvf_proto_text_ok(hello->label, sizeof(hello->label))) {
        return kvf_proto_bad(why_out, "hello: label is no text");
    }
    if (!kvf_proto_text_ok(hello->client_name, sizeof(hello->client_name))) {
        return kvf_proto_bad(why_out, "hello: client_name is no text");
    }
    for (size_t i = 0; i < KVF_WIRE_FORMATS_MAX; i++) {
        uint64_t bytes = hello->format_record_bytes[i];

        if (bytes != 0 && (!record_bytes_ok(bytes) || bytes % KVF_PROTO_PAGE_BYTES != 0)) {
            return kvf_proto_bad(
                why_out, "hello: format_record_bytes is out of range or no multiple of 4096");
        }
    }
    return KVF_OK;
}

static int welcome_check(const struct kvf_wire_welcome *welcome, const char **why_out)
{
    if (!kvf_proto_status_known(welcome->status) || welcome->status > KVF_OK) {
        return kvf_proto_bad(why_out, "welcome: status is neither done nor a failure");
    }
    if (!kvf_proto_text_ok(welcome->text, sizeof(welcome->text))) {
        return kvf_proto_bad(why_out, "welcome: text is no text");
    }
    if (welcome->status < KVF_OK) {
        return KVF_OK; /* a refusal: only status and text hold */
    }
    if (welcome->version < KVF_WIRE_VERSION_MIN || welcome->version > KVF_WIRE_VERSION_MAX) {
        return kvf_proto_bad(why_out, "welcome: version was not offered");
    }
    if (welcome->lossless > 1 || welcome->reserved0 != 0) {
        return kvf_proto_bad(why_out, "welcome: lossless or reserved0 is out of range");
    }
    if (welcome->connection_id == 0 || welcome->incarnation == 0) {
        return kvf_proto_bad(why_out, "welcome: connection_id or incarnation is 0");
    }
    if (welcome->ring_bytes < sizeof(struct kvf_shm_header) ||
        welcome->ring_bytes % KVF_PROTO_PAGE_BYTES != 0) {
        return kvf_proto_bad(why_out, "welcome: ring_bytes is out of range");
    }
    if (welcome->staging_bytes == 0 || welcome->staging_bytes > KVF_PROTO_STAGING_MAX ||
        welcome->staging_bytes % KVF_PROTO_PAGE_BYTES != 0) {
        return kvf_proto_bad(why_out, "welcome: staging_bytes is out of range");
    }
    if (welcome->arena_bytes > KVF_PROTO_PIECE_MAX * KVF_PROTO_PIECES_MAX) {
        return kvf_proto_bad(why_out, "welcome: arena_bytes is out of range");
    }
    if (!kvf_proto_power_of_two(welcome->credits) ||
        welcome->credits > 2 * KVF_SHM_RING_ENTRIES_MAX) {
        return kvf_proto_bad(why_out, "welcome: credits is no power of two in range");
    }
    if (welcome->n_pieces > KVF_PROTO_PIECES_MAX) {
        return kvf_proto_bad(why_out, "welcome: n_pieces is out of range");
    }
    if (!kvf_proto_text_ok(welcome->profile, sizeof(welcome->profile)) ||
        welcome->profile[0] == 0) {
        return kvf_proto_bad(why_out, "welcome: profile is no name");
    }
    return KVF_OK;
}

static int profile_check(const struct kvf_wire_profile *profile, const char **why_out)
{
    if (profile->bytes == 0 || profile->bytes > KVF_PROTO_PROFILE_MAX ||
        profile->bytes % KVF_PROTO_PAGE_BYTES != 0) {
        return kvf_proto_bad(why_out, "profile: bytes is out of range");
    }
    return profile->profile_fp != 0 ? KVF_OK : kvf_proto_bad(why_out, "profile: profile_fp is 0");
}

static int piece_check(const struct kvf_wire_piece *piece, const char **why_out)
{
    if (piece->piece > KVF_PROTO_PIECE_ID_MAX || piece->reserved != 0) {
        return kvf_proto_bad(why_out, "piece: number or reserved is out of range");
    }
    if (piece->head.type != KVF_WIRE_PIECE && piece->head.type != KVF_WIRE_DEVICE_PIECE) {
        return piece->bytes == 0 ? KVF_OK : kvf_proto_bad(why_out, "piece drop: bytes is not 0");
    }
    if (piece->bytes == 0 || piece->bytes > KVF_PROTO_PIECE_MAX ||
        piece->bytes % KVF_PROTO_PAGE_BYTES != 0) {
        return kvf_proto_bad(why_out, "piece: bytes is out of range");
    }
    return KVF_OK;
}

static int gpu_check(const struct kvf_wire_gpu *gpu, const char **why_out)
{
    if ((gpu->path != KVF_GPU_PATH_ENGINE && gpu->path != KVF_GPU_PATH_AGENT) ||
        gpu->reserved != 0) {
        return kvf_proto_bad(why_out, "gpu: path or reserved is out of range");
    }
    return kvf_proto_text_ok(gpu->uuid, sizeof(gpu->uuid)) && gpu->uuid[0] != 0
               ? KVF_OK
               : kvf_proto_bad(why_out, "gpu: uuid is no text");
}

static int gpu_channel_check(const struct kvf_wire_gpu_channel *channel, const char **why_out)
{
    if (!kvf_proto_status_known(channel->status) || channel->status > KVF_OK ||
        channel->reserved != 0) {
        return kvf_proto_bad(why_out, "gpu channel: status or reserved is out of range");
    }
    return kvf_proto_text_ok(channel->text, sizeof(channel->text))
               ? KVF_OK
               : kvf_proto_bad(why_out, "gpu channel: text is no text");
}

static int device_check(const struct kvf_wire_device *device, const char **why_out)
{
    return kvf_proto_text_ok(device->uuid, sizeof(device->uuid)) && device->uuid[0] != 0
               ? KVF_OK
               : kvf_proto_bad(why_out, "device: uuid is no text");
}

static int note_check(const struct kvf_wire_note *note, const char **why_out)
{
    if (!kvf_proto_status_known(note->status)) {
        return kvf_proto_bad(why_out, "note: status is unknown");
    }
    if (note->reserved != 0) {
        return kvf_proto_bad(why_out, "note: reserved is not 0");
    }
    return KVF_OK;
}

/* Which side sends which type. */
static bool type_is_from(unsigned type, enum kvf_proto_side sender)
{
    switch (type) {
    case KVF_WIRE_HELLO:
    case KVF_WIRE_MAPPED:
    case KVF_WIRE_GPU:
    case KVF_WIRE_DEVICE:
    case KVF_WIRE_DEVICE_MAPPED:
        return sender == KVF_PROTO_CLIENT;
    case KVF_WIRE_WELCOME:
    case KVF_WIRE_PROFILE:
    case KVF_WIRE_PIECE:
    case KVF_WIRE_PIECE_DROP:
    case KVF_WIRE_DEVICE_PIECE:
    case KVF_WIRE_DEVICE_PIECE_DROP:
    case KVF_WIRE_READY:
    case KVF_WIRE_GPU_CHANNEL:
        return sender == KVF_PROTO_DAEMON;
    default:
        return type == KVF_WIRE_BYE;
    }
}

static uint32_t fds_of(const union kvf_proto_message *message)
{
    if (message->head.type == KVF_WIRE_WELCOME) {
        return message->welcome.status == KVF_OK ? 3 : 0;
    }
    if (message->head.type == KVF_WIRE_GPU_CHANNEL) {
        return message->gpu_channel.status == KVF_OK ? 2 : 0;
    }
    return message->head.type == KVF_WIRE_PIECE || message->head.type == KVF_WIRE_PROFILE ||
                   message->head.type == KVF_WIRE_DEVICE_PIECE
               ? 1
               : 0;
}

static int body_check(const union kvf_proto_message *message, const char **why_out)
{
    switch (message->head.type) {
    case KVF_WIRE_HELLO:
        return hello_check(&message->hello, why_out);
    case KVF_WIRE_WELCOME:
        return welcome_check(&message->welcome, why_out);
    case KVF_WIRE_PROFILE:
        return profile_check(&message->profile, why_out);
    case KVF_WIRE_PIECE:
    case KVF_WIRE_PIECE_DROP:
    case KVF_WIRE_DEVICE_PIECE:
    case KVF_WIRE_DEVICE_PIECE_DROP:
    case KVF_WIRE_DEVICE_MAPPED:
        return piece_check(&message->piece, why_out);
    case KVF_WIRE_GPU:
        return gpu_check(&message->gpu, why_out);
    case KVF_WIRE_GPU_CHANNEL:
        return gpu_channel_check(&message->gpu_channel, why_out);
    case KVF_WIRE_DEVICE:
        return device_check(&message->device, why_out);
    default:
        return note_check(&message->note, why_out);
    }
}

int kvf_proto_decode(enum kvf_proto_side sender, const void *data, size_t data_bytes,
                     uint32_t n_fds, union kvf_proto_message *message_out, const char **why_out)
{
    union kvf_proto_message message;
    struct kvf_wire_head *head = &message.head;

    if (data_bytes < sizeof(*head)) {
        return kvf_proto_bad(why_out, "message: shorter than a head");
    }
    memcpy(head, data, sizeof(*head));
    if (head->magic != KVF_WIRE_MAGIC) {
        return kvf_proto_bad(why_out, "message: magic is wrong");
    }
    if (head->bytes != data_bytes) {
        return kvf_proto_bad(why_out, "message: its length is not the one it states");
    }
    if (head->reserved != 0) {
        return kvf_proto_bad(why_out, "message: reserved is not 0");
    }
    if (!type_is_from(head->type, sender)) {
        return kvf_proto_bad(why_out, "message: this side never sends that type");
    }
    if (head->version < KVF_WIRE_VERSION_MIN || head->version > KVF_WIRE_VERSION_MAX) {
        /* sizes of unknown versions are unknown, so this is decided before the size */
        message_out->head = *head;
        *why_out = "message: layout version is not one of this build";
        return KVF_ERR_VERSION;
    }
    if (data_bytes != kvf_proto_type_bytes(head->type)) {
        return kvf_proto_bad(why_out, "message: not as long as its type");
    }
    memcpy(&message, data, data_bytes);
    if (body_check(&message, why_out) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    if (n_fds != fds_of(&message)) {
        return kvf_proto_bad(why_out, "message: not the number of descriptors of its type");
    }
    memcpy(message_out, &message, data_bytes);
    return KVF_OK;
}

struct kvf_geometry kvf_proto_geometry_get(const struct kvf_wire_geometry *wire)
{
    return (struct kvf_geometry){
        .struct_bytes = sizeof(struct kvf_geometry),
        .kind = wire->kind,
        .dtype = wire->dtype,
        .rope_state = wire->rope_state,
        .layout_tag = wire->layout_tag,
        .n_layers = wire->n_layers,
        .n_heads = wire->n_heads,
        .dim_k = wire->dim_k,
        .dim_v = wire->dim_v,
        .chunk_tokens = wire->chunk_tokens,
        .sink_tokens = wire->sink_tokens,
    };
}
