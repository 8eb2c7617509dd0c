"""Run a script, a module or a console command as Python would, with our flags added to Megatron's.

    torchrun ... -m megatron_hecate run --moe-fssdp -- pretrain_gpt.py <Megatron's arguments>
    torchrun ... -m megatron_hecate run --moe-fssdp -- -m package.module <its arguments>
    torchrun ... --no-python megatron-hecate run --moe-fssdp -- run_recipe.py <its arguments>

The target is a script, a module or a console command, of Megatron-LM or of Megatron-Bridge. Our
flags may stand before the target or among its own arguments. The launcher reads both places,
because a script may ignore unknown arguments (``ignore_unknown_args``) and would ignore our flags,
too. Arguments of the target stay as they are, also a ``--``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_hecate.comm.rank_0 import VARIABLES, environment_number, refer_to_rank_0
from megatron_hecate.config import FLAG, HecateConfig
from megatron_hecate.switch_on.request import REQUEST

# Console commands and modules that start ranks. The launcher runs in each rank, so they must
# precede it.
STARTERS = ("torchrun", "accelerate", "deepspeed")
STARTERS += ("torch.distributed.run", "torch.distributed.launch")
# our modules that wrap functions and classes of a package, by the package
WRAPPERS = {
    "megatron.core": "megatron_hecate.switch_on.entry",
    "megatron.training": "megatron_hecate.enable",
    "megatron.bridge": "megatron_hecate.bridge",
}


class Parser(argparse.ArgumentParser):
    """Parser that prints usage and an error on rank 0, and one line on each other rank."""

    def error(self, message: str) -> NoReturn:
        rank = environment_number("RANK")
        if rank == 0:
            super().error(message)
        refer_to_rank_0(f"{self.prog}: error; see the message of rank 0", rank)
        sys.exit(2)


@dataclasses.dataclass(frozen=True)
class Target:
    """Script, module or console command that the launcher runs.

    Args:
        name: ``sys.argv[0]`` of the target.
        folder: ``sys.path[0]`` of the target.
        run: function that runs the target as ``__main__``.
    """

    name: str
    folder: str
    run: Callable[[], Any]


def _find_target(name: str, *, is_module: bool) -> Target:
    """Find a target without importing it.

    Raises:
        ValueError: for a target that does not exist, is not Python, or starts ranks itself.
    """
    if name in STARTERS:
        raise ValueError(
            f"{name} starts the ranks, so it must precede our launcher: "
            "torchrun ... -m megatron_hecate run ... -- SCRIPT.py"
        )
    if is_module:
        return _find_module(name)
    if name.startswith("-"):
        raise ValueError(
            f"a script, -m MODULE or a console command must follow --, got {name}; "
            "our flags stand before --, or behind the script"
        )
    path = Path(name)
    if path.is_file() or (path / "__main__.py").is_file():
        return _find_script(name)
    if path.suffix == ".py" or os.sep in name:
        raise ValueError(f"{name} does not exist")
    return _find_console_command(name)


def _find_module(name: str) -> Target:
    if not name:
        raise ValueError("-m needs the name of a module")
    sys.path[0] = str(Path.cwd())
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ValueError(f"there is no module {name}")
    run = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    return Target(name, sys.path[0], run)


def _find_script(name: str) -> Target:
    path = Path(name).absolute()
    if path.is_file() and not _is_python(path, otherwise=path.suffix != ".sh"):
        raise ValueError(f"{name} is not written in Python; give the script that it starts")
    file = path.resolve()
    folder = file if file.is_dir() else file.parent
    run = functools.partial(runpy.run_path, str(path), run_name="__main__")
    return Target(str(path), str(folder), run)


def _find_console_command(name: str) -> Target:
    path = shutil.which(name)
    folder = str(Path(path).resolve().parent if path else Path.cwd())
    if commands := list(importlib.metadata.entry_points(group="console_scripts", name=name)):
        return Target(path or name, folder, lambda: sys.exit(commands[0].load()()))
    if path is not None and _is_python(Path(path), otherwise=False):
        return Target(path, folder, functools.partial(runpy.run_path, path, run_name="__main__"))
    problem = f"{name} does not exist"
    if path is not None:
        problem = f"{name} ({path}) is not written in Python"
    raise ValueError(
        f"{problem}; give a script, -m MODULE, or a console command of this Python "
        "environment; megatron-hecate --help lists our own commands"
    )


def _is_python(path: Path, *, otherwise: bool) -> bool:
    """Return whether a file's first line names Python; ``otherwise`` if it names no interpreter."""
    with path.open("rb") as file:
        first = file.readline()
    return b"python" in first if first.startswith(b"#!") else otherwise


def make_parser() -> Parser:
    """Build the parser of the launcher's own flags."""
    parser = Parser(
        prog="megatron-hecate run",
        usage="megatron-hecate run [--moe-fssdp ...] [--] "
        "{SCRIPT.py | -m MODULE | COMMAND} [its arguments]",
        description="Run a Megatron pretraining script, module or console command with the "
        "--moe-fssdp flags, which may stand before it or among its own arguments. "
        "Start it on all ranks: torchrun ... -m megatron_hecate run ... -- SCRIPT.py, "
        "or torchrun ... --no-python megatron-hecate run ... -- SCRIPT.py.",
        allow_abbrev=False,
    )
    HecateConfig.add_arguments(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the target that ``argv`` names; return the exit status.

    Args:
        argv: our flags, the target, and its arguments.
    """
    parser = make_parser()
    try:
        for name in VARIABLES:
            environment_number(name)
    except ValueError as error:
        # not by the parser, which prints on rank 0 only
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    words, target_words = _split(argv, parser)
    # -h exits here
    flags, unknown = _parse(parser, words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not target_words:
        parser.error("no SCRIPT.py given, nor -m MODULE, nor a console command")
    is_module = target_words[0] == "-m"
    name, *arguments = target_words[1:] or [""] if is_module else target_words
    try:
        target = _find_target(name, is_module=is_module)
    except ValueError as error:
        parser.error(str(error))
    # validate now: Megatron takes minutes to start
    try:
        flags |= flags_among(arguments)
        validate(flags)
    except ValueError as error:
        parser.error(f"--moe-fssdp: {error}")
    # paths must be absolute, because the script may change the working directory
    for name in ("moe_fssdp_speeds", "moe_fssdp_record"):
        if flags.get(name) is not None:
            flags[name] = str(Path(flags[name]).absolute())
    # as Python sets it for a script
    sys.path[0] = target.folder
    return _run(target, flags, arguments, words)


def _split(argv: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split ``argv`` at the first word that is neither a flag of ``parser`` nor its value.

    A ``--`` in front of the target is dropped.
    """
    takes_value: dict[str, bool] = {}
    for action in parser._actions:
        takes_value.update(dict.fromkeys(action.option_strings, action.nargs is None))
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return argv[:index], argv[index + 1 :]
        if word == "-m" or not word.startswith("-"):
            return argv[:index], argv[index:]
        index += 2 if takes_value.get(word, False) else 1
    return argv, []


def _run(target: Target, flags: dict[str, Any], arguments: list[str], words: list[str]) -> int:
    """Run ``target``; return the exit status.

    Args:
        target: target to run.
        flags: our flags, by argparse's names.
        arguments: arguments of the target.
        words: our flags in front of the target, as words of the command line.
    """
    REQUEST.launched = flags
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    for package in WRAPPERS.keys() & sys.modules.keys():
        _import_wrapper(package)
    _stay_in_front(words)
    sys.argv = [target.name, *arguments]
    try:
        target.run()
    except SystemExit as end:
        # console commands also raise it on success, and the check below must follow
        if end.code not in (None, 0):
            raise
    if REQUEST.is_unmet:
        if environment_number("RANK") == 0:
            text = "built no model by megatron.training or Megatron-Bridge: FSSDP was off"
            # a framework may replace ``print``
            sys.stderr.write(f"FSSDP: {target.name} {text}\n")
        return 1
    return 0


class _WrapMegatron(importlib.abc.MetaPathFinder):
    """Finder that imports our modules of `WRAPPERS` right after their packages.

    A script may choose its Megatron by changing ``sys.path`` first, so the launcher must not import
    Megatron itself. A script may also look for a package before, or ignore an error of an import.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WRAPPERS:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _import_wrapper(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


FINDER = _WrapMegatron()


def _import_wrapper(package: str) -> None:
    """Import our module that wraps ``package``, or has a function that does."""
    module = importlib.import_module(WRAPPERS[package])
    if hasattr(module, "install"):
        module.install()


def _stay_in_front(words: list[str]) -> None:
    """Put the launcher in front of a Python script or module that replaces this process.

    Bridge's scripts replace their process to restart in a recipe's environment. All functions of
    `os` that replace a process call ``execv`` or ``execve``.

    Args:
        words: our flags in front of the target.
    """

    def replace(execute: Callable, file: Any, command: Sequence[str], *environment: Any) -> None:
        python, *target = command
        if file == sys.executable and target and (target[0] == "-m" or target[0].endswith(".py")):
            command = [python, "-m", "megatron_hecate", "run", *words, "--", *target]
        execute(file, command, *environment)

    for name in ("execv", "execve"):
        setattr(os, name, functools.partial(replace, getattr(os, name)))


def _parse(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the flags among ``words``, by argparse's names and without defaults; other words."""
    unset = object()
    empty = argparse.Namespace(**dict.fromkeys(HecateConfig().as_arguments(), unset))
    namespace, words_left = parser.parse_known_args(words, empty)
    return {
        name: value for name, value in vars(namespace).items() if value is not unset
    }, words_left


def flags_among(arguments: Sequence[str]) -> dict[str, Any]:
    """Return our flags among a script's own arguments.

    Raises:
        ValueError: for a flag that does not exist, or has an invalid value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    HecateConfig.add_arguments(parser)
    try:
        flags, words = _parse(parser, arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        if flag.lower().replace("_", "-").replace("--no-", "--").startswith(FLAG):
            raise ValueError(f"{flag} does not exist; megatron-hecate run --help lists the flags")
    return flags


def validate(values: Mapping[str, Any]) -> HecateConfig | None:
    """Return the settings that our flags ask for, and read their files.

    Args:
        values: values of our flags by argparse's names.

    Raises:
        ValueError: for an unknown name, a value outside its range, or a file without speeds.
    """
    settings = HecateConfig.from_arguments(argparse.Namespace(**values))
    if settings is not None and settings.speeds is not None:
        # the import loads numpy
        from megatron_hecate.plan import Speeds

        Speeds.load(settings.speeds)
    return settings
