"""Token counts of the all-to-all, which the quotas give without a gather.

Oracle: Megatron's own ``preprocess``, which sums the routing map and gathers the sums, in every forward with replicas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import FULL
from ranks import ranks

KNOWN = (
    "num_out_tokens",
    "input_splits",
    "output_splits",
    "output_splits_tp",
    "num_global_tokens_per_local_expert",
)


def compare_counts(case: Any, *, expected: int) -> None:
    """Train three steps; every forward with replicas must set the values that Megatron's method sets."""
    import tiny_gpt
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_hecate.megatron.dispatcher import CountedAlltoAll

    tiny_gpt.initialize(case)
    ours = CountedAlltoAll.preprocess
    compared = 0

    def both(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        nonlocal compared
        is_known = self._known is not None
        counts = ours(self, routing_map)
        if not is_known:
            return counts
        found = {name: getattr(self, name) for name in KNOWN}
        wanted_counts = MoEAlltoAllTokenDispatcher.preprocess(self, routing_map)
        wanted = {name: getattr(self, name) for name in KNOWN}
        for name, value in {**wanted, "returned": wanted_counts}.items():
            mine = {**found, "returned": counts}[name]
            if not isinstance(value, torch.Tensor):
                assert mine == value, name
                continue
            assert mine.dtype is value.dtype and mine.is_contiguous(), name
            assert torch.equal(mine, value), name
        compared += 1
        return counts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedAlltoAll, "preprocess", both)
        trained = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert trained.replicas > 0 and compared >= expected, compared


@ranks(2)
def test_counts_are_those_of_megatron() -> None:
    """With a capacity, and computed again in the backward."""
    import tiny_gpt

    model = dict(FULL, moe_expert_capacity_factor=1.0)
    compare_counts(tiny_gpt.Case(skew=4.0, settings=model), expected=2)


@pytest.mark.slow
@ranks(4)
def test_counts_with_expert_tensor_parallelism() -> None:
    import tiny_gpt

    compare_counts(tiny_gpt.Case(ep=2, etp=2, tp=2, experts=4), expected=2)
