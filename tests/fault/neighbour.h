/* SPDX-License-Identifier: Apache-2.0
 *
 * neighbour.h: a daemon and a well-behaved client that puts and gets all the time on a thread of
 * its own, for tests of what other clients can do to them: never a wrong byte, an error, or an
 * answer after its budget.
 */
#ifndef KVF_TESTS_FAULT_NEIGHBOUR_H
#define KVF_TESTS_FAULT_NEIGHBOUR_H

#include <stdint.h>

#include "tests/support/daemon.h"

extern struct kvf_test_daemon the_daemon;

/* Set-up and teardown of a group of cmocka tests: start both; end both, when all that others were
 * given has come back. */
int neighbour_setup(void **state);
int neighbour_teardown(void **state);

/* It has gone on, without a failure, since this was last asked. */
void assert_nobody_noticed(void);

/* How often the daemon has hung up on somebody so far. */
uint64_t protocol_errors(void);

#endif /* KVF_TESTS_FAULT_NEIGHBOUR_H */
