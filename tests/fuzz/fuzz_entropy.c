/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_entropy.c: packed records from a drive on which anything may lie, checksums included; and
 * records of any bytes to be packed.
 *
 * Input: byte 0 says what is done. 0: u32 plain_bytes, u16 n_streams, then what follows the page of
 * a packed record; it is unpacked, elsewhere and where it lies. Nothing may crash, and nothing
 * outside the record may be written. 1: the bytes are a payload, which is packed, and must come
 * back.
 */
#include "codec/codec.h"
#include "codec/entropy.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

enum {
    HEAD_BYTES = 7,
    PLAIN_BYTES_MAX = 512 << 10,
};

static struct kvf_entropy_packer *packer;
static struct kvf_entropy_unpacker *unpacker;

static uint8_t *memory(size_t bytes)
{
    uint8_t *at = calloc(1, bytes);

    if (at == NULL) {
        abort();
    }
    return at;
}

static size_t padded(size_t bytes)
{
    return (bytes + KVF_ENTROPY_ALIGN_BYTES - 1) / KVF_ENTROPY_ALIGN_BYTES *
           KVF_ENTROPY_ALIGN_BYTES;
}

static void check(int status)
{
    if (status != KVF_OK && status != KVF_ERR_CORRUPT) {
        abort();
    }
}

/* In memory of just the sizes that are promised. */
static void unpack(const uint8_t *data, size_t bytes)
{
    uint32_t plain_bytes;
    uint16_t n_streams;
    size_t packed_bytes = padded(KVF_BLOCK_PAGE_BYTES + bytes - HEAD_BYTES);
    uint8_t *packed = memory(packed_bytes);
    struct kvf_record_page *page = (struct kvf_record_page *)(void *)packed;
    uint8_t *plain;

    memcpy(&plain_bytes, data + 1, sizeof(plain_bytes));
    memcpy(&n_streams, data + 5, sizeof(n_streams));
    memcpy(packed + KVF_BLOCK_PAGE_BYTES, data + HEAD_BYTES, bytes - HEAD_BYTES);
    plain_bytes %= PLAIN_BYTES_MAX;
    page->header = (struct kvf_block_header){.entropy_id = KVF_ENTROPY_RANS,
                                             .n_streams = n_streams,
                                             .total_bytes = packed_bytes,
                                             .plain_bytes = plain_bytes};
    if (kvf_entropy_plain_bytes(page, packed_bytes) != 0) {
        plain = memory(plain_bytes);
        check(kvf_entropy_unpack(unpacker, packed, packed_bytes, plain, plain_bytes));
        free(plain);
        plain = memory(padded(plain_bytes));
        memcpy(plain + padded(plain_bytes) - packed_bytes, packed, packed_bytes);
        check(kvf_entropy_unpack(unpacker, plain + padded(plain_bytes) - packed_bytes, packed_bytes,
                                 plain, plain_bytes));
        free(plain);
    } else {
        check(kvf_entropy_unpack(unpacker, packed, packed_bytes, packed, packed_bytes));
    }
    free(packed);
}

static void pack(const uint8_t *data, size_t bytes)
{
    size_t record_bytes = KVF_BLOCK_PAGE_BYTES + bytes;
    uint8_t *record = memory(record_bytes);
    uint8_t *packed = memory(record_bytes);
    uint8_t *plain = memory(record_bytes);
    uint64_t packed_bytes = 0;

    memcpy(record + KVF_BLOCK_PAGE_BYTES, data, bytes);
    if (kvf_block_describe_bytes((struct kvf_record_page *)(void *)record, data, bytes) != KVF_OK) {
        abort();
    }
    if (kvf_entropy_pack(packer, record, packed, &packed_bytes) == KVF_OK &&
        (kvf_entropy_unpack(unpacker, packed, packed_bytes, plain, record_bytes) != KVF_OK ||
         memcmp(plain, record, record_bytes) != 0)) {
        abort();
    }
    free(record);
    free(packed);
    free(plain);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (packer == NULL) {
        packer = kvf_entropy_packer_create();
        unpacker = kvf_entropy_unpacker_create();
    }
    if (packer == NULL || unpacker == NULL) {
        abort();
    }
    if (bytes < HEAD_BYTES || bytes > PLAIN_BYTES_MAX) {
        return 0;
    }
    if (data[0] % 2 == 0) {
        unpack(data, bytes);
    } else {
        pack(data + 1, bytes - 1);
    }
    return 0;
}
