/* SPDX-License-Identifier: Apache-2.0
 *
 * test_namespace.c: a tenant has a quota of namespaces that hold something; who is beyond it is
 * refused and counted, and nobody else notices.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/agent/core_bed.h"

#define FIRST_ID 1000

static int join(struct core_bed *bed, uint16_t tenant, uint64_t id, uint16_t *index_out)
{
    int status = kvf_namespace_join(&bed->agent, tenant, id, 1, index_out);

    if (status == KVF_OK) { /* as a session does */
        bed->agent.namespaces[*index_out].tenant = tenant;
        bed->agent.namespaces[*index_out].is_known = true;
    }
    return status;
}

/* One tiny block in each new namespace, until the first is refused. Returns how many there are. */
static uint32_t fill(struct core_bed *bed, uint16_t tenant)
{
    uint64_t id = FIRST_ID + tenant * 10000ull;
    uint32_t n = 0;
    uint16_t index;

    while (n <= KVF_INDEX_NAMESPACES_MAX && join(bed, tenant, id + n, &index) == KVF_OK) {
        bed->agent.namespaces[index].blocks = 1;
        n++;
    }
    return n;
}

static struct core_bed *bed_with_tenants(uint32_t n)
{
    struct core_bed *bed = core_bed_create();

    bed->agent.n_tenants = n;
    return bed;
}

static void a_tenant_cannot_take_all(void **state)
{
    struct core_bed *bed = bed_with_tenants(2);
    uint16_t index;

    (void)state;
    assert_int_equal(fill(bed, 1), KVF_INDEX_NAMESPACES_MAX / 4);
    assert_int_equal(bed->agent.metrics.namespaces_refused, 1);
    assert_int_equal(join(bed, 1, FIRST_ID + 10000, &index), KVF_OK); /* it is there already */
    assert_int_equal(join(bed, 0, 2, &index), KVF_OK);
    assert_int_equal(join(bed, 1, 3, &index), KVF_ERR_REFUSED);
    assert_int_equal(bed->agent.metrics.namespaces_refused, 2);
    core_bed_destroy(bed);
}

/* Whatever the others do, each of many tenants has its share. */
static void many_tenants_share_the_table(void **state)
{
    struct core_bed *bed = bed_with_tenants(8);

    (void)state;
    bed->agent.namespaces[0].id = 0; /* the bed's own */
    for (uint16_t tenant = 0; tenant < 8; tenant++) {
        assert_int_equal(fill(bed, tenant), KVF_INDEX_NAMESPACES_MAX / 8);
    }
    core_bed_destroy(bed);
}

static void a_quota_can_be_set(void **state)
{
    struct core_bed *bed = bed_with_tenants(1);

    (void)state;
    bed->config.quota_namespaces = 5;
    assert_int_equal(fill(bed, 0), 5);
    core_bed_destroy(bed);
}

/* Empty ones count for nothing, and a place that has become empty is there for the next. */
static void only_what_is_in_use_counts(void **state)
{
    struct core_bed *bed = bed_with_tenants(1);
    uint16_t index;

    (void)state;
    bed->config.quota_namespaces = 3;
    for (uint64_t id = 1; id < 3000; id++) {
        assert_int_equal(join(bed, 0, id, &index), KVF_OK);
    }
    assert_int_equal(fill(bed, 0), 3);
    for (uint32_t i = 0; i < KVF_INDEX_NAMESPACES_MAX; i++) {
        if (bed->agent.namespaces[i].id == FIRST_ID + 1) {
            bed->agent.namespaces[i].blocks = 0;
        }
    }
    assert_int_equal(join(bed, 0, 1, &index), KVF_OK);
    bed->agent.namespaces[index].clients = 1;
    assert_int_equal(join(bed, 0, 2, &index), KVF_ERR_REFUSED);
    core_bed_destroy(bed);
}

/* Namespaces found on a drive belong to nobody until a client of theirs comes, which may. */
static void what_a_drive_holds_can_be_joined(void **state)
{
    struct core_bed *bed = bed_with_tenants(1);
    uint16_t index;

    (void)state;
    bed->config.quota_namespaces = 2;
    for (uint64_t id = 1; id <= 4; id++) {
        assert_int_equal(kvf_namespace_get(&bed->agent, id, 1, &index), KVF_OK);
        bed->agent.namespaces[index].blocks = 1;
    }
    for (uint64_t id = 1; id <= 4; id++) {
        assert_int_equal(join(bed, 0, id, &index), KVF_OK);
    }
    assert_int_equal(join(bed, 0, 5, &index), KVF_ERR_REFUSED);
    core_bed_destroy(bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tenant_cannot_take_all),
        cmocka_unit_test(many_tenants_share_the_table),
        cmocka_unit_test(a_quota_can_be_set),
        cmocka_unit_test(only_what_is_in_use_counts),
        cmocka_unit_test(what_a_drive_holds_can_be_joined),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
