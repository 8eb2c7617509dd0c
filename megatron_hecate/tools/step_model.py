"""Critical path of one training step, from the work of every MoE layer.

An all-to-all ends for no rank before the last rank has begun it. So between two all-to-alls only
the fullest rank counts, and a layer lasts: compute outside the experts, dispatch, experts of the
fullest rank, combine. Copies are in flight meanwhile, one layer's after the other. They share the
network with the all-to-alls, so they make progress while ranks compute. Pipeline stages run one
forward, one backward (1F1B); several chunks per stage are interleaved as in Megatron.
Letters in shapes: T steps, L layers, E experts, R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.replicas.buffers import FETCHED_TOGETHER, LIFETIMES
from megatron_hecate.tools.layer_work import Work

# fit of the time outside experts: most iterations, and relative tolerance
CHORDS: int = 20
CLOSE: float = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Times that do not depend on routing: seconds of one rank, one microbatch, forward.

    Args:
        dense: seconds of a layer outside its experts: attention, router, shared experts.
        pair: seconds of one (token, expert) pair in one expert.
        head: seconds after the last layer, on the last stage.
        send: seconds of a transfer from one stage to the next.
        contention: share of a hidden copy's time that it takes from compute.
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
class PipelineSchedule:
    """Pipeline schedule of a step.

    Args:
        stages: layers (columns of a `Work`) per virtual stage; number ``c * P + p`` is chunk c of
            stage p, with P stages.
        microbatches: microbatches per step.
        lifetime: lifetime of replicas.
        chunks: chunks per stage; two or more are interleaved.
        corrects: whether late copies are chosen in every microbatch; otherwise in the first one,
            and they stay.
    """

    stages: tuple[tuple[int, ...], ...]
    microbatches: int
    lifetime: str = "iteration"
    chunks: int = 1
    corrects: bool = False

    @classmethod
    def even(
        cls, layers: int, stages: int, *, microbatches: int, chunks: int = 1, **options: Any
    ) -> PipelineSchedule:
        """Split neighbouring layers as evenly as possible; the first stages get one more.

        Args:
            layers: number of layers.
            stages: number of pipeline stages.
            microbatches: microbatches per step.
            chunks: chunks per stage.
            options: further fields.
        """
        parts = np.array_split(np.arange(layers), stages * chunks)
        return cls(
            stages=tuple(tuple(part.tolist()) for part in parts),
            microbatches=microbatches,
            chunks=chunks,
            **options,
        )

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages) // self.chunks

    def ahead(self, stage: int) -> int:
        """Count the forwards of chunks that a stage runs before its first backward in Megatron."""
        ahead = (self.depth - 1 - stage) * min(2, self.chunks) + (self.chunks - 1) * self.depth
        return min(ahead, self.microbatches * self.chunks)

    def order(self, stage: int) -> list[tuple[bool, int, int]]:
        """List the tasks of a stage in Megatron's order.

        Returns:
            Tuples (whether it is a forward, index into `stages`, microbatch).
        """
        depth = self.depth
        forwards = []
        backwards = []
        # Megatron runs groups of `depth` microbatches through one chunk after the other.
        for first in range(0, self.microbatches, depth):
            group = range(first, min(first + depth, self.microbatches))
            for chunk in range(self.chunks):
                last_first = self.chunks - 1 - chunk
                forwards += [(True, chunk * depth + stage, m) for m in group]
                backwards += [(False, last_first * depth + stage, m) for m in group]
        ahead = self.ahead(stage)
        tasks = forwards[:ahead]
        for pair in zip(forwards[ahead:], backwards, strict=False):
            tasks += pair
        return tasks + backwards[len(forwards) - ahead :]


@dataclasses.dataclass(frozen=True, eq=False)
class StepTime:
    """Time of steps; all arrays are [T].

    Args:
        total: seconds of the step.
        exposed: seconds spent waiting for copies, on the stage that waits longest.
        sent: bytes of copies in a step, all ranks and layers together.
    """

    total: np.ndarray
    exposed: np.ndarray
    sent: np.ndarray


def fit_outside(timing: Timing, seconds: float, step_seconds: Callable[[Timing], float]) -> Timing:
    """Scale the time outside experts and all-to-alls so that a step takes ``seconds``.

    Args:
        timing: times to scale.
        seconds: measured time of a step.
        step_seconds: seconds of a modelled step with given times.

    Raises:
        ValueError: if experts and all-to-alls alone take longer; the message is their time.
    """

    def point(share: float) -> tuple[float, float]:
        return share, step_seconds(scaled(share))

    def scaled(share: float) -> Timing:
        return dataclasses.replace(timing, dense=share * timing.dense, head=share * timing.head)

    # points (share, seconds of a step) on both sides of the solution
    low = point(0.0)
    high = point(1.0)
    if seconds <= low[1]:
        raise ValueError(f"{low[1] * 1e3:.1f}")
    while high[1] < seconds:
        low = high
        high = point(2 * low[0])
    now = high
    # Regula falsi. More time outside experts never shortens the step, and the longest of
    # several paths is convex in it: every chord's root is on the same side, and they converge.
    for _ in range(CHORDS):
        now = point(low[0] + (high[0] - low[0]) * (seconds - low[1]) / (high[1] - low[1]))
        if abs(now[1] / seconds - 1) < CLOSE:
            break
        if now[1] < seconds:
            low = now
        else:
            high = now
    return scaled(now[0])


def simulate(work: Work, timing: Timing, schedule: PipelineSchedule) -> StepTime:
    """Simulate the critical path of every step."""
    lifetime = LIFETIMES[schedule.lifetime]
    count = schedule.microbatches
    # microbatches with a fetch, and with a return
    fetches = count if lifetime.fetches else 1
    returns = count if lifetime.returns else 1
    # After its first microbatch FSSDP knows its late replicas: they stay, or are fetched early.
    later = work
    if not schedule.corrects:
        later = dataclasses.replace(work, fetch=work.fetch + work.late, late=0 * work.late)
    forward = []
    backward = []
    exposed = []
    for at, layers in enumerate(schedule.stages):
        head = timing.head if at == len(schedule.stages) - 1 else 0.0
        first = _Stage(work.layers(layers), timing, schedule.lifetime, head=head)
        stage = _Stage(later.layers(layers), timing, schedule.lifetime, head=head)
        outs = [first.forward(moves=True)]
        outs += [stage.forward(moves=True)] * (fetches - 1)
        back = stage.backward(moves=True)
        # Fetches are in the first microbatches, returns in the last.
        without_fetch = [stage.forward(moves=False).total] * (count - fetches)
        without_return = [stage.backward(moves=False).total] * (count - returns)
        forward.append([out.total for out in outs] + without_fetch)
        backward.append(without_return + [back.total] * returns)
        exposed.append(sum(out.exposed for out in outs) + returns * back.exposed)
    waits = np.sum(np.reshape(exposed, (schedule.chunks, -1, len(work.out))), axis=0).max(axis=0)
    fetched = work.out.sum(axis=1) * fetches * max(1, lifetime.fetches)
    sent = fetched + work.home.sum(axis=1) * returns
    total = _one_forward_one_backward(forward, backward, schedule, timing.send)
    return StepTime(total, waits, sent)


class _Clock:
    """Clock of one microbatch on one stage; all arrays are [T] seconds.

    Attributes:
        total: time since the start.
        exposed: time spent waiting for copies.
        free: time during which the network is left to copies.
    """

    def __init__(self, steps: int, contention: float) -> None:
        self.total = np.zeros(steps)
        self.exposed = np.zeros(steps)
        self.free = np.zeros(steps)
        # end of the last copy per direction, measured in `free`
        self._busy_until = {"out": np.zeros(steps), "home": np.zeros(steps)}
        self._contention = contention

    def run(self, compute: np.ndarray | float, network: np.ndarray | float = 0.0) -> None:
        """Advance by compute, during which copies progress, and by all-to-alls, which block."""
        self.total = self.total + compute + network
        self.free = self.free + compute

    def post(self, way: str, seconds: np.ndarray, since: np.ndarray) -> np.ndarray:
        """Queue copies behind earlier ones in the same direction.

        Returns:
            Time of arrival, in `free`.
        """
        self._busy_until[way] = np.maximum(self._busy_until[way], since) + seconds
        return self._busy_until[way]

    def wait(self, arrival: np.ndarray, seconds: np.ndarray | float = 0.0) -> None:
        """Wait for copies; their hidden part has slowed compute down.

        Args:
            arrival: time of arrival, in `free`.
            seconds: duration of the copies.
        """
        wait = np.maximum(0.0, arrival - self.free)
        self.exposed = self.exposed + wait
        self.free = self.free + wait
        self.total = self.total + wait + self._contention * np.maximum(0.0, seconds - wait)


class _Stage:
    """Layers of one virtual pipeline stage.

    Args:
        work: work of the stage's layers alone.
        timing: times independent of routing.
        lifetime: lifetime of replicas.
        head: seconds after the last layer.
    """

    def __init__(self, work: Work, timing: Timing, lifetime: str, *, head: float) -> None:
        self.work = work
        self.timing = timing
        self.head = head
        self.lifetime = LIFETIMES[lifetime]
        self.in_turn = lifetime != "iteration"
        self.steps, self.layers = work.peak.shape
        self.experts = work.peak * timing.pair + work.computing / (1 + BACKWARD)
        # dispatch and combine
        self.trips = 2 * work.trip * (1 - timing.hidden)

    def forward(self, *, moves: bool) -> _Clock:
        """Run a forward; ``moves``: with the fetches of all layers, and late ones."""
        clock = _Clock(self.steps, self.timing.contention)
        fetched: list[np.ndarray] = []
        for layer in range(self.layers):
            if moves:
                fetched += self._post(clock, self.work.fetch.T, layer)
            self._layer(clock, layer, fetched, late=moves)
        clock.run(self.head)
        return clock

    def backward(self, *, moves: bool) -> _Clock:
        """Run a backward.

        Args:
            moves: whether gradients return; lifetime ``layer`` also fetches replicas again.
        """
        clock = _Clock(self.steps, self.timing.contention)
        fetched: list[np.ndarray] = []
        arrivals: list[np.ndarray] = []
        clock.run(BACKWARD * self.head)
        for layer in reversed(range(self.layers)):
            if moves and self.lifetime.fetches > 1:
                fetched += self._post(clock, self.work.fetch.T[::-1], self.layers - 1 - layer)
            if self.timing.recompute:
                self._layer(clock, layer, fetched, late=False)
            elif fetched:
                clock.wait(fetched.pop(0), self.work.fetch[:, layer])
            # Layers share two buffers of gradients: the last but one return must have ended.
            if self.in_turn and len(arrivals) > 1:
                clock.wait(arrivals[-2])
            clock.run(BACKWARD * self.experts[:, layer], self.trips[:, layer])
            if moves:
                arrivals.append(clock.post("home", self.work.back[:, layer], clock.free))
            clock.run(BACKWARD * self.timing.dense)
        if arrivals:
            clock.wait(arrivals[-1], self.work.back.sum(axis=1))
        return clock

    def _post(self, clock: _Clock, fetches: np.ndarray, turn: int) -> list[np.ndarray]:
        """Post the fetches that begin before a layer.

        The first layer begins its own fetch, and each layer the prefetch of further ones.

        Args:
            clock: clock of the microbatch.
            fetches: seconds of all fetches in the order of execution, [L, T].
            turn: index of the layer in that order.

        Returns:
            Times of arrival.
        """
        first = self._posted(turn - 1)
        last = self._posted(turn)
        return [clock.post("out", seconds, clock.free) for seconds in fetches[first:last]]

    def _posted(self, turn: int) -> int:
        """Return the number of fetches that have begun before the layer at ``turn`` runs."""
        if turn < 0:
            return 0
        return 1 + min(FETCHED_TOGETHER * (turn + 1), turn + self.lifetime.ahead)

    def _layer(self, clock: _Clock, layer: int, fetched: list[np.ndarray], *, late: bool) -> None:
        """Run a layer's forward.

        Args:
            clock: clock of the microbatch.
            layer: index of the layer.
            fetched: arrivals of copies in flight; the layer waits for the first and removes it.
            late: whether late copies run; they queue behind the prefetches of the next layers.
        """
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
    schedule: PipelineSchedule,
    send: float,
) -> np.ndarray:
    """Compute the time [T] at which the last stage has finished.

    Args:
        forward: seconds [T] by virtual stage and microbatch.
        backward: the same of backwards.
        schedule: order of the tasks.
        send: seconds of a transfer between stages.
    """
    left = [schedule.order(p) for p in range(schedule.depth)]
    done: dict[tuple[bool, int, int], np.ndarray] = {}
    clock = [np.zeros_like(forward[0][0]) for _ in left]
    while any(left):
        for p in range(schedule.depth):
            while left[p]:
                is_forward, v, m = left[p][0]
                if is_forward:
                    before = v - 1
                    seconds = forward[v][m]
                else:
                    before = v + 1
                    seconds = backward[v][m]
                ready = clock[p]
                if 0 <= before < len(forward):
                    # The neighbouring stage has not run this microbatch yet.
                    if (is_forward, before, m) not in done:
                        break
                    ready = np.maximum(ready, done[is_forward, before, m] + send)
                clock[p] = done[is_forward, v, m] = ready + seconds
                left[p].pop(0)
    return np.max(clock, axis=0)
