/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu.c: which kernels a piece of work takes, and how many thread blocks of each. The
 * kernels' own files describe how they find their part.
 */
#include "codec/codec_gpu_host.h"

#include "codec/codec_gpu_scratch.h"
#include "codec/codec_saw_gpu.h"

#include <assert.h>
#include <string.h>

_Static_assert((int)KVF_ESCAPES_SHARE == (int)KVF_CODEC_ESCAPE_SHARE,
               "kernels give up where the C codecs do");
_Static_assert((int)KVF_GPU_CLIPS_MAX == (int)KVF_CODEC_CLIPS_MAX, "one list of ratios");
_Static_assert((int)KVF_EXACT_PLACE_THREADS >= 2 * (int)KVF_LAYERS_MAX, "one thread a part");

/* Launches so far. */
struct launches {
    struct kvf_gpu_launch *list;
    uint32_t n;
};

static void add_launch(struct launches *launches, const char *kernel, uint64_t n_blocks,
                       uint32_t n_threads, uint32_t tensors)
{
    assert(launches->n < KVF_GPU_LAUNCHES_MAX);
    launches->list[launches->n++] = (struct kvf_gpu_launch){
        .kernel = kernel,
        .n_blocks = (uint32_t)n_blocks,
        .n_threads = n_threads,
        .tensors = tensors,
    };
}

/* Codecs of fixed rate with codes: each has a file of its own that chooses among its kernels. Both
 * calls are for the tensors of the work that are of the codec, and write up to
 * KVF_CODED_LAUNCHES_MAX launches; 0: no kernel does this.
 *   encode   parts are written whole, gaps included. A block's result->n_escapes is added to for
 *            each escape and sink, and not touched if there is none; the raw area, the other fields
 *            of the result, and parts with too many escapes are the business of later launches.
 *   decode   all parts of these tensors are stored by the codec. Escapes are written with anything;
 *            they are patched afterwards. */
typedef uint32_t coded_launches(const struct kvf_gpu_work *work,
                                struct kvf_gpu_launch *launches_out);

enum {
    KVF_CODED_LAUNCHES_MAX = 2, /* K and V by different kernels */
};

static const struct coded_kernels {
    uint8_t codec; /* enum kvf_block_codec */
    coded_launches *encode;
    coded_launches *decode;
} coded_kernels[] = {
    {KVF_CODEC_SAW, kvf_saw_gpu_encode, kvf_saw_gpu_decode},
};

enum {
    N_CODED = sizeof(coded_kernels) / sizeof(coded_kernels[0]),
};

/* Bits of the tensors that are there; of those stored by codec; of those with codes. */
static uint32_t tensors_there(const struct kvf_gpu_work *work)
{
    return work->has_v != 0 ? 3 : 1;
}

static uint32_t tensors_of(const struct kvf_gpu_work *work, uint8_t codec)
{
    uint32_t tensors = 0;
    for (uint32_t i = 0; i < 2; i++) {
        tensors |= (uint32_t)(work->tensors[i].codec == codec) << i;
    }
    return tensors & tensors_there(work);
}

static uint32_t coded_tensors(const struct kvf_gpu_work *work)
{
    uint32_t tensors = 0;
    for (uint32_t i = 0; i < N_CODED; i++) {
        tensors |= tensors_of(work, coded_kernels[i].codec);
    }
    return tensors;
}

static bool work_is_valid(const struct kvf_gpu_work *work)
{
    /* the facts that kernels are given are those of all layers: none has layers of two kinds */
    bool has_edges = ((work->tensors[0].flags | work->tensors[1].flags) & KVF_TENSOR_EDGES) != 0;
    return work->n_parts >= 1 && work->n_parts <= KVF_GPU_PARTS_MAX && work->tokens_max >= 1 &&
           work->tokens_a_page >= 1 && !has_edges;
}

void kvf_gpu_tensor_fill(const struct kvf_codec_tensor *tensor, struct kvf_gpu_tensor *out)
{
    memset(out, 0, sizeof(*out));
    if (tensor->dim == 0) {
        return;
    }
    const struct kvf_block_tensor *descriptor = &tensor->descriptor;
    *out = (struct kvf_gpu_tensor){
        .n_heads = tensor->n_heads,
        .dim = tensor->dim,
        .group = tensor->group,
        .n_rows = tensor->n_rows,
        .code_bytes = tensor->code_bytes,
        .rot_order = tensor->rot_order,
        .dtype = tensor->dtype,
        .element_bytes = tensor->element_bytes,
        .codec = descriptor->codec,
        .bits = descriptor->bits,
        .flags = descriptor->flags,
        .n_clips = tensor->n_clips,
        .sqrt_order = tensor->sqrt_order,
        .rsqrt_order = tensor->rsqrt_order,
        .clip_ratio = descriptor->clip_q15 != 0 && tensor->n_clips == 0
                          ? (float)descriptor->clip_q15 * (1.0f / KVF_BLOCK_CLIP_ONE)
                          : 1.0f,
    };
    if (descriptor->codec == KVF_CODEC_KIVI) {
        out->group_axis = descriptor->group_axis;
        out->group_size = (uint8_t)descriptor->group_size;
    }
    for (uint32_t i = 0; i < tensor->n_clips; i++) {
        out->clip_ratios[i] = (float)tensor->clips_q15[i] * (1.0f / KVF_BLOCK_CLIP_ONE);
    }
    memcpy(out->sign_bits, tensor->sign_bits, sizeof(out->sign_bits));
    memcpy(out->order, tensor->order, sizeof(out->order));
}

/* -------------------------------------------------------------------------------------------------
 * Raw parts and escapes
 */

/* Thread blocks that the largest raw part of these tensors takes, for each part. */
static uint64_t raw_blocks(const struct kvf_gpu_work *work, uint32_t tensors)
{
    uint64_t n_pieces = 1;
    for (uint32_t i = 0; i < 2; i++) {
        const struct kvf_gpu_tensor *tensor = &work->tensors[i];
        uint64_t bytes = (uint64_t)tensor->n_heads * tensor->dim * tensor->element_bytes *
                         work->tokens_max;
        uint64_t n = (bytes + KVF_RAW_PIECE_BYTES - 1) / KVF_RAW_PIECE_BYTES;
        n_pieces = (tensors >> i & 1) != 0 && n > n_pieces ? n : n_pieces;
    }
    return n_pieces * work->n_parts;
}

static void add_raw(struct launches *launches, const struct kvf_gpu_work *work, uint32_t tensors,
                    const char *kernel)
{
    if (tensors != 0) {
        add_launch(launches, kernel, raw_blocks(work, tensors), KVF_RAW_THREADS, tensors);
    }
}

/* Parts of fixed rate. False: no kernel for one of them. */
static bool add_fixed(struct launches *launches, const struct kvf_gpu_work *work)
{
    add_raw(launches, work, tensors_of(work, KVF_CODEC_RAW), "kvf_raw_encode");
    for (uint32_t i = 0; i < N_CODED; i++) {
        if (tensors_of(work, coded_kernels[i].codec) != 0) {
            assert(launches->n + KVF_CODED_LAUNCHES_MAX <= KVF_GPU_LAUNCHES_MAX);
            uint32_t n = coded_kernels[i].encode(work, launches->list + launches->n);
            launches->n += n;
            if (n == 0) {
                return false;
            }
        }
    }
    return true;
}

/* The raw area, and the end of the results. */
static void add_escapes(struct launches *launches, const struct kvf_gpu_work *work,
                        const char *write)
{
    uint32_t tensors = coded_tensors(work);
    if (tensors != 0) {
        add_launch(launches, "kvf_escapes_count", work->n_parts, KVF_ESCAPES_THREADS, tensors);
    }
    add_launch(launches, write, work->n_parts, KVF_ESCAPES_THREADS, tensors);
}

uint32_t kvf_gpu_encode_fixed(const struct kvf_gpu_work *work,
                              struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    struct launches launches = {.list = launches_out};
    uint32_t tensors = tensors_of(work, KVF_CODEC_RAW) | coded_tensors(work);
    if (!work_is_valid(work) || tensors != tensors_there(work) || !add_fixed(&launches, work)) {
        return 0;
    }
    add_escapes(&launches, work, "kvf_escapes_write_fixed");
    return launches.n;
}

/* -------------------------------------------------------------------------------------------------
 * Exact parts
 */

/* Kernels of one name for each width of elements; a plan has one dtype. */
struct exact_kernels {
    const char *bf16;
    const char *f32;
};

static void add_exact(struct launches *launches, const struct kvf_gpu_work *work, uint32_t tensors,
                      uint32_t n_chunks, const struct exact_kernels *kernels)
{
    const struct kvf_gpu_tensor *tensor = &work->tensors[tensors & 1 ? 0 : 1];
    uint64_t n_pieces = (n_chunks + KVF_EXACT_PIECE_CHUNKS - 1) / KVF_EXACT_PIECE_CHUNKS;
    add_launch(launches, tensor->element_bytes == 2 ? kernels->bf16 : kernels->f32,
               n_pieces * work->n_parts, KVF_EXACT_WARPS * 32,
               tensors | n_chunks << KVF_EXACT_CHUNKS_SHIFT);
}

static bool exact_is_valid(const struct kvf_gpu_work *work, uint32_t tensors)
{
    bool is_valid = tensors != 0;
    for (uint32_t i = 0; i < 2; i++) {
        const struct kvf_gpu_tensor *tensor = &work->tensors[i];
        is_valid &= (tensors >> i & 1) == 0 || tensor->dtype == KVF_DTYPE_BF16 ||
                    tensor->dtype == KVF_DTYPE_F32;
    }
    return is_valid;
}

uint32_t kvf_gpu_encode_varying(const struct kvf_gpu_work *work,
                                struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    static const struct exact_kernels count = {"kvf_exact_count_bf16", "kvf_exact_count_f32"};
    static const struct exact_kernels encode = {"kvf_exact_encode_bf16", "kvf_exact_encode_f32"};
    struct launches launches = {.list = launches_out};
    uint32_t exact = tensors_of(work, KVF_CODEC_EXACT);
    uint32_t fixed = tensors_of(work, KVF_CODEC_RAW) | coded_tensors(work);
    if (!work_is_valid(work) || (exact | fixed) != tensors_there(work) ||
        !exact_is_valid(work, exact)) {
        return 0;
    }
    uint32_t n_chunks = kvf_exact_gpu_chunks(work, exact);
    uint32_t exact_and_chunks = exact | n_chunks << KVF_EXACT_CHUNKS_SHIFT;
    add_exact(&launches, work, exact, n_chunks, &count);
    if (n_chunks > KVF_EXACT_CHOOSE_SHORT_CHUNKS) {
        add_launch(&launches, "kvf_exact_choose", work->n_parts, KVF_EXACT_CHOOSE_THREADS,
                   exact_and_chunks);
    } else {
        add_launch(&launches, "kvf_exact_choose_short", work->n_parts,
                   KVF_EXACT_CHOOSE_SHORT_THREADS, exact_and_chunks);
    }
    add_launch(&launches, "kvf_exact_place", work->n_blocks, KVF_EXACT_PLACE_THREADS,
               exact_and_chunks);
    add_exact(&launches, work, exact, n_chunks, &encode);
    if (!add_fixed(&launches, work)) {
        return 0;
    }
    add_escapes(&launches, work, "kvf_escapes_write");
    return launches.n;
}

uint64_t kvf_gpu_encode_scratch_bytes(const struct kvf_gpu_work *work)
{
    uint32_t n_chunks = kvf_exact_gpu_chunks(work, tensors_of(work, KVF_CODEC_EXACT));
    return kvf_gpu_scratch(work->n_parts, n_chunks).bytes;
}

/* -------------------------------------------------------------------------------------------------
 * Decode
 */

/* Chunks that hold tokens_max consecutive tokens, wherever they begin. */
static uint32_t wanted_chunks(const struct kvf_gpu_work *work)
{
    uint32_t n_chunks = 1;
    for (uint32_t i = 0; i < 2; i++) {
        const struct kvf_gpu_tensor *tensor = &work->tensors[i];
        if ((tensors_there(work) >> i & 1) != 0) {
            uint32_t tokens_a_chunk = KVF_EXACT_CHUNK_ELEMENTS / tensor->dim;
            uint32_t n = tensor->n_heads *
                         ((work->tokens_max + tokens_a_chunk - 2) / tokens_a_chunk + 1);
            n_chunks = n > n_chunks ? n : n_chunks;
        }
    }
    return n_chunks;
}

/* A strip of any codec may be stored raw, so the list says by which codec parts are stored, not the
 * tensors. */
uint32_t kvf_gpu_decode(const struct kvf_gpu_work *work, uint8_t codec,
                        struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    static const struct exact_kernels decode = {"kvf_exact_decode_bf16", "kvf_exact_decode_f32"};
    struct launches launches = {.list = launches_out};
    if (!work_is_valid(work)) {
        return 0;
    }
    switch (codec) {
    case KVF_CODEC_RAW:
        add_raw(&launches, work, tensors_there(work), "kvf_raw_decode");
        break;
    case KVF_CODEC_EXACT:
        if (exact_is_valid(work, tensors_of(work, KVF_CODEC_EXACT))) {
            add_exact(&launches, work, tensors_of(work, KVF_CODEC_EXACT), wanted_chunks(work),
                      &decode);
        }
        break;
    default:
        for (uint32_t i = 0; i < N_CODED; i++) {
            if (coded_kernels[i].codec == codec && tensors_of(work, codec) != 0) {
                launches.n = coded_kernels[i].decode(work, launches_out);
            }
        }
        break;
    }
    return launches.n;
}

uint32_t kvf_gpu_patch(const struct kvf_gpu_work *work,
                       struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    struct launches launches = {.list = launches_out};
    if (work_is_valid(work)) {
        add_launch(&launches, "kvf_escapes_patch", work->n_parts, KVF_ESCAPES_THREADS,
                   tensors_there(work));
    }
    return launches.n;
}
