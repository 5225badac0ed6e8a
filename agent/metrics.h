/* SPDX-License-Identifier: Apache-2.0
 *
 * metrics.h: counters, gauges and histograms of kvferryd, one struct made from metrics.def. The
 * reactor is the only writer; others get copies by KVF_CONTROL_STAT. Rendering runs on the admin
 * thread.
 */
#ifndef KVF_AGENT_METRICS_H
#define KVF_AGENT_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Bucket i counts durations of at most 2^(SHIFT + i) ns: 1.024 us to 34.4 s; the last one counts
 * all that took longer. */
#define KVF_HISTOGRAM_SHIFT   10
#define KVF_HISTOGRAM_BUCKETS 27

struct kvf_histogram {
    uint64_t count;
    uint64_t sum_ns;
    uint64_t buckets[KVF_HISTOGRAM_BUCKETS];
};

struct kvf_metrics {
#define KVF_COUNTER(field, text)   uint64_t field;
#define KVF_GAUGE(field, text)     uint64_t field;
#define KVF_HISTOGRAM(field, text) struct kvf_histogram field;
#include "agent/metrics.def"
};

/* Count one duration. Owner only; no branch that depends on more than the value. */
static inline void kvf_histogram_add(struct kvf_histogram *histogram, uint64_t ns)
{
    /* The smallest i with ns <= 2^(SHIFT + i); ns 0 counts as 1. */
    unsigned bits = ns > 1 ? 64u - (unsigned)__builtin_clzll(ns - 1) : 0;
    unsigned bucket = bits > KVF_HISTOGRAM_SHIFT ? bits - KVF_HISTOGRAM_SHIFT : 0;

    if (bucket >= KVF_HISTOGRAM_BUCKETS) {
        bucket = KVF_HISTOGRAM_BUCKETS - 1;
    }
    histogram->buckets[bucket]++;
    histogram->count++;
    histogram->sum_ns += ns;
}

/* An upper bound of the quantile (0..1) of what was counted: the edge of its bucket. 0: nothing was
 * counted; UINT64_MAX: longer than the last edge. */
uint64_t kvf_histogram_quantile_ns(const struct kvf_histogram *histogram, double quantile);

struct kvf_control_stat;
struct json_t; /* of jansson */

/* All metrics in the Prometheus text format, tiers and facts of the agent included. *text_out is to
 * be freed by the caller. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_metrics_render_text(const struct kvf_control_stat *stat, char **text_out,
                            size_t *bytes_out);

/* The metrics of metrics.def as a JSON object, histograms with count, sum and quantiles. The caller
 * owns the reference. NULL: no memory. */
struct json_t *kvf_metrics_json(const struct kvf_metrics *metrics);

#endif /* KVF_AGENT_METRICS_H */
