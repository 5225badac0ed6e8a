/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud_job.c: an engine's puts and gets, handed to kvf_gpu_* when their flag allows.
 *
 *   items come -> flag has its value -> kvf_gpu_put of as many as there is room for, a part
 *                                       -> ... of the rest, the next part         -> REQUEST
 *
 * Jobs of one kind begin in the order in which they came: a chain's blocks must, and the flag of a
 * kind counts in this order too.
 */
#include "agent/gpud.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mutant.h"

enum {
    POLL_EVENTS = 64,
};

/* ----------------------------------------------------------------------------------------------
 * Events
 */

/* Room for all events of a job beside those of all others. */
static bool events_reserve(struct kvf_gpud_engine *engine)
{
    uint32_t size = 2; /* PAGES_FREE and REQUEST of the newest */
    struct kvf_gpud_event *events;

    for (const struct kvf_gpud_job *job = engine->jobs; job != NULL; job = job->next) {
        size += job->request.n_items + 2;
    }
    size += engine->n_events;
    if (size <= engine->events_size) {
        return true;
    }
    events = calloc(size, sizeof(*events));
    if (events == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < engine->n_events; i++) {
        events[i] = engine->events[(engine->events_first + i) % engine->events_size];
    }
    free(engine->events);
    engine->events = events;
    engine->events_size = size;
    engine->events_first = 0;
    return true;
}

static void say(struct kvf_gpud_job *job, uint8_t kind, uint32_t index, int32_t status,
                uint8_t tier)
{
    struct kvf_gpud_engine *engine = job->engine;

    assert(engine->n_events < engine->events_size);
    engine->events[(engine->events_first + engine->n_events++) % engine->events_size] =
        (struct kvf_gpud_event){.request = job->request.request,
                                .kind = kind,
                                .tier = tier,
                                .status = status,
                                .index = index};
    engine->n_untold += kind == KVF_GPU_EVENT_REQUEST;
}

static void events_send(struct kvf_gpud_engine *engine)
{
    static union kvf_gpud_message message;

    while (engine->n_events > 0 && !engine->is_broken) {
        uint32_t n = engine->n_events < KVF_GPUD_EVENTS_MAX ? engine->n_events
                                                            : KVF_GPUD_EVENTS_MAX;
        size_t bytes = sizeof(message.events) + n * sizeof(message.events.events[0]);
        int status;

        kvf_gpud_head_init(&message.head, KVF_GPUD_EVENTS, bytes);
        message.head.number = n;
        for (uint32_t i = 0; i < n; i++) {
            message.events.events[i] =
                engine->events[(engine->events_first + i) % engine->events_size];
        }
        status = kvf_seqpacket_send(engine->fd, message.bytes, bytes, NULL, 0);
        if (status == KVF_ERR_BUSY) {
            return; /* there is room for all of them here */
        }
        engine->is_broken = engine->is_broken || status != KVF_OK;
        for (uint32_t i = 0; i < n; i++) {
            engine->n_untold -= message.events.events[i].kind == KVF_GPU_EVENT_REQUEST;
        }
        engine->events_first = (engine->events_first + n) % engine->events_size;
        engine->n_events -= n;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Jobs
 */
static void job_free(struct kvf_gpud_job *job)
{
    while (job->parts != NULL) {
        struct kvf_gpud_part *part = job->parts;

        job->parts = part->next;
        free(part);
    }
    free(job->puts);
    free(job->gets);
    free(job->names);
    free(job->pages);
    free(job);
}

static struct kvf_gpud_job *job_new(struct kvf_gpud_engine *engine,
                                    const struct kvf_gpud_request *request,
                                    struct kvf_gpu_region *region)
{
    struct kvf_gpud_job *job = calloc(1, sizeof(*job));

    if (job == NULL) {
        return NULL;
    }
    job->engine = engine;
    job->request = *request;
    job->region = region;
    job->is_put = request->head.type == KVF_GPUD_PUT;
    job->names = calloc(request->n_items, sizeof(*job->names));
    job->pages = calloc(request->n_pages, sizeof(*job->pages));
    if (job->is_put) {
        job->puts = calloc(request->n_items, sizeof(*job->puts));
    } else {
        job->gets = calloc(request->n_items, sizeof(*job->gets));
    }
    if (job->names == NULL || job->pages == NULL || (job->puts == NULL && job->gets == NULL)) {
        job_free(job);
        return NULL;
    }
    return job;
}

void kvf_gpud_job_begin(struct kvf_gpud_engine *engine, const struct kvf_gpud_request *request)
{
    struct kvf_gpud_job **link = &engine->jobs;
    struct kvf_gpu_region *region = NULL;

    for (uint32_t i = 0; i < KVF_GPUD_REGIONS_MAX; i++) {
        if (engine->regions[i].is_used && engine->regions[i].number == request->head.number) {
            region = engine->regions[i].region;
        }
    }
    while (*link != NULL && (*link)->request.request != request->request) {
        link = &(*link)->next;
    }
    /* an engine knows of no end that it has not been told, and has no more than so many */
    if (region == NULL || engine->filling != NULL || *link != NULL ||
        engine->n_jobs + engine->n_untold >= KVF_GPUD_REQUESTS_MAX) {
        kvf_gpud_engine_break(engine, "a request that cannot be");
        return;
    }
    *link = job_new(engine, request, region);
    if (*link == NULL || !events_reserve(engine)) {
        kvf_gpud_engine_break(engine, "no memory for its requests");
        return;
    }
    engine->n_jobs++;
    region->n_requests++; /* it stays until the last event is said */
    engine->filling = *link;
}

/* One item, which has passed the check of its form. */
static void item_take(struct kvf_gpud_job *job, const struct kvf_gpud_item *item)
{
    struct kvf_gpud_names *names = &job->names[job->n_got];
    uint32_t *pages = job->pages + job->n_pages;
    struct kvf_key key = {names->key, item->key_bytes};

    memcpy(names->key, item->key, sizeof(names->key));
    memcpy(names->supersedes, item->supersedes, sizeof(names->supersedes));
    memcpy(pages, item->pages, item->n_pages * sizeof(*pages));
    if (job->is_put) {
        job->puts[job->n_got] = (struct kvf_gpu_put_item){
            .struct_bytes = sizeof(job->puts[0]),
            .n_pages = item->n_pages,
            .key = key,
            .supersedes = {item->supersedes_bytes != 0 ? names->supersedes : NULL,
                           item->supersedes_bytes},
            .token_start = item->token,
            .n_tokens = item->n_tokens,
            .pages = pages,
        };
    } else {
        job->gets[job->n_got] = (struct kvf_gpu_get_item){
            .struct_bytes = sizeof(job->gets[0]),
            .n_pages = item->n_pages,
            .key = key,
            .token_first = item->token,
            .n_tokens = item->n_tokens,
            .pages = pages,
        };
    }
    job->n_pages += item->n_pages;
    job->n_got++;
}

void kvf_gpud_job_items(struct kvf_gpud_engine *engine, const struct kvf_gpud_items *items)
{
    struct kvf_gpud_job *job = engine->filling;
    const uint8_t *at = items->items;

    if (job == NULL || items->request != job->request.request ||
        items->n_items > job->request.n_items - job->n_got) {
        kvf_gpud_engine_break(engine, "items of no request");
        return;
    }
    for (uint32_t i = 0; i < items->n_items; i++) {
        const struct kvf_gpud_item *item = (const void *)at;

        if (item->n_pages > job->request.n_pages - job->n_pages) {
            kvf_gpud_engine_break(engine, "more pages than were announced");
            return;
        }
        item_take(job, item);
        at += kvf_gpud_item_bytes(item->n_pages);
    }
    if (job->n_got == job->request.n_items) {
        engine->filling = NULL;
    }
}

static void block_done(struct kvf_gpud_job *job, uint32_t index, int32_t status, uint8_t tier)
{
    job->n_done++;
    if (status == KVF_OK || status == KVF_EXISTS) {
        job->n_good++;
    } else if (job->failed_status == KVF_OK) {
        job->failed_status = status;
    }
    if (index == 0) {
        job->first_status = status;
    }
    say(job, KVF_GPU_EVENT_BLOCK, index, status, tier);
}

/* Nothing more of a job is handed on. */
static void rest_fail(struct kvf_gpud_job *job, int32_t status)
{
    if (job->n_taken < job->request.n_items && job->free_status == KVF_OK) {
        job->free_status = status;
    }
    while (job->n_taken < job->request.n_items) {
        block_done(job, job->n_taken++, status, KVF_TIER_NONE);
    }
}

void kvf_gpud_job_cancel(struct kvf_gpud_engine *engine, uint64_t request)
{
    struct kvf_gpud_job *job = engine->jobs;

    while (job != NULL && job->request.request != request) {
        job = job->next;
    }
    if (job == NULL || job->is_canceled) {
        return; /* it has ended meanwhile */
    }
    job->is_canceled = true;
    for (const struct kvf_gpud_part *part = job->parts; part != NULL; part = part->next) {
        (void)kvf_gpu_cancel(engine->gpu, part->id);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Handing on
 */

/* Has the engine's stream come so far? */
static bool flag_is_up(const struct kvf_gpud_engine *engine, const struct kvf_gpud_request *request)
{
    const uint64_t *flag = (const uint64_t *)(const void *)(engine->flags +
                                                            request->flag * KVF_GPUD_FLAG_STRIDE);

    /* acquire: what the stream did before it wrote the flag is seen by what is queued from here */
    return request->flag_value == 0 ||
           (request->head.type == KVF_GPUD_PUT ? KVF_MUTANT(gpud_writer_wait)
                                               : KVF_MUTANT(gpud_reader_wait)) ||
           (int64_t)(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - request->flag_value) >= 0;
}

static struct kvf_gpud_part *part_new(struct kvf_gpud_job *job)
{
    struct kvf_gpud_part *part = calloc(1, sizeof(*part));

    if (part != NULL) {
        part->job = job;
        part->first = job->n_taken;
        part->next = job->parts;
        job->parts = part;
    }
    return part;
}

static void part_free(struct kvf_gpud_part *part)
{
    struct kvf_gpud_part **link = &part->job->parts;

    while (*link != part) {
        link = &(*link)->next;
    }
    *link = part->next;
    free(part);
}

static uint64_t item_bytes(const struct kvf_gpud_job *job, uint32_t i)
{
    const struct kvf_gpu *gpu = job->engine->gpu;
    uint64_t chunk_tokens = gpu->plan.geometry.chunk_tokens;
    uint32_t n_tokens = job->is_put ? job->puts[i].n_tokens : job->gets[i].n_tokens;

    return gpu->block_bytes / chunk_tokens * (n_tokens != 0 ? n_tokens : chunk_tokens);
}

static int put_more(struct kvf_gpud_job *job, struct kvf_gpud_part *part)
{
    const struct kvf_gpud_request *request = &job->request;
    struct kvf_gpu_put_item *puts = job->puts + job->n_taken;
    struct kvf_put_options options = {
        .struct_bytes = sizeof(options),
        .flags = request->flags,
        .parent = {request->parent_bytes != 0 ? request->parent : NULL, request->parent_bytes},
        .depth = request->depth + job->n_taken,
        .ttl_s = request->ttl_s,
        .priority = request->priority,
        .budget_ms = request->budget_ms,
    };
    uint32_t taken = 0;
    uint64_t bytes = 0;
    int status;

    if (job->n_taken > 0) {
        options.parent = (puts - 1)->key;
    }
    status = kvf_gpu_put(job->engine->gpu, job->region, puts, request->n_items - job->n_taken,
                         &options, NULL, NULL, (uint64_t)(uintptr_t)part, &taken, &part->id);
    if (status == KVF_OK) {
        for (uint32_t i = 0; i < taken; i++) {
            bytes += item_bytes(job, job->n_taken + i);
        }
        (void)kvf_gpud_spend(job->engine->gpud, bytes);
        job->engine->gpud->counts.put_blocks += taken;
        job->engine->gpud->counts.put_bytes += bytes;
        job->n_taken += taken;
        job->n_encoding++;
    }
    return status;
}

static int get_all(struct kvf_gpud_job *job, struct kvf_gpud_part *part)
{
    struct kvf_get_options options = {.struct_bytes = sizeof(options),
                                      .budget_ms = job->request.budget_ms};
    int status = kvf_gpu_get(job->engine->gpu, job->region, job->gets, job->request.n_items,
                             &options, NULL, NULL, (uint64_t)(uintptr_t)part, &part->id);

    if (status == KVF_OK) {
        job->n_taken = job->request.n_items;
        job->engine->gpud->counts.get_blocks += job->n_taken;
        for (uint32_t i = 0; i < job->n_taken; i++) {
            job->engine->gpud->counts.get_bytes += item_bytes(job, i);
        }
    }
    return status;
}

/* Hand on what there is room for. True: all of it; the next job of the kind may begin. Else
 * *is_soon_out: nothing wakes the worker when there is more to do, so that it has to look. */
static bool job_start(struct kvf_gpud_job *job, bool *is_soon_out)
{
    struct kvf_gpud_part *part;
    int status = KVF_OK;

    if (job->is_canceled) {
        rest_fail(job, KVF_ERR_CANCELED);
    }
    while (job->n_taken < job->request.n_items && status == KVF_OK) {
        if (job->n_got < job->request.n_items) {
            *is_soon_out = false; /* a message brings the rest */
            return false;
        }
        if (!flag_is_up(job->engine, &job->request)) {
            return false;
        }
        if (job->is_put && !kvf_gpud_spend(job->engine->gpud, 0)) {
            job->waits_since_ns = job->waits_since_ns != 0 ? job->waits_since_ns : kvf_now_ns();
            return false;
        }
        if (job->waits_since_ns != 0) {
            job->engine->gpud->counts.delayed_ns += kvf_now_ns() - job->waits_since_ns;
            job->waits_since_ns = 0;
        }
        part = part_new(job);
        if (part == NULL) {
            status = KVF_ERR_NO_MEMORY;
            break;
        }
        status = job->is_put ? put_more(job, part) : get_all(job, part);
        if (status == KVF_OK) {
            job->n_parts++;
            job->engine->gpud->n_steps++;
        } else {
            part_free(part);
        }
    }
    if (status == KVF_ERR_BUSY) {
        return false;
    }
    if (status != KVF_OK) {
        rest_fail(job, status);
    }
    return true;
}

/* ----------------------------------------------------------------------------------------------
 * Turns
 */
static void on_event(const struct kvf_gpu_event *event)
{
    struct kvf_gpud_part *part = (struct kvf_gpud_part *)(uintptr_t)event->user;
    struct kvf_gpud_job *job = part->job;

    switch ((enum kvf_gpu_event_kind)event->kind) {
    case KVF_GPU_EVENT_PAGES_FREE:
        job->n_encoding--;
        if (job->free_status == KVF_OK) {
            job->free_status = event->status;
        }
        break;
    case KVF_GPU_EVENT_BLOCK:
        block_done(job, part->first + event->index, event->status, event->tier);
        break;
    case KVF_GPU_EVENT_REQUEST:
        job->n_parts--;
        part_free(part);
        break;
    }
}

static int32_t job_status(const struct kvf_gpud_job *job)
{
    if (job->n_good == job->request.n_items) {
        return KVF_OK;
    }
    if (job->n_good == 0 || (!job->is_put && job->first_status != KVF_OK)) {
        return job->is_put ? job->failed_status : job->first_status;
    }
    return KVF_PARTIAL;
}

/* Say what follows from the parts' events. */
static void job_settle(struct kvf_gpud_job *job)
{
    bool is_all_taken = job->n_taken == job->request.n_items;

    if (job->is_put && is_all_taken && job->n_encoding == 0 && !job->is_freed) {
        job->is_freed = true;
        say(job, KVF_GPU_EVENT_PAGES_FREE, job->request.n_items, job->free_status, 0);
    }
    if (is_all_taken && job->n_parts == 0 && job->n_got == job->request.n_items) {
        job->is_over = true;
        say(job, KVF_GPU_EVENT_REQUEST, job->n_good, job_status(job), 0);
    }
}

static void jobs_settle(struct kvf_gpud_engine *engine)
{
    struct kvf_gpud_job **link = &engine->jobs;

    while (*link != NULL) {
        struct kvf_gpud_job *job = *link;

        job_settle(job);
        if (job->is_over) {
            *link = job->next;
            job->region->n_requests--;
            engine->n_jobs--;
            job_free(job);
        } else {
            link = &job->next;
        }
    }
}

/* An error of one engine's need not be one of the context, which would be everybody's. */
static bool device_works(struct kvf_gpud *gpud)
{
    int result = kvf_gpu_device_enter(gpud->device) == KVF_OK
                     ? gpud->device->driver.cuCtxSynchronize()
                     : KVF_CUDA_ERROR_INVALID_CONTEXT;

    kvf_gpu_device_leave(gpud->device);
    return kvf_gpu_device_result(gpud->device, result, "the GPU") == KVF_OK;
}

int kvf_gpud_jobs_turn(struct kvf_gpud_engine *engine, bool *is_busy_out)
{
    struct kvf_gpu_event events[POLL_EVENTS];
    bool may_start[2] = {true, true}; /* get, put */
    bool is_soon[2] = {true, true};
    uint32_t n = 0;
    int status;

    do {
        status = kvf_gpu_poll(engine->gpu, events, POLL_EVENTS, 0, &n);
        engine->gpud->n_steps += n;
        for (uint32_t i = 0; i < n; i++) {
            on_event(&events[i]);
        }
    } while (status == KVF_OK && n == POLL_EVENTS);
    if (status == KVF_ERR_IO && device_works(engine->gpud)) {
        kvf_gpud_engine_break(engine, "its own work on the GPU has failed");
        return KVF_OK;
    }
    if (status == KVF_ERR_IO) {
        return status;
    }
    for (struct kvf_gpud_job *job = engine->jobs; job != NULL; job = job->next) {
        if (may_start[job->is_put] && job->n_taken < job->request.n_items) {
            may_start[job->is_put] = job_start(job, &is_soon[job->is_put]);
        }
    }
    jobs_settle(engine);
    events_send(engine);
    *is_busy_out = kvf_gpu_is_busy(engine->gpu) || (!may_start[0] && is_soon[0]) ||
                   (!may_start[1] && is_soon[1]) || engine->n_events > 0;
    return KVF_OK;
}

void kvf_gpud_jobs_free(struct kvf_gpud_engine *engine)
{
    while (engine->jobs != NULL) {
        struct kvf_gpud_job *job = engine->jobs;

        engine->jobs = job->next;
        job_free(job);
    }
    free(engine->events);
    engine->events = NULL;
}
