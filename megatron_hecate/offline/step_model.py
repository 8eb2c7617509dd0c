"""The critical path of one training step, from what every MoE layer does in it.

An all-to-all ends for no rank before the last rank has begun it. So between two of them only the fullest rank counts,
and a layer lasts: compute outside the experts, dispatch, experts of the fullest rank, combine. Copies travel beside
that, one layer's after the other. They share the network with the all-to-alls, so they get on while ranks compute.
Pipeline stages run one forward, one backward (1F1B), also where each has several chunks, interleaved as Megatron does.
Letters in shapes: T steps, L layers, E experts, R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hecate.offline.traffic import LayerPlan, Traffic, no_traffic, token_traffic
from megatron_hecate.plan import LayerShape, World
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.replicas.buffers import LIFETIMES


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What the layers do, as far as the critical path depends on it. All arrays [T, L].

    Args:
        peak: pairs of the fullest rank in one microbatch.
        trip: seconds of one all-to-all.
        fetch, back: seconds of one layer's copies on their way out, once, and home, once, when nothing else travels.
        late: seconds of copies after the gate.
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
    def of(
        cls, plans: Sequence[Sequence[LayerPlan]], world: World, shape: LayerShape, *, once: int = 0
    ) -> Work:
        """From the plans of every step and, within it, every layer.

        Args:
            once: experts of a token, where it is sent to a node, and to a rank of its node, once; 0: once per expert.
        """

        def figures(plan: LayerPlan) -> tuple[float, ...]:
            tokens = token_traffic(plan.flow, world)
            if (
                once and plan.flow.any()
            ):  # as if pairs were spread evenly over tokens, and over nodes and their ranks
                others = np.maximum([world.num_ranks / world.num_nodes - 1, world.num_nodes - 1], 1)
                share = np.maximum([tokens.intra, tokens.inter], 1e-9) / plan.flow.sum()
                near, far = (
                    others * (1 - (1 - share / others) ** once) / (once * share)
                )  # messages per pair
                inside = (tokens.intra_out * near, tokens.intra_in * near)
                tokens = Traffic(*inside, tokens.inter_out * far, tokens.inter_in * far)
            peak = float(plan.flow.sum(axis=0).max()) / shape.microbatches
            trip = tokens.seconds(shape.token_bytes / shape.microbatches, world)
            ways = (plan.early, plan.back, plan.late)
            out, home, late = (way.intra + way.inter for way in ways)
            routing = world.speeds.routing if out + late else 0.0
            return peak, trip, *(way.seconds(1, world) for way in ways), routing, out + late, home

        return cls(*np.moveaxis([[figures(plan) for plan in step] for step in plans], -1, 0))

    @classmethod
    def balanced(cls, pairs: float, world: World, shape: LayerShape, *, once: int = 0) -> Work:
        """[1, 1] forced balance: every rank sends as many of its ``pairs``, of all microbatches, to each rank."""
        flow, none = (
            np.full((world.num_ranks,) * 2, pairs / world.num_ranks),
            no_traffic(world.num_ranks),
        )
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
    """Who does what when.

    Args:
        stages: layers (columns of a `Work`); of P stages, number ``c * P + p`` is chunk c of stage p.
        chunks: of each stage; from 2 on they are interleaved.
        corrects: whether late copies are chosen anew in every microbatch; else in the first, after which they stay.
    """

    stages: tuple[tuple[int, ...], ...]
    microbatches: int
    lifetime: str = "iteration"
    chunks: int = 1
    corrects: bool = False

    @classmethod
    def even(
        cls, layers: int, stages: int, *, microbatches: int, chunks: int = 1, **options: Any
    ) -> Schedule:
        """Neighbouring layers, as evenly as they divide; the first get one more. ``options`` are further fields."""
        parts = np.array_split(np.arange(layers), stages * chunks)
        return cls(
            stages=tuple(tuple(p.tolist()) for p in parts),
            microbatches=microbatches,
            chunks=chunks,
            **options,
        )

    @property
    def depth(self) -> int:
        return len(self.stages) // self.chunks

    def ahead(self, stage: int) -> int:
        """Forwards of one chunk that a stage runs before its first backward; Megatron's."""
        ahead = (self.depth - 1 - stage) * min(2, self.chunks) + (self.chunks - 1) * self.depth
        return min(ahead, self.microbatches * self.chunks)

    def order(self, stage: int) -> list[tuple[bool, int, int]]:
        """What a stage runs, in Megatron's order: (whether it is a forward, which of `stages`, microbatch)."""
        stages, count, ahead = self.depth, self.microbatches, self.ahead(stage)
        groups = [range(m, min(m + stages, count)) for m in range(0, count, stages)]
        table = [(c, m) for group in groups for c in range(self.chunks) for m in group]
        forwards = [(True, c * stages + stage, m) for c, m in table]
        backwards = [(False, (self.chunks - 1 - c) * stages + stage, m) for c, m in table]
        paired = [task for pair in zip(forwards[ahead:], backwards, strict=False) for task in pair]
        return forwards[:ahead] + paired + backwards[len(forwards) - ahead :]


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
    lifetime, last, count = (
        LIFETIMES[schedule.lifetime],
        len(schedule.stages) - 1,
        schedule.microbatches,
    )
    fetches, returns = count if lifetime.fetches else 1, count if lifetime.returns else 1
    # FSSDP's late copies come early the next time
    later = (
        work
        if schedule.corrects
        else dataclasses.replace(work, fetch=work.fetch + work.late, late=0 * work.late)
    )
    forward, backward, exposed = [], [], []
    for at, layers in enumerate(schedule.stages):
        head = timing.head if at == last else 0.0
        first, stage = (
            _Stage(of.layers(layers), timing, schedule.lifetime, head=head) for of in (work, later)
        )
        outs, back = [first.forward(moves=True)], stage.backward(moves=True)
        outs += [stage.forward(moves=True)] * (fetches - 1)
        forward.append(
            [out.total for out in outs] + [stage.forward(moves=False).total] * (count - fetches)
        )
        backward.append(
            [stage.backward(moves=False).total] * (count - returns) + [back.total] * returns
        )
        exposed.append(sum(out.exposed for out in outs) + returns * back.exposed)
    waits = np.sum(np.reshape(exposed, (schedule.chunks, -1, len(work.out))), axis=0).max(axis=0)
    sent = (
        work.out.sum(axis=1) * fetches * max(1, lifetime.fetches) + work.home.sum(axis=1) * returns
    )
    return StepTime(
        _one_forward_one_backward(forward, backward, schedule, timing.send), waits, sent
    )


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
        """``moves``: with the fetch of every layer's replicas, and late ones."""
        clock, fetched = _Clock(self.steps, self.timing.contention), []
        for layer in range(self.layers):
            if moves:
                fetched += self._post(clock, self.work.fetch.T, layer)
            self._layer(clock, layer, fetched, late=moves)
        clock.run(self.head)
        return clock

    def backward(self, *, moves: bool) -> _Clock:
        """``moves``: with the return of every layer's gradients, and a second fetch where the lifetime is ``layer``."""
        clock, fetched, arrivals = _Clock(self.steps, self.timing.contention), [], []
        clock.run(BACKWARD * self.head)
        for layer in reversed(range(self.layers)):
            if moves and self.lifetime.fetches > 1:
                fetched += self._post(clock, self.work.fetch.T[::-1], self.layers - 1 - layer)
            if self.timing.recompute:
                self._layer(clock, layer, fetched, late=False)
            elif fetched:
                clock.wait(fetched.pop(0), self.work.fetch[:, layer])
            if self.in_turn and len(arrivals) > 1:
                clock.wait(arrivals[-2])  # layers share two buffers of gradients
            clock.run(BACKWARD * self.experts[:, layer], self.trips[:, layer])
            if moves:
                arrivals.append(clock.post("home", self.work.back[:, layer], clock.free))
            clock.run(BACKWARD * self.timing.dense)
        if arrivals:
            clock.wait(arrivals[-1], self.work.back.sum(axis=1))
        return clock

    def _post(self, clock: _Clock, fetches: np.ndarray, turn: int) -> list[np.ndarray]:
        """Arrivals of the ``fetches`` [L, T] that begin with the layer whose ``turn`` it is."""
        ahead = turn + self.lifetime.ahead
        return [
            clock.post("out", seconds, clock.free)
            for seconds in fetches[ahead if turn else 0 : ahead + 1]
        ]

    def _layer(self, clock: _Clock, layer: int, fetched: list[np.ndarray], *, late: bool) -> None:
        """Its forward, with its copies if they are on their way; late ones follow those of the next layers."""
        clock.run(self.timing.dense + self.work.routing[:, layer])
        if fetched:
            clock.wait(fetched.pop(0), self.work.fetch[:, layer])
        seconds = self.work.late[:, layer]
        if late and seconds.any():
            clock.wait(np.where(seconds, clock.post("out", seconds, clock.free), 0.0))
        clock.run(self.experts[:, layer], self.trips[:, layer])


def _one_forward_one_backward(
    forward: Sequence[Sequence[np.ndarray]],
    backward: Sequence[Sequence[np.ndarray]],
    schedule: Schedule,
    send: float,
) -> np.ndarray:
    """[T] when the last stage has finished; ``forward``, ``backward``: seconds [T] of virtual stage v, microbatch m."""
    left = [schedule.order(p) for p in range(schedule.depth)]
    done: dict[tuple[bool, int, int], np.ndarray] = {}
    clock = [np.zeros_like(forward[0][0]) for _ in left]
    while any(left):
        for p in range(schedule.depth):
            while left[p]:
                is_forward, v, m = left[p][0]
                before = v - 1 if is_forward else v + 1
                ready = clock[p]
                if 0 <= before < len(forward):
                    if (is_forward, before, m) not in done:
                        break
                    ready = np.maximum(ready, done[is_forward, before, m] + send)
                clock[p] = done[is_forward, v, m] = (
                    ready + (forward if is_forward else backward)[v][m]
                )
                left[p].pop(0)
    return np.max(clock, axis=0)
