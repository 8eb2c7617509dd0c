"""Load history and its forecast. Oracle: literal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.observe import LoadHistory, LoadMonitor


def test_a_first_iteration_is_its_own_forecast() -> None:
    history = LoadHistory()
    assert history.forecast() is None
    history.append(np.array([[5, 0, 3], [0, 0, 0]]))
    assert history.forecast() == pytest.approx(np.array([[5, 0, 3], [0, 0, 0]]))


def test_a_steady_drift_is_carried_on_and_noise_is_not() -> None:
    """Layer 0 drifts: the forecast is beyond the last loads. Layer 1 goes up and down: it is between the last two."""
    history = LoadHistory()
    for step in range(8):
        up = 400 + 40 * step
        swing = 500 + 100 * (-1) ** step
        history.append(np.array([[up, 2000 - up], [swing, 1000 - swing]]))
    drifting, swinging = history.forecast()
    assert drifting.sum() == pytest.approx(2000) and swinging.sum() == pytest.approx(1000)
    assert drifting[0] == pytest.approx(720, abs=5)  # after 680
    assert 400 < swinging[0] < 500  # after 600, 400


def test_a_forecast_is_never_negative_nor_without_tokens() -> None:
    history = LoadHistory()
    for loads in ([[900, 100]], [[950, 50]], [[999, 1]], [[1000, 0]]):
        history.append(np.array(loads))
    assert history.forecast()[0].min() >= 0 and history.forecast().sum() == pytest.approx(1000)
    history.append(np.array([[0, 0]]))
    assert history.forecast().tolist() == [[0.0, 0.0]]
    history.append(np.array([[30, 10]]))
    assert np.isfinite(history.forecast()).all() and history.forecast().sum() == pytest.approx(40)


def test_scenarios_are_the_forecast_off_by_what_it_was_off_before_and_bursts() -> None:
    """Squares of 3, 4, 12 and of 4, 3, 12: unit vectors of length 13 whose difference is the one error, by hand."""
    history = LoadHistory()
    assert history.scenarios(0, 3) is None
    history.append(np.array([[9, 16, 144]]))
    assert history.scenarios(0, 3) is None  # no forecast was ever off
    history.append(np.array([[16, 9, 144]]))
    scenarios = history.scenarios(0, 3)
    assert scenarios.shape == (32, 3)
    expected = np.sqrt(history.forecast()[0]) / 13
    error = np.array([1, -1, 0]) / 13
    np.testing.assert_allclose(np.sqrt(scenarios[[0, 8]]), [expected + error, expected - error], atol=1e-7)
    np.testing.assert_allclose(np.sqrt(scenarios[[*range(1, 8), *range(9, 16)]]), np.tile(expected, (14, 1)), atol=1e-7)
    more = np.sqrt(scenarios[16:]) - expected
    rms = np.sqrt(2 / 3) / 13
    assert more.max(axis=0) == pytest.approx(3 * rms, rel=1e-6)  # every expert bursts, in one scenario only
    assert (more > 1e-6).sum(axis=0).tolist() == [1, 1, 1] and (more > 1e-6).sum(axis=1).max() == 1


def test_scenarios_of_the_last_eight_errors_layer_by_layer() -> None:
    history, rng, errors = LoadHistory(), np.random.default_rng(0), []
    for step in range(12):
        forecast = history.forecast()
        history.append(np.stack([rng.integers(1, 100, 20), np.zeros(20, np.int64), np.full(20, 7)]))
        if step:
            came, expected = (np.sqrt(loads[0] / loads[0].sum()) for loads in (history.last, forecast))
            errors.append(came - expected)
    wild, empty, steady = (history.scenarios(layer, 20) for layer in range(3))
    expected = np.sqrt(history.forecast()[0] / history.forecast()[0].sum())
    ring = errors[8:] + errors[3:8]  # the last eight of eleven
    by_hand = [np.maximum(expected + sign * error, 0) ** 2 for sign in (1, -1) for error in ring]
    np.testing.assert_allclose(wild[:16], by_hand, atol=1e-6)
    rms = np.sqrt(np.mean(np.square(errors[-8:])))
    assert (np.sqrt(wild[16:]) - expected).max() == pytest.approx(3 * rms, rel=1e-4)
    assert empty.max() == 0
    np.testing.assert_allclose(steady, 1 / 20, rtol=1e-6)


@ranks(3)
def test_counts_are_summed_over_the_group() -> None:
    rank = dist.get_rank()
    monitor = LoadMonitor(2, 4, dist.group.WORLD, timeout=30)
    monitor.finish_reduce()  # nothing counted: no message
    assert monitor.history.forecast() is None
    for _ in range(2):
        routing_map = torch.zeros(5, 4, dtype=torch.bool)
        routing_map[: rank + 1, 2] = True
        monitor.count(1, routing_map)
    monitor.count(0, torch.ones(1, 3, dtype=torch.bool))  # a layer with fewer experts
    monitor.start_reduce()
    monitor.start_reduce()  # once per iteration
    monitor.finish_reduce()
    assert monitor.history.last.tolist() == [[3, 3, 3, 0], [0, 0, 2 * (1 + 2 + 3), 0]]
    monitor.finish_reduce()
    assert monitor.history.last.tolist() == [[3, 3, 3, 0], [0, 0, 12, 0]]
