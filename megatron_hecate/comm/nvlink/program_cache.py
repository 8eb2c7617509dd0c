"""Cache of programs: all microbatches have one plan, and the buffers of a layer take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from megatron_hecate.comm.nvlink.chunks import PLANS
from megatron_hecate.comm.nvlink.places import Memory as Memories
from megatron_hecate.comm.nvlink.places import Place
from megatron_hecate.comm.nvlink.program import Extent, Extents, Program, Signals
from megatron_hecate.comm.nvlink.schedule import TransferSchedule

TURNS: int = 8  # buffers of a layer whose programs are cached

Known = dict[tuple[Memories, int], Sequence[Extent]]  # extents by memory and index


class Memory:
    """`Extents` of a domain whose ranks have the same layout, at a different base address each.

    Args:
        own: addresses and elements of this rank's tensors in a place.
        rank: this rank.
        apart: base address of each peer's memory minus the base address of this rank's memory.
    """

    def __init__(self, own: Extents, *, rank: int, apart: Mapping[int, int]) -> None:
        self._own = own
        self._rank = rank
        self._apart = apart
        self.known: Known = {}  # extents of this rank that were looked up

    def __call__(self, place: Place) -> Sequence[Extent]:
        rank, memory, index, _ = place
        found = self.known.get((memory, index))
        if found is None:
            found = self._own(place)
            self.known[memory, index] = found
        if rank == self._rank:
            return found
        apart = self._apart[rank]
        # Most places are one tensor, for which the list comprehension takes longer.
        if len(found) == 1:
            ((address, elements),) = found
            return ((address + apart, elements),)
        return [(address + apart, elements) for address, elements in found]

    def agrees(self, known: Known) -> bool:
        """Return True if the places in ``known`` have the same extents in this memory."""
        own = self._own
        rank = self._rank
        return all(
            own(Place(rank, memory, index)) == found for (memory, index), found in known.items()
        )


class Programs:
    """The programs of one rank, reused where a schedule repeats in the same memory.

    Args:
        signals: see `Program`.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        # Cached schedules by identity, least recently used first. The entry keeps the schedule
        # alive, so that its identity stays unique, and a program for each of the buffers.
        self._kept: OrderedDict[
            tuple[int, int, bool], tuple[TransferSchedule, list[tuple[Known, Program]]]
        ] = OrderedDict()

    def make(
        self, schedule: TransferSchedule, memory: Memory, *, itemsize: int, sums: bool, begin: int
    ) -> Program:
        """Create a program, or copy it from the cache. Args as `Program`."""
        key = (id(schedule), itemsize, sums)
        _, made = self._kept.setdefault(key, (schedule, []))
        self._kept.move_to_end(key)
        for known, program in made:
            if memory.agrees(known):
                return program.again(begin)
        program = Program(
            schedule, memory, signals=self._signals, itemsize=itemsize, sums=sums, begin=begin
        )
        made.append((memory.known, program))
        del made[:-TURNS]
        if len(self._kept) > PLANS:
            self._kept.popitem(last=False)
        return program.again(begin)
