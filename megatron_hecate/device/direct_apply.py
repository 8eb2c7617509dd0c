"""Application of autograd functions without what functorch adds to it."""

from __future__ import annotations

from typing import Any

import torch


def apply_directly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply ``function`` to ``args``; for functions that are never transformed by ``torch.func``.

    ``Function.apply`` makes about five calls of Python for each argument, to unwrap tensors of functorch: more than our
    functions do themselves. This is the base class's own.
    """
    return super(torch.autograd.Function, function).apply(*args)
