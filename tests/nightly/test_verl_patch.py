"""verl's own patch of Megatron's router replay, where $HECATE_VERL names a checkout: masked tokens choose their experts.

Oracle: stock Megatron with the same patch; loads counted token by token in Python.
"""

from __future__ import annotations

import importlib.util
import os
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
    replay,
    train_steps,
)


@pytest.mark.newest
@pytest.mark.skipif("HECATE_VERL" not in os.environ, reason="HECATE_VERL names no checkout of verl")
@ranks(2)
def test_verls_own_patch() -> None:
    """The real module, with masked tokens and the patched dispatcher; the package around it needs ray."""
    import tiny_gpt

    name = "verl.utils.megatron.router_replay_patch"
    file = Path(os.environ["HECATE_VERL"], *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    verl = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verl)
    verl.apply_router_replay_patch()
    known = torch.arange(TOKENS) % 4 < 3
    set_routes = verl.RouterReplay.set_target_indices

    def set_masked(router: Any, routes: torch.Tensor) -> None:
        set_routes(router, routes.masked_fill(~known.unsqueeze(1), 0), replay_mask=known)

    verl.RouterReplay.set_target_indices = set_masked
    case = tiny_gpt.Case(settings=(REPLAY, *FULL.items()))
    tiny_gpt.initialize(case)
    replay(case.accumulate, actions=verl.RouterReplayAction)
    stock = train_steps(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = train_steps(case, 2, lifetime="layer", slots=2)
    assert isinstance(tiny_gpt.moe_layers(ours.chunks)[0].router.router_replay, verl.RouterReplay)
    tiny_gpt.assert_trained_alike(stock, ours, "layer")
    assert_counted(found, known)
