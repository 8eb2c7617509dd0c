"""Count of the tokens that replicas compute, in models that frameworks and scripts build."""

from __future__ import annotations

import torch


class ReplicaTokens:
    """Numbers of tokens that experts of this rank compute in training."""

    def __init__(self) -> None:
        self.all = self.of_replicas = 0
        torch.nn.modules.module.register_module_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, arguments: tuple) -> None:
        from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

        if isinstance(module, SequentialMLP | TEGroupedMLP) and module.training:
            counts = torch.as_tensor(arguments[1]).reshape(-1)
            self.all += int(counts.sum())
            self.of_replicas += int(counts[module.num_local_experts :].sum())
