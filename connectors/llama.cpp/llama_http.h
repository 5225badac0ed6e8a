/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_http.h: the engine over HTTP, in JSON: POST /completion, POST /tokenize, GET /health. A
 * thread a connection, all of libmicrohttpd's.
 */
#ifndef KVF_CONNECTORS_LLAMA_HTTP_H
#define KVF_CONNECTORS_LLAMA_HTTP_H

#include <netinet/in.h>
#include <stdint.h>

#include "connectors/llama.cpp/llama_engine.h"

struct kvf_llama_http;

/* Listen; budget_ms is that of requests that name none. Port 0: any; *port_out is the one taken.
 * The engine stays open for longer. KVF_OK; KVF_ERR_IO with errno; KVF_ERR_NO_MEMORY. */
int kvf_llama_http_start(struct kvf_llama_engine *engine, const struct sockaddr_in *address,
                         uint32_t budget_ms, struct kvf_llama_http **http_out, uint16_t *port_out);

/* After the engine has been told to stop: take no more, let answers out for up to some seconds,
 * end. Accepts NULL. Blocks. */
void kvf_llama_http_stop(struct kvf_llama_http *http);

#endif /* KVF_CONNECTORS_LLAMA_HTTP_H */
