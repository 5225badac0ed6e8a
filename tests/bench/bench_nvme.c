/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_nvme.c: the drive tier on a real file, told by its standard input what to measure, so that
 * tests/bench/run can take turns with fio on the same file.
 *
 *   bench_nvme --file PATH --bytes N [--segment-bytes N]
 *
 * The file is written once with random bytes, made a store, and filled with records of 1 MiB.
 * Commands, one a line; SECONDS may be a fraction:
 *   load DEPTH SECONDS     random records by the tier, verified
 *   store DEPTH SECONDS    records appended by the tier
 *   queue DEPTH SECONDS    reads of 1 MiB at random places by the I/O queue under it alone
 * The answer is one line: bytes, seconds, CPU seconds of all threads, and those of them that the
 * checksums of records took.
 *
 * This thread stands for the reactor: it sleeps on an eventfd when nothing is to be done. The
 * reactor of the daemon looks around for a while before it sleeps; that is not in these numbers.
 */
#include "codec/codec.h"
#include "tests/bench/bench.h"
#include "tiers/tier_nvme.h"

#include "base/clock.h"
#include "base/random.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define RECORD_BYTES (1u << 20)
#define DEPTH_MAX    64
#define JOBS_MAX     1024
#define WAIT_NS_MAX  (100 * KVF_NS_PER_MS)
#define WORKERS      2

/* Timing takes two system calls, so only the checksums of whole records are timed. */
#define TIMED_BYTES_MIN (64u << 10)

struct drive;

/* One request in flight. */
struct call {
    struct kvf_tier_io io;
    struct kvf_io raw;
    struct drive *drive;
    uint8_t *buffer;
    bool is_running;
};

struct drive {
    struct bench_run run;
    const char *path;
    uint64_t bytes;
    struct kvf_work_queue *work;
    struct kvf_tier *tier;
    struct kvf_io_queue *queue; /* a second one on the same file */
    int fd;                     /* of that */
    int waker_fd, epoll_fd;
    _Atomic bool is_sleeping;
    struct kvf_random_seeded random;

    struct call calls[DEPTH_MAX];
    uint8_t *buffers;
    struct kvf_block_name names[DEPTH_MAX]; /* of the record in each buffer when it is stored */

    /* what is stored: cookies index the table, live ones are also in a list to choose from */
    struct {
        kvf_location location; /* KVF_LOCATION_NONE: free */
        uint32_t name;
        uint32_t live_at;
    } * records;
    uint32_t *live, *unused;
    uint32_t n_live, n_unused, n_records;

    uint64_t n_done;
    uint32_t in_flight;
    uint32_t depth;
    bool is_over;
    int (*start)(struct drive *drive, struct call *call);
};

/* ----------------------------------------------------------------------------------------------
 * Waiting, as the reactor does
 */
static void wake(void *ctx)
{
    struct drive *drive = ctx;
    uint64_t one = 1;

    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_exchange(&drive->is_sleeping, false) &&
        write(drive->waker_fd, &one, sizeof(one)) != sizeof(one)) {
        bench_die("eventfd: %s", strerror(errno));
    }
}

static unsigned poll_all(struct drive *drive)
{
    unsigned n = drive->work->ops->poll(drive->work);

    if (drive->tier != NULL) {
        n += drive->tier->ops->poll(drive->tier, kvf_now_ns());
    }
    if (drive->queue != NULL) {
        n += drive->queue->ops->poll(drive->queue);
    }
    return n;
}

static void wait_for_work(struct drive *drive)
{
    struct epoll_event event;
    uint64_t now_ns = kvf_now_ns();
    uint64_t until_ns = drive->tier->ops->deadline_ns(drive->tier);

    atomic_store(&drive->is_sleeping, true);
    atomic_thread_fence(memory_order_seq_cst);
    if (poll_all(drive) == 0) {
        until_ns = until_ns < now_ns + WAIT_NS_MAX ? until_ns : now_ns + WAIT_NS_MAX;
        if (until_ns > now_ns) {
            (void)epoll_wait(drive->epoll_fd, &event, 1,
                             (int)((until_ns - now_ns + KVF_NS_PER_MS - 1) / KVF_NS_PER_MS));
        }
    }
    atomic_store(&drive->is_sleeping, false);
}

/* ----------------------------------------------------------------------------------------------
 * Checksums with a clock: the linker puts this in front of the real one
 */
uint32_t __real_kvf_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t __wrap_kvf_crc32c(uint32_t crc, const void *data, size_t bytes);

static _Atomic uint64_t checksums_cpu_ns; /* of all threads */

static uint64_t thread_cpu_ns(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * KVF_NS_PER_S + (uint64_t)time.tv_nsec;
}

uint32_t __wrap_kvf_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    uint64_t begin_ns;

    if (bytes < TIMED_BYTES_MIN) {
        return __real_kvf_crc32c(crc, data, bytes);
    }
    begin_ns = thread_cpu_ns();
    crc = __real_kvf_crc32c(crc, data, bytes);
    atomic_fetch_add(&checksums_cpu_ns, thread_cpu_ns() - begin_ns);
    return crc;
}

/* ----------------------------------------------------------------------------------------------
 * The host of the tier: forgets whatever is in the way
 */
static void forget(struct drive *drive, kvf_cookie cookie)
{
    uint32_t at = drive->records[cookie].live_at;
    uint32_t last = drive->live[--drive->n_live];

    drive->live[at] = last;
    drive->records[last].live_at = at;
    drive->records[cookie].location = KVF_LOCATION_NONE;
    drive->unused[drive->n_unused++] = cookie;
}

static bool host_reclaim(void *ctx, kvf_location location, kvf_cookie cookie)
{
    (void)location;
    forget(ctx, cookie);
    return false;
}

static void host_moved(void *ctx, kvf_location from, kvf_location to, kvf_cookie cookie)
{
    (void)ctx;
    (void)from;
    (void)to;
    bench_die("record %" PRIu32 " was moved, though none is kept", cookie);
}

static kvf_cookie host_recovered(void *ctx, const struct kvf_block_name *name,
                                 kvf_location location, uint64_t record_bytes, uint64_t sequence)
{
    (void)ctx;
    (void)name;
    (void)location;
    (void)record_bytes;
    (void)sequence;
    return KVF_COOKIE_NONE;
}

static void host_lost(void *ctx, kvf_location location, kvf_cookie cookie, int status)
{
    (void)ctx;
    (void)location;
    bench_die("record %" PRIu32 " is lost: %s", cookie, kvf_status_text(status));
}

/* ----------------------------------------------------------------------------------------------
 * Set-up
 */

/* Every block of the file is allocated and written: reading a hole costs nothing. */
static void write_file(struct drive *drive)
{
    uint64_t chunk_bytes = DEPTH_MAX / 4 * RECORD_BYTES;
    int fd = open(drive->path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);

    if (fd < 0) {
        bench_die("%s: %s (a file system with O_DIRECT is needed)", drive->path, strerror(errno));
    }
    if (posix_fallocate(fd, 0, (off_t)drive->bytes) != 0) {
        bench_die("%s: no room for %" PRIu64 " MiB", drive->path, drive->bytes >> 20);
    }
    for (uint64_t at = 0; at < drive->bytes; at += chunk_bytes) {
        uint64_t left = drive->bytes - at < chunk_bytes ? drive->bytes - at : chunk_bytes;

        if (pwrite(fd, drive->buffers, left, (off_t)at) != (ssize_t)left) {
            bench_die("%s: %s", drive->path, strerror(errno));
        }
    }
    if (fsync(fd) != 0) {
        bench_die("%s: %s", drive->path, strerror(errno));
    }
    drive->fd = fd;
}

static void make_records(struct drive *drive)
{
    for (uint32_t i = 0; i < DEPTH_MAX; i++) {
        uint8_t *record = drive->buffers + (size_t)i * RECORD_BYTES;
        struct kvf_record_page *page = (struct kvf_record_page *)record;

        if (kvf_block_describe_bytes(page, record + KVF_BLOCK_PAGE_BYTES,
                                     RECORD_BYTES - KVF_BLOCK_PAGE_BYTES) != KVF_OK) {
            bench_die("a record cannot be described");
        }
        memset(page->header.key_id, (int)i, sizeof(page->header.key_id));
        page->header.shard_count = 1;
        kvf_block_seal_header(page);
        drive->names[i] = (struct kvf_block_name){.namespace_id = 1, .shard_count = 1};
        memcpy(drive->names[i].key_id, page->header.key_id, sizeof(page->header.key_id));
        drive->calls[i].buffer = record;
        drive->calls[i].drive = drive;
    }
}

static void open_tier(struct drive *drive)
{
    struct kvf_nvme_config config;
    struct kvf_nvme_info info;
    char why[512];

    kvf_nvme_config_init(&config);
    config.path = drive->path;
    config.bytes = drive->bytes;
    config.segment_bytes = bench_number(&drive->run, "--segment-bytes", 0);
    config.work = drive->work;
    config.host = (struct kvf_tier_host){.ctx = drive,
                                         .reclaim = host_reclaim,
                                         .moved = host_moved,
                                         .recovered = host_recovered,
                                         .lost = host_lost};
    config.stores_max = DEPTH_MAX;
    config.loads_max = DEPTH_MAX;
    config.io_config.waker = (struct kvf_waker){wake, drive};
    if (kvf_nvme_format(&config, why, sizeof(why)) != KVF_OK ||
        kvf_nvme_open(&config, &drive->tier, why, sizeof(why)) != KVF_OK ||
        drive->tier->ops->recover(drive->tier) != KVF_OK) {
        bench_die("%s", why);
    }
    (void)kvf_nvme_register_memory(drive->tier, drive->buffers, (uint64_t)DEPTH_MAX * RECORD_BYTES);
    kvf_nvme_info(drive->tier, &info);
    fprintf(stderr, "store: %" PRIu64 " MiB, %" PRIu32 " segments, %s%s\n", drive->bytes >> 20,
            info.segments, info.engine, info.is_direct ? ", direct" : ", not direct");
}

static void open_queue(struct drive *drive)
{
    struct kvf_io_config config;
    char why[512];

    kvf_io_config_init(&config);
    config.fd = drive->fd;
    config.waker = (struct kvf_waker){wake, drive};
    if (kvf_io_open(&config, &drive->queue, why, sizeof(why)) != KVF_OK) {
        bench_die("%s", why);
    }
    (void)drive->queue->ops->register_memory(drive->queue, drive->buffers,
                                             (uint64_t)DEPTH_MAX * RECORD_BYTES);
}

static void make_tables(struct drive *drive)
{
    drive->n_records = (uint32_t)(drive->bytes / RECORD_BYTES) + DEPTH_MAX;
    drive->records = calloc(drive->n_records, sizeof(*drive->records));
    drive->live = calloc(drive->n_records, sizeof(*drive->live));
    drive->unused = calloc(drive->n_records, sizeof(*drive->unused));
    if (drive->records == NULL || drive->live == NULL || drive->unused == NULL) {
        bench_die("no memory for tables");
    }
    for (uint32_t i = 0; i < drive->n_records; i++) {
        drive->records[i].location = KVF_LOCATION_NONE;
        drive->unused[drive->n_unused++] = i;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Requests
 */
static void restart(struct drive *drive, struct call *call)
{
    int status = drive->is_over ? KVF_ERR_BUSY : drive->start(drive, call);

    call->is_running = status == KVF_OK;
    drive->in_flight += status == KVF_OK;
    if (status != KVF_OK && status != KVF_ERR_BUSY) {
        bench_die("the tier refuses: %s", kvf_status_text(status));
    }
}

static void call_done(struct call *call, int status)
{
    if (status != KVF_OK) {
        bench_die("the drive fails: %s", kvf_status_text(status));
    }
    call->is_running = false;
    call->drive->in_flight--;
    call->drive->n_done++;
    restart(call->drive, call);
}

static void load_done(struct kvf_tier_io *io)
{
    call_done(io->owner, io->status);
}

static int start_load(struct drive *drive, struct call *call)
{
    uint64_t pick = kvf_random_seeded_next(&drive->random) % drive->n_live;
    uint32_t cookie = drive->live[pick];

    call->io = (struct kvf_tier_io){
        .name = drive->names[drive->records[cookie].name],
        .cookie = cookie,
        .record = call->buffer,
        .record_bytes = RECORD_BYTES,
        .location = drive->records[cookie].location,
        .done = load_done,
        .owner = call,
    };
    return drive->tier->ops->load(drive->tier, &call->io);
}

static void store_done(struct kvf_tier_io *io)
{
    struct call *call = io->owner;
    struct drive *drive = call->drive;

    if (io->status == KVF_OK) {
        drive->records[io->cookie].location = io->location;
        drive->records[io->cookie].live_at = drive->n_live;
        drive->live[drive->n_live++] = io->cookie;
    }
    call_done(call, io->status);
}

static int start_store(struct drive *drive, struct call *call)
{
    uint32_t name = (uint32_t)(call - drive->calls);
    kvf_cookie cookie;
    int status;

    if (drive->n_unused == 0) {
        return KVF_ERR_BUSY;
    }
    cookie = drive->unused[drive->n_unused - 1];
    drive->records[cookie].name = name;
    call->io = (struct kvf_tier_io){
        .name = drive->names[name],
        .cookie = cookie,
        .record = call->buffer,
        .record_bytes = RECORD_BYTES,
        .done = store_done,
        .owner = call,
    };
    status = drive->tier->ops->store(drive->tier, &call->io);
    if (status == KVF_OK) {
        drive->n_unused--;
    }
    return status;
}

static void raw_done(struct kvf_io *io)
{
    call_done(io->owner, io->status);
}

static int start_raw(struct drive *drive, struct call *call)
{
    uint64_t pick = kvf_random_seeded_next(&drive->random) % (drive->bytes / RECORD_BYTES);

    call->raw = (struct kvf_io){
        .op = KVF_IO_READ,
        .buffer = call->buffer,
        .offset = pick * RECORD_BYTES,
        .bytes = RECORD_BYTES,
        .done = raw_done,
        .owner = call,
    };
    return drive->queue->ops->submit(drive->queue, &call->raw);
}

/* Keep depth requests in flight until the time is over or n_max are done (0: no end by number). */
static void run_calls(struct drive *drive, uint32_t depth, double seconds, uint64_t n_max)
{
    uint64_t end_ns = kvf_now_ns() + (uint64_t)(seconds * 1e9);

    drive->n_done = 0;
    drive->is_over = false;
    do {
        for (uint32_t i = 0; i < depth; i++) {
            if (!drive->calls[i].is_running) {
                restart(drive, &drive->calls[i]);
            }
        }
        if (poll_all(drive) == 0) {
            wait_for_work(drive);
        }
        drive->is_over = n_max != 0 ? drive->n_done >= n_max : kvf_now_ns() >= end_ns;
    } while (!drive->is_over || drive->in_flight > 0);
}

static void answer(struct drive *drive, uint32_t depth, double seconds)
{
    uint64_t begin_ns = kvf_now_ns();
    uint64_t checksums_ns = atomic_load(&checksums_cpu_ns);
    double cpu_s = bench_cpu_s();

    run_calls(drive, depth, seconds, 0);
    printf("%" PRIu64 " %.9f %.9f %.9f\n", drive->n_done * RECORD_BYTES,
           (double)(kvf_now_ns() - begin_ns) / 1e9, bench_cpu_s() - cpu_s,
           (double)(atomic_load(&checksums_cpu_ns) - checksums_ns) / 1e9);
}

static void serve(struct drive *drive)
{
    char line[128];

    while (fgets(line, sizeof(line), stdin) != NULL) {
        char what[16];
        uint32_t depth;
        double seconds;

        if (sscanf(line, "%15s %" SCNu32 " %lf", what, &depth, &seconds) != 3 || depth == 0 ||
            depth > DEPTH_MAX || !(seconds > 0)) {
            bench_die("not a command: %s", line);
        }
        if (strcmp(what, "load") == 0) {
            drive->start = start_load;
        } else if (strcmp(what, "store") == 0) {
            drive->start = start_store;
        } else if (strcmp(what, "queue") == 0) {
            drive->start = start_raw;
        } else {
            bench_die("not a command: %s", line);
        }
        if (drive->start == start_store) {
            make_records(drive); /* loads have left others in the buffers */
        }
        answer(drive, depth, seconds);
    }
}

int main(int argc, char **argv)
{
    static struct drive drive;
    struct epoll_event edge = {.events = EPOLLIN | EPOLLET}; /* never read */
    uint64_t n_fill;

    bench_init(&drive.run, argc, argv);
    drive.path = bench_text(&drive.run, "--file");
    drive.bytes = bench_number(&drive.run, "--bytes", 0) / RECORD_BYTES * RECORD_BYTES;
    if (drive.path == NULL || drive.bytes == 0) {
        bench_die("usage: bench_nvme --file PATH --bytes N [--segment-bytes N]");
    }
    drive.waker_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    drive.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (drive.waker_fd < 0 || drive.epoll_fd < 0 ||
        epoll_ctl(drive.epoll_fd, EPOLL_CTL_ADD, drive.waker_fd, &edge) != 0) {
        bench_die("eventfd or epoll: %s", strerror(errno));
    }
    kvf_random_seeded_init(&drive.random, 1);
    drive.buffers = bench_memory((size_t)DEPTH_MAX * RECORD_BYTES, 1);
    write_file(&drive);
    make_records(&drive);
    make_tables(&drive);
    if (kvf_work_open(WORKERS, JOBS_MAX, (struct kvf_waker){wake, &drive}, &drive.work) != KVF_OK) {
        bench_die("no workers");
    }
    open_tier(&drive);
    open_queue(&drive);
    /* once around, so that every segment has been written and reused */
    drive.start = start_store;
    n_fill = drive.bytes / RECORD_BYTES;
    run_calls(&drive, 16, 0, n_fill);
    printf("ready\n");
    serve(&drive);

    drive.queue->ops->close(drive.queue);
    drive.work->ops->close(drive.work);
    drive.tier->ops->close(drive.tier);
    close(drive.fd);
    close(drive.waker_fd);
    close(drive.epoll_fd);
    free(drive.records);
    free(drive.live);
    free(drive.unused);
    bench_memory_free(drive.buffers, (size_t)DEPTH_MAX * RECORD_BYTES);
    return 0;
}
