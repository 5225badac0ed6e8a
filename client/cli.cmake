# SPDX-License-Identifier: Apache-2.0
#
# cli.cmake: the kvferry command, included by client/CMakeLists.txt.
#
# What inspect and calibrate measure and decide, without arguments and output: for tests too.
add_library(kvf_calibrate STATIC
    calib_choose.c
    calib_forms.c
    calib_measure.c
    calib_search.c
    calibrate.c
    capture.c
    kv_attention.c
    kv_roundtrip.c
    kv_stats.c)
target_link_libraries(kvf_calibrate PUBLIC kvf_codec kvf_base kvf_flags PRIVATE PkgConfig::JANSSON
                      PkgConfig::SODIUM PkgConfig::ZSTD m)

# What K and V are projected with, out of a model's files, and latents of X that hold them.
add_library(kvf_weights STATIC
    weights_file.c
    weights_gguf.c
    weights_safetensors.c
    x_svd.c
    x_svd_file.c)
target_link_libraries(kvf_weights PUBLIC kvf_client kvf_base kvf_flags PRIVATE PkgConfig::JANSSON
                      PkgConfig::SODIUM m)

add_executable(kvferry
    cli_admin.c
    cli_bench.c
    cli_calibrate.c
    cli_captures.c
    cli_data.c
    cli_doctor.c
    cli_evidence.c
    cli_http.c
    cli_inspect.c
    cli_inspect_svg.c
    cli_key.c
    cli_peers.c
    cli_plan.c
    cli_plan_store.c
    cli_profiles.c
    cli_replay.c
    cli_store.c
    cli_svd.c
    cli_top.c
    cli_trace.c
    kvferry.c
    trace_file.c)
# replay runs the daemon's index, admission and eviction: agent/replay.h
target_link_libraries(kvferry PRIVATE kvf_agent kvf_client kvf_calibrate kvf_weights
                      kvf_profile_file kvf_base kvf_flags
                      PkgConfig::CURL PkgConfig::JANSSON PkgConfig::SODIUM m)
install(TARGETS kvferry RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${PROJECT_SOURCE_DIR}/docs/man/kvferry.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
