# SPDX-License-Identifier: Apache-2.0
#
# The codecs over the KV cache of two real models.
kvf_add_test(NAME codec_real_kv LABEL unit TIMEOUT 300
             SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_real_kv.c LIBS kvf_codec_fixture kvf_test_kv)
target_compile_definitions(test_codec_real_kv
                           PRIVATE KVF_TEST_KV_FOLDER="${PROJECT_SOURCE_DIR}/tests/data/kv")
