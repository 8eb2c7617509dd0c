"""The forecast of loads, and a sum that outlives its group. Oracle: literal numbers.

`test_observe` holds recorded loads to those that routers choose.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.step.forecast import LoadHistory
from megatron_hecate.step.load_monitor import LoadMonitor


@pytest.mark.fast
def test_a_first_iteration_is_its_own_forecast() -> None:
    history = LoadHistory()
    assert history.forecast() is None
    history.append(np.array([[5, 0, 3], [0, 0, 0]]))
    assert history.forecast() == pytest.approx(np.array([[5, 0, 3], [0, 0, 0]]))


@pytest.mark.fast
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


@pytest.mark.fast
def test_a_forecast_is_never_negative_nor_without_tokens() -> None:
    history = LoadHistory()
    for loads in ([[900, 100]], [[950, 50]], [[999, 1]], [[1000, 0]]):
        history.append(np.array(loads))
    assert history.forecast()[0].min() >= 0 and history.forecast().sum() == pytest.approx(1000)
    history.append(np.array([[0, 0]]))
    assert history.forecast().tolist() == [[0.0, 0.0]]
    history.append(np.array([[30, 10]]))
    assert np.isfinite(history.forecast()).all() and history.forecast().sum() == pytest.approx(40)


@ranks(2)
def test_a_sum_is_read_after_its_group_is_destroyed() -> None:
    """Megatron destroys process groups when training has ended; a record is written after that. And a look at the sum
    from another thread gives what `read` does."""
    group = dist.new_group([0, 1])
    monitor = LoadMonitor((1, 2), group, timeout=30)
    monitor.count(0, torch.tensor([1, 2]))
    assert monitor.start_reduce() and not monitor.start_reduce()
    look = monitor.peek()
    while (seen := look()) is None:
        pass
    assert seen[0].tolist() == [[2, 4]]
    dist.barrier()
    dist.destroy_process_group(group)
    assert monitor.collect_ready()
    assert monitor.history.last.tolist() == [[2, 4]]
