"""Observation of stock Megatron training: count the tokens of every expert.

Each router's class is replaced by a subclass whose forward adds the tokens of each expert to a
buffer at a fixed address (`token_counts`), so that CUDA graphs can hold the addition. Each
optimizer step starts one asynchronous all-reduce over the expert-parallel group. The result is read
at a later step once it is ready; nothing waits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from megatron_hecate.comm.agreement import Note
from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.problems import collect
from megatron_hecate.config import HecateConfig
from megatron_hecate.faults import watchdog
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.watchdog import here
from megatron_hecate.megatron.global_hooks import listen_to_steps
from megatron_hecate.megatron.job_sizes import job_sizes, stock_memory, stock_shape
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.megatron.training_state import (
    captures_graph,
    name_of_layer,
    num_microbatches,
)
from megatron_hecate.plan import CPU, H100, Speeds, World
from megatron_hecate.record.expert_timer import ExpertTimer
from megatron_hecate.record.metrics import step_metrics
from megatron_hecate.record.recorder import JobMetrics, StageRecorder, describe_run
from megatron_hecate.step.load_monitor import GroupSum
from megatron_hecate.step.token_counts import LayerCounts, TokenCounts


def observe(chunks: list[Module], config: HecateConfig) -> list[Module]:
    """Count the tokens that the routers of these model chunks send to each expert.

    Collective. Call it before DDP wraps the chunks. Errors are raised on every rank.

    Raises:
        ValueError: for settings that differ between ranks, unreadable speeds, or a model without
            MoE layers.
        TimeoutError: when some rank does not call it within ``config.timeout``.
    """
    layers = [module for module in _modules(chunks) if isinstance(module, MoELayer)]
    problems: list[str] = []
    speeds = read_speeds(config, problems)
    names = [name_of_layer(layer) for layer in layers]
    if without_experts := [
        name for layer, name in zip(layers, names, strict=True) if layer.experts is None
    ]:
        problems.append(
            f"{', '.join(without_experts)}: no experts to observe, because one kernel runs the "
            "layer; set model.moe_megakernel_backend=null or leave observe off"
        )
    note = Note(
        settings={**dataclasses.asdict(config), "speeds": ""}, layers=names, problems=problems
    )
    _, notes = note.agree(timeout=config.timeout)
    folder = Attempt.current().folder_of_model(config.folder)
    refused = ""
    # An exception of one rank from here on would leave the others waiting, too.
    with collect(problems):
        if layers:
            observer = _Observer(layers, names, speeds=speeds, folder=folder)
            for index, (layer, name) in enumerate(zip(layers, names, strict=True)):
                _attach(layer, name, counts=observer.counts.of_layer(index), observer=observer)
            refused = observer.stage.refused
        else:
            JobMetrics(())
        watched = [_ranks_in_step(layers[0])] if layers else []
        watchdog.watch(watched, timeout=config.timeout)
    note = Note(layers=names, summary=refused, problems=problems)
    _, refusals = note.agree(timeout=config.timeout)
    if dist.get_rank() == 0:
        _print_summary(notes, refusals, folder)
    return chunks


def _attach(layer: MoELayer, name: str, *, counts: LayerCounts, observer: _Observer) -> None:
    """Make a layer and its router report to ``observer``.

    Args:
        layer: layer to observe.
        name: name of the layer.
        counts: counts of the layer's tokens.
        observer: observer of all layers.
    """
    layer.router.observed = counts
    layer.router.__class__ = _observed(type(layer.router))
    # the reference keeps the observer alive as long as the model
    layer.router.observer = observer
    layer.router.observed_name = name
    layer.observed_name = name
    layer.__class__ = _watched(type(layer))


def _print_summary(notes: list[Note], refusals: list[Note], record: str) -> None:
    """Print one line about the layers and the record.

    Args:
        notes: layers of every rank.
        refusals: reasons of the ranks that do not record.
        record: folder of the record.
    """
    names: set[str] = set()
    for note in notes:
        names.update(note.layers)
    refused = "; ".join(sorted({note.summary for note in refusals} - {""}))
    outcome = f"the record is {record}"
    if refused:
        outcome = f"not recorded: {refused}"
    print(f"FSSDP observes {len(names)} MoE layers and is off; {outcome}", flush=True)


def _modules(chunks: list[Module]) -> Iterator[Module]:
    """Iterate over all modules of the model chunks."""
    return itertools.chain.from_iterable(chunk.modules() for chunk in chunks)


def read_speeds(config: HecateConfig, problems: list[str]) -> Speeds:
    """Read the speeds of the cost model from a file, or return the default of the device.

    Args:
        config: settings, with the path of the file or ``None``. The default is an H100 node on GPUs
            and CPU ranks elsewhere.
        problems: list to which an unreadable file is added.
    """
    usual = H100 if device_of_rank().type == "cuda" else CPU
    if config.speeds is None:
        return usual
    with collect(problems, "speeds"):
        return Speeds.load(config.speeds)
    return usual


def _captures() -> bool:
    """Whether the current stream is capturing a CUDA graph."""
    return device_of_rank().type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ranks_in_step(layer: MoELayer) -> list[int]:
    """List the ranks that run in step with this rank, for the watchdog.

    The ranks of an expert-parallel group wait for each other in each layer. Without expert
    parallelism the ranks that share gradients wait for each other at the end of an iteration.
    """
    group = layer.ep_group
    if group.size() == 1:
        group = parallel_state.get_expert_data_parallel_group()
    return dist.get_process_group_ranks(group)


@functools.cache
def _watched(layer: type) -> type:
    """Make a subclass of a MoE layer's class that reports its location to the watchdog."""

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
    """Make a subclass of a router's class that counts tokens.

    A mixin would change the object's layout, because routers are ABCs. The subclass has the same
    name, because Megatron-FSDP recognizes by the name that a router is not sharded.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.observer.comes_to(self.observed_name, trains=self.training)
        routed = router.forward(self, *args, **kwargs)
        # inside a checkpoint only the recomputed pass has gradients
        trains = self.training and torch.is_grad_enabled()
        # not in the warmup before a capture
        if trains and (not captures_graph() or torch.cuda.is_current_stream_capturing()):
            self.observed.add(routed[1].detach())
            self.observer.has_counted = True
        return routed

    return type(router.__name__, (router,), {"forward": forward})


class _Observer:
    """All-reduce of the routers' counts over the expert-parallel group, once per optimizer step.

    Args:
        layers: unconverted MoE layers of Megatron.
        names: name of each layer.
        speeds: speeds of the cost model for lost time.
        folder: folder of the record.
    """

    def __init__(
        self, layers: list[MoELayer], names: list[str], *, speeds: Speeds, folder: str
    ) -> None:
        first = layers[0]
        self._group = first.token_dispatcher.tp_ep_group
        ranks = first.ep_group.size()
        device = device_of_rank()
        self._experts = [layer.config.num_moe_experts for layer in layers]
        self.counts = TokenCounts(
            self._experts, ranks, microbatches=num_microbatches(), device=device
        )
        self._num_layers = len(layers)
        self._timer = ExpertTimer(
            len(layers), first.ep_group.rank(), ranks, on_gpu=device.type == "cuda"
        )
        for index, layer in enumerate(layers):
            for name, value in self._timer.attributes(index, layer.experts).items():
                setattr(layer.experts, name, value)
        hosts: list[str] = [""] * ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=first.ep_group)
        world = World.from_names(hosts, speeds)
        shape = stock_shape(first)
        model = first.config
        info = describe_run(
            "observe",
            names,
            shape=shape,
            speeds=speeds,
            num_experts=max(self._experts),
            ranks=ranks,
            node=world.node,
            top_k=model.moe_router_topk,
            memory=stock_memory(first, shape, len(layers)),
            job=job_sizes(model),
        )
        self.stage = StageRecorder(info, folder, group=self._group, collect=self.collect)
        self._token_ms = 1e3 * shape.token_seconds(world)
        # iteration, unix time of its end, and sum of its counts
        self._sums: deque[tuple[int, float, GroupSum]] = deque()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        # whether any token was counted since the start
        self.has_counted = False
        # number of the running iteration; 0 before its first forward outside of a graph
        self._iteration = 0
        # forwards outside of graphs, and whether any iteration has ended, since the start
        self._forwards = 0
        self._ended = False
        self._optimizer: weakref.ref[Optimizer] | None = None
        listen_to_steps(self)

    def comes_to(self, layer: str, *, trains: bool) -> None:
        """Note the beginning of a router's forward; not called in replays of CUDA graphs.

        Args:
            layer: name of the router's layer.
            trains: whether the router is in training mode.
        """
        if trains and not captures_graph():
            begun = self._iteration
            if begun and running_iteration() not in (None, begun) and not _captures():
                # Megatron skipped the step, or the optimizer is none of torch's
                self.end_iteration()
            self._iteration = here.iteration = self._iteration or self.stage.begin()
            self._forwards += 1
            if not self._ended:
                # forwards of about ten iterations
                patience = self._num_layers * 10 * (num_microbatches() or 10)
                if self._forwards == patience:
                    text = "FSSDP records nothing until a torch.optim optimizer steps"
                    print(text, file=sys.stderr, flush=True)
        here.reach(layer)

    def before_step(self, optimizer: Optimizer) -> None:
        """End the iteration if ``optimizer`` is the one whose steps end this model's iterations.

        Megatron chains several optimizers, and other models have optimizers of their own. The first
        optimizer to step after this model has counted tokens ends the iterations. (Forwards are not
        observed directly: a replayed graph runs no Python.)
        """
        # chosen again if the optimizer has been deleted
        if self.has_counted and (self._optimizer is None or self._optimizer() is None):
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        module = sys.modules.get("megatron.core.optimizer.optimizer_cuda_graph")
        graph = module and module.OptimizerCudaGraphWrapper.cuda_graph
        if not _captures():
            self.end_iteration()
        elif graph is None:
            text = "FSSDP stops observing: a CUDA graph holds the optimizer's step"
            print(text, file=sys.stderr, flush=True)
        else:
            self._end_iterations_at_replays(graph)

    def _end_iterations_at_replays(self, graph: Any) -> None:
        """Wrap ``graph.replay``: steps inside the graph run no Python, but each replay does."""
        replay = graph.replay
        alive = weakref.ref(self)

        def replay_and_end() -> Any:
            observer = alive()
            if observer is not None:
                observer.end_iteration()
            return replay()

        graph.replay = replay_and_end

    def end_iteration(self) -> None:
        """Start to sum the counts. Collective: all ranks of the group call it at the same point."""
        iteration = self._iteration or self.stage.begin()
        self._iteration = 0
        here.iteration = iteration
        self._ended = True
        here.reach("the optimizer's step")
        self.collect()
        counts = self.counts.take()
        timed = torch.from_numpy(self._timer.take())
        if counts.is_cuda:
            timed = timed.pin_memory().to(counts.device, non_blocking=True)
        total = GroupSum(torch.cat([counts, timed]), self._group, timeout=1.0, stream=self._stream)
        self._sums.append((iteration, time.time(), total))

    def collect(self) -> bool:
        """Record the sums that are ready; returns whether no sum is in flight."""
        while self._sums and self._sums[0][2].ready:
            iteration, ended, total = self._sums.popleft()
            sums = total.read()
            load, peak = self.counts.split(sums[: self.counts.size])
            arrays = {"load": load, "peak": peak, "time": ended}
            arrays |= self._timer.split(sums[self.counts.size :])
            routed = self._routed(load)
            values = functools.partial(self._values, load, routed)
            self.stage.take(iteration, arrays, values, loads=routed)
        return not self._sums

    def _own(self, load: np.ndarray) -> list[np.ndarray]:
        """Split tokens, [L, E], by layer; layers may have fewer than E experts."""
        return [row[:experts] for row, experts in zip(load, self._experts, strict=True)]

    def _routed(self, load: np.ndarray) -> np.ndarray:
        """Sum tokens, [L, E], by home rank, [L, N]."""
        ranks = self.stage.info.ranks
        return np.stack([row.reshape(ranks, -1).sum(axis=1) for row in self._own(load)])

    def _values(self, load: np.ndarray, routed: np.ndarray) -> dict[str, np.ndarray]:
        return step_metrics(self._own(load), routed, routed, token_ms=self._token_ms)
