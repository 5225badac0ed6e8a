/* SPDX-License-Identifier: Apache-2.0
 *
 * segment.h: memfds that daemon and client share: made and sealed by the daemon
 * (base/fd.h), checked and mapped by the client.
 *
 * Seals. Without SHRINK a holder of the descriptor could truncate the file and kill every reader
 * with SIGBUS; without FUTURE_WRITE it could punch holes, which does the same. A writable mapping
 * made before FUTURE_WRITE stays writable. SEAL keeps the set as it is.
 *
 * All functions: any thread. Failures put what, where and cure into text_out (a line, cut to
 * text_bytes).
 */
#ifndef KVF_TRANSPORT_SEGMENT_H
#define KVF_TRANSPORT_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fcntl.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1; missing from older C library headers */
#endif

/* For kvf_memfd_seal (base/fd.h): arena pieces before they leave the daemon, ring segment and
 * staging when the client has mapped them. */
#define KVF_SEGMENT_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

/* Is fd a memory file of exactly `bytes`, and, if sealed, with the four seals?
 * KVF_OK; KVF_ERR_PROTOCOL. */
int kvf_segment_check(int fd, uint64_t bytes, bool sealed, char *text_out, size_t text_bytes);

/* Map all of it, shared, kept out of core dumps and of forked children. KVF_OK;
 * KVF_ERR_NO_MEMORY. */
int kvf_segment_map(int fd, uint64_t bytes, bool writable, void **base_out, char *text_out,
                    size_t text_bytes);

/* Unmap. Accepts NULL. */
void kvf_segment_unmap(void *base, uint64_t bytes);

/* Put private zero pages in the place of a mapping: pointers into it stay readable (and writable,
 * if it was), the shared memory is given up. KVF_OK; KVF_ERR_NO_MEMORY: the mapping is as it
 * was. */
int kvf_segment_blank(void *base, uint64_t bytes, bool writable);

#endif /* KVF_TRANSPORT_SEGMENT_H */
