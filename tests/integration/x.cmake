# SPDX-License-Identifier: Apache-2.0
#
# kvferry svd and kvferry plan on models that the test makes.
kvf_add_test_command(NAME x_cli LABEL integration
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/test_x_cli.py
            $<TARGET_FILE:kvferry>)
