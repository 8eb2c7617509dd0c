"""Metrics of a recorded run: waits, their cost, and the effect of FSSDP. Input is the record alone.

Loads are counted. Times are from `plan`'s cost model, with the sizes and speeds in the record.
Letters in shapes: T iterations, L layers, N ranks, E experts, S slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron_hecate.plan import EMPTY, CopyCost, LayerShape, Link, Placement, Speeds, World
from megatron_hecate.plan.replicas import problem_of
from megatron_hecate.plan.search import cost_beside_load
from megatron_hecate.record.rank_speed import RankSpeed, rank_speeds
from megatron_hecate.record.run_folder import RunInfo, RunRecord


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Cost model from the recorded sizes and speeds.

    Args:
        shape: sizes of a layer.
        world: ranks, nodes and speeds.
        copy: cost of copies with nothing hidden.
    """

    shape: LayerShape
    world: World
    copy: CopyCost

    @classmethod
    def of(cls, info: RunInfo) -> _Costs | None:
        """Build the cost model of a run; ``None`` if the record has no sizes or no speeds."""
        if not (info.shape and info.speeds):
            return None
        links = {name: Link(**info.speeds[name]) for name in ("intra", "inter")}
        shape = LayerShape(**info.shape)
        world = World(info.node, Speeds(**{**info.speeds, **links}))
        scatters = info.transport == "nvlink"
        return cls(shape, world, dataclasses.replace(shape.copy_cost(world), scatters=scatters))

    @property
    def token_ms(self) -> float:
        """Milliseconds of one token in one expert, forward and backward."""
        return 1e3 * self.shape.token_seconds(self.world)

    @property
    def routing_ms(self) -> float:
        """Milliseconds per iteration that routing to replicas adds to a layer."""
        return 1e3 * self.world.speeds.routing * self.shape.microbatches

    @property
    def computing_ms(self) -> float:
        """Milliseconds per iteration that a rank takes for each replica, beside its tokens."""
        return 1e3 * self.shape.expert_seconds(self.world) * self.shape.microbatches


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """Metrics of one run, derived from its record.

    Args:
        record: record of the run, all stages together.
        stages: header of each pipeline stage; empty if there is one stage.

    Raises:
        ValueError: when experts cannot be split over ranks evenly.
    """

    record: RunRecord
    stages: Sequence[RunInfo] = ()

    @cached_property
    def costs(self) -> _Costs | None:
        """Cost model; ``None`` if the record has no sizes or speeds, and all milliseconds are 0."""
        return _Costs.of(self.record.info)

    @property
    def observed(self) -> bool:
        """True if FSSDP was off."""
        return self.record.replica is None

    @cached_property
    def homes(self) -> Placement:
        """Original homes of the experts of every layer, as built by Megatron."""
        info = self.record.info
        num_slots = 0 if self.observed else info.slots
        return Placement.initial(self.record.load.shape[2], info.ranks, num_slots=num_slots)

    @cached_property
    def home(self) -> np.ndarray:
        """Rank of each expert's home, [T, L, E]."""
        if self.record.home is not None:
            return self.record.home
        return np.broadcast_to(self.homes.home, self.record.load.shape)

    @property
    def moves(self) -> int:
        """Number of changes of an expert's home since the iteration before, or since the start."""
        built = np.broadcast_to(self.homes.home, (1, *self.home.shape[1:]))
        return int((np.diff(self.home, axis=0, prepend=built) != 0).sum())

    @cached_property
    def before(self) -> np.ndarray:
        """Tokens per rank as routed, with every expert at its original home, [T, L, N]."""
        load = self.record.load
        by_home = load.reshape(*load.shape[:2], self.homes.num_ranks, -1)
        return by_home.sum(axis=3)

    @cached_property
    def fullest(self) -> np.ndarray:
        """Tokens of the fullest rank as routed, [T, L].

        Of each microbatch and summed, where the record holds it, with FSSDP also as computed; else
        of the iteration.
        """
        record = self.record
        if record.peak is None or not (self.observed or record.computed_peak is not None):
            return self.before.max(axis=2)
        return record.peak

    @cached_property
    def waits(self) -> np.ndarray:
        """Load of the fullest rank over the mean as routed, [T, L]; 1 without tokens."""
        return _over_mean(self.fullest, self.before)

    @property
    def after(self) -> np.ndarray:
        """Tokens computed by each rank, [T, L, N]."""
        if self.record.rank_load is None:
            return self.before
        return self.record.rank_load

    @cached_property
    def fullest_computed(self) -> np.ndarray:
        """Tokens of the fullest rank as computed, [T, L]; of each microbatch as in `fullest`."""
        if self.observed:
            return self.fullest
        if self.record.computed_peak is not None:
            return self.record.computed_peak
        return self.after.max(axis=2)

    @cached_property
    def waits_computed(self) -> np.ndarray:
        """Load of the fullest rank over the mean as computed, [T, L]; 1 without tokens."""
        return _over_mean(self.fullest_computed, self.after)

    @cached_property
    def rank_speeds(self) -> dict[int, list[RankSpeed]]:
        """Slow and hot ranks by pipeline stage; empty if the experts were not timed."""
        record = self.record
        if record.timed_ns is None or record.timed_tokens is None:
            return {}
        found: dict[int, list[RankSpeed]] = {}
        for stage in np.unique(self.stage).tolist():
            own = self.stage == stage
            found[stage] = rank_speeds(
                1e-9 * record.timed_ns[:, own].sum(axis=1),
                record.timed_tokens[:, own].sum(axis=1),
                self.after[:, own].sum(axis=1),
                iterations=record.iteration.tolist(),
            )
        return found

    @cached_property
    def replicas(self) -> np.ndarray:
        """Replicas on each rank, [T, L, N]."""
        replica = self.record.replica
        if replica is None:
            return np.zeros_like(self.before)
        return (replica != EMPTY).sum(axis=3)

    def waiting_ms(self, load: np.ndarray) -> np.ndarray:
        """Return the time of the fullest rank beyond the mean, [T, L] ms.

        Args:
            load: tokens per rank, [T, L, N].
        """
        token_ms = 0.0 if self.costs is None else self.costs.token_ms
        return (load.max(axis=2) - load.mean(axis=2)) * token_ms

    @cached_property
    def most_copies(self) -> np.ndarray:
        """Replicas that one rank receives or sends, maximum over ranks, [T, L]."""
        replica = self.record.replica
        if replica is None:
            return np.zeros(self.before.shape[:2], np.int64)
        iteration, layer, _ = np.nonzero(replica.reshape(*replica.shape[:2], -1) != EMPTY)
        sender = self.home[iteration, layer, replica[replica != EMPTY]]
        sent = np.zeros_like(self.before)
        np.add.at(sent, (iteration, layer, sender), 1)
        return np.maximum(sent, self.replicas).max(axis=2)

    @cached_property
    def _ways_ms(self) -> np.ndarray:
        """Time of fetches and of returns, hidden or not, [2, T, L] ms.

        Derived from the measured time of a copy where there is one, otherwise from the cost model.
        Both are the times of the busiest link.
        """
        ways = np.zeros((2, *self.before.shape[:2]))
        replica = self.record.replica
        if self.costs is None or replica is None:
            return ways
        shape = self.costs.shape
        # A measured copy is one of weights; a gradient has another size.
        times = np.array([shape.fetches, shape.returns * shape.grad_bytes / shape.expert_bytes])
        copy = self.record.copy
        if copy is None:
            ways += np.nan
        else:
            ways += 1e3 * times[:, None, None] * copy * self.most_copies
        # Most placements recur, so each is modelled once.
        modelled: dict[bytes, float] = {}
        for at in zip(*np.nonzero(np.isnan(ways[0])), strict=True):
            slots = np.ascontiguousarray(replica[at], dtype=np.int64)
            home = self.home[at]
            key = slots.tobytes() + home.tobytes()
            if key not in modelled:
                modelled[key] = self._modelled_copy_ms(self.costs, slots, home)
            both = modelled[key]
            out = self.costs.copy.out
            ways[(slice(None), *at)] = both * out, both * (1 - out)
        return ways

    def _modelled_copy_ms(self, costs: _Costs, slots: np.ndarray, home: np.ndarray) -> float:
        """Return the modelled time of all copies of one placement, ms.

        Args:
            costs: cost model.
            slots: experts in replica slots, [N, S].
            home: rank of each expert's home, [E].
        """
        # Copies alone: routing, computing and tokens that cross nodes have no cost here.
        copies_alone = dataclasses.replace(costs.copy, routing=0.0, computing=0.0, crossing=0.0)
        homes = self.homes
        if self.record.home is not None:
            homes = homes.with_homes(np.argsort(home, kind="stable"))
        problem = problem_of(homes, costs.world, copies_alone)
        homes_per_rank = self.homes.slots_per_rank - slots.shape[1]
        table = np.hstack([homes.table[:, :homes_per_rank], slots])
        no_load = np.zeros(self.homes.num_experts)
        return cost_beside_load(no_load, problem, table)[1] * costs.token_ms

    @property
    def copying_ms(self) -> np.ndarray:
        """Time of fetches and returns together, hidden or not, [T, L] ms."""
        return self._ways_ms.sum(axis=0)

    @cached_property
    def hidden_ms(self) -> np.ndarray:
        """Part of `copying_ms` that compute hides, [T, L] ms.

        Its upper bound is the time from attention to experts, measured or else modelled.
        """
        if self.costs is None:
            return self.copying_ms
        shape = self.costs.shape
        seconds: Any = shape.hidden_seconds
        window = self.record.window
        if window is not None:
            seconds = np.where(np.isnan(window), shape.hidden_seconds, window)
        times = np.array([shape.fetches, shape.returns])[:, None, None]
        return np.minimum(self._ways_ms, 1e3 * times * seconds).sum(axis=0)

    @cached_property
    def price_ms(self) -> np.ndarray:
        """Cost of replicas, [T, L] ms.

        Sum of copies on the critical path, the compute time that hidden copies take by contention,
        routing, and computing beside tokens.
        """
        if self.costs is None:
            return self.copying_ms
        # Share of a copy's measured time in which it transfers, and does not wait for its peer.
        transfers: Any = 1.0
        if self.record.copy is not None:
            modelled = self.costs.shape.fetch_seconds(self.costs.world)
            transfers = np.fmin(modelled / self.record.copy, 1)
        exposed = self.copying_ms - self.hidden_ms
        contention = self.costs.copy.contention * transfers * self.hidden_ms
        fixed = self.costs.routing_ms * self.replicas.any(axis=2)
        return exposed + contention + fixed + self.costs.computing_ms * self.replicas.max(axis=2)

    @cached_property
    def stage(self) -> np.ndarray:
        """Pipeline stage of each layer, [L]."""
        stage_of: dict[str, int] = {}
        for stage, info in enumerate(self.stages):
            stage_of.update(dict.fromkeys(info.layers, stage))
        return np.array([stage_of.get(name, 0) for name in self.record.info.layers])

    def of_step(self, values: np.ndarray) -> np.ndarray:
        """Aggregate layers to a step: sum within a stage, maximum over the concurrent stages, [T].

        Args:
            values: value of each layer, [T, L].
        """
        stages = np.unique(self.stage)
        return np.max([values[:, self.stage == one].sum(axis=1) for one in stages], axis=0)

    @cached_property
    def lost_ms(self) -> np.ndarray:
        """Cost of the imbalance of a step as routed, [T] ms."""
        return self.of_step(self.waiting_ms(self.before))

    @cached_property
    def left_ms(self) -> np.ndarray:
        """Cost of remaining imbalance and of replicas of a step as computed, [T] ms."""
        return self.of_step(self.waiting_ms(self.after) + self.price_ms)

    @cached_property
    def steps_ms(self) -> np.ndarray:
        """Measured time of each step, [T] ms; NaN if unknown, as of the first one."""
        record = self.record
        # Megatron's own files hold no times.
        with np.errstate(invalid="ignore"):
            steps = np.diff(record.time) / np.diff(record.iteration)
        steps = np.where(np.isfinite(steps), 1e3 * steps, np.nan)
        return np.concatenate([[np.nan], steps])

    @property
    def step_ms(self) -> float:
        """Median measured time of a step, ms; NaN if unknown."""
        known = self.steps_ms[~np.isnan(self.steps_ms)]
        if not len(known):
            return float("nan")
        return float(np.median(known))

    def memory(self, load: np.ndarray, *names: str) -> np.ndarray:
        """Return the memory of the fullest rank, maximum over stages, [T] bytes.

        Sum of parts of `RunInfo.memory` and the activations that experts keep for the backward. If
        the record has no sizes, the result is the number of tokens of a microbatch.

        Args:
            load: tokens per rank, [T, L, N].
            names: keys of the parts.
        """
        microbatches = 1 if self.costs is None else self.costs.shape.microbatches
        found: list[np.ndarray] = []
        for stage, info in enumerate(self.stages or [self.record.info]):
            held = info.memory or {**dict.fromkeys(names, 0), "token": 1, "kept": 1}
            tokens = load[:, self.stage == stage]
            # With recomputed experts (0 kept), one layer at a time has activations.
            if held["kept"]:
                tokens = tokens.sum(axis=1)
            else:
                tokens = tokens.max(axis=1)
            fullest = tokens.max(axis=1) / microbatches
            parts = sum(held[name] for name in names)
            found.append(parts + fullest * held["token"] * max(held["kept"], 1))
        return np.max(found, axis=0)


def _over_mean(fullest: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Divide ``fullest`` [T, L] by the mean rank load of ``load`` [T, L, N]; 1 without tokens."""
    mean = load.mean(axis=2)
    return np.divide(fullest, mean, out=np.ones_like(mean), where=mean > 0)
