/* SPDX-License-Identifier: Apache-2.0
 *
 * observe.h: what clients look up, for two who want to know:
 *
 *   mode: observe          the daemon answers as an empty one and stores nothing; replays of a
 *                          sample (agent/replay.h) say what stores of some sizes would have hit
 *   kvferry trace record   prompts as times, lengths and hashed names
 *
 * A prompt is the chain of full chunks of a lookup. Names leave here only as hashes under a salt
 * that is made anew for each recording. Replays run as jobs of the background queue, behind a
 * bounded buffer: what finds it full is counted and left out.
 *
 * Owner of everything but a job's part: the reactor.
 */
#ifndef KVF_AGENT_OBSERVE_H
#define KVF_AGENT_OBSERVE_H

#include "agent/core.h"

enum kvf_observe_limits {
    KVF_OBSERVE_SIZES = 6,             /* of stores: 0.25x to 8x of what is configured */
    KVF_OBSERVE_SLOTS = 512,           /* blocks of memory in a sample at 1x, about */
    KVF_OBSERVE_DRIVE_SLOTS = 8192,    /* the same of drives, at most */
    KVF_OBSERVE_WORDS = 1 << 18,       /* that wait for replays, each of two buffers */
    KVF_OBSERVE_TRACE_WORDS = 1 << 18, /* that wait for who records */
    KVF_OBSERVE_TRACE_HEAD = 3,        /* words of a prompt before its hashes */
    KVF_OBSERVE_IDLE_S = 30,           /* a recording that nobody takes from ends */
};

/* A recorded prompt: ns since the agent's start, n hashes | tokens a chunk << 32, namespace id,
 * hashes. */

/* Memory that mode observe takes for its replays, with blocks of the size that needs most; 0 in
 * mode serve. */
uint64_t kvf_observe_bytes(const struct kvf_config *config);

/* KVF_OK; KVF_ERR_NO_MEMORY. */
int kvf_observe_open(struct kvf_agent *agent);
/* When no job runs any more. Accepts an agent without. */
void kvf_observe_close(struct kvf_agent *agent);

/* Does the daemon answer this client as if nothing was here, and keep nothing of what it puts? */
bool kvf_observe_answers_nothing(const struct kvf_session *session);
/* One key of such a client's request, of any kind but put. */
void kvf_observe_answer(struct kvf_request *request, const struct kvf_shm_key *key);
/* A put of such a client: its record is right. */
void kvf_observe_put(struct kvf_request *request, const struct kvf_shm_key *key);

/* A key of a lookup, before it is answered; and when all have been. */
void kvf_observe_key(struct kvf_request *request, const struct kvf_shm_key *key);
void kvf_observe_lookup(struct kvf_request *request);
void kvf_observe_forget(struct kvf_session *session);

/* Whole recorded prompts, as many as control->rows (u64) has room for; begins a recording. */
void kvf_observe_take(struct kvf_agent *agent, struct kvf_control *control);
/* Twice a second. */
void kvf_observe_tick(struct kvf_agent *agent);

#endif /* KVF_AGENT_OBSERVE_H */
