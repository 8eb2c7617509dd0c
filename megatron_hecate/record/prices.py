"""Price of the replicas in a record: copies, hidden or not, routing, computing besides tokens.

Replicas are counted. Copies have the times of `plan`'s cost model, with the sizes and speeds in the
record; the windows that hide them are measured where the record holds them.
Letters in shapes: T iterations, L layers, N ranks, E experts, S slots.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from megatron_hecate.plan import EMPTY, CopyCost, LayerShape, Link, Placement, Speeds, World
from megatron_hecate.plan.replicas import problem_of
from megatron_hecate.plan.search import cost_beside_load
from megatron_hecate.record.run_folder import RunRecord


@dataclasses.dataclass(frozen=True, eq=False)
class PricedRecord:
    """Record with the price of its replicas, by the cost model for the recorded sizes and speeds.

    Args:
        record: record of the run, all stages together; loads without a run folder have no prices.

    Raises:
        ValueError: when experts cannot be split over ranks evenly.
    """

    record: RunRecord

    @cached_property
    def shape(self) -> LayerShape:
        """Sizes of a layer."""
        return LayerShape(**self.record.info.shape)

    @cached_property
    def world(self) -> World:
        """Ranks, nodes and speeds."""
        info = self.record.info
        links = {name: Link(**info.speeds[name]) for name in ("intra", "inter")}
        return World(info.node, Speeds(**{**info.speeds, **links}))

    @cached_property
    def copy_cost(self) -> CopyCost:
        """Cost of copies with nothing hidden."""
        scatters = self.record.info.transport == "nvlink"
        return dataclasses.replace(self.shape.copy_cost(self.world), scatters=scatters)

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

    @cached_property
    def homes(self) -> Placement:
        """Original homes of the experts of every layer, as built by Megatron."""
        info = self.record.info
        return Placement.initial(self.record.load.shape[2], info.ranks, num_slots=info.slots)

    @cached_property
    def home(self) -> np.ndarray:
        """Rank of each expert's home, [T, L, E]."""
        if self.record.home is not None:
            return self.record.home
        return np.broadcast_to(self.homes.home, self.record.load.shape)

    @cached_property
    def replicas(self) -> np.ndarray:
        """Replicas on each rank, [T, L, N]."""
        replica = self.record.replica
        if replica is None:
            return np.zeros((*self.record.load.shape[:2], self.record.info.ranks), np.int64)
        return (replica != EMPTY).sum(axis=3)

    @cached_property
    def _both_ways_ms(self) -> np.ndarray:
        """Time of fetches and of returns, hidden or not, [2, T, L] ms.

        Modelled: the times of the busiest link.
        """
        times_ms = np.zeros((2, *self.record.load.shape[:2]))
        replica = self.record.replica
        if replica is None:
            return times_ms
        # Most placements recur, so each is modelled once.
        modelled: dict[bytes, float] = {}
        for index in np.ndindex(times_ms[0].shape):
            slots = np.ascontiguousarray(replica[index], dtype=np.int64)
            home = self.home[index]
            key = slots.tobytes() + home.tobytes()
            if key not in modelled:
                modelled[key] = self._modelled_copy_ms(slots, home)
            out = self.copy_cost.out
            times_ms[(slice(None), *index)] = modelled[key] * out, modelled[key] * (1 - out)
        return times_ms

    def _modelled_copy_ms(self, slots: np.ndarray, home: np.ndarray) -> float:
        """Return the modelled time of all copies of one placement, ms.

        Args:
            slots: experts in replica slots, [N, S].
            home: rank of each expert's home, [E].
        """
        # Copies alone: routing, computing and tokens that cross nodes have no cost here.
        copies_alone = dataclasses.replace(self.copy_cost, routing=0.0, computing=0.0, crossing=0.0)
        homes = self.homes
        if self.record.home is not None:
            homes = homes.with_homes(np.argsort(home, kind="stable"))
        problem = problem_of(homes, self.world, copies_alone)
        homes_per_rank = self.homes.slots_per_rank - slots.shape[1]
        table = np.hstack([homes.table[:, :homes_per_rank], slots])
        no_load = np.zeros(self.homes.num_experts)
        return cost_beside_load(no_load, problem, table)[1] * self.token_ms

    @property
    def copying_ms(self) -> np.ndarray:
        """Time of fetches and returns together, hidden or not, [T, L] ms."""
        return self._both_ways_ms.sum(axis=0)

    @cached_property
    def hidden_ms(self) -> np.ndarray:
        """Part of `copying_ms` that compute hides, [T, L] ms.

        Its upper bound is the time from attention to experts, measured or else modelled.
        """
        shape = self.shape
        seconds: Any = shape.hidden_seconds
        window = self.record.window
        if window is not None:
            seconds = np.where(np.isnan(window), shape.hidden_seconds, window)
        times = np.array([shape.fetches, shape.returns])[:, None, None]
        return np.minimum(self._both_ways_ms, 1e3 * times * seconds).sum(axis=0)

    @cached_property
    def price_ms(self) -> np.ndarray:
        """Cost of replicas, [T, L] ms.

        Sum of copies on the critical path, the compute time that hidden copies take by contention,
        routing, and computing beside tokens.
        """
        exposed = self.copying_ms - self.hidden_ms
        contention = self.copy_cost.contention * self.hidden_ms
        fixed = self.routing_ms * self.replicas.any(axis=2)
        return exposed + contention + fixed + self.computing_ms * self.replicas.max(axis=2)
