"""A job whose steps are simulated from recorded loads: under forced balance, stock, and FSSDP as it would plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.offline.presets import Model
from megatron_hecate.offline.step_model import Schedule, Timing, Work, simulate
from megatron_hecate.offline.traffic import LayerPlan
from megatron_hecate.plan import (
    CopyCost,
    HomeSearch,
    LayerShape,
    Placement,
    World,
    add_late_replicas,
    plan_replicas,
)
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.replicas.memory_estimate import ExpertMemory, RankExperts
from megatron_hecate.runtime.forecast import LoadHistory

MOVED: int = 14  # bytes of a parameter that move with an expert: weight, main parameter, two moments, unsharded
CHORDS, CLOSE = (
    20,
    1e-3,
)  # when the time outside experts is fitted: the most tries, and how near is near


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is said of one way to train; means over steps.

    Args:
        late: replicas that a layer may fetch after the gate.
        seconds: of a step.
        imbalance: fullest rank over mean, mean of steps and layers.
        exposed: seconds of a step spent waiting for copies.
        sent: bytes of copies that a rank sends in a step.
        memory: of its experts.
        rehome: steps between two looks for better homes; 0 leaves them.
    """

    name: str
    slots: int
    lifetime: str
    late: int
    seconds: float
    imbalance: float
    exposed: float
    sent: float
    memory: ExpertMemory
    rehome: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What is simulated.

    Args:
        counts: [T, L, R, E] pairs that rank r routes to expert e in a step, all microbatches.
        layers: what numbers these have in the trace.
        first: the step from which on steps are counted; those before are history.
        world: the expert-parallel group.
        timing: of a microbatch.
        schedule: of the pipeline, over all layers of the model.
        once: as in `Work.of`.
        measured: whether speeds are, so that late replicas may cross nodes.
    """

    model: Model
    layers: Sequence[int]
    counts: np.ndarray
    first: int
    world: World
    timing: Timing
    schedule: Schedule
    once: int = 0
    measured: bool = False

    def shape(self, lifetime: str) -> LayerShape:
        """Of a layer, as FSSDP prices it."""
        often = LIFETIMES[lifetime]
        times = {
            name: max(1, getattr(often, name) * self.schedule.microbatches)
            for name in ("fetches", "returns")
        }
        return self.model.shape(
            **times, microbatches=self.schedule.microbatches, hidden_seconds=self.timing.dense
        )

    def copy_cost(self, lifetime: str) -> CopyCost:
        """Of replicas, in a step."""
        shape = self.shape(lifetime)
        return shape.copy_cost(
            self.world, hidden=shape.hidden_seconds / shape.fetch_seconds(self.world)
        )

    def homes(self, slots: int, lifetime: str, every: int) -> tuple[list[list[Placement]], float]:
        """Homes by step and layer, with looks for better ones at step `first` and each ``every`` later; and the seconds
        that moving adds to a step. 0 leaves them where they are."""
        world, totals = self.world, self.counts.sum(axis=2)
        built = Placement.initial(self.model.experts, world.num_ranks, num_slots=slots)
        order = np.tile(np.arange(self.model.experts), (totals.shape[1], 1))
        now, found, seconds = [built] * len(order), [], []
        for step in range(len(totals)):
            if every and step >= max(1, self.first) and (step - self.first) % every == 0:
                search = HomeSearch(
                    homes=built,
                    world=world,
                    cost=self.copy_cost(lifetime),
                    expert_bytes=MOVED * self.model.expert_elements,
                    token_seconds=self.shape(lifetime).token_seconds(world),
                    horizon=every,
                )
                better = search.find(totals[max(0, step - every) : step], order)
                seconds.append(better.seconds if better else 0.0)
                if better is not None:
                    order = better.order
                    now = [built.with_homes(of_layer) for of_layer in order]
            found.append(now)
        of_stage = (
            self.model.layers / self.schedule.depth / len(order)
        )  # for each layer of the trace
        return found, of_stage * float(np.mean(seconds)) / every if seconds else 0.0

    def place(self, homes: Sequence[Sequence[Placement]], lifetime: str) -> list[list[Placement]]:
        """What FSSDP plans with `homes`, from its forecast, in every step from `first` on."""
        world, totals, cost = self.world, self.counts.sum(axis=2), self.copy_cost(lifetime)
        history, placed, now = LoadHistory(), [], homes[0]
        for step, loads in enumerate(totals):
            forecast = history.forecast() if step >= self.first - 1 else None
            now = homes[step] if homes[step] is not homes[step - 1] else now
            if forecast is not None:
                layers = zip(forecast, homes[step], now, strict=True)
                now = [
                    plan_replicas(load, home, world, cost=cost, previous=before)
                    for load, home, before in layers
                ]
            placed.append(now)
            history.append(loads)
        return placed[self.first :]

    def add_late(self, placed: Sequence[Sequence[Placement]], most: int) -> list[list[Placement]]:
        """What FSSDP makes of ``placed`` by the loads of a microbatch, with ``most`` late replicas of a layer."""
        shape = dataclasses.replace(self.shape("iteration"), microbatches=1)
        options = dict(cost=shape.copy_cost(self.world), most=most, across_nodes=self.measured)
        loads = np.rint(self.counts[self.first :].sum(axis=2) / self.schedule.microbatches).astype(
            np.int64
        )
        steps = zip(loads, placed, strict=True)
        return [
            [add_late_replicas(c, p, self.world, **options) for c, p in zip(*step, strict=True)]
            for step in steps
        ]

    def work(self, placed: Sequence[Sequence[Placement]], *, late: int = 0) -> Work:
        """With these placements by step, from `first` on, and layer, and late replicas: FSSDP's quotas and copies."""
        shape, world, final = (
            self.shape("iteration"),
            self.world,
            self.add_late(placed, late) if late else placed,
        )
        steps = zip(self.counts[self.first :], placed, final, strict=True)
        plans = [
            [LayerPlan.of(c, p, f, world, shape) for c, p, f in zip(*step, strict=True)]
            for step in steps
        ]
        return Work.of(plans, world, shape, once=self.once)

    def memory(
        self, *, slots: int = 0, lifetime: str = "iteration", resident: int = 0
    ) -> ExpertMemory:
        """Of a rank's experts on the first stage, which keeps most microbatches; ``resident``: experts beside homes."""
        schedule, homes = self.schedule, self.model.experts // self.world.num_ranks + resident
        chunks = [len(chunk) for chunk in schedule.stages[:: schedule.depth]]
        buffer = LayerBuffer(
            slots=slots, elements=self.model.expert_elements, dtype=torch.bfloat16, homes=homes
        )
        experts = RankExperts.with_adam(
            (buffer,) * sum(chunks),
            in_flight=max(chunks)
            * min(schedule.ahead(0) + 1, schedule.microbatches * schedule.chunks),
            transport_bytes=P2P(SimpleNamespace(), timeout=1.0).extra_bytes([buffer]),
        )
        return ExpertMemory.estimate(experts, lifetime)

    def run(
        self, name: str, work: Work, *, corrects: bool = False, moving: float = 0.0, **way: Any
    ) -> Outcome:
        """Steps whose layers do ``work``: the recorded layers are stretched over the model's. ``way``: the first fields
        of an `Outcome`, where they are not stock's; ``corrects``: as in `Schedule`; ``moving``: seconds more."""
        way = dict(slots=0, lifetime="iteration", late=0) | way
        if way[
            "late"
        ]:  # ranks exchange loads in every microbatch that may fetch, also where nothing is copied
            asks = self.world.speeds.routing / (
                1 if LIFETIMES[way["lifetime"]].fetches else self.schedule.microbatches
            )
            work = dataclasses.replace(work, routing=np.maximum(work.routing, asks))
        recorded, layers, ranks = work.peak.shape[1], self.model.layers, self.world.num_ranks
        work = work.layers([layer * recorded // layers for layer in range(layers)])
        schedule = dataclasses.replace(self.schedule, lifetime=way["lifetime"], corrects=corrects)
        time = simulate(work, self.timing, schedule)
        return Outcome(
            name=name,
            **way,
            seconds=float(time.total.mean()) + moving,
            imbalance=float(
                work.peak.mean()
                * ranks
                * self.schedule.microbatches
                / self.counts.sum(axis=(2, 3)).mean()
            ),
            exposed=float(time.exposed.mean()),
            sent=float(time.sent.mean()) / ranks / self.schedule.depth,
            memory=self.memory(slots=way["slots"], lifetime=way["lifetime"]),
        )

    def compare(
        self,
        slots: Sequence[int] = (),
        lifetimes: Sequence[str] = (),
        late: Sequence[int] = (),
        rehome: Sequence[int] = (),
    ) -> list[Outcome]:
        """Forced balance, stock, and FSSDP in each way to combine these."""
        pairs = self.counts.sum(axis=(2, 3)).mean() / self.world.num_ranks
        forced = Work.balanced(pairs, self.world, self.shape("iteration"), once=self.once)
        homes = Placement.initial(self.model.experts, self.world.num_ranks, num_slots=0)
        stock = self.work([[homes] * self.counts.shape[1]] * (len(self.counts) - self.first))
        outcomes, known = [self.run("forced balance", forced), self.run("stock", stock)], {}
        for count, lifetime, every in itertools.product(slots, lifetimes, rehome or (0,)):
            moved, moving = self.homes(count, lifetime, every)
            placed = self.place(moved, lifetime)
            for most in late or (0,):
                key = (
                    count,
                    most,
                    *(placement.fingerprint for step in placed for placement in step),
                )
                known[key] = known.get(key) or self.work(placed, late=most)
                name = f"FSSDP, {count} slot{'s' * (count > 1)}, {lifetime}" + f", {most} late" * (
                    most > 0
                )
                name += f", homes every {every}" * (every > 0)
                way = dict(slots=count, lifetime=lifetime, late=most, rehome=every)
                outcomes.append(self.run(name, known[key], moving=moving, **way))
        return outcomes

    def lasting(self, seconds: float) -> Job:
        """With so much time outside experts and all-to-alls stock's step lasts ``seconds``; ValueError if it cannot."""

        def timed(share: float) -> Job:
            changed = {name: share * getattr(self.timing, name) for name in ("dense", "head")}
            return dataclasses.replace(self, timing=dataclasses.replace(self.timing, **changed))

        def lasts(share: float) -> float:
            return timed(share).compare()[1].seconds

        without, whole = lasts(0.0), lasts(1.0)
        if seconds <= without:
            raise ValueError(
                f"--step-ms {seconds * 1e3:g} is less than experts and all-to-alls alone take, {without * 1e3:.1f}: "
                "check --ranks, --ep and --microbatches, or take a --cluster file that --measure has written there"
            )
        low, high = (0.0, without), (1.0, whole)
        while high[1] < seconds:
            low, high = high, (2 * high[0], lasts(2 * high[0]))
        # more time outside never makes the step shorter, and the longest of several paths is convex: chords end above
        for _ in range(CHORDS):
            share = low[0] + (high[0] - low[0]) * (seconds - low[1]) / (high[1] - low[1])
            now = share, lasts(share)
            if abs(now[1] / seconds - 1) < CLOSE:
                break
            low, high = (now, high) if now[1] < seconds else (low, now)
        return timed(now[0])


def spread(loads: np.ndarray, num_ranks: int, pairs: float) -> np.ndarray:
    """[T, L, R, E] whole pairs, ``pairs`` of each rank: sources are summed, or a source is dealt evenly to ranks."""
    steps, layers, sources, experts = loads.shape
    if sources % num_ranks == 0:
        loads = loads.reshape(steps, layers, num_ranks, -1, experts).sum(axis=3)
    elif num_ranks % sources:
        loads = loads.sum(axis=2, keepdims=True)
    loads = np.repeat(loads, num_ranks // loads.shape[2], axis=2)
    return np.rint(loads * (pairs * num_ranks / loads.sum(axis=(2, 3), keepdims=True))).astype(
        np.int64
    )
