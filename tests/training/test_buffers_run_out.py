"""Lifetime ``microbatch`` where more forwards wait for a backward than it has buffers: the error, and its ways out.

Oracle: the same loop on the stock model.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from ranks import ranks


@ranks(2)
def test_the_ways_out_that_are_named_work_in_the_same_loop() -> None:
    """Both forwards first, then both backwards; and a forward whose backward never comes."""
    import tiny_gpt
    import torch

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)

    def forward(chunks: list, step: int, index: int) -> torch.Tensor:
        data = iter([tiny_gpt.batch(case, step, index)])
        output, loss = tiny_gpt.forward_step(data, chunks[0], case=case)
        return loss(output)[0]

    def both_forwards_first(chunks: list, step: int) -> float:
        losses = [forward(chunks, step, index) for index in range(2)]
        for loss in reversed(losses):
            loss.backward()
        return float(sum(losses))

    def one_more(chunks: list, step: int, *, gradients: bool = True) -> float:
        with torch.set_grad_enabled(gradients):
            kept = forward(chunks, step + 50, 0)
        total = float(kept)
        for index in range(2):
            loss = forward(chunks, step, index)
            loss.backward()
            total += float(loss)
        return total

    def without_gradients(chunks: list, step: int) -> float:
        return one_more(chunks, step, gradients=False)

    def train(loop: Callable[[list, int], float], lifetime: str | None) -> list[float]:
        hook = None if lifetime is None else tiny_gpt.fssdp_hook(lifetime=lifetime)
        chunks, config = tiny_gpt.build(case, hook)
        chunks, optimizer = tiny_gpt.wrap(case, chunks, config)
        losses = []
        for step in range(3):
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(loop(chunks, step))
            chunks[0].finish_grad_sync()
            optimizer.step()
        return losses

    ways = r"use --moe-fssdp-lifetime (\w+), and run forwards without a backward under torch\.(no_grad)\(\)"
    for loop in (both_forwards_first, one_more):
        stock = train(loop, None)
        with pytest.raises(
            RuntimeError, match="layer 1: all 2 buffers hold replicas of microbatches"
        ) as error:
            train(loop, "microbatch")
        lifetime, no_grad = re.search(ways, str(error.value)).groups()
        assert train(loop, lifetime) == pytest.approx(stock, rel=1e-5), loop.__name__
    assert no_grad == "no_grad"
    for lifetime in ("microbatch", "iteration"):
        assert train(without_gradients, lifetime) == pytest.approx(stock, rel=1e-5), lifetime
