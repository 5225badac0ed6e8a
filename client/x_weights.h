/* SPDX-License-Identifier: Apache-2.0
 *
 * x_weights.h: what weights for X have to be, on the CPU and on the GPU.
 */
#ifndef KVF_CLIENT_X_WEIGHTS_H
#define KVF_CLIENT_X_WEIGHTS_H

#include "kvferry.h"

/* May K and V be rebuilt with these weights, for the blocks of this client (NULL: of any)? What is
 * wrong is logged, in one line. KVF_OK; KVF_ERR_INVALID, _REFUSED, _MISMATCH as of kvf_x_open. */
KVF_API int kvf_x_weights_check(const struct kvf_client *client,
                                const struct kvf_x_weights *weights, kvf_log_fn log, void *log_arg);

#endif /* KVF_CLIENT_X_WEIGHTS_H */
