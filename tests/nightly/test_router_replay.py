"""NeMo-RL's own router replay, and verl's own patch of Megatron's, where $HECATE_NEMO_RL and $HECATE_VERL name
checkouts: tokens without a route choose their experts. And the own lists of slime and miles ($HECATE_SLIME,
$HECATE_MILES), whose loop is in `test_slime_routes`.

Only the modules of router replay run; the packages around them need ray, and three names from them are given here. The
loop of NeMo-RL follows ``model_forward`` of ``nemo_rl/models/megatron/train.py``, 7ea279ab. Oracle: stock Megatron in
the same loop; loads counted token by token in Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gpt
import torch
from layouts import FULL
from ranks import ranks
from replayed_routes import (
    REPLAY,
    TOKENS,
    assert_counted,
    note_forecasts,
    replay,
    routes_of,
    train_steps,
)

pytestmark = pytest.mark.newest
KNOWN = torch.arange(TOKENS) % 4 < 3


def _load(checkout: str, name: str) -> types.ModuleType:
    """Execute a module of a checkout, whose packages are not."""
    file = Path(os.environ[checkout], *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compare(case: Any) -> Any:
    """Train with and without FSSDP; return the run with it."""
    stock = train_steps(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 2, lifetime="layer", slots=2)
    tiny_gpt.assert_trained_alike(stock, ours, "layer")
    assert_counted(found, KNOWN)
    return ours


@pytest.mark.skipif("HECATE_NEMO_RL" not in os.environ, reason="no checkout of NeMo-RL is named")
@ranks(2)
def test_nemo_rls_own_router_replay() -> None:
    case = tiny_gpt.initialized(settings=(REPLAY, *FULL.items()))
    interfaces = types.ModuleType("nemo_rl.models.generation.interfaces")
    interfaces.ROUTED_EXPERTS_MISSING_ROUTE_SENTINEL = -1
    policy = types.ModuleType("nemo_rl.models.policy")
    policy.PolicyConfig = dict
    sys.modules |= {module.__name__: module for module in (interfaces, policy)}
    _load("HECATE_NEMO_RL", "nemo_rl.utils.r3_trace")
    nemo_rl = _load("HECATE_NEMO_RL", "nemo_rl.models.megatron.router_replay")
    original, steps = tiny_gpt.forward_step, {}

    def forward_step(iterator: Any, model: Any, *args: Any, **settings: Any) -> Any:
        step = steps[model] = steps.get(model, -1) + 1
        rank = tiny_gpt.parallel_state.get_data_parallel_rank()
        routes = [routes_of(step, 0, layer, rank) for layer in range(case.layers)]
        payload = torch.stack(routes, dim=1).masked_fill(~KNOWN[:, None, None], -1)
        nemo_rl.set_router_replay_forward(model, payload.to(torch.int16).unsqueeze(0))
        result = original(iterator, model, *args, **settings)
        nemo_rl.set_router_replay_backward(model)
        return result

    tiny_gpt.forward_step = forward_step
    _compare(case)


@pytest.mark.skipif("HECATE_VERL" not in os.environ, reason="HECATE_VERL names no checkout of verl")
@ranks(2)
def test_verls_own_patch() -> None:
    """The real module, with masked tokens and the patched dispatcher."""
    verl = _load("HECATE_VERL", "verl.utils.megatron.router_replay_patch")
    verl.apply_router_replay_patch()
    set_routes = verl.RouterReplay.set_target_indices

    def set_masked(router: Any, routes: torch.Tensor) -> None:
        set_routes(router, routes.masked_fill(~KNOWN.unsqueeze(1), 0), replay_mask=KNOWN)

    verl.RouterReplay.set_target_indices = set_masked
    case = tiny_gpt.initialized(settings=(REPLAY, *FULL.items()))
    replay(case.accumulate, actions=verl.RouterReplayAction)
    ours = _compare(case)
    assert isinstance(tiny_gpt.moe_layers(ours.chunks)[0].router.router_replay, verl.RouterReplay)


@pytest.mark.parametrize(
    ("checkout", "name"),
    [("HECATE_SLIME", "slime.utils.routing_replay"), ("HECATE_MILES", "miles.utils.replay_base")],
)
def test_own_lists_of_slime_and_miles(
    checkout: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Literal routes of three forwards, of which one is over."""
    if checkout not in os.environ:
        pytest.skip(f"{checkout} names no checkout")
    from megatron_hecate.routes.router_replay import next_routes

    monkeypatch.syspath_prepend(os.environ[checkout])
    module = importlib.import_module(name)
    empty_like = torch.empty_like
    # memory that is not pinned
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs)
    )
    router = torch.nn.Module()
    if checkout == "HECATE_SLIME":
        monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
        monkeypatch.setenv("ROUTING_REPLAY_STAGE", "replay_forward")
        router.routing_replay = module.RoutingReplay()
    else:
        manager = module.routing_replay_manager
        manager.enabled, manager.stage = True, "replay_forward"
        manager.register_to_module(router, "routing_replay")
    for forward in range(3):
        router.routing_replay.record(torch.full((4, 2), forward).int())
    router.routing_replay.forward_index = 1
    config = types.SimpleNamespace(moe_router_fusion=False, num_moe_experts=8)
    layer = types.SimpleNamespace(router=router, config=config)
    assert [int(routes[0, 0]) for routes in next_routes(layer, 9)] == [1, 2]
