"""Slow rank or hot expert: each rank's time in its experts against the tokens that it computed.

A rank that others wait for either got more tokens, which replicas balance, or needs more time for
each token: a throttled GPU, a busy host, a failing link. A balanced load does not help the latter.

The model of a rank's time in one iteration is ``pace * (overhead + tokens)``, with an overhead that
is equal for all ranks: launches, and weights that are read however few tokens there are. A rank's
pace is compared with the median of the other ranks in the same iteration, so that a cause that
slows all ranks cancels. Letters in shapes: T iterations, N ranks.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable

import numpy as np

# A rank is slow or hot from this excess over the other ranks on.
MARGIN: float = 0.10
# Iterations that a verdict is about, and iterations without which there is none.
WINDOW: int = 32
FEWEST: int = 8
# Standard errors by which an excess must differ from zero.
SIGNIFICANCE: float = 5.0
# Iterations of the fit of the overhead, candidates for it, and the largest over the mean of tokens.
FITTED: int = 64
CANDIDATES: int = 24
MOST_OVERHEAD: float = 4.0
# Weight of the ranks' equality against the rest of the fit.
EQUALITY: float = 0.02
# Tokens over the mean of ranks from which a time counts.
SCARCE: float = 0.1
# Standard deviations in a median absolute deviation of normal noise.
DEVIATION: float = 1.4826


@dataclasses.dataclass(frozen=True)
class RankSpeed:
    """Verdict about one rank over the last iterations.

    Args:
        rank: rank in the group of the layers.
        pace: time for its tokens over the median of the other ranks' time for as many; NaN without
            enough measurements.
        load: its tokens over the mean of ranks.
        is_slow: True if the pace exceeds the others' by `MARGIN`, beyond noise.
        is_hot: True if the tokens exceed the mean by `MARGIN`, beyond noise.
    """

    rank: int
    pace: float
    load: float
    is_slow: bool
    is_hot: bool

    @property
    def verdict(self) -> str:
        """Return "slow", "hot", "slow and hot" or "neither"."""
        kinds = [kind for kind, holds in (("slow", self.is_slow), ("hot", self.is_hot)) if holds]
        return " and ".join(kinds) or "neither"

    def describe(self, name: str) -> str:
        """Format the verdict about the rank of this name as a clause."""
        parts: list[str] = []
        if self.is_slow:
            parts.append(f"slow: {self.pace:.2f} times the other ranks' time per token")
        if self.is_hot:
            explained = "" if self.is_slow else ", at the other ranks' time per token"
            parts.append(f"hot: {self.load:.2f} times the mean of tokens{explained}")
        return f"{name} is {' and '.join(parts) or 'neither slow nor hot'}"


def rank_speeds(seconds: np.ndarray, tokens: np.ndarray, loads: np.ndarray) -> list[RankSpeed]:
    """Find slow and hot ranks by the last `WINDOW` iterations.

    Few ranks whose loads never change leave a doubt: a large overhead explains a rank with few
    tokens as well as a slow pace does, and no rank is called slow then.

    Args:
        seconds: measured time in experts, [T, N]; 0 where nothing was measured.
        tokens: tokens computed in that time, [T, N].
        loads: tokens computed in the whole iteration, [T, N].

    Returns:
        One verdict per rank; empty for less than two ranks.
    """
    ranks = loads.shape[1]
    if ranks < 2:
        return []
    load = _over_mean(loads[loads.any(axis=1)][-WINDOW:].astype(np.float64))
    # A few tokens take hardly longer than none, so their time says little about the pace.
    is_busy = tokens > SCARCE * tokens.mean(axis=1, keepdims=True)
    measured = is_busy & (seconds > 0)
    # A single measured rank has none to be compared with.
    compared = measured.sum(axis=1) > 1
    pace = _paces(np.where(measured, seconds, np.nan)[compared], tokens[compared])
    verdicts: list[RankSpeed] = []
    for rank in range(ranks):
        rank_pace = pace[~np.isnan(pace[:, rank]), rank][-WINDOW:]
        verdicts.append(
            RankSpeed(
                rank=rank,
                pace=_median(rank_pace),
                load=_median(load[:, rank]),
                is_slow=_exceeds(rank_pace),
                is_hot=_exceeds(load[:, rank]),
            )
        )
    return verdicts


def slowest_pace(speeds: Iterable[RankSpeed]) -> float:
    """Return the largest pace of a rank; NaN without measurements."""
    return max((speed.pace for speed in speeds if not math.isnan(speed.pace)), default=math.nan)


def _over_mean(tokens: np.ndarray) -> np.ndarray:
    return tokens / tokens.mean(axis=1, keepdims=True)


def _paces(seconds: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return each rank's pace over the median pace of the other ranks, [T, N].

    Args:
        seconds: measured times, [T, N]; NaN where a rank was not measured.
        tokens: tokens computed in that time, [T, N].
    """
    if not len(seconds):
        return np.empty_like(seconds)
    paces = seconds / (_overhead_in_tokens(seconds, tokens) + tokens)
    relative = np.empty_like(paces)
    for rank in range(paces.shape[1]):
        other_paces = np.delete(paces, rank, axis=1)
        relative[:, rank] = paces[:, rank] / _nanmedian(other_paces, axis=1)
    return relative


def _overhead_in_tokens(seconds: np.ndarray, tokens: np.ndarray) -> float:
    """Fit the overhead of an iteration, in tokens that take as long.

    For every candidate the logarithms of the paces are split into a part of the iteration, a part
    of the rank and a rest, by medians (Tukey's median polish, one sweep). The best candidate leaves
    the smallest rest: the same rank with more tokens is as fast as with fewer. Where loads hardly
    change, all candidates leave the same rest, and the one with the most equal ranks is best.
    """
    recent_seconds = np.log(seconds[-FITTED:])
    # Candidate 0 would divide by the tokens of a rank without any.
    recent_tokens = np.where(np.isnan(recent_seconds), 1, tokens[-FITTED:])
    candidates = np.concatenate([[0.0], np.geomspace(0.01, MOST_OVERHEAD, CANDIDATES)])
    candidates *= recent_tokens.mean()

    def spread(overhead: float) -> float:
        paces = recent_seconds - np.log(overhead + recent_tokens)
        paces = paces - _nanmedian(paces, axis=1)[:, None]
        medians = _nanmedian(paces, axis=0)
        deviation = np.nanmean(np.abs(paces - medians))
        return float(deviation + EQUALITY * np.nanmean(np.abs(medians)))

    return min(candidates.tolist(), key=spread)


def _nanmedian(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the median of the known values; NaN without any."""
    with warnings.catch_warnings():
        # numpy warns about rows without known values.
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmedian(values, axis=axis)


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) >= FEWEST else float("nan")


def _exceeds(ratios: np.ndarray) -> bool:
    """Return whether ``ratios`` [T] exceed 1 by `MARGIN`, beyond their noise."""
    if len(ratios) < FEWEST:
        return False
    middle = np.median(ratios)
    deviation = DEVIATION * np.median(np.abs(ratios - middle))
    error = deviation / np.sqrt(len(ratios))
    return bool(middle > 1 + MARGIN and middle - 1 > SIGNIFICANCE * error)
