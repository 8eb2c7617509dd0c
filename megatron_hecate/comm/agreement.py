"""Agreement of all ranks on switching FSSDP on: equal settings on every rank, or one error on all.

Each rank sends a `Note` about its model to rank 0, which validates all of them (`rendezvous`).
Exceptions of single ranks are reported to all: a rank that raises one on its own leaves all other
ranks waiting in their next collective, until a timeout that names neither the rank nor the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.comm.rank_0 import environment_number, refer_to_rank_0
from megatron_hecate.faults.rendezvous import Question

# Exceptions whose messages users understand; other messages get the name of the class in front.
EXPLAINED = (OSError, RuntimeError, TypeError, ValueError)
# Upper bounds on problems, and on a problem's runs of ranks: every rank reads the list.
LISTED: int = 64
RUNS: int = 8


@dataclasses.dataclass(frozen=True)
class Note:
    """Per-rank summary of the model, sent to rank 0. JSON-serializable.

    Args:
        settings: values by name, equal on all ranks with a value of the name.
        layers: names of the rank's MoE layers; may be empty on a pipeline stage, not on all ranks.
        problems: reasons why this rank cannot switch FSSDP on.
        summary: the layers' part of the line "FSSDP on".
        memory: fields of `RankMemory`, needed and free bytes; empty without MoE layers.
    """

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    summary: str = ""
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)

    def agree(
        self,
        *,
        timeout: float,
        judge: Callable[[list[Note]], tuple[list[str], Any]] = lambda _: ([], None),
    ) -> tuple[Any, list[Note]]:
        """Gather the notes of all ranks on rank 0, validate them, and broadcast the decision.

        Args:
            timeout: seconds to wait for the other ranks.
            judge: function from all notes to further problems and the decision for all ranks, which
                must be small and JSON-serializable. Called on rank 0 only.

        Returns:
            The decision, and the notes of all ranks by rank. On ranks other than 0 the notes are
            empty.

        Raises:
            ValueError: on all ranks, when any rank has a problem or different settings, or no rank
                has a MoE layer. Lists the first `LISTED` problems.
            TimeoutError: on all ranks, when a rank is missing; names the missing ranks.
            RuntimeError: on all ranks, when the callback raises an exception.
        """
        notes: list[Note] = []

        def compare(gathered: list[Any]) -> list[Any]:
            notes.extend(Note(**fields) for fields in gathered)
            problems, decision = judge(notes)
            return [shorten([*_find_problems(notes), *problems]), decision]

        problems, decision = Question.next(timeout=timeout).ask(dataclasses.asdict(self), compare)
        refuse(problems)
        return decision, notes


def _find_problems(notes: Sequence[Note]) -> Iterable[str]:
    """Yield the problems of ranks, with their numbers, and the settings that differ."""
    yield from name_ranks({rank: note.problems for rank, note in enumerate(notes)})
    references: dict[str, tuple[int, Any]] = {}
    ranks_by_value: dict[tuple[str, str], list[int]] = {}
    for rank, note in enumerate(notes):
        for name, value in note.settings.items():
            if value != references.setdefault(name, (rank, value))[1]:
                ranks_by_value.setdefault((name, repr(value)), []).append(rank)
    for (name, value), ranks in ranks_by_value.items():
        verb = "has" if len(ranks) == 1 else "have"
        first, expected = references[name]
        yield f"{format_ranks(ranks)} {verb} {name}={value}, rank {first} has {name}={expected!r}"
    if not any(note.layers for note in notes):
        yield "the model has no MoE layer; set --num-experts, or leave --moe-fssdp off"


def name_ranks(problems: Mapping[int, Iterable[str]]) -> Iterator[str]:
    """Yield the distinct ``problems`` of ranks, each with its ranks' numbers unless all have it."""
    ranks_with: dict[str, list[int]] = {}
    for rank, lines in problems.items():
        for line in dict.fromkeys(lines):
            ranks_with.setdefault(line, []).append(rank)
    for line, ranks in ranks_with.items():
        yield line if len(ranks) == len(problems) else f"{line} ({format_ranks(ranks)})"


def shorten(texts: Iterable[str]) -> list[str]:
    """Return the first `LISTED` distinct texts, which all ranks read, and the number of others."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) <= LISTED:
        return distinct
    return [*distinct[:LISTED], f"and {len(distinct) - LISTED} more"]


def format_ranks(numbers: Sequence[int], noun: str = "rank") -> str:
    """Format ascending numbers, such as "rank 3", "ranks 0-7, 12", or the first `RUNS` runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > RUNS:
        texts = [*texts[:RUNS], f"... ({len(numbers)} in all)"]
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(texts)}"


class SwitchOnError(ValueError):
    """Error that lists why FSSDP cannot be switched on.

    Every rank raises it with the whole list. Uncaught, rank 0 prints the list and each other rank
    one line, without a traceback: the constructor replaces `sys.excepthook`, for this type only.

    Args:
        problems: one line per reason.
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
        rank = dist.get_rank() if dist.is_initialized() else environment_number("RANK")
        if rank == 0:
            print(self, file=sys.stderr, flush=True)
        else:
            refer_to_rank_0("FSSDP cannot be switched on; rank 0 prints the reasons", rank)


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


@contextlib.contextmanager
def collect(problems: list[str], subject: str = "") -> Iterator[None]:
    """Append an exception of the block to ``problems`` instead of raising it.

    The caller sends the list to all ranks: through the store (`Note.agree`, `Question.ask`), or
    over a process group (`raise_on_all`).

    Args:
        problems: problems of this rank, one line of text each.
        subject: prefix of the text, such as "layer 3".
    """
    try:
        yield
    except Exception as error:
        text = str(error) or type(error).__name__
        if not isinstance(error, EXPLAINED):
            text = f"{type(error).__name__}: {error}"
        problems.append(f"{subject}: {text}" if subject else text)


@contextlib.contextmanager
def raise_on_all(
    group: dist.ProcessGroup, *, what: str, label: str, error: type[Exception] = RuntimeError
) -> Iterator[None]:
    """Raise an exception of the block on all ranks of ``group``. Collective.

    All ranks leave the block together, also without an exception.

    Args:
        group: the ranks that run the block; its timeout applies.
        what: name of the action, for the error of a missing rank.
        label: name of the layer, for errors.
        error: class of the raised exception.

    Raises:
        error: on all ranks, if any rank raises in the block; names each such rank, by its number in
            the job, and its reason.
        TransferError: when a rank dies or does not take part in time.
    """
    problems: list[str] = []
    with collect(problems):
        yield
    problems_by_rank = gather_objects(problems, group, what=what, label=label)
    texts: list[str] = []
    for rank, lines in zip(dist.get_process_group_ranks(group), problems_by_rank, strict=True):
        texts += [f"rank {rank}: {text}" for text in lines]
    if texts:
        raise error(f"{label}: {'; '.join(texts)}")
