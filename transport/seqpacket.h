/* SPDX-License-Identifier: Apache-2.0
 *
 * seqpacket.h: Unix SOCK_SEQPACKET sockets: listen, connect, whole messages with descriptors.
 *
 * All sockets are non-blocking and close-on-exec; only kvf_seqpacket_connect can sleep, up to its
 * timeout. Failures put one line (what, where, cure) into text_out, cut to text_bytes.
 */
#ifndef KVF_TRANSPORT_SEQPACKET_H
#define KVF_TRANSPORT_SEQPACKET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVF_SEQPACKET_FDS_MAX 4 /* descriptors in one message of ours */

struct kvf_seqpacket_listener {
    int fd; /* -1: closed */
    char path[108];
    dev_t device; /* of the path's inode, so that close removes only our own */
    ino_t inode;
};

struct kvf_seqpacket_listen_options {
    const char *path;
    mode_t mode; /* permission bits of the socket, 0: 0660 */
    int set_gid; /* nonzero: change its group to gid */
    gid_t gid;
    int backlog; /* 0: 16 */
};

/* Listen at a path. A socket at which nobody accepts is taken over. Two starting daemons cannot
 * both take it: the parent folder is locked meanwhile. KVF_OK; KVF_ERR_BUSY: a live daemon listens
 * there; KVF_ERR_CONFIG: path too long, folder missing, something else lies there, no permission.
 */
int kvf_seqpacket_listen(const struct kvf_seqpacket_listen_options *options,
                         struct kvf_seqpacket_listener *listener_out, char *text_out,
                         size_t text_bytes);

/* Close and remove the path, if it still is our socket. */
void kvf_seqpacket_listener_close(struct kvf_seqpacket_listener *listener);

/* Accept the first connection whose other end is still there; those given up before it are closed.
 * KVF_OK; KVF_EMPTY: none waits, or a number of such have been closed; KVF_ERR_BUSY: out of
 * descriptors. */
int kvf_seqpacket_accept(const struct kvf_seqpacket_listener *listener, int *fd_out);

/* Connect. Blocks up to timeout_ms while the listener's backlog is full; 0: one try, no sleep.
 * KVF_OK; KVF_ERR_NO_DAEMON: nobody listens; KVF_ERR_BUSY: backlog full; KVF_ERR_REFUSED: no
 * permission; KVF_ERR_INVALID: path too long; KVF_ERR_PROTOCOL: a socket of another kind;
 * KVF_ERR_NO_MEMORY. */
int kvf_seqpacket_connect(const char *path, uint32_t timeout_ms, int *fd_out, char *text_out,
                          size_t text_bytes);

/* Send one message with n_fds <= KVF_SEQPACKET_FDS_MAX descriptors. Does not block, raises no
 * SIGPIPE. KVF_OK; KVF_ERR_BUSY: the peer's queue is full; KVF_ERR_DISCONNECTED. */
int kvf_seqpacket_send(int fd, const void *data, size_t bytes, const int *fds, uint32_t n_fds);

/* Send the one byte that means "look at your ring". A full queue is fine: it is readable already.
 */
void kvf_seqpacket_wake(int fd);

struct kvf_seqpacket_message {
    size_t bytes;
    uint32_t n_fds; /* open, close-on-exec, the caller's to close */
    int fds[KVF_SEQPACKET_FDS_MAX];
};

/* Receive one message of at most data_bytes. Does not block. KVF_OK; KVF_EMPTY: none waits;
 * KVF_ERR_DISCONNECTED: hang-up; KVF_ERR_PROTOCOL: too long, or more descriptors than
 * KVF_SEQPACKET_FDS_MAX or than this process can open: all of them are closed. */
int kvf_seqpacket_recv(int fd, void *data_out, size_t data_bytes,
                       struct kvf_seqpacket_message *message_out);

/* Close what came with a message. */
void kvf_seqpacket_message_close(struct kvf_seqpacket_message *message);

#endif /* KVF_TRANSPORT_SEQPACKET_H */
