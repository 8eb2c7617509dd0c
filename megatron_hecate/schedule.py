"""The steps of a spAG or spRS over memory that peers can read: who reads what, from whom, and when.

A rank only reads (*pulls*). What a step writes, others may read in the next one:

| | step | reads | into |
|---|---|---|---|
| spAG | pack | the rank's own lent experts | its outbox, where peers can see them |
| | fetch | chunks from their home's outbox | slots |
| | exchange | the parts that this rank did not fetch, from the other hosts' slots | slots |
| spRS | exchange | this rank's part of the gradients of all hosts | a part of the sum |
| | sum | gradients, or parts of sums, from the hosts | the home's main gradient |

*Exchange*: where a home would send more than any rank receives, each of an expert's f hosts fetches a different 1/f of
the chunk from the home, and the rest from the other hosts. So the chunk leaves its home once, not f times, at the price
of one more step.

Everything here follows from the placement alone, so every rank knows every other's part. Places are named, not
addressed; `kernel` turns them into addresses. Offsets and lengths are elements of a chunk.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

MAX_RANKS: int = 72  # of one NVLink domain; kernels/schedule.cuh has the same
CUT: int = 128  # elements: parts of a chunk begin at multiples of this, so that their addresses are aligned

Memory = Literal["home", "outbox", "slot", "grad", "part", "total"]


@dataclasses.dataclass(frozen=True)
class Loan:
    """One guest, as all ranks see it.

    Args:
        home: rank of the expert's home.
        lent: which of the chunks that this home lends, counted from 0.
        host: rank of the guest.
        guest: which of this host's guests, counted from 0.
    """

    home: int
    lent: int
    host: int
    guest: int


@dataclasses.dataclass(frozen=True)
class Place:
    """A chunk's memory on a rank: ``index`` counts lent chunks (home, outbox, total) or guests (slot, grad, part).

    ``grad`` has the wire's type; ``part`` and ``total`` are fp32. Where gradients are fp32, ``part`` may be ``grad``:
    each part of it is read by its sum alone.
    """

    rank: int
    memory: Memory
    index: int


@dataclasses.dataclass(frozen=True)
class Pull:
    """Elements [begin, end) of a chunk into ``into``: those of the only source, or the sum of several, in this order.

    Args:
        add: whether they are added to what is there.
    """

    sources: tuple[Place, ...]
    into: Place
    begin: int
    end: int
    add: bool = False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One rank's part of a transfer.

    Args:
        steps: as many on every rank; a rank may have nothing to do in one.
        peers: ranks it reads from, or which read from it.
    """

    steps: tuple[tuple[Pull, ...], ...]
    peers: frozenset[int]


def exchanged(loans: Sequence[Loan]) -> frozenset[tuple[int, int]]:
    """(home, lent) of the chunks that go by exchange.

    A home sends whole chunks to each host as long as it sends no more than the rank that receives most; beyond that,
    its most wanted chunks are exchanged first. Chunks have one size.
    """
    hosts = Counter((loan.home, loan.lent) for loan in loans)
    sends = Counter(loan.home for loan in loans)
    most = max(Counter(loan.host for loan in loans).values(), default=0)
    chosen = set()
    for home, lent in sorted(hosts, key=lambda key: (-hosts[key], key)):
        if sends[home] > most and hosts[home, lent] > 1:
            chosen.add((home, lent))
            sends[home] -= hosts[home, lent] - 1
    return frozenset(chosen)


def cut(elements: int, parts: int) -> list[tuple[int, int]]:
    """[begin, end) of each part of a chunk; some are empty where it is small."""
    whole = -(-elements // CUT)
    bounds = [min(elements, whole * i // parts * CUT) for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def gather(loans: Sequence[Loan], rank: int, *, ranks: int, elements: int) -> Schedule:
    """The spAG of ``rank``.

    Args:
        loans: all guests of the group, in the same order on all ranks; a host has a chunk once.
        rank: whose part.
        ranks: in the group.
        elements: of a chunk.

    Raises:
        ValueError: for more ranks than the kernels know, an empty chunk, or loans that contradict each other.
    """
    _check(loans, ranks, elements)
    by_chunk = _by_chunk(loans)
    split = exchanged(loans)
    pack = [
        Pull((Place(rank, "home", lent),), Place(rank, "outbox", lent), 0, elements)
        for home, lent in by_chunk
        if home == rank
    ]
    fetch, swap = [], []
    for (home, lent), hosts in by_chunk.items():
        outbox = Place(home, "outbox", lent)
        mine = next((i for i, loan in enumerate(hosts) if loan.host == rank), None)
        if mine is None:
            continue
        slot = Place(rank, "slot", hosts[mine].guest)
        if (home, lent) not in split:
            fetch.append(Pull((outbox,), slot, 0, elements))
            continue
        for i, (begin, end) in enumerate(cut(elements, len(hosts))):
            if begin == end:
                continue
            if i == mine:
                fetch.append(Pull((outbox,), slot, begin, end))
            else:
                swap.append(Pull((Place(hosts[i].host, "slot", hosts[i].guest),), slot, begin, end))
    steps = [pack, fetch] + ([swap] if split else [])
    return _schedule(steps, by_chunk, split, rank, ranks)


def reduce(loans: Sequence[Loan], rank: int, *, ranks: int, elements: int) -> Schedule:
    """The spRS of ``rank``: every home's sum over its hosts in order of rank, added to its total. As `gather`."""
    _check(loans, ranks, elements)
    by_chunk = _by_chunk(loans)
    split = exchanged(loans)
    swap, home_sums = [], []
    for (home, lent), hosts in by_chunk.items():
        grads = tuple(Place(loan.host, "grad", loan.guest) for loan in hosts)
        total = Place(rank, "total", lent)
        if (home, lent) not in split:
            if home == rank:
                home_sums.append(Pull(grads, total, 0, elements, add=True))
            continue
        for loan, (begin, end) in zip(hosts, cut(elements, len(hosts)), strict=True):
            part = Place(loan.host, "part", loan.guest)
            if begin == end:
                continue
            if loan.host == rank:
                swap.append(Pull(grads, part, begin, end))
            if home == rank:
                home_sums.append(Pull((part,), total, begin, end, add=True))
    steps = ([swap] if split else []) + [home_sums]
    return _schedule(steps, by_chunk, split, rank, ranks)


def _check(loans: Sequence[Loan], ranks: int, elements: int) -> None:
    if elements < 1:
        raise ValueError(f"a chunk of {elements} elements cannot be moved")
    if ranks > MAX_RANKS:
        raise ValueError(f"{ranks} ranks share no NVLink domain: the sm transport takes {MAX_RANKS}; use transport p2p")
    for loan in loans:
        if not (0 <= loan.home < ranks and 0 <= loan.host < ranks) or loan.home == loan.host:
            raise ValueError(f"{loan} needs two different ranks of 0..{ranks - 1}")
    pairs = Counter((loan.home, loan.lent, loan.host) for loan in loans)
    rows = Counter((loan.host, loan.guest) for loan in loans)
    for what, counts in (("chunk on a host", pairs), ("guest", rows)):
        twice = [key for key, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"a {what} is named twice: {twice[0]}")


def _by_chunk(loans: Sequence[Loan]) -> dict[tuple[int, int], list[Loan]]:
    """The loans of each lent chunk, in order of the host's rank."""
    by_chunk: defaultdict[tuple[int, int], list[Loan]] = defaultdict(list)
    for loan in loans:
        by_chunk[loan.home, loan.lent].append(loan)
    return {key: sorted(by_chunk[key], key=lambda loan: loan.host) for key in sorted(by_chunk)}


def _schedule(
    steps: list[list[Pull]],
    by_chunk: dict[tuple[int, int], list[Loan]],
    split: frozenset[tuple[int, int]],
    rank: int,
    ranks: int,
) -> Schedule:
    """With peers, and every step rotated: each rank begins at the next one, so that not all read one home at once."""
    peers: set[int] = set()
    for key, hosts in by_chunk.items():
        of_hosts = {loan.host for loan in hosts}
        if key[0] == rank:
            peers |= of_hosts
        elif rank in of_hosts:
            peers.add(key[0])
            peers |= of_hosts if key in split else set()
    peers.discard(rank)

    def turn(pull: Pull) -> tuple[int, int]:
        return (pull.sources[0].rank - rank) % ranks, pull.begin

    return Schedule(tuple(tuple(sorted(step, key=turn)) for step in steps), frozenset(peers))
