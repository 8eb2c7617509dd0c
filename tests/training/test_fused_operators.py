"""Replicas in grouped experts of TransformerEngine's operators (``use_transformer_engine_op_fuser``).

Oracle: the same model without FSSDP, on the same ranks and data, with that setting too. TE's own Python runs
(`te_on_cpu`, `operators_on_cpu`); kernels that fuse operators need a Blackwell GPU, so these are computed one by one.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from layouts import BIAS, DELAYED, FULL, INTERLEAVED, MOE, PIPELINE, SHARDED
from layouts import FUSED_WGRAD as FUSED
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest

DISPATCH = dict(overlap_dispatch_backward_with_experts_wgrad=True)
SQUARED_RELU = dict(
    gated_linear_unit=False, activation_func="squared_relu", use_fused_weighted_squared_relu=True
)
MXFP8 = dict(fp8="e4m3", fp8_recipe="mxfp8")
STORED = dict(  # parameters in MXFP8, and with them settings outside the model
    accumulate=2,
    bf16=True,
    **SHARDED,
    ddp=dict(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True),
    optimizer=dict(fp8_recipe="mxfp8", reuse_grad_buf_for_mxfp8_param_ag=True),
)
HYBRIDEP = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
NCCLEP = dict(
    moe_token_dispatcher_type="flex",
    moe_flex_dispatcher_backend="ncclep",
    moe_expert_rank_capacity_factor=2.0,
    moe_ncclep_static_shape=True,
)
QUICK_GEGLU = dict(
    activation_func="quick_gelu",
    moe_mlp_glu_interleave_size=8,
    activation_func_clamp_value=7.0,
    **BIAS,
)
LAYER = dict(lifetime="layer")

# name: (ranks, fields of tiny_gpt.Case, fields of TransformerConfig, settings of FSSDP)
CASES: dict[str, tuple[int, dict, dict, dict]] = {
    "plain": (2, dict(accumulate=2), {}, {}),
    "fused": (2, dict(accumulate=3), dict(FUSED, moe_mlp_glu_interleave_size=8), {}),
    "fused-bias-layer": (
        2,
        dict(accumulate=3),
        dict(FUSED, **BIAS),
        dict(lifetime="layer"),
    ),
    "bias-late": (2, dict(accumulate=2), BIAS, dict(late_replicas=2)),
    "fused-squared-relu-layer": (2, dict(accumulate=2), dict(FUSED, **SQUARED_RELU), LAYER),
    "quick-geglu": (2, dict(accumulate=2), QUICK_GEGLU, {}),
    "fused-bf16-distopt-overlap": (2, dict(accumulate=2, bf16=True, **SHARDED), FUSED, {}),
    "fused-recompute": (2, dict(accumulate=2), dict(FUSED, **FULL), {}),
    "fused-recompute-moe-layer": (2, dict(accumulate=2), dict(FUSED, **MOE), LAYER),
    "delayed-bias": (2, dict(accumulate=4), dict(DELAYED, **BIAS), {}),
    "delayed-fused-overlap": (2, dict(accumulate=4, **SHARDED), dict(DELAYED, **FUSED), LAYER),
    "dispatch-fused": (2, dict(accumulate=2), dict(DISPATCH, **FUSED), {}),
    "fused-pp2": (4, PIPELINE, FUSED, dict(lifetime="layer")),
    "delayed-fused-pp2-vpp2": (
        4,
        dict(INTERLEAVED, **SHARDED),
        dict(DELAYED, **FUSED),
        {},
    ),
    "hybridep-latent": (2, dict(accumulate=2), dict(HYBRIDEP, moe_latent_size=16), {}),
    "hybridep-mxfp8": (2, dict(accumulate=2), dict(HYBRIDEP, **FUSED, **MXFP8), {}),
    "ncclep-static-shape": (2, dict(accumulate=2), NCCLEP, {}),
    "fused-mxfp8": (2, dict(accumulate=2), dict(FUSED, **MXFP8), {}),
    "fused-mxfp8-squared-relu-layer": (
        2,
        dict(accumulate=2),
        dict(FUSED, **MXFP8, **SQUARED_RELU),
        LAYER,
    ),
    "fused-mxfp8-param-recompute": (
        2,
        STORED,
        dict(FUSED, **MXFP8, **FULL, fp8_param=True),
        dict(lifetime="layer"),
    ),
    "delayed-fused-mxfp8-param": (
        2,
        dict(STORED, accumulate=4),
        dict(DELAYED, **FUSED, **MXFP8, fp8_param=True),
        {},
    ),
    "fused-nvfp4": (2, dict(accumulate=2), dict(FUSED, fp4="e2m1"), {}),
    "ep4-distopt-overlap": (4, dict(ep=4, accumulate=2, **SHARDED), {}, {}),
}


ACTIVATIONS = {
    "silu": "ScaledSwiGLU",
    "squared_relu": "ScaledSReLU",
    "quick_gelu": "ScaledClampedQGeGLU",
}
QUICK = "fused-bias-layer fused-recompute-moe-layer delayed-bias"  # in `make test`


def _cases(num_ranks: int) -> list:
    names = [name for name, (size, *_) in CASES.items() if size == num_ranks]
    return quick(names, [name for name in names if name in QUICK.split()])


def _packages(name: str) -> str:
    return "te-blackwell" if CASES[name][2].keys() & {"fp8", "fp4"} else "te"


@pytest.mark.parametrize("name", _cases(2))
@ranks(2, preload=_packages)
def test_two_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", _cases(4))
@ranks(4, preload=_packages)
def test_four_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.slow
@ranks(2, preload="te")
def test_frozen_experts() -> None:
    _compare("plain", frozen=True)


def _compare(name: str, *, frozen: bool = False) -> None:
    import operators_on_cpu
    import quantizers_on_cpu
    import te_on_cpu

    _, fields, settings, ours_ = CASES[name]
    quantized = settings.keys() & {"fp8", "fp4"}
    te_on_cpu.install(packages=_packages(name))
    operators_on_cpu.install()
    if quantized:
        quantizers_on_cpu.install()
        quantizers_on_cpu.exact_activations = True
    import flex_backends
    import tiny_gpt
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.moe import fused_a2a

    from megatron_hecate.megatron.grouped_linear import GroupedExperts

    settings = flex_backends.valid(dict(use_transformer_engine_op_fuser=True, **settings))
    activation = settings.get("activation_func", "silu")
    if activation != "silu":
        settings["activation_func"] = squared_relu if activation == "squared_relu" else quick_gelu
    if settings.get("moe_token_dispatcher_type") == "flex":
        flex_backends.install()
        operators_on_cpu.leave_out_empty_rows()
    fields = {
        field: tuple(value.items()) if isinstance(value, dict) else value
        for field, value in fields.items()
    }
    case = tiny_gpt.Case(grouped=True, **fields, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    tiny_gpt.install_fused_wgrad()  # for the attention

    def train(hook: Any = None) -> Any:
        fused_a2a._hybrid_ep_buffer, fused_a2a.te_ep._BOOTSTRAPPED = (
            None,
            False,
        )  # a new model would be a new process
        return tiny_gpt.train(
            case, hook=lambda chunks: (hook or list)(freeze(chunks) if frozen else chunks)
        )

    def freeze(chunks: list) -> list:
        for layer in tiny_gpt.moe_layers(chunks):
            layer.experts.requires_grad_(False)
        return chunks

    stock = train()
    operators = operators_on_cpu.of(tiny_gpt.moe_layers(stock.chunks)[0].experts)
    assert [type(o).__name__ for o in operators] == [
        "GroupedLinear",
        ACTIVATIONS[activation],
        "GroupedLinear",
    ]
    assert bool(quantized) == (operators[0].get_quantizer("forward", 1) is not None)
    none = train(tiny_gpt.fssdp_hook(slots=0))
    assert tiny_gpt.difference(stock, none) == tiny_gpt.SAME
    lent: dict[Any, list[list[weakref.ref]]] = {}
    over = GroupedExperts.over

    def watched(self: Any, weights: list[Any]) -> Any:
        lent.setdefault(self, []).append([weakref.ref(weight) for weight in weights])
        return over(self, weights)

    GroupedExperts.over = watched
    ours = train(tiny_gpt.fssdp_hook(**ours_))
    gc.collect()
    earlier, last = [], set()  # forwards of one iteration share weights
    for forwards in lent.values():
        last |= {id(weight()) for weight in forwards[-1]}
        earlier += [weight() for weights in forwards[:-1] for weight in weights]
    kept = [w for w in earlier if w is not None and id(w) not in last]
    assert len(earlier) > 0 == len(kept), "operators keep weights of earlier forwards"
    tiny_gpt.assert_trained_alike(
        stock,
        ours,
        name,
        tolerance=tiny_gpt.BF16_TOLERANCE if case.bf16 and not quantized else 1e-5,
    )
