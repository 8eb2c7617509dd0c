"""The vocabulary of schedules: places of chunks, pulls between places, and parts of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

# Elements. Parts of a chunk begin at multiples of this, so that their addresses are aligned.
GRAIN: int = 128

Key = tuple[int, int]  # a chunk: its home, and its index among the home's own experts
Memory = Literal["parameters", "send", "slot", "grad", "partial", "main_grad", "stripe"]


class Place(NamedTuple):
    """Place of a chunk in the memory of a rank.

    ``grad``, ``partial``, ``main_grad``, and in a spRS ``stripe``, are fp32. ``partial`` may be the
    same memory as ``grad``: each part of a gradient is read only by the sum that overwrites it.

    Args:
        rank: rank that owns the memory.
        memory: kind of memory.
        index: number of the own expert (parameters, send, main_grad), slot (slot, grad, partial) or
            stripe.
        begin: element of the chunk with which the memory begins.
    """

    rank: int
    memory: Memory
    index: int  # type: ignore[assignment]  # hides that of tuples
    begin: int = 0


class Pull(NamedTuple):
    """Copy or sum of elements [begin, end) of a chunk, from ``sources`` into ``into``.

    Args:
        sources: places that are read; several are summed in this order.
        into: place that is written.
        begin: first element.
        end: element after the last.
        add: True to add the elements to the content of ``into``.
    """

    sources: tuple[Place, ...]
    into: Place
    begin: int
    end: int
    add: bool = False


class Part(NamedTuple):
    """Elements [begin, end) of a chunk, or of its sum, and the place that holds them first."""

    at: Place
    begin: int
    end: int

    @staticmethod
    def bounds(elements: int, shares: Sequence[int]) -> list[tuple[int, int]]:
        """Divide a chunk in proportion to ``shares``.

        Returns:
            [begin, end) of each part; parts of a small chunk may be empty.
        """
        grains = -(-elements // GRAIN)
        total = sum(shares)
        bounds = []
        begin = 0
        for so_far in itertools.accumulate(shares):
            end = min(elements, grains * so_far // total * GRAIN)
            bounds.append((begin, end))
            begin = end
        return bounds


Parts = Mapping[Key, Sequence[Part]]
NONE: Parts = MappingProxyType({})
