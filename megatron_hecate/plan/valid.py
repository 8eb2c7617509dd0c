"""What every plan must satisfy, whoever made it, and a number by which ranks see that they made the same.

For tests and debug mode. Nothing derived is trusted: all is recomputed from ``home``, ``table`` and ``tokens``.
"""

from __future__ import annotations

import hashlib

import numpy as np

from megatron_hecate.plan.placement import EMPTY, Placement
from megatron_hecate.plan.route import Quotas


def assert_valid(
    placement: Placement, quotas: Quotas | None = None, *, load: np.ndarray | None = None, num_slots: int | None = None
) -> None:
    """Check one layer's plan.

    - every expert is held by its home; no rank holds a guest of its own expert, or any expert twice;
    - no rank hosts more than ``num_slots`` guests; the derived views agree with the table;
    - quotas: one column per (expert, holder) pair, by expert, then rank; integers >= 0 that, over an expert's columns,
      sum to each source's load.

    Explicit raises, not ``assert``: debug mode must check under ``python -O`` too.

    Args:
        placement: homes and guests.
        quotas: who serves what, for this placement.
        load: [N, E] int, the tokens that ``quotas`` shares out.
        num_slots: guests a rank may host; ``None`` is what the table has room for.

    Raises:
        AssertionError: naming the experts, ranks and values that break a rule. It is a bug of ours, not of the user.
        ValueError: for a load without quotas.
    """
    if load is not None and quotas is None:
        raise ValueError("load can be checked against quotas only, got quotas=None")
    holders = _check_placement(placement.home, placement.table, num_slots=num_slots)
    _check_views(placement, holders)
    if quotas is not None:
        _check_columns(quotas, holders)
        _check_tokens(quotas, load, num_experts=len(holders))


def _check_placement(home: np.ndarray, table: np.ndarray, *, num_slots: int | None) -> np.ndarray:
    """[E, R] bool, who holds what, recomputed from the table."""
    num_experts, num_ranks = len(home), len(table)
    for name, array in (("home", home), ("table", table)):
        if not np.issubdtype(array.dtype, np.integer):
            raise AssertionError(f"{name} must be integers, got dtype {array.dtype}")
    for expert in np.flatnonzero((home < 0) | (home >= num_ranks)):
        raise AssertionError(f"expert {expert} has its home on rank {home[expert]} of {num_ranks}")
    for rank, slot in np.argwhere((table != EMPTY) & ((table < 0) | (table >= num_experts))):
        raise AssertionError(f"slot {slot} of rank {rank} holds expert {table[rank, slot]} of {num_experts}")

    count = np.zeros((num_experts, num_ranks), dtype=np.int64)
    rank, slot = np.nonzero(table != EMPTY)
    np.add.at(count, (table[rank, slot], rank), 1)
    for expert in np.flatnonzero(count[np.arange(num_experts), home] == 0):
        slots = table[home[expert]].tolist()
        raise AssertionError(f"expert {expert} has its home on rank {home[expert]}, whose slots are {slots}")
    for expert, rank in np.argwhere(count > 1):
        what = f"a guest of its own expert {expert}" if home[expert] == rank else f"expert {expert} twice"
        raise AssertionError(f"rank {rank} holds {what}: slots {table[rank].tolist()}")

    guests = count.sum(axis=0) - np.bincount(home, minlength=num_ranks)
    if num_slots is not None:
        for rank in np.flatnonzero(guests > num_slots):
            raise AssertionError(
                f"rank {rank} hosts {guests[rank]} guests, num_slots={num_slots}: slots {table[rank].tolist()}"
            )
    return count > 0


def _check_views(placement: Placement, holders: np.ndarray) -> None:
    """`holders` and `guests` are cached; a plan built on stale ones would send tokens to ranks without the expert."""
    for expert, rank in np.argwhere(placement.holders != holders):
        raise AssertionError(
            f"holders[{expert}, {rank}] is {bool(placement.holders[expert, rank])}, "
            f"but rank {rank} has slots {placement.table[rank].tolist()}"
        )
    guests = [(e, r) for e, r in np.argwhere(holders).tolist() if placement.home[e] != r]
    expected = tuple((e, r, int(np.flatnonzero(placement.table[r] == e)[0])) for e, r in guests)
    if placement.guests != expected:
        raise AssertionError(f"guests are {placement.guests}, the table says {expected}")


def _check_columns(quotas: Quotas, holders: np.ndarray) -> None:
    num_experts, num_ranks = holders.shape
    expert, rank, tokens = quotas.expert, quotas.rank, quotas.tokens
    if expert.ndim != 1 or expert.shape != rank.shape or tokens.ndim != 2 or tokens.shape[1] != len(expert):
        raise AssertionError(
            f"expert, rank and tokens have shapes {expert.shape}, {rank.shape} and {tokens.shape}, "
            "expected [C], [C] and [N, C]"
        )
    for name, array in (("expert", expert), ("rank", rank), ("tokens", tokens)):
        if not np.issubdtype(array.dtype, np.integer):
            raise AssertionError(f"quotas.{name} must be integers, got dtype {array.dtype}")
    known = (expert >= 0) & (expert < num_experts) & (rank >= 0) & (rank < num_ranks)
    for column in np.flatnonzero(~known):
        raise AssertionError(
            f"column {column} names expert {expert[column]} and rank {rank[column]}: "
            f"there are {num_experts} and {num_ranks}"
        )
    for column in np.flatnonzero(~holders[expert, rank]):
        raise AssertionError(
            f"column {column} names rank {rank[column]} for expert {expert[column]}, "
            f"which is held by {np.flatnonzero(holders[expert[column]]).tolist()}"
        )
    pair = expert.astype(np.int64) * num_ranks + rank
    for column in np.flatnonzero(np.diff(pair) <= 0):
        here, after = ((int(expert[c]), int(rank[c])) for c in (column, column + 1))
        raise AssertionError(
            f"columns must be ordered by expert, then rank: {column} is {here}, {column + 1} is {after}"
        )
    for e, r in np.argwhere(holders & ~np.isin(np.arange(holders.size), pair).reshape(holders.shape)):
        raise AssertionError(f"no column for expert {e} on rank {r}, which holds it")


def _check_tokens(quotas: Quotas, load: np.ndarray | None, *, num_experts: int) -> None:
    tokens = quotas.tokens
    for n, column in np.argwhere(tokens < 0):
        raise AssertionError(
            f"source {n} sends {tokens[n, column]} tokens of expert {quotas.expert[column]} "
            f"to rank {quotas.rank[column]}"
        )
    if load is None:
        return
    load = np.asarray(load)
    if load.shape != (len(tokens), num_experts):
        raise AssertionError(f"load has shape {load.shape}, the quotas are for {(len(tokens), num_experts)}")
    shared = np.zeros(load.shape, dtype=np.int64)
    np.add.at(shared.T, quotas.expert, tokens.T.astype(np.int64))
    for n, e in np.argwhere(shared != load):
        raise AssertionError(f"source {n} has {load[n, e]} tokens for expert {e}, its quotas sum to {shared[n, e]}")


def fingerprint(placement: Placement, quotas: Quotas | None = None) -> int:
    """A number that differs, but for chance (2^-64), whenever two plans differ; ranks compare theirs by an all-gather.

    The same for the same values on every machine: integer width, byte order and memory layout do not matter.

    Args:
        placement: homes and guests; the physical slots count, not only who holds what.
        quotas: who serves what.

    Returns:
        BLAKE2b of all arrays with names and shapes, as a signed 64-bit integer, so that it fits ``torch.int64``.

    Raises:
        TypeError: for an array that is not integral.
    """
    arrays = {"home": placement.home, "table": placement.table}
    if quotas is not None:
        arrays |= {"expert": quotas.expert, "rank": quotas.rank, "tokens": quotas.tokens}
    digest = hashlib.blake2b(digest_size=8)
    for name, array in arrays.items():
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.astype("<i8", order="C", casting="same_kind").tobytes())
    return int.from_bytes(digest.digest(), "big", signed=True)
