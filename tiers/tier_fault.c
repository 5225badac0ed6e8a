/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_fault.c: a tier around another one that fails on demand.
 */
#include "tiers/tier_fault.h"

#include "base/limits.h"
#include "base/parse.h"
#include "base/random.h"
#include "tiers/tier_wrap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum op {
    OP_RESERVE = 0,
    OP_STORE = 1,
    OP_LOAD = 2,
    N_OPS = 3,
};

enum action {
    ACTION_NONE = 0,
    ACTION_ERROR = 1,
    ACTION_BUSY = 2,
    ACTION_CORRUPT = 3,
    N_ACTIONS = 4,
};

enum {
    SPEC_BYTES = 512,
};

static const char *const op_names[N_OPS] = {"reserve", "store", "load"};
static const char *const action_names[N_ACTIONS] = {"", "error", "busy", "corrupt"};

struct rule {
    enum op op;
    enum action action;
    uint64_t from_call, to_call; /* counted from 1, both included */
    uint32_t percent;
};

struct fault_tier {
    struct kvf_wrap wrap;
    struct rule rules[KVF_FAULT_RULES_MAX];
    uint32_t n_rules;
    uint64_t seed;
    struct kvf_random_seeded random;
    uint64_t n_calls[N_OPS];
    struct kvf_wrap_io *failed; /* to be completed by the next poll, in order */
    struct kvf_wrap_io **failed_end;
    uint64_t n_errors, n_busy;
};

/* ---- the specification ----------------------------------------------------------------------- */

static int find_name(const char *const *names, int n_names, const char *name)
{
    for (int i = 0; i < n_names; i++) {
        if (names[i][0] != '\0' && strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

/* When: "@3", "@3+" or "%5", without which a rule holds always. */
static int parse_when(struct rule *rule, char *when, char *reason, size_t reason_bytes)
{
    char kind = *when;
    size_t length = strlen(when);
    bool is_open = kind == '@' && when[length - 1] == '+';
    uint64_t number;

    if (is_open) {
        when[length - 1] = '\0';
    }
    if (kvf_parse_u64(when + 1, &number, reason, reason_bytes) != KVF_OK) {
        return KVF_ERR_INVALID;
    }
    if (kind == '%') {
        if (number == 0 || number > 100) {
            snprintf(reason, reason_bytes, "a chance is 1 to 100 in 100");
            return KVF_ERR_INVALID;
        }
        rule->percent = (uint32_t)number;
        return KVF_OK;
    }
    if (number == 0) {
        snprintf(reason, reason_bytes, "calls are counted from 1");
        return KVF_ERR_INVALID;
    }
    rule->from_call = number;
    rule->to_call = is_open ? UINT64_MAX : number;
    return KVF_OK;
}

static int parse_rule(struct fault_tier *self, char *text, char *reason, size_t reason_bytes)
{
    struct rule rule = {.from_call = 1, .to_call = UINT64_MAX, .percent = 100};
    char *action = strchr(text, ':'), *when;
    int op_index, action_index;

    if (strncmp(text, "seed=", 5) == 0) {
        return kvf_parse_u64(text + 5, &self->seed, reason, reason_bytes);
    }
    if (action == NULL) {
        snprintf(reason, reason_bytes, "use OP:ACTION, such as load:error@3, or seed=N");
        return KVF_ERR_INVALID;
    }
    *action++ = '\0';
    when = strpbrk(action, "@%");
    if (when != NULL) {
        if (parse_when(&rule, when, reason, reason_bytes) != KVF_OK) {
            return KVF_ERR_INVALID;
        }
        *when = '\0';
    }
    op_index = find_name(op_names, N_OPS, text);
    action_index = find_name(action_names, N_ACTIONS, action);
    if (op_index < 0) {
        snprintf(reason, reason_bytes, "reserve, store or load can fail");
        return KVF_ERR_INVALID;
    }
    if (action_index < 0 || (action_index == ACTION_CORRUPT && op_index != OP_LOAD) ||
        (action_index == ACTION_BUSY && op_index == OP_RESERVE)) {
        snprintf(reason, reason_bytes,
                 "use reserve:error, store:error|busy or "
                 "load:error|busy|corrupt");
        return KVF_ERR_INVALID;
    }
    if (self->n_rules == KVF_FAULT_RULES_MAX) {
        snprintf(reason, reason_bytes, "at most %d rules", KVF_FAULT_RULES_MAX);
        return KVF_ERR_INVALID;
    }
    rule.op = (enum op)op_index;
    rule.action = (enum action)action_index;
    self->rules[self->n_rules++] = rule;
    return KVF_OK;
}

static int parse_spec(struct fault_tier *self, const char *spec, char *error_out,
                      size_t error_bytes)
{
    char text[SPEC_BYTES], reason[KVF_ERROR_TEXT_BYTES];
    const char *begin = spec;

    for (;;) {
        size_t length = strcspn(begin, ",");

        if (length >= sizeof(text)) {
            snprintf(error_out, error_bytes, "faults: a rule is at most %d bytes", SPEC_BYTES - 1);
            return KVF_ERR_INVALID;
        }
        memcpy(text, begin, length);
        text[length] = '\0';
        if (parse_rule(self, text, reason, sizeof(reason)) != KVF_OK) {
            snprintf(error_out, error_bytes, "fault \"%.*s\": %s", (int)length, begin, reason);
            return KVF_ERR_INVALID;
        }
        if (begin[length] == '\0') {
            return KVF_OK;
        }
        begin += length + 1;
    }
}

/* ---- the tier -------------------------------------------------------------------------------- */

/* Count a call and say what shall become of it. */
static enum action next_action(struct fault_tier *self, enum op op)
{
    uint64_t call = ++self->n_calls[op];

    for (uint32_t i = 0; i < self->n_rules; i++) {
        const struct rule *rule = &self->rules[i];

        if (rule->op == op && call >= rule->from_call && call <= rule->to_call &&
            (rule->percent == 100 || kvf_random_seeded_next(&self->random) % 100 < rule->percent)) {
            return rule->action;
        }
    }
    return ACTION_NONE;
}

static int fault_reserve(struct kvf_tier *tier, uint16_t tenant, uint64_t record_bytes,
                         kvf_cookie cookie, kvf_location *location_out)
{
    struct fault_tier *self = (struct fault_tier *)tier;
    struct kvf_tier *inner = self->wrap.inner;

    if (next_action(self, OP_RESERVE) == ACTION_ERROR) {
        self->n_busy++;
        return KVF_ERR_BUSY;
    }
    return inner->ops->reserve(inner, tenant, record_bytes, cookie, location_out);
}

/* A store or load, or the failure that it is to have. */
static int start(struct fault_tier *self, struct kvf_tier_io *io, enum op op,
                 int (*pass)(struct kvf_wrap_io *io))
{
    enum action action = next_action(self, op);
    struct kvf_wrap_io *copy;

    if (action == ACTION_BUSY) {
        self->n_busy++;
        return KVF_ERR_BUSY;
    }
    copy = kvf_wrap_take(&self->wrap, io);
    if (copy == NULL) {
        return KVF_ERR_BUSY;
    }
    if (action == ACTION_ERROR) {
        self->n_errors++;
        copy->inner.status = KVF_ERR_IO;
        copy->next = NULL;
        *self->failed_end = copy;
        self->failed_end = &copy->next;
        return KVF_OK;
    }
    copy->is_marked = action == ACTION_CORRUPT;
    return pass(copy);
}

static int fault_store(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    return start((struct fault_tier *)tier, io, OP_STORE, kvf_wrap_store);
}

static int fault_load(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    return start((struct fault_tier *)tier, io, OP_LOAD, kvf_wrap_load);
}

static void came_back(struct kvf_wrap_io *io)
{
    struct fault_tier *self = (struct fault_tier *)io->wrap;

    if (io->is_marked && io->inner.status == KVF_OK) {
        uint64_t number = kvf_random_seeded_next(&self->random);
        unsigned char *record = io->inner.record;

        record[number % io->inner.record_bytes] ^= (unsigned char)(1u << (number >> 61));
    }
    kvf_wrap_complete(io);
}

static unsigned fault_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    struct fault_tier *self = (struct fault_tier *)tier;
    struct kvf_wrap_io *io = self->failed;
    unsigned n_done = 0;

    /* the list as it is now: what done starts and what fails again waits for the next poll */
    self->failed = NULL;
    self->failed_end = &self->failed;
    while (io != NULL) {
        struct kvf_wrap_io *next = io->next;

        kvf_wrap_complete(io);
        n_done++;
        io = next;
    }
    return n_done + self->wrap.inner->ops->poll(self->wrap.inner, now_ns);
}

static uint64_t fault_deadline_ns(const struct kvf_tier *tier)
{
    const struct fault_tier *self = (const struct fault_tier *)tier;

    return self->failed != NULL ? 0 : self->wrap.inner->ops->deadline_ns(self->wrap.inner);
}

static void fault_stat(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out)
{
    const struct fault_tier *self = (const struct fault_tier *)tier;

    self->wrap.inner->ops->stat(self->wrap.inner, stat_out);
    stat_out->errors_io += self->n_errors;
    stat_out->busy += self->n_busy;
}

static void fault_close(struct kvf_tier *tier)
{
    struct fault_tier *self = (struct fault_tier *)tier;

    if (self == NULL) {
        return;
    }
    kvf_wrap_fini(&self->wrap);
    free(self);
}

int kvf_fault_open(struct kvf_tier *inner, const char *spec, struct kvf_tier **tier_out,
                   char *error_out, size_t error_bytes)
{
    struct fault_tier *self;
    int status;

    if (spec[0] == '\0') {
        *tier_out = inner;
        return KVF_OK;
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        snprintf(error_out, error_bytes, "faults: no memory");
        return KVF_ERR_NO_MEMORY;
    }
    self->seed = 1;
    self->failed_end = &self->failed;
    status = parse_spec(self, spec, error_out, error_bytes);
    if (status == KVF_OK) {
        status = kvf_wrap_init(&self->wrap, inner, came_back);
        if (status != KVF_OK) {
            snprintf(error_out, error_bytes, "faults: no memory");
        }
    }
    if (status != KVF_OK) {
        free(self);
        return status;
    }
    kvf_random_seeded_init(&self->random, self->seed);
    if (inner->ops->reserve != NULL) {
        self->wrap.ops.reserve = fault_reserve;
    }
    if (inner->ops->store != NULL) {
        self->wrap.ops.store = fault_store;
        self->wrap.ops.load = fault_load;
    }
    self->wrap.ops.poll = fault_poll;
    self->wrap.ops.deadline_ns = fault_deadline_ns;
    self->wrap.ops.stat = fault_stat;
    self->wrap.ops.close = fault_close;
    *tier_out = &self->wrap.base;
    return KVF_OK;
}
