/* SPDX-License-Identifier: Apache-2.0
 *
 * x_svd_read.c: the factors of all layers, from a file.
 */
#include "client/x_svd_read.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/fd.h"

uint64_t kvf_svd_align_up(uint64_t bytes)
{
    return (bytes + KVF_SVD_ALIGN_BYTES - 1) / KVF_SVD_ALIGN_BYTES * KVF_SVD_ALIGN_BYTES;
}

uint64_t kvf_svd_u_bytes(const struct kvf_svd_header *h)
{
    return (uint64_t)h->d_model * h->rank * sizeof(float);
}

uint64_t kvf_svd_m_bytes(const struct kvf_svd_header *h)
{
    return (uint64_t)h->rank * h->kv_width * sizeof(float);
}

uint64_t kvf_svd_first_bytes(const struct kvf_svd_header *h)
{
    return kvf_svd_align_up(sizeof(*h) + (uint64_t)h->n_layers * sizeof(uint32_t));
}

uint32_t kvf_svd_header_crc(const struct kvf_svd_header *header, const uint32_t *crcs)
{
    struct kvf_svd_header copy = *header;

    copy.header_crc32c = 0;
    return kvf_crc32c(kvf_crc32c(0, &copy, sizeof(copy)), crcs, header->n_layers * sizeof(*crcs));
}

static int read_at(int fd, void *to, uint64_t bytes, uint64_t offset, char *why)
{
    int status = kvf_fd_pread_all(fd, to, bytes, offset);

    if (status == KVF_OK) {
        return KVF_OK;
    }
    return status == KVF_ERR_CORRUPT
               ? kvf_weights_fault(why, status, "the file is too short")
               : kvf_weights_fault(why, KVF_ERR_IO, "reading: %s", strerror(errno));
}

/* Does the header agree with itself and with the file's length? */
static bool header_is_valid(const struct kvf_svd_header *h, uint64_t file_bytes)
{
    return h->header_bytes == sizeof(*h) && h->n_layers >= 1 && h->n_layers <= KVF_LAYERS_MAX &&
           h->d_model >= 1 && h->d_model <= KVF_WEIGHTS_WIDTH_MAX && h->n_heads >= 1 &&
           h->n_heads <= KVF_HEADS_MAX && h->dim_k >= 1 && h->dim_k <= KVF_DIM_MAX &&
           h->dim_v >= 1 && h->dim_v <= KVF_DIM_MAX && h->dtype == KVF_DTYPE_F32 &&
           h->kv_width == (uint32_t)h->n_heads * ((uint32_t)h->dim_k + h->dim_v) && h->rank >= 1 &&
           h->rank <= h->d_model && h->rank <= h->kv_width &&
           h->layer_bytes == kvf_svd_align_up(kvf_svd_u_bytes(h) + kvf_svd_m_bytes(h)) &&
           h->total_bytes == kvf_svd_first_bytes(h) + h->n_layers * h->layer_bytes &&
           h->total_bytes == file_bytes;
}

int kvf_svd_file_open(const char *path, struct kvf_svd_file *file, char why[KVF_SVD_WHY_BYTES])
{
    struct kvf_svd_header *h = &file->header;
    struct stat stat = {0};
    int status = KVF_OK;

    *file = (struct kvf_svd_file){.fd = open(path, O_RDONLY | O_CLOEXEC)};
    if (file->fd < 0 || fstat(file->fd, &stat) != 0) {
        status = kvf_weights_fault(why, KVF_ERR_IO, "%.200s: %s", path, strerror(errno));
    }
    if (status == KVF_OK) {
        status = read_at(file->fd, h, sizeof(*h), 0, why);
    }
    if (status == KVF_OK && (h->magic != KVF_SVD_MAGIC || h->version != KVF_SVD_VERSION)) {
        status = kvf_weights_fault(why, KVF_ERR_FOREIGN,
                                   h->magic == KVF_SVD_MAGIC
                                       ? "%.200s: written by kvferry svd of another release: run "
                                         "it again"
                                       : "%.200s: no file of kvferry svd",
                                   path);
    }
    if (status == KVF_OK && !header_is_valid(h, (uint64_t)stat.st_size)) {
        status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.200s: the header contradicts itself",
                                   path);
    }
    if (status == KVF_OK) {
        file->first_bytes = kvf_svd_first_bytes(h);
        file->crcs = calloc(h->n_layers, sizeof(*file->crcs));
        status = file->crcs != NULL ? read_at(file->fd, file->crcs,
                                              h->n_layers * sizeof(*file->crcs), sizeof(*h), why)
                                    : kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");
    }
    if (status == KVF_OK && kvf_svd_header_crc(h, file->crcs) != h->header_crc32c) {
        status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.200s: the header's checksum is wrong",
                                   path);
    }
    if (status != KVF_OK) {
        kvf_svd_file_close(file);
    }
    return status;
}

void kvf_svd_file_close(struct kvf_svd_file *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    free(file->crcs);
    *file = (struct kvf_svd_file){.fd = -1};
}

int kvf_svd_file_layer(const struct kvf_svd_file *file, uint32_t layer, float *u_out, float *m_out,
                       char why[KVF_SVD_WHY_BYTES])
{
    const struct kvf_svd_header *h = &file->header;
    uint64_t offset = file->first_bytes + layer * h->layer_bytes;
    uint64_t gap_bytes = h->layer_bytes - kvf_svd_u_bytes(h) - kvf_svd_m_bytes(h);
    uint8_t gap[KVF_SVD_ALIGN_BYTES];
    uint32_t crc;
    int status = read_at(file->fd, u_out, kvf_svd_u_bytes(h), offset, why);

    if (status == KVF_OK) {
        status = read_at(file->fd, m_out, kvf_svd_m_bytes(h), offset + kvf_svd_u_bytes(h), why);
    }
    if (status == KVF_OK) {
        status = read_at(file->fd, gap, gap_bytes, offset + kvf_svd_u_bytes(h) + kvf_svd_m_bytes(h),
                         why);
    }
    if (status != KVF_OK) {
        return status;
    }
    crc = kvf_crc32c(kvf_crc32c(0, u_out, kvf_svd_u_bytes(h)), m_out, kvf_svd_m_bytes(h));
    if (kvf_crc32c(crc, gap, gap_bytes) != file->crcs[layer]) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "layer %u: its checksum is wrong", layer);
    }
    return KVF_OK;
}
