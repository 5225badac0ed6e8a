/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net.c: links between two daemons' networks, both in this process, over UCX on loopback; and
 * strangers who speak UCX, or only TCP, to the same port.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/random.h"
#include "tests/support/support.h"
#include "tests/unit/transport/net_pair.h"
#include "transport/net_proto.h"
#include "transport/transport_ucx.h"
#include "transport/ucx_api.h"

#define NEVER (3600 * KVF_NS_PER_S)

/* b asks a for a record of these bytes, which a gives. Returns whether it was summed. */
static bool move(struct pair *pair, uint32_t bytes, uint64_t seed)
{
    struct kvf_random_seeded random;
    uint8_t *from = malloc(bytes);
    uint8_t *to = calloc(1, bytes);
    struct kvf_net_fetch fetch = {.link = pair->b.link,
                                  .shard = 3,
                                  .record = to,
                                  .record_bytes = bytes,
                                  .deadline_ns = kvf_now_ns() + NEVER};
    struct kvf_net_serve serve = {.status = KVF_OK, .record = from, .record_bytes = bytes};

    kvf_random_seeded_init(&random, seed);
    for (uint32_t i = 0; i < bytes; i++) {
        from[i] = (uint8_t)kvf_random_seeded_next(&random);
    }
    memset(fetch.key_id, (int)(seed & 0xff), sizeof(fetch.key_id));
    pair->a.serves_done = 0;
    pair->b.fetches_done = 0;
    assert_int_equal(kvf_net_fetch(pair->b.net, &fetch), KVF_OK);
    wait_for(pair, is_asked);
    assert_memory_equal(pair->a.serves[0].key_id, fetch.key_id, sizeof(fetch.key_id));
    assert_int_equal(pair->a.serves[0].shard, 3);
    assert_int_equal(pair->a.serves[0].record_bytes, bytes);
    serve.link = pair->a.serves[0].link;
    serve.lane = pair->a.serves[0].lane;
    serve.request = pair->a.serves[0].request;
    pair->a.n_serves = 0;
    assert_int_equal(kvf_net_serve(pair->a.net, &serve), KVF_OK);
    wait_for(pair, has_fetched);
    assert_int_equal(fetch.status, KVF_OK);
    assert_memory_equal(from, to, bytes);
    if (fetch.is_summed) {
        assert_int_equal(fetch.payload_crc32c, kvf_crc32c(0, from + KVF_RECORD_PAGE_BYTES,
                                                          bytes - KVF_RECORD_PAGE_BYTES));
    }
    wait_for(pair, has_served);
    free(from);
    free(to);
    return fetch.is_summed;
}

/* ----------------------------------------------------------------------------------------------
 * Between nodes
 */
static void test_records(void **state)
{
    struct pair pair;

    (void)state;
    pair_open(&pair);
    assert_true(pair.b.is_initiator);
    assert_false(pair.a.is_initiator);
    assert_int_equal(pair.a.peer_incarnation, 2);
    assert_int_equal(pair.b.peer_incarnation, 1);
    assert_true(move(&pair, KVF_RECORD_PAGE_BYTES + 1, 1)); /* one piece is in order */
    assert_true(move(&pair, KVF_NET_PIECE_BYTES, 2));
    (void)move(&pair, KVF_NET_PIECE_BYTES * 3 + 77, 3);
    (void)move(&pair, KVF_NET_WINDOW_BYTES * 2 + 5,
               4); /* more than the window: credit must come back */
    pair_close(&pair);
}

static void test_miss_and_deadline(void **state)
{
    struct pair pair;
    uint8_t record[8192];
    struct kvf_net_fetch fetch = {.record = record, .record_bytes = sizeof(record)};
    struct kvf_net_serve serve = {.status = KVF_MISS};

    (void)state;
    pair_open(&pair);
    fetch.link = pair.b.link;
    fetch.deadline_ns = kvf_now_ns() + NEVER;
    assert_int_equal(kvf_net_fetch(pair.b.net, &fetch), KVF_OK);
    wait_for(&pair, is_asked);
    serve.link = pair.a.serves[0].link;
    serve.lane = pair.a.serves[0].lane;
    serve.request = pair.a.serves[0].request;
    assert_int_equal(kvf_net_serve(pair.a.net, &serve), KVF_OK);
    wait_for(&pair, has_fetched);
    assert_int_equal(fetch.status, KVF_MISS);
    wait_for(&pair, has_served);

    /* nobody answers */
    pair.b.fetches_done = 0;
    pair.a.n_serves = 0;
    fetch.deadline_ns = kvf_now_ns() + 50 * KVF_NS_PER_MS;
    assert_int_equal(kvf_net_fetch(pair.b.net, &fetch), KVF_OK);
    wait_for(&pair, has_fetched);
    assert_int_equal(fetch.status, KVF_ERR_TIMEOUT);

    /* an answer that comes too late changes nothing, and the link goes on */
    wait_for(&pair, is_asked);
    memset(record, 0x5a, sizeof(record));
    serve = (struct kvf_net_serve){.link = pair.a.serves[0].link,
                                   .request = pair.a.serves[0].request,
                                   .status = KVF_OK,
                                   .record = &pair,
                                   .record_bytes = sizeof(record)};
    static_assert(sizeof(pair) >= sizeof(record), "it is what is sent");
    pair.a.n_serves = 0;
    pair.a.serves_done = 0;
    assert_int_equal(kvf_net_serve(pair.a.net, &serve), KVF_OK);
    wait_for(&pair, has_served);
    (void)move(&pair, 10000, 5);
    for (size_t i = 0; i < sizeof(record); i++) {
        assert_int_equal(record[i], 0x5a);
    }
    pair_close(&pair);
}

static bool has_message(struct pair *pair)
{
    return pair->b.message.type == KVF_NET_EVENTS;
}

static bool is_resynced(struct pair *pair)
{
    return pair->a.message.type == KVF_NET_RESYNC;
}

static void test_stream(void **state)
{
    struct pair pair;
    struct {
        struct kvf_net_blocks head;
        struct kvf_net_block block[2];
    } body = {.head = {.number = 41, .count = 2},
              .block = {{.record_bytes = 9000, .shard = 1, .change = KVF_NET_ADDED},
                        {.shard = 2, .change = KVF_NET_REMOVED}}};

    (void)state;
    pair_open(&pair);
    assert_int_equal(kvf_net_send(pair.a.net, pair.a.link, KVF_NET_EVENTS, &body, sizeof(body)),
                     KVF_OK);
    wait_for(&pair, has_message);
    assert_int_equal(pair.b.message.body_bytes, sizeof(body));
    assert_memory_equal(pair.b.message_body, &body, sizeof(body));
    assert_int_equal(kvf_net_send(pair.b.net, pair.b.link, KVF_NET_RESYNC, NULL, 0), KVF_OK);
    wait_for(&pair, is_resynced);
    pair_close(&pair);
}

static bool is_down(struct pair *pair)
{
    return pair->b.downs > 0;
}

static void test_loss(void **state)
{
    struct pair pair;
    uint8_t record[8192];
    struct kvf_net_fetch fetch = {
        .record = record, .record_bytes = sizeof(record), .deadline_ns = kvf_now_ns() + NEVER};
    struct kvf_net_address at;

    (void)state;
    pair_open(&pair);
    fetch.link = pair.b.link;
    assert_int_equal(kvf_net_fetch(pair.b.net, &fetch), KVF_OK);
    wait_for(&pair, is_asked);
    at = pair.a.at;
    node_close(&pair.a);
    wait_for(&pair, is_down);
    wait_for(&pair, has_fetched);
    assert_int_equal(fetch.status, KVF_ERR_DISCONNECTED);

    /* on a link that is gone */
    pair.b.fetches_done = 0;
    assert_int_equal(kvf_net_fetch(pair.b.net, &fetch), KVF_OK);
    wait_for(&pair, has_fetched);
    assert_int_equal(fetch.status, KVF_ERR_DISCONNECTED);

    /* another daemon at another address */
    node_open(&pair.a, 3, 7, true);
    assert_int_equal(kvf_net_connect(pair.b.net, (struct kvf_net_address[]){at, pair.a.at}, 2),
                     KVF_OK);
    wait_for(&pair, are_linked);
    assert_int_equal(pair.b.peer_incarnation, 3);
    (void)move(&pair, 5000, 6);

    /* its address is not a peer's any more */
    pair.b.downs = 0;
    assert_int_equal(kvf_net_connect(pair.b.net, &at, 1), KVF_OK);
    wait_for(&pair, is_down);
    pair_close(&pair);
}

static bool both_refused(struct pair *pair)
{
    struct kvf_net_stat a, b;

    kvf_net_stat(pair->a.net, &a);
    kvf_net_stat(pair->b.net, &b);
    return a.refused > 0 && b.refused > 0;
}

static void test_wrong_key(void **state)
{
    struct pair pair;

    (void)state;
    memset(&pair, 0, sizeof(pair));
    node_open(&pair.a, 1, 7, true);
    node_open(&pair.b, 2, 8, false);
    assert_int_equal(kvf_net_connect(pair.b.net, &pair.a.at, 1), KVF_OK);
    wait_for(&pair, both_refused);
    assert_int_equal(pair.a.ups + pair.b.ups, 0);
    pair_close(&pair);
}

/* ----------------------------------------------------------------------------------------------
 * Strangers
 */

/* One who speaks UCX, and has no key, or has one and breaks the rules. */
struct stranger {
    struct kvf_ucx_api ucx;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h ep;
    struct kvf_net_head head; /* of the last that came */
    uint8_t body[512];
    bool has_come;
    bool is_cut;
    uint64_t sequence;
};

static ucs_status_t stranger_hears(void *arg, const void *header, size_t header_bytes, void *data,
                                   size_t bytes, const ucp_am_recv_param_t *param)
{
    struct stranger *stranger = arg;

    (void)param;
    if (header_bytes == sizeof(stranger->head) && bytes <= sizeof(stranger->body)) {
        memcpy(&stranger->head, header, sizeof(stranger->head));
        memcpy(stranger->body, data, bytes);
        stranger->has_come = true;
    }
    return UCS_OK;
}

static void stranger_is_cut(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    (void)status;
    ((struct stranger *)arg)->is_cut = true;
}

static void stranger_open(struct stranger *stranger, const struct node *node)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                    UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                    UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                      .id = 7,
                                      .cb = stranger_hears,
                                      .arg = stranger};
    ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                        UCP_EP_PARAM_FIELD_ERR_HANDLER,
                          .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
                          .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                          .err_handler = {.cb = stranger_is_cut, .arg = stranger},
                          .sockaddr = {.addr = (const struct sockaddr *)&node->at.address,
                                       .addrlen = node->at.bytes}};
    ucp_config_t *config;
    char why[256];

    memset(stranger, 0, sizeof(*stranger));
    assert_int_equal(kvf_ucx_api_open(&stranger->ucx, why, sizeof(why)), KVF_OK);
    assert_int_equal(stranger->ucx.ucp_config_read(NULL, NULL, &config), UCS_OK);
    assert_int_equal(stranger->ucx.ucp_config_modify(config, "NET_DEVICES", "lo"), UCS_OK);
    assert_int_equal(stranger->ucx.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config,
                                                    &stranger->context),
                     UCS_OK);
    stranger->ucx.ucp_config_release(config);
    assert_int_equal(stranger->ucx.ucp_worker_create(stranger->context, &worker, &stranger->worker),
                     UCS_OK);
    assert_int_equal(stranger->ucx.ucp_worker_set_am_recv_handler(stranger->worker, &handler),
                     UCS_OK);
    assert_int_equal(stranger->ucx.ucp_ep_create(stranger->worker, &ep, &stranger->ep), UCS_OK);
}

static void stranger_close(struct stranger *stranger)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t closing = stranger->ucx.ucp_ep_close_nbx(stranger->ep, &param);

    while (UCS_PTR_IS_PTR(closing) &&
           stranger->ucx.ucp_request_check_status(closing) == UCS_INPROGRESS) {
        (void)stranger->ucx.ucp_worker_progress(stranger->worker);
    }
    if (UCS_PTR_IS_PTR(closing)) {
        stranger->ucx.ucp_request_free(closing);
    }
    stranger->ucx.ucp_worker_destroy(stranger->worker);
    stranger->ucx.ucp_cleanup(stranger->context);
}

/* Say something, and wait until it has gone or the other side has hung up. */
static void stranger_says(struct stranger *stranger, const void *header, size_t header_bytes,
                          const void *body, size_t bytes, uint32_t flags)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = flags};
    ucs_status_ptr_t sent = stranger->ucx.ucp_am_send_nbx(stranger->ep, 7, header, header_bytes,
                                                          body, bytes, &param);

    while (UCS_PTR_IS_PTR(sent) && !stranger->is_cut &&
           stranger->ucx.ucp_request_check_status(sent) == UCS_INPROGRESS) {
        (void)stranger->ucx.ucp_worker_progress(stranger->worker);
    }
    if (UCS_PTR_IS_PTR(sent)) {
        stranger->ucx.ucp_request_free(sent);
    }
}

/* A message with a right head and a MAC under this key. */
static void stranger_sends(struct stranger *stranger, const uint8_t key[32], uint8_t type,
                           uint64_t request, const void *body, uint32_t bytes)
{
    struct kvf_net_head head = {.magic = KVF_NET_MAGIC,
                                .version = KVF_NET_VERSION_MIN,
                                .type = type,
                                .incarnation = 99,
                                .sequence = ++stranger->sequence,
                                .request = request,
                                .body_bytes = bytes};

    kvf_net_seal(key, &head, body);
    stranger_says(stranger, &head, sizeof(head), body, bytes,
                  UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER);
}

/* Wait until an answer of this type has come, or the link is cut. */
static bool stranger_waits(struct stranger *stranger, struct pair *pair, uint8_t type)
{
    uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS;

    while (!stranger->is_cut && !(stranger->has_come && stranger->head.type == type)) {
        (void)stranger->ucx.ucp_worker_progress(stranger->worker);
        node_poll(&pair->a);
        node_poll(&pair->b);
        assert_true(kvf_now_ns() < end_ns);
    }
    stranger->has_come = false;
    return !stranger->is_cut;
}

static void hello_of(struct kvf_net_hello *hello)
{
    *hello = (struct kvf_net_hello){.version_min = KVF_NET_VERSION_MIN,
                                    .version_max = KVF_NET_VERSION_MAX,
                                    .layout_fp = kvf_net_layout_fp(),
                                    .name = "stranger"};
    memset(hello->nonce, 0x33, sizeof(hello->nonce));
}

static void test_garbage(void **state)
{
    struct pair pair;
    struct stranger stranger;
    uint8_t noise[3000];
    struct kvf_random_seeded random;
    uint64_t seed = kvf_test_seed();

    (void)state;
    kvf_random_seeded_init(&random, seed);
    pair_open(&pair);
    /* bytes on the port */
    for (uint32_t i = 0; i < 12; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        for (size_t k = 0; k < sizeof(noise); k++) {
            noise[k] = (uint8_t)kvf_random_seeded_next(&random);
        }
        assert_int_equal(connect(fd, (const struct sockaddr *)&pair.a.at.address, pair.a.at.bytes),
                         0);
        assert_true(send(fd, noise, 1 + i * 250, MSG_NOSIGNAL) > 0);
        (void)shutdown(fd, i % 2 == 0 ? SHUT_WR : SHUT_RDWR);
        close(fd);
        (void)move(&pair, 5000, i);
    }
    /* messages that are none */
    stranger_open(&stranger, &pair.a);
    for (uint32_t i = 0; i < 50 && !stranger.is_cut; i++) {
        uint32_t header = i % 3 == 0 ? (uint32_t)sizeof(struct kvf_net_head) : i;
        uint32_t flags = i % 2 == 0 ? UCP_AM_SEND_FLAG_REPLY : 0;

        stranger_says(&stranger, noise, header, noise + header, i * 50,
                      flags | UCP_AM_SEND_FLAG_EAGER);
    }
    (void)move(&pair, 70000, 7);
    assert_int_equal(pair.a.downs + pair.b.downs, 0);
    stranger_close(&stranger);
    pair_close(&pair);
}

static void test_refusals(void **state)
{
    struct pair pair;
    struct stranger stranger;
    struct kvf_net_hello hello;
    struct kvf_net_welcome welcome;
    uint8_t cluster[32];
    uint8_t key[32];

    (void)state;
    memset(cluster, 7, sizeof(cluster));
    kvf_net_peer_key(cluster, key);
    pair_open(&pair);
    for (uint32_t i = 0; i < 4; i++) {
        static const int statuses[] = {KVF_ERR_REFUSED, KVF_ERR_VERSION, KVF_ERR_MISMATCH, KVF_OK};

        hello_of(&hello);
        key[0] ^= i == 0;
        hello.version_min = i == 1 ? KVF_NET_VERSION_MAX + 1 : hello.version_min;
        hello.version_max = i == 1 ? KVF_NET_VERSION_MAX + 1 : hello.version_max;
        hello.layout_fp ^= i == 2;
        stranger_open(&stranger, &pair.a);
        stranger_sends(&stranger, key, KVF_NET_HELLO, 0, &hello, sizeof(hello));
        key[0] ^= i == 0;
        assert_true(stranger_waits(&stranger, &pair, KVF_NET_WELCOME));
        memcpy(&welcome, stranger.body, sizeof(welcome));
        assert_int_equal(welcome.status, statuses[i]);
        assert_true(i == 3 || welcome.text[0] != '\0');
        assert_memory_equal(welcome.hello_nonce, hello.nonce, sizeof(hello.nonce));
        if (i != 3) {
            assert_false(stranger_waits(&stranger, &pair, KVF_NET_PIECE)); /* it hangs up */
        }
        stranger_close(&stranger);
    }
    (void)move(&pair, 5000, 8);
    pair_close(&pair);
}

static bool is_counted(struct pair *pair)
{
    struct kvf_net_stat stat;

    kvf_net_stat(pair->a.net, &stat);
    return stat.strangers >= 2;
}

/* One with the key: what it says again is not heard again, and a rule broken ends its link only. */
static void test_breach(void **state)
{
    struct pair pair;
    struct stranger stranger;
    struct kvf_net_hello hello;
    struct kvf_net_welcome welcome;
    struct kvf_net_fetch_body fetch = {.record_bytes = 8192};
    struct kvf_net_stat stat;
    uint8_t cluster[32];
    uint8_t key[32];
    uint8_t session[32];

    (void)state;
    memset(cluster, 7, sizeof(cluster));
    kvf_net_peer_key(cluster, key);
    pair_open(&pair);
    hello_of(&hello);
    stranger_open(&stranger, &pair.a);
    stranger_sends(&stranger, key, KVF_NET_HELLO, 0, &hello, sizeof(hello));
    assert_true(stranger_waits(&stranger, &pair, KVF_NET_WELCOME));
    memcpy(&welcome, stranger.body, sizeof(welcome));
    kvf_net_session_key(key, hello.nonce, welcome.nonce, 99, 1, session);
    stranger_sends(&stranger, session, KVF_NET_FETCH, 5, &fetch, sizeof(fetch));
    wait_for(&pair, is_asked);
    stranger.sequence--; /* the same once more */
    stranger_sends(&stranger, session, KVF_NET_FETCH, 5, &fetch, sizeof(fetch));
    /* and one under another key */
    stranger_sends(&stranger, key, KVF_NET_FETCH, 6, &fetch, sizeof(fetch));
    pair.is_so = is_counted;
    while (!pair_look(&pair)) {
        (void)stranger.ucx.ucp_worker_progress(stranger.worker);
    }
    assert_int_equal(pair.a.n_serves, 1);
    kvf_net_stat(pair.a.net, &stat);
    assert_int_equal(stat.protocol_errors, 0);
    fetch.record_bytes = 1;
    stranger_sends(&stranger, session, KVF_NET_FETCH, 7, &fetch, sizeof(fetch));
    assert_false(stranger_waits(&stranger, &pair, KVF_NET_PIECE));
    kvf_net_stat(pair.a.net, &stat);
    assert_int_equal(stat.protocol_errors, 1);
    pair.a.n_serves = 0;
    stranger_close(&stranger);
    assert_true(pair.b.link != 0);
    pair.a.link = pair.b.link != 0 ? pair.a.link : 0;
    (void)move(&pair, 5000, 9);
    pair_close(&pair);
}

/* Ports of this process on which UCX listens for data; n_out: how many. */
static void data_ports(uint16_t except, uint16_t ports[8], uint32_t *n_out)
{
    FILE *file = fopen("/proc/net/tcp", "re");
    char line[256];
    uint32_t n = 0;

    assert_non_null(file);
    while (n < 8 && fgets(line, sizeof(line), file) != NULL) {
        unsigned address, port, state;
        unsigned long inode;
        char link[64];

        if (sscanf(line, " %*d: %8x:%4x %*8x:%*4x %2x %*s %*s %*s %*d %*d %lu", &address, &port,
                   &state, &inode) != 4 ||
            (address != 0 && address != htonl(INADDR_LOOPBACK)) || state != 0x0a ||
            port == except) {
            continue;
        }
        (void)snprintf(link, sizeof(link), "socket:[%lu]", inode);
        for (int fd = 0; fd < 256; fd++) {
            char path[64];
            char target[64] = "";

            (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
            if (readlink(path, target, sizeof(target) - 1) > 0 && strcmp(target, link) == 0) {
                ports[n++] = (uint16_t)port;
                break;
            }
        }
    }
    (void)fclose(file);
    *n_out = n;
}

/* Noise, and connections that say nothing, where UCX expects its own. */
static void test_data_port(void **state)
{
    struct pair pair;
    struct kvf_random_seeded random;
    uint8_t noise[4000];
    uint16_t ports[8];
    int silent[8];
    uint32_t n;

    (void)state;
    kvf_random_seeded_init(&random, kvf_test_seed());
    pair_open(&pair);
    data_ports(kvf_net_port(pair.a.net), ports, &n);
    assert_true(n > 0);
    for (uint32_t i = 0; i < 8 * n; i++) {
        struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                 .sin_port = htons(ports[i % n])};
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        assert_int_equal(connect(fd, (const struct sockaddr *)&at, sizeof(at)), 0);
        if (i < 8) {
            silent[i] = dup(fd);
        }
        for (size_t k = 0; k < sizeof(noise); k++) {
            noise[k] = (uint8_t)kvf_random_seeded_next(&random);
        }
        if (i >= n) { /* the first only connect */
            (void)send(fd, noise, 1 + i * 100, MSG_NOSIGNAL);
        }
        close(fd);
        (void)move(&pair, 5000, i);
    }
    assert_int_equal(pair.a.downs + pair.b.downs, 0);
    for (uint32_t i = 0; i < 8; i++) {
        close(silent[i]);
    }
    pair_close(&pair);
}

static _Atomic bool has_made_way;

static void hear_log(void *arg, int severity, const char *text)
{
    (void)arg;
    (void)severity;
    if (strstr(text, "others came while it had not said who it is") != NULL) {
        has_made_way = true;
    }
}

#define CROWD (KVF_NET_STRANGERS_MAX + 4)

/* Many who connect and say nothing: the first of them go when others come. */
static void test_silent_crowd(void **state)
{
    struct pair pair;
    struct stranger strangers[CROWD];
    struct node third;

    (void)state;
    pair_open(&pair);
    has_made_way = false;
    kvf_log_init(hear_log, NULL, KVF_LOG_DEBUG);
    for (uint32_t i = 0; i < CROWD; i++) {
        stranger_open(&strangers[i], &pair.a);
    }
    /* A slow listener turns those away that come all at once: they come again. */
    for (uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS; !has_made_way;) {
        for (uint32_t i = 0; i < CROWD; i++) {
            (void)strangers[i].ucx.ucp_worker_progress(strangers[i].worker);
            if (strangers[i].is_cut) {
                stranger_close(&strangers[i]);
                stranger_open(&strangers[i], &pair.a);
            }
        }
        assert_true(kvf_now_ns() < end_ns);
    }
    node_open(&third, 3, 7, false);
    assert_int_equal(kvf_net_connect(third.net, &pair.a.at, 1), KVF_OK);
    for (uint64_t end_ns = kvf_now_ns() + WAIT_MS * KVF_NS_PER_MS; third.link == 0;) {
        node_poll(&third);
        node_poll(&pair.a);
        assert_true(kvf_now_ns() < end_ns);
    }
    for (uint32_t i = 0; i < CROWD; i++) {
        stranger_close(&strangers[i]);
    }
    node_close(&third);
    kvf_log_init(NULL, NULL, KVF_LOG_ERROR);
    pair_close(&pair);
}

/* A client's link: with a client's key, which makes no peer. */
static void client_open(struct stranger *stranger, struct pair *pair, uint8_t session[32])
{
    struct kvf_net_client client = {.tenant = "some"};
    struct kvf_net_welcome welcome;
    uint8_t cluster[32];
    uint8_t key[32];

    memset(cluster, 7, sizeof(cluster));
    kvf_net_client_key(cluster, "some", key);
    hello_of(&client.hello);
    stranger_open(stranger, &pair->a);
    stranger_sends(stranger, key, KVF_NET_CLIENT, 0, &client, sizeof(client));
    assert_true(stranger_waits(stranger, pair, KVF_NET_WELCOME));
    memcpy(&welcome, stranger->body, sizeof(welcome));
    assert_int_equal(welcome.status, KVF_OK);
    kvf_net_session_key(key, client.hello.nonce, welcome.nonce, 99, 1, session);
    stranger_sends(stranger, session, KVF_NET_CONFIRM, 0, NULL, 0);
}

/* What a client may not say ends its link, and nothing else. */
static void test_client_breach(void **state)
{
    static const struct kvf_net_fetch_body fetch = {.record_bytes = 8192};
    static const struct kvf_shm_sqe sqe = {.opcode = KVF_OP_NOP, .request = 1};
    static const uint8_t noise[64] = {1, 2, 3};
    struct kvf_wire_note mapped = {0};
    struct kvf_net_client client = {.tenant = "some"};
    const struct {
        uint8_t type;
        uint64_t request;
        const void *body;
        uint32_t bytes;
    } bad[] = {
        {KVF_NET_FETCH, 5, &fetch, sizeof(fetch)},     /* of nodes */
        {KVF_NET_RESYNC, 0, NULL, 0},                  /* the same */
        {KVF_NET_CONTROL, 0, noise, sizeof(noise)},    /* no message */
        {KVF_NET_CONTROL, 0, &mapped, sizeof(mapped)}, /* the relay's to say */
        {KVF_NET_SUBMIT, 0, &sqe, sizeof(sqe)},        /* before READY */
        {KVF_NET_STAGE, 0, noise, sizeof(noise)},      /* the same */
    };
    struct pair pair;
    struct stranger stranger;
    struct kvf_net_stat stat;
    uint8_t session[32];
    uint8_t key[32];

    (void)state;
    kvf_proto_head_init(&mapped.head, KVF_WIRE_MAPPED);
    pair_open(&pair);
    for (uint32_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        client_open(&stranger, &pair, session);
        stranger_sends(&stranger, session, bad[i].type, bad[i].request, bad[i].body, bad[i].bytes);
        assert_false(stranger_waits(&stranger, &pair, KVF_NET_PIECE));
        kvf_net_stat(pair.a.net, &stat);
        assert_int_equal(stat.protocol_errors, i + 1);
        assert_string_equal(pair.a.tenant, "some");
        node_poll(&pair.a);
        assert_int_equal(pair.a.offences, i + 1);
        stranger_close(&stranger);
    }
    /* its key is none of another tenant's */
    memset(key, 7, sizeof(key));
    kvf_net_client_key(key, "other", key);
    hello_of(&client.hello);
    stranger_open(&stranger, &pair.a);
    stranger_sends(&stranger, key, KVF_NET_CLIENT, 0, &client, sizeof(client));
    assert_true(stranger_waits(&stranger, &pair, KVF_NET_WELCOME));
    assert_int_equal(((const struct kvf_net_welcome *)(const void *)stranger.body)->status,
                     KVF_ERR_REFUSED);
    stranger_close(&stranger);
    (void)move(&pair, 5000, 10);
    assert_int_equal(pair.a.downs + pair.b.downs, 0);
    pair_close(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records),       cmocka_unit_test(test_miss_and_deadline),
        cmocka_unit_test(test_stream),        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_wrong_key),     cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_refusals),      cmocka_unit_test(test_breach),
        cmocka_unit_test(test_data_port),     cmocka_unit_test(test_silent_crowd),
        cmocka_unit_test(test_client_breach),
    };

    if (kvf_hash_init_library() != KVF_OK) {
        return 1;
    }
    (void)setenv("UCX_TLS", "tcp", 1);
    if (getenv("KVF_TEST_LOG") != NULL) {
        kvf_log_init(kvf_log_stderr_sink, NULL, KVF_LOG_DEBUG);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
