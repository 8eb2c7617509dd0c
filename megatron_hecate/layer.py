"""The hook that turns MoE layers into FSSDP layers, and the layer: one iteration on one screen.

observe      route()        count this microbatch's tokens per expert
materialize  route()        first forward of an iteration: plan from the forecast, fetch guests
route        preprocess()   true loads -> quotas -> every token gets a holder
dispatch, experts, combine  Megatron's own, over physical experts
backward     slots.Guests   the last microbatch takes the guests' gradients home
step         Megatron's own, on homes
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from megatron_hecate import seams
from megatron_hecate.agreement import agree
from megatron_hecate.config import HecateConfig
from megatron_hecate.dispatcher import gather_loads, physical_dispatcher, to_physical
from megatron_hecate.experts import FSSDPExperts, PhysicalExperts
from megatron_hecate.observe import LoadMonitor
from megatron_hecate.plan import Placement, World, plan_guests, split_quotas
from megatron_hecate.schedule import IterationClock
from megatron_hecate.slots import Guests

Chunks = list[Module]


class FSSDPLayer:
    """Mixin in front of ``MoELayer``."""

    fssdp: LayerState

    def route(self, hidden_states: Tensor, *args: Tensor | None, **kwargs: Tensor | None) -> tuple[Tensor, Tensor]:
        counted = seams.is_counted_forward(self)
        self.fssdp.materialize(counted=counted)
        probs, routing_map = super().route(hidden_states, *args, **kwargs)
        if counted:
            self.fssdp.observe(routing_map)
        return probs, routing_map

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        state = self.fssdp
        self.experts.guests = state.guests
        self.token_dispatcher = state.stock_dispatcher
        if state.guests is not None:
            self.token_dispatcher = state.physical_dispatcher
            routing_map, probs = state.to_holders(routing_map, probs)
        return super().preprocess(hidden_states, probs, routing_map)


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
        self.world = World.from_ranks(dist.get_process_group_ranks(self.group), ranks_per_node=_ranks_per_node())
        self.stock_dispatcher = layer.token_dispatcher
        self.physical_dispatcher = physical_dispatcher(layer.token_dispatcher, self.homes_only.slots_per_rank)
        self.experts = PhysicalExperts(layer.experts, self.homes_only.slots_per_rank)
        # all ranks whose tokens these experts see; with expert tensor parallelism, several per rank of the group
        self.sources: dist.ProcessGroup = self.stock_dispatcher.tp_ep_group
        self.source_rank = [n // self.stock_dispatcher.tp_size for n in range(self.sources.size())]
        self.placement = self.homes_only
        self.guests: Guests | None = None

    def attach(self, model: ModelState) -> None:
        self.model = model

    def observe(self, routing_map: Tensor) -> None:
        """Count one microbatch's ``routing_map`` [T, E]."""
        self.model.monitor.count(self.index, routing_map.detach())
        self.model.clock.forwarded(self.index)

    def materialize(self, *, counted: bool) -> None:
        """On the first forward of an iteration, plan this layer's guests and fetch them."""
        clock = self.model.clock
        if not clock.enter(self.index, counts=counted):
            return
        self.guests = None  # before the new ones are allocated
        self.placement = self._plan()
        if self.placement.num_guests:
            seams.wait_for_params(self.model.layers[self.index].experts)
            self.guests = Guests(
                self.experts.homes,
                self.experts.layout,
                self.placement,
                self.group,
                microbatches=clock.microbatches or 1,
                label=self.name,
                timeout=self.config.timeout,
            )
            self.model.guests.add(self.guests)

    def _plan(self) -> Placement:
        forecast = self.model.monitor.history.forecast()
        if forecast is None or not self.config.slots:
            return self.homes_only
        load = forecast[self.index, : self.homes_only.num_experts]
        return plan_guests(load, self.homes_only, self.world, overlap_degree=self.config.overlap_degree)

    def to_holders(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Logical to physical experts, by quotas that every rank computes alike from the true loads."""
        loads = gather_loads(routing_map, self.sources)
        quotas = split_quotas(loads, self.placement, self.world, source_rank=self.source_rank)
        return to_physical(routing_map, probs, quotas, self.placement, source=self.sources.rank())


class ModelState:
    """What the converted layers of one model share on this rank: the load monitor and the iteration clock."""

    def __init__(self, layers: list[MoELayer], states: list[LayerState]) -> None:
        self.layers = layers
        self.guests: weakref.WeakSet[Guests] = weakref.WeakSet()  # of any layer, as long as some backward may need them
        num_experts = max(state.homes_only.num_experts for state in states)
        self.monitor = LoadMonitor(len(layers), num_experts, states[0].sources)
        self.clock = IterationClock(
            len(layers),
            num_microbatches=seams.num_microbatches,
            on_begin=self.monitor.finish_reduce,
            on_forwards_done=self.monitor.start_reduce,
            unsent=self._unsent,
        )

    def _unsent(self) -> list[tuple[str, int]]:
        return sorted((guests.label, guests.unsent) for guests in self.guests if guests.unsent)


def fssdp(config: HecateConfig) -> Callable[[Chunks], Chunks]:
    """The hook: turns every ``MoELayer`` of a model into an FSSDP layer, in place.

    Run it on all ranks, after the model chunks are built and before DDP wraps them: as a pre-wrap hook of a
    Megatron-Bridge provider or of ``megatron.training``'s model config, or by hand. Running it again changes nothing.

    Raises (on every rank, listing what is wrong on any, and leaving the model as it was):
        ValueError: for settings that cannot be combined, differ between ranks, or do not fit the model.
        TimeoutError: when some rank does not run the hook within ``config.timeout``.
    """

    def hook(chunks: Chunks) -> Chunks:
        layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)]
        if layers and all(isinstance(layer, FSSDPLayer) for layer in layers):
            other = layers[0].fssdp.config
            if other != config:
                raise ValueError(f"this model runs FSSDP already, with {other}; asked for {config}")
            return chunks
        states, problems = _prepare(layers, config)
        agree(config, num_layers=len(layers), problems=problems)
        if layers:
            _convert(layers, states)
            _announce(states, config)
        return chunks

    return hook


def _prepare(layers: list[MoELayer], config: HecateConfig) -> tuple[list[LayerState], list[str]]:
    """Build all that conversion needs without touching the layers; what is wrong comes back as lines of text."""
    problems = seams.changed_seams()
    states: list[LayerState] = []
    if not problems:
        for layer in layers:
            problems += [p for p in seams.refusals(layer.config) if p not in problems]
    if not problems:
        for index, layer in enumerate(layers):
            try:
                states.append(LayerState(layer, index, config))
            except (TypeError, ValueError) as error:
                problems.append(f"layer {layer.layer_number}: {error}")
    return states, problems


def _convert(layers: list[MoELayer], states: list[LayerState]) -> None:
    """Turn all layers at once; an exception undoes what was done."""
    model = ModelState(layers, states)
    with contextlib.ExitStack() as undo:
        for layer, state in zip(layers, states, strict=True):
            experts = layer.experts
            state.attach(model)
            _assign(undo, layer, fssdp=state, __class__=_subclass(FSSDPLayer, type(layer)))
            _assign(
                undo, experts, physical=state.experts, guests=None, __class__=_subclass(FSSDPExperts, type(experts))
            )
            loaded = experts.register_load_state_dict_post_hook(lambda *_: model.clock.weights_changed())
            undo.callback(loaded.remove)
        undo.pop_all()


def _assign(undo: contextlib.ExitStack, module: Module, **attributes: Any) -> None:
    """Set attributes of ``module``, and have ``undo`` put back what was there."""
    for name, value in attributes.items():
        if name == "__class__":
            undo.callback(setattr, module, name, module.__class__)
        else:
            undo.callback(delattr, module, name)
        setattr(module, name, value)


def _subclass(mixin: type, base: type) -> type:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def _ranks_per_node() -> int:
    """As the launcher says; without one, as many as this machine has GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(torch.cuda.device_count(), 1)


def _announce(states: list[LayerState], config: HecateConfig) -> None:
    first = states[0]
    if dist.get_rank() == 0:
        slots = sum(state.experts.chunk_bytes * config.slots for state in states)
        print(
            f"FSSDP on: {len(states)} MoE layers on this rank, {first.homes_only.num_experts} experts over "
            f"{first.group.size()} ranks, {config.slots} slots per rank and layer ({slots / 2**20:.1f} MiB of guest "
            f"weights), lifetime {config.lifetime}, transport p2p",
            flush=True,
        )
