"""A job that gets SIGTERM saves a checkpoint, and goes on from it where it is started again.

Oracle: losses of stock Megatron that is ended and started again in the same way. The record has every iteration once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pretraining import ROOT, SUPPORT, losses, pretrain, run_script

from megatron_hecate.record import run_folder

SCRIPT = SUPPORT / "scripts" / "terminated_pretrain.py"


def _ended_and_continued(text: Path, checkpoints: Path, launcher: list[str]) -> list[list[float]]:
    """Losses of both parts; the launcher gets the signal in the third iteration of six."""
    flags = ["--exit-signal-handler", "--save", str(checkpoints), "--load", str(checkpoints)]
    flags += ["--save-interval", "100"]
    code, log = run_script(text, *flags, launcher=launcher, script=SCRIPT)
    assert code != 0, "torchrun ends with the signal"
    assert "exiting program after receiving SIGTERM" in log, log[-4000:]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    return [losses(log), losses(pretrain(text, *flags, launcher=launcher))]


@pytest.mark.newest
@pytest.mark.slow
def test_a_job_that_is_ended_goes_on_where_it_was(text: Path, tmp_path: Path) -> None:
    """Experts move to other homes, which a checkpoint does not show. torchrun passes the signal on to the ranks, which
    have 30 s then, or $TORCH_ELASTIC_SHUTDOWN_TIMEOUT."""
    stock = _ended_and_continued(text, tmp_path / "stock", [])
    assert [len(part) for part in stock] == [3, 3]
    free = str(ROOT / "tests" / "data" / "free_copies.json")
    flags = ["--moe-fssdp", "--moe-fssdp-speeds", free, "--moe-fssdp-rehome", "2"]
    record = tmp_path / "run"
    launcher = ["-m", "megatron_hecate", *flags, "--moe-fssdp-record", str(record)]
    ours = _ended_and_continued(text, tmp_path / "ours", launcher)
    for part, expected in zip(ours, stock, strict=True):
        assert part == pytest.approx(expected, rel=1e-5)
    held = run_folder.read(record)
    assert held.iteration.tolist() == [1, 2, 3, 4, 5, 6], "also the last ones of both parts"
    assert (held.replica >= 0).any()
