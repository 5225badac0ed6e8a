/* SPDX-License-Identifier: Apache-2.0
 *
 * log.h: one line of text for people, with a severity.
 *
 * A daemon or tool has one sink for the process: kvf_log. A library must not write to its host's
 * stderr, so each client handle has a kvf_logger of its own around the host's callback, and code
 * shared by daemon and library takes a kvf_logger. The process has no sink until one is set.
 *
 * A line is cut at KVF_LOG_LINE_BYTES and control characters in it become '?', so that a client's
 * name cannot forge lines.
 */
#ifndef KVF_BASE_LOG_H
#define KVF_BASE_LOG_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

/* The severities of kvf_log_fn. */
enum kvf_log_level {
    KVF_LOG_ERROR = 0,
    KVF_LOG_WARNING = 1,
    KVF_LOG_INFO = 2,
    KVF_LOG_DEBUG = 3,
};

/* "error", "warning", "info", "debug"; "unknown" for other numbers. Static storage. */
const char *kvf_log_level_name(int level);

/* The level of such a name. KVF_OK; KVF_ERR_INVALID. */
int kvf_log_level_parse(const char *name, int *level_out);

/* A sink and the least severe level that it wants. Zeroed: silent. Owner: whoever holds it. */
struct kvf_logger {
    kvf_log_fn fn;
    void *arg;
    int level;
};

/* Format and hand one line to the logger's sink, on the calling thread. logger may be NULL. The
 * sink decides whether that can block. Keeps errno. */
void kvf_logger_log(const struct kvf_logger *logger, int level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Set the sink (NULL: silent) and level of the process, while no other thread logs. */
void kvf_log_init(kvf_log_fn fn, void *arg, int level);

/* Another level for the process. Any thread. */
void kvf_log_level_set(int level);

/* The level of the process. Any thread. */
int kvf_log_level_get(void);

/* The logger of the process, for code that takes one. Never NULL. */
const struct kvf_logger *kvf_log_process(void);

/* One line to the sink of the process. Any thread. Keeps errno. */
void kvf_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Whether this thread's lines are left out. */
void kvf_log_hush(bool is_hushed);

/* A sink for daemons: one write to stderr a line, "2026-08-01T12:00:00.123Z +81.002341 warning:
 * text". The second figure is the monotonic clock in seconds: it never steps, so differences
 * between lines hold even when the wall clock is set. If stderr is the systemd journal
 * (JOURNAL_STREAM names it), the line is "<4>text" instead, because the journal has its own times.
 * arg is ignored. */
void kvf_log_stderr_sink(void *arg, int severity, const char *text);

/* The same for collectors: one object a line, {"time": as above, "monotonic": seconds, "level":
 * "warning", "message": "text"}. Bytes that are not ASCII become '?'. */
void kvf_log_json_sink(void *arg, int severity, const char *text);

/* At most burst lines an interval for one kind of message. Zero is not valid; fill the first two.
 * Owner: one thread. */
struct kvf_log_limit {
    uint64_t interval_ns;
    uint32_t burst_count;
    uint32_t used_count;
    uint64_t window_start_ns;
    uint64_t suppressed_count; /* since the last line that was allowed */
};

/* May one more line be logged at now_ns? If so, *suppressed_out says how many were not since the
 * last one that was, for the line to mention; it is written only then. */
bool kvf_log_limit_allow(struct kvf_log_limit *limit, uint64_t now_ns, uint64_t *suppressed_out);

#endif /* KVF_BASE_LOG_H */
