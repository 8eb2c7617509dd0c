"""Spans. Oracle: what a viewer reads (Chrome's trace format) and what the same run does without them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from ranks import ranks
from trace_viewer import assert_a_viewer_shows_all

from megatron_hecate import trace

FORWARD = {"plan", "loads", "quotas", "dispatch", "experts", "combine", "spAG start", "spAG wait"}
BACKWARD = {"spRS start", "spRS wait"}


@pytest.mark.fast
def test_nobody_looks_and_nothing_is_done() -> None:
    with trace.span("plan", "layer 1") as seen:
        assert seen is None
    assert trace.span("plan", "layer 1") is trace.span("experts", "layer 2")
    assert not trace.SpanRecorder.is_running()


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


@pytest.mark.fast
def test_spans_that_overlap_go_to_tracks_of_their_own(tmp_path: Path) -> None:
    """Three fetches at once, two that follow each other, nested work and work of two threads that crosses."""
    recorder = trace.SpanRecorder()
    fetches = [(0.0, 3.0), (1.0, 3.0), (1.0, 3.0), (3.0, 4.0), (4.0, 4.0)]
    work = [(0.0, 2.0), (0.5, 1.0), (0.5, 2.0), (1.5, 2.5), (2.0, 2.2), (2.5, 2.5)]
    for kind, spans in (
        ("spAG", fetches),
        ("experts", work),
        ("iteration", [(0.0, 1.5), (1.5, 4.0)]),
    ):
        for begin, end in spans:
            recorder.add(kind, "layer 1", begin, end)
    for rank in (0, 1):
        recorder.save(tmp_path / f"trace-{rank}.json", rank=rank, shift=1.8e9 + 1 / 3)
    merged = trace.merge(tmp_path)
    assert merged is not None
    events = json.loads(merged.read_text())["traceEvents"]
    assert_a_viewer_shows_all(events)
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert sorted(tracks) == ["iteration", "spAG", "spAG", "spAG", "work", "work"]
    for rank in (0, 1):
        kept = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert sorted(e["dur"] for e in kept if "spAG" in e["name"]) == pytest.approx(
            [0, 1e6, 2e6, 2e6, 3e6], abs=1
        )
        assert len(kept) == len(recorder.spans)


@pytest.mark.fast
def test_traces_of_a_former_larger_job_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Ranks 0 to 3 of yesterday, 0 and 1 of today; and a file that says nothing of its job."""
    jobs = {"2026-11-23T10:00:00+00:00": range(4), "2026-11-24T09:00:00+00:00": range(2)}
    for job, of_job in jobs.items():
        for rank in of_job:
            kept = trace.Iterations((1, 1), tmp_path, rank=rank, shift=0.0, job=job)
            kept.begin(1)
            kept.begin(2)
    (tmp_path / "trace-9.json").write_text('{"traceEvents": [{"pid": 9}]}')
    merged = trace.merge(tmp_path)
    assert merged is not None
    assert {e["pid"] for e in json.loads(merged.read_text())["traceEvents"]} == {0, 1}
    said = capsys.readouterr().err
    assert "before that of 2026-11-24T09:00:00+00:00" in said
    assert said.rstrip().endswith("trace-2.json, trace-3.json, trace-9.json")


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"traceEvents": 3}'])
def test_a_file_that_is_no_trace_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace-0.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"trace-0\.json is no trace that FSSDP wrote .* remove it"
    ):
        trace.merge(tmp_path)


@ranks(2)
def test_spans_of_a_step_in_a_recorder_and_in_the_profiler(tmp_path: Path) -> None:
    import tiny_gpt
    import torch.distributed as dist

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

    path = tmp_path / f"{dist.get_rank()}.json"
    recorder.save(path, rank=dist.get_rank())
    events = json.loads(path.read_text())["traceEvents"]
    named = [e for e in events if e["ph"] != "M"]
    assert {e["ph"] for e in named} == {"X"} and all(
        e["name"].startswith(trace.PREFIX) for e in named
    )
    assert all(e["pid"] == dist.get_rank() for e in events)
    assert len(named) == len(recorder.spans)
    assert_a_viewer_shows_all(events)

    profiled = {e.key for e in profiler.key_averages()}
    assert profiled >= {f"{trace.PREFIX}{what} layer 2" for what in FORWARD | BACKWARD}
