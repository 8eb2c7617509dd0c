"""What Megatron's distributed optimizer needs to load a checkpoint in fp32, and without apex and TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """apex's, in plain torch: AdamW; ``step`` lives in the parameter group, as Megatron's checkpoints expect."""

    def __init__(
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
                scale = (
                    (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                )
                update = state["exp_avg"] / (1 - beta1 ** group["step"]) / scale
                p.add_(update + group["weight_decay"] * p, alpha=-group["lr"])


def load_without_grad() -> None:
    """Have the distributed optimizer load in fp32: it writes into views of leaves outside of no_grad."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)


def use_plain_adam() -> None:
    """Have Megatron use `FusedAdam`: the distributed optimizer cannot load a checkpoint with torch's own AdamW."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
