"""Exceptions of single ranks, reported to all ranks.

A rank that raises an exception on its own leaves all other ranks waiting in their next collective,
until a timeout that names neither the rank nor the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from megatron_hecate.comm.collectives import gather_objects

# Exceptions whose messages users understand; other messages get the name of the class in front.
EXPLAINED = (OSError, RuntimeError, TypeError, ValueError)


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
