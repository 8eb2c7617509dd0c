"""Recommendation of `what_if`: settings of FSSDP, or stock Megatron, and the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_hecate.offline.simulated_job import Outcome

# share of a step: a smaller gain is within the error of the simulation
WORTH: float = 0.03
# largest relative error of a modelled step: see docs/what-if-checks.md
ERROR: float = 0.45
# share of a step: among ways whose steps differ by less, the one with least memory is recommended
ALIKE: float = 0.005


def recommend(
    outcomes: Sequence[Outcome], capacity: float, *, error: float = 0.0
) -> tuple[Outcome | None, str]:
    """Choose one of the ``outcomes`` of `SimulatedJob.compare`, or ``None``, and give the reason.

    Args:
        outcomes: forced balance, stock Megatron, and the settings of FSSDP.
        capacity: memory of a rank in bytes; 0 if unknown.
        error: largest relative error of the time of a step; 0 if the time was measured.
    """
    forced, stock = outcomes[:2]
    ways = outcomes[2:]
    most = capacity or math.inf
    if not ways:
        return None, "do not switch it on: there are no slots, or experts are not spread over ranks"
    if stock.memory.total >= most:
        return None, (
            f"stock itself does not fit: its experts take {stock.memory.total / 2**30:.1f} of "
            f"{most / 2**30:.0f} GiB of a rank; spread them over more expert-parallel ranks (--ep) "
            "or pipeline stages (--pp)"
        )
    fits = [way for way in ways if way.memory.total < most]
    if not fits:
        least = min(way.memory.total for way in ways)
        return None, (
            f"do not switch it on: experts with replicas take {least / 2**30:.1f} of "
            f"{most / 2**30:.0f} GiB of a rank, without {stock.memory.total / 2**30:.1f}; "
            "simulate fewer --slots, or --lifetime layer"
        )
    # The seconds to win hardly depend on the rest of the step, but their share of it does.
    enough = WORTH * (1 + error)
    best = _smallest_of_fastest(fits, within=(1 - enough) * stock.seconds)
    gain = 1 - best.seconds / stock.seconds
    lost = 1 - forced.seconds / stock.seconds
    memory = best.memory.replicas
    if capacity:
        price = f"{memory / capacity:.1%} of memory"
    else:
        price = f"{best.memory.added:.1%} of the experts' memory"
    costs = f"imbalance costs {_share(lost, error)}"
    # Beyond forced balance: replicas keep tokens on their node.
    if gain > lost:
        costs += "; replicas save messages, too"
    reason = (
        f"{_share(gain, error)} of a step to win ({costs}), for {memory / 2**30:.2f} GiB, {price}"
    )
    if gain < WORTH * (1 - error):
        return None, f"do not switch it on: {reason}"
    if gain < enough:
        return None, f"no verdict without the time of a stock step, --step-ms: {reason}"
    return best, f"switch it on, {flags_of(best)}: {reason}"


def _share(gain: float, error: float) -> str:
    """Format a share of a step whose time may be off by a relative ``error``."""
    if not error:
        return f"{gain:.1%}"
    low, high = (f"{gain / (1 + sign * error):.1%}" for sign in (1, -1))
    return low if low == high else f"{low} to {high}"


def _smallest_of_fastest(ways: Sequence[Outcome], *, within: float) -> Outcome:
    """Choose the way with least memory among the ways that are about as fast as the fastest.

    If the fastest takes at most ``within`` seconds, so does the chosen way.
    """
    fastest = min(way.seconds for way in ways)
    near = [way for way in ways if way.seconds <= (1 + ALIKE) * fastest]
    if fastest <= within:
        near = [way for way in near if way.seconds <= within]
    return min(near, key=lambda way: (way.memory.total, way.late, way.rehome, way.seconds))


def flags_of(way: Outcome) -> str:
    """Format the flags that select ``way``."""
    flags = f"--moe-fssdp-slots {way.slots} --moe-fssdp-lifetime {way.lifetime}"
    if way.late:
        flags += f" --moe-fssdp-late-replicas {way.late}"
    if way.rehome:
        flags += f" --moe-fssdp-rehome {way.rehome}"
    return flags
