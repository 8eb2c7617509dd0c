"""The conversion hook: check settings, agree on all ranks, attach; or leave the model unchanged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_expert_data_parallel_group
from torch.nn import Module, ModuleList

from megatron_hecate.comm.agreement import Note, format_ranks, refuse
from megatron_hecate.comm.device import device_of_rank, on_gpus
from megatron_hecate.comm.groups import connected_group
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.problems import collect
from megatron_hecate.config import AUTO, HecateConfig
from megatron_hecate.faults import watchdog
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.megatron import assumptions, foreign_code, training_state
from megatron_hecate.plan import H100, Speeds, World
from megatron_hecate.record.observe import observe, read_speeds
from megatron_hecate.record.recorder import JobMetrics
from megatron_hecate.replicas import memory_estimate
from megatron_hecate.replicas.memory_estimate import JobMemory, RankMemory
from megatron_hecate.step.layer import FSSDPLayer
from megatron_hecate.step.layer_parts import LayerParts
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.switch_on import entry, unsupported, wrappers
from megatron_hecate.switch_on.attach import Chunks, Model, attach
from megatron_hecate.switch_on.chunks import PendingChunks, mark, marks
from megatron_hecate.switch_on.compiling import compile_all, compile_transfers
from megatron_hecate.switch_on.connect import Connection, connect
from megatron_hecate.switch_on.request import REQUEST


def fssdp(config: HecateConfig | None = None) -> Callable[[Any], Any]:
    """Return the hook that converts every ``MoELayer`` of a model into an FSSDP layer, in place.

    Run the hook on all ranks, after the model chunks are built and before DDP wraps the chunks: as
    a pre-wrap hook of a Megatron-Bridge provider or of ``megatron.training``'s model config, or
    directly. A second run changes nothing. The hook takes the list of model chunks, or a model, and
    returns its argument.

    As a callback of mbridge (``post_model_creation_callbacks``) it gets the chunks of a virtual
    pipeline one at a time. It then converts all of them with the last one.

    The hook raises on every rank, lists the problems of all ranks, and leaves the model unchanged.

    Raises:
        ValueError: for settings that cannot be combined, differ between ranks, or do not fit the
            model.
        TypeError: for a ``config`` or a model of another type.
        TimeoutError: when some rank does not run the hook within ``config.timeout``.
    """
    # refuses a wrapper that would take the experts' weights after the hook
    entry.install()
    return _Hook(HecateConfig.check(config))


# With slots, because Bridge copies the contents of a model's configuration and sets attributes.
@dataclasses.dataclass(frozen=True, slots=True)
class _Hook:
    """Hook of `fssdp`; an object and not a closure, so that it can be pickled and compared."""

    config: HecateConfig
    pending: PendingChunks = dataclasses.field(default_factory=PendingChunks, compare=False)

    def __call__(self, model: Any, **_: Any) -> Any:
        """Convert ``model``; keyword arguments are those of mbridge's callbacks."""
        chunks: Chunks | None = _chunks_of(model)
        earlier = marks(chunks)
        if not earlier:
            chunks = self.pending.complete(chunks)
        if chunks is None:
            return model
        if not self.config.observe:
            _convert(Model.find(chunks), self.config)
        elif True not in earlier:
            observe(chunks, self.config)
        mark(chunks, observing=self.config.observe)
        REQUEST.is_answered = True
        return model


def _convert(model: Model, config: HecateConfig) -> None:
    """Convert ``model`` and print a summary on rank 0. Collective."""
    converted = [layer for layer in model.layers if isinstance(layer, FSSDPLayer)]
    if converted and len(converted) == len(model.layers):
        _check_same_settings(converted[0].fssdp.config, config)
        return
    # a pipeline stage may have no MoE layers to show an earlier run of the hook
    if not model.layers and False in marks(model.chunks):
        return
    problems: list[str] = []
    parts = _build_parts(model, config, problems)
    with collect(problems):
        problems += wrappers.find_wrapped(model.chunks)
    if converted:
        names = ", ".join(layer.fssdp.name for layer in converted)
        problems.append(
            f"some layers run FSSDP already and others do not: {names} of {len(model.layers)}"
        )
    speeds = read_speeds(config, problems)
    groups = sorted({part.ranks for part in parts})
    connection = connect(
        config.transport, groups, problems, timeout=config.timeout, nccl_ctas=config.nccl_ctas
    )
    if connection.name == "nvlink" and config.slots:
        problems += compile_transfers()
    note = _note(
        model, parts, problems=problems, config=config, speeds=speeds, connection=connection
    )
    judge = functools.partial(_validate_job, config, connection)
    lifetime, notes = note.agree(timeout=config.timeout, judge=judge)
    resolved = dataclasses.replace(config, lifetime=lifetime, transport=connection.name)
    watchdog.watch(groups, timeout=config.timeout)
    folder = config.folder and Attempt.current().folder_of_model(config.folder)
    homes_group = _homes_group(groups, config) if config.rehome else None
    if parts:
        states: list[LayerState] = []
        for index, part in enumerate(parts):
            world = World(connection.nodes[part.ranks], speeds)
            transport = connection.transports[part.ranks]
            states.append(LayerState(part, index, resolved, world=world, transport=transport))
        attach(model, states, homes_group, folder)
    else:
        JobMetrics(())
    if dist.get_rank() == 0:
        _print_summary(notes, resolved, speeds, connection)
        if folder != config.folder:
            text = f"another model has {config.folder}; the folder of this one is {folder}"
            print(f"FSSDP: {text}", flush=True)


def _note(
    model: Model,
    parts: list[LayerParts],
    *,
    problems: list[str],
    config: HecateConfig,
    speeds: Speeds,
    connection: Connection,
) -> Note:
    """Summarize this rank for the agreement of all ranks."""
    summary = ""
    memory: dict[str, Any] = {}
    rounds = ""
    if parts:
        with collect(problems):
            summary = _summary(parts, config)
            if not problems:
                memory = _estimate_memory(parts, model, config=config, connection=connection)
            if config.slots:
                rounds = P2P.explain_rounds([part.buffer(config.slots) for part in parts])
    return Note(
        # speeds by value: ranks may read the file under different paths
        settings={**dataclasses.asdict(config), "speeds": dataclasses.asdict(speeds)},
        layers=[training_state.name_of_layer(layer) for layer in model.layers],
        experts=[part.experts.description for part in parts],
        problems=problems,
        summary=summary,
        memory=memory,
        rounds=rounds,
    )


def _homes_group(
    groups: Sequence[tuple[int, ...]], config: HecateConfig
) -> dist.ProcessGroup | None:
    """Create the process group in which experts change homes. Collective.

    It has all ranks that are connected with this rank by expert-parallel and expert data parallel
    groups.
    """
    connecting: list[Sequence[int]] = list(groups)
    if groups:
        connecting.append(dist.get_process_group_ranks(get_expert_data_parallel_group()))
    return connected_group(connecting, timeout=config.timeout, on_gpus=on_gpus())


def _chunks_of(model: Any) -> Chunks:
    """Return the chunks of a list, a tuple or a `ModuleList` of chunks, or of one model."""
    if isinstance(model, Module) and not isinstance(model, ModuleList):
        return [model]
    if isinstance(model, list | tuple | ModuleList) and all(
        isinstance(chunk, Module) for chunk in model
    ):
        return list(model)
    shown = f"a {type(model).__name__}"
    if isinstance(model, list | tuple) and model:
        shown += f" of {', '.join(sorted({type(part).__name__ for part in model}))}"
    raise TypeError(f"the hook takes a list of model chunks, or a model, got {shown}")


def _check_same_settings(running: HecateConfig, requested: HecateConfig) -> None:
    """Refuse a second run of the hook with other settings."""
    chosen = {
        name: getattr(running, name)
        for name in ("lifetime", "transport")
        if getattr(requested, name) == AUTO
    }
    if running != dataclasses.replace(requested, **chosen):
        refuse([f"this model runs FSSDP already, with {running}; asked for {requested}"])


def _build_parts(model: Model, config: HecateConfig, problems: list[str]) -> list[LayerParts]:
    """Build the parts of all layers without changing a layer; append to ``problems``."""
    with collect(problems):
        problems += assumptions.broken_assumptions()
        if not problems:
            problems += _find_unsupported(model, config)
            problems += foreign_code.find_foreign_layers(model.chunks)
            problems += _find_shared_experts(model)
        if not problems:
            problems += compile_all(config)
    if problems:
        return []
    parts: list[LayerParts] = []
    with collect(problems):
        passes = training_state.passes_per_microbatch(model.layers, model.chunks)
        refused: dict[str, list[int]] = {}
        for layer, times in zip(model.layers, passes, strict=True):
            of_layer: list[str] = []
            with collect(of_layer):
                parts.append(LayerParts.build(layer, slots=config.slots, passes=times))
            for text in of_layer:
                refused.setdefault(text, []).append(layer.layer_number)
        for text, numbers in refused.items():
            layers = "layer" if len(numbers) == 1 else "layers"
            problems.append(f"{layers} {format_ranks(numbers)}: {text}")
    experts = {part.homes_only.num_experts for part in parts}
    if config.rehome and len(experts) > 1:
        problems.append(
            f"rehome={config.rehome} with layers of {sorted(experts)} experts: homes move in equal "
            "layers only"
        )
    return parts


def _find_unsupported(model: Model, config: HecateConfig) -> list[str]:
    """List unsupported settings, once each, over the configurations of all layers."""
    around = (wrappers.of_model(model.chunks), wrappers.of_job(), config.as_arguments())
    configs = {id(layer.config): layer.config for layer in model.layers}
    problems: list[str] = []
    for layer_config in configs.values():
        problems += unsupported.find(layer_config, *around, slots=config.slots)
    return list(dict.fromkeys(problems))


def _find_shared_experts(model: Model) -> list[str]:
    """List layers that share one module of experts: its replicas belong to one layer's routes."""
    layers_with: dict[int, list[str]] = {}
    for layer in model.layers:
        # a layer of one kernel has no module of experts, which is refused elsewhere
        if layer.experts is not None:
            name = training_state.name_of_layer(layer)
            layers_with.setdefault(id(layer.experts), []).append(name)
    return [
        f"{', '.join(names)} share one module of experts; give each layer a module of its own (it "
        "may have the same parameters), or leave --moe-fssdp off"
        for names in layers_with.values()
        if len(names) > 1
    ]


def _summary(parts: list[LayerParts], config: HecateConfig) -> str:
    """Describe the layers of this rank for the line of `_print_summary`."""
    experts = parts[0].homes_only.num_experts
    ranks = len(parts[0].ranks)
    text = f"{experts} experts over {ranks} ranks, {config.slots} slots per rank and layer"
    if config.rehome:
        text += f", search for better homes every {config.rehome} iterations"
    return text


def _estimate_memory(
    parts: list[LayerParts], model: Model, *, config: HecateConfig, connection: Connection
) -> dict[str, Any]:
    """Estimate this rank's `RankMemory`, as a dictionary."""
    layer_config = parts[0].layer.config
    dtype = None
    # Megatron casts the parameters after this hook
    if layer_config.bf16:
        dtype = torch.bfloat16
    elif layer_config.fp16:
        dtype = torch.float16
    layers = tuple(part.buffer(config.slots, dtype) for part in parts)
    transport = connection.transports.get(parts[0].ranks)
    experts = memory_estimate.RankExperts.with_adam(
        layers,
        in_flight=training_state.forwards_in_flight(layer_config, model.chunk_of),
        transport_bytes=transport.extra_bytes(layers) if transport and config.slots else 0,
        nccl_bytes=connection.nccl_bytes,
    )
    # frozen experts have neither gradients nor optimizer state
    homes = [p for part in parts for home in part.experts.homes() for p in home]
    trained = sum(p.numel() for p in homes if p.requires_grad) / sum(p.numel() for p in homes)
    experts = dataclasses.replace(
        experts,
        grad_bytes=round(experts.grad_bytes * trained),
        optimizer_bytes=round(experts.optimizer_bytes * trained),
    )
    on_gpu = device_of_rank().type == "cuda"
    free = RankMemory.free_memory(gpu=on_gpu)
    if on_gpu:
        # Megatron may move the model to the GPU after this hook
        for chunk in model.chunks:
            elsewhere = [p for p in chunk.parameters() if not p.is_cuda]
            free -= sum(p.numel() * p.element_size() for p in elsewhere)
    return dataclasses.asdict(RankMemory.estimate(experts, free))


def _job_memory(notes: list[Note]) -> JobMemory:
    """Collect the memory of all ranks with MoE layers."""
    return JobMemory(
        {rank: RankMemory.parse(note.memory) for rank, note in enumerate(notes) if note.memory}
    )


def _validate_job(
    config: HecateConfig, connection: Connection, notes: list[Note]
) -> tuple[list[str], str]:
    """Validate the whole job and decide its lifetime of replicas, on rank 0.

    Returns:
        Problems of the job, and the lifetime.
    """
    memory = _job_memory(notes)
    lifetime = memory.choose_lifetime(config.lifetime)
    replica_bytes = {rank: own.by_lifetime[lifetime].replicas for rank, own in memory.ranks.items()}
    too_large = memory.explain_too_large(lifetime, slots=config.slots)
    problems = connection.shared_memory_problems(replica_bytes)
    if too_large is not None:
        problems.append(too_large)
    return problems, lifetime


def _print_summary(
    notes: list[Note], config: HecateConfig, speeds: Speeds, connection: Connection
) -> None:
    """Print the settings of the job and the memory of every rank.

    Ranks with the same figures share a table.
    """
    names: set[str] = set()
    for note in notes:
        names.update(note.layers)
    summary = next(note.summary for note in notes if note.summary)
    transport = f"transport {config.transport}"
    if connection.why:
        transport += f" ({connection.why})"
    late = ""
    if config.late_replicas:
        late = f", at most {config.late_replicas} late replicas per layer"
    measured = config.speeds or ("an H100 node" if speeds is H100 else "CPU ranks")
    print(
        f"FSSDP on: {len(names)} MoE layers, {summary}, lifetime {config.lifetime}, "
        f"{transport}{late}, cost model with the speeds of {measured}",
        flush=True,
    )
    if config.slots:
        print(_job_memory(notes).describe(config.lifetime), flush=True)
    if connection.exposed:
        print(f"FSSDP: {connection.exposed}", flush=True)
        rounds = next((note.rounds for note in notes if note.rounds), "")
        if rounds and connection.name == P2P.name:
            print(f"FSSDP: {rounds}", flush=True)
