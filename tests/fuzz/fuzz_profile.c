/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_profile.c: any bytes as a profile: as a file if the first one is 'J', else as a blob, with
 * its lengths and checksum made right so that what is behind them is reached. Either it is refused
 * with one line, or it is the same after each way back, and a plan can be made of it.
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "codec/profile_blob.h"
#include "codec/profile_file.h"
#include "tests/fuzz/fuzz.h"

static void assert_line(int status, const char *why)
{
    assert((status == KVF_OK) == (why[0] == '\0'));
    assert(strchr(why, '\n') == NULL);
    (void)status;
    (void)why;
}

static struct kvf_profile_table *read_file(const char *text, size_t bytes)
{
    struct kvf_profile_table *table = NULL;
    char why[KVF_PROFILE_FILE_WHY_BYTES] = "";

    assert_line(kvf_profile_file_parse("fuzz.json", text, bytes, &table, why), why);
    return table;
}

static struct kvf_profile_table *read_blob(const uint8_t *data, size_t bytes)
{
    struct kvf_profile_table *table = NULL;
    char why[KVF_PROFILE_WHY_BYTES] = "";
    uint8_t *blob = malloc(bytes + 1);

    assert(blob != NULL);
    memcpy(blob, data, bytes);
    if (bytes >= sizeof(struct kvf_profile_blob)) {
        struct kvf_profile_blob header;

        memcpy(&header, blob, sizeof(header));
        header.total_bytes = (uint32_t)bytes;
        header.crc32c = 0;
        memcpy(blob, &header, sizeof(header));
        header.crc32c = kvf_crc32c(0, blob, bytes);
        memcpy(blob, &header, sizeof(header));
    }
    assert_line(kvf_profile_blob_read(blob, bytes, &table, why), why);
    free(blob);
    return table;
}

/* The same table by its text and, if it is one of its own, by its bytes. */
static void check_ways_back(const struct kvf_profile_table *table)
{
    char *text = kvf_profile_file_print(table, NULL);
    struct kvf_profile_table *again;
    char *text_again;

    assert(text != NULL);
    again = read_file(text, strlen(text));
    assert(again != NULL);
    text_again = kvf_profile_file_print(again, NULL);
    assert(text_again != NULL && strcmp(text, text_again) == 0);
    free(text_again);
    kvf_profile_table_destroy(again);
    if (table->builtin == NULL) {
        size_t bytes = kvf_profile_blob_bytes(table);
        uint8_t *blob = malloc(bytes);
        char why[KVF_PROFILE_WHY_BYTES] = "";
        int status;

        assert(blob != NULL);
        kvf_profile_blob_write(table, blob);
        status = kvf_profile_blob_read(blob, bytes, &again, why);
        assert(status == KVF_OK);
        (void)status;
        text_again = kvf_profile_file_print(again, NULL);
        assert(text_again != NULL && strcmp(text, text_again) == 0);
        free(text_again);
        kvf_profile_table_destroy(again);
        free(blob);
    }
    free(text);
}

static void check_plan(const struct kvf_profile_table *table)
{
    static struct kvf_codec_plan plan;
    const struct kvf_geometry geometry = {.struct_bytes = sizeof(geometry),
                                          .kind = KVF_KIND_KV,
                                          .dtype = KVF_DTYPE_BF16,
                                          .rope_state = table->rope_state,
                                          .n_layers = table->n_layers,
                                          .n_heads = table->n_heads,
                                          .dim_k = table->dim_k,
                                          .dim_v = table->dim_v,
                                          .chunk_tokens = 16};
    char why[KVF_PROFILE_WHY_BYTES];
    uint32_t head_first;
    int status = kvf_profile_table_fits(table, &geometry, 0, 1, &head_first, why);

    assert(status == KVF_OK && head_first == 0);
    if (table->builtin == NULL) {
        status = kvf_codec_plan_init_table(&plan, &geometry, table, head_first);
        assert(status == KVF_OK || status == KVF_ERR_TOO_LARGE);
        assert(plan.profile_fp != 0);
    }
    (void)status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct kvf_profile_table *table;

    if (bytes == 0) {
        return 0;
    }
    table = data[0] == 'J' ? read_file((const char *)data + 1, bytes - 1)
                           : read_blob(data + 1, bytes - 1);
    if (table != NULL) {
        check_ways_back(table);
        check_plan(table);
        kvf_profile_table_destroy(table);
    }
    return 0;
}
