"""``torchrun ... -m megatron_hecate --moe-fssdp pretrain_gpt.py <Megatron's arguments>``: any script, unmodified.

Scripts of Megatron-Bridge too: ``... -m megatron_hecate --moe-fssdp run_recipe.py <its arguments and overrides>``.

``python -m megatron_hecate --check`` prints what FSSDP finds here and would use; with ``--settings FILE`` whether it
would switch on with a job's settings. ``torchrun ... -m megatron_hecate --measure FILE`` writes what links and cores
do, for ``--moe-fssdp-speeds FILE``. ``python -m megatron_hecate --what-if TRACE ...`` says whether FSSDP is worth it.
``--report RUN_DIR`` writes a page that says what a recorded run lost and won.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_hecate import HecateConfig, check

DESCRIPTION = (
    "Run a Megatron pretraining script with the --moe-fssdp flags. --check prints versions and whether FSSDP fits; "
    "--check --settings FILE says whether a job's settings (JSON or YAML, one or a list) can be combined with it. "
    "--measure FILE, under torchrun, writes the speeds of links and cores for --moe-fssdp-speeds. "
    "--what-if TRACE says, from recorded loads, whether FSSDP is worth it; --what-if --help lists its settings. "
    "--report RUN_DIR writes a page about a recorded run."
)
USAGE = (
    "python -m megatron_hecate [--moe-fssdp ...] SCRIPT.py [Megatron's arguments] | --check [--settings FILE] | "
    "--measure FILE | --what-if TRACE ... | --report RUN_DIR [--out FILE]"
)


def main(argv: list[str]) -> int:
    """Run ``SCRIPT.py`` with the flags known to Megatron's parser; returns the exit status of ``--check``."""
    if argv[:1] == ["--check"]:
        return check.main(argv[1:])
    if argv[:1] == ["--what-if"]:
        from megatron_hecate.tools import what_if

        return what_if.main(argv[1:])
    if argv[:1] == ["--report"]:
        from megatron_hecate.tools import report

        return report.main(argv[1:])
    if argv[:1] == ["--measure"]:
        if len(argv) != 2:
            print(f"--measure takes one file, got {argv[1:]}", file=sys.stderr)
            return 2
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            print(
                "--measure needs at least 2 ranks: torchrun --nproc-per-node 2 -m megatron_hecate --measure FILE",
                file=sys.stderr,
            )
            return 2
        from megatron_hecate.tools.measure import measure

        measure(argv[1])
        return 0
    at = next((i for i, argument in enumerate(argv) if argument.endswith(".py")), None)
    parser = argparse.ArgumentParser(
        prog="python -m megatron_hecate", usage=USAGE, description=DESCRIPTION, allow_abbrev=False
    )
    HecateConfig.add_arguments(parser)
    unset = dict.fromkeys(HecateConfig().as_arguments(), parser)  # an object that is the value of no flag
    # -h, and flags of others before the script, end here
    asked = vars(parser.parse_args(argv if at is None else argv[:at], argparse.Namespace(**unset)))
    given = {name: value for name, value in asked.items() if value is not parser}
    try:
        # what is wrong is said now, not when Megatron has started
        settings = HecateConfig.from_arguments(argparse.Namespace(**given))
        if settings is not None and settings.speeds is not None:
            from megatron_hecate.plan import Speeds

            Speeds.load(settings.speeds)
    except (ValueError, NotImplementedError) as error:
        parser.error(f"--moe-fssdp: {error}")
    if at is None:
        parser.error("no SCRIPT.py given")
    script = argv[at]
    if not Path(script).exists():
        parser.error(f"{script} does not exist")
    for name in ("moe_fssdp_speeds", "moe_fssdp_record"):  # the script may change the working directory
        if given.get(name) is not None:
            given[name] = str(Path(given[name]).absolute())
    script = str(Path(script).absolute())
    sys.path[0] = str(Path(script).resolve().parent)  # as if the script had been started by itself
    from megatron_hecate import enable

    enable.launched.update(given)
    if "megatron.bridge" in sys.modules:
        import megatron_hecate.bridge  # noqa: F401
    else:
        sys.meta_path.insert(0, _WithBridge())
    os.execvpe = functools.partial(_start_again, os.execvpe, given)
    sys.argv = [script, *argv[at + 1 :]]
    runpy.run_path(script, run_name="__main__")
    if settings is not None and "megatron_hecate.convert" not in sys.modules:
        print(f"FSSDP: {script} built no model by megatron.training or Megatron-Bridge: FSSDP was off", file=sys.stderr)
        return 1
    return 0


class _WithBridge(importlib.abc.MetaPathFinder):
    """Imports `megatron_hecate.bridge` as soon as the script has imported Megatron-Bridge."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "megatron.bridge":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                import megatron_hecate.bridge  # noqa: F401

            spec.loader.exec_module = exec_module
        return spec


def _start_again(execvpe: Callable, given: dict[str, Any], file: str, command: list[str], environment: dict) -> None:
    """In the place of ``os.execvpe``, by which Bridge's scripts start anew in a recipe's environment: we come along."""
    if file == sys.executable and command[1].endswith(".py"):
        flags = [("--" + name.replace("_", "-"), value) for name, value in given.items()]
        ours = [part for flag, value in flags for part in ((flag,) if value is True else (flag, str(value)))]
        command = [file, "-m", "megatron_hecate", *ours, *command[1:]]
    execvpe(file, command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
