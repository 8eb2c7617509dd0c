"""Guests in memory: fetched weights, gathered gradients.

How long they live, and whose memory they use, is `memory`'s business; how autograd runs through them is `lend`'s.
Guests are plain tensors, no ``nn.Parameter``: DDP, the optimizer, checkpoints and parameter counts see homes only.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate import trace
from megatron_hecate.collectives import Fused, Route, start_gather, start_reduce
from megatron_hecate.lend import Before, ChunkLayout, Delivery, Lend, homes_of
from megatron_hecate.materialization import Materialization
from megatron_hecate.memory import Need, SlotMemory
from megatron_hecate.overlap import OverlapMeter
from megatron_hecate.plan.placement import Placement


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSlots:
    """The slots of one layer on this rank.

    Args:
        index: of the layer among the rank's.
        homes: looks up the parameters of this rank's own experts, expert by expert.
        layout: how they form a chunk.
        group: process group for transfers.
        memory: the rank's slot memory.
        ready: called before homes are read: makes sure that they hold this iteration's values.
        label: name of the layer in errors.
        timeout: seconds to wait for a peer.
    """

    index: int
    homes: Callable[[], list[list[Parameter]]]
    layout: ChunkLayout
    group: dist.ProcessGroup
    memory: SlotMemory
    ready: Callable[[], None]
    label: str
    timeout: float

    @property
    def need(self) -> Need:
        return self.memory.needs[self.index]

    def fused(self, what: Materialization, rows: list[Tensor], *, beyond: Placement | None = None) -> Fused | None:
        """What the fused transport needs to know beside the route, where it is used."""
        memory, need = self.memory, self.need
        if memory.sm is None:
            return None
        outbox = memory.outbox.chunks(need.homes, need.elements, need.dtype)
        return Fused(memory.sm, what.loans(beyond), rows, outbox, memory.relays(need, rows[0].dtype))

    def check(self) -> None:
        """Raises ValueError when some parameters are frozen and others are trained, or their dtypes differ."""
        homes = self.homes()
        if len({p.requires_grad for expert in homes for p in expert}) > 1:
            raise ValueError(f"{self.label}: some expert parameters are frozen and others are not; freeze all or none")
        dtypes = {p.dtype for expert in homes for p in expert}
        if dtypes != {self.need.dtype}:
            raise ValueError(
                f"{self.label}: expert parameters have dtypes {sorted(map(str, dtypes))}; FSSDP needs one, and keeps "
                f"to {self.need.dtype}, which they had in the first step"
            )


class Guests:
    """The guests of one layer on this rank: for one iteration, or for one microbatch, as their lifetime says.

    Args:
        slots: the layer's slots.
        what: who stands where; some rank has a guest.
        microbatches: backward passes after which the gradients go home; 1 sends them home with each.
        before_backward: called before the experts' backward.
        after_backward: called when these guests are not needed any more.
        meter: told of the transfer that fetches them, where it times copies.
    """

    def __init__(
        self,
        slots: LayerSlots,
        what: Materialization,
        *,
        microbatches: int = 1,
        before_backward: Callable[[Guests], None] | None = None,
        after_backward: Callable[[Guests], None] | None = None,
        meter: OverlapMeter | None = None,
    ) -> None:
        slots.check()
        self.slots, self.what, self.microbatches, self.label = slots, what, microbatches, slots.label
        self._before_backward, self._after_backward, self._meter = before_backward, after_backward, meter
        self.frame = slots.memory.weights(slots.index, label=slots.label)
        self.backwards, self.computed = 0, False

    @property
    def placement(self) -> Placement:
        return self.what.placement

    @property
    def layout(self) -> ChunkLayout:
        return self.slots.layout

    @property
    def num_guests(self) -> int:
        """Guests on this rank."""
        return len(self.what.rows)

    @property
    def unsent(self) -> int:
        """Microbatches whose gradients wait on this rank."""
        return self.backwards % self.microbatches

    def drop_unsent(self) -> None:
        """Forget gradients that wait: their iteration was given up."""
        self.backwards = 0

    def start(self) -> None:
        """Begin to fetch, unless they are here."""
        if self.frame.holds is not self.what:
            self.frame.hold(self.what)
            self._fetch(self.what.route)

    def _fetch(self, route: Route, beyond: Placement | None = None) -> None:
        slots = self.slots
        slots.ready()
        chunks = self._chunks()
        row_of = self.what.row_of[self.what.rank]
        timed = self._meter is not None and self._meter.times_copies
        self.frame.transfer = start_gather(
            slots.homes(),
            route,
            [chunks[row_of[e]] for e in route.experts],
            slots.group,
            fused=slots.fused(self.what, chunks, beyond=beyond),
            label=self.label,
            timeout=slots.timeout,
            timed=timed,
        )
        if timed:
            self._meter.follow(self.frame.transfer, max(len(route.sends), len(route.recvs)))

    def correct(self, what: Materialization, late: Route) -> None:
        """Tier 2: become ``what``, fetching only ``late``, the route of those that are new. Before any computes."""
        assert not self.computed, f"{self.label}: guests cannot be replaced once they have computed"
        self.start()
        self.frame.settle()
        before, self.what = self.what.placement, what
        self.frame.holds = what
        self._fetch(late, beyond=before)

    def wait(self) -> None:
        """Wait until their weights are here.

        Raises:
            TransferError: when a peer dies or does not answer in time.
            RuntimeError: when they were dropped.
        """
        if self.frame.holds is not self.what:
            raise RuntimeError(
                f"{self.label}: guests are used after they were dropped (lifetime {self.slots.memory.lifetime}); each "
                "forward needs its backward before the weights change"
            )
        self.frame.settle()

    def _chunks(self) -> list[Tensor]:
        need = self.slots.need
        return self.frame.chunks(need.slots, need.elements, need.dtype)

    def weights(self) -> list[Tensor]:
        """The chunk [elements] in every slot: guests first, as their slots are filled from the lowest.

        A slot without a guest computes on zero rows, so that every rank runs the same graph: any memory will do.
        """
        chunks = self._chunks()
        return [chunks[row] for row in (*self.what.rows, *self._empty_rows())]

    def _empty_rows(self) -> list[int]:
        return [row for row in range(self.slots.need.slots) if row not in self.what.rows]

    def _grad_chunks(self) -> list[Tensor]:
        need = self.slots.need
        return self.slots.memory.grads(self.slots.index).chunks(need.slots, need.elements, need.grad_dtype)

    def materialize(self, early: tuple[Delivery, list[Tensor]] | None = None) -> list[list[Tensor]]:
        """The weights this rank computes with in one microbatch: homes first, then guests, each a list of parameters.

        All come out of autograd nodes, so each home parameter gets exactly one gradient, and gets it after its guests'
        gradients arrived: DDP may reduce it at once. ``early`` is what `homes_of` gave before the attention.
        """
        self.start()
        self.wait()
        self.computed = True
        delivery, homes = early or homes_of(self.slots.homes(), self.layout)
        weights = list(Lend.apply(self, delivery, *homes))
        if any(self.layout.fused) and torch.is_grad_enabled():
            for weight, main_grad in zip(weights, self._main_grads(delivery), strict=True):
                if main_grad is not None:
                    weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
        parts = len(self.layout.shapes)
        return [weights[i : i + parts] for i in range(0, len(weights), parts)]

    def computed_by(self, output: Tensor) -> Tensor:
        """The experts' ``output``, with a node that readies guests and their gradients for the backward."""
        if not torch.is_grad_enabled():
            return output  # will be computed again, or never has a backward
        if not output.requires_grad:
            self._finish()  # frozen, and so is all before: no backward comes
            return output
        return Before.apply(self, output)

    def _finish(self) -> None:
        if self._after_backward is not None:
            self._after_backward(self)

    def _main_grads(self, delivery: Delivery) -> list[Tensor | None]:
        """Where a fused GEMM adds each weight's gradient: the home's own main_grad, or the guest's fp32 memory."""
        layout = self.layout
        memory = [p.main_grad for expert in delivery.homes for p in expert]
        chunks = self._grad_chunks()
        memory += [part for row in (*self.what.rows, *self._empty_rows()) for part in layout.views(chunks[row])]
        fused = layout.fused * (len(delivery.homes) + self.slots.need.slots)
        return [grad if f else None for grad, f in zip(memory, fused, strict=True)]

    def prepare_backward(self) -> None:
        """The experts' backward is about to run."""
        if self._before_backward is not None:
            self._before_backward(self)
        self.wait()
        self._backward_began = time.perf_counter()
        if not any(p.requires_grad for p in self.slots.homes()[0]):  # no gradient will say that the experts are done
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        elif not self.unsent:
            self.slots.memory.grads(self.slots.index).clear()
            if any(self.layout.fused):
                for chunk in self._grad_chunks():
                    chunk.zero_()

    def backward(self, delivery: Delivery, guest_grads: Sequence[Tensor | None]) -> None:
        """Take one microbatch's gradients of the guests; the last one's sends them home."""
        trace.add("experts backward", self.label, self._backward_began)
        layout, first = self.layout, not self.unsent
        parts, chunks = len(layout.shapes), self._grad_chunks()
        for guest, row in enumerate(self.what.rows):
            for part, total in enumerate(layout.views(chunks[row])):
                grad = guest_grads[guest * parts + part]
                if layout.fused[part]:
                    continue
                if not first:
                    total += 0 if grad is None else grad
                elif grad is None:
                    total.zero_()
                else:
                    total.copy_(grad)
        for expert in delivery.homes:
            for p, fused in zip(expert, layout.fused, strict=True):
                if fused:
                    p.grad_added_to_main_grad = True
        self.backwards += 1
        if not self.unsent:
            self._send_home(delivery, chunks)
            self._finish()

    def _send_home(self, delivery: Delivery, chunks: list[Tensor]) -> None:
        slots, memory = self.slots, self.slots.memory
        memory.staging.settle()  # of another layer: this one's comes later in the backward
        staged = 0 if memory.sm is not None else slots.need.staged + 1
        rows = memory.staging.chunks(staged, slots.need.elements, slots.need.grad_dtype)
        delivery.lent, delivery.frame = self.what.route.lent, memory.grads(slots.index)
        delivery.label, delivery.began = self.label, time.perf_counter()
        transfer = start_reduce(
            [chunks[row] for row in self.what.rows],
            self.what.route,
            rows,
            delivery.add,
            slots.group,
            fused=slots.fused(self.what, chunks),
            totals=delivery.totals,
            label=self.label,
            timeout=slots.timeout,
        )
        memory.staging.transfer = delivery.frame.transfer = transfer
        delivery.frame.given_up = delivery.give_up
