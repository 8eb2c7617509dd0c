"""What if: the recommendation, and the command as a user calls it.

Oracles: that skew which anybody would treat is recommended for, and balance is not; messages that name the way out. A
wrong recommendation costs a user weeks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hecate.__main__ import main
from megatron_hecate.config import HecateConfig
from megatron_hecate.plan import H100, LayerShape, Link
from megatron_hecate.record import run_writer
from megatron_hecate.record.run_folder import RunInfo
from megatron_hecate.record.run_writer import RunWriter
from megatron_hecate.replicas.memory_estimate import ExpertMemory
from megatron_hecate.tools.recommendation import recommend
from megatron_hecate.tools.replay import Outcome
from megatron_hecate.tools.step_model import PARTS

pytestmark = pytest.mark.fast

SMALL = "olmoe,experts=16,layers=4"
BASE = ("--model", SMALL, "--cluster", "h100x8", "--ranks", "8", "--steps", "4")


def skewed(path: Path, *, hot: int, sources: int = 8) -> str:
    """8 steps, 2 layers, 16 experts; expert 0 gets ``hot`` times as many tokens as the others."""
    share = np.ones(16)
    share[0] = hot
    counts = np.random.default_rng(1).multinomial(40_000, share / share.sum(), size=(8, 2, sources))
    np.savez(path, counts=counts)
    return str(path)


def test_skew_is_worth_it_and_balance_is_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved_file = tmp_path / "saved.json"
    assert (
        main(["what-if", skewed(tmp_path / "hot.npz", hot=30), *BASE, "--save", str(saved_file)])
        == 0
    )
    text = capsys.readouterr().out
    assert "switch it on, --moe-fssdp-slots" in text and "do not" not in text
    assert (
        "replicas save messages, too" in text
    )  # here every rank can hold the hot expert: its tokens stay
    saved = json.loads(saved_file.read_text())
    forced, stock, *ways = saved["outcomes"]
    settings = chosen(saved["flags"])
    best = next(
        w for w in ways if (w["slots"], w["lifetime"]) == (settings.slots, settings.lifetime)
    )
    assert best["seconds"] < 0.9 * stock["seconds"] and forced["seconds"] < stock["seconds"]
    assert best["imbalance"] < 1.1 and stock["imbalance"] == pytest.approx(
        8 * (30 + 1) / 45, rel=0.02
    )
    assert best["seconds"] <= 1.005 * min(
        way["seconds"] for way in ways if way["transport"] == "nvlink"
    )

    assert (
        main(["what-if", skewed(tmp_path / "flat.npz", hot=1), *BASE, "--save", str(saved_file)])
        == 0
    )
    assert "do not switch it on: 0.0% of a step to win (imbalance costs " in capsys.readouterr().out
    saved = json.loads(saved_file.read_text())
    assert saved["flags"] is None and saved["recommendation"].startswith("do not switch it on")


def chosen(flags: str) -> HecateConfig:
    """What these command line flags are to a training run."""
    return HecateConfig.from_arguments(
        HecateConfig.add_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    )


def some_outcomes(*seconds: float) -> list[Outcome]:
    """Forced balance, stock and ways of FSSDP, the last with memory for replicas."""
    memory = ExpertMemory(
        weights=10, grads=20, optimizer=60, replica_weights=0, replica_grads=0, transport=0
    )
    with_replicas = dataclasses.replace(memory, replica_weights=10, replica_grads=20)
    figures = dict(imbalance=1.0, parts=dict.fromkeys(PARTS, 0.0))
    return [
        Outcome(
            name=f"way {i}",
            slots=int(i > 1),
            seconds=time,
            memory=with_replicas if i > 1 else memory,
            used=2,
            **figures,
        )
        for i, time in enumerate(seconds)
    ]


@pytest.mark.parametrize("stages", [[], ["--pp", "2", "--vpp", "2"]])
def test_a_measured_step_scales_the_rest_of_it(
    stages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The same skew is worth little where experts are a small part of the step, which lasts what the user says."""
    trace = skewed(tmp_path / "hot.npz", hot=30)
    saved_file = tmp_path / "saved.json"
    assert (
        main(["what-if", trace, *BASE, *stages, "--step-ms", "60000", "--save", str(saved_file)])
        == 0
    )
    assert json.loads(saved_file.read_text())["outcomes"][1]["seconds"] == pytest.approx(
        60.0, rel=1.5e-3
    )
    assert "do not switch it on" in capsys.readouterr().out


def test_replicas_that_do_not_fit_are_not_recommended() -> None:
    forced, stock, way = some_outcomes(1.0, 2.0, 1.1)
    capacity = (stock.memory.total + way.memory.total) / 2
    advice = recommend([forced, stock, way], capacity)
    text = advice.text
    assert advice.best is None and "simulate fewer --slots, or --lifetime layer" in text


def test_a_modelled_step_gives_a_range_and_no_verdict_across_3_percent() -> None:
    """Oracle: by hand, shares of a step whose rest lasts 1.45 and 0.55 times as long as modelled: 20 % and
    1.45 or 0.55 times 80 %."""
    for seconds, said in (
        (0.80, "switch it on, --moe-fssdp-slots 1 --moe-fssdp-lifetime iteration: 14.7% to 31.2%"),
        (0.96, "no verdict without the time of a stock step, --step-ms: 2.8% to 7.0%"),
        (0.99, "do not switch it on: 0.7% to 1.8%"),
    ):
        advice = recommend(some_outcomes(0.8, 1.0, seconds), 0.0, error=0.45)
        best = advice.best
        text = advice.text
        assert text.startswith(f"{said} of a step to win (imbalance costs 14.7% to 31.2%"), text
        assert (best is not None) == text.startswith("switch")


def test_the_distributed_optimizer_shards_its_state(tmp_path: Path) -> None:
    """Oracle: 12 bytes of state for each parameter of a rank's experts, whole or shared by two ranks."""
    trace, save = skewed(tmp_path / "hot.npz", hot=30), tmp_path / "saved.json"
    parameters = 3 * 2048 * 1024 * 4 * 2  # of 4 layers with 2 of 16 experts on a rank
    for flags, shards in ([], 2), (["--no-distributed-optimizer"], 1):
        layout = ["--ranks", "16", "--ep", "8", *flags]
        assert main(["what-if", trace, *BASE, *layout, "--save", str(save)]) == 0
        stock = json.loads(save.read_text())["outcomes"][1]
        assert stock["memory"]["optimizer"] == 12 * parameters // shards


def record(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    loads: np.ndarray,
    peaks: np.ndarray | None = None,
    **info: Any,
) -> None:
    """Write a run folder as observing does, with a step every 100 s."""
    now = [0.0]
    monkeypatch.setattr(run_writer.time, "time", lambda: now[0])
    names = tuple(f"layer {i + 1}" for i in range(loads.shape[1]))
    settings = dict(mode="observe", layers=names, num_experts=16, ranks=4, node=(0,) * 4, top_k=2)
    writer = RunWriter(folder, RunInfo(**{**settings, **info}))
    for iteration, load in enumerate(loads):
        now[0] += 100.0
        peak = {} if peaks is None else {"peak": peaks[iteration]}
        writer.append(iteration, load=load, **peak)
    writer.close()


def test_a_record_knows_microbatches_tokens_and_step_time(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same job with everything said by flags, and a note for each flag that contradicts the record."""
    tokens, microbatches = 2048, 2
    share = np.array([30.0] + [1.0] * 15)
    loads = np.random.default_rng(2).multinomial(
        tokens * microbatches * 4 * 2, share / share.sum(), size=(6, 2)
    )
    elements = 3 * 2048 * 1024
    sizes = LayerShape(2 * elements, 4 * elements, 4096, 2 * elements, microbatches=microbatches)
    shape = dataclasses.asdict(sizes)
    record(tmp_path / "run", monkeypatch, loads=loads, shape=shape)
    command = ["what-if", str(tmp_path / "run"), "--cluster", "h100x8", "--slots", "1"]
    command += ["--model", "olmoe,experts=16,layers=2,top_k=2"]
    said = ["--microbatches", "2", "--micro-batch", "1", "--seq", "2048", "--step-ms", "100000"]
    outcomes = []
    for flags in ([], said[:2] + said[-2:]):
        assert main([*command, *flags, "--save", str(tmp_path / "saved.json")]) == 0
        text = capsys.readouterr().out
        assert "2 microbatches of 2,048 tokens, " in text and "stock step 100,000 ms" in text
        # Nothing contradicts the record; a step of this job cannot take that long.
        assert text.count("note:") == text.count("note: --step-ms 100,000 is far above the model")
        outcomes.append(json.loads((tmp_path / "saved.json").read_text())["outcomes"])
    assert outcomes[0] == outcomes[1]
    contradictions = {
        "--microbatches": ("8", "the record has 2 microbatches per step, not 8"),
        "--micro-batch": ("4", "the record has 2,048 tokens of a rank per microbatch, not 16,384"),
        "--step-ms": ("50000", "the record has steps of 100,000 ms (median), not 50,000"),
    }
    for flag, (value, note) in contradictions.items():
        assert main([*command, flag, value]) == 0
        assert f"note: {note}\n" in capsys.readouterr().out


def test_a_run_folder_tells_ranks_and_what_is_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what was written into the folder."""
    loads = np.random.default_rng(0).integers(100, 5000, size=(6, 2, 16))
    record(tmp_path / "run", monkeypatch, loads=loads)
    command = [
        "what-if",
        str(tmp_path / "run"),
        "--model",
        SMALL,
        "--cluster",
        "h100x8",
        "--slots",
        "1",
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert (
        "4 ranks, EP 4, PP 1" in text
        and "the record is of 2 layers on 4 ranks, this is of 4 on 4" in text
    )
    assert "give --step-ms" in text
    assert (
        main([*command, "--ranks", "8", "--model", "olmoe,experts=16,layers=2", "--step-ms", "1e5"])
        == 0
    )
    text = capsys.readouterr().out
    assert "8 ranks, EP 4, PP 1" in text and text.count("note:") == 1
    assert "note: --step-ms 100,000 is far above the model" in text
    with pytest.raises(SystemExit):
        main([*command, "--model", "olmoe"])
    assert "--model olmoe,experts=16,top_k=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model olmo", "no model is named 'olmo'; there are qwen3-30b-a3b"),
        ("--model olmoe,layer=3", "'layer=3' in model 'olmoe,layer=3' must be FIELD=NUMBER, with a field of layers"),
        ("--model olmoe", "has 16 experts, olmoe 64: give loads of this model"),
        ("--cluster h100", "no cluster and no file is named 'h100'; there are a100x8"),
        ("--ep 3", "--ep 3 must divide 8 ranks of a stage and 16 experts: take one of [1, 2, 4, 8]"),
        ("--pp 2 --vpp 3", "--ranks 8 must divide among --pp 2 stages, of 4 layers at most with --vpp 3"),
        ("--pp 2 --vpp 2 --microbatches 3", "that divides --microbatches, got 2, 3"),
        ("--slots two", "--slots takes numbers, as in 1,2,4, got 'two'"),
        ("--step-ms 0.01", "is less than experts and all-to-alls alone take"),
        ("--step-ms nan", "--step-ms must be above 0 and finite, got nan"),
        ("--hidden-all-to-all 2", "--hidden-all-to-all must be from 0 to 1, got 2.0"),
        ("--save no/such/folder.json", "must name a file in a folder that exists"),
    ],
)  # fmt: skip
def test_errors_say_the_way_out(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["what-if", skewed(tmp_path / "a.npz", hot=3), *BASE, *change.split()])
    error = " ".join(capsys.readouterr().err.split())
    assert stopped.value.code == 2 and message in error, error


def test_the_parts_of_a_gain_are_those_of_steps_without_the_others(tmp_path: Path) -> None:
    """Oracle: the same job on links that take no time has no all-to-all and no copies to win or lose."""
    trace, save = skewed(tmp_path / "hot.npz", hot=30), tmp_path / "saved.json"
    free = tmp_path / "free.json"
    link = Link(1e18, 0.0)
    speeds = dataclasses.replace(H100, intra=link, inter=link, routing=0.0, contention=0.0)
    speeds = dataclasses.replace(speeds, memory=1e18, launch=0.0)
    speeds.save(free, origin="test")
    found = {}
    for cluster in ("h100x8", str(free)):
        command = [*BASE, "--cluster", cluster, "--slots", "2", "--lifetime", "iteration"]
        assert main(["what-if", trace, *command, "--save", str(save)]) == 0
        found[cluster] = json.loads(save.read_text())["outcomes"]
        forced, stock, *ways = found[cluster]
        for one in (forced, *ways):
            gain = stock["seconds"] - one["seconds"]
            assert sum(one["parts"].values()) == pytest.approx(gain, rel=1e-9)
    forced, stock, way, _ = found[str(free)]
    assert forced["parts"]["expert compute"] == pytest.approx(stock["seconds"] - forced["seconds"])
    real, on_links = found["h100x8"], found[str(free)]
    assert real[0]["parts"]["expert compute"] == pytest.approx(
        on_links[0]["parts"]["expert compute"], rel=1e-3
    )
    assert real[0]["parts"]["all-to-all"] > 0 == pytest.approx(way["parts"]["all-to-all"], abs=1e-6)
    assert real[2]["parts"]["copies and routing"] < 0
    assert real[2]["parts"]["all-to-all"] > real[0]["parts"]["all-to-all"]
    assert way["parts"]["copies and routing"] == pytest.approx(0.0, abs=1e-6)


def test_p2p_sends_every_copy_from_the_home(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One hot expert, a copy on each of the 7 other ranks: 7 chunks leave its home with p2p, about one with nvlink."""
    save = tmp_path / "saved.json"
    trace = skewed(tmp_path / "hot.npz", hot=30)
    # few tokens, whose attention hides little
    command = [*BASE, "--slots", "1", "--lifetime", "layer", "--seq", "512", "--save", str(save)]
    assert main(["what-if", trace, *command]) == 0
    nvlink, p2p = json.loads(save.read_text())["outcomes"][2:]
    assert (nvlink["transport"], p2p["transport"]) == ("nvlink", "p2p")
    assert p2p["exposed"] > 2 * nvlink["exposed"] > 0
    assert "FSSDP, 1 slot, layer, p2p" in capsys.readouterr().out


def test_microbatches_that_differ_cost_more_than_their_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: brute force over microbatches. EP 8, four microbatches, each with its own hot rank."""
    rng = np.random.default_rng(3)
    hot = np.array([2.0] + [1.0] * 15)
    share = hot / hot.sum() * rng.gamma(12.0, size=(6, 2, 4, 16))
    share /= share.sum(axis=3, keepdims=True)
    every = rng.multinomial(8 * 4096 * 2, share)
    of_ranks = every.reshape(6, 2, 4, 8, 2).sum(axis=4)
    peak = np.zeros((6, 2), np.int64)
    for step, layer, microbatch in np.ndindex(6, 2, 4):
        peak[step, layer] += max(of_ranks[step, layer, microbatch].tolist())
    mean = of_ranks.sum(axis=(2, 3)) / 8
    elements = 3 * 2048 * 1024
    sizes = LayerShape(2 * elements, 4 * elements, 4096, 2 * elements, microbatches=4)
    speeds = dataclasses.asdict(H100)
    info = dict(shape=dataclasses.asdict(sizes), speeds=speeds, ranks=8, node=(0,) * 8)
    save = tmp_path / "saved.json"
    found = {}
    for name, peaks in (("summed", None), ("each", peak)):
        loads = every.sum(axis=2)
        record(tmp_path / name, monkeypatch, loads=loads, peaks=peaks, **info)
        command = ["what-if", str(tmp_path / name), "--slots", "1", "--transport", "nvlink"]
        assert main([*command, "--lifetime", "iteration", "--save", str(save)]) == 0
        found[name] = json.loads(save.read_text())["outcomes"]
    # The first recorded step has no forecast and is not counted.
    summed = (of_ranks.sum(axis=2).max(axis=2) / mean)[1:].mean()
    each = (peak / mean)[1:].mean()
    assert each > summed + 0.03
    assert found["summed"][1]["imbalance"] == pytest.approx(summed, rel=1e-3)
    assert found["each"][1]["imbalance"] == pytest.approx(each, rel=1e-3)
    forced, stock, way = found["each"]
    seconds = 2 * 4 * (each - 1) * 4096 * 2 * 3 * 2 * elements / H100.flops
    assert forced["parts"]["expert compute"] == pytest.approx(seconds, rel=1e-2)
    assert 1 < way["imbalance"] < stock["imbalance"]
