"""The critical path of a step.

Oracles: steps added up by hand; a simulation of single ranks and microbatches, and one tick by tick, both written here,
which know nothing of clocks and streams; limits (balanced loads, free links, one rank); and that more work never
shortens a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_hecate.plan import LayerShape, Link, Placement, Speeds, World
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.tools.step_model import PipelineSchedule, Timing, Work, simulate
from megatron_hecate.tools.traffic import LayerPlan

pytestmark = pytest.mark.fast


def work(
    peak: list[float],
    *,
    trip: float = 0.0,
    fetch: float = 0.0,
    back: float = 0.0,
    late: float = 0.0,
) -> Work:
    """One step with a layer for every ``peak``."""
    ones = np.ones((1, len(peak)))
    columns = (
        np.array([peak]),
        *(ones * seconds for seconds in (trip, fetch, back, late, 0.0, 0.0)),
        ones * 5,
        ones * 7,
    )
    return Work(*columns)


def seconds(of: Work, timing: Timing, schedule: PipelineSchedule) -> float:
    return float(simulate(of, timing, schedule).total[0])


def test_a_step_added_up_by_hand() -> None:
    """Two layers of 1 s, experts 3 and 4 pairs of 0.1 s, trips of 0.2 s; the backward is twice the compute; 3 times."""
    forward = 2 * 1 + 0.7 + 2 * 2 * 0.2 + 0.5
    backward = 2 * (2 * 1 + 0.7 + 0.5) + 2 * 2 * 0.2
    timing = Timing(dense=1.0, pair=0.1, head=0.5)
    one = PipelineSchedule.even(2, 1, microbatches=3)
    assert seconds(work([3, 4], trip=0.2), timing, one) == pytest.approx(3 * (forward + backward))
    again = forward - 0.5  # the head is not computed again
    recomputed = seconds(work([3, 4], trip=0.2), dataclasses.replace(timing, recompute=True), one)
    assert recomputed == pytest.approx(3 * (forward + backward + again))
    assert seconds(
        work([3, 4], trip=0.2), dataclasses.replace(timing, hidden=0.5), one
    ) == pytest.approx(3 * (forward + backward) - 3 * 8 * 0.1)


def test_exposed_copies_by_hand() -> None:
    """A fetch of 3 s behind attention of 1 s waits 2 s, once per step; a return of 2 s behind the backward of 2 s none;
    with contention the hidden seconds, 1 and 2, cost half of themselves."""
    timing, schedule = Timing(dense=1.0, pair=0.0), PipelineSchedule.even(1, 1, microbatches=4)
    time = simulate(work([1], fetch=3.0, back=2.0), timing, schedule)
    assert time.total[0] == pytest.approx(4 * 3 + 2) and time.exposed[0] == pytest.approx(2)
    assert time.sent[0] == 5 + 7
    contended = dataclasses.replace(timing, contention=0.5)
    assert seconds(work([1], fetch=3.0, back=2.0), contended, schedule) == pytest.approx(
        4 * 3 + 2 + 0.5 * (1 + 2)
    )
    every = PipelineSchedule.even(1, 1, microbatches=4, lifetime="layer")
    assert seconds(work([1], fetch=3.0, back=2.0), timing, every) == pytest.approx(4 * (3 + 2))
    twice = simulate(
        work([1], fetch=3.0), timing, PipelineSchedule.even(1, 1, microbatches=4, lifetime="layer")
    )
    assert twice.total[0] == pytest.approx(
        4 * (3 + 2 + 3)
    )  # before the experts' backward nothing hides it
    assert twice.sent[0] == 4 * (2 * 5 + 7)


def test_a_second_fetch_begins_one_layer_ahead() -> None:
    """Fetches of 2.5 s, two at once, behind attention of 1 s: 5 s forward. The backward waits 2.5 s; then the other one
    has 2 of its 2.5 s behind attention's backward."""
    schedule = PipelineSchedule.even(2, 1, microbatches=1, lifetime="layer")
    time = simulate(work([0, 0], fetch=2.5), Timing(dense=1.0, pair=0.0), schedule)
    assert time.total[0] == pytest.approx(5 + 2.5 + 2 + 0.5 + 2) and time.exposed[
        0
    ] == pytest.approx(3 + 3)


def test_layers_share_two_buffers_of_gradients() -> None:
    """Returns of 5 s. Layer 0's experts take 10 s backward and begin at 4 s, or when the buffer is free, at 5 s."""
    three, timing = work([5, 0, 0], back=5.0), Timing(dense=1.0, pair=1.0)
    for lifetime, begins in (("iteration", 4), ("microbatch", 5), ("layer", 5)):
        schedule = PipelineSchedule.even(3, 1, microbatches=1, lifetime=lifetime)
        assert seconds(three, timing, schedule) == pytest.approx(8 + begins + 10 + 5), lifetime


def test_further_experts_are_computed_in_forward_and_backward_and_again_where_recomputed() -> None:
    """0.3 s of one layer's further experts: a third in each forward, two thirds in the backward."""
    further = dataclasses.replace(work([1, 1]), computing=np.array([[0.3, 0.0]]))
    schedule = PipelineSchedule.even(2, 1, microbatches=3)
    for recompute, once in ((False, 0.3), (True, 0.4)):
        timing = Timing(dense=1.0, pair=0.5, recompute=recompute)
        more = seconds(further, timing, schedule) - seconds(work([1, 1]), timing, schedule)
        assert more == pytest.approx(3 * once)


def test_routing_is_paid_in_every_microbatch_and_late_copies_once() -> None:
    """Planners that choose late copies anew for every microbatch pay each time. Where replicas live for a microbatch,
    late ones come early from the second on, behind 1 s of attention."""
    routed = dataclasses.replace(work([1, 1], late=0.5), routing=np.array([[0.25, 0.0]]))
    timing, bare = Timing(dense=1.0, pair=0.0), 3 * (3 * 2 + 0.25)
    for lifetime in ("iteration", "layer"):
        schedule = PipelineSchedule.even(2, 1, microbatches=3, lifetime=lifetime)
        time = simulate(routed, timing, schedule)
        assert time.total[0] == pytest.approx(bare + 2 * 0.5) and time.exposed[0] == pytest.approx(
            2 * 0.5
        ), lifetime
    time = simulate(routed, timing, dataclasses.replace(schedule, corrects=True))
    assert time.total[0] == pytest.approx(bare + 3 * 2 * 0.5) and time.exposed[0] == pytest.approx(
        3 * 2 * 0.5
    )


def test_a_late_copy_follows_what_is_already_on_its_way() -> None:
    """Layer 0 fetches nothing early and 0.5 s late; layer 1's early fetch, 3 s, began with layer 0. So the late copy is
    there after 3.5 s instead of 1.5, and layer 1 does not wait any more."""
    two = dataclasses.replace(
        work([0, 0]), fetch=np.array([[0.0, 3.0]]), late=np.array([[0.5, 0.0]])
    )
    time = simulate(two, Timing(dense=1.0, pair=0.0), PipelineSchedule.even(2, 1, microbatches=1))
    assert time.exposed[0] == pytest.approx(2.5) and time.total[0] == pytest.approx(3 * 2 + 2.5)
    recomputed = simulate(
        two,
        Timing(dense=1.0, pair=0.0, recompute=True),
        PipelineSchedule.even(2, 1, microbatches=1),
    )
    assert recomputed.total[0] == pytest.approx(4 * 2 + 2.5)  # copies are there
    anew = simulate(
        two,
        Timing(dense=1.0, pair=0.0, recompute=True),
        PipelineSchedule.even(2, 1, microbatches=1, corrects=True),
    )
    assert anew.total[0] == recomputed.total[0]


def test_a_fetch_does_not_get_on_during_an_all_to_all() -> None:
    """Layer 1's fetch, 2 s, starts with layer 0. Compute until its experts: 1 + 0.4 + 1 s; trips do not count."""
    timing = Timing(dense=1.0, pair=0.1)
    schedule = PipelineSchedule.even(2, 1, microbatches=1)
    bare = work([4, 4], trip=5.0)
    second = dataclasses.replace(bare, fetch=np.array([[0.0, 2.0]]))
    assert seconds(second, timing, schedule) == pytest.approx(seconds(bare, timing, schedule))
    third = dataclasses.replace(bare, fetch=np.array([[0.0, 3.0]]))
    assert seconds(third, timing, schedule) == pytest.approx(seconds(bare, timing, schedule) + 0.6)


def event_simulation(
    loads: np.ndarray, stages: list[list[int]], microbatches: int, times: dict
) -> float:
    """Seconds of a step, stock: single ranks, and tasks that start when all they depend on have ended.

    Args:
        loads: [L, R] pairs of a microbatch.
        times: dense, pair, trip, head, send.
    """
    ranks, last = loads.shape[1], len(stages) - 1
    end: dict[tuple, float] = {}

    def order(p: int) -> list[tuple[str, int]]:
        warm = min(last - p, microbatches)
        tasks, f, b = [("F", m) for m in range(warm)], warm, 0
        while b < microbatches:
            if f < microbatches:
                tasks.append(("F", f))
                f += 1
            tasks.append(("B", b))
            b += 1
        return tasks

    def together(at: list[float], trip: float) -> list[float]:
        """An all-to-all: nobody has all of its messages before the last has sent."""
        return [max(at) + trip] * ranks

    def run(kind: str, p: int, at: list[float]) -> list[float]:
        factor = 1 if kind == "F" else 2
        head = times["head"] * factor if p == last else 0.0
        at = [t + head for t in at] if kind == "B" else at
        for layer in stages[p] if kind == "F" else stages[p][::-1]:
            if kind == "F":
                at = [t + times["dense"] for t in at]
            at = together(at, times["trip"])
            at = [t + factor * loads[layer, r] * times["pair"] for r, t in enumerate(at)]
            at = together(at, times["trip"])
            if kind == "B":
                at = [t + 2 * times["dense"] for t in at]
        return [t + head for t in at] if kind == "F" else at

    queue = {p: order(p) for p in range(last + 1)}
    free = {p: [0.0] * ranks for p in queue}
    while any(queue.values()):
        for p, tasks in queue.items():
            if not tasks:
                continue
            kind, m = tasks[0]
            needs = (kind, m, p - 1 if kind == "F" else p + 1)
            if 0 <= needs[2] <= last and needs not in end:
                continue
            arrives = end.get(needs, -times["send"]) + times["send"]
            free[p] = run(kind, p, [max(t, arrives) for t in free[p]])
            end[kind, m, p] = max(free[p])
            tasks.pop(0)
    return max(max(times_) for times_ in free.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_critical_path_is_that_of_single_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, ranks, stages = (
        int(rng.integers(1, 7)),
        int(rng.integers(1, 5)),
        int(rng.integers(1, 5)),
    )
    microbatches, stages = int(rng.integers(1, 7)), min(stages, layers)
    loads = rng.integers(0, 50, (layers, ranks))
    times = dict(
        zip(("dense", "pair", "trip", "head", "send"), rng.random(5).tolist(), strict=True)
    )
    schedule = PipelineSchedule.even(layers, stages, microbatches=microbatches)
    assert [layer for stage in schedule.stages for layer in stage] == list(range(layers))
    expected = event_simulation(
        loads, [list(stage) for stage in schedule.stages], microbatches, times
    )
    trip = times.pop("trip")
    assert seconds(
        work(loads.max(axis=1).tolist(), trip=trip), Timing(**times), schedule
    ) == pytest.approx(expected)


def forward_by_ticks(peak: list[int], dense: int, trip: int, fetch: list[int], ahead: int) -> int:
    """Ticks of a forward in which every layer's replicas are fetched. A fetch gets on, behind the fetches before it, in
    ticks that are no all-to-all, from the one on in which the layer ``ahead`` of it begins."""
    left, posted, tick = list(fetch), 0, 0

    def pass_(ticks: int, *, copies: bool) -> None:
        nonlocal tick
        for _ in range(ticks):
            tick += 1
            first = next((j for j in range(posted) if left[j]), None)
            if copies and first is not None:
                left[first] -= 1

    for layer, pairs in enumerate(peak):
        posted = min(len(peak), layer + ahead + 1)
        pass_(dense, copies=True)
        while left[layer]:
            pass_(1, copies=True)
        pass_(trip, copies=False)
        pass_(pairs, copies=True)
        pass_(trip, copies=False)
    return tick


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lifetime", ["iteration", "layer"])
def test_copies_are_waited_for_as_tick_by_tick(seed: int, lifetime: str) -> None:
    rng = np.random.default_rng(seed)
    layers, dense, trip = int(rng.integers(1, 8)), int(rng.integers(0, 6)), int(rng.integers(0, 4))
    peak, fetch = rng.integers(1, 6, layers).tolist(), rng.integers(0, 12, layers).tolist()
    of = dataclasses.replace(work(peak, trip=trip), fetch=np.array([fetch], float))
    schedule = PipelineSchedule.even(layers, 1, microbatches=1, lifetime=lifetime)
    timing = Timing(dense=float(dense), pair=1.0)
    backward = 2 * (layers * dense + sum(peak)) + 2 * layers * trip
    forward = forward_by_ticks(peak, dense, trip, fetch, LIFETIMES[lifetime].ahead)
    assert seconds(of, timing, schedule) == forward + backward


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
    """Expert 0's 8 pairs, all from rank 0 and 1 of node 0, are shared with rank 2 on node 1."""
    world = World(node=(0, 0, 1), speeds=SLOW)
    homes = Placement.initial(3, 3, num_slots=1)
    load = np.array([[4, 0, 0], [4, 0, 0], [0, 0, 4]])
    bare = Work.of([[LayerPlan.of(load, homes, homes, world, SHAPE)]], world, SHAPE)
    assert bare.peak[0, 0] == 8 / 2
    assert bare.routing[0, 0] == bare.computing[0, 0] == bare.fetch[0, 0] == 0
    assert bare.trip[0, 0] == pytest.approx(0.5 + 4 * 10 / 2 / 1000)
    one = homes.with_replicas([(0, 1)])
    plan = LayerPlan.of(load, one, one, world, SHAPE)
    assert plan.flow.sum(axis=0).tolist() == [4, 4, 4] and plan.flow[1, 1] == 4  # each at home
    near = Work.of([[plan]], world, SHAPE)
    assert near.fetch[0, 0] == pytest.approx(0.5 + 0.1) and near.back[0, 0] == pytest.approx(
        0.5 + 0.2
    )
    assert near.trip[0, 0] == 0 and near.routing[0, 0] == 0.125
    # 600 bytes of weights and gradients, both twice; the fullest rank has one replica, then two
    assert near.computing[0, 0] == pytest.approx(0.25 + 600 / 1200)
    full = Placement.initial(3, 3, num_slots=2).with_replicas([(0, 1), (2, 1), (0, 2)])
    both = Work.of([[LayerPlan.of(load, full, full, world, SHAPE)]], world, SHAPE)
    assert both.computing[0, 0] == pytest.approx(2 * (0.25 + 600 / 1200))
    two = homes.with_replicas([(0, 2)])
    far = Work.of([[LayerPlan.of(load, two, two, world, SHAPE)]], world, SHAPE)
    assert far.fetch[0, 0] == pytest.approx(
        0.25 + 1.0 / 1
    )  # the one rank of node 1 receives it alone
    assert far.out[0, 0] == 100 and far.home[0, 0] == 200


@pytest.mark.parametrize(("per_node", "nodes"), [(2, 2), (2, 3), (1, 4), (1, 2)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_token_may_reach_a_node_and_a_rank_once(per_node: int, nodes: int, inside: bool) -> None:
    """Oracle: tokens that draw k ranks at random, counted. The messages between nodes are what lasts here, and those to
    other ranks where there is one node: it has as many ranks as there are nodes else."""
    rng, top_k = np.random.default_rng(0), 4
    node = (0,) * nodes if inside else tuple(rank // per_node for rank in range(per_node * nodes))
    world, latency = World(node=node, speeds=SLOW), (SLOW.intra if inside else SLOW.inter).latency
    every, once = (
        Work.balanced(4 * 2e5, world, SHAPE, once=k).trip[0, 0] - latency for k in (0, top_k)
    )
    reached = rng.integers(0, nodes, (200_000, top_k))
    crossing = sum((reached != 0).sum(axis=1))
    messages = sum(len(set(row) - {0}) for row in reached.tolist())
    assert once / every == pytest.approx(messages / crossing, rel=0.01)


def test_balanced_loads_are_forced_balance_and_one_rank_sends_nothing() -> None:
    for ranks in (1, 4):
        world = World(node=(0,) * ranks)
        load = np.full((ranks, 8), 100)
        homes = Placement.initial(8, ranks, num_slots=0)
        stock = Work.of([[LayerPlan.of(load, homes, homes, world, SHAPE)]], world, SHAPE)
        forced = Work.balanced(800.0, world, SHAPE)
        for field in dataclasses.fields(Work):
            assert getattr(stock, field.name) == pytest.approx(getattr(forced, field.name)), (
                field.name
            )
    assert Work.balanced(800.0, World(node=(0,)), SHAPE).trip[0, 0] == 0


def test_free_links_leave_compute_alone() -> None:
    free = dataclasses.replace(SLOW, intra=Link(1e18, 0.0), inter=Link(1e18, 0.0), routing=0.0)
    free = dataclasses.replace(free, memory=1e18, launch=0.0)
    world, load = World(node=(0, 0, 1, 1), speeds=free), np.full((4, 8), 25)
    placement = Placement.initial(8, 4, num_slots=2).with_replicas([(0, 1), (1, 2)])
    time = simulate(
        Work.of([[LayerPlan.of(load, placement, placement, world, SHAPE)]], world, SHAPE),
        Timing(dense=1.0, pair=0.01),
        PipelineSchedule.even(1, 1, microbatches=2),
    )
    assert time.total[0] == pytest.approx(2 * 3 * (1 + 100 * 0.01)) and time.exposed[
        0
    ] == pytest.approx(0)


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Work)][:7])
def test_more_work_never_shortens_a_step(field: str, lifetime: str) -> None:
    rng = np.random.default_rng(3)
    many = Work(*rng.random((9, 5, 6)))
    timing = Timing(
        dense=0.4, pair=1.0, head=0.3, send=0.1, contention=0.2, recompute=lifetime == "layer"
    )
    schedule = PipelineSchedule.even(6, 2, microbatches=3, lifetime=lifetime)
    more = dataclasses.replace(many, **{field: getattr(many, field) + rng.random((5, 6))})
    assert (simulate(more, timing, schedule).total >= simulate(many, timing, schedule).total).all()
