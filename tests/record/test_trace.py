"""Spans. Oracle: the events of torch's profiler and what the same run does without them."""

from __future__ import annotations

import threading

import pytest
import tiny_gpt
import torch
from ranks import ranks
from torch._C._profiler import _ExperimentalConfig

from megatron_hecate import trace

FORWARD = {"plan", "loads", "quotas", "spAG start", "spAG wait"}
BACKWARD = {"spRS start", "spRS wait"}


@pytest.mark.fast
def test_nobody_looks_and_nothing_is_done() -> None:
    with trace.span("plan", "layer 1") as seen:
        assert seen is None
    assert trace.span("plan", "layer 1") is trace.span("quotas", "layer 2")


@pytest.mark.fast
def test_a_profiler_of_all_threads_shows_spans_of_each_thread() -> None:
    """As torch's debug server of a job starts it."""

    def run(layer: str) -> None:
        with trace.span("quotas", layer):
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
    assert shown == {"fssdp/quotas layer 1", "fssdp/quotas layer 2"}


@ranks(2)
def test_spans_of_a_step() -> None:
    case = tiny_gpt.initialized(accumulate=2, settings=(("num_layers", 4),))
    hook = tiny_gpt.fssdp_hook(lifetime="layer")
    silent = tiny_gpt.train(case, steps=3, hook=hook)
    run = tiny_gpt.train(case, steps=2, hook=hook)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run.step(2)
    assert run.losses == silent.losses, "looking changes nothing"
    assert all(torch.equal(run.grads[name], silent.grads[name]) for name in silent.grads)
    counts = {event.key: event.count for event in profiler.key_averages()}
    layers = tiny_gpt.moe_layers(run.chunks)
    replicated = [layer for layer in layers if layer.fssdp.current.replicas is not None]
    assert len(replicated) >= 2
    for layer in layers:
        assert counts[f"{trace.PREFIX}plan {layer.fssdp.name}"] == 1
    for layer in replicated:
        for what in FORWARD | BACKWARD:
            assert counts[f"{trace.PREFIX}{what} {layer.fssdp.name}"] >= 1, what
        assert counts[f"{trace.PREFIX}quotas {layer.fssdp.name}"] == 2, "one in each microbatch"
        # gradients return in every microbatch
        assert counts[f"{trace.PREFIX}spRS start {layer.fssdp.name}"] == 2
