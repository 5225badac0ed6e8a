/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz.h: what a fuzz target offers. The same function runs under libFuzzer and under replay.c.
 */
#ifndef KVF_TESTS_FUZZ_H
#define KVF_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Feed one input. Returns 0; aborts on a finding. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif /* KVF_TESTS_FUZZ_H */
