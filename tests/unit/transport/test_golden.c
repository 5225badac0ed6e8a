/* SPDX-License-Identifier: Apache-2.0
 *
 * test_golden.c: the bytes of each control message and ring entry are those of tests/data/proto.
 *
 * A difference means that builds of two versions no longer understand one another: a new protocol
 * version is needed, not new golden bytes. `test_golden --write` writes the files, for a new kind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/support.h"
#include "tests/unit/transport/samples.h"

struct golden {
    const char *name;
    size_t bytes;
    union {
        struct kvf_wire_hello hello;
        struct kvf_wire_welcome welcome;
        struct kvf_wire_profile profile;
        struct kvf_wire_piece piece;
        struct kvf_wire_device device;
        struct kvf_wire_gpu gpu;
        struct kvf_wire_gpu_channel gpu_channel;
        struct kvf_wire_note note;
        struct kvf_shm_sqe sqe;
        struct kvf_shm_key keys[5];
        struct kvf_shm_cqe cqe;
        struct kvf_shm_header header;
    } u;
};

enum {
    GOLDENS = 22
};

static void goldens_fill(struct golden goldens[GOLDENS])
{
    struct golden *g = goldens;

    memset(goldens, 0, GOLDENS * sizeof(goldens[0]));
    *g = (struct golden){"hello", sizeof(g->u.hello), {.hello = sample_hello()}};
    g++;
    *g = (struct golden){"welcome", sizeof(g->u.welcome), {.welcome = sample_welcome()}};
    g++;
    *g = (struct golden){"profile", sizeof(g->u.profile), {.profile = sample_profile()}};
    g++;
    *g = (struct golden){"piece", sizeof(g->u.piece), {.piece = sample_piece(KVF_WIRE_PIECE)}};
    g++;
    *g = (struct golden){
        "piece_drop", sizeof(g->u.piece), {.piece = sample_piece(KVF_WIRE_PIECE_DROP)}};
    g++;
    *g = (struct golden){"mapped", sizeof(g->u.note), {.note = sample_note(KVF_WIRE_MAPPED)}};
    g++;
    *g = (struct golden){"ready", sizeof(g->u.note), {.note = sample_note(KVF_WIRE_READY)}};
    g++;
    *g = (struct golden){"bye", sizeof(g->u.note), {.note = sample_note(KVF_WIRE_BYE)}};
    g++;
    *g = (struct golden){"device",
                         sizeof(g->u.device),
                         {.device = {.uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"}}};
    kvf_proto_head_init(&g->u.device.head, KVF_WIRE_DEVICE);
    g++;
    *g = (struct golden){
        "device_piece", sizeof(g->u.piece), {.piece = sample_piece(KVF_WIRE_DEVICE_PIECE)}};
    g->u.piece.bytes = 1 << 30;
    g++;
    *g = (struct golden){"device_piece_drop",
                         sizeof(g->u.piece),
                         {.piece = sample_piece(KVF_WIRE_DEVICE_PIECE_DROP)}};
    g++;
    *g = (struct golden){
        "device_mapped", sizeof(g->u.piece), {.piece = sample_piece(KVF_WIRE_DEVICE_MAPPED)}};
    g++;
    *g = (struct golden){"gpu", sizeof(g->u.gpu), {.gpu = sample_gpu()}};
    g++;
    *g = (struct golden){
        "gpu_channel", sizeof(g->u.gpu_channel), {.gpu_channel = sample_gpu_channel()}};
    g++;
    *g = (struct golden){"sqe_put", sizeof(g->u.sqe), {.sqe = sample_put()}};
    g++;
    *g = (struct golden){"sqe_lookup", sizeof(g->u.sqe), {.sqe = sample_keyed(KVF_OP_LOOKUP)}};
    g++;
    *g = (struct golden){"sqe_get", sizeof(g->u.sqe), {.sqe = sample_keyed(KVF_OP_GET)}};
    g++;
    *g = (struct golden){
        "sqe_report",
        sizeof(g->u.sqe),
        {.sqe = {.opcode = KVF_OP_REPORT,
                 .arg = UINT64_C(1234567) << KVF_REPORT_KIND_BITS | KVF_REPORT_TOKENS_LOADED}}};
    g++;
    g->name = "keys";
    g->bytes = sizeof(g->u.keys);
    sample_keys(g->u.keys);
    g++;
    *g = (struct golden){"cqe_block", sizeof(g->u.cqe), {.cqe = sample_cqe()}};
    g++;
    *g = (struct golden){"cqe_lookup", sizeof(g->u.cqe), {.cqe = sample_cqe_lookup()}};
    g++;
    g->name = "ring_header";
    g->bytes = sizeof(g->u.header);
    if (kvf_shm_layout_init(&g->u.header, 1024, 2048, 4096, 8192) != KVF_OK) {
        abort();
    }
    g->u.header.connection_id = 17;
    g->u.header.incarnation = 0x0102030405060708;
}

static void path_of(const struct golden *g, char path_out[KVF_TEST_PATH_BYTES])
{
    snprintf(path_out, KVF_TEST_PATH_BYTES, "%s/tests/data/proto/%s.bin", KVF_SOURCE_DIR, g->name);
}

static void bytes_are_the_golden_ones(void **state)
{
    static struct golden goldens[GOLDENS];
    char path[KVF_TEST_PATH_BYTES];

    (void)state;
    goldens_fill(goldens);
    for (size_t i = 0; i < GOLDENS; i++) {
        size_t bytes = 0;
        char *want;

        path_of(&goldens[i], path);
        want = kvf_test_file_read(path, &bytes);
        assert_non_null(want);
        assert_int_equal(bytes, goldens[i].bytes);
        if (memcmp(want, &goldens[i].u, bytes) != 0) {
            fail_msg("%s differs", path);
        }
        free(want);
    }
}

static int write_all(void)
{
    static struct golden goldens[GOLDENS];
    char path[KVF_TEST_PATH_BYTES];

    goldens_fill(goldens);
    for (size_t i = 0; i < GOLDENS; i++) {
        path_of(&goldens[i], path);
        kvf_test_file_write(path, &goldens[i].u, goldens[i].bytes);
        printf("%s: %zu bytes\n", path, goldens[i].bytes);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_the_golden_ones),
    };

    if (argc == 2 && strcmp(argv[1], "--write") == 0) {
        return write_all();
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
