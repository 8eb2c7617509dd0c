"""Run a Megatron script on ranks that share one GPU, to test replicas on a single GPU.

    torchrun ... run_on_shared_gpu.py pretrain_gpt.py ...                  stock Megatron
    torchrun ... run_on_shared_gpu.py -m megatron_hecate run -- pretrain_gpt.py ...   with FSSDP

NCCL refuses two ranks on one GPU, so gloo stands in for it, on copies of the tensors in the host's
memory. The transport ``nvlink`` is the real one: its kernels read and write the memory of the other
processes on the GPU. Processes take turns on the GPU, so step times mean nothing. Not supported:
point-to-point messages of tensors on a GPU (the transport ``p2p``, pipeline parallelism).
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from gloo_as_nccl import collectives_through_the_host
from plain_wgrad import use_plain_wgrad
from run_script import run_script

# Contains "nccl", by which FSSDP recognizes a job on GPUs among its backends.
STAND_IN = "gloo_as_nccl"


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def start_process_group(minutes: float = 3) -> None:
    """Start the process group over gloo; call it before the first import of megatron.

    Args:
        minutes: timeout of a collective.
    """
    # Symmetric memory refuses ranks that share a GPU by default.
    os.environ |= {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    collectives_through_the_host()
    use_plain_wgrad()
    dist.Backend.register_backend(STAND_IN, _gloo, devices=["cuda"])
    torch.cuda.set_device(0)
    dist.init_process_group(f"cpu:gloo,cuda:{STAND_IN}", timeout=timedelta(minutes=minutes))
    # Megatron takes the GPU with this index.
    os.environ["LOCAL_RANK"] = "0"


def main() -> None:
    """Start the process group and run the script of the command line."""
    start_process_group()
    run_script()


if __name__ == "__main__":
    main()
