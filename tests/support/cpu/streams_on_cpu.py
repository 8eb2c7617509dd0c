"""Streams and events behind ``torch.cuda`` that are told apart and noted, while all work runs in program order.

`install` puts them there; `issued` holds what a GPU would have been told since, in order: entries of `stream_order`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from stream_order import Entry, HostWait, Record, Wait

issued: list[Entry] = []
_handles = itertools.count(0x5000, 0x10)
_events = itertools.count()


class Stream:
    """A stream of its own. The default one has the handle 0, as CUDA's."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.cuda_stream, self.priority, self.device = (
            next(_handles),
            priority,
            torch.device("cuda", 0),
        )

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        if event.number is not None:  # waiting for an event that was never recorded does nothing
            issued.append(Wait(self.cuda_stream, event.number))

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        _current.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _current.pop()


class Event:
    """An event; recording it again makes it another one, for whoever waits from then on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.number, self.seconds = next(_events), time.perf_counter()
        issued.append(
            Record((stream if stream is not None else _current[-1]).cuda_stream, self.number)
        )

    def wait(self, stream: Any = None) -> None:
        (stream if stream is not None else _current[-1]).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            issued.append(HostWait(self.number))

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.seconds - self.seconds) * 1e3


DEFAULT = Stream()
DEFAULT.cuda_stream = 0
_current = [DEFAULT]


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    _current.append(stream if stream is not None else _current[-1])
    try:
        yield
    finally:
        _current.pop()


def _set_stream(stream: Any) -> None:
    _current[-1] = stream


def install() -> None:
    """After ``megatron_on_cpu.install()``, whose streams are all one."""
    cuda = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream, cuda.set_stream = Stream, Event, _on_stream, _set_stream
    cuda.current_stream, cuda.default_stream = (lambda *_: _current[-1]), (lambda *_: DEFAULT)
