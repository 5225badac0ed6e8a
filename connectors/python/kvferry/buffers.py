# SPDX-License-Identifier: Apache-2.0
"""Memory of others, without a copy: bytes, memoryviews, numpy arrays, torch tensors.

Nothing here imports numpy or torch: what they are known by is what all of them have (shape and
strides) and what one of them has (data_ptr of torch, __array_interface__ of numpy).
"""
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple

from kvferry._abi import ffi


def address(array: Any) -> int:
    """The address of the first element of an array. The memory stays the array's."""
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    if hasattr(array, "__array_interface__"):
        return int(array.__array_interface__["data"][0])
    return int(ffi.cast("uintptr_t", ffi.from_buffer(array)))


def strides_bytes(array: Any) -> Tuple[int, ...]:
    """Bytes from one element to the next along each dimension."""
    if hasattr(array, "data_ptr"):
        return tuple(int(s) * int(array.element_size()) for s in array.stride())
    return tuple(int(s) for s in array.strides)


def is_writable(array: Any) -> bool:
    """Whether an array's memory may be written."""
    if hasattr(array, "__array_interface__"):
        return not array.__array_interface__["data"][1]
    return hasattr(array, "data_ptr") or not memoryview(array).readonly


@dataclass(frozen=True)
class Strides:
    """Where K or V of all layers lies: addresses of layers, and strides as in kvf_tensor_view."""

    layers: Tuple[int, ...]
    page: int
    token: int
    head: int


@dataclass
class Pages:
    """An engine's pages: K and V of every layer, and how many tokens a page has.

    The memory is borrowed: whoever makes this keeps it alive, at its address, for as long as calls
    are given this object. owners holds references for that.
    """

    tokens_a_page: int
    k: Strides
    v: Optional[Strides] = None
    owners: List[Any] = field(default_factory=list)

    @classmethod
    def of(cls, k_layers: Sequence[Any], v_layers: Optional[Sequence[Any]] = None) -> "Pages":
        """Pages of arrays with dimensions (page, token, head, element), one a layer, in whatever
        strides. K and V may be slices of one array; the last dimension must be dense."""
        k_layers = list(k_layers)
        v_layers = list(v_layers) if v_layers is not None else None
        pages = cls(int(k_layers[0].shape[1]), _strides(k_layers))
        pages.owners = [*k_layers, *(v_layers or [])]
        if v_layers is not None:
            pages.v = _strides(v_layers)
        return pages


def _strides(layers: Sequence[Any]) -> Strides:
    first = strides_bytes(layers[0])
    for number, layer in enumerate(layers):
        if len(layer.shape) != 4 or strides_bytes(layer)[:3] != first[:3]:
            raise ValueError(f"layer {number}: not (page, token, head, element) in the strides of "
                             "layer 0")
    return Strides(tuple(address(layer) for layer in layers), *first[:3])


class View:
    """A kvf_kv_view of some pages, with the memory that it points to."""

    def __init__(self, pages: Pages, page_ids: Sequence[int]):
        self._k = ffi.new("void *[]", [ffi.cast("void *", a) for a in pages.k.layers])
        self._table = ffi.new("uint32_t[]", list(page_ids))
        self.c = ffi.new("struct kvf_kv_view *")
        self.c.struct_bytes = ffi.sizeof("struct kvf_kv_view")
        self.c.tokens_a_page = pages.tokens_a_page
        self.c.page_table = self._table
        self._set(self.c.k, pages.k, self._k)
        if pages.v is not None:
            self._v = ffi.new("void *[]", [ffi.cast("void *", a) for a in pages.v.layers])
            self._set(self.c.v, pages.v, self._v)
        self._pages = pages

    @staticmethod
    def _set(tensor: Any, strides: Strides, layers: Any) -> None:
        tensor.layers = layers
        tensor.page_stride_bytes = strides.page
        tensor.token_stride_bytes = strides.token
        tensor.head_stride_bytes = strides.head
