"""Where iterations begin and end. Oracle: literal sequences of calls, as training loops make them."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron_hecate.megatron.events import StepEvents
from megatron_hecate.step.clock import Clock
from megatron_hecate.step.detect import Detector

pytestmark = pytest.mark.fast


class _Returns:
    """Gradients of replicas, as the detector sees them."""

    data_parallel = None

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def wait_for(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(self.waiting)

    def drop(self) -> list[str]:
        dropped, self.waiting = self.waiting, []
        return dropped


class _Log(StepEvents):
    def __init__(self, num_layers: int, passes: tuple[int, ...] | None = None) -> None:
        self.events: list[str] = []
        self.clock = Clock(passes or (1,) * num_layers)
        self.clock.listeners.append(self)
        self.returns = _Returns()
        self.detector = Detector(self.clock, self.returns, [0] * num_layers)

    def iteration_begins(self, iteration: int) -> None:
        self.events.append("begin")

    def forward(self, layer: int) -> bool:
        begins = self.clock.enter(layer)
        self.clock.forwarded(layer)
        return begins


def test_an_optimizer_step_begins_an_iteration() -> None:
    log = _Log(num_layers=2)
    assert [log.forward(layer) for layer in (0, 1, 0, 1)] == [True, True, False, False]
    assert log.events == ["begin"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    assert [log.forward(layer) for layer in (0, 1, 0, 1)] == [True, True, False, False]
    assert log.events == ["begin", "begin"]


def test_a_layer_that_runs_twice_in_a_microbatch() -> None:
    log = _Log(num_layers=2, passes=(1, 2))
    within = []
    for layer in (0, 1, 1, 0, 1, 1):
        within.append(log.clock.is_within_microbatch(layer))
        log.forward(layer)
    assert within == [False, False, True, False, False, True]
    assert log.events == ["begin"]


class _Plain(torch.optim.SGD):
    """A ``step`` that calls none of torch's, as apex's and TransformerEngine's fused optimizers have."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None: ...


class _Inheriting(_Plain):
    """No ``step`` of its own."""


class _Calling(_Plain):
    """A ``step`` that calls its parent's: both are seen."""

    def step(self, closure: None = None) -> None:
        super().step(closure)


@pytest.mark.parametrize("kind", [_Plain, _Inheriting, _Calling])
@pytest.mark.parametrize("before", [True, False], ids=["made-before", "made-after"])
def test_steps_of_all_kinds_of_optimizers_are_seen(kind: type, before: bool) -> None:
    make = lambda: kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # noqa: E731
    optimizer = make() if before else None
    log = _Log(num_layers=1)
    optimizer = optimizer or make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the object's step
    assert [log.forward(0), log.forward(0)] == [True, False]
    optimizer.step()
    assert [log.forward(0), log.forward(0)] == [True, False]


def test_interleaved_chunks() -> None:
    log = _Log(num_layers=2)
    # chunk 0 runs both microbatches before chunk 1, as interleaved pipelines do
    assert [log.forward(layer) for layer in (0, 0, 1, 1)] == [True, False, True, False]
    log.clock.end_iteration()
    assert [log.forward(0) for _ in range(3)] == [True, False, False]
    assert [log.forward(1) for _ in range(3)] == [True, False, False]
    assert log.events == ["begin", "begin"]


def test_the_number_of_microbatches_is_that_of_the_iteration_before() -> None:
    log, seen = _Log(num_layers=2, passes=(1, 2)), []
    for microbatches in (3, 4, 0, 1):
        for _ in range(microbatches):
            for layer in (0, 1, 1):
                log.forward(layer)
        seen.append(log.clock.microbatches)
        log.clock.end_iteration()
    assert seen == [None, 3, 3, 4]


def test_any_number_of_microbatches() -> None:
    log = _Log(num_layers=1)
    assert [log.forward(0) for _ in range(5)] == [True, False, False, False, False]
    log.clock.end_iteration()
    assert log.forward(0)
    assert log.events == ["begin", "begin"]


def test_a_step_before_gradients_returned_is_an_error_once() -> None:
    log = _Log(num_layers=1)
    log.forward(0)
    log.returns.waiting = ["layer 3", "layer 5"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(
        RuntimeError, match=r"SGD steps while .* wait \(layer 3, layer 5\).* finish_grad_sync"
    ):
        optimizer.step()
    optimizer.step()  # forgotten: a loop that catches the error can go on
    assert [log.forward(0) for _ in range(3)] == [True, False, False]


def test_a_dead_detector_leaves_optimizers_alone() -> None:
    log = _Log(num_layers=1)
    log.returns.waiting = ["layer 1"]
    del log
    gc.collect()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
