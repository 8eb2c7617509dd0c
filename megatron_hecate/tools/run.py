"""A recorded run: its figures, and the sizes and layout of its job.

Loads are counted and steps measured.
Letters in shapes: T iterations, L layers, N ranks, E experts.
"""

from __future__ import annotations

import dataclasses
import io
import statistics
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_hecate.files import describe, read_file
from megatron_hecate.record.prices import PricedRecord
from megatron_hecate.record.run_folder import RunInfo, RunRecord, read
from megatron_hecate.tools.presets import Cluster, Model


@dataclasses.dataclass(frozen=True, eq=False)
class Run(PricedRecord):
    """Recorded run; properties of its job are ``None`` where the record does not hold them."""

    @classmethod
    def read(cls, trace: str | Path) -> Run:
        """Read a run folder, or the loads in an .npz.

        Raises:
            ValueError: for anything else, or what is damaged.
        """
        trace = Path(trace)
        if trace.is_dir():
            return cls(read(trace))
        if not trace.exists():
            raise ValueError(f"{trace} does not exist; give a folder of --moe-fssdp-record")
        try:
            load = _read_loads(trace)
        except ValueError as error:
            raise ValueError(
                f"{trace} holds no loads ({error}); give a folder of --moe-fssdp-record, or an "
                ".npz with counts [steps, layers, sources, experts] or load [steps, layers, "
                "experts]"
            ) from error
        steps, layers, experts = load.shape
        info = RunInfo(
            mode="observe",
            layers=tuple(f"layer {number}" for number in range(layers)),
            num_experts=experts,
            ranks=1,
            node=(0,),
        )
        return cls(
            RunRecord(info=info, iteration=np.arange(steps), time=np.zeros(steps), load=load)
        )

    @property
    def info(self) -> RunInfo:
        """Header of all stages together."""
        return self.record.info

    @property
    def stages(self) -> tuple[RunInfo, ...]:
        """Properties of each pipeline stage; empty for loads without a run folder."""
        return self.record.stages

    @property
    def observed(self) -> bool:
        """True if FSSDP was off."""
        return self.record.replica is None

    @property
    def moves(self) -> int:
        """Number of changes of an expert's home since the iteration before, or since the start."""
        built = np.broadcast_to(self.homes.home, (1, *self.home.shape[1:]))
        return int((np.diff(self.home, axis=0, prepend=built) != 0).sum())

    @cached_property
    def before(self) -> np.ndarray:
        """Tokens per rank as routed, with every expert at its original home, [T, L, N]."""
        load = self.record.load
        return load.reshape(*load.shape[:2], self.info.ranks, -1).sum(axis=3)

    @property
    def after(self) -> np.ndarray:
        """Tokens computed by each rank, [T, L, N]."""
        if self.record.rank_load is None:
            return self.before
        return self.record.rank_load

    @cached_property
    def fullest(self) -> np.ndarray:
        """Tokens of the fullest rank as routed, [T, L].

        Of each microbatch and summed, where the record holds it, with FSSDP also as computed; else
        of the iteration.
        """
        record = self.record
        if record.peak is None or not (self.observed or record.computed_peak is not None):
            return self.before.max(axis=2)
        return record.peak

    @cached_property
    def fullest_computed(self) -> np.ndarray:
        """Tokens of the fullest rank as computed, [T, L]; of each microbatch as in `fullest`."""
        if self.observed:
            return self.fullest
        if self.record.computed_peak is not None:
            return self.record.computed_peak
        return self.after.max(axis=2)

    @cached_property
    def waits(self) -> np.ndarray:
        """Load of the fullest rank over the mean as routed, [T, L]; 1 without tokens."""
        return _over_mean(self.fullest, self.before)

    @cached_property
    def waits_computed(self) -> np.ndarray:
        """Load of the fullest rank over the mean as computed, [T, L]; 1 without tokens."""
        return _over_mean(self.fullest_computed, self.after)

    @cached_property
    def excess(self) -> np.ndarray | None:
        """Imbalance of single microbatches beyond that of their sum, [T, L]; ``None`` if unknown.

        Tokens of their fullest ranks beyond those of the iteration's fullest rank, over the mean.
        """
        if self.record.peak is None:
            return None
        beyond = np.maximum(self.record.peak - self.before.max(axis=2), 0)
        mean = self.before.mean(axis=2)
        return np.divide(beyond, mean, out=np.zeros_like(mean), where=mean > 0)

    @cached_property
    def stage(self) -> np.ndarray:
        """Pipeline stage of each layer, [L]."""
        stage_of: dict[str, int] = {}
        for stage, info in enumerate(self.stages):
            stage_of.update(dict.fromkeys(info.layers, stage))
        return np.array([stage_of.get(name, 0) for name in self.info.layers])

    @property
    def columns_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the recorded layers of each stage."""
        stages = np.unique(self.stage)
        return tuple(tuple(np.flatnonzero(self.stage == stage).tolist()) for stage in stages)

    def of_step(self, values: np.ndarray) -> np.ndarray:
        """Aggregate layers to a step: sum within a stage, maximum over the concurrent stages, [T].

        Args:
            values: value of each layer, [T, L].
        """
        sums = [values[:, list(columns)].sum(axis=1) for columns in self.columns_of_stages]
        return np.max(sums, axis=0)

    @cached_property
    def steps_ms(self) -> np.ndarray:
        """Measured time of each step, [T] ms; NaN if unknown, as of the first one."""
        record = self.record
        steps = 1e3 * np.diff(record.time) / np.diff(record.iteration)
        return np.concatenate([[np.nan], steps])

    @property
    def step_ms(self) -> float:
        """Median measured time of a step, ms; NaN if unknown."""
        measured = self.steps_ms[~np.isnan(self.steps_ms)]
        if not len(measured):
            return float("nan")
        return float(np.median(measured))

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return int(self.info.job.get("pp", max(1, len(self.stages))))

    @property
    def vpp(self) -> int:
        """Chunks per pipeline stage."""
        return int(self.info.job.get("vpp", 1))

    @property
    def ranks(self) -> int | None:
        """Number of ranks, divided among stages and expert-parallel groups."""
        if not self.stages:
            return None
        return int(self.info.job.get("ranks", self.info.ranks * self.pp))

    @property
    def microbatches(self) -> int | None:
        """Microbatches per step."""
        # A record without sizes of its layers does not know the microbatches either.
        if not self.info.shape:
            return None
        return int(self.info.shape["microbatches"])

    @cached_property
    def tokens(self) -> int | None:
        """Tokens of a rank per microbatch."""
        if self.microbatches is None:
            return None
        # Layers that drop tokens have fewer than the others.
        group_tokens = self.record.load.sum(axis=2).max(axis=1)
        pairs = self.microbatches * self.info.ranks * self.info.top_k
        return max(1, round(float(np.median(group_tokens)) / pairs))

    @cached_property
    def stock_step_ms(self) -> float | None:
        """Median time of a stock step, ms; ``None`` unless several stock steps were recorded."""
        # With FSSDP the time of a step is not stock's.
        return self.step_ms if self.observed and self.step_ms > 0 else None

    @cached_property
    def model(self) -> Model | None:
        """Sizes of the model."""
        shape = self.info.shape
        if not shape:
            return None
        elements = shape["token_flops"] / 2
        width = max(1, round(shape["expert_bytes"] / elements))
        hidden = max(1, round(shape["token_bytes"] / width))
        job = dict(self.info.job)
        heads = int(job.get("heads", 0))
        attention = 4 * hidden**2
        head_width = hidden
        if heads:
            head_width = heads * job["head_width"]
            attention = 2 * job["hidden"] * job["head_width"] * (heads + job["groups"])
        layers = len(self.info.layers)
        return Model(
            layers=layers,
            hidden=hidden,
            # Parameters of all matrices: experts differ in their number, and may have biases.
            ffn=max(1, round(elements / hidden)),
            matrices=1,
            weight_bytes=width,
            grad_bytes=max(1, round(shape["grad_bytes"] / elements)),
            experts=self.info.num_experts,
            top_k=self.info.top_k,
            attention=attention,
            width=head_width,
            vocab=int(job.get("vocab", 0)),
            seq=int(job.get("seq", self.tokens or 1)),
            shared=int(job.get("shared", 0)),
            plain=max(0, int(job.get("num_layers", 0)) - layers),
            plain_ffn=int(job.get("dense_ffn", 0)),
        )

    @cached_property
    def cluster(self) -> Cluster | None:
        """Speeds of the machine, as the run used them."""
        if not self.info.speeds:
            return None
        speeds = self.world.speeds
        return Cluster(
            per_node=statistics.mode(map(self.info.node.count, self.info.node)),
            speeds=speeds,
            dense=speeds.flops,
            memory=float(self.info.job.get("device_bytes", 0)),
        )


def _over_mean(fullest: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Divide ``fullest`` [T, L] by the mean rank load of ``load`` [T, L, N]; 1 without tokens."""
    mean = load.mean(axis=2)
    return np.divide(fullest, mean, out=np.ones_like(mean), where=mean > 0)


def _read_loads(path: Path) -> np.ndarray:
    """Read the loads in an .npz, [T, L, E], summed over sources."""
    try:
        with np.load(io.BytesIO(read_file(path)), allow_pickle=False) as file:
            arrays = dict(file)
    # zipfile, zlib, numpy and numpy's header parser raise exceptions of their own.
    except Exception as error:
        raise ValueError(f"no .npz: {describe(error)}") from error
    name = "counts" if "counts" in arrays else "load"
    if name not in arrays:
        raise ValueError(f"it has no array counts or load, but {', '.join(arrays) or 'nothing'}")
    loads = arrays[name]
    num_axes = 4 if name == "counts" else 3
    if loads.ndim != num_axes or not loads.size or loads.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {loads.dtype} of shape {loads.shape}")
    # not NaN either
    if not ((loads >= 0) & np.isfinite(loads)).all():
        raise ValueError(f"{name} must be finite and not negative")
    if name == "counts":
        loads = loads.sum(axis=2)
    return loads
