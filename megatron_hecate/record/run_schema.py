"""Schema of a run folder: what its headers and segments may hold. Needs numpy alone.

Letters in shapes: T iterations, L layers, E experts, N ranks, S slots.
"""

from __future__ import annotations

import io
import reprlib
import zipfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_hecate.files import describe
from megatron_hecate.plan.world import SECONDS_RANGE, SPEEDS_RANGE

if TYPE_CHECKING:
    from megatron_hecate.record.run_folder import RunInfo

VERSION: int = 1
# Tokens of an expert or a rank in an iteration, at most: sums over a record fit in 64 bits.
MOST_TOKENS: int = 1 << 40
# Counts, and numbers of iterations, at most.
MOST: int = 1 << 53
# Experts of a layer, and ranks, at most: figures have both axes.
MOST_EXPERTS: int = 1 << 13
# Bytes of the arrays of a segment, at most; a writer stops at 4 MiB.
MOST_BYTES: int = 64 << 20
Arrays = dict[str, np.ndarray]


class _Rule(NamedTuple):
    """Rule of one value in a header.

    Args:
        text: the values that it allows.
        allows: returns whether a value is allowed.
    """

    text: str
    allows: Callable[[Any], bool]


def _integer(lower: int, upper: int = MOST) -> _Rule:
    text = f"an integer from {lower} to {upper}"
    # `bool` is a kind of `int`.
    return _Rule(text, lambda value: type(value) is int and lower <= value <= upper)


def _number(lower: float, upper: float = 1e18) -> _Rule:
    text = f"a number from {lower:g} to {upper:g}"
    return _Rule(text, lambda value: type(value) in (int, float) and lower <= value <= upper)


def _one_of(*values: Any) -> _Rule:
    text = f"one of {', '.join(map(repr, values))}"
    return _Rule(text, lambda value: any(type(value) is type(v) and value == v for v in values))


def _list_of(rule: _Rule, min_length: int) -> _Rule:
    def allows(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= min_length and all(map(rule.allows, value))

    return _Rule(f"a list of {min_length} or more, each {rule.text}", allows)


_TEXT = _Rule(
    "printable text of at most 200 characters",
    lambda value: isinstance(value, str) and value.isprintable() and len(value) <= 200,
)
_NAME = _Rule(f"{_TEXT.text}, not empty", lambda value: _TEXT.allows(value) and value != "")
_FLAG = _Rule("true or false", lambda value: isinstance(value, bool))
_TEXTS = _Rule(
    "texts by name",
    lambda value: isinstance(value, dict) and all(map(_TEXT.allows, [*value, *value.values()])),
)
_SPEED, _SECONDS = _number(*SPEEDS_RANGE), _number(*SECONDS_RANGE)
_LINK = {"bandwidth": _SPEED, "latency": _SECONDS}
_JOB = dict.fromkeys(("ranks", "pp", "vpp", "tp", "optimizer_shards", "hidden", "seq"), _integer(1))
_JOB |= dict.fromkeys(
    ("ffn", "dense_ffn", "num_layers", "heads", "groups", "head_width"), _integer(0)
)
_JOB |= {"shared": _integer(0), "vocab": _integer(0), "device_bytes": _integer(0)}
_JOB |= {"dispatcher": _TEXT, "recompute": _FLAG}
_MEMORY = ("weights", "grads", "optimizer", "replica_weights", "replica_grads", "transport")
# A name in brackets may be missing, and each group of names may be empty.
HEADER: dict[str, Any] = {
    "version": _one_of(VERSION),
    "mode": _one_of("observe", "fssdp"),
    "layers": _list_of(_NAME, 1),
    "num_experts": _integer(1, MOST_EXPERTS),
    "ranks": _integer(1, MOST_EXPERTS),
    "node": _list_of(_integer(0), 1),
    "top_k": _integer(1, 1 << 20),
    "slots": _integer(0, 1 << 20),
    "shape": {
        **dict.fromkeys(("expert_bytes", "token_bytes", "token_flops"), _number(1)),
        "grad_bytes": _number(0),
        "hidden_seconds": _number(0, 1e6),
        **dict.fromkeys(("microbatches", "fetches", "returns"), _integer(1)),
    },
    "speeds": {
        "intra": _LINK,
        "inter": _LINK,
        "flops": _SPEED,
        "routing": _SECONDS,
        "contention": _number(0, 1),
        "[memory]": _SPEED,
        "[launch]": _SECONDS,
    },
    "memory": dict.fromkeys((*_MEMORY, "[connected]", "token", "kept"), _number(0)),
    "[job]": {f"[{name}]": rule for name, rule in _JOB.items()},
    "lifetime": _one_of("", "iteration", "layer"),
    "transport": _one_of("", "p2p", "nvlink"),
    "overlap_degree": _Rule(
        "null or an integer", lambda value: value is None or type(value) is int
    ),
    "versions": _TEXTS,
    "started": _TEXT,
    "[run]": _TEXT,
    "[first]": _integer(-1),
    "[writer]": _TEXT,
}


def check_header(header: Any) -> None:
    """Check the content of a header.

    Raises:
        ValueError: for a content that the schema does not allow.
    """
    # First: a header of another version has other names.
    version = header.get("version", VERSION) if isinstance(header, dict) else VERSION
    if version != VERSION:
        raise ValueError(f"version {reprlib.repr(version)}, this package reads {VERSION}")
    _check(header, HEADER, "the header")
    experts, ranks, job = header["num_experts"], header["ranks"], header.get("job", {})
    top_k, nodes = header["top_k"], len(header["node"])
    in_stage = job.get("ranks", ranks) / job.get("pp", 1)
    for agrees, text in (
        (nodes == ranks, f"node has {nodes} numbers, ranks is {ranks}"),
        (experts % ranks == 0, f"num_experts={experts} is not divisible by ranks={ranks}"),
        (top_k <= experts, f"top_k={top_k} is more than num_experts={experts}"),
        (
            "ranks" not in job or in_stage % ranks == 0,
            f"job has {in_stage:g} ranks in a stage, not a multiple of ranks={ranks}",
        ),
        (
            not job.get("heads") or {"head_width", "groups", "hidden"} <= job.keys(),
            "job has heads without head_width, groups and hidden",
        ),
    ):
        if not agrees:
            raise ValueError(text)


def _check(value: Any, rule: _Rule | Mapping[str, Any], name: str) -> None:
    """Raise a ValueError unless ``rule`` allows the ``value`` of ``name``."""
    if isinstance(rule, _Rule):
        if not rule.allows(value):
            raise ValueError(f"{name} must be {rule.text}, got {reprlib.repr(value)}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with names, got {reprlib.repr(value)}")
    rules = {key.strip("[]"): inner for key, inner in rule.items()}
    # Sizes, speeds or memory may be unknown, all of them.
    if not value and name != "the header":
        return
    if missing_keys := [key for key in rule if not key.startswith("[") and key not in value]:
        raise ValueError(f"{name} has no {', '.join(missing_keys)}")
    for key, inner in value.items():
        if key not in rules:
            raise ValueError(f"{name} has an unknown name {reprlib.repr(key)}")
        _check(inner, rules[key], key if name == "the header" else f"{name}.{key}")


class _Array(NamedTuple):
    """Rule of one array of a segment.

    Args:
        kind: ``i`` for integers, ``f`` for floating-point numbers.
        shape: letter of each axis.
        least, most: range of its values.
        modes: modes whose segments must have it.
        has_nan: whether values may be NaN.
    """

    kind: str
    shape: str
    least: float
    most: float
    modes: tuple[str, ...] = ()
    has_nan: bool = False


_BOTH = ("observe", "fssdp")
_TOKENS = (0, MOST_TOKENS)
_OURS = ("fssdp",)
SEGMENT: dict[str, _Array] = {
    "iteration": _Array("i", "T", 0, MOST, _BOTH),
    "every": _Array("i", "T", 1, MOST),
    "time": _Array("f", "T", 0, 1e11, _BOTH),
    "load": _Array("i", "TLE", *_TOKENS, _BOTH),
    "peak": _Array("i", "TL", *_TOKENS),
    "computed_peak": _Array("i", "TL", *_TOKENS),
    # Limits that are numbers of experts or ranks are added by `check_segment`.
    "home": _Array("i", "TLE", 0, MOST),
    "replica": _Array("i", "TLNS", -1, MOST, _OURS),
    "late": _Array("i", "TL", 0, MOST, _OURS),
    "rank_load": _Array("i", "TLN", *_TOKENS, _OURS),
    "crossing": _Array("i", "TL", *_TOKENS),
    "window": _Array("f", "TL", 0, 1e6, _OURS, has_nan=True),
    "copy": _Array("f", "TL", 0, 1e6, _OURS, has_nan=True),
    "timed_ns": _Array("i", "TLN", 0, MOST),
    "timed_tokens": _Array("i", "TLN", *_TOKENS),
}


def parse_arrays(data: bytes, *, most: int | None = None) -> Arrays:
    """Parse the arrays in the ``data`` of an .npz file.

    Args:
        data: content of the file.
        most: bytes of all arrays, at most; `MOST_BYTES` by default.

    Raises:
        ValueError: for broken data, or too many bytes.
    """
    most = MOST_BYTES if most is None else most
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > most:
            raise ValueError(f"the arrays have {size:,} bytes, more than {most:,}")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            parsed = dict(arrays)
        for name, array in parsed.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"array {name} is none of numpy's")
        return parsed
    # zipfile, zlib, numpy and numpy's header parser raise exceptions of their own.
    except Exception as error:
        raise ValueError(f"no .npz: {describe(error)}") from error


def check_segment(arrays: Arrays, info: RunInfo) -> None:
    """Check the arrays of a segment.

    Args:
        arrays: arrays by name; further ones than the schema's are ignored.
        info: header of the stage.

    Raises:
        ValueError: for arrays that the schema does not allow.
    """
    names = [name for name, rule in SEGMENT.items() if info.mode in rule.modes]
    # Earlier versions did not list the arrays.
    listed = arrays["arrays"].tobytes() if "arrays" in arrays else b""
    names += listed.decode("ascii", "replace").replace("\0", " ").split()
    if missing_names := {*names} - arrays.keys():
        raise ValueError(f"it has no array {', '.join(sorted(missing_names))}")
    if info.mode == "observe" and "replica" in arrays:
        raise ValueError("it has an array replica, but the header has mode observe")
    if ("timed_ns" in arrays) != ("timed_tokens" in arrays):
        raise ValueError("it has only one of the arrays timed_ns and timed_tokens")
    sizes = {"T": arrays["iteration"].size, "L": len(info.layers), "E": info.num_experts}
    sizes |= {"N": info.ranks, "S": info.slots}
    limits = {"replica": info.num_experts - 1, "home": info.ranks - 1}
    limits["late"] = info.ranks * info.slots
    for name, rule in SEGMENT.items():
        if name in arrays:
            limit = limits.get(name, rule.most)
            shape = tuple(sizes[letter] for letter in rule.shape)
            _check_array(name, arrays[name], rule._replace(most=limit), shape)
    iteration = arrays["iteration"].astype(np.int64)
    if (np.diff(iteration) <= 0).any():
        raise ValueError("array iteration is not ascending")
    # With FSSDP loads may be counted elsewhere than peaks.
    if info.mode == "observe" and "peak" in arrays:
        tokens = arrays["load"].astype(np.int64).sum(axis=2)
        if (arrays["peak"] > tokens).any():
            raise ValueError("array peak holds more tokens than array load")


def _check_array(name: str, array: np.ndarray, rule: _Array, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless the array has the kind, the ``shape`` and the range of ``rule``."""
    kinds, text = ("iu", "integers") if rule.kind == "i" else ("f", "floating-point numbers")
    if array.dtype.kind not in kinds or array.shape != shape:
        raise ValueError(
            f"array {name} is {array.dtype} of shape {array.shape}, expected {text} of {shape}"
        )
    allowed = (array >= rule.least) & (array <= rule.most)
    if rule.has_nan:
        allowed |= np.isnan(array)
    if not allowed.all():
        raise ValueError(
            f"array {name} holds {array[~allowed][0]}, expected {rule.least:g} to {rule.most:g}"
            f"{' or NaN' * rule.has_nan}"
        )
