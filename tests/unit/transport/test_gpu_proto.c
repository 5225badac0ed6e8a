/* SPDX-License-Identifier: Apache-2.0
 *
 * test_gpu_proto.c: messages around a GPU worker: right ones pass, and of each one every wrong
 * length, side, descriptor count and field is refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "tests/support/support.h"
#include "tests/unit/transport/samples.h"
#include "transport/gpu_proto.h"

static union kvf_gpud_message message;

static int check(enum kvf_gpud_side side, size_t bytes, uint32_t n_fds)
{
    const char *why = NULL;
    int status = kvf_gpud_check(side, &message, bytes, n_fds, &why);

    assert_true(status == KVF_OK || (status == KVF_ERR_PROTOCOL && why != NULL));
    return status;
}

/* The message is right with n_fds descriptors from this side, and with nothing else. */
static void only_so(enum kvf_gpud_side side, uint32_t n_fds)
{
    size_t bytes = message.head.bytes;

    assert_int_equal(check(side, bytes, n_fds), KVF_OK);
    assert_int_equal(check(side, bytes, n_fds + 1), KVF_ERR_PROTOCOL);
    if (n_fds > 0) {
        assert_int_equal(check(side, bytes, n_fds - 1), KVF_ERR_PROTOCOL);
    }
    assert_int_equal(check(side, bytes - 1, n_fds), KVF_ERR_PROTOCOL);
    message.head.bytes = (uint32_t)bytes - 4;
    assert_int_equal(check(side, bytes - 4, n_fds), KVF_ERR_PROTOCOL);
    message.head.bytes = (uint32_t)bytes + 4;
    assert_int_equal(check(side, bytes + 4, n_fds), KVF_ERR_PROTOCOL);
    message.head.bytes = (uint32_t)bytes;
    for (enum kvf_gpud_side other = KVF_GPUD_FROM_DAEMON; other <= KVF_GPUD_TO_ENGINE; other++) {
        assert_true(other == side || check(other, bytes, n_fds) == KVF_ERR_PROTOCOL);
    }
    message.head.magic ^= 1;
    assert_int_equal(check(side, bytes, n_fds), KVF_ERR_PROTOCOL);
    message.head.magic ^= 1;
    message.head.reserved = 1;
    assert_int_equal(check(side, bytes, n_fds), KVF_ERR_PROTOCOL);
    message.head.reserved = 0;
}

/* With this field so, it is refused. */
#define REFUSED(side, n_fds, field, wrong)                                                         \
    do {                                                                                           \
        union kvf_gpud_message *kept = malloc(sizeof(*kept));                                      \
        assert_non_null(kept);                                                                     \
        memcpy(kept, &message, sizeof(*kept));                                                     \
        message.field = wrong;                                                                     \
        assert_int_equal(check(side, message.head.bytes, n_fds), KVF_ERR_PROTOCOL);                \
        memcpy(&message, kept, sizeof(*kept));                                                     \
        free(kept);                                                                                \
    } while (0)

static void begin(enum kvf_gpud_type type, size_t bytes)
{
    memset(&message, 0, sizeof(message));
    kvf_gpud_head_init(&message.head, type, bytes);
}

static void test_daemon_and_worker(void **state)
{
    (void)state;
    begin(KVF_GPUD_READY, sizeof(message.ready));
    only_so(KVF_GPUD_FROM_WORKER, 0);
    REFUSED(KVF_GPUD_FROM_WORKER, 0, ready.status, 12345);
    REFUSED(KVF_GPUD_FROM_WORKER, 0, ready.uuid[5], 'x'); /* behind the terminator */
    REFUSED(KVF_GPUD_FROM_WORKER, 0, ready.name[0], '\n');
    begin(KVF_GPUD_ATTACH, sizeof(message.attach));
    message.attach.greet_ms = 1;
    only_so(KVF_GPUD_FROM_DAEMON, 1);
    REFUSED(KVF_GPUD_FROM_DAEMON, 1, attach.flags, 2);
    REFUSED(KVF_GPUD_FROM_DAEMON, 1, attach.greet_ms, 0);
    REFUSED(KVF_GPUD_FROM_DAEMON, 1, attach.reserved, 1);
    begin(KVF_GPUD_DETACH, sizeof(message.note));
    only_so(KVF_GPUD_FROM_DAEMON, 0);
    begin(KVF_GPUD_ENGINE, sizeof(message.note));
    only_so(KVF_GPUD_FROM_WORKER, 0);
    begin(KVF_GPUD_COUNTS, sizeof(message.counts));
    only_so(KVF_GPUD_FROM_WORKER, 0);
}

static void test_handshake_and_memory(void **state)
{
    (void)state;
    begin(KVF_GPUD_HELLO, sizeof(message.hello));
    message.hello.hello = sample_hello();
    only_so(KVF_GPUD_FROM_ENGINE, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, hello.hello.geometry.n_layers, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, hello.hello.shard, KVF_SHARD_NONE);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, hello.pinning, 3);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, hello.ring_bytes, UINT64_MAX);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, hello.load_window_bytes, UINT64_C(1) << 37);
    begin(KVF_GPUD_WELCOME, sizeof(message.welcome));
    message.welcome.flag_bytes = KVF_GPUD_FLAG_BYTES;
    only_so(KVF_GPUD_TO_ENGINE, 1);
    REFUSED(KVF_GPUD_TO_ENGINE, 1, welcome.flag_bytes, 8);
    message.welcome.status = KVF_ERR_BUSY;
    only_so(KVF_GPUD_TO_ENGINE, 0);
    begin(KVF_GPUD_MEMORY, sizeof(message.memory));
    message.memory.kind = KVF_GPUD_MEMORY_HANDLE;
    message.memory.n_pieces = 1;
    message.memory.bytes = message.memory.piece_bytes = 4096;
    only_so(KVF_GPUD_FROM_ENGINE, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, memory.n_pieces, 2);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, memory.bytes, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, memory.piece_bytes, 4097);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, memory.kind, 3);
    message.memory.kind = KVF_GPUD_MEMORY_FD;
    message.memory.n_pieces = 2;
    only_so(KVF_GPUD_FROM_ENGINE, 1);
    REFUSED(KVF_GPUD_FROM_ENGINE, 1, memory.piece_index, 2);
    REFUSED(KVF_GPUD_FROM_ENGINE, 1, memory.n_pieces, KVF_GPUD_PIECES_MAX + 1);
    begin(KVF_GPUD_REGISTER, sizeof(message.region) + 2 * sizeof(struct kvf_gpud_place));
    message.region.n_places = 2;
    message.region.n_pages = message.region.tokens_a_page = 1;
    only_so(KVF_GPUD_FROM_ENGINE, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, region.n_places, 3);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, region.n_places, UINT32_MAX);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, region.n_pages, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, region.tokens_a_page, 0);
}

static void test_requests(void **state)
{
    struct kvf_gpud_item *item = (void *)message.items.items;

    (void)state;
    begin(KVF_GPUD_PUT, sizeof(message.request));
    message.request.request = 1;
    message.request.n_items = 2;
    message.request.n_pages = 8;
    only_so(KVF_GPUD_FROM_ENGINE, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.n_items, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.n_items, KVF_REQUEST_KEYS_MAX + 1);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.n_pages, 1);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.n_pages, 2 * KVF_CHUNK_TOKENS_MAX + 1);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.request, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.flag, KVF_GPUD_FLAG_BYTES / KVF_GPUD_FLAG_STRIDE);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.parent_bytes, 15);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, request.parent_bytes, 65);
    begin(KVF_GPUD_ITEMS, sizeof(message.items) + kvf_gpud_item_bytes(3));
    message.items.n_items = 1;
    item->key_bytes = 16;
    item->n_pages = 3;
    only_so(KVF_GPUD_FROM_ENGINE, 0);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, items.n_items, 2);
    REFUSED(KVF_GPUD_FROM_ENGINE, 0, items.n_items, 0);
    item->n_pages = 4; /* reaches beyond the end */
    assert_int_equal(check(KVF_GPUD_FROM_ENGINE, message.head.bytes, 0), KVF_ERR_PROTOCOL);
    item->n_pages = 3;
    item->key_bytes = 65;
    assert_int_equal(check(KVF_GPUD_FROM_ENGINE, message.head.bytes, 0), KVF_ERR_PROTOCOL);
    begin(KVF_GPUD_EVENTS, sizeof(message.events) + sizeof(struct kvf_gpud_event));
    message.head.number = 1;
    message.events.events[0].kind = KVF_GPU_EVENT_BLOCK;
    only_so(KVF_GPUD_TO_ENGINE, 0);
    REFUSED(KVF_GPUD_TO_ENGINE, 0, events.events[0].kind, 4);
    REFUSED(KVF_GPUD_TO_ENGINE, 0, events.events[0].tier, 5);
    REFUSED(KVF_GPUD_TO_ENGINE, 0, events.events[0].status, 999);
    REFUSED(KVF_GPUD_TO_ENGINE, 0, head.number, 2);
}

/* Whatever the bytes are, the judge looks at no others: with other bytes behind the message it says
 * the same. */
static void test_noise(void **state)
{
    static union kvf_gpud_message kept;
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    for (uint32_t i = 0; i < 20000; i++) {
        size_t bytes = sizeof(message.head) + kvf_random_seeded_next(&random) % 700;
        enum kvf_gpud_side side = (enum kvf_gpud_side)(1 + i % 4);
        int status;

        begin((enum kvf_gpud_type)(kvf_random_seeded_next(&random) % 32), bytes);
        message.head.number = (uint32_t)(kvf_random_seeded_next(&random) % 40);
        for (size_t at = sizeof(message.head); at < bytes; at++) {
            message.bytes[at] = (uint8_t)(kvf_random_seeded_next(&random) % 4);
        }
        status = check(side, bytes, i % 2);
        memcpy(&kept, &message, bytes);
        memset(&message, 0xee, sizeof(message));
        memcpy(&message, &kept, bytes);
        assert_int_equal(check(side, bytes, i % 2), status);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_daemon_and_worker),
        cmocka_unit_test(test_handshake_and_memory),
        cmocka_unit_test(test_requests),
        cmocka_unit_test(test_noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
