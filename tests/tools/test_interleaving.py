"""Interleaved pipelines in the simulation: which work runs when, how long it takes, and how much is in flight.

Oracles: the functions by which Megatron's own schedules choose their order, run here task by task; the published
bubble; and what our layers ask for in training.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_hecate.megatron.training_state import forwards_in_flight
from megatron_hecate.plan import World
from megatron_hecate.tools.presets import Model
from megatron_hecate.tools.simulated_job import SimulatedJob
from megatron_hecate.tools.step_model import PipelineSchedule, Timing, Work, simulate

pytestmark = [pytest.mark.fast, pytest.mark.newest]


def seconds(peaks: np.ndarray, timing: Timing, schedule: PipelineSchedule) -> float:
    """Of a step whose layers have these ``peaks`` [L], nothing else."""
    none = np.zeros((1, len(peaks)))
    return float(simulate(Work(peaks[None], *(none,) * 8), timing, schedule).total[0])


def megatron_order(
    p: int, stages: int, chunks: int, microbatches: int
) -> list[tuple[bool, int, int]]:
    """What rank p runs, from the functions by which Megatron's schedules run it."""
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    group = SimpleNamespace(size=lambda: stages, rank=lambda: p)
    p2p = SimpleNamespace(
        pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    total, _, warmup, _ = get_pp_rank_microbatches(
        microbatches, chunks, stages, p2p_communicator=p2p
    )
    table = get_schedule_table(microbatches, chunks, stages)
    order = [(True, table[k][1] * stages + p, table[k][0]) for k in range(warmup)]
    for k in range(
        total - warmup
    ):  # one forward, one backward; the backward's chunks count from the last one
        m, c = table[k + warmup]
        order.append((True, c * stages + p, m))
        m, c = table[k]
        order.append((False, (chunks - 1 - c) * stages + p, m))
    return order + [(False, (chunks - 1 - c) * stages + p, m) for m, c in table[total - warmup :]]


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"), [(1, 1, 3), (2, 1, 5), (4, 1, 2), (2, 2, 2), (2, 3, 6)]
)
@pytest.mark.parametrize("seed", range(3))
def test_interleaved_stages_run_in_megatrons_order(
    stages: int, chunks: int, microbatches: int, seed: int
) -> None:
    """And the step is as long as that of ranks which run Megatron's tables and wait for what they need."""
    rng = np.random.default_rng(seed)
    peaks, send = rng.random(stages * chunks + seed), 0.05
    schedule = PipelineSchedule.even(len(peaks), stages, microbatches=microbatches, chunks=chunks)
    queues = [megatron_order(p, stages, chunks, microbatches) for p in range(stages)]
    assert [schedule.order(p) for p in range(stages)] == queues
    costs, last = (
        [sum(1 + peaks[layer] for layer in virtual) for virtual in schedule.stages],
        stages * chunks - 1,
    )
    end: dict[tuple, float] = {}
    free = [0.0] * stages
    while any(queues):
        ready = [
            p for p in range(stages) if queues[p] and _inputs(queues[p][0], last) <= end.keys()
        ]
        assert ready, f"deadlock: {queues}"
        for p in ready:
            is_forward, v, _ = task = queues[p].pop(0)
            starts = max([free[p]] + [end[needed] + send for needed in _inputs(task, last)])
            free[p] = end[task] = starts + costs[v] * (1 if is_forward else 2)
    got = seconds(peaks, Timing(dense=1.0, pair=1.0, send=send), schedule)
    assert got == pytest.approx(max(free))


def _inputs(task: tuple[bool, int, int], last: int) -> set[tuple[bool, int, int]]:
    is_forward, v, m = task
    before = v - 1 if is_forward else v + 1
    return {(is_forward, before, m)} if 0 <= before <= last else set()


def test_interleaving_shortens_the_bubble() -> None:
    """Oracle: Narayanan et al. (2021): the bubble is (stages - 1) / (chunks x microbatches) of the ideal time."""
    for chunks in (1, 2, 4):
        schedule = PipelineSchedule.even(16, 4, microbatches=8, chunks=chunks)
        ideal = 8 * 4 * 3.0
        assert seconds(np.zeros(16), Timing(dense=1.0, pair=0.0), schedule) == pytest.approx(
            ideal * (1 + 3 / (chunks * 8))
        )


def test_chunks_of_a_stage_wait_one_after_the_other() -> None:
    """Four layers, each its own chunk of two stages: fetches of 3 s behind 1 s of attention, so 2 s exposed in each."""
    schedule = PipelineSchedule.even(4, 2, microbatches=2, chunks=2)
    none = np.zeros((1, 4))
    time = simulate(Work(none, none, none + 3, *(none,) * 6), Timing(dense=1.0, pair=0.0), schedule)
    assert time.exposed[0] == pytest.approx(2 * 2)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (4, 1), (2, 2), (4, 3)])
def test_microbatches_in_flight_are_those_of_training(
    stages: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lifetime ``microbatch`` each has a buffer. Oracle: what layers of the first stage ask for in training."""
    layers = stages * chunks + 1  # the first chunk of the first stage has one more
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    config = SimpleNamespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    job = SimulatedJob(
        model=Model.named(f"olmoe,layers={layers}"),
        layers=(0,),
        counts=np.ones((2, 1, 2, 64), dtype=np.int64),
        first=1,
        world=World(node=(0, 0)),
        timing=Timing(dense=1.0, pair=1.0),
        schedule=PipelineSchedule.even(layers, stages, microbatches=8 * stages, chunks=chunks),
    )
    buffers = job.memory(slots=1, lifetime="layer").replica_weights / (
        2 * job.model.expert_elements
    )
    assert buffers == forwards_in_flight(config, [0, 0, *range(1, chunks)])


def test_memory_of_each_transport() -> None:
    """Oracle: docs/memory.md. A copy of the homes that peers read, or four arriving fp32 gradients and their sum."""
    job = SimulatedJob(
        model=Model.named("olmoe,layers=1"),
        layers=(0,),
        counts=np.ones((2, 1, 4, 64), dtype=np.int64),
        first=1,
        world=World(node=(0, 0, 0, 0)),
        timing=Timing(dense=1.0, pair=1.0),
        schedule=PipelineSchedule.even(1, 1, microbatches=1),
    )
    chunk = 2 * job.model.expert_elements
    expected = {"nvlink": 16 * chunk, "p2p": 5 * 2 * chunk}
    for transport, nbytes in expected.items():
        assert job.memory(slots=2, transport=transport).transport == nbytes
        assert job.memory(transport=transport).transport == 0
