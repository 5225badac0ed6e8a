/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_weights.c: any bytes as what describes a model's weights: 'G' a GGUF file, 'S' the JSON of a
 * safetensors file of a small model, 'C' a config.json. Either it is refused with one line, or all
 * tensors lie within the file.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/weights_file.h"
#include "tests/fuzz/fuzz.h"

enum {
    DATA_OFFSET = 4096,
    DATA_BYTES = 1 << 20,
};

static void assert_line(int status, const char *why)
{
    assert((status == KVF_OK) == (why[0] == '\0'));
    assert(strchr(why, '\n') == NULL);
    (void)status;
    (void)why;
}

static void check_layers(struct kvf_weights *weights, uint64_t file_bytes)
{
    char why[KVF_WEIGHTS_WHY_BYTES] = "";
    int status = kvf_weights_check_layers(weights, why);

    assert_line(status, why);
    for (uint32_t i = 0; i < weights->model.n_layers; i++) {
        const struct kvf_weights_layer *l = &weights->layers[i];
        const struct kvf_weights_tensor *const all[5] = {&l->k, &l->v, &l->k_bias, &l->v_bias,
                                                         &l->k_norm};

        for (uint32_t k = 0; k < 5; k++) {
            uint64_t bytes;

            if (all[k]->rows == 0) {
                continue;
            }
            bytes = kvf_weights_type_bytes(all[k]->type, all[k]->rows, all[k]->columns);
            assert(bytes > 0 && bytes <= file_bytes && all[k]->offset_bytes <= file_bytes - bytes);
            (void)bytes;
        }
    }
    (void)file_bytes;
}

static void read_gguf(const uint8_t *data, size_t bytes)
{
    struct kvf_weights weights = {0};
    char why[KVF_WEIGHTS_WHY_BYTES] = "";
    /* as if the data followed: most inputs are a header alone */
    int status = kvf_weights_parse_gguf(data, bytes, bytes + DATA_BYTES, &weights, why);

    assert_line(status, why);
    if (status == KVF_OK) {
        check_layers(&weights, bytes + DATA_BYTES);
    }
    free(weights.layers);
}

static void read_safetensors(const uint8_t *data, size_t bytes)
{
    struct kvf_weights weights = {
        .model =
            {.n_layers = 2, .d_model = 8, .n_query_heads = 2, .n_heads = 1, .dim_k = 4, .dim_v = 4},
    };
    char why[KVF_WEIGHTS_WHY_BYTES] = "";
    int status;

    weights.layers = calloc(weights.model.n_layers, sizeof(*weights.layers));
    assert(weights.layers != NULL);
    status = kvf_weights_parse_safetensors((const char *)data, bytes, DATA_OFFSET, DATA_BYTES, 0,
                                           &weights, why);
    assert_line(status, why);
    if (status == KVF_OK) {
        check_layers(&weights, DATA_OFFSET + DATA_BYTES);
    }
    free(weights.layers);
}

static void read_config(const uint8_t *data, size_t bytes)
{
    struct kvf_weights_model model;
    char why[KVF_WEIGHTS_WHY_BYTES] = "";
    int status = kvf_weights_parse_config((const char *)data, bytes, &model, why);

    assert_line(status, why);
    if (status == KVF_OK) {
        char again[KVF_WEIGHTS_WHY_BYTES] = "";

        status = kvf_weights_check_model(&model, again);
        assert(status == KVF_OK);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    if (data[0] == 'G') {
        read_gguf(data + 1, bytes - 1);
    } else if (data[0] == 'S') {
        read_safetensors(data + 1, bytes - 1);
    } else {
        read_config(data + 1, bytes - 1);
    }
    return 0;
}
