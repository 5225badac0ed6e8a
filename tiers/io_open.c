/* SPDX-License-Identifier: Apache-2.0
 *
 * io_open.c: chooses a form of io.h by trying it on the drive itself.
 *
 * Setting a ring up proves little: seccomp profiles, file systems and locked-memory limits refuse
 * at different moments. So each candidate reads the spare page of the store and writes the same
 * bytes back, and only a form that has done both is used.
 */
#include "tiers/io_engine.h"
#include "tiers/nvme_format.h"

#include "base/limits.h"
#include "base/log.h"

#include <assert.h>
#include <errno.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>

void kvf_io_config_init(struct kvf_io_config *config)
{
    *config = (struct kvf_io_config){
        .fd = -1,
        .engine = KVF_IO_AUTO,
        .depth = 64,
        .queue_entries = 1024,
        .write_bytes_max = 1u << 20,
        .writes_max = 16,
        .threads = 8,
    };
}

static int check_config(const struct kvf_io_config *config)
{
    bool sane = config->fd >= 0 && config->engine <= KVF_IO_THREADS && config->depth > 0 &&
                config->depth <= KVF_IO_DEPTH_MAX && config->queue_entries > 0 &&
                (config->queue_entries & (config->queue_entries - 1)) == 0 &&
                config->queue_entries <= 1u << 16 && config->write_bytes_max >= KVF_PAGE_BYTES &&
                config->write_bytes_max % KVF_PAGE_BYTES == 0 &&
                config->write_bytes_max <= 1u << 30 && config->writes_max > 0 &&
                config->threads > 0 && config->threads <= KVF_IO_THREADS_MAX;

    return sane ? KVF_OK : KVF_ERR_INVALID;
}

static int measure_drive(int fd, uint64_t *capacity_bytes_out, bool *is_device_out)
{
    struct stat st;

    if (fstat(fd, &st) != 0) {
        return errno;
    }
    *is_device_out = S_ISBLK(st.st_mode);
    *capacity_bytes_out = (uint64_t)st.st_size;
    if (S_ISBLK(st.st_mode) && ioctl(fd, BLKGETSIZE64, capacity_bytes_out) != 0) {
        return errno;
    }
    return S_ISBLK(st.st_mode) || S_ISREG(st.st_mode) ? 0 : ENOTSUP;
}

struct probe {
    struct kvf_io io;
    bool finished;
};

static void probe_done(struct kvf_io *io)
{
    struct probe *probe = io->owner;

    probe->finished = true;
}

/* 0, or the errno of one I/O. */
static int probe_io(struct kvf_io_queue *queue, enum kvf_io_op op, void *page)
{
    struct probe probe = {.io = {.op = op,
                                 .buffer = page,
                                 .offset = KVF_NVME_SPARE_OFFSET,
                                 .bytes = KVF_PAGE_BYTES,
                                 .done = probe_done,
                                 .owner = &probe}};
    struct timespec nap = {.tv_nsec = 20000};

    if (queue->ops->submit(queue, &probe.io) != KVF_OK) {
        return EBUSY;
    }
    while (!probe.finished) {
        if (queue->ops->poll(queue) == 0) {
            nanosleep(&nap, NULL);
        }
    }
    return probe.io.error;
}

static int probe_queue(struct kvf_io_queue *queue)
{
    void *page = aligned_alloc(KVF_PAGE_BYTES, KVF_PAGE_BYTES);
    int error = ENOMEM;

    if (page == NULL) {
        return error;
    }
    memset(page, 0, KVF_PAGE_BYTES);
    queue->ops->register_memory(queue, page, KVF_PAGE_BYTES);
    error = probe_io(queue, KVF_IO_READ, page);
    if (error == 0) {
        error = probe_io(queue, KVF_IO_WRITE, page);
    }
    queue->ops->register_memory(queue, page, 0);
    if (error == 0) {
        /* the registration must be gone before the page is: an I/O behind it says so */
        error = probe_io(queue, KVF_IO_SYNC, page);
    }
    if (error != 0) {
        /* a failed form is closed by the caller, and its thread may still look at the page */
        queue->ops->close(queue);
    }
    free(page);
    return error;
}

static int open_form(const struct kvf_io_config *config, uint8_t engine,
                     struct kvf_io_queue **queue_out, char *why_out, size_t why_bytes)
{
    struct kvf_io_queue *queue = NULL;
    const char *name;
    int status, error;

    if (engine == KVF_IO_THREADS) {
        status = kvf_io_threads_open(config, &queue, why_out, why_bytes);
    } else {
        status = kvf_io_uring_open(config, engine == KVF_IO_URING_FIXED, &queue, why_out,
                                   why_bytes);
    }
    if (status != KVF_OK) {
        return status;
    }
    name = queue->ops->name;
    error = probe_queue(queue);
    if (error != 0) {
        snprintf(why_out, why_bytes, "%s: trial read or write: %s", name, strerror(error));
        return engine == KVF_IO_THREADS ? KVF_ERR_IO : KVF_ERR_UNSUPPORTED;
    }
    if (engine == KVF_IO_URING_FIXED && kvf_io_uring_register_failed(queue)) {
        snprintf(why_out, why_bytes, "%s: memory cannot be registered (limit of locked memory)",
                 name);
        queue->ops->close(queue);
        return KVF_ERR_UNSUPPORTED;
    }
    *queue_out = queue;
    return KVF_OK;
}

/* Best form first; reasons holds why the earlier ones do not work. */
static int choose_form(const struct kvf_io_config *config, struct kvf_io_queue **queue_out,
                       char *reasons_out, size_t reasons_bytes)
{
    uint8_t first = config->engine == KVF_IO_AUTO ? KVF_IO_URING_FIXED : config->engine;
    uint8_t last = config->engine == KVF_IO_AUTO ? KVF_IO_THREADS : config->engine;
    size_t used = 0;
    int status = KVF_ERR_UNSUPPORTED;

    reasons_out[0] = '\0';
    for (uint8_t engine = first; engine <= last; engine++) {
        char why[KVF_IO_WHY_BYTES] = "";

        status = open_form(config, engine, queue_out, why, sizeof(why));
        if (status == KVF_OK) {
            return KVF_OK;
        }
        if (used < reasons_bytes) {
            int wanted = snprintf(reasons_out + used, reasons_bytes - used, "%s%s",
                                  used == 0 ? "" : "; ", why);

            used += wanted > 0 ? (size_t)wanted : 0;
        }
    }
    return status;
}

int kvf_io_open(const struct kvf_io_config *config, struct kvf_io_queue **queue_out, char *why_out,
                size_t why_bytes)
{
    char reasons[2 * KVF_IO_WHY_BYTES];
    struct kvf_io_queue *queue = NULL;
    uint64_t capacity_bytes = 0;
    bool is_device = false;
    int status = check_config(config);
    int error;

    if (status != KVF_OK) {
        snprintf(why_out, why_bytes, "I/O: a setting is out of its range");
        return status;
    }
    error = measure_drive(config->fd, &capacity_bytes, &is_device);
    if (error != 0 || capacity_bytes < KVF_NVME_SEGMENT_OFFSET) {
        snprintf(why_out, why_bytes, "I/O: %s",
                 error != 0 ? strerror(error) : "the file is smaller than the head of a store");
        return KVF_ERR_IO;
    }
    status = choose_form(config, &queue, reasons, sizeof(reasons));
    if (status != KVF_OK) {
        snprintf(why_out, why_bytes, "no I/O form works: %s", reasons);
        return status;
    }
    queue->capacity_bytes = capacity_bytes;
    queue->is_device = is_device;
    if (reasons[0] != '\0') {
        snprintf(why_out, why_bytes, "%s (%s)", queue->ops->name, reasons);
    } else {
        snprintf(why_out, why_bytes, "%s (%s)", queue->ops->name,
                 config->engine == KVF_IO_AUTO ? "the best form" : "as configured");
    }
    *queue_out = queue;
    return KVF_OK;
}
