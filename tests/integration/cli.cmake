# SPDX-License-Identifier: Apache-2.0
#
# The daemon and the command as people use them, and documents that are made from their tables.
kvf_add_test_command(NAME cli LABEL integration TIMEOUT 300
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_cli.py $<TARGET_FILE:kvferryd>
            $<TARGET_FILE:kvferry> $<TARGET_FILE_DIR:example_02_async>)
kvf_add_test_command(NAME starting LABEL integration TIMEOUT 300
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_starting.py
            $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry>)
kvf_add_test_command(NAME replay_cli LABEL integration TIMEOUT 300
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_replay_cli.py
            $<TARGET_FILE:kvferry>)
add_executable(kvferry_test_prompts ${CMAKE_CURRENT_LIST_DIR}/prompts.c)
target_link_libraries(kvferry_test_prompts PRIVATE kvf_test_daemon kvf_client)
kvf_add_test_command(NAME observe LABEL integration TIMEOUT 300
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_observe.py
            $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry> $<TARGET_FILE:kvferry_test_prompts>)
kvf_add_test_command(NAME doctor LABEL integration TIMEOUT 300
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_doctor.py
            $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry>)
kvf_add_test_command(NAME config_docs LABEL integration
    COMMAND ${Python3_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/agent/gen_config_docs.py --check
            --kvferryd $<TARGET_FILE:kvferryd>)
