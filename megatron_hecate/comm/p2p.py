"""The transport ``p2p``: spAG and spRS by plain ``torch.distributed`` point-to-point messages, on any backend."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.transfer import Stopwatch, Transfer
from megatron_hecate.comm.transport import HomeGradients, LayerBuffer, TransferPlan, chunks_in
from megatron_hecate.job import under_way
from megatron_hecate.job.collectives import TransferError

ARRIVING: int = (
    4  # gradients that a home receives at once, at most; those of further replicas come in rounds
)
ARRIVING_BYTES: int = 256 << 20  # and no more than this, but one
NAMED: int = 8  # messages of a batch that a line names


class P2P:
    """Moves one FSSDP group's replicas by messages. See `transport.Transport`.

    Gradients arrive in staging memory, which all layers share: a return waits for the one before it.

    Args:
        group: the ranks.
        timeout: seconds to wait for a peer. With NCCL the group's own timeout holds: waiting on the host for less would
            stop the stream from running ahead.
        can_time: whether fetches can be timed, the same on all ranks: not where `has_one_queue`.
    """

    name, scatters = "p2p", False
    # Of transfers so far. By object: in another attempt of the job groups have the same names, and ranks must agree.
    _numbers: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, int]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, group: dist.ProcessGroup, *, timeout: float, can_time: bool = True) -> None:
        self.group, self.timeout, self._can_time = group, timeout, can_time
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._returning: Transfer | None = None

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """The staging memory: gradients that arrive, and their sum."""
        needs = [
            (_arriving(layer.elements, layer.grad_dtype) + 1)
            * LayerBuffer.aligned(layer.elements, layer.grad_dtype)
            for layer in layers
        ]
        return max(needs) if any(layer.slots for layer in layers) else 0

    @staticmethod
    def explain_rounds(layers: Sequence[LayerBuffer]) -> str:
        """How many gradients a home receives at once, for the largest of ``layers``, and what follows with one hardware
        queue."""
        largest = max(layers, key=lambda layer: layer.elements)
        size, at_once = (
            largest.elements * largest.grad_dtype.itemsize,
            _arriving(largest.elements, largest.grad_dtype),
        )
        return (
            f"transport p2p: a rank receives the gradients of {at_once} replica{'s' if at_once > 1 else ''} of its "
            f"experts at once ({size / (1 << 20):.0f} MiB each); those of k come in "
            f"{f'k / {at_once}' if at_once > 1 else 'k'} rounds, and computing waits for all but the last"
        )

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """[size] uint8, anywhere; and the staging memory."""
        self._returning, self._staging = (
            None,
            torch.empty(0),
        )  # the old memory goes before the new one comes
        self._staging = torch.empty(self.extra_bytes(layers), dtype=torch.uint8, device=device)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def release(self) -> None:
        self._returning, self._staging = None, self._staging.new_empty(0)

    def prepare(self, plan: TransferPlan, layer: LayerBuffer) -> None:
        _ = plan.replicated, plan.slots, plan.turns  # and what they are made of: the plan keeps it

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
        timed: bool = False,
    ) -> Transfer:
        """Begin a spAG: everything is posted now, and there when it is waited for."""
        device = homes[0][0].device
        watch = Stopwatch(device) if timed and self._can_time else None
        meeting = self.next_tag() if watch is not None else 0
        messages = self.batch(self.next_tag(), what="spAG", label=label)

        def steps() -> Iterator[None]:
            if watch is not None:
                self.meet(plan, device, tag=meeting, label=label)
                watch.mark("begin")
            for index, rank in plan.sends:
                for tensor in homes[index]:
                    messages.send(tensor.detach().contiguous().view(-1), rank)
            sizes = [tensor.numel() for tensor in homes[0]]
            for slot, rank in plan.receives:
                for part in slots[slot].split(sizes):
                    messages.receive(part, rank)
            messages.start()
            yield
            messages.finish()

        return Transfer(steps(), device, what="spAG", label=label, watch=watch)

    def meet(self, plan: TransferPlan, device: torch.device, *, tag: int, label: str) -> None:
        """Wait, on the current stream, until all ranks with a part in ``plan`` have come: each sends the others one
        byte."""
        others = {rank for copy in plan.copies for rank in (copy.home, copy.rank)}
        messages = self.batch(tag, what="spAG", label=label)
        for rank in sorted(others - {plan.rank}) if plan.rank in others else []:
            messages.send(torch.zeros(1, dtype=torch.uint8, device=device), rank)
            messages.receive(torch.empty(1, dtype=torch.uint8, device=device), rank)
        messages.start()
        messages.finish()

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS, in rounds of as many chunks as fit into the staging memory."""
        previous, self._returning = self._returning, None
        if previous is not None:
            previous.wait()
        steps = self._sum_in_rounds(plan, slots, homes, tag=self.next_tag(), label=label)
        self._returning = Transfer(steps, self._staging.device, what="spRS", label=label)
        return self._returning

    def _sum_in_rounds(
        self,
        plan: TransferPlan,
        slots: Sequence[Tensor],
        homes: HomeGradients,
        *,
        tag: int,
        label: str,
    ) -> Iterator[None]:
        """The steps of a spRS.

        Both ends of a message know its round (`TransferPlan.turns`), so that each round is complete in itself: with
        NCCL a batch ends when all of it has been matched.
        """
        if not plan.sends and not plan.receives:
            return
        elements, dtype, sends = slots[0].numel(), slots[0].dtype, plan.sends
        at_once = _arriving(elements, dtype)
        *staged, total = chunks_in(self._staging, at_once + 1, elements, dtype)
        rounds = 1 + max([(len(sends) - 1) // at_once, *(turn // at_once for turn in plan.turns)])
        for index in range(rounds):
            messages = self.batch(tag, what="spRS", label=label)
            for (slot, rank), turn in zip(plan.receives, plan.turns, strict=True):
                if turn // at_once == index:
                    messages.send(slots[slot], rank)
            arriving = sends[index * at_once : (index + 1) * at_once]
            for chunk, (_, rank) in zip(staged, arriving, strict=False):
                messages.receive(chunk, rank)
            messages.start()
            if index == (
                rounds - 1 if total.is_cuda else 0
            ):  # NCCL matches messages in order: none is left to `wait`
                yield
            messages.finish()
            for at, (chunk, (home, _)) in enumerate(
                zip(staged, arriving, strict=False), index * at_once
            ):
                if at == 0 or sends[at - 1][0] != home:
                    total.copy_(chunk)
                else:
                    total += chunk  # in order of the replicas' ranks, in every run
                if at + 1 == len(sends) or sends[at + 1][0] != home:
                    homes.add(home, total)

    def next_tag(self) -> int:
        """The number of a new transfer of the group, the same on all ranks: they start the same ones in the same order.

        Backends that know tags (gloo) tell transfers apart by it, so that one may go on while another has begun.
        """
        number = self._numbers[self.group] = self._numbers.get(self.group, 0) + 1
        return number % (1 << 30)

    def batch(self, tag: int, *, what: str, label: str) -> _Messages:
        """Messages of transfer ``tag`` that are posted together."""
        return _Messages(self, tag, f"{label}: {what}")


class _Messages:
    """Sends and receives that are posted together, each with its peer, so that a failed wait can say whose it was."""

    def __init__(self, transport: P2P, tag: int, name: str) -> None:
        self._group, self._timeout, self._tag, self._name = (
            transport.group,
            transport.timeout,
            tag,
            name,
        )
        self._ops: list[dist.P2POp] = []
        self._peers: list[
            tuple[str, int, int]
        ] = []  # ("send to" or "receive from", rank in the group, bytes)
        self._works: list[dist.Work] = []
        self._started = 0.0

    def send(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.isend, "send to", tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.irecv, "receive from", tensor, rank)

    def _add(
        self, op: Callable[..., dist.Work | None], what: str, tensor: Tensor, rank: int
    ) -> None:
        peer = dist.get_global_rank(self._group, rank)
        self._ops.append(dist.P2POp(op, tensor, peer, self._group, self._tag))
        self._peers.append((what, rank, tensor.nbytes))

    def start(self) -> None:
        """Post them."""
        self._started = time.monotonic()
        if self._ops:
            with self._peer_named(lambda: 0):
                self._works = dist.batch_isend_irecv(self._ops)
            if self._ops[0].tensor.is_cuda:
                under_way.note(self._works, self._describe())

    def finish(self) -> None:
        """Wait for all of them. On a GPU the stream waits."""
        done = 0
        with self._peer_named(lambda: done):
            for work in self._works:
                if self._ops[0].tensor.is_cuda:
                    work.wait()
                else:
                    work.wait(timeout=timedelta(seconds=self._timeout))
                done += 1

    def _describe(self) -> str:
        """Layer and transfer, this rank, and what it expects of which ranks."""
        bytes_by_peer: Counter[tuple[str, int]] = Counter()
        for what, rank, size in self._peers:
            bytes_by_peer[what, rank] += size
        parts = [
            f"{what} rank {rank} ({size} bytes)" for (what, rank), size in bytes_by_peer.items()
        ]
        more = f", and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
        ranks = f"rank {self._group.rank()} of {self._group.size()}"
        return f"{self._name}, {ranks} expected to {', '.join(parts[:NAMED])}{more}"

    @contextlib.contextmanager
    def _peer_named(self, done: Callable[[], int]) -> Iterator[None]:
        """An error says whose message failed."""
        try:
            yield
        except RuntimeError as error:
            what, peer, size = self._peers[min(done(), len(self._peers) - 1)]
            raise TransferError(
                f"{self._name} failed on rank {self._group.rank()} of {self._group.size()} after "
                f"{time.monotonic() - self._started:.1f} s (timeout {self._timeout:g} s), waiting to {what} rank "
                f"{peer} ({size} bytes): expected {len(self._peers)} messages, {done()} were seen. Rank {peer} died, "
                f"hangs, or did not take part. Cause: {error}"
            ) from error


def _arriving(elements: int, dtype: torch.dtype) -> int:
    """Gradients that arrive at a home at once."""
    return max(1, min(ARRIVING, ARRIVING_BYTES // LayerBuffer.aligned(elements, dtype)))
