"""Fetches and returns between the virtual ranks of `step_layer`, by FSSDP's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.comm.nvlink.places import Place, Pull
from megatron_hecate.comm.nvlink.program import FAILURE, Program, Signals
from megatron_hecate.comm.nvlink.schedule import TransferSchedule

if TYPE_CHECKING:
    from step_layer import Layer


class Transfers:
    """Fetches and returns of a layer: one program and one launch per rank.

    Args:
        layer: layer with replicas.
    """

    def __init__(self, layer: Layer) -> None:
        s = layer.sizes
        weights = layer.weights
        self.layer = layer
        self.elements = 3 * s.hidden * s.ffn
        self.stream = torch.cuda.Stream() if layer.device.type == "cuda" else None
        self._words = torch.zeros(s.ranks, 64, dtype=torch.int32, device=layer.device)
        self._failure = torch.zeros(
            FAILURE.itemsize, dtype=torch.uint8, pin_memory=layer.device.type == "cuda"
        )
        # No rank waits for another, so the rank of a place is the launching one; its index
        # is the owner of the memory. Values: two lists of tensors, entries per rank, offset.
        self._memory = {
            "parameters": (weights.first, weights.second, s.homes, 0),
            "slot": (weights.first, weights.second, s.slots, s.homes),
            "grad": (*zip(*weights.slot_grads, strict=True), s.slots, 0),
            "main_grad": (*zip(*weights.main_grads, strict=True), s.homes, 0),
        }
        fetches: list[list[Pull]] = [[] for _ in range(s.ranks)]
        # slots of the replicas of each home expert
        grads: dict[int, list[int]] = {}
        for expert, rank, slot in layer.placement.replicas:
            at = rank * s.slots + slot - s.homes
            home = int(layer.placement.home[expert])
            number = home * s.homes + int(np.flatnonzero(layer.placement.table[home] == expert)[0])
            source = Place(rank, "parameters", number)
            into = Place(rank, "slot", at)
            fetches[rank].append(Pull((source,), into, 0, self.elements))
            grads.setdefault(number, []).append(at)
        returns: list[list[Pull]] = [[] for _ in range(s.ranks)]
        for number, slots in grads.items():
            home = number // s.homes
            sources = tuple(Place(home, "grad", at) for at in slots)
            into = Place(home, "main_grad", number)
            returns[home].append(Pull(sources, into, 0, self.elements, add=True))
        self._fetches = [
            self._program(rank, pulls, sums=False) for rank, pulls in enumerate(fetches)
        ]
        self._returns = [
            self._program(rank, pulls, sums=True) for rank, pulls in enumerate(returns)
        ]

    def fetch(self) -> None:
        """Launch the fetches of all ranks."""
        for at in self._fetches:
            self.layer.kernels.run_at("fssdp_gather", at)

    def give_back(self) -> None:
        """Launch the returns of all ranks."""
        for at in self._returns:
            self.layer.kernels.run_at("fssdp_reduce", at)

    def _program(self, rank: int, pulls: Sequence[Pull], *, sums: bool) -> Tensor:
        """Build the program of a rank in device memory; ``sums``: add fp32 gradients."""
        words = self._words[rank].data_ptr()
        signals = Signals(rank, {rank: words}, words + 64, self._failure.data_ptr(), timeout=10.0)
        itemsize = 4 if sums else self.layer.weights.dtype.itemsize
        schedule = TransferSchedule.of_pulls([pulls], rank)
        program = Program(
            schedule, self._extents, signals=signals, itemsize=itemsize, sums=sums, begin=1
        )
        at = torch.empty(len(program.data), dtype=torch.uint8, device=self.layer.device)
        program.relocate(at.data_ptr())
        return at.copy_(torch.from_numpy(program.data))

    def _extents(self, place: Place) -> list[tuple[int, int]]:
        """List address and number of elements of a place's two matrices."""
        first, second, of_rank, begin = self._memory[place.memory]
        rank, index = divmod(place.index, of_rank)
        tensors = (first[rank][begin + index], second[rank][begin + index])
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
