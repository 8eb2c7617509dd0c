"""``megatron-hecate check``: print versions, and what FSSDP would use on this machine.

With ``--settings FILE`` it prints whether FSSDP would switch on for the jobs of a file. The file is
one of the following:

* JSON or YAML: a mapping of fields of ``TransformerConfig`` and arguments of ``megatron.training``,
  in sections or in nested maps of any framework, or a list of such mappings;
* a launch script, whose command lines are read without running it.

Settings that no rule reads are skipped. The hook refuses problems that only the built modules show,
such as experts that are no `TEGroupedMLP`. ``--settings`` needs no Megatron.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_hecate import __version__
from megatron_hecate.code_cache import PLANNER
from megatron_hecate.tools import verdict
from megatron_hecate.tools.files import jobs
from megatron_hecate.tools.files.read import read_jobs
from megatron_hecate.tools.verdict import NO_SETTING, NoSettingError, Verdict

# Dependencies in pyproject.toml. numpy is first, because torch and numba raise its error.
PACKAGES = ("numpy", "packaging", "tqdm", "torch", "numba")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="megatron-hecate check",
        description="Print installed versions, and whether FSSDP fits: the exit status is 0 if "
        "FSSDP can be switched on, 1 if not, 2 if a file cannot be read or leaves it open.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="settings of a job, or a list of such: a launch script, YAML or JSON",
    )
    parser.add_argument(
        "--compile-for",
        metavar="CAPABILITY",
        nargs="+",
        type=_capability,
        default=[],
        help="compile the kernels for GPUs of other machines, too, such as 9.0 (H100) and 10.0 "
        "(B200), when an image is built where no GPU is",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command with the arguments after it and return the exit status.

    The status is 0 if FSSDP can be switched on, 1 if not, and 2 if a file cannot be read or leaves
    it open.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    path = arguments.settings
    if path is not None and arguments.compile_for:
        parser.error("--compile-for compiles and reads no --settings; give one of them")
    if path is None:
        return _check_here(arguments.compile_for)
    try:
        return _check_file(Path(path))
    except RecursionError:
        print(f"{path}: is nested too deeply, or within itself", file=sys.stderr)
    except ValueError as error:
        print(f"{path}: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def explain_missing(error: ImportError) -> str:
    """Return a line that names the dependency whose import raised ``error``.

    The line is empty if the cause is another module, such as one of a user's script.
    """
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    for name, again in _missing():
        if (cause.name or "").partition(".")[0] == name or str(again) == str(cause):
            return _line_of(name, again)
    return ""


def problems(settings: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting of one job that FSSDP does not combine with.

    Raises:
        ValueError: for a value of the wrong type, such as quotes in YAML cause, or out of range.
    """
    (job,) = jobs.of_mapping(settings, {})
    return verdict.find_refused(job)


def _check_file(path: Path) -> int:
    """Print the verdict on each job of a file; return the exit status."""
    verdicts = _verdicts(read_jobs(path, os.environ, verdict.MEGATRON, switches=verdict.SWITCHES))
    print("\n".join(_lines(verdicts)))
    if any(of_job.refused for of_job in verdicts):
        return 1
    asks = []
    for of_job in verdicts:
        asks += [f"{of_job.job.name}: {ask}".removeprefix(": ") for ask in of_job.asks]
    if asks:
        raise ValueError(f"cannot be judged yet: {'; '.join(asks)}. Nothing else in it is refused")
    return 0


def _verdicts(found: list[jobs.JobSettings]) -> list[Verdict]:
    verdicts = []
    for job in found:
        try:
            verdicts.append(Verdict.of(job))
        except ValueError as error:
            # one role of a file may train without Megatron, such as a critic on another backend
            is_role = len(found) > 1 and job.name in jobs.ROLES
            if is_role and isinstance(error, NoSettingError):
                continue
            name = f"{job.name}: " if job.name else ""
            raise ValueError(f"{name}{error}") from None
    if not verdicts:
        raise ValueError(NO_SETTING)
    return verdicts


def _lines(verdicts: list[Verdict]) -> Iterator[str]:
    for of_job in verdicts:
        name = of_job.job.name
        is_alone = len(verdicts) == 1 and not of_job.job.is_listed
        if is_alone and not name.startswith("entry "):
            if of_job.refused:
                yield "\n".join(of_job.refused)
            elif not of_job.asks:
                yield "would switch on"
        elif of_job.refused:
            yield f"refused {name}: {' | '.join(of_job.refused)}"
        elif of_job.asks:
            yield f"unknown {name}: {' | '.join(of_job.asks)}"
        else:
            yield f"on {name}"
        if of_job.refused:
            yield from (f"note: {ask}" for ask in of_job.asks)
        yield from (f"note: {line}" for line in of_job.notes)


def _capability(text: str) -> tuple[int, int]:
    """Parse a compute capability, such as 9.0."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and len(minor) == 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability, such as 9.0")
    return int(major), int(minor)


def _missing() -> Iterator[tuple[str, Exception]]:
    """Yield the name and the error of each dependency that cannot be imported."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        # torch raises OSError for shared libraries
        except (ImportError, OSError) as error:
            yield name, error


def _line_of(name: str, error: Exception) -> str:
    return f"{name} cannot be imported ({' '.join(str(error).split())}): pip install {name}"


def _check_here(capabilities: Sequence[tuple[int, int]]) -> int:
    """Print versions, and what FSSDP would use; return 1 if it cannot be switched on.

    Everything is compiled that a job would compile.

    Args:
        capabilities: compute capabilities of further GPUs to compile for.
    """
    missing = dict(_missing())
    for name, error in missing.items():
        print(_line_of(name, error))
    if "torch" in missing:
        print(f"megatron-hecate {__version__}: without torch, nothing else can be checked")
        return 1
    import torch

    from megatron_hecate.device import compile as kernels

    gpus = torch.cuda.device_count()
    print(f"megatron-hecate {__version__}, torch {torch.__version__}, {gpus} GPUs")
    fits = _check_megatron()
    plans = _check_planner()
    print("transport p2p: torch.distributed point-to-point, on gloo or NCCL")
    lines, usable = kernels.describe(capabilities)
    for line in lines:
        print(f"kernels, of quotas and of transport nvlink: {line}")
    print(
        "transport auto: nvlink where peers share an NVLink domain and its self-test succeeds, "
        "else p2p"
    )
    return 0 if fits and plans and usable and not missing else 1


def _check_megatron() -> bool:
    """Print the version of Megatron; return whether FSSDP fits it."""
    has_megatron = importlib.util.find_spec("megatron") is not None
    if not has_megatron or importlib.util.find_spec("megatron.core") is None:
        print(
            "megatron-core is not installed: "
            "pip install -e '.[megatron]', or put your checkout on the path"
        )
        return False
    try:
        with warnings.catch_warnings():
            # Megatron warns about optional packages that are not installed
            warnings.simplefilter("ignore")
            import megatron.core

            from megatron_hecate.megatron import assumptions

            broken = assumptions.broken_assumptions()
    except ImportError as error:
        print(f"megatron-core cannot be imported: {' '.join(str(error).split())}")
        return False
    # Megatron appends the commit of any git repository it runs in
    version = megatron.core.__version__.partition("+")[0]
    fits = "does not fit" if broken else "fits"
    print(f"megatron-core {version}: {fits}")
    for problem in broken:
        print(f"  - {problem}")
    if importlib.util.find_spec("megatron.training") is None:
        print("megatron.training: not found; use the hook")
    else:
        print("megatron.training: found, --moe-fssdp flags work")
    return not broken


def _check_planner() -> bool:
    """Compile the planner and print its version of numba; return whether replicas are planned."""
    try:
        import numba
    except ImportError as error:
        print(
            f"planner: numba cannot be imported ({error}); "
            "without it no replicas are planned, only slots=0 works"
        )
        return False
    from megatron_hecate.homes.compiling import compile_home_planner
    from megatron_hecate.nvlink.program import compile_programs
    from megatron_hecate.plan import compile_planner

    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        compile_planner(lambda: print("planner: compiling, for less than a minute", flush=True))
        compile_home_planner()
        compile_programs()
    print(f"planner: numba {numba.__version__}, compiled")
    for line in [problem.message for problem in problems] or [f"kept in {PLANNER.folder}"]:
        print(f"planner: {line}")
    return True
