"""What operators of grouped experts keep (``use_transformer_engine_op_fuser``). `test_layouts` trains with them.

Oracles: garbage collection; stock Megatron with frozen experts.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import tiny_gpt
import variants
from layout_tables import LAYOUTS
from ranks import ranks

pytestmark = pytest.mark.newest


@ranks(2, preload="te")
def test_operators_keep_no_weights_of_earlier_forwards() -> None:
    from megatron_hecate.megatron.grouped_linear import GroupedTwin

    case, _ = variants.case_of(LAYOUTS["operators-fused-biases"])
    lent: dict[Any, list[list[weakref.ref]]] = {}
    compute = GroupedTwin.compute

    def watched(self: Any, weights: list[Any], *inputs: Any, **kwargs: Any) -> Any:
        lent.setdefault(self, []).append([weakref.ref(weight) for weight in weights])
        return compute(self, weights, *inputs, **kwargs)

    GroupedTwin.compute = watched
    trained = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(lifetime="layer"))
    assert trained.replicas > 0
    gc.collect()
    # forwards of one iteration share weights
    last = {id(weight()) for forwards in lent.values() for weight in forwards[-1]}
    earlier = [
        weight() for forwards in lent.values() for weights in forwards[:-1] for weight in weights
    ]
    kept = [weight for weight in earlier if weight is not None and id(weight) not in last]
    assert len(earlier) > 0 == len(kept)
