"""The measured overlap degree: copies per rank and layer that hide behind compute before it.

    t = (seconds from a layer's attention to its experts) / (seconds that one copy takes)

Both times are measured while training runs and summed over the group together with the loads, so
that all ranks hold the same t. The first time is read in every iteration's first microbatch. The
second, for which transfers are timed, is measured in a few iterations after the first replicas, and
again at regular intervals. Until copies have been timed, the speeds that the cost model uses give
the duration of a copy. Times differ from run to run, and plans with them: where runs must repeat
bitwise, set the overlap degree to a constant, or set Megatron's ``deterministic_mode``.
"""

from __future__ import annotations

import torch

from megatron_hecate.comm.transfer import Stopwatch, Transfer

# Iterations with replicas before copies are timed: in the first ones connections are set up, and
# memory is touched for the first time.
WARM_UP: int = 2
TIMED: int = 3  # iterations in which copies are timed
AGAIN: int = 100  # iterations after which copies are timed again
WEIGHT: float = 0.5  # weight of the newest measurement
NANO: float = 1e9
MEASURED: int = 4  # numbers that are summed together with the loads


class OverlapMeter:
    """Measurements of this rank, and the times that all ranks agreed on."""

    def __init__(self) -> None:
        self.window: float | None = None  # seconds from attention to experts, agreed
        self.copy: float | None = None  # seconds of one copy, agreed
        self._watches: dict[int, Stopwatch] = {}  # stopwatch of the window, by layer
        self._copies: list[tuple[Stopwatch, int]] = []
        self._iteration = 0  # iterations with replicas since copies were last timed

    def attention(self, layer: int, device: torch.device) -> None:
        """Start the window of ``layer``: its attention is next, in the first microbatch."""
        self._watches[layer] = Stopwatch(device)
        self._watches[layer].mark("begin")

    def routed(self, layer: int) -> None:
        """End the window of ``layer``: its tokens are dispatched next."""
        watch = self._watches.get(layer)
        if watch is not None and not watch.ended:
            watch.mark("end")

    @property
    def times_copies(self) -> bool:
        """True if the transfers of this iteration are to be timed."""
        return WARM_UP <= self._iteration < WARM_UP + TIMED

    def fetched(self) -> None:
        """Count an iteration with replicas; called on all ranks."""
        self._iteration += 1

    def follow(self, transfer: Transfer, copies: int) -> None:
        """Measure ``transfer``, in which this rank receives and sends at most ``copies`` chunks."""
        if copies and transfer.watch is not None:
            self._copies.append((transfer.watch, copies))

    def measured(self) -> list[int]:
        """Return the measurements that completed since the last call, [`MEASURED`].

        They are nanoseconds of windows, number of windows, nanoseconds of copies, number of copies.
        `agree` takes their sums over the group.
        """
        sums = [0, 0, 0, 0]
        for layer, watch in list(self._watches.items()):
            if watch.seconds is not None:
                sums[0] += round(watch.seconds * NANO)
                sums[1] += 1
                del self._watches[layer]
        waiting = []
        for watch, copies in self._copies:
            if watch.seconds is None:
                waiting.append((watch, copies))
            else:
                sums[2] += round(watch.seconds * NANO)
                sums[3] += copies
        self._copies = waiting
        return sums

    def agree(self, sums: list[int]) -> None:
        """Update the agreed times with the group's sums of `measured`."""
        window_ns, windows, copy_ns, copies = sums
        if windows:
            self.window = _smooth(self.window, window_ns / windows / NANO)
        if copies:
            self.copy = _smooth(self.copy, copy_ns / copies / NANO)
        if self._iteration >= AGAIN:
            # Connections exist by now, so the next timing needs no warm-up.
            self._iteration = WARM_UP

    def degree(self, copy_seconds: float) -> float:
        """Return the overlap degree t; 0 before the first iteration.

        Args:
            copy_seconds: assumed seconds of one copy, used until copies have been timed.
        """
        if self.window is None:
            return 0.0
        return self.window / max(self.copy or copy_seconds, 1 / NANO)


def _smooth(old: float | None, new: float) -> float:
    if old is None:
        return new
    return (1 - WEIGHT) * old + WEIGHT * new


def explain_exposed(transport: str, *, across_domains: bool) -> str:
    """Explain what compute waits for where all streams share one hardware queue, and the way out.

    Args:
        transport: name of the transport.
        across_domains: True if a group spans NVLink domains.
    """
    if transport == "p2p":
        exposed = (
            "messages overlap with compute, sums of gradients do not, nor does any round of a "
            "return but the last; fetches cannot be timed, so the speeds named above decide "
            "which copies pay (--moe-fssdp-speeds FILE: measured speeds)"
        )
    elif across_domains:
        exposed = (
            "compute waits while stripes are sent between domains; with "
            "--moe-fssdp-transport p2p it waits for less"
        )
    else:
        exposed = (
            "each transfer is one kernel that overlaps with compute, with less of it than with "
            "several queues"
        )
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams in one queue. With transport "
        f"{transport} {exposed}. Unset it, or set 32, where Megatron allows that: on Blackwell, or "
        "without tensor and context parallelism"
    )
