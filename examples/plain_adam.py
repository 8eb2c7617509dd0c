"""Let Megatron's distributed optimizer load checkpoints in fp32, without apex and TE."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """apex's FusedAdam in plain torch: AdamW with ``step`` in the parameter group.

    Megatron's checkpoints expect ``step`` there. The arguments are apex's.
    """

    def __init__(  # noqa: PLR0913, the signature is apex's
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **ignored: Any,
    ) -> None:
        assert bias_correction and adam_w_mode, "only AdamW with bias correction"
        super().__init__(
            params,
            dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay),
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters with a gradient."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                grad = p.grad.float()
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                corrected = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                scale = corrected.sqrt_().add_(group["eps"])
                update = state["exp_avg"] / (1 - beta1 ** group["step"]) / scale
                p.add_(update + group["weight_decay"] * p, alpha=-group["lr"])


def load_without_grad() -> None:
    """Load the distributed optimizer's state under no_grad.

    In fp32 its main parameters are views of leaves, which it writes in place.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)


def use_plain_adam() -> None:
    """Make `FusedAdam` Megatron's Adam.

    The distributed optimizer cannot load a checkpoint with torch's own AdamW.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
