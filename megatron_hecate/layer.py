"""The hook that turns MoE layers into FSSDP layers, and the layer: one iteration on one screen.

observe      route()        count this microbatch's tokens per expert
materialize  route()        first forward of an iteration: plan from the forecast, fetch guests
calibrate    preprocess()   the same forward, where asked for: true loads -> late guests where they pay
route        preprocess()   true loads -> quotas -> every token gets a holder
dispatch, experts, combine  Megatron's own, over physical experts
backward     slots.Guests   the last microbatch takes the guests' gradients home
step         Megatron's own, on homes
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from megatron_hecate import seams
from megatron_hecate.agreement import Note, agree
from megatron_hecate.config import HecateConfig
from megatron_hecate.dispatcher import to_physical
from megatron_hecate.experts import FSSDPExperts
from megatron_hecate.plan import Speeds, compile_planning
from megatron_hecate.plan.world import CPU, H100
from megatron_hecate.state import LayerState, ModelState

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
        if self.experts.guests is not None or self.fssdp.calibrates:
            loads = self.fssdp.gather_loads(routing_map)
            self.experts.guests = self.fssdp.calibrate(loads)
            if self.experts.guests is not None:
                self.token_dispatcher = self.fssdp.physical_dispatcher
                routing_map, probs = to_physical(routing_map, probs, *self.fssdp.quotas(loads))
        return super().preprocess(hidden_states, probs, routing_map)


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
        speeds = _speeds(config, problems)
        if converted:
            names = [layer.fssdp.name for layer in converted]
            problems.append(f"some layers run FSSDP already and others do not: {', '.join(names)} of {len(layers)}")
        note = Note(
            settings={**dataclasses.asdict(config), "costs": dataclasses.asdict(speeds)},  # not where the file lies
            layers=[_layer_key(layer) for layer in layers],
            problems=problems,
            summary=_summary(states, config),
        )
        notes = agree(note, timeout=config.timeout)
        if layers:
            _convert(layers, states, [note.node for note in notes], speeds)
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
        try:
            compile_planning()
        except Exception as error:
            problems.append(f"planning cannot be compiled: {type(error).__name__}: {error}")
    if not problems:
        for index, layer in enumerate(layers):
            try:
                states.append(LayerState(layer, index, config))
            except (TypeError, ValueError) as error:
                problems.append(f"layer {layer.layer_number}: {error}")
            except Exception as error:  # every rank must hear of it, whatever it is
                problems.append(f"layer {layer.layer_number}: {type(error).__name__}: {error}")
    return states, problems


def _speeds(config: HecateConfig, problems: list[str]) -> Speeds:
    """What copies are judged by: measured, or those of an H100 node (where NCCL is), or of CPU ranks."""
    usual = H100 if "nccl" in str(dist.get_backend_config()) else CPU
    if config.costs is None:
        return usual
    try:
        return Speeds.load(config.costs)
    except ValueError as error:
        problems.append(f"costs: {error}")
        return usual


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
        + (f", at most {config.late} late guests per layer" if config.late else "")
    )


def _convert(layers: list[MoELayer], states: list[LayerState], nodes: list[str], speeds: Speeds) -> None:
    """Turn all layers at once; an exception undoes what was done."""
    model = ModelState(layers, states, speeds)
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
