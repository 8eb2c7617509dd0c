"""Tensors that outlive the forward which first needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def lasting_tensors() -> Iterator[None]:
    """Tensors made in this block are normal ones, whatever mode the running forward has.

    Generation and log-probabilities often run under ``torch.inference_mode``, and may come first. Tensors made there
    stay inference tensors: autograd saves none of them, and nobody writes to them outside that mode.
    """
    with torch.inference_mode(False), torch.no_grad():  # the first alone would switch gradients on
        yield
