/* SPDX-License-Identifier: Apache-2.0
 *
 * engines.h: the parts of bench_engines, which puts blocks into a store of this machine, or gets
 * them, so that kvferry and other stores can be compared at the same boundary.
 *
 * Put: the bytes of a block begin in memory of this process, and the store has answered for them.
 * Get: they lie in memory of this process, which is not the one that put them, and each has been
 * read there once. Block i is the same random words in every process; it is stored under a key made
 * of a serial number, its size and i.
 */
#ifndef KVF_TESTS_BENCH_ENGINES_H
#define KVF_TESTS_BENCH_ENGINES_H

#include <stdbool.h>
#include <stdint.h>

struct engines {
    const char *socket_path; /* NULL for copy */
    uint64_t block_bytes;
    uint32_t n_blocks;
    bool is_getter;
    uint8_t *source; /* n_blocks; NULL in a getter */
    uint8_t *target; /* n_blocks; NULL in a putter */
    uint64_t *sums;  /* bench_sum of each block */
    void *store;     /* what open has made */
};

struct engines_key {
    uint64_t words[4];
};

struct engines_store {
    const char *name;
    void (*open)(struct engines *engines);
    /* Both go through blocks[0..n) with at most depth of them in flight. put_all uses source, and
     * get_all fills target and calls engines_read for each block. */
    void (*put_all)(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n,
                    uint32_t depth);
    void (*get_all)(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n,
                    uint32_t depth);
    void (*drop_all)(struct engines *engines, uint64_t serial, const uint32_t *blocks, uint32_t n);
    void (*close)(struct engines *engines);
};

extern const struct engines_store engines_kvferry;
extern const struct engines_store engines_resp; /* Valkey, Redis: anything that speaks RESP */
extern const struct engines_store engines_copy; /* memcpy, for what this machine can do */

struct engines_key engines_key(const struct engines *engines, uint64_t serial, uint32_t block);

uint8_t *engines_source(const struct engines *engines, uint32_t block);
uint8_t *engines_target(const struct engines *engines, uint32_t block);

/* Read a block of target, once; ends the process if the bytes are wrong. */
void engines_read(const struct engines *engines, uint32_t block);

#endif /* KVF_TESTS_BENCH_ENGINES_H */
