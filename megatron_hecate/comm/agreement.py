"""All ranks switch FSSDP on alike, or none does and all say why.

Ranks tell each other over the rendezvous store, not over a process group: a rank that was started without the flag is
then a named error after the timeout, not a collective that hangs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_hecate.comm.transfer import wait_collective

_round = 0  # how often this process has exchanged notes: each time has keys of its own


@dataclasses.dataclass(frozen=True)
class Note:
    """What a rank tells the others; all of it what JSON can hold.

    Args:
        settings: on which ranks must agree, by name.
        layers: names of the MoE layers it has; none is fine for a pipeline stage, not for a whole model.
        problems: what stops it.
        summary: what the line that says FSSDP is on tells of its layers.
        memory: what it needs, and has; empty without MoE layers.
    """

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    summary: str = ""
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)

    def exchange(self, *, timeout: float) -> list[Self]:
        """The notes of all ranks, by rank. All ranks call at once.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            TimeoutError: naming the ranks that did not come in time.
        """
        global _round
        _round += 1
        store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
        keys = [f"megatron_hecate/agree/{_round}/{r}" for r in range(size)]
        store.set(keys[rank], json.dumps(dataclasses.asdict(self)))
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:  # DistStoreError is one
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"FSSDP: rank {rank} waited {timeout:g} s for ranks {missing} to switch FSSDP on; is --moe-fssdp "
                "given on every rank, and do all of them build the model?"
            ) from error
        return [type(self)(**json.loads(store.get(key))) for key in keys]

    def agree(self, *, timeout: float, find_problems: Callable[[list[Note]], list[str]] = lambda _: []) -> list[Note]:
        """Wait for all ranks of the job and compare notes.

        Args:
            timeout: seconds to wait for the others.
            find_problems: problems that show only when all notes are seen; the same on every rank.

        Returns:
            The notes of all ranks, by rank.

        Raises:
            ValueError: when any rank has a problem or other settings, or no rank has a MoE layer.
            TimeoutError: naming the ranks that did not come in time.
        """
        notes: list[Note] = list(self.exchange(timeout=timeout))
        found = dict.fromkeys(problem for other in notes for problem in other.problems)
        for r, other in enumerate(notes):
            for name, value in other.settings.items():
                if value != notes[0].settings[name]:
                    found[f"rank {r} has {name}={value!r}, rank 0 has {name}={notes[0].settings[name]!r}"] = None
        if not any(other.layers for other in notes):
            found["the model has no MoE layer; set --num-experts, or leave --moe-fssdp off"] = None
        found |= dict.fromkeys(find_problems(notes))
        refuse(found)
        return notes


def refuse(problems: Iterable[str]) -> None:
    """Raises a ValueError that lists all ``problems``, if there are any."""
    if listed := "\n".join(f"  - {problem}" for problem in problems):
        raise ValueError(f"FSSDP cannot be switched on:\n{listed}")


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
        raise AssertionError(f"{label}: ranks of {dist.get_process_group_ranks(group)} planned differently: {seen}")
