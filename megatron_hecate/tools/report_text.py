"""Sentences of the report's page: verdict, reasons, decisions for layers."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from megatron_hecate.plan import worst_padding
from megatron_hecate.plan.replicas import BALANCED
from megatron_hecate.tools.comparison import Comparison
from megatron_hecate.tools.recommendation import expert_range, flags_of, share_range
from megatron_hecate.tools.replay import Outcome
from megatron_hecate.tools.run import Run
from megatron_hecate.tools.step_model import EXPERT_COMPUTE, PARTS, Prediction

# Flags of `what_if` that change the layout.
LAYOUT = "--ranks, --ep, --microbatches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """First sentence of the page, its reason, and the command to run next.

    Args:
        kind: ``won`` or ``lost`` for a symbol, or ``neutral``.
        text: one sentence with a range.
        reason: further explanation; may be empty.
        command: command to run next.
        purpose: what the command is for.
    """

    kind: str
    text: str
    reason: str
    command: str
    purpose: str


def verdict_on_stock(comparison: Comparison | None, folder: Path, *, obstacle: str = "") -> Verdict:
    """Judge an observed run.

    Args:
        comparison: comparison of FSSDP's settings; ``None`` if the record is not enough for it.
        folder: folder of the run.
        obstacle: why there is no comparison.
    """
    what_if = f"megatron-hecate what-if {shlex.quote(str(folder))}"
    if comparison is None:
        return _no_verdict(obstacle, command=what_if, purpose="Simulate other settings:")
    advice = comparison.advice
    reason = f"As what-if says: {advice.text}."
    setup = advice.considered
    if setup is None:
        text = "Do not switch FSSDP on: the experts do not fit into a rank's memory."
        if comparison.settings.ep == 1:
            text = "Do not switch FSSDP on: one rank holds all experts, so there is nothing to win."
        return Verdict(
            kind="neutral",
            text=text,
            reason=reason,
            command=what_if,
            purpose=f"Try other layouts with what-if ({LAYOUT}):",
        )
    share = _share_of_step(comparison, setup)
    if advice.verdict == "yes":
        return Verdict(
            kind="won",
            text=f"Switch FSSDP on: it would save {share}.",
            reason=reason,
            command=(
                f"torchrun ... -m megatron_hecate --moe-fssdp {flags_of(setup)} "
                f"--moe-fssdp-record {shlex.quote(f'{folder}-fssdp')} SCRIPT ..."
            ),
            purpose="Train with it, then compare both records with megatron-hecate report:",
        )
    if advice.verdict == "unknown":
        return Verdict(
            kind="neutral",
            text=f"No verdict without the time of a step: FSSDP might save {share}.",
            reason=reason,
            command=f"{what_if} --step-ms MS",
            purpose="Give the time of a step:",
        )
    return Verdict(
        kind="neutral",
        text=f"Do not switch FSSDP on: it would save {share}, less than 3 %.",
        reason=reason,
        command=what_if,
        purpose=f"Try other layouts with what-if ({LAYOUT}):",
    )


def _share_of_step(comparison: Comparison, setup: Outcome) -> str:
    """Format the range of the share of a stock step that ``setup`` saves."""
    gain = 1 - setup.seconds / comparison.stock.seconds
    if comparison.settings.step_ms is None:
        low, high = share_range(gain, comparison.error)
    elif comparison.settings.measured:
        low, high = gain, gain
    else:
        compute = setup.parts[EXPERT_COMPUTE] / comparison.stock.seconds
        low, high = expert_range(gain, compute)
    return f"{100 * low:.1f} to {100 * high:.1f} % of a step"


def _no_verdict(obstacle: str, *, command: str, purpose: str) -> Verdict:
    """Explain that times are unknown because of an ``obstacle``."""
    return Verdict(
        kind="neutral",
        text=f"No verdict, since times are not known: {obstacle}.",
        reason="The page shows loads alone.",
        command=command,
        purpose=purpose,
    )


def verdict_on_fssdp(prediction: Prediction | None, folder: Path, *, obstacle: str = "") -> Verdict:
    """Judge a run with FSSDP.

    Args:
        prediction: modelled times; ``None`` if unknown.
        folder: folder of the run.
        obstacle: why they are unknown.
    """
    command = f"megatron-hecate report STOCK_RUN {shlex.quote(str(folder))}"
    purpose = "Compare with a run of --moe-fssdp-observe:"
    if prediction is None:
        return _no_verdict(obstacle, command=command, purpose=purpose)
    lost = float(prediction.lost_ms.mean())
    won = lost - float(prediction.left_ms.mean())
    parts = prediction.parts_ms()
    price = ms_text(abs(parts[PARTS[-1]][1]))
    stock = float(prediction.stock_ms.mean())
    low, high = expert_range(won, parts[EXPERT_COMPUTE][1])
    share = f"{100 * low / stock:.1f} to {100 * high / stock:.1f} % of a stock step"
    reason = (
        f"Stock would have lost {ms_text(lost)} per step to imbalance. Net of the replicas' cost "
        f"of {price}, FSSDP won back {ms_text(won)}. The range is that of the experts' speed."
    )
    if won < 0:
        return Verdict(
            kind="lost",
            text=f"FSSDP cost more than it won: {ms_text(-won)} per step.",
            reason=(
                f"Stock would have lost {ms_text(lost)} per step to imbalance; replicas took "
                f"{price}. Use fewer slots, or none."
            ),
            command=command,
            purpose=purpose,
        )
    return Verdict(
        kind="won",
        text=f"FSSDP won back {ms_text(won)} per step, {share}.",
        reason=reason,
        command=command,
        purpose=purpose,
    )


def sentences(run: Run, mean: Mapping[str, float]) -> list[str]:
    """Summarize the run in a few sentences."""
    record = run.record
    num, layers, experts = record.load.shape
    first, last = record.iteration[[0, -1]]
    nodes = len(set(record.info.node))
    about = (
        f"The record holds {count(num, 'iteration')} ({first} to {last}) of "
        f"{count(layers, 'MoE layer')} with {experts} experts over "
        f"{count(record.info.ranks, 'rank')} on {count(nodes, 'node')}. "
        f"FSSDP was {'off' if run.observed else 'on'}."
    )
    texts = [about, _imbalance_text(run, mean)]
    if run.fullest is record.peak:
        texts.append("Loads of the fullest rank are those of each microbatch.")
    if not run.observed:
        texts.append(_copies_text(run))
    if record.stock_factor is not None:
        texts.append(_budget_text(run))
    return texts


def _budget_text(run: Run) -> str:
    """State which ``moe_expert_rank_capacity_factor`` sufficed, with FSSDP and without."""
    record, info = run.record, run.info
    factor, stock = record.factor, record.stock_factor
    text = "For the largest rank load of every microbatch, moe_expert_rank_capacity_factor="
    homes = info.num_experts // info.ranks
    if factor is None:
        text += f"{upwards(stock.max())} sufficed."
    else:
        text += (
            f"{upwards(factor[1:].max(initial=1.0))} sufficed from the second iteration on, "
            f"{upwards(factor[0].max())} in the first; without FSSDP {upwards(stock.max())} would "
            "have."
        )
    alignment = info.job.get("alignment", 1)
    if alignment > 1 and run.tokens:
        rows = run.tokens * info.top_k
        with_slots, without = (
            worst_padding(rows=rows, experts=experts, alignment=alignment)
            for experts in (homes + info.slots, homes)
        )
        text += f" Padding to {alignment} rows adds {with_slots:.2f} at most"
        text += "." if factor is None else f", {without:.2f} without FSSDP."
    return text


def _imbalance_text(run: Run, mean: Mapping[str, float]) -> str:
    """State the imbalance as routed and, with FSSDP, as computed."""
    largest = run.waits.max()
    text = (
        f"As routed, the fullest rank had {mean['before']:.2f} times the mean load, and "
        f"{largest:.2f} times at worst (one layer in one iteration); all other ranks wait for it."
    )
    if run.observed:
        return text
    largest = run.waits_computed.max()
    text += (
        f" With FSSDP the fullest rank computed {mean['after']:.3f} times the mean, "
        f"and {largest:.2f} times at worst."
    )
    if moves := run.moves:
        text += (
            f" Experts changed homes {count(moves, 'time')}; "
            "the figures do not include the time of these moves."
        )
    return text


def _copies_text(run: Run) -> str:
    """State the number of replicas, of late replicas, and the share of layers without any."""
    record = run.record
    replicas = run.replicas.sum(axis=2)
    late = 0 if record.late is None else int(record.late.sum())
    text = (
        f"A layer had {replicas.mean():.1f} replicas on average; "
        f"in all, layers fetched {count(late, 'replica')} after the gate."
    )
    bypassed = (replicas == 0).mean()
    if bypassed and record.info.slots:
        text += (
            f" In {percent(bypassed)} of all cases a layer had none: "
            "copies did not pay, or there was no forecast yet."
        )
    return text


def decision(run: Run, row: Sequence[float]) -> str:
    """Name the decision for a layer; `reasons` explains it.

    Args:
        run: the recorded run.
        row: the layer's numbers, see `report_content.COLUMNS`.
    """
    loss, *_ = row
    replicas, lost = row[4], row[7]
    if replicas:
        return "Replicas"
    if loss <= BALANCED:
        return "Balanced"
    if run.observed:
        return "Uneven"
    if not run.record.info.slots:
        return "No slots"
    if run.routing_ms + run.computing_ms >= lost:
        return "Not worth it"
    return "Copies would not pay"


def reasons(run: Run, decisions: Collection[str]) -> dict[str, str]:
    """Explain the decisions that occur.

    Args:
        run: the recorded run.
        decisions: names of `decision`.
    """
    price = ms_text(run.routing_ms + run.computing_ms)
    texts = {
        "Replicas": "ranks held replicas, which took tokens off the fullest rank.",
        "Balanced": (
            f"the fullest rank is within {percent(BALANCED - 1)} of the mean: little to win."
        ),
        "Uneven": "ranks wait for the fullest one; FSSDP was off.",
        "No slots": "uneven, but there were no slots for replicas.",
        "Not worth it": (
            f"one replica takes {price} without copy and tokens, more than there is to win."
        ),
        "Copies would not pay": "uneven, but copies cost more than they win, by the cost model.",
    }
    return {name: text for name, text in texts.items() if name in decisions}


def count(number: int, what: str) -> str:
    """Format a number with its noun."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def upwards(factor: float) -> str:
    """Format a factor with two digits, rounded up."""
    return f"{math.ceil(100 * factor - 1e-3) / 100:.2f}"


def percent(share: float) -> str:
    """Format a share."""
    return f"{100 * share:.1f} %"


def ms_text(milliseconds: float) -> str:
    """Format milliseconds with three digits; from 1 s on, in seconds."""
    if 0 < abs(milliseconds) < 1e-3:
        return "less than 0.001 ms"
    if abs(milliseconds) >= 999.5:
        return f"{milliseconds / 1e3:.2f} s"
    if abs(milliseconds) >= 99.5:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds:.3g} ms"
