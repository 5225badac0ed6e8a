/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_daemon.h: a stand-in for kvferryd inside a test process, for tests of libkvferry.
 *
 * It speaks the real protocol through the daemon's ends of transport/, keeps blocks in one arena
 * piece by their whole key, serves one client at a time, and breaks the protocol where a script
 * tells it to. One thread of its own; every function here is for the test's thread.
 */
#ifndef KVF_TESTS_FAKE_DAEMON_H
#define KVF_TESTS_FAKE_DAEMON_H

#include <stdbool.h>
#include <stdint.h>

#include "codec/profile_table.h"
#include "transport/proto.h"

/* What goes wrong while a client attaches. */
enum kvf_fake_fault {
    KVF_FAKE_NONE = 0,
    KVF_FAKE_SILENT,            /* HELLO is never answered */
    KVF_FAKE_WELCOME_MAGIC,     /* wrong magic in WELCOME */
    KVF_FAKE_WELCOME_SHORT,     /* WELCOME without its last byte */
    KVF_FAKE_WELCOME_TWO_FDS,   /* one descriptor is missing */
    KVF_FAKE_WELCOME_FOUR_FDS,  /* one too many */
    KVF_FAKE_WELCOME_TWICE,     /* a second one instead of a piece */
    KVF_FAKE_WELCOME_LOSSY,     /* a lossy profile for one who asked for a lossless one */
    KVF_FAKE_WELCOME_PRINT,     /* another fingerprint than the profile's */
    KVF_FAKE_RING_SMALL,        /* the ring segment is smaller than announced */
    KVF_FAKE_RING_UNSEALED,     /* READY without sealing it */
    KVF_FAKE_STAGING_SMALL,     /* staging is smaller than announced */
    KVF_FAKE_PIECE_SMALL,       /* the piece is smaller than announced */
    KVF_FAKE_PIECE_UNSEALED,    /* the piece could be truncated under its readers */
    KVF_FAKE_PIECE_PIPE,        /* the piece is no memory at all */
    KVF_FAKE_PIECE_TWICE,       /* the same index again */
    KVF_FAKE_READY_EARLY,       /* READY before MAPPED */
    KVF_FAKE_HEADER_MAGIC,      /* in the ring segment */
    KVF_FAKE_HEADER_ENTRIES,    /* a count that is no power of two */
    KVF_FAKE_HEADER_OFFSET,     /* a part behind the end of the segment */
    KVF_FAKE_HEADER_OVERLAP,    /* a part inside another one */
    KVF_FAKE_HEADER_CONNECTION, /* of another connection */
    KVF_FAKE_FAULTS,
};

/* What goes wrong with a profile of a file. */
enum kvf_fake_profile_fault {
    KVF_FAKE_PROFILE_GOOD = 0,
    KVF_FAKE_PROFILE_UNSEALED, /* its memory could be changed under its reader */
    KVF_FAKE_PROFILE_PIPE,     /* it is no memory */
    KVF_FAKE_PROFILE_CORRUPT,  /* a bit is wrong */
    KVF_FAKE_PROFILE_LONG,     /* it says to be longer than its memory */
    KVF_FAKE_PROFILE_TWICE,    /* it comes twice */
    KVF_FAKE_PROFILE_LATE,     /* it comes after WELCOME */
    KVF_FAKE_PROFILE_OTHER,    /* WELCOME names another one */
    KVF_FAKE_PROFILE_PRINT,    /* WELCOME has another fingerprint */
    KVF_FAKE_PROFILE_MISSING,  /* it does not come */
    KVF_FAKE_PROFILE_FAULTS,
};

struct kvf_fake_script {
    const char *socket_path;
    enum kvf_fake_fault fault;
    int refuse_status;                     /* below 0: WELCOME says this and nothing else */
    const char *refuse_text;               /* with it */
    const char *profile;                   /* in force; NULL: the one asked for */
    const struct kvf_profile_table *table; /* not NULL: this one is in force, and sent */
    enum kvf_fake_profile_fault profile_fault;
    const char *welcome_text; /* NULL: "" */
    uint64_t incarnation;     /* 0: 1 */
    uint32_t sq_entries;      /* 0: as asked, as a power of two */
    uint64_t staging_bytes;   /* 0: as asked, or 1 MiB */
    bool is_heartless;        /* the heartbeat never moves */
    /* May change each completion before it is written. Called on the daemon's thread. */
    void (*on_complete)(void *arg, struct kvf_shm_cqe *cqe);
    void *arg;
};

enum kvf_fake_command {
    KVF_FAKE_HOLD,        /* requests are taken but not answered from here on */
    KVF_FAKE_LET_GO,      /* answer what is held and go on */
    KVF_FAKE_LOSE_LEASES, /* publish LOST for every lease, then overwrite the blocks */
    KVF_FAKE_SWAP_PIECE,  /* new blocks go to a new piece; the old one is dropped */
    KVF_FAKE_HANG_UP,     /* close the connection, go on listening */
    KVF_FAKE_BYE,         /* say BYE (drain) and close the connection */
    KVF_FAKE_STOP_TAKING, /* leave submissions in the ring */
    KVF_FAKE_TAKE_AGAIN,
};

struct kvf_fake_facts {
    uint32_t attaches;
    uint32_t violations; /* connections ended because the client broke the protocol */
    uint32_t blocks;
    uint32_t leases; /* live or lost, not yet released */
    uint32_t releases;
    uint32_t cancels;
    uint32_t held; /* requests taken and not answered */
    uint32_t puts; /* requests, not blocks */
    uint32_t byes;
    char violation[128]; /* the last one */
};

struct kvf_fake_daemon;

/* Listens when it returns. Prints why and aborts if it cannot. */
struct kvf_fake_daemon *kvf_fake_daemon_start(const struct kvf_fake_script *script);

/* Vanish as by kill -9: no BYE, and the socket file stays. Accepts NULL. */
void kvf_fake_daemon_stop(struct kvf_fake_daemon *daemon);

/* Have the daemon's thread do something; returns when it is done. */
void kvf_fake_daemon_command(struct kvf_fake_daemon *daemon, enum kvf_fake_command command);

struct kvf_fake_facts kvf_fake_daemon_facts(struct kvf_fake_daemon *daemon);

#endif /* KVF_TESTS_FAKE_DAEMON_H */
