# SPDX-License-Identifier: Apache-2.0
"""network.py: what a cluster's network does, for pods that are ends of a wire (support/wire.py):
names of Services become addresses, and a NetworkPolicy is kept.
"""
import ctypes
import os
import socket
import struct
import threading

TCP, UDP = 6, 17
SYN, ACK = 2, 16
CLONE_NEWNET = 0x40000000
DNS_A = 1
NAME_ERROR = 3


def socket_in(namespace, address, port):
    """A UDP socket in a network namespace, bound."""
    made = []

    def make():  # on a thread of its own: it ends in another namespace
        libc = ctypes.CDLL(None, use_errno=True)
        space = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(space, CLONE_NEWNET) == 0:
            made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            made[0].bind((address, port))
        os.close(space)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


class Names:
    """A name server. names: {"a.b.svc.cluster.local": [address, ...]}, which may change."""

    def __init__(self, namespace, address, names):
        self.names = names
        self.asked = set()
        self.socket = socket_in(namespace, address, 53)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self):
        self.socket.sendto(b"", self.socket.getsockname())
        self.thread.join()
        self.socket.close()

    def _run(self):
        while True:
            query, who = self.socket.recvfrom(4096)
            if not query:
                return  # of close()
            self.socket.sendto(self._answer(query), who)

    def _answer(self, query):
        labels, at = [], 12
        while query[at] != 0:
            labels.append(query[at + 1:at + 1 + query[at]].decode())
            at += 1 + query[at]
        kind, = struct.unpack("!H", query[at + 1:at + 3])
        name = ".".join(labels).lower()
        self.asked.add(name)
        known = self.names.get(name)
        addresses = (known or []) if kind == DNS_A else []
        head = query[:2] + struct.pack("!HHHHH", 0x8580 | (0 if known is not None else NAME_ERROR),
                                       1, len(addresses), 0, 0)
        return head + query[12:at + 5] + b"".join(
            struct.pack("!HHHIH", 0xC00C, DNS_A, 1, 5, 4) + socket.inet_aton(one)
            for one in addresses)


class Policy:
    """Of the wire's packets, those that a NetworkPolicy lets through. pods: {address: (labels of
    the namespace, labels of the pod)}; ports: {name: number} of those that the policy selects."""

    def __init__(self, policy, pods, ports):
        self.spec = policy["spec"]
        self.namespace = {"kubernetes.io/metadata.name": policy["metadata"]["namespace"]}
        self.pods = {socket.inet_aton(address): pod for address, pod in pods.items()}
        self.ports = ports
        self.open = set()      # ways of datagrams, of which answers come back
        self.refused = set()   # (from, to, port)

    def __call__(self, packet):
        head = (packet[0] & 15) * 4
        source, sink = packet[12:16], packet[16:20]
        if packet[9] not in (TCP, UDP):
            return True
        from_port, to_port = struct.unpack("!HH", packet[head:head + 4])
        if packet[9] == TCP:
            if packet[head + 13] & (SYN | ACK) != SYN:
                return True  # of a connection, which has been judged by its first packet
            protocol = "TCP"
        else:
            if (sink, to_port, source, from_port) in self.open:
                return True
            self.open.add((source, from_port, sink, to_port))
            protocol = "UDP"
        if (self._may("egress", "to", source, sink, protocol, to_port)
                and self._may("ingress", "from", sink, source, protocol, to_port)):
            return True
        self.refused.add((socket.inet_ntoa(source), socket.inet_ntoa(sink), to_port))
        return False

    def _may(self, direction, word, mine, other, protocol, port):
        """Does the policy of mine, if it has this one, let this go to or come from other?"""
        if not self._is(mine, self.namespace, self.spec["podSelector"]["matchLabels"]):
            return True
        return any(
            ("ports" not in rule or any(
                one["protocol"] == protocol and self.ports.get(one["port"], one["port"]) == port
                for one in rule["ports"]))
            and (word not in rule or any(self._fits(other, peer) for peer in rule[word]))
            for rule in self.spec[direction])

    def _fits(self, address, peer):
        space = peer.get("namespaceSelector", {"matchLabels": self.namespace})
        return self._is(address, space.get("matchLabels", {}),
                        peer.get("podSelector", {}).get("matchLabels", {}))

    def _is(self, address, space, labels):
        found = self.pods.get(address, ({}, {}))
        return space.items() <= found[0].items() and labels.items() <= found[1].items()
