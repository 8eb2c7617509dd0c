"""Rendezvous of all ranks: gather one JSON message per rank on rank 0, broadcast rank 0's decision.

Messages travel through the job's store, not over a process group: a rank that never takes part is
then a named error after the timeout, not a collective that hangs. Each rank makes three or four
requests, regardless of the size of the job; the store of a job with 16,384 ranks serves all of them
in seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.faults.attempt import Attempt

# Messages that rank 0 reads in one request; one request for all messages of a large job is slower.
BLOCK: int = 128
# Missing ranks that an error names, at most.
NAMED: int = 64
# Seconds between two polls for messages: the first pause, which doubles up to the second.
POLL_PAUSES: tuple[float, float] = (0.02, 1.0)
# Seconds after which rank 0 begins to publish the list of missing ranks.
LIST_MISSING_AFTER: float = 2.0


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

    All questions use the same keys, so that the store does not grow.

    Args:
        store: store that all ranks share.
        rank: this rank.
        size: number of ranks.
        number: sequence number of the question in this attempt of the job, equal on all ranks and
            ascending. Messages contain it, because a key may still hold an earlier message.
        timeout: seconds to wait for the other ranks.
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
            return self.decide(judge, groups=groups)
        return self.await_decision(groups)

    def post(self, note: Any) -> None:
        """Write this rank's message into the store."""
        self.store.set(self._note_of(self.rank), _pack([self.number, note]))

    def decide(
        self, judge: Callable[[list[Any]], Verdict], *, groups: Sequence[str] = ()
    ) -> Verdict:
        """Gather all messages, decide, and publish the decision. Rank 0 only; as `ask`."""
        notes, absent = self._gather()
        outcome: dict[str, Any] = {"missing": absent}
        parts: dict[str, str] = {}
        cause: Exception | None = None
        if not absent:
            try:
                verdict = judge([notes[rank] for rank in range(self.size)])
                parts = {
                    self._part_of(group): _pack(part) for group, part in verdict.groups.items()
                }
                outcome = {"job": json.loads(_pack(verdict.job)), "parts": bool(parts)}
            # Any exception must reach all ranks: they would wait for the whole timeout otherwise.
            except Exception as error:
                cause = error
                outcome = {"failed": f"{type(error).__name__}: {error}"}
                parts = {}
        self._publish(outcome, parts)
        self._check(outcome, cause)
        if not parts:
            return Verdict(outcome["job"])
        own_parts = {group: json.loads(parts[self._part_of(group)]) for group in groups}
        return Verdict(outcome["job"], own_parts)

    def _publish(self, outcome: Mapping[str, Any], parts: Mapping[str, str]) -> None:
        """Write the decision, and its parts by key, into the store."""
        # The decision is written last, so that a rank that can read it can read its groups' parts.
        self.store.multi_set(  # type: ignore[attr-defined]
            [*parts, self._verdict(self.number)], [*parts.values(), _pack(outcome)]
        )
        # No rank needs the previous decision any more: each rank reads it before it posts the
        # message for this one.
        self.store.delete_key(self._verdict(self.number - 1))

    def await_decision(self, groups: Sequence[str] = ()) -> Verdict:
        """Wait for the decision of rank 0. Ranks other than 0; as `ask`."""
        key = self._verdict(self.number)
        try:
            self._wait_for(key)
            outcome = json.loads(self.store.get(key))
            self._check(outcome, None)
            if not groups or not outcome["parts"]:
                return Verdict(outcome["job"])
            parts = self.store.multi_get([self._part_of(group) for group in groups])
        # In any of these requests: rank 0 may exit right after it has published the decision.
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"FSSDP: rank {self.rank} lost the rendezvous store while it waited for rank 0, "
                "which has died or left"
            ) from error
        return Verdict(outcome["job"], dict(zip(groups, map(json.loads, parts), strict=True)))

    def _wait_for(self, key: str) -> None:
        """Wait until rank 0 has written ``key``. Errors as `ask`, and those of a lost store."""
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
        except dist.DistNetworkError:
            raise
        # A timeout. The subclass of RuntimeError depends on the kind of store.
        except RuntimeError as error:
            raise _too_late(self.rank, self._missing_so_far(), self.timeout) from error

    def _check(self, outcome: Mapping[str, Any], cause: Exception | None) -> None:
        if outcome.get("missing"):
            raise _too_late(0, outcome["missing"], self.timeout) from cause
        if "failed" in outcome:
            raise RuntimeError(
                "FSSDP: rank 0 failed while it evaluated the messages of all ranks: "
                f"{outcome['failed']}"
            ) from cause

    def _gather(self) -> tuple[dict[int, Any], list[int]]:
        """Read the messages of all ranks. Rank 0 only.

        Returns:
            Messages by rank; and the first ranks without a message at the timeout, if any.
        """
        notes: dict[int, Any] = {}
        start = time.monotonic()
        pause, longest = POLL_PAUSES
        published = False
        while True:
            for first in range(0, self.size, BLOCK):
                block = range(first, min(first + BLOCK, self.size))
                self._read_notes([rank for rank in block if rank not in notes], notes)
            seconds = time.monotonic() - start
            absent: list[int] = []
            if len(notes) < self.size and seconds > min(LIST_MISSING_AFTER, self.timeout / 4):
                absent = self._find_missing(notes)
                if absent and seconds >= self.timeout:
                    return notes, absent
            # A rank whose timeout expires before rank 0's reads this list, so the list is also
            # updated after missing ranks have arrived.
            if absent or published:
                self.store.set(self._key("missing"), _pack([self.number, absent]))
                published = True
            if len(notes) == self.size:
                return notes, []
            time.sleep(max(0.0, min(pause, self.timeout - seconds)))
            pause = min(2 * pause, longest)

    def _read_notes(self, ranks: Sequence[int], notes: dict[int, Any]) -> None:
        """Add the messages of ``ranks`` to ``notes`` if all of the ranks have written one.

        Messages of earlier questions are skipped.
        """
        keys = [self._note_of(rank) for rank in ranks]
        if keys and self.store.check(keys):
            for rank, text in zip(ranks, self.store.multi_get(keys), strict=True):
                number, note = json.loads(text)
                if number == self.number:
                    notes[rank] = note

    def _find_missing(self, notes: dict[int, Any]) -> list[int]:
        """Return the first `NAMED` ranks without a message; add messages found meanwhile."""
        absent: list[int] = []
        for rank in range(self.size):
            if rank not in notes:
                self._read_notes([rank], notes)
            if rank not in notes:
                absent.append(rank)
            if len(absent) == NAMED:
                break
        return absent

    def _missing_so_far(self) -> list[int]:
        """Return the ranks that rank 0 waits for; rank 0 itself if it has published none."""
        key = self._key("missing")
        if self.store.check([key]):
            number, absent = json.loads(self.store.get(key))
            if number == self.number and absent:
                return absent
        return [0]

    def _key(self, name: str) -> str:
        return f"megatron_hecate/{name}"

    def _note_of(self, rank: int) -> str:
        return self._key(f"note/{rank}")

    def _part_of(self, group: str) -> str:
        return self._key(f"group/{group}")

    def _verdict(self, number: int) -> str:
        return self._key(f"verdict/{number}")


def _pack(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _too_late(rank: int, absent: Sequence[int], timeout: float) -> TimeoutError:
    ending = ""
    if len(absent) == NAMED:
        ending = " and more"
    return TimeoutError(
        f"FSSDP: rank {rank} waited {timeout:g} s for ranks {absent}{ending} to switch FSSDP on; "
        "is --moe-fssdp given on every rank, and does every rank build the model?"
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
