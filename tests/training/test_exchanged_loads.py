"""Training with loads that kernels exchange through peers' memory, without a collective.

Oracle: training with an all-gather of the loads, bitwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
from layouts import COMBINED, FULL, MOE, layers
from quick import quick
from ranks import ranks

from megatron_hecate.nvlink.transport import NVLink
from megatron_hecate.step import layer

STEPS = 4
TWO: dict[str, dict[str, Any]] = {
    "iteration": dict(accumulate=3),
    "layer, recomputed": dict(accumulate=2, settings=layers(4, **FULL), lifetime="layer"),
    "experts recomputed": dict(accumulate=2, settings=MOE),
    "combined schedule": dict(accumulate=4, settings=COMBINED),
}
FOUR: dict[str, dict[str, Any]] = {
    "EP 4": dict(accumulate=2, ep=4),
    "PP 2, VPP 2": dict(accumulate=4, pp=2, vpp=2),
}


def _train(case: Any, lifetime: str) -> tuple[Any, list[float]]:
    """Train, and evaluate after every second step."""
    hook = tiny_gpt.fssdp_hook(transport="nvlink", lifetime=lifetime)
    model = tiny_gpt.train(case, steps=0, hook=hook)
    losses = []
    for step in range(STEPS):
        tiny_gpt.move_skew_sometimes(model.chunks, step)
        model.step(step)
        if step % 2 and case.pp == 1:
            losses.append(model.evaluate(step))
    model.read_params()
    return model, losses


def _check(lifetime: str = "iteration", **fields: Any) -> None:
    case = tiny_gpt.initialized(**fields)
    exchange, gather = NVLink.exchange_loads, layer.gather_rows
    gathered, num_gathers = [], 0

    def gather_noted(*args: Any, **settings: Any) -> Any:
        gathered.append(args)
        return gather(*args, **settings)

    layer.gather_rows = gather_noted
    NVLink.exchange_loads = lambda *_, **__: None
    expected, expected_losses = _train(case, lifetime)
    num_gathers = len(gathered)
    NVLink.exchange_loads = exchange
    trained, losses = _train(case, lifetime)
    assert num_gathers and len(gathered) == num_gathers, "exchanges in place of all-gathers"
    assert trained.replicas and tiny_gpt.difference(expected, trained) == tiny_gpt.SAME
    assert losses == expected_losses


@pytest.mark.parametrize("name", quick(TWO, ["layer, recomputed"]))
@ranks(2, timeout=300)
def test_two(name: str) -> None:
    _check(**TWO[name])


@pytest.mark.parametrize("name", quick(FOUR, ["EP 4"]))
@ranks(4, timeout=300)
def test_four(name: str) -> None:
    _check(**FOUR[name])
