/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_file.h: a profile (profile_table.h) as a file: what `kvferry calibrate` writes and the
 * daemon reads from calibration.dir. docs/profile-file.md describes it for people.
 *
 * For programs only: the library that applications link has no JSON. Messages are one line: file,
 * place in it, what is wrong, what would do. Nothing here logs; any thread; the functions on files
 * block on the file system.
 */
#ifndef KVF_CODEC_PROFILE_FILE_H
#define KVF_CODEC_PROFILE_FILE_H

#include "codec/profile_table.h"

#define KVF_PROFILE_FILE_VERSION 1

enum kvf_profile_file_limits {
    KVF_PROFILE_FILE_WHY_BYTES = 1024,
    KVF_PROFILE_FILE_BYTES_MAX = 64 << 20,
};

struct json_t; /* jansson's */

/* Read text of a file of this name. *table_out is the caller's, and valid. KVF_OK; KVF_ERR_INVALID;
 * KVF_ERR_NO_MEMORY; why_out says what is wrong. */
int kvf_profile_file_parse(const char *file_name, const char *text, size_t bytes,
                           struct kvf_profile_table **table_out,
                           char why_out[KVF_PROFILE_FILE_WHY_BYTES]);

/* The same from a file. Also KVF_ERR_IO. */
int kvf_profile_file_read(const char *path, struct kvf_profile_table **table_out,
                          char why_out[KVF_PROFILE_FILE_WHY_BYTES]);

/* The text of a valid table, to be freed; reads back as the same. evidence: an object that says
 * what the calibration found, or NULL; readers keep their hands off it. NULL: no memory. */
char *kvf_profile_file_print(const struct kvf_profile_table *table, const struct json_t *evidence);

/* Write that text to a file, which is there as a whole or not at all. KVF_OK; KVF_ERR_IO,
 * KVF_ERR_NO_MEMORY; why_out says what is wrong. */
int kvf_profile_file_write(const char *path, const struct kvf_profile_table *table,
                           const struct json_t *evidence, char why_out[KVF_PROFILE_FILE_WHY_BYTES]);

#endif /* KVF_CODEC_PROFILE_FILE_H */
