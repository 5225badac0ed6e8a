/* SPDX-License-Identifier: Apache-2.0
 *
 * breaker.c: a client of another node that says what it should not.
 */
#include "tests/fault/breaker.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/tunnel.h"
#include "kvferry.h"
#include "tests/fault/raw_client.h"
#include "tests/support/support.h"
#include "transport/net_proto.h"

static void breaker_begin(void *ctx, struct kvf_net *net)
{
    struct breaker *breaker = ctx;

    breaker->net = net;
    (void)kvf_net_connect(net, &breaker->at, 1);
}

static void breaker_up(void *ctx)
{
    ((struct breaker *)ctx)->is_up = true;
}

static void breaker_message(void *ctx, const struct kvf_net_head *head, const void *body)
{
    struct breaker *breaker = ctx;
    struct kvf_wire_head control;

    if (head->type == KVF_NET_CONTROL) {
        memcpy(&control, body, sizeof(control));
        breaker->is_ready |= control.type == KVF_WIRE_READY;
    } else if (head->type == KVF_NET_COMPLETE) {
        breaker->has_completed = true;
    }
}

static void breaker_down(void *ctx, int status, const char *why)
{
    struct breaker *breaker = ctx;

    (void)status;
    (void)snprintf(breaker->why, sizeof(breaker->why), "%s", why);
    breaker->is_down = true;
}

static unsigned breaker_turn(void *ctx, uint64_t now_ns, bool has_slept)
{
    struct breaker *breaker = ctx;

    (void)now_ns;
    (void)has_slept;
    if (breaker->is_up && !breaker->has_greeted) {
        breaker->has_greeted = true;
        (void)kvf_net_tunnel_send(breaker->net, KVF_NET_CONTROL, 0, 0, &breaker->hello,
                                  sizeof(breaker->hello), false);
    }
    if (breaker->is_ready && !breaker->has_submitted) {
        breaker->has_submitted = true;
        (void)kvf_net_tunnel_send(
            breaker->net, KVF_NET_SUBMIT, 0, 0, &breaker->submit,
            (uint32_t)(sizeof(breaker->submit.sqe) +
                       breaker->submit.sqe.n_entries * sizeof(breaker->submit.key)),
            false);
    }
    return 0;
}

static bool breaker_sleep(void *ctx)
{
    (void)ctx;
    return true;
}

static void breaker_awake(void *ctx)
{
    (void)ctx;
}

static const struct kvf_net_tunnel_ops breaker_ops = {
    .begin = breaker_begin,
    .up = breaker_up,
    .message = breaker_message,
    .down = breaker_down,
    .turn = breaker_turn,
    .sleep = breaker_sleep,
    .awake = breaker_awake,
};

static bool is_judged(void *arg)
{
    const struct breaker *breaker = arg;

    return breaker->is_down || breaker->has_completed;
}

bool breaker_is_taken(struct breaker *breaker, const char *text, uint32_t timeout_ms)
{
    struct kvf_net_config config = {.tunnel = &breaker_ops,
                                    .tunnel_ctx = breaker,
                                    .incarnation = 77,
                                    .name = "breaker",
                                    .heartbeat_ns = KVF_NS_PER_S,
                                    .silence_ns = 20 * KVF_NS_PER_S,
                                    .retry_ns = KVF_NS_PER_S};
    struct sockaddr_in *in = (struct sockaddr_in *)&breaker->at.address;
    struct kvf_tunnel_address address;
    char why[256];
    bool taken;

    assert_int_equal(kvf_tunnel_address_parse(text, &address, why, sizeof(why)), KVF_OK);
    assert_int_equal(
        kvf_tunnel_key_read(address.key_path, config.tenant, config.cluster_key, why, sizeof(why)),
        KVF_OK);
    in->sin_family = AF_INET;
    assert_int_equal(inet_pton(AF_INET, address.host, &in->sin_addr), 1);
    in->sin_port = htons((uint16_t)strtoul(address.port, NULL, 10));
    breaker->at.bytes = sizeof(*in);
    assert_int_equal(kvf_net_open(&config, &breaker->opened, why, sizeof(why)), KVF_OK);
    assert_true(kvf_test_wait_until(is_judged, breaker, timeout_ms));
    taken = !breaker->is_down;
    kvf_net_close(breaker->opened);
    return taken;
}

void breaker_init(struct breaker *breaker)
{
    memset(breaker, 0, sizeof(*breaker));
    raw_hello(&breaker->hello);
    breaker->submit.sqe.opcode = KVF_OP_NOP;
    breaker->submit.sqe.request = 1;
}

void breaker_puts(struct breaker *breaker, uint8_t flags)
{
    breaker_init(breaker);
    breaker->submit.sqe.opcode = KVF_OP_PUT;
    breaker->submit.sqe.flags = flags;
    breaker->submit.sqe.n_keys = breaker->submit.sqe.n_entries = 1;
    raw_key(&breaker->submit.key, 1);
    breaker->submit.key.record_bytes = KVF_RECORD_PAGE_BYTES + 100;
}
