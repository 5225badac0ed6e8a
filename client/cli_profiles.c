/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_profiles.c: the profiles that this release has, and what they take; and what has passed
 * calibration by the files of a daemon, if one is there.
 */
#include <stdio.h>
#include <unistd.h>

#include "client/cli.h"
#include "codec/codec.h"

/* A model of ordinary shape, for sizes: they depend on it a little. */
enum {
    N_LAYERS = 32,
    N_HEADS = 8,
    DIM = 128,
    TOKENS = 256,
};

/* Has a profile another kind of state than K and V? Which? */
static uint8_t kind_of(const struct kvf_profile *profile)
{
    static const uint8_t kinds[] = {KVF_KIND_KV, KVF_KIND_X, KVF_KIND_XG};

    for (size_t i = 0; i < sizeof(kinds); i++) {
        if (kvf_profile_takes(profile, kinds[i])) {
            return kinds[i];
        }
    }
    return KVF_KIND_BYTES;
}

/* Bits a value of K and V, or of X, metadata counted, sinks and record page not. 0: opaque bytes.
 */
static double bits_of(const struct kvf_profile *profile, bool *is_bound_out)
{
    const uint8_t kind = kind_of(profile);
    const bool is_x = kind >= KVF_KIND_X;
    const struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = kind,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = is_x ? KVF_ROPE_NONE : KVF_ROPE_POST,
        .n_layers = N_LAYERS,
        .n_heads = N_HEADS,
        .dim_k = DIM,
        .dim_v = is_x ? 0 : DIM,
        .chunk_tokens = TOKENS,
    };
    const double values = (is_x ? 1.0 : 2.0) * N_LAYERS * N_HEADS * DIM * TOKENS;
    struct kvf_codec_plan plan;

    *is_bound_out = false;
    if (profile->opaque || kvf_codec_plan_init(&plan, &geometry, profile->name) != KVF_OK) {
        return 0.0;
    }
    *is_bound_out = !kvf_codec_plan_is_fixed(&plan);
    return (double)kvf_codec_plan_payload_bytes(&plan, TOKENS) * 8.0 / values;
}

static json_t *profile_json(const struct kvf_profile *profile, double bits, bool is_bound)
{
    json_t *row = json_pack("{s:s, s:b, s:s, s:s}", "profile", profile->name, "lossless",
                            (int)profile->lossless, "use", profile->use, "kinds",
                            kvf_profile_kinds(profile));

    if (row != NULL && bits != 0.0) {
        json_object_set_new(row, is_bound ? "bits_a_value_max" : "bits_a_value", json_real(bits));
    }
    return row;
}

/* The daemon's list, or NULL: there is none to ask. */
static json_t *ask_calibrated(const struct cli *cli)
{
    json_t *answer;
    json_t *rows;

    if (access(cli->admin_socket, F_OK) != 0 ||
        cli_http(cli, "GET", "/v1/profiles", &answer) != CLI_OK) {
        return NULL;
    }
    rows = json_incref(json_object_get(answer, "calibrated"));
    json_decref(answer);
    return rows;
}

static void print_calibrated(const json_t *rows)
{
    const json_t *row;
    size_t i;

    if (json_array_size(rows) == 0) {
        return;
    }
    printf("\n%-14s %-24s %-18s %s\n", "calibrated", "file", "weights", "workload");
    json_array_foreach(rows, i, row)
    {
        const json_t *workloads = json_object_get(row, "workload");
        const json_t *workload;
        size_t n;

        printf("%-14s %-24s %.16s..", json_string_value(json_object_get(row, "profile")),
               json_string_value(json_object_get(row, "file")),
               json_string_value(json_object_get(row, "weights_digest")));
        json_array_foreach(workloads, n, workload)
        {
            printf("%s %s", n != 0 ? "," : "", json_string_value(workload));
        }
        printf("\n");
    }
}

int cli_profiles(const struct cli *cli)
{
    json_t *rows = json_array();
    json_t *calibrated = ask_calibrated(cli);

    if (!cli->is_json) {
        printf("%-14s %-8s %8s %7s  %s\n", "profile", "", "bits", "ratio", "use");
    }
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        bool is_bound;
        double bits = bits_of(profile, &is_bound);

        if (cli->is_json) {
            json_array_append_new(rows, profile_json(profile, bits, is_bound));
        } else if (bits == 0.0) {
            printf("%-14s %-8s %8s %7s  %s\n", profile->name, "lossless", "-", "-", profile->use);
        } else {
            printf("%-14s %-8s %s%6.3f %s%6.2f  %s\n", profile->name,
                   profile->lossless ? "lossless" : "lossy", is_bound ? "<=" : "  ", bits,
                   is_bound ? ">" : " ", 16.0 / bits, profile->use);
        }
    }
    if (cli->is_json) {
        cli_print_json(json_pack("{s:o, s:o*}", "profiles", rows, "calibrated", calibrated));
    } else {
        print_calibrated(calibrated);
        json_decref(calibrated);
        json_decref(rows);
    }
    return CLI_OK;
}
