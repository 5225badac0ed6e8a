/* SPDX-License-Identifier: Apache-2.0
 *
 * ucx_api.h: UCX, opened at run time: a daemon without peers neither needs nor loads it.
 */
#ifndef KVF_TRANSPORT_UCX_API_H
#define KVF_TRANSPORT_UCX_API_H

#include <stddef.h>
#include <ucp/api/ucp.h>

/* Everything that we call. */
#define KVF_UCP_FUNCTIONS(F)                                                                       \
    F(ucp_config_read)                                                                             \
    F(ucp_config_modify)                                                                           \
    F(ucp_config_release)                                                                          \
    F(ucp_get_version)                                                                             \
    F(ucp_init_version)                                                                            \
    F(ucp_cleanup)                                                                                 \
    F(ucp_worker_create)                                                                           \
    F(ucp_worker_destroy)                                                                          \
    F(ucp_worker_query)                                                                            \
    F(ucp_worker_get_efd)                                                                          \
    F(ucp_worker_arm)                                                                              \
    F(ucp_worker_progress)                                                                         \
    F(ucp_worker_set_am_recv_handler)                                                              \
    F(ucp_conn_request_query)                                                                      \
    F(ucp_listener_create)                                                                         \
    F(ucp_listener_query)                                                                          \
    F(ucp_listener_reject)                                                                         \
    F(ucp_listener_destroy)                                                                        \
    F(ucp_ep_create)                                                                               \
    F(ucp_ep_close_nbx)                                                                            \
    F(ucp_am_send_nbx)                                                                             \
    F(ucp_request_check_status)                                                                    \
    F(ucp_request_free)

struct kvf_ucx_api {
#define FUNCTION_MEMBER(name) __typeof__(&name) name;
    KVF_UCP_FUNCTIONS(FUNCTION_MEMBER)
#undef FUNCTION_MEMBER
    __typeof__(&ucs_status_string) ucs_status_string;
    unsigned major, minor, release;
};

/* Open the library (KVFERRY_UCX names another file than libucp.so.0) and find the functions. Sets
 * variables of UCX that have no value in the environment: no handlers of signals, no hooks of
 * malloc and mmap, no lines of its own. Once, before other threads use the environment. KVF_OK;
 * KVF_ERR_UNSUPPORTED: text says why. */
int kvf_ucx_api_open(struct kvf_ucx_api *api, char *text, size_t text_bytes);

#endif /* KVF_TRANSPORT_UCX_API_H */
