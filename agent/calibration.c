/* SPDX-License-Identifier: Apache-2.0
 *
 * calibration.c: the files of calibration.dir.
 */
#include "agent/calibration.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fd.h"
#include "base/log.h"
#include "codec/profile_blob.h"
#include "codec/profile_file.h"
#include "transport/segment.h"

#define PATH_BYTES 4608 /* of the longest folder and a file in it */

static int is_profile(const struct dirent *entry)
{
    size_t bytes = strlen(entry->d_name);

    return entry->d_name[0] != '.' && bytes > 5 && strcmp(entry->d_name + bytes - 5, ".json") == 0;
}

/* The blob, in memory that no client can change. */
static int blob_create(struct kvf_calibration *calibration)
{
    size_t bytes = kvf_profile_blob_bytes(calibration->table);
    uint8_t *blob = malloc(bytes);
    struct kvf_memfd memfd = {.fd = -1};
    int status = blob != NULL
                     ? kvf_memfd_create("kvferry-profile", bytes, KVF_HUGEPAGES_OFF, &memfd)
                     : KVF_ERR_NO_MEMORY;

    if (status == KVF_OK) {
        kvf_profile_blob_write(calibration->table, blob);
        status = kvf_fd_pwrite_all(memfd.fd, blob, bytes, 0);
    }
    if (status == KVF_OK) {
        status = kvf_memfd_seal(memfd.fd, KVF_SEGMENT_SEALS);
    }
    free(blob);
    if (status != KVF_OK) {
        kvf_fd_close(&memfd.fd);
        return status;
    }
    calibration->blob_fd = memfd.fd;
    calibration->blob_bytes = memfd.bytes;
    return KVF_OK;
}

static void calibration_log(const struct kvf_calibration *calibration)
{
    const struct kvf_profile_table *table = calibration->table;
    char workloads[128];

    kvf_profile_workloads_text(table->workloads, workloads, sizeof(workloads));
    kvf_log(KVF_LOG_INFO, "%s: profile %s has passed for weights %02x%02x%02x%02x... (%s)",
            calibration->file, table->name, table->weights_digest[0], table->weights_digest[1],
            table->weights_digest[2], table->weights_digest[3], workloads);
}

/* Takes the table if there is none like it. */
static void calibration_add(struct kvf_calibrations *calibrations, const char *file,
                            struct kvf_profile_table *table)
{
    struct kvf_calibration *calibration = &calibrations->list[calibrations->n];
    const struct kvf_calibration *other = kvf_calibrations_find(
        calibrations, table->name, table->weights_digest, table->adapter_digest);
    int status = KVF_OK;

    if (other != NULL) {
        kvf_log(KVF_LOG_WARNING,
                "%s: has the profile %s for the same model as %s, which is used; remove one of "
                "them",
                file, table->name, other->file);
        kvf_profile_table_destroy(table);
        return;
    }
    *calibration = (struct kvf_calibration){.table = table, .blob_fd = -1};
    (void)snprintf(calibration->file, sizeof(calibration->file), "%s", file);
    if (table->builtin == NULL) {
        status = blob_create(calibration);
    }
    if (status != KVF_OK) {
        kvf_log(KVF_LOG_WARNING, "%s: left out: %s", file, kvf_status_text(status));
        kvf_profile_table_destroy(table);
        return;
    }
    calibrations->n++;
    calibration_log(calibration);
}

/* Names go to logs and to clients, which take no control characters. */
static bool is_name(const char *file)
{
    for (const char *at = file; *at != '\0'; at++) {
        if ((unsigned char)*at < 0x20 || *at == 0x7f) {
            return false;
        }
    }
    return true;
}

static void file_read(struct kvf_calibrations *calibrations, const char *dir, const char *file)
{
    char path[PATH_BYTES];
    char why[KVF_PROFILE_FILE_WHY_BYTES];
    struct kvf_profile_table *table;

    if (!is_name(file)) {
        kvf_log(KVF_LOG_WARNING, "calibration.dir: a file with control characters in its name is "
                                 "left out; rename it");
        return;
    }
    if (calibrations->n == KVF_CALIBRATIONS_MAX) {
        kvf_log(KVF_LOG_WARNING, "%s: left out: calibration.dir may have %d files", file,
                KVF_CALIBRATIONS_MAX);
        return;
    }
    (void)snprintf(path, sizeof(path), "%s/%s", dir, file);
    if (kvf_profile_file_read(path, &table, why) == KVF_OK) {
        calibration_add(calibrations, file, table);
    } else {
        kvf_log(KVF_LOG_WARNING, "%s; the file is left out", why);
    }
}

int kvf_calibrations_read(const char *dir, struct kvf_calibrations **out)
{
    struct dirent **entries = NULL;
    int n;

    *out = NULL;
    if (dir[0] == '\0') {
        return KVF_OK;
    }
    *out = calloc(1, sizeof(**out));
    if (*out == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    atomic_init(&(*out)->holders, 1);
    n = scandir(dir, &entries, is_profile, alphasort);
    if (n < 0) {
        kvf_log(KVF_LOG_WARNING, "calibration.dir %s: %s", dir, strerror(errno));
        return KVF_ERR_IO;
    }
    for (int i = 0; i < n; i++) {
        file_read(*out, dir, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    return KVF_OK;
}

struct kvf_calibrations *kvf_calibrations_hold(struct kvf_calibrations *calibrations)
{
    atomic_fetch_add(&calibrations->holders, 1);
    return calibrations;
}

void kvf_calibrations_release(struct kvf_calibrations *calibrations)
{
    if (calibrations != NULL && atomic_fetch_sub(&calibrations->holders, 1) == 1) {
        for (uint32_t i = 0; i < calibrations->n; i++) {
            kvf_profile_table_destroy(calibrations->list[i].table);
            kvf_fd_close(&calibrations->list[i].blob_fd);
        }
        free(calibrations);
    }
}

const struct kvf_calibration *kvf_calibrations_find(const struct kvf_calibrations *calibrations,
                                                    const char *name,
                                                    const uint8_t weights_digest[KVF_DIGEST_BYTES],
                                                    const uint8_t adapter_digest[KVF_DIGEST_BYTES])
{
    for (uint32_t i = 0; calibrations != NULL && i < calibrations->n; i++) {
        const struct kvf_profile_table *table = calibrations->list[i].table;

        if (strcmp(table->name, name) == 0 &&
            kvf_profile_table_is_for(table, weights_digest, adapter_digest)) {
            return &calibrations->list[i];
        }
    }
    return NULL;
}

bool kvf_calibrations_have(const struct kvf_calibrations *calibrations, const char *name)
{
    for (uint32_t i = 0; calibrations != NULL && i < calibrations->n; i++) {
        if (strcmp(calibrations->list[i].table->name, name) == 0) {
            return true;
        }
    }
    return false;
}
