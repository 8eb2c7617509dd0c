"""Choice of the chunks that receivers exchange, and of the share that each of them fetches."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hecate.comm.nvlink.places import Key

WHOLE: int = 1 << 20  # sum of the shares of a chunk


def choose_exchanges(
    wanted: Sequence[tuple[Key, Sequence[int]]], sends: list[int], *, most: int
) -> dict[Key, Sequence[int]]:
    """Choose the chunks to exchange, and the share that each receiving rank fetches from the home.

    A home sends whole chunks to each rank as long as it sends no more than the rank that receives
    most. Beyond that, its chunks with the most receivers are exchanged first. A rank that fetches a
    share of a chunk sends it to every other receiver; the shares are chosen so that the ranks with
    the least to send otherwise send most. All chunks have one size. A chunk that is moved in parts
    for another reason costs its home one send.

    Args:
        wanted: chunks with several receiving ranks, in order, and the ranks; without the chunks
            that are moved in parts for another reason.
        sends: chunks that each rank sends as a home, [ranks]; reduced to the remaining sends.
        most: largest number of chunks that a rank receives from homes in the domain.

    Returns:
        Shares of `WHOLE` of the receiving ranks, by chunk.
    """
    exchanged: list[tuple[Key, Sequence[int]]] = []
    for key, ranks in sorted(wanted, key=lambda chunk: -len(chunk[1])):
        if sends[key[0]] > most:
            exchanged.append((key, ranks))
            sends[key[0]] -= len(ranks) - 1
    return _choose_shares(exchanged, [count * WHOLE for count in sends])


def _choose_shares(
    exchanged: Sequence[tuple[Key, Sequence[int]]], load: list[int]
) -> dict[Key, Sequence[int]]:
    """Choose the share of `WHOLE` that each receiving rank fetches from the home, by chunk.

    Args:
        exchanged: chunks, and the ranks that receive each.
        load: shares that each rank sends otherwise, [ranks]; increased to the total that it sends.
    """
    chosen: dict[Key, Sequence[int]] = {}
    # The second pass improves the shares: only then do the loads include all other chunks' shares.
    for again in (False, True):
        for key, ranks in exchanged:
            others = len(ranks) - 1
            # Most chunks have two receivers, for which the shares take less time to compute.
            if others == 1:
                chosen[key] = _share_between_two(ranks, load, chosen.get(key))
                continue
            if again:
                for rank, share in zip(ranks, chosen[key], strict=True):
                    load[rank] -= share * others
            shares = _even_out([load[rank] for rank in ranks], others)
            chosen[key] = shares
            for rank, share in zip(ranks, shares, strict=True):
                load[rank] += share * others
    return chosen


def _share_between_two(
    ranks: Sequence[int], load: list[int], before: Sequence[int] | None
) -> tuple[int, int]:
    """Choose the shares of a chunk's two receivers, and update ``load``.

    Args:
        ranks: the two receiving ranks.
        load: shares that each rank sends, [ranks].
        before: earlier shares of the chunk, which ``load`` includes; ``None`` in the first pass.
    """
    one, other = ranks
    if before is not None:
        load[one] -= before[0]
        load[other] -= before[1]
    share = _even_out_two(load[one], load[other])
    load[one] += share
    load[other] += WHOLE - share
    return share, WHOLE - share


def _even_out(loads: Sequence[int], others: int) -> list[int]:
    """Choose shares of `WHOLE`, each sent to ``others`` ranks, that level the lowest ``loads``."""
    to_raise = loads
    level = (sum(loads) + WHOLE * others) // len(loads)
    while level < max(to_raise):
        to_raise = [load for load in to_raise if load <= level]
        level = (sum(to_raise) + WHOLE * others) // len(to_raise)
    shares = [max(0, level - load) // others for load in loads]
    # The least loaded rank takes the remainder of the rounding.
    rest = WHOLE - sum(shares)
    if rest:
        shares[loads.index(min(loads))] += rest
    return shares


def _even_out_two(one: int, other: int) -> int:
    """Return the first share that `_even_out` chooses for two loads."""
    difference = other - one
    if -WHOLE < difference < WHOLE:
        return (WHOLE + difference + (difference >= 0)) // 2
    if difference > 0:
        return WHOLE
    return 0
