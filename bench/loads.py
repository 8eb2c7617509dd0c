"""Recorded and synthetic loads for planners.

A load is ``counts [T, L, R, E]``: in step t and layer l, the (token, expert) pairs that rank r
routes to expert e. All random values are drawn from a seed and the load's name, so that equal calls
return equal counts.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent / "data"
# sizes of the synthetic loads: experts, and (token, expert) pairs that a rank routes per step
EXPERTS: int = 64
PAIRS: int = 4096
# Upper bound of pairs in a step and layer: planners that count in float64 are exact up to here.
MOST: int = 2**53
# upper bound of pairs from which numpy can draw without replacement
MOST_DEALT: int = 10**9 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Recorded load.

    Args:
        name: name in tables.
        counts: pairs of source n for expert e, [T, L, N, E] int.
    """

    name: str
    counts: np.ndarray

    @classmethod
    def read(cls, path: Path | str) -> Trace:
        """Read ``counts [steps, layers, sources, experts]`` from an .npz.

        Raises:
            ValueError: if the file is missing or not an .npz, or its counts are missing or invalid.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            with np.load(path, allow_pickle=False) as archive:
                if "counts" not in archive.files:
                    raise ValueError(f"it holds {archive.files} and no 'counts'")
                counts = archive["counts"]
        # zipfile, zlib, numpy and its header's tokenizer each raise exceptions of their own.
        except Exception as error:
            expected = "an .npz with counts [steps, layers, sources, experts]"
            raise ValueError(f"{path}: expected {expected}; {error}") from error
        _check_counts(counts, path)
        return cls(name=path.stem, counts=counts.astype(np.int64))

    def to_ranks(self, num_ranks: int, *, seed: int = 0) -> np.ndarray:
        """Distribute the load over ``num_ranks`` ranks.

        Every rank gets neighbouring sources, or a random part of one source. With more ranks than
        sources, a source's pairs are dealt to its ranks without replacement.

        Args:
            num_ranks: number of ranks, R.
            seed: seed of the random parts.

        Returns:
            Counts [T, L, R, E] int.

        Raises:
            ValueError: if neither number divides the other, or a source has too many pairs to deal.
        """
        steps, layers, sources, experts = self.counts.shape
        if sources % num_ranks == 0:
            return self.counts.reshape(steps, layers, num_ranks, -1, experts).sum(axis=3)
        if num_ranks % sources:
            raise ValueError(
                f"{self.name}: {num_ranks} ranks and {sources} sources; "
                "one must be a multiple of the other"
            )
        if (most := self.counts.sum(axis=-1).max()) > MOST_DEALT:
            raise ValueError(
                f"{self.name}: a source of {most} pairs is too large to deal to several ranks, "
                f"{MOST_DEALT} at most; scale the counts down or use at most {sources} ranks"
            )
        parts = num_ranks // sources
        rng = np.random.default_rng([seed, zlib.crc32(f"{self.name} {num_ranks}".encode())])
        out = np.empty((steps, layers, sources, parts, experts), dtype=np.int64)
        for index in np.ndindex(steps, layers, sources):
            # Without replacement, so that the parts of a source sum to its counts.
            left = self.counts[index].copy()
            for part in range(parts - 1):
                size = int(left.sum()) // (parts - part)
                out[index][part] = rng.multivariate_hypergeometric(left, size)
                left -= out[index][part]
            out[index][parts - 1] = left
        return out.reshape(steps, layers, num_ranks, experts)


def _check_counts(counts: np.ndarray, path: Path) -> None:
    """Raise ValueError if ``counts`` is not a load."""
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


# (ranks, steps, rng) -> expected shares [T, L, E]
Shares = Callable[[int, int, np.random.Generator], np.ndarray]


def synthetic_names() -> list[str]:
    """List the names of all synthetic loads."""
    return list(_SYNTHETIC)


def synthetic(name: str, num_ranks: int, *, steps: int, seed: int = 0) -> np.ndarray:
    """Draw a synthetic load with `PAIRS` pairs per rank and step.

    Args:
        name: name of the load.
        num_ranks: number of ranks, R.
        steps: number of steps, T.
        seed: seed of the draws.

    Returns:
        Counts [T, L, R, E] int64.

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
    """Solve for Zipf shares with a given imbalance of ranks.

    An expert's share is proportional to ``1 / position**s``; bisection finds s.

    Args:
        num_experts: number of experts, E.
        num_ranks: number of ranks, R; rank r is home to experts ``r * E/R`` and following.
        ratio: max / mean rank load to reach, from 1 up to (but not including) R.
        order: expert at each position, hottest first, [E].

    Returns:
        Share of each expert, [E].

    Raises:
        ValueError: for a ratio out of range.
    """
    if not 1 <= ratio < num_ranks:
        raise ValueError(
            f"a max/mean rank load of {ratio} is out of range for {num_ranks} ranks: "
            f"[1, {num_ranks})"
        )
    position = np.empty(num_experts)
    position[order] = np.arange(1, num_experts + 1)

    def shares(exponent: float) -> np.ndarray:
        share = position**-exponent
        return share / share.sum()

    def reached(exponent: float) -> float:
        return float(shares(exponent).reshape(num_ranks, -1).sum(axis=1).max() * num_ranks)

    low = 0.0
    high = 1.0
    while reached(high) < ratio:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if reached(middle) < ratio:
            low = middle
        else:
            high = middle
    return shares(high)


def _constant(share: np.ndarray, steps: int) -> np.ndarray:
    return np.broadcast_to(share, (steps, 1, len(share)))


def _zipf(ratio: float) -> Shares:
    return lambda ranks, steps, rng: _constant(
        zipf_shares(EXPERTS, ranks, ratio=ratio, order=rng.permutation(EXPERTS)), steps
    )


def _hot(percent: float, experts: int) -> Shares:
    """Give ``percent`` of the tokens to ``experts`` experts, the rest evenly to all others."""

    def shares(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
        share = np.full(EXPERTS, (100 - percent) / (EXPERTS - experts))
        share[rng.choice(EXPERTS, experts, replace=False)] = percent / experts
        return _constant(share, steps)

    return shares


def _hotspot(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Give a tenth of the tokens to each of three experts, and change the experts every 8 steps."""
    share = np.full((steps, 1, EXPERTS), 0.7 / (EXPERTS - 3))
    order = rng.permutation(EXPERTS)
    for t in range(steps):
        hot = order[np.arange(3) + 3 * (t // 8) % (EXPERTS - 3)]
        share[t, 0, hot] = 0.1
    return share


def _burst(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a mild Zipf load with bursts.

    Every 10 steps, for 2 steps, three random experts take half of the tokens.
    """
    mild = zipf_shares(EXPERTS, ranks, ratio=1.3, order=rng.permutation(EXPERTS))
    share = _constant(mild, steps).copy()
    for start in range(5, steps, 10):
        share[start : start + 2] *= 0.5
        share[start : start + 2, :, rng.choice(EXPERTS, 3, replace=False)] += 0.5 / 3
    return share


def _domains(ranks: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Repeat OLMoE's expert counts in three layers; the text's domain changes every 10 steps."""
    counts = json.loads((DATA / "olmoe_counts.json").read_text())["counts"]["olmoe"]
    by_domain = []
    for domain in sorted(counts):
        layers = counts[domain]
        by_domain.append([layers[layer] for layer in sorted(layers)])
    share = np.array(by_domain, dtype=float)
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
