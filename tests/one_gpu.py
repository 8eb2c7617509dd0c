"""Processes on one GPU, which see each other's memory as if each had its own. Started by ``test_on_gpu.py``.

The argument is a transport, or ``alone``: then rank 1 does not take part in a spAG.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import one_layer
import torch
import torch.distributed as dist

from megatron_hecate.peers import Peers
from megatron_hecate.schedule import Loan
from megatron_hecate.sm import Sm
from megatron_hecate.transfer import Transfer


def alone(device: torch.device) -> None:
    """Rank 0 waits for rank 1."""
    sm = Sm(Peers(dist.group.WORLD, 1 << 16, device), dist.group.WORLD, [range(2)])
    if dist.get_rank() == 1:
        time.sleep(30)
        return
    memory = sm.peers.arena[:64].view(torch.float32)
    steps = sm.gather([[memory]], [Loan(1, 0, 0, 0)], [memory], [memory], label="layer 3", timeout=3.0)
    Transfer(steps, device, what="spAG", label="layer 3").wait()
    torch.cuda.synchronize()


def main() -> None:
    """Run on every rank, under torchrun."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # control only
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    if sys.argv[1] == "alone":
        alone(device)
        return
    one_layer.check(device, (tuple(range(dist.get_world_size())),), copy_engines=sys.argv[1] == "ce", rounds=4)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all as it should be")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
