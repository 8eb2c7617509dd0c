"""Checks of a model in an iteration, after all code that may have changed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from megatron_hecate.comm.agreement import collect, format_ranks
from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.step.layer_state import LayerState


def check_experts(state: LayerState) -> None:
    """Check code and parameters of a layer's experts, which may have changed between iterations.

    Raises:
        ValueError: on the rank where code is attached to single experts, or some are frozen.
    """
    if problems := _find_problems([state]):
        raise _refusal(problems)


def check_model(states: Sequence[LayerState], find_conflicts: Callable[[], Iterable[str]]) -> None:
    """Check that nothing added after the hook conflicts with replicas, before the first iteration.

    Collective.

    Args:
        states: states of all layers.
        find_conflicts: function that returns a line for each conflict outside of the experts.

    Raises:
        ValueError: on all ranks of the FSSDP group; lists the problems of all of them.
    """
    problems: list[str] = []
    with collect(problems):
        problems += find_conflicts()
    problems += _find_problems(states)
    group = states[0].group
    rank_problems = gather_objects(
        problems, group, what="check of the model", label="first iteration"
    )
    ranks_with: dict[str, list[int]] = {}
    for rank, lines in zip(dist.get_process_group_ranks(group), rank_problems, strict=True):
        for line in lines:
            ranks_with.setdefault(line, []).append(rank)
    if ranks_with:
        raise _refusal(
            line if len(ranks) == group.size() else f"{line} (rank {format_ranks(ranks)})"
            for line, ranks in ranks_with.items()
        )


def _find_problems(states: Sequence[LayerState]) -> list[str]:
    problems: list[str] = []
    for state in states:
        with collect(problems, state.name):
            if state.config.slots:
                state.parts.experts.inside.check()
            if state.config.slots or state.config.rehome:
                state.parts.experts.are_trained()
    return problems


def _refusal(lines: Iterable[str]) -> ValueError:
    return ValueError("\n".join(["FSSDP cannot run:", *(f"  - {line}" for line in lines)]))
