# SPDX-License-Identifier: Apache-2.0
#
# Index, leases, admission, names and sessions.
kvf_add_test(NAME index LABEL unit SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_index.c
             LIBS kvf_agent kvf_test_support)
foreach(name lease admit key_name namespace)
    kvf_add_test(NAME ${name} LABEL unit
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c ${CMAKE_CURRENT_LIST_DIR}/core_bed.c
        LIBS kvf_agent kvf_test_support)
endforeach()
kvf_add_test(NAME peer_hints LABEL unit SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_peer_hints.c
             LIBS kvf_agent kvf_test_support)
kvf_add_test(NAME peer_fetch LABEL unit SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_peer_fetch.c
             LIBS kvf_agent kvf_test_support)
kvf_add_test(NAME peer_stream LABEL unit SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_peer_stream.c
             LIBS kvf_agent kvf_test_support)
kvf_add_test(NAME replay LABEL unit SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_replay.c
             LIBS kvf_agent kvf_test_support)
foreach(name session offence)
    kvf_add_test(NAME ${name} LABEL unit
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c
                ${PROJECT_SOURCE_DIR}/tests/fault/raw_client.c
        LIBS kvf_agent kvf_test_support)
endforeach()
