"""One question to all ranks of the job: every rank tells rank 0 a note, and hears its verdict.

Ranks talk over the rendezvous store, not over a process group: one that never asks is then a named error after the
timeout, not a collective that hangs. Each rank makes three or four requests, however large the job is; the store of a
job of 16,384 ranks serves them in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.job.attempt import Attempt

BLOCK: int = 128  # notes that rank 0 reads at once; of all at once a store takes longer
NAMED: int = 64  # missing ranks that are named, at most
LOOKS: tuple[float, float] = (
    0.02,
    1.0,
)  # seconds between two looks for notes: the first time, and the most
NAMING: float = 2.0  # seconds after which rank 0 says for whom it waits


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What rank 0 says; all of it what JSON can hold.

    Args:
        job: what every rank hears: few bytes, whatever the size of the job.
        groups: what the ranks of a group hear further, by its name.
    """

    job: Any
    groups: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Question:
    """Every rank tells rank 0 a note, and hears its verdict.

    The next question uses the same keys again, so that the store does not grow.

    Args:
        store: that all ranks see.
        rank: this one.
        size: how many there are.
        number: of the question in this attempt of the job, the same on all ranks, more each time: notes carry it, since
            keys are used again.
        timeout: seconds to wait for the others.
    """

    store: dist.Store
    rank: int
    size: int
    number: int
    timeout: float

    @classmethod
    def next(cls, *, timeout: float) -> Self:
        """Of the ranks of this job, over the rendezvous store. All ranks ask at once."""
        number = Attempt.current().count("question")
        return cls(_get_default_store(), dist.get_rank(), dist.get_world_size(), number, timeout)

    def ask(
        self, note: Any, judge: Callable[[list[Any]], Verdict], *, groups: Sequence[str] = ()
    ) -> Verdict:
        """Tell ``note``, and hear the verdict.

        Args:
            note: what JSON can hold.
            judge: from the notes of all ranks, by rank. It runs on rank 0 only.
            groups: those that this rank is in, whose parts of the verdict it hears, if there are any.

        Raises (on all ranks):
            TimeoutError: naming the ranks that did not come in time.
            RuntimeError: when ``judge`` raises anything.
        """
        self.tell(note)
        return self.answer(judge, groups=groups) if self.rank == 0 else self.hear(groups)

    def tell(self, note: Any) -> None:
        """Put this rank's note where rank 0 reads it."""
        self.store.set(self._note_of(self.rank), _pack([self.number, note]))

    def answer(
        self, judge: Callable[[list[Any]], Verdict], *, groups: Sequence[str] = ()
    ) -> Verdict:
        """Rank 0: read all notes, judge, and publish the verdict; then as `hear`."""
        told, missing = self._gather()
        outcome: dict[str, Any] = {"missing": missing}
        parts: dict[str, str] = {}
        cause: Exception | None = None
        if not missing:
            try:
                verdict = judge([told[rank] for rank in range(self.size)])
                parts = {
                    self._part_of(group): _pack(part) for group, part in verdict.groups.items()
                }
                outcome = {"job": json.loads(_pack(verdict.job)), "parts": bool(parts)}
            except Exception as error:  # every rank must hear of it, whatever it is
                cause, outcome, parts = error, {"failed": f"{type(error).__name__}: {error}"}, {}
        # the verdict comes last: who sees it finds its part
        self.store.multi_set(  # type: ignore[attr-defined]
            [*parts, self._verdict(self.number)], [*parts.values(), _pack(outcome)]
        )
        self.store.delete_key(
            self._verdict(self.number - 1)
        )  # who tells a note has heard the verdict before
        self._check(outcome, cause)
        own = [self._part_of(group) for group in groups if parts]
        return Verdict(
            outcome["job"],
            {group: json.loads(parts[key]) for group, key in zip(groups, own, strict=False)},
        )

    def hear(self, groups: Sequence[str] = ()) -> Verdict:
        """The other ranks: wait for the verdict."""
        key = self._verdict(self.number)
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"FSSDP: rank {self.rank} lost the rendezvous store while it waited for rank 0, which has died or left"
            ) from error
        except RuntimeError as error:  # of other kinds of stores as well
            raise _too_late(self.rank, self._missing_so_far(), self.timeout) from error
        outcome = json.loads(self.store.get(key))
        self._check(outcome, None)
        parts = (
            self.store.multi_get([self._part_of(group) for group in groups])
            if groups and outcome["parts"]
            else []
        )
        return Verdict(outcome["job"], dict(zip(groups, map(json.loads, parts), strict=False)))

    def _check(self, outcome: Mapping[str, Any], cause: Exception | None) -> None:
        if outcome.get("missing"):
            raise _too_late(0, outcome["missing"], self.timeout) from cause
        if "failed" in outcome:
            raise RuntimeError(
                f"FSSDP: rank 0 could not judge what all ranks told it: {outcome['failed']}"
            ) from cause

    def _gather(self) -> tuple[dict[int, Any], list[int]]:
        """Rank 0: what ranks tell, by rank; and the first ranks that do not within the timeout."""
        told: dict[int, Any] = {}
        start, (pause, longest), published = time.monotonic(), LOOKS, False
        while True:
            for first in range(0, self.size, BLOCK):
                block = range(first, min(first + BLOCK, self.size))
                self._read_notes([rank for rank in block if rank not in told], told)
            passed = time.monotonic() - start
            missing: list[int] = []
            if len(told) < self.size and passed > min(NAMING, self.timeout / 4):
                missing = self._find_missing(told)
                if missing and passed >= self.timeout:
                    return told, missing
            if missing or published:  # whose own time ends before rank 0's reads it
                self.store.set(self._key("missing"), _pack([self.number, missing]))
                published = True
            if len(told) == self.size:
                return told, []
            time.sleep(max(0.0, min(pause, self.timeout - passed)))
            pause = min(2 * pause, longest)

    def _read_notes(self, ranks: Sequence[int], told: dict[int, Any]) -> None:
        """Add what ``ranks`` tell to ``told``, once there are notes of all of them; those of earlier questions are
        none."""
        keys = [self._note_of(rank) for rank in ranks]
        if keys and self.store.check(keys):
            for rank, text in zip(ranks, self.store.multi_get(keys), strict=True):
                number, note = json.loads(text)
                if number == self.number:
                    told[rank] = note

    def _find_missing(self, told: dict[int, Any]) -> list[int]:
        """The first ranks without a note; adds those found on the way to ``told``."""
        missing: list[int] = []
        for rank in range(self.size):
            if rank not in told:
                self._read_notes([rank], told)
            if rank not in told:
                missing.append(rank)
            if len(missing) == NAMED:
                break
        return missing

    def _missing_so_far(self) -> list[int]:
        """For whom rank 0 waits; itself, where it says nothing."""
        key = self._key("missing")
        number, missing = json.loads(self.store.get(key)) if self.store.check([key]) else (0, [])
        return missing if number == self.number and missing else [0]

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


def _too_late(rank: int, missing: Sequence[int], timeout: float) -> TimeoutError:
    more = " and more" if len(missing) == NAMED else ""
    return TimeoutError(
        f"FSSDP: rank {rank} waited {timeout:g} s for ranks {missing}{more} to switch FSSDP on; is --moe-fssdp "
        "given on every rank, and do all of them build the model?"
    )
