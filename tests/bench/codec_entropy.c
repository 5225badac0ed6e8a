/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_entropy.c: packing and unpacking of records beside memcpy of the same records, and what it
 * saves.
 */
#include "tests/bench/codec_entropy.h"

#include "base/clock.h"
#include "codec/codec.h"
#include "codec/entropy.h"
#include "tests/support/kv_data.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct entropy_bench {
    const struct entropy_records *at;
    struct kvf_entropy_packer *packer;
    struct kvf_entropy_unpacker *unpacker;
    uint64_t next;
};

static uint64_t record_bytes(const uint8_t *record)
{
    return ((const struct kvf_record_page *)(const void *)record)->header.total_bytes;
}

static const uint8_t *record_of(const struct entropy_bench *bench, uint64_t i)
{
    return bench->at->records + i * bench->at->slot_bytes;
}

static void pack(struct entropy_bench *bench, uint64_t i)
{
    uint64_t packed_bytes;

    if (kvf_entropy_pack(bench->packer, record_of(bench, i),
                         bench->at->packed + i * bench->at->slot_bytes, &packed_bytes) != KVF_OK) {
        bench_die("a record is not packed");
    }
}

static void unpack(struct entropy_bench *bench, uint64_t i)
{
    const uint8_t *packed = bench->at->packed + i * bench->at->slot_bytes;

    if (kvf_entropy_unpack(bench->unpacker, packed, record_bytes(packed),
                           bench->at->out + i * bench->at->slot_bytes,
                           record_bytes(record_of(bench, i))) != KVF_OK) {
        bench_die("a record is not unpacked");
    }
}

static void copy(struct entropy_bench *bench, uint64_t i)
{
    memcpy(bench->at->out + i * bench->at->slot_bytes, record_of(bench, i),
           record_bytes(record_of(bench, i)));
    bench_keep(bench->at->out);
}

static double repeat(struct entropy_bench *bench, double seconds,
                     void (*step)(struct entropy_bench *bench, uint64_t i))
{
    uint64_t start_ns = kvf_now_ns();
    uint64_t bytes = 0;

    do {
        step(bench, bench->next);
        bytes += record_bytes(record_of(bench, bench->next));
        bench->next = (bench->next + 1) % bench->at->n_records;
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(bytes, kvf_now_ns() - start_ns);
}

static double run_pack(void *ctx, double seconds)
{
    return repeat(ctx, seconds, pack);
}

static double run_unpack(void *ctx, double seconds)
{
    return repeat(ctx, seconds, unpack);
}

static double run_copy(void *ctx, double seconds)
{
    return repeat(ctx, seconds, copy);
}

static void entropy_open(struct entropy_bench *bench, const struct entropy_records *records)
{
    *bench = (struct entropy_bench){.at = records,
                                    .packer = kvf_entropy_packer_create(),
                                    .unpacker = kvf_entropy_unpacker_create()};
    if (bench->packer == NULL || bench->unpacker == NULL) {
        bench_die("no memory for a packer");
    }
}

static void entropy_close(struct entropy_bench *bench)
{
    kvf_entropy_packer_destroy(bench->packer);
    kvf_entropy_unpacker_destroy(bench->unpacker);
}

void entropy_measure(struct bench_run *run, const char *name, const struct entropy_records *records)
{
    struct entropy_bench bench;
    char figure[64];

    entropy_open(&bench, records);
    snprintf(figure, sizeof(figure), "%s_entropy_encode_vs_memcpy", name);
    bench_pairs(run, figure, run_pack, run_copy, &bench);
    for (uint64_t i = 0; i < records->n_records; i++) {
        pack(&bench, i);
    }
    unpack(&bench, 0);
    if (memcmp(records->records, records->out, record_bytes(records->records)) != 0) {
        bench_die("unpacking gives other bytes");
    }
    snprintf(figure, sizeof(figure), "%s_entropy_decode_vs_memcpy", name);
    bench_pairs(run, figure, run_unpack, run_copy, &bench);
    entropy_close(&bench);
}

/* --- real K and V ----------------------------------------------------------------------------- */

struct real_kv {
    struct kvf_test_kv tensors[2]; /* K, V */
    void *layers[2][KVF_LAYERS_MAX];
    struct kvf_kv_view view;
};

static void real_open(struct real_kv *kv, const char *folder)
{
    static const char *const names[2] = {"k_post", "v"};
    struct kvf_tensor_view *views[2] = {&kv->view.k, &kv->view.v};

    memset(kv, 0, sizeof(*kv));
    for (int i = 0; i < 2; i++) {
        struct kvf_test_kv *tensor = &kv->tensors[i];

        if (kvf_test_kv_find(folder, names[i], 0, tensor) != KVF_OK ||
            kvf_test_kv_load(folder, tensor) != KVF_OK) {
            bench_die("%s has no %s", folder, names[i]);
        }
        for (uint32_t layer = 0; layer < tensor->n_layers; layer++) {
            kv->layers[i][layer] = (uint8_t *)tensor->data +
                                   layer * kvf_test_kv_layer_bytes(tensor);
        }
        *views[i] = (struct kvf_tensor_view){
            .layers = kv->layers[i],
            .page_stride_bytes = kvf_test_kv_head_bytes(tensor),
            .token_stride_bytes = kvf_test_kv_head_bytes(tensor) / tensor->n_tokens,
            .head_stride_bytes = kvf_test_kv_head_bytes(tensor),
        };
    }
    kv->view.struct_bytes = sizeof(kv->view);
    kv->view.tokens_a_page = kv->tensors[0].n_tokens;
}

/* A record of all its tokens. */
static uint8_t *real_encode(const struct real_kv *kv, const char *profile)
{
    const struct kvf_test_kv *k = &kv->tensors[0];
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = (uint16_t)k->n_layers,
        .n_heads = (uint16_t)k->n_heads,
        .dim_k = (uint16_t)k->dim,
        .dim_v = (uint16_t)kv->tensors[1].dim,
        .chunk_tokens = (uint16_t)k->n_tokens,
    };
    struct kvf_codec_plan plan;
    size_t payload_bytes;
    uint8_t *record = NULL;
    void *workspace = NULL;

    if (kvf_codec_plan_init(&plan, &geometry, profile) == KVF_OK) {
        record = malloc(plan.record_bytes_max);
        workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN,
                                  (plan.workspace_bytes / KVF_CODEC_WORKSPACE_ALIGN + 1) *
                                      KVF_CODEC_WORKSPACE_ALIGN);
    }
    if (record == NULL || workspace == NULL ||
        kvf_block_encode(&plan, &kv->view, 0, k->n_tokens, (struct kvf_record_page *)(void *)record,
                         record + KVF_BLOCK_PAGE_BYTES,
                         plan.record_bytes_max - KVF_BLOCK_PAGE_BYTES, workspace,
                         &payload_bytes) != KVF_OK) {
        bench_die("%s: real K and V are not encoded", profile);
    }
    free(workspace);
    return record;
}

static double saving(struct kvf_entropy_packer *packer, const struct real_kv *kv,
                     const char *profile)
{
    uint8_t *record = real_encode(kv, profile);
    uint8_t *packed = malloc(record_bytes(record));
    uint64_t packed_bytes = record_bytes(record);
    double saved;

    if (packed == NULL) {
        bench_die("no memory for a record");
    }
    (void)kvf_entropy_pack(packer, record, packed, &packed_bytes); /* or it stays as it is */
    saved = 100 * (1 - (double)packed_bytes / (double)record_bytes(record));
    free(record);
    free(packed);
    return saved;
}

void entropy_saving(const struct bench_run *run)
{
    static const char *const models[] = {"smollm2-135m", "qwen2.5-coder-0.5b"};
    static const char *const cases[][2] = {
        {"entropy_saving", "balanced"},        {"entropy_saving_saw8", "saw8"},
        {"entropy_saving_saw3", "saw3"},       {"entropy_saving_saw2", "saw2"},
        {"entropy_saving_tq4", "tq4"},         {"entropy_saving_tq3", "tq3"},
        {"entropy_saving_kivi4", "kivi4-g32"}, {"entropy_saving_kivi2", "kivi2-g32"},
        {"entropy_saving_exact", "exact"},     {"entropy_saving_raw", "raw"},
    };
    struct kvf_entropy_packer *packer = kvf_entropy_packer_create();
    struct real_kv kv[2];

    if (packer == NULL) {
        bench_die("no memory for a packer");
    }
    for (int i = 0; i < 2; i++) {
        char folder[512];

        snprintf(folder, sizeof(folder), "%s/%s", KVF_TEST_KV_FOLDER, models[i]);
        real_open(&kv[i], folder);
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double first = saving(packer, &kv[0], cases[i][1]);
        double second = saving(packer, &kv[1], cases[i][1]);

        if (run->only == NULL || strcmp(run->only, cases[i][0]) == 0) {
            bench_print_value(cases[i][0], first < second ? first : second);
        }
    }
    for (int i = 0; i < 2; i++) {
        kvf_test_kv_free(&kv[i].tensors[0]);
        kvf_test_kv_free(&kv[i].tensors[1]);
    }
    kvf_entropy_packer_destroy(packer);
}
