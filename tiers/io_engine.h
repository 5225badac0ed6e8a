/* SPDX-License-Identifier: Apache-2.0
 *
 * io_engine.h: what the real forms of io.h share: how an I/O is cut into pieces, what a piece's
 * result means, and the form's own way to open.
 *
 * An I/O is cut into pieces of at most write_bytes_max. All results of the kernel, from whichever
 * call, go through kvf_io_piece_step; failpoints io.read, io.write and io.sync sit in
 * kvf_io_piece_fault, which every form asks before it issues a piece.
 */
#ifndef KVF_TIERS_IO_ENGINE_H
#define KVF_TIERS_IO_ENGINE_H

#include "tiers/io.h"

#include <stddef.h>

enum kvf_io_engine_limits {
    KVF_IO_RETRIES_MAX = 100, /* a piece that makes no progress (EAGAIN, EINTR) so often fails */
    KVF_IO_RANGES_MAX = 8192, /* registered memory: 1 TiB in areas of 128 MiB */
    KVF_IO_DEPTH_MAX = 4096,
    KVF_IO_THREADS_MAX = 64,
    KVF_IO_WHY_BYTES = 160,
};

/* kvf_io.private_word */
enum kvf_io_word {
    KVF_IO_WORD_ISSUED = 0, /* bytes already cut off as pieces */
    KVF_IO_WORD_PIECES = 1, /* pieces not finished */
    KVF_IO_WORD_SUBMIT_NS = 2,
};

/* A part of an I/O; offset and bytes say what is left of it. Owner: the I/O thread. */
struct kvf_io_piece {
    struct kvf_io *io;
    uint64_t offset; /* inside the I/O */
    uint64_t bytes;
    uint32_t retries;
    struct kvf_io_piece *next;
};

/* Prepare an I/O at submit. */
void kvf_io_begin(struct kvf_io *io);

/* Is there another piece to issue? A failed I/O issues no more. */
bool kvf_io_has_piece(const struct kvf_io *io);

/* Cut the next piece off. */
void kvf_io_cut_piece(struct kvf_io *io, uint64_t bytes_max, struct kvf_io_piece *piece_out);

/* Where the piece's bytes begin in memory; NULL for a sync, which has none. */
char *kvf_io_piece_buffer(const struct kvf_io_piece *piece);

/* 0, or the errno that an armed failpoint wants this piece to end with instead of being issued. */
int kvf_io_piece_fault(const struct kvf_io_piece *piece);

/* Take the result of a piece: what the system call returns, or a negative errno. True: the piece is
 * finished. False: issue it again for what is left. */
bool kvf_io_piece_step(struct kvf_io_piece *piece, int64_t result);

/* After a finished piece: is the whole I/O finished? Then its latency is set. */
bool kvf_io_piece_finish(struct kvf_io_piece *piece);

/* Has a finished I/O something to check? */
static inline bool kvf_io_wants_check(const struct kvf_io *io)
{
    return io->check != NULL && io->op == KVF_IO_READ && io->status == KVF_OK;
}

/* Forms. config is complete; base has capacity_bytes and is_device already. why_out says why not.
 * KVF_OK; KVF_ERR_UNSUPPORTED; KVF_ERR_NO_MEMORY. */
int kvf_io_uring_open(const struct kvf_io_config *config, bool fixed,
                      struct kvf_io_queue **queue_out, char *why_out, size_t why_bytes);

/* Has a registration of memory been refused so far? Between I/Os only. */
bool kvf_io_uring_register_failed(const struct kvf_io_queue *queue);

int kvf_io_threads_open(const struct kvf_io_config *config, struct kvf_io_queue **queue_out,
                        char *why_out, size_t why_bytes);

#endif /* KVF_TIERS_IO_ENGINE_H */
