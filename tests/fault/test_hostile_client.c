/* SPDX-License-Identifier: Apache-2.0
 *
 * test_hostile_client.c: clients that break every rule of the protocol. Each is disconnected or
 * answered; the daemon lives, and a well-behaved client that puts and gets all the time on a thread
 * of its own never sees a wrong byte or an error.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/fault/neighbour.h"
#include "tests/fault/raw_client.h"
#include "transport/shm_lease.h"

#define HANG_UP_MS 60000

/* --- the handshake ------------------------------------------------------------------------------
 */

static void hello_is_refused(const void *data, size_t bytes, const int *fds, uint32_t n_fds)
{
    struct raw_client raw;

    raw_connect(&raw, the_daemon.socket_path);
    raw_send(&raw, data, bytes, fds, n_fds);
    assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
}

static void test_hello_broken(void **state)
{
    struct kvf_wire_hello right, hello;
    uint8_t large[KVF_WIRE_MESSAGE_BYTES_MAX * 4] = {0};
    uint64_t before = protocol_errors();
    int fds[4];

    (void)state;
    raw_hello(&right);
    for (int i = 0; i < 4; i++) {
        fds[i] = eventfd(0, EFD_CLOEXEC);
    }
    hello_is_refused(&right, 1, NULL, 0);
    hello_is_refused(&right, sizeof(right.head) - 1, NULL, 0);
    hello_is_refused(&right, sizeof(right.head), NULL, 0);
    hello_is_refused(&right, sizeof(right) - 1, NULL, 0);
    memcpy(large, &right, sizeof(right));
    hello_is_refused(large, sizeof(right) + 1, NULL, 0);
    hello_is_refused(large, KVF_WIRE_MESSAGE_BYTES_MAX, NULL, 0);
    hello_is_refused(large, sizeof(large), NULL, 0);
    hello_is_refused(&right, sizeof(right), fds, 1);
    hello_is_refused(&right, sizeof(right), fds, 4);
    hello = right;
    hello.head.magic++;
    hello_is_refused(&hello, sizeof(hello), NULL, 0);
    for (uint16_t type = 0; type < 70; type++) {
        hello = right;
        hello.head.type = type;
        if (type != KVF_WIRE_HELLO && type != KVF_WIRE_BYE) {
            hello_is_refused(&hello, sizeof(hello), NULL, 0);
        }
    }
    hello = right;
    hello.head.bytes--;
    hello_is_refused(&hello, sizeof(hello), NULL, 0);
    hello = right;
    hello.geometry.kind = 200;
    hello_is_refused(&hello, sizeof(hello), NULL, 0);
    hello = right;
    memset(hello.profile, 'x', sizeof(hello.profile)); /* without its zero */
    hello_is_refused(&hello, sizeof(hello), NULL, 0);
    hello = right;
    memset(hello.client_name, '\n', 5);
    hello_is_refused(&hello, sizeof(hello), NULL, 0);
    for (int i = 0; i < 4; i++) {
        close(fds[i]);
    }
    assert_true(protocol_errors() >= before + 20);
    assert_nobody_noticed();
}

/* Right messages with values that cannot be had: a refusal that says why. */
static void test_hello_refused(void **state)
{
    struct kvf_wire_hello hellos[5];
    struct raw_client raw;

    (void)state;
    for (int i = 0; i < 5; i++) {
        raw_hello(&hellos[i]);
    }
    hellos[0].head.version = 7;
    hellos[0].version_min = hellos[0].version_max = 7;
    hellos[1].staging_bytes = KVF_PROTO_STAGING_MAX;
    memcpy(hellos[2].profile, "nothing", 7);
    hellos[3].profile_fp++;
    memcpy(hellos[4].profile, "balanced", 8); /* of opaque bytes */
    for (int i = 0; i < 5; i++) {
        raw_connect(&raw, the_daemon.socket_path);
        assert_false(raw_begin(&raw, &hellos[i]));
        assert_true(raw.welcome.status < 0);
        assert_true(raw.welcome.text[0] != '\0');
        assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
        raw_close(&raw);
    }
    assert_nobody_noticed();
}

/* Bytes of a right HELLO changed at random: refused, hung up, or in. */
static void test_hello_at_random(void **state)
{
    struct kvf_random_seeded random;
    uint32_t rounds = kvf_test_scaled(300);

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    for (uint32_t round = 0; round < rounds; round++) {
        struct kvf_wire_hello hello;
        struct raw_client raw;
        uint64_t n = 1 + kvf_random_seeded_next(&random) % 4;

        raw_hello(&hello);
        while (n-- > 0) {
            uint64_t word = kvf_random_seeded_next(&random);

            ((uint8_t *)&hello)[word % sizeof(hello)] = (uint8_t)(word >> 32);
        }
        raw_connect(&raw, the_daemon.socket_path);
        if (raw_begin(&raw, &hello) && round % 2 == 0) {
            (void)raw_mapped(&raw);
        }
        raw_close(&raw);
    }
    assert_nobody_noticed();
}

static void test_handshake_out_of_order(void **state)
{
    struct kvf_wire_note note = {0};
    struct kvf_wire_hello hello;
    struct raw_client raw;

    (void)state;
    raw_hello(&hello);
    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    hello_is_refused(&note, sizeof(note), NULL, 0);
    /* HELLO twice */
    raw_connect(&raw, the_daemon.socket_path);
    raw_send(&raw, &hello, sizeof(hello), NULL, 0);
    raw_send(&raw, &hello, sizeof(hello), NULL, 0);
    assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
    /* MAPPED of another connection */
    raw_connect(&raw, the_daemon.socket_path);
    assert_true(raw_begin(&raw, &hello));
    note.connection_id = raw.welcome.connection_id + 1;
    raw_send(&raw, &note, sizeof(note), NULL, 0);
    assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
    /* MAPPED twice; a descriptor with it */
    raw_attach(&raw, the_daemon.socket_path);
    note.connection_id = raw.welcome.connection_id;
    raw_send(&raw, &note, sizeof(note), NULL, 0);
    assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
    raw_connect(&raw, the_daemon.socket_path);
    assert_true(raw_begin(&raw, &hello));
    note.connection_id = raw.welcome.connection_id;
    raw_send(&raw, &note, sizeof(note), &raw.ring_fd, 1);
    assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
    /* gone in the middle */
    raw_connect(&raw, the_daemon.socket_path);
    raw_send(&raw, &hello, sizeof(hello), NULL, 0);
    raw_close(&raw);
    assert_nobody_noticed();
}

static uint32_t daemon_fds(void)
{
    char path[64];
    uint32_t n = 0;
    DIR *folder;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)the_daemon.process.pid);
    folder = opendir(path);
    assert_non_null(folder);
    while (readdir(folder) != NULL) {
        n++;
    }
    closedir(folder);
    return n;
}

static bool has_fds(void *arg)
{
    return daemon_fds() <= *(uint32_t *)arg;
}

/* Descriptors that nobody asked for, in every state: none of them stays. */
static void test_unexpected_fds(void **state)
{
    struct kvf_wire_note note = {0};
    struct kvf_wire_hello hello;
    struct raw_client raw;
    uint32_t before;
    int fds[4];

    (void)state;
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 1, 60000));
    before = daemon_fds() + 1; /* whoever asked last may not be closed yet */
    for (int i = 0; i < 4; i++) {
        fds[i] = eventfd(0, EFD_CLOEXEC);
    }
    raw_hello(&hello);
    for (uint32_t round = 0; round < 100; round++) {
        uint32_t n_fds = 1 + round / 4 % 4;

        raw_connect(&raw, the_daemon.socket_path);
        if (round % 4 == 0) {
            raw_send(&raw, &hello, sizeof(hello), fds, n_fds);
        } else if (round % 4 == 1) {
            raw_send(&raw, "x", 1, fds, n_fds);
        } else {
            assert_true(raw_begin(&raw, &hello));
            if (round % 4 == 3) {
                assert_true(raw_mapped(&raw));
            }
            kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
            note.connection_id = raw.welcome.connection_id;
            raw_send(&raw, &note, sizeof(note), fds, n_fds);
        }
        assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
        raw_close(&raw);
    }
    for (int i = 0; i < 4; i++) {
        close(fds[i]);
    }
    assert_true(kvf_test_wait_until(has_fds, &before, 60000));
    assert_nobody_noticed();
}

/* What the daemon watches. */
static uint32_t daemon_watches(void)
{
    uint32_t n = 0;

    for (int fd = 0; fd < 1024; fd++) {
        char path[64], line[200];
        FILE *file;

        snprintf(path, sizeof(path), "/proc/%d/fdinfo/%d", (int)the_daemon.process.pid, fd);
        file = fopen(path, "r");
        while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
            n += strncmp(line, "tfd:", 4) == 0;
        }
        if (file != NULL) {
            fclose(file);
        }
    }
    return n;
}

static bool has_watches(void *arg)
{
    return daemon_watches() <= *(uint32_t *)arg;
}

/* READY cannot be sent. The client keeps its end of what the daemon watched. */
static void test_ready_is_not_wanted(void **state)
{
    enum {
        N = 20
    };
    struct raw_client raws[N];
    struct kvf_wire_note note = {0};
    struct kvf_wire_hello hello;
    uint32_t before;

    (void)state;
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 1, 60000));
    before = daemon_watches() + 1; /* whoever asked last */
    raw_hello(&hello);
    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    for (uint32_t i = 0; i < N; i++) {
        raw_connect(&raws[i], the_daemon.socket_path);
        assert_true(raw_begin(&raws[i], &hello));
        assert_int_equal(shutdown(raws[i].fd, SHUT_RD), 0);
        note.connection_id = raws[i].welcome.connection_id;
        raw_send(&raws[i], &note, sizeof(note), NULL, 0);
    }
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 1, 60000));
    assert_true(kvf_test_wait_until(has_watches, &before, 5000));
    for (uint32_t i = 0; i < N; i++) {
        raw_close(&raws[i]);
    }
    assert_nobody_noticed();
}

/* A namespace of its own for each attach: the table is for those who use it. */
static void test_namespaces_without_end(void **state)
{
    uint32_t rounds = kvf_test_scaled(600);

    (void)state;
    for (uint32_t round = 0; round < rounds; round++) {
        struct kvf_wire_hello hello;
        struct raw_client raw;

        raw_hello(&hello);
        memcpy(hello.label, "without end", 11);
        memcpy(hello.weights_digest, &round, sizeof(round));
        raw_connect(&raw, the_daemon.socket_path);
        if (raw_begin(&raw, &hello)) {
            (void)raw_mapped(&raw);
        }
        raw_close(&raw);
    }
    kvf_close(kvf_test_client_open(&the_daemon, "the next honest one"));
    assert_nobody_noticed();
}

/* Never says HELLO, or never MAPPED: not for ever. */
static void test_handshake_stalls(void **state)
{
    struct kvf_wire_hello hello;
    struct raw_client silent, unmapped;

    (void)state;
    raw_hello(&hello);
    raw_connect(&silent, the_daemon.socket_path);
    raw_connect(&unmapped, the_daemon.socket_path);
    assert_true(raw_begin(&unmapped, &hello));
    assert_true(raw_is_hung_up(&silent, HANG_UP_MS));
    assert_true(raw_is_hung_up(&unmapped, HANG_UP_MS));
    raw_close(&silent);
    raw_close(&unmapped);
    assert_nobody_noticed();
}

/* --- the rings ----------------------------------------------------------------------------------
 */

#define N_FIELD_SPOILS 24
#define N_SQE_SPOILS   (N_FIELD_SPOILS + 5)

/* One field of a right get. */
static void spoil_sqe_field(struct kvf_shm_sqe *sqe, int how)
{
    const struct {
        void *field;
        size_t bytes;
        uint64_t value;
    } fields[] = {
        {&sqe->request, sizeof(sqe->request), 0},
        {&sqe->opcode, 1, 0},
        {&sqe->opcode, 1, KVF_OP_REPORT},
        {&sqe->opcode, 1, KVF_OP_REPORT + 1},
        {&sqe->opcode, 1, 255},
        {&sqe->opcode, 1, KVF_OP_NOP}, /* with keys */
        {&sqe->opcode, 1, KVF_OP_CANCEL},
        {&sqe->opcode, 1, KVF_OP_PUT}, /* of a record that is not */
        {&sqe->flags, 1, 0xff},
        {&sqe->flags, 1, KVF_SQE_DURABLE}, /* of a get */
        {&sqe->n_keys, 2, 0},
        {&sqe->n_keys, 2, KVF_REQUEST_KEYS_MAX + 1},
        {&sqe->n_keys, 2, 0xffff},
        {&sqe->n_entries, 2, 0},
        {&sqe->n_entries, 2, 0xffff},
        {&sqe->n_tails, 2, 1},
        {&sqe->key_first, 4, 1},
        {&sqe->key_first, 4, UINT32_MAX},
        {&sqe->depth, 4, 1},
        {&sqe->ttl_s, 4, 1},
        {&sqe->priority, 1, 1},
        {&sqe->reserved0[3], 1, 1},
        {&sqe->reserved1[15], 1, 1},
        {&sqe->arg, 8, 1},
    };

    static_assert(sizeof(fields) / sizeof(fields[0]) == N_FIELD_SPOILS, "all of them are tried");
    memcpy(fields[how].field, &fields[how].value, fields[how].bytes);
}

/* Several at once. */
static void spoil_sqe(struct raw_client *raw, struct kvf_shm_sqe *sqe, int how)
{
    switch (how - N_FIELD_SPOILS) {
    case 0:
        sqe->opcode = KVF_OP_LOOKUP;
        sqe->n_tails = 2;
        break;
    case 1:
        sqe->opcode = KVF_OP_LOOKUP;
        sqe->flags = KVF_SQE_NO_WRITE;
        break;
    case 2:
        sqe->opcode = KVF_OP_PUT;
        sqe->flags = KVF_SQE_DURABLE | KVF_SQE_NO_WRITE;
        break;
    case 3:
        sqe->n_keys = KVF_REQUEST_KEYS_MAX; /* a right one, had it credits */
        sqe->n_entries = KVF_REQUEST_KEYS_MAX;
        raw->ring.key_tail += KVF_REQUEST_KEYS_MAX - 1;
        break;
    case 4:
        sqe->opcode = KVF_OP_PUT;
        sqe->priority = 200;
        break;
    default:
        spoil_sqe_field(sqe, how);
        break;
    }
}

static void test_sqe_wild(void **state)
{
    (void)state;
    for (int how = 0; how < N_SQE_SPOILS; how++) {
        uint64_t before = protocol_errors();
        struct raw_client raw;
        struct kvf_shm_sqe sqe;
        struct kvf_shm_key key;

        raw_attach(&raw, the_daemon.socket_path);
        raw_sqe(&raw, &sqe, KVF_OP_GET, 1);
        raw_key(&key, 1);
        spoil_sqe(&raw, &sqe, how);
        raw_submit(&raw, &sqe, &key, 1);
        if (!raw_is_hung_up(&raw, HANG_UP_MS)) {
            fail_msg("submission %d was taken", how);
        }
        raw_close(&raw);
        assert_int_equal(protocol_errors(), before + 1);
    }
    assert_nobody_noticed();
}

static void spoil_key(struct raw_client *raw, struct kvf_shm_key *key, int how)
{
    switch (how) {
    case 0:
        key->key_bytes = 0;
        break;
    case 1:
        key->key_bytes = 15;
        break;
    case 2:
        key->key_bytes = 65;
        break;
    case 3:
        key->key_bytes = 0xffff;
        break;
    case 4:
        key->key[63] = 1;
        break;
    case 5:
        key->supersedes = 1;
        break;
    case 6:
        key->supersedes = 2;
        break;
    case 7:
        key->supersedes = 0xffff;
        break;
    case 8:
        key->stage_offset = 1;
        break;
    case 9:
        key->stage_offset = 4095;
        break;
    case 10:
        key->stage_offset = raw->welcome.staging_bytes;
        break;
    case 11:
        key->stage_offset = UINT64_MAX - 4095;
        break;
    case 12:
        key->stage_offset = raw->welcome.staging_bytes - 4096;
        break;
    case 13:
        key->record_bytes = 0;
        break;
    case 14:
        key->record_bytes = 4096;
        break;
    case 15:
        key->record_bytes = raw->welcome.staging_bytes + 1;
        break;
    case 16:
        key->record_bytes = UINT64_MAX;
        break;
    case 17:
        key->record_bytes = KVF_PROTO_RECORD_MAX + 1;
        break;
    default:
        key->reserved[39] = 1;
        break;
    }
}

#define N_KEY_SPOILS 19

static void test_key_wild(void **state)
{
    (void)state;
    for (int how = 0; how < N_KEY_SPOILS; how++) {
        uint64_t before = protocol_errors();
        struct raw_client raw;
        struct kvf_shm_sqe sqe;
        struct kvf_shm_key key;

        raw_attach(&raw, the_daemon.socket_path);
        raw_sqe(&raw, &sqe, KVF_OP_PUT, 1);
        raw_key(&key, 1);
        key.record_bytes = 8192;
        spoil_key(&raw, &key, how);
        raw_submit(&raw, &sqe, &key, 1);
        if (!raw_is_hung_up(&raw, HANG_UP_MS)) {
            fail_msg("key %d was taken", how);
        }
        raw_close(&raw);
        assert_int_equal(protocol_errors(), before + 1);
    }
    assert_nobody_noticed();
}

static void spoil_index(struct raw_client *raw, int how)
{
    struct kvf_shm_indices *indices = raw->ring.indices;

    switch (how) {
    case 0:
        indices->sq_tail.value = raw->ring.sq_entries + 1;
        break;
    case 1:
        indices->sq_tail.value = UINT32_MAX;
        break;
    case 2:
        indices->sq_tail.value = 0x80000000u;
        break;
    case 3:
        indices->cq_head.value = 1 << 20;
        break; /* far ahead of what was completed */
    default:
        indices->cq_head.value = UINT32_MAX;
        break;
    }
}

/* Indices that cannot be. The completion head is looked at when credits are needed. */
static void test_index_wild(void **state)
{
    (void)state;
    for (int how = 0; how < 5; how++) {
        struct raw_client raw;
        struct kvf_shm_sqe sqe;

        raw_attach(&raw, the_daemon.socket_path);
        spoil_index(&raw, how);
        for (uint32_t i = 0; how >= 3 && i <= raw.header.cq_entries; i++) {
            raw_sqe(&raw, &sqe, KVF_OP_NOP, 0);
            raw_submit(&raw, &sqe, NULL, 0);
            if (raw_is_hung_up(&raw, 1)) {
                break;
            }
        }
        raw_wake(&raw);
        if (!raw_is_hung_up(&raw, HANG_UP_MS)) {
            fail_msg("index %d was taken", how);
        }
        raw_close(&raw);
    }
    assert_nobody_noticed();
}

/* More requests than there are credits, and nothing taken: no completion is overwritten, the client
 * is. */
static void test_completions_not_taken(void **state)
{
    struct raw_client raw;
    struct kvf_shm_sqe sqe;
    bool hung_up = false;

    (void)state;
    raw_attach(&raw, the_daemon.socket_path);
    for (uint32_t i = 0; i < 4 * raw.header.cq_entries && !hung_up; i++) {
        raw_sqe(&raw, &sqe, i % 3 == 0 ? KVF_OP_STAT : KVF_OP_NOP, 0);
        raw_submit(&raw, &sqe, NULL, 0);
        hung_up = i % 16 == 15 && raw_is_hung_up(&raw, 1);
    }
    assert_true(hung_up || raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
    assert_nobody_noticed();
}

/* What no rule forbids: releases and cancels of what is not there, one number twice. */
static void test_harmless(void **state)
{
    static const uint64_t args[] = {1, 65536, 65537, (1 << 16) + 63, UINT64_MAX, 1ull << 63};
    uint64_t before = protocol_errors();
    struct raw_client raw;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe;

    (void)state;
    raw_attach(&raw, the_daemon.socket_path);
    for (size_t i = 0; i < sizeof(args) / sizeof(args[0]); i++) {
        for (uint8_t opcode = KVF_OP_CANCEL; opcode <= KVF_OP_RELEASE; opcode++) {
            raw_sqe(&raw, &sqe, opcode, 0);
            sqe.request = 0;
            sqe.arg = args[i];
            raw_submit(&raw, &sqe, NULL, 0);
        }
    }
    /* the leases of others have the same numbers as one's own */
    for (uint64_t generation = 1; generation < 40; generation++) {
        for (uint32_t index = 0; index < 8; index++) {
            raw_sqe(&raw, &sqe, KVF_OP_RELEASE, 0);
            sqe.request = 0;
            sqe.arg = kvf_lease_id_pack(generation, index);
            raw_submit(&raw, &sqe, NULL, 0);
        }
    }
    for (int i = 0; i < 3; i++) {
        raw_sqe(&raw, &sqe, KVF_OP_NOP, 0);
        sqe.request = 77;
        raw_submit(&raw, &sqe, NULL, 0);
    }
    for (int i = 0; i < 3; i++) {
        assert_true(raw_take(&raw, &cqe));
        assert_int_equal(cqe.request, 77);
    }
    assert_int_equal(protocol_errors(), before);
    assert_nobody_noticed();
    raw_close(&raw);
}

/* Asks to be woken, and never reads the socket: its queue fills up, and nobody waits. */
static void test_socket_never_read(void **state)
{
    uint32_t rounds = kvf_test_scaled(2000);
    struct raw_client raw;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe;

    (void)state;
    raw_attach(&raw, the_daemon.socket_path);
    for (uint32_t i = 0; i < rounds; i++) {
        __atomic_store_n(&raw.ring.indices->client_sleeping.value, 1, __ATOMIC_SEQ_CST);
        raw_sqe(&raw, &sqe, KVF_OP_NOP, 0);
        raw_submit(&raw, &sqe, NULL, 0);
        assert_true(raw_take(&raw, &cqe));
    }
    assert_nobody_noticed();
    raw_close(&raw);
}

/* An eventfd that was made blocking and is full. */
static void test_eventfd_full(void **state)
{
    uint64_t most = UINT64_MAX - 1;
    struct raw_client raw;
    struct kvf_shm_sqe sqe;
    struct kvf_shm_cqe cqe;

    (void)state;
    raw_attach(&raw, the_daemon.socket_path);
    assert_int_equal(write(raw.wake_fd, &most, sizeof(most)), sizeof(most));
    assert_int_equal(fcntl(raw.wake_fd, F_SETFL, 0), 0);
    raw_sqe(&raw, &sqe, KVF_OP_NOP, 0);
    raw.ring.sq[raw.ring.sq_tail % raw.ring.sq_entries] = sqe;
    __atomic_store_n(&raw.ring.indices->sq_tail.value, ++raw.ring.sq_tail, __ATOMIC_RELEASE);
    (void)raw_take(&raw, &cqe); /* seen by chance at once, or at the next beat */
    assert_nobody_noticed();
    raw_close(&raw);
}

/* --- many ---------------------------------------------------------------------------------------
 */

static void test_connections_without_end(void **state)
{
    enum {
        N = 100
    };
    static struct raw_client raws[N];

    (void)state;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            raw_connect(&raws[i], the_daemon.socket_path);
        }
        assert_nobody_noticed();
        for (int i = 0; i < N; i++) {
            raw_close(&raws[i]);
        }
    }
    assert_nobody_noticed();
    assert_true(kvf_test_daemon_wait_number(&the_daemon, "clients", 1, 60000));
}

/* --- those that come back -----------------------------------------------------------------------
 */

#define SOCKET_VARIABLE "KVF_TEST_HONEST_SOCKET"

/* An honest client, as a process of its own. */
static int honest_main(const char *socket_path)
{
    struct kvf_client *client;
    struct kvf_options options;
    uint64_t round_trip_ns;
    int status;

    kvf_options_init(&options);
    options.socket_path = socket_path;
    options.connect_timeout_ms = HANG_UP_MS;
    status = kvf_open(&options, &client);
    if (status == KVF_OK) {
        status = kvf_ping(client, HANG_UP_MS, &round_trip_ns);
        kvf_close(client);
    }
    return status == KVF_OK ? 0 : 1;
}

static void assert_others_attach(const struct kvf_test_daemon *daemon)
{
    struct kvf_test_process process = {0};
    char variable[KVF_TEST_PATH_BYTES + 40];
    char *const argv[] = {(char *)"/proc/self/exe", NULL};
    char *const env[] = {variable, NULL};
    int wait_status = -1;

    snprintf(variable, sizeof(variable), SOCKET_VARIABLE "=%s", daemon->socket_path);
    kvf_test_process_start(&process, argv, env, NULL);
    assert_true(kvf_test_process_wait(&process, 2 * HANG_UP_MS, &wait_status));
    assert_int_equal(wait_status, 0);
}

static void offend(const struct kvf_test_daemon *daemon)
{
    struct raw_client raw;
    struct kvf_shm_sqe sqe;

    raw_attach(&raw, daemon->socket_path);
    raw_sqe(&raw, &sqe, KVF_OP_REPORT + 1, 0);
    raw_submit(&raw, &sqe, NULL, 0);
    assert_true(raw_is_hung_up(&raw, HANG_UP_MS));
    raw_close(&raw);
}

/* As a daemon is by default: whoever breaks the protocol again and again is made to wait, and gets
 * in again without doing anything for it; other processes attach as if nothing were. */
static void test_offender_is_delayed(void **state)
{
    struct kvf_test_daemon daemon;
    uint64_t delayed = 0;
    struct raw_client raws[8];

    (void)state;
    kvf_test_daemon_create(&daemon, NULL);
    kvf_test_daemon_start(&daemon);
    /* on a machine that stands still between two attaches, the delay can be over already */
    for (int i = 0; i < 50 && delayed < 3; i++) {
        offend(&daemon);
        delayed = kvf_test_daemon_number(&daemon, "metrics.attach_delayed");
    }
    assert_true(delayed >= 3);
    for (int i = 0; i < 8; i++) {
        struct kvf_wire_hello hello;

        raw_hello(&hello);
        raw_connect(&raws[i], daemon.socket_path);
        raw_send(&raws[i], &hello, sizeof(hello), NULL, 0);
    }
    /* between two answers the daemon looks at all of its sockets */
    (void)kvf_test_daemon_number(&daemon, "metrics.attach_delayed");
    delayed = kvf_test_daemon_number(&daemon, "metrics.attach_delayed");
    assert_others_attach(&daemon);
    assert_int_equal(kvf_test_daemon_number(&daemon, "metrics.attach_delayed"), delayed);
    for (int i = 0; i < 8; i++) {
        raw_close(&raws[i]);
    }
    assert_int_equal(honest_main(daemon.socket_path), 0); /* of the offending process */
    assert_true(kvf_test_daemon_wait_number(&daemon, "clients", 0, HANG_UP_MS));
    assert_int_equal(kvf_test_daemon_number(&daemon, "staging_used_bytes"), 0);
    assert_int_equal(kvf_test_daemon_stop(&daemon), 0);
    kvf_test_daemon_destroy(&daemon);
}

int main(void)
{
    const char *socket_path = getenv(SOCKET_VARIABLE);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello_broken),
        cmocka_unit_test(test_hello_refused),
        cmocka_unit_test(test_hello_at_random),
        cmocka_unit_test(test_handshake_out_of_order),
        cmocka_unit_test(test_unexpected_fds),
        cmocka_unit_test(test_ready_is_not_wanted),
        cmocka_unit_test(test_namespaces_without_end),
        cmocka_unit_test(test_handshake_stalls),
        cmocka_unit_test(test_sqe_wild),
        cmocka_unit_test(test_key_wild),
        cmocka_unit_test(test_index_wild),
        cmocka_unit_test(test_completions_not_taken),
        cmocka_unit_test(test_harmless),
        cmocka_unit_test(test_socket_never_read),
        cmocka_unit_test(test_eventfd_full),
        cmocka_unit_test(test_connections_without_end),
        cmocka_unit_test(test_offender_is_delayed),
    };

    if (socket_path != NULL) {
        return honest_main(socket_path);
    }
    return cmocka_run_group_tests(tests, neighbour_setup, neighbour_teardown);
}
