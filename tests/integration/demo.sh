#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# demo.sh BUILD_DIR [DAEMON_ARGUMENT...]: a real daemon and the KV cache of two real models, end to
# end.
#
#   put, in one process -> get from memory, in another -> SIGKILL the daemon -> start it again on
#   the same folder -> get from the drive, in a third
#
# Exits 0 only if every byte that must be equal is, every block is found on the tier it should be
# on, and no lease was lost. Leaves nothing behind.
set -eu

if [ $# -lt 1 ] || [ ! -x "$1/agent/kvferryd" ]; then
    echo "usage: $0 BUILD_DIR [DAEMON_ARGUMENT...] (BUILD_DIR holds agent/kvferryd)" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
shift
data=$(cd "$(dirname "$0")/../data/kv" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/kvferry-demo.XXXXXX")
socket=$work/node/kvferryd.sock
daemon=

end() {
    code=$?
    trap - EXIT
    if [ -n "$daemon" ]; then
        kill -9 "$daemon" 2>/dev/null || true
        wait "$daemon" 2>/dev/null || true
    fi
    if [ "$code" -ne 0 ] && [ "$code" -ne 130 ] && [ -s "$work/daemon.log" ]; then
        echo "The demo failed. The end of the daemon's log:" >&2
        tail -n 40 "$work/daemon.log" >&2
    fi
    rm -rf "$work"
    exit "$code"
}
trap end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# No configuration file: --dir brings 1 GiB of memory, a store of 2 GiB and the sockets; arguments
# can make them smaller.
start_daemon() {
    "$build/agent/kvferryd" --dir "$work/node" --set allow_uncalibrated=true "$@" \
        2>>"$work/daemon.log" &
    daemon=$!
}

step() {
    "$build/tests/integration/kvferry-demo" --socket "$socket" --data "$data" --work "$work" "$@"
}

size="1 GiB of memory, a store of 2 GiB in a folder of its own"
if [ $# -gt 0 ]; then
    size="with $*"
fi
cat <<END
kvferryd runs without a configuration file: $size.
Profile "exact" gives every bit back. "balanced" keeps 4 bits of K and V; by default it is
refused for models that have not been calibrated. No calibration is done here, so the daemon is
started with allow_uncalibrated=true and the clients ask for it too: the figures below show what
that costs.

END

start_daemon "$@"
step put
step --tier dram get
kill -9 "$daemon"
wait "$daemon" 2>/dev/null || true
echo "-- daemon killed with SIGKILL and started again on the same folder --"
started=$(date +%s%N)
start_daemon "$@"
step --tier nvme --started "$started" get

kill -TERM "$daemon"
if ! wait "$daemon"; then
    daemon=
    echo "kvferryd did not end well at SIGTERM" >&2
    exit 1
fi
daemon=

cat <<'END'

Put, get from memory and get from the drive ran in three processes. All "exact" rows are the
originals bit by bit; all rows decode to the same bytes before and after the restart.
  block      tokens of a block, and how many blocks hold the 256 tokens; the first 4 stay raw
  stored     what was put: payloads, and a page of 4 KiB a block
  cosine     over all elements of K, of V; worst K layer: the lowest of one layer's K
  max rel    largest |x - y| / |x|, in L2 norm, of any vector (layer, head, token) of K and V
             (for Qwen2.5 in long blocks: a few tokens of small K, far from the means taken out)
  K noise    squared error over the power of K about its channel means, which is what attention
             sees, of the worst head; 1 is as much noise as signal
  put        encode, copy, write to the drive and wait for it
  get        until the blocks lie in memory that the client can read; decode follows
Qwen2.5 is the hard case for 4-bit K: constants of up to 200 where the signal is about 1. Blocks of
128 tokens or more have them taken out. Blocks of 64 do not, and there a cosine near 1 hides that
the signal of a head is gone, as K noise tells: for such models take long blocks, "safe" or "exact".

Shows: codecs, tiers and recovery, on a CPU. Does not show: speed of an engine, or cost on a GPU.
END
