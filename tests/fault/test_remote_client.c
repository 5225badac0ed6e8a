/* SPDX-License-Identifier: Apache-2.0
 *
 * test_remote_client.c: clients of a daemon on another node (here: by loopback): addresses and keys
 * that are wrong, memory for hits that is small, a daemon that dies, stands still or restarts, and
 * what is left of clients that came and went. What they can do otherwise is what clients of the
 * node can: tests of those run once more as such (tests/conformance/requests.cmake).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"
#include "client/client_internal.h"
#include "client/tunnel.h"
#include "tests/fault/breaker.h"
#include "tests/support/blocks.h"
#include "tests/support/daemon.h"
#include "transport/net_proto.h"
#include "transport/transport_ucx.h"

#define BLOCK_BYTES 300000u
#define WAIT_MS     60000u

static struct kvf_test_daemon the_daemon;

static int setup(void **state)
{
    (void)state;
    kvf_test_daemon_create(&the_daemon, NULL);
    kvf_test_daemon_make_remote(&the_daemon);
    kvf_test_daemon_start(&the_daemon);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvf_test_daemon_destroy(&the_daemon);
    return 0;
}

static void options_at(struct kvf_options *options, const char *address)
{
    kvf_test_client_options(&the_daemon, options);
    options->socket_path = address;
    options->staging_bytes = 4 << 20;
}

static struct kvf_client *open_remote(const char *parameters)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    char address[2 * sizeof(the_daemon.address)];

    (void)snprintf(address, sizeof(address), "%s%s", the_daemon.address, parameters);
    options_at(&options, address);
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    return client;
}

/* ----------------------------------------------------------------------------------------------
 * What does not fit is said
 */
static char said[1024];

static void keep_log(void *arg, int severity, const char *text)
{
    (void)arg;
    if (severity <= 1) {
        (void)snprintf(said, sizeof(said), "%s", text);
    }
}

static uint64_t staging_bytes; /* to ask for instead; 0: no */

/* An address as it is, or, if it begins with '?', the parameters of the daemon's. */
static void refused(const char *what, int status, const char *text)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    char address[2 * sizeof(the_daemon.address)];

    (void)snprintf(address, sizeof(address), "%s", what);
    if (what[0] == '?') {
        size_t length = strcspn(the_daemon.address, "?");

        (void)snprintf(address, sizeof(address), "%.*s%s", (int)length, the_daemon.address, what);
    }
    options_at(&options, address);
    options.staging_bytes = staging_bytes != 0 ? staging_bytes : options.staging_bytes;
    options.log = keep_log;
    options.connect_timeout_ms = WAIT_MS;
    said[0] = '\0';
    if (kvf_open(&options, &client) != status || client != NULL) {
        fail_msg("%s: \"%s\"", address, said);
    }
    if (strstr(said, text) == NULL) {
        fail_msg("%s: \"%s\" has no \"%s\"", address, said, text);
    }
}

/* A key file: "key=FILE", behind a question mark. */
static const char *key_file(const char *name, const char *text, char out[2 * KVF_TEST_PATH_BYTES])
{
    char path[KVF_TEST_PATH_BYTES];

    kvf_test_dir_path(&the_daemon.dir, name, path);
    kvf_test_file_write(path, text, strlen(text));
    (void)snprintf(out, 2 * KVF_TEST_PATH_BYTES, "?key=%s", path);
    return out;
}

/* The line of a tenant's key under a cluster's key. */
static void key_line(const uint8_t cluster_key[32], const char *tenant, char out[128])
{
    uint8_t key[32];
    int length = snprintf(out, 128, "%s ", tenant);

    kvf_net_client_key(cluster_key, tenant, key);
    for (size_t i = 0; i < sizeof(key); i++) {
        length += snprintf(out + length, 128 - (size_t)length, "%02x", key[i]);
    }
}

static void test_refused(void **state)
{
    static const uint8_t other_cluster[32] = {1, 2, 3};
    char parameters[2 * KVF_TEST_PATH_BYTES];
    char path[KVF_TEST_PATH_BYTES];
    char line[128];
    uint8_t *cluster_key;
    size_t bytes;

    (void)state;
    refused("tcp://127.0.0.1?key=/x", KVF_ERR_INVALID, "write tcp://host:port");
    refused("tcp://fd00::1:17171?key=/x", KVF_ERR_INVALID, "with [] around");
    refused("tcp://127.0.0.1:1", KVF_ERR_INVALID, "add ?key=FILE");
    refused("?key=/x&colour=red", KVF_ERR_INVALID, "the parameters are key=FILE and landing=SIZE");
    refused("?key=/x&landing=2GiB", KVF_ERR_INVALID, "1 byte to 1 GiB");
    refused("?key=/no/such/file", KVF_ERR_CONFIG, "/no/such/file: No such file");
    refused(key_file("short", "default 12ab\n", parameters), KVF_ERR_CONFIG,
            "make one by kvferry client-key");

    staging_bytes = UINT64_C(5) << 30;
    refused(the_daemon.address, KVF_ERR_INVALID, "4 GiB at most");
    staging_bytes = 0;

    key_line(other_cluster, "default", line);
    refused(key_file("other", line, parameters), KVF_ERR_REFUSED,
            "the key file is not of its cluster and tenant");
    kvf_test_dir_path(&the_daemon.dir, "cluster.key", path);
    cluster_key = (uint8_t *)kvf_test_file_read(path, &bytes);
    key_line(cluster_key, "nobody", line);
    free(cluster_key);
    refused(key_file("nobody", line, parameters), KVF_ERR_REFUSED,
            "no socket of this daemon is tenant nobody's");
    /* the key of one tenant under the name of another */
    memcpy(line, "nob0dy", 6);
    refused(key_file("renamed", line, parameters), KVF_ERR_REFUSED,
            "the key file is not of its cluster and tenant");

    kvf_test_daemon_stop(&the_daemon);
    refused(strchr(the_daemon.address, '?'), KVF_ERR_NO_DAEMON, "is kvferryd there");
}

/* By name, which may have addresses at which nobody listens. */
static void test_name(void **state)
{
    struct kvf_options options;
    struct kvf_client *client = NULL;
    char address[2 * sizeof(the_daemon.address)];

    (void)state;
    (void)snprintf(address, sizeof(address), "tcp://localhost%s", strrchr(the_daemon.address, ':'));
    options_at(&options, address);
    options.connect_timeout_ms = WAIT_MS;
    assert_int_equal(kvf_open(&options, &client), KVF_OK);
    assert_int_equal(kvf_test_block_put(client, 1, BLOCK_BYTES, 0), KVF_OK);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_OK);
    kvf_close(client);
}

/* ----------------------------------------------------------------------------------------------
 * Memory for hits
 */
static void put(struct kvf_client *client, uint64_t first, uint64_t n)
{
    for (uint64_t i = first; i < first + n; i++) {
        assert_int_equal(kvf_test_block_put(client, i, BLOCK_BYTES, 0), KVF_OK);
    }
}

/* Hits that are held fill it, and the next is a miss; one that is given back makes room. */
static void test_landing(void **state)
{
    struct kvf_client *client = open_remote("&landing=1MiB");
    struct kvf_test_key bytes[6];
    struct kvf_key keys[6];
    struct kvf_hit hits[6] = {0};
    uint32_t n_hits = 0;

    (void)state;
    put(client, 0, 6);
    for (uint64_t i = 0; i < 6; i++) {
        keys[i] = kvf_test_key(i, &bytes[i]);
    }
    assert_int_equal(kvf_get(client, keys, 6, NULL, hits), KVF_PARTIAL);
    for (uint32_t i = 0; i < 6; i++) {
        n_hits += hits[i].status == KVF_OK;
        assert_true(hits[i].status == KVF_OK || hits[i].status == KVF_MISS);
    }
    assert_int_equal(n_hits, 3); /* of 300 KB each */
    for (uint32_t i = 0; i < 6; i++) {
        if (hits[i].status == KVF_OK) {
            assert_int_equal(kvf_test_hit_check(client, &hits[i], i, BLOCK_BYTES), KVF_OK);
        }
    }
    for (uint64_t i = 0; i < 6; i++) {
        assert_int_equal(kvf_test_block_get(client, i, BLOCK_BYTES, NULL), KVF_OK);
    }
    kvf_close(client);
}

/* ----------------------------------------------------------------------------------------------
 * Sums
 */
static void on_block(struct kvf_client_sink *sink, const struct kvf_event *event, uint64_t value)
{
    (void)value;
    *(int32_t *)sink->arg = event->hit.status;
}

/* Put a record whose page is said not to know the payload's sum, as kernels leave it. */
static int32_t put_unsummed(struct kvf_client *client, uint8_t fill)
{
    int32_t block_status = KVF_ERR_TIMEOUT;
    struct kvf_client_sink sink = {.on_block = on_block, .arg = &block_status, .is_unsummed = true};
    struct kvf_put_item item = {
        .struct_bytes = sizeof(item), .source = KVF_SOURCE_STAGED, .key = {"unsummed-block-1", 16}};
    struct kvf_record_page *page;
    struct kvf_stage stage;
    uint64_t request;

    assert_int_equal(kvf_stage_acquire(client, BLOCK_BYTES, &stage), KVF_OK);
    memset(stage.payload, fill, BLOCK_BYTES);
    assert_int_equal(kvf_stage_seal(client, &stage, BLOCK_BYTES), KVF_OK);
    page = stage.record;
    page->header.payload_crc32c = 0;
    kvf_block_seal_header(page);
    item.stage = stage.stage;
    kvf_client_enter(client);
    assert_int_equal(kvf_request_put(client, &item, 1, NULL, &sink, 0, NULL, &request), KVF_OK);
    while (!sink.is_done) {
        kvf_session_sleep(client, kvf_now_ns() + KVF_NS_PER_S);
        kvf_requests_drain(client, true);
    }
    kvf_client_leave(client);
    return block_status;
}

/* They are made before the wire: the daemon tells another payload from the first by its sum, which
 * it cannot where it is to sum by itself. */
static void test_sums(void **state)
{
    struct kvf_client *client = open_remote("");
    struct kvf_key key = {"unsummed-block-1", 16};
    struct kvf_hit hit;

    (void)state;
    assert_int_equal(put_unsummed(client, 1), KVF_OK);
    assert_int_equal(put_unsummed(client, 1), KVF_EXISTS);
    assert_int_equal(put_unsummed(client, 2), KVF_ERR_CONFLICT);
    assert_int_equal(kvf_get(client, &key, 1, NULL, &hit), KVF_OK);
    assert_int_equal(((const uint8_t *)hit.payload)[BLOCK_BYTES - 1], 1);
    assert_int_equal(kvf_lease_release(client, hit.lease), KVF_OK);
    kvf_close(client);
}

/* ----------------------------------------------------------------------------------------------
 * Clients that break the rules
 */

static void test_breach(void **state)
{
    struct breaker breaker;

    (void)state;
    assert_int_equal(kvf_hash_init_library(), KVF_OK);
    breaker_init(&breaker);
    assert_true(breaker_is_taken(&breaker, the_daemon.address, WAIT_MS));
    breaker_puts(&breaker, 0);
    assert_true(breaker_is_taken(&breaker, the_daemon.address, WAIT_MS));
    breaker_init(&breaker);
    breaker.hello.staging_bytes = KVF_NET_STAGING_MAX + 4096;
    assert_false(breaker_is_taken(&breaker, the_daemon.address, WAIT_MS));
    assert_false(breaker.is_ready);
    breaker_init(&breaker);
    breaker.submit.sqe.opcode = 200;
    assert_false(breaker_is_taken(&breaker, the_daemon.address, WAIT_MS));
    assert_true(breaker.has_submitted);
    breaker_puts(&breaker, KVF_SQE_UNSUMMED);
    assert_false(breaker_is_taken(&breaker, the_daemon.address, WAIT_MS));
    assert_true(breaker.has_submitted);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.peer_protocol_errors"), 3);
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
}

/* ----------------------------------------------------------------------------------------------
 * Daemons that fail
 */
struct reader {
    pthread_t thread;
    struct kvf_client *client;
    uint32_t rounds, hits, misses, others;
    _Atomic bool stop;
};

static void *read_on(void *arg)
{
    struct reader *reader = arg;

    while (!reader->stop) {
        int status = kvf_test_block_get(reader->client, reader->rounds++ % 16, BLOCK_BYTES, NULL);

        reader->hits += status == KVF_OK;
        reader->misses += status == KVF_MISS || status == KVF_ERR_DISCONNECTED ||
                          status == KVF_ERR_NO_DAEMON || status == KVF_ERR_BUSY;
        reader->others += status == KVF_ERR_INTERNAL;
    }
    return NULL;
}

static bool has_hit_again(void *arg)
{
    return kvf_test_block_get(arg, 0, BLOCK_BYTES, NULL) == KVF_OK;
}

/* Whatever was under way ends, with the right bytes or without any; the handle comes back. */
static void test_kill(void **state)
{
    struct kvf_client *client = open_remote("");
    struct reader readers[2] = {0};

    (void)state;
    for (uint64_t i = 0; i < 16; i++) {
        assert_int_equal(kvf_test_block_put(client, i, BLOCK_BYTES, KVF_PUT_DURABLE), KVF_OK);
    }
    for (uint32_t i = 0; i < 2; i++) {
        readers[i].client = open_remote("");
        assert_int_equal(pthread_create(&readers[i].thread, NULL, read_on, &readers[i]), 0);
    }
    for (uint32_t round = 0; round < 2; round++) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        kvf_test_daemon_kill(&the_daemon);
        kvf_test_daemon_start(&the_daemon);
        assert_true(kvf_test_wait_until(has_hit_again, client, WAIT_MS));
    }
    for (uint32_t i = 0; i < 2; i++) {
        readers[i].stop = true;
        assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
        assert_int_equal(readers[i].others, 0);
        assert_true(readers[i].hits > 0);
        kvf_close(readers[i].client);
    }
    kvf_close(client);
}

/* One that stands still costs the budget, and no more for long. */
static void test_standstill(void **state)
{
    struct kvf_client *client = open_remote("");
    struct kvf_test_key bytes;
    struct kvf_key key = kvf_test_key(1, &bytes);
    struct kvf_get_options options = {.struct_bytes = sizeof(options), .budget_ms = 200};
    struct kvf_hit hit;
    int status;

    (void)state;
    put(client, 0, 4);
    kvf_test_process_signal(&the_daemon.process, SIGSTOP);
    status = kvf_get(client, &key, 1, &options, &hit);
    assert_int_equal(status, KVF_MISS);
    kvf_test_process_signal(&the_daemon.process, SIGCONT);
    assert_true(kvf_test_wait_until(has_hit_again, client, WAIT_MS));
    kvf_close(client);
}

/* ----------------------------------------------------------------------------------------------
 * What is left
 */
static uint32_t fds_of(int pid)
{
    char path[64];
    uint32_t n = 0;
    DIR *folder;

    (void)snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    folder = opendir(path);
    assert_non_null(folder);
    while (readdir(folder) != NULL) {
        n++;
    }
    closedir(folder);
    return n;
}

static bool is_alone(void *arg)
{
    (void)arg;
    return kvf_test_daemon_number(&the_daemon, "clients") == 0;
}

struct process {
    int pid;
    uint32_t n_fds;
};

static bool has_fds(void *arg)
{
    const struct process *process = arg;

    return fds_of(process->pid) <= process->n_fds;
}

static void come_and_go(void)
{
    struct kvf_client *client = open_remote("");
    int status = kvf_test_block_put(client, 1, BLOCK_BYTES, 0);

    assert_true(status == KVF_OK || status == KVF_EXISTS);
    assert_int_equal(kvf_test_block_get(client, 1, BLOCK_BYTES, NULL), KVF_OK);
    kvf_close(client);
}

static void test_come_and_go(void **state)
{
    uint32_t own = fds_of(getpid());
    uint32_t daemons;

    (void)state;
    come_and_go(); /* libraries are loaded */
    assert_true(kvf_test_wait_until(is_alone, NULL, WAIT_MS));
    daemons = fds_of(the_daemon.process.pid);
    for (uint32_t i = 0; i < 10; i++) {
        come_and_go();
    }
    assert_true(kvf_test_wait_until(is_alone, NULL, WAIT_MS));
    assert_true(kvf_test_wait_until(has_fds, &(struct process){getpid(), own}, WAIT_MS));
    assert_true(
        kvf_test_wait_until(has_fds, &(struct process){the_daemon.process.pid, daemons}, WAIT_MS));
    assert_int_equal(kvf_test_daemon_number(&the_daemon, "metrics.protocol_errors"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_name, setup, teardown),
        cmocka_unit_test_setup_teardown(test_landing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_sums, setup, teardown),
        cmocka_unit_test_setup_teardown(test_breach, setup, teardown),
        cmocka_unit_test_setup_teardown(test_kill, setup, teardown),
        cmocka_unit_test_setup_teardown(test_standstill, setup, teardown),
        cmocka_unit_test_setup_teardown(test_come_and_go, setup, teardown),
    };

    (void)setenv("UCX_TLS", "tcp", 1);
    (void)unsetenv("KVFERRY_KEY");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
