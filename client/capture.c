/* SPDX-License-Identifier: Apache-2.0
 *
 * capture.c: folders of captures: index.txt, manifest.json and arrays, checked before use.
 */
#include "client/capture.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zstd.h>

#include "codec/codec_fp.h"

#define LINE_BYTES     512
#define FILE_BYTES_MAX (4ULL << 30)
#define FILES_MAX      4096

static const char *const tensor_names[KVF_CAPTURE_KINDS] = {"k_post", "k_pre", "v", "q", "q_norm"};

/* One line of index.txt. */
struct index_line {
    char tensor[16];
    uint32_t layer_first;
    uint32_t n_layers;
    uint32_t n_heads;
    uint32_t n_tokens;
    uint32_t dim;
    char dtype[8];
    size_t raw_bytes;
    char file[128];
};

static int fail(char *error_out, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static int fail(char *error_out, int status, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(error_out, KVF_CAPTURE_ERROR_BYTES, fmt, args);
    va_end(args);
    return status;
}

/* --- digests ---------------------------------------------------------------------------------- */

void kvf_digest_text(const uint8_t digest[KVF_DIGEST_BYTES], char out[KVF_DIGEST_TEXT_BYTES])
{
    sodium_bin2hex(out, KVF_DIGEST_TEXT_BYTES, digest, KVF_DIGEST_BYTES);
}

bool kvf_digest_parse(const char *text, uint8_t digest_out[KVF_DIGEST_BYTES])
{
    uint8_t digest[KVF_DIGEST_BYTES];
    size_t n = 0;

    if (strlen(text) != 2 * (size_t)KVF_DIGEST_BYTES ||
        sodium_hex2bin(digest, sizeof(digest), text, strlen(text), NULL, &n, NULL) != 0 ||
        n != sizeof(digest)) {
        return false;
    }
    memcpy(digest_out, digest, sizeof(digest));
    return true;
}

/* --- files ------------------------------------------------------------------------------------ */

/* A whole file; *data_out is the caller's. An empty file is refused. */
static int read_file(const char *folder, const char *name, uint8_t **data_out, size_t *bytes_out,
                     char *error_out)
{
    char path[PATH_MAX];
    struct stat info;
    uint8_t *data = NULL;
    FILE *file;
    int status = KVF_OK;

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", folder, name) >= sizeof(path)) {
        return fail(error_out, KVF_ERR_IO, "%s: the path is too long", folder);
    }
    file = fopen(path, "rbe");
    if (file == NULL || fstat(fileno(file), &info) != 0) {
        status = fail(error_out, KVF_ERR_IO, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(info.st_mode) || info.st_size == 0 ||
               (uint64_t)info.st_size > FILE_BYTES_MAX) {
        status = fail(error_out, KVF_ERR_CORRUPT, "%s: no file of 1 byte to 4 GiB", path);
    } else if ((data = malloc((size_t)info.st_size + 1)) == NULL) {
        status = fail(error_out, KVF_ERR_NO_MEMORY, "%s: out of memory", path);
    } else if (fread(data, 1, (size_t)info.st_size, file) != (size_t)info.st_size) {
        status = fail(error_out, KVF_ERR_IO, "%s: ends early", path);
    }
    if (file != NULL) {
        fclose(file);
    }
    if (status != KVF_OK) {
        free(data);
        return status;
    }
    data[info.st_size] = 0; /* texts are read as strings */
    *data_out = data;
    *bytes_out = (size_t)info.st_size;
    return KVF_OK;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text);

    return n >= strlen(end) && strcmp(text + n - strlen(end), end) == 0;
}

/* The array of a line: the file as it is, or what its zstd frame holds. */
static int read_array(const char *folder, const struct index_line *line,
                      crypto_hash_sha256_state *digest, uint8_t **data_out, char *error_out)
{
    uint8_t *packed;
    uint8_t *raw;
    size_t bytes;
    int status = read_file(folder, line->file, &packed, &bytes, error_out);

    if (status != KVF_OK) {
        return status;
    }
    crypto_hash_sha256_update(digest, packed, bytes);
    if (!ends_with(line->file, ".zst")) {
        if (bytes != line->raw_bytes) {
            free(packed);
            return fail(error_out, KVF_ERR_CORRUPT, "%s/%s: %zu bytes, the index says %zu", folder,
                        line->file, bytes, line->raw_bytes);
        }
        *data_out = packed;
        return KVF_OK;
    }
    raw = malloc(line->raw_bytes);
    if (raw == NULL) {
        status = fail(error_out, KVF_ERR_NO_MEMORY, "%s/%s: out of memory", folder, line->file);
    } else if (ZSTD_decompress(raw, line->raw_bytes, packed, bytes) != line->raw_bytes) {
        status = fail(error_out, KVF_ERR_CORRUPT, "%s/%s: no zstd frame of %zu bytes", folder,
                      line->file, line->raw_bytes);
    }
    free(packed);
    if (status != KVF_OK) {
        free(raw);
        return status;
    }
    *data_out = raw;
    return KVF_OK;
}

/* --- index.txt -------------------------------------------------------------------------------- */

static uint8_t dtype_of(const char *name)
{
    return strcmp(name, "bf16") == 0  ? KVF_DTYPE_BF16
           : strcmp(name, "f16") == 0 ? KVF_DTYPE_F16
           : strcmp(name, "f32") == 0 ? KVF_DTYPE_F32
                                      : KVF_DTYPE_NONE;
}

/* Is the line well-formed, and do its numbers agree? */
static bool parse_line(const char *text, struct index_line *line)
{
    char more;
    uint64_t values;

    *line = (struct index_line){0};
    if (sscanf(text, "%15s %u %u %u %u %u %7s %zu %127s %c", line->tensor, &line->layer_first,
               &line->n_layers, &line->n_heads, &line->n_tokens, &line->dim, line->dtype,
               &line->raw_bytes, line->file, &more) != 9) {
        return false;
    }
    if (line->n_layers < 1 || line->n_layers > KVF_LAYERS_MAX ||
        line->layer_first > KVF_LAYERS_MAX - line->n_layers || line->n_heads < 1 ||
        line->n_heads > KVF_HEADS_MAX || line->n_tokens < 1 ||
        line->n_tokens > KVF_CAPTURE_TOKENS_MAX || line->dim < 1 || line->dim > 65536 ||
        dtype_of(line->dtype) == KVF_DTYPE_NONE || strchr(line->file, '/') != NULL) {
        return false;
    }
    values = (uint64_t)line->n_layers * line->n_heads; /* at most 2^19, then 2^39 */
    values *= line->n_tokens;
    return values <= FILE_BYTES_MAX && values * line->dim <= FILE_BYTES_MAX &&
           values * line->dim * kvf_dtype_bytes(dtype_of(line->dtype)) == line->raw_bytes;
}

static int find_kind(const char *tensor)
{
    for (int kind = 0; kind < KVF_CAPTURE_KINDS; kind++) {
        if (strcmp(tensor, tensor_names[kind]) == 0) {
            return kind;
        }
    }
    return -1;
}

static bool is_query(int kind)
{
    return kind == KVF_CAPTURE_Q || kind == KVF_CAPTURE_Q_NORM;
}

/* Read the layers of one line into the capture. */
static int take_line(struct kvf_capture *capture, const struct index_line *line,
                     crypto_hash_sha256_state *digest, char *error_out)
{
    struct kvf_capture_tensor *tensor = &capture->tensors[find_kind(line->tensor)];
    uint8_t dtype = dtype_of(line->dtype);
    size_t layer_bytes = line->raw_bytes / line->n_layers;
    uint8_t *data = NULL;
    int status;
    uint32_t *n_tokens = is_query(find_kind(line->tensor)) ? &capture->n_q_rows
                                                           : &capture->n_tokens;

    if ((tensor->n_heads != 0 && (tensor->n_heads != line->n_heads || tensor->dim != line->dim ||
                                  tensor->dtype != dtype)) ||
        (*n_tokens != 0 && *n_tokens != line->n_tokens)) {
        return fail(error_out, KVF_ERR_CORRUPT, "%s/index.txt: shapes of %s do not agree",
                    capture->folder, line->tensor);
    }
    if (capture->n_buffers == FILES_MAX) {
        return fail(error_out, KVF_ERR_TOO_LARGE, "%s: more than %d files", capture->folder,
                    FILES_MAX);
    }
    status = read_array(capture->folder, line, digest, &data, error_out);
    if (status != KVF_OK) {
        return status;
    }
    capture->buffers[capture->n_buffers++] = data;
    *n_tokens = line->n_tokens;
    tensor->n_heads = line->n_heads;
    tensor->dim = line->dim;
    tensor->dtype = dtype;
    for (uint32_t i = 0; i < line->n_layers; i++) {
        tensor->layers[line->layer_first + i] = data + i * layer_bytes;
    }
    if (line->layer_first + line->n_layers > capture->n_layers) {
        capture->n_layers = line->layer_first + line->n_layers;
    }
    return KVF_OK;
}

static int read_index(struct kvf_capture *capture, char *error_out)
{
    crypto_hash_sha256_state digest;
    struct index_line line;
    uint8_t *text;
    size_t bytes;
    char *rest;
    int status = read_file(capture->folder, "index.txt", &text, &bytes, error_out);

    if (status != KVF_OK) {
        return status;
    }
    crypto_hash_sha256_init(&digest);
    crypto_hash_sha256_update(&digest, text, bytes);
    rest = (char *)text;
    for (char *at; status == KVF_OK && (at = strsep(&rest, "\n")) != NULL;) {
        if (at[0] == '#' || at[0] == '\0') {
            continue;
        }
        if (strlen(at) >= LINE_BYTES || !parse_line(at, &line)) {
            status = fail(error_out, KVF_ERR_CORRUPT, "%s/index.txt: no line of an index: %.100s",
                          capture->folder, at);
        } else if (find_kind(line.tensor) >= 0) {
            status = take_line(capture, &line, &digest, error_out);
        }
    }
    crypto_hash_sha256_final(&digest, capture->digest);
    free(text);
    return status;
}

/* --- manifest.json ---------------------------------------------------------------------------- */

static void copy_text(char out[KVF_CAPTURE_NAME_BYTES], const char *text)
{
    snprintf(out, KVF_CAPTURE_NAME_BYTES, "%s", text != NULL ? text : "");
}

/* The tokens that Q is there for: those of "q_tokens", or all. */
static int take_q_rows(struct kvf_capture *capture, const json_t *list, char *error_out)
{
    uint32_t n = capture->n_q_rows;
    bool is_right = n == 0 || (list != NULL ? json_array_size(list) == n : n == capture->n_tokens);
    int64_t before = -1;

    capture->q_rows = calloc(n + 1, sizeof(*capture->q_rows));
    if (capture->q_rows == NULL) {
        return fail(error_out, KVF_ERR_NO_MEMORY, "%s: out of memory", capture->folder);
    }
    for (uint32_t i = 0; is_right && i < n; i++) {
        int64_t row = list != NULL ? json_integer_value(json_array_get(list, i)) : i;

        is_right = row > before && row < capture->n_tokens;
        capture->q_rows[i] = (uint32_t)row;
        before = row;
    }
    return is_right ? KVF_OK
                    : fail(error_out, KVF_ERR_CORRUPT,
                           "%s: Q has %u tokens of %u, and q_tokens of manifest.json does not "
                           "say which",
                           capture->folder, n, capture->n_tokens);
}

/* What it says beside the index. The index is enough: a folder may lack a manifest. */
static int read_manifest(struct kvf_capture *capture, char *error_out)
{
    char path[PATH_MAX];
    json_error_t error;
    json_t *manifest;
    const char *digest;
    json_int_t position;
    int status;

    snprintf(path, sizeof(path), "%s/manifest.json", capture->folder);
    manifest = json_load_file(path, 0, &error);
    if (manifest == NULL && json_error_code(&error) == json_error_cannot_open_file) {
        return take_q_rows(capture, NULL, error_out);
    }
    position = json_integer_value(json_object_get(manifest, "first_position"));
    digest = json_string_value(json_object_get(manifest, "weights_digest"));
    if (!json_is_object(manifest) || position < 0 || position > UINT32_MAX / 2 ||
        (digest != NULL && !kvf_digest_parse(digest, capture->weights_digest))) {
        json_decref(manifest);
        return fail(error_out, KVF_ERR_CORRUPT,
                    "%s: no JSON object, or first_position or weights_digest is out of range",
                    path);
    }
    capture->has_digest = digest != NULL;
    capture->first_position = (uint32_t)position;
    capture->rope_theta = json_number_value(json_object_get(manifest, "rope_theta"));
    copy_text(capture->model, json_string_value(json_object_get(manifest, "model")));
    copy_text(capture->workload, json_string_value(json_object_get(manifest, "workload")));
    status = take_q_rows(capture, json_object_get(manifest, "q_tokens"), error_out);
    json_decref(manifest);
    return status;
}

/* --- one capture ------------------------------------------------------------------------------ */

bool kvf_capture_has(const struct kvf_capture *capture, enum kvf_capture_kind kind)
{
    const struct kvf_capture_tensor *tensor = &capture->tensors[kind];

    for (uint32_t layer = 0; layer < capture->n_layers; layer++) {
        if (tensor->layers[layer] == NULL) {
            return false;
        }
    }
    return tensor->n_heads != 0;
}

/* Do heads and dims of the tensors fit one another? */
static int check_shapes(const struct kvf_capture *capture, char *error_out)
{
    const struct kvf_capture_tensor *k = &capture->tensors[KVF_CAPTURE_K_POST];
    const struct kvf_capture_tensor *k_pre = &capture->tensors[KVF_CAPTURE_K_PRE];
    const struct kvf_capture_tensor *v = &capture->tensors[KVF_CAPTURE_V];
    const struct kvf_capture_tensor *q = &capture->tensors[KVF_CAPTURE_Q];
    const struct kvf_capture_tensor *norm = &capture->tensors[KVF_CAPTURE_Q_NORM];

    if (!kvf_capture_has(capture, KVF_CAPTURE_K_POST) || !kvf_capture_has(capture, KVF_CAPTURE_V)) {
        return fail(error_out, KVF_ERR_CORRUPT, "%s: k_post and v of every layer are needed",
                    capture->folder);
    }
    if (k->n_heads != v->n_heads || k->dim > KVF_DIM_MAX || v->dim > KVF_DIM_MAX ||
        k->dtype != v->dtype ||
        (k_pre->n_heads != 0 &&
         (k_pre->n_heads != k->n_heads || k_pre->dim != k->dim || k_pre->dtype != k->dtype))) {
        return fail(error_out, KVF_ERR_CORRUPT, "%s: K and V differ in heads or dtype",
                    capture->folder);
    }
    if ((q->n_heads != 0 && (q->n_heads % k->n_heads != 0 || q->dim != k->dim)) ||
        (norm->n_heads != 0 && (norm->n_heads % k->n_heads != 0 || norm->dim != 1))) {
        return fail(error_out, KVF_ERR_CORRUPT, "%s: the heads of Q are no multiple of those of K",
                    capture->folder);
    }
    return KVF_OK;
}

int kvf_capture_open(const char *folder, struct kvf_capture **capture_out,
                     char error_out[KVF_CAPTURE_ERROR_BYTES])
{
    struct kvf_capture *capture = calloc(1, sizeof(*capture));
    const char *name;
    int status = KVF_ERR_NO_MEMORY;

    fail(error_out, 0, "%s: out of memory", folder);
    if (capture == NULL || (capture->folder = strdup(folder)) == NULL ||
        (capture->buffers = calloc(FILES_MAX, sizeof(*capture->buffers))) == NULL) {
        goto fail;
    }
    for (char *end = capture->folder + strlen(folder);
         end > capture->folder + 1 && end[-1] == '/';) {
        *--end = '\0';
    }
    name = strrchr(capture->folder, '/');
    copy_text(capture->name, name != NULL ? name + 1 : capture->folder);
    status = read_index(capture, error_out);
    if (status == KVF_OK) {
        status = read_manifest(capture, error_out);
    }
    if (status == KVF_OK) {
        status = check_shapes(capture, error_out);
    }
    if (status != KVF_OK) {
        goto fail;
    }
    *capture_out = capture;
    return KVF_OK;
fail:
    kvf_capture_close(capture);
    return status;
}

void kvf_capture_close(struct kvf_capture *capture)
{
    if (capture == NULL) {
        return;
    }
    for (uint32_t i = 0; i < capture->n_buffers; i++) {
        free(capture->buffers[i]);
    }
    free(capture->buffers);
    free(capture->q_rows);
    free(capture->folder);
    free(capture);
}

/* --- sets ------------------------------------------------------------------------------------- */

bool kvf_capture_is_alike(const struct kvf_capture *a, const struct kvf_capture *b)
{
    for (int kind = 0; kind < KVF_CAPTURE_KINDS; kind++) {
        const struct kvf_capture_tensor *x = &a->tensors[kind];
        const struct kvf_capture_tensor *y = &b->tensors[kind];

        if (kind != KVF_CAPTURE_K_PRE &&
            (x->n_heads != y->n_heads || x->dim != y->dim || x->dtype != y->dtype)) {
            return false;
        }
    }
    return a->n_layers == b->n_layers;
}

static int add_one(struct kvf_capture_set *set, const char *folder, char *error_out)
{
    struct kvf_capture **items;
    struct kvf_capture *capture;
    int status = kvf_capture_open(folder, &capture, error_out);

    if (status != KVF_OK) {
        return status;
    }
    if (set->n != 0 && !kvf_capture_is_alike(set->items[0], capture)) {
        kvf_capture_close(capture);
        return fail(error_out, KVF_ERR_MISMATCH, "%s: other layers, heads or dims than %s", folder,
                    set->items[0]->folder);
    }
    items = realloc(set->items, (set->n + 1) * sizeof(*items));
    if (items == NULL) {
        kvf_capture_close(capture);
        return fail(error_out, KVF_ERR_NO_MEMORY, "%s: out of memory", folder);
    }
    items[set->n++] = capture;
    set->items = items;
    return KVF_OK;
}

static bool has_index(const char *folder)
{
    char path[PATH_MAX];
    struct stat info;
    int length = snprintf(path, sizeof(path), "%s/index.txt", folder);

    return length > 0 && (size_t)length < sizeof(path) && stat(path, &info) == 0;
}

int kvf_capture_set_add(struct kvf_capture_set *set, const char *folder,
                        char error_out[KVF_CAPTURE_ERROR_BYTES])
{
    struct dirent **entries;
    uint32_t n_before = set->n;
    int status = KVF_OK;
    int n;

    if (has_index(folder)) {
        return add_one(set, folder, error_out);
    }
    n = scandir(folder, &entries, NULL, alphasort);
    if (n < 0) {
        return fail(error_out, KVF_ERR_IO, "%s: %s", folder, strerror(errno));
    }
    for (int i = 0; i < n; i++) {
        char path[PATH_MAX];
        int length = snprintf(path, sizeof(path), "%s/%s", folder, entries[i]->d_name);

        if (status == KVF_OK && entries[i]->d_name[0] != '.' && length > 0 &&
            (size_t)length < sizeof(path) && has_index(path)) {
            status = add_one(set, path, error_out);
        }
        free(entries[i]);
    }
    free(entries);
    if (status == KVF_OK && set->n == n_before) {
        return fail(error_out, KVF_ERR_IO, "%s: no capture: neither index.txt nor folders with one",
                    folder);
    }
    return status;
}

void kvf_capture_set_close(struct kvf_capture_set *set)
{
    for (uint32_t i = 0; i < set->n; i++) {
        kvf_capture_close(set->items[i]);
    }
    free(set->items);
    *set = (struct kvf_capture_set){0};
}

/* --- values ----------------------------------------------------------------------------------- */

void kvf_floats_from(uint8_t dtype, const void *values, size_t n, float *out)
{
    const uint8_t *at = values;

    if (dtype == KVF_DTYPE_F32) {
        memcpy(out, values, n * sizeof(*out));
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t half;

        memcpy(&half, at + 2 * i, sizeof(half));
        out[i] = dtype == KVF_DTYPE_BF16 ? kvf_f32_from_bf16(half) : kvf_f32_from_f16(half);
    }
}

void kvf_capture_head(const struct kvf_capture *capture, enum kvf_capture_kind kind, uint32_t layer,
                      uint32_t head, float *out)
{
    const struct kvf_capture_tensor *tensor = &capture->tensors[kind];
    size_t n = (size_t)(is_query(kind) ? capture->n_q_rows : capture->n_tokens) * tensor->dim;

    kvf_floats_from(tensor->dtype,
                    tensor->layers[layer] + head * n * kvf_dtype_bytes(tensor->dtype), n, out);
}
