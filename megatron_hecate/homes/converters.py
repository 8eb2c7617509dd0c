"""Converters of weights that read parameters of experts off their modules.

One may be an object that the model's configuration holds. Libraries of `frameworks` pass the model
to methods of theirs.

No state_dict hook sees such a read, and while experts have moved, a parameter has the name of
another expert.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.nn import Module

from megatron_hecate.homes.schedule import HomesSchedule
from megatron_hecate.megatron.frameworks import BRIDGE, LIBRARIES, MBRIDGE, METHODS


def restore_homes_before_libraries(*, needs_all: bool = True) -> None:
    """Have the imported ones of `LIBRARIES` restore homes of their models.

    A framework may use them and switch FSSDP on by its hook alone. All ranks must
    call their methods together, which they need to themselves. Methods are wrapped once, for good:
    nothing changes for models without moved experts.

    Args:
        needs_all: whether homes will move, which needs every method of a library.

    Raises:
        ValueError: if a library lacks one of the methods. mbridge's versions have different ones.
    """
    for module, (name, methods) in LIBRARIES.items():
        base = sys.modules.get(module)
        if name:
            base = getattr(base, name, None)
        if base is None:
            continue
        for method in methods:
            convert = getattr(base, method, None)
            if convert is None and needs_all and module != MBRIDGE:
                raise ValueError(
                    f"FSSDP cannot move homes (rehome): {_with_version(module)} has no {method}, "
                    "where FSSDP moves them back before weights are read; leave rehome off"
                )
            if callable(convert) and not hasattr(convert, "_megatron_hecate"):
                setattr(base, method, _where_megatron_built_them(convert))


def _with_version(module: str) -> str:
    """Return the name of a library's ``module``, with the library's version if it has one."""
    library = BRIDGE if module.startswith(f"{BRIDGE}.") else module.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return f"{module} ({library} {version})" if version else module


def _where_megatron_built_them(convert: Callable) -> Callable:
    @functools.wraps(convert)
    def conversion(*args: Any, **kwargs: Any) -> Any:
        schedules = map(_schedule_of, (*args, *kwargs.values()))
        return _at_home(schedules, functools.partial(convert, *args, **kwargs))

    conversion._megatron_hecate = True  # type: ignore[attr-defined]
    return conversion


def _schedule_of(value: Any) -> HomesSchedule | None:
    """Return the schedule of a model chunk or a list of them, ``None`` of anything else."""
    for chunk in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(chunk, Module):
            return None
        for module in chunk.modules():
            # all layers of a model share one schedule of homes
            if hasattr(module, "fssdp"):
                return module.prefetcher.rehoming
    return None


def restore_homes_before(
    converter: Any, schedule: HomesSchedule, undo: contextlib.ExitStack
) -> None:
    """Move experts back to their original homes whenever ``converter`` reads or writes weights.

    All ranks must call its methods together. Does nothing for an object without such methods.

    Args:
        converter: object whose class becomes a subclass.
        schedule: schedule of the model's homes, held weakly: a converter may outlive its model.
        undo: stack for the restoration.
    """
    base = type(converter)
    if not any(callable(getattr(base, name, None)) for name in METHODS):
        return
    reference = weakref.ref(schedule)
    if hasattr(converter, "fssdp_homes"):
        converter.fssdp_homes.append(reference)
        undo.callback(converter.fssdp_homes.remove, reference)
        return
    converter.fssdp_homes = [reference]
    converter.__class__ = _subclass(base)
    undo.callback(delattr, converter, "fssdp_homes")
    undo.callback(setattr, converter, "__class__", base)


@functools.cache
def _subclass(base: type) -> type:
    """Make a subclass of a converter's class that restores homes first."""
    names = [name for name in METHODS if callable(getattr(base, name, None))]
    return type(base.__name__, (base,), {name: _restored_first(base, name) for name in names})


def _restored_first(base: type, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(base, name))
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        alive = (reference() for reference in self.fssdp_homes)
        # looked up now: ms-swift replaces methods of the class
        method = getattr(base, name)
        return _at_home(alive, functools.partial(method, self, *args, **kwargs))

    return convert


def _at_home(schedules: Iterable[HomesSchedule | None], convert: Callable[[], Any]) -> Any:
    """Restore the homes of all ``schedules``, then call ``convert``; check its iterator."""
    schedules = [schedule for schedule in schedules if schedule is not None]
    for schedule in schedules:
        schedule.restore()
    result = convert()
    if schedules and isinstance(result, Iterator):
        return _checked(result, schedules)
    return result


def _checked(weights: Iterator[Any], schedules: list[HomesSchedule]) -> Iterator[Any]:
    """Yield ``weights``; raise RuntimeError if experts have moved since the iterator was made."""
    for weight in weights:
        for schedule in schedules:
            schedule.refuse_if_moved()
        yield weight
