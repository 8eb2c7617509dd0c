"""The overlap degree, measured: how many copies per rank and layer hide behind the compute before the layer.

    t = (seconds from a layer's attention to its experts) / (seconds that one copy takes)

Both are measured while training runs and summed over the group with the loads, so that all ranks hold the same t. The
first is read in every iteration's first microbatch; the second, for which transfers are timed, in a few iterations
after the first replicas, again when the first has drifted, and now and then. Until copies have been timed, the speeds
that copies are judged by say how long one takes. Times differ from run to run, and with them plans: where runs must
repeat bit for bit, give the overlap degree as a constant, or set Megatron's ``deterministic_mode``.
"""

from __future__ import annotations

import torch

from megatron_hecate.comm.transfer import Stopwatch, Transfer

WARM_UP: int = (
    2  # iterations with replicas before copies are timed: connections are made, memory is touched
)
TIMED: int = 3  # iterations in which they are timed
AGAIN: int = 100  # iterations until they are timed again
DRIFT: float = 0.25  # change of the time before the experts after which they are, too
WEIGHT: float = 0.5  # of the newest measurement
NANO: float = 1e9
MEASURED: int = 4  # numbers that travel with the loads


class OverlapMeter:
    """Measures on this rank, and holds what all ranks agreed on."""

    def __init__(self) -> None:
        self.window: float | None = None  # seconds from attention to experts, agreed
        self.copy: float | None = None  # seconds of one copy, agreed
        self._watches: dict[int, Stopwatch] = {}  # of windows, by layer
        self._copies: list[tuple[Transfer, int]] = []
        self._iteration = 0  # with replicas, since copies were timed last
        self._window_then: float | None = None

    def attention(self, layer: int, device: torch.device) -> None:
        """The attention before ``layer`` is about to run, in an iteration's first microbatch."""
        self._watches[layer] = Stopwatch(device)
        self._watches[layer].mark("begin")

    def routed(self, layer: int) -> None:
        """Tokens of ``layer`` are about to be dispatched."""
        watch = self._watches.get(layer)
        if watch is not None and not watch.ended:
            watch.mark("end")

    @property
    def times_copies(self) -> bool:
        """Whether the transfers of this iteration are to be timed."""
        return WARM_UP <= self._iteration < WARM_UP + TIMED

    def fetched(self) -> None:
        """An iteration with replicas begins; all ranks say so."""
        self._iteration += 1

    def follow(self, transfer: Transfer, copies: int) -> None:
        """``transfer`` brings at most ``copies`` chunks to this rank, and takes at most as many from it."""
        if copies and transfer.timed:
            self._copies.append((transfer, copies))

    def measured(self) -> list[int]:
        """[`MEASURED`] what this rank measured since the last call and is complete: nanoseconds and number of windows,
        then of copies. Sums over the group go to `agree`."""
        sums = [0, 0, 0, 0]
        for layer, watch in list(self._watches.items()):
            if watch.seconds is not None:
                sums[0] += round(watch.seconds * NANO)
                sums[1] += 1
                del self._watches[layer]
        waiting = []
        for transfer, copies in self._copies:
            if transfer.seconds is None:
                waiting.append((transfer, copies))
            else:
                sums[2] += round(transfer.seconds * NANO)
                sums[3] += copies
        self._copies = waiting
        return sums

    def agree(self, sums: list[int]) -> None:
        """Take the group's sums of `measured`."""
        window_ns, windows, copy_ns, copies = sums
        if windows:
            self.window = _smooth(self.window, window_ns / windows / NANO)
        if copies:
            self.copy = _smooth(self.copy, copy_ns / copies / NANO)
            self._window_then = self.window
        drifted = (
            self._window_then is not None
            and self.window is not None
            and abs(self.window - self._window_then) > DRIFT * self._window_then
        )
        if self._iteration >= WARM_UP + TIMED and (drifted or self._iteration >= AGAIN):
            self._iteration = WARM_UP

    def degree(self, copy_seconds: float) -> float:
        """The overlap degree t; 0 before the first iteration.

        Args:
            copy_seconds: what one copy is taken to last, until some were timed.
        """
        if self.window is None:
            return 0.0
        return self.window / max(self.copy or copy_seconds, 1 / NANO)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new


def explain_exposed(transport: str, *, across_domains: bool) -> str:
    """What computing waits for where the work of all streams is in one hardware queue, and the way out.

    Args:
        transport: its name.
        across_domains: whether a group spans NVLink domains.
    """
    if transport == "p2p":
        exposed = (
            "messages run beside computing, sums of gradients do not, nor all but the last of several rounds; fetches "
            "cannot be timed, so the speeds named above go on to decide which copies pay (--moe-fssdp-speeds FILE: "
            "measured ones)"
        )
    elif across_domains:
        exposed = "computing waits while stripes go from domain to domain; --moe-fssdp-transport p2p waits for less"
    else:
        exposed = (
            "each transfer is one kernel, which runs beside computing; copy engines are not used"
        )
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams in one queue. With transport {transport} "
        f"{exposed}. Unset it, or set 32, where Megatron allows that: on Blackwell, or without tensor and context "
        "parallelism"
    )
