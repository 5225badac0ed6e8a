/* SPDX-License-Identifier: Apache-2.0
 *
 * daemon.c: a real kvferryd in a directory of its own.
 */
#include "tests/support/daemon.h"

#include "base/clock.h"
#include "base/fd.h"
#include "base/parse.h"
#include "base/random.h"
#include "transport/net_proto.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_MS 120000u /* generous: a slow machine is not what these tests look for */
#define END_MS   120000u

#define FREE_PORT_FIRST 20000u
#define FREE_PORT_COUNT 10000u
#define FREE_PORT_TRIES 100

static void die(const struct kvf_test_daemon *daemon, const char *what)
{
    char *log = kvf_test_file_read(daemon->log_path, NULL);

    fprintf(stderr, "test daemon: %s: %s\n--- its log:\n%s---\n", what, strerror(errno),
            log != NULL ? log : "(none)\n");
    free(log);
    abort();
}

void kvf_test_daemon_create(struct kvf_test_daemon *daemon, const char *const *sets)
{
    memset(daemon, 0, sizeof(*daemon));
    kvf_test_dir_create(&daemon->dir);
    kvf_test_dir_path(&daemon->dir, "kvferryd.sock", daemon->socket_path);
    kvf_test_dir_path(&daemon->dir, "kvferryd.sock.admin", daemon->admin_path);
    kvf_test_dir_path(&daemon->dir, "store", daemon->store_path);
    kvf_test_dir_path(&daemon->dir, "log", daemon->log_path);
    kvf_test_daemon_set(daemon, "dram.bytes=64MiB");
    kvf_test_daemon_set(daemon, "dram.area_bytes=1MiB");
    kvf_test_daemon_set(daemon, "nvme.0.bytes=64MiB");
    kvf_test_daemon_set(daemon, "nvme.0.segment_bytes=4MiB");
    kvf_test_daemon_set(daemon, "drain.timeout=60s");
    kvf_test_daemon_set(daemon, "dram.restart_wait=0"); /* handles of tests rest */
    for (size_t i = 0; sets != NULL && sets[i] != NULL; i++) {
        kvf_test_daemon_set(daemon, sets[i]);
    }
    if (kvf_test_is_remote()) {
        kvf_test_daemon_make_remote(daemon);
    }
    daemon->n_created_sets = daemon->n_sets;
}

bool kvf_test_is_remote(void)
{
    return getenv("KVF_TEST_REMOTE") != NULL;
}

uint16_t kvf_test_free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    for (int i = 0; i < FREE_PORT_TRIES; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        uint16_t port;
        bool is_free;

        kvf_random_system.fill(NULL, &port, sizeof(port));
        port = (uint16_t)(FREE_PORT_FIRST + port % FREE_PORT_COUNT);
        at.sin_port = htons(port);
        is_free = fd >= 0 && bind(fd, (const struct sockaddr *)&at, sizeof(at)) == 0;
        kvf_fd_close(&fd);
        if (is_free) {
            return port;
        }
    }
    fprintf(stderr, "test daemon: no port of loopback: %s\n", strerror(errno));
    abort();
}

void kvf_test_daemon_make_remote(struct kvf_test_daemon *daemon)
{
    char cluster_path[KVF_TEST_PATH_BYTES];
    char key_path[KVF_TEST_PATH_BYTES];
    uint8_t cluster_key[32];
    uint8_t key[32];
    char text[16 + 2 * sizeof(key)] = "default ";
    uint16_t port = kvf_test_free_port();

    kvf_random_system.fill(NULL, cluster_key, sizeof(cluster_key));
    kvf_test_dir_path(&daemon->dir, "cluster.key", cluster_path);
    kvf_test_file_write(cluster_path, cluster_key, sizeof(cluster_key));
    kvf_net_client_key(cluster_key, "default", key);
    for (size_t i = 0; i < sizeof(key); i++) {
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%02x", key[i]);
    }
    kvf_test_dir_path(&daemon->dir, "client.key", key_path);
    kvf_test_file_write(key_path, text, strlen(text));
    snprintf(daemon->address, sizeof(daemon->address), "tcp://127.0.0.1:%u?key=%s", port, key_path);
    snprintf(daemon->remote_sets[0], sizeof(daemon->remote_sets[0]), "cluster_key=%s",
             cluster_path);
    snprintf(daemon->remote_sets[1], sizeof(daemon->remote_sets[1]), "peers.listen=127.0.0.1:%u",
             port);
    kvf_test_daemon_set(daemon, daemon->remote_sets[0]);
    kvf_test_daemon_set(daemon, daemon->remote_sets[1]);
}

void kvf_test_daemon_set(struct kvf_test_daemon *daemon, const char *set)
{
    if (daemon->n_sets == KVF_TEST_SETS_MAX) {
        die(daemon, "more settings than there is room for");
    }
    daemon->sets[daemon->n_sets++] = set;
}

void kvf_test_daemon_set_only(struct kvf_test_daemon *daemon, const char *set)
{
    daemon->n_sets = daemon->n_created_sets;
    kvf_test_daemon_set(daemon, set);
}

void kvf_test_daemon_spawn(struct kvf_test_daemon *daemon)
{
    char store_set[KVF_TEST_PATH_BYTES + 32];
    char failpoints[1024];
    char preload[KVF_TEST_PATH_BYTES + 32];
    char *env[4] = {NULL};
    char *argv[2 * KVF_TEST_SETS_MAX + 6];
    size_t n_env = 0;
    size_t n = 0;

    snprintf(store_set, sizeof(store_set), "nvme.0.path=%s", daemon->store_path);
    argv[n++] = (char *)KVF_TEST_KVFERRYD;
    argv[n++] = (char *)"--dir";
    argv[n++] = daemon->dir.path;
    argv[n++] = (char *)"--set";
    argv[n++] = store_set;
    for (uint32_t i = 0; i < daemon->n_sets; i++) {
        argv[n++] = (char *)"--set";
        argv[n++] = (char *)daemon->sets[i];
    }
    argv[n] = NULL;
    snprintf(failpoints, sizeof(failpoints), "KVFERRY_FAILPOINTS=%s",
             daemon->failpoints != NULL ? daemon->failpoints : "");
    env[n_env++] = failpoints;
    if (daemon->preload != NULL) {
        snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", daemon->preload);
        env[n_env++] = preload;
    }
    if (daemon->extra_env != NULL) {
        env[n_env++] = (char *)daemon->extra_env;
    }
    kvf_test_process_start(&daemon->process, argv, env, daemon->log_path);
}

bool kvf_test_daemon_has_ended(struct kvf_test_daemon *daemon, uint32_t timeout_ms,
                               int *wait_status_out)
{
    int wait_status = 0;

    if (!kvf_test_process_wait(&daemon->process, timeout_ms, &wait_status)) {
        return false;
    }
    if (wait_status_out != NULL) {
        *wait_status_out = wait_status;
    }
    return true;
}

bool kvf_test_daemon_is_alive(struct kvf_test_daemon *daemon)
{
    int wait_status;

    return daemon->process.pid > 0 && !kvf_test_daemon_has_ended(daemon, 0, &wait_status);
}

bool kvf_test_daemon_wait_ready(struct kvf_test_daemon *daemon, int *wait_status_out)
{
    const struct timespec pause = {.tv_nsec = KVF_NS_PER_MS};
    uint64_t deadline_ns = kvf_now_ns() + READY_MS * KVF_NS_PER_MS;
    struct kvf_options options;
    struct kvf_client *client;
    uint64_t round_trip_ns;

    kvf_test_client_options(daemon, &options);
    options.flags = KVF_ATTACH_NO_RECONNECT;
    options.client_name = "ready?";
    options.staging_bytes = 64 << 10;
    options.ring_entries = 64;
    options.log = NULL;
    while (!kvf_test_daemon_has_ended(daemon, 0, wait_status_out)) {
        if (kvf_open(&options, &client) == KVF_OK) {
            bool is_ready = kvf_ping(client, READY_MS, &round_trip_ns) == KVF_OK;

            kvf_close(client);
            if (is_ready) {
                return true;
            }
        }
        if (kvf_now_ns() > deadline_ns) {
            die(daemon, "not ready in time");
        }
        nanosleep(&pause, NULL);
    }
    return false;
}

/* Has the daemon all memory of its arena? It serves before that, and evicts for lack of room. */
static bool is_populated(void *arg)
{
    const struct kvf_test_daemon *daemon = arg;
    char path[64], target[256];
    uint32_t n_pieces = 0;
    bool all = true;
    struct dirent *entry;
    DIR *folder;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)daemon->process.pid);
    folder = opendir(path);
    if (folder == NULL) {
        die(daemon, path);
    }
    while ((entry = readdir(folder)) != NULL) {
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
        struct stat st;

        target[length > 0 ? length : 0] = '\0';
        if (strstr(target, "memfd:kvferry-arena") != NULL &&
            fstatat(dirfd(folder), entry->d_name, &st, 0) == 0) {
            n_pieces++;
            all = all && (uint64_t)st.st_blocks * 512 >= (uint64_t)st.st_size;
        }
    }
    closedir(folder);
    return all && n_pieces > 0;
}

void kvf_test_daemon_start(struct kvf_test_daemon *daemon)
{
    kvf_test_daemon_spawn(daemon);
    if (!kvf_test_daemon_wait_ready(daemon, NULL)) {
        die(daemon, "ended instead of becoming ready");
    }
    if (!kvf_test_wait_until(is_populated, daemon, READY_MS)) {
        die(daemon, "never has all of its memory");
    }
}

static int exit_code(int wait_status)
{
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

int kvf_test_daemon_run_to_end(struct kvf_test_daemon *daemon)
{
    int wait_status = 0;

    kvf_test_daemon_spawn(daemon);
    if (!kvf_test_daemon_has_ended(daemon, END_MS, &wait_status)) {
        die(daemon, "runs although it should have refused to");
    }
    return exit_code(wait_status);
}

void kvf_test_daemon_kill(struct kvf_test_daemon *daemon)
{
    kvf_test_process_stop(&daemon->process);
}

int kvf_test_daemon_stop(struct kvf_test_daemon *daemon)
{
    int wait_status = 0;

    kvf_test_process_signal(&daemon->process, SIGTERM);
    if (!kvf_test_daemon_has_ended(daemon, END_MS, &wait_status)) {
        die(daemon, "does not end after SIGTERM");
    }
    return exit_code(wait_status);
}

void kvf_test_daemon_destroy(struct kvf_test_daemon *daemon)
{
    kvf_test_process_stop(&daemon->process);
    kvf_test_dir_remove(&daemon->dir);
}

bool kvf_test_daemon_log_has(const struct kvf_test_daemon *daemon, const char *text)
{
    char *log = kvf_test_file_read(daemon->log_path, NULL);
    bool found = log != NULL && strstr(log, text) != NULL;

    free(log);
    return found;
}

/* ----------------------------------------------------------------------------------------------
 * The admin socket
 */

/* HTTP/1.0, so that the answer ends with the connection and is not cut into chunks. */
static char *http_ask(const struct kvf_test_daemon *daemon, const char *method, const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t capacity = 1 << 20;
    char *answer = malloc(capacity);
    char question[256];
    size_t bytes = 0;
    ssize_t got;

    snprintf(address.sun_path, sizeof(address.sun_path), "%.100s", daemon->admin_path);
    snprintf(question, sizeof(question),
             "%s %s HTTP/1.0\r\nHost: kvferryd\r\nContent-Length: 0\r\n\r\n", method, path);
    if (fd < 0 || answer == NULL ||
        connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0 ||
        send(fd, question, strlen(question), MSG_NOSIGNAL) != (ssize_t)strlen(question)) {
        die(daemon, "cannot ask the admin socket");
    }
    while (bytes < capacity - 1 && (got = read(fd, answer + bytes, capacity - 1 - bytes)) > 0) {
        bytes += (size_t)got;
    }
    answer[bytes] = '\0';
    close(fd);
    return answer;
}

/* A member of an answer's JSON by its path; fails if it is not there. */
static uint64_t number_at(const struct kvf_test_daemon *daemon, const char *answer,
                          const char *path)
{
    const char *body = strstr(answer, "\r\n\r\n");
    json_t *root = body != NULL ? json_loads(body, 0, NULL) : NULL;
    const json_t *value = root;
    char part[64] = "";
    uint64_t number;

    while (value != NULL && *path != '\0') {
        size_t length = strcspn(path, ".");

        snprintf(part, sizeof(part), "%.*s", (int)length, path);
        value = json_is_array(value) ? json_array_get(value, strtoul(part, NULL, 10))
                                     : json_object_get(value, part);
        path += length + (path[length] == '.');
    }
    if (!json_is_integer(value)) {
        fprintf(stderr, "no such number; the answer is:\n%s\n", answer);
        die(daemon, part);
    }
    number = (uint64_t)json_integer_value(value);
    json_decref(root);
    return number;
}

uint64_t kvf_test_daemon_ask(const struct kvf_test_daemon *daemon, const char *path,
                             const char *member)
{
    char *answer = http_ask(daemon, "GET", path);
    uint64_t number = number_at(daemon, answer, member);

    free(answer);
    return number;
}

uint64_t kvf_test_daemon_number(const struct kvf_test_daemon *daemon, const char *path)
{
    return kvf_test_daemon_ask(daemon, "/v1/stat", path);
}

uint64_t kvf_test_daemon_command(const struct kvf_test_daemon *daemon, const char *path,
                                 const char *member)
{
    char *answer = http_ask(daemon, "POST", path);
    uint64_t number = number_at(daemon, answer, member);

    free(answer);
    return number;
}

struct wanted {
    const struct kvf_test_daemon *daemon;
    const char *path;
    uint64_t number;
};

static bool is_wanted(void *arg)
{
    const struct wanted *wanted = arg;

    return kvf_test_daemon_number(wanted->daemon, wanted->path) == wanted->number;
}

bool kvf_test_daemon_wait_number(const struct kvf_test_daemon *daemon, const char *path,
                                 uint64_t wanted, uint32_t timeout_ms)
{
    struct wanted what = {.daemon = daemon, .path = path, .number = wanted};

    return kvf_test_wait_until(is_wanted, &what, timeout_ms);
}

/* ----------------------------------------------------------------------------------------------
 * Clients
 */
static void print_log(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        fprintf(stderr, "libkvferry: %s\n", text);
    }
}

void kvf_test_client_options(const struct kvf_test_daemon *daemon, struct kvf_options *options)
{
    kvf_options_init(options);
    options->socket_path = kvf_test_is_remote() ? daemon->address : daemon->socket_path;
    options->log = print_log;
    options->connect_timeout_ms = READY_MS;
}

struct kvf_client *kvf_test_client_open(const struct kvf_test_daemon *daemon, const char *label)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    int status;

    kvf_test_client_options(daemon, &options);
    options.namespace_label = label;
    options.staging_bytes = 4 << 20;
    status = kvf_open(&options, &client);
    if (status != KVF_OK) {
        fprintf(stderr, "cannot attach: %s\n", kvf_status_text(status));
        die(daemon, "cannot attach");
    }
    return client;
}

uint32_t kvf_test_scaled(uint32_t full)
{
    const char *text = getenv("KVF_TEST_SCALE");
    uint64_t percent = kvf_test_is_sanitized() ? 25 : 100;
    char error[128];
    uint64_t scaled;

    if (text != NULL && kvf_parse_u64(text, &percent, error, sizeof(error)) != KVF_OK) {
        fprintf(stderr, "KVF_TEST_SCALE: %s\n", error);
        abort();
    }
    scaled = full * percent / 100;
    return scaled > 0 ? (uint32_t)scaled : 1;
}

bool kvf_test_is_sanitized(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    return true;
#else
    return false;
#endif
#else
    return false;
#endif
}
