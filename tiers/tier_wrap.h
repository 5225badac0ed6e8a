/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_wrap.h: what the tiers around another tier share: an ops table that passes everything on,
 * and stores and loads that come by on their way back.
 *
 * The wrapper hands a copy of each kvf_tier_io to the inner tier, so that both may use its private
 * fields, and copies the outcome back.
 */
#ifndef KVF_TIERS_TIER_WRAP_H
#define KVF_TIERS_TIER_WRAP_H

#include "base/pool.h"
#include "tiers/tier.h"

enum {
    KVF_WRAP_IOS_MAX = 1024, /* stores and loads inside one wrapper; more: KVF_ERR_BUSY */
};

struct kvf_wrap;

struct kvf_wrap_io {
    struct kvf_tier_io inner; /* the copy that the inner tier works on */
    struct kvf_tier_io *outer;
    struct kvf_wrap *wrap;
    struct kvf_wrap_io *next; /* for the wrapper */
    uint64_t due_ns;
    bool is_marked; /* for the wrapper */
};

/* Begins a wrapper's own struct. Owner: the reactor. */
struct kvf_wrap {
    struct kvf_tier base;
    struct kvf_tier_ops ops; /* base.ops points here: inner's, as far as it has them */
    struct kvf_tier *inner;  /* owned */
    struct kvf_pool ios;
    /* An io has come back from the inner tier: pass it on by kvf_wrap_complete, now or later. */
    void (*came_back)(struct kvf_wrap_io *io);
};

/* Fill a zeroed wrapper around inner; the wrapper then overrides members of ops. On failure inner
 * stays the caller's. KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_wrap_init(struct kvf_wrap *wrap, struct kvf_tier *inner,
                  void (*came_back)(struct kvf_wrap_io *io));

/* Close the inner tier and free what init made. */
void kvf_wrap_fini(struct kvf_wrap *wrap);

/* Take a copy of io; NULL: all are taken. */
struct kvf_wrap_io *kvf_wrap_take(struct kvf_wrap *wrap, struct kvf_tier_io *io);

/* Pass a copy to the inner tier. As store and load; if it did not start, the copy is gone. */
int kvf_wrap_store(struct kvf_wrap_io *io);
int kvf_wrap_load(struct kvf_wrap_io *io);

/* Give the outcome to the caller. */
void kvf_wrap_complete(struct kvf_wrap_io *io);

#endif /* KVF_TIERS_TIER_WRAP_H */
