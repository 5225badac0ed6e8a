/* SPDX-License-Identifier: Apache-2.0
 *
 * test_log.c: what reaches a sink, what stderr shows, and how lines are limited.
 */
#include "base/log.h"

#include "base/clock.h"
#include "base/limits.h"
#include "tests/support/support.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <regex.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

struct seen {
    int count;
    int severity;
    char text[KVF_LOG_LINE_BYTES + 1];
};

static void remember(void *arg, int severity, const char *text)
{
    struct seen *seen = arg;

    seen->count++;
    seen->severity = severity;
    snprintf(seen->text, sizeof(seen->text), "%s", text);
    errno = EIO;
}

static void levels_filter(void **state)
{
    struct seen seen = {0};
    const struct kvf_logger logger = {.fn = remember, .arg = &seen, .level = KVF_LOG_WARNING};

    (void)state;
    kvf_logger_log(&logger, KVF_LOG_INFO, "no");
    assert_int_equal(seen.count, 0);
    kvf_logger_log(&logger, KVF_LOG_WARNING, "yes %d", 1);
    assert_int_equal(seen.severity, KVF_LOG_WARNING);
    assert_string_equal(seen.text, "yes 1");
    kvf_logger_log(&logger, KVF_LOG_ERROR, "worse");
    assert_int_equal(seen.count, 2);
}

static void silence_is_the_default(void **state)
{
    const struct kvf_logger none = {0};

    (void)state;
    kvf_logger_log(NULL, KVF_LOG_ERROR, "nobody");
    kvf_logger_log(&none, KVF_LOG_ERROR, "nobody");
    kvf_log(KVF_LOG_ERROR, "nobody");
}

static void errno_survives(void **state)
{
    struct seen seen = {0};
    const struct kvf_logger logger = {.fn = remember, .arg = &seen, .level = KVF_LOG_DEBUG};

    (void)state;
    errno = ENOSPC;
    kvf_logger_log(&logger, KVF_LOG_ERROR, "%s", "text");
    assert_int_equal(errno, ENOSPC);
}

static void lines_cannot_be_forged(void **state)
{
    struct seen seen = {0};
    const struct kvf_logger logger = {.fn = remember, .arg = &seen, .level = KVF_LOG_DEBUG};

    (void)state;
    kvf_logger_log(&logger, KVF_LOG_INFO, "name '%s'", "a\nb\r\x1b[31m\x7f\xc3\xa9");
    assert_string_equal(seen.text, "name 'a?b??[31m?\xc3\xa9'");
}

static void long_lines_are_cut(void **state)
{
    struct seen seen = {0};
    const struct kvf_logger logger = {.fn = remember, .arg = &seen, .level = KVF_LOG_DEBUG};
    char text[KVF_LOG_LINE_BYTES + 1];

    (void)state;
    memset(text, 'x', sizeof(text));
    text[KVF_LOG_LINE_BYTES - 1] = '\0';
    kvf_logger_log(&logger, KVF_LOG_INFO, "%s", text);
    assert_string_equal(seen.text, text);
    kvf_logger_log(&logger, KVF_LOG_INFO, "%s%s", text, "x");
    assert_int_equal(strlen(seen.text), KVF_LOG_LINE_BYTES - 1);
    assert_string_equal(seen.text + KVF_LOG_LINE_BYTES - 5, "x...");
}

static void process_sink(void **state)
{
    struct seen seen = {0};

    (void)state;
    kvf_log_init(remember, &seen, KVF_LOG_INFO);
    kvf_log(KVF_LOG_INFO, "one");
    kvf_log(KVF_LOG_DEBUG, "two");
    kvf_logger_log(kvf_log_process(), KVF_LOG_ERROR, "three");
    kvf_log_level_set(KVF_LOG_ERROR);
    assert_int_equal(kvf_log_level_get(), KVF_LOG_ERROR);
    kvf_log(KVF_LOG_WARNING, "no longer");
    kvf_log_init(NULL, NULL, 0);
    kvf_log(KVF_LOG_ERROR, "four");
    assert_int_equal(seen.count, 2);
    assert_string_equal(seen.text, "three");
}

/* What a sink writes for one warning, stderr being a new file. */
static char *capture_stderr(kvf_log_fn sink, bool is_journal, const char *line)
{
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES];
    char stream[64];
    struct stat st;
    int saved;
    int fd;
    char *text;

    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "stderr", path);
    fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    snprintf(stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev,
             (uintmax_t)st.st_ino + (is_journal ? 0 : 1));
    setenv("JOURNAL_STREAM", stream, 1);
    saved = dup(STDERR_FILENO);
    dup2(fd, STDERR_FILENO);
    sink(NULL, KVF_LOG_WARNING, line);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(fd);
    unsetenv("JOURNAL_STREAM");
    text = kvf_test_file_read(path, NULL);
    assert_non_null(text);
    kvf_test_dir_remove(&dir);
    return text;
}

static void stderr_lines_have_both_clocks(void **state)
{
    char *text = capture_stderr(kvf_log_stderr_sink, false, "drive is slow");
    regex_t pattern;

    (void)state;
    assert_int_equal(regcomp(&pattern,
                             "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z "
                             "\\+[0-9]+\\.[0-9]{6} warning: drive is slow\n$",
                             REG_EXTENDED | REG_NOSUB),
                     0);
    assert_int_equal(regexec(&pattern, text, 0, NULL, 0), 0);
    regfree(&pattern);
    free(text);
}

static void journal_lines_have_a_priority(void **state)
{
    char *text = capture_stderr(kvf_log_stderr_sink, true, "drive is slow");

    (void)state;
    assert_string_equal(text, "<4>drive is slow\n");
    free(text);
}

static void json_lines_are_objects(void **state)
{
    static const char pattern_text[] =
        "^\\{\"time\":\"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z\","
        "\"monotonic\":[0-9]+\\.[0-9]{6},\"level\":\"warning\","
        "\"message\":\"a \\\\\"b\\\\\" \\\\\\\\ caf\\?\\?\"\\}\n$";
    char longest[KVF_LOG_LINE_BYTES];
    char *text = capture_stderr(kvf_log_json_sink, true, "a \"b\" \\ caf\xc3\xa9");
    regex_t pattern;

    (void)state;
    assert_int_equal(regcomp(&pattern, pattern_text, REG_EXTENDED | REG_NOSUB), 0);
    assert_int_equal(regexec(&pattern, text, 0, NULL, 0), 0);
    regfree(&pattern);
    free(text);
    memset(longest, '"', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    text = capture_stderr(kvf_log_json_sink, false, longest);
    assert_non_null(strstr(text, "\\\"\"}\n"));
    assert_true(strlen(text) > 2 * sizeof(longest));
    free(text);
}

static void level_names(void **state)
{
    int level = -1;

    (void)state;
    for (int i = KVF_LOG_ERROR; i <= KVF_LOG_DEBUG; i++) {
        assert_int_equal(kvf_log_level_parse(kvf_log_level_name(i), &level), KVF_OK);
        assert_int_equal(level, i);
    }
    assert_int_equal(kvf_log_level_parse("loud", &level), KVF_ERR_INVALID);
    assert_int_equal(level, KVF_LOG_DEBUG);
    assert_string_equal(kvf_log_level_name(4), "unknown");
    assert_string_equal(kvf_log_level_name(-1), "unknown");
}

static void limit_counts_what_it_hides(void **state)
{
    struct kvf_log_limit limit = {.interval_ns = 10, .burst_count = 2};
    uint64_t suppressed_count = 77;

    (void)state;
    assert_true(kvf_log_limit_allow(&limit, 100, &suppressed_count));
    assert_int_equal(suppressed_count, 0);
    assert_true(kvf_log_limit_allow(&limit, 105, &suppressed_count));
    for (int i = 0; i < 3; i++) {
        assert_false(kvf_log_limit_allow(&limit, 109, &suppressed_count));
    }
    assert_int_equal(suppressed_count, 0);
    assert_true(kvf_log_limit_allow(&limit, 110, &suppressed_count));
    assert_int_equal(suppressed_count, 3);
    assert_true(kvf_log_limit_allow(&limit, 111, &suppressed_count));
    assert_int_equal(suppressed_count, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(silence_is_the_default),
        cmocka_unit_test(levels_filter),
        cmocka_unit_test(errno_survives),
        cmocka_unit_test(lines_cannot_be_forged),
        cmocka_unit_test(long_lines_are_cut),
        cmocka_unit_test(process_sink),
        cmocka_unit_test(stderr_lines_have_both_clocks),
        cmocka_unit_test(journal_lines_have_a_priority),
        cmocka_unit_test(json_lines_are_objects),
        cmocka_unit_test(level_names),
        cmocka_unit_test(limit_counts_what_it_hides),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
