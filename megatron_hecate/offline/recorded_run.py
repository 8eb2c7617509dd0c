"""Properties of a job that its run folder records: the defaults of `what_if`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from megatron_hecate.offline.presets import Model
from megatron_hecate.offline.simulated_job import SimulatedJob
from megatron_hecate.record.analysis import Figures
from megatron_hecate.record.run_folder import read, read_infos

# microbatches of a step, where neither the record nor a flag names them
MICROBATCHES: int = 8
# relative difference of a flag from the record that is not reported
CLOSE: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Properties of a recorded job.

    Args:
        ranks: size of the expert-parallel group.
        layers: number of layers with experts.
        microbatches: microbatches per step; ``None`` if unknown.
        tokens: tokens of a rank per microbatch; ``None`` if ``microbatches`` is.
        step_ms: median time of a step, ms; ``None`` unless stock training was recorded for several
            iterations.
    """

    ranks: int
    layers: int
    microbatches: int | None = None
    tokens: int | None = None
    step_ms: float | None = None

    @classmethod
    def read(cls, trace: str) -> RecordedRun | None:
        """Read ``trace``; ``None`` if it is no run folder."""
        infos = list(read_infos(Path(trace)).values())
        if not infos:
            return None
        record = read(trace)
        info = record.info
        step_ms = None
        # With FSSDP the time of a step is not stock's.
        if info.mode == "observe" and len(record.iteration) > 1:
            step_ms = Figures(record, infos).step_ms
        microbatches = None
        tokens = None
        # A record without sizes of its layers does not know the microbatches either.
        if info.shape:
            microbatches = int(info.shape["microbatches"])
            # Layers that drop tokens have fewer than the others.
            of_group = record.load.sum(axis=2).max(axis=1)
            pairs = microbatches * info.ranks * info.top_k
            tokens = max(1, round(float(np.median(of_group)) / pairs))
        return cls(
            ranks=info.ranks,
            layers=len(info.layers),
            microbatches=microbatches,
            tokens=tokens,
            step_ms=step_ms,
        )


def same_size(args: argparse.Namespace, run: RecordedRun) -> bool:
    """Return whether the command line has the record's layers and expert-parallel size."""
    return (run.ranks, run.layers) == (args.ep, Model.named(args.model).layers)


def resolve_microbatches(args: argparse.Namespace, model: Model) -> None:
    """Set ``args.microbatches`` and ``args.tokens``, of a rank per microbatch.

    A run folder's values are the defaults. Contradicting flags are listed in
    ``args.contradictions``.
    """
    run = args.recorded
    known = run is not None and run.microbatches is not None
    if args.microbatches is None:
        args.microbatches = run.microbatches if known else MICROBATCHES
    elif known and args.microbatches != run.microbatches:
        args.contradictions.append(
            f"the record has {run.microbatches} microbatches per step, not {args.microbatches}"
        )
    args.tokens = (args.micro_batch or 1) * model.seq
    if not known:
        return
    if args.micro_batch is None and args.seq is None:
        args.tokens = run.tokens
    elif abs(args.tokens - run.tokens) > CLOSE * run.tokens:
        args.contradictions.append(
            f"the record has {run.tokens:,} tokens of a rank per microbatch, not {args.tokens:,}"
        )


def resolve_step(args: argparse.Namespace, job: SimulatedJob) -> SimulatedJob:
    """Scale the job to the measured time of a step; sets ``args.step_ms`` where not given.

    Raises:
        ValueError: if ``--step-ms`` is less than the modelled time of experts and all-to-alls.
    """
    run = args.recorded
    measured = None
    if run is not None and same_size(args, run):
        measured = run.step_ms
    if args.step_ms is not None:
        if measured is not None and abs(args.step_ms - measured) > CLOSE * measured:
            args.contradictions.append(
                f"the record's steps took {measured:,.0f} ms (median), not {args.step_ms:,.0f}"
            )
        return job.lasting(args.step_ms / 1e3)
    if measured is None:
        return job
    try:
        job = job.lasting(measured / 1e3)
    except ValueError as error:
        # The record's model or machine is another one, or its time covers no training.
        args.contradictions.append(f"the record's step time is not used: {error}")
    else:
        args.step_ms = measured
    return job
