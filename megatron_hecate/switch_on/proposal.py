"""Proposal of one rank to switch FSSDP on, and the agreement of all ranks on it.

Nothing here changes the model.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_hecate.comm.agreement import Note, collect, format_ranks
from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.config import HecateConfig
from megatron_hecate.device.launch import Kernels
from megatron_hecate.homes.converters import find_unknown_libraries
from megatron_hecate.homes.planner import compile_home_planner
from megatron_hecate.megatron import assumptions, foreign_code, training_state
from megatron_hecate.megatron.cuda_graphs import captures_iteration
from megatron_hecate.megatron.rules import SettingSources
from megatron_hecate.megatron.training_globals import training_arguments
from megatron_hecate.plan import H100, Speeds, compile_planner
from megatron_hecate.record.observe import read_speeds
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.replicas.memory_estimate import ExpertMemory, JobMemory, RankMemory
from megatron_hecate.step.layer import FSSDPLayer
from megatron_hecate.step.layer_state import LayerParts
from megatron_hecate.switch_on import unsupported, wrappers
from megatron_hecate.switch_on.attach import Model
from megatron_hecate.switch_on.connect import Connection, connect


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What one rank would convert, or why it cannot.

    Args:
        model: model to convert.
        config: settings asked for.
        parts: parts of each layer; empty with problems, and on a stage without MoE layers.
        speeds: speeds of the cost model.
        connection: transport of this rank.
        problems: reasons why this rank cannot switch FSSDP on.
    """

    model: Model
    config: HecateConfig
    parts: list[LayerParts]
    speeds: Speeds
    connection: Connection
    problems: list[str]

    @classmethod
    def make(cls, model: Model, config: HecateConfig) -> Proposal:
        """Check ``model``, build the parts of its layers, and connect the ranks. Collective."""
        problems: list[str] = []
        parts = _build_parts(model, config, problems)
        with collect(problems):
            problems += wrappers.find_wrapped(model.chunks)
        converted = [layer for layer in model.layers if isinstance(layer, FSSDPLayer)]
        if converted:
            names = ", ".join(layer.fssdp.name for layer in converted)
            problems.append(
                f"some layers run FSSDP already and others do not: {names} of {len(model.layers)}"
            )
        speeds = read_speeds(config, problems)
        ranks = parts[0].ranks if parts else ()
        connection = connect(
            config.transport, ranks, problems, timeout=config.timeout, nccl_ctas=config.nccl_ctas
        )
        transport = connection.transport
        is_graphed = parts and captures_iteration(SettingSources(parts[0].layer.config))
        if is_graphed and config.slots and transport and not transport.is_capturable:
            by_name = {"nvlink": "nvlink between several NVLink domains"}
            frozen = unsupported.FROZEN.format(by_name.get(connection.name, connection.name))
            problems.append(f"cuda_graph_impl=full_iteration: {frozen}; {unsupported.UNFROZEN}")
        return cls(model, config, parts, speeds, connection, problems)

    def agree(self) -> tuple[HecateConfig, list[Note]]:
        """Agree with all ranks, or raise one error on all of them. Collective.

        Returns:
            The settings, with lifetime and transport resolved; on rank 0 the notes of all ranks.
        """

        def judge(notes: list[Note]) -> tuple[list[str], str]:
            memory = _job_memory(notes)
            lifetime = memory.choose_lifetime(self.config.lifetime)
            too_large = memory.explain_too_large(lifetime, slots=self.config.slots)
            return list(filter(None, [too_large])), lifetime

        lifetime, notes = self._note().agree(timeout=self.config.timeout, judge=judge)
        resolved = dataclasses.replace(
            self.config, lifetime=lifetime, transport=self.connection.name
        )
        return resolved, notes

    def _note(self) -> Note:
        """Summarize this rank for the agreement of all ranks."""
        summary = ""
        memory: dict[str, Any] = {}
        # speeds by value: ranks may read the file under different paths
        settings: dict[str, Any] = {
            **dataclasses.asdict(self.config),
            "speeds": dataclasses.asdict(self.speeds),
        }
        for part in self.parts:
            # replicas need experts of one kind and size, trained on all ranks or on none
            text = part.experts.description
            if (self.config.slots or self.config.rehome) and not part.experts.are_trained():
                text += ", frozen (freeze them on all ranks or on none)"
            settings[f"experts of {training_state.name_of_layer(part.layer)}"] = text
        if self.parts:
            with collect(self.problems):
                summary = _summarize_layers(self.parts, self.config)
                if not self.problems:
                    memory = _estimate_memory(
                        self.parts, self.model, config=self.config, connection=self.connection
                    )
        return Note(
            settings=settings,
            layers=[training_state.name_of_layer(layer) for layer in self.model.layers],
            problems=self.problems,
            summary=summary,
            memory=memory,
        )

    def print_summary(self, notes: list[Note], resolved: HecateConfig) -> None:
        """Print the settings of the job and the memory of every rank, on rank 0.

        Args:
            notes: notes of all ranks.
            resolved: settings, with lifetime and transport resolved.
        """
        num_layers = len(set(chain.from_iterable(note.layers for note in notes)))
        summary = next(note.summary for note in notes if note.summary)
        why = f" ({self.connection.why})" if self.connection.why else ""
        late = ""
        if resolved.late_replicas:
            late = f", at most {resolved.late_replicas} late replicas per layer"
        measured = resolved.speeds or ("an H100 node" if self.speeds is H100 else "CPU ranks")
        lines = [
            f"FSSDP on: {num_layers} MoE layers, {summary}, lifetime {resolved.lifetime}, "
            f"transport {resolved.transport}{why}{late}, cost model with the speeds of {measured}"
        ]
        if resolved.slots:
            lines.append(_job_memory(notes).describe(resolved.lifetime))
        print("\n".join(lines), flush=True)


def _build_parts(model: Model, config: HecateConfig, problems: list[str]) -> list[LayerParts]:
    """Build the parts of all layers without changing a layer; append to ``problems``."""
    with collect(problems):
        problems += assumptions.broken_assumptions()
        if not problems:
            problems += _find_unsupported(model, config)
            problems += foreign_code.find_foreign_layers(model.chunks)
            problems += _find_shared_experts(model)
        if not problems:
            _compile(config, problems)
    if problems:
        return []
    parts: list[LayerParts] = []
    with collect(problems):
        passes = training_state.passes_per_microbatch(model.layers, model.chunks)
        refused: dict[str, list[int]] = {}
        for layer, chunk in model.layers.items():
            layer_problems: list[str] = []
            with collect(layer_problems):
                part = LayerParts(layer, chunk=chunk, slots=config.slots, passes=passes[layer])
                if config.slots or config.rehome:
                    part.experts.are_trained()
                parts.append(part)
            for text in layer_problems:
                refused.setdefault(text, []).append(layer.layer_number)
        for text, numbers in refused.items():
            problems.append(f"{format_ranks(numbers, 'layer')}: {text}")
    if config.rehome:
        problems += find_unknown_libraries()
    groups = sorted({part.ranks for part in parts})
    if len(groups) > 1:
        problems.append(
            f"layers of several expert-parallel groups, of ranks {groups}: replicas move inside "
            "one; give all layers the same group, or leave --moe-fssdp off"
        )
    experts = {part.homes_only.num_experts for part in parts}
    if config.rehome and len(experts) > 1:
        problems.append(
            f"rehome={config.rehome} with layers of {sorted(experts)} experts: homes move in equal "
            "layers only"
        )
    return parts


def _compile(config: HecateConfig, problems: list[str]) -> None:
    """Compile the kernels, and what ``config`` needs of the planner; append to ``problems``.

    A rank on which this fails in the first forward would leave all other ranks waiting there.
    """
    with collect(problems, "planning cannot be compiled"):
        if config.slots or config.rehome:
            compile_planner(_notice)
        if config.rehome:
            compile_home_planner(_notice)
    with collect(problems, f"{socket.gethostname()}: the kernels cannot be compiled"):
        Kernels(device_of_rank())


def _notice() -> None:
    """Print on rank 0 why the job does not begin yet."""
    if dist.get_rank() == 0:
        text = "compiling, for less than a minute; megatron-hecate check compiles ahead"
        print(f"FSSDP: {text}", flush=True)


def _find_unsupported(model: Model, config: HecateConfig) -> list[str]:
    """List unsupported settings, once each, over the configurations of all layers."""
    sources = (
        wrappers.model_settings(model.chunks),
        wrappers.job_settings(),
        config.as_arguments(),
    )
    configs = {id(layer.config): layer.config for layer in model.layers}
    problems: list[str] = []
    for layer_config in configs.values():
        problems += unsupported.find(layer_config, *sources, slots=config.slots)
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


def _summarize_layers(parts: list[LayerParts], config: HecateConfig) -> str:
    """Describe the layers of this rank for the first line of `Proposal.print_summary`."""
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
    in_fp32 = getattr(training_arguments(), "accumulate_allreduce_grads_in_fp32", True)
    if dtype and layer_config.gradient_accumulation_fusion and not in_fp32:
        layers = tuple(dataclasses.replace(layer, grad_dtype=dtype) for layer in layers)
    transport = connection.transport
    homes = list(chain.from_iterable(chain.from_iterable(p.experts.homes() for p in parts)))
    estimate = functools.partial(
        ExpertMemory.estimate,
        layers,
        transport_bytes=transport.extra_bytes(layers) if transport and config.slots else 0,
        nccl_bytes=connection.nccl_bytes,
        # frozen experts have neither gradients nor optimizer state
        trained=sum(p.numel() for p in homes if p.requires_grad) / sum(p.numel() for p in homes),
    )
    on_gpu = device_of_rank().type == "cuda"
    free = RankMemory.free_memory(gpu=on_gpu)
    if on_gpu:
        # Megatron may move the model to the GPU after this hook
        for chunk in model.chunks:
            elsewhere = [p for p in chunk.parameters() if not p.is_cuda]
            free -= sum(p.numel() * p.element_size() for p in elsewhere)
    by_lifetime = {lifetime: estimate(lifetime) for lifetime in LIFETIMES}
    return dataclasses.asdict(RankMemory(by_lifetime, free))


def _job_memory(notes: list[Note]) -> JobMemory:
    """Collect the memory of all ranks with MoE layers."""
    return JobMemory(
        {rank: RankMemory.parse(note.memory) for rank, note in enumerate(notes) if note.memory}
    )
