/* SPDX-License-Identifier: Apache-2.0
 *
 * failpoint.h: named places where a test makes the product fail, stall or die.
 *
 * They are compiled into every build, so that what is tested is what ships; while nothing is armed
 * each costs one relaxed load. Arm them by kvf_failpoint_arm or by KVFERRY_FAILPOINTS, with a list
 *
 *   name=action[@hit]; ...         "nvme.record_write=kill@37;nvme.footer=error@2"
 *
 *   error        KVF_FAILPOINT answers KVF_ERR_IO
 *   kill         the process sends itself SIGKILL
 *   delay:50ms   KVF_FAILPOINT sleeps on the calling thread, then answers KVF_OK
 *   @2           at the second hit only, counted from arming
 *   @2+          from the second hit on; without @ at every hit
 */
#ifndef KVF_BASE_FAILPOINT_H
#define KVF_BASE_FAILPOINT_H

#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kvf_failpoint {
#define KVF_FAILPOINT_ENTRY(component, event) KVF_FAILPOINT_##component##_##event,
#include "base/failpoint.def"
#undef KVF_FAILPOINT_ENTRY
    KVF_FAILPOINT_COUNT,
};

extern _Atomic bool kvf_failpoints_armed;

/* KVF_OK, or the failure that this place is to have now. Any thread. Blocks only for an armed
 * delay. */
#define KVF_FAILPOINT(name)                                                                        \
    (atomic_load_explicit(&kvf_failpoints_armed, memory_order_relaxed)                             \
         ? kvf_failpoint_hit(KVF_FAILPOINT_##name)                                                 \
         : KVF_OK)

/* For the macro. */
int kvf_failpoint_hit(enum kvf_failpoint point);

/* Arm what spec says and disarm everything else ("" or NULL: everything); counters begin again. A
 * wrong spec changes nothing and is explained in error_out. Only while no other thread can hit one.
 * KVF_OK; KVF_ERR_INVALID. */
int kvf_failpoint_arm(const char *spec, char *error_out, size_t error_bytes);

/* Arm from KVFERRY_FAILPOINTS, if set. As kvf_failpoint_arm. */
int kvf_failpoint_arm_env(char *error_out, size_t error_bytes);

/* Hits of a point since it was armed; 0 for one that is not armed. */
uint64_t kvf_failpoint_hit_count(enum kvf_failpoint point);

#endif /* KVF_BASE_FAILPOINT_H */
