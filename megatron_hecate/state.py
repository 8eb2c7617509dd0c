"""What FSSDP knows of a converted layer between one forward and the next: its plan, its guests, what is in flight."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_hecate import seams, trace
from megatron_hecate.agreement import assert_same
from megatron_hecate.config import HecateConfig
from megatron_hecate.dispatcher import physical_dispatcher
from megatron_hecate.experts import PhysicalExperts
from megatron_hecate.lend import Delivery, homes_of
from megatron_hecate.materialization import Materialization
from megatron_hecate.memory import LIFETIMES, Need
from megatron_hecate.metrics import LayerMetrics
from megatron_hecate.model import ModelState
from megatron_hecate.plan import LayerShape, Placement, World, assert_valid, calibrate, fingerprint, plan_guests
from megatron_hecate.quotas import LayerQuotas
from megatron_hecate.slots import Guests, LayerSlots
from megatron_hecate.transports import TransferGroups

# A layer without guests starts at a gain so much above the cost, and one with guests stops so much below it.
HYSTERESIS: float = 0.2
# With guests, it looks at other numbers of them in one of so many iterations: that takes several times as long.
RECONSIDER: int = 4


class LayerState:
    """What FSSDP knows of one converted layer on this rank.

    Args:
        layer: Megatron's layer, not yet converted.
        index: of the layer among this rank's.
        config: the settings.

    Raises:
        TypeError, ValueError: for a layer that cannot be converted.
    """

    def __init__(self, layer: MoELayer, index: int, config: HecateConfig) -> None:
        self.index, self.config = index, config
        self.module, self.layer_config = layer.experts, layer.config
        self.name = f"layer {layer.layer_number}"
        self.group: dist.ProcessGroup = layer.ep_group
        self.homes_only = Placement.initial(layer.config.num_moe_experts, self.group.size(), num_slots=config.slots)
        self.stock_dispatcher = layer.token_dispatcher
        self.physical_dispatcher = physical_dispatcher(layer.token_dispatcher, self.homes_only.slots_per_rank)
        self.experts = PhysicalExperts(layer.experts, self.homes_only.slots_per_rank)
        self.domains: tuple[int, ...] = (self.group.size(),)  # sizes of the group's NVLink domains, once known
        self.token_bytes = layer.config.hidden_size * self.experts.homes()[0][0].element_size()
        self.placement = self.tier1 = self.homes_only
        self.guests: Guests | None = None  # of the coming or running forward
        self.early: tuple[Delivery, list[Tensor]] | None = None  # homes of the running forward, before its attention
        self.calibrates = False  # whether the next forward is to be corrected
        self._what: Materialization | None = None  # of this iteration; None without guests
        self.planned = -1  # the last iteration it was planned in,
        self._begun, self._prepared = -1, False  # and prepared in
        self._plans = index  # made so far, counted from there: neighbours look at all in different iterations
        # guests of the microbatches whose backward has not run, oldest first: Megatron's schedules keep that order
        self._in_flight: deque[Guests | None] = deque()

    def attach(self, model: ModelState, nodes: list[str], transfers: TransferGroups) -> None:
        """Join the model's layers. ``nodes`` names the machine of every rank of the job; ``transfers`` are for copies
        between the ranks of the FSSDP group."""
        self.model, self.transfers = model, transfers
        own = [nodes[rank] for rank in dist.get_process_group_ranks(self.group)]
        self.world = World.from_names(own, model.speeds)
        self.quotas = LayerQuotas(self.stock_dispatcher, self.world, label=self.name, timeout=self.config.timeout)
        self._slots: LayerSlots | None = None

    @property
    def shape(self) -> LayerShape:
        """Sizes for the cost model, with the running iteration's microbatches."""
        microbatches = self.model.clock.microbatches or 1
        shape = self.experts.shape(self.token_bytes, microbatches=microbatches)
        lifetime = LIFETIMES[self.config.lifetime]
        return dataclasses.replace(
            shape, fetches=max(1, lifetime.fetches * microbatches), returns=max(1, lifetime.returns * microbatches)
        )

    def observe(self, routing_map: Tensor) -> None:
        """Count one microbatch's ``routing_map`` [T, E]."""
        self.model.monitor.count(self.index, routing_map.detach())
        self.model.clock.forwarded(self.index)

    def look_ahead(self, purpose: seams.Forward) -> None:
        """The attention before this layer is about to run: begin to fetch this layer's guests and the next ones'."""
        if purpose is seams.Forward.RECOMPUTED:
            if not self._is_known():
                return  # `materialize` says so
            self.fetch_again()
        elif purpose is seams.Forward.MICROBATCH:
            first = self.model.clock.enter(self.index)
            if first:
                self.model.meter.attention(self.index, next(self.module.parameters()).device)
            self.model.prepare(self.index, begins=first)
        guests = self._guests_of(purpose)
        self.early = None
        if guests is not None and torch.is_grad_enabled():
            self.early = homes_of(self.experts.homes(), self.experts.layout)

    def _guests_of(self, purpose: seams.Forward) -> Guests | None:
        """Those this forward computes with."""
        if purpose is seams.Forward.OTHER:
            return None
        if purpose is seams.Forward.RECOMPUTED and self.config.lifetime != "iteration":
            return self._in_flight[0]
        return self.guests

    def materialize(self, purpose: seams.Forward) -> Guests | None:
        """The guests this forward computes with; on the first of an iteration, planned (or before) and fetched.

        Evaluation runs without guests: its weights may be others (averages, for example) than those of training.
        """
        if purpose is seams.Forward.OTHER:
            self.calibrates = False  # a forward that died before it could
        elif purpose is seams.Forward.RECOMPUTED:
            if not self._is_known():
                raise NotImplementedError(
                    f"{self.name} is recomputed in the backward, but its forward ran without gradients, where it looks "
                    "like evaluation; use Megatron's --recompute-granularity, or checkpoint(..., use_reentrant=False)"
                )
            if self._in_flight and self._in_flight[0] is None:
                self._in_flight.popleft()  # stock code runs its backward, and does not tell
                return None
        else:
            self.model.clock.enter(self.index)
            self.prepare()
            self._prepared = False
        return self._guests_of(purpose)

    def _is_known(self) -> bool:
        """Whether a recomputed forward was seen before, as a microbatch's."""
        in_flight = self.config.lifetime == "iteration" or bool(self._in_flight)
        return in_flight and self.model.clock.has_forwarded(self.index)

    def plan(self) -> None:
        """Choose the guests of the running iteration."""
        with trace.span("plan", self.name):
            self.placement = self.tier1 = self._check(self._plan())
        self._what = Materialization.of(self.placement, self.group.rank()) if self.placement.num_guests else None
        self.planned = self.model.clock.iteration

    def prepare(self) -> None:
        """Have the guests of the coming microbatch on their way."""
        if self._prepared:
            return
        self.model.plan(self.index)
        self._prepared = True
        anew = self._begun != self.model.clock.iteration or self.config.lifetime != "iteration"
        self._begun = self.model.clock.iteration
        self.calibrates = anew and self.config.late > 0
        if anew:
            self.guests = None if self._what is None else self._host(self._what)

    def _host(self, what: Materialization) -> Guests:
        """Begin to fetch ``what``, for this microbatch or for all of the iteration."""
        per_iteration = self.config.lifetime == "iteration"
        try:
            guests = Guests(
                self._layer_slots(),
                what,
                microbatches=(self.model.clock.microbatches or 1) if per_iteration else 1,
                before_backward=self.model.before_backward if self.config.lifetime == "layer" else None,
                after_backward=None if per_iteration else self._after_backward,
                meter=self.model.meter,
            )
        except RuntimeError:
            self.model.clock.weights_changed()  # a loop that catches this begins anew, with all frames free
            raise
        self.model.guests.add(guests)
        guests.start()
        return guests

    def _layer_slots(self) -> LayerSlots:
        memory = self.model.memory()
        if self._slots is None or self._slots.memory is not memory:
            self._slots = LayerSlots(
                index=self.index,
                homes=self.experts.homes,
                layout=self.experts.layout,
                group=self.transfers.everyone,
                memory=memory,
                ready=lambda: seams.wait_for_params(self.module),
                label=self.name,
                timeout=self.config.timeout,
            )
        return self._slots

    def _after_backward(self, guests: Guests) -> None:
        if guests in self._in_flight:
            while self._in_flight.popleft() is not guests:
                pass
        guests.slots.memory.free(guests.frame)

    def fetch_again(self) -> None:
        """The backward comes near: begin to fetch the oldest microbatch's guests, unless they are here."""
        if self._in_flight and self._in_flight[0] is not None:
            self._in_flight[0].start()

    def give_up(self) -> None:
        """Forget microbatches of an iteration that ended without their backward."""
        self._in_flight.clear()
        self.guests = self._what = self.early = None
        self._prepared = False

    @property
    def need(self) -> Need:
        """Of slot memory, for the parameters as they are now."""
        homes = self.experts.homes()
        elements = sum(p.numel() for p in homes[0])
        return Need(self.config.slots, elements, homes[0][0].dtype, homes=len(homes), domains=self.domains)

    def _plan(self) -> Placement:
        """Tier 1. A layer without guests needs a clearer gain to start than one with guests to go on."""
        if self.model.forecast is None or not self.config.slots:
            return self.homes_only
        self._plans += 1
        num_experts = self.homes_only.num_experts
        shape, world = self.shape, self.world
        stickiness = 1 + HYSTERESIS if not self.tier1.num_guests else 1 - HYSTERESIS
        copy_tokens, hidden = shape.copy_tokens(world), 0
        if self.config.overlap_degree is not None:
            copy_tokens = 0.0  # so many are hidden, and there are never more
        elif not self.layer_config.deterministic_mode:  # times differ from run to run
            hidden = self.model.meter.degree(shape.fetch_seconds(world))
        return plan_guests(
            self.model.forecast[self.index, :num_experts],
            self.homes_only,
            world,
            scenarios=partial(self.model.monitor.history.scenarios, self.index, num_experts),
            previous=self.tier1,
            overlap_degree=self.config.overlap_degree,
            copy_tokens=stickiness * copy_tokens,
            hidden=hidden,
            contention=world.speeds.contention,
            routing_tokens=stickiness * shape.routing_tokens(world),
            reconsider=self._plans % RECONSIDER == 0,
        )

    def calibrate(self, loads: Tensor) -> Guests | None:
        """Tier 2, in the first forward these guests are for: corrected by the true ``loads`` [N, E].

        Guests that microbatches have computed with stay as they are until the iteration ends.
        """
        if not self.calibrates:
            return self.guests
        self.calibrates = False
        total = loads.sum(dim=0).cpu().numpy()  # the one wait of the host for the device
        shape, speeds = dataclasses.replace(self.shape, microbatches=1, fetches=1, returns=1), self.world.speeds
        placement = calibrate(
            total,
            self.placement,
            self.world,
            copy_tokens=shape.copy_tokens(self.world, speeds.intra),
            across_tokens=shape.copy_tokens(self.world, speeds.inter) if self.config.costs is not None else None,
            most_late=self.config.late,
            routing_tokens=shape.routing_tokens(self.world),
        )
        if self._check(placement) is not self.placement:
            self.placement = placement
            if self.guests is None or self._what is None:
                self._what = Materialization.of(self.placement, self.group.rank())
                self.guests = self._host(self._what)
            else:
                self._what, late = self._what.corrected(placement)
                self.guests.correct(self._what, late)
        return self.guests

    def computes(self, guests: Guests | None) -> None:
        """A microbatch's forward goes on with ``guests``; its backward will come."""
        self.model.meter.routed(self.index)
        if self.config.lifetime != "iteration":
            self._in_flight.append(guests)

    def metrics(self) -> LayerMetrics | None:
        """Of the last finished iteration; ``None`` before there is one."""
        self.model.monitor.collect()
        last = self.model.monitor.history.last
        if last is None:
            return None
        load = last[self.index, : self.homes_only.num_experts]
        bypassed = self.config.slots > 0 and not self.placement.num_guests
        return LayerMetrics.of(self.name, load, self.tier1, self.placement, self.world, bypassed=bypassed)

    def _check(self, placement: Placement) -> Placement:
        """In Python's development mode (``PYTHONDEVMODE=1``): the plan is valid, and all ranks made the same."""
        if sys.flags.dev_mode:
            assert_valid(placement, num_slots=self.config.slots)
            assert_same(fingerprint(placement), self.group, label=self.name, timeout=self.config.timeout)
        return placement
