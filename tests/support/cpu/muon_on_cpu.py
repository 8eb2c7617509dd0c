"""A stand-in for the package ``emerging_optimizers``, which Megatron's Muon is built on and which no registry has.

It has the names and parameters that megatron-core imports, and Muon's arithmetic: momentum, Nesterov, decoupled weight
decay, Newton-Schulz. `install` must run before Megatron is imported. What it cannot show is the package's own code.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # of Muon's publication
# One module has the names of all
MODULES = " .registry .orthogonalized_optimizers .orthogonalized_optimizers.muon_utils .scalar_optimizers .soap"


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """``x``: [M, N] in fp32, with the singular values pushed towards 1; the singular vectors stay."""
    wide = x.size(0) <= x.size(1)
    y = (x if wide else x.mT) / x.norm().clamp_min(1e-15)
    a, b, c = QUINTIC
    for _ in range(steps):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return y if wide else y.mT


def newton_schulz_tp(
    x: Tensor, steps: int, coefficient_type: str, *, partition_dim: None = None, **_: Any
) -> Tensor:
    assert coefficient_type == "quintic" and partition_dim is None, "no shards nor other sets here"
    return newton_schulz(x, steps)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, then ``orthogonalize``, then the step. As the package's class it calls no ``step`` of torch's."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        weight_decay: float,
        *,
        nesterov: bool,
        weight_decay_method: str,
        scaled_orthogonalize_fn: Callable,
        **_: Any,
    ) -> None:
        assert weight_decay_method == "decoupled"
        self.nesterov, self.scaled_orthogonalize_fn = nesterov, scaled_orthogonalize_fn
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                momentum.lerp_(p.grad, 1 - group["momentum"])
                grad = p.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum
                p.add_(self.orthogonalize(p, grad), alpha=-group["lr"])


class _Absent(torch.optim.Optimizer):
    """Other optimizers of the package, which Megatron imports with it."""


def install() -> None:
    """Make the names importable, as version 0.2."""
    assert "megatron.core" not in sys.modules, "it has looked for them: @ranks(preload=None)"
    module = types.ModuleType("emerging_optimizers")
    for name in ("AdaptiveMuon", "Lion", "SOAP"):
        setattr(module, name, _Absent)
    module.NSCoeffT, module.newton_schulz_tp = Literal["quintic"], newton_schulz_tp
    module.OrthogonalizedOptimizer = OrthogonalizedOptimizer
    # "spectral"
    module.get_muon_scale_factor = lambda rows, columns, mode: max(rows, columns) ** 0.5
    module.get_optimizer_name_list, module.get_optimizer_cls = list, None
    module.registry, module.__path__ = module, []
    for name in MODULES.split(" "):
        sys.modules[f"emerging_optimizers{name}"] = module
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "0.2.0" if name == "emerging-optimizers" else version(name)
    )
