"""When homes move, and where to: at every so many iterations better ones are looked for.

The ranks of one expert-parallel group search the layers (`plan.homes`), by the loads of all that share gradients; one
decides and tells the others.
Before the model is saved or loaded all homes go back to where Megatron built them, so that a checkpoint knows nothing
of this; the next iteration moves them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_hecate.comm.overlap import OverlapMeter
from megatron_hecate.homes.mover import Homes, Order
from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.job.device import device_of_rank
from megatron_hecate.plan import HomeSearch
from megatron_hecate.plan.homes import Choice
from megatron_hecate.runtime.forecast import LoadHistory
from megatron_hecate.runtime.iteration_tracker import IterationTracker
from megatron_hecate.runtime.layer_state import LayerState

LOOKED_AT: int = 16  # iterations of those since the last look
MOST_BYTES: float = 2e9  # that a rank sends after one look


class Rehoming:
    """Looks for better homes, and has them in use.

    Args:
        homes: of the model's layers.
        states: of these.
        group: as in `Homes`.
        history: of the loads of this rank's expert-parallel group.
        weights_changed: what replicas hold is out of date: tells the model's `IterationTracker`.
    """

    def __init__(
        self,
        homes: Homes,
        states: Sequence[LayerState],
        group: dist.ProcessGroup,
        *,
        history: LoadHistory,
        weights_changed: Callable[[], None],
    ) -> None:
        self.homes, self._states, self._group, self._history = homes, states, group, history
        self._weights_changed = weights_changed
        self._window: list[np.ndarray] = []  # [L, E] of each iteration since the last look
        self._last: np.ndarray | None = None
        self._wanted: list[Order] | None = None  # where homes shall be, if they are elsewhere
        self._changed = False  # since ranks compared them

    def begin_iteration(
        self, iteration: int, tracker: IterationTracker, meter: OverlapMeter
    ) -> None:
        """Before the first forward: look, if it is time, and move. All ranks of the group call it at the same point.

        Args:
            iteration: for what is printed.
            tracker: of the model. Where no optimizer has stepped, gradients lie with homes as they are, and in fp16
                there may be no state yet: nothing moves.
            meter: what is known of copies.

        Raises:
            As `Homes.check` and `Homes.move`.
        """
        try:
            self._check()
            if self._history.last is not None and self._history.last is not self._last:
                self._last = self._history.last
                self._window.append(self._last)
            unseen = not (
                self._states[0].parts.layer.config.fp16 or tracker.optimizers()
            )  # the look refuses these
            if (tracker.has_stepped or unseen) and len(self._window) >= self._states[
                0
            ].config.rehome:
                self._wanted = (
                    self._look(iteration, tracker.microbatches or 1, meter) or self._wanted
                )
                self._window.clear()
            if tracker.has_stepped and self._wanted is not None:
                self._changed = True
                self.homes.move(self._wanted)
                self._wanted = None
        except BaseException:
            self._weights_changed()  # a loop that catches this begins anew
            raise

    def _check(self) -> None:
        """Have ranks compare their homes, if these have changed since. Raises as `Homes.check`."""
        if self._changed:
            self.homes.check()
            self._changed = False

    def restore(self) -> None:
        """Have all homes where Megatron built them, until the next iteration begins. All ranks call it; where no homes
        moved nothing happens. Raises as `Homes.check` and `Homes.move`."""
        self._check()
        if self.homes.are_moved:
            wanted, self._changed = self._wanted or self.homes.now, True
            self._weights_changed()
            self.homes.move(self.homes.built)
            self._wanted = wanted
            self._check()

    def refuse_if_moved(self, *_: Any) -> None:
        """Raises RuntimeError where weights would be read or written as if homes were where Megatron built them."""
        if self.homes.are_moved:
            raise RuntimeError(
                "FSSDP has moved homes of experts: in this state_dict experts would have each other's names; call "
                "megatron_hecate.restore_homes(model) on all ranks first"
            )

    def _look(self, iteration: int, microbatches: int, meter: OverlapMeter) -> list[Order] | None:
        """Better homes, if some pay."""
        timeout, first = self._states[0].config.timeout, self._states[0]
        every = np.unique(np.linspace(0, len(self._window) - 1, LOOKED_AT).astype(np.int64))
        load = torch.from_numpy(np.stack([self._window[i] for i in every]).astype(np.int64)).to(
            device_of_rank()
        )
        work = dist.all_reduce(load, group=self._group, async_op=True)
        wait_collective(
            work, load, self._group, what="summing loads", label="homes", timeout=timeout
        )
        order = np.stack(self.homes.now)
        search = HomeSearch(
            homes=first.parts.homes_only,
            world=first.world,
            cost=first.copy_cost(microbatches, meter),
            expert_bytes=self.homes.state_of(first).expert_bytes,
            token_seconds=first.shape(microbatches).token_seconds(first.world),
            horizon=first.config.rehome,
            most_bytes=MOST_BYTES,
        )
        choices = self._choose(search, load.cpu().numpy() // first.group.size(), order)
        found = torch.tensor(order, device=load.device)  # a copy
        if self._group.rank() == 0 and (better := search.afford(choices, order)) is not None:
            found.copy_(torch.from_numpy(better.order))
            changed = better.order != order
            print(
                f"FSSDP: iteration {iteration}: {changed.sum()} experts of {changed.any(axis=1).sum()} layers move "
                f"to better homes, {better.num_bytes / 2**20:.0f} MiB; it saves {1e3 * better.saved:.2f} ms of an "
                "iteration by the cost model",
                flush=True,
            )
        work = dist.broadcast(found, group=self._group, group_src=0, async_op=True)
        wait_collective(
            work, found, self._group, what="telling better homes", label="homes", timeout=timeout
        )
        told = found.cpu().numpy()
        return list(told) if not np.array_equal(told, order) else None

    def _choose(self, search: HomeSearch, load: np.ndarray, order: np.ndarray) -> list[Choice]:
        """What may be done in each layer: every rank of the first one's expert-parallel group looks at some layers, for
        seconds of a large model's planning would be many times as long on one."""
        first, layers = self._states[0], range(0)
        if dist.get_global_rank(self._group, 0) in first.parts.ranks:
            layers = range(first.group.rank(), len(order), first.group.size())
        table = np.zeros((len(order), search.most_choices, 1 + order.shape[1]))
        number = [0] * len(order)
        for choice in search.choose(load, order, layers):
            table[choice.layer, number[choice.layer]] = choice.saved, *choice.order
            number[choice.layer] += 1
        choices = torch.from_numpy(table).to(device_of_rank())  # zeros where others look
        work = dist.all_reduce(choices, group=self._group, async_op=True)
        wait_collective(
            work,
            choices,
            self._group,
            what="choosing homes",
            label="homes",
            timeout=first.config.timeout,
        )
        table = choices.cpu().numpy()
        chosen = np.argwhere(table[..., 0] > 0).tolist()
        return [
            Choice(i, table[i, k, 1:].astype(np.int64), float(table[i, k, 0])) for i, k in chosen
        ]
