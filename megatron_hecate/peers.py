"""Memory of a rank that its peers can read.

There is one block of it per rank of an NVLink domain. On GPUs it is torch's symmetric memory; on CPUs, POSIX shared
memory. In front lie the counters by which ranks tell each other how far they are (``kernels/signals.cuh``), behind them
the arena.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate import kernel
from megatron_hecate.kernel import FAILURE, Signals
from megatron_hecate.schedule import MAX_RANKS

SHARED: Path = Path("/dev/shm")
COUNTERS: int = 512  # bytes in front of the arena: progress, one u32 per rank, and the blocks' counters
ARRIVED: int = 4 * MAX_RANKS  # where those begin

assert ARRIVED + 4 * kernel.MAX_STEPS <= COUNTERS


class Peers:
    """One block of memory per rank of a domain, all of which this rank sees.

    Args:
        group: the domain; all its ranks call at the same time, with the same size.
        size: bytes of the arena.
        device: where.
        ranks: how the FSSDP group numbers them, in order of their rank in ``group``; as there, if left out.

    Raises:
        RuntimeError: when the ranks cannot see each other's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, size: int, device: torch.device, *, ranks: Sequence[int] | None = None
    ) -> None:
        self.device = device
        self.ranks = tuple(range(group.size())) if ranks is None else tuple(ranks)
        assert len(self.ranks) == group.size()
        self.rank = self.ranks[group.rank()]
        on_gpu = device.type == "cuda"
        whole, bases, self._keep = (_symmetric if on_gpu else _shared)(group, COUNTERS + size, device)
        self._bases = dict(zip(self.ranks, bases, strict=True))
        self.arena: Tensor = whole[COUNTERS:]
        self._whole = whole
        self._record = torch.zeros(FAILURE.itemsize, dtype=torch.uint8, pin_memory=on_gpu)
        self.signals = Signals(
            progress=self._bases[self.rank],
            progress_at=self._bases,
            arrived=self._bases[self.rank] + ARRIVED,
            failure=self._record.data_ptr(),
        )

    def address(self, tensor: Tensor, rank: int) -> int:
        """Where this rank sees, in ``rank``'s memory, what ``tensor`` is in its own."""
        offset = tensor.data_ptr() - self._bases[self.rank]
        assert offset >= COUNTERS and offset + tensor.nbytes <= self._whole.nbytes, "not in the arena"
        return self._bases[rank] + offset

    @property
    def failed(self) -> bool:
        """Whether a peer did not come in time, in any transfer so far."""
        return self.failure is not None

    @property
    def failure(self) -> np.void | None:
        """The `FAILURE` that is on record: readable by the host also after the GPU's context has ended."""
        record = self._record.numpy().view(FAILURE)[0]
        return record if record["failed"] == 1 else None  # 2: being written

    def steps_of(self, peer: int, *, since: int) -> int:
        """Steps that ``peer`` told this rank it has finished ``since`` a count; below 0 when it has not come so far.
        On CPU ranks."""
        told = self._whole[: 4 * len(self.ranks)].numpy().view(np.uint32)[self.signals.number(peer)]
        return signed(int(told) - since)


def signed(count: int) -> int:
    """``count``, known but for multiples of 2**32, as the i32 that the kernels take it for."""
    return (count + 2**31) % 2**32 - 2**31


def free_shared() -> int:
    """Bytes of shared memory that are free on this machine."""
    if not SHARED.exists():
        return 0
    about = os.statvfs(SHARED)
    return about.f_bavail * about.f_frsize


def _shared(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """POSIX shared memory: each rank makes a file, which has no name any more once all have opened it.

    Returns:
        This rank's block, where all ranks' lie, and what must live as long.
    """
    problem, name, maps = "", "", []
    try:
        try:
            descriptor, name = tempfile.mkstemp(prefix="megatron-hecate-", dir=SHARED)  # mode 600
            try:
                os.posix_fallocate(descriptor, 0, size)  # now, not with a bus error later
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = f"{size} bytes of shared memory, {free_shared()} are free in {SHARED}: {error}"
        _all_have_it(problem, group, f"make {SHARED} larger, or use p2p")
        names: list[Any] = [None] * group.size()
        dist.all_gather_object(names, name, group=group)
        try:
            maps = [_map(other, size) for other in names]
        except OSError as error:  # a container of its own, under the same host name
            problem = f"its peers' files of shared memory: {error}"
        _all_have_it(problem, group, f"let the ranks of a machine share {SHARED}, or use p2p")
    finally:
        if name:
            Path(name).unlink()
    blocks = [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps]
    return blocks[group.rank()], [block.data_ptr() for block in blocks], blocks


def _map(name: str, size: int) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _symmetric(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """Torch's symmetric memory. As `_shared`."""
    import torch.distributed._symmetric_memory as symmetric

    problem, own = "", None
    try:
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        own[:COUNTERS].zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        problem = f"{size} bytes of symmetric memory: {error}"
    _all_have_it(problem, group, "set fewer slots or a shorter lifetime, or use p2p")
    try:
        handle = symmetric.rendezvous(own, group)
    except RuntimeError as error:
        problem = f"a view of its peers' memory: {error}"
    _all_have_it(problem, group, "use p2p")
    inside = own.data_ptr() - handle.buffer_ptrs[handle.rank]  # of the allocation
    return own, [base + inside for base in handle.buffer_ptrs], handle


def _all_have_it(problem: str, group: dist.ProcessGroup, way_out: str) -> None:
    """Raise RuntimeError on all ranks when one has a ``problem`` with its memory."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, problem, group=group)
    problems = [f"rank {rank} cannot have {text}" for rank, text in enumerate(found) if text]
    if problems:
        raise RuntimeError(f"transport sm: {'; '.join(problems)}; {way_out}")
