"""Stand-in in plain torch for apex's extension behind Megatron's gradient-accumulation fusion."""

from __future__ import annotations

import importlib.util
import sys
import types

from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def _accumulate(inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add the weight gradient to ``main_grad`` in place."""
    main_grad.add_(grad.t().matmul(inputs).to(main_grad.dtype))


def use_plain_wgrad() -> types.ModuleType:
    """Make the extension importable where apex is not installed.

    Call this before the first import of megatron, which imports the extension.
    """
    if NAME not in sys.modules and importlib.util.find_spec(NAME) is None:
        module = types.ModuleType(NAME)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _accumulate
        sys.modules[NAME] = module
    return importlib.import_module(NAME)
