/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_delay.c: a tier around another one whose completions come later.
 */
#include "tiers/tier_delay.h"

#include "base/limits.h"
#include "base/parse.h"
#include "tiers/tier_wrap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OP_STORE = 0,
    OP_LOAD = 1,
    N_OPS = 2,
    SPEC_BYTES = 256,
};

static const char *const op_names[N_OPS] = {"store", "load"};

struct delay {
    uint64_t fixed_ns, jitter_ns;
};

struct delay_tier {
    struct kvf_wrap wrap;
    struct kvf_env env;
    struct delay delays[N_OPS];
    uint64_t seed;
    struct kvf_random_seeded random;
    struct kvf_wrap_io *held; /* by due_ns, the earliest first */
};

/* ---- the specification ----------------------------------------------------------------------- */

static int parse_rule(struct delay_tier *self, char *rule, char *error_out, size_t error_bytes)
{
    char reason[KVF_ERROR_TEXT_BYTES];
    char *value = strchr(rule, ':'), *jitter;
    struct delay *delay = NULL;

    if (strncmp(rule, "seed=", 5) == 0) {
        if (kvf_parse_u64(rule + 5, &self->seed, reason, sizeof(reason)) != KVF_OK) {
            goto bad_value;
        }
        return KVF_OK;
    }
    if (value != NULL) {
        *value++ = '\0';
        for (int op = 0; op < N_OPS; op++) {
            delay = strcmp(rule, op_names[op]) == 0 ? &self->delays[op] : delay;
        }
    }
    if (delay == NULL) {
        snprintf(error_out, error_bytes,
                 "delay \"%s\": use store:TIME, load:TIME (such as load:2ms or load:2ms+1ms) or "
                 "seed=N",
                 rule);
        return KVF_ERR_INVALID;
    }
    jitter = strchr(value, '+');
    if (jitter != NULL) {
        *jitter++ = '\0';
        if (kvf_parse_duration(jitter, &delay->jitter_ns, reason, sizeof(reason)) != KVF_OK) {
            goto bad_value;
        }
    }
    if (kvf_parse_duration(value, &delay->fixed_ns, reason, sizeof(reason)) != KVF_OK) {
        goto bad_value;
    }
    return KVF_OK;

bad_value:
    snprintf(error_out, error_bytes, "delay of \"%s\": %s", rule, reason);
    return KVF_ERR_INVALID;
}

static int parse_spec(struct delay_tier *self, const char *spec, char *error_out,
                      size_t error_bytes)
{
    char text[SPEC_BYTES];
    char *rest = text, *rule;

    if (snprintf(text, sizeof(text), "%s", spec) >= (int)sizeof(text)) {
        snprintf(error_out, error_bytes, "delays: at most %d bytes", SPEC_BYTES - 1);
        return KVF_ERR_INVALID;
    }
    while ((rule = strsep(&rest, ",")) != NULL) {
        if (parse_rule(self, rule, error_out, error_bytes) != KVF_OK) {
            return KVF_ERR_INVALID;
        }
    }
    return KVF_OK;
}

/* ---- the tier -------------------------------------------------------------------------------- */

static void hold(struct delay_tier *self, struct kvf_wrap_io *io)
{
    struct kvf_wrap_io **link = &self->held;

    while (*link != NULL && (*link)->due_ns <= io->due_ns) {
        link = &(*link)->next;
    }
    io->next = *link;
    *link = io;
}

static void came_back(struct kvf_wrap_io *io)
{
    struct delay_tier *self = (struct delay_tier *)io->wrap;
    const struct delay *delay = &self->delays[io->is_marked ? OP_LOAD : OP_STORE];

    io->due_ns = kvf_env_now_ns(&self->env) + delay->fixed_ns;
    if (delay->jitter_ns > 0) {
        io->due_ns += kvf_random_seeded_next(&self->random) % (delay->jitter_ns + 1);
    }
    hold(self, io);
}

static int delay_load(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct kvf_wrap_io *copy = kvf_wrap_take((struct kvf_wrap *)tier, io);

    if (copy == NULL) {
        return KVF_ERR_BUSY;
    }
    copy->is_marked = true;
    return kvf_wrap_load(copy);
}

static unsigned delay_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    struct delay_tier *self = (struct delay_tier *)tier;
    unsigned n_done = 0;

    self->wrap.inner->ops->poll(self->wrap.inner, now_ns);
    while (self->held != NULL && self->held->due_ns <= now_ns) {
        struct kvf_wrap_io *io = self->held;

        self->held = io->next;
        kvf_wrap_complete(io);
        n_done++;
    }
    return n_done;
}

static uint64_t delay_deadline_ns(const struct kvf_tier *tier)
{
    const struct delay_tier *self = (const struct delay_tier *)tier;
    uint64_t inner_ns = self->wrap.inner->ops->deadline_ns(self->wrap.inner);

    return self->held != NULL && self->held->due_ns < inner_ns ? self->held->due_ns : inner_ns;
}

static void delay_close(struct kvf_tier *tier)
{
    struct delay_tier *self = (struct delay_tier *)tier;

    if (self == NULL) {
        return;
    }
    kvf_wrap_fini(&self->wrap);
    free(self);
}

int kvf_delay_open(struct kvf_tier *inner, const char *spec, const struct kvf_env *env,
                   struct kvf_tier **tier_out, char *error_out, size_t error_bytes)
{
    struct delay_tier *self;
    int status;

    if (spec[0] == '\0') {
        *tier_out = inner;
        return KVF_OK;
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        snprintf(error_out, error_bytes, "delays: no memory");
        return KVF_ERR_NO_MEMORY;
    }
    self->env = *env;
    self->seed = 1;
    status = parse_spec(self, spec, error_out, error_bytes);
    if (status == KVF_OK) {
        status = kvf_wrap_init(&self->wrap, inner, came_back);
        if (status != KVF_OK) {
            snprintf(error_out, error_bytes, "delays: no memory");
        }
    }
    if (status != KVF_OK) {
        free(self);
        return status;
    }
    kvf_random_seeded_init(&self->random, self->seed);
    if (inner->ops->load != NULL) {
        self->wrap.ops.load = delay_load;
    }
    self->wrap.ops.poll = delay_poll;
    self->wrap.ops.deadline_ns = delay_deadline_ns;
    self->wrap.ops.close = delay_close;
    *tier_out = &self->wrap.base;
    return KVF_OK;
}
