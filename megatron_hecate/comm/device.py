"""The device that a rank trains on."""

from __future__ import annotations

import torch
import torch.distributed as dist


def on_gpus() -> bool:
    """Return True if this job trains on GPUs."""
    return "nccl" in str(dist.get_backend_config())


def device_of_rank() -> torch.device:
    """Return the device that this rank trains on."""
    if on_gpus():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
