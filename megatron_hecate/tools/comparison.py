"""Comparison of FSSDP's settings on one job: for `what_if` and for the report."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence

from megatron_hecate.plan import compile_planner
from megatron_hecate.tools.job_settings import JobSettings
from megatron_hecate.tools.recommendation import ERROR, Advice, recommend
from megatron_hecate.tools.replay import Outcome, Replay, Setup
from megatron_hecate.tools.run import Run

# Measured over modelled time outside experts, from which on one of them is probably wrong.
FAR: float = 4.0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Outcomes of all setups, and the advice.

    Args:
        replay: replayed job, whose settings have the time of a step that was used.
        outcomes: forced balance, stock, FSSDP's setups.
        advice: recommendation with its reason.
        notes: contradictions and doubts.
    """

    replay: Replay
    outcomes: Sequence[Outcome]
    advice: Advice
    notes: tuple[str, ...]

    @property
    def settings(self) -> JobSettings:
        """Settings of the job."""
        return self.replay.settings

    @property
    def error(self) -> float:
        """Largest relative error of the time of a step; 0 if it was measured."""
        return ERROR if self.settings.step_ms is None else 0.0

    @property
    def stock(self) -> Outcome:
        """Outcome of stock expert parallelism."""
        return self.outcomes[1]


def compare(flags: argparse.Namespace, run: Run) -> Comparison:
    """Predict all setups of the command line.

    Args:
        flags: parsed command line of `what_if`.
        run: record of the job, or loads alone.

    Raises:
        ValueError: if the arguments and the loads do not fit, with the way out.
    """
    replay, note = _scaled(Replay.of(JobSettings.resolve(flags, run), run, steps=flags.steps))
    text = "compiling the planner, once per machine, for less than a minute"
    compile_planner(lambda: print(text, file=sys.stderr, flush=True))
    settings = replay.settings
    # More slots than experts without a home on the rank cannot be filled.
    capacity = settings.model.experts - settings.model.experts // settings.ep
    slots = {min(int(count), capacity) for count in flags.slots.split(",")} - {0}
    transports = (flags.transport or "nvlink,p2p").split(",")
    if flags.transport is None and run.info.transport in ("nvlink", "p2p"):
        transports = [run.info.transport]
    setups = [
        Setup(transport=transport, slots=count, lifetime=lifetime)
        for transport, count, lifetime in itertools.product(
            transports, sorted(slots), flags.lifetime.split(",")
        )
    ]
    by_name = {outcome.name: outcome for outcome in map(replay.predict, setups)}
    outcomes = [*replay.references(), *by_name.values()]
    advice = recommend(
        outcomes,
        settings.cluster.memory,
        error=ERROR if settings.step_ms is None else 0.0,
        measured_speeds=settings.measured,
    )
    doubts = _doubts(replay, run, outcomes, has_idle_slots=len(by_name) < len(setups))
    notes = (*settings.notes, *note, *doubts)
    return Comparison(replay=replay, outcomes=outcomes, advice=advice, notes=notes)


def _scaled(replay: Replay) -> tuple[Replay, list[str]]:
    """Scale ``replay`` to the time of a step, if it is known; return notes on it, too."""
    settings = replay.settings
    if settings.step_ms is None:
        return replay, []
    try:
        scaled = replay.fitted()
    except ValueError as error:
        if settings.step_is_given:
            raise
        # The record's model or machine is another one, or its time covers no training.
        settings = dataclasses.replace(settings, step_ms=None)
        note = f"the record's step time is not used: {error}"
        return dataclasses.replace(replay, settings=settings), [note]
    times = scaled.model.dense / replay.model.dense
    if not settings.step_is_given or times <= FAR:
        return scaled, []
    return scaled, [
        f"--step-ms {settings.step_ms:,.0f} is far above the model: time outside experts and "
        f"all-to-alls is taken as {times:,.0f} times what model and machine suggest, and nothing "
        "of it can be won; check --step-ms (milliseconds of one step), --model, --cluster and "
        "--microbatches"
    ]


def _doubts(
    replay: Replay, run: Run, outcomes: Sequence[Outcome], *, has_idle_slots: bool
) -> Iterator[str]:
    """List what the advice leaves out, and why it is less accurate than it could be."""
    settings = replay.settings
    stock = outcomes[1].worst
    if run.record.stock_factor is not None and settings.ep == run.info.ranks:
        stock = max(stock, float(run.record.stock_factor.max()))
    if (factor := settings.factor) and stock > factor:
        within = {setup.slots for setup in outcomes[2:] if setup.worst <= factor}
        slots = ", ".join(map(str, sorted(within)))
        setups = f"with --moe-fssdp-slots {slots}" if within else "with none of these slots"
        yield (
            f"stock's largest rank load in the record is {stock:.2f} times the mean, over "
            f"moe_expert_rank_capacity_factor={factor:g}, which the advice does not count; "
            f"{setups} the means of a step's microbatches stay within it; single microbatches may "
            "exceed it, and padding adds to them (docs/bound.md)"
        )
    steps = run.record.load.any(axis=2).all(axis=1)
    if not steps.all():
        yield f"left out: {(~steps).sum()} of {len(steps)} iterations, where a layer has no token"
    if steps.sum() == 1:
        yield "there is a single step, which forecasts itself exactly: gains are upper bounds"
    if has_idle_slots:
        yield "ranks never hold more replicas of a layer than in the table; more slots stay empty"
    if settings.step_ms is None:
        yield (
            f"absolute times can be off by up to {ERROR:.0%} (docs/what-if.md): "
            "give --step-ms to what-if, the measured time of your step"
        )
    recorded = (run.info.ranks, len(run.info.layers))
    sizes = (settings.ep, settings.model.layers)
    if run.stages and sizes != recorded:
        yield (
            f"the record is of {recorded[1]} layers on {recorded[0]} ranks, "
            f"this is of {sizes[1]} on {sizes[0]}: an extrapolation to another run"
        )
