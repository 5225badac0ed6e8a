/* SPDX-License-Identifier: Apache-2.0
 *
 * work_inline.c: the work queue without threads.
 */
#include "tiers/work_inline.h"

#include <assert.h>
#include <stdlib.h>

/* Owner: the thread that opened it. */
struct work_inline {
    struct kvf_work_queue base;
    enum kvf_work_inline_mode mode;
    uint32_t max_jobs;
    uint32_t n_jobs;
    struct kvf_work *first;
    struct kvf_work **end;
};

static int inline_submit(struct kvf_work_queue *queue, struct kvf_work *work)
{
    struct work_inline *self = (struct work_inline *)queue;

    assert(work->run != NULL && work->done != NULL);
    if (self->n_jobs == self->max_jobs) {
        return KVF_ERR_BUSY;
    }
    self->n_jobs++;
    if (self->mode == KVF_WORK_AT_SUBMIT) {
        work->run(work);
    }
    work->next = NULL;
    *self->end = work;
    self->end = &work->next;
    return KVF_OK;
}

static unsigned inline_poll(struct kvf_work_queue *queue)
{
    struct work_inline *self = (struct work_inline *)queue;
    struct kvf_work *work = self->first;
    unsigned n_done = 0;

    self->first = NULL;
    self->end = &self->first;
    while (work != NULL) {
        struct kvf_work *next = work->next;

        if (self->mode == KVF_WORK_AT_POLL) {
            work->run(work);
        }
        self->n_jobs--;
        n_done++;
        work->done(work);
        work = next;
    }
    return n_done;
}

/* As the real form: what was submitted still runs, but nobody hears of it. */
static void inline_close(struct kvf_work_queue *queue)
{
    struct work_inline *self = (struct work_inline *)queue;

    if (self == NULL) {
        return;
    }
    while (self->mode == KVF_WORK_AT_POLL && self->first != NULL) {
        struct kvf_work *work = self->first;

        self->first = work->next;
        work->run(work);
    }
    free(self);
}

static const struct kvf_work_ops inline_ops = {
    .submit = inline_submit,
    .poll = inline_poll,
    .close = inline_close,
};

int kvf_work_inline_open(enum kvf_work_inline_mode mode, uint32_t max_jobs,
                         struct kvf_work_queue **queue_out)
{
    struct work_inline *self;

    if (max_jobs == 0) {
        return KVF_ERR_INVALID;
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    self->base.ops = &inline_ops;
    self->mode = mode;
    self->max_jobs = max_jobs;
    self->end = &self->first;
    *queue_out = &self->base;
    return KVF_OK;
}
