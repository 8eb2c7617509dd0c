"""The page about a run whose record holds the fullest rank of each microbatch, as routed and as computed.

Oracle: the page of the same record without them, and the time of the additional tokens by plain loops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recorded

from megatron_hecate.tools.report_content import Report

pytestmark = pytest.mark.fast
SIZE = recorded.Size()


def test_lost_and_remaining_time_are_those_of_single_microbatches(tmp_path: Path) -> None:
    held = recorded.arrays(SIZE)
    rng = np.random.default_rng(3)
    # Tokens of the fullest rank beyond those of the iteration's fullest rank, [T, L].
    routed, computed = rng.integers(1, 200, (2, SIZE.num, SIZE.layers))
    by_rank = held["load"].reshape(SIZE.num, SIZE.layers, SIZE.ranks, -1).sum(axis=3)
    peaks = dict(
        peak=by_rank.max(axis=2) + routed,
        computed_peak=held["rank_load"].max(axis=2) + computed,
    )
    summed, single = (
        Report.read(recorded.write(tmp_path / name, SIZE, held={**held, **more}))
        for name, more in (("summed", {}), ("single", peaks))
    )
    # Forward, and a backward of twice as much.
    token_ms = 1e3 * 3 * recorded.SHAPE["token_flops"] / recorded.SPEEDS["flops"]
    before, after = summed.prediction, single.prediction
    for t in range(SIZE.num):
        lost = before.lost_ms[t] + sum(routed[t].tolist()) * token_ms
        left = before.left_ms[t] + sum(computed[t].tolist()) * token_ms
        assert after.lost_ms[t] == pytest.approx(lost, rel=1e-4)
        assert after.left_ms[t] == pytest.approx(left, rel=1e-4)
        for layer in range(SIZE.layers):
            mean = sum(by_rank[t, layer].tolist()) / SIZE.ranks
            ratio = peaks["computed_peak"][t, layer] / mean
            assert single.run.waits_computed[t, layer] == pytest.approx(ratio, rel=1e-6)
            assert summed.run.waits_computed[t, layer] < ratio


def test_without_microbatches_as_computed_both_sides_are_of_the_iteration(tmp_path: Path) -> None:
    """Padded inputs are not counted by microbatch: a difference of definitions is no gain."""
    held = recorded.arrays(SIZE)
    held["replica"][:] = -1
    by_rank = held["load"].reshape(SIZE.num, SIZE.layers, SIZE.ranks, -1).sum(axis=3)
    held |= dict(rank_load=by_rank, peak=by_rank.max(axis=2) + 100)
    report = Report.read(recorded.write(tmp_path / "run", SIZE, held=held))
    assert report.prediction.lost_ms == pytest.approx(report.prediction.left_ms, rel=1e-9)
    assert (report.run.waits == report.run.waits_computed).all()
