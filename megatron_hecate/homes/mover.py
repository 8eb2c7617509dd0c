"""Location of homes, and moves of experts between two iterations, optimizer state included.

Experts move in rounds of a bounded size. A round is written once every rank has received all of it
and all ranks agree on the resulting homes: an error before that leaves the old homes on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from megatron_hecate import trace
from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.homes.exchange import Relocation
from megatron_hecate.homes.optimizer_state import StateOnRanks
from megatron_hecate.megatron.parameter_gathers import wait_for_params
from megatron_hecate.megatron.stored_weights import StoredWeights
from megatron_hecate.megatron.training_globals import replica_of_rank
from megatron_hecate.plan import Placement
from megatron_hecate.step.layer_state import LayerState

# Upper bound of the bytes that a rank receives in one round. It sends the same number, and both
# buffers are allocated until the round is written.
ROUND_BYTES: int = 1 << 28
# [E] expert in each place of a home, rank by rank
Order = np.ndarray


class Move(NamedTuple):
    """Move of an expert between two places of a layer's homes, which are numbered rank by rank."""

    source: int
    target: int


class Homes:
    """Homes of one model's layers.

    Args:
        states: all layers of this rank.
        group: all ranks with homes of these layers: this rank's expert-parallel group and the
            expert-parallel groups that share gradients with it.
        optimizers: callback for the optimizers that step the model.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        group: dist.ProcessGroup,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._states = states
        self._group = group
        self.optimizers = optimizers
        # as built by Megatron
        self.built = self.now
        # True from the begin of a write, after which an error leaves experts inconsistent
        self._is_writing = False

    @property
    def now(self) -> list[Order]:
        """Current order of each layer's experts."""
        return [_order_of(state.homes) for state in self._states]

    @property
    def are_moved(self) -> bool:
        """Whether any expert is, or may be, away from its place as built by Megatron."""
        return self._is_writing or not all(map(np.array_equal, self.built, self.now))

    def refuse_if_inconsistent(self) -> None:
        """Raise RuntimeError if an error interrupted the writing of received values."""
        if self._is_writing:
            raise RuntimeError(
                "FSSDP: moving experts failed midway; this rank's experts are inconsistent; "
                "restart from the last checkpoint"
            )

    def move(self, orders: Sequence[Order]) -> None:
        """Move experts to the given order of each layer, between two iterations. Collective.

        Raises:
            RuntimeError: on all ranks when homes differ; after an error midway.
            ValueError: for an optimizer's state that cannot move.
            TransferError: when a rank dies or does not take part in time.
        """
        self.refuse_if_inconsistent()
        # A rank on which a move failed before its first write has other homes.
        digest = zlib.crc32(np.concatenate(self.now).tobytes())
        hashes = gather_objects(digest, self._group, what="comparing homes", label="homes")
        if len(set(hashes)) > 1:
            ranks = dist.get_process_group_ranks(self._group)
            raise RuntimeError(
                "FSSDP: experts have moved on some ranks only; restart from the last checkpoint. "
                f"Hashes of the homes on ranks {ranks}: {hashes}"
            )
        for state, order in zip(self._states, orders, strict=True):
            if not np.array_equal(order, _order_of(state.homes)):
                self._move_layer(state, order)

    def state_of(self, state: LayerState) -> StateOnRanks:
        """Gather which rank keeps which state of a layer's experts. Collective."""
        return StateOnRanks(
            state.parts.experts.homes(),
            self.optimizers(),
            place=(state.group.rank(), replica_of_rank()),
            group=self._group,
        )

    def _move_layer(self, state: LayerState, order: Order) -> None:
        wait_for_params(state.parts.layer.experts)
        on_ranks = self.state_of(state)
        old_order = _order_of(state.homes)
        num_homes = state.parts.experts.num_homes
        for moves in _rounds(old_order, order, num_homes, on_ranks.expert_bytes):
            with trace.span("homes move", state.name):
                self._carry_out(moves, state, on_ranks)

    def _carry_out(self, moves: Sequence[Move], state: LayerState, on_ranks: StateOnRanks) -> None:
        """Exchange and write one round."""
        old_order = _order_of(state.homes)
        order = old_order.copy()
        for move in moves:
            order[move.target] = old_order[move.source]
        homes = state.homes.with_homes(order)
        label = f"homes of {state.name}"
        relocation = Relocation(self._group, label=label, timeout=state.config.timeout)
        for move in moves:
            on_ranks.move(*move, relocation)
        with torch.no_grad():
            relocation.exchange()
            # A barrier: no rank writes before all ranks have received everything.
            gather_objects(None, self._group, what="moving experts", label=label)
            self._is_writing = True
            relocation.write()
            for expert in state.parts.experts.homes():
                StoredWeights(expert).drop_derived()
        state.move_homes(homes)
        self._is_writing = False


def _order_of(homes: Placement) -> Order:
    return homes.table[:, : homes.num_experts // homes.num_ranks].ravel()


def _rounds(
    old_order: Order, new_order: Order, per_rank: int, expert_bytes: int
) -> Iterator[list[Move]]:
    """Group the moves from one order to another into rounds.

    A round consists of closed cycles, so that every expert has a home after each round. No rank
    receives more than `ROUND_BYTES` in a round, except where a single cycle is larger.
    """
    num_ranks = len(old_order) // per_rank
    moves: list[Move] = []
    received = np.zeros(num_ranks)
    for cycle in _cycles(old_order, new_order):
        targets = [move.target // per_rank for move in cycle]
        added_bytes = np.bincount(targets, minlength=num_ranks) * expert_bytes
        if moves and (received + added_bytes).max() > ROUND_BYTES:
            yield moves
            moves = []
            received = np.zeros_like(received)
        moves = moves + cycle
        received = received + added_bytes
    if moves:
        yield moves


def _cycles(old_order: Order, new_order: Order) -> Iterator[list[Move]]:
    """Split the permutation from ``old_order`` to ``new_order`` into cycles of moves."""
    place = np.empty_like(old_order)
    place[old_order] = np.arange(len(old_order))
    is_visited = np.zeros(len(old_order), dtype=bool)
    for start in range(len(old_order)):
        cycle: list[Move] = []
        target = start
        while not is_visited[target]:
            is_visited[target] = True
            source = int(place[new_order[target]])
            cycle.append(Move(source, target))
            target = source
        if len(cycle) > 1:
            yield cycle
