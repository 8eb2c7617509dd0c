"""Periodic search for a better placement of experts, and its application.

The ranks of one expert-parallel group divide the layers of a search among themselves
(`homes.planner`). They search for loads summed over all ranks that share gradients. All homes move
back to their original ranks before the model is saved or loaded, so that a checkpoint does not
depend on moves; the next iteration moves the experts again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from megatron_hecate.comm.collectives import gather_objects, wait_collective
from megatron_hecate.comm.device import device_of_rank
from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.homes.mover import Homes, Order
from megatron_hecate.homes.planner import Choice, HomeSearch
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.layer_state import LayerState
from megatron_hecate.step.prefetch import Rehoming

# number of iterations since the last search whose loads a search samples
SAMPLED: int = 16


class HomesSchedule(Rehoming):
    """Periodic search for better homes of one model, and the moves.

    Args:
        states: all layers of this rank.
        group: process group as in `Homes`.
        optimizers: callback for the optimizers that step the model.
        last_loads: function that returns the tokens of the last iteration in this rank's
            expert-parallel group, [L, E]; ``None`` before the first iteration.
        clock: clock of the model.
        meter: measured costs of copies.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        group: dist.ProcessGroup,
        *,
        optimizers: Callable[[], Sequence[Optimizer]],
        last_loads: Callable[[], np.ndarray | None],
        clock: Clock,
        meter: OverlapMeter,
    ) -> None:
        self.homes = Homes(states, group, optimizers)
        self._states = states
        self._group = group
        self._last_loads = last_loads
        self._clock = clock
        self._meter = meter
        # loads [L, E] of each iteration since the last search
        self._window: list[np.ndarray] = []
        self._last: np.ndarray | None = None
        # pending order of each layer; None if homes are in place
        self._wanted: list[Order] | None = None

    def iteration_begins(self, iteration: int) -> None:
        """Search for better homes when due, and move experts, before the first forward. Collective.

        Nothing moves unless an optimizer has stepped since the last iteration: gradients that wait
        for a step stay where they are accumulated.

        Args:
            iteration: number to print.

        Raises:
            As `Homes.refuse_if_inconsistent` and `Homes.move`.
        """
        self.homes.refuse_if_inconsistent()
        last = self._last_loads()
        if last is not None and last is not self._last:
            self._last = last
            self._window.append(last)
        if self._is_due():
            self._wanted = self._search(iteration) or self._wanted
            self._window.clear()
        if self._clock.has_stepped and self._wanted is not None:
            self.homes.move(self._wanted)
            self._wanted = None

    def _is_due(self) -> bool:
        """Whether enough iterations have passed, and an optimizer stepped or none is known."""
        config = self._states[0].config
        fp16 = self._states[0].parts.layer.config.fp16
        # A search without a visible optimizer raises the error that users need. In fp16 it must not
        # run yet: loss scaling may skip the first steps, so that no optimizer state exists.
        unseen = not (fp16 or self.homes.optimizers())
        return (self._clock.has_stepped or unseen) and len(self._window) >= config.rehome

    def restore(self) -> None:
        """Move moved experts back to their original ranks until the next iteration. Collective.

        Raises:
            As `Homes.move`.
        """
        if self.homes.are_moved:
            orders = self._wanted or self.homes.now
            self._clock.end_iteration()
            self.homes.move(self.homes.built)
            self._wanted = orders

    def refuse_if_moved(self, *_: Any) -> None:
        """Raise RuntimeError if experts have moved, because weights are to be read or written."""
        if self.homes.are_moved:
            raise RuntimeError(
                "FSSDP has moved homes of experts: weights read or written now would have the "
                "names of other experts; call megatron_hecate.restore_homes(model) on all ranks "
                "first"
            )

    def _search(self, iteration: int) -> list[Order] | None:
        """Search for better homes; returns the order of each layer, or ``None`` if none pays."""
        first = self._states[0]
        microbatches = self._clock.microbatches or 1
        load = self._sum_loads() // first.group.size()
        order = np.stack(self.homes.now)
        search = HomeSearch(
            homes=first.parts.homes_only,
            world=first.world,
            cost=first.copy_cost(microbatches, self._meter),
            expert_bytes=self.homes.state_of(first).expert_bytes,
            token_seconds=first.shape(microbatches).token_seconds(first.world),
            horizon=first.config.rehome,
        )
        better = search.afford(self._choose(search, load, order), order)
        # Costs of copies are agreed within an expert-parallel group only, so rank 0 decides.
        better = gather_objects(better, self._group, what="agreeing on homes", label="homes")[0]
        if better is None:
            return None
        if self._group.rank() == 0:
            are_changed = better.order != order
            print(
                f"FSSDP: iteration {iteration}: {are_changed.sum()} experts of "
                f"{are_changed.any(axis=1).sum()} layers move to better homes, "
                f"{better.num_bytes / 2**20:.0f} MiB; it saves {1e3 * better.saved:.2f} ms of an "
                "iteration by the cost model",
                flush=True,
            )
        return list(better.order)

    def _sum_loads(self) -> np.ndarray:
        """Sum a sample of the window over all ranks of the group, [iterations, L, E] int64."""
        last = len(self._window) - 1
        sample = np.unique(np.linspace(0, last, SAMPLED).astype(np.int64))
        loads = np.stack([self._window[i] for i in sample]).astype(np.int64)
        load = torch.from_numpy(loads).to(device_of_rank())
        work = dist.all_reduce(load, group=self._group, async_op=True)
        timeout = self._states[0].config.timeout
        wait_collective(
            work, load, self._group, what="summing loads", label="homes", timeout=timeout
        )
        return load.cpu().numpy()

    def _choose(self, search: HomeSearch, load: np.ndarray, order: np.ndarray) -> list[Choice]:
        """Find better homes of each layer, and share the result between all ranks.

        Each rank of the group's first expert-parallel group searches some of the layers, because a
        search of all layers of a large model on one rank would take that rank many seconds.

        Args:
            search: parameters of the search.
            load: tokens per expert, [iterations, L, E].
            order: current order, [L, E].
        """
        first = self._states[0]
        layers = range(0)
        if dist.get_global_rank(self._group, 0) in first.parts.ranks:
            layers = range(first.group.rank(), len(order), first.group.size())
        choices = list(search.choose(load, order, layers))
        rank_choices = gather_objects(choices, self._group, what="choosing homes", label="homes")
        return sorted(itertools.chain.from_iterable(rank_choices), key=lambda choice: choice.layer)
