"""Converters of weights that read parameters of experts off their modules.

One may be an object that the model's configuration holds; further ones are methods of the libraries
of `frameworks`. No state_dict hook sees such a read, and while experts have moved, a parameter has
the name of another expert. So all experts of the job move back to their original homes first. All
ranks must call such a method together, which it needs to itself.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.homes.schedule import HomesSchedule
from megatron_hecate.megatron.frameworks import BRIDGE, LIBRARIES, MBRIDGE, METHODS

# Schedules of the models whose homes move, held weakly: a converter may outlive its model.
_schedules: weakref.WeakKeyDictionary[HomesSchedule, Attempt] = weakref.WeakKeyDictionary()


def restore_homes_before_conversions(schedule: HomesSchedule, converters: Sequence[Any]) -> None:
    """Move the experts of ``schedule`` back before any converter reads or writes weights.

    Methods of the imported ones of `LIBRARIES` are wrapped once, for good: nothing changes without
    moved experts.

    Args:
        schedule: schedule of a model's homes.
        converters: objects that models' configurations hold; other objects are ignored.
    """
    for _, owner, method in _methods():
        convert = getattr(owner, method, None)
        if callable(convert) and not hasattr(convert, "_megatron_hecate"):
            setattr(owner, method, _restoring(convert))
    for converter in converters:
        names = [name for name in METHODS if callable(getattr(converter, name, None))]
        if names and not hasattr(getattr(type(converter), names[0]), "_megatron_hecate"):
            converter.__class__ = _subclass(type(converter), tuple(names))
    _schedules[schedule] = Attempt.current()


def find_unknown_libraries() -> list[str]:
    """List methods that imported `LIBRARIES` lack; mbridge's versions have different ones."""
    return [
        f"{_with_version(module)} has no {method}, where homes would move back (rehome) before "
        "weights are read; leave rehome off"
        for module, owner, method in _methods()
        if module != MBRIDGE and not hasattr(owner, method)
    ]


def _methods() -> Iterator[tuple[str, Any, str]]:
    """Yield the module, the owner and the name of each method of the imported `LIBRARIES`."""
    for module, (name, methods) in LIBRARIES.items():
        owner = sys.modules.get(module)
        if name:
            owner = getattr(owner, name, None)
        if owner is not None:
            for method in methods:
                yield module, owner, method


def _with_version(module: str) -> str:
    """Return the name of a library's ``module``, with the library's version if it has one."""
    library = BRIDGE if module.startswith(f"{BRIDGE}.") else module.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return f"{module} ({library} {version})" if version else module


@functools.cache
def _subclass(base: type, names: Sequence[str]) -> type:
    """Make a subclass of a converter's class that restores homes before the methods ``names``."""

    def method(name: str) -> Callable[..., Any]:
        # Looked up at the call: ms-swift replaces methods of the class.
        return _restoring(lambda *args, **kwargs: getattr(base, name)(*args, **kwargs))

    return type(base.__name__, (base,), {name: method(name) for name in names})


def _restoring(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that restores homes, then calls ``convert``; it checks an iterator."""

    @functools.wraps(convert)
    def conversion(*args: Any, **kwargs: Any) -> Any:
        schedules = [
            schedule for schedule, attempt in list(_schedules.items()) if not attempt.is_over
        ]
        for schedule in schedules:
            schedule.restore()
        result = convert(*args, **kwargs)
        if schedules and isinstance(result, Iterator):
            return _checked(result, schedules)
        return result

    conversion._megatron_hecate = True  # type: ignore[attr-defined]
    return conversion


def _checked(weights: Iterator[Any], schedules: list[HomesSchedule]) -> Iterator[Any]:
    """Yield ``weights``; raise RuntimeError if experts have moved since the iterator was made."""
    for weight in weights:
        for schedule in schedules:
            schedule.refuse_if_moved()
        yield weight
