"""Routes become counts per expert. Oracle: literal counts, as Megatron routes the tokens."""

from __future__ import annotations

import pytest
import torch

from megatron_hecate.routes.known_routes import count_tokens

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_are_counted_as_megatron_routes_them(dtype: torch.dtype) -> None:
    """An expert named twice counts once; unknown experts (-1), and those that do not exist, are not counted."""
    known, unknown = [[0, 1], [1, 1], [3, 0]], [[-1, -1], [2, -1], [4, 9]]
    routes = torch.tensor(known, dtype=dtype)
    assert count_tokens(routes, 4).tolist() == [2, 2, 0, 1]
    assert routes.tolist() == known
    assert count_tokens(routes[:0], 4).tolist() == [0, 0, 0, 0]
    if dtype.is_signed:
        routes = torch.tensor([*known, *unknown], dtype=dtype)
        assert count_tokens(routes, 4).tolist() == [2, 2, 1, 1]
