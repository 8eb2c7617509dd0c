"""Spans. Oracle: the events of torch's profiler and what the same run does without them."""

from __future__ import annotations

import threading

import pytest
import torch
from ranks import ranks

from megatron_hecate import trace

FORWARD = {"plan", "loads", "quotas", "dispatch", "experts", "combine", "spAG start", "spAG wait"}
BACKWARD = {"spRS start", "spRS wait"}


@pytest.mark.fast
def test_nobody_looks_and_nothing_is_done() -> None:
    with trace.span("plan", "layer 1") as seen:
        assert seen is None
    assert trace.span("plan", "layer 1") is trace.span("experts", "layer 2")
    assert not trace.follows_transfers()


@pytest.mark.fast
def test_a_profiler_of_all_threads_shows_spans_of_each_thread() -> None:
    """As torch's debug server of a job starts it."""
    from torch._C._profiler import _ExperimentalConfig

    def run(layer: str) -> None:
        with trace.span("experts", layer):
            pass

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    ) as profiler:
        run("layer 1")
        thread = threading.Thread(target=run, args=("layer 2",))
        thread.start()
        thread.join()
    run("layer 3")
    shown = {event.key for event in profiler.key_averages()}
    assert shown == {"fssdp/experts layer 1", "fssdp/experts layer 2"}


@pytest.mark.fast
def test_one_recorder_at_a_time() -> None:
    with (
        trace.SpanRecorder(),
        pytest.raises(ValueError, match="a recorder runs already"),
        trace.SpanRecorder(),
    ):
        pass
    with trace.SpanRecorder() as recorder, trace.span("plan", "layer 1"):
        pass
    assert [span[:2] for span in recorder.spans] == [("plan", "layer 1")]


@ranks(2)
def test_spans_of_a_step_in_a_recorder_and_in_the_profiler() -> None:
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2, settings=(("num_layers", 4),))
    tiny_gpt.initialize(case)
    hook = tiny_gpt.fssdp_hook(lifetime="layer")
    silent = tiny_gpt.train(case, steps=4, hook=hook)
    run = tiny_gpt.train(case, steps=2, hook=hook)
    with trace.SpanRecorder() as recorder:
        run.step(2)
        replicated = sum(
            layer.fssdp.replicas is not None for layer in tiny_gpt.moe_layers(run.chunks)
        )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run.step(3)
    assert run.losses == silent.losses, "looking changes nothing"
    assert all(torch.equal(run.grads[name], silent.grads[name]) for name in silent.grads)

    layers = {f"layer {n}" for n in range(1, 5)}
    by_name: dict[str, list] = {}
    for what, layer, begin, end in recorder.spans:
        assert layer in layers and begin <= end
        by_name.setdefault(what, []).append((begin, end))
    assert by_name.keys() >= FORWARD | BACKWARD | {
        "spAG",
        "spRS",
        "experts backward",
        "attention backward",
    }
    assert len(by_name["plan"]) == 4 and len(by_name["experts"]) == 8
    assert replicated >= 2 and len(by_name["spRS"]) == 2 * replicated, (
        "gradients return in every microbatch"
    )
    waited = sum(end - begin for begin, end in by_name["spAG wait"])
    in_flight = sum(end - begin for begin, end in by_name["spAG"])
    assert waited < in_flight, "nothing was hidden"

    profiled = {e.key for e in profiler.key_averages()}
    assert profiled >= {f"{trace.PREFIX}{what} layer 2" for what in FORWARD | BACKWARD}
