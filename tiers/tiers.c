/* SPDX-License-Identifier: Apache-2.0
 *
 * tiers.c: every tier of this build. The fault and delay tiers are not here: they are put around
 * one of these.
 */
#include "tiers/tier.h"
#include "tiers/tier_dram.h"
#include "tiers/tier_hbm.h"
#include "tiers/tier_nvme.h"
#include "tiers/tier_remote.h"

const struct kvf_tier_ops *const kvf_tiers[] = {
    &kvf_tier_hbm_ops, &kvf_tier_dram_ops, &kvf_tier_nvme_ops, &kvf_tier_remote_ops, NULL,
};
