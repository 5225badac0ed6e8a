/* SPDX-License-Identifier: Apache-2.0
 *
 * test_header.c: what an application has compiled in keeps its meaning: sizes, places, numbers.
 *
 * A change here breaks engines that were built before it, so it needs a new major version or a new
 * struct. Growing a struct that begins with struct_bytes is the way that does not.
 */
#include "kvferry_gpu_x.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void sizes_are_pinned(void **state)
{
    (void)state;
    assert_int_equal(sizeof(struct kvf_key), 16);
    assert_int_equal(sizeof(struct kvf_geometry), 20);
    assert_int_equal(sizeof(struct kvf_tensor_view), 32);
    assert_int_equal(sizeof(struct kvf_kv_view), 80);
    assert_int_equal(sizeof(struct kvf_options), 184);
    assert_int_equal(sizeof(struct kvf_info), 336);
    assert_int_equal(sizeof(struct kvf_put_item), 80);
    assert_int_equal(sizeof(struct kvf_put_options), 40);
    assert_int_equal(sizeof(struct kvf_lookup_options), 16);
    assert_int_equal(sizeof(struct kvf_lookup_result), 24);
    assert_int_equal(sizeof(struct kvf_get_options), 16);
    assert_int_equal(sizeof(struct kvf_hit), 48);
    assert_int_equal(sizeof(struct kvf_stat), 96);
    assert_int_equal(sizeof(struct kvf_stage), 32);
    assert_int_equal(sizeof(struct kvf_event), 96);
    assert_int_equal(sizeof(struct kvf_gpu_options), 64);
    assert_int_equal(sizeof(struct kvf_gpu_region_options), 80);
    assert_int_equal(sizeof(struct kvf_gpu_put_item), 56);
    assert_int_equal(sizeof(struct kvf_gpu_get_item), 40);
    assert_int_equal(sizeof(struct kvf_gpu_event), 32);
    assert_int_equal(sizeof(struct kvf_x_weights), 184);
    assert_int_equal(sizeof(struct kvf_x_input), 48);
    assert_int_equal(sizeof(struct kvf_x_put_options), 32);
    assert_int_equal(sizeof(struct kvf_gpu_x_options), 88);
    assert_int_equal(sizeof(struct kvf_gpu_x_item), 40);
    assert_int_equal(sizeof(struct kvf_gpu_x_put_options), 32);
    assert_int_equal(sizeof(struct kvf_x_factors), 84);
    assert_int_equal(sizeof(struct kvf_x_gate_options), 80);
    assert_int_equal(sizeof(struct kvf_x_choice), 264);
}

static void sizes_come_first(void **state)
{
    (void)state;
    assert_int_equal(offsetof(struct kvf_geometry, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_kv_view, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_info, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_info, profile_text), 80); /* all of it before 0.2 */
    assert_int_equal(offsetof(struct kvf_put_item, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_put_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_lookup_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_get_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_stat, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_region_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_put_item, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_get_item, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_x_weights, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_x_input, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_x_put_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_x_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_x_item, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_gpu_x_put_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_x_factors, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_x_gate_options, struct_bytes), 0);
    assert_int_equal(offsetof(struct kvf_x_choice, struct_bytes), 0);
}

/* Statuses travel on the wire, element types are written to disk. */
static void numbers_are_pinned(void **state)
{
    (void)state;
    assert_int_equal(KVF_OK, 0);
    assert_int_equal(KVF_MISS, 1);
    assert_int_equal(KVF_EMPTY, 6);
    assert_int_equal(KVF_ERR_INVALID, -1);
    assert_int_equal(KVF_ERR_REFUSED, -12);
    assert_int_equal(KVF_ERR_DISCONNECTED, -32);
    assert_int_equal(KVF_ERR_NO_DAEMON, -35);
    assert_int_equal(KVF_ERR_IO, -64);
    assert_int_equal(KVF_ERR_NO_SPACE, -67);
    assert_int_equal(KVF_ERR_CONFIG, -96);
    assert_int_equal(KVF_ERR_INTERNAL, -97);
    assert_int_equal(KVF_DTYPE_BF16, 1);
    assert_int_equal(KVF_DTYPE_U8, 6);
    assert_int_equal(KVF_KIND_BYTES, 0);
    assert_int_equal(KVF_KIND_STATE, 3);
    assert_int_equal(KVF_KIND_X, 4);
    assert_int_equal(KVF_KIND_XG, 5);
    assert_int_equal(KVF_TIER_DRAM, 2);
    assert_int_equal(KVF_TIER_REMOTE, 4);
    assert_int_equal(KVF_KEY_BYTES_MAX, 64);
    assert_int_equal(KVF_RECORD_PAGE_BYTES, 4096);
    assert_int_equal(KVF_PAYLOAD_BYTES_MAX, 64 << 20);
    assert_int_equal(KVF_SHARD_NONE, 0xffff);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_pinned),
        cmocka_unit_test(sizes_come_first),
        cmocka_unit_test(numbers_are_pinned),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
