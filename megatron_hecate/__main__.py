"""``torchrun ... -m megatron_hecate --moe-fssdp pretrain_gpt.py <Megatron's arguments>``: any script, unmodified.

Modules and console commands too: ``... -m megatron_hecate --moe-fssdp -m package.module <its arguments>``. Scripts of
Megatron-Bridge: ``... -m megatron_hecate --moe-fssdp run_recipe.py <its arguments and overrides>``.

``python -m megatron_hecate --check`` prints what FSSDP finds here and would use; with ``--settings FILE`` whether it
would switch on with a job's settings. ``torchrun ... -m megatron_hecate --measure FILE`` writes what links and cores
do, for ``--moe-fssdp-speeds FILE``. ``python -m megatron_hecate --what-if TRACE ...`` says whether FSSDP is worth it.
``--report RUN_DIR`` writes a page that says what a recorded run lost and won.
"""

from __future__ import annotations

import os
import sys

from megatron_hecate import check, launcher

DESCRIPTION = (
    "Run a Megatron pretraining script, module or console command with the --moe-fssdp flags. "
    "--check prints versions and whether FSSDP fits; "
    "--check --settings FILE says whether a job's settings (a launch script, YAML or JSON) can be combined with it. "
    "--measure FILE, under torchrun, writes the speeds of links and cores for --moe-fssdp-speeds. "
    "--what-if TRACE says, from recorded loads, whether FSSDP is worth it; --what-if --help lists its settings. "
    "--report RUN_DIR writes a page about a recorded run."
)
USAGE = (
    "python -m megatron_hecate [--moe-fssdp ...] {SCRIPT.py | -m MODULE | COMMAND} [its arguments] | "
    "--check [--settings FILE] | --measure FILE | --what-if TRACE ... | --report RUN_DIR [--out FILE]"
)


def main(argv: list[str]) -> int:
    """Run one of the commands, or a script with the flags known to Megatron's parser; returns the exit status."""
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
            "--measure needs at least 2 ranks: torchrun --nproc-per-node 2 -m megatron_hecate --measure FILE",
            file=sys.stderr,
        )
        return 2
    from megatron_hecate.offline.measure import measure

    measure(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
