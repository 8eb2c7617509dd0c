"""What if: the presets, the recommendation, and the command as a user calls it.

Oracles: what model cards say; that skew which anybody would treat is recommended for, and balance is not; messages that
name the way out. A wrong recommendation costs a user weeks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_hecate.__main__ import main
from megatron_hecate.device import launch
from megatron_hecate.plan import H100
from megatron_hecate.tools.presets import CLUSTERS, MODELS, Cluster, Model
from megatron_hecate.tools.run_folder import RunInfo
from megatron_hecate.tools.run_writer import RunWriter
from megatron_hecate.tools.what_if import read_loads

pytestmark = pytest.mark.fast

SMALL = "olmoe,experts=16,layers=4"
BASE = ("--model", SMALL, "--cluster", "h100x8", "--ranks", "8", "--steps", "4")


def test_presets_have_the_published_number_of_parameters() -> None:
    """Oracle: what the names and model cards say, in billions, all parameters."""
    published = {"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "deepseek-v3": 671, "mixtral-8x7b": 46.7}
    published |= {"mixtral-8x22b": 141, "olmoe": 6.9, "gpt-oss-120b": 116.8, "gpt-oss-20b": 20.9}
    assert set(published) == set(MODELS)
    for name, billions in published.items():
        m = MODELS[name]
        layer = m.attention + 3 * m.hidden * (m.experts * m.ffn + m.shared)
        plain = m.attention + 3 * m.hidden * m.plain_ffn
        total = m.layers * layer + m.plain * plain + 2 * m.vocab * m.hidden
        assert total / 1e9 == pytest.approx(billions, rel=0.01), name


def test_a_cluster_is_a_name_or_a_measured_file(tmp_path: Path) -> None:
    H100.save(tmp_path / "speeds.json", origin="here")
    measured = Cluster.named(str(tmp_path / "speeds.json"), per_node=4)
    assert measured.speeds == H100 and measured.per_node == 4 and measured.memory == 0
    assert Cluster.named("gb200x72") is CLUSTERS["gb200x72"]
    assert Model.named("olmoe,layers=3").layers == 3 and Model.named("olmoe,shared=0").shared == 0


def skewed(path: Path, *, hot: int, sources: int = 8) -> str:
    """8 steps, 2 layers, 16 experts; expert 0 gets ``hot`` times as many tokens as the others."""
    share = np.ones(16)
    share[0] = hot
    counts = np.random.default_rng(1).multinomial(40_000, share / share.sum(), size=(8, 2, sources))
    np.savez(path, counts=counts)
    return str(path)


def test_skew_is_worth_it_and_balance_is_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = tmp_path / "plan.json"
    assert main(["--what-if", skewed(tmp_path / "hot.npz", hot=30), *BASE, "--save", str(plan)]) == 0
    text = capsys.readouterr().out
    assert "switch it on, --moe-fssdp-slots" in text and "do not" not in text
    assert "replicas save messages, too" in text  # here every rank can hold the hot expert: its tokens stay
    saved = json.loads(plan.read_text())
    forced, stock, *ways = saved["outcomes"]
    best = next(way for way in ways if {k: way[k] for k in ("slots", "lifetime")} == saved["settings"])
    assert best["seconds"] < 0.9 * stock["seconds"] and forced["seconds"] < stock["seconds"] and len(ways) == 9
    assert best["imbalance"] < 1.1 and stock["imbalance"] == pytest.approx(8 * (30 + 1) / 45, rel=0.02)
    assert best["seconds"] <= 1.005 * min(way["seconds"] for way in ways)

    assert main(["--what-if", skewed(tmp_path / "flat.npz", hot=1), *BASE, "--save", str(plan)]) == 0
    assert "do not switch it on: 0.0% of a step to win (imbalance costs " in capsys.readouterr().out
    assert json.loads(plan.read_text())["settings"] is None


def test_a_measured_step_scales_the_rest_of_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The same skew is worth little where experts are a small part of the step."""
    trace = skewed(tmp_path / "hot.npz", hot=30)
    plan = tmp_path / "plan.json"
    assert main(["--what-if", trace, *BASE, "--step-ms", "60000", "--save", str(plan)]) == 0
    assert json.loads(plan.read_text())["outcomes"][1]["seconds"] == pytest.approx(60.0)
    assert "do not switch it on" in capsys.readouterr().out


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    big = "deepseek-v3,experts=16,ffn=65536"
    main(["--what-if", skewed(tmp_path / "hot.npz", hot=30), *BASE[2:], "--model", big])
    assert "it does not fit: experts take " in capsys.readouterr().out


def test_one_rank_has_nothing_to_balance(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = skewed(tmp_path / "hot.npz", hot=30)
    main(["--what-if", trace, "--model", SMALL, "--cluster", "h200x8", "--ranks", "1"])
    assert "do not switch it on: there are no slots, or experts are not spread over ranks" in capsys.readouterr().out


def test_kinds_of_traces(tmp_path: Path) -> None:
    load = np.arange(1, 25).reshape(2, 3, 4)
    np.savez(tmp_path / "sums.npz", load=load)
    assert (read_loads(tmp_path / "sums.npz")[:, :, 0] == load).all()
    info = RunInfo(mode="observe", layers=("layer 1", "layer 2", "layer 3"), num_experts=4, ranks=2, node=(0, 0))
    writer = RunWriter(tmp_path / "run", info)
    for iteration, loads in enumerate(load):
        writer.append(iteration, load=loads)
    writer.close()
    assert (read_loads(tmp_path / "run")[:, :, 0] == load).all()
    olmoe = {"counts": {"model": {"a": {"0": [1, 2], "7": [3, 4]}, "b": {"0": [5, 6], "7": [7, 8]}}}}
    (tmp_path / "olmoe.json").write_text(json.dumps(olmoe))
    assert read_loads(tmp_path / "olmoe.json").tolist() == [[[[6, 8]], [[10, 12]]]]


def test_a_run_folder_tells_ranks_and_what_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Oracle: what was written into the folder."""
    info = RunInfo(mode="observe", layers=("layer 1", "layer 2"), num_experts=16, ranks=4, node=(0, 0, 0, 0))
    writer = RunWriter(tmp_path / "run", info)
    for iteration, load in enumerate(np.random.default_rng(0).integers(100, 5000, size=(6, 2, 16))):
        writer.append(iteration, load=load)
    writer.close()
    command = ["--what-if", str(tmp_path / "run"), "--model", SMALL, "--cluster", "h100x8", "--slots", "1"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "4 ranks, EP 4, PP 1" in text and "the record is of 2 layers on 4 ranks, this is of 4 on 4" in text
    assert "give --step-ms" in text
    assert main([*command, "--ranks", "8", "--model", "olmoe,experts=16,layers=2", "--step-ms", "1e5"]) == 0
    text = capsys.readouterr().out
    assert "8 ranks, EP 4, PP 1" in text and "note:" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "olmo"], "no model is named 'olmo'; there are qwen3-30b-a3b"),
        (
            ["--model", "olmoe,layer=3"],
            "'layer=3' in model 'olmoe,layer=3' must be FIELD=NUMBER, with a field of layers",
        ),
        (["--model", "olmoe"], "has 16 experts, olmoe 64: give loads of this model"),
        (["--model", "olmoe,experts=16,top_k=17"], "a token cannot go to 17 of 16 experts"),
        (["--cluster", "h100"], "no cluster and no file is named 'h100'; there are a100x8"),
        (["--ep", "3"], "--ep 3 must divide 8 ranks of a stage and 16 experts: take one of [1, 2, 4, 8]"),
        (["--pp", "3"], "--ranks 8 must divide among --pp 3 stages, of 4 at most"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--lifetime", "week"], "--lifetime week: there are iteration, microbatch, layer"),
        (["--slots", "two"], "--slots takes numbers of replicas, as in 1,2,4, got 'two'"),
        (["--step-ms", "0.01"], "is less than experts and all-to-alls alone take"),
        (["--step-ms", "nan"], "--step-ms must be above 0 and finite, got nan"),
        (["--step-ms", "inf"], "--step-ms must be above 0 and finite, got inf"),
        (["--hidden-all-to-all", "2"], "--hidden-all-to-all must be from 0 to 1, got 2.0"),
        (["--save", "no/such/folder.json"], "No such file or directory"),
    ],
)
def test_errors_say_the_way_out(change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--what-if", skewed(tmp_path / "a.npz", hot=3), *BASE, *change])
    error = " ".join(capsys.readouterr().err.split())
    assert stopped.value.code == 2 and message in error, error


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    trace = skewed(tmp_path / "hot.npz", hot=30)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("MEGATRON_HECATE_CACHE", str(tmp_path / "cache"))
    launch._load_for_host.cache_clear()
    with pytest.raises(SystemExit):
        main(["--what-if", trace, *BASE])
    assert "install g++" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(3)}, "holds no loads ('load is not a file"),
        ({"counts": np.ones((2, 2))}, "loads are float64 of shape (2, 2)"),
        ({"counts": -np.ones((1, 1, 1, 2))}, "loads must be 0 or more, and some in every step and layer"),
        (
            {"load": np.zeros((1, 1, 2))},
            "give a folder of --moe-fssdp-record, or of files that Megatron wrote, an .npz",
        ),
    ],
)
def test_bad_traces(arrays: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError) as error:
        read_loads(tmp_path / "bad.npz")
    assert message in str(error.value)
    with pytest.raises(ValueError, match=r"missing\.npz holds no loads \(it does not exist"):
        read_loads(tmp_path / "missing.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no record of a run"):
        read_loads(tmp_path / "empty")
