/* SPDX-License-Identifier: Apache-2.0
 *
 * llama_main.c: kvferry-llama, a small server over llama.cpp whose prompts' K and V go to kvferryd
 * and come back from there. An example: one model, greedy tokens, requests one after the other.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/llama.cpp/llama_http.h"
#include "connectors/llama.cpp/llama_say.h"

#define NAME "kvferry-llama"

enum {
    EXIT_USAGE = 2,
    LINE_BYTES = 512,
};

struct settings {
    struct kvf_llama_engine_options engine;
    struct sockaddr_in address;
};

static const char usage[] =
    "usage: " NAME " --model FILE.gguf [options]\n"
    "\n"
    "  --model FILE            the model\n"
    "  --listen ADDRESS:PORT   where to answer HTTP [127.0.0.1:8080]; port 0: any\n"
    "  --socket PATH           kvferryd's socket [$KVFERRY_SOCKET, or /run/kvferry/kvferryd.sock]\n"
    "  --profile NAME          how K and V are stored [exact]\n"
    "  --allow-uncalibrated    take a profile with loss that no calibration has passed\n"
    "  --namespace LABEL       keeps applications apart [\"\"]\n"
    "  --store WHAT            which chunks are stored: prompt, all, none [prompt]\n"
    "  --chunk-tokens N        tokens of a block, and of a batch, 1 to 256 [256]\n"
    "  --ctx-tokens N          tokens of a slot [4096]\n"
    "  --slots N               sequences that are kept, 1 to 64 [1]\n"
    "  --threads N             [one a processor]\n"
    "  --kv-type TYPE          f16, bf16 or f32 [f16]\n"
    "  --load-budget-ms N      what has not come from the daemon by then is computed [2000]\n"
    "  --allow-untested        run with another llama.cpp than " KVF_LLAMA_TESTED_VERSION "\n"
    "  --help, --version\n"
    "\n"
    "  POST /completion  {\"prompt\": \"text\" or [tokens], \"n_predict\": 16, \"logprobs\": "
    "false,\n"
    "                     \"load\": true, \"store\": true, \"budget_ms\": 2000, \"temperature\": "
    "0}\n"
    "  POST /tokenize    {\"text\": \"text\"}\n"
    "  GET  /health      the model, and what has been hit and stored\n";

void kvf_llama_say(int severity, const char *fmt, ...)
{
    static const char *const names[] = {"error: ", "warning: ", ""};
    char line[LINE_BYTES];
    va_list args;

    if (severity < 0 || severity > 2) {
        return;
    }
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    fprintf(stderr, NAME ": %s%s\n", names[severity], line);
}

static int fault(const char *option, const char *value, const char *wanted)
{
    kvf_llama_say(0, "%s %s: %s is wanted", option, value, wanted);
    return EXIT_USAGE;
}

static bool number(const char *text, uint32_t least, uint32_t most, uint32_t *out)
{
    char *end;
    unsigned long value;

    errno = 0;
    value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < least ||
        value > most) {
        return false;
    }
    *out = (uint32_t)value;
    return true;
}

static int number_option(const char *option, const char *text, uint32_t least, uint32_t most,
                         uint32_t *out)
{
    char wanted[64];

    if (number(text, least, most, out)) {
        return 0;
    }
    snprintf(wanted, sizeof(wanted), "a number from %u to %u", least, most);
    return fault(option, text, wanted);
}

static int listen_option(const char *text, struct sockaddr_in *address)
{
    char host[64];
    const char *colon = strrchr(text, ':');
    uint32_t port;

    if (colon == NULL || (size_t)(colon - text) >= sizeof(host) ||
        !number(colon + 1, 0, 65535, &port)) {
        return fault("--listen", text, "an address as 127.0.0.1:8080");
    }
    memcpy(host, text, (size_t)(colon - text));
    host[colon - text] = '\0';
    if (inet_pton(AF_INET, host, &address->sin_addr) != 1) {
        return fault("--listen", text, "an address as 127.0.0.1:8080");
    }
    address->sin_family = AF_INET;
    address->sin_port = htons((uint16_t)port);
    return 0;
}

static int store_option(const char *text, enum kvf_llama_store *store)
{
    static const char *const names[] = {"none", "prompt", "all"};

    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) {
            *store = (enum kvf_llama_store)i;
            return 0;
        }
    }
    return fault("--store", text, "prompt, all or none");
}

static int kv_type_option(const char *text, int32_t *type)
{
    *type = kvf_llama_type_find(text);
    return *type >= 0 ? 0
                      : fault("--kv-type", text,
                              "f16, bf16 or f32 (K and V that llama.cpp has quantized are not "
                              "served)");
}

enum option_id {
    OPTION_MODEL = 1,
    OPTION_LISTEN,
    OPTION_SOCKET,
    OPTION_PROFILE,
    OPTION_UNCALIBRATED,
    OPTION_NAMESPACE,
    OPTION_STORE,
    OPTION_CHUNK,
    OPTION_CTX,
    OPTION_SLOTS,
    OPTION_THREADS,
    OPTION_KV_TYPE,
    OPTION_BUDGET,
    OPTION_UNTESTED,
    OPTION_HELP,
    OPTION_VERSION,
};

static const struct option options_known[] = {
    {"model", required_argument, NULL, OPTION_MODEL},
    {"listen", required_argument, NULL, OPTION_LISTEN},
    {"socket", required_argument, NULL, OPTION_SOCKET},
    {"profile", required_argument, NULL, OPTION_PROFILE},
    {"allow-uncalibrated", no_argument, NULL, OPTION_UNCALIBRATED},
    {"namespace", required_argument, NULL, OPTION_NAMESPACE},
    {"store", required_argument, NULL, OPTION_STORE},
    {"chunk-tokens", required_argument, NULL, OPTION_CHUNK},
    {"ctx-tokens", required_argument, NULL, OPTION_CTX},
    {"slots", required_argument, NULL, OPTION_SLOTS},
    {"threads", required_argument, NULL, OPTION_THREADS},
    {"kv-type", required_argument, NULL, OPTION_KV_TYPE},
    {"load-budget-ms", required_argument, NULL, OPTION_BUDGET},
    {"allow-untested", no_argument, NULL, OPTION_UNTESTED},
    {"help", no_argument, NULL, OPTION_HELP},
    {"version", no_argument, NULL, OPTION_VERSION},
    {NULL, 0, NULL, 0},
};

/* One option. 0; else an exit status. */
static int option_take(int which, const char *value, struct settings *settings)
{
    struct kvf_llama_engine_options *engine = &settings->engine;

    switch (which) {
    case OPTION_MODEL:
        engine->model.path = value;
        return 0;
    case OPTION_LISTEN:
        return listen_option(value, &settings->address);
    case OPTION_SOCKET:
        engine->socket_path = value;
        return 0;
    case OPTION_PROFILE:
        engine->profile = value;
        return 0;
    case OPTION_UNCALIBRATED:
        engine->allow_uncalibrated = true;
        return 0;
    case OPTION_NAMESPACE:
        engine->label = value;
        return 0;
    case OPTION_STORE:
        return store_option(value, &engine->store);
    case OPTION_CHUNK:
        return number_option("--chunk-tokens", value, 1, KVF_CHUNK_TOKENS_MAX,
                             &engine->model.chunk_tokens);
    case OPTION_CTX:
        return number_option("--ctx-tokens", value, 1, KVF_LLAMA_TOKENS_MAX,
                             &engine->model.context_tokens);
    case OPTION_SLOTS:
        return number_option("--slots", value, 1, KVF_LLAMA_SLOTS_MAX, &engine->model.n_slots);
    case OPTION_THREADS:
        return number_option("--threads", value, 1, 1024, &engine->model.n_threads);
    case OPTION_KV_TYPE:
        return kv_type_option(value, &engine->model.kv_type);
    case OPTION_BUDGET:
        return number_option("--load-budget-ms", value, 0, 600000, &engine->load_budget_ms);
    case OPTION_UNTESTED:
        engine->model.allow_untested = true;
        return 0;
    default:
        kvf_llama_say(2, "try --help");
        return EXIT_USAGE;
    }
}

/* -1: go on; else an exit status. */
static int settings_read(int argc, char **argv, struct settings *settings)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int which;

    *settings = (struct settings){
        .engine = {.model = {.kv_type = kvf_llama_type_find("f16"),
                             .n_slots = 1,
                             .context_tokens = 4096,
                             .chunk_tokens = KVF_CHUNK_TOKENS_MAX,
                             .n_threads = processors > 0 ? (uint32_t)processors : 1},
                   .profile = "exact",
                   .label = "",
                   .store = KVF_LLAMA_STORE_PROMPT,
                   .load_budget_ms = 2000},
    };
    listen_option("127.0.0.1:8080", &settings->address);
    while ((which = getopt_long(argc, argv, "", options_known, NULL)) != -1) {
        int status;

        if (which == OPTION_HELP) {
            fputs(usage, stdout);
            return 0;
        }
        if (which == OPTION_VERSION) {
            printf(NAME " %s\n", kvf_version());
            return 0;
        }
        status = option_take(which, optarg, settings);
        if (status != 0) {
            return status;
        }
    }
    if (optind < argc) {
        return fault("", argv[optind], "an option");
    }
    if (settings->engine.model.path == NULL) {
        kvf_llama_say(0, "--model is needed: a GGUF file");
        return EXIT_USAGE;
    }
    return -1;
}

/* Answer until a signal says to end. */
static int serve(const struct settings *settings, const sigset_t *signals)
{
    struct kvf_llama_engine *engine;
    struct kvf_llama_http *http;
    char why[KVF_LLAMA_WHY_BYTES];
    char host[INET_ADDRSTRLEN] = "";
    uint16_t port;
    int number_of_signal;
    int status = kvf_llama_engine_create(&settings->engine, &engine, why);

    if (status != KVF_OK) {
        kvf_llama_say(0, "%s", why);
        return EXIT_FAILURE;
    }
    inet_ntop(AF_INET, &settings->address.sin_addr, host, sizeof(host));
    status = kvf_llama_http_start(engine, &settings->address, settings->engine.load_budget_ms,
                                  &http, &port);
    if (status != KVF_OK) {
        kvf_llama_say(0, "--listen %s:%u: %s", host, ntohs(settings->address.sin_port),
                      status == KVF_ERR_IO ? strerror(errno) : kvf_status_text(status));
    } else {
        kvf_llama_say(2, "answers at http://%s:%u", host, port);
        sigwait(signals, &number_of_signal);
        kvf_llama_say(2, "ends");
        kvf_llama_engine_stop(engine);
        kvf_llama_http_stop(http);
    }
    kvf_llama_engine_stop(engine);
    kvf_llama_engine_destroy(engine);
    return status == KVF_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    struct settings settings;
    sigset_t signals;
    int status = settings_read(argc, argv, &settings);

    if (status >= 0) {
        return status;
    }
    /* blocked before there are threads, so that all of them leave these to sigwait */
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    return serve(&settings, &signals);
}
