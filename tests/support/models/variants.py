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
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import planners
import training_with_moves
from layouts import TWICE, Layout

STEPS = 3


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
    case, prepare = _case_of(layout)
    import tiny_gpt

    if any(VARIANTS[variant].moves_homes for variant in layout.names):
        case = training_with_moves.unclipped(case)
    stock = tiny_gpt.train(case, steps=STEPS, hook=prepare)
    # Quantized parameters share their bytes with their clones: their values stay what they are now.
    short = dataclasses.replace(
        stock,
        losses=stock.losses.copy(),
        grad_norms=stock.grad_norms.copy(),
        grads=stock.grads.copy(),
        params={name: p.double() for name, p in stock.params.items()},
    )
    moved = None
    if any(variant.moves_homes for variant in variants.values()):
        moved = training_with_moves.MovedHomes.against(
            stock,
            case=case,
            prepare=prepare,
            tolerance=tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5,
        )
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
            if TWICE.get(name) == label:
                again = train(**variant.settings)
                assert tiny_gpt.difference(ours, again) == tiny_gpt.SAME, "two runs differ"
    return worst


def _case_of(layout: Layout) -> tuple[Any, Callable[[list], list]]:
    """The initialized case of a layout, and what is done with each of its models before FSSDP comes."""
    if layout.recipe == "unquantized":
        import te_on_cpu

        te_on_cpu.install()
    elif layout.recipe:
        import quantized

        case = quantized.case_of(layout.recipe, layout.case, layout.model, stored=layout.is_stored)
        return case, quantized.fuse_wgrad
    import tiny_gpt

    case = tiny_gpt.Case(
        **layout.case, grouped=bool(layout.recipe), settings=tuple(layout.model.items())
    )
    tiny_gpt.initialize(case)
    if "gradient_accumulation_fusion" in layout.model:
        tiny_gpt.install_fused_wgrad()
    return case, lambda chunks: chunks


def _tolerance(case: Any, layout: Layout) -> float:
    """Of bf16 where activations are rounded to it: stored experts multiply decoded weights, and add biases in bf16."""
    import tiny_gpt

    if not case.bf16 or (layout.is_stored and "add_bias_linear" not in layout.model):
        return 1e-5
    return tiny_gpt.BF16_TOLERANCE


@contextlib.contextmanager
def _planned_by(planner: Callable | None) -> Iterator[None]:
    from megatron_hecate.step.early_plans import EarlyPlans

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
        import tiny_gpt
        import torch

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
        """``ours`` is ``stock``; with replicas, up to the order of sums."""
        import pytest
        import tiny_gpt

        from megatron_hecate.record.metrics import layer_metrics

        if variant.settings.get("slots") == 0:
            worst = tiny_gpt.difference(stock, ours)
            assert worst == tiny_gpt.SAME and ours.grad_norms == stock.grad_norms
            return worst
        worst = tiny_gpt.assert_trained_alike(stock, ours, tolerance=self.tolerance)
        assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=self.tolerance)
        has_backward = variant.settings.get("lifetime") == "layer" and self.shares_buffers
        assert self.fetches[False] > 0 and (self.fetches[True] > 0) == has_backward, self.fetches
        late = variant.settings.get("late_replicas", 0)
        metrics = layer_metrics(ours.chunks)
        assert all(m.late <= late and m.computed <= m.routed for m in metrics), metrics
        assert "lifetime" in variant.settings or not late or sum(m.late for m in metrics), metrics
        return worst
