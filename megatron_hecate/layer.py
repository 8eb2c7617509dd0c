"""The hook that turns MoE layers into FSSDP layers, and the layer: one iteration on one screen.

materialize  before the attention   first forward of an iteration: plan from the forecast; begin to fetch guests
observe      route()        count this microbatch's tokens per expert
calibrate    preprocess()   where asked for: true loads -> late guests where they pay
route        preprocess()   true loads -> quotas -> every token gets a holder
dispatch, experts, combine  Megatron's own, over physical experts
backward     slots.Guests   dropped guests are fetched again, gradients go home while the attention's backward runs
step         Megatron's own, on homes
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from megatron_hecate import report, seams, trace
from megatron_hecate.agreement import Note, agree
from megatron_hecate.config import AUTO, HecateConfig
from megatron_hecate.dispatcher import to_physical
from megatron_hecate.experts import FSSDPExperts
from megatron_hecate.model import ModelState
from megatron_hecate.plan import Speeds, compile_planning
from megatron_hecate.plan.world import CPU, H100
from megatron_hecate.state import LayerState
from megatron_hecate.transports import TransferGroups, Transport, Whereabouts, on_gpus
from megatron_hecate.trial import settle

Chunks = list[Module]


class FSSDPLayer:
    """Mixin in front of ``MoELayer``."""

    fssdp: LayerState

    def route(self, hidden_states: Tensor, *args: Tensor | None, **kwargs: Tensor | None) -> tuple[Tensor, Tensor]:
        self.purpose = purpose = self.fssdp.model.purpose_of_forward(self)
        self.experts.guests = self.fssdp.materialize(purpose)
        self.experts.early, self.fssdp.early = self.fssdp.early, None
        probs, routing_map = super().route(hidden_states, *args, **kwargs)
        if purpose is seams.Forward.MICROBATCH:
            self.fssdp.observe(routing_map)
        return probs, routing_map

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        self.token_dispatcher = self.fssdp.stock_dispatcher
        state, name = self.fssdp, self.fssdp.name
        if self.experts.guests is not None or state.calibrates:
            with trace.span("loads", name):
                loads = state.quotas.gather_loads(routing_map)
            if state.calibrates and self.purpose is seams.Forward.MICROBATCH:
                with trace.span("calibrate", name):
                    self.experts.guests = state.calibrate(loads)
            if self.experts.guests is not None:
                self.token_dispatcher = state.physical_dispatcher
                with trace.span("quotas", name):
                    row = state.quotas.row(loads, self.experts.guests.placement)
                    routing_map, probs = to_physical(routing_map, probs, *row)
        if self.purpose is seams.Forward.MICROBATCH:
            state.computes(self.experts.guests)
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        with trace.span("dispatch", self.fssdp.name):
            return super().dispatch(*args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        with trace.span("experts", self.fssdp.name):
            return super().routed_experts_compute(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        with trace.span("combine", self.fssdp.name):
            return super().combine(*args, **kwargs)


def fssdp(config: HecateConfig) -> Callable[[Chunks], Chunks]:
    """The hook: turns every ``MoELayer`` of a model into an FSSDP layer, in place.

    Run it on all ranks, after the model chunks are built and before DDP wraps them: as a pre-wrap hook of a
    Megatron-Bridge provider or of ``megatron.training``'s model config, or by hand. Running it again changes nothing.

    Raises (on every rank, listing what is wrong on any, and leaving the model as it was):
        ValueError: for settings that cannot be combined, differ between ranks, or do not fit the model.
        TimeoutError: when some rank does not run the hook within ``config.timeout``.
    """

    def hook(chunks: Chunks) -> Chunks:
        in_chunks = [[m for m in chunk.modules() if isinstance(m, MoELayer)] for chunk in chunks]
        layers = [layer for chunk in in_chunks for layer in chunk]
        converted = [layer for layer in layers if isinstance(layer, FSSDPLayer)]
        if converted and len(converted) == len(layers):
            other = converted[0].fssdp.config
            settled = {
                name: getattr(other, name) for name in ("lifetime", "transport") if getattr(config, name) == AUTO
            }
            if other != dataclasses.replace(config, **settled):
                raise ValueError(f"this model runs FSSDP already, with {other}; asked for {config}")
            return chunks
        chunk_of = [i for i, chunk in enumerate(in_chunks) for _ in chunk]
        states, problems = _prepare(layers, config)
        speeds = _speeds(config, problems)
        if converted:
            names = [layer.fssdp.name for layer in converted]
            problems.append(f"some layers run FSSDP already and others do not: {', '.join(names)} of {len(layers)}")
        own = [tuple(dist.get_process_group_ranks(state.group)) for state in states]
        ranks, transport, transfers = settle(config.transport, sorted(set(own)), problems, timeout=config.timeout)
        for state, group in zip(states, own, strict=True):
            state.domains = transfers[group].sizes if transfers else state.domains
        note = Note(
            settings={**dataclasses.asdict(config), "costs": dataclasses.asdict(speeds)},  # not where the file lies
            layers=[_layer_key(layer) for layer in layers],
            problems=problems,
            summary=_summary(states, config),
            memory=_memory(states, chunk_of, chunks, transport.name) if states and not problems else {},
        )
        notes = agree(note, timeout=config.timeout, judge=functools.partial(_judge, config, transport, ranks))
        memories, lifetime = _lifetime(notes, config)
        resolved = dataclasses.replace(config, lifetime=lifetime, transport=transport.name)
        for state in states:
            state.config = resolved
        if layers:
            model = ModelState(states, chunk_of, speeds, sources=states[0].stock_dispatcher.tp_ep_group)
            _convert(model, layers, chunks, [rank.node for rank in ranks], transfers)
        if dist.get_rank() == 0:
            _say_on(notes, memories, resolved, speeds, transport.why)
        return chunks

    return hook


def _prepare(layers: list[MoELayer], config: HecateConfig) -> tuple[list[LayerState], list[str]]:
    """Build all that conversion needs without touching the layers; what is wrong comes back as lines of text."""
    problems = seams.changed_seams()
    states: list[LayerState] = []
    if not problems:
        for layer in layers:
            rules = seams.REFUSED + (seams.REFUSED_WITH_SLOTS if config.slots else ())
            problems += [p for p in seams.refusals(layer.config, rules) if p not in problems]
    if not problems:
        said = threading.Timer(3.0, print, ["FSSDP: compiling the planner, about a minute, once per machine"])
        try:
            if dist.get_rank() == 0:
                said.start()
            compile_planning()
        except Exception as error:
            problems.append(f"planning cannot be compiled: {type(error).__name__}: {error}")
        finally:
            said.cancel()
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
    usual = H100 if on_gpus() else CPU
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
    experts, ranks = states[0].homes_only.num_experts, states[0].group.size()
    return f"{experts} experts over {ranks} ranks, {config.slots} slots per rank and layer"


def _memory(states: list[LayerState], chunk_of: list[int], chunks: Chunks, transport: str) -> dict[str, Any]:
    """A `report.RankMemory` of this rank, as fields."""
    layer_config = states[0].layer_config
    needs = [state.need for state in states]
    if layer_config.bf16 or layer_config.fp16:  # Megatron casts after this hook
        dtype = torch.bfloat16 if layer_config.bf16 else torch.float16
        needs = [dataclasses.replace(need, dtype=dtype) for need in needs]
    homes = tuple(state.experts.num_homes for state in states)
    in_flight = seams.forwards_in_flight(layer_config, chunk_of)
    experts = report.RankExperts.with_adam(tuple(needs), homes, in_flight=in_flight, transport=transport)
    if not states[0].experts.homes()[0][0].requires_grad:
        experts = dataclasses.replace(experts, grad_bytes=0, optimizer_bytes=0)
    gpu = on_gpus()
    free = report.free_memory(gpu=gpu, ranks_on_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if gpu:  # Megatron may move the model there after this hook
        elsewhere = [p for chunk in chunks for p in chunk.parameters() if not p.is_cuda]
        free -= sum(p.numel() * p.element_size() for p in elsewhere)
    return dataclasses.asdict(report.RankMemory.of(experts, free))


def _lifetime(notes: list[Note], config: HecateConfig) -> tuple[dict[int, report.RankMemory], str]:
    """The memory of all ranks that have MoE layers, and the lifetime that they agree on."""
    memories = {rank: report.RankMemory.parse(note.memory) for rank, note in enumerate(notes) if note.memory}
    return memories, report.choose(memories, config.lifetime)


def _judge(config: HecateConfig, transport: Transport, ranks: list[Whereabouts], notes: list[Note]) -> list[str]:
    """What is wrong with the job as a whole."""
    memories, lifetime = _lifetime(notes, config)
    guests = {rank: memory.accounts[lifetime].guests for rank, memory in memories.items()}
    too_large = report.refusal(memories, lifetime, slots=config.slots)
    return transport.refusals(ranks, guests) + ([] if too_large is None else [too_large])


def _say_on(
    notes: list[Note], memories: dict[int, report.RankMemory], config: HecateConfig, speeds: Speeds, why: str
) -> None:
    """Print what is on, and what it takes of every rank's memory; ranks with the same figures share a table."""
    num_layers = len({key for note in notes for key in note.layers})
    late = f", at most {config.late} late guests per layer" if config.late else ""
    summary = next(note.summary for note in notes if note.summary)
    costs = config.costs or ("an H100 node" if speeds is H100 else "CPU ranks")
    print(f"FSSDP on: {num_layers} MoE layers, {summary}, lifetime {config.lifetime}", end="")
    reason = f" ({why})" if why else ""
    print(f", transport {config.transport}{reason}{late}, copies judged by the speeds of {costs}", flush=True)
    if config.slots:
        print(report.tables(memories, config.lifetime), flush=True)


def _convert(
    model: ModelState,
    layers: list[MoELayer],
    chunks: Chunks,
    nodes: list[str],
    transfers: dict[tuple[int, ...], TransferGroups],
) -> None:
    """Turn all layers at once; an exception undoes what was done."""
    attention = {id(m.mlp): m.self_attention for chunk in chunks for m in chunk.modules() if seams.is_block(m)}
    with contextlib.ExitStack() as undo:
        for layer, state in zip(layers, model.states, strict=True):
            experts = layer.experts
            state.attach(model, nodes, transfers[tuple(dist.get_process_group_ranks(state.group))])
            _assign(undo, layer, fssdp=state, __class__=_subclass(FSSDPLayer, type(layer)))
            _assign(
                undo,
                experts,
                physical=state.experts,
                guests=None,
                early=None,
                __class__=_subclass(FSSDPExperts, type(experts)),
            )
            changed = experts.register_load_state_dict_post_hook(lambda *_: model.clock.weights_changed())
            undo.callback(changed.remove)
            if id(layer) in attention:
                look_ahead = functools.partial(_look_ahead, layer)
                undo.callback(attention[id(layer)].register_forward_pre_hook(look_ahead).remove)
        for index, chunk in enumerate(chunks):
            begin = functools.partial(model.begin_chunk, index)
            undo.callback(chunk.register_forward_pre_hook(begin).remove)
            undo.callback(chunk.register_forward_hook(model.end_chunk, always_call=True).remove)
        undo.pop_all()


def _look_ahead(layer: MoELayer, *_: Any) -> None:
    layer.fssdp.look_ahead(layer.fssdp.model.purpose_of_forward(layer))


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
