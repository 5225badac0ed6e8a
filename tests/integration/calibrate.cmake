# SPDX-License-Identifier: Apache-2.0
#
# kvferry inspect and kvferry calibrate on captures, those of tests/data/kv among them.
kvf_add_test_command(NAME calibrate_cli LABEL integration TIMEOUT 300
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_calibrate_cli.py
            $<TARGET_FILE:kvferry>)
