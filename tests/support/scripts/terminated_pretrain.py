"""The example's pretraining script, which a batch system ends early: its launcher gets SIGTERM at a given step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pretrain_gpt
import torch.distributed as dist

seen = 0
forward_step = pretrain_gpt.forward_step


def terminated(*args: Any, **kwargs: Any) -> Any:
    global seen
    seen += 1
    if seen == 6:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        # torchrun passes the signal on meanwhile
        time.sleep(3)
    return forward_step(*args, **kwargs)


if __name__ == "__main__":
    pretrain_gpt.forward_step = terminated
    pretrain_gpt.main()
