/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_proto.c: checks of messages around a GPU worker.
 */
#include "transport/gpu_proto.h"

#include <string.h>

#include "transport/proto.h"
#include "transport/proto_check.h"

#define SIZES_MAX (UINT64_C(1) << 36) /* bytes; sums and products of them stay far below 2^64 */

/* What a type is like. */
struct form {
    uint8_t side; /* enum kvf_gpud_side */
    uint16_t type;
    uint16_t bytes; /* at least; exactly unless is_open */
    uint8_t fds_max;
    uint8_t is_open; /* an array follows */
    int (*check)(const union kvf_gpud_message *message, size_t bytes, const char **why_out);
};

void kvf_gpud_head_init(struct kvf_gpud_head *head, enum kvf_gpud_type type, size_t bytes)
{
    *head = (struct kvf_gpud_head){
        .magic = KVF_GPUD_MAGIC, .type = (uint16_t)type, .bytes = (uint32_t)bytes};
}

static int is_status(int32_t status, const char **why_out)
{
    return kvf_proto_status_known(status) ? KVF_OK : kvf_proto_bad(why_out, "status is unknown");
}

static int is_text(const char *text, size_t bytes, const char **why_out)
{
    return kvf_proto_text_ok(text, bytes) ? KVF_OK : kvf_proto_bad(why_out, "a text is no text");
}

/* ----------------------------------------------------------------------------------------------
 * Worker and daemon
 */
static int ready_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_ready *ready = &message->ready;

    (void)bytes;
    if (is_status(ready->status, why_out) != KVF_OK ||
        is_text(ready->uuid, sizeof(ready->uuid), why_out) != KVF_OK ||
        is_text(ready->name, sizeof(ready->name), why_out) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    return is_text(ready->text, sizeof(ready->text), why_out);
}

static int attach_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    (void)bytes;
    if ((message->attach.flags & ~KVF_GPUD_ATTACH_NO_HANDLES) != 0 ||
        message->attach.greet_ms == 0 || message->attach.reserved != 0) {
        return kvf_proto_bad(why_out, "attach: flags, greet_ms or reserved is out of range");
    }
    return is_text(message->attach.socket_path, sizeof(message->attach.socket_path), why_out);
}

static int note_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    (void)bytes;
    return is_status(message->note.status, why_out);
}

/* ----------------------------------------------------------------------------------------------
 * Engine and worker
 */
static int hello_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_hello *hello = &message->hello;
    union kvf_proto_message inner;

    (void)bytes;
    if (is_text(hello->uuid, sizeof(hello->uuid), why_out) != KVF_OK ||
        kvf_proto_decode(KVF_PROTO_CLIENT, &hello->hello, sizeof(hello->hello), 0, &inner,
                         why_out) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    if (inner.head.type != KVF_WIRE_HELLO || inner.hello.geometry.kind == KVF_KIND_BYTES ||
        inner.hello.shard == KVF_SHARD_NONE) {
        return kvf_proto_bad(why_out, "hello: of no engine with pages");
    }
    if (hello->ring_bytes > SIZES_MAX || hello->burst_bytes > SIZES_MAX ||
        hello->load_window_bytes > SIZES_MAX || hello->load_group_bytes > SIZES_MAX) {
        return kvf_proto_bad(why_out, "hello: a size is out of range");
    }
    return hello->pinning <= KVF_GPU_PIN_WINDOW && hello->reserved == 0
               ? KVF_OK
               : kvf_proto_bad(why_out, "hello: pinning or reserved is out of range");
}

static int welcome_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_welcome *welcome = &message->welcome;

    (void)bytes;
    if (is_status(welcome->status, why_out) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    if (welcome->status == KVF_OK && welcome->flag_bytes != KVF_GPUD_FLAG_BYTES) {
        return kvf_proto_bad(why_out, "welcome: flag_bytes is another");
    }
    return is_text(welcome->text, sizeof(welcome->text), why_out);
}

static int memory_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_memory *memory = &message->memory;
    bool is_handle = memory->kind == KVF_GPUD_MEMORY_HANDLE;

    (void)bytes;
    if (!is_handle && memory->kind != KVF_GPUD_MEMORY_FD) {
        return kvf_proto_bad(why_out, "memory: kind is unknown");
    }
    if (memory->n_pieces == 0 || memory->n_pieces > KVF_GPUD_PIECES_MAX ||
        memory->piece_index >= memory->n_pieces || (is_handle && memory->n_pieces != 1)) {
        return kvf_proto_bad(why_out, "memory: n_pieces or piece_index is out of range");
    }
    if (memory->bytes == 0 || memory->piece_bytes == 0 || memory->piece_bytes > memory->bytes ||
        memory->reserved != 0) {
        return kvf_proto_bad(why_out, "memory: bytes, piece_bytes or reserved is out of range");
    }
    return KVF_OK;
}

static int register_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_register *region = &message->region;

    if (region->n_places == 0 || region->n_places > KVF_GPUD_TENSORS_MAX ||
        bytes != sizeof(*region) + region->n_places * sizeof(region->places[0])) {
        return kvf_proto_bad(why_out, "register: not as long as its n_places");
    }
    if (region->n_pages == 0 || region->tokens_a_page == 0 || region->reserved != 0) {
        return kvf_proto_bad(why_out, "register: n_pages, tokens_a_page or reserved");
    }
    return KVF_OK;
}

static int answer_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    (void)bytes;
    return is_status(message->answer.status, why_out) == KVF_OK
               ? is_text(message->answer.text, sizeof(message->answer.text), why_out)
               : KVF_ERR_PROTOCOL;
}

static bool is_key(const uint8_t key[64], uint32_t bytes)
{
    return bytes >= KVF_KEY_BYTES_MIN && bytes <= KVF_KEY_BYTES_MAX &&
           kvf_proto_all_zero(key + bytes, 64 - bytes);
}

static int request_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_request *request = &message->request;

    (void)bytes;
    if (request->n_items == 0 || request->n_items > KVF_REQUEST_KEYS_MAX ||
        request->n_pages < request->n_items ||
        request->n_pages > request->n_items * KVF_CHUNK_TOKENS_MAX) {
        return kvf_proto_bad(why_out, "request: n_items or n_pages is out of range");
    }
    if (request->request == 0 || request->flag >= KVF_GPUD_FLAG_BYTES / KVF_GPUD_FLAG_STRIDE ||
        request->reserved[0] != 0 || request->reserved[1] != 0) {
        return kvf_proto_bad(why_out, "request: id, flag or reserved is out of range");
    }
    return request->parent_bytes == 0 || is_key(request->parent, request->parent_bytes)
               ? KVF_OK
               : kvf_proto_bad(why_out, "request: parent is no key");
}

static int items_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_items *items = &message->items;
    size_t at = sizeof(*items);

    for (uint32_t i = 0; i < items->n_items; i++) {
        const struct kvf_gpud_item *item = (const void *)(message->bytes + at);

        if (bytes - at < sizeof(*item) || bytes - at < kvf_gpud_item_bytes(item->n_pages)) {
            return kvf_proto_bad(why_out, "items: an item is cut");
        }
        if (!is_key(item->key, item->key_bytes) ||
            (item->supersedes_bytes != 0 && !is_key(item->supersedes, item->supersedes_bytes))) {
            return kvf_proto_bad(why_out, "items: a key is none");
        }
        if (item->n_pages == 0 || item->n_pages > KVF_CHUNK_TOKENS_MAX || item->reserved != 0) {
            return kvf_proto_bad(why_out, "items: n_pages or reserved is out of range");
        }
        at += kvf_gpud_item_bytes(item->n_pages);
    }
    return at == bytes && items->n_items != 0 && items->reserved == 0
               ? KVF_OK
               : kvf_proto_bad(why_out, "items: not as long as they say");
}

static int events_check(const union kvf_gpud_message *message, size_t bytes, const char **why_out)
{
    const struct kvf_gpud_events *events = &message->events;

    if (events->head.number == 0 || events->head.number > KVF_GPUD_EVENTS_MAX ||
        bytes != sizeof(*events) + events->head.number * sizeof(events->events[0])) {
        return kvf_proto_bad(why_out, "events: not as long as their number");
    }
    for (uint32_t i = 0; i < events->head.number; i++) {
        const struct kvf_gpud_event *event = &events->events[i];

        if (event->kind < KVF_GPU_EVENT_PAGES_FREE || event->kind > KVF_GPU_EVENT_REQUEST ||
            event->tier > KVF_TIER_REMOTE || is_status(event->status, why_out) != KVF_OK) {
            return kvf_proto_bad(why_out, "events: kind, tier or status is unknown");
        }
    }
    return KVF_OK;
}

static const struct form forms[] = {
    {KVF_GPUD_FROM_WORKER, KVF_GPUD_READY, sizeof(struct kvf_gpud_ready), 0, 0, ready_check},
    {KVF_GPUD_FROM_DAEMON, KVF_GPUD_QUIT, sizeof(struct kvf_gpud_note), 0, 0, note_check},
    {KVF_GPUD_FROM_DAEMON, KVF_GPUD_ATTACH, sizeof(struct kvf_gpud_attach), 1, 0, attach_check},
    {KVF_GPUD_FROM_DAEMON, KVF_GPUD_DETACH, sizeof(struct kvf_gpud_note), 0, 0, note_check},
    {KVF_GPUD_FROM_WORKER, KVF_GPUD_ENGINE, sizeof(struct kvf_gpud_note), 0, 0, note_check},
    {KVF_GPUD_FROM_WORKER, KVF_GPUD_COUNTS, sizeof(struct kvf_gpud_counts), 0, 0, NULL},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_HELLO, sizeof(struct kvf_gpud_hello), 0, 0, hello_check},
    {KVF_GPUD_TO_ENGINE, KVF_GPUD_WELCOME, sizeof(struct kvf_gpud_welcome), 1, 0, welcome_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_MAPPED, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_MEMORY, sizeof(struct kvf_gpud_memory), 1, 0, memory_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_FORGET, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_REGISTER, sizeof(struct kvf_gpud_register), 0, 1,
     register_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_UNREGISTER, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_SLEEP, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_WAKE, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_TO_ENGINE, KVF_GPUD_ANSWER, sizeof(struct kvf_gpud_answer), 0, 0, answer_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_PUT, sizeof(struct kvf_gpud_request), 0, 0, request_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_GET, sizeof(struct kvf_gpud_request), 0, 0, request_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_ITEMS, sizeof(struct kvf_gpud_items), 0, 1, items_check},
    {KVF_GPUD_FROM_ENGINE, KVF_GPUD_CANCEL, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_TO_ENGINE, KVF_GPUD_GONE, sizeof(struct kvf_gpud_plain), 0, 0, NULL},
    {KVF_GPUD_TO_ENGINE, KVF_GPUD_EVENTS, sizeof(struct kvf_gpud_events), 0, 1, events_check},
};

/* Does this one come with a descriptor? */
static uint32_t fds_of(const union kvf_gpud_message *message, const struct form *form)
{
    switch (form->type) {
    case KVF_GPUD_WELCOME:
        return message->welcome.status == KVF_OK;
    case KVF_GPUD_MEMORY:
        return message->memory.kind == KVF_GPUD_MEMORY_FD;
    default:
        return form->fds_max;
    }
}

int kvf_gpud_check(enum kvf_gpud_side side, const union kvf_gpud_message *message,
                   size_t data_bytes, uint32_t n_fds, const char **why_out)
{
    const struct kvf_gpud_head *head = &message->head;
    const struct form *form = forms;

    if (data_bytes < sizeof(*head) || head->magic != KVF_GPUD_MAGIC || head->bytes != data_bytes ||
        head->reserved != 0) {
        return kvf_proto_bad(why_out, "message: its head is wrong");
    }
    while (form < forms + sizeof(forms) / sizeof(forms[0]) &&
           (form->side != side || form->type != head->type)) {
        form++;
    }
    if (form == forms + sizeof(forms) / sizeof(forms[0])) {
        return kvf_proto_bad(why_out, "message: this side never sends that type");
    }
    if (data_bytes < form->bytes || (data_bytes > form->bytes && !form->is_open)) {
        return kvf_proto_bad(why_out, "message: not as long as its type");
    }
    if (form->check != NULL && form->check(message, data_bytes, why_out) != KVF_OK) {
        return KVF_ERR_PROTOCOL;
    }
    return n_fds == fds_of(message, form)
               ? KVF_OK
               : kvf_proto_bad(why_out, "message: not the number of descriptors of its type");
}
