# SPDX-License-Identifier: Apache-2.0
#
# Control messages, ring segments, submissions and completions.
kvf_add_fuzz(NAME wire ROUNDS 3000 LIBS kvf_transport)
