/* SPDX-License-Identifier: Apache-2.0
 *
 * test_profile_file.c: profiles as files and as bytes: what is written reads back, and what is
 * wrong is refused with one line that says where.
 */
#include "codec/profile_file.h"

#include "codec/profile_blob.h"
#include "tests/support/support.h"
#include "tests/unit/codec/profile_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>
#include <jansson.h>

static struct kvf_random_seeded random_bits;

/* The blob of a table, to compare tables by. */
static uint8_t *blob_of(const struct kvf_profile_table *table, size_t *bytes_out)
{
    *bytes_out = kvf_profile_blob_bytes(table);
    uint8_t *blob = malloc(*bytes_out);
    assert_non_null(blob);
    memset(blob, 0xa5, *bytes_out);
    kvf_profile_blob_write(table, blob);
    return blob;
}

static void assert_same(const struct kvf_profile_table *a, const struct kvf_profile_table *b)
{
    size_t bytes[2];
    uint8_t *blobs[2] = {blob_of(a, &bytes[0]), blob_of(b, &bytes[1])};
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(blobs[0], blobs[1], bytes[0]);
    free(blobs[0]);
    free(blobs[1]);
}

static void files_read_back(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct kvf_profile_table *back = NULL;
    char why[KVF_PROFILE_FILE_WHY_BYTES] = "";
    json_t *evidence = json_pack("{s:f, s:[s, s]}", "top1", 0.5, "captures", "a", "b");
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES];
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "own.json", path);
    assert_int_equal(kvf_profile_file_write(path, table, evidence, why), KVF_OK);
    int status = kvf_profile_file_read(path, &back, why);
    assert_string_equal(why, "");
    assert_int_equal(status, KVF_OK);
    assert_same(table, back);
    assert_string_equal(back->profile.name, "own");
    kvf_profile_table_destroy(back);

    char *text = kvf_test_file_read(path, NULL);
    assert_non_null(strstr(text, "\"captures\": ["));
    free(text);
    /* a second one replaces it, without leaving anything beside it */
    assert_int_equal(kvf_profile_file_write(path, table, NULL, why), KVF_OK);
    text = kvf_test_file_read(path, NULL);
    assert_null(strstr(text, "evidence"));
    free(text);
    struct stat stat_buffer;
    kvf_test_dir_path(&dir, "own.json.tmp", path);
    assert_int_equal(stat(path, &stat_buffer), -1);
    json_decref(evidence);
    kvf_profile_table_destroy(table);
    kvf_test_dir_remove(&dir);
}

static void missing_files_are_named(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct kvf_profile_table *back = NULL;
    char why[KVF_PROFILE_FILE_WHY_BYTES];
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES];
    kvf_test_dir_create(&dir);
    kvf_test_dir_path(&dir, "none.json", path);
    assert_int_equal(kvf_profile_file_read(path, &back, why), KVF_ERR_IO);
    assert_non_null(strstr(why, "none.json: No such file"));
    assert_int_equal(kvf_profile_file_read(dir.path, &back, why), KVF_ERR_IO);
    assert_non_null(strstr(why, "is not a regular file"));
    kvf_test_dir_path(&dir, "none/own.json", path);
    assert_int_equal(kvf_profile_file_write(path, table, NULL, why), KVF_ERR_IO);
    assert_non_null(strstr(why, "own.json"));
    kvf_profile_table_destroy(table);
    kvf_test_dir_remove(&dir);
}

/* A file that says that a profile of the build has passed. */
static const char passed[] =
    "{\"kvferry_profile\": 1, \"name\": \"balanced\", \"weights_digest\": "
    "\"00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF\",\n"
    "\"workload\": [\"chat\", \"tool-calls\"],\n"
    "\"geometry\": {\"n_layers\": 4, \"n_heads\": 2, \"dim_k\": 64, \"dim_v\": 64, "
    "\"rope_state\": \"post\"}}";

/* One of its own. */
static const char own[] =
    "{\"kvferry_profile\": 1, \"name\": \"own\", \"weights_digest\": "
    "\"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\",\n"
    "\"workload\": [\"code\"],\n"
    "\"geometry\": {\"n_layers\": 2, \"n_heads\": 1, \"dim_k\": 64, \"dim_v\": 64, "
    "\"rope_state\": \"post\"},\n"
    "\"kinds\": [{\"k\": {\"codec\": \"saw\", \"bits\": 4, \"center\": \"block\"},\n"
    "\"v\": {\"codec\": \"tq\", \"bits\": 3, \"scale\": \"least-squares\", \"split\": true}}],\n"
    "\"layers\": [0, 0],\n"
    "\"splits\": {\"v\": [\"ffff000000000000\", \"00000000ffff0000\"]}}";

static int parse(const char *text, struct kvf_profile_table **table_out, char *why)
{
    why[0] = '\0';
    return kvf_profile_file_parse("dir/a.json", text, strlen(text), table_out, why);
}

static void assert_same_tensor(const struct kvf_profile_tensor *a,
                               const struct kvf_profile_tensor *b)
{
    assert_int_equal(a->codec, b->codec);
    assert_int_equal(a->bits, b->bits);
    assert_int_equal(a->flags, b->flags);
    assert_int_equal(a->rotate, b->rotate);
    assert_int_equal(a->clip, b->clip);
    assert_int_equal(a->rot_seed, b->rot_seed);
    assert_int_equal(a->group_size, b->group_size);
    assert_int_equal(a->group_axis, b->group_axis);
}

static void short_files_have_defaults(void **state)
{
    (void)state;
    struct kvf_profile_table *table = NULL;
    char why[KVF_PROFILE_FILE_WHY_BYTES];
    assert_int_equal(parse(passed, &table, why), KVF_OK);
    assert_ptr_equal(table->builtin, kvf_profile_find("balanced"));
    assert_int_equal(table->workloads, KVF_WORKLOAD_CHAT | KVF_WORKLOAD_TOOL_CALLS);
    assert_int_equal(table->weights_digest[31], 0xff);
    char *text = kvf_profile_file_print(table, NULL);
    struct kvf_profile_table *again = NULL;
    assert_int_equal(parse(text, &again, why), KVF_OK);
    assert_ptr_equal(again->builtin, table->builtin);
    assert_true(kvf_profile_table_is_for(again, table->weights_digest, table->adapter_digest));
    free(text);
    kvf_profile_table_destroy(again);
    kvf_profile_table_destroy(table);

    assert_int_equal(parse(own, &table, why), KVF_OK);
    assert_null(table->builtin);
    const struct kvf_profile_kind want = {
        .k = profile_fixture_saw(4, KVF_TENSOR_CENTER),
        .v = profile_fixture_tq(3, KVF_TENSOR_SCALE_LEAST_SQUARES | KVF_TENSOR_SPLIT),
    };
    assert_same_tensor(&table->kinds[0].k, &want.k);
    assert_same_tensor(&table->kinds[0].v, &want.v);
    assert_int_equal(table->arrays[KVF_PROFILE_SPLITS_V][13], 0xff);
    kvf_profile_table_destroy(table);
}

/* The example of docs/profile-file.md is one. */
static void the_example_is_right(void **state)
{
    (void)state;
    struct kvf_profile_table *table = NULL;
    char why[KVF_PROFILE_FILE_WHY_BYTES] = "";
    char *page = kvf_test_file_read(KVF_PROFILE_PAGE, NULL);
    assert_non_null(page);
    char *text = strstr(page, "```json\n");
    assert_non_null(text);
    text += strlen("```json\n");
    char *end = strstr(text, "```");
    assert_non_null(end);
    int status = kvf_profile_file_parse("page", text, (size_t)(end - text), &table, why);
    assert_string_equal(why, "");
    assert_int_equal(status, KVF_OK);
    assert_string_equal(table->name, "smol-chat");
    kvf_profile_table_destroy(table);
    free(page);
}

/* What is changed in a file, and what is said about it. */
struct wrong {
    const char *from;
    const char *to;
    const char *why;
};

static void assert_refused(const char *text, const struct wrong *wrong)
{
    const char *at = strstr(text, wrong->from);
    char changed[2048];
    char why[KVF_PROFILE_FILE_WHY_BYTES];
    struct kvf_profile_table *table = NULL;
    assert_non_null(at);
    (void)snprintf(changed, sizeof(changed), "%.*s%s%s", (int)(at - text), text, wrong->to,
                   at + strlen(wrong->from));
    int status = parse(changed, &table, why);
    if (status != KVF_ERR_INVALID || strstr(why, wrong->why) == NULL) {
        print_error("%s -> %s: %d %s\n", wrong->from, wrong->to, status, why);
    }
    assert_int_equal(status, KVF_ERR_INVALID);
    assert_non_null(strstr(why, wrong->why));
    assert_memory_equal(why, "dir/a.json: ", 12);
    assert_null(strchr(why, '\n'));
    assert_null(table);
}

static void wrong_files_are_refused(void **state)
{
    (void)state;
    static const struct wrong of_passed[] = {
        {"{", "", "line 1: is not JSON"},
        {"\"name\"", "\"kvferry_profile\": 1, \"name\"", "is not JSON: duplicate"},
        {"profile\": 1", "profile\": 2", "kvferry_profile: 2 is out of range"},
        {"\"kvferry_profile\": 1, ", "", "kvferry_profile: is missing"},
        {"\"balanced\"", "\"exact\"", "name: \"exact\" is lossless"},
        {"\"balanced\"", "\"no-such\"", "kinds: is not a list"},
        {"\"balanced\"", "\"a-name-of-16-let\"", "name: is not a string of 1 to 15"},
        {"\"balanced\"", "\"Own\"", "kinds: is not a list"},
        {"0011", "001", "weights_digest: is not a string of 64"},
        {"0011", "001x", "weights_digest: digit 3 is not"},
        {"\"workload\": [\"chat\", ", "\"workload\": [\"chta\", ",
         "workload[0]: \"chta\" is unknown; it is one of \"chat\", \"long-retrieval\""},
        {"[\"chat\", \"tool-calls\"]", "[]", "workload: is not a list"},
        {"\"n_layers\": 4", "\"n_layers\": 0", "geometry.n_layers: 0 is out of range"},
        {"\"n_heads\": 2", "\"n_heads\": 2.5", "geometry.n_heads: is not a number"},
        {"\"dim_k\": 64, ", "", "geometry.dim_k: is missing"},
        {"\"dim_k\": 64, ", "\"dim_k\": 64, \"dim_x\": 1, ", "geometry: there is no key \"dim_x\""},
        {"\"post\"", "\"after\"", "geometry.rope_state: \"after\" is unknown"},
        {"\"post\"}", "\"post\"}, \"sink_tokens\": 256", "sink_tokens: 256 is out of range"},
        {"\"post\"}", "\"post\"}, \"evidence\": 3", "evidence: is not an object"},
        {"\"post\"}", "\"post\"}, \"kinds\": []", "kinds: is not a list of 1 to 16"},
        {"\"post\"}", "\"post\"}, \"a\\nb\": 1", "there is no key \"a?b\""},
    };
    static const struct wrong of_own[] = {
        {"\"own\"", "\"balanced\"", "kinds: \"balanced\" is a profile of the build"},
        {"\"own\"", "\".own\"", "name: 1 to 15 of a-z"},
        {"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
         "0000000000000000000000000000000000000000000000000000000000000000",
         "weights_digest: is all zero"},
        {"\"saw\"", "\"sew\"", "kinds[0].k.codec: \"sew\" is unknown; it is one of \"raw\""},
        {"\"bits\": 4", "\"bits\": 9", "kinds[0].k.bits: 9 is out of range; it may be 1 to 8"},
        {"\"bits\": 4", "\"bits\": 7", "kinds[0].k: codec saw has no form of 7 bits"},
        {"\"bits\": 3", "\"bits\": 4", "kinds[0].v: codec tq has no form of 4 bits"},
        {"\"bits\": 4", "\"bits\": 4, \"scale\": \"norm\"",
         "kinds[0].k: there is no key \"scale\""},
        {"\"bits\": 3", "\"bits\": 3, \"signs\": 1", "kinds[0].v.signs: is neither true nor false"},
        {"\"block\"", "\"model\"", "kinds[0].k.center: \"model\" is unknown"},
        {"\"block\"", "\"profile\"", "means.k: is missing"},
        {"[0, 0]", "[0]", "layers: is not a list of the kinds of 2 layers"},
        {"[0, 0]", "[0, 1]", "layers: entry 1 is not the number of a kind: 0 to 0"},
        {"ffff0000000000", "fffe0000000000", "splits.v[0]: a head has not as many channels"},
        {"\"ffff000000000000\"", "\"\"", "splits.v[0]: a head has not as many channels"},
        {"\"ffff000000000000\"", "\"ff\"", "splits.v[0]: is not a string of 16"},
        {"\"ffff000000000000\", ", "", "splits.v: is not a list of 2 strings"},
        {"\"split\": true", "\"split\": false", "splits.v[0]: is given, but"},
        {"{\"v\": [\"ffff", "{\"k\": [\"ffff", "splits.k[0]: is given, but"},
        {"\"splits\"", "\"means\"", "means.v[0]: is not a string of 256"},
        {"\"dim_v\": 64", "\"dim_v\": 0", "splits.v: is given although geometry.dim_v is 0"},
        {"{\"codec\": \"tq\", \"bits\": 3, \"scale\": \"least-squares\", \"split\": true}",
         "{\"codec\": \"kivi\", \"bits\": 4, \"group\": 31}", "kinds[0].v: codec kivi has no form"},
        {"{\"codec\": \"tq\", \"bits\": 3, \"scale\": \"least-squares\", \"split\": true}",
         "{\"codec\": \"exact\", \"bits\": 12}", "kinds[0].v: there is no key \"bits\""},
    };
    for (size_t i = 0; i < sizeof(of_passed) / sizeof(of_passed[0]); i++) {
        assert_refused(passed, &of_passed[i]);
    }
    for (size_t i = 0; i < sizeof(of_own) / sizeof(of_own[0]); i++) {
        assert_refused(own, &of_own[i]);
    }
}

static void blobs_read_back(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct kvf_profile_table *back = NULL;
    char why[KVF_PROFILE_WHY_BYTES] = "";
    size_t bytes;
    uint8_t *blob = blob_of(table, &bytes);
    assert_int_equal(kvf_profile_blob_read(blob, bytes, &back, why), KVF_OK);
    assert_same(table, back);
    kvf_profile_table_destroy(back);
    back = NULL;
    /* cut short, with one more byte, and with a bit changed anywhere */
    for (size_t n = 0; n < bytes; n += 1 + n / 16) {
        assert_int_equal(kvf_profile_blob_read(blob, n, &back, why), KVF_ERR_INVALID);
    }
    uint8_t *longer = calloc(1, bytes + 1);
    assert_non_null(longer);
    memcpy(longer, blob, bytes);
    assert_int_equal(kvf_profile_blob_read(longer, bytes + 1, &back, why), KVF_ERR_INVALID);
    free(longer);
    for (size_t i = 0; i < bytes; i++) {
        uint8_t bit = (uint8_t)(1u << kvf_random_seeded_next(&random_bits) % 8);
        blob[i] ^= bit;
        assert_int_equal(kvf_profile_blob_read(blob, bytes, &back, why), KVF_ERR_INVALID);
        blob[i] ^= bit;
    }
    assert_null(back);
    free(blob);
    kvf_profile_table_destroy(table);
}

/* The checksum only tells of accidents: whoever makes a right one is looked at as closely. */
static void sealed_blobs_are_validated(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_rich(&random_bits);
    struct kvf_profile_table *back = NULL;
    char why[KVF_PROFILE_WHY_BYTES] = "";
    size_t bytes;
    uint8_t *blob;

    table->kinds[1].k.rot_seed++;
    blob = blob_of(table, &bytes);
    assert_int_equal(kvf_profile_blob_read(blob, bytes, &back, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "kinds[1].k: codec saw does not take that rotation"));
    free(blob);
    table->kinds[1].k.rot_seed--;

    table->layer_kinds[5] = 5;
    blob = blob_of(table, &bytes);
    assert_int_equal(kvf_profile_blob_read(blob, bytes, &back, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "layers[5]: there is no kind 5"));
    free(blob);
    table->layer_kinds[5] = 4;

    uint8_t *mean = table->arrays[KVF_PROFILE_MEANS_K] +
                    2 * kvf_profile_array_layer_bytes(table, KVF_PROFILE_MEANS_K);
    mean[1] = 0x7c;
    blob = blob_of(table, &bytes);
    assert_int_equal(kvf_profile_blob_read(blob, bytes, &back, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "means.k[2]: a mean is not a number"));
    free(blob);
    mean[1] = 0;

    memcpy(table->name, "safe\0", 5);
    blob = blob_of(table, &bytes);
    assert_int_equal(kvf_profile_blob_read(blob, bytes, &back, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "\"safe\" is a profile of the build"));
    free(blob);
    assert_null(back);
    kvf_profile_table_destroy(table);
}

static void tables_are_validated(void **state)
{
    (void)state;
    struct kvf_profile_table *table = profile_fixture_create(2, 1, 64, 0);
    char why[KVF_PROFILE_WHY_BYTES];
    profile_fixture_add(table, profile_fixture_saw(4, 0), profile_fixture_saw(4, 0));
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "kinds[0].v: is there although geometry.dim_v is 0"));
    table->kinds[0].v = (struct kvf_profile_tensor){0};
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_OK);
    table->kinds[0].k.flags |= KVF_TENSOR_SPLIT;
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "kinds[0].k: codec saw does not take that centring, split"));
    table->kinds[0].k = profile_fixture_saw(4, KVF_TENSOR_CENTER | KVF_TENSOR_CENTER_PROFILE);
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_ERR_INVALID);
    table->kinds[0].k = profile_fixture_kivi(4, false);
    table->kinds[0].k.group_axis = 3;
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "kinds[0].k: codec kivi does not take that axis"));
    table->kinds[0].k.group_axis = KVF_AXIS_CHANNEL;
    table->workloads = 2 * KVF_WORKLOAD_OTHER;
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "workload: names none"));
    table->workloads = KVF_WORKLOAD_OTHER;
    table->rope_state = KVF_ROPE_PRE_UNBIASED + 1;
    assert_int_equal(kvf_profile_table_validate(table, why), KVF_ERR_INVALID);
    assert_non_null(strstr(why, "geometry.rope_state: 4 is unknown"));
    /* more than the arrays of a table may have */
    table->n_layers = 512;
    table->n_heads = 128;
    table->dim_k = 128;
    assert_int_equal(kvf_profile_table_add_array(table, KVF_PROFILE_SPLITS_K), KVF_OK);
    assert_int_equal(kvf_profile_table_add_array(table, KVF_PROFILE_MEANS_K), KVF_ERR_TOO_LARGE);
    kvf_profile_table_destroy(table);
    char text[24];
    kvf_profile_workloads_text(KVF_WORKLOAD_CHAT | KVF_WORKLOAD_CODE, text, sizeof(text));
    assert_string_equal(text, "chat, code");
    kvf_profile_workloads_text(UINT32_MAX, text, sizeof(text));
    assert_string_equal(text, "chat, long-retrieval, r");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files_read_back),           cmocka_unit_test(missing_files_are_named),
        cmocka_unit_test(short_files_have_defaults), cmocka_unit_test(wrong_files_are_refused),
        cmocka_unit_test(blobs_read_back),           cmocka_unit_test(sealed_blobs_are_validated),
        cmocka_unit_test(tables_are_validated),      cmocka_unit_test(the_example_is_right),
    };
    kvf_random_seeded_init(&random_bits, kvf_test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
