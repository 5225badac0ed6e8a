/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_gpu.c: which kernels a piece of work takes, and how many thread blocks of each. The
 * kernels' own files describe how they find their part.
 */
#include "codec/codec_gpu_host.h"

#include "codec/codec_closed_loop_gpu.h"
#include "codec/codec_gpu_scratch.h"
#include "codec/codec_kivi_gpu.h"
#include "codec/codec_layout.h"
#include "codec/codec_saw_gpu.h"
#include "codec/codec_tq_gpu.h"

#include <assert.h>
#include <string.h>

_Static_assert((int)KVF_ESCAPES_SHARE == (int)KVF_CODEC_ESCAPE_SHARE,
               "kernels give up where the C codecs do");
_Static_assert((int)KVF_GPU_CLIPS_MAX == (int)KVF_CODEC_CLIPS_MAX, "one list of ratios");
_Static_assert((int)KVF_EXACT_PLACE_THREADS >= 2 * (int)KVF_LAYERS_MAX, "one thread a part");

/* Launches so far, and the kind of layers that the next ones are for. */
struct launches {
    struct kvf_gpu_launch *list;
    uint32_t n;
    uint32_t kind;
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
        .kind = launches->kind,
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
    {KVF_CODEC_TQ, kvf_tq_gpu_encode, kvf_tq_gpu_decode},
    {KVF_CODEC_KIVI, kvf_kivi_gpu_encode, kvf_kivi_gpu_decode},
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
    return work->n_parts >= 1 && work->n_parts <= KVF_GPU_PARTS_MAX && work->tokens_max >= 1 &&
           work->tokens_a_page >= 1;
}

/* -------------------------------------------------------------------------------------------------
 * Facts for kernels
 */
static void fill_rotations(const struct kvf_codec_tensor *tensor, struct kvf_gpu_tensor *out)
{
    out->rot_seed = tensor->descriptor.rot_seed;
    out->n_rotations = tensor->n_rotations;
    out->n_scales = tensor->n_scales;
    for (uint32_t r = 0; r < tensor->n_rotations; r++) {
        const struct kvf_codec_rotation *rotation = &tensor->rotations[r];
        out->rotations[r] = (struct kvf_gpu_rotation){
            .n = rotation->n,
            .order = rotation->order,
            .code_bytes = rotation->code_bytes,
            .bits = rotation->bits,
            .root_mean_square = rotation->root_mean_square,
            .quantize = rotation->quantize,
            .scale = rotation->scale,
            .factor = rotation->factor,
            .residual = rotation->residual,
            .residual_factor = rotation->residual_factor,
        };
    }
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
        .zero_kind = descriptor->zero_kind,
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
    if (descriptor->codec == KVF_CODEC_TQ) {
        fill_rotations(tensor, out);
    }
    memcpy(out->sign_bits, tensor->sign_bits, sizeof(out->sign_bits));
    memcpy(out->order, tensor->order, sizeof(out->order));
}

void kvf_gpu_kinds_fill(const struct kvf_codec_plan *plan, struct kvf_gpu_kinds *out)
{
    uint8_t kind_of[KVF_CODEC_KINDS_MAX]; /* of a plan's kind, plus 1; 0: without layers so far */
    memset(kind_of, 0, sizeof(kind_of));
    memset(out, 0, sizeof(*out));
    for (uint32_t layer = 0; layer < plan->geometry.n_layers; layer++) {
        const struct kvf_codec_kind *kind = &plan->kinds[plan->layer_kinds[layer]];
        uint8_t *number = &kind_of[plan->layer_kinds[layer]];
        if (*number == 0) {
            kvf_gpu_tensor_fill(&kind->k, &out->tensors[out->n][0]);
            kvf_gpu_tensor_fill(&kind->v, &out->tensors[out->n][1]);
            *number = (uint8_t)++out->n;
        }
        out->tensors[*number - 1][0].is_looped = (plan->block_flags & KVF_BLOCK_DELTAS) != 0;
        out->layer_kinds[layer] = (uint8_t)(*number - 1);
        out->n_layers[out->layer_kinds[layer]]++;
    }
}

void kvf_gpu_kinds_fill_raw(const struct kvf_codec_plan *plan, struct kvf_gpu_kinds *out)
{
    memset(out, 0, sizeof(*out));
    out->n = 1;
    out->n_layers[0] = plan->geometry.n_layers;
    kvf_gpu_tensor_fill(&plan->raw_k, &out->tensors[0][0]);
    kvf_gpu_tensor_fill(&plan->raw_v, &out->tensors[0][1]);
}

void kvf_gpu_part_fill(const struct kvf_codec_tensor *tensor, struct kvf_gpu_part *part)
{
    part->bits = tensor->descriptor.bits;
    part->fixed_bytes = 0;
    if ((tensor->ops->capabilities & KVF_CODEC_FIXED_RATE) != 0) {
        struct kvf_codec_sizes sizes;
        tensor->ops->sizes(tensor, part->n_tokens, &sizes);
        part->fixed_bytes = (uint32_t)kvf_sizes_total(&sizes);
    }
}

static bool is_looped(const struct kvf_gpu_kinds *kinds)
{
    return kinds->tensors[0][0].is_looped != 0;
}

void kvf_gpu_loop_tensors(const struct kvf_gpu_kinds *kinds, struct kvf_gpu_tensor tensors_out[2])
{
    /* layer 0 is no delta; if both are coded alike there is one kind */
    tensors_out[0] = kinds->tensors[0][0];
    tensors_out[1] = kinds->tensors[kinds->n - 1][0];
}

uint8_t kvf_gpu_part_loop(const struct kvf_codec_plan *plan, uint32_t layer,
                          const struct kvf_codec_tensor *stored)
{
    return (uint8_t)((kvf_plan_is_delta(plan, layer) ? KVF_GPU_LOOP_DELTA : 0) |
                     (stored->ops->id == KVF_CODEC_RAW ? KVF_GPU_LOOP_RAW : 0));
}

/* Words of the bits that mark escapes of a part, where strips do not show them. */
static uint32_t escape_words(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds)
{
    uint32_t words = 0;
    for (uint32_t i = 0; i < 2 * kinds->n; i++) {
        const struct kvf_gpu_tensor *tensor = &kinds->tensors[i / 2][i % 2];
        uint32_t n = tensor->n_rows * ((work->tokens_max + 31) / 32);
        words = tensor->codec == KVF_CODEC_KIVI && n > words ? n : words;
    }
    return words;
}

/* Parts of one layer of a block; of the layers of a kind. */
static uint32_t parts_a_layer(const struct kvf_gpu_work *work)
{
    return work->has_v != 0 ? 2 : 1;
}

static uint32_t kind_parts(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                           uint32_t kind)
{
    return work->n_blocks * kinds->n_layers[kind] * parts_a_layer(work);
}

void kvf_gpu_number_parts(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                          uint32_t *numbers_out)
{
    for (uint32_t kind = 0; kind < kinds->n; kind++) {
        for (uint32_t number = 0; number < work->n_parts; number++) {
            uint32_t layer = number / parts_a_layer(work) % work->n_layers;
            if (kinds->layer_kinds[layer] == kind) {
                *numbers_out++ = number;
            }
        }
    }
}

struct kvf_gpu_work kvf_gpu_launch_work(const struct kvf_gpu_work *work,
                                        const struct kvf_gpu_kinds *kinds, uint32_t kind)
{
    struct kvf_gpu_work one = *work;
    one.n_parts_all = work->n_parts;
    one.escape_words = escape_words(work, kinds);
    if (kind == KVF_GPU_WHOLE || kinds->n == 1) {
        one.numbers = 0;
    } else {
        for (uint32_t i = 0; i < kind; i++) {
            one.numbers += kind_parts(work, kinds, i) * sizeof(uint32_t);
        }
        one.n_parts = kind_parts(work, kinds, kind);
    }
    memcpy(one.tensors, kinds->tensors[kind == KVF_GPU_WHOLE ? 0 : kind], sizeof(one.tensors));
    if (kind == KVF_GPU_WHOLE && is_looped(kinds)) {
        kvf_gpu_loop_tensors(kinds, one.tensors);
    }
    return one;
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
        if (tensors_of(work, coded_kernels[i].codec) == 0) {
            continue;
        }
        assert(launches->n + KVF_CODED_LAUNCHES_MAX <= KVF_GPU_LAUNCHES_MAX);
        uint32_t n = coded_kernels[i].encode(work, launches->list + launches->n);
        if (n == 0) {
            return false;
        }
        while (n-- > 0) {
            launches->list[launches->n++].kind = launches->kind;
        }
    }
    return true;
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

/* Exponents of a kind's parts, and which of them the parts take. */
static void add_choice(struct launches *launches, const struct kvf_gpu_work *work, uint32_t tensors,
                       uint32_t n_chunks)
{
    static const struct exact_kernels count = {"kvf_exact_count_bf16", "kvf_exact_count_f32"};
    add_exact(launches, work, tensors, n_chunks, &count);
    if (n_chunks > KVF_EXACT_CHOOSE_SHORT_CHUNKS) {
        add_launch(launches, "kvf_exact_choose", work->n_parts, KVF_EXACT_CHOOSE_THREADS,
                   tensors | n_chunks << KVF_EXACT_CHUNKS_SHIFT);
    } else {
        add_launch(launches, "kvf_exact_choose_short", work->n_parts,
                   KVF_EXACT_CHOOSE_SHORT_THREADS, tensors | n_chunks << KVF_EXACT_CHUNKS_SHIFT);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Encode
 */

/* Work of one kind after the other. */
struct encode {
    const struct kvf_gpu_work *work;
    const struct kvf_gpu_kinds *kinds;
    struct launches launches;
    uint32_t n_chunks; /* of the largest part of exact; 0: there is none */
    bool has_codes;
};

/* The kind's work, which the launches to come are for. */
static struct kvf_gpu_work kind_work(struct encode *encode, uint32_t kind)
{
    encode->launches.kind = kind;
    return kvf_gpu_launch_work(encode->work, encode->kinds, kind);
}

/* What the launches of any kind have to know of all kinds. False: there is no kernel for one. */
static bool look_at_kinds(struct encode *encode)
{
    for (uint32_t kind = 0; kind < encode->kinds->n; kind++) {
        struct kvf_gpu_work work = kind_work(encode, kind);
        uint32_t exact = tensors_of(&work, KVF_CODEC_EXACT);
        uint32_t coded = coded_tensors(&work);
        uint32_t n_chunks = kvf_exact_gpu_chunks(&work, exact);
        if (!work_is_valid(&work) || (exact != 0 && !exact_is_valid(&work, exact)) ||
            (exact | coded | tensors_of(&work, KVF_CODEC_RAW)) != tensors_there(&work)) {
            return false;
        }
        encode->n_chunks = n_chunks > encode->n_chunks ? n_chunks : encode->n_chunks;
        encode->has_codes = encode->has_codes || coded != 0;
    }
    return work_is_valid(encode->work) &&
           (!is_looped(encode->kinds) || kvf_loop_gpu_takes(encode->kinds));
}

/* Parts of fixed rate: of a plan with deltas all layers at once. */
static bool encode_fixed(struct encode *encode)
{
    if (is_looped(encode->kinds)) {
        struct kvf_gpu_work work = kind_work(encode, KVF_GPU_WHOLE);
        uint32_t n = kvf_loop_gpu_encode(&work, encode->launches.list);
        encode->launches.n += n;
        return n != 0;
    }
    for (uint32_t kind = 0; kind < encode->kinds->n; kind++) {
        struct kvf_gpu_work one = kind_work(encode, kind);
        if (!add_fixed(&encode->launches, &one)) {
            return false;
        }
    }
    return true;
}

/* Parts of exact, and where all parts are then stored. */
static void encode_exact(struct encode *encode)
{
    static const struct exact_kernels kernels = {"kvf_exact_encode_bf16", "kvf_exact_encode_f32"};
    for (uint32_t kind = 0; kind < encode->kinds->n; kind++) {
        struct kvf_gpu_work work = kind_work(encode, kind);
        uint32_t exact = tensors_of(&work, KVF_CODEC_EXACT);
        if (exact != 0) {
            add_choice(&encode->launches, &work, exact, encode->n_chunks);
        }
    }
    encode->launches.kind = KVF_GPU_WHOLE;
    add_launch(&encode->launches, "kvf_exact_place", encode->work->n_blocks,
               KVF_EXACT_PLACE_THREADS, encode->n_chunks << KVF_EXACT_CHUNKS_SHIFT);
    for (uint32_t kind = 0; kind < encode->kinds->n; kind++) {
        struct kvf_gpu_work work = kind_work(encode, kind);
        uint32_t exact = tensors_of(&work, KVF_CODEC_EXACT);
        if (exact != 0) {
            add_exact(&encode->launches, &work, exact, encode->n_chunks, &kernels);
        }
    }
}

/* The raw areas, and the end of the results. The sections of a block follow each other, so all are
 * counted before any is written. */
static void encode_escapes(struct encode *encode)
{
    const char *write = encode->n_chunks != 0 ? "kvf_escapes_write" : "kvf_escapes_write_fixed";
    for (uint32_t kind = 0; encode->has_codes && kind < encode->kinds->n; kind++) {
        struct kvf_gpu_work work = kind_work(encode, kind);
        add_launch(&encode->launches, "kvf_escapes_count", work.n_parts, KVF_ESCAPES_THREADS,
                   coded_tensors(&work));
    }
    if (!encode->has_codes) {
        encode->launches.kind = KVF_GPU_WHOLE;
        add_launch(&encode->launches, write, encode->work->n_parts, KVF_ESCAPES_THREADS, 0);
        return;
    }
    for (uint32_t kind = 0; kind < encode->kinds->n; kind++) {
        struct kvf_gpu_work work = kind_work(encode, kind);
        add_launch(&encode->launches, write, work.n_parts, KVF_ESCAPES_THREADS,
                   tensors_there(&work));
    }
}

uint32_t kvf_gpu_encode(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                        struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    struct encode encode = {.work = work, .kinds = kinds, .launches = {.list = launches_out}};
    if (!look_at_kinds(&encode)) {
        return 0;
    }
    if (encode.n_chunks != 0) {
        encode_exact(&encode);
    }
    if (!encode_fixed(&encode)) {
        return 0;
    }
    encode_escapes(&encode);
    return encode.launches.n;
}

/* -------------------------------------------------------------------------------------------------
 * Encode, layer by layer
 */
struct kvf_gpu_work kvf_gpu_layer_work(const struct kvf_gpu_work *work,
                                       const struct kvf_gpu_kinds *kinds, uint32_t layer,
                                       uint32_t kind)
{
    struct kvf_gpu_work one = *work;
    one.n_parts_all = work->n_parts;
    one.escape_words = escape_words(work, kinds);
    one.numbers += (uint64_t)layer * work->n_blocks * sizeof(uint32_t);
    one.n_parts = work->n_blocks;
    if (kind == KVF_GPU_WHOLE) {
        kvf_gpu_loop_tensors(kinds, one.tensors);
    } else {
        memcpy(one.tensors, kinds->tensors[kind], sizeof(one.tensors));
    }
    return one;
}

uint32_t kvf_gpu_encode_layer(const struct kvf_gpu_work *work, const struct kvf_gpu_kinds *kinds,
                              uint32_t layer,
                              struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    uint32_t kind = kinds->layer_kinds[layer];
    struct kvf_gpu_work one = kvf_gpu_layer_work(work, kinds, layer, kind);
    struct launches launches = {.list = launches_out, .kind = kind};
    if (work->has_v != 0 || !work_is_valid(&one) || coded_tensors(&one) != 1) {
        return 0;
    }
    if (is_looped(kinds)) {
        one = kvf_gpu_layer_work(work, kinds, layer, KVF_GPU_WHOLE);
        launches.n = kvf_loop_gpu_takes(kinds) ? kvf_loop_gpu_encode(&one, launches_out) : 0;
    } else if (!add_fixed(&launches, &one)) {
        launches.n = 0;
    }
    if (launches.n == 0) {
        return 0;
    }
    add_launch(&launches, "kvf_escapes_count", one.n_parts, KVF_ESCAPES_THREADS,
               1 | KVF_ESCAPES_LAYER);
    add_launch(&launches, "kvf_escapes_write_fixed", one.n_parts, KVF_ESCAPES_THREADS,
               1 | KVF_ESCAPES_LAYER);
    return launches.n;
}

struct kvf_gpu_launch kvf_gpu_encode_finish(const struct kvf_gpu_work *work)
{
    return (struct kvf_gpu_launch){
        .kernel = "kvf_escapes_write_fixed",
        .n_blocks = work->n_parts,
        .n_threads = KVF_ESCAPES_THREADS,
        .tensors = 1 | KVF_ESCAPES_WRITTEN,
        .kind = KVF_GPU_WHOLE,
    };
}

uint64_t kvf_gpu_encode_scratch_bytes(const struct kvf_gpu_work *work,
                                      const struct kvf_gpu_kinds *kinds)
{
    uint32_t n_chunks = 0;
    for (uint32_t kind = 0; kind < kinds->n; kind++) {
        struct kvf_gpu_work one = kvf_gpu_launch_work(work, kinds, kind);
        uint32_t n = kvf_exact_gpu_chunks(&one, tensors_of(&one, KVF_CODEC_EXACT));
        n_chunks = n > n_chunks ? n : n_chunks;
    }
    return kvf_gpu_scratch(work->n_parts, escape_words(work, kinds), n_chunks).bytes;
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
    if (work->tensors[0].is_looped != 0) {
        return kvf_loop_gpu_decode(work, launches_out);
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

/* One kernel over the escapes of all parts. */
static uint32_t escapes_launch(const struct kvf_gpu_work *work, const char *kernel,
                               struct kvf_gpu_launch *launch_out)
{
    struct launches launches = {.list = launch_out};
    if (work_is_valid(work)) {
        add_launch(&launches, kernel, work->n_parts, KVF_ESCAPES_THREADS, tensors_there(work));
    }
    return launches.n;
}

uint32_t kvf_gpu_patch(const struct kvf_gpu_work *work,
                       struct kvf_gpu_launch launches_out[KVF_GPU_LAUNCHES_MAX])
{
    return escapes_launch(work, "kvf_escapes_patch", launches_out);
}

uint32_t kvf_gpu_restore(const struct kvf_gpu_work *work, struct kvf_gpu_launch *launch_out)
{
    return escapes_launch(work, "kvf_escapes_restore", launch_out);
}
