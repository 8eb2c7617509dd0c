"""Cache of programs: all microbatches have one plan, and the buffers of a layer take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from megatron_hecate.nvlink.chunks import CACHED
from megatron_hecate.nvlink.program import Extent, Extents, Program, Signals
from megatron_hecate.nvlink.schedule import TransferSchedule

TURNS: int = 8  # buffers of a layer for which programs are cached


class Programs:
    """The programs of one rank, reused where a schedule repeats in the same memory.

    Args:
        signals: see `Program`.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        # Cached schedules by identity, least recently used first. The entry keeps the schedule
        # alive, so that its identity stays unique, and for each of the buffers the memory of its
        # places and a program.
        self._kept: OrderedDict[
            tuple[int, int, bool],
            tuple[TransferSchedule, list[tuple[list[Sequence[Extent]], Program]]],
        ] = OrderedDict()

    def make(
        self, schedule: TransferSchedule, extents: Extents, *, itemsize: int, sums: bool, begin: int
    ) -> Program:
        """Create a program, or copy it from the cache. Args as `Program`."""
        key = (id(schedule), itemsize, sums)
        _, programs = self._kept.setdefault(key, (schedule, []))
        self._kept.move_to_end(key)
        memory = list(map(extents, schedule.places))
        for places, program in programs:
            if places == memory:
                return program.again(begin)
        located = dict(zip(schedule.places, memory, strict=True))
        program = Program(
            schedule,
            located.__getitem__,
            signals=self._signals,
            itemsize=itemsize,
            sums=sums,
            begin=begin,
        )
        programs.append((memory, program))
        del programs[:-TURNS]
        if len(self._kept) > CACHED:
            self._kept.popitem(last=False)
        return program.again(begin)
