"""Settings of a simulated job: flags of `what_if`, over its record, over defaults."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_hecate.tools.presets import CLUSTERS, Cluster, Model
from megatron_hecate.tools.recorded_run import RecordedRun

# microbatches of a step, where neither the record nor a flag gives them
MICROBATCHES: int = 8
# relative difference of a flag from the record that is not reported
CLOSE: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of the job's ranks.

    Args:
        ranks: ranks of the job.
        ep: expert-parallel size.
        pp: pipeline stages.
        vpp: interleaved chunks per stage.
        microbatches: microbatches per step.
    """

    ranks: int
    ep: int
    pp: int
    vpp: int
    microbatches: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings of a simulated job.

    Args:
        model: sizes of the model.
        cluster: speeds of the machine.
        model_name, cluster_name: how to name them.
        layout: layout of the job's ranks.
        tokens: tokens of a rank per microbatch.
        measured: whether speeds were measured.
        optimizer_shards: ranks among which the optimizer state of an expert is sharded.
        sends_once: whether the dispatcher sends a token to a rank or node once.
        hidden: share of every all-to-all that hides behind compute.
        recompute: whether layers repeat their forward in the backward.
        step_ms: measured time of a stock step; ``None`` if unknown.
        step_is_given: whether a flag gave it.
        notes: contradictions of flags and record.
    """

    model: Model
    cluster: Cluster
    model_name: str
    cluster_name: str
    layout: Layout
    tokens: int
    measured: bool = False
    optimizer_shards: int = 1
    sends_once: bool = False
    hidden: float = 0.0
    recompute: bool = False
    step_ms: float | None = None
    step_is_given: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def resolve(cls, flags: argparse.Namespace, run: RecordedRun | None) -> JobSettings:
        """Combine the command line with the record; the flags are not changed.

        Args:
            flags: parsed command line.
            run: record of the job; ``None`` for other traces.

        Raises:
            ValueError: if neither flag nor record gives a needed value, or the layout does not
                divide.
        """
        notes: list[str] = []
        model, model_name = _model(flags, run, notes)
        cluster, cluster_name = _cluster(flags, run)
        microbatches = _choose(
            flags.microbatches,
            run and run.microbatches,
            "{} microbatches per step",
            notes=notes,
        )
        layout = _layout(flags, run, model, microbatches or MICROBATCHES, notes=notes)
        shards = layout.ranks // layout.pp // layout.ep
        if flags.no_distributed_optimizer:
            shards = 1
        elif run is not None and run.optimizer_shards == 1:
            # Stock's optimizer of the run is not sharded.
            shards = 1
        tokens = _tokens(flags, run, model, notes=notes)
        step_ms = None
        if run is not None and run.layers == model.layers and _is_step_of(run, layout, tokens):
            step_ms = run.step_ms
        return cls(
            model=model,
            cluster=cluster,
            model_name=model_name,
            cluster_name=cluster_name,
            layout=layout,
            tokens=tokens,
            measured=cluster_name not in CLUSTERS and flags.cluster is not None,
            optimizer_shards=shards,
            sends_once=_choose(
                flags.dispatcher and flags.dispatcher == "flex",
                run and run.sends_once,
                "dispatcher flex: {}",
                notes=notes,
            )
            or False,
            hidden=flags.hidden_all_to_all,
            recompute=flags.recompute or (run is not None and run.recomputes),
            step_ms=_choose(
                flags.step_ms, step_ms, "steps of {:,.0f} ms (median)", notes=notes, close=CLOSE
            ),
            step_is_given=flags.step_ms is not None,
            notes=tuple(notes),
        )

    @property
    def header(self) -> str:
        """One line with all settings."""
        layout = self.layout
        step = "unknown"
        if self.step_ms is not None:
            step = f"{self.step_ms:,.0f} ms"
        chunks = f" of {layout.vpp} chunks" if layout.vpp > 1 else ""
        parts = [
            f"{self.model_name} on {self.cluster_name}: {layout.ranks} ranks",
            f"EP {layout.ep}",
            f"PP {layout.pp}{chunks}",
            f"{layout.microbatches} microbatches of {self.tokens:,} tokens",
            f"top {self.model.top_k} of {self.model.experts} experts of "
            f"{self.model.expert_elements / 1e6:.2f} M parameters "
            f"of {self.model.weight_bytes} bytes",
            f"optimizer state over {self.optimizer_shards} rank{'s' * (self.optimizer_shards > 1)}",
            f"dispatcher {'flex' if self.sends_once else 'alltoall'}",
        ]
        if self.recompute:
            parts.append("layers recomputed")
        return ", ".join([*parts, f"stock step {step}"])


def _choose(
    given: Any, recorded: Any, what: str, *, notes: list[str], close: float = 0.0
) -> Any | None:
    """Return the value of a flag, else of the record, and note a contradiction.

    Args:
        given: value of the flag; ``None`` if not given.
        recorded: value in the record; ``None`` if unknown.
        what: format of the value in the note.
        notes: list to which a contradiction is added.
        close: largest relative difference that is not reported.
    """
    if given is None:
        return recorded
    if recorded is not None and abs(given - recorded) > close * abs(recorded):
        notes.append(f"the record has {what.format(recorded)}, not {_digits(given)}")
    return given


def _digits(value: float) -> str:
    if isinstance(value, bool):
        return str(value)
    return f"{value:,.0f}"


def _missing(flag: str, what: str, trace: str, run: RecordedRun | None) -> ValueError:
    """Explain that a flag is needed.

    Args:
        flag: flag with its value.
        what: what the flag gives, and a run folder may hold.
        trace: path of the trace.
        run: record of the job; ``None`` for other traces.
    """
    if run is not None:
        return ValueError(f"{flag} is needed: the record in {trace} holds no {what}")
    if not Path(trace).exists():
        return ValueError(f"{trace} does not exist; give a run folder, or another trace (--help)")
    return ValueError(f"{flag} is needed: {trace} is no run folder, which could hold {what}")


def _model(
    flags: argparse.Namespace, run: RecordedRun | None, notes: list[str]
) -> tuple[Model, str]:
    """Choose the model, and its name; sizes that contradict the record are noted."""
    recorded = run and run.model
    if flags.model is None:
        if recorded is None:
            raise _missing("--model NAME", "sizes", flags.trace, run)
        name = f"the recorded model ({recorded.layers} layers)"
        return dataclasses.replace(recorded, seq=flags.seq or recorded.seq), name
    model = Model.named(flags.model)
    if recorded is not None:
        sizes: tuple[tuple[str, Callable[[Model], float]], ...] = (
            ("top k {}", lambda one: one.top_k),
            ("experts of {:,.0f} parameters", lambda one: one.expert_elements),
            ("{} bytes per parameter", lambda one: one.weight_bytes),
        )
        for what, size in sizes:
            _choose(size(model), size(recorded), what, notes=notes, close=0.01)
    return dataclasses.replace(model, seq=flags.seq or model.seq), flags.model


def _cluster(flags: argparse.Namespace, run: RecordedRun | None) -> tuple[Cluster, str]:
    """Choose the machine, and its name."""
    if flags.cluster is not None:
        return Cluster.named(flags.cluster, per_node=flags.per_node), flags.cluster
    if run is None or run.cluster is None:
        raise _missing("--cluster NAME", "speeds", flags.trace, run)
    return run.cluster, "the recorded speeds"


def _is_step_of(run: RecordedRun, layout: Layout, tokens: int) -> bool:
    """Return whether a recorded step has the work of a step in ``layout``.

    Ranks beyond pipeline stages and expert-parallel groups only add copies of the model.

    Args:
        run: record of the job.
        layout: layout of the simulated job.
        tokens: tokens of a rank per microbatch.
    """
    # A record without sizes knows neither its microbatches nor their tokens.
    if run.microbatches is not None:
        is_other_size = abs(tokens - (run.tokens or 0)) > CLOSE * tokens
        if run.microbatches != layout.microbatches or is_other_size:
            return False
    return (run.ep, run.pp, run.vpp) == (layout.ep, layout.pp, layout.vpp)


def _tokens(
    flags: argparse.Namespace, run: RecordedRun | None, model: Model, *, notes: list[str]
) -> int:
    """Choose the tokens of a rank per microbatch."""
    given = None
    if flags.micro_batch is not None or flags.seq is not None:
        given = (flags.micro_batch or 1) * model.seq
    what = "{:,} tokens of a rank per microbatch"
    tokens = _choose(given, run and run.tokens, what, notes=notes, close=CLOSE)
    return tokens or model.seq


def _layout(
    flags: argparse.Namespace,
    run: RecordedRun | None,
    model: Model,
    microbatches: int,
    *,
    notes: list[str],
) -> Layout:
    """Choose ranks, pipeline and expert-parallel size, and check that they divide.

    Raises:
        ValueError: if ranks, stages, chunks or experts do not divide.
    """
    pp = _choose(flags.pp, run and run.pp, "{} pipeline stages", notes=notes) or 1
    vpp = _choose(flags.vpp, run and run.vpp, "{} chunks per stage", notes=notes) or 1
    ranks = flags.ranks
    if ranks is None:
        if run is None:
            raise _missing("--ranks N", "ranks of the job", flags.trace, run)
        ranks = run.ranks
        if pp != run.pp:
            ranks = run.ranks // run.pp * pp
    per_stage, rest = divmod(ranks, pp)
    if rest or pp * vpp > model.layers:
        most = f"{model.layers} layers at most"
        if vpp > 1:
            most += f" with --vpp {vpp}"
        raise ValueError(f"--ranks {ranks} must divide among --pp {pp} stages, of {most}")
    if vpp > 1 and (pp == 1 or microbatches % pp):
        raise ValueError(
            f"--vpp needs --pp above 1 that divides --microbatches, got {pp}, {microbatches}"
        )
    fits = [
        size
        for size in range(1, per_stage + 1)
        if per_stage % size == 0 and model.experts % size == 0
    ]
    ep = flags.ep
    if ep is None:
        ep = run.ep if run is not None and run.ep in fits else fits[-1]
        if ep == 1 < per_stage and (run is None or run.ep > 1):
            raise ValueError(_no_ep(ranks, per_stage, model.experts))
    if ep not in fits:
        raise ValueError(
            f"--ep {ep} must divide {per_stage} ranks of a stage and {model.experts} experts: "
            f"take one of {fits}"
        )
    return Layout(ranks=ranks, ep=ep, pp=pp, vpp=vpp, microbatches=microbatches)


def _no_ep(ranks: int, per_stage: int, experts: int) -> str:
    """Explain that no expert-parallel size fits, with numbers of ranks nearby that have one."""
    near = [
        count for count in range(2, 2 * per_stage) if math.gcd(count, experts) >= min(8, experts)
    ]
    below = [count for count in near if count < per_stage][-1:]
    above = [count for count in near if count > per_stage][:1]
    return (
        f"--ranks {ranks}: no expert-parallel size above 1 divides {per_stage} ranks "
        f"of a stage and {experts} experts; take "
        f"{' or '.join(map(str, below + above))} ranks of a stage, or --ep 1"
    )
