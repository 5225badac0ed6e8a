# SPDX-License-Identifier: Apache-2.0
#
# kvf_gpu_* from end to end, twice: on the fake driver, everywhere, and on a GPU.
if(TARGET kvf_test_daemon)
    set(kvf_calls_folder ${CMAKE_CURRENT_LIST_DIR})

    # kvf_add_calls_test(NAME name SOURCES ... CLIENT library): gpu_<name> and fake_gpu_<name>.
    function(kvf_add_calls_test)
        cmake_parse_arguments(PARSE_ARGV 0 C "" "NAME;CLIENT" "SOURCES;OPTIONS")
        list(TRANSFORM C_SOURCES PREPEND ${kvf_calls_folder}/)
        kvf_add_test(NAME gpu_${C_NAME} LABEL conformance ALSO gpu
                     SOURCES ${C_SOURCES} ${kvf_calls_folder}/calls.c
                     LIBS ${C_CLIENT} kvf_test_daemon)
        kvf_add_test(NAME fake_gpu_${C_NAME} LABEL conformance
                     SOURCES ${C_SOURCES} ${kvf_calls_folder}/calls.c
                             ${kvf_calls_folder}/fake_image.c
                     LIBS ${C_CLIENT} kvf_test_daemon
                     ENVIRONMENT KVFERRY_CUDA_DRIVER=$<TARGET_FILE:kvf_fake_cuda>)
        add_dependencies(test_fake_gpu_${C_NAME} kvf_fake_cuda)
        foreach(target test_gpu_${C_NAME} test_fake_gpu_${C_NAME})
            target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
            target_link_options(${target} PRIVATE ${C_OPTIONS})
        endforeach()
    endfunction()

    kvf_add_calls_test(NAME calls CLIENT kvf_client_gpu SOURCES test_calls.c)

    kvf_add_calls_test(NAME cancel CLIENT kvf_client_gpu SOURCES test_cancel.c
                       OPTIONS -Wl,--wrap=kvf_request_cancel)

    kvf_add_calls_test(NAME end_to_end CLIENT kvf_client_gpu SOURCES test_end_to_end.c)

    kvf_add_calls_test(NAME own_profile CLIENT kvf_client_gpu SOURCES test_own_profile.c)
    foreach(target test_gpu_own_profile test_fake_gpu_own_profile)
        target_sources(${target} PRIVATE ${kvf_calls_folder}/../unit/codec/profile_fixture.c)
        target_link_libraries(${target} PRIVATE kvf_profile_file)
    endforeach()

    kvf_add_calls_test(NAME x_loop CLIENT kvf_client_gpu SOURCES test_x_loop.c)

    kvf_add_calls_test(NAME x_get CLIENT kvf_client_gpu SOURCES test_x_get.c)
    set_property(TEST fake_gpu_x_get APPEND PROPERTY
                 ENVIRONMENT KVFERRY_CUBLASLT=$<TARGET_FILE:kvf_fake_cuda>)
    foreach(target test_gpu_x_get test_fake_gpu_x_get)
        target_link_libraries(${target} PRIVATE kvf_weights m)
    endforeach()

    kvf_add_calls_test(NAME x_latents CLIENT kvf_client_gpu SOURCES test_x_latents.c)
    set_property(TEST fake_gpu_x_latents APPEND PROPERTY
                 ENVIRONMENT KVFERRY_CUBLASLT=$<TARGET_FILE:kvf_fake_cuda>)
    foreach(target test_gpu_x_latents test_fake_gpu_x_latents)
        target_link_libraries(${target} PRIVATE kvf_weights m)
    endforeach()

    # Path AGENT: workers with kernels of the fake driver, and one whose waits can be taken out.
    get_target_property(gpud_sources kvferryd-gpu SOURCES)
    list(TRANSFORM gpud_sources PREPEND ${PROJECT_SOURCE_DIR}/agent/)
    add_executable(kvferryd-gpu-fake ${gpud_sources} ${kvf_calls_folder}/fake_image.c)
    target_link_libraries(kvferryd-gpu-fake PRIVATE kvf_client_gpu kvf_client kvf_codec
                          kvf_transport kvf_gpu kvf_base)
    kvf_add_calls_test(NAME agent_path CLIENT kvf_client_gpu SOURCES test_agent_path.c)
    target_compile_definitions(test_fake_gpu_agent_path
                               PRIVATE KVF_TEST_WORKER="$<TARGET_FILE:kvferryd-gpu-fake>")
    add_dependencies(test_fake_gpu_agent_path kvferryd-gpu-fake)
    kvf_add_calls_test(NAME agent_lies CLIENT kvf_client_gpu SOURCES test_agent_lies.c)
    target_compile_definitions(test_fake_gpu_agent_lies
                               PRIVATE KVF_TEST_WORKER="$<TARGET_FILE:kvferryd-gpu-fake>")
    add_dependencies(test_fake_gpu_agent_lies kvferryd-gpu-fake)
    kvf_add_calls_test(NAME hbm CLIENT kvf_client_gpu SOURCES test_hbm.c)
    target_compile_definitions(test_gpu_hbm
                               PRIVATE KVF_TEST_WORKER="$<TARGET_FILE:kvferryd-gpu>")
    target_compile_definitions(test_fake_gpu_hbm
                               PRIVATE KVF_TEST_WORKER="$<TARGET_FILE:kvferryd-gpu-fake>")
    add_dependencies(test_fake_gpu_hbm kvferryd-gpu-fake)

    # A second build of the library, whose waits can be taken out.
    get_target_property(sources kvf_client_gpu SOURCES)
    list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/client/)
    add_library(kvf_client_gpu_mutated STATIC ${sources})
    target_compile_definitions(kvf_client_gpu_mutated PRIVATE KVF_MUTATIONS)
    target_link_libraries(kvf_client_gpu_mutated PUBLIC kvf_client kvf_codec kvf_transport kvf_gpu
                          kvf_base kvf_flags)
    kvf_add_calls_test(NAME order CLIENT kvf_client_gpu_mutated SOURCES test_order.c
                       OPTIONS -Wl,--wrap=kvf_lease_release)

    kvf_add_calls_test(NAME x_order CLIENT kvf_client_gpu_mutated SOURCES test_x_order.c)
    set_property(TEST fake_gpu_x_order APPEND PROPERTY
                 ENVIRONMENT KVFERRY_CUBLASLT=$<TARGET_FILE:kvf_fake_cuda>)

    # The same between processes.
    add_executable(kvferryd-gpu-mutated ${gpud_sources} ${kvf_calls_folder}/mutant_env.c
                   ${kvf_calls_folder}/fake_image.c)
    target_compile_definitions(kvferryd-gpu-mutated PRIVATE KVF_MUTATIONS)
    target_link_libraries(kvferryd-gpu-mutated PRIVATE kvf_client_gpu_mutated kvf_client kvf_codec
                          kvf_transport kvf_gpu kvf_base)
    kvf_add_calls_test(NAME agent_order CLIENT kvf_client_gpu_mutated SOURCES test_order.c
                       OPTIONS -Wl,--wrap=kvf_lease_release)
    target_compile_definitions(test_gpu_agent_order PRIVATE KVF_TEST_AGENT)
    target_compile_definitions(test_fake_gpu_agent_order PRIVATE KVF_TEST_AGENT
                               KVF_TEST_WORKER="$<TARGET_FILE:kvferryd-gpu-mutated>")
    add_dependencies(test_fake_gpu_agent_order kvferryd-gpu-mutated)
endif()
