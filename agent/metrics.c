/* SPDX-License-Identifier: Apache-2.0
 *
 * metrics.c: metrics as Prometheus text and as JSON. Names, kinds and help come from metrics.def
 * and from the tables below; nothing here runs on the reactor.
 */
#include "agent/metrics.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/control.h"

#define NS_PER_S 1e9

uint64_t kvf_histogram_quantile_ns(const struct kvf_histogram *histogram, double quantile)
{
    uint64_t seen = 0;
    double wanted = quantile * (double)histogram->count;

    if (histogram->count == 0) {
        return 0;
    }
    for (unsigned i = 0; i < KVF_HISTOGRAM_BUCKETS - 1; i++) {
        seen += histogram->buckets[i];
        if ((double)seen >= wanted && seen != 0) {
            return 1ull << (KVF_HISTOGRAM_SHIFT + i);
        }
    }
    return UINT64_MAX;
}

/* --- text ------------------------------------------------------------------------------------- */

/* "get_dram_ns" to "get_dram" and true: times are shown in seconds, as Prometheus wants it. */
static bool strip_ns(const char *field, char *out, size_t bytes)
{
    size_t length = strlen(field);
    bool is_time = length > 3 && strcmp(field + length - 3, "_ns") == 0;

    snprintf(out, bytes, "%.*s", (int)(is_time ? length - 3 : length), field);
    return is_time;
}

static void write_head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP kvferry_%s %s\n# TYPE kvferry_%s %s\n", name, help, name, type);
}

static void write_number(FILE *out, const char *field, bool is_counter, const char *help,
                         uint64_t value)
{
    char base[64];
    char name[96];
    bool is_time = strip_ns(field, base, sizeof(base));

    snprintf(name, sizeof(name), "%s%s%s", base, is_time ? "_seconds" : "",
             is_counter ? "_total" : "");
    write_head(out, name, is_counter ? "counter" : "gauge", help);
    if (is_time) {
        fprintf(out, "kvferry_%s %.9f\n", name, (double)value / NS_PER_S);
    } else {
        fprintf(out, "kvferry_%s %" PRIu64 "\n", name, value);
    }
}

static void write_histogram(FILE *out, const char *field, const char *help,
                            const struct kvf_histogram *histogram)
{
    char base[64];
    char name[96];
    uint64_t seen = 0;

    strip_ns(field, base, sizeof(base));
    snprintf(name, sizeof(name), "%s_seconds", base);
    write_head(out, name, "histogram", help);
    for (unsigned i = 0; i < KVF_HISTOGRAM_BUCKETS - 1; i++) {
        seen += histogram->buckets[i];
        fprintf(out, "kvferry_%s_bucket{le=\"%.9g\"} %" PRIu64 "\n", name,
                (double)(1ull << (KVF_HISTOGRAM_SHIFT + i)) / NS_PER_S, seen);
    }
    fprintf(out, "kvferry_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", name, histogram->count);
    fprintf(out, "kvferry_%s_sum %.9f\n", name, (double)histogram->sum_ns / NS_PER_S);
    fprintf(out, "kvferry_%s_count %" PRIu64 "\n", name, histogram->count);
}

/* A label's value: the format escapes backslash, quote and newline. */
static void write_label(FILE *out, const char *value)
{
    for (; *value != '\0'; value++) {
        if (*value == '\n') {
            fputs("\\n", out);
            continue;
        }
        if (*value == '\\' || *value == '"') {
            fputc('\\', out);
        }
        fputc(*value, out);
    }
}

/* What struct kvf_tier_stat holds, for each tier and drive. */
struct tier_metric {
    const char *name; /* without kvferry_tier_ */
    const char *help;
    size_t offset;
    uint8_t bytes; /* of the field: 8, 4 or 1 */
    bool is_counter;
};

#define TIER(name_, field_, counter_, help_)                                                       \
    {                                                                                              \
        .name = name_, .help = help_, .offset = offsetof(struct kvf_tier_stat, field_),            \
        .bytes = sizeof(((struct kvf_tier_stat *)0)->field_), .is_counter = counter_               \
    }

static const struct tier_metric tier_metrics[] = {
    TIER("capacity_bytes", capacity_bytes, false, "size of the tier"),
    TIER("stored_bytes", stored_bytes, false, "bytes of live records"),
    TIER("stored_blocks", stored_blocks, false, "live records"),
    TIER("full_area_bytes", area_bytes, false, "bytes of full areas or sealed segments"),
    TIER("full_area_stored_bytes", area_stored_bytes, false, "record bytes inside of these"),
    TIER("queue_depth", queue_depth, false, "reads and writes in flight"),
    TIER("writes_off", writes_off, false, "1: the error budget of writes is used up"),
    TIER("off", off, false, "1: the error budget is used up, the tier is not used"),
    TIER("stores_total", stores, true, "records stored"),
    TIER("loads_total", loads, true, "records loaded"),
    TIER("drops_total", drops, true, "records dropped by the agent"),
    TIER("evictions_total", evictions, true, "records dropped to make room"),
    TIER("reinsertions_total", reinsertions, true, "records kept when their space was reused"),
    TIER("busy_total", busy, true, "calls that found no room to start"),
    TIER("io_errors_total", errors_io, true, "reads and writes that failed"),
    TIER("corrupt_total", errors_corrupt, true, "records whose checksum was wrong"),
    TIER("mac_errors_total", errors_mac, true, "records whose MAC was wrong"),
    TIER("written_bytes_total", bytes_written, true, "bytes written"),
    TIER("read_bytes_total", bytes_read, true, "bytes read"),
};

static uint64_t tier_value(const struct tier_metric *metric, const struct kvf_tier_stat *stat)
{
    const char *field = (const char *)stat + metric->offset;
    uint64_t u64;
    uint32_t u32;
    bool flag;

    switch (metric->bytes) {
    case sizeof(u64):
        memcpy(&u64, field, sizeof(u64));
        return u64;
    case sizeof(u32):
        memcpy(&u32, field, sizeof(u32));
        return u32;
    default:
        memcpy(&flag, field, sizeof(flag));
        return flag;
    }
}

static void write_tiers(FILE *out, const struct kvf_control_stat *stat)
{
    for (size_t i = 0; i < sizeof(tier_metrics) / sizeof(tier_metrics[0]); i++) {
        const struct tier_metric *metric = &tier_metrics[i];
        char name[64];

        snprintf(name, sizeof(name), "tier_%s", metric->name);
        write_head(out, name, metric->is_counter ? "counter" : "gauge", metric->help);
        fprintf(out, "kvferry_%s{tier=\"dram\",drive=\"\"} %" PRIu64 "\n", name,
                tier_value(metric, &stat->dram));
        for (uint32_t d = 0; d < stat->n_hbm; d++) {
            fprintf(out, "kvferry_%s{tier=\"hbm\",drive=\"%" PRIu32 "\"} %" PRIu64 "\n", name, d,
                    tier_value(metric, &stat->hbm[d].tier));
        }
        for (uint32_t d = 0; d < stat->n_drives; d++) {
            fprintf(out, "kvferry_%s{tier=\"nvme\",drive=\"%" PRIu32 "\"} %" PRIu64 "\n", name, d,
                    tier_value(metric, &stat->drives[d].tier));
        }
    }
}

static void write_facts(FILE *out, const struct kvf_control_stat *stat)
{
    write_head(out, "build_info", "gauge", "1, with the version as label");
    fputs("kvferry_build_info{version=\"", out);
    write_label(out, stat->version);
    fputs("\"} 1\n", out);
    if (stat->n_drives > 0) {
        write_head(out, "drive_info", "gauge", "1, with what serves the drive as labels");
    }
    for (uint32_t d = 0; d < stat->n_drives; d++) {
        fprintf(out, "kvferry_drive_info{drive=\"%" PRIu32 "\",path=\"", d);
        write_label(out, stat->drives[d].path);
        fputs("\",engine=\"", out);
        write_label(out, stat->drives[d].engine);
        fputs("\"} 1\n", out);
    }
    write_head(out, "profile_clients", "gauge", "clients, by the profile in force");
    if (stat->n_profiles == 0) {
        fputs("kvferry_profile_clients{profile=\"exact\",calibrated=\"no\"} 0\n", out);
    }
    for (uint32_t i = 0; i < stat->n_profiles; i++) {
        fputs("kvferry_profile_clients{profile=\"", out);
        write_label(out, stat->profiles[i].name);
        fprintf(out, "\",calibrated=\"%s\"} %" PRIu32 "\n",
                stat->profiles[i].is_calibrated ? "yes" : "no", stat->profiles[i].clients);
    }
    write_number(out, "ready", false, "1: requests are served", stat->ready);
    write_number(out, "draining", false, "1: the daemon is about to stop", stat->draining);
    write_head(out, "uptime_seconds", "gauge", "time since the start");
    fprintf(out, "kvferry_uptime_seconds %" PRIu64 "\n", stat->uptime_s);
    write_number(out, "clients_max", false, "clients that may attach", stat->clients_max);
    write_number(out, "index_capacity", false, "blocks the index can hold", stat->index_capacity);
    write_number(out, "staging_used_bytes", false, "staging and rings handed out",
                 stat->staging_used_bytes);
    write_number(out, "staging_total_bytes", false, "staging and rings that may be handed out",
                 stat->staging_total_bytes);
    write_head(out, "dram_fill_ratio", "gauge",
               "stored bytes over area bytes of full areas; 0 without full areas");
    fprintf(out, "kvferry_dram_fill_ratio %.6f\n", stat->dram_fill);
}

int kvf_metrics_render_text(const struct kvf_control_stat *stat, char **text_out, size_t *bytes_out)
{
    const struct kvf_metrics *metrics = &stat->metrics;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    bool failed;

    if (out == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    write_facts(out, stat);
#define KVF_COUNTER(field, help)   write_number(out, #field, true, help, metrics->field);
#define KVF_GAUGE(field, help)     write_number(out, #field, false, help, metrics->field);
#define KVF_HISTOGRAM(field, help) write_histogram(out, #field, help, &metrics->field);
#include "agent/metrics.def"
    write_tiers(out, stat);
    failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed) {
        free(text);
        return KVF_ERR_NO_MEMORY;
    }
    *text_out = text;
    *bytes_out = bytes;
    return KVF_OK;
}

/* --- JSON ------------------------------------------------------------------------------------- */

static json_t *histogram_json(const struct kvf_histogram *histogram)
{
    static const struct {
        const char *name;
        double quantile;
    } quantiles[] = {{"p50_ns", 0.5}, {"p90_ns", 0.9}, {"p99_ns", 0.99}};
    json_t *object = json_pack("{s:I, s:I}", "count", (json_int_t)histogram->count, "sum_ns",
                               (json_int_t)histogram->sum_ns);

    for (unsigned i = 0; i < sizeof(quantiles) / sizeof(quantiles[0]) && object != NULL; i++) {
        uint64_t ns = kvf_histogram_quantile_ns(histogram, quantiles[i].quantile);

        json_object_set_new(object, quantiles[i].name,
                            ns == UINT64_MAX ? json_null() : json_integer((json_int_t)ns));
    }
    return object;
}

struct json_t *kvf_metrics_json(const struct kvf_metrics *metrics)
{
    json_t *object = json_object();
    int failed = object == NULL;

#define KVF_COUNTER(field, help)                                                                   \
    failed |= json_object_set_new(object, #field, json_integer((json_int_t)metrics->field));
#define KVF_GAUGE(field, help)                                                                     \
    failed |= json_object_set_new(object, #field, json_integer((json_int_t)metrics->field));
#define KVF_HISTOGRAM(field, help)                                                                 \
    failed |= json_object_set_new(object, #field, histogram_json(&metrics->field));
#include "agent/metrics.def"
    if (failed) {
        json_decref(object);
        return NULL;
    }
    return object;
}
