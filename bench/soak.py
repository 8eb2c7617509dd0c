"""Soak: train a tiny MoE model through kills, stops, exceptions, restarts, saves and evaluation.

    python bench/soak.py --iterations 2000 --seed 1       on 4 gloo CPU ranks
    python bench/soak.py --stock ...                      stock Megatron, disturbed alike

The oracle is stock Megatron, which trains the same iterations undisturbed: every loss of the
disturbed run, also those of repeated iterations, must be stock's. The seed decides everything but
the machine's timing (`soak_plan.py`). As torchrun does, a supervisor hosts the rendezvous store,
and starts all ranks again when one has ended (`soak_job.py`); ranks are forked from a process that
has imported Megatron. Exits with 1 when a check fails, and keeps the folder then.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from launch import FOLDERS, ROOT
from soak_plan import FEWEST

# Ranks that are forked get these folders, too.
sys.path[:0] = [str(ROOT / folder) for folder in (*FOLDERS, "bench")]

# Seconds: `HecateConfig.timeout`, longer than any stop; the timeout of all process groups.
TIMEOUT = 12.0
JOB_TIMEOUT = 28.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep", type=int, default=0, help="ranks of a group (default: all)")
    parser.add_argument("--stock", action="store_true", help="disturb stock Megatron")
    parser.add_argument(
        "--minutes", type=float, default=45.0, help="time limit of the disturbed run"
    )
    text = "keep all files there, and use stock's losses of an earlier run"
    parser.add_argument("--folder", type=Path, help=f"{text} (default: temporary)")
    options = parser.parse_args()
    if options.iterations < FEWEST:
        parser.error(f"--iterations {options.iterations} must be {FEWEST} or more")
    print("command: python", shlex.join(["bench/soak.py", *sys.argv[1:]]), flush=True)
    if options.folder and (options.folder / "soak").exists():
        parser.error(f"{options.folder}/soak exists: remove it, or name another folder")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    problems = soak(options, folder)
    for problem in problems:
        print("FAILED:", problem)
    if not options.folder and not problems:
        shutil.rmtree(folder)
    print(f"{len(problems)} checks failed" + (f", see {folder}" if problems else ""))
    return 1 if problems else 0


def soak(options: argparse.Namespace, folder: Path) -> list[str]:
    """Train the disturbed job and stock Megatron, print the figures, and return what is wrong."""
    import torch.distributed as dist
    from soak_figures import Figures
    from soak_job import Supervisor
    from soak_rank import Job

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(
        folder=str(folder / "soak"),
        ranks=options.ranks,
        ep=options.ep or options.ranks,
        iterations=options.iterations,
        until=options.iterations,
        seed=options.seed,
        stock=options.stock,
        disturbed=True,
        start=1,
        fired=frozenset(),
        port=store.port,
        timeout=TIMEOUT,
        job_timeout=JOB_TIMEOUT,
    )
    begun = time.time()
    soaked = Supervisor(job)
    if not soaked.run(begun + 60 * options.minutes):
        return [f"the job was given up after {soaked.reached} iterations"]
    ended = time.time()
    print(f"disturbed: {ended - begun:.0f} s", flush=True)
    reference = dataclasses.replace(
        job,
        folder=str(folder / f"stock-{job.seed}-{job.iterations}-{job.ranks}-{job.ep}"),
        until=soaked.reached,
        stock=True,
        disturbed=False,
        # Keys in the store begin with the number of the start.
        start=0,
    )
    undisturbed = Supervisor(reference)
    complete = undisturbed.run(math.inf)
    print(f"stock Megatron, undisturbed: {time.time() - ended:.0f} s", flush=True)
    figures = Figures(soaked, undisturbed, job, begun=begun)
    figures.print(ended - begun)
    problems = figures.problems()
    if not complete:
        problems.append(
            f"stock Megatron, undisturbed, ended after {undisturbed.reached} iterations"
        )
    return problems


if __name__ == "__main__":
    sys.exit(main())
