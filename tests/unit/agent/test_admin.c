/* SPDX-License-Identifier: Apache-2.0
 *
 * test_admin.c: the admin server beside a reactor that answers, refuses, answers late or never. The
 * reactor here is a thread of the test behind kvf_agent_post.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "agent/admin.h"
#include "base/clock.h"
#include "tests/support/support.h"

/* --- a reactor -------------------------------------------------------------------------------- */

enum mood {
    MOOD_ANSWER, /* at once, from another thread, with the status below */
    MOOD_BUSY,   /* the mailbox is full */
    MOOD_KEEP,   /* keep the question until release() */
};

struct kvf_agent {
    struct kvf_calibrations *calibrations; /* held */
    pthread_mutex_t lock; /* protects all of it: the admin thread and the test meet here */
    enum mood mood;
    int32_t status;
    const char *text;
    bool is_ready;
    bool is_starting;
    struct kvf_control *kept;
    struct kvf_control last; /* as it was asked */
};

static void fill_answer(struct kvf_agent *agent, struct kvf_control *control)
{
    control->status = agent->status;
    if (agent->text != NULL) {
        snprintf(control->text, sizeof(control->text), "%s", agent->text);
    }
    if (control->op == KVF_CONTROL_STAT) {
        control->stat->ready = true;
        control->stat->incarnation = 0xfedcba9876543210u;
        control->stat->metrics.put_bytes = UINT64_MAX;
    }
    if (control->op == KVF_CONTROL_CALIBRATIONS && agent->calibrations != NULL) {
        control->calibrations = kvf_calibrations_hold(agent->calibrations);
    }
    if (control->op == KVF_CONTROL_CLIENTS) {
        struct kvf_control_client *row = control->rows;

        control->n_rows = 1;
        snprintf(row->name, sizeof(row->name), "\xff\xfe name");
        row->shard = KVF_SHARD_NONE;
        row->uid = UINT32_MAX;
    }
    if (control->op == KVF_CONTROL_BLOCKS) {
        struct kvf_control_block *rows = control->rows;

        control->n_rows = control->max_rows;
        for (uint32_t i = 0; i < control->max_rows; i++) {
            memset(rows[i].key_id, 0xa0 + (int)i, sizeof(rows[i].key_id));
            rows[i].namespace_id = UINT64_MAX;
            rows[i].in_nvme = (uint8_t)(i % 3);
        }
        control->next_cursor = 0xf000000000000000u;
    }
    control->done(control);
}

struct answer_job {
    struct kvf_agent *agent;
    struct kvf_control *control;
};

static void *answer_thread(void *arg)
{
    struct answer_job *job = arg;

    fill_answer(job->agent, job->control);
    free(job);
    return NULL;
}

int kvf_agent_post(struct kvf_agent *agent, struct kvf_control *control)
{
    struct answer_job *job;
    pthread_t thread;
    enum mood mood;

    pthread_mutex_lock(&agent->lock);
    agent->last = *control;
    mood = agent->mood;
    agent->kept = mood == MOOD_KEEP ? control : NULL;
    pthread_mutex_unlock(&agent->lock);
    if (mood != MOOD_ANSWER) {
        return mood == MOOD_BUSY ? KVF_ERR_BUSY : KVF_OK;
    }
    job = malloc(sizeof(*job));
    assert_non_null(job);
    *job = (struct answer_job){.agent = agent, .control = control};
    assert_int_equal(pthread_create(&thread, NULL, answer_thread, job), 0);
    assert_int_equal(pthread_detach(thread), 0);
    return KVF_OK;
}

bool kvf_agent_starting(const struct kvf_agent *agent, struct kvf_agent_start *start_out)
{
    struct kvf_agent *mutable = (struct kvf_agent *)agent;
    bool is_starting;

    pthread_mutex_lock(&mutable->lock);
    is_starting = agent->is_starting;
    pthread_mutex_unlock(&mutable->lock);
    *start_out = (struct kvf_agent_start){.incarnation = 0xfedcba9876543210u,
                                          .uptime_s = 7,
                                          .looked_bytes = 3 << 20,
                                          .total_bytes = 9 << 20,
                                          .blocks = 5,
                                          .text = "recovering \xff: 3 of 9 MiB looked at"};
    return is_starting;
}

bool kvf_agent_is_ready(const struct kvf_agent *agent)
{
    struct kvf_agent *mutable = (struct kvf_agent *)agent;
    bool is_ready;

    pthread_mutex_lock(&mutable->lock);
    is_ready = agent->is_ready;
    pthread_mutex_unlock(&mutable->lock);
    return is_ready;
}

static void set_mood(struct kvf_agent *agent, enum mood mood)
{
    pthread_mutex_lock(&agent->lock);
    agent->mood = mood;
    pthread_mutex_unlock(&agent->lock);
}

static void set_starting(struct kvf_agent *agent, bool is_starting)
{
    pthread_mutex_lock(&agent->lock);
    agent->is_starting = is_starting;
    pthread_mutex_unlock(&agent->lock);
}

static void set_ready(struct kvf_agent *agent, bool is_ready)
{
    pthread_mutex_lock(&agent->lock);
    agent->is_ready = is_ready;
    pthread_mutex_unlock(&agent->lock);
}

/* The question that was kept, if there is one; it is the caller's to answer. */
static struct kvf_control *take_kept(struct kvf_agent *agent)
{
    struct kvf_control *control;

    pthread_mutex_lock(&agent->lock);
    control = agent->kept;
    agent->kept = NULL;
    pthread_mutex_unlock(&agent->lock);
    return control;
}

/* --- an HTTP server that does not start ------------------------------------------------------- */

static struct {
    bool fails;
    bool closes;     /* the descriptor that it was given */
    int stranger_fd; /* somebody else's, which has the number then */
} mhd;

struct MHD_Daemon *__wrap_MHD_start_daemon(unsigned flags, uint16_t port,
                                           MHD_AcceptPolicyCallback apc, void *apc_arg,
                                           MHD_AccessHandlerCallback handler, void *handler_arg,
                                           ...);

/* Options as server_start gives them: a logger and its argument, then the socket. */
struct MHD_Daemon *__wrap_MHD_start_daemon(unsigned flags, uint16_t port,
                                           MHD_AcceptPolicyCallback apc, void *apc_arg,
                                           MHD_AccessHandlerCallback handler, void *handler_arg,
                                           ...)
{
    struct MHD_Daemon *daemon = NULL;
    va_list options;

    va_start(options, handler_arg);
    if (!mhd.fails) {
        daemon = MHD_start_daemon_va(flags, port, apc, apc_arg, handler, handler_arg, options);
    } else if (mhd.closes) {
        int fd;

        (void)va_arg(options, int);
        (void)va_arg(options, void *);
        (void)va_arg(options, void *);
        assert_int_equal(va_arg(options, int), MHD_OPTION_LISTEN_SOCKET);
        fd = va_arg(options, int);
        assert_int_equal(close(fd), 0);
        mhd.stranger_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        assert_int_equal(mhd.stranger_fd, fd);
    }
    va_end(options);
    return daemon;
}

static int count_fds(void)
{
    int n = 0;

    for (int fd = 0; fd < 256; fd++) {
        n += fcntl(fd, F_GETFD) >= 0;
    }
    return n;
}

/* --- a client --------------------------------------------------------------------------------- */

struct bed {
    struct kvf_test_dir dir;
    struct kvf_config *config;
    struct kvf_agent agent;
    struct kvf_admin *admin;
};

static int setup(void **state)
{
    struct bed *bed = calloc(1, sizeof(*bed));
    struct kvf_config_error error;

    assert_non_null(bed);
    kvf_test_dir_create(&bed->dir);
    bed->config = malloc(sizeof(*bed->config));
    assert_non_null(bed->config);
    kvf_config_init(bed->config);
    assert_int_equal(kvf_config_use_dir(bed->config, bed->dir.path, &error), KVF_OK);
    assert_int_equal(kvf_config_finish(bed->config, &error), KVF_OK);
    pthread_mutex_init(&bed->agent.lock, NULL);
    bed->agent.is_ready = true;
    assert_int_equal(kvf_admin_start(bed->config, &bed->agent, &bed->admin), KVF_OK);
    *state = bed;
    return 0;
}

static int teardown(void **state)
{
    struct bed *bed = *state;
    struct kvf_control *kept;

    kvf_admin_stop(bed->admin);
    kept = take_kept(&bed->agent);
    if (kept != NULL) {
        fill_answer(&bed->agent, kept);
    }
    pthread_mutex_destroy(&bed->agent.lock);
    kvf_test_dir_remove(&bed->dir);
    free(bed->config);
    free(bed);
    return 0;
}

static int connect_admin(const struct bed *bed)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    snprintf(address.sun_path, sizeof(address.sun_path), "%s", bed->config->admin_socket);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

/* One request; the status, and the body as JSON if *json_out is wanted. */
static long ask(const struct bed *bed, const char *method, const char *path, json_t **json_out)
{
    static char text[1 << 20];
    size_t used = 0;
    ssize_t got;
    int fd = connect_admin(bed);
    long http_status;
    char *body;

    dprintf(fd, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", method, path);
    while ((got = read(fd, text + used, sizeof(text) - 1 - used)) > 0) {
        used += (size_t)got;
    }
    close(fd);
    text[used] = '\0';
    if (sscanf(text, "HTTP/1.1 %ld", &http_status) != 1) {
        fail_msg("no answer to %s %s: %s", method, path, text);
        return 0;
    }
    body = strstr(text, "\r\n\r\n");
    assert_non_null(body);
    if (json_out != NULL) {
        *json_out = json_loads(body + 4, 0, NULL);
        assert_non_null(*json_out);
    }
    return http_status;
}

/* --- tests ------------------------------------------------------------------------------------ */

static void test_statuses(void **state)
{
    static const struct {
        int32_t status;
        long http_status;
    } cases[] = {
        {KVF_OK, 200},       {KVF_MISS, 404},         {KVF_ERR_INVALID, 400},
        {KVF_ERR_BUSY, 503}, {KVF_ERR_TIER_OFF, 409}, {KVF_ERR_REFUSED, 409},
        {KVF_ERR_IO, 500},   {KVF_ERR_INTERNAL, 500},
    };
    struct bed *bed = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *json;

        bed->agent.status = cases[i].status;
        bed->agent.text = "the cause";
        assert_int_equal(ask(bed, "POST", "/v1/purge?namespace=12", &json), cases[i].http_status);
        if (cases[i].status != KVF_OK) {
            assert_string_equal(json_string_value(json_object_get(json, "text")), "the cause");
            assert_string_equal(json_string_value(json_object_get(json, "status")),
                                kvf_status_name(cases[i].status));
        }
        json_decref(json);
        assert_int_equal(bed->agent.last.namespace_id, 0x12);
        assert_int_equal(bed->agent.last.op, KVF_CONTROL_PURGE);
    }
}

static void test_full_mailbox(void **state)
{
    struct bed *bed = *state;

    set_mood(&bed->agent, MOOD_BUSY);
    assert_int_equal(ask(bed, "GET", "/healthz", NULL), 503);
    assert_int_equal(ask(bed, "GET", "/metrics", NULL), 503);
    assert_int_equal(ask(bed, "GET", "/v1/blocks", NULL), 503);
    set_mood(&bed->agent, MOOD_ANSWER);
    assert_int_equal(ask(bed, "GET", "/healthz", NULL), 200);
}

/* One recording at a time: a second reader is refused, not given the half of it. */
static void test_second_reader(void **state)
{
    struct bed *bed = *state;
    json_t *json;

    assert_int_equal(ask(bed, "GET", "/v1/trace?reader=x", NULL), 400);
    assert_int_equal(ask(bed, "GET", "/v1/trace?reader=c3&last=1", NULL), 200);
    assert_int_equal(ask(bed, "GET", "/v1/trace?reader=a1", NULL), 200);
    assert_int_equal(ask(bed, "GET", "/v1/trace?reader=A1", NULL), 200);
    assert_int_equal(ask(bed, "GET", "/v1/trace", NULL), 409);
    assert_int_equal(ask(bed, "GET", "/v1/trace?reader=b2", &json), 409);
    assert_non_null(strstr(json_string_value(json_object_get(json, "text")),
                           "another recording is under way: wait"));
    json_decref(json);
    assert_int_equal(ask(bed, "GET", "/v1/trace?reader=a1", NULL), 200);
}

/* Before its loop runs: it lives, is not ready, and says of itself only how far it is. */
static void test_starting(void **state)
{
    struct bed *bed = *state;
    json_t *json;

    set_mood(&bed->agent, MOOD_KEEP);
    set_starting(&bed->agent, true);
    assert_int_equal(ask(bed, "GET", "/livez", NULL), 200);
    assert_int_equal(ask(bed, "GET", "/healthz", &json), 200);
    assert_string_equal(json_string_value(json_object_get(json, "text")),
                        "recovering ?: 3 of 9 MiB looked at");
    json_decref(json);
    assert_int_equal(ask(bed, "GET", "/readyz", &json), 503);
    assert_string_equal(json_string_value(json_object_get(json, "text")),
                        "recovering ?: 3 of 9 MiB looked at");
    json_decref(json);
    assert_int_equal(ask(bed, "GET", "/v1/stat", &json), 200);
    assert_string_equal(json_string_value(json_object_get(json, "incarnation")),
                        "fedcba9876543210");
    assert_true(json_is_false(json_object_get(json, "ready")));
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(json, "starting"), "looked_bytes")),
        3 << 20);
    json_decref(json);
    assert_int_equal(ask(bed, "GET", "/metrics", NULL), 503);
    assert_int_equal(ask(bed, "GET", "/v1/clients", NULL), 503);
    assert_int_equal(ask(bed, "POST", "/v1/drain", NULL), 503);
    assert_null(take_kept(&bed->agent)); /* nobody was asked */
    set_starting(&bed->agent, false);
    set_mood(&bed->agent, MOOD_ANSWER);
    assert_int_equal(ask(bed, "GET", "/v1/clients", NULL), 200);
}

static void test_readiness_asks_nobody(void **state)
{
    struct bed *bed = *state;

    set_mood(&bed->agent, MOOD_KEEP);
    assert_int_equal(ask(bed, "GET", "/readyz", NULL), 200);
    set_ready(&bed->agent, false);
    assert_int_equal(ask(bed, "GET", "/readyz", NULL), 503);
    assert_null(take_kept(&bed->agent));
}

/* A loop that does not answer is told as such, and its answer may come after the asker has left. */
static void test_dead_reactor(void **state)
{
    struct bed *bed = *state;
    struct kvf_control *late;

    set_mood(&bed->agent, MOOD_KEEP);
    assert_int_equal(ask(bed, "GET", "/healthz", NULL), 503);
    late = take_kept(&bed->agent);
    assert_non_null(late);
    fill_answer(&bed->agent, late); /* frees what nobody waits for; a sanitizer sees if not */
    set_mood(&bed->agent, MOOD_ANSWER);
    assert_int_equal(ask(bed, "GET", "/healthz", NULL), 200);
}

static bool has_kept(void *arg)
{
    struct kvf_agent *agent = arg;
    bool has;

    pthread_mutex_lock(&agent->lock);
    has = agent->kept != NULL;
    pthread_mutex_unlock(&agent->lock);
    return has;
}

/* Stopping does not wait for an answer that never comes. */
static void test_stop_with_a_question_open(void **state)
{
    struct bed *bed = *state;
    int fd = connect_admin(bed);
    uint64_t start_ns;

    set_mood(&bed->agent, MOOD_KEEP);
    dprintf(fd, "POST /v1/verify HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_true(kvf_test_wait_until(has_kept, &bed->agent, 10000));
    start_ns = kvf_now_ns();
    kvf_admin_stop(bed->admin);
    bed->admin = NULL;
    assert_true(kvf_now_ns() - start_ns < (uint64_t)KVF_ADMIN_ANSWER_MS * KVF_NS_PER_MS);
    close(fd);
}

static void test_text_that_is_not_utf8(void **state)
{
    struct bed *bed = *state;
    json_t *json;
    const json_t *row;

    assert_int_equal(ask(bed, "GET", "/v1/clients", &json), 200);
    row = json_array_get(json_object_get(json, "clients"), 0);
    assert_string_equal(json_string_value(json_object_get(row, "name")), "?? name");
    assert_true(json_integer_value(json_object_get(row, "uid")) == UINT32_MAX);
    assert_int_equal(json_integer_value(json_object_get(row, "shard")), KVF_SHARD_NONE);
    json_decref(json);
}

/* Names of 64 bits keep all of them on their way there and back. */
static void test_large_numbers(void **state)
{
    struct bed *bed = *state;
    const json_t *blocks;
    json_t *json;

    assert_int_equal(ask(bed, "GET", "/v1/stat", &json), 200);
    assert_string_equal(json_string_value(json_object_get(json, "incarnation")),
                        "fedcba9876543210");
    json_decref(json);
    assert_int_equal(ask(bed, "GET",
                         "/v1/blocks?namespace=ffffffffffffffff&cursor=f000000000000001&max=3",
                         &json),
                     200);
    assert_true(bed->agent.last.namespace_id == UINT64_MAX);
    assert_true(bed->agent.last.cursor == 0xf000000000000001u);
    assert_int_equal(bed->agent.last.max_rows, 3);
    blocks = json_object_get(json, "blocks");
    assert_int_equal(json_array_size(blocks), 3);
    assert_string_equal(json_string_value(json_object_get(json, "next_cursor")),
                        "f000000000000000");
    for (size_t i = 0; i < 3; i++) {
        static const char *const nvme[] = {"no", "stored", "queued"};
        const json_t *row = json_array_get(blocks, i);

        assert_string_equal(json_string_value(json_object_get(row, "nvme")), nvme[i]);
        assert_string_equal(json_string_value(json_object_get(row, "namespace_id")),
                            "ffffffffffffffff");
    }
    json_decref(json);
}

/* A file's name is what somebody made it. The list is given back. */
static void test_profiles(void **state)
{
    static struct kvf_profile_table table = {
        .name = "own", .workloads = KVF_WORKLOAD_CHAT | KVF_WORKLOAD_CODE, .n_kinds = 3};
    static struct kvf_calibrations calibrations = {
        .list = {{.file = "caf\xe9.json", .table = &table, .blob_fd = -1}}, .n = 1, .holders = 1};
    struct bed *bed = *state;
    const json_t *row;
    json_t *json;

    assert_int_equal(ask(bed, "GET", "/v1/profiles", &json), 200);
    assert_int_equal(json_array_size(json_object_get(json, "calibrated")), 0);
    json_decref(json);
    bed->agent.calibrations = &calibrations;
    memset(table.weights_digest, 0xfe, sizeof(table.weights_digest));
    assert_int_equal(ask(bed, "GET", "/v1/profiles", &json), 200);
    row = json_array_get(json_object_get(json, "calibrated"), 0);
    assert_string_equal(json_string_value(json_object_get(row, "profile")), "own");
    assert_string_equal(json_string_value(json_object_get(row, "file")), "caf?.json");
    assert_string_equal(json_string_value(json_object_get(row, "weights_digest")),
                        "fefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefe");
    assert_string_equal(json_string_value(json_array_get(json_object_get(row, "workload"), 1)),
                        "code");
    assert_int_equal(json_integer_value(json_object_get(row, "kinds")), 3);
    json_decref(json);
    assert_int_equal(atomic_load(&calibrations.holders), 1);
}

/* A server that does not start, the descriptor that it was given closed or left open: nothing else
 * is closed, nothing is left open, and the next start finds the paths free. */
static void test_server_does_not_start(void **state)
{
    struct bed *bed = *state;

    kvf_admin_stop(bed->admin);
    bed->admin = NULL;
    for (int closes = 0; closes < 2; closes++) {
        int n_fds = count_fds();

        mhd.fails = true;
        mhd.closes = closes != 0;
        assert_int_equal(kvf_admin_start(bed->config, &bed->agent, &bed->admin), KVF_ERR_NO_MEMORY);
        mhd.fails = false;
        if (mhd.closes) {
            assert_true(fcntl(mhd.stranger_fd, F_GETFD) >= 0); /* it has that number now */
            assert_int_equal(close(mhd.stranger_fd), 0);
        }
        assert_int_equal(count_fds(), n_fds);
    }
    assert_int_equal(kvf_admin_start(bed->config, &bed->agent, &bed->admin), KVF_OK);
    assert_int_equal(ask(bed, "GET", "/readyz", NULL), 200);
}

static void test_evict_by_name(void **state)
{
    struct bed *bed = *state;
    char path[128] = "/v1/evict?key_id=";

    for (unsigned i = 0; i < 32; i++) {
        snprintf(path + strlen(path), 3, "%02x", i);
    }
    assert_int_equal(ask(bed, "POST", path, NULL), 200);
    assert_true(bed->agent.last.has_key_id);
    for (unsigned i = 0; i < 32; i++) {
        assert_int_equal(bed->agent.last.key_id[i], i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_statuses, setup, teardown),
        cmocka_unit_test_setup_teardown(test_full_mailbox, setup, teardown),
        cmocka_unit_test_setup_teardown(test_second_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(test_starting, setup, teardown),
        cmocka_unit_test_setup_teardown(test_readiness_asks_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(test_dead_reactor, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stop_with_a_question_open, setup, teardown),
        cmocka_unit_test_setup_teardown(test_text_that_is_not_utf8, setup, teardown),
        cmocka_unit_test_setup_teardown(test_large_numbers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_profiles, setup, teardown),
        cmocka_unit_test_setup_teardown(test_server_does_not_start, setup, teardown),
        cmocka_unit_test_setup_teardown(test_evict_by_name, setup, teardown),
    };

    return cmocka_run_group_tests_name("admin", tests, NULL, NULL);
}
