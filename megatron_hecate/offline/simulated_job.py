"""A job simulated from recorded loads: forced balance, stock, and FSSDP with its own plans."""

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
from megatron_hecate.offline.step_model import PipelineSchedule, Timing, Work, simulate
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

# bytes per parameter that move with an expert: weight, main parameter, two moments, unsharded
MOVED: int = 14
# fit of the time outside experts: most iterations, and relative tolerance
CHORDS: int = 20
CLOSE: float = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one way to train; means over steps.

    Args:
        name: label in the table.
        slots: replica slots per rank and layer.
        lifetime: lifetime of replicas.
        late: most replicas that a layer may fetch after the gate.
        seconds: time of a step.
        imbalance: load of the fullest rank over the mean, averaged over steps and layers.
        exposed: seconds of a step spent waiting for copies.
        sent: bytes of copies that a rank sends in a step.
        memory: memory of a rank's experts.
        rehome: steps between searches for better homes; 0: homes do not move.
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
class SimulatedJob:
    """Simulated training job.

    Args:
        model: sizes of the model.
        layers: numbers in the trace of the L simulated layers.
        counts: pairs by step, layer, source rank and expert, all microbatches, [T, L, R, E].
        first: first step in the results; earlier steps are history for the forecast.
        world: expert-parallel group.
        timing: times of a microbatch.
        schedule: pipeline schedule over all layers of the model.
        once: experts per token for dispatchers that send a token once, see `Work.of`.
        measured: whether speeds were measured; only then late replicas may cross nodes.
        optimizer_shards: ranks among which the optimizer state of an expert is sharded.
    """

    model: Model
    layers: Sequence[int]
    counts: np.ndarray
    first: int
    world: World
    timing: Timing
    schedule: PipelineSchedule
    once: int = 0
    measured: bool = False
    optimizer_shards: int = 1

    def shape(self, lifetime: str) -> LayerShape:
        """Return the shape of a layer for FSSDP's cost model."""
        per_microbatch = LIFETIMES[lifetime]
        microbatches = self.schedule.microbatches
        return self.model.shape(
            fetches=max(1, per_microbatch.fetches * microbatches),
            returns=max(1, per_microbatch.returns * microbatches),
            microbatches=microbatches,
            hidden_seconds=self.timing.dense,
        )

    def copy_cost(self, lifetime: str) -> CopyCost:
        """Return the cost of replicas per step."""
        shape = self.shape(lifetime)
        hidden = shape.hidden_seconds / shape.fetch_seconds(self.world)
        return shape.copy_cost(self.world, hidden=hidden)

    def homes(self, slots: int, lifetime: str, every: int) -> tuple[list[list[Placement]], float]:
        """Place the homes, with searches for better ones from step `first` on.

        Args:
            slots: replica slots per rank and layer.
            lifetime: lifetime of replicas.
            every: steps between searches; 0: homes do not move.

        Returns:
            Homes by step and layer, and the seconds per step that moving adds.
        """
        totals = self.counts.sum(axis=2)
        num_layers = totals.shape[1]
        built = Placement.initial(self.model.experts, self.world.num_ranks, num_slots=slots)
        order = np.tile(np.arange(self.model.experts), (num_layers, 1))
        now = [built] * num_layers
        homes = []
        seconds = []
        for step in range(len(totals)):
            if every and step >= max(1, self.first) and (step - self.first) % every == 0:
                search = HomeSearch(
                    homes=built,
                    world=self.world,
                    cost=self.copy_cost(lifetime),
                    expert_bytes=MOVED * self.model.expert_elements,
                    token_seconds=self.shape(lifetime).token_seconds(self.world),
                    horizon=every,
                )
                better = search.find(totals[max(0, step - every) : step], order)
                if better is None:
                    seconds.append(0.0)
                else:
                    seconds.append(better.seconds)
                    order = better.order
                    now = [built.with_homes(of_layer) for of_layer in order]
            homes.append(now)
        if not seconds:
            return homes, 0.0
        # Layers of a stage per simulated layer: stages move their experts at the same time.
        scale = self.model.layers / self.schedule.depth / num_layers
        return homes, scale * float(np.mean(seconds)) / every

    def place(self, homes: Sequence[Sequence[Placement]], lifetime: str) -> list[list[Placement]]:
        """Plan early replicas as FSSDP does, from its forecast.

        Args:
            homes: homes by step and layer.
            lifetime: lifetime of replicas.

        Returns:
            Placements by step, from `first` on, and layer.
        """
        totals = self.counts.sum(axis=2)
        cost = self.copy_cost(lifetime)
        history = LoadHistory()
        placed = []
        now = homes[0]
        for step, loads in enumerate(totals):
            # Replicas do not survive a move of homes.
            if homes[step] is not homes[step - 1]:
                now = homes[step]
            # One plan before the counted steps, since a plan depends on the previous one.
            forecast = history.forecast() if step >= self.first - 1 else None
            if forecast is not None:
                layers = zip(forecast, homes[step], now, strict=True)
                now = [
                    plan_replicas(load, home, self.world, cost=cost, previous=before)
                    for load, home, before in layers
                ]
            placed.append(now)
            history.append(loads)
        return placed[self.first :]

    def add_late(self, placed: Sequence[Sequence[Placement]], most: int) -> list[list[Placement]]:
        """Add late replicas for the loads of a microbatch.

        Args:
            placed: placements before the gate, by step, from `first` on, and layer.
            most: most late replicas of a layer.
        """
        shape = dataclasses.replace(self.shape("iteration"), microbatches=1)
        options = dict(cost=shape.copy_cost(self.world), most=most, across_nodes=self.measured)
        totals = self.counts[self.first :].sum(axis=2)
        loads = np.rint(totals / self.schedule.microbatches).astype(np.int64)
        final = []
        for of_layers in zip(loads, placed, strict=True):
            layers = zip(*of_layers, strict=True)
            final.append(
                [add_late_replicas(load, early, self.world, **options) for load, early in layers]
            )
        return final

    def work(self, placed: Sequence[Sequence[Placement]], *, late: int = 0) -> Work:
        """Compute the work of layers under FSSDP's quotas and copies.

        Args:
            placed: placements before the gate, by step, from `first` on, and layer.
            late: most late replicas of a layer.
        """
        shape = self.shape("iteration")
        final = self.add_late(placed, late) if late else placed
        plans = []
        for of_layers in zip(self.counts[self.first :], placed, final, strict=True):
            layers = zip(*of_layers, strict=True)
            plans.append([LayerPlan.of(*layer, self.world, shape) for layer in layers])
        return Work.of(plans, self.world, shape, once=self.once)

    def memory(
        self, *, slots: int = 0, lifetime: str = "iteration", resident: int = 0
    ) -> ExpertMemory:
        """Estimate the memory of a rank's experts on the first stage.

        The first stage keeps most microbatches in flight.

        Args:
            slots: replica slots per layer.
            lifetime: lifetime of replicas.
            resident: permanent experts per rank beyond its homes.
        """
        schedule = self.schedule
        chunks = [len(chunk) for chunk in schedule.stages[:: schedule.depth]]
        buffer = LayerBuffer(
            slots=slots,
            elements=self.model.expert_elements,
            dtype=torch.bfloat16,
            homes=self.model.experts // self.world.num_ranks + resident,
        )
        passes = min(schedule.ahead(0) + 1, schedule.microbatches * schedule.chunks)
        experts = RankExperts.with_adam(
            (buffer,) * sum(chunks),
            in_flight=max(chunks) * passes,
            transport_bytes=P2P(SimpleNamespace(), timeout=1.0).extra_bytes([buffer]),
        )
        memory = ExpertMemory.estimate(experts, lifetime)
        return dataclasses.replace(memory, optimizer=memory.optimizer // self.optimizer_shards)

    def run(
        self, name: str, work: Work, *, corrects: bool = False, moving: float = 0.0, **way: Any
    ) -> Outcome:
        """Simulate steps with ``work``; recorded layers stand in for all layers of the model.

        Args:
            name: label of the outcome.
            work: work of the recorded layers.
            corrects: whether late copies are chosen in every microbatch, see `PipelineSchedule`.
            moving: seconds per step of moving homes.
            way: fields of `Outcome` that differ from stock: ``slots``, ``lifetime``, ``late``,
                ``rehome``.
        """
        way = dict(slots=0, lifetime="iteration", late=0) | way
        if way["late"]:
            work = dataclasses.replace(work, routing=self._late_routing(work, way["lifetime"]))
        recorded = work.peak.shape[1]
        layers = self.model.layers
        ranks = self.world.num_ranks
        work = work.layers([layer * recorded // layers for layer in range(layers)])
        schedule = dataclasses.replace(self.schedule, lifetime=way["lifetime"], corrects=corrects)
        time = simulate(work, self.timing, schedule)
        fullest = work.peak.mean() * ranks * self.schedule.microbatches
        return Outcome(
            name=name,
            **way,
            seconds=float(time.total.mean()) + moving,
            imbalance=float(fullest / self.counts.sum(axis=(2, 3)).mean()),
            exposed=float(time.exposed.mean()),
            sent=float(time.sent.mean()) / ranks / self.schedule.depth,
            memory=self.memory(slots=way["slots"], lifetime=way["lifetime"]),
        )

    def _late_routing(self, work: Work, lifetime: str) -> np.ndarray:
        """Return the seconds of routing, [T, L], of layers that may fetch late replicas.

        Ranks exchange loads in every microbatch that may fetch, also where nothing is copied.
        """
        seconds = self.world.speeds.routing
        if not LIFETIMES[lifetime].fetches:
            seconds /= self.schedule.microbatches
        return np.maximum(work.routing, seconds)

    def compare(
        self,
        slots: Sequence[int] = (),
        lifetimes: Sequence[str] = (),
        late: Sequence[int] = (),
        rehome: Sequence[int] = (),
    ) -> list[Outcome]:
        """Simulate forced balance, stock, and FSSDP with every combination of settings.

        Args:
            slots: numbers of replica slots per rank and layer.
            lifetimes: lifetimes of replicas.
            late: most late replicas of a layer.
            rehome: steps between searches for better homes.
        """
        pairs = self.counts.sum(axis=(2, 3)).mean() / self.world.num_ranks
        forced = Work.balanced(pairs, self.world, self.shape("iteration"), once=self.once)
        homes = Placement.initial(self.model.experts, self.world.num_ranks, num_slots=0)
        stock = self.work([[homes] * self.counts.shape[1]] * (len(self.counts) - self.first))
        outcomes = [self.run("forced balance", forced), self.run("stock", stock)]
        # Work by placements: equal plans of different settings are computed once.
        known: dict[tuple[Any, ...], Work] = {}
        for count, lifetime, every in itertools.product(slots, lifetimes, rehome or (0,)):
            moved, moving = self.homes(count, lifetime, every)
            placed = self.place(moved, lifetime)
            for most in late or (0,):
                each = itertools.chain.from_iterable(placed)
                key = (count, most, *(placement.fingerprint for placement in each))
                if key not in known:
                    known[key] = self.work(placed, late=most)
                way = dict(slots=count, lifetime=lifetime, late=most, rehome=every)
                outcomes.append(self.run(_name(way), known[key], moving=moving, **way))
        return outcomes

    def lasting(self, seconds: float) -> SimulatedJob:
        """Scale the time outside experts and all-to-alls so that a stock step takes ``seconds``.

        Raises:
            ValueError: if experts and all-to-alls alone take longer.
        """

        def scaled(share: float) -> SimulatedJob:
            timing = dataclasses.replace(
                self.timing, dense=share * self.timing.dense, head=share * self.timing.head
            )
            return dataclasses.replace(self, timing=timing)

        def stock_seconds(share: float) -> float:
            return scaled(share).compare()[1].seconds

        # points (share, seconds of a stock step) on both sides of the solution
        low = (0.0, stock_seconds(0.0))
        high = (1.0, stock_seconds(1.0))
        if seconds <= low[1]:
            raise ValueError(
                f"--step-ms {seconds * 1e3:g} is less than experts and all-to-alls alone take, "
                f"{low[1] * 1e3:.1f}: check --ranks, --ep and --microbatches, or take a --cluster "
                "file that --measure has written there"
            )
        while high[1] < seconds:
            low = high
            high = (2 * low[0], stock_seconds(2 * low[0]))
        # Regula falsi. More time outside experts never shortens the step, and the longest of
        # several paths is convex in it: every chord's root is on the same side, and they converge.
        for _ in range(CHORDS):
            share = low[0] + (high[0] - low[0]) * (seconds - low[1]) / (high[1] - low[1])
            now = (share, stock_seconds(share))
            if abs(now[1] / seconds - 1) < CLOSE:
                break
            if now[1] < seconds:
                low = now
            else:
                high = now
        return scaled(now[0])


def _name(way: dict[str, Any]) -> str:
    """Format the settings of FSSDP as the label of an outcome."""
    name = f"FSSDP, {way['slots']} slot{'s' * (way['slots'] > 1)}, {way['lifetime']}"
    if way["late"]:
        name += f", {way['late']} late"
    if way["rehome"]:
        name += f", homes every {way['rehome']}"
    return name


def spread(loads: np.ndarray, num_ranks: int, pairs: float) -> np.ndarray:
    """Scale recorded loads to the pairs of the job's ranks.

    Recorded sources are summed where they are a multiple of the ranks; otherwise each is dealt
    evenly to ranks, or all sources are summed and dealt where the numbers do not divide.

    Args:
        loads: recorded pairs by step, layer, source and expert, [T, L, N, E].
        num_ranks: number of ranks R.
        pairs: pairs per rank, step and layer.

    Returns:
        Whole pairs [T, L, R, E].
    """
    steps, layers, sources, experts = loads.shape
    if sources % num_ranks == 0:
        loads = loads.reshape(steps, layers, num_ranks, -1, experts).sum(axis=3)
    elif num_ranks % sources:
        loads = loads.sum(axis=2, keepdims=True)
    loads = np.repeat(loads, num_ranks // loads.shape[2], axis=2)
    scale = pairs * num_ranks / loads.sum(axis=(2, 3), keepdims=True)
    return np.rint(loads * scale).astype(np.int64)
