"""A recorded run as a job to simulate: its loads, sizes, layout and step time."""

from __future__ import annotations

import dataclasses
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hecate.plan import Link, Speeds
from megatron_hecate.record.analysis import Figures
from megatron_hecate.record.run_folder import RunInfo, RunRecord, read, read_infos
from megatron_hecate.tools.presets import Cluster, Model


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RecordedRun:
    """Properties of a recorded job; ``None`` where the record does not hold them.

    Args:
        record: record of the run, all stages together.
        stages: header of each pipeline stage.
    """

    record: RunRecord
    stages: tuple[RunInfo, ...]

    @classmethod
    def read(cls, trace: str | Path) -> RecordedRun | None:
        """Read ``trace``; ``None`` if it is no run folder."""
        infos = read_infos(Path(trace))
        if not infos:
            return None
        return cls(record=read(trace), stages=tuple(infos.values()))

    @cached_property
    def figures(self) -> Figures:
        """Counted and measured figures of the run."""
        return Figures(self.record, self.stages)

    @property
    def info(self) -> RunInfo:
        """Header of all stages together."""
        return self.record.info

    @property
    def job(self) -> dict[str, Any]:
        """Sizes and layout of the job; empty in records of earlier versions."""
        return dict(self.info.job)

    @property
    def ep(self) -> int:
        """Size of the expert-parallel group."""
        return self.info.ranks

    @property
    def layers(self) -> int:
        """Number of layers with experts."""
        return len(self.info.layers)

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return int(self.job.get("pp", len(self.stages)))

    @property
    def vpp(self) -> int:
        """Chunks per pipeline stage."""
        return int(self.job.get("vpp", 1))

    @property
    def ranks(self) -> int:
        """Number of ranks that the simulation divides among stages and expert-parallel groups."""
        return int(self.job.get("ranks", self.ep * self.pp))

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
        of_group = self.record.load.sum(axis=2).max(axis=1)
        pairs = self.microbatches * self.ep * self.info.top_k
        return max(1, round(float(np.median(of_group)) / pairs))

    @cached_property
    def step_ms(self) -> float | None:
        """Median time of a stock step, ms; ``None`` unless several stock steps were recorded."""
        # With FSSDP the time of a step is not stock's.
        if self.info.mode != "observe" or not self.figures.step_ms > 0:
            return None
        return self.figures.step_ms

    @cached_property
    def model(self) -> Model | None:
        """Sizes of the model."""
        shape = self.info.shape
        if not shape:
            return None
        elements = shape["token_flops"] / 2
        width = max(1, round(shape["expert_bytes"] / elements))
        hidden = max(1, round(shape["token_bytes"] / width))
        job = self.job
        heads = int(job.get("heads", 0))
        attention = 4 * hidden**2
        head_width = hidden
        if heads:
            head_width = heads * job["head_width"]
            groups = job["groups"]
            attention = 2 * job["hidden"] * job["head_width"] * (heads + groups)
        tokens = self.tokens or 1
        return Model(
            layers=self.layers,
            hidden=hidden,
            # Parameters of all matrices: experts differ in their number, and may have biases.
            ffn=max(1, round(elements / hidden)),
            matrices=1,
            weight_bytes=width,
            experts=self.info.num_experts,
            top_k=self.info.top_k,
            attention=attention,
            width=head_width,
            vocab=int(job.get("vocab", 0)),
            seq=int(job.get("seq", tokens)),
            shared=int(job.get("shared", 0)),
            plain=max(0, int(job.get("num_layers", 0)) - self.layers),
            plain_ffn=int(job.get("dense_ffn", 0)),
        )

    @cached_property
    def cluster(self) -> Cluster | None:
        """Speeds of the machine, as the run used them."""
        speeds = self.info.speeds
        if not speeds:
            return None
        links = {name: Link(**speeds[name]) for name in ("intra", "inter")}
        of_run = Speeds(**{**speeds, **links})
        return Cluster(
            per_node=statistics.mode(map(self.info.node.count, self.info.node)),
            speeds=of_run,
            dense=of_run.flops,
            memory=float(self.job.get("device_bytes", 0)),
        )

    @cached_property
    def excess(self) -> np.ndarray | None:
        """Imbalance that single microbatches have beyond their sum, see `SimulatedJob.excess`."""
        if self.record.peak is None:
            return None
        ranks = self.figures.before
        mean = ranks.mean(axis=2)
        beyond = np.maximum(self.record.peak - ranks.max(axis=2), 0)
        return np.divide(beyond, mean, out=np.zeros_like(mean), where=mean > 0)

    @property
    def columns_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the recorded layers of each stage."""
        stage = self.figures.stage
        return tuple(tuple(np.flatnonzero(stage == one).tolist()) for one in np.unique(stage))

    @property
    def optimizer_shards(self) -> int | None:
        """Ranks among which the optimizer state of an expert is sharded."""
        return self.job.get("optimizer_shards")

    @property
    def sends_once(self) -> bool:
        """Whether the dispatcher sends a token to a rank or node once."""
        return self.job.get("dispatcher") == "flex"

    @property
    def recomputes(self) -> bool:
        """Whether layers repeat their forward in the backward."""
        return bool(self.job.get("recompute", False))
