"""A job simulated from recorded loads: forced balance, stock, and FSSDP with its own plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.homes.planner import HomeSearch
from megatron_hecate.nvlink.transport import buffer_bytes
from megatron_hecate.plan import (
    CopyCost,
    LayerShape,
    Placement,
    World,
    add_late_replicas,
    plan_replicas,
)
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.replicas.memory_estimate import ExpertMemory, RankExperts
from megatron_hecate.step.forecast import LoadHistory
from megatron_hecate.tools.outcome import Baselines, Outcome, Way, parts_of_gain
from megatron_hecate.tools.presets import Model
from megatron_hecate.tools.step_model import PipelineSchedule, Timing, Work, fit_outside, simulate
from megatron_hecate.tools.traffic import LayerPlan, copies

# bytes per parameter that move with an expert: weight, main parameter, two moments, unsharded
MOVED: int = 14
# dtype of weights by the bytes of a parameter; it determines the optimizer state, too
DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.float8_e4m3fn}


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
        excess: tokens of the fullest ranks of single microbatches beyond those of the fullest rank
            of the step, over the mean rank load, for steps from `first` on, [T, L]; ``None`` if
            unknown: all microbatches are alike.
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
    excess: np.ndarray | None = None

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

    def copy_cost(self, lifetime: str, transport: str = "nvlink") -> CopyCost:
        """Return the cost of replicas per step with a ``transport``."""
        shape = self.shape(lifetime)
        hidden = shape.hidden_seconds / shape.fetch_seconds(self.world)
        cost = shape.copy_cost(self.world, hidden=hidden)
        return dataclasses.replace(cost, scatters=transport != P2P.name)

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

    def place(
        self, homes: Sequence[Sequence[Placement]], lifetime: str, transport: str = "nvlink"
    ) -> list[list[Placement]]:
        """Plan early replicas as FSSDP does, from its forecast.

        Args:
            homes: homes by step and layer.
            lifetime: lifetime of replicas.
            transport: transport of replicas.

        Returns:
            Placements by step, from `first` on, and layer.
        """
        totals = self.counts.sum(axis=2)
        cost = self.copy_cost(lifetime, transport)
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

    def work(
        self, placed: Sequence[Sequence[Placement]], *, late: int = 0, transport: str = "nvlink"
    ) -> Work:
        """Compute the work of layers under FSSDP's quotas and copies.

        Args:
            placed: placements before the gate, by step, from `first` on, and layer.
            late: most late replicas of a layer.
            transport: transport of replicas.
        """
        scatters = transport != P2P.name
        shape = self.shape("iteration")
        final = self.add_late(placed, late) if late else placed
        plans = []
        for of_layers in zip(self.counts[self.first :], placed, final, strict=True):
            layers = zip(*of_layers, strict=True)
            plans.append(
                [LayerPlan.of(*layer, self.world, shape, scatters=scatters) for layer in layers]
            )
        return Work.of(plans, self.world, shape, once=self.once)

    def memory(
        self,
        *,
        slots: int = 0,
        lifetime: str = "iteration",
        transport: str = P2P.name,
        resident: int = 0,
    ) -> ExpertMemory:
        """Estimate the memory of a rank's experts on the first stage.

        The first stage keeps most microbatches in flight.

        Args:
            slots: replica slots per layer.
            lifetime: lifetime of replicas.
            transport: transport of replicas, ``nvlink`` or ``p2p``.
            resident: permanent experts per rank beyond its homes.
        """
        schedule = self.schedule
        chunks = [len(chunk) for chunk in schedule.stages[:: schedule.depth]]
        buffer = LayerBuffer(
            slots=slots,
            elements=self.model.expert_elements,
            dtype=DTYPES.get(self.model.weight_bytes, torch.bfloat16),
            homes=self.model.experts // self.world.num_ranks + resident,
        )
        if transport == P2P.name:
            transport_bytes = P2P(SimpleNamespace(), timeout=1.0).extra_bytes([buffer])
        else:
            transport_bytes = sum(buffer_bytes([buffer], list(Counter(self.world.node).values())))
        passes = min(schedule.ahead(0) + 1, schedule.microbatches * schedule.chunks)
        experts = RankExperts.with_adam(
            (buffer,) * sum(chunks),
            in_flight=max(chunks) * passes,
            transport_bytes=transport_bytes,
        )
        memory = ExpertMemory.estimate(experts, lifetime)
        return dataclasses.replace(memory, optimizer=memory.optimizer // self.optimizer_shards)

    def run(
        self,
        name: str,
        work: Work,
        way: Way,
        *,
        corrects: bool = False,
        moving: float = 0.0,
        used: int = 0,
    ) -> Outcome:
        """Simulate steps with ``work``; recorded layers stand in for all layers of the model.

        Args:
            name: label of the outcome.
            work: work of the recorded layers.
            way: settings of FSSDP; without slots, stock or forced balance.
            corrects: whether late copies are chosen in every microbatch, see `PipelineSchedule`.
            moving: seconds per step of moving homes.
            used: most replicas that a rank holds.
        """
        if way.late:
            work = dataclasses.replace(work, routing=self._late_routing(work, way.lifetime))
        ranks = self.world.num_ranks
        fullest = work.peak.mean() * ranks * self.schedule.microbatches
        work = self._of_model(work)
        schedule = dataclasses.replace(self.schedule, lifetime=way.lifetime, corrects=corrects)
        time = simulate(work, self.timing, schedule)
        return Outcome(
            name=name,
            **dataclasses.asdict(way) | dict(transport=way.transport if way.slots else ""),
            seconds=float(time.total.mean()) + moving,
            imbalance=float(fullest / self.counts[self.first :].sum(axis=(2, 3)).mean()),
            exposed=float(time.exposed.mean()),
            sent=float(time.sent.mean()) / ranks / self.schedule.depth,
            memory=self.memory(slots=way.slots, lifetime=way.lifetime, transport=way.transport),
            parts=parts_of_gain(work, self._all_layers, self.timing, schedule, moving=moving),
            used=used,
        )

    def _of_model(self, work: Work) -> Work:
        """Repeat the simulated layers so that they stand in for all layers of the model."""
        simulated = work.peak.shape[1]
        layers = self.model.layers
        return work.layers([layer * simulated // layers for layer in range(layers)])

    @cached_property
    def baselines(self) -> Baselines:
        """Work of forced balance and of stock, of the simulated layers."""
        pairs = self.counts[self.first :].sum(axis=(2, 3)).mean() / self.world.num_ranks
        forced = Work.balanced(pairs, self.world, self.shape("iteration"), once=self.once)
        homes = Placement.initial(self.model.experts, self.world.num_ranks, num_slots=0)
        stock = self.work([[homes] * self.counts.shape[1]] * (len(self.counts) - self.first))
        return Baselines(forced=forced, stock=self.of_microbatches(stock, stock.peak))

    def of_microbatches(self, work: Work, stock: np.ndarray | None = None) -> Work:
        """Add the imbalance of single microbatches, which sums over a step do not show.

        Quotas are computed in every microbatch, so replicas remove the same share of it as they
        remove of the imbalance of the step.

        Args:
            work: work of the simulated layers, all microbatches alike.
            stock: `Work.peak` of stock, all microbatches alike; ``None``: computed.
        """
        if self.excess is None:
            return work
        ranks = self.world.num_ranks
        mean = self.counts[self.first :].sum(axis=(2, 3)) / ranks / self.schedule.microbatches
        if stock is None:
            stock = self.baselines.stock.peak - self.excess * mean
        over = stock - mean
        left = np.divide(work.peak - mean, over, out=np.ones_like(over), where=over > 1e-9 * mean)
        return dataclasses.replace(work, peak=work.peak + left.clip(0, 1) * self.excess * mean)

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], tuple[Work, int]]:
        """Work, and most replicas of a rank, by late replicas, transport and placements."""
        return {}

    @cached_property
    def _all_layers(self) -> Baselines:
        """`baselines` of all layers of the model."""
        both = self.baselines
        return Baselines(forced=self._of_model(both.forced), stock=self._of_model(both.stock))

    def _late_routing(self, work: Work, lifetime: str) -> np.ndarray:
        """Return the seconds of routing, [T, L], of layers that may fetch late replicas.

        Ranks exchange loads in every microbatch that may fetch, also where nothing is copied.
        """
        seconds = self.world.speeds.routing
        if not LIFETIMES[lifetime].fetches:
            seconds /= self.schedule.microbatches
        return np.maximum(work.routing, seconds)

    def references(self) -> list[Outcome]:
        """Simulate forced balance and stock."""
        both = self.baselines
        return [
            self.run("forced balance", both.forced, Way()),
            self.run("stock", both.stock, Way()),
        ]

    def simulate_way(self, way: Way) -> Outcome:
        """Simulate FSSDP with the settings of ``way``."""
        moved, moving = self.homes(way.slots, way.lifetime, way.rehome)
        placed = self.place(moved, way.lifetime, way.transport)
        layers = list(itertools.chain.from_iterable(placed))
        # Equal plans of different settings have equal work.
        key = (way.late, way.transport, *(placement.fingerprint for placement in layers))
        if key not in self._known:
            work = self.work(placed, late=way.late, transport=way.transport)
            work = self.of_microbatches(work)
            if way.late:
                layers = list(itertools.chain.from_iterable(self.add_late(placed, way.late)))
            used = max(int(copies(one).sum(axis=0).max()) for one in layers)
            self._known[key] = work, used
        work, used = self._known[key]
        return self.run(way.name, work, way, moving=moving, used=used)

    def lasting(self, seconds: float) -> SimulatedJob:
        """Scale the time outside experts and all-to-alls so that a stock step takes ``seconds``.

        Raises:
            ValueError: if experts and all-to-alls alone take longer.
        """
        # The work does not depend on the time outside experts.
        stock = self._all_layers.stock

        def stock_seconds(timing: Timing) -> float:
            return float(simulate(stock, timing, self.schedule).total.mean())

        try:
            timing = fit_outside(self.timing, seconds, stock_seconds)
        except ValueError as error:
            raise ValueError(
                f"a step of {seconds * 1e3:g} ms is less than experts and all-to-alls alone take, "
                f"{error}: check what-if's --step-ms, --ranks, --ep and --microbatches, or give "
                "what-if a --cluster file that megatron-hecate measure has written there"
            ) from error
        return dataclasses.replace(self, timing=timing)
