"""Allocation of tensors that outlive the forward that first needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def lasting_tensors() -> Iterator[None]:
    """Make normal tensors in this block, in any autograd mode of the running forward.

    Generation and log-probabilities often run under ``torch.inference_mode``, possibly before any
    training step. Tensors made in that mode stay inference tensors: autograd cannot save them, and
    they cannot be written outside that mode.
    """
    # `inference_mode(False)` alone would enable gradients
    with torch.inference_mode(False), torch.no_grad():
        yield
