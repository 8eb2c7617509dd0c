"""Streams and events behind ``torch.cuda`` that are told apart, while all work runs in program order.

`install` puts them there; `issued` holds what a GPU would have been told since, in order: entries of `stream_order`. A
graph that captures (`graph_capture`) follows them by `StreamOrder`.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import megatron_on_cpu
import torch
import typing_extensions
from stream_order import Entry, HostWait, Record, Wait

issued: list[Entry] = []
_handles = itertools.count(0x5000, 0x10)
_events = itertools.count()
_BETWEEN = (  # frames of these are not the line that called torch
    str(Path(torch.__file__).parent), typing_extensions.__file__, contextlib.__file__,
    megatron_on_cpu.__file__, __file__,
    *(str(Path(__file__).with_name(f"{name}.py")) for name in ("graph_capture", "graphs_on_cpu")),
)  # fmt: skip


class CaptureError(RuntimeError):
    """A graph of a GPU would not be captured, or would not replay what was meant."""


def calling_line() -> str:
    """The line that called torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def refuse(reason: str, line: str = "") -> NoReturn:
    raise CaptureError(f"{reason}, at {line or calling_line()}")


def host_waits(call: str, *events: Event) -> None:
    if StreamOrder.current is not None:
        refuse(f"{call} makes the host wait inside a capture")
    if any(event.capture is not None for event in events):
        refuse(f"{call} asks for an event that was recorded inside a capture")


class Stream:
    """A stream of its own. The default one has the handle 0, as CUDA's."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.cuda_stream, self.priority = next(_handles), priority
        self.device = torch.device("cuda", 0)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_event(self, event: Any) -> None:
        if event.number is None:
            return  # never recorded
        issued.append(Wait(self.cuda_stream, event.number))
        capture = StreamOrder.current
        if event.external:
            return
        if capture is not None:
            capture.wait(self, event.seen if event.capture is capture else None)
        elif event.capture is not None:
            refuse("a stream waits for an event that was recorded inside a capture")

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else torch.cuda.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits("Stream.synchronize")
        self.record_event().synchronize()

    def query(self) -> bool:
        host_waits("Stream.query")
        return True

    def __enter__(self) -> Stream:
        _current.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _current.pop()


class Event:
    """An event; recording it again makes it another one, for whoever waits from then on."""

    def __init__(self, *args: Any, external: bool = False, **kwargs: Any) -> None:
        self.number: int | None = None
        self.external, self.seconds = external, 0.0
        self.capture: StreamOrder | None = None  # in which it was recorded
        self.seen: dict[Any, int] | None = None

    def record(self, stream: Any = None) -> None:
        stream = stream if stream is not None else _current[-1]
        self.number, self.seconds = next(_events), time.perf_counter()
        issued.append(Record(stream.cuda_stream, self.number))
        capture = StreamOrder.current
        self.seen = capture.recorded(stream) if capture is not None else None
        self.capture = None if self.seen is None or self.external else capture

    def wait(self, stream: Any = None) -> None:
        (stream if stream is not None else _current[-1]).wait_event(self)

    def synchronize(self) -> None:
        host_waits("Event.synchronize", self)
        if self.number is not None:
            issued.append(HostWait(self.number))

    def query(self) -> bool:
        host_waits("Event.query", self)
        return True

    def elapsed_time(self, end: Event) -> float:
        host_waits("Event.elapsed_time", self, end)
        return (end.seconds - self.seconds) * 1e3


class StreamOrder:
    """Which streams take part in a capture, and what each of them has waited for."""

    current: ClassVar[StreamOrder | None] = None  # of the graph that captures now

    def __init__(self) -> None:
        self.origin = torch.cuda.current_stream()
        # per stream: the last work of each that it follows
        self.seen: dict[Any, dict[Any, int]] = {self.origin: {}}
        self.last: dict[Any, int] = {}

    def work(self) -> None:
        stream = torch.cuda.current_stream()
        if stream not in self.seen:
            refuse("work on a stream that has not joined the capture")
        self.last[stream] = self.seen[stream][stream] = self.last.get(stream, 0) + 1

    def recorded(self, stream: Any) -> dict[Any, int] | None:
        """What an event recorded on ``stream`` stands for; None for a stream outside."""
        return dict(self.seen[stream]) if stream in self.seen else None

    def wait(self, stream: Any, event: dict[Any, int] | None) -> None:
        if event is None:
            if stream in self.seen:
                refuse("a stream that is captured waits for work from outside the capture")
            return
        seen = self.seen.setdefault(stream, {})
        for other, number in event.items():
            seen[other] = max(seen.get(other, 0), number)

    def assert_joined(self) -> None:
        for stream, number in self.last.items():
            if self.seen[self.origin].get(stream, 0) < number:
                refuse(f"nothing waited for its last work: {stream}", "the end of the capture")


DEFAULT = Stream()
DEFAULT.cuda_stream = 0
_current = [DEFAULT]  # the current one is last


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    _current.append(stream if stream is not None else _current[-1])
    try:
        yield
    finally:
        _current.pop()


def _set_stream(stream: Any) -> None:
    _current[-1] = stream


def _refuse_earlier(earlier: Any, name: str) -> NoReturn:
    refuse(f"{type(earlier).__name__}.{name}, made before streams were told apart, was used after")


# of ``torch.cuda``
NAMES = {
    "Stream": Stream,
    "Event": Event,
    "stream": _on_stream,
    "set_stream": _set_stream,
    "current_stream": lambda *_: _current[-1],
    "default_stream": lambda *_: DEFAULT,
}


# streams that Megatron makes once per process
_OF_MEGATRON = (
    "pipeline_parallel.utils._COMM_STREAM",
    "transformer.moe.shared_experts.SharedExpertMLP.stream",
    "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
)


def install() -> None:
    """After ``megatron_on_cpu.install()``, whose streams are all one; from now on the use of one of these is an error."""
    for kind in (megatron_on_cpu._Stream, megatron_on_cpu._Event):
        kind.__getattribute__ = _refuse_earlier
    for path in _OF_MEGATRON if "megatron.core" in sys.modules else ():
        owner, _, name = path.rpartition(".")
        setattr(pkgutil.resolve_name(f"megatron.core.{owner}"), name, None)
    for name, value in NAMES.items():
        setattr(torch.cuda, name, value)
