# SPDX-License-Identifier: Apache-2.0
#
# Requests and sets against a real daemon.
if(TARGET kvf_test_daemon)
    kvf_add_test(NAME requests LABEL conformance TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_requests.c LIBS kvf_test_daemon)
    foreach(name requests_async requests_store requests_client recompress sets)
        kvf_add_test(NAME ${name} LABEL conformance TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c ${CMAKE_CURRENT_LIST_DIR}/outcome.c
            LIBS kvf_test_daemon)
    endforeach()
    # The same from another node: tests/support/daemon.h.
    if(KVF_HAVE_UCX)
        foreach(name requests requests_client)
            kvf_add_test_command(NAME ${name}_remote LABEL conformance TIMEOUT 300
                COMMAND test_${name} ENVIRONMENT KVF_TEST_REMOTE=1 UCX_TLS=tcp)
        endforeach()
    endif()
    kvf_add_test(NAME unsummed LABEL conformance TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_unsummed.c
                ${PROJECT_SOURCE_DIR}/tests/fault/raw_client.c
        LIBS kvf_test_daemon)
    kvf_add_test(NAME report LABEL conformance ALSO metrics TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_report.c
                ${PROJECT_SOURCE_DIR}/tests/fault/raw_client.c
        LIBS kvf_test_daemon m)
    kvf_add_test(NAME x LABEL conformance TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_x.c
                ${PROJECT_SOURCE_DIR}/tests/fault/raw_client.c
        LIBS kvf_test_daemon)
    kvf_add_test(NAME profiles LABEL conformance TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_profiles.c
                ${PROJECT_SOURCE_DIR}/tests/fault/raw_client.c
        LIBS kvf_test_daemon kvf_profile_file)
endif()
