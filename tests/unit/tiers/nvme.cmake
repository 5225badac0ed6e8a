# SPDX-License-Identifier: Apache-2.0
#
# Tests of the drive tier and its I/O forms.
add_library(kvf_test_nvme STATIC ${PROJECT_SOURCE_DIR}/tests/unit/tiers/test_nvme_rig.c)
target_link_libraries(kvf_test_nvme PUBLIC kvf_tiers kvf_tiers_sim PkgConfig::CMOCKA)
kvf_add_test(NAME nvme LABEL unit SOURCES test_nvme.c LIBS kvf_test_nvme)
kvf_add_test(NAME nvme_pack LABEL unit SOURCES test_nvme_pack.c LIBS kvf_test_nvme)

# One suite over the forms of io.h; each that a container refuses is counted as skipped.
add_executable(test_io_forms test_io_forms.c)
target_link_libraries(test_io_forms PRIVATE kvf_test_nvme kvf_test_support)
foreach(form io_uring-fixed io_uring threads sim)
    kvf_add_test_command(NAME io_form_${form} LABEL conformance COMMAND test_io_forms ${form})
endforeach()
kvf_add_test(NAME nvme_file LABEL unit SOURCES test_nvme_file.c LIBS kvf_test_nvme
             kvf_test_support)
kvf_add_test(NAME nvme_golden LABEL unit SOURCES test_nvme_golden.c LIBS kvf_test_nvme
             kvf_test_support PkgConfig::ZSTD)
target_compile_definitions(test_nvme_golden PRIVATE
                           KVF_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/data/nvme")
kvf_add_test(NAME io_sim LABEL unit SOURCES test_io_sim.c LIBS kvf_tiers_sim)
