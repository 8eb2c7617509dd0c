"""``megatron-hecate check``: print versions, or whether FSSDP would switch on for a job.

| form | what it reads |
|---|---|
| ``check`` | the packages and GPUs of this machine |
| ``check -- SCRIPT.py ARGUMENTS`` | a job's command line, by Megatron's own parser |
| ``check --settings FILE`` | settings in JSON or YAML, a mapping or a list of such |

A mapping holds fields of ``TransformerConfig`` and arguments of ``megatron.training``, in sections
or in nested maps of any framework. Settings that no rule reads are skipped. The job itself refuses
problems that only the built modules show, such as experts that are no `TEGroupedMLP`.
``--settings`` needs no Megatron.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_hecate import __version__, code_cache
from megatron_hecate.config import FLAG
from megatron_hecate.tools.command_line import CommandLine
from megatron_hecate.tools.files import jobs
from megatron_hecate.tools.files.read import read_jobs
from megatron_hecate.tools.verdict import Verdict, judge, judge_file

# Dependencies in pyproject.toml. numpy is first, because torch and numba raise its error.
PACKAGES = ("numpy", "packaging", "torch", "numba")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="megatron-hecate check",
        usage="megatron-hecate check [-h] [--settings FILE | --compile-for CAPABILITY ... | "
        "-- SCRIPT.py ARGUMENTS]",
        description="Print installed versions, and whether FSSDP fits: the exit status is 0 if "
        "FSSDP can be switched on, 1 if not, 2 if settings cannot be read or leave it open. "
        "-- SCRIPT.py ARGUMENTS is the command line of a job, which Megatron's own parser reads; "
        "the script is not started.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="settings of a job, or a list of such, in YAML or JSON",
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

    The status is 0 if FSSDP can be switched on, 1 if not, and 2 if settings cannot be read or leave
    it open.
    """
    parser = make_parser()
    words: list[str] | None = None
    if "--" in argv:
        words = argv[argv.index("--") + 1 :]
        argv = argv[: argv.index("--")]
    arguments, extra_words = parser.parse_known_args(argv)
    if extra_words and (words is None or not extra_words[0].startswith(FLAG)):
        hint = "; a job's command line follows --, as in check -- SCRIPT.py ARGUMENTS"
        parser.error(f"unrecognized arguments: {' '.join(extra_words)}{hint}")
    path = arguments.settings
    if sum([path is not None, bool(arguments.compile_for), words is not None]) > 1:
        parser.error("give one of --settings FILE, --compile-for CAPABILITY and -- SCRIPT.py")
    source = path or parser.prog
    try:
        if words is not None:
            return _check_command_line([*extra_words, *words])
        if path is not None:
            return _check_file(Path(path))
    except RecursionError:
        print(f"{source}: is nested too deeply, or within itself", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{source}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return _check_here(arguments.compile_for)


def explain_missing(error: ImportError) -> str:
    """Return a line that names the dependency whose import raised ``error``.

    The line is empty if the cause is another module, such as one of a user's script.
    """
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    for name, known_error in _missing():
        if (cause.name or "").partition(".")[0] == name or str(known_error) == str(cause):
            return _line_of(name, known_error)
    return ""


def _check_command_line(command_line: Sequence[str]) -> int:
    """Print the verdict on a job's command line; return the exit status."""
    try:
        command = CommandLine.parse(command_line)
        from megatron_hecate.megatron.assumptions import broken_assumptions
    except ImportError as error:
        if explain_missing(error):
            raise
        raise ValueError(
            f"megatron.training cannot be imported ({error}); name the script by its path in a "
            "checkout of Megatron-LM, or put the checkout on PYTHONPATH"
        ) from None
    verdict = judge(command.sources)
    refusals = [*broken_assumptions(), *verdict.refusals.values()]
    print("\n".join(refusals or [verdict.acceptance]))
    script = Path(command.script)
    if script.suffix == ".py" and not script.is_file():
        print(f"note: {script} does not exist here; Megatron's parser has read its arguments")
    if command.unknown_words:
        words = ", ".join(command.unknown_words)
        print(f"note: Megatron does not know {words}; the script itself must")
    if not command.asks_for_fssdp:
        print(f"note: without {FLAG} the job trains without FSSDP")
    return 1 if refusals else 0


def _check_file(path: Path) -> int:
    """Print the verdict on each job of a file; return the exit status."""
    verdicts = judge_file(read_jobs(path))
    print("\n".join(_lines(verdicts)))
    if any(verdict.refusals for _, verdict in verdicts):
        return 1
    questions = []
    for job, verdict in verdicts:
        prefix = f"{job.name}: " if job.name else ""
        questions += [f"{prefix}{question}" for question in verdict.questions]
    if questions:
        remedy = "Write values into the file (envsubst does it); nothing else in it is refused"
        raise ValueError(f"cannot be judged yet: {'; '.join(questions)}. {remedy}")
    return 0


def _lines(verdicts: Sequence[tuple[jobs.Job, Verdict]]) -> Iterator[str]:
    for job, verdict in verdicts:
        is_alone = len(verdicts) == 1 and not job.is_listed
        refusals = list(verdict.refusals.values())
        if is_alone:
            yield from refusals or ([] if verdict.questions else [verdict.acceptance])
        elif refusals:
            yield f"refused {job.name}: {' | '.join(refusals)}"
        elif verdict.questions:
            yield f"unknown {job.name}: {' | '.join(verdict.questions)}"
        else:
            yield f"on {job.name}"
        if refusals:
            yield from (f"note: {question}" for question in verdict.questions)
        yield from (f"note: {line}" for line in _notes(job, verdict))


def _notes(job: jobs.Job, verdict: Verdict) -> Iterator[str]:
    """Yield lines about settings that were read, were not found, or were left out.

    A plain file of settings has no such lines.
    """
    if job.omissions:
        yield f"left out: {', '.join(job.omissions)}"
    if job.is_plain:
        return
    names = job.names
    entries = [
        f"{key}={value}" for key, value in job.settings.items() if names[key] & verdict.names
    ]
    yield f"read: {', '.join(entries) or 'none of the settings that FSSDP looks at'}"
    absent_names = verdict.names - set().union(*names.values())
    yield f"not found, so Megatron's defaults count: {len(absent_names)} more that FSSDP looks at"
    if job.other_files:
        files = ", ".join(job.other_files)
        yield f"further settings may stand in files that were not read: {files}"


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
    errors = dict(_missing())
    for name, error in errors.items():
        print(_line_of(name, error))
    if "torch" in errors:
        print(f"megatron-hecate {__version__}: without torch, nothing else can be checked")
        return 1
    import torch

    gpus = torch.cuda.device_count()
    print(f"megatron-hecate {__version__}, torch {torch.__version__}, {gpus} GPUs")
    has_megatron = _check_megatron()
    has_planner = _check_planner()
    print("transport p2p: torch.distributed point-to-point, on gloo or NCCL")
    has_kernels = _check_kernels(capabilities)
    print(
        "transport auto: nvlink where peers share an NVLink domain and its self-test succeeds, "
        "else p2p"
    )
    return 0 if has_megatron and has_planner and has_kernels and not errors else 1


def _check_kernels(capabilities: Sequence[tuple[int, int]]) -> bool:
    """Compile the kernels for CPU ranks and GPUs; return whether this machine has its own."""
    import torch

    from megatron_hecate.device.compile import CompileError, cubin, load_host_library

    capabilities_here = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    targets = sorted({*capabilities_here, *capabilities})
    builds: dict[str, Callable[[], object]] = {"CPU ranks": load_host_library}
    for major, minor in targets:
        name = f"GPUs of compute capability {major}.{minor}"
        builds[name] = functools.partial(cubin, (major, minor))
    failed: list[str] = []
    for name, build in builds.items():
        try:
            build()
            result = f"compiled, in {code_cache.folder()}"
        except (CompileError, OSError) as error:
            failed.append(name)
            result = str(error)
        print(f"kernels, of quotas and of transport nvlink: {name}: {result}")
    # CPU ranks are not needed where there are GPUs
    return not [name for name in failed if name != "CPU ranks" or not targets]


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
    support = "does not fit" if broken else "fits"
    print(f"megatron-core {version}: {support}")
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
        print(f"planner: numba cannot be imported ({error}); nothing is planned without it")
        return False
    from megatron_hecate.homes.planner import compile_home_planner
    from megatron_hecate.plan import compile_planner

    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        compile_planner(lambda: print("planner: compiling, for less than a minute", flush=True))
        compile_home_planner()
    print(f"planner: numba {numba.__version__}, compiled")
    for line in [problem.message for problem in problems] or [f"kept in {code_cache.folder()}"]:
        print(f"planner: {line}")
    return True
