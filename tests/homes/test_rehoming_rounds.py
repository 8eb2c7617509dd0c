"""Experts move in rounds, piece by piece. Oracle: places on paper, on which the rounds are carried out one after another.

That pieces arrive is seen, bitwise, where optimizers are sharded (`test_optimizers`, `test_rehoming_loops`).
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hecate.homes import mover

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("bound", [0, 1, 3, 7, 1000])
def test_rounds_lead_to_the_wanted_order_within_the_bound(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "ROUND_BYTES", 10 * bound)
    for seed in range(100):
        _check_rounds(seed, bound, expert_bytes=10)


def _check_rounds(seed: int, bound: int, *, expert_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, per_rank = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    before, after = (rng.permutation(num_ranks * per_rank) for _ in range(2))
    if seed % 4 == 0:  # a few swaps: many places stay
        after = before.copy()
        for a, b in rng.integers(0, len(before), (3, 2)):
            after[[a, b]] = after[[b, a]]
    now, moved = before.copy(), []
    for moves in mover._rounds(before, after, per_rank, expert_bytes):
        sources, targets = ([move[i] for move in moves] for i in range(2))
        assert sorted(sources) == sorted(targets) and len(set(targets)) == len(targets), (
            "an expert would be lost"
        )
        now[targets] = now[sources]
        received = np.bincount(np.array(targets) // per_rank).max() * expert_bytes
        assert received <= bound * expert_bytes or _is_one_cycle(moves), (
            "a round is larger than it needs to be"
        )
        moved += targets
    assert now.tolist() == after.tolist()
    assert sorted(moved) == np.flatnonzero(before != after).tolist(), (
        "only what moves travels, and once"
    )


def _is_one_cycle(moves: list[tuple[int, int]]) -> bool:
    following, at, length = dict(moves), moves[0][0], 0
    while length == 0 or at != moves[0][0]:
        at, length = following[at], length + 1
    return length == len(moves)


def test_small_cycles_share_a_round() -> None:
    """Swaps between four ranks, where each receives one expert: one exchange, not two."""
    before, after = np.arange(8), np.array([2, 1, 0, 3, 6, 5, 4, 7])
    assert len(list(mover._rounds(before, after, 2, 10))) == 1
    assert not list(mover._rounds(before, before, 2, 10))
