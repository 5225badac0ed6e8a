# SPDX-License-Identifier: Apache-2.0
#
# operator.cmake: the sources of the daemon that people meet: configuration, checks, metrics, admin
# server, command line. main.c is not here: it belongs to the program, not to the library.
set(KVF_AGENT_OPERATOR_SOURCES
    admin.c
    admin_api.c
    admin_events.c
    admin_listen.c
    admin_start.c
    check.c
    config.c
    config_paths.c
    config_peers.c
    config_rules.c
    config_yaml.c
    format_store.c
    metrics.c
    notify.c
    usage.c)
set(KVF_AGENT_OPERATOR_LIBS PkgConfig::YAML PkgConfig::JANSSON PkgConfig::MHD)

install(FILES ${PROJECT_SOURCE_DIR}/docs/man/kvferryd.8 DESTINATION ${CMAKE_INSTALL_MANDIR}/man8)
install(FILES ${PROJECT_SOURCE_DIR}/docs/man/kvferryd.yaml.5
        DESTINATION ${CMAKE_INSTALL_MANDIR}/man5)
install(FILES ${PROJECT_SOURCE_DIR}/docs/man/kvferry.7 DESTINATION ${CMAKE_INSTALL_MANDIR}/man7)
