"""Which methods of libraries homes need before they move. Oracle: literal messages.

That homes are back before weights are read is shown in `test_checkpoint`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from megatron_hecate.homes.converters import (
    find_unknown_libraries,
    restore_homes_before_conversions,
)
from megatron_hecate.megatron.frameworks import BRIDGE, LIBRARIES, MBRIDGE

pytestmark = pytest.mark.fast
QUANTIZED = f"{BRIDGE}.models.conversion.quant_bridge"


def library(module: str, *, without: str = "") -> dict[str, Any]:
    """A stand-in for ``module`` of a library, with all methods of `LIBRARIES` but one."""
    name, methods = LIBRARIES[module]
    made = types.ModuleType(module)
    named = {method: lambda *args: args for method in methods if method != without}
    vars(made).update({name: type(name, (), named)} if name else named)
    return {module: made}


@pytest.fixture(autouse=True)
def bridge_of_0_4() -> Iterator[None]:
    """Bridge 0.4.0, which has no quantized export; none of the other libraries."""
    package = types.ModuleType(BRIDGE)
    package.__version__ = "0.4.0"
    with mock.patch.dict(sys.modules, {BRIDGE: package}):
        for module in LIBRARIES:
            sys.modules.pop(module, None)
        yield


def _convert() -> None:
    restore_homes_before_conversions(mock.Mock(), ())


def _is_wrapped(module: str, method: str) -> bool:
    base = getattr(sys.modules[module], LIBRARIES[module][0], sys.modules[module])
    return hasattr(getattr(base, method), "_megatron_hecate")


@pytest.mark.parametrize("module", LIBRARIES)
def test_every_method_of_a_library_is_needed(module: str) -> None:
    for method in LIBRARIES[module][1]:
        sys.modules.update(library(module, without=method))
        if module == MBRIDGE:  # its versions have different ones
            assert find_unknown_libraries() == []
            _convert()
            continue
        version = " (megatron.bridge 0.4.0)" if module.startswith(BRIDGE) else ""
        assert find_unknown_libraries() == [
            f"{module}{version} has no {method}, where homes would move back (rehome) before weights "
            "are read; leave rehome off"
        ]
    sys.modules.update(library(module))
    _convert()
    assert all(_is_wrapped(module, method) for method in LIBRARIES[module][1])


def test_a_bridge_without_quantized_export_needs_none() -> None:
    conversions = f"{BRIDGE}.models.conversion.model_bridge"
    sys.modules.update(library(conversions))
    _convert()
    assert _is_wrapped(conversions, "stream_weights_megatron_to_hf")
    # and one that has the module, but calls its method otherwise
    sys.modules.update(library(QUANTIZED, without="stream_weights_megatron_to_hf_quant"))
    (problem,) = find_unknown_libraries()
    assert "quant_bridge (megatron.bridge 0.4.0) has no stream" in problem
