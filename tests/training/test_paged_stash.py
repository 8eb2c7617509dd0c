"""Megatron's paged stash of experts' activations, by its own manager, over stand-ins of the kernels alone.

Oracle: the same training without a stash, bitwise, also as one CUDA graph of whole iterations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import budgeted
import flex_backends
import graphs_on_cpu
import joint_operators
import operators_on_cpu
import pytest
import stash_on_cpu
import tiny_gpt
from graph_capture import Graph
from layouts import COMBINED, DELAYED, FUSED_WGRAD, INTERLEAVED, MTP, SHARDED, flex, layers
from quick import quick
from ranks import ranks

pytestmark = pytest.mark.newest

# pages are allocated in the second step, which a graph may not hold
WARMUP = 2
# ranks, fields of the case, model settings, and the lifetime of replicas
CASES: dict[str, tuple[int, dict, dict, str]] = {
    "2 microbatches": (2, dict(accumulate=2), {}, "iteration"),
    "combined schedule": (2, dict(accumulate=4), COMBINED, "iteration"),
    "delayed": (2, dict(accumulate=4, **SHARDED), DELAYED, "iteration"),
    "lifetime layer": (2, dict(accumulate=2), layers(4), "layer"),
    "bf16 main gradients": (2, dict(accumulate=2, grad_reduce_in_fp32=False), {}, "iteration"),
    "MTP": (2, dict(accumulate=2), MTP, "iteration"),
    "PP 2, VPP 2": (4, dict(INTERLEAVED, **SHARDED), {}, "iteration"),
}


def _case(fields: dict, *, backend: str = "hybridep", **model: Any) -> Any:
    operators_on_cpu.install()
    flex_backends.install()
    joint_operators.install()
    stash_on_cpu.install()
    tiny_gpt.install_fused_wgrad()
    model |= dict(use_transformer_engine_op_fuser=True, **FUSED_WGRAD)
    settings = flex(backend) | dict(moe_expert_rank_capacity_factor=3.0) | model
    return tiny_gpt.initialized(bf16=True, grouped=True, settings=settings, **fields)


def _stashing(case: Any, factor: float = 3.0, host: float = 0.0) -> Any:
    """``case`` with pages for ``factor`` times the activations of balanced experts, and more on the ``host``."""
    stash = dict(moe_paged_stash=True, moe_paged_stash_page_size=8)
    stash |= dict(moe_paged_stash_buffer_size_factor_cuda=factor)
    stash |= dict(moe_paged_stash_buffer_size_factor_cpu=host)
    return dataclasses.replace(case, settings=dict(case.settings) | stash)


def _capturing(case: Any) -> Any:
    """``case``, of which Megatron captures iterations from now on."""
    graphs_on_cpu.install()
    graphs_on_cpu.whole_iterations(WARMUP)
    return dataclasses.replace(case, settings=graphs_on_cpu.full_iteration(**dict(case.settings)))


def _train(case: Any, hook: Any, *, steps: int = 6) -> tuple[Any, list[int], int]:
    """What was trained, the steps that were run again, and the number of stashed tensors."""
    flex_backends.forget()
    stash_on_cpu.forget()
    move = tiny_gpt.move_skew_sometimes
    run, again = budgeted.train(case, steps=steps, hook=hook, before_step=move)
    return run, again, len(stash_on_cpu.stashed)


@pytest.mark.parametrize("name", quick(CASES, ["2 microbatches"]))
@ranks(lambda name: CASES[name][0], preload="te-blackwell", timeout=600)
def test_stash(name: str) -> None:
    _, fields, model, lifetime = CASES[name]
    case = _case(fields, **model)
    hook = tiny_gpt.fssdp_hook(transport="nvlink", lifetime=lifetime)
    plain, again, stashed = _train(case, hook)
    assert plain.replicas and not again and not stashed
    for prepare in (_stashing, _capturing):
        case = prepare(case)
        run, again, stashed = _train(case, hook)
        assert stashed and not again and tiny_gpt.difference(plain, run) == tiny_gpt.SAME
    (graph,) = Graph.made
    assert graph.replays == 6 - WARMUP


@pytest.mark.slow
@ranks(2, preload="te-blackwell")
def test_nccl_ep_with_graphs_of_parts() -> None:
    """The stash then runs between graphs, which TransformerEngine captures after two steps."""
    case = _case(dict(accumulate=2), backend="ncclep", moe_ncclep_static_shape=True)
    hook = tiny_gpt.fssdp_hook()
    plain, _, _ = _train(case, hook)
    eager, again, stashed = _train(_stashing(case), hook)
    assert plain.replicas and tiny_gpt.difference(plain, eager) == tiny_gpt.SAME
    assert stashed and not again
    flex_backends.forget()
    stash_on_cpu.forget()
    graphs_on_cpu.install()
    parts = ("attn", "moe_router", "moe_preprocess")
    settings = graphs_on_cpu.transformer_engine(*parts, **dict(_stashing(case).settings))
    graphed = graphs_on_cpu.train(
        dataclasses.replace(case, settings=settings),
        steps=6,
        eager_steps=2,
        hook=hook,
        before_step=tiny_gpt.move_skew_sometimes,
    )
    graphs_on_cpu.assert_replayed(at_least=1)
    assert stash_on_cpu.stashed and tiny_gpt.difference(plain, graphed) == tiny_gpt.SAME


@ranks(2, preload="te-blackwell", timeout=600)
def test_pages_run_out() -> None:
    """Such steps are run again without stash and graph. With replicas pages suffice more often."""
    case = _stashing(_case(dict(accumulate=2)), 0.75)
    hook = tiny_gpt.fssdp_hook(transport="nvlink")
    _, stock_again, _ = _train(case, None, steps=9)
    eager, eager_again, _ = _train(case, hook, steps=9)
    graphed, graphed_again, _ = _train(_capturing(case), hook, steps=9)
    assert eager.replicas and tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME
    assert stock_again == [1, 4, 5, 6, 7, 8] and eager_again == graphed_again == [4, 6, 8]
    assert len(Graph.made) > 1, "captured anew"


@ranks(2, preload="te-blackwell", timeout=600)
def test_pages_of_the_host() -> None:
    """They hold what the GPU's pages do not, as in recipes, so that no step is run again."""
    case = _case(dict(accumulate=2))
    hook = tiny_gpt.fssdp_hook(transport="nvlink")
    plain, _, _ = _train(case, hook, steps=9)
    case = _stashing(case, 0.75, host=2.0)
    for prepare in (dataclasses.replace, _capturing):
        run, again, stashed = _train(prepare(case), hook, steps=9)
        assert not again and tiny_gpt.difference(plain, run) == tiny_gpt.SAME
        assert 0 < len(stash_on_cpu.spilled) < stashed
    (graph,) = Graph.made
    assert graph.replays == 9 - WARMUP
