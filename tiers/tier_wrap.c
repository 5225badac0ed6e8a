/* SPDX-License-Identifier: Apache-2.0
 *
 * tier_wrap.c: what the tiers around another tier share.
 */
#include "tiers/tier_wrap.h"

static struct kvf_tier *inner_of(const struct kvf_tier *tier)
{
    return ((const struct kvf_wrap *)tier)->inner;
}

static int pass_reserve(struct kvf_tier *tier, uint16_t tenant, uint64_t record_bytes,
                        kvf_cookie cookie, kvf_location *location_out)
{
    struct kvf_tier *inner = inner_of(tier);

    return inner->ops->reserve(inner, tenant, record_bytes, cookie, location_out);
}

static void *pass_address(struct kvf_tier *tier, kvf_location location)
{
    return inner_of(tier)->ops->address(inner_of(tier), location);
}

static int pass_store(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct kvf_wrap_io *copy = kvf_wrap_take((struct kvf_wrap *)tier, io);

    return copy != NULL ? kvf_wrap_store(copy) : KVF_ERR_BUSY;
}

static int pass_load(struct kvf_tier *tier, struct kvf_tier_io *io)
{
    struct kvf_wrap_io *copy = kvf_wrap_take((struct kvf_wrap *)tier, io);

    return copy != NULL ? kvf_wrap_load(copy) : KVF_ERR_BUSY;
}

static void pass_drop(struct kvf_tier *tier, kvf_location location)
{
    inner_of(tier)->ops->drop(inner_of(tier), location);
}

static unsigned pass_poll(struct kvf_tier *tier, uint64_t now_ns)
{
    return inner_of(tier)->ops->poll(inner_of(tier), now_ns);
}

static uint64_t pass_deadline_ns(const struct kvf_tier *tier)
{
    return inner_of(tier)->ops->deadline_ns(inner_of(tier));
}

static int pass_recover(struct kvf_tier *tier)
{
    return inner_of(tier)->ops->recover(inner_of(tier));
}

static bool pass_drained(struct kvf_tier *tier)
{
    return inner_of(tier)->ops->drained(inner_of(tier)) &&
           kvf_pool_taken_count(&((struct kvf_wrap *)tier)->ios) == 0;
}

static void pass_stat(const struct kvf_tier *tier, struct kvf_tier_stat *stat_out)
{
    inner_of(tier)->ops->stat(inner_of(tier), stat_out);
}

int kvf_wrap_init(struct kvf_wrap *wrap, struct kvf_tier *inner,
                  void (*came_back)(struct kvf_wrap_io *io))
{
    const struct kvf_tier_ops *ops = inner->ops;
    int status = kvf_pool_init(&wrap->ios, "wrapped I/O", sizeof(struct kvf_wrap_io),
                               KVF_WRAP_IOS_MAX);

    if (status != KVF_OK) {
        return status;
    }
    wrap->ops = (struct kvf_tier_ops){
        .abi = ops->abi,
        .flags = ops->flags,
        .name = ops->name,
        .kind = ops->kind,
        .reserve = ops->reserve != NULL ? pass_reserve : NULL,
        .address = ops->address != NULL ? pass_address : NULL,
        .store = ops->store != NULL ? pass_store : NULL,
        .load = ops->load != NULL ? pass_load : NULL,
        .drop = pass_drop,
        .poll = pass_poll,
        .deadline_ns = pass_deadline_ns,
        .recover = ops->recover != NULL ? pass_recover : NULL,
        .drained = ops->drained != NULL ? pass_drained : NULL,
        .stat = pass_stat,
    };
    wrap->base.ops = &wrap->ops;
    wrap->base.host = inner->host;
    wrap->inner = inner;
    wrap->came_back = came_back;
    return KVF_OK;
}

void kvf_wrap_fini(struct kvf_wrap *wrap)
{
    wrap->inner->ops->close(wrap->inner);
    kvf_pool_fini(&wrap->ios, NULL); /* what was under way is forgotten */
}

static void inner_done(struct kvf_tier_io *inner)
{
    struct kvf_wrap_io *io = inner->owner;

    io->wrap->came_back(io);
}

struct kvf_wrap_io *kvf_wrap_take(struct kvf_wrap *wrap, struct kvf_tier_io *outer)
{
    struct kvf_wrap_io *io = kvf_pool_get(&wrap->ios);

    if (io != NULL) {
        io->inner = *outer;
        io->inner.done = inner_done;
        io->inner.owner = io;
        io->outer = outer;
        io->wrap = wrap;
    }
    return io;
}

static int started(struct kvf_wrap_io *io, int status)
{
    if (status != KVF_OK) {
        kvf_pool_put(&io->wrap->ios, io);
    }
    return status;
}

int kvf_wrap_store(struct kvf_wrap_io *io)
{
    struct kvf_tier *inner = io->wrap->inner;

    return started(io, inner->ops->store(inner, &io->inner));
}

int kvf_wrap_load(struct kvf_wrap_io *io)
{
    struct kvf_tier *inner = io->wrap->inner;

    return started(io, inner->ops->load(inner, &io->inner));
}

void kvf_wrap_complete(struct kvf_wrap_io *io)
{
    struct kvf_tier_io *outer = io->outer;

    outer->location = io->inner.location;
    outer->stored_bytes = io->inner.stored_bytes;
    outer->status = io->inner.status;
    /* given back first: done may start the next one */
    kvf_pool_put(&io->wrap->ios, io);
    outer->done(outer);
}
