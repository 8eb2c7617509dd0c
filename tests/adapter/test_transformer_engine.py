"""Replicas in TEGroupedMLP over TransformerEngine's own Python, with only its compiled half in torch (`te_on_cpu`).

Oracle: the same model without FSSDP, on the same ranks and data. What this cannot show is TransformerEngine's kernels.
"""

from __future__ import annotations

import pytest
from ranks import ranks


@pytest.mark.newest
@pytest.mark.parametrize("version", ["2.20.2", "2.9.0"])
@ranks(2, preload=False)
def test_stock_trains_over_transformer_engine(version: str) -> None:
    import te_on_cpu

    te_on_cpu.install(version)
    import tex_on_cpu
    import tiny_gpt

    case = tiny_gpt.Case(grouped=True)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    assert stock.losses[0] > stock.losses[-1]
    assert {layout for layout, *_ in tex_on_cpu.GEMMS} == {"TN", "NN", "NT"}
