"""Self-test before training relies on a transport: one spAG and one spRS with known results.

All parts are collective. All ranks agree on the result of a part before the next one, because a
rank that ends the test alone leaves its peers waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.transport import NVLink
from megatron_hecate.comm.transfer import has_one_queue
from megatron_hecate.comm.transport import Copy, LayerBuffer, TransferPlan, Transport, chunks_in
from megatron_hecate.job.agreement import shorten
from megatron_hecate.job.problems import collect
from megatron_hecate.job.rendezvous import Question, Verdict

# Elements of a chunk: several tiles for several thread blocks, and a tail that fills no vector.
ELEMENTS: int = 200_003
TIMED_ELEMENTS: int = 8 << 20  # elements of a chunk whose fetch is timed
TIMED_FETCHES: int = 5
LABEL = "self-test of the transport"


def self_test(
    transports: Sequence[NVLink], device: torch.device, *, timeout: float
) -> tuple[list[str], bool, float | None]:
    """Test this rank's transports, and try copy engines. Collective.

    Returns:
        Problems of all ranks, the same on all; False if a rank cannot continue, since a failed
        kernel destroys the CUDA context; seconds of a fetch by copy engines on this rank minus
        seconds of a fetch by our kernels on the slowest rank, infinite if bytes were wrong,
        ``None`` if copy engines were not tried.
    """
    result = _test(transports, device, _check_bytes).agree(timeout)
    slower = None
    if not result.problems and result.copy_engines:
        result, slower = _try_copy_engines(transports, device, timeout=timeout)
    if result.usable:
        return result.problems, True, slower
    way_out = "restart with --moe-fssdp-transport p2p: CUDA is unusable after this error"
    return [f"{text}; {way_out}" for text in result.problems], False, slower


def _try_copy_engines(
    transports: Sequence[NVLink], device: torch.device, *, timeout: float
) -> tuple[_Result, float]:
    """Test fetches by copy engines, and time a fetch of each kind. Collective.

    A problem of copy engines alone only rules out copy engines, unless it made the device unusable.

    Returns:
        Result of all ranks; seconds of a fetch by copy engines on this rank minus seconds of a
        fetch by our kernels on the slowest rank, infinite after a problem of copy engines.
    """
    with _by_engines(transports):
        checked = _test(transports, device, _check_bytes).agree(timeout)
    # All ranks time, or none: the timed fetches are collective.
    if checked.problems:
        if checked.usable:
            checked = dataclasses.replace(checked, problems=[])
        return checked, math.inf
    own = _test(transports, device, _fetch_seconds)
    by_engines = math.inf
    if not own.problems:
        with _by_engines(transports):
            timed = _test(transports, device, _fetch_seconds)
        if not timed.problems:
            by_engines = timed.seconds
        elif not timed.usable:
            own = timed
    result = own.agree(timeout)
    return result, by_engines - result.seconds


@contextlib.contextmanager
def _by_engines(transports: Sequence[NVLink]) -> Iterator[None]:
    """Make the copies of fetches inside the block by copy engines."""
    for transport in transports:
        transport.copy_engines = True
    try:
        yield
    finally:
        for transport in transports:
            transport.copy_engines = False


@dataclasses.dataclass(frozen=True)
class _Result:
    """Result of the self-test of one rank, or of all ranks (JSON-serializable).

    Args:
        problems: problems found.
        usable: True if the device still accepts work.
        copy_engines: True if copy engines can be tried.
        seconds: seconds of a timed fetch, summed over the transports; 0 if none was timed.
    """

    problems: list[str]
    usable: bool
    copy_engines: bool
    seconds: float

    def agree(self, timeout: float) -> _Result:
        """Return the result of all ranks, the same on all. Collective.

        Args:
            timeout: seconds to wait for the other ranks.
        """

        def sum_up(notes: list[Any]) -> Verdict:
            results = [_Result(**fields) for fields in notes]
            return Verdict(dataclasses.asdict(_Result.of_all(results)))

        verdict = Question.next(timeout=timeout).ask(dataclasses.asdict(self), sum_up)
        return _Result(**verdict.job)

    @classmethod
    def of_all(cls, results: Sequence[_Result]) -> _Result:
        """Combine the results of all ranks: all problems, and the seconds of the slowest rank."""
        return cls(
            problems=shorten(itertools.chain.from_iterable(r.problems for r in results)),
            usable=all(result.usable for result in results),
            copy_engines=all(result.copy_engines for result in results),
            seconds=max(result.seconds for result in results),
        )


def _test(
    transports: Sequence[NVLink],
    device: torch.device,
    part: Callable[[Transport, torch.device], float],
) -> _Result:
    """Run one part of the self-test on all transports of this rank.

    Args:
        transports: transports of this rank.
        device: device of this rank.
        part: function that tests one transport, and returns seconds or raises an exception.
    """
    problems: list[str] = []
    usable = True
    seconds = 0.0
    for transport in transports:
        with collect(problems):
            seconds += part(transport, device)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            usable = False
            problems = problems or [str(error)]
    return _Result(problems, usable, _can_use_copy_engines(device), seconds)


def _can_use_copy_engines(device: torch.device) -> bool:
    return device.type == "cuda" and not has_one_queue() and TransferKernels.can_batch_copies()


class _Total:
    """Gradient of this rank's only expert. See `transport.HomeGradients`."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.grad = torch.zeros(elements, device=device)

    def main_grads(self, index: int) -> list[Tensor]:
        return [self.grad]

    def add(self, index: int, total: Tensor) -> None:
        self.grad += total


def _ring(transport: Transport, elements: int) -> tuple[TransferPlan, LayerBuffer]:
    """Plan copies of every rank's only expert to the next three ranks, or to all if fewer.

    The next ranks may be in the same NVLink domain or in others.
    """
    ranks = transport.group.size()
    slots = min(3, ranks - 1)
    copies: list[Copy] = []
    for home in range(ranks):
        copies += [Copy(home, 0, (home + 1 + i) % ranks, i) for i in range(slots)]
    copies.sort(key=lambda copy: (copy.home, copy.rank))
    layer = LayerBuffer(slots=slots, elements=elements, dtype=torch.bfloat16, homes=1)
    return TransferPlan(transport.group.rank(), tuple(copies)), layer


def _check_bytes(transport: Transport, device: torch.device) -> float:
    """Check one spAG and one spRS; return 0 seconds, since none are measured. Collective.

    Raises:
        RuntimeError: this rank received wrong bytes.
    """
    plan, layer = _ring(transport, ELEMENTS)
    if not plan.copies:
        return 0.0
    memory = transport.allocate(layer.weight_bytes + layer.grad_bytes, [layer], device)
    weights = chunks_in(memory, layer.slots, ELEMENTS, layer.dtype)
    grads = chunks_in(memory[layer.weight_bytes :], layer.slots, ELEMENTS, layer.grad_dtype)
    own = _whole_numbers(plan.rank, device)
    transport.fetch(plan, [[own]], weights, label=LABEL).wait()
    wrong = [
        home
        for slot, home in plan.receives
        if not torch.equal(weights[slot], _whole_numbers(home, device))
    ]
    # A rank with wrong weights takes part in the spRS as well: its peers would wait for it.
    # Sums of whole numbers are exact in fp32, so the order of summation does not matter.
    for slot, home in plan.receives:
        grads[slot].copy_(_whole_numbers(home, device).float() * (slot + 1))
    total = _Total(ELEMENTS, device)
    transport.return_gradients(plan, grads, total, label=LABEL).wait()
    is_sum_right = torch.equal(total.grad, own.float() * sum(range(1, layer.slots + 1)))
    if wrong:
        raise RuntimeError(f"rank {plan.rank} received wrong weights from ranks {wrong}")
    if not is_sum_right:
        raise RuntimeError(f"rank {plan.rank} received a wrong sum of its replicas' gradients")
    return 0.0


def _fetch_seconds(transport: Transport, device: torch.device) -> float:
    """Return the shortest seconds of a spAG of large chunks. Collective."""
    plan, layer = _ring(transport, TIMED_ELEMENTS)
    if not plan.copies:
        return 0.0
    memory = transport.allocate(layer.weight_bytes, [layer], device)
    weights = chunks_in(memory, layer.slots, TIMED_ELEMENTS, layer.dtype)
    own = torch.zeros(TIMED_ELEMENTS, dtype=layer.dtype, device=device)
    seconds = []
    for _ in range(TIMED_FETCHES):
        transfer = transport.fetch(plan, [[own]], weights, label=LABEL, timed=True)
        transfer.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(transfer.seconds or 0.0)
    return min(seconds)


def _whole_numbers(rank: int, device: torch.device) -> Tensor:
    """Return [elements] small whole numbers, different for every rank, bf16."""
    return ((torch.arange(ELEMENTS, device=device) * (2 * rank + 1) + rank) % 127).bfloat16()
