"""Memory that is shared by the ranks of an NVLink domain, and detection of the domain.

Each rank allocates one block that its peers can read and write: torch's symmetric memory on GPUs,
POSIX shared memory on CPUs. A block begins with the progress counters (``kernels/signals.cuh``),
followed by the buffers.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.background import BackgroundThread
from megatron_hecate.nvlink.memory import FAILURE, MAX_RANKS, MAX_STEPS, Signals
from megatron_hecate.nvlink.peer_memory import COUNTERS, allocate_shared, allocate_symmetric

ARRIVED: int = 4 * MAX_RANKS  # offset of the counters of thread blocks, bytes
EPOCH: int = ARRIVED + 4 * MAX_STEPS  # offset of the u32 from which positions count, bytes
EXCHANGES: int = EPOCH + 4  # offset of the counters of exchanges, bytes
WATCHED: float = 0.1  # seconds between two checks for a failure on a GPU
REMEMBERED: int = 4096  # transfers that the message of a failure can describe
FAILED: int = 1  # state of a `FAILURE` record; 0 at first, 2 while a kernel writes it
ENDED: int = 3  # state of a record whose attempt is over

assert EXCHANGES + 4 * (MAX_RANKS + 1) <= COUNTERS

# Failure records of the process, kept because the last kernels of an attempt may still read them.
_records: list[np.ndarray] = []


class Peers:
    """The blocks of memory of all ranks of a domain, mapped on this rank.

    Args:
        group: process group of the domain; all its ranks construct the object together.
        size: bytes of the buffers, the same on all ranks.
        device: device of the memory.
        ranks: numbers of the domain's ranks in the FSSDP group, in order of their rank in
            ``group``.
        timeout: seconds per wait.

    Raises:
        RuntimeError: the memory cannot be allocated, or not mapped by all peers.
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
        self.device = device
        self.ranks = tuple(ranks)
        on_gpu = device.type == "cuda"
        allocate = allocate_symmetric if on_gpu else allocate_shared
        memory, bases, self._kept = allocate(group, COUNTERS + size, device=device)
        self.buffers: Tensor = memory[COUNTERS:]
        self._epoch = memory[EPOCH : EPOCH + 4]
        record = torch.zeros(FAILURE.itemsize, dtype=torch.uint8, pin_memory=on_gpu)
        self.failure_record: np.ndarray = record.numpy().view(FAILURE)
        self.signals = Signals(
            rank=group.rank(),
            progress=bases,
            arrived=bases[group.rank()] + ARRIVED,
            epoch=bases[group.rank()] + EPOCH,
            exchanges=bases[group.rank()] + EXCHANGES,
            failure=record.data_ptr(),
            timeout=timeout,
        )
        self._begun: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._layers: dict[int, str] = {}
        self._is_reported = False
        self._is_abandoned = False
        # The thread must not keep the memory alive.
        self._look = functools.partial(_is_over, weakref.ref(self))
        if on_gpu:
            self._watch_failures()
        Attempt.current().at_end(self.abandon)
        # Not before an earlier attempt has been closed, which ends all waits.
        _records.append(self.failure_record)

    def _watch_failures(self) -> None:
        """Start a thread that prints on stderr why a kernel timed out, as soon as it has.

        The next CUDA call raises an error that names neither peer nor layer.
        """
        look = self._look

        def watch() -> None:
            while not look() and not thread.stopping.wait(WATCHED):
                pass

        thread = BackgroundThread("watch", watch)
        thread.start()
        # A kernel may have timed out after the thread's last check.
        atexit.register(look)

    def abandon(self) -> None:
        """End all waits for peers, as if the peers had arrived: the attempt of the job is over.

        Waits of other models end, too: to free symmetric memory, torch waits for all kernels.

        The data of the transfers is not used any more, while a kernel that times out would
        destroy the CUDA context.
        """
        self._is_abandoned = True
        atexit.unregister(self._look)
        # Kernels that wait read it: no stream is needed, which they may occupy.
        for record in _records:
            if not record["failed"]:
                record["failed"] = ENDED

    @property
    def failure(self) -> np.void | None:
        """The `FAILURE` record of the first wait that timed out, or ``None``.

        The host can read it even after the CUDA context was destroyed.
        """
        record = self.failure_record[0]
        return record if record["failed"] == FAILED else None

    def write_epoch(self, epoch: int) -> None:
        """Set the progress from which the positions of launches count, on the current stream."""
        numbers = torch.from_numpy(np.array([epoch % 2**32], np.uint32).view(np.uint8))
        if self._epoch.is_cuda:
            numbers = numbers.pin_memory()
        self._epoch.copy_(numbers, non_blocking=True)

    def remember(self, begin: int, text: str) -> None:
        """Register the description of a transfer, used if a wait of it times out.

        Args:
            begin: progress counters before the transfer.
            text: description with the placeholder ``{peer}`` for the peer that did not arrive.
        """
        self._begun.append((begin, text))

    def remember_layer(self, text: str) -> int:
        """Register the description of a layer's exchange of loads, and return its number.

        Args:
            text: as for `remember`.
        """
        # No transfer begins at a multiple: the counters begin at 1.
        number = MAX_STEPS * len(self._layers)
        self._layers[number] = text
        return number

    def raise_failure(self) -> None:
        """Raise a TransferError if a wait for a peer timed out."""
        if self.look_for_failure():
            raise TransferError(self.explain_failure())

    def explain_failure(self) -> str:
        """Describe the recorded failure: ranks, layer, expected and seen steps."""
        record = self.failure
        assert record is not None
        peer = self.ranks[int(record["peer"])]
        seen_step = int(record["seen"].astype("<i4"))
        reason = f"rank {self.ranks[self.signals.rank]}: a transfer failed: expected rank {{peer}}"
        number = int(record["id"])
        reason = self._layers.get(number, reason)
        # A copy, because the training thread may register a transfer meanwhile.
        for begin, text in tuple(self._begun):
            if begin % 2**32 == number:
                reason = text
        expected = int(record["expected"])
        return (
            f"{reason.format(peer=peer)}; it waited for step {expected}, {max(0, seen_step)} were "
            f"seen. Rank {peer} died, hangs, or did not take part."
        )

    def look_for_failure(self) -> bool:
        """Return True if a wait for a peer timed out; print the reason on stderr the first time."""
        if self.failure is None:
            return False
        if not self._is_reported:
            self._is_reported = True
            print(f"FSSDP: {self.explain_failure()}", file=sys.stderr, flush=True)
        return True


def _is_over(peers: weakref.ref[Peers]) -> bool:
    """Return True once a kernel timed out, the memory was freed, or the attempt is over."""
    alive = peers()
    return alive is None or alive._is_abandoned or alive.look_for_failure()


def nvlink_domain(node: str) -> tuple[str, str]:
    """Return the name of this GPU's NVLink domain, and the reason if it has no NVLink.

    Machines that share an NVLink fabric (GB200 NVL72) are one domain, named by the driver.

    Args:
        node: host name of the machine.
    """
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
        _detect_dma_connectivity,
    )

    device = torch.cuda.current_device()
    count = torch.cuda.device_count()
    # A process that sees one GPU cannot query its links; the self-test then decides.
    if count > 1:
        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[device]
        unlinked = [peer for peer in range(count) if peer != device and not links[peer]]
        if unlinked:
            return node, f"GPU {device} of {node} has no NVLink to GPUs {unlinked}"
    return _fabric() or node, ""


def _fabric() -> str:
    """Return the name of the NVLink fabric that this GPU shares with other machines; else empty."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        info = nvml.device_get_gpu_fabric_info_v(nvml.device_get_handle_by_uuid(uuid))
        cluster = bytes(info.cluster_uuid)
    # Older GPUs and drivers do not support the query; NVML has error classes of its own for that.
    except Exception:
        return ""
    completed = int(info.state) == int(nvml.GpuFabricState.COMPLETED)
    if not completed or not any(cluster):
        return ""
    return f"fabric {cluster.hex()} {info.clique_id}"
