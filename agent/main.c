/* SPDX-License-Identifier: Apache-2.0
 *
 * main.c: open this first. Arguments, configuration, checks, start order, signals, end.
 *
 *   configuration -> is it right, does it fit -> signals -> agent (client sockets) -> admin thread
 *   -> the agent's memory and drives -> "ready" -> the reactor, on this thread, until SIGTERM has
 *   drained it
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "agent/activation.h"
#include "agent/admin.h"
#include "agent/agent.h"
#include "agent/calibration.h"
#include "agent/check.h"
#include "agent/config.h"
#include "agent/format_store.h"
#include "agent/notify.h"
#include "agent/usage.h"
#include "base/failpoint.h"
#include "base/hash.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/parse.h"

enum exit_code {
    EXIT_DONE = 0,
    EXIT_FAILED = 1,
    EXIT_CONFIG = 2,
};

/* Descriptors a client needs: socket, eventfd, ring, staging and some in flight; and ours. */
#define FDS_A_CLIENT 6
#define FDS_OURS     (128 + KVF_CALIBRATIONS_MAX)

#define SETS_MAX 128 /* --set on one command line */

enum action {
    ACTION_SERVE,
    ACTION_CHECK,
    ACTION_FORMAT,
    ACTION_PRINT_CONFIG,
};

struct arguments {
    enum action action;
    const char *config_path;
    const char *dir;
    const char *format_path;
    uint64_t format_bytes;
    bool is_confirmed;
    const char *sets[SETS_MAX];
    unsigned n_sets;
};

/* --- arguments -------------------------------------------------------------------------------- */

static int usage_error(const char *text)
{
    fprintf(stderr, "kvferryd: %s; see kvferryd --help\n", text);
    return EXIT_CONFIG;
}

enum long_option {
    OPTION_CONFIG = 1000,
    OPTION_DIR,
    OPTION_SET,
    OPTION_CHECK,
    OPTION_FORMAT,
    OPTION_BYTES,
    OPTION_YES,
    OPTION_PRINT_CONFIG,
    OPTION_PRINT_OPTIONS,
    OPTION_HELP,
    OPTION_VERSION,
};

static const struct option long_options[] = {
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"dir", required_argument, NULL, OPTION_DIR},
    {"set", required_argument, NULL, OPTION_SET},
    {"check", no_argument, NULL, OPTION_CHECK},
    {"format", required_argument, NULL, OPTION_FORMAT},
    {"bytes", required_argument, NULL, OPTION_BYTES},
    {"yes", no_argument, NULL, OPTION_YES},
    {"print-config", no_argument, NULL, OPTION_PRINT_CONFIG},
    {"print-options", no_argument, NULL, OPTION_PRINT_OPTIONS},
    {"help", no_argument, NULL, OPTION_HELP},
    {"version", no_argument, NULL, OPTION_VERSION},
    {NULL, 0, NULL, 0},
};

/* Options that print and end. -1: it is another one. */
static int print_and_end(int option)
{
    switch (option) {
    case OPTION_HELP:
        kvf_usage_print_help(stdout);
        return EXIT_DONE;
    case OPTION_VERSION:
        printf("kvferryd %s\n", KVF_AGENT_VERSION);
        return EXIT_DONE;
    case OPTION_PRINT_OPTIONS:
        kvf_usage_print_options(stdout);
        return EXIT_DONE;
    case '?':
        return usage_error("wrong arguments");
    default:
        return -1;
    }
}

/* -1: go on. Else the exit code. */
static int take_option(struct arguments *arguments, int option)
{
    char detail[256];

    switch (option) {
    case OPTION_CONFIG:
        arguments->config_path = optarg;
        return -1;
    case OPTION_DIR:
        arguments->dir = optarg;
        return -1;
    case OPTION_SET:
        if (arguments->n_sets == SETS_MAX) {
            return usage_error("more --set than there can be");
        }
        arguments->sets[arguments->n_sets++] = optarg;
        return -1;
    case OPTION_CHECK:
        arguments->action = ACTION_CHECK;
        return -1;
    case OPTION_FORMAT:
        arguments->action = ACTION_FORMAT;
        arguments->format_path = optarg;
        return -1;
    case OPTION_BYTES:
        if (kvf_parse_size(optarg, &arguments->format_bytes, detail, sizeof(detail)) != KVF_OK) {
            return usage_error(detail);
        }
        return -1;
    case OPTION_YES:
        arguments->is_confirmed = true;
        return -1;
    case OPTION_PRINT_CONFIG:
        arguments->action = ACTION_PRINT_CONFIG;
        return -1;
    default:
        return print_and_end(option);
    }
}

static int parse_arguments(int argc, char **argv, struct arguments *arguments)
{
    int option;

    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        int code = take_option(arguments, option);

        if (code >= 0) {
            return code;
        }
    }
    if (optind < argc) {
        return usage_error("arguments without a name");
    }
    if (arguments->config_path != NULL && arguments->dir != NULL) {
        return usage_error("--dir is for running without a file: give --config or --dir");
    }
    if ((arguments->is_confirmed || arguments->format_bytes != 0) &&
        arguments->action != ACTION_FORMAT) {
        return usage_error("--bytes and --yes belong to --format");
    }
    return -1;
}

/* --- configuration ---------------------------------------------------------------------------- */

static int load_config(const struct arguments *arguments, struct kvf_config *config,
                       struct kvf_config_error *error)
{
    int status;

    kvf_config_init(config);
    if (arguments->config_path != NULL) {
        status = kvf_config_read(config, arguments->config_path, error);
    } else {
        status = kvf_config_use_dir(config, arguments->dir, error);
    }
    for (unsigned i = 0; i < arguments->n_sets && status == KVF_OK; i++) {
        status = kvf_config_set(config, arguments->sets[i], error);
    }
    return status == KVF_OK ? kvf_config_finish(config, error) : status;
}

/* Does the configuration fit the machine? print: as --check, against what is free now. */
static int check_config(struct kvf_config *config, bool print, struct kvf_config_error *error)
{
    struct kvf_machine_memory memory;
    struct kvf_check check;
    int status = kvf_config_check_paths(config, error);

    if (status != KVF_OK) {
        return status;
    }
    kvf_check_sum(config, kvf_check_gpus(config, ""), &check);
    if (kvf_machine_memory_read("", &memory) != KVF_OK) {
        kvf_log(KVF_LOG_WARNING, "/proc/meminfo cannot be read: memory is not checked");
        return KVF_OK;
    }
    if (print) {
        kvf_check_print(config, &check, &memory, stdout);
        fflush(stdout);
    }
    return kvf_check_memory(config, &check, &memory, print, error);
}

/* What the files of calibration.dir would be taken for: the log says it. A wrong one is no reason
 * not to start. */
static void say_calibrations(const struct kvf_config *config)
{
    struct kvf_calibrations *calibrations;

    (void)kvf_calibrations_read(config->calibration_dir, &calibrations);
    kvf_calibrations_release(calibrations);
}

/* --- signals ---------------------------------------------------------------------------------- */

/* What the handler needs. Set before the handler is; the agent once it exists. */
static struct kvf_agent *_Atomic signal_agent;
static atomic_uint signal_count;

/* The first signal drains, the second ends the process as it is. */
static void on_stop_signal(int number)
{
    struct kvf_agent *agent = atomic_load(&signal_agent);

    (void)number;
    if (atomic_fetch_add(&signal_count, 1) > 0) {
        _exit(EXIT_FAILED);
    }
    kvf_notify("STOPPING=1");
    if (agent != NULL) {
        kvf_agent_stop(agent);
    }
}

/* Read again what can be read again. */
static void on_reload_signal(int number)
{
    struct kvf_agent *agent = atomic_load(&signal_agent);

    (void)number;
    if (agent != NULL) {
        kvf_agent_reload(agent);
    }
}

static void install_signals(void)
{
    struct sigaction reload = {.sa_handler = on_reload_signal, .sa_flags = SA_RESTART};
    struct sigaction stop = {.sa_handler = on_stop_signal, .sa_flags = SA_RESTART};
    struct sigaction ignore = {.sa_handler = SIG_IGN};

    sigemptyset(&stop.sa_mask);
    sigemptyset(&reload.sa_mask);
    sigemptyset(&ignore.sa_mask);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGHUP, &reload, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
}

/* --- serving ---------------------------------------------------------------------------------- */

static void raise_descriptor_limit(const struct kvf_config *config)
{
    struct rlimit limit;
    uint64_t need = FDS_OURS + FDS_A_CLIENT * config->clients_max;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return;
    }
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < need) {
        kvf_log(KVF_LOG_WARNING,
                "%" PRIu64 " descriptors are allowed and clients.max %" PRIu64 " may need %" PRIu64
                "; raise LimitNOFILE or lower clients.max",
                (uint64_t)limit.rlim_cur, config->clients_max, need);
    }
}

/* What people should know. Tiers and client sockets have said theirs when they were opened. */
static void log_start(const struct kvf_config *config)
{
    kvf_log(KVF_LOG_INFO, "admin socket %s%s%s", config->admin_socket,
            config->admin_listen[0] != '\0' ? ", metrics and health at " : "",
            config->admin_listen);
    kvf_log(KVF_LOG_INFO,
            config->allow_uncalibrated
                ? "lossy profiles: allowed without a calibration, to clients that ask for it"
                : "lossy profiles: refused unless calibration has passed them for the model");
    if (config->n_nvme == 0) {
        kvf_log(KVF_LOG_INFO, "no drive is configured: nothing survives a restart");
    }
}

/* A failed start is the configuration's fault if another file, socket or size would cure it. */
static int exit_code_of_start(int status)
{
    switch (status) {
    case KVF_ERR_CONFIG:
    case KVF_ERR_FOREIGN:
    case KVF_ERR_BUSY:
    case KVF_ERR_REFUSED:
        return EXIT_CONFIG;
    default:
        return EXIT_FAILED;
    }
}

static int serve(const struct kvf_config *config)
{
    struct kvf_agent *agent = NULL;
    struct kvf_admin *admin = NULL;
    char why[KVF_ERROR_TEXT_BYTES];
    int code = EXIT_FAILED;
    int status;

    if (kvf_failpoint_arm_env(why, sizeof(why)) != KVF_OK) {
        fprintf(stderr, "kvferryd: KVFERRY_FAILPOINTS: %s\n", why);
        return EXIT_CONFIG;
    }
    if (kvf_activation_init(config, why, sizeof(why)) != KVF_OK) {
        fprintf(stderr, "kvferryd: %s\n", why);
        return EXIT_CONFIG;
    }
    kvf_notify_init();
    install_signals();
    raise_descriptor_limit(config);
    kvf_log(KVF_LOG_INFO, "kvferryd %s starts, pid %ld", KVF_AGENT_VERSION, (long)getpid());
    status = kvf_agent_create(config, &agent);
    if (status != KVF_OK) {
        code = exit_code_of_start(status);
        goto out;
    }
    atomic_store(&signal_agent, agent);
    if (atomic_load(&signal_count) > 0) {
        kvf_agent_stop(agent); /* the signal came before there was an agent */
    }
    status = kvf_admin_start(config, agent, &admin);
    if (status == KVF_OK) {
        status = kvf_agent_open(agent);
    }
    if (status != KVF_OK) {
        code = exit_code_of_start(status);
        goto out;
    }
    log_start(config);
    kvf_notify("READY=1\nSTATUS=serving");
    status = kvf_agent_run(agent);
    code = status == KVF_OK ? EXIT_DONE : EXIT_FAILED;
    kvf_log(status == KVF_OK ? KVF_LOG_INFO : KVF_LOG_WARNING, "kvferryd ends: %s",
            status == KVF_OK ? "drained" : kvf_status_text(status));
out:
    kvf_admin_stop(admin);
    /* A signal from here on finds no agent; the second one still ends the process. */
    atomic_store(&signal_agent, NULL);
    kvf_agent_destroy(agent);
    return code;
}

static int run(const struct arguments *arguments, struct kvf_config *config)
{
    struct kvf_config_error error;
    int status = load_config(arguments, config, &error);

    if (status == KVF_OK) {
        kvf_log_init(config->log_format != 0 ? kvf_log_json_sink : kvf_log_stderr_sink, NULL,
                     (int)config->log_level);
    }
    if (status == KVF_OK && arguments->action == ACTION_FORMAT) {
        return kvf_format_store(config, arguments->format_path, arguments->format_bytes,
                                arguments->is_confirmed);
    }
    if (status == KVF_OK && arguments->action == ACTION_PRINT_CONFIG) {
        kvf_config_print(config, stdout);
        return EXIT_DONE;
    }
    if (status == KVF_OK) {
        status = check_config(config, arguments->action == ACTION_CHECK, &error);
    }
    if (status != KVF_OK) {
        fprintf(stderr, "kvferryd: %s\n", error.text);
        return EXIT_CONFIG;
    }
    if (arguments->action == ACTION_CHECK) {
        say_calibrations(config);
        printf("fits\n");
        return EXIT_DONE;
    }
    return serve(config);
}

int main(int argc, char **argv)
{
    struct arguments arguments = {.action = ACTION_SERVE};
    struct kvf_config *config;
    int code = parse_arguments(argc, argv, &arguments);

    if (code >= 0) {
        return code;
    }
    kvf_log_init(kvf_log_stderr_sink, NULL, KVF_LOG_INFO);
    if (kvf_hash_init_library() != KVF_OK) {
        fprintf(stderr, "kvferryd: libsodium does not start\n");
        return EXIT_FAILED;
    }
    config = malloc(sizeof(*config)); /* too large for a stack */
    if (config == NULL) {
        fprintf(stderr, "kvferryd: out of memory\n");
        return EXIT_FAILED;
    }
    code = run(&arguments, config);
    free(config);
    return code;
}
