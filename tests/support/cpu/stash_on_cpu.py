"""The two Triton kernels of Megatron's paged stash, in torch on a CPU. Each is one call of a CUDA graph.

What they do is written in ``megatron.core.transformer.moe.ops.paged_stash``. All else of the stash is Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graph_capture import one_kernel
from torch import Tensor

# rows that were stashed, and which of them on the host, by this process
stashed: list[int] = []
spilled: list[int] = []


def install() -> None:
    from megatron.core.transformer.moe import paged_stash

    paged_stash.paged_stash_copy_kernel = _Launched(_copy, "HAS_HOST_BUFFER")
    paged_stash.paged_stash_pop_kernel = _Launched(_pop)


def forget() -> None:
    """A new model would be a new process."""
    from megatron.core.transformer.moe.paged_stash import PagedStashManager

    PagedStashManager.STASH_MGR = None
    stashed.clear()
    spilled.clear()


class _Launched:
    """A kernel that is launched as Triton's are, ``kernel[grid](...)``; it reads the page size and further constants."""

    def __init__(self, kernel: Callable, *constants: str) -> None:
        self._kernel, self._constants = kernel, ("PAGE_SIZE", *constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*tensors: Tensor, **constants: Any) -> None:
            self._kernel(*tensors, *(constants[name] for name in self._constants))

        return launch


def _rows(pages: Tensor, size: int, count: int) -> Tensor:
    return (pages[:, None] * size + torch.arange(size)).flatten()[:count]


@one_kernel
def _copy(
    source: Tensor,
    memory: Tensor,
    host_memory: Tensor,
    count: Tensor,
    free: Tensor,
    host_free: Tensor,
    head: Tensor,
    tail: Tensor,
    capacity: Tensor,
    record: Tensor,
    overflow: Tensor,
    any_on_host: Tensor,
    is_on_host: Tensor,
    new_head: Tensor,
    page_size: int,
    has_host: bool,
) -> None:
    new_head.copy_(head)
    if overflow.item():
        return
    needed = -(-count.item() // page_size)
    room = tail - head
    place = next((i for i in range(1 + has_host) if room[i] >= needed), None)
    if place is None:
        overflow.fill_(1)
        is_on_host.fill_(1)
        return
    is_on_host.fill_(place)
    any_on_host.fill_(max(place, any_on_host.item()))
    order = (head[place] + torch.arange(needed)) % capacity[place].clamp(min=1)
    record[:needed] = (free, host_free)[place][order]
    rows = source.reshape(-1, memory.shape[1])[: count.item()]
    (memory, host_memory)[place][_rows(record[:needed], page_size, len(rows))] = rows
    new_head[place] += needed
    stashed.append(len(rows))
    spilled.extend([len(rows)] * place)


@one_kernel
def _pop(
    memory: Tensor,
    host_memory: Tensor,
    target: Tensor,
    count: Tensor,
    record: Tensor,
    is_on_host: Tensor,
    overflow: Tensor,
    free: Tensor,
    host_free: Tensor,
    tail: Tensor,
    capacity: Tensor,
    new_tail: Tensor,
    page_size: int,
) -> None:
    new_tail.copy_(tail)
    place = int(is_on_host)
    if overflow.item() or (place and not capacity[1]):
        return
    needed = -(-count.item() // page_size)
    rows = _rows(record[:needed], page_size, count.item())
    target.view(-1, memory.shape[1])[: len(rows)] = (memory, host_memory)[place][rows]
    order = (tail[place] + torch.arange(needed)) % capacity[place].clamp(min=1)
    (free, host_free)[place][order] = record[:needed]
    new_tail[place] += needed
