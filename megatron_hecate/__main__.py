"""Command line ``megatron-hecate``; ``python -m megatron_hecate`` is the same.

`COMMANDS` lists the commands; each has its own ``--help``. ``run``, the launcher, may be left out:

    torchrun ... -m megatron_hecate --moe-fssdp pretrain_gpt.py <Megatron's arguments>
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from megatron_hecate import __version__
from megatron_hecate.switch_on import launcher
from megatron_hecate.tools import check

PROGRAM = "megatron-hecate"


# module of each command, with its ``make_parser()`` and its ``main(arguments)``; its summary
COMMANDS = {
    "check": ("tools.check", "print versions, and whether FSSDP fits here or a job's settings"),
    "report": ("tools.report", "write a page about a recorded run"),
    "what-if": ("tools.what_if", "predict steps with and without FSSDP from recorded loads"),
    "measure": ("tools.measure", "measure links and cores, under torchrun"),
    "run": ("switch_on.launcher", "run a Megatron training script with the --moe-fssdp flags"),
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
    """Run the command that ``words`` begin with, or the launcher; return the exit status."""
    if not words or words[0] not in COMMANDS:
        return launcher.main(words)
    if words[0] == "run":
        # A script handles its own pipes.
        return launcher.main(words[1:])
    # the import of one command only: commands do not pay for the imports of others
    module = importlib.import_module(f"megatron_hecate.{COMMANDS[words[0]][0]}")
    try:
        status = module.main(words[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # A pager or `head` has read enough. Python would flush once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def overview() -> str:
    """Describe all commands, for ``--help``."""
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:{width}}{summary}" for name, (_, summary) in COMMANDS.items())
    return f"""\
usage: {PROGRAM} [-h | --version] COMMAND ...
       {PROGRAM} [--moe-fssdp ...] SCRIPT.py ...

Train Mixture-of-Experts models of Megatron-LM with FSSDP, and find out what it would win.

commands:
{lines}

COMMAND --help lists the arguments of a command, and run --help the --moe-fssdp flags. The second
form is short for run. python -m megatron_hecate is the same as {PROGRAM}:

  torchrun ... -m megatron_hecate run --moe-fssdp -- pretrain_gpt.py ARGUMENTS"""


if __name__ == "__main__":
    sys.exit(main())
