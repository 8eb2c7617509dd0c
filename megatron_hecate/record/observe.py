"""Observation of stock Megatron training: count the tokens of every expert.

Each router's class is replaced by a subclass whose forward adds the tokens of each expert to a
buffer at a fixed address (`token_counts`), so that CUDA graphs can hold the addition. Each
optimizer step starts one asynchronous all-reduce over the expert-parallel group. The result is read
at a later step once it is ready; nothing waits.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import sys
import time
import weakref
from collections import deque
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from megatron_hecate.comm.agreement import Note, collect
from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.config import HecateConfig
from megatron_hecate.device.autograd import is_capturing
from megatron_hecate.megatron.events import listen_to_steps
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.megatron.training_state import captures_graph, name_of_layer
from megatron_hecate.plan import CPU, H100, Speeds, World
from megatron_hecate.record.job_metrics import JobMetrics
from megatron_hecate.record.job_sizes import folder_of_model, grad_width, stage_info, stock_shape
from megatron_hecate.record.recorder import Columns, StageRecorder
from megatron_hecate.record.token_counts import TokenCounts, over_mean, sum_fullest
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.load_monitor import GroupSum


def observe(chunks: list[Module], config: HecateConfig) -> list[Module]:
    """Count the tokens that the routers of these model chunks send to each expert.

    Collective. Call it before DDP wraps the chunks. Errors are raised on every rank.

    Raises:
        ValueError: for settings that differ between ranks, unreadable speeds, or a model without
            MoE layers.
        TimeoutError: when some rank does not call it within ``config.timeout``.
    """
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    layers = [module for module in modules if isinstance(module, MoELayer)]
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
    folder = folder_of_model(config.folder)
    refused = ""
    # An exception of one rank from here on would leave the others waiting, too.
    with collect(problems):
        if layers:
            refused = Observer(layers, names, speeds=speeds, folder=folder).stage.refused
        else:
            JobMetrics(())
    note = Note(layers=names, summary=refused, problems=problems)
    _, refusals = note.agree(timeout=config.timeout)
    if dist.get_rank() == 0:
        num_layers = len({name for note in notes for name in note.layers})
        reasons = "; ".join(sorted({note.summary for note in refusals} - {""}))
        outcome = f"not recorded: {reasons}" if reasons else f"the record is {folder}"
        print(f"FSSDP observes {num_layers} MoE layers and is off; {outcome}", flush=True)
    return chunks


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


@functools.cache
def _observed(router: type) -> type:
    """Make a subclass of a router's class that counts tokens.

    A mixin would change the object's layout, because routers are ABCs. The subclass has the same
    name, because Megatron-FSDP recognizes by the name that a router is not sharded.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and not captures_graph():
            self.observer.enter(self.observed_as)
        routed = router.forward(self, *args, **kwargs)
        # Inside a checkpoint only the recomputed pass has gradients.
        trains = self.training and torch.is_grad_enabled()
        # Not in the warmup before a capture.
        if trains and (not captures_graph() or is_capturing()):
            self.observer.add(self.observed_as, routed[1].detach())
        return routed

    return type(router.__name__, (router,), {"forward": forward})


class Observer:
    """All-reduce of the routers' counts over the expert-parallel group, once per optimizer step.

    Routers refer to it, so that it lives as long as the model.

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
        # The layer refers to its router, and so to this object.
        self._first = weakref.ref(first)
        self._group = first.token_dispatcher.tp_ep_group
        ranks = first.ep_group.size()
        self.clock = Clock([1] * len(layers), read_number=running_iteration)
        experts = [layer.config.num_moe_experts for layer in layers]
        self.counts = TokenCounts(experts, ranks, device_of_rank())
        hosts: list[str] = [""] * ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=first.ep_group)
        info = stage_info(
            first.config,
            layers=names,
            experts=experts,
            world=World.from_names(hosts, speeds),
            shape=stock_shape(first),
            mode="observe",
        )
        self.stage = StageRecorder(
            info, folder, group=self._group, experts=experts, collect=self.collect
        )
        # Iteration, unix time of its end, and sum of its counts.
        self._sums: deque[tuple[int, float, GroupSum]] = deque()
        self._has_counted = False
        self._optimizer: weakref.ref[Optimizer] | None = None
        listen_to_steps(self)
        for index, layer in enumerate(layers):
            layer.router.observer = self
            layer.router.observed_as = index
            layer.router.__class__ = _observed(type(layer.router))

    def enter(self, layer: int) -> None:
        """Note the beginning of a router's training forward; not called in replays of CUDA graphs.

        Args:
            layer: index of the router's layer.
        """
        clock = self.clock
        is_running = clock.begun == clock.iteration
        if (
            is_running
            and running_iteration() not in (None, clock.log_number)
            and not is_capturing()
        ):
            # Megatron skipped the step, or the optimizer is none of torch's.
            self.end_iteration()
        clock.enter(layer)

    def add(self, layer: int, routing_map: torch.Tensor) -> None:
        """Count the tokens of a router's training forward, by its map [T, E] or indices [T, k]."""
        self.counts.add(layer, routing_map)
        self._has_counted = True

    def before_step(self, optimizer: Optimizer) -> None:
        """End the iteration if ``optimizer`` is the one whose steps end this model's iterations.

        Megatron chains several optimizers, and other models have optimizers of their own. The first
        optimizer to step after this model has counted tokens ends the iterations. (Forwards are not
        observed directly: a replayed graph runs no Python.)
        """
        # Chosen again if the optimizer has been deleted.
        if self._has_counted and (self._optimizer is None or self._optimizer() is None):
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer is None or self._optimizer() is not optimizer:
            return
        if is_capturing():
            text = "FSSDP stops observing: a CUDA graph holds the optimizer's step"
            print(text, file=sys.stderr, flush=True)
        else:
            self.end_iteration()

    def end_iteration(self) -> None:
        """Start to sum the counts. Collective: all ranks of the group call it at the same point."""
        # Replays of graphs enter no layer.
        self.clock.begin()
        self.clock.end_iteration()
        self.collect()
        total = GroupSum(self.counts.take(), self._group, timeout=1.0)
        self._sums.append((self.clock.log_number, time.time(), total))

    def collect(self) -> bool:
        """Record the sums that are ready; return whether no sum is in flight."""
        while self._sums and self._sums[0][2].ready:
            iteration, end, total = self._sums.popleft()
            # DDP has made main gradients since the hook.
            if (layer := self._first()) is not None:
                shape = self.stage.info.shape
                shape["grad_bytes"] = shape["token_flops"] / 2 * grad_width(layer)
            self.stage.take(iteration, functools.partial(self._columns, end, total.read()))
        return not self._sums

    def _columns(self, end: float, sums: np.ndarray) -> Columns:
        """Split the sums of an iteration with this unix time of its ``end``."""
        load, ranks, _ = self.counts.split(sums)
        columns = {"time": np.array(end), "load": load, "peak": sum_fullest(ranks)}
        return {**columns, "stock_factor": over_mean(ranks).max(axis=0)}
