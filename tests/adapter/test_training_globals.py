"""Where Megatron's scripts keep the iteration and the loggers. Oracle: the calls that stand-ins for them record."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_hecate.adapter.training_globals import log_step, running_iteration
from megatron_hecate.tools.metrics import step_metrics

pytestmark = pytest.mark.fast


class _Logger:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> object:
        return lambda *args: self.calls.append((name, *args))


def _values() -> dict[str, np.ndarray]:
    load = np.array([[3, 1]])
    return step_metrics(load, load, load, token_ms=1.0)


def test_metrics_go_to_both_loggers_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(tensorboard_log_interval=2, moe_per_layer_logging=True, curr_iteration=3)
    board, wandb = _Logger(), _Logger()
    module = SimpleNamespace(_GLOBAL_ARGS=args, get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: wandb)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert running_iteration() == 4
    log_step(3, ["layer 1"], _values, ended=False)
    assert not board.calls and not wandb.calls
    log_step(4, ["layer 1"], _values, ended=False)
    logged = {name: value for _, name, value, step in board.calls if step == 4}
    assert logged["moe/max_overload_factor"] == logged["moe/overload_factor_layer_0"] == 1.5
    assert wandb.calls == [("log", logged, 4)]
    log_step(6, ["layer 1"], _values, ended=True)  # by now W&B's run is closed
    assert len(wandb.calls) == 1 and board.calls[-1] == ("flush",)


def test_other_loops_have_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ranks without loggers compute nothing."""
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    assert running_iteration() is None
    log_step(1, ["layer 1"], lambda: pytest.fail("computed"), ended=False)
    nothing = SimpleNamespace(
        _GLOBAL_ARGS=SimpleNamespace(), get_tensorboard_writer=lambda: None, get_wandb_writer=lambda: None
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", nothing)
    assert running_iteration() is None
    log_step(1, ["layer 1"], lambda: pytest.fail("computed"), ended=False)
