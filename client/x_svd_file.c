/* SPDX-License-Identifier: Apache-2.0
 *
 * x_svd_file.c: the factors of all layers, to a file; x_svd_read.c has the way back.
 */
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "client/x_svd.h"

enum {
    PATH_BYTES = 4096
};

struct kvf_svd_writer {
    struct kvf_svd_header header;
    crypto_hash_sha256_state digest;
    uint32_t *crcs;
    uint32_t n_added;
    int fd;
    char path[PATH_BYTES];
    char temporary[PATH_BYTES + 8];
};

static int write_at(int fd, const void *from, uint64_t bytes, uint64_t offset, char *why)
{
    const uint8_t *at = from;

    while (bytes > 0) {
        ssize_t n = pwrite(fd, at, bytes, (off_t)offset);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return kvf_weights_fault(why, KVF_ERR_IO, "writing: %s", strerror(errno));
        }
        at += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return KVF_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

int kvf_svd_writer_open(const char *path, const struct kvf_weights_model *model, uint32_t rank,
                        const uint8_t weights_digest[KVF_DIGEST_BYTES],
                        struct kvf_svd_writer **writer_out, char why[KVF_SVD_WHY_BYTES])
{
    struct kvf_svd_writer *writer = calloc(1, sizeof(*writer));
    struct kvf_svd_header *h;

    if (writer == NULL) {
        return kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");
    }
    writer->fd = -1;
    writer->crcs = calloc(model->n_layers, sizeof(*writer->crcs));
    if (writer->crcs == NULL || strlen(path) >= PATH_BYTES) {
        kvf_svd_writer_destroy(writer);
        return kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory, or a path that is too long");
    }
    h = &writer->header;
    *h = (struct kvf_svd_header){
        .magic = KVF_SVD_MAGIC,
        .version = KVF_SVD_VERSION,
        .header_bytes = sizeof(*h),
        .n_layers = model->n_layers,
        .d_model = model->d_model,
        .rank = rank,
        .kv_width = model->n_heads * (model->dim_k + model->dim_v),
        .n_heads = (uint16_t)model->n_heads,
        .dim_k = (uint16_t)model->dim_k,
        .dim_v = (uint16_t)model->dim_v,
        .dtype = KVF_DTYPE_F32,
    };
    memcpy(h->weights_digest, weights_digest, sizeof(h->weights_digest));
    h->layer_bytes = kvf_svd_align_up(kvf_svd_u_bytes(h) + kvf_svd_m_bytes(h));
    h->total_bytes = kvf_svd_first_bytes(h) + h->n_layers * h->layer_bytes;
    crypto_hash_sha256_init(&writer->digest);
    crypto_hash_sha256_update(&writer->digest, (const uint8_t *)h, sizeof(*h));
    snprintf(writer->path, sizeof(writer->path), "%s", path);
    snprintf(writer->temporary, sizeof(writer->temporary), "%s.part", path);
    writer->fd = open(writer->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (writer->fd < 0) {
        kvf_weights_fault(why, KVF_ERR_IO, "%.200s: %s", writer->temporary, strerror(errno));
        kvf_svd_writer_destroy(writer);
        return KVF_ERR_IO;
    }
    *writer_out = writer;
    return KVF_OK;
}

int kvf_svd_writer_add(struct kvf_svd_writer *writer, const float *u, const float *m,
                       char why[KVF_SVD_WHY_BYTES])
{
    static const uint8_t zeroes[KVF_SVD_ALIGN_BYTES];
    const struct kvf_svd_header *h = &writer->header;
    uint64_t offset = kvf_svd_first_bytes(h) + writer->n_added * h->layer_bytes;
    uint64_t gap_bytes = h->layer_bytes - kvf_svd_u_bytes(h) - kvf_svd_m_bytes(h);
    uint32_t crc = kvf_crc32c(0, u, kvf_svd_u_bytes(h));
    int status = write_at(writer->fd, u, kvf_svd_u_bytes(h), offset, why);

    if (status == KVF_OK) {
        status = write_at(writer->fd, m, kvf_svd_m_bytes(h), offset + kvf_svd_u_bytes(h), why);
    }
    if (status == KVF_OK) {
        status = write_at(writer->fd, zeroes, gap_bytes,
                          offset + kvf_svd_u_bytes(h) + kvf_svd_m_bytes(h), why);
    }
    crc = kvf_crc32c(kvf_crc32c(crc, m, kvf_svd_m_bytes(h)), zeroes, gap_bytes);
    writer->crcs[writer->n_added++] = crc;
    crypto_hash_sha256_update(&writer->digest, (const uint8_t *)u, kvf_svd_u_bytes(h));
    crypto_hash_sha256_update(&writer->digest, (const uint8_t *)m, kvf_svd_m_bytes(h));
    return status;
}

int kvf_svd_writer_commit(struct kvf_svd_writer *writer, char why[KVF_SVD_WHY_BYTES])
{
    struct kvf_svd_header *h = &writer->header;
    uint64_t table_bytes = h->n_layers * sizeof(*writer->crcs);
    int status;

    crypto_hash_sha256_final(&writer->digest, h->factors_digest);
    h->header_crc32c = kvf_svd_header_crc(h, writer->crcs);
    status = write_at(writer->fd, h, sizeof(*h), 0, why);
    if (status == KVF_OK) {
        status = write_at(writer->fd, writer->crcs, table_bytes, sizeof(*h), why);
    }
    if (status == KVF_OK &&
        (fsync(writer->fd) != 0 || rename(writer->temporary, writer->path) != 0)) {
        status = kvf_weights_fault(why, KVF_ERR_IO, "%.200s: %s", writer->path, strerror(errno));
    }
    if (status == KVF_OK) {
        writer->temporary[0] = '\0';
    }
    kvf_svd_writer_destroy(writer);
    return status;
}

void kvf_svd_writer_destroy(struct kvf_svd_writer *writer)
{
    if (writer == NULL) {
        return;
    }
    if (writer->fd >= 0) {
        (void)close(writer->fd);
        if (writer->temporary[0] != '\0') {
            (void)unlink(writer->temporary);
        }
    }
    free(writer->crcs);
    free(writer);
}
