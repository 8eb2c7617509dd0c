"""Errors that rank 0 prints for all ranks. Imports no torch."""

from __future__ import annotations

import os
import sys
import time

# Seconds by which other ranks delay their exit. torchrun kills rank 0 once it notices a failed
# rank, and rank 0 needs the time to print.
GRACE: float = 2.0


def refer_to_rank_0(text: str, rank: int) -> None:
    """Print one line on a rank other than 0 before it exits, and leave rank 0 time to print.

    Args:
        text: reference to the message of rank 0.
        rank: this rank.
    """
    print(f"{text} (this is rank {rank})", file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(GRACE)
