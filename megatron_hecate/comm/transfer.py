"""A transfer in flight, the same for every transport."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import torch

from megatron_hecate import trace
from megatron_hecate.comm.collectives import TransferError


class Transfer:
    """A spAG or spRS in flight.

    Without CUDA the first step of ``steps`` runs immediately, and may leave asynchronous works
    behind; `wait` runs the remaining steps. With CUDA all steps are enqueued on the transfer
    stream, after the work that the current stream holds, and `wait` makes the current stream wait
    for the transfer: the host never waits. Where all streams share one hardware queue
    (`has_one_queue`), the steps after the first ``yield`` are enqueued by `wait`: there a stream
    that waits would block all other streams.

    Args:
        steps: generator of the transfer; the step up to its first ``yield`` posts work that can run
            in the background, the remaining steps wait and sum.
        device: device of the memory that is moved.
        what: "spAG" or "spRS".
        label: name of the layer.
    """

    def __init__(
        self, steps: Iterator[None], device: torch.device, *, what: str, label: str
    ) -> None:
        self.what = what
        self.label = label
        self._steps = steps
        self._failed = False
        self._stream: torch.cuda.Stream | None = None
        self._enqueued: torch.cuda.Event | None = None
        with trace.span(f"{what} start", label):
            if device.type == "cuda":
                self._start_on_stream(device)
            else:
                next(steps, None)

    def _start_on_stream(self, device: torch.device) -> None:
        """Enqueue the steps on the transfer stream; with one hardware queue, only the first."""
        self._stream = transfer_stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            marker = object()
            if not has_one_queue() or next(self._steps, marker) is marker:
                self._enqueue_rest(self._stream)

    def _enqueue_rest(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in self._steps:
                pass
            self._enqueued = stream.record_event()

    def wait(self) -> None:
        """Wait until the transfer is over; a repeated call does nothing.

        Raises:
            TransferError: a peer died or did not answer in time; raised by every later call too.
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


def has_one_queue() -> bool:
    """Return True if all streams of this process share one hardware queue of the GPU.

    Work then runs in the order in which it was enqueued, and work that waits for another stream
    blocks everything enqueued after it. Megatron requires this setting before Blackwell.
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


@functools.cache
def transfer_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a rank's transfers run, one per device."""
    # Peers wait for each of these transfers, so their thread blocks take precedence over the
    # thread blocks of other streams.
    _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # a static method
    return torch.cuda.Stream(device, priority=highest)
