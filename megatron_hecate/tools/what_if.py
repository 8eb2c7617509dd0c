"""Estimate whether FSSDP pays for a run.

``megatron-hecate what-if TRACE --model NAME --cluster NAME --ranks N`` runs this. The time that
steps lose to imbalance is predicted from recorded loads, under forced balance, stock expert
parallelism, and FSSDP as it would plan. The assumptions are in docs/what-if.md, and the errors
found against published figures in docs/what-if-checks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_hecate import files
from megatron_hecate.device.compile import CompileError
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.tools.comparison import Comparison, compare
from megatron_hecate.tools.presets import CLUSTERS, MODELS
from megatron_hecate.tools.recommendation import describe_parts, flags_of
from megatron_hecate.tools.replay import Outcome
from megatron_hecate.tools.run import Run

PROGRAM = "megatron-hecate what-if"
# integers of at least 1, and what they are
_POSITIVE = {
    "--ranks": "ranks of the job (default: of a run folder)",
    "--ep": "expert-parallel size (default: of a run folder, else the largest that fits)",
    "--pp": "pipeline stages (default: of a run folder, else 1)",
    "--vpp": "interleaved chunks per stage (default: of a run folder, else 1)",
    "--per-node": "ranks per node, with a file from megatron-hecate measure (8)",
    "--microbatches": "microbatches per step (default: of a run folder, else 8)",
    "--micro-batch": "sequences per microbatch (default: tokens of a run folder, else 1 sequence)",
    "--seq": "tokens of a sequence (default: the model's)",
    "--steps": "most steps to replay, from the end of the trace (16)",
}


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} TRACE [--model NAME] [--cluster NAME] [--ranks N] [--ep N] "
        "[--step-ms MS] [...]; --help lists all",
        description=description,
    )
    add = parser.add_argument
    add("trace", help="a run folder, or an .npz with counts or load")
    add(
        "--model",
        help=f"{', '.join(MODELS)}; sizes may follow, as in olmoe,layers=8 (default: the sizes in "
        "a run folder)",
    )
    add(
        "--cluster",
        help=f"{', '.join(CLUSTERS)}, or a file from megatron-hecate measure "
        "(default: the speeds that a run folder holds)",
    )
    for flag, text in _POSITIVE.items():
        add(flag, type=int, help=text, default={"--per-node": 8, "--steps": 16}.get(flag))
    _add_step(parser)
    add("--slots", default="1,2,4", help="replicas per rank and layer (%(default)s)")
    add(
        "--rank-capacity-factor",
        type=float,
        metavar="F",
        help="moe_expert_rank_capacity_factor, for which FSSDP plans (default: of a run folder)",
    )
    add("--lifetime", default=",".join(LIFETIMES), help="lifetimes of replicas (%(default)s)")
    add(
        "--transport",
        help="transports of replicas (default: nvlink,p2p; the one in use in a run with FSSDP)",
    )
    add(
        "--save",
        type=Path,
        metavar="FILE.json",
        help="write the figures, the recommendation and its flags",
    )
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    """Add the properties of a step: dispatcher, overlap, optimizer, recomputation, time."""
    add = parser.add_argument
    add(
        "--dispatcher",
        choices=("alltoall", "flex"),
        help="flex: a token is sent to a node once (default: of a run folder, else alltoall)",
    )
    add(
        "--hidden-all-to-all",
        type=float,
        default=0.0,
        help="share of every all-to-all that hides behind compute (%(default)s)",
    )
    add(
        "--no-distributed-optimizer",
        action="store_true",
        help="every rank keeps the whole optimizer state of its experts; else ranks with the same "
        "experts share it (default: of a run folder)",
    )
    add(
        "--recompute",
        action="store_true",
        help="layers repeat their forward in the backward (default: of a run folder)",
    )
    add(
        "--step-ms",
        type=float,
        help="measured time of a stock step, in milliseconds (default: of a run folder that "
        "observed stock training of the same size)",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Validate the arguments that need no loads.

    Raises:
        ValueError: if one is out of range; the message names flag, value and range.
    """
    for flag in _POSITIVE:
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if args.rank_capacity_factor is not None and not 1 <= args.rank_capacity_factor < math.inf:
        got = args.rank_capacity_factor
        raise ValueError(f"--rank-capacity-factor must be at least 1 and finite, got {got}")
    if args.step_ms is not None and not 0 < args.step_ms < math.inf:
        raise ValueError(f"--step-ms must be above 0 and finite, got {args.step_ms}")
    if not 0 <= args.hidden_all_to_all <= 1:
        raise ValueError(f"--hidden-all-to-all must be from 0 to 1, got {args.hidden_all_to_all}")
    if unknown := [name for name in args.lifetime.split(",") if name not in LIFETIMES]:
        raise ValueError(f"--lifetime {','.join(unknown)}: there are {', '.join(LIFETIMES)}")
    transports = (args.transport or "nvlink").split(",")
    if unknown := [name for name in transports if name not in ("nvlink", "p2p")]:
        raise ValueError(f"--transport {','.join(unknown)}: there are nvlink, p2p")
    if not all(count.isdecimal() for count in args.slots.split(",")):
        raise ValueError(f"--slots takes numbers, as in 1,2,4, got {args.slots!r}")
    # Checked before a comparison that could not be saved.
    if args.save and not (args.save.parent.is_dir() and not args.save.is_dir()):
        raise ValueError(f"--save {args.save} must name a file in a folder that exists")


def describe(outcomes: Sequence[Outcome]) -> str:
    """Format the outcomes as a table; forced balance and stock are the first two."""
    heads = ("step, ms", "speed", "imbalance", "worst", "copies, MB", "waits, ms", "experts, GiB")
    wide = max(37, *(len(one.name) for one in outcomes))
    lines = [" " * wide + "".join(f"{head:>13}" for head in heads)]
    for one in outcomes:
        figures = (
            f"{one.seconds * 1e3:.1f}",
            f"{outcomes[0].seconds / one.seconds:.1%}",
            f"{one.imbalance:.3f}",
            f"{one.worst:.3f}",
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
        "worst: imbalance of a layer in a step; "
        "moe_expert_rank_capacity_factor must be larger, by padding, too",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the table and the recommendation; returns the exit status."""
    parser = make_parser(__doc__)
    flags = parser.parse_args(argv)
    try:
        check_arguments(flags)
        result = compare(flags, Run.read(flags.trace))
        if flags.save:
            _save(flags, result)
    except (ValueError, OSError, MemoryError, CompileError) as error:
        # One line, without the usage of a parser's error.
        text = str(error) or "there is not enough memory"
        parser.exit(2, f"{parser.prog}: error: {text}\n")
    steps, layers, _ = result.replay.loads.shape
    print(
        f"{result.settings.header}; {steps} steps and {layers} layers of {flags.trace}\n\n"
        f"{describe(result.outcomes)}\n\n"
        f"{describe_parts(result.outcomes[0], result.stock, result.advice.considered)}\n\n"
        f"{result.advice.text}"
    )
    for note in result.notes:
        print(f"note: {note}")
    return 0


def _save(flags: argparse.Namespace, result: Comparison) -> None:
    """Write the comparison to ``flags.save`` as JSON; see docs/what-if.md for its keys."""
    best = result.advice.best
    saved = dict(
        recommendation=result.advice.text,
        flags=best and f"--moe-fssdp {flags_of(best)}",
        arguments=vars(flags),
        settings=dataclasses.asdict(result.settings),
        outcomes=[dataclasses.asdict(one) for one in result.outcomes],
    )
    files.replace(flags.save, json.dumps(saved, default=str) + "\n")
