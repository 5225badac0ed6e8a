/* SPDX-License-Identifier: Apache-2.0
 *
 * limits.h: named limits and sizes that more than one folder needs and that no client sees.
 *
 * Limits of the protocol are in kvferry.h (enum kvf_limits). A limit of one folder only belongs in
 * that folder.
 */
#ifndef KVF_BASE_LIMITS_H
#define KVF_BASE_LIMITS_H

#define KVF_CACHE_LINE_BYTES 64
#define KVF_PAGE_BYTES       4096
#define KVF_HUGE_PAGE_BYTES  (2u << 20)

/* One log line, terminator included; longer ones are cut and end in "...". */
#define KVF_LOG_LINE_BYTES 1024

/* What a function that explains a refusal may say, terminator included. */
#define KVF_ERROR_TEXT_BYTES 256

#endif /* KVF_BASE_LIMITS_H */
