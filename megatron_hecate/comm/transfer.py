"""A transfer that runs in the background, whatever the transport, and how long it took."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future

import torch

from megatron_hecate import trace
from megatron_hecate.job.collectives import TransferError


class Transfer:
    """A spAG or spRS under way.

    Without CUDA the first step of ``steps`` runs at once and leaves asynchronous works behind; `wait` runs the others.
    With CUDA all steps are enqueued on a stream of their own, after what the current stream holds, and `wait` makes the
    current stream wait for them: the host never does. Where all streams share one hardware queue (`has_one_queue`),
    what follows the first ``yield`` is left to `wait`: there a stream that waits would stop all others.

    Args:
        steps: up to its first ``yield`` it posts what can run in the background, the rest waits and sums.
        device: of the memory it moves.
        what: "spAG" or "spRS".
        label: name of the layer.
        watch: ``steps`` mark its "begin" once the peers have come, and the transfer its "end". A transfer that is left
            to `wait` cannot be timed.
        after: without CUDA, for transfers that take the host's time: all steps run in a thread, once this has ended.
    """

    def __init__(
        self,
        steps: Iterator[None],
        device: torch.device,
        *,
        what: str,
        label: str,
        watch: Stopwatch | None = None,
        after: Future[None] | None = None,
    ) -> None:
        self._steps, self._failed = steps, False
        self.what, self.label, self._watch = what, label, watch
        self.ended: Future[None] = Future()  # of the thread that runs it, where there is one
        self._stream: torch.cuda.Stream | None = None
        self._enqueued: torch.cuda.Event | None = None
        with trace.span(f"{what} start", label):
            if device.type == "cuda":
                self._stream = transfer_stream(device)
                self._stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(self._stream):
                    over = object()
                    if has_one_queue() and next(steps, over) is not over:
                        self._watch = None
                    else:
                        self._enqueue_rest(self._stream)
            elif (
                after is not None or trace.Recorder.is_running() or watch is not None
            ):  # gloo does not tell when it is over
                self._run_in_thread(after)
                trace.follow(what, label, over=self.ended.done)
            else:
                next(steps, None)

    def _enqueue_rest(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in self._steps:
                pass
            if self._watch is not None:
                self._watch.mark("end")
            self._enqueued = stream.record_event()

    def _run_in_thread(self, after: Future[None] | None) -> None:
        """Run all steps in a thread, which does not keep the process alive; `wait` then waits for it."""
        steps, ended, watch = self._steps, self.ended, self._watch

        def run() -> None:
            try:
                if after is not None:
                    futures.wait([after])
                with torch.no_grad():
                    for _ in steps:
                        pass
                if watch is not None:
                    watch.mark("end")
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        def join() -> Iterator[None]:
            ended.result()
            yield from ()

        self._steps = join()
        threading.Thread(target=run, name=f"{self.what} {self.label}", daemon=True).start()

    @property
    def timed(self) -> bool:
        """Whether `seconds` will be known."""
        return self._watch is not None

    @property
    def seconds(self) -> float | None:
        """From when its peers had come to its end, once it is over, if it was ``timed``."""
        return None if self._watch is None else self._watch.seconds

    def wait(self) -> None:
        """Wait until it is over; again does nothing.

        Raises:
            TransferError: when a peer died or did not answer in time, every time.
        """
        if self._failed:
            raise TransferError(f"{self.label}: this {self.what} failed before")
        with trace.span(f"{self.what} wait", self.label):
            try:
                if self._stream is not None and self._enqueued is None:
                    self._enqueue_rest(self._stream)
                for _ in self._steps:
                    pass
                if self._enqueued is not None:
                    torch.cuda.current_stream().wait_event(self._enqueued)
            except BaseException:
                self._failed = True
                raise


class Stopwatch:
    """Two moments on a stream, or on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: dict[str, torch.cuda.Event] = {}
        self._times: dict[str, float] = {}

    def mark(self, when: str) -> None:
        """Note the moment "begin" or "end"."""
        if self._on_gpu:
            self._events[when] = torch.cuda.Event(enable_timing=True)
            self._events[when].record()
        else:
            self._times[when] = time.perf_counter()

    @property
    def begun(self) -> bool:
        """Whether "begin" was marked."""
        return "begin" in self._events or "begin" in self._times

    @property
    def ended(self) -> bool:
        """Whether "end" was marked."""
        return "end" in self._events or "end" in self._times

    @property
    def seconds(self) -> float | None:
        """From "begin" to "end"; ``None`` while the second has not been reached."""
        if not self.ended:
            return None
        if not self._on_gpu:
            return self._times["end"] - self._times["begin"]
        begin, end = self._events["begin"], self._events["end"]
        return begin.elapsed_time(end) / 1e3 if end.query() else None


def has_one_queue() -> bool:
    """Whether all streams of this process share one hardware queue of the GPU: what is enqueued runs in that order, and
    work that waits for another stream stops all that is enqueued after it. Megatron asks for it before Blackwell."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


@functools.cache
def transfer_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a rank's transfers run. A peer waits for each of them, so its blocks come before those of
    other streams."""
    _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # a static method
    return torch.cuda.Stream(device, priority=highest)
