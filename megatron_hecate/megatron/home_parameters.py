"""Lookup of the parameters of a rank's own experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter

from torch.nn import Module, Parameter


class HomeParameters:
    """Parameters of a rank's own experts.

    Each call looks them up, because loading or moving a model replaces parameters. Submodules are
    kept, because looking up the dotted names of many experts takes long in each forward.

    Args:
        experts: Megatron's expert module.
        names: dotted name of each parameter of an expert, with ``{}`` for the expert's index.
        num_homes: number of experts in the module.
    """

    def __init__(self, experts: Module, names: Sequence[str], num_homes: int) -> None:
        # submodule and attribute of each parameter, expert by expert
        self._owners: list[list[tuple[Module, str]]] = []
        for expert in range(num_homes):
            paths = [name.format(expert).rpartition(".") for name in names]
            self._owners.append([(experts.get_submodule(path), leaf) for path, _, leaf in paths])
        self._columns = [self._column(part) for part in range(len(names))]

    def _column(self, part: int) -> Callable[[], Sequence[Parameter]]:
        """Return a function that looks up one parameter of every expert, in order."""
        owners = [expert[part] for expert in self._owners]
        module, _ = owners[0]
        if len(owners) == 1 or any(owner is not module for owner, _ in owners):
            return lambda: [owner._parameters[leaf] for owner, leaf in owners]
        # one call of C for all experts of a grouped linear
        look_up = itemgetter(*(leaf for _, leaf in owners))
        return lambda: look_up(module._parameters)

    def all(self) -> list[list[Parameter]]:
        """Look up all parameters, expert by expert."""
        try:
            columns = [column() for column in self._columns]
        except KeyError as error:
            raise _missing(error) from error
        return [list(expert) for expert in zip(*columns, strict=True)]

    def one(self, index: int) -> list[Parameter]:
        """Look up the parameters of the expert at ``index``."""
        try:
            return [owner._parameters[leaf] for owner, leaf in self._owners[index]]
        except KeyError as error:
            raise _missing(error) from error

    @property
    def owners(self) -> list[tuple[Module, str]]:
        """Submodule and attribute of each parameter, flat, expert by expert."""
        return list(chain.from_iterable(self._owners))

    @property
    def first(self) -> Parameter:
        """The first parameter of the first expert."""
        owner, leaf = self._owners[0][0]
        try:
            return owner._parameters[leaf]
        except KeyError as error:
            raise _missing(error) from error


def _missing(error: KeyError) -> RuntimeError:
    return RuntimeError(
        f"an expert has no parameter {error} any more: it was parametrized, pruned or wrapped "
        "after FSSDP was switched on; leave --moe-fssdp off"
    )
