"""Choice of the chunks that receivers exchange, and of the share that each of them fetches.

Chunks are numbered. The copies of a chunk are consecutive: those of chunk c are the elements
``begins[c]`` to ``begins[c + 1]`` of an array [copies].
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import compiled_if_possible

WHOLE: int = 1 << 20  # sum of the shares of a chunk


@compiled_if_possible
def choose_exchanges(
    begins: np.ndarray,
    ranks: np.ndarray,
    homes: np.ndarray,
    sends: np.ndarray,
    receives: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the chunks to exchange, and the share that each receiving rank fetches from the home.

    A home sends whole chunks to each rank as long as it sends no more than the rank that receives
    most. Beyond that, its chunks with the most receivers are exchanged first. A rank that fetches a
    share of a chunk sends it to every other receiver; the shares are chosen so that the ranks with
    the least to send otherwise send most. All chunks have one size. A chunk that is moved in parts
    for another reason costs its home one send.

    Args:
        begins: offset of each chunk's copies, and the total, [chunks + 1].
        ranks: receiving rank of every copy, [copies].
        homes: home of each chunk, [chunks]; -1 for a chunk that is moved in parts for another
            reason.
        sends: chunks that each rank sends as a home, [ranks]; reduced to the remaining sends.
        receives: chunks that each rank receives from homes in the domain, [ranks].

    Returns:
        Whether each chunk is exchanged, [chunks]; share of `WHOLE` that the receiver of every copy
        fetches, [copies], zeros for chunks that are not exchanged.
    """
    limit = receives.max()
    choices = np.empty(len(homes), np.int64)
    number = 0
    is_exchanged = np.zeros(len(homes), np.bool_)
    for size in range(len(sends), 1, -1):
        for chunk in range(len(homes)):
            if begins[chunk + 1] - begins[chunk] != size or homes[chunk] < 0:
                continue
            if sends[homes[chunk]] > limit:
                choices[number] = chunk
                is_exchanged[chunk] = True
                number += 1
                sends[homes[chunk]] -= size - 1
    shares = np.zeros(len(ranks), np.int64)
    load = sends * WHOLE
    # The second pass improves the shares: only then do the loads include all other chunks' shares.
    for is_second in (False, True):
        for chunk in choices[:number]:
            begin = begins[chunk]
            end = begins[chunk + 1]
            num_others = end - begin - 1
            if is_second:
                for copy in range(begin, end):
                    load[ranks[copy]] -= shares[copy] * num_others
            _even_out(load, ranks[begin:end], shares[begin:end])
            for copy in range(begin, end):
                load[ranks[copy]] += shares[copy] * num_others
    return is_exchanged, shares


@compiled_if_possible
def _even_out(load: np.ndarray, ranks: np.ndarray, shares: np.ndarray) -> None:
    """Choose shares of `WHOLE` that level the lowest loads of a chunk's receivers.

    Args:
        load: shares that each rank sends otherwise, [ranks].
        ranks: receivers of the chunk, [receivers]; each sends its share to all others.
        shares: share of each receiver, [receivers]; written.
    """
    num_others = len(ranks) - 1
    lowest = 0
    total = WHOLE * num_others
    for index in range(len(ranks)):
        total += load[ranks[index]]
        if load[ranks[index]] < load[ranks[lowest]]:
            lowest = index
    level = total // len(ranks)
    # Receivers with a load above the level send nothing. Without them the level is lower.
    last = -1
    while level != last:
        last = level
        total = WHOLE * num_others
        count = 0
        for rank in ranks:
            if load[rank] <= last:
                total += load[rank]
                count += 1
        level = total // count
    remainder = WHOLE
    for index in range(len(ranks)):
        shares[index] = max(0, level - load[ranks[index]]) // num_others
        remainder -= shares[index]
    # The least loaded rank takes the remainder of the rounding.
    shares[lowest] += remainder
