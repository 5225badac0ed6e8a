# SPDX-License-Identifier: Apache-2.0
#
# cli.cmake: the kvferry command, included by client/CMakeLists.txt.
add_executable(kvferry
    cli_admin.c
    cli_bench.c
    cli_data.c
    cli_http.c
    cli_profiles.c
    kvferry.c)
target_link_libraries(kvferry PRIVATE kvf_client kvf_base kvf_flags PkgConfig::CURL
                      PkgConfig::JANSSON PkgConfig::SODIUM)
install(TARGETS kvferry RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${PROJECT_SOURCE_DIR}/docs/man/kvferry.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
