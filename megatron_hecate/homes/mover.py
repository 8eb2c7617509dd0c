"""Where homes are, and how experts change them between two iterations, with all that the optimizer keeps for them.

Experts move in rounds of a bounded size. What a round brings is written once all ranks have all of it and agree on the
homes that follow: an error before leaves the old homes on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from megatron_hecate import trace
from megatron_hecate.homes.exchange import Relocation
from megatron_hecate.homes.optimizer_state import StateOnRanks
from megatron_hecate.job import watchdog
from megatron_hecate.job.agreement import assert_same
from megatron_hecate.job.collectives import TransferError
from megatron_hecate.job.device import device_of_rank
from megatron_hecate.megatron.parameter_gathers import wait_for_params
from megatron_hecate.megatron.stored_weights import StoredWeights
from megatron_hecate.plan import Placement
from megatron_hecate.runtime.layer_state import LayerState

ROUND_BYTES: int = (
    1 << 28
)  # that a rank receives in a round; it sends as many, and both lie in memory meanwhile
Order = np.ndarray  # [E] the expert in each place of a home, rank by rank


class Move(NamedTuple):
    """The expert in place ``source`` of a layer's homes goes to place ``target``; places are numbered rank by rank."""

    source: int
    target: int


class Homes:
    """Where the homes of one model's layers are, and how they move.

    Args:
        states: of all layers of this rank.
        group: all ranks that have the homes of this rank's layers: those of its expert-parallel group, and of the
            others that share their gradients.
        replica: this rank's number among those with the same homes (expert data parallelism).
        optimizers: gives those that step the model.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        group: dist.ProcessGroup,
        *,
        replica: int,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._states, self._group, self._replica, self._optimizers = (
            states,
            group,
            replica,
            optimizers,
        )
        self._timeout = states[0].config.timeout
        self.built = self.now  # by Megatron
        self._writing = False
        self.received_bytes = 0  # by this rank, so far

    @property
    def now(self) -> list[Order]:
        """Where experts are, layer by layer."""
        return [_order_of(state.homes) for state in self._states]

    @property
    def are_moved(self) -> bool:
        """Whether some expert is elsewhere than where Megatron built it, or may be."""
        return self._writing or any(map(_differ, self.built, self.now))

    @property
    def _fingerprint(self) -> int:
        """Of all layers' homes; the hash of a tuple of integers is the same in every process."""
        return hash(tuple(state.homes.fingerprint for state in self._states))

    def check(self) -> None:
        """Have all ranks compare their homes.

        Raises:
            RuntimeError: on all ranks when they differ; on this one when an error came while it wrote what had come.
            TransferError: when a rank does not take part in time.
        """
        way_out = "start again from the last checkpoint"
        if self._writing:
            raise RuntimeError(
                f"FSSDP: an error came while experts moved, and this rank has some of them only; {way_out}"
            )
        try:
            assert_same(self._fingerprint, self._group, label="homes", timeout=self._timeout)
        except AssertionError as error:
            raise RuntimeError(
                f"FSSDP: experts have moved on some ranks only; {way_out}. {error}"
            ) from error

    def move(self, orders: Sequence[Order]) -> None:
        """Have experts where ``orders`` say, layer by layer. All ranks of the group call it, between two iterations.

        Raises:
            ValueError: for an optimizer's state that cannot move.
            TransferError: when a rank dies or does not take part in time.
        """
        for state, order in zip(self._states, orders, strict=True):
            if not _differ(order, _order_of(state.homes)):
                continue
            experts = state.parts.layer.experts
            wait_for_params(experts)
            on_ranks = self.state_of(state)
            for moves in _rounds(
                _order_of(state.homes), order, state.parts.experts.num_homes, on_ranks.expert_bytes
            ):
                try:
                    with trace.span("homes move", state.name):
                        self._carry_out(moves, state, on_ranks)
                except (
                    TransferError
                ) as error:  # of a collective, which does not know who is missing
                    raise TransferError(
                        f"{error} Of all ranks: {watchdog.name_silent_ranks()}"
                    ) from error

    def state_of(self, state: LayerState) -> StateOnRanks:
        """Who keeps what of a layer's experts. All ranks of the group call it."""
        return StateOnRanks(
            state.parts.experts.homes(),
            self._optimizers(),
            place=(state.group.rank(), self._replica),
            group=self._group,
            timeout=self._timeout,
        )

    def _carry_out(self, moves: Sequence[Move], state: LayerState, on_ranks: StateOnRanks) -> None:
        order = before = _order_of(state.homes)
        order = order.copy()
        for move in moves:
            order[move.target] = before[move.source]
        homes, label = state.homes.with_homes(order), f"homes of {state.name}"
        relocation = Relocation(self._group, device_of_rank(), label=label, timeout=self._timeout)
        for move in moves:
            on_ranks.move(*move, relocation)
        with torch.no_grad():
            relocation.exchange()
            assert_same(
                homes.fingerprint, self._group, label=label, timeout=self._timeout
            )  # all have all of it
            self._writing = True
            relocation.write()
            for expert in state.parts.experts.homes():
                StoredWeights(expert).drop_derived()
        state.move_homes(homes)
        self._writing = False
        self.received_bytes += relocation.received_bytes


def _order_of(homes: Placement) -> Order:
    return homes.table[:, : homes.num_experts // homes.num_ranks].ravel()


def _differ(a: Order, b: Order) -> bool:
    return not np.array_equal(a, b)


def _rounds(before: Order, after: Order, per_rank: int, expert_bytes: int) -> Iterator[list[Move]]:
    """Moves from one order to another, in rounds: closed cycles, so that each round ends with every expert somewhere,
    and as many as `ROUND_BYTES` allows, but one."""
    place = np.empty_like(before)
    place[before] = np.arange(len(before))
    together: list[Move] = []
    received = np.zeros(len(before) // per_rank)
    seen = np.zeros(len(before), dtype=bool)
    for start in range(len(before)):
        cycle, target = list[Move](), start
        while not seen[target]:
            seen[target] = True
            source = int(place[after[target]])
            cycle.append(Move(source, target))
            target = source
        if len(cycle) < 2:
            continue
        more = (
            np.bincount([move.target // per_rank for move in cycle], minlength=len(received))
            * expert_bytes
        )
        if together and (received + more).max() > ROUND_BYTES:
            yield together
            together, received = [], np.zeros_like(received)
        together, received = together + cycle, received + more
    if together:
        yield together
