"""Recommendation of `what_if`: settings of FSSDP, or stock Megatron, and the reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megatron_hecate.tools.replay import Outcome, Setup
from megatron_hecate.tools.step_model import ALL_TO_ALL, EXPERT_COMPUTE, PARTS

# share of a step: a smaller gain is within the error of the simulation
WORTH: float = 0.03
# largest relative error of a modelled step: see docs/what-if-checks.md
ERROR: float = 0.45
# share of a step: among setups whose steps differ by less, the one with least memory is recommended
ALIKE: float = 0.005

# Smallest and largest time of experts' GEMMs over the assumed time, as measured by NVIDIA on
# H100 (docs/what-if-checks.md).
EXPERT_TIMES: tuple[float, float] = (0.54, 1.15)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommendation with its reason.

    Args:
        best: recommended setup; ``None`` for stock, or without a verdict.
        considered: setup that was compared with stock; ``None`` without one.
        verdict: ``yes``, ``no`` or ``unknown``.
        text: sentence with the reason.
    """

    best: Outcome | None
    considered: Outcome | None
    verdict: str
    text: str


def recommend(
    outcomes: Sequence[Outcome],
    capacity: float,
    *,
    error: float = 0.0,
    measured_speeds: bool = False,
) -> Advice:
    """Choose one of the ``outcomes``, or stock, and give the reason.

    Args:
        outcomes: forced balance, stock Megatron, and the settings of FSSDP.
        capacity: memory of a rank in bytes; 0 if unknown.
        error: largest relative error of the time of a step; 0 if the time was measured.
        measured_speeds: whether the speeds of experts and links were measured.
    """
    forced, stock = outcomes[:2]
    setups = outcomes[2:]
    obstacle = _obstacle(stock, setups, capacity)
    if obstacle:
        return _stay(obstacle)
    fitting = [setup for setup in setups if setup.memory.total < (capacity or math.inf)]
    # The transport named first is the one that FSSDP uses; others are for comparison.
    candidates = [setup for setup in fitting if setup.transport == setups[0].transport] or fitting
    # Smallest modelled gain whose range begins at `WORTH`: see `share_range`.
    threshold = WORTH * (1 + error) / (1 + WORTH * error)
    best = _smallest_of_fastest(candidates, tolerance=(1 - threshold) * stock.seconds)
    gain = 1 - best.seconds / stock.seconds
    reason = _reason(best, stock, forced, capacity=capacity, error=error)
    if not error and not measured_speeds:
        compute = best.parts[EXPERT_COMPUTE] / stock.seconds
        low, high = (f"{share:.1%}" for share in expert_range(gain, compute))
        if low != high:
            reason += f"; {low} to {high}, since the experts' speed is assumed"
    if share_range(gain, error)[1] < WORTH:
        return _stay(f"do not switch it on: {reason}", best)
    if gain < threshold:
        text = f"no verdict without the time of a stock step, --step-ms: {reason}"
        return Advice(best=None, considered=best, verdict="unknown", text=text)
    text = f"switch it on, {flags_of(best)}: {reason}"
    return Advice(best=best, considered=best, verdict="yes", text=text)


def _obstacle(stock: Outcome, setups: Sequence[Outcome], capacity: float) -> str:
    """Return why none of ``setups`` can run on ranks with ``capacity`` bytes; empty if one can."""
    limit = capacity or math.inf
    if not setups:
        return "do not switch it on: there are no slots, or experts are not spread over ranks"
    if stock.memory.total >= limit:
        return (
            f"stock itself does not fit: its experts take {stock.memory.total / 2**30:.1f} of "
            f"{limit / 2**30:.0f} GiB of a rank; spread them over more expert-parallel ranks "
            "(--ep) or pipeline stages (--pp)"
        )
    smallest = min(setup.memory.total for setup in setups)
    if smallest >= limit:
        return (
            f"do not switch it on: experts with replicas take {smallest / 2**30:.1f} of "
            f"{limit / 2**30:.0f} GiB of a rank, without {stock.memory.total / 2**30:.1f}; "
            "simulate fewer --slots, or --lifetime layer"
        )
    return ""


def _reason(
    best: Outcome, stock: Outcome, forced: Outcome, *, capacity: float, error: float
) -> str:
    """Format the gain of ``best``, the cost of imbalance, and the price in memory."""
    gain = 1 - best.seconds / stock.seconds
    lost = 1 - forced.seconds / stock.seconds
    memory = best.memory.replicas
    if capacity:
        price = f"{memory / capacity:.1%} of memory"
    else:
        price = f"{best.memory.added:.1%} of the experts' memory"
    costs = f"imbalance costs {share_text(lost, error)}"
    # Beyond forced balance: replicas keep tokens on their node.
    saved = best.parts[ALL_TO_ALL] - forced.parts[ALL_TO_ALL]
    if saved > 0.0005 * stock.seconds:
        costs += "; replicas save messages, too"
    return (
        f"{share_text(gain, error)} of a step to win ({costs}), for {memory / 2**30:.2f} GiB, "
        f"{price}"
    )


def _stay(text: str, considered: Outcome | None = None) -> Advice:
    """Return the advice to stay with stock."""
    return Advice(best=None, considered=considered, verdict="no", text=text)


def share_range(gain: float, error: float) -> tuple[float, float]:
    """Return the smallest and the largest share of a step that a modelled ``gain`` can be.

    The seconds to win hardly depend on the rest of the step, whose time may be off. If they are
    lost, below 0, the rest is the whole step of stock.

    Args:
        gain: modelled share of a step.
        error: largest relative error of the time of the rest.
    """
    won = max(gain, 0.0)
    low, high = sorted(gain / (won + (1 - won) * (1 + sign * error)) for sign in (1, -1))
    return low, high


def expert_range(gain: float, compute: float) -> tuple[float, float]:
    """Return the smallest and the largest gain over the range of the experts' speed.

    All-to-alls and copies do not depend on this speed, so the rest of the gain is fixed.

    Args:
        gain: modelled gain, in any unit.
        compute: part of it in the experts' compute, in the same unit.
    """
    low, high = sorted(gain + (by - 1) * compute for by in EXPERT_TIMES)
    return low, high


def share_text(gain: float, error: float) -> str:
    """Format a share of a step whose time may be off by a relative ``error``."""
    if not error:
        return f"{gain:.1%}"
    low, high = (f"{share:.1%}" for share in share_range(gain, error))
    return low if low == high else f"{low} to {high}"


def describe_parts(forced: Outcome, stock: Outcome, setup: Outcome | None) -> str:
    """Format what imbalance costs, and what ``setup`` gains, by parts of a stock step."""
    columns = [("imbalance costs", forced)]
    if setup is not None:
        columns.append(("FSSDP wins", setup))
    rows = [(name, [one.parts[name] for _, one in columns]) for name in PARTS]
    rows.append(("together", [stock.seconds - one.seconds for _, one in columns]))
    lines = [f"{'share of a stock step':<22}" + "".join(f"{head:>17}" for head, _ in columns)]
    for name, values in rows:
        # -0.0 is printed as 0.0.
        cells = "".join(f"{round(value / stock.seconds, 4) + 0.0:>17.1%}" for value in values)
        lines.append(f"{name:<22}{cells}")
    return "\n".join(lines)


def _smallest_of_fastest(setups: Sequence[Outcome], *, tolerance: float) -> Outcome:
    """Choose the setup with least memory among the setups that are about as fast as the fastest.

    If the fastest takes at most ``tolerance`` seconds, so does the chosen setup.
    """
    fastest = min(setup.seconds for setup in setups)
    near = [setup for setup in setups if setup.seconds <= (1 + ALIKE) * fastest]
    if fastest <= tolerance:
        near = [setup for setup in near if setup.seconds <= tolerance]
    return min(near, key=lambda setup: (setup.memory.total, setup.seconds))


def flags_of(setup: Setup) -> str:
    """Format the flags that select ``setup``; ``nvlink`` is chosen by a self-test."""
    flags = f"--moe-fssdp-slots {setup.slots} --moe-fssdp-lifetime {setup.lifetime}"
    if setup.transport == "p2p":
        flags += " --moe-fssdp-transport p2p"
    return flags
