"""Tokens per expert and microbatch of MoE layers, on this rank.

All buffers keep their addresses, and `TokenCounts.add` does not need the host, so that CUDA graphs
can hold the counting. Letters in shapes: M microbatches that are distinguished, L layers, E
experts, N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.megatron.training_state import num_microbatches

# Microbatches that are distinguished, at least and at most. More microbatches share the counts of
# earlier ones: the largest rank load of each is then underestimated.
LEAST: int = 8
MOST: int = 64


class TokenCounts:
    """Counts of all layers.

    Args:
        experts: number of experts of each layer, [L].
        ranks: N, size of the expert-parallel group.
        device: device of the buffers.
    """

    def __init__(self, experts: Sequence[int], ranks: int, device: torch.device) -> None:
        num_layers = len(experts)
        num_experts = max(experts)
        # Twice the number, for layers that run twice per microbatch and for growing batches.
        distinguished = min(MOST, max(LEAST, 2 * (num_microbatches() or MOST)))
        self._experts = experts
        self._counts = torch.zeros(
            (distinguished, num_layers, num_experts), dtype=torch.int64, device=device
        )
        # Microbatch that each layer counts next, one-hot, [L, M].
        self._running = torch.zeros((num_layers, distinguished), dtype=torch.int64, device=device)
        self._running[:, 0].fill_(1)
        # Microbatches of each layer that `next_of` has begun, [L].
        self._begun = [0] * num_layers
        # Home rank of each expert, [L, E]; experts that a layer lacks have no tokens.
        homes = torch.zeros((num_layers, num_experts), dtype=torch.int64)
        for layer, layer_experts in enumerate(experts):
            homes[layer, :layer_experts] = torch.arange(layer_experts) // (layer_experts // ranks)
        self._homes = homes.to(device).expand_as(self._counts)
        self._rank_shape = (distinguished, num_layers, ranks)
        # Largest rank loads that quotas have noted, [L, 2], see `QuotaTables.noted`; equal on all
        # ranks. The owner resets them.
        self.noted = torch.zeros((num_layers, 2), dtype=torch.int64, device=device)

    def add(self, layer: int, routes: Tensor) -> None:
        """Count one forward of a layer's router, as one microbatch.

        Args:
            layer: index of the layer.
            routes: routing map, [..., E] bool, or index of the expert of each choice, negative
                where dropped.
        """
        counts = self._counts[:, layer, : self._experts[layer]]
        running = self._running[layer]
        if routes.dtype is torch.bool:
            tokens = routes.view(-1, routes.shape[-1]).sum(dim=0)
        else:
            routes = routes.reshape(-1).long()
            tokens = torch.zeros_like(counts[0])
            tokens.scatter_add_(0, routes.clamp(min=0), (routes >= 0).long())
        counts.addcmul_(running[:, None], tokens)
        running.copy_(running.roll(1))

    @property
    def distinguished(self) -> int:
        """Number of microbatches that are distinguished, M."""
        return len(self._counts)

    def next_of(self, layer: int) -> Tensor:
        """Return the counts of a layer's next microbatch, [E], for a kernel to add to.

        The host chooses the microbatch, in contrast to `add`, so a CUDA graph that holds the
        addition must hold all microbatches.
        """
        self._begun[layer] += 1
        return self._counts[self.microbatch(layer), layer]

    def microbatch(self, layer: int) -> int:
        """Return the number, below M, of the microbatch that `next_of` has begun last."""
        return (self._begun[layer] - 1) % len(self._counts)

    def take(self) -> Tensor:
        """Return the counts of the iteration, to be summed over the group, and reset them.

        Returns:
            One vector of tokens by layer and expert, [L, E], tokens by microbatch, layer and home
            rank, [M, L, N], and `noted`, [L, 2].
        """
        ranks = self._counts.new_zeros(self._rank_shape)
        ranks.scatter_add_(2, self._homes, self._counts)
        parts = [self._counts.sum(dim=0), ranks, self.noted]
        sums = torch.cat([part.flatten() for part in parts])
        self._counts.zero_()
        self._running.zero_()
        self._running[:, 0].fill_(1)
        self._begun = [0] * len(self._begun)
        return sums

    def split(self, total: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Split the sum over the group of vectors of `take`.

        Returns:
            Tokens by layer and expert, [L, E], and the results of `split_homes`.
        """
        num_layers, experts = self._counts.shape[1:]
        load = total[: num_layers * experts].reshape(num_layers, experts)
        return load, *self.split_homes(total[num_layers * experts :])

    def split_homes(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Split what follows the tokens of experts in the sum of `take`.

        Returns:
            Tokens by microbatch, layer and home rank, [M, L, N], and the sum of `noted`, [L, 2].
        """
        ranks = sums[: math.prod(self._rank_shape)].reshape(self._rank_shape)
        return ranks, sums[ranks.size :].reshape(self.noted.shape)


def sum_fullest(ranks: np.ndarray) -> np.ndarray:
    """Sum the tokens of the fullest rank of each microbatch, [L], over ``ranks`` [M, L, N]."""
    return ranks.max(axis=2).sum(axis=0)


def over_mean(ranks: np.ndarray) -> np.ndarray:
    """Divide the tokens of the fullest of ``ranks`` [..., N] by their mean; 0 without tokens."""
    mean = ranks.mean(axis=-1)
    return np.divide(ranks.max(axis=-1), mean, out=np.zeros_like(mean), where=mean > 0)
