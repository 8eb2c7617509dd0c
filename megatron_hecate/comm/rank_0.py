"""The rank in the environment, and errors that rank 0 prints for all ranks. Imports no torch."""

from __future__ import annotations

import os
import sys
import time

# Seconds by which other ranks delay their exit. torchrun kills rank 0 once it notices a failed
# rank, and rank 0 needs the time to print.
GRACE: float = 2.0

# variables of torchrun, and the least value of each
VARIABLES = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}


def environment_number(name: str) -> int:
    """Return the value of one of `VARIABLES`, or its least value if it is not set.

    Raises:
        ValueError: for a value that is no such number.
    """
    lower_bound = VARIABLES[name]
    text = os.environ.get(name, str(lower_bound))
    if text.isascii() and text.isdigit() and int(text) >= lower_bound:
        return int(text)
    raise ValueError(
        f"{name}={text!r} in the environment must be a whole number, {lower_bound} or more; "
        f"unset {name}, or start ranks with torchrun, which sets it"
    )


def refer_to_rank_0(text: str, rank: int) -> None:
    """Print one line on a rank other than 0 before it exits, and leave rank 0 time to print.

    Args:
        text: reference to the message of rank 0.
        rank: this rank.
    """
    print(f"{text} (this is rank {rank})", file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(GRACE)
