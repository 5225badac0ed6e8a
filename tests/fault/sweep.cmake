# SPDX-License-Identifier: Apache-2.0
#
# The Nth call fails, N rising until a run is clean. Sanitizers bring an allocator of their own.
if(TARGET kvf_test_daemon AND NOT KVF_SANITIZE)
    set(sweep ${CMAKE_CURRENT_LIST_DIR})
    add_library(sweep_preload MODULE ${sweep}/sweep_calls.c)
    add_executable(sweep ${sweep}/sweep.c ${sweep}/sweep_calls.c ${sweep}/sweep_client.c
                   ${sweep}/sweep_daemon.c)
    target_compile_options(sweep_preload PRIVATE -fno-builtin)
    set_source_files_properties(${sweep}/sweep_calls.c PROPERTIES COMPILE_OPTIONS -fno-builtin)
    target_link_libraries(sweep_preload PRIVATE kvf_flags PkgConfig::URING ${CMAKE_DL_LIBS})
    target_link_libraries(sweep PRIVATE kvf_test_daemon PkgConfig::URING ${CMAKE_DL_LIBS})
    target_compile_definitions(sweep
        PRIVATE KVF_TEST_SWEEP_PRELOAD="$<TARGET_FILE:sweep_preload>"
                KVF_TEST_KVFERRYD="$<TARGET_FILE:kvferryd>")
    add_dependencies(sweep sweep_preload)
    # The short ones leave out most N; the full one, a matter of minutes, is `ninja run_sweeps`.
    foreach(scenario client config start recover serve load admin drain)
        kvf_add_test_command(NAME sweep_${scenario} LABEL fault TIMEOUT 120
                             COMMAND sweep --coarse --scenario ${scenario}
                             ENVIRONMENT MALLOC_PERTURB_=165)
    endforeach()
    add_custom_target(run_sweeps COMMAND ${CMAKE_COMMAND} -E env MALLOC_PERTURB_=165
                      $<TARGET_FILE:sweep> DEPENDS sweep USES_TERMINAL)
endif()
