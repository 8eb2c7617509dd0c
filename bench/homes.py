"""Compare rehoming with contiguous homes, on recorded and synthetic loads.

    python bench/homes.py                     the table of docs/homes.md; some minutes
    python bench/homes.py --load zipf-4 --ranks 64 --slots 2 --csv out.csv

A load is replayed as in `bench/balance.py`: replicas are planned from the forecast in every step,
tokens are split by the quotas that run on GPUs, one step in `STRIDE` is scored. At an interval, a
search chooses new homes from the last `WINDOW` steps. Steps and moves count from ``--skip`` on.
*Uneven* is the same search with up to twice a rank's share of a layer's homes, independent of other
layers: more freedom than any assignment that is even over a pipeline stage. Algorithm 2 requires no
gain of a move.

The table has a line per load, ranks and slots; ``--csv`` writes one per way to choose homes.

| column | meaning |
|---|---|
| moved, uneven, Algorithm 2 | time of step and moves; contiguous homes with equal slots = 1 |
| imbalance, copies, crossing | as in `bench/balance.py`: contiguous > moved, every 50 |
| GB between | weights and gradients of replicas sent between nodes: contiguous > moved, every 50 |
| moved | experts whose home moved, per layer and search, with a search every 50 steps |
| moving | time of these moves, spread over all steps; none of it is hidden |

GB between is per layer and step.
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
from rivals.score import Score, check_plan, score

from megatron_hecate.homes.planner import HomeSearch
from megatron_hecate.plan import Placement, plan_replicas
from megatron_hecate.step.forecast import LoadHistory
from megatron_hecate.tools.traffic import Traffic

# bytes per parameter that move with an expert: weight, main parameter, two moments, unsharded
MOVED: int = 14
# steps of load from which a search chooses homes
WINDOW: int = 20
# interval of scored steps
STRIDE: int = 4
LOADS = "pysrc_e64k6_aux0,pysrc_e64k6_aux1e-2,zipf-4,hotspot,zipf-2,80%-to-4,burst,domains"
WAYS = (
    "moved, every 10",
    "moved, every 50",
    "moved, every 100",
    "uneven, every 50",
    "Algorithm 2, every 100",
)
# compared with contiguous homes in the last columns
SHOWN = WAYS[1]
COMPARED = ("imbalance", "copies", "inter_gb", "crossing")
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
    """Contiguous homes, which never move. Subclasses search for better homes at an interval.

    Args:
        setting: setting of every layer.
        num_layers: number of layers, L.
        horizon: iterations that a new assignment is expected to last.
    """

    name = "contiguous"

    def __init__(self, setting: Setting, num_layers: int, *, horizon: int) -> None:
        self.setting = setting
        self.horizon = horizon
        self.order = np.tile(np.arange(setting.num_experts), (num_layers, 1))
        self.homes = [setting.homes] * num_layers

    def look(self, window: np.ndarray) -> list[np.ndarray]:
        """Choose the homes of every layer from recent loads.

        Args:
            window: tokens per step, layer and expert, [T, L, E].

        Returns:
            For every layer, the home rank of each expert, [E].
        """
        return self.by_expert()

    def by_expert(self) -> list[np.ndarray]:
        """List for every layer the current home rank of each expert, [E]."""
        return [self.homes[layer].home[np.argsort(order)] for layer, order in enumerate(self.order)]

    def by_position(self, load: np.ndarray, layer: int) -> np.ndarray:
        """Permute a load [..., E] from expert numbers to the numbering of the layer's placement."""
        return load[..., self.order[layer]]


class Moved(Homes):
    """Homes that the package's search chooses."""

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
        if found is not None:
            self.order = found.order
        return self.by_expert()


class Uneven(Moved):
    """Homes with an empty one per expert: swapping an expert with an empty home moves it alone."""

    name = "uneven"

    def __init__(self, setting: Setting, num_layers: int, *, horizon: int) -> None:
        super().__init__(setting, num_layers, horizon=horizon)
        real = setting.num_experts
        ranks = setting.num_ranks
        homes = Placement.initial(2 * real, ranks, num_slots=setting.slots)
        # The first half of a rank's homes are real experts, the second half is empty.
        order = np.hstack([np.arange(r).reshape(ranks, -1) for r in (real, real)])
        order[:, real // ranks :] += real
        self.order = np.tile(order.ravel(), (num_layers, 1))
        self.homes = [homes] * num_layers

    def look(self, window: np.ndarray) -> list[np.ndarray]:
        super().look(np.concatenate([window, np.zeros_like(window)], axis=2))
        return self.by_expert()

    def by_expert(self) -> list[np.ndarray]:
        return [home[: self.setting.num_experts] for home in super().by_expert()]

    def by_position(self, load: np.ndarray, layer: int) -> np.ndarray:
        return super().by_position(np.concatenate([load, np.zeros_like(load)], axis=-1), layer)


class Paper(Homes):
    """Algorithm 2 of the paper; its overlap degree is the number of fetches that compute hides."""

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
    """Compute the bytes that move with an expert: weights and optimizer state."""
    return setting.shape.expert_bytes / 2 * MOVED


def travel(before: Sequence[np.ndarray], after: Sequence[np.ndarray], setting: Setting) -> Traffic:
    """Count the experts of all layers that move between two assignments of homes.

    Args:
        before: for every layer, the old home rank of each expert, [E].
        after: for every layer, the new home rank of each expert, [E].
        setting: setting of every layer.
    """
    node = setting.world.node_index
    ways = [np.zeros(setting.num_ranks) for _ in range(4)]
    for old, new in zip(before, after, strict=True):
        differs = old != new
        for origin, home in zip(old[differs], new[differs], strict=True):
            near = 0 if node[origin] == node[home] else 2
            ways[near][origin] += 1
            ways[near + 1][home] += 1
    return Traffic(*ways)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Means over steps and layers of one replay.

    Args:
        imbalance, copies, inter_gb, crossing: as in `bench/balance.py`.
        seconds: modelled seconds of a layer and step.
        moved: moved experts per layer and search.
        moving: seconds of moves per layer and step.
    """

    imbalance: float
    copies: float
    inter_gb: float
    crossing: float
    seconds: float
    moved: float
    moving: float


def replay(case: Case, homes: Homes, *, interval: int, skip: int) -> Outcome:
    """Replay one load with one way to choose homes.

    Args:
        case: load and group.
        homes: way to choose homes.
        interval: steps between two searches; 0: never search.
        skip: first steps that are replayed, but not counted.
    """
    steps, layers, _, _ = case.counts.shape
    setting = case.setting
    totals = case.counts.sum(axis=2)
    cost = dataclasses.replace(setting.cost, most=setting.slots)
    history = LoadHistory()
    ours = Hecate(setting)
    last: list[Placement | None] = [None] * layers
    scores: list[Score] = []
    moved = 0.0
    seconds = 0.0
    searches = 0
    for t in range(steps):
        if interval and t and t % interval == 0:
            before = homes.by_expert()
            after = homes.look(totals[max(0, t - WINDOW) : t])
            # Replicas of a layer whose homes have moved are no previous plan of the new placement.
            for layer in range(layers):
                if (before[layer] != after[layer]).any():
                    last[layer] = None
            if t >= skip:
                on_the_way = travel(before, after, setting)
                moved += on_the_way.intra + on_the_way.inter
                seconds += on_the_way.seconds(state_bytes(setting), setting.world)
                searches += 1
        forecast = history.forecast()
        history.append(totals[t])
        # The first step has no forecast.
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
    means = {}
    for name in (*COMPARED, "seconds"):
        means[name] = float(np.mean([getattr(result, name) for result in scores]))
    return Outcome(
        **means, moved=moved / layers / max(1, searches), moving=seconds / (steps - skip) / layers
    )


def compare(case: Case, *, skip: int, horizon: int) -> Iterator[Row]:
    """Yield a row per way to choose homes."""
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
    """Format a table with a line per load, ranks and slots."""
    groups: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in rows:
        groups.setdefault((row["load"], row["ranks"], row["slots"]), {})[row["homes"]] = row
    lines: list[Row] = []
    columns = {name: (name, "s" if name == "load" else "d") for name in ("load", "ranks", "slots")}
    columns |= {name: (name, ".3f") for name in WAYS}
    columns |= {name: (name, "s") for name in COMPARED}
    columns |= dict(inter_gb=("GB between", "s"), moved=("moved", ".1f"), moving=("moving", ".3f"))
    for (load, ranks, slots), ways in groups.items():
        contiguous = ways[Homes.name]
        shown = ways[SHOWN]
        line = dict(load=load, ranks=ranks, slots=slots)
        line |= dict(moved=shown["moved"], moving=shown["moving"])
        line |= {name: ways[name]["total"] for name in WAYS}
        for name in COMPARED:
            spec = COLUMNS[name][1]
            line[name] = f"{contiguous[name]:{spec}} > {shown[name]:{spec}}"
        lines.append(line)
    return markdown(lines, columns)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the benchmark; returns the rows."""
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
    # the defaults of bench/balance.py
    sizes = dict(pairs=16384, hidden=2048, ffn=768, microbatches=1, hidden_us=650, measured=None)
    names = args.load.split(",")
    recorded = [DATA / f"{name}.npz" for name in names if (DATA / f"{name}.npz").is_file()]
    try:
        args.ranks = [int(number) for number in args.ranks.split(",")]
        slots = [int(number) for number in args.slots.split(",")]
        args.trace = recorded
        args.load = ",".join(name for name in names if DATA / f"{name}.npz" not in recorded)
        found = list(cases(argparse.Namespace(**vars(args) | sizes | dict(slots=max(slots)))))
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for case in found:
        for number in slots:
            setting = dataclasses.replace(case.setting, slots=number)
            slotted = dataclasses.replace(case, setting=setting)
            rows += compare(slotted, skip=args.skip, horizon=args.horizon)
    print(summary(rows))
    if args.csv:
        write_csv(args.csv, rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
