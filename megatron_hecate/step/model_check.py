"""Checks of a model in an iteration, after all code that may have changed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from megatron_hecate.comm.agreement import collect, name_ranks
from megatron_hecate.comm.collectives import gather_objects
from megatron_hecate.step.layer_state import LayerState


def check_experts(state: LayerState) -> None:
    """Check code and parameters of a layer's experts, which may have changed between iterations.

    Raises:
        ValueError: on the rank where code is attached to single experts, or some are frozen.
    """
    problems, _ = _find_problems([state])
    if problems:
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
    conflicts: list[str] = []
    with collect(conflicts):
        conflicts += find_conflicts()
    problems, frozen_layers = _find_problems(states)
    group = states[0].group
    notes = gather_objects(
        ([*conflicts, *problems], frozen_layers),
        group,
        what="check of the model",
        label="first iteration",
    )
    frozen_everywhere = set.intersection(*(set(names) for _, names in notes))
    text = "experts are frozen on some ranks only; freeze them on all ranks or on none"
    lines_of_ranks = {
        rank: [*lines, *(f"{name}: {text}" for name in names if name not in frozen_everywhere)]
        for rank, (lines, names) in zip(dist.get_process_group_ranks(group), notes, strict=True)
    }
    if refused := list(name_ranks(lines_of_ranks)):
        raise _refusal(refused)


def _find_problems(states: Sequence[LayerState]) -> tuple[list[str], list[str]]:
    """List problems of single layers, and the names of the layers whose experts are frozen."""
    problems: list[str] = []
    frozen_layers: list[str] = []
    for state in states:
        experts, config = state.parts.experts, state.config
        with collect(problems, state.name):
            if config.slots:
                experts.inside.check()
            if (config.slots or config.rehome) and not experts.are_trained():
                frozen_layers.append(state.name)
    return problems, frozen_layers


def _refusal(lines: Iterable[str]) -> ValueError:
    return ValueError("\n".join(["FSSDP cannot run:", *(f"  - {line}" for line in lines)]))
