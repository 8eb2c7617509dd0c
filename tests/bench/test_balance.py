"""The balance benchmark and its loads.

Oracles: the plans, scored here with plain numpy and nothing of ours, must give the table's figures; loads must sum to
what they were made from; the same command must give the same twice. Then bad input, and the message a user needs.
"""

from __future__ import annotations

from pathlib import Path

import balance
import numpy as np
import pytest
from loads import EXPERTS, PAIRS, Trace, synthetic, synthetic_names
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


def test_synthetic_loads_are_what_they_say() -> None:
    """And the same twice."""
    assert (synthetic("hotspot", 8, steps=22) == synthetic("hotspot", 8, steps=22)).all()
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


def test_the_figures_are_those_of_the_plans(trace) -> None:
    command = ["--trace", str(trace), "--per-node", "4", "--slots", "1", "--ranks", "8"]
    (case,) = balance._arguments(command).cases
    node = np.arange(8) // 4
    for name, planner in find_planners().items():
        plans: list[tuple] = []

        def record(before, after, quotas, plans=plans) -> None:
            dense = np.zeros((8, 16, 8), dtype=int)
            dense[:, quotas.expert, quotas.rank] = quotas.tokens
            plans.append((before.holders, after.holders, dense))

        result = balance.replay(planner, case, record=record)
        row = result.row(case, planner, skip=1, forced_seconds=1.0)
        placed, holders, quota = (
            np.reshape(parts, (4, 2, *np.shape(parts[0]))) for parts in zip(*plans, strict=True)
        )
        # `test_rivals` shows that they are valid; the first step is skipped
        placed, holders, quota = placed[1:], holders[1:], quota[1:]
        rank = quota.sum(axis=(2, 3))
        imbalance = rank.max(axis=-1) / rank.mean(axis=-1)
        crossing = (quota.sum(axis=3) * (node[:, None] != node)).sum(axis=(-1, -2))
        late = (holders & ~placed).sum(axis=(2, 3)).mean() / 8
        figures = {
            "imbalance_mean": imbalance.mean(),
            "imbalance_p95": np.percentile(imbalance, 95),
            "imbalance_p99": np.percentile(imbalance, 99),
            "crossing": (crossing / quota.sum(axis=(2, 3, 4))).mean(),
            "extra": holders.sum(axis=2).max() - 2,
            "late": late,
        }
        if name in ("hecate", "hecate-unpriced", "algorithm1", "fill", "clone-in-node"):
            figures["copies"] = (placed.sum(axis=(2, 3)) - 16).mean() / 8
        assert {figure: float(row[figure]) for figure in figures} == pytest.approx(figures), name


def test_the_same_command_twice(trace, capsys) -> None:
    runs, command = [], ["--trace", str(trace), "--per-node", "4", "--slots", "1"]
    for _ in range(2):
        rows = balance.main([*command, "--ranks", "4,16"])
        runs.append([{k: v for k, v in row.items() if k not in TIMING} for row in rows])
    assert runs[0] == runs[1] and len(runs[0]) == 2 * len(find_planners())
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_sources_are_summed_or_dealt_to_ranks(trace) -> None:
    small = Trace.read(trace)
    fewer, more = small.to_ranks(4), small.to_ranks(16, seed=3)
    assert (fewer == small.counts[:, :, 0::2] + small.counts[:, :, 1::2]).all()
    assert (more[:, :, 0::2] + more[:, :, 1::2] == small.counts).all()
    assert (more.sum(axis=-1) == 150).all()
