"""The ``sm`` transport: spAG and spRS by our kernels, over memory that peers can read (`peers`).

The same steps as `p2p`, for the same routes: generators that `transfer.Transfer` runs. The receiver pulls, so nothing
is sent; a home sums its guests' gradients in one pass, into fp32 main gradients where there are some.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megatron_hecate import kernel, schedule
from megatron_hecate.kernel import Extent, Wire
from megatron_hecate.p2p import TransferError
from megatron_hecate.peers import Peers
from megatron_hecate.schedule import Loan, Place, Schedule

REFRESH: int = 1 << 30  # steps after which all ranks tell each other, lest a counter fall behind by half its range


class Sm:
    """Transfers between the ranks of one group, in the order in which all of them start them.

    Args:
        peers: their memory.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._begin = 1  # more than what the counters stand at
        # CPU ranks: a thread that runs transfers one after the other, as a stream does
        self.queue = None if peers.device.type == "cuda" else ThreadPoolExecutor(1, "fssdp transfers")

    def gather(
        self,
        homes: Sequence[Sequence[Tensor]],
        loans: Sequence[Loan],
        outbox: Sequence[Tensor],
        slots: Sequence[Tensor],
        *,
        label: str,
        timeout: float,
    ) -> Iterator[None]:
        """The steps of spAG.

        Args:
            homes: the parameters of each own expert.
            loans: of all ranks; ``lent`` counts own experts, ``guest`` rows.
            outbox: memory [chunk] for each own expert, in the arena.
            slots: the rows [chunk] of the layer's frame, in the arena, at the same place on all ranks.
            label: name of the layer.
            timeout: seconds per wait.
        """

        def memory(place: Place) -> list[Extent]:
            if place.memory == "home":
                return [(t.data_ptr(), t.numel()) for t in homes[place.index]]
            return self._extent({"outbox": outbox, "slot": slots}[place.memory][place.index], place.rank)

        for home in {loan.lent for loan in loans if loan.home == self._rank}:
            if not all(t.is_contiguous() for t in homes[home]):
                raise ValueError(f"{label}: parameters of own expert {home} are not contiguous")
        chunk = sum(t.numel() for t in homes[0])
        plan = schedule.gather(loans, self._rank, ranks=len(self.peers.bases), elements=chunk)
        wire = Wire(homes[0][0].element_size())
        return self._run("fssdp_gather", plan, memory, wire, label=label, timeout=timeout)

    def reduce(
        self,
        grads: Sequence[Tensor],
        loans: Sequence[Loan],
        totals: Callable[[int], Sequence[Tensor] | None],
        add: Callable[[int, Tensor], None],
        *,
        label: str,
        timeout: float,
    ) -> Iterator[None]:
        """The steps of spRS.

        Args:
            grads: the rows [chunk] of the layer's frame for gradients, fp32 and in the arena, at the same place on all
                ranks. They are used up: rows may hold parts of sums afterwards.
            loans, label, timeout: as `gather`.
            totals: looks up the fp32 memory, tensor by tensor, to which the sum for an own expert is added.
            add: called with an own expert and the sum [chunk], where there is no such memory.
        """
        own = {loan.lent for loan in loans if loan.home == self._rank}
        into = {home: totals(home) for home in own}
        apart = {home: torch.zeros_like(grads[0]) for home in sorted(own) if into[home] is None}

        def memory(place: Place) -> list[Extent]:
            if place.memory != "total":
                return self._extent(grads[place.index], place.rank)
            found = into[place.index]
            return [(t.data_ptr(), t.numel()) for t in ([apart[place.index]] if found is None else found)]

        plan = schedule.reduce(loans, self._rank, ranks=len(self.peers.bases), elements=grads[0].numel())
        steps = self._run("fssdp_reduce", plan, memory, Wire(4), label=label, timeout=timeout)

        def run() -> Iterator[None]:
            yield from steps
            for home, total in apart.items():
                add(home, total)

        return run()

    @property
    def _rank(self) -> int:
        return self.peers.group.rank()

    def _extent(self, tensor: Tensor, rank: int) -> list[Extent]:
        return [(self.peers.address(tensor, rank), tensor.numel())]

    def _run(
        self, name: str, plan: Schedule, memory: kernel.Extents, wire: Wire, *, label: str, timeout: float
    ) -> Iterator[None]:
        begin = self._begin
        self._begin += len(plan.steps) + 1
        if begin // REFRESH != self._begin // REFRESH:
            plan = dataclasses.replace(plan, peers=frozenset(range(len(self.peers.bases))) - {self._rank})
        if not plan.peers:
            return iter(())
        program = kernel.program(
            plan,
            memory,
            self.peers.signals,
            wire=wire,
            sums=name == "fssdp_reduce",
            rank=self._rank,
            begin=begin,
            timeout=timeout,
        )

        def run() -> Iterator[None]:
            start = time.monotonic()
            if not self.peers.failed:
                at = torch.empty(len(program), dtype=torch.uint8, device=self.peers.device)
                kernel.relocate(program, at.data_ptr())
                self.peers.run(name, program, at)
            if self.peers.failed:
                steps = {peer: self.peers.steps_of(peer, since=begin) for peer in sorted(plan.peers)}
                last = min(steps, key=steps.__getitem__)  # others may wait for it as well
                raise TransferError(
                    f"{label}: {name} failed on rank {self._rank} of {len(self.peers.bases)} after "
                    f"{time.monotonic() - start:.1f} s (timeout {timeout:g} s): expected rank {last} to finish "
                    f"{len(plan.steps)} steps, {max(0, steps[last])} were seen. Rank {last} died, hangs, or did not "
                    "take part, in this transfer or in one before."
                )
            yield

        return run()
