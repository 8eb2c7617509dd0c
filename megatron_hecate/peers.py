"""Memory of a rank that its peers can read, and the way kernels reach it.

There is one block of it per process group. On GPUs it is torch's symmetric memory; on CPUs, POSIX shared memory. In
front lie the counters by which ranks tell each other how far they are (``kernels/signals.cuh``), behind them the arena.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate import compile as kernels
from megatron_hecate import kernel
from megatron_hecate.kernel import FAILURE, Signals
from megatron_hecate.schedule import MAX_RANKS

SHARED: Path = Path("/dev/shm")
COUNTERS: int = 512  # bytes in front of the arena: progress, one u32 per rank, and the blocks' counters
ARRIVED: int = 4 * MAX_RANKS  # where those begin
BLOCKS: int = 16  # thread blocks of a transfer on a GPU: about one in eight multiprocessors of an H100
THREADS: int = 512  # of a block

assert ARRIVED + 4 * kernel.MAX_STEPS <= COUNTERS


class Peers:
    """One block of memory per rank of ``group``, all of which this rank sees.

    Args:
        group: all its ranks call at the same time, with the same size.
        size: bytes of the arena.
        device: where.

    Raises:
        RuntimeError: when the ranks cannot see each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        self.group, self.device = group, device
        on_gpu = device.type == "cuda"
        whole, self.bases = (_symmetric if on_gpu else _shared)(group, COUNTERS + size, device)
        self.arena: Tensor = whole[COUNTERS:]
        self._whole = whole
        self._failure = torch.zeros(FAILURE.itemsize, dtype=torch.uint8, pin_memory=on_gpu)
        self._launch = _on_gpu if on_gpu else _on_host
        rank = group.rank()
        self.signals = Signals(
            progress=self.bases[rank],
            progress_at=tuple(self.bases),
            arrived=self.bases[rank] + ARRIVED,
            failure=self._failure.data_ptr(),
        )

    def address(self, tensor: Tensor, rank: int) -> int:
        """Where this rank sees, in ``rank``'s memory, what ``tensor`` is in its own."""
        own = self.bases[self.group.rank()]
        offset = tensor.data_ptr() - own
        assert offset >= COUNTERS and offset + tensor.nbytes <= self._whole.nbytes, "not in the arena"
        return self.bases[rank] + offset

    def run(self, name: str, program: np.ndarray, at: Tensor) -> None:
        """Run a transfer: at once on the host, on the current stream on a GPU.

        Args:
            name: of the kernel.
            program: as `kernel.program` makes it, for the address of ``at``.
            at: memory for it, on the device.
        """
        self._launch(name, program, at)

    @property
    def failed(self) -> bool:
        """Whether a peer did not come in time, in any transfer that has ended."""
        return bool(self._failure.numpy().view(FAILURE)[0]["failed"])

    def steps_of(self, peer: int, *, since: int) -> int:
        """Steps that ``peer`` told this rank it has finished ``since`` a count; below 0 when it has not come so far."""
        told = self._whole[: 4 * len(self.bases)].cpu().numpy().view(np.uint32)[peer]
        return int((told - np.uint32(since % 2**32)).astype(np.int32))


def free_shared() -> int:
    """Bytes of shared memory that are free on this machine."""
    if not SHARED.exists():
        return 0
    about = os.statvfs(SHARED)
    return about.f_bavail * about.f_frsize


def _shared(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """POSIX shared memory: each rank makes a file, which has no name any more once all have opened it."""
    descriptor, name = tempfile.mkstemp(prefix="megatron-hecate-", dir=SHARED)  # mode 600
    try:
        problem = ""
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, not with a bus error later
        except OSError as error:
            problem = f"{size} bytes of shared memory, {free_shared()} are free in {SHARED}: {error}"
        made: list[Any] = [None] * group.size()
        dist.all_gather_object(made, (name, problem), group=group)
        problems = [f"rank {rank} cannot have {text}" for rank, (_, text) in enumerate(made) if text]
        if problems:  # on all ranks
            raise RuntimeError(f"transport sm: {'; '.join(problems)}; make {SHARED} larger, or use p2p")
        maps = [_map(other, size) for other, _ in made]
        dist.barrier(group=group)
    finally:
        os.close(descriptor)
        Path(name).unlink()
    blocks = [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps]
    own = blocks[group.rank()]
    own.peers = blocks  # they live as long as this one
    return own, [block.data_ptr() for block in blocks]


def _map(name: str, size: int) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _symmetric(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[Tensor, list[int]]:
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    own[:COUNTERS].zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(own, group)
    handle.barrier()
    return own, list(handle.buffer_ptrs)


@functools.cache
def compile_for_host() -> ctypes.CDLL:
    """The kernels for CPU ranks.

    Raises:
        CompileError, PermissionError: as `compile.host_library`.
    """
    library = ctypes.CDLL(str(kernels.host_library()))
    size = library.fssdp_size_of_transfer()
    assert size == kernel.TRANSFER.itemsize, f"a transfer has {size} bytes there, {kernel.TRANSFER.itemsize} here"
    return library


def _on_host(name: str, program: np.ndarray, at: Tensor) -> None:
    at.numpy()[: len(program)] = program
    getattr(compile_for_host(), name)(ctypes.c_void_p(at.data_ptr()), 1, 1)


@functools.cache
def kernel_of(name: str, device: torch.device) -> int:
    """The function ``name`` for this GPU."""
    from cuda.bindings import driver

    cubin = kernels.cubin(torch.cuda.get_device_capability(device))
    status, library = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    _check(status, "cuLibraryLoadData")
    status, function = driver.cuLibraryGetKernel(library, name.encode())
    _check(status, "cuLibraryGetKernel")
    return function


def _on_gpu(name: str, program: np.ndarray, at: Tensor) -> None:
    staged = torch.empty(len(program), dtype=torch.uint8, pin_memory=True)
    staged.numpy()[:] = program
    at[: len(program)].copy_(staged, non_blocking=True)
    launch(name, at)


def launch(name: str, at: Tensor, *, blocks: int = BLOCKS) -> None:
    """Run the program that lies in ``at``, on the GPU's current stream."""
    from cuda.bindings import driver

    function = driver.CUfunction(int(kernel_of(name, at.device)))
    stream = torch.cuda.current_stream(at.device).cuda_stream
    arguments = ((at.data_ptr(),), (ctypes.c_void_p,))
    (status,) = driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)
    _check(status, "cuLaunchKernel")


def _check(status: object, what: str) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"{what} failed: {status}")
