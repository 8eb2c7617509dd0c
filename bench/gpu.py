"""Run all checks and benchmarks that need a GPU, most valuable first, each with a timeout.

    python bench/gpu.py --parts 1 --minutes 6 --out build/gpu     or  make gpu, which runs all
    python bench/gpu.py --parts routing,rates --minutes 3 --out build/gpu
    python bench/gpu.py --list

It needs one GPU, and nothing from the internet. A part has a name, and the number of its command in
docs/gpu.md. Each part is a process, which is killed after its timeout. The folder gets

| file | content |
|---|---|
| rows.jsonl | all results, each appended and synced to disk at once |
| page.md | the page of these rows, rewritten after each row |
| log.txt | the output of all parts |

so nothing is lost when this process is killed. A later call with the same folder appends to these
files. The exit status is 0 if all parts that could run have passed, 1 if one has not, and 2 if
there is no GPU.
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

# last lines of a failed part's output that the page shows
SHOWN: int = 60
# factor on the timeouts of parts with tiny sizes
TINY_TIMEOUTS: int = 4
# seconds between two polls of the rows
POLL: float = 0.5
PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
)
# folder in which `gpu_bundle.py --install` puts packages that the machine lacks (its SITE)
SITE = ROOT / "build" / "gpu-site"
NCCL = SITE / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
# PR_SET_PDEATHSIG of prctl
DIE_WITH_PARENT = 1
# variable by which all processes of a part are recognized
MARK = "FSSDP_MARK"
# seconds for a stopped part's ranks and MPS to end by themselves
GRACE: float = 10.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """Result of a part: "passed", "failed", "stopped", "left out" or "not run", and the reason."""

    part: Part
    how: str
    why: str = ""
    seconds: float = 0.0
    output: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the part could run and did not pass."""
        return self.how not in gpu_page.PASSED

    def write(self, folder: Folder) -> None:
        """Append the result to the rows and the page, with the end of a failed part's output."""
        said = []
        if self.is_failure:
            # Progress bars separate their states by carriage returns.
            said = self.output.replace("\r", "\n").splitlines()[-SHOWN:]
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
    """Folder of results.

    Args:
        path: path of the folder, created if missing.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.rows = path / "rows.jsonl"
        self.log = path / "log.txt"
        self._page = path / "page.md"
        self._size = -1

    def refresh(self) -> None:
        """Rewrite the page if there are new rows; a reader sees the old page or the new one."""
        size = self.rows.stat().st_size if self.rows.exists() else 0
        if size != self._size:
            # Renaming is atomic: no reader sees half a page.
            draft = self._page.with_suffix(".new")
            draft.write_text(gpu_page.page(rows.read(self.rows)))
            draft.replace(self._page)
            self._size = size


def run(part: Part, folder: Folder, *, seconds: float, tiny: bool = False) -> Ended:
    """Run ``part`` until its timeout or for ``seconds``; its child processes are killed with it."""
    missing = [name for name in part.needs if not _is_here(name)]
    if missing:
        return Ended(part, "left out", f"{' and '.join(missing)} not installed")
    # timeouts are those of a GPU; a CPU that stands in for one takes longer
    own = part.seconds * TINY_TIMEOUTS if tiny else part.seconds
    limit = min(own, seconds)
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
    # An NCCL that ranks may share a GPU with, where torch's own is older (docs/gpu.md).
    if NCCL.exists():
        environment.setdefault("HECATE_NCCL", str(NCCL))
    environment |= {"PATH": PATH, rows.FILE: str(folder.rows), rows.PART: part.name}
    # Tests take no flags.
    if tiny:
        environment["FSSDP_TINY"] = "1"
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
        how = "failed"
        why = f"it ended well, but did not say {part.says!r}"
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
    """Start the process of ``words`` and wait for it.

    Args:
        words: command line.
        environment: environment variables.
        folder: folder whose page is refreshed meanwhile.
        limit: timeout in seconds.
        log: file descriptor for the output.
        statuses: exit statuses of success.

    Returns:
        "passed", "failed" or "stopped", and the reason.
    """
    end = time.monotonic() + limit
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    # A process group of its own, so that it can be ended with its children; in this session, so
    # that it ends with the session.
    try:
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**environment, MARK: mark},
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
        _end(process, mark)
    if status in statuses:
        return "passed", ""
    return "failed", f"exit status {status}"


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a part and all that it has started: torchrun's ranks and MPS have their own sessions."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE
        while _marked(mark) and time.monotonic() < end:
            process.poll()
            time.sleep(0.1)
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> list[int]:
    """Return the processes that have ``mark`` in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # Others' processes, and such as have just ended.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def _die_with_parent() -> None:
    """Request SIGKILL for the child at its parent's death, so that no orphan uses the GPU."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _is_here(name: str) -> bool:
    """Check for a module, an installed distribution or a program of that name."""
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
    """Run all ``parts`` within ``minutes``, with results in ``folder``."""
    end = time.monotonic() + 60 * minutes
    ended = []
    for part in parts:
        Ended(part, "not run", "this page was written before its turn").write(folder)
    for part in parts:
        print(f"{part.name}: {part.command}", flush=True)
        ended.append(run(part, folder, seconds=end - time.monotonic(), tiny=tiny))
        ended[-1].write(folder)
        print(f"  {ended[-1].how} {ended[-1].why} ({ended[-1].seconds:.0f} s)", flush=True)
    return ended


def chosen(names: str) -> tuple[Part, ...]:
    """Select parts by a comma-separated list of names and numbers of commands, in its order.

    Raises:
        ValueError: for an unknown name.
    """
    known: dict[str, tuple[Part, ...]] = {}
    for command in COMMANDS.values():
        known |= {part.name: (part,) for part in command}
    known |= COMMANDS
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    parts: list[Part] = []
    for name in wanted:
        parts += known[name]
    return tuple(dict.fromkeys(parts))


def main() -> int:
    """Run the selected parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", default=",".join(COMMANDS), help="names or numbers of commands (%(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, help="time for all parts; default: sum over all commands"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder (%(default)s)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to try the parts; numbers are meaningless"
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
    minutes = options.minutes
    if minutes is None:
        minutes = sum(MINUTES.values())
    # In a process of its own: a CUDA context of this process would take memory from every part.
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
