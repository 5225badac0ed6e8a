/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_pack.c: records packed before they are placed, and unpacked when they are read
 * (codec/entropy.h), by jobs of the work queue.
 *
 *   store   record --job--> packing's buffer, or as it is --> placed, written
 *   load    drive --> end of the memory --verified, unpacked by one job--> record
 *
 * A store that finds no packing is KVF_ERR_BUSY, so what waits for a drive waits with its host, and
 * memory is bounded. Reads need none of their own.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/failpoint.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

uint64_t kvf_nvme_pack_memory(const struct kvf_nvme_config *config)
{
    uint64_t each = config->pack_bytes + kvf_entropy_packer_bytes();

    return (config->packs ? config->pack_count * each : 0) +
           config->unpack_count * (uint64_t)kvf_entropy_unpacker_bytes();
}

int kvf_nvme_packings_init(struct kvf_nvme_tier *tier)
{
    const struct kvf_nvme_config *config = &tier->config;
    struct kvf_nvme_packings *packings = &tier->packings;

    for (uint32_t i = 0; i < config->pack_count && config->packs; i++) {
        struct kvf_nvme_packing *packing = &packings->packings[i];

        packing->packer = kvf_entropy_packer_create();
        packing->buffer = aligned_alloc(KVF_NVME_PAGE_BYTES, config->pack_bytes);
        if (packing->packer == NULL || packing->buffer == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    for (uint32_t i = 0; i < config->unpack_count; i++) {
        packings->unpackers[i] = kvf_entropy_unpacker_create();
        if (packings->unpackers[i] == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
    }
    packings->packings_free = config->packs ? config->pack_count : 0;
    packings->unpackers_free = config->unpack_count;
    return KVF_OK;
}

void kvf_nvme_packings_fini(struct kvf_nvme_tier *tier)
{
    for (uint32_t i = 0; i < KVF_NVME_PACK_MAX; i++) {
        kvf_entropy_packer_destroy(tier->packings.packings[i].packer);
        free(tier->packings.packings[i].buffer);
        kvf_entropy_unpacker_destroy(tier->packings.unpackers[i]);
    }
}

/* --- store ------------------------------------------------------------------------------------ */

/* Records of three pages can become two, smaller ones nothing. */
static bool is_for_packing(const struct kvf_nvme_tier *tier, uint64_t record_bytes)
{
    return tier->config.packs && record_bytes <= tier->config.pack_bytes &&
           record_bytes > 2ull * KVF_NVME_PAGE_BYTES;
}

bool kvf_nvme_pack_has_room(const struct kvf_nvme_tier *tier, uint64_t record_bytes)
{
    return !is_for_packing(tier, record_bytes) || tier->packings.packings_free > 0;
}

/* On a worker: the record is the host's and pinned, the packing the op's. */
static void pack_run(struct kvf_work *work)
{
    struct kvf_nvme_op *op = work->owner;

    op->verdict = kvf_entropy_pack(op->packing.packer, op->record, op->packing.buffer,
                                   &op->packed_bytes);
}

static void pack_done(struct kvf_work *work)
{
    struct kvf_nvme_op *op = work->owner;
    struct kvf_nvme_tier *tier = op->tier;

    tier->jobs_outstanding--;
    if (op->verdict == KVF_OK) {
        tier->info.packed_records++;
        tier->info.packed_saved_bytes += op->record_bytes - op->packed_bytes;
        op->record = op->packing.buffer;
        op->record_bytes = op->packed_bytes;
    } else {
        kvf_nvme_pack_release(tier, op);
    }
    kvf_nvme_store_begin(tier, op);
}

bool kvf_nvme_pack_start(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    struct kvf_nvme_packings *packings = &tier->packings;

    if (!is_for_packing(tier, op->record_bytes)) {
        return false;
    }
    op->work = (struct kvf_work){.run = pack_run, .done = pack_done, .owner = op};
    op->packing = packings->packings[packings->packings_free - 1];
    if (tier->config.work->ops->submit(tier->config.work, &op->work) != KVF_OK) {
        op->packing = (struct kvf_nvme_packing){0};
        return false;
    }
    packings->packings_free--;
    tier->jobs_outstanding++;
    return true;
}

void kvf_nvme_pack_release(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    struct kvf_nvme_packings *packings = &tier->packings;
    uint32_t at = packings->packings_free;

    if (op->packing.packer == NULL) {
        return;
    }
    while (packings->packings[at].packer != op->packing.packer) {
        at++;
    }
    packings->packings[at] = packings->packings[packings->packings_free];
    packings->packings[packings->packings_free++] = op->packing;
    op->packing = (struct kvf_nvme_packing){0};
}

/* --- load ------------------------------------------------------------------------------------- */

void kvf_nvme_unpack_prepare(struct kvf_nvme_op *op, uint32_t pages)
{
    uint32_t plain_pages = kvf_nvme_pages(op->record_bytes);

    if (pages < plain_pages) {
        op->is_packed = true;
        op->record = (uint8_t *)op->record + (size_t)(plain_pages - pages) * KVF_NVME_PAGE_BYTES;
        op->record_bytes = (uint64_t)pages * KVF_NVME_PAGE_BYTES;
    }
}

bool kvf_nvme_unpacker_take(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    struct kvf_nvme_packings *packings = &tier->packings;

    if (packings->unpackers_free == 0) {
        return false;
    }
    op->unpacker = packings->unpackers[--packings->unpackers_free];
    return true;
}

void kvf_nvme_unpacker_give(struct kvf_nvme_tier *tier, struct kvf_nvme_op *op)
{
    struct kvf_nvme_packings *packings = &tier->packings;
    uint32_t at = packings->unpackers_free;

    if (op->unpacker == NULL) {
        return;
    }
    while (packings->unpackers[at] != op->unpacker) {
        at++;
    }
    packings->unpackers[at] = packings->unpackers[packings->unpackers_free];
    packings->unpackers[packings->unpackers_free++] = op->unpacker;
    op->unpacker = NULL;
}

int kvf_nvme_unpack(struct kvf_nvme_op *op)
{
    struct kvf_tier_io *call = op->call;
    int status = KVF_FAILPOINT(nvme_unpack);

    if (status == KVF_OK) {
        status = kvf_entropy_unpack(op->unpacker, op->record, op->record_bytes, call->record,
                                    call->record_bytes);
    }
    if (status == KVF_OK) {
        op->record = call->record;
    }
    return status;
}
