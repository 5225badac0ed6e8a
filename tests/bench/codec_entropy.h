/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_entropy.h: bench_codec's part on packed records (codec/entropy.h).
 */
#ifndef KVF_TESTS_CODEC_ENTROPY_H
#define KVF_TESTS_CODEC_ENTROPY_H

#include "tests/bench/bench.h"

/* Records to pack, one a slot, and room for so many slots twice. */
struct entropy_records {
    const uint8_t *records;
    uint8_t *packed;
    uint8_t *out;
    size_t slot_bytes;
    uint64_t n_records;
};

/* The pairs <name>_entropy_encode_vs_memcpy and <name>_entropy_decode_vs_memcpy: bytes of plain
 * records a second, both sides. */
void entropy_measure(struct bench_run *run, const char *name,
                     const struct entropy_records *records);

/* The values entropy_saving and entropy_saving_<codec>: what packing saves of records of real K and
 * V, in per cent, pages and padding counted; the lesser of the two models of tests/data/kv. */
void entropy_saving(const struct bench_run *run);

#endif /* KVF_TESTS_CODEC_ENTROPY_H */
