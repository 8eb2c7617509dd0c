"""Command line of `what_if`: its arguments and the checks that need no loads."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.tools.presets import CLUSTERS, MODELS

PROGRAM = "megatron-hecate what-if"
# arguments of at least 1, where given
_POSITIVE = (
    "ranks",
    "ep",
    "pp",
    "vpp",
    "per_node",
    "microbatches",
    "micro_batch",
    "seq",
    "steps",
    "processes",
)


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} TRACE [--model NAME] [--cluster NAME] [--ranks N] [--ep N] "
        "[--step-ms MS] [...]; --help lists all",
        description=description,
    )
    parser.add_argument(
        "trace",
        help="a run folder, an .npz with counts or load, or OLMoE's JSON",
    )
    parser.add_argument(
        "--model",
        help=f"{', '.join(MODELS)}; sizes may follow, as in olmoe,layers=8 (default: the sizes in "
        "a run folder)",
    )
    parser.add_argument(
        "--cluster",
        help=f"{', '.join(CLUSTERS)}, or a file from megatron-hecate measure "
        "(default: the speeds that a run folder holds)",
    )
    _add_layout(parser)
    _add_step(parser)
    _add_ways(parser)
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE.json",
        help="write the figures, the recommendation, its flags and its replicas",
    )
    return parser


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the job: ranks, pipeline, microbatches."""
    add = parser.add_argument
    add("--ranks", type=int, help="ranks of the job (default: of a run folder)")
    add(
        "--ep",
        type=int,
        help="expert-parallel size (default: of a run folder, else the largest that fits)",
    )
    add("--pp", type=int, help="pipeline stages (default: of a run folder, else 1)")
    add(
        "--vpp",
        type=int,
        help="interleaved chunks per stage (default: of a run folder, else 1)",
    )
    add(
        "--per-node",
        type=int,
        default=8,
        help="ranks per node, with a file from megatron-hecate measure (%(default)s)",
    )
    add("--microbatches", type=int, help="microbatches per step (default: of a run folder, else 8)")
    add(
        "--micro-batch",
        type=int,
        help="sequences per microbatch (default: tokens of a run folder, else 1 sequence)",
    )
    add("--seq", type=int, help="tokens of a sequence (default: the model's)")


def _add_step(parser: argparse.ArgumentParser) -> None:
    """Add the properties of a step: dispatcher, overlap, recomputation, measured time."""
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
    add(
        "--steps",
        type=int,
        default=16,
        help="most steps to replay, from the end of the trace (%(default)s)",
    )


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """Add the settings of FSSDP and the rivals to compare."""
    add = parser.add_argument
    add("--slots", default="1,2,4", help="replicas per rank and layer (%(default)s)")
    add("--lifetime", default=",".join(LIFETIMES), help="lifetimes of replicas (%(default)s)")
    add(
        "--transport",
        help="transports of replicas (default: nvlink,p2p; the one in use in a run with FSSDP)",
    )
    add(
        "--late-replicas",
        default="0",
        help="replicas of a layer after the gate; several as in 0,8 (%(default)s)",
    )
    add(
        "--rehome",
        default="0",
        help="steps between searches for better homes; several as in 0,50 (%(default)s)",
    )
    add(
        "--processes",
        type=int,
        help="processes that simulate (default: one, and one per core where the work takes longer)",
    )
    add(
        "--rivals",
        metavar="NAME,...",
        help="also planners of bench/rivals, in a checkout, as in eplb,flexmoe,laer",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Validate the arguments that need no loads.

    Raises:
        ValueError: if one is out of range; the message names flag, value and range.
    """
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.step_ms is not None and not 0 < args.step_ms < math.inf:
        raise ValueError(f"--step-ms must be above 0 and finite, got {args.step_ms}")
    if not 0 <= args.hidden_all_to_all <= 1:
        raise ValueError(f"--hidden-all-to-all must be from 0 to 1, got {args.hidden_all_to_all}")
    if unknown := [name for name in args.lifetime.split(",") if name not in LIFETIMES]:
        raise ValueError(f"--lifetime {','.join(unknown)}: there are {', '.join(LIFETIMES)}")
    transports = (args.transport or "nvlink").split(",")
    if unknown := [name for name in transports if name not in ("nvlink", "p2p")]:
        raise ValueError(f"--transport {','.join(unknown)}: there are nvlink, p2p")
    for flag in ("slots", "late-replicas", "rehome"):
        value = getattr(args, flag.replace("-", "_"))
        if not all(count.isdecimal() for count in value.split(",")):
            raise ValueError(f"--{flag} takes numbers, as in 1,2,4, got {value!r}")
    # Checked before a comparison of minutes, which could not be saved.
    if args.save and not (args.save.parent.is_dir() and not args.save.is_dir()):
        raise ValueError(f"--save {args.save} must name a file in a folder that exists")
