/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_say.h: a line for people on stderr. Any thread.
 */
#ifndef KVF_CONNECTORS_LLAMA_SAY_H
#define KVF_CONNECTORS_LLAMA_SAY_H

/* Severities are those of kvf_log_fn. Lines of 3 (debug) are left out. */
void kvf_llama_say(int severity, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif /* KVF_CONNECTORS_LLAMA_SAY_H */
