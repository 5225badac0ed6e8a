# SPDX-License-Identifier: Apache-2.0
#
# A real daemon for tests, and blocks to put into it.
if(TARGET kvferryd)
    add_library(kvf_test_daemon STATIC ${CMAKE_CURRENT_LIST_DIR}/daemon.c
                ${CMAKE_CURRENT_LIST_DIR}/blocks.c)
    target_compile_definitions(kvf_test_daemon
                               PRIVATE KVF_TEST_KVFERRYD="$<TARGET_FILE:kvferryd>")
    target_link_libraries(kvf_test_daemon PUBLIC kvf_test_support kvf_client
                          PRIVATE PkgConfig::JANSSON)
    add_dependencies(kvf_test_daemon kvferryd)

    # Sanitizers bring an allocator of their own.
    if(NOT KVF_SANITIZE)
        add_library(kvf_malloc_count MODULE ${CMAKE_CURRENT_LIST_DIR}/malloc_count.c)
        target_link_libraries(kvf_malloc_count PRIVATE kvf_flags)
        target_compile_options(kvf_malloc_count PRIVATE -fno-builtin)
    endif()
endif()
