/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_hostile.c: clients that break every rule. Nobody judges what they get; they must not harm the
 * daemon or others. They have namespaces of their own: inside of one, whoever may put may put
 * anything.
 */
#include "tests/sim/sim.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/shm_lease.h"

static uint64_t word(struct sim *sim)
{
    return kvf_random_seeded_next(&sim->random);
}

static void send_garbage(struct sim *sim, struct sim_client *client)
{
    uint8_t data[600];
    size_t bytes = 1 + sim_below(sim, sizeof(data));
    struct kvf_wire_head head;
    int fds[2] = {client->fd, client->fd};

    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)word(sim);
    }
    if (sim_one_in(sim, 2) && bytes >= sizeof(head)) {
        size_t want = kvf_proto_type_bytes((unsigned)sim_between(sim, 1, 7));

        bytes = want;
        kvf_proto_head_init(&head, (enum kvf_wire_type)sim_between(sim, 1, 7));
        memcpy(data, &head, sizeof(head));
    }
    (void)kvf_seqpacket_send(client->fd, data, bytes, fds, (uint32_t)sim_below(sim, 3));
    sim_cover(sim, SIM_COVER_garbage_message);
}

void sim_hostile_handshake(struct sim *sim, struct sim_client *client)
{
    if (sim_one_in(sim, 60)) {
        send_garbage(sim, client);
    }
}

/* One byte of it. (Nothing here asks twice for a random number in one expression: compilers differ
 * in the order.) */
static void spoil(struct sim *sim, void *data, size_t bytes)
{
    size_t at = sim_below(sim, bytes);

    ((uint8_t *)data)[at] = (uint8_t)word(sim);
}

/* A submission that is right in most of its fields. */
static void submit_half_right(struct sim *sim, struct sim_client *client)
{
    static const uint8_t opcodes[] = {KVF_OP_PUT,      KVF_OP_PUT,  KVF_OP_PUT,    KVF_OP_GET,
                                      KVF_OP_GET,      KVF_OP_NOP,  KVF_OP_LOOKUP, KVF_OP_EVICT,
                                      KVF_OP_PREFETCH, KVF_OP_STAT, KVF_OP_CANCEL, KVF_OP_RELEASE};
    struct kvf_shm_sqe sqe = {.opcode = opcodes[sim_below(sim, sizeof(opcodes))]};
    uint32_t n_keys = sqe.opcode == KVF_OP_NOP || sqe.opcode >= KVF_OP_STAT
                          ? 0
                          : 1 + (uint32_t)sim_below(sim, 4);

    if (kvf_ring_client_room(&client->ring, n_keys) != KVF_OK) {
        return;
    }
    for (uint32_t i = 0; i < n_keys; i++) {
        struct kvf_shm_key key = {0};
        uint32_t payload_bytes = 1 + (uint32_t)sim_below(sim, 9000);
        uint64_t offset = sim_below(sim, client->staging_bytes / 4096 - 4) * 4096;
        uint32_t chain = (uint32_t)sim_below(sim, SIM_CHAINS);
        uint32_t chunk = (uint32_t)sim_below(sim, SIM_CHUNKS);

        key.key_bytes = (uint16_t)sim_key(chain, chunk, key.key).bytes;
        if (sqe.opcode == KVF_OP_PUT) {
            struct kvf_record_page page;

            key.stage_offset = offset;
            key.record_bytes = sizeof(page) + payload_bytes;
            (void)kvf_block_describe_bytes(&page, client->staging + offset + sizeof(page),
                                           payload_bytes);
            memcpy(client->staging + offset, &page, sizeof(page));
        }
        if (sim_one_in(sim, 60)) {
            spoil(sim, &key, sizeof(key));
        }
        kvf_ring_client_key_put(&client->ring, i, &key);
    }
    sqe.n_keys = (uint16_t)n_keys;
    sqe.n_entries = (uint16_t)n_keys;
    sqe.request = sqe.opcode >= KVF_OP_CANCEL ? 0 : client->next_request++;
    if (sqe.opcode == KVF_OP_CANCEL) {
        sqe.arg = 1 + sim_below(sim, client->next_request);
    } else if (sqe.opcode == KVF_OP_RELEASE) {
        uint64_t generation = 1 + sim_below(sim, 4);

        sqe.arg = kvf_lease_id_pack(generation, (uint32_t)sim_below(sim, 256));
    }
    sqe.flags = sqe.opcode == KVF_OP_LOOKUP ? KVF_SQE_LEASE : 0;
    if (sim_one_in(sim, 80)) {
        spoil(sim, &sqe, sizeof(sqe));
    }
    kvf_ring_client_push(&client->ring, &sqe);
    (void)kvf_ring_client_publish(&client->ring);
    sim->requests++;
}

/* Write anywhere in what is shared. */
static void scribble(struct sim *sim, struct sim_client *client)
{
    uint8_t *ring = client->ring_map;
    uint64_t keys = (uint64_t)((uint8_t *)client->ring.keys - ring);

    int value = (int)word(sim);

    switch (sim_below(sim, 6)) {
    case 0:
        memset(client->staging + sim_below(sim, client->staging_bytes - 64), value, 64);
        break;
    case 1:
        ring[keys + sim_below(sim, client->ring.key_entries * sizeof(struct kvf_shm_key))] ^= 0x5a;
        sim_cover(sim, SIM_COVER_scribble_keys);
        break;
    case 2:
        memset(ring + keys + 64 * sim_below(sim, client->ring.key_entries * 2ull), value, 64);
        sim_cover(sim, SIM_COVER_scribble_keys);
        break;
    case 3: /* entries of the rings, lease words, the header */
        ring[sim_below(sim, client->ring_bytes)] = (uint8_t)value;
        break;
    case 4:
        if (sim_one_in(sim, 8)) { /* an index: mostly the end of the connection */
            uint32_t index = (uint32_t)value >> sim_below(sim, 32);

            memcpy(ring + sizeof(struct kvf_shm_header) +
                       sim_below(sim, sizeof(struct kvf_shm_indices) / 4) * 4,
                   &index, sizeof(index));
            sim_cover(sim, SIM_COVER_scribble_ring);
        }
        break;
    default:
        client->ring.indices->client_sleeping.value = 1; /* and never awake again */
        break;
    }
}

void sim_hostile_act(struct sim *sim, struct sim_client *client)
{
    uint64_t choice = sim_below(sim, 100);

    if (choice < 60) {
        submit_half_right(sim, client);
    } else if (choice < 75) {
        sim_client_take(sim, client, (uint32_t)sim_below(sim, 40));
    } else if (choice < 98) {
        scribble(sim, client);
    } else if (sim_one_in(sim, 4)) {
        send_garbage(sim, client);
    } else if (sim_one_in(sim, 20)) {
        sim_client_detach(sim, client);
    }
}
