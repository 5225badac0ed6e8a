/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_hbm.c: a GPU's memory that is simulated: pieces are memory objects of this process, copies
 * take random times and may end in any order, and from time to time the worker dies, with all it
 * has. Clients map pieces as they map those of the arena.
 */
#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fd.h"

enum {
    PIECES_MAX = 64,
};

struct device_piece {
    uint32_t id; /* 0: none */
    bool is_made;
    uint64_t bytes, made_ns;
    int fd;
    uint8_t *memory;
};

struct device {
    struct kvf_hbm_port base;
    struct sim *sim;
    struct kvf_hbm_port_events events;
    uint8_t *window;
    uint64_t window_bytes;
    bool is_up;
    uint64_t up_ns; /* when it comes back */
    struct device_piece pieces[PIECES_MAX];
    struct kvf_hbm_copy *copies; /* number: when it ends */
};

static struct device *device_of(struct kvf_hbm_port *port)
{
    return (struct device *)port;
}

static struct device_piece *piece_find(struct device *device, uint32_t id)
{
    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        if (device->pieces[i].id == id) {
            return &device->pieces[i];
        }
    }
    sim_fail(device->sim, "no place for piece %u of a GPU", id);
}

/* What clients have mapped of it stays, with other bytes in it. */
static void piece_end(struct device_piece *piece)
{
    if (piece->memory != NULL) {
        memset(piece->memory, 0xee, piece->bytes);
        (void)munmap(piece->memory, piece->bytes);
    }
    kvf_fd_close(&piece->fd);
    *piece = (struct device_piece){.fd = -1};
}

static void port_start(struct kvf_hbm_port *port, const struct kvf_hbm_port_events *events,
                       int window_fd, void *window, uint64_t window_bytes)
{
    struct device *device = device_of(port);

    (void)window_fd;
    device->events = *events;
    device->window = window;
    device->window_bytes = window_bytes;
}

static int port_make(struct kvf_hbm_port *port, uint32_t piece_id, uint64_t bytes)
{
    struct device *device = device_of(port);
    struct device_piece *piece;

    if (!device->is_up || sim_one_in(device->sim, 8)) {
        return KVF_ERR_BUSY;
    }
    piece = piece_find(device, 0);
    piece->id = piece_id;
    piece->bytes = bytes;
    piece->made_ns = device->sim->now_ns + sim_below(device->sim, 40 * device->sim->shape.tick_ns);
    return KVF_OK;
}

static void port_drop(struct kvf_hbm_port *port, uint32_t piece_id)
{
    piece_end(piece_find(device_of(port), piece_id));
}

static int port_copy(struct kvf_hbm_port *port, struct kvf_hbm_copy *copy)
{
    struct device *device = device_of(port);
    struct sim *sim = device->sim;
    const struct device_piece *piece;

    if (!device->is_up) {
        return KVF_ERR_TIER_OFF;
    }
    if (sim_one_in(sim, 10)) {
        return KVF_ERR_BUSY;
    }
    piece = piece_find(device, copy->piece_id);
    if (!piece->is_made || copy->piece_offset + copy->bytes > piece->bytes ||
        copy->window_offset + copy->bytes > device->window_bytes) {
        sim_fail(sim, "a copy outside of piece %u or window", copy->piece_id);
    }
    copy->number = sim->now_ns + sim_below(sim, 30 * sim->shape.tick_ns);
    copy->next = device->copies;
    device->copies = copy;
    return KVF_OK;
}

static void copy_end(struct device *device, struct kvf_hbm_copy *copy)
{
    const struct device_piece *piece = piece_find(device, copy->piece_id);
    uint8_t *window = device->window + copy->window_offset;

    if (copy->is_in) {
        memcpy(piece->memory + copy->piece_offset, window, copy->bytes);
    } else {
        memcpy(window, piece->memory + copy->piece_offset, copy->bytes);
        if (sim_one_in(device->sim, 40)) {
            window[sim_below(device->sim, copy->bytes - KVF_HBM_HEAD_BYTES) + KVF_HBM_HEAD_BYTES] ^=
                (uint8_t)(1u << sim_below(device->sim, 8));
            sim_cover(device->sim, SIM_COVER_hbm_flip);
            sim_model_gone_all(device->sim);
        }
    }
    copy->status = KVF_OK;
    if (sim_one_in(device->sim, 100)) {
        copy->status = KVF_ERR_IO;
        sim_model_gone_all(device->sim);
    }
    copy->done(copy);
}

static void piece_made(struct device *device, struct device_piece *piece)
{
    struct kvf_memfd memfd;
    void *memory;
    int fd;

    if (sim_one_in(device->sim, 10)) {
        uint32_t id = piece->id;

        *piece = (struct device_piece){.fd = -1};
        device->events.made(device->events.ctx, id, -1, KVF_ERR_NO_MEMORY);
        return;
    }
    if (kvf_memfd_create("sim-hbm", piece->bytes, KVF_HUGEPAGES_OFF, &memfd) != KVF_OK) {
        abort();
    }
    memory = mmap(NULL, piece->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.fd, 0);
    fd = dup(memfd.fd);
    if (memory == MAP_FAILED || fd < 0) {
        abort();
    }
    piece->fd = memfd.fd;
    piece->memory = memory;
    piece->is_made = true;
    device->events.made(device->events.ctx, piece->id, fd, KVF_OK);
}

static void worker_dies(struct device *device)
{
    struct sim *sim = device->sim;

    sim_trace(sim, "the GPU's worker dies");
    sim_cover(sim, SIM_COVER_hbm_worker_died);
    device->is_up = false;
    device->up_ns = sim->now_ns + sim_below(sim, 400 * sim->shape.tick_ns);
    while (device->copies != NULL) {
        struct kvf_hbm_copy *copy = device->copies;

        device->copies = copy->next;
        copy->status = KVF_ERR_TIER_OFF;
        copy->done(copy);
    }
    device->events.down(device->events.ctx);
    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        piece_end(&device->pieces[i]);
    }
    sim->hbm_died_turn = sim->turn;
    sim_model_gone_all(sim);
}

static unsigned port_poll(struct kvf_hbm_port *port, uint64_t now_ns)
{
    struct device *device = device_of(port);
    struct kvf_hbm_copy **link = &device->copies;
    struct kvf_hbm_copy *due = NULL;

    if (!device->is_up && now_ns >= device->up_ns && !device->sim->is_draining) {
        device->is_up = true;
        device->events.up(device->events.ctx);
    }
    if (device->is_up && device->sim->hbm_dies) {
        device->sim->hbm_dies = false;
        worker_dies(device);
        return 1;
    }
    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        struct device_piece *piece = &device->pieces[i];

        if (piece->id != 0 && !piece->is_made && now_ns >= piece->made_ns) {
            piece_made(device, piece);
        }
    }
    while (*link != NULL) {
        struct kvf_hbm_copy *copy = *link;

        if (copy->number <= now_ns) {
            *link = copy->next;
            copy->next = due;
            due = copy;
        } else {
            link = &copy->next;
        }
    }
    while (due != NULL) {
        struct kvf_hbm_copy *copy = due;

        due = copy->next;
        copy_end(device, copy);
    }
    return 0;
}

static uint64_t port_deadline_ns(const struct kvf_hbm_port *port)
{
    const struct device *device = (const struct device *)port;
    uint64_t next_ns = device->is_up ? UINT64_MAX : device->up_ns;

    for (const struct kvf_hbm_copy *copy = device->copies; copy != NULL; copy = copy->next) {
        next_ns = copy->number < next_ns ? copy->number : next_ns;
    }
    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        const struct device_piece *piece = &device->pieces[i];

        if (piece->id != 0 && !piece->is_made && piece->made_ns < next_ns) {
            next_ns = piece->made_ns;
        }
    }
    /* a draining daemon gets no worker any more */
    return device->sim->is_draining && !device->is_up ? UINT64_MAX : next_ns;
}

static const char *port_uuid(const struct kvf_hbm_port *port)
{
    (void)port;
    return SIM_GPU_UUID;
}

static void port_close(struct kvf_hbm_port *port)
{
    struct device *device = device_of(port);

    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        struct device_piece *piece = &device->pieces[i];

        if (piece->memory != NULL) {
            (void)munmap(piece->memory, piece->bytes); /* clients may look once more */
        }
        kvf_fd_close(&piece->fd);
    }
    free(device);
}

static const struct kvf_hbm_port_ops port_ops = {
    .start = port_start,
    .make = port_make,
    .drop = port_drop,
    .copy = port_copy,
    .poll = port_poll,
    .deadline_ns = port_deadline_ns,
    .uuid = port_uuid,
    .close = port_close,
};

struct kvf_hbm_port *sim_hbm_open(void *ctx, uint32_t index)
{
    struct device *device = calloc(1, sizeof(*device));

    (void)index;
    if (device == NULL) {
        abort();
    }
    device->base.ops = &port_ops;
    device->sim = ctx;
    for (uint32_t i = 0; i < PIECES_MAX; i++) {
        device->pieces[i].fd = -1;
    }
    return &device->base;
}
