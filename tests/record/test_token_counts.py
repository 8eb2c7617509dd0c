"""Tokens of single microbatches, by hand. `test_observe` counts those of training."""

from __future__ import annotations

import pytest
import torch

from megatron_hecate.record.token_counts import TokenCounts, over_mean, sum_fullest

pytestmark = pytest.mark.fast


def test_layers_of_different_size_and_more_microbatches_than_are_distinguished() -> None:
    counts = TokenCounts([4, 8], 2, torch.device("cpu"))
    most = counts.distinguished
    for turn in range(most + 1):
        counts.add(0, torch.tensor([[0], [3], [3], [-1]]))
        # The hot rank alternates, so that only sums of microbatches are even.
        counts.add(1, torch.tensor([[7 * (turn % 2)]]))
    load, ranks, _ = counts.split(counts.take().numpy())
    num = most + 1
    assert load.tolist() == [
        [num, 0, 0, 2 * num, 0, 0, 0, 0],
        [most // 2 + 1, 0, 0, 0, 0, 0, 0, most // 2],
    ]
    assert sum_fullest(ranks).tolist() == [2 * num, num]
    # 2 of 3 tokens, and all, on one of two ranks; two microbatches in one are more even.
    assert over_mean(ranks)[1:].tolist() == [[pytest.approx(4 / 3), 2.0]] * (most - 1)
    assert over_mean(ranks)[0].tolist() == [pytest.approx(4 / 3), 2.0 if most % 2 == 0 else 1.0]
    assert not counts.take().any()
