"""FSSDP with CUDA graphs of parts of the model: Megatron's and TransformerEngine's own capture code, over the emulator
of `graphs_on_cpu`, trains as stock Megatron without graphs does, with other replicas in every iteration.

Oracle: unconverted Megatron without graphs on the same ranks and data. The emulator replays without Python, on fixed
memory, and fails where a GPU's capture would.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flex_backends
import graphs_on_cpu
import pytest
import rehoming_hooks
import tiny_gpt
import tiny_hybrid
import torch
import torch.distributed as dist
import training_with_moves
from layouts import COMBINED, INTERLEAVED, SHARDED, SHARED_EXPERTS, Layout, balanced, flex
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest

SCOPES = ("attn", "moe_router", "moe_preprocess")
RECOMPUTED = dict(
    recompute_granularity="selective", recompute_modules=["layernorm", "core_attn", "moe_act"]
)
TWICE = dict(accumulate=2)
ROUTER = ("attn", "moe_router")
SHARED_AUX = balanced("aux_loss", **SHARED_EXPERTS)
# scopes of TransformerEngine's graphs, layouts, and settings of FSSDP
TRANSFORMER_ENGINE: dict[str, tuple[tuple[str, ...], Layout, dict]] = {
    "router-late": (ROUTER, Layout(2, SHARDED, {}), dict(late_replicas=4)),
    "router-alone": (("moe_router",), Layout(2, dict(accumulate=4), {}), dict(lifetime="layer")),
    "preprocess": (SCOPES, Layout(2, TWICE, {}), {}),
    "before-the-first-step": (SCOPES, Layout(2, TWICE, dict(cuda_graph_warmup_steps=0)), {}),
    "layer-recompute": (
        SCOPES,
        Layout(2, dict(TWICE, grouped=True), RECOMPUTED),
        dict(lifetime="layer"),
    ),
    "combined": (SCOPES, Layout(2, dict(accumulate=4), COMBINED), {}),
    "shared-aux": (("moe_router", "moe_preprocess"), Layout(2, SHARDED, SHARED_AUX), {}),
    "deepep": (SCOPES, Layout(2, TWICE, flex("deepep")), {}),
    "hybridep": (SCOPES, Layout(2, TWICE, flex("hybridep")), {}),
    "pp2-vpp2": (SCOPES, Layout(4, INTERLEAVED, {}), {}),
    "tp2": (SCOPES, Layout(4, dict(TWICE, tp=2), {}), {}),
}
# scopes of Megatron's own graphs, which capture parts of hybrid models only
HYBRID = {"hybrid": (ROUTER, "iteration"), "mamba-layer": (("mamba", "moe_preprocess"), "layer")}


def declare() -> None:
    """What must run for every microbatch, and so never inside a graph."""
    from graph_capture import not_in_graphs

    from megatron_hecate.step.prefetch import Prefetcher

    for name in ("before_attention", "materialize", "dispatched", "begin_chunk", "add_late"):
        not_in_graphs(Prefetcher, name)


class _Moving:
    """Other experts become hot after every second step, so the placement changes between replays."""

    def __init__(self) -> None:
        self.plans: list[tuple[bytes, ...]] = []  # of every step, tables by layer
        self.computed = torch.zeros(1)  # tokens that replicas of this rank computed so far
        self.tokens: list[int] = []  # the same before and after each step

    def hook(self, **settings: Any) -> Any:
        """FSSDP's hook, with tokens in replicas counted."""
        return tiny_gpt.counting_hook(tiny_gpt.fssdp_hook(**settings), self.computed)

    def __call__(self, chunks: list, step: int) -> None:
        layers = [layer for layer in tiny_gpt.moe_layers(chunks) if hasattr(layer, "fssdp")]
        self.plans.append(tuple(layer.fssdp.current.planned.table.tobytes() for layer in layers))
        total = self.computed.clone()
        dist.all_reduce(total)
        self.tokens.append(int(total))
        tiny_gpt.move_skew_sometimes(chunks, step)

    def assert_alike(self, stock: Any, ours: Any, *, eager_steps: int) -> None:
        """``ours`` is ``stock``; plans differ, and replicas compute, in replays, which follow ``eager_steps``."""
        tiny_gpt.assert_trained_alike(stock, ours)
        graphs_on_cpu.assert_replayed(at_least=1)
        assert len(set(self.plans[eager_steps:])) > 1, "the same replicas in all replays"
        before = self.tokens[eager_steps - 1] if eager_steps else 0
        assert self.tokens[-1] > before, f"no replica computed in a replay: {self.tokens}"


@pytest.mark.parametrize("name", quick(TRANSFORMER_ENGINE, ["router-late", "preprocess"]))
@ranks(lambda name: TRANSFORMER_ENGINE[name][1].num_ranks, preload="te")
def test_transformer_engines_graphs(name: str) -> None:
    scopes, layout, settings = TRANSFORMER_ENGINE[name]
    if "moe_flex_dispatcher_backend" in layout.model:
        flex_backends.install()
    case = tiny_gpt.initialized(**layout.case, settings=layout.model)
    stock = tiny_gpt.train(case, steps=5, before_step=_Moving())
    flex_backends.forget()
    graphs_on_cpu.install()
    declare()
    model = graphs_on_cpu.transformer_engine(*scopes, **layout.model)
    moving, eager_steps = _Moving(), layout.model.get("cuda_graph_warmup_steps", 2)
    ours = graphs_on_cpu.train(
        dataclasses.replace(case, settings=model),
        steps=5,
        eager_steps=eager_steps,
        hook=moving.hook(**settings),
        before_step=moving,
    )
    moving.assert_alike(stock, ours, eager_steps=eager_steps)


@pytest.mark.parametrize("name", quick(HYBRID, ["mamba-layer"]))
@ranks(2)
def test_megatrons_own_graphs(name: str) -> None:
    """They hold the router and the preprocessing, and what comes after the experts."""
    scopes, lifetime = HYBRID[name]
    tiny_hybrid.install("M*EM*E")
    case = tiny_gpt.initialized(accumulate=2, settings=dict(num_layers=6))
    stock = tiny_gpt.train(case, steps=5, before_step=_Moving())
    graphs_on_cpu.install()
    declare()
    model, moving = graphs_on_cpu.local(*scopes, **dict(case.settings)), _Moving()
    ours = tiny_gpt.train(
        dataclasses.replace(case, settings=model),
        steps=5,
        hook=moving.hook(lifetime=lifetime),
        before_step=moving,
    )
    moving.assert_alike(stock, ours, eager_steps=1)


@ranks(2, preload="te")
def test_without_replicas_nothing_differs() -> None:
    """Bitwise: no slots; then slots, where no copy pays. Evaluation in between runs without graphs."""

    case = tiny_gpt.initialized(accumulate=2)
    stock = tiny_gpt.train(case, steps=4)
    evaluated = stock.evaluate(0)
    graphs_on_cpu.install()
    declare()
    graphed = dataclasses.replace(case, settings=graphs_on_cpu.transformer_engine(*SCOPES))
    for settings in (dict(slots=0), dict(speeds=None)):
        ours = graphs_on_cpu.train(graphed, steps=4, hook=tiny_gpt.fssdp_hook(**settings))
        assert ours.replicas == 0 and tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
        assert ours.evaluate(0) == evaluated
        graphs_on_cpu.assert_replayed(at_least=4)
        graphs_on_cpu.delete_graphs()


@ranks(2)
def test_what_graphs_cannot_hold_is_refused() -> None:
    graphs_on_cpu.install()
    tiny_gpt.initialize(tiny_gpt.Case())
    padded = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    late = dict(late_replicas=2)
    transformer_engine = graphs_on_cpu.transformer_engine
    for model, settings, message in (
        (graphs_on_cpu.full_iteration(), {}, r"cuda_graph_impl='full_iteration': .*_impl=none"),
        (
            transformer_engine("moe", **padded),
            {},
            r"'transformer_engine': .*--cuda-graph-impl none",
        ),
        (
            transformer_engine(*SCOPES, **padded),
            {},
            r"moe_pad_expert_input_to_capacity=True: .*=false or leave out --moe-pad-expert-input",
        ),
        (graphs_on_cpu.local(), {}, r"cuda_graph_impl='local': .*set model.cuda_graph_impl=none"),
        (transformer_engine(*SCOPES), late, r"late_replicas=2: .*or --moe-fssdp-late-replicas 0"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_gpt.build(tiny_gpt.Case(settings=model), tiny_gpt.fssdp_hook(**settings))


@ranks(2, preload="te")
def test_homes_that_move_around_graphs() -> None:
    """Graphs of the router and of what comes before the experts are captured before homes move, and replayed after."""
    case = tiny_gpt.initialized(accumulate=2, optimizer=dict(clip_grad=0.0))
    stock = tiny_gpt.train(case, steps=8)
    graphs_on_cpu.install()
    declare()
    with_graphs = graphs_on_cpu.transformer_engine(*SCOPES)
    ours = graphs_on_cpu.train(
        dataclasses.replace(case, settings=with_graphs),
        steps=8,
        eager_steps=2,
        hook=rehoming_hooks.rehoming_hook(slots=0),
    )
    graphs_on_cpu.assert_replayed(at_least=1)
    training_with_moves.restore(ours)
    ours.grads = stock.grads
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
