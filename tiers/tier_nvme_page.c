/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_nvme_page.c: builds and checks the pages of nvme_format.h and the store part of records.
 *
 * Check functions take bytes of any origin: a foreign file, a torn page, a payload that somebody
 * has made to look like a header. They read nothing but the page they are given.
 */
#include "tiers/tier_nvme_internal.h"

#include "base/crc32c.h"
#include "base/hash.h"

#include <assert.h>
#include <string.h>

uint32_t kvf_nvme_page_crc(const void *page, size_t crc_offset)
{
    static const uint32_t zero;
    const uint8_t *bytes = page;
    uint32_t crc = kvf_crc32c(0, bytes, crc_offset);

    crc = kvf_crc32c(crc, &zero, sizeof(zero));
    return kvf_crc32c(crc, bytes + crc_offset + sizeof(zero),
                      KVF_NVME_PAGE_BYTES - crc_offset - sizeof(zero));
}

/* --- superblock and state --------------------------------------------------------------------- */

void kvf_nvme_super_seal(struct kvf_nvme_super *super, uint32_t copy)
{
    super->magic = KVF_NVME_SUPER_MAGIC;
    super->copy = copy;
    super->crc32c = kvf_nvme_page_crc(super, offsetof(struct kvf_nvme_super, crc32c));
}

int kvf_nvme_super_check(const struct kvf_nvme_super *super, uint32_t copy)
{
    uint64_t segment_bytes = super->segment_bytes;

    if (super->magic != KVF_NVME_SUPER_MAGIC) {
        return KVF_ERR_FOREIGN;
    }
    if (super->crc32c != kvf_nvme_page_crc(super, offsetof(struct kvf_nvme_super, crc32c))) {
        return KVF_ERR_CORRUPT;
    }
    if (super->major != KVF_NVME_MAJOR) {
        return KVF_ERR_FOREIGN;
    }
    if (super->copy != copy || segment_bytes < KVF_NVME_SEGMENT_BYTES_MIN ||
        segment_bytes > KVF_NVME_SEGMENT_BYTES_MAX || segment_bytes % KVF_NVME_PAGE_BYTES != 0 ||
        super->segment_count < KVF_NVME_SEGMENTS_MIN ||
        super->segment_count > KVF_NVME_SEGMENTS_MAX ||
        super->store_bytes < KVF_NVME_SEGMENT_OFFSET ||
        (super->store_bytes - KVF_NVME_SEGMENT_OFFSET) / segment_bytes < super->segment_count) {
        return KVF_ERR_CORRUPT;
    }
    return KVF_OK;
}

void kvf_nvme_state_seal(struct kvf_nvme_state *state, uint32_t copy)
{
    state->magic = KVF_NVME_STATE_MAGIC;
    state->copy = copy;
    state->crc32c = kvf_nvme_page_crc(state, offsetof(struct kvf_nvme_state, crc32c));
}

bool kvf_nvme_state_check(const struct kvf_nvme_state *state, const uint8_t uuid[16], uint32_t copy)
{
    return state->magic == KVF_NVME_STATE_MAGIC && state->copy == copy &&
           state->major == KVF_NVME_MAJOR && memcmp(state->uuid, uuid, 16) == 0 &&
           state->generation_limit < KVF_NVME_COUNT_END && state->epoch_last < KVF_NVME_COUNT_END &&
           state->crc32c == kvf_nvme_page_crc(state, offsetof(struct kvf_nvme_state, crc32c));
}

/* --- keys ------------------------------------------------------------------------------------- */

void kvf_nvme_keys_derive(const uint8_t id_key[32], const uint8_t uuid[16], uint8_t mac_key_out[32],
                          uint8_t key_check_out[32])
{
    static const char check[] = "kvferry nvme key check";
    struct kvf_hasher hasher;

    kvf_key_derive(id_key, "kvferry nvme mac", uuid, 16, mac_key_out);
    kvf_hasher_init(&hasher, mac_key_out);
    kvf_hash_field(&hasher, check, sizeof(check) - 1);
    kvf_hash_field(&hasher, uuid, 16);
    kvf_hasher_final(&hasher, key_check_out);
}

/* --- segment header --------------------------------------------------------------------------- */

static void segment_mac(const struct kvf_nvme_segment *page,
                        const struct kvf_nvme_identity *identity, uint8_t mac_out[32])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, identity->mac_key);
    kvf_hash_field_u64(&hasher, page->magic);
    kvf_hash_field(&hasher, page->uuid, sizeof(page->uuid));
    kvf_hash_field_u64(&hasher, page->generation);
    kvf_hash_field_u64(&hasher, page->sequence);
    kvf_hash_field_u64(&hasher, page->segment_index);
    kvf_hash_field_u64(&hasher, page->segment_bytes);
    kvf_hasher_final(&hasher, mac_out);
}

void kvf_nvme_segment_seal(struct kvf_nvme_segment *page, const struct kvf_nvme_identity *identity,
                           uint64_t generation, uint32_t segment_index)
{
    memset(page, 0, sizeof(*page));
    page->magic = KVF_NVME_SEGMENT_MAGIC;
    page->major = KVF_NVME_MAJOR;
    page->minor = KVF_NVME_MINOR;
    memcpy(page->uuid, identity->uuid, sizeof(page->uuid));
    page->generation = generation;
    page->sequence = kvf_nvme_sequence(generation, 0);
    page->segment_index = segment_index;
    page->segment_bytes = identity->segment_bytes;
    segment_mac(page, identity, page->mac);
    page->crc32c = kvf_nvme_page_crc(page, offsetof(struct kvf_nvme_segment, crc32c));
}

bool kvf_nvme_segment_check(const struct kvf_nvme_segment *page,
                            const struct kvf_nvme_identity *identity, uint32_t segment_index)
{
    uint8_t mac[32];

    if (page->magic != KVF_NVME_SEGMENT_MAGIC || page->major != KVF_NVME_MAJOR ||
        memcmp(page->uuid, identity->uuid, sizeof(page->uuid)) != 0 ||
        page->segment_index != segment_index || page->segment_bytes != identity->segment_bytes ||
        page->generation == 0 ||
        page->crc32c != kvf_nvme_page_crc(page, offsetof(struct kvf_nvme_segment, crc32c))) {
        return false;
    }
    segment_mac(page, identity, mac);
    return kvf_mac_equal(mac, page->mac);
}

/* --- footer ----------------------------------------------------------------------------------- */

static void footer_mac(const struct kvf_nvme_footer *footer,
                       const struct kvf_nvme_identity *identity, uint8_t mac_out[32])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, identity->mac_key);
    kvf_hash_field_u64(&hasher, footer->magic);
    kvf_hash_field(&hasher, footer->uuid, sizeof(footer->uuid));
    kvf_hash_field_u64(&hasher, footer->generation);
    kvf_hash_field_u64(&hasher, footer->segment_index);
    kvf_hash_field_u64(&hasher, footer->entry_count);
    kvf_hash_field_u64(&hasher, footer->index_pages);
    kvf_hash_field_u64(&hasher, footer->data_pages);
    kvf_hash_field(&hasher, footer->index_hash, sizeof(footer->index_hash));
    kvf_hasher_final(&hasher, mac_out);
}

static void index_hash(const uint8_t *index, uint32_t index_pages, uint8_t hash_out[32])
{
    struct kvf_hasher hasher;

    kvf_hasher_init(&hasher, NULL);
    kvf_hash_field(&hasher, index, (size_t)index_pages * KVF_NVME_PAGE_BYTES);
    kvf_hasher_final(&hasher, hash_out);
}

uint32_t kvf_nvme_footer_seal(uint8_t *index, uint32_t n_entries, uint32_t data_pages,
                              const struct kvf_nvme_identity *identity, uint64_t generation,
                              uint32_t segment_index)
{
    uint32_t index_pages = kvf_nvme_index_pages(n_entries);
    struct kvf_nvme_footer *footer = (struct kvf_nvme_footer *)(index + (size_t)index_pages *
                                                                            KVF_NVME_PAGE_BYTES);

    memset(footer, 0, sizeof(*footer));
    footer->magic = KVF_NVME_FOOTER_MAGIC;
    footer->major = KVF_NVME_MAJOR;
    footer->minor = KVF_NVME_MINOR;
    memcpy(footer->uuid, identity->uuid, sizeof(footer->uuid));
    footer->generation = generation;
    footer->segment_index = segment_index;
    footer->entry_count = n_entries;
    footer->index_pages = index_pages;
    footer->data_pages = data_pages;
    index_hash(index, index_pages, footer->index_hash);
    footer_mac(footer, identity, footer->mac);
    footer->crc32c = kvf_nvme_page_crc(footer, offsetof(struct kvf_nvme_footer, crc32c));
    return index_pages + 1;
}

bool kvf_nvme_footer_check(const struct kvf_nvme_footer *footer,
                           const struct kvf_nvme_identity *identity, uint64_t generation,
                           uint32_t segment_index)
{
    uint64_t segment_pages = identity->segment_bytes / KVF_NVME_PAGE_BYTES;
    uint8_t mac[32];

    if (footer->magic != KVF_NVME_FOOTER_MAGIC || footer->major != KVF_NVME_MAJOR ||
        memcmp(footer->uuid, identity->uuid, sizeof(footer->uuid)) != 0 ||
        footer->generation != generation || footer->segment_index != segment_index ||
        footer->crc32c != kvf_nvme_page_crc(footer, offsetof(struct kvf_nvme_footer, crc32c))) {
        return false;
    }
    if (footer->entry_count > segment_pages ||
        footer->index_pages != kvf_nvme_index_pages(footer->entry_count) ||
        footer->data_pages < 1 ||
        (uint64_t)footer->data_pages + footer->index_pages + 1 > segment_pages) {
        return false;
    }
    footer_mac(footer, identity, mac);
    return kvf_mac_equal(mac, footer->mac);
}

bool kvf_nvme_index_check(uint8_t *index, const struct kvf_nvme_footer *footer)
{
    uint8_t hash[32];
    uint64_t page = 1;

    index_hash(index, footer->index_pages, hash);
    if (!kvf_mac_equal(hash, footer->index_hash)) {
        return false;
    }
    for (uint32_t i = 0; i < footer->entry_count; i++) {
        const struct kvf_nvme_entry *entry = kvf_nvme_index_entry(index, i);

        if (entry->page_index < page ||
            entry->sequence != kvf_nvme_sequence(footer->generation, entry->page_index) ||
            entry->record_bytes <= KVF_NVME_PAGE_BYTES ||
            entry->record_bytes > (uint64_t)footer->data_pages * KVF_NVME_PAGE_BYTES ||
            (entry->plain_bytes != 0 && entry->plain_bytes <= entry->record_bytes)) {
            return false;
        }
        page = (uint64_t)entry->page_index + kvf_nvme_pages(entry->record_bytes);
        if (page > footer->data_pages) {
            return false;
        }
    }
    return true;
}

/* --- records ---------------------------------------------------------------------------------- */

/* What codec/block_format.h says header_crc32c covers. */
static uint32_t header_crc(const struct kvf_record_page *page)
{
    static const uint32_t zero;
    const size_t at = offsetof(struct kvf_block_header, header_crc32c);
    const size_t store_end = offsetof(struct kvf_record_page, layer_bits);
    const uint8_t *bytes = (const uint8_t *)page;
    uint32_t crc = kvf_crc32c(0, bytes, at);

    crc = kvf_crc32c(crc, &zero, sizeof(zero));
    crc = kvf_crc32c(crc, bytes + at + sizeof(zero), KVF_BLOCK_HEADER_BYTES - at - sizeof(zero));
    return kvf_crc32c(crc, bytes + store_end, KVF_BLOCK_PAGE_BYTES - store_end);
}

/* Over the header, which holds its own checksum of everything else in the page, and the store part
 * with the MAC taken as zero. */
static void record_mac(const struct kvf_record_page *page, const struct kvf_nvme_identity *identity,
                       uint8_t mac_out[32])
{
    struct kvf_block_store store = page->store;
    struct kvf_hasher hasher;

    memset(store.mac, 0, sizeof(store.mac));
    kvf_hasher_init(&hasher, identity->mac_key);
    kvf_hash_field(&hasher, &page->header, sizeof(page->header));
    kvf_hash_field(&hasher, &store, sizeof(store));
    kvf_hasher_final(&hasher, mac_out);
}

void kvf_nvme_record_stamp(struct kvf_record_page *page, const struct kvf_nvme_identity *identity,
                           uint64_t generation, uint64_t sequence, uint64_t record_bytes,
                           uint64_t namespace_id, uint64_t namespace_epoch)
{
    struct kvf_block_store *store = &page->store;

    memset(store, 0, sizeof(*store));
    memcpy(store->store_uuid, identity->uuid, sizeof(store->store_uuid));
    store->generation = generation;
    store->sequence = sequence;
    store->record_bytes = record_bytes;
    store->namespace_id = namespace_id;
    store->namespace_epoch = namespace_epoch;
    record_mac(page, identity, store->mac);
}

int kvf_nvme_record_check(const struct kvf_record_page *page,
                          const struct kvf_nvme_identity *identity, uint64_t generation,
                          uint32_t page_index)
{
    const struct kvf_block_header *header = &page->header;
    const struct kvf_block_store *store = &page->store;
    uint8_t mac[32];

    if (header->magic != KVF_BLOCK_MAGIC || store->generation != generation ||
        store->sequence != kvf_nvme_sequence(generation, page_index) ||
        memcmp(store->store_uuid, identity->uuid, sizeof(store->store_uuid)) != 0) {
        return KVF_MISS;
    }
    if (header->header_crc32c != header_crc(page) || header->total_bytes != store->record_bytes ||
        store->record_bytes <= KVF_NVME_PAGE_BYTES ||
        store->record_bytes > identity->segment_bytes ||
        (kvf_entropy_is_packed(page) && kvf_entropy_plain_bytes(page, store->record_bytes) == 0) ||
        (!kvf_entropy_is_packed(page) && header->plain_bytes != 0)) {
        return KVF_ERR_CORRUPT;
    }
    record_mac(page, identity, mac);
    return kvf_mac_equal(mac, store->mac) ? KVF_OK : KVF_ERR_MISMATCH;
}

bool kvf_nvme_record_matches(const struct kvf_record_page *page, const struct kvf_block_name *name,
                             uint64_t record_bytes)
{
    const struct kvf_block_header *header = &page->header;

    return memcmp(header->key_id, name->key_id, sizeof(header->key_id)) == 0 &&
           header->shard == name->shard && header->shard_count == name->shard_count &&
           page->store.record_bytes == record_bytes; /* key_id covers the namespace */
}
