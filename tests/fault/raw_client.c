/* SPDX-License-Identifier: Apache-2.0
 *
 * raw_client.c: a client without manners.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/fault/raw_client.h"

#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/limits.h"
#include "codec/codec.h"
#include "transport/seqpacket.h"

#define WAIT_MS 60000

void raw_connect(struct raw_client *raw, const char *socket_path)
{
    char text[KVF_ERROR_TEXT_BYTES];

    memset(raw, 0, sizeof(*raw));
    raw->fd = raw->ring_fd = raw->staging_fd = raw->wake_fd = raw->piece_fd = -1;
    raw->next_request = 1;
    assert_int_equal(kvf_seqpacket_connect(socket_path, WAIT_MS, &raw->fd, text, sizeof(text)),
                     KVF_OK);
}

void raw_hello(struct kvf_wire_hello *hello_out)
{
    static struct kvf_codec_plan plan;

    assert_int_equal(kvf_codec_plan_init(&plan, NULL, "bytes"), KVF_OK);
    memset(hello_out, 0, sizeof(*hello_out));
    kvf_proto_head_init(&hello_out->head, KVF_WIRE_HELLO);
    hello_out->version_min = KVF_WIRE_VERSION_MIN;
    hello_out->version_max = KVF_WIRE_VERSION_MAX;
    hello_out->shard_count = 1;
    hello_out->ring_entries = 64;
    hello_out->staging_bytes = 1 << 20;
    hello_out->profile_fp = plan.profile_fp;
    memcpy(hello_out->profile, "bytes", 5);
    memcpy(hello_out->client_name, "raw", 3);
}

void raw_send(struct raw_client *raw, const void *data, size_t bytes, const int *fds,
              uint32_t n_fds)
{
    (void)kvf_seqpacket_send(raw->fd, data, bytes, fds, n_fds); /* it may have hung up already */
}

static bool wait_readable(const struct raw_client *raw, uint32_t timeout_ms)
{
    struct pollfd fd = {.fd = raw->fd, .events = POLLIN};

    return poll(&fd, 1, (int)timeout_ms) == 1;
}

/* The next message that is no wake-up. False: hung up. */
static bool receive(struct raw_client *raw, void *data_out, size_t bytes,
                    struct kvf_seqpacket_message *message_out)
{
    int status;

    do {
        assert_true(wait_readable(raw, WAIT_MS));
        status = kvf_seqpacket_recv(raw->fd, data_out, bytes, message_out);
    } while (status == KVF_EMPTY || (status == KVF_OK && message_out->bytes == 1));
    return status == KVF_OK;
}

bool raw_begin(struct raw_client *raw, const struct kvf_wire_hello *hello)
{
    raw_send(raw, hello, sizeof(*hello), NULL, 0);
    return raw_welcomed(raw);
}

bool raw_is_answered(const struct raw_client *raw, uint32_t timeout_ms)
{
    return wait_readable(raw, timeout_ms);
}

bool raw_welcomed(struct raw_client *raw)
{
    struct kvf_seqpacket_message message;
    struct kvf_wire_piece piece;

    if (!receive(raw, &raw->welcome, sizeof(raw->welcome), &message) || raw->welcome.status < 0) {
        return false;
    }
    assert_int_equal(message.n_fds, 3);
    raw->ring_fd = message.fds[0];
    raw->staging_fd = message.fds[1];
    raw->wake_fd = message.fds[2];
    for (uint32_t i = 0; i < raw->welcome.n_pieces; i++) {
        assert_true(receive(raw, &piece, sizeof(piece), &message));
        assert_int_equal(piece.head.type, KVF_WIRE_PIECE);
        assert_int_equal(message.n_fds, 1);
        kvf_fd_close(&raw->piece_fd);
        raw->piece_fd = message.fds[0];
    }
    raw->ring_base = mmap(NULL, raw->welcome.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                          raw->ring_fd, 0);
    raw->staging = mmap(NULL, raw->welcome.staging_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                        raw->staging_fd, 0);
    assert_true(raw->ring_base != MAP_FAILED && raw->staging != MAP_FAILED);
    memcpy(&raw->header, raw->ring_base, sizeof(raw->header));
    kvf_ring_client_init(&raw->ring, raw->ring_base, &raw->header);
    return true;
}

bool raw_mapped(struct raw_client *raw)
{
    struct kvf_seqpacket_message message;
    struct kvf_wire_note note = {0};

    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    note.connection_id = raw->welcome.connection_id;
    raw_send(raw, &note, sizeof(note), NULL, 0);
    do {
        if (!receive(raw, &note, sizeof(note), &message)) {
            return false;
        }
        kvf_seqpacket_message_close(&message);
    } while (note.head.type != KVF_WIRE_READY);
    return true;
}

void raw_attach(struct raw_client *raw, const char *socket_path)
{
    struct kvf_wire_hello hello;

    raw_connect(raw, socket_path);
    raw_hello(&hello);
    assert_true(raw_begin(raw, &hello));
    assert_true(raw_mapped(raw));
}

bool raw_is_hung_up(struct raw_client *raw, uint32_t timeout_ms)
{
    uint64_t deadline_ns = kvf_now_ns() + timeout_ms * KVF_NS_PER_MS;
    struct kvf_seqpacket_message message;
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];

    while (kvf_now_ns() < deadline_ns) {
        int status;

        if (!wait_readable(raw, timeout_ms < 50 ? timeout_ms : 50)) {
            continue;
        }
        status = kvf_seqpacket_recv(raw->fd, data, sizeof(data), &message);
        if (status == KVF_ERR_DISCONNECTED) {
            return true;
        }
        if (status == KVF_OK) {
            kvf_seqpacket_message_close(&message);
        }
    }
    return false;
}

void raw_key(struct kvf_shm_key *key_out, uint64_t number)
{
    memset(key_out, 0, sizeof(*key_out));
    key_out->key_bytes = 32;
    memcpy(key_out->key, &number, sizeof(number));
    memcpy(key_out->key + 8, "raw", 3);
}

void raw_sqe(struct raw_client *raw, struct kvf_shm_sqe *sqe_out, uint8_t opcode, uint16_t n_keys)
{
    memset(sqe_out, 0, sizeof(*sqe_out));
    sqe_out->opcode = opcode;
    sqe_out->request = raw->next_request++;
    sqe_out->n_keys = n_keys;
    sqe_out->n_entries = n_keys;
    sqe_out->key_first = n_keys != 0 ? raw->ring.key_tail : 0;
}

void raw_wake(struct raw_client *raw)
{
    uint64_t one = 1;

    assert_int_equal(write(raw->wake_fd, &one, sizeof(one)), sizeof(one));
}

/* Word by word, so that a thread of ours that scribbles in the same place is no data race. */
static void copy_words(void *to, const void *from, size_t bytes)
{
    const uint64_t *in = from;
    uint64_t *out = to;

    for (size_t i = 0; i < bytes / sizeof(*in); i++) {
        __atomic_store_n(&out[i], in[i], __ATOMIC_RELAXED);
    }
}

void raw_submit(struct raw_client *raw, const struct kvf_shm_sqe *sqe,
                const struct kvf_shm_key *keys, uint32_t n_entries)
{
    const struct timespec pause = {.tv_nsec = 100 * 1000};
    uint64_t deadline_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;
    struct kvf_ring_client *ring = &raw->ring;

    while (kvf_ring_client_room(ring, n_entries) != KVF_OK && kvf_now_ns() < deadline_ns) {
        struct pollfd fd = {.fd = raw->fd, .events = POLLRDHUP};

        if (poll(&fd, 1, 0) == 1) {
            return; /* it has hung up: there will be no room */
        }
        nanosleep(&pause, NULL);
    }
    for (uint32_t i = 0; i < n_entries; i++) {
        copy_words(&ring->keys[(ring->key_tail + i) % ring->key_entries], &keys[i],
                   sizeof(keys[i]));
    }
    copy_words(&ring->sq[ring->sq_tail % ring->sq_entries], sqe, sizeof(*sqe));
    ring->key_tail += n_entries;
    ring->sq_tail++;
    __atomic_store_n(&ring->indices->sq_tail.value, ring->sq_tail, __ATOMIC_RELEASE);
    raw_wake(raw);
}

bool raw_take(struct raw_client *raw, struct kvf_shm_cqe *cqe_out)
{
    uint64_t deadline_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;
    const struct timespec pause = {.tv_nsec = 100 * 1000};

    while (kvf_ring_client_take(&raw->ring, cqe_out) != KVF_OK) {
        if (kvf_now_ns() > deadline_ns) {
            return false;
        }
        nanosleep(&pause, NULL);
    }
    return true;
}

void raw_close(struct raw_client *raw)
{
    if (raw->ring_base != NULL) {
        munmap(raw->ring_base, raw->welcome.ring_bytes);
        munmap(raw->staging, raw->welcome.staging_bytes);
    }
    kvf_fd_close(&raw->fd);
    kvf_fd_close(&raw->ring_fd);
    kvf_fd_close(&raw->staging_fd);
    kvf_fd_close(&raw->wake_fd);
    kvf_fd_close(&raw->piece_fd);
}
