/* SPDX-License-Identifier: Apache-2.0
 *
 * parse.h: sizes, durations and numbers as people write them in configuration and on command lines.
 *
 * Each function accepts the whole text or refuses it, and then says in error_out (error_bytes long,
 * KVF_ERROR_TEXT_BYTES is enough) what was wrong and what would do. Outputs are written only on
 * success. Any thread. KVF_OK; KVF_ERR_INVALID.
 */
#ifndef KVF_BASE_PARSE_H
#define KVF_BASE_PARSE_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* "42": decimal digits only, at most 2^64 - 1. */
int kvf_parse_u64(const char *text, uint64_t *value_out, char *error_out, size_t error_bytes);

/* "4096", "512MiB", "1 GiB": a whole number and nothing, B, KiB, MiB, GiB or TiB. "4k", "1G" and
 * "1GB" are refused: people mean both 1000 and 1024 by them. */
int kvf_parse_size(const char *text, uint64_t *bytes_out, char *error_out, size_t error_bytes);

/* "10s", "500ms", "5 min": a whole number and us, ms, s, min or h. Only "0" needs no unit. */
int kvf_parse_duration(const char *text, uint64_t *ns_out, char *error_out, size_t error_bytes);

#endif /* KVF_BASE_PARSE_H */
