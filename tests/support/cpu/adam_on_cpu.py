"""The kernels of TransformerEngine's FusedAdam in plain torch, for `tex_on_cpu`.

TE's own Python calls them with lists of gradients, parameters, both moments and, where it keeps them, main parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, *rest: Any
) -> None:
    """Adam, or AdamW with ``adam_w``; ``rest`` is (beta2, eps, step, adam_w, bias_correction, weight_decay).

    ``lists`` may have a fifth list, of fp32 main parameters: these are updated, and parameters are copies of them.
    """
    beta2, eps, step, adam_w, bias_correction, weight_decay = rest
    for grad, p, m, v, *main in zip(*lists, strict=True):
        value = (main[0] if main else p).float()
        g = grad.float()
        if not adam_w:
            g = g + weight_decay * value
        m.copy_(beta1 * m.float() + (1 - beta1) * g)
        v.copy_(beta2 * v.float() + (1 - beta2) * g * g)
        correct1, correct2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        update = m.float() / correct1 / ((v.float() / correct2).sqrt() + eps)
        if adam_w:
            update = update + weight_decay * value
        value = value - lr * update
        p.copy_(value)
        if main:
            main[0].copy_(value)


def multi_tensor_adam_param_remainder(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], *settings: Any
) -> None:
    """The same where a main parameter is the parameter's 16 bits and an int16 that holds the bits below them."""
    for grad, p, m, v, remainder in zip(*lists, strict=True):
        main = join(p, remainder)
        multi_tensor_adam(chunk, noop, [[grad], [p], [m], [v], [main]], *settings)
        bits = main.view(torch.int32)
        # with its sign: the upper half was rounded up where it is negative
        low = (bits << 16) >> 16
        remainder.copy_(low)
        p.copy_((((bits - low) >> 16).to(torch.int16)).view(torch.bfloat16))


def join(p: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values of bf16 ``p`` and the int16 ``remainder`` below it."""
    return ((p.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


FUNCTIONS = {
    "multi_tensor_adam": multi_tensor_adam,
    "multi_tensor_adam_param_remainder": multi_tensor_adam_param_remainder,
}
