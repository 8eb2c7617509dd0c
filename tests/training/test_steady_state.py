"""Memory in the steady state: buffers are allocated once. Oracle: the unconverted model on the same ranks and data."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from quick import quick
from ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

# Shapes that only expert weights have: at most 24 tokens reach an expert
WIDTH, TOKENS = 60, 12
SHAPES = {(2 * WIDTH, 32), (32, WIDTH)}
CHUNK = sum(a * b for a, b in SHAPES)


def _expert_sized(tensor: Any) -> bool:
    return (
        tuple(tensor.shape) in SHAPES
        or tuple(tensor.shape)[::-1] in SHAPES
        or tensor.numel() >= CHUNK
    )


class _Allocations(TorchDispatchMode):
    """Counts tensors of the size of an expert's parameter, or larger than an expert, that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = out if isinstance(out, (tuple, list)) else (out,)
        for value, what in zip(returned, func._schema.returns, strict=False):
            if isinstance(value, torch.Tensor) and what.alias_info is None and _expert_sized(value):
                self.made.append(f"{func} {tuple(value.shape)}")
        return out


@pytest.mark.parametrize("lifetime", quick(["iteration", "layer"], ["iteration"]))
@ranks(2)
def test_steps_allocate_nothing_for_replicas(lifetime: str) -> None:
    """But for what autograd makes itself: a replica's weight gradients, as for any expert that computes."""
    import tiny_gpt

    settings = (("num_layers", 4), ("moe_ffn_hidden_size", WIDTH))
    case = tiny_gpt.initialized(accumulate=2, micro_batch=1, seq=TOKENS, settings=settings)

    def count(run: Any, step: int) -> list[str]:
        with _Allocations() as allocations:
            run.step(step)
        return allocations.made

    stock = tiny_gpt.train(case, steps=3)
    ours = tiny_gpt.train(case, steps=3, hook=tiny_gpt.fssdp_hook(lifetime=lifetime))
    states = [layer.fssdp for layer in tiny_gpt.moe_layers(ours.chunks)]
    alive = []
    for step in range(3, 5):
        theirs, made = count(stock, step), count(ours, step)
        hosted = [
            0 if state.current.transfers is None else len(state.current.transfers.slots)
            for state in states
        ]
        gradients = case.accumulate * len(SHAPES) * sum(hosted)
        assert len(made) == len(theirs) + gradients, (
            lifetime,
            sorted(set(made)),
            len(theirs),
            hosted,
        )
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and _expert_sized(o)]
        alive.append(len({t.untyped_storage().data_ptr() for t in tensors}))
        del tensors
    assert max(alive[1:]) <= alive[0], f"{lifetime}: expert-sized tensors pile up: {alive}"
    assert ours.replicas > 0
