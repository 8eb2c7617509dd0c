"""Megatron's hybrid models (Nemotron's), where attention and experts are layers of their own. Oracle: the unconverted
model on the same ranks and data. See `tiny_hybrid` for what a pattern is.
"""

from __future__ import annotations

import pytest
from layouts import FULL
from ranks import ranks

PATTERN, PREDICTION = "*EE*E", "*EEE"  # three layers of experts share two buffers


@pytest.mark.newest
@pytest.mark.parametrize(
    ("lifetime", "recompute"),
    [
        ("iteration", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("iteration", False),
                ("layer", False),
                ("layer", True),
            )
        ),
    ],
)
@ranks(2)
def test_multi_token_prediction_by_one_repeated_layer(lifetime: str, recompute: bool) -> None:
    import tiny_gpt
    import tiny_hybrid
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    tiny_hybrid.install(PATTERN, PREDICTION)
    settings = dict(
        num_layers=5, mtp_num_layers=2, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3
    )
    if recompute:
        settings |= FULL
    case = tiny_gpt.Case(accumulate=2, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    assert any(
        isinstance(module, MultiTokenPredictionBlock) for module in stock.chunks[0].modules()
    )
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(lifetime=lifetime))
    tiny_gpt.assert_trained_alike(stock, ours)
    assert [layer.fssdp.parts.passes for layer in tiny_gpt.moe_layers(ours.chunks)] == [
        1,
        1,
        1,
        2,
        2,
        2,
    ]
