/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_data.h: tensors of real models from tests/data/kv (its README.md says what they are), and how
 * far a decoded tensor is from the original.
 *
 * Calls print on stderr why they failed. Needs nothing of ours but the public header's numbers, so
 * that programs which link libkvferry alone can use it.
 */
#ifndef KVF_TESTS_KV_DATA_H
#define KVF_TESTS_KV_DATA_H

#include <stddef.h>
#include <stdint.h>

#define KVF_TEST_KV_NAME_BYTES 64

/* One file of a model's folder: a C-order array [n_layers][n_heads][n_tokens][dim]. */
struct kvf_test_kv {
    uint32_t layer_first; /* of the model */
    uint32_t n_layers;
    uint32_t n_heads;
    uint32_t n_tokens;
    uint32_t dim;
    int dtype; /* enum kvf_dtype: BF16 or F32 */
    size_t bytes;
    char file[KVF_TEST_KV_NAME_BYTES]; /* in the folder */
    uint8_t *data;                     /* NULL until it is loaded */
};

/* What index.txt of a folder says about the file that holds this layer of a tensor ("k_post", "v",
 * ...). KVF_OK; KVF_MISS: there is none; KVF_ERR_IO; KVF_ERR_CORRUPT. */
int kvf_test_kv_find(const char *folder, const char *tensor, uint32_t layer,
                     struct kvf_test_kv *kv_out);

/* Read a file that was found. KVF_OK; KVF_ERR_IO; KVF_ERR_CORRUPT; KVF_ERR_NO_MEMORY. The data
 * belong to kv until kvf_test_kv_free. */
int kvf_test_kv_load(const char *folder, struct kvf_test_kv *kv);

/* Accepts a zeroed struct. */
void kvf_test_kv_free(struct kvf_test_kv *kv);

/* Bytes between two heads and between two layers of the array. */
size_t kvf_test_kv_head_bytes(const struct kvf_test_kv *kv);
size_t kvf_test_kv_layer_bytes(const struct kvf_test_kv *kv);

/* Sums over some heads of a tensor; begin with zeroes. */
struct kvf_test_kv_sums {
    double dot;              /* x y */
    double original2;        /* x^2 */
    double decoded2;         /* y^2 */
    double error2;           /* (x - y)^2 */
    double centred2;         /* (x - mean of its channel)^2: what softmax sees of K */
    double vector_error_max; /* largest ||x - y|| / ||x|| of one vector */
};

/* Add one head (bf16 only) of a layer, counted from layer_first; decoded is laid out as the
 * original. A NaN in decoded makes the sums NaN. */
void kvf_test_kv_compare(const struct kvf_test_kv *original, const uint8_t *decoded, uint32_t layer,
                         uint32_t head, struct kvf_test_kv_sums *sums);

/* Add the sums of other heads. */
void kvf_test_kv_sums_add(struct kvf_test_kv_sums *sums, const struct kvf_test_kv_sums *more);

/* Cosine of original and decoded, as one vector over all that was added. */
double kvf_test_kv_cosine(const struct kvf_test_kv_sums *sums);

/* Power of the error over the power of the original about its channel means. 1: as much noise as
 * signal. */
double kvf_test_kv_noise(const struct kvf_test_kv_sums *sums);

#endif /* KVF_TESTS_KV_DATA_H */
