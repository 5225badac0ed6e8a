/* SPDX-License-Identifier: Apache-2.0
 *
 * profiles.c: the names that users choose, and what they stand for.
 *
 * Bits a value are for head dim 128, bf16 and chunks of 256 tokens, metadata counted, sinks not.
 */
#include "codec/codec.h"

#include <string.h>

/* Below 4 bits the first layers and the last ones cost most: they are stored at 8 bits. */
#define EDGE_LAYERS 2

#define RAW                                                                                        \
    {                                                                                              \
        .codec = KVF_CODEC_RAW                                                                     \
    }
#define EXACT                                                                                      \
    {                                                                                              \
        .codec = KVF_CODEC_EXACT, .bits = KVF_BITS_EXACT                                           \
    }
/* Rotation with signs: a plain Hadamard step maps a constant vector onto one coefficient. */
#define SAW(width, more_flags, clipping)                                                           \
    {                                                                                              \
        .codec = KVF_CODEC_SAW, .bits = (width), .flags = KVF_TENSOR_SIGNS | (more_flags),         \
        .rotate = 1, .clip = (clipping), .rot_seed = KVF_PROFILE_ROTATION_SEED                     \
    }
/* Token by token over the whole range, as K and V are. */
#define NAIVE(width, profile_name, profile_use)                                                    \
    {                                                                                              \
        .name = (profile_name), .use = (profile_use),                                              \
        .k = {.codec = KVF_CODEC_SAW, .bits = (width)},                                            \
        .v = {.codec = KVF_CODEC_SAW, .bits = (width)},                                            \
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

/* Centred where it pays: K has means that are large beside what is left, V has not. */
#define TQ(width, more_flags)                                                                      \
    {                                                                                              \
        .codec = KVF_CODEC_TQ, .bits = (width), .flags = KVF_TENSOR_SIGNS | (more_flags),          \
        .rotate = 1, .rot_seed = KVF_PROFILE_ROTATION_SEED                                         \
    }
#define TQ_K(width, more_flags)                                                                    \
    TQ(width, KVF_TENSOR_CENTER | KVF_TENSOR_SCALE_MATCHED | (more_flags))
#define TQ_V(width, more_flags) TQ(width, KVF_TENSOR_SCALE_LEAST_SQUARES | (more_flags))

/* Inputs of layers. An offset of as many bits as a code has is enough: a 32nd of a bit a value at 4
 * bits where fp16 takes an 8th. In the middle between two codes it costs least at 3 and 2 bits. */
#define X_KINDS       (1 << KVF_KIND_X | 1 << KVF_KIND_XG)
#define X_ZERO(width) ((width) < 4 ? KVF_ZERO_HALF : KVF_ZERO_INT)
#define X_CODEC(width, zero)                                                                       \
    {                                                                                              \
        .codec = KVF_CODEC_SAW, .bits = (width), .flags = KVF_TENSOR_SIGNS, .rotate = 1,           \
        .clip = KVF_CLIP_WIDE, .rot_seed = KVF_PROFILE_ROTATION_SEED, .zero_kind = (zero)          \
    }
#define X(width, zero, profile_name, profile_use)                                                  \
    {                                                                                              \
        .name = (profile_name), .use = (profile_use), .x_kinds = X_KINDS,                          \
        .k = X_CODEC(width, zero)                                                                  \
    }
/* As published: neither rotated nor clipped, an offset in fp16. */
#define X_PAPER_CODEC(width)                                                                       \
    {                                                                                              \
        .codec = KVF_CODEC_SAW, .bits = (width)                                                    \
    }
#define X_PAPER(width, profile_name, profile_use)                                                  \
    {                                                                                              \
        .name = (profile_name), .use = (profile_use), .x_kinds = X_KINDS,                          \
        .k = X_PAPER_CODEC(width)                                                                  \
    }

/* The first layers at 4 bits, then differences from layer to layer of `width` bits: those of X made
 * here (closed_loop.h), those of XG by the caller. base: the last layer that is no difference. */
#define CL_FIRST_LAYERS 3
#define CL(kind, base, rebase, codec, first_codec, profile_name, profile_use)                      \
    {                                                                                              \
        .name = (profile_name), .use = (profile_use), .x_kinds = 1 << (kind),                      \
        .first_layers = CL_FIRST_LAYERS, .base_layer = (base), .rebase_layers = (rebase),          \
        .k = codec, .edge_k = first_codec                                                          \
    }
#define XCL(width, rebase, profile_name, profile_use)                                              \
    CL(KVF_KIND_X, 2, rebase, X_CODEC(width, X_ZERO(width)), X_CODEC(4, X_ZERO(4)), profile_name,  \
       profile_use)
#define XCL_PAPER(width, profile_name, profile_use)                                                \
    CL(KVF_KIND_X, 2, 0, X_PAPER_CODEC(width), X_PAPER_CODEC(4), profile_name, profile_use)
#define XGCL(width, base, profile_name, profile_use)                                               \
    CL(KVF_KIND_XG, base, 0, X_CODEC(width, X_ZERO(width)), X_CODEC(4, X_ZERO(4)), profile_name,   \
       profile_use)
#define XGCL_PAPER(width, profile_name, profile_use)                                               \
    CL(KVF_KIND_XG, 2, 0, X_PAPER_CODEC(width), X_PAPER_CODEC(4), profile_name, profile_use)

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
        .k = SAW(8, KVF_TENSOR_CENTER, KVF_CLIP_FIXED),
        .v = SAW(4, 0, KVF_CLIP_FIXED),
    },
    {
        .name = "balanced",
        .use = "K 4 bits centred, V 4 bits: 4.28 bits a value",
        .k = SAW(4, KVF_TENSOR_CENTER, KVF_CLIP_FIXED),
        .v = SAW(4, 0, KVF_CLIP_FIXED),
    },
    {
        .name = "saw8",
        .use = "K and V 8 bits: 8.25 bits a value",
        .k = SAW(8, 0, KVF_CLIP_FIXED),
        .v = SAW(8, 0, KVF_CLIP_FIXED),
    },
    {
        .name = "saw6",
        .use = "K 6 bits centred, V 6 bits: 6.28 bits a value",
        .k = SAW(6, KVF_TENSOR_CENTER, KVF_CLIP_FIXED),
        .v = SAW(6, 0, KVF_CLIP_FIXED),
    },
    {
        .name = "saw5",
        .use = "K 5 bits centred, V 5 bits: 5.28 bits a value",
        .k = SAW(5, KVF_TENSOR_CENTER, KVF_CLIP_FIXED),
        .v = SAW(5, 0, KVF_CLIP_FIXED),
    },
    {
        .name = "saw3",
        .use = "K 3 bits centred, V 3 bits: 3.28 bits a value",
        .k = SAW(3, KVF_TENSOR_CENTER, KVF_CLIP_FIXED),
        .v = SAW(3, 0, KVF_CLIP_FIXED),
    },
    {
        .name = "saw2",
        .use = "K 2 bits centred, V 2 bits: 2.28 bits a value",
        .k = SAW(2, KVF_TENSOR_CENTER, KVF_CLIP_FIXED),
        .v = SAW(2, 0, KVF_CLIP_FIXED),
    },
    {
        /* The encoder tries ratios vector by vector; decoders see no difference. */
        .name = "saw3-search",
        .use = "as saw3, with the best of 3 clip ratios a vector",
        .k = SAW(3, KVF_TENSOR_CENTER, KVF_CLIP_SEARCH),
        .v = SAW(3, 0, KVF_CLIP_SEARCH),
    },
    {
        .name = "saw2-search",
        .use = "as saw2, with the best of 3 clip ratios a vector",
        .k = SAW(2, KVF_TENSOR_CENTER, KVF_CLIP_SEARCH),
        .v = SAW(2, 0, KVF_CLIP_SEARCH),
    },
    {
        .name = "saw4-search9",
        .use = "as balanced, with the best of 9 clip ratios a vector",
        .k = SAW(4, KVF_TENSOR_CENTER, KVF_CLIP_WIDE),
        .v = SAW(4, 0, KVF_CLIP_WIDE),
    },
    {
        .name = "saw3-search9",
        .use = "as saw3, with the best of 9 clip ratios a vector",
        .k = SAW(3, KVF_TENSOR_CENTER, KVF_CLIP_WIDE),
        .v = SAW(3, 0, KVF_CLIP_WIDE),
    },
    {
        .name = "saw2-search9",
        .use = "as saw2, with the best of 9 clip ratios a vector",
        .k = SAW(2, KVF_TENSOR_CENTER, KVF_CLIP_WIDE),
        .v = SAW(2, 0, KVF_CLIP_WIDE),
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
    {
        /* The same encoder at other widths. */
        .name = "saw3-paper",
        .use = "K and V 3 bits as by saw4-paper: 3.25 bits a value",
        .k = {.codec = KVF_CODEC_SAW, .bits = 3, .rotate = 1},
        .v = {.codec = KVF_CODEC_SAW, .bits = 3, .rotate = 1},
    },
    {
        .name = "saw2-paper",
        .use = "K and V 2 bits as by saw4-paper: 2.25 bits a value",
        .k = {.codec = KVF_CODEC_SAW, .bits = 2, .rotate = 1},
        .v = {.codec = KVF_CODEC_SAW, .bits = 2, .rotate = 1},
    },
    /* What rotation, centring and clipping are worth. */
    NAIVE(4, "naive4", "4 bits, not rotated, for comparison: 4.25 bits a value"),
    NAIVE(3, "naive3", "3 bits, not rotated, for comparison: 3.25 bits a value"),
    NAIVE(2, "naive2", "2 bits, not rotated, for comparison: 2.25 bits a value"),
    /* KIVI: K by channel, V by token, not rotated. */
    KIVI(4, 32, "kivi4-g32", "4 bits, groups of 32: 5 bits a value"),
    KIVI(4, 64, "kivi4-g64", "4 bits, groups of 64: 4.5 bits a value"),
    KIVI(4, 128, "kivi4-g128", "4 bits, groups of 128: 4.25 bits a value"),
    KIVI(2, 32, "kivi2-g32", "2 bits, groups of 32: 3 bits a value"),
    KIVI(2, 64, "kivi2-g64", "2 bits, groups of 64: 2.5 bits a value"),
    KIVI(2, 128, "kivi2-g128", "2 bits, groups of 128: 2.25 bits a value"),
    {
        .name = "tq4",
        .use = "Lloyd-Max levels, 4 bits, K centred: 4.16 bits a value",
        .k = TQ_K(4, 0),
        .v = TQ_V(4, 0),
    },
    {
        /* A fourth of the channels, those with the largest magnitudes, has a bit more. */
        .name = "tq3.5",
        .use = "Lloyd-Max levels, 3 and 4 bits by channel, K centred: 3.54 bits a value",
        .k = TQ_K(3, KVF_TENSOR_SPLIT),
        .v = TQ_V(3, KVF_TENSOR_SPLIT),
    },
    {
        .name = "tq3",
        .use = "Lloyd-Max levels, 3 bits, K centred: 3.16 bits a value",
        .k = TQ_K(3, 0),
        .v = TQ_V(3, 0),
    },
    {
        .name = "tq2.5",
        .use = "Lloyd-Max levels, 2 and 3 bits by channel, K centred: 2.54 bits a value",
        .k = TQ_K(2, KVF_TENSOR_SPLIT),
        .v = TQ_V(2, KVF_TENSOR_SPLIT),
    },
    {
        .name = "tq2",
        .use = "Lloyd-Max levels, 2 bits, K centred: 2.16 bits a value",
        .k = TQ_K(2, 0),
        .v = TQ_V(2, 0),
    },
    {
        /* At 2 bits V's mean is worth its bytes, and V's norms are worth more than its least
         * squared error. */
        .name = "tq2-centred",
        .use = "Lloyd-Max levels, 2 bits, K and V centred: 2.19 bits a value",
        .k = TQ_K(2, 0),
        .v = TQ_K(2, 0),
    },
    /* TurboQuant as published: the norm is the scale, nothing is centred. */
    {
        .name = "tq4-paper",
        .use = "TurboQuant at 4 bits as published, for comparison: 4.13 bits a value",
        .k = TQ(4, 0),
        .v = TQ(4, 0),
    },
    {
        .name = "tq3-paper",
        .use = "TurboQuant at 3 bits as published, for comparison: 3.13 bits a value",
        .k = TQ(3, 0),
        .v = TQ(3, 0),
    },
    {
        .name = "tq2-paper",
        .use = "TurboQuant at 2 bits as published, for comparison: 2.13 bits a value",
        .k = TQ(2, 0),
        .v = TQ(2, 0),
    },
    {
        .name = "tq3-unbiased",
        .use = "as tq3 with unbiased products, for comparison: 3.16 bits a value",
        .k = TQ(3, KVF_TENSOR_CENTER | KVF_TENSOR_SCALE_UNBIASED),
        .v = TQ(3, KVF_TENSOR_SCALE_UNBIASED),
    },
    /* TurboQuant's unbiased form: a bit of each code is the sign of a projection of what is left.
     * Its noise is large, and attention does not average it out: for comparison only. */
    {
        .name = "tq4-qjl",
        .use = "3 bits and a sign of the residual, for comparison: 4.25 bits a value",
        .k = TQ(4, KVF_TENSOR_RESIDUAL),
        .v = TQ(4, KVF_TENSOR_RESIDUAL),
    },
    {
        .name = "tq3-qjl",
        .use = "2 bits and a sign of the residual, for comparison: 3.25 bits a value",
        .k = TQ(3, KVF_TENSOR_RESIDUAL),
        .v = TQ(3, KVF_TENSOR_RESIDUAL),
    },
    {
        .name = "tq2-qjl",
        .use = "1 bit and a sign of the residual, for comparison: 2.25 bits a value",
        .k = TQ(2, KVF_TENSOR_RESIDUAL),
        .v = TQ(2, KVF_TENSOR_RESIDUAL),
    },
    {
        /* Bettered by tq4 and kivi4-g32 wherever both were measured: docs/performance.md. */
        .name = "dense",
        .use = "K 4 bits centred, V 3, 2 + 2 edge layers 8: 3.72 bits and edges; tq4 loses less",
        .edge_layers = EDGE_LAYERS,
        .k = SAW(4, KVF_TENSOR_CENTER, 1),
        .v = TQ_V(3, 0),
        .edge_k = SAW(8, KVF_TENSOR_CENTER, 1),
        .edge_v = SAW(8, 0, 1),
    },
    {
        /* What loses least of the sizes between tq2.5 and tq3. Layers at the ends are like others:
         * 8 bits for them cost more than they bring where it was measured (max-edges). */
        .name = "max",
        .use = "Lloyd-Max levels, K 3 bits, V 2, both centred: 2.69 bits a value",
        .k = TQ_K(3, 0),
        .v = TQ_K(2, 0),
    },
    {
        .name = "max-edges",
        .use = "K 3 and 4 bits, V 2, 2 + 2 edge layers 8, 4 sinks raw: 2.85 bits and edges; tq4 "
               "loses less",
        .edge_layers = EDGE_LAYERS,
        .sink_tokens = 4,
        .k = TQ_K(3, KVF_TENSOR_SPLIT),
        .v = TQ_V(2, 0),
        .edge_k = SAW(8, KVF_TENSOR_CENTER, 1),
        .edge_v = SAW(8, 0, 1),
    },
    X(8, X_ZERO(8), "x8", "layer inputs, 8 bits: 8.19 bits a value"),
    X(6, X_ZERO(6), "x6", "layer inputs, 6 bits: 6.17 bits a value"),
    X(4, X_ZERO(4), "x4", "layer inputs, 4 bits, best of 9 clip ratios: 4.16 bits a value"),
    X(3, X_ZERO(3), "x3", "layer inputs, 3 bits, best of 9 clip ratios: 3.15 bits a value"),
    X(2, X_ZERO(2), "x2", "layer inputs, 2 bits, best of 9 clip ratios: 2.14 bits a value"),
    X(2, KVF_ZERO_F16_LO, "x2-lo", "as x2 with fp16 offsets, for comparison: 2.25 bits a value"),
    X_PAPER(4, "x4-paper", "XQuant at 4 bits as published, for comparison: 4.25 bits a value"),
    X_PAPER(3, "x3-paper", "XQuant at 3 bits as published, for comparison: 3.25 bits a value"),
    X_PAPER(2, "x2-paper", "XQuant at 2 bits as published, for comparison: 2.25 bits a value"),
    XCL(4, 0, "xcl4", "layer inputs by differences, 4 bits: 4.16 bits a value"),
    XCL(3, 0, "xcl3", "layer inputs by differences, 3 bits, 3 layers 4: 3.15 bits and those"),
    XCL(2, 0, "xcl2", "layer inputs by differences, 2 bits, 3 layers 4: 2.14 bits and those"),
    CL(KVF_KIND_X, 2, 0, X_CODEC(2, KVF_ZERO_F16_LO), X_CODEC(4, KVF_ZERO_F16_LO), "xcl2-lo",
       "as xcl2 with fp16 offsets, for comparison: 2.25 bits and those"),
    XCL_PAPER(4, "xcl4-paper", "XQuant-CL at 4 bits as published, for comparison"),
    XCL_PAPER(3, "xcl3-paper", "XQuant-CL at 3 bits as published, for comparison"),
    XCL_PAPER(2, "xcl2-paper", "XQuant-CL at 2 bits as published, for comparison"),
    XCL(3, 8, "xcl3-g8", "as xcl3, each 8th layer by itself at 4 bits"),
    XCL(3, 4, "xcl3-g4", "as xcl3, each 4th layer by itself at 4 bits"),
    XCL(3, 2, "xcl3-g2", "as xcl3, each 2nd layer by itself at 4 bits"),
    XCL(2, 8, "xcl2-g8", "as xcl2, each 8th layer by itself at 4 bits"),
    XCL(2, 4, "xcl2-g4", "as xcl2, each 4th layer by itself at 4 bits"),
    XCL(2, 2, "xcl2-g2", "as xcl2, each 2nd layer by itself at 4 bits"),
    XGCL(4, 2, "xgcl4", "latents of differences, 4 bits: 4.16 bits a value"),
    XGCL(3, 2, "xgcl3", "latents of differences, 3 bits, 3 layers 4: 3.15 bits and those"),
    XGCL(2, 2, "xgcl2", "latents of differences, 2 bits, 3 layers 4: 2.14 bits and those"),
    XGCL(3, 0, "xgcl3-d1", "as xgcl3 with differences from layer 1 on"),
    XGCL(2, 0, "xgcl2-d1", "as xgcl2 with differences from layer 1 on"),
    CL(KVF_KIND_XG, 2, 0, X_CODEC(3, KVF_ZERO_F16_LO), X_CODEC(4, KVF_ZERO_F16_LO), "xgcl3-lo",
       "as xgcl3 with fp16 offsets, for comparison: 3.25 bits and those"),
    CL(KVF_KIND_XG, 2, 0, X_CODEC(2, KVF_ZERO_F16_LO), X_CODEC(4, KVF_ZERO_F16_LO), "xgcl2-lo",
       "as xgcl2 with fp16 offsets, for comparison: 2.25 bits and those"),
    XGCL_PAPER(4, "xgcl4-paper", "XQuant-CL of latents at 4 bits as published, for comparison"),
    XGCL_PAPER(3, "xgcl3-paper", "XQuant-CL of latents at 3 bits as published, for comparison"),
    XGCL_PAPER(2, "xgcl2-paper", "XQuant-CL of latents at 2 bits as published, for comparison"),
    {.name = NULL},
};

bool kvf_profile_takes(const struct kvf_profile *profile, uint8_t kind)
{
    const uint32_t kv = 1u << KVF_KIND_KV | 1u << KVF_KIND_MLA;
    uint32_t kinds = profile->x_kinds != 0 ? profile->x_kinds : kv;
    return profile->lossless || (kinds >> kind & 1) != 0;
}

const char *kvf_profile_kinds(const struct kvf_profile *profile)
{
    switch (profile->x_kinds) {
    case 0:
        return profile->lossless ? "any" : "KV and MLA";
    case 1 << KVF_KIND_X:
        return "X";
    case 1 << KVF_KIND_XG:
        return "XG";
    default:
        return "X and XG";
    }
}

const struct kvf_profile *kvf_profile_find(const char *name)
{
    for (const struct kvf_profile *profile = kvf_profiles; profile->name != NULL; profile++) {
        if (strcmp(profile->name, name) == 0) {
            return profile;
        }
    }
    return NULL;
}
