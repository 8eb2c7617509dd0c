"""Rendezvous of all ranks: gather one JSON note per rank on rank 0, broadcast rank 0's decision.

Notes travel through the job's store, not over a process group: a rank that never takes part is
then a named error after the timeout, not a collective that hangs. Each rank makes four or five
requests, regardless of the size of the job; the store of a job with 16,384 ranks serves all of them
in seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults.attempt import Attempt

# Keys that are read in one request; one request for all keys of a large job is slower.
BLOCK: int = 128
# Missing ranks that an error names, at most.
NAMED: int = 64
# Seconds that rank 0 may take to find missing ranks, or to decide.
PATIENCE: float = 5.0


@dataclasses.dataclass(frozen=True)
class Question:
    """One gather of notes to rank 0 and one broadcast of its decision, through the store.

    The notes stay in the store, where any rank can `read` them.

    Args:
        store: store of this question, shared by all ranks.
        rank: this rank.
        size: number of ranks.
        timeout: seconds that rank 0 waits for the other ranks.
    """

    store: dist.Store
    rank: int
    size: int
    timeout: float

    @classmethod
    def next(cls, *, timeout: float) -> Self:
        """Create this attempt's next question, over the job's store. Collective."""
        number = Attempt.current().count("question")
        store = dist.PrefixStore(f"megatron_hecate/{number}", _get_default_store())
        return cls(store, dist.get_rank(), dist.get_world_size(), timeout)

    def ask(self, note: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """Send ``note`` to rank 0, and return rank 0's decision. Collective.

        Args:
            note: note of this rank, JSON-serializable.
            judge: function from the notes of all ranks, by rank, to the decision: a few bytes,
                regardless of the size of the job. Called on rank 0 only.

        Raises:
            TimeoutError: on all ranks, when a rank is missing; names the missing ranks.
            RuntimeError: on all ranks, when the callback raises an exception.
        """
        self.post(note)
        if self.rank == 0:
            self.decide(judge)
        return self.await_decision()

    def post(self, note: Any) -> None:
        """Write this rank's note into the store."""
        self.store.set(_note_of(self.rank), json.dumps(note))
        if self.store.add("posted", 1) == self.size:
            self.store.set("complete", "")

    def read(self, ranks: Sequence[int]) -> list[Any]:
        """Read the notes of ``ranks``; ``None`` of a rank without."""
        texts = read_keys(self.store, [_note_of(rank) for rank in ranks])
        return [None if text is None else json.loads(text) for text in texts]

    def decide(self, judge: Callable[[list[Any]], Any]) -> None:
        """Gather all notes, decide, and publish the decision. Rank 0 only."""
        try:
            # A timeout; its subclass of RuntimeError depends on the kind of store.
            with contextlib.suppress(RuntimeError):
                self.store.wait(["complete"], timedelta(seconds=self.timeout))
            notes = self.read(range(self.size))
            missing = [rank for rank, note in enumerate(notes) if note is None]
            outcome = {"missing": missing[: NAMED + 1]} if missing else {"decision": judge(notes)}
            text = json.dumps(outcome)
        # Any exception must reach all ranks: they would wait for the whole timeout otherwise.
        except Exception as error:
            traceback.print_exc()
            text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        self.store.set("outcome", text)

    def await_decision(self) -> Any:
        """Wait for the decision of rank 0; as `ask`."""
        # Rank 0 may come as late as any rank, and then waits for the other ranks.
        patience = 2 * self.timeout + PATIENCE
        try:
            self.store.wait(["outcome"], timedelta(seconds=patience))
            outcome = json.loads(self.store.get("outcome"))
        # In either request: rank 0 may exit right after it has published the decision.
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"FSSDP: rank {self.rank} lost the rendezvous store while it waited for rank 0, "
                "which has died or left"
            ) from error
        # A timeout, as in `decide`.
        except RuntimeError as error:
            raise _too_late(self.rank, [0], patience) from error
        if "missing" in outcome:
            raise _too_late(0, outcome["missing"], self.timeout)
        if "failed" in outcome:
            raise RuntimeError(
                f"FSSDP: rank 0 failed while it evaluated the messages of all ranks: "
                f"{outcome['failed']}"
            )
        return outcome["decision"]


def read_keys(store: dist.Store, keys: Sequence[str]) -> list[bytes | None]:
    """Read many keys of a store; ``None`` for each key that is not there."""
    values: dict[str, bytes] = {}
    for first in range(0, len(keys), BLOCK):
        block = list(keys[first : first + BLOCK])
        # `multi_get` waits for missing keys. One check covers a whole block.
        if not store.check(block):
            block = [key for key in block if store.check([key])]
        if block:
            values.update(zip(block, store.multi_get(block), strict=True))
    return [values.get(key) for key in keys]


def _note_of(rank: int) -> str:
    return f"note/{rank}"


def _too_late(rank: int, absent: Sequence[int], timeout: float) -> TimeoutError:
    ending = " and more" if len(absent) > NAMED else ""
    return TimeoutError(
        f"FSSDP: rank {rank} waited {timeout:g} s for ranks {absent[:NAMED]}{ending} to switch "
        "FSSDP on; is --moe-fssdp given on every rank, and does every rank build the model?"
    )


def job_timeout() -> float:
    """Return the timeout of torch's watchdog for the job's collectives, seconds.

    Infinite without a job. Megatron may change the timeout after the first iteration
    (``distributed_timeout_seconds_after_init``).
    """
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):
        job: Any = dist.group.WORLD
        on_gpus = "nccl" in str(dist.get_backend_config())
        backend = job._get_backend(torch.device("cuda" if on_gpus else "cpu"))
        return backend.options._timeout.total_seconds()
    return math.inf
