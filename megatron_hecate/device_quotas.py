"""This rank's quotas, computed where the loads are: on the device, without waiting for it.

The meaning is that of `megatron_hecate.plan.split_quotas`, its reference. The number of operations is fixed and none of
them needs a value on the host, so the host never waits for the gate. Three steps:

1. *Fractions.* Expert e gives holder r the share ``w[e,r] = exp(x[r]) / sum over its holders h of exp(x[h])``. Raising
   ``x[r]`` draws tokens to rank r, so damped Newton steps on x bring all ranks to the mean load. With ``F`` tokens per
   expert and ``L = w^T F`` per rank, the loads' derivative is the Laplacian ``diag(L) - w^T diag(F) w``. (This is
   Sinkhorn's matrix scaling, solved by Newton's method: the minimum of the convex function ``sum_e F_e log(sum_h
   exp(x[h])) - mean * sum_r x[r]``.) Where holders cannot be balanced, x runs off, and shares across the bottleneck
   vanish exponentially. Damping in proportion to the largest residual (Levenberg and Marquardt) bounds each step.
2. *Whole tokens.* Shares are rounded cumulatively per expert. Of all iterates, and the most local choice, the one with
   the smallest largest rank load wins.
3. *Sources.* Each expert's tokens and its holders' places are laid on two lines, and a source sends where its stretch
   of the first overlaps a holder's of the second: on its own rank, then what is left on its own node, then the rest.

Letters in shapes: N sources, E experts, R ranks, G nodes, C columns (expert, holder), K candidates. Counts are float64,
exact for whole numbers below 2^53; sums of them do not depend on the order of addition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.plan import Placement, World

# Newton steps, ten small kernels each. How far the largest rank load stays above its minimum before rounding, on real
# routing (64 experts, worst of 8 to 32 ranks with 1 or 2 slots), mean and 99th percentile: 5 steps 0.08 % and 1.3 %,
# 6 steps 0.01 % and 0.4 %, 7 steps below 0.01 % and 0.1 %. Long chains of ranks take longest: 1.2 % over 64 of them.
STEPS = 7
# Damping per unit of the largest residual. 0.03 is faster, but in one of some hundred layers it oversteps so far that
# it takes many more steps to come back; 0.1 is slower everywhere.
DAMPING = 0.05
# What keeps the matrix positive definite when nothing is left to balance, in mean rank loads: far above float64's
# rounding, far below a token.
RIDGE = 1e-7
# Shares become whole multiples of 1 / GRAIN, so that their sums are exact.
GRAIN = 2.0**30


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One source's seat in the group: what its quotas need and no placement changes. Make it with `on`, once.

    Args:
        own: index of the source, 0 to N - 1.
        rank: [N] the rank each source's tokens start on.
        node: [R] index of each rank's node, 0 to G - 1.
        tables: matrices on the device, see `_source_tables`.
    """

    own: int
    rank: np.ndarray
    node: np.ndarray
    tables: dict[str, Tensor]

    @classmethod
    def on(
        cls, device: torch.device | str, world: World, *, own: int, source_rank: Sequence[int] | None = None
    ) -> Source:
        """Source ``own``, for loads that will be on ``device``.

        Args:
            device: where the loads will be.
            world: node of every rank.
            own: whose row of the quotas to compute, 0 to N - 1.
            source_rank: [N] the rank a source's tokens start on; ``None`` means source n is rank n.

        Raises:
            ValueError: for an unknown source, or sources on unknown ranks.
        """
        num_ranks = world.num_ranks
        rank = np.arange(num_ranks) if source_rank is None else np.asarray(source_rank)
        if not ((rank >= 0) & (rank < num_ranks)).all():
            raise ValueError(f"source_rank must name ranks 0 to {num_ranks - 1}, got {rank.tolist()}")
        if not 0 <= own < len(rank):
            raise ValueError(f"own={own} must name a source, 0 to {len(rank) - 1}")
        _, node = np.unique(np.asarray(world.node), return_inverse=True)
        return cls(own=own, rank=rank, node=node, tables=_upload(_source_tables(node, rank, own), torch.device(device)))

    def quotas(self, placement: Placement) -> DeviceQuotas:
        """What else the quotas need of ``placement``, on the device, in one copy that the host does not wait for.

        Raises:
            ValueError: for a placement on another number of ranks.
        """
        if placement.num_ranks != len(self.node):
            raise ValueError(f"world has {len(self.node)} ranks, the placement {placement.num_ranks}")
        expert, rank = np.nonzero(placement.holders)
        if len(expert) == placement.num_experts:  # nobody to share with
            tables = {"column_expert": expert}
        else:
            tables = {"column": expert * placement.num_ranks + rank, **_placement_tables(placement, self)}
        return DeviceQuotas(self, expert, rank, _upload(tables, self.tables["lines"].device))


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceQuotas:
    """The quotas of one source under one placement. Made by `Source.quotas`.

    Args:
        source: whose quotas.
        expert: [C] expert of the column, on the host.
        rank: [C] the holder, on the host. Columns are ordered by expert, then rank, as in ``Quotas``.
        tables: what the operations need of the placement, on the device, see `_placement_tables`.
    """

    source: Source
    expert: np.ndarray
    rank: np.ndarray
    tables: dict[str, Tensor]

    def row(self, loads: Tensor) -> Tensor:
        """How many of the own source's tokens go to each holder.

        The same on every call with the same loads. Ranks that compute it from the same loads on the same kind of device
        agree on one table of quotas; tokens are conserved even if they do not.

        Args:
            loads: [N, E] int on the device, tokens of source n routed to expert e: 0 or more, at most 2^50 in all.

        Returns:
            [C] int64 on the device. Over an expert's columns it sums to ``loads[own]``. Over all sources, the largest
            rank load is the smallest possible up to the figures at `STEPS` and about a token per expert on that rank.
        """
        if "even" not in self.tables:
            return loads[self.source.own].to(torch.int64).index_select(0, self.tables["column_expert"])
        supply = loads.to(torch.float64)  # [N, E]
        lines = supply.t() @ self.source.tables["lines"]  # [E, R + 2]
        total = supply.sum(dim=0)  # [E]
        shares = self._shares(total)
        served = self._best(self._whole(shares, total), supply)
        return self._own_row(lines[:, :-2], lines[:, -2:], served)

    def _shares(self, total: Tensor) -> list[Tensor]:
        """Step 1: the shares [E, R] of every iterate, even shares first; ``total`` [E] is tokens per expert."""
        fixed, tables = self.source.tables, self.tables
        part = total / total.sum().clamp_(min=1)  # [E] of all tokens, so the mean rank load is 1 / R
        logits, share = tables["log_even"], tables["even"]
        shares = [share]
        for _ in range(STEPS):
            missing = torch.addmv(fixed["mean"], share.t(), part, alpha=-1)  # [R] mean - L
            # diag(L) = diag(mean) - diag(missing), and mean + RIDGE stands on the diagonal already
            matrix = torch.addmm(fixed["mean_diagonal"], share.t(), share * part[:, None], alpha=-1)
            damping = torch.linalg.vector_norm(missing, math.inf)
            matrix.diagonal().sub_(torch.sub(missing, damping, alpha=DAMPING))
            # _ex: the plain version asks the device whether it succeeded, and waits for the answer
            factor = torch.linalg.cholesky_ex(matrix, check_errors=False).L
            logits = logits + torch.cholesky_solve(missing[:, None], factor).t()
            share = torch.softmax(logits, dim=1)
            shares.append(share)
        return shares

    def _whole(self, shares: list[Tensor], total: Tensor) -> Tensor:
        """Step 2: [K, E, R] ``shares`` (K of [E, R]) of ``total`` [E] as whole tokens, which sum to ``total``.

        Holders end at the rounded running sum: a holder's tokens are off by less than one.
        """
        # shares that are no numbers count as none, and every holder has one grain: the sum below is never 0
        grains = torch.stack(shares).mul_(GRAIN).nan_to_num_(nan=0.0).floor_().add_(self.tables["held"])
        running = grains @ self.source.tables["running"]  # [K, E, R + 1]
        ends = (running / running[..., -1:]).mul_(total[:, None]).round_()
        return ends[..., 1:] - ends[..., :-1]

    def _best(self, candidates: Tensor, supply: Tensor) -> Tensor:
        """[E, R] the most local choice or one of ``candidates`` [K, E, R]: whose largest rank load is smallest."""
        nearest = self.tables["nearest"]  # [N * E] position in [E, R] of the nearest holder
        local = torch.zeros_like(candidates[0]).view(-1).index_add_(0, nearest, supply.view(-1))
        candidates = torch.cat([local.view(1, *candidates.shape[1:]), candidates])
        best = candidates.sum(dim=1).amax(dim=1).argmin(dim=0, keepdim=True)  # the first of equals
        return candidates.index_select(0, best)[0]

    def _own_row(self, by_rank: Tensor, own: Tensor, served: Tensor) -> Tensor:
        """Step 3.

        Args:
            by_rank: [E, R] tokens that start on each rank.
            own: [E, 2] where the own source's tokens begin and end among those of its rank.
            served: [E, R] tokens each holder serves.

        Returns:
            [C] int64.
        """
        fixed, num_ranks, own_rank = self.source.tables, by_rank.shape[1], int(self.source.rank[self.source.own])
        mine = own[:, 1] - own[:, 0]
        kept = torch.minimum(by_rank, served)  # on their own rank
        room = (served - kept) @ fixed["room"]  # [E, 2R + G] begin and end of each rank's on its node's line; per node
        waiting = (by_rank - kept) @ fixed["waiting"]  # [E, 1 + G] before the own rank on its node's line; per node
        own = (own - kept[:, own_rank, None]).clamp_(min=0).add_(waiting[:, :1])
        places = room[:, : 2 * num_ranks].view(-1, 2, num_ranks)
        row = _overlap(own, places)
        if room.shape[1] > 2 * num_ranks + 1:
            own_node = int(self.source.node[own_rank])
            row.mul_(fixed["own_node"])
            room, waiting = room[:, 2 * num_ranks :], waiting[:, 1:]
            met = torch.minimum(room, waiting)  # [E, G] inside the node
            own = (own - met[:, own_node, None]).clamp_(min=0).add_((waiting - met) @ fixed["before_own_node"])
            places = (places - (met @ fixed["node_of"])[:, None]).clamp_(min=0)
            row.add_(_overlap(own, places.add_(((room - met) @ fixed["before_node_of"])[:, None])))
        # the own rank keeps all that is not sent: this, and not the solver, is what conserves tokens
        row[:, own_rank].add_(mine - row.sum(dim=1))
        return row.view(-1).index_select(0, self.tables["column"]).to(torch.int64)


def _overlap(own: Tensor, places: Tensor) -> Tensor:
    """[E, R] how much of ``own`` (begin and end, [E, 2]) falls on each rank's stretch ``places`` [E, 2, R]."""
    end = torch.minimum(own[:, 1:], places[:, 1])
    return end.sub_(torch.maximum(own[:, :1], places[:, 0])).clamp_(min=0)


def _source_tables(node: np.ndarray, source: np.ndarray, own: int) -> dict[str, np.ndarray]:
    """Sums over ranks, nodes and sources, as matrices; ``node`` [R] is an index below G, ``source`` [N] a rank."""
    ranks, nodes, sources = np.arange(len(node)), np.arange(node.max() + 1), np.arange(len(source))
    in_node = node[:, None] == nodes[None, :]  # [R, G]
    before_in_node = (node[:, None] == node[None, :]) & (ranks[:, None] < ranks[None, :])
    before_node = nodes[:, None] < nodes[None, :]
    before_own = (source == source[own]) & (sources < own)
    own_node = node[source[own]]
    return dict(
        mean=np.full(len(node), 1 / len(node)),
        mean_diagonal=np.eye(len(node)) * (1 + RIDGE) / len(node),
        running=np.triu(np.ones((len(node), len(node) + 1)), 1),
        # from sources to ranks; last two columns: sources of the own rank before the own one, and with it
        lines=np.column_stack([source[:, None] == ranks, before_own, before_own | (sources == own)]),
        room=np.column_stack([before_in_node, before_in_node | np.eye(len(node), dtype=bool), in_node]),
        waiting=np.column_stack([before_in_node[:, source[own]], in_node]),
        own_node=node == own_node,
        before_own_node=before_node[:, own_node, None],  # [G, 1]
        node_of=in_node.T,
        before_node_of=before_node[:, node],  # [G, R]
    )


def _placement_tables(placement: Placement, source: Source) -> dict[str, np.ndarray]:
    """Where to start: even shares [E, R], and for every source and expert the nearest holder."""
    holders, home, node = placement.holders, placement.home, source.node
    even = holders / holders.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_even = np.log(even)  # -inf: never a holder
    nearest = np.tile(home, (placement.num_ranks, 1))  # [R, E] itself, else one on its node (the home first), else home
    for g in range(int(node.max()) + 1):
        members = np.flatnonzero(node == g)
        held = holders[:, members]
        nearest[members] = np.where(held.any(axis=1) & (node[home] != g), members[held.argmax(axis=1)], home)
    nearest = np.where(holders.T, np.arange(placement.num_ranks)[:, None], nearest)
    position = np.arange(placement.num_experts) * placement.num_ranks + nearest[source.rank]  # [N, E] in [E, R]
    return dict(held=holders.astype(float), even=even, log_even=log_even, nearest=position.reshape(-1))


def _upload(tables: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """All ``tables`` in one copy: integers as int64, the rest as float64, so that they can lie in one buffer."""
    wide = {name: np.asarray(t, np.int64 if t.dtype.kind == "i" else np.float64) for name, t in tables.items()}
    flat = torch.from_numpy(np.concatenate([t.reshape(-1).view(np.int64) for t in wide.values()]))
    if (
        device.type == "cuda"
    ):  # the pinned buffer is not used again before the copy is done: torch's allocator sees to it
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([t.size for t in wide.values()])
    return {
        name: (part if t.dtype == np.int64 else part.view(torch.float64)).view(t.shape)
        for (name, t), part in zip(wide.items(), parts, strict=True)
    }
