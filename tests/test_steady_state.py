"""Memory in the steady state: slots are allocated once. Oracle: the unconverted model on the same ranks and data."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

# Shapes that only expert weights have: at most 24 tokens reach an expert
WIDTH, TOKENS = 60, 12
SHAPES = {(2 * WIDTH, 32), (32, WIDTH)}
CHUNK = sum(a * b for a, b in SHAPES)


def _expert_sized(tensor: Any) -> bool:
    return tuple(tensor.shape) in SHAPES or tuple(tensor.shape)[::-1] in SHAPES or tensor.numel() >= CHUNK


class _Allocations(TorchDispatchMode):
    """Counts tensors of the size of an expert's parameter, or larger than an expert, that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = out if isinstance(out, (tuple, list)) else (out,)
        for value, what in zip(returned, func._schema.returns, strict=False):
            if isinstance(value, torch.Tensor) and what.alias_info is None and _expert_sized(value):
                self.made.append(f"{func} {tuple(value.shape)}")
        return out


@pytest.mark.parametrize("lifetime", ["iteration", "microbatch", "layer"])
@ranks(2, timeout=240)
def test_steps_allocate_nothing_for_guests(lifetime: str) -> None:
    """But for what autograd makes itself: a guest's weight gradients, as for any expert that computes."""
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp

    settings = (("num_layers", 4), ("moe_ffn_hidden_size", WIDTH))
    case = tiny_gpt.Case(accumulate=2, micro_batch=1, seq=TOKENS, settings=settings)
    tiny_gpt.initialize(case)

    def count(run: Any, step: int) -> list[str]:
        with _Allocations() as allocations:
            run.step(step)
        return allocations.made

    stock = tiny_gpt.train(case, steps=3)
    ours = tiny_gpt.train(
        case, steps=3, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=2, lifetime=lifetime, timeout=60))
    )
    layers = tiny_gpt.moe_layers(ours.chunks)
    memory = layers[0].fssdp.model.memory()
    alive = []
    for step in range(3, 7):
        theirs, made = count(stock, step), count(ours, step)
        hosted = [state.guests.num_guests if state.guests else 0 for state in (layer.fssdp for layer in layers)]
        gradients = case.accumulate * len(SHAPES) * sum(hosted)
        assert len(made) == len(theirs) + gradients, (sorted(set(made)), len(made), len(theirs), hosted)
        assert layers[0].fssdp.model.memory() is memory, "the arena was made anew"
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and _expert_sized(o)]
        alive.append(len({t.untyped_storage().data_ptr() for t in tensors}))
        del tensors
    assert max(alive[1:]) <= alive[0], f"expert-sized tensors pile up: {alive}"
    assert len(layers[0].fssdp.model.guests) <= len(layers) * case.accumulate
    assert ours.guests > 0
