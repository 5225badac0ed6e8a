/* SPDX-License-Identifier: Apache-2.0
 *
 * client_internal.h: what the files of libkvferry share.
 *
 *   kvf_client                         lives from kvf_open to kvf_close
 *     +- session                       one connection: attaching or live; NULL between two
 *     |    +- ring                     our end of the rings
 *     |    +- staging, area            memory for puts and who has it
 *     |    +- pieces                   the arena, read-only
 *     |    +- leases                   what we know of each lease of this connection
 *     +- lost                          connections that broke while the caller still held leases or
 *     |                                slots of theirs
 *     +- requests, groups              what is in flight, at most `credits` events in all
 *     +- pending                       events that came while a blocking call waited for others
 *
 * A connection that breaks becomes a lost session. Its pointers stay readable: an arena piece stays
 * mapped until its last lease is released, but no longer than 10 s; then private zero pages take
 * the place of the shared memory (the daemon's successor needs it), and the address range goes when
 * the lease does. Its leases all answer KVF_ERR_LOST. The same holds for a piece that the daemon
 * drops while it is leased, and for staging slots that the caller holds.
 *
 * Public handles of leases and slots carry the session's epoch, so that one of a lost session is
 * never taken for one of its successor.
 *
 * Owner of everything: the thread that is inside a call on the handle. Nothing here is locked.
 */
#ifndef KVF_CLIENT_INTERNAL_H
#define KVF_CLIENT_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/limits.h"
#include "base/owner.h"
#include "base/random.h"
#include "client/stage_area.h"
#include "client/tunnel.h"
#include "codec/codec.h"
#include "kvferry.h"
#include "transport/proto.h"
#include "transport/shm_ring.h"

/* What libkvferry_gpu of the same version uses as well (libkvferry.map, KVFERRY_PRIVATE). */
#define KVF_PRIVATE KVF_API

enum kvf_client_bounds {
    KVF_CLIENT_LOST_MAX = 16,     /* lost sessions kept; no reconnect beyond */
    KVF_CLIENT_GROUP_BLOCKS = 64, /* blocks tracked by one group */
    KVF_CLIENT_GROUPS_MAX = KVF_REQUEST_KEYS_MAX / KVF_CLIENT_GROUP_BLOCKS,
    KVF_CLIENT_CALL_MS = 10000,     /* blocking calls without a budget of their own */
    KVF_CLIENT_GET_MS = 10000,      /* default budget of a get */
    KVF_CLIENT_PUT_MS = 30000,      /* default budget of a put */
    KVF_CLIENT_GRACE_MS = 1000,     /* a daemon may overrun the budget it was given by so much */
    KVF_CLIENT_BACKOFF_MIN_MS = 10, /* between two tries to connect, doubled each time */
    KVF_CLIENT_BACKOFF_MAX_MS = 2000,
    KVF_CLIENT_TEND_MS = 1,        /* how often a busy handle looks at the socket */
    KVF_CLIENT_SPINS = 400,        /* looks at the ring before sleeping: some 5 us */
    KVF_CLIENT_SPINS_FEW = 20,     /* the same while looking has led to nothing ... */
    KVF_CLIENT_VAIN_MAX = 4,       /* ... so many times; then one long look in ... */
    KVF_CLIENT_VAIN_TRY = 16,      /* ... so many */
    KVF_CLIENT_LOOK_MS = 500,      /* longest sleep without a look at the heartbeat */
    KVF_CLIENT_DRIFT_ONE_IN = 16,  /* conflicts that are looked at */
    KVF_CLIENT_MESSAGES_MAX = 256, /* control messages taken in one go */
};

#define KVF_CLIENT_KEEP_NS  (10 * KVF_NS_PER_S) /* shared memory of a lost session */
#define KVF_CLIENT_STALE_NS (5 * KVF_NS_PER_S)  /* a heartbeat that stands still: suspect ... */
#define KVF_CLIENT_DEAD_NS  (1 * KVF_NS_PER_S)  /* ... and still does so much later: dead */

/* A mapped arena piece. */
struct kvf_client_piece {
    struct kvf_client_piece *next; /* among the dropped ones of its session */
    void *base;
    uint64_t bytes;
    uint64_t drop_ns;  /* when it was dropped */
    uint32_t id;       /* the daemon's number, of this memfd only */
    uint32_t n_leases; /* hits that point into it */
    int fd;            /* of the client's GPU: until it is mapped, by libkvferry_gpu; else -1 */
    bool is_dropped;
    bool is_blank; /* zero pages by now */
};

/* One lease of this connection; the index is that of its word. */
struct kvf_client_lease {
    uint64_t generation;            /* 0: none */
    struct kvf_client_piece *piece; /* NULL: a lease of a lookup */
};

/* A cancel or release that found the submission ring full. */
struct kvf_client_deferred {
    uint64_t arg;
    uint8_t opcode;
};

enum kvf_session_state {
    KVF_SESSION_CONNECT, /* the listener's queue was full: try again */
    KVF_SESSION_HELLO,   /* HELLO is sent */
    KVF_SESSION_PIECES,  /* WELCOME has come, pieces are coming */
    KVF_SESSION_MAPPED,  /* MAPPED is sent */
    KVF_SESSION_LIVE,
    KVF_SESSION_LOST,
};

struct kvf_session {
    struct kvf_session *next; /* among the lost ones */
    enum kvf_session_state state;
    uint16_t epoch; /* not 0 */
    int socket_fd;
    struct kvf_tunnel *tunnel;          /* to a daemon on another node; NULL: it is on this one */
    int wake_fd;                        /* eventfd: wakes the daemon */
    int ring_fd;                        /* only until both are sealed */
    int staging_fd;                     /* likewise */
    int held_fd;                        /* locked while the daemon's memory is mapped; -1 */
    struct kvf_client_profile *profile; /* that came before WELCOME; NULL: none */
    struct kvf_wire_welcome welcome;
    void *ring_base;
    struct kvf_ring_client ring;
    bool is_daemon_waking; /* since the last sleep it was woken */
    uint32_t n_vain;       /* looks at the ring in a row that led to a sleep */
    uint8_t *staging;
    bool is_staging_blank;
    struct kvf_stage_area area;
    uint32_t n_slots;                 /* that the caller holds */
    struct kvf_client_piece **pieces; /* by number modulo KVF_PROTO_PIECES_MAX */
    uint32_t pieces_size;
    uint32_t n_pieces;
    uint64_t arena_bytes;
    struct kvf_client_piece *dropped;       /* still leased */
    struct kvf_client_piece *device_pieces; /* of the client's GPU, dropped ones while in use */
    bool is_device_asked;                   /* the daemon knows of the GPU */
    bool is_device_over;                    /* the GPU handle has been closed */
    struct kvf_client_lease *leases;        /* ring.lease_entries */
    uint32_t n_leases;
    struct kvf_client_deferred *deferred; /* a queue of deferred_size, bounded by what can wait */
    uint32_t deferred_size;
    uint32_t deferred_first;
    uint32_t n_deferred;
    uint64_t deadline_ns; /* attaching: give up then; lost: blank then */
    uint32_t heartbeat;
    uint64_t heartbeat_ns; /* when it last changed */
    uint64_t suspect_ns;   /* when it was first seen to stand still for too long; 0: it was not */
};

/* Where the completions of a blocking call's request go instead of the event queue. */
struct kvf_client_sink {
    void (*on_block)(struct kvf_client_sink *sink, const struct kvf_event *event, uint64_t value);
    void *arg;
    uint32_t first;     /* position of the request's first block in arg */
    bool is_unsummed;   /* put: the records' pages do not know their payload's checksum */
    bool is_used;       /* its request is in flight */
    bool is_done;       /* the rest holds */
    int32_t status;     /* of the request */
    uint32_t succeeded; /* blocks */
    struct kvf_lookup_result lookup;
};

/* What became of 64 blocks of a request. */
struct kvf_client_group {
    uint64_t done;                           /* a bit a block */
    uint32_t slots[KVF_CLIENT_GROUP_BLOCKS]; /* put: first staging page */
    uint32_t next_free;
};

struct kvf_client_request {
    uint64_t id; /* 0: free */
    uint64_t user;
    struct kvf_client_sink *sink; /* NULL: events go to kvf_poll */
    uint32_t n_blocks;
    uint32_t n_done;
    uint32_t n_chain; /* lookup: keys that are not tails */
    uint32_t n_tails;
    uint32_t next_free;
    uint8_t opcode;
    bool takes_device; /* get: hits may lie in the GPU's memory */
    bool is_orphan;    /* nobody waits for it: completions are dropped, their leases released */
    bool is_canceled;
    uint16_t groups[KVF_CLIENT_GROUPS_MAX];
};

/* The daemon's answer to a client that asked for a GPU worker. */
struct kvf_client_channel {
    bool is_answered;
    int status;
    int fd;     /* -1: taken, or none */
    int pid_fd; /* likewise; readable when the worker has ended */
    char text[KVF_WIRE_TEXT_BYTES];
};

/* What kvf_fd gives out and what its readiness depends on; apart from the handle, because kvf_fd
 * takes a const one. */
struct kvf_client_wait {
    int epoll_fd;
    int event_fd; /* readable: there are events that no socket tells of */
    bool is_asked;
    bool is_signaled;
};

struct kvf_client {
    struct kvf_owner owner;

    /* what the caller asked for */
    uint32_t flags;
    char *socket_path;
    struct kvf_wire_hello hello;
    uint8_t weights_digest[KVF_DIGEST_BYTES]; /* that of hello is of factors as well, for latents */
    uint8_t factors_digest[KVF_DIGEST_BYTES];
    struct kvf_geometry geometry;
    bool has_geometry;
    bool is_lossless_asked; /* the daemon may fall back from lossy to lossless, not the other way */
    uint32_t connect_timeout_ms;
    kvf_log_fn log;
    void *log_arg;

    /* the codec, for the profile in force */
    struct kvf_codec_plan plan;
    struct kvf_client_profile *profiles; /* that daemons have sent */
    void *workspace;
    size_t workspace_bytes;

    /* the connection */
    struct kvf_session *session;
    struct kvf_session *lost;
    uint32_t n_lost;
    uint16_t epoch;
    int attach_status; /* why the last try failed */
    uint32_t attach_tries;
    uint64_t attach_next_ns;
    uint32_t reconnects;
    bool was_live;
    bool is_break_unreported;
    uint64_t tend_ns;
    struct kvf_random_seeded jitter;
    struct kvf_client_wait *wait;
    struct kvf_wire_welcome facts; /* of the last live session */

    struct kvf_client_channel channel;

    uint64_t x_refused;                        /* kvf_stat */
    uint64_t reports[KVF_REPORT_KIND_MAX + 1]; /* by kind, not sent yet */
    uint64_t n_conflicts;                      /* of puts of views: kvf_drift_look */

    /* requests in flight */
    struct kvf_client_request *requests;
    uint32_t requests_size;
    uint32_t request_free; /* head of the free list, requests_size: none */
    struct kvf_client_group *groups;
    uint32_t groups_size;
    uint32_t group_free;
    uint64_t request_serial;
    uint32_t credits;        /* of the live session */
    uint32_t credits_in_use; /* of requests in flight */

    /* events for kvf_poll: a queue, and the caller's array while a poll runs */
    struct kvf_event *pending;
    uint32_t pending_size;
    uint32_t pending_first;
    uint32_t n_pending;
    struct kvf_event *out;
    uint32_t out_max;
    uint32_t n_out;

    struct kvf_shm_key *keys; /* scratch: entries of the submission in preparation */
};

/* --- client.c --------------------------------------------------------------------------------- */

/* Begin and end every public call that changes the handle: one thread at a time. */
KVF_PRIVATE void kvf_client_enter(struct kvf_client *client);
KVF_PRIVATE void kvf_client_leave(struct kvf_client *client);

/* One line to the caller's log function. */
KVF_PRIVATE __attribute__((format(printf, 3, 4))) void
kvf_client_log(struct kvf_client *client, int severity, const char *format, ...);

/* --- client_session.c ------------------------------------------------------------------------- */

/* Move the connection along without blocking: connect, attach, take control messages, notice death,
 * flush what was deferred, forget lost memory. Looks at most once a millisecond unless `now`. */
KVF_PRIVATE void kvf_session_tend(struct kvf_client *client, bool now);

KVF_PRIVATE bool kvf_session_is_live(const struct kvf_client *client);

/* The status of a call that finds no live session: KVF_ERR_NO_DAEMON or _DISCONNECTED. */
KVF_PRIVATE int kvf_session_down_status(const struct kvf_client *client);

/* The live session is over: why says so in the log. Completes all that was in flight. */
void kvf_session_break(struct kvf_client *client, int severity, const char *why);

/* Sleep until something may have happened or deadline_ns. */
KVF_PRIVATE void kvf_session_sleep(struct kvf_client *client, uint64_t deadline_ns);

/* Make kvf_fd readable if kvf_poll has something to do, and the daemon wake us if not. */
KVF_PRIVATE void kvf_session_arm(const struct kvf_client *client);

/* Say which GPU this client uses and by which path (enum kvf_gpu_path). With AGENT the answer comes
 * into client->channel. KVF_OK; KVF_ERR_UNSUPPORTED: the daemon is too old; KVF_ERR_BUSY,
 * _DISCONNECTED. */
KVF_PRIVATE int kvf_session_say_gpu(struct kvf_client *client, uint32_t path, const char *uuid);

/* The session of this epoch, live or lost; NULL. */
KVF_PRIVATE struct kvf_session *kvf_session_find(const struct kvf_client *client, uint16_t epoch);

/* The mapped piece of this number, or NULL. */
struct kvf_client_piece *kvf_session_piece(const struct kvf_session *session, uint32_t id);

/* The piece of the GPU's memory of this number, or NULL. */
struct kvf_client_piece *kvf_session_device_piece(const struct kvf_session *session, uint32_t id);

/* Say to the daemon which GPU reads hits in its own memory, once a session; and that a piece of
 * that memory has been mapped. */
KVF_PRIVATE void kvf_session_say_device(struct kvf_session *session, const char *uuid);
KVF_PRIVATE void kvf_session_say_device_mapped(struct kvf_session *session, uint32_t piece_id);

/* After a lease or slot of a lost session or a dropped piece has gone: free what that frees. */
KVF_PRIVATE void kvf_session_trim(struct kvf_client *client, struct kvf_session *session);

/* Close and free everything of all sessions. */
void kvf_session_close_all(struct kvf_client *client);

/* Wake the daemon after a publish that said so. */
void kvf_session_wake_daemon(struct kvf_session *session);

/* --- client_profile.c ------------------------------------------------------------------------- */

/* A profile of a file has come; fd is the caller's to close. KVF_OK; KVF_ERR_PROTOCOL, _NO_MEMORY:
 * text says why. */
int kvf_profile_receive(struct kvf_client *client, struct kvf_session *session,
                        const struct kvf_wire_profile *message, int fd, char *text,
                        size_t text_bytes);

/* Make the plan for the profile in force, and its workspace. KVF_OK; KVF_ERR_MISMATCH, _PROTOCOL,
 * _NO_MEMORY: text says why. */
int kvf_profile_follow(struct kvf_client *client, const struct kvf_session *session,
                       const struct kvf_wire_welcome *welcome, char *text, size_t text_bytes);

/* Nothing refers to them any more. */
void kvf_profiles_free(struct kvf_client *client);

/* --- client_lease.c --------------------------------------------------------------------------- */

/* Note a lease that came with a completion; *handle_out is what the caller gets.
 * KVF_OK; KVF_ERR_PROTOCOL: no such lease can be. */
int kvf_lease_note(struct kvf_session *session, uint64_t id, struct kvf_client_piece *piece,
                   uint64_t *handle_out);

/* Give up a lease by the daemon's id. */
void kvf_lease_give_up(struct kvf_session *session, uint64_t id);

/* Queue a cancel or release, now or when there is room. */
void kvf_lease_send(struct kvf_session *session, uint8_t opcode, uint64_t arg);

/* The same, of what may be said later: false, and nothing is queued. */
bool kvf_lease_send_if_room(struct kvf_session *session, uint8_t opcode, uint64_t arg);

/* This put of a view was refused because something else is stored: measure one in so many. */
void kvf_drift_look(struct kvf_client *client, const struct kvf_put_item *item);

/* Send what has been reported and not sent yet, as far as there is room. */
void kvf_reports_send(struct kvf_client *client);

/* Send what was deferred, as far as there is room. */
void kvf_lease_flush(struct kvf_session *session);

/* --- client_async.c --------------------------------------------------------------------------- */

/* Size tables for a session's credits and ring. Keeps events that wait for kvf_poll. */
int kvf_requests_resize(struct kvf_client *client, uint32_t credits);

/* Take completions: while `max` events fit (a poll), or all (a blocking call). */
KVF_PRIVATE void kvf_requests_drain(struct kvf_client *client, bool all);

/* Complete all that is in flight with KVF_ERR_DISCONNECTED. */
void kvf_requests_fail(struct kvf_client *client);

/* Submit calls with a sink (NULL: events). */
KVF_PRIVATE int kvf_request_put(struct kvf_client *client, const struct kvf_put_item *items,
                                uint32_t n, const struct kvf_put_options *options,
                                struct kvf_client_sink *sink, uint64_t user, uint32_t *taken_out,
                                uint64_t *request_out);
KVF_PRIVATE int kvf_request_keys(struct kvf_client *client, uint8_t opcode,
                                 const struct kvf_key *keys, uint32_t n, struct kvf_shm_sqe *sqe,
                                 struct kvf_client_sink *sink, uint64_t user,
                                 uint64_t *request_out);
int kvf_request_plain(struct kvf_client *client, uint8_t opcode, struct kvf_client_sink *sink,
                      uint64_t *request_out);

/* The submission's fields that options give. False: options are out of range. */
KVF_PRIVATE bool kvf_get_sqe(const struct kvf_client *client, const struct kvf_get_options *options,
                             struct kvf_shm_sqe *sqe);
bool kvf_lookup_sqe(uint32_t n, const struct kvf_lookup_options *options, struct kvf_shm_sqe *sqe);

/* Ask the daemon to end a request early, once; its completions still come. */
KVF_PRIVATE void kvf_request_cancel(struct kvf_client *client, uint64_t request);

/* The caller of a blocking call stops waiting: cancel, drop what still comes. */
KVF_PRIVATE void kvf_request_abandon(struct kvf_client *client, uint64_t request);

/* --- client_codec.c --------------------------------------------------------------------------- */

/* A slot's public handle. */
uint64_t kvf_stage_handle(const struct kvf_session *session, uint32_t page);

/* Slot of a handle in the live session. KVF_OK; KVF_ERR_DISCONNECTED: of a lost session;
 * KVF_ERR_INVALID. */
int kvf_stage_find(struct kvf_client *client, uint64_t stage, uint32_t *page_out);

/* Give a slot of the caller's back, if the handle is one. */
void kvf_stage_give_up(struct kvf_client *client, uint64_t stage);

/* A slot of the caller's holds a record of so many bytes, which somebody else wrote: give the rest
 * of it back. KVF_OK; KVF_ERR_INVALID, _DISCONNECTED, _TOO_LARGE. */
KVF_PRIVATE int kvf_stage_settle(struct kvf_client *client, uint64_t stage, uint32_t record_bytes);

/* Put an item's record into a slot of its own (or find the one it names). KVF_OK: the slot starts
 * at *page_out and holds *record_bytes_out; KVF_ERR_BUSY, _TOO_LARGE, _INVALID, _DISCONNECTED. */
int kvf_stage_item(struct kvf_client *client, const struct kvf_put_item *item, uint32_t *page_out,
                   uint32_t *record_bytes_out);

#endif /* KVF_CLIENT_INTERNAL_H */
