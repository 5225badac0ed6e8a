/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.cc: see kernels.h. The kernels are those of codec_closed_loop.cu, codec_exact.cu,
 * codec_kivi.cu, codec_raw.cu, codec_tq.cu and, in some of their widths, codec_saw.cu; beside them
 * encoders that are wrong on purpose.
 */
#include "tests/gpu/emulate/cuda_builtins.cuh"

#include "codec/codec_closed_loop_tile.cuh"
#include "codec/codec_exact.cu"
#include "codec/codec_kivi_fast.cuh"
#include "codec/codec_kivi_generic.cuh"
#include "codec/codec_latent.cu"
#include "codec/codec_raw.cu"
#include "codec/codec_rebuild.cu"
#include "codec/codec_saw_decode.cuh"
#include "codec/codec_saw_encode.cuh"
#include "codec/codec_saw_encode_zeros.cuh"
#include "codec/codec_saw_generic.cuh"
#include "codec/codec_tq_decode.cuh"
#include "codec/codec_tq_encode.cuh"
#include "codec/codec_tq_generic.cuh"
#include "codec/codec_tq_split.cuh"
#include "codec/codec_tq_split_decode.cuh"

#include "tests/gpu/emulate/kernels.h"

#include <stdio.h>
#include <string.h>

#define SAW(dim, bits)                                                                             \
    {"kvf_saw_encode_" #dim "_" #bits, kvf::encode_rows_fast<dim, bits>},                          \
    {                                                                                              \
        "kvf_saw_decode_" #dim "_" #bits, kvf::decode_row_fast<dim, bits>                          \
    }

#define TQ(dim, bits)                                                                              \
    {"kvf_tq_encode_" #dim "_" #bits, kvf::tq_encode_rows_fast<dim, bits>},                        \
    {                                                                                              \
        "kvf_tq_decode_" #dim "_" #bits, kvf::tq_decode_row_fast<dim, bits>                        \
    }

/* A kernel as the driver calls it. */
template <void (*kernel)(const struct kvf_gpu_work, uint32_t)>
static void by_value(const struct kvf_gpu_work &work, uint32_t tensors)
{
    kernel(work, tensors);
}

/* One for which all tensors are one. */
template <void (*kernel)(const struct kvf_gpu_work &)>
static void of_work(const struct kvf_gpu_work &work, uint32_t)
{
    kernel(work);
}

/* One of other work: see codec_device_rebuild and codec_device_latent. */
template <typename T, void (*kernel)(const T)>
static void by_address(const struct kvf_gpu_work &work, uint32_t tensors)
{
    (void)tensors;
    kernel(*kvf::at_address<const T>(work.parts));
}

static const struct {
    const char *name;
    emulate::kernel_function run;
} kernels[] = {
    SAW(64, 3),
    SAW(64, 4),
    SAW(128, 2),
    SAW(128, 3),
    SAW(128, 4),
    SAW(128, 5),
    SAW(128, 6),
    SAW(128, 8),
    SAW(256, 3),
    SAW(256, 4),
    SAW(256, 5),
    SAW(256, 8),
    {"kvf_saw_search_128_2", kvf::encode_rows_fast<128, 2, kvf::encode_variant::search>},
    {"kvf_saw_search_128_3", kvf::encode_rows_fast<128, 3, kvf::encode_variant::search>},
    {"kvf_saw_encode_zeros_128_2", kvf::encode_row_zeros<2>},
    {"kvf_saw_encode_zeros_128_3", kvf::encode_row_zeros<3>},
    {"kvf_saw_encode_zeros_128_4", kvf::encode_row_zeros<4>},
    {"kvf_saw_decode_zeros_128_2", kvf::decode_row_zeros<128, 2>},
    {"kvf_saw_decode_zeros_128_3", kvf::decode_row_zeros<128, 3>},
    {"kvf_saw_decode_zeros_128_4", kvf::decode_row_zeros<128, 4>},
    {"kvf_saw_encode", kvf::encode_row_generic},
    {"kvf_saw_decode", kvf::decode_row_generic},
    {"kvf_loop_encode_tile_2", of_work<kvf::loop_encode_tile<2>>},
    {"kvf_loop_encode_tile_3", of_work<kvf::loop_encode_tile<3>>},
    {"kvf_loop_encode_tile_4", of_work<kvf::loop_encode_tile<4>>},
    {"kvf_loop_decode_tile_2", of_work<kvf::loop_decode_tile<2>>},
    {"kvf_loop_decode_tile_3", of_work<kvf::loop_decode_tile<3>>},
    {"kvf_loop_decode_tile_4", of_work<kvf::loop_decode_tile<4>>},
    {"kvf_loop_encode_128", of_work<kvf::loop_encode<true>>},
    {"kvf_loop_encode", of_work<kvf::loop_encode<false>>},
    {"kvf_loop_decode_128", of_work<kvf::loop_decode<true>>},
    {"kvf_loop_decode", of_work<kvf::loop_decode<false>>},
    {"kvf_kivi_encode_128_2", kvf::kivi::encode_fast<128, 2>},
    {"kvf_kivi_encode_128_4", kvf::kivi::encode_fast<128, 4>},
    {"kvf_kivi_encode", kvf::kivi::encode_generic},
    {"kvf_kivi_decode_128_2", kvf::kivi::decode_fast<128, 2>},
    {"kvf_kivi_decode_128_4", kvf::kivi::decode_fast<128, 4>},
    {"kvf_kivi_decode", kvf::kivi::decode_generic},
    TQ(128, 2),
    TQ(128, 3),
    TQ(128, 4),
    {"kvf_tq_encode_split_2", kvf::tq_encode_row_split<2>},
    {"kvf_tq_encode_split_3", kvf::tq_encode_row_split<3>},
    {"kvf_tq_decode_split_2", kvf::tq_decode_row_split<2>},
    {"kvf_tq_decode_split_3", kvf::tq_decode_row_split<3>},
    {"kvf_tq_encode", kvf::tq_encode_row_generic},
    {"kvf_tq_decode", kvf::tq_decode_row_generic},
    {"kvf_exact_count_bf16", by_value<kvf_exact_count_bf16>},
    {"kvf_exact_encode_bf16", by_value<kvf_exact_encode_bf16>},
    {"kvf_exact_decode_bf16", by_value<kvf_exact_decode_bf16>},
    {"kvf_exact_count_f32", by_value<kvf_exact_count_f32>},
    {"kvf_exact_encode_f32", by_value<kvf_exact_encode_f32>},
    {"kvf_exact_decode_f32", by_value<kvf_exact_decode_f32>},
    {"kvf_exact_choose_short", by_value<kvf_exact_choose_short>},
    {"kvf_exact_choose", by_value<kvf_exact_choose>},
    {"kvf_exact_place", by_value<kvf_exact_place>},
    {"kvf_escapes_write", by_value<kvf_escapes_write>},
    {"kvf_raw_encode", by_value<kvf_raw_encode>},
    {"kvf_raw_decode", by_value<kvf_raw_decode>},
    {"kvf_escapes_count", by_value<kvf_escapes_count>},
    {"kvf_escapes_write_fixed", by_value<kvf_escapes_write_fixed>},
    {"kvf_escapes_patch", by_value<kvf_escapes_patch>},
    {"kvf_escapes_restore", by_value<kvf_escapes_restore>},
    {"kvf_rebuild", by_address<struct kvf_gpu_rebuild, kvf_rebuild>},
    {"kvf_rebuild_fast", by_address<struct kvf_gpu_rebuild, kvf_rebuild_fast>},
    {"kvf_latent_clean", by_address<struct kvf_gpu_latent_work, kvf_latent_clean>},
    {"kvf_latent_narrow", by_address<struct kvf_gpu_latent_work, kvf_latent_narrow>},
    {"kvf_latent_subtract", by_address<struct kvf_gpu_latent_work, kvf_latent_subtract>},
    {"kvf_test_saw_search_last", kvf::encode_rows_fast<128, 3, kvf::encode_variant::search_last>},
    {"kvf_test_saw_encode_swapped", kvf::encode_rows_fast<128, 8, kvf::encode_variant::swapped>},
    {"kvf_test_saw_encode_one_barrier",
     kvf::encode_rows_fast<128, 4, kvf::encode_variant::one_mean_barrier>},
};

void emulate_late_copies(uint32_t n_groups)
{
    emulate::late_groups = n_groups;
}

enum emulate_outcome emulate_launch(const char *kernel, const struct kvf_gpu_work *work,
                                    const struct kvf_gpu_launch *shape, uint32_t n_blocks,
                                    uint32_t seed, char text_out[EMULATE_TEXT_BYTES])
{
    for (const auto &one : kernels) {
        if (strcmp(one.name, kernel) != 0) {
            continue;
        }
        const emulate::launch what = {
            one.run, work, shape->tensors, n_blocks, shape->n_threads, shape->shared_bytes};
        for (uint32_t block = 0; block < n_blocks; block++) {
            std::string stuck = emulate::run_thread_block(what, block, seed + block);
            if (!stuck.empty()) {
                snprintf(text_out, EMULATE_TEXT_BYTES, "thread block %u:%s", block, stuck.c_str());
                return EMULATE_STUCK;
            }
        }
        return EMULATE_DONE;
    }
    return EMULATE_MISSING;
}
