# SPDX-License-Identifier: Apache-2.0
#
# kvferry-llama. run_llama.py runs it with a real llama.cpp, by hand.
if(KVF_LLAMA)
    add_library(kvf_llama_watch MODULE llama_watch.c)
    target_link_libraries(kvf_llama_watch PRIVATE kvf_flags ${CMAKE_DL_LIBS})
endif()
