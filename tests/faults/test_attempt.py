"""When an attempt of the job ends, and what ends with it. Oracle: literal sequences of process groups of one rank."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_hecate.faults import attempt as attempts
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.faults.rendezvous import Question
from megatron_hecate.megatron.events import listen_to_steps

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _begin() -> Iterator[None]:
    new_groups()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def new_groups() -> None:
    """Destroy the process groups of this process, and make new ones."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class _Resource:
    def __init__(self) -> None:
        self.ended: list[str] = []
        Attempt.current().at_end(self.end)

    def end(self) -> None:
        self.ended.append(threading.current_thread().name)


class _Listener:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(optimizer)


def _step() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    return optimizer


def test_models_of_one_attempt_share_it() -> None:
    first, resource = Attempt.current(), _Resource()
    assert Attempt.current() is first and not first.is_over
    assert [first.count("model"), Attempt.current().count("model")] == [1, 2]
    other = dist.new_group([0])  # further groups come and go within an attempt
    dist.destroy_process_group(other)
    assert Attempt.current() is first and resource.ended == []


def test_the_next_attempt_ends_the_one_before_first() -> None:
    first, resource = Attempt.current(), _Resource()
    new_groups()
    assert first.is_over
    second = Attempt.current()
    assert second is not first and not second.is_over
    assert resource.ended == [threading.main_thread().name]
    assert second.count("model") == 1


def test_without_a_next_attempt_it_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its groups have gone for good, or others have come that have nothing to do with us."""
    monkeypatch.setattr(attempts, "POLL_PAUSE", 0.05)
    monkeypatch.setattr(attempts, "LINGER", 0.4)
    for then in (lambda: dist.destroy_process_group(), new_groups):
        if not dist.is_initialized():
            new_groups()
        resource = _Resource()
        began = time.monotonic()
        then()
        while not resource.ended and time.monotonic() - began < 10:
            time.sleep(0.01)
        assert resource.ended == ["fssdp attempt"]


def test_one_that_cannot_end_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(_Resource):
        def end(self) -> None:
            raise OSError("disk full")

    first, broken, last = _Resource(), Broken(), _Resource()
    new_groups()
    Attempt.current()
    assert first.ended and last.ended and broken.ended == []
    assert "disk full" in capsys.readouterr().err


def test_a_group_that_was_collected_is_over_as_well() -> None:
    """Then no object is left to compare with."""
    first = Attempt.current()
    dist.destroy_process_group()
    gc.collect()
    assert first.is_over


def test_listeners_of_an_abandoned_attempt_hear_nothing() -> None:
    old = _Listener()
    listen_to_steps(old)
    stepped = _step()
    assert old.seen == [stepped]
    new_groups()  # and nothing of ours comes after
    _step()
    assert len(old.seen) == 1


class _Plain(torch.optim.SGD):
    """A ``step`` that calls none of torch's, as apex's and TransformerEngine's fused optimizers have."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None: ...


class _Inheriting(_Plain):
    """No ``step`` of its own."""


class _Calling(_Plain):
    """A ``step`` that calls its parent's."""

    def step(self, closure: None = None) -> None:
        super().step(closure)


@pytest.mark.parametrize("kind", [_Plain, _Inheriting, _Calling])
@pytest.mark.parametrize("is_first", [True, False], ids=["made-before", "made-after"])
def test_steps_of_all_kinds_of_optimizers_are_heard(kind: type, is_first: bool) -> None:
    make = lambda: kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # noqa: E731
    optimizer = make() if is_first else None
    listener = _Listener()
    listen_to_steps(listener)
    optimizer = optimizer or make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the object's step
    listener.seen.clear()
    optimizer.step()
    assert set(listener.seen) == {optimizer}


def test_listeners_may_be_collected_while_torch_calls_them() -> None:
    """Oracle: `OrderedDict mutated during iteration`, which a hook of its own for each would give here."""
    listeners = [_Listener() for _ in range(3)]

    class Dropping(_Listener):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            listeners.clear()
            gc.collect()

    dropping = Dropping()
    listen_to_steps(dropping)
    for listener in listeners:
        listen_to_steps(listener)
    del listener
    _step()
    after = _Listener()
    listen_to_steps(after)
    assert after.seen == [] and [_step()] == after.seen


def test_counts_begin_anew_with_an_attempt() -> None:
    """Ranks that died at different places, and processes that take the place of others, must agree again."""
    for _ in range(3):
        Question.next(timeout=1.0)
    new_groups()
    Question.next(timeout=1.0)
    assert Attempt.current().count("question") == 2
