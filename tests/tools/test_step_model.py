"""The time of a step in closed form, the work of layers, and models and machines by name.

Oracles: steps added up by hand; a simulation of stages and microbatches written here, which waits
task by task; the published bubble of interleaved stages; tokens that draw their experts, counted;
limits (balanced loads, free links, one rank); what model cards say.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from seeds import seeds

from megatron_hecate.plan import H100, LayerShape, Link, Placement, Speeds, World
from megatron_hecate.tools.presets import CLUSTERS, MODELS, Cluster, Model
from megatron_hecate.tools.step_model import Prediction, StepModel
from megatron_hecate.tools.work import Group, Work

pytestmark = pytest.mark.fast


def work(peak: list[float], *, trip: float = 0.0, price: float = 0.0) -> Work:
    """One step with a layer for every ``peak``."""
    peaks = np.array([peak], float)
    return Work(peak=peaks, trip=np.full_like(peaks, trip), price=np.full_like(peaks, price))


def seconds(layers: Work, model: StepModel) -> float:
    return float(model.step_seconds(layers)[0])


def test_a_step_added_up_by_hand() -> None:
    """Two layers of 1 s, experts 3 and 4 pairs of 0.1 s, trips of 0.2 s; the backward is twice the compute; 3 times."""
    forward = 2 * 1 + 0.7 + 2 * 2 * 0.2 + 0.5
    backward = 2 * (2 * 1 + 0.7 + 0.5) + 2 * 2 * 0.2
    model = StepModel(dense=1.0, pair=0.1, head=0.5, stages=((0, 1),), microbatches=3)
    layers = work([3, 4], trip=0.2)
    assert seconds(layers, model) == pytest.approx(3 * (forward + backward))
    again = forward - 0.5  # the head is not computed again
    recomputed = dataclasses.replace(model, recompute=True)
    assert seconds(layers, recomputed) == pytest.approx(3 * (forward + backward + again))
    hidden = dataclasses.replace(model, hidden=0.5)
    assert seconds(layers, hidden) == pytest.approx(3 * (forward + backward) - 3 * 8 * 0.1)
    # replicas are priced per step
    priced = work([3, 4], trip=0.2, price=0.7)
    assert seconds(priced, model) == pytest.approx(3 * (forward + backward) + 2 * 0.7)


def test_parts_of_lost_and_won_time_by_hand() -> None:
    """One layer, two microbatches: experts lose 5 pairs of 0.1 s in three passes, all-to-alls 4 trips of 0.3 s."""
    model = StepModel(dense=1.0, pair=0.1, stages=((0,),), microbatches=2)
    prediction = Prediction(
        model=model,
        forced=work([5], trip=0.2),
        stock=work([10], trip=0.5),
        run=work([6], trip=0.1, price=0.4),
    )
    lost, won = zip(*prediction.parts_ms().values(), strict=True)
    assert lost == pytest.approx([2 * 3 * 500, 2 * 4 * 300, 0])
    assert won == pytest.approx([2 * 3 * 400, 2 * 4 * 400, -400])
    assert prediction.lost_of_layers[0] == pytest.approx([sum(lost)])
    assert prediction.won_of_layers[0] == pytest.approx([sum(won)])
    assert prediction.lost_ms - prediction.left_ms == pytest.approx([sum(won)])


def test_a_fit_meets_the_measured_step() -> None:
    """Oracle: the step itself. Stages of unlike layers change places as the slowest one while dense time grows."""
    layers = work([9, 0, 0, 0], trip=0.2)
    model = StepModel(dense=0.1, pair=1.0, head=0.1, stages=((0,), (1, 2, 3)), microbatches=4)
    for share in (0.5, 1.001, 3.0, 50.0):
        measured = share * seconds(layers, model)
        if share < 1:
            with pytest.raises(ValueError, match=r"^\d+\.\d$"):
                model.fitted(layers, measured)
        else:
            assert seconds(layers, model.fitted(layers, measured)) == pytest.approx(measured)


def event_simulation(forward: list[float], backward: list[float], microbatches: int) -> float:
    """Seconds of a step, stock: tasks of each stage, which start when all they depend on have ended.

    Args:
        forward: [P] seconds of a microbatch.
        backward: [P] seconds of a microbatch.
    """
    last = len(forward) - 1
    queue: dict[int, list[tuple[str, int]]] = {}
    for p in range(last + 1):
        warm = min(last - p, microbatches)
        queue[p] = [("F", m) for m in range(warm)]
        for m in range(microbatches):
            queue[p] += [("F", warm + m)] * (warm + m < microbatches) + [("B", m)]
    end: dict[tuple, float] = {}
    free = [0.0] * (last + 1)
    while any(queue.values()):
        for p, tasks in queue.items():
            kind, m = tasks[0] if tasks else ("", 0)
            needed = (kind, m, p - 1 if kind == "F" else p + 1)
            if not tasks or (0 <= needed[2] <= last and needed not in end):
                continue
            free[p] = max(free[p], end.get(needed, 0.0)) + (forward if kind == "F" else backward)[p]
            end[kind, m, p] = free[p]
            tasks.pop(0)
    return max(free)


@seeds(12)
def test_a_step_is_that_of_single_tasks(seed: int) -> None:
    """Exact for one stage; with several, whose tasks wait for each other, at most a quarter too long."""
    rng = np.random.default_rng(seed)
    layers, ranks = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    num_stages = min(int(rng.integers(1, 5)), layers)
    microbatches = int(rng.integers(num_stages, 9))
    loads = rng.integers(0, 50, (layers, ranks))
    times = dict(zip(("dense", "pair", "trip", "head"), rng.random(4).tolist(), strict=True))
    stages = [part.tolist() for part in np.array_split(np.arange(layers), num_stages)]
    trip = times.pop("trip")
    experts = loads.max(axis=1) * times["pair"]  # nobody has all messages before the last rank sent
    forward = [sum(times["dense"] + experts[layer] + 2 * trip for layer in part) for part in stages]
    backward = [2 * time - 2 * len(part) * trip for time, part in zip(forward, stages, strict=True)]
    forward[-1], backward[-1] = forward[-1] + times["head"], backward[-1] + 2 * times["head"]
    exact = event_simulation(forward, backward, microbatches)
    model = StepModel(stages=tuple(map(tuple, stages)), microbatches=microbatches, **times)
    step = seconds(work(loads.max(axis=1).tolist(), trip=trip), model)
    if num_stages == 1:
        assert step == pytest.approx(exact)
    else:
        assert (1 - 1e-9) * exact <= step <= 1.25 * exact


def test_interleaving_shortens_the_bubble() -> None:
    """Oracle: Narayanan et al. (2021): the bubble is (stages - 1) / (chunks x microbatches) of the ideal time."""
    for chunks in (1, 2, 4):
        stages = tuple((0,) * 4 for _ in range(4))
        model = StepModel(dense=1.0, pair=0.0, stages=stages, microbatches=8, chunks=chunks)
        ideal = 8 * 4 * 3.0
        assert seconds(work([0]), model) == pytest.approx(ideal * (1 + 3 / (chunks * 8)))


SHAPE = LayerShape(
    expert_bytes=100.0, grad_bytes=200.0, token_bytes=10.0, token_flops=1.0, microbatches=2
)
SLOW = Speeds(
    intra=Link(1000.0, 0.5),
    inter=Link(100.0, 0.25),
    flops=1.0,
    routing=0.125,
    contention=0.0,
    memory=1200.0,
    launch=0.25,
)


def test_a_placement_becomes_work_by_hand() -> None:
    """Expert 0's 9 pairs, as many from each rank, are shared with rank 1 of the same node, or with rank 2 on node 1."""
    world = World(node=(0, 0, 1), speeds=SLOW)
    homes = Placement.initial(3, 3, num_slots=1)
    loads = np.array([[[9, 0, 3]]])
    group = Group(world=world, shape=SHAPE)
    bare, _ = group.work_of_placements(loads, [[homes]], "nvlink")
    assert bare.peak[0, 0] == 9 / 2 and bare.price[0, 0] == 0
    # 3 pairs from node 1 to the two ranks of node 0: half for each adapter
    between = 3 * 10 / 2 / 2 / 100 + 0.25
    assert bare.trip[0, 0] == pytest.approx(max(0.5 + 3 * 10 / 2 / 1000, between))
    near, prices = group.work_of_placements(loads, [[homes.with_replicas([(0, 1)])]], "nvlink")
    assert near.peak[0, 0] == pytest.approx(5 / 2, abs=0.5) and prices.replicas.tolist() == [
        [[0, 1, 0]]
    ]
    # Routing and further experts in two microbatches: 600 bytes of weights and gradients, both
    # twice. Nothing hides one fetch of 100 bytes and one return of 200.
    fixed = 2 * (0.125 + 0.25 + 600 / 1200)
    assert near.price[0, 0] == pytest.approx(fixed + (0.5 + 0.1) + (0.5 + 0.2))
    far, _ = group.work_of_placements(loads, [[homes.with_replicas([(0, 2)])]], "nvlink")
    # the two ranks of node 0 share their adapters, the one of node 1 receives alone
    assert far.price[0, 0] == pytest.approx(fixed + (0.25 + 1.0) + (0.25 + 2.0))
    # a window of 1 s hides parts of both; 12 % contention of the hidden time
    windows = dataclasses.replace(SHAPE, hidden_seconds=1.0)
    busy = dataclasses.replace(SLOW, contention=0.12)
    hidden = Group(world=World(node=(0, 0, 1), speeds=busy), shape=windows)
    far, prices = hidden.work_of_placements(loads, [[homes.with_replicas([(0, 2)])]], "nvlink")
    exposed = 0.25 + 1.25
    assert far.price[0, 0] == pytest.approx(fixed + exposed + 0.12 * 2)
    assert prices.copying_ms - prices.hidden_ms == pytest.approx(np.array([[1e3 * exposed]]))


@pytest.mark.parametrize(("per_node", "nodes"), [(2, 2), (2, 3), (1, 4), (1, 2)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_token_may_reach_a_node_and_a_rank_once(per_node: int, nodes: int, inside: bool) -> None:
    """Oracle: tokens that draw k ranks at random, counted. The messages between nodes are what lasts here, and those to
    other ranks where there is one node: it has as many ranks as there are nodes else."""
    rng, top_k = np.random.default_rng(0), 4
    node = (0,) * nodes if inside else tuple(rank // per_node for rank in range(per_node * nodes))
    world, latency = World(node=node, speeds=SLOW), (SLOW.intra if inside else SLOW.inter).latency
    even = np.full((1, 1, len(node)), 4 * 2e5)
    every, once = (
        Group(world=world, shape=SHAPE, once=k).work_of_ranks(even).trip[0, 0] - latency
        for k in (0, top_k)
    )
    reached = rng.integers(0, nodes, (200_000, top_k))
    crossing = sum((reached != 0).sum(axis=1))
    messages = sum(len(set(row) - {0}) for row in reached.tolist())
    assert once / every == pytest.approx(messages / crossing, rel=0.01)


def test_even_placements_are_forced_balance_and_one_rank_sends_nothing() -> None:
    for ranks in (1, 4):
        group = Group(world=World(node=(0,) * ranks), shape=SHAPE)
        homes = Placement.initial(8, ranks, num_slots=0)
        loads = np.full((1, 1, 8), 100 * ranks)
        stock, _ = group.work_of_placements(loads, [[homes]], "nvlink")
        forced = group.work_of_ranks(np.full((1, 1, ranks), 800.0))
        assert stock.peak == pytest.approx(forced.peak) and not stock.price.any()
        assert stock.trip == pytest.approx(forced.trip)
        assert forced.trip.any() == (ranks > 1)


def test_presets_have_the_published_number_of_parameters() -> None:
    """Oracle: what the names and model cards say, in billions, all parameters."""
    published = {
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235,
        "deepseek-v3": 671,
        "mixtral-8x7b": 46.7,
    }
    published |= {"mixtral-8x22b": 141, "olmoe": 6.9, "gpt-oss-120b": 116.8, "gpt-oss-20b": 20.9}
    assert set(published) == set(MODELS)
    for name, billions in published.items():
        m = MODELS[name]
        layer = m.attention + 3 * m.hidden * (m.experts * m.ffn + m.shared)
        plain = m.attention + 3 * m.hidden * m.plain_ffn
        total = m.layers * layer + m.plain * plain + 2 * m.vocab * m.hidden
        assert total / 1e9 == pytest.approx(billions, rel=0.01), name


def test_a_cluster_is_a_name_or_a_measured_file(tmp_path: Path) -> None:
    H100.save(tmp_path / "speeds.json", origin="here")
    measured = Cluster.named(str(tmp_path / "speeds.json"), per_node=4)
    assert measured.speeds == H100 and measured.per_node == 4 and measured.memory == 0
    assert Cluster.named("gb200x72") is CLUSTERS["gb200x72"]
    assert Model.named("olmoe,layers=3").layers == 3 and Model.named("olmoe,shared=0").shared == 0
