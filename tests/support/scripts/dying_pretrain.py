"""The example's pretraining script, in which rank 1 dies at a given step: what is left behind, and who says what."""

from __future__ import annotations

import os
import signal
from typing import Any

import pretrain_gpt
import torch.distributed as dist

seen = 0
forward_step = pretrain_gpt.forward_step


def dies(*args: Any, **kwargs: Any) -> Any:
    global seen
    seen += 1
    if seen == 4 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward_step(*args, **kwargs)


if __name__ == "__main__":
    pretrain_gpt.forward_step = dies
    pretrain_gpt.main()
