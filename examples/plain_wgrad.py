"""apex's extension behind Megatron's gradient-accumulation fusion, in plain torch: where apex is not installed."""

from __future__ import annotations

import importlib.util
import sys
import types

from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def _accumulate(inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(grad.t().matmul(inputs).to(main_grad.dtype))


def use_plain_wgrad() -> types.ModuleType:
    """Make the extension importable. Call before the first import of megatron, which looks for it then."""
    if NAME not in sys.modules and importlib.util.find_spec(NAME) is None:
        module = types.ModuleType(NAME)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _accumulate
        sys.modules[NAME] = module
    return importlib.import_module(NAME)
