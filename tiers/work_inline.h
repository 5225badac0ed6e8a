/* SPDX-License-Identifier: Apache-2.0
 *
 * work_inline.h: a work queue without threads, for tests and simulations: jobs run on the caller's
 * thread at a moment that is always the same.
 */
#ifndef KVF_TIERS_WORK_INLINE_H
#define KVF_TIERS_WORK_INLINE_H

#include "tiers/work.h"

enum kvf_work_inline_mode {
    KVF_WORK_AT_SUBMIT = 0, /* run inside submit; done inside the next poll */
    KVF_WORK_AT_POLL = 1,   /* run and done inside the next poll, in the order of submit */
};

/* At most max_jobs between submit and done; more: KVF_ERR_BUSY. KVF_OK; KVF_ERR_INVALID,
 * _NO_MEMORY. */
int kvf_work_inline_open(enum kvf_work_inline_mode mode, uint32_t max_jobs,
                         struct kvf_work_queue **queue_out);

#endif /* KVF_TIERS_WORK_INLINE_H */
