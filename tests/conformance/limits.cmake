# SPDX-License-Identifier: Apache-2.0
#
# What one client, one namespace, one tenant or one burst can cost others.
if(TARGET kvf_test_daemon)
    foreach(name limits budgets tenants)
        kvf_add_test(NAME ${name} LABEL conformance TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c ${CMAKE_CURRENT_LIST_DIR}/room.c
                    ${CMAKE_CURRENT_LIST_DIR}/outcome.c
            LIBS kvf_test_daemon)
    endforeach()
    kvf_add_test(NAME drain LABEL conformance TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_drain.c ${CMAKE_CURRENT_LIST_DIR}/room.c
                ${PROJECT_SOURCE_DIR}/tests/fault/raw_client.c
        LIBS kvf_test_daemon)

    # Sanitizers want to be loaded first.
    if(NOT KVF_SANITIZE)
        add_library(kvf_small_socket MODULE ${CMAKE_CURRENT_LIST_DIR}/small_socket.c)
        target_link_libraries(kvf_small_socket PRIVATE kvf_flags)
        target_compile_definitions(test_tenants
            PRIVATE KVF_TEST_SMALL_SOCKET="$<TARGET_FILE:kvf_small_socket>")
        add_dependencies(test_tenants kvf_small_socket)
    endif()
endif()
