"""What FSSDP knows of a converted layer, and of all layers of a model, between one forward and the next."""

from __future__ import annotations

import dataclasses
import sys
import weakref

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_hecate import seams
from megatron_hecate.agreement import assert_same
from megatron_hecate.config import HecateConfig
from megatron_hecate.device_quotas import DeviceQuotas, Source
from megatron_hecate.dispatcher import Columns, gather_loads, physical_dispatcher
from megatron_hecate.experts import PhysicalExperts
from megatron_hecate.metrics import LayerMetrics, imbalance
from megatron_hecate.observe import LoadMonitor
from megatron_hecate.plan import (
    LayerShape,
    Placement,
    Speeds,
    World,
    assert_valid,
    calibrate,
    fingerprint,
    plan_guests,
    split_quotas,
)
from megatron_hecate.schedule import IterationClock
from megatron_hecate.slots import Guests

# A layer without guests starts at a gain so much above the cost, and one with guests stops so much below it.
HYSTERESIS: float = 0.2


def splits_on_device(loads: Tensor) -> bool:
    """Whether quotas of these loads are computed by torch operations instead of the compiled host code."""
    return loads.is_cuda


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
        self.name = f"layer {layer.layer_number}"
        self.group: dist.ProcessGroup = layer.ep_group
        self.homes_only = Placement.initial(layer.config.num_moe_experts, self.group.size(), num_slots=config.slots)
        self.stock_dispatcher = layer.token_dispatcher
        self.physical_dispatcher = physical_dispatcher(layer.token_dispatcher, self.homes_only.slots_per_rank)
        self.experts = PhysicalExperts(layer.experts, self.homes_only.slots_per_rank)
        self.token_bytes = layer.config.hidden_size * self.experts.homes()[0][0].element_size()
        # all ranks whose tokens these experts see; with expert tensor parallelism, several per rank of the group
        self.sources: dist.ProcessGroup = self.stock_dispatcher.tp_ep_group
        self.source_rank = [n // self.stock_dispatcher.tp_size for n in range(self.sources.size())]
        self.placement = self.tier1 = self.homes_only
        self.guests: Guests | None = None
        self.calibrates = False  # whether the next forward is to be corrected

    def attach(self, model: ModelState, nodes: list[str]) -> None:
        """Join the model's layers; ``nodes`` names the machine of every rank of the job."""
        self.model = model
        own = [nodes[rank] for rank in dist.get_process_group_ranks(self.group)]
        self.world = World.from_names(own, model.speeds)
        self._source: Source | None = None
        self._routed: Placement | None = None  # what columns and device quotas were made for
        self._columns: Columns
        self._on_device: DeviceQuotas | None = None

    @property
    def shape(self) -> LayerShape:
        """Sizes for the cost model, with the running iteration's microbatches."""
        return self.experts.shape(self.token_bytes, microbatches=self.model.clock.microbatches or 1)

    def observe(self, routing_map: Tensor) -> None:
        """Count one microbatch's ``routing_map`` [T, E]."""
        self.model.monitor.count(self.index, routing_map.detach())
        self.model.clock.forwarded(self.index)

    def materialize(self, purpose: seams.Forward) -> Guests | None:
        """The guests this forward computes with; on the first of an iteration, planned and fetched.

        Evaluation runs without guests: its weights may be others (averages, for example) than those of training.
        """
        clock = self.model.clock
        if purpose is seams.Forward.OTHER:
            self.calibrates = False  # a forward that died before it could
            return None
        if purpose is seams.Forward.RECOMPUTED:
            if not clock.is_in(self.index):
                raise NotImplementedError(
                    f"{self.name} is recomputed in the backward, but its forward ran without gradients, where it looks "
                    "like evaluation; use Megatron's --recompute-granularity, or checkpoint(..., use_reentrant=False)"
                )
        elif clock.enter(self.index):
            self.guests = None
            self.placement = self.tier1 = self._plan()
            self.calibrates = self.config.late > 0
            if self.placement.num_guests:
                self.guests = self._fetch()
        return self.guests

    def _plan(self) -> Placement:
        """Tier 1. A layer without guests needs a clearer gain to start than one with guests to go on."""
        if self.model.forecast is None or not self.config.slots:
            return self.homes_only
        load = self.model.forecast[self.index, : self.homes_only.num_experts]
        shape, world = self.shape, self.world
        stickiness = 1 + HYSTERESIS if not self.tier1.num_guests else 1 - HYSTERESIS
        # an overlap degree says that so many fetches are hidden
        copy_tokens = 0.0 if self.config.overlap_degree is not None else shape.copy_tokens(world)
        plan = plan_guests(
            load,
            self.homes_only,
            world,
            overlap_degree=self.config.overlap_degree,
            copy_tokens=stickiness * copy_tokens,
            routing_tokens=stickiness * shape.routing_tokens(world),
        )
        self._check(plan)
        return plan

    def calibrate(self, loads: Tensor) -> Guests | None:
        """Tier 2, in the first forward of an iteration: the guests, corrected by the true ``loads`` [N, E].

        Guests that microbatches have computed with stay as they are until the iteration ends.
        """
        if not self.calibrates:
            return self.guests
        self.calibrates = False
        total = loads.sum(dim=0).cpu().numpy()  # the one wait of the host for the device
        shape = dataclasses.replace(self.shape, microbatches=1)
        placement = calibrate(
            total,
            self.placement,
            self.world,
            copy_tokens=shape.copy_tokens(self.world),
            most_late=self.config.late,
            routing_tokens=shape.routing_tokens(self.world),
        )
        self._check(placement)
        if placement is not self.placement:
            self.placement = placement
            if self.guests is None:
                self.guests = self._fetch()
            else:
                self.guests.add_late(placement)
        return self.guests

    def _fetch(self) -> Guests:
        seams.wait_for_params(self.model.layers[self.index].experts)
        guests = Guests(
            self.experts.homes(),
            self.experts.layout,
            self.placement,
            self.group,
            microbatches=self.model.clock.microbatches or 1,
            label=self.name,
            timeout=self.config.timeout,
        )
        self.model.guests.add(guests)
        return guests

    def gather_loads(self, routing_map: Tensor) -> Tensor:
        """[N, E] tokens of every source, on the device."""
        return gather_loads(routing_map, self.sources, label=self.name, timeout=self.config.timeout)

    def quotas(self, loads: Tensor) -> tuple[Tensor, Columns]:
        """[C] this source's tokens for every column, and where the columns lie.

        Every rank computes the same table from the same loads and takes its own row. On a GPU by operations whose
        result the host does not wait for; their reference is the compiled `split_quotas`, which is faster on a CPU.
        """
        if self._routed is not self.placement:
            self._routed = self.placement
            self._columns = Columns.of(self.placement, loads.device)
            self._on_device = None
            if splits_on_device(loads):
                if self._source is None:
                    own = self.sources.rank()
                    self._source = Source.on(loads.device, self.world, own=own, source_rank=self.source_rank)
                self._on_device = self._source.quotas(self.placement)
        if self._on_device is not None:
            return self._on_device.row(loads), self._columns
        only, source_rank = self.sources.rank(), self.source_rank
        row = split_quotas(loads.numpy(), self.placement, self.world, source_rank=source_rank, only=only)
        return torch.from_numpy(row.tokens[0]), self._columns

    def metrics(self) -> LayerMetrics | None:
        """Of the last finished iteration; ``None`` before there is one."""
        self.model.monitor.collect()
        last = self.model.monitor.history.last
        if last is None:
            return None
        load = last[self.index, : self.homes_only.num_experts]
        return LayerMetrics(
            layer=self.name,
            guests=self.placement.num_guests,
            late=int((self.placement.holders & ~self.tier1.holders).sum()),
            bypassed=self.config.slots > 0 and not self.placement.num_guests,
            routed=imbalance(load, self.homes_only, self.world),
            computed=imbalance(load, self.placement, self.world),
        )

    def _check(self, placement: Placement) -> None:
        """In Python's development mode (``python -X dev``): the plan is valid, and all ranks made the same."""
        if sys.flags.dev_mode:
            assert_valid(placement, num_slots=self.config.slots)
            assert_same(fingerprint(placement), self.group, label=self.name, timeout=self.config.timeout)


class ModelState:
    """What the converted layers of one model share on this rank: the load monitor and the iteration clock."""

    def __init__(self, layers: list[MoELayer], states: list[LayerState], speeds: Speeds) -> None:
        self.layers, self.speeds = layers, speeds
        self.forecast: np.ndarray | None = None  # [L, E] of the running iteration
        self.guests: weakref.WeakSet[Guests] = weakref.WeakSet()  # of any layer, as long as some backward may need them
        num_experts = max(state.homes_only.num_experts for state in states)
        self.monitor = LoadMonitor(len(layers), num_experts, states[0].sources, timeout=states[0].config.timeout)
        self.clock = IterationClock(
            len(layers),
            num_microbatches=seams.num_microbatches,
            on_begin=self._begin,
            on_forwards_done=self.monitor.start_reduce,
            drop_unsent=self._drop_unsent,
        )

    def _begin(self) -> None:
        self.monitor.finish_reduce()
        self.forecast = self.monitor.history.forecast()

    def _drop_unsent(self) -> list[tuple[str, int]]:
        waiting = [guests for guests in self.guests if guests.unsent]
        found = sorted((guests.label, guests.unsent) for guests in waiting)
        for guests in waiting:
            guests.drop_unsent()
        return found
