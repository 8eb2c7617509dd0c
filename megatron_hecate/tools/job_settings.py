"""Settings of a modelled job: flags of `what_if`, over its record, over defaults."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from megatron_hecate.plan import World, load_limit
from megatron_hecate.plan.cost import BACKWARD
from megatron_hecate.tools.presets import CLUSTERS, Cluster, Model
from megatron_hecate.tools.run import Run
from megatron_hecate.tools.step_model import StepModel

# microbatches of a step, where neither the record nor a flag gives them
MICROBATCHES: int = 8
# relative difference of a flag from the record that is not reported
CLOSE: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings of a modelled job.

    Args:
        model: sizes of the model.
        cluster: speeds of the machine.
        model_name, cluster_name: how to name them.
        ranks: ranks of the job.
        ep: expert-parallel size.
        pp: pipeline stages.
        vpp: interleaved chunks per stage.
        microbatches: microbatches per step.
        tokens: tokens of a rank per microbatch.
        measured: whether speeds were measured.
        optimizer_shards: ranks among which the optimizer state of an expert is sharded.
        sends_once: whether the dispatcher sends a token to a rank or node once.
        hidden: share of every all-to-all that hides behind compute.
        recompute: whether layers repeat their forward in the backward.
        factor: ``moe_expert_rank_capacity_factor``; ``None`` without a budget of tokens.
        alignment: multiple of rows to which the dispatcher pads each expert's tokens.
        step_ms: measured time of a stock step; ``None`` if unknown.
        step_is_given: whether a flag gave it.
        notes: contradictions of flags and record.
    """

    model: Model
    cluster: Cluster
    model_name: str
    cluster_name: str
    ranks: int
    ep: int
    pp: int
    vpp: int
    microbatches: int
    tokens: int
    measured: bool = False
    optimizer_shards: int = 1
    sends_once: bool = False
    hidden: float = 0.0
    recompute: bool = False
    factor: float | None = None
    alignment: int = 1
    step_ms: float | None = None
    step_is_given: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def resolve(cls, flags: argparse.Namespace, run: Run) -> JobSettings:
        """Combine the command line with the record; the flags are not changed.

        Args:
            flags: parsed command line.
            run: record of the job, or loads alone.

        Raises:
            ValueError: if neither flag nor record gives a needed value, or the layout does not
                divide.
        """
        notes: list[str] = []

        def choose(flag: Any, recorded: Any, what: str, close: float = 0.0) -> Any:
            """Return the flag, else the record's value; note a contradiction."""
            if flag is None:
                return recorded
            if recorded is not None and abs(flag - recorded) > close * abs(recorded):
                notes.append(f"the record has {what.format(recorded)}, not {flag:,.0f}")
            return flag

        model, model_name = _model(flags, run)
        cluster, cluster_name = _cluster(flags, run)
        pp = choose(flags.pp, run.pp, "{} pipeline stages")
        vpp = choose(flags.vpp, run.vpp, "{} chunks per stage")
        what = "{} microbatches per step"
        microbatches = choose(flags.microbatches, run.microbatches, what) or MICROBATCHES
        ranks, ep = _layout(flags, run, model, (pp, vpp, microbatches))
        given = None
        if flags.micro_batch is not None or flags.seq is not None:
            given = (flags.micro_batch or 1) * model.seq
        what = "{:,} tokens of a rank per microbatch"
        tokens = choose(given, run.tokens, what, CLOSE) or model.seq
        step_ms = None
        if _has_work_of(run, (ep, pp, vpp, microbatches, model.layers), tokens):
            step_ms = run.stock_step_ms
        job = run.info.job
        is_sharded = not flags.no_distributed_optimizer and job.get("optimizer_shards") != 1
        return cls(
            model=model,
            cluster=cluster,
            model_name=model_name,
            cluster_name=cluster_name,
            ranks=ranks,
            ep=ep,
            pp=pp,
            vpp=vpp,
            microbatches=microbatches,
            tokens=tokens,
            measured=cluster_name not in CLUSTERS and flags.cluster is not None,
            optimizer_shards=ranks // pp // ep if is_sharded else 1,
            sends_once=(flags.dispatcher or job.get("dispatcher")) == "flex",
            hidden=flags.hidden_all_to_all,
            recompute=flags.recompute or bool(job.get("recompute", False)),
            factor=flags.rank_capacity_factor or job.get("factor"),
            alignment=job.get("alignment", 1),
            step_ms=choose(flags.step_ms, step_ms, "steps of {:,.0f} ms (median)", CLOSE),
            step_is_given=flags.step_ms is not None,
            notes=tuple(notes),
        )

    @property
    def header(self) -> str:
        """One line with all settings."""
        step = "unknown" if self.step_ms is None else f"{self.step_ms:,.0f} ms"
        chunks = f" of {self.vpp} chunks" if self.vpp > 1 else ""
        parts = [
            f"{self.model_name} on {self.cluster_name}: {self.ranks} ranks",
            f"EP {self.ep}",
            f"PP {self.pp}{chunks}",
            f"{self.microbatches} microbatches of {self.tokens:,} tokens",
            f"top {self.model.top_k} of {self.model.experts} experts of "
            f"{self.model.expert_elements / 1e6:.2f} M parameters "
            f"of {self.model.weight_bytes} bytes",
            f"optimizer state over {self.optimizer_shards} rank{'s' * (self.optimizer_shards > 1)}",
            f"dispatcher {'flex' if self.sends_once else 'alltoall'}",
        ]
        if self.recompute:
            parts.append("layers recomputed")
        return ", ".join([*parts, f"stock step {step}"])

    @property
    def world(self) -> World:
        """Ranks of an expert-parallel group, on full nodes."""
        cluster = self.cluster
        if self.cluster_name in CLUSTERS:
            cluster = cluster.for_group(self.ep)
        node = tuple(rank // cluster.per_node for rank in range(self.ep))
        return World(node, cluster.speeds)

    def load_limit(self, slots: int) -> float | None:
        """Return the limit of plans with ``slots``, see `plan.load_limit`; ``None`` for none."""
        if self.factor is None:
            return None
        experts = self.model.experts // self.ep + slots
        rows = self.tokens * self.model.top_k
        return load_limit(self.factor, rows=rows, experts=experts, alignment=self.alignment)

    @property
    def once(self) -> int:
        """Experts per token where the dispatcher sends a token once, see `all_to_all`; else 0."""
        return self.model.top_k if self.sends_once else 0

    def step_model(self, run: Run, columns: np.ndarray) -> StepModel:
        """Model the times of a step that do not depend on routing.

        Args:
            run: record of the job, which may know the layers of each stage.
            columns: for each layer of the model, the column of a `Work` that stands for it.
        """
        model = self.model
        stages = run.columns_of_stages
        layout = (self.vpp, self.pp, model.layers)
        if layout != (1, len(stages), len(run.info.layers)):
            parts = np.array_split(np.arange(model.layers), self.pp * self.vpp)
            # chunk c of stage p is part c * pp + p
            stages = tuple(
                tuple(np.concatenate(parts[stage :: self.pp]).tolist()) for stage in range(self.pp)
            )
        return StepModel(
            dense=self.tokens * model.dense_flops() / self.cluster.dense,
            pair=model.shape().token_seconds(self.world) / (1 + BACKWARD),
            stages=tuple(tuple(columns[list(layers)].tolist()) for layers in stages),
            microbatches=self.microbatches,
            chunks=self.vpp,
            head=self.tokens * 2 * model.hidden * model.vocab / self.cluster.dense,
            hidden=self.hidden,
            recompute=self.recompute,
        )


def _has_work_of(run: Run, layout: tuple[int, ...], tokens: int) -> bool:
    """Return whether a recorded step has the work of a step of the modelled job.

    Ranks beyond pipeline stages and expert-parallel groups only add copies of the model.

    Args:
        run: record of the job, or loads alone.
        layout: expert-parallel size, stages, chunks, microbatches and layers.
        tokens: tokens of a rank per microbatch.
    """
    recorded = (run.info.ranks, run.pp, run.vpp, run.microbatches, len(run.info.layers))
    if any(
        recorded_size not in (size, None)
        for size, recorded_size in zip(layout, recorded, strict=True)
    ):
        return False
    # a record without sizes knows neither its microbatches nor their tokens
    return run.tokens is None or abs(tokens - run.tokens) <= CLOSE * tokens


def _model(flags: argparse.Namespace, run: Run) -> tuple[Model, str]:
    """Choose the model, and its name; its experts must be as many as recorded.

    Raises:
        ValueError: if neither flag nor record gives one, or its experts are others.
    """
    if flags.model is None:
        model = run.model
        if model is None:
            raise ValueError(f"--model NAME is needed: {flags.trace} holds no sizes")
        name = f"the recorded model ({model.layers} layers)"
    else:
        model, name = Model.named(flags.model), flags.model
    experts = run.info.num_experts
    if experts != model.experts:
        top_k = f",top_k={run.info.top_k}" if run.stages else ""
        raise ValueError(
            f"{flags.trace} has {experts} experts, {name} {model.experts}: give loads of this "
            "model, or take layers of its size with the recorded number of experts: "
            f"--model {name},experts={experts}{top_k}"
        )
    if model.top_k > experts:
        raise ValueError(
            f"--model {name}: a token cannot go to {model.top_k} of {experts} experts; set top_k"
        )
    return dataclasses.replace(model, seq=flags.seq or model.seq), name


def _cluster(flags: argparse.Namespace, run: Run) -> tuple[Cluster, str]:
    """Choose the machine, and its name."""
    if flags.cluster is not None:
        return Cluster.named(flags.cluster, per_node=flags.per_node), flags.cluster
    if run.cluster is None:
        raise ValueError(f"--cluster NAME is needed: {flags.trace} holds no speeds")
    return run.cluster, "the recorded speeds"


def _layout(
    flags: argparse.Namespace, run: Run, model: Model, pipeline: tuple[int, int, int]
) -> tuple[int, int]:
    """Choose ranks and expert-parallel size, and check that they divide.

    Args:
        flags: parsed command line.
        run: record of the job, or loads alone.
        model: sizes of the model.
        pipeline: stages, chunks per stage, microbatches.

    Raises:
        ValueError: if ranks, stages, chunks or experts do not divide.
    """
    pp, vpp, microbatches = pipeline
    ranks = flags.ranks
    if ranks is None:
        if run.ranks is None:
            raise ValueError(f"--ranks N is needed: {flags.trace} holds no ranks of the job")
        ranks = run.ranks // run.pp * pp
    per_stage, remainder = divmod(ranks, pp)
    if remainder or pp * vpp > model.layers:
        chunks = f" with --vpp {vpp}" if vpp > 1 else ""
        raise ValueError(
            f"--ranks {ranks} must divide among --pp {pp} stages, "
            f"of {model.layers} layers at most{chunks}"
        )
    if vpp > 1 and (pp == 1 or microbatches % pp):
        raise ValueError(
            f"--vpp needs --pp above 1 that divides --microbatches, got {pp}, {microbatches}"
        )
    divisors = [n for n in range(1, per_stage + 1) if per_stage % n == 0 and model.experts % n == 0]
    ep = flags.ep
    if ep is None:
        ep = run.info.ranks if run.stages and run.info.ranks in divisors else divisors[-1]
        if ep == 1 < min(per_stage, model.experts) and not (run.stages and run.info.ranks == 1):
            size = next(n for n in (8, 4, 2, model.experts) if model.experts % n == 0)
            near = max(1, round(per_stage / size)) * size
            raise ValueError(
                f"--ranks {ranks}: no expert-parallel size above 1 divides {per_stage} ranks of a "
                f"stage and {model.experts} experts; take --ranks {ranks // per_stage * near}, or "
                "--ep 1"
            )
    if ep not in divisors:
        raise ValueError(
            f"--ep {ep} must divide {per_stage} ranks of a stage and {model.experts} experts: "
            f"take one of {divisors}"
        )
    return ranks, ep
