"""Command line ``megatron-hecate``; ``python -m megatron_hecate`` is the same.

| command | effect |
|---|---|
| ``check`` | print versions, and what FSSDP would use here |
| ``check --settings FILE`` | print whether FSSDP can be combined with a job's settings |
| ``report RUN_DIR`` | write a page about a recorded run: its losses and gains |
| ``what-if TRACE ...`` | simulate steps with and without FSSDP from recorded loads |
| ``measure FILE``, under torchrun | measure links and cores for ``--moe-fssdp-speeds FILE`` |
| ``run [--moe-fssdp ...] -- SCRIPT ...`` | run a training script with FSSDP's flags, unmodified |

Each command has its own ``--help``. Older forms are aliases: ``--check``, ``--report``,
``--what-if`` and ``--measure`` for the commands, and a target without ``run``:

    torchrun ... -m megatron_hecate --moe-fssdp pretrain_gpt.py <Megatron's arguments>

Options may precede their command, as in ``--settings FILE check``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from megatron_hecate import __version__
from megatron_hecate.switch_on import launcher
from megatron_hecate.tools import check

PROGRAM = "megatron-hecate"


@dataclasses.dataclass(frozen=True)
class Command:
    """Command of the command line.

    Args:
        module: module with its ``make_parser()`` and its ``main(arguments)``.
        summary: its line in the overview.
        alias: flag that selects it, too; empty without one.
    """

    module: str
    summary: str
    alias: str = ""

    def load(self) -> Any:
        """Import its module; commands do not pay for the imports of others."""
        return importlib.import_module(f"megatron_hecate.{self.module}")


COMMANDS = {
    "check": Command(
        "tools.check", "print versions, and whether FSSDP fits here or a job's settings", "--check"
    ),
    "report": Command("tools.report", "write a page about a recorded run", "--report"),
    "what-if": Command(
        "tools.what_if", "simulate steps with and without FSSDP from recorded loads", "--what-if"
    ),
    "measure": Command(
        "tools.measure",
        "measure links and cores, under torchrun",
        "--measure",
    ),
    "run": Command(
        "switch_on.launcher", "run a Megatron training script with the --moe-fssdp flags"
    ),
}
# names and aliases of commands: name
WORDS = {name: name for name in COMMANDS} | {
    command.alias: name for name, command in COMMANDS.items() if command.alias
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or a target whose Megatron accepts our flags; return the exit status.

    Args:
        argv: words of the command line; ``None`` for those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(overview())
        return 0
    if words == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    try:
        return _run(words)
    except ImportError as error:
        line = check.explain_missing(error)
        if not line:
            raise
        print(f"{PROGRAM}: {line}", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    """Run the command in ``words``; return its exit status."""
    name, arguments = _find(words)
    if name is None:
        return launcher.main(words, commands=tuple(COMMANDS))
    if name == "run":
        # A script handles its own pipes.
        return launcher.main(arguments)
    try:
        status = COMMANDS[name].load().main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # A pager or `head` has read enough. Python would flush once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def overview() -> str:
    """Describe all commands, for ``--help``."""
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items())
    return f"""\
usage: {PROGRAM} [-h | --version] COMMAND ...
       {PROGRAM} [--moe-fssdp ...] SCRIPT.py ...

Train Mixture-of-Experts models of Megatron-LM with FSSDP, and find out what it would win.

commands:
{lines}

COMMAND --help lists the arguments of a command, and run --help the --moe-fssdp flags. The second
form is short for run. Flags are aliases of commands: --check, --report, --what-if, --measure.
python -m megatron_hecate is the same as {PROGRAM}:

  torchrun ... -m megatron_hecate run --moe-fssdp -- pretrain_gpt.py ARGUMENTS"""


def _find(words: list[str]) -> tuple[str | None, list[str]]:
    """Find the command, which may follow its own options.

    Returns:
        The name of the command, ``None`` without one; its arguments.
    """
    for at, word in enumerate(words):
        # behind a target, given without `run`, stand its own arguments
        is_behind_target = at > 0 and not words[0].startswith("-")
        if word == "--" or is_behind_target:
            break
        name = WORDS.get(word)
        if name is None:
            continue
        if at == 0 or _are_options(words[:at], COMMANDS[name].load().make_parser()):
            return name, words[:at] + words[at + 1 :]
    return None, words


def _are_options(words: list[str], parser: argparse.ArgumentParser) -> bool:
    """Return whether ``words`` are options of ``parser`` with their values, and nothing else."""
    takes_value: dict[str, bool] = {}
    for action in parser._actions:
        takes_value.update(dict.fromkeys(action.option_strings, action.nargs is None))
    at = 0
    while at < len(words):
        option, equals, _ = words[at].partition("=")
        if option not in takes_value:
            return False
        at += 2 if takes_value[option] and not equals else 1
    return at == len(words)


if __name__ == "__main__":
    sys.exit(main())
