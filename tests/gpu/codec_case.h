/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_case.h: blocks through the kernels and through the C codecs, compared byte by byte.
 */
#ifndef KVF_TESTS_GPU_CODEC_CASE_H
#define KVF_TESTS_GPU_CODEC_CASE_H

#include "codec/profile_table.h"
#include "tests/unit/codec/codec_fixture.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Layouts that engines use: B pages, N tokens in one, H heads, D elements. */
enum case_layout {
    CASE_HND,         /* (B, H, N, 2D) */
    CASE_NHD,         /* (B, N, H, 2D) */
    CASE_SPLIT_FIRST, /* (2, B, N, H, D) */
    CASE_SPLIT_PAGE,  /* (B, 2, N, H, D) */
    CASE_SLOTS,       /* one token a page */
    CASE_PADDED,      /* tokens and pages longer than they need be, on 16 bytes */
    CASE_ELEMENT,     /* addresses on one element only */
    CASE_FAR,         /* pages more than 2^32 bytes apart */
    CASE_LAYOUTS,
};

enum case_fill {
    CASE_NORMAL,  /* as KV is: few escapes */
    CASE_HARD,    /* what breaks codecs, see fixture_fill_hard */
    CASE_BITS,    /* random bits: exact does not pay */
    CASE_TORN,    /* exact: some chunks of random exponents in others that are constant */
    CASE_WIDE,    /* exact: exponents far apart, zeros among them */
    CASE_TIES,    /* exact: 17 exponents, equally frequent */
    CASE_BROKEN,  /* a NaN in every fourth vector of one layer's K: more escapes than saw takes */
    CASE_ALIGNED, /* bf16: one rotated coefficient of K is large, and all but its last bits mean */
    CASE_NEAR_TIES, /* saw's search: for K two ratios are nearly alike; below 128 tokens */
    CASE_FILLS,
};

struct codec_case {
    const char *profile;
    int dtype;
    uint32_t n_layers;
    uint32_t n_heads;
    uint32_t dim_k;
    uint32_t dim_v;
    uint32_t n_tokens;
    uint32_t n_tokens_odd; /* of every second block, and fewer; 0: as many */
    uint32_t n_blocks;
    uint32_t sink_tokens;
    uint32_t tokens_a_page; /* 0: what the layout has */
    uint32_t token_start;   /* of the first block; others do not begin a sequence */
    enum case_layout layout;
    enum case_fill fill;
    bool is_mla;
    uint8_t kind; /* enum kvf_tensor_kind; 0: KV, or MLA where is_mla says so */
    /* a profile of a model's own, instead of one by name; geometry is the table's */
    const struct kvf_profile_table *table;
    uint32_t head_first; /* of the model's heads */
    bool is_wrong;       /* the encoder is, on purpose: is it seen? */
};

enum {
    CASE_SKIPPED = 77, /* what a test program ends with where there is no GPU */
};

/* Open the device, print and take the seed; with $KVF_TEST_ONLY run only tests of such names (* and
 * ? stand for anything). False: there is no GPU. */
bool codec_case_begin(struct kvf_random_seeded *random);

/* Two blocks of 53 tokens, two layers of three heads of 128. */
struct codec_case codec_case_of(const char *profile, int dtype, enum case_layout layout,
                                enum case_fill fill);

/* The same of other dims and tokens: bf16 of hard values, as (H, N, D). */
struct codec_case codec_case_sized(const char *profile, uint32_t dim, uint32_t n_tokens);

/* The i-th of shapes that end codecs' chunks, pieces and rows everywhere: odd dims, one vector a
 * chunk, no V. False: there are no more. */
bool codec_case_shape(struct codec_case *c, size_t i);

/* Encode and decode, whole and some ranges of tokens; fails the test at the first difference. True
 * if all blocks were encoded by kernels; false: the kernels asked for the host, rightly. Of a wrong
 * encoder: true if all blocks are wrong. */
bool codec_case_run(const struct codec_case *c, struct kvf_random_seeded *random);

/* A record of the case whose payload has had some bytes changed, decoded by the kernels. The result
 * does not matter; what lies around the pages must be as it was. */
void codec_case_run_hostile(const struct codec_case *c, struct kvf_random_seeded *random);

#endif /* KVF_TESTS_GPU_CODEC_CASE_H */
