"""The steps of a spAG or spRS in one NVLink domain, whose ranks read each other's memory: who reads what, and when.
`hierarchy` puts domains together.

A rank only reads (*pulls*). What a step writes, others may read in the next one:

| | step | reads | into |
|---|---|---|---|
| spAG | pack | the rank's own lent experts | its outbox, where peers can see them |
| | fetch | chunks from their home's outbox | slots |
| | exchange | the parts that this rank did not fetch, from those that did | slots |
| spRS | exchange | this rank's part of the gradients of all hosts | a part of the sum |
| | sum | gradients, or parts of sums | the home's main gradient |

*Exchange* (which chunks: `exchange`): each of an expert's hosts fetches a different part of the chunk from the home,
and the rest from the other hosts. Chunks that go to other domains, or come from there, are in parts as well.

Everything here follows from the placement alone, so every rank knows every other's part. Places are named, not
addressed; `kernel` turns them into addresses. Offsets and lengths are elements of a chunk.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from megatron_hecate.exchange import Key, cut, exchanged

MAX_RANKS: int = 72  # of one NVLink domain; kernels/schedule.cuh has the same

Memory = Literal["home", "outbox", "slot", "grad", "part", "total", "relay"]


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
    """A chunk's memory on a rank: ``index`` counts lent chunks (home, outbox, total), guests (slot, grad, part), or
    parts of chunks that are neither (relay).

    ``grad`` has the wire's type; ``part``, ``total``, and in spRS ``relay``, are fp32. Where gradients are fp32,
    ``part`` may be ``grad``: each part of it is read by its sum alone. A relay begins with the chunk's element
    ``begin``.
    """

    rank: int
    memory: Memory
    index: int
    begin: int = 0


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
class Part:
    """Elements [begin, end) of a chunk, and the rank's memory that holds them first, or their sum."""

    at: Place
    begin: int
    end: int


Parts = Mapping[Key, Sequence[Part]]
NONE: Parts = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One rank's part of a transfer.

    Args:
        steps: as many on every rank; a rank may have nothing to do in one.
        peers: ranks it reads from, or which read from it.
    """

    steps: tuple[tuple[Pull, ...], ...]
    peers: frozenset[int]


def gather(loans: Sequence[Loan], rank: int, *, domain: Sequence[int], elements: int, parts: Parts = NONE) -> Schedule:
    """The spAG of ``rank``.

    Args:
        loans: all guests of the domain, in the same order on all ranks; a host has a chunk once.
        rank: whose part.
        domain: ranks that read each other's memory.
        elements: of a chunk.
        parts: of chunks that leave the domain: where they are to be in the end; of chunks that come from another:
            where they are.

    Raises:
        ValueError: for more ranks than the kernels know, an empty chunk, or loans that contradict each other.
    """
    here, by_chunk = frozenset(domain), _by_chunk(loans, parts)
    _check(loans, here, elements, parts)
    split = _exchanged(by_chunk, here, parts)
    pack, fetch, swap = [], [], []
    for (home, lent), hosts in by_chunk.items():
        outbox = Place(home, "outbox", lent)
        slots = {loan.host: Place(loan.host, "slot", loan.guest) for loan in hosts}
        if home == rank:
            pack.append(Pull((Place(rank, "home", lent),), outbox, 0, elements))
        wanted = parts.get((home, lent), ())
        if not wanted and (home, lent) not in split:
            if rank in slots:
                fetch.append(Pull((outbox,), slots[rank], 0, elements))
            continue
        shares = split.get((home, lent), [1] * len(hosts))
        held = _in_parts(list(slots.values()), elements, shares) if home in here and hosts else wanted
        if home in here:
            mine = [part for part in held if part.at.rank == rank != home]
            fetch += [Pull((outbox,), part.at, part.begin, part.end) for part in mine]
            wanted = [part for part in wanted if part.at.rank == rank and part.at.memory == "relay"] if hosts else []
            swap += [
                Pull((part.at,), want.at, max(part.begin, want.begin), min(part.end, want.end))
                for want in wanted
                for part in held
                if max(part.begin, want.begin) < min(part.end, want.end)
            ]
        if rank in slots:
            others = [part for part in held if part.at.rank != rank]
            swap += [Pull((part.at,), slots[rank], part.begin, part.end) for part in others]
    steps = [pack, fetch] if any(home in here for home, _ in by_chunk) else []
    return _schedule([*steps, swap] if split or parts else steps, by_chunk, split, parts, rank, here)


def reduce(loans: Sequence[Loan], rank: int, *, domain: Sequence[int], elements: int, parts: Parts = NONE) -> Schedule:
    """The spRS of ``rank``: every home's sum over its hosts in order of rank, added to its total.

    Args:
        loans, rank, domain, elements: as `gather`.
        parts: of chunks with hosts in several domains: where the sums over those of this one are to be; of chunks
            without a host here: where the whole sums are.

    Raises:
        ValueError: as `gather`.
    """
    here, by_chunk = frozenset(domain), _by_chunk(loans, parts)
    _check(loans, here, elements, parts)
    split = _exchanged(by_chunk, here, parts)
    swap, home_sums = [], []
    for (home, lent), hosts in by_chunk.items():
        grads = tuple(Place(loan.host, "grad", loan.guest) for loan in hosts)
        total = Place(rank, "total", lent)
        if (home, lent) in split:
            places = [Place(loan.host, "part", loan.guest) for loan in hosts]
            held = _in_parts(places, elements, split[home, lent])
        elif (home, lent) in parts:
            held = parts[home, lent]
        else:
            if home == rank:
                home_sums.append(Pull(grads, total, 0, elements, add=True))
            continue
        if grads:
            swap += [Pull(grads, part.at, part.begin, part.end) for part in held if part.at.rank == rank]
        if home == rank and ((home, lent) in split or not grads):
            home_sums += [Pull((part.at,), total, part.begin, part.end, add=True) for part in held]
    in_parts = split or any(key in parts for key, hosts in by_chunk.items() if hosts)
    to_homes = any(key not in parts or not hosts for key, hosts in by_chunk.items())
    steps = ([swap] if in_parts else []) + ([home_sums] if to_homes else [])
    return _schedule(steps, by_chunk, split, parts, rank, here)


def _exchanged(by_chunk: Mapping[Key, Sequence[Loan]], domain: frozenset[int], parts: Parts) -> dict[Key, list[int]]:
    inside = {key: [loan.host for loan in hosts] for key, hosts in by_chunk.items() if key[0] in domain and hosts}
    return exchanged(inside, parts.keys())


def _in_parts(places: Sequence[Place], elements: int, shares: Sequence[int]) -> list[Part]:
    """One for each place."""
    bounds = zip(places, cut(elements, shares), strict=True)
    return [Part(place, begin, end) for place, (begin, end) in bounds if begin < end]


def _check(loans: Sequence[Loan], domain: frozenset[int], elements: int, parts: Parts) -> None:
    if elements < 1:
        raise ValueError(f"a chunk of {elements} elements cannot be moved")
    if len(domain) > MAX_RANKS:
        raise ValueError(
            f"{len(domain)} ranks share no NVLink domain: the sm transport takes {MAX_RANKS}; use transport p2p"
        )
    for loan in loans:
        known = loan.home in domain or (loan.home, loan.lent) in parts
        if not known or loan.host not in domain or loan.home == loan.host:
            raise ValueError(f"{loan} needs two different ranks of {sorted(domain)}")
    pairs = Counter((loan.home, loan.lent, loan.host) for loan in loans)
    rows = Counter((loan.host, loan.guest) for loan in loans)
    for what, counts in (("chunk on a host", pairs), ("guest", rows)):
        twice = [key for key, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"a {what} is named twice: {twice[0]}")


def _by_chunk(loans: Sequence[Loan], parts: Parts) -> dict[Key, list[Loan]]:
    """The loans of each chunk, in order of the host's rank."""
    by_chunk: defaultdict[Key, list[Loan]] = defaultdict(list, {key: [] for key in parts})
    for loan in loans:
        by_chunk[loan.home, loan.lent].append(loan)
    return {key: sorted(by_chunk[key], key=lambda loan: loan.host) for key in sorted(by_chunk)}


def _schedule(
    steps: list[list[Pull]],
    by_chunk: dict[Key, list[Loan]],
    split: Mapping[Key, Sequence[int]],
    parts: Parts,
    rank: int,
    domain: frozenset[int],
) -> Schedule:
    """With peers, and every step rotated: each rank begins at the next one, so that not all read one home at once."""
    peers: set[int] = set()
    for key, hosts in by_chunk.items():
        others = {loan.host for loan in hosts} | {part.at.rank for part in parts.get(key, ())}
        if key[0] == rank:
            peers |= others
        elif rank in others:
            peers |= ({key[0]} & domain) | (others if key in split or key in parts else set())
    peers.discard(rank)
    ranks = max(domain) + 1

    def turn(pull: Pull) -> tuple[int, int]:
        return (pull.sources[0].rank - rank) % ranks, pull.begin

    return Schedule(tuple(tuple(sorted(step, key=turn)) for step in steps), frozenset(peers))
