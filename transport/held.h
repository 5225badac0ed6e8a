/* SPDX-License-Identifier: Apache-2.0
 *
 * held.h: who still maps memory of a daemon that has ended.
 *
 * Arena and staging live as long as anybody maps them, and a daemon that is killed cannot ask for
 * them back. So each client holds a lock while it maps them, which the kernel takes away with its
 * process, whatever becomes of it: on one byte, its daemon's incarnation, of the file
 * "<socket>.held" beside the daemon's socket. The next daemon looks whether other bytes are locked
 * before it takes as much memory again. Nobody waits for a lock. A client that cannot have one goes
 * without, and a daemon that finds one held for long goes on without looking.
 */
#ifndef KVF_TRANSPORT_HELD_H
#define KVF_TRANSPORT_HELD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Daemon: make the file beside a socket that it listens on, for those who may connect. It stays
 * when the daemon ends. KVF_OK; KVF_ERR_IO: errno says why. */
int kvf_held_make(const char *socket_path, mode_t mode, bool set_gid, gid_t gid);

/* Client: hold memory of this incarnation until the descriptor is closed. -1: there is no such
 * file, or it cannot be locked. */
int kvf_held_lock(const char *socket_path, uint64_t incarnation);

/* Daemon: does anybody hold memory of another incarnation than this one? False: nobody does, or it
 * cannot be told. */
bool kvf_held_by_others(const char *socket_path, uint64_t incarnation);

#endif /* KVF_TRANSPORT_HELD_H */
