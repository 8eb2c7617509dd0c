"""NeMo-RL's own router replay, where $HECATE_NEMO_RL names a checkout: tokens without a route choose their experts.

Only the module of router replay runs; the packages around it need ray, and three names from them are given here. The
loop follows ``model_forward`` of ``nemo_rl/models/megatron/train.py``, 7ea279ab. Oracle: stock Megatron in the same
loop; loads counted token by token in Python.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import FULL
from ranks import ranks
from replayed_routes import (
    REPLAY,
    TOKENS,
    assert_counted,
    note_forecasts,
    routes_of,
    train_steps,
)


def router_replay() -> types.ModuleType:
    """NeMo-RL's module, and the names that it imports from packages with ray."""
    interfaces = types.ModuleType("nemo_rl.models.generation.interfaces")
    interfaces.ROUTED_EXPERTS_MISSING_ROUTE_SENTINEL = -1
    policy = types.ModuleType("nemo_rl.models.policy")
    policy.PolicyConfig = dict
    sys.modules |= {module.__name__: module for module in (interfaces, policy)}
    for name in ("nemo_rl.utils.r3_trace", "nemo_rl.models.megatron.router_replay"):
        file = Path(os.environ["HECATE_NEMO_RL"], *name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.newest
@pytest.mark.skipif("HECATE_NEMO_RL" not in os.environ, reason="no checkout of NeMo-RL is named")
@ranks(2)
def test_its_own_router_replay() -> None:
    import tiny_gpt
    from megatron.core import parallel_state

    case = tiny_gpt.Case(settings=(REPLAY, *FULL.items()))
    tiny_gpt.initialize(case)
    nemo_rl = router_replay()
    known = torch.arange(TOKENS) % 4 < 3
    original, steps = tiny_gpt.forward_step, {}

    def forward_step(iterator: Any, model: Any, *args: Any, **settings: Any) -> Any:
        step = steps[model] = steps.get(model, -1) + 1
        rank = parallel_state.get_data_parallel_rank()
        routes = [routes_of(step, 0, layer, rank) for layer in range(case.layers)]
        payload = torch.stack(routes, dim=1).masked_fill(~known[:, None, None], -1)
        nemo_rl.set_router_replay_forward(model, payload.to(torch.int16).unsqueeze(0))
        result = original(iterator, model, *args, **settings)
        nemo_rl.set_router_replay_backward(model)
        return result

    tiny_gpt.forward_step = forward_step
    stock = train_steps(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 2, lifetime="layer", slots=2)
    tiny_gpt.assert_trained_alike(stock, ours, "layer")
    assert_counted(found, known)
