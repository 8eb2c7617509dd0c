"""Supervisor of a soak (`soak.py`): starts ranks, sends signals, starts all ranks again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from soak_plan import SIGNALS, Event, Plan
from soak_rank import Job, log_of, main

ROOT = Path(__file__).resolve().parent.parent
LOOK = 0.02  # seconds between two looks at the ranks
# Seconds that other ranks have to end by themselves once a rank has ended.
GRACE = 6.0
# Seconds after the time limit that ranks have to save a checkpoint.
LAST_SAVE = 90.0
# Starts in a row without an iteration after which the job is given up.
MOST_IDLE = 4


@dataclasses.dataclass
class Fired:
    """An event that has happened, as the supervisor saw it.

    Args:
        event: the event.
        start: number of the start of the processes that it hit.
        time: seconds since 1970.
        running: iteration that rank 0 was in, -1 before its first.
    """

    event: Event
    start: int
    time: float
    running: int


@dataclasses.dataclass
class End:
    """How one start of the processes ended.

    Args:
        start: its number.
        codes: exit statuses by rank, negative: a signal.
        killed: ranks that had to be killed after `GRACE` seconds.
        seconds: time between the first rank's end and the last one's.
        orphans: names of processes in the ranks' sessions after all ranks had ended.
    """

    start: int
    codes: list[int | None]
    killed: list[int]
    seconds: float
    orphans: list[str]


class Progress:
    """Reader of the ranks' progress files."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.lines: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self._paths = [folder / "progress" / f"rank-{rank}.jsonl" for rank in range(ranks)]
        self._offsets = [0] * ranks

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return new lines with their ranks."""
        found: list[tuple[int, dict[str, Any]]] = []
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[rank] += len(whole) + 1
                new = [json.loads(line) for line in whole.splitlines()]
                self.lines[rank] += new
                found += [(rank, line) for line in new]
        return found


class Supervisor:
    """Runs one job to its last iteration, through all of its starts.

    Args:
        job: settings of the first start.
        store_port: port of the rendezvous store of this process.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = Path(job.folder)
        self.plan = Plan.make(seed=job.seed, iterations=job.iterations, ranks=job.ranks)
        self.progress = Progress(self._folder, job.ranks)
        self.fired: list[Fired] = []
        self.ends: list[End] = []
        self.sessions: list[int] = []
        self._running = -1
        # (time at which it is due, event)
        self._due: list[tuple[float, Event]] = []
        self._waking: list[tuple[float, int]] = []
        for name in ("logs", "progress", "checkpoints", "tmp"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._context = multiprocessing.get_context("forkserver")
        os.environ.update(PRELOADED="megatron", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
        os.environ["PYTHONWARNINGS"] = "ignore"
        self._context.set_forkserver_preload(
            [  # with all that ranks import at their start
                "torch",
                "torch.distributed",
                "tests.support.preloaded",
                "megatron.training",
                "soak_rank",
            ]
        )

    def run(self, deadline: float) -> bool:
        """Start the job until it has trained all iterations.

        Args:
            deadline: seconds since 1970.

        Returns:
            False if the job is given up: after `MOST_IDLE` starts without an iteration, or if an
            undisturbed job fails. At the deadline ranks get SIGTERM, as at a time limit.
        """
        start = self._job.start
        # Losses of an undisturbed job may be there from an earlier run.
        self.progress.read()
        while not self._is_done():
            fired = frozenset(entry.event.number for entry in self.fired)
            job = dataclasses.replace(self._job, start=start, fired=fired)
            end = self._run_start(job, deadline)
            self.ends.append(end)
            tried = self.ends[-MOST_IDLE:]
            begun = max((line["start"] for line in self.progress.lines[0]), default=-1)
            idle = len(tried) == MOST_IDLE and begun < tried[0].start
            if (idle or not self._job.disturbed) and not self._is_done():
                return False
            if time.time() > deadline:
                return True
            start += 1
        return True

    @property
    def reached(self) -> int:
        """Number of iterations that rank 0 has trained."""
        stepped = [line for line in self.progress.lines[0] if line["what"] == "stepped"]
        return 1 + max((line["iteration"] for line in stepped), default=-1)

    def _is_done(self) -> bool:
        done = [line["until"] for line in self.progress.lines[0] if line["what"] == "done"]
        return max(done, default=0) >= self._job.until

    def _run_start(self, job: Job, deadline: float) -> End:
        """Run all ranks until they have ended, by themselves or not."""
        ranks = [
            self._context.Process(target=main, args=(job, rank), daemon=False)
            for rank in range(job.ranks)
        ]
        self._running = -1
        self._due = []
        self._waking = []
        for process in ranks:
            process.start()
        pids = [process.pid or 0 for process in ranks]
        self.sessions += pids
        self._arm_start()
        first_end = 0.0
        is_over = False
        killed: list[int] = []
        try:
            while any(process.is_alive() for process in ranks):
                self._follow(job.start)
                self._send_due(job.start, pids)
                now = time.time()
                if not first_end and any(p.exitcode is not None for p in ranks):
                    first_end = now
                if now > deadline and not is_over:
                    is_over = True
                    for pid in pids:
                        _send(pid, signal.SIGTERM)
                if (first_end and now > first_end + GRACE) or now > deadline + LAST_SAVE:
                    killed += self._kill(ranks)
                time.sleep(LOOK)
        finally:
            self._kill(ranks)
            seconds = time.time() - (first_end or time.time())
            orphans = self.end_sessions(pids)
        self._follow(job.start)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.join()
            process.close()
        self._remove_partial_checkpoints()
        return End(job.start, codes, killed, seconds, orphans)

    def _arm_start(self) -> None:
        """Schedule the signal of the next start, if one is due."""
        furthest = max(
            (line["iteration"] for line in self.progress.lines[0] if line["what"] == "begins"),
            default=-1,
        )
        for event in self._pending():
            if event.kind == "kill at start" and event.iteration <= furthest:
                self._due.append((time.time() + event.delay, event))
                return

    def _pending(self) -> list[Event]:
        """Return the events with signals that have not happened."""
        numbers = {entry.event.number for entry in self.fired}
        return [e for e in self.plan.events if e.kind in SIGNALS and e.number not in numbers]

    def _follow(self, start: int) -> None:
        """Read progress, and note events of ranks and of iterations that begin."""
        for rank, line in self.progress.read():
            if line["what"] == "armed":
                numbers = {entry.event.number for entry in self.fired}
                if line["event"] not in numbers:
                    event = self.plan.events[line["event"]]
                    self.fired.append(Fired(event, start, line["time"], event.iteration))
            if rank or line["what"] != "begins":
                continue
            self._running = line["iteration"]
            for event in self._pending() if self._job.disturbed else []:
                known = any(event is other for _, other in self._due)
                if event.iteration == self._running and event.kind != "kill at start" and not known:
                    self._due.append((line["time"] + event.delay, event))

    def _send_due(self, start: int, pids: list[int]) -> None:
        """Send the signals that are due."""
        now = time.time()
        for at, pid in list(self._waking):
            if now >= at:
                self._waking.remove((at, pid))
                _send(pid, signal.SIGCONT)
        for at, event in list(self._due):
            if now < at:
                continue
            self._due.remove((at, event))
            pid = pids[event.rank]
            if event.kind in ("kill", "kill at start"):
                _send(pid, signal.SIGKILL)
            elif event.kind in ("stop", "hang"):
                _send(pid, signal.SIGSTOP)
                if event.kind == "stop":
                    self._waking.append((now + event.seconds, pid))
            else:
                for other in pids:
                    _send(other, signal.SIGTERM)
            self.fired.append(Fired(event, start, now, self._running))

    def _kill(self, ranks: list[BaseProcess]) -> list[int]:
        """Kill the ranks that live; return them."""
        alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in alive:
            ranks[rank].kill()
            ranks[rank].join()
        return alive

    def end_sessions(self, sessions: list[int]) -> list[str]:
        """Kill the processes in ``sessions`` that live; return their names."""
        found: list[psutil.Process] = []
        names: list[str] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_ours = os.getsid(process.pid) in sessions
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    names.append(f"{process.name()} {process.pid}")
                    found.append(process)
                    process.kill()
        psutil.wait_procs(found, timeout=GRACE)
        return names

    def _remove_partial_checkpoints(self) -> None:
        """Remove checkpoints that no rank will complete."""
        folder = self._folder / "checkpoints"
        latest = folder / "latest.json"
        name = json.loads(latest.read_text())[0] if latest.exists() else ""
        for path in folder.iterdir():
            if path.is_dir() and path.name != name:
                shutil.rmtree(path)

    def messages(self, start: int, pattern: str) -> list[str]:
        """Return the lines of a start's logs, of all ranks, that match ``pattern``."""
        found: list[str] = []
        for rank in range(self._job.ranks):
            path = Path(log_of(dataclasses.replace(self._job, start=start), rank))
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                found += [line for line in lines if re.search(pattern, line)]
        return found


def _send(pid: int, number: signal.Signals) -> None:
    # The rank may have ended meanwhile.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
