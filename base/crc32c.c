/* SPDX-License-Identifier: Apache-2.0
 *
 * crc32c.c: CRC32C by ISA-L, and the arithmetic to join checksums.
 */
#include "base/crc32c.h"

#include <isa-l/crc.h>
#include <string.h>

/* ISA-L takes the length as int. */
#define CALL_BYTES_MAX ((size_t)1 << 30)

/* Small enough that a piece just copied is still in the first or second level cache when it is
 * summed, large enough that the cost of two calls does not show. */
#define COPY_PIECE_BYTES ((size_t)16 << 10)

/* Reflected form of the Castagnoli polynomial. */
#define POLYNOMIAL 0x82f63b78u

uint32_t kvf_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    const unsigned char *from = data;

    /* crc32_iscsi works on the bare register; the standard value is inverted at both ends. It does
     * not write to its buffer although it takes it without const. */
    crc = ~crc;
    while (bytes > 0) {
        size_t piece_bytes = bytes < CALL_BYTES_MAX ? bytes : CALL_BYTES_MAX;

        crc = crc32_iscsi((unsigned char *)(uintptr_t)from, (int)piece_bytes, crc);
        from += piece_bytes;
        bytes -= piece_bytes;
    }
    return ~crc;
}

/* Product of two polynomials modulo the polynomial, bit 31 holding the coefficient of x^0. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) {
            product ^= b;
        }
        b = (b >> 1) ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

uint32_t kvf_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b)
{
    /* Appending n zero bytes multiplies by x^(8n): square and multiply, beginning with x^8. */
    uint32_t square = 1u << (31 - 8);
    uint32_t power = 1u << 31;

    for (; bytes_b != 0; bytes_b >>= 1) {
        if (bytes_b & 1) {
            power = multiply(power, square);
        }
        square = multiply(square, square);
    }
    return multiply(power, crc_a) ^ crc_b;
}

uint32_t kvf_crc32c_copy(void *dst, const void *src, size_t bytes, uint32_t crc)
{
    unsigned char *to = dst;
    const unsigned char *from = src;

    while (bytes > 0) {
        size_t piece_bytes = bytes < COPY_PIECE_BYTES ? bytes : COPY_PIECE_BYTES;

        memcpy(to, from, piece_bytes);
        crc = kvf_crc32c(crc, to, piece_bytes);
        to += piece_bytes;
        from += piece_bytes;
        bytes -= piece_bytes;
    }
    return crc;
}
