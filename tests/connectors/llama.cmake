# SPDX-License-Identifier: Apache-2.0
#
# kvferry-llama. Tests run it with a stand-in for llama.cpp, which takes half an hour to build and
# is nobody's package: what it calls of llama.h is in llama/llama.h, and llama/llama.c is an engine
# of its own whose states have llama.cpp's form. run_llama.py runs it with a real one, by hand.
add_library(kvf_llama_standin STATIC llama/llama.c)
target_include_directories(kvf_llama_standin PRIVATE llama)
target_link_libraries(kvf_llama_standin PRIVATE kvf_flags)
kvf_add_llama_server(kvferry-llama-standin ${CMAKE_CURRENT_SOURCE_DIR}/llama kvf_llama_standin)
kvf_add_test_command(NAME connectors_llama LABEL integration ALSO connectors TIMEOUT 600
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/test_llama.py
            $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry-llama-standin>)

if(KVF_LLAMA)
    add_library(kvf_llama_watch MODULE llama_watch.c)
    target_link_libraries(kvf_llama_watch PRIVATE kvf_flags ${CMAKE_DL_LIBS})
endif()
