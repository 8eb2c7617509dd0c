"""The critical path of one training step, from what every MoE layer does in it.

An all-to-all ends for no rank before the last rank has begun it. So between two of them only the fullest rank counts,
and a layer lasts: compute outside the experts, dispatch, experts of the fullest rank, combine. Copies travel beside
that, one layer's after the other. They share the network with the all-to-alls, so they get on while ranks compute.
Pipeline stages run one forward, one backward (1F1B). Letters in shapes: T steps, L layers, E experts, R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import LayerShape, Placement, World
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.routing.quotas import quotas_of_all
from megatron_hecate.routing.tables import GroupShape
from megatron_hecate.tools.traffic import Traffic, add, backwards, copies, fan_out, no_traffic, token_traffic


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPlan:
    """What one layer does in one step, whoever planned it.

    Args:
        flow: [R, R] (token, expert) pairs that start on rank r and that rank d computes, of all microbatches.
        early, late: bytes of weights that travel before and after the gate, each time they are fetched.
        back: bytes of gradients, each time they return.
    """

    flow: np.ndarray
    early: Traffic
    late: Traffic
    back: Traffic

    @classmethod
    def of(cls, load: np.ndarray, placement: Placement, world: World, shape: LayerShape) -> LayerPlan:
        """FSSDP's: our quotas for ``load`` [R, E], and replicas that come from their homes and return there."""
        tokens, order = quotas_of_all(load, placement, GroupShape.of(world, placement))
        by_rank = np.argsort(order.rank, kind="stable")
        ranks, first = np.unique(order.rank[by_rank], return_index=True)
        flow = np.zeros((len(load), world.num_ranks), dtype=np.int64)
        flow[:, ranks] = np.add.reduceat(tokens[:, by_rank], first, axis=1)
        chunks = fan_out(copies(placement), placement.home, world)
        early, back = add((chunks, shape.expert_bytes)), add((backwards(chunks), shape.grad_bytes))
        return cls(flow, early, no_traffic(world.num_ranks), back)


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What the layers do, as far as the critical path depends on it. All arrays [T, L].

    Args:
        peak: pairs of the fullest rank in one microbatch.
        trip: seconds of one all-to-all.
        fetch, back: seconds of one layer's copies on their way out, once, and home, once, when nothing else travels.
        late: seconds of copies after the gate, in each microbatch.
        routing: seconds that routing to replicas adds to each microbatch.
        out, home: bytes that one fetch (with a late one), and one return, send in all.
    """

    peak: np.ndarray
    trip: np.ndarray
    fetch: np.ndarray
    back: np.ndarray
    late: np.ndarray
    routing: np.ndarray
    out: np.ndarray
    home: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[Sequence[LayerPlan]], world: World, shape: LayerShape, *, once: int = 0) -> Work:
        """From the plans of every step and, within it, every layer.

        Args:
            once: experts of a token, where it is sent to a node once; 0: it is sent once for every expert.
        """

        def figures(plan: LayerPlan) -> tuple[float, ...]:
            tokens, ways = token_traffic(plan.flow, world), (plan.early, plan.back, plan.late)
            if once and tokens.inter:  # as if the pairs that cross were spread evenly over tokens and nodes
                share, others = tokens.inter / float(plan.flow.sum()), world.num_nodes - 1
                sent = others * (1 - (1 - share / others) ** once) / (once * share)  # per pair that crosses
                tokens = Traffic(tokens.intra_out, tokens.intra_in, tokens.inter_out * sent, tokens.inter_in * sent)
            peak = float(plan.flow.sum(axis=0).max()) / shape.microbatches
            trip = tokens.seconds(shape.token_bytes / shape.microbatches, world)
            out, home, late = (way.intra + way.inter for way in ways)
            routing = world.speeds.routing if out + late else 0.0
            return peak, trip, *(way.seconds(1, world) for way in ways), routing, out + late, home

        return cls(*np.moveaxis([[figures(plan) for plan in step] for step in plans], -1, 0))

    @classmethod
    def balanced(cls, pairs: float, world: World, shape: LayerShape, *, once: int = 0) -> Work:
        """[1, 1] forced balance: every rank sends as many of its ``pairs``, of all microbatches, to each rank."""
        flow, none = np.full((world.num_ranks,) * 2, pairs / world.num_ranks), no_traffic(world.num_ranks)
        return cls.of([[LayerPlan(flow, none, none, none)]], world, shape, once=once)

    def layers(self, of: Sequence[int]) -> Work:
        """The same with other layers: column l is the old column ``of[l]``."""
        return Work(*(getattr(self, field.name)[:, list(of)] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What does not depend on routing; seconds of one rank and one microbatch, forward, if not said otherwise.

    Args:
        dense: of a layer outside its experts: attention, router, shared experts.
        pair: of one (token, expert) pair in one expert.
        head: after the last layer, on the last stage.
        send: of one stage to the next.
        contention: share of the time of a hidden copy that it takes from compute.
        hidden: share of every all-to-all that hides behind other compute.
        recompute: whether the backward of a layer repeats its forward.
    """

    dense: float
    pair: float
    head: float = 0.0
    send: float = 0.0
    contention: float = 0.0
    hidden: float = 0.0
    recompute: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """``stages``: layers (columns of a `Work`) of each pipeline stage; ``lifetime``: of replicas."""

    stages: tuple[tuple[int, ...], ...]
    microbatches: int
    lifetime: str = "iteration"

    @classmethod
    def even(cls, layers: int, stages: int, *, microbatches: int, lifetime: str = "iteration") -> Schedule:
        """Neighbouring layers, as evenly as they divide; the first stages get one more."""
        parts = np.array_split(np.arange(layers), stages)
        return cls(stages=tuple(tuple(p.tolist()) for p in parts), microbatches=microbatches, lifetime=lifetime)


@dataclasses.dataclass(frozen=True, eq=False)
class StepTime:
    """All [T].

    Args:
        total: seconds of the step.
        exposed: of it, waiting for copies on the stage that waits longest.
        sent: bytes of copies in a step, all ranks and layers together.
    """

    total: np.ndarray
    exposed: np.ndarray
    sent: np.ndarray


def simulate(work: Work, timing: Timing, schedule: Schedule) -> StepTime:
    """How long steps last."""
    lifetime, last, count = LIFETIMES[schedule.lifetime], len(schedule.stages) - 1, schedule.microbatches
    fetches, returns = count if lifetime.fetches else 1, count if lifetime.returns else 1
    forward, backward, exposed = [], [], []
    for at, layers in enumerate(schedule.stages):
        stage = _Stage(work.layers(layers), timing, schedule.lifetime, head=timing.head if at == last else 0.0)
        out, back = stage.forward(moves=True), stage.backward(moves=True)
        forward.append([out.total] * fetches + [stage.forward(moves=False).total] * (count - fetches))
        backward.append([stage.backward(moves=False).total] * (count - returns) + [back.total] * returns)
        exposed.append(fetches * out.exposed + returns * back.exposed)
    sent = work.out.sum(axis=1) * fetches * max(1, lifetime.fetches) + work.home.sum(axis=1) * returns
    return StepTime(_one_forward_one_backward(forward, backward, timing.send), np.max(exposed, axis=0), sent)


class _Clock:
    """One microbatch on one stage. All arrays [T], seconds: in all, of waiting, and that left the network to copies."""

    def __init__(self, steps: int, contention: float) -> None:
        self.total, self.exposed, self.free = np.zeros((3, steps))
        self._busy_until = {"out": np.zeros(steps), "home": np.zeros(steps)}  # by `free`
        self._contention = contention

    def run(self, compute: np.ndarray | float, network: np.ndarray | float = 0.0) -> None:
        self.total, self.free = self.total + compute + network, self.free + compute

    def post(self, way: str, seconds: np.ndarray, since: np.ndarray) -> np.ndarray:
        """Send copies after those on the same way; returns when, by `free`, they have arrived."""
        self._busy_until[way] = np.maximum(self._busy_until[way], since) + seconds
        return self._busy_until[way]

    def wait(self, arrival: np.ndarray, seconds: np.ndarray | float = 0.0) -> None:
        """Until copies have arrived; what was hidden of the ``seconds`` they took has slowed compute down."""
        wait = np.maximum(0.0, arrival - self.free)
        self.exposed, self.free = self.exposed + wait, self.free + wait
        self.total = self.total + wait + self._contention * np.maximum(0.0, seconds - wait)


class _Stage:
    """The layers of one pipeline stage, whose ``work`` is theirs alone; ``head``: seconds after the last of them."""

    def __init__(self, work: Work, timing: Timing, lifetime: str, *, head: float) -> None:
        self.work, self.timing, self.head = work, timing, head
        self.lifetime, self.in_turn = LIFETIMES[lifetime], lifetime != "iteration"
        self.steps, self.layers = work.peak.shape
        self.experts = work.peak * timing.pair
        self.trips = 2 * work.trip * (1 - timing.hidden)  # dispatch and combine

    def forward(self, *, moves: bool) -> _Clock:
        """``moves``: with the fetch of every layer's replicas."""
        clock, began = _Clock(self.steps, self.timing.contention), []
        for layer in range(self.layers):
            began.append(clock.free)
            self._layer(clock, layer, began[max(0, layer - self.lifetime.ahead)] if moves else None)
        clock.run(self.head)
        return clock

    def backward(self, *, moves: bool) -> _Clock:
        """``moves``: with the return of every layer's gradients, and a second fetch where the lifetime is ``layer``."""
        clock = _Clock(self.steps, self.timing.contention)
        clock.run(BACKWARD * self.head)
        began: list[np.ndarray] = []
        arrivals: list[np.ndarray] = []
        for layer in reversed(range(self.layers)):
            began.append(clock.free)
            since = began[max(0, len(began) - 1 - self.lifetime.ahead)] if moves and self.lifetime.fetches > 1 else None
            if self.timing.recompute:
                self._layer(clock, layer, since)
            else:
                self._fetch(clock, layer, since)
            if self.in_turn and len(arrivals) > 1:
                clock.wait(arrivals[-2])  # layers share two buffers of gradients
            clock.run(BACKWARD * self.experts[:, layer], self.trips[:, layer])
            if moves:
                arrivals.append(clock.post("home", self.work.back[:, layer], clock.free))
            clock.run(BACKWARD * self.timing.dense)
        if arrivals:
            clock.wait(arrivals[-1], self.work.back.sum(axis=1))
        return clock

    def _layer(self, clock: _Clock, layer: int, since: np.ndarray | None) -> None:
        """Its forward; its fetch began at ``since``, if there is one."""
        clock.run(self.timing.dense + self.work.routing[:, layer], self.work.late[:, layer])
        self._fetch(clock, layer, since)
        clock.run(self.experts[:, layer], self.trips[:, layer])

    def _fetch(self, clock: _Clock, layer: int, since: np.ndarray | None) -> None:
        if since is not None:
            seconds = self.work.fetch[:, layer]
            clock.wait(clock.post("out", seconds, since), seconds)


def _one_forward_one_backward(
    forward: Sequence[Sequence[np.ndarray]], backward: Sequence[Sequence[np.ndarray]], send: float
) -> np.ndarray:
    """[T] when the last stage has finished; ``forward``, ``backward``: seconds [T] of stage p for microbatch m."""
    stages, count = len(forward), len(forward[0])
    left = []
    for p in range(stages):
        ahead = min(stages - 1 - p, count)
        order = [(True, m) for m in range(ahead)]
        order += [(first, m + ahead * first) for m in range(count - ahead) for first in (True, False)]
        left.append(order + [(False, m) for m in range(count - ahead, count)])
    done: dict[tuple[bool, int, int], np.ndarray] = {}
    clock = [np.zeros_like(forward[0][0]) for _ in range(stages)]
    while any(left):
        for p in range(stages):
            while left[p]:
                is_forward, m = left[p][0]
                before = p - 1 if is_forward else p + 1
                ready = clock[p]
                if 0 <= before < stages:
                    if (is_forward, before, m) not in done:
                        break
                    ready = np.maximum(ready, done[is_forward, before, m] + send)
                clock[p] = done[is_forward, p, m] = ready + (forward if is_forward else backward)[p][m]
                left[p].pop(0)
    return np.max(clock, axis=0)
