"""Compare predictions of ``what-if`` with published and our own measurements.

    python bench/what_if.py [--only forced,parts,laer,marin,cpu]

Each table marks the rows that were fitted to the measurements and the rows that were held back.
docs/what-if-checks.md sums up the output. Sources and licences of the measurements:
bench/data/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

import numpy as np
import torch
from laer_steps import PUBLISHED, SYSTEMS, laer_predictions
from parts import rows
from rivals.report import markdown

from megatron_hecate.plan import CPU, LayerShape, Placement, World
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.tools.presets import CLUSTERS, Cluster, Model
from megatron_hecate.tools.step_model import StepModel
from megatron_hecate.tools.work import Group, Work


def step_model(
    model: Model, cluster: Cluster, *, micro_batch: int, pp: int, microbatches: int
) -> StepModel:
    """Return the times of a step whose layers have equal work, the only column of a `Work`."""
    tokens = micro_batch * model.seq
    parts = np.array_split(np.zeros(model.layers, int), pp)
    return StepModel(
        dense=tokens * model.dense_flops() / cluster.dense,
        pair=model.shape().token_flops / cluster.speeds.flops,
        stages=tuple(tuple(part.tolist()) for part in parts),
        microbatches=microbatches,
        head=tokens * 2 * model.hidden * model.vocab / cluster.dense,
    )


def world_of(cluster: Cluster, ranks: int) -> World:
    """Return a group of ``ranks`` on full nodes of the cluster."""
    return World(tuple(rank // cluster.per_node for rank in range(ranks)), cluster.speeds)


def forced_step(
    model: Model, cluster: Cluster, *, ranks: int, ep: int, pp: int, batch: tuple[int, int]
) -> float:
    """Predict the seconds of a step under forced balance with HybridEP.

    Args:
        model: sizes of the model.
        cluster: speeds of the cluster.
        ranks: ranks of the job.
        ep: expert-parallel size.
        pp: pipeline-parallel size.
        batch: global batch and microbatch, in sequences.
    """
    microbatches = batch[0] * pp // (ranks * batch[1])
    world = world_of(cluster, ep)
    shape = model.shape(microbatches=microbatches)
    pairs = microbatches * batch[1] * model.seq * model.top_k
    group = Group(world=world, shape=shape, once=model.top_k)
    work = group.work_of_ranks(np.full((1, 1, ep), pairs))
    sizes = dict(micro_batch=batch[1], pp=pp, microbatches=microbatches)
    return float(step_model(model, cluster, **sizes).step_seconds(work)[0])


def forced() -> None:
    """Published steps under forced balance."""
    rows = []
    fitted = {("qwen3-30b-a3b", "h100x8"), ("deepseek-v3", "gb200x72")}
    for name, cluster, ranks, ep, pp, batch, micro, measured in PUBLISHED["forced_balance"]["rows"]:
        sizes = dict(ranks=ranks, ep=ep, pp=pp, batch=(batch, micro))
        predicted = forced_step(Model.named(name), CLUSTERS[cluster], **sizes)
        use = "fitted" if (name, cluster) in fitted else "held back"
        row = dict(
            model=name,
            cluster=cluster,
            ranks=ranks,
            ep=ep,
            pp=pp,
            measured=measured,
            predicted=predicted,
        )
        rows.append(row | dict(off=predicted / measured - 1, use=use))
    columns = dict(
        model=("model", "s"),
        cluster=("cluster", "s"),
        ranks=("ranks", "d"),
        ep=("EP", "d"),
        pp=("PP", "d"),
    )
    columns |= dict(
        measured=("measured, s", ".2f"), predicted=("predicted, s", ".2f"), off=("off", "+.1%")
    )
    print(markdown(rows, columns | dict(use=("use", "s"))))


def parts() -> None:
    """Single kernels."""
    columns = dict(
        source=("measured", "s"), what=("what", "s"), cluster=("cluster", "s"), ranks=("ranks", "d")
    )
    columns |= dict(
        published=("published", ".2f"), predicted=("predicted", ".2f"), off=("off", "+.1%")
    )
    print(markdown(list(rows()), columns | dict(use=("use", "s"))))


# of LAER-MoE's table
LAST_COLUMNS = dict(use=("use", "s"), loads=("loads", "s"), within=("within 5, 5, 10 %", "s"))


def laer() -> None:
    """LAER-MoE's 24 configurations."""
    rows = laer_predictions()
    for row in rows:
        row["use"] = "fitted" if row["model"].startswith("mixtral-8x7b") else "held back"
        # The loads of 8x22B and Qwen are not published.
        row["loads"] = "own" if row["use"] == "fitted" else "of 8x7B"
        missed = [s for s, most in SYSTEMS.items() if abs(row[f"{s}_off"]) > most]
        row["within"] = f"**no**: {', '.join(missed)}" if missed else "yes"
    columns = dict(model=("model", "s"), dataset=("data", "s"), aux_loss=("aux", ".4f"))
    for system in SYSTEMS:
        columns |= {f"{system}_ms": (f"{system}, ms", "d"), f"{system}_off": ("off", "+.1%")}
    print(markdown(rows, columns | LAST_COLUMNS))
    shares = ", ".join(f"{system} {rows[0][f'{system}_exposed']:.2f}" for system in SYSTEMS)
    print(f"\nFitted: share of the copies' time that does not hide: {shares}")
    for use in ("fitted", "held back"):
        chosen = [row for row in rows if row["use"] == use]
        met = []
        for system, most in SYSTEMS.items():
            within = sum(abs(row[f"{system}_off"]) <= most for row in chosen)
            met.append(f"{system} {within} of {len(chosen)}")
        print(f"{use}: within tolerance {', '.join(met)}")


def marin() -> None:
    """Forced against learned routing on 64 GB200."""
    run = PUBLISHED["marin"]
    cluster = CLUSTERS["gb200x72"]
    names = ("layers", "hidden", "experts", "top_k", "ffn", "shared", "seq")
    sizes = {name: run["model"][name] for name in names}
    # Heads are not published; assumed: 40, and 8 of keys and values.
    attention = 2 * sizes["hidden"] * 128 * (40 + 8)
    model = Model(**sizes, attention=attention, width=40 * 128, vocab=128256)
    microbatches = run["model"]["global_batch"] // 64
    world = world_of(cluster, 64)
    shape = model.shape(microbatches=microbatches)
    pairs = microbatches * model.seq * model.top_k
    work = Group(world=world, shape=shape).work_of_ranks(np.full((1, 1, 64), pairs))
    times = step_model(model, cluster, micro_batch=1, pp=1, microbatches=microbatches)

    def seconds(overload: float) -> float:
        # The fullest rank determines the time of experts and all-to-all.
        changed = Work(peak=work.peak * overload, trip=work.trip * overload)
        return float(times.step_seconds(changed)[0])

    rows = [
        dict(case="forced balance", measured=run["forced_s"], predicted=seconds(1.0), use="given")
    ]
    for case, measured, average, worst in run["rows"]:
        for what, overload in (("average", average), ("largest", worst)):
            label = f"{case}, {what} overload {overload}"
            row = dict(case=label, measured=measured, predicted=seconds(overload))
            # Later steps became slower while the overload fell: imbalance is not the cause.
            if "first" in case:
                row["use"] = "held back"
            else:
                row["use"] = "not scored"
            rows.append(row)
    for row in rows:
        row["measured_ratio"] = row["measured"] / rows[0]["measured"]
        row["ratio"] = row["predicted"] / rows[0]["predicted"]
        row["off"] = row["ratio"] / row["measured_ratio"] - 1
    columns = dict(
        case=("case", "s"), measured=("measured, s", ".2f"), predicted=("predicted, s", ".2f")
    )
    columns |= dict(
        measured_ratio=("measured / forced", ".3f"),
        ratio=("predicted / forced", ".3f"),
        off=("off", "+.1%"),
        use=("use", "s"),
    )
    print(markdown(rows, columns))


def cpu() -> None:
    """Our own runs on 2 CPU ranks, bench/step_time.py. Forced balance given; 10 % are allowed."""
    run = PUBLISHED["cpu"]
    elements = 2 * run["hidden"] * run["ffn"]
    sizes = dict(expert_bytes=4 * elements, grad_bytes=4 * elements, token_bytes=4 * run["hidden"])
    shape = LayerShape(**sizes, token_flops=2.0 * elements, microbatches=run["microbatches"])
    world = World(node=(0, 0), speeds=CPU)
    load = np.array(run["load"])
    placements = [Placement(np.repeat([0, 1], 8), rows) for rows in np.array(run["table"])]
    bare = [placement.homes_only for placement in placements]
    forced = Group(world=world, shape=shape).work_of_ranks(np.full((1, 2, 2), load[0].sum() / 2))
    measured = run["skewed_stock_s"] / run["skewed_fssdp_s"]
    rows = []
    for how, pair in (
        ("GEMMs at the speed of `plan.CPU`", shape.token_flops / CPU.flops),
        ("timed alone", _cpu_pair()),
    ):
        # Compute outside experts, such that forced balance is predicted exactly.
        none = StepModel(dense=0.0, pair=pair, stages=((0, 1),), microbatches=run["microbatches"])
        times = none.fitted(forced, run["forced_s"])
        windows = dataclasses.replace(shape, hidden_seconds=times.dense)
        seconds = []
        for placed in (bare, placements):
            group = Group(world=world, shape=windows)
            work, _ = group.work_of_placements(load[None], [placed], "p2p")
            seconds.append(float(times.step_seconds(work)[0]))
        stock, fssdp = seconds
        ratio = stock / fssdp
        rows.append(dict(how=how, stock=stock, fssdp=fssdp, ratio=ratio, off=ratio / measured - 1))
    row = dict(how="measured", stock=run["skewed_stock_s"], fssdp=run["skewed_fssdp_s"])
    rows.append(row | dict(ratio=measured, off=0.0))
    columns = dict(how=("experts", "s"), stock=("stock, s", ".3f"), fssdp=("FSSDP, s", ".3f"))
    print(markdown(rows, columns | dict(ratio=("stock / FSSDP", ".3f"), off=("off", "+.1%"))))
    print(
        "\nForced balance: predicted 1 (nothing is copied), "
        f"measured {run['balanced_ratio']:.2f} and 1.00."
    )


def _cpu_pair() -> float:
    """Measure the forward seconds of a pair on one core of this machine.

    The forward is taken as a third of forward and backward.
    """
    width = PUBLISHED["cpu"]["hidden"]
    ffn = PUBLISHED["cpu"]["ffn"]
    tokens = 2048
    torch.set_num_threads(1)
    expert = torch.nn.Sequential(
        torch.nn.Linear(width, ffn), torch.nn.GELU(), torch.nn.Linear(ffn, width)
    )
    spent = []
    for _ in range(30):
        x = torch.randn(tokens, width, requires_grad=True)
        order = torch.randperm(tokens)
        # Time of this process alone, so that other load on the machine counts little.
        begin = time.process_time()
        y = expert(x.index_select(0, order)) * torch.rand(tokens, 1)
        torch.zeros_like(y).index_add(0, order, y).sum().backward()
        spent.append(time.process_time() - begin)
    return float(np.median(spent)) / tokens / (1 + BACKWARD)


SECTIONS = {
    "forced": forced,
    "parts": parts,
    "laer": laer,
    "marin": marin,
    "cpu": cpu,
}


def main(argv: list[str] | None = None) -> None:
    """Print the selected tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="which tables (%(default)s)")
    names = parser.parse_args(argv).only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(SECTIONS)}")
    for name in names:
        print(f"\n## {SECTIONS[name].__doc__}\n")
        SECTIONS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
