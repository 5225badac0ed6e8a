/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu_host.h: which kernels do a piece of work, and in what shape they are launched. Plain
 * arithmetic: nothing here talks to a device, so it is there on machines without one.
 *
 * Each kernel is `extern "C" __global__ void name(struct kvf_gpu_work work, uint32_t tensors)`;
 * tensors has bit 0 for K, bit 1 for V: parts of other tensors are left alone, so that K and V may
 * take different kernels over one list. Higher bits are between kernels and their host side.
 * Launches of one piece of work run in order on one stream.
 */
#ifndef KVF_CODEC_CODEC_GPU_HOST_H
#define KVF_CODEC_CODEC_GPU_HOST_H

#include "codec/codec.h"
#include "codec/codec_gpu.h"

enum {
    KVF_GPU_LAUNCHES_MAX = 6 * KVF_CODEC_KINDS_MAX + 1, /* of one call below */
    KVF_GPU_WHOLE = KVF_CODEC_KINDS_MAX,                /* no kind: all parts */
};

struct kvf_gpu_launch {
    const char *kernel;
    uint32_t n_blocks;           /* thread blocks, one dimension */
    uint32_t blocks_a_processor; /* if not 0: no more than these for each multiprocessor; each
                                    thread block then takes more than one share of the work */
    uint32_t n_threads;
    uint32_t shared_bytes; /* dynamic; over 48 KiB the caller raises the kernel's limit */
    uint32_t tensors;
    uint32_t kind; /* encode: see kvf_gpu_launch_work */
};

/* How the layers of a plan are coded, for kernels. Kinds are those of the plan that have layers, in
 * the order of their first ones. */
struct kvf_gpu_kinds {
    uint32_t n; /* 1: all layers are alike */
    uint16_t n_layers[KVF_CODEC_KINDS_MAX];
    uint8_t layer_kinds[KVF_BLOCK_LAYERS];
    struct kvf_gpu_tensor tensors[KVF_CODEC_KINDS_MAX][2]; /* K, V */
};

/* A tensor's facts for kernels; all zero for a tensor that does not exist. */
void kvf_gpu_tensor_fill(const struct kvf_codec_tensor *tensor, struct kvf_gpu_tensor *out);

void kvf_gpu_kinds_fill(const struct kvf_codec_plan *plan, struct kvf_gpu_kinds *out);

/* Of kinds with deltas: what work.tensors are to be where parts of layers of all kinds are decoded,
 * those of layers by themselves and of deltas. */
void kvf_gpu_loop_tensors(const struct kvf_gpu_kinds *kinds, struct kvf_gpu_tensor tensors_out[2]);

/* A part's `loop`; stored: by what its strip is stored. */
uint8_t kvf_gpu_part_loop(const struct kvf_codec_plan *plan, uint32_t layer,
                          const struct kvf_codec_tensor *stored);

/* The same pages as they are: the kinds of raw blocks. */
void kvf_gpu_kinds_fill_raw(const struct kvf_codec_plan *plan, struct kvf_gpu_kinds *out);

/* Every call below writes up to KVF_GPU_LAUNCHES_MAX launches and returns how many; 0: no kernel
 * can do this, and the C codec has to. For encode, work has all parts of its blocks; for decode,
 * only parts that are stored by the codec that the call names. */

/* Encode blocks of a plan; work.tensors are not read. If all its codecs are of fixed rate the host
 * knows where each part is stored; else `stored` of a block's first part is where its payload
 * begins, and that of its other parts is filled in by the kernels, since sizes are known only on
 * the device. Parts, then sinks and escapes to the raw area behind each block's last part, then the
 * results; the layer tables of these are filled in only if sizes vary. */
uint32_t kvf_gpu_encode(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                        struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX]);
/* Bytes that work.scratch must have for it, on 256. */
uint64_t kvf_gpu_encode_scratch_bytes(const struct kvf_gpu_work *work,
                                      const struct kvf_gpu_kinds *kinds);

/* Of an encode by layers of several kinds: what work.numbers has, n_parts of them, kind by kind.
 * Without these, if there is one kind, work.numbers is 0. */
void kvf_gpu_number_parts(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                          uint32_t *numbers_out);

/* What a kernel of one of these launches is given: work, narrowed down to the launch's kind. */
struct kvf_gpu_work kvf_gpu_launch_work(const struct kvf_gpu_work *work,
                                        const struct kvf_gpu_kinds *kinds, uint32_t kind);

/* The same layer by layer, of plans without V whose strips are of fixed size, for layers that are
 * not all there at once. work has all parts; work.numbers is [n_layers][n_blocks], the numbers of a
 * layer's parts, one after the other; work.scratch, and the results, are zeroed before layer 0. Of
 * deltas parts say in `sums` where sums wait. A launch's kernel is given kvf_gpu_layer_work of its
 * kind; the vectors of a layer are not read any more when its launches have run. 0: no kernel. */
uint32_t kvf_gpu_encode_layer(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                              uint32_t layer,
                              struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX]);
struct kvf_gpu_work kvf_gpu_layer_work(const struct kvf_gpu_work *work,
                                       const struct kvf_gpu_kinds *kinds, uint32_t layer,
                                       uint32_t kind);

/* Behind the last layer: given kvf_gpu_launch_work, it makes tables and results whole. */
struct kvf_gpu_launch kvf_gpu_encode_finish(const struct kvf_gpu_work *work);

/* What an encode has to know of a part's strip. */
void kvf_gpu_part_fill(const struct kvf_codec_tensor *tensor, struct kvf_gpu_part *part);

/* codec: enum kvf_block_codec of the parts, which are of layers of one kind: that of work.tensors.
 * Parts that are stored raw may be of any layers. Where there are deltas, work.tensors are those of
 * kvf_gpu_loop_tensors, codec is that of theirs, and codec_closed_loop_gpu.h says the rest. */
uint32_t kvf_gpu_decode(const struct kvf_gpu_work *work, uint8_t codec,
                        struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX]);

/* Put vectors of raw areas into pages, after the decode of the same blocks; parts are of layers of
 * one kind. Here a part's `stored`
 * is the section of the raw area (codec_layout.h) and n_vectors the number of its vectors. The
 * content is not trusted: indices out of range are skipped. */
uint32_t kvf_gpu_patch(const struct kvf_gpu_work *work,
                       struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX]);

/* The same without raw areas, by whoever has encoded: parts of saw or tq, all tokens of them, whose
 * escapes have been counted (work.results), from `source`. Behind the decode. Returns 1, or 0. */
uint32_t kvf_gpu_restore(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out);

#endif /* KVF_CODEC_CODEC_GPU_HOST_H */
