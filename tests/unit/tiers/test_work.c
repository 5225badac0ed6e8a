/* SPDX-License-Identifier: Apache-2.0
 *
 * test_work.c: both forms of the work queue: each job runs once and is reported once, the queue is
 * bounded, close waits, and (under ThreadSanitizer) nothing is shared without order.
 */
#include "tiers/work_inline.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    N_JOBS = 64,
    N_ROUNDS = 200,
    DATA_BYTES = 4096,
};

struct job {
    struct kvf_work work;
    struct kvf_work_queue *queue;
    unsigned char data[DATA_BYTES]; /* written by run, read by done: no atomics on purpose */
    unsigned char fill;
    pthread_t ran_on;
    unsigned n_run, n_done;
    unsigned n_again; /* times that done submits it again */
};

static struct job jobs[N_JOBS];

/* A waker as the reactor has it: wakes are counted, and waited for. */
struct wakes {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned n_wakes;
};

static struct wakes wakes = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};

static void wake(void *ctx)
{
    struct wakes *self = ctx;

    pthread_mutex_lock(&self->lock);
    self->n_wakes++;
    pthread_cond_signal(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

static void wait_for_wake(void)
{
    pthread_mutex_lock(&wakes.lock);
    while (wakes.n_wakes == 0) {
        pthread_cond_wait(&wakes.changed, &wakes.lock);
    }
    wakes.n_wakes = 0;
    pthread_mutex_unlock(&wakes.lock);
}

static void job_run(struct kvf_work *work)
{
    struct job *job = work->owner;

    job->n_run++;
    job->ran_on = pthread_self();
    memset(job->data, job->fill, sizeof(job->data));
}

static void job_done(struct kvf_work *work)
{
    struct job *job = work->owner;

    assert_int_equal(job->data[0], job->fill);
    assert_int_equal(job->data[DATA_BYTES - 1], job->fill);
    job->n_done++;
    assert_int_equal(job->n_run, job->n_done);
    if (job->n_again > 0) {
        job->n_again--;
        job->fill++;
        assert_int_equal(job->queue->ops->submit(job->queue, &job->work), KVF_OK);
    }
}

static void jobs_init(struct kvf_work_queue *queue)
{
    for (unsigned i = 0; i < N_JOBS; i++) {
        memset(&jobs[i], 0, sizeof(jobs[i]));
        jobs[i].work = (struct kvf_work){.run = job_run, .done = job_done, .owner = &jobs[i]};
        jobs[i].queue = queue;
        jobs[i].fill = (unsigned char)i;
    }
}

static struct kvf_work_queue *open_threads(uint32_t n_threads, uint32_t n_jobs)
{
    struct kvf_waker waker = {.wake = wake, .ctx = &wakes};
    struct kvf_work_queue *queue;

    assert_int_equal(kvf_work_open(n_threads, n_jobs, waker, &queue), KVF_OK);
    return queue;
}

static void test_threads_run_and_report_each_once(void **state)
{
    struct kvf_work_queue *queue = open_threads(4, N_JOBS);
    unsigned n_done = 0;

    (void)state;
    jobs_init(queue);
    for (unsigned i = 0; i < N_JOBS; i++) {
        jobs[i].n_again = N_ROUNDS - 1;
        assert_int_equal(queue->ops->submit(queue, &jobs[i].work), KVF_OK);
    }
    while (n_done < N_JOBS * N_ROUNDS) {
        /* a lost wake-up hangs here, and the test with it */
        wait_for_wake();
        n_done += queue->ops->poll(queue);
    }
    assert_int_equal(n_done, N_JOBS * N_ROUNDS);
    for (unsigned i = 0; i < N_JOBS; i++) {
        assert_int_equal(jobs[i].n_run, N_ROUNDS);
        assert_int_equal(jobs[i].n_done, N_ROUNDS);
        assert_false(pthread_equal(jobs[i].ran_on, pthread_self()));
    }
    assert_int_equal(queue->ops->poll(queue), 0);
    queue->ops->close(queue);
}

static void test_threads_are_bounded(void **state)
{
    struct kvf_work_queue *queue = open_threads(1, 2);

    (void)state;
    jobs_init(queue);
    assert_int_equal(queue->ops->submit(queue, &jobs[0].work), KVF_OK);
    assert_int_equal(queue->ops->submit(queue, &jobs[1].work), KVF_OK);
    /* counted until done, whether it has run or not */
    assert_int_equal(queue->ops->submit(queue, &jobs[2].work), KVF_ERR_BUSY);
    while (jobs[0].n_done + jobs[1].n_done == 0) {
        wait_for_wake();
        queue->ops->poll(queue);
    }
    assert_int_equal(queue->ops->submit(queue, &jobs[2].work), KVF_OK);
    queue->ops->close(queue);
    assert_int_equal(jobs[1].n_run, 1);
    assert_int_equal(jobs[2].n_run, 1); /* close has waited for it */
    assert_int_equal(jobs[2].n_done, 0);
}

/* A job's data: what the kernel thinks of the thread. */
static void ask_priority(struct kvf_work *work)
{
    struct job *job = work->owner;

    job->n_run++;
    job->data[0] = (unsigned char)sched_getscheduler(0);
    job->data[1] = (unsigned char)getpriority(PRIO_PROCESS, (id_t)gettid());
}

static void priority_asked(struct kvf_work *work)
{
    struct job *job = work->owner;

    job->n_done++;
}

static void test_background_threads_step_back(void **state)
{
    struct kvf_waker waker = {.wake = wake, .ctx = &wakes};
    struct kvf_work_queue *queue;
    int nice_of_ours = getpriority(PRIO_PROCESS, (id_t)gettid());

    (void)state;
    if (sched_getscheduler(0) != SCHED_OTHER || nice_of_ours >= 10) {
        skip(); /* the whole test steps back already */
    }
    assert_int_equal(kvf_work_open_background(1, 4, waker, &queue), KVF_OK);
    jobs_init(queue);
    jobs[0].work.run = ask_priority;
    jobs[0].work.done = priority_asked;
    assert_int_equal(queue->ops->submit(queue, &jobs[0].work), KVF_OK);
    while (jobs[0].n_done == 0) {
        wait_for_wake();
        queue->ops->poll(queue);
    }
    queue->ops->close(queue);
    assert_int_equal(jobs[0].data[0], SCHED_BATCH);
    assert_int_equal(jobs[0].data[1], 10);
    /* and nobody else */
    assert_int_equal(sched_getscheduler(0), SCHED_OTHER);
    assert_int_equal(getpriority(PRIO_PROCESS, (id_t)gettid()), nice_of_ours);
}

static void test_wrong_arguments(void **state)
{
    struct kvf_waker waker = {.wake = wake, .ctx = &wakes};
    struct kvf_work_queue *queue;

    (void)state;
    assert_int_equal(kvf_work_open(0, 4, waker, &queue), KVF_ERR_INVALID);
    assert_int_equal(kvf_work_open(1, 0, waker, &queue), KVF_ERR_INVALID);
    waker.wake = NULL;
    assert_int_equal(kvf_work_open(1, 4, waker, &queue), KVF_ERR_INVALID);
    assert_int_equal(kvf_work_inline_open(KVF_WORK_AT_POLL, 0, &queue), KVF_ERR_INVALID);
}

static void inline_order(enum kvf_work_inline_mode mode)
{
    struct kvf_work_queue *queue;

    assert_int_equal(kvf_work_inline_open(mode, 3, &queue), KVF_OK);
    jobs_init(queue);
    jobs[0].n_again = 1;
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(queue->ops->submit(queue, &jobs[i].work), KVF_OK);
        assert_int_equal(jobs[i].n_run, mode == KVF_WORK_AT_SUBMIT);
        assert_int_equal(jobs[i].n_done, 0);
    }
    assert_int_equal(queue->ops->submit(queue, &jobs[3].work), KVF_ERR_BUSY);
    /* what done submits waits for the next poll */
    assert_int_equal(queue->ops->poll(queue), 3);
    assert_int_equal(jobs[0].n_done, 1);
    assert_int_equal(queue->ops->poll(queue), 1);
    assert_int_equal(jobs[0].n_done, 2);
    assert_int_equal(queue->ops->poll(queue), 0);
    assert_int_equal(queue->ops->submit(queue, &jobs[3].work), KVF_OK);
    queue->ops->close(queue);
    assert_int_equal(jobs[3].n_run, 1);
    assert_int_equal(jobs[3].n_done, 0);
}

static void test_inline_at_submit(void **state)
{
    (void)state;
    inline_order(KVF_WORK_AT_SUBMIT);
}

static void test_inline_at_poll(void **state)
{
    (void)state;
    inline_order(KVF_WORK_AT_POLL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_run_and_report_each_once),
        cmocka_unit_test(test_threads_are_bounded),
        cmocka_unit_test(test_background_threads_step_back),
        cmocka_unit_test(test_wrong_arguments),
        cmocka_unit_test(test_inline_at_submit),
        cmocka_unit_test(test_inline_at_poll),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
