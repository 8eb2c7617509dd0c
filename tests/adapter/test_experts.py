"""Replicas in TEGroupedMLP and under gradient-accumulation fusion.

TransformerEngine needs a GPU to build its modules, so Megatron's own ``TEGroupedMLP`` runs here over a grouped linear
in plain torch with TransformerEngine's interface (``num_gemms``; ``weight0``, ``weight1``, ...; ``m_splits``).
Oracle: the same model without FSSDP. What this cannot show: TransformerEngine's own GEMMs; that waits for a GPU.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from ranks import ranks
from torch import Tensor


class TorchGroupedLinear(torch.nn.Module):
    """TransformerEngine's GroupedLinear, as far as TEGroupedMLP uses it."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, options["bias"]
        self.return_bias = options["skip_bias_add"]
        generator = torch.Generator().manual_seed(options["config"].hidden_size + output_size)
        for i in range(num_gemms):
            weight = torch.randn(output_size, input_size, generator=generator) * 0.05
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))
            if self.use_bias:
                bias = torch.randn(output_size, generator=generator) * 0.05
                self.register_parameter(f"bias{i}", torch.nn.Parameter(bias))
            else:
                setattr(self, f"bias{i}", torch.empty(0))  # TE keeps one for each GEMM
        for p in self.parameters():
            p.allreduce = False  # expert-parallel, as TE's wrapper marks it

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        assert len(m_splits) == self.num_gemms, (len(m_splits), self.num_gemms)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]  # TE reads them all, empty ones too
        biases = biases if self.use_bias else None
        parts = [part @ w.t() for part, w in zip(torch.split(x, list(m_splits)), weights, strict=True)]
        if biases is not None and not self.return_bias:
            parts = [part + b for part, b in zip(parts, biases, strict=True)]
        return torch.cat(parts), biases if self.return_bias else None

    def backward_dw(self) -> None: ...


def _grouped(layer: Any, linear: type = TorchGroupedLinear) -> None:
    """Give ``layer`` a TEGroupedMLP over ``linear``."""
    from megatron.core.transformer.moe import experts

    submodules = types.SimpleNamespace(linear_fc1=linear, linear_fc2=linear, activation_func=None)
    groups = types.SimpleNamespace(ep=layer.ep_group, expt_tp=layer.experts.tp_group)
    grouped = experts.TEGroupedMLP(layer.num_local_experts, layer.config, submodules, groups)
    layer.experts = grouped


@pytest.mark.newest
@pytest.mark.parametrize("bias", [False, True])
@ranks(2)
def test_grouped_mlp(bias: bool) -> None:
    import tiny_gpt
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    settings = (("add_bias_linear", bias),)
    case = tiny_gpt.Case(accumulate=2, overlap=True, settings=settings)
    tiny_gpt.initialize(case)

    def grouped(chunks: list, hook: Any = None) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            _grouped(layer)
        chunks = hook(chunks) if hook else chunks
        assert all(isinstance(layer.experts, TEGroupedMLP) for layer in tiny_gpt.moe_layers(chunks))
        return chunks

    stock = tiny_gpt.train(case, hook=grouped)
    none = tiny_gpt.train(case, hook=lambda c: grouped(c, tiny_gpt.fssdp_hook(slots=0)))
    assert tiny_gpt.difference(stock, none) == tiny_gpt.SAME
    ours = tiny_gpt.train(case, hook=lambda c: grouped(c, tiny_gpt.fssdp_hook()))
    tiny_gpt.assert_trained_alike(stock, ours)


@pytest.mark.newest
@ranks(2)
def test_grouped_mlp_without_grouped_weights_is_refused() -> None:
    import tiny_gpt

    class OneWeight(TorchGroupedLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            del self.num_gemms

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    for layer in tiny_gpt.moe_layers(chunks):
        _grouped(layer, OneWeight)
    with pytest.raises(
        ValueError, match=r"TEGroupedMLP.linear_fc1 is a OneWeight without num_gemms .*TransformerEngine"
    ):
        tiny_gpt.fssdp_hook()(chunks)


def install_fused_wgrad() -> None:
    """The CUDA extension behind Megatron's gradient-accumulation fusion, in plain torch."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad.t().matmul(inputs).to(main_grad.dtype))

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules["fused_weight_gradient_mlp_cuda"] = module
    import tiny_gpt  # noqa: F401
    from megatron.core import utils
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True  # Megatron looked for it when it was imported
    layers.fused_weight_gradient_mlp_cuda = utils.fused_weight_gradient_mlp_cuda = module


@pytest.mark.parametrize("calculator", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
@ranks(2)
def test_gradient_accumulation_fusion(overlap: bool, calculator: bool) -> None:
    """The default on GPUs: GEMMs add weight gradients into ``main_grad``, autograd carries a placeholder."""
    install_fused_wgrad()
    import tiny_gpt
    from megatron.core import num_microbatches_calculator

    settings = (("gradient_accumulation_fusion", True), ("add_bias_linear", True))
    case = tiny_gpt.Case(accumulate=3, overlap=overlap, distributed_optimizer=overlap, settings=settings)
    tiny_gpt.initialize(case)
    if not calculator:
        num_microbatches_calculator.unset_num_microbatches_calculator()
    stock = tiny_gpt.train(case)
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert all(any(layer.experts.physical.layout.fused) for layer in tiny_gpt.moe_layers(ours.chunks))
    tiny_gpt.assert_trained_alike(stock, ours)
