"""Iterations and load history. Oracle: literal sequences of calls, as training loops make them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.observe import LoadHistory, LoadMonitor
from megatron_hecate.schedule import IterationClock


class _Log:
    def __init__(self, num_layers: int, microbatches: int | None) -> None:
        self.microbatches, self.waiting, self.events = microbatches, [], []
        self.clock = IterationClock(
            num_layers,
            num_microbatches=lambda: self.microbatches,
            on_begin=lambda: self.events.append("begin"),
            on_forwards_done=lambda: self.events.append("done"),
            drop_unsent=self._drop,
        )

    def _drop(self) -> list:
        dropped, self.waiting = self.waiting, []
        return dropped

    def forward(self, layer: int) -> bool:
        begins = self.clock.enter(layer)
        self.clock.forwarded(layer)
        return begins


def test_an_optimizer_step_begins_an_iteration() -> None:
    log = _Log(num_layers=2, microbatches=2)
    assert [log.forward(layer) for layer in (0, 1, 0, 1)] == [True, True, False, False]
    assert log.events == ["begin", "done"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    assert [log.forward(layer) for layer in (0, 1, 0, 1)] == [True, True, False, False]
    assert log.events == ["begin", "done", "begin", "done"]


def test_a_skipped_step_is_noticed_by_counting() -> None:
    log = _Log(num_layers=2, microbatches=2)
    firsts = [log.forward(layer) for layer in (0, 1, 0, 1, 0, 1, 0, 1)]
    assert firsts == [True, True, False, False, True, True, False, False]
    assert log.events == ["begin", "done", "begin", "done"]


def test_interleaved_chunks_and_ramp_up() -> None:
    log = _Log(num_layers=2, microbatches=2)
    # chunk 0 runs both microbatches before chunk 1, as interleaved pipelines do
    assert [log.forward(layer) for layer in (0, 0, 1, 1)] == [True, False, True, False]
    assert log.events == ["begin", "done"]
    log.microbatches = 3  # the global batch grows
    log.clock.weights_changed()
    assert [log.forward(0) for _ in range(3)] == [True, False, False]
    assert [log.forward(1) for _ in range(3)] == [True, False, False]
    assert log.events == ["begin", "done", "begin", "done"]


def test_unknown_number_of_microbatches() -> None:
    log = _Log(num_layers=1, microbatches=None)
    assert [log.forward(0) for _ in range(5)] == [True, False, False, False, False]
    log.clock.weights_changed()
    assert log.forward(0)
    assert log.events == ["begin", "begin"]


def test_a_step_with_gradients_away_from_home_is_an_error_once() -> None:
    log = _Log(num_layers=1, microbatches=4)
    log.forward(0)
    log.waiting = [("layer 3", 1)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(RuntimeError, match=r"SGD steps while .* last of 4 microbatches; .* seen: layer 3 \(1 of 4\)"):
        optimizer.step()
    optimizer.step()  # forgotten: a loop that catches the error can go on
    assert [log.forward(0) for _ in range(5)] == [True, False, False, False, True]


def test_an_iteration_that_begins_with_gradients_away_from_home_is_an_error_once() -> None:
    log = _Log(num_layers=2, microbatches=1)
    assert log.forward(0) and log.forward(1)
    log.waiting = [("layer 1", 1), ("layer 2", 1)]
    with pytest.raises(RuntimeError, match=r"a new iteration begins while .* layer 1 \(1 of 1\), layer 2 \(1 of 1\)"):
        log.forward(0)
    assert log.forward(0) and log.forward(1)


def test_a_dead_clock_leaves_optimizers_alone() -> None:
    log = _Log(num_layers=1, microbatches=1)
    log.waiting = [("layer 1", 1)]
    del log
    gc.collect()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()


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
