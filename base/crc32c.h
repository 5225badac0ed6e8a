/* SPDX-License-Identifier: Apache-2.0
 *
 * crc32c.h: the checksum of payloads, headers, segments and messages (Castagnoli polynomial).
 *
 * Start from 0; the value returned is final and can be fed back to continue, so
 * kvf_crc32c(kvf_crc32c(0, a), b) is the checksum of a followed by b. kvf_crc32c(0, "123456789", 9)
 * is 0xE3069283. Any thread; nothing blocks or fails.
 */
#ifndef KVF_BASE_CRC32C_H
#define KVF_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum continued over bytes of data (which may be NULL if bytes is 0). */
uint32_t kvf_crc32c(uint32_t crc, const void *data, size_t bytes);

/* The checksum of a followed by b, from the checksums of both and the length of b. */
uint32_t kvf_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

/* Copy and continue the checksum in one pass. What is summed is what has arrived at dst: the source
 * may be memory that another process still writes to. The ranges must not overlap. */
uint32_t kvf_crc32c_copy(void *dst, const void *src, size_t bytes, uint32_t crc);

/* The same for a part of a copy of whole_bytes: how large the whole is decides whether the target
 * is written past the caches. */
uint32_t kvf_crc32c_copy_part(void *dst, const void *src, size_t bytes, size_t whole_bytes,
                              uint32_t crc);

#endif /* KVF_BASE_CRC32C_H */
