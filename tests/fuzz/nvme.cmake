# SPDX-License-Identifier: Apache-2.0
#
# Superblock, state, segment headers, footers and records of a store.
kvf_add_fuzz(NAME nvme ROUNDS 150 LIBS kvf_tiers kvf_tiers_sim)
