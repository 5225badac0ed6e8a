/* SPDX-License-Identifier: Apache-2.0
 *
 * profiles.c: the names that users choose, and what they stand for.
 *
 * Bits a value are for head dim 128, bf16 and chunks of 256 tokens, metadata counted, sinks not.
 */
#include "codec/codec.h"

#include <string.h>

/* Any constant will do, as long as it never changes: it is part of every namespace's
 * fingerprint. */
#define ROTATION_SEED 0x6b766672U

#define RAW                                                                                        \
    {                                                                                              \
        .codec = KVF_CODEC_RAW                                                                     \
    }
#define EXACT                                                                                      \
    {                                                                                              \
        .codec = KVF_CODEC_EXACT, .bits = KVF_BITS_EXACT                                           \
    }
/* Rotation with signs: a plain Hadamard step maps a constant vector onto one coefficient. */
#define SAW(width, more_flags, clip_on)                                                            \
    {                                                                                              \
        .codec = KVF_CODEC_SAW, .bits = (width), .flags = KVF_TENSOR_SIGNS | (more_flags),         \
        .rotate = 1, .clip = (clip_on), .rot_seed = ROTATION_SEED                                  \
    }
/* K and V of one width in groups of one size. */
#define KIVI(width, size, profile_name, profile_use)                                               \
    {                                                                                              \
        .name = (profile_name), .use = (profile_use),                                              \
        .k = {.codec = KVF_CODEC_KIVI,                                                             \
              .bits = (width),                                                                     \
              .group_size = (size),                                                                \
              .group_axis = KVF_AXIS_CHANNEL},                                                     \
        .v = {.codec = KVF_CODEC_KIVI,                                                             \
              .bits = (width),                                                                     \
              .group_size = (size),                                                                \
              .group_axis = KVF_AXIS_TOKEN},                                                       \
    }

const struct kvf_profile kvf_profiles[] = {
    {
        .name = "bytes",
        .use = "opaque bytes, as they are",
        .lossless = true,
        .opaque = true,
    },
    {
        .name = "raw",
        .use = "lossless, uncoded: 16 bits a value",
        .lossless = true,
        .k = RAW,
        .v = RAW,
    },
    {
        .name = "exact",
        .use = "lossless, exponents recoded: about 12.1 bits a value",
        .lossless = true,
        .k = EXACT,
        .v = EXACT,
    },
    {
        /* For models that cannot take 4-bit K: Qwen2 and 2.5, most below 4 billion parameters. */
        .name = "safe",
        .use = "K 8 bits centred, V 4 bits: 6.28 bits a value",
        .k = SAW(8, KVF_TENSOR_CENTER, 1),
        .v = SAW(4, 0, 1),
    },
    {
        .name = "balanced",
        .use = "K 4 bits centred, V 4 bits: 4.28 bits a value",
        .k = SAW(4, KVF_TENSOR_CENTER, 1),
        .v = SAW(4, 0, 1),
    },
    {
        .name = "saw8",
        .use = "K and V 8 bits: 8.25 bits a value",
        .k = SAW(8, 0, 1),
        .v = SAW(8, 0, 1),
    },
    {
        .name = "saw6",
        .use = "K 6 bits centred, V 6 bits: 6.28 bits a value",
        .k = SAW(6, KVF_TENSOR_CENTER, 1),
        .v = SAW(6, 0, 1),
    },
    {
        .name = "saw5",
        .use = "K 5 bits centred, V 5 bits: 5.28 bits a value",
        .k = SAW(5, KVF_TENSOR_CENTER, 1),
        .v = SAW(5, 0, 1),
    },
    {
        .name = "saw3",
        .use = "K 3 bits centred, V 3 bits: 3.28 bits a value",
        .k = SAW(3, KVF_TENSOR_CENTER, 1),
        .v = SAW(3, 0, 1),
    },
    {
        .name = "saw2",
        .use = "K 2 bits centred, V 2 bits: 2.28 bits a value",
        .k = SAW(2, KVF_TENSOR_CENTER, 1),
        .v = SAW(2, 0, 1),
    },
    {
        /* SAW-INT4 as published, to compare with: plain Hadamard, the whole range, no centring. The
         * paper's text rounds the zero point to an integer; the code that its figures were measured
         * with keeps a real number, the minimum. That is what our lo is, so this follows the code;
         * what is left are fp16 scales (the code: fp32) and ties to even (the code: upwards). */
        .name = "saw4-paper",
        .use = "K and V 4 bits as published, for comparison: 4.25 bits a value",
        .k = {.codec = KVF_CODEC_SAW, .bits = 4, .rotate = 1},
        .v = {.codec = KVF_CODEC_SAW, .bits = 4, .rotate = 1},
    },
    /* KIVI: K by channel, V by token, not rotated. */
    KIVI(4, 32, "kivi4-g32", "4 bits, groups of 32: 5 bits a value"),
    KIVI(4, 64, "kivi4-g64", "4 bits, groups of 64: 4.5 bits a value"),
    KIVI(4, 128, "kivi4-g128", "4 bits, groups of 128: 4.25 bits a value"),
    KIVI(2, 32, "kivi2-g32", "2 bits, groups of 32: 3 bits a value"),
    KIVI(2, 64, "kivi2-g64", "2 bits, groups of 64: 2.5 bits a value"),
    KIVI(2, 128, "kivi2-g128", "2 bits, groups of 128: 2.25 bits a value"),
    {.name = NULL},
};

const struct kvf_profile *kvf_profile_find(const char *name)
{
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        if (strcmp(profile->name, name) == 0) {
            return profile;
        }
    }
    return NULL;
}
