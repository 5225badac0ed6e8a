/* SPDX-License-Identifier: Apache-2.0
 *
 * entropy.h: records to packed records and back, without loss (entropy_format.h), for tiers where
 * bytes are dear and readers rare.
 *
 * A packed record has at least a page and 1/32 less, or there is none: what does not pay stays
 * as it is. It is another form of the same record: unpacking gives the same bytes, page included,
 * but for the store part, which is taken over. Packing a lossy block loses nothing more: its codes
 * are packed, never coded again by another codec, because centring and clipping are not idempotent.
 *
 * Nothing here locks, blocks or logs. Every function may be called from any thread; a packer or
 * unpacker serves one call at a time and allocates, but for what zstd may want, when it is created.
 */
#ifndef KVF_CODEC_ENTROPY_H
#define KVF_CODEC_ENTROPY_H

#include "base/status.h"
#include "codec/block_format.h"
#include "codec/entropy_format.h"

#include <stdbool.h>

enum {
    KVF_ENTROPY_SAVED_SHARE = 32, /* a record is packed if at least 1/32 of it is saved */
};

struct kvf_entropy_packer;
struct kvf_entropy_unpacker;

/* Bytes that create takes, zstd's own left out. */
size_t kvf_entropy_packer_bytes(void);
size_t kvf_entropy_unpacker_bytes(void);

/* NULL: no memory. */
struct kvf_entropy_packer *kvf_entropy_packer_create(void);
void kvf_entropy_packer_destroy(struct kvf_entropy_packer *packer);
struct kvf_entropy_unpacker *kvf_entropy_unpacker_create(void);
void kvf_entropy_unpacker_destroy(struct kvf_entropy_unpacker *unpacker);

/* Is this the page of a packed record? Of a page that kvf_block_check or a MAC vouches for. */
static inline bool kvf_entropy_is_packed(const struct kvf_record_page *page)
{
    return page->header.entropy_id != KVF_ENTROPY_NONE;
}

/* Pack the record of a page that kvf_block_check has passed; its bytes must not change meanwhile.
 * packed_out has room for header.total_bytes and does not overlap. KVF_OK; KVF_ERR_NO_SPACE: it
 * does not pay, packed_out has been written to; KVF_ERR_INVALID: it is packed already. */
int kvf_entropy_pack(struct kvf_entropy_packer *packer, const void *record, void *packed_out,
                     uint64_t *packed_bytes_out);

/* Bytes of the plain record that a packed page of record_bytes stands for; 0: the page is not a
 * packed one, or says what cannot be. */
uint64_t kvf_entropy_plain_bytes(const struct kvf_record_page *page, uint64_t record_bytes);

/* Unpack packed_bytes to record_out, which has room for record_bytes, rounded up to 4096, and may
 * end with packed (entropy_format.h). The bytes are not trusted: whatever they are, no access
 * outside of both. The stored checksum is not looked at; that of the plain payload is. KVF_OK;
 * KVF_ERR_CORRUPT: not a packed record, or not one of a record of record_bytes; record_out may have
 * been written to. */
int kvf_entropy_unpack(struct kvf_entropy_unpacker *unpacker, const void *packed,
                       uint64_t packed_bytes, void *record_out, uint64_t record_bytes);

#endif /* KVF_CODEC_ENTROPY_H */
