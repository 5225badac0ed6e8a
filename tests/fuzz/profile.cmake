# SPDX-License-Identifier: Apache-2.0
#
# Profiles as files and as blobs, by the first byte of an input.
kvf_add_fuzz(NAME profile ROUNDS 2000 LIBS kvf_profile_file)
