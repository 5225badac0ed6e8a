/* SPDX-License-Identifier: Apache-2.0
 *
 * nvme_format.h: the bytes of a store on a drive, and nothing else. docs/disk-format.md is this
 * header in prose; golden bytes are in tests/data/nvme.
 *
 *   store     0         superblock, copy 0       512 KiB   superblock, copy 1
 *             4 KiB     state, copy 0            516 KiB   state, copy 1
 *             8 KiB     spare, for the I/O probe
 *             1 MiB     segment 0, segment 1, ...
 *
 *   segment   page 0    struct kvf_nvme_segment
 *             page 1    record: struct kvf_record_page (codec/block_format.h), payload, zeroes to
 *                       the next page; then the next record, ...
 *             ...       free space
 *             last - n  footer entries: n pages of struct kvf_nvme_entry, zeroes to the end
 *             last      struct kvf_nvme_footer: says n
 *
 * All numbers are little endian; bytes that no field covers are zero. A page is 4096 bytes. Each
 * checksum is a CRC32C over its page with the checksum taken as zero; each MAC is a keyed
 * BLAKE2b-256 over the list of fields given with it (base/hash.h), under the store's MAC key.
 */
#ifndef KVF_TIERS_NVME_FORMAT_H
#define KVF_TIERS_NVME_FORMAT_H

#include <stddef.h>
#include <stdint.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "stores are little endian and are read in place");

#define KVF_NVME_PAGE_BYTES     4096
#define KVF_NVME_COPIES         2
#define KVF_NVME_COPY_BYTES     (512u << 10) /* from copy 0 to copy 1, for superblock and state */
#define KVF_NVME_SUPER_OFFSET   0u
#define KVF_NVME_STATE_OFFSET   4096u
#define KVF_NVME_SPARE_OFFSET   8192u
#define KVF_NVME_SEGMENT_OFFSET (1u << 20) /* of segment 0 */

#define KVF_NVME_MAJOR 1 /* another one cannot be read */
#define KVF_NVME_MINOR 0 /* a higher one can be read, and then is kept */

#define KVF_NVME_SUPER_MAGIC   0x524550555346564bull /* "KVFSUPER" */
#define KVF_NVME_STATE_MAGIC   0x455441545346564bull /* "KVFSTATE" */
#define KVF_NVME_SEGMENT_MAGIC 0x544e4d475346564bull /* "KVFSGMNT" */
#define KVF_NVME_FOOTER_MAGIC  0x52544f4f4646564bull /* "KVFFOOTR" */

#define KVF_NVME_EPOCHS 64

/* A record's sequence is its segment's generation, shifted, plus its page's number in the segment:
 * later records have higher ones, and a record at another place than its own is none. */
#define KVF_NVME_SEQUENCE_BITS 20

/* Generations and epochs are lower; more cannot be used up, and make a state page invalid. */
#define KVF_NVME_COUNT_END (1ull << 43)

/* kvf_nvme_super.flags */
enum kvf_nvme_super_flags {
    KVF_NVME_FORMATTING = 1 << 0,  /* format has not finished: nothing is stored here */
    KVF_NVME_KEY_OUTSIDE = 1 << 1, /* the id key is in cluster.key, id_key is zero */
};

/* What a store is. Written by format and when the size changes; the copy with the higher sequence
 * counts. */
struct kvf_nvme_super {
    uint64_t magic;
    uint16_t major;
    uint16_t minor;
    uint32_t crc32c;
    uint32_t flags; /* enum kvf_nvme_super_flags */
    uint32_t copy;  /* 0 or 1: a write that went astray is not taken for this one */
    uint64_t sequence;
    uint8_t uuid[16];
    uint64_t store_bytes;
    uint64_t segment_bytes;
    uint64_t segment_count;
    uint64_t created_wall_s;
    uint8_t id_key[32];
    uint8_t key_check[32]; /* MAC over "kvferry nvme key check" and uuid: is this the right key? */
    uint8_t reserved[3952];
};

/* A namespace that has been purged. */
struct kvf_nvme_epoch {
    uint64_t namespace_id;
    uint64_t epoch;      /* records under a lower one are dead; 0: the entry is empty */
    uint64_t generation; /* no segment with a higher generation holds such a record */
};

/* What changes while a store is in use. The copy with the higher sequence counts; an update is done
 * when it is on stable storage in both. */
struct kvf_nvme_state {
    uint64_t magic;
    uint16_t major;
    uint16_t minor;
    uint32_t crc32c;
    uint32_t copy;
    uint32_t reserved0;
    uint64_t sequence;
    uint8_t uuid[16];
    uint64_t generation_limit; /* every generation ever used is lower */
    uint64_t epoch_last;       /* the highest epoch ever given, to any namespace */
    int64_t credit_bytes;      /* of the write budget */
    uint8_t reserved1[56];
    struct kvf_nvme_epoch epochs[KVF_NVME_EPOCHS];
    uint8_t reserved2[2432];
};

/* Page 0 of a segment: on stable storage before the first record of its generation is written.
 * MAC: magic, uuid, generation, sequence, segment_index, segment_bytes. */
struct kvf_nvme_segment {
    uint64_t magic;
    uint16_t major;
    uint16_t minor;
    uint32_t crc32c;
    uint8_t uuid[16];
    uint64_t generation; /* never used before in this store */
    uint64_t sequence;   /* lower than that of every record inside */
    uint64_t segment_index;
    uint64_t segment_bytes;
    uint64_t reserved0;
    uint8_t mac[32];
    uint8_t reserved1[3992];
};

/* One record in a footer. Ascending by page_index. */
struct kvf_nvme_entry {
    uint8_t key_id[32];
    uint64_t namespace_id;
    uint64_t namespace_epoch;
    uint64_t record_bytes; /* record page and payload, not padded */
    uint64_t sequence;
    uint32_t page_index; /* of the record page, from the start of the segment */
    uint32_t payload_crc32c;
    uint16_t shard;
    uint16_t shard_count;
    uint32_t plain_bytes; /* of a packed record (codec/entropy_format.h): record_bytes of the plain
                             one; else 0 */
    uint8_t reserved1[16];
};

#define KVF_NVME_ENTRIES_A_PAGE (KVF_NVME_PAGE_BYTES / 96)

/* The last page of a segment. Entries are packed from the start of the first of index_pages pages
 * before it, KVF_NVME_ENTRIES_A_PAGE to a page. Counts only if its generation is that of page 0.
 * MAC: magic, uuid, generation, segment_index, entry_count, index_pages, data_pages, index_hash. */
struct kvf_nvme_footer {
    uint64_t magic;
    uint16_t major;
    uint16_t minor;
    uint32_t crc32c;
    uint8_t uuid[16];
    uint64_t generation;
    uint64_t segment_index;
    uint32_t entry_count;
    uint32_t index_pages;
    uint32_t data_pages; /* page 0 and records */
    uint32_t reserved0;
    uint8_t index_hash[32]; /* BLAKE2b-256, unkeyed, of the index pages as one field */
    uint8_t mac[32];
    uint8_t reserved1[3968];
};

#define KVF_NVME_AT(type, field, offset)                                                           \
    _Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")
#define KVF_NVME_SIZE(type, bytes)                                                                 \
    _Static_assert(sizeof(struct type) == (bytes), #type " has another size")

KVF_NVME_AT(kvf_nvme_super, major, 8);
KVF_NVME_AT(kvf_nvme_super, minor, 10);
KVF_NVME_AT(kvf_nvme_super, crc32c, 12);
KVF_NVME_AT(kvf_nvme_super, flags, 16);
KVF_NVME_AT(kvf_nvme_super, copy, 20);
KVF_NVME_AT(kvf_nvme_super, sequence, 24);
KVF_NVME_AT(kvf_nvme_super, uuid, 32);
KVF_NVME_AT(kvf_nvme_super, store_bytes, 48);
KVF_NVME_AT(kvf_nvme_super, segment_bytes, 56);
KVF_NVME_AT(kvf_nvme_super, segment_count, 64);
KVF_NVME_AT(kvf_nvme_super, created_wall_s, 72);
KVF_NVME_AT(kvf_nvme_super, id_key, 80);
KVF_NVME_AT(kvf_nvme_super, key_check, 112);
KVF_NVME_AT(kvf_nvme_super, reserved, 144);
KVF_NVME_SIZE(kvf_nvme_super, KVF_NVME_PAGE_BYTES);

KVF_NVME_SIZE(kvf_nvme_epoch, 24);
KVF_NVME_AT(kvf_nvme_state, major, 8);
KVF_NVME_AT(kvf_nvme_state, minor, 10);
KVF_NVME_AT(kvf_nvme_state, crc32c, 12);
KVF_NVME_AT(kvf_nvme_state, copy, 16);
KVF_NVME_AT(kvf_nvme_state, sequence, 24);
KVF_NVME_AT(kvf_nvme_state, uuid, 32);
KVF_NVME_AT(kvf_nvme_state, generation_limit, 48);
KVF_NVME_AT(kvf_nvme_state, epoch_last, 56);
KVF_NVME_AT(kvf_nvme_state, credit_bytes, 64);
KVF_NVME_AT(kvf_nvme_state, reserved1, 72);
KVF_NVME_AT(kvf_nvme_state, epochs, 128);
KVF_NVME_AT(kvf_nvme_state, reserved2, 1664);
KVF_NVME_SIZE(kvf_nvme_state, KVF_NVME_PAGE_BYTES);

KVF_NVME_AT(kvf_nvme_segment, major, 8);
KVF_NVME_AT(kvf_nvme_segment, minor, 10);
KVF_NVME_AT(kvf_nvme_segment, crc32c, 12);
KVF_NVME_AT(kvf_nvme_segment, uuid, 16);
KVF_NVME_AT(kvf_nvme_segment, generation, 32);
KVF_NVME_AT(kvf_nvme_segment, sequence, 40);
KVF_NVME_AT(kvf_nvme_segment, segment_index, 48);
KVF_NVME_AT(kvf_nvme_segment, segment_bytes, 56);
KVF_NVME_AT(kvf_nvme_segment, mac, 72);
KVF_NVME_AT(kvf_nvme_segment, reserved1, 104);
KVF_NVME_SIZE(kvf_nvme_segment, KVF_NVME_PAGE_BYTES);

KVF_NVME_AT(kvf_nvme_entry, namespace_id, 32);
KVF_NVME_AT(kvf_nvme_entry, namespace_epoch, 40);
KVF_NVME_AT(kvf_nvme_entry, record_bytes, 48);
KVF_NVME_AT(kvf_nvme_entry, sequence, 56);
KVF_NVME_AT(kvf_nvme_entry, page_index, 64);
KVF_NVME_AT(kvf_nvme_entry, payload_crc32c, 68);
KVF_NVME_AT(kvf_nvme_entry, shard, 72);
KVF_NVME_AT(kvf_nvme_entry, shard_count, 74);
KVF_NVME_AT(kvf_nvme_entry, plain_bytes, 76);
KVF_NVME_AT(kvf_nvme_entry, reserved1, 80);
KVF_NVME_SIZE(kvf_nvme_entry, 96);
_Static_assert(KVF_NVME_ENTRIES_A_PAGE == 42, "42 footer entries a page");

KVF_NVME_AT(kvf_nvme_footer, major, 8);
KVF_NVME_AT(kvf_nvme_footer, minor, 10);
KVF_NVME_AT(kvf_nvme_footer, crc32c, 12);
KVF_NVME_AT(kvf_nvme_footer, uuid, 16);
KVF_NVME_AT(kvf_nvme_footer, generation, 32);
KVF_NVME_AT(kvf_nvme_footer, segment_index, 40);
KVF_NVME_AT(kvf_nvme_footer, entry_count, 48);
KVF_NVME_AT(kvf_nvme_footer, index_pages, 52);
KVF_NVME_AT(kvf_nvme_footer, data_pages, 56);
KVF_NVME_AT(kvf_nvme_footer, index_hash, 64);
KVF_NVME_AT(kvf_nvme_footer, mac, 96);
KVF_NVME_AT(kvf_nvme_footer, reserved1, 128);
KVF_NVME_SIZE(kvf_nvme_footer, KVF_NVME_PAGE_BYTES);

#undef KVF_NVME_AT
#undef KVF_NVME_SIZE

#endif /* KVF_TIERS_NVME_FORMAT_H */
