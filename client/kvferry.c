/* SPDX-License-Identifier: Apache-2.0
 *
 * kvferry.c: the kvferry command: arguments, help and dispatch. The tables below are what --help
 * prints; a subcommand accepts the options that its row names and no others.
 */
#include <curl/curl.h>
#include <getopt.h>
#include <inttypes.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/parse.h"
#include "client/calib_search.h"
#include "client/cli.h"
#include "client/cost.h"
#include "client/trace_file.h"
#include "client/tunnel.h"

#define SOCKET_DEFAULT "/run/kvferry/kvferryd.sock"

#define TEXT_OF(x)     #x
#define VALUE_OF(x)    TEXT_OF(x)
#define DEFAULT_MEDIAN VALUE_OF(KVF_DEFAULT_SIGMA_MEDIAN)
#define DEFAULT_P99    VALUE_OF(KVF_DEFAULT_SIGMA_P99)
#define DEFAULT_OUTPUT VALUE_OF(KVF_DEFAULT_OUTPUT_ERROR)
#define DEFAULT_TOP1   VALUE_OF(KVF_DEFAULT_TOP1)

struct option_row {
    char letter;
    const char *name;
    const char *argument; /* NULL: it takes none */
    const char *text;
};

static const struct option_row option_rows[] = {
    {'s', "socket", "PATH",
     "the daemon's client socket, or tcp://host:port?key=FILE ($KVFERRY_SOCKET, or " SOCKET_DEFAULT
     ")"},
    {'a', "admin-socket", "PATH", "its admin socket (the client socket with .admin appended)"},
    {'o', "output", "text|json", "how to print; text may change, json only grows"},
    {'h', "help", NULL, "print this"},
    {'k', "key", "HEX", "key of 16 to 64 bytes in hexadecimal"},
    {'t', "key-text", "TEXT", "key made of a text: its BLAKE2b-256 (b2sum -l 256)"},
    {'l', "label", "LABEL", "label of the namespace (empty)"},
    {'n', "namespace", "NAME", "a namespace by its id, or by its label if only one has it"},
    {'D', "durable", NULL, "wait until the block is on a drive"},
    {'W', "no-write", NULL, "never write the block to a drive"},
    {'T', "ttl", "TIME", "forget the block after this time (30s, 5min; no limit)"},
    {'b', "budget", "TIME", "give up after this time (500ms, 10s)"},
    {'c', "count", "N", "how many"},
    {'z', "size", "SIZE", "bytes of a block (1MiB), or of a trace's file at most (1GiB)"},
    {'d', "depth", "N", "requests in flight (8)"},
    {'I', "interval", "TIME", "between two looks (2s)"},
    {'8', "duration", "TIME", "how long (until a signal comes)"},
    {'K', "keep", NULL, "leave the blocks in the daemon"},
    {'P', "profile", "NAME", "a profile of this release (see kvferry profiles)"},
    {'S', "svg", "FILE", "draw the figures, by layer and head"},
    {'C', "capture", "DIR", "captures to choose by; may be repeated"},
    {'H', "heldout", "DIR", "captures to check with; may be repeated"},
    {'L', "workload", "LABEL", "chat, long-retrieval, reasoning, tool-calls, code or other"},
    {'G', "weights-digest", "HEX", "the model, as its engine names it at attach"},
    {'F', "weights", "FILE", "the model, by the SHA-256 of this file"},
    {'A', "adapter-digest", "HEX", "the adapter, as its engine names it (none)"},
    {'w', "write", "FILE", "what to write: a profile for the daemon's calibration.dir, or factors"},
    {'N', "name", "NAME", "of the profile: a-z, 0-9, '.', '-', at most 15 (calibrated)"},
    {'B', "target-bits", "X", "divide this mean of bits a value among layers"},
    {'m', "sigma-median", "X", "most logit noise of the worst head, median (" DEFAULT_MEDIAN ")"},
    {'q', "sigma-p99", "X", "the same, 99th percentile (" DEFAULT_P99 ")"},
    {'e', "output-error", "X", "most error of attention's output, relative (" DEFAULT_OUTPUT ")"},
    {'1', "top1", "X", "least share of queries whose top key stays (" DEFAULT_TOP1 ")"},
    {'x', "codecs", "LIST", "of saw, tq and kivi (all)"},
    {'r', "rope-state", "STATE", "code K post, pre, or auto: what takes less (post)"},
    {'i', "sinks", "N", "leading tokens of a text kept raw (calibrate: 4, inspect: 0)"},
    {'Q', "queries", "N", "queries a head and capture, at most (64)"},
    {'j', "threads", "N", "as many as processors"},
    {'p', "profiles", "LIST", "profiles to compare, with commas (some of each kind)"},
    {'U', "link", "GB/S", "rate of the link to the GPU, 10^9 bytes a second"},
    {'V', "tflops", "X", "rate of products, 10^12 operations a second"},
    {'f', "fixed", "MS", "time of a fetch before its first byte (0)"},
    {'X', "tokens", "N", "of the prompt (4096)"},
    {'J', "trace", "FILE", "prompts to replay, as for kvferry replay"},
    {'g', "model", "MODEL", "folder with config.json, config.json, .safetensors or .gguf file"},
    {'Y', "bytes-a-token", "X", "what a token takes, instead of --model and --profiles"},
    {'M', "dram", "SIZE[,SIZE]", "arenas in memory (plan: one)"},
    {'E', "nvme", "SIZE[,SIZE]", "stores on a drive (plan: one; 0: none)"},
    {'u', "write-budget", "RATE", "bytes a second to the drive, as 200MiB (no limit)"},
    {'y', "admission", "RULE", "auto, all or second-sight: nvme.admission (auto)"},
    {'O', "block-tokens", "N", "of the trace (what it says, or 512)"},
    {'Z', "drive", "GB/S", "rate of the drive's reads, 10^9 bytes a second"},
    {'v', "dwpd", "X", "writes of its size that the drive bears a day (1)"},
    {'2', "layers", "N", "of the model; this and what follows go before its file"},
    {'3', "d-model", "N", "elements of X, a layer's input"},
    {'4', "heads", "N", "K/V heads of a layer"},
    {'5', "query-heads", "N", "query heads of a layer (as K/V heads)"},
    {'6', "dim", "N", "elements of a head's vectors"},
    {'7', "ffn", "N", "width of the feed-forward part, of what a token goes through"},
    {'9', "tenant", "NAME", "whose blocks the client may read (default)"},
    {'R', "rank", "N", "elements of a latent, at most (all that K and V follow from)"},
};
#define OPTION_ROWS (sizeof(option_rows) / sizeof(option_rows[0]))

struct command {
    const char *name;
    const char *arguments;
    const char *options; /* letters of option_rows; s, a, o and h go without saying */
    uint32_t files_max;
    bool is_offline; /* takes neither s nor a */
    int (*run)(const struct cli *cli);
    const char *summary;
    const char *details;
};

static const struct command commands[] = {
    {"ping", "", "c", 0, false, cli_ping, "measure round trips to the daemon",
     "Attaches and sends --count (1000) empty requests through the rings and the daemon's loop."},
    {"stat", "", "", 0, false, cli_stat, "show tiers, counters and latencies",
     "Latencies are upper edges of power-of-two buckets, since the daemon's start."},
    {"put", "[FILE]", "ktlDWTb", 1, false, cli_put, "store a file or standard input as one block",
     "Stores up to 64 MiB as they are (profile bytes) under a key. Says \"stored\", \"durable\" or "
     "\"exists\";\nanother payload under a key that is there is refused, the first one stands."},
    {"get", "[FILE]", "ktlb", 1, false, cli_get, "fetch a block to a file or standard output",
     "Copies the block, gives the lease back, checks the checksum, and only then writes. A block "
     "that is\nnot there: prints \"miss\" and exits with 1."},
    {"ls", "", "nc", 0, false, cli_ls, "list namespaces, or the blocks of one",
     "Without --namespace the namespaces; with it up to --count (all) blocks, one a line; with -o "
     "json one\nobject a line."},
    {"verify", "", "", 0, false, cli_verify, "read every block and check it",
     "Exits with 1 if a block was bad. Bad blocks are dropped."},
    {"evict", "", "ktln", 0, false, cli_evict, "forget a block, or the blocks of a namespace",
     "A key with its label, or a namespace. After a crash evicted blocks may come back from a "
     "drive; use\npurge to forget for good."},
    {"purge", "", "n", 0, false, cli_purge, "forget a namespace for good",
     "Returns when the purge itself is on stable storage: no block stored before comes back."},
    {"clients", "", "", 0, false, cli_clients, "list attached clients", "One a line."},
    {"peers", "", "", 0, false, cli_peers, "list linked daemons of other nodes",
     "One a line: those that this one asks for blocks, by address, and those that ask it."},
    {"client-key", "FILE", "9", 1, true, cli_client_key,
     "make the key of a tenant's clients on other nodes",
     "FILE is the cluster_key of the daemons. Prints a line: who has it in a file can attach to "
     "them "
     "by\n--socket tcp://host:port?key=THAT_FILE as a client of the tenant, and do nothing else."},
    {"top", "", "cI", 0, false, cli_top, "show what the daemon does now, again and again",
     "On a terminal until q is typed, or --count looks; else one look, or --count of them one "
     "after "
     "the other.\nRates and means are of the time between two looks. With -o json one object a "
     "look."},
    {"disable", "", "n", 0, false, cli_disable,
     "let clients find nothing, of a namespace or of all",
     "Lookups and gets are misses and puts are refused from now on, until enable or the daemon's "
     "end. "
     "What is\nstored stays, and engines need no restart."},
    {"enable", "", "n", 0, false, cli_enable, "put a disabled namespace, or all, back into service",
     "Without --namespace all of them."},
    {"reload", "", "", 0, false, cli_reload, "have the daemon read calibration.dir again",
     "As SIGHUP does. Profiles that have passed since count for clients that attach from now on, "
     "those "
     "that\nare gone count for no new ones. If the folder cannot be read, nothing changes. Other "
     "options "
     "need a\nrestart."},
    {"log-level", "[LEVEL]", "", 1, false, cli_log_level, "show or set what the daemon logs",
     "error, warning, info or debug, until the daemon ends. GPU workers keep the level that they "
     "were\nstarted with."},
    {"drain", "", "", 0, false, cli_drain, "end the daemon, without losing what it has to write",
     "As SIGTERM does: no new clients or puts, then what is queued for drives is written, for "
     "drain.timeout\nat most. Shows progress, and returns when the daemon has ended."},
    {"profiles", "", "", 0, false, cli_profiles,
     "list the profiles of this release and their sizes",
     "Bits a value of K and V and the ratio to bf16, in a model of 32 layers of 8 heads of 128 and "
     "blocks\nof 256 tokens. If a daemon is there, also what has passed calibration by its files."},
    {"inspect", "CAPTURE...", "PSmqij", CLI_FOLDERS_MAX, true, cli_inspect,
     "tell what is hard about captured K and V",
     "For each layer and head: kurtosis before and after rotation, norms, what a profile "
     "(balanced) "
     "does to\nK and V, logit noise, and the bits that it suggests. Asks no daemon."},
    {"calibrate", "", "CHLGFAwNPBmqe1xriQj", 0, true, cli_calibrate,
     "find a profile for a model, and write it if it passes",
     "Goes down from 8 bits to 3, layer by layer, as far as the thresholds allow, checks on "
     "held-out\ncaptures what attention makes of it, and writes the file that the daemon reads. "
     "With --profile it only\nchecks a profile of this release. Exits with 1 if nothing passes. "
     "Asks no daemon."},
    {"svd", "MODEL", "wRG", 1, true, cli_svd, "find what latents of X hold K and V",
     "Decomposes [W_K | W_V] of each layer of a folder of Hugging Face, a .safetensors or a .gguf "
     "file, and\nwrites the factors to --write. The file names the weights: by --weights-digest, "
     "else by their SHA-256.\nNeeds OpenBLAS. Asks no daemon."},
    {"plan", "[MODEL]", "UVXfpJMEuyOZv234567", 1, true, cli_plan,
     "tell what fetching K and V, or X, costs beside computing",
     "Bytes a token, and milliseconds to fetch and to rebuild K and V, by profile, for a folder "
     "with config.json,\na config.json, a .safetensors or .gguf file, or a shape; and from how "
     "many "
     "tokens on that is faster than\nto compute them again. Sizes are those of the codecs, rates "
     "are yours.\nWith --trace, --dram, --nvme and --drive also what such a store is worth: hours "
     "that it holds, "
     "hits,\nseconds of prefill saved, bytes written a day against --dwpd. Asks no daemon."},
    {"doctor", "", "", 0, false, cli_doctor, "find the first thing that is wrong, and its cure",
     "Sockets, attach, version, service, memory and huge pages, drives and how they are used, "
     "GPUs, and what\n"
     "has gone wrong since the daemon's start. Ends with 1 at the first that is wrong."},
    {"trace", "record FILE", "n8z", 2, false, cli_trace,
     "record prompts that are looked up, for replay",
     "Times, lengths and hashes of chunks, under a salt of this recording: no keys, no content. "
     "Until a\nsignal, --duration or --size (1GiB) of the file ends it. Chunks of one size: "
     "name a --namespace where\nclients differ."},
    {"replay", "TRACE", "gYpMEuyO234567", 1, true, cli_replay,
     "tell what a trace of prompts hits in stores of some sizes",
     "For each profile, --dram and --nvme: hit tokens by tier, bytes fetched, stored and written. "
     "The trace\nis JSON lines, of Mooncake or of kvferry trace record; - is standard input. It "
     "goes "
     "through the\ndaemon's own index, admission and eviction, over a clock of its own. Sizes of a "
     "token are those of\nthe codecs for --model or a shape. Asks no daemon."},
    {"bench", "", "czdDWK", 0, false, cli_bench, "measure puts and gets beside a memcpy",
     "Puts --count (256) blocks of --size with --depth in flight, gets them back, and copies the "
     "same bytes\nby memcpy on one core. The blocks are evicted at the end."},
};
#define COMMANDS (sizeof(commands) / sizeof(commands[0]))

/* --- shared helpers --------------------------------------------------------------------------- */

int cli_fail(enum cli_exit code, const char *fmt, ...)
{
    va_list args;

    fputs("kvferry: ", stderr);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return code;
}

int cli_fail_status(const struct cli *cli, const char *what, int status)
{
    if (status == KVF_ERR_NO_DAEMON) {
        return cli_fail(CLI_NO_DAEMON, "no daemon listens at %s; start kvferryd, or give --socket",
                        cli->socket);
    }
    return cli_fail(CLI_FAILED, "%s: %s: %s", what, kvf_status_name(status),
                    kvf_status_text(status));
}

void cli_print_json(json_t *json)
{
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;

    printf("%s\n", text != NULL ? text : "{}");
    free(text);
    json_decref(json);
}

const char *cli_bytes_text(uint64_t bytes, char *out, size_t out_bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    unsigned unit = 0;

    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    snprintf(out, out_bytes, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return out;
}

/* --- help ------------------------------------------------------------------------------------- */

static void print_help(void)
{
    printf("usage: kvferry COMMAND [OPTION]...\n\n"
           "Asks a kvferryd on this machine, or looks at captures of K and V and at "
           "models.\n\ncommands:\n");
    for (size_t i = 0; i < COMMANDS; i++) {
        printf("    %-10s %s\n", commands[i].name, commands[i].summary);
    }
    printf("\nkvferry COMMAND --help says more. Options of all commands:\n");
    for (size_t i = 0; i < OPTION_ROWS && option_rows[i].letter != 'k'; i++) {
        printf("    --%-14s %-10s %s\n", option_rows[i].name,
               option_rows[i].argument != NULL ? option_rows[i].argument : "", option_rows[i].text);
    }
    printf("    --%-14s %-10s %s\n", "version", "", "print the version");
    printf("\nexit codes: 0 ok, 1 failed or miss, 2 usage, 3 no daemon\n");
}

static bool accepts(const struct command *command, char letter)
{
    return strchr(command->is_offline ? "oh" : "saoh", letter) != NULL ||
           strchr(command->options, letter) != NULL;
}

static void print_command_help(const struct command *command)
{
    printf("usage: kvferry %s [OPTION]...%s%s\n\n%s.\n%s\n\noptions:\n", command->name,
           command->arguments[0] != '\0' ? " " : "", command->arguments, command->summary,
           command->details);
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        if (accepts(command, option_rows[i].letter)) {
            printf("    --%-14s %-10s %s\n", option_rows[i].name,
                   option_rows[i].argument != NULL ? option_rows[i].argument : "",
                   option_rows[i].text);
        }
    }
    printf("\nexit codes: 0 ok, 1 failed%s, 2 usage, 3 no daemon\n",
           strcmp(command->name, "get") == 0 ? " or miss" : "");
}

/* --- arguments -------------------------------------------------------------------------------- */

static int parse_key(struct cli *cli, const char *hex)
{
    size_t digits = strlen(hex);

    if (digits % 2 != 0 || digits < 2 * KVF_KEY_BYTES_MIN || digits > 2 * KVF_KEY_BYTES_MAX ||
        strspn(hex, "0123456789abcdefABCDEF") != digits) {
        return cli_fail(CLI_USAGE, "--key: 32 to 128 hexadecimal digits, an even number of them");
    }
    for (size_t i = 0; i < digits / 2; i++) {
        char pair[3] = {hex[2 * i], hex[2 * i + 1], '\0'};

        cli->key_bytes[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    cli->key = (struct kvf_key){.data = cli->key_bytes, .bytes = digits / 2};
    return CLI_OK;
}

static int parse_key_text(struct cli *cli, const char *text)
{
    if (crypto_generichash(cli->key_bytes, 32, (const unsigned char *)text, strlen(text), NULL,
                           0) != 0) {
        return cli_fail(CLI_FAILED, "libsodium does not hash");
    }
    cli->key = (struct kvf_key){.data = cli->key_bytes, .bytes = 32};
    return CLI_OK;
}

/* A whole number from 1 to most. */
static int parse_count(const char *name, const char *text, uint64_t most, uint64_t *value_out)
{
    char detail[256];

    if (kvf_parse_u64(text, value_out, detail, sizeof(detail)) != KVF_OK || *value_out == 0 ||
        *value_out > most) {
        return cli_fail(CLI_USAGE, "--%s: a whole number from 1 to %" PRIu64, name, most);
    }
    return CLI_OK;
}

/* A time of at least unit_ns, in that unit. */
static int parse_time(const char *name, const char *text, uint64_t unit_ns, uint32_t *value_out)
{
    char detail[256];
    uint64_t ns;

    if (kvf_parse_duration(text, &ns, detail, sizeof(detail)) != KVF_OK) {
        return cli_fail(CLI_USAGE, "--%s: %s", name, detail);
    }
    if (ns < unit_ns || ns / unit_ns > UINT32_MAX) {
        return cli_fail(CLI_USAGE, "--%s: '%s' is too short or too long", name, text);
    }
    *value_out = (uint32_t)(ns / unit_ns);
    return CLI_OK;
}

static int take_number(struct cli *cli, char letter, const char *text)
{
    char detail[256];
    uint64_t depth = 0;
    int code;

    switch (letter) {
    case 'T':
        return parse_time("ttl", text, KVF_NS_PER_S, &cli->ttl_s);
    case '8':
        return parse_time("duration", text, KVF_NS_PER_S, &cli->duration_s);
    case 'b':
        return parse_time("budget", text, KVF_NS_PER_MS, &cli->budget_ms);
    case 'I':
        return parse_time("interval", text, KVF_NS_PER_MS, &cli->interval_ms);
    case 'c':
        return parse_count("count", text, 100000000, &cli->count);
    case 'd':
        code = parse_count("depth", text, UINT32_MAX, &depth);
        cli->depth = (uint32_t)depth;
        return code;
    default:
        if (kvf_parse_size(text, &cli->size_bytes, detail, sizeof(detail)) != KVF_OK) {
            return cli_fail(CLI_USAGE, "--size: %s", detail);
        }
        return cli->size_bytes != 0 ? CLI_OK : cli_fail(CLI_USAGE, "--size: at least 8");
    }
}

/* A number above 0, at most most. */
static int parse_real(const char *name, const char *text, double most, double *value_out)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || !(value > 0) || !(value <= most)) {
        return cli_fail(CLI_USAGE, "--%s: a number above 0, at most %g", name, most);
    }
    *value_out = value;
    return CLI_OK;
}

static int add_folder(struct cli_folders *folders, const char *folder)
{
    if (folders->n == CLI_FOLDERS_MAX) {
        return cli_fail(CLI_USAGE, "more than %d folders", CLI_FOLDERS_MAX);
    }
    folders->items[folders->n++] = folder;
    return CLI_OK;
}

/* Numbers of plan. */
static int take_plan_number(struct cli *cli, char letter, const char *text)
{
    switch (letter) {
    case 'U':
        return parse_real("link", text, 1e6, &cli->link_gbs);
    case 'V':
        return parse_real("tflops", text, 1e6, &cli->tflops);
    case 'f':
        return parse_real("fixed", text, 1e6, &cli->fixed_ms);
    case 'X':
        return parse_count("tokens", text, KVF_COST_TOKENS_MAX, &cli->tokens);
    case '2':
        return parse_count("layers", text, KVF_LAYERS_MAX, &cli->shape.layers);
    case '3':
        return parse_count("d-model", text, KVF_WEIGHTS_WIDTH_MAX, &cli->shape.d_model);
    case '4':
        return parse_count("heads", text, KVF_HEADS_MAX, &cli->shape.heads);
    case '5':
        return parse_count("query-heads", text, KVF_HEADS_MAX, &cli->shape.query_heads);
    case '6':
        return parse_count("dim", text, KVF_DIM_MAX, &cli->shape.dim);
    case '7':
        return parse_count("ffn", text, KVF_WEIGHTS_FFN_MAX, &cli->shape.ffn_width);
    default:
        return take_number(cli, letter, text);
    }
}

static int take_admission(struct cli *cli, const char *text)
{
    static const char *const words[] = {"auto", "all", "second-sight"};

    for (uint8_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (strcmp(words[i], text) == 0) {
            cli->admission = i; /* as enum kvf_config_admission */
            return CLI_OK;
        }
    }
    return cli_fail(CLI_USAGE, "--admission: '%s' is neither auto, all nor second-sight", text);
}

/* Stores of replay and plan. */
static int take_store_option(struct cli *cli, char letter, const char *text)
{
    char detail[256];

    switch (letter) {
    case 'Y':
        return parse_real("bytes-a-token", text, 1e9, &cli->bytes_a_token);
    case 'Z':
        return parse_real("drive", text, 1e6, &cli->drive_gbs);
    case 'v':
        return parse_real("dwpd", text, 1e6, &cli->dwpd);
    case 'O':
        return parse_count("block-tokens", text, KVF_TRACE_TOKENS_MAX, &cli->block_tokens);
    case 'y':
        return take_admission(cli, text);
    case 'u':
        return kvf_parse_size(text, &cli->write_budget, detail, sizeof(detail)) == KVF_OK
                   ? CLI_OK
                   : cli_fail(CLI_USAGE, "--write-budget: %s", detail);
    default:
        return take_plan_number(cli, letter, text);
    }
}

/* Numbers of inspect and calibrate. */
static int take_measure_number(struct cli *cli, char letter, const char *text)
{
    char detail[256];

    switch (letter) {
    case 'm':
        return parse_real("sigma-median", text, 1e6, &cli->sigma_median);
    case 'q':
        return parse_real("sigma-p99", text, 1e6, &cli->sigma_p99);
    case 'e':
        return parse_real("output-error", text, 1e6, &cli->output_error);
    case '1':
        return parse_real("top1", text, 1, &cli->top1);
    case 'B':
        return parse_real("target-bits", text, 16, &cli->target_bits);
    case '9':
        cli->tenant = text;
        return CLI_OK;
    case 'R':
        return parse_count("rank", text, KVF_HEADS_MAX * KVF_DIM_MAX * 2, &cli->rank);
    case 'Q':
        return parse_count("queries", text, 1000000, &cli->queries);
    case 'j':
        return parse_count("threads", text, 64, &cli->threads);
    case 'i':
        if (kvf_parse_u64(text, &cli->sinks, detail, sizeof(detail)) != KVF_OK ||
            cli->sinks > KVF_CHUNK_TOKENS_MAX - 1) {
            return cli_fail(CLI_USAGE, "--sinks: a whole number from 0 to %d",
                            KVF_CHUNK_TOKENS_MAX - 1);
        }
        cli->has_sinks = true;
        return CLI_OK;
    default:
        return take_store_option(cli, letter, text);
    }
}

/* Texts of inspect, calibrate and plan. */
static int take_measure_option(struct cli *cli, char letter, const char *argument)
{
    const struct {
        char letter;
        const char **to;
    } texts[] = {
        {'P', &cli->profile},        {'S', &cli->svg_file},     {'L', &cli->workload},
        {'G', &cli->weights_digest}, {'F', &cli->weights_file}, {'A', &cli->adapter_digest},
        {'w', &cli->write_file},     {'N', &cli->name},         {'x', &cli->codecs},
        {'r', &cli->rope_state},     {'p', &cli->profiles},     {'J', &cli->trace},
        {'g', &cli->model},          {'M', &cli->dram},         {'E', &cli->nvme},
    };

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (texts[i].letter == letter) {
            *texts[i].to = argument;
            return CLI_OK;
        }
    }
    if (letter == 'C' || letter == 'H') {
        return add_folder(letter == 'C' ? &cli->captures : &cli->heldout, argument);
    }
    return take_measure_number(cli, letter, argument);
}

static int take_option(struct cli *cli, char letter, const char *argument)
{
    switch (letter) {
    case 's':
        cli->socket = argument;
        return CLI_OK;
    case 'a':
        if (strlen(argument) >= sizeof(cli->admin_socket)) {
            return cli_fail(CLI_USAGE, "--admin-socket: longer than 107 characters");
        }
        snprintf(cli->admin_socket, sizeof(cli->admin_socket), "%s", argument);
        return CLI_OK;
    case 'o':
        cli->is_json = strcmp(argument, "json") == 0;
        if (!cli->is_json && strcmp(argument, "text") != 0) {
            return cli_fail(CLI_USAGE, "--output: '%s' is neither text nor json", argument);
        }
        return CLI_OK;
    case 'k':
    case 't':
        if (cli->key.data != NULL) {
            return cli_fail(CLI_USAGE, "give one key, by --key or by --key-text");
        }
        return letter == 'k' ? parse_key(cli, argument) : parse_key_text(cli, argument);
    case 'l':
        cli->label = argument;
        return CLI_OK;
    case 'n':
        cli->namespace_name = argument;
        return CLI_OK;
    case 'D':
        cli->is_durable = true;
        return CLI_OK;
    case 'W':
        cli->is_no_write = true;
        return CLI_OK;
    case 'K':
        cli->is_kept = true;
        return CLI_OK;
    default:
        return take_measure_option(cli, letter, argument);
    }
}

/* Long names of this command's options, for getopt. */
static void fill_long_options(const struct command *command, struct option *out)
{
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        if (accepts(command, option_rows[i].letter)) {
            *out++ = (struct option){
                .name = option_rows[i].name,
                .has_arg = option_rows[i].argument != NULL ? required_argument : no_argument,
                .val = option_rows[i].letter,
            };
        }
    }
    *out = (struct option){0};
}

static int finish_arguments(struct cli *cli, const struct command *command, int argc, char **argv)
{
    int length;

    for (uint32_t n = 0; optind < argc && n < command->files_max; n++) {
        cli->file = argv[optind++];
        cli->captures.items[n] = cli->file;
        cli->captures.n = n + 1;
    }
    if (optind < argc) {
        return cli_fail(CLI_USAGE, "%s: '%s' is one argument too many; see kvferry %s --help",
                        command->name, argv[optind], command->name);
    }
    if (cli->socket == NULL) {
        cli->socket = getenv("KVFERRY_SOCKET");
    }
    if (cli->socket == NULL) {
        cli->socket = SOCKET_DEFAULT;
    }
    if (cli->admin_socket[0] == '\0' && !kvf_tunnel_is_address(cli->socket)) {
        length = snprintf(cli->admin_socket, sizeof(cli->admin_socket), "%s.admin", cli->socket);
        if (length < 0 || (size_t)length >= sizeof(cli->admin_socket)) {
            return cli_fail(CLI_USAGE, "--socket: longer than 101 characters; give --admin-socket");
        }
    }
    return CLI_OK;
}

static int run_command(const struct command *command, int argc, char **argv)
{
    struct option long_options[OPTION_ROWS + 1];
    struct cli cli = {.label = ""};
    int letter;
    int code;

    fill_long_options(command, long_options);
    opterr = 0; /* our own words */
    while ((letter = getopt_long(argc, argv, "o:h", long_options, NULL)) != -1) {
        if (letter == 'h') {
            print_command_help(command);
            return CLI_OK;
        }
        if (letter == '?') {
            return cli_fail(CLI_USAGE,
                            "%s: '%s' is not one of its options, or its value is "
                            "missing; see kvferry %s --help",
                            command->name, argv[optind - 1], command->name);
        }
        code = take_option(&cli, (char)letter, optarg);
        if (code != CLI_OK) {
            return code;
        }
    }
    code = finish_arguments(&cli, command, argc, argv);
    return code == CLI_OK ? command->run(&cli) : code;
}

int main(int argc, char **argv)
{
    int code = CLI_USAGE;

    if (argc < 2) {
        return cli_fail(CLI_USAGE, "a command is missing; see kvferry --help");
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help();
        return CLI_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("kvferry %s\n", kvf_version());
        return CLI_OK;
    }
    for (size_t i = 0; i < COMMANDS; i++) {
        if (strcmp(commands[i].name, argv[1]) == 0) {
            if (sodium_init() < 0 || curl_global_init(CURL_GLOBAL_NOTHING) != 0) {
                return cli_fail(CLI_FAILED, "libsodium or libcurl does not start");
            }
            code = run_command(&commands[i], argc - 1, argv + 1);
            curl_global_cleanup();
            return fflush(stdout) == 0 ? code : CLI_FAILED;
        }
    }
    return cli_fail(CLI_USAGE, "no command '%s'; see kvferry --help", argv[1]);
}
