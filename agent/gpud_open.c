/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud_open.c: engines' clients of the daemon, opened by threads: an attach waits for the daemon,
 * some seconds at worst, and other engines' copies do not.
 */
#include "agent/gpud.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

enum {
    OPENINGS_MAX = 2 * KVF_GPUD_ENGINES_MAX, /* threads at work */
};

static void on_log(void *arg, int severity, const char *text)
{
    const struct kvf_gpud_opening *opening = arg;

    kvf_log(severity == 2 ? KVF_LOG_DEBUG : severity, "GPU worker: engine %s: %s",
            opening->hello.hello.client_name, text);
}

/* A client of the daemon that is to it what the engine is: of the same namespace and shard. */
static int client_open(struct kvf_gpud_opening *opening)
{
    const struct kvf_wire_hello *hello = &opening->hello.hello;
    struct kvf_geometry geometry = kvf_proto_geometry_get(&hello->geometry);
    char name[KVF_WIRE_NAME_BYTES];
    struct kvf_options options;

    (void)snprintf(name, sizeof(name), "gpu: %.50s", hello->client_name);
    kvf_options_init(&options);
    options.socket_path = opening->socket_path;
    options.geometry = &geometry;
    options.profile = hello->profile;
    options.namespace_label = hello->label;
    options.client_name = name;
    options.flags = hello->flags & KVF_ATTACH_ALLOW_UNCALIBRATED;
    options.shard = hello->shard;
    options.shard_count = hello->shard_count;
    options.ring_entries = hello->ring_entries;
    options.staging_bytes = hello->staging_bytes;
    options.log = on_log;
    options.log_arg = opening;
    memcpy(options.weights_digest, hello->weights_digest, sizeof(options.weights_digest));
    memcpy(options.adapter_digest, hello->adapter_digest, sizeof(options.adapter_digest));
    return kvf_open(&options, &opening->client);
}

static void *run(void *arg)
{
    struct kvf_gpud_opening *opening = arg;
    const uint64_t one = 1;
    int wake_fd = opening->wake_fd;

    opening->status = client_open(opening);
    __atomic_store_n(&opening->is_done, true, __ATOMIC_RELEASE);
    (void)!write(wake_fd, &one, sizeof(one));
    return NULL;
}

struct kvf_gpud_opening *kvf_gpud_opening_new(struct kvf_gpud *gpud, const char *socket_path,
                                              const struct kvf_gpud_hello *hello)
{
    struct kvf_gpud_opening *opening = gpud->n_openings < OPENINGS_MAX ? calloc(1, sizeof(*opening))
                                                                       : NULL;

    if (opening == NULL) {
        return NULL;
    }
    opening->hello = *hello;
    opening->wake_fd = gpud->wake_fd;
    (void)snprintf(opening->socket_path, sizeof(opening->socket_path), "%s", socket_path);
    if (pthread_create(&opening->thread, NULL, run, opening) != 0) {
        free(opening);
        return NULL;
    }
    gpud->n_openings++;
    return opening;
}

bool kvf_gpud_opening_is_done(struct kvf_gpud *gpud, struct kvf_gpud_opening *opening)
{
    if (!opening->is_joined && __atomic_load_n(&opening->is_done, __ATOMIC_ACQUIRE)) {
        (void)pthread_join(opening->thread, NULL);
        opening->is_joined = true;
        gpud->n_openings--;
    }
    return opening->is_joined;
}

struct kvf_gpud_opening *kvf_gpud_opening_drop(struct kvf_gpud *gpud,
                                               struct kvf_gpud_opening *opening)
{
    if (opening == NULL) {
        return NULL;
    }
    if (!kvf_gpud_opening_is_done(gpud, opening)) {
        opening->next = gpud->abandoned;
        gpud->abandoned = opening;
        return NULL;
    }
    opening->client = kvf_close(opening->client);
    free(opening);
    return NULL;
}

void kvf_gpud_openings_tend(struct kvf_gpud *gpud, bool is_last)
{
    struct kvf_gpud_opening **link = &gpud->abandoned;

    while (*link != NULL) {
        struct kvf_gpud_opening *opening = *link;

        if (is_last && !opening->is_joined) {
            (void)pthread_join(opening->thread, NULL);
            opening->is_joined = true;
            gpud->n_openings--;
        }
        if (kvf_gpud_opening_is_done(gpud, opening)) {
            *link = opening->next;
            (void)kvf_gpud_opening_drop(gpud, opening);
        } else {
            link = &opening->next;
        }
    }
}
