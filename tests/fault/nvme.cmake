# SPDX-License-Identifier: Apache-2.0
#
# The drive tier against drives that fail, lie and lose power.
kvf_add_test(NAME nvme_crash LABEL fault TIMEOUT 300 SOURCES test_nvme_crash.c LIBS kvf_test_nvme
             kvf_test_support)
kvf_add_test(NAME nvme_damage LABEL fault TIMEOUT 300 SOURCES test_nvme_damage.c LIBS kvf_test_nvme
             kvf_test_support)
kvf_add_test(NAME nvme_kill LABEL fault TIMEOUT 300 SOURCES test_nvme_kill.c LIBS kvf_test_nvme
             kvf_test_support)
