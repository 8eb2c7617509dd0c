"""Spans. Oracle: what a viewer reads (Chrome's trace format) and what the same run does without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import ranks

from megatron_hecate.tools import trace

FORWARD = {"plan", "loads", "quotas", "dispatch", "experts", "combine", "spAG start", "spAG wait"}
BACKWARD = {"spRS start", "spRS wait"}


@pytest.mark.fast
def test_nobody_looks_and_nothing_is_done() -> None:
    with trace.span("plan", "layer 1") as seen:
        assert seen is None
    assert trace.span("plan", "layer 1") is trace.span("experts", "layer 2")
    assert not trace.Recorder.is_running()


@pytest.mark.fast
def test_one_recorder_at_a_time() -> None:
    with trace.Recorder(), pytest.raises(ValueError, match="a recorder runs already"), trace.Recorder():
        pass
    with trace.Recorder() as recorder, trace.span("plan", "layer 1"):
        pass
    assert [span[:2] for span in recorder.spans] == [("plan", "layer 1")]


@ranks(2)
def test_spans_of_a_step_in_a_recorder_and_in_the_profiler(tmp_path: Path) -> None:
    import tiny_gpt
    import torch
    import torch.distributed as dist

    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 4),))
    tiny_gpt.initialize(case)
    hook = tiny_gpt.fssdp_hook(lifetime="layer")
    silent = tiny_gpt.train(case, steps=4, hook=hook)
    run = tiny_gpt.train(case, steps=2, hook=hook)
    with trace.Recorder() as recorder:
        run.step(2)
        replicated = sum(layer.fssdp.replicas is not None for layer in tiny_gpt.moe_layers(run.chunks))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run.step(3)
    assert run.losses == silent.losses, "looking changes nothing"
    assert all(torch.equal(run.grads[name], silent.grads[name]) for name in silent.grads)

    layers = {f"layer {n}" for n in range(1, 5)}
    by_name: dict[str, list] = {}
    for what, layer, begin, end in recorder.spans:
        assert layer in layers and begin <= end
        by_name.setdefault(what, []).append((begin, end))
    assert by_name.keys() >= FORWARD | BACKWARD | {"spAG", "spRS", "experts backward", "attention backward"}
    assert len(by_name["plan"]) == 4 and len(by_name["experts"]) == 8
    assert replicated >= 2 and len(by_name["spRS"]) == 2 * replicated, "gradients return in every microbatch"
    waited = sum(end - begin for begin, end in by_name["spAG wait"])
    in_flight = sum(end - begin for begin, end in by_name["spAG"])
    assert waited < in_flight, "nothing was hidden"

    path = tmp_path / f"{dist.get_rank()}.json"
    recorder.save(path, rank=dist.get_rank())
    events = json.loads(path.read_text())["traceEvents"]
    named = [e for e in events if e["ph"] != "M"]
    assert {e["ph"] for e in named} == {"X", "b", "e"} and all(e["name"].startswith(trace.PREFIX) for e in named)
    assert all(e["pid"] == dist.get_rank() for e in events)
    begun = {e["id"]: e for e in named if e["ph"] == "b"}
    ended = {e["id"]: e for e in named if e["ph"] == "e"}
    assert begun.keys() == ended.keys() and all(begun[i]["ts"] <= ended[i]["ts"] for i in begun)
    assert len(begun) == len(by_name["spAG"]) + len(by_name["spRS"])

    profiled = {e.key for e in profiler.key_averages()}
    assert profiled >= {f"{trace.PREFIX}{what} layer 2" for what in FORWARD | BACKWARD}
