/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_remote.c: blocks in the daemons of other nodes.
 *
 *   load -> fetch, by the network's thread -> judged -> done, inside poll
 *
 * The network's thread sums what it copies. Where it could not (transport_ucx.h), a worker does.
 */
#include "tiers/tier_remote.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mutant.h"
#include "base/pool.h"
#include "codec/codec.h"
#include "kvferry.h"

static_assert(KVF_BLOCK_VERSION == 1, "kvf_net_layout_fp says so to other nodes");

/* One load. */
struct transfer {
    struct kvf_net_fetch fetch;
    struct kvf_work work;
    struct kvf_tier_io *io;
    struct remote_tier *remote;
    struct transfer *next; /* among those that wait for a worker, or are over */
    int32_t status;
};

struct transfers {
    struct transfer *head, *tail;
};

struct remote_tier {
    struct kvf_tier base;
    struct kvf_remote_config config;
    struct kvf_pool transfers;
    struct transfers unjudged; /* no worker would take them so far */
    struct transfers over;
    uint64_t inflight_bytes;
    struct kvf_tier_stat stat;
};

static struct remote_tier *remote_of(struct kvf_tier *tier)
{
    return (struct remote_tier *)tier;
}

static void push(struct transfers *list, struct transfer *transfer)
{
    transfer->next = NULL;
    if (list->tail != NULL) {
        list->tail->next = transfer;
    } else {
        list->head = transfer;
    }
    list->tail = transfer;
}

static struct transfer *pop(struct transfers *list)
{
    struct transfer *transfer = list->head;

    if (transfer != NULL) {
        list->head = transfer->next;
        list->tail = list->head != NULL ? list->tail : NULL;
    }
    return transfer;
}

/* ----------------------------------------------------------------------------------------------
 * Judging: all but the sum is a matter of a page
 */
static bool is_payload_right(const struct transfer *transfer, const void *payload)
{
    const struct kvf_record_page *page = transfer->io->record;

    return transfer->fetch.is_summed ? transfer->fetch.payload_crc32c == page->header.payload_crc32c
                                     : kvf_block_check_payload(page, payload) == KVF_OK;
}

static int judge(const struct transfer *transfer)
{
    const struct kvf_tier_io *io = transfer->io;
    struct kvf_record_page *page = io->record;
    uint8_t *payload = (uint8_t *)io->record + KVF_RECORD_PAGE_BYTES;
    uint64_t bytes = io->record_bytes - KVF_RECORD_PAGE_BYTES;
    uint64_t padded = (bytes + 4095) & ~UINT64_C(4095);
    int status = kvf_block_check(page, io->record_bytes);

    if (KVF_MUTANT(peer_unchecked)) {
        return KVF_OK;
    }
    if (status != KVF_OK) {
        return KVF_ERR_CORRUPT;
    }
    if (page->header.total_bytes != io->record_bytes || page->header.entropy_id != 0 ||
        (memcmp(page->header.key_id, io->name.key_id, sizeof(io->name.key_id)) != 0 &&
         !KVF_MUTANT(peer_name_unchecked)) ||
        page->header.shard != io->name.shard || page->header.shard_count != io->name.shard_count) {
        return KVF_ERR_CORRUPT;
    }
    if (!is_payload_right(transfer, payload)) {
        return KVF_ERR_CORRUPT;
    }
    memset(&page->store, 0, sizeof(page->store)); /* another node's drive's */
    memset(payload + bytes, 0, padded - bytes);
    return KVF_OK;
}

static void judge_run(struct kvf_work *work)
{
    struct transfer *transfer = work->owner;

    transfer->status = judge(transfer);
}

static void judge_done(struct kvf_work *work)
{
    struct transfer *transfer = work->owner;

    push(&transfer->remote->over, transfer);
}

static void judge_begin(struct transfer *transfer)
{
    struct remote_tier *remote = transfer->remote;

    if (transfer->fetch.is_summed) {
        transfer->status = judge(transfer);
        push(&remote->over, transfer);
        return;
    }
    transfer->work = (struct kvf_work){.run = judge_run, .done = judge_done, .owner = transfer};
    if (remote->config.work->ops->submit(remote->config.work, &transfer->work) != KVF_OK) {
        push(&remote->unjudged, transfer); /* once more in the next turn */
    }
}

/* ----------------------------------------------------------------------------------------------
 * The tier
 */
static int remote_store(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    (void)tier;
    (void)io;
    return KVF_ERR_TIER_OFF;
}

static int remote_load(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct remote_tier *remote = remote_of(tier);
    struct transfer *transfer;
    int status;

    if (io->record_bytes <= KVF_RECORD_PAGE_BYTES ||
        io->record_bytes > (uint64_t)KVF_RECORD_PAGE_BYTES + KVF_PAYLOAD_BYTES_MAX) {
        return KVF_ERR_TOO_LARGE;
    }
    if (remote->inflight_bytes > 0 &&
        remote->inflight_bytes + io->record_bytes > remote->config.inflight_bytes) {
        remote->stat.busy++;
        return KVF_ERR_BUSY;
    }
    transfer = kvf_pool_get(&remote->transfers);
    if (transfer == NULL) {
        remote->stat.busy++;
        return KVF_ERR_BUSY;
    }
    transfer->io = io;
    transfer->remote = remote;
    transfer->fetch.link = io->location;
    memcpy(transfer->fetch.key_id, io->name.key_id, sizeof(transfer->fetch.key_id));
    transfer->fetch.shard = io->name.shard;
    transfer->fetch.record = io->record;
    transfer->fetch.record_bytes = (uint32_t)io->record_bytes;
    transfer->fetch.deadline_ns = io->deadline_ns != 0 ? io->deadline_ns
                                                       : kvf_env_now_ns(&remote->config.env) +
                                                             remote->config.timeout_ns;
    transfer->fetch.is_summed = false;
    transfer->fetch.owner = transfer;
    status = kvf_net_fetch(remote->config.net, &transfer->fetch);
    if (status != KVF_OK) {
        kvf_pool_put(&remote->transfers, transfer);
        remote->stat.busy++;
        return status;
    }
    remote->inflight_bytes += io->record_bytes;
    return KVF_OK;
}

void kvf_remote_fetched(struct kvf_tier *tier, struct kvf_net_fetch *fetch)
{
    struct transfer *transfer = fetch->owner;

    transfer->status = fetch->status;
    if (KVF_MUTANT(peer_fetch_forgotten) && fetch->status == KVF_ERR_TIMEOUT) {
        return;
    }
    if (fetch->status == KVF_OK) {
        judge_begin(transfer);
    } else {
        push(&remote_of(tier)->over, transfer);
    }
}

static void remote_drop(struct kvf_tier *tier, kvf_location location)
{
    (void)tier; /* the owner's, and what is known of it is the host's */
    (void)location;
}

static void finish(struct transfer *transfer)
{
    struct remote_tier *remote = transfer->remote;
    struct kvf_tier_io *io = transfer->io;

    io->status = transfer->status;
    remote->inflight_bytes -= io->record_bytes;
    remote->stat.loads++;
    remote->stat.errors_corrupt += io->status == KVF_ERR_CORRUPT;
    remote->stat.errors_io += io->status == KVF_ERR_TIMEOUT || io->status == KVF_ERR_DISCONNECTED;
    remote->stat.bytes_read += io->status == KVF_OK ? io->record_bytes : 0;
    kvf_pool_put(&remote->transfers, transfer);
    io->done(io);
}

static unsigned remote_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    struct remote_tier *remote = remote_of(tier);
    struct transfers again = remote->unjudged;
    struct transfer *transfer;
    unsigned n = 0;

    (void)now_ns;
    remote->unjudged = (struct transfers){0};
    while ((transfer = pop(&again)) != NULL) {
        judge_begin(transfer);
    }
    while ((transfer = pop(&remote->over)) != NULL) {
        finish(transfer);
        n++;
    }
    return n;
}

static uint64_t remote_deadline_ns(const struct kvf_tier *tier)
{
    const struct remote_tier *remote = (const struct remote_tier *)tier;

    return remote->unjudged.head != NULL ? 0 : UINT64_MAX;
}

static void remote_stat(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out)
{
    const struct remote_tier *remote = (const struct remote_tier *)tier;

    *stat_out = remote->stat;
    stat_out->queue_depth = kvf_pool_taken_count(&remote->transfers);
}

static void remote_close(struct kvf_tier *tier)
{
    struct remote_tier *remote = remote_of(tier);

    if (remote == NULL) {
        return;
    }
    for (uint32_t i = 0; i < remote->transfers.count; i++) {
        struct transfer *transfer = kvf_pool_at(&remote->transfers, i);

        if (transfer != NULL) { /* the network and the workers have ended: nobody knows it */
            kvf_pool_put(&remote->transfers, transfer);
        }
    }
    (void)kvf_pool_fini(&remote->transfers, NULL);
    free(remote);
}

uint64_t kvf_remote_table_bytes(void)
{
    return sizeof(struct remote_tier) + KVF_NET_FETCHES_MAX * sizeof(struct transfer);
}

int kvf_remote_open(const struct kvf_remote_config *config, struct kvf_tier **tier_out)
{
    struct remote_tier *remote = calloc(1, sizeof(*remote));
    int status;

    if (remote == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    remote->base.ops = &kvf_tier_remote_ops;
    remote->config = *config;
    status = kvf_pool_init(&remote->transfers, "transfers", sizeof(struct transfer),
                           KVF_NET_FETCHES_MAX);
    if (status != KVF_OK) {
        remote_close(&remote->base);
        return status;
    }
    *tier_out = &remote->base;
    return KVF_OK;
}

const struct kvf_tier_ops kvf_tier_remote_ops = {
    .abi = KVF_TIER_ABI,
    .name = "remote",
    .kind = KVF_TIER_REMOTE,
    .store = remote_store,
    .load = remote_load,
    .drop = remote_drop,
    .poll = remote_poll,
    .deadline_ns = remote_deadline_ns,
    .stat = remote_stat,
    .close = remote_close,
};
