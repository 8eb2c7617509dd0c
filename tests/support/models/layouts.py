"""Layouts and settings in which the tiny GPT is trained, and the variants of FSSDP that each is compared in.

`test_layouts` trains stock Megatron once for a layout, then every variant on the same ranks and data (`variants`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

SHARDED = dict(distributed_optimizer=True, overlap=True)
PIPELINE = dict(pp=2, accumulate=4)
INTERLEAVED = dict(pp=2, vpp=2, accumulate=4)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
COMBINED = dict(overlap_moe_expert_parallel_comm=True)
DELAYED = dict(COMBINED, delay_wgrad_compute=True)
FUSED_WGRAD = dict(gradient_accumulation_fusion=True)
BIAS = dict(add_bias_linear=True)
MTP = dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)
MTP_REPEATED = dict(mtp_num_layers=3, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.3)
ALLGATHER = dict(moe_token_dispatcher_type="allgather")
PADDED = dict(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)
FIRST_IN_BF16 = dict(
    first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0
)


def balanced(kind: str) -> dict[str, Any]:
    """A router that balances loads with this loss."""
    return dict(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=1e-2)


def layers(count: int, **model: Any) -> dict[str, Any]:
    """``model`` with so many layers. With four on a rank they share the two buffers of the lifetime ``layer``."""
    return dict(model, num_layers=count)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One model on its ranks.

    Args:
        num_ranks: the ranks that train it.
        case: fields of `tiny_gpt.Case`.
        model: fields of TransformerConfig.
        variants: names of `variants.VARIANTS` beside ``none`` and ``replicas``, which every layout is compared in.
        quick: the variants that ``make test`` runs; without any the layout is slow.
        is_for_oldest: whether other versions of Megatron train it too, without replicas and with them.
        recipe: of TransformerEngine's grouped experts: ``unquantized``, or that of their fp8 or fp4 (`quantized`).
        is_stored: whether their parameters are in fp8 or fp4 as well.
    """

    num_ranks: int
    case: dict[str, Any]
    model: dict[str, Any]
    variants: str = ""
    quick: str = ""
    is_for_oldest: bool = False
    recipe: str = ""
    is_stored: bool = False

    def __post_init__(self) -> None:
        assert set(self.quick.split()) <= set(self.names), (self.quick, self.names)

    @property
    def names(self) -> list[str]:
        """Of all variants."""
        return ["none", "replicas", *self.variants.split()]

    @property
    def packages(self) -> str:
        """What its ranks have imported when they start (`ranks.ranks`)."""
        from quantized import packages

        return packages(self.recipe) if self.recipe else "megatron"


def core(*fields: Any, **named: Any) -> Layout:
    """A layout that other versions of Megatron train too."""
    return Layout(*fields, **named, is_for_oldest=True)


BOTH = "none replicas"
PARALLEL = {
    "ep2": core(2, {}, {}, "added replaced homes homes-one-slot", quick=f"{BOTH} added"),
    "ep4": core(4, dict(ep=4, accumulate=2), layers(4), "layer-late homes"),
    "accumulate": core(2, dict(accumulate=3), layers(5), "layer layer-late homes-layer-nvlink"),
    "distopt-overlap": core(
        2,
        dict(accumulate=4, **SHARDED),
        layers(4),
        "layer added replaced homes-layer homes-late homes-nvlink",
        quick=f"{BOTH} replaced homes-nvlink",
    ),
    "edp2": Layout(4, dict(accumulate=2), {}, "homes"),
    "edp2-overlap": Layout(4, dict(overlap=True, accumulate=4), {}, "homes"),
    "edp2-distopt": Layout(4, dict(distributed_optimizer=True), {}, "homes"),
    "edp2-distopt-overlap": core(4, dict(accumulate=2, **SHARDED), {}, "homes", quick=BOTH),
    "ep4-distopt-overlap": Layout(4, dict(ep=4, accumulate=4, **SHARDED), {}, "homes"),
    "tp2-etp1": core(2, dict(tp=2), {}, "homes", quick=BOTH),
    "tp2-etp2": core(4, dict(tp=2, etp=2), {}, "homes", quick=BOTH),
    "tp2-etp2-recompute-full": Layout(4, dict(tp=2, etp=2), layers(4, **FULL), "layer"),
    "tp2-etp2-distopt-overlap": Layout(4, dict(tp=2, etp=2, **SHARDED), {}, "homes"),
    "tp2-etp2-allgather": Layout(4, dict(tp=2, etp=2), ALLGATHER),
    "tp2-etp1-ep4": Layout(4, dict(tp=2, ep=4), {}),
    "pp2": core(4, PIPELINE, layers(8), "layer homes"),
    "pp2-one-microbatch": Layout(4, dict(pp=2), {}),
    "pp2-distopt-overlap": Layout(4, dict(PIPELINE, **SHARDED), {}),
    "pp2-vpp2": core(4, INTERLEAVED, {}, "homes", quick=BOTH),
    "pp2-vpp2-distopt-overlap": Layout(
        4,
        dict(INTERLEAVED, **SHARDED),
        layers(8),
        "replaced layer-late homes homes-layer-late",
        quick="layer-late homes",
    ),
    "pp2-vpp2-moe-in-one-chunk": Layout(4, INTERLEAVED, dict(moe_layer_freq=[0, 0, 1, 1]), "homes"),
    "cp2": Layout(2, dict(cp=2), {}, "homes"),
    "cp2-tp2-ep4": Layout(4, dict(cp=2, tp=2, ep=4), {}, quick=BOTH),
    "one-home-per-rank": Layout(4, dict(ep=4, experts=4), {}, "homes"),
    "many-experts": Layout(2, dict(experts=32, skew=3.0, **SHARDED), {}, "homes"),
    "one-expert": core(
        2, dict(one_expert=True, accumulate=2), layers(4), "layer added replaced homes", quick=BOTH
    ),
    "one-expert-ep4": Layout(4, dict(one_expert=True, ep=4, experts=4, accumulate=2), {}),
    "bf16": core(2, dict(bf16=True, accumulate=4), {}, "homes", quick=BOTH),
    "bf16-distopt": Layout(2, dict(bf16=True, distributed_optimizer=True), {}, "homes"),
    "bf16-distopt-overlap": Layout(2, dict(bf16=True, accumulate=2, **SHARDED), layers(4), "layer"),
    "bf16-edp2-distopt-overlap": Layout(4, dict(bf16=True, accumulate=4, **SHARDED), {}, "homes"),
}
SCHEDULES = {
    "recompute-full": Layout(
        2,
        dict(accumulate=2),
        layers(4, **FULL),
        "layer added replaced layer-late homes homes-layer homes-layer-late",
        quick=f"{BOTH} layer-late",
    ),
    "recompute-three-layers-at-once": Layout(
        2, SHARDED, layers(6, **dict(FULL, recompute_num_layers=3)), "layer"
    ),
    "recompute-full-edp2-distopt-overlap": Layout(4, dict(accumulate=2, **SHARDED), FULL),
    "recompute-moe": core(2, dict(accumulate=2), MOE, "homes", quick=BOTH),
    "recompute-moe-biases": Layout(
        2, dict(accumulate=2), layers(4, **MOE, **BIAS), "layer", quick="layer"
    ),
    "ep-comm-overlap": Layout(
        2,
        dict(accumulate=4),
        layers(4, **COMBINED),
        "layer added replaced",
        quick="layer added",
    ),
    "ep-comm-overlap-distopt-overlap": Layout(
        2, dict(accumulate=4, **SHARDED), COMBINED, "homes", quick=BOTH
    ),
    "ep-comm-overlap-pp2-vpp2": Layout(4, dict(INTERLEAVED, **SHARDED), COMBINED, "homes"),
    "ep-comm-overlap-twelve-layers": Layout(
        4, dict(INTERLEAVED, **SHARDED), layers(12, **COMBINED), "layer"
    ),
    "mtp": Layout(2, dict(accumulate=2), layers(4, **MTP), "layer homes"),
    "mtp-repeated": Layout(
        2, dict(accumulate=2, **SHARDED), layers(4, **MTP_REPEATED), "layer homes", quick=BOTH
    ),
    "mtp-repeated-recompute": Layout(
        2, dict(accumulate=2), layers(4, **MTP_REPEATED, **FULL), "layer-late"
    ),
    "mtp-repeated-fused-wgrad": Layout(
        2, dict(accumulate=2, overlap=True), layers(3, **MTP_REPEATED, **FUSED_WGRAD), "layer"
    ),
    "mtp-repeated-pp2": Layout(4, PIPELINE, MTP_REPEATED),
    "mtp-repeated-pp2-recompute": Layout(4, PIPELINE, layers(8, **MTP_REPEATED, **FULL), "layer"),
    "moe-every-second-layer": Layout(2, {}, layers(8, moe_layer_freq=2), "layer homes"),
    "fused-wgrad-biases": Layout(
        2, dict(accumulate=2, overlap=True), layers(4, **FUSED_WGRAD, **BIAS), "layer"
    ),
}
ROUTING = {
    "allgather": core(2, {}, ALLGATHER, "homes", quick=BOTH),
    "shared-experts": core(2, {}, dict(moe_shared_expert_intermediate_size=32), "homes"),
    "shared-experts-overlap": Layout(
        2,
        {},
        dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True),
        quick=BOTH,
    ),
    "aux-loss": core(2, dict(accumulate=2), balanced("aux_loss"), "homes", quick=BOTH),
    "seq-aux-loss": Layout(2, {}, balanced("seq_aux_loss"), "homes"),
    "global-aux-loss": Layout(2, dict(accumulate=2), balanced("global_aux_loss"), "homes"),
    "sinkhorn": Layout(
        2, {}, dict(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1), "homes"
    ),
    "z-loss": Layout(2, {}, dict(moe_z_loss_coeff=1e-3)),
    "expert-bias": core(
        2,
        dict(accumulate=2),
        dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
        "homes",
        quick=BOTH,
    ),
    "probs-on-input": Layout(
        2,
        {},
        dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True),
    ),
    "top3": Layout(2, dict(accumulate=2), dict(moe_router_topk=3), "homes", quick="homes"),
    "top4-edp2-distopt-overlap": Layout(
        4, dict(accumulate=2, **SHARDED), dict(moe_router_topk=4), "homes"
    ),
    "group-limited-topk": Layout(
        2,
        {},
        dict(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_score_function="sigmoid"),
    ),
    "capacity": Layout(
        2, {}, dict(moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="aux_loss")
    ),
    "capacity-position": Layout(
        2,
        {},
        dict(
            moe_expert_capacity_factor=1.0,
            moe_token_drop_policy="position",
            moe_router_load_balancing_type="aux_loss",
        ),
    ),
    "capacity-dropped": Layout(2, {}, dict(moe_expert_capacity_factor=0.6), "homes"),
    "capacity-padded": Layout(2, dict(accumulate=2), dict(PADDED, **BIAS), "homes", quick=BOTH),
    "capacity-padded-allgather-ep4": Layout(
        4, dict(ep=4), dict(PADDED, **ALLGATHER, moe_expert_capacity_factor=1.5)
    ),
    "biases": Layout(2, {}, BIAS),
    "biases-distopt-overlap": Layout(2, SHARDED, BIAS, "homes"),
    "calculate-per-token-loss": Layout(2, dict(accumulate=2), dict(calculate_per_token_loss=True)),
}


def _grouped(num_ranks: int, *fields: Any, **named: Any) -> Layout:
    """Grouped experts of TransformerEngine, whose weights are not quantized."""
    return Layout(num_ranks, *fields, recipe="unquantized", **named)


def _computed(num_ranks: int, recipe: str, *fields: Any, **named: Any) -> Layout:
    """Experts that compute in fp8 or fp4, with parameters in fp32."""
    return Layout(num_ranks, *fields, recipe=recipe, **named)


def _stored(num_ranks: int, recipe: str, *fields: Any, **named: Any) -> Layout:
    """Experts that compute in fp8 or fp4, with parameters in fp8 or fp4."""
    return Layout(num_ranks, *fields, recipe=recipe, is_stored=True, **named)


GROUPED = {
    "latent": _grouped(
        2,
        dict(accumulate=2),
        dict(moe_latent_size=16, moe_shared_expert_intermediate_size=32),
        quick="replicas",
    ),
    "latent-recompute": _grouped(
        2, dict(accumulate=2), dict(FULL, moe_latent_size=16), quick="replicas"
    ),
    "interleaved": _grouped(
        2, dict(accumulate=2), dict(moe_mlp_glu_interleave_size=8), quick="replicas"
    ),
    "bf16-biases": _grouped(2, dict(bf16=True, accumulate=2, **SHARDED), BIAS, "homes"),
    "edp2-fused-wgrad": _grouped(4, dict(accumulate=2, **SHARDED), FUSED_WGRAD, "homes-layer"),
    "ep4-fused-wgrad": _grouped(4, dict(ep=4, accumulate=2, **SHARDED), FUSED_WGRAD, "homes-layer"),
}
# `test_replicas_have_the_bytes_of_their_homes` has all recipes in ``make test``.
COMPUTED = {
    "mxfp8": _computed(2, "mxfp8", dict(accumulate=3), {}, "layer layer-late", quick="layer-late"),
    "mxfp8-distopt-overlap": _computed(2, "mxfp8", SHARDED, {}, "homes"),
    "mxfp8-edp2-distopt-overlap": _computed(4, "mxfp8", SHARDED, {}),
    "mxfp8-recompute": _computed(2, "mxfp8", {}, FULL),
    "mxfp8-pp2-recompute": _computed(4, "mxfp8", PIPELINE, FULL),
    "mxfp8-first-layer-bf16": _computed(2, "mxfp8", {}, FIRST_IN_BF16, quick="replicas"),
    "mxfp8-router-padding": _computed(
        2, "mxfp8", {}, dict(moe_router_padding_for_quantization=True)
    ),
    "mxfp8-biases": _computed(2, "mxfp8", {}, BIAS),
    "mxfp8-delayed-biases": _computed(2, "mxfp8", dict(accumulate=4), dict(DELAYED, **BIAS)),
    "mxfp8-delayed": _computed(2, "mxfp8", dict(accumulate=4, **SHARDED), DELAYED, "homes"),
    "tensorwise": _computed(2, "tensorwise", {}, {}, "homes-layer"),
    "tensorwise-blackwell": _computed(2, "tensorwise-blackwell", {}, {}),
    "blockwise": _computed(2, "blockwise", {}, {}, "homes"),
    "nvfp4": _computed(2, "nvfp4", {}, {}, "homes", quick="replicas"),
    "nvfp4-recompute-moe": _computed(2, "nvfp4", {}, MOE, "layer"),
}
STORED = {
    "mxfp8": _stored(2, "mxfp8", {}, {}, "layer-nvlink homes", quick="layer-nvlink"),
    "mxfp8-biases": _stored(2, "mxfp8", {}, BIAS),
    "mxfp8-first-layer-bf16": _stored(
        2, "mxfp8", dict(accumulate=3), layers(3, **FIRST_IN_BF16), "layer"
    ),
    "mxfp8-distopt-overlap": _stored(2, "mxfp8", SHARDED, {}, "homes-layer"),
    "mxfp8-edp2-distopt-overlap": _stored(4, "mxfp8", SHARDED, {}, "homes"),
    "mxfp8-pp2-recompute": _stored(4, "mxfp8", PIPELINE, FULL, "layer"),
    "mxfp8-delayed": _stored(2, "mxfp8", dict(accumulate=4, **SHARDED), DELAYED),
    "tensorwise": _stored(2, "tensorwise", {}, {}, "layer homes"),
    "tensorwise-blackwell": _stored(2, "tensorwise-blackwell", {}, {}, "homes"),
    "tensorwise-distopt-overlap": _stored(2, "tensorwise", SHARDED, {}),
    "tensorwise-edp2-distopt-overlap": _stored(
        4, "tensorwise", SHARDED, {}, "homes", quick="replicas"
    ),
    "blockwise": _stored(2, "blockwise", {}, {}, "homes-nvlink"),
    "blockwise-edp2-distopt-overlap": _stored(4, "blockwise", SHARDED, {}, "homes-layer"),
    "nvfp4": _stored(2, "nvfp4", {}, {}, "homes"),
}
LAYOUTS: dict[str, Layout] = {
    **PARALLEL,
    **SCHEDULES,
    **ROUTING,
    **{f"grouped-{name}": layout for name, layout in GROUPED.items()},
    **{f"computed-{name}": layout for name, layout in COMPUTED.items()},
    **{f"stored-{name}": layout for name, layout in STORED.items()},
}
# Trained once more, and the same bit for bit: variants of different nature in layouts of different nature.
TWICE = {
    "distopt-overlap": "replicas",
    "edp2-distopt-overlap": "homes",
    "pp2-vpp2-distopt-overlap": "homes-layer-late",
    "recompute-full": "layer-late",
    "ep-comm-overlap": "replaced",
    "bf16": "replicas",
}
