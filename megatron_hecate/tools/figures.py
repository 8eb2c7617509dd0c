"""What a recorded run says: who waited for whom, what that cost, and what FSSDP made of it. Record in, numbers out.

Loads are counted; times come from `plan`'s cost model, with the sizes and speeds that the record holds. Letters in
shapes: T iterations, L layers, N ranks, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_hecate.plan import EMPTY, CopyCost, LayerShape, Link, Placement, Speeds, World
from megatron_hecate.plan.replicas import problem_of
from megatron_hecate.plan.search import plan_cost
from megatron_hecate.tools.run_folder import RunInfo, RunRecord

SCATTERING = "nvlink"  # the transport whose receivers share the work of copying


@dataclasses.dataclass(frozen=True)
class Costs:
    """The recorded sizes and speeds, as `plan` takes them.

    Args:
        shape: of every layer.
        world: ranks, nodes and speeds.
        scatters: as in `CopyCost`.
    """

    shape: LayerShape
    world: World
    scatters: bool

    @classmethod
    def of(cls, info: RunInfo) -> Costs | None:
        """``None`` where the record holds no sizes or no speeds."""
        if not (info.shape and info.speeds):
            return None
        speeds = {**info.speeds, "intra": Link(**info.speeds["intra"]), "inter": Link(**info.speeds["inter"])}
        world = World(tuple(info.node), Speeds(**speeds))
        return cls(LayerShape(**info.shape), world, info.transport == SCATTERING)

    @property
    def token_ms(self) -> float:
        """Milliseconds of one token in one expert, forward and backward."""
        return 1e3 * self.shape.token_seconds(self.world)

    @property
    def copy(self) -> CopyCost:
        """What copies cost, nothing hidden."""
        return dataclasses.replace(self.shape.copy_cost(self.world), scatters=self.scatters)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Figures:
    """Of one run, per iteration.

    Args:
        record: they are of.
        stage: [L] pipeline stage of each layer.
        costs: ``None`` where times are not known; then all of the fields in ms are 0.
        before: [T, L, N] tokens of each rank as the router left them, each at its expert's home.
        after: [T, L, N] tokens that each rank computed.
        replicas: [T, L, N] replicas on each rank.
        copying_ms: [T, L] of the busiest link, out and back.
        hidden_ms: [T, L] the part of it behind compute.
        price_ms: [T, L] what replicas cost: copies that do not hide, what hidden ones take from compute, and routing.
    """

    record: RunRecord
    stage: np.ndarray
    costs: Costs | None
    before: np.ndarray
    after: np.ndarray
    replicas: np.ndarray
    copying_ms: np.ndarray
    hidden_ms: np.ndarray
    price_ms: np.ndarray

    @classmethod
    def of(cls, record: RunRecord, stages: Sequence[Sequence[str]] = ()) -> Figures:
        """Of a ``record``; ``stages`` names the layers of each pipeline stage, where there are several.

        Raises:
            ValueError: when experts cannot be split over ranks evenly.
        """
        info, (num, layers, experts) = record.info, record.load.shape
        homes = Placement.initial(experts, info.ranks, num_slots=info.slots)
        before = record.load.reshape(num, layers, info.ranks, -1).sum(axis=3)
        held = np.zeros(before.shape, np.int64) if record.replica is None else (record.replica != EMPTY).sum(axis=3)
        costs = Costs.of(info)
        copying = hidden = price = np.zeros((num, layers))
        if costs is not None and record.replica is not None:
            copying = _copying(record.replica, homes, costs)
            hidden = _hidden(copying, costs, record.hidden)
            routing = 1e3 * costs.world.speeds.routing * costs.shape.microbatches
            price = copying - hidden + costs.world.speeds.contention * hidden + routing * held.any(axis=2)
        stage_of = {name: stage for stage, names in enumerate(stages) for name in names}
        return cls(
            record=record,
            stage=np.array([stage_of.get(name, 0) for name in info.layers]),
            costs=costs,
            before=before,
            after=before if record.rank_load is None else record.rank_load,
            replicas=held,
            copying_ms=copying,
            hidden_ms=hidden,
            price_ms=price,
        )

    @property
    def observed(self) -> bool:
        """Whether FSSDP was off."""
        return self.record.info.mode == "observe"

    def imbalance(self, load: np.ndarray) -> np.ndarray:
        """[T, L] largest of ``load`` [T, L, N] over its mean; 1 without tokens."""
        mean = load.mean(axis=2)
        return np.divide(load.max(axis=2), mean, out=np.ones_like(mean), where=mean > 0)

    def waiting_ms(self, load: np.ndarray) -> np.ndarray:
        """[T, L] time that the fullest rank takes beyond the mean, with ``load`` [T, L, N]."""
        return (load.max(axis=2) - load.mean(axis=2)) * (0.0 if self.costs is None else self.costs.token_ms)

    def of_step(self, values: np.ndarray) -> np.ndarray:
        """[T] of the whole step from [T, L] of layers: layers add up, and of stages, which work at once, the largest
        counts."""
        return np.max([values[:, self.stage == stage].sum(axis=1) for stage in np.unique(self.stage)], axis=0)

    @property
    def lost_ms(self) -> np.ndarray:
        """[T] what imbalance costs a step as the router left it."""
        return self.of_step(self.waiting_ms(self.before))

    @property
    def left_ms(self) -> np.ndarray:
        """[T] what imbalance and replicas cost it with FSSDP."""
        return self.of_step(self.waiting_ms(self.after) + self.price_ms)

    @property
    def step_seconds(self) -> float:
        """Median time of a step as measured; NaN for a single iteration."""
        passed, steps = np.diff(self.record.time), np.diff(self.record.iteration)
        return float(np.median(passed / steps)) if len(passed) else float("nan")

    def fullest_rank(self, load: np.ndarray) -> np.ndarray:
        """[T] tokens of all layers together that the fullest rank keeps in a microbatch, with ``load`` [T, L, N]."""
        of_stages = [load[:, self.stage == stage].sum(axis=1).max(axis=1) for stage in np.unique(self.stage)]
        return np.max(of_stages, axis=0) / (1 if self.costs is None else self.costs.shape.microbatches)

    @property
    def replica_bytes(self) -> np.ndarray:
        """[T] weights and gradients of the replicas that the fullest rank holds at once."""
        if self.costs is None:
            return np.zeros(len(self.replicas))
        of_stages = [self.replicas[:, self.stage == stage] for stage in np.unique(self.stage)]
        all_layers = np.max([held.sum(axis=1).max(axis=1) for held in of_stages], axis=0)
        two_layers = 2 * self.replicas.max(axis=(1, 2))
        lifetime, shape = self.record.info.lifetime, self.costs.shape
        weights, grads = (two_layers if lifetime in kept else all_layers for kept in (("layer",), ("layer", "microbatch")))
        return weights * shape.expert_bytes + grads * shape.grad_bytes


def _copying(replica: np.ndarray, homes: Placement, costs: Costs) -> np.ndarray:
    """[T, L] milliseconds of copies, nothing hidden, with experts ``replica`` [T, L, N, S] in the slots."""
    free = dataclasses.replace(costs.copy, routing=0.0, crossing=0.0)
    problem, load = problem_of(homes, costs.world, free), np.zeros(homes.num_experts)
    held = homes.slots_per_rank - replica.shape[3]
    tokens: dict[bytes, float] = {}  # of each placement; most come again
    of_layers = np.empty(replica.shape[:2])
    for at in np.ndindex(of_layers.shape):
        slots = np.ascontiguousarray(replica[at], dtype=np.int64)
        if (key := slots.tobytes()) not in tokens:
            tokens[key] = plan_cost(load, problem, np.hstack([homes.table[:, :held], slots]))[1]
        of_layers[at] = tokens[key]
    return of_layers * costs.token_ms


def _hidden(copying: np.ndarray, costs: Costs, measured: np.ndarray | None) -> np.ndarray:
    """[T, L] milliseconds of ``copying`` behind compute: the ``measured`` share [T], else what the layer's time allows."""
    shape, out = costs.shape, costs.copy.out
    room = 1e3 * shape.hidden_seconds
    allowed = np.minimum(copying * out, room * shape.fetches)
    allowed += np.minimum(copying * (1 - out), room * shape.returns)
    share = np.full(len(copying), np.nan) if measured is None else measured
    return np.where(np.isnan(share)[:, None], allowed, copying * np.nan_to_num(share)[:, None])
