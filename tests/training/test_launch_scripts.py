"""Flags of public launch scripts, shrunk, through our launcher: FSSDP trains what stock Megatron trains.

Oracle: the log of stock Megatron with the same flags, on the same ranks and data. ``pytest -s`` prints the table of
``docs/frameworks.md``. What a CPU leaves out of a script is in `launch_flags.LEFT_OUT`, with reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import launch_flags
import pytest
import torch.distributed as dist
from pretraining import ROOT, SUPPORT
from ranks import ranks

pytestmark = pytest.mark.newest

SCRIPTS = launch_flags.read()
TIMEOUT = 300
TRAIN = SUPPORT / "scripts" / "launch_pretrain.py"
FREE = ROOT / "tests" / "data" / "free_copies.json"
# overrides that errors of `megatron-hecate check` name
OVERRIDES = {"gpt-oss-20b": "--expert-model-parallel-size 2 --fp8-recipe tensorwise"}
# Rounding changes routes in bf16. Gradients of replicas that are lost change the losses of
# slime-qwen3-30b by 3e-3, and its gradient norms by 3e-2, relative.
TOLERANCES = {
    "fp32": {"lm loss": 1e-5, "grad norm": 1e-3},
    "bf16": {"lm loss": 1e-3, "grad norm": 1e-2},
}
FSSDP = f"-m megatron_hecate --moe-fssdp --moe-fssdp-slots 2 --moe-fssdp-speeds {FREE}".split()


def _train(arguments: tuple[str, ...], log: Path, launcher: list[str]) -> None:
    """Run the script in this rank, whose output goes to ``log`` if it is the last one."""
    import flex_backends
    import megatron_on_cpu
    import te_layers_on_cpu
    from run_script import run_script

    alone = "--overlap-moe-expert-parallel-comm" not in arguments
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if alone else "32"
    sys.argv = ["torchrun", *launcher, str(TRAIN), *arguments]
    last = dist.get_rank() == dist.get_world_size() - 1
    with (log if last else Path(os.devnull)).open("w") as out, contextlib.redirect_stdout(out):
        # imported before `for_training`: on import, Megatron probes for a real GPU
        import megatron.training.training  # noqa: F401

        megatron_on_cpu.for_training()
        te_layers_on_cpu.install()
        if "flex" in arguments:
            flex_backends.install()
        try:
            run_script()
        except SystemExit as ended:  # our launcher's
            assert not ended.code


@ranks(2, timeout=TIMEOUT, preload="te")
def _train_on_two(arguments: tuple[str, ...], log: Path, launcher: list[str]) -> None:
    _train(arguments, log, launcher)


@ranks(4, timeout=TIMEOUT, preload="te")
def _train_on_four(arguments: tuple[str, ...], log: Path, launcher: list[str]) -> None:
    _train(arguments, log, launcher)


@pytest.mark.fast
def test_no_rule_is_idle() -> None:
    """Every flag that is left out, replaced or cut occurs in a script, and no layout needs over four ranks."""
    assert len(SCRIPTS) >= 15
    quoted = {flag for script in SCRIPTS.values() for flag in launch_flags.parse(script.flags)}
    rules = {*launch_flags.LEFT_OUT, *launch_flags.AT_MOST}
    rules |= {flag for flag, _ in launch_flags.REPLACED}
    assert rules <= quoted, rules - quoted
    for script in SCRIPTS.values():
        shrunk = launch_flags.shrink(script)
        kept = {word for word in shrunk.arguments if word.startswith("--")}
        assert {*launch_flags.parse(script.flags)} - kept == {*shrunk.left_out}, script.name
        assert shrunk.ranks in (2, 4), script.name


@dataclasses.dataclass(frozen=True)
class Log:
    """Figures that Megatron prints at each iteration, and the script's tokens.

    Args:
        figures: losses and gradient norms by name and iteration.
        computed: tokens that experts computed, over all ranks and iterations.
        by_replicas: the tokens among them that replicas computed.
    """

    figures: dict[str, list[float]]
    computed: int
    by_replicas: int

    @classmethod
    def read(cls, text: str) -> Log:
        figures = defaultdict(list)
        for line in re.findall(r"iteration +\d+/.*", text):
            for name, value in re.findall(r"([\w ]*(?:loss|grad norm)): ([\d.E+-]+)", line):
                if name.strip() != "loss scale":
                    figures[name.strip()].append(float(value))
        (tokens,) = re.findall(r"tokens: (\d+) computed, (\d+) by replicas", text)
        return cls(dict(figures), *map(int, tokens))


def _run(arguments: tuple[str, ...], num_ranks: int, log: Path, launcher: list[str]) -> str:
    train = {2: _train_on_two, 4: _train_on_four}[num_ranks]
    train(arguments, log, launcher)
    return log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_as_stock(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    flags = f"{script.flags} {OVERRIDES.get(name, '')}"
    shrunk = launch_flags.shrink(dataclasses.replace(script, flags=flags))
    texts = {
        run: _run(shrunk.arguments, shrunk.ranks, tmp_path / run, launcher)
        for run, launcher in (("stock", []), ("FSSDP", FSSDP))
    }
    stock = Log.read(texts["stock"])
    ours = Log.read(texts["FSSDP"])
    last = {
        run: " / ".join(f"{log.figures[figure][-1]:.6g}" for figure in ("lm loss", "grad norm"))
        for run, log in (("stock", stock), ("FSSDP", ours))
    }
    share = f"{ours.by_replicas / ours.computed:.0%} of {ours.computed}"
    licence = script.sources[0]["licence"]
    print(
        f"| {name} | {licence} | {script.settings} | {last['stock']} | {last['FSSDP']} | {share} |"
    )
    tolerances = TOLERANCES["bf16" if "--bf16" in shrunk.arguments else "fp32"]
    assert stock.by_replicas == 0 < ours.by_replicas
    assert len(stock.figures["lm loss"]) == 5
    assert stock.figures["lm loss"][-1] < stock.figures["lm loss"][0] - 0.1, "nothing was trained"
    assert stock.figures.keys() == ours.figures.keys()
    for figure, values in stock.figures.items():
        rel = tolerances["grad norm" if figure == "grad norm" else "lm loss"]
        # norms are printed with three digits
        margin = 1e-3 if figure == "grad norm" else 1e-6
        assert ours.figures[figure] == pytest.approx(values, rel=rel, abs=margin), figure
