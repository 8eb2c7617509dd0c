"""The benchmark of moved homes, and the paper's Algorithm 2 in it.

Oracles: `bench/balance.py`, which replays contiguous homes on its own, and an assignment worked out by hand.
"""

from __future__ import annotations

import argparse
import dataclasses

import balance
import homes
import numpy as np
import pytest
from cases import Case, cases
from rivals.algorithm2 import algorithm2, with_homes
from rivals.hecate import Hecate

from megatron_hecate.plan import World

pytestmark = pytest.mark.fast


@pytest.fixture
def case() -> Case:
    sizes = dict(pairs=16384, hidden=2048, ffn=768, microbatches=1, hidden_us=650, measured=None)
    chosen = dict(trace=[], load="zipf-4", ranks=[16], slots=1, steps=17, skip=0, per_node=8)
    return next(iter(cases(argparse.Namespace(**sizes, **chosen))))


def test_contiguous_homes_are_replayed_as_in_the_other_benchmark(case: Case) -> None:
    out = homes.replay(case, homes.Homes(case.setting, 1, horizon=100), interval=0, skip=4)
    figures = balance.replay(Hecate, case).figures
    for name in ("imbalance", "copies", "inter_gb", "crossing", "seconds"):
        assert getattr(out, name) == pytest.approx(figures[name][4 :: homes.STRIDE].mean()), name
    assert out.moved == out.moving == 0


@pytest.mark.parametrize("kind", [homes.Moved, homes.Uneven, homes.Paper])
def test_every_token_has_a_holder_wherever_homes_move(case: Case, kind: type[homes.Homes]) -> None:
    """`replay` checks every plan; moves are counted from the homes, which all stay somewhere."""
    without = dataclasses.replace(case, setting=dataclasses.replace(case.setting, slots=0))
    moved = kind(without.setting, 1, horizon=10_000)
    out = homes.replay(without, moved, interval=8, skip=4)
    assert out.moved > 0
    assert out.moving > 0
    assert len(moved.by_expert()[0]) == 64


def test_algorithm_2_as_printed() -> None:
    """Two layers, two ranks of one node, one overloaded expert each.

    Layer 1 has the larger load of the others (4) and comes first: 4 to rank 0, 2 and 1 to rank 1. That leaves room for
    two more on rank 1, and for three on rank 0. The others of layer 0 have 1 each: the first goes to the rank with less
    room, rank 1, the second to rank 0, the third to rank 1 again, which is full. So both overloaded ones go to rank 0.
    """
    found = algorithm2(np.array([[9, 1, 1, 1], [5, 4, 2, 1]]), World((0, 0)), overlap_degree=1)
    assert found.tolist() == [[0, 1, 0, 1], [0, 0, 1, 1]]
    with pytest.raises(ValueError, match="1 x 3 experts are not divisible by 2 ranks"):
        algorithm2(np.ones((1, 3)), World((0, 0)), overlap_degree=1)


def test_uneven_homes_leave_every_rank_its_slots() -> None:
    placement = with_homes(np.array([0, 1, 1, 1]), 2, num_slots=2)
    assert placement.table.tolist() == [[0, -1, -1, -1, -1], [1, 2, 3, -1, -1]]
