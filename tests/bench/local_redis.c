/* SPDX-License-Identifier: Apache-2.0
 *
 * local_redis.c: the same blocks out of a redis-server over a Unix socket, read as ours are.
 */
#include "tests/bench/local.h"

#if KVF_HAVE_HIREDIS
#include "base/clock.h"

#include <hiredis/hiredis.h>
#include <inttypes.h>

struct redis {
    struct local *local;
    redisContext *context;
    double (*ours)(void *ctx, double seconds);
};

static redisReply *take_reply(struct redis *redis)
{
    void *reply = NULL;

    if (redisGetReply(redis->context, &reply) != REDIS_OK) {
        bench_die("redis: %s", redis->context->errstr);
    }
    if (((redisReply *)reply)->type == REDIS_REPLY_ERROR) {
        bench_die("redis: %s", ((redisReply *)reply)->str);
    }
    return reply;
}

static void append_get(struct redis *redis, uint64_t block)
{
    struct local_key bytes;
    struct kvf_key key = local_key(block, &bytes);

    redisAppendCommand(redis->context, "GET %b", key.data, key.bytes);
}

static void store_all(struct redis *redis)
{
    for (uint64_t i = 0; i < redis->local->n_blocks; i++) {
        struct local_key bytes;
        struct kvf_key key = local_key(i, &bytes);

        redisAppendCommand(redis->context, "SET %b %b", key.data, key.bytes,
                           redis->local->source + i * LOCAL_BLOCK_BYTES, (size_t)LOCAL_BLOCK_BYTES);
        freeReplyObject(take_reply(redis));
    }
}

static double get_ours(void *ctx, double seconds)
{
    struct redis *redis = ctx;

    return redis->ours(redis->local, seconds);
}

static double get_redis(void *ctx, double seconds)
{
    struct redis *redis = ctx;
    struct local *local = redis->local;
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    local_order_restart(local);
    do {
        for (uint64_t i = 0; i < LOCAL_DEPTH; i++) {
            append_get(redis, local->order[i]);
        }
        for (uint64_t i = 0; i < local->n_blocks; i++) {
            redisReply *reply = take_reply(redis);

            if (i + LOCAL_DEPTH < local->n_blocks) {
                append_get(redis, local->order[i + LOCAL_DEPTH]);
            }
            if (reply->type != REDIS_REPLY_STRING || reply->len != LOCAL_BLOCK_BYTES) {
                bench_die("redis: block %" PRIu32 " is missing", local->order[i]);
            }
            local_check(local, local->order[i], reply->str);
            freeReplyObject(reply);
        }
        n += local->n_blocks;
        local_order_next(local);
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(n * LOCAL_BLOCK_BYTES, kvf_now_ns() - start_ns);
}

void local_redis(struct local *local, double (*ours)(void *ctx, double seconds))
{
    struct redis redis = {.local = local, .ours = ours};

    if (local->redis_path == NULL) {
        bench_print_skip("redis_get", "no redis-server: apt-get install redis-server");
        return;
    }
    redis.context = redisConnectUnix(local->redis_path);
    if (redis.context == NULL || redis.context->err != 0) {
        bench_die("redis: cannot connect to %s", local->redis_path);
    }
    store_all(&redis);
    bench_pairs(&local->run, "redis_get", get_ours, get_redis, &redis);
    redisFree(redis.context);
}

#else

void local_redis(struct local *local, double (*ours)(void *ctx, double seconds))
{
    (void)local;
    (void)ours;
    bench_print_skip("redis_get", "built without hiredis: apt-get install libhiredis-dev");
}

#endif
