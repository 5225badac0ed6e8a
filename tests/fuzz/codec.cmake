# SPDX-License-Identifier: Apache-2.0
#
# Records: checked, matched and decoded. The corpus is golden records behind two bytes of choice.
kvf_add_fuzz(NAME codec ROUNDS 1500 LIBS kvf_codec)
