/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_wire.c: everything that is judged before it is believed: messages of both sides, ring
 * headers, submissions with their keys, completions.
 *
 * Byte 0 of an input says what the rest is. What passes must hold what its users rely on: that is
 * checked here a second time, in other words than those of proto.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "transport/proto.h"
#include "transport/shm_ring.h"

enum {
    STAGING_BYTES = 1 << 20
};

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "finding: %s\n", what);
        abort();
    }
}

static void fuzz_message(enum kvf_proto_side sender, const uint8_t *data, size_t bytes,
                         uint32_t n_fds)
{
    union kvf_proto_message message;
    const char *why = NULL;
    int status = kvf_proto_decode(sender, data, bytes, n_fds, &message, &why);

    must(status == KVF_OK || why != NULL, "a refusal says why");
    if (status != KVF_OK) {
        return;
    }
    must(bytes == message.head.bytes, "the length is the stated one");
    must(memcmp(&message, data, bytes) == 0, "decoding changes nothing");
    if (message.head.type == KVF_WIRE_HELLO) {
        const struct kvf_wire_hello *hello = &message.hello;

        must(sender == KVF_PROTO_CLIENT && n_fds == 0, "a client's, without descriptors");
        must(memchr(hello->profile, 0, sizeof(hello->profile)) != NULL, "profile ends");
        must(memchr(hello->label, 0, sizeof(hello->label)) != NULL, "label ends");
        must(memchr(hello->client_name, 0, sizeof(hello->client_name)) != NULL, "name ends");
        must(hello->shard == KVF_SHARD_NONE || hello->shard < hello->shard_count, "shard");
        must(hello->geometry.kind == KVF_KIND_BYTES || (uint64_t)hello->geometry.n_layers *
                                                               hello->geometry.n_heads *
                                                               hello->geometry.chunk_tokens >
                                                           0,
             "geometry has no zero to divide by");
    } else if (message.head.type == KVF_WIRE_WELCOME) {
        must(memchr(message.welcome.text, 0, sizeof(message.welcome.text)) != NULL, "text ends");
        must(message.welcome.status == KVF_OK ? n_fds == 3 : n_fds == 0, "descriptors");
    } else if (message.head.type == KVF_WIRE_PIECE) {
        must(n_fds == 1 && message.piece.bytes <= 1 << 30, "a piece is bounded");
    }
}

static void fuzz_header(const uint8_t *data, size_t bytes)
{
    struct kvf_shm_header header;
    struct kvf_ring_client ring;
    const uintptr_t base = (uintptr_t)1 << 40;
    const char *why = NULL;
    uint64_t end;

    if (bytes < 72) {
        return;
    }
    /* the tail of the page is zero in almost every header that matters */
    memset(&header, 0, sizeof(header));
    memcpy(&header, data, bytes < sizeof(header) ? bytes : sizeof(header));
    if (kvf_shm_header_check(&header, header.segment_bytes, &why) != KVF_OK) {
        must(why != NULL, "a refusal says why");
        return;
    }
    kvf_ring_client_init(&ring, (void *)base, &header); /* addresses only, nothing is read */
    end = (uintptr_t)ring.leases + (uint64_t)ring.lease_entries * sizeof(uint64_t);
    must(end - base <= header.segment_bytes, "leases end inside");
    must((uintptr_t)(ring.keys + ring.key_entries) <= (uintptr_t)ring.leases, "keys before leases");
    must((uintptr_t)(ring.cq + ring.cq_entries) <= (uintptr_t)ring.keys, "completions before keys");
    must((uintptr_t)(ring.sq + ring.sq_entries) <= (uintptr_t)ring.cq, "submissions first");
    must((uintptr_t)ring.indices >= base + sizeof(header), "indices behind the header");
}

/* A submission with keys, as a hostile client would leave them in the ring. */
static void fuzz_submission(const uint8_t *data, size_t bytes)
{
    static struct kvf_shm_key keys[KVF_SHM_REQUEST_ENTRIES_MAX];
    static uint8_t *segment;
    static struct kvf_shm_header header;
    struct kvf_shm_limits limits = {.staging_bytes = STAGING_BYTES};
    struct kvf_ring_daemon ring;
    struct kvf_shm_sqe sqe;
    const char *why = NULL;

    if (bytes < sizeof(sqe)) {
        return;
    }
    if (segment == NULL) {
        must(kvf_shm_layout_init(&header, 4, 2048, 4096, 4) == KVF_OK, "a layout");
        segment = aligned_alloc(4096, header.segment_bytes);
        must(segment != NULL, "memory");
    }
    memset(segment, 0, header.segment_bytes);
    kvf_ring_daemon_init(&ring, segment, &header);
    memcpy(segment + header.sq_offset, data, sizeof(sqe));
    memcpy(segment + header.keys_offset, data + sizeof(sqe),
           bytes - sizeof(sqe) < 64 * sizeof(keys[0]) ? bytes - sizeof(sqe) : 64 * sizeof(keys[0]));
    ring.indices->sq_tail.value = 1;
    if (kvf_ring_daemon_take(&ring, &limits, &sqe, keys, &why) != KVF_OK) {
        must(why != NULL && ring.sq_head == 0 && ring.reserved == 0, "a breach changes nothing");
        return;
    }
    must(ring.reserved == kvf_shm_sqe_credits(&sqe) && ring.sq_head == 1, "accounting");
    must(sqe.n_entries <= KVF_SHM_REQUEST_ENTRIES_MAX && sqe.n_tails <= sqe.n_keys, "counts");
    for (uint32_t i = 0; i < sqe.n_entries; i++) {
        must(keys[i].key_bytes >= 16 && keys[i].key_bytes <= 64, "key length");
        must(keys[i].supersedes <= sqe.n_entries, "supersedes inside");
        if (sqe.opcode == KVF_OP_PUT && i < sqe.n_keys) {
            must(keys[i].record_bytes > KVF_RECORD_PAGE_BYTES &&
                     keys[i].stage_offset <= STAGING_BYTES &&
                     keys[i].record_bytes <= STAGING_BYTES - keys[i].stage_offset,
                 "record inside staging");
        }
    }
}

static void fuzz_completion(const uint8_t *data, size_t bytes)
{
    struct kvf_shm_cqe cqe;
    const char *why = NULL;

    if (bytes < sizeof(cqe)) {
        return;
    }
    memcpy(&cqe, data, sizeof(cqe));
    if (kvf_shm_cqe_check(&cqe, &why) == KVF_OK) {
        must(strcmp(kvf_status_name(cqe.status), "unknown") != 0, "a status that has a name");
    } else {
        must(why != NULL, "a refusal says why");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    switch (data[0]) {
    case 'c':
        fuzz_message(KVF_PROTO_CLIENT, data + 1, bytes - 1, 0);
        break;
    case 'd':
        fuzz_message(KVF_PROTO_DAEMON, data + 1, bytes - 1, 0);
        break;
    case 'p':
        fuzz_message(KVF_PROTO_DAEMON, data + 1, bytes - 1, 1);
        break;
    case 'w':
        fuzz_message(KVF_PROTO_DAEMON, data + 1, bytes - 1, 3);
        break;
    case 'h':
        fuzz_header(data + 1, bytes - 1);
        break;
    case 's':
        fuzz_submission(data + 1, bytes - 1);
        break;
    default:
        fuzz_completion(data + 1, bytes - 1);
        break;
    }
    return 0;
}
