"""Command line: run any training script with FSSDP's flags, unmodified, or one of our commands.

    torchrun ... -m megatron_hecate --moe-fssdp pretrain_gpt.py <Megatron's arguments>
    torchrun ... -m megatron_hecate --moe-fssdp -m package.module <its arguments>
    torchrun ... -m megatron_hecate --moe-fssdp run_recipe.py <its arguments and overrides>

The target is a script, a module or a console command, of Megatron-LM or of Megatron-Bridge.

| command | effect |
|---|---|
| ``--check`` | print versions, and what FSSDP would use here |
| ``--check --settings FILE`` | print whether FSSDP can be combined with a job's settings |
| ``--measure FILE``, under torchrun | measure links and cores for ``--moe-fssdp-speeds FILE`` |
| ``--what-if TRACE ...`` | simulate steps with and without FSSDP from recorded loads |
| ``--report RUN_DIR`` | write a page about a recorded run: its losses and gains |
"""

from __future__ import annotations

import os
import sys

from megatron_hecate import check, launcher

DESCRIPTION = (
    "Run a Megatron pretraining script, module or console command with the --moe-fssdp flags. "
    "--check prints versions and whether FSSDP fits. "
    "--check --settings FILE prints whether FSSDP can be combined with a job's settings "
    "(a launch script, YAML or JSON). "
    "--measure FILE, under torchrun, writes the speeds of links and cores for --moe-fssdp-speeds. "
    "--what-if TRACE simulates, from recorded loads, the step time with and without FSSDP; "
    "--what-if --help lists its settings. "
    "--report RUN_DIR writes a page about a recorded run."
)
USAGE = (
    "python -m megatron_hecate "
    "[--moe-fssdp ...] {SCRIPT.py | -m MODULE | COMMAND} [its arguments] | "
    "--check [--settings FILE] | --measure FILE | --what-if TRACE ... | "
    "--report RUN_DIR [--out FILE]"
)


def main(argv: list[str]) -> int:
    """Run a command, or a target whose Megatron accepts our flags; return the exit status."""
    if argv[:1] == ["--check"]:
        return check.main(argv[1:])
    if argv[:1] == ["--what-if"]:
        from megatron_hecate.offline import what_if

        return what_if.main(argv[1:])
    if argv[:1] == ["--report"]:
        from megatron_hecate.offline import report

        return report.main(argv[1:])
    if argv[:1] == ["--measure"]:
        return _measure(argv[1:])
    parser = launcher.Parser(
        prog="python -m megatron_hecate", usage=USAGE, description=DESCRIPTION, allow_abbrev=False
    )
    return launcher.run(argv, parser)


def _measure(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"--measure takes one file, got {arguments}", file=sys.stderr)
        return 2
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        print(
            "--measure needs at least 2 ranks: "
            "torchrun --nproc-per-node 2 -m megatron_hecate --measure FILE",
            file=sys.stderr,
        )
        return 2
    from megatron_hecate.offline.measure import measure

    measure(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
