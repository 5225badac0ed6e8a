/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_daemon.c: see fake_daemon.h.
 */
#include "tests/support/fake_daemon.h"

#include <assert.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fd.h"
#include "base/limits.h"
#include "codec/codec.h"
#include "codec/profile_blob.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"
#include "transport/shm_lease.h"
#include "transport/shm_ring.h"

#define PIECE_BYTES   (4u << 20)
#define BLOCKS_MAX    1024
#define LEASE_ENTRIES 256
#define HELD_MAX      64
#define TICK_MS       2

struct block {
    uint8_t key[64];
    uint16_t key_bytes; /* 0: evicted */
    uint32_t piece;
    uint64_t offset;
    uint64_t record_bytes;
};

struct held {
    struct kvf_shm_sqe sqe;
    struct kvf_shm_key *keys;
};

struct shared_memory {
    int fd;
    uint8_t *base;
    uint64_t bytes;
};

struct kvf_fake_daemon {
    struct kvf_fake_script script;
    pthread_t thread;
    struct kvf_seqpacket_listener listener;

    /* between the two threads */
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int command; /* -1: none */
    bool is_stopping;
    struct kvf_fake_facts facts;

    /* of the daemon's thread: the store */
    struct shared_memory piece;
    uint32_t piece_index;
    uint64_t piece_used;
    struct block blocks[BLOCKS_MAX];
    uint32_t n_blocks;

    /* the connection */
    int socket_fd; /* -1: none */
    int wake_fd;
    bool is_ready;
    bool is_holding;
    bool is_idle;
    bool is_scheduler;
    uint64_t connection_id;
    struct kvf_shm_header header;
    struct shared_memory ring_memory;
    struct shared_memory staging;
    struct kvf_ring_daemon ring;
    uint64_t lease_generations[LEASE_ENTRIES]; /* 0: free */
    uint64_t generation;
    struct held held[HELD_MAX];
    uint32_t n_held;
    struct kvf_shm_key keys[KVF_SHM_REQUEST_ENTRIES_MAX];
};

static void die(const char *what)
{
    fprintf(stderr, "fake daemon: %s\n", what);
    abort();
}

static void memory_create(struct shared_memory *memory, const char *name, uint64_t bytes)
{
    struct kvf_memfd memfd;

    if (kvf_memfd_create(name, bytes, KVF_HUGEPAGES_OFF, &memfd) != KVF_OK) {
        die("no memory file");
    }
    memory->fd = memfd.fd;
    memory->bytes = bytes;
    memory->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.fd, 0);
    if (memory->base == MAP_FAILED) {
        die("cannot map");
    }
}

static void memory_destroy(struct shared_memory *memory)
{
    if (memory->base != NULL) {
        munmap(memory->base, memory->bytes);
        kvf_fd_close(&memory->fd);
        memory->base = NULL;
    }
}

static void piece_create(struct kvf_fake_daemon *d)
{
    memory_create(&d->piece, "fake-piece", PIECE_BYTES);
    if (d->script.fault != KVF_FAKE_PIECE_UNSEALED &&
        kvf_memfd_seal(d->piece.fd, KVF_SEGMENT_SEALS) != KVF_OK) {
        die("cannot seal");
    }
    d->piece_used = 0;
}

/* ----------------------------------------------------------------------------------------------
 * Requests
 */
static void complete(struct kvf_fake_daemon *d, struct kvf_shm_cqe cqe)
{
    if (d->script.on_complete != NULL) {
        d->script.on_complete(d->script.arg, &cqe);
    }
    kvf_ring_daemon_complete(&d->ring, &cqe);
}

static struct block *block_find(struct kvf_fake_daemon *d, const struct kvf_shm_key *key)
{
    for (uint32_t i = 0; i < d->n_blocks; i++) {
        struct block *block = &d->blocks[i];

        if (block->key_bytes == key->key_bytes &&
            memcmp(block->key, key->key, key->key_bytes) == 0) {
            return block;
        }
    }
    return NULL;
}

static uint64_t lease_create(struct kvf_fake_daemon *d)
{
    for (uint32_t i = 0; i < LEASE_ENTRIES; i++) {
        if (d->lease_generations[i] == 0) {
            d->lease_generations[i] = ++d->generation;
            kvf_lease_word_store(&d->ring.leases[i], d->generation, KVF_LEASE_LIVE);
            d->facts.leases++;
            return kvf_lease_id_pack(d->generation, i);
        }
    }
    return 0;
}

static int put_one(struct kvf_fake_daemon *d, const struct kvf_shm_key *key)
{
    uint64_t pages = (key->record_bytes + 4095) / 4096 * 4096;
    struct block *block;

    if (block_find(d, key) != NULL) {
        return KVF_EXISTS;
    }
    if (pages > d->piece.bytes - d->piece_used || d->n_blocks == BLOCKS_MAX) {
        return KVF_ERR_BUSY;
    }
    memcpy(d->piece.base + d->piece_used, d->staging.base + key->stage_offset, key->record_bytes);
    block = &d->blocks[d->n_blocks++];
    memcpy(block->key, key->key, sizeof(block->key));
    block->key_bytes = key->key_bytes;
    block->piece = d->piece_index;
    block->offset = d->piece_used;
    block->record_bytes = key->record_bytes;
    d->piece_used += pages;
    d->facts.blocks++;
    return KVF_OK;
}

static struct kvf_shm_cqe get_one(struct kvf_fake_daemon *d, const struct kvf_shm_key *key)
{
    struct block *block = block_find(d, key);
    struct kvf_shm_cqe cqe = {.status = KVF_MISS};

    if (block == NULL) {
        return cqe;
    }
    cqe.lease = lease_create(d);
    if (cqe.lease == 0) {
        cqe.status = KVF_ERR_BUSY;
        return cqe;
    }
    cqe.status = KVF_OK;
    cqe.tier = KVF_TIER_DRAM;
    cqe.piece = block->piece;
    cqe.offset = block->offset;
    cqe.record_bytes = block->record_bytes;
    return cqe;
}

static struct kvf_shm_cqe one_block(struct kvf_fake_daemon *d, const struct kvf_shm_sqe *sqe,
                                    const struct kvf_shm_key *keys, uint32_t i)
{
    struct kvf_shm_cqe cqe = {0};
    struct block *block;

    switch (sqe->opcode) {
    case KVF_OP_PUT:
        cqe.status = put_one(d, &keys[i]);
        if (cqe.status >= KVF_OK && keys[i].supersedes != 0) {
            block = block_find(d, &keys[keys[i].supersedes - 1]);
            if (block != NULL) {
                block->key_bytes = 0;
            }
        }
        break;
    case KVF_OP_GET:
        cqe = get_one(d, &keys[i]);
        break;
    case KVF_OP_PREFETCH:
        cqe.status = block_find(d, &keys[i]) != NULL ? KVF_OK : KVF_MISS;
        break;
    case KVF_OP_EVICT:
        block = block_find(d, &keys[i]);
        cqe.status = block != NULL ? KVF_OK : KVF_MISS;
        if (block != NULL) {
            block->key_bytes = 0;
        }
        break;
    default: /* STAT: value 100 + counter */
        cqe.offset = 100 + i;
        break;
    }
    return cqe;
}

static void lookup(struct kvf_fake_daemon *d, const struct kvf_shm_sqe *sqe,
                   const struct kvf_shm_key *keys, struct kvf_shm_cqe *cqe)
{
    uint32_t n_chain = sqe->n_keys - sqe->n_tails;
    uint32_t run = 0;

    while (run < n_chain && block_find(d, &keys[run]) != NULL) {
        run++;
    }
    for (uint32_t t = 0; run == n_chain && t < sqe->n_tails && cqe->values[3] == 0; t++) {
        if (block_find(d, &keys[n_chain + t]) != NULL) {
            cqe->values[3] = 1 + t;
        }
    }
    cqe->values[0] = run + (cqe->values[3] != 0); /* the tail is one more chunk of the run */
    cqe->values[1] = cqe->values[0];
    if ((sqe->flags & KVF_SQE_LEASE) != 0 && cqe->values[1] > 0) {
        cqe->lease = lease_create(d);
    }
}

/* Every block completion, then the request's. status below 0: instead of doing the work. */
static void answer(struct kvf_fake_daemon *d, const struct kvf_shm_sqe *sqe,
                   const struct kvf_shm_key *keys, int status)
{
    uint32_t n = kvf_shm_sqe_blocks(sqe);
    struct kvf_shm_cqe end = {.request = sqe->request, .kind = KVF_CQE_REQUEST, .status = status};

    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = n - 1 - k; /* any order is allowed, so the unlikely one is used */
        struct kvf_shm_cqe cqe = {.status = status};

        if (status == KVF_OK) {
            cqe = one_block(d, sqe, keys, i);
        }
        cqe.request = sqe->request;
        cqe.kind = KVF_CQE_BLOCK;
        cqe.index = i;
        end.index += cqe.status == KVF_OK || cqe.status == KVF_EXISTS;
        complete(d, cqe);
    }
    if (sqe->opcode == KVF_OP_LOOKUP && status == KVF_OK) {
        lookup(d, sqe, keys, &end);
    } else if (n > 0 && status == KVF_OK && end.index < n) {
        end.status = end.index == 0 ? KVF_MISS : KVF_PARTIAL;
    }
    complete(d, end);
    d->facts.puts += sqe->opcode == KVF_OP_PUT;
}

static void hold(struct kvf_fake_daemon *d, const struct kvf_shm_sqe *sqe)
{
    struct held *held = &d->held[d->n_held++];

    assert(d->n_held <= HELD_MAX);
    held->sqe = *sqe;
    held->keys = calloc(sqe->n_entries + 1u, sizeof(*held->keys));
    if (held->keys == NULL) {
        die("no memory");
    }
    memcpy(held->keys, d->keys, sqe->n_entries * sizeof(*held->keys));
}

static void held_answer(struct kvf_fake_daemon *d, uint32_t i, int status)
{
    answer(d, &d->held[i].sqe, d->held[i].keys, status);
    free(d->held[i].keys);
    d->held[i] = d->held[--d->n_held];
}

static void handle(struct kvf_fake_daemon *d, const struct kvf_shm_sqe *sqe)
{
    uint32_t index = kvf_lease_id_index(sqe->arg);

    switch (sqe->opcode) {
    case KVF_OP_CANCEL:
        d->facts.cancels++;
        for (uint32_t i = 0; i < d->n_held; i++) {
            if (d->held[i].sqe.request == sqe->arg) {
                held_answer(d, i, KVF_ERR_CANCELED);
                break;
            }
        }
        break;
    case KVF_OP_RELEASE:
        d->facts.releases++;
        if (index < LEASE_ENTRIES &&
            d->lease_generations[index] == kvf_lease_id_generation(sqe->arg)) {
            d->lease_generations[index] = 0;
            kvf_lease_word_store(&d->ring.leases[index], 0, KVF_LEASE_FREE);
            d->facts.leases--;
        }
        break;
    case KVF_OP_REPORT:
        break;
    default:
        if (d->is_holding) {
            hold(d, sqe);
        } else {
            answer(d, sqe, d->keys, KVF_OK);
        }
        break;
    }
}

/* ----------------------------------------------------------------------------------------------
 * The connection
 */
static void connection_close(struct kvf_fake_daemon *d)
{
    for (uint32_t i = 0; i < d->n_held; i++) {
        free(d->held[i].keys);
    }
    d->n_held = 0;
    kvf_fd_close(&d->socket_fd);
    kvf_fd_close(&d->wake_fd);
    memory_destroy(&d->ring_memory);
    memory_destroy(&d->staging);
    memset(d->lease_generations, 0, sizeof(d->lease_generations));
    d->facts.leases = 0;
    d->is_ready = d->is_holding = d->is_idle = false;
}

static void violation(struct kvf_fake_daemon *d, const char *why)
{
    d->facts.violations++;
    snprintf(d->facts.violation, sizeof(d->facts.violation), "%s", why);
    connection_close(d);
}

static void requests_take(struct kvf_fake_daemon *d)
{
    struct kvf_shm_limits limits = {
        .staging_bytes = d->staging.bytes,
        .scheduler = d->is_scheduler,
        .version = KVF_WIRE_VERSION_MAX,
    };
    struct kvf_shm_sqe sqe;
    const char *why = "";

    for (;;) {
        int status = kvf_ring_daemon_take(&d->ring, &limits, &sqe, d->keys, &why);

        if (status == KVF_EMPTY) {
            break;
        }
        if (status != KVF_OK) {
            violation(d, why);
            return;
        }
        handle(d, &sqe);
    }
    if (kvf_ring_daemon_publish(&d->ring)) {
        kvf_seqpacket_wake(d->socket_fd);
    }
}

static uint32_t power_of_two(uint32_t n)
{
    uint32_t power = 1;

    while (power < n) {
        power *= 2;
    }
    return power;
}

static void rings_create(struct kvf_fake_daemon *d, const struct kvf_wire_hello *hello)
{
    uint32_t sq = d->script.sq_entries != 0 ? d->script.sq_entries
                                            : power_of_two(hello->ring_entries);
    uint64_t staging_bytes = d->script.staging_bytes != 0 ? d->script.staging_bytes
                             : hello->staging_bytes != 0  ? hello->staging_bytes
                                                          : 1u << 20;
    struct kvf_shm_header shown;

    if (kvf_shm_layout_init(&d->header, sq, 2 * sq, KVF_SHM_KEY_ENTRIES_MIN, LEASE_ENTRIES) !=
        KVF_OK) {
        die("no layout");
    }
    d->header.connection_id = ++d->connection_id;
    d->header.incarnation = d->script.incarnation != 0 ? d->script.incarnation : 1;
    memory_create(&d->ring_memory, "fake-rings", d->header.segment_bytes);
    memory_create(&d->staging, "fake-staging", staging_bytes);
    kvf_ring_daemon_init(&d->ring, d->ring_memory.base, &d->header);
    shown = d->header;
    switch (d->script.fault) {
    case KVF_FAKE_HEADER_MAGIC:
        shown.magic++;
        break;
    case KVF_FAKE_HEADER_ENTRIES:
        shown.sq_entries--;
        break;
    case KVF_FAKE_HEADER_OFFSET:
        shown.leases_offset = 0xffffffc0u;
        break;
    case KVF_FAKE_HEADER_OVERLAP:
        shown.keys_offset = shown.sq_offset;
        break;
    case KVF_FAKE_HEADER_CONNECTION:
        shown.connection_id++;
        break;
    default:
        break;
    }
    memcpy(d->ring_memory.base, &shown, sizeof(shown));
}

static void profile_choose(struct kvf_fake_daemon *d, const struct kvf_wire_hello *hello,
                           struct kvf_wire_welcome *welcome)
{
    const char *name = d->script.profile != NULL ? d->script.profile : hello->profile;
    const struct kvf_wire_geometry *g = &hello->geometry;
    struct kvf_geometry geometry = kvf_proto_geometry_get(&hello->geometry);
    static struct kvf_codec_plan plan;

    int status = d->script.table != NULL
                     ? kvf_codec_plan_init_table(&plan, &geometry, d->script.table, 0)
                     : kvf_codec_plan_init(&plan, g->kind == KVF_KIND_BYTES ? NULL : &geometry,
                                           name);

    if (d->script.table != NULL) {
        name = d->script.table->name;
    }
    if (status != KVF_OK && d->script.table == NULL) {
        die("a profile that does not fit the client's geometry");
    }
    snprintf(welcome->profile, sizeof(welcome->profile), "%s", name);
    if (d->script.profile_fault == KVF_FAKE_PROFILE_OTHER) {
        welcome->profile[0] = 'x';
    }
    welcome->profile_fp = plan.profile_fp + (d->script.fault == KVF_FAKE_WELCOME_PRINT) +
                          (d->script.profile_fault == KVF_FAKE_PROFILE_PRINT);
    welcome->lossless = plan.lossless;
}

/* PROFILE, with the blob as the script wants it. */
static void profile_send(struct kvf_fake_daemon *d)
{
    enum kvf_fake_profile_fault fault = d->script.profile_fault;
    struct kvf_wire_profile message = {.profile_fp = 1};
    struct shared_memory memory;
    struct kvf_profile_blob *header;
    int pipes[2];

    message.bytes = (kvf_profile_blob_bytes(d->script.table) + 4095) / 4096 * 4096;
    kvf_proto_head_init(&message.head, KVF_WIRE_PROFILE);
    memory_create(&memory, "fake-profile", message.bytes);
    kvf_profile_blob_write(d->script.table, memory.base);
    header = (struct kvf_profile_blob *)(void *)memory.base;
    header->crc32c ^= fault == KVF_FAKE_PROFILE_CORRUPT;
    header->total_bytes += fault == KVF_FAKE_PROFILE_LONG ? 1u << 20 : 0;
    if (fault != KVF_FAKE_PROFILE_UNSEALED &&
        kvf_memfd_seal(memory.fd, KVF_SEGMENT_SEALS) != KVF_OK) {
        die("cannot seal");
    }
    if (pipe2(pipes, O_CLOEXEC) != 0) {
        die("no pipe");
    }
    kvf_seqpacket_send(d->socket_fd, &message, sizeof(message),
                       fault == KVF_FAKE_PROFILE_PIPE ? &pipes[0] : &memory.fd, 1);
    if (fault == KVF_FAKE_PROFILE_TWICE) {
        kvf_seqpacket_send(d->socket_fd, &message, sizeof(message), &memory.fd, 1);
    }
    kvf_fd_close(&pipes[0]);
    kvf_fd_close(&pipes[1]);
    memory_destroy(&memory);
}

static void welcome_send(struct kvf_fake_daemon *d, const struct kvf_wire_hello *hello)
{
    struct kvf_wire_welcome welcome = {
        .version = KVF_WIRE_VERSION_MAX,
        .arena_bytes = d->piece.bytes,
        .namespace_id = 77,
        .n_pieces = 1,
    };
    enum kvf_fake_fault fault = d->script.fault;
    size_t bytes = sizeof(welcome) - (fault == KVF_FAKE_WELCOME_SHORT);
    int fds[4];
    uint32_t n_fds = fault == KVF_FAKE_WELCOME_TWO_FDS    ? 2
                     : fault == KVF_FAKE_WELCOME_FOUR_FDS ? 4
                                                          : 3;

    kvf_proto_head_init(&welcome.head, KVF_WIRE_WELCOME);
    welcome.head.magic += fault == KVF_FAKE_WELCOME_MAGIC;
    welcome.head.bytes = (uint32_t)bytes;
    if (d->script.refuse_status < 0) {
        welcome.status = d->script.refuse_status;
        snprintf(welcome.text, sizeof(welcome.text), "%s", d->script.refuse_text);
        kvf_seqpacket_send(d->socket_fd, &welcome, sizeof(welcome), NULL, 0);
        connection_close(d);
        return;
    }
    rings_create(d, hello);
    profile_choose(d, hello, &welcome);
    if (d->script.welcome_text != NULL) {
        snprintf(welcome.text, sizeof(welcome.text), "%s", d->script.welcome_text);
    }
    if (d->script.table != NULL && d->script.profile_fault != KVF_FAKE_PROFILE_LATE &&
        d->script.profile_fault != KVF_FAKE_PROFILE_MISSING) {
        profile_send(d);
    }
    welcome.incarnation = d->header.incarnation;
    welcome.connection_id = d->header.connection_id;
    welcome.credits = d->header.cq_entries;
    welcome.ring_bytes = d->ring_memory.bytes + (fault == KVF_FAKE_RING_SMALL ? 4096 : 0);
    welcome.staging_bytes = d->staging.bytes + (fault == KVF_FAKE_STAGING_SMALL ? 4096 : 0);
    d->is_scheduler = hello->shard == KVF_SHARD_NONE;
    d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    fds[0] = d->ring_memory.fd;
    fds[1] = d->staging.fd;
    fds[2] = fds[3] = d->wake_fd;
    kvf_seqpacket_send(d->socket_fd, &welcome, bytes, fds, n_fds);
    if (d->script.profile_fault == KVF_FAKE_PROFILE_LATE) {
        profile_send(d);
    }
    if (fault == KVF_FAKE_WELCOME_TWICE) {
        kvf_seqpacket_send(d->socket_fd, &welcome, bytes, fds, n_fds);
    }
}

static void piece_send(struct kvf_fake_daemon *d)
{
    struct kvf_wire_piece message = {.piece = d->piece_index, .bytes = d->piece.bytes};
    int fd = d->piece.fd;
    int pipe_fds[2] = {-1, -1};

    kvf_proto_head_init(&message.head, KVF_WIRE_PIECE);
    if (d->script.fault == KVF_FAKE_PIECE_SMALL) {
        message.bytes += 4096;
    }
    if (d->script.fault == KVF_FAKE_PIECE_PIPE) {
        if (pipe(pipe_fds) != 0) {
            die("no pipe");
        }
        fd = pipe_fds[0];
    }
    kvf_seqpacket_send(d->socket_fd, &message, sizeof(message), &fd, 1);
    if (d->script.fault == KVF_FAKE_PIECE_TWICE) {
        kvf_seqpacket_send(d->socket_fd, &message, sizeof(message), &fd, 1);
    }
    kvf_fd_close(&pipe_fds[0]);
    kvf_fd_close(&pipe_fds[1]);
}

static void ready_send(struct kvf_fake_daemon *d)
{
    struct kvf_wire_note note = {.connection_id = d->header.connection_id};

    kvf_proto_head_init(&note.head, KVF_WIRE_READY);
    kvf_seqpacket_send(d->socket_fd, &note, sizeof(note), NULL, 0);
}

static void on_message(struct kvf_fake_daemon *d, const union kvf_proto_message *message)
{
    switch (message->head.type) {
    case KVF_WIRE_HELLO:
        if (d->script.fault == KVF_FAKE_SILENT) {
            return;
        }
        welcome_send(d, &message->hello);
        if (d->socket_fd >= 0) {
            piece_send(d);
        }
        if (d->script.fault == KVF_FAKE_READY_EARLY) {
            ready_send(d);
        }
        return;
    case KVF_WIRE_MAPPED:
        if (d->script.fault != KVF_FAKE_RING_UNSEALED &&
            kvf_memfd_seal(d->ring_memory.fd, KVF_SEGMENT_SEALS) != KVF_OK) {
            die("cannot seal");
        }
        if (kvf_memfd_seal(d->staging.fd, KVF_SEGMENT_SEALS) != KVF_OK) {
            die("cannot seal");
        }
        ready_send(d);
        d->is_ready = true;
        d->facts.attaches++;
        return;
    default: /* BYE */
        d->facts.byes++;
        connection_close(d);
        return;
    }
}

static void messages_take(struct kvf_fake_daemon *d)
{
    uint8_t buffer[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message datagram;
    union kvf_proto_message message;
    const char *why = "";

    while (d->socket_fd >= 0) {
        int status = kvf_seqpacket_recv(d->socket_fd, buffer, sizeof(buffer), &datagram);

        if (status == KVF_EMPTY) {
            return;
        }
        if (status != KVF_OK) {
            connection_close(d);
            return;
        }
        status = kvf_proto_decode(KVF_PROTO_CLIENT, buffer, datagram.bytes, datagram.n_fds,
                                  &message, &why);
        kvf_seqpacket_message_close(&datagram);
        if (status != KVF_OK) {
            violation(d, why);
            return;
        }
        on_message(d, &message);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Commands and the loop
 */
static void leases_lose(struct kvf_fake_daemon *d)
{
    for (uint32_t i = 0; i < LEASE_ENTRIES; i++) {
        if (d->lease_generations[i] != 0) {
            kvf_lease_word_store(&d->ring.leases[i], d->lease_generations[i], KVF_LEASE_LOST);
        }
    }
    memset(d->piece.base, 0xee, d->piece_used);
}

static void piece_swap(struct kvf_fake_daemon *d)
{
    struct kvf_wire_piece message = {.piece = d->piece_index};

    kvf_proto_head_init(&message.head, KVF_WIRE_PIECE_DROP);
    memory_destroy(&d->piece);
    d->n_blocks = 0;
    d->piece_index++;
    piece_create(d);
    kvf_seqpacket_send(d->socket_fd, &message, sizeof(message), NULL, 0);
    piece_send(d);
}

static void obey(struct kvf_fake_daemon *d, enum kvf_fake_command command)
{
    struct kvf_wire_note note = {.status = KVF_ERR_TIER_OFF, .connection_id = d->connection_id};

    switch (command) {
    case KVF_FAKE_HOLD:
        d->is_holding = true;
        break;
    case KVF_FAKE_LET_GO:
        d->is_holding = false;
        while (d->n_held > 0) {
            held_answer(d, 0, KVF_OK);
        }
        if (d->is_ready && kvf_ring_daemon_publish(&d->ring)) {
            kvf_seqpacket_wake(d->socket_fd);
        }
        break;
    case KVF_FAKE_LOSE_LEASES:
        leases_lose(d);
        break;
    case KVF_FAKE_SWAP_PIECE:
        piece_swap(d);
        break;
    case KVF_FAKE_HANG_UP:
        connection_close(d);
        break;
    case KVF_FAKE_BYE:
        kvf_proto_head_init(&note.head, KVF_WIRE_BYE);
        kvf_seqpacket_send(d->socket_fd, &note, sizeof(note), NULL, 0);
        connection_close(d);
        break;
    case KVF_FAKE_STOP_TAKING:
        d->is_idle = true;
        break;
    case KVF_FAKE_TAKE_AGAIN:
        d->is_idle = false;
        break;
    }
}

static void rest(struct kvf_fake_daemon *d)
{
    struct pollfd fds[3] = {
        {.fd = d->listener.fd, .events = POLLIN},
        {.fd = d->socket_fd, .events = POLLIN},
        {.fd = d->wake_fd, .events = POLLIN},
    };
    uint64_t count;

    if (d->is_ready && !d->is_idle && !kvf_ring_daemon_sleep(&d->ring)) {
        return;
    }
    pthread_mutex_unlock(&d->mutex);
    (void)poll(fds, 3, TICK_MS);
    pthread_mutex_lock(&d->mutex);
    if (d->is_ready) {
        kvf_ring_daemon_awake(&d->ring);
        (void)!read(d->wake_fd, &count, sizeof(count));
    }
}

static void *run(void *arg)
{
    struct kvf_fake_daemon *d = arg;

    pthread_mutex_lock(&d->mutex);
    while (!d->is_stopping) {
        if (d->socket_fd < 0) {
            (void)kvf_seqpacket_accept(&d->listener, &d->socket_fd);
        }
        messages_take(d);
        if (d->is_ready && !d->is_idle) {
            requests_take(d);
        }
        if (d->is_ready && !d->script.is_heartless) {
            kvf_ring_daemon_beat(&d->ring);
        }
        if (d->command >= 0) {
            obey(d, (enum kvf_fake_command)d->command);
            d->command = -1;
            pthread_cond_broadcast(&d->done);
        }
        d->facts.held = d->n_held;
        rest(d);
    }
    connection_close(d);
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

struct kvf_fake_daemon *kvf_fake_daemon_start(const struct kvf_fake_script *script)
{
    struct kvf_seqpacket_listen_options options = {.path = script->socket_path};
    struct kvf_fake_daemon *d = calloc(1, sizeof(*d));
    char text[KVF_ERROR_TEXT_BYTES];

    if (d == NULL) {
        die("no memory");
    }
    d->script = *script;
    d->command = -1;
    d->socket_fd = d->wake_fd = -1;
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->done, NULL);
    if (kvf_seqpacket_listen(&options, &d->listener, text, sizeof(text)) != KVF_OK) {
        die(text);
    }
    piece_create(d);
    if (pthread_create(&d->thread, NULL, run, d) != 0) {
        die("no thread");
    }
    return d;
}

void kvf_fake_daemon_stop(struct kvf_fake_daemon *d)
{
    if (d == NULL) {
        return;
    }
    pthread_mutex_lock(&d->mutex);
    d->is_stopping = true;
    pthread_mutex_unlock(&d->mutex);
    pthread_join(d->thread, NULL);
    kvf_fd_close(&d->listener.fd);
    memory_destroy(&d->piece);
    pthread_cond_destroy(&d->done);
    pthread_mutex_destroy(&d->mutex);
    free(d);
}

void kvf_fake_daemon_command(struct kvf_fake_daemon *d, enum kvf_fake_command command)
{
    pthread_mutex_lock(&d->mutex);
    d->command = (int)command;
    while (d->command >= 0) {
        pthread_cond_wait(&d->done, &d->mutex);
    }
    pthread_mutex_unlock(&d->mutex);
}

struct kvf_fake_facts kvf_fake_daemon_facts(struct kvf_fake_daemon *d)
{
    struct kvf_fake_facts facts;

    pthread_mutex_lock(&d->mutex);
    facts = d->facts;
    pthread_mutex_unlock(&d->mutex);
    return facts;
}
