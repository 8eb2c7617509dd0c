"""``@seeds(80)``: run a test of random cases for every seed; a failure names its seed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def seeds(count: int) -> Callable[[Callable], Callable]:
    """Decorate a test that has an argument ``seed``, so that it runs for the seeds 0 to ``count`` - 1 as one case."""

    def decorate(body: Callable) -> Callable:
        signature = inspect.signature(body)

        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            for seed in range(count):
                try:
                    body(seed=seed, **fixtures)
                except BaseException as error:
                    error.add_note(f"seed {seed} of {count}")
                    raise

        others = [p for name, p in signature.parameters.items() if name != "seed"]
        test.__signature__ = signature.replace(parameters=others)
        return test

    return decorate
