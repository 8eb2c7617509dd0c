"""`bench/node.py`: routes are equal for all ways, dealt ones even; the whole benchmark, rehearsed on 2 CPU ranks.

Oracles: shares of popularities summed by rank; columns of the printed tables.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from node_routes import EVEN, Popularity, imbalance

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.fast
@pytest.mark.parametrize(("experts", "num_ranks", "top_k"), [(128, 8, 8), (64, 4, 6), (32, 8, 8)])
def test_dealt_popularities_are_the_same_and_even(experts: int, num_ranks: int, top_k: int) -> None:
    """Equal ones, where the hottest expert alone is too much for a rank."""
    popularity = Popularity(experts=experts, top_k=top_k)
    for step in range(5):
        logarithms = popularity.logarithms(1, step)
        dealt = popularity.deal(logarithms, num_ranks)
        shares = np.sort(popularity.shares(logarithms))
        # the hottest expert, with the least popular ones beside it
        least = shares[-1] + shares[: experts // num_ranks - 1].sum()
        if least * num_ranks > EVEN:
            assert np.ptp(dealt) == 0
            continue
        assert np.array_equal(np.sort(dealt), np.sort(logarithms))
        routed = popularity.shares(logarithms).reshape(num_ranks, -1).sum(axis=1)
        even = popularity.shares(dealt).reshape(num_ranks, -1).sum(axis=1)
        assert imbalance(even) < 1.03 < imbalance(routed)


@pytest.mark.newest
def test_all_of_it_without_a_gpu(tmp_path: Path) -> None:
    """Every way computes with replicas where routing is skewed; the columns of a traced step sum to it."""
    command = [sys.executable, "bench/node.py", "--tiny", "--steps=2", "--warmup=2", "--alpha=1.5"]
    command += ["--microbatches=2", "--regimes=gpu,balanced", f"--profile={tmp_path}"]
    command += ["--ways=nvlink:late,p2p:layer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("| ")
    ]
    skewed, balanced, spans = _tables(rows)
    ways = ["stock", "ideal", "nvlink:late", "p2p:layer"]
    assert [row["way"] for row in skewed] == [row["way"] for row in balanced] == ways
    by_way = {row["way"]: row for row in skewed}
    assert float(by_way["ideal"]["routed"]) < float(by_way["stock"]["routed"])
    for way in ways[2:]:
        assert float(by_way[way]["replicas"]) > 0, way
        assert by_way[way]["routed"] == by_way["stock"]["routed"]
        assert float(by_way[way]["computed"]) < float(by_way["stock"]["computed"])
    names = [name for name in spans[0] if name != "ms of a step" and "per layer" not in name]
    assert sorted(names) == sorted(way.replace(":", "-") for way in ways)
    for name in names:
        step, *parts = (float(row[name].replace(",", "")) for row in spans)
        assert sum(parts) == pytest.approx(step, rel=1e-2)


def _tables(rows: list[list[str]]) -> list[list[dict[str, str]]]:
    """Split rows at their heads, whose first cell is that of a table of `node` or `node_spans`."""
    tables: list[list[dict[str, str]]] = []
    head: list[str] = []
    for row in rows:
        if row[0] in ("way", "ms of a step"):
            head = row
            tables.append([])
        elif tables and len(row) == len(head):
            tables[-1].append(dict(zip(head, row, strict=True)))
    return tables


@pytest.mark.fast
@pytest.mark.parametrize(("multiprocessors", "is_refused"), [(16, False), (132, True)])
def test_ranks_that_take_turns_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, is_refused: bool
) -> None:
    """What torch reported of 8 ranks of an H200, with MPS and without (132, a whole GPU's)."""
    from node_models import check_shares

    properties = SimpleNamespace(multi_processor_count=multiprocessors, major=9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    refused = pytest.raises(ValueError, match="132 multiprocessors: they take turns")
    with refused if is_refused else contextlib.nullcontext():
        check_shares(8)
