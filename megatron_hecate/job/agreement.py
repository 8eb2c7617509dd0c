"""All ranks switch FSSDP on alike, or none does and all say why."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_hecate.job.collectives import wait_collective
from megatron_hecate.job.rendezvous import Question, Verdict

LISTED: int = 64  # problems that ranks other than 0 list, at most
# seconds that rank 0 has to print, before torchrun sees that another rank has failed and ends it
GRACE: float = 2.0


@dataclasses.dataclass(frozen=True)
class Note:
    """What a rank tells of its model; all of it what JSON can hold.

    Args:
        settings: on which ranks must agree, by name.
        layers: names of the MoE layers it has; none is fine for a pipeline stage, not for a whole model.
        problems: what stops it.
        summary: what the line that says FSSDP is on tells of its layers.
        memory: what it needs, and has; empty without MoE layers.
        slower_by_engines: see `Connection`.
        rounds: in how many rounds gradients come home, where that is worth a line.
    """

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    summary: str = ""
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    slower_by_engines: float | None = None
    rounds: str = ""

    def agree(
        self,
        *,
        timeout: float,
        judge: Callable[[list[Note]], tuple[list[str], Any]] = lambda _: ([], None),
    ) -> tuple[Any, list[Note]]:
        """Wait for all ranks of the job and compare notes.

        Args:
            timeout: seconds to wait for the others.
            judge: problems that show only when all notes are seen, and what is decided for all ranks (of what JSON can
                hold, and small). It runs on rank 0 only.

        Returns:
            What was decided; and the notes of all ranks, by rank, on rank 0, elsewhere none.

        Raises (on all ranks):
            ValueError: when any rank has a problem or other settings, or no rank has a MoE layer. Rank 0 lists all
                problems, others the first `LISTED`.
            TimeoutError: naming the ranks that did not come in time.
            RuntimeError: when ``judge`` raises anything.
        """
        notes: list[Note] = []
        found: list[str] = []

        def compare(told: list[Any]) -> Verdict:
            notes.extend(Note(**fields) for fields in told)
            problems, decision = judge(notes)
            found.extend(dict.fromkeys([*_find_problems(notes), *problems]))
            return Verdict({"problems": shorten(found), "decision": decision})

        verdict = Question.next(timeout=timeout).ask(dataclasses.asdict(self), compare)
        refuse(found or verdict.job["problems"])
        return verdict.job["decision"], notes


def _find_problems(notes: Sequence[Note]) -> Iterable[str]:
    """What the ranks say, and where they differ."""
    for note in notes:
        yield from note.problems
    with_value: dict[tuple[str, str], list[int]] = {}
    for rank, note in enumerate(notes):
        for name, value in note.settings.items():
            if value != notes[0].settings[name]:
                with_value.setdefault((name, repr(value)), []).append(rank)
    for (name, value), ranks in with_value.items():
        who = f"ranks {format_ranks(ranks)} have" if len(ranks) > 1 else f"rank {ranks[0]} has"
        yield f"{who} {name}={value}, rank 0 has {name}={notes[0].settings[name]!r}"
    if not any(note.layers for note in notes):
        yield "the model has no MoE layer; set --num-experts, or leave --moe-fssdp off"


def shorten(texts: Iterable[str]) -> list[str]:
    """The first `LISTED` different ones, so that what all ranks of a large job read stays small."""
    first = list(dict.fromkeys(texts))
    return first if len(first) <= LISTED else [*first[:LISTED], f"and {len(first) - LISTED} more"]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, runs of them as "0-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class SwitchOnError(ValueError):
    """FSSDP cannot be switched on.

    Every rank raises it with the whole list. Uncaught, rank 0 prints the list and each other rank one
    line, without a traceback: `sys.excepthook` is replaced, for this type only, when one is made.

    Args:
        problems: what is wrong, a line each.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)
        if not getattr(sys.excepthook, "_megatron_hecate", False):
            sys.excepthook = _without_traceback(sys.excepthook)

    def __str__(self) -> str:
        return "\n".join(
            ["FSSDP cannot be switched on:", *(f"  - {problem}" for problem in self.problems)]
        )

    def print(self) -> None:
        """Print the list on rank 0, and one line on another rank, to the standard error."""
        rank = rank_of_job()
        if rank == 0:
            print(self, file=sys.stderr, flush=True)
            return
        print(
            f"FSSDP cannot be switched on; rank 0 says why (this is rank {rank})",
            file=sys.stderr,
            flush=True,
        )
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(GRACE)


def rank_of_job() -> int:
    """Return this process's rank, also before its process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def _without_traceback(hook: Callable[..., None]) -> Callable[..., None]:
    def print_error(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, SwitchOnError):
            error.print()
        else:
            hook(kind, error, traceback)

    print_error._megatron_hecate = True  # type: ignore[attr-defined]
    return print_error


def refuse(problems: Iterable[str]) -> None:
    """Raise a `SwitchOnError` that lists all ``problems``, if there are any."""
    if listed := list(problems):
        raise SwitchOnError(listed)


def assert_same(number: int, group: dist.ProcessGroup, *, label: str, timeout: float) -> None:
    """All ranks of ``group`` hold the same 64-bit ``number``, the fingerprint of what they all should have computed.

    Raises:
        AssertionError: naming ``label`` and every rank's number.
        TransferError: when a rank does not take part within ``timeout`` seconds.
    """
    own = torch.tensor([number], dtype=torch.int64)
    if dist.get_backend(group) == "nccl":
        own = own.cuda()
    numbers = own.new_empty(group.size())
    work = dist.all_gather_into_tensor(numbers, own, group=group, async_op=True)
    assert work is not None
    wait_collective(work, numbers, group, what="comparing plans", label=label, timeout=timeout)
    seen = numbers.tolist()
    if len(set(seen)) > 1:
        raise AssertionError(
            f"{label}: ranks of {dist.get_process_group_ranks(group)} planned differently: {seen}"
        )
