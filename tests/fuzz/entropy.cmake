# SPDX-License-Identifier: Apache-2.0
#
# Packed records: unpacked, and packed out of any bytes. The corpus is what packing has made of
# small records, behind seven bytes of which six are the page's.
kvf_add_fuzz(NAME entropy ROUNDS 300 LIBS kvf_entropy)
