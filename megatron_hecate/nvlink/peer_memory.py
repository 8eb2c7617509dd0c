"""Allocation of memory that all ranks of an NVLink domain can access, on CPUs and on GPUs."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.agreement import raise_on_all
from megatron_hecate.comm.collectives import gather_objects

SHARED: Path = Path("/dev/shm")
# Bytes before the buffers, initially 0: progress counters and counters of exchanges, one u32 per
# rank each, and counters of thread blocks.
COUNTERS: int = 1024
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # read by torch in every rendezvous
LABEL = "transport nvlink"

_raise_on_all = functools.partial(raise_on_all, label=LABEL)


def symmetric_problem(device: torch.device) -> str:
    """Return why torch's symmetric memory on ``device`` is unusable, "cannot ..."; else empty.

    Only the backend CUDA returns memory that our kernels can access by address, and a process
    has one backend for all symmetric memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    if backend == "CUDA":
        return ""
    return (
        f"cannot use symmetric memory of torch's backend CUDA: this process uses {backend}; "
        "unset TORCH_SYMMMEM, or call torch.distributed._symmetric_memory.set_backend('CUDA') "
        "before other symmetric memory is allocated"
    )


def allocate_shared(
    group: dist.ProcessGroup, size: int, *, device: torch.device
) -> tuple[Tensor, list[int], Any]:
    """Allocate POSIX shared memory and map it on all ranks of ``group``. Collective.

    Each rank creates a file, which is removed once all ranks have opened it.

    Returns:
        This rank's block; addresses of all ranks' blocks; object that must live as long.
    """
    with contextlib.ExitStack() as files:
        with _raise_on_all(group, what="allocating shared memory"):
            try:
                # Only this user's processes may open it.
                file = files.enter_context(
                    tempfile.NamedTemporaryFile(prefix="megatron-hecate-", dir=SHARED)
                )
                # Too little memory is an error here, and not a bus error at the first access.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0
                raise OSError(
                    f"cannot allocate {size} bytes of shared memory, {free} are free in {SHARED}: "
                    f"{error}; make {SHARED} larger, or use p2p"
                ) from error
        names = gather_objects(file.name, group, what="mapping shared memory", label=LABEL)
        with _raise_on_all(group, what="mapping shared memory"):
            try:
                # The size is asked for because torch would create a file that is not there.
                blocks = [
                    torch.from_file(
                        peer_name,
                        shared=True,
                        size=Path(peer_name).stat().st_size,
                        dtype=torch.uint8,
                    )
                    for peer_name in names
                ]
            # Ranks in containers of their own may have the same host name, but share no files.
            except (OSError, RuntimeError) as error:
                raise RuntimeError(
                    f"cannot map its peers' shared memory: {error}; let the ranks of a machine "
                    f"share {SHARED}, or use p2p"
                ) from error
    return blocks[group.rank()], [block.data_ptr() for block in blocks], blocks


def allocate_symmetric(
    group: dist.ProcessGroup, size: int, *, device: torch.device
) -> tuple[Tensor, list[int], Any]:
    """Allocate symmetric memory and map it on all ranks of ``group``. As `allocate_shared`."""
    import torch.distributed._symmetric_memory as symmetric

    with _raise_on_all(group, what="allocating symmetric memory"):
        if problem := symmetric_problem(device):
            raise RuntimeError(f"{problem}; use p2p")
        # Symmetric memory has an allocator of its own, so free blocks that torch's caching
        # allocator keeps for later may leave too little.
        torch.cuda.empty_cache()
        try:
            memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            free, _ = torch.cuda.mem_get_info(device)
            raise RuntimeError(
                f"cannot allocate {size} bytes of symmetric memory, {free} are free: {error}; set "
                "fewer slots or a shorter lifetime, or use p2p"
            ) from error
        memory[:COUNTERS].zero_()
        # Peers may write the counters once they are mapped, so the zeros must be in memory before.
        torch.cuda.synchronize(device)
    with _raise_on_all(group, what="mapping symmetric memory"):
        try:
            with _without_multicast():
                handle = symmetric.rendezvous(memory, group)
        except RuntimeError as error:
            raise RuntimeError(f"cannot map its peers' memory: {error}; use p2p") from error
        if handle is None:
            raise RuntimeError(
                "cannot map its peers' memory: see the warning of torch.distributed; use p2p"
            )
    # Torch may place the tensor at an offset inside its allocation, the same on all ranks.
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    return memory, [base + offset for base in handle.buffer_ptrs], handle


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Disable multicast in torch's rendezvous.

    We use no multicast, and the rendezvous fails where the switches have no multicast object left.
    """
    old_value = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if old_value is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = old_value
