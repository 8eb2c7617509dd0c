"""What a recorded run says: who waited for whom, what that cost, and what FSSDP made of it. Record in, numbers out.

Loads are counted; times come from `plan`'s cost model, with the sizes and speeds that the record holds. Letters in
shapes: T iterations, L layers, N ranks, E experts, S slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_hecate.plan import EMPTY, CopyCost, LayerShape, Link, Placement, Speeds, World
from megatron_hecate.plan.replicas import problem_of
from megatron_hecate.plan.search import plan_cost
from megatron_hecate.tools.run_folder import RunInfo, RunRecord


@dataclasses.dataclass(frozen=True)
class _Costs:
    """The recorded sizes and speeds: of a layer, of the ``world``, and what copies cost with nothing hidden."""

    shape: LayerShape
    world: World
    copy: CopyCost

    @classmethod
    def of(cls, info: RunInfo) -> _Costs | None:
        """``None`` where the record holds no sizes or no speeds."""
        if not (info.shape and info.speeds):
            return None
        links = {name: Link(**info.speeds[name]) for name in ("intra", "inter")}
        shape, world = LayerShape(**info.shape), World(info.node, Speeds(**{**info.speeds, **links}))
        return cls(shape, world, dataclasses.replace(shape.copy_cost(world), scatters=info.transport == "nvlink"))

    @property
    def token_ms(self) -> float:
        """Milliseconds of one token in one expert, forward and backward."""
        return 1e3 * self.shape.token_seconds(self.world)

    @property
    def routing_ms(self) -> float:
        """Milliseconds per iteration of a layer with any replica."""
        return 1e3 * self.world.speeds.routing * self.shape.microbatches


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """Of one run.

    Args:
        record: they are of.
        stages: names of the layers of each pipeline stage; none where there is one stage.

    Raises:
        ValueError: when experts cannot be split over ranks evenly.
    """

    record: RunRecord
    stages: Sequence[Sequence[str]] = ()

    @cached_property
    def costs(self) -> _Costs | None:
        """``None`` where times are not known: all milliseconds are 0 then."""
        return _Costs.of(self.record.info)

    @property
    def observed(self) -> bool:
        """Whether FSSDP was off."""
        return self.record.replica is None

    @cached_property
    def homes(self) -> Placement:
        """Of every layer."""
        info = self.record.info
        return Placement.initial(self.record.load.shape[2], info.ranks, num_slots=0 if self.observed else info.slots)

    @cached_property
    def before(self) -> np.ndarray:
        """[T, L, N] tokens of each rank as the router left them, each at its expert's home."""
        return self.record.load.reshape(*self.record.load.shape[:2], self.homes.num_ranks, -1).sum(axis=3)

    @property
    def after(self) -> np.ndarray:
        """[T, L, N] tokens that each rank computed."""
        return self.before if self.record.rank_load is None else self.record.rank_load

    @cached_property
    def replicas(self) -> np.ndarray:
        """[T, L, N] replicas on each rank."""
        replica = self.record.replica
        return np.zeros_like(self.before) if replica is None else (replica != EMPTY).sum(axis=3)

    @staticmethod
    def imbalance(load: np.ndarray) -> np.ndarray:
        """[T, L] largest of ``load`` [T, L, N] over its mean; 1 without tokens."""
        mean = load.mean(axis=2)
        return np.divide(load.max(axis=2), mean, out=np.ones_like(mean), where=mean > 0)

    def waiting_ms(self, load: np.ndarray) -> np.ndarray:
        """[T, L] time that the fullest rank takes beyond the mean, with ``load`` [T, L, N]."""
        return (load.max(axis=2) - load.mean(axis=2)) * (0.0 if self.costs is None else self.costs.token_ms)

    @cached_property
    def copying_ms(self) -> np.ndarray:
        """[T, L] of replicas out and back on the busiest link, hidden or not."""
        replica, of_layers = self.record.replica, np.zeros(self.before.shape[:2])
        if self.costs is None or replica is None:
            return of_layers
        free = dataclasses.replace(self.costs.copy, routing=0.0, crossing=0.0)
        problem, load = problem_of(self.homes, self.costs.world, free), np.zeros(self.homes.num_experts)
        homes = self.homes.table[:, : self.homes.slots_per_rank - replica.shape[3]]
        tokens: dict[bytes, float] = {}  # of each placement; most come again
        for at in np.ndindex(of_layers.shape):
            slots = np.ascontiguousarray(replica[at], dtype=np.int64)
            if (key := slots.tobytes()) not in tokens:
                tokens[key] = plan_cost(load, problem, np.hstack([homes, slots]))[1]
            of_layers[at] = tokens[key]
        return of_layers * self.costs.token_ms

    @cached_property
    def hidden_ms(self) -> np.ndarray:
        """[T, L] the part of it behind compute: the measured share, or else what the layer's time allows."""
        if self.costs is None:
            return self.copying_ms
        shape, out, measured = self.costs.shape, self.costs.copy.out, self.record.hidden
        allowed = np.minimum(self.copying_ms * out, 1e3 * shape.hidden_seconds * shape.fetches)
        allowed += np.minimum(self.copying_ms * (1 - out), 1e3 * shape.hidden_seconds * shape.returns)
        share = np.full((len(allowed), 1), np.nan) if measured is None else measured[:, None]
        return np.where(np.isnan(share), allowed, self.copying_ms * np.nan_to_num(share))

    @cached_property
    def price_ms(self) -> np.ndarray:
        """[T, L] what replicas cost: copies that do not hide, what hidden ones take from compute, and routing."""
        if self.costs is None:
            return self.copying_ms
        shown, taken = self.copying_ms - self.hidden_ms, self.costs.copy.contention * self.hidden_ms
        return shown + taken + self.costs.routing_ms * self.replicas.any(axis=2)

    def of_stages(self, values: np.ndarray) -> np.ndarray:
        """[K, T, ...] sums over the layers of each of K stages of ``values`` [T, L, ...]."""
        stage_of = {name: stage for stage, names in enumerate(self.stages) for name in names}
        stage = np.array([stage_of.get(name, 0) for name in self.record.info.layers])
        return np.stack([values[:, stage == one].sum(axis=1) for one in np.unique(stage)])

    def of_step(self, values: np.ndarray) -> np.ndarray:
        """[T] of a whole step, from [T, L] of layers: stages work at once, so the largest one counts."""
        return self.of_stages(values).max(axis=0)

    @cached_property
    def lost_ms(self) -> np.ndarray:
        """[T] what imbalance costs a step as the router left it."""
        return self.of_step(self.waiting_ms(self.before))

    @cached_property
    def left_ms(self) -> np.ndarray:
        """[T] what imbalance and replicas cost it as computed."""
        return self.of_step(self.waiting_ms(self.after) + self.price_ms)

    @property
    def step_ms(self) -> float:
        """Median time of a step as measured; NaN for a single iteration."""
        steps = np.diff(self.record.time) / np.diff(self.record.iteration)
        return 1e3 * float(np.median(steps)) if len(steps) else float("nan")

    def fullest_rank(self, load: np.ndarray) -> np.ndarray:
        """[T] tokens that the fullest rank keeps in a microbatch, in all layers, with ``load`` [T, L, N]."""
        return self.of_stages(load).max(axis=(0, 2)) / (1 if self.costs is None else self.costs.shape.microbatches)

    @property
    def replica_bytes(self) -> np.ndarray:
        """[T] weights and gradients of the replicas that the fullest rank holds at once, by their lifetime: of all
        layers, or of the two whose buffers exist."""
        if self.costs is None:
            return np.zeros(len(self.replicas))
        every, two = self.of_stages(self.replicas).max(axis=(0, 2)), 2 * self.replicas.max(axis=(1, 2))
        lifetime = self.record.info.lifetime
        weights, grads = two if lifetime == "layer" else every, every if lifetime == "iteration" else two
        return weights * self.costs.shape.expert_bytes + grads * self.costs.shape.grad_bytes
