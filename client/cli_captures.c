/* SPDX-License-Identifier: Apache-2.0
 *
 * cli_captures.c: what inspect and calibrate have in common: folders of captures, threads.
 */
#include <sched.h>
#include <stdio.h>

#include "client/capture.h"
#include "client/cli.h"
#include "codec/codec.h"

int cli_open_captures(const struct cli_folders *folders, const char *what,
                      struct kvf_capture_set *set)
{
    char error[KVF_CAPTURE_ERROR_BYTES];

    if (folders->n == 0) {
        return cli_fail(CLI_USAGE, "%s is missing; see docs/calibration.md for how to make one",
                        what);
    }
    for (uint32_t i = 0; i < folders->n; i++) {
        if (kvf_capture_set_add(set, folders->items[i], error) != KVF_OK) {
            return cli_fail(CLI_FAILED, "%s", error);
        }
    }
    for (uint32_t i = 0; i < set->n; i++) {
        if (set->items[i]->n_tokens < KVF_CHUNK_TOKENS_MAX) {
            /* nothing of it would be coded, and nothing coded has no error */
            return cli_fail(CLI_FAILED, "%s: %u tokens; a block has %d", set->items[i]->folder,
                            set->items[i]->n_tokens, KVF_CHUNK_TOKENS_MAX);
        }
    }
    return CLI_OK;
}

int cli_check_profile(const char *name)
{
    const struct kvf_profile *profile = kvf_profile_find(name);

    if (profile == NULL || profile->opaque || kvf_profile_takes(profile, KVF_KIND_KV)) {
        return CLI_OK;
    }
    return cli_fail(
        CLI_USAGE,
        "--profile: '%s' is for %s, and captures hold K and V: tests/bench/run accuracy "
        "measures what a model loses by it, and allow_uncalibrated with the flag of "
        "attach lets it be used (docs/x-cache.md)",
        name, kvf_profile_kinds(profile));
}

uint32_t cli_threads(const struct cli *cli)
{
    cpu_set_t cpus;

    if (cli->threads != 0) {
        return (uint32_t)cli->threads;
    }
    return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? (uint32_t)CPU_COUNT(&cpus) : 1;
}
