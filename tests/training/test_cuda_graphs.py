"""FSSDP with CUDA graphs of parts of the model: Megatron's and TransformerEngine's own capture code, over the emulator
of `graphs_on_cpu`, trains as stock Megatron without graphs does, with other replicas in every iteration.

Oracle: unconverted Megatron without graphs on the same ranks and data. The emulator replays without Python, on fixed
memory, and fails where a GPU's capture would.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphed import SCOPES, declare
from layouts import SHARDED
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest

RECOMPUTED = dict(
    recompute_granularity="selective", recompute_modules=["layernorm", "core_attn", "moe_act"]
)
TRANSFORMER_ENGINE = {  # scopes, fields of Case, fields of TransformerConfig, settings of FSSDP
    "attn": (("attn",), {}, {}, {}),
    "moe_router-late": (
        ("attn", "moe_router"),
        SHARDED,
        {},
        dict(late_replicas=4),
    ),
    "router-alone": (("moe_router",), dict(accumulate=4), {}, dict(lifetime="layer")),
    "preprocess": (SCOPES, {}, {}, {}),
    "preprocess-before-the-first-step": (SCOPES, {}, dict(cuda_graph_warmup_steps=0), {}),
    "preprocess-layer-recompute": (SCOPES, dict(grouped=True), RECOMPUTED, dict(lifetime="layer")),
    "preprocess-combined": (
        SCOPES,
        dict(accumulate=4),
        dict(overlap_moe_expert_parallel_comm=True),
        {},
    ),
    "preprocess-shared-aux-bf16": (
        ("moe_router", "moe_preprocess"),
        SHARDED,
        dict(
            moe_shared_expert_intermediate_size=32,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
        ),
        {},
    ),
}

QUICK = "moe_router-late preprocess"  # in `make test`


class _Moving:
    """Other experts become hot after every second step, so the placement changes between replays."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, ...]] = []  # of every step, fingerprints by layer
        self.computed = torch.zeros(1)  # tokens that replicas of this rank computed so far
        self.tokens: list[int] = []  # the same before and after each step

    def hook(self, **settings: Any) -> Any:
        """FSSDP's hook, with tokens in replicas counted."""
        import tiny_gpt

        return tiny_gpt.counting_hook(tiny_gpt.fssdp_hook(**settings), self.computed)

    def __call__(self, chunks: list, step: int) -> None:
        import tiny_gpt

        layers = [layer for layer in tiny_gpt.moe_layers(chunks) if hasattr(layer, "fssdp")]
        self.plans.append(tuple(layer.fssdp.planned.fingerprint for layer in layers))
        total = self.computed.clone()
        dist.all_reduce(total)
        self.tokens.append(int(total))
        tiny_gpt.move_skew_sometimes(chunks, step)

    def assert_changed(self, after: int) -> None:
        """Plans differ, and replicas compute, in the steps that come ``after`` so many."""
        assert len(set(self.plans[after:])) > 1, "the same replicas in all replays"
        before = self.tokens[after - 1] if after else 0
        assert self.tokens[-1] > before, f"no replica computed in a replay: {self.tokens}"


def _assert_alike(stock: Any, ours: Any, moving: _Moving, *, eager_steps: int) -> None:
    import graphs_on_cpu
    import tiny_gpt

    tiny_gpt.assert_trained_alike(stock, ours)
    graphs_on_cpu.assert_replayed(at_least=1)
    moving.assert_changed(after=eager_steps)


@pytest.mark.parametrize("name", quick(TRANSFORMER_ENGINE, QUICK.split()))
@ranks(2, preload="te")
def test_transformer_engines_graphs(name: str) -> None:
    import te_on_cpu

    te_on_cpu.install()
    import graphs_on_cpu
    import tiny_gpt

    scopes, fields, settings, asked = TRANSFORMER_ENGINE[name]
    case = tiny_gpt.Case(**dict(dict(accumulate=2), **fields), settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=5, before_step=_Moving())
    graphs_on_cpu.install()
    declare()
    graphed = dataclasses.replace(
        case, settings=graphs_on_cpu.transformer_engine(*scopes, **settings)
    )
    moving = _Moving()
    hook = moving.hook(**asked)
    eager_steps = min(2, settings.get("cuda_graph_warmup_steps", 2))
    ours = graphs_on_cpu.train(
        graphed, steps=5, eager_steps=eager_steps, hook=hook, before_step=moving
    )
    _assert_alike(stock, ours, moving, eager_steps=eager_steps)


@pytest.mark.parametrize("name", quick(["hybrid", "mamba-layer"], ["mamba-layer"]))
@ranks(2)
def test_megatrons_own_graphs(name: str) -> None:
    """They hold the router and the preprocessing, and what comes after the experts."""
    import graphs_on_cpu
    import tiny_gpt
    import tiny_hybrid

    scopes, lifetime = {
        "hybrid": (("attn", "moe_router"), "iteration"),
        "mamba-layer": (("mamba", "moe_preprocess"), "layer"),
    }[name]
    tiny_hybrid.install("M*EM*E")
    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 6),))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=5, before_step=_Moving())
    graphs_on_cpu.install()
    declare()
    graphed = dataclasses.replace(
        case, settings=graphs_on_cpu.local(*scopes, **dict(case.settings))
    )
    moving = _Moving()
    hook = moving.hook(lifetime=lifetime)
    ours = tiny_gpt.train(graphed, steps=5, hook=hook, before_step=moving)
    _assert_alike(stock, ours, moving, eager_steps=1)


@pytest.mark.parametrize(
    "scopes", [pytest.param(("attn", "moe_router"), marks=pytest.mark.slow), SCOPES], ids="-".join
)
@ranks(2, preload="te")
def test_without_replicas_nothing_differs(scopes: tuple[str, ...]) -> None:
    """Bitwise: no slots; then slots, where no copy pays. Evaluation in between runs without graphs."""
    import te_on_cpu

    te_on_cpu.install()
    import graphs_on_cpu
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=4)
    tokens_of_evaluation = 2
    evaluated = _evaluate(case, stock, tokens_of_evaluation)
    graphs_on_cpu.install()
    declare()
    graphed = dataclasses.replace(case, settings=graphs_on_cpu.transformer_engine(*scopes))
    for asked in (dict(slots=0), dict(speeds=None)):
        ours = graphs_on_cpu.train(graphed, steps=4, hook=tiny_gpt.fssdp_hook(**asked))
        assert ours.replicas == 0 and tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
        assert _evaluate(case, ours, tokens_of_evaluation) == evaluated
        graphs_on_cpu.assert_replayed(at_least=4)
        graphs_on_cpu.delete_graphs()


def _evaluate(case: Any, trained: Any, num_microbatches: int) -> float:
    import tiny_gpt

    with tiny_gpt.evaluating(trained.chunks):
        return tiny_gpt.run(
            case, trained.chunks, 100, num_microbatches=num_microbatches, forward_only=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@ranks(2, preload="te")
def test_flex_dispatchers(backend: str) -> None:
    import te_on_cpu

    te_on_cpu.install()
    import flex_backends

    flex_backends.install()
    import graphs_on_cpu
    import tiny_gpt
    from megatron.core.transformer.moe import fused_a2a

    settings = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    case = tiny_gpt.Case(accumulate=2, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=5, before_step=_Moving())
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = (
        None  # one per process, of the model that came first
    )
    graphs_on_cpu.install()
    declare()
    graphed = dataclasses.replace(
        case, settings=graphs_on_cpu.transformer_engine(*SCOPES, **settings)
    )
    moving = _Moving()
    hook = moving.hook()
    ours = graphs_on_cpu.train(graphed, steps=5, eager_steps=2, hook=hook, before_step=moving)
    _assert_alike(stock, ours, moving, eager_steps=2)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(pp=2), marks=pytest.mark.slow),
        pytest.param(dict(pp=2, vpp=2, accumulate=4), marks=pytest.mark.slow),
        pytest.param(dict(tp=2), marks=pytest.mark.slow),
    ],
    ids=["pp2", "vpp2", "tp2"],
)
@ranks(4, preload="te")
def test_four_ranks(layout: dict[str, int]) -> None:
    import te_on_cpu

    te_on_cpu.install()
    import graphs_on_cpu
    import tiny_gpt

    case = tiny_gpt.Case(**dict(dict(accumulate=2), **layout))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=5, before_step=_Moving())
    graphs_on_cpu.install()
    declare()
    graphed = dataclasses.replace(case, settings=graphs_on_cpu.transformer_engine(*SCOPES))
    moving = _Moving()
    hook = moving.hook()
    ours = graphs_on_cpu.train(graphed, steps=5, eager_steps=2, hook=hook, before_step=moving)
    _assert_alike(stock, ours, moving, eager_steps=2)


@ranks(2)
def test_what_graphs_cannot_hold_is_refused() -> None:
    import graphs_on_cpu
    import tiny_gpt

    graphs_on_cpu.install()
    tiny_gpt.initialize(tiny_gpt.Case())
    for settings, message in (
        (
            graphs_on_cpu.full_iteration(),
            r"cuda_graph_impl='full_iteration': .*set model.cuda_graph_impl=none",
        ),
        (
            graphs_on_cpu.transformer_engine(
                "moe", moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
            ),
            r"cuda_graph_impl='transformer_engine': .*--cuda-graph-impl none",
        ),
        (
            graphs_on_cpu.transformer_engine(
                *SCOPES, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
            ),
            r"moe_pad_expert_input_to_capacity=True: .*=false or leave out --moe-pad-expert-input-to-capacity",
        ),
        (graphs_on_cpu.local(), r"cuda_graph_impl='local': .*set model.cuda_graph_impl=none"),
    ):
        case = tiny_gpt.Case(settings=settings)
        with pytest.raises(ValueError, match=message):
            tiny_gpt.build(case, tiny_gpt.fssdp_hook())
    late = tiny_gpt.Case(settings=graphs_on_cpu.transformer_engine(*SCOPES))
    with pytest.raises(
        ValueError, match=r"moe_fssdp_late_replicas=2: .*or --moe-fssdp-late-replicas 0"
    ):
        tiny_gpt.build(late, tiny_gpt.fssdp_hook(late_replicas=2))
