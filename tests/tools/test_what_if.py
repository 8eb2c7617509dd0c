"""What if: the simulator, the presets, the recommendation, and the command as a user calls it.

Oracles: steps added up by hand; an event simulation of single ranks and microbatches written here, which knows nothing
of clocks, peaks or streams; limits (balanced loads, free links, one rank); and that more work or slower links never
shorten a step. A wrong recommendation costs a user weeks, so it is tried on clear cases both ways.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_hecate.__main__ import main
from megatron_hecate.device import launch
from megatron_hecate.plan import H100, LayerShape, Link, Placement, Speeds, World
from megatron_hecate.replicas.buffers import LIFETIMES
from megatron_hecate.tools.presets import CLUSTERS, MODELS, Cluster, Model
from megatron_hecate.tools.run_folder import RunInfo
from megatron_hecate.tools.run_writer import RunWriter
from megatron_hecate.tools.simulate import LayerPlan, Schedule, Timing, Work, simulate
from megatron_hecate.tools.what_if import read_loads

pytestmark = pytest.mark.fast

SMALL = "olmoe,experts=16,layers=4"
BASE = ("--model", SMALL, "--cluster", "h100x8", "--ranks", "8", "--steps", "4")


def work(peak: list[float], *, trip: float = 0.0, fetch: float = 0.0, back: float = 0.0, late: float = 0.0) -> Work:
    """One step with a layer for every ``peak``."""
    ones = np.ones((1, len(peak)))
    columns = (np.array([peak]), *(ones * seconds for seconds in (trip, fetch, back, late, 0.0)), ones * 5, ones * 7)
    return Work(*columns)


def seconds(of: Work, timing: Timing, schedule: Schedule) -> float:
    return float(simulate(of, timing, schedule).total[0])


def test_a_step_added_up_by_hand() -> None:
    """Two layers of 1 s, experts 3 and 4 pairs of 0.1 s, trips of 0.2 s; the backward is twice the compute; 3 times."""
    forward = 2 * 1 + 0.7 + 2 * 2 * 0.2 + 0.5
    backward = 2 * (2 * 1 + 0.7 + 0.5) + 2 * 2 * 0.2
    timing = Timing(dense=1.0, pair=0.1, head=0.5)
    one = Schedule.even(2, 1, microbatches=3)
    assert seconds(work([3, 4], trip=0.2), timing, one) == pytest.approx(3 * (forward + backward))
    again = forward - 0.5  # the head is not computed again
    recomputed = seconds(work([3, 4], trip=0.2), dataclasses.replace(timing, recompute=True), one)
    assert recomputed == pytest.approx(3 * (forward + backward + again))
    assert seconds(work([3, 4], trip=0.2), dataclasses.replace(timing, hidden=0.5), one) == pytest.approx(
        3 * (forward + backward) - 3 * 8 * 0.1
    )


def test_exposed_copies_by_hand() -> None:
    """A fetch of 3 s behind attention of 1 s waits 2 s, once per step; a return of 2 s behind the backward of 2 s none;
    with contention the hidden seconds, 1 and 2, cost half of themselves."""
    timing, schedule = Timing(dense=1.0, pair=0.0), Schedule.even(1, 1, microbatches=4)
    time = simulate(work([1], fetch=3.0, back=2.0), timing, schedule)
    assert time.total[0] == pytest.approx(4 * 3 + 2) and time.exposed[0] == pytest.approx(2)
    assert time.sent[0] == 5 + 7
    contended = dataclasses.replace(timing, contention=0.5)
    assert seconds(work([1], fetch=3.0, back=2.0), contended, schedule) == pytest.approx(4 * 3 + 2 + 0.5 * (1 + 2))
    every = Schedule.even(1, 1, microbatches=4, lifetime="microbatch")
    assert seconds(work([1], fetch=3.0, back=2.0), timing, every) == pytest.approx(4 * (3 + 2))
    twice = simulate(work([1], fetch=3.0), timing, Schedule.even(1, 1, microbatches=4, lifetime="layer"))
    assert twice.total[0] == pytest.approx(4 * (3 + 2 + 3))  # before the experts' backward nothing hides it
    assert twice.sent[0] == 4 * (2 * 5 + 7)


def test_a_fetch_does_not_get_on_during_an_all_to_all() -> None:
    """Layer 1's fetch, 2 s, starts with layer 0. Compute until its experts: 1 + 0.4 + 1 s; trips do not count."""
    timing = Timing(dense=1.0, pair=0.1)
    schedule = Schedule.even(2, 1, microbatches=1)
    bare = work([4, 4], trip=5.0)
    second = dataclasses.replace(bare, fetch=np.array([[0.0, 2.0]]))
    assert seconds(second, timing, schedule) == pytest.approx(seconds(bare, timing, schedule))
    third = dataclasses.replace(bare, fetch=np.array([[0.0, 3.0]]))
    assert seconds(third, timing, schedule) == pytest.approx(seconds(bare, timing, schedule) + 0.6)


def event_simulation(loads: np.ndarray, stages: list[list[int]], microbatches: int, times: dict) -> float:
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
    layers, ranks, stages = int(rng.integers(1, 7)), int(rng.integers(1, 5)), int(rng.integers(1, 5))
    microbatches, stages = int(rng.integers(1, 7)), min(stages, layers)
    loads = rng.integers(0, 50, (layers, ranks))
    times = dict(zip(("dense", "pair", "trip", "head", "send"), rng.random(5).tolist(), strict=True))
    schedule = Schedule.even(layers, stages, microbatches=microbatches)
    assert [layer for stage in schedule.stages for layer in stage] == list(range(layers))
    expected = event_simulation(loads, [list(stage) for stage in schedule.stages], microbatches, times)
    trip = times.pop("trip")
    assert seconds(work(loads.max(axis=1).tolist(), trip=trip), Timing(**times), schedule) == pytest.approx(expected)


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
@pytest.mark.parametrize("lifetime", ["iteration", "microbatch"])
def test_copies_are_waited_for_as_tick_by_tick(seed: int, lifetime: str) -> None:
    rng = np.random.default_rng(seed)
    layers, dense, trip = int(rng.integers(1, 8)), int(rng.integers(0, 6)), int(rng.integers(0, 4))
    peak, fetch = rng.integers(1, 6, layers).tolist(), rng.integers(0, 12, layers).tolist()
    of = dataclasses.replace(work(peak, trip=trip), fetch=np.array([fetch], float))
    schedule = Schedule.even(layers, 1, microbatches=1, lifetime=lifetime)
    timing = Timing(dense=float(dense), pair=1.0)
    backward = 2 * (layers * dense + sum(peak)) + 2 * layers * trip
    forward = forward_by_ticks(peak, dense, trip, fetch, LIFETIMES[lifetime].ahead)
    assert seconds(of, timing, schedule) == forward + backward


SHAPE = LayerShape(expert_bytes=100.0, grad_bytes=200.0, token_bytes=10.0, token_flops=1.0, microbatches=2)
SLOW = Speeds(intra=Link(1000.0, 0.5), inter=Link(100.0, 0.25), flops=1.0, routing=0.125, contention=0.0)


def test_a_placement_becomes_work_by_hand() -> None:
    """Expert 0's 8 pairs, all from rank 0 and 1 of node 0, are shared with rank 2 on node 1."""
    world = World(node=(0, 0, 1), speeds=SLOW)
    homes = Placement.initial(3, 3, num_slots=1)
    load = np.array([[4, 0, 0], [4, 0, 0], [0, 0, 4]])
    bare = Work.of([[LayerPlan.of(load, homes, world, SHAPE)]], world, SHAPE)
    assert bare.peak[0, 0] == 8 / 2 and bare.routing[0, 0] == bare.fetch[0, 0] == 0
    assert bare.trip[0, 0] == pytest.approx(0.5 + 4 * 10 / 2 / 1000)
    plan = LayerPlan.of(load, homes.with_replicas([(0, 1)]), world, SHAPE)
    assert plan.flow.sum(axis=0).tolist() == [4, 4, 4] and plan.flow[1, 1] == 4  # each at home
    near = Work.of([[plan]], world, SHAPE)
    assert near.fetch[0, 0] == pytest.approx(0.5 + 0.1) and near.back[0, 0] == pytest.approx(0.5 + 0.2)
    assert near.trip[0, 0] == 0 and near.routing[0, 0] == 0.125
    far = Work.of([[LayerPlan.of(load, homes.with_replicas([(0, 2)]), world, SHAPE)]], world, SHAPE)
    assert far.fetch[0, 0] == pytest.approx(0.25 + 1.0 / 1)  # the one rank of node 1 receives it alone
    assert far.out[0, 0] == 100 and far.home[0, 0] == 200


def test_a_token_may_reach_a_node_once() -> None:
    world = World(node=(0, 0, 1, 1), speeds=SLOW)
    whole, once = (Work.balanced(80.0, world, SHAPE, crossing=share).trip[0, 0] for share in (1.0, 0.25))
    assert whole == pytest.approx(0.25 + 40 * 10 / 2 / 100) and once == pytest.approx(0.25 + 10 * 10 / 2 / 100)


def test_balanced_loads_are_forced_balance_and_one_rank_sends_nothing() -> None:
    for ranks in (1, 4):
        world = World(node=(0,) * ranks)
        load = np.full((ranks, 8), 100)
        stock = Work.of([[LayerPlan.of(load, Placement.initial(8, ranks, num_slots=0), world, SHAPE)]], world, SHAPE)
        forced = Work.balanced(800.0, world, SHAPE)
        for field in dataclasses.fields(Work):
            assert getattr(stock, field.name) == pytest.approx(getattr(forced, field.name)), field.name
    assert Work.balanced(800.0, World(node=(0,)), SHAPE).trip[0, 0] == 0


def test_free_links_leave_compute_alone() -> None:
    free = dataclasses.replace(SLOW, intra=Link(1e30, 0.0), inter=Link(1e30, 0.0), routing=0.0)
    world, load = World(node=(0, 0, 1, 1), speeds=free), np.full((4, 8), 25)
    placement = Placement.initial(8, 4, num_slots=2).with_replicas([(0, 1), (1, 2)])
    time = simulate(
        Work.of([[LayerPlan.of(load, placement, world, SHAPE)]], world, SHAPE),
        Timing(dense=1.0, pair=0.01),
        Schedule.even(1, 1, microbatches=2),
    )
    assert time.total[0] == pytest.approx(2 * 3 * (1 + 100 * 0.01)) and time.exposed[0] == pytest.approx(0)


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Work)][:6])
def test_more_work_never_shortens_a_step(field: str, lifetime: str) -> None:
    rng = np.random.default_rng(3)
    many = Work(*rng.random((8, 5, 6)))
    timing = Timing(dense=0.4, pair=1.0, head=0.3, send=0.1, contention=0.2, recompute=lifetime == "layer")
    schedule = Schedule.even(6, 2, microbatches=3, lifetime=lifetime)
    more = dataclasses.replace(many, **{field: getattr(many, field) + rng.random((5, 6))})
    assert (simulate(more, timing, schedule).total >= simulate(many, timing, schedule).total).all()


def test_presets_have_the_published_number_of_parameters() -> None:
    """Oracle: what the names and model cards say, in billions, all parameters."""
    published = {"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "deepseek-v3": 671, "mixtral-8x7b": 46.7}
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


def skewed(path: Path, *, hot: int, sources: int = 8) -> str:
    """8 steps, 2 layers, 16 experts; expert 0 gets ``hot`` times as many tokens as the others."""
    share = np.ones(16)
    share[0] = hot
    counts = np.random.default_rng(1).multinomial(40_000, share / share.sum(), size=(8, 2, sources))
    np.savez(path, counts=counts)
    return str(path)


def test_skew_is_worth_it_and_balance_is_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = tmp_path / "plan.json"
    assert main(["--what-if", skewed(tmp_path / "hot.npz", hot=30), *BASE, "--save", str(plan)]) == 0
    text = capsys.readouterr().out
    assert "switch it on, --moe-fssdp-slots" in text and "do not" not in text
    saved = json.loads(plan.read_text())
    forced, stock, *ways = saved["outcomes"]
    best = next(way for way in ways if {k: way[k] for k in ("slots", "lifetime")} == saved["settings"])
    assert best["seconds"] < 0.9 * stock["seconds"] and forced["seconds"] < stock["seconds"] and len(ways) == 9
    assert best["imbalance"] < 1.1 and stock["imbalance"] == pytest.approx(8 * (30 + 1) / 45, rel=0.02)
    assert best["seconds"] <= 1.005 * min(way["seconds"] for way in ways)

    assert main(["--what-if", skewed(tmp_path / "flat.npz", hot=1), *BASE, "--save", str(plan)]) == 0
    assert "do not switch it on: 0.0% of a step to win (imbalance costs " in capsys.readouterr().out
    assert json.loads(plan.read_text())["settings"] is None


def test_a_measured_step_scales_the_rest_of_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The same skew is worth little where experts are a small part of the step."""
    trace = skewed(tmp_path / "hot.npz", hot=30)
    plan = tmp_path / "plan.json"
    assert main(["--what-if", trace, *BASE, "--step-ms", "60000", "--save", str(plan)]) == 0
    assert json.loads(plan.read_text())["outcomes"][1]["seconds"] == pytest.approx(60.0)
    assert "do not switch it on" in capsys.readouterr().out


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    big = "deepseek-v3,experts=16,ffn=65536"
    main(["--what-if", skewed(tmp_path / "hot.npz", hot=30), *BASE[2:], "--model", big])
    assert "it does not fit: experts take " in capsys.readouterr().out


def test_one_rank_has_nothing_to_balance(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = skewed(tmp_path / "hot.npz", hot=30)
    main(["--what-if", trace, "--model", SMALL, "--cluster", "h200x8", "--ranks", "1"])
    assert "do not switch it on: there are no slots, or experts are not spread over ranks" in capsys.readouterr().out


def test_kinds_of_traces(tmp_path: Path) -> None:
    load = np.arange(1, 25).reshape(2, 3, 4)
    np.savez(tmp_path / "sums.npz", load=load)
    assert (read_loads(tmp_path / "sums.npz")[:, :, 0] == load).all()
    info = RunInfo(mode="observe", layers=("layer 1", "layer 2", "layer 3"), num_experts=4, ranks=2, node=(0, 0))
    writer = RunWriter(tmp_path / "run", info)
    for iteration, loads in enumerate(load):
        writer.append(iteration, load=loads)
    writer.close()
    assert (read_loads(tmp_path / "run")[:, :, 0] == load).all()
    olmoe = {"counts": {"model": {"a": {"0": [1, 2], "7": [3, 4]}, "b": {"0": [5, 6], "7": [7, 8]}}}}
    (tmp_path / "olmoe.json").write_text(json.dumps(olmoe))
    assert read_loads(tmp_path / "olmoe.json").tolist() == [[[[6, 8]], [[10, 12]]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "olmo"], "no model is named 'olmo'; there are qwen3-30b-a3b"),
        (
            ["--model", "olmoe,layer=3"],
            "'layer=3' in model 'olmoe,layer=3' must be FIELD=NUMBER, with a field of layers",
        ),
        (["--model", "olmoe"], "has 16 experts, olmoe 64: give loads of this model"),
        (["--cluster", "h100"], "no cluster and no file is named 'h100'; there are a100x8"),
        (["--ep", "3"], "--ep 3 does not divide 8 ranks and 16 experts: take one of [1, 2, 4, 8]"),
        (["--pp", "3"], "--ranks 8 must divide among --pp 3 stages, of 4 at most"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--lifetime", "week"], "--lifetime week: there are iteration, microbatch, layer"),
        (["--slots", "two"], "--slots takes numbers of replicas, as in 1,2,4, got 'two'"),
        (["--step-ms", "0.01"], "is less than experts and all-to-alls alone take"),
        (["--hidden-all-to-all", "2"], "--hidden-all-to-all must be from 0 to 1, got 2.0"),
        (["--save", "no/such/folder.json"], "No such file or directory"),
    ],
)
def test_errors_say_the_way_out(change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--what-if", skewed(tmp_path / "a.npz", hot=3), *BASE, *change])
    error = " ".join(capsys.readouterr().err.split())
    assert stopped.value.code == 2 and message in error, error


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    trace = skewed(tmp_path / "hot.npz", hot=30)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("MEGATRON_HECATE_CACHE", str(tmp_path / "cache"))
    launch._load_for_host.cache_clear()
    with pytest.raises(SystemExit):
        main(["--what-if", trace, *BASE])
    assert "install g++" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(3)}, "holds no loads (KeyError"),
        ({"counts": np.ones((2, 2))}, "loads are float64 of shape (2, 2)"),
        ({"counts": -np.ones((1, 1, 1, 2))}, "loads must be 0 or more, and some in every step and layer"),
        ({"load": np.zeros((1, 1, 2))}, "give a folder of --moe-fssdp-record, an .npz with counts"),
    ],
)
def test_bad_traces(arrays: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError) as error:
        read_loads(tmp_path / "bad.npz")
    assert message in str(error.value)
    with pytest.raises(ValueError, match=r"missing\.npz holds no loads \(FileNotFoundError"):
        read_loads(tmp_path / "missing.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no record of a run"):
        read_loads(tmp_path / "empty")
