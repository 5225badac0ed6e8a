/* SPDX-License-Identifier: Apache-2.0
 *
 * test_peer_stream.c: the numbered stream of blocks between one node that tells and others that
 * listen, over a wire that loses, swaps and holds back messages, against the index that it is
 * about: once the wire is quiet, every listener knows exactly what is there. One that is held back
 * for longer than the ring of events is told anew.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "agent/peers.h"
#include "base/clock.h"
#include "tests/support/support.h"
#include "transport/net_proto.h"

#define BLOCKS    1500
#define LISTENERS 3
#define WIRE_MAX  24 /* messages under way to one listener; more find the queue full */
#define TURNS     4000

struct message {
    uint8_t type;
    uint32_t bytes;
    uint8_t body[KVF_NET_BODY_BYTES_MAX];
};

struct wire {
    struct message *to_listener; /* WIRE_MAX of them */
    uint32_t n;
    bool has_resync; /* to the teller */
    bool is_blocked;
};

static struct kvf_agent *the_teller, *the_listeners[LISTENERS];
static struct wire wires[LISTENERS];
static struct kvf_random_seeded dice;
static uint32_t lose_in; /* one message in so many; 0: none is lost or swapped */
static uint64_t lost_count, swapped_count;

static uint64_t below(uint64_t end)
{
    return kvf_random_seeded_next(&dice) % end;
}

/* ---- what the stream is given ---------------------------------------------------------------- */

int kvf_net_send(struct kvf_net *net, kvf_net_link link, enum kvf_net_type type, const void *body,
                 uint32_t body_bytes)
{
    struct wire *wire = &wires[link - 1];
    struct message *message;

    (void)net;
    if (type == KVF_NET_RESYNC) {
        wire->has_resync = lose_in == 0 || below(lose_in) != 0;
        return KVF_OK;
    }
    if (wire->is_blocked || wire->n == WIRE_MAX) {
        return KVF_ERR_BUSY;
    }
    if (lose_in != 0 && below(lose_in) == 0) {
        lost_count++;
        return KVF_OK;
    }
    message = &wire->to_listener[wire->n++];
    message->type = (uint8_t)type;
    message->bytes = body_bytes;
    memcpy(message->body, body, body_bytes);
    return KVF_OK;
}

int kvf_directory_tell(struct kvf_directory *directory, enum kvf_net_type type, const void *body,
                       uint32_t body_bytes)
{
    (void)directory;
    (void)type;
    (void)body;
    (void)body_bytes;
    fail_msg("nothing here goes by way of a directory");
    return KVF_ERR_INTERNAL;
}

int kvf_directory_follow(struct kvf_directory *directory, uint64_t incarnation, bool is_followed)
{
    (void)directory;
    (void)incarnation;
    (void)is_followed;
    fail_msg("nothing here comes by way of a directory");
    return KVF_ERR_INTERNAL;
}

/* ---- the world ------------------------------------------------------------------------------- */

static void name_of(uint32_t block, uint8_t key_id[32])
{
    memset(key_id, 0, 32);
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t word = (block + 1) * 0x9e3779b97f4a7c15ull + i * 0x2545f4914f6cdd1dull;

        memcpy(key_id + 8 * i, &word, sizeof(word));
    }
}

static uint32_t shard_of(uint32_t block)
{
    return block % 5;
}

static struct kvf_agent *node_create(void)
{
    struct kvf_agent *agent = calloc(1, sizeof(*agent));

    assert_non_null(agent);
    agent->peers = calloc(1, sizeof(*agent->peers));
    assert_non_null(agent->peers);
    agent->peers->agent = agent;
    agent->peers->log = calloc(KVF_PEER_LOG_EVENTS, sizeof(*agent->peers->log));
    agent->peers->log_next = 1;
    assert_non_null(agent->peers->log);
    assert_int_equal(kvf_hints_open(&agent->peers->hints, 4096), KVF_OK);
    assert_int_equal(kvf_index_open(&agent->index, 4096), KVF_OK);
    agent->now_ns = KVF_NS_PER_S;
    return agent;
}

static void node_destroy(struct kvf_agent *agent)
{
    kvf_index_close(&agent->index);
    kvf_hints_close(&agent->peers->hints);
    free(agent->peers->log);
    free(agent->peers);
    free(agent);
}

static int setup(void **state)
{
    (void)state;
    kvf_random_seeded_init(&dice, kvf_test_seed());
    memset(wires, 0, sizeof(wires));
    lost_count = 0;
    swapped_count = 0;
    the_teller = node_create();
    for (uint32_t i = 0; i < LISTENERS; i++) {
        struct kvf_peer_link *link = &the_teller->peers->links[i];

        the_listeners[i] = node_create();
        wires[i].to_listener = calloc(WIRE_MAX, sizeof(struct message));
        assert_non_null(wires[i].to_listener);
        link->link = i + 1;
        link = &the_listeners[i]->peers->links[0];
        link->link = i + 1;
        link->is_initiator = true;
        link->source = KVF_HINT_NONE;
        link->since_ns = KVF_NS_PER_S;
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    node_destroy(the_teller);
    for (uint32_t i = 0; i < LISTENERS; i++) {
        node_destroy(the_listeners[i]);
        free(wires[i].to_listener);
    }
    return 0;
}

/* A block comes, or goes if it is there. */
static void change(uint32_t block)
{
    uint8_t key_id[32];
    struct kvf_entry *entry;

    name_of(block, key_id);
    entry = kvf_index_find(&the_teller->index, key_id, shard_of(block));
    if (entry != NULL) {
        kvf_peers_removed(the_teller, entry);
        kvf_index_remove(&the_teller->index, entry);
        return;
    }
    entry = kvf_index_insert(&the_teller->index, key_id, shard_of(block), 0);
    assert_non_null(entry);
    entry->record_bytes = 4096 + 64 * (block + 1);
    entry->state = KVF_ENTRY_READY;
    kvf_peers_added(the_teller, entry);
}

static void deliver(uint32_t listener)
{
    struct wire *wire = &wires[listener];
    uint32_t n = wire->is_blocked ? 0 : (uint32_t)below(wire->n + 1);
    struct kvf_peers *peers = the_listeners[listener]->peers;

    n = lose_in == 0 ? wire->n : n;
    for (uint32_t i = 0; i < n; i++) {
        struct message *message = &wire->to_listener[i];
        struct kvf_net_head head = {.type = message->type, .body_bytes = message->bytes};
        const char *why = NULL;

        if (lose_in != 0 && i + 1 < n && below(4 * lose_in) == 0) {
            struct message other = wire->to_listener[i + 1];

            wire->to_listener[i + 1] = *message;
            *message = other;
            head.type = message->type;
            head.body_bytes = message->bytes;
            swapped_count++;
        }
        if (kvf_net_body_check(&head, message->body, &why) != KVF_OK) {
            fail_msg("a message of the stream breaks the rule of %s", why);
        }
        kvf_peers_told(peers, &peers->links[0], message->type, message->body);
    }
    memmove(wire->to_listener, wire->to_listener + n, (wire->n - n) * sizeof(struct message));
    wire->n -= n;
    if (wire->has_resync && !wire->is_blocked) {
        wire->has_resync = false;
        kvf_peers_told(the_teller->peers, &the_teller->peers->links[listener], KVF_NET_RESYNC,
                       NULL);
    }
}

static void turn(void)
{
    the_teller->now_ns += 20 * KVF_NS_PER_MS;
    (void)kvf_peers_tell(the_teller->peers);
    for (uint32_t i = 0; i < LISTENERS; i++) {
        the_listeners[i]->now_ns = the_teller->now_ns;
        deliver(i);
        (void)kvf_hints_sweep(&the_listeners[i]->peers->hints);
        kvf_peers_ask_again(the_listeners[i]->peers);
    }
}

/* With a wire that does as it should: everybody knows all, within a time that asks for a snapshot
 * and brings it. */
static void assert_agree(void)
{
    lose_in = 0;
    for (uint32_t i = 0; i < LISTENERS; i++) {
        wires[i].is_blocked = false;
    }
    for (uint32_t i = 0; i < 600; i++) {
        turn();
    }
    for (uint32_t i = 0; i < LISTENERS; i++) {
        const struct kvf_peers *peers = the_listeners[i]->peers;

        assert_int_equal(peers->links[0].learn, KVF_LEARN_LIVE);
        for (uint32_t block = 0; block < BLOCKS; block++) {
            uint8_t key_id[32];
            uint32_t bytes = 0;
            const struct kvf_entry *entry;
            uint64_t sources;

            name_of(block, key_id);
            entry = kvf_index_find(&the_teller->index, key_id, shard_of(block));
            sources = kvf_hints_find(&peers->hints, key_id, shard_of(block), &bytes);
            assert_int_equal(sources != 0, entry != NULL);
            assert_true(entry == NULL || entry->record_bytes == bytes);
        }
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_bad_wire(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 4; round++) {
        lose_in = round == 0 ? 0 : 3 + (uint32_t)below(60);
        for (uint32_t i = 0; i < TURNS; i++) {
            for (uint64_t k = below(40); k > 0; k--) {
                change((uint32_t)below(BLOCKS));
            }
            wires[below(LISTENERS)].is_blocked = below(8) == 0;
            turn();
        }
        assert_agree();
    }
    assert_true(lost_count > 0 && swapped_count > 0);
    assert_true(the_listeners[0]->metrics.peer_gaps > 0);
    assert_true(the_listeners[0]->metrics.peer_snapshots > 1);
}

static void test_overrun(void **state)
{
    uint64_t before;
    uint64_t gaps;

    (void)state;
    for (uint32_t block = 0; block < BLOCKS; block += 2) {
        change(block);
    }
    assert_agree();
    before = the_teller->metrics.peer_snapshots_sent;
    gaps = the_listeners[0]->metrics.peer_gaps;
    assert_int_equal(before, LISTENERS);

    /* as many as the ring holds: no more than a delay */
    wires[0].is_blocked = true;
    for (uint32_t i = 0; i < KVF_PEER_LOG_EVENTS; i++) {
        change((uint32_t)below(BLOCKS));
        if (i % 64 == 0) {
            turn();
        }
    }
    assert_agree();
    assert_int_equal(the_teller->metrics.peer_snapshots_sent, before);

    /* one more, and it is told anew, without asking */
    wires[0].is_blocked = true;
    for (uint32_t i = 0; i < KVF_PEER_LOG_EVENTS + 1; i++) {
        change((uint32_t)below(BLOCKS));
        if (i % 64 == 0) {
            turn();
        }
    }
    assert_agree();
    assert_int_equal(the_teller->metrics.peer_snapshots_sent, before + 1);
    assert_int_equal(the_listeners[0]->metrics.peer_gaps, gaps);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_bad_wire, setup, teardown),
        cmocka_unit_test_setup_teardown(test_overrun, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
