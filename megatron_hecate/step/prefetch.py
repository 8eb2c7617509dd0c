"""Prefetching: one `Prefetcher` per model and rank fetches replicas ahead of their layers.

Hooks of Megatron call the prefetcher, and it calls the layers' states.

| hook | action |
|---|---|
| `begin_chunk` | fetches a model chunk's first layer: embedding and dense layers run first |
| `before_attention` | fetches further layers, while this layer's attention runs |
| `materialize` | returns the replicas of the forward |
| `dispatched` | notes that a microbatch has been routed |
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.faults.watchdog import here
from megatron_hecate.megatron import training_state
from megatron_hecate.megatron.events import StepEvents
from megatron_hecate.megatron.parameter_gathers import finish_gathers, gathers_params, start_gathers
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.megatron.training_state import Forward
from megatron_hecate.replicas.buffers import FETCHED_TOGETHER, LIFETIMES, BufferPool, ReplicaSlots
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.detect import Detector
from megatron_hecate.step.gradient_returns import GradientReturns
from megatron_hecate.step.layer_planner import LayerPlanner, RoutesForecast, plan_late
from megatron_hecate.step.layer_state import LayerState, Uncopied
from megatron_hecate.step.load_monitor import LoadMonitor
from megatron_hecate.step.model_check import check_experts, check_model


class Rehoming(StepEvents, abc.ABC):
    """Experts that change homes where an iteration begins."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Move all experts back to their original ranks until the next iteration. Collective."""


class Prefetcher(Uncopied, StepEvents):
    """Prefetcher of the replicas of one model's layers on this rank.

    Args:
        states: states of all layers, in the order of the forward.
        routes: loads that are known before the forward.
        monitor: class of the load monitor.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        routes: RoutesForecast,
        monitor: type[LoadMonitor] = LoadMonitor,
    ) -> None:
        self.states = states
        # Stored, because lookups of submodules are slow.
        self._experts: list[Module] = [state.parts.layer.experts for state in states]
        # States of each chunk's layers, and for each layer the states of the next layers in the
        # chunk that are prefetched with it.
        self._chunks: dict[int, list[LayerState]] = {}
        for state in states:
            self._chunks.setdefault(state.chunk, []).append(state)
        self._ahead: list[Sequence[LayerState]] = []
        for chunk_states in self._chunks.values():
            for place, state in enumerate(chunk_states, 1):
                last = place + LIFETIMES[state.config.lifetime].ahead
                self._ahead.append(chunk_states[place:last])
        # Expected tokens of the running iteration, [L, E].
        self.forecast: np.ndarray | None = None
        self._routes = routes
        self.meter = OverlapMeter()
        self.meter.is_off = states[0].covered is not None
        self.monitor = monitor(
            (len(states), max(state.parts.homes_only.num_experts for state in states)),
            states[0].rerouter.sources,
            timeout=states[0].config.timeout,
            meter=self.meter,
        )
        self.returns = GradientReturns(states)
        self.clock = Clock(
            [state.parts.passes for state in states],
            num_chunks=max(self._chunks) + 1,
            read_number=running_iteration,
        )
        self.detector = Detector(self.clock, self.returns)
        # Where homes may move.
        self.rehoming: Rehoming | None = None
        # True if the running forward of a model chunk has gradients; ``None`` outside of forwards.
        self.gradients: bool | None = None
        self.pool = BufferPool(states[0].transport, states[0].config.lifetime)
        self.planner = LayerPlanner(states, clock=self.clock, routes=routes, meter=self.meter)
        # Returns a line for each conflict outside of the experts; ``None`` once it was called.
        self.find_conflicts: Callable[[], list[str]] | None = list

    def begin_chunk(self, chunk_index: int, chunk: Module, *_: Any) -> None:
        """Fetch the replicas of a chunk's first layer: from here on its weights do not change."""
        self.gradients = torch.is_grad_enabled()
        # A recomputed forward, or a schedule's call of one layer, ends without `end_chunk`.
        self._break_off()
        training = chunk.training and self.gradients and torch._C._current_graph_task_id() == -1
        if not training or chunk_index not in self._chunks:
            return
        first = self._chunks[chunk_index][0]
        self._enter_chunk(chunk_index)
        experts = self._experts[first.index]
        if not gathers_params(experts):
            self.clock.begin()
            self._prepare(first)
        elif first.config.slots:
            # The iteration begins before the attention, when activations are allocated.
            if not self.pool.layers:
                self._allocate()
            start_gathers(experts)

    def end_chunk(self, *_: Any) -> None:
        """End the forward of a model chunk, complete or aborted."""
        self.gradients = None
        self._break_off()

    def _break_off(self) -> None:
        for state in self.states:
            if state.running is not None:
                state.end_forward()

    def before_attention(self, index: int, purpose: Forward) -> None:
        """Fetch replicas before the attention in front of layer ``index``."""
        state = self.states[index]
        if purpose is Forward.RECOMPUTED:
            # If the forward is unknown, `materialize` raises the error.
            if not self._was_seen(state):
                return
            state.fetch_again()
        elif purpose is Forward.MICROBATCH:
            # If no forward of the chunk runs, the schedule calls its layers one by one.
            if self.gradients is None and state is self._chunks[state.chunk][0]:
                self._enter_chunk(state.chunk)
            if self.clock.enter(index):
                self.meter.attention(index, state.parts.experts.first[0].device)
            self._prepare_from(index)
            if state.current.replicas is None:
                state.joined_homes = None
                return
        state.join_homes_early(purpose)

    def materialize(self, index: int, purpose: Forward) -> Replicas | None:
        """Return the replicas of the forward of layer ``index``, planned and in flight.

        Raises:
            NotImplementedError: for a recomputed forward whose first pass looked like evaluation.
        """
        state = self.states[index]
        if purpose is Forward.OTHER:
            if torch.is_grad_enabled():
                # A forward in `eval()` with gradients: its backward returns no gradients of
                # replicas, and may be the last one before DDP reduces gradients.
                self.returns.complete(state.chunk)
        elif purpose is Forward.RECOMPUTED:
            if not self._was_seen(state):
                raise NotImplementedError(
                    f"{state.name} is recomputed in the backward, but its forward ran without "
                    "gradients, where it looks like evaluation; use --recompute-granularity, or "
                    "torch's or TransformerEngine's checkpoint, and several backwards through one "
                    "forward (retain_graph=True) only with --moe-fssdp-lifetime iteration"
                )
            if state.pop_stock_microbatch():
                return None
        else:
            self.clock.enter(index)
            self._prepare(state)
            state.current.is_prepared = False
            return state.current.replicas
        return state.replicas_of(purpose)

    def dispatched(self, index: int, loads: Tensor | None, replicas: Replicas | None) -> None:
        """Count one microbatch of layer ``index`` that a backward follows.

        Args:
            index: index of the layer.
            loads: this rank's tokens per expert, [E]; ``None`` if the monitor has them already.
            replicas: replicas of the forward.
        """
        if loads is not None:
            self.monitor.count(index, loads)
        self.clock.forwarded(index)
        self.meter.routed(index)
        self.states[index].forwarded(replicas)

    def gradients_reduced(self) -> None:
        """Start to sum the iteration's loads, and to plan the next iteration."""
        if self.monitor.start_reduce() and self.states[0].config.slots:
            self.planner.early.start(
                self.states, self.monitor, self.meter, self.clock.counted_microbatches or 1
            )
        self.pool.unbind()

    def _enter_chunk(self, chunk: int) -> None:
        """Begin a forward of a model chunk."""
        in_schedule = self.detector.forward_begins(chunk)
        for state in self._chunks[chunk]:
            state.in_schedule = in_schedule
            if state.current.is_prepared:
                state.drop_prepared()

    def _was_seen(self, state: LayerState) -> bool:
        """Return whether a recomputed forward was seen before, as a microbatch's."""
        return state.awaits_backward and self.clock.has_forwarded(state.index)

    def _prepare_from(self, index: int) -> None:
        """Begin to fetch missing replicas of layer ``index`` and of the next layers."""
        state = self.states[index]
        self._prepare(state)
        if gathers_params(self._experts[index]):
            # Waiting for the next layers' homes, still being gathered, would stall this layer.
            return
        next_states = self._ahead[index]
        # Layers are prefetched in their order.
        if not next_states or self._is_prefetched(next_states[-1]):
            return
        unfetched = [following for following in next_states if not self._is_prefetched(following)]
        for following in unfetched[:FETCHED_TOGETHER]:
            self._prepare(following)

    def _is_prefetched(self, state: LayerState) -> bool:
        """Return whether the layer needs no prefetch: replicas are in flight or were fetched."""
        current = state.current
        if current.is_prepared or not state.keeps_replicas:
            return current.is_prepared
        clock = self.clock
        epoch = clock.epochs[state.chunk]
        return current.iteration == clock.iteration and current.fetched_epoch == epoch

    def _prepare(self, state: LayerState) -> None:
        """Begin to fetch the replicas of the layer's next microbatch, unless they are held."""
        if state.current.is_prepared:
            return
        if state.config.slots:
            # Collective: at the same point on all ranks, with or without replicas.
            next_states = self._ahead[state.index]
            following = self._experts[next_states[0].index] if next_states else None
            finish_gathers(self._experts[state.index], following)
        self.planner.plan(state, self.forecast)
        current = state.current
        if current.fetched_epoch is None:
            check_experts(state)
        # Weights change between two passes of a microbatch only if its forward was aborted.
        is_later_pass = state.parts.passes > 1 and self.clock.is_within_microbatch(state.index)
        epochs = self.clock.epochs
        is_current = current.fetched_epoch == epochs[state.chunk]
        if is_current and not is_later_pass and current.transfers is not None:
            # begins another epoch if they were written
            self.detector.note_writes(state)
            is_current = current.fetched_epoch == epochs[state.chunk]
        if not is_current:
            state.renew_transfers()
        are_held = state.keeps_replicas or (is_current and is_later_pass)
        if current.transfers is None:
            current.replicas = None
        elif current.replicas is None or not are_held:
            current.replicas = self._fetch(state)
        elif not is_current:
            current.replicas.refresh(current.transfers)
        # Set last: the next forward repeats a check or a fetch that failed.
        current.fetched_epoch = epochs[state.chunk]
        current.is_prepared = True

    def _fetch(self, state: LayerState) -> Replicas:
        """Begin to fetch the planned replicas, for one microbatch or for the whole iteration."""
        replicas = Replicas(
            state.slots,
            state.placement,
            state.current.transfers,
            passes=state.parts.passes,
            events=self,
        )
        replicas.start()
        return replicas

    def add_late(self, state: LayerState, loads: Tensor) -> Replicas | None:
        """Fetch more replicas of a layer if its true loads make further copies pay.

        Replicas that microbatches have computed with stay unchanged until the iteration ends.

        Args:
            state: state of the layer.
            loads: tokens of the microbatch per source and expert, [N, E].

        Returns:
            The replicas of the running forward.
        """
        current = state.current
        placement = plan_late(state, loads)
        if placement is not current.placement:
            current.placement = placement
            current.transfers = state.transfers_for(placement)
            if current.replicas is None:
                current.replicas = self._fetch(state)
            else:
                current.replicas.add_late(placement, current.transfers)
        return current.replicas

    def is_last_backward(self, replicas: Replicas, microbatches: int) -> bool:
        return self.returns.is_last(self.states[replicas.slots.index], microbatches)

    def backward_ended(self, replicas: Replicas) -> None:
        self.states[replicas.slots.index].finish_backward(replicas)

    def backward_begins(self, replicas: Replicas) -> None:
        """Fetch dropped replicas again, and prefetch the previous layer's."""
        replicas.start()
        previous = replicas.slots.index - 1
        if previous >= 0 and self.states[previous].chunk == self.states[previous + 1].chunk:
            self.states[previous].fetch_again()

    def iteration_begins(self, iteration: int) -> None:
        """Return gradients, collect loads, move homes, then allocate, in this order. Collective."""
        here.iteration = iteration
        here.reach("begin of the iteration")
        if self.find_conflicts is not None:
            check_model(self.states, self.find_conflicts)
            self.find_conflicts = None
        # If weights were loaded in the middle of an iteration, gradients may still wait.
        self.returns.complete()
        if self.clock.microbatches is None:
            # No iteration has been counted yet.
            self.clock.microbatches = training_state.num_microbatches()
        self.planner.begin_iteration()
        if not self.clock.is_repeated:
            self.returns.begin_iteration(self.clock.microbatches)
        self.pool.reset(self.clock.ended_because)
        for state in self.states:
            state.abandon()
        self.monitor.start_reduce()
        self.monitor.collect()
        self.forecast = self.monitor.history.forecast()
        self._routes.begin_iteration()
        # First, because it refuses homes that a failed move has left inconsistent.
        if self.rehoming is not None:
            self.rehoming.iteration_begins(iteration)
        if self.states[0].config.slots:
            self._allocate()

    def _allocate(self) -> None:
        """Allocate the buffers, unless they are there, and no layer has been cast since."""
        experts = (state.parts.experts for state in self.states)
        dtypes = [(layer.dtype, layer.grad_dtype) for layer in experts]
        if dtypes == [(layer.dtype, layer.grad_dtype) for layer in self.pool.layers]:
            return
        layers = [state.parts.buffer(state.config.slots) for state in self.states]
        self.pool.allocate(layers, next(self._experts[0].parameters()).device)
        for state in self.states:
            state.slots = ReplicaSlots(state.index, state.parts.experts, self.pool, state.name)

    def release_memory(self) -> int:
        """Free all buffers on this rank; the next iteration allocates them again. Collective.

        Returns:
            Bytes freed; 0 if none were allocated.
        """
        self.returns.complete()
        freed = self.pool.nbytes
        if freed:
            self.clock.end_iteration("memory was released")
            # Waits for transfers that use the memory.
            self.pool.reset("memory was released")
            self.pool.release()
        return freed
