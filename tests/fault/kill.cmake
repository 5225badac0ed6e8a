# SPDX-License-Identifier: Apache-2.0
#
# The daemon against its own death, its clients, and other people's files.
if(TARGET kvf_test_daemon)
    add_executable(kill_loop ${CMAKE_CURRENT_LIST_DIR}/kill_loop.c
                   ${CMAKE_CURRENT_LIST_DIR}/kill_model.c)
    target_link_libraries(kill_loop PRIVATE kvf_test_daemon)
    # The short one: 15 kills in a small store. The full one, a matter of minutes, is
    # `ninja run_kill_loop`.
    kvf_add_test_command(NAME kill_loop LABEL fault TIMEOUT 300
        COMMAND kill_loop --store 64MiB --segment 2MiB --dram 32MiB --large 256KiB --kills 15)
    add_custom_target(run_kill_loop COMMAND kill_loop USES_TERMINAL)

    foreach(name hostile_client hostile_memory)
        kvf_add_test(NAME ${name} LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c ${CMAKE_CURRENT_LIST_DIR}/raw_client.c
                    ${CMAKE_CURRENT_LIST_DIR}/neighbour.c
            LIBS kvf_test_daemon)
    endforeach()
    kvf_add_test(NAME restart LABEL fault ALSO package TIMEOUT 300
        SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_restart.c ${CMAKE_CURRENT_LIST_DIR}/raw_client.c
                ${CMAKE_CURRENT_LIST_DIR}/shared_bytes.c
        LIBS kvf_test_daemon)
    foreach(name many_clients leases lifecycle faults)
        kvf_add_test(NAME ${name} LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c LIBS kvf_test_daemon)
    endforeach()
    if(KVF_HAVE_UCX)
        kvf_add_test(NAME peers LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_peers.c LIBS kvf_test_daemon)
        kvf_add_test(NAME peer_sets LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_peer_sets.c LIBS kvf_test_daemon)
        kvf_add_test(NAME resolver LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_resolver.c LIBS kvf_test_daemon)
        kvf_add_test(NAME remote_client LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_remote_client.c
                    ${CMAKE_CURRENT_LIST_DIR}/breaker.c ${CMAKE_CURRENT_LIST_DIR}/raw_client.c
            LIBS kvf_test_daemon)
        kvf_add_test(NAME remote_tenants LABEL fault TIMEOUT 300
            SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_remote_tenants.c
                    ${CMAKE_CURRENT_LIST_DIR}/breaker.c ${CMAKE_CURRENT_LIST_DIR}/raw_client.c
            LIBS kvf_test_daemon)
        kvf_add_test_command(NAME peers_nodes LABEL fault TIMEOUT 300
            COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_peers_nodes.py
                    $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry>)
    endif()
    if(KVF_HAVE_UCX)
        # A short one. The full one, some minutes, is by hand:
        # peers_rounds.py KVFERRYD KVFERRY --clock libkvf_wall_clock.so --rounds 200 --json FILE
        set(clock)
        if(NOT KVF_SANITIZE) # sanitizers want to be loaded first
            add_library(kvf_wall_clock MODULE ${CMAKE_CURRENT_LIST_DIR}/wall_clock.c)
            target_link_libraries(kvf_wall_clock PRIVATE kvf_flags)
            set(clock --clock $<TARGET_FILE:kvf_wall_clock>)
        endif()
        kvf_add_test_command(NAME peers_rounds LABEL fault TIMEOUT 300
            COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/peers_rounds.py
                    $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry> ${clock} --rounds 4)
    endif()
    if(TARGET kvf_malloc_count)
        kvf_add_test(NAME no_malloc LABEL fault SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_no_malloc.c
                     LIBS kvf_test_daemon)
        target_compile_definitions(test_no_malloc
            PRIVATE KVF_TEST_MALLOC_COUNT="$<TARGET_FILE:kvf_malloc_count>")
        add_dependencies(test_no_malloc kvf_malloc_count)
    endif()
endif()
