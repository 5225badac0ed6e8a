# SPDX-License-Identifier: Apache-2.0
#
# Packed records; the golden one is in tests/data/codec.
kvf_add_test(NAME codec_entropy LABEL unit TIMEOUT 300 SOURCES test_entropy.c profile_fixture.c
             LIBS kvf_codec_fixture kvf_entropy)
target_compile_definitions(test_codec_entropy
                           PRIVATE KVF_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/data/codec")
