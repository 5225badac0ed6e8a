/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_codec.c: encoding and decoding of whole chunks on one core, beside memcpy of the same bf16
 * bytes from the same pages (encode) or into the same pages (decode).
 *
 *   bench_codec --working-set BYTES [--layers N] [--seconds N] [--pairs N]
 *
 * A chunk is 256 tokens of 8 KV heads, K and V of a layer in pages of their own, as in
 * Llama-3.1-8B; it comes from memory, not from a cache: many chunks take turns. Both sides count
 * the bf16 bytes. Encoding includes the payload's checksum. Packing of the records for drives is
 * measured in bytes of records (codec_entropy.h).
 */
#include "codec/codec.h"
#include "tests/bench/bench.h"
#include "tests/bench/codec_entropy.h"

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_HEADS       8
#define N_TOKENS      256
#define PAGE_TOKENS   16
#define CHANNELS      128 /* after so many elements the scales of channels repeat */
#define CRC_BYTES     (1u << 20)
#define ELEMENT_BYTES 2

struct codec_case {
    const char *name; /* results are <name>_encode_vs_memcpy and <name>_decode_vs_memcpy */
    const char *profile;
    uint16_t dim;
    uint16_t n_layers;
    bool packs; /* measure packing, too */
};

/* The full model for the figures that have a bar, fewer layers for the others: the layer is what
 * counts, and a run should not take long. */
static const struct codec_case cases[] = {
    {"saw4", "balanced", 128, 32, true},
    {"saw4_paper", "saw4-paper", 128, 8, false},
    {"safe", "safe", 128, 8, false},
    {"saw8", "saw8", 128, 8, false},
    {"saw6", "saw6", 128, 8, false},
    {"saw5", "saw5", 128, 8, false},
    {"saw3", "saw3", 128, 8, true},
    {"saw2", "saw2", 128, 8, false},
    {"saw4_search9", "saw4-search9", 128, 8, false},
    {"saw3_search", "saw3-search", 128, 8, false},
    {"saw2_search", "saw2-search", 128, 8, false},
    {"tq4", "tq4", 128, 8, true},
    {"tq3", "tq3", 128, 8, false},
    {"tq2", "tq2", 128, 8, false},
    {"tq3p5", "tq3.5", 128, 8, false},
    {"kivi4", "kivi4-g32", 128, 8, true},
    {"kivi2", "kivi2-g32", 128, 8, false},
    {"exact", "exact", 128, 8, true},
    {"raw", "raw", 128, 8, true},
    {"saw4_d64", "balanced", 64, 8, false},
    {"saw4_d80", "balanced", 80, 8, false},
    {"saw4_d96", "balanced", 96, 8, false},
    {"saw4_d112", "balanced", 112, 8, false},
    {"saw4_d256", "balanced", 256, 8, false},
};

struct codec_bench {
    struct bench_run run;
    size_t bytes;     /* of each of the four areas */
    uint8_t *pages;   /* what is encoded */
    uint8_t *records; /* what encode writes and decode reads */
    uint8_t *copies;  /* what memcpy writes (beside encode) and reads (beside decode) */
    uint8_t *out;     /* what decode and memcpy write */

    /* of the case that is measured */
    struct kvf_codec_plan plan;
    double error_max; /* of a lossy codec, of the power */
    void *workspace;
    uint32_t n_layers;
    size_t tensor_bytes; /* K or V of a layer */
    size_t chunk_bytes;
    size_t slot_bytes; /* from record to record */
    uint64_t n_chunks;
    uint64_t next; /* chunk whose turn it is */
};

/* ----------------------------------------------------------------------------------------------
 * Chunks
 */

/* bf16 numbers near a normal distribution, with a scale for each channel. */
static void fill_pages(uint8_t *pages, size_t bytes)
{
    struct kvf_random_seeded random;

    kvf_random_seeded_init(&random, 1);
    for (size_t i = 0; i < bytes / ELEMENT_BYTES; i++) {
        uint64_t word = kvf_random_seeded_next(&random);
        int32_t sum = (int32_t)(word & 0xffff) + (int32_t)(word >> 16 & 0xffff) +
                      (int32_t)(word >> 32 & 0xffff) + (int32_t)(word >> 48) - 2 * 65535;
        float value = ldexpf((float)sum / 37837.0f, (int)(i % CHANNELS * 7 % 5) - 2);
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        pages[2 * i] = (uint8_t)(bits >> 16);
        pages[2 * i + 1] = (uint8_t)(bits >> 24);
    }
}

static struct kvf_kv_view view_of(const struct codec_bench *bench, uint8_t *area, uint64_t chunk,
                                  void *k_layers[KVF_LAYERS_MAX], void *v_layers[KVF_LAYERS_MAX])
{
    uint8_t *base = area + chunk * bench->chunk_bytes;
    size_t head_bytes = bench->plan.geometry.dim_k * (size_t)ELEMENT_BYTES;
    struct kvf_tensor_view tensor = {
        .token_stride_bytes = N_HEADS * head_bytes,
        .head_stride_bytes = head_bytes,
        .page_stride_bytes = PAGE_TOKENS * N_HEADS * head_bytes,
    };
    struct kvf_kv_view view = {
        .struct_bytes = sizeof(view), .tokens_a_page = PAGE_TOKENS, .k = tensor, .v = tensor};

    for (uint32_t layer = 0; layer < bench->n_layers; layer++) {
        k_layers[layer] = base + 2 * layer * bench->tensor_bytes;
        v_layers[layer] = base + (2 * layer + 1) * bench->tensor_bytes;
    }
    view.k.layers = k_layers;
    view.v.layers = v_layers;
    return view;
}

static uint8_t *record_of(const struct codec_bench *bench, uint64_t chunk)
{
    return bench->records + chunk * bench->slot_bytes;
}

static void encode_chunk(struct codec_bench *bench, uint64_t chunk)
{
    void *k_layers[KVF_LAYERS_MAX];
    void *v_layers[KVF_LAYERS_MAX];
    struct kvf_kv_view view = view_of(bench, bench->pages, chunk, k_layers, v_layers);
    uint8_t *record = record_of(bench, chunk);
    size_t payload_bytes;
    int status = kvf_block_encode(&bench->plan, &view, N_TOKENS, N_TOKENS,
                                  (struct kvf_record_page *)record, record + KVF_BLOCK_PAGE_BYTES,
                                  bench->slot_bytes - KVF_BLOCK_PAGE_BYTES, bench->workspace,
                                  &payload_bytes);

    if (status != KVF_OK) {
        bench_die("encode: %s", kvf_status_text(status));
    }
}

static void decode_chunk(struct codec_bench *bench, uint64_t chunk)
{
    void *k_layers[KVF_LAYERS_MAX];
    void *v_layers[KVF_LAYERS_MAX];
    struct kvf_kv_view view = view_of(bench, bench->out, chunk, k_layers, v_layers);
    int status = kvf_block_decode(&bench->plan, record_of(bench, chunk), bench->slot_bytes, 0, 0, 0,
                                  0, &view, bench->workspace);

    if (status != KVF_OK) {
        bench_die("decode: %s", kvf_status_text(status));
    }
}

/* A tensor of a layer at a time: they are allocations of their own in an engine. */
static void copy_chunk(const struct codec_bench *bench, uint8_t *to, const uint8_t *from,
                       uint64_t chunk)
{
    for (uint32_t i = 0; i < 2 * bench->n_layers; i++) {
        size_t offset = chunk * bench->chunk_bytes + i * bench->tensor_bytes;

        memcpy(to + offset, from + offset, bench->tensor_bytes);
        bench_keep(to);
    }
}

static void copy_from_pages(struct codec_bench *bench, uint64_t chunk)
{
    copy_chunk(bench, bench->copies, bench->pages, chunk);
}

static void copy_to_pages(struct codec_bench *bench, uint64_t chunk)
{
    copy_chunk(bench, bench->out, bench->copies, chunk);
}

static double element(const uint8_t *area, size_t i)
{
    uint32_t bits = (uint32_t)area[2 * i] << 16 | (uint32_t)area[2 * i + 1] << 24;
    float value;

    memcpy(&value, &bits, sizeof(value));
    return (double)value;
}

/* What is measured gives back what was put in. */
static void check_chunk(const struct codec_bench *bench)
{
    double error2 = 0;
    double power = 0;

    if (bench->plan.lossless) {
        if (memcmp(bench->pages, bench->out, bench->chunk_bytes) != 0) {
            bench_die("decode gives other bytes");
        }
        return;
    }
    for (size_t i = 0; i < bench->chunk_bytes / ELEMENT_BYTES; i++) {
        double original = element(bench->pages, i);
        double error = element(bench->out, i) - original;

        error2 += error * error;
        power += original * original;
    }
    if (!(error2 < bench->error_max * power)) {
        bench_die("decode gives numbers that are too far off: %g of the power", error2 / power);
    }
}

/* ----------------------------------------------------------------------------------------------
 * Measuring
 */
static double run_chunks(struct codec_bench *bench, double seconds, size_t bytes,
                         void (*step)(struct codec_bench *bench, uint64_t chunk))
{
    uint64_t start_ns = kvf_now_ns();
    uint64_t n = 0;

    do {
        step(bench, bench->next);
        bench->next = (bench->next + 1) % bench->n_chunks;
        n++;
    } while ((double)(kvf_now_ns() - start_ns) < seconds * 1e9);
    return bench_gb_s(n * bytes, kvf_now_ns() - start_ns);
}

static double encode(void *ctx, double seconds)
{
    struct codec_bench *bench = ctx;

    return run_chunks(bench, seconds, bench->chunk_bytes, encode_chunk);
}

static double decode(void *ctx, double seconds)
{
    struct codec_bench *bench = ctx;

    return run_chunks(bench, seconds, bench->chunk_bytes, decode_chunk);
}

static double copy_out(void *ctx, double seconds)
{
    struct codec_bench *bench = ctx;

    return run_chunks(bench, seconds, bench->chunk_bytes, copy_from_pages);
}

static double copy_in(void *ctx, double seconds)
{
    struct codec_bench *bench = ctx;

    return run_chunks(bench, seconds, bench->chunk_bytes, copy_to_pages);
}

static void case_open(struct codec_bench *bench, const struct codec_case *codec, uint32_t n_layers)
{
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = (uint16_t)n_layers,
        .n_heads = N_HEADS,
        .dim_k = codec->dim,
        .dim_v = codec->dim,
        .chunk_tokens = N_TOKENS,
    };
    int status = kvf_codec_plan_init(&bench->plan, &geometry, codec->profile);
    size_t aligned;

    if (status != KVF_OK) {
        bench_die("%s: %s", codec->name, kvf_status_text(status));
    }
    aligned = bench->plan.workspace_bytes / KVF_CODEC_WORKSPACE_ALIGN * KVF_CODEC_WORKSPACE_ALIGN +
              KVF_CODEC_WORKSPACE_ALIGN;
    bench->workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN, aligned);
    if (bench->workspace == NULL) {
        bench_die("no memory for a workspace");
    }
    bench->error_max = bench->plan.kinds[0].v.descriptor.bits == 2 ? 0.25 : 0.05;
    bench->n_layers = n_layers;
    bench->tensor_bytes = (size_t)N_TOKENS * N_HEADS * codec->dim * ELEMENT_BYTES;
    bench->chunk_bytes = 2 * n_layers * bench->tensor_bytes;
    bench->slot_bytes = (bench->plan.record_bytes_max + BENCH_ALIGN_BYTES - 1) / BENCH_ALIGN_BYTES *
                        BENCH_ALIGN_BYTES;
    bench->n_chunks = bench->bytes / bench->chunk_bytes;
    while (bench->n_chunks * bench->slot_bytes > 2 * bench->bytes) {
        bench->n_chunks--;
    }
    if (bench->n_chunks == 0) {
        bench_die("--working-set is smaller than one chunk");
    }
    bench->next = 0;
}

static void case_measure(struct codec_bench *bench, const struct codec_case *codec)
{
    char name[64];

    for (uint64_t chunk = 0; chunk < bench->n_chunks; chunk++) {
        encode_chunk(bench, chunk);
    }
    decode_chunk(bench, 0);
    check_chunk(bench);
    snprintf(name, sizeof(name), "%s_encode_vs_memcpy", codec->name);
    bench_pairs(&bench->run, name, encode, copy_out, bench);
    snprintf(name, sizeof(name), "%s_decode_vs_memcpy", codec->name);
    bench_pairs(&bench->run, name, decode, copy_in, bench);
    if (codec->packs) {
        struct entropy_records records = {.records = bench->records,
                                          .packed = bench->copies,
                                          .out = bench->out,
                                          .slot_bytes = bench->slot_bytes,
                                          .n_records = bench->n_chunks};

        while (records.n_records * records.slot_bytes > bench->bytes) {
            records.n_records--;
        }
        entropy_measure(&bench->run, codec->name, &records);
    }
    free(bench->workspace);
}

/* --- the checksum ----------------------------------------------------------------------------- */

static uint64_t sink; /* results must be used */

static void crc_step(struct codec_bench *bench, uint64_t chunk)
{
    sink += kvf_crc32c(0, bench->pages + chunk * CRC_BYTES, CRC_BYTES);
}

static void read_step(struct codec_bench *bench, uint64_t chunk)
{
    sink += bench_sum(bench->pages + chunk * CRC_BYTES, CRC_BYTES);
}

static void crc_copy_step(struct codec_bench *bench, uint64_t chunk)
{
    sink += kvf_crc32c_copy(bench->out + chunk * CRC_BYTES, bench->pages + chunk * CRC_BYTES,
                            CRC_BYTES, 0);
}

static void memcpy_step(struct codec_bench *bench, uint64_t chunk)
{
    memcpy(bench->out + chunk * CRC_BYTES, bench->pages + chunk * CRC_BYTES, CRC_BYTES);
    bench_keep(bench->out);
}

static double crc_run(void *ctx, double seconds)
{
    return run_chunks(ctx, seconds, CRC_BYTES, crc_step);
}

static double read_run(void *ctx, double seconds)
{
    return run_chunks(ctx, seconds, CRC_BYTES, read_step);
}

static double crc_copy_run(void *ctx, double seconds)
{
    return run_chunks(ctx, seconds, CRC_BYTES, crc_copy_step);
}

static double memcpy_run(void *ctx, double seconds)
{
    return run_chunks(ctx, seconds, CRC_BYTES, memcpy_step);
}

int main(int argc, char **argv)
{
    struct codec_bench bench = {0};
    uint64_t layers_max;

    bench_init(&bench.run, argc, argv);
    bench.bytes = bench_number(&bench.run, "--working-set", 256u << 20);
    layers_max = bench_number(&bench.run, "--layers", KVF_LAYERS_MAX);
    bench.pages = bench_memory(bench.bytes, 0);
    bench.records = bench_memory(2 * bench.bytes, 0);
    bench.copies = bench_memory(bench.bytes, 0);
    bench.out = bench_memory(bench.bytes, 0);
    fill_pages(bench.pages, bench.bytes);

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint32_t n_layers = cases[i].n_layers;

        case_open(&bench, &cases[i], n_layers < layers_max ? n_layers : (uint32_t)layers_max);
        case_measure(&bench, &cases[i]);
    }
    entropy_saving(&bench.run);
    bench.n_chunks = bench.bytes / CRC_BYTES;
    bench.next = 0;
    bench_pairs(&bench.run, "crc32c_vs_read", crc_run, read_run, &bench);
    bench_pairs(&bench.run, "crc32c_copy_vs_memcpy", crc_copy_run, memcpy_run, &bench);

    bench_memory_free(bench.pages, bench.bytes);
    bench_memory_free(bench.records, 2 * bench.bytes);
    bench_memory_free(bench.copies, bench.bytes);
    bench_memory_free(bench.out, bench.bytes);
    bench_keep(&sink);
    return 0;
}
