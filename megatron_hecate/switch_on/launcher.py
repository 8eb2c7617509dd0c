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
import functools
import importlib.abc
import importlib.machinery
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


def make_parser() -> Parser:
    """Build the parser of the launcher's command line."""
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
    parser.add_argument("-m", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    """Run the target that ``argv`` names; return the exit status.

    Args:
        argv: our flags, the target, and its arguments.
    """
    parser = make_parser()
    try:
        for variable in VARIABLES:
            environment_number(variable)
    except ValueError as error:
        # not by the parser, which prints on rank 0 only
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    options = parser.parse_args(argv)
    words = argv[: len(argv) - len(options.target)]
    target = options.target
    if target[:1] == ["--"]:
        target = target[1:]
    is_module = options.m or target[:1] == ["-m"]
    if options.m:
        words.remove("-m")
    elif is_module:
        target = target[1:]
    if not target:
        parser.error("no SCRIPT.py given, nor -m MODULE, nor a console command")
    name, *arguments = target
    # validate now: Megatron takes minutes to start
    try:
        if name in STARTERS:
            raise ValueError(
                f"{name} starts the ranks, so it must precede our launcher: "
                "torchrun ... -m megatron_hecate run ... -- SCRIPT.py"
            )
        name = _find(name, is_module=is_module)
        flags = flags_among([*words, *arguments])
        validate(flags)
    except ValueError as error:
        parser.error(str(error))
    # paths must be absolute, because the script may change the working directory
    last_words: list[str] = []
    for file in ("moe_fssdp_speeds", "moe_fssdp_record"):
        if flags.get(file) is not None:
            flags[file] = str(Path(flags[file]).absolute())
            place = last_words if file in flags_among(arguments) else words
            place += [f"--{file.replace('_', '-')}", flags[file]]
    _stay_in_front(words, last_words)
    return _run(name, flags, arguments, is_module=is_module)


def _find(name: str, *, is_module: bool) -> str:
    """Find a target without importing it, and set ``sys.path[0]`` as Python does for the target."""
    sys.path[0] = str(Path.cwd())
    if is_module:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(f"there is no module {name}")
        return name
    path = Path(name)
    if not path.is_file():
        folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        path = Path(shutil.which(name, path=folders) or name)
    if not path.is_file():
        raise ValueError(
            f"{name} does not exist; give a script, -m MODULE, or a console command of this "
            "Python environment; megatron-hecate --help lists our own commands"
        )
    sys.path[0] = str(path.resolve().parent)
    return str(path.absolute())


def _run(target: str, flags: dict[str, Any], arguments: list[str], *, is_module: bool) -> int:
    """Run ``target``; return the exit status.

    Args:
        target: path of a Python file, or name of a module.
        flags: our flags, by argparse's names.
        arguments: arguments of the target.
        is_module: whether ``target`` is a module.
    """
    REQUEST.flags = flags
    sys.meta_path.insert(0, _WrapMegatron())
    for package in WRAPPERS.keys() & sys.modules.keys():
        importlib.import_module(WRAPPERS[package])
    sys.argv = [target, *arguments]
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        # console commands also raise it on success, and the check below must follow
        if end.code not in (None, 0):
            raise
    if REQUEST.is_unmet:
        if environment_number("RANK") == 0:
            text = "built no model by megatron.training or Megatron-Bridge: FSSDP was off"
            # a framework may replace ``print``
            sys.stderr.write(f"FSSDP: {target} {text}\n")
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
        finders = (finder for finder in sys.meta_path if not isinstance(finder, _WrapMegatron))
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(WRAPPERS[name])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _stay_in_front(words: list[str], last_words: list[str]) -> None:
    """Put the launcher in front of a Python script or module that replaces this process.

    Bridge's scripts replace their process to restart in a recipe's environment. All functions of
    `os` that replace a process call ``execv`` or ``execve``.

    Args:
        words: our flags in front of the target.
        last_words: our flags behind the target's arguments; a flag's last value counts.
    """

    def replace(execute: Callable, file: Any, command: Sequence[str], *environment: Any) -> None:
        python, *target = command
        if file == sys.executable and target and (target[0] == "-m" or target[0].endswith(".py")):
            command = [python, "-m", "megatron_hecate", "run", *words, "--", *target, *last_words]
        execute(file, command, *environment)

    for name in ("execv", "execve"):
        setattr(os, name, functools.partial(replace, getattr(os, name)))


def flags_among(words: Sequence[str]) -> dict[str, Any]:
    """Return our flags among ``words``, by argparse's names and without defaults.

    Raises:
        ValueError: for a flag that does not exist, or has an invalid value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    HecateConfig.add_arguments(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        flags, other_words = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    for flag in (word.partition("=")[0] for word in other_words if word.startswith("--")):
        if flag.lower().replace("_", "-").replace("--no-", "--").startswith(FLAG):
            raise ValueError(f"{flag} does not exist; megatron-hecate run --help lists the flags")
    return vars(flags)


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
