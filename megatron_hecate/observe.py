"""Observe only: Megatron trains as it always does, and the tokens of every expert are counted.

A router becomes an object of a subclass of its class, whose forward adds the tokens of each expert to a buffer that
never moves, so that CUDA graphs can hold the addition. When the optimizer steps, one asynchronous sum over the
expert-parallel group begins; it is read at the next step or a later one, when it is there, and nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.config import OBSERVED, HecateConfig
from megatron_hecate.job import watchdog
from megatron_hecate.job.agreement import Note
from megatron_hecate.job.device import device_of_rank
from megatron_hecate.job.watchdog import here
from megatron_hecate.megatron.global_hooks import listen_to_steps
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.megatron.training_state import (
    captures_graph,
    forwards_in_flight,
    name_of_layer,
    num_microbatches,
)
from megatron_hecate.plan import CPU, H100, LayerShape, Speeds, World
from megatron_hecate.record.metrics import step_metrics
from megatron_hecate.record.recorder import JobMetrics, StageRecorder, describe_run
from megatron_hecate.replicas.memory_estimate import RankExperts
from megatron_hecate.runtime.load_monitor import GroupSum

# whether the hook observes, of all models of this process that it ran on
_switched_on: set[bool] = set()


def observe(chunks: list[Module], config: HecateConfig) -> list[Module]:
    """Count what the routers of these model chunks choose. All ranks call it, before DDP wraps the chunks.

    Raises (on every rank):
        ValueError: for settings that differ between ranks, speeds that cannot be read, or a model without MoE layers.
        TimeoutError: when some rank does not come within ``config.timeout``.
    """
    layers = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)
    ]
    if has_run(chunks, observing=True):
        return chunks
    problems: list[str] = []
    speeds = read_speeds(config, problems)
    names = [name_of_layer(layer) for layer in layers]
    note = Note(
        settings={**dataclasses.asdict(config), "speeds": ""}, layers=names, problems=problems
    )
    _, notes = note.agree(timeout=config.timeout)
    if layers:
        observer = Observer(layers, names, speeds=speeds, config=config)
        for layer, name, counts in zip(layers, names, observer.counts, strict=True):
            layer.router.observed = counts[: layer.config.num_moe_experts]
            layer.router.__class__ = _observed(type(layer.router))
            layer.router.observer = observer  # which lives as long as the model
            layer.router.observed_name = layer.observed_name = name
            layer.__class__ = _watched(type(layer))
    else:
        JobMetrics(())
    watchdog.watch([_ranks_in_step(layers[0])] if layers else [], timeout=config.timeout)
    note_run(chunks, observing=True)
    _, again = Note(layers=names, summary=observer.stage.refused if layers else "").agree(
        timeout=config.timeout
    )
    if dist.get_rank() == 0:
        num_layers = len({name for of_rank in notes for name in of_rank.layers})
        refused = "; ".join(sorted({of_rank.summary for of_rank in again} - {""}))
        record = (
            f"not recorded: {refused}" if refused else f"the record is {config.record or OBSERVED}"
        )
        print(f"FSSDP observes {num_layers} MoE layers and is off; {record}", flush=True)
    return chunks


def has_run(chunks: list[Module], *, observing: bool) -> bool:
    """Whether the hook has run on these model chunks; a pipeline stage without MoE layers does not show it."""
    return any(
        getattr(module, "_fssdp_hook", None) is observing
        for chunk in chunks
        for module in chunk.modules()
    )


def note_run(chunks: list[Module], *, observing: bool) -> None:
    """Have `has_run` say so."""
    _switched_on.add(observing)
    for chunk in chunks:
        chunk._fssdp_hook = observing


def is_on() -> bool:
    """Whether the hook has run on any model of this process."""
    return bool(_switched_on)


def read_speeds(config: HecateConfig, problems: list[str]) -> Speeds:
    """By which copies and tokens are judged: measured, or those of an H100 node (where NCCL is), or of CPU ranks."""
    usual = H100 if device_of_rank().type == "cuda" else CPU
    if config.speeds is None:
        return usual
    try:
        return Speeds.load(config.speeds)
    except ValueError as error:
        problems.append(f"speeds: {error}")
        return usual


def _captures() -> bool:
    return device_of_rank().type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ranks_in_step(layer: MoELayer) -> list[int]:
    """Ranks that come to the same places as this one, and wait for each other there, or at the iteration's end."""
    alone = layer.ep_group.size() == 1
    return dist.get_process_group_ranks(
        parallel_state.get_expert_data_parallel_group() if alone else layer.ep_group
    )


@functools.cache
def _watched(layer: type) -> type:
    """A subclass of a MoE layer's class that says where it is."""

    def through(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: here.through(
            self.observed_name, method, self, *args, **kwargs
        )

    return type(
        layer.__name__,
        (layer,),
        {name: through(getattr(layer, name)) for name in ("dispatch", "combine")},
    )


@functools.cache
def _observed(router: type) -> type:
    """A subclass of a router's class that counts. (A mixin would change the object's layout: routers are ABCs.) Its
    name is the same: Megatron-FSDP tells by it that every rank has all of a router."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.observer.comes_to(self.observed_name, trains=self.training)
        routed = router.forward(self, *args, **kwargs)
        # with a checkpoint around it, the first pass has no gradients and the recomputed one has
        trains = self.training and torch.is_grad_enabled()
        if trains and (
            not captures_graph() or torch.cuda.is_current_stream_capturing()
        ):  # else it warms up to a capture
            chosen = routed[1].detach()
            if chosen.dtype is torch.bool:
                self.observed.add_(chosen.view(-1, chosen.shape[-1]).sum(dim=0))
            else:  # numbers of experts, one per choice; below 0 is none
                chosen = chosen.reshape(-1).long()
                self.observed.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).long())
            self.observer.has_counted = True
        return routed

    return type(router.__name__, (router,), {"forward": forward})


class Observer:
    """Sums what this rank's routers counted over the expert-parallel group, once per optimizer step.

    Args:
        layers: Megatron's, unconverted.
        names: of each.
        speeds: by which lost time is modelled.
        config: names the record.
    """

    def __init__(
        self, layers: list[MoELayer], names: list[str], *, speeds: Speeds, config: HecateConfig
    ) -> None:
        first, experts = layers[0], max(layer.config.num_moe_experts for layer in layers)
        self.counts = torch.zeros(
            (len(layers), experts), dtype=torch.int64, device=device_of_rank()
        )
        self._group, ranks = first.token_dispatcher.tp_ep_group, first.ep_group.size()
        hosts: list[str] = [""] * ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=first.ep_group)
        world = World.from_names(hosts, speeds)
        shape, model = _shape(first), first.config
        elements, dtype = int(shape.token_flops / 2), next(first.experts.parameters()).dtype
        buffers = (LayerBuffer(0, elements, dtype, first.num_local_experts),) * len(layers)
        memory = RankExperts.with_adam(
            buffers, in_flight=forwards_in_flight(model, [0] * len(layers))
        )
        sizes = dict(num_experts=experts, ranks=ranks, node=world.node, top_k=model.moe_router_topk)
        sizes |= dict(memory=memory.for_record(model, "iteration"))
        info = describe_run("observe", names, shape=shape, speeds=speeds, **sizes)
        self.stage = StageRecorder(
            info, config.record or OBSERVED, group=self._group, collect=self.collect
        )
        self._token_ms = 1e3 * shape.token_seconds(world)
        self._experts = [layer.config.num_moe_experts for layer in layers]
        self._sums: deque[tuple[int, float, GroupSum]] = deque()
        self._stream = torch.cuda.Stream() if self.counts.is_cuda else None
        self.has_counted = False  # any token, ever
        self._iteration = 0  # the number of the one that trains, once a forward has Python
        self._forwards, self._ended = 0, False  # forwards, and whether any iteration has
        self._optimizer: weakref.ref[Optimizer] | None = None
        listen_to_steps(self)

    def comes_to(self, layer: str, *, trains: bool) -> None:
        """A router's forward begins, of ``layer``. In a graph it has no Python."""
        if trains and not captures_graph():
            if (
                self._iteration
                and running_iteration() not in (None, self._iteration)
                and not _captures()
            ):
                self.end_iteration()  # Megatron skipped the step, or the optimizer is none of torch's
            self._iteration = here.iteration = self._iteration or self.stage.begin()
            self._forwards += 1
            if not self._ended and self._forwards == len(self.counts) * 10 * (
                num_microbatches() or 10
            ):
                text = "FSSDP records nothing until an optimizer steps that is one of torch's"
                print(text, file=sys.stderr, flush=True)
        here.reach(layer)

    def before_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step. Megatron chains several, and other models have theirs: the first that stepped
        after this model's forward tells where iterations end. (In a graph a forward has no Python.)"""
        if self.has_counted and (self._optimizer is None or self._optimizer() is None):
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        module, alive = (
            sys.modules.get("megatron.core.optimizer.optimizer_cuda_graph"),
            weakref.ref(self),
        )
        graph = module and module.OptimizerCudaGraphWrapper.cuda_graph
        if not _captures():
            self.end_iteration()
        elif graph is None:
            print(
                "FSSDP observes no longer: a CUDA graph holds the optimizer's step",
                file=sys.stderr,
                flush=True,
            )
        else:  # no step has Python from now on, but every replay has
            replay = graph.replay
            graph.replay = lambda: ((observer := alive()) and observer.end_iteration(), replay())[1]

    def end_iteration(self) -> None:
        """Begin to sum what was counted. Every rank of the group must call it at the same point."""
        iteration, self._iteration = self._iteration or self.stage.begin(), 0
        here.iteration, self._ended = iteration, True
        here.reach("the optimizer's step")
        self.collect()
        counts = self.counts.clone()
        self.counts.zero_()
        total = GroupSum(counts, self._group, timeout=1.0, stream=self._stream)
        self._sums.append((iteration, time.time(), total))

    def collect(self) -> bool:
        """Take the sums that are here; returns whether none is under way."""
        while self._sums and self._sums[0][2].ready:
            iteration, ended, total = self._sums.popleft()
            load = total.read()
            self.stage.take(
                iteration, {"load": load, "time": ended}, functools.partial(self._values, load)
            )
        return not self._sums

    def _values(self, load: np.ndarray) -> dict[str, np.ndarray]:
        ranks = self.stage.info.ranks
        own = [of[:n] for of, n in zip(load, self._experts, strict=True)]
        routed = np.stack([of.reshape(ranks, -1).sum(axis=1) for of in own])
        return step_metrics(own, routed, routed, token_ms=self._token_ms)


def _shape(layer: MoELayer) -> LayerShape:
    """Of an expert as Megatron has built it; with the optimizer to come, nothing of it is sharded yet."""
    params = list(layer.experts.parameters())
    elements = sum(p.numel() for p in params) / layer.num_local_experts
    width, size = (
        params[0].element_size(),
        getattr(layer.config, "moe_latent_size", None) or layer.config.hidden_size,
    )
    return LayerShape(
        expert_bytes=elements * width,
        grad_bytes=elements * max(4, width),
        token_bytes=size * width,
        token_flops=2.0 * elements,
        microbatches=num_microbatches() or 1,
    )
