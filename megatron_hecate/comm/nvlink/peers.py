"""Memory of a rank that its peers can read, and which ranks are peers.

There is one block of it per rank of an NVLink domain. On GPUs it is torch's symmetric memory; on CPUs, POSIX shared
memory. In front lie the counters by which ranks tell each other how far they are (``kernels/signals.cuh``), behind them
the buffers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.nvlink.program import FAILURE, MAX_STEPS, Signals
from megatron_hecate.comm.nvlink.schedule import MAX_RANKS
from megatron_hecate.job.attempt import Attempt

SHARED: Path = Path("/dev/shm")
COUNTERS: int = (
    512  # bytes in front of the buffers: progress, one u32 per rank, and the blocks' counters
)
ARRIVED: int = 4 * MAX_RANKS  # where those begin
WATCHED: float = 0.1  # seconds between two looks for a failure on a GPU
REMEMBERED: int = 1024  # transfers that a failure can name
BEYOND: int = 1 << 30  # steps of the counters that no transfer under way waits for
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # torch reads it in every rendezvous

assert ARRIVED + 4 * MAX_STEPS <= COUNTERS


class Peers:
    """One block of memory per rank of a domain, all of which this rank sees.

    Args:
        group: the domain; all its ranks call at the same time, with the same size.
        size: bytes of the buffers.
        device: where.
        ranks: how the FSSDP group numbers them, in order of their rank in ``group``.
        timeout: seconds per wait.

    Raises:
        RuntimeError: when the ranks cannot see each other's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        *,
        device: torch.device,
        ranks: Sequence[int],
        timeout: float,
    ) -> None:
        self.device, self.ranks, self.rank = device, tuple(ranks), ranks[group.rank()]
        on_gpu = device.type == "cuda"
        whole, bases, self._kept = (_symmetric if on_gpu else _shared)(
            group, COUNTERS + size, device=device
        )
        self._bases = dict(zip(self.ranks, bases, strict=True))
        self.buffers: Tensor = whole[COUNTERS:]
        self._whole = whole
        self.failure_record = torch.zeros(FAILURE.itemsize, dtype=torch.uint8, pin_memory=on_gpu)
        self.signals = Signals(
            rank=self.rank,
            progress_at=self._bases,
            arrived=self._bases[self.rank] + ARRIVED,
            failure=self.failure_record.data_ptr(),
            timeout=timeout,
        )
        self._begun: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._reported = self._is_abandoned = False
        self._look = functools.partial(_is_over, weakref.ref(self))
        if on_gpu:  # what CUDA says of a kernel that gave up names nobody
            threading.Thread(
                target=_watch, args=(self._look,), name="fssdp watch", daemon=True
            ).start()
            atexit.register(self._look)  # the process may end before the next look
        Attempt.current().at_end(self.abandon)

    def abandon(self) -> None:
        """The attempt of the job is over: whatever waits for a peer goes on at once, as if all had come.

        Nobody reads what it moves, while a kernel that gives up takes the GPU's context with it.
        """
        self._is_abandoned = True
        atexit.unregister(self._look)
        if not self._begun:
            return
        counters = self._whole[: 4 * len(self.ranks)]
        beyond = np.full(len(self.ranks), (self._begun[-1][0] + BEYOND) % 2**32, np.uint32)
        passed = torch.from_numpy(beyond.view(np.uint8))
        if not counters.is_cuda:
            counters.copy_(passed)
            return
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # beside the kernels that wait
            counters.copy_(passed.pin_memory(), non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def address(self, tensor: Tensor, rank: int) -> int:
        """Where this rank sees, in ``rank``'s memory, what ``tensor`` is in its own."""
        assert self.holds(tensor), "not in the buffers"
        return tensor.data_ptr() + self.apart[rank]

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in this rank's buffers."""
        offset = tensor.data_ptr() - self._bases[self.rank]
        return offset >= COUNTERS and offset + tensor.nbytes <= self._whole.nbytes

    @functools.cached_property
    def apart(self) -> dict[int, int]:
        """By rank: where this rank sees its memory, less where its own lies."""
        return {rank: base - self._bases[self.rank] for rank, base in self._bases.items()}

    @property
    def failure(self) -> np.void | None:
        """The `FAILURE` on record, when a peer did not come in time in any transfer so far: readable by the host also
        after the GPU's context has ended."""
        record = self.failure_record.numpy().view(FAILURE)[0]
        return record if record["failed"] == 1 else None  # 2: being written

    def steps_of(self, peer: int, *, since: int) -> int:
        """Steps that ``peer`` told this rank it has finished ``since`` a count; below 0 when it has not come so far.
        On CPU ranks."""
        told = (
            self._whole[: 4 * len(self.ranks)].numpy().view(np.uint32)[self.signals.numbers[peer]]
        )
        return (int(told) - since + 2**31) % 2**32 - 2**31  # counters wrap

    def remember(self, begin: int, text: str) -> None:
        """A transfer begins when counters stand at ``begin``; ``text`` with a ``{peer}`` says what was expected of it,
        should it fail."""
        self._begun.append((begin, text))

    def explain_failure(self) -> str:
        """What the failure on record says: with rank, layer, expected and seen."""
        record = self.failure
        assert record is not None
        peer, seen = self.ranks[int(record["peer"])], int(record["seen"].astype("<i4"))
        known = f"rank {self.rank}: a transfer failed: expected rank {{peer}}"
        for begin, text in self._begun:
            if begin % 2**32 == int(record["begin"]):
                known = text
        expected = int(record["expected"])
        return (
            f"{known.format(peer=peer)}; it waited for step {expected}, {max(0, seen)} were seen. Rank {peer} died, "
            "hangs, or did not take part."
        )

    def report(self, text: str) -> None:
        """Say on stderr, once, why a transfer failed."""
        if not self._reported:
            self._reported = True
            print(f"FSSDP: {text}", file=sys.stderr, flush=True)

    def look_for_failure(self) -> bool:
        """Whether a peer did not come; says why, the first time."""
        if self.failure is not None:
            self.report(self.explain_failure())
        return self.failure is not None

    @staticmethod
    def free_bytes() -> int:
        """Bytes of shared memory that are free on this machine, for peers that are CPU ranks."""
        if not SHARED.exists():
            return 0
        about = os.statvfs(SHARED)
        return about.f_bavail * about.f_frsize

    @staticmethod
    def symmetric_problem(device: torch.device) -> str:
        """What is wrong with torch's symmetric memory on ``device``; empty when all is well. Only its backend CUDA
        gives memory that a kernel of ours reaches by address, and a process has one backend for all."""
        import torch.distributed._symmetric_memory as symmetric

        backend = symmetric.get_backend(device)
        if backend == "CUDA":
            return ""
        return (
            f"symmetric memory of torch's backend CUDA: this process uses {backend}; unset TORCH_SYMMMEM, or call "
            "torch.distributed._symmetric_memory.set_backend('CUDA') before other symmetric memory is allocated"
        )

    @staticmethod
    def nvlink_domain(node: str) -> tuple[str, str]:
        """The name of this GPU's NVLink domain, and why it has none.

        Machines that share an NVLink fabric (GB200 NVL72) are one domain; the driver knows its name.

        Args:
            node: name of the machine.
        """
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        own, count = torch.cuda.current_device(), torch.cuda.device_count()
        if count > 1:
            links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[own]
            without = [other for other in range(count) if other != own and not links[other]]
            if without:
                return node, f"GPU {own} of {node} has no NVLink to GPUs {without}"
        return (
            _fabric() or node,
            "",
        )  # a process that sees one GPU cannot look; the self-test shows what works


def _watch(look: Callable[[], bool]) -> None:
    """Say on stderr why a kernel gave up, as soon as it has: whoever uses CUDA next only hears that one did."""
    while not look():
        time.sleep(WATCHED)


def _is_over(peers: weakref.ref[Peers]) -> bool:
    """Whether there is nothing more to wait for: a kernel gave up, the memory is gone, or the attempt is over."""
    seen = peers()
    return seen is None or seen._is_abandoned or seen.look_for_failure()


def _fabric() -> str:
    """The NVLink fabric that this GPU shares with other machines; empty without one, or where nothing can say so."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        info = nvml.device_get_gpu_fabric_info_v(nvml.device_get_handle_by_uuid(uuid))
        cluster = bytes(info.cluster_uuid)
    except Exception:  # of NVML's own kinds as well: older GPUs and drivers cannot say
        return ""
    completed = int(info.state) == int(nvml.GpuFabricState.COMPLETED)
    return f"fabric {cluster.hex()} {info.clique_id}" if completed and any(cluster) else ""


def _shared(
    group: dist.ProcessGroup, size: int, *, device: torch.device
) -> tuple[Tensor, list[int], Any]:
    """POSIX shared memory: each rank makes a file, which has no name any more once all have opened it.

    Returns:
        This rank's block, where all ranks' lie, and what must live as long.
    """
    problem, name = "", ""
    maps: list[mmap.mmap] = []
    try:
        try:
            descriptor, name = tempfile.mkstemp(prefix="megatron-hecate-", dir=SHARED)  # mode 600
            try:
                os.posix_fallocate(descriptor, 0, size)  # now, not with a bus error later
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = (
                f"{size} bytes of shared memory, {Peers.free_bytes()} are free in {SHARED}: {error}"
            )
        _raise_on_all(problem, group, way_out=f"make {SHARED} larger, or use p2p")
        names: list[Any] = [None] * group.size()
        dist.all_gather_object(names, name, group=group)
        try:
            maps = [_map(other, size) for other in names]
        except OSError as error:  # a container of its own, under the same host name
            problem = f"its peers' files of shared memory: {error}"
        _raise_on_all(
            problem, group, way_out=f"let the ranks of a machine share {SHARED}, or use p2p"
        )
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


def _symmetric(
    group: dist.ProcessGroup, size: int, *, device: torch.device
) -> tuple[Tensor, list[int], Any]:
    """Torch's symmetric memory. As `_shared`."""
    import torch.distributed._symmetric_memory as symmetric

    _raise_on_all(Peers.symmetric_problem(device), group, way_out="use p2p")
    problem, own = "", torch.empty(0)
    handle: Any = None
    try:
        own = _empty_symmetric(size, device)
        own[:COUNTERS].zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        free, _ = torch.cuda.mem_get_info(device)
        problem = f"{size} bytes of symmetric memory, {free} are free: {error}"
    _raise_on_all(problem, group, way_out="set fewer slots or a shorter lifetime, or use p2p")
    try:
        with _without_multicast():
            handle = symmetric.rendezvous(own, group)
    except RuntimeError as error:
        problem = f"a view of its peers' memory: {error}"
    else:
        if handle is None:
            problem = "a view of its peers' memory: torch knows no such symmetric memory, and warned of it"
    _raise_on_all(problem, group, way_out="use p2p")
    inside = own.data_ptr() - handle.buffer_ptrs[handle.rank]  # of the allocation
    return own, [base + inside for base in handle.buffer_ptrs], handle


def _empty_symmetric(size: int, device: torch.device) -> Tensor:
    """[size] uint8. It is not torch's caching allocator that gives it: what that one keeps for later is in the way."""
    import torch.distributed._symmetric_memory as symmetric

    with contextlib.suppress(RuntimeError):
        return symmetric.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
    return symmetric.empty(size, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Torch's rendezvous binds no multicast object: we use none, and where the switches have none left it fails."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before


def _raise_on_all(problem: str, group: dist.ProcessGroup, *, way_out: str) -> None:
    """Raise RuntimeError on all ranks when one has a ``problem`` with its memory."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, problem, group=group)
    problems = [f"rank {rank} cannot have {text}" for rank, text in enumerate(found) if text]
    if problems:
        raise RuntimeError(f"transport nvlink: {'; '.join(problems)}; {way_out}")
