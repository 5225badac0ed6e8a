/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_calibrate.c: kvferry calibrate: arguments, the order of the work, and what is said of it.
 */
#include <errno.h>
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/calibrate.h"
#include "client/cli.h"
#include "client/cli_evidence.h"
#include "codec/profile_file.h"

enum {
    QUERIES = 64,
    SINKS = 4,
};

/* One run. */
struct run {
    const struct cli *cli;
    struct kvf_capture_set captures;
    struct kvf_capture_set heldout;
    struct kvf_calibrate_options options;
    struct kvf_calibration calibration;
    struct kvf_profile_table *table;
    uint8_t weights_digest[KVF_DIGEST_BYTES];
    uint8_t adapter_digest[KVF_DIGEST_BYTES];
    uint32_t workloads;
    struct kvf_codec_plan plan;
    struct kvf_layer_verdict verdicts[KVF_LAYERS_MAX];
    double bits; /* of held-out captures, a value */
};

/* --- arguments -------------------------------------------------------------------------------- */

static int hash_file(const char *path, uint8_t digest_out[KVF_DIGEST_BYTES])
{
    crypto_hash_sha256_state state;
    uint8_t buffer[65536];
    FILE *file = fopen(path, "rbe");
    size_t n;
    bool is_read;

    if (file == NULL) {
        return cli_fail(CLI_FAILED, "%s: %s", path, strerror(errno));
    }
    crypto_hash_sha256_init(&state);
    while ((n = fread(buffer, 1, sizeof(buffer), file)) > 0) {
        crypto_hash_sha256_update(&state, buffer, n);
    }
    is_read = ferror(file) == 0;
    fclose(file);
    crypto_hash_sha256_final(&state, digest_out);
    return is_read ? CLI_OK : cli_fail(CLI_FAILED, "%s: cannot be read", path);
}

static int find_digests(struct run *run)
{
    const struct cli *cli = run->cli;
    const struct kvf_capture *first = run->heldout.items[0];

    if (cli->weights_digest != NULL && cli->weights_file != NULL) {
        return cli_fail(CLI_USAGE, "--weights-digest or --weights, not both");
    }
    if (cli->adapter_digest != NULL &&
        !kvf_digest_parse(cli->adapter_digest, run->adapter_digest)) {
        return cli_fail(CLI_USAGE, "--adapter-digest: 64 hexadecimal digits");
    }
    if (cli->weights_digest != NULL) {
        return kvf_digest_parse(cli->weights_digest, run->weights_digest)
                   ? CLI_OK
                   : cli_fail(CLI_USAGE, "--weights-digest: 64 hexadecimal digits");
    }
    if (cli->weights_file != NULL) {
        return hash_file(cli->weights_file, run->weights_digest);
    }
    if (!first->has_digest) {
        return cli_fail(CLI_USAGE, "the captures do not name the model's weights: give "
                                   "--weights-digest or --weights");
    }
    memcpy(run->weights_digest, first->weights_digest, sizeof(run->weights_digest));
    return CLI_OK;
}

static int find_workload(struct run *run)
{
    const char *label = run->cli->workload;

    if (label == NULL) {
        label = run->heldout.items[0]->workload;
    }
    for (uint32_t i = 0; kvf_profile_workloads[i] != NULL; i++) {
        if (strcmp(label, kvf_profile_workloads[i]) == 0) {
            run->workloads = 1U << i;
            return CLI_OK;
        }
    }
    return cli_fail(CLI_USAGE,
                    "--workload: '%s' is none of chat, long-retrieval, reasoning, "
                    "tool-calls, code, other",
                    label);
}

static int take_options(struct run *run)
{
    const struct cli *cli = run->cli;

    run->options = (struct kvf_calibrate_options){
        .thresholds =
            {
                .sigma_median = KVF_DEFAULT_SIGMA_MEDIAN,
                .sigma_p99 = KVF_DEFAULT_SIGMA_P99,
                .output_error = KVF_DEFAULT_OUTPUT_ERROR,
                .top1 = KVF_DEFAULT_TOP1,
            },
        .k_kind = KVF_CAPTURE_K_POST,
        .codecs = KVF_FORMS_ALL,
        .n_threads = cli_threads(cli),
        .n_rows = cli->queries != 0 ? (uint32_t)cli->queries : QUERIES,
        .sink_tokens = cli->has_sinks ? (uint8_t)cli->sinks : SINKS,
        .target_bits = cli->target_bits,
    };
    if (cli->sigma_median > 0) {
        run->options.thresholds.sigma_median = cli->sigma_median;
    }
    if (cli->sigma_p99 > 0) {
        run->options.thresholds.sigma_p99 = cli->sigma_p99;
    }
    if (cli->output_error > 0) {
        run->options.thresholds.output_error = cli->output_error;
    }
    if (cli->top1 > 0) {
        run->options.thresholds.top1 = cli->top1;
    }
    if (cli->codecs != NULL && !kvf_form_codecs_parse(cli->codecs, &run->options.codecs)) {
        return cli_fail(CLI_USAGE, "--codecs: saw, tq and kivi, with commas between them");
    }
    if (cli->rope_state != NULL && strcmp(cli->rope_state, "pre") == 0) {
        run->options.k_kind = KVF_CAPTURE_K_PRE;
    } else if (cli->rope_state != NULL && strcmp(cli->rope_state, "post") != 0 &&
               strcmp(cli->rope_state, "auto") != 0) {
        return cli_fail(CLI_USAGE, "--rope-state: post, pre or auto");
    }
    if (cli->profile != NULL && (cli->target_bits > 0 || cli->name != NULL)) {
        return cli_fail(CLI_USAGE, "--profile checks a profile of this release: it takes neither "
                                   "--target-bits nor --name");
    }
    return CLI_OK;
}

/* What was chosen by and what it is checked with have to be different texts. */
static int check_heldout(const struct run *run)
{
    for (uint32_t i = 0; i < run->heldout.n; i++) {
        const struct kvf_capture *heldout = run->heldout.items[i];

        if (!kvf_capture_has(heldout, KVF_CAPTURE_Q)) {
            return cli_fail(CLI_FAILED,
                            "%s: has no q of every layer: without queries what attention makes of "
                            "a profile cannot be checked, and nothing passes unchecked",
                            heldout->folder);
        }
        for (uint32_t j = 0; j < run->captures.n; j++) {
            if (memcmp(heldout->digest, run->captures.items[j]->digest, KVF_DIGEST_BYTES) == 0) {
                return cli_fail(CLI_USAGE,
                                "%s is among the captures too: held-out captures are of "
                                "other texts",
                                heldout->folder);
            }
        }
    }
    if (run->captures.n != 0 &&
        !kvf_capture_is_alike(run->captures.items[0], run->heldout.items[0])) {
        return cli_fail(CLI_FAILED, "%s and %s have other layers, heads, dims or tensors",
                        run->captures.items[0]->folder, run->heldout.items[0]->folder);
    }
    return CLI_OK;
}

static int open_all(struct run *run)
{
    int code = take_options(run);

    if (code == CLI_OK && run->cli->profile != NULL) {
        code = cli_check_profile(run->cli->profile);
    }
    if (code == CLI_OK && run->cli->profile == NULL) {
        code = cli_open_captures(&run->cli->captures, "--capture", &run->captures);
    } else if (code == CLI_OK && run->cli->captures.n != 0) {
        code = cli_fail(CLI_USAGE, "--profile is checked with --heldout alone");
    }
    if (code == CLI_OK) {
        code = cli_open_captures(&run->cli->heldout, "--heldout", &run->heldout);
    }
    if (code == CLI_OK) {
        code = check_heldout(run);
    }
    if (code == CLI_OK) {
        code = find_digests(run);
    }
    return code == CLI_OK ? find_workload(run) : code;
}

/* --- the work --------------------------------------------------------------------------------- */

static int fail_work(const char *what, int status)
{
    return cli_fail(CLI_FAILED, "%s: %s", what, kvf_status_text(status));
}

/* Choose and settle with K of one kind. */
static int search(struct run *run, enum kvf_capture_kind k_kind,
                  struct kvf_calibration *calibration)
{
    struct kvf_calibrate_options options = run->options;
    int status;

    options.k_kind = k_kind;
    status = kvf_calibration_init(calibration, &options, &run->captures, &run->heldout);
    if (status == KVF_ERR_INVALID) {
        return cli_fail(CLI_FAILED, "K before RoPE is not in every capture, or rope_theta is not "
                                    "in manifest.json");
    }
    if (status == KVF_OK) {
        status = kvf_calibration_measure(calibration);
    }
    if (status == KVF_OK) {
        status = kvf_calibration_choose(calibration);
    }
    if (status == KVF_ERR_NO_SPACE) {
        return cli_fail(CLI_FAILED, "--target-bits %g: less than the narrowest forms take",
                        options.target_bits);
    }
    if (status == KVF_OK) {
        status = kvf_calibration_settle(calibration);
    }
    return status == KVF_OK ? CLI_OK : fail_work("calibrate", status);
}

static double chosen_bits(const struct kvf_calibration *c)
{
    double bits = 0;

    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        bits += c->bits_k[c->choices[layer].k] + c->bits_v[c->choices[layer].v];
    }
    return bits;
}

/* --rope-state auto: both, where the captures allow, and what takes less. */
static int search_both(struct run *run)
{
    struct kvf_calibration other = {0};
    bool has_pre = true;
    int code;

    for (uint32_t i = 0; i < run->captures.n + run->heldout.n; i++) {
        const struct kvf_capture *capture = i < run->captures.n
                                                ? run->captures.items[i]
                                                : run->heldout.items[i - run->captures.n];

        has_pre = has_pre && kvf_capture_has(capture, KVF_CAPTURE_K_PRE) && capture->rope_theta > 1;
    }
    code = search(run, KVF_CAPTURE_K_POST, &run->calibration);
    if (code != CLI_OK || !has_pre) {
        return code;
    }
    code = search(run, KVF_CAPTURE_K_PRE, &other);
    if (code == CLI_OK && chosen_bits(&other) < chosen_bits(&run->calibration)) {
        kvf_calibration_fini(&run->calibration);
        run->calibration = other;
    } else {
        kvf_calibration_fini(&other);
    }
    return code;
}

/* The profile that was chosen, under its name. */
static int make_table(struct run *run)
{
    char why[KVF_PROFILE_WHY_BYTES];
    const char *name = run->cli->name != NULL ? run->cli->name : "calibrated";
    int status = kvf_calibration_table(&run->calibration, &run->table);

    if (status != KVF_OK) {
        return fail_work("calibrate", status);
    }
    memcpy(run->table->weights_digest, run->weights_digest, KVF_DIGEST_BYTES);
    memcpy(run->table->adapter_digest, run->adapter_digest, KVF_DIGEST_BYTES);
    run->table->workloads = run->workloads;
    if (strlen(name) >= sizeof(run->table->name) || kvf_profile_find(name) != NULL) {
        return cli_fail(CLI_USAGE,
                        "--name: '%s' is longer than 15 characters, or the name of a "
                        "profile of this release",
                        name);
    }
    snprintf(run->table->name, sizeof(run->table->name), "%s", name);
    if (kvf_profile_table_validate(run->table, why) != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s", why);
    }
    return CLI_OK;
}

/* A table that says that a built-in profile has passed. */
static int name_builtin(struct run *run)
{
    const char *name = run->cli->profile;
    const struct kvf_profile *profile = kvf_profile_find(name);
    char why[KVF_PROFILE_WHY_BYTES];

    if (profile == NULL || profile->lossless) {
        return cli_fail(CLI_USAGE, "--profile: '%s' is no lossy profile of this release", name);
    }
    /* what the engine keeps raw by itself is not known: as if it kept nothing */
    run->options.sink_tokens = 0;
    if (kvf_calibration_init(&run->calibration, &run->options, &run->heldout, &run->heldout) !=
        KVF_OK) {
        return cli_fail(CLI_FAILED, "K before RoPE is not in every capture, or rope_theta is not "
                                    "in manifest.json");
    }
    run->table = kvf_calib_table_create(run->heldout.items[0], run->options.k_kind,
                                        run->calibration.n_layers, 0);
    if (run->table == NULL) {
        return fail_work("calibrate", KVF_ERR_NO_MEMORY);
    }
    run->table->n_kinds = 0;
    snprintf(run->table->name, sizeof(run->table->name), "%s", name);
    memcpy(run->table->weights_digest, run->weights_digest, KVF_DIGEST_BYTES);
    memcpy(run->table->adapter_digest, run->adapter_digest, KVF_DIGEST_BYTES);
    run->table->workloads = run->workloads;
    if (kvf_profile_table_validate(run->table, why) != KVF_OK) {
        return cli_fail(CLI_FAILED, "%s", why);
    }
    return CLI_OK;
}

static int verify(struct run *run)
{
    bool is_builtin = run->cli->profile != NULL;
    int status = kvf_roundtrip_plan(run->heldout.items[0], run->calibration.options.k_kind,
                                    is_builtin ? NULL : run->table, run->cli->profile, 0,
                                    &run->plan);

    if (status == KVF_OK) {
        status = kvf_calibration_verify(&run->calibration, &run->plan, run->verdicts, &run->bits);
    }
    return status == KVF_OK ? CLI_OK : fail_work("calibrate", status);
}

/* --- what is said ----------------------------------------------------------------------------- */

static void print_report(const struct cli_verdict *verdict)
{
    const struct kvf_calibration *c = verdict->calibration;
    char failing[64];

    printf("%5s  %-9s %-9s %8s %8s %8s %8s %7s  %s\n", "layer", "K", "V", "sigma", "p99", "short",
           "output", "top-1", "");
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        const struct kvf_layer_choice *choice = &c->choices[layer];
        const struct kvf_layer_verdict *v = &verdict->layers[layer];
        bool is_made = verdict->profile == NULL;

        printf("%5u  %-9s %-9s %8.3f %8.3f %8.3f %8.4f %7.4f", layer,
               is_made ? c->forms_k[choice->k].name : "-",
               is_made ? c->forms_v[choice->v].name : "-", v->measure.noise.median,
               v->measure.noise.p99, v->tail.p99, kvf_attention_output_error(&v->measure.both),
               kvf_attention_top1(&v->measure.both));
        if (choice->steps_back != 0) {
            printf("  %u back for %s", choice->steps_back,
                   cli_failing_text(choice->first_failing, failing));
        }
        if (v->failing != 0) {
            printf("  FAILS: %s", cli_failing_text(v->failing, failing));
        }
        printf("\n");
    }
    printf("%.3f bits a value, a ratio of %.2f; %s\n", verdict->bits, 16 / verdict->bits,
           verdict->n_failing == 0 ? "passed" : "did not pass");
}

/* Say what came out, and write the file if it passed. */
static int finish(struct run *run)
{
    const struct cli *cli = run->cli;
    char why[KVF_PROFILE_FILE_WHY_BYTES];
    struct cli_verdict verdict = {
        .calibration = &run->calibration,
        .profile = cli->profile,
        .plan = &run->plan,
        .layers = run->verdicts,
        .bits = run->bits,
    };
    char workload[64];
    json_t *evidence;
    int code = CLI_OK;

    kvf_profile_workloads_text(run->workloads, workload, sizeof(workload));
    verdict.workload = workload;
    for (uint32_t layer = 0; layer < run->calibration.n_layers; layer++) {
        verdict.n_failing += run->verdicts[layer].failing != 0;
    }
    evidence = cli_evidence(&verdict);
    if (!cli->is_json) {
        print_report(&verdict);
    }
    if (verdict.n_failing != 0) {
        code = cli_fail(CLI_FAILED, "%u of %u layers did not pass%s", verdict.n_failing,
                        run->calibration.n_layers,
                        cli->write_file != NULL ? "; nothing was written" : "");
    } else if (cli->write_file != NULL &&
               kvf_profile_file_write(cli->write_file, run->table, evidence, why) != KVF_OK) {
        code = cli_fail(CLI_FAILED, "%s", why);
    }
    if (cli->is_json) {
        cli_print_json(evidence);
    } else {
        json_decref(evidence);
    }
    return code;
}

int cli_calibrate(const struct cli *cli)
{
    struct run *run = calloc(1, sizeof(*run));
    int code;

    if (run == NULL) {
        return fail_work("calibrate", KVF_ERR_NO_MEMORY);
    }
    run->cli = cli;
    code = open_all(run);
    if (code == CLI_OK && cli->profile != NULL) {
        code = name_builtin(run);
    } else if (code == CLI_OK) {
        bool is_auto = cli->rope_state != NULL && strcmp(cli->rope_state, "auto") == 0;

        code = is_auto ? search_both(run) : search(run, run->options.k_kind, &run->calibration);
        code = code == CLI_OK ? make_table(run) : code;
    }
    if (code == CLI_OK) {
        code = verify(run);
    }
    if (code == CLI_OK) {
        code = finish(run);
    }
    kvf_profile_table_destroy(run->table);
    kvf_calibration_fini(&run->calibration);
    kvf_capture_set_close(&run->captures);
    kvf_capture_set_close(&run->heldout);
    free(run);
    return code;
}
