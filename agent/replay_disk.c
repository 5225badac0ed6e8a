/* SPDX-License-Identifier: Apache-2.0
 *
 * replay_disk.c: a table of pages without their trailing zeros.
 */
#include "agent/replay_disk.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/limits.h"

struct page {
    uint32_t bytes;
    uint8_t data[];
};

/* Owner: the thread that opened it. */
struct replay_disk {
    struct kvf_io_queue base;
    struct kvf_io *first, **end;
    struct page **pages; /* NULL: zeros */
};

static size_t bytes_without_zeros(const uint8_t *data)
{
    size_t bytes = KVF_PAGE_BYTES;

    while (bytes > 0) {
        uint64_t word;

        memcpy(&word, data + bytes - sizeof(word), sizeof(word));
        if (word != 0) {
            break;
        }
        bytes -= sizeof(word);
    }
    return bytes;
}

/* False: out of memory; the page is as it was. */
static bool write_page(struct page **at, const uint8_t *data)
{
    size_t bytes = bytes_without_zeros(data);
    struct page *page = NULL;

    if (bytes > 0) {
        page = realloc(*at, sizeof(*page) + bytes);
        if (page == NULL) {
            return false;
        }
        page->bytes = (uint32_t)bytes;
        memcpy(page->data, data, bytes);
    } else {
        free(*at);
    }
    *at = page;
    return true;
}

static void read_page(const struct page *page, uint8_t *data)
{
    size_t bytes = page != NULL ? page->bytes : 0;

    if (bytes > 0) {
        memcpy(data, page->data, bytes);
    }
    memset(data + bytes, 0, KVF_PAGE_BYTES - bytes);
}

static void transfer(struct replay_disk *disk, struct kvf_io *io)
{
    struct page **at = disk->pages + io->offset / KVF_PAGE_BYTES;
    uint8_t *data = io->buffer;

    io->status = KVF_OK;
    io->error = 0;
    for (uint64_t done = 0; io->op != KVF_IO_SYNC && done < io->bytes; done += KVF_PAGE_BYTES) {
        if (io->op == KVF_IO_READ) {
            read_page(*at++, data + done);
        } else if (!write_page(at++, data + done)) {
            io->status = KVF_ERR_NO_SPACE;
            io->error = ENOMEM;
            return;
        }
    }
    io->is_checked = io->check != NULL && io->op == KVF_IO_READ;
    if (io->is_checked) {
        io->check(io);
    }
}

static int disk_submit(struct kvf_io_queue *queue, struct kvf_io *io)
{
    struct replay_disk *disk = (struct replay_disk *)queue;

    assert(io->op == KVF_IO_SYNC || io->offset + io->bytes <= queue->capacity_bytes);
    io->latency_ns = 0;
    io->next = NULL;
    *disk->end = io;
    disk->end = &io->next;
    return KVF_OK;
}

static unsigned disk_poll(struct kvf_io_queue *queue)
{
    struct replay_disk *disk = (struct replay_disk *)queue;
    struct kvf_io *io = disk->first;
    unsigned n_done = 0;

    disk->first = NULL; /* what done submits waits for the next poll */
    disk->end = &disk->first;
    while (io != NULL) {
        struct kvf_io *next = io->next;

        transfer(disk, io);
        n_done++;
        io->done(io);
        io = next;
    }
    return n_done;
}

static int disk_register(struct kvf_io_queue *queue, void *base, uint64_t bytes)
{
    (void)queue;
    (void)base;
    (void)bytes;
    return KVF_OK;
}

static void disk_close(struct kvf_io_queue *queue)
{
    struct replay_disk *disk = (struct replay_disk *)queue;

    for (uint64_t i = 0; i < queue->capacity_bytes / KVF_PAGE_BYTES; i++) {
        free(disk->pages[i]);
    }
    free(disk->pages);
    free(disk);
}

static const struct kvf_io_ops disk_ops = {
    .name = "replay",
    .submit = disk_submit,
    .poll = disk_poll,
    .register_memory = disk_register,
    .close = disk_close,
};

struct kvf_io_queue *kvf_replay_disk_open(uint64_t bytes)
{
    struct replay_disk *disk = calloc(1, sizeof(*disk));

    if (disk == NULL) {
        return NULL;
    }
    disk->base.ops = &disk_ops;
    disk->base.capacity_bytes = bytes;
    disk->end = &disk->first;
    disk->pages = calloc(bytes / KVF_PAGE_BYTES, sizeof(*disk->pages));
    if (disk->pages == NULL) {
        free(disk);
        return NULL;
    }
    return &disk->base;
}

bool kvf_replay_disk_is_busy(const struct kvf_io_queue *queue)
{
    return ((const struct replay_disk *)queue)->first != NULL;
}
