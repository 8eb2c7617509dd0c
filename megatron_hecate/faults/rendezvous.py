"""Rendezvous of all ranks: gather one JSON message per rank on rank 0, broadcast rank 0's decision.

Messages travel through the job's store, not over a process group: a rank that never takes part is
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
from collections.abc import Callable, Mapping, Sequence
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
class Verdict:
    """Decision of rank 0. JSON-serializable.

    Args:
        job: part that every rank reads; a few bytes, regardless of the size of the job.
        groups: part that only the ranks of a group read, by the group's name.
    """

    job: Any
    groups: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Question:
    """One gather to rank 0 and one broadcast of its decision, through the store.

    The store does not grow with the number of questions.

    Args:
        store: store that all ranks share.
        rank: this rank.
        size: number of ranks.
        number: sequence number of the question in this attempt of the job, equal on all ranks and
            ascending. Messages contain it, because a key may still hold an earlier message.
        timeout: seconds that rank 0 waits for the other ranks.
    """

    store: dist.Store
    rank: int
    size: int
    number: int
    timeout: float

    @classmethod
    def next(cls, *, timeout: float) -> Self:
        """Create this attempt's next question, over the job's store. Collective."""
        number = Attempt.current().count("question")
        return cls(_get_default_store(), dist.get_rank(), dist.get_world_size(), number, timeout)

    def ask(
        self, note: Any, judge: Callable[[list[Any]], Verdict], *, groups: Sequence[str] = ()
    ) -> Verdict:
        """Send ``note`` to rank 0, and return rank 0's decision. Collective.

        Args:
            note: message of this rank, JSON-serializable.
            judge: function from the messages of all ranks, by rank, to the decision. Called on rank
                0 only.
            groups: names of the groups that this rank is in, for their parts of the decision.

        Raises:
            TimeoutError: on all ranks, when a rank is missing; names the missing ranks.
            RuntimeError: on all ranks, when the callback raises an exception.
        """
        self.post(note)
        if self.rank == 0:
            self.decide(judge)
        return self.await_decision(groups)

    def post(self, note: Any) -> None:
        """Write this rank's message into the store."""
        self.store.set(_note_of(self.rank), _pack([self.number, note]))
        if self.store.add(self._key("posted"), 1) == self.size:
            self.store.set(self._key("complete"), "")

    def decide(self, judge: Callable[[list[Any]], Verdict]) -> None:
        """Gather all messages, decide, and publish the decision. Rank 0 only."""
        outcome: dict[str, Any] = {}
        parts: dict[str, str] = {}
        try:
            notes = self._gather()
            missing = [rank for rank, note in enumerate(notes) if note is None]
            outcome["missing"] = missing[: NAMED + 1]
            if not missing:
                verdict = judge([note[1] for note in notes if note is not None])
                parts = {_part_of(group): _pack(part) for group, part in verdict.groups.items()}
                outcome["job"] = json.loads(_pack(verdict.job))
        # Any exception must reach all ranks: they would wait for the whole timeout otherwise.
        except Exception as error:
            traceback.print_exc()
            outcome = {"failed": f"{type(error).__name__}: {error}"}
            parts = {}
        outcome["parts"] = bool(parts)
        # The decision is written last, so that a rank that can read it can read its groups' parts.
        self.store.multi_set(  # type: ignore[attr-defined]
            [*parts, self._key("verdict")], [*parts.values(), _pack(outcome)]
        )
        # Each rank reads the previous decision before it posts the message for this one.
        previous = dataclasses.replace(self, number=self.number - 1)
        for name in ("posted", "complete", "verdict"):
            self.store.delete_key(previous._key(name))

    def await_decision(self, groups: Sequence[str] = ()) -> Verdict:
        """Wait for the decision of rank 0; as `ask`."""
        # Rank 0 may come as late as any rank, and then waits for the other ranks.
        patience = 2 * self.timeout + PATIENCE
        key = self._key("verdict")
        parts: Sequence[bytes] = ()
        try:
            self.store.wait([key], timedelta(seconds=patience))
            outcome = json.loads(self.store.get(key))
            if groups and outcome["parts"]:
                parts = self.store.multi_get([_part_of(group) for group in groups])
        # In any of these requests: rank 0 may exit right after it has published the decision.
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"FSSDP: rank {self.rank} lost the rendezvous store while it waited for rank 0, "
                "which has died or left"
            ) from error
        # A timeout, as in `_gather`.
        except RuntimeError as error:
            raise _too_late(self.rank, [0], patience) from error
        if outcome.get("missing"):
            raise _too_late(0, outcome["missing"], self.timeout)
        if "failed" in outcome:
            raise RuntimeError(
                "FSSDP: rank 0 failed while it evaluated the messages of all ranks: "
                f"{outcome['failed']}"
            )
        return Verdict(outcome["job"], dict(zip(groups, map(json.loads, parts), strict=False)))

    def _gather(self) -> list[Any]:
        """Read ``[number, message]`` of every rank, ``None`` of a rank without. Rank 0 only."""
        # A timeout; its subclass of RuntimeError depends on the kind of store.
        with contextlib.suppress(RuntimeError):
            self.store.wait([self._key("complete")], timedelta(seconds=self.timeout))
        texts = read_keys(self.store, [_note_of(rank) for rank in range(self.size)])
        notes = [json.loads(text) if text is not None else [0, None] for text in texts]
        return [note if note[0] == self.number else None for note in notes]

    def _key(self, name: str) -> str:
        return f"megatron_hecate/{self.number}/{name}"


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
    return f"megatron_hecate/note/{rank}"


def _part_of(group: str) -> str:
    return f"megatron_hecate/group/{group}"


def _pack(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


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
