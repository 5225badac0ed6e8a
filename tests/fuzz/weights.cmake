# SPDX-License-Identifier: Apache-2.0
#
# Files of models, by the first byte of an input.
kvf_add_fuzz(NAME weights ROUNDS 2000 LIBS kvf_weights)
