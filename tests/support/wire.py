# SPDX-License-Identifier: Apache-2.0
"""A wire of our own between network namespaces, which can be told to be bad.

Each end is a TUN device in its namespace; what one side sends is read here and written to the
one that has the address. It works where the kernel has no netem, sees every packet, and nothing of
it is left when the process ends. In between, packets can be

    delayed    each by so many seconds, in order
    held       none goes on until they are let go: a stall
    dropped    a partition, of which nobody is told
    cut        TCP connections with payload on their way are reset at both ends: whatever was being
               sent arrives in part
    judged     each by a function that its owner gives: as a network policy does it

Needs root, ip(8) and /dev/net/tun. make() says whether it can be had here.
"""
import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import threading
import time

TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
CLONE_NEWNET = 0x40000000
MTU = 16000
TCP = 6
FIN, RST, ACK = 1, 4, 16


def ip(*arguments):
    """Run ip. False: it cannot."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset_of(packet):
    """The packet with a reset in the place of its payload; None: it has none, or is no TCP."""
    head = (packet[0] & 15) * 4
    if packet[0] >> 4 != 4 or packet[9] != TCP or len(packet) < head + 20:
        return None
    tcp_head = (packet[head + 12] >> 4) * 4
    if len(packet) == head + tcp_head or packet[head + 13] & (FIN | RST):
        return None
    source, sink = packet[12:16], packet[16:20]
    tcp = bytearray(packet[head:head + 20])
    tcp[12] = 5 << 4
    tcp[13] = RST | ACK
    tcp[16:20] = b"\0\0\0\0"
    tcp[16:18] = struct.pack("!H", checksum(source + sink + struct.pack("!BBH", 0, TCP, 20)
                                            + bytes(tcp)))
    out = bytearray(packet[:20])
    out[0] = 0x45
    out[2:4] = struct.pack("!H", 40)
    out[10:12] = b"\0\0"
    out[10:12] = struct.pack("!H", checksum(bytes(out)))
    return bytes(out + tcp)


def swapped(packet):
    """A reset as the other end would have sent it: ports, addresses and numbers the other way."""
    out = bytearray(packet)
    out[12:16], out[16:20] = packet[16:20], packet[12:16]
    out[20:22], out[22:24] = packet[22:24], packet[20:22]
    out[24:28], out[28:32] = packet[28:32], packet[24:28]
    out[36:38] = b"\0\0"
    out[36:38] = struct.pack("!H", checksum(bytes(out[12:20]) + struct.pack("!BBH", 0, TCP, 20)
                                            + bytes(out[20:])))
    return bytes(out)


class Wire:
    """Between namespaces, which it makes. may: of each IPv4 packet, does it go on?"""

    def __init__(self, names, addresses, may=lambda packet: True):
        self.names = names
        self.addresses = addresses
        self.ends = {socket.inet_aton(address): end for end, address in enumerate(addresses)}
        self.may = may
        self.fds = []
        self.lock = threading.Lock()
        self.mode = "pass"
        self.delay_s = 0.0
        self.cuts_left = 0
        self.queue = []  # (when, number, end, packet)
        self.number = 0
        self.packets = self.bytes = 0
        self.waker = os.pipe()
        self.is_over = False
        self.thread = None

    def make(self):
        """False: not here."""
        if not all(ip("netns", "add", name) for name in self.names):
            return False
        done = []
        maker = threading.Thread(target=lambda: done.append(self._open_ends()))
        maker.start()  # a thread of its own: it ends in another namespace
        maker.join()
        if done != [True]:
            return False
        for name, address in zip(self.names, self.addresses):
            if not (ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                    and ip("-n", name, "link", "set", "wire", "mtu", str(MTU), "up")
                    and ip("-n", name, "link", "set", "lo", "up")):
                return False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return True

    def _open_ends(self):
        libc = ctypes.CDLL(None, use_errno=True)
        for name in self.names:
            try:
                space = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
                if libc.setns(space, CLONE_NEWNET) != 0:
                    return False
                os.close(space)
                fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN_NO_PI))
            except OSError:
                return False
            self.fds.append(fd)
        return True

    def drop(self):
        """Take it down."""
        self.is_over = True
        os.write(self.waker[1], b".")
        if self.thread is not None:
            self.thread.join()
        for fd in self.fds:
            os.close(fd)
        for name in self.names:
            ip("netns", "del", name)

    # --- what it does from now on -------------------------------------------------------------

    def _set(self, mode, delay_s=0.0, cuts=0):
        with self.lock:
            self.mode = mode
            self.delay_s = delay_s
            self.cuts_left = cuts
        os.write(self.waker[1], b".")

    def mend(self):
        """Everything goes on, also what was held."""
        self._set("pass")

    def delay(self, seconds):
        self._set("pass", delay_s=seconds)

    def hold(self):
        self._set("hold")

    def part(self):
        self._set("drop")

    def cut(self, connections):
        """Reset the next so many connections on which payload is seen."""
        self._set("pass", cuts=connections)

    # --- the thread ---------------------------------------------------------------------------

    def _take(self, end):
        try:
            packet = os.read(self.fds[end], 65536)
        except BlockingIOError:
            return False
        self.packets += 1
        self.bytes += len(packet)
        sink = self.ends.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if sink is None or not self.may(packet):
            return True  # nobody's, as what IPv6 says to all neighbours
        with self.lock:
            if self.mode == "drop":
                return True
            reset = reset_of(packet) if self.cuts_left > 0 and len(packet) > 1000 else None
            if reset is not None:
                self.cuts_left -= 1
                self._put(end, swapped(reset))
                packet = reset
            self._put(sink, packet)
        return True

    def _put(self, end, packet):
        self.number += 1
        heapq.heappush(self.queue, (time.monotonic() + self.delay_s, self.number, end, packet))

    def _give(self):
        """Write what is due. Returns the seconds until the next, None: nothing waits for time."""
        with self.lock:
            now = time.monotonic()
            while self.queue and self.mode != "hold":
                when, _, end, packet = self.queue[0]
                if when > now:
                    return when - now
                heapq.heappop(self.queue)
                if self.mode != "drop":
                    try:
                        os.write(self.fds[end], packet)
                    except OSError:
                        pass  # the device is down, or full: as on any wire
        return None

    def _run(self):
        while not self.is_over:
            pause = self._give()
            ready, _, _ = select.select([*self.fds, self.waker[0]], [], [], pause)
            if self.waker[0] in ready:
                os.read(self.waker[0], 100)
            for end, fd in enumerate(self.fds):
                for _ in range(64):
                    if fd not in ready or not self._take(end):
                        break
