/* SPDX-License-Identifier: Apache-2.0
 *
 * sim.h: one simulated node. The daemon's own code runs in this process; clock, drives, workers and
 * clients are simulated, and a model beside it judges what can be seen. docs/simulator.md explains.
 *
 *   sim_main.c     command line, ranges of seeds, gates
 *   sim_world.c    time, drives, faults; the daemon's birth, death and return
 *   sim_step.c     one step: who does what now
 *   sim_client.c   a client's life: socket, handshake, rings, leases
 *   sim_request.c  submissions, and the judgement of completions
 *   sim_hostile.c  clients that break every rule
 *   sim_model.c    what each block may be
 *   sim_audit.c    the daemon's own books
 *   sim_hbm.c      a GPU's memory
 *   sim_durable.c  what must come back after a restart
 *   sim_nodes.c    several nodes, and what goes wrong between them
 *   sim_net.c      the network
 *
 * Everything is owned by the one thread. Every decision comes from the seed.
 */
#ifndef KVF_TESTS_SIM_H
#define KVF_TESTS_SIM_H

#include "agent/core.h"
#include "base/random.h"
#include "tiers/io_sim.h"

#include "tests/sim/sim_net.h"
#include "tests/sim/sim_work.h"

#include <stdio.h>

enum sim_limits {
    SIM_CLIENTS = 10,
    SIM_TENANTS = 2,
    SIM_NAMESPACES = 6,
    SIM_NAMESPACES_HONEST = 4, /* the others belong to hostile clients */
    SIM_CHAINS = 48,
    SIM_CHAIN_CHUNKS = 16,
    SIM_TAILS = 4,
    SIM_CHUNKS = SIM_CHAIN_CHUNKS + SIM_TAILS,
    SIM_SHARDS_MAX = 4,
    SIM_VERSIONS = 4, /* payloads that a key may be put with */
    SIM_KEYS_MAX = SIM_CHUNKS,
    SIM_REQUESTS = 96, /* in flight, of one client */
    SIM_LEASES = 256,  /* held, of one client */
    SIM_STAGES = 128,  /* ranges of staging in use, of one client */
    SIM_PIECES = 1024, /* arena pieces seen in one life of the daemon */
    SIM_DRIVES_MAX = 2,
};

#define SIM_GPU_UUID   "GPU-00000000-0000-0000-0000-000000000001"
#define SIM_ON_GPU     UINT32_C(0x80000000) /* in numbers of pieces: of the GPU's memory */
#define SIM_ROWS       24                   /* of an answer to the operator */
#define SIM_FOREVER_NS (60 * KVF_NS_PER_S)  /* a request without a budget ends before that */

enum sim_cover {
#define SIM_COVER(name, text) SIM_COVER_##name,
#include "tests/sim/sim_cover.def"
    SIM_COVERS,
};

extern const char *const sim_cover_names[SIM_COVERS];

/* What differs from seed to seed. */
struct sim_shape {
    uint32_t n_tenants, n_drives, n_clients;
    uint32_t shard_count; /* of the namespace with several */
    uint64_t work_min_ns, work_max_ns;
    uint64_t tick_ns; /* between two turns, on average */
    uint32_t size_groups;
    uint32_t size_min[4], size_max[4]; /* of payloads, a group */
    uint32_t hot_chains;
    uint64_t staging_bytes;                             /* of a client */
    uint32_t durable_in, budget_in, ttl_in, version_in; /* one put or request in so many */
    uint32_t fault_in, crash_in;                        /* one step in so many; 0: never */
    bool has_silent_faults, has_hostile;
    uint32_t n_hbm; /* GPUs; even seeds */
    bool has_soft;  /* payloads that can be packed, by drives that do so in some lives; odd seeds */
};

/* A block as the model knows it: one shard of one chunk. Bits of masks are versions. */
struct sim_block {
    uint8_t key_id[32];
    uint8_t mask;        /* what the daemon may hold now */
    uint8_t ever;        /* what anybody has ever begun to put here */
    uint8_t mask_before; /* at the beginning of turn mask_turn */
    uint8_t disk_mask;   /* what may come back after a restart */
    uint8_t purging;     /* disk_mask of when the running purge began */
    uint8_t zombies;     /* puts of dead clients that may still land, until zombies_ns */
    uint8_t pending[SIM_VERSIONS];
    bool has_key_id;
    bool is_unread; /* recovered: the daemon does not know its checksum yet */
    uint8_t durable_version;
    bool is_durable; /* completed as durable, and not forgotten since */
    uint64_t mask_turn;
    uint64_t zombies_ns;
    uint64_t read_turn; /* when is_unread ended */
    uint64_t gone_turn; /* last turn in which it was told to be forgotten */
    uint64_t put_turn;
    uint64_t loaded_turn;
    uint64_t expires_ns; /* 0: no time to live */
    uint64_t location;   /* when last looked at, for blocks that are durable; 0: not yet */
    uint8_t location_drive;
    uint32_t promises; /* leases of lookups that hold it */
    uint16_t promise_serial;
};

struct sim_namespace {
    uint16_t tenant;
    uint16_t shard_count;
    bool is_hostile;
    char label[16];
    uint64_t id; /* 0: no client has been told yet */
    uint64_t purge_turn;
};

struct sim_key {
    uint16_t chunk;
    uint8_t version;
    bool is_corrupt; /* its checksum is wrong on purpose */
    bool is_seen;
    bool is_scribbled;  /* its staging has been changed since */
    int16_t supersedes; /* chunk, or -1 */
    uint32_t stage_offset, stage_bytes;
};

struct sim_request {
    uint64_t id; /* 0: free */
    uint8_t opcode, flags;
    uint16_t chain, n_keys, n_tails, n_blocks;
    uint16_t seen, succeeded;
    uint32_t budget_ms, ttl_s;
    bool is_canceled;
    uint64_t submitted_ns, submitted_turn;
    int32_t first_failure;
    uint32_t first_failed;
    struct sim_key keys[SIM_KEYS_MAX];
    bool stat_seen[KVF_STAT_COUNT];
};

struct sim_lease {
    uint64_t id;
    bool is_lookup;
    uint8_t version;
    uint16_t chain, n_chunks;
    uint16_t serials[SIM_CHUNKS * SIM_SHARDS_MAX]; /* lookup: promise_serial of each block */
    uint32_t piece, cq_index;
    uint64_t offset, bytes;
    struct sim_block *block;
    uint16_t chunk;
    uint32_t page_crc;
    uint64_t since_ns, since_turn, release_ns;
};

struct sim_stage {
    uint32_t offset, bytes;
};

enum sim_client_state {
    SIM_DETACHED = 0,
    SIM_CONNECTED, /* HELLO not sent yet */
    SIM_HELLO,
    SIM_WELCOMED,
    SIM_MAPPED,
    SIM_READY,
};

struct sim_client {
    uint8_t state; /* enum sim_client_state */
    bool is_hostile, is_scheduler;
    bool is_sleeping; /* told the ring so */
    bool has_bye;
    bool wants_device, has_device; /* reads what is in the GPU's memory; has said so */
    bool is_slow;                  /* will not finish its handshake */
    bool was_too_old;              /* it has seen a lease lost for its age */
    uint8_t number;
    uint16_t ns, shard;
    uint16_t version; /* of the protocol */
    int fd;
    uint64_t respawn_ns, since_ns, stalled_until_ns, said_ns;
    uint64_t connection_id;
    uint32_t pieces_expected, pieces_seen;
    void *ring_map;
    uint64_t ring_bytes;
    uint8_t *staging;
    uint64_t staging_bytes;
    struct kvf_ring_client ring;
    uint32_t observed;      /* completions judged */
    uint32_t credits_taken; /* of requests in flight and of completions not taken */
    uint64_t next_request;
    uint32_t n_requests, n_leases, n_stages;
    uint32_t n_expected; /* leases that requests in flight may bring */
    struct sim_request requests[SIM_REQUESTS];
    struct sim_lease leases[SIM_LEASES];
    struct sim_stage stages[SIM_STAGES]; /* by offset */
};

struct sim_piece {
    uint32_t id;
    uint16_t tenant;
    uint64_t inode, bytes;
    uint8_t *map;
};

struct sim_drive {
    struct kvf_io_sim_disk *disk;
    bool has_silent_faults; /* since it was made: what is on it may be wrong */
    bool is_stopped;        /* its time stands still until resume_ns */
    uint64_t resume_ns;
    uint64_t lag_ns; /* its time is behind by so much */
    uint64_t faults_seen;
    uint8_t window; /* fault of the present window, 0: none */
    uint64_t window_end_step;
};

struct sim;

/* Several nodes and the network between them: any block may come from any of them. */
struct sim_world {
    struct sim *nodes[SIM_NET_NODES];
    uint32_t n;
    uint8_t id_key[32];
    int key_fd; /* a file that holds it */
    uint64_t faults_end_ns;
    struct sim_net_counts counted;
};

struct sim {
    struct sim_world *world; /* NULL: one node */
    uint32_t node;
    uint64_t seed;
    uint64_t requests_wanted, requests;
    bool trace;
    struct sim_shape shape;
    struct kvf_random_seeded random;       /* decisions of the harness */
    struct kvf_random_seeded agent_random; /* what the daemon gets */
    struct kvf_random_seeded work_random;
    uint64_t now_ns;
    uint64_t step, turn;
    uint64_t hash;
    struct kvf_config config;
    struct kvf_agent *agent;
    struct kvf_work_queue *work;
    bool is_draining, memory_denied, tolerates_read_faults;
    bool is_life_damaged; /* a drive has failed or lied in this life of the daemon */
    bool was_index_full;  /* in this life: blocks are forgotten for others */
    uint32_t lives;
    uint32_t work_jobs;                /* room of the work queue */
    struct kvf_metrics metrics_before; /* of this life, when last counted */
    struct sim_drive drives[SIM_DRIVES_MAX];
    struct sim_namespace namespaces[SIM_NAMESPACES];
    struct sim_block *blocks;
    struct sim_client *clients;
    struct sim_piece pieces[SIM_PIECES];
    uint32_t n_pieces;
    const struct sim_block *suspect; /* NULL: none in this turn */
    uint32_t suspect_client;
    uint64_t suspect_request;
    bool hbm_dies; /* the GPU's worker, in the next turn */
    uint64_t hbm_died_turn;
    struct kvf_control purge;
    bool purge_running, purge_seen, purge_done;
    uint16_t purge_ns;
    struct kvf_control question; /* of another kind */
    bool question_running;
    void *rows;
    struct kvf_control_stat *stat;
    int end_status;
    uint64_t cover[SIM_COVERS];
};

/* sim_main.c */
/* Tell what is wrong and end the process. */
void sim_fail(struct sim *sim, const char *fmt, ...)
    __attribute__((noreturn, format(printf, 2, 3)));
void sim_trace(struct sim *sim, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static inline void sim_cover(struct sim *sim, enum sim_cover what)
{
    sim->cover[what]++;
}

static inline void sim_hash(struct sim *sim, uint64_t value)
{
    sim->hash = (sim->hash ^ value) * 0x9e3779b97f4a7c15ull;
    sim->hash ^= sim->hash >> 29;
}

/* Even over 0..end - 1. */
static inline uint64_t sim_below(struct sim *sim, uint64_t end)
{
    return kvf_random_seeded_next(&sim->random) % end;
}

/* True once in n; never for 0. */
static inline bool sim_one_in(struct sim *sim, uint32_t n)
{
    return n != 0 && sim_below(sim, n) == 0;
}

static inline uint64_t sim_between(struct sim *sim, uint64_t low, uint64_t high)
{
    return low + sim_below(sim, high - low + 1);
}

/* sim_world.c */
/* One turn of the daemon and what is judged after each. False: it has ended by itself. */
bool sim_turn(struct sim *sim);
/* Let time pass, turning whenever something is due. False: the daemon has ended by itself. */
bool sim_advance(struct sim *sim, uint64_t ns);
void sim_world_act(struct sim *sim);
/* What the daemon does while it waits for a drive. */
void sim_wait(struct sim *sim);
/* All drives work, from now on. */
void sim_faults_end(struct sim *sim);
/* Everybody leaves, everything lands; then the books must be empty. */
void sim_settle(struct sim *sim);

/* For sim_nodes.c: of one node. */
void sim_time_set(struct sim *sim, uint64_t now_ns);
uint64_t sim_next_event_ns(const struct sim *sim);
void sim_keep_house(struct sim *sim);
/* Everybody leaves, nothing is on its way any more: the books are empty. */
void sim_leave(struct sim *sim);

/* sim_nodes.c */
/* As many nodes as that, alike but for what their own random numbers say. */
void sim_nodes_open(struct sim_world *world);
void sim_nodes_step(struct sim_world *world);
void sim_nodes_close(struct sim_world *world);
/* Let time pass for all. False: the daemon of this node has ended by itself. */
bool sim_nodes_advance(struct sim *sim, uint64_t ns);
/* What anybody anywhere has begun to put as this block. */
uint8_t sim_nodes_ever(const struct sim *sim, const struct sim_block *block);
/* Books that several nodes keep together. */
void sim_nodes_audit(struct sim *sim);

/* sim_daemon.c */
void sim_open(struct sim *sim); /* shape, drives, first start */
void sim_close(struct sim *sim);
void sim_free(struct sim *sim); /* the daemon is down */
enum sim_end {
    SIM_END_KILL,
    SIM_END_POWER,
    SIM_END_DRAIN
};
void sim_daemon_restart(struct sim *sim, enum sim_end end);
void sim_daemon_count(struct sim *sim); /* metrics into cover */
/* Has a drive been made to lie since it was new? */
bool sim_drives_may_lie(const struct sim *sim);

/* sim_hbm.c */
struct kvf_hbm_port *sim_hbm_open(void *ctx, uint32_t index);

/* sim_step.c */
void sim_step(struct sim *sim);

/* sim_client.c */
void sim_client_spawn(struct sim *sim, struct sim_client *client);
void sim_client_poll(struct sim *sim, struct sim_client *client);
void sim_client_detach(struct sim *sim, struct sim_client *client);
void sim_client_take(struct sim *sim, struct sim_client *client, uint32_t max);
void sim_client_sleep(struct sim *sim, struct sim_client *client);
void sim_lease_release(struct sim *sim, struct sim_client *client, struct sim_lease *lease);
/* Release what has been held long enough. all: everything. */
void sim_lease_release_due(struct sim *sim, struct sim_client *client, bool all);
/* Judge one lease now. False: it has been lost. */
bool sim_lease_check(struct sim *sim, struct sim_client *client, struct sim_lease *lease);
const struct sim_piece *sim_piece_find(const struct sim *sim, uint32_t id);
void sim_pieces_forget(struct sim *sim);
bool sim_client_is_stalled(const struct sim *sim, const struct sim_client *client);

/* sim_request.c */
void sim_request_put(struct sim *sim, struct sim_client *client);
void sim_request_read(struct sim *sim, struct sim_client *client, uint8_t opcode);
void sim_request_plain(struct sim *sim, struct sim_client *client, uint8_t opcode);
void sim_request_cancel(struct sim *sim, struct sim_client *client);
void sim_request_scribble(struct sim *sim, struct sim_client *client);
/* Room for a submission without keys? */
bool sim_request_has_room(struct sim *sim, struct sim_client *client, uint32_t n_entries,
                          uint32_t credits);
/* sim_judge.c */
/* Judge the completions that have come since the last call. */
void sim_judge(struct sim *sim, struct sim_client *client);
/* Requests that should have ended by now? */
void sim_judge_deadlines(struct sim *sim, struct sim_client *client);
/* What looked wrong in this turn, now that all of it is known. */
void sim_judge_suspect(struct sim *sim);
void sim_stage_free(struct sim_client *client, uint32_t offset);

/* sim_hostile.c */
void sim_hostile_act(struct sim *sim, struct sim_client *client);
void sim_hostile_handshake(struct sim *sim, struct sim_client *client);

/* sim_model.c */
struct sim_block *sim_block(struct sim *sim, uint32_t ns, uint32_t chain, uint32_t chunk,
                            uint32_t shard);
const uint8_t *sim_block_key_id(struct sim *sim, struct sim_block *block);
struct kvf_key sim_key(uint32_t chain, uint32_t chunk, uint8_t bytes_out[KVF_KEY_BYTES_MAX]);
uint32_t sim_payload_bytes(const struct sim *sim, const struct sim_block *block, uint32_t version);
void sim_payload_fill(const struct sim *sim, const struct sim_block *block, uint32_t version,
                      uint8_t *payload_out);
bool sim_payload_is(const struct sim *sim, const struct sim_block *block, uint32_t version,
                    const uint8_t *payload);
/* Which version begins like this; SIM_VERSIONS: none. */
uint32_t sim_payload_version(const struct sim *sim, const struct sim_block *block,
                             const uint8_t *payload, uint64_t payload_bytes);
void sim_model_put_begin(struct sim_block *block, uint32_t version);
void sim_model_put_end(struct sim *sim, struct sim_client *client,
                       const struct sim_request *request, uint32_t index, int status);
void sim_model_hit(struct sim *sim, struct sim_block *block, uint32_t version);
void sim_model_zombie(struct sim *sim, struct sim_block *block, uint32_t version);
void sim_model_gone(struct sim *sim, struct sim_block *block);
/* Any block may have gone with a GPU's worker. */
void sim_model_gone_all(struct sim *sim);
/* The same for all shards of a chunk. */
void sim_model_gone_set(struct sim *sim, uint32_t ns, uint32_t chain, uint32_t chunk);
/* May the block be there, for somebody who looked at `since_turn` or later? */
bool sim_model_may_exist(const struct sim *sim, const struct sim_block *block, uint64_t since_turn);
void sim_model_purge(struct sim *sim, uint32_t ns);
void sim_model_purged(struct sim *sim, uint32_t ns, bool is_recorded);
void sim_model_restart(struct sim *sim, bool is_reformatted);
void sim_describe(const struct sim *sim, const struct sim_block *block, char *text_out,
                  size_t bytes);

/* sim_audit.c */
void sim_audit_turn(struct sim *sim);
void sim_audit(struct sim *sim);
void sim_audit_empty(struct sim *sim);
/* Look for flights whose block has just been forgotten. */
void sim_audit_abandoned(struct sim *sim);

/* sim_durable.c: between the daemon's last turn and its first one. */
struct sim_durable;
struct sim_durable *sim_durable_remember(struct sim *sim, enum sim_end end, bool is_clean);
void sim_durable_inspect(struct sim *sim, struct sim_durable *durable);
void sim_durable_check(struct sim *sim, struct sim_durable *durable);
void sim_durable_free(struct sim_durable *durable);
/* Has a durable block been forgotten before its time? */
void sim_durable_audit(struct sim *sim);

#endif /* KVF_TESTS_SIM_H */
