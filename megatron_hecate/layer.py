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
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from megatron_hecate import seams
from megatron_hecate.agreement import Note, agree
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
        purpose = seams.purpose_of_forward(self)
        self.experts.guests = None  # nobody holds the last iteration's guests while the next are fetched
        self.experts.guests = self.fssdp.materialize(purpose)
        probs, routing_map = super().route(hidden_states, *args, **kwargs)
        if purpose is seams.Forward.MICROBATCH:
            self.fssdp.observe(routing_map)
        return probs, routing_map

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        self.token_dispatcher = self.fssdp.stock_dispatcher
        if self.experts.guests is not None:
            self.token_dispatcher = self.fssdp.physical_dispatcher
            routing_map, probs = self.fssdp.to_holders(routing_map, probs)
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
        self.stock_dispatcher = layer.token_dispatcher
        self.physical_dispatcher = physical_dispatcher(layer.token_dispatcher, self.homes_only.slots_per_rank)
        self.experts = PhysicalExperts(layer.experts, self.homes_only.slots_per_rank)
        # all ranks whose tokens these experts see; with expert tensor parallelism, several per rank of the group
        self.sources: dist.ProcessGroup = self.stock_dispatcher.tp_ep_group
        self.source_rank = [n // self.stock_dispatcher.tp_size for n in range(self.sources.size())]
        self.placement = self.homes_only
        self.guests: Guests | None = None

    def attach(self, model: ModelState, nodes: list[str]) -> None:
        """Join the model's layers; ``nodes`` names the machine of every rank of the job."""
        self.model = model
        self.world = World.from_names([nodes[rank] for rank in dist.get_process_group_ranks(self.group)])

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
            return None
        if purpose is seams.Forward.RECOMPUTED:
            if not clock.is_in(self.index):
                raise NotImplementedError(
                    f"{self.name} is recomputed in the backward, but its forward ran without gradients, where it looks "
                    "like evaluation; use Megatron's --recompute-granularity, or checkpoint(..., use_reentrant=False)"
                )
        elif clock.enter(self.index):
            self.guests = None
            self.placement = self._plan()
            if self.placement.num_guests:
                seams.wait_for_params(self.model.layers[self.index].experts)
                self.guests = Guests(
                    self.experts.homes(),
                    self.experts.layout,
                    self.placement,
                    self.group,
                    microbatches=clock.microbatches or 1,
                    label=self.name,
                    timeout=self.config.timeout,
                )
                self.model.guests.add(self.guests)
        return self.guests

    def _plan(self) -> Placement:
        forecast = self.model.monitor.history.forecast()
        if forecast is None or not self.config.slots:
            return self.homes_only
        load = forecast[self.index, : self.homes_only.num_experts]
        return plan_guests(load, self.homes_only, self.world, overlap_degree=self.config.overlap_degree)

    def to_holders(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Logical to physical experts, by quotas that every rank computes alike from the true loads."""
        loads = gather_loads(routing_map, self.sources, label=self.name, timeout=self.config.timeout)
        quotas = split_quotas(loads, self.placement, self.world, source_rank=self.source_rank)
        return to_physical(routing_map, probs, quotas, self.placement, source=self.sources.rank())


class ModelState:
    """What the converted layers of one model share on this rank: the load monitor and the iteration clock."""

    def __init__(self, layers: list[MoELayer], states: list[LayerState]) -> None:
        self.layers = layers
        self.guests: weakref.WeakSet[Guests] = weakref.WeakSet()  # of any layer, as long as some backward may need them
        num_experts = max(state.homes_only.num_experts for state in states)
        self.monitor = LoadMonitor(len(layers), num_experts, states[0].sources, timeout=states[0].config.timeout)
        self.clock = IterationClock(
            len(layers),
            num_microbatches=seams.num_microbatches,
            on_begin=self.monitor.finish_reduce,
            on_forwards_done=self.monitor.start_reduce,
            drop_unsent=self._drop_unsent,
        )

    def _drop_unsent(self) -> list[tuple[str, int]]:
        waiting = [guests for guests in self.guests if guests.unsent]
        found = sorted((guests.label, guests.unsent) for guests in waiting)
        for guests in waiting:
            guests.drop_unsent()
        return found


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
        converted = [layer for layer in layers if isinstance(layer, FSSDPLayer)]
        if converted and len(converted) == len(layers):
            other = converted[0].fssdp.config
            if other != config:
                raise ValueError(f"this model runs FSSDP already, with {other}; asked for {config}")
            return chunks
        states, problems = _prepare(layers, config)
        if converted:
            names = [layer.fssdp.name for layer in converted]
            problems.append(f"some layers run FSSDP already and others do not: {', '.join(names)} of {len(layers)}")
        note = Note(
            settings=dataclasses.asdict(config),
            layers=[_layer_key(layer) for layer in layers],
            problems=problems,
            summary=_summary(states, config),
        )
        notes = agree(note, timeout=config.timeout)
        if layers:
            _convert(layers, states, [note.node for note in notes])
        if dist.get_rank() == 0:
            num_layers = len({key for note in notes for key in note.layers})
            print(f"FSSDP on: {num_layers} MoE layers, {next(n.summary for n in notes if n.summary)}", flush=True)
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
            except Exception as error:  # every rank must hear of it, whatever it is
                problems.append(f"layer {layer.layer_number}: {type(error).__name__}: {error}")
    return states, problems


def _layer_key(layer: MoELayer) -> str:
    """Tells a model's layers apart: multi-token prediction numbers its own from 1."""
    return f"{'mtp ' if getattr(layer, 'is_mtp_layer', False) else ''}{layer.layer_number}"


def _summary(states: list[LayerState], config: HecateConfig) -> str:
    if not states:
        return ""
    guests = sum(state.experts.chunk_bytes * config.slots for state in states) / 2**20
    return (
        f"{states[0].homes_only.num_experts} experts over {states[0].group.size()} ranks, {config.slots} slots per "
        f"rank and layer ({guests:.1f} MiB of guest weights on a rank), lifetime {config.lifetime}, transport p2p"
    )


def _convert(layers: list[MoELayer], states: list[LayerState], nodes: list[str]) -> None:
    """Turn all layers at once; an exception undoes what was done."""
    model = ModelState(layers, states)
    with contextlib.ExitStack() as undo:
        for layer, state in zip(layers, states, strict=True):
            experts = layer.experts
            state.attach(model, nodes)
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


@functools.cache
def _subclass(mixin: type, base: type) -> type:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
