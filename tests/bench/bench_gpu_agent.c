/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gpu_agent.c: what puts by kvf_gpu_put and gets by kvf_gpu_get cost an engine's loop, when
 * this process encodes and decodes (path ENGINE) and when a worker of the daemon does (path AGENT),
 * with and without MPS.
 *
 *   bench_gpu_agent [--seconds N] [--pairs N] [--only NAME] [--suffix mps]
 *
 * The whole way is taken: daemon, staging, arena. A round is one window of the loop alone and one
 * window for each row, with KV moving at the row's rate, in an order that turns from round to
 * round; a row's pair is its window and the one without of the same round. Windows are as long as
 * whole bursts at the lowest rate. The loop and KV run for some time before a window begins: what
 * is under way at its begin stands for what still is at its end (bytes are counted when they have
 * been moved), and clocks are those of a GPU at work, which an idle one exceeds for a while. Steps
 * are queued some way ahead of the GPU and no further, for the driver holds up whoever queues more,
 * and with him the bursts. Lines, whose suffix says how the GPU was shared
 * (with the control daemon of MPS started before, both this program and the worker use it):
 *
 *   pair puts_LOOP_PATH_RATE[_SUFFIX] MS GIB     extra milliseconds, and GiB of bf16 KV encoded
 *   pair gets_LOOP_PATH_RATE[_SUFFIX] MS GIB     the same, decoded
 *
 * and for each of them its rate in truth, where the GPU could not follow:
 *
 *   value [get_]rate_LOOP_PATH_RATE[_SUFFIX] GB_S
 */
#include "tests/bench/bench.h"
#include "tests/bench/gpu_load.h"
#include "tests/bench/gpu_loops.h"
#include "tests/support/daemon.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

#define CHUNKS   8 /* of a burst: 256 MiB of KV */
#define GIB      (double)(1 << 30)
#define RATE_MIN 5    /* GB of bf16 KV a second: the lowest rate of any row */
#define LEAD_S   0.06 /* of loop and KV before a window: longer than between two bursts */
#define AHEAD    128u /* steps that are queued and not done */
#define MARK     16u  /* steps between two events that say how far the GPU is */
#define MARKS    (AHEAD / MARK)

enum sides {
    ENGINE,
    AGENT,
    SIDES,
};

static const char *const side_names[SIDES] = {"engine", "agent"};

/* A row of each loop. */
struct traffic {
    enum sides side;
    bool is_get;
    uint32_t rate; /* GB of bf16 KV a second; 0: none */
};

static const struct traffic none;
static const struct traffic rows[] = {
    {ENGINE, false, 5}, {ENGINE, false, 20}, {ENGINE, false, 100}, {AGENT, false, 5},
    {AGENT, false, 20}, {AGENT, false, 100}, {ENGINE, true, 20},   {AGENT, true, 20},
};

enum {
    ROWS = sizeof(rows) / sizeof(rows[0]),
};

/* A client of the daemon, and its way to the GPU. */
struct side {
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_region *region;
    uint32_t n_in_flight; /* requests */
    uint64_t put_bytes;   /* of KV whose pages are free again */
    uint64_t got_bytes;   /* of KV that is in its pages */
};

struct agent {
    struct kvf_test_daemon daemon;
    struct gpu_load load;
    struct gpu_loops loops;
    struct side sides[SIDES];
    void *engine;
    void *begun;
    void *ended;
    void *marks[MARKS];
    double seconds; /* of a window */
    double step_s[LOOPS];
    enum gpu_loop loop;
    uint64_t serial; /* of names */
};

static void must(int status, const char *what)
{
    if (status != KVF_OK) {
        bench_die("%s: %s", what, kvf_status_name(status));
    }
}

static void side_open(struct agent *agent, enum sides which)
{
    struct side *side = &agent->sides[which];
    const struct kvf_geometry *geometry = &agent->load.plan.geometry;
    struct kvf_gpu_options gpu_options = {
        .struct_bytes = sizeof(gpu_options),
        .burst_bytes = 256u << 20,
        .path = which == ENGINE ? KVF_GPU_PATH_ENGINE : KVF_GPU_PATH_AGENT,
    };
    struct kvf_gpu_region_options region = {.struct_bytes = sizeof(region),
                                            .n_pages = agent->load.n_pages,
                                            .tokens_a_page = GPU_PAGE_TOKENS};
    void *layers[2][KVF_LAYERS_MAX];
    struct kvf_options options;

    kvf_test_client_options(&agent->daemon, &options);
    options.geometry = geometry;
    options.profile = agent->load.plan.profile->name;
    options.flags = KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.staging_bytes = UINT64_C(512) << 20;
    must(kvf_open(&options, &side->client), "client");
    must(kvf_gpu_open(side->client, &gpu_options, &side->gpu), "GPU");
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        uint64_t at = agent->load.pages + layer * agent->load.layer_bytes;

        layers[0][layer] = (void *)(uintptr_t)at;
        layers[1][layer] = (void *)(uintptr_t)(at + geometry->dim_k * sizeof(uint16_t));
    }
    region.k = (struct kvf_tensor_view){layers[0], agent->load.work.pages[0].page_stride_bytes,
                                        agent->load.work.pages[0].token_stride_bytes,
                                        agent->load.work.pages[0].head_stride_bytes};
    region.v = region.k;
    region.v.layers = layers[1];
    must(kvf_gpu_register(side->gpu, &region, &side->region), "pages");
}

static void side_close(struct side *side)
{
    side->gpu = kvf_gpu_close(side->gpu);
    side->client = kvf_close(side->client);
}

/* ----------------------------------------------------------------------------------------------
 * KV beside it
 */

/* Take what has happened. */
static void look(const struct agent *agent, struct side *side)
{
    struct kvf_gpu_event events[64];
    uint32_t n = 0;

    (void)kvf_gpu_poll(side->gpu, events, 64, 0, &n);
    for (uint32_t i = 0; i < n; i++) {
        bool is_good = events[i].status == KVF_OK;

        if (events[i].kind == KVF_GPU_EVENT_PAGES_FREE && is_good) {
            side->put_bytes += agent->load.kv_bytes;
        } else if (events[i].kind == KVF_GPU_EVENT_BLOCK && is_good) {
            side->got_bytes += agent->load.kv_bytes / CHUNKS;
        }
        side->n_in_flight -= events[i].kind == KVF_GPU_EVENT_REQUEST;
    }
}

static int get_burst(struct side *side, const struct kvf_gpu_put_item *puts)
{
    struct kvf_gpu_get_item items[CHUNKS];
    uint64_t request;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        items[i] = (struct kvf_gpu_get_item){
            .struct_bytes = sizeof(items[i]),
            .n_pages = puts[i].n_pages,
            .key = puts[i].key,
            .pages = puts[i].pages,
        };
    }
    return kvf_gpu_get(side->gpu, side->region, items, CHUNKS, NULL, NULL, NULL, 0, &request);
}

/* Put one burst under new names, or get the one that was put last. False: there is no room now. */
static bool burst(struct agent *agent, struct side *side, bool is_get)
{
    struct kvf_gpu_put_item items[CHUNKS];
    char names[CHUNKS][24];
    uint32_t pages_a_chunk = GPU_CHUNK_TOKENS / GPU_PAGE_TOKENS;
    uint64_t serial = is_get ? agent->serial - CHUNKS : agent->serial;
    uint64_t request;
    int status;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        (void)snprintf(names[i], sizeof(names[i]), "gpu-agent-%013llu",
                       (unsigned long long)(serial + i));
        items[i] = (struct kvf_gpu_put_item){
            .struct_bytes = sizeof(items[i]),
            .n_pages = pages_a_chunk,
            .key = {names[i], sizeof(names[i]) - 1},
            .token_start = (1 + i) * GPU_CHUNK_TOKENS, /* no sinks: all blocks of one size */
            .pages = agent->load.page_ids + i * pages_a_chunk,
        };
    }
    status = is_get ? get_burst(side, items)
                    : kvf_gpu_put(side->gpu, side->region, items, CHUNKS, NULL, NULL, NULL, 0, NULL,
                                  &request);
    if (status != KVF_OK && status != KVF_ERR_BUSY) {
        bench_die("%s: %s", is_get ? "get" : "put", kvf_status_name(status));
    }
    if (status == KVF_OK) {
        agent->serial += is_get ? 0 : CHUNKS;
        side->n_in_flight++;
    }
    return status == KVF_OK;
}

static void drain(struct agent *agent)
{
    for (int i = 0; i < SIDES; i++) {
        do {
            look(agent, &agent->sides[i]);
        } while (agent->sides[i].n_in_flight > 0);
        agent->sides[i].put_bytes = agent->sides[i].got_bytes = 0;
    }
}

/* ----------------------------------------------------------------------------------------------
 * Windows
 */
struct window {
    uint32_t n_lead; /* steps before it */
    uint32_t n_all;
    uint32_t n_queued;
    uint32_t n_done; /* that are known to be */
    bool is_begun;
    bool is_ended;
};

static bool is_over(struct kvf_gpu_device *gpu, void *event)
{
    int result = gpu->driver.cuEventQuery(event);

    if (result != KVF_CUDA_ERROR_NOT_READY) {
        gpu_must(gpu, result, "query");
    }
    return result == KVF_CUDA_SUCCESS;
}

/* Keep the GPU in work. */
static void steps_queue(struct agent *agent, struct window *window)
{
    struct kvf_gpu_device *gpu = agent->loops.gpu;

    while (window->n_done + MARK <= window->n_queued &&
           is_over(gpu, agent->marks[window->n_done / MARK % MARKS])) {
        window->n_done += MARK;
    }
    while (window->n_queued < window->n_all && window->n_queued < window->n_done + AHEAD) {
        if (window->n_queued == window->n_lead) {
            gpu_must(gpu, gpu->driver.cuEventRecord(agent->begun, agent->engine), "record");
        }
        gpu_loops_step(&agent->loops, agent->loop);
        window->n_queued++;
        if (window->n_queued % MARK == 0) {
            void *mark = agent->marks[(window->n_queued / MARK - 1) % MARKS];

            gpu_must(gpu, gpu->driver.cuEventRecord(mark, agent->engine), "record");
        }
        if (window->n_queued == window->n_all) {
            gpu_must(gpu, gpu->driver.cuEventRecord(agent->ended, agent->engine), "record");
        }
    }
    window->is_begun = window->is_begun ||
                       (window->n_queued > window->n_lead && is_over(gpu, agent->begun));
    window->is_ended = window->n_queued == window->n_all && is_over(gpu, agent->ended);
}

static uint32_t steps_of(const struct agent *agent, double seconds)
{
    return (uint32_t)(seconds / agent->step_s[agent->loop] + 0.5);
}

/* One window: its milliseconds. *bytes_out: of KV moved in it. */
static double window_ms(struct agent *agent, const struct traffic *traffic, double *bytes_out)
{
    struct kvf_gpu_device *gpu = agent->loops.gpu;
    struct side *side = &agent->sides[traffic->side];
    const uint64_t *moved = traffic->is_get ? &side->got_bytes : &side->put_bytes;
    double period_s = traffic->rate == 0 ? 1e9
                                         : (double)agent->load.kv_bytes / (traffic->rate * 1e9);
    struct window window = {0};
    uint64_t before = 0;
    uint32_t n_bursts = 0;
    uint64_t begun_ns;

    window.n_lead = steps_of(agent, LEAD_S);
    window.n_all = window.n_lead + steps_of(agent, agent->seconds);
    drain(agent);
    gpu_must(gpu, gpu->driver.cuCtxSynchronize(), "synchronize");
    begun_ns = kvf_now_ns();
    while (!window.is_ended) {
        bool was_begun = window.is_begun;

        steps_queue(agent, &window);
        if (traffic->rate == 0) {
            continue;
        }
        look(agent, side);
        if (window.is_begun && !was_begun) {
            before = *moved;
        }
        if ((double)(kvf_now_ns() - begun_ns) / 1e9 >= period_s * n_bursts) {
            n_bursts += burst(agent, side, traffic->is_get);
        }
    }
    *bytes_out = (double)(*moved - before);
    return gpu_timer_s(gpu, agent->begun, agent->ended) * 1e3;
}

/* ----------------------------------------------------------------------------------------------
 * Rounds
 */
static void row_print(const struct bench_run *run, const struct agent *agent,
                      const struct traffic *row, double with, double without, double bytes)
{
    const char *suffix = bench_text(run, "--suffix");
    char tail[64];
    char name[96];

    (void)snprintf(tail, sizeof(tail), "%s_%s_%u%s%s", gpu_loop_names[agent->loop],
                   side_names[row->side], row->rate, suffix != NULL ? "_" : "",
                   suffix != NULL ? suffix : "");
    (void)snprintf(name, sizeof(name), "%s_%s", row->is_get ? "gets" : "puts", tail);
    if (run->only != NULL && strcmp(run->only, name) != 0) {
        return;
    }
    if (bytes > 0) {
        bench_print_pair(name, with - without, bytes / GIB);
    }
    (void)snprintf(name, sizeof(name), "%srate_%s", row->is_get ? "get_" : "", tail);
    bench_print_value(name, bytes / (with / 1e3) / 1e9);
}

/* Window 0 is the one without. */
static void measure_round(const struct bench_run *run, struct agent *agent, uint32_t number)
{
    double bytes[1 + ROWS];
    double ms[1 + ROWS];

    for (uint32_t i = 0; i <= ROWS; i++) {
        uint32_t which = (i + 4 * number) % (1 + ROWS); /* each is first, and each is last */

        ms[which] = window_ms(agent, which == 0 ? &none : &rows[which - 1], &bytes[which]);
    }
    for (uint32_t i = 0; i < ROWS; i++) {
        row_print(run, agent, &rows[i], ms[1 + i], ms[0], bytes[1 + i]);
    }
}

/* How long a step takes, and all that only the first bursts need. */
static void prepare(struct agent *agent)
{
    double bytes;

    agent->step_s[agent->loop] = agent->seconds / 8;
    (void)window_ms(agent, &none, &bytes);
    agent->step_s[agent->loop] = window_ms(agent, &none, &bytes) / 8e3;
    agent->step_s[agent->loop] *= window_ms(agent, &none, &bytes) / 1e3 / agent->seconds;
    for (int i = 0; i < SIDES; i++) {
        for (int is_get = 0; is_get < 2; is_get++) {
            (void)burst(agent, &agent->sides[i], is_get != 0);
            drain(agent);
        }
    }
}

int main(int argc, char **argv)
{
    static const char *const sets[] = {"dram.bytes=4GiB",
                                       "dram.area_bytes=128MiB",
                                       "staging.total=3GiB",
                                       "staging.client=1GiB",
                                       "allow_uncalibrated=true",
                                       "gpu.devices=all",
                                       "workers=8",
                                       NULL};
    static struct agent agent;
    struct bench_run run;
    struct kvf_gpu_device *gpu;
    double period_s;

    bench_init(&run, argc, argv);
    /* under MPS a context has so few that streams stand in line behind the loop's steps */
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    gpu = gpu_open();
    agent.engine = gpu_stream(gpu, KVF_GPU_PRIORITY_HIGH);
    agent.begun = gpu_timer(gpu);
    agent.ended = gpu_timer(gpu);
    for (uint32_t i = 0; i < MARKS; i++) {
        agent.marks[i] = gpu_timer(gpu);
    }
    gpu_loops_init(&agent.loops, gpu, agent.engine);
    gpu_load_init(&agent.load, gpu, GPU_LLAMA_8B, "balanced", CHUNKS,
                  gpu_memory(gpu, (uint64_t)CHUNKS * (32u << 20)));
    kvf_test_daemon_create(&agent.daemon, sets);
    kvf_test_daemon_start(&agent.daemon);
    period_s = (double)agent.load.kv_bytes / (RATE_MIN * 1e9);
    agent.seconds = ((uint32_t)(run.seconds / period_s) + 1) * period_s;
    for (enum sides side = ENGINE; side < SIDES; side++) {
        side_open(&agent, side);
    }
    for (int loop = 0; loop < LOOPS; loop++) {
        agent.loop = (enum gpu_loop)loop;
        if (!agent.loops.has_blas && loop != LOOP_MEMBOUND) {
            continue; /* no libcublas on this machine */
        }
        prepare(&agent);
        for (uint32_t i = 0; i < run.n_pairs; i++) {
            measure_round(&run, &agent, i);
        }
    }
    for (enum sides side = ENGINE; side < SIDES; side++) {
        side_close(&agent.sides[side]);
    }
    kvf_test_daemon_destroy(&agent.daemon);
    return 0;
}
