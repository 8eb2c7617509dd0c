"""Quotas: the number of a source's tokens for an expert that each of its holders gets.

The algorithm is in ``kernels/quotas.cuh`` and ``kernels/sources.cuh``. It is deterministic: every
rank computes equal quotas from equal loads.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.transport import LoadExchange
from megatron_hecate.device.autograd import lasting_tensors
from megatron_hecate.device.launch import Kernels
from megatron_hecate.plan import Placement
from megatron_hecate.routing.tables import GroupShape, HolderOrder

# threads of the kernel's single thread block
THREADS: int = 256
# see ``kernels/quotas.cuh``
NOTED: int = 65536
# of all sources, or the exchange in which they were sent
Loads = Tensor | LoadExchange


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Token counts of the all-to-all from sources to ranks, for one rank.

    Every rank knows all loads and computes equal quotas, so the counts need no communication.

    Args:
        received: [N, P] int64, tokens of each source for each slot of this rank.
        of_slot: [P] int64, tokens of all sources.
        of_source: [N] int64, tokens for all slots of this rank.
        sent: [R] int64, tokens of this rank's source for each rank.
        total: [1] int64, tokens of all sources for all slots of this rank.
    """

    received: Tensor
    of_slot: Tensor
    of_source: Tensor
    sent: Tensor
    total: Tensor


class QuotaTables:
    """Device tables of a group and its placement, at fixed addresses.

    Args:
        shape: sizes and topology of the group.
        device: device of the loads.
        kernels: kernels for ``device``.
    """

    def __init__(self, shape: GroupShape, device: torch.device, kernels: Kernels) -> None:
        self.shape, self.kernels, self.device = shape, kernels, device
        with lasting_tensors():
            self.group = torch.from_numpy(shape.table()).to(device)
            self.holders = torch.zeros(shape.holders_size, dtype=torch.int32, device=device)
        # the addresses stay valid, because neither buffer is ever reallocated
        self.at = [ctypes.c_void_p(table.data_ptr()) for table in (self.group, self.holders)]
        self._work_size = shape.work_size(THREADS)
        shared_bytes = shape.shared_bytes(THREADS)
        self._shared_bytes = shared_bytes if shared_bytes <= kernels.most_shared_bytes else 0
        self.placed: Placement | None = None
        # the last placement whose table was computed, and the table
        self._prepared: tuple[Placement, np.ndarray] | None = None
        # Largest rank load over the mean that a launch has seen, in units of 1 / `NOTED`, with
        # these quotas and with each expert where Megatron builds it: [2] int64, raised by `parts`.
        # At a fixed address, because graphs hold it. ``None`` for none.
        self.noted: Tensor | None = None
        self._loads_shape = (len(shape.source_rank), shape.num_experts)
        # index of each source in the group's order
        self._source_index = np.argsort(shape.order).tolist()
        # the last placement without replicas, and its `parts`
        self._homes: tuple[Placement, Tensor] | None = None

    def prepare(self, placement: Placement) -> None:
        """Compute the table of ``placement``, a possible plan, in any thread."""
        self._prepared = placement, HolderOrder(placement, self.shape).table()

    def numbers(self, placement: Placement) -> np.ndarray:
        """Return the table of ``placement``, int32."""
        prepared = self._prepared
        if prepared is not None and prepared[0] is placement:
            return prepared[1]
        return HolderOrder(placement, self.shape).table()

    def move(self, holders: Tensor) -> None:
        """Use ``holders`` as the table's memory, which the caller writes."""
        self.holders = holders
        self.at[1] = ctypes.c_void_p(holders.data_ptr())

    def place(self, placement: Placement) -> None:
        """Route to the holders of ``placement`` from here on.

        Its tables are written on the current stream, without host synchronization.
        """
        table = torch.from_numpy(self.numbers(placement))
        # torch's pinned allocator reuses the buffer only after the asynchronous copy is done
        if self.device.type == "cuda":
            table = table.pin_memory()
        self.holders.copy_(table, non_blocking=True)
        self.placed = placement

    @property
    def parts_of_homes(self) -> Tensor:
        """Result of `parts` without replicas, which depends neither on source nor on loads."""
        assert self.placed is not None and not self.placed.num_replicas, "there are replicas"
        if self._homes is None or self._homes[0] is not self.placed:
            order = HolderOrder(self.placed, self.shape)
            size = self.shape.num_physical
            parts = np.full(self.shape.parts_size, np.iinfo(np.int32).max, np.int32)
            parts[size : size + len(order.physical)] = order.physical
            parts[2 * size :] = np.arange(self.shape.num_experts + 1)
            with lasting_tensors():
                self._homes = self.placed, torch.from_numpy(parts).to(self.device)
        return self._homes[1]

    def parts_and_exchange(self, loads: Loads, source: int) -> tuple[Tensor, Exchange]:
        """Split one source's tokens as `parts` does, and count the exchange, in the same launch."""
        sizes = self.shape.exchange_sizes
        counts = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        parts = self.parts(loads, source, counts)
        # `Tensor.split` runs Python around this method
        received, *sums = counts.split_with_sizes(sizes)
        return parts, Exchange(received.view(-1, self.shape.slots_per_rank), *sums)

    def parts(self, loads: Loads, source: int, counts: Tensor | None = None) -> Tensor:
        """Split one source's tokens over the holders, in one kernel launch.

        Args:
            loads: tokens of source n routed to expert e, [N, E] int32, contiguous, on the device;
                or the exchange that the count of this source has sent its loads in.
            source: index of the source, 0 to N - 1.
            counts: int64 numbers of an `Exchange`, which the launch writes.

        Returns:
            [2 * R * P + E + 1] int32, `Parts` in ``kernels/gate.cuh``: the end of each holder's
            range within the tokens for its expert, each holder's physical expert, and the index of
            each expert's first holder.

        Raises:
            TransferError: see `LoadExchange.check`.
        """
        if isinstance(loads, LoadExchange):
            address, exchange, number = None, loads.description.data_ptr(), loads.number
        else:
            assert loads.shape == self._loads_shape and loads.dtype == torch.int32, loads.shape
            address, exchange, number = loads.data_ptr(), None, 0
        shared = self._shared_bytes
        # working arrays in global memory, for tables that do not fit into shared memory and for
        # counts above 32 bits
        work = torch.empty(self._work_size, dtype=torch.int64, device=self.device)
        parts = torch.empty(self.shape.parts_size, dtype=torch.int32, device=self.device)
        self.kernels.launch(
            "fssdp_quotas",
            *self.at,
            ctypes.c_void_p(address),
            ctypes.c_void_p(work.data_ptr()),
            ctypes.c_uint(shared),
            ctypes.c_int(self._source_index[source]),
            ctypes.c_int(self.shape.source_rank[source]),
            ctypes.c_void_p(parts.data_ptr()),
            ctypes.c_void_p(None if counts is None else counts.data_ptr()),
            ctypes.c_void_p(None if self.noted is None else self.noted.data_ptr()),
            ctypes.c_void_p(exchange),
            ctypes.c_uint(number),
            blocks=1,
            threads=THREADS,
            shared_bytes=shared,
        )
        if isinstance(loads, LoadExchange):
            loads.check()
        return parts
