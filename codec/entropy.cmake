# SPDX-License-Identifier: Apache-2.0
#
# Packed records. The daemon's own: clients see plain records only, and have no need of zstd.
add_library(kvf_entropy STATIC
    entropy_cut.c
    entropy_pack.c
    entropy_rans.c
    entropy_unpack.c)
set_target_properties(kvf_entropy PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(kvf_entropy PUBLIC kvf_codec PkgConfig::ZSTD)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    target_sources(kvf_entropy PRIVATE entropy_rans_avx2.c entropy_rans_avx512.c)
    set_source_files_properties(entropy_rans_avx2.c PROPERTIES COMPILE_OPTIONS "-mavx2")
    set_source_files_properties(entropy_rans_avx512.c PROPERTIES COMPILE_OPTIONS
        "-mavx2;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl")
endif()
