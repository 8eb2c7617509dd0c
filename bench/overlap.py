"""Measure the hidden share of FSSDP's transfers on 2 CPU ranks, by lifetime, from recorded spans.

    python bench/overlap.py
    python bench/overlap.py --picture FILE      also draws the last step of rank 0

The models alternate in the same processes, so that noise of the machine affects all models equally.
Shares are medians over steps, of the rank with the larger share. *Exposed* is the time for which a
rank waited for a transfer. The last column is the step time over the step time of lifetime
``iteration``; on a CPU it includes the copies' own work, since cores move the bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from launch import again_on_ranks

# What, layer, begin and end of a span, seconds.
Span = tuple[str, str, float, float]
# keys: columns; values: spans whose times the column adds
SHARES = {
    "plan": ("plan",),
    "route": ("loads", "quotas"),
    "spAG exposed": ("spAG wait",),
    "spRS exposed": ("spRS wait",),
    "post": ("spAG start", "spRS start"),
    "dispatch, combine": ("dispatch", "combine"),
    "experts": ("experts",),
}


def measure(options: argparse.Namespace) -> None:
    """Measure on every rank; print the table on rank 0."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = _train(options)
    seconds, shares, spans = _time(runs, options)
    own = {}
    for name in runs:
        own[name] = {
            column: median(sum(step.get(span, 0.0) for span in spans) for step in shares[name])
            for column, spans in SHARES.items()
        }
    ranks: list[dict | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if dist.get_rank() == 0:
        _report(runs.keys(), ranks, {name: median(s) for name, s in seconds.items()}, runs)
        print(
            f"\nMedians of {options.steps} steps of {options.accumulate} microbatches, in turn, "
            f"{len(ranks)} ranks, {options.layers} layers."
        )
        if options.picture is not None:
            draw(spans, options.picture)
    dist.barrier()
    dist.destroy_process_group()


def _train(options: argparse.Namespace) -> dict[str, Any]:
    """Build a stock model, and an FSSDP model per lifetime."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.replicas.buffers import LIFETIMES

    model = dict(
        num_layers=options.layers, hidden_size=128, ffn_hidden_size=512, moe_ffn_hidden_size=512
    )
    case = tiny_gpt.Case(
        experts=16,
        seq=128,
        micro_batch=16,
        accumulate=options.accumulate,
        skew=2.0,
        settings=tuple(model.items()),
    )
    tiny_gpt.initialize(case)
    settings = dict(slots=2, transport=options.transport, speeds=tiny_gpt.FREE)
    configs = {name: HecateConfig(lifetime=name, **settings) for name in LIFETIMES}
    runs = {"stock": tiny_gpt.train(case, steps=0)}
    for name, config in configs.items():
        runs[name] = tiny_gpt.train(case, steps=0, hook=fssdp(config))
    return runs


def _time(
    runs: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, float]]], dict[str, list[Span]]]:
    """Time the steps of all models; the models alternate step by step.

    Returns:
        By model and step: seconds, and each span's share of the step; by model: the spans of this
        rank in the last step.
    """
    import torch.distributed as dist

    from megatron_hecate import trace

    steps = options.steps
    warmup = options.warmup
    rank = dist.get_rank()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    spans: dict[str, list[Span]] = {}
    for step in range(warmup + steps):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            with trace.SpanRecorder() as recorder:
                run.step(step)
                dist.barrier()
            took = time.perf_counter() - start
            if step >= warmup:
                seconds[name].append(took)
                shares[name].append({span: s / took for span, s in recorder.seconds().items()})
            spans[name] = recorder.spans
        if rank == 0:
            print(f"step {step + 1}/{warmup + steps}", file=sys.stderr, flush=True)
    return seconds, shares, spans


def _report(names, ranks, seconds, runs) -> None:  # noqa: ANN001
    print("| lifetime | step, s | " + " | ".join(SHARES) + " | replicas | over iteration |")
    print("|---|---|" + "---|" * (len(SHARES) + 2))
    for name in names:
        cells = [f"{max(rank[name][column] for rank in ranks):.1%}" for column in SHARES]
        print(
            f"| {name} | {seconds[name]:.3f} | {' | '.join(cells)} | {runs[name].replicas} | "
            f"{seconds[name] / seconds['iteration']:.3f} |"
        )


def draw(spans: dict[str, list[Span]], path: Path) -> None:
    """Draw the spans of a step by lifetime, work above transfers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from megatron_hecate.replicas.buffers import LIFETIMES

    colors = {
        "experts": "tab:green",
        "experts backward": "tab:olive",
        "attention backward": "tab:purple",
        "dispatch": "0.6",
        "combine": "0.6",
        "spAG": "tab:blue",
        "spRS": "tab:orange",
        "spAG wait": "tab:red",
        "spRS wait": "tab:red",
    }
    rows = {"spAG": -1, "spRS": -2}
    figure, axes = plt.subplots(len(LIFETIMES), 1, figsize=(14, 2.2 * len(LIFETIMES)), sharex=True)
    for axis, name in zip(axes, LIFETIMES, strict=True):
        zero = min(begin for _, _, begin, _ in spans[name])
        # Waits last, so that no other span hides them.
        for kind, _, begin, end in sorted(spans[name], key=lambda span: "wait" in span[0]):
            if kind in colors:
                style = dict(color=colors[kind], height=0.8, alpha=0.8)
                row = rows.get(kind, 0)
                axis.barh(row, 1e3 * (end - begin), left=1e3 * (begin - zero), **style)
        axis.set_yticks([0, -1, -2], ["work", "spAG", "spRS"])
        axis.set_title(f"lifetime {name}", fontsize=9)
    names = {color: kind for kind, color in colors.items()}
    names |= {"tab:red": "exposed wait", "0.6": "dispatch, combine"}
    boxes = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names]
    figure.legend(boxes, names.values(), fontsize=8, loc="upper center", ncol=len(names))
    axes[-1].set_xlabel("ms of one step, rank 0")
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main() -> int:
    """Run the benchmark on 2 ranks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument(
        "--warmup", type=int, default=6, help="untimed first steps, some of which time copies"
    )
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches per step")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model, all MoE")
    parser.add_argument("--transport", choices=("p2p", "nvlink"), default="p2p")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the last step of rank 0")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.accumulate, arguments.layers) < 1 or arguments.warmup < 0:
        parser.error("--steps, --accumulate and --layers must be 1 or more, --warmup 0 or more")
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    return again_on_ranks(__file__, 2)


if __name__ == "__main__":
    sys.exit(main())
