/* SPDX-License-Identifier: Apache-2.0
 *
 * breaker.h: a client of another node without the library's manners: it says the HELLO and, after
 * READY, the submission that its test gives it.
 */
#ifndef KVF_TESTS_FAULT_BREAKER_H
#define KVF_TESTS_FAULT_BREAKER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "transport/proto.h"
#include "transport/transport_ucx.h"

struct breaker {
    struct kvf_net *opened; /* the test's */
    struct kvf_net *net;    /* the same, the network's thread */
    struct kvf_net_address at;
    struct kvf_wire_hello hello;
    struct {
        struct kvf_shm_sqe sqe;
        struct kvf_shm_key key;
    } submit;
    bool is_up, is_ready, has_greeted, has_submitted;
    _Atomic bool is_down, has_completed;
    char why[256]; /* once it is down */
};

/* A right HELLO, and a submission that does nothing. */
void breaker_init(struct breaker *breaker);

/* The same with a put of a record that is not there. */
void breaker_puts(struct breaker *breaker, uint8_t flags);

/* Connect to a daemon's address (tcp://IPv4:port?key=FILE) and say it all. Is the link still there
 * when the daemon has judged what was said? Closes it. */
bool breaker_is_taken(struct breaker *breaker, const char *address, uint32_t timeout_ms);

#endif /* KVF_TESTS_FAULT_BREAKER_H */
