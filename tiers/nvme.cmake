# SPDX-License-Identifier: Apache-2.0
#
# The drive tier and its I/O forms, added to kvf_tiers; the simulated drive is a library of its own,
# so that the daemon does not carry it.
target_sources(kvf_tiers PRIVATE
    io_engine.c
    io_open.c
    io_threads.c
    io_uring.c
    tier_nvme.c
    tier_nvme_append.c
    tier_nvme_head.c
    tier_nvme_pack.c
    tier_nvme_page.c
    tier_nvme_recover.c
    tier_nvme_segment.c)
target_link_libraries(kvf_tiers PUBLIC kvf_entropy PRIVATE PkgConfig::URING)

add_library(kvf_tiers_sim STATIC io_sim.c)
set_target_properties(kvf_tiers_sim PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(kvf_tiers_sim PUBLIC kvf_flags kvf_base)
