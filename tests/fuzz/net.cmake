# SPDX-License-Identifier: Apache-2.0
#
# Messages between nodes, and the stream of blocks.
kvf_add_fuzz(NAME net ROUNDS 2000 LIBS kvf_agent)
