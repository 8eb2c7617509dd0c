"""Application of autograd functions without functorch's overhead."""

from __future__ import annotations

from typing import Any

import torch


def apply_directly(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply ``function`` to ``args``; only for functions that ``torch.func`` never transforms.

    ``Function.apply`` makes about five Python calls per argument to unwrap functorch's tensors,
    which takes longer than our functions. This calls the base class's ``apply`` directly.
    """
    return super(torch.autograd.Function, function).apply(*args)
