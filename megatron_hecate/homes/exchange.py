"""Elements of tensors change ranks in one exchange: all of them arrive before any is written.

A *shard* says which elements of an expert's tensor a rank keeps. `pieces` tells who sends what of it to a rank that
will keep others; `Relocation` packs, exchanges and writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.job.collectives import wait_collective

ALIGNED: int = 16  # bytes between pieces, so that each can be read as what it is


@dataclasses.dataclass(frozen=True)
class Shard:
    """Elements [``begin``, ``end``) of a tensor on ``rank`` of a group."""

    rank: int
    begin: int
    end: int


def pieces(kept: Sequence[Shard], wanted: Shard) -> list[Shard]:
    """Which of the elements that ``wanted`` names come from which rank: from its own where it keeps them, else from the
    lowest.

    Raises:
        ValueError: when nobody keeps one of them.
    """
    found, begin = [], wanted.begin
    while begin < wanted.end:
        holding = [shard for shard in kept if shard.begin <= begin < shard.end]
        if not holding:
            raise ValueError(f"element {begin} of {wanted} is on none of {list(kept)}")
        source = min(holding, key=lambda shard: (shard.rank != wanted.rank, shard.rank))
        own = [shard.begin for shard in kept if shard.rank == wanted.rank and shard.begin > begin]
        found.append(Shard(source.rank, begin, min(source.end, wanted.end, *own)))
        begin = found[-1].end
    return found


class Relocation:
    """One exchange: what this rank sends to each rank of ``group`` and receives from it, in the same order on both.

    Args:
        group: all of its ranks take part, also those that neither send nor receive.
        device: where messages of the group lie.
        label: for errors.
        timeout: seconds per wait.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, label: str, timeout: float
    ) -> None:
        self._group, self._device, self._label, self._timeout = group, device, label, timeout
        self._sends: list[list[Tensor]] = [[] for _ in range(group.size())]
        self._receives: list[list[Sequence[Tensor]]] = [[] for _ in range(group.size())]
        self._received = torch.empty(0, dtype=torch.uint8)

    @property
    def received_bytes(self) -> int:
        return self._received.nbytes

    def send(self, rank: int, values: Tensor) -> None:
        """``values`` [n], contiguous, go to ``rank``."""
        self._sends[rank].append(values)

    def receive(self, rank: int, into: Sequence[Tensor]) -> None:
        """Values come from ``rank``, of the type of the first of ``into`` [n], and are written to all of these."""
        self._receives[rank].append(into)

    def exchange(self) -> None:
        """Send and receive. Nothing is written yet.

        Raises:
            TransferError: when a rank dies or does not take part in time.
        """
        packed = torch.empty(sum(map(_size, self._sends)), dtype=torch.uint8, device=self._device)
        at = 0
        for values in (values for of_rank in self._sends for values in of_rank):
            packed[at : at + values.nbytes].copy_(values.view(torch.uint8))
            at += _aligned(values)
        expected = [[into[0] for into in of_rank] for of_rank in self._receives]
        self._received = packed.new_empty(sum(map(_size, expected)))
        sizes = list(map(_size, expected)), list(map(_size, self._sends))
        work = dist.all_to_all_single(
            self._received, packed, *sizes, group=self._group, async_op=True
        )
        names = dict(what="moving experts", label=self._label)
        wait_collective(work, self._received, self._group, **names, timeout=self._timeout)

    def write(self) -> None:
        """Write what has come."""
        at = 0
        for into in (into for of_rank in self._receives for into in of_rank):
            values = self._received[at : at + into[0].nbytes].view(into[0].dtype)
            for tensor in into:
                tensor.copy_(values)
            at += _aligned(into[0])


def _aligned(values: Tensor) -> int:
    return -(-values.nbytes // ALIGNED) * ALIGNED


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(map(_aligned, tensors))
