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
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_hecate.comm.rank_0 import VARIABLES, environment_number, refer_to_rank_0
from megatron_hecate.config import FLAG, HecateConfig
from megatron_hecate.switch_on.fssdp_flags import validate
from megatron_hecate.switch_on.late_imports import import_after_megatron
from megatron_hecate.switch_on.request import REQUEST

# Console commands and modules that start ranks. The launcher runs in each rank, so they must
# precede it.
STARTERS = ("torchrun", "accelerate", "deepspeed")
STARTERS += ("torch.distributed.run", "torch.distributed.launch")


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
        name: name in messages.
        argv0: ``sys.argv[0]`` of the target.
        folder: ``sys.path[0]`` of the target.
        run: function that runs the target as ``__main__``.
    """

    name: str
    argv0: str
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
    folder = str(Path.cwd())
    if not name:
        raise ValueError("-m needs the name of a module")
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    finally:
        sys.path.remove(folder)
    if spec is None:
        raise ValueError(f"there is no module {name}")
    run = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    return Target(name, name, folder, run)


def _find_script(name: str) -> Target:
    path = Path(name).absolute()
    if path.is_file() and not _is_python(path, otherwise=not name.endswith(".sh")):
        raise ValueError(f"{name} is not written in Python; give the script that it starts")
    folder = path.resolve()
    if not folder.is_dir():
        folder = folder.parent
    run = functools.partial(runpy.run_path, str(path), run_name="__main__")
    return Target(str(path), str(path), str(folder), run)


def _find_console_command(name: str) -> Target:
    path = shutil.which(name)
    folder = str(Path(path).resolve().parent if path else Path.cwd())
    if commands := list(importlib.metadata.entry_points(group="console_scripts", name=name)):
        return Target(name, path or name, folder, lambda: sys.exit(commands[0].load()()))
    if path is not None and _is_python(Path(path), otherwise=False):
        run = functools.partial(runpy.run_path, path, run_name="__main__")
        return Target(name, path, folder, run)
    problem = f"{name} does not exist"
    if path is not None:
        problem = f"{name} ({path}) is not written in Python"
    raise ValueError(
        f"{problem}; give a script, -m MODULE, or a console command of this Python "
        "environment; megatron-hecate --help lists our own commands"
    )


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
    is_module = target_words[0].startswith("-m")
    if is_module:
        # the module may be joined to -m
        text = target_words[0][2:]
        target_words = [text, *target_words[1:]] if text else target_words[1:]
    name, *arguments = target_words or [""]
    try:
        target = _find_target(name, is_module=is_module)
    except ValueError as error:
        parser.error(str(error))
    # validate now: Megatron takes minutes to start
    try:
        flags |= flags_among(arguments)
        validate(flags)
    except (ValueError, NotImplementedError) as error:
        parser.error(f"--moe-fssdp: {error}")
    # paths must be absolute, because the script may change the working directory
    for name in ("moe_fssdp_speeds", "moe_fssdp_record"):
        if flags.get(name) is not None:
            flags[name] = str(Path(flags[name]).absolute())
    # as Python sets it for a script
    sys.path[0] = target.folder
    return _run(target, flags, arguments)


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
        if word.startswith("-m") or not word.startswith("-"):
            return argv[:index], argv[index:]
        index += 2 if takes_value.get(word, False) else 1
    return argv, []


def _run(target: Target, flags: dict[str, Any], arguments: list[str]) -> int:
    REQUEST.launched = flags
    import_after_megatron()
    _stay_in_front(flags)
    sys.argv = [target.argv0, *arguments]
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


def _is_python(path: Path, *, otherwise: bool) -> bool:
    """Return whether a file's first line names Python; ``otherwise`` if it names no interpreter."""
    with path.open("rb") as file:
        first = file.readline()
    if first.startswith(b"#!"):
        return b"python" in first
    return otherwise


def _stay_in_front(flags: dict[str, Any]) -> None:
    """Put the launcher in front of a Python script that replaces this process.

    Bridge's scripts replace their process to restart in a recipe's environment. All functions of
    `os` that replace a process call ``execv`` or ``execve``.
    """
    for name in ("execv", "execve"):
        setattr(os, name, functools.partial(_replace_process, getattr(os, name), flags))


def _replace_process(
    function: Callable, flags: dict[str, Any], file: Any, command: Any, *environment: Any
) -> None:
    function(file, _behind_launcher(file, command, flags), *environment)


def _behind_launcher(file: str, command: list[str], flags: dict[str, Any]) -> list[str]:
    """Return ``command``, behind our launcher if it starts a Python script or module."""
    command = list(command)
    starts_python = file == sys.executable and len(command) > 1
    if not starts_python or not (command[1].endswith(".py") or command[1].startswith("-m")):
        return command
    words = []
    for name, value in flags.items():
        words.append("--" + name.replace("_", "-"))
        # a switch takes no value
        if value is not True:
            words.append(str(value))
    return [file, "-m", "megatron_hecate", "run", *words, "--", *command[1:]]
