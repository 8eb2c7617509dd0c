"""Routes as indices of experts, as newer routers return them for the dispatcher ``flex``. Oracle: stock Megatron, whose
router returns a map and whose managers read maps, over the same libraries."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import dense_routes
import flex_backends
import graphs_on_cpu
import pytest
import tiny_gpt
from layouts import flex
from quick import quick
from ranks import ranks
from routed_tokens import recorded_run

from megatron_hecate import HecateConfig, fssdp

pytestmark = pytest.mark.newest

RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
ETP, LATE = dict(tp=2, etp=2), dict(late_replicas=4, lifetime="layer")
# settings of the model, fields of the case, settings of FSSDP
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "deepep": (flex("deepep"), {}, {}),
    "hybridep": (flex("hybridep"), dict(accumulate=2), dict(lifetime="layer")),
    "ncclep": (flex("ncclep"), {}, {}),
    "most-experts": (flex("hybridep", moe_router_topk=6), {}, {}),
    "one-expert": (flex("deepep"), dict(one_expert=True), {}),
    "late": (flex("deepep"), dict(accumulate=2), LATE),
    "recomputed": (flex("hybridep", **RECOMPUTED), {}, {}),
    "bf16": (flex("hybridep"), dict(bf16=True), {}),
    **{
        f"{backend}-tp2-etp2": (flex(backend), ETP, {})
        for backend in ("deepep", "hybridep", "ncclep")
    },
}


@pytest.mark.parametrize("name", quick(CASES, ["deepep", "hybridep", "ncclep"]))
@ranks(lambda name: 2 * CASES[name][1].get("tp", 1))
def test_indices_train_as_maps(name: str) -> None:
    """With replicas, then in evaluation, then without slots. HybridEP's tokens include padding."""
    model, fields, settings = CASES[name]
    flex_backends.install()
    case = tiny_gpt.initialized(**fields, settings=flex_backends.valid(model))
    has_padding = model["moe_flex_dispatcher_backend"] == "hybridep"
    if has_padding:
        dense_routes.pad(every=5)
    stock = tiny_gpt.train(case)
    evaluated = stock.evaluate(7)
    flex_backends.forget()
    dense_routes.install()
    tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(**settings))
    tiny_gpt.assert_trained_alike(stock, ours, tolerance=tolerance)
    assert ours.evaluate(7) == pytest.approx(evaluated, abs=tolerance)
    choices, padding = dense_routes.RECEIVED.tolist()
    assert choices > 0 and (padding > 0) == has_padding
    flex_backends.forget()
    without = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(slots=0))
    worst = tiny_gpt.difference(stock, without)
    assert max(worst["loss"], worst["grad"]) <= tolerance, worst


@ranks(2)
def test_indices_are_observed_as_maps() -> None:
    flex_backends.install()
    dense_routes.pad(every=5)
    case, loads = tiny_gpt.initialized(settings=flex("hybridep")), []
    for form in ("maps", "indices"):
        folder = f"{os.environ['TEST_FOLDER']}/{form}"
        run = tiny_gpt.train(case, hook=fssdp(HecateConfig(observe=True, record=folder)))
        loads.append(recorded_run(run.chunks, folder).load.tolist())
        flex_backends.forget()
        dense_routes.install()
    assert loads[0] == loads[1]


@ranks(2)
def test_probabilities_of_chosen_experts_alone_are_refused() -> None:
    """As Megatron's router for inference returns them."""
    flex_backends.install()
    case = tiny_gpt.initialized(settings=flex("deepep"))
    chunks, config = tiny_gpt.build(case, tiny_gpt.fssdp_hook())
    for layer in tiny_gpt.moe_layers(chunks):
        routed = layer.router.forward
        layer.router.forward = lambda *args, routed=routed: routed(*args)[0].topk(2, dim=1)
    chunks, _ = tiny_gpt.wrap(case, chunks, config)
    message = r"torch.int64 \[32, 2\], and probabilities \[32, 2\]; FSSDP reads .* of 8 experts"
    with pytest.raises(ValueError, match=message):
        tiny_gpt.run(case, chunks, 0, num_microbatches=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@ranks(2, preload="te")
def test_indices_in_cuda_graphs(backend: str) -> None:
    """The graph holds the rerouting; other experts become hot between its replays."""
    flex_backends.install()
    case = tiny_gpt.initialized(accumulate=2, settings=flex(backend))
    moving = dict(steps=5, before_step=tiny_gpt.move_skew_sometimes)
    stock = tiny_gpt.train(case, **moving)
    flex_backends.forget()
    dense_routes.install()
    graphs_on_cpu.install()
    scopes = ("attn", "moe_router", "moe_preprocess")
    model = graphs_on_cpu.transformer_engine(*scopes, **flex(backend))
    graphed = dataclasses.replace(case, settings=model)
    ours = graphs_on_cpu.train(graphed, eager_steps=2, hook=tiny_gpt.fssdp_hook(), **moving)
    tiny_gpt.assert_trained_alike(stock, ours)
    graphs_on_cpu.assert_replayed(at_least=1)
