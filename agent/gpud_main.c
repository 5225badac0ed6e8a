/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud_main.c: kvferryd-gpu, the process that works on one GPU for kvferryd. The daemon starts it
 * (gpu_host.c); descriptor 3 is its socket to the daemon, and it ends when that does.
 *
 *   kvferryd-gpu DEVICE BURST_BYTES RATE_BYTES_S LOG_LEVEL PARENT     DEVICE: a UUID or an ordinal
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "agent/gpud.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/parse.h"
#include "codec/codec_gpu_image.h"

#define DAEMON_FD 3

/* A worker that outlives its daemon would hold engines' memory. */
static bool is_orphan(const char *parent)
{
    char detail[128];
    uint64_t number = 0;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    return kvf_parse_u64(parent, &number, detail, sizeof(detail)) != KVF_OK ||
           (uint64_t)getppid() != number;
}

static int device_open(struct kvf_gpud *gpud, const char *name, char *text, size_t text_bytes)
{
    struct kvf_gpu_choice choice = {.ordinal = -1};
    char detail[128];
    uint64_t ordinal = 0;
    int status;

    if (kvf_gpu_images[0].name == NULL) {
        (void)snprintf(text, text_bytes, "this build has no kernels (it was made without nvcc)");
        return KVF_ERR_UNSUPPORTED;
    }
    if (kvf_parse_u64(name, &ordinal, detail, sizeof(detail)) == KVF_OK && ordinal < INT32_MAX) {
        choice.ordinal = (int)ordinal;
    } else {
        choice.uuid = name;
    }
    status = kvf_gpu_device_open(&choice, &gpud->device, text, text_bytes);
    for (const struct kvf_gpu_image *image = kvf_gpu_images;
         status == KVF_OK && image->name != NULL; image++) {
        status = kvf_gpu_device_load(gpud->device, image->fatbin);
    }
    if (status == KVF_OK) {
        status = kvf_gpu_device_enter(gpud->device);
    }
    if (status != KVF_OK && gpud->device != NULL) {
        (void)snprintf(text, text_bytes, "%s", gpud->device->text);
    }
    return status;
}

/* Say which GPU this is, or why there is none. */
static void say_ready(struct kvf_gpud *gpud, int status, const char *text)
{
    struct kvf_gpud_ready ready = {.status = status};
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    int n_devices = 0;

    kvf_gpud_head_init(&ready.head, KVF_GPUD_READY, sizeof(ready));
    (void)snprintf(ready.text, sizeof(ready.text), "%s", text);
    if (status == KVF_OK) {
        (void)gpud->device->driver.cuMemGetInfo(&free_bytes, &total_bytes);
        (void)gpud->device->driver.cuDeviceGetCount(&n_devices);
        ready.n_devices = (uint32_t)n_devices;
        ready.free_bytes = free_bytes;
        ready.total_bytes = total_bytes;
        (void)snprintf(ready.uuid, sizeof(ready.uuid), "%s", gpud->device->uuid);
        (void)snprintf(ready.name, sizeof(ready.name), "%.63s", gpud->device->name);
    }
    (void)kvf_seqpacket_send(gpud->fd, &ready, sizeof(ready), NULL, 0);
}

static void ignore_signals(void)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};

    /* whoever ends all processes of a service or a terminal: the daemon drains first */
    sigemptyset(&ignore.sa_mask);
    (void)sigaction(SIGTERM, &ignore, NULL);
    (void)sigaction(SIGINT, &ignore, NULL);
    (void)sigaction(SIGHUP, &ignore, NULL);
    (void)sigaction(SIGPIPE, &ignore, NULL);
}

int main(int argc, char **argv)
{
    struct kvf_gpud gpud = {.fd = DAEMON_FD};
    char text[KVF_GPU_TEXT_BYTES] = "";
    char detail[128];
    uint64_t level = KVF_LOG_INFO;
    uint64_t is_json = 0;
    int status = KVF_ERR_INVALID;

    if (argc != 7 || kvf_parse_u64(argv[2], &gpud.burst_bytes, detail, sizeof(detail)) != KVF_OK ||
        kvf_parse_u64(argv[3], &gpud.rate_bytes_s, detail, sizeof(detail)) != KVF_OK ||
        kvf_parse_u64(argv[4], &level, detail, sizeof(detail)) != KVF_OK ||
        kvf_parse_u64(argv[5], &is_json, detail, sizeof(detail)) != KVF_OK) {
        fprintf(stderr, "kvferryd-gpu: kvferryd starts this program (gpu.devices)\n");
        return 2;
    }
    ignore_signals();
    kvf_log_init(is_json != 0 ? kvf_log_json_sink : kvf_log_stderr_sink, NULL, (int)level);
    if (is_orphan(argv[6]) || kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    status = device_open(&gpud, argv[1], text, sizeof(text));
    gpud.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    gpud.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (status == KVF_OK && (gpud.epoll_fd < 0 || gpud.wake_fd < 0)) {
        status = KVF_ERR_BUSY;
    }
    say_ready(&gpud, status, text);
    if (status == KVF_OK) {
        status = kvf_gpud_run(&gpud);
        kvf_gpu_device_leave(gpud.device);
    }
    (void)kvf_gpu_device_close(gpud.device);
    return status == KVF_OK ? 0 : 1;
}
