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
from megatron_hecate.plan.search import cost_beside_load
from megatron_hecate.record.run_folder import RunInfo, RunRecord


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
        shape, world = (
            LayerShape(**info.shape),
            World(info.node, Speeds(**{**info.speeds, **links})),
        )
        return cls(
            shape,
            world,
            dataclasses.replace(shape.copy_cost(world), scatters=info.transport == "nvlink"),
        )

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
        stages: what describes each pipeline stage; none where there is one stage.

    Raises:
        ValueError: when experts cannot be split over ranks evenly.
    """

    record: RunRecord
    stages: Sequence[RunInfo] = ()

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
        """Of every layer, as Megatron built them."""
        info = self.record.info
        return Placement.initial(
            self.record.load.shape[2], info.ranks, num_slots=0 if self.observed else info.slots
        )

    @cached_property
    def home(self) -> np.ndarray:
        """[T, L, E] rank of each expert's home."""
        built = np.broadcast_to(self.homes.home, self.record.load.shape)
        return built if self.record.home is None else self.record.home

    @property
    def moves(self) -> int:
        """How often some expert was at another home than in the iteration before, or than where Megatron built it."""
        built = np.broadcast_to(self.homes.home, (1, *self.home.shape[1:]))
        return int((np.diff(self.home, axis=0, prepend=built) != 0).sum())

    @cached_property
    def before(self) -> np.ndarray:
        """[T, L, N] tokens of each rank as the router left them, each where Megatron built its expert."""
        return self.record.load.reshape(*self.record.load.shape[:2], self.homes.num_ranks, -1).sum(
            axis=3
        )

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
        return (load.max(axis=2) - load.mean(axis=2)) * (
            0.0 if self.costs is None else self.costs.token_ms
        )

    @cached_property
    def most_copies(self) -> np.ndarray:
        """[T, L] replicas that one rank takes or gives, the most of any."""
        if (replica := self.record.replica) is None:
            return np.zeros(self.before.shape[:2], np.int64)
        at, of_layers = (
            np.nonzero(replica.reshape(*replica.shape[:2], -1) != EMPTY)[:2],
            np.zeros_like(self.before),
        )
        np.add.at(of_layers, (*at, self.home[(*at, replica[replica != EMPTY])]), 1)
        return np.maximum(of_layers, self.replicas).max(axis=2)

    @cached_property
    def _ways_ms(self) -> np.ndarray:
        """[2, T, L] of replicas out and back, hidden or not: by the measured time of a copy, or else by the model, on
        the busiest link."""
        replica, found = self.record.replica, np.zeros((2, *self.before.shape[:2]))
        if self.costs is None or replica is None:
            return found
        shape, copy = self.costs.shape, self.record.copy
        times = np.array([shape.fetches, shape.returns * shape.grad_bytes / shape.expert_bytes])[
            :, None, None
        ]
        found += np.nan if copy is None else 1e3 * times * copy * self.most_copies
        free = dataclasses.replace(self.costs.copy, routing=0.0, crossing=0.0)
        load, per_rank = (
            np.zeros(self.homes.num_experts),
            self.homes.slots_per_rank - replica.shape[3],
        )
        tokens: dict[bytes, float] = {}  # of each placement; most come again
        for at in zip(*np.nonzero(np.isnan(found[0])), strict=True):
            slots, home = np.ascontiguousarray(replica[at], dtype=np.int64), self.home[at]
            if (key := slots.tobytes() + home.tobytes()) not in tokens:
                moved = self.record.home is not None
                homes = (
                    self.homes.with_homes(np.argsort(home, kind="stable")) if moved else self.homes
                )
                problem = problem_of(homes, self.costs.world, free)
                table = np.hstack([homes.table[:, :per_rank], slots])
                tokens[key] = cost_beside_load(load, problem, table)[1]
            both = tokens[key] * self.costs.token_ms
            found[(slice(None), *at)] = both * free.out, both * (1 - free.out)
        return found

    @property
    def copying_ms(self) -> np.ndarray:
        """[T, L] of replicas out and back, hidden or not."""
        return self._ways_ms.sum(axis=0)

    @cached_property
    def hidden_ms(self) -> np.ndarray:
        """[T, L] the part of it behind compute: what the time before the experts allows, as measured or as modelled."""
        if self.costs is None:
            return self.copying_ms
        shape, window = self.costs.shape, self.record.window
        seconds = (
            shape.hidden_seconds
            if window is None
            else np.where(np.isnan(window), shape.hidden_seconds, window)
        )
        times = np.array([shape.fetches, shape.returns])[:, None, None]
        return np.minimum(self._ways_ms, 1e3 * times * seconds).sum(axis=0)

    @cached_property
    def price_ms(self) -> np.ndarray:
        """[T, L] what replicas cost: copies that do not hide, what hidden ones take from compute, and routing."""
        if self.costs is None:
            return self.copying_ms
        works = 1.0  # the part of its time in which a copy does not wait for its partner
        if self.record.copy is not None:
            works = np.fmin(self.costs.shape.fetch_seconds(self.costs.world) / self.record.copy, 1)
        shown, taken = (
            self.copying_ms - self.hidden_ms,
            self.costs.copy.contention * works * self.hidden_ms,
        )
        return shown + taken + self.costs.routing_ms * self.replicas.any(axis=2)

    @cached_property
    def stage(self) -> np.ndarray:
        """[L] the pipeline stage of each layer."""
        stage_of = {name: stage for stage, info in enumerate(self.stages) for name in info.layers}
        return np.array([stage_of.get(name, 0) for name in self.record.info.layers])

    def of_step(self, values: np.ndarray) -> np.ndarray:
        """[T] of a whole step, from [T, L] of layers: stages work at once, so the largest one counts."""
        return np.max(
            [values[:, self.stage == one].sum(axis=1) for one in np.unique(self.stage)], axis=0
        )

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

    def memory(self, load: np.ndarray, *names: str) -> np.ndarray:
        """[T] bytes of the fullest rank, the most of any stage: the parts ``names`` of `RunInfo.memory`, and what
        ``load`` [T, L, N] leaves for the backward; where the record does not say, tokens of a microbatch."""
        microbatches, found = 1 if self.costs is None else self.costs.shape.microbatches, []
        for stage, info in enumerate(self.stages or [self.record.info]):
            held = info.memory or {**dict.fromkeys(names, 0), "token": 1, "kept": 1}
            tokens = load[:, self.stage == stage]
            tokens = (tokens.sum(axis=1) if held["kept"] else tokens.max(axis=1)).max(
                axis=1
            ) / microbatches
            found.append(
                sum(held[name] for name in names) + tokens * held["token"] * max(held["kept"], 1)
            )
        return np.max(found, axis=0)
