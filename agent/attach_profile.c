/* SPDX-License-Identifier: Apache-2.0
 *
 * attach_profile.c: the profile that a client gets. A lossless one that it asks for; a lossy one
 * where a calibration has passed it for the client's model, or where operator and client both say
 * that none is needed; else "exact". So also for a name that nobody knows: it may be that of a file
 * which is gone since the client attached, and a client that comes back is not to be left without a
 * cache for it.
 */
#include "agent/core.h"

#include <stdio.h>
#include <string.h>

#include "agent/calibration.h"
#include "agent/usage.h"

static bool is_allowed(const struct kvf_session *session)
{
    return session->agent->config->allow_uncalibrated &&
           (session->hello.flags & KVF_ATTACH_ALLOW_UNCALIBRATED) != 0;
}

static bool is_known(const struct kvf_session *session)
{
    return kvf_profile_find(session->hello.profile) != NULL ||
           kvf_calibrations_have(session->agent->calibrations, session->hello.profile);
}

/* The file by which the profile asked for has passed for this client, or NULL: why_out says why
 * not. */
static const struct kvf_calibration *find_passed(const struct kvf_session *session,
                                                 const struct kvf_geometry *geometry,
                                                 uint32_t *head_first_out,
                                                 char why_out[KVF_PROFILE_WHY_BYTES])
{
    static const uint8_t none[KVF_DIGEST_BYTES];
    const struct kvf_wire_hello *hello = &session->hello;
    const struct kvf_calibration *calibration = kvf_calibrations_find(
        session->agent->calibrations, hello->profile, hello->weights_digest, hello->adapter_digest);
    char why[KVF_PROFILE_WHY_BYTES];

    if (memcmp(hello->weights_digest, none, sizeof(none)) == 0) {
        (void)snprintf(why_out, KVF_PROFILE_WHY_BYTES,
                       "the client says no weights_digest to look for");
        return NULL;
    }
    if (calibration == NULL) {
        (void)snprintf(why_out, KVF_PROFILE_WHY_BYTES, "%s",
                       session->agent->config->calibration_dir[0] == '\0'
                           ? "calibration.dir is not set"
                       : is_known(session)
                           ? "calibration.dir has no file of it for these weights"
                           : "neither the build (kvferry profiles) nor calibration.dir has it");
        return NULL;
    }
    if (kvf_profile_table_fits(calibration->table, geometry, hello->shard, hello->shard_count,
                               head_first_out, why) != KVF_OK) {
        (void)snprintf(why_out, KVF_PROFILE_WHY_BYTES, "%.64s does not fit: %.150s",
                       calibration->file, why);
        return NULL;
    }
    return calibration;
}

/* A lossy profile, or what it is replaced by. text says in either case where that comes from. */
static int choose_lossy(struct kvf_session *session, const struct kvf_geometry *geometry,
                        char *text, size_t bytes)
{
    const char *name = session->hello.profile;
    const struct kvf_profile *builtin = kvf_profile_find(name);
    char why[KVF_PROFILE_WHY_BYTES];
    char workloads[128];
    uint32_t head_first = 0;
    const struct kvf_calibration *calibration = find_passed(session, geometry, &head_first, why);

    if (calibration != NULL) {
        kvf_profile_workloads_text(calibration->table->workloads, workloads, sizeof(workloads));
        (void)snprintf(text, bytes, "profile %s has passed calibration for this model on %s: %s",
                       name, workloads, calibration->file);
    }
    if (calibration != NULL && builtin == NULL) {
        session->calibration = calibration;
        session->calibrations = kvf_calibrations_hold(session->agent->calibrations);
        return kvf_codec_plan_init_table(&session->plan, geometry, calibration->table, head_first);
    }
    if (calibration == NULL && is_allowed(session)) {
        (void)snprintf(text, bytes,
                       "profile %s has not passed calibration for this model, but is allowed",
                       name);
    }
    if (builtin != NULL) {
        int status = kvf_codec_plan_init(&session->plan, geometry, name);

        if (status != KVF_OK || calibration != NULL || is_allowed(session)) {
            return status;
        }
    }
    session->is_replaced = true;
    memset(session->profile, 0, sizeof(session->profile));
    memcpy(session->profile, "exact", 5);
    (void)snprintf(text, bytes,
                   "profile %s has not passed calibration for this model, \"exact\" is used: %s; "
                   "run kvferry calibrate%s",
                   name, why,
                   builtin != NULL ? ", or allow it by allow_uncalibrated: true and the attach flag"
                                   : "");
    return kvf_codec_plan_init(&session->plan, geometry, "exact");
}

/* Can this client have the plan that was made? */
static int check_client(const struct kvf_session *session, char *text, size_t bytes)
{
    const struct kvf_wire_hello *hello = &session->hello;

    if (session->calibration != NULL && session->version < KVF_WIRE_VERSION_PROFILES) {
        (void)snprintf(text, bytes,
                       "profile %s is one of a file, which takes protocol %d; the client speaks "
                       "%u: use a newer library, or a profile of the build",
                       session->profile, KVF_WIRE_VERSION_PROFILES, session->version);
        return KVF_ERR_VERSION;
    }
    if (session->calibration == NULL && !session->is_replaced &&
        session->plan.profile_fp != hello->profile_fp) {
        (void)snprintf(text, bytes,
                       "client and daemon disagree about profile \"%s\"; use the same release",
                       session->profile);
        return KVF_ERR_MISMATCH;
    }
    return KVF_OK;
}

int kvf_attach_profile(struct kvf_session *session, char *text, size_t bytes)
{
    const struct kvf_wire_hello *hello = &session->hello;
    const struct kvf_profile *builtin = kvf_profile_find(hello->profile);
    struct kvf_geometry geometry = kvf_proto_geometry_get(&hello->geometry);
    bool opaque = geometry.kind == KVF_KIND_BYTES;
    int status;

    (void)snprintf(session->profile, sizeof(session->profile), "%s", hello->profile);
    if (builtin == NULL && (opaque || !kvf_profile_name_is_valid(hello->profile))) {
        (void)snprintf(text, bytes, "there is no profile \"%s\": see kvferry profiles",
                       hello->profile);
        return KVF_ERR_INVALID;
    }
    if (builtin != NULL && !opaque && !kvf_profile_takes(builtin, geometry.kind)) {
        (void)snprintf(text, bytes,
                       "profile \"%s\" is not for what this geometry is of, but for %s: see "
                       "kvferry profiles",
                       hello->profile, kvf_profile_kinds(builtin));
        return KVF_ERR_REFUSED;
    }
    if (geometry.kind >= KVF_KIND_X && kvf_proto_weights_fp(hello) == 0) {
        session->agent->metrics.x_refused++;
        (void)snprintf(
            text, bytes,
            "K and V of another model could come of this one's X: give a weights_digest%s",
            geometry.kind == KVF_KIND_XG ? ", and the factors_digest of its latents" : "");
        return KVF_ERR_REFUSED;
    }
    status = builtin != NULL && (builtin->lossless || opaque)
                 ? kvf_codec_plan_init(&session->plan, opaque ? NULL : &geometry, hello->profile)
                 : choose_lossy(session, &geometry, text, bytes);
    if (status == KVF_ERR_TOO_LARGE && session->calibration == NULL) {
        (void)snprintf(
            text, bytes, "a block of %u tokens can exceed 64 MiB; chunk_tokens of %u would fit",
            geometry.chunk_tokens, kvf_codec_fitting_tokens(&geometry, session->profile));
    } else if (status != KVF_OK) {
        (void)snprintf(text, bytes, "profile \"%s\" does not work for this geometry: %s",
                       session->profile, kvf_status_text(status));
    } else {
        status = check_client(session, text, bytes);
    }
    if (status == KVF_OK && !opaque) {
        session->plan.model_fp = kvf_proto_model_fp(hello);
        session->plan.weights_fp = kvf_proto_weights_fp(hello);
    }
    return status;
}

void kvf_attach_say_version(uint16_t lowest, uint16_t highest, char *text, size_t bytes)
{
    if (lowest > KVF_WIRE_VERSION_MAX) {
        (void)snprintf(text, bytes,
                       "the client speaks no protocol before %u, kvferryd " KVF_AGENT_VERSION
                       " none after %u: upgrade kvferryd",
                       lowest, KVF_WIRE_VERSION_MAX);
    } else {
        (void)snprintf(text, bytes,
                       "the client speaks no protocol after %u, kvferryd " KVF_AGENT_VERSION
                       " none before %u: upgrade libkvferry where the engine runs",
                       highest, KVF_WIRE_VERSION_MIN);
    }
}
