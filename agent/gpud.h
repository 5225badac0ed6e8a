/* SPDX-License-Identifier: Apache-2.0
 *
 * gpud.h: the inside of a GPU worker (kvferryd-gpu), shared by its own files only.
 *
 *   gpud_main.c     arguments, the device, the end
 *   gpud.c          descriptors, the daemon's messages, turns
 *   gpud_open.c     clients of the daemon, a thread for each while it attaches
 *   gpud_engine.c   one engine: handshake, memory, regions, teardown
 *   gpud_job.c      its puts and gets, handed to kvf_gpu_* over imported addresses
 *
 * An engine has a client handle and a kvf_gpu of its own, so that all of bursts, groups, codecs and
 * their order is what engines have in their own processes; the device and its kernels are shared.
 * What engines say is judged here: a wrong address would break the context for all of them.
 *
 * Owner: the worker's main thread.
 */
#ifndef KVF_AGENT_GPUD_H
#define KVF_AGENT_GPUD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agent/gpud_arena.h"
#include "client/gpu_internal.h"
#include "gpu/import.h"
#include "kvferry.h"
#include "transport/gpu_proto.h"
#include "transport/seqpacket.h"

#define KVF_GPUD_REGION_PAGES_MAX (1u << 24)

struct kvf_gpud;
struct kvf_gpud_arena;

/* Memory of an engine's, opened here. */
struct kvf_gpud_mapped {
    uint32_t number;
    bool is_used;
    uint32_t n_regions; /* that lie in it */
    uint64_t bytes;     /* of addresses */
    uint32_t n_pieces;
    uint32_t next_piece;
    struct kvf_gpu_import import;
};

struct kvf_gpud_pages {
    uint32_t number;
    bool is_used;
    bool is_in[KVF_GPUD_MEMORIES_MAX]; /* memories that it lies in */
    uint32_t tokens_a_page;
    struct kvf_gpu_region *region;
};

/* Names of a block. */
struct kvf_gpud_names {
    uint8_t key[KVF_KEY_BYTES_MAX];
    uint8_t supersedes[KVF_KEY_BYTES_MAX];
};

/* A put or a get. Its items go to kvf_gpu_put as far as there is room, in parts. */
struct kvf_gpud_job {
    struct kvf_gpud_job *next;
    struct kvf_gpud_engine *engine;
    struct kvf_gpud_request request; /* as it came */
    struct kvf_gpu_region *region;
    uint32_t n_got;   /* items that have come */
    uint32_t n_pages; /* of these */
    uint32_t n_taken; /* items handed on, or failed */
    uint32_t n_parts; /* requests of kvf_gpu in flight */
    uint32_t n_encoding;
    uint32_t n_done;
    uint32_t n_good;
    int32_t failed_status; /* of the first block that failed */
    int32_t first_status;  /* of block 0 */
    int32_t free_status;
    bool is_put;
    bool is_freed;
    bool is_canceled;
    bool is_over;            /* its last event has been queued */
    uint64_t waits_since_ns; /* for gpu.rate */
    struct kvf_gpud_part *parts;
    struct kvf_gpu_put_item *puts;
    struct kvf_gpu_get_item *gets;
    struct kvf_gpud_names *names;
    uint32_t *pages;
};

struct kvf_gpud_part {
    struct kvf_gpud_part *next;
    struct kvf_gpud_job *job;
    uint64_t id; /* of kvf_gpu */
    uint32_t first;
};

enum kvf_gpud_state {
    KVF_GPUD_NEW,     /* HELLO awaited */
    KVF_GPUD_OPENING, /* its client is on its way */
    KVF_GPUD_GREETED, /* MAPPED awaited */
    KVF_GPUD_SERVED,
};

/* An engine's client of the daemon, which is made aside: attaching waits for the daemon, and no
 * other engine waits for that. It lives as long as the client, which logs by it. */
struct kvf_gpud_opening {
    struct kvf_gpud_opening *next; /* of those whose engine has gone meanwhile */
    pthread_t thread;
    bool is_done; /* atomic: all of the rest is ours again */
    bool is_joined;
    int wake_fd;
    int status;
    struct kvf_client *client;
    struct kvf_gpud_hello hello;
    char socket_path[KVF_GPUD_PATH_BYTES];
};

struct kvf_gpud_engine {
    struct kvf_gpud *gpud;
    enum kvf_gpud_state state;
    bool is_broken; /* to be ended at the next safe place */
    int fd;
    int flag_fd;
    bool has_handles; /* its memory may come by handles */
    uint64_t connection_id;
    uint64_t greet_ns;    /* for each step of the handshake that is the engine's */
    uint64_t deadline_ns; /* NEW, GREETED: of that step */
    uint64_t scratch_max_bytes;
    uint64_t scratch_bytes; /* of its ring and window */
    uint64_t memory_bytes;  /* of all that it has opened here */
    char socket_path[KVF_GPUD_PATH_BYTES];
    char name[KVF_WIRE_NAME_BYTES];
    uint8_t *flags; /* shared with the engine */
    struct kvf_gpud_opening *opening;
    struct kvf_client *client; /* the opening's */
    struct kvf_gpu *gpu;
    struct kvf_gpud_mapped memories[KVF_GPUD_MEMORIES_MAX];
    struct kvf_gpud_pages regions[KVF_GPUD_REGIONS_MAX];
    struct kvf_gpud_job *jobs; /* in the order in which they came */
    uint32_t n_jobs;
    struct kvf_gpud_job *filling;  /* whose items are coming */
    struct kvf_gpud_event *events; /* to be sent: a ring */
    uint32_t events_size;
    uint32_t events_first;
    uint32_t n_events;
    uint32_t n_untold; /* requests that are over, and their last event is among these */
};

/* What the daemon, or an engine that has gone, has yet to be told: their sockets are full. */
struct kvf_gpud_untold {
    struct kvf_gpud_note notes[2 * KVF_GPUD_ENGINES_MAX];
    uint32_t n_notes;
    int partings[KVF_GPUD_ENGINES_MAX]; /* channels, for GONE */
    uint32_t n_partings;
};

struct kvf_gpud {
    int fd; /* to the daemon */
    int epoll_fd;
    int wake_fd; /* an opening is done */
    struct kvf_gpu_device *device;
    struct kvf_gpud_arena *arena; /* NULL: the daemon has no tier here */
    uint64_t burst_bytes;         /* 0: as the engine likes */
    uint64_t rate_bytes_s;
    int64_t tokens_bytes;
    uint64_t tokens_ns; /* when they were counted */
    uint64_t counted_ns;
    uint64_t device_bytes;  /* of the whole GPU */
    uint64_t scratch_bytes; /* of all engines */
    uint64_t n_steps;       /* of jobs, ever */
    bool is_over;
    int status; /* why, unless the daemon said so */
    struct kvf_gpud_counts counts;
    struct kvf_gpud_untold untold;
    struct kvf_gpud_opening *abandoned; /* whose engine has gone */
    uint32_t n_openings;                /* threads at work */
    struct kvf_gpud_engine *engines[KVF_GPUD_ENGINES_MAX];
};

/* gpud.c */

/* Serve until the daemon says QUIT or hangs up. KVF_OK; KVF_ERR_IO: the GPU has failed. */
int kvf_gpud_run(struct kvf_gpud *gpud);

/* May so many bytes of KV be encoded now? Takes them from the rate. */
bool kvf_gpud_spend(struct kvf_gpud *gpud, uint64_t bytes);

/* Tell the daemon of an engine, now or when its socket has room. */
void kvf_gpud_tell(struct kvf_gpud *gpud, uint64_t connection_id, int status);

/* Say GONE on a channel and close it, now or when it has room. Takes the descriptor. */
void kvf_gpud_part_from(struct kvf_gpud *gpud, int fd);

/* gpud_open.c */

/* Make the client of an engine that has said HELLO. NULL: too many are on their way, or no memory.
 */
struct kvf_gpud_opening *kvf_gpud_opening_new(struct kvf_gpud *gpud, const char *socket_path,
                                              const struct kvf_gpud_hello *hello);

/* Has it ended? status and client say how. */
bool kvf_gpud_opening_is_done(struct kvf_gpud *gpud, struct kvf_gpud_opening *opening);

/* Close the client, when it is there: nobody waits for it. Accepts NULL. Returns NULL. */
struct kvf_gpud_opening *kvf_gpud_opening_drop(struct kvf_gpud *gpud,
                                               struct kvf_gpud_opening *opening);

/* Close clients that nobody waits for. is_last: wait for those that are on their way. */
void kvf_gpud_openings_tend(struct kvf_gpud *gpud, bool is_last);

/* gpud_engine.c */

/* Serve a channel; fd becomes the engine's. NULL: no memory; fd is closed. */
struct kvf_gpud_engine *kvf_gpud_engine_new(struct kvf_gpud *gpud, int fd,
                                            const struct kvf_gpud_attach *attach);

/* Take messages, and go on with what has been waited for. */
void kvf_gpud_engine_receive(struct kvf_gpud_engine *engine);

/* Copies in flight are waited for, memory is unmapped, the daemon told. Returns NULL. */
struct kvf_gpud_engine *kvf_gpud_engine_end(struct kvf_gpud_engine *engine);

/* Tell the engine; one that does not read its channel is ended. */
void kvf_gpud_engine_send(struct kvf_gpud_engine *engine, const void *data, size_t bytes,
                          const int *fds, uint32_t n_fds);
void kvf_gpud_engine_answer(struct kvf_gpud_engine *engine, const struct kvf_gpud_head *to,
                            int status, const char *text);

/* The engine has broken the protocol. */
void kvf_gpud_engine_break(struct kvf_gpud_engine *engine, const char *why);

/* gpud_job.c */
void kvf_gpud_job_begin(struct kvf_gpud_engine *engine, const struct kvf_gpud_request *request);
void kvf_gpud_job_items(struct kvf_gpud_engine *engine, const struct kvf_gpud_items *items);
void kvf_gpud_job_cancel(struct kvf_gpud_engine *engine, uint64_t request);

/* Move jobs along and send events. *is_busy_out: look again soon. KVF_OK; KVF_ERR_IO: the GPU has
 * failed. */
int kvf_gpud_jobs_turn(struct kvf_gpud_engine *engine, bool *is_busy_out);
void kvf_gpud_jobs_free(struct kvf_gpud_engine *engine);

#endif /* KVF_AGENT_GPUD_H */
