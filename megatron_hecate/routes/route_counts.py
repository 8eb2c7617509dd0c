"""Tokens per expert, counted from routes a part at a time.

Routes of a step are large: 8 microbatches of 32,768 tokens in 58 layers with 8 experts per token
take 928 MiB as int64 and 232 MiB as int16. Their counts take 116 KiB with 256 experts. Routes are
therefore read where they lie and in their own dtype, `PART` numbers at a time; only the part being
counted is copied to the experts' device and widened to int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

# Experts of each token, [T, k] or [..., k], of any integer dtype, on any device, or mapped from a
# file. Below 0 where the expert is not known.
Routes = np.ndarray | Tensor

# Numbers in a part. Counting takes some 5 MiB of temporary memory.
PART: int = 1 << 17


def parts_of(routes: Routes, is_routed: Tensor | None = None) -> Iterator[Tensor]:
    """Split routes into parts of at most `PART` numbers, [t, k], in their own dtype.

    Args:
        routes: experts of each token, [T, k].
        is_routed: False for tokens whose routes are to be ignored, [T] bool, if any.

    Raises:
        ValueError: for floating-point numbers.
    """
    k = routes.shape[-1]
    if routes.ndim != 2:
        routes = routes.reshape(-1, k)
    rows = max(1, PART // max(1, k))
    for start in range(0, len(routes), rows):
        part = routes[start : start + rows]
        if not isinstance(part, Tensor):
            # A copy, because torch warns about arrays that are mapped read-only.
            part = torch.from_numpy(np.array(part))
        if part.is_floating_point():
            raise ValueError(f"routes are {part.dtype}; give the numbers of experts, as integers")
        if is_routed is not None:
            rows_known = is_routed[start : start + rows].to(part.device, torch.bool)
            part = part.long().masked_fill(~rows_known.unsqueeze(1), -1)
        yield part


def count_tokens(parts: Iterable[Tensor], experts: int, device: torch.device) -> Tensor:
    """Count tokens per expert, in the way of Megatron's routing map.

    Args:
        parts: experts of each token, [t, k] each; below 0 where the expert is not known.
        experts: number of experts E.
        device: device of the result, to which parts are copied one by one.

    Returns:
        Tokens per expert, and last the number of routes to experts from E on, [E + 1] int64.
    """
    # The first number counts unknown experts.
    counts = torch.zeros(experts + 2, dtype=torch.int64, device=device)
    one = counts.new_ones(())
    for part in parts:
        sorted_experts = part.to(device).long().sort(dim=1).values
        # A token that names an expert twice is routed to it once.
        repeated = sorted_experts[:, 1:] == sorted_experts[:, :-1]
        sorted_experts[:, 1:].masked_fill_(repeated, -1)
        index = sorted_experts.clamp_(-1, experts).add_(1).view(-1)
        counts.scatter_add_(0, index, one.expand(len(index)))
    return counts[1:]
