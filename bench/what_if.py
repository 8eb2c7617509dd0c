"""How far the simulator behind ``--what-if`` is off: its predictions beside published and our own measurements.

    python bench/what_if.py [--only forced,parts,laer,marin,hecate,cpu]

Each table says what was fitted to the measurements and what was held back. docs/what-if-checks.md keeps the output.
Sources and licences of the measurements: bench/data/README.md. W0 to W7 have their own command, bench/workloads.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

import numpy as np
import torch
from loads import DATA, Trace
from parts import rows
from rivals import find_planners
from rivals.planner import Setting
from rivals.report import markdown
from rivals.simulated import planned

from megatron_hecate.offline.presets import CLUSTERS, Cluster, Model
from megatron_hecate.offline.step_model import Schedule, Timing, Work, simulate
from megatron_hecate.offline.traffic import LayerPlan
from megatron_hecate.plan import CPU, LayerShape, Link, Placement, World
from megatron_hecate.plan.cost import BACKWARD

PUBLISHED: dict = json.loads((DATA / "published" / "figures.json").read_text())
A100_DENSE: float = (
    0.45 * 312e12
)  # FLOP/s outside experts: the share of the peak that `plan.H100` takes for experts
SYSTEMS = {"FSDP": 0.05, "FLEX": 0.05, "LAER": 0.10}  # and by how much a prediction may be off


def timing(model: Model, cluster: Cluster, micro_batch: int, *, hidden: float = 0.0) -> Timing:
    """Of a microbatch of so many sequences."""
    tokens = micro_batch * model.seq
    return Timing(
        dense=tokens * model.dense_flops() / cluster.dense,
        pair=model.shape().token_flops / cluster.speeds.flops,
        head=tokens * 2 * model.hidden * model.vocab / cluster.dense,
        contention=cluster.speeds.contention,
        hidden=hidden,
    )


def world_of(cluster: Cluster, ranks: int) -> World:
    return World(tuple(rank // cluster.per_node for rank in range(ranks)), cluster.speeds)


def forced_step(
    model: Model, cluster: Cluster, *, ranks: int, ep: int, pp: int, batch: tuple[int, int]
) -> float:
    """Seconds of a step under forced balance with HybridEP; ``batch``: global, micro."""
    microbatches = batch[0] * pp // (ranks * batch[1])
    world, shape = world_of(cluster, ep), model.shape(microbatches=microbatches)
    pairs = microbatches * batch[1] * model.seq * model.top_k
    work = Work.balanced(pairs, world, shape, once=model.top_k).layers([0] * model.layers)
    schedule = Schedule.even(model.layers, pp, microbatches=microbatches)
    return float(simulate(work, timing(model, cluster, batch[1]), schedule).total[0])


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


def laer_row(row: dict, system: str) -> tuple[float, float]:
    """Milliseconds of a step of LAER-MoE's artifact without copies, and of all its copies with nothing hidden."""
    setup, kind = PUBLISHED["laer"], row["model"].rpartition("-")[2]
    hidden, ffn, layers, seq = row["hidden"], row["ffn"], row["layers"], setup["seq"]
    peak = _laer_tokens(kind, system).max(axis=2)  # [I, L]
    none = np.zeros_like(peak)
    trip = (
        peak * 2 * hidden * 7 / 8 / setup["intra_node_bytes_per_s"]
    )  # in the trace all tokens stay in their node
    work = Work(peak, trip, none, none, none, none, none, none)
    work = work.layers([layer * peak.shape[1] // layers for layer in range(layers)])
    tokens = setup["tokens_per_step"] / setup["ranks"] / setup["microbatches"]
    attention = 2 * hidden * 128 * (row["heads"] + row["kv_heads"])
    mlp = (
        setup["mlp_ms_per_4096_tokens"] / 4096e3 / (4096 * 14336)
    )  # profiled: seconds per token, by size
    times = Timing(
        dense=tokens * (2 * attention + 2 * seq * row["heads"] * 128) / A100_DENSE,
        pair=mlp * hidden * ffn,
        head=tokens * 2 * hidden * 32000 / A100_DENSE,
        recompute=True,
    )
    step = simulate(work, times, Schedule.even(layers, 1, microbatches=setup["microbatches"]))
    restored = (
        setup["capacity"][kind] * 3 * hidden * ffn * 2 * 0.75
    )  # bytes of a layer's experts from other nodes
    trips = 3 * layers * setup["microbatches"]  # weights for forward and backward, and gradients
    return float(step.total.mean()) * 1e3, trips * restored / (
        setup["inter_node_bytes_per_s"] / 8
    ) * 1e3


def _laer_tokens(kind: str, system: str) -> np.ndarray:
    """[I, L, R] tokens of a microbatch; the first iteration, in which no system knows anything, is left out."""
    with np.load(DATA / "published" / "laer_tokens.npz") as archive:
        return archive[f"{kind}_{system}"][1:].astype(np.float64)


def laer_predictions() -> list[dict]:
    """A row per configuration: measured and predicted ms of each system. One number per system is fitted, on 8x7b."""
    setup = PUBLISHED["laer"]
    rows = [dict(zip(setup["columns"], row, strict=True)) for row in setup["rows"]]
    for system in SYSTEMS:
        parts = [laer_row(row, system) for row in rows]
        fit = [
            (copies / row[f"{system}_ms"], 1 - rest / row[f"{system}_ms"])
            for row, (rest, copies) in zip(rows, parts, strict=True)
            if row["model"].startswith("mixtral-8x7b")
        ]
        share = sum(x * y for x, y in fit) / sum(x * x for x, _ in fit)
        for row, (rest, copies) in zip(rows, parts, strict=True):
            row[system] = rest + share * copies
            row[f"{system}_exposed"] = share
            row[f"{system}_off"] = row[system] / row[f"{system}_ms"] - 1
    return rows


def laer() -> None:
    """LAER-MoE's 24 configurations."""
    rows = laer_predictions()
    for row in rows:
        row["use"] = "fitted" if row["model"].startswith("mixtral-8x7b") else "held back"
        row["within"] = (
            ", ".join(s for s, most in SYSTEMS.items() if abs(row[f"{s}_off"]) > most) or "yes"
        )
        row["within"] = row["within"] if row["within"] == "yes" else f"**no**: {row['within']}"
    columns = dict(model=("model", "s"), dataset=("data", "s"), aux_loss=("aux", ".4f"))
    for system in SYSTEMS:
        columns |= {f"{system}_ms": (f"{system}, ms", "d"), f"{system}_off": ("off", "+.1%")}
    print(markdown(rows, columns | dict(use=("use", "s"), within=("within 5, 5, 10 %", "s"))))
    shares = ", ".join(f"{system} {rows[0][f'{system}_exposed']:.2f}" for system in SYSTEMS)
    print(f"\nFitted: share of the copies' time that does not hide: {shares}")
    for use in ("fitted", "held back"):
        of = [row for row in rows if row["use"] == use]
        met = [
            f"{s} {sum(abs(r[f'{s}_off']) <= most for r in of)} of {len(of)}"
            for s, most in SYSTEMS.items()
        ]
        print(f"{use}: within tolerance {', '.join(met)}")


def marin() -> None:
    """Forced against learned routing on 64 GB200."""
    run, cluster = PUBLISHED["marin"], CLUSTERS["gb200x72"]
    sizes = {
        name: run["model"][name]
        for name in ("layers", "hidden", "experts", "top_k", "ffn", "shared", "seq")
    }
    attention = (
        2 * sizes["hidden"] * 128 * (40 + 8)
    )  # heads are not published: 40, and 8 of keys and values
    model = Model(**sizes, attention=attention, width=40 * 128, vocab=128256)
    microbatches = run["model"]["global_batch"] // 64
    world, shape = world_of(cluster, 64), model.shape(microbatches=microbatches)
    work = Work.balanced(microbatches * model.seq * model.top_k, world, shape).layers(
        [0] * model.layers
    )
    schedule = Schedule.even(model.layers, 1, microbatches=microbatches)

    def seconds(overload: float) -> float:
        changed = dataclasses.replace(work, peak=work.peak * overload, trip=work.trip * overload)
        return float(simulate(changed, timing(model, cluster, 1), schedule).total[0])

    rows = [dict(case="forced balance", measured=run["forced_s"], predicted=seconds(1.0))]
    for case, measured, average, worst in run["rows"]:
        rows.append(
            dict(
                case=f"{case}, average overload {average}",
                measured=measured,
                predicted=seconds(average),
            )
        )
        rows.append(
            dict(
                case=f"{case}, largest overload {worst}",
                measured=measured,
                predicted=seconds(worst),
            )
        )
    for row in rows:
        row["measured_ratio"], row["ratio"] = (
            row["measured"] / rows[0]["measured"],
            row["predicted"] / rows[0]["predicted"],
        )
        row["off"] = row["ratio"] / row["measured_ratio"] - 1
    columns = dict(
        case=("case", "s"), measured=("measured, s", ".2f"), predicted=("predicted, s", ".2f")
    )
    columns |= dict(
        measured_ratio=("measured / forced", ".3f"),
        ratio=("predicted / forced", ".3f"),
        off=("off", "+.1%"),
    )
    print(markdown(rows, columns))


def hecate() -> None:
    """The Hecate paper's printed ratios. Its batch and its loads are not printed: ours stand in."""
    trace = Trace.read(DATA / "pysrc_e64k6_aux0.npz")
    rates = {
        "A": (0.45 * 125e12, 150e9, 100e9 / 8),
        "B": (0.45 * 312e12, 300e9, 400e9 / 8),
    }  # datasheets; bytes/s
    rows = []
    for name, (flops, nvlink, net) in rates.items():
        links = dict(intra=Link(0.8 * nvlink, 12e-6), inter=Link(0.9 * net / 8, 25e-6))
        speeds = dataclasses.replace(CLUSTERS["a100x8"].speeds, **links, flops=flops)
        for size, width in (("GPT-MoE-S", 768), ("GPT-MoE-L", 1536)):
            for tokens in (4096, 16384):
                counts = trace.to_ranks(32)[100:112].astype(float)
                counts = np.rint(
                    counts * (tokens * 2 / counts.sum(axis=(2, 3), keepdims=True) * 32)
                ).astype(np.int64)
                elements = 2 * width * 2 * width
                dense = tokens * (8 * width**2 + 2 * 2048 * width) / flops
                shape = LayerShape(
                    2 * elements, 4 * elements, 2 * width, 2.0 * elements, hidden_seconds=dense
                )
                setting = Setting(
                    64, world=World(tuple(r // 8 for r in range(32)), speeds), shape=shape, slots=2
                )
                times = Timing(
                    dense=dense, pair=shape.token_flops / flops, contention=speeds.contention
                )
                step = {}
                for planner in ("ep", "algorithm1", "hecate"):
                    work = planned(find_planners()[planner], counts, setting)
                    work = work.layers([layer % 4 for layer in range(12)])
                    for lifetime in ("iteration", "layer"):
                        schedule = Schedule.even(12, 1, microbatches=1, lifetime=lifetime)
                        step[planner, lifetime] = float(
                            simulate(work, times, schedule).total[1:].mean()
                        )
                ep = step["ep", "iteration"]
                row = dict(
                    cluster=name,
                    model=size,
                    tokens=tokens,
                    paper=ep / step["algorithm1", "iteration"],
                )
                row |= dict(
                    ours=ep / step["hecate", "iteration"],
                    printed="1.34-1.78" if name == "A" else "1.26-1.70",
                )
                rows.append(
                    row
                    | dict(again=step["algorithm1", "layer"] / step["algorithm1", "iteration"] - 1)
                )
    columns = dict(cluster=("cluster", "s"), model=("model", "s"), tokens=("tokens per rank", "d"))
    columns |= dict(
        printed=("printed", "s"),
        paper=("EP / Algorithm 1", ".2f"),
        ours=("EP / our planner", ".2f"),
    )
    print(
        markdown(rows, columns | dict(again=("layer over iteration (printed 7.5-16.9 %)", "+.1%")))
    )


def cpu() -> None:
    """Our own runs: 2 CPU ranks of bench/step_time.py. The forced-balance step is taken as given; 10 % are allowed."""
    run = PUBLISHED["cpu"]
    elements = 2 * run["hidden"] * run["ffn"]
    sizes = dict(expert_bytes=4 * elements, grad_bytes=4 * elements, token_bytes=4 * run["hidden"])
    shape = LayerShape(**sizes, token_flops=2.0 * elements, microbatches=run["microbatches"])
    world = World(node=(0, 0), speeds=CPU)
    load, table = np.array(run["load"]), np.array(run["table"])
    schedule = Schedule.even(2, 1, microbatches=run["microbatches"])
    placements = [Placement(np.repeat([0, 1], 8), rows) for rows in table]
    counts = np.stack([load - load // 2, load // 2], axis=1)  # [L, R, E] each rank routes half
    plans = {
        name: [[LayerPlan.of(c, p, p, world, shape) for c, p in zip(counts, placed, strict=True)]]
        for name, placed in {
            "stock": [p.homes_only for p in placements],
            "FSSDP": placements,
        }.items()
    }
    forced = Work.balanced(float(load[0].sum()) / 2, world, shape).layers([0, 0])
    measured = run["skewed_stock_s"] / run["skewed_fssdp_s"]
    rows = []
    for how, pair in (
        ("GEMMs at the speed of `plan.CPU`", shape.token_flops / CPU.flops),
        ("timed alone", _cpu_pair()),
    ):
        none = Timing(dense=0.0, pair=pair, contention=CPU.contention)
        rest = run["forced_s"] - float(simulate(forced, none, schedule).total[0])
        times = dataclasses.replace(none, dense=rest / (1 + BACKWARD) / 2 / run["microbatches"])
        step = {
            name: float(simulate(Work.of(plan, world, shape), times, schedule).total[0])
            for name, plan in plans.items()
        }
        ratio = step["stock"] / step["FSSDP"]
        rows.append(
            dict(
                how=how,
                stock=step["stock"],
                fssdp=step["FSSDP"],
                ratio=ratio,
                off=ratio / measured - 1,
            )
        )
    rows.append(
        dict(
            how="measured",
            stock=run["skewed_stock_s"],
            fssdp=run["skewed_fssdp_s"],
            ratio=measured,
            off=0.0,
        )
    )
    columns = dict(how=("experts", "s"), stock=("stock, s", ".3f"), fssdp=("FSSDP, s", ".3f"))
    print(markdown(rows, columns | dict(ratio=("stock / FSSDP", ".3f"), off=("off", "+.1%"))))
    print(
        f"\nForced balance: predicted 1 (nothing is copied), measured {run['balanced_ratio']:.2f} and 1.00."
    )


def _cpu_pair() -> float:
    """Forward seconds of a pair in an expert of that run on one core here: a third of forward and backward."""
    width, ffn, tokens = PUBLISHED["cpu"]["hidden"], PUBLISHED["cpu"]["ffn"], 2048
    torch.set_num_threads(1)
    expert = torch.nn.Sequential(
        torch.nn.Linear(width, ffn), torch.nn.GELU(), torch.nn.Linear(ffn, width)
    )
    spent = []
    for _ in range(30):
        x, order = torch.randn(tokens, width, requires_grad=True), torch.randperm(tokens)
        begin = (
            time.process_time()
        )  # of this process alone: other load on the machine counts little
        y = expert(x.index_select(0, order)) * torch.rand(tokens, 1)
        torch.zeros_like(y).index_add(0, order, y).sum().backward()
        spent.append(time.process_time() - begin)
    return float(np.median(spent)) / tokens / (1 + BACKWARD)


SECTIONS = {
    "forced": forced,
    "parts": parts,
    "laer": laer,
    "marin": marin,
    "hecate": hecate,
    "cpu": cpu,
}


def main(argv: list[str] | None = None) -> None:
    """Print the tables asked for."""
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
