"""Determine from Megatron's settings which parts of a model CUDA graphs capture.

Needs no Megatron.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_hecate.megatron.rules import SettingSources

# Parts whose graphs leave the experts out. Between replays of such graphs FSSDP can fetch replicas,
# and the experts run without a graph.
WITH_REPLICAS = frozenset({"attn", "mamba", "mlp", "moe_router", "moe_preprocess"})
# older settings, and the value of cuda_graph_impl that each corresponds to
OLD_NAMES = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}


def captured_parts(settings: SettingSources) -> frozenset[str] | None:
    """Return the captured parts by the names of Megatron's ``CudaGraphModule``.

    The set is empty without graphs. ``None`` stands for whole layers, the whole iteration, and a
    ``cuda_graph_impl`` of an unknown name.
    """
    impl = settings["cuda_graph_impl"]
    if impl in (None, "none"):
        impl = next((new for name, new in OLD_NAMES.items() if settings[name]), None)
    if impl is None:
        return frozenset()
    parts = _names(settings["cuda_graph_scope"]) or _names(settings["cuda_graph_modules"])
    unknown = impl not in ("local", "transformer_engine")
    if unknown or not parts or parts & {"full", "full_iteration"}:
        return None
    # Megatron's own implementation captures both if one of the two is asked for
    if impl == "local" and parts & {"moe_router", "moe_preprocess"}:
        parts |= {"moe_router", "moe_preprocess"}
    return parts


def captures_iteration(settings: SettingSources) -> bool:
    """Return whether one graph captures all microbatches of a training iteration."""
    # Before 0.18 Megatron keeps the scope where graphs are off.
    return captured_parts(settings) is None and names_iteration(settings)


def names_iteration(settings: SettingSources) -> bool:
    """Return whether any setting names a graph of the whole iteration, perhaps an idle one."""
    names = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")
    return any("full_iteration" in _names(settings[name]) for name in names)


def replays() -> int:
    """Return the iterations that Megatron has run by its graph of whole iterations, or before it.

    The number starts over where Megatron drops the graph; 0 without one.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    if FullCudaGraphWrapper.cuda_graph["training"] is None:
        return 0
    return FullCudaGraphWrapper.curr_iteration["training"]


def holds_preprocess(settings: SettingSources) -> bool:
    """Return whether a graph captures the dispatcher's preprocessing.

    Such a graph also contains the rerouting from experts to physical experts.
    """
    return "moe_preprocess" in (captured_parts(settings) or ())


def _names(value: Any) -> frozenset[str]:
    """Return the names in a text, an enumerator, or a list of both."""
    if value is None:
        return frozenset()
    if isinstance(value, str):
        return frozenset(re.findall(r"\w+", value))
    if isinstance(value, list | tuple | set | frozenset):
        names: set[str] = set()
        for item in value:
            names |= _names(item)
        return frozenset(names)
    return frozenset({str(getattr(value, "name", value))})
