"""Figures and checks of a soak (`soak.py`)."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

from soak_attempt import SAMPLED
from soak_job import Fired, Supervisor
from soak_plan import ENDING, MEANING, RATES
from soak_rank import Job

TOLERANCE = 1e-5  # relative, of a loss
# Samples of an attempt that are compared: after the second and the last tens of iterations.
FIRST = 1
FEWEST = 4
# Upper bounds of what an attempt may hold more at its end.
MORE = {"native": 2, "files": 2, "groups": 0}
MORE_RESIDENT = 24 << 20
SHARED = Path("/dev/shm")


class Figures:
    """What a soak did, and what is wrong.

    Args:
        soak: supervisor of the disturbed job, which has ended.
        undisturbed: supervisor of the undisturbed stock job.
        job: settings of the disturbed job.
        begun: time at which the disturbed job began, seconds since 1970.
    """

    def __init__(
        self, soak: Supervisor, undisturbed: Supervisor, job: Job, *, begun: float
    ) -> None:
        self._soak = soak
        self._job = job
        self._begun = begun
        self._lines = soak.progress.lines
        stock = undisturbed.progress.lines[0]
        self.trained = len({line["iteration"] for line in self._of("stepped")})
        self._differences = _differences(stock, self._lines[0], "stepped")
        self._evaluated = _differences(stock, self._lines[0], "evaluated")
        self._growth = self._grown()

    def _of(self, what: str, rank: int = 0) -> list[dict[str, Any]]:
        return [line for line in self._lines[rank] if line["what"] == what]

    def print(self, seconds: float) -> None:
        """Print all figures as Markdown."""
        steps = self._of("stepped")
        attempts = {(line["start"], line["attempt"]) for line in self._of("began")}
        name = "stock Megatron" if self._job.stock else "FSSDP"
        print(
            f"{name}, disturbed: {self.trained} of {self._job.iterations} iterations and "
            f"{len(steps) - self.trained} repeated ones in {seconds:.0f} s, "
            f"{len(self._soak.ends)} starts, {len(attempts)} attempts that trained"
        )
        self._print_events()
        saved = collections.Counter(line["how"] for line in self._of("saved"))
        counts = collections.Counter(self._soak.plan.microbatches)
        print(f"\ncheckpoints: {dict(saved)}; evaluations: {len(self._evaluated)}; iterations by")
        print(f"number of microbatches: {dict(sorted(counts.items()))}")
        self._print_losses()
        if not self._job.stock:
            of_ranks = [
                line for rank in range(self._job.ranks) for line in self._of("stepped", rank)
            ]
            copied = sum(line["copied"] for line in of_ranks)
            print(f"tokens computed by replicas: {copied / sum(s['tokens'] for s in of_ranks):.1%}")
        self._print_growth()
        self._print_ends()
        print("left behind:", ", ".join(self._left_behind()) or "nothing")

    def _print_events(self) -> None:
        print("\n| event | times | s until the iteration is complete: median; most | repeated |")
        print("|---|---|---|---|")
        for kind in RATES:
            fired = [entry for entry in self._soak.fired if entry.event.kind == kind]
            found = [lost for entry in fired if (lost := self._lost(entry))]
            if found:
                times = [time for time, _ in found]
                repeated = mean(count for _, count in found)
                cells = f"{median(times):.1f}; {max(times):.1f} | {repeated:.1f}"
                print(f"| {MEANING[kind]} | {len(fired)} | {cells} |")
            else:
                print(f"| {MEANING[kind]} | {len(fired)} | | |")

    def _lost(self, entry: Fired) -> tuple[float, int] | None:
        """Return seconds, and repeated iterations, until the job was where the event met it."""
        furthest = max(
            (line["iteration"] for line in self._of("begins") if line["time"] <= entry.time),
            default=0,
        )
        target = furthest + (entry.event.kind == "terminate")
        later = [line for line in self._of("stepped") if line["time"] > entry.time]
        for number, line in enumerate(later):
            if line["iteration"] >= target:
                return line["time"] - entry.time, number
        return None

    def _print_losses(self) -> None:
        for name, found in (("losses", self._differences), ("evaluation", self._evaluated)):
            if found:
                values = [difference for _, difference in found]
                at, worst = max(found, key=lambda item: item[1])
                print(
                    f"{name}: {len(found)} compared with stock's, largest relative difference "
                    f"{worst:.1e} (iteration {at}), median {median(values):.1e}"
                )
        size = max(1, -(-self._soak.reached // 10))
        parts = [
            max((d for i, d in self._differences if i // size == part), default=0.0)
            for part in range(10)
        ]
        print("largest by tenth of the run:", ", ".join(f"{part:.0e}" for part in parts))

    def _grown(self) -> list[dict[str, Any]]:
        """Compare what each long attempt held after warm-up and at its end, on every rank."""
        found: list[dict[str, Any]] = []
        for samples in self._samples().values():
            if len(samples) < FEWEST:
                continue
            first = samples[FIRST]
            last = samples[-1]
            found.append(
                {
                    **{name: last[name] - first[name] for name in ("resident", *MORE)},
                    "threads": first["threads"] != last["threads"],
                    "iterations": (len(samples) - 1 - FIRST) * SAMPLED,
                }
            )
        return found

    def _samples(self) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
        """Return samples by rank, start and attempt."""
        found = collections.defaultdict(list)
        for rank in range(self._job.ranks):
            for line in self._of("stepped", rank):
                if line["held"]:
                    found[rank, line["start"], line["attempt"]].append(line["held"])
        return found

    def _print_growth(self) -> None:
        if not self._growth:
            return
        longest = max(self._growth, key=lambda growth: growth["iterations"])
        print(
            f"\n{len(self._growth)} times a rank trained {FEWEST * SAMPLED} iterations or more in "
            f"an attempt (at most {longest['iterations'] + (FIRST + 1) * SAMPLED}). Held at the "
            f"end, more than after {(FIRST + 1) * SAMPLED} iterations:\n\n| | mean | most |"
        )
        print("|---|---|---|")
        changed = [growth["threads"] for growth in self._growth]
        print(f"| threads of Python, by name | {mean(changed):g} | {max(changed):d} |")
        rows = {"native": "threads", "files": "open files", "groups": "process groups"}
        for name, text in rows.items():
            values = [growth[name] for growth in self._growth]
            print(f"| {text} | {mean(values):.2f} | {max(values)} |")
        values = [growth["resident"] / 1e6 for growth in self._growth]
        print(f"| resident memory, MB | {mean(values):.2f} | {max(values):.1f} |")
        print(
            f"\nLongest attempt: {longest['resident'] / 1e6:.1f} MB in {longest['iterations']} "
            "iterations."
        )
        self._print_growth_of_processes()

    def _print_growth_of_processes(self) -> None:
        """Print what processes hold more after each restart in them."""
        first = {key: samples[0] for key, samples in self._samples().items()}
        found: list[dict[str, float]] = []
        for (rank, start, attempt), held in first.items():
            before = first.get((rank, start, attempt - 1))
            if before is not None:
                found.append({n: held[n] - before[n] for n in ("resident", *MORE)})
        if found:
            means = {name: mean(entry[name] for entry in found) for name in found[0]}
            resident = means.pop("resident") / 1e6
            counts = ", ".join(f"{name} {value:.1f}" for name, value in means.items())
            print(f"More by a restart in the process ({len(found)}): {resident:.1f} MB, {counts}")

    def _print_ends(self) -> None:
        ends = self._soak.ends
        killed = sum(len(end.killed) for end in ends)
        orphans = collections.Counter(name for end in ends for name in end.orphans)
        seconds = [end.seconds for end in ends]
        print(
            f"\n{len(ends)} starts ended; the last rank ended {median(seconds):.1f} s (median) and "
            f"{max(seconds):.1f} s (most) after the first. Ranks that had to be killed: {killed} "
            f"in starts {[end.start for end in ends if end.killed]}. Helpers of checkpoints that "
            f"outlived their ranks: {sum(orphans.values())}"
        )
        hangs = [entry for entry in self._soak.fired if entry.event.kind == "hang"]
        named = [self._names(entry) for entry in hangs]
        print(
            f"hangs: {len(hangs)}, named by the watchdog's line {sum(w for w, _ in named)}, by an "
            f"error {sum(e for _, e in named)}; lines about stalls in other starts: "
            f"{len(self._false_alarms())}"
        )

    def _names(self, hang: Fired) -> tuple[bool, bool]:
        """Return whether the watchdog's line names the stopped rank, and whether an error does."""
        rank = hang.event.rank
        lines = self._soak.messages(hang.start, rf"made no progress.*Behind: (.*, )?rank {rank} on")
        errors = self._soak.messages(hang.start, r"^megatron_hecate.*Error: ")
        expected = rf"rank {rank}\b|ranks \[.*\b{rank}\b.*\]"
        return bool(lines), any(re.search(expected, error) for error in errors)

    def _false_alarms(self) -> list[str]:
        hung = {entry.start for entry in self._soak.fired if entry.event.kind == "hang"}
        return [
            line
            for end in self._soak.ends
            if end.start not in hung
            for line in self._soak.messages(end.start, r"FSSDP: rank \d+ made no progress")
        ]

    def _left_behind(self) -> list[str]:
        """List processes, shared memory and files of the job that nobody will remove."""
        folder = Path(self._job.folder)
        found = [f"process {name}" for name in self._soak.end_sessions(self._soak.sessions)]
        # A process that was killed leaves Python's own folder of its servers, with stock as well.
        files = [path for path in (folder / "tmp").iterdir() if not path.name.startswith("pymp-")]
        found += [str(path.relative_to(folder)) for path in files]
        for path in SHARED.glob("megatron-hecate-*"):
            if path.stat().st_mtime > self._begun:
                found.append(str(path))
        kept = [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()]
        if len(kept) > 1:
            found.append(f"{len(kept)} checkpoints")
        return found

    def problems(self) -> list[str]:
        """Return the checks that failed, with their values."""
        found: list[str] = []
        for name, differences in (("loss", self._differences), ("evaluation", self._evaluated)):
            wrong = [(i, d) for i, d in differences if not d <= TOLERANCE]
            if wrong:
                found.append(f"{len(wrong)} values of {name} are not stock's, first: {wrong[:3]}")
        happened = {entry.event.number for entry in self._soak.fired}
        due = [e for e in self._soak.plan.events if e.iteration < self._soak.reached - 1]
        missing = [e for e in due if e.number not in happened]
        if missing:
            found.append(f"{len(missing)} events did not happen: {missing[:3]}")
        for name, bound in (*MORE.items(), ("resident", MORE_RESIDENT), ("threads", 0)):
            most = max((growth[name] for growth in self._growth), default=0)
            if most > bound:
                found.append(f"{name} grew by {most} in an attempt, more than {bound}")
        found += [f"left behind: {name}" for name in self._left_behind()]
        return found + self._unexpected_ends() + ([] if self._job.stock else self._of_fssdp())

    def _unexpected_ends(self) -> list[str]:
        """Return starts that ended without an event."""
        found: list[str] = []
        ended_by = {e.start for e in self._soak.fired if e.event.kind in ENDING}
        for end in self._soak.ends:
            if end.start not in ended_by and any(end.codes):
                found.append(f"start {end.start} ended without an event: {end.codes}")
        expected = sum(e.event.kind == "restart" for e in self._soak.fired)
        restarts = len(self._of("restarts"))
        if restarts > expected:
            found.append(f"{restarts} restarts in processes, {expected} events")
        return found

    def _of_fssdp(self) -> list[str]:
        """Return failed checks that stock Megatron does not have."""
        found: list[str] = []
        for entry in self._soak.fired:
            if entry.event.kind == "hang" and not any(self._names(entry)):
                found.append(f"no line names rank {entry.event.rank} in start {entry.start}")
        found += [f"false alarm: {line}" for line in self._false_alarms()]
        if not any(line["copied"] for line in self._of("stepped")):
            found.append("rank 0 computed no token in a replica")
        return found + self._record_problems()

    def _record_problems(self) -> list[str]:
        """Read the record of all starts; it must have iterations in order, each once."""
        from megatron_hecate.record import run_folder

        record = run_folder.read(Path(self._job.folder) / "record")
        numbers = record.iteration.tolist()
        print(f"record: {len(numbers)} iterations, {self.trained - len(numbers)} are missing")
        if numbers != sorted(set(numbers)) or not set(numbers) <= {
            *range(1, 1 + self._job.iterations)
        }:
            return [f"the record's iterations are {numbers}"]
        return []


def _differences(
    stock: list[dict[str, Any]], ours: list[dict[str, Any]], what: str
) -> list[tuple[int, float]]:
    """Return iteration and relative difference of every loss that stock has, too."""
    expected = {line["iteration"]: line["loss"] for line in stock if line["what"] == what}
    return [
        (line["iteration"], abs(line["loss"] / expected[line["iteration"]] - 1))
        for line in ours
        if line["what"] == what and line["iteration"] in expected
    ]
