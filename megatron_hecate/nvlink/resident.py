"""Memory on the device that kernels read at fixed addresses, written by the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_hecate.device.autograd import is_capturing, lasting_tensors
from megatron_hecate.nvlink.memory import Memory, Signals, describe, description_bytes
from megatron_hecate.nvlink.tables import DomainPlan


class Resident:
    """Rows of memory at fixed addresses, with contents that the host knows.

    Args:
        count: number of rows.
        size: bytes of a row.
        device: device of the memory.

    Attributes:
        rows: the rows, uint8.
    """

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        with lasting_tensors():
            self._memory = torch.zeros((count, size), dtype=torch.uint8, device=device)
        self.rows = self._memory.unbind()
        self._mirror = np.zeros((count, size), np.uint8)
        self._contents: list[object] = [None] * count

    def write(self, contents: Mapping[int, tuple[object, Callable[[], np.ndarray]]]) -> None:
        """Write the rows whose content has changed, in one copy on the current stream.

        Args:
            contents: for each row its content, and a function that returns the content's numbers,
                at most as many bytes as a row has.

        Raises:
            RuntimeError: while a CUDA graph is captured: each replay would write this content.
        """
        changed = [row for row, (new, _) in contents.items() if new != self._contents[row]]
        if not changed:
            return
        if is_capturing():
            raise RuntimeError(
                "FSSDP: a plan, or an address of parameters or gradients, has changed while a CUDA "
                "graph is captured; use more --cuda-graph-warmup-steps"
            )
        for row in changed:
            self._contents[row], make = contents[row]
            numbers = make().view(np.uint8)
            self._mirror[row, : len(numbers)] = numbers
        first, end = min(changed), max(changed) + 1
        data = torch.from_numpy(self._mirror[first:end])
        # From pinned memory the copy is asynchronous.
        if self._memory.is_cuda:
            data = data.pin_memory()
        self._memory[first:end].copy_(data, non_blocking=True)


class LaunchTables:
    """What the kernels of all layers read: a table of each layer's plan, and descriptions.

    Args:
        num_layers: number of layers.
        size: bytes of the largest table.
        signals: counters of this rank.
        device: device of the memory.
    """

    def __init__(self, num_layers: int, size: int, signals: Signals, device: torch.device) -> None:
        self._device = device
        self._signals = signals
        self._tables = Resident(num_layers, size, device)
        # Rows by the layers' names.
        self._rows: dict[str, int] = {}
        self._descriptions: dict[tuple[str, str, int], Resident] = {}

    def write(self, plans: Mapping[str, DomainPlan]) -> None:
        """Write the tables of layers, by name, where they have changed."""
        rows = {self._rows.setdefault(label, len(self._rows)): plans[label] for label in plans}
        self._tables.write(
            {row: (plan, functools.partial(getattr, plan, "table")) for row, plan in rows.items()}
        )

    def describe(self, label: str, what: str, plan: DomainPlan, memory: Memory) -> Tensor:
        """Write a layer's table and description where they have changed.

        Args:
            label: name of the layer.
            what: direction of the transfer.
            plan: copies, seen from this rank.
            memory: addresses of the memory, without the table's.

        Returns:
            The description, uint8 on the device.
        """
        self.write({label: plan})
        table = self._tables.rows[self._rows[label]]
        if table.is_cuda:
            # It was allocated on another stream, whose later work must not reuse it before.
            table.record_stream(torch.cuda.current_stream())
        memory = memory._replace(table=table.data_ptr())
        key = label, what, description_bytes(memory)
        if key not in self._descriptions:
            self._descriptions[key] = Resident(1, key[2], self._device)
        description = self._descriptions[key]
        (row,) = description.rows
        make = functools.partial(describe, memory, self._signals, row.data_ptr())
        description.write({0: (memory, make)})
        return row
