"""Compute the optimal placement: a lower bound for all planners, even with known loads.

    python bench/optimum.py

For every step and layer of the recorded loads with an imbalance above ``FLOOR`` under
`hecate-late`, a mixed-integer program minimizes the largest rank load over all placements of
replicas and all quotas, with scipy's HiGHS; at the time limit its proven bound counts. All other
samples count as 1. Every figure under "any placement" is thus a lower bound for all planners with
fixed homes, at any number of late copies. On larger groups most programs reach the time limit.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import numpy as np
from cases import Case
from loads import DATA, Trace
from rivals.hecate import HecateLate
from rivals.planner import Setting
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array
from shapes import swiglu

from megatron_hecate.plan import Placement, World, largest_load

FLOOR: float = 1.01
# time limit of one program in seconds
LIMIT: float = 60.0


def least_possible(
    total: np.ndarray, home: np.ndarray, *, num_ranks: int, slots: int, limit: float = LIMIT
) -> int:
    """Compute a lower bound of the largest rank load of all placements.

    With enough time it is the optimum, minus the solver's tolerance of 1/10,000.

    Args:
        total: tokens of each expert, [E].
        home: home rank of each expert, [E].
        num_ranks: number of ranks, R.
        slots: most replicas per rank.
        limit: time limit in seconds.
    """
    if num_ranks == 1 or not total.any():
        return int(total.sum())
    mean = total.sum() / num_ranks
    tokens = total / mean
    pairs = itertools.product(range(len(total)), range(num_ranks))
    ways = [(expert, rank) for expert, rank in pairs if home[expert] != rank]
    count = len(ways)
    # A way is an expert and a rank that may host its replica. Variables: tokens sent each way,
    # whether the replica exists, and the largest rank load.
    rows = lil_array((count + 2 * num_ranks + len(total), 2 * count + 1))
    most = np.zeros(rows.shape[0])
    for i, (e, r) in enumerate(ways):
        # no tokens without a replica
        rows[i, i] = 1
        rows[i, count + i] = -tokens[e]
        # load of both ranks
        rows[count + r, i] = 1
        rows[count + home[e], i] = -1
        # slots of the rank
        rows[count + num_ranks + r, count + i] = 1
        # at most the tokens of the expert
        rows[count + 2 * num_ranks + e, i] = 1
    rows[count : count + num_ranks, 2 * count] = -1
    most[count : count + num_ranks] = -np.bincount(home, weights=tokens, minlength=num_ranks)
    most[count + num_ranks : count + 2 * num_ranks] = slots
    most[count + 2 * num_ranks :] = tokens
    found = milp(
        np.eye(1, 2 * count + 1, 2 * count)[0],
        constraints=LinearConstraint(rows.tocsr(), -np.inf, most),
        integrality=np.repeat([0, 1, 0], [count, count, 1]),
        bounds=Bounds(0, np.repeat([np.inf, 1, np.inf], [count, count, 1])),
        options=dict(time_limit=limit),
    )
    proven = found.mip_dual_bound
    if proven is None or proven <= 1 + 1e-6:
        return math.ceil(mean)
    return math.ceil(mean * (proven - 1e-6))


def compare(case: Case) -> dict[str, np.ndarray]:
    """Compare planned placements with the bound.

    Returns:
        Imbalance [T, L] of plans from history, after late copies, and of the best placement.
    """
    steps, layers, num_ranks, _ = case.counts.shape
    names = ("hecate-unpriced", "hecate-late", "any placement")
    found = {name: np.ones((steps, layers)) for name in names}
    setting = case.setting
    for layer in range(layers):
        plan = HecateLate(setting)
        history: list[np.ndarray] = []
        for step, load in enumerate(case.counts[:, layer]):
            placed = plan.place(history)
            final = plan.correct(load, placed)
            history.append(load)
            total = load.sum(axis=0)
            mean = max(1, total.sum()) / num_ranks
            for name, placement in (("hecate-unpriced", placed), ("hecate-late", final)):
                found[name][step, layer] = max(1.0, largest_load(total, placement) / mean)
            if found["hecate-late"][step, layer] > FLOOR:
                best = least_possible(
                    total, setting.homes.home, num_ranks=num_ranks, slots=setting.slots
                )
                found["any placement"][step, layer] = best / mean
    return found


def _case(path: Path, args: argparse.Namespace) -> Case:
    """Read a recording.

    Raises:
        ValueError: if the file cannot be read, or its experts do not allow the ranks and slots.
    """
    trace = Trace.read(path)
    num_experts = trace.counts.shape[3]
    Placement.initial(num_experts, args.ranks, num_slots=args.slots)
    counts = trace.to_ranks(args.ranks, seed=0)[: args.steps]
    setting = Setting(
        num_experts, World(node=(0,) * args.ranks), swiglu(2048, 768), slots=args.slots
    )
    return Case(trace.name, counts, setting)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace",
        action="append",
        type=Path,
        metavar="FILE.npz",
        help="recorded load; default: all recordings",
    )
    parser.add_argument(
        "--ranks", type=int, default=8, help="number of ranks, on one node (%(default)s)"
    )
    parser.add_argument(
        "--slots", type=int, default=1, help="replicas a rank may host (%(default)s)"
    )
    parser.add_argument("--steps", type=int, help="first steps only")
    args = parser.parse_args()
    for name in ("ranks", "slots", "steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        cases = [_case(path, args) for path in args.trace or sorted(DATA.glob("*.npz"))]
    except ValueError as error:
        parser.error(str(error))
    print("| load | ranks | slots | planner | imbalance mean | p99 | samples above 1.03 | of |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        for name, left in compare(case).items():
            above = (left > 1.03).sum()
            figures = f"{left.mean():.3f} | {np.percentile(left, 99):.3f} | {above} | {left.size}"
            print(f"| {case.load} | {args.ranks} | {args.slots} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
