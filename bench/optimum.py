"""Compute the optimal placement: a lower bound for all planners, even with known loads.

    python bench/optimum.py

For every step and layer of the recorded loads in which `hecate-late` leaves more than ``FLOOR``, a mixed-integer
program finds the smallest largest rank load over all placements of replicas and all quotas, with scipy's HiGHS; where
it takes too long, what it has proven. All other samples count as 1. So every figure under "any placement" is a bound
that holds for every planner, at any number of late copies; homes stay where they are. On larger groups most programs
hit the time limit.
"""

from __future__ import annotations

import argparse
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
LIMIT: float = 60.0  # seconds for one program


def least_possible(
    total: np.ndarray, home: np.ndarray, *, num_ranks: int, slots: int, limit: float = LIMIT
) -> int:
    """A largest rank load that no placement with ``slots`` replicas per rank goes below.

    Given time, the optimum less what the solver tolerates, 1/10,000.

    Args:
        total: [E] tokens.
        home: [E].
        num_ranks: R.
        slots: replicas a rank may host.
        limit: seconds.
    """
    if num_ranks == 1 or not total.any():
        return int(total.sum())
    mean = total.sum() / num_ranks
    tokens = total / mean
    ways = [(e, r) for e in range(len(total)) for r in range(num_ranks) if home[e] != r]
    count = len(ways)
    # variables: tokens sent each way, whether the way is there, the largest rank load
    rows = lil_array((count + 2 * num_ranks + len(total), 2 * count + 1))
    most = np.zeros(rows.shape[0])
    for i, (e, r) in enumerate(ways):
        rows[i, i], rows[i, count + i] = 1, -tokens[e]  # none without a replica
        rows[count + r, i], rows[count + home[e], i] = 1, -1  # load of both ranks
        rows[count + num_ranks + r, count + i] = 1  # slots
        rows[count + 2 * num_ranks + e, i] = 1  # no more than there are
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
    proven = found.mip_dual_bound if found.mip_dual_bound is not None else -math.inf
    return math.ceil(mean * (proven - 1e-6)) if proven > 1 + 1e-6 else math.ceil(mean)


def compare(case: Case) -> dict[str, np.ndarray]:
    """[T, L] imbalance from history, after late copies, and of the best placement."""
    steps, layers, num_ranks, _ = case.counts.shape
    found = {
        name: np.ones((steps, layers))
        for name in ("hecate-unpriced", "hecate-late", "any placement")
    }
    setting = case.setting
    for layer in range(layers):
        plan, history = HecateLate(setting), []
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
    """Raises ValueError for a file that cannot be read, and for ranks and slots that its experts do not allow."""
    trace = Trace.read(path)
    num_experts = trace.counts.shape[3]
    Placement.initial(num_experts, args.ranks, num_slots=args.slots)
    counts = trace.to_ranks(args.ranks, seed=0)[: args.steps]
    setting = Setting(
        num_experts, World(node=(0,) * args.ranks), swiglu(2048, 768), slots=args.slots
    )
    return Case(trace.name, counts, setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace",
        action="append",
        type=Path,
        metavar="FILE.npz",
        help="all recorded ones if not named",
    )
    parser.add_argument("--ranks", type=int, default=8, help="on one node (%(default)s)")
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
            above, p99 = (left > 1.03).sum(), np.percentile(left, 99)
            row = (
                case.load,
                args.ranks,
                args.slots,
                name,
                f"{left.mean():.3f}",
                f"{p99:.3f}",
                above,
                left.size,
            )
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
