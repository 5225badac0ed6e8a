/* SPDX-License-Identifier: Apache-2.0
 *
 * Which kernels a piece of work takes: every part is covered by thread blocks, and what no kernel
 * can do is refused.
 */
#include "codec/codec_gpu_host.h"
#include "codec/codec_gpu_scratch.h"
#include "tests/unit/codec/codec_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum {
    LAYERS = 3,
    BLOCKS = 4,
    TOKENS = 100,
};

static struct kvf_gpu_kinds kinds;

/* Work of whole blocks by a plan, whose kinds of layers go to kinds. */
static struct kvf_gpu_work work_of(const char *profile, int kind, int dtype, uint32_t dim_k,
                                   uint32_t dim_v)
{
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(dtype, LAYERS, 5, dim_k, dim_v, TOKENS);
    geometry.kind = (uint8_t)kind;
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, profile), KVF_OK);
    struct kvf_gpu_work work = {
        .n_parts = LAYERS * BLOCKS * (dim_v != 0 ? 2 : 1),
        .n_blocks = BLOCKS,
        .n_layers = LAYERS,
        .tokens_a_page = 16,
        .has_v = dim_v != 0,
        .tokens_max = TOKENS,
    };
    kvf_gpu_kinds_fill(&plan, &kinds);
    return kvf_gpu_launch_work(&work, &kinds, KVF_GPU_WHOLE);
}

static const struct kvf_gpu_launch *find(const struct kvf_gpu_launch *launches, uint32_t n,
                                         const char *kernel)
{
    for (uint32_t i = 0; i < n; i++) {
        if (strcmp(launches[i].kernel, kernel) == 0) {
            return &launches[i];
        }
    }
    fail_msg("no launch of %s", kernel);
    return NULL;
}

static void tensors_keep_their_facts(void **state)
{
    (void)state;
    struct kvf_gpu_work work = work_of("balanced", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 0);
    const struct kvf_gpu_tensor *k = &work.tensors[0];
    assert_int_equal(k->codec, KVF_CODEC_SAW);
    assert_int_equal(k->bits, 4);
    assert_int_equal(k->n_rows, 5);
    assert_int_equal(k->group, 128);
    assert_int_equal(k->code_bytes, 64);
    assert_int_equal(k->element_bytes, 2);
    assert_int_equal(k->flags, KVF_TENSOR_CENTER | KVF_TENSOR_SIGNS);
    assert_true(k->clip_ratio > 0.9f && k->clip_ratio < 1.0f);
    assert_int_equal(k->order[1], 4); /* the lowest bit of a position is bit 2 */
    struct kvf_gpu_tensor none = {0};
    assert_memory_equal(&work.tensors[1], &none, sizeof(none));
    work = work_of("raw", KVF_KIND_KV, KVF_DTYPE_F16, 128, 128);
    assert_true(work.tensors[1].clip_ratio == 1.0f);
}

static void raw_plans(void **state)
{
    (void)state;
    struct kvf_gpu_work work = work_of("raw", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 256);
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(n, 2);
    assert_string_equal(launches[0].kernel, "kvf_raw_encode");
    assert_int_equal(launches[0].tensors, 3);
    /* V is the larger one */
    uint32_t bytes = 5 * TOKENS * 256 * 2;
    uint32_t n_pieces = (bytes + KVF_RAW_PIECE_BYTES - 1) / KVF_RAW_PIECE_BYTES;
    assert_int_equal(launches[0].n_blocks, work.n_parts * n_pieces);
    assert_string_equal(launches[1].kernel, "kvf_escapes_write_fixed");
    assert_int_equal(launches[1].tensors, 0);
    assert_int_equal(launches[1].n_blocks, work.n_parts);
    assert_true(kvf_gpu_encode_scratch_bytes(&work, &kinds) >= work.n_parts * sizeof(uint32_t));
    n = kvf_gpu_decode(&work, KVF_CODEC_RAW, launches);
    assert_int_equal(n, 1);
    assert_string_equal(launches[0].kernel, "kvf_raw_decode");
}

static void saw_plans(void **state)
{
    (void)state;
    struct kvf_gpu_work work = work_of("balanced", KVF_KIND_MLA, KVF_DTYPE_BF16, 512, 64);
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_raw_encode")->tensors, 2);
    assert_int_equal(find(launches, n, "kvf_escapes_count")->tensors, 1);
    assert_string_equal(launches[n - 2].kernel, "kvf_escapes_count");
    assert_string_equal(launches[n - 1].kernel, "kvf_escapes_write_fixed");
    assert_int_equal(launches[n - 1].tensors, 3); /* all write zeros to the table */
    assert_int_equal(kvf_gpu_patch(&work, launches), 1);
    assert_string_equal(launches[0].kernel, "kvf_escapes_patch");
    assert_int_equal(launches[0].n_blocks, work.n_parts);
    /* strips that fell back to raw are raw, whatever the tensor is */
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_RAW, launches), 1);
    assert_int_equal(launches[0].tensors, 3);
}

static void exact_plans(void **state)
{
    (void)state;
    struct kvf_gpu_work work = work_of("exact", KVF_KIND_KV, KVF_DTYPE_BF16, 96, 96);
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    /* 10 vectors a chunk, 10 chunks a head, 5 heads */
    uint32_t n_pieces = (50 + KVF_EXACT_PIECE_CHUNKS - 1) / KVF_EXACT_PIECE_CHUNKS;
    assert_int_equal(find(launches, n, "kvf_exact_count_bf16")->n_blocks, work.n_parts * n_pieces);
    assert_int_equal(find(launches, n, "kvf_exact_choose_short")->n_blocks, work.n_parts);
    assert_int_equal(find(launches, n, "kvf_exact_place")->n_blocks, BLOCKS);
    assert_int_equal(find(launches, n, "kvf_exact_encode_bf16")->n_blocks, work.n_parts * n_pieces);
    assert_string_equal(launches[n - 1].kernel, "kvf_escapes_write");
    assert_int_equal(launches[n - 1].tensors, 0);
    assert_int_equal(kvf_exact_gpu_chunks(&work, 3), 50);
    assert_int_equal(launches[0].tensors, 3 | 50 << KVF_EXACT_CHUNKS_SHIFT);
    struct kvf_gpu_scratch scratch = kvf_gpu_scratch(work.n_parts, 0, 50);
    assert_int_equal(kvf_gpu_encode_scratch_bytes(&work, &kinds), scratch.bytes);
    assert_true(scratch.bytes - scratch.bins_offset >= work.n_parts * 50ull * 128);

    /* 12 tokens from anywhere can touch three chunks of 10, 11 tokens two: 15 and 10 a part */
    work.tokens_max = 11;
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_EXACT, launches), 1);
    assert_string_equal(launches[0].kernel, "kvf_exact_decode_bf16");
    assert_int_equal(launches[0].tensors >> KVF_EXACT_CHUNKS_SHIFT, 10);
    work.tokens_max = 12;
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_EXACT, launches), 1);
    assert_int_equal(launches[0].tensors >> KVF_EXACT_CHUNKS_SHIFT, 15);
    assert_int_equal(launches[0].n_blocks, work.n_parts);

    work = work_of("exact", KVF_KIND_KV, KVF_DTYPE_F32, 64, 0);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_exact_encode_f32")->tensors & 3, 1);
}

static void mixed_plans(void **state)
{
    (void)state;
    struct kvf_gpu_work work = work_of("exact", KVF_KIND_MLA, KVF_DTYPE_BF16, 512, 64);
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_exact_encode_bf16")->tensors & 3, 1);
    const struct kvf_gpu_launch *raw = find(launches, n, "kvf_raw_encode");
    assert_int_equal(raw->tensors, 2);
    assert_true(raw > find(launches, n, "kvf_exact_place"));
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_SAW, launches), 0);
}

/* Records of a search decode as others do. */
static void searches(void **state)
{
    (void)state;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work work = work_of("saw3-search", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 128);
    assert_int_equal(work.tensors[0].n_clips, 3);
    assert_true(work.tensors[0].clip_ratio == 1.0f);
    assert_true(work.tensors[0].clip_ratios[0] > work.tensors[0].clip_ratios[2]);
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_saw_search_128_3")->tensors, 3);
    n = kvf_gpu_decode(&work, KVF_CODEC_SAW, launches);
    assert_int_equal(find(launches, n, "kvf_saw_decode_128_3")->tensors, 3);
}

/* Layers that are differences to those before: one kernel has them all. */
static void differences_take_one_kernel(void **state)
{
    (void)state;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 2 * LAYERS, 5, 128, 0, TOKENS);
    struct kvf_gpu_work work = work_of("saw3", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 0);
    fixture_geometry_suit(&geometry, "xcl2-lo");
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "xcl2-lo"), KVF_OK);
    kvf_gpu_kinds_fill(&plan, &kinds);
    work.n_layers = 2 * LAYERS;
    work.n_parts = 2 * LAYERS * BLOCKS;
    work = kvf_gpu_launch_work(&work, &kinds, KVF_GPU_WHOLE);
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_loop_encode_128")->tensors & 3, 1);
    n = kvf_gpu_decode(&work, KVF_CODEC_SAW, launches);
    assert_int_equal(find(launches, n, "kvf_loop_decode_128")->tensors & 3, 1);
    /* with zeros a warp has more vectors */
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "xcl2"), KVF_OK);
    kvf_gpu_kinds_fill(&plan, &kinds);
    work = kvf_gpu_launch_work(&work, &kinds, KVF_GPU_WHOLE);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_loop_encode_tile_2")->tensors & 3, 1);
    n = kvf_gpu_decode(&work, KVF_CODEC_SAW, launches);
    assert_int_equal(find(launches, n, "kvf_loop_decode_tile_2")->tensors & 3, 1);
    /* the same codecs without differences */
    plan.block_flags = KVF_BLOCK_KINDS;
    kvf_gpu_kinds_fill(&plan, &kinds);
    work = kvf_gpu_launch_work(&work, &kinds, KVF_GPU_WHOLE);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_true(n != 0);
    for (uint32_t i = 0; i < n; i++) {
        assert_null(strstr(launches[i].kernel, "loop"));
    }
    assert_true(kvf_gpu_decode(&work, KVF_CODEC_SAW, launches) != 0);
}

/* K by channel and V by token take one kernel, if bits and dims let them. */
static void kivi_plans(void **state)
{
    (void)state;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work work = work_of("kivi4-g32", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 128);
    assert_int_equal(work.tensors[0].group_axis, KVF_AXIS_CHANNEL);
    assert_int_equal(work.tensors[1].group_axis, KVF_AXIS_TOKEN);
    assert_int_equal(work.tensors[0].group_size, 32);
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_kivi_encode_128_4")->tensors, 3);
    assert_int_equal(find(launches, n, "kvf_escapes_count")->tensors, 3);
    n = kvf_gpu_decode(&work, KVF_CODEC_KIVI, launches);
    assert_int_equal(find(launches, n, "kvf_kivi_decode_128_4")->tensors, 3);
    work = work_of("kivi2-g64", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 96);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_kivi_encode_128_2")->tensors, 1);
    assert_int_equal(find(launches, n, "kvf_kivi_encode")->tensors, 2);
}

static void tq_plans(void **state)
{
    (void)state;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work work = work_of("tq2.5", KVF_KIND_KV, KVF_DTYPE_F16, 128, 96);
    assert_int_equal(work.tensors[0].n_rotations, 2);
    assert_int_equal(work.tensors[0].rotations[0].n, 32);
    assert_int_equal(work.tensors[0].rotations[1].bits, 2);
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_tq_encode")->tensors, 3);
    assert_int_equal(find(launches, n, "kvf_tq_encode")->n_blocks, work.n_parts * 5);
    n = kvf_gpu_decode(&work, KVF_CODEC_TQ, launches);
    assert_int_equal(find(launches, n, "kvf_tq_decode")->tensors, 3);
    work = work_of("tq4", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 128);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_tq_encode_128_4")->tensors, 3);
    n = kvf_gpu_decode(&work, KVF_CODEC_TQ, launches);
    assert_int_equal(find(launches, n, "kvf_tq_decode_128_4")->tensors, 3);
    work = work_of("tq3", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 96);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_tq_encode_128_3")->tensors, 1);
    assert_int_equal(find(launches, n, "kvf_tq_encode")->tensors, 2);
    work = work_of("tq3.5", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 64);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_tq_encode_split_3")->tensors, 1);
    assert_int_equal(find(launches, n, "kvf_tq_encode")->tensors, 2);
    work.shared_bytes_max = 48 << 10; /* of a small device */
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_tq_encode")->tensors, 3);
    n = kvf_gpu_decode(&work, KVF_CODEC_TQ, launches); /* takes no shared memory */
    assert_int_equal(find(launches, n, "kvf_tq_decode_split_3")->tensors, 1);
    assert_int_equal(find(launches, n, "kvf_tq_decode")->tensors, 2);
    work = work_of("tq3-qjl", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 0);
    n = kvf_gpu_encode(&work, &kinds, launches);
    assert_int_equal(find(launches, n, "kvf_tq_encode")->tensors, 1);
}

/* A kind of layers has launches of its own, which are of its parts. */
static void layers_of_two_kinds(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 7, 2, 128, 128, TOKENS);
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    uint32_t numbers[2 * 7 * 2];
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "dense"), KVF_OK);
    kvf_gpu_kinds_fill(&plan, &kinds);
    assert_int_equal(kinds.n, 2);
    assert_int_equal(kinds.n_layers[0], 4); /* two at each end */
    assert_int_equal(kinds.n_layers[1], 3);
    struct kvf_gpu_work work = {.numbers = 1000,
                                .n_parts = 2 * 7 * 2,
                                .n_blocks = 2,
                                .n_layers = 7,
                                .tokens_a_page = 16,
                                .has_v = 1,
                                .tokens_max = TOKENS};
    kvf_gpu_number_parts(&work, &kinds, numbers);
    assert_int_equal(numbers[3], 3);
    assert_int_equal(numbers[4], 10);              /* K of layer 5 */
    assert_int_equal(numbers[8], 14);              /* K of layer 0 of the second block */
    assert_int_equal(numbers[2 * 8], 4);           /* K of layer 2 */
    assert_int_equal(numbers[2 * 14 - 1], 14 + 9); /* V of layer 4 */
    uint32_t n = kvf_gpu_encode(&work, &kinds, launches);
    const struct kvf_gpu_launch *edge = find(launches, n, "kvf_saw_encode_128_8");
    assert_int_equal(edge->kind, 0);
    assert_int_equal(edge->tensors, 3);
    const struct kvf_gpu_launch *middle = find(launches, n, "kvf_saw_encode_128_4");
    assert_int_equal(middle->kind, 1);
    assert_int_equal(middle->tensors, 1);
    struct kvf_gpu_work one = kvf_gpu_launch_work(&work, &kinds, 1);
    assert_int_equal(one.n_parts, 12);
    assert_int_equal(one.n_parts_all, 28);
    assert_int_equal(one.numbers, 1000 + 16 * sizeof(uint32_t));
    assert_int_equal(one.tensors[1].codec, KVF_CODEC_TQ);
    /* all are counted before anything is written */
    assert_string_equal(launches[n - 3].kernel, "kvf_escapes_count");
    assert_string_equal(launches[n - 1].kernel, "kvf_escapes_write_fixed");
}

/* A kind that no layer of so short a model has is left out. */
static void kinds_without_layers(void **state)
{
    (void)state;
    struct kvf_codec_plan plan;
    struct kvf_geometry geometry = fixture_geometry(KVF_DTYPE_BF16, 3, 1, 128, 128, TOKENS);
    assert_int_equal(kvf_codec_plan_init(&plan, &geometry, "max-edges"), KVF_OK);
    kvf_gpu_kinds_fill(&plan, &kinds);
    assert_int_equal(kinds.n, 1);
    assert_int_equal(kinds.tensors[0][0].bits, 8);
    assert_int_equal(kinds.layer_kinds[1], 0);
}

static void impossible_work(void **state)
{
    (void)state;
    struct kvf_gpu_launch launches[KVF_GPU_LAUNCHES_MAX];
    struct kvf_gpu_work work = work_of("raw", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 128);
    work.n_parts = 0;
    assert_int_equal(kvf_gpu_encode(&work, &kinds, launches), 0);
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_RAW, launches), 0);
    assert_int_equal(kvf_gpu_patch(&work, launches), 0);
    work.n_parts = KVF_GPU_PARTS_MAX + 1;
    assert_int_equal(kvf_gpu_encode(&work, &kinds, launches), 0);
    work = work_of("exact", KVF_KIND_KV, KVF_DTYPE_BF16, 128, 128);
    work.tensors[0].dtype = kinds.tensors[0][0].dtype = KVF_DTYPE_F16;
    assert_int_equal(kvf_gpu_encode(&work, &kinds, launches), 0);
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_EXACT, launches), 0);
    assert_int_equal(kvf_gpu_decode(&work, KVF_CODEC_NONE, launches), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_keep_their_facts),
        cmocka_unit_test(raw_plans),
        cmocka_unit_test(saw_plans),
        cmocka_unit_test(exact_plans),
        cmocka_unit_test(mixed_plans),
        cmocka_unit_test(searches),
        cmocka_unit_test(differences_take_one_kernel),
        cmocka_unit_test(kivi_plans),
        cmocka_unit_test(tq_plans),
        cmocka_unit_test(layers_of_two_kinds),
        cmocka_unit_test(kinds_without_layers),
        cmocka_unit_test(impossible_work),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
