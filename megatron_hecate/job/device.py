"""The device that a rank trains on."""

from __future__ import annotations

import torch
import torch.distributed as dist


def on_gpus() -> bool:
    """Whether this job trains on GPUs."""
    return "nccl" in str(dist.get_backend_config())


def device_of_rank() -> torch.device:
    """Where this rank trains."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")
