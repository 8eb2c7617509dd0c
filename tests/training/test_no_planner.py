"""Layers without slots plan nothing and need no numba, as on a GPU's machine whose numba refuses its numpy.

Oracle: stock Megatron, bitwise; where something is to be planned, switching on fails and names numba.
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import ranks

pytestmark = pytest.mark.newest


@ranks(2)
def test_numba_is_needed_by_slots_only() -> None:
    import tiny_gpt

    from megatron_hecate.comm.agreement import SwitchOnError
    from megatron_hecate.plan.compiled import Compiled

    def refuse(function: Any, *args: Any) -> Any:
        raise ImportError(
            "planning needs numba, which cannot be imported (Numba needs NumPy 2.4 or less)"
        )

    Compiled.__call__ = refuse  # type: ignore[method-assign]
    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    without = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=0))
    assert tiny_gpt.difference(stock, without) == tiny_gpt.SAME
    with pytest.raises(
        SwitchOnError, match=r"planning cannot be compiled: ImportError: planning needs numba"
    ):
        tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=2))
