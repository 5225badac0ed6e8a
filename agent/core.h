/* SPDX-License-Identifier: Apache-2.0
 *
 * core.h: the inside of the daemon, shared by its own files only.
 *
 *   loop.c       descriptors, timers, order of work          the reactor's one thread
 *   session.c    one attached client: handshake, rings       \
 *   lease.c      what clients hold                             \  all state here is owned by
 *   request*.c   submissions to completions                     > the reactor; nobody else
 *   place*.c     tiers: fill, load, write, evict, recover      /  reads or writes it
 *   hbm.c        blocks in device memory: up, down, lost      /
 *   peer*.c      daemons of other nodes (peers.h)             /
 *   admit.c      which blocks go to the drives                /
 *   observe.c    prompts, for replays and recordings          /
 *   room.c       what is forgotten to make room              /
 *   namespace.c  names, tenants, quotas                      /
 *   offence.c    who broke the protocol lately              /
 *   key_name.c   names of blocks                            /
 *   answer.c     the admin thread's questions               /
 *   reload.c     calibration.dir, read again                /
 *   service.c    namespaces out of service                  /
 *   predecessor.c  what clients of the daemon before map   /
 *
 * A flight is one record on its way: from staging into a slot (FILL), from a drive or a GPU into a
 * slot (LOAD), or from a slot to a drive (WRITE) or a GPU (PROMOTE). An op is one block of one
 * request that has to wait for a flight.
 *
 *   session -> request -> op -> flight -> entry -> slot, location
 */
#ifndef KVF_AGENT_CORE_H
#define KVF_AGENT_CORE_H

#include <stdatomic.h>

#include "agent/agent.h"
#include "agent/gpu_host.h"
#include "agent/index.h"
#include "agent/offence.h"
#include "agent/start.h"
#include "base/env.h"
#include "base/log.h"
#include "base/owner.h"
#include "base/pool.h"
#include "base/ring.h"
#include "codec/codec.h"
#include "tiers/io.h"
#include "tiers/tier_dram.h"
#include "tiers/tier_hbm.h"
#include "tiers/tier_nvme.h"
#include "tiers/work.h"
#include "transport/proto.h"
#include "transport/seqpacket.h"
#include "transport/shm_ring.h"

enum kvf_core_limits {
    /* Reserved for each client that may attach, and the most that it can have: nobody lives on what
     * is another's. A request whose next key finds no op or flight waits for one. */
    KVF_REQUESTS_A_CLIENT = 256,
    KVF_OPS_A_CLIENT = 512,      /* blocks that wait */
    KVF_FLIGHTS_A_CLIENT = 512,  /* blocks on their way */
    KVF_PINS_A_CLIENT = 2048,    /* blocks that are leased */
    KVF_WRITES_MAX = 8192,       /* blocks on their way to drives */
    KVF_TURN_ENTRIES = 16,       /* submissions of one client a turn */
    KVF_TURN_KEYS = 64,          /* keys of one client a turn */
    KVF_TURN_BYTES = 4 << 20,    /* bytes put by one client a turn */
    KVF_GHOST_ENTRIES = 1 << 18, /* blocks remembered for second sight */
    KVF_GHOST_WAYS = 16,         /* of these in a set */
    KVF_KEY_NAMES = 1 << 12,     /* keys whose key_id is remembered */
    KVF_PROMOTES_MAX = 16,       /* blocks on their way into one GPU's memory */
    KVF_DEMOTES_MAX = 16,        /* and back, to make room there */
    KVF_HBM_DEVICES_MAX = 16,
    KVF_TENANTS_MAX = KVF_CONFIG_SOCKETS_MAX,
    KVF_DRIVES_MAX = KVF_CONFIG_NVME_MAX,
    KVF_CONTROLS_MAX = 64, /* admin questions waiting */
    KVF_ACCEPTS_A_TURN = 8,
    KVF_SESSIONS_TO_REFUSE = 8,   /* connections beyond clients.max that may say HELLO */
    KVF_INCOMPLETE_MAX = 1 << 16, /* incomplete sets watched for set_timeout */
};

struct kvf_session;
struct kvf_request;
struct kvf_flight;
struct kvf_peers;

/* What a descriptor in the poll set belongs to. */
enum kvf_source_kind {
    KVF_SOURCE_LISTENER = 1,
    KVF_SOURCE_SESSION_SOCKET = 2,
    KVF_SOURCE_SESSION_EVENTFD = 3,
    KVF_SOURCE_WAKER = 4,
    KVF_SOURCE_GPU_SOCKET = 5,
    KVF_SOURCE_GPU_EXIT = 6,
};

struct kvf_fd_source {
    uint8_t kind; /* enum kvf_source_kind */
    void *owner;
};

struct kvf_listener {
    struct kvf_fd_source source;
    struct kvf_seqpacket_listener listener;
    uint16_t tenant;
    const struct kvf_config_socket *config;
};

struct kvf_tenant {
    const char *name; /* in the config */
    uint64_t id;      /* hashed into key_id */
    uint64_t dram_bytes;
    uint64_t leased_bytes;
    uint64_t hbm_leased_bytes;
    uint64_t writeback_bytes; /* pinned until they are on a drive */
};

struct kvf_namespace {
    uint64_t id; /* 0: unused */
    uint16_t tenant;
    uint16_t shard_count;
    bool is_known; /* a client has attached; else only found on a drive */
    bool is_lossless;
    bool is_off; /* out of service: service.c */
    uint32_t clients;
    uint64_t blocks;
    uint64_t dram_bytes;
    uint64_t writeback_bytes; /* pinned until they are on a drive */
    uint64_t nvme_bytes;
    uint64_t gpu_ns;        /* reported by its clients since the start ... */
    uint64_t gpu_decode_ns; /* ... and of it for decoding */
    char label[KVF_WIRE_NAME_BYTES];
    char profile[KVF_PROFILE_NAME_BYTES];
};

/* ----------------------------------------------------------------------------------------------
 * Requests
 */
enum kvf_op_want {
    KVF_WANT_LEASE = 1,   /* get: lease the block for the client */
    KVF_WANT_STORED = 2,  /* put: READY is enough */
    KVF_WANT_DURABLE = 3, /* put: on a drive */
    KVF_WANT_LOADED = 4,  /* lookup that waits: in memory */
    KVF_WANT_RELOAD = 5,  /* put: in memory again, and then on a drive with a sync */
};

struct kvf_op {
    struct kvf_request *request;
    struct kvf_op *next;         /* among the flight's waiters */
    struct kvf_op *request_next; /* among the request's waiting ops */
    struct kvf_op **request_link;
    struct kvf_flight *flight;
    uint32_t index; /* key position */
    uint8_t want;   /* enum kvf_op_want */
    uint8_t tier;   /* enum kvf_tier_kind where it was found */
    bool supersedes;
    bool is_joined;   /* put: waits for another put of the same block to end */
    bool is_compared; /* put: with payload_crc32c, when the block's sum is known */
    uint32_t payload_crc32c;
    uint8_t superseded_key_id[32];
};

struct kvf_request {
    struct kvf_session *session;
    struct kvf_request *next; /* among the session's */
    struct kvf_request **link;
    struct kvf_op *ops; /* waiting */
    struct kvf_shm_sqe sqe;
    uint64_t accepted_ns;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    uint32_t next_key;    /* keys before it have been started */
    uint32_t waiting;     /* ops in flight */
    uint32_t succeeded;
    int32_t first_failure;
    uint32_t first_failed_index;
    bool is_started; /* all keys have been started */
    bool is_canceled;
    bool is_expired;
    bool run_ended;  /* lookup: a key was not there */
    uint32_t cut_at; /* lookup: first chunk that is not in memory and not waited for */
    uint32_t run, ready, coming;
    uint32_t tail; /* 1 + index of the tail that extends the run, 0: none */
    uint64_t lease;
    uint8_t chain_key_id[32]; /* put: of the chunk before next_key */
    bool has_chain_key;
};

/* ----------------------------------------------------------------------------------------------
 * Flights
 */
enum kvf_flight_kind {
    KVF_FLIGHT_FILL = 1,
    KVF_FLIGHT_LOAD = 2,
    KVF_FLIGHT_WRITE = 3,
    KVF_FLIGHT_PROMOTE = 4,
};

struct kvf_flight {
    uint8_t kind; /* enum kvf_flight_kind */
    bool is_started;
    bool is_abandoned; /* the entry has been forgotten; only the slot and its number are left */
    bool is_durable;
    bool is_unsummed; /* FILL: payload_crc32c is for the worker to find out */
    uint8_t priority;
    struct kvf_agent *agent;
    struct kvf_session *session; /* FILL: holds a reference, staging is being read */
    kvf_cookie cookie;
    kvf_location slot;
    kvf_location hbm_slot;   /* PROMOTE: where it goes; LOAD from a GPU: pinned there; else none */
    struct kvf_drive *from;  /* LOAD */
    void *owner;             /* PROMOTE: struct kvf_hbm_device */
    bool is_demotion;        /* LOAD: nobody asked for it but the GPU's tier */
    struct kvf_flight *twin; /* the other flight of the same forgotten entry, or NULL */
    uint16_t tenant;
    const void *source; /* FILL: payload in staging */
    void *record;       /* the slot's memory */
    uint64_t record_bytes;
    uint32_t payload_crc32c;
    uint32_t ttl_s;
    int32_t status;
    uint64_t created_ns;
    uint64_t started_ns;   /* handed to its tier or worker */
    uint64_t ahead_bytes;  /* LOAD: that were being read when it started */
    uint64_t fetch_end_ns; /* LOAD from peers: the last of them is given up then; 0: none failed */
    uint64_t asked_links;  /* LOAD from peers: bits of those that have failed */
    struct kvf_session *payer; /* whose share it counts against, or NULL */
    uint64_t payer_id;         /* connection_id of the payer */
    struct kvf_op *waiters;
    struct kvf_flight *next; /* in the queue of loads or writes */
    struct kvf_work work;
    struct kvf_tier_io io;
};

struct kvf_flight_queue {
    struct kvf_flight *head, *tail;
    uint32_t count;
    uint64_t bytes;
};

/* What the index has no room for, by slot number. */
struct kvf_slot_side {
    uint32_t generation; /* high half of the slot's location */
    uint32_t writer;     /* flight that writes the slot to a drive, KVF_INDEX_NONE */
    uint32_t expires_s;  /* agent seconds, 0: never */
    kvf_cookie cookie;   /* whose slot it is */
};

/* ----------------------------------------------------------------------------------------------
 * Sessions and leases
 */
struct kvf_pin {
    kvf_location slot;
    uint64_t bytes;
    uint32_t order;  /* lookup: chunk number, for trimming */
    uint32_t device; /* 1 + GPU whose memory it is; 0: DRAM */
    struct kvf_pin *next;
};

struct kvf_lease {
    uint64_t generation;
    uint64_t created_ns;
    struct kvf_pin *pins;
    uint64_t bytes;
    uint32_t newer, older; /* list by age, KVF_INDEX_NONE at the ends */
    uint8_t state;         /* enum kvf_shm_lease_state */
};

/* What a client knows of one piece of its GPU's memory. */
struct kvf_device_piece {
    uint32_t sent; /* id, 0: none */
    bool is_mapped;
};

enum kvf_session_state {
    KVF_SESSION_FREE = 0,
    KVF_SESSION_HELLO = 1,     /* connected, HELLO awaited */
    KVF_SESSION_PREPARING = 2, /* a worker makes its memory */
    KVF_SESSION_MAPPING = 3,   /* WELCOME sent, MAPPED awaited */
    KVF_SESSION_SEALING = 4,   /* MAPPED received: a worker seals and fills its memory */
    KVF_SESSION_READY = 5,
    KVF_SESSION_DEAD = 6, /* disconnected; jobs still read its staging */
};

struct kvf_session {
    struct kvf_fd_source socket_source;
    struct kvf_fd_source eventfd_source;
    struct kvf_agent *agent;
    uint8_t state; /* enum kvf_session_state */
    bool wants_wake;
    bool is_draining;
    bool is_broken;   /* to be ended at the next safe place */
    bool is_writing;  /* the socket is full: watched for room */
    bool owes_ready;  /* READY has not been sent yet */
    bool owes_device; /* pieces of its GPU's memory have not */
    int fd;
    int eventfd;
    int ring_fd;
    int staging_fd;
    uint16_t tenant;
    uint16_t namespace_index;
    uint16_t shard;
    uint16_t shard_count;
    uint16_t version;
    uint64_t connection_id;
    uint64_t charged_bytes; /* against staging.total */
    void *ring_map;
    uint64_t ring_bytes;
    uint8_t *staging_map;
    uint64_t staging_bytes;
    uint64_t present_bytes; /* of both, when they were made */
    uint32_t lease_capacity;
    uint32_t credits;
    struct kvf_shm_header layout; /* private copy: what the segment says is never read */
    struct kvf_ring_daemon ring;
    struct kvf_shm_key *keys; /* of the active request, KVF_SHM_REQUEST_ENTRIES_MAX of them */
    struct kvf_codec_plan plan;
    struct kvf_request *requests; /* in flight */
    struct kvf_request *active;   /* the one whose keys are being started */
    struct kvf_lease *leases;     /* lease_capacity of them */
    uint32_t lease_free;
    uint32_t lease_oldest, lease_newest;
    uint64_t leased_bytes;
    uint64_t hbm_leased_bytes;
    uint32_t device; /* 1 + GPU whose pieces it wants; 0: none */
    struct kvf_device_piece *device_pieces;
    char device_uuid[KVF_WIRE_UUID_BYTES]; /* as it has said */
    uint32_t n_device_pieces;
    uint32_t jobs; /* flights and work that read this session's memory */
    uint32_t requests_count, ops_count, flights, pins_count; /* of its shares */
    uint32_t *announce; /* ring of piece ids not sent yet; with the top bit: dropped */
    uint32_t announce_head, announce_tail;
    struct kvf_work work;
    int32_t work_status;
    uint64_t attached_ns;
    uint64_t hello_deadline_ns;
    uint64_t held_until_ns; /* an offender's: its socket is not looked at before; 0: it is */
    uint64_t puts, gets, hits, misses, lost_leases;
    uint64_t *observed; /* names of the active lookup, while somebody wants them */
    uint32_t n_observed;
    uint32_t observed_count; /* the last prompt: its chunks, its last name, when */
    uint64_t observed_last, observed_ns;
    kvf_location *touched; /* hits of the active request, for touching tail first */
    uint32_t n_touched;
    int32_t pid;
    uint32_t uid;
    uint64_t peer; /* the process, 0: it cannot be told from others */
    char name[KVF_WIRE_NAME_BYTES];
    char profile[KVF_PROFILE_NAME_BYTES];      /* in force */
    bool is_replaced;                          /* "exact" instead of the one asked for */
    char profile_text[KVF_WIRE_TEXT_BYTES];    /* where it comes from, or "" */
    const struct kvf_calibration *calibration; /* plan is of its table; NULL: of the build */
    struct kvf_calibrations *calibrations;     /* held while there is one */
    uint8_t gpu_path;  /* enum kvf_gpu_path; 0: it has said nothing, or has no worker */
    bool is_gpu_asked; /* a channel to a worker has been given out */
    char gpu_uuid[48];
    struct kvf_wire_hello hello;
};

/* ----------------------------------------------------------------------------------------------
 * Admission to the drives
 */
struct kvf_bucket {
    uint64_t rate_bytes_s; /* 0: no limit */
    int64_t capacity_bytes;
    int64_t tokens_bytes; /* below 0 after durable puts */
    uint64_t updated_ns;
};

struct kvf_drive {
    struct kvf_tier *tier;
    struct kvf_tier
        *store; /* the nvme tier itself; tier may be a fault or delay wrapped around it */
    const struct kvf_config_nvme *config;
    struct kvf_agent *agent;
    struct kvf_bucket bucket;
    struct kvf_flight_queue loads;  /* waiting for a slot or prefetch.inflight */
    struct kvf_flight_queue writes; /* waiting for the tier */
    uint32_t loads_inflight;
    bool is_off;              /* a load has been told so: what only the tier holds is gone */
    bool is_full;             /* the tier answered busy; ask again when something has completed */
    uint64_t read_ns_per_mib; /* moving averages, for estimates */
    uint64_t read_latency_ns;
    uint64_t last_read_ns;
    uint64_t reading_bytes;
    char why[192];
};

/* One GPU's memory as a place for blocks. source is what loads know: its tier and queue. */
struct kvf_hbm_device {
    struct kvf_drive source;
    struct kvf_tier *slots;
    uint32_t promotes, demotes;
    uint64_t bytes;
};

/* What the index has no room for, by the number of an entry; all zero: nothing. */
struct kvf_hbm_place {
    kvf_location slot;  /* in the GPU's memory; 0: none */
    uint32_t promotion; /* 1 + its flight; 0: none */
    uint8_t device;     /* of slot */
    uint8_t hits;       /* in DRAM, by clients of a GPU */
    uint16_t reserved;
};
static_assert(sizeof(struct kvf_hbm_place) == 16, "counted in docs and --check");

struct kvf_incomplete {
    kvf_cookie cookie; /* of the set entry */
    uint32_t created_s;
    uint32_t serial; /* as in the set entry's nvme_low */
};

/* A key that came lately, and its key_id. */
struct kvf_key_name {
    _Alignas(64) uint64_t namespace_id;
    uint16_t tenant;
    uint16_t key_bytes; /* 0: none */
    uint8_t key_id[32];
    _Alignas(64) uint8_t key[64];
};

struct kvf_verify; /* in answer.c */

/* The running evict or purge of a namespace, one at a time. */
struct kvf_sweep {
    struct kvf_control *control; /* NULL: none */
    uint32_t cursor, end;        /* entries; end 0: all have been looked at */
    uint32_t waiting;            /* purge: drives that have not confirmed */
    int32_t status;
};

/* Out of service: service.c. */
#define KVF_SERVICE_OFF_MAX 64

struct kvf_service {
    bool is_all_off;
    uint32_t n_off;
    uint64_t off[KVF_SERVICE_OFF_MAX]; /* ids of namespaces, attached or not */
};

/* The daemon before this one, as far as its clients have not left it: predecessor.c. */
struct kvf_predecessor {
    bool is_over;   /* nobody maps its memory, or it has been waited for long enough */
    bool has_first; /* the arena's first area, for which it was not waited */
    bool is_said;   /* in the log */
};

/* ----------------------------------------------------------------------------------------------
 * The agent. Owner of everything: the reactor, but for what is marked otherwise.
 */
struct kvf_agent {
    const struct kvf_config *config;
    struct kvf_env env;
    struct kvf_agent_ports ports; /* open_drive NULL: the system's */
    struct kvf_owner owner;
    uint64_t incarnation;
    uint64_t started_ns;
    uint64_t now_ns; /* of this turn */
    uint8_t id_key[32];

    _Atomic bool is_ready;     /* any thread reads */
    _Atomic bool stop_asked;   /* any thread sets */
    _Atomic bool reload_asked; /* any thread sets */
    struct kvf_start start;
    bool is_draining;
    uint64_t drain_deadline_ns;

    int epoll_fd;
    int waker_fd;
    int reserve_fd; /* given up to accept and refuse when descriptors run out */
    struct kvf_fd_source waker_source;
    _Atomic bool is_sleeping; /* wakers skip the system call while the reactor is awake */
    uint32_t n_listeners;
    struct kvf_listener listeners[KVF_CONFIG_SOCKETS_MAX];

    uint32_t n_tenants;
    struct kvf_tenant tenants[KVF_TENANTS_MAX];
    uint16_t tenant_of_socket[KVF_CONFIG_SOCKETS_MAX];
    struct kvf_namespace *namespaces; /* KVF_INDEX_NAMESPACES_MAX */

    struct kvf_index index;
    struct kvf_slot_side *sides;
    uint64_t n_sides;
    uint64_t expiry_cursor;
    uint32_t ttl_slots; /* slots with a time to live */

    struct kvf_work_queue *work;
    struct kvf_work_queue *setup; /* for memory that comes and goes with clients: work that can be
                                     long, and that no request waits behind */
    struct kvf_work_queue *names; /* looks names of nodes up, which nothing else waits behind; NULL:
                                     there are none */
    struct kvf_tier *dram_store;
    struct kvf_tier *dram; /* dram_store, or a fault tier around it */
    uint32_t n_drives;
    struct kvf_drive drives[KVF_DRIVES_MAX];

    struct kvf_peers *peers; /* NULL: none are configured */
    uint32_t n_hbm;
    struct kvf_hbm_device *hbm;                /* n_hbm; NULL: off */
    struct kvf_hbm_place *hbm_places;          /* by entry; NULL: off */
    bool hbm_news;                             /* a piece has gone: clients are to be told */
    uint32_t outline[KVF_BLOCK_OUTLINE_WORDS]; /* scratch: of a record that is promoted */

    struct kvf_pool requests;
    struct kvf_pool ops;
    struct kvf_pool flights;
    struct kvf_pool pins;
    uint32_t writes; /* flights to drives, waiting ones included */
    uint64_t writeback_bytes;
    uint64_t writeback_max_bytes;

    struct kvf_observer *observer;     /* observe.c */
    uint32_t *ghosts;                  /* KVF_GHOST_ENTRIES tags */
    struct kvf_key_name *key_names;    /* KVF_KEY_NAMES places */
    struct kvf_incomplete *incomplete; /* ring */
    uint32_t incomplete_head, incomplete_tail;
    uint32_t watch_serial;
    uint32_t hand;        /* of the clock over the index, room.c */
    uint64_t pressure_ns; /* when memory was last taken from a block */

    struct kvf_gpu_host *gpu_host;         /* NULL: no device is configured */
    struct kvf_calibrations *calibrations; /* held; NULL: no folder */
    struct kvf_reload *reload;             /* the one that runs */
    struct kvf_service service;
    struct kvf_predecessor predecessor;
    struct kvf_session *sessions; /* sessions_capacity of them */
    uint32_t sessions_capacity;
    uint32_t sessions_count;
    uint32_t sessions_high; /* no session in use from here on */
    uint32_t session_turn;  /* where the next round robin begins */
    uint64_t staging_used_bytes;
    uint64_t next_connection_id;
    struct kvf_offenders offenders;
    uint64_t arena_bytes;
    uint64_t leased_bytes;

    struct kvf_metrics metrics;
    struct kvf_record_page page; /* scratch: a put's record page while it is judged */
    uint64_t polled_ns;          /* when descriptors were last looked at */
    uint64_t busy_ns;            /* when there was last something to do */
    uint64_t gap_ns;             /* moving average of the time between */
    uint64_t second_ns;
    struct kvf_log_limit protocol_log;
    struct kvf_log_limit session_log;

    pthread_mutex_t control_lock; /* protects controls; nothing else is taken under it */
    struct kvf_control *controls[KVF_CONTROLS_MAX];
    _Atomic uint32_t n_controls;
    bool is_closed;            /* under control_lock: no more questions */
    struct kvf_verify *verify; /* the running verify, one at a time */
    struct kvf_sweep sweep;
};

/* Seconds since create, from 1. */
static inline uint32_t kvf_agent_second(const struct kvf_agent *agent)
{
    return (uint32_t)((agent->now_ns - agent->started_ns) / KVF_NS_PER_S) + 1;
}

/* The place of an entry, NULL without GPUs. */
static inline struct kvf_hbm_place *kvf_hbm_place(const struct kvf_agent *agent,
                                                  const struct kvf_entry *entry)
{
    return agent->hbm_places != NULL ? &agent->hbm_places[kvf_index_cookie(&agent->index, entry)]
                                     : NULL;
}

/* Is the block in some GPU's memory, also while it comes from there into DRAM? */
static inline bool kvf_entry_in_hbm(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return agent->hbm_places != NULL && kvf_hbm_place(agent, entry)->slot != 0;
}

/* Is a READY block in DRAM being copied to a GPU? */
static inline bool kvf_hbm_is_promoted(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return agent->hbm_places != NULL && kvf_hbm_place(agent, entry)->promotion != 0;
}

/* loop.c */
void kvf_agent_wake(void *agent); /* any thread: the reactor looks at its queues again */
int kvf_loop_add(struct kvf_agent *agent, int fd, uint32_t events, struct kvf_fd_source *source);
void kvf_loop_change(struct kvf_agent *agent, int fd, uint32_t events,
                     struct kvf_fd_source *source);
void kvf_loop_remove(struct kvf_agent *agent, int fd);

/* namespace.c */
uint64_t kvf_namespace_id(const struct kvf_agent *agent, uint16_t tenant,
                          const struct kvf_wire_hello *hello, const struct kvf_codec_plan *plan);
/* The slot of this namespace, made if it is new. KVF_OK; KVF_ERR_BUSY: the table is full. */
int kvf_namespace_get(struct kvf_agent *agent, uint64_t id, uint16_t shard_count,
                      uint16_t *index_out);

/* The same for a client of a tenant, which has a quota of them. KVF_ERR_REFUSED: it is used up. */
int kvf_namespace_join(struct kvf_agent *agent, uint16_t tenant, uint64_t id, uint16_t shard_count,
                       uint16_t *index_out);

/* attach_profile.c */
/* Make the plan of a client that has said HELLO. KVF_OK: text is "", or says where the profile
 * comes from; else it says why the client is refused. */
int kvf_attach_profile(struct kvf_session *session, char *text, size_t bytes);
/* Why a client that speaks these versions, and none of ours, is refused, and what cures that. */
void kvf_attach_say_version(uint16_t lowest, uint16_t highest, char *text, size_t bytes);

/* session.c */
void kvf_session_accept(struct kvf_agent *agent, struct kvf_listener *listener);
/* Answer "busy" and why to one that has just connected, and close it. Any thread. */
void kvf_session_refuse_socket(int fd, const char *text);
/* Serve a connected socket of a process (0: not known). KVF_OK; KVF_ERR_BUSY: no room, or the
 * process has offended and enough of its sockets wait already; the descriptor is closed then. */
int kvf_session_adopt(struct kvf_agent *agent, uint16_t tenant, int fd, uint64_t peer);
/* An offender has waited: its socket is looked at from now on. */
void kvf_session_unhold(struct kvf_session *session);
void kvf_session_socket_ready(struct kvf_session *session, uint32_t events);
/* Disconnect: give up leases, end requests. why: NULL for an ordinary hang-up. */
void kvf_session_end(struct kvf_session *session, const char *why);
/* End and free a session when no worker runs any more. */
void kvf_session_destroy(struct kvf_session *session);
/* A job that used the session's memory is over. */
void kvf_session_job_done(struct kvf_session *session);
void kvf_session_piece_added(struct kvf_agent *agent, uint32_t piece_id);
void kvf_session_piece_dropped(struct kvf_agent *agent, uint32_t piece_id);
/* Private memory of an attached client whose ring has so many entries, beside its struct. */
uint64_t kvf_session_table_bytes(uint32_t ring_entries);
/* Send what a full socket has kept back. */
void kvf_session_flush(struct kvf_session *session);
/* Twice a second. */
void kvf_session_tick(struct kvf_session *session);
void kvf_session_wake(struct kvf_session *session);
void kvf_session_say_bye(struct kvf_session *session, int status);

/* lease.c */
int kvf_lease_table_init(struct kvf_session *session, uint32_t capacity);
void kvf_lease_table_fini(struct kvf_session *session);
/* A new lease without pins. KVF_OK; KVF_ERR_BUSY. */
int kvf_lease_begin(struct kvf_session *session, uint64_t *lease_out);
/* Pin one slot under a lease. KVF_OK; KVF_ERR_BUSY: a share of the arena is used up;
 * KVF_ERR_LOST: the lease is. */
int kvf_lease_add(struct kvf_session *session, uint64_t lease, kvf_location slot,
                  uint64_t record_bytes, uint32_t order);
/* The same for a slot of GPU number `device`, whose shares are those of its memory. */
int kvf_lease_add_hbm(struct kvf_session *session, uint64_t lease, uint32_t device,
                      kvf_location slot, uint64_t record_bytes, uint32_t order);
/* Drop the pins of chunks from `order` on. */
void kvf_lease_trim(struct kvf_session *session, uint64_t lease, uint32_t order);
/* Make the word say LIVE; before this the client knows nothing of the lease. False: it is lost. */
bool kvf_lease_publish(struct kvf_session *session, uint64_t lease);
/* The client's release. False: no such lease. */
bool kvf_lease_end(struct kvf_session *session, uint64_t lease);
/* Free all leases of a session that is gone. */
void kvf_lease_end_all(struct kvf_session *session);
/* Publish LOST, then unpin, for all leases of a session. */
void kvf_lease_lose_all(struct kvf_session *session);
/* The same for leases that pin this slot, in all sessions. */
void kvf_lease_lose_slot(struct kvf_agent *agent, kvf_location slot);
/* The same for a slot of a GPU, or, for KVF_LOCATION_NONE, for all of them. */
void kvf_lease_lose_hbm(struct kvf_agent *agent, uint32_t device, kvf_location slot);
/* Oldest lease's age; 0 without leases. */
uint64_t kvf_lease_oldest_age_ns(const struct kvf_session *session);

/* request.c */
/* Serve one client's ring for one turn. True: there is more to do. */
bool kvf_request_turn(struct kvf_session *session);
/* A flight that the op waited for is over. entry: READY, or NULL for a failure. */
void kvf_request_op_done(struct kvf_op *op, int status, struct kvf_entry *entry);
/* End every request of a dead session without completions. */
void kvf_request_drop_all(struct kvf_session *session);
/* End requests whose budget is over. */
void kvf_request_expire(struct kvf_session *session);
/* When the next budget of this session ends, UINT64_MAX: none. */
uint64_t kvf_request_deadline_ns(const struct kvf_session *session);

/* request_put.c, request_read.c: start the key at request->next_key. */
void kvf_request_start_put(struct kvf_request *request, const struct kvf_shm_key *key);
void kvf_request_start_get(struct kvf_request *request, const struct kvf_shm_key *key);
void kvf_request_start_lookup(struct kvf_request *request, const struct kvf_shm_key *key);
void kvf_request_start_prefetch(struct kvf_request *request, const struct kvf_shm_key *key);
void kvf_request_start_evict(struct kvf_request *request, const struct kvf_shm_key *key);
/* A fill or write that a put waited for is over. True: the op waits for the write now; false: the
 * block has been completed. */
bool kvf_request_put_done(struct kvf_op *op, int status, struct kvf_entry *entry);
/* lookup: all keys have been started, or what it waited for has ended. */
void kvf_request_settle_lookup(struct kvf_request *request);

/* key_name.c */
void kvf_request_key_id(const struct kvf_session *session, const struct kvf_shm_key *key,
                        uint8_t key_id_out[32]);

/* Helpers of request*.c */
/* Complete one block of a request. */
void kvf_request_block(struct kvf_request *request, uint32_t index, int status, uint8_t tier);
/* Complete one block with a leased record. */
void kvf_request_block_hit(struct kvf_request *request, uint32_t index, uint8_t tier,
                           struct kvf_entry *entry);
/* The same with a record in the memory of the client's GPU. False: no lease to be had. */
bool kvf_request_block_hit_hbm(struct kvf_request *request, uint32_t index,
                               struct kvf_entry *entry);
/* Wait for a flight. KVF_OK; KVF_ERR_BUSY. */
int kvf_request_wait(struct kvf_request *request, uint32_t index, enum kvf_op_want want,
                     uint8_t tier, struct kvf_flight *flight, struct kvf_op **op_out);
/* place_open.c */
int kvf_place_open(struct kvf_agent *agent);
/* Wait for workers; nothing is completed any more. */
void kvf_place_stop(struct kvf_agent *agent);
void kvf_place_close(struct kvf_agent *agent);

/* place.c */
kvf_location kvf_place_slot(const struct kvf_agent *agent, const struct kvf_entry *entry);
/* The flight of an entry that is FILLING or LOADING. */
struct kvf_flight *kvf_place_flight(struct kvf_agent *agent, const struct kvf_entry *entry);
/* The running or queued write of a READY entry, or NULL. */
struct kvf_flight *kvf_place_writer(struct kvf_agent *agent, const struct kvf_entry *entry);
/* The entry that speaks for a set: the set entry, or the only block. NULL: nothing of it is
 * here. */
struct kvf_entry *kvf_place_set(struct kvf_agent *agent, const uint8_t key_id[32],
                                uint16_t shard_count);
bool kvf_place_set_is_whole(const struct kvf_agent *agent, const struct kvf_entry *set);
/* One more shard of a set is READY. KVF_OK; KVF_ERR_BUSY: the index has no room for the set's
 * entry. */
int kvf_place_set_add(struct kvf_agent *agent, struct kvf_entry *entry, uint16_t shard_count);
/* One less. */
void kvf_place_set_subtract(struct kvf_agent *agent, struct kvf_entry *entry);
/* A READY entry gives up its slot, or its record; the entry itself stays. */
void kvf_place_leave_dram(struct kvf_agent *agent, struct kvf_entry *entry);
void kvf_place_leave_drive(struct kvf_agent *agent, struct kvf_entry *entry, bool drop);
/* Forget a block and the set it belongs to, on all tiers. Leased memory stays until released. */
void kvf_place_forget_set(struct kvf_agent *agent, struct kvf_entry *entry);
void kvf_place_forget_block(struct kvf_agent *agent, struct kvf_entry *entry);
/* Begin a put: reserve a slot, make the entry, copy on a worker. The record page in agent->page has
 * been judged and named. KVF_OK: *flight_out is on its way; KVF_ERR_BUSY, _TOO_LARGE, _REFUSED
 * (quota). */
int kvf_place_fill(struct kvf_request *request, const struct kvf_shm_key *key,
                   const uint8_t key_id[32], struct kvf_flight **flight_out);
/* Begin to bring a READY entry that is not in DRAM there; session NULL: to make room on its GPU.
 * KVF_OK; KVF_ERR_BUSY. */
int kvf_place_load(struct kvf_agent *agent, struct kvf_entry *entry, struct kvf_session *session,
                   struct kvf_flight **flight_out);
/* Begin to write a READY entry in memory to a drive. KVF_OK; KVF_ERR_BUSY: the backlog is full;
 * KVF_ERR_TIER_OFF: no drive. */
int kvf_place_write(struct kvf_agent *agent, struct kvf_entry *entry, uint32_t drive, bool durable);
/* The same for another node that has asked: nobody here waits for it. */
int kvf_place_load_for_peer(struct kvf_agent *agent, struct kvf_entry *entry);
/* Begin to fetch a new entry, which has no place, over this link. KVF_OK; KVF_ERR_BUSY. */
int kvf_place_load_remote(struct kvf_agent *agent, struct kvf_entry *entry,
                          struct kvf_session *session, kvf_location link,
                          struct kvf_flight **flight_out);
/* Where a LOADING entry comes from: KVF_TIER_NVME or _REMOTE. */
uint8_t kvf_place_loading_tier(struct kvf_agent *agent, const struct kvf_entry *entry);
/* How long a load of this block would take now; with_queue: behind what is being read. */
uint64_t kvf_place_load_estimate_ns(struct kvf_agent *agent, const struct kvf_entry *entry,
                                    bool with_queue);
/* And a fetch of so many bytes from a peer. */
uint64_t kvf_place_remote_estimate_ns(const struct kvf_agent *agent, uint64_t bytes);
/* Take completions and start what waits. True: something was done. */
bool kvf_place_poll(struct kvf_agent *agent);
uint64_t kvf_place_deadline_ns(const struct kvf_agent *agent);
/* Is nothing on its way to a drive? For draining. */
bool kvf_place_is_quiet(const struct kvf_agent *agent);

/* A flight for an entry; session: on whose behalf, counted against its share; NULL: the agent's
 * own. NULL: none left. */
struct kvf_flight *kvf_place_flight_new(struct kvf_agent *agent, uint8_t kind,
                                        const struct kvf_entry *entry, struct kvf_session *session);
void kvf_place_flight_free(struct kvf_flight *flight);
/* The flight was the last to hold its forgotten entry's number, or its twin is. */
void kvf_place_number_free(struct kvf_flight *flight);

/* hbm.c */
int kvf_hbm_open_all(struct kvf_agent *agent);
/* A GPU more, at its first appearance. port is taken over. Logs its own failures. */
int kvf_hbm_open_device(struct kvf_agent *agent, struct kvf_hbm_port *port);
void kvf_hbm_close_all(struct kvf_agent *agent);
/* Tables beside those of the tiers, for --check. */
uint64_t kvf_hbm_table_bytes(const struct kvf_config *config, uint64_t index_entries);
/* A client of a GPU has hit this block in DRAM. */
void kvf_hbm_consider(struct kvf_session *session, struct kvf_entry *entry);
/* Is the block where this client reads it in place? */
bool kvf_hbm_serves(const struct kvf_session *session, const struct kvf_entry *entry);
/* The same for whoever only plans: the client's GPU, or any for a scheduler. */
bool kvf_hbm_promises(const struct kvf_session *session, const struct kvf_entry *entry);
/* The entry gives its slot in a GPU's memory up; leased memory lives on as long as it is. */
void kvf_hbm_leave(struct kvf_agent *agent, struct kvf_entry *entry);
/* Nothing of the entry is left: its promotion, which is returned (or NULL), ends in vain. */
struct kvf_flight *kvf_hbm_forget(struct kvf_agent *agent, struct kvf_entry *entry);
/* Does nobody read the block in a GPU's memory? True without one. */
bool kvf_hbm_is_idle(const struct kvf_agent *agent, const struct kvf_entry *entry);
/* The client uses this GPU. */
void kvf_hbm_attach(struct kvf_session *session, const char *uuid);
/* It has mapped this piece. False: there is no such piece. */
bool kvf_hbm_mapped(struct kvf_session *session, uint32_t piece_id);
/* Tell all clients, once what went is gone. */
void kvf_hbm_tell(struct kvf_agent *agent);
/* Tell the client of pieces that came and went. KVF_OK; KVF_ERR_BUSY: its socket is full. */
int kvf_hbm_announce(struct kvf_session *session);

/* gpu_hbm.c */
/* Let tiers in device memory know of the workers. */
void kvf_gpu_hbm_listen(struct kvf_agent *agent);

/* room.c */
/* Forget a set if the index has no place for one more entry. */
void kvf_room_for_entry(struct kvf_agent *agent);
/* A new entry as kvf_index_insert, with room made in a full index. NULL: everything is in use. */
struct kvf_entry *kvf_room_insert(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard,
                                  uint32_t namespace_index);
/* Count bytes of memory against the quotas, evicting blocks of the same owner. KVF_OK;
 * KVF_ERR_BUSY: all of its blocks are in use. */
int kvf_room_charge(struct kvf_agent *agent, uint16_t tenant, uint32_t namespace_index,
                    uint64_t bytes);
void kvf_room_uncharge(struct kvf_agent *agent, uint16_t tenant, uint32_t namespace_index,
                       uint64_t bytes);
/* May bytes more of this owner wait for their write? They are pinned, and must leave a part of its
 * quotas to be evicted. */
bool kvf_room_allows_write(const struct kvf_agent *agent, uint32_t namespace_index, uint64_t bytes);
/* Watch the set of a READY block until it is whole. */
void kvf_room_watch_set(struct kvf_agent *agent, const struct kvf_entry *entry);
/* How many are not whole; of thousands an estimate. */
uint64_t kvf_room_count_incomplete(struct kvf_agent *agent);
/* Forget the oldest set that is watched, if it is still incomplete. */
void kvf_room_drop_incomplete(struct kvf_agent *agent);
/* To be called before memory is reserved. */
void kvf_room_before_reserve(struct kvf_agent *agent);
bool kvf_room_is_expired(const struct kvf_agent *agent, const struct kvf_entry *entry);
/* The entry of a name as kvf_index_find, forgetting it if its time to live is over. */
struct kvf_entry *kvf_room_find(struct kvf_agent *agent, const uint8_t key_id[32], uint32_t shard);
/* Twice a second. */
void kvf_room_tick(struct kvf_agent *agent);

/* place_host.c: what tiers ask. */
/* May this block's set be forgotten: nothing of it is pinned or on its way? */
bool kvf_place_may_leave(struct kvf_agent *agent, const struct kvf_entry *entry);
struct kvf_tier_host kvf_place_dram_host(struct kvf_agent *agent);
struct kvf_tier_host kvf_place_drive_host(struct kvf_drive *drive);

/* admit.c */
void kvf_admit_init(struct kvf_drive *drive, uint64_t rate_bytes_s, uint64_t credit_bytes);
/* Shall this block go to a drive, seen now (put or hit)? Sets is_admitted and drive. has_parent:
 * the chunk before it, by key_id. is_durable: it goes there in any case. */
void kvf_admit_decide(struct kvf_agent *agent, struct kvf_entry *entry, bool has_parent,
                      const uint8_t parent_key_id[32], bool is_durable);
/* Write an admitted READY block. */
void kvf_admit_write(struct kvf_agent *agent, struct kvf_entry *entry);
/* Both, for a READY block in memory that has been used again. */
void kvf_admit_consider(struct kvf_agent *agent, struct kvf_entry *entry, bool has_parent,
                        const uint8_t parent_key_id[32]);
void kvf_admit_spend(struct kvf_drive *drive, uint64_t bytes);
/* Of what has been spent, bytes have not been written after all. */
void kvf_admit_refund(struct kvf_drive *drive, uint64_t bytes);
/* Tokens left, for persisting; at least 0. */
uint64_t kvf_admit_credit(struct kvf_drive *drive);
/* Is there budget to keep a record when its segment is reused? */
bool kvf_admit_allows_reinsertion(struct kvf_drive *drive);

/* service.c: is a namespace in service? */
bool kvf_service_has(const struct kvf_agent *agent, uint64_t namespace_id);
/* Take a namespace out of service, or put it back; 0: all. text: what is so now, or why not.
 * KVF_OK; KVF_ERR_BUSY: KVF_SERVICE_OFF_MAX are; KVF_ERR_INVALID: one, where all are. */
int kvf_service_disable(struct kvf_agent *agent, uint64_t namespace_id, char *text, size_t bytes);
int kvf_service_enable(struct kvf_agent *agent, uint64_t namespace_id, char *text, size_t bytes);

/* predecessor.c: make the file that clients of a socket with this mode lock; gid -1: of the
 * daemon's group. What fails is logged. */
void kvf_predecessor_make(const char *socket_path, mode_t mode, int64_t gid);
/* May the arena take so many bytes more? ctx: the agent. As kvf_dram_memory_allows, and not while
 * clients map memory of the daemon before. */
bool kvf_predecessor_allows(void *ctx, uint64_t bytes);

/* reload.c: read calibration.dir again; control: who asked, NULL: nobody waits. */
void kvf_reload_start(struct kvf_agent *agent, struct kvf_control *control);
/* Start one that a signal has asked for. */
void kvf_reload_poll(struct kvf_agent *agent);
/* Nobody is answered any more. */
void kvf_reload_abandon(struct kvf_agent *agent);
/* When no job runs any more. */
void kvf_reload_free(struct kvf_agent *agent);

/* answer.c */
void kvf_answer_poll(struct kvf_agent *agent);
/* Give a question back to its asker, with the status' words where there are no others. Accepts
 * NULL: nobody has asked. */
void kvf_answer_finish(struct kvf_control *control, int status);
/* Answer whatever is left at the end. The work queue must be closed: nothing runs any more. */
void kvf_answer_fail_all(struct kvf_agent *agent);

#endif /* KVF_AGENT_CORE_H */
