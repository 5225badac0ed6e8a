/* SPDX-License-Identifier: Apache-2.0
 *
 * test_metrics.c: buckets hold what they say, and the Prometheus text is what a scraper expects:
 * every metric of the table once, with help and type, histograms that add up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/control.h"
#include "agent/metrics.h"

static void assert_contains(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fail_msg("'%s' is not in\n%s", part, text);
    }
}

static unsigned count_of(const char *text, const char *part)
{
    unsigned n = 0;

    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part)) {
        n++;
    }
    return n;
}

/* Edges belong to the bucket that they close, as Prometheus has it. */
static void test_buckets(void **state)
{
    (void)state;
    for (unsigned i = 0; i < KVF_HISTOGRAM_BUCKETS - 1; i++) {
        struct kvf_histogram histogram = {0};
        uint64_t edge = 1ull << (KVF_HISTOGRAM_SHIFT + i);

        kvf_histogram_add(&histogram, edge);
        assert_int_equal(histogram.buckets[i], 1);
        kvf_histogram_add(&histogram, edge + 1);
        assert_int_equal(histogram.buckets[i + 1], 1);
        assert_int_equal(histogram.count, 2);
        assert_int_equal(histogram.sum_ns, 2 * edge + 1);
    }
    for (uint64_t ns = 0; ns <= 1024; ns += 512) {
        struct kvf_histogram histogram = {0};

        kvf_histogram_add(&histogram, ns);
        assert_int_equal(histogram.buckets[0], 1);
    }
    struct kvf_histogram longest = {0};

    kvf_histogram_add(&longest, UINT64_MAX);
    assert_int_equal(longest.buckets[KVF_HISTOGRAM_BUCKETS - 1], 1);
}

static void test_quantiles(void **state)
{
    struct kvf_histogram histogram = {0};

    (void)state;
    assert_int_equal(kvf_histogram_quantile_ns(&histogram, 0.5), 0);
    for (unsigned i = 0; i < 98; i++) {
        kvf_histogram_add(&histogram, 3000);
    }
    kvf_histogram_add(&histogram, 1000000);
    kvf_histogram_add(&histogram, 100ull << 32);
    assert_int_equal(kvf_histogram_quantile_ns(&histogram, 0), 4096);
    assert_int_equal(kvf_histogram_quantile_ns(&histogram, 0.5), 4096);
    assert_int_equal(kvf_histogram_quantile_ns(&histogram, 0.98), 4096);
    assert_int_equal(kvf_histogram_quantile_ns(&histogram, 0.99), 1 << 20);
    assert_true(kvf_histogram_quantile_ns(&histogram, 1) == UINT64_MAX);
}

static struct kvf_control_stat *new_stat(void)
{
    struct kvf_control_stat *stat = calloc(1, sizeof(*stat));

    assert_non_null(stat);
    snprintf(stat->version, sizeof(stat->version), "1.2.3");
    stat->ready = true;
    stat->dram.stored_bytes = 4711;
    stat->dram_fill = 0.9375;
    stat->n_drives = 2;
    snprintf(stat->drives[0].path, sizeof(stat->drives[0].path), "/dev/a\"b\\c\nd");
    snprintf(stat->drives[0].engine, sizeof(stat->drives[0].engine), "threads");
    stat->drives[1].tier.off = true;
    stat->drives[1].tier.queue_depth = 17;
    stat->drives[1].tier.errors_io = 5;
    stat->metrics.put_blocks = 12;
    stat->metrics.clients = 3;
    stat->metrics.loop_busy_ns = 1500000000;
    kvf_histogram_add(&stat->metrics.put_ns, 1024);
    kvf_histogram_add(&stat->metrics.put_ns, 5000000000);
    kvf_histogram_add(&stat->metrics.put_ns, 1ull << 40);
    return stat;
}

static void test_values(void **state)
{
    struct kvf_control_stat *stat = new_stat();
    char *text;
    size_t bytes;

    (void)state;
    assert_int_equal(kvf_metrics_render_text(stat, &text, &bytes), KVF_OK);
    assert_int_equal(strlen(text), bytes);
    assert_contains(text, "\nkvferry_put_blocks_total 12\n");
    assert_contains(text, "\nkvferry_clients 3\n");
    assert_contains(text, "\nkvferry_ready 1\n");
    assert_contains(text, "\nkvferry_loop_busy_seconds_total 1.500000000\n");
    assert_contains(text, "\nkvferry_dram_fill_ratio 0.937500\n");
    assert_contains(text, "kvferry_build_info{version=\"1.2.3\"} 1\n");
    assert_contains(text, "kvferry_drive_info{drive=\"0\",path=\"/dev/a\\\"b\\\\c\\nd\","
                          "engine=\"threads\"} 1\n");
    assert_contains(text, "\nkvferry_tier_stored_bytes{tier=\"dram\",drive=\"\"} 4711\n");
    assert_contains(text, "\nkvferry_tier_off{tier=\"nvme\",drive=\"1\"} 1\n");
    assert_contains(text, "\nkvferry_tier_queue_depth{tier=\"nvme\",drive=\"1\"} 17\n");
    assert_contains(text, "\nkvferry_tier_io_errors_total{tier=\"nvme\",drive=\"1\"} 5\n");
    free(text);
    free(stat);
}

static void test_histogram_text(void **state)
{
    struct kvf_control_stat *stat = new_stat();
    char *text;
    size_t bytes;

    (void)state;
    assert_int_equal(kvf_metrics_render_text(stat, &text, &bytes), KVF_OK);
    assert_contains(text, "# TYPE kvferry_put_seconds histogram\n");
    /* Buckets are cumulative, in seconds, and the last one is everything. */
    assert_contains(text, "kvferry_put_seconds_bucket{le=\"1.024e-06\"} 1\n");
    assert_contains(text, "kvferry_put_seconds_bucket{le=\"8.58993459\"} 2\n");
    assert_contains(text, "kvferry_put_seconds_bucket{le=\"34.3597384\"} 2\n");
    assert_contains(text, "kvferry_put_seconds_bucket{le=\"+Inf\"} 3\n");
    assert_contains(text, "kvferry_put_seconds_count 3\n");
    assert_contains(text, "kvferry_put_seconds_sum 1104.511628800\n");
    free(text);
    free(stat);
}

/* Each sample line belongs to the family announced last, and no family comes twice. */
static void test_shape(void **state)
{
    struct kvf_control_stat *stat = new_stat();
    char family[128] = "";
    char *text;
    char *save;
    size_t bytes;

    (void)state;
    assert_int_equal(kvf_metrics_render_text(stat, &text, &bytes), KVF_OK);
#define KVF_COUNTER(field, help)   assert_true(count_of(text, help) >= 1);
#define KVF_GAUGE(field, help)     assert_true(count_of(text, help) >= 1);
#define KVF_HISTOGRAM(field, help) assert_true(count_of(text, help) >= 1);
#include "agent/metrics.def"
    assert_int_equal(text[bytes - 1], '\n');
    for (char *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char name[128];
        char type[32];

        if (sscanf(line, "# HELP %127s", name) == 1) {
            assert_true(strncmp(name, "kvferry_", 8) == 0);
            assert_string_not_equal(name, family);
            snprintf(family, sizeof(family), "%s", name);
            continue;
        }
        if (sscanf(line, "# TYPE %127s %31s", name, type) == 2) {
            size_t length = strlen(name);

            assert_string_equal(name, family);
            assert_int_equal(strcmp(type, "counter") == 0,
                             length > 6 && strcmp(name + length - 6, "_total") == 0);
            continue;
        }
        assert_int_equal(strncmp(line, family, strlen(family)), 0);
    }
    free(text);
    free(stat);
}

static void test_no_family_twice(void **state)
{
    struct kvf_control_stat *stat = new_stat();
    char *text;
    size_t bytes;

    (void)state;
    assert_int_equal(kvf_metrics_render_text(stat, &text, &bytes), KVF_OK);
    for (const char *at = strstr(text, "# TYPE "); at != NULL; at = strstr(at + 1, "# TYPE ")) {
        char head[160];

        snprintf(head, sizeof(head), "%.*s ", (int)strcspn(at + 7, " "), at + 7);
        memmove(head + 7, head, strlen(head) + 1);
        memcpy(head, "# TYPE ", 7);
        if (count_of(text, head) != 1) {
            fail_msg("%s comes more than once", head);
        }
    }
    free(text);
    free(stat);
}

static void test_json(void **state)
{
    struct kvf_control_stat *stat = new_stat();
    json_t *json = kvf_metrics_json(&stat->metrics);
    json_t *put = json_object_get(json, "put_ns");

    (void)state;
    assert_int_equal(json_integer_value(json_object_get(json, "put_blocks")), 12);
    assert_int_equal(json_integer_value(json_object_get(json, "loop_busy_ns")), 1500000000);
    assert_int_equal(json_integer_value(json_object_get(put, "count")), 3);
    assert_int_equal(json_integer_value(json_object_get(put, "p50_ns")), 1ll << 33);
    assert_true(json_is_null(json_object_get(put, "p99_ns")));
    json_decref(json);
    free(stat);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets), cmocka_unit_test(test_quantiles),
        cmocka_unit_test(test_values),  cmocka_unit_test(test_histogram_text),
        cmocka_unit_test(test_shape),   cmocka_unit_test(test_no_family_twice),
        cmocka_unit_test(test_json),
    };

    return cmocka_run_group_tests_name("metrics", tests, NULL, NULL);
}
