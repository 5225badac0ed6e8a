/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_fixture.h: profiles of a model's own for tests.
 */
#ifndef KVF_TESTS_PROFILE_FIXTURE_H
#define KVF_TESTS_PROFILE_FIXTURE_H

#include "base/random.h"
#include "codec/profile_table.h"

/* Settings of K or V. */
struct kvf_profile_tensor profile_fixture_saw(uint8_t bits, uint8_t flags);
struct kvf_profile_tensor profile_fixture_tq(uint8_t bits, uint8_t flags);
struct kvf_profile_tensor profile_fixture_kivi(uint8_t bits, bool is_v);

/* A table of this geometry without kinds; aborts without memory. */
struct kvf_profile_table *profile_fixture_create(uint32_t n_layers, uint32_t n_heads,
                                                 uint32_t dim_k, uint32_t dim_v);

/* One more kind; its number. */
uint8_t profile_fixture_add(struct kvf_profile_table *table, struct kvf_profile_tensor k,
                            struct kvf_profile_tensor v);

/* The arrays that the kinds of the layers ask for, with random means and random lists. */
void profile_fixture_fill(struct kvf_profile_table *table, struct kvf_random_seeded *random);

/* Five kinds of six layers with all that a file can say; valid. */
struct kvf_profile_table *profile_fixture_rich(struct kvf_random_seeded *random);

#endif /* KVF_TESTS_PROFILE_FIXTURE_H */
