/* SPDX-License-Identifier: Apache-2.0
 *
 * work.c: the work queue with threads: one lock around a list of jobs to run and a list of jobs
 * that have run.
 *
 * A job is a copy of megabytes, so a lock around a few pointer writes costs nothing beside it, and
 * the reactor holds it for as short a time as a worker does.
 */
#include "tiers/work.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/thread.h"

struct work_list {
    struct kvf_work *first;
    struct kvf_work **end;
};

struct work_pool {
    struct kvf_work_queue base;
    struct kvf_waker waker;
    uint32_t max_jobs; /* submitted and not yet done */
    bool is_background;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wanted;
    struct work_list todo;
    struct work_list ran;
    bool stopping;

    uint32_t n_jobs; /* owner: the reactor */
    uint32_t n_threads;
    pthread_t threads[];
};

static void list_init(struct work_list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

static void list_append(struct work_list *list, struct kvf_work *work)
{
    work->next = NULL;
    *list->end = work;
    list->end = &work->next;
}

static struct kvf_work *list_take_first(struct work_list *list)
{
    struct kvf_work *work = list->first;

    list->first = work->next;
    if (list->first == NULL) {
        list->end = &list->first;
    }
    return work;
}

static void *worker_main(void *arg)
{
    struct work_pool *pool = arg;

    if (pool->is_background) {
        kvf_thread_step_back();
    }
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct kvf_work *work;
        bool was_empty;

        while (pool->todo.first == NULL && !pool->stopping) {
            pthread_cond_wait(&pool->wanted, &pool->lock);
        }
        if (pool->todo.first == NULL) {
            break;
        }
        work = list_take_first(&pool->todo);
        pthread_mutex_unlock(&pool->lock);
        work->run(work);
        pthread_mutex_lock(&pool->lock);
        was_empty = pool->ran.first == NULL;
        list_append(&pool->ran, work);
        if (was_empty) {
            /* the reactor takes the whole list, so one wake-up for a list is enough; it is given
             * without the lock, which the reactor is about to want */
            pthread_mutex_unlock(&pool->lock);
            pool->waker.wake(pool->waker.ctx);
            pthread_mutex_lock(&pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int pool_submit(struct kvf_work_queue *queue, struct kvf_work *work)
{
    struct work_pool *pool = (struct work_pool *)queue;

    assert(work->run != NULL && work->done != NULL);
    if (pool->n_jobs == pool->max_jobs) {
        return KVF_ERR_BUSY;
    }
    pool->n_jobs++;
    pthread_mutex_lock(&pool->lock);
    list_append(&pool->todo, work);
    pthread_cond_signal(&pool->wanted);
    pthread_mutex_unlock(&pool->lock);
    return KVF_OK;
}

static unsigned pool_poll(struct kvf_work_queue *queue)
{
    struct work_pool *pool = (struct work_pool *)queue;
    struct kvf_work *work;
    unsigned n_done = 0;

    if (pool->n_jobs == 0) {
        return 0;
    }
    pthread_mutex_lock(&pool->lock);
    work = pool->ran.first;
    list_init(&pool->ran);
    pthread_mutex_unlock(&pool->lock);
    while (work != NULL) {
        struct kvf_work *next = work->next;

        /* counted before done, which may submit again */
        pool->n_jobs--;
        n_done++;
        work->done(work);
        work = next;
    }
    return n_done;
}

static void pool_close(struct kvf_work_queue *queue)
{
    struct work_pool *pool = (struct work_pool *)queue;

    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->wanted);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->n_threads; i++) {
        pthread_join(pool->threads[i], NULL);
    }
    pthread_cond_destroy(&pool->wanted);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static const struct kvf_work_ops pool_ops = {
    .submit = pool_submit,
    .poll = pool_poll,
    .close = pool_close,
};

static int open_pool(uint32_t n_threads, uint32_t queue_entries, struct kvf_waker waker,
                     bool is_background, struct kvf_work_queue **queue_out)
{
    struct work_pool *pool;

    if (n_threads == 0 || queue_entries == 0 || waker.wake == NULL) {
        return KVF_ERR_INVALID;
    }
    pool = calloc(1, sizeof(*pool) + n_threads * sizeof(pool->threads[0]));
    if (pool == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    pool->base.ops = &pool_ops;
    pool->waker = waker;
    pool->max_jobs = queue_entries;
    pool->is_background = is_background;
    list_init(&pool->todo);
    list_init(&pool->ran);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wanted, NULL);
    for (; pool->n_threads < n_threads; pool->n_threads++) {
        if (pthread_create(&pool->threads[pool->n_threads], NULL, worker_main, pool) != 0) {
            pool_close(&pool->base);
            return KVF_ERR_NO_MEMORY;
        }
    }
    *queue_out = &pool->base;
    return KVF_OK;
}

int kvf_work_open(uint32_t n_threads, uint32_t queue_entries, struct kvf_waker waker,
                  struct kvf_work_queue **queue_out)
{
    return open_pool(n_threads, queue_entries, waker, false, queue_out);
}

int kvf_work_open_background(uint32_t n_threads, uint32_t queue_entries, struct kvf_waker waker,
                             struct kvf_work_queue **queue_out)
{
    return open_pool(n_threads, queue_entries, waker, true, queue_out);
}
