/* SPDX-License-Identifier: Apache-2.0
 *
 * test_io_forms.c: one suite over every form of io.h: the three real ones on a real file, and the
 * simulated one.
 */
#include "tests/support/support.h"

#include "base/failpoint.h"
#include "tiers/io.h"
#include "tiers/io_sim.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define FILE_BYTES (16u << 20)
#define IOS        64

struct form {
    const char *name;
    enum kvf_io_engine engine; /* KVF_IO_AUTO: the simulated one */
    struct kvf_test_dir dir;
    int fd;
    struct kvf_io_sim_disk *disk;
    struct kvf_io_queue *queue;
    _Atomic uint32_t wakes;
    char why[256];
};

struct call {
    struct kvf_io io;
    uint32_t n_done;
    _Atomic uint32_t n_checks;
};

static void wake(void *ctx)
{
    struct form *form = ctx;

    atomic_fetch_add(&form->wakes, 1);
}

static struct kvf_io_config real_config(struct form *form)
{
    struct kvf_io_config config;

    kvf_io_config_init(&config);
    config.fd = form->fd;
    config.engine = (uint8_t)form->engine;
    config.queue_entries = 128;
    config.depth = 16;
    config.writes_max = 4;
    config.threads = 4;
    config.write_bytes_max = 64u << 10;
    config.waker = (struct kvf_waker){.wake = wake, .ctx = form};
    return config;
}

static int open_file(struct form *form)
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_create(&form->dir);
    kvf_test_dir_path(&form->dir, "drive", path);
    form->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    if (form->fd < 0 && errno == EINVAL) {
        form->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    }
    return form->fd < 0 || ftruncate(form->fd, FILE_BYTES) != 0 ? -1 : 0;
}

static int setup(void **state)
{
    struct form *form = *state;
    struct kvf_io_sim_config sim;
    struct kvf_io_config config;

    atomic_store(&form->wakes, 0);
    if (form->engine == KVF_IO_AUTO) {
        kvf_io_sim_config_init(&sim);
        sim.capacity_bytes = FILE_BYTES;
        sim.queue_entries = 128;
        return kvf_io_sim_disk_create(&sim, &form->disk) ||
               kvf_io_sim_open(form->disk, &form->queue);
    }
    if (open_file(form) != 0) {
        return -1;
    }
    config = real_config(form);
    return kvf_io_open(&config, &form->queue, form->why, sizeof(form->why));
}

static int teardown(void **state)
{
    struct form *form = *state;

    if (form->queue != NULL) {
        form->queue->ops->close(form->queue);
        form->queue = NULL;
    }
    kvf_io_sim_disk_destroy(form->disk);
    form->disk = NULL;
    if (form->engine != KVF_IO_AUTO) {
        close(form->fd);
        kvf_test_dir_remove(&form->dir);
    }
    return 0;
}

static void poll_form(struct form *form)
{
    struct timespec nap = {.tv_nsec = 20000};

    if (form->disk != NULL && kvf_io_sim_next_ns(form->disk) != UINT64_MAX) {
        kvf_io_sim_advance(form->disk, kvf_io_sim_next_ns(form->disk));
    }
    if (form->queue->ops->poll(form->queue) == 0 && form->disk == NULL) {
        nanosleep(&nap, NULL);
    }
}

static void done(struct kvf_io *io)
{
    struct call *call = io->owner;

    call->n_done++;
}

static void prepare(struct call *call, enum kvf_io_op op, void *buffer, uint64_t offset,
                    uint64_t bytes)
{
    *call = (struct call){.io = {.op = (uint8_t)op,
                                 .buffer = buffer,
                                 .offset = offset,
                                 .bytes = bytes,
                                 .done = done,
                                 .owner = call}};
}

static int run(struct form *form, enum kvf_io_op op, void *buffer, uint64_t offset, uint64_t bytes)
{
    struct call call;

    prepare(&call, op, buffer, offset, bytes);
    assert_int_equal(form->queue->ops->submit(form->queue, &call.io), KVF_OK);
    while (call.n_done == 0) {
        poll_form(form);
    }
    assert_int_equal(call.n_done, 1);
    return call.io.status;
}

static uint8_t *buffer_alloc(uint64_t bytes, uint32_t seed)
{
    uint8_t *buffer = aligned_alloc(4096, bytes);

    assert_non_null(buffer);
    for (uint64_t i = 0; i < bytes; i++) {
        buffer[i] = (uint8_t)(seed * 131 + i * 7 + i / 4096);
    }
    return buffer;
}

static void test_facts(void **state)
{
    struct form *form = *state;

    assert_int_equal(form->queue->capacity_bytes, FILE_BYTES);
    assert_string_equal(form->queue->ops->name, form->name);
    if (form->engine != KVF_IO_AUTO) {
        assert_non_null(strstr(form->why, form->name));
        assert_false(form->queue->is_device);
    }
}

static void test_round_trip(void **state)
{
    struct form *form = *state;
    static const uint64_t sizes[] = {4096, 65536, 65536 + 4096, 1u << 20, 5u << 20};
    uint8_t *back = buffer_alloc(5u << 20, 0);

    for (uint32_t i = 0; i < 5; i++) {
        uint8_t *data = buffer_alloc(sizes[i], i + 1);

        assert_int_equal(run(form, KVF_IO_WRITE, data, 4096 * (1 + i), sizes[i]), KVF_OK);
        assert_int_equal(run(form, KVF_IO_SYNC, NULL, 0, 0), KVF_OK);
        memset(back, 0, sizes[i]);
        assert_int_equal(run(form, KVF_IO_READ, back, 4096 * (1 + i), sizes[i]), KVF_OK);
        assert_memory_equal(back, data, sizes[i]);
        free(data);
    }
    free(back);
}

static void test_many_at_once(void **state)
{
    struct form *form = *state;
    static struct call calls[3 * IOS];
    const uint64_t bytes = 96u << 10;
    uint8_t *data = buffer_alloc(IOS * bytes, 3);
    uint8_t *back = buffer_alloc(IOS * bytes, 4);
    uint32_t before = atomic_load(&form->wakes);

    for (uint32_t round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < IOS; i++) {
            prepare(&calls[i], KVF_IO_WRITE, data + i * bytes, i * bytes, bytes);
            assert_int_equal(form->queue->ops->submit(form->queue, &calls[i].io), KVF_OK);
            if (i % 8 == 0) {
                prepare(&calls[IOS + i], KVF_IO_SYNC, NULL, 0, 0);
                assert_int_equal(form->queue->ops->submit(form->queue, &calls[IOS + i].io), KVF_OK);
            }
        }
        for (uint32_t i = 0; i < 2 * IOS; i++) {
            while ((i < IOS || i % 8 == 0) && calls[i].n_done == 0) {
                poll_form(form);
            }
        }
        memset(back, 0, IOS * bytes);
        for (uint32_t i = 0; i < IOS; i++) {
            prepare(&calls[i], KVF_IO_READ, back + i * bytes, i * bytes, bytes);
            assert_int_equal(form->queue->ops->submit(form->queue, &calls[i].io), KVF_OK);
        }
        for (uint32_t i = 0; i < IOS; i++) {
            while (calls[i].n_done == 0) {
                poll_form(form);
            }
            assert_int_equal(calls[i].n_done, 1);
            assert_int_equal(calls[i].io.status, KVF_OK);
            assert_true(calls[i].io.latency_ns > 0);
        }
        assert_memory_equal(back, data, IOS * bytes);
    }
    if (form->disk == NULL) {
        assert_true(atomic_load(&form->wakes) > before);
    }
    free(data);
    free(back);
}

/* On the I/O thread: what was read is there, and nobody has been told so far. */
static void check(struct kvf_io *io)
{
    struct call *call = io->owner;
    const uint8_t *last = (const uint8_t *)io->buffer + io->bytes - 1;

    atomic_fetch_add(&call->n_checks, *last == 0x5a && !io->is_checked ? 1 : 100);
}

static void test_checks(void **state)
{
    struct form *form = *state;
    static struct call calls[IOS];
    const uint64_t bytes = 128u << 10; /* two pieces */
    uint8_t *data = buffer_alloc(bytes, 1);
    uint8_t *back = buffer_alloc(IOS * bytes, 2);

    data[bytes - 1] = 0x5a;
    for (uint32_t i = 0; i < IOS; i++) {
        assert_int_equal(run(form, KVF_IO_WRITE, data, i * bytes, bytes), KVF_OK);
    }
    for (uint32_t n = 1; n <= IOS; n *= 8) { /* alone, then together */
        memset(back, 0, IOS * bytes);
        for (uint32_t i = 0; i < n; i++) {
            prepare(&calls[i], KVF_IO_READ, back + i * bytes, i * bytes, bytes);
            calls[i].io.check = check;
            assert_int_equal(form->queue->ops->submit(form->queue, &calls[i].io), KVF_OK);
        }
        for (uint32_t i = 0; i < n; i++) {
            while (calls[i].n_done == 0) {
                poll_form(form);
            }
            assert_int_equal(calls[i].io.status, KVF_OK);
            assert_int_equal(calls[i].n_checks, calls[i].io.is_checked);
        }
        assert_true(n > 1 || calls[0].io.is_checked == (form->disk == NULL));
    }
    prepare(&calls[0], KVF_IO_WRITE, data, 0, bytes);
    calls[0].io.check = check; /* of reads only */
    assert_int_equal(form->queue->ops->submit(form->queue, &calls[0].io), KVF_OK);
    while (calls[0].n_done == 0) {
        poll_form(form);
    }
    assert_int_equal(calls[0].n_checks, 0);
    free(data);
    free(back);
}

static void test_busy(void **state)
{
    struct form *form = *state;
    static struct call calls[1024];
    uint8_t *page = buffer_alloc(4096, 1);
    uint32_t n = 0;

    for (; n < 1024; n++) {
        prepare(&calls[n], KVF_IO_WRITE, page, 4096 * n, 4096);
        if (form->queue->ops->submit(form->queue, &calls[n].io) != KVF_OK) {
            break;
        }
    }
    assert_int_equal(n, 128); /* nothing has been polled: all count as outstanding */
    for (uint32_t i = 0; i < n; i++) {
        while (calls[i].n_done == 0) {
            poll_form(form);
        }
    }
    assert_int_equal(run(form, KVF_IO_WRITE, page, 0, 4096), KVF_OK);
    free(page);
}

/* Close waits for what is in flight: the memory may go afterwards. */
static void test_close_in_flight(void **state)
{
    struct form *form = *state;
    static struct call calls[IOS];
    uint8_t *data = buffer_alloc(1u << 20, 1);

    for (uint32_t i = 0; i < IOS; i++) {
        prepare(&calls[i], i % 2 == 0 ? KVF_IO_WRITE : KVF_IO_READ, data, 0, 1u << 20);
        assert_int_equal(form->queue->ops->submit(form->queue, &calls[i].io), KVF_OK);
    }
    form->queue->ops->close(form->queue);
    form->queue = NULL;
    free(data);
}

static void test_registered_memory(void **state)
{
    struct form *form = *state;
    uint8_t *area = buffer_alloc(4u << 20, 1);
    uint8_t *other = buffer_alloc(4u << 20, 2);

    assert_int_equal(form->queue->ops->register_memory(form->queue, area, 4u << 20), KVF_OK);
    assert_int_equal(run(form, KVF_IO_WRITE, area, 0, 1u << 20), KVF_OK);
    assert_int_equal(run(form, KVF_IO_WRITE, area + (3u << 20), 1u << 20, 1u << 20), KVF_OK);
    /* half in it, not in it, and registered a second time, smaller */
    assert_int_equal(run(form, KVF_IO_READ, other, 0, 1u << 20), KVF_OK);
    assert_memory_equal(other, area, 1u << 20);
    assert_int_equal(form->queue->ops->register_memory(form->queue, area, 2u << 20), KVF_OK);
    memset(area, 0, 1u << 20);
    assert_int_equal(run(form, KVF_IO_READ, area, 0, 1u << 20), KVF_OK);
    assert_memory_equal(other, area, 1u << 20);
    assert_int_equal(run(form, KVF_IO_READ, area + (1u << 20), 0, 2u << 20), KVF_OK);
    assert_memory_equal(other, area + (1u << 20), 1u << 20);
    assert_int_equal(form->queue->ops->register_memory(form->queue, area, 0), KVF_OK);
    assert_int_equal(run(form, KVF_IO_READ, area + (2u << 20), 0, 1u << 20), KVF_OK);
    assert_memory_equal(other, area + (2u << 20), 1u << 20);
    for (uint32_t i = 0; i < 100; i++) { /* more than one piece at a time, more often than slots */
        form->queue->ops->register_memory(form->queue, other + (i % 4 << 20), 1u << 20);
        assert_int_equal(run(form, KVF_IO_READ, other + (i % 4 << 20), 0, 4096), KVF_OK);
    }
    free(area);
    free(other);
}

static void test_failpoints(void **state)
{
    struct form *form = *state;
    static struct call calls[IOS];
    uint8_t *data = buffer_alloc(1u << 20, 1);
    char why[256];
    uint32_t failed = 0;

    if (form->engine == KVF_IO_AUTO) {
        free(data);
        skip(); /* the simulated drive has faults of its own */
    }
    assert_int_equal(
        kvf_failpoint_arm("io.read=error@1;io.write=error@2;io.sync=error@1", why, sizeof(why)),
        KVF_OK);
    assert_int_equal(run(form, KVF_IO_READ, data, 0, 4096), KVF_ERR_IO);
    assert_int_equal(run(form, KVF_IO_READ, data, 0, 4096), KVF_OK);
    assert_int_equal(run(form, KVF_IO_WRITE, data, 0, 4096), KVF_OK);
    assert_int_equal(run(form, KVF_IO_WRITE, data, 0, 4096), KVF_ERR_IO);
    assert_int_equal(run(form, KVF_IO_SYNC, NULL, 0, 0), KVF_ERR_IO);
    assert_int_equal(run(form, KVF_IO_SYNC, NULL, 0, 0), KVF_OK);
    /* one piece of many fails: the whole write does, once, and the others go on */
    assert_int_equal(kvf_failpoint_arm("io.write=error@40", why, sizeof(why)), KVF_OK);
    for (uint32_t i = 0; i < 16; i++) {
        prepare(&calls[i], KVF_IO_WRITE, data, (uint64_t)i << 19, 1u << 19);
        assert_int_equal(form->queue->ops->submit(form->queue, &calls[i].io), KVF_OK);
    }
    for (uint32_t i = 0; i < 16; i++) {
        while (calls[i].n_done == 0) {
            poll_form(form);
        }
        failed += calls[i].io.status != KVF_OK;
        if (calls[i].io.status != KVF_OK) {
            assert_int_equal(calls[i].io.error, EIO);
        }
    }
    assert_int_equal(failed, 1);
    kvf_failpoint_arm(NULL, why, sizeof(why));
    for (uint32_t i = 0; i < 16; i++) {
        assert_int_equal(calls[i].n_done, 1);
    }
    free(data);
}

/* A file that ends early gives an error, not a loop. */
static void test_truncated_file(void **state)
{
    struct form *form = *state;
    struct call call;
    uint8_t *data = buffer_alloc(1u << 20, 1);

    if (form->engine == KVF_IO_AUTO) {
        free(data);
        skip();
    }
    prepare(&call, KVF_IO_READ, data, 4096, 65536);
    call.io.check = check;
    assert_int_equal(ftruncate(form->fd, 8192), 0);
    assert_int_equal(form->queue->ops->submit(form->queue, &call.io), KVF_OK);
    while (call.n_done == 0) {
        poll_form(form);
    }
    assert_int_equal(call.io.status, KVF_ERR_IO);
    assert_int_equal(call.n_checks, 0);
    assert_int_equal(run(form, KVF_IO_READ, data, 0, 8192), KVF_OK);
    assert_int_equal(run(form, KVF_IO_READ, data, 0, 65536), KVF_ERR_IO);
    assert_int_equal(run(form, KVF_IO_READ, data, 1u << 20, 4096), KVF_ERR_IO);
    free(data);
}

static void test_auto_choice(void **state)
{
    struct form *form = *state;
    struct kvf_io_config config;
    struct kvf_io_queue *queue;
    const char *best;
    char why[256];

    if (form->engine == KVF_IO_AUTO) {
        skip();
    }
    config = real_config(form);
    config.engine = KVF_IO_AUTO;
    assert_int_equal(kvf_io_open(&config, &queue, why, sizeof(why)), KVF_OK);
    assert_non_null(strstr(why, queue->ops->name));
    best = queue->ops->name;
    queue->ops->close(queue);

    /* what cannot read or write is not chosen; the reasons are told */
    assert_int_equal(kvf_failpoint_arm("io.write=error@1", why, sizeof(why)), KVF_OK);
    if (strcmp(best, "threads") != 0) {
        assert_int_equal(kvf_io_open(&config, &queue, why, sizeof(why)), KVF_OK);
        assert_string_not_equal(queue->ops->name, best);
        assert_non_null(strstr(why, "io_uring"));
        queue->ops->close(queue);
    }
    assert_int_equal(kvf_failpoint_arm("io.read=error", why, sizeof(why)), KVF_OK);
    assert_int_equal(kvf_io_open(&config, &queue, why, sizeof(why)), KVF_ERR_IO);
    assert_non_null(strstr(why, "threads: "));
    kvf_failpoint_arm(NULL, why, sizeof(why));
    config.depth = 0;
    assert_int_equal(kvf_io_open(&config, &queue, why, sizeof(why)), KVF_ERR_INVALID);
}

static int run_form(struct form *form)
{
    const struct CMUnitTest tests[] = {
#define T(name) {#name, name, setup, teardown, form}
        T(test_facts),
        T(test_round_trip),
        T(test_many_at_once),
        T(test_checks),
        T(test_busy),
        T(test_close_in_flight),
        T(test_registered_memory),
        T(test_failpoints),
        T(test_truncated_file),
        T(test_auto_choice),
#undef T
    };

    return _cmocka_run_group_tests(form->name, tests, sizeof(tests) / sizeof(tests[0]), NULL, NULL);
}

int main(int argc, char **argv)
{
    static struct form forms[] = {
        {.name = "io_uring-fixed", .engine = KVF_IO_URING_FIXED},
        {.name = "io_uring", .engine = KVF_IO_URING},
        {.name = "threads", .engine = KVF_IO_THREADS},
        {.name = "sim", .engine = KVF_IO_AUTO},
    };
    int failed = 0;

    for (uint32_t i = 0; i < 4; i++) {
        void *state = &forms[i];
        int status;

        if (argc > 1 && strcmp(argv[1], forms[i].name) != 0) {
            continue;
        }
        status = setup(&state);
        teardown(&state);
        if (status == KVF_ERR_UNSUPPORTED) {
            printf("%s is refused here: %s\n", forms[i].name, forms[i].why);
            if (argc > 1) {
                return 77;
            }
            continue;
        }
        failed += run_form(&forms[i]);
    }
    return failed == 0 ? 0 : 1;
}
