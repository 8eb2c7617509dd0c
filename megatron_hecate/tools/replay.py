"""Recorded steps replayed: forced balance, stock, and FSSDP with its own planner.

Letters in shapes: T steps, L layers, E experts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transport import LayerBuffer
from megatron_hecate.nvlink.loads import shared_bytes
from megatron_hecate.plan import LayerShape, Placement, plan_replicas
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.replicas.memory_estimate import ExpertMemory
from megatron_hecate.step.forecast import LoadHistory
from megatron_hecate.tools.job_settings import JobSettings
from megatron_hecate.tools.run import Run
from megatron_hecate.tools.step_model import Prediction, StepModel
from megatron_hecate.tools.work import Group, Work

# layers times steps times ranks squared: bound on the planning work of one setup
EFFORT: float = 4e6
# Steps before the counted ones that the forecast sees; older steps have no measurable weight.
HISTORY: int = 64
# dtype of weights by the bytes of a parameter; it determines the optimizer state, too
DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Setup to train; forced balance and stock have no slots.

    Args:
        slots: replica slots per rank and layer.
        lifetime: lifetime of replicas.
        transport: transport of replicas, ``nvlink`` or ``p2p``.
    """

    slots: int = 0
    lifetime: str = "iteration"
    transport: str = "nvlink"

    @property
    def label(self) -> str:
        """Label of FSSDP's setup in the table."""
        slots = f"{self.slots} slot{'s' * (self.slots > 1)}"
        return f"FSSDP, {slots}, {self.lifetime}, {self.transport}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(Setup):
    """Setup to train with its result; means over steps.

    Args:
        name: label in the table.
        seconds: time of a step.
        imbalance: load of the fullest rank over the mean, averaged over steps and layers.
        worst: largest of these ratios of a step and layer.
        memory: memory of a rank's experts.
        parts: seconds per step that the setup gains over stock, by name of `PARTS`; below 0 if it
            loses. Their sum is stock's time less ``seconds``.
        exposed: seconds of a step in which a stage waits for copies.
        sent: bytes of copies that a rank sends in a step.
        used: most replicas that a rank holds in any layer and step.
    """

    name: str
    seconds: float
    imbalance: float
    worst: float
    memory: ExpertMemory
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    exposed: float = 0.0
    sent: float = 0.0
    used: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
    """Steps to replay, with the sizes and speeds of a job.

    Args:
        settings: settings of the job.
        layers: numbers in the trace of the L replayed layers, which stand in for all layers.
        counts: pairs by step, layer and expert, all microbatches, [T, L, E].
        first: first step in the results; earlier steps are history for the forecast.
        excess: `Run.excess` of the steps from ``first`` on, [T, L]; 0 where microbatches are alike.
        model: times of a step.
    """

    settings: JobSettings
    layers: Sequence[int]
    counts: np.ndarray
    first: int
    excess: np.ndarray
    model: StepModel

    @classmethod
    def of(cls, settings: JobSettings, run: Run, *, steps: int) -> Replay:
        """Choose the steps and layers to replay, so that large groups do not take hours.

        Args:
            settings: settings of the job.
            run: record of the job, or loads alone.
            steps: most steps, from the end of the trace.

        Raises:
            ValueError: if a layer is idle.
        """
        # A layer may be idle in single iterations; such steps have no pairs to scale to the job's.
        complete = run.record.load.any(axis=2).all(axis=1)
        if not complete.any():
            raise ValueError("there is no step with tokens in every layer")
        loads = run.record.load[complete]
        # of single microbatches; unknown in groups of another size
        excess = np.zeros(loads.shape[:2])
        if run.excess is not None and run.info.ranks == settings.ep:
            excess = run.excess[complete]
        # Every step is planned from a forecast: a single step is repeated as its own history.
        if len(loads) == 1:
            loads = np.repeat(loads, 3, axis=0)
        # layers times steps
        budget = EFFORT / max(settings.ep, 64) ** 2
        steps = min(steps, len(loads) - 1, max(1, int(budget / 2)))
        num_layers = min(loads.shape[1], max(2, int(budget / steps)))
        layers = np.linspace(0, loads.shape[1] - 1, num_layers).round().astype(int)
        loads = loads[-steps - HISTORY :, layers]
        pairs = settings.tokens * settings.model.top_k * settings.microbatches * settings.ep
        of_model = settings.model.layers
        columns = np.arange(of_model) * num_layers // of_model
        return cls(
            settings=settings,
            layers=layers.tolist(),
            counts=np.rint(loads * (pairs / loads.sum(axis=2, keepdims=True))).astype(np.int64),
            first=len(loads) - steps,
            model=settings.step_model(run, columns),
            excess=np.resize(excess[-steps:, layers], (steps, num_layers)),
        )

    @property
    def loads(self) -> np.ndarray:
        """Pairs of the counted steps, [T, L, E]."""
        return self.counts[self.first :]

    @cached_property
    def rank_loads(self) -> np.ndarray:
        """Pairs of each rank of the counted steps, with experts at home, [T, L, R]."""
        return self.loads.reshape(*self.loads.shape[:2], self.settings.ep, -1).sum(axis=3)

    def shape(self, lifetime: str = "iteration") -> LayerShape:
        """Return the shape of a layer with replicas of a ``lifetime``."""
        per_microbatch = LIFETIMES[lifetime]
        microbatches = self.settings.microbatches
        return self.settings.model.shape(
            fetches=max(1, per_microbatch.fetches * microbatches),
            returns=max(1, per_microbatch.returns * microbatches),
            microbatches=microbatches,
            hidden_seconds=self.model.dense,
        )

    def group(self, lifetime: str = "iteration") -> Group:
        """Return the expert-parallel group with replicas of a ``lifetime``."""
        settings = self.settings
        return Group(world=settings.world, shape=self.shape(lifetime), once=settings.once)

    @cached_property
    def forced(self) -> Work:
        """Work under forced balance, [T, L]."""
        even = np.broadcast_to(self.rank_loads.mean(axis=2, keepdims=True), self.rank_loads.shape)
        return self.group().work_of_ranks(even)

    @cached_property
    def stock(self) -> Work:
        """Work of stock expert parallelism, [T, L]."""
        fullest = self.rank_loads.max(axis=2) + self.excess * self.rank_loads.mean(axis=2)
        return self.group().work_of_ranks(self.rank_loads, fullest=fullest)

    def place(self, setup: Setup) -> list[list[Placement]]:
        """Plan replicas as FSSDP does, from its forecast.

        Returns:
            Placements by counted step and layer.
        """
        group = self.group(setup.lifetime)
        hidden = group.shape.hidden_seconds / group.shape.fetch_seconds(group.world)
        scatters = setup.transport != P2P.name
        cost = group.shape.copy_cost(group.world, hidden=hidden, scatters=scatters)
        homes = Placement.initial(
            self.settings.model.experts, self.settings.ep, num_slots=setup.slots
        )
        limit = self.settings.load_limit(setup.slots)
        history = LoadHistory()
        placed = []
        latest = [homes] * len(self.layers)
        for step, loads in enumerate(self.counts):
            # One plan before the counted steps, since a plan depends on the previous one.
            forecast = history.forecast() if step >= self.first - 1 else None
            if forecast is not None:
                latest = [
                    plan_replicas(
                        load, homes, group.world, cost=cost, previous=previous, limit=limit
                    )
                    for load, previous in zip(forecast, latest, strict=True)
                ]
            placed.append(latest)
            history.append(loads)
        return placed[self.first :]

    def memory(self, setup: Setup) -> ExpertMemory:
        """Estimate the memory of a rank's experts on the first stage."""
        settings = self.settings
        model = settings.model
        buffer = LayerBuffer(
            slots=setup.slots,
            elements=model.expert_elements,
            dtype=DTYPES.get(model.weight_bytes, torch.bfloat16),
            homes=model.experts // settings.ep,
            grad_dtype={2: torch.bfloat16}.get(model.grad_bytes, torch.float32),
        )
        if setup.transport == P2P.name:
            transport_bytes = P2P(SimpleNamespace(), timeout=1.0).extra_bytes([buffer])
        else:
            node_sizes = tuple(Counter(settings.world.node).values())
            transport_bytes = sum(shared_bytes([buffer], node_sizes))
        layers = [buffer] * len(self.model.stages[0])
        memory = ExpertMemory.estimate(layers, setup.lifetime, transport_bytes=transport_bytes)
        return dataclasses.replace(memory, optimizer=memory.optimizer // settings.optimizer_shards)

    def references(self) -> list[Outcome]:
        """Predict forced balance and stock."""
        works = {"forced balance": self.forced, "stock": self.stock}
        return [self._outcome(name, Setup(), work) for name, work in works.items()]

    def predict(self, setup: Setup) -> Outcome:
        """Predict FSSDP with the settings of ``setup``; slots that no plan fills are left out."""
        group = self.group(setup.lifetime)
        work, prices = group.work_of_placements(self.loads, self.place(setup), setup.transport)
        # Quotas are computed in every microbatch, so replicas remove the same share of its
        # imbalance as they remove of the step's.
        mean = self.forced.peak
        excess = self.rank_loads.max(axis=2) / self.settings.microbatches - mean
        share_left = np.divide(
            work.peak - mean, excess, out=np.ones_like(excess), where=excess > 1e-9 * mean
        )
        work = dataclasses.replace(
            work, peak=work.peak + share_left.clip(0, 1) * self.excess * mean
        )
        shape = group.shape
        copy_bytes = shape.fetches * shape.expert_bytes + shape.returns * shape.grad_bytes
        layers_of_rank = self.settings.model.layers / self.settings.pp
        exposed_ms = (prices.copying_ms - prices.hidden_ms).mean(axis=0)
        columns = [list(stage) for stage in self.model.stages]
        num_used = int(prices.replicas.max())
        setup = dataclasses.replace(setup, slots=min(setup.slots, max(1, num_used)))
        return dataclasses.replace(
            self._outcome(setup.label, setup, work),
            exposed=max(exposed_ms[stage].sum() for stage in columns) / 1e3,
            sent=float(prices.replicas.mean()) * copy_bytes * layers_of_rank,
            used=num_used,
        )

    def _outcome(self, name: str, setup: Setup, work: Work) -> Outcome:
        """Predict steps with ``work``."""
        prediction = Prediction(model=self.model, forced=self.forced, stock=self.stock, run=work)
        return Outcome(
            **dataclasses.asdict(setup),
            name=name,
            seconds=float(prediction.run_ms.mean()) / 1e3,
            imbalance=float(work.peak.mean() / self.forced.peak.mean()),
            worst=float((work.peak / self.forced.peak).max()),
            memory=self.memory(setup),
            parts={part: won / 1e3 for part, (_, won) in prediction.parts_ms().items()},
        )

    def fitted(self) -> Replay:
        """Scale the time outside experts and all-to-alls to the measured time of a stock step.

        Raises:
            ValueError: if experts and all-to-alls alone take longer.
        """
        step_ms = self.settings.step_ms
        try:
            model = self.model.fitted(self.stock, step_ms / 1e3)
        except ValueError as error:
            raise ValueError(
                f"a step of {step_ms:g} ms is less than experts and all-to-alls alone take, "
                f"{error}: check what-if's --step-ms, --ranks, --ep and --microbatches, or give "
                "what-if a --cluster file that megatron-hecate measure has written there"
            ) from error
        return dataclasses.replace(self, model=model)
