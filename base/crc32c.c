/* SPDX-License-Identifier: Apache-2.0
 *
 * crc32c.c: CRC32C by ISA-L, and the arithmetic to join checksums.
 */
#include "base/crc32c.h"

#include <isa-l/crc.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ISA-L takes the length as int. */
#define CALL_BYTES_MAX ((size_t)1 << 30)

/* Small enough that a piece just copied is still in the first or second level cache when it is
 * summed, large enough that the cost of two calls does not show. */
#define COPY_PIECE_BYTES ((size_t)16 << 10)

/* Copies of this size and more go past the caches: a target that large is not read before it has
 * left them, and lines that are written as a whole need not be read first. `tests/bench/run codec
 * --only crc32c_copy_vs_memcpy` prints what it gives. Stores are of 32 bytes: with those of 16,
 * Intel's processors are slower than without. */
#define STREAM_BYTES_MIN   ((size_t)256 << 10)
#define STREAM_PIECE_BYTES ((size_t)4 << 10)
#define LINE_BYTES         64

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

/* Copy in pieces that are summed where they arrive. */
static uint32_t copy_cached(unsigned char *to, const unsigned char *from, size_t bytes,
                            uint32_t crc)
{
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

#if defined(__x86_64__)

/* The same for whole lines at an aligned target. Each line is read once: what is summed is a copy
 * of the piece, out of the same registers as what goes to the target. */
__attribute__((target("avx2"))) static uint32_t
copy_streamed(unsigned char *to, const unsigned char *from, size_t bytes, uint32_t crc)
{
    _Alignas(LINE_BYTES) unsigned char piece[STREAM_PIECE_BYTES];

    while (bytes > 0) {
        size_t piece_bytes = bytes < sizeof(piece) ? bytes : sizeof(piece);

        for (size_t at = 0; at < piece_bytes; at += LINE_BYTES) {
            const __m256i *line = (const __m256i *)(const void *)(from + at);
            __m256i *line_piece = (__m256i *)(void *)(piece + at);
            __m256i *line_to = (__m256i *)(void *)(to + at);
            __m256i a = _mm256_loadu_si256(line);
            __m256i b = _mm256_loadu_si256(line + 1);

            _mm256_stream_si256(line_to, a);
            _mm256_stream_si256(line_to + 1, b);
            _mm256_store_si256(line_piece, a);
            _mm256_store_si256(line_piece + 1, b);
        }
        crc = kvf_crc32c(crc, piece, piece_bytes);
        to += piece_bytes;
        from += piece_bytes;
        bytes -= piece_bytes;
    }
    _mm_sfence(); /* before any store that tells others of the copy */
    return crc;
}

#endif

uint32_t kvf_crc32c_copy_part(void *dst, const void *src, size_t bytes, size_t whole_bytes,
                              uint32_t crc)
{
    unsigned char *to = dst;
    const unsigned char *from = src;

#if defined(__x86_64__)
    size_t head_bytes = -(uintptr_t)dst % LINE_BYTES;

    if (whole_bytes >= STREAM_BYTES_MIN && bytes >= head_bytes + LINE_BYTES &&
        __builtin_cpu_supports("avx2")) {
        size_t line_bytes = (bytes - head_bytes) / LINE_BYTES * LINE_BYTES;

        crc = copy_cached(to, from, head_bytes, crc);
        crc = copy_streamed(to + head_bytes, from + head_bytes, line_bytes, crc);
        to += head_bytes + line_bytes;
        from += head_bytes + line_bytes;
        bytes -= head_bytes + line_bytes;
    }
#else
    (void)whole_bytes;
#endif
    return copy_cached(to, from, bytes, crc);
}

uint32_t kvf_crc32c_copy(void *dst, const void *src, size_t bytes, uint32_t crc)
{
    return kvf_crc32c_copy_part(dst, src, bytes, bytes, crc);
}
