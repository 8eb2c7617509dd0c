"""The calls that a CUDA graph of `graph_capture` holds, and how those of two captures differ."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec

Tensor = torch.Tensor


@dataclass(frozen=True)
class Place:
    """A tensor's place in a storage."""

    key: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """Bytes of the storage that it needs."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize if 0 not in self.size else 0

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Call:
    """An operation with its arguments, where tensors are places, and the places of its new results, by their index."""

    run: Callable
    arguments: list
    spec: TreeSpec
    results: tuple[tuple[int, Place], ...]
    name: str
    what: str  # the name and the line that called it

    @property
    def is_collective(self) -> bool:
        return self.name.startswith("c10d.")


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def place_of(tensor: Tensor) -> Place:
    offset, layout = tensor.storage_offset(), (tuple(tensor.shape), tuple(tensor.stride()))
    return Place(key_of(tensor), tensor.dtype, offset, *layout)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def first_difference(first: Any, second: Any) -> str | None:
    """The first call in which two graphs differ, by its kernel, a shape, an argument or memory; None if they are alike.

    Memory of before a capture is told by its address, that of a graph by when the graph first uses it.
    """
    calls = itertools.zip_longest(_described(first), _described(second), fillvalue=("", ["none"]))
    for index, ((a, ours), (b, theirs)) in enumerate(calls):
        for x, y in itertools.zip_longest(ours, theirs, fillvalue="nothing"):
            if x != y:
                return f"call {index}, {a} against {b}: {x} against {y}"
    return None


def _described(graph: Any) -> Iterator[tuple[str, list[str]]]:
    order: dict[int, int] = {}

    def memory(key: int, offset: int) -> str:
        if key in graph.outside:
            return f"address {graph.outside[key][1] + offset:#x}"
        return f"byte {offset} of the graph's memory {order.setdefault(key, len(order))}"

    def text(leaf: Any) -> str:
        if isinstance(leaf, Place):
            if leaf.key in graph.on_host:  # a number, which kernels take by value
                return f"number {graph.on_host[leaf.key]}"
            layout = f"{leaf.dtype} {list(leaf.size)} with strides {list(leaf.stride)}"
            return f"{layout} at {memory(leaf.key, leaf.offset * leaf.dtype.itemsize)}"
        if isinstance(leaf, torch.ScriptObject):
            kind = str(leaf._type())
            return dist.ProcessGroup.unbox(leaf).group_name if "ProcessGroup" in kind else kind
        if isinstance(leaf, ctypes.c_void_p | ctypes.c_ulonglong):
            for key, storage in graph.mine.items():
                if 0 <= (offset := (leaf.value or 0) - storage.data_ptr()) < storage.nbytes():
                    return f"pointer to {memory(key, offset)}"
        value = getattr(leaf, "value", leaf)
        return repr(value) if type(value).__module__ in ("builtins", "torch") else str(type(value))

    for call in graph.calls:
        leaves = [*call.arguments, *(place for _, place in call.results)]
        yield call.what, [call.name, *map(text, leaves)]
