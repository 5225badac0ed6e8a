# SPDX-License-Identifier: Apache-2.0
#
# The configuration file.
kvf_add_fuzz(NAME config ROUNDS 2000 LIBS kvf_agent)
