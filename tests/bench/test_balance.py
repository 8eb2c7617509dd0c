"""The balance benchmark and its loads.

Oracles: the plans, scored here with plain numpy and nothing of ours, must give the table's figures; loads must sum to
what they were made from; the same command must give the same twice. Then bad input, and the message a user needs.
"""

from __future__ import annotations

from pathlib import Path

import balance
import loads
import numpy as np
import pytest
from loads import DATA, EXPERTS, PAIRS, Trace, synthetic, synthetic_names, zipf_shares
from rivals import find_planners

TIMING = {"place_us", "split_us"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """4 steps, 2 layers, 8 sources, 16 experts; two of them hot."""
    rng = np.random.default_rng(5)
    share = rng.dirichlet(np.full(16, 0.5), size=(4, 2, 1)).repeat(8, axis=2)
    path = tmp_path / "small.npz"
    np.savez(path, counts=rng.multinomial(300, share).astype(np.uint16))
    return path


def test_neighbouring_sources_are_summed(trace) -> None:
    small = Trace.read(trace)
    counts = small.to_ranks(4)
    assert (counts[:, :, 1] == small.counts[:, :, 2] + small.counts[:, :, 3]).all()
    assert (small.to_ranks(8) == small.counts).all()


def test_sources_are_dealt_to_more_ranks(trace) -> None:
    small = Trace.read(trace)
    counts = small.to_ranks(16, seed=3)
    assert (counts[:, :, 0::2] + counts[:, :, 1::2] == small.counts).all()
    assert (counts.sum(axis=-1) == 150).all()
    assert (counts == small.to_ranks(16, seed=3)).all()
    assert (counts != small.to_ranks(16, seed=4)).any()


@pytest.mark.parametrize("ratio", [1.0, 2.0, 5.5])
def test_zipf_reaches_its_ratio(ratio) -> None:
    order = np.random.default_rng(0).permutation(64)
    share = zipf_shares(64, 8, ratio=ratio, order=order)
    rank_load = share.reshape(8, 8).sum(axis=1)
    assert rank_load.max() / rank_load.mean() == pytest.approx(ratio, rel=1e-6)
    assert (np.diff(share[order]) <= 0).all()


def test_zipf_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"8 is out of range for 8 ranks: \[1, 8\)"):
        zipf_shares(64, 8, ratio=8, order=np.arange(64))


@pytest.mark.parametrize("name", synthetic_names())
def test_synthetic_loads_are_repeatable(name) -> None:
    counts = synthetic(name, 8, steps=22)
    steps, _, ranks, experts = counts.shape
    assert (steps, ranks, experts) == (22, 8, EXPERTS)
    assert (counts.sum(axis=-1) == PAIRS).all()
    assert (counts == synthetic(name, 8, steps=22)).all()


def test_synthetic_loads_are_what_they_say() -> None:
    expert = {
        name: synthetic(name, 8, steps=40).sum(axis=2) for name in synthetic_names()
    }  # [T, L, E]
    assert (expert["balanced"] == 8 * PAIRS / EXPERTS).all()
    assert 0 < expert["uniform"].std() < 0.1 * expert["uniform"].mean()
    for name, share in (("50%-to-4", 0.5), ("80%-to-4", 0.8)):
        hottest = np.sort(expert[name].sum(axis=(0, 1)))[-4:]
        assert hottest.sum() / expert[name].sum() == pytest.approx(share, rel=0.02)
    rank = expert["zipf-2"].reshape(40, 8, -1).sum(axis=-1)
    assert (rank.max(axis=1) / rank.mean(axis=1)).mean() == pytest.approx(2, rel=0.03)
    hot = [set(np.argsort(-step)[:3].tolist()) for step in expert["hotspot"][:, 0]]
    assert hot[0] == hot[7] and not hot[7] & hot[8]
    # a new domain every ten steps: far from the step before, and near it in between
    domains = expert["domains"][:, 1] / expert["domains"][:, 1].sum(axis=1, keepdims=True)
    change = np.abs(np.diff(domains, axis=0)).sum(axis=1)
    assert set(np.argsort(-change)[:3].tolist()) == {9, 19, 29}


def test_carried_data_loads_with_numpy_alone() -> None:
    for path in DATA.glob("*.npz"):
        with np.load(path, allow_pickle=False) as archive:
            assert archive["counts"].ndim == 4 and len(archive["loss"]) == len(archive["counts"])


def run(trace: Path, *more: str) -> list[dict]:
    return balance.main(["--trace", str(trace), "--per-node", "4", "--slots", "1", *more])


def test_the_figures_are_those_of_the_plans(trace) -> None:
    command = ["--trace", str(trace), "--per-node", "4", "--slots", "1", "--ranks", "8"]
    (case,) = balance._arguments(command).cases
    load, node = np.load(trace)["counts"].astype(int), np.arange(8) // 4
    for name, planner in find_planners().items():
        plans: list[tuple] = []

        def record(before, after, quotas, plans=plans) -> None:
            dense = np.zeros((8, 16, 8), dtype=int)
            dense[:, quotas.expert, quotas.rank] = quotas.tokens
            plans.append((before.holders, after.holders, after.home, dense))

        result = balance.replay(planner, case, record=record)
        row = result.row(case, planner, skip=1, forced_seconds=1.0)
        placed, holders, home, quota = (
            np.reshape(parts, (4, 2, *np.shape(parts[0]))) for parts in zip(*plans, strict=True)
        )
        if name != "forced":
            assert (quota.sum(axis=-1) == load).all()
        assert (quota.sum(axis=(-1, -2)) == load.sum(axis=-1)).all()
        assert not (quota.sum(axis=2) * ~holders).any()
        assert np.take_along_axis(holders, home[..., None], axis=-1).all()

        rank = quota.sum(axis=(2, 3))[1:]
        imbalance = rank.max(axis=-1) / rank.mean(axis=-1)
        assert float(row["imbalance_mean"]) == pytest.approx(imbalance.mean())
        assert float(row["imbalance_p95"]) == pytest.approx(np.percentile(imbalance, 95))
        assert float(row["imbalance_p99"]) == pytest.approx(np.percentile(imbalance, 99))
        crossing = (quota.sum(axis=3) * (node[:, None] != node))[1:].sum(axis=(-1, -2)) / quota[
            1:
        ].sum(axis=(2, 3, 4))
        assert float(row["crossing"]) == pytest.approx(crossing.mean())
        assert int(row["extra"]) == holders[1:].sum(axis=2).max() - 2
        assert float(row["late"]) == pytest.approx(
            (holders & ~placed)[1:].sum(axis=(2, 3)).mean() / 8
        )
        if name in ("hecate", "hecate-unpriced", "algorithm1", "fill", "clone-in-node"):
            assert float(row["copies"]) == pytest.approx(
                (placed.sum(axis=(2, 3))[1:] - 16).mean() / 8
            )


def test_ideal_rows(trace) -> None:
    rows = {
        row["planner"]: row
        for row in run(trace, "--ranks", "8", "--planner", "ep,forced,hecate-unpriced")
    }
    rank = Trace.read(trace).counts.sum(axis=2).reshape(4, 2, 8, 2).sum(axis=-1)
    assert rows["ep"]["imbalance_mean"] == pytest.approx(
        (rank.max(axis=-1) / rank.mean(axis=-1)).mean()
    )
    assert rows["forced"]["imbalance_mean"] <= 1.02 and rows["forced"]["time"] == 1
    assert rows["ep"]["time"] > 1
    assert rows["ep"]["intra_gb"] == rows["ep"]["inter_gb"] == 0
    # every replica comes as bf16 weights and goes home as an fp32 gradient, 3 matrices of 2048 x 768 each
    gb = rows["hecate-unpriced"]["copies"] * 8 * 6 * 3 * 2048 * 768 / 1e9
    assert rows["hecate-unpriced"]["intra_gb"] + rows["hecate-unpriced"][
        "inter_gb"
    ] == pytest.approx(gb)


def test_a_copy_serves_all_microbatches_of_an_iteration(trace) -> None:
    """A copy of DeepSeek-V3's expert pays for 64 microbatches where it does for one with all their tokens, if each
    microbatch has tokens enough to read the expert's weights for."""
    shape = "--ranks 8 --planner hecate --hidden 7168 --ffn 2048 --skip 1".split()

    def row(pairs: int, microbatches: int) -> dict:
        sizes = ["--pairs", str(pairs), "--microbatches", str(microbatches)]
        return run(trace, *shape, *sizes)[0]

    all_at_once, many = row(64 * 1024, 1), row(1024, 64)
    assert many["copies"] == pytest.approx(all_at_once["copies"], rel=0.1)
    assert many["imbalance_mean"] == pytest.approx(all_at_once["imbalance_mean"], rel=0.01)
    one, all_at_once, many = row(256, 1), row(64 * 256, 1), row(256, 64)
    assert one["copies"] < many["copies"] < 0.5 * all_at_once["copies"]


def test_the_same_command_twice(trace, capsys) -> None:
    runs = []
    for _ in range(2):
        rows = run(trace, "--ranks", "4,16")
        runs.append([{k: v for k, v in row.items() if k not in TIMING} for row in rows])
    assert runs[0] == runs[1] and len(runs[0]) == 2 * len(find_planners())
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_help_names_every_load_and_planner(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit, match="0"):
        balance.main(["--help"])
    text = capsys.readouterr().out.split()
    assert {name.strip(",") for name in text} >= {*synthetic_names(), *find_planners()}


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        balance.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


BAD_COUNTS = {
    "shape (2, 3), expected [steps, layers, sources, experts]": np.zeros((2, 3), dtype=int),
    "shape (1, 1, 1, 8, 8), expected [steps": np.ones((1, 1, 1, 8, 8), dtype=int),
    "shape (1, 1, 8, 0), expected [steps": np.ones((1, 1, 8, 0), dtype=int),
    "negative values (least: -1)": np.full((1, 1, 8, 8), -1),
    "values that are no integers": np.full((1, 1, 8, 8), 0.5),
    "counts holds values that are no integers (first: nan)": np.full((1, 1, 8, 8), np.nan),
    "counts holds values that are no integers (first: -inf)": np.full((1, 1, 8, 8), -np.inf),
    "negative values (least: -1e+300)": np.full((1, 1, 8, 8), -1e300),
    "expected integers": np.full((1, 1, 8, 8), "a"),
    "counts is timedelta64[s], expected integers": np.full((1, 1, 8, 8), 1, dtype="m8[s]"),
    "counts sum to 6.4e+301 in a step and layer, more than 2^53": np.full((1, 1, 8, 8), 1e300),
    "counts sum to inf in a step and layer, more than 2^53": np.full((1, 1, 8, 8), 1e308),
    "counts sum to 1.18e+21 in a step": np.full((1, 1, 8, 8), 2**64 - 1, dtype=np.uint64),
    "counts sum to 5.76e+17 in a step": np.full(
        (1, 1, 8, 8), 2**53
    ),  # each of them exact, their sum not
    "a source of 2000000000 pairs is too large to deal": np.full((1, 1, 4, 8), 250_000_000),
    "no tokens at all": np.zeros((1, 1, 8, 8), dtype=int),
    "12 experts do not divide among 8 ranks": np.ones((1, 1, 8, 12), dtype=int),
    "8 ranks and 12 sources": np.ones((1, 1, 12, 8), dtype=int),
    "slots=2 is out of range": np.ones((1, 1, 8, 8), dtype=int),
}


@pytest.mark.parametrize("message", BAD_COUNTS)
def test_bad_counts(message, tmp_path, capsys) -> None:
    np.savez(tmp_path / "bad.npz", counts=BAD_COUNTS[message])
    more = ("--slots", "8") if message.startswith("slots") else ()
    message = message.replace("slots=2", "slots=8")
    assert message in refusal(capsys, "--trace", str(tmp_path / "bad.npz"), "--ranks", "8", *more)


def test_bad_files(tmp_path, capsys) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", loss=np.ones(3))
    np.save(tmp_path / "plain.npy", np.ones(3))
    for name, message in (
        ("missing.npz", "no such file"),
        ("text.npz", "expected an .npz with counts"),
        ("other.npz", "holds ['loss'] and no 'counts'"),
        ("plain.npy", "expected an .npz with counts"),
    ):
        line = refusal(capsys, "--trace", str(tmp_path / name))
        assert message in line and name in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "12"], "64 experts do not divide among 12 ranks"),
        (["--ranks", "8", "--per-node", "3"], "8 ranks do not divide into nodes of 3"),
        (["--ranks", "eight"], "--ranks takes numbers of ranks"),
        (["--ranks", "0"], "--ranks takes numbers of ranks"),
        (["--planner", "ep,best"], "no planner is named best; there are algorithm1"),
        (["--load", "storm"], "no load is named 'storm'; there are balanced"),
        (["--slots", "-1"], "--slots must not be negative, got -1"),
        (["--slots", "60", "--ranks", "8"], "slots=60 is out of range"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--skip", "40"], "--skip 40 leaves none of 40 steps"),
        (["--load", "zipf-2,uniform,zipf-2"], "two loads are named zipf-2"),
        (["--pairs", "nan"], "argument --pairs: nan is not finite"),
        (["--hidden-us", "inf"], "argument --hidden-us: inf is not finite"),
        (["--ranks", "2", "--load", "zipf-2"], "out of range for 2 ranks"),
        (
            ["--measured", "nothing.json", "--ranks", "8"],
            "nothing.json does not hold measured speeds",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments(arguments, message, capsys) -> None:
    assert message in refusal(capsys, "--load", "uniform", *arguments)


def test_planners_named_twice_run_once(trace) -> None:
    rows = run(trace, "--ranks", "8,8", "--planner", "hecate,ep,hecate")
    assert [row["planner"] for row in rows] == ["hecate", "ep"]


def test_the_largest_counts_are_replayed_exactly(tmp_path) -> None:
    counts = np.zeros((2, 1, 8, 8), dtype=np.int64)
    counts[0, 0, :, 0] = counts[1, 0, 2] = 2**31 - 1
    np.savez(tmp_path / "large.npz", counts=counts)
    assert len(run(tmp_path / "large.npz", "--ranks", "8")) == len(find_planners())


def test_everything_is_covered_without_arguments(monkeypatch) -> None:
    monkeypatch.setattr(
        loads.Trace, "to_ranks", lambda self, ranks: np.ones((1, 1, ranks, 64), dtype=int)
    )
    found = {(case.load, case.setting.num_ranks) for case in balance._arguments([]).cases}
    names = [path.stem for path in DATA.glob("*.npz")] + synthetic_names()
    assert len(names) >= 8
    assert found == {(name, ranks) for name in names for ranks in (8, 16, 32, 64)}
