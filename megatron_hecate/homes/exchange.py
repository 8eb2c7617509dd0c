"""All-to-all exchange of tensor elements; nothing is written before all elements have arrived.

A *shard* is a range of elements of an expert's tensor that one rank keeps. `pieces` finds the rank
that sends each element of a new shard; `Relocation` packs, exchanges and writes the elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.collectives import wait_collective
from megatron_hecate.comm.device import device_of_rank


@dataclasses.dataclass(frozen=True)
class Shard:
    """Elements [``begin``, ``end``) of a tensor on ``rank`` of a group."""

    rank: int
    begin: int
    end: int


def pieces(shards: Sequence[Shard], target: Shard) -> list[Shard]:
    """Split the elements of ``target`` by the rank that sends them.

    An element that the wanting rank keeps itself is taken from there, any other from the lowest
    rank that keeps it.

    Args:
        shards: shards that together hold all elements of ``target``.
        target: elements that are wanted, and the rank that wants them.
    """
    bounds = set(chain.from_iterable((shard.begin, shard.end) for shard in shards))
    inside = {bound for bound in bounds if target.begin < bound < target.end}
    parts: list[Shard] = []
    for begin, end in pairwise(sorted({target.begin, target.end} | inside)):
        ranks = [shard.rank for shard in shards if shard.begin <= begin and end <= shard.end]
        source = target.rank if target.rank in ranks else min(ranks)
        parts.append(Shard(source, begin, end))
    return parts


class Relocation:
    """One exchange of tensors between the ranks of ``group``.

    Sender and receiver must add the tensors of a pair of ranks in the same order.

    Args:
        group: process group; all of its ranks take part, senders and receivers or not.
        label: prefix of errors.
        timeout: seconds per wait.
    """

    def __init__(self, group: dist.ProcessGroup, *, label: str, timeout: float) -> None:
        self._group = group
        self._label = label
        self._timeout = timeout
        # Bytes to send to each rank, and tensors that receive values from each rank.
        self._sends: list[list[Tensor]] = [[] for _ in range(group.size())]
        self._receives: list[list[Sequence[Tensor]]] = [[] for _ in range(group.size())]
        self._received = torch.empty(0, dtype=torch.uint8)

    def send(self, rank: int, values: Tensor) -> None:
        """Add contiguous ``values`` [n] to the message to ``rank``."""
        self._sends[rank].append(values.view(torch.uint8))

    def receive(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Expect [n] values from ``rank`` and write the same values to every tensor of ``tensors``.

        The message has the dtype of the first tensor.
        """
        self._receives[rank].append(tensors)

    def exchange(self) -> None:
        """Send and receive; `write` writes the received values.

        Raises:
            TransferError: when a rank dies or does not take part in time.
        """
        send_sizes = [sum(part.nbytes for part in parts) for parts in self._sends]
        receive_sizes = [
            sum(tensors[0].nbytes for tensors in rank_tensors) for rank_tensors in self._receives
        ]
        packed = torch.empty(sum(send_sizes), dtype=torch.uint8, device=device_of_rank())
        parts = list(chain.from_iterable(self._sends))
        for place, part in zip(packed.split([part.nbytes for part in parts]), parts, strict=True):
            place.copy_(part)
        self._received = packed.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(
            self._received, packed, receive_sizes, send_sizes, group=self._group, async_op=True
        )
        wait_collective(
            work,
            self._received,
            self._group,
            what="moving experts",
            label=self._label,
            timeout=self._timeout,
        )

    def write(self) -> None:
        """Write the received values to their tensors."""
        offset = 0
        for first, *copies in chain.from_iterable(self._receives):
            # A view as bytes: a message has no alignment.
            first.view(torch.uint8).copy_(self._received[offset : offset + first.nbytes])
            for tensor in copies:
                tensor.copy_(first)
            offset += first.nbytes
