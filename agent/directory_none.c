/* SPDX-License-Identifier: Apache-2.0
 *
 * directory_none.c: a build without hiredis has no directory. kvf_directory_open says so; nothing
 * else can be called then.
 */
#include "agent/directory.h"

#include <stdio.h>
#include <stdlib.h>

int kvf_directory_open(const struct kvf_directory_config *config,
                       struct kvf_directory **directory_out, char *why, size_t why_bytes)
{
    (void)config;
    (void)directory_out;
    (void)snprintf(why, why_bytes,
                   "this build has no hiredis; build with libhiredis-dev and KVF_HIREDIS=ON, or "
                   "leave directory.address out");
    return KVF_ERR_UNSUPPORTED;
}

void kvf_directory_close(struct kvf_directory *directory)
{
    if (directory != NULL) {
        abort();
    }
}

void kvf_directory_stat(const struct kvf_directory *directory, struct kvf_directory_stat *stat_out)
{
    (void)directory;
    (void)stat_out;
    abort();
}

int kvf_directory_tell(struct kvf_directory *directory, enum kvf_net_type type, const void *body,
                       uint32_t body_bytes)
{
    (void)directory;
    (void)type;
    (void)body;
    (void)body_bytes;
    abort();
}

int kvf_directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed)
{
    (void)directory;
    (void)incarnation;
    (void)is_followed;
    abort();
}

bool kvf_directory_poll(struct kvf_directory *directory, struct kvf_directory_event *event_out)
{
    (void)directory;
    (void)event_out;
    abort();
}
