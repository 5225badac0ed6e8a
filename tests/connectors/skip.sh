#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Stands in for a Python that has cffi where there is none: the tests are skipped.
echo "no Python with cffi here: apt-get install python3-cffi"
exit 77
