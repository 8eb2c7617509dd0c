"""Routes become counts per expert, whatever holds them, and without a copy of them all.

Oracle: literal counts, and a count token by token in Python; for memory, what the process held at most.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from host_memory import peak_growth

from megatron_hecate.routes.route_counts import Routes, count_tokens, parts_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.fast


def _count(routes: Routes, experts: int) -> list[int]:
    return count_tokens(parts_of(routes), experts, CPU).tolist()


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint16", "int32", "int64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_tokens_are_counted_as_megatron_routes_them(library: str, kind: str) -> None:
    """Literal counts: an expert named twice counts once, an unknown one (-1) not; the last number counts routes to
    experts that do not exist."""
    known, unknown = [[0, 1], [1, 1], [3, 0]], [[-1, -1], [2, -1], [4, 9]]
    make = np.array if library == "numpy" else torch.tensor
    dtype = getattr(np if library == "numpy" else torch, kind)
    assert _count(make(known, dtype=dtype), 4) == [2, 2, 0, 1, 0]
    assert _count(make(known, dtype=dtype).reshape(1, 3, 2), 4) == [2, 2, 0, 1, 0]
    assert _count(make(np.empty((0, 2)), dtype=dtype), 4) == [0, 0, 0, 0, 0]
    if not kind.startswith("u"):
        assert _count(make([*known, *unknown], dtype=dtype), 4) == [2, 2, 1, 1, 2]


def test_a_view_of_one_layer_and_a_file_are_counted_like_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 8 tokens, the last one shorter."""
    monkeypatch.setattr("megatron_hecate.routes.route_counts.PART", 16)
    routes = np.random.default_rng(0).integers(-1, 6, (21, 3, 2), dtype=np.int16)
    np.save(tmp_path / "routes.npy", routes)
    of_file = np.load(tmp_path / "routes.npy", mmap_mode="r")
    for layer in range(3):
        expected = [0] * 7
        for token in routes[:, layer].tolist():
            for expert in set(token) - {-1}:
                expected[expert] += 1
        assert sum(expected) > 0
        assert _count(routes[:, layer], 6) == expected
        assert _count(torch.from_numpy(routes)[:, layer], 6) == expected
        assert _count(of_file[:, layer], 6) == expected


def test_memory_while_counting_does_not_grow_with_the_routes() -> None:
    """Routes of 16 MiB as int16, 64 MiB as int64. Counting them takes less than the former, and no more with
    all layers than with a quarter of them."""
    routes = np.random.default_rng(0).integers(0, 256, (131072, 8, 8), dtype=np.int16)

    def count(layers: int) -> None:
        for layer in range(layers):
            _count(routes[:, layer], 256)

    count(1)  # the allocator's own memory
    growth = {layers: peak_growth(lambda n=layers: count(n)) for layers in (2, 8)}
    assert max(growth.values()) < 12 << 20 < routes.nbytes == 16 << 20, growth
    assert peak_growth(lambda: routes.astype(np.int64)) > 60 << 20, "a copy would be seen"
