"""Settings in which the tiny GPT is trained; `layout_tables` combines them."""

from __future__ import annotations

import dataclasses
from typing import Any

import quantized

SHARDED = dict(distributed_optimizer=True, overlap=True)
PIPELINE = dict(pp=2, accumulate=4)
INTERLEAVED = dict(pp=2, vpp=2, accumulate=4)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
COMBINED = dict(overlap_moe_expert_parallel_comm=True)
DELAYED = dict(COMBINED, delay_wgrad_compute=True)
DISPATCH = dict(overlap_dispatch_backward_with_experts_wgrad=True)
FUSED_WGRAD = dict(gradient_accumulation_fusion=True)
BIAS = dict(add_bias_linear=True)
MTP = dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)
MTP_REPEATED = dict(mtp_num_layers=3, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3)
SHARED_EXPERTS = dict(moe_shared_expert_intermediate_size=32)
ALLGATHER = dict(moe_token_dispatcher_type="allgather")
PADDED = dict(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)


def flex(backend: str, **model: Any) -> dict[str, Any]:
    """The dispatcher ``flex`` over one of the libraries that `flex_backends` stands in for."""
    capacity = dict(moe_expert_rank_capacity_factor=2.0) if backend == "ncclep" else {}
    backend_settings = dict(
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, **capacity
    )
    return dict(backend_settings, **model)


def balanced(kind: str, **model: Any) -> dict[str, Any]:
    """A router that balances loads with this loss."""
    return dict(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=1e-2, **model)


def layers(count: int, **model: Any) -> dict[str, Any]:
    """``model`` with so many layers. With four on a rank they share the two buffers of the lifetime ``layer``."""
    return dict(model, num_layers=count)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One model on its ranks. Every two settings that meet in some code share a layout.

    Args:
        num_ranks: the ranks that train it.
        case: fields of `tiny_gpt.Case`.
        model: fields of TransformerConfig.
        variants: names of `variants.VARIANTS` beside ``none`` and ``replicas``, which every layout is compared in.
        quick: the variants that ``make test`` runs; without any the layout is slow.
        is_for_oldest: whether other versions of Megatron train it too, without replicas and with them.
        experts: "sequential", or over TransformerEngine "grouped", "grouped by the oldest", "operators",
            "grouped tensors", or the recipe of grouped experts in fp8 or fp4 (`quantized`).
        is_stored: whether their parameters are in fp8 or fp4 as well.
        pattern: of a hybrid model and of its prediction (`tiny_hybrid`).
    """

    num_ranks: int
    case: dict[str, Any]
    model: dict[str, Any]
    variants: str = ""
    quick: str = ""
    is_for_oldest: bool = False
    experts: str = "sequential"
    is_stored: bool = False
    pattern: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        assert set(self.quick.split()) <= set(self.names), (self.quick, self.names)

    @property
    def names(self) -> list[str]:
        """Of all variants."""
        return ["none", "replicas", *self.variants.split()]

    @property
    def packages(self) -> str | None:
        """What its ranks have imported when they start (`ranks.ranks`)."""
        if self.experts == "sequential":
            return "megatron"
        if self.experts == "grouped by the oldest":
            return None
        is_quantized = self.experts in quantized.RECIPES or self.model.keys() & {"fp8", "fp4"}
        return quantized.packages(self.experts) if is_quantized else "te"
