"""Everything that only a GPU can show, one part after the other, and a page that says how each of them ended.

    make gpu        or  python bench/gpu.py [--minutes 25] [--out docs/gpu-results.md]

It needs one GPU, and nothing from the internet. Each part is a process of its own with a time limit of its own. A part
that fails, or is stopped, is on the page as such, with the end of what it said, and the others go on. Exits with 0 when
all parts passed that could run, with 1 when one did not, and with 2, having done nothing, where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 60  # lines of a part's output, where it prints no tables


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing to run.

    Args:
        name: its heading.
        shows: what it is for.
        command: "python" is the running one.
        seconds: after which it is stopped.
        says: regular expression that is found in the output of a run that did what it was to do.
        needs: modules without which it is left out.
    """

    name: str
    shows: str
    command: str
    seconds: float
    says: str = ""
    needs: tuple[str, ...] = ()


PARTS: tuple[Part, ...] = (
    Part(
        "Check",
        "what is here, and that the kernels compile for it",
        "python -m megatron_hecate --check",
        60,
        "GPUs: compiled for sm_",
    ),
    Part(
        "Values",
        "transfers are bitwise right, ranks of one launch",
        "python -m pytest -q tests/comm/test_virtual_ranks.py -k cuda",
        240,
        r"\d+ passed",
    ),
    Part(
        "Processes on one GPU",
        "symmetric memory and streams between processes; a peer that does not come; compute-sanitizer where it is",
        "python -m pytest -q tests/comm/test_on_gpu.py",
        300,
        r"\d+ passed",
    ),
    Part(
        "Kernels",
        "rates of fetches and returns against the GPU's own copy, and how much longer GEMMs take beside them",
        "python bench/kernels.py",
        300,
        r"they take longer by",
    ),
    Part(
        "Routing",
        "quotas and rerouting, against UltraEP's 0.11 ms; and in a CUDA graph",
        "python bench/routing.py",
        120,
        r"\| 1,024 ranks",
    ),
    Part(
        "Grouped GEMM",
        "TransformerEngine's grouped GEMM with replicas against the same tokens without",
        "python bench/experts_gemm.py",
        120,
        r"\| Mixtral",
        ("transformer_engine", "transformer_engine_torch"),
    ),
    Part(
        "Demo",
        "stock Megatron and our layers train the same model (one rank has no peer, so no replicas)",
        "python examples/demo.py --gpus 1 --steps 20 --out build/gpu-demo",
        240,
        "FSSDP trained the same model",
        ("megatron",),
    ),
    Part(
        "Compiled kernels",
        "registers, spills and wide accesses",
        "python bench/compile_report.py",
        90,
        "fssdp_gather",
        ("triton",),
    ),
)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a part ended: "passed", "failed", "stopped", "left out" or "not run", and why."""

    part: Part
    how: str
    why: str = ""
    seconds: float = 0.0
    output: str = ""

    @property
    def is_failure(self) -> bool:
        return self.how in ("failed", "stopped", "not run")


def run(part: Part, *, seconds: float) -> Ended:
    """Run ``part`` for as long as it may, at most ``seconds``; what it started is killed with it."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Ended(part, "left out", f"{' and '.join(missing)} not installed")
    limit = min(part.seconds, seconds)
    if limit <= 0:
        return Ended(part, "not run", "the time for all parts was used up")
    words = [sys.executable if word == "python" else word for word in shlex.split(part.command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            process = subprocess.Popen(
                words, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )
        except OSError as error:
            return Ended(part, "failed", str(error))
        try:
            status = process.wait(limit)
            how, why = ("passed", "") if status == 0 else ("failed", f"exit status {status}")
        except subprocess.TimeoutExpired:
            how, why = "stopped", f"after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        output = said.read()
    if how == "passed" and not re.search(part.says, output):
        how, why = "failed", f"it ended well, but did not say {part.says!r}"
    return Ended(part, how, why, time.monotonic() - began, output)


def run_all(parts: Sequence[Part], *, minutes: float, out: Path, machine: Sequence[str]) -> list[Ended]:
    """Run all ``parts`` within ``minutes``; the page ``out`` is written anew after each."""
    end, ended = time.monotonic() + 60 * minutes, []
    for part in parts:
        print(f"{part.name}: {part.command}", flush=True)
        ended.append(run(part, seconds=end - time.monotonic()))
        print(f"  {ended[-1].how} {ended[-1].why} ({ended[-1].seconds:.0f} s)", flush=True)
        to_come = [Ended(other, "not run", "this page was written before its turn") for other in parts[len(ended) :]]
        out.write_text(page([*ended, *to_come], machine))
    return ended


def page(ended: Sequence[Ended], machine: Sequence[str]) -> str:
    """The page of results."""
    failed = sum(one.is_failure for one in ended)
    lines = [
        "# Results on a GPU",
        "",
        "Written by `make gpu`; do not edit it by hand.",
        "",
        *(f"- {x}" for x in machine),
    ]
    lines += ["", f"{len(ended)} parts, of which {failed} failed, were stopped or were not run." if failed else ""]
    lines += ["", "| part | ended | seconds | what it shows |", "|---|---|---|---|"]
    for one in ended:
        how = f"**{one.how}**" if one.is_failure else one.how
        lines.append(f"| {one.part.name} | {' '.join((how, one.why)).strip()} | {one.seconds:.0f} | {one.part.shows} |")
    for one in ended:
        if one.output or one.is_failure:
            lines += ["", f"## {one.part.name}: {one.how}", "", f"`{one.part.command}`", "", *_shown(one)]
    return "\n".join(lines).rstrip() + "\n"


def _shown(one: Ended) -> list[str]:
    """The tables that a part printed, as such; the end of the output of one that printed none, or did not pass."""
    said = one.output.replace("\r", "\n").splitlines()
    tables = [line if line.startswith("|") else "" for line in said]
    if one.how == "passed" and any(tables):
        return [line for at, line in enumerate(tables) if line or (at and tables[at - 1])]
    return ["```", *(line.replace("```", "'''") for line in said[-SHOWN:]), "```"]


def machine() -> list[str]:
    """What the numbers are of."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,mig.mode.current", "--format=csv,noheader"]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"GPU: {properties.name}, {memory}, {torch.cuda.device_count()} of them here, one is used",
        f"nvidia-smi (name, driver, power limit, MIG): {_said(asked) or 'cannot be run'}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}",
        f"commit {_commit()}",
        f"command: {shlex.join(sys.argv)}, {date}",
    ]


def _commit() -> str:
    """Of the checkout, or of the bundle that the sources came in."""
    named = _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    bundled = ROOT / "COMMIT"
    return named or (bundled.read_text().strip() if bundled.exists() else "unknown")


def _said(command: list[str]) -> str:
    """The first line of what ``command`` prints; empty when it cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    return ""


def main() -> int:
    """Run all parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25, help="for all parts together")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu-results.md")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("There is no GPU that torch can use here, so nothing was run and nothing was written.", file=sys.stderr)
        return 2
    ended = run_all(PARTS, minutes=options.minutes, out=options.out, machine=machine())
    print(f"Results are in {options.out}")
    return int(any(one.is_failure for one in ended))


if __name__ == "__main__":
    sys.exit(main())
