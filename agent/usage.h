/* SPDX-License-Identifier: Apache-2.0
 *
 * usage.h: the daemon's help and the table of options as text.
 */
#ifndef KVF_AGENT_USAGE_H
#define KVF_AGENT_USAGE_H

#include <stdio.h>

/* What --help prints. */
void kvf_usage_print_help(FILE *out);

/* What --print-options prints: one option a line, tab-separated: name, type, default, least, most,
 * words or empty, text. docs and tests are made from it. */
void kvf_usage_print_options(FILE *out);

#endif /* KVF_AGENT_USAGE_H */
