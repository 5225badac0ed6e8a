/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_pin.c: shared memory that the device copies from and to.
 *
 * A pinned range must stay mapped until it is unpinned: the driver would go on copying the pages
 * that were there, whatever has been mapped at the address since. So a pin holds its piece as a
 * lease does, and staging as a slot of the caller's does. One pin is one mapping as a whole: no
 * record and no slot crosses it, and so no copy does.
 */
#include <stdlib.h>

#include "client/gpu_internal.h"
#include "gpu/piece.h"
#include "transport/shm_lease.h"

static struct kvf_gpu_pin *pin_find(const struct kvf_gpu *gpu, const struct kvf_session *session,
                                    const struct kvf_client_piece *piece)
{
    struct kvf_gpu_pin *pin = gpu->pins;

    while (pin != NULL && (pin->session != session || pin->piece != piece)) {
        pin = pin->next;
    }
    return pin;
}

/* A pin that the driver refuses is kept, so that it is asked once. */
static struct kvf_gpu_pin *pin_new(struct kvf_gpu *gpu, struct kvf_session *session,
                                   struct kvf_client_piece *piece)
{
    struct kvf_gpu_pin *pin = calloc(1, sizeof(*pin));
    uint64_t bytes = piece != NULL ? piece->bytes : session->welcome.staging_bytes;

    if (pin == NULL) {
        return NULL;
    }
    pin->session = session;
    pin->piece = piece;
    pin->base = piece != NULL ? piece->base : session->staging;
    pin->is_pinned = kvf_gpu_pin(gpu->device, pin->base, bytes, piece != NULL) == KVF_OK;
    if (!pin->is_pinned && !gpu->is_pin_failure_said) {
        gpu->is_pin_failure_said = true;
        kvf_client_log(gpu->client, 1, "pinning %llu MiB failed, copies will be slower: %s",
                       (unsigned long long)(bytes >> 20), gpu->device->text);
    }
    if (piece != NULL) {
        piece->n_leases++;
        session->n_leases++;
    } else {
        session->n_slots++;
    }
    pin->next = gpu->pins;
    gpu->pins = pin;
    return pin;
}

static void pin_drop(struct kvf_gpu *gpu, struct kvf_gpu_pin **link)
{
    struct kvf_gpu_pin *pin = *link;

    *link = pin->next;
    if (pin->address != 0) {
        struct kvf_gpu_piece memory = {pin->address, pin->piece->bytes};

        if (gpu->peek_stream != NULL) { /* of hits that were canceled, perhaps */
            (void)gpu->device->driver.cuStreamSynchronize(gpu->peek_stream);
        }
        kvf_gpu_piece_close(gpu->device, &memory);
    } else if (pin->is_pinned) {
        kvf_gpu_unpin(gpu->device, pin->base);
    }
    if (pin->piece != NULL) {
        pin->piece->n_leases--;
        pin->session->n_leases--;
    } else {
        pin->session->n_slots--;
    }
    kvf_client_enter(gpu->client);
    kvf_session_trim(gpu->client, pin->session);
    kvf_client_leave(gpu->client);
    free(pin);
}

struct kvf_gpu_pin *kvf_gpu_pin_staging(struct kvf_gpu *gpu)
{
    struct kvf_session *session = gpu->client->session;
    struct kvf_gpu_pin *pin;

    if (!kvf_session_is_live(gpu->client)) {
        return NULL;
    }
    pin = pin_find(gpu, session, NULL);
    return pin != NULL ? pin : pin_new(gpu, session, NULL);
}

int kvf_gpu_pin_device(struct kvf_gpu *gpu, struct kvf_session *session,
                       struct kvf_client_piece *piece)
{
    struct kvf_gpu_pin *pin = calloc(1, sizeof(*pin));
    struct kvf_gpu_piece memory;
    int status = pin == NULL ? KVF_ERR_NO_MEMORY
                             : kvf_gpu_piece_open(gpu->device, piece->fd, piece->bytes, &memory);

    if (status != KVF_OK) {
        free(pin);
        if (!gpu->is_pin_failure_said) {
            gpu->is_pin_failure_said = true;
            kvf_client_log(gpu->client, 1,
                           "blocks in the GPU's memory are out of reach, they come through the "
                           "host: %s; give both containers the same device nodes",
                           gpu->device->text);
        }
        return status;
    }
    pin->session = session;
    pin->piece = piece;
    pin->address = memory.address;
    piece->n_leases++;
    session->n_leases++;
    pin->next = gpu->pins;
    gpu->pins = pin;
    return KVF_OK;
}

struct kvf_gpu_pin *kvf_gpu_pin_hit(struct kvf_gpu *gpu, uint64_t lease)
{
    struct kvf_session *session = kvf_session_find(gpu->client, (uint16_t)(lease >> 48));
    struct kvf_client_piece *piece;
    struct kvf_gpu_pin *pin;

    if (session == NULL) {
        return NULL;
    }
    piece = session->leases[kvf_lease_id_index(lease)].piece;
    pin = pin_find(gpu, session, piece);
    if (pin == NULL && (piece->base == NULL || gpu->options.pinning == KVF_GPU_PIN_WINDOW)) {
        return NULL;
    }
    return pin != NULL ? pin : pin_new(gpu, session, piece);
}

void kvf_gpu_pins_tend(struct kvf_gpu *gpu)
{
    struct kvf_session *session = gpu->client->session;
    struct kvf_gpu_pin **link = &gpu->pins;

    kvf_gpu_device_tend(gpu);
    while (*link != NULL) {
        struct kvf_gpu_pin *pin = *link;
        bool is_stale = pin->session != session || (pin->piece != NULL && pin->piece->is_dropped);

        if (is_stale && pin->n_uses == 0) {
            pin_drop(gpu, link);
        } else {
            link = &pin->next;
        }
    }
    if (gpu->options.pinning != KVF_GPU_PIN_EAGER || !kvf_session_is_live(gpu->client)) {
        return;
    }
    /* one a call: it takes 30 to 80 ms, and after a restart of the daemon all of them are new */
    for (uint32_t i = 0; i < session->pieces_size; i++) {
        struct kvf_client_piece *piece = session->pieces[i];

        if (piece != NULL && piece->base != NULL && pin_find(gpu, session, piece) == NULL) {
            (void)pin_new(gpu, session, piece);
            return;
        }
    }
}

void kvf_gpu_pins_drop(struct kvf_gpu *gpu, bool all)
{
    struct kvf_gpu_pin **link = &gpu->pins;

    while (*link != NULL) {
        if (all || (*link)->address == 0) {
            pin_drop(gpu, link);
        } else {
            link = &(*link)->next;
        }
    }
}
