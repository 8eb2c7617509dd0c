"""Compile planning once, before any test starts ranks with short timeouts: they find it in the cache."""

from __future__ import annotations

import pytest

from megatron_hecate.plan import compile_planning


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    compile_planning()
