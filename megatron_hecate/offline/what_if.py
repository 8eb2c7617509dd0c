"""``python -m megatron_hecate --what-if TRACE --model NAME --cluster NAME --ranks N``: is FSSDP worth it for a run?

Steps are simulated from recorded loads, under forced balance, stock expert parallelism, and FSSDP as it would plan.
What the prediction rests on is in docs/what-if.md, and how far it was found to be off in docs/what-if-checks.md.
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
from megatron_hecate.offline.megatron_files import read_any
from megatron_hecate.offline.presets import CLUSTERS, MODELS, Cluster, Model
from megatron_hecate.offline.simulated_job import Job, Outcome, spread
from megatron_hecate.offline.step_model import Schedule, Timing
from megatron_hecate.offline.traffic import copies
from megatron_hecate.plan import World
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.record.run_folder import read_infos
from megatron_hecate.replicas.buffers import LIFETIMES

WORTH: float = 0.03  # of a step: what is won must be more than the simulation can tell
ALIKE: float = (
    0.005  # of ways whose steps differ by less, the one that takes least memory is recommended
)
EFFORT: float = 4e6  # layers times steps times ranks squared: how much is planned for one way


def read_loads(path: Path | str, *, num_experts: int | None = None) -> np.ndarray:
    """[T, L, N, E] pairs of source n for expert e; N is 1 where only sums were recorded.

    A run folder, or one of Megatron's own files, which may not name the last of ``num_experts``; an .npz with
    ``counts`` [T, L, N, E], or ``load`` [T, L, E]; or JSON with ``counts`` by model, domain and layer, as OLMoE
    publishes them: of the first model, all domains together are one step.

    Raises:
        ValueError: for anything else.
    """
    path = Path(path)
    try:
        if path.is_dir():
            counts = read_any(path, num_experts=num_experts).load[:, :, None]
        elif path.suffix == ".json":
            domains = next(iter(json.loads(path.read_text())["counts"].values()))
            counts = np.sum([list(layers.values()) for layers in domains.values()], axis=0)[
                None, :, None
            ]
        elif not path.exists():
            raise ValueError("it does not exist")
        else:
            with np.load(path, allow_pickle=False) as archive:
                counts = (
                    archive["counts"] if "counts" in archive.files else archive["load"][:, :, None]
                )
        if counts.ndim != 4 or not counts.size or counts.dtype.kind not in "iuf":
            raise ValueError(f"loads are {counts.dtype} of shape {counts.shape}")
        if not np.isfinite(counts).all() or counts.min() < 0 or not counts.sum(axis=(2, 3)).all():
            raise ValueError("loads must be 0 or more, and some in every step and layer")
    except Exception as error:  # zip, zlib, numpy and the tokenizer it uses have their own
        why = "it is no such file" if "allow_pickle" in str(error) else error
        raise ValueError(
            f"{path} holds no loads ({why}); give a folder of --moe-fssdp-record, or of files that Megatron wrote, an "
            ".npz with counts [steps, layers, sources, experts] or load [steps, layers, experts], or OLMoE's JSON"
        ) from error
    return counts


def recommend(outcomes: Sequence[Outcome], capacity: float) -> tuple[Outcome | None, str]:
    """What to do: one of the ``outcomes`` of `Job.compare`, or ``None``; and why.

    Args:
        capacity: bytes of a rank; 0 where it is not known.
    """
    (forced, stock), most = outcomes[:2], capacity or math.inf
    if not outcomes[2:]:
        return None, "do not switch it on: there are no slots, or experts are not spread over ranks"
    fits = [way for way in outcomes[2:] if way.memory.total < most]
    if not fits:
        least = min(way.memory.total for way in outcomes[2:])
        return (
            None,
            f"it does not fit: experts take {least / 2**30:.1f} of {most / 2**30:.0f} GiB; use more ranks",
        )
    fastest = min(way.seconds for way in fits)
    best = min(
        (w for w in fits if w.seconds <= (1 + ALIKE) * fastest),
        key=lambda w: (w.memory.total, w.late, w.rehome, w.seconds),
    )
    gain, lost = 1 - best.seconds / stock.seconds, 1 - forced.seconds / stock.seconds
    memory = best.memory.replicas
    price = (
        f"{memory / capacity:.1%} of memory"
        if capacity
        else f"{best.memory.added:.1%} of the experts' memory"
    )
    costs = f"imbalance costs {lost:.1%}" + ("; replicas save messages, too" if gain > lost else "")
    reason = f"{gain:.1%} of a step to win ({costs}), for {memory / 2**30:.2f} GiB, {price}"
    if gain < WORTH:
        return None, f"do not switch it on: {reason}"
    return best, f"switch it on, {_flags(best)}: {reason}"


def _flags(way: Outcome) -> str:
    late = f" --moe-fssdp-late-replicas {way.late}" if way.late else ""
    rehome = f" --moe-fssdp-rehome {way.rehome}" if way.rehome else ""
    return f"--moe-fssdp-slots {way.slots} --moe-fssdp-lifetime {way.lifetime}{late}{rehome}"


def _plan(job: Job, way: Outcome) -> dict[int, list[list[float]]]:
    """By number of a layer in the trace: its most frequent replicas that fit, as [expert, rank, share of steps]."""
    homes, _ = job.homes(way.slots, way.lifetime, way.rehome)
    placed, plan = job.place(homes, way.lifetime), {}
    final = job.add_late(placed, way.late) if way.late else placed
    for number, steps in zip(job.layers, zip(*final, strict=True), strict=True):
        often = Counter(
            tuple(pair) for step in steps for pair in np.argwhere(copies(step)).tolist()
        )
        plan[number] = [
            [*pair, count / len(steps)]
            for pair, count in often.most_common(way.slots * placed[0][0].num_ranks)
        ]
    return plan


def _rivals(names: str, job: Job, slots: int) -> list[Outcome]:
    """Planners of bench/rivals under the same job; ValueError where there is no checkout, and for unknown names."""
    if not ((bench := Path(__file__).resolve().parents[2] / "bench") / "rivals").is_dir():
        raise ValueError(
            f"--rivals {names}: other systems' planners are not installed; run this in a checkout"
        )
    sys.path.append(str(bench))
    return importlib.import_module("rivals.simulated").outcomes(names.split(","), job, slots)


def describe(outcomes: Sequence[Outcome]) -> str:
    """As a table."""
    heads = ("step, ms", "speed", "imbalance", "copies, MB", "waits, ms", "experts, GiB")
    wide = max(37, *(len(one.name) for one in outcomes))
    lines = [" " * wide + "".join(f"{head:>13}" for head in heads)]
    for one in outcomes:
        figures = (
            f"{one.seconds * 1e3:.1f}",
            f"{outcomes[0].seconds / one.seconds:.1%}",
            f"{one.imbalance:.3f}",
        )
        figures += (
            f"{one.sent / 1e6:.1f}",
            f"{one.exposed * 1e3:.2f}",
            f"{one.memory.total / 2**30:.2f}",
        )
        added = one.memory.total / outcomes[1].memory.total - 1
        lines.append(
            f"{one.name:<{wide}}"
            + "".join(f"{figure:>13}" for figure in figures)
            + f" (+{added:.1%})"
        )
    lines += [
        "",
        "speed: forced balance is 100%. copies: sent by a rank in a step; waits: of a step, for copies alone",
    ]
    return "\n".join(lines)


def _doubts(args: argparse.Namespace) -> list[str]:
    """What makes the prediction worse than it has to be."""
    found, layers = [], Model.named(args.model).layers
    if args.step_ms is None:
        found.append(
            "absolute times can be off by up to 45% (docs/what-if.md): give --step-ms, what your step takes"
        )
    if (recorded := _recorded(args.trace)) not in (None, (args.ep, layers)):
        of = f"the record is of {recorded[1]} layers on {recorded[0]} ranks, this is of {layers} on {args.ep}"
        found.append(f"{of}: a guess about another run")
    return found


def _recorded(trace: str) -> tuple[int, int] | None:
    """Ranks of an expert-parallel group, and layers, of a run folder; ``None`` for another trace."""
    infos = list(read_infos(Path(trace)).values())
    return (infos[0].ranks, sum(len(info.layers) for info in infos)) if infos else None


def make_job(args: argparse.Namespace) -> Job:
    """What the command line asks for. Raises ValueError, with the way out."""
    model, cluster = Model.named(args.model), Cluster.named(args.cluster, per_node=args.per_node)
    model = dataclasses.replace(model, seq=args.seq or model.seq)
    loads = read_loads(args.trace, num_experts=model.experts)
    if (experts := loads.shape[3]) != model.experts:
        infos = list(read_infos(Path(args.trace)).values())
        top_k = f",top_k={infos[0].top_k}" if infos else ""
        raise ValueError(
            f"{args.trace} has {experts} experts, {args.model} {model.experts}: give loads of this model, or take "
            f"layers of its size with as many experts as were recorded: --model {args.model},experts={experts}{top_k}"
        )
    if model.top_k > experts:
        raise ValueError(
            f"--model {args.model}: a token cannot go to {model.top_k} of {experts} experts; set top_k"
        )
    recorded, _ = _recorded(args.trace) or (None, None)
    if args.ranks is None:
        if recorded is None:
            raise ValueError(
                "--ranks N, the ranks of the job, is needed: only a run folder tells its own"
            )
        args.ranks = recorded * args.pp
    per_stage, rest = divmod(args.ranks, args.pp)
    if rest or args.pp * args.vpp > model.layers:
        most = f"{model.layers} layers at most" + f" with --vpp {args.vpp}" * (args.vpp > 1)
        raise ValueError(f"--ranks {args.ranks} must divide among --pp {args.pp} stages, of {most}")
    if args.vpp > 1 and (args.pp == 1 or args.microbatches % args.pp):
        raise ValueError(
            f"--vpp needs --pp above 1 that divides --microbatches, got {args.pp}, {args.microbatches}"
        )
    fits = [
        size for size in range(1, per_stage + 1) if per_stage % size == 0 and experts % size == 0
    ]
    args.ep = ep = args.ep or (recorded if recorded in fits else fits[-1])
    if ep not in fits:
        raise ValueError(
            f"--ep {ep} must divide {per_stage} ranks of a stage and {experts} experts: take one of {fits}"
        )
    world = World(tuple(rank // cluster.per_node for rank in range(ep)), cluster.speeds)
    loads = (
        np.repeat(loads, 3, axis=0) if len(loads) == 1 else loads
    )  # a single step is taken to go on
    most = EFFORT / max(ep, 64) ** 2  # layers times steps
    steps = min(args.steps, len(loads) - 1, max(1, int(most / 2)))
    layers = min(loads.shape[1], max(2, int(most / steps)))
    replayed = np.linspace(0, loads.shape[1] - 1, layers).round().astype(int).tolist()
    tokens = args.micro_batch * model.seq
    timing = Timing(
        dense=tokens * model.dense_flops() / cluster.dense,
        pair=model.shape().token_seconds(world) / (1 + BACKWARD),
        head=tokens * 2 * model.hidden * model.vocab / cluster.dense,
        send=cluster.speeds.inter.seconds(2 * tokens * model.hidden),
        contention=cluster.speeds.contention,
        hidden=args.hidden_all_to_all,
        recompute=args.recompute,
    )
    job = Job(
        model=model,
        layers=replayed,
        counts=spread(loads[:, replayed], ep, tokens * model.top_k * args.microbatches),
        first=len(loads) - steps,
        world=world,
        timing=timing,
        schedule=Schedule.even(
            model.layers, args.pp, microbatches=args.microbatches, chunks=args.vpp
        ),
        measured=args.cluster not in CLUSTERS,
        once=model.top_k if args.dispatcher == "flex" else 0,
    )
    return job if args.step_ms is None else job.lasting(args.step_ms / 1e3)


def main(argv: Sequence[str]) -> int:
    """Print the table and the recommendation; returns the exit status."""
    program = "python -m megatron_hecate --what-if"
    usage = f"{program} TRACE --model NAME --cluster NAME [--ranks N] [--ep N] [--step-ms MS] [...]; --help says more"
    parser = argparse.ArgumentParser(prog=program, usage=usage, description=__doc__)
    add = parser.add_argument
    add(
        "trace",
        help="a run folder, one of Megatron's own files, an .npz with counts or load, or OLMoE's JSON",
    )
    add(
        "--model",
        required=True,
        help=f"{', '.join(MODELS)}; sizes may follow, as in olmoe,layers=8",
    )
    add("--cluster", required=True, help=f"{', '.join(CLUSTERS)}, or a file from --measure")
    add("--ranks", type=int, help="of the job (default: those of a run folder)")
    add(
        "--ep",
        type=int,
        help="expert-parallel size (default: that of a run folder, else the largest that fits)",
    )
    add("--pp", type=int, default=1, help="pipeline stages (%(default)s)")
    add("--vpp", type=int, default=1, help="chunks of a stage, interleaved (%(default)s)")
    add(
        "--per-node",
        type=int,
        default=8,
        help="ranks of a node, with a file from --measure (%(default)s)",
    )
    add("--microbatches", type=int, default=8, help="per step (%(default)s)")
    add("--micro-batch", type=int, default=1, help="sequences (%(default)s)")
    add("--seq", type=int, help="tokens of a sequence (default: the model's)")
    add("--slots", default="1,2,4", help="replicas per rank and layer (%(default)s)")
    add("--lifetime", default=",".join(LIFETIMES), help="of replicas (%(default)s)")
    add(
        "--late-replicas",
        default="0",
        help="of a layer, after the gate; several as in 0,8 (%(default)s)",
    )
    add(
        "--rehome",
        default="0",
        help="steps between looks for better homes; several as in 0,50 (%(default)s)",
    )
    add(
        "--rivals",
        metavar="NAME,...",
        help="also planners of bench/rivals, in a checkout, as in eplb,flexmoe,laer",
    )
    add(
        "--dispatcher",
        choices=("alltoall", "flex"),
        default="alltoall",
        help="flex: a token reaches a node once",
    )
    add(
        "--hidden-all-to-all",
        type=float,
        default=0.0,
        help="share that hides behind compute (%(default)s)",
    )
    add("--recompute", action="store_true", help="layers run their forward again in the backward")
    add("--step-ms", type=float, help="how long a step of stock really lasts")
    add(
        "--steps",
        type=int,
        default=16,
        help="so many at the end of the trace, at most (%(default)s)",
    )
    add(
        "--save",
        type=Path,
        metavar="FILE.json",
        help="write figures, recommendation, its flags and its replicas",
    )
    args = parser.parse_args(argv)
    try:
        for name in (
            "ranks",
            "ep",
            "pp",
            "vpp",
            "per_node",
            "microbatches",
            "micro_batch",
            "seq",
            "steps",
        ):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
                )
        if args.step_ms is not None and not 0 < args.step_ms < math.inf:
            raise ValueError(f"--step-ms must be above 0 and finite, got {args.step_ms}")
        if not 0 <= args.hidden_all_to_all <= 1:
            raise ValueError(
                f"--hidden-all-to-all must be from 0 to 1, got {args.hidden_all_to_all}"
            )
        if unknown := [name for name in args.lifetime.split(",") if name not in LIFETIMES]:
            raise ValueError(f"--lifetime {','.join(unknown)}: there are {', '.join(LIFETIMES)}")
        for flag in ("slots", "late-replicas", "rehome"):
            value = getattr(args, flag.replace("-", "_"))
            if not all(count.isdecimal() for count in value.split(",")):
                raise ValueError(f"--{flag} takes numbers, as in 1,2,4, got {value!r}")
        if args.save and not (args.save.parent.is_dir() and not args.save.is_dir()):
            raise ValueError(f"--save {args.save} must name a file in a folder that exists")
        job = make_job(args)
        most = job.model.experts - job.model.experts // job.world.num_ranks
        slots = sorted({min(int(count), most) for count in args.slots.split(",")} - {0})
        late, rehome = (
            sorted({int(n) for n in of.split(",")}) for of in (args.late_replicas, args.rehome)
        )
        rivals = _rivals(args.rivals, job, max(slots, default=0)) if args.rivals else []
        outcomes = job.compare(slots, args.lifetime.split(","), late, rehome)
        best, text = recommend(outcomes, Cluster.named(args.cluster).memory)
        outcomes += rivals
        if args.save:
            saved = dict(recommendation=text, flags=best and f"--moe-fssdp {_flags(best)}")
            saved |= dict(plan=best and _plan(job, best), arguments=vars(args))
            saved |= dict(outcomes=[dataclasses.asdict(one) for one in outcomes])
            args.save.write_text(json.dumps(saved, default=str) + "\n")
    except (ValueError, OSError, CompileError) as error:
        parser.error(str(error))
    steps, layers, ranks, _ = job.counts[job.first :].shape
    print(
        f"{args.model} on {args.cluster}: {args.ranks} ranks, EP {ranks}, PP {args.pp}, {args.microbatches} "
        f"microbatches; {steps} steps and {layers} layers of {args.trace}\n\n{describe(outcomes)}\n\n{text}"
    )
    for doubt in _doubts(args):
        print(f"note: {doubt}")
    return 0
