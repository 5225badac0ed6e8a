/* SPDX-License-Identifier: Apache-2.0
 *
 * io_engine.c: pieces of I/Os and what their results mean.
 */
#include "tiers/io_engine.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/limits.h"

#include <assert.h>
#include <errno.h>

void kvf_io_begin(struct kvf_io *io)
{
    assert(io->op >= KVF_IO_READ && io->op <= KVF_IO_SYNC && io->done != NULL);
    assert(
        io->op == KVF_IO_SYNC ||
        (io->bytes > 0 && (io->bytes | io->offset | (uintptr_t)io->buffer) % KVF_PAGE_BYTES == 0));
    io->status = KVF_OK;
    io->error = 0;
    io->is_checked = false;
    io->next = NULL;
    io->private_word[KVF_IO_WORD_ISSUED] = 0;
    io->private_word[KVF_IO_WORD_PIECES] = 0;
    io->private_word[KVF_IO_WORD_SUBMIT_NS] = kvf_now_ns();
}

/* A sync is one piece of one byte that is never transferred. */
static uint64_t total_bytes(const struct kvf_io *io)
{
    return io->op == KVF_IO_SYNC ? 1 : io->bytes;
}

bool kvf_io_has_piece(const struct kvf_io *io)
{
    return io->status == KVF_OK && io->private_word[KVF_IO_WORD_ISSUED] < total_bytes(io);
}

void kvf_io_cut_piece(struct kvf_io *io, uint64_t bytes_max, struct kvf_io_piece *piece_out)
{
    uint64_t issued = io->private_word[KVF_IO_WORD_ISSUED];
    uint64_t bytes = total_bytes(io) - issued;

    if (bytes > bytes_max) {
        bytes = bytes_max;
    }
    *piece_out = (struct kvf_io_piece){.io = io, .offset = issued, .bytes = bytes};
    io->private_word[KVF_IO_WORD_ISSUED] += bytes;
    io->private_word[KVF_IO_WORD_PIECES]++;
}

char *kvf_io_piece_buffer(const struct kvf_io_piece *piece)
{
    return piece->io->buffer != NULL ? (char *)piece->io->buffer + piece->offset : NULL;
}

int kvf_io_piece_fault(const struct kvf_io_piece *piece)
{
    int status = KVF_OK;

    switch (piece->io->op) {
    case KVF_IO_READ:
        status = KVF_FAILPOINT(io_read);
        break;
    case KVF_IO_WRITE:
        status = KVF_FAILPOINT(io_write);
        break;
    default:
        status = KVF_FAILPOINT(io_sync);
        break;
    }
    return status == KVF_OK ? 0 : EIO;
}

static bool fail_piece(struct kvf_io_piece *piece, int error)
{
    struct kvf_io *io = piece->io;

    if (io->status == KVF_OK) { /* the first failure is the one that is told */
        io->error = error;
        io->status = error == ENOSPC || error == EDQUOT ? KVF_ERR_NO_SPACE : KVF_ERR_IO;
    }
    return true;
}

/* The piece has made no progress. */
static bool retry_piece(struct kvf_io_piece *piece, int error)
{
    piece->retries++;
    return piece->retries > KVF_IO_RETRIES_MAX ? fail_piece(piece, error) : false;
}

bool kvf_io_piece_step(struct kvf_io_piece *piece, int64_t result)
{
    uint64_t moved;

    if (result == -EAGAIN || result == -EINTR || result == -ECANCELED) {
        /* EAGAIN also surfaces when one request becomes several for the device; ECANCELED when the
         * kernel gave a request up for reasons of its own. Both mean: again. */
        return retry_piece(piece, (int)-result);
    }
    if (result < 0) {
        return fail_piece(piece, (int)-result);
    }
    if (piece->io->op == KVF_IO_SYNC) {
        return true;
    }
    if ((uint64_t)result >= piece->bytes) {
        return true;
    }
    if (result == 0) { /* the file ends here: it has been truncated under us */
        return fail_piece(piece, EIO);
    }
    /* A direct transfer must go on at an aligned offset: what is beyond it is moved twice. */
    moved = (uint64_t)result & ~(uint64_t)(KVF_PAGE_BYTES - 1);
    if (moved == 0) {
        return retry_piece(piece, EIO);
    }
    piece->offset += moved;
    piece->bytes -= moved;
    piece->retries = 0;
    return false;
}

bool kvf_io_piece_finish(struct kvf_io_piece *piece)
{
    struct kvf_io *io = piece->io;

    assert(io->private_word[KVF_IO_WORD_PIECES] > 0);
    io->private_word[KVF_IO_WORD_PIECES]--;
    if (io->private_word[KVF_IO_WORD_PIECES] > 0 || kvf_io_has_piece(io)) {
        return false;
    }
    io->latency_ns = kvf_now_ns() - io->private_word[KVF_IO_WORD_SUBMIT_NS];
    return true;
}
