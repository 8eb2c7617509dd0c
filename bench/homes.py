"""What moving homes wins over today's contiguous ones, on recorded and synthetic loads.

    python bench/homes.py                                        the table of docs/homes.md; some minutes
    python bench/homes.py --load zipf-4 --ranks 64 --slots 2 --csv out.csv

A load is replayed as in `bench/balance.py`: replicas are planned from the forecast in every step, tokens are split by
the quotas that run on GPUs, one step in `STRIDE` is scored. Every so many steps homes are looked at. The last `WINDOW`
steps before a look choose. Steps and moves count from ``--skip`` on. *Uneven* is the same search where a rank may have
up to twice its share of a layer's homes, whatever it has in other layers: that is more freedom than any assignment has
that is even over a stage. Algorithm 2 asks for no gain.

The table has a line per load, ranks and slots; ``--csv`` writes one per way to choose homes.

| column | what |
|---|---|
| moved, uneven, Algorithm 2 | step and moving together; contiguous homes with as many slots = 1 |
| imbalance, copies, crossing | as in `bench/balance.py`: contiguous > moved, every 50 |
| GB between | between nodes, per layer and step, weights and gradients of replicas: contiguous > moved, every 50 |
| moved | experts whose home moved, per layer and look, of looks every 50 steps |
| moving | of the same, the time that moving takes, spread over all steps; nothing of it is hidden |
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from cases import Case, cases
from loads import DATA
from rivals.algorithm2 import algorithm2, with_homes
from rivals.hecate import Hecate
from rivals.planner import Setting
from rivals.report import Row, markdown, write_csv
from rivals.score import check_plan, score

from megatron_hecate.offline.simulated_job import MOVED
from megatron_hecate.offline.traffic import Traffic
from megatron_hecate.plan import HomeSearch, Placement, plan_replicas
from megatron_hecate.runtime.forecast import LoadHistory

WINDOW: int = 20  # steps that a look sees
STRIDE: int = 4  # one step in so many is scored
LOADS = "pysrc_e64k6_aux0,pysrc_e64k6_aux1e-2,zipf-4,hotspot,zipf-2,80%-to-4,burst,domains"
WAYS = (
    "moved, every 10",
    "moved, every 50",
    "moved, every 100",
    "uneven, every 50",
    "Algorithm 2, every 100",
)
SHOWN = WAYS[1]  # of the columns that compare two ways
COLUMNS: dict[str, tuple[str, str]] = {
    "load": ("load", "s"),
    "ranks": ("ranks", "d"),
    "slots": ("slots", "d"),
    "homes": ("homes", "s"),
    "moved": ("moved", ".1f"),
    "imbalance": ("imbalance", ".3f"),
    "copies": ("copies/rank", ".2f"),
    "inter_gb": ("GB between", ".2f"),
    "crossing": ("crossing", ".1%"),
    "step": ("step", ".3f"),
    "moving": ("moving", ".3f"),
    "total": ("in all", ".3f"),
}


class Homes:
    """Contiguous homes, which never move. Others look at the past from time to time.

    Args:
        setting: of every layer.
        num_layers: L.
        horizon: iterations that a new assignment is expected to last.
    """

    name = "contiguous"

    def __init__(self, setting: Setting, num_layers: int, *, horizon: int) -> None:
        self.setting, self.horizon = setting, horizon
        self.order = np.tile(np.arange(setting.num_experts), (num_layers, 1))
        self.homes = [setting.homes] * num_layers

    def look(self, window: np.ndarray) -> list[np.ndarray]:
        """[E] the homes of every layer by expert, chosen from ``window`` [T, L, E]."""
        return self.by_expert()

    def by_expert(self) -> list[np.ndarray]:
        """[E] homes of every layer now."""
        return [self.homes[layer].home[np.argsort(order)] for layer, order in enumerate(self.order)]

    def by_position(self, load: np.ndarray, layer: int) -> np.ndarray:
        """A load [..., E] by expert, as the layer's placement numbers them."""
        return load[..., self.order[layer]]


class Moved(Homes):
    """What the package does."""

    name = "moved"

    def look(self, window: np.ndarray) -> list[np.ndarray]:
        shape = self.setting.shape
        search = HomeSearch(
            homes=self.homes[0],
            world=self.setting.world,
            cost=dataclasses.replace(self.setting.cost, most=self.setting.slots),
            expert_bytes=state_bytes(self.setting),
            token_seconds=shape.token_seconds(self.setting.world),
            horizon=self.horizon,
        )
        found = search.find(window, self.order)
        self.order = self.order if found is None else found.order
        return self.by_expert()


class Uneven(Moved):
    """As many empty homes as real ones: to swap an expert for one of them is to move it alone."""

    name = "uneven"

    def __init__(self, setting: Setting, num_layers: int, *, horizon: int) -> None:
        super().__init__(setting, num_layers, horizon=horizon)
        real, ranks = setting.num_experts, setting.num_ranks
        homes = Placement.initial(2 * real, ranks, num_slots=setting.slots)
        order = np.hstack([np.arange(r).reshape(ranks, -1) for r in (real, real)])
        order[:, real // ranks :] += real
        self.order, self.homes = np.tile(order.ravel(), (num_layers, 1)), [homes] * num_layers

    def look(self, window: np.ndarray) -> list[np.ndarray]:
        super().look(np.concatenate([window, np.zeros_like(window)], axis=2))
        return self.by_expert()

    def by_expert(self) -> list[np.ndarray]:
        return [home[: self.setting.num_experts] for home in super().by_expert()]

    def by_position(self, load: np.ndarray, layer: int) -> np.ndarray:
        return super().by_position(np.concatenate([load, np.zeros_like(load)], axis=-1), layer)


class Paper(Homes):
    """Algorithm 2 of the paper; what it calls the overlap degree is what hides here."""

    name = "Algorithm 2"

    def look(self, window: np.ndarray) -> list[np.ndarray]:
        setting = self.setting
        hidden = setting.shape.hidden_seconds / setting.shape.fetch_seconds(setting.world)
        found = algorithm2(
            window[-5:].mean(axis=0),
            setting.world,
            overlap_degree=min(int(hidden), setting.num_experts),
        )
        self.homes = [
            with_homes(home, setting.num_ranks, num_slots=setting.slots) for home in found
        ]
        return self.by_expert()


def state_bytes(setting: Setting) -> float:
    """All that moves with an expert."""
    return setting.shape.expert_bytes / 2 * MOVED


def travel(before: Sequence[np.ndarray], after: Sequence[np.ndarray], setting: Setting) -> Traffic:
    """Experts of all layers on their way between homes [E]."""
    node, ways = setting.world.node_index, [np.zeros(setting.num_ranks) for _ in range(4)]
    for old, new in zip(before, after, strict=True):
        for origin, home in zip(old[old != new], new[old != new], strict=True):
            near = 0 if node[origin] == node[home] else 2
            ways[near][origin] += 1
            ways[near + 1][home] += 1
    return Traffic(*ways)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Means over steps and layers; ``moved`` per layer and look, ``moving`` seconds per step and layer."""

    imbalance: float
    copies: float
    inter_gb: float
    crossing: float
    seconds: float
    moved: float
    moving: float


def replay(case: Case, homes: Homes, *, interval: int, skip: int) -> Outcome:
    """Replay one load with one way to choose homes, which are looked at every ``interval`` steps (0: never)."""
    steps, layers, _, _ = case.counts.shape
    setting, totals = case.setting, case.counts.sum(axis=2)
    cost = dataclasses.replace(setting.cost, most=setting.slots)
    history, ours = LoadHistory(), Hecate(setting)
    last: list[Placement | None] = [None] * layers
    scores, moved, seconds, looks = [], 0.0, 0.0, 0
    for t in range(steps):
        if interval and t and t % interval == 0:
            before = homes.by_expert()
            after = homes.look(totals[max(0, t - WINDOW) : t])
            last = [
                p if (a == b).all() else None for p, a, b in zip(last, before, after, strict=True)
            ]
            if t >= skip:
                on_the_way = travel(before, after, setting)
                moved += on_the_way.intra + on_the_way.inter
                seconds += on_the_way.seconds(state_bytes(setting), setting.world)
                looks += 1
        forecast = history.forecast()
        history.append(totals[t])
        for layer in range(layers if forecast is not None else 0):
            placed = plan_replicas(
                homes.by_position(forecast[layer], layer),
                homes.homes[layer],
                setting.world,
                cost=cost,
                previous=last[layer],
            )
            last[layer] = placed
            if t >= skip and t % STRIDE == 0:
                load = homes.by_position(case.counts[t, layer], layer)
                counted = dataclasses.replace(setting, num_experts=placed.num_experts)
                quotas = ours.split(load, placed)
                check_plan(quotas, placed, load)
                scores.append(score(quotas, placed, ours.moves(placed, placed), counted))
    means = {
        name: float(np.mean([getattr(s, name) for s in scores]))
        for name in ("imbalance", "copies", "inter_gb", "crossing", "seconds")
    }
    return Outcome(
        **means, moved=moved / layers / max(1, looks), moving=seconds / (steps - skip) / layers
    )


def compare(case: Case, *, skip: int, horizon: int) -> Iterator[Row]:
    """A row per way to choose homes."""
    ways: list[tuple[type[Homes], int]] = [
        (Homes, 0),
        (Moved, 10),
        (Moved, 50),
        (Moved, 100),
        (Uneven, 50),
        (Paper, 100),
    ]
    base = None
    for kind, interval in ways:
        start = time.perf_counter()
        homes = kind(case.setting, case.counts.shape[1], horizon=horizon)
        out = replay(case, homes, interval=interval, skip=skip)
        base = base or out.seconds
        name = f"{kind.name}, every {interval}" if interval else kind.name
        yield dict(
            load=case.load,
            ranks=case.setting.num_ranks,
            slots=case.setting.slots,
            homes=name,
            moved=out.moved,
            imbalance=out.imbalance,
            copies=out.copies,
            inter_gb=out.inter_gb,
            crossing=out.crossing,
            step=out.seconds / base,
            moving=out.moving / base,
            total=(out.seconds + out.moving) / base,
        )
        where = f"{case.load}, {case.setting.num_ranks} ranks, {case.setting.slots} slots"
        print(f"{where}, {name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)


def summary(rows: Sequence[Row]) -> str:
    """A table with a line per load, ranks and slots."""
    groups: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in rows:
        groups.setdefault((row["load"], row["ranks"], row["slots"]), {})[row["homes"]] = row
    lines: list[Row] = []
    columns = {name: (name, "s" if name == "load" else "d") for name in ("load", "ranks", "slots")}
    columns |= {name: (name, ".3f") for name in WAYS}
    columns |= {name: (name, "s") for name in ("imbalance", "copies", "inter_gb", "crossing")}
    columns |= dict(inter_gb=("GB between", "s"), moved=("moved", ".1f"), moving=("moving", ".3f"))
    for (load, ranks, slots), of in groups.items():
        line = dict(
            load=load,
            ranks=ranks,
            slots=slots,
            moved=of[SHOWN]["moved"],
            moving=of[SHOWN]["moving"],
        )
        line |= {name: of[name]["total"] for name in WAYS}
        for name in ("imbalance", "copies", "inter_gb", "crossing"):
            spec = COLUMNS[name][1]
            line[name] = " > ".join(format(of[way][name], spec) for way in (Homes.name, SHOWN))
        lines.append(line)
    return markdown(lines, columns)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the benchmark as the command line says; returns the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--load", default=LOADS, help="loads, recorded or synthetic, by name (%(default)s)")
    add("--ranks", default="16,32,64", help="group sizes (%(default)s)")
    add("--slots", default="0,1,2", help="replicas a rank may host (%(default)s)")
    add("--per-node", type=int, default=8, help="ranks per node (%(default)s)")
    add("--steps", type=int, default=240, help="first steps only (%(default)s)")
    add(
        "--skip",
        type=int,
        default=100,
        help="steps that are replayed, but not counted (%(default)s)",
    )
    add(
        "--horizon",
        type=int,
        default=100,
        help="iterations that new homes are expected to last (%(default)s)",
    )
    add("--csv", type=Path, metavar="FILE", help="write the table with full precision")
    args = parser.parse_args(argv)
    sizes = dict(
        pairs=16384, hidden=2048, ffn=768, microbatches=1, hidden_us=650, measured=None
    )  # of bench/balance.py
    names = args.load.split(",")
    recorded = [DATA / f"{name}.npz" for name in names if (DATA / f"{name}.npz").is_file()]
    try:
        args.ranks, slots = (
            [int(number) for number in text.split(",")] for text in (args.ranks, args.slots)
        )
        args.trace, args.load = (
            recorded,
            ",".join(name for name in names if DATA / f"{name}.npz" not in recorded),
        )
        found = list(cases(argparse.Namespace(**vars(args) | sizes | dict(slots=max(slots)))))
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for case in found:
        for number in slots:
            case = dataclasses.replace(
                case, setting=dataclasses.replace(case.setting, slots=number)
            )
            rows += compare(case, skip=args.skip, horizon=args.horizon)
    print(summary(rows))
    if args.csv:
        write_csv(args.csv, rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
