"""What only a GPU can show, in parts, most valuable first, each in its own time; results are on disk as they come.

    python bench/gpu.py --parts 1 --minutes 6 --out build/gpu     or  make gpu, which runs all
    python bench/gpu.py --parts routing,rates --minutes 3 --out build/gpu
    python bench/gpu.py --list

It needs one GPU, and nothing from the internet. Parts are named, or numbered by the command of docs/gpu.md that they
belong to. Each is a process of its own, which is stopped after its time. The folder gets

| file | what |
|---|---|
| rows.jsonl | every result, appended and brought to the disk when it is there |
| page.md | the page of these rows, written anew after each |
| log.txt | all that the parts print |

so nothing is lost when this process is killed. A later call with the same folder goes on in these files. Exits with 0
when all parts passed that could run, with 1 when one did not, and with 2, having done nothing, where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import gpu_page  # noqa: E402
import rows  # noqa: E402
from gpu_parts import COMMANDS, MINUTES, Part  # noqa: E402

SHOWN: int = 60  # lines of a part's output on the page, where it did not pass
POLL: float = 0.5  # seconds between two looks at the rows
PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
)
# where `gpu_bundle.py --install` puts packages that the machine lacks (its SITE)
SITE = ROOT / "build" / "gpu-site"
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
        return self.how not in gpu_page.PASSED

    def write(self, folder: Folder) -> None:
        """Append it to the rows, with the end of the output where it did not pass; the page shows it."""
        said = self.output.replace("\r", "\n").splitlines()[-SHOWN:] if self.is_failure else []
        about = {"part": self.part.name, "shows": self.part.shows, "command": self.part.command}
        ended = {
            "ended": self.how,
            "why": self.why,
            "seconds": round(self.seconds, 1),
            "said": said,
        }
        rows.write({**about, **ended}, file=folder.rows)
        folder.refresh()


class Folder:
    """Where results go.

    Args:
        path: made if need be.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.rows, self.log, self._page = path / "rows.jsonl", path / "log.txt", path / "page.md"
        self._size = -1

    def refresh(self) -> None:
        """Write the page anew if a row has come; whoever reads it sees the old one or the new."""
        size = self.rows.stat().st_size if self.rows.exists() else 0
        if size != self._size:
            draft = self._page.with_suffix(".new")
            draft.write_text(gpu_page.page(rows.read(self.rows)))
            draft.replace(self._page)
            self._size = size


def run(part: Part, folder: Folder, *, seconds: float, tiny: bool = False) -> Ended:
    """Run ``part`` for as long as it may, at most ``seconds``; what it started is killed with it."""
    missing = [
        need for need in part.needs if not any(_is_here(name) for name in need.split(" or "))
    ]
    if missing:
        return Ended(part, "left out", f"{' and '.join(missing)} not installed")
    limit = min(part.seconds, seconds)
    if limit <= 0:
        return Ended(part, "not run", "the time for all parts was used up")
    Ended(part, "running", "when this page was written").write(folder)
    command = part.command.replace("{tiny}", "--tiny" if tiny else "")
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    packages = os.pathsep.join(
        filter(None, [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])
    )
    environment = {
        **os.environ,
        "PYTHONPATH": packages,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environment |= {"PATH": PATH, rows.FILE: str(folder.rows), rows.PART: part.name}
    # Tests take no flags.
    environment |= {"FSSDP_TINY": "1"} if tiny else {}
    began = time.monotonic()
    with folder.log.open("a+b") as log:
        log.write(f"\n=== {part.name}: {command}\n".encode())
        log.flush()
        at = log.tell()
        how, why = _wait(
            words, environment, folder, limit=limit, log=log.fileno(), statuses=part.statuses
        )
        log.seek(at)
        output = log.read().decode(errors="replace")
    if how == "passed" and not re.search(part.says, output):
        how, why = "failed", f"it ended well, but did not say {part.says!r}"
    return Ended(part, how, why, time.monotonic() - began, output)


def _wait(
    words: Sequence[str],
    environment: dict[str, str],
    folder: Folder,
    *,
    limit: float,
    log: int,
    statuses: Sequence[int],
) -> tuple[str, str]:
    """How the process of ``words`` ended, and why."""
    end = time.monotonic() + limit
    try:  # a process group of its own, so that all of it can be killed; in this session, so that it ends with that
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment,
            process_group=0,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        return "failed", str(error)
    try:
        while (status := process.poll()) is None:
            if time.monotonic() >= end:
                return "stopped", f"after {limit:.0f} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(POLL, max(0.0, end - time.monotonic())))
            folder.refresh()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ("passed", "") if status in statuses else ("failed", f"exit status {status}")


def _die_with_parent() -> None:
    """In the child: a killed benchmark leaves nobody behind who goes on to use the GPU."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _is_here(name: str) -> bool:
    """Whether a module, an installed distribution or a program of that name is."""
    sys.path.append(str(SITE))
    try:
        if importlib.util.find_spec(name) is not None:
            return True
        # TransformerEngine's half for PyTorch is no module that could be found
        installed = {found.name for found in importlib.metadata.distributions()}
        return name in installed or shutil.which(name, path=PATH) is not None
    finally:
        sys.path.remove(str(SITE))


def run_all(
    parts: Sequence[Part], folder: Folder, *, minutes: float, tiny: bool = False
) -> list[Ended]:
    """Run all ``parts`` within ``minutes``, and keep what comes in ``folder``."""
    end, ended = time.monotonic() + 60 * minutes, []
    for part in parts:
        Ended(part, "not run", "this page was written before its turn").write(folder)
    for part in parts:
        print(f"{part.name}: {part.command}", flush=True)
        ended.append(run(part, folder, seconds=end - time.monotonic(), tiny=tiny))
        ended[-1].write(folder)
        print(f"  {ended[-1].how} {ended[-1].why} ({ended[-1].seconds:.0f} s)", flush=True)
    return ended


def chosen(names: str) -> tuple[Part, ...]:
    """The parts named in ``names``, in its order: names, and numbers of commands, with commas between.

    Raises:
        ValueError: for a name of no part.
    """
    known = {part.name: (part,) for parts in COMMANDS.values() for part in parts} | COMMANDS
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(dict.fromkeys(part for name in wanted for part in known[name]))


def main() -> int:
    """Run the parts that are asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", default=",".join(COMMANDS), help="names or numbers of commands (%(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, help="for all parts together; else what the commands take together"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder (%(default)s)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to try the parts; the numbers mean nothing"
    )
    parser.add_argument("--list", action="store_true", help="print the parts, and run none")
    options = parser.parse_args()
    try:
        parts = chosen(options.parts)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        listed = [
            {"part": p.name, "at most, s": p.seconds, "what it shows": p.shows} for p in parts
        ]
        print("\n".join(rows.markdown(listed, list(listed[0]))))
        return 0
    minutes = options.minutes if options.minutes is not None else sum(MINUTES.values())
    # torch is asked in a process of its own: a context here would take memory from every part
    asked = [sys.executable, str(ROOT / "bench" / "gpu_machine.py")]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    if said.returncode:
        print(said.stderr.strip(), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Folder(options.out.resolve())
    rows.write(
        {"machine": [*json.loads(said.stdout), f"command: {shlex.join(sys.argv)}"]},
        file=folder.rows,
    )
    ended = run_all(parts, folder, minutes=minutes, tiny=options.tiny)
    print(f"Results are in {options.out}")
    return int(any(one.is_failure for one in ended))


if __name__ == "__main__":
    sys.exit(main())
