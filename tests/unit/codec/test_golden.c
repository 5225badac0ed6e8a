/* SPDX-License-Identifier: Apache-2.0
 *
 * test_golden.c: records as they were when the format was fixed.
 *
 * Each case makes an input from integers and a seed, so that it is the same on every machine,
 * encodes it, and compares with tests/data/codec/<case>.bin; then it decodes that file and compares
 * a checksum of the pages. A file holds the record page up to the end of the layer tables' used
 * part, and the payload:
 *
 *   256 bytes block header, u8 layer_bits[n_layers], u32 layer_offsets[n_layers], payload
 *
 * After a deliberate change of the format (with a new version and docs/block-format.md):
 *   test_codec_golden --write
 */
#include "base/crc32c.h"
#include "codec/codec_layout.h"
#include "tests/support/support.h"
#include "tests/unit/codec/codec_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct golden {
    const char *name;
    const char *profile;
    int kind;
    int dtype;
    uint16_t n_layers;
    uint16_t n_heads;
    uint16_t dim_k;
    uint16_t dim_v;
    uint16_t n_tokens;
    uint16_t sinks;
    bool biased;  /* fixture_fill_biased instead of fixture_fill_hard */
    bool halfway; /* fixture_fill_halfway */
    uint32_t decoded_crc32c;
};

#define KV(name_, profile_, dtype_, dim_k_, dim_v_, tokens_, crc)                                  \
    {                                                                                              \
        .name = name_, .profile = profile_, .kind = KVF_KIND_KV, .dtype = dtype_, .n_layers = 2,   \
        .n_heads = 1, .dim_k = dim_k_, .dim_v = dim_v_, .n_tokens = tokens_, .sinks = 1,           \
        .decoded_crc32c = crc                                                                      \
    }

/* K and V of one dim, in as many layers as it takes to have some that are not edges. */
#define LAYERS(name_, profile_, layers_, dim_, tokens_, crc)                                       \
    {                                                                                              \
        .name = name_, .profile = profile_, .kind = KVF_KIND_KV, .dtype = KVF_DTYPE_BF16,          \
        .n_layers = layers_, .n_heads = 1, .dim_k = dim_, .dim_v = dim_, .n_tokens = tokens_,      \
        .sinks = 1, .decoded_crc32c = crc                                                          \
    }

#define BIASED(name_, profile_, dim_k_, tokens_, crc)                                              \
    {                                                                                              \
        .name = name_, .profile = profile_, .kind = KVF_KIND_KV, .dtype = KVF_DTYPE_F32,           \
        .n_layers = 1, .n_heads = 1, .dim_k = dim_k_, .n_tokens = tokens_, .biased = true,         \
        .decoded_crc32c = crc                                                                      \
    }

#define HALFWAY(name_, profile_, dim_k_, tokens_, crc)                                             \
    {                                                                                              \
        .name = name_, .profile = profile_, .kind = KVF_KIND_KV, .dtype = KVF_DTYPE_F32,           \
        .n_layers = 1, .n_heads = 1, .dim_k = dim_k_, .n_tokens = tokens_, .halfway = true,        \
        .decoded_crc32c = crc                                                                      \
    }

/* saw at each width for each dim, each type, centred, planes that end within a byte, MLA; lossless
 * for each type that it recodes. */
static const struct golden goldens[] = {
#include "tests/data/codec/golden.inc"
};

enum {
    N_GOLDENS = sizeof(goldens) / sizeof(goldens[0])
};

static bool write_files;

static void path_of(const struct golden *golden, char *path, size_t bytes)
{
    snprintf(path, bytes, "%s/%s.bin", KVF_GOLDEN_DIR, golden->name);
}

static size_t prefix_bytes(const struct golden *golden)
{
    return KVF_BLOCK_HEADER_BYTES + golden->n_layers * (1 + sizeof(uint32_t));
}

/* Record page and payload from the bytes of a file, and back. */
static void unpack(const struct golden *golden, const uint8_t *file, size_t file_bytes,
                   struct kvf_record_page *page, uint8_t *payload)
{
    memset(page, 0, sizeof(*page));
    memcpy(&page->header, file, KVF_BLOCK_HEADER_BYTES);
    const uint8_t *at = file + KVF_BLOCK_HEADER_BYTES;
    memcpy(page->layer_bits, at, golden->n_layers);
    memcpy(page->layer_offsets, at + golden->n_layers, golden->n_layers * sizeof(uint32_t));
    memcpy(payload, file + prefix_bytes(golden), file_bytes - prefix_bytes(golden));
}

static uint8_t *pack(const struct golden *golden, const struct fixture_codec *codec,
                     size_t *file_bytes_out)
{
    size_t payload_bytes = codec->record_bytes - KVF_BLOCK_PAGE_BYTES;
    uint8_t *file = malloc(prefix_bytes(golden) + payload_bytes);
    assert_non_null(file);
    memcpy(file, &codec->page->header, KVF_BLOCK_HEADER_BYTES);
    uint8_t *at = file + KVF_BLOCK_HEADER_BYTES;
    memcpy(at, codec->page->layer_bits, golden->n_layers);
    memcpy(at + golden->n_layers, codec->page->layer_offsets, golden->n_layers * sizeof(uint32_t));
    memcpy(file + prefix_bytes(golden), codec->payload, payload_bytes);
    *file_bytes_out = prefix_bytes(golden) + payload_bytes;
    return file;
}

static struct kvf_geometry geometry_of(const struct golden *golden)
{
    struct kvf_geometry geometry = fixture_geometry(golden->dtype, golden->n_layers,
                                                    golden->n_heads, golden->dim_k, golden->dim_v,
                                                    golden->n_tokens);
    geometry.kind = (uint8_t)golden->kind;
    fixture_geometry_suit(&geometry, golden->profile);
    geometry.sink_tokens = golden->sinks;
    return geometry;
}

static void check_golden(const struct golden *golden)
{
    char path[512];
    path_of(golden, path, sizeof(path));
    struct kvf_geometry geometry = geometry_of(golden);
    struct kvf_random_seeded random;
    struct fixture_kv kv;
    struct fixture_kv back;
    struct fixture_codec codec;
    /* The same input for every case of the same shape; the seed is part of the files' meaning. */
    kvf_random_seeded_init(&random, 20240229);
    fixture_kv_init(&kv, &geometry, golden->n_tokens);
    fixture_kv_init(&back, &geometry, golden->n_tokens);
    fixture_codec_init(&codec, &geometry, golden->profile);
    if (golden->halfway) {
        fixture_fill_halfway(&kv, &random);
    } else if (golden->biased) {
        fixture_fill_biased(&kv, &random);
    } else {
        fixture_fill_hard(&kv, &random);
    }
    fixture_encode(&codec, &kv, 0);
    for (uint32_t layer = 0; layer < golden->n_layers && !codec.plan.lossless; layer++) {
        uint8_t bits_k = kvf_plan_tensor(&codec.plan, layer, false)->descriptor.bits;
        uint8_t bits_v = kvf_plan_tensor(&codec.plan, layer, true)->descriptor.bits;
        uint8_t bits = (uint8_t)(bits_k | bits_v << 4);
        assert_int_equal(codec.page->layer_bits[layer], bits); /* no strip has fallen back to raw */
    }
    size_t have_bytes = 0;
    uint8_t *have = pack(golden, &codec, &have_bytes);
    if (write_files) {
        kvf_test_file_write(path, have, have_bytes);
    }
    size_t want_bytes = 0;
    uint8_t *want = (uint8_t *)kvf_test_file_read(path, &want_bytes);
    if (want == NULL) {
        fail_msg("%s is missing", path);
    }
    if (have_bytes != want_bytes || memcmp(have, want, want_bytes) != 0) {
        fail_msg("%s: the record is not the golden one", golden->name);
    }
    unpack(golden, want, want_bytes, codec.page, codec.payload);
    fixture_decode(&codec, &back);
    uint32_t crc = kvf_crc32c(0, back.memory, back.memory_bytes);
    if (write_files) {
        print_message("%s: decoded_crc32c 0x%08x\n", golden->name, (unsigned int)crc);
    } else if (crc != golden->decoded_crc32c) {
        fail_msg("%s: decodes to 0x%08x", golden->name, (unsigned int)crc);
    }
    free(have);
    free(want);
    fixture_codec_fini(&codec);
    fixture_kv_fini(&back);
    fixture_kv_fini(&kv);
}

static void records_are_the_golden_ones(void **state)
{
    (void)state;
    for (int i = 0; i < N_GOLDENS; i++) {
        check_golden(&goldens[i]);
    }
}

/* Each codec, width and head dim that codecs are made for is among them. */
static void every_codec_dim_and_width_is_there(void **state)
{
    (void)state;
    static const uint16_t dims[] = {64, 80, 96, 112, 128, 192, 256};
    const uint32_t widths = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 8;
    for (size_t d = 0; d < sizeof(dims) / sizeof(dims[0]); d++) {
        uint32_t seen = 0;
        for (int i = 0; i < N_GOLDENS; i++) {
            struct kvf_codec_plan plan;
            struct kvf_geometry geometry = geometry_of(&goldens[i]);
            assert_int_equal(kvf_codec_plan_init(&plan, &geometry, goldens[i].profile), KVF_OK);
            if (plan.kinds[0].k.descriptor.codec == KVF_CODEC_SAW &&
                plan.kinds[0].k.dim == dims[d]) {
                seen |= 1u << plan.kinds[0].k.descriptor.bits;
            }
        }
        assert_int_equal(seen, widths);
    }
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        bool seen = profile->opaque;
        for (int i = 0; i < N_GOLDENS; i++) {
            seen |= strcmp(profile->name, goldens[i].profile) == 0;
        }
        assert_true(seen);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_the_golden_ones),
        cmocka_unit_test(every_codec_dim_and_width_is_there),
    };
    write_files = argc == 2 && strcmp(argv[1], "--write") == 0;
    int failures = 0;
    for (int level = 0; fixture_use_level(level); level++) {
        failures += cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failures;
}
