# SPDX-License-Identifier: Apache-2.0
#
# Tests of the drive tier and its I/O forms.
add_library(kvf_test_nvme STATIC ${PROJECT_SOURCE_DIR}/tests/unit/tiers/test_nvme_rig.c)
target_link_libraries(kvf_test_nvme PUBLIC kvf_tiers kvf_tiers_sim PkgConfig::CMOCKA)
kvf_add_test(NAME nvme LABEL unit SOURCES test_nvme.c LIBS kvf_test_nvme)
