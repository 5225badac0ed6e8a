/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_svd.c: kvferry svd: singular vectors of [W_K | W_V] of each layer of a model, to a file.
 */
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/capture.h"
#include "client/cli.h"
#include "client/x_svd.h"

/* fp32 factors are this good by far; what is not has gone wrong. */
#define ERROR_MAX 1e-5

struct run {
    const struct cli *cli;
    struct kvf_blas blas;
    struct kvf_weights *weights;
    struct kvf_svd_writer *writer;
    uint8_t digest[KVF_DIGEST_BYTES];
    uint8_t factors_digest[KVF_DIGEST_BYTES];
    uint32_t d_model;
    uint32_t k_width;
    uint32_t kv_width;
    uint32_t rank;
    float *w; /* [kv_width][d_model] */
    float *u;
    float *m;
    struct kvf_svd_error worst;
};

static int prepare(struct run *run)
{
    const struct cli *cli = run->cli;
    char why[KVF_WEIGHTS_WHY_BYTES];
    const struct kvf_weights_model *model;
    uint32_t lesser;

    if (cli->file == NULL || cli->write_file == NULL) {
        return cli_fail(CLI_USAGE, "svd: name a model, and where to --write");
    }
    if (cli->weights_digest != NULL && !kvf_digest_parse(cli->weights_digest, run->digest)) {
        return cli_fail(CLI_USAGE, "--weights-digest: 64 hexadecimal digits");
    }
    if (kvf_blas_open(&run->blas, why) != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s", why);
    }
    if (kvf_weights_open(cli->file, &run->weights, why) != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s: %s", cli->file, why);
    }
    model = &run->weights->model;
    run->d_model = model->d_model;
    run->k_width = model->n_heads * model->dim_k;
    run->kv_width = run->k_width + model->n_heads * model->dim_v;
    lesser = run->d_model < run->kv_width ? run->d_model : run->kv_width;
    run->rank = cli->rank != 0 ? (uint32_t)cli->rank : lesser;
    if (run->rank > lesser) {
        return cli_fail(CLI_USAGE, "--rank: at most %u: X has %u elements, K and V %u", lesser,
                        run->d_model, run->kv_width);
    }
    if (cli->weights_digest == NULL &&
        kvf_weights_digest(run->weights, run->digest, why) != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s: %s", cli->file, why);
    }
    run->w = calloc((size_t)run->kv_width * run->d_model, sizeof(*run->w));
    run->u = calloc((size_t)run->d_model * run->rank, sizeof(*run->u));
    run->m = calloc((size_t)run->rank * run->kv_width, sizeof(*run->m));
    if (run->w == NULL || run->u == NULL || run->m == NULL) {
        return cli_fail(CLI_FAILED, "no memory for a matrix of %u x %u", run->d_model,
                        run->kv_width);
    }
    if (kvf_svd_writer_open(cli->write_file, model, run->rank, run->digest, &run->writer, why) !=
        KVF_OK) {
        return cli_fail(CLI_FAILED, "%s", why);
    }
    return CLI_OK;
}

static int add_layer(struct run *run, uint32_t layer)
{
    const struct kvf_weights_layer *l = &run->weights->layers[layer];
    char why[KVF_WEIGHTS_WHY_BYTES] = "no memory";
    struct kvf_svd_error error = {0};
    bool is_full = run->rank == run->kv_width || run->rank == run->d_model;
    int status = kvf_weights_load(run->weights, &l->k, run->w, why);

    if (status == KVF_OK) {
        status = kvf_weights_load(run->weights, &l->v, run->w + (size_t)run->k_width * run->d_model,
                                  why);
    }
    if (status == KVF_OK) {
        status = kvf_svd_layer(&run->blas, run->w, run->d_model, run->kv_width, run->rank, run->u,
                               run->m, why);
    }
    if (status == KVF_OK) {
        status = kvf_svd_check(&run->blas, run->w, run->d_model, run->kv_width, run->rank, run->u,
                               run->m, &error);
    }
    if (status == KVF_OK &&
        !(error.orthogonality <= ERROR_MAX && (!is_full || error.residual <= ERROR_MAX))) {
        return cli_fail(CLI_FAILED,
                        "layer %u: the factors are wrong (U^T U - I: %.1e, U M - W: %.1e)", layer,
                        error.orthogonality, error.residual);
    }
    if (status == KVF_OK) {
        status = kvf_svd_writer_add(run->writer, run->u, run->m, why);
    }
    run->worst.orthogonality = fmax(run->worst.orthogonality, error.orthogonality);
    run->worst.residual = fmax(run->worst.residual, error.residual);
    return status == KVF_OK ? CLI_OK : cli_fail(CLI_FAILED, "layer %u: %s", layer, why);
}

/* Put the file in its place and read it once more. *bytes_out: of the file. */
static int finish(struct run *run, uint64_t *bytes_out)
{
    const char *path = run->cli->write_file;
    char why[KVF_WEIGHTS_WHY_BYTES];
    struct kvf_svd_file file;
    int status = kvf_svd_writer_commit(run->writer, why);

    run->writer = NULL;
    if (status != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s", why);
    }
    status = kvf_svd_file_open(path, &file, why);
    if (status != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s", why);
    }
    for (uint32_t i = 0; status == KVF_OK && i < file.header.n_layers; i++) {
        status = kvf_svd_file_layer(&file, i, run->u, run->m, why);
    }
    *bytes_out = file.header.total_bytes;
    memcpy(run->factors_digest, file.header.factors_digest, sizeof(run->factors_digest));
    kvf_svd_file_close(&file);
    return status == KVF_OK ? CLI_OK : cli_fail(CLI_FAILED, "%s: %s", path, why);
}

static void print(const struct run *run, uint64_t bytes)
{
    const struct kvf_weights_model *m = &run->weights->model;
    char digest[2 * KVF_DIGEST_BYTES + 1];
    char factors_digest[2 * KVF_DIGEST_BYTES + 1];
    char size[32];

    sodium_bin2hex(digest, sizeof(digest), run->digest, sizeof(run->digest));
    sodium_bin2hex(factors_digest, sizeof(factors_digest), run->factors_digest,
                   sizeof(run->factors_digest));
    if (run->cli->is_json) {
        cli_print_json(json_pack(
            "{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:I, s:f, s:f}", "file", run->cli->write_file,
            "family", m->family, "weights_digest", digest, "factors_digest", factors_digest,
            "layers", (int)m->n_layers, "d_model", (int)m->d_model, "kv_width", (int)run->kv_width,
            "rank", (int)run->rank, "bytes", (json_int_t)bytes, "orthogonality_error",
            run->worst.orthogonality, "residual", run->worst.residual));
        return;
    }
    printf("%s: %u layers of %s, %u elements of X, %u of K and V, rank %u: %s\n",
           run->cli->write_file, m->n_layers, m->family, m->d_model, run->kv_width, run->rank,
           cli_bytes_text(bytes, size, sizeof(size)));
    printf("worst layer: U^T U - I %.1e, U M - [W_K | W_V] %.1e of its norm\n",
           run->worst.orthogonality, run->worst.residual);
    printf("weights digest: %s\nfactors digest: %s\n", digest, factors_digest);
}

int cli_svd(const struct cli *cli)
{
    struct run run = {.cli = cli};
    uint64_t bytes = 0;
    int code = prepare(&run);

    for (uint32_t i = 0; code == CLI_OK && i < run.weights->model.n_layers; i++) {
        code = add_layer(&run, i);
    }
    if (code == CLI_OK) {
        code = finish(&run, &bytes);
    }
    if (code == CLI_OK) {
        print(&run, bytes);
    }
    kvf_svd_writer_destroy(run.writer);
    kvf_weights_close(run.weights);
    free(run.w);
    free(run.u);
    free(run.m);
    return code;
}
