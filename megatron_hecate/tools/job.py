"""A job whose steps are simulated from recorded loads: under forced balance, stock, and FSSDP as it would plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.plan import LayerShape, Placement, World, plan_replicas
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.replicas.memory_estimate import ExpertMemory, RankExperts
from megatron_hecate.runtime.forecast import LoadHistory
from megatron_hecate.tools.presets import Model
from megatron_hecate.tools.simulate import LayerPlan, Schedule, Timing, Work, simulate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is said of one way to train; means over steps.

    Args:
        seconds: of a step.
        imbalance: fullest rank over mean, mean of steps and layers.
        exposed: seconds of a step spent waiting for copies.
        sent: bytes of copies that a rank sends in a step.
        memory: of its experts.
    """

    name: str
    slots: int
    lifetime: str
    seconds: float
    imbalance: float
    exposed: float
    sent: float
    memory: ExpertMemory


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What is simulated.

    Args:
        counts: [T, L, R, E] pairs that rank r routes to expert e in a step, all microbatches.
        first: the step from which on steps are counted; those before are history.
        world: the expert-parallel group.
        timing: of a microbatch.
        stages, microbatches: of the pipeline.
        once: as in `Work.of`.
    """

    model: Model
    counts: np.ndarray
    first: int
    world: World
    timing: Timing
    stages: int
    microbatches: int
    once: int = 0

    def shape(self, lifetime: str) -> LayerShape:
        """Of a layer, as FSSDP prices it."""
        often = LIFETIMES[lifetime]
        times = {name: max(1, getattr(often, name) * self.microbatches) for name in ("fetches", "returns")}
        return self.model.shape(**times, microbatches=self.microbatches, hidden_seconds=self.timing.dense)

    def place(self, slots: int, lifetime: str) -> list[list[Placement]]:
        """What FSSDP plans, from its forecast, in every step from `first` on."""
        shape, world, totals = self.shape(lifetime), self.world, self.counts.sum(axis=2)
        homes = Placement.initial(self.model.experts, world.num_ranks, num_slots=slots)
        cost = shape.copy_cost(world, hidden=shape.hidden_seconds / shape.fetch_seconds(world))
        history, placed, now = LoadHistory(), [], [homes] * totals.shape[1]
        for step, loads in enumerate(totals):
            forecast = history.forecast() if step >= self.first - 1 else None
            if forecast is not None:
                pairs = zip(forecast, now, strict=True)
                now = [plan_replicas(load, homes, world, cost=cost, previous=before) for load, before in pairs]
            placed.append(now)
            history.append(loads)
        return placed[self.first :]

    def work(self, placed: Sequence[Sequence[Placement]]) -> Work:
        """With these placements by step, from `first` on, and layer: FSSDP's quotas and copies."""
        shape, steps = self.shape("iteration"), zip(self.counts[self.first :], placed, strict=True)
        plans = [[LayerPlan.of(c, p, self.world, shape) for c, p in zip(*step, strict=True)] for step in steps]
        return Work.of(plans, self.world, shape, once=self.once)

    def run(self, name: str, work: Work, *, slots: int = 0, lifetime: str = "iteration") -> Outcome:
        """Steps whose layers do ``work``: the recorded layers are stretched over the model's."""
        recorded, layers, ranks = work.peak.shape[1], self.model.layers, self.world.num_ranks
        work = work.layers([layer * recorded // layers for layer in range(layers)])
        schedule = Schedule.even(layers, self.stages, microbatches=self.microbatches, lifetime=lifetime)
        time = simulate(work, self.timing, schedule)
        elements, homes, most = self.model.expert_elements, self.model.experts // ranks, len(schedule.stages[0])
        buffer = LayerBuffer(slots=slots, elements=elements, dtype=torch.bfloat16, homes=homes)
        experts = RankExperts.with_adam(
            (buffer,) * most,  # of the first stage, which keeps most microbatches
            in_flight=most * min(self.stages, self.microbatches),
            transport_bytes=P2P(SimpleNamespace(), timeout=1.0).extra_bytes([buffer]),
        )
        return Outcome(
            name=name,
            slots=slots,
            lifetime=lifetime,
            seconds=float(time.total.mean()),
            imbalance=float(work.peak.mean() * ranks * self.microbatches / self.counts.sum(axis=(2, 3)).mean()),
            exposed=float(time.exposed.mean()),
            sent=float(time.sent.mean()) / ranks / self.stages,
            memory=ExpertMemory.estimate(experts, lifetime),
        )

    def compare(self, slots: Sequence[int] = (), lifetimes: Sequence[str] = ()) -> list[Outcome]:
        """Forced balance, stock, and FSSDP with each number of slots and each lifetime."""
        pairs = self.counts.sum(axis=(2, 3)).mean() / self.world.num_ranks
        forced = Work.balanced(pairs, self.world, self.shape("iteration"), once=self.once)
        homes = Placement.initial(self.model.experts, self.world.num_ranks, num_slots=0)
        stock = self.work([[homes] * self.counts.shape[1]] * (len(self.counts) - self.first))
        outcomes, known = [self.run("forced balance", forced), self.run("stock", stock)], {}
        for count in slots:
            for lifetime in lifetimes:
                placed = self.place(count, lifetime)
                key = (count, *(placement.fingerprint for step in placed for placement in step))
                known[key] = known.get(key) or self.work(placed)
                outcomes.append(self.run("FSSDP", known[key], slots=count, lifetime=lifetime))
        return outcomes

    def lasting(self, seconds: float) -> Job:
        """With so much time outside experts and all-to-alls stock's step lasts ``seconds``; ValueError if it cannot."""

        def timed(share: float) -> Job:
            changed = {name: share * getattr(self.timing, name) for name in ("dense", "head")}
            return dataclasses.replace(self, timing=dataclasses.replace(self.timing, **changed))

        without, whole = (timed(share).compare()[1].seconds for share in (0.0, 1.0))
        if seconds <= without:
            raise ValueError(
                f"--step-ms {seconds * 1e3:g} is less than experts and all-to-alls alone take, {without * 1e3:.1f}: "
                "check --ranks, --ep and --microbatches, or take a --cluster file that --measure has written there"
            )
        return timed((seconds - without) / (whole - without))


def spread(loads: np.ndarray, num_ranks: int, pairs: float) -> np.ndarray:
    """[T, L, R, E] whole pairs, ``pairs`` of each rank: sources are summed, or a source is dealt evenly to ranks."""
    steps, layers, sources, experts = loads.shape
    if sources % num_ranks == 0:
        loads = loads.reshape(steps, layers, num_ranks, -1, experts).sum(axis=3)
    elif num_ranks % sources:
        loads = loads.sum(axis=2, keepdims=True)
    loads = np.repeat(loads, num_ranks // loads.shape[2], axis=2)
    return np.rint(loads * (pairs * num_ranks / loads.sum(axis=(2, 3), keepdims=True))).astype(np.int64)
