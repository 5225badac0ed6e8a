/* SPDX-License-Identifier: Apache-2.0
 *
 * test_trace_file.c: traces that are right are read whole; the first wrong line is named, with what
 * to do.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/trace_file.h"

#define HEADER "{\"format\": \"kvferry-trace\", \"version\": 1, \"block_tokens\": 256}\n"
#define LINE   "{\"timestamp\": 5, \"input_length\": 700, \"hash_ids\": [1, 2]}\n"

static int read_text(const char *text, uint32_t block_tokens, struct kvf_trace *trace,
                     char why[KVF_TRACE_WHY_BYTES])
{
    char path[] = "/tmp/kvferry-trace-XXXXXX";
    int fd = mkstemp(path);
    size_t bytes = strlen(text);
    int status;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, bytes), (ssize_t)bytes);
    assert_int_equal(close(fd), 0);
    why[0] = '\0';
    status = kvf_trace_read(path, block_tokens, trace, why);
    assert_int_equal(unlink(path), 0);
    return status;
}

static void test_reads(void **state)
{
    struct kvf_trace trace;
    char why[KVF_TRACE_WHY_BYTES];

    (void)state;
    assert_int_equal(
        read_text("{\"timestamp\": 1000.5, \"input_length\": 513, \"output_length\": 7, "
                  "\"hash_ids\": [3, 4], \"type\": \"text\"}\n\n"
                  "{\"timestamp\": 3000.5, \"input_length\": 512, \"hash_ids\": [3]}",
                  0, &trace, why),
        KVF_OK);
    assert_int_equal(trace.block_tokens, 512);
    assert_int_equal(trace.n_requests, 2);
    assert_int_equal(trace.n_blocks, 3);
    assert_int_equal(trace.input_tokens, 1025);
    assert_int_equal(trace.span_ns, 2 * KVF_NS_PER_S);
    assert_int_equal(trace.requests[0].output_tokens, 7);
    assert_int_equal(trace.requests[0].n_blocks, 2);
    assert_int_equal(trace.requests[1].at_ns, 2 * KVF_NS_PER_S);
    assert_int_equal(trace.blocks[trace.requests[1].first], 3);
    kvf_trace_free(&trace);
    kvf_trace_free(&trace);
}

static void test_block_tokens(void **state)
{
    struct kvf_trace trace;
    char why[KVF_TRACE_WHY_BYTES];

    (void)state;
    assert_int_equal(read_text(HEADER
                               "{\"timestamp\": 0, \"input_length\": 512, \"hash_ids\": [0, 1]}\n",
                               0, &trace, why),
                     KVF_OK);
    assert_int_equal(trace.block_tokens, 256);
    kvf_trace_free(&trace);
    /* the command line goes before what the file says */
    assert_int_equal(read_text(HEADER
                               "{\"timestamp\": 0, \"input_length\": 512, \"hash_ids\": [0]}\n",
                               512, &trace, why),
                     KVF_OK);
    assert_int_equal(trace.block_tokens, 512);
    kvf_trace_free(&trace);
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *where, *what;
    } cases[] = {
        {"", "", "no request"},
        {"\n\n", "", "no request"},
        {HEADER, "", "no request"},
        {"{\n", ":1: ", "one JSON object a line"},
        {"[1]\n", ":1: ", "no JSON object"},
        {LINE "{\"timestamp\": 5, \"timestamp\": 6}\n", ":2: ", "duplicate"},
        {LINE "{\"input_length\": 1, \"hash_ids\": [1]}\n", ":2: ", "timestamp is missing"},
        {LINE "{\"timestamp\": -1, \"input_length\": 1, \"hash_ids\": [1]}\n", ":2: ", "timestamp"},
        {LINE "{\"timestamp\": \"6\", \"input_length\": 1, \"hash_ids\": [1]}\n",
         ":2: ", "timestamp"},
        {LINE LINE "{\"timestamp\": 4, \"input_length\": 1, \"hash_ids\": [1]}\n",
         ":3: ", "sort the lines"},
        {LINE "{\"timestamp\": 6, \"hash_ids\": [1]}\n", ":2: ", "input_length is missing"},
        {LINE "{\"timestamp\": 6, \"input_length\": 0, \"hash_ids\": []}\n",
         ":2: ", "input_length"},
        {LINE "{\"timestamp\": 6, \"input_length\": 1.5, \"hash_ids\": [1]}\n",
         ":2: ", "input_length"},
        {LINE "{\"timestamp\": 6, \"input_length\": 1, \"output_length\": -1, \"hash_ids\": [1]}\n",
         ":2: ", "output_length"},
        {LINE "{\"timestamp\": 6, \"input_length\": 1}\n", ":2: ", "hash_ids is missing"},
        {LINE "{\"timestamp\": 6, \"input_length\": 1, \"hash_ids\": [-1]}\n",
         ":2: ", "hash_ids[0]"},
        {LINE "{\"timestamp\": 6, \"input_length\": 1, \"hash_ids\": [\"a\"]}\n",
         ":2: ", "hash_ids[0]"},
        {LINE "{\"timestamp\": 6, \"input_length\": 1, \"hash_ids\": [1, 2]}\n",
         ":2: ", "--block-tokens"},
        {"{\"format\": \"other\", \"version\": 1, \"block_tokens\": 256}\n", ":1: ", "other"},
        {"{\"format\": \"kvferry-trace\", \"version\": 2, \"block_tokens\": 256}\n",
         ":1: ", "version 2"},
        {"{\"format\": \"kvferry-trace\", \"version\": 1}\n", ":1: ", "block_tokens"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvf_trace trace;
        char why[KVF_TRACE_WHY_BYTES];

        assert_int_equal(read_text(cases[i].text, 0, &trace, why), KVF_ERR_INVALID);
        if (strstr(why, cases[i].where) == NULL || strstr(why, cases[i].what) == NULL) {
            fail_msg("case %zu: %s", i, why);
        }
        kvf_trace_free(&trace);
    }
}

static void test_no_file(void **state)
{
    struct kvf_trace trace;
    char why[KVF_TRACE_WHY_BYTES] = "";

    (void)state;
    assert_int_equal(kvf_trace_read("/nowhere/trace", 0, &trace, why), KVF_ERR_IO);
    assert_non_null(strstr(why, "/nowhere/trace: No such file"));
    kvf_trace_free(&trace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads),
        cmocka_unit_test(test_block_tokens),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_file),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
