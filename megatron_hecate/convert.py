"""The hook that turns MoE layers into FSSDP layers: check, agree on all ranks, attach, or leave all as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_expert_data_parallel_group,
    get_expert_data_parallel_rank,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module, ModuleList

from megatron_hecate.comm.connect import Connection, connect
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.config import AUTO, HecateConfig
from megatron_hecate.homes.mover import Homes
from megatron_hecate.homes.rehoming import Rehoming
from megatron_hecate.job import watchdog
from megatron_hecate.job.agreement import Note, refuse
from megatron_hecate.job.device import device_of_rank, on_gpus
from megatron_hecate.job.groups import connected_group
from megatron_hecate.job.nccl import follow_job_timeout
from megatron_hecate.layer import FSSDPLayer, GraphedBlock
from megatron_hecate.megatron import training_state
from megatron_hecate.megatron.data_parallel import DataParallel
from megatron_hecate.megatron.experts import FSSDPExperts
from megatron_hecate.observe import has_run, note_run, observe, read_speeds
from megatron_hecate.plan import H100, Speeds, World
from megatron_hecate.record import tracing
from megatron_hecate.record.layer_recorder import LayerRecorder
from megatron_hecate.record.recorder import JobMetrics
from megatron_hecate.replicas import memory_estimate
from megatron_hecate.replicas.memory_estimate import JobMemory, RankMemory
from megatron_hecate.runtime.compiling import compile_all
from megatron_hecate.runtime.layer_parts import LayerParts
from megatron_hecate.runtime.layer_state import LayerState
from megatron_hecate.runtime.prefetch import Prefetcher
from megatron_hecate.settings import assumptions, foreign_code, unsupported, wrappers
from megatron_hecate.settings.cuda_graphs import captured_parts

Chunks = list[Module]


def fssdp(config: HecateConfig | None = None) -> Callable[[Any], Any]:
    """The hook: turns every ``MoELayer`` of a model into an FSSDP layer, in place.

    Run it on all ranks, after the model chunks are built and before DDP wraps them: as a pre-wrap hook of a
    Megatron-Bridge provider or of ``megatron.training``'s model config, or by hand. Running it again changes nothing.
    It takes the list of model chunks, or a model, and returns what it was given.

    Raises (on every rank, listing what is wrong on any, and leaving the model as it was):
        ValueError: for settings that cannot be combined, differ between ranks, or do not fit the model.
        TypeError: for a ``config`` or a model that is none.
        TimeoutError: when some rank does not run the hook within ``config.timeout``.
    """
    return _Hook(HecateConfig.check(config))


@dataclasses.dataclass(
    frozen=True, slots=True
)  # Bridge copies what is in a model's configuration, and sets attributes
class _Hook:
    """What `fssdp` returns: an object, not a closure, so that it can be pickled and compared."""

    config: HecateConfig

    def __call__(self, model: Any) -> Any:
        chunks = _chunks_of(model)
        (observe if self.config.observe else self._convert)(chunks, self.config)
        return model

    def _convert(self, chunks: Chunks, config: HecateConfig) -> None:
        layers = [
            (m, i)
            for i, chunk in enumerate(chunks)
            for m in chunk.modules()
            if isinstance(m, MoELayer)
        ]
        converted = [layer for layer, _ in layers if isinstance(layer, FSSDPLayer)]
        if converted and len(converted) == len(layers):
            _check_same_settings(converted[0].fssdp.config, config)
            return
        if not layers and has_run(chunks, observing=False):
            return
        model = _Model(chunks, [layer for layer, _ in layers], [index for _, index in layers])
        parts, problems = _build_parts(model, config)
        problems += wrappers.find_wrapped(chunks)
        if converted:
            names = [layer.fssdp.name for layer in converted]
            problems.append(
                f"some layers run FSSDP already and others do not: {', '.join(names)} of {len(layers)}"
            )
        speeds = read_speeds(config, problems)
        groups = sorted({part.ranks for part in parts})
        settings: dict[str, Any] = dict(timeout=config.timeout, nccl_ctas=config.nccl_ctas)
        connection = connect(config.transport, groups, problems, **settings)
        note = Note(
            settings={
                **dataclasses.asdict(config),
                "speeds": dataclasses.asdict(speeds),
            },  # not where the file lies
            layers=[training_state.name_of_layer(layer) for layer in model.layers],
            problems=problems,
            summary=_summary(parts, config) if parts else "",
            memory=_estimate_memory(parts, model, config, connection)
            if parts and not problems
            else {},
            slower_by_engines=connection.slower_by_engines,
            rounds=P2P.explain_rounds([part.buffer(config.slots) for part in parts])
            if parts and config.slots
            else "",
        )
        judge = functools.partial(_judge, config, connection)
        (lifetime, by_engines), notes = note.agree(timeout=config.timeout, judge=judge)
        connection.choose_copy_engines(by_engines)
        resolved = dataclasses.replace(config, lifetime=lifetime, transport=connection.name)
        watchdog.watch(groups, timeout=config.timeout)
        listeners = [*tracing.listeners(config), follow_job_timeout]  # on every rank
        everyone = None
        if config.rehome:
            replicas = (
                [dist.get_process_group_ranks(get_expert_data_parallel_group())] if parts else []
            )
            everyone = connected_group(
                [*groups, *replicas], timeout=config.timeout, on_gpus=on_gpus()
            )
        if parts:
            states = [_state(i, p, resolved, connection, speeds) for i, p in enumerate(parts)]
            _attach(model, states, listeners, everyone)
        else:
            JobMetrics(())
        note_run(chunks, observing=False)
        if dist.get_rank() == 0:
            _say_on(notes, resolved, speeds, connection)


def _chunks_of(model: Any) -> Chunks:
    """Return the chunks of a list, a tuple or a `ModuleList` of them, or of one model."""
    if isinstance(model, Module) and not isinstance(model, ModuleList):
        return [model]
    if isinstance(model, list | tuple | ModuleList) and all(
        isinstance(chunk, Module) for chunk in model
    ):
        return list(model)
    kinds = (
        sorted({type(part).__name__ for part in model}) if isinstance(model, list | tuple) else []
    )
    shown = f"a {type(model).__name__}" + (f" of {', '.join(kinds)}" if kinds else "")
    raise TypeError(f"the hook takes a list of model chunks, or a model, got {shown}")


@dataclasses.dataclass(frozen=True)
class _Model:
    """What is to be converted.

    Args:
        chunks: the model chunks of this rank.
        layers: all MoE layers in them, in the order of the forward.
        chunk_of: the chunk of each.
    """

    chunks: Chunks
    layers: list[MoELayer]
    chunk_of: list[int]


def _check_same_settings(running: HecateConfig, asked: HecateConfig) -> None:
    chosen = {
        name: getattr(running, name)
        for name in ("lifetime", "transport")
        if getattr(asked, name) == AUTO
    }
    if running != dataclasses.replace(asked, **chosen):
        refuse([f"this model runs FSSDP already, with {running}; asked for {asked}"])


def _build_parts(model: _Model, config: HecateConfig) -> tuple[list[LayerParts], list[str]]:
    """Build all that conversion needs without touching the layers; what is wrong comes back as lines of text."""
    problems = assumptions.broken_assumptions()
    if not problems:
        around = (wrappers.of_model(model.chunks), wrappers.of_job(), config.as_arguments())
        configs = {id(layer.config): layer.config for layer in model.layers}.values()
        found = (
            unsupported.find(layer_config, *around, slots=config.slots) for layer_config in configs
        )
        problems = list(dict.fromkeys(problem for of_config in found for problem in of_config))
        problems += foreign_code.find_foreign_layers(model.chunks)
    if not problems:
        problems = compile_all(plans=bool(config.slots or config.rehome))
    if problems:
        return [], problems
    parts: list[LayerParts] = []
    passes = training_state.passes_per_microbatch(model.layers, model.chunks)
    for layer, times in zip(model.layers, passes, strict=True):
        try:
            parts.append(LayerParts.build(layer, slots=config.slots, passes=times))
        except (TypeError, ValueError) as error:
            problems.append(f"layer {layer.layer_number}: {error}")
        except Exception as error:  # every rank must hear of it, whatever it is
            problems.append(f"layer {layer.layer_number}: {type(error).__name__}: {error}")
    if config.rehome and len(experts := {part.homes_only.num_experts for part in parts}) > 1:
        problems.append(
            f"rehome={config.rehome} with layers of {sorted(experts)} experts: homes move in equal layers only"
        )
    return parts, problems


def _summary(parts: list[LayerParts], config: HecateConfig) -> str:
    experts, ranks = parts[0].homes_only.num_experts, len(parts[0].ranks)
    looks = f", better homes looked for every {config.rehome} iterations" if config.rehome else ""
    return f"{experts} experts over {ranks} ranks, {config.slots} slots per rank and layer{looks}"


def _estimate_memory(
    parts: list[LayerParts], model: _Model, config: HecateConfig, connection: Connection
) -> dict[str, Any]:
    """A `RankMemory` of this rank, as fields."""
    layer_config = parts[0].layer.config
    dtype = None
    if layer_config.bf16 or layer_config.fp16:  # Megatron casts after this hook
        dtype = torch.bfloat16 if layer_config.bf16 else torch.float16
    layers = tuple(part.buffer(config.slots, dtype) for part in parts)
    transport = connection.transports.get(parts[0].ranks)
    experts = memory_estimate.RankExperts.with_adam(
        layers,
        in_flight=training_state.forwards_in_flight(layer_config, model.chunk_of),
        transport_bytes=transport.extra_bytes(layers) if transport and config.slots else 0,
        nccl_bytes=connection.nccl_bytes,
    )
    if not parts[0].experts.homes()[0][0].requires_grad:
        experts = dataclasses.replace(experts, grad_bytes=0, optimizer_bytes=0)
    on_gpu = device_of_rank().type == "cuda"
    free = RankMemory.free_memory(gpu=on_gpu)
    if on_gpu:  # Megatron may move the model there after this hook
        elsewhere = [p for chunk in model.chunks for p in chunk.parameters() if not p.is_cuda]
        free -= sum(p.numel() * p.element_size() for p in elsewhere)
    return dataclasses.asdict(RankMemory.estimate(experts, free))


def _job_memory(notes: list[Note]) -> JobMemory:
    """Of all ranks that have MoE layers."""
    return JobMemory(
        {rank: RankMemory.parse(note.memory) for rank, note in enumerate(notes) if note.memory}
    )


def _judge(
    config: HecateConfig, connection: Connection, notes: list[Note]
) -> tuple[list[str], tuple[str, bool]]:
    """Rank 0: what is wrong with the job as a whole; its lifetime, and whether copy engines make copies."""
    memory = _job_memory(notes)
    lifetime = memory.choose_lifetime(config.lifetime)
    replica_bytes = {rank: own.by_lifetime[lifetime].replicas for rank, own in memory.ranks.items()}
    too_large = memory.explain_too_large(lifetime, slots=config.slots)
    problems = connection.shared_memory_problems(replica_bytes) + (
        [] if too_large is None else [too_large]
    )
    return problems, (lifetime, Connection.engines_pay([note.slower_by_engines for note in notes]))


def _say_on(
    notes: list[Note], config: HecateConfig, speeds: Speeds, connection: Connection
) -> None:
    """Print what is on, and what it takes of every rank's memory; ranks with the same figures share a table."""
    num_layers, summary = (
        len({k for note in notes for k in note.layers}),
        next(n.summary for n in notes if n.summary),
    )
    transport = f"transport {config.transport}" + (f" ({connection.why})" if connection.why else "")
    late = (
        f", at most {config.late_replicas} late replicas per layer" if config.late_replicas else ""
    )
    measured = config.speeds or ("an H100 node" if speeds is H100 else "CPU ranks")
    print(
        f"FSSDP on: {num_layers} MoE layers, {summary}, lifetime {config.lifetime}, {transport}{late}, "
        f"copies judged by the speeds of {measured}",
        flush=True,
    )
    if config.slots:
        print(_job_memory(notes).describe(config.lifetime), flush=True)
    if connection.exposed:
        print(f"FSSDP: {connection.exposed}", flush=True)
        if connection.name == P2P.name and (
            rounds := next((n.rounds for n in notes if n.rounds), "")
        ):
            print(f"FSSDP: {rounds}", flush=True)


def _state(
    index: int, parts: LayerParts, config: HecateConfig, connection: Connection, speeds: Speeds
) -> LayerState:
    world = World(connection.nodes[parts.ranks], speeds)
    return LayerState(
        parts, index, config, world=world, transport=connection.transports[parts.ranks]
    )


def _attach(
    model: _Model,
    states: list[LayerState],
    listeners: list[Callable[[], None]],
    everyone: dist.ProcessGroup | None,
) -> None:
    """Turn all layers at once; an exception undoes what was done. ``everyone``: the group in which homes move."""
    tracker = (prefetcher := Prefetcher(states, model.chunk_of)).tracker
    tracker.listeners += listeners
    if everyone is not None:
        own = get_expert_data_parallel_rank()
        homes = Homes(states, everyone, replica=own, optimizers=tracker.optimizers)
        changes = dict(history=prefetcher.monitor.history, weights_changed=tracker.weights_changed)
        prefetcher.rehoming = Rehoming(homes, states, everyone, **changes)
    rehoming, monitor, chunk_of = prefetcher.rehoming, prefetcher.monitor, model.chunk_of
    monitor.recorder = LayerRecorder(
        states,
        prefetcher.meter,
        chunk_of=chunk_of,
        collect=monitor.collect_ready,
        microbatches=lambda: tracker.microbatches or 1,
    )
    block_of = {id(m.mlp): m for chunk in model.chunks for m in chunk.modules() if _is_block(m)}
    with contextlib.ExitStack() as undo:
        orders = states[0].config.slots > 0
        prefetcher.returns.data_parallel = DataParallel(
            model.chunks, prefetcher, undo, orders=orders
        )
        tracker.listeners.append(prefetcher.returns.data_parallel.begin_iteration)
        loaded = lambda *_: tracker.weights_changed("weights were loaded")  # noqa: E731
        for layer, state in zip(model.layers, states, strict=True):
            experts = layer.experts
            _assign(
                undo,
                layer,
                fssdp=state,
                prefetcher=prefetcher,
                __class__=_subclass(FSSDPLayer, type(layer)),
            )
            own = dict(physical=state.parts.experts, unsettled=None)
            own |= dict(reduction_point=state.parts.experts.reduction_point)
            own |= dict(restore_homes=None if rehoming is None else rehoming.restore)
            _assign(undo, experts, **own, __class__=_subclass(FSSDPExperts, type(experts)))
            undo.callback(experts.register_load_state_dict_post_hook(loaded).remove)
            if rehoming is not None:
                undo.callback(experts.register_state_dict_pre_hook(rehoming.refuse_if_moved).remove)
                undo.callback(
                    experts.register_load_state_dict_pre_hook(rehoming.refuse_if_moved).remove
                )
            if (block := block_of.get(id(layer))) is not None:
                if captured_parts(unsupported.Settings(layer.config)):
                    _assign(undo, block, __class__=_subclass(GraphedBlock, type(block)))
                else:
                    undo.callback(
                        block.self_attention.register_forward_pre_hook(layer.attention_hook).remove
                    )
            if state.always_physical:
                _assign(undo, layer, token_dispatcher=state.physical_dispatcher)
        for index, chunk in enumerate(model.chunks):
            _refuse_owners_at_first_forward(chunk, undo)
            begin = functools.partial(prefetcher.begin_chunk, index)
            undo.callback(chunk.register_forward_pre_hook(begin).remove)
            undo.callback(
                chunk.register_forward_hook(prefetcher.end_chunk, always_call=True).remove
            )
        undo.pop_all()


def _refuse_owners_at_first_forward(chunk: Module, undo: contextlib.ExitStack) -> None:
    """The model may have been wrapped, or been given adapters, after the hook."""

    def check(chunk: Module, _: Any) -> None:
        if problems := unsupported.find(wrappers.of_model([chunk]), slots=0):
            raise ValueError(
                "FSSDP cannot run:\n" + "\n".join(f"  - {problem}" for problem in problems)
            )
        handle.remove()

    undo.callback((handle := chunk.register_forward_pre_hook(check)).remove)


def _is_block(module: Module) -> bool:
    """Whether it is a transformer layer: attention first, then ``mlp``."""
    return isinstance(getattr(module, "self_attention", None), Module) and hasattr(module, "mlp")


def _assign(undo: contextlib.ExitStack, module: Module, **attributes: Any) -> None:
    """Set attributes of ``module``, and have ``undo`` put back what was there."""
    for name, value in attributes.items():
        if name == "__class__" or name in vars(module):
            undo.callback(setattr, module, name, getattr(module, name))
        else:
            undo.callback(delattr, module, name)
        setattr(module, name, value)


@functools.cache
def _subclass(mixin: type, base: type) -> type:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
