/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_watch.c: stands between kvferry-llama and llama.cpp (LD_PRELOAD) and writes down what goes
 * through, for run_llama.py: each state that llama.cpp gives, what it has in its cache after a
 * state was set (asked of llama.cpp itself), and a hash of all logits of each token.
 *
 *   KVF_WATCH_DIR       where to: 0007.get and 0008.set are states, logits has a line a token
 *   KVF_WATCH_CORRUPT   if set, a byte of each state is changed on its way into llama.cpp: behind
 *                       all checksums. The first one, of the server's own trial, is left alone.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct llama_context;

/* Of llama.h, which this is built without. */
size_t llama_state_seq_get_data(struct llama_context *context, uint8_t *data, size_t bytes,
                                int32_t sequence);
size_t llama_state_seq_set_data(struct llama_context *context, const uint8_t *data, size_t bytes,
                                int32_t sequence);
float *llama_get_logits_ith(struct llama_context *context, int32_t index);

static unsigned n_written;
static unsigned n_set;

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);

    if (found == NULL) {
        fprintf(stderr, "llama_watch: no %s\n", name);
        abort();
    }
    return found;
}

static FILE *file_open(const char *name, const char *mode)
{
    const char *folder = getenv("KVF_WATCH_DIR");
    char path[512];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", folder != NULL ? folder : ".", name);
    file = fopen(path, mode);
    if (file == NULL) {
        perror(path);
        abort();
    }
    return file;
}

static void state_write(const uint8_t *data, size_t bytes, const char *kind)
{
    char name[32];
    FILE *file;

    snprintf(name, sizeof(name), "%04u.%s", n_written++, kind);
    file = file_open(name, "wb");
    if (fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) {
        perror(name);
        abort();
    }
}

EXPORT size_t llama_state_seq_get_data(struct llama_context *context, uint8_t *data, size_t bytes,
                                       int32_t sequence)
{
    size_t (*get)(struct llama_context *, uint8_t *, size_t, int32_t);
    size_t n;

    *(void **)&get = real("llama_state_seq_get_data");
    n = get(context, data, bytes, sequence);
    state_write(data, n, "get");
    return n;
}

EXPORT size_t llama_state_seq_set_data(struct llama_context *context, const uint8_t *data,
                                       size_t bytes, int32_t sequence)
{
    size_t (*get)(struct llama_context *, uint8_t *, size_t, int32_t);
    size_t (*get_size)(struct llama_context *, int32_t);
    size_t (*set)(struct llama_context *, const uint8_t *, size_t, int32_t);
    uint8_t *copy = malloc(bytes);
    uint8_t *had;
    size_t n;
    size_t n_had;

    *(void **)&get = real("llama_state_seq_get_data");
    *(void **)&get_size = real("llama_state_seq_get_size");
    *(void **)&set = real("llama_state_seq_set_data");
    if (copy == NULL) {
        abort();
    }
    memcpy(copy, data, bytes);
    if (n_set++ > 0 && getenv("KVF_WATCH_CORRUPT") != NULL) {
        copy[bytes / 2] ^= 0x10; /* among the rows, which are nearly all of it */
    }
    n = set(context, copy, bytes, sequence);
    free(copy);
    n_had = get_size(context, sequence);
    had = malloc(n_had + 1);
    if (had == NULL) {
        abort();
    }
    state_write(had, get(context, had, n_had, sequence), "set");
    free(had);
    return n;
}

EXPORT float *llama_get_logits_ith(struct llama_context *context, int32_t index)
{
    float *(*logits)(struct llama_context *, int32_t);
    const void *(*get_model)(const struct llama_context *);
    const void *(*get_vocab)(const void *);
    int32_t (*n_tokens)(const void *);
    uint64_t hash = 0xcbf29ce484222325ull;
    float *found;
    FILE *file;
    size_t n;

    *(void **)&logits = real("llama_get_logits_ith");
    *(void **)&get_model = real("llama_get_model");
    *(void **)&get_vocab = real("llama_model_get_vocab");
    *(void **)&n_tokens = real("llama_vocab_n_tokens");
    found = logits(context, index);
    n = found != NULL ? (size_t)n_tokens(get_vocab(get_model(context))) : 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &found[i], sizeof(bits));
        hash = (hash ^ bits) * 0x100000001b3ull;
    }
    file = file_open("logits", "a");
    fprintf(file, "%016llx\n", (unsigned long long)hash);
    fclose(file);
    return found;
}
