"""The bound that no placement goes below: `bench/optimum.py`.

Oracle: every placement of small layers, one by one. If the program allowed too little, planners would be excused for
what they could do better.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from optimum import least_possible, main


def some_total(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """[E] about a million tokens, flat or steep, none without any."""
    share = (
        rng.pareto(0.7, num_experts)
        if rng.integers(2)
        else rng.dirichlet(np.full(num_experts, rng.choice([0.5, 2.0])))
    )
    return np.array(share * 1_000_000 + 1, dtype=np.int64)


def best_largest(total: np.ndarray, home: np.ndarray, slots: int, num_ranks: int) -> int:
    """The smallest largest load of all ways to fill the slots: by Hall's theorem, over all sets of ranks."""
    elsewhere = [[e for e in range(len(home)) if home[e] != r] for r in range(num_ranks)]
    choices = itertools.product(
        *(itertools.combinations(its, min(slots, len(its))) for its in elsewhere)
    )
    best = np.inf
    for choice in choices:
        held = [
            {int(home[e]), *(r for r in range(num_ranks) if e in choice[r])}
            for e in range(len(home))
        ]
        sets = (
            set(s)
            for n in range(1, num_ranks + 1)
            for s in itertools.combinations(range(num_ranks), n)
        )
        best = min(
            best,
            max(
                -(-sum(int(t) for t, h in zip(total, held, strict=True) if h <= s) // len(s))
                for s in sets
            ),
        )
    return int(best)


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_the_best_of_all_placements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_experts, slots = (
        int(rng.integers(1, 4)),
        int(rng.integers(1, 7)),
        int(rng.integers(1, 3)),
    )
    home = rng.integers(0, num_ranks, num_experts)
    total = some_total(rng, num_experts)
    best = best_largest(total, home, slots, num_ranks)
    found = least_possible(total, home, num_ranks=num_ranks, slots=slots)
    assert best * (1 - 2e-4) <= found <= best


def test_nothing_to_compute() -> None:
    assert least_possible(np.zeros(4, np.int64), np.array([0, 0, 1, 1]), num_ranks=2, slots=1) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "3"], "num_experts=64 is not divisible by 3 ranks"),
        (["--ranks", "1"], "slots=1 is out of range"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--slots", "60"], "slots=60 is out of range"),
        (["--trace", "none.npz"], "none.npz: no such file"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["optimum.py", *options])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert message in err and not out


def test_a_replay_prints_what_placements_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["optimum.py", "--steps", "3"])
    main()
    rows = [
        line.split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| pysrc")
    ]
    assert [row[3] for row in rows] == ["hecate-unpriced", "hecate-late", "any placement"] * 2
    for history, late, optimum in (rows[:3], rows[3:]):
        assert 1 <= float(optimum[4]) <= float(late[4]) <= float(history[4])
