# SPDX-License-Identifier: Apache-2.0
"""X and its latents through the library's profiles for them.

A block holds all layers, but X of a layer depends on what the layers below gave back. A block of
the first layers has the bytes that they have in a whole one, so a layer is coded as the last one of
a block that ends with it, those below as they came before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

import xquant
from codec import (CHUNK_TOKENS, ITEM_BYTES, KIND_X, KIND_XG, ROPE_NONE, CodecError, Handle,
                   Library, Shape, Tensor)


class Blocks:
    """Blocks of 1, 2, ... layers of a profile, many at once."""

    def __init__(self, library: Library, profile: str, shape: Shape, n_workers: int) -> None:
        self.pool = ThreadPoolExecutor(n_workers)
        self.width = shape.width
        self.handles: list[SimpleQueue] = []
        self.opened: list[Handle] = []
        try:
            for layer in range(shape.n_layers):
                self.handles.append(SimpleQueue())
                for _ in range(n_workers):
                    handle = Handle(library, profile, replace(shape, n_layers=layer + 1))
                    self.opened.append(handle)
                    self.handles[layer].put(handle)
        except CodecError:
            self.close()
            raise
        self.group = self.opened[0].group

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for handle in self.opened:
            handle.close()
        self.opened = []

    def tensor(self, layers: list[np.ndarray], window: int) -> Tensor:
        return Tensor(tuple(bits[window].ctypes.data for bits in layers), self.group * ITEM_BYTES,
                      self.group, self.width * ITEM_BYTES)

    def _chunk(self, layers: list[np.ndarray], target: np.ndarray, window: int, token: int) -> int:
        handles = self.handles[len(layers) - 1]
        handle = handles.get()
        try:
            source = self.tensor(layers, window)
            size = handle.encode(source, source, token)
            back = self.tensor([target] * len(layers), window)
            handle.decode(size, len(layers) - 1, back, back, token)
            return size
        finally:
            handles.put(handle)

    def last_layer(self, layers: list[np.ndarray], target: np.ndarray) -> int:
        """Code the last of some layers, [window, token, width] bf16 bits each; bytes of a block."""
        n_windows, n_tokens, _ = target.shape
        work = [self.pool.submit(self._chunk, layers, target, window, token)
                for window in range(n_windows) for token in range(0, n_tokens, CHUNK_TOKENS)]
        return max(item.result() for item in work)


class Coded:
    """X of a model through a profile; begin() is as that of xquant.Setting."""

    def __init__(self, library: Library, profile: str, model, n_workers: int) -> None:
        self.is_latent = profile.startswith("xg")
        # what the loop around latents needs: their basis, and where there is nothing to differ from
        option = "-d1" if profile.endswith("-d1") else ""
        self.way = xquant.Setting(f"ref-{'xgcl3' if self.is_latent else 'x4'}{option}", model)
        self.maths = model.maths
        shape = model.shape
        self.width = 2 * self.way.of_kv if self.is_latent else self.way.width
        kind = KIND_XG if self.is_latent else KIND_X
        self.blocks = Blocks(library, profile,
                             Shape(shape.n_layers, 0, 0, ROPE_NONE, kind, self.width), n_workers)
        self.n_layers = shape.n_layers
        self.record_bytes = 0

    def close(self) -> None:
        self.blocks.close()

    def begin(self):
        """For one batch of windows of whole blocks."""
        layers: list[np.ndarray] = []
        below = None

        def through(x):
            layers.append(np.ascontiguousarray(self.maths.to_bf16(x)))
            target = self.maths.room(layers[-1].shape)
            size = self.blocks.last_layer(layers, target)
            if len(layers) == self.n_layers:
                self.record_bytes = size
            return self.maths.from_bf16(target)

        def project(layer: int, x):
            nonlocal below
            x = self.maths.as_bf16(x)
            if not self.is_latent:
                return self.way.products(through(x), layer)
            start = 0 if self.way.is_base(layer) else below
            into, back = self.way.bases[layer][0]
            below = start + through((x - start) @ into) @ back
            return self.way.products(below, layer)

        return project
