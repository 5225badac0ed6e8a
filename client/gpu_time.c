/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_time.c: how long kernels keep the GPU, for the daemon's metrics.
 *
 * Two events with times stand around the kernels of each burst and group, on the stream that these
 * run on; they are read when an event that was recorded behind them has been seen to be over. So
 * nothing waits, on the device or here, that would not wait without. A pair belongs to its burst or
 * group: there are as many as these. What the driver does not measure is left out, and said once:
 * it is no reason to fail a block.
 */
#include "client/gpu_internal.h"

#define NS_A_MS 1e6

/* No more of it. */
static void stop(struct kvf_gpu *gpu, const char *what)
{
    gpu->is_timed = false;
    kvf_client_log(gpu->client, 1, "%s: time of the GPU is not measured: %s: %s", gpu->device->name,
                   what, gpu->device->text);
}

void kvf_gpu_times_make(struct kvf_gpu *gpu, struct kvf_gpu_times *times)
{
    int status;

    if (!gpu->is_timed) {
        return;
    }
    status = kvf_gpu_timed_event_create(gpu->device, &times->begin);
    if (status == KVF_OK) {
        status = kvf_gpu_timed_event_create(gpu->device, &times->end);
    }
    if (status != KVF_OK) {
        stop(gpu, "no events");
    }
}

void kvf_gpu_times_drop(struct kvf_gpu *gpu, struct kvf_gpu_times *times)
{
    kvf_gpu_event_drop(gpu, times->begin);
    kvf_gpu_event_drop(gpu, times->end);
    *times = (struct kvf_gpu_times){0};
}

void kvf_gpu_times_begin(struct kvf_gpu *gpu, struct kvf_gpu_times *times, void *stream)
{
    times->is_begun = gpu->is_timed;
    if (times->is_begun && kvf_gpu_record(gpu, times->begin, stream) != KVF_OK) {
        times->is_begun = false;
        stop(gpu, "not on this stream");
    }
}

void kvf_gpu_times_end(struct kvf_gpu *gpu, struct kvf_gpu_times *times, void *stream)
{
    if (times->is_begun && kvf_gpu_record(gpu, times->end, stream) != KVF_OK) {
        times->is_begun = false;
        stop(gpu, "not on this stream");
    }
}

void kvf_gpu_times_take(struct kvf_gpu *gpu, struct kvf_gpu_times *times, bool is_decode)
{
    uint64_t *left_ns = &gpu->time_ns[is_decode];
    uint64_t us;
    float ms = 0;

    if (!times->is_begun || !gpu->is_timed) {
        return;
    }
    times->is_begun = false;
    if (kvf_gpu_device_result(gpu->device,
                              gpu->device->driver.cuEventElapsedTime(&ms, times->begin, times->end),
                              "cuEventElapsedTime") != KVF_OK) {
        stop(gpu, "no answer");
        return;
    }
    *left_ns += ms > 0 ? (uint64_t)((double)ms * NS_A_MS) : 0;
    us = *left_ns / 1000;
    *left_ns %= 1000; /* is told with the next one */
    (void)kvf_report(gpu->client, KVF_REPORT_GPU_US, us);
    (void)kvf_report(gpu->client, KVF_REPORT_GPU_DECODE_US, is_decode ? us : 0);
}
