/* SPDX-License-Identifier: Apache-2.0
 *
 * net_piece.h: the pieces of a record that is fetched from another node, put in their places.
 *
 * Pieces may come in any order. Those that come in the order of their offsets, as is usual, are
 * summed while what has just been written is in the cache: whoever judges the record need not read
 * it all again. Whether the sum is the right one is not for this file to say.
 */
#ifndef KVF_TRANSPORT_NET_PIECE_H
#define KVF_TRANSPORT_NET_PIECE_H

#include <stdint.h>

#include "transport/transport_ucx.h"

/* Nothing of it has come. */
void kvf_net_piece_begin(struct kvf_net_fetch *fetch);

/* One piece. KVF_OK; KVF_ERR_PROTOCOL: it is outside of the record, or more than is missing, and
 * nothing was written. All is there when fetch->come_bytes is fetch->record_bytes. */
int kvf_net_piece_take(struct kvf_net_fetch *fetch, uint32_t offset, const void *body,
                       uint32_t bytes);

#endif /* KVF_TRANSPORT_NET_PIECE_H */
