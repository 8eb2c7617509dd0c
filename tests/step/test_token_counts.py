"""Tokens of single microbatches. Oracle: brute force over the microbatches of all ranks in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hecate.step.token_counts import MOST, TokenCounts

pytestmark = pytest.mark.fast
RANKS = 8
EXPERTS = 64
TOP_K = 2
TOKENS = 512


def _routed(rng: np.random.Generator, share: np.ndarray) -> np.ndarray:
    """Choose `TOP_K` experts of each token, [tokens, TOP_K]."""
    # The largest of logits with Gumbel noise are a sample without replacement.
    noisy = np.log(share) + rng.gumbel(size=(TOKENS, EXPERTS))
    return np.argsort(-noisy, axis=1)[:, :TOP_K].copy()


@pytest.mark.parametrize("as_map", [True, False], ids=["map", "index"])
def test_the_fullest_rank_of_each_microbatch(as_map: bool) -> None:
    """Eight ranks, four microbatches, two layers, two iterations: each microbatch has its own hot experts."""
    rng = np.random.default_rng(5)
    ranks = [
        TokenCounts([EXPERTS] * 2, RANKS, microbatches=4, device=torch.device("cpu"))
        for _ in range(RANKS)
    ]
    for _ in range(2):
        every = np.zeros((4, 2, EXPERTS), dtype=np.int64)
        for microbatch in range(4):
            for layer in range(2):
                share = rng.dirichlet(np.full(EXPERTS, 6.0))
                for rank in ranks:
                    chosen = torch.from_numpy(_routed(rng, share))
                    for expert in chosen.flatten().tolist():
                        every[microbatch, layer, expert] += 1
                    if as_map:
                        chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(
                            1, chosen, True
                        )
                    rank.of_layer(layer).add(chosen)
        load, peak = ranks[0].split(sum(rank.take() for rank in ranks).numpy())
        assert (load == every.sum(axis=0)).all()
        of_ranks = every.reshape(4, 2, RANKS, -1).sum(axis=3)
        for layer in range(2):
            assert peak[layer] == sum(max(of_ranks[m, layer].tolist()) for m in range(4))
        summed = of_ranks.sum(axis=0)
        mean = summed.mean(axis=1)
        # Each microbatch is clearly less even than their sum.
        assert (peak / mean - 1 > 1.15 * (summed.max(axis=1) / mean - 1)).all()


def test_layers_of_different_size_and_more_microbatches_than_are_distinguished() -> None:
    counts = TokenCounts([4, 8], 2, microbatches=None, device=torch.device("cpu"))
    for turn in range(MOST + 1):
        counts.of_layer(0).add(torch.tensor([[0], [3], [3], [-1]]))
        # The hot rank alternates, so that only sums of microbatches are even.
        counts.of_layer(1).add(torch.tensor([[7 * (turn % 2)]]))
    load, peak = counts.split(counts.take().numpy())
    num = MOST + 1
    assert load.tolist() == [
        [num, 0, 0, 2 * num, 0, 0, 0, 0],
        [MOST // 2 + 1, 0, 0, 0, 0, 0, 0, MOST // 2],
    ]
    assert peak.tolist() == [2 * num, num]
    assert not counts.take().any()
