"""Optimizers of apex and TransformerEngine, on ranks without a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

BF16 = dict(bf16=True, distributed_optimizer=True, grad_reduce_in_fp32=False)

PRECISION_AWARE = dict(
    use_precision_aware_optimizer=True, main_grads_dtype="bfloat16", exp_avg_dtype="bfloat16"
)


def packages(name: str) -> str | None:
    """What ranks start with."""
    return "te" if name.startswith("te-") else "megatron"


def install(name: str) -> None:
    """What the optimizer of this name needs, before Megatron is imported."""
    if name.startswith("te-"):
        import adam_on_cpu
        import te_on_cpu
        import tex_on_cpu

        tex_on_cpu.FUNCTIONS.update(adam_on_cpu.FUNCTIONS)
        te_on_cpu.install()
    import tiny_gpt  # noqa: F401
    import torch
    from megatron.core import optimizer

    if name.startswith("te-"):
        from transformer_engine.pytorch.optimizers import FusedAdam

        optimizer.Adam = FusedAdam
    elif name.startswith("torch-"):
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    elif name == "cpu-offload":
        _offload_from_cpu(optimizer.HybridDeviceOptimizer)


def _offload_from_cpu(hybrid: type) -> None:
    """It tells what is on the host by ``is_cuda``: let all be on a GPU but what it has pinned."""
    import torch

    split = hybrid._get_sub_optimizer_param_groups
    clone, as_fp32 = torch.Tensor.clone, torch.Tensor.float

    def split_as_on_gpu(optimizer: Any, fraction: float) -> tuple:
        on_host: dict[int, torch.Tensor] = {}  # by address, which stays theirs while they are here

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            return on_host.setdefault(tensor.data_ptr(), tensor)

        def like(source: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
            return pin(made) if source.data_ptr() in on_host else made

        on_tensors = dict(
            is_cuda=property(lambda tensor: tensor.data_ptr() not in on_host),
            pin_memory=pin,
            clone=lambda tensor: like(tensor, clone(tensor)),
            float=lambda tensor: like(tensor, as_fp32(tensor)),
        )
        with mock.patch.multiple(torch.Tensor, create=True, **on_tensors):
            groups = split(optimizer, fraction)
        assert groups[0] and groups[1], "some parameters must be on the host and some on the device"
        return groups

    hybrid._get_sub_optimizer_param_groups = split_as_on_gpu
