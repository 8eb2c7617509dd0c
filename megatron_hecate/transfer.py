"""A transfer that runs in the background, whatever the transport, and how long it took."""

from __future__ import annotations

import functools
import queue as queues
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch

from megatron_hecate import trace
from megatron_hecate.p2p import TransferError


class Queue:
    """Runs what it is given, one after the other, in a thread that does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._todo: queues.SimpleQueue[Callable[[], None] | None] = queues.SimpleQueue()
        threading.Thread(target=_work, args=(self._todo,), name=name, daemon=True).start()
        weakref.finalize(self, self._todo.put, None)

    def submit(self, run: Callable[[], None]) -> None:
        """Have ``run``, which does not raise, called after what came before it."""
        self._todo.put(run)


def _work(todo: queues.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := todo.get()) is not None:
        run()


class Transfer:
    """A spAG or spRS under way.

    Without CUDA the first step of ``steps`` runs at once and leaves asynchronous works behind; `wait` runs the others.
    With CUDA all steps are enqueued on a stream of their own, after what the current stream holds, and `wait` makes the
    current stream wait for them: the host never does.

    Args:
        steps: up to its first ``yield`` it posts what can run in the background, the rest waits and sums.
        device: of the memory it moves.
        what: "spAG" or "spRS".
        label: name of the layer.
        timed: whether it will be asked how long it took.
        queue: for transfers that take the host's time: its thread runs them, in the order in which they were made.
    """

    def __init__(
        self,
        steps: Iterator[None],
        device: torch.device,
        *,
        what: str,
        label: str,
        timed: bool = False,
        queue: Queue | None = None,
    ) -> None:
        self._steps, self._failed = steps, False
        self.what, self.label, self._clock = what, label, Stopwatch(device) if timed else None
        self._enqueued: torch.cuda.Event | None = None
        with trace.span(f"{what} start", label):
            if device.type == "cuda":
                stream = _transfer_stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    self._mark("begin")
                    for _ in steps:
                        pass
                    self._mark("end")
                    self._enqueued = stream.record_event()
            elif queue is not None or trace.recording() or timed:  # gloo does not tell when it is over
                trace.follow(what, label, over=self._in_background(queue))
            else:
                next(steps, None)

    def _mark(self, when: str) -> None:
        if self._clock is not None:
            self._clock.mark(when)

    def _in_background(self, queue: Queue | None) -> Callable[[], bool]:
        """Run all steps in a thread, of its own if there is no ``queue``; whether they have ended."""
        steps, ended = self._steps, Future()

        def run() -> None:
            try:
                self._mark("begin")
                with torch.no_grad():
                    for _ in steps:
                        pass
                self._mark("end")
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        if queue is None:
            threading.Thread(target=run, name=f"{self.what} {self.label}", daemon=True).start()
        else:
            queue.submit(run)

        def join() -> Iterator[None]:
            ended.result()
            yield from ()

        self._steps = join()
        return ended.done

    @property
    def seconds(self) -> float | None:
        """How long it took, once it is over, if it was ``timed``."""
        return None if self._clock is None else self._clock.seconds

    def wait(self) -> None:
        """Wait until it is over; again does nothing.

        Raises:
            TransferError: when a peer died or did not answer in time, every time.
        """
        if self._failed:
            raise TransferError(f"{self.label}: this {self.what} failed before")
        with trace.span(f"{self.what} wait", self.label):
            if self._enqueued is not None:
                torch.cuda.current_stream().wait_event(self._enqueued)
            try:
                for _ in self._steps:
                    pass
            except BaseException:
                self._failed = True
                raise


class Stopwatch:
    """Two moments on a stream, or on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_device, self._at = device.type == "cuda", {}

    def mark(self, when: str) -> None:
        if self._on_device:
            self._at[when] = torch.cuda.Event(enable_timing=True)
            self._at[when].record()
        else:
            self._at[when] = time.perf_counter()

    @property
    def ended(self) -> bool:
        """Whether ``end`` was marked."""
        return "end" in self._at

    @property
    def seconds(self) -> float | None:
        """Between the marks ``begin`` and ``end``; ``None`` while the second has not been reached."""
        if "end" not in self._at:
            return None
        begin, end = self._at["begin"], self._at["end"]
        if not self._on_device:
            return end - begin
        return begin.elapsed_time(end) / 1e3 if end.query() else None


@functools.cache
def _transfer_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
