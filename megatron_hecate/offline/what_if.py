"""Estimate whether FSSDP pays for a run.

``megatron-hecate what-if TRACE --model NAME --cluster NAME --ranks N`` runs this. Steps
are simulated from recorded loads, under forced balance, stock expert parallelism, and FSSDP as it
would plan. The assumptions are in docs/what-if.md, and the errors found against published figures
in docs/what-if-checks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_hecate.device.compile import CompileError
from megatron_hecate.offline.presets import CLUSTERS, Cluster, Model
from megatron_hecate.offline.recommendation import ERROR, flags_of, recommend
from megatron_hecate.offline.recorded_loads import read_loads
from megatron_hecate.offline.recorded_run import (
    RecordedRun,
    resolve_microbatches,
    resolve_step,
    same_size,
)
from megatron_hecate.offline.simulated_job import Outcome, SimulatedJob, spread
from megatron_hecate.offline.step_model import PipelineSchedule, Timing
from megatron_hecate.offline.traffic import copies
from megatron_hecate.offline.what_if_arguments import check_arguments, make_parser
from megatron_hecate.plan import World
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.record.run_folder import read_infos

# layers times steps times ranks squared: bound on the planning work of one way
EFFORT: float = 4e6


def _plan(job: SimulatedJob, way: Outcome) -> dict[int, list[list[float]]]:
    """Count the replicas that FSSDP plans with ``way``.

    Returns:
        By number of the layer in the trace: its most frequent replicas as [expert, rank, share of
        steps], at most one per slot.
    """
    homes, _ = job.homes(way.slots, way.lifetime, way.rehome)
    placed = job.place(homes, way.lifetime)
    final = placed
    if way.late:
        final = job.add_late(placed, way.late)
    most = way.slots * placed[0][0].num_ranks
    plan = {}
    for number, steps in zip(job.layers, zip(*final, strict=True), strict=True):
        often: Counter[tuple[int, int]] = Counter()
        for step in steps:
            often.update(tuple(pair) for pair in np.argwhere(copies(step)).tolist())
        plan[number] = [[*pair, count / len(steps)] for pair, count in often.most_common(most)]
    return plan


def _rivals(names: str, job: SimulatedJob, slots: int) -> list[Outcome]:
    """Simulate planners of bench/rivals on the same job.

    Raises:
        ValueError: for unknown names, and where the package is not in a checkout.
    """
    bench = Path(__file__).resolve().parents[2] / "bench"
    if not (bench / "rivals").is_dir():
        raise ValueError(
            f"--rivals {names}: other systems' planners are not installed; run this in a checkout"
        )
    sys.path.append(str(bench))
    return importlib.import_module("rivals.simulated").outcomes(names.split(","), job, slots)


def describe(outcomes: Sequence[Outcome]) -> str:
    """Format the outcomes as a table; forced balance and stock are the first two."""
    heads = ("step, ms", "speed", "imbalance", "copies, MB", "waits, ms", "experts, GiB")
    wide = max(37, *(len(one.name) for one in outcomes))
    lines = [" " * wide + "".join(f"{head:>13}" for head in heads)]
    for one in outcomes:
        figures = (
            f"{one.seconds * 1e3:.1f}",
            f"{outcomes[0].seconds / one.seconds:.1%}",
            f"{one.imbalance:.3f}",
            f"{one.sent / 1e6:.1f}",
            f"{one.exposed * 1e3:.2f}",
            f"{one.memory.total / 2**30:.2f}",
        )
        added = one.memory.total / outcomes[1].memory.total - 1
        cells = "".join(f"{figure:>13}" for figure in figures)
        lines.append(f"{one.name:<{wide}}{cells} (+{added:.1%})")
    lines += [
        "",
        "speed: forced balance is 100%. copies: sent by a rank in a step. "
        "waits: time of a step spent on copies alone",
    ]
    return "\n".join(lines)


def _doubts(args: argparse.Namespace) -> list[str]:
    """List the reasons why the prediction is less accurate than it could be."""
    doubts = list(args.contradictions)
    if args.step_ms is None:
        doubts.append(
            f"absolute times can be off by up to {ERROR:.0%} (docs/what-if.md): "
            "give --step-ms, the measured time of your step"
        )
    layers = Model.named(args.model).layers
    run = args.recorded
    if run is not None and not same_size(args, run):
        doubts.append(
            f"the record is of {run.layers} layers on {run.ranks} ranks, "
            f"this is of {layers} on {args.ep}: an extrapolation to another run"
        )
    return doubts


def _make_job(args: argparse.Namespace) -> SimulatedJob:
    """Build the job of the command line; sets ``args.ranks`` and ``args.ep`` where not given.

    Raises:
        ValueError: if the arguments and the loads do not fit, with the way out.
    """
    model = Model.named(args.model)
    cluster = Cluster.named(args.cluster, per_node=args.per_node)
    model = dataclasses.replace(model, seq=args.seq or model.seq)
    loads = read_loads(args.trace, num_experts=model.experts)
    _check_experts(args, model, loads.shape[3])
    args.recorded = RecordedRun.read(args.trace)
    args.contradictions = []
    resolve_microbatches(args, model)
    _resolve_layout(args, model)
    ep = args.ep
    world = World(tuple(rank // cluster.per_node for rank in range(ep)), cluster.speeds)
    # Every step is planned from a forecast: a single recorded step is repeated as its own history.
    if len(loads) == 1:
        loads = np.repeat(loads, 3, axis=0)
    steps, layers = _sample(args, num_steps=len(loads), num_layers=loads.shape[1])
    job = SimulatedJob(
        model=model,
        layers=layers,
        counts=spread(loads[:, layers], ep, args.tokens * model.top_k * args.microbatches),
        first=len(loads) - steps,
        world=world,
        timing=_timing(args, model, cluster, world),
        schedule=PipelineSchedule.even(
            model.layers, args.pp, microbatches=args.microbatches, chunks=args.vpp
        ),
        measured=args.cluster not in CLUSTERS,
        once=model.top_k if args.dispatcher == "flex" else 0,
        optimizer_shards=1 if args.no_distributed_optimizer else args.ranks // args.pp // ep,
    )
    return resolve_step(args, job)


def _check_experts(args: argparse.Namespace, model: Model, experts: int) -> None:
    """Raise ValueError unless the model has the ``experts`` of the loads, and enough for top-k."""
    if experts != model.experts:
        infos = list(read_infos(Path(args.trace)).values())
        top_k = ""
        if infos:
            top_k = f",top_k={infos[0].top_k}"
        raise ValueError(
            f"{args.trace} has {experts} experts, {args.model} {model.experts}: give loads of this "
            "model, or take layers of its size with the recorded number of experts: "
            f"--model {args.model},experts={experts}{top_k}"
        )
    if model.top_k > experts:
        raise ValueError(
            f"--model {args.model}: a token cannot go to {model.top_k} of {experts} experts; "
            "set top_k"
        )


def _resolve_layout(args: argparse.Namespace, model: Model) -> None:
    """Set ``args.ranks`` and ``args.ep`` where not given, and check the layout.

    Raises:
        ValueError: if ranks, stages, chunks or experts do not divide.
    """
    recorded_ranks = None
    if args.recorded is not None:
        recorded_ranks = args.recorded.ranks
    if args.ranks is None:
        if recorded_ranks is None:
            raise ValueError("--ranks N, the ranks of the job, is needed: only a run folder has it")
        args.ranks = recorded_ranks * args.pp
    per_stage, rest = divmod(args.ranks, args.pp)
    if rest or args.pp * args.vpp > model.layers:
        most = f"{model.layers} layers at most"
        if args.vpp > 1:
            most += f" with --vpp {args.vpp}"
        raise ValueError(f"--ranks {args.ranks} must divide among --pp {args.pp} stages, of {most}")
    if args.vpp > 1 and (args.pp == 1 or args.microbatches % args.pp):
        raise ValueError(
            f"--vpp needs --pp above 1 that divides --microbatches, "
            f"got {args.pp}, {args.microbatches}"
        )
    sizes = range(1, per_stage + 1)
    fits = [size for size in sizes if per_stage % size == 0 and model.experts % size == 0]
    if not args.ep:
        args.ep = recorded_ranks if recorded_ranks in fits else fits[-1]
        if args.ep == 1 < per_stage:
            near = [
                ranks
                for ranks in range(2, 2 * per_stage)
                if math.gcd(ranks, model.experts) >= min(8, model.experts)
            ]
            below = [ranks for ranks in near if ranks < per_stage][-1:]
            above = [ranks for ranks in near if ranks > per_stage][:1]
            raise ValueError(
                f"--ranks {args.ranks}: no expert-parallel size above 1 divides {per_stage} ranks "
                f"of a stage and {model.experts} experts; take "
                f"{' or '.join(map(str, below + above))} ranks of a stage, or --ep 1"
            )
    if args.ep not in fits:
        raise ValueError(
            f"--ep {args.ep} must divide {per_stage} ranks of a stage and {model.experts} experts: "
            f"take one of {fits}"
        )


def _sample(
    args: argparse.Namespace, *, num_steps: int, num_layers: int
) -> tuple[int, Sequence[int]]:
    """Choose the steps and layers to plan, so that large groups do not take hours.

    Args:
        args: parsed command line.
        num_steps: recorded steps.
        num_layers: recorded layers.

    Returns:
        The number of steps, from the end of the trace, and layers evenly spaced over the trace.
    """
    # layers times steps
    most = EFFORT / max(args.ep, 64) ** 2
    steps = min(args.steps, num_steps - 1, max(1, int(most / 2)))
    layers = min(num_layers, max(2, int(most / steps)))
    return steps, np.linspace(0, num_layers - 1, layers).round().astype(int).tolist()


def _timing(args: argparse.Namespace, model: Model, cluster: Cluster, world: World) -> Timing:
    """Model the times of a microbatch that do not depend on routing."""
    tokens = args.tokens
    return Timing(
        dense=tokens * model.dense_flops() / cluster.dense,
        pair=model.shape().token_seconds(world) / (1 + BACKWARD),
        head=tokens * 2 * model.hidden * model.vocab / cluster.dense,
        send=cluster.speeds.inter.seconds(2 * tokens * model.hidden),
        contention=cluster.speeds.contention,
        hidden=args.hidden_all_to_all,
        recompute=args.recompute,
    )


def main(argv: Sequence[str]) -> int:
    """Print the table and the recommendation; returns the exit status."""
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        check_arguments(args)
        job = _make_job(args)
        outcomes, best, text = _compare(args, job)
        if args.save:
            _save(args, job, outcomes, best, text)
    except (ValueError, OSError, CompileError) as error:
        parser.error(str(error))
    steps, layers, ranks, _ = job.counts[job.first :].shape
    duration = "unknown"
    if args.step_ms is not None:
        duration = f"{args.step_ms:,.0f} ms"
    print(
        f"{args.model} on {args.cluster}: {args.ranks} ranks, EP {ranks}, PP {args.pp}, "
        f"{args.microbatches} microbatches of {args.tokens:,} tokens, stock step {duration}; "
        f"{steps} steps and {layers} layers of {args.trace}\n\n"
        f"{describe(outcomes)}\n\n{text}"
    )
    for doubt in _doubts(args):
        print(f"note: {doubt}")
    return 0


def _compare(
    args: argparse.Namespace, job: SimulatedJob
) -> tuple[list[Outcome], Outcome | None, str]:
    """Simulate all ways of the command line, and the rivals.

    Returns:
        All outcomes, the recommended one or ``None``, and the reason. Rivals are not recommended.
    """
    # More slots than experts without a home on the rank cannot be filled.
    most = job.model.experts - job.model.experts // job.world.num_ranks
    slots = sorted({min(int(count), most) for count in args.slots.split(",")} - {0})
    late = sorted({int(count) for count in args.late_replicas.split(",")})
    rehome = sorted({int(steps) for steps in args.rehome.split(",")})
    rivals = []
    if args.rivals:
        rivals = _rivals(args.rivals, job, max(slots, default=0))
    outcomes = job.compare(slots, args.lifetime.split(","), late, rehome)
    error = ERROR if args.step_ms is None else 0.0
    best, text = recommend(outcomes, Cluster.named(args.cluster).memory, error=error)
    return outcomes + rivals, best, text


def _save(
    args: argparse.Namespace,
    job: SimulatedJob,
    outcomes: Sequence[Outcome],
    best: Outcome | None,
    text: str,
) -> None:
    """Write the comparison to ``args.save`` as JSON; see docs/what-if.md for its keys."""
    saved = dict(
        recommendation=text,
        flags=best and f"--moe-fssdp {flags_of(best)}",
        plan=best and _plan(job, best),
        arguments={key: value for key, value in vars(args).items() if key != "recorded"},
        outcomes=[dataclasses.asdict(one) for one in outcomes],
    )
    args.save.write_text(json.dumps(saved, default=str) + "\n")
