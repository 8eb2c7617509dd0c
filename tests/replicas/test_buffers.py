"""Buffers of replicas: how large they are, who has which, what their chunks are. Oracle: numbers computed by hand.

``test_random_schedules`` checks who owns which buffer when.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.replicas import buffers
from megatron_hecate.replicas.buffers import Buffer, BufferPool, BufferSizes

pytestmark = pytest.mark.fast

SMALL = LayerBuffer(
    slots=2, elements=100, dtype=torch.bfloat16, homes=3
)  # a chunk: 200 bytes of weights, 400 of grads
LARGE = LayerBuffer(slots=2, elements=65, dtype=torch.float32, homes=3)  # 260 and 260
NONE = LayerBuffer(slots=0, elements=100, dtype=torch.float32, homes=3)
DOUBLE = LayerBuffer(slots=1, elements=64, dtype=torch.float64, homes=3)


@pytest.mark.parametrize(
    ("layers", "lifetime", "sizes"),
    [
        ([SMALL, LARGE], "iteration", BufferSizes((512, 1024), (1024, 1024))),
        ([SMALL, LARGE, SMALL], "layer", BufferSizes((512, 1024), (1024, 1024))),
        ([SMALL], "layer", BufferSizes((512,), (1024,))),
        ([NONE] * 3, "iteration", BufferSizes((), ())),
        ([DOUBLE], "iteration", BufferSizes((512,), (512,))),
    ],
)
def test_buffers_are_so_large(layers: list[LayerBuffer], lifetime: str, sizes: BufferSizes) -> None:
    assert BufferSizes.plan(layers, lifetime) == sizes
    assert sizes.total == sum(sizes.weights) + sum(sizes.grads)


def test_zeros_are_not_trusted_in_another_iteration() -> None:
    """A memory saver may have dropped them between two iterations. Within one they are trusted."""
    device = torch.device("cpu")
    pool = BufferPool(P2P(SimpleNamespace(), timeout=30), [SMALL], "iteration", device=device)
    buffer = pool.grads(0)
    buffer.begin_sums(from_zero=True)
    first, second = buffer.chunks(SMALL, torch.float32)
    first.fill_(1)
    buffer.zero_after_transfer([first])
    second.fill_(7)
    buffer.begin_sums(from_zero=True)
    assert not first.any() and second.eq(7).all()
    buffer.zero_after_transfer([first])
    second.fill_(7)
    pool.reset("DDP reduced gradients")
    buffer.begin_sums(from_zero=True)
    assert not first.any() and not second.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_development_mode_poisons_what_is_dropped(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "sys", SimpleNamespace(flags=SimpleNamespace(dev_mode=True)))
    buffer = Buffer(torch.zeros(1024, dtype=torch.uint8))
    chunks = buffer.chunks(SMALL, dtype)
    assert len(chunks) == 2 and not any(c.isnan().any() for c in chunks)
    buffer.hold("somebody")
    assert all(c.isnan().all() for c in chunks)
