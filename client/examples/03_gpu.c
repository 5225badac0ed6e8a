/* SPDX-License-Identifier: Apache-2.0
 *
 * 03_gpu.c: KV from pages in GPU memory to the daemon, and back into other pages.
 *
 *   cc 03_gpu.c $(pkg-config --cflags --libs libkvferry_gpu) -ldl && ./a.out [SOCKET]
 *
 * An engine has its pages, streams and events already, from CUDA's runtime or its driver: they are
 * given to the library as they are. To stand alone this example takes a little memory from the
 * driver by itself. Without a GPU it says so and ends well.
 */
#include <dlfcn.h>
#include <kvferry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS      4
#define HEADS       2
#define DIM         64
#define PAGE_TOKENS 16
#define CHUNK       64 /* tokens of a block: four pages */
#define PAGES       8

/* One page of one layer: [head][token][K, V][element], as bf16. */
#define VECTOR_BYTES (2 * DIM * sizeof(uint16_t))
#define PAGE_BYTES   (HEADS * PAGE_TOKENS * VECTOR_BYTES)
#define LAYER_BYTES  (PAGES * PAGE_BYTES)

static uint8_t host[LAYERS * LAYER_BYTES];
static uint8_t loaded[LAYERS * LAYER_BYTES];

static void print_log(void *arg, int severity, const char *text)
{
    (void)arg;
    (void)severity;
    fprintf(stderr, "libkvferry: %s\n", text);
}

/* What an engine has of its own. */
struct cuda {
    void *library;
    void *context;
    uint64_t pages;
    int (*copy_in)(uint64_t to, const void *from, size_t bytes);
    int (*copy_out)(void *to, uint64_t from, size_t bytes);
};

static void *symbol(const struct cuda *cuda, const char *name)
{
    return dlsym(cuda->library, name);
}

/* 0: there is a GPU, its context is current, and pages are allocated. */
static int cuda_start(struct cuda *cuda)
{
    const char *path = getenv("KVFERRY_CUDA_DRIVER");
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*push)(void *);
    int (*allocate)(uint64_t *, size_t);

    cuda->library = dlopen(path != NULL ? path : "libcuda.so.1", RTLD_NOW);
    if (cuda->library == NULL) {
        return -1;
    }
    *(void **)&init = symbol(cuda, "cuInit");
    *(void **)&retain = symbol(cuda, "cuDevicePrimaryCtxRetain");
    *(void **)&push = symbol(cuda, "cuCtxPushCurrent_v2");
    *(void **)&allocate = symbol(cuda, "cuMemAlloc_v2");
    *(void **)&cuda->copy_in = symbol(cuda, "cuMemcpyHtoD_v2");
    *(void **)&cuda->copy_out = symbol(cuda, "cuMemcpyDtoH_v2");
    if (init == NULL || retain == NULL || push == NULL || allocate == NULL ||
        cuda->copy_in == NULL || cuda->copy_out == NULL || init(0) != 0) {
        return -1;
    }
    return retain(&cuda->context, 0) == 0 && push(cuda->context) == 0
               ? allocate(&cuda->pages, sizeof(host))
               : -1;
}

static int attach(const char *socket_path, struct kvf_client **client_out)
{
    struct kvf_geometry geometry = {
        .struct_bytes = sizeof(geometry),
        .kind = KVF_KIND_KV,
        .dtype = KVF_DTYPE_BF16,
        .rope_state = KVF_ROPE_POST,
        .n_layers = LAYERS,
        .n_heads = HEADS,
        .dim_k = DIM,
        .dim_v = DIM,
        .chunk_tokens = CHUNK,
    };
    struct kvf_options options;

    kvf_options_init(&options);
    options.socket_path = socket_path;
    options.geometry = &geometry;
    options.profile = "exact";
    options.log = print_log;
    memcpy(options.weights_digest, "example 03", 10);
    return kvf_open(&options, client_out);
}

/* Say where the pages are: one region for all layers, K and V. */
static int register_pages(struct kvf_gpu *gpu, uint64_t pages, struct kvf_gpu_region **region_out)
{
    struct kvf_gpu_region_options options = {
        .struct_bytes = sizeof(options), .n_pages = PAGES, .tokens_a_page = PAGE_TOKENS};
    void *k[LAYERS];
    void *v[LAYERS];

    for (int layer = 0; layer < LAYERS; layer++) {
        k[layer] = (void *)(uintptr_t)(pages + (uint64_t)layer * LAYER_BYTES);
        v[layer] = (uint8_t *)k[layer] + VECTOR_BYTES / 2;
    }
    options.k = (struct kvf_tensor_view){
        .layers = k,
        .page_stride_bytes = PAGE_BYTES,
        .token_stride_bytes = VECTOR_BYTES,
        .head_stride_bytes = PAGE_TOKENS * VECTOR_BYTES,
    };
    options.v = options.k;
    options.v.layers = v;
    return kvf_gpu_register(gpu, &options, region_out);
}

/* Events until the request has ended. Returns its status. */
static int wait_for(struct kvf_gpu *gpu, uint64_t request)
{
    for (;;) {
        struct kvf_gpu_event event;
        uint32_t n = 0;
        int status = kvf_gpu_poll(gpu, &event, 1, 10000, &n);

        if (status != KVF_OK) {
            return status == KVF_EMPTY ? KVF_ERR_TIMEOUT : status;
        }
        if (event.kind == KVF_GPU_EVENT_PAGES_FREE) {
            printf("pages may be rewritten\n");
        }
        if (event.kind == KVF_GPU_EVENT_REQUEST && event.request == request) {
            return event.status;
        }
    }
}

static int run(struct kvf_gpu *gpu, struct kvf_gpu_region *region)
{
    static const char key[32] = "example 03, hash of the chunk";
    static const uint32_t from[] = {3, 1, 0, 2};
    static const uint32_t to[] = {4, 7, 5, 6};
    struct kvf_gpu_put_item put = {
        .struct_bytes = sizeof(put), .n_pages = 4, .key = {key, sizeof(key)}, .pages = from};
    struct kvf_gpu_get_item get = {
        .struct_bytes = sizeof(get), .n_pages = 4, .key = {key, sizeof(key)}, .pages = to};
    uint64_t request;
    /* An engine gives its stream, and an event recorded behind the step that wrote the pages; here
     * they were written by calls that have ended. */
    int status = kvf_gpu_put(gpu, region, &put, 1, NULL, NULL, NULL, 0, NULL, &request);

    if (status == KVF_OK) {
        status = wait_for(gpu, request);
    }
    if (status == KVF_OK) {
        status = kvf_gpu_get(gpu, region, &get, 1, NULL, NULL, NULL, 0, &request);
    }
    return status == KVF_OK ? wait_for(gpu, request) : status;
}

/* Are pages 4, 7, 5, 6 now what pages 3, 1, 0, 2 were? */
static int check(const struct cuda *cuda)
{
    static const int moved[][2] = {{3, 4}, {1, 7}, {0, 5}, {2, 6}};

    if (cuda->copy_out(loaded, cuda->pages, sizeof(loaded)) != 0) {
        return 0;
    }
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < 4; i++) {
            if (memcmp(host + layer * LAYER_BYTES + moved[i][0] * PAGE_BYTES,
                       loaded + layer * LAYER_BYTES + moved[i][1] * PAGE_BYTES, PAGE_BYTES) != 0) {
                return 0;
            }
        }
    }
    return 1;
}

int main(int argc, char **argv)
{
    struct kvf_gpu_options options = {.struct_bytes = sizeof(options)};
    struct kvf_gpu_region *region = NULL;
    struct kvf_client *client = NULL;
    struct kvf_gpu *gpu = NULL;
    struct cuda cuda = {0};
    int status;

    if (cuda_start(&cuda) != 0) {
        printf("no GPU here\n");
        return 0;
    }
    for (size_t i = 0; i < sizeof(host); i++) {
        host[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    if (cuda.copy_in(cuda.pages, host, sizeof(host)) != 0) {
        fprintf(stderr, "the GPU does not work\n");
        return 1;
    }
    status = attach(argc > 1 ? argv[1] : NULL, &client);
    if (status == KVF_OK) {
        status = kvf_gpu_open(client, &options, &gpu);
    }
    if (status == KVF_ERR_UNSUPPORTED) {
        kvf_close(client); /* the log has said why */
        return 0;
    }
    if (status == KVF_OK) {
        status = register_pages(gpu, cuda.pages, &region);
    }
    if (status == KVF_OK) {
        status = run(gpu, region);
    }
    kvf_gpu_close(gpu); /* before its client */
    kvf_close(client);
    if (status != KVF_OK) {
        fprintf(stderr, "failed: %s\n", kvf_status_text(status));
        return 1;
    }
    printf("64 tokens came back into other pages: %s\n", check(&cuda) ? "equal" : "DIFFERENT");
    return check(&cuda) ? 0 : 1;
}
