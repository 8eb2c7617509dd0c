"""Which cases of a table run in ``make test``: `quick` marks all others slow."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def quick(
    names: Iterable[str], chosen: Iterable[str], *, oldest: Iterable[str] | None = None
) -> list:
    """Make parameters of ``names`` for `pytest.mark.parametrize`, which are slow unless ``chosen``.

    Args:
        names: all cases.
        chosen: the cases that ``make test`` runs, at least one for each kind of fault.
        oldest: the cases that also run on the oldest Megatron; where it is given, others are marked ``newest``.
    """
    names, chosen = list(names), set(chosen)
    assert chosen <= set(names), f"no such cases: {sorted(chosen - set(names))}"
    also_oldest = set(names if oldest is None else oldest)
    found = []
    for name in names:
        marks = [] if name in chosen else [pytest.mark.slow]
        marks += [] if name in also_oldest else [pytest.mark.newest]
        found.append(pytest.param(name, marks=marks))
    return found
