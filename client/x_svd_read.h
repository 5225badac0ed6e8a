/* SPDX-License-Identifier: Apache-2.0
 *
 * x_svd_read.h: read the file of `kvferry svd` (x_svd_format.h). Nothing of it is trusted: lengths
 * are compared with the file's, header and layers with their checksums. One thread at a time.
 */
#ifndef KVF_CLIENT_X_SVD_READ_H
#define KVF_CLIENT_X_SVD_READ_H

#include "client/weights_file.h"
#include "client/x_svd_format.h"

enum {
    KVF_SVD_WHY_BYTES = KVF_WEIGHTS_WHY_BYTES
};

struct kvf_svd_file {
    struct kvf_svd_header header;
    uint32_t *crcs;       /* [n_layers] */
    uint64_t first_bytes; /* where layer 0 begins */
    int fd;
};

/* Open and check all but the layers. KVF_OK; KVF_ERR_IO, _NO_MEMORY; KVF_ERR_FOREIGN: not such a
 * file, or of another version; KVF_ERR_CORRUPT. */
int kvf_svd_file_open(const char *path, struct kvf_svd_file *file, char why[KVF_SVD_WHY_BYTES]);

/* Once after each open that has succeeded. */
void kvf_svd_file_close(struct kvf_svd_file *file);

/* Read one layer. KVF_OK; KVF_ERR_IO, _NO_MEMORY, _CORRUPT. */
int kvf_svd_file_layer(const struct kvf_svd_file *file, uint32_t layer, float *u_out, float *m_out,
                       char why[KVF_SVD_WHY_BYTES]);

/* --- what reader and writer share ------------------------------------------------------------- */

uint64_t kvf_svd_align_up(uint64_t bytes);

/* Bytes of U and of M of a layer, and where layer 0 begins. */
uint64_t kvf_svd_u_bytes(const struct kvf_svd_header *header);
uint64_t kvf_svd_m_bytes(const struct kvf_svd_header *header);
uint64_t kvf_svd_first_bytes(const struct kvf_svd_header *header);

/* The checksum over header and table, the field of it taken as zero. */
uint32_t kvf_svd_header_crc(const struct kvf_svd_header *header, const uint32_t *crcs);

#endif /* KVF_CLIENT_X_SVD_READ_H */
