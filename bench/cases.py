"""Build the cases of the balance benchmark: every load on every selected group size."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

import numpy as np
from loads import DATA, Trace, synthetic, synthetic_names
from rivals.planner import Setting
from shapes import swiglu

from megatron_hecate.plan import H100, Speeds, World

SYNTHETIC_STEPS: int = 40


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One load on one group; ``counts``: pairs [T, L, R, E]."""

    load: str
    counts: np.ndarray
    setting: Setting


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield every selected load on every selected group size.

    Without ``--trace`` and ``--load``, all recordings and all synthetic loads are selected.

    Raises:
        ValueError: if a load cannot be read, drawn or dealt to the ranks, if two loads have the
            same name, or if settings are invalid.
    """
    paths = args.trace or ()
    names = args.load.split(",") if args.load else []
    if not paths and not names:
        paths = sorted(DATA.glob("*.npz"))
        names = synthetic_names()
    loads: list[Trace | str] = [*(Trace.read(path) for path in paths), *names]
    known: set[str] = set()
    for load in loads:
        name = load.name if isinstance(load, Trace) else load
        if name in known:
            raise ValueError(
                f"two loads are named {name}; give each once, and files different names"
            )
        known.add(name)
    for load in loads:
        for num_ranks in args.ranks:
            if isinstance(load, Trace):
                counts = Trace(load.name, load.counts[: args.steps]).to_ranks(num_ranks)
                name = load.name
            else:
                counts = synthetic(load, num_ranks, steps=args.steps or SYNTHETIC_STEPS)
                name = load
            yield Case(name, counts, _setting(args, name, counts, num_ranks))


def _setting(args: argparse.Namespace, load: str, counts: np.ndarray, num_ranks: int) -> Setting:
    steps, _, _, num_experts = counts.shape
    if num_experts % num_ranks:
        raise ValueError(f"{load}: {num_experts} experts do not divide among {num_ranks} ranks")
    if args.skip >= steps:
        raise ValueError(f"{load}: --skip {args.skip} leaves none of {steps} steps")
    per_node = min(args.per_node, num_ranks)
    if num_ranks % per_node:
        raise ValueError(
            f"{num_ranks} ranks do not divide into nodes of {per_node}; set --per-node"
        )
    if not counts.any():
        raise ValueError(f"{load}: no tokens at all")
    speeds = Speeds.load(args.measured) if args.measured else H100
    world = World(node=tuple(rank // per_node for rank in range(num_ranks)), speeds=speeds)
    # A recorded count represents several real tokens.
    per_count = args.pairs / float(counts.sum(axis=(2, 3)).mean() / num_ranks)
    shape = swiglu(
        args.hidden, args.ffn, microbatches=args.microbatches, hidden_seconds=args.hidden_us * 1e-6
    )
    shape = dataclasses.replace(
        shape, token_bytes=shape.token_bytes * per_count, token_flops=shape.token_flops * per_count
    )
    setting = Setting(
        num_experts, world=world, shape=shape, slots=args.slots, tokens_per_count=per_count
    )
    # Without the option (bench/homes.py) receivers share the copying.
    if vars(args).get("transport") == "p2p":
        setting = dataclasses.replace(setting, scatters=False)
    # Raises ValueError for slots that are out of range.
    _ = setting.homes
    return setting
