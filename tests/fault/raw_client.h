/* SPDX-License-Identifier: Apache-2.0
 *
 * raw_client.h: a client without the library's manners: every message, index and entry is the
 * test's own.
 */
#ifndef KVF_TESTS_FAULT_RAW_CLIENT_H
#define KVF_TESTS_FAULT_RAW_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/proto.h"
#include "transport/shm_ring.h"

struct raw_client {
    int fd;
    int ring_fd, staging_fd, wake_fd, piece_fd; /* kept open, unlike the library's */
    struct kvf_wire_welcome welcome;
    struct kvf_shm_header header;
    uint8_t *ring_base;
    uint8_t *staging;
    struct kvf_ring_client ring;
    uint64_t next_request;
};

/* Connect to a daemon's socket. Fails the test if nobody listens. */
void raw_connect(struct raw_client *raw, const char *socket_path);

/* A HELLO that is right: opaque bytes, 1 MiB of staging, 64 ring entries. */
void raw_hello(struct kvf_wire_hello *hello_out);

/* Send it and take WELCOME, the descriptors and the pieces; map. False: hung up, or refused, and
 * raw->welcome.status says so. */
bool raw_begin(struct raw_client *raw, const struct kvf_wire_hello *hello);

/* The same in two steps: has the daemon answered what was sent, within timeout_ms? */
bool raw_is_answered(const struct raw_client *raw, uint32_t timeout_ms);
bool raw_welcomed(struct raw_client *raw);

/* Say MAPPED, wait for READY. False: hung up. */
bool raw_mapped(struct raw_client *raw);

/* All of it, which must work. */
void raw_attach(struct raw_client *raw, const char *socket_path);

/* Send bytes as they are. */
void raw_send(struct raw_client *raw, const void *data, size_t bytes, const int *fds,
              uint32_t n_fds);

/* Has the daemon hung up within timeout_ms? Reads and forgets what it sends until then. */
bool raw_is_hung_up(struct raw_client *raw, uint32_t timeout_ms);

/* A right key entry and a right submission with keys [0, n) of such entries, to be spoiled. */
void raw_key(struct kvf_shm_key *key_out, uint64_t number);
void raw_sqe(struct raw_client *raw, struct kvf_shm_sqe *sqe_out, uint8_t opcode, uint16_t n_keys);

/* Write keys and submission into the ring and publish, whatever they are. Waits for room. */
void raw_submit(struct raw_client *raw, const struct kvf_shm_sqe *sqe,
                const struct kvf_shm_key *keys, uint32_t n_entries);

/* Let the daemon look at its ring. */
void raw_wake(struct raw_client *raw);

/* Take the next completion within a second. False: none came. */
bool raw_take(struct raw_client *raw, struct kvf_shm_cqe *cqe_out);

void raw_close(struct raw_client *raw);

#endif /* KVF_TESTS_FAULT_RAW_CLIENT_H */
