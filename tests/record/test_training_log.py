"""Where Megatron's scripts keep the iteration and the loggers. Oracle: the calls that stand-ins for them record."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_hecate.megatron.training_globals import running_iteration
from megatron_hecate.record.job_metrics import log_step
from megatron_hecate.record.metrics import step_metrics
from megatron_hecate.record.training_log import log_interval

pytestmark = pytest.mark.fast


class _Logger:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


class _Run:
    """As a run of W&B keeps steps: rows only come after one another, and what has no step joins the running one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.x_axes: list[tuple[str, str]] = []
        self.run: _Run | None = self  # wandb's own name for it

    def log(
        self, values: dict[str, float], step: int | None = None, *, commit: bool | None = None
    ) -> None:
        running = len(self.rows) if step is None else step
        if running < len(self.rows):
            return  # dropped
        self.rows += [{} for _ in range(running - len(self.rows) + 1)] if step is not None else []
        self.rows[-1] |= values
        assert commit is not True

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.x_axes.append((name, step_metric))


def _values() -> dict[str, np.ndarray]:
    load = np.array([[3, 1]])
    return step_metrics(load, load, load, token_ms=1.0)


def test_metrics_go_to_both_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the iteration they belong to, though Megatron has logged others since."""
    args = SimpleNamespace(
        tensorboard_dir=None,
        wandb_project="p",
        tensorboard_log_interval=2,
        moe_per_layer_logging=True,
        curr_iteration=3,
    )
    board, wandb = _Logger(), _Run()
    module = SimpleNamespace(
        _GLOBAL_ARGS=args, get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: wandb
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert running_iteration() == 4 and log_interval() == 2
    wandb.log({"loss": 0.5}, 5)
    wandb.log({"loss": 0.6}, 6)
    log_step(4, ["layer 1"], _values(), ended=False)
    logged = {name: value for _, name, value, step in board.calls if step == 4}
    assert logged["moe/max_overload_factor"] == logged["moe/overload_factor_layer_0"] == 1.5
    assert wandb.rows[-1] == {"loss": 0.6, **logged, "fssdp/iteration": 4}
    log_step(6, ["layer 1"], _values(), ended=True)
    assert board.calls[-1] == ("flush",)
    assert sorted(wandb.x_axes) == sorted((name, "fssdp/iteration") for name in logged), "each once"
    wandb.run, rows = None, str(wandb.rows)  # a script has finished the run
    log_step(8, ["layer 1"], _values(), ended=True)
    assert str(wandb.rows) == rows


def test_other_loops_have_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do scripts that log nothing."""
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    assert running_iteration() is None and log_interval() is None
    args = SimpleNamespace(tensorboard_dir=None, wandb_project="", tensorboard_log_interval=1)
    monkeypatch.setitem(
        sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args)
    )
    assert running_iteration() is None and log_interval() is None
