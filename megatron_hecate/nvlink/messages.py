"""Messages between NVLink domains: the stripes of chunks that cross (`tables`).

| | stage | |
|---|---|---|
| spAG | in the home's domain | replicas get the chunk, each carrier its stripe |
| | between | stripes, all at once |
| | in other domains | replicas get the chunk from the carriers |
| spRS | in each domain | sums of own experts on the homes; stripes of all other sums |
| | between | stripes of sums are added to the stripes there, one round per other domain |
| | in each domain | stripes are added on the homes |

In a round each domain receives from one other domain, each from a different one: a rank needs
memory for the stripes of one round, and the domains are added in the same order in every run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from megatron_hecate.nvlink.tables import CACHED, DomainPlan


class Stripe(NamedTuple):
    """A stripe to send or to receive.

    Args:
        buffer: number of the stripe buffer.
        size: elements, or bytes of a spAG.
        peer: rank of the FSSDP group that it is sent to or received from.
    """

    buffer: int
    size: int
    peer: int


@dataclasses.dataclass(frozen=True)
class Round:
    """One rank's messages between domains; between two ranks they have the same order on both.

    Args:
        sends: stripes to send.
        receives: stripes to receive.
        adds: received stripes, and the stripe buffers that they are added to then.
    """

    sends: tuple[Stripe, ...]
    receives: tuple[Stripe, ...]
    adds: tuple[tuple[Stripe, int], ...] = ()


@functools.lru_cache(maxsize=CACHED)
def rounds_of(plan: DomainPlan, size: int, *, sums: bool) -> tuple[Round, ...]:
    """Return the rounds of messages of a transfer, as many on all ranks.

    Args:
        plan: the copies, seen from this rank.
        size: elements of a chunk, or bytes of a spAG.
        sums: True for a spRS.
    """
    begin, end = plan.part(plan.position, size)
    if begin == end:
        # The stripes of a small chunk may be empty, and further ranks carry none.
        return (Round((), ()),) * (len(plan.domains) - 1 if sums else 1)
    return tuple(_rounds_of_return(plan, end - begin) if sums else [_fetch(plan, end - begin)])


def _fetch(plan: DomainPlan, size: int) -> Round:
    sends, receives = [], []
    for buffer, chunk in enumerate(plan.crossing):
        if chunk.home_domain != plan.own_domain:
            receives.append(Stripe(buffer, size, _carrier(plan, chunk.home_domain)))
            continue
        for domain in chunk.further:
            sends.append(Stripe(buffer, size, _carrier(plan, domain)))
    return Round(tuple(sends), tuple(receives))


def _rounds_of_return(plan: DomainPlan, size: int) -> Iterator[Round]:
    num_domains = len(plan.domains)
    # Without a replica in this domain the first received stripe is the sum.
    has_sum = [chunk.is_received for chunk in plan.crossing]
    for turn in range(1, num_domains):
        source = (plan.own_domain + turn) % num_domains
        target = (plan.own_domain - turn) % num_domains
        sends, receives = [], []
        adds: list[tuple[Stripe, int]] = []
        for number, chunk in enumerate(plan.crossing):
            if chunk.home_domain == target:
                sends.append(Stripe(number, size, _carrier(plan, target)))
            elif chunk.home_domain == plan.own_domain and source in chunk.further:
                # A round reuses the further buffers of the previous round.
                buffer = len(plan.crossing) + len(adds) if has_sum[number] else number
                stripe = Stripe(buffer, size, _carrier(plan, source))
                receives.append(stripe)
                if has_sum[number]:
                    adds.append((stripe, number))
                has_sum[number] = True
        yield Round(tuple(sends), tuple(receives), tuple(adds))


def _carrier(plan: DomainPlan, domain: int) -> int:
    """Return the rank of ``domain`` that carries the same stripes as this rank."""
    return plan.domains[domain][plan.position]
