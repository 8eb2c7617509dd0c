"""Which parts of a model CUDA graphs hold, told by Megatron's settings. Needs no Megatron."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

# Between replays of these FSSDP can fetch replicas and give them to the experts, which run without a graph.
WITH_REPLICAS = frozenset({"attn", "mamba", "mlp", "moe_router", "moe_preprocess"})


class _Settings(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


def captured_parts(settings: _Settings) -> frozenset[str] | None:
    """What graphs hold, by the names of Megatron's ``CudaGraphModule``; nothing without graphs. ``None``: whole layers,
    the whole iteration, or what a ``cuda_graph_impl`` of an unknown name holds."""
    impl = settings["cuda_graph_impl"]
    if impl in (None, "none"):  # the names of before
        old = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
        impl = next((new for name, new in old.items() if settings[name]), None)
    if impl is None:
        return frozenset()
    parts = _names(settings["cuda_graph_scope"]) or _names(settings["cuda_graph_modules"])
    unknown = impl not in ("local", "transformer_engine")
    if unknown or not parts or parts & {"full", "full_iteration"}:
        return None
    if impl == "local" and parts & {"moe_router", "moe_preprocess"}:  # Megatron adds the other
        parts |= {"moe_router", "moe_preprocess"}
    return parts


def holds_preprocess(settings: _Settings) -> bool:
    """Whether a graph holds the dispatcher's preprocessing, and so the way from experts to physical experts."""
    return "moe_preprocess" in (captured_parts(settings) or ())


def _names(value: Any) -> frozenset[str]:
    """Names in a text, in a list of texts or enumerators, or in what Bridge writes enumerators as."""
    if value is None:
        return frozenset()
    if isinstance(value, str):
        return frozenset(re.findall(r"\w+", value))
    if isinstance(value, Mapping):
        return frozenset({str(value.get("_name_", value))})
    if isinstance(value, list | tuple | set | frozenset):
        return frozenset(name for item in value for name in _names(item))
    return frozenset({str(getattr(value, "name", value))})
