# SPDX-License-Identifier: Apache-2.0
#
# Nodes that find each other by a real Redis or Valkey server, which the test starts.
if(TARGET kvferryd AND TARGET kvferry AND KVF_HAVE_UCX AND KVF_HAVE_HIREDIS)
    kvf_add_test_command(NAME directory LABEL integration TIMEOUT 300
                         COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/test_directory.py
                                 $<TARGET_FILE:kvferryd> $<TARGET_FILE:kvferry>
                         ENVIRONMENT UCX_TLS=tcp,self)
endif()
