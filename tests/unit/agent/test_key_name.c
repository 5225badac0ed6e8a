/* SPDX-License-Identifier: Apache-2.0
 *
 * test_key_name.c: the names of blocks are the hashes that the formats ask for, however often and
 * in whatever order keys come, and whatever else has taken their place among those remembered.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/agent/core_bed.h"

#include <string.h>

#include "base/hash.h"
#include "base/random.h"
#include "tests/support/support.h"

#define KEYS (3 * KVF_KEY_NAMES)

static void name_directly(const struct kvf_session *session, const struct kvf_shm_key *key,
                          uint8_t key_id_out[32])
{
    const struct kvf_agent *agent = session->agent;

    kvf_key_id_compute(agent->id_key, agent->tenants[session->tenant].id,
                       agent->namespaces[session->namespace_index].id,
                       (struct kvf_key){.data = key->key, .bytes = key->key_bytes}, key_id_out);
}

static void assert_named(const struct kvf_session *session, const struct kvf_shm_key *key)
{
    uint8_t key_id[32], expected[32];

    name_directly(session, key, expected);
    for (uint32_t i = 0; i < 2; i++) { /* computed, then remembered */
        kvf_request_key_id(session, key, key_id);
        assert_memory_equal(key_id, expected, sizeof(key_id));
    }
}

/* More keys than there are places, of all lengths, in any order. */
static void every_key_has_its_own_name(void **state)
{
    struct core_bed *bed = core_bed_create();
    struct kvf_random_seeded random;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    for (uint32_t i = 0; i < KEYS; i++) {
        uint64_t number = kvf_random_seeded_next(&random) % KEYS;
        struct kvf_shm_key key = {.key_bytes = (uint16_t)(KVF_KEY_BYTES_MIN + number % 49)};

        memcpy(key.key, &number, sizeof(number));
        assert_named(&bed->sessions[0], &key);
    }
    core_bed_destroy(bed);
}

/* The same bytes under another namespace, tenant or length are another name. */
static void a_name_is_of_its_namespace(void **state)
{
    struct core_bed *bed = core_bed_create();
    struct kvf_shm_key key = {.key_bytes = 16, .key = "the same bytes.."};
    uint8_t names[4][32];

    (void)state;
    bed->agent.namespaces[1].id = 2;
    bed->agent.tenants[1].id = 7;
    for (uint32_t round = 0; round < 3; round++) {
        bed->sessions[0].namespace_index = 0;
        bed->sessions[0].tenant = 0;
        key.key_bytes = 16;
        assert_named(&bed->sessions[0], &key);
        kvf_request_key_id(&bed->sessions[0], &key, names[0]);
        bed->sessions[0].namespace_index = 1;
        assert_named(&bed->sessions[0], &key);
        kvf_request_key_id(&bed->sessions[0], &key, names[1]);
        bed->sessions[0].tenant = 1;
        assert_named(&bed->sessions[0], &key);
        kvf_request_key_id(&bed->sessions[0], &key, names[2]);
        key.key_bytes = 17;
        assert_named(&bed->sessions[0], &key);
        kvf_request_key_id(&bed->sessions[0], &key, names[3]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t j = 0; j < i; j++) {
            assert_memory_not_equal(names[i], names[j], sizeof(names[i]));
        }
    }
    core_bed_destroy(bed);
}

/* A place of a namespace that has given up its slot to another one names nothing of the new one. */
static void a_reused_slot_has_names_of_its_own(void **state)
{
    struct core_bed *bed = core_bed_create();
    struct kvf_shm_key key = {.key_bytes = 16, .key = "the same bytes.."};

    (void)state;
    for (uint64_t id = 1; id < 100; id++) {
        bed->agent.namespaces[0].id = id;
        assert_named(&bed->sessions[0], &key);
    }
    core_bed_destroy(bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_has_its_own_name),
        cmocka_unit_test(a_name_is_of_its_namespace),
        cmocka_unit_test(a_reused_slot_has_names_of_its_own),
    };

    assert(kvf_hash_init_library() == KVF_OK);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
