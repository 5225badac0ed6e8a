/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_work.c: jobs in a heap of two moments each: when a job runs, and when that is told.
 */
#include "tests/sim/sim_work.h"

#include <assert.h>
#include <stdlib.h>

struct sim_job {
    uint64_t at_ns;   /* of the next of the two moments */
    uint64_t done_ns; /* 0: it has run */
    uint64_t serial;  /* equal moments: first come, first served */
    struct kvf_work *work;
};

struct sim_work {
    struct kvf_work_queue base;
    struct sim_work_config config;
    uint64_t serial;
    uint32_t n_jobs;
    struct sim_job jobs[]; /* a heap, the earliest first */
};

static bool is_before(const struct sim_job *a, const struct sim_job *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->serial < b->serial);
}

static void push(struct sim_work *self, struct sim_job job)
{
    uint32_t at = self->n_jobs++;

    while (at > 0 && is_before(&job, &self->jobs[(at - 1) / 2])) {
        self->jobs[at] = self->jobs[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    self->jobs[at] = job;
}

static struct sim_job pop(struct sim_work *self)
{
    struct sim_job first = self->jobs[0];
    struct sim_job last = self->jobs[--self->n_jobs];
    uint32_t at = 0;

    for (;;) {
        uint32_t child = 2 * at + 1;

        if (child >= self->n_jobs) {
            break;
        }
        if (child + 1 < self->n_jobs && is_before(&self->jobs[child + 1], &self->jobs[child])) {
            child++;
        }
        if (!is_before(&self->jobs[child], &last)) {
            break;
        }
        self->jobs[at] = self->jobs[child];
        at = child;
    }
    self->jobs[at] = last;
    return first;
}

static int work_submit(struct kvf_work_queue *queue, struct kvf_work *work)
{
    struct sim_work *self = (struct sim_work *)queue;
    uint64_t span_ns = self->config.delay_max_ns - self->config.delay_min_ns + 1;
    uint64_t now_ns = *self->config.now_ns;
    uint64_t delay_ns;

    assert(work->run != NULL && work->done != NULL);
    if (self->n_jobs == self->config.max_jobs) {
        return KVF_ERR_BUSY;
    }
    delay_ns = self->config.delay_min_ns + kvf_random_seeded_next(self->config.random) % span_ns;
    push(self, (struct sim_job){
                   .at_ns = now_ns + kvf_random_seeded_next(self->config.random) % (delay_ns + 1),
                   .done_ns = now_ns + delay_ns,
                   .serial = self->serial++,
                   .work = work,
               });
    return KVF_OK;
}

static unsigned work_poll(struct kvf_work_queue *queue)
{
    struct sim_work *self = (struct sim_work *)queue;
    uint64_t serial_end = self->serial; /* what done submits waits for the next poll */
    unsigned n_done = 0;

    while (self->n_jobs > 0 && self->jobs[0].at_ns <= *self->config.now_ns &&
           self->jobs[0].serial < serial_end) {
        struct sim_job job = pop(self);

        if (job.done_ns != 0) {
            job.work->run(job.work);
            job.at_ns = job.done_ns;
            job.done_ns = 0;
            push(self, job);
            continue;
        }
        n_done++;
        job.work->done(job.work);
    }
    return n_done;
}

static void work_close(struct kvf_work_queue *queue)
{
    struct sim_work *self = (struct sim_work *)queue;

    while (self->n_jobs > 0) {
        struct sim_job job = pop(self);

        if (job.done_ns != 0) {
            job.work->run(job.work);
        }
    }
    free(self);
}

static const struct kvf_work_ops work_ops = {
    .submit = work_submit,
    .poll = work_poll,
    .close = work_close,
};

struct kvf_work_queue *sim_work_open(const struct sim_work_config *config)
{
    struct sim_work *self = calloc(1, sizeof(*self) + config->max_jobs * sizeof(self->jobs[0]));

    if (self == NULL) {
        abort();
    }
    self->base.ops = &work_ops;
    self->config = *config;
    return &self->base;
}

uint64_t sim_work_next_ns(const struct kvf_work_queue *queue)
{
    const struct sim_work *self = (const struct sim_work *)queue;

    return self->n_jobs == 0 ? UINT64_MAX : self->jobs[0].at_ns;
}
