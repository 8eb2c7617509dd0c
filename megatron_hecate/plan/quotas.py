"""Quotas: how many of each source's tokens for an expert go to each of its holders, computed where the loads are.

The number of operations is fixed and none of them needs a value on the host, so the host never waits for the gate.
Ranks that compute the quotas from the same loads on the same kind of device agree on one table. Three steps:

1. *Shares.* Holder r of expert e gets ``near[e,r] exp(x[r])`` of its tokens, over the sum of that for all its holders.
   ``near`` is how the tokens would be split if only distance counted: those of a node go to the holders on it, those of
   nodes without a holder to all. Raising ``x[r]`` draws tokens to rank r, so damped Newton steps on x bring all ranks
   to the mean load: of all balanced splits the nearest to ``near`` in relative entropy (Sinkhorn's matrix scaling).
   ``near`` is raised to a power that grows from step to step, so that each begins close to its solution. Where holders
   cannot be balanced, x runs off, and shares across the bottleneck vanish exponentially. Damping in proportion to the
   largest residual (Levenberg and Marquardt) bounds each step.
2. *Whole tokens.* Shares are rounded cumulatively per expert. Of all iterates the one with the smallest largest rank
   load wins, of equals the last.
3. *Sources.* Each expert's tokens and its holders' places are laid on two lines, and a source sends where its stretch
   of the first overlaps a holder's of the second: on its own rank, then what is left on its own node, then the rest.

Letters in shapes: N sources, E experts, R ranks, K nodes, C holders by expert, then rank, B sources whose quotas are
asked for. Counts are float64, exact for whole numbers below 2^53; sums of them do not depend on the order of addition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.world import World

# The power of ``near`` in each iterate; between two of them lies one Newton step of eleven small kernels. Two steps
# fewer leave ten times as much above the smallest largest load where holders form long chains, as with one slot.
LOCALITY: tuple[float, ...] = (0.3, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0)
# Part of an expert's tokens that count as near to all of its holders, so that each of them can be reached.
REACH: float = 0.02
# Damping per unit of the largest residual. 0.02 oversteps on some layers, 0.1 is slower everywhere.
DAMPING: float = 0.05
# What keeps the matrix positive definite when nothing is left to balance, in mean rank loads: far above float64's
# rounding, far below a token.
RIDGE: float = 1e-7
# Shares become whole multiples of 1 / GRAIN, so that their sums are exact.
GRAIN: float = 2.0**30
BLOCK: int = 32  # sources whose rows are computed together in a table


@dataclasses.dataclass(frozen=True, eq=False)
class PlacementTables:
    """What quotas need of one placement. Made by `QuotaSolver.prepare`.

    Args:
        expert: [C] int64 on the device: the expert of each holder; holders are ordered by expert, then rank.
        rank: [C] int64, likewise: the holder's rank.
        physical: [C] int64, likewise: the holder's physical expert, ``rank * P + slot``.
        split: who holds what, for the solver.
    """

    expert: Tensor
    rank: Tensor
    physical: Tensor
    split: _SplitTables


@dataclasses.dataclass(frozen=True, eq=False)
class _SplitTables:
    """Which rank holds which expert, float64 on the device.

    Args:
        holds: [E, R] 1 where the rank holds the expert.
        held: [E, R] logarithm of that.
        even: [E, R] each holder's part if all get as much.
        on_node: [E, R] each holder's part of what starts on its node.
        elsewhere: [E, K] part of the tokens of a node that count as near to all holders.
        position: [C] int64, the holder's place in [E, R].
        keeper: [R, E] int64, the holder that keeps what a source on this rank does not send: its own, or the first.
    """

    holds: Tensor
    held: Tensor
    even: Tensor
    on_node: Tensor
    elsewhere: Tensor
    position: Tensor
    keeper: Tensor


class QuotaSolver:
    """Quotas for all placements of one group of ranks.

    Args:
        world: node of every rank.
        device: where the loads will be.
        source_rank: [N] the rank a source's tokens start on; ``None`` means source n is rank n. With expert tensor
            parallelism several sources share a rank.

    Raises:
        ValueError: for sources on unknown ranks.
    """

    def __init__(self, world: World, device: torch.device | str, *, source_rank: Sequence[int] | None = None) -> None:
        node, ranks = world.node_index, np.arange(world.num_ranks)
        source = ranks if source_rank is None else np.asarray(source_rank)
        if not ((source >= 0) & (source < world.num_ranks)).all():
            raise ValueError(f"source_rank must name ranks 0 to {world.num_ranks - 1}, got {source.tolist()}")
        self._num_ranks, self._device = world.num_ranks, torch.device(device)
        sources, nodes = np.arange(len(source)), np.arange(world.num_nodes)
        on_node = node[:, None] == nodes  # [R, K]
        same = node[:, None] == node

        def upload(table: np.ndarray, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(table)).to(self._device, dtype)

        self._source_rank = upload(source, torch.int64)
        self._rank_node = upload(node, torch.int64)
        self._from = upload(source[:, None] == ranks)  # [N, R] sources to their ranks
        self._earlier = upload((source[:, None] == source) & (sources[:, None] < sources))  # [N, N] on the same rank
        self._on_node, self._to_node = upload(on_node), upload(on_node[source])  # [R, K], [N, K]
        self._mean = upload(np.full(len(ranks), 1 / len(ranks)))
        self._before_rank = upload(same & (ranks[:, None] < ranks))  # [R, R] on the same node
        before_node = nodes[:, None] < nodes
        self._before_node, self._before_node_of = upload(before_node), upload(before_node[:, node])  # [K, K], [K, R]
        self._running = upload(np.triu(np.ones((len(ranks), len(ranks) + 1)), 1))  # [R, R + 1]
        self._diagonal = upload(np.eye(len(ranks)) * (1 + RIDGE) / len(ranks))

    def prepare(self, placement: Placement) -> PlacementTables:
        """What the quotas need of ``placement``, in one copy to the device that the host does not wait for. One on
        another number of ranks is a ValueError."""
        if placement.num_ranks != self._num_ranks:
            raise ValueError(f"world has {self._num_ranks} ranks, the placement {placement.num_ranks}")
        expert, rank = np.nonzero(placement.holders)
        slot = (placement.table[rank] == expert[:, None]).argmax(axis=1)
        physical = rank * placement.slots_per_rank + slot
        tables = torch.from_numpy(np.stack([expert, rank, physical]).astype(np.int64, copy=False))
        if self._device.type == "cuda":  # torch does not use the pinned buffer again before the copy is done
            tables = tables.pin_memory()
        experts, ranks, places = tables.to(self._device, non_blocking=True).unbind()
        split = self._split_tables(experts, ranks, placement.num_experts)
        return PlacementTables(experts, ranks, places, split)

    def _split_tables(self, expert: Tensor, rank: Tensor, num_experts: int) -> _SplitTables:
        """From the holders [C]."""
        position = expert * self._num_ranks + rank
        holds = torch.zeros(num_experts, self._num_ranks, dtype=torch.float64, device=self._device)
        holds.view(-1).index_fill_(0, position, 1.0)
        in_node = holds @ self._on_node  # [E, K]
        first = torch.searchsorted(expert, torch.arange(num_experts, device=self._device))
        keeper = first.repeat(self._num_ranks)  # [R * E]
        keeper.index_copy_(0, rank * num_experts + expert, torch.arange(len(expert), device=self._device))
        return _SplitTables(
            holds=holds,
            held=holds.log(),
            even=holds / holds.sum(dim=1, keepdim=True),
            on_node=holds / (in_node @ self._on_node.t()).clamp_(min=1.0),
            elsewhere=(in_node == 0).to(torch.float64) + REACH,
            position=position,
            keeper=keeper.view(self._num_ranks, num_experts),
        )

    def row(self, loads: Tensor, tables: PlacementTables, own: int) -> Tensor:
        """How many of one source's tokens go to each holder. The same on every call with the same loads.

        Args:
            loads: [N, E] int on the device, tokens of source n routed to expert e: 0 or more, at most 2^50 in all.
            tables: of the placement.
            own: the source, 0 to N - 1.

        Returns:
            [C] int64 on the device. Over an expert's holders it sums to ``loads[own]``.
        """
        supply = loads.to(torch.float64)
        return self._assign(supply, self._serve(supply, tables.split), tables, slice(own, own + 1))[0]

    def table(self, loads: Tensor, tables: PlacementTables) -> Tensor:
        """[N, C] the rows of all sources."""
        supply = loads.to(torch.float64)
        served = self._serve(supply, tables.split)
        blocks = (slice(begin, begin + BLOCK) for begin in range(0, len(loads), BLOCK))
        return torch.cat([self._assign(supply, served, tables, block) for block in blocks])

    def _serve(self, supply: Tensor, tables: _SplitTables) -> Tensor:
        """Steps 1 and 2: [E, R] whole tokens that each rank serves, from ``supply`` [N, E]."""
        by_node = supply.t() @ self._to_node  # [E, K]
        total = supply.sum(dim=0)  # [E]
        # shares that are no numbers count as none, and every holder has one grain: no running sum ends at 0
        shares = torch.stack(self._shares(by_node, total, tables)).mul_(GRAIN)
        running = shares.nan_to_num_(nan=0.0).floor_().add_(tables.holds) @ self._running  # [I, E, R + 1]
        ends = (running / running[..., -1:]).mul_(total[:, None]).round_()
        served = ends[..., 1:] - ends[..., :-1]  # off by less than one token each
        best = served.sum(dim=1).amax(dim=1).argmin(dim=0, keepdim=True)  # the first of equals
        return served.index_select(0, best)[0]

    def _shares(self, by_node: Tensor, total: Tensor, tables: _SplitTables) -> list[Tensor]:
        """Step 1: the shares [E, R] of every iterate, the last first; ``by_node`` [E, K] tokens start on a node."""
        near = (by_node * tables.elsewhere).sum(dim=1, keepdim=True) * tables.even
        near.addcmul_(by_node @ self._on_node.t(), tables.on_node).clamp_(min=torch.finfo(near.dtype).tiny)
        nearness = near.log_().add_(tables.held)  # [E, R], -inf: never a holder
        part = total / total.sum().clamp(min=1)  # [E] of all tokens: the mean rank load is 1 / R
        x = torch.zeros(self._num_ranks, dtype=torch.float64, device=total.device)
        shares: list[Tensor] = []
        for locality in LOCALITY:
            share = torch.softmax(torch.add(x, nearness, alpha=locality), dim=1)
            shares.append(share)
            if len(shares) == len(LOCALITY):
                break
            missing = torch.addmv(self._mean, share.t(), part, alpha=-1)  # [R] mean - L
            # diag(L) = diag(mean) - diag(missing), and mean + RIDGE stands on the diagonal already
            matrix = torch.addmm(self._diagonal, share.t(), share * part[:, None], alpha=-1)
            damping = torch.linalg.vector_norm(missing, math.inf)
            matrix.diagonal().sub_(torch.sub(missing, damping, alpha=DAMPING))
            # _ex: the plain version asks the device whether it succeeded, and waits for the answer
            factor = torch.linalg.cholesky_ex(matrix, check_errors=False).L
            x = x + torch.cholesky_solve(missing[:, None], factor)[:, 0]
        return shares[::-1]

    def _assign(self, supply: Tensor, served: Tensor, tables: PlacementTables, sources: slice) -> Tensor:
        """Step 3: [B, C] int64, the quotas of the ``sources``; ``served`` [E, R]."""
        rank = self._source_rank[sources]  # [B]
        by_rank = supply.t() @ self._from  # [E, R]
        mine = supply[sources]  # [B, E]
        kept = torch.minimum(by_rank, served)  # on their own rank
        waiting, room = by_rank - kept, served - kept
        # where the source's tokens begin and end on its rank's line, and then on its node's, without what is kept
        begin = self._earlier[sources] @ supply
        line = torch.stack([begin, begin + mine]).sub_(kept.t()[rank]).clamp_(min=0)  # [2, B, E]
        line += (waiting @ self._before_rank).t()[rank]
        place = room @ self._before_rank  # [E, R] where the holder's places begin on its node's line, and end
        places = torch.stack([place, place + room])  # [2, E, R]
        quotas = _overlap(line, places)  # [B, E, R]
        if self._on_node.shape[1] > 1:
            node = self._rank_node[rank]
            quotas *= self._on_node.t()[node][:, None]  # on the own node only
            waiting, room = waiting @ self._on_node, room @ self._on_node  # [E, K]
            met = torch.minimum(waiting, room)  # inside the node
            waiting, room = waiting - met, room - met
            line = line.sub_(met.t()[node]).clamp_(min=0).add_((waiting @ self._before_node).t()[node])
            places = places.sub_(met @ self._on_node.t()).clamp_(min=0).add_(room @ self._before_node_of)
            quotas += _overlap(line, places)
        quotas = quotas.flatten(1).index_select(1, tables.split.position)  # [B, C]
        # one holder keeps all that is not sent: this, and not the solver, conserves tokens
        sent = torch.zeros_like(mine).index_add_(1, tables.expert, quotas)
        return quotas.scatter_add_(1, tables.split.keeper[rank], mine - sent).to(torch.int64)


def _overlap(line: Tensor, places: Tensor) -> Tensor:
    """[B, E, R] how much of each source's stretch ``line`` [2, B, E] falls on each holder's ``places`` [2, E, R]."""
    (begin, end), (low, high) = line.unsqueeze(-1).unbind(), places.unbind()
    return torch.minimum(end, high).sub_(torch.maximum(begin, low)).clamp_(min=0)
