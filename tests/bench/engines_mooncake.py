# SPDX-License-Identifier: Apache-2.0
"""Mooncake store's own client, for tests/bench/engines.py: no memory of its own in the pool, which
a mooncake_client process owns (Mooncake's standalone mode), registered buffers, several keys a
call."""
import engines_driver
from mooncake.store import MooncakeDistributedStore

LOCAL_BUFFER_BYTES = 64 << 20


class Store:
    def __init__(self, blocks, address):
        self.blocks = blocks
        self.unit = 1
        self.store = MooncakeDistributedStore()
        status = self.store.setup("127.0.0.1:" + address["port"], "P2PHANDSHAKE", 0,
                                  LOCAL_BUFFER_BYTES, "tcp", "", address["master"])
        if status != 0:
            raise SystemExit(f"Mooncake's client does not start: {status}")
        if self.store.register_buffer(blocks.base, blocks.block * blocks.n) != 0:
            raise SystemExit("Mooncake does not register the buffer")

    def key(self, serial, block):
        return f"{self.blocks.block}-{serial}-{block}"

    def move(self, call, serial, blocks, done):
        keys = [self.key(serial, block) for block in blocks]
        results = call(keys, [self.blocks.address(block) for block in blocks],
                       [self.blocks.block] * len(blocks))
        if any(result != done for result in results):
            raise SystemExit(f"Mooncake: {results}")

    def put(self, serial, blocks):
        self.move(self.store.batch_put_from, serial, blocks, 0)

    def get(self, serial, blocks):
        self.move(self.store.batch_get_into, serial, blocks, self.blocks.block)

    def drop(self, serial, blocks):
        for block in blocks:
            self.store.remove(self.key(serial, block), True)


def main():
    options = engines_driver.arguments()
    blocks = engines_driver.Blocks(options)
    engines_driver.serve(blocks, Store(blocks, options.address))


if __name__ == "__main__":
    main()
