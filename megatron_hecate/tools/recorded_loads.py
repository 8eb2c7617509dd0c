"""Recorded loads of any supported format for `what_if`.

Letters in shapes: T steps, L layers, N sources, E experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from megatron_hecate import files
from megatron_hecate.record.run_folder import read
from megatron_hecate.record.run_schema import MOST_TOKENS, parse_arrays
from megatron_hecate.tools.recorded_run import RecordedRun


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Loads to simulate.

    Args:
        loads: pairs by step, layer, source and expert, [T, L, N, E]; some in every step and layer.
        excess: see `RecordedRun.excess`, [T, L]; ``None`` if unknown.
        notes: doubts about the loads.
    """

    loads: np.ndarray
    excess: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str, run: RecordedRun | None) -> Trace:
        """Read the loads of a trace.

        Args:
            path: path of the trace.
            run: record in ``path``; ``None`` for other traces.

        Raises:
            ValueError: for loads that cannot be simulated.
        """
        if run is None:
            loads = read_loads(path)
            return cls(loads=loads, notes=_doubts(loads))
        loads = run.record.load[:, :, None]
        excess = run.excess
        notes: tuple[str, ...] = ()
        # A layer may be idle in single iterations; such steps have no pairs to scale to the job's.
        complete = loads.any(axis=(2, 3)).all(axis=1)
        if complete.any() and not complete.all():
            loads = loads[complete]
            excess = None if excess is None else excess[complete]
            idle = int((~complete).sum())
            notes = (f"left out: {idle} of {len(complete)} iterations, where a layer has no token",)
        try:
            check_loads(loads)
        except ValueError as error:
            raise ValueError(f"{path} cannot be simulated: {error}") from None
        return cls(loads=loads, excess=excess, notes=(*notes, *_doubts(loads)))


def _doubts(loads: np.ndarray) -> tuple[str, ...]:
    """Return a note on loads [T, L, N, E] of a single step."""
    if len(loads) > 1:
        return ()
    return ("there is a single step, which forecasts itself exactly: gains are upper bounds",)


def read_loads(path: Path | str) -> np.ndarray:
    """Read recorded loads as (token, expert) pairs by step, layer, source and expert.

    Formats: a run folder; an .npz with ``counts`` [T, L, N, E]
    or ``load`` [T, L, E]; JSON with ``counts`` by model, domain and layer, as OLMoE publishes:
    all domains of its first model together are one step.

    Args:
        path: folder or file.

    Returns:
        Pairs [T, L, N, E]; N is 1 where the record holds sums over sources.

    Raises:
        ValueError: for anything else.
    """
    path = Path(path)
    try:
        counts = _read(path)
        check_loads(counts)
    # JSON may hold anything.
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no loads ({error}); give a folder of --moe-fssdp-record, "
            "an .npz with counts [steps, layers, sources, experts] or "
            "load [steps, layers, experts], or OLMoE's JSON"
        ) from error
    return counts


def _read(path: Path) -> np.ndarray:
    """Read ``path`` by its kind; formats without sources get an axis of length 1."""
    if path.is_dir():
        return read(path).load[:, :, None]
    if path.suffix == ".json":
        domains, *_ = files.parse_json(files.read_file(path))["counts"].values()
        total = np.sum([list(layers.values()) for layers in domains.values()], axis=0)
        return total[None, :, None]
    if not path.exists():
        raise ValueError("it does not exist")
    # Loads of every source take more than a segment of a record.
    arrays = parse_arrays(files.read_file(path), most=files.MOST_BYTES)
    if "counts" in arrays:
        return arrays["counts"]
    if "load" not in arrays:
        raise ValueError("'load is not a file in the archive'")
    return arrays["load"][:, :, None]


def check_loads(counts: np.ndarray) -> None:
    """Raise ValueError unless ``counts`` has four axes of finite loads, some in every layer."""
    if counts.ndim != 4 or not counts.size or counts.dtype.kind not in "iuf":
        raise ValueError(f"loads are {counts.dtype} of shape {counts.shape}")
    if not np.isfinite(counts).all() or counts.min() < 0 or not counts.sum(axis=(2, 3)).all():
        raise ValueError("loads must be 0 or more, and some in every step and layer")
    if counts.max() > MOST_TOKENS:
        raise ValueError(f"loads must be at most {MOST_TOKENS:,}, got {counts.max():,}")
