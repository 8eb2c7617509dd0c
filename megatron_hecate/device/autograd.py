"""Autograd's modes and functions, as code needs them that runs inside a forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def lasting_tensors() -> Iterator[None]:
    """Make normal tensors in this block, which may outlive the running forward and its mode.

    Generation and log-probabilities often run under ``torch.inference_mode``, possibly before any
    training step. Tensors made in that mode stay inference tensors: autograd cannot save them, and
    they cannot be written outside that mode.
    """
    # `inference_mode(False)` alone would enable gradients
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph."""
    # Without a driver torch raises.
    with contextlib.suppress(RuntimeError):
        return torch.cuda.is_current_stream_capturing()
    return False


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``apply`` of a ``function`` that ``torch.func`` never transforms.

    ``Function.apply`` makes about five Python calls per argument to unwrap functorch's tensors,
    which takes longer than our functions. This is the base class's ``apply``.
    """
    return super(torch.autograd.Function, function).apply
