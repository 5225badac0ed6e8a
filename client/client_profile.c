/* SPDX-License-Identifier: Apache-2.0
 *
 * client_profile.c: the profile in force. The daemon names one of the build, or sends one of a file
 * (codec/profile_blob.h) before its WELCOME.
 *
 * What was sent stays until the handle is closed, since plans refer to it; a daemon that sends the
 * same again, after a reconnect, adds nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fd.h"
#include "client/client_internal.h"
#include "codec/profile_blob.h"
#include "transport/segment.h"

struct kvf_client_profile {
    struct kvf_client_profile *next;
    struct kvf_profile_table *table;
    uint8_t *blob;
    size_t blob_bytes;
};

static_assert(KVF_PROFILE_BLOB_BYTES_MAX + KVF_PROTO_PAGE_BYTES <= KVF_PROTO_PROFILE_MAX,
              "every blob can be sent");

static void profile_free(struct kvf_client_profile *profile)
{
    kvf_profile_table_destroy(profile->table);
    free(profile->blob);
    free(profile);
}

void kvf_profiles_free(struct kvf_client *client)
{
    while (client->profiles != NULL) {
        struct kvf_client_profile *profile = client->profiles;

        client->profiles = profile->next;
        profile_free(profile);
    }
}

/* A profile that has come before. */
static struct kvf_client_profile *profile_find(const struct kvf_client *client, const uint8_t *blob,
                                               size_t bytes)
{
    struct kvf_client_profile *profile = client->profiles;

    while (profile != NULL &&
           (profile->blob_bytes != bytes || memcmp(profile->blob, blob, bytes) != 0)) {
        profile = profile->next;
    }
    return profile;
}

/* Takes blob, of which the memory had bytes; the blob says how many of them it has. */
static int profile_add(struct kvf_client *client, uint8_t *blob, size_t bytes,
                       struct kvf_client_profile **profile_out, char *text, size_t text_bytes)
{
    struct kvf_profile_blob header;
    struct kvf_client_profile *profile;
    char why[KVF_PROFILE_WHY_BYTES] = "has an impossible length";
    int status = KVF_ERR_INVALID;

    memcpy(&header, blob, sizeof(header));
    *profile_out = header.total_bytes <= bytes ? profile_find(client, blob, header.total_bytes)
                                               : NULL;
    if (*profile_out != NULL) {
        free(blob);
        return KVF_OK;
    }
    profile = calloc(1, sizeof(*profile));
    if (profile == NULL) {
        free(blob);
        return KVF_ERR_NO_MEMORY;
    }
    profile->blob = blob;
    profile->blob_bytes = header.total_bytes;
    if (header.total_bytes <= bytes) {
        status = kvf_profile_blob_read(blob, header.total_bytes, &profile->table, why);
    }
    if (status != KVF_OK) {
        profile_free(profile);
        snprintf(text, text_bytes, "the profile that the daemon sent %s", why);
        return status == KVF_ERR_NO_MEMORY ? status : KVF_ERR_PROTOCOL;
    }
    profile->next = client->profiles;
    client->profiles = profile;
    *profile_out = profile;
    return KVF_OK;
}

int kvf_profile_receive(struct kvf_client *client, struct kvf_session *session,
                        const struct kvf_wire_profile *message, int fd, char *text,
                        size_t text_bytes)
{
    uint8_t *blob;
    int status;

    if (session->state != KVF_SESSION_HELLO || session->profile != NULL || !client->has_geometry) {
        snprintf(text, text_bytes, "the daemon sent a profile out of order");
        return KVF_ERR_PROTOCOL;
    }
    status = kvf_segment_check(fd, message->bytes, true, text, text_bytes);
    if (status != KVF_OK) {
        return status;
    }
    blob = malloc(message->bytes);
    if (blob == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    if (kvf_fd_pread_all(fd, blob, message->bytes, 0) != KVF_OK) {
        free(blob);
        snprintf(text, text_bytes, "the profile that the daemon sent cannot be read");
        return KVF_ERR_PROTOCOL;
    }
    return profile_add(client, blob, message->bytes, &session->profile, text, text_bytes);
}

/* The plan of a profile that was sent. */
static int plan_of_file(struct kvf_client *client, const struct kvf_client_profile *profile,
                        char *text, size_t text_bytes)
{
    char why[KVF_PROFILE_WHY_BYTES];
    uint32_t head_first;
    int status = kvf_profile_table_fits(profile->table, &client->geometry, client->hello.shard,
                                        client->hello.shard_count, &head_first, why);

    if (status != KVF_OK) {
        snprintf(text, text_bytes, "profile \"%s\", which the daemon sent, does not fit: %s",
                 profile->table->name, why);
        return status;
    }
    return kvf_codec_plan_init_table(&client->plan, &client->geometry, profile->table, head_first);
}

/* Make the plan for what WELCOME names, unless it is there. */
static int plan_make(struct kvf_client *client, const struct kvf_session *session,
                     const struct kvf_wire_welcome *welcome, char *text, size_t text_bytes)
{
    uint64_t model_fp = client->plan.model_fp;
    uint64_t weights_fp = client->plan.weights_fp;
    int status = KVF_OK;

    if (session->profile != NULL) {
        if (strcmp(session->profile->table->name, welcome->profile) != 0) {
            snprintf(text, text_bytes, "the daemon sent profile \"%s\" and chose \"%s\"",
                     session->profile->table->name, welcome->profile);
            return KVF_ERR_PROTOCOL;
        }
        status = plan_of_file(client, session->profile, text, text_bytes);
    } else if (strcmp(client->plan.profile->name, welcome->profile) != 0 ||
               kvf_profile_find(welcome->profile) == NULL) {
        status = kvf_codec_plan_init(&client->plan, client->has_geometry ? &client->geometry : NULL,
                                     welcome->profile);
    }
    client->plan.model_fp = model_fp;
    client->plan.weights_fp = weights_fp;
    if (status != KVF_OK && text[0] == '\0') {
        snprintf(text, text_bytes, "profile \"%s\", which the daemon chose, does not work here",
                 welcome->profile);
    }
    return status != KVF_OK ? KVF_ERR_MISMATCH : KVF_OK;
}

int kvf_profile_follow(struct kvf_client *client, const struct kvf_session *session,
                       const struct kvf_wire_welcome *welcome, char *text, size_t text_bytes)
{
    int status = plan_make(client, session, welcome, text, text_bytes);

    if (status != KVF_OK) {
        return status;
    }
    if (client->plan.profile_fp != welcome->profile_fp ||
        client->plan.lossless != (welcome->lossless != 0)) {
        snprintf(text, text_bytes,
                 "profile \"%s\" is not the same here and in the daemon: use builds of one version",
                 welcome->profile);
        return KVF_ERR_MISMATCH;
    }
    if (client->is_lossless_asked && !client->plan.lossless) {
        snprintf(text, text_bytes, "the daemon chose the lossy profile \"%s\" for a lossless one",
                 welcome->profile);
        return KVF_ERR_PROTOCOL;
    }
    if (client->plan.workspace_bytes > client->workspace_bytes) {
        size_t bytes = (client->plan.workspace_bytes + KVF_CODEC_WORKSPACE_ALIGN - 1) /
                       KVF_CODEC_WORKSPACE_ALIGN * KVF_CODEC_WORKSPACE_ALIGN;
        void *workspace = aligned_alloc(KVF_CODEC_WORKSPACE_ALIGN, bytes);

        if (workspace == NULL) {
            return KVF_ERR_NO_MEMORY;
        }
        free(client->workspace);
        client->workspace = workspace;
        client->workspace_bytes = bytes;
    }
    return KVF_OK;
}
