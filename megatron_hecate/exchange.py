"""Which chunks go by exchange, and who fetches which part of them.

Where a home would send more than any rank receives, each of an expert's hosts fetches a different part of the chunk
from the home, and the rest from the other hosts. So the chunk leaves its home once, not once per host, at the price of
one more step. In a spRS the same parts are summed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

CUT: int = 128  # elements: parts of a chunk begin at multiples of this, so that their addresses are aligned
WHOLE: int = 1 << 20  # shares of a chunk add up to this

Key = tuple[int, int]  # a lent chunk: its home, and which of those that this home lends


def exchanged(hosts: Mapping[Key, Sequence[int]], relayed: Collection[Key] = ()) -> dict[Key, list[int]]:
    """The chunks that are exchanged, and what share of `WHOLE` each host fetches from the home.

    A home sends whole chunks to each host as long as it sends no more than the rank that receives most; beyond that,
    its most wanted chunks are exchanged first. A host that fetches a share of a chunk sends it to every other: shares
    are such that those send most that have the least to send otherwise. Chunks have one size.

    Args:
        hosts: ranks of every chunk, ascending.
        relayed: those of them that are in parts anyway, and cost their home one chunk each.
    """
    direct = {key: at for key, at in hosts.items() if key not in relayed}
    sends = Counter(home for home, _ in relayed)
    for (home, _), at in direct.items():
        sends[home] += len(at)
    most = max(Counter(itertools.chain(*hosts.values())).values(), default=0)
    chosen: dict[Key, list[int]] = {}
    for home, lent in sorted(direct, key=lambda key: (-len(direct[key]), key)):
        count = len(direct[home, lent])
        if sends[home] > most and count > 1:
            chosen[home, lent] = [0] * count
            sends[home] -= count - 1
    level = Counter({rank: count * WHOLE for rank, count in sends.items()})
    for key in [*chosen, *chosen]:  # again, when all have been poured once
        at, others = direct[key], len(direct[key]) - 1
        for rank, share in zip(at, chosen[key], strict=True):
            level[rank] -= share * others
        chosen[key] = _pour([level[rank] for rank in at], others)
        for rank, share in zip(at, chosen[key], strict=True):
            level[rank] += share * others
    return chosen


def cut(elements: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """[begin, end) of each part of a chunk, in proportion to ``shares``; some are empty where it is small."""
    whole, total = -(-elements // CUT), sum(shares)
    bounds = [min(elements, whole * so_far // total * CUT) for so_far in itertools.accumulate(shares, initial=0)]
    return list(itertools.pairwise(bounds))


def _pour(levels: Sequence[int], width: int) -> list[int]:
    """Shares of `WHOLE` that, each ``width`` wide, raise the lowest ``levels`` to one height."""
    order = sorted(range(len(levels)), key=lambda i: (levels[i], i))
    poured = [0] * len(levels)
    for count in range(len(order), 0, -1):
        height = (sum(levels[i] for i in order[:count]) + WHOLE * width) // count
        if height >= levels[order[count - 1]]:
            break
    for i in order[:count]:
        poured[i] = (height - levels[i]) // width
    poured[order[0]] += WHOLE - sum(poured)  # what rounding left
    return poured
