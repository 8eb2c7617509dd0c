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
from pretraining import ROOT, SUPPORT
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest

SCRIPTS = launch_flags.read()
QUICK = "slime-qwen3-30b"
TRAIN = SUPPORT / "scripts" / "launch_pretrain.py"
FREE = ROOT / "tests" / "data" / "free_copies.json"
# settings that FSSDP refuses, and overrides that its errors name
REFUSED = {
    "gpt-oss-20b": (
        ("expert_model_parallel_size=1", "fp8_recipe=None"),
        "--expert-model-parallel-size 2 --fp8-recipe tensorwise",
    ),
}
TOLERANCE = {"rel": 1e-3, "abs": 2e-3}
FSSDP = f"-m megatron_hecate --moe-fssdp --moe-fssdp-slots 2 --moe-fssdp-speeds {FREE}".split()


def _train(arguments: tuple[str, ...], log: Path, launcher: list[str]) -> None:
    """Run the script in this rank, whose output goes to ``log`` if it is the last one."""
    import te_layers_on_cpu  # noqa: F401
    import run_on_cpu
    import torch.distributed as dist

    alone = "--overlap-moe-expert-parallel-comm" not in arguments
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if alone else "32"
    sys.argv = ["run_on_cpu.py", *launcher, str(TRAIN), *arguments]
    last = dist.get_rank() == dist.get_world_size() - 1
    with (log if last else Path(os.devnull)).open("w") as out, contextlib.redirect_stdout(out):
        te_layers_on_cpu.install()
        try:
            run_on_cpu.main()
        except SystemExit as ended:  # our launcher's
            assert not ended.code


@ranks(2, timeout=280, preload="te")
def _train_on_two(arguments: tuple[str, ...], log: Path, launcher: list[str]) -> None:
    _train(arguments, log, launcher)


@ranks(4, timeout=280, preload="te")
def _train_on_four(arguments: tuple[str, ...], log: Path, launcher: list[str]) -> None:
    _train(arguments, log, launcher)


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


@pytest.mark.parametrize("name", quick(SCRIPTS, [QUICK]))
def test_script_trains_as_stock(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    _, override = REFUSED.get(name, ((), ""))
    shrunk = launch_flags.shrink(dataclasses.replace(script, flags=f"{script.flags} {override}"))
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
    print(f"| {name} | {shrunk.ranks} | {last['stock']} | {last['FSSDP']} | {share} |")
    assert texts["FSSDP"].count("FSSDP on: ") == 1
    assert stock.by_replicas == 0 < ours.by_replicas
    assert len(stock.figures["lm loss"]) == 5
    assert stock.figures.keys() == ours.figures.keys()
    for figure, values in stock.figures.items():
        assert ours.figures[figure] == pytest.approx(values, **TOLERANCE), figure
