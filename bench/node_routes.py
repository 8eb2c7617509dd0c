"""Routes for timing: popularities of experts that are skewed, drift and jump, equal for all models.

A router's logits become the logarithm of each expert's popularity plus Gumbel noise, so that a
token's top k are drawn without replacement. Popularities are of one layer and step; the noise is of
one rank, layer, step and microbatch. Whoever trains, the same step routes alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from loads import DATA, Trace
from torch import Tensor
from torch.nn import Module

# share of the logits that stays, so that gradients reach the router
KEPT: float = 1e-3
# tokens drawn to estimate how often an expert is among the top k
SAMPLED: int = 16384
# largest rank load over the mean up to which dealt experts count as even
EVEN: float = 1.05
RECORDED = DATA / "pysrc_e64k6_aux0.npz"
SEED: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Popularity:
    """Popularities of experts by step and layer.

    Args:
        experts: number of experts.
        top_k: experts per token.
        alpha: exponent of Zipf's law; 0 makes all experts equally popular.
        drift: standard deviation of a step's change of the logarithm.
        jump: steps after which other experts are popular; 0 for never.
        recorded: take popularities from the recording `RECORDED` instead.
    """

    experts: int
    top_k: int
    alpha: float = 0.8
    drift: float = 0.1
    jump: int = 0
    recorded: bool = False

    def logarithms(self, layer: int, step: int) -> np.ndarray:
        """Return the logarithm of each expert's popularity, [E], up to a constant."""
        if self.recorded:
            counts = _recorded_counts()
            if counts.shape[2] != self.experts:
                raise ValueError(
                    f"{RECORDED.name} has {counts.shape[2]} experts, the model {self.experts}"
                )
            return np.log(counts[step % len(counts), layer % counts.shape[1]] + 0.5)
        jumps = step // self.jump if self.jump else 0
        order = np.random.default_rng([SEED, layer, jumps]).permutation(self.experts)
        # Each step's change reaches into the next step, as in training.
        changes = [
            np.random.default_rng([SEED, layer, number + 1]).standard_normal(self.experts)
            for number in (step, step + 1)
        ]
        return -self.alpha * np.log1p(order) + self.drift * sum(changes) * (self.alpha > 0)

    def shares(self, logarithms: np.ndarray) -> np.ndarray:
        """Estimate the share of (token, expert) pairs of each expert, [E]."""
        noise = np.random.default_rng(SEED).gumbel(size=(SAMPLED, self.experts))
        chosen = np.argpartition(-(logarithms + noise), self.top_k - 1, axis=1)[:, : self.top_k]
        return np.bincount(chosen.ravel(), minlength=self.experts) / chosen.size

    def deal(self, logarithms: np.ndarray, ranks: int) -> np.ndarray:
        """Deal the same popularities to ranks evenly, as the ideal has them.

        Pairs of experts are exchanged between the fullest rank and others while that helps. If
        ranks cannot be even, as with one expert each, all experts are equally popular.

        Returns:
            The logarithm of each expert's popularity, [E]; experts of a rank are neighbours.
        """
        shares = self.shares(logarithms)
        # By turns in descending order, as a start.
        order = np.argsort(-shares, kind="stable").reshape(-1, ranks).T.copy()
        while True:
            loads = shares[order].sum(axis=1)
            fullest = int(np.argmax(loads))
            # tokens that leave the fullest rank, by its expert, other rank and other expert
            moved = shares[order[fullest]][:, None, None] - shares[order][None]
            larger = np.maximum(loads[fullest] - moved, loads[None, :, None] + moved)
            larger[:, fullest] = np.inf
            mine, rank, theirs = np.unravel_index(np.argmin(larger), larger.shape)
            if larger[mine, rank, theirs] >= loads[fullest]:
                break
            order[fullest, mine], order[rank, theirs] = order[rank, theirs], order[fullest, mine]
        if imbalance(loads) > EVEN:
            return np.zeros(self.experts)
        return logarithms[order.ravel()]


@functools.cache
def _recorded_counts() -> np.ndarray:
    """Return the recording's (token, expert) pairs by step, layer and expert, [T, L, E]."""
    return Trace.read(RECORDED).counts.sum(axis=2)


def imbalance(loads: Sequence[float] | np.ndarray) -> float:
    """Return the largest load over the mean."""
    return float(np.max(loads) / np.mean(loads))


class LayerRoutes:
    """Routes of one MoE layer of one model; replaces the gating of its router.

    Drawn logits of all microbatches lie at a fixed address, and the microbatch is counted on the
    device, so that a CUDA graph can hold the gating.

    Args:
        router: Megatron's router.
        layer: index of the layer, the same in all models.
        rank: rank of the job.
    """

    def __init__(self, router: Module, layer: int, *, rank: int) -> None:
        self.layer = layer
        self.rank = rank
        self.microbatch = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.drawn = torch.empty(0, device="cuda")
        gating = router.gating

        def replaced(hidden: Tensor) -> Tensor:
            logits = gating(hidden)
            drawn = self.drawn.index_select(0, self.microbatch).view(logits.shape)
            self.microbatch.add_(1)
            return logits * KEPT + drawn.to(logits.dtype)

        router.gating = replaced

    def begin_step(
        self, step: int, logarithms: np.ndarray, *, tokens: int, microbatches: int
    ) -> None:
        """Draw the step's logits.

        Args:
            step: index of the step.
            logarithms: logarithm of each expert's popularity, [E].
            tokens: tokens of a rank and microbatch.
            microbatches: microbatches of the step.
        """
        device = self.microbatch.device
        generator = torch.Generator(device=device)
        generator.manual_seed(((step * 64 + self.layer) * 1024 + self.rank) * 8 + SEED)
        size = (microbatches, tokens, len(logarithms))
        noise = torch.rand(size, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
        drawn = noise.log_().neg_().log_().neg_()
        drawn += torch.as_tensor(logarithms, dtype=torch.float32, device=device)
        if self.drawn.shape == drawn.shape:
            self.drawn.copy_(drawn)
        else:
            self.drawn = drawn
        self.microbatch.zero_()

    def loads(self, top_k: int, ranks: int, *, group: torch.distributed.ProcessGroup) -> np.ndarray:
        """Count the pairs that the drawn step routes to each rank's homes, over all ranks: [R]."""
        counts = torch.zeros(self.drawn.shape[2], device=self.drawn.device)
        for drawn in self.drawn:
            chosen = drawn.topk(top_k, dim=1).indices.reshape(-1)
            counts += torch.bincount(chosen, minlength=len(counts))
        torch.distributed.all_reduce(counts, group=group)
        return counts.reshape(ranks, -1).sum(dim=1).cpu().numpy()
