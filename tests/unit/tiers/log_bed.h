/* SPDX-License-Identifier: Apache-2.0
 *
 * log_bed.h: a log tier in a table, for the tests of what goes around tiers: records are kept in
 * memory, and each store and load completes in the next poll.
 */
#ifndef KVF_TESTS_LOG_BED_H
#define KVF_TESTS_LOG_BED_H

#include "base/env.h"
#include "tiers/tier.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    LOG_RECORDS = 64,
    LOG_RECORD_BYTES = 4096,
};

struct log_tier {
    struct kvf_tier base;
    unsigned char records[LOG_RECORDS][LOG_RECORD_BYTES];
    uint32_t n_records;
    struct kvf_tier_io *first, **end;
    unsigned n_stores, n_loads, n_polls;
    uint64_t deadline_ns;
    bool *is_closed;
};

static inline int log_append(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct log_tier *log = (struct log_tier *)tier;

    io->next = NULL;
    *log->end = io;
    log->end = &io->next;
    return KVF_OK;
}

static inline int log_store(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct log_tier *log = (struct log_tier *)tier;

    if (log->n_records == LOG_RECORDS) {
        return KVF_ERR_BUSY;
    }
    log->n_stores++;
    io->location = log->n_records++;
    memcpy(log->records[io->location], io->record, io->record_bytes);
    return log_append(tier, io);
}

static inline int log_load(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct log_tier *log = (struct log_tier *)tier;

    log->n_loads++;
    memcpy(io->record, log->records[io->location], io->record_bytes);
    return log_append(tier, io);
}

static inline void log_drop(struct kvf_tier *tier, kvf_location location)
{
    memset(((struct log_tier *)tier)->records[location], 0, LOG_RECORD_BYTES);
}

static inline unsigned log_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    struct log_tier *log = (struct log_tier *)tier;
    struct kvf_tier_io *io = log->first;
    unsigned n_done = 0;

    (void)now_ns;
    log->n_polls++;
    log->first = NULL;
    log->end = &log->first;
    while (io != NULL) {
        struct kvf_tier_io *next = io->next;

        io->status = KVF_OK;
        io->done(io);
        n_done++;
        io = next;
    }
    return n_done;
}

static inline uint64_t log_deadline_ns(const struct kvf_tier *tier)
{
    return ((const struct log_tier *)tier)->deadline_ns;
}

static inline int log_recover(struct kvf_tier *tier)
{
    (void)tier;
    return KVF_MISS; /* seen to be passed on */
}

static inline bool log_drained(struct kvf_tier *tier)
{
    return ((struct log_tier *)tier)->first == NULL;
}

static inline void log_stat(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out)
{
    *stat_out = (struct kvf_tier_stat){.stores = ((const struct log_tier *)tier)->n_stores};
}

static inline void log_close(struct kvf_tier *tier)
{
    struct log_tier *log = (struct log_tier *)tier;

    *log->is_closed = true;
    free(log);
}

static const struct kvf_tier_ops log_ops = {
    .abi = KVF_TIER_ABI,
    .flags = KVF_TIER_PERSISTENT,
    .name = "log",
    .kind = KVF_TIER_NVME,
    .store = log_store,
    .load = log_load,
    .drop = log_drop,
    .poll = log_poll,
    .deadline_ns = log_deadline_ns,
    .recover = log_recover,
    .drained = log_drained,
    .stat = log_stat,
    .close = log_close,
};

static inline struct log_tier *log_open(bool *is_closed)
{
    struct log_tier *log = calloc(1, sizeof(*log));

    assert_non_null(log);
    log->base.ops = &log_ops;
    log->end = &log->first;
    log->deadline_ns = UINT64_MAX;
    log->is_closed = is_closed;
    *is_closed = false;
    return log;
}

/* A store or load of the test, with the order in which it was reported. */
struct log_call {
    struct kvf_tier_io io;
    unsigned char record[LOG_RECORD_BYTES];
    unsigned n_done, order;
};

static unsigned log_n_done;

static inline void log_call_done(struct kvf_tier_io *io)
{
    struct log_call *call = io->owner;

    assert_ptr_equal(&call->io, io);
    call->n_done++;
    call->order = log_n_done++;
}

static inline void log_call_init(struct log_call *call, unsigned char fill, kvf_location location)
{
    memset(call, 0, sizeof(*call));
    memset(call->record, fill, sizeof(call->record));
    call->io = (struct kvf_tier_io){
        .record = call->record,
        .record_bytes = LOG_RECORD_BYTES,
        .location = location,
        .status = KVF_ERR_INTERNAL,
        .done = log_call_done,
        .owner = call,
    };
}

#endif /* KVF_TESTS_LOG_BED_H */
