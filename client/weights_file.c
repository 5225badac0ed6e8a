/* SPDX-License-Identifier: Apache-2.0
 *
 * weights_file.c: which files a model has, what they agree on, and reading tensors out of them.
 */
#include "client/weights_file.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "codec/codec_fp.h"

enum {
    PATH_BYTES = 4096,
    BLOCK_VALUES = 32,     /* of quantized types */
    PIECE_BYTES = 1 << 20, /* of a tensor or file, read at once */
    NAME_MAX_BYTES = 255,
};

/* --- what the parsers share ------------------------------------------------------------------- */

struct kvf_weights_tensor *kvf_weights_slot(struct kvf_weights *weights, const char *name,
                                            const char *prefix, const char *const parts[5])
{
    size_t prefix_bytes = strlen(prefix);
    uint32_t layer = 0;
    const char *at;

    if (strncmp(name, prefix, prefix_bytes) != 0) {
        return NULL;
    }
    at = name + prefix_bytes;
    while (*at >= '0' && *at <= '9' && layer < KVF_LAYERS_MAX) {
        layer = layer * 10 + (uint32_t)(*at++ - '0');
    }
    if (at == name + prefix_bytes || *at != '.' || layer >= weights->model.n_layers) {
        return NULL;
    }
    for (uint32_t i = 0; i < 5; i++) {
        if (strcmp(at + 1, parts[i]) == 0) {
            struct kvf_weights_layer *l = &weights->layers[layer];
            struct kvf_weights_tensor *const slots[5] = {&l->k, &l->v, &l->k_bias, &l->v_bias,
                                                         &l->k_norm};

            return slots[i];
        }
    }
    return NULL;
}

/* A type's numbers come in blocks. */
static const struct {
    uint8_t n_values;
    uint8_t bytes;
} blocks[] = {
    [KVF_WEIGHTS_F32] = {1, 4},
    [KVF_WEIGHTS_F16] = {1, 2},
    [KVF_WEIGHTS_BF16] = {1, 2},
    [KVF_WEIGHTS_Q8_0] = {BLOCK_VALUES, 2 + 32},
    [KVF_WEIGHTS_Q4_0] = {BLOCK_VALUES, 2 + 16},
    [KVF_WEIGHTS_Q4_1] = {BLOCK_VALUES, 2 + 2 + 16},
    [KVF_WEIGHTS_Q5_0] = {BLOCK_VALUES, 2 + 4 + 16},
    [KVF_WEIGHTS_Q5_1] = {BLOCK_VALUES, 2 + 2 + 4 + 16},
};

uint64_t kvf_weights_type_bytes(uint32_t type, uint64_t rows, uint64_t columns)
{
    uint64_t n;

    if (columns % blocks[type].n_values != 0 || __builtin_mul_overflow(rows, columns, &n) ||
        n > UINT64_MAX / 4) {
        return 0;
    }
    return n / blocks[type].n_values * blocks[type].bytes;
}

int kvf_weights_check_model(const struct kvf_weights_model *m, char why[KVF_WEIGHTS_WHY_BYTES])
{
    const struct {
        const char *name;
        uint32_t value;
        uint32_t most;
    } fields[] = {
        {"layers (--layers)", m->n_layers, KVF_LAYERS_MAX},
        {"width of X (hidden_size, --d-model)", m->d_model, KVF_WEIGHTS_WIDTH_MAX},
        {"query heads (--query-heads)", m->n_query_heads, KVF_HEADS_MAX},
        {"K/V heads (--heads)", m->n_heads, KVF_HEADS_MAX},
        {"elements of a K vector", m->dim_k, KVF_DIM_MAX},
        {"elements of a V vector", m->dim_v, KVF_DIM_MAX},
    };

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value < 1 || fields[i].value > fields[i].most) {
            return kvf_weights_fault(why, KVF_ERR_CORRUPT, "%s: %u, and 1 to %u are possible",
                                     fields[i].name, fields[i].value, fields[i].most);
        }
    }
    if (m->n_query_heads % m->n_heads != 0) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT,
                                 "%u query heads are no multiple of %u K/V heads", m->n_query_heads,
                                 m->n_heads);
    }
    if (m->ffn_width > KVF_WEIGHTS_FFN_MAX) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT, "a feed-forward width of %u", m->ffn_width);
    }
    return KVF_OK;
}

int kvf_weights_check_layers(const struct kvf_weights *weights, char why[KVF_WEIGHTS_WHY_BYTES])
{
    const struct kvf_weights_model *m = &weights->model;
    const uint64_t k_rows = (uint64_t)m->n_heads * m->dim_k;
    const uint64_t v_rows = (uint64_t)m->n_heads * m->dim_v;

    for (uint32_t layer = 0; layer < m->n_layers; layer++) {
        const struct kvf_weights_layer *l = &weights->layers[layer];
        const struct {
            const char *name;
            const struct kvf_weights_tensor *tensor;
            uint64_t rows;
            uint64_t columns;
            bool is_needed;
        } checks[] = {
            {"weight of K", &l->k, k_rows, m->d_model, true},
            {"weight of V", &l->v, v_rows, m->d_model, true},
            {"bias of K", &l->k_bias, k_rows, 1, false},
            {"bias of V", &l->v_bias, v_rows, 1, false},
            {"norm of K", &l->k_norm, m->dim_k, 1, false},
        };

        for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
            const struct kvf_weights_tensor *t = checks[i].tensor;

            if (t->rows == 0 && checks[i].is_needed) {
                return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED,
                                         "layer %u has no %s by a name that is known here", layer,
                                         checks[i].name);
            }
            if (t->rows != 0 && (t->rows != checks[i].rows || t->columns != checks[i].columns)) {
                return kvf_weights_fault(
                    why, KVF_ERR_UNSUPPORTED, "layer %u: the %s is %llu x %llu, not %llu x %llu",
                    layer, checks[i].name, (unsigned long long)t->rows,
                    (unsigned long long)t->columns, (unsigned long long)checks[i].rows,
                    (unsigned long long)checks[i].columns);
            }
        }
    }
    return KVF_OK;
}

/* --- files ------------------------------------------------------------------------------------ */

static int read_at(int fd, void *to, size_t bytes, uint64_t offset, char *why)
{
    int status = kvf_fd_pread_all(fd, to, bytes, offset);

    if (status == KVF_OK) {
        return KVF_OK;
    }
    return kvf_weights_fault(why, KVF_ERR_IO, "reading: %s",
                             status != KVF_ERR_CORRUPT ? strerror(errno)
                                                       : "the file has become shorter");
}

/* Open a regular file; its length. */
static int file_open(const char *path, int *fd_out, uint64_t *bytes_out, char *why)
{
    struct stat stat;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused, not waited for */

    if (fd < 0 || fstat(fd, &stat) != 0) {
        int error = errno;

        if (fd >= 0) {
            (void)close(fd);
        }
        return kvf_weights_fault(why, KVF_ERR_IO, "%.200s: %s", path, strerror(error));
    }
    if (!S_ISREG(stat.st_mode)) {
        (void)close(fd);
        return kvf_weights_fault(why, KVF_ERR_IO, "%.200s: not a file", path);
    }
    *fd_out = fd;
    *bytes_out = (uint64_t)stat.st_size;
    return KVF_OK;
}

/* A whole file of text into memory, at most KVF_WEIGHTS_HEADER_BYTES_MAX; the caller frees. */
static int text_read(const char *path, char **text_out, size_t *bytes_out, char *why)
{
    uint64_t bytes = 0;
    char *text;
    int fd = -1;
    int status = file_open(path, &fd, &bytes, why);

    if (status != KVF_OK) {
        return status;
    }
    text = bytes <= KVF_WEIGHTS_HEADER_BYTES_MAX ? malloc(bytes + 1) : NULL;
    if (text == NULL) {
        status = kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "%.200s: %llu bytes are too many", path,
                                   (unsigned long long)bytes);
    } else {
        status = read_at(fd, text, bytes, 0, why);
    }
    (void)close(fd);
    if (status != KVF_OK) {
        free(text);
        return status;
    }
    *text_out = text;
    *bytes_out = bytes;
    return KVF_OK;
}

/* Take a file into weights: its number is n_files - 1 afterwards. */
static int file_add(struct kvf_weights *weights, const char *path, uint64_t *bytes_out, char *why)
{
    int status;

    if (weights->n_files == KVF_WEIGHTS_FILES_MAX) {
        return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED, "more than %d files",
                                 KVF_WEIGHTS_FILES_MAX);
    }
    status = file_open(path, &weights->fds[weights->n_files], bytes_out, why);
    if (status == KVF_OK) {
        weights->n_files++;
    }
    return status;
}

static int join(char path[PATH_BYTES], const char *folder, size_t folder_bytes, const char *name,
                char *why)
{
    int n = snprintf(path, PATH_BYTES, "%.*s/%s", (int)folder_bytes, folder, name);

    return n > 0 && n < PATH_BYTES
               ? KVF_OK
               : kvf_weights_fault(why, KVF_ERR_IO, "a path of more than %d bytes", PATH_BYTES);
}

/* --- safetensors ------------------------------------------------------------------------------ */

static int config_read(const char *path, struct kvf_weights_model *model_out, char *why)
{
    char *text = NULL;
    size_t bytes = 0;
    int status = text_read(path, &text, &bytes, why);

    if (status == KVF_OK) {
        status = kvf_weights_parse_config(text, bytes, model_out, why);
    }
    free(text);
    return status;
}

/* One file of tensors. */
static int safetensors_add(struct kvf_weights *weights, const char *path, char *why)
{
    uint64_t file_bytes = 0;
    uint64_t header_bytes;
    uint8_t length[8];
    char *text = NULL;
    int status = file_add(weights, path, &file_bytes, why);
    uint32_t file = weights->n_files - 1;

    if (status == KVF_OK && file_bytes < sizeof(length)) {
        status = kvf_weights_fault(why, KVF_ERR_CORRUPT, "%.200s: shorter than a header", path);
    }
    if (status == KVF_OK) {
        status = read_at(weights->fds[file], length, sizeof(length), 0, why);
    }
    if (status != KVF_OK) {
        return status;
    }
    header_bytes = 0;
    for (uint32_t i = 0; i < sizeof(length); i++) {
        header_bytes |= (uint64_t)length[i] << (8 * i);
    }
    if (header_bytes > KVF_WEIGHTS_HEADER_BYTES_MAX || header_bytes > file_bytes - sizeof(length)) {
        return kvf_weights_fault(why, KVF_ERR_CORRUPT,
                                 "%.200s: a header of %llu bytes in a file of %llu: no safetensors",
                                 path, (unsigned long long)header_bytes,
                                 (unsigned long long)file_bytes);
    }
    text = malloc(header_bytes + 1);
    if (text == NULL) {
        return kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory for a header");
    }
    status = read_at(weights->fds[file], text, header_bytes, sizeof(length), why);
    if (status == KVF_OK) {
        status = kvf_weights_parse_safetensors(text, header_bytes, sizeof(length) + header_bytes,
                                               file_bytes - sizeof(length) - header_bytes, file,
                                               weights, why);
    }
    free(text);
    return status;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The different values of an index's weight_map, sorted. */
static int index_names(const json_t *map, const char *names[KVF_WEIGHTS_FILES_MAX], uint32_t *n_out,
                       char *why)
{
    const char *key;
    json_t *value;
    uint32_t n = 0;

    json_object_foreach((json_t *)map, key, value)
    {
        const char *name = json_string_value(value);
        uint32_t i = 0;

        if (name == NULL || strchr(name, '/') != NULL || strlen(name) > NAME_MAX_BYTES) {
            return kvf_weights_fault(why, KVF_ERR_CORRUPT, "index: '%.60s' has no name of a file",
                                     key);
        }
        while (i < n && strcmp(names[i], name) != 0) {
            i++;
        }
        if (i == n && n == KVF_WEIGHTS_FILES_MAX) {
            return kvf_weights_fault(why, KVF_ERR_UNSUPPORTED, "index: more than %d files",
                                     KVF_WEIGHTS_FILES_MAX);
        }
        names[i] = name;
        n += i == n;
    }
    qsort(names, n, sizeof(names[0]), compare_names);
    *n_out = n;
    return KVF_OK;
}

/* A model in parts: those that its index names. */
static int index_add(struct kvf_weights *weights, const char *folder, const char *text,
                     size_t bytes, char *why)
{
    const char *names[KVF_WEIGHTS_FILES_MAX];
    char path[PATH_BYTES];
    uint32_t n = 0;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    const json_t *map = json_object_get(root, "weight_map");
    int status = json_is_object(map)
                     ? index_names(map, names, &n, why)
                     : kvf_weights_fault(why, KVF_ERR_CORRUPT, "index: no weight_map");

    for (uint32_t i = 0; status == KVF_OK && i < n; i++) {
        status = join(path, folder, strlen(folder), names[i], why);
        if (status == KVF_OK) {
            status = safetensors_add(weights, path, why);
        }
    }
    json_decref(root);
    return status;
}

static int layers_create(struct kvf_weights *weights, char *why)
{
    weights->layers = calloc(weights->model.n_layers, sizeof(*weights->layers));
    return weights->layers != NULL ? KVF_OK
                                   : kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");
}

static int folder_open(struct kvf_weights *weights, const char *folder, char *why)
{
    char path[PATH_BYTES];
    char *text = NULL;
    size_t bytes = 0;
    int status = kvf_weights_model_read(folder, &weights->model, why);

    if (status == KVF_OK) {
        status = layers_create(weights, why);
    }
    if (status == KVF_OK) {
        status = join(path, folder, strlen(folder), "model.safetensors.index.json", why);
    }
    if (status != KVF_OK) {
        return status;
    }
    if (access(path, F_OK) == 0) {
        status = text_read(path, &text, &bytes, why);
        if (status == KVF_OK) {
            status = index_add(weights, folder, text, bytes, why);
        }
        free(text);
        return status;
    }
    status = join(path, folder, strlen(folder), "model.safetensors", why);
    return status == KVF_OK ? safetensors_add(weights, path, why) : status;
}

/* One file, and the config.json that lies beside it. */
static int safetensors_open(struct kvf_weights *weights, const char *path, char *why)
{
    const char *slash = strrchr(path, '/');
    char config[PATH_BYTES];
    int status = slash != NULL ? join(config, path, (size_t)(slash - path), "config.json", why)
                               : join(config, ".", 1, "config.json", why);

    if (status == KVF_OK) {
        status = config_read(config, &weights->model, why);
    }
    if (status == KVF_OK) {
        status = layers_create(weights, why);
    }
    return status == KVF_OK ? safetensors_add(weights, path, why) : status;
}

/* --- GGUF ------------------------------------------------------------------------------------- */

static int gguf_open(struct kvf_weights *weights, const char *path, char *why)
{
    uint64_t file_bytes = 0;
    uint8_t *data;
    size_t bytes;
    int status = file_add(weights, path, &file_bytes, why);

    if (status != KVF_OK) {
        return status;
    }
    bytes = file_bytes < KVF_WEIGHTS_HEADER_BYTES_MAX ? (size_t)file_bytes
                                                      : (size_t)KVF_WEIGHTS_HEADER_BYTES_MAX;
    data = malloc(bytes + 1);
    if (data == NULL) {
        return kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory for a header");
    }
    status = read_at(weights->fds[0], data, bytes, 0, why);
    if (status == KVF_OK) {
        status = kvf_weights_parse_gguf(data, bytes, file_bytes, weights, why);
    }
    free(data);
    return status;
}

/* --- the public part -------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end)
{
    size_t text_bytes = strlen(text);
    size_t end_bytes = strlen(end);

    return text_bytes >= end_bytes && strcmp(text + text_bytes - end_bytes, end) == 0;
}

static bool is_folder(const char *path)
{
    struct stat stat_of;

    return stat(path, &stat_of) == 0 && S_ISDIR(stat_of.st_mode);
}

int kvf_weights_model_read(const char *path, struct kvf_weights_model *model_out,
                           char why[KVF_WEIGHTS_WHY_BYTES])
{
    char config[PATH_BYTES];
    int status;

    if (!is_folder(path)) {
        return config_read(path, model_out, why);
    }
    status = join(config, path, strlen(path), "config.json", why);
    return status == KVF_OK ? config_read(config, model_out, why) : status;
}

int kvf_weights_open(const char *path, struct kvf_weights **weights_out,
                     char why[KVF_WEIGHTS_WHY_BYTES])
{
    struct kvf_weights *weights = calloc(1, sizeof(*weights));
    int status;

    if (weights == NULL) {
        return kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");
    }
    if (is_folder(path)) {
        status = folder_open(weights, path, why);
    } else if (ends_with(path, ".gguf")) {
        status = gguf_open(weights, path, why);
    } else if (ends_with(path, ".safetensors")) {
        status = safetensors_open(weights, path, why);
    } else {
        status = kvf_weights_fault(why, KVF_ERR_UNSUPPORTED,
                                   "neither a folder nor a file that ends in .safetensors or "
                                   ".gguf");
    }
    if (status == KVF_OK) {
        status = kvf_weights_check_layers(weights, why);
    }
    if (status != KVF_OK) {
        kvf_weights_close(weights);
        return status;
    }
    *weights_out = weights;
    return KVF_OK;
}

void kvf_weights_close(struct kvf_weights *weights)
{
    if (weights == NULL) {
        return;
    }
    for (uint32_t i = 0; i < weights->n_files; i++) {
        (void)close(weights->fds[i]);
    }
    free(weights->layers);
    free(weights);
}

/* One block of a quantized type. */
static void block_widen(const uint8_t *from, uint32_t type, float *to)
{
    bool has_least = type == KVF_WEIGHTS_Q4_1 || type == KVF_WEIGHTS_Q5_1;
    bool has_fifth = type == KVF_WEIGHTS_Q5_0 || type == KVF_WEIGHTS_Q5_1;
    uint16_t halves[2] = {0, 0};
    uint32_t fifth = 0;
    float scale;
    float least;

    memcpy(halves, from, has_least ? 4 : 2);
    from += has_least ? 4 : 2;
    if (has_fifth) {
        memcpy(&fifth, from, sizeof(fifth));
        from += sizeof(fifth);
    }
    scale = kvf_f32_from_f16(halves[0]);
    least = has_least ? kvf_f32_from_f16(halves[1]) : scale * (has_fifth ? -16.0f : -8.0f);
    for (uint32_t i = 0; i < BLOCK_VALUES; i++) {
        uint32_t code = i < 16 ? from[i] & 15u : (uint32_t)from[i - 16] >> 4;

        to[i] = type == KVF_WEIGHTS_Q8_0 ? scale * (float)(int8_t)from[i]
                                         : scale * (float)(code | (fifth >> i & 1) << 4) + least;
    }
}

/* Whole blocks of a type. */
static void values_widen(const uint8_t *from, uint32_t type, size_t n_blocks, float *to)
{
    uint16_t half;

    for (size_t i = 0; i < n_blocks; i++) {
        if (type == KVF_WEIGHTS_F32) {
            memcpy(to, from, sizeof(*to));
        } else if (blocks[type].n_values == 1) {
            memcpy(&half, from, sizeof(half));
            *to = type == KVF_WEIGHTS_BF16 ? kvf_f32_from_bf16(half) : kvf_f32_from_f16(half);
        } else {
            block_widen(from, type, to);
        }
        from += blocks[type].bytes;
        to += blocks[type].n_values;
    }
}

int kvf_weights_load(const struct kvf_weights *weights, const struct kvf_weights_tensor *tensor,
                     float *values_out, char why[KVF_WEIGHTS_WHY_BYTES])
{
    uint64_t left = kvf_weights_type_bytes(tensor->type, tensor->rows, tensor->columns);
    uint64_t offset = tensor->offset_bytes;
    const size_t block_bytes = blocks[tensor->type].bytes;
    const size_t piece_bytes = PIECE_BYTES / block_bytes * block_bytes;
    uint8_t *piece = malloc(piece_bytes);
    int status = piece != NULL ? KVF_OK : kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");

    while (status == KVF_OK && left > 0) {
        size_t bytes = left < piece_bytes ? (size_t)left : piece_bytes;
        size_t n_blocks = bytes / block_bytes;

        status = read_at(weights->fds[tensor->file], piece, bytes, offset, why);
        if (status == KVF_OK) {
            values_widen(piece, tensor->type, n_blocks, values_out);
        }
        values_out += n_blocks * blocks[tensor->type].n_values;
        offset += bytes;
        left -= bytes;
    }
    free(piece);
    return status;
}

static int file_digest(int fd, uint8_t *piece, uint8_t digest_out[KVF_DIGEST_BYTES], char *why)
{
    crypto_hash_sha256_state state;
    uint64_t offset = 0;
    ssize_t n;

    crypto_hash_sha256_init(&state);
    do {
        n = pread(fd, piece, PIECE_BYTES, (off_t)offset);
        if (n < 0 && errno != EINTR) {
            return kvf_weights_fault(why, KVF_ERR_IO, "reading: %s", strerror(errno));
        }
        if (n > 0) {
            crypto_hash_sha256_update(&state, piece, (unsigned long long)n);
            offset += (uint64_t)n;
        }
    } while (n != 0);
    crypto_hash_sha256_final(&state, digest_out);
    return KVF_OK;
}

int kvf_weights_digest(const struct kvf_weights *weights, uint8_t digest_out[KVF_DIGEST_BYTES],
                       char why[KVF_WEIGHTS_WHY_BYTES])
{
    crypto_hash_sha256_state state;
    uint8_t digest[KVF_DIGEST_BYTES] = {0};
    uint8_t *piece = malloc(PIECE_BYTES);
    int status = piece != NULL ? KVF_OK : kvf_weights_fault(why, KVF_ERR_NO_MEMORY, "no memory");

    crypto_hash_sha256_init(&state);
    for (uint32_t i = 0; status == KVF_OK && i < weights->n_files; i++) {
        status = file_digest(weights->fds[i], piece, digest, why);
        crypto_hash_sha256_update(&state, digest, sizeof(digest));
    }
    free(piece);
    if (status == KVF_OK && weights->n_files == 1) {
        memcpy(digest_out, digest, sizeof(digest));
    } else if (status == KVF_OK) {
        crypto_hash_sha256_final(&state, digest_out);
    }
    return status;
}
