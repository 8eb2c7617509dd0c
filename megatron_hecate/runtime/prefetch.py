"""When layers are planned and fetched. One `Prefetcher` per model and rank; Megatron's hooks call it, and it calls the
layers' states.

| hook | what it does |
|---|---|
| `begin_chunk` | plans and fetches the first layers of a model chunk: embedding and dense layers come first |
| `before_attention` | fetches the next layers, while this layer's attention runs |
| `materialize` | says which replicas the layer computes with |
| `add_late_replicas` | where asked for, fetches more after the gate |
| `dispatched` | counts the tokens of a microbatch, which goes on with its replicas |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from megatron_hecate import trace
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.job.watchdog import here
from megatron_hecate.megatron import training_state
from megatron_hecate.megatron.parameter_gathers import finish_gathers, gathers_params, start_gathers
from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.megatron.training_state import Forward
from megatron_hecate.plan import add_late_replicas
from megatron_hecate.replicas.buffers import LIFETIMES, BufferPool
from megatron_hecate.replicas.layer_replicas import Replicas
from megatron_hecate.runtime.early_plans import EarlyPlans, PlanInputs
from megatron_hecate.runtime.gradient_returns import GradientReturns
from megatron_hecate.runtime.iteration_tracker import IterationTracker
from megatron_hecate.runtime.known_routes import KnownRoutes
from megatron_hecate.runtime.layer_state import LayerState
from megatron_hecate.runtime.load_monitor import LoadMonitor

# Layers planned one after another. The first finds no cache warm, and takes up to twice as long; more would delay it.
PLANNED_TOGETHER: int = 4


class Prefetcher:
    """Plans and fetches the replicas of one model's layers on this rank.

    Args:
        states: of all layers, in the order of the forward.
        chunk_of: the model chunk of each.
    """

    def __init__(self, states: Sequence[LayerState], chunk_of: Sequence[int]) -> None:
        self.states, self.chunk_of = states, chunk_of
        # of each layer, the experts of the next one in the same chunk
        self._following: list[Module | None] = [
            state.parts.layer.experts for state in states[1:]
        ] + [None]
        for index in range(1, len(states)):
            if chunk_of[index - 1] != chunk_of[index]:
                self._following[index - 1] = None
        self._first_layers = {chunk_of.index(chunk) for chunk in chunk_of}  # of each chunk
        self.forecast: np.ndarray | None = None  # [L, E] of the running iteration
        self.routes = KnownRoutes(states, chunk_of)
        self.meter = OverlapMeter()
        self.monitor = LoadMonitor(
            (len(states), max(state.parts.homes_only.num_experts for state in states)),
            states[0].rerouter.sources,
            timeout=states[0].config.timeout,
            meter=self.meter,
        )
        self.returns = GradientReturns(states, chunk_of)
        self.tracker = IterationTracker(
            [state.parts.passes for state in states],
            on_begin=self._begin_iteration,
            drop_unreturned=self.returns.drop,
            waits_for=self.returns.wait_for,
        )
        self.rehoming: Any = None  # `homes.rehoming.Rehoming`, where homes may move
        # whether the running forward of a model chunk has gradients; ``None`` outside of any
        self.gradients: bool | None = None
        self._pool: BufferPool | None = None
        # of each chunk: the schedule's call that ran its last forward, and a number that grows when weights may have
        # changed since the forward before
        self._calls: list[int | None] = [None] * (max(chunk_of) + 1)
        self._weights_of = [0] * (max(chunk_of) + 1)
        self._keeps_plans = False
        self._early = EarlyPlans()
        self._has_fetched = False  # any replica, ever
        self._pool_is_checked = False  # against the parameters, in this iteration

    def begin_chunk(self, chunk_index: int, chunk: Module, *_: Any) -> None:
        """The forward of a model chunk begins: no weight changes any more, so its first replicas may be fetched."""
        self.gradients = torch.is_grad_enabled()
        for state in self.states:
            state.break_off()  # a recomputed forward, or a schedule's call of one layer, ends without `end_chunk`
        training = chunk.training and self.gradients and torch._C._current_graph_task_id() == -1
        if not training or chunk_index not in self.chunk_of:
            return
        if self.states[0].config.slots:
            self._buffer_pool()
        first = self.chunk_of.index(chunk_index)
        self._enter_chunk(chunk_index)
        experts = self.states[first].parts.layer.experts
        if not gathers_params(experts):
            self.tracker.comes_to(first)
            self._prepare_from(first)
        elif self.states[first].config.slots:
            start_gathers(experts)

    def end_chunk(self, *_: Any) -> None:
        """It ends, or breaks off."""
        self.gradients = None
        for state in self.states:
            state.break_off()

    def before_attention(self, index: int, purpose: Forward) -> None:
        """The attention before layer ``index`` is about to run."""
        state = self.states[index]
        if purpose is Forward.RECOMPUTED:
            if not self._was_seen(state):
                return  # `materialize` says so
            state.fetch_again()
        elif purpose is Forward.MICROBATCH:
            # no forward of the chunk runs where the schedule calls its layers one by one
            if self.gradients is None and index == self.chunk_of.index(self.chunk_of[index]):
                self._enter_chunk(self.chunk_of[index])
            if self.tracker.enter(index):
                self.meter.attention(index, next(state.parts.layer.experts.parameters()).device)
            self._prepare_from(index)
            if state.current.replicas is None:
                state.joined_homes = None
                return
        state.join_homes_early(purpose)

    def materialize(self, index: int, purpose: Forward) -> Replicas | None:
        """The replicas that layer ``index`` computes with, planned and on their way.

        Raises:
            NotImplementedError: for a recomputed forward whose first pass looked like evaluation.
        """
        state = self.states[index]
        if purpose is Forward.OTHER:
            state.current.expects_late = False  # a forward that died before it could
            if torch.is_grad_enabled():
                # in `eval()`: its backward returns nothing, and may be the last one before DDP reduces gradients
                self.returns.complete(self.chunk_of[index])
        elif purpose is Forward.RECOMPUTED:
            if not self._was_seen(state):
                raise NotImplementedError(
                    f"{state.name} is recomputed in the backward, but its forward ran without gradients, where it "
                    "looks like evaluation; use --recompute-granularity, or torch's or TransformerEngine's checkpoint"
                )
            if state.skip_stock_backward():
                return None
        else:
            self.tracker.enter(index)
            self._prepare(state)
            state.current.is_prepared = False
            return state.current.replicas
        return state.replicas_of(purpose)

    def add_late_replicas(self, index: int, loads: Tensor) -> Replicas | None:
        """Fetch more replicas of layer ``index`` where the true ``loads`` [N, E] make them pay; returns those that the
        forward computes with. Replicas that microbatches have computed with stay as they are until the iteration ends.
        """
        state = self.states[index]
        state.current.expects_late = False
        shape = dataclasses.replace(state.shape(1), fetches=1, returns=1)
        placement = add_late_replicas(
            loads.sum(dim=0).cpu().numpy(),  # the one wait of the host for the device
            state.placement,
            state.world,
            cost=shape.copy_cost(state.world),
            most=state.config.late_replicas,
            across_nodes=state.config.speeds is not None,
        )
        state.check_agreement(placement)
        if placement is not state.placement:
            state.add_late(placement)
            if state.current.replicas is None:
                state.current.replicas = self._fetch(state)
            else:
                state.current.replicas.add_late(placement, state.plan)
        return state.current.replicas

    def dispatched(self, index: int, loads: Tensor, replicas: Replicas | None) -> None:
        """Count one microbatch of layer ``index``, which goes on with ``replicas``; its backward will come.

        Args:
            index: of the layer.
            loads: [E] tokens of this rank for each expert.
            replicas: that the forward computes with.
        """
        self.monitor.count(index, loads)
        self.tracker.forwarded(index)
        self.meter.routed(index)
        self.states[index].forwarded(replicas)

    def gradients_wanted(self, chunk: int) -> None:
        """Return the gradients of ``chunk`` that wait with replicas: DDP is about to reduce them."""
        self.returns.complete(chunk)

    def iteration_ended(self) -> None:
        """End the iteration: DDP has reduced gradients, and whatever follows may change weights."""
        if self.monitor.start_reduce() and self.states[0].config.slots:
            self._early.start(
                self.states, self.monitor, self.meter, self.tracker.counted_microbatches or 1
            )
        self.tracker.weights_changed("DDP reduced gradients")
        if self._pool is not None:
            self._pool.unbind()

    def gradients_dropped(self) -> None:
        """End the iteration: gradients of homes are zeroed, so those that wait are not wanted."""
        if self.returns.data_parallel is not None:
            # before the first schedule runs, so that the first iteration is like all others
            self.returns.data_parallel.set_no_sync_func()
        self.returns.drop()
        self.tracker.weights_changed("DDP zeroed gradients")

    def _enter_chunk(self, chunk: int) -> None:
        """Note the forward of a model chunk; outside of a known schedule's call, weights may have changed before it."""
        data_parallel = self.returns.data_parallel
        call = None if data_parallel is None else data_parallel.schedule_call(chunk)
        if call is None or call != self._calls[chunk]:
            self._weights_of[chunk] += 1
        self._calls[chunk] = call
        for state, its_chunk in zip(self.states, self.chunk_of, strict=True):
            if its_chunk == chunk:
                state.in_schedule = call is not None
                state.drop_prepared()
        has_ddp = data_parallel is not None and data_parallel.wants_gradients(chunk) is not None
        if has_ddp or self.tracker.has_seen_optimizer or chunk != self.chunk_of[0]:
            return
        if self._has_no_backward_ahead():
            # nothing else ends an iteration without DDP and with an optimizer that is none of torch's
            self.tracker.weights_changed()

    def _has_no_backward_ahead(self) -> bool:
        """Whether every layer has run in this iteration, and no backward is known to follow."""
        live = [
            state for state in self.states if state.keeps_replicas and state.replicas is not None
        ]
        return (
            self.tracker.all_are_in
            and all(
                state.replicas.backwards == self.tracker.forwards(state.index) for state in live
            )
            and not any(state.awaits_microbatch for state in self.states)
        )

    def _was_seen(self, state: LayerState) -> bool:
        """Whether a recomputed forward was seen before, as a microbatch's."""
        return state.awaits_backward and self.tracker.has_forwarded(state.index)

    def _prepare_from(self, index: int) -> None:
        """Begin to fetch the replicas of layer ``index`` and of the next ones, unless they are here."""
        state = self.states[index]
        begins = self._needs_fetch(state)
        self._prepare(state)
        if not begins and state.keeps_replicas:
            return
        if gathers_params(state.parts.layer.experts):
            return  # the next layers' homes are still being gathered; waiting for them now would stop this layer
        last = index + LIFETIMES[state.config.lifetime].ahead
        for following in self.states[index + 1 : last + 1]:
            if self.chunk_of[following.index] == self.chunk_of[index]:
                self._prepare(following)

    def _prepare(self, state: LayerState) -> None:
        """Have the replicas of the layer's next microbatch on their way."""
        if state.current.is_prepared:
            return
        if state.config.slots:
            # at the same point on all ranks, with or without replicas
            finish_gathers(state.parts.layer.experts, self._following[state.index])
        self._plan_from(state.index)
        current = state.current
        current.is_prepared = True
        if not self._needs_fetch(state):
            return
        is_first = current.fetched_weights is None
        if is_first or self._weights_may_differ(state):
            current.fetched_weights = self._weights_of[self.chunk_of[state.index]]
            state.renew_plan()
        if state.keeps_replicas and not is_first:
            if current.replicas is not None and current.plan is not None:
                current.replicas.refresh(current.plan)
            return
        current.expects_late = (
            state.config.late_replicas > 0 and not self.routes.are_known[state.index]
        )
        current.replicas = None if current.plan is None else self._fetch(state)

    def _needs_fetch(self, state: LayerState) -> bool:
        """Whether the layer's next forward needs weights that have not been fetched yet."""
        current = state.current
        if current.number != self.tracker.iteration or current.fetched_weights is None:
            return True
        if state.parts.passes > 1 and self.tracker.is_within_microbatch(state.index):
            # with other weights a forward broke off between two passes, and this is the next one
            return current.fetched_weights != self._weights_of[self.chunk_of[state.index]]
        return not state.keeps_replicas or self._weights_may_differ(state)

    def _weights_may_differ(self, state: LayerState) -> bool:
        """Whether homes of the layer may hold other weights than at its last fetch."""
        fetched = state.current.fetched_weights
        return (
            fetched != self._weights_of[self.chunk_of[state.index]] or state.weights_were_written()
        )

    def _plan_from(self, index: int) -> None:
        """Plan layer ``index``, unless it is planned, and with it the next ones of its chunk."""
        iteration = self.tracker.iteration
        if index in self._first_layers and not self.tracker.is_within_microbatch(index):
            self.routes.begin_microbatch(index, iteration, self.tracker.microbatches)
        if self.states[index].current.number == iteration:
            return
        for state in self.states[index : index + PLANNED_TOGETHER]:
            if (
                self.chunk_of[state.index] == self.chunk_of[index]
                and state.current.number != iteration
            ):
                with trace.span("plan", state.name):
                    self._plan(state)

    def _plan(self, state: LayerState) -> None:
        kept = state.next_kept_plan() if self._keeps_plans else None
        if kept is not None:
            state.set_plan(kept, self.tracker.iteration)
            state.plans.append(kept)
            return
        forecast, microbatches = self.routes.forecast(
            state, self.forecast, self.tracker.microbatches or 1
        )
        if forecast is None or not state.config.slots:
            state.set_plan(state.homes, self.tracker.iteration)
            state.plans.append(state.homes)
            return
        plan = self._early.plan(
            state.index, PlanInputs.of(state, forecast, microbatches, self.meter)
        )
        state.check_agreement(plan)
        state.set_plan(plan, self.tracker.iteration)
        state.plans.append(plan)

    def _fetch(self, state: LayerState) -> Replicas:
        """Begin to fetch the planned replicas, for one microbatch or for all of the iteration."""
        self._has_fetched = True
        try:
            replicas = Replicas(
                state.slots_in(self._buffer_pool()),
                state.placement,
                state.plan,
                passes=state.parts.passes,
                # where layers share buffers, another layer's backward may run between two passes
                is_last=partial(self.returns.is_last, state) if state.keeps_replicas else None,
                meter=self.meter,
            )
        except RuntimeError:
            self.tracker.weights_changed()  # a loop that catches this begins anew, with all buffers free
            raise
        if not state.keeps_replicas:
            replicas.after_backward = state.finish_backward
        if state.config.lifetime == "layer":
            replicas.before_backward = self._fetch_for_backward
        self.returns.live.add(replicas)
        replicas.start()
        return replicas

    def _fetch_for_backward(self, replicas: Replicas) -> None:
        """Lifetime ``layer``: fetch dropped replicas again, and begin to fetch those of the layer before."""
        replicas.start()
        before = replicas.slots.index - 1
        if before >= 0 and self.chunk_of[before] == self.chunk_of[before + 1]:
            self.states[before].fetch_again()

    def _buffer_pool(self) -> BufferPool:
        """The buffers, allocated at their first use: before activations take what is free, whether or not there will be
        replicas. Parameters have their final type by then."""
        if self._pool_is_checked and self._pool is not None:
            return self._pool
        self._pool_is_checked = True
        layers = [state.parts.buffer(state.config.slots) for state in self.states]
        if self._pool is None or self._pool.layers != layers:
            first, experts = self.states[0], self.states[0].parts.layer.experts
            of_model, device = first.parts.layer.config, next(experts.parameters()).device
            in_flight = training_state.forwards_in_flight(of_model, self.chunk_of)
            self._pool = BufferPool(
                first.transport, layers, first.config.lifetime, in_flight=in_flight, device=device
            )
        return self._pool

    def _begin_iteration(self) -> None:
        # those of microbatches before weights were loaded in the middle of an iteration
        self.returns.complete()
        if self.tracker.microbatches is None:
            # before any iteration has been counted
            self.tracker.microbatches = training_state.num_microbatches()
        self._keeps_plans = self.tracker.repeats_last()
        if not self._keeps_plans:
            self.returns.begin_iteration(self.tracker.microbatches)
        here.iteration = running_iteration() or here.iteration + 1
        self._pool_is_checked = False
        if self._pool is not None:
            self._pool.reset(self.tracker.ended_because)
        if self._has_fetched:
            self.meter.fetched()
        for state in self.states:
            state.abandon()
        self.monitor.finish_reduce()
        known = self.routes.begin_iteration()
        self.forecast = self.monitor.history.forecast() if known is None else known
        if self.rehoming is not None:
            self.rehoming.begin_iteration(here.iteration, self.tracker, self.meter)
        if self.states[0].config.slots:
            self._buffer_pool()
