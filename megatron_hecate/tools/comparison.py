"""Comparison of FSSDP's settings on one simulated job: for `what_if` and for the report."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_hecate.plan import World, compile_planner
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.tools.job_settings import JobSettings
from megatron_hecate.tools.outcome import Outcome, Way, spread
from megatron_hecate.tools.presets import CLUSTERS
from megatron_hecate.tools.recommendation import ERROR, Advice, recommend
from megatron_hecate.tools.recorded_loads import Trace
from megatron_hecate.tools.recorded_run import RecordedRun
from megatron_hecate.tools.simulated_job import SimulatedJob
from megatron_hecate.tools.step_model import PipelineSchedule, Timing

# layers times steps times ranks squared: bound on the planning work of one way
EFFORT: float = 4e6
# Steps before the counted ones that the forecast sees; older steps have no measurable weight.
HISTORY: int = 64
# Measured over modelled time outside experts, from which on one of them is probably wrong.
FAR: float = 4.0
# Seconds of work left from which on further processes pay for their start.
WORTH_PROCESSES: float = 20.0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Outcomes of all simulated ways, and the advice.

    Args:
        settings: settings of the job, with the time of a step that was used.
        job: simulated job.
        outcomes: forced balance, stock, FSSDP's ways.
        advice: recommendation with its reason.
        notes: contradictions and doubts.
    """

    settings: JobSettings
    job: SimulatedJob
    outcomes: Sequence[Outcome]
    advice: Advice
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Largest relative error of the time of a step; 0 if it was measured."""
        return ERROR if self.settings.step_ms is None else 0.0

    @property
    def forced(self) -> Outcome:
        """Outcome of forced balance."""
        return self.outcomes[0]

    @property
    def stock(self) -> Outcome:
        """Outcome of stock expert parallelism."""
        return self.outcomes[1]


def compare(
    flags: argparse.Namespace,
    run: RecordedRun | None,
    *,
    made: tuple[JobSettings, SimulatedJob] | None = None,
    show_progress: bool = False,
) -> Comparison:
    """Simulate all ways of the command line.

    Args:
        flags: parsed command line of `what_if`.
        run: record of the job; ``None`` for other traces.
        made: result of `make_job` with the same arguments; ``None``: built here.
        show_progress: whether to draw a progress bar on standard error.

    Raises:
        ValueError: if the arguments and the loads do not fit, with the way out.
    """
    settings, job = made or make_job(flags, run, show_progress=show_progress)
    most = job.model.experts - job.model.experts // job.world.num_ranks
    ways = _asked_ways(flags, run, most)
    how = dict(processes=flags.processes, show_progress=show_progress)
    outcomes = simulate_ways(job, ways, **how)
    notes = list(settings.notes)
    further = _fewer_slots(ways, outcomes)
    if further:
        filled = max(way.slots for way in further)
        notes.append(
            f"a rank never holds more than {filled} replicas of a layer where there are more "
            "slots; fewer slots are simulated, too"
        )
    outcomes += simulate_ways(job, further, **how)
    outcomes = job.references() + outcomes
    error = ERROR if settings.step_ms is None else 0.0
    largest = max(_asked_slots(flags), default=0)
    if largest > most > 0:
        notes.append(
            f"a rank has no home of {most} experts, so more than {most} slots are never filled; "
            f"--slots {largest} is simulated as {most}"
        )
    advice = recommend(
        outcomes,
        settings.cluster.memory,
        error=error,
        measured_speeds=settings.measured,
    )
    return Comparison(
        settings=settings,
        job=job,
        outcomes=outcomes,
        advice=advice,
        notes=(*notes, *_doubts(settings, run)),
    )


def _asked_slots(flags: argparse.Namespace) -> set[int]:
    """Return the numbers of slots of the command line, without 0."""
    return {int(count) for count in flags.slots.split(",")} - {0}


def _asked_ways(flags: argparse.Namespace, run: RecordedRun | None, most: int) -> list[Way]:
    """List the ways of the command line, with at most ``most`` slots.

    More slots than experts without a home on the rank cannot be filled.
    """
    return [
        Way(slots=slots, lifetime=lifetime, late=late, rehome=rehome, transport=transport)
        for transport, slots, lifetime, rehome, late in itertools.product(
            _transports(flags, run),
            sorted({min(count, most) for count in _asked_slots(flags)} - {0}),
            flags.lifetime.split(","),
            sorted({int(steps) for steps in flags.rehome.split(",")}),
            sorted({int(count) for count in flags.late_replicas.split(",")}),
        )
    ]


def _fewer_slots(ways: Sequence[Way], outcomes: Sequence[Outcome]) -> list[Way]:
    """List ways with the slots that plans have filled: further slots are memory for nothing."""
    fewer = [
        dataclasses.replace(way, slots=max(one.used, 1))
        for way, one in zip(ways, outcomes, strict=True)
        if one.used < way.slots > 1
    ]
    return [way for way in dict.fromkeys(fewer) if way not in ways]


def _transports(flags: argparse.Namespace, run: RecordedRun | None) -> list[str]:
    """Return the transports to simulate: of the flag, of a run with FSSDP, or both."""
    if flags.transport is not None:
        return flags.transport.split(",")
    if run is not None and run.info.transport in ("nvlink", "p2p"):
        return [run.info.transport]
    return ["nvlink", "p2p"]


def _doubts(settings: JobSettings, run: RecordedRun | None) -> Iterator[str]:
    """List the reasons why the prediction is less accurate than it could be."""
    if settings.step_ms is None:
        yield (
            f"absolute times can be off by up to {ERROR:.0%} (docs/what-if.md): "
            "give --step-ms to what-if, the measured time of your step"
        )
    sizes = (settings.layout.ep, settings.model.layers)
    if run is not None and sizes != (run.ep, run.layers):
        yield (
            f"the record is of {run.layers} layers on {run.ep} ranks, "
            f"this is of {sizes[1]} on {sizes[0]}: an extrapolation to another run"
        )


def make_job(
    flags: argparse.Namespace, run: RecordedRun | None, *, show_progress: bool = False
) -> tuple[JobSettings, SimulatedJob]:
    """Build the job of the command line, scaled to the measured time of a step.

    Args:
        flags: parsed command line of `what_if`.
        run: record of the job; ``None`` for other traces.
        show_progress: whether to say on standard error that the planner is compiled.

    Raises:
        ValueError: if the arguments and the loads do not fit, with the way out.
    """
    settings = JobSettings.resolve(flags, run)
    trace = Trace.read(flags.trace, run)
    loads = trace.loads
    settings = dataclasses.replace(settings, notes=(*settings.notes, *trace.notes))
    _check_experts(flags, settings, loads.shape[3], run)
    model = settings.model
    layout = settings.layout
    cluster = settings.cluster
    if settings.cluster_name in CLUSTERS:
        cluster = cluster.for_group(layout.ep)
    nodes = tuple(rank // cluster.per_node for rank in range(layout.ep))
    world = World(nodes, cluster.speeds)
    # Every step is planned from a forecast: a single recorded step is repeated as its own history.
    if len(loads) == 1:
        loads = np.repeat(loads, 3, axis=0)
    excess = None
    if run is not None and run.ep == layout.ep:
        excess = trace.excess
    steps, layers = sample(flags.steps, layout.ep, loads.shape[:2])
    history = max([HISTORY, *map(int, flags.rehome.split(","))])
    if excess is not None:
        # A single step is repeated, see above.
        excess = np.resize(excess, loads.shape[:2])[-steps:, layers]
    loads = loads[-steps - history :]
    pairs = settings.tokens * model.top_k * layout.microbatches
    job = SimulatedJob(
        model=model,
        layers=layers,
        counts=spread(loads[:, layers], layout.ep, pairs),
        first=len(loads) - steps,
        world=world,
        timing=_timing(settings, world),
        schedule=_schedule(settings, run),
        measured=settings.measured,
        once=model.top_k if settings.sends_once else 0,
        optimizer_shards=settings.optimizer_shards,
        excess=excess,
    )
    if show_progress:
        text = "compiling the planner, once per machine, for less than a minute"
        compile_planner(lambda: print(text, file=sys.stderr, flush=True))
    return _scaled(settings, job)


def _scaled(settings: JobSettings, job: SimulatedJob) -> tuple[JobSettings, SimulatedJob]:
    """Scale ``job`` to the time of a step, if it is known."""
    if settings.step_ms is None:
        return settings, job
    try:
        scaled = job.lasting(settings.step_ms / 1e3)
    except ValueError as error:
        if settings.step_is_given:
            raise
        # The record's model or machine is another one, or its time covers no training.
        note = f"the record's step time is not used: {error}"
        notes = (*settings.notes, note)
        return dataclasses.replace(settings, step_ms=None, notes=notes), job
    if not settings.step_is_given or scaled.timing.dense <= FAR * job.timing.dense:
        return settings, scaled
    note = (
        f"--step-ms {settings.step_ms:,.0f} is far above the model: time outside experts and "
        f"all-to-alls is taken as {scaled.timing.dense / job.timing.dense:,.0f} times what model "
        "and machine suggest, and nothing of it can be won; check --step-ms (milliseconds of one "
        "step), --model, --cluster and --microbatches"
    )
    return dataclasses.replace(settings, notes=(*settings.notes, note)), scaled


def _check_experts(
    flags: argparse.Namespace, settings: JobSettings, experts: int, run: RecordedRun | None
) -> None:
    """Raise ValueError unless the model has the ``experts`` of the loads, and enough for top-k."""
    model = settings.model
    if experts != model.experts:
        top_k = ""
        if run is not None:
            top_k = f",top_k={run.info.top_k}"
        raise ValueError(
            f"{flags.trace} has {experts} experts, {flags.model} {model.experts}: give loads of "
            "this model, or take layers of its size with the recorded number of experts: "
            f"--model {flags.model},experts={experts}{top_k}"
        )
    if model.top_k > experts:
        raise ValueError(
            f"--model {flags.model}: a token cannot go to {model.top_k} of {experts} experts; "
            "set top_k"
        )


def sample(most_steps: int, ranks: int, shape: tuple[int, ...]) -> tuple[int, list[int]]:
    """Choose the steps and layers to plan, so that large groups do not take hours.

    Args:
        most_steps: steps to plan, at most.
        ranks: expert-parallel size.
        shape: recorded steps and layers.

    Returns:
        The number of steps, from the end of the trace, and layers evenly spaced over the trace.
    """
    num_steps, num_layers = shape
    # layers times steps
    most = EFFORT / max(ranks, 64) ** 2
    steps = min(most_steps, num_steps - 1, max(1, int(most / 2)))
    layers = min(num_layers, max(2, int(most / steps)))
    return steps, np.linspace(0, num_layers - 1, layers).round().astype(int).tolist()


def _schedule(settings: JobSettings, run: RecordedRun | None) -> PipelineSchedule:
    """Return the schedule of the pipeline, with the recorded layers of each stage if known."""
    layout = settings.layout
    layers = settings.model.layers
    if run is not None and layout.vpp == 1 and (layout.pp, layers) == (run.pp, run.layers):
        columns = run.columns_of_stages
        if len(columns) == layout.pp:
            return PipelineSchedule(stages=columns, microbatches=layout.microbatches)
    return PipelineSchedule.even(
        layers, layout.pp, microbatches=layout.microbatches, chunks=layout.vpp
    )


def _timing(settings: JobSettings, world: World) -> Timing:
    """Model the times of a microbatch that do not depend on routing."""
    model = settings.model
    cluster = settings.cluster
    tokens = settings.tokens
    return Timing(
        dense=tokens * model.dense_flops() / cluster.dense,
        pair=model.shape().token_seconds(world) / (1 + BACKWARD),
        head=tokens * 2 * model.hidden * model.vocab / cluster.dense,
        send=cluster.speeds.inter.seconds(model.weight_bytes * tokens * model.hidden),
        contention=cluster.speeds.contention,
        hidden=settings.hidden,
        recompute=settings.recompute,
    )


# Job of this process, of `simulate_ways`.
_job: list[SimulatedJob] = []


def simulate_ways(
    job: SimulatedJob,
    ways: Sequence[Way],
    *,
    processes: int | None = None,
    show_progress: bool = False,
) -> list[Outcome]:
    """Simulate FSSDP with each of ``ways``, on several cores if the work is worth it.

    Args:
        job: simulated job.
        ways: settings of FSSDP.
        processes: processes to use; ``None``: as many as cores, unless the work is short or no
            progress is shown, because then a program without a main guard may have called us.
        show_progress: whether to draw a progress bar, with the time left, on standard error.
    """
    # `disable=None` would hide the bar unless standard error is a terminal.
    disable = None if show_progress else True
    done: list[Outcome] = []
    cores = processes or (len(os.sched_getaffinity(0)) if show_progress else 1)
    with tqdm(total=len(ways), desc="simulating", unit="way", disable=disable) as bar:
        seconds = 0.0
        for way in ways:
            left = seconds * (len(ways) - len(done))
            if cores > 1 and (processes or left > WORTH_PROCESSES):
                break
            begin = time.monotonic()
            done.append(job.simulate_way(way))
            # The first way may include compilations.
            if len(done) > 1:
                seconds = time.monotonic() - begin
            bar.update()
        rest = ways[len(done) :]
        if not rest:
            return done
        # A forked child would inherit torch's threads in an unknown state.
        with ProcessPoolExecutor(
            min(cores, len(rest)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_set_job,
            initargs=(job,),
        ) as pool:
            for outcome in pool.map(_simulate_in_process, rest):
                done.append(outcome)
                bar.update()
    return done


def _set_job(job: SimulatedJob) -> None:
    """Set the job of this process."""
    _job[:] = [job]


def _simulate_in_process(way: Way) -> Any:
    """Simulate one way in a process of the pool."""
    return _job[0].simulate_way(way)
