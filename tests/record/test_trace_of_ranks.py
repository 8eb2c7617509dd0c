"""Chosen iterations of all ranks on one timeline. Oracle: causality, and clocks that we set wrong ourselves."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import ranks
from trace_viewer import assert_a_viewer_shows_all

from megatron_hecate import HecateConfig, trace
from megatron_hecate.record import tracing


@pytest.mark.fast
@pytest.mark.parametrize("text", ["", "a", "3-2", "1-2-3", "-4", "1,2"])
def test_iterations_are_named_or_it_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must name iterations, from 1 on, such as 10-12"):
        HecateConfig(trace=text)


@pytest.mark.fast
def test_flags_name_the_iterations() -> None:
    import argparse

    parser = HecateConfig.add_arguments(argparse.ArgumentParser())
    asked = HecateConfig.from_arguments(
        parser.parse_args(["--moe-fssdp", "--moe-fssdp-trace", "10-12"])
    )
    assert asked == HecateConfig(trace="10-12") and asked.traced == (10, 12)
    assert HecateConfig(trace="7").traced == (7, 7) and HecateConfig().traced is None
    with pytest.raises(ValueError, match="trace='7' traces FSSDP, which observe=True leaves off"):
        HecateConfig(trace="7", observe=True)


@ranks(3)
def test_clocks_of_machines_that_are_apart_are_put_together() -> None:
    """Ranks 0 and 1 are on one machine, rank 2 is on another, whose clock we set wrong."""
    rank, right = dist.get_rank(), time.time() - time.perf_counter()
    wrong, clock = (0.0, 0.0, 1234.5)[rank], time.perf_counter
    store = dist.TCPStore("127.0.0.1", _port(rank), 3, is_master=rank == 0)
    with mock.patch.object(time, "perf_counter", lambda: clock() + wrong):
        shift = tracing.to_rank_0(store, rank, 3, timeout=30, host="ab"[rank == 2])
    assert abs(shift + wrong - right) < 0.05, (shift, right)
    dist.barrier()


def _port(rank: int) -> int:
    told = Path(os.environ["TEST_FOLDER"], "port")
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            told.write_text(str(probe.getsockname()[1]))
    dist.barrier()
    return int(told.read_text())


@pytest.mark.fast
def test_a_rank_that_does_not_compare_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.2 s for rank 1 to compare clocks"):
        tracing.to_rank_0(store, 0, 2, timeout=0.2, host="a")
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s for rank 0 to compare clocks"):
        tracing.to_rank_0(dist.HashStore(), 1, 2, timeout=0.2, host="a")


@pytest.mark.fast
def test_chosen_iterations_alone_and_a_disk_that_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    kept = trace.Iterations((2, 3), tmp_path / "new" / "run", rank=1, shift=100.0)
    begin = time.perf_counter()
    for number in (1, 2, 3, 4):
        kept.begin(number)
        with trace.span("plan", f"layer {number}"):
            pass
    events = json.loads((tmp_path / "new" / "run" / "trace-1.json").read_text())["traceEvents"]
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert spans.keys() == {
        "fssdp/plan layer 2",
        "fssdp/plan layer 3",
        "fssdp/iteration 2",
        "fssdp/iteration 3",
    }
    assert all(0 <= e["ts"] / 1e6 - 100.0 - begin < 5 for e in spans.values()), "shifted seconds"
    assert not trace.SpanRecorder.is_running()

    (tmp_path / "file").write_text("")
    refused = trace.Iterations((1, 1), tmp_path / "file", rank=0, shift=0.0)
    refused.begin(None)
    refused.begin(None)
    assert (
        "rank 0 cannot write its trace" in capsys.readouterr().err
        and not trace.SpanRecorder.is_running()
    )

    with trace.SpanRecorder() as own:  # the user's goes on
        other = trace.Iterations((1, 1), tmp_path / "none", rank=0, shift=0.0)
        other.begin(1)
        with trace.span("plan", "layer 1"):
            pass
        other.begin(2)
    assert len(own.spans) == 1 and not (tmp_path / "none").exists()
    assert trace.merge(tmp_path / "none") is None


@ranks(2)
def test_both_ranks_see_a_transfer_at_the_same_time() -> None:
    """What each rank needs of the other one, it has only after that one began: an exchange of loads overlaps on both.
    A fetch or return overlaps too, unless its sender had it off its hands at once; and none of an iteration ends after
    one of the next began, since gradients are summed in between."""
    import tiny_gpt

    os.chdir(os.environ["TEST_FOLDER"])
    case = tiny_gpt.Case(settings=(("num_layers", 2),))
    tiny_gpt.initialize(case)
    tiny_gpt.train(case, steps=6, hook=tiny_gpt.fssdp_hook(trace="3-4"))
    dist.barrier()
    if dist.get_rank():
        return
    written = [json.loads(Path("fssdp-run", f"trace-{rank}.json").read_text()) for rank in (0, 1)]
    (job,) = {trace["otherData"]["job"] for trace in written}
    assert datetime.fromisoformat(job) < datetime.now(UTC)
    merged = trace.merge("fssdp-run")
    assert merged == Path("fssdp-run/trace.json")
    events = json.loads(merged.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["name"] for e in events if "iteration" in e["name"]} == {
        "fssdp/iteration 3",
        "fssdp/iteration 4",
    }
    assert_a_viewer_shows_all(events)
    spans: dict[str, dict[int, list]] = {}  # (begin, end) by name and rank
    complete = [e for e in events if e["ph"] == "X"]
    for event in complete:
        of_rank = spans.setdefault(event["name"], {}).setdefault(event["pid"], [])
        of_rank.append((event["ts"], event["ts"] + event["dur"]))
    overlaps: dict[str, list[bool]] = {}
    for name, of_rank in spans.items():
        kind = name.removeprefix("fssdp/").split()[0]
        assert of_rank.keys() == {0, 1} and len(of_rank[0]) == len(of_rank[1]), (name, of_rank)
        pairs = list(zip(sorted(of_rank[0]), sorted(of_rank[1]), strict=True))
        overlaps.setdefault(kind, []).extend(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)
        if (
            name.split(" ")[0].endswith(("/spAG", "/spRS"))
            and "layer" in name
            and len(name.split()) == 3
        ):
            third, fourth = pairs
            assert max(end for _, end in third) < min(begin for begin, _ in fourth), (name, of_rank)
    assert len(overlaps["loads"]) == 4 and all(overlaps["loads"]), spans
    assert any(overlaps["spAG"]) and {"spAG", "spRS"} <= overlaps.keys(), spans
    now = time.time()
    assert all(now - 120 < e["ts"] / 1e6 < now + 1 for e in complete), "unix time"
