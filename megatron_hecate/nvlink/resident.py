"""Memory on the device that kernels read at fixed addresses, written by the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from megatron_hecate.device.autograd import is_capturing, lasting_tensors


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
            contents: for each row what its numbers are made from, and a function that makes them,
                at most as many bytes as a row has; equal numbers for equal content.

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
