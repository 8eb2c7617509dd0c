"""Interface of a planner: one object per layer, with three calls per step, as in an iteration.

| call | time | input |
|---|---|---|
| `place` | before the gate; its copies can be fetched behind other compute | loads of past steps |
| `correct` | after the gate; its copies are late, on the critical path | the true load |
| `split` | after the gate | the true load and the final placement |

`moves` then counts the chunks sent. Loads are tokens of rank r for expert e, [R, E].
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from megatron_hecate.plan import EMPTY, CopyCost, LayerShape, Placement, World
from megatron_hecate.routing.tables import GroupShape
from megatron_hecate.tools.quotas import quotas_of_all
from megatron_hecate.tools.traffic import Traffic
from rivals.copies import add, backwards, copies, fan_out, no_traffic
from rivals.split import Quotas

# steps between two plans of periodic planners; EPLB leaves it to its user
INTERVAL: int = 25
# steps in the mean of `mean_load`; the Hecate paper's window
WINDOW: int = 5


@dataclasses.dataclass(frozen=True)
class Setting:
    """Description of a layer for its planner.

    Args:
        num_experts: number of experts, E.
        world: nodes, links and speeds.
        shape: sizes of one expert and of one count of the load, which may represent several tokens.
        slots: most replicas on a rank, S.
        tokens_per_count: real tokens per count of the load.
        scatters: see `fan_out`.
    """

    num_experts: int
    world: World
    shape: LayerShape
    slots: int
    tokens_per_count: float = 1.0
    scatters: bool = True

    @property
    def num_ranks(self) -> int:
        """Number of ranks, R."""
        return self.world.num_ranks

    @property
    def homes_per_rank(self) -> int:
        """Number of home experts per rank."""
        return self.num_experts // self.num_ranks

    @cached_property
    def homes(self) -> Placement:
        """Plain expert parallelism with room for the slots."""
        return Placement.initial(self.num_experts, self.num_ranks, num_slots=self.slots)

    @cached_property
    def cost(self) -> CopyCost:
        """Cost of replicas, in counts of the load."""
        hidden = self.shape.hidden_seconds / self.shape.fetch_seconds(self.world)
        return self.shape.copy_cost(self.world, hidden=hidden, scatters=self.scatters)

    def fan_out(self, receives: np.ndarray, source: np.ndarray) -> Traffic:
        """Count the chunks sent in this setting. Args as `fan_out`."""
        return fan_out(receives, source, self.world, scatters=self.scatters)


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """Chunks sent for one layer in one step.

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
    """Planner whose copies last one step: fetched from home, gradients summed there, then dropped.

    A subclass defines ``name`` (its row in the table) and ``when`` (time of planning).
    """

    name: ClassVar[str]
    when: ClassVar[str]

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def gate(self, load: np.ndarray) -> np.ndarray:
        """Return the layer's actual load; only forced balance changes ``load``."""
        return load

    @abc.abstractmethod
    def place(self, history: Sequence[np.ndarray]) -> Placement:
        """Plan homes and copies for the next step.

        Args:
            history: past loads [R, E], oldest first; empty at step 0.
        """

    def correct(self, load: np.ndarray, placement: Placement) -> Placement:
        """Add or drop copies for the known load."""
        return placement

    def split(self, load: np.ndarray, placement: Placement) -> Quotas:
        """Split the load into quotas, tokens of each source for each holder; default: FSSDP's."""
        tokens, order = quotas_of_all(load, placement, GroupShape(self.setting.world, placement))
        by_rank = np.lexsort((order.rank, order.expert))
        return Quotas(order.expert[by_rank], order.rank[by_rank], tokens[:, by_rank])

    def moves(self, placed: Placement, final: Placement) -> Moves:
        """Count the chunks sent in this step.

        Args:
            placed: result of `place`.
            final: result of `correct`.
        """
        none = no_traffic(self.setting.num_ranks)
        early = self.setting.fan_out(copies(placed), placed.home)
        if final is placed:
            return Moves(early=early, late=none, grads=backwards(early), state=none)
        late = self.setting.fan_out(copies(final) & ~placed.holders, final.home)
        home = backwards(self.setting.fan_out(copies(final), final.home))
        return Moves(early=early, late=late, grads=home, state=none)


class Resident(Planner):
    """Planner whose copies are permanent.

    A new copy fetches weights and optimizer state, and gradients are all-reduced in every step.
    Every copy has its own optimizer; otherwise it would fetch its weights after each update. An
    all-reduce counts as a send to the home and back.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._before = self._now = setting.homes

    @abc.abstractmethod
    def replan(self, history: Sequence[np.ndarray], now: Placement) -> Placement:
        """Return the next placement, or ``now`` itself if nothing changes."""

    def place(self, history: Sequence[np.ndarray]) -> Placement:
        self._before = self._now
        self._now = self.replan(history, self._now)
        return self._now

    def moves(self, placed: Placement, final: Placement) -> Moves:
        new = self.setting.fan_out(final.holders & ~self._before.holders, self._before.home)
        back = self.setting.fan_out(copies(final), final.home)
        grads = add((back, 1), (backwards(back), 1))
        return Moves(early=new, late=no_traffic(self.setting.num_ranks), grads=grads, state=new)


def mean_load(history: Sequence[np.ndarray]) -> np.ndarray:
    """Average the tokens per expert, [E], over the last `WINDOW` steps, summed over ranks."""
    return np.mean([load.sum(axis=0) for load in history[-WINDOW:]], axis=0)


def from_holders(holders: np.ndarray, home: np.ndarray) -> Placement:
    """Build a placement from holders.

    Args:
        holders: holders of each expert, [E, R] bool.
        home: preferred home of each expert, [E]; if it is no holder, the lowest holder is the home.
    """
    held = holders[np.arange(len(home)), home]
    home = np.where(held, home, holders.argmax(axis=1))
    # Each rank's row of the table holds its experts in order, then padding.
    rank, expert = np.nonzero(holders.T)
    count = holders.sum(axis=0)
    table = np.full((holders.shape[1], int(count.max())), EMPTY, dtype=np.int64)
    table[rank, np.arange(len(rank)) - np.repeat(np.cumsum(count) - count, count)] = expert
    return Placement(home=home, table=table)
