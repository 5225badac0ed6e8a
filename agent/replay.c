/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.c: the agent over ports of its own, and the one client that it has. The client speaks the
 * protocol by the library's end of sockets and rings; nothing sleeps, the same thread is both.
 *
 * A block is a record of a page and a payload of zeros, two to 32 pages in all: the number for
 * which areas of 1 MiB hold best as many blocks as the configured memory would. Sizes and rates of
 * the drive are scaled by the same factor.
 */
#include "agent/replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "agent/core.h"
#include "agent/replay_disk.h"
#include "base/fd.h"
#include "base/limits.h"
#include "tiers/work_inline.h"
#include "transport/segment.h"

#define MIB               (1ull << 20)
#define PAGES_A_AREA      256u
#define RECORD_PAGES_MIN  2u
#define RECORD_PAGES_MAX  32u
#define SEGMENT_BYTES     (256ull << 20)
#define FOOTER_ENTRIES    42u /* a page */
#define BATCH_MAX         512u
#define TURNS_MAX         100000
#define STAGING_BYTES     MIB
#define RING_ENTRIES      1024
#define START_NS          KVF_NS_PER_S
#define HANDSHAKE_TURNS   1000
#define JOBS_MAX          16384
#define BURST_BYTES       (256ull << 20) /* as admit.c has it */
#define INDEX_ENTRIES_MIN 4096u

/* What tables, rings and staging memory of a replay take beside its arena; and a block on its
 * drive: its place in the index, its record page and the drive's tables. Seen, rounded up. */
#define TABLE_BYTES       (4 * MIB)
#define DRIVE_BLOCK_BYTES 704

/* Owner: the thread that opened it. */
struct kvf_replay {
    struct kvf_config config;
    struct kvf_agent *agent;
    struct kvf_io_queue *disk;
    bool is_disk_taken; /* the agent closes it */
    struct kvf_random_seeded random;
    uint64_t now_ns;
    uint64_t disk_bytes;
    uint32_t record_pages;
    uint32_t batch; /* blocks in one get or put */
    struct kvf_replay_counts counts;

    /* the client */
    int fd;
    uint64_t connection_id;
    void *ring_map;
    uint64_t ring_bytes;
    uint8_t *staging;
    uint64_t staging_bytes;
    uint32_t pieces_expected, pieces_seen;
    bool is_ready;
    struct kvf_ring_client ring;
    uint64_t request; /* the last one's number */
};

/* ----------------------------------------------------------------------------------------------
 * Time, drive
 */
static uint64_t clock_now_ns(void *arg)
{
    return ((const struct kvf_replay *)arg)->now_ns;
}

static uint64_t clock_wall_s(void *arg)
{
    return ((const struct kvf_replay *)arg)->now_ns / KVF_NS_PER_S;
}

static const struct kvf_clock_ops replay_clock = {.now_ns = clock_now_ns, .wall_s = clock_wall_s};

static struct kvf_env env_of(struct kvf_replay *replay)
{
    return (struct kvf_env){.clock = &replay_clock,
                            .clock_arg = replay,
                            .random = &kvf_random_seeded_ops,
                            .random_arg = &replay->random};
}

static void no_wait(void *ctx)
{
    (void)ctx; /* the drive takes no time */
}

static bool memory_allows(void *ctx, uint64_t bytes)
{
    (void)ctx;
    (void)bytes;
    return true;
}

static struct kvf_io_queue *open_drive(void *ctx, uint32_t index)
{
    struct kvf_replay *replay = ctx;

    (void)index;
    replay->is_disk_taken = true;
    return replay->disk;
}

/* ----------------------------------------------------------------------------------------------
 * Sizes
 */
static uint64_t padded(uint64_t record_bytes)
{
    return (record_bytes + KVF_PAGE_BYTES - 1) / KVF_PAGE_BYTES * KVF_PAGE_BYTES;
}

uint64_t kvf_replay_dram_blocks(const struct kvf_replay_config *config)
{
    return config->dram_bytes / padded(config->record_bytes);
}

/* Records in a segment of a real drive. */
static uint64_t records_a_segment(const struct kvf_replay_config *config)
{
    uint64_t fit = (SEGMENT_BYTES - 3 * KVF_PAGE_BYTES) / padded(config->record_bytes);

    return fit == 0 ? 1 : fit;
}

uint64_t kvf_replay_nvme_blocks(const struct kvf_replay_config *config)
{
    return (uint64_t)((double)config->nvme_bytes / SEGMENT_BYTES *
                      (double)records_a_segment(config));
}

/* Pages a record and areas: the smallest records with which the arena holds as many blocks as it
 * should, but for one in a hundred; else those that come closest. */
static void choose_record(uint64_t blocks, uint32_t *pages_out, uint64_t *areas_out)
{
    double best = 2;

    for (uint32_t pages = RECORD_PAGES_MIN; pages <= RECORD_PAGES_MAX && best > 0.01; pages++) {
        uint64_t an_area = PAGES_A_AREA / pages;
        uint64_t areas = (blocks + an_area / 2) / an_area;
        double error = (double)(areas * an_area) / (double)blocks - 1;

        error = error < 0 ? -error : error;
        if (areas > 0 && error < best - 0.002) { /* small records are quicker */
            best = error;
            *pages_out = pages;
            *areas_out = areas;
        }
    }
}

/* The drive: as many segments as hold its blocks, each with as many records as a real one, where a
 * small drive has at least eight. */
static void choose_drive_sizes(struct kvf_replay *replay, const struct kvf_replay_config *config)
{
    struct kvf_config_nvme *nvme = &replay->config.nvme[0];
    uint64_t blocks = kvf_replay_nvme_blocks(config);
    uint64_t records = records_a_segment(config);
    uint64_t pages;
    uint64_t segments;

    records = records > blocks / 8 ? blocks / 8 : records;
    records = records == 0 ? 1 : records;
    pages = 2 + records * replay->record_pages + (records + FOOTER_ENTRIES - 1) / FOOTER_ENTRIES;
    if (pages < KVF_NVME_SEGMENT_BYTES_MIN / KVF_PAGE_BYTES) {
        pages = KVF_NVME_SEGMENT_BYTES_MIN / KVF_PAGE_BYTES;
        records = (pages - 3) / replay->record_pages;
    }
    segments = (blocks + records - 1) / records;
    segments = segments < KVF_NVME_SEGMENTS_MIN ? KVF_NVME_SEGMENTS_MIN : segments;
    nvme->segment_bytes = pages * KVF_PAGE_BYTES;
    nvme->bytes = MIB + segments * nvme->segment_bytes;
    nvme->depth = 64;
    nvme->admission = config->admission;
    nvme->write_budget = (uint64_t)((double)config->write_budget / (double)config->record_bytes *
                                    (replay->record_pages * KVF_PAGE_BYTES));
    if (config->write_budget != 0 && nvme->write_budget == 0) {
        nvme->write_budget = 1;
    }
    (void)snprintf(nvme->path, sizeof(nvme->path), "drive");
    replay->config.n_nvme = 1;
    replay->disk_bytes = nvme->bytes;
}

static int choose_sizes(struct kvf_replay *replay, const struct kvf_replay_config *config,
                        char *why_out, size_t why_bytes)
{
    struct kvf_config *c = &replay->config;
    uint64_t blocks, areas = 0;

    if (config->record_bytes <= KVF_RECORD_PAGE_BYTES) {
        (void)snprintf(why_out, why_bytes, "a block of %llu bytes has no payload",
                       (unsigned long long)config->record_bytes);
        return KVF_ERR_CONFIG;
    }
    blocks = kvf_replay_dram_blocks(config);
    if (blocks < KVF_REPLAY_SLOTS_MIN || blocks > KVF_REPLAY_SLOTS_MAX ||
        kvf_replay_nvme_blocks(config) > KVF_REPLAY_SLOTS_MAX) {
        (void)snprintf(
            why_out, why_bytes,
            "memory holds %llu and the drive %llu blocks of %llu bytes: %d to %d blocks "
            "of memory and at most as many of a drive can be replayed",
            (unsigned long long)blocks, (unsigned long long)kvf_replay_nvme_blocks(config),
            (unsigned long long)config->record_bytes, KVF_REPLAY_SLOTS_MIN, KVF_REPLAY_SLOTS_MAX);
        return KVF_ERR_CONFIG;
    }
    choose_record(blocks, &replay->record_pages, &areas);
    kvf_config_init(c);
    c->dram_bytes = areas * MIB;
    c->dram_area_bytes = MIB;
    c->dram_piece_bytes = areas < 1024 ? c->dram_bytes : 1024 * MIB;
    c->index_entries = kvf_replay_dram_blocks(config) + kvf_replay_nvme_blocks(config) +
                       kvf_replay_nvme_blocks(config) / 8 + INDEX_ENTRIES_MIN;
    c->staging_total = 16 * STAGING_BYTES;
    c->staging_client = STAGING_BYTES;
    c->clients_max = 1;
    c->clients_ring_entries = RING_ENTRIES;
    c->put_writeback_share = 75; /* the drive takes no time: what waits for it is one batch */
    c->lease_client_share = 100;
    c->lease_tenant_share = 100;
    c->n_sockets = 1;
    (void)snprintf(c->sockets[0].tenant, sizeof(c->sockets[0].tenant), "replay");
    if (config->nvme_bytes != 0) {
        choose_drive_sizes(replay, config);
    }
    replay->batch = blocks / 4 < BATCH_MAX ? (uint32_t)(blocks / 4) : BATCH_MAX;
    return KVF_OK;
}

/* ----------------------------------------------------------------------------------------------
 * The client's handshake
 */
static int send_hello(struct kvf_replay *replay)
{
    struct kvf_wire_hello hello = {0};
    struct kvf_codec_plan plan;

    kvf_proto_head_init(&hello.head, KVF_WIRE_HELLO);
    hello.head.version = 1;
    hello.version_min = 1;
    hello.version_max = KVF_WIRE_VERSION_MAX;
    hello.shard_count = 1;
    hello.ring_entries = RING_ENTRIES;
    hello.staging_bytes = STAGING_BYTES;
    (void)kvf_codec_plan_init(&plan, NULL, "bytes");
    hello.profile_fp = plan.profile_fp;
    (void)snprintf(hello.profile, sizeof(hello.profile), "bytes");
    (void)snprintf(hello.client_name, sizeof(hello.client_name), "replay");
    return kvf_seqpacket_send(replay->fd, &hello, sizeof(hello), NULL, 0);
}

static int welcome(struct kvf_replay *replay, const struct kvf_wire_welcome *message,
                   const struct kvf_seqpacket_message *received, char *why_out, size_t why_bytes)
{
    struct kvf_shm_header header;
    const char *why = "";
    void *staging;
    int status = message->status;

    if (status < 0) {
        (void)snprintf(why_out, why_bytes, "%.*s", (int)why_bytes - 1, message->text);
        return status;
    }
    status = kvf_segment_map(received->fds[0], message->ring_bytes, true, &replay->ring_map,
                             why_out, why_bytes);
    if (status != KVF_OK) {
        return status;
    }
    replay->ring_bytes = message->ring_bytes;
    status = kvf_segment_map(received->fds[1], message->staging_bytes, true, &staging, why_out,
                             why_bytes);
    if (status != KVF_OK) {
        return status;
    }
    replay->staging = staging;
    replay->staging_bytes = message->staging_bytes;
    replay->connection_id = message->connection_id;
    replay->pieces_expected = message->n_pieces;
    memcpy(&header, replay->ring_map, sizeof(header));
    status = kvf_shm_header_check(&header, message->ring_bytes, &why);
    if (status == KVF_OK) {
        kvf_ring_client_init(&replay->ring, replay->ring_map, &header);
    }
    return status;
}

static int send_mapped(struct kvf_replay *replay)
{
    struct kvf_wire_note note = {0};

    kvf_proto_head_init(&note.head, KVF_WIRE_MAPPED);
    note.connection_id = replay->connection_id;
    return kvf_seqpacket_send(replay->fd, &note, sizeof(note), NULL, 0);
}

/* Take what has come on the socket. */
static int receive(struct kvf_replay *replay, char *why_out, size_t why_bytes)
{
    uint8_t data[KVF_WIRE_MESSAGE_BYTES_MAX];
    struct kvf_seqpacket_message received;
    union kvf_proto_message message;
    const char *why = "";
    int status;

    while ((status = kvf_seqpacket_recv(replay->fd, data, sizeof(data), &received)) == KVF_OK) {
        if (received.bytes > 1) {
            status = kvf_proto_decode(KVF_PROTO_DAEMON, data, received.bytes, received.n_fds,
                                      &message, &why);
        }
        if (status == KVF_OK && received.bytes > 1) {
            if (message.head.type == KVF_WIRE_WELCOME) {
                status = welcome(replay, &message.welcome, &received, why_out, why_bytes);
            } else if (message.head.type == KVF_WIRE_READY) {
                replay->is_ready = true;
            }
            replay->pieces_seen += message.head.type == KVF_WIRE_PIECE;
            if (status == KVF_OK && replay->ring_map != NULL &&
                (message.head.type == KVF_WIRE_WELCOME || message.head.type == KVF_WIRE_PIECE) &&
                replay->pieces_seen == replay->pieces_expected) {
                status = send_mapped(replay);
            }
        }
        kvf_seqpacket_message_close(&received);
        if (status != KVF_OK) {
            return status;
        }
    }
    return status == KVF_EMPTY ? KVF_OK : status;
}

/* One turn of the agent; false: it has ended. */
static bool turn(struct kvf_replay *replay)
{
    int status = KVF_OK;

    replay->now_ns += KVF_NS_PER_US; /* deadlines pass */
    return kvf_agent_turn(replay->agent, &status);
}

static int attach(struct kvf_replay *replay, char *why_out, size_t why_bytes)
{
    int fds[2];
    int status;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
        (void)snprintf(why_out, why_bytes, "no socket: raise the limit of open files");
        return KVF_ERR_IO;
    }
    replay->fd = fds[0];
    status = kvf_agent_adopt(replay->agent, 0, fds[1], 1);
    if (status == KVF_OK) {
        status = send_hello(replay);
    }
    for (int i = 0; status == KVF_OK && !replay->is_ready && i < HANDSHAKE_TURNS; i++) {
        status = turn(replay) ? receive(replay, why_out, why_bytes) : KVF_ERR_INTERNAL;
    }
    return status != KVF_OK || replay->is_ready ? status : KVF_ERR_TIMEOUT;
}

/* ----------------------------------------------------------------------------------------------
 * Requests
 */
static void key_entry(const struct kvf_replay *replay, uint64_t block, bool is_put,
                      struct kvf_shm_key *entry)
{
    memset(entry, 0, sizeof(*entry));
    memcpy(entry->key, &block, sizeof(block));
    entry->key_bytes = KVF_KEY_BYTES_MIN;
    if (is_put) { /* all blocks are the same record */
        entry->record_bytes = (uint64_t)replay->record_pages * KVF_PAGE_BYTES;
    }
}

/* What became of a request. */
struct outcome {
    uint32_t run;             /* lookup */
    uint32_t stored;          /* put */
    uint8_t tiers[BATCH_MAX]; /* get: where each block was, KVF_TIER_NONE: nowhere */
};

static void take_block(const struct kvf_shm_cqe *cqe, struct outcome *outcome)
{
    outcome->stored += cqe->status == KVF_OK;
    if (cqe->index < BATCH_MAX) {
        outcome->tiers[cqe->index] = cqe->status == KVF_OK ? cqe->tier : KVF_TIER_NONE;
    }
}

static void release(struct kvf_replay *replay, uint64_t lease)
{
    struct kvf_shm_sqe sqe = {.opcode = KVF_OP_RELEASE, .arg = lease};

    while (kvf_ring_client_room(&replay->ring, 0) != KVF_OK && turn(replay)) {
    }
    kvf_ring_client_push(&replay->ring, &sqe);
    (void)kvf_ring_client_publish(&replay->ring);
}

/* Submit what has been put into the ring, and see it through. KVF_OK; KVF_ERR_INTERNAL. */
static int run_request(struct kvf_replay *replay, struct kvf_shm_sqe *sqe, struct outcome *outcome)
{
    uint64_t leases[BATCH_MAX];
    uint32_t n_leases = 0;
    bool is_done = false;

    memset(outcome, 0, sizeof(*outcome));
    sqe->request = ++replay->request;
    kvf_ring_client_push(&replay->ring, sqe);
    (void)kvf_ring_client_publish(&replay->ring);
    for (int turns = 0; !is_done; turns++) {
        struct kvf_shm_cqe cqe;

        if (turns == TURNS_MAX || !turn(replay)) {
            return KVF_ERR_INTERNAL;
        }
        while (kvf_ring_client_take(&replay->ring, &cqe) == KVF_OK) {
            if (cqe.kind == KVF_CQE_REQUEST) {
                outcome->run = cqe.values[0];
                is_done = true;
                continue;
            }
            take_block(&cqe, outcome);
            if (cqe.lease != 0) {
                leases[n_leases++] = cqe.lease;
            }
        }
    }
    for (uint32_t i = 0; i < n_leases; i++) {
        release(replay, leases[i]);
    }
    return KVF_OK;
}

static int submit(struct kvf_replay *replay, uint8_t opcode, const uint64_t *blocks, uint32_t first,
                  uint32_t n, struct outcome *outcome)
{
    struct kvf_shm_sqe sqe = {.opcode = opcode, .n_keys = (uint16_t)n, .n_entries = (uint16_t)n};
    struct kvf_shm_key entry;

    while (kvf_ring_client_room(&replay->ring, n + 1) != KVF_OK) {
        if (!turn(replay)) {
            return KVF_ERR_INTERNAL;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        key_entry(replay, blocks[first + i], opcode == KVF_OP_PUT, &entry);
        kvf_ring_client_key_put(&replay->ring, i, &entry);
    }
    if (opcode == KVF_OP_PUT) {
        sqe.depth = first;
        if (first > 0) {
            key_entry(replay, blocks[first - 1], false, &entry);
            kvf_ring_client_key_put(&replay->ring, n, &entry);
            sqe.flags = KVF_SQE_HAS_PARENT;
            sqe.n_entries++;
        }
    }
    return run_request(replay, &sqe, outcome);
}

/* Let writes end before time goes on. */
static int settle(struct kvf_replay *replay)
{
    for (int turns = 0; turns < TURNS_MAX; turns++) {
        bool is_busy = replay->disk != NULL && kvf_replay_disk_is_busy(replay->disk);

        if (!is_busy && kvf_place_is_quiet(replay->agent)) {
            return KVF_OK;
        }
        if (!turn(replay)) {
            return KVF_ERR_INTERNAL;
        }
    }
    return KVF_ERR_INTERNAL;
}

/* The leading blocks that are here; looked for in parts, as a client with long prompts does. */
static int find_run(struct kvf_replay *replay, const uint64_t *blocks, uint32_t n, uint32_t *run)
{
    struct outcome outcome;
    int status = KVF_OK;

    *run = 0;
    while (*run < n && status == KVF_OK) {
        uint32_t part = n - *run < KVF_REQUEST_KEYS_MAX ? n - *run : KVF_REQUEST_KEYS_MAX;

        status = submit(replay, KVF_OP_LOOKUP, blocks, *run, part, &outcome);
        if (status == KVF_OK) {
            *run += outcome.run;
        }
        if (status != KVF_OK || outcome.run < part) {
            break;
        }
    }
    return status;
}

/* A part of the run has been fetched: its leading hits count, and then those of the parts behind it
 * if it came whole. */
static void count_part(const struct outcome *outcome, uint32_t n, struct kvf_replay_hits *hits)
{
    struct kvf_replay_hits part = {0};

    for (uint32_t i = 0; i < n && outcome->tiers[i] != KVF_TIER_NONE; i++) {
        *(outcome->tiers[i] == KVF_TIER_DRAM ? &part.dram : &part.nvme) += 1;
    }
    if (part.dram + part.nvme == n) {
        part.dram += hits->dram;
        part.nvme += hits->nvme;
    }
    *hits = part;
}

/* Fetch the run, the last part first, so that the first blocks are the last ones used. */
static int fetch(struct kvf_replay *replay, const uint64_t *blocks, uint32_t run,
                 struct kvf_replay_hits *hits)
{
    uint32_t end = run;
    int status = KVF_OK;

    *hits = (struct kvf_replay_hits){0};
    while (end > 0 && status == KVF_OK) {
        uint32_t n = end < replay->batch ? end : replay->batch;
        struct outcome outcome;

        status = submit(replay, KVF_OP_GET, blocks, end - n, n, &outcome);
        if (status == KVF_OK) {
            count_part(&outcome, n, hits);
        }
        end -= n;
    }
    return status;
}

int kvf_replay_request(struct kvf_replay *replay, uint64_t at_ns, const uint64_t *blocks,
                       uint32_t n_blocks, struct kvf_replay_hits *hits_out)
{
    struct kvf_replay_hits hits = {0};
    uint32_t run;
    int status;

    if (START_NS + at_ns > replay->now_ns) {
        replay->now_ns = START_NS + at_ns;
    }
    replay->counts.requests++;
    replay->counts.blocks += n_blocks;
    status = find_run(replay, blocks, n_blocks, &run);
    if (status == KVF_OK) {
        status = fetch(replay, blocks, run, &hits);
        replay->counts.hits_dram += hits.dram;
        replay->counts.hits_nvme += hits.nvme;
    }
    for (uint32_t first = run; first < n_blocks && status == KVF_OK;) {
        uint32_t n = n_blocks - first < replay->batch ? n_blocks - first : replay->batch;
        struct outcome outcome;

        status = submit(replay, KVF_OP_PUT, blocks, first, n, &outcome);
        if (status == KVF_OK) {
            replay->counts.puts += outcome.stored;
        }
        first += n;
    }
    if (status == KVF_OK) {
        status = settle(replay);
    }
    if (hits_out != NULL) {
        *hits_out = hits;
    }
    return status;
}

/* ----------------------------------------------------------------------------------------------
 * Open, figures, close
 */
void kvf_replay_counts(const struct kvf_replay *replay, struct kvf_replay_counts *counts_out)
{
    const struct kvf_metrics *metrics = &replay->agent->metrics;

    *counts_out = replay->counts;
    counts_out->rejected = metrics->nvme_rejected_blocks;
    counts_out->dropped = metrics->nvme_dropped_blocks;
    counts_out->evicted = metrics->evicted_blocks;
    counts_out->reclaimed = metrics->nvme_reclaimed_blocks;
    if (replay->agent->n_drives > 0) {
        struct kvf_tier_stat stat;

        replay->agent->drives[0].store->ops->stat(replay->agent->drives[0].store, &stat);
        counts_out->reinserted = stat.reinsertions;
        counts_out->writes = stat.stores + stat.reinsertions;
    }
}

/* A drive with an empty store. */
static int make_disk(struct kvf_replay *replay, char *why_out, size_t why_bytes)
{
    struct kvf_nvme_config nvme;

    replay->disk = kvf_replay_disk_open(replay->disk_bytes);
    if (replay->disk == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    kvf_nvme_config_init(&nvme);
    nvme.path = replay->config.nvme[0].path;
    nvme.bytes = replay->config.nvme[0].bytes;
    nvme.segment_bytes = replay->config.nvme[0].segment_bytes;
    nvme.io = replay->disk;
    nvme.env = env_of(replay);
    nvme.wait = no_wait;
    return kvf_nvme_format(&nvme, why_out, why_bytes);
}

static int open_agent(struct kvf_replay *replay, const struct kvf_replay_config *config,
                      char *why_out, size_t why_bytes)
{
    struct kvf_agent_ports ports = {
        .env = env_of(replay),
        .open_drive = open_drive,
        .wait = no_wait,
        .memory_allows = memory_allows,
        .burst_bytes = (uint64_t)((double)BURST_BYTES / config->one_in /
                                  (double)config->record_bytes *
                                  (replay->record_pages * KVF_PAGE_BYTES)),
        .ctx = replay};

    int status = KVF_OK;

    (void)snprintf(why_out, why_bytes, "out of memory: replay a smaller store");
    if (replay->config.n_nvme != 0) {
        status = make_disk(replay, why_out, why_bytes);
    }
    if (status == KVF_OK) {
        status = kvf_work_inline_open(KVF_WORK_AT_SUBMIT, JOBS_MAX, &ports.work);
    }
    return status == KVF_OK ? kvf_agent_create_ported(&replay->config, &ports, &replay->agent)
                            : status;
}

static int prepare_record(struct kvf_replay *replay)
{
    uint64_t payload_bytes = (uint64_t)(replay->record_pages - 1) * KVF_PAGE_BYTES;
    struct kvf_record_page page;
    int status;

    memset(replay->staging, 0, KVF_RECORD_PAGE_BYTES + payload_bytes);
    status = kvf_block_describe_bytes(&page, replay->staging + sizeof(page), payload_bytes);
    if (status == KVF_OK) {
        memcpy(replay->staging, &page, sizeof(page));
    }
    return status;
}

/* A store of the sample: smaller by as much as there is less to store. */
static struct kvf_replay_config of_sample(const struct kvf_replay_config *config)
{
    struct kvf_replay_config sized = *config;
    uint32_t one_in = config->one_in == 0 ? 1 : config->one_in;

    sized.dram_bytes /= one_in;
    sized.nvme_bytes /= one_in;
    if (config->write_budget != 0) {
        sized.write_budget = config->write_budget / one_in == 0 ? 1 : config->write_budget / one_in;
    }
    sized.one_in = one_in;
    return sized;
}

uint64_t kvf_replay_bytes(const struct kvf_replay_config *whole)
{
    struct kvf_replay_config sized = of_sample(whole);
    uint64_t blocks = kvf_replay_dram_blocks(&sized);
    uint64_t areas = 0;
    uint32_t pages = 0;

    if (blocks < KVF_REPLAY_SLOTS_MIN || blocks > KVF_REPLAY_SLOTS_MAX ||
        kvf_replay_nvme_blocks(&sized) > KVF_REPLAY_SLOTS_MAX) {
        return 0; /* refused */
    }
    choose_record(blocks, &pages, &areas);
    return areas * MIB + TABLE_BYTES + kvf_replay_nvme_blocks(&sized) * DRIVE_BLOCK_BYTES;
}

int kvf_replay_open(const struct kvf_replay_config *whole, struct kvf_replay **replay_out,
                    char *why_out, size_t why_bytes)
{
    struct kvf_replay *replay = calloc(1, sizeof(*replay));
    struct kvf_replay_config sized = of_sample(whole);
    const struct kvf_replay_config *config = &sized;
    int status;

    if (replay == NULL) {
        (void)snprintf(why_out, why_bytes, "out of memory");
        return KVF_ERR_NO_MEMORY;
    }
    replay->fd = -1;
    replay->now_ns = START_NS;
    kvf_random_seeded_init(&replay->random, 1);
    status = choose_sizes(replay, config, why_out, why_bytes);
    if (status != KVF_OK) {
        goto fail;
    }
    status = open_agent(replay, config, why_out, why_bytes);
    if (status == KVF_OK) {
        status = attach(replay, why_out, why_bytes);
    }
    if (status == KVF_OK) {
        status = prepare_record(replay);
    }
    if (status != KVF_OK) {
        goto fail;
    }
    *replay_out = replay;
    return KVF_OK;
fail:
    kvf_replay_close(replay);
    return status;
}

void kvf_replay_close(struct kvf_replay *replay)
{
    if (replay == NULL) {
        return;
    }
    kvf_segment_unmap(replay->ring_map, replay->ring_bytes);
    kvf_segment_unmap(replay->staging, replay->staging_bytes);
    kvf_fd_close(&replay->fd);
    kvf_agent_destroy(replay->agent);
    if (replay->disk != NULL && !replay->is_disk_taken) {
        replay->disk->ops->close(replay->disk);
    }
    free(replay);
}
