/* SPDX-License-Identifier: Apache-2.0
 *
 * client_codec.c: staging slots, and records in and out of them.
 *
 *   public handle of a slot   63      48 47          24 23       0
 *                            +----------+--------------+----------+
 *                            |  epoch   |  generation  |   page   |
 *                            +----------+--------------+----------+
 */
#include <string.h>

#include "base/crc32c.h"
#include "client/client_internal.h"

#define COPY_PIECE_BYTES (16u << 10) /* half of a first-level cache */

#define PART_MASK 0xffffffu

static uint32_t pages_of(uint64_t bytes)
{
    return (uint32_t)((bytes + KVF_STAGE_PAGE_BYTES - 1) / KVF_STAGE_PAGE_BYTES);
}

static uint8_t *page_address(const struct kvf_session *session, uint32_t page)
{
    return session->staging + (uint64_t)page * KVF_STAGE_PAGE_BYTES;
}

uint64_t kvf_stage_handle(const struct kvf_session *session, uint32_t page)
{
    return (uint64_t)session->epoch << 48 | (uint64_t)session->area.entries[page].generation << 24 |
           page;
}

/* The slot of a handle that the caller holds, live or lost. KVF_OK; KVF_ERR_INVALID. */
static int slot_find(struct kvf_client *client, uint64_t stage, struct kvf_session **session_out,
                     uint32_t *page_out)
{
    struct kvf_session *session = kvf_session_find(client, (uint16_t)(stage >> 48));
    struct kvf_stage_entry *entry;

    if (session == NULL || session->staging == NULL) {
        return KVF_ERR_INVALID;
    }
    entry = kvf_stage_area_find(&session->area, (uint32_t)(stage & PART_MASK),
                                (uint32_t)(stage >> 24 & PART_MASK));
    if (entry == NULL || entry->is_in_flight) {
        return KVF_ERR_INVALID;
    }
    *session_out = session;
    *page_out = (uint32_t)(stage & PART_MASK);
    return KVF_OK;
}

int kvf_stage_find(struct kvf_client *client, uint64_t stage, uint32_t *page_out)
{
    struct kvf_session *session;
    int status = slot_find(client, stage, &session, page_out);

    if (status == KVF_OK && (session != client->session || session->state != KVF_SESSION_LIVE)) {
        status = KVF_ERR_DISCONNECTED;
    }
    return status;
}

/* Take a slot for a payload. */
static int slot_take(struct kvf_session *session, uint64_t payload_bytes, uint32_t *page_out)
{
    if (payload_bytes > KVF_PAYLOAD_BYTES_MAX) {
        return KVF_ERR_TOO_LARGE;
    }
    return kvf_stage_area_take(&session->area, pages_of(KVF_RECORD_PAGE_BYTES + payload_bytes),
                               page_out);
}

static uint32_t tokens_of(const struct kvf_client *client, uint32_t n_tokens)
{
    return n_tokens != 0 ? n_tokens : client->geometry.chunk_tokens;
}

static bool view_ok(const struct kvf_client *client, const struct kvf_kv_view *kv)
{
    return kv != NULL && kv->struct_bytes == sizeof(*kv) && kv->tokens_a_page != 0 &&
           kv->k.layers != NULL && (client->geometry.dim_v == 0 || kv->v.layers != NULL);
}

static int item_encode(struct kvf_client *client, const struct kvf_put_item *item, uint32_t *page,
                       uint32_t *record_bytes_out)
{
    struct kvf_session *session = client->session;
    uint32_t n_tokens = tokens_of(client, item->n_tokens);
    uint64_t room = kvf_codec_plan_payload_bytes_max(&client->plan, n_tokens);
    size_t payload_bytes;
    uint8_t *record;
    int status;

    status = slot_take(session, room, page);
    if (status != KVF_OK) {
        return status;
    }
    record = page_address(session, *page);
    status = kvf_block_encode(&client->plan, item->kv, item->token_start, n_tokens, (void *)record,
                              record + KVF_RECORD_PAGE_BYTES, room, client->workspace,
                              &payload_bytes);
    if (status != KVF_OK) {
        kvf_stage_area_give(&session->area, *page);
        return status;
    }
    *record_bytes_out = (uint32_t)(KVF_RECORD_PAGE_BYTES + payload_bytes);
    return KVF_OK;
}

/* Copy and sum in one pass: each piece is summed while it comes into the cache, and then copied.
 * The sum is of the caller's bytes, because what is in staging is shared. */
static uint32_t copy_summed(uint8_t *to, const uint8_t *from, size_t bytes)
{
    uint32_t crc = 0;

    for (size_t done = 0; done < bytes; done += COPY_PIECE_BYTES) {
        size_t n = bytes - done < COPY_PIECE_BYTES ? bytes - done : COPY_PIECE_BYTES;

        crc = kvf_crc32c(crc, from + done, n);
        memcpy(to + done, from + done, n);
    }
    return crc;
}

static int item_copy(struct kvf_client *client, const struct kvf_put_item *item, uint32_t *page,
                     uint32_t *record_bytes_out)
{
    struct kvf_session *session = client->session;
    uint8_t *record;
    uint32_t crc;
    int status = slot_take(session, item->data_bytes, page);

    if (status != KVF_OK) {
        return status;
    }
    record = page_address(session, *page);
    crc = copy_summed(record + KVF_RECORD_PAGE_BYTES, item->data, item->data_bytes);
    status = kvf_block_describe_summed((void *)record, crc, item->data_bytes);
    if (status != KVF_OK) {
        kvf_stage_area_give(&session->area, *page);
        return status;
    }
    *record_bytes_out = (uint32_t)(KVF_RECORD_PAGE_BYTES + item->data_bytes);
    return KVF_OK;
}

int kvf_stage_item(struct kvf_client *client, const struct kvf_put_item *item, uint32_t *page_out,
                   uint32_t *record_bytes_out)
{
    struct kvf_stage_area *area = &client->session->area;
    int status;

    if (item->source == KVF_SOURCE_STAGED) {
        status = kvf_stage_find(client, item->stage, page_out);
        if (status != KVF_OK) {
            return status;
        }
        *record_bytes_out = area->entries[*page_out].record_bytes;
        return *record_bytes_out != 0 ? KVF_OK : KVF_ERR_INVALID;
    }
    status = item->source == KVF_SOURCE_VIEW ? item_encode(client, item, page_out, record_bytes_out)
                                             : item_copy(client, item, page_out, record_bytes_out);
    if (status == KVF_OK) {
        /* what the encoder did not need serves the next put */
        kvf_stage_area_shrink(area, *page_out, pages_of(*record_bytes_out));
    }
    return status;
}

int kvf_stage_acquire(struct kvf_client *client, size_t payload_bytes, struct kvf_stage *stage_out)
{
    struct kvf_session *session;
    uint32_t page = 0;
    int status;

    if (client == NULL || stage_out == NULL || payload_bytes == 0) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    kvf_session_tend(client, false);
    session = client->session;
    if (!kvf_session_is_live(client)) {
        status = kvf_session_down_status(client);
    } else {
        status = slot_take(session, payload_bytes, &page);
        if (status == KVF_ERR_BUSY) {
            /* slots of puts that have completed meanwhile */
            kvf_requests_drain(client, true);
            status = kvf_session_is_live(client) ? slot_take(session, payload_bytes, &page)
                                                 : KVF_ERR_DISCONNECTED;
        }
    }
    if (status == KVF_OK) {
        session->n_slots++;
        stage_out->stage = kvf_stage_handle(session, page);
        stage_out->record = page_address(session, page);
        stage_out->payload = page_address(session, page + 1);
        stage_out->payload_bytes = (size_t)(session->area.entries[page].pages - 1) *
                                   KVF_STAGE_PAGE_BYTES;
    }
    kvf_session_arm(client);
    kvf_client_leave(client);
    return status;
}

int kvf_stage_seal(struct kvf_client *client, struct kvf_stage *stage, size_t payload_bytes)
{
    struct kvf_session *session;
    uint32_t page;
    int status;

    if (client == NULL || stage == NULL || payload_bytes == 0 || client->has_geometry) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    status = slot_find(client, stage->stage, &session, &page);
    if (status == KVF_OK) {
        struct kvf_stage_entry *entry = &session->area.entries[page];

        if (payload_bytes > (size_t)(entry->pages - 1) * KVF_STAGE_PAGE_BYTES) {
            status = KVF_ERR_TOO_LARGE;
        } else {
            uint8_t *record = page_address(session, page);

            status = kvf_block_describe_bytes((void *)record, record + KVF_RECORD_PAGE_BYTES,
                                              payload_bytes);
            if (status == KVF_OK) {
                entry->record_bytes = (uint32_t)(KVF_RECORD_PAGE_BYTES + payload_bytes);
            }
        }
    }
    kvf_client_leave(client);
    return status;
}

int kvf_stage_settle(struct kvf_client *client, uint64_t stage, uint32_t record_bytes)
{
    struct kvf_stage_area *area;
    uint32_t page;
    int status = kvf_stage_find(client, stage, &page);

    if (status != KVF_OK) {
        return status;
    }
    area = &client->session->area;
    if (pages_of(record_bytes) > area->entries[page].pages) {
        return KVF_ERR_TOO_LARGE;
    }
    area->entries[page].record_bytes = record_bytes;
    kvf_stage_area_shrink(area, page, pages_of(record_bytes));
    return KVF_OK;
}

static int slot_give(struct kvf_client *client, uint64_t stage)
{
    struct kvf_session *session;
    uint32_t page;
    int status = slot_find(client, stage, &session, &page);

    if (status == KVF_OK) {
        kvf_stage_area_give(&session->area, page);
        session->n_slots--;
        kvf_session_trim(client, session);
    }
    return status;
}

void kvf_stage_give_up(struct kvf_client *client, uint64_t stage)
{
    (void)slot_give(client, stage);
}

int kvf_stage_release(struct kvf_client *client, uint64_t stage)
{
    int status;

    if (client == NULL) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    status = slot_give(client, stage);
    kvf_client_leave(client);
    return status;
}

int kvf_encode(struct kvf_client *client, struct kvf_stage *stage, uint32_t token_start,
               uint32_t n_tokens, const struct kvf_kv_view *kv, size_t *record_bytes_out)
{
    struct kvf_session *session;
    size_t payload_bytes;
    uint32_t page;
    int status;

    if (client == NULL || stage == NULL || record_bytes_out == NULL || !client->has_geometry ||
        !view_ok(client, kv)) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    status = slot_find(client, stage->stage, &session, &page);
    if (status == KVF_OK) {
        struct kvf_stage_entry *entry = &session->area.entries[page];
        uint8_t *record = page_address(session, page);

        status = kvf_block_encode(&client->plan, kv, token_start, tokens_of(client, n_tokens),
                                  (void *)record, record + KVF_RECORD_PAGE_BYTES,
                                  (size_t)(entry->pages - 1) * KVF_STAGE_PAGE_BYTES,
                                  client->workspace, &payload_bytes);
        if (status == KVF_OK) {
            *record_bytes_out = KVF_RECORD_PAGE_BYTES + payload_bytes;
            entry->record_bytes = (uint32_t)*record_bytes_out;
        }
    }
    kvf_client_leave(client);
    return status;
}

int kvf_decode(struct kvf_client *client, const void *record, size_t record_bytes,
               uint32_t layer_first, uint32_t n_layers, uint32_t token_first, uint32_t n_tokens,
               const struct kvf_kv_view *kv)
{
    int status;

    if (client == NULL || record == NULL || !client->has_geometry || !view_ok(client, kv)) {
        return KVF_ERR_INVALID;
    }
    kvf_client_enter(client);
    status = kvf_block_decode(&client->plan, record, record_bytes, layer_first, n_layers,
                              token_first, n_tokens, kv, client->workspace);
    client->x_refused += status == KVF_ERR_MISMATCH && client->plan.weights_fp != 0;
    client->reports[KVF_REPORT_CORRUPT] += status == KVF_ERR_CORRUPT;
    kvf_client_leave(client);
    return status;
}
