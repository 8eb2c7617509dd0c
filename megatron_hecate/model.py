"""What the FSSDP layers of one model share on this rank: load monitor, iteration clock, slot memory and their order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Module

from megatron_hecate import seams
from megatron_hecate.clock import IterationClock
from megatron_hecate.config import HecateConfig
from megatron_hecate.memory import LIFETIMES, Need, SlotMemory
from megatron_hecate.observe import LoadMonitor
from megatron_hecate.overlap import OverlapMeter
from megatron_hecate.plan import Placement, Speeds
from megatron_hecate.slots import Guests
from megatron_hecate.transports import FUSED, TransferGroups, fused

# Layers planned one after another. The first finds neither the planner's code nor its tables in the caches, and takes
# 1.3 to 2 times as long as the others; with more of them the first forward would wait for longer.
PLANNED_TOGETHER: int = 4


class Host(Protocol):
    """What a model asks of its layers (`state.LayerState`)."""

    config: HecateConfig
    layer_config: Any  # TransformerConfig
    module: Module  # the experts
    homes_only: Placement
    need: Need
    planned: int  # the last iteration it was
    transfers: TransferGroups

    def plan(self) -> None: ...
    def prepare(self) -> None: ...
    def fetch_again(self) -> None: ...
    def give_up(self) -> None: ...


class ModelState:
    """What the converted layers of one model share on this rank.

    Args:
        states: of all layers, in the order of the forward.
        chunk_of: the model chunk of each.
        speeds: by which copies are judged.
        sources: ranks whose tokens the layers' experts share.
    """

    def __init__(
        self, states: Sequence[Host], chunk_of: list[int], speeds: Speeds, *, sources: dist.ProcessGroup
    ) -> None:
        self.states, self.chunk_of, self.speeds = states, chunk_of, speeds
        self.forecast: np.ndarray | None = None  # [L, E] of the running iteration
        self.guests: weakref.WeakSet[Guests] = weakref.WeakSet()  # of any layer, as long as some backward may need them
        self._gradients: bool | None = None  # of the running forward of a model chunk
        self._memory: SlotMemory | None = None
        self._memory_is_checked = False  # against the parameters, in this iteration
        num_experts = max(state.homes_only.num_experts for state in states)
        self.meter = OverlapMeter()
        self.monitor = LoadMonitor(
            len(states), num_experts, sources, timeout=states[0].config.timeout, meter=self.meter
        )
        self.clock = IterationClock(
            len(states),
            num_microbatches=seams.num_microbatches,
            on_begin=self._begin,
            on_forwards_done=self.monitor.start_reduce,
            drop_unsent=self._drop_unsent,
        )

    def memory(self) -> SlotMemory:
        """The slot memory, allocated when the first guests come: parameters have their final type and place then."""
        if self._memory_is_checked and self._memory is not None:
            return self._memory
        self._memory_is_checked = True
        needs = [state.need for state in self.states]
        if self._memory is None or self._memory.needs != needs:
            first = self.states[0]
            in_flight = seams.forwards_in_flight(first.layer_config, self.chunk_of)
            device = next(first.module.parameters()).device
            transport = first.config.transport
            make = functools.partial(fused, transport, first.transfers, device=device)
            self._memory = SlotMemory(
                needs,
                first.config.lifetime,
                in_flight=in_flight,
                device=device,
                fused=make if transport in FUSED else None,
            )
        return self._memory

    def purpose_of_forward(self, layer: Module) -> seams.Forward:
        """What the running forward of ``layer`` is for."""
        return seams.purpose_of_forward(layer, gradients=self._gradients)

    def begin_chunk(self, index: int, chunk: Module, *_: Any) -> None:
        """The forward of model chunk ``index`` begins. In training its first guests are fetched from here on: no weight
        changes any more, and embedding and dense layers come first."""
        self._gradients = torch.is_grad_enabled()
        training = chunk.training and self._gradients and torch._C._current_graph_task_id() == -1
        if not training or index not in self.chunk_of:
            return
        first = self.chunk_of.index(index)
        if seams.gathers_params(self.states[first].module):
            return
        self.prepare(first, begins=self.clock.comes_to(first))

    def end_chunk(self, *_: Any) -> None:
        """It ends."""
        self._gradients = None

    def prepare(self, index: int, *, begins: bool) -> None:
        """Have the guests of layer ``index`` on their way, and the next ones', unless all of the iteration are here.

        Args:
            begins: whether the layer's iteration does.
        """
        self.states[index].prepare()
        if begins or self.states[index].config.lifetime != "iteration":
            for state in self.after(index):
                state.prepare()

    def plan(self, index: int) -> None:
        """Plan layer ``index``, unless it is planned, and with it the next ones of its chunk."""
        if self.states[index].planned == self.clock.iteration:
            return
        for i in range(index, min(index + PLANNED_TOGETHER, len(self.states))):
            if self.chunk_of[i] == self.chunk_of[index] and self.states[i].planned != self.clock.iteration:
                self.states[i].plan()

    def after(self, index: int) -> Sequence[Host]:
        """Layers that follow ``index`` in its model chunk and are fetched ahead of their own attention."""
        if seams.gathers_params(self.states[index].module):
            return []  # their homes are still being gathered; waiting for them now would stop this layer
        depth = LIFETIMES[self.states[index].config.lifetime].ahead
        following = range(index + 1, min(index + 1 + depth, len(self.states)))
        return [self.states[i] for i in following if self.chunk_of[i] == self.chunk_of[index]]

    def before_backward(self, guests: Guests) -> None:
        """Lifetime ``layer``: fetch dropped guests again, and begin to fetch those of the layer before."""
        guests.start()
        before = guests.slots.index - 1
        if before >= 0 and self.chunk_of[before] == self.chunk_of[before + 1]:
            self.states[before].fetch_again()

    def _begin(self) -> None:
        self._memory_is_checked = False
        if self._memory is not None:
            self._memory.reset()
            self.meter.fetched()
        for state in self.states:
            state.give_up()
        self.monitor.finish_reduce()
        self.forecast = self.monitor.history.forecast()

    def _drop_unsent(self) -> list[tuple[str, int]]:
        waiting = [guests for guests in self.guests if guests.unsent]
        found = sorted((guests.label, guests.unsent) for guests in waiting)
        for guests in waiting:
            guests.drop_unsent()
        return found
