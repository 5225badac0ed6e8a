/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_proto.h: what may stand in a message around a GPU worker. The layouts are gpu_wire.h; this is
 * their judge, the same one at every end.
 *
 * Checked are lengths, types, descriptors, terminators, enum values, reserved fields and counts;
 * whether a number names something, and whether an address lies in a memory, is for the worker's
 * tables to say. All functions: any thread, never block, no allocation.
 */
#ifndef KVF_TRANSPORT_GPU_PROTO_H
#define KVF_TRANSPORT_GPU_PROTO_H

#include <stddef.h>
#include <stdint.h>

#include "transport/gpu_wire.h"

enum kvf_gpud_side {
    KVF_GPUD_FROM_DAEMON = 1,
    KVF_GPUD_FROM_WORKER = 2, /* to the daemon */
    KVF_GPUD_FROM_ENGINE = 3,
    KVF_GPUD_TO_ENGINE = 4,
};

/* Room for any message, aligned for all of them. */
union kvf_gpud_message {
    uint8_t bytes[KVF_GPUD_MESSAGE_BYTES_MAX];
    struct kvf_gpud_head head;
    struct kvf_gpud_ready ready;
    struct kvf_gpud_attach attach;
    struct kvf_gpud_note note;
    struct kvf_gpud_counts counts;
    struct kvf_gpud_hello hello;
    struct kvf_gpud_welcome welcome;
    struct kvf_gpud_memory memory;
    struct kvf_gpud_register region;
    struct kvf_gpud_plain plain;
    struct kvf_gpud_answer answer;
    struct kvf_gpud_request request;
    struct kvf_gpud_items items;
    struct kvf_gpud_events events;
};

/* Fill a head. bytes: of the whole message. */
void kvf_gpud_head_init(struct kvf_gpud_head *head, enum kvf_gpud_type type, size_t bytes);

/* Judge a private copy of a datagram of data_bytes with n_fds descriptors. KVF_OK;
 * KVF_ERR_PROTOCOL: *why_out names the field, and the connection ends. */
int kvf_gpud_check(enum kvf_gpud_side side, const union kvf_gpud_message *message,
                   size_t data_bytes, uint32_t n_fds, const char **why_out);

/* Bytes of an item with so many pages. */
static inline size_t kvf_gpud_item_bytes(uint32_t n_pages)
{
    return sizeof(struct kvf_gpud_item) + n_pages * sizeof(uint32_t);
}

#endif /* KVF_TRANSPORT_GPU_PROTO_H */
