/* SPDX-License-Identifier: Apache-2.0
 *
 * proto_check.h: what proto.c and proto_rings.c share; not for other files.
 */
#ifndef KVF_TRANSPORT_PROTO_CHECK_H
#define KVF_TRANSPORT_PROTO_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvferry.h"

static inline int kvf_proto_bad(const char **why_out, const char *why)
{
    *why_out = why;
    return KVF_ERR_PROTOCOL;
}

static inline bool kvf_proto_power_of_two(uint32_t n)
{
    return n != 0 && (n & (n - 1)) == 0;
}

static inline bool kvf_proto_all_zero(const void *data, size_t bytes)
{
    const uint8_t *p = data;
    uint8_t any = 0;

    for (size_t i = 0; i < bytes; i++) {
        any |= p[i];
    }
    return any == 0;
}

#endif /* KVF_TRANSPORT_PROTO_CHECK_H */
