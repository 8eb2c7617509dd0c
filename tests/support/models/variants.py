"""Variants of FSSDP, each compared with one training of stock Megatron: what `test_layouts` does on every rank.

| variant | differs from stock by |
|---|---|
| ``none``: no slots | nothing |
| those without ``homes`` | 1e-5 in losses, norms and gradients, `tiny_gpt.BF16_TOLERANCE` in bf16 |
| ``homes...``: experts move before the fourth and the seventh iteration | `training_with_moves` |

Late replicas are there because a planner that is wrong on purpose plans before the gate: were a late replica's weights,
its gradient or a token lost, or a plan of the forward not that of the backward, losses or gradients would differ.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import flex_backends
import grouped_tensors_on_cpu
import operators_on_cpu
import planners
import pytest
import quantized
import quantizers_on_cpu
import te_on_cpu
import tex_on_cpu
import tiny_gpt
import tiny_hybrid
import torch
import training_with_moves
from layout_tables import TWICE
from layouts import DISPATCH, Layout

from megatron_hecate.record.metrics import layer_metrics

STEPS = 3
ACTIVATIONS = {
    "silu": "ScaledSwiGLU",
    "squared_relu": "ScaledSReLU",
    "quick_gelu": "ScaledClampedQGeGLU",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """Settings of FSSDP, and who plans before the gate if it is not FSSDP's planner."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    planner: Callable | None = None
    moves_homes: bool = False


LAYER = dict(lifetime="layer")
NVLINK = dict(transport="nvlink")
LATE = dict(late_replicas=4)
VARIANTS = {
    "none": Variant(dict(slots=0)),
    "replicas": Variant(),
    "layer": Variant(LAYER),
    "layer-nvlink": Variant(dict(LAYER, **NVLINK)),
    # late replicas where there is none, or in place of the wrong ones
    "added": Variant(dict(late_replicas=2), planner=planners.no_replicas),
    "replaced": Variant(LATE, planner=planners.coldest_experts),
    "layer-late": Variant(dict(LAYER, **LATE), planner=planners.coldest_experts),
    "homes": Variant(moves_homes=True),
    "homes-one-slot": Variant(dict(slots=1), moves_homes=True),
    "homes-layer": Variant(LAYER, moves_homes=True),
    "homes-nvlink": Variant(NVLINK, moves_homes=True),
    "homes-layer-nvlink": Variant(dict(LAYER, **NVLINK), moves_homes=True),
    "homes-late": Variant(LATE, planner=planners.coldest_experts, moves_homes=True),
    "homes-layer-late": Variant(
        dict(LAYER, **LATE), planner=planners.coldest_experts, moves_homes=True
    ),
}


def compare(name: str, layout: Layout, chosen: Iterable[str]) -> dict[str, dict[str, float]]:
    """Train stock Megatron once and every chosen variant; return how far those without moves are from stock.

    Gradients are clipped in layouts whose homes never move (`training_with_moves`).
    """
    variants = {variant: VARIANTS[variant] for variant in chosen}
    case, prepare = case_of(layout)
    if any(VARIANTS[variant].moves_homes for variant in layout.names):
        case = training_with_moves.unclipped(case)
    stock = tiny_gpt.train(case, steps=STEPS, hook=prepare)
    if layout.experts == "operators":
        _assert_operators(layout, stock)
    _assert_used(layout)
    # Quantized parameters share their bytes with their clones: their values stay what they are now.
    short = copy.copy(stock)
    short.losses, short.grad_norms = stock.losses.copy(), stock.grad_norms.copy()
    short.grads = stock.grads.copy()
    short.params = {name: p.double() for name, p in stock.params.items()}
    moved = None
    if any(variant.moves_homes for variant in variants.values()):
        tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
        moved = training_with_moves.MovedHomes(case, stock, prepare=prepare, tolerance=tolerance)
    worst: dict[str, dict[str, float]] = {}
    for label, variant in variants.items():
        print(f"{name} {label}", flush=True)  # shown with a failure
        with _planned_by(variant.planner):
            if variant.moves_homes:
                assert moved is not None
                moved.assert_bitwise(**variant.settings)
                ours = moved.assert_close(**variant.settings)
                train = moved.train
            else:
                train = _Shortly(
                    case,
                    prepare,
                    tolerance=_tolerance(case, layout),
                    shares_buffers=layout.model.get("num_layers", 0) > 2,
                )
                ours = train(**variant.settings)
                worst[label] = train.assert_close(short, ours, variant)
                _assert_used(layout)
            if TWICE.get(name) == label:
                again = train(**variant.settings)
                assert tiny_gpt.difference(ours, again) == tiny_gpt.SAME, "two runs differ"
    return worst


def case_of(layout: Layout) -> tuple[Any, Callable[[list], list]]:
    """The initialized case of a layout, and what is done with each of its models before FSSDP comes."""
    if layout.experts in quantized.RECIPES:
        case = quantized.case_of(layout.experts, layout.case, layout.model, stored=layout.is_stored)
        return case, quantized.fuse_wgrad
    settings = dict(layout.model)
    is_fused = layout.experts == "operators"
    prepare: Callable[[list], list] = list
    if layout.experts != "sequential":
        is_oldest = layout.experts == "grouped by the oldest"
        version = te_on_cpu.OLDEST if is_oldest else te_on_cpu.NEWEST
        te_on_cpu.install(version, packages=layout.packages or "te")
    if is_fused:
        _install_operators(settings)
    elif layout.experts == "grouped tensors":
        grouped_tensors_on_cpu.install()
        prepare = _use_grouped_tensors
    if "moe_flex_dispatcher_backend" in settings:
        flex_backends.install()
        settings = flex_backends.valid(settings)
    if isinstance(settings.get("activation_func"), str):
        from megatron.core.activations import squared_relu
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        named = {"squared_relu": squared_relu, "quick_gelu": quick_gelu}
        settings["activation_func"] = named[settings["activation_func"]]
    if layout.pattern is not None:
        tiny_hybrid.install(*layout.pattern)
    case = tiny_gpt.initialized(
        **layout.case, grouped=layout.experts != "sequential", settings=settings
    )
    if is_fused or "gradient_accumulation_fusion" in settings:  # of operators for the attention
        tiny_gpt.install_fused_wgrad()
    return case, prepare


def _install_operators(settings: dict[str, Any]) -> None:
    """Have grouped experts made of TransformerEngine's operators, and ask for them in ``settings``."""
    settings["use_transformer_engine_op_fuser"] = True
    operators_on_cpu.install()
    if settings.keys() & {"fp8", "fp4"}:
        quantizers_on_cpu.install()
        quantizers_on_cpu.exact_activations = True
    if "moe_flex_dispatcher_backend" in settings:
        operators_on_cpu.leave_out_empty_rows()


def _use_grouped_tensors(chunks: list) -> list:
    """Keep token counts on the device: Megatron before 0.20 passes counts of the host."""
    for layer in tiny_gpt.moe_layers(chunks):
        layer.experts.linear_fc1.use_grouped_tensor = True
        layer.experts.linear_fc2.use_grouped_tensor = True
    return chunks


def _assert_operators(layout: Layout, stock: Any) -> None:
    """Stock's experts are operators, with this activation between the two linears."""
    is_quantized = bool(layout.model.keys() & {"fp8", "fp4"})
    activation = ACTIVATIONS[layout.model.get("activation_func", "silu")]
    operators = operators_on_cpu.of(tiny_gpt.moe_layers(stock.chunks)[0].experts)
    assert type(operators[1]).__name__ == activation
    assert is_quantized == (operators[0].get_quantizer("forward", 1) is not None)


def _assert_used(layout: Layout) -> None:
    """The last training has used the GEMMs and the dispatcher of its layout."""
    if layout.experts.startswith("grouped"):
        _assert_gemms(layout, [kind for kind, *_ in tex_on_cpu.GEMMS])
        tex_on_cpu.GEMMS.clear()
    if "moe_flex_dispatcher_backend" in layout.model:
        # one buffer for all layers
        assert len(flex_backends.CALLS) == 1, flex_backends.CALLS
        flex_backends.forget()


def _assert_gemms(layout: Layout, kinds: list[str]) -> None:
    """All are of the path of ``layout``; in the last backward of two linears weight gradients come last if delayed."""
    if layout.experts == "grouped tensors":
        assert {*kinds} == {"grouped TN", "grouped NN", "grouped NT"}
        return
    assert {*kinds} == {"TN", "NN", "NT"}
    is_delayed = bool(layout.model.keys() & {"delay_wgrad_compute", *DISPATCH})
    assert kinds[-4:] == (["NN", "NN", "NT", "NT"] if is_delayed else ["NN", "NT", "NN", "NT"])


def _tolerance(case: Any, layout: Layout) -> float:
    """Of bf16 where activations are rounded to it: stored experts multiply decoded weights, and add biases in bf16."""
    is_decoded = layout.is_stored or "fp8_param" in layout.model
    if not case.bf16 or (is_decoded and "add_bias_linear" not in layout.model):
        return 1e-5
    return tiny_gpt.BF16_TOLERANCE


@contextlib.contextmanager
def _planned_by(planner: Callable | None) -> Iterator[None]:
    from megatron_hecate.step.layer_planner import EarlyPlans

    with mock.patch.object(EarlyPlans, "plan", EarlyPlans.plan):
        if planner is not None:
            planners.replace_planner(planner)
        yield


@dataclasses.dataclass(frozen=True)
class _Shortly:
    """Trains a case with FSSDP, and counts fetches in a backward (True) and before it (False)."""

    case: Any
    prepare: Callable[[list], list]
    tolerance: float
    shares_buffers: bool
    fetches: Counter[bool] = dataclasses.field(default_factory=Counter)

    def __call__(self, **settings: Any) -> Any:
        def count(what: str, *_: object) -> None:
            if what == "fetch":
                self.fetches[torch._C._current_graph_task_id() != -1] += 1

        convert = tiny_gpt.fssdp_hook(**settings)

        def hook(chunks: list) -> list:
            chunks = convert(self.prepare(chunks))
            if settings.get("slots") != 0:
                tiny_gpt.before_transfers(chunks, count)
            return chunks

        return tiny_gpt.train(self.case, steps=STEPS, hook=hook)

    def assert_close(self, stock: Any, ours: Any, variant: Variant) -> dict[str, float]:
        """``ours`` is ``stock``; with replicas, from the second iteration on, up to the order of sums."""
        if variant.settings.get("slots") == 0:
            worst = tiny_gpt.difference(stock, ours)
            assert worst == tiny_gpt.SAME and ours.grad_norms == stock.grad_norms
            return worst
        worst = tiny_gpt.assert_trained_alike(stock, ours, tolerance=self.tolerance)
        assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=self.tolerance)
        if variant.planner is None:
            assert (ours.losses[0], ours.grad_norms[0]) == (stock.losses[0], stock.grad_norms[0])
        has_backward = variant.settings.get("lifetime") == "layer" and self.shares_buffers
        assert self.fetches[False] > 0 and (self.fetches[True] > 0) == has_backward, self.fetches
        late = variant.settings.get("late_replicas", 0)
        metrics = layer_metrics(ours.chunks)
        assert all(m.late <= late and m.computed <= m.routed for m in metrics), metrics
        assert "lifetime" in variant.settings or not late or sum(m.late for m in metrics), metrics
        return worst
