"""Layouts and settings in which the tiny GPT is trained, and the variants of FSSDP that each is compared in.

`test_layouts` trains stock Megatron once for a layout, then every variant on the same ranks and data (`variants`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from layouts import (
    ALLGATHER,
    BIAS,
    COMBINED,
    DELAYED,
    DISPATCH,
    FULL,
    FUSED_WGRAD,
    INTERLEAVED,
    MOE,
    MTP,
    MTP_REPEATED,
    PADDED,
    PIPELINE,
    SHARDED,
    SHARED_EXPERTS,
    Layout,
    balanced,
    flex,
    layers,
)

MTP_TWICE = dict(MTP_REPEATED, mtp_num_layers=2)
# two attentions and three MoE layers, and three more in the prediction
HYBRID = ("*EE*E", "*EEE")
FIRST_IN_BF16 = dict(
    first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0
)
MXFP8 = dict(fp8="e4m3", fp8_recipe="mxfp8")
SQUARED_RELU = dict(
    gated_linear_unit=False, activation_func="squared_relu", use_fused_weighted_squared_relu=True
)
QUICK_GEGLU = dict(
    activation_func="quick_gelu", moe_mlp_glu_interleave_size=8, activation_func_clamp_value=7.0
)
# parameters in MXFP8, of fused operators
MXFP8_STORED = dict(
    bf16=True,
    **SHARDED,
    ddp=dict(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True),
    optimizer=dict(fp8_recipe="mxfp8", reuse_grad_buf_for_mxfp8_param_ag=True),
)
ACTIVATION = dict(recompute_granularity="selective", recompute_modules=["moe_act"])
BF16_MAIN = dict(bf16=True, grad_reduce_in_fp32=False)


def core(*fields: Any, **named: Any) -> Layout:
    """A layout that other versions of Megatron train too."""
    return Layout(*fields, **named, is_for_oldest=True)


def over_te(experts: str, *fields: Any, ranks: int = 2, **named: Any) -> Layout:
    """A layout of ``experts`` over TransformerEngine."""
    return Layout(ranks, *fields, **named, experts=experts)


_grouped, _oldest, _operators, _tensors = (
    functools.partial(over_te, experts)
    for experts in ("grouped", "grouped by the oldest", "operators", "grouped tensors")
)
BOTH = "none replicas"
PARALLEL = {
    "ep2": core(2, {}, {}, "added replaced homes homes-one-slot", quick="none added"),
    "ep4": core(4, dict(ep=4, accumulate=4, **SHARDED), layers(4), "layer-late homes"),
    "accumulate": core(2, dict(accumulate=3), layers(5), "layer layer-late homes-layer-nvlink"),
    "distopt-overlap": core(
        2,
        dict(accumulate=4, **SHARDED),
        layers(4),
        "layer added replaced homes-layer homes-late homes-nvlink",
        quick="none replaced homes-nvlink",
    ),
    "edp2-distopt-overlap": core(4, dict(accumulate=2, **SHARDED), {}, "homes", quick=BOTH),
    "tp2-etp1": core(2, dict(tp=2), {}, "homes", quick="replicas"),
    "tp2-etp2": core(4, dict(tp=2, etp=2), {}, "homes", quick="replicas"),
    "tp2-etp2-recompute-full": Layout(
        4, dict(tp=2, etp=2, **SHARDED), layers(4, **FULL), "layer homes"
    ),
    "tp2-etp2-allgather": Layout(4, dict(tp=2, etp=2), ALLGATHER),
    "pp2": core(4, dict(PIPELINE, **SHARDED), layers(8), "layer homes"),
    "pp2-one-microbatch": Layout(4, dict(pp=2), {}),
    "pp2-vpp2": core(4, INTERLEAVED, {}, "homes", quick="none"),
    "pp2-vpp2-distopt-overlap": Layout(
        4,
        dict(INTERLEAVED, **SHARDED),
        layers(8),
        "replaced layer-late homes homes-layer-late",
        quick="layer-late",
    ),
    "pp2-vpp2-moe-in-one-chunk": Layout(4, INTERLEAVED, dict(moe_layer_freq=[0, 0, 1, 1]), "homes"),
    "cp2-tp2-ep4": Layout(4, dict(cp=2, tp=2, ep=4), {}, "homes", quick="replicas"),
    "many-experts": Layout(2, dict(experts=32, skew=3.0, **SHARDED), {}),
    "one-expert": core(
        2, dict(one_expert=True, accumulate=2), layers(4), "layer added replaced homes"
    ),
    "one-expert-ep4": Layout(
        4, dict(one_expert=True, ep=4, experts=4, accumulate=2), {}, "homes", quick="replicas"
    ),
    "bf16": core(2, dict(bf16=True, accumulate=4), {}, "homes", quick="replicas"),
}
SCHEDULES = {
    "recompute-full": Layout(
        2,
        dict(accumulate=2),
        layers(4, **FULL),
        "layer added replaced layer-late homes homes-layer homes-layer-late",
        quick="layer-late",
    ),
    "recompute-three-layers-at-once": Layout(
        2, SHARDED, layers(6, **dict(FULL, recompute_num_layers=3)), "layer"
    ),
    "recompute-moe": core(
        2, dict(accumulate=2), layers(4, **MOE, **BIAS), "layer homes", quick="none layer"
    ),
    "ep-comm-overlap": Layout(
        2, dict(accumulate=4), layers(4, **COMBINED), "layer added replaced", quick="layer"
    ),
    "ep-comm-overlap-distopt-overlap": Layout(
        2, dict(accumulate=4, **SHARDED), COMBINED, "homes", quick="replicas"
    ),
    "mtp": Layout(2, dict(accumulate=2), layers(4, **MTP), "layer"),
    "mtp-repeated": Layout(
        2, dict(accumulate=2, **SHARDED), layers(4, **MTP_REPEATED), "layer homes", quick="layer"
    ),
    "mtp-repeated-recompute": Layout(
        2, dict(accumulate=2), layers(4, **MTP_REPEATED, **FULL), "layer-late"
    ),
    "mtp-repeated-fused-wgrad-biases": Layout(
        2,
        dict(accumulate=2, overlap=True),
        layers(3, **MTP_REPEATED, **FUSED_WGRAD, **BIAS),
        "layer",
    ),
    "mtp-repeated-pp2-recompute": Layout(4, PIPELINE, layers(8, **MTP_REPEATED, **FULL), "layer"),
    "fused-wgrad-biases": core(
        2, dict(accumulate=3, **SHARDED), dict(FUSED_WGRAD, **BIAS), quick="replicas"
    ),
    "moe-every-second-layer": Layout(2, {}, layers(8, moe_layer_freq=2), "layer"),
    "hybrid-mtp-repeated-recompute": Layout(
        2,
        dict(accumulate=2),
        layers(5, **MTP_TWICE, **FULL),
        "layer",
        quick="replicas",
        pattern=HYBRID,
    ),
}
ROUTING = {
    "allgather": core(2, {}, dict(ALLGATHER, **SHARED_EXPERTS), "homes", quick="replicas"),
    "shared-experts-overlap": Layout(
        2,
        dict(accumulate=2),
        dict(
            SHARED_EXPERTS,
            moe_shared_expert_overlap=True,
            moe_z_loss_coeff=1e-3,
            calculate_per_token_loss=True,
        ),
        quick="replicas",
    ),
    "aux-loss": core(2, dict(accumulate=2), balanced("aux_loss"), quick="replicas"),
    "sinkhorn": Layout(2, {}, dict(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1)),
    "expert-bias": core(
        2,
        dict(accumulate=2),
        dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
        "homes",
        quick="none",
    ),
    "probs-on-input": Layout(
        2, {}, dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True)
    ),
    "top3-seq-aux-loss": Layout(
        2, dict(accumulate=2), balanced("seq_aux_loss", moe_router_topk=3), "homes", quick="homes"
    ),
    "group-limited-topk-global-aux-loss": Layout(
        2,
        dict(accumulate=2),
        balanced(
            "global_aux_loss",
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_score_function="sigmoid",
        ),
    ),
    "capacity": Layout(2, {}, balanced("aux_loss", moe_expert_capacity_factor=0.6)),
    "capacity-position": Layout(
        2,
        {},
        balanced("aux_loss", moe_expert_capacity_factor=1.0, moe_token_drop_policy="position"),
    ),
    "capacity-padded": Layout(2, dict(accumulate=2), dict(PADDED, **BIAS), "homes", quick=BOTH),
    "capacity-padded-allgather-ep4": Layout(
        4, dict(ep=4), dict(PADDED, **ALLGATHER, moe_expert_capacity_factor=1.5)
    ),
}
FLEX = {
    "deepep-capacity": core(
        2, dict(accumulate=2), flex("deepep", moe_expert_capacity_factor=1.0), "layer"
    ),
    "deepep-tp2-etp2": core(4, dict(tp=2, etp=2), flex("deepep"), "layer"),
    "deepep-ep-comm-overlap": Layout(
        2, dict(accumulate=4), layers(4, **flex("deepep", **COMBINED)), "layer", quick="replicas"
    ),
    "hybridep-capacity-padded": core(
        2, dict(accumulate=2), flex("hybridep", **PADDED), "layer", quick="none layer"
    ),
    "hybridep-tp2-etp2": core(4, dict(tp=2, etp=2), flex("hybridep"), "layer"),
    "hybridep-ep-comm-overlap": Layout(2, dict(accumulate=4), flex("hybridep", **COMBINED)),
    "hybridep-hybrid-mtp-repeated": Layout(
        2, dict(accumulate=2), layers(5, **flex("hybridep"), **MTP_TWICE), "layer", pattern=HYBRID
    ),
    "ncclep": Layout(2, dict(accumulate=2), flex("ncclep"), "layer", quick="replicas"),
    "ncclep-tp2-etp2": Layout(4, dict(tp=2, etp=2), flex("ncclep"), "layer"),
}
# experts over TransformerEngine whose weights are not quantized
GROUPED = {
    "latent-interleaved-recompute": _grouped(
        dict(accumulate=2),
        dict(FULL, **SHARED_EXPERTS, moe_latent_size=16, moe_mlp_glu_interleave_size=8),
        quick="replicas",
    ),
    "bf16-biases": _grouped(dict(bf16=True, accumulate=2, **SHARDED), BIAS, "homes"),
    "edp2-fused-wgrad": _grouped(
        dict(accumulate=2, **SHARDED), FUSED_WGRAD, "homes-layer", ranks=4
    ),
    "edp2-fused-bf16-main-grads": _grouped(
        dict(BF16_MAIN, accumulate=2, **SHARDED), FUSED_WGRAD, quick="replicas", ranks=4
    ),
    "biases": _grouped(dict(accumulate=2), BIAS, quick="replicas"),
    "fused": _grouped(
        dict(accumulate=3), layers(4, **FUSED_WGRAD), "layer added", quick="replicas"
    ),
    "fused-biases-recompute": _grouped(
        dict(accumulate=2), dict(FUSED_WGRAD, **BIAS, **FULL), quick="replicas"
    ),
    "ep4-fused-recompute-moe": _grouped(
        dict(ep=4, accumulate=2, **SHARDED), layers(4, **FUSED_WGRAD, **MOE), "layer", ranks=4
    ),
    "fused-bf16-main-grads-biases": _grouped(
        dict(BF16_MAIN, accumulate=3),
        layers(4, **FUSED_WGRAD, **BIAS),
        "layer-nvlink",
        quick="layer-nvlink",
    ),
    "delayed-biases": _grouped(dict(accumulate=4, **SHARDED), dict(DELAYED, **BIAS)),
    "delayed-fused": _grouped(
        dict(accumulate=4, **SHARDED), layers(4, **DELAYED, **FUSED_WGRAD), "layer", quick="layer"
    ),
    "delayed-fused-mtp-recompute-activation": _grouped(
        dict(accumulate=4), layers(4, **DELAYED, **FUSED_WGRAD, **MTP, **ACTIVATION), "layer"
    ),
    "delayed-fused-pp2-vpp2": _grouped(
        dict(INTERLEAVED, **SHARDED), dict(DELAYED, **FUSED_WGRAD), ranks=4
    ),
    "dispatch-fused-recompute": _grouped(dict(accumulate=2), dict(DISPATCH, **FUSED_WGRAD, **FULL)),
    "dispatch-fused-mtp-repeated-recompute-moe": _grouped(
        dict(accumulate=2),
        layers(4, **DISPATCH, **FUSED_WGRAD, **MTP_REPEATED, **MOE),
        "layer",
        quick="layer",
    ),
    "oldest-delayed-biases": _oldest(dict(accumulate=4, **SHARDED), dict(DELAYED, **BIAS)),
    "oldest-fused": _oldest(dict(accumulate=3), FUSED_WGRAD, quick="replicas"),
    "oldest-fused-bf16-main-grads": _oldest(dict(BF16_MAIN, accumulate=2), FUSED_WGRAD),
}
OPERATORS = {
    "biases": _operators(dict(accumulate=2), BIAS, "layer added"),
    "fused-biases": _operators(
        dict(accumulate=3), dict(FUSED_WGRAD, **BIAS), "layer", quick="none layer"
    ),
    "quick-geglu-recompute": _operators(dict(accumulate=2), dict(QUICK_GEGLU, **BIAS, **FULL)),
    "fused-squared-relu-recompute-moe": _operators(
        dict(accumulate=2), dict(FUSED_WGRAD, **SQUARED_RELU, **MOE), "layer"
    ),
    "fused-bf16-ep4-distopt-overlap": _operators(
        dict(ep=4, bf16=True, accumulate=2, **SHARDED), FUSED_WGRAD, ranks=4
    ),
    "fused-dispatch-backward": _operators(dict(accumulate=2), dict(FUSED_WGRAD, **DISPATCH)),
    "delayed-biases": _operators(dict(accumulate=4), dict(DELAYED, **BIAS), quick="replicas"),
    "delayed-fused-pp2-vpp2": _operators(
        dict(INTERLEAVED, **SHARDED), layers(8, **DELAYED, **FUSED_WGRAD), "layer", ranks=4
    ),
    "hybridep-latent": _operators(dict(accumulate=2), flex("hybridep", moe_latent_size=16)),
    "hybridep-mxfp8-squared-relu": _operators(
        dict(accumulate=2), flex("hybridep", **FUSED_WGRAD, **MXFP8, **SQUARED_RELU), "layer"
    ),
    "ncclep-static-shape": _operators(
        dict(accumulate=2), flex("ncclep", moe_ncclep_static_shape=True)
    ),
    "mxfp8-stored-recompute": _operators(
        dict(MXFP8_STORED, accumulate=2),
        dict(FUSED_WGRAD, **MXFP8, **FULL, fp8_param=True),
        "layer",
    ),
    "mxfp8-stored-delayed": _operators(
        dict(MXFP8_STORED, accumulate=4), dict(DELAYED, **FUSED_WGRAD, **MXFP8, fp8_param=True)
    ),
    "nvfp4": _operators(dict(accumulate=2), dict(FUSED_WGRAD, fp4="e2m1")),
}
GROUPED_TENSORS = {
    "fused-biases-recompute": _tensors(
        dict(accumulate=2),
        layers(4, **FUSED_WGRAD, **BIAS, **FULL),
        "layer added",
        quick="replicas",
    ),
    "delayed-biases": _tensors(dict(accumulate=4), dict(DELAYED, **BIAS)),
    "delayed-fused": _tensors(dict(accumulate=4), dict(DELAYED, **FUSED_WGRAD), quick="none"),
    "bf16-main-grads": _tensors(dict(BF16_MAIN, accumulate=2), FUSED_WGRAD),
}
# in fp8 and fp4
COMPUTED = {
    "mxfp8": over_te("mxfp8", dict(accumulate=3), {}, "layer layer-late", quick="layer-late"),
    "mxfp8-first-layer-bf16": over_te(
        "mxfp8", {}, dict(FIRST_IN_BF16, moe_router_padding_for_quantization=True)
    ),
    "mxfp8-delayed-biases": over_te("mxfp8", dict(accumulate=4), dict(DELAYED, **BIAS)),
    "mxfp8-delayed": over_te("mxfp8", dict(accumulate=4, **SHARDED), DELAYED, "homes"),
    "tensorwise": over_te("tensorwise", {}, {}, "homes-layer"),
    "nvfp4-recompute-moe": over_te("nvfp4", {}, MOE, "layer homes"),
}
STORED = {
    "mxfp8": over_te("mxfp8", {}, {}, "layer-nvlink homes", quick="replicas"),
    "mxfp8-first-layer-bf16-biases": over_te(
        "mxfp8", dict(accumulate=3), layers(3, **FIRST_IN_BF16, **BIAS), "layer"
    ),
    "mxfp8-edp2-distopt-overlap": over_te("mxfp8", SHARDED, {}, "homes homes-layer", ranks=4),
    "mxfp8-pp2-recompute": over_te("mxfp8", PIPELINE, FULL, "layer", ranks=4),
    "mxfp8-delayed": over_te("mxfp8", dict(accumulate=4, **SHARDED), DELAYED),
    "tensorwise": over_te("tensorwise", {}, {}, "layer homes"),
    "tensorwise-blackwell": over_te("tensorwise-blackwell", {}, {}),
    "tensorwise-edp2-distopt-overlap": over_te(
        "tensorwise", SHARDED, {}, "homes", quick="replicas", ranks=4
    ),
    "blockwise": over_te("blockwise", {}, {}, "homes-nvlink"),
    "blockwise-edp2-distopt-overlap": over_te("blockwise", SHARDED, {}, "homes-layer", ranks=4),
    "nvfp4": over_te("nvfp4", {}, {}, "homes"),
}
TABLES: dict[str, dict[str, Layout]] = {
    "grouped": GROUPED,
    "operators": OPERATORS,
    "tensors": GROUPED_TENSORS,
    "computed": COMPUTED,
    "stored": {
        name: dataclasses.replace(layout, is_stored=True) for name, layout in STORED.items()
    },
}
LAYOUTS: dict[str, Layout] = {
    **PARALLEL,
    **SCHEDULES,
    **ROUTING,
    **FLEX,
    **{
        f"{kind}-{name}": layout for kind, table in TABLES.items() for name, layout in table.items()
    },
}
# Trained once more, and the same bit for bit.
TWICE = {"distopt-overlap": "replaced", "pp2-vpp2-distopt-overlap": "homes-layer-late"}
assert all(variant in LAYOUTS[name].names for name, variant in TWICE.items())
