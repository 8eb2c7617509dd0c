"""What if, and the page: the recommendation, and the command as a user calls it.

Oracles: that skew which anybody would treat is recommended for, and balance is not; shares of a step by hand; messages
that name the way out. A wrong recommendation costs a user weeks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded

from megatron_hecate.config import HecateConfig
from megatron_hecate.plan import LayerShape
from megatron_hecate.replicas.memory_estimate import ExpertMemory
from megatron_hecate.tools.recommendation import recommend
from megatron_hecate.tools.replay import Outcome
from megatron_hecate.tools.step_model import PARTS

pytestmark = pytest.mark.fast

SMALL = "olmoe,experts=16,layers=4"
BASE = ("--model", SMALL, "--cluster", "h100x8", "--ranks", "8", "--steps", "4")
SIZE = recorded.Size(num=6, layers=2, experts=16, tokens=800_000, skew=1.5)
ONE_WAY = ("--slots", "1", "--lifetime", "iteration", "--transport", "nvlink")


def skewed(path: Path, *, hot: int, sources: int = 8) -> str:
    """8 steps, 2 layers, 16 experts; expert 0 gets ``hot`` times as many tokens as the others."""
    share = np.ones(16)
    share[0] = hot
    counts = np.random.default_rng(1).multinomial(40_000, share / share.sum(), size=(8, 2, sources))
    np.savez(path, counts=counts)
    return str(path)


def _observed(
    folder: Path,
    size: recorded.Size = SIZE,
    *,
    step_ms: float = 400.0,
    load: np.ndarray | None = None,
    **fields: Any,
) -> Path:
    """Write the record of an observed run with steps of ``step_ms``."""
    held = recorded.arrays(size, fssdp=False)
    held["time"] = 1.7e9 + step_ms / 1e3 * np.arange(size.num)
    if load is not None:
        held["load"] = load
    return recorded.write(folder, size, held=held, transport="", **fields)


@pytest.fixture
def what_if(cli: Any, tmp_path: Path) -> Any:
    """What the command saves, and what it prints."""
    saved = tmp_path / "saved.json"

    def run(*words: object) -> tuple[dict[str, Any], str]:
        status, text, error = cli("what-if", *words, "--save", saved)
        assert status == 0, error
        return json.loads(saved.read_text()), text

    return run


@pytest.fixture
def page(cli: Any, tmp_path: Path) -> Any:
    """What the page about a run holds, and what the command prints."""
    export = tmp_path / "page.json"

    def run(folder: Path) -> tuple[dict[str, Any], str]:
        status, text, error = cli("report", folder, "--export", export)
        assert status == 0, error
        return json.loads(export.read_text()), text

    return run


def _outcomes(*seconds: float, **parts: float) -> list[Outcome]:
    """Return forced balance, stock, and one way of FSSDP that gains ``parts`` and has memory for replicas."""
    memory = ExpertMemory(
        weights=10, grads=20, optimizer=60, replica_weights=0, replica_grads=0, transport=0
    )
    bare = dict(
        name="way", imbalance=1.0, worst=1.0, memory=memory, parts=dict.fromkeys(PARTS, 0.0)
    )
    found = [Outcome(slots=0, seconds=time, **bare) for time in seconds]
    found[2] = dataclasses.replace(
        found[2],
        slots=1,
        used=1,
        memory=dataclasses.replace(memory, replica_weights=10, replica_grads=20),
        parts={**bare["parts"], **parts},
    )
    return found


def test_a_budget_of_tokens_is_planned_for(tmp_path: Path, what_if: Any) -> None:
    """Few tokens: copies do not pay, except to stay within the budget. Oracle: the loads' own largest ratio."""
    trace = skewed(tmp_path / "few.npz", hot=3)
    words = (trace, *BASE, "--seq", "64", *ONE_WAY)
    free, text = what_if(*words)
    routed = np.load(trace)["counts"].sum(axis=2).reshape(8, 2, 8, 2).sum(axis=3)[-4:]
    stock = pytest.approx((routed.max(axis=2) / routed.mean(axis=2)).max(), rel=1e-2)
    assert free["outcomes"][1]["worst"] == free["outcomes"][2]["worst"] == stock
    bound, text = what_if(*words, "--rank-capacity-factor", "1.2")
    assert bound["outcomes"][1]["worst"] == stock and bound["outcomes"][2]["worst"] < 1.2
    assert "over moe_expert_rank_capacity_factor=1.2, which the advice does not count" in text
    assert "with --moe-fssdp-slots 1 the means of a step's microbatches stay within it" in text


def test_skew_is_worth_it_and_balance_is_not(tmp_path: Path, what_if: Any) -> None:
    saved, text = what_if(skewed(tmp_path / "hot.npz", hot=30), *BASE)
    assert "switch it on, --moe-fssdp-slots" in text and "do not" not in text
    # here every rank can hold the hot expert: its tokens stay
    assert "replicas save messages, too" in text
    forced, stock, *ways = saved["outcomes"]
    for one in (forced, *ways):
        gain = stock["seconds"] - one["seconds"]
        assert sum(one["parts"].values()) == pytest.approx(gain, rel=1e-9)
    flags = HecateConfig.add_arguments(argparse.ArgumentParser()).parse_args(saved["flags"].split())
    asked = HecateConfig.from_arguments(flags)
    best = next(w for w in ways if (w["slots"], w["lifetime"]) == (asked.slots, asked.lifetime))
    assert best["seconds"] < 0.9 * stock["seconds"] and forced["seconds"] < stock["seconds"]
    routed = pytest.approx(8 * (30 + 1) / 45, rel=0.02)
    assert best["imbalance"] < 1.1 and stock["imbalance"] == routed
    fastest = min(way["seconds"] for way in ways if way["transport"] == "nvlink")
    assert best["seconds"] <= 1.005 * fastest

    saved, text = what_if(skewed(tmp_path / "flat.npz", hot=1), *BASE)
    assert "do not switch it on: 0.0% of a step to win (imbalance costs " in text
    assert saved["flags"] is None and saved["recommendation"].startswith("do not switch it on")


def test_replicas_that_do_not_fit_are_not_recommended() -> None:
    outcomes = _outcomes(1.0, 2.0, 1.1)
    _, stock, way = outcomes
    advice = recommend(outcomes, (stock.memory.total + way.memory.total) / 2)
    assert advice.best is None and "simulate fewer --slots, or --lifetime layer" in advice.text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((0.8, 1.0, 0.80), "switch it on, --moe-fssdp-slots 1 --moe-fssdp-lifetime iteration: 14.7% to 31.2%"),
        ((0.8, 1.0, 0.96), "no verdict without the time of a stock step, --step-ms: 2.8% to 7.0%"),
        ((0.8, 1.0, 0.99), "do not switch it on: 0.7% to 1.8%"),
        # a loss has a range in order; a step three times as long is no reason to try it
        ((1.0, 1.0, 1.02), "do not switch it on: -3.6% to -1.4%"),
        ((1.0, 1.0, 3.00), "do not switch it on: "),
    ],
)  # fmt: skip
def test_a_modelled_step_gives_a_range_and_no_verdict_across_3_percent(
    seconds: tuple[float, ...], said: str
) -> None:
    """Oracle: by hand, shares of a step whose rest lasts 1.45 and 0.55 times as long as modelled."""
    advice = recommend(_outcomes(*seconds), 0.0, error=0.45)
    assert advice.text.startswith(said) and "% of a step to win" in advice.text, advice.text
    if seconds[0] == 0.8:
        assert "of a step to win (imbalance costs 14.7% to 31.2%" in advice.text
    assert (advice.best is not None) == said.startswith("switch")


def test_the_experts_speed_changes_the_gain_in_expert_compute_alone() -> None:
    """By hand: 10 % in compute times 0.54 and 1.15, and 10 % in all-to-alls."""
    gains = {"expert compute": 0.1, "all-to-all": 0.1}
    text = recommend(_outcomes(0.8, 1.0, 0.8, **gains), 0.0).text
    assert "; 15.4% to 21.5%, since the experts' speed is assumed" in text


def test_the_distributed_optimizer_shards_its_state(tmp_path: Path, what_if: Any) -> None:
    """Oracle: 12 bytes of state for each parameter of a rank's experts, whole or shared by two ranks."""
    trace = skewed(tmp_path / "hot.npz", hot=30)
    parameters = 3 * 2048 * 1024 * 4 * 2  # of 4 layers with 2 of 16 experts on a rank
    for flags, shards in ([], 2), (["--no-distributed-optimizer"], 1):
        saved, _ = what_if(trace, *BASE, "--ranks", "16", "--ep", "8", *flags)
        assert saved["outcomes"][1]["memory"]["optimizer"] == 12 * parameters // shards


def test_a_record_knows_microbatches_tokens_and_step_time(tmp_path: Path, what_if: Any) -> None:
    """Oracle: the same job with everything said by flags, and a note for each flag that contradicts the record."""
    share = np.array([30.0] + [1.0] * 15)
    # 2,048 tokens, 2 microbatches, 4 ranks, top-2
    load = np.random.default_rng(2).multinomial(2048 * 2 * 4 * 2, share / share.sum(), size=(6, 2))
    elements = 3 * 2048 * 1024
    sizes = LayerShape(2 * elements, 4 * elements, 4096, 2 * elements, microbatches=2)
    fields = dict(shape=dataclasses.asdict(sizes), speeds={}, node=(0,) * 4)
    run = _observed(tmp_path / "run", step_ms=1e5, load=load, **fields)
    words = [run, "--cluster", "h100x8", "--slots", "1"]
    words += ["--model", "olmoe,experts=16,layers=2,top_k=2"]
    outcomes = []
    for flags in ([], ["--microbatches", "2", "--step-ms", "100000"]):
        saved, text = what_if(*words, *flags)
        assert "2 microbatches of 2,048 tokens, " in text and "stock step 100,000 ms" in text
        # Nothing contradicts the record; a step of this job cannot take that long.
        assert text.count("note:") == text.count("note: --step-ms 100,000 is far above the model")
        outcomes.append(saved["outcomes"])
    assert outcomes[0] == outcomes[1]
    contradictions = {
        "--microbatches": ("8", "the record has 2 microbatches per step, not 8"),
        "--micro-batch": ("4", "the record has 2,048 tokens of a rank per microbatch, not 16,384"),
        "--step-ms": ("50000", "the record has steps of 100,000 ms (median), not 50,000"),
    }
    for flag, (value, note) in contradictions.items():
        assert f"note: {note}\n" in what_if(*words, flag, value)[1]


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
def test_errors_say_the_way_out(change: str, message: str, tmp_path: Path, cli: Any) -> None:
    trace = skewed(tmp_path / "a.npz", hot=3)
    status, _, error = cli("what-if", trace, *BASE, *change.split())
    assert status == 2 and message in " ".join(error.split()), error


def test_p2p_sends_every_copy_from_the_home(tmp_path: Path, what_if: Any) -> None:
    """One hot expert, a copy on each of the 7 other ranks: 7 chunks leave its home with p2p, about one with nvlink."""
    trace = skewed(tmp_path / "hot.npz", hot=30)
    # few tokens, whose attention hides little
    flags = ["--slots", "1", "--lifetime", "layer", "--seq", "512"]
    saved, text = what_if(trace, *BASE, *flags)
    nvlink, p2p = saved["outcomes"][2:]
    assert (nvlink["transport"], p2p["transport"]) == ("nvlink", "p2p")
    assert p2p["exposed"] > 2 * nvlink["exposed"] > 0
    assert "FSSDP, 1 slot, layer, p2p" in text


def test_a_recorded_step_is_not_one_with_other_work(tmp_path: Path, what_if: Any) -> None:
    """More ranks with the same work each are data parallelism."""
    folder = _observed(tmp_path / "run")
    assert "stock step 400 ms" in what_if(folder, *ONE_WAY)[1]
    for flags in (("--microbatches", "8"), ("--seq", "5000"), ("--ranks", "8", "--pp", "2")):
        _, text = what_if(folder, *ONE_WAY, *flags)
        assert "stock step unknown" in text and "give --step-ms" in text, flags
    _, text = what_if(folder, *ONE_WAY, "--ranks", "16")
    assert "16 ranks, EP 4, PP 1" in text and "stock step 400 ms" in text


def test_iterations_in_which_a_layer_is_idle_are_left_out(
    tmp_path: Path, what_if: Any, page: Any
) -> None:
    """Oracle: the same record without these iterations."""
    held = recorded.arrays(SIZE, fssdp=False)
    held["time"] = 1.7e9 + 0.4 * np.arange(SIZE.num)
    held["load"][[2, 4], 1] = 0
    folder = recorded.write(tmp_path / "run", SIZE, held=held)
    found, text = what_if(folder, *ONE_WAY)
    assert "note: left out: 2 of 6 iterations, where a layer has no" in text
    whole = {name: np.delete(array, [2, 4], axis=0) for name, array in held.items()}
    right, _ = what_if(recorded.write(tmp_path / "right", SIZE, held=whole), *ONE_WAY)
    for one, other in zip(found["outcomes"], right["outcomes"], strict=True):
        for name in ("seconds", "imbalance", "sent"):
            assert one[name] == pytest.approx(other[name], rel=1e-6), name
    assert page(folder)[0]["verdict"]["text"].startswith("Switch FSSDP on")
