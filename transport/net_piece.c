/* SPDX-License-Identifier: Apache-2.0
 *
 * net_piece.c: pieces of a record (net_piece.h).
 */
#include "transport/net_piece.h"

#include <string.h>

#include "base/crc32c.h"
#include "transport/proto.h"

void kvf_net_piece_begin(struct kvf_net_fetch *fetch)
{
    fetch->come_bytes = 0;
    fetch->is_summed = true;
    fetch->payload_crc32c = 0;
}

/* Copy what follows all that has come. The page is not summed: it has a sum of its own. */
static void take_next(struct kvf_net_fetch *fetch, const uint8_t *body, uint32_t bytes)
{
    uint8_t *to = (uint8_t *)fetch->record + fetch->come_bytes;
    uint32_t page_bytes = 0; /* of this piece */

    if (fetch->come_bytes < KVF_RECORD_PAGE_BYTES) {
        page_bytes = KVF_RECORD_PAGE_BYTES - fetch->come_bytes;
        page_bytes = page_bytes < bytes ? page_bytes : bytes;
        memcpy(to, body, page_bytes);
    }
    fetch->payload_crc32c = kvf_crc32c_copy_part(to + page_bytes, body + page_bytes,
                                                 bytes - page_bytes, fetch->record_bytes,
                                                 fetch->payload_crc32c);
}

int kvf_net_piece_take(struct kvf_net_fetch *fetch, uint32_t offset, const void *body,
                       uint32_t bytes)
{
    if (offset > fetch->record_bytes || bytes > fetch->record_bytes - offset ||
        bytes > fetch->record_bytes - fetch->come_bytes) {
        return KVF_ERR_PROTOCOL;
    }
    /* one that is early, or comes twice: from then on bytes may be there that no sum has seen, or
     * be others than it has seen */
    fetch->is_summed = fetch->is_summed && offset == fetch->come_bytes;
    if (fetch->is_summed) {
        take_next(fetch, body, bytes);
    } else {
        memcpy((uint8_t *)fetch->record + offset, body, bytes);
    }
    fetch->come_bytes += bytes;
    return KVF_OK;
}
