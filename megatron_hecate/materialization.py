"""Which guests of a layer stand in which rows of the ranks' slot memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatron_hecate.collectives import Route
from megatron_hecate.plan.placement import Placement
from megatron_hecate.schedule import Loan


@dataclasses.dataclass(frozen=True, eq=False)
class Materialization:
    """Which guests stand in which rows of a layer's frames, on all ranks, for one iteration.

    Args:
        placement: who is where.
        route: this rank's part.
        row_of: for every rank, the row of each of its guests, by expert.
        rank: this one.
    """

    placement: Placement
    route: Route
    row_of: tuple[Mapping[int, int], ...]
    rank: int

    @classmethod
    def of(cls, placement: Placement, rank: int) -> Materialization:
        rows = tuple({e: row for row, e in enumerate(experts)} for experts in _guests(placement))
        return cls(placement, Route.of(placement, rank), rows, rank)

    @property
    def rows(self) -> tuple[int, ...]:
        """This rank's, in the order of ``route.experts``."""
        return tuple(self.row_of[self.rank][e] for e in self.route.experts)

    def corrected(self, placement: Placement) -> tuple[Materialization, Route]:
        """That of ``placement``, in which guests that stay keep their rows; and the route of those that are new."""
        rows = []
        for old, experts in zip(self.row_of, _guests(placement), strict=True):
            kept = {e: old[e] for e in experts if e in old}
            free = iter(row for row in range(len(experts) + len(old)) if row not in kept.values())
            rows.append({e: kept[e] if e in kept else next(free) for e in experts})
        route, late = Route.of(placement, self.rank), Route.of(placement, self.rank, beyond=self.placement)
        return Materialization(placement, route, tuple(rows), self.rank), late

    def loans(self, beyond: Placement | None = None) -> list[Loan]:
        """Every guest, or those that ``beyond`` does not have, with home index and row."""
        index: dict[int, int] = {}
        for rank, experts in enumerate(self.placement.table):
            own = [int(e) for e in experts if e >= 0 and self.placement.home[e] == rank]
            index |= {e: i for i, e in enumerate(own)}
        return [
            Loan(int(self.placement.home[e]), index[e], host, self.row_of[host][e])
            for e, host, _ in self.placement.guests
            if beyond is None or not beyond.holders[e, host]
        ]


def _guests(placement: Placement) -> list[list[int]]:
    """Every rank's guests, in order of their slots."""
    return [row[guest].tolist() for row, guest in zip(placement.table, np.asarray(placement.is_guest), strict=True)]
