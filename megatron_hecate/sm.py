"""The ``sm`` transport: spAG and spRS by our kernels, over memory that peers can read (`peers`).

The same steps as `p2p`, for the same routes: generators that `transfer.Transfer` runs. The receiver pulls, so nothing
is sent; a home sums its guests' gradients in one pass, into fp32 main gradients where there are some. Between NVLink
domains stripes travel by `p2p` (`hierarchy`). Transport ``ce`` is the same, but copies of a spAG are made by the GPU's
copy engines.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate import hierarchy, kernel, launch
from megatron_hecate.hierarchy import Crossing, Domains, Leg
from megatron_hecate.kernel import Extent, Wire
from megatron_hecate.p2p import Batches, TransferError
from megatron_hecate.peers import Peers, signed
from megatron_hecate.schedule import Loan, Place, Schedule
from megatron_hecate.transfer import Queue

REFRESH: int = 1 << 30  # steps after which all ranks tell each other, lest a counter fall behind by half its range
WATCHED: float = 0.1  # seconds between two looks for a failure on a GPU
REMEMBERED: int = 1024  # transfers that a failure can name
PLANS: int = 512  # whose legs are kept: two per layer are in use

Memory = Callable[[Place], Sequence[Tensor]]  # the tensors of a place, in this rank's memory


class Sm:
    """Transfers between the ranks of one group, in the order in which all of them start them.

    Args:
        peers: the memory of this rank's domain.
        group: all ranks.
        domains: NVLink domains, in ranks of the group; every rank is in one.
        copy_engines: whether they make the copies of a spAG.
    """

    def __init__(self, peers: Peers, group: dist.ProcessGroup, domains: Domains, *, copy_engines: bool = False) -> None:
        self.peers, self.group, self._copy_engines = peers, group, copy_engines
        self.domains = tuple(map(tuple, domains))
        self._begin = 1  # more than what the counters stand at
        self._begun: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        on_gpu = peers.device.type == "cuda"
        # CPU ranks: a thread that runs transfers one after the other, as a stream does
        self.queue = None if on_gpu else Queue("fssdp transfers")
        self._said = False
        if on_gpu:  # what CUDA says of a kernel that gave up names nobody
            watch = threading.Thread(target=_watch, args=(weakref.ref(self),), name="fssdp watch", daemon=True)
            watch.start()
            atexit.register(_look, weakref.ref(self))  # the process may end before the next look

    def gather(
        self,
        homes: Sequence[Sequence[Tensor]],
        loans: Sequence[Loan],
        outbox: Sequence[Tensor],
        slots: Sequence[Tensor],
        relays: Sequence[Tensor] = (),
        *,
        label: str,
        timeout: float,
    ) -> Iterator[None]:
        """The steps of spAG.

        Args:
            homes: the parameters of each own expert; they must live until the transfer is over.
            loans: of all ranks; ``lent`` counts own experts, ``guest`` rows.
            outbox: memory [chunk] for each own expert, in the arena.
            slots: the rows [chunk] of the layer's frame, in the arena, at the same place on all ranks.
            relays: memory for stripes (`hierarchy.width`) of `hierarchy.relays`, likewise; with several domains.
            label: name of the layer.
            timeout: seconds per wait.
        """
        for home in {loan.lent for loan in loans if loan.home == self.peers.rank}:
            if not all(t.is_contiguous() for t in homes[home]):
                raise ValueError(f"{label}: parameters of own expert {home} are not contiguous")

        def memory(place: Place) -> Sequence[Tensor]:
            if place.memory == "home":
                return homes[place.index]
            return ({"outbox": outbox, "slot": slots, "relay": relays}[place.memory][place.index],)

        chunk = sum(t.numel() for t in homes[0])
        legs = _legs(hierarchy.gather, tuple(loans), self.peers.rank, self.domains, chunk)
        return self._run(legs, memory, Wire(homes[0][0].element_size()), label=label, timeout=timeout)

    def reduce(
        self,
        grads: Sequence[Tensor],
        loans: Sequence[Loan],
        totals: Callable[[int], Sequence[Tensor] | None],
        add: Callable[[int, Tensor], None],
        relays: Sequence[Tensor] = (),
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
            relays: as in `gather`, fp32.
        """
        own = {loan.lent for loan in loans if loan.home == self.peers.rank}
        into = {home: totals(home) for home in own}
        apart = {home: torch.zeros_like(grads[0]) for home in sorted(own) if into[home] is None}

        def memory(place: Place) -> Sequence[Tensor]:
            if place.memory == "total":
                found = into[place.index]
                return (apart[place.index],) if found is None else found
            return ((relays if place.memory == "relay" else grads)[place.index],)

        if grads[0].dtype is not torch.float32:
            raise ValueError(f"{label}: gradients of {grads[0].dtype} cannot be summed by our kernels; use p2p")
        legs = _legs(hierarchy.reduce, tuple(loans), self.peers.rank, self.domains, grads[0].numel())
        steps = self._run(legs, memory, Wire(4, sums=True), label=label, timeout=timeout)

        def run() -> Iterator[None]:
            yield from steps
            for home, total in apart.items():
                if total.is_cuda:
                    total.record_stream(torch.cuda.current_stream())
                add(home, total)

        return run()

    def _run(self, legs: Sequence[Leg], memory: Memory, wire: Wire, *, label: str, timeout: float) -> Iterator[None]:
        what = "spRS" if wire.sums else "spAG"
        if self.peers.device.type == "cuda" and self.peers.failed:
            raise TransferError(self.explain())
        batches = Batches(self.group, label=label, timeout=timeout) if len(legs) > 1 else None
        runs = []
        for leg in legs:
            if isinstance(leg, Crossing):
                runs.append(_cross(leg, memory, batches, what))
            else:
                runs.append(self._inside(leg, memory, wire, label=f"{label}: {what}", timeout=timeout))

        def run() -> Iterator[None]:
            for steps in runs:
                yield from steps

        return run()

    def _inside(self, plan: Schedule, memory: Memory, wire: Wire, *, label: str, timeout: float) -> Iterator[None]:
        """The steps of a leg inside the domain."""
        begin = self._begin
        self._begin += len(plan.steps) + 1
        if begin // REFRESH != self._begin // REFRESH:
            plan = dataclasses.replace(plan, peers=frozenset(self.peers.ranks) - {self.peers.rank})
        if not plan.peers and not any(plan.steps):
            return iter(())
        expected = f"to finish {len(plan.steps)} steps"
        self._begun.append((begin, f"{label} failed (timeout {timeout:g} s): expected rank {{peer}} {expected}"))

        def extents(place: Place) -> list[Extent]:
            if place.memory in ("home", "total"):
                return [(t.data_ptr(), t.numel()) for t in memory(place)]
            return [(self.peers.address(t, place.rank), t.numel()) for t in memory(place)]

        program = kernel.program(
            plan, extents, self.peers.signals, wire=wire, rank=self.peers.rank, begin=begin, timeout=timeout
        )

        def run() -> Iterator[None]:
            start = time.monotonic()
            if not self.peers.failed:
                at = torch.empty(len(program), dtype=torch.uint8, device=self.peers.device)
                kernel.relocate(program, at.data_ptr())
                if self._copy_engines and not wire.sums:
                    launch.run_by_copy_engines(program, at, stopped=lambda: self.peers.failed)
                else:
                    launch.run("fssdp_reduce" if wire.sums else "fssdp_gather", program, at)
            if self.peers.failed:
                if self.peers.device.type == "cuda" or not plan.peers:
                    raise TransferError(self.explain())
                steps = {peer: self.peers.steps_of(peer, since=begin) for peer in sorted(plan.peers)}
                last = min(steps, key=steps.__getitem__)  # others may wait for it as well
                text = (
                    f"{label} failed on rank {self.peers.rank} of {self.group.size()} after "
                    f"{time.monotonic() - start:.1f} s (timeout {timeout:g} s): expected rank {last} {expected}, "
                    f"{max(0, steps[last])} were seen. Rank {last} died, hangs, or did not take part, in this transfer "
                    "or in one before."
                )
                self._say(text)  # whoever waits for it may be stuck elsewhere
                raise TransferError(text)
            yield

        return run()

    def _say(self, text: str) -> None:
        """On stderr, once."""
        if not self._said:
            self._said = True
            print(f"FSSDP: {text}", file=sys.stderr, flush=True)

    def look(self) -> bool:
        """Whether a kernel gave up; says why, the first time."""
        if self.peers.failed:
            self._say(self.explain())
        return self.peers.failed

    def explain(self) -> str:
        """What the failure on record says."""
        record = self.peers.failure
        assert record is not None
        peer, seen = self.peers.ranks[int(record["peer"])], signed(int(record["seen"]))
        known = "a transfer failed: expected rank {peer}"
        for begin, text in self._begun:
            if begin % 2**32 == int(record["begin"]):
                known = text
        return (
            f"rank {self.peers.rank} of {self.group.size()}: {known.format(peer=peer)}; it waited for step "
            f"{int(record['expected'])}, {max(0, seen)} were seen. Rank {peer} died, hangs, or did not take part."
        )


@functools.lru_cache(maxsize=PLANS)
def _legs(build: Callable, loans: tuple[Loan, ...], rank: int, domains: Domains, elements: int) -> tuple[Leg, ...]:
    """A plan's legs, which its microbatches share."""
    return build(loans, rank, domains=domains, elements=elements)


def _cross(leg: Crossing, memory: Memory, batches: Batches, what: str) -> Iterator[None]:
    """The steps of a leg between domains."""
    batch = batches.next(what)

    def stripe(place: Place, begin: int, end: int) -> Tensor:
        (tensor,) = memory(place)
        return tensor[begin - place.begin : end - place.begin]

    for part in leg.sends:
        batch.send(stripe(part.at, part.begin, part.end), part.rank)
    for part in leg.recvs:
        batch.recv(stripe(part.at, part.begin, part.end), part.rank)

    def run() -> Iterator[None]:
        batch.start()
        batch.finish()
        yield

    return run()


def _watch(sm: weakref.ref[Sm]) -> None:
    """Say on stderr why a kernel gave up, as soon as it has: whoever uses CUDA next only hears that one did."""
    while not _look(sm):
        time.sleep(WATCHED)


def _look(sm: weakref.ref[Sm]) -> bool:
    """Whether there is nothing more to wait for."""
    seen = sm()
    return seen is None or seen.look()
