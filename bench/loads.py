"""Loads to plan for: recorded traces, and the synthetic ones people use.

A load is ``counts [T, L, R, E]``: in step t and layer l, the (token, expert) pairs that rank r routes to expert e.
Everything random is drawn from a seed and the load's name, so that the same call gives the same counts.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent / "data"
EXPERTS: int = 64  # of the synthetic loads
PAIRS: int = 4096  # (token, expert) pairs that a rank routes per step in the synthetic loads
MOST: int = (
    2**53
)  # pairs in a step and layer: the planners that count in floats still count these exactly
MOST_DEALT: int = 10**9 - 1  # pairs of one source that numpy can draw from without replacement


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A recording.

    Args:
        name: for tables.
        counts: [T, L, N, E] int, pairs of source n for expert e.
    """

    name: str
    counts: np.ndarray

    @classmethod
    def read(cls, path: Path | str) -> Trace:
        """Read ``counts [steps, layers, sources, experts]`` from an .npz.

        Raises:
            ValueError: if the file is missing, is no .npz, or its counts are missing or no counts.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            with np.load(path, allow_pickle=False) as archive:
                if "counts" not in archive.files:
                    raise ValueError(f"it holds {archive.files} and no 'counts'")
                counts = archive["counts"]
        except Exception as error:  # zip, zlib, numpy and the tokenizer it uses have their own
            expected = "an .npz with counts [steps, layers, sources, experts]"
            raise ValueError(f"{path}: expected {expected}; {error}") from error
        if counts.ndim != 4 or not counts.size:
            raise ValueError(
                f"{path}: counts has shape {counts.shape}, expected [steps, layers, sources, experts]"
            )
        if counts.dtype.kind not in "iuf":
            raise ValueError(f"{path}: counts is {counts.dtype}, expected integers")
        if (bad := ~np.isfinite(counts) | (counts != np.floor(counts))).any():
            raise ValueError(
                f"{path}: counts holds values that are no integers (first: {counts[bad][0]})"
            )
        if counts.min() < 0:
            raise ValueError(f"{path}: counts holds negative values (least: {counts.min()})")
        with np.errstate(over="ignore"):
            most = counts.sum(axis=(2, 3), dtype=float).max()
        if most > MOST:
            raise ValueError(
                f"{path}: counts sum to {most:.3g} in a step and layer, more than 2^53; scale them down"
            )
        return cls(name=path.stem, counts=counts.astype(np.int64))

    def to_ranks(self, num_ranks: int, *, seed: int = 0) -> np.ndarray:
        """[T, L, R, E] int: every rank gets neighbouring sources, or a random part of one.

        Where ranks outnumber sources, a source's pairs are dealt to its ranks without replacement.

        Raises:
            ValueError: if neither number divides the other, or a source has too many pairs to deal.
        """
        steps, layers, sources, experts = self.counts.shape
        if sources % num_ranks == 0:
            return self.counts.reshape(steps, layers, num_ranks, -1, experts).sum(axis=3)
        if num_ranks % sources:
            raise ValueError(
                f"{self.name}: {num_ranks} ranks and {sources} sources; one must be a multiple of the other"
            )
        if (most := self.counts.sum(axis=-1).max()) > MOST_DEALT:
            raise ValueError(
                f"{self.name}: a source of {most} pairs is too large to deal to several ranks, {MOST_DEALT} at most; "
                f"scale the counts down or use at most {sources} ranks"
            )
        parts = num_ranks // sources
        rng = np.random.default_rng([seed, zlib.crc32(f"{self.name} {num_ranks}".encode())])
        out = np.empty((steps, layers, sources, parts, experts), dtype=np.int64)
        for index in np.ndindex(steps, layers, sources):
            left = self.counts[index].copy()
            for part in range(parts - 1):
                size = int(left.sum()) // (parts - part)
                out[index][part] = rng.multivariate_hypergeometric(left, size)
                left -= out[index][part]
            out[index][parts - 1] = left
        return out.reshape(steps, layers, num_ranks, experts)


Shares = Callable[
    [int, int, np.random.Generator], np.ndarray
]  # (ranks, steps, rng) -> [T, L, E] expected shares


def synthetic_names() -> list[str]:
    return list(_SYNTHETIC)


def synthetic(name: str, num_ranks: int, *, steps: int, seed: int = 0) -> np.ndarray:
    """[T, L, R, E] counts of a synthetic load, `PAIRS` per rank and step.

    Raises:
        ValueError: for an unknown name, or experts that do not divide among the ranks.
    """
    if name not in _SYNTHETIC:
        raise ValueError(f"no load is named {name!r}; there are {', '.join(_SYNTHETIC)}")
    if EXPERTS % num_ranks:
        raise ValueError(f"{name}: {EXPERTS} experts do not divide among {num_ranks} ranks")
    if name == "balanced":
        return np.full((steps, 1, num_ranks, EXPERTS), PAIRS // EXPERTS)
    rng = np.random.default_rng([seed, zlib.crc32(f"{name} {num_ranks}".encode())])
    shares = _SYNTHETIC[name](num_ranks, steps, rng)
    shares = shares / shares.sum(axis=-1, keepdims=True)
    return rng.multinomial(PAIRS, np.repeat(shares[:, :, None], num_ranks, axis=2)).astype(np.int64)


def zipf_shares(num_experts: int, num_ranks: int, *, ratio: float, order: np.ndarray) -> np.ndarray:
    """[E] shares ``1 / position**s``, with s such that the largest rank load is ``ratio`` times the mean.

    Args:
        num_experts: E.
        num_ranks: R; rank r is home to experts ``r * E/R`` and following.
        ratio: max / mean rank load to reach, from 1 up to (but not including) R.
        order: [E] the expert at each position, hottest first.

    Raises:
        ValueError: for a ratio out of range.
    """
    if not 1 <= ratio < num_ranks:
        raise ValueError(
            f"a max/mean rank load of {ratio} is out of range for {num_ranks} ranks: [1, {num_ranks})"
        )
    position = np.empty(num_experts)
    position[order] = np.arange(1, num_experts + 1)

    def shares(exponent: float) -> np.ndarray:
        share = position**-exponent
        return share / share.sum()

    def reached(exponent: float) -> float:
        return float(shares(exponent).reshape(num_ranks, -1).sum(axis=1).max() * num_ranks)

    low, high = 0.0, 1.0
    while reached(high) < ratio:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < ratio else (low, middle)
    return shares(high)


def _constant(share: np.ndarray, steps: int) -> np.ndarray:
    return np.broadcast_to(share, (steps, 1, len(share)))


def _zipf(ratio: float) -> Shares:
    return lambda ranks, steps, rng: _constant(
        zipf_shares(EXPERTS, ranks, ratio=ratio, order=rng.permutation(EXPERTS)), steps
    )


def _hot(percent: float, experts: int) -> Shares:
    """``percent`` of the tokens go to ``experts`` experts, the rest evenly to the others."""

    def shares(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
        share = np.full(EXPERTS, (100 - percent) / (EXPERTS - experts))
        share[rng.choice(EXPERTS, experts, replace=False)] = percent / experts
        return _constant(share, steps)

    return shares


def _hotspot(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """A tenth of the tokens on each of three experts, which are others every 8 steps."""
    share = np.full((steps, 1, EXPERTS), 0.7 / (EXPERTS - 3))
    order = rng.permutation(EXPERTS)
    for t in range(steps):
        share[t, 0, order[np.arange(3) + 3 * (t // 8) % (EXPERTS - 3)]] = 0.1
    return share


def _burst(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """A mild Zipf load; every 10 steps, for 2 steps, three random experts take half of the tokens."""
    share = _constant(
        zipf_shares(EXPERTS, ranks, ratio=1.3, order=rng.permutation(EXPERTS)), steps
    ).copy()
    for start in range(5, steps, 10):
        share[start : start + 2] *= 0.5
        share[start : start + 2, :, rng.choice(EXPERTS, 3, replace=False)] += 0.5 / 3
    return share


def _domains(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """OLMoE's expert counts in three layers; the text's domain changes every 10 steps."""
    counts = json.loads((DATA / "olmoe_counts.json").read_text())["counts"]["olmoe"]
    share = np.array(
        [[counts[d][layer] for layer in sorted(counts[d])] for d in sorted(counts)], dtype=float
    )
    share /= share.sum(axis=-1, keepdims=True)
    return share[np.arange(steps) // 10 % len(share)]


_SYNTHETIC: dict[str, Shares | None] = {
    "balanced": None,
    "uniform": lambda ranks, steps, rng: _constant(np.ones(EXPERTS), steps),
    "zipf-2": _zipf(2.0),
    "zipf-4": _zipf(4.0),
    "50%-to-4": _hot(50, 4),
    "80%-to-4": _hot(80, 4),
    "hotspot": _hotspot,
    "burst": _burst,
    "domains": _domains,
}
