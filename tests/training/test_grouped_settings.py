"""Settings of recipes that change what grouped experts compute, over TransformerEngine's own Python (`te_on_cpu`).

Oracle: the same model without FSSDP, on the same ranks and data.
"""

from __future__ import annotations

import pytest
from layouts import FULL
from ranks import ranks

pytestmark = pytest.mark.newest

SETTINGS = {
    "latent": dict(moe_latent_size=16, moe_shared_expert_intermediate_size=32),
    "latent-recompute": dict(moe_latent_size=16, **FULL),
    "interleaved": dict(moe_mlp_glu_interleave_size=8),
}


@pytest.mark.parametrize("name", SETTINGS)
@ranks(2, preload="te")
def test_two_ranks(name: str) -> None:
    import te_on_cpu

    te_on_cpu.install()
    import tiny_gpt

    case = tiny_gpt.Case(grouped=True, accumulate=2, settings=tuple(SETTINGS[name].items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    tiny_gpt.assert_trained_alike(stock, ours, name, tolerance=1e-5)
