"""Slow ranks and hot ranks. Oracle: the paces and loads that simulated times were made from."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hecate.record.rank_speed import FEWEST, rank_speeds, slowest_pace

pytestmark = pytest.mark.fast

ITERATIONS = 100
PACE, HEAT = 1.5, 2.0


def simulate(
    seed: int,
    *,
    ranks: int,
    overhead: float,
    varies: float,
    slow: int | None = None,
    hot: int | None = None,
    since: int = 0,
    noise: float = 0.03,
    bursts: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Make times [T, N] in seconds and tokens [T, N].

    Every iteration has a pace of its own on all ranks, as under power limits; ``bursts`` of all
    samples take three times as long.
    """
    random = np.random.default_rng(seed)
    shape = (ITERATIONS, ranks)
    tokens = np.full(shape, 1000.0)
    if hot is not None:
        tokens[:, hot] *= HEAT
    tokens = (tokens * np.exp(varies * random.standard_normal(shape))).round()
    pace = np.exp(0.2 * random.standard_normal((ITERATIONS, 1))) * np.ones(ranks)
    if slow is not None:
        pace[since:, slow] *= PACE
    seconds = 1e-6 * pace * (overhead + tokens) * np.exp(noise * random.standard_normal(shape))
    return seconds * np.where(random.random(shape) < bursts, 3, 1), tokens


CASES = {
    "neither": {},
    "slow": {"slow": 1},
    "hot": {"hot": 1},
    "both": {"slow": 1, "hot": 1},
    "one slow, another hot": {"slow": 0, "hot": 1},
    "slow among disturbed": {"slow": 1, "bursts": 0.1},
    "noise": {"noise": 0.15},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("overhead", [0, 300, 2000])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_slow_and_hot_ranks_are_found(case: str, ranks: int, overhead: float) -> None:
    given = CASES[case]
    for seed in range(3):
        seconds, tokens = simulate(seed, ranks=ranks, overhead=overhead, varies=0.2, **given)
        found = rank_speeds(seconds, tokens, tokens)
        for rank, speed in enumerate(found):
            assert speed.is_slow == (rank == given.get("slow")), speed
            assert speed.is_hot == (rank == given.get("hot")), speed
            if speed.is_slow:
                assert speed.pace == pytest.approx(PACE, rel=0.1)
            if speed.is_hot:
                assert speed.load == pytest.approx(HEAT * ranks / (ranks - 1 + HEAT), rel=0.15)


def test_the_last_iterations_decide() -> None:
    """A rank that has recovered is not slow any more, and one that was slow from the 60th on is."""
    seconds, tokens = simulate(0, ranks=8, overhead=300, varies=0.2, slow=5, since=60)
    found = rank_speeds(seconds, tokens, tokens)
    assert [speed.rank for speed in found if speed.is_slow] == [5]
    for part in (slice(0, 60), slice(None, None, -1)):
        found = rank_speeds(seconds[part], tokens[part], tokens[part])
        assert not any(speed.is_slow for speed in found)


@pytest.mark.parametrize("given", [{"slow": 1}, {"hot": 1}, {}])
def test_loads_that_never_change(given: dict[str, int]) -> None:
    seconds, tokens = simulate(1, ranks=8, overhead=300, varies=0.0, **given)
    found = rank_speeds(seconds, tokens, tokens)
    assert [speed.rank for speed in found if speed.is_slow] == list(given.values())[
        : "slow" in given
    ]
    assert [speed.rank for speed in found if speed.is_hot] == list(given.values())[: "hot" in given]


def test_a_few_iterations_are_no_verdict() -> None:
    seconds, tokens = simulate(0, ranks=4, overhead=0, varies=0.2, slow=1, hot=2)
    few = slice(0, FEWEST - 1)
    for speed in rank_speeds(seconds[few], tokens[few], tokens[few]):
        assert speed.verdict == "neither" and np.isnan(speed.pace)


def test_nothing_measured() -> None:
    """As under CUDA graphs of experts: loads are known, times are not."""
    _, tokens = simulate(0, ranks=4, overhead=0, varies=0.2, hot=2)
    nothing = np.zeros_like(tokens)
    found = rank_speeds(nothing, nothing, tokens)
    assert [speed.verdict for speed in found] == ["neither", "neither", "hot", "neither"]
    assert rank_speeds(nothing[:, :1], nothing[:, :1], tokens[:, :1]) == []


def test_the_slowest_of_the_ranks_that_were_measured() -> None:
    """The first rank never gets a token, and has no pace."""
    seconds, tokens = simulate(0, ranks=4, overhead=0, varies=0.2, slow=1)
    tokens[:, 0] = seconds[:, 0] = 0
    found = rank_speeds(seconds, tokens, tokens)
    assert np.isnan(found[0].pace)
    assert slowest_pace(found) == pytest.approx(PACE, rel=0.1)
    assert np.isnan(slowest_pace(found[:1]))
