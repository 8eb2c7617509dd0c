"""Application of autograd functions without functorch's overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``apply`` of a ``function`` that ``torch.func`` never transforms.

    ``Function.apply`` makes about five Python calls per argument to unwrap functorch's tensors,
    which takes longer than our functions. This is the base class's ``apply``.
    """
    return super(torch.autograd.Function, function).apply
