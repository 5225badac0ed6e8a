/* SPDX-License-Identifier: Apache-2.0
 *
 * failpoint.c: the table of failpoints, its parser, and what an armed one does.
 */
#include "base/failpoint.h"

#include "base/clock.h"
#include "base/limits.h"
#include "base/parse.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum action {
    ACTION_NONE = 0,
    ACTION_ERROR,
    ACTION_KILL,
    ACTION_DELAY,
};

/* What a point does. Written only by arming, when no other thread can hit it. */
struct plan {
    enum action action;
    uint64_t delay_ns;
    uint64_t first_hit; /* 1-based */
    uint64_t last_hit;
};

#define ITEM_BYTES_MAX 128

_Atomic bool kvf_failpoints_armed;

static const char *const names[KVF_FAILPOINT_COUNT] = {
#define KVF_FAILPOINT_ENTRY(component, event) #component "." #event,
#include "base/failpoint.def"
#undef KVF_FAILPOINT_ENTRY
};

static struct plan plans[KVF_FAILPOINT_COUNT];
static _Atomic uint64_t hit_counts[KVF_FAILPOINT_COUNT];

static void sleep_ns(uint64_t ns)
{
    struct timespec left = {.tv_sec = (time_t)(ns / KVF_NS_PER_S),
                            .tv_nsec = (long)(ns % KVF_NS_PER_S)};

    while (nanosleep(&left, &left) != 0) {
    }
}

int kvf_failpoint_hit(enum kvf_failpoint point)
{
    const struct plan *plan = &plans[point];
    uint64_t hit;

    if (plan->action == ACTION_NONE) {
        return KVF_OK;
    }
    /* relaxed: the counter orders nothing, it only must not lose hits of several threads */
    hit = atomic_fetch_add_explicit(&hit_counts[point], 1, memory_order_relaxed) + 1;
    if (hit < plan->first_hit || hit > plan->last_hit) {
        return KVF_OK;
    }
    switch (plan->action) {
    case ACTION_ERROR:
        return KVF_ERR_IO;
    case ACTION_KILL:
        kill(getpid(), SIGKILL);
        return KVF_ERR_IO;
    case ACTION_DELAY:
        sleep_ns(plan->delay_ns);
        return KVF_OK;
    default:
        return KVF_OK;
    }
}

static int find_point(const char *name)
{
    for (int i = 0; i < KVF_FAILPOINT_COUNT; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

/* "@2", "@2+" without the at sign. */
static int parse_hits(char *text, struct plan *plan, char *error_out, size_t error_bytes)
{
    size_t length = strlen(text);
    bool is_open = length > 0 && text[length - 1] == '+';
    int status;

    if (is_open) {
        text[length - 1] = '\0';
    }
    status = kvf_parse_u64(text, &plan->first_hit, error_out, error_bytes);
    if (status != KVF_OK) {
        return status;
    }
    if (plan->first_hit == 0) {
        snprintf(error_out, error_bytes, "hits count from 1");
        return KVF_ERR_INVALID;
    }
    plan->last_hit = is_open ? UINT64_MAX : plan->first_hit;
    return KVF_OK;
}

static int parse_action(char *text, struct plan *plan, char *error_out, size_t error_bytes)
{
    char *hits = strchr(text, '@');

    *plan = (struct plan){.first_hit = 1, .last_hit = UINT64_MAX};
    if (hits != NULL) {
        *hits++ = '\0';
        if (parse_hits(hits, plan, error_out, error_bytes) != KVF_OK) {
            return KVF_ERR_INVALID;
        }
    }
    if (strcmp(text, "error") == 0) {
        plan->action = ACTION_ERROR;
        return KVF_OK;
    }
    if (strcmp(text, "kill") == 0) {
        plan->action = ACTION_KILL;
        return KVF_OK;
    }
    if (strncmp(text, "delay:", strlen("delay:")) == 0) {
        plan->action = ACTION_DELAY;
        return kvf_parse_duration(text + strlen("delay:"), &plan->delay_ns, error_out, error_bytes);
    }
    snprintf(error_out, error_bytes, "unknown action '%s': use error, kill or delay:<duration>",
             text);
    return KVF_ERR_INVALID;
}

/* One "name=action@hit" of length bytes, into its place in parsed. */
static int parse_item(const char *from, size_t length, struct plan *parsed, char *error_out,
                      size_t error_bytes)
{
    char item[ITEM_BYTES_MAX];
    char *action;
    int point;

    if (length >= sizeof(item)) {
        snprintf(error_out, error_bytes, "an entry is longer than %d bytes", ITEM_BYTES_MAX - 1);
        return KVF_ERR_INVALID;
    }
    memcpy(item, from, length);
    item[length] = '\0';
    action = strchr(item, '=');
    if (action == NULL) {
        snprintf(error_out, error_bytes, "'%s' is not name=action", item);
        return KVF_ERR_INVALID;
    }
    *action++ = '\0';
    point = find_point(item);
    if (point < 0) {
        snprintf(error_out, error_bytes, "no failpoint is named '%s'", item);
        return KVF_ERR_INVALID;
    }
    return parse_action(action, &parsed[point], error_out, error_bytes);
}

int kvf_failpoint_arm(const char *spec, char *error_out, size_t error_bytes)
{
    struct plan parsed[KVF_FAILPOINT_COUNT] = {{0}};
    bool is_armed = false;

    for (const char *from = spec != NULL ? spec : ""; *from != '\0';) {
        size_t length = strcspn(from, ";");

        if (length > 0) {
            int status = parse_item(from, length, parsed, error_out, error_bytes);

            if (status != KVF_OK) {
                return status;
            }
            is_armed = true;
        }
        from += length;
        from += *from == ';';
    }
    memcpy(plans, parsed, sizeof(plans));
    for (int i = 0; i < KVF_FAILPOINT_COUNT; i++) {
        atomic_store_explicit(&hit_counts[i], 0, memory_order_relaxed);
    }
    /* relaxed: by contract no other thread is near, and starting one orders everything before it */
    atomic_store_explicit(&kvf_failpoints_armed, is_armed, memory_order_relaxed);
    return KVF_OK;
}

int kvf_failpoint_arm_env(char *error_out, size_t error_bytes)
{
    const char *spec = getenv("KVFERRY_FAILPOINTS");

    return spec != NULL ? kvf_failpoint_arm(spec, error_out, error_bytes) : KVF_OK;
}

uint64_t kvf_failpoint_hit_count(enum kvf_failpoint point)
{
    return atomic_load_explicit(&hit_counts[point], memory_order_relaxed);
}
