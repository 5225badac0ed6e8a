/* SPDX-License-Identifier: Apache-2.0
 *
 * thread.h: what a thread asks of the kernel, which shares the CPUs out.
 *
 * A thread that is woken while others keep all CPUs busy waits until the slice of one of them is
 * over, which most kernels see at their next tick only: some milliseconds. One with shorter slices
 * than theirs need not wait, and gets no more of the CPUs for that (Linux 6.12 and newer).
 *
 * Both are advice for the calling thread. A kernel that does not listen changes nothing else.
 */
#ifndef KVF_BASE_THREAD_H
#define KVF_BASE_THREAD_H

/* For a thread that sleeps a lot and has little to do when it is woken: the shortest slices. */
void kvf_thread_run_soon(void);

/* For work that nobody waits for: a tenth of the weight of others, no preempting of others when it
 * is woken, and the shortest slices, so that others can preempt it. */
void kvf_thread_step_back(void);

#endif /* KVF_BASE_THREAD_H */
