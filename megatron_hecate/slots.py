"""Guests in memory: fetched weights, gathered gradients, and the autograd node that joins them to their homes.

One `Guests` holds one layer's guests of one iteration (lifetime ``iteration``):

    weights  sharded home --sparse_all_gather--> [slots, chunk]        once, before the first microbatch
    grads    every microbatch's backward adds to [slots, chunk] fp32
             --sparse_reduce_scatter--> home                            once, in the last microbatch's backward

Guests are plain tensors, no ``nn.Parameter``: DDP, the optimizer, checkpoints and parameter counts see homes only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_hecate.collectives import Route, sparse_all_gather, sparse_reduce_scatter
from megatron_hecate.plan.placement import Placement


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """How one expert's parameters lie end to end in a chunk.

    Args:
        shapes: shape of every parameter, in the order of the expert's module.
        fused: whether a GEMM adds this parameter's gradient straight into ``main_grad``
            (Megatron's ``gradient_accumulation_fusion``), and what autograd then carries is a placeholder.
    """

    shapes: tuple[torch.Size, ...]
    fused: tuple[bool, ...]

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    def views(self, chunk: Tensor) -> list[Tensor]:
        """The parameters in one ``chunk`` [elements], as views."""
        return [part.view(shape) for part, shape in zip(chunk.split(self.sizes), self.shapes, strict=True)]


class Guests:
    """The guests of one layer for one iteration, on this rank.

    Args:
        homes: the parameters of this rank's own experts, expert by expert.
        layout: how they form a chunk.
        placement: who is where; some rank has a guest.
        group: the FSSDP group.
        microbatches: backward passes after which the gradients go home; 1 sends them home with each.
        label: name of the layer in errors.
        timeout: seconds to wait for a peer.

    Raises:
        TransferError: when a peer dies or does not answer in time.
        ValueError: when some parameters of an expert are frozen and others are trained, or their dtypes differ.
    """

    def __init__(
        self,
        homes: Sequence[Sequence[Parameter]],
        layout: ChunkLayout,
        placement: Placement,
        group: dist.ProcessGroup,
        *,
        microbatches: int,
        label: str,
        timeout: float,
    ) -> None:
        trained = {p.requires_grad for expert in homes for p in expert}
        if len(trained) > 1:
            raise ValueError(f"{label}: some expert parameters are frozen and others are not; freeze all or none")
        dtypes = {p.dtype for expert in homes for p in expert}
        if len(dtypes) > 1:
            raise ValueError(f"{label}: expert parameters have dtypes {sorted(map(str, dtypes))}; FSSDP needs one")
        self.homes, self.layout, self.group, self.placement = homes, layout, group, placement
        self.route = Route.of(placement, group.rank())
        self.microbatches, self.label, self.timeout = microbatches, label, timeout
        self.backwards, self.computed = 0, False
        self.num_slots = placement.slots_per_rank - len(homes)
        self.weights = self._fetch(self.route)
        self.grads: Tensor | None = None

    def _fetch(self, route: Route) -> Tensor:
        """[guests, chunk] the weights that ``route`` brings here."""
        weights = [[p.detach() for p in expert] for expert in self.homes]
        return sparse_all_gather(weights, route, self.group, label=self.label, timeout=self.timeout)

    def add_late(self, placement: Placement) -> None:
        """Tier 2: become the guests of ``placement``, fetching only those that are new. Before any of them computes.

        Raises:
            TransferError: when a peer dies or does not answer in time.
        """
        assert not self.computed, f"{self.label}: guests cannot be replaced once they have computed"
        route = Route.of(placement, self.group.rank())
        late = Route.of(placement, self.group.rank(), beyond=self.placement)
        arrived = self._fetch(late)
        rows = [
            arrived[late.experts.index(e)] if e in late.experts else self.weights[self.route.experts.index(e)]
            for e in route.experts
        ]
        if route.experts != self.route.experts:  # also where a guest went and none came
            self.weights = torch.stack(rows) if rows else arrived
        self.placement, self.route = placement, route

    @property
    def num_guests(self) -> int:
        """Guests on this rank."""
        return len(self.route.experts)

    @property
    def chunks(self) -> list[Tensor]:
        """The weights in every slot: guests first, as their slots are filled from the lowest.

        A slot without a guest computes on zero rows, so that every rank runs the same graph: any memory will do.
        """
        empty = self.num_slots - self.num_guests
        return [*self.weights, *([self.weights.new_empty(self.weights.shape[1])] * empty if empty else [])]

    @property
    def unsent(self) -> int:
        """Microbatches whose gradients wait on this rank."""
        return self.backwards % self.microbatches

    def drop_unsent(self) -> None:
        """Forget gradients that wait: their iteration was given up."""
        self.backwards, self.grads = 0, None

    def materialize(self) -> list[list[Tensor]]:
        """The weights this rank computes with in one microbatch: homes first, then guests, each a list of parameters.

        All come out of one autograd node, so each home parameter gets exactly one gradient, and gets it after its
        guests' gradients arrived: DDP may reduce it at once.
        """
        self.computed = True
        flat = [p for expert in self.homes for p in expert]
        weights = list(_Materialize.apply(self, *flat))
        if any(self.layout.fused) and torch.is_grad_enabled():
            grads = self._main_grads()
            for weight, main_grad in zip(weights, grads, strict=True):
                if main_grad is not None:
                    weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
        parts = len(self.layout.shapes)
        return [weights[i : i + parts] for i in range(0, len(weights), parts)]

    def _main_grads(self) -> list[Tensor | None]:
        """Where a fused GEMM adds each weight's gradient: the home's own main_grad, or the guest's fp32 memory."""
        if self.grads is None:
            self.grads = self._wide_memory(self.num_slots).zero_()
        memory = [p.main_grad for expert in self.homes for p in expert]
        memory += [part for chunk in self.grads for part in self.layout.views(chunk)]
        fused = self.layout.fused * (len(self.homes) + self.num_slots)
        return [grad if f else None for grad, f in zip(memory, fused, strict=True)]

    def _wide_memory(self, num_chunks: int) -> Tensor:
        """Uninitialized [num_chunks, chunk], fp32 for bf16 weights: gradients are summed in it."""
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        return self.weights.new_empty(num_chunks, self.weights.shape[1], dtype=wide)

    def backward(self, home_grads: list[Tensor | None], guest_grads: list[Tensor | None]) -> list[Tensor | None]:
        """Take one microbatch's gradients; returns the gradients of the homes, complete after the last microbatch."""
        first = self.grads is None
        if first:
            self.grads = self._wide_memory(self.num_guests)
        parts = len(self.layout.shapes)
        for guest in range(self.num_guests):
            for part, total in enumerate(self.layout.views(self.grads[guest])):
                grad = guest_grads[guest * parts + part]
                if self.layout.fused[part]:
                    continue
                if not first:
                    total += 0 if grad is None else grad
                elif grad is None:
                    total.zero_()
                else:
                    total.copy_(grad)
        if any(self.layout.fused):
            for expert in self.homes:
                for p, fused in zip(expert, self.layout.fused, strict=True):
                    p.grad_added_to_main_grad |= fused
        self.backwards += 1
        return home_grads if self.unsent else self._send_home(home_grads)

    def _send_home(self, home_grads: list[Tensor | None]) -> list[Tensor | None]:
        sums = sparse_reduce_scatter(
            self.grads[: self.num_guests],
            self.route,
            self.group,
            label=self.label,
            timeout=self.timeout,
        )
        if any(self.layout.fused):  # a microbatch in flight may still add here
            self.grads.zero_()
        else:
            self.grads = None
        parts = len(self.layout.shapes)
        for home, chunk in zip(self.route.lent, sums, strict=True):
            for part, total in enumerate(self.layout.views(chunk)):
                at, param = home * parts + part, self.homes[home][part]
                grad = home_grads[at]
                main_grad = getattr(param, "main_grad", None)
                if main_grad is not None:  # fp32 as a rule: the sum would lose bits on its way through a bf16 .grad
                    main_grad += total
                    home_grads[at] = torch.zeros_like(param) if grad is None else grad
                else:
                    home_grads[at] = (total if grad is None else total + grad).to(param.dtype)
        return home_grads


class _Materialize(torch.autograd.Function):
    """Home parameters in, all physical experts' weights out; the backward takes guest gradients home."""

    @staticmethod
    def forward(ctx: Any, guests: Guests, *homes: Parameter) -> tuple[Tensor, ...]:
        ctx.guests, ctx.num_homes = guests, len(homes)
        ctx.set_materialize_grads(False)  # a weight without gradient gives None, not a tensor of zeros
        hosted = [view for chunk in guests.chunks for view in guests.layout.views(chunk)]
        if not any(guests.layout.fused):  # no gradient for nobody; a fused grouped GEMM wants one for every weight
            ctx.mark_non_differentiable(*hosted[guests.num_guests * len(guests.layout.shapes) :])
        return (*(p.view_as(p) for p in homes), *hosted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Dispatchers keep tensors of the last forward, and with them this node: it must not keep the guests.
        guests, ctx.guests = ctx.guests, None
        home_grads = guests.backward(list(grads[: ctx.num_homes]), list(grads[ctx.num_homes :]))
        return (None, *home_grads)
