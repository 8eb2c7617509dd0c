"""The interface of a planner: one object per layer, three calls per step that mirror an iteration.

| call | when | sees |
|---|---|---|
| `place` | before the gate; its copies can be fetched behind other compute | loads of past steps |
| `correct` | after the gate; its copies are late, on the critical path | the true load |
| `split` | after the gate | the true load and the final placement |

`moves` then counts what travelled for it. Loads are [R, E] tokens of rank r for expert e.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from megatron_hecate.offline import traffic
from megatron_hecate.offline.traffic import Traffic, copies, fan_out, no_traffic
from megatron_hecate.plan import EMPTY, CopyCost, LayerShape, Placement, World
from megatron_hecate.routing.quotas import quotas_of_all
from megatron_hecate.routing.tables import GroupShape
from rivals.split import Quotas

INTERVAL: int = (
    25  # steps between two plans of those that plan now and then; EPLB leaves it to its user
)
WINDOW: int = 5  # steps in the mean of `mean_load`; the Hecate paper's window


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a planner is told about its layer.

    Args:
        num_experts: E.
        world: nodes, links, speed.
        shape: sizes of one expert and of one count of the load (a count may stand for several tokens).
        slots: copies a rank may host, S.
        tokens_per_count: real tokens that one count of the load stands for.
    """

    num_experts: int
    world: World
    shape: LayerShape
    slots: int
    tokens_per_count: float = 1.0

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks

    @property
    def homes_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @cached_property
    def homes(self) -> Placement:
        """Plain expert parallelism with room for the slots."""
        return Placement.initial(self.num_experts, self.num_ranks, num_slots=self.slots)

    @cached_property
    def cost(self) -> CopyCost:
        """What replicas cost, in counts of the load."""
        return self.shape.copy_cost(
            self.world, hidden=self.shape.hidden_seconds / self.shape.fetch_seconds(self.world)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """Chunks that travel for one layer in one step.

    Args:
        early: weights, before the gate.
        late: weights, after the gate.
        grads: gradients, after the backward.
        state: optimizer state (master weights and Adam's moments), before the gate.
    """

    early: Traffic
    late: Traffic
    grads: Traffic
    state: Traffic


class Planner(abc.ABC):
    """Copies for one step: fetched from their home, gradients summed there, then dropped.

    A subclass states ``name`` (its row in the table), ``when`` (when it plans) and the ``lifetime`` of its copies.
    """

    name: ClassVar[str]
    when: ClassVar[str]
    lifetime: ClassVar[str] = "iteration"

    @classmethod
    def memory(cls, setting: Setting) -> dict[str, Any]:
        """What `SimulatedJob.memory` is asked for."""
        return dict(slots=setting.slots, lifetime=cls.lifetime)

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def gate(self, load: np.ndarray) -> np.ndarray:
        """The load this layer really gets; all but forced balance take what comes."""
        return load

    @abc.abstractmethod
    def place(self, history: Sequence[np.ndarray]) -> Placement:
        """Homes and copies for the next step; ``history``: past loads [R, E], oldest first, empty at step 0."""

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        """Add or drop copies now that the load is known."""
        return placement

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        """Tokens of each source for each holder; integers that sum to the load. Ours, if a planner has no own."""
        tokens, order = quotas_of_all(load, placement, GroupShape.of(self.setting.world, placement))
        by_rank = np.lexsort((order.rank, order.expert))
        return Quotas(order.expert[by_rank], order.rank[by_rank], tokens[:, by_rank])

    def moves(self, placed: Placement, final: Placement) -> Moves:
        """What travelled in this step, between what `place` and what `correct` returned."""
        world, none = self.setting.world, no_traffic(self.setting.num_ranks)
        early = fan_out(copies(placed), placed.home, world)
        if final is placed:
            return Moves(early=early, late=none, grads=traffic.backwards(early), state=none)
        late = fan_out(copies(final) & ~placed.holders, final.home, world)
        home = traffic.backwards(fan_out(copies(final), final.home, world))
        return Moves(early=early, late=late, grads=home, state=none)


class Resident(Planner):
    """Copies that stay. A new one brings weights and optimizer state, and gradients are all-reduced in every step.

    Every copy updates itself with an optimizer of its own, as in FlexMoE; otherwise it had to fetch its weights again
    after each update. An all-reduce counts as a way home and a way back.
    """

    @classmethod
    def memory(cls, setting: Setting) -> dict[str, Any]:
        return dict(resident=setting.slots)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._before = self._now = setting.homes

    @abc.abstractmethod
    def replan(self, history: Sequence[np.ndarray], now: Placement) -> Placement:
        """The next placement; ``now`` itself when nothing changes."""

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        self._before, self._now = self._now, self.replan(history, self._now)
        return self._now

    def moves(self, placed: Placement, final: Placement) -> Moves:
        world = self.setting.world
        new = fan_out(final.holders & ~self._before.holders, self._before.home, world)
        back = fan_out(copies(final), final.home, world)
        grads = traffic.add((back, 1), (traffic.backwards(back), 1))
        return Moves(early=new, late=no_traffic(self.setting.num_ranks), grads=grads, state=new)


def mean_load(history: Sequence[np.ndarray], window: int = WINDOW) -> np.ndarray:
    """[E] mean tokens per expert, over all ranks and the last ``window`` steps."""
    return np.mean([load.sum(axis=0) for load in history[-window:]], axis=0)


def from_holders(holders: np.ndarray, home: np.ndarray) -> Placement:
    """A placement with exactly these ``holders`` [E, R] bool; homes that no longer hold pass to the lowest holder."""
    held = holders[np.arange(len(home)), home]
    home = np.where(held, home, holders.argmax(axis=1))
    rank, expert = np.nonzero(holders.T)
    count = holders.sum(axis=0)
    table = np.full((holders.shape[1], int(count.max())), EMPTY, dtype=np.int64)
    table[rank, np.arange(len(rank)) - np.repeat(np.cumsum(count) - count, count)] = expert
    return Placement(home=home, table=table)
