"""Flags of public launch scripts, shrunk, through our launcher: FSSDP trains what stock Megatron trains.

Oracle: the log of stock Megatron with the same flags, on the same ranks and data. ``pytest -s`` prints the table of
``docs/frameworks.md``, which also says why a CPU leaves flags out.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import flex_backends
import launch_flags
import pytest
import torch.distributed as dist
from pretraining import ROOT, SUPPORT
from ranks import ranks

pytestmark = pytest.mark.newest

SCRIPTS = launch_flags.read()
TRAIN = SUPPORT / "scripts" / "launch_pretrain.py"
FREE = ROOT / "tests" / "data" / "free_copies.json"
# Rounding changes routes in bf16. Gradients of replicas that are lost change the losses of
# slime-qwen3-30b by 3e-3, and its gradient norms by 3e-2, relative.
TOLERANCES = {
    "fp32": {"lm loss": 1e-5, "grad norm": 1e-3},
    "bf16": {"lm loss": 1e-3, "grad norm": 1e-2},
}
FSSDP = f"-m megatron_hecate --moe-fssdp --moe-fssdp-slots 2 --moe-fssdp-speeds {FREE}".split()


@ranks(lambda name, *_: SCRIPTS[name].ranks, timeout=300, preload="te")
def _train(name: str, log: Path, launcher: list[str]) -> None:
    """Run the script in this rank, whose output goes to ``log`` if it is the last one."""
    import megatron_on_cpu
    import te_layers_on_cpu
    from run_script import run_script

    arguments = f"{SCRIPTS[name].trained} {launch_flags.TRAINING}".split()
    is_combined = "--overlap-moe-expert-parallel-comm" in arguments
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32" if is_combined else "1"
    sys.argv = ["torchrun", *launcher, str(TRAIN), *arguments]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with (log if is_last else Path(os.devnull)).open("w") as out, contextlib.redirect_stdout(out):
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


def _read(log: Path) -> tuple[dict[str, list[float]], int, int]:
    """Losses and norms by name and iteration; tokens that experts computed, and replicas among them."""
    text, figures = log.read_text(), defaultdict(list)
    for line in re.findall(r"iteration +\d+/.*", text):
        for name, value in re.findall(r"([\w ]*(?:loss|grad norm)): ([\d.E+-]+)", line):
            if name.strip() != "loss scale":
                figures[name.strip()].append(float(value))
    ((computed, by_replicas),) = re.findall(r"tokens: (\d+) computed, (\d+) by replicas", text)
    return dict(figures), int(computed), int(by_replicas)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_as_stock(name: str, tmp_path: Path) -> None:
    _train(name, tmp_path / "stock", [])
    _train(name, tmp_path / "FSSDP", FSSDP)
    stock, _, none = _read(tmp_path / "stock")
    ours, computed, by_replicas = _read(tmp_path / "FSSDP")
    script = SCRIPTS[name]
    row = [name, script.licence, script.settings]
    row += [f"{run['lm loss'][-1]:.6g} / {run['grad norm'][-1]:.6g}" for run in (stock, ours)]
    print(f"| {' | '.join(row)} | {by_replicas / computed:.0%} of {computed} |")
    tolerances = TOLERANCES["bf16" if "--bf16" in script.trained.split() else "fp32"]
    assert none == 0 < by_replicas
    assert len(stock["lm loss"]) == 5
    assert stock["lm loss"][-1] < stock["lm loss"][0] - 0.1, "nothing was trained"
    assert stock.keys() == ours.keys()
    for figure, values in stock.items():
        rel = tolerances["grad norm" if figure == "grad norm" else "lm loss"]
        # norms are printed with three digits
        margin = 1e-3 if figure == "grad norm" else 1e-6
        assert ours[figure] == pytest.approx(values, rel=rel, abs=margin), figure
