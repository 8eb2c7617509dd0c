"""Memory on the device that kernels read at a fixed address, written by the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megatron_hecate.device.autograd import lasting_tensors


class Resident:
    """Memory of fixed address, with a content that the host knows.

    Args:
        size: bytes.
        device: device of the memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with lasting_tensors():
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.address = self.memory.data_ptr()
        self._content: object = None

    def write(self, content: object, make: Callable[[], np.ndarray]) -> None:
        """Write the numbers that ``make`` returns, on the current stream, unless they are there.

        Args:
            content: what the numbers are made from; equal content, equal numbers.
            make: function that returns at most as many bytes as the memory has.
        """
        if content == self._content:
            return
        data = torch.from_numpy(make().view(np.uint8))
        # From pinned memory the copy is asynchronous.
        if self.memory.is_cuda:
            data = data.pin_memory()
        self.memory[: len(data)].copy_(data, non_blocking=True)
        self._content = content
