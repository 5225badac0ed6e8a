/* SPDX-License-Identifier: Apache-2.0
 *
 * usage.h: the daemon's help and the table of options as text.
 */
#ifndef KVF_AGENT_USAGE_H
#define KVF_AGENT_USAGE_H

#include <stdio.h>

#include "kvferry.h"

#define KVF_USAGE_TEXT_(x) #x
#define KVF_USAGE_TEXT(x)  KVF_USAGE_TEXT_(x)

/* "0.1.0", of this daemon. */
#define KVF_AGENT_VERSION                                                                          \
    KVF_USAGE_TEXT(KVF_VERSION_MAJOR)                                                              \
    "." KVF_USAGE_TEXT(KVF_VERSION_MINOR) "." KVF_USAGE_TEXT(KVF_VERSION_PATCH)

/* What --help prints. */
void kvf_usage_print_help(FILE *out);

/* What --print-options prints: one option a line, tab-separated: name, type, default, least, most,
 * words or empty, text. docs and tests are made from it. */
void kvf_usage_print_options(FILE *out);

#endif /* KVF_AGENT_USAGE_H */
