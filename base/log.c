/* SPDX-License-Identifier: Apache-2.0
 *
 * log.c: formatting of log lines, the sink of the process, and the sink for stderr.
 */
#include "base/log.h"

#include "base/limits.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warning", "info", "debug"};

/* The same severities as syslog numbers them. */
static const int journal_priorities[] = {3, 4, 6, 7};

#define LEVELS ((int)(sizeof(level_names) / sizeof(level_names[0])))

static struct kvf_logger process_logger;
static _Thread_local bool thread_is_hushed;

void kvf_log_hush(bool is_hushed)
{
    thread_is_hushed = is_hushed;
}

const char *kvf_log_level_name(int level)
{
    return level >= 0 && level < LEVELS ? level_names[level] : "unknown";
}

int kvf_log_level_parse(const char *name, int *level_out)
{
    for (int level = 0; level < LEVELS; level++) {
        if (strcmp(name, level_names[level]) == 0) {
            *level_out = level;
            return KVF_OK;
        }
    }
    return KVF_ERR_INVALID;
}

static void logger_vlog(const struct kvf_logger *logger, int level, const char *fmt, va_list args)
{
    char line[KVF_LOG_LINE_BYTES];
    int saved_errno = errno;
    int length;

    if (logger == NULL || logger->fn == NULL ||
        level > __atomic_load_n(&logger->level, __ATOMIC_RELAXED)) {
        return;
    }
    length = vsnprintf(line, sizeof(line), fmt, args);
    if (length < 0) {
        return;
    }
    if ((size_t)length >= sizeof(line)) {
        memcpy(line + sizeof(line) - sizeof("..."), "...", sizeof("..."));
    }
    for (char *c = line; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
    logger->fn(logger->arg, level, line);
    errno = saved_errno;
}

void kvf_logger_log(const struct kvf_logger *logger, int level, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    logger_vlog(logger, level, fmt, args);
    va_end(args);
}

void kvf_log_init(kvf_log_fn fn, void *arg, int level)
{
    process_logger = (struct kvf_logger){.fn = fn, .arg = arg, .level = level};
}

void kvf_log_level_set(int level)
{
    __atomic_store_n(&process_logger.level, level, __ATOMIC_RELAXED);
}

int kvf_log_level_get(void)
{
    return __atomic_load_n(&process_logger.level, __ATOMIC_RELAXED);
}

const struct kvf_logger *kvf_log_process(void)
{
    return &process_logger;
}

void kvf_log(int level, const char *fmt, ...)
{
    va_list args;

    if (thread_is_hushed) {
        return;
    }
    va_start(args, fmt);
    logger_vlog(&process_logger, level, fmt, args);
    va_end(args);
}

/* JOURNAL_STREAM is inherited by children whose stderr goes elsewhere, so it is believed only if it
 * names the device and inode that stderr is now. */
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    char expected[64];
    struct stat st;

    if (stream == NULL || fstat(STDERR_FILENO, &st) != 0) {
        return false;
    }
    snprintf(expected, sizeof(expected), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    return strcmp(stream, expected) == 0;
}

/* Of a time that snprintf could be given; ours takes 25. */
#define WALL_BYTES 96

/* "2026-08-01T12:00:00.123Z" */
static void wall_text(char out[WALL_BYTES])
{
    struct timespec wall;
    struct tm utc;

    clock_gettime(CLOCK_REALTIME, &wall);
    gmtime_r(&wall.tv_sec, &utc);
    snprintf(out, WALL_BYTES, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ", utc.tm_year + 1900,
             utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
             wall.tv_nsec / 1000000);
}

/* One write a line keeps lines of several threads whole. A line that stderr does not take is lost:
 * there is nowhere left to say so. */
static void write_line(const char *line, int length)
{
    if (length > 0 && write(STDERR_FILENO, line, (size_t)length) < 0) {
        return;
    }
}

static int known_severity(int severity)
{
    return severity >= 0 && severity < LEVELS ? severity : KVF_LOG_ERROR;
}

void kvf_log_stderr_sink(void *arg, int severity, const char *text)
{
    char line[KVF_LOG_LINE_BYTES + WALL_BYTES + 64];
    struct timespec mono;
    char wall[WALL_BYTES];
    int length;

    (void)arg;
    severity = known_severity(severity);
    if (stderr_is_journal()) {
        length = snprintf(line, sizeof(line), "<%d>%s\n", journal_priorities[severity], text);
    } else {
        clock_gettime(CLOCK_MONOTONIC, &mono);
        wall_text(wall);
        length = snprintf(line, sizeof(line), "%s +%jd.%06ld %s: %s\n", wall, (intmax_t)mono.tv_sec,
                          mono.tv_nsec / 1000, level_names[severity], text);
    }
    if (length > 0 && (size_t)length >= sizeof(line)) {
        length = sizeof(line) - 1;
        line[length - 1] = '\n';
    }
    write_line(line, length);
}

void kvf_log_json_sink(void *arg, int severity, const char *text)
{
    char line[2 * KVF_LOG_LINE_BYTES + WALL_BYTES + 128];
    struct timespec mono;
    char wall[WALL_BYTES];
    int length;

    (void)arg;
    clock_gettime(CLOCK_MONOTONIC, &mono);
    wall_text(wall);
    length = snprintf(line, sizeof(line),
                      "{\"time\":\"%s\",\"monotonic\":%jd.%06ld,\"level\":\"%s\",\"message\":\"",
                      wall, (intmax_t)mono.tv_sec, mono.tv_nsec / 1000,
                      level_names[known_severity(severity)]);
    for (const char *c = text; *c != '\0' && (size_t)length < sizeof(line) - 5; c++) {
        if (*c == '"' || *c == '\\') {
            line[length++] = '\\';
        }
        line[length++] = *c;
        if ((unsigned char)*c < 0x20 || (unsigned char)*c > 0x7e) {
            line[length - 1] = '?';
        }
    }
    memcpy(line + length, "\"}\n", 3);
    write_line(line, length + 3);
}

bool kvf_log_limit_allow(struct kvf_log_limit *limit, uint64_t now_ns, uint64_t *suppressed_out)
{
    if (now_ns - limit->window_start_ns >= limit->interval_ns) {
        limit->window_start_ns = now_ns;
        limit->used_count = 0;
    }
    if (limit->used_count >= limit->burst_count) {
        limit->suppressed_count++;
        return false;
    }
    limit->used_count++;
    *suppressed_out = limit->suppressed_count;
    limit->suppressed_count = 0;
    return true;
}
