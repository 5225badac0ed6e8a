/* SPDX-License-Identifier: Apache-2.0
 *
 * sweep_calls.h: the calls of a process that a sweep counts and fails, and the page that says which
 * one is next.
 *
 * sweep_calls.c stands in for the C library's functions, both in the test program, for the client
 * library, and preloaded into the real daemon. Each process has a page of its own; the daemon's is
 * a file that KVF_SWEEP_PAGE names and that the test program has mapped as well.
 */
#ifndef KVF_TESTS_FAULT_SWEEP_CALLS_H
#define KVF_TESTS_FAULT_SWEEP_CALLS_H

#include <stdatomic.h>
#include <stdint.h>

#define SWEEP_NAME_BYTES 48

/* What can fail, and as what. */
enum sweep_class {
    SWEEP_NONE = 0,
    SWEEP_ALLOC,  /* malloc and its kin: no memory */
    SWEEP_MAP,    /* mmap, memfd_create, their sizes, rings: no memory, no descriptor, no space */
    SWEEP_FD,     /* open, eventfd, epoll: no descriptor, no memory */
    SWEEP_SOCKET, /* socket calls: no descriptor, refused, reset */
    SWEEP_BUSY,   /* socket calls: full, again, aborted */
    SWEEP_INTERRUPT, /* calls that a signal may interrupt */
    SWEEP_THREAD,    /* pthread_create */
    SWEEP_DRIVE,     /* completions, writes, reads and syncs of the drive */
    SWEEP_CLASSES,
};

struct sweep_page {
    _Atomic uint32_t armed;      /* enum sweep_class: which calls are counted */
    _Atomic int32_t thread_id;   /* of this thread only; 0: of all */
    _Atomic uint64_t target;     /* the one that fails, from 1 */
    _Atomic uint64_t calls;      /* so far */
    _Atomic uint64_t is_hit;     /* it has failed */
    _Atomic int64_t live;        /* allocations not freed, always counted */
    char name[SWEEP_NAME_BYTES]; /* of the call that failed; valid if is_hit */
};

/* Of this process; NULL: nothing is counted. */
extern struct sweep_page *sweep_page;

#endif /* KVF_TESTS_FAULT_SWEEP_CALLS_H */
